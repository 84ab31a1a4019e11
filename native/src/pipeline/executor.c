/* SPDX-License-Identifier: Apache-2.0 */
/*
 * executor.c - how a batch goes through the pipeline: buffers that are there before it, and slices that are handed on
 * as they come
 */
#include "pipeline/internal.h"

static enum ss_result buffers_open(struct ss_pipeline *pipeline) {
    const struct ss_pipeline_options *options = &pipeline->options;
    int lock = options->pin_memory != 0;
    uint64_t *locked = &pipeline->locked_bytes;
    enum ss_result result = ss_buffer_map(&pipeline->decompression, options->decompression_bytes, 1, lock, locked);
    if (result == SS_OK && !options->fused) {
        result = ss_buffer_map(&pipeline->dequantization, options->dequantization_bytes, 1, lock, locked);
    }
    if (result == SS_OK && !options->fused) {
        result = ss_buffer_map(&pipeline->dma_source, options->dma_source_bytes, 1, lock, locked);
    }
    return result;
}

static void buffers_close(struct ss_pipeline *pipeline) {
    ss_buffer_unmap(&pipeline->decompression);
    ss_buffer_unmap(&pipeline->dequantization);
    ss_buffer_unmap(&pipeline->dma_source);
}

/* Places each piece in each buffer; all may be asked for at once. */
static void pieces_place(struct ss_pipeline *pipeline) {
    const struct ss_batch *batch = pipeline->fetch.batch;
    uint8_t *dma_source = pipeline->dma_source.data;
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        const struct ss_piece *piece = &batch->pieces[i];
        struct ss_piece_state *state = &pipeline->piece_states[i];
        if (ss_piece_origin(piece) == SS_ORIGIN_SERVER && piece->memory != NULL && pipeline->capabilities.reads_plain) {
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
    atomic_store(&pipeline->fetch.open_pieces, batch->piece_count);
}

/* What lies in memory is decoded there, if it can be; nobody writes to it. */
static enum ss_result piece_find(struct ss_pipeline *pipeline, uint32_t index) {
    const struct ss_piece *piece = &pipeline->fetch.batch->pieces[index];
    if (ss_piece_origin(piece) == SS_ORIGIN_MEMORY && pipeline->capabilities.reads_plain) {
        pipeline->piece_states[index].stored = (uint8_t *)(uintptr_t)piece->memory;
    }
    return SS_OK;
}

struct ss_queue *ss_queue_behind(struct ss_pipeline *pipeline, enum ss_stage stage) {
    return stage == SS_STAGE_NET          ? &pipeline->decompress_queue
           : stage == SS_STAGE_DECOMPRESS ? &pipeline->dequantize_queue
                                          : &pipeline->dma_queue;
}

static void slices_pass(struct ss_pipeline *pipeline, enum ss_stage stage, const struct ss_item *items,
                        uint32_t count) {
    if (stage == SS_STAGE_NET) {
        atomic_fetch_add(&pipeline->fetch.work, count);
    }
    ss_queue_push(ss_queue_behind(pipeline, stage), items, count);
}

static void part_done(struct ss_pipeline *pipeline, uint32_t piece, uint32_t left) {
    (void)pipeline;
    (void)piece;
    (void)left;
}

static enum ss_result failure(struct ss_pipeline *pipeline, enum ss_result result) {
    (void)pipeline;
    return result;
}

const struct ss_executor ss_executor_flow = {
    .open = buffers_open,
    .close = buffers_close,
    .begin = pieces_place,
    .make_place = piece_find,
    .pass = slices_pass,
    .part_done = part_done,
    .failure = failure,
};
