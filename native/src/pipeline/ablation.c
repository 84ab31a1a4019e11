/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ablation.c - what a round does where a part of the design is switched off, to measure what that part is
 * good for (ShadowServe section 6.4)
 *
 * No chunked pipeline: pieces go one by one through the stages, and each stage has the machine to itself. Slices that
 * are through with a stage are not handed on; the last one of their piece hands on all of them. The piece behind is
 * asked for when this one is delivered.
 *
 * No memory management: a piece's buffers are mapped, touched and locked when it is asked for, with the pages that any
 * allocation gets, and unmapped when it was delivered. Locking stands for registering memory with a device, which a CPU
 * has none of: on a DPU that also means entering every page into the device's tables, so it costs more there.
 */
#include "pipeline/internal.h"

/* Slices handed on at a time. */
enum { PUSH_MAX = 64 };

/* ---- No chunked pipeline ------------------------------------------------------------------------------------- */

/* The queue behind a stage; NULL behind the last one. */
static struct ss_queue *queue_behind(struct ss_pipeline *pipeline, enum ss_stage stage) {
    switch (stage) {
    case SS_STAGE_NET:
        return &pipeline->decompress_queue;
    case SS_STAGE_DECOMPRESS:
        return pipeline->options.fused ? NULL : &pipeline->dequantize_queue;
    case SS_STAGE_DEQUANTIZE:
        return &pipeline->dma_queue;
    default:
        return NULL;
    }
}

/* Sends all slices of a piece to the next stage. The caller still counts as work, so the round cannot end meanwhile. */
static void piece_push(struct ss_pipeline *pipeline, struct ss_queue *queue, uint32_t index) {
    struct ss_fetch *fetch = &pipeline->fetch;
    const struct ss_piece *piece = &fetch->round->pieces[index];
    struct ss_item items[PUSH_MAX];
    uint64_t decoded = 0;
    uint32_t count = 0;
    atomic_store(&fetch->barrier, piece->slice_count);
    atomic_fetch_add(&fetch->work, piece->slice_count);
    for (uint32_t slice = piece->slice_first; slice < piece->slice_first + piece->slice_count; slice++) {
        items[count++] = (struct ss_item){.decoded_before = decoded, .piece = index, .slice = slice};
        decoded += fetch->round->slices[slice].decoded_length;
        if (count == PUSH_MAX || slice + 1 == piece->slice_first + piece->slice_count) {
            ss_queue_push(queue, items, count);
            count = 0;
        }
    }
}

void ss_piece_open(struct ss_pipeline *pipeline, uint32_t index) {
    struct ss_fetch *fetch = &pipeline->fetch;
    while (index < fetch->round->piece_count && !ss_piece_useful(&pipeline->piece_states[index])) {
        index++; /* no source begins it */
    }
    if (index < fetch->round->piece_count) {
        atomic_store(&fetch->barrier, pipeline->piece_states[index].answers);
        atomic_store(&fetch->open_pieces, index + 1);
    }
    ss_fetch_wake_net(pipeline); /* also where this was the last, or failed: there is nothing to wait for any more */
}

void ss_barrier_leave(struct ss_pipeline *pipeline, enum ss_stage stage, uint32_t piece) {
    if (atomic_fetch_sub(&pipeline->fetch.barrier, 1) > 1) {
        return;
    }
    struct ss_queue *next = queue_behind(pipeline, stage);
    if (next == NULL || ss_fetch_drops(pipeline, piece)) {
        ss_piece_open(pipeline, piece + 1);
    } else {
        piece_push(pipeline, next, piece);
    }
}

/* ---- No memory management ------------------------------------------------------------------------------------ */

static enum ss_result map_all(struct ss_pipeline *pipeline, uint32_t index) {
    struct ss_piece_state *state = &pipeline->piece_states[index];
    int fused = pipeline->options.fused != 0;
    const uint64_t sizes[3] = {pipeline->fetch.round->pieces[index].body_length, fused ? 0 : state->symbols_bytes,
                               fused ? 0 : state->symbols_bytes * state->group->symbol_bytes};
    uint64_t locked = 0; /* nobody's business: it is gone before anyone asks */
    for (int i = 0; i < 3; i++) {
        int lock = pipeline->options.pin_memory != 0;
        enum ss_result result = ss_buffer_map(&state->mapped[i], sizes[i], 0, lock, &locked);
        if (result != SS_OK) {
            ss_piece_unmap(pipeline, index);
            return SS_NO_MEMORY;
        }
    }
    state->stored = state->mapped[0].data;
    state->symbols = state->mapped[1].data;
    state->dma_source = state->mapped[2].data;
    return SS_OK;
}

enum ss_result ss_piece_map(struct ss_pipeline *pipeline, uint32_t piece) {
    enum ss_result result = SS_OK;
    if (pipeline->options.memory_management) {
        return SS_OK;
    }
    pthread_mutex_lock(&pipeline->piece_memory); /* another connection may want the same piece */
    if (pipeline->piece_states[piece].stored == NULL) {
        result = map_all(pipeline, piece);
    }
    pthread_mutex_unlock(&pipeline->piece_memory);
    return result;
}

void ss_piece_unmap(struct ss_pipeline *pipeline, uint32_t piece) {
    if (pipeline->options.memory_management) {
        return;
    }
    for (int i = 0; i < 3; i++) {
        ss_buffer_unmap(&pipeline->piece_states[piece].mapped[i]);
    }
}
