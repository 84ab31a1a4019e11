/* SPDX-License-Identifier: Apache-2.0 */
/*
 * strided_avx512.c - tiles and planes of a block with AVX-512, a line at a time
 *
 * CPUs with matrix multiplication have AVX-512, and this layout of KV. With vectors of 16 bytes the instructions took
 * as long as the memory accesses; here the memory accesses hide them. The data of one head in a block is too short for
 * the hardware prefetcher, so the loop prefetches the next head's lines.
 */
#include "memory/strided.h"

#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw")))
#define TARGET_INLINE TARGET static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")

enum { LINE = SS_STRIDED_LINE, SIDE = LINE / 4, QUARTER = SIDE / 4 };

TARGET_INLINE void line_write(uint8_t *to, __m512i line) {
    if ((uintptr_t)to % LINE == 0) {
        _mm512_stream_si512((void *)to, line);
    } else {
        _mm512_storeu_si512((void *)to, line);
    }
}

TARGET_INLINE __m512i line_read(const uint8_t *from, int64_t after) {
    _mm_prefetch((const void *)(from + after), _MM_HINT_T1);
    return _mm512_loadu_si512(from);
}

/* ahead() returns the bytes to where what comes after this is read, but for the last of a block. */
static int64_t ahead(const struct ss_strided *shape) {
    return shape->count > 0 ? shape->outer[shape->count - 1].from : 0;
}

/* ---- Tiles: a line is 16 pairs of one tile, or 32 elements of one row ------------------------------------------ */

/* places() returns which elements of two lines make the first, or the second, line of a target. */
TARGET_INLINE __m512i places(int zips, uint16_t second) {
    uint16_t chosen[LINE / 2];
    for (uint16_t i = 0; i < SIDE; i++) {
        chosen[zips ? 2 * i : i] = zips ? SIDE * second + i : 2 * i + second;
        chosen[zips ? 2 * i + 1 : SIDE + i] = chosen[zips ? 2 * i : i] + LINE / 2;
    }
    return _mm512_loadu_si512(chosen);
}

TARGET void ss_strided_tiles_avx512(const struct ss_strided *shape, uint8_t *to, const uint8_t *from) {
    const int zips = shape->run.size == 2;
    const int64_t to_next = zips ? shape->wide.to : shape->row.to;
    const int64_t from_next = zips ? shape->run.from : shape->wide.from;
    const int64_t after = ahead(shape);
    const __m512i first = places(zips, 0), second = places(zips, 1);
    for (uint64_t beside = 0; beside < shape->wide.size; beside += 2) {
        uint8_t *target = to + (int64_t)beside * shape->wide.to;
        const uint8_t *source = from + (int64_t)beside * shape->wide.from;
        for (uint64_t below = 0; below < shape->deep.size; below++) {
            const __m512i one = line_read(source, after), next = line_read(source + from_next, after);
            line_write(target, _mm512_permutex2var_epi16(one, first, next));
            line_write(target + to_next, _mm512_permutex2var_epi16(one, second, next));
            target += shape->deep.to;
            source += shape->deep.from;
        }
    }
}

/* ---- Planes: squares of 16 lines -------------------------------------------------------------------------------- */

/* square() transposes: elements that are beside each other first, then pairs of them, then quarters of lines, twice. */
TARGET_INLINE void square(uint8_t *to, int64_t to_next, const uint8_t *from, int64_t from_next, int64_t after) {
    __m512i a[SIDE], b[SIDE];
    UNROLLED for (int i = 0; i < SIDE; i++) {
        a[i] = line_read(from + i * from_next, after);
    }
    UNROLLED for (int i = 0; i < SIDE; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    UNROLLED for (int i = 0; i < SIDE; i += QUARTER) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    UNROLLED for (int i = 0; i < QUARTER; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[QUARTER + i], 0x88); /* quarters 0 and 2 of both */
        b[QUARTER + i] = _mm512_shuffle_i32x4(a[i], a[QUARTER + i], 0xDD);
        b[2 * QUARTER + i] = _mm512_shuffle_i32x4(a[2 * QUARTER + i], a[3 * QUARTER + i], 0x88);
        b[3 * QUARTER + i] = _mm512_shuffle_i32x4(a[2 * QUARTER + i], a[3 * QUARTER + i], 0xDD);
    }
    UNROLLED for (int i = 0; i < 2 * QUARTER; i++) {
        line_write(to + i * to_next, _mm512_shuffle_i32x4(b[i], b[2 * QUARTER + i], 0x88));
        line_write(to + (2 * QUARTER + i) * to_next, _mm512_shuffle_i32x4(b[i], b[2 * QUARTER + i], 0xDD));
    }
}

TARGET void ss_strided_plane_avx512(const struct ss_strided *shape, uint8_t *to, const uint8_t *from) {
    for (uint64_t run = 0; run < shape->run.size; run += SIDE) {
        for (uint64_t row = 0; row < shape->row.size; row += SIDE) {
            square(to + (int64_t)row * shape->row.to + run * 4, shape->row.to,
                   from + (int64_t)run * shape->run.from + row * 4, shape->run.from, ahead(shape));
        }
    }
}
