/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.c - chunks whose bodies lie in this process, such as in a pool's arena
 *
 * There is nothing to wait for: each chunk is whole at once. Where the decoder can read anywhere, it reads where they
 * lie, and nothing is copied; an engine that reaches nothing but the pipeline's buffers gets a copy there.
 */
#include <stdlib.h>
#include <string.h>

#include "sources/source.h"

struct memory {
    const struct ss_feed *feed;
    uint32_t next_chunk;
};

static int memory_takes(const struct ss_chunk *chunk) {
    return chunk->memory != NULL;
}

static uint32_t memory_answers(const struct ss_round *round, uint32_t chunk, uint32_t threads) {
    (void)round;
    (void)chunk;
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
    memory->next_chunk = 0;
}

static void chunk_give(const struct ss_feed *feed, uint32_t index) {
    const struct ss_chunk *chunk = &feed->round->chunks[index];
    if (!ss_feed_make_place(feed, index)) {
        return;
    }
    uint8_t *place = ss_feed_place(feed, index);
    if (place != chunk->memory) {
        memcpy(place, chunk->memory, chunk->body_length);
    }
    ss_feed_slices(feed, index, chunk->slice_first, chunk->slice_count, 0);
    ss_feed_count(feed, chunk->slice_count, 0, chunk->body_length);
    ss_feed_answered(feed, index);
}

/* One chunk in each step, so that what comes over sockets gets its turns. */
static enum ss_source_step memory_step(void *state) {
    struct memory *memory = state;
    const struct ss_feed *feed = memory->feed;
    uint32_t useful = ss_feed_useful(feed);
    uint32_t open = ss_feed_open(feed);
    if (ss_feed_aborted(feed)) {
        return SS_SOURCE_OVER;
    }
    while (memory->next_chunk < useful && memory->next_chunk < open) {
        uint32_t index = memory->next_chunk++;
        if (index % feed->threads == feed->thread && memory_takes(&feed->round->chunks[index])) {
            chunk_give(feed, index);
            return SS_SOURCE_AGAIN;
        }
    }
    return memory->next_chunk >= useful ? SS_SOURCE_OVER : SS_SOURCE_WAIT;
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
