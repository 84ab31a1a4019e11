/* SPDX-License-Identifier: Apache-2.0 */
/* avx2_encode.c - what the encoder of kvrans does with AVX2 */
#include "cpu/cpu.h"

#include <string.h>

#include "codecs/kvrans/avx2.h"

/* ---- Encode: rows to columns --------------------------------------------------------------------------------- */

struct extremes {
    __m256i least, most, signed_least, signed_most;
};

/* row_load() loads 'width' bytes of a row; the bytes behind them are set to the first, which changes no extremes. */
TARGET_INLINE __m256i row_load(const uint8_t *source, uint32_t width, struct extremes *seen) {
    __m256i bytes;

    if (width == 32) {
        bytes = load256(source);
    } else {
        _Alignas(32) uint8_t padded[32];
        memset(padded, source[0], sizeof padded);
        memcpy(padded, source, width);
        bytes = load256(padded);
    }
    seen->least = _mm256_min_epu8(seen->least, bytes);
    seen->most = _mm256_max_epu8(seen->most, bytes);
    seen->signed_least = _mm256_min_epi8(seen->signed_least, bytes);
    seen->signed_most = _mm256_max_epi8(seen->signed_most, bytes);
    return bytes;
}

/* rows_transpose() turns up to 16 rows of up to 32 columns into pieces of columns c and c + 16 in register c. */
TARGET_INLINE void rows_transpose(const uint8_t *source, size_t stride, uint32_t rows, uint32_t width, __m256i *target,
                                  struct extremes *seen) {
    __m256i a[16], b[16];
    for (uint32_t row = 0; row < 16; row++) {
        a[row] = row < rows ? row_load(source + row * stride, width, seen) : _mm256_setzero_si256();
    }
    transpose_step(a, b);
    transpose_step(b, a);
    transpose_step(a, b);
    transpose_step(b, target);
}

/* least_of() returns the least of 32 bytes, each with 'flip' applied: 255 for the largest, 128 for signed ones. */
static int least_of(const uint8_t *bytes, uint8_t flip) {
    uint8_t least = 255;
    for (int lane = 0; lane < 32; lane++) {
        least = (bytes[lane] ^ flip) < least ? bytes[lane] ^ flip : least;
    }
    return least ^ flip;
}

TARGET void ss_kvrans_transpose_avx2(const struct ss_kvrans_plan *plan, const uint8_t *source,
                                     struct ss_kvrans_extremes *extremes) {
    struct extremes seen = {.least = _mm256_set1_epi8(-1),
                            .most = _mm256_setzero_si256(),
                            .signed_least = _mm256_set1_epi8(127),
                            .signed_most = _mm256_set1_epi8(-128)};
    uint8_t bytes[4][32];

    for (uint32_t row = 0; row < plan->rows; row += 32) {
        const uint32_t rows = plan->rows - row;
        for (uint32_t column = 0; column < plan->columns; column += 32) {
            const uint32_t width = plan->columns - column < 32 ? plan->columns - column : 32;
            const uint8_t *from = source + (size_t)row * plan->columns + column;
            __m256i upper[16], lower[16];
            rows_transpose(from, plan->columns, rows, width, upper, &seen);
            rows_transpose(from + (size_t)16 * plan->columns, plan->columns, rows > 16 ? rows - 16 : 0, width, lower,
                           &seen);
            for (uint32_t index = 0; index < width; index++) {
                __m256i cells = index < 16 ? _mm256_permute2x128_si256(upper[index], lower[index], 0x20)
                                           : _mm256_permute2x128_si256(upper[index - 16], lower[index - 16], 0x31);
                store256(plan->cells + (size_t)(column + index) * SS_KVRANS_ROWS_MAX + row, cells);
            }
        }
    }
    store256(bytes[0], seen.least);
    store256(bytes[1], seen.most);
    store256(bytes[2], seen.signed_least);
    store256(bytes[3], seen.signed_most);
    *extremes = (struct ss_kvrans_extremes){.least = (uint8_t)least_of(bytes[0], 0),
                                            .most = (uint8_t)least_of(bytes[1], 255),
                                            .signed_least = (int8_t)least_of(bytes[2], 128),
                                            .signed_most = (int8_t)least_of(bytes[3], 127)};
}

/* ---- Encode: indices, their counts, tables ------------------------------------------------------------------- */

/* lookup_256() takes any byte: two chains of eight steps, as 16 subtracted eight times, saturating, stays negative. */
TARGET_INLINE __m256i lookup_256(const uint8_t *table, __m256i index) {
    __m256i other = _mm256_xor_si256(index, _mm256_set1_epi8(-128)), found = _mm256_setzero_si256();
    for (int step = 0; step < 8; step++) {
        found = _mm256_xor_si256(found, _mm256_shuffle_epi8(twice(table + STEP * step), index));
        found = _mm256_xor_si256(found, _mm256_shuffle_epi8(twice(table + 128 + STEP * step), other));
        index = _mm256_subs_epi8(index, _mm256_set1_epi8(STEP));
        other = _mm256_subs_epi8(other, _mm256_set1_epi8(STEP));
    }
    return found;
}

/* Tables to convert bytes to indices: registers, and a table in memory. */
struct mapping {
    __m256i kept, first;
    __m128i shift;
    uint32_t listed;
    const uint8_t *differences;
};

/* mapping_make() leaves the differences at 'table', 256 entries, where they are needed. */
TARGET_INLINE struct mapping mapping_make(const struct ss_kvrans_alphabet *alphabet, uint8_t *table) {
    if (alphabet->listed) {
        memcpy(table, alphabet->index, sizeof(alphabet->index));
        differences(table, 128);
        differences(table + 128, 128);
    }
    return (struct mapping){.kept = _mm256_set1_epi8((char)(255 >> alphabet->shift)),
                            .first = _mm256_set1_epi8((char)alphabet->value[0]),
                            .shift = _mm_cvtsi32_si128((int)alphabet->shift),
                            .listed = alphabet->listed,
                            .differences = table};
}

TARGET_INLINE __m256i indices_of(const struct mapping *mapping, __m256i cell) {
    cell = _mm256_and_si256(_mm256_srl_epi16(cell, mapping->shift), mapping->kept);
    return mapping->listed ? lookup_256(mapping->differences, cell)
                           : _mm256_and_si256(_mm256_sub_epi8(cell, mapping->first), mapping->kept);
}

/* bits_of() returns that bit of each lane. */
TARGET_INLINE uint32_t bits_of(__m256i cell, uint32_t bit) {
    return (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(cell, 7 - (int)bit));
}

TARGET_INLINE __m256i or_behind(__m256i bytes, uint32_t count) {
    return _mm256_or_si256(bytes, _mm256_andnot_si256(load256(edge + 32 - count), _mm256_set1_epi8(-1)));
}

enum { WIDTH = 32, PARTS = SS_KVRANS_ROWS_MAX / WIDTH };

TARGET_INLINE uint16_t matches(const __m256i *parts, uint8_t index) {
    const __m256i wanted = _mm256_set1_epi8((char)index);
    __m256i found = _mm256_setzero_si256();
    __m128i sum;

    for (int each = 0; each < PARTS; each++) {
        found = _mm256_sub_epi8(found, _mm256_cmpeq_epi8(parts[each], wanted));
    }
    found = _mm256_sad_epu8(found, _mm256_setzero_si256());
    sum = _mm_add_epi64(_mm256_castsi256_si128(found), _mm256_extracti128_si256(found, 1));
    return (uint16_t)_mm_cvtsi128_si32(_mm_add_epi64(sum, _mm_unpackhi_epi64(sum, sum)));
}

TARGET void ss_kvrans_assign_avx2(const struct ss_kvrans_plan *plan, const struct ss_kvrans_costs *costs,
                                  uint32_t index_count, uint8_t *column_table) {
    for (uint32_t column = 0; column < plan->columns; column++) {
        const uint16_t *counts = plan->counts + (size_t)column * SS_KVRANS_INDEX_MAX;
        __m256i low = _mm256_setzero_si256(), high = low, least;
        uint32_t equal;
        for (uint32_t pair = 0; pair < (index_count + 1) / 2; pair++) {
            int32_t both;
            memcpy(&both, counts + (size_t)2 * pair, 4);
            low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_set1_epi32(both), load256(costs->cost[pair])));
            high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_set1_epi32(both), load256(costs->cost[pair] + 8)));
        }
        least = _mm256_min_epi32(low, high);
        least = _mm256_min_epi32(least, _mm256_permute2x128_si256(least, least, 1));
        least = _mm256_min_epi32(least, _mm256_shuffle_epi32(least, 0x4E));
        least = _mm256_min_epi32(least, _mm256_shuffle_epi32(least, 0xB1));
        equal = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(low, least))) |
                (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(high, least))) << 8;
        column_table[column] = (uint8_t)__builtin_ctz(equal);
    }
}

/* ---- Encode: coded bytes ------------------------------------------------------------------------------------- */

/* pack() writes the lanes of 'bytes' that 'mask' selects right before 'end', and anything up to 8 bytes before that. */
TARGET_INLINE uint8_t *pack(const struct ss_kvrans_encoding *encoding, __m256i bytes, uint32_t mask, uint8_t *end) {
    const __m128i halves[2] = {_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)};

    for (int half = 1; half >= 0; half--) {
        const uint32_t first = mask >> 16 * half & 0xFF, second = mask >> (16 * half + 8) & 0xFF;
        __m128i order = _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)encoding->order[first]),
                                           _mm_loadl_epi64((const __m128i *)encoding->order[second]));
        __m128i packed = _mm_shuffle_epi8(halves[half], _mm_add_epi8(order, _mm_set_epi64x(0x0808080808080808, 0)));
        _mm_storel_epi64((__m128i *)(end - 8), _mm_unpackhi_epi64(packed, packed));
        end -= _mm_popcnt_u32(second);
        _mm_storel_epi64((__m128i *)(end - 8), packed);
        end -= _mm_popcnt_u32(first);
    }
    return end;
}

/* divide() divides 16 states of 16 bits by their frequencies: quotients, and in '*rest' what is left. */
TARGET_INLINE __m256i divide(__m256i state, __m256i frequency, __m256i reciprocal, __m256i *rest) {
    const __m256i quotient = _mm256_mulhi_epu16(state, reciprocal);
    const __m256i left = _mm256_sub_epi16(state, _mm256_mullo_epi16(quotient, frequency));
    const __m256i exact = _mm256_cmpgt_epi16(frequency, left); /* else one too few */

    *rest = _mm256_sub_epi16(left, _mm256_andnot_si256(exact, frequency));
    return _mm256_add_epi16(_mm256_add_epi16(quotient, _mm256_set1_epi16(1)), exact);
}

/* even_words() and odd_words() make 16-bit numbers of the even, or the odd, bytes of two registers. */
TARGET_INLINE __m256i even_words(__m256i low, __m256i high) {
    return _mm256_blendv_epi8(_mm256_slli_epi16(high, 8), low, _mm256_set1_epi16(0xFF));
}

TARGET_INLINE __m256i odd_words(__m256i low, __m256i high) {
    return _mm256_blendv_epi8(high, _mm256_srli_epi16(low, 8), _mm256_set1_epi16(0xFF));
}

/* group_encode() codes the first 'rows' of 32; the others leave their states as they are. */
TARGET_INLINE uint8_t *group_encode(struct ss_kvrans_encoding *encoding, const struct ss_kvrans_encode_table *table,
                                    uint32_t lane, uint32_t rows, int steps, const uint8_t *cells, uint8_t *end) {
    const __m256i low_byte = _mm256_set1_epi16(0xFF), index = load256(cells);
    const __m256i low = load256(encoding->low + lane), high = load256(encoding->high + lane);
    const __m256i frequency = lookup(table->frequency, index, steps), start = lookup(table->start, index, steps);
    const __m256i reciprocal_low = lookup(table->reciprocal_low, index, steps);
    const __m256i reciprocal_high = lookup(table->reciprocal_high, index, steps);
    const __m256i full = _mm256_cmpeq_epi8(_mm256_max_epu8(high, frequency), high);
    const __m256i state_low = _mm256_blendv_epi8(low, high, full), state_high = _mm256_andnot_si256(full, high);
    __m256i even_rest, odd_rest, new_low, new_high;
    const __m256i even = divide(even_words(state_low, state_high), _mm256_and_si256(frequency, low_byte),
                                even_words(reciprocal_low, reciprocal_high), &even_rest);
    const __m256i odd = divide(odd_words(state_low, state_high), _mm256_srli_epi16(frequency, 8),
                               odd_words(reciprocal_low, reciprocal_high), &odd_rest);

    end =
        pack(encoding, low, (uint32_t)_mm256_movemask_epi8(full) & (rows < WIDTH ? (1u << rows) - 1 : UINT32_MAX), end);
    new_low = _mm256_add_epi8(_mm256_or_si256(even_rest, _mm256_slli_epi16(odd_rest, 8)), start);
    new_high = _mm256_or_si256(even, _mm256_slli_epi16(odd, 8));
    if (rows < WIDTH) {
        const __m256i keep = load256(edge + WIDTH - rows);
        new_low = _mm256_blendv_epi8(low, new_low, keep);
        new_high = _mm256_blendv_epi8(high, new_high, keep);
    }
    store256(encoding->low + lane, new_low);
    store256(encoding->high + lane, new_high);
    return end;
}

/* encoding_prepare() lays out the tables for lookup(). */
static void encoding_prepare(struct ss_kvrans_encoding *encoding) {
    for (uint32_t number = 0; number < encoding->table_count; number++) {
        struct ss_kvrans_encode_table *table = &encoding->tables[number];
        differences(table->frequency, SS_KVRANS_INDEX_MAX);
        differences(table->start, SS_KVRANS_INDEX_MAX);
        differences(table->reciprocal_low, SS_KVRANS_INDEX_MAX);
        differences(table->reciprocal_high, SS_KVRANS_INDEX_MAX);
    }
}

typedef __m256i vector;
typedef const struct ss_kvrans_encode_table *encode_tables;

#define KERNEL TARGET
#define KERNEL_STATIC TARGET static
#define INLINE TARGET_INLINE
#define MAP ss_kvrans_map_avx2
#define COUNT ss_kvrans_count_avx2
#define ENCODE ss_kvrans_encode_avx2
#define vector_load load256
#define vector_store store256
#define tables_load(table, size) (table)
#include "codecs/kvrans/encode_template.h"
