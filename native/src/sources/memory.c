/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.c - pieces whose bodies are in this process, such as in a pool's arena
 *
 * A piece is complete at once, but perhaps later than the batch begins: reads of a device are awaited. A decoder that
 * can read any memory reads the bodies in place, without a copy; an accelerator that reaches only the pipeline's
 * buffers gets a copy there.
 */
#include <stdlib.h>
#include <string.h>

#include "sources/source.h"

struct memory {
    const struct ss_feed *feed;
    uint32_t first; /* nothing before it is left */
    uint32_t next;  /* to look at in this pass */
    int waits;      /* this pass has skipped pieces that cannot begin yet */
    uint8_t begun[];
};

static int memory_takes(const struct ss_piece *piece) {
    return ss_piece_origin(piece) != SS_ORIGIN_SERVER;
}

static uint32_t memory_answers(const struct ss_batch *batch, uint32_t piece, uint32_t threads) {
    (void)batch;
    (void)piece;
    (void)threads;
    return 1;
}

static void *memory_create(const struct ss_source_limits *limits) {
    return calloc(1, sizeof(struct memory) + limits->pieces_max);
}

static void memory_begin(void *state, const struct ss_feed *feed) {
    struct memory *memory = state;
    memory->feed = feed;
    memory->first = 0;
    memory->next = 0;
    memory->waits = 0;
    memset(memory->begun, 0, feed->batch->piece_count);
}

static void piece_give(const struct ss_feed *feed, uint32_t index) {
    const struct ss_piece *piece = &feed->batch->pieces[index];
    uint8_t *place = ss_feed_place(feed, index);
    if (place != piece->memory) {
        memcpy(place, piece->memory, piece->body_length);
    }
    ss_feed_slices(feed, index, piece->slice_first, piece->slice_count, 0);
    ss_feed_count(feed, piece->slice_count, 0, piece->body_length);
    ss_feed_answered(feed, index);
}

/* Returns whether a piece belongs to this source and thread, has not begun, and is still useful. */
static int piece_is_left(const struct memory *memory, uint32_t index) {
    const struct ss_feed *feed = memory->feed;
    return index % feed->threads == feed->thread && memory_takes(&feed->batch->pieces[index]) &&
           !memory->begun[index] && ss_feed_useful(feed, index);
}

/*
 * Begins the next available piece: one in each step, so that sockets get their turns. A pass over all pieces begins
 * those that have arrived; a piece that arrives later wakes the thread for another pass.
 */
static enum ss_source_step memory_step(void *state) {
    struct memory *memory = state;
    const struct ss_feed *feed = memory->feed;
    if (ss_feed_aborted(feed)) {
        return SS_SOURCE_OVER;
    }
    for (; memory->next < feed->batch->piece_count; memory->next++) {
        uint32_t index = memory->next;
        if (!piece_is_left(memory, index)) {
            memory->first += memory->first == index;
            continue;
        }
        enum ss_origin origin = ss_piece_origin(&feed->batch->pieces[index]);
        if (origin == SS_ORIGIN_AWAITED) {
            memory->waits = 1;
            continue;
        }
        memory->begun[index] = 1;
        if (origin == SS_ORIGIN_NOWHERE) {
            ss_feed_fail(feed, index, SS_NOT_FOUND, 0);
        } else {
            piece_give(feed, index);
        }
        return SS_SOURCE_AGAIN;
    }
    if (!memory->waits) {
        return SS_SOURCE_OVER;
    }
    memory->next = memory->first;
    memory->waits = 0;
    return SS_SOURCE_WAIT;
}

static uint32_t memory_watch(void *state, struct pollfd *polled) {
    (void)state;
    (void)polled;
    return 0;
}

const struct ss_source ss_source_memory = {
    .takes = memory_takes,
    .answers = memory_answers,
    .create = memory_create,
    .destroy = free,
    .begin = memory_begin,
    .step = memory_step,
    .watch = memory_watch,
};
