/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fetch_state.c - the state of the running fetch: its work, its failures, and the end of its pieces
 *
 * Failure. The chunks of a group are a prefix chain: a chunk is useful only if it is complete and all earlier ones are.
 * So each group has a bound, the lowest chunk with a failed piece. Pieces before the bound are completed, wherever they
 * are in the list; all others are dropped.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "pipeline/internal.h"

void ss_worker_ready(struct ss_pipeline *pipeline, enum ss_result result) {
    int error = errno;
    pthread_mutex_lock(&pipeline->lock);
    pipeline->threads_ready++;
    if (pipeline->ready_result == SS_OK) {
        pipeline->ready_result = result;
        pipeline->ready_error = error;
    }
    pthread_cond_signal(&pipeline->ready);
    pthread_mutex_unlock(&pipeline->lock);
}

void ss_fetch_done(struct ss_pipeline *pipeline, uint64_t count) {
    if (atomic_fetch_sub(&pipeline->fetch.work, count) == count) {
        pthread_mutex_lock(&pipeline->lock);
        pthread_cond_signal(&pipeline->quiet);
        pthread_mutex_unlock(&pipeline->lock);
    }
}

void ss_fetch_wake_net(struct ss_pipeline *pipeline) {
    uint64_t one = 1;
    for (uint32_t i = 0; i < pipeline->options.net_threads; i++) {
        ssize_t written = write(pipeline->workers[i].wake_event, &one, sizeof one); /* full: it wakes anyway */
        (void)written;
    }
}

void ss_group_ends(struct ss_group_state *group, uint32_t chunk) {
    uint32_t lowest = atomic_load(&group->chunks);
    while (chunk < lowest && !atomic_compare_exchange_weak(&group->chunks, &lowest, chunk)) {
    }
}

void ss_piece_fail(struct ss_piece_state *state, enum ss_result result) {
    uint32_t expected = SS_OK;
    atomic_compare_exchange_strong(&state->result, &expected, (uint32_t)result);
    ss_group_ends(state->group, state->chunk);
}

void ss_fetch_fail(struct ss_pipeline *pipeline, uint32_t piece, enum ss_result result, int broken) {
    ss_piece_fail(&pipeline->piece_states[piece], result);
    if (broken) {
        atomic_store(&pipeline->fetch.broken, 1);
    }
    ss_fetch_wake_net(pipeline); /* awaited pieces may no longer be of use */
}

void ss_fetch_abort(struct ss_pipeline *pipeline, enum ss_result result) {
    uint32_t expected = SS_OK;
    atomic_compare_exchange_strong(&pipeline->fetch.abort_result, &expected, (uint32_t)result);
    ss_fetch_wake_net(pipeline);
}

/* Copies the body of a delivered piece to its 'memory', unless it was received there. */
static void piece_leave(const struct ss_piece_state *state, const struct ss_piece *piece) {
    if (ss_piece_origin(piece) == SS_ORIGIN_SERVER && piece->memory != NULL && piece->memory != state->stored) {
        memcpy((uint8_t *)(uintptr_t)piece->memory, state->stored, piece->body_length);
    }
}

void ss_piece_part_done(struct ss_pipeline *pipeline, uint32_t piece) {
    uint32_t left = atomic_fetch_sub(&pipeline->piece_states[piece].remaining, 1) - 1;
    if (left == 0) {
        pipeline->fetch.batch->pieces[piece].ended_ns = ss_now_ns();
        piece_leave(&pipeline->piece_states[piece], &pipeline->fetch.batch->pieces[piece]);
        ss_progress_piece(pipeline, piece);
    }
}

int ss_fetch_drops(struct ss_pipeline *pipeline, uint32_t piece) {
    return !ss_piece_useful(&pipeline->piece_states[piece]) ||
           atomic_load_explicit(&pipeline->fetch.abort_result, memory_order_relaxed) != SS_OK;
}
