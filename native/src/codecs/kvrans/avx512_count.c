/* SPDX-License-Identifier: Apache-2.0 */
/* avx512_count.c - what the encoder of kvrans knows of a block's bytes, with AVX-512: indices, and their counts
 */
#include "cpu/cpu.h"

#include <string.h>

#include "codecs/kvrans/avx512.h"

/* ss_kvrans_present_avx512() looks bytes up in a set of what was seen, 64 at a time: soon there is hardly one that is
 * not in it. */
TARGET void ss_kvrans_present_avx512(const uint8_t *source, size_t size, uint8_t *seen) {
    const __m512i bit_of = _mm512_set1_epi64((long long)0x8040201008040201u);
    uint8_t bits[32] = {0};
    __m512i set = _mm512_setzero_si512();

    for (size_t at = 0; at < size; at += 64) {
        const __mmask64 there = mask_of(size - at);
        __m512i bytes = _mm512_maskz_loadu_epi8(there, source + at);
        __m512i eights = _mm512_and_si512(_mm512_srli_epi16(bytes, 3), _mm512_set1_epi8(31));
        __m512i wanted = _mm512_shuffle_epi8(bit_of, _mm512_and_si512(bytes, _mm512_set1_epi8(7)));
        __mmask64 missing = _mm512_mask_testn_epi8_mask(there, _mm512_permutexvar_epi8(eights, set), wanted);
        if (__builtin_expect(missing == 0, 1)) {
            continue;
        }
        for (; missing != 0; missing &= missing - 1) {
            uint8_t byte = source[at + (size_t)__builtin_ctzll(missing)];
            bits[byte / 8] |= (uint8_t)(1 << byte % 8);
            seen[byte] = 1;
        }
        set = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(const void *)bits));
    }
}

struct mapping {
    __m512i index[4], first, kept;
    __m128i shift;
    int listed;
};

TARGET_INLINE struct mapping mapping_load(const struct ss_kvrans_alphabet *alphabet) {
    struct mapping mapping = {.first = _mm512_set1_epi8((char)alphabet->value[0]),
                              .kept = _mm512_set1_epi8((char)(255 >> alphabet->shift)),
                              .shift = _mm_cvtsi32_si128((int)alphabet->shift),
                              .listed = (int)alphabet->listed};
    for (int part = 0; part < 4; part++) {
        mapping.index[part] = _mm512_load_si512(alphabet->index + 64 * part);
    }
    return mapping;
}

TARGET_INLINE __m512i indices_of(const struct mapping *mapping, __m512i cell) {
    cell = _mm512_and_si512(_mm512_srl_epi16(cell, mapping->shift), mapping->kept);
    if (!mapping->listed) {
        return _mm512_and_si512(_mm512_sub_epi8(cell, mapping->first), mapping->kept);
    }
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(cell),
                                  _mm512_permutex2var_epi8(mapping->index[0], cell, mapping->index[1]),
                                  _mm512_permutex2var_epi8(mapping->index[2], cell, mapping->index[3]));
}

TARGET void ss_kvrans_map_avx512(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet,
                                 uint8_t *planes) {
    const struct mapping mapping = mapping_load(alphabet);
    const size_t plane_size = (plan->rows + 7) / 8;

    for (uint32_t column = 0; column < plan->columns; column++) {
        for (uint32_t row = 0; row < plan->rows; row += GROUP) {
            uint8_t *cells = plan->cells + (size_t)column * SS_KVRANS_ROWS_MAX + row;
            __m512i cell = _mm512_load_si512(cells);
            for (uint32_t bit = 0; bit < alphabet->shift; bit++) {
                uint64_t plane =
                    _mm512_test_epi8_mask(cell, _mm512_set1_epi8((char)(1 << bit))) & mask_of(plan->rows - row);
                uint8_t *to = planes + bit * plane_size + row / 8;
                if (plan->rows - row >= GROUP) {
                    memcpy(to, &plane, sizeof plane);
                } else {
                    memcpy(to, &plane, plane_size - row / 8);
                }
            }
            _mm512_store_si512(cells, indices_of(&mapping, cell));
        }
        planes += alphabet->shift * plane_size;
    }
}

/*
 * Counting: a bit of an index, of 64 rows, is a word, and eight columns' words are a register. The rows with one index
 * are then an AND of such registers or their complements, and counting them is one instruction for 512 rows.
 */
enum { INDEX_BITS = 6, COUNTED = 8 }; /* columns counted together, and indices */

/* bytes_of_eight() has, for each byte b of eight 64-bit words, byte b of the first, of the second and so on. */
static const _Alignas(64) uint8_t bytes_of_eight[64] = {0, 8,  16, 24, 32, 40, 48, 56, 1, 9,  17, 25, 33, 41, 49, 57,
                                                        2, 10, 18, 26, 34, 42, 50, 58, 3, 11, 19, 27, 35, 43, 51, 59,
                                                        4, 12, 20, 28, 36, 44, 52, 60, 5, 13, 21, 29, 37, 45, 53, 61,
                                                        6, 14, 22, 30, 38, 46, 54, 62, 7, 15, 23, 31, 39, 47, 55, 63};

/*
 * index_bits_make() takes apart the indices of 64 rows of up to eight columns: words[b] has bit b, a word for each
 * column. A product of bit matrices transposes 8 x 8 bits; it also turns around each eight rows.
 */
TARGET_INLINE void index_bits_make(const struct mapping *mapping, const uint8_t *cells, uint32_t columns,
                                   __m512i *words) {
    const __m512i ones = _mm512_set1_epi64((long long)0x8040201008040201u), order = _mm512_load_si512(bytes_of_eight);
    __m512i bits[COUNTED], even[4], odd[4], even_bits[4], odd_bits[4];

    for (uint32_t column = 0; column < COUNTED; column++) {
        bits[column] = _mm512_setzero_si512();
        if (column < columns) {
            __m512i index = indices_of(mapping, _mm512_load_si512(cells + (size_t)column * SS_KVRANS_ROWS_MAX));
            bits[column] = _mm512_permutexvar_epi8(order, _mm512_gf2p8affine_epi64_epi8(ones, index, 0));
        }
    }
    for (int pair = 0; pair < 4; pair++) {
        even[pair] = _mm512_unpacklo_epi64(bits[2 * pair], bits[2 * pair + 1]);
        odd[pair] = _mm512_unpackhi_epi64(bits[2 * pair], bits[2 * pair + 1]);
    }
    quarters_join(even, even_bits);
    quarters_join(odd, odd_bits);
    for (int bit = 0; bit < INDEX_BITS; bit++) {
        words[bit] = (bit % 2 ? odd_bits : even_bits)[bit / 2];
    }
}

/* rows_active() selects the first 'rows' of 64 in the order that index_bits_make() leaves them in. */
TARGET_INLINE __m512i rows_active(uint32_t rows) {
    uint64_t whole = mask_of(rows / 8 * 8), some = rows < 64 ? 0xFF00ull >> rows % 8 & 0xFF : 0;
    return _mm512_set1_epi64((long long)(whole | (rows < 64 ? some << rows / 8 * 8 : 0)));
}

/* eight_count() counts the indices from 'first' to 'first' + 7, a multiple of 8, in eight columns, into 'sums'. */
TARGET_INLINE void eight_count(__m512i (*words)[INDEX_BITS], const __m512i *active, uint32_t groups, uint32_t first,
                               __m512i *sums) {
    const __m512i flip3 = _mm512_set1_epi64(first & 8 ? 0 : -1), flip4 = _mm512_set1_epi64(first & 16 ? 0 : -1);
    const __m512i flip5 = _mm512_set1_epi64(first & 32 ? 0 : -1);

    for (int index = 0; index < COUNTED; index++) {
        sums[index] = _mm512_setzero_si512();
    }
    for (uint32_t group = 0; group < groups; group++) {
        const __m512i bit0 = words[group][0], bit1 = words[group][1], bit2 = words[group][2];
        /* 0x60: a & (b ^ c) */
        __m512i upper = _mm512_ternarylogic_epi64(active[group], words[group][3], flip3, 0x60), with2, without2;
        upper = _mm512_ternarylogic_epi64(upper, words[group][4], flip4, 0x60);
        upper = _mm512_ternarylogic_epi64(upper, words[group][5], flip5, 0x60);
        with2 = _mm512_and_si512(upper, bit2);
        without2 = _mm512_andnot_si512(bit2, upper);
/* 0x10 << n: a, and b and c are the bits of n */
#define COUNT(number, upper_bits, low_bits)                                                                            \
    sums[number] = _mm512_add_epi64(                                                                                   \
        sums[number], _mm512_popcnt_epi64(_mm512_ternarylogic_epi64(upper_bits, bit1, bit0, 0x10 << (low_bits))));
        COUNT(0, without2, 0)
        COUNT(1, without2, 1)
        COUNT(2, without2, 2)
        COUNT(3, without2, 3)
        COUNT(4, with2, 0)
        COUNT(5, with2, 1)
        COUNT(6, with2, 2)
        COUNT(7, with2, 3)
#undef COUNT
    }
}

/* four_join() makes four 16-bit numbers of four 64-bit ones. */
TARGET_INLINE __m512i four_join(const __m512i *sums) {
    __m512i low = _mm512_or_si512(sums[0], _mm512_slli_epi64(sums[1], 16));
    return _mm512_or_si512(low, _mm512_or_si512(_mm512_slli_epi64(sums[2], 32), _mm512_slli_epi64(sums[3], 48)));
}

TARGET_INLINE void columns_count(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet,
                                 uint32_t groups) {
    const struct mapping mapping = mapping_load(alphabet);
    __m512i active[GROUPS], words[GROUPS][INDEX_BITS];

    for (uint32_t group = 0; group < groups; group++) {
        active[group] = rows_active(plan->rows - GROUP * group);
    }
    for (uint32_t column = 0; column < plan->columns; column += COUNTED) {
        const uint32_t together = plan->columns - column < COUNTED ? plan->columns - column : COUNTED;
        const uint8_t *cells = plan->cells + (size_t)column * SS_KVRANS_ROWS_MAX;
        uint16_t *counts = plan->counts + (size_t)column * SS_KVRANS_INDEX_MAX;

        for (uint32_t group = 0; group < groups; group++) {
            index_bits_make(&mapping, cells + (size_t)GROUP * group, together, words[group]);
        }
        for (uint32_t first = 0; first < (alphabet->count + 15) / 16 * 16; first += COUNTED) {
            _Alignas(64) __m128i even_odd[2][4];
            __m512i sums[COUNTED], low, high;
            eight_count(words, active, groups, first, sums);
            low = four_join(sums);
            high = four_join(sums + 4);
            _mm512_store_si512(even_odd[0], _mm512_unpacklo_epi64(low, high));
            _mm512_store_si512(even_odd[1], _mm512_unpackhi_epi64(low, high));
            for (uint32_t each = 0; each < together; each++) {
                _mm_store_si128((__m128i *)(void *)(counts + (size_t)each * SS_KVRANS_INDEX_MAX + first),
                                even_odd[each % 2][each / 2]);
            }
        }
    }
}

TARGET void ss_kvrans_count_avx512(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet) {
    if (plan->rows == SS_KVRANS_ROWS_MAX) {
        columns_count(plan, alphabet, GROUPS);
    } else {
        columns_count(plan, alphabet, (plan->rows + GROUP - 1) / GROUP);
    }
}
