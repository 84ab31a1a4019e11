/* SPDX-License-Identifier: Apache-2.0 */
/*
 * round.c - a round on paper: what is checked before it starts, what failed, what came of it
 *
 * A round's numbers come from records that were read over a network, so every one of them is checked here, once,
 * before any byte moves; behind this file the stages trust them.
 *
 * Failure. Chunks are a prefix chain: a chunk is of use only if all before it arrived. So the lowest failing chunk
 * decides: everything before it is completed, everything behind it is dropped.
 */
#include <string.h>

#include "pipeline/internal.h"

/* ---- Checks -------------------------------------------------------------------------------------------------- */

/* The regions of a chunk that must not overlap another chunk's. */
enum region { REGION_STORED, REGION_RECEIVED, REGION_SYMBOLS, REGION_ENCODED };

static uint32_t symbol_bytes(const struct ss_round *round) {
    return round->quantizer == SS_QUANTIZER_BINNED ? (uint32_t)ss_dtype_size(round->dtype) : 1;
}

static int layout_is_valid(const struct ss_round *round) {
    if (round->chunk_count > SS_ROUND_CHUNKS_MAX || ss_dtype_size(round->dtype) == 0 || round->vector_length == 0) {
        return 0;
    }
    if (round->chunk_count > 0 && (round->chunks == NULL || round->slices == NULL || round->destination == NULL)) {
        return 0;
    }
    switch (round->quantizer) {
    case SS_QUANTIZER_PASSTHROUGH:
    case SS_QUANTIZER_LOSSLESS:
        return 1;
    case SS_QUANTIZER_BINNED:
        return round->dtype != SS_DTYPE_UINT8 && round->scale_vectors != 0;
    default:
        return 0;
    }
}

static int slice_is_valid(const struct ss_round *round, const struct ss_slice *slice) {
    int binned = round->quantizer == SS_QUANTIZER_BINNED;
    uint64_t elements = (uint64_t)slice->vectors * round->vector_length;
    if (elements == 0 || elements > SS_SLICE_BYTES_MAX) {
        return 0;
    }
    uint64_t decoded = binned ? elements : elements * ss_dtype_size(round->dtype);
    uint64_t scales =
        binned ? ((uint64_t)slice->vectors + round->scale_vectors - 1) / round->scale_vectors * sizeof(float) : 0;
    if (slice->decoded_length != decoded || decoded > SS_SLICE_BYTES_MAX || slice->scales_length != scales) {
        return 0;
    }
    uint64_t delivered = decoded * symbol_bytes(round);
    return slice->destination_offset <= round->destination_size &&
           delivered <= round->destination_size - slice->destination_offset;
}

/* What only encoding needs of the slices: decoding takes any symbols. */
static int bins_are_valid(const struct ss_round *round, const struct ss_chunk *chunk) {
    for (uint32_t i = 0; round->quantizer == SS_QUANTIZER_BINNED && i < chunk->slice_count; i++) {
        uint32_t bins = round->slices[chunk->slice_first + i].bins;
        if (bins < 4 || bins > 256 || bins % 2 != 0) {
            return 0;
        }
    }
    return 1;
}

/* The chunk can be asked for, and its slices lie in its body in order and without gaps. */
static int stored_form_is_valid(const struct ss_round *round, const struct ss_chunk *chunk) {
    uint64_t end = 0;
    if (chunk->memory == NULL && (chunk->key_length == 0 || chunk->key_length > sizeof chunk->key)) {
        return 0;
    }
    for (uint32_t i = 0; i < chunk->slice_count; i++) {
        const struct ss_slice *slice = &round->slices[chunk->slice_first + i];
        uint64_t stored = (uint64_t)slice->scales_length + slice->encoded_length;
        if (slice->encoded_length == 0 || slice->offset != end || stored > chunk->body_length - end) {
            return 0;
        }
        end += stored;
    }
    return end == chunk->body_length && chunk->record_offset <= (uint64_t)INT64_MAX - chunk->body_length;
}

static int chunk_is_valid(const struct ss_round *round, uint32_t index) {
    const struct ss_chunk *chunk = &round->chunks[index];
    uint64_t before = index == 0 ? 0 : (uint64_t)chunk[-1].slice_first + chunk[-1].slice_count;
    if ((uint32_t)chunk->codec > SS_CODEC_KVRANS || chunk->slice_count == 0 || chunk->slice_first < before ||
        (uint64_t)chunk->slice_first + chunk->slice_count > round->slice_count) {
        return 0;
    }
    for (uint32_t i = 0; i < chunk->slice_count; i++) {
        if (!slice_is_valid(round, &round->slices[chunk->slice_first + i])) {
            return 0;
        }
    }
    return 1;
}

static uint64_t region_offset(const struct ss_chunk *chunk, enum region region) {
    return region == REGION_SYMBOLS ? chunk->dequantization_offset : chunk->decompression_offset;
}

/* No overflow: at most 2^32 slices of under 2^32 bytes each, and of a chunk whose slices were checked. */
static uint64_t region_length(const struct ss_round *round, const struct ss_chunk *chunk, enum region region) {
    if (region == REGION_STORED || region == REGION_RECEIVED) { /* the latter without what is read where it lies */
        return region == REGION_RECEIVED && chunk->memory != NULL ? 0 : chunk->body_length;
    }
    uint64_t length = 0;
    for (uint32_t i = 0; i < chunk->slice_count; i++) {
        const struct ss_slice *slice = &round->slices[chunk->slice_first + i];
        length += region == REGION_SYMBOLS
                      ? slice->decoded_length
                      : slice->scales_length + (uint64_t)ss_compress_bound(chunk->codec, slice->decoded_length);
    }
    return length;
}

static void heap_sift(const struct ss_round *round, enum region region, uint32_t *order, uint32_t root,
                      uint32_t count) {
    for (uint32_t child = 2 * root + 1; child < count; child = 2 * root + 1) {
        if (child + 1 < count && region_offset(&round->chunks[order[child]], region) <
                                     region_offset(&round->chunks[order[child + 1]], region)) {
            child++;
        }
        if (region_offset(&round->chunks[order[root]], region) >= region_offset(&round->chunks[order[child]], region)) {
            return;
        }
        uint32_t swapped = order[root];
        order[root] = order[child];
        order[child] = swapped;
        root = child;
    }
}

/* Sorts chunks by their offset. A heap, because qsort() may allocate. */
static void sort_by_offset(const struct ss_round *round, enum region region, uint32_t *order) {
    uint32_t count = round->chunk_count;
    for (uint32_t i = 0; i < count; i++) {
        order[i] = i;
    }
    for (uint32_t root = count / 2; root-- > 0;) {
        heap_sift(round, region, order, root, count);
    }
    for (uint32_t last = count; last-- > 1;) {
        uint32_t largest = order[0];
        order[0] = order[last];
        order[last] = largest;
        heap_sift(round, region, order, 0, last);
    }
}

static int regions_fit(const struct ss_round *round, enum region region, uint32_t *order, uint64_t buffer_size) {
    sort_by_offset(round, region, order);
    uint64_t end = 0;
    for (uint32_t i = 0; i < round->chunk_count; i++) {
        const struct ss_chunk *chunk = &round->chunks[order[i]];
        uint64_t offset = region_offset(chunk, region);
        uint64_t length = region_length(round, chunk, region);
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

static uint32_t node_count(const struct ss_round *round, uint32_t socket_count) {
    return socket_count == 0 ? 0 : round->node_count > 0 ? round->node_count : 1;
}

/* Whether bodies that lie in memory are read there, or copied to where those that are received go. */
static int reads_in_place(const struct ss_pipeline *pipeline) {
    return pipeline->capabilities.reads_plain && pipeline->options.memory_management;
}

static int sockets_are_valid(const struct ss_pipeline *pipeline, const struct ss_round *round, const int32_t *sockets,
                             uint32_t socket_count) {
    uint32_t nodes = node_count(round, socket_count);
    if (nodes > 0 && (sockets == NULL || nodes > pipeline->options.nodes_max || socket_count % nodes != 0 ||
                      socket_count / nodes > pipeline->options.net_threads)) {
        return 0;
    }
    for (uint32_t i = 0; i < round->chunk_count; i++) {
        if (round->chunks[i].memory == NULL && round->chunks[i].node >= nodes) {
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

enum ss_result ss_fetch_check(struct ss_pipeline *pipeline, const struct ss_round *round, const int32_t *sockets,
                              uint32_t socket_count) {
    if (!layout_is_valid(round) || !sockets_are_valid(pipeline, round, sockets, socket_count)) {
        return SS_BAD_ARGUMENT;
    }
    uint64_t dma_bytes = 0;
    for (uint32_t i = 0; i < round->chunk_count; i++) {
        if (!chunk_is_valid(round, i) || !stored_form_is_valid(round, &round->chunks[i])) {
            return SS_BAD_ARGUMENT;
        }
        dma_bytes += region_length(round, &round->chunks[i], REGION_SYMBOLS) * symbol_bytes(round);
    }
    enum region received = reads_in_place(pipeline) ? REGION_RECEIVED : REGION_STORED;
    if (!regions_fit(round, received, pipeline->fetch_order, pipeline->decompression.size)) {
        return SS_BAD_ARGUMENT;
    }
    if (!pipeline->options.fused &&
        (!regions_fit(round, REGION_SYMBOLS, pipeline->fetch_order, pipeline->dequantization.size) ||
         dma_bytes > pipeline->dma_source.size)) {
        return SS_BAD_ARGUMENT;
    }
    return ss_round_memory_check(pipeline, round);
}

enum ss_result ss_encode_check(struct ss_pipeline *pipeline, const struct ss_round *round) {
    if (!layout_is_valid(round)) {
        return SS_BAD_ARGUMENT;
    }
    for (uint32_t i = 0; i < round->chunk_count; i++) {
        if (!chunk_is_valid(round, i) || !bins_are_valid(round, &round->chunks[i])) {
            return SS_BAD_ARGUMENT;
        }
        if (ss_codec_implementation(round->chunks[i].codec) == NULL) {
            return SS_NOT_SUPPORTED;
        }
    }
    if (!regions_fit(round, REGION_ENCODED, pipeline->encode_order, pipeline->store_buffer.size)) {
        return SS_BAD_ARGUMENT;
    }
    return round->registered == NULL ? SS_OK : ss_round_memory_check(pipeline, round); /* the CPU reads plain memory */
}

/* ---- Failure and outcome ------------------------------------------------------------------------------------- */

static int backend_takes(const struct ss_backend_capabilities *capabilities, const struct ss_round *round,
                         const struct ss_chunk *chunk) {
    int takes = (capabilities->codecs >> chunk->codec & 1) != 0;
    for (uint32_t i = 0; i < chunk->slice_count; i++) {
        takes &= round->slices[chunk->slice_first + i].decoded_length <= capabilities->slice_bytes_max;
    }
    return takes;
}

/* Where the chunk lies in each buffer. Without memory management that is known when its buffers are made. */
static void place_chunk(struct ss_pipeline *pipeline, const struct ss_chunk *chunk, struct ss_chunk_state *state,
                        uint64_t dma_base) {
    int placed = pipeline->options.memory_management != 0;
    int staged = placed && !pipeline->options.fused;
    if (chunk->memory != NULL && reads_in_place(pipeline)) {
        state->stored = (uint8_t *)(uintptr_t)chunk->memory; /* which nobody writes */
    } else {
        state->stored = placed ? pipeline->decompression.data + chunk->decompression_offset : NULL;
    }
    state->symbols = staged ? pipeline->dequantization.data + chunk->dequantization_offset : NULL;
    state->dma_source = staged ? pipeline->dma_source.data + dma_base : NULL;
}

void ss_fetch_begin(struct ss_pipeline *pipeline, struct ss_round *round, const int32_t *sockets,
                    uint32_t socket_count) {
    struct ss_fetch *fetch = &pipeline->fetch;
    fetch->round = round;
    fetch->sockets = sockets;
    fetch->node_count = node_count(round, socket_count);
    fetch->net_threads = fetch->node_count > 0 ? socket_count / fetch->node_count : 1;
    fetch->number++;
    fetch->symbol_bytes = symbol_bytes(round);
    atomic_store(&fetch->first_failed, round->chunk_count);
    atomic_store(&fetch->abort_result, SS_OK);
    atomic_store(&fetch->broken, 0);
    atomic_store(&fetch->out_of_sync, 0);
    atomic_store(&fetch->os_error, 0);
    atomic_store(&fetch->received_bytes, 0);
    atomic_store(&fetch->delivered_bytes, 0);
    atomic_store(&fetch->work, fetch->net_threads);
    uint64_t dma_base = 0;
    for (uint32_t i = 0; i < round->chunk_count; i++) {
        struct ss_chunk_state *state = &pipeline->chunk_states[i];
        state->answers = ss_source_of(&round->chunks[i])->answers(round, i, fetch->net_threads);
        round->chunks[i].error[0] = '\0';
        atomic_store(&state->remaining, round->chunks[i].slice_count + state->answers);
        atomic_store(&state->result, SS_OK);
        state->symbols_bytes = region_length(round, &round->chunks[i], REGION_SYMBOLS);
        place_chunk(pipeline, &round->chunks[i], state, dma_base);
        dma_base += state->symbols_bytes * fetch->symbol_bytes;
        if (!backend_takes(&pipeline->capabilities, round, &round->chunks[i])) {
            ss_fetch_fail(pipeline, i, SS_NOT_SUPPORTED, 0);
        }
    }
    int whole = !pipeline->options.chunked_pipeline && round->chunk_count > 0;
    atomic_store(&fetch->open_chunks, whole ? 1 : round->chunk_count);
    atomic_store(&fetch->barrier, whole ? pipeline->chunk_states[0].answers : 0);
}

void ss_fetch_fail(struct ss_pipeline *pipeline, uint32_t chunk, enum ss_result result, int broken) {
    struct ss_fetch *fetch = &pipeline->fetch;
    uint32_t expected = SS_OK;
    atomic_compare_exchange_strong(&pipeline->chunk_states[chunk].result, &expected, (uint32_t)result);
    uint32_t lowest = atomic_load(&fetch->first_failed);
    while (chunk < lowest && !atomic_compare_exchange_weak(&fetch->first_failed, &lowest, chunk)) {
    }
    if (broken) {
        atomic_store(&fetch->broken, 1);
        ss_fetch_wake_net(pipeline);
    }
}

static int is_redirection(const char *text, size_t length) {
    return (length > 6 && memcmp(text, "MOVED ", 6) == 0) || (length > 4 && memcmp(text, "ASK ", 4) == 0);
}

void ss_fetch_refused(struct ss_pipeline *pipeline, uint32_t chunk, const char *text, size_t length) {
    struct ss_chunk *refused = &pipeline->fetch.round->chunks[chunk];
    int redirected = pipeline->options.chunked_pipeline && is_redirection(text, length);
    uint32_t expected = SS_OK;
    if (atomic_compare_exchange_strong(&pipeline->chunk_states[chunk].result, &expected,
                                       redirected ? SS_REDIRECTED : SS_REFUSED)) {
        size_t kept = length < sizeof refused->error - 1 ? length : sizeof refused->error - 1;
        memcpy(refused->error, text, kept);
        refused->error[kept] = '\0';
    }
    if (!redirected) {
        ss_fetch_fail(pipeline, chunk, SS_REFUSED, 0);
    }
}

void ss_fetch_abort(struct ss_pipeline *pipeline, enum ss_result result) {
    uint32_t expected = SS_OK;
    atomic_compare_exchange_strong(&pipeline->fetch.abort_result, &expected, (uint32_t)result);
    ss_fetch_wake_net(pipeline);
}

void ss_chunk_part_done(struct ss_pipeline *pipeline, uint32_t chunk) {
    if (atomic_fetch_sub(&pipeline->chunk_states[chunk].remaining, 1) == 1) {
        ss_chunk_unmap(pipeline, chunk);
    }
}

int ss_fetch_drops(struct ss_pipeline *pipeline, uint32_t chunk) {
    struct ss_fetch *fetch = &pipeline->fetch;
    return chunk >= atomic_load_explicit(&fetch->first_failed, memory_order_relaxed) ||
           atomic_load_explicit(&fetch->abort_result, memory_order_relaxed) != SS_OK;
}

enum ss_result ss_fetch_finish(struct ss_pipeline *pipeline) {
    struct ss_fetch *fetch = &pipeline->fetch;
    struct ss_round *round = fetch->round;
    enum ss_result first = SS_OK;
    for (uint32_t i = 0; i < round->chunk_count; i++) {
        struct ss_chunk_state *state = &pipeline->chunk_states[i];
        enum ss_result result = (enum ss_result)atomic_load(&state->result);
        if (result == SS_OK && atomic_load(&state->remaining) > 0) {
            enum ss_result aborted = (enum ss_result)atomic_load(&fetch->abort_result);
            result = first == SS_OK && aborted != SS_OK ? aborted : SS_SKIPPED;
        }
        round->chunks[i].result = result;
        ss_chunk_unmap(pipeline, i);
        if (first == SS_OK) {
            first = result;
        }
    }
    round->received_bytes = atomic_load(&fetch->received_bytes);
    round->delivered_bytes = atomic_load(&fetch->delivered_bytes);
    round->sockets_in_sync = !atomic_load(&fetch->out_of_sync);
    return first;
}
