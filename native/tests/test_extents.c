/* SPDX-License-Identifier: Apache-2.0 */
/* test_extents.c - the allocator of blocks against an array of flags, under random operations */
#include "check.h"
#include "shadowserve_index.h"

#include <stdbool.h>

enum { BLOCKS = 700, STEPS = 100000, COUNT_MAX = 24 };

static uint8_t taken[BLOCKS];

static uint32_t run_at(uint32_t first, uint8_t kind) {
    uint32_t count = 0;
    while (first + count < BLOCKS && taken[first + count] == kind) {
        count++;
    }
    return count;
}

static uint32_t first_fit(uint32_t count) {
    for (uint32_t first = 0; first < BLOCKS; first++) {
        if (run_at(first, 0) >= count) {
            return first;
        }
    }
    return UINT32_MAX;
}

/* Free blocks that touch are one run: the longest can be allocated as a whole, and nothing longer can. */
static void compare(struct ss_extents *extents) {
    uint32_t longest = 0, free_blocks = 0;
    for (uint32_t first = 0; first < BLOCKS; first++) {
        uint32_t count = run_at(first, 0);
        longest = count > longest ? count : longest;
        free_blocks += count;
        first += count;
    }
    CHECK(ss_extents_free_blocks(extents) == free_blocks, "%u blocks", ss_extents_free_blocks(extents));
    CHECK(ss_extents_allocate(extents, longest + 1) == UINT32_MAX, "more than %u", longest);
    uint32_t first = ss_extents_allocate(extents, longest);
    CHECK(first == (longest > 0 ? first_fit(longest) : UINT32_MAX), "%u at %u", longest, first);
    CHECK(longest == 0 || ss_extents_free(extents, first, longest) == SS_OK, "back");
}

static void step(struct ss_extents *extents) {
    uint32_t first = (uint32_t)random_below(BLOCKS + 10), count = (uint32_t)random_below(COUNT_MAX);
    bool inside = count > 0 && first + count <= BLOCKS;
    enum ss_result result;
    switch (random_below(3)) {
    case 0:
        first = ss_extents_allocate(extents, count);
        CHECK(first == (count > 0 ? first_fit(count) : UINT32_MAX), "%u blocks at %u", count, first);
        if (first != UINT32_MAX) {
            memset(taken + first, 1, count);
        }
        break;
    case 1:
        result = ss_extents_free(extents, first, count);
        CHECK((result == SS_OK) == (inside && run_at(first, 1) >= count), "free %u at %u", count, first);
        if (result == SS_OK) {
            memset(taken + first, 0, count);
        }
        break;
    default:
        result = ss_extents_reserve(extents, first, count);
        CHECK((result == SS_OK) == (inside && run_at(first, 0) >= count), "reserve %u at %u", count, first);
        if (result == SS_OK) {
            memset(taken + first, 1, count);
        }
    }
}

static void test_random(void) {
    struct ss_extents *extents;
    CHECK(ss_extents_open(BLOCKS, &extents) == SS_OK, "open");
    for (uint32_t number = 0; number < STEPS; number++) {
        step(extents);
        if (number % 7 == 0) {
            compare(extents);
        }
    }
    ss_extents_close(extents);
}

static void test_edges(void) {
    struct ss_extents *extents;
    CHECK(ss_extents_open(UINT32_MAX, &extents) == SS_BAD_ARGUMENT, "too many");
    CHECK(ss_extents_open(0, &extents) == SS_OK && ss_extents_allocate(extents, 1) == UINT32_MAX, "none");
    CHECK(ss_extents_free(extents, 0, 1) == SS_BAD_ARGUMENT, "none");
    ss_extents_close(extents);
    CHECK(ss_extents_open(UINT32_MAX - 1, &extents) == SS_OK, "16 TiB");
    CHECK(ss_extents_reserve(extents, UINT32_MAX - 2, 1) == SS_OK, "the last");
    CHECK(ss_extents_reserve(extents, UINT32_MAX - 2, UINT32_MAX) == SS_BAD_ARGUMENT, "over the end");
    CHECK(ss_extents_allocate(extents, UINT32_MAX - 2) == 0 && ss_extents_allocate(extents, 1) == UINT32_MAX, "all");
    CHECK(ss_extents_free(extents, 5, UINT32_MAX) == SS_BAD_ARGUMENT, "over the end");
    CHECK(ss_extents_free(extents, 0, UINT32_MAX - 1) == SS_OK, "all back");
    CHECK(ss_extents_allocate(extents, UINT32_MAX - 1) == 0, "one run");
    ss_extents_close(extents);
    ss_extents_close(NULL);
}

/* Every second block free: as many runs as there can be, in the order that is worst for a tree without balance. */
static void test_many_runs(void) {
    enum { MANY = 1 << 18 };
    struct ss_extents *extents;
    CHECK(ss_extents_open(MANY, &extents) == SS_OK, "open");
    for (uint32_t block = 0; block < MANY; block += 2) {
        CHECK(ss_extents_reserve(extents, block, 1) == SS_OK, "block %u", block);
    }
    CHECK(ss_extents_free_blocks(extents) == MANY / 2 && ss_extents_allocate(extents, 2) == UINT32_MAX, "runs");
    for (uint32_t block = 0; block < MANY; block += 2) {
        CHECK(ss_extents_free(extents, block, 1) == SS_OK, "block %u", block);
    }
    CHECK(ss_extents_allocate(extents, MANY) == 0, "one");
    ss_extents_close(extents);
}

int main(void) {
    test_edges();
    test_random();
    test_many_runs();
    return 0;
}
