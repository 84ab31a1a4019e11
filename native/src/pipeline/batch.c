/* SPDX-License-Identifier: Apache-2.0 */
/*
 * batch.c - checks a batch before it starts, sets up its state, and writes its results
 *
 * A batch's numbers come from records that were read over a network. This file checks each of them once, before any
 * byte moves; the stages then trust them.
 */
#include <string.h>

#include "pipeline/internal.h"
#include "quantize/quantize.h"

/* ---- Checks -------------------------------------------------------------------------------------------------- */

/* The regions of a piece that must not overlap another piece's. */
enum region { REGION_SLICES, REGION_STORED, REGION_RECEIVED, REGION_SYMBOLS, REGION_ENCODED };

static uint32_t symbol_bytes(const struct ss_group *group) {
    return (uint32_t)(ss_dtype_size(group->dtype) / ss_symbol_size(group->quantizer, group->dtype));
}

static const struct ss_group *group_of(const struct ss_batch *batch, const struct ss_piece *piece) {
    return &batch->groups[piece->group];
}

static int group_is_valid(const struct ss_group *group) {
    if (ss_dtype_size(group->dtype) == 0 || group->vector_length == 0 ||
        (group->memory == NULL && group->memory_size > 0)) {
        return 0;
    }
    switch (group->quantizer) {
    case SS_QUANTIZER_PASSTHROUGH:
    case SS_QUANTIZER_LOSSLESS:
        return 1;
    case SS_QUANTIZER_BINNED:
        return group->dtype != SS_DTYPE_UINT8 && group->scale_vectors != 0;
    case SS_QUANTIZER_WEIGHTED:
        return ss_channels_fit(group->channels, group->dtype, group->vector_length);
    default:
        return 0;
    }
}

static int tables_are_valid(const struct ss_batch *batch) {
    if (batch->piece_count > SS_BATCH_PIECES_MAX || batch->group_count > SS_BATCH_GROUPS_MAX ||
        (batch->group_count > 0 && batch->groups == NULL) ||
        (batch->piece_count > 0 && (batch->pieces == NULL || batch->slices == NULL))) {
        return 0;
    }
    for (uint32_t i = 0; i < batch->group_count; i++) {
        if (!group_is_valid(&batch->groups[i])) {
            return 0;
        }
    }
    return 1;
}

static int scales_are_valid(const struct ss_group *group, const struct ss_slice *slice) {
    switch (group->quantizer) {
    case SS_QUANTIZER_BINNED:
        return slice->scales_length ==
               ((uint64_t)slice->vectors + group->scale_vectors - 1) / group->scale_vectors * sizeof(float);
    case SS_QUANTIZER_WEIGHTED:
        return ss_channels_cover(group->channels, slice->row, slice->vectors) &&
               slice->scales_length <= ss_weighted_exact_max(group->dtype, slice->vectors, group->vector_length);
    default:
        return slice->scales_length == 0;
    }
}

static int slice_is_valid(const struct ss_group *group, const struct ss_slice *slice) {
    uint64_t elements = (uint64_t)slice->vectors * group->vector_length;
    if (elements == 0 || elements > SS_SLICE_BYTES_MAX) {
        return 0;
    }
    uint64_t decoded = elements * ss_symbol_size(group->quantizer, group->dtype);
    if (slice->decoded_length != decoded || decoded > SS_SLICE_BYTES_MAX || !scales_are_valid(group, slice)) {
        return 0;
    }
    uint64_t delivered = decoded * symbol_bytes(group);
    return slice->memory_offset <= group->memory_size && delivered <= group->memory_size - slice->memory_offset;
}

/* Checks what only encoding needs: the slices' bins, and room for the exact vectors. */
static int can_be_encoded(const struct ss_batch *batch, const struct ss_piece *piece) {
    const struct ss_group *group = group_of(batch, piece);
    for (uint32_t i = 0; i < piece->slice_count; i++) {
        const struct ss_slice *slice = &batch->slices[piece->slice_first + i];
        if (group->quantizer == SS_QUANTIZER_BINNED && (slice->bins < 4 || slice->bins > 256 || slice->bins % 2 != 0)) {
            return 0;
        }
        if (group->quantizer == SS_QUANTIZER_WEIGHTED &&
            slice->scales_length != ss_weighted_exact_max(group->dtype, slice->vectors, group->vector_length)) {
            return 0;
        }
    }
    return 1;
}

/* Returns whether the piece can be requested, and its slices are in its body in order and without gaps. */
static int stored_form_is_valid(const struct ss_batch *batch, const struct ss_piece *piece) {
    uint64_t end = 0;
    if (ss_piece_origin(piece) == SS_ORIGIN_SERVER &&
        (piece->key_length == 0 || piece->key_length > sizeof piece->key)) {
        return 0;
    }
    if ((uint32_t)ss_piece_origin(piece) > SS_ORIGIN_NOWHERE ||
        (ss_piece_origin(piece) == SS_ORIGIN_MEMORY && piece->memory == NULL)) {
        return 0;
    }
    for (uint32_t i = 0; i < piece->slice_count; i++) {
        const struct ss_slice *slice = &batch->slices[piece->slice_first + i];
        uint64_t stored = (uint64_t)slice->scales_length + slice->encoded_length;
        if (slice->encoded_length == 0 || slice->offset != end || stored > piece->body_length - end) {
            return 0;
        }
        end += stored;
    }
    return end == piece->body_length && piece->record_offset <= (uint64_t)INT64_MAX - piece->body_length;
}

static int piece_is_valid(const struct ss_batch *batch, const struct ss_piece *piece) {
    if ((uint32_t)piece->codec > SS_CODEC_KVRANS || piece->group >= batch->group_count || piece->chunk == UINT32_MAX ||
        piece->slice_count == 0 || (uint64_t)piece->slice_first + piece->slice_count > batch->slice_count) {
        return 0;
    }
    for (uint32_t i = 0; i < piece->slice_count; i++) {
        if (!slice_is_valid(group_of(batch, piece), &batch->slices[piece->slice_first + i])) {
            return 0;
        }
    }
    return 1;
}

static uint64_t region_offset(const struct ss_piece *piece, enum region region) {
    switch (region) {
    case REGION_SLICES:
        return piece->slice_first;
    case REGION_SYMBOLS:
        return piece->dequantization_offset;
    default:
        return piece->decompression_offset;
    }
}

/* No overflow: at most 2^32 slices of under 2^32 bytes each, and of a piece whose slices were checked. */
static uint64_t region_length(const struct ss_batch *batch, const struct ss_piece *piece, enum region region) {
    if (region == REGION_SLICES) {
        return piece->slice_count;
    }
    if (region == REGION_STORED || region == REGION_RECEIVED) { /* the latter without what has memory */
        int elsewhere = ss_piece_origin(piece) != SS_ORIGIN_SERVER || piece->memory != NULL;
        return region == REGION_RECEIVED && elsewhere ? 0 : piece->body_length;
    }
    uint64_t length = 0;
    for (uint32_t i = 0; i < piece->slice_count; i++) {
        const struct ss_slice *slice = &batch->slices[piece->slice_first + i];
        length += region == REGION_SYMBOLS
                      ? slice->decoded_length
                      : slice->scales_length + (uint64_t)ss_compress_bound(piece->codec, slice->decoded_length);
    }
    return length;
}

static void heap_sift(const struct ss_batch *batch, enum region region, uint32_t *order, uint32_t root,
                      uint32_t count) {
    for (uint32_t child = 2 * root + 1; child < count; child = 2 * root + 1) {
        if (child + 1 < count && region_offset(&batch->pieces[order[child]], region) <
                                     region_offset(&batch->pieces[order[child + 1]], region)) {
            child++;
        }
        if (region_offset(&batch->pieces[order[root]], region) >= region_offset(&batch->pieces[order[child]], region)) {
            return;
        }
        uint32_t swapped = order[root];
        order[root] = order[child];
        order[child] = swapped;
        root = child;
    }
}

/* Sorts pieces by their offset, unless they are sorted, as most are. Heap sort, because qsort() may allocate. */
static void sort_by_offset(const struct ss_batch *batch, enum region region, uint32_t *order) {
    uint32_t count = batch->piece_count;
    uint64_t before = 0;
    int sorted = 1;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t offset = region_offset(&batch->pieces[i], region);
        sorted &= offset >= before;
        before = offset;
        order[i] = i;
    }
    if (sorted) {
        return;
    }
    for (uint32_t root = count / 2; root-- > 0;) {
        heap_sift(batch, region, order, root, count);
    }
    for (uint32_t last = count; last-- > 1;) {
        uint32_t largest = order[0];
        order[0] = order[last];
        order[last] = largest;
        heap_sift(batch, region, order, 0, last);
    }
}

static int regions_fit(const struct ss_batch *batch, enum region region, uint32_t *order, uint64_t buffer_size) {
    sort_by_offset(batch, region, order);
    uint64_t end = 0;
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        const struct ss_piece *piece = &batch->pieces[order[i]];
        uint64_t offset = region_offset(piece, region);
        uint64_t length = region_length(batch, piece, region);
        if (length == 0) {
            continue;
        }
        if (offset < end || offset > buffer_size || length > buffer_size - offset) {
            return 0;
        }
        end = offset + length;
    }
    return 1;
}

static uint32_t node_count(const struct ss_batch *batch, uint32_t socket_count) {
    return socket_count == 0 ? 0 : batch->node_count > 0 ? batch->node_count : 1;
}

static int sockets_are_valid(const struct ss_pipeline *pipeline, const struct ss_batch *batch, const int32_t *sockets,
                             uint32_t socket_count) {
    uint32_t nodes = node_count(batch, socket_count);
    if (nodes > 0 && (sockets == NULL || nodes > pipeline->options.nodes_max || socket_count % nodes != 0 ||
                      socket_count / nodes > pipeline->options.net_threads)) {
        return 0;
    }
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        if (ss_piece_origin(&batch->pieces[i]) == SS_ORIGIN_SERVER && batch->pieces[i].node >= nodes) {
            return 0;
        }
    }
    for (uint32_t i = 0; i < socket_count; i++) {
        for (uint32_t j = 0; j < i; j++) {
            if (sockets[i] == sockets[j]) {
                return 0;
            }
        }
        if (sockets[i] < 0) {
            return 0;
        }
    }
    return 1;
}

static int follows(const struct ss_piece *piece, const struct ss_piece *before) {
    return piece->chunk > before->chunk || (piece->chunk == before->chunk && piece->group > before->group);
}

/* Returns whether the pieces at a request's node are rows of the same records, in the order of the request. */
static int layer_request_is_valid(const struct ss_batch *batch, const struct ss_layers *layers) {
    uint32_t count = 0;
    if (layers->request == NULL || layers->request_size == 0 || layers->keys == 0 ||
        layers->keys > SS_LAYERS_KEYS_MAX || (uint64_t)layers->layers * layers->keys > batch->piece_count ||
        layers->layers == 0 || layers->pieces == NULL) {
        return 0;
    }
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        const struct ss_piece *piece = &batch->pieces[i];
        if (ss_piece_origin(piece) != SS_ORIGIN_SERVER || piece->node != layers->node) {
            continue;
        }
        uint32_t key = count % layers->keys;
        if (count == layers->layers * layers->keys || layers->pieces[count] != i || piece->asking ||
            piece->body_length > UINT32_MAX || piece->group != batch->pieces[layers->pieces[key]].group ||
            piece->chunk != batch->pieces[layers->pieces[key]].chunk ||
            (key > 0 && !follows(piece, &batch->pieces[layers->pieces[key - 1]]))) {
            return 0;
        }
        count++;
    }
    return count == layers->layers * layers->keys;
}

/* Returns whether all requests for layers are valid: at most one for each node, over its only socket. */
static int layers_are_valid(const struct ss_batch *batch, uint32_t socket_count) {
    if (batch->layers_count > 0 && (batch->layers == NULL || socket_count != node_count(batch, socket_count))) {
        return 0;
    }
    for (uint32_t i = 0; i < batch->layers_count; i++) {
        const struct ss_layers *layers = &batch->layers[i];
        if (layers->node >= socket_count || (i > 0 && layers->node <= batch->layers[i - 1].node) ||
            !layer_request_is_valid(batch, layers)) {
            return 0;
        }
    }
    return 1;
}

enum ss_result ss_fetch_check(struct ss_pipeline *pipeline, const struct ss_batch *batch, const int32_t *sockets,
                              uint32_t socket_count) {
    if (!tables_are_valid(batch) || !sockets_are_valid(pipeline, batch, sockets, socket_count) ||
        !layers_are_valid(batch, socket_count) || !ss_progress_is_valid(batch)) {
        return SS_BAD_ARGUMENT;
    }
    uint64_t dma_bytes = 0;
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        const struct ss_piece *piece = &batch->pieces[i];
        if (!piece_is_valid(batch, piece) || !stored_form_is_valid(batch, piece)) {
            return SS_BAD_ARGUMENT;
        }
        dma_bytes += region_length(batch, piece, REGION_SYMBOLS) * symbol_bytes(group_of(batch, piece));
    }
    enum region received = pipeline->capabilities.plain_memory ? REGION_RECEIVED : REGION_STORED;
    if (!regions_fit(batch, REGION_SLICES, pipeline->fetch_order, batch->slice_count) ||
        !regions_fit(batch, received, pipeline->fetch_order, pipeline->decompression.size)) {
        return SS_BAD_ARGUMENT;
    }
    if (!pipeline->options.fused &&
        (!regions_fit(batch, REGION_SYMBOLS, pipeline->fetch_order, pipeline->dequantization.size) ||
         dma_bytes > pipeline->dma_source.size)) {
        return SS_BAD_ARGUMENT;
    }
    return ss_batch_memory_check(pipeline, batch, pipeline->capabilities.plain_memory != 0);
}

enum ss_result ss_encode_check(struct ss_pipeline *pipeline, const struct ss_batch *batch) {
    if (!tables_are_valid(batch)) {
        return SS_BAD_ARGUMENT;
    }
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        if (!piece_is_valid(batch, &batch->pieces[i]) || !can_be_encoded(batch, &batch->pieces[i])) {
            return SS_BAD_ARGUMENT;
        }
        if (ss_codec_implementation(batch->pieces[i].codec) == NULL) {
            return SS_NOT_SUPPORTED;
        }
    }
    if (!regions_fit(batch, REGION_SLICES, pipeline->encode_order, batch->slice_count) ||
        !regions_fit(batch, REGION_ENCODED, pipeline->encode_order, pipeline->store_buffer.size)) {
        return SS_BAD_ARGUMENT;
    }
    return ss_batch_memory_check(pipeline, batch, 1); /* the CPU reads plain memory */
}

/* ---- State and results ---------------------------------------------------------------------------------------- */

/* Sets the initial state of each piece. A piece of a codec that was not built in fails at once. */
static void pieces_begin(struct ss_pipeline *pipeline, struct ss_batch *batch) {
    struct ss_fetch *fetch = &pipeline->fetch;
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        struct ss_piece *piece = &batch->pieces[i];
        struct ss_piece_state *state = &pipeline->piece_states[i];
        state->chunk = piece->chunk;
        state->group = &fetch->groups[piece->group];
        state->answers = ss_source_of(piece)->answers(batch, i, fetch->net_threads);
        piece->error[0] = '\0';
        atomic_store(&state->remaining, piece->slice_count + state->answers);
        atomic_store(&state->result, SS_OK);
        state->symbols_bytes = region_length(batch, piece, REGION_SYMBOLS);
        if (ss_codec_implementation(piece->codec) == NULL) {
            ss_piece_fail(state, SS_NOT_SUPPORTED);
        }
    }
}

/* Assigns each piece its region of each buffer. A piece that is received into its own memory needs no region. */
static void pieces_place(struct ss_pipeline *pipeline, const struct ss_batch *batch) {
    uint8_t *dma_source = pipeline->dma_source.data;
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        const struct ss_piece *piece = &batch->pieces[i];
        struct ss_piece_state *state = &pipeline->piece_states[i];
        if (ss_piece_origin(piece) == SS_ORIGIN_SERVER && piece->memory != NULL &&
            pipeline->capabilities.plain_memory) {
            state->stored = (uint8_t *)(uintptr_t)piece->memory;
        } else {
            state->stored = pipeline->decompression.data + piece->decompression_offset;
        }
        if (!pipeline->options.fused) {
            state->symbols = pipeline->dequantization.data + piece->dequantization_offset;
            state->dma_source = dma_source;
            dma_source += state->symbols_bytes * state->group->symbol_bytes;
        }
    }
}

void ss_fetch_begin(struct ss_pipeline *pipeline, struct ss_batch *batch, const int32_t *sockets,
                    uint32_t socket_count) {
    struct ss_fetch *fetch = &pipeline->fetch;
    fetch->batch = batch;
    for (uint32_t i = 0; i < batch->layers_count; i++) {
        batch->layers[i].refused = 0;
        batch->layers[i].error[0] = '\0';
    }
    fetch->sockets = sockets;
    fetch->node_count = node_count(batch, socket_count);
    fetch->net_threads = fetch->node_count > 0 ? socket_count / fetch->node_count : 1;
    fetch->number++;
    atomic_store(&fetch->abort_result, SS_OK);
    atomic_store(&fetch->broken, 0);
    atomic_store(&fetch->out_of_sync, 0);
    atomic_store(&fetch->os_error, 0);
    atomic_store(&fetch->received_bytes, 0);
    atomic_store(&fetch->delivered_bytes, 0);
    atomic_store(&fetch->rate, batch->rate);
    atomic_store(&fetch->pace_ns, ss_now_ns());
    atomic_store(&fetch->work, fetch->net_threads);
    for (uint32_t i = 0; i < batch->group_count; i++) {
        fetch->groups[i].group = &batch->groups[i];
        fetch->groups[i].symbol_bytes = symbol_bytes(&batch->groups[i]);
        atomic_store(&fetch->groups[i].chunks, UINT32_MAX);
    }
    pieces_begin(pipeline, batch);
    pieces_place(pipeline, batch);
    ss_progress_begin(pipeline);
}

/* Returns the result of a piece of a quiet batch. If the batch ended early, unfinished useful pieces get its result. */
static enum ss_result piece_result(struct ss_pipeline *pipeline, uint32_t piece) {
    struct ss_piece_state *state = &pipeline->piece_states[piece];
    enum ss_result aborted = (enum ss_result)atomic_load(&pipeline->fetch.abort_result);
    enum ss_result result = (enum ss_result)atomic_load(&state->result);
    if (result != SS_OK || atomic_load(&state->remaining) == 0) {
        return result;
    }
    if (aborted == SS_OK || !ss_piece_useful(state)) {
        return SS_SKIPPED;
    }
    ss_group_ends(state->group, state->chunk);
    return aborted;
}

enum ss_result ss_fetch_finish(struct ss_pipeline *pipeline) {
    struct ss_fetch *fetch = &pipeline->fetch;
    struct ss_batch *batch = fetch->batch;
    enum ss_result first = SS_OK;
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        enum ss_result result = piece_result(pipeline, i);
        batch->pieces[i].result = result;
        if (first == SS_OK && result != SS_SKIPPED) {
            first = result;
        }
    }
    batch->received_bytes = atomic_load(&fetch->received_bytes);
    batch->delivered_bytes = atomic_load(&fetch->delivered_bytes);
    batch->sockets_in_sync = !atomic_load(&fetch->out_of_sync);
    return first;
}
