/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ablation.c - what a batch does where a part of the design is switched off, to measure what that part is
 * good for (ShadowServe section 6.4)
 *
 * No chunked pipeline: pieces go one by one through the stages, and each stage has the machine to itself. Slices that
 * are through with a stage are not handed on; the last one of their piece hands on all of them. The piece behind is
 * asked for when this one is delivered, and a failure ends the batch.
 *
 * No memory management: a piece's buffers are mapped, touched and locked when it is asked for, with the pages that any
 * allocation gets, registered with the device where there is one, and unmapped when it was delivered. One piece at a
 * time: a device's tables have one lock.
 */
#include <stdlib.h>
#include <string.h>

#include "pipeline/internal.h"

/* Slices handed on at a time. */
enum { PUSH_MAX = 64 };

/* What a piece has: as stored, its symbols, its DMA source. */
enum { PLACES = 3 };

struct place {
    struct ss_buffer buffer;
    void *handle; /* the backend's; NULL also of one that needs none */
};

struct ablation {
    pthread_mutex_t mapping;  /* held for as long as registering takes */
    pthread_mutex_t lock;     /* of 'places', for moments */
    _Atomic uint32_t barrier; /* slices of the open piece that are still in their stage */
    uint32_t piece_count;     /* of the last batch */
    struct place places[SS_BATCH_PIECES_MAX][PLACES];
};

static struct ablation *ablation_of(const struct ss_pipeline *pipeline) {
    return pipeline->executor_state;
}

/* ---- No memory management ------------------------------------------------------------------------------------ */

static void place_close(struct ss_pipeline *pipeline, struct place *place) {
    if (place->handle != NULL) {
        pipeline->backend->memory_close(pipeline->device, place->handle);
    }
    ss_buffer_unmap(&place->buffer);
}

static enum ss_result place_open(struct ss_pipeline *pipeline, uint64_t size, struct place *place) {
    uint64_t locked = 0; /* nobody's business: it is gone before anyone asks */
    *place = (struct place){0};
    if (ss_buffer_map(&place->buffer, size, 0, pipeline->options.pin_memory != 0, &locked) != SS_OK) {
        return SS_NO_MEMORY;
    }
    if (size == 0) {
        return SS_OK;
    }
    const struct ss_memory memory = {.kind = SS_MEMORY_LOCAL, .address = place->buffer.data, .size = size};
    uint8_t *address; /* the same one: it is this process's */
    return pipeline->backend->memory_open(pipeline->device, &memory, &place->handle, &address);
}

static void piece_unmap(struct ss_pipeline *pipeline, uint32_t piece) {
    struct ablation *ablation = ablation_of(pipeline);
    struct place places[PLACES];
    pthread_mutex_lock(&ablation->lock);
    memcpy(places, ablation->places[piece], sizeof places);
    memset(ablation->places[piece], 0, sizeof places);
    pthread_mutex_unlock(&ablation->lock);
    for (int i = 0; i < PLACES; i++) {
        place_close(pipeline, &places[i]);
    }
    pipeline->piece_states[piece].stored = NULL;
}

/* Unmaps what is left of the last batch: where it failed. */
static void pieces_unmap(struct ss_pipeline *pipeline) {
    for (uint32_t i = 0; i < ablation_of(pipeline)->piece_count; i++) {
        piece_unmap(pipeline, i);
    }
}

static enum ss_result piece_map(struct ss_pipeline *pipeline, uint32_t piece) {
    struct ablation *ablation = ablation_of(pipeline);
    struct ss_piece_state *state = &pipeline->piece_states[piece];
    int fused = pipeline->options.fused != 0;
    const uint64_t sizes[PLACES] = {pipeline->fetch.batch->pieces[piece].body_length, fused ? 0 : state->symbols_bytes,
                                    fused ? 0 : state->symbols_bytes * state->group->symbol_bytes};
    struct place places[PLACES] = {0};
    enum ss_result result = SS_OK;
    for (int i = 0; i < PLACES && result == SS_OK; i++) {
        result = place_open(pipeline, sizes[i], &places[i]);
    }
    for (int i = 0; i < PLACES && result != SS_OK; i++) {
        place_close(pipeline, &places[i]);
    }
    if (result != SS_OK) {
        return result;
    }
    pthread_mutex_lock(&ablation->lock);
    memcpy(ablation->places[piece], places, sizeof places);
    pthread_mutex_unlock(&ablation->lock);
    state->stored = places[0].buffer.data;
    state->symbols = places[1].buffer.data;
    state->dma_source = places[2].buffer.data;
    return SS_OK;
}

/* A walk, for the dozens of pieces of what is measured. */
static void *ablation_memory_at(void *argument, const uint8_t *address) {
    struct ss_pipeline *pipeline = argument;
    struct ablation *ablation = ablation_of(pipeline);
    void *handle = NULL;
    pthread_mutex_lock(&ablation->lock);
    for (uint32_t i = 0; i < ablation->piece_count * PLACES && handle == NULL; i++) {
        const struct place *place = &ablation->places[i / PLACES][i % PLACES];
        uint64_t offset = (uintptr_t)address - (uintptr_t)place->buffer.data; /* wraps where it is below */
        if (place->handle != NULL && offset < place->buffer.size) {
            handle = place->handle;
        }
    }
    pthread_mutex_unlock(&ablation->lock);
    return handle;
}

/* ---- No chunked pipeline ------------------------------------------------------------------------------------- */

/* Sends all slices of a piece to the next stage. The caller still counts as work, so the batch cannot end meanwhile. */
static void piece_push(struct ss_pipeline *pipeline, struct ss_queue *queue, uint32_t index) {
    struct ss_fetch *fetch = &pipeline->fetch;
    const struct ss_piece *piece = &fetch->batch->pieces[index];
    struct ss_item items[PUSH_MAX];
    uint64_t decoded = 0;
    uint32_t count = 0;
    if (ss_fetch_drops(pipeline, index)) {
        return;
    }
    atomic_store(&ablation_of(pipeline)->barrier, piece->slice_count);
    atomic_fetch_add(&fetch->work, piece->slice_count);
    for (uint32_t slice = piece->slice_first; slice < piece->slice_first + piece->slice_count; slice++) {
        items[count++] = (struct ss_item){.decoded_before = decoded, .piece = index, .slice = slice};
        decoded += fetch->batch->slices[slice].decoded_length;
        if (count == PUSH_MAX || slice + 1 == piece->slice_first + piece->slice_count) {
            ss_queue_push(queue, items, count);
            count = 0;
        }
    }
}

/* Opens the first piece from 'index' on that is of use; wakes also where there is none: nothing is to wait any more. */
static void piece_open(struct ss_pipeline *pipeline, uint32_t index) {
    struct ss_fetch *fetch = &pipeline->fetch;
    while (index < fetch->batch->piece_count && !ss_piece_useful(&pipeline->piece_states[index])) {
        index++; /* no source begins it */
    }
    if (index < fetch->batch->piece_count) {
        atomic_store(&fetch->open_pieces, index + 1);
    }
    ss_fetch_wake_net(pipeline);
}

/* ---- The executor -------------------------------------------------------------------------------------------- */

static enum ss_result ablation_open(struct ss_pipeline *pipeline) {
    struct ablation *ablation = calloc(1, sizeof *ablation);
    if (ablation == NULL) {
        return SS_NO_MEMORY;
    }
    pthread_mutex_init(&ablation->mapping, NULL);
    pthread_mutex_init(&ablation->lock, NULL);
    pipeline->executor_state = ablation;
    if (pipeline->options.memory_management) {
        return ss_executor_flow.open(pipeline);
    }
    pipeline->decompression.size = pipeline->options.decompression_bytes; /* no more than limits */
    pipeline->dequantization.size = pipeline->options.dequantization_bytes;
    pipeline->dma_source.size = pipeline->options.dma_source_bytes;
    pipeline->capabilities.reads_plain = 0; /* what lies in memory gets buffers as what is received does */
    return SS_OK;
}

static void ablation_close(struct ss_pipeline *pipeline) {
    if (ablation_of(pipeline) != NULL) {
        pieces_unmap(pipeline);
        pthread_mutex_destroy(&ablation_of(pipeline)->mapping);
        pthread_mutex_destroy(&ablation_of(pipeline)->lock);
        free(pipeline->executor_state);
    }
    ss_executor_flow.close(pipeline);
}

static void ablation_begin(struct ss_pipeline *pipeline) {
    pieces_unmap(pipeline);
    ablation_of(pipeline)->piece_count = pipeline->fetch.batch->piece_count;
    atomic_store(&pipeline->fetch.open_pieces, pipeline->fetch.batch->piece_count);
    if (pipeline->options.memory_management) {
        ss_executor_flow.begin(pipeline);
    }
    if (!pipeline->options.chunked_pipeline) {
        atomic_store(&pipeline->fetch.open_pieces, 0);
        piece_open(pipeline, 0);
    }
}

static enum ss_result ablation_make_place(struct ss_pipeline *pipeline, uint32_t piece) {
    enum ss_result result = SS_OK;
    if (pipeline->options.memory_management) {
        return ss_executor_flow.make_place(pipeline, piece);
    }
    pthread_mutex_lock(&ablation_of(pipeline)->mapping); /* another connection may want the same piece */
    if (pipeline->piece_states[piece].stored == NULL) {
        result = piece_map(pipeline, piece);
    }
    pthread_mutex_unlock(&ablation_of(pipeline)->mapping);
    return result;
}

static void ablation_pass(struct ss_pipeline *pipeline, enum ss_stage stage, const struct ss_item *items,
                          uint32_t count) {
    if (pipeline->options.chunked_pipeline) {
        ss_executor_flow.pass(pipeline, stage, items, count);
    } else if (stage != SS_STAGE_NET) { /* received slices wait for the last answer */
        if (atomic_fetch_sub(&ablation_of(pipeline)->barrier, count) == count) {
            piece_push(pipeline, ss_queue_behind(pipeline, stage), items[0].piece);
        }
        ss_fetch_done(pipeline, count);
    }
}

static void ablation_part_done(struct ss_pipeline *pipeline, uint32_t piece, uint32_t left) {
    if (left == 0 && !pipeline->options.memory_management) {
        piece_unmap(pipeline, piece);
    }
    if (pipeline->options.chunked_pipeline) {
        return;
    }
    if (left == 0) {
        piece_open(pipeline, piece + 1);
    } else if (left == pipeline->fetch.batch->pieces[piece].slice_count) { /* that was the last answer */
        piece_push(pipeline, &pipeline->decompress_queue, piece);
    }
}

static enum ss_result ablation_failure(struct ss_pipeline *pipeline, enum ss_result result) {
    struct ss_fetch *fetch = &pipeline->fetch;
    if (pipeline->options.chunked_pipeline) {
        return result;
    }
    for (uint32_t i = 0; i < fetch->batch->group_count; i++) {
        ss_group_ends(&fetch->groups[i], 0); /* what is before it in the list is there */
    }
    ss_fetch_wake_net(pipeline);
    return result == SS_REDIRECTED ? SS_REFUSED : result;
}

static const struct ss_executor ablation = {
    .open = ablation_open,
    .close = ablation_close,
    .begin = ablation_begin,
    .make_place = ablation_make_place,
    .pass = ablation_pass,
    .part_done = ablation_part_done,
    .failure = ablation_failure,
    .memory_at = ablation_memory_at,
};

const struct ss_executor *ss_executor_of(const struct ss_pipeline_options *options) {
    return options->chunked_pipeline && options->memory_management ? &ss_executor_flow : &ablation;
}
