/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.c - pieces whose bodies lie in this process, such as in a pool's arena
 *
 * There is nothing to wait for: each piece is whole at once. Where the decoder can read anywhere, it reads where they
 * lie, and nothing is copied; an accelerator that reaches nothing but the pipeline's buffers gets a copy there.
 */
#include <stdlib.h>
#include <string.h>

#include "sources/source.h"

struct memory {
    const struct ss_feed *feed;
    uint32_t next_piece;
};

static int memory_takes(const struct ss_piece *piece) {
    return piece->memory != NULL;
}

static uint32_t memory_answers(const struct ss_round *round, uint32_t piece, uint32_t threads) {
    (void)round;
    (void)piece;
    (void)threads;
    return 1;
}

static void *memory_create(const struct ss_source_limits *limits) {
    (void)limits;
    return calloc(1, sizeof(struct memory));
}

static void memory_begin(void *state, const struct ss_feed *feed) {
    struct memory *memory = state;
    memory->feed = feed;
    memory->next_piece = 0;
}

static void piece_give(const struct ss_feed *feed, uint32_t index) {
    const struct ss_piece *piece = &feed->round->pieces[index];
    if (!ss_feed_make_place(feed, index)) {
        return;
    }
    uint8_t *place = ss_feed_place(feed, index);
    if (place != piece->memory) {
        memcpy(place, piece->memory, piece->body_length);
    }
    ss_feed_slices(feed, index, piece->slice_first, piece->slice_count, 0);
    ss_feed_count(feed, piece->slice_count, 0, piece->body_length);
    ss_feed_answered(feed, index);
}

/* Goes past what is other sources', other threads', or of no use any more. Returns whether anything is left. */
static int memory_has_more(struct memory *memory) {
    const struct ss_feed *feed = memory->feed;
    for (; memory->next_piece < feed->round->piece_count; memory->next_piece++) {
        uint32_t index = memory->next_piece;
        if (index % feed->threads == feed->thread && memory_takes(&feed->round->pieces[index]) &&
            ss_feed_useful(feed, index)) {
            return 1;
        }
    }
    return 0;
}

/* One piece in each step, so that what comes over sockets gets its turns. */
static enum ss_source_step memory_step(void *state) {
    struct memory *memory = state;
    const struct ss_feed *feed = memory->feed;
    if (ss_feed_aborted(feed) || !memory_has_more(memory)) {
        return SS_SOURCE_OVER;
    }
    if (memory->next_piece >= ss_feed_open(feed)) {
        return SS_SOURCE_WAIT;
    }
    piece_give(feed, memory->next_piece++);
    return SS_SOURCE_AGAIN;
}

static uint32_t memory_watch(void *state, struct pollfd *polled) {
    (void)state;
    (void)polled;
    return 0;
}

const struct ss_source ss_source_memory = {
    .name = "memory",
    .takes = memory_takes,
    .answers = memory_answers,
    .create = memory_create,
    .destroy = free,
    .begin = memory_begin,
    .step = memory_step,
    .watch = memory_watch,
};
