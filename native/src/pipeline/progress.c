/* SPDX-License-Identifier: Apache-2.0 */
/*
 * progress.c - progress word: the number of leading layers in place, visible in other processes
 *
 * A waiting process needs no call: the word is in the memory that the layers are delivered to. It is written with
 * release order after the layers, and only while the batch runs, so a quiet batch does not write here either. This file
 * never reads the word, since the waiting process may write any value to it.
 */
#define _GNU_SOURCE 1
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pipeline/internal.h"

int ss_progress_is_valid(const struct ss_batch *batch) {
    return batch->progress == NULL ||
           ((uintptr_t)batch->progress % sizeof *batch->progress == 0 && batch->layers_first <= batch->layers_end &&
            batch->layers_end - batch->layers_first <= SS_BATCH_LAYERS_MAX);
}

void ss_progress_tell(uint32_t *progress, uint32_t layers) {
    atomic_store_explicit((_Atomic uint32_t *)progress, layers, memory_order_release);
    (void)syscall(SYS_futex, progress, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void advance(struct ss_pipeline *pipeline) {
    struct ss_progress *progress = &pipeline->fetch.progress;
    const struct ss_batch *batch = pipeline->fetch.batch;
    uint32_t count = batch->layers_end - batch->layers_first;
    pthread_mutex_lock(&pipeline->progress_lock);
    uint32_t before = progress->leading;
    while (progress->leading < count && atomic_load(&progress->missing[progress->leading]) == 0) {
        progress->leading++;
    }
    if (progress->leading > before) {
        ss_progress_tell(batch->progress, batch->layers_first + progress->leading);
    }
    pthread_mutex_unlock(&pipeline->progress_lock);
}

static _Atomic uint32_t *counted(struct ss_pipeline *pipeline, uint32_t piece) {
    const struct ss_batch *batch = pipeline->fetch.batch;
    uint32_t layer = batch->pieces[piece].layer;
    if (batch->progress == NULL || layer < batch->layers_first || layer >= batch->layers_end) {
        return NULL;
    }
    return &pipeline->fetch.progress.missing[layer - batch->layers_first];
}

void ss_progress_begin(struct ss_pipeline *pipeline) {
    const struct ss_batch *batch = pipeline->fetch.batch;
    struct ss_progress *progress = &pipeline->fetch.progress;
    if (batch->progress == NULL) {
        return;
    }
    progress->leading = 0;
    for (uint32_t i = 0; i < batch->layers_end - batch->layers_first; i++) {
        atomic_store(&progress->missing[i], 0);
    }
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        _Atomic uint32_t *missing = counted(pipeline, i);
        if (missing != NULL) {
            atomic_fetch_add(missing, 1);
        }
    }
    advance(pipeline);
}

void ss_progress_piece(struct ss_pipeline *pipeline, uint32_t piece) {
    _Atomic uint32_t *missing = counted(pipeline, piece);
    if (missing != NULL && atomic_load(&pipeline->piece_states[piece].result) == SS_OK &&
        atomic_fetch_sub(missing, 1) == 1) {
        advance(pipeline);
    }
}

uint32_t ss_progress_wait(const uint32_t *progress, uint32_t seen, uint64_t timeout_ns) {
    const _Atomic uint32_t *word = (const _Atomic uint32_t *)progress;
    uint32_t value = atomic_load_explicit(word, memory_order_acquire);
    if (value == seen) {
        const struct timespec timeout = ss_timespec(timeout_ns);
        (void)syscall(SYS_futex, progress, FUTEX_WAIT, seen, &timeout, NULL, 0);
        value = atomic_load_explicit(word, memory_order_acquire);
    }
    return value;
}
