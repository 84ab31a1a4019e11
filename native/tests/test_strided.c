/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_strided.c - blocks copied between orders of their dimensions, random ones, tiles and planes of pairs, against
 * single elements, in every instruction set
 */
#include <string.h>

#include "check.h"
#include "shadowserve.h"

enum { DIMENSIONS = 6, CASES = 3000, TILES = 600, TILED = 5, BLOCKS = 2 };

/* order() lays dimensions out in a random order, packed, and returns the bytes of one block. */
static uint64_t order(uint32_t count, const uint64_t *sizes, uint32_t element, int64_t *strides) {
    uint32_t left[DIMENSIONS];
    uint64_t bytes = element;
    for (uint32_t i = 0; i < count; i++) {
        left[i] = i;
    }
    for (uint32_t i = count; i > 0; i--) {
        const uint32_t chosen = (uint32_t)random_below(i);
        strides[left[chosen]] = (int64_t)bytes;
        bytes *= sizes[left[chosen]];
        left[chosen] = left[i - 1];
    }
    return bytes;
}

static void compare(uint32_t count, const uint64_t *sizes, const int64_t *to_strides, const int64_t *from_strides,
                    uint32_t element, uint64_t bytes, const uint8_t *to, const uint8_t *from) {
    for (uint64_t index = 0; index < bytes / element; index++) {
        uint64_t rest = index;
        int64_t to_offset = 0, from_offset = 0;
        for (uint32_t i = 0; i < count; i++) {
            to_offset += (int64_t)(rest % sizes[i]) * to_strides[i];
            from_offset += (int64_t)(rest % sizes[i]) * from_strides[i];
            rest /= sizes[i];
        }
        CHECK(memcmp(to + to_offset, from + from_offset, element) == 0, "element %llu", (unsigned long long)index);
    }
}

/* copy_and_compare() copies two blocks that end, or begin, at pages that must not be touched. */
static void copy_and_compare(struct guarded *target, struct guarded *source, uint32_t number, uint32_t count,
                             const uint64_t *sizes, const int64_t *to_strides, const int64_t *from_strides,
                             uint32_t element, uint64_t bytes) {
    uint8_t *to = guarded_place(target, BLOCKS * bytes, number % 2);
    uint8_t *from = guarded_place(source, BLOCKS * bytes, number % 2);
    random_fill(from, BLOCKS * bytes);
    random_fill(to, BLOCKS * bytes);
    void *const targets[BLOCKS] = {to + bytes, to};
    const void *const sources[BLOCKS] = {from, from + bytes};
    CHECK(ss_copy_strided(targets, sources, BLOCKS, count, sizes, to_strides, from_strides, element) == SS_OK,
          "case %u", number);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        compare(count, sizes, to_strides, from_strides, element, bytes, targets[i], sources[i]);
    }
}

/* tiles() copies rows of tokens into tiles of 16 columns of pairs, as matrix units want V, or back. */
static void tiles(struct guarded *target, struct guarded *source, uint32_t number) {
    const uint64_t pairs = 1 + random_below(9), heads = 1 + random_below(3), wide = 1 + random_below(5);
    const uint64_t columns = random_below(8) == 0 ? 8 : 16;
    const uint64_t sizes[TILED] = {pairs, 2, heads, wide, columns};
    const int64_t line = (int64_t)columns * 4, row = (int64_t)(heads * wide) * line / 2;
    const int64_t tiled[TILED] = {line, 2, line * (int64_t)(pairs * wide), line * (int64_t)pairs, 4};
    const int64_t rows[TILED] = {2 * row, row, line / 2 * (int64_t)wide, line / 2, 2};
    const int back = number / 2 % 2;
    copy_and_compare(target, source, number, TILED, sizes, back ? rows : tiled, back ? tiled : rows, 2,
                     pairs * 2 * (uint64_t)row);
}

/* pairs() copies rows of tokens into planes of pairs, 16 tokens wide or not, as matrix units want K, or back. */
static void pairs(struct guarded *target, struct guarded *source, uint32_t number) {
    const uint64_t planes = 1 + random_below(3), heads = 1 + random_below(3);
    const uint64_t tokens = random_below(4) == 0 ? 12 : 16, columns = random_below(4) == 0 ? 20 : 16 << random_below(2);
    const uint64_t sizes[TILED] = {planes, tokens, heads, columns, 2};
    const int64_t row = (int64_t)(heads * columns) * 4, line = (int64_t)tokens * 4;
    const int64_t head = line * (int64_t)(columns * planes);
    const int64_t paired[TILED] = {line * (int64_t)columns, 4, head, line, 2};
    const int64_t rows[TILED] = {row * (int64_t)tokens, row, (int64_t)columns * 4, 4, 2};
    const int back = number / 2 % 2;
    copy_and_compare(target, source, number, TILED, sizes, back ? rows : paired, back ? paired : rows, 2,
                     planes * tokens * (uint64_t)row);
}

static void anything(struct guarded *target, struct guarded *source, uint32_t number) {
    uint64_t sizes[DIMENSIONS];
    int64_t to_strides[DIMENSIONS], from_strides[DIMENSIONS];
    const uint32_t element = 1u << random_below(4);
    const uint32_t count = (uint32_t)random_below(DIMENSIONS + 1);
    for (uint32_t i = 0; i < count; i++) {
        const size_t limits[] = {2, 4, 9, 19, 150};
        sizes[i] = 1 + random_below(limits[random_below(count > 3 ? 2 : count == 3 ? 4 : 5)]);
    }
    const uint64_t bytes = order(count, sizes, element, to_strides);
    order(count, sizes, element, from_strides);
    copy_and_compare(target, source, number, count, sizes, to_strides, from_strides, element, bytes);
}

int main(void) {
    struct guarded target = guarded_make(1 << 20), source = guarded_make(1 << 20);
    FOR_EACH_ISA (isa) {
        for (uint32_t number = 0; number < CASES; number++) {
            anything(&target, &source, number);
        }
        for (uint32_t number = 0; number < TILES; number++) {
            tiles(&target, &source, number);
            pairs(&target, &source, number);
        }
    }
    CHECK(ss_copy_strided(NULL, NULL, 0, DIMENSIONS + 1, NULL, NULL, NULL, 1) == SS_BAD_ARGUMENT, "dimensions");
    CHECK(ss_copy_strided(NULL, NULL, 0, 0, NULL, NULL, NULL, 3) == SS_BAD_ARGUMENT, "elements");
    guarded_free(&target);
    guarded_free(&source);
    return 0;
}
