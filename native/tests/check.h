/* SPDX-License-Identifier: Apache-2.0 */
/* check.h - what all tests share: checks that survive Release, random numbers, guarded memory */
#ifndef SS_CHECK_H
#define SS_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* CHECK() ends the test with a message unless 'condition' holds; what to print may come after it, as for printf. */
#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: CHECK(%s) failed:", __FILE__, __LINE__, #condition);                               \
            fprintf(stderr, " " __VA_ARGS__);                                                                          \
            fputc('\n', stderr);                                                                                       \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

#define CHECK_EQUAL(left, right)                                                                                       \
    do {                                                                                                               \
        long long left_value = (long long)(left);                                                                      \
        long long right_value = (long long)(right);                                                                    \
        CHECK(left_value == right_value, "%s is %lld, %s is %lld", #left, left_value, #right, right_value);            \
    } while (0)

/*
 * test_is_brief() returns whether SHADOWSERVE_TEST_BRIEF is set, as 'make test-native' has it: the same paths are
 * taken, but not each with each, and with less data. scripts/test-nightly tries all of it, with every sanitizer.
 */
static inline int test_is_brief(void) {
    return getenv("SHADOWSERVE_TEST_BRIEF") != NULL;
}

/* These run their block with every variant of the kernels that this CPU has, in use; and for every codec of the build.
 */
#define FOR_EACH_ISA(isa)                                                                                              \
    for (enum ss_isa isa = SS_ISA_SCALAR; isa <= SS_ISA_NEON; isa++)                                                   \
        if (ss_isa_force(isa) == SS_OK)
#define FOR_EACH_CODEC(codec)                                                                                          \
    for (enum ss_codec codec = SS_CODEC_NONE; codec <= SS_CODEC_KVRANS; codec++)                                       \
        if (ss_codec_implementation(codec) != NULL)

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

/* ---- Random numbers: the same in every run ------------------------------------------------------------------- */

static uint64_t random_state = 0x9E3779B97F4A7C15u;

static inline uint64_t random64(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * 0x2545F4914F6CDD1Du;
}

static inline size_t random_below(size_t limit) {
    return (size_t)((random64() >> 11) % limit);
}

static inline void random_fill(uint8_t *target, size_t size) {
    for (size_t index = 0; index < size; index += sizeof(uint64_t)) {
        const uint64_t word = random64();
        memcpy(target + index, &word, size - index < sizeof word ? size - index : sizeof word);
    }
}

/* random_bell() is roughly normal around 0 with a spread of 1. */
static inline double random_bell(void) {
    uint64_t sum = 0;
    for (int word = 0; word < 3; word++) { /* four terms each: tests need millions of values */
        const uint64_t terms = random64();
        sum += (terms & 0xFFFF) + (terms >> 16 & 0xFFFF) + (terms >> 32 & 0xFFFF) + (terms >> 48);
    }
    return (double)sum * 0x1p-16 - 6;
}

/* ---- Guarded memory ------------------------------------------------------------------------------------------ */

/* A region between two pages that cannot be touched. */
struct guarded {
    uint8_t *map;
    size_t map_size;
    uint8_t *start; /* first usable byte, right behind the page before */
    uint8_t *end;   /* one behind the last usable byte, right before the page after */
};

static inline struct guarded guarded_make(size_t size) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t inner = (size + page - 1) / page * page;
    struct guarded guarded;

    inner = inner != 0 ? inner : page;
    guarded.map_size = inner + 2 * page;
    guarded.map = mmap(NULL, guarded.map_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(guarded.map != MAP_FAILED, "no memory for %zu bytes", guarded.map_size);
    guarded.start = guarded.map + page;
    guarded.end = guarded.start + inner;
    CHECK(mprotect(guarded.map, page, PROT_NONE) == 0 && mprotect(guarded.end, page, PROT_NONE) == 0, "mprotect");
    return guarded;
}

static inline void guarded_free(struct guarded *guarded) {
    munmap(guarded->map, guarded->map_size);
}

/* guarded_place() returns 'size' bytes of the region that touch its end, or its start. */
static inline uint8_t *guarded_place(const struct guarded *guarded, size_t size, int at_end) {
    return at_end ? guarded->end - size : guarded->start;
}

#endif /* SS_CHECK_H */
