/* SPDX-License-Identifier: Apache-2.0 */
/* avx2.h - what the files of the AVX2 kernels of kvrans share; for x86-64 only */
#ifndef SS_KVRANS_AVX2_H
#define SS_KVRANS_AVX2_H

#include <immintrin.h>

#include "codecs/kvrans/narrow.h"

#define TARGET __attribute__((target("avx2,popcnt")))
#define TARGET_INLINE TARGET static inline __attribute__((always_inline))

enum { STEP = 16 }; /* entries that one look-up step covers */

TARGET_INLINE __m256i load256(const void *source) {
    return _mm256_loadu_si256(source);
}

TARGET_INLINE void store256(void *target, __m256i value) {
    _mm256_storeu_si256(target, value);
}

TARGET_INLINE __m256i twice(const uint8_t *table) {
    return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)table));
}
/* differences() replaces 'size' entries by their differences of sixteens. */
static inline void differences(uint8_t *entries, size_t size) {
    for (size_t index = size; index-- > STEP;) {
        entries[index] ^= entries[index - STEP];
    }
}
/* Loaded from 32 - n on, it selects the first n lanes. */
static const uint8_t edge[64] = {255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255,
                                 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255};

/* lookup() takes indices under 16 * steps. */
TARGET_INLINE __m256i lookup(const uint8_t *table, __m256i index, int steps) {
    __m256i found = _mm256_shuffle_epi8(twice(table), index);
    for (int step = 1; step < steps; step++) {
        index = _mm256_sub_epi8(index, _mm256_set1_epi8(STEP));
        found = _mm256_xor_si256(found, _mm256_shuffle_epi8(twice(table + STEP * step), index));
    }
    return found;
}
/* transpose_step() interleaves the bytes of the first half of the registers with those of the second. */
TARGET_INLINE void transpose_step(const __m256i *source, __m256i *target) {
    for (int index = 0; index < 8; index++) {
        target[2 * index] = _mm256_unpacklo_epi8(source[index], source[index + 8]);
        target[2 * index + 1] = _mm256_unpackhi_epi8(source[index], source[index + 8]);
    }
}
/* avx2_encode.c */
void ss_kvrans_transpose_avx2(const struct ss_kvrans_plan *plan, const uint8_t *source,
                              struct ss_kvrans_extremes *extremes);
void ss_kvrans_map_avx2(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet, uint8_t *planes);
void ss_kvrans_count_avx2(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet);
void ss_kvrans_assign_avx2(const struct ss_kvrans_plan *plan, const struct ss_kvrans_costs *costs, uint32_t index_count,
                           uint8_t *column_table);
uint8_t *ss_kvrans_encode_avx2(const struct ss_kvrans_plan *plan, uint8_t *end, uint8_t *states_low,
                               uint8_t *states_high);

#endif /* SS_KVRANS_AVX2_H */
