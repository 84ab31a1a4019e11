/* SPDX-License-Identifier: Apache-2.0 */
/* avx512.h - what the files of the AVX-512 kernels of kvrans share; for x86-64 only */
#ifndef SS_KVRANS_AVX512_H
#define SS_KVRANS_AVX512_H

#include <immintrin.h>

#include "codecs/kvrans/kvrans.h"

#define TARGET                                                                                                         \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,avx512vpopcntdq,avx512dq,gfni,avx2,f16c,"  \
                          "fma,bmi,bmi2,popcnt")))
#define TARGET_INLINE TARGET static inline __attribute__((always_inline))

enum { GROUP = SS_KVRANS_GROUP, GROUPS = SS_KVRANS_ROWS_MAX / SS_KVRANS_GROUP, TILE_COLUMNS = 64 };

static const _Alignas(64) uint8_t numbers[64] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                                 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
                                                 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
/* mask_of() selects the first 'count' of 64 lanes. */
TARGET_INLINE uint64_t mask_of(size_t count) {
    return count >= 64 ? ~0ull : (1ull << count) - 1;
}

/*
 * quarters_join() takes registers whose lanes are a quarter of a line each - register k has the k-th quarters of lines
 * 0, 16, 32 and 48 - and makes whole lines of them. quarters_pair() does the first half: of lines 0 and 16 it makes one
 * register with their quarters 0 and 1 and one with quarters 2 and 3, then two of the other lines.
 */
TARGET_INLINE void quarters_pair(const __m512i *quarters, __m512i *halves) {
    halves[0] = _mm512_shuffle_i64x2(quarters[0], quarters[1], 0x44);
    halves[1] = _mm512_shuffle_i64x2(quarters[2], quarters[3], 0x44);
    halves[2] = _mm512_shuffle_i64x2(quarters[0], quarters[1], 0xEE);
    halves[3] = _mm512_shuffle_i64x2(quarters[2], quarters[3], 0xEE);
}

TARGET_INLINE void quarters_join(const __m512i *quarters, __m512i *lines) {
    __m512i halves[4];

    quarters_pair(quarters, halves);
    lines[0] = _mm512_shuffle_i64x2(halves[0], halves[1], 0x88);
    lines[1] = _mm512_shuffle_i64x2(halves[0], halves[1], 0xDD);
    lines[2] = _mm512_shuffle_i64x2(halves[2], halves[3], 0x88);
    lines[3] = _mm512_shuffle_i64x2(halves[2], halves[3], 0xDD);
}

/* lanes_transpose() transposes 16 x 16 bytes within each 128-bit lane of 16 registers: four perfect shuffles. */
TARGET_INLINE void lanes_transpose(__m512i *rows) {
    __m512i other[16];

#define SHUFFLE(to, from)                                                                                              \
    for (int index = 0; index < 8; index++) {                                                                          \
        (to)[2 * index] = _mm512_unpacklo_epi8((from)[index], (from)[index + 8]);                                      \
        (to)[2 * index + 1] = _mm512_unpackhi_epi8((from)[index], (from)[index + 8]);                                  \
    }
    SHUFFLE(other, rows)
    SHUFFLE(rows, other)
    SHUFFLE(other, rows)
    SHUFFLE(rows, other)
#undef SHUFFLE
}
/* States of all lanes, their bytes apart; lanes without a row are not active. */
struct states {
    __m512i low[GROUPS], high[GROUPS];
    __mmask64 active[GROUPS]; /* by group of rows */
};
/* avx512_count.c */
void ss_kvrans_present_avx512(const uint8_t *source, size_t size, uint8_t *seen);
void ss_kvrans_map_avx512(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet,
                          uint8_t *planes);
void ss_kvrans_count_avx512(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet);

/* avx512_encode.c */
void ss_kvrans_transpose_avx512(const struct ss_kvrans_plan *plan, const uint8_t *source,
                                struct ss_kvrans_extremes *extremes);
void ss_kvrans_total_avx512(const struct ss_kvrans_plan *plan, const uint8_t *column_table, uint32_t index_count,
                            uint32_t (*totals)[SS_KVRANS_INDEX_MAX]);
void ss_kvrans_assign_avx512(const struct ss_kvrans_plan *plan, const struct ss_kvrans_costs *costs,
                             uint32_t index_count, uint8_t *column_table);
uint8_t *ss_kvrans_encode_avx512(const struct ss_kvrans_plan *plan, uint8_t *end, uint8_t *states_low,
                                 uint8_t *states_high);

#endif /* SS_KVRANS_AVX512_H */
