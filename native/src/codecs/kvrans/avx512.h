/* SPDX-License-Identifier: Apache-2.0 */
/* avx512.h - what the files of the AVX-512 kernels of kvrans share; for x86-64 only */
#ifndef SS_KVRANS_AVX512_H
#define SS_KVRANS_AVX512_H

#include <immintrin.h>

#include "codecs/kvrans/kvrans.h"

#define TARGET                                                                                                         \
    __attribute__((target(                                                                                             \
        "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,avx512vpopcntdq,avx512dq,gfni,avx2,f16c,bmi,bmi2,popcnt")))
#define TARGET_INLINE TARGET static inline __attribute__((always_inline))

enum { GROUP = SS_KVRANS_GROUP, GROUPS = SS_KVRANS_ROWS_MAX / SS_KVRANS_GROUP, TILE_COLUMNS = 64 };

/* mask_of() selects the first 'count' of 64 lanes. */
TARGET_INLINE uint64_t mask_of(size_t count) {
    return count >= 64 ? ~0ull : (1ull << count) - 1;
}

/*
 * quarters_join() takes registers whose lanes are a quarter of a line each - register k has the k-th quarters of lines
 * 0, 16, 32 and 48 - and makes whole lines of them.
 */
TARGET_INLINE void quarters_join(const __m512i *quarters, __m512i *lines) {
    __m512i low0 = _mm512_shuffle_i64x2(quarters[0], quarters[1], 0x44); /* lines 0 and 16 of quarters 0 and 1 */
    __m512i low1 = _mm512_shuffle_i64x2(quarters[2], quarters[3], 0x44);
    __m512i high0 = _mm512_shuffle_i64x2(quarters[0], quarters[1], 0xEE);
    __m512i high1 = _mm512_shuffle_i64x2(quarters[2], quarters[3], 0xEE);
    lines[0] = _mm512_shuffle_i64x2(low0, low1, 0x88);
    lines[1] = _mm512_shuffle_i64x2(low0, low1, 0xDD);
    lines[2] = _mm512_shuffle_i64x2(high0, high1, 0x88);
    lines[3] = _mm512_shuffle_i64x2(high0, high1, 0xDD);
}

/* avx512_count.c */
void ss_kvrans_present_avx512(const uint8_t *source, size_t size, uint8_t *seen);
void ss_kvrans_map_avx512(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet,
                          uint8_t *planes);
void ss_kvrans_count_avx512(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet);

#endif /* SS_KVRANS_AVX512_H */
