/* SPDX-License-Identifier: Apache-2.0 */
/*
 * avx2.c - the kernels of kvrans with AVX2
 *
 * AVX2 looks up bytes in 16 of them at a time (pshufb), by the index's low four bits, and gives 0 where its bit 7 is
 * set. So a larger table is laid out as the differences (exclusive or) of its sixteens: with 16 subtracted from the
 * index for each step, all steps up to the right one take part, and their differences add up to its entry; the index is
 * negative from then on. For 256 slots that would be 16 steps, but slots are in the order of their symbols: it is
 * enough to look up which symbol the first of eight slots has, and to count how many symbols begin among the next
 * seven.
 *
 * A state is two bytes in two registers, low and high. So the slot is there without any masking, a state that needs
 * another byte is one whose high byte is 0, and it gets that byte by a move from low to high.
 */
#include "codecs/kvrans/narrow.h"
#include "codecs/kvrans/scalar.h"

#ifdef SS_ARCH_X86_64
#include <immintrin.h>
#include <string.h>

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

/* ---- Look-ups ------------------------------------------------------------------------------------------------ */

/* differences() replaces 'size' entries by their differences of sixteens. */
static void differences(uint8_t *entries, size_t size) {
    for (size_t index = size; index-- > STEP;)
        entries[index] ^= entries[index - STEP];
}

/* differences_all() lays out the block's tables. */
static void differences_all(struct ss_kvrans_decoding *decoding) {
    for (uint32_t number = 0; number < decoding->table_count; number++) {
        struct ss_kvrans_ranks *table = &decoding->tables[number];
        differences(table->base, sizeof(table->base));
        differences(table->breaks, sizeof(table->breaks));
        differences(table->frequency, sizeof(table->frequency));
        differences(table->start, sizeof(table->start));
        differences(table->value, sizeof(table->value));
    }
}

/* lookup() takes indices under 16 * steps. */
TARGET_INLINE __m256i lookup(const uint8_t *table, __m256i index, int steps) {
    __m256i found = _mm256_shuffle_epi8(twice(table), index);
    for (int step = 1; step < steps; step++) {
        index = _mm256_sub_epi8(index, _mm256_set1_epi8(STEP));
        found = _mm256_xor_si256(found, _mm256_shuffle_epi8(twice(table + STEP * step), index));
    }
    return found;
}

/* rank_of() counts the breaks up to each slot: those of the eights before are in 'base'. */
TARGET_INLINE __m256i rank_of(const struct ss_kvrans_ranks *table, __m256i slot) {
    const __m256i before = _mm256_setr_epi8(0, 1, 3, 7, 15, 31, 63, 127, 0, 1, 3, 7, 15, 31, 63, 127, 0, 1, 3, 7, 15,
                                            31, 63, 127, 0, 1, 3, 7, 15, 31, 63, 127);
    const __m256i ones = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2, 1, 2, 2, 3, 1, 2,
                                          2, 3, 2, 3, 3, 4);
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i eighth = _mm256_and_si256(_mm256_srli_epi16(slot, 3), _mm256_set1_epi8(31));
    const __m256i earlier = _mm256_shuffle_epi8(before, _mm256_and_si256(slot, nibble));
    const __m256i breaks = _mm256_and_si256(lookup(table->breaks, eighth, 2), earlier);
    const __m256i low = _mm256_shuffle_epi8(ones, breaks); /* bit 7 is never set */
    const __m256i high = _mm256_shuffle_epi8(ones, _mm256_and_si256(_mm256_srli_epi16(breaks, 4), nibble));
    return _mm256_add_epi8(lookup(table->base, eighth, 2), _mm256_add_epi8(low, high));
}

/* ---- Decode: one column -------------------------------------------------------------------------------------- */

#define BIT(mask, lane) ((mask) >> (lane)&1)
#define BITS(mask)                                                                                                     \
    (BIT(mask, 0) + BIT(mask, 1) + BIT(mask, 2) + BIT(mask, 3) + BIT(mask, 4) + BIT(mask, 5) + BIT(mask, 6))
#define LANE(mask, lane) (BIT(mask, lane) ? BITS((mask) & ((1 << (lane)) - 1)) : 128)
#define MASK(mask)                                                                                                     \
    {                                                                                                                  \
        LANE(mask, 0), LANE(mask, 1), LANE(mask, 2), LANE(mask, 3), LANE(mask, 4), LANE(mask, 5), LANE(mask, 6),       \
            LANE(mask, 7)                                                                                              \
    }
#define MASKS4(mask) MASK(mask), MASK((mask) + 1), MASK((mask) + 2), MASK((mask) + 3)
#define MASKS16(mask) MASKS4(mask), MASKS4((mask) + 4), MASKS4((mask) + 8), MASKS4((mask) + 12)
#define MASKS64(mask) MASKS16(mask), MASKS16((mask) + 16), MASKS16((mask) + 32), MASKS16((mask) + 48)

/* For each mask of eight lanes, which of the next bytes each of them gets; 128, so zero, for those not in the mask. */
static const uint8_t spread_order[256][8] = {MASKS64(0), MASKS64(64), MASKS64(128), MASKS64(192)};

/* spread() gives the lanes that 'mask' selects the next bytes, in order, and all others 0. Reads 8 bytes too many. */
TARGET_INLINE __m256i spread(const uint8_t *next, uint32_t mask) {
    const uint8_t *parts[4] = {next, next + _mm_popcnt_u32(mask & 0xFF), next + _mm_popcnt_u32(mask & 0xFFFF),
                               next + _mm_popcnt_u32(mask & 0xFFFFFF)};
    __m128i bytes[4];

    for (int part = 0; part < 4; part++)
        bytes[part] = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)parts[part]),
                                       _mm_loadl_epi64((const __m128i *)spread_order[mask >> 8 * part & 0xFF]));
    return _mm256_set_m128i(_mm_unpacklo_epi64(bytes[2], bytes[3]), _mm_unpacklo_epi64(bytes[0], bytes[1]));
}

/* Loaded from 32 - n on, it selects the first n lanes. */
static const uint8_t edge[64] = {255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255,
                                 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255};

/* group_decode() decodes 32 rows; those that 'active' does not select leave their states as they are. */
TARGET_INLINE const uint8_t *group_decode(const struct ss_kvrans_ranks *table, uint8_t *low, uint8_t *high,
                                          uint32_t active, int partial, int steps, const uint8_t *next,
                                          uint8_t *target) {
    const __m256i low_byte = _mm256_set1_epi16(0xFF), zero = _mm256_setzero_si256();
    const __m256i slot = load256(low), factor = load256(high);
    const __m256i rank = rank_of(table, slot);
    const __m256i frequency = lookup(table->frequency, rank, steps);
    const __m256i rest = _mm256_sub_epi8(slot, lookup(table->start, rank, steps));
    __m256i even = _mm256_mullo_epi16(_mm256_and_si256(frequency, low_byte), _mm256_and_si256(factor, low_byte));
    __m256i odd = _mm256_mullo_epi16(_mm256_srli_epi16(frequency, 8), _mm256_srli_epi16(factor, 8));
    __m256i new_low, new_high, short_of;
    uint32_t mask;

    even = _mm256_add_epi16(even, _mm256_and_si256(rest, low_byte));
    odd = _mm256_add_epi16(odd, _mm256_srli_epi16(rest, 8));
    new_low = _mm256_blendv_epi8(_mm256_slli_epi16(odd, 8), even, low_byte);
    new_high = _mm256_blendv_epi8(odd, _mm256_srli_epi16(even, 8), low_byte);
    store256(target, lookup(table->value, rank, steps));
    short_of = _mm256_cmpeq_epi8(new_high, zero);
    mask = (uint32_t)_mm256_movemask_epi8(short_of);
    if (partial)
        mask &= active;
    new_high = _mm256_or_si256(new_high, _mm256_and_si256(new_low, short_of));
    new_low = _mm256_or_si256(_mm256_andnot_si256(short_of, new_low), spread(next, mask));
    if (partial) {
        __m256i keep = load256(edge + 32 - __builtin_popcount(active));
        new_low = _mm256_blendv_epi8(slot, new_low, keep);
        new_high = _mm256_blendv_epi8(factor, new_high, keep);
    }
    store256(low, new_low);
    store256(high, new_high);
    return next + _mm_popcnt_u32(mask);
}

TARGET_INLINE void column_decode(struct ss_kvrans_decoding *decoding, const struct ss_kvrans_block *block,
                                 const struct ss_kvrans_ranks *table, int steps, uint8_t *target) {
    const uint32_t rows = block->rows, lane_mask = block->lanes - 1;
    const uint8_t *next = decoding->next;
    uint32_t row = 0;

    for (; row + 32 <= rows; row += 32)
        next = group_decode(table, decoding->low + (row & lane_mask), decoding->high + (row & lane_mask), 0, 0, steps,
                            next, target + row);
    if (row < rows)
        next = group_decode(table, decoding->low + (row & lane_mask), decoding->high + (row & lane_mask),
                            (1u << (rows - row)) - 1, 1, steps, next, target + row);
    decoding->next = next;
}

/* add_low_bits() adds 'shift' planes of low bits to the bytes of one column. */
TARGET static void add_low_bits(const uint8_t *planes, uint32_t rows, uint32_t shift, uint8_t *target) {
    const __m256i byte_of_lane = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2,
                                                  2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i bit_of_lane = _mm256_set1_epi64x((long long)0x8040201008040201u);
    const uint32_t plane_size = (rows + 7) / 8;

    for (uint32_t row = 0; row < rows; row += 32) {
        const uint32_t size = plane_size - row / 8;
        __m256i value = load256(target + row);
        for (uint32_t bit = 0; bit < shift; bit++) {
            const uint8_t *from = planes + bit * plane_size + row / 8;
            uint32_t bits = 0;
            __m256i set;
            if (size >= 4)
                memcpy(&bits, from, 4);
            else
                for (uint32_t byte = 0; byte < size; byte++)
                    bits |= (uint32_t)from[byte] << 8 * byte;
            set = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), byte_of_lane);
            set = _mm256_cmpeq_epi8(_mm256_and_si256(set, bit_of_lane), bit_of_lane);
            value = _mm256_or_si256(value, _mm256_and_si256(set, _mm256_set1_epi8((char)(1 << bit))));
        }
        store256(target + row, value);
    }
}

/* ---- Decode: columns to rows --------------------------------------------------------------------------------- */

/* transpose_step() interleaves the bytes of the first half of the registers with those of the second. */
TARGET_INLINE void transpose_step(const __m256i *source, __m256i *target) {
    for (int index = 0; index < 8; index++) {
        target[2 * index] = _mm256_unpacklo_epi8(source[index], source[index + 8]);
        target[2 * index + 1] = _mm256_unpackhi_epi8(source[index], source[index + 8]);
    }
}

/* transpose16() turns 16 columns of 32 rows into pieces of rows: rows r and r + 16 in register r. */
TARGET_INLINE void transpose16(const uint8_t *tile, __m256i *target) {
    __m256i a[16], b[16];
    for (int column = 0; column < 16; column++)
        a[column] = load256(tile + column * SS_KVRANS_ROWS_MAX);
    transpose_step(a, b);
    transpose_step(b, a);
    transpose_step(a, b);
    transpose_step(b, target);
}

/* tile_store() writes 'columns' decoded columns as pieces of rows. */
TARGET static void tile_store(const uint8_t *tile, uint32_t rows, size_t stride, uint32_t columns, uint8_t *target) {
    for (uint32_t first = 0; first < rows; first += 32) {
        for (uint32_t column = 0; column < columns; column += 32) {
            const uint32_t width = columns - column < 32 ? columns - column : 32;
            __m256i left[16], right[16];
            transpose16(tile + column * SS_KVRANS_ROWS_MAX + first, left);
            transpose16(tile + (column + 16) * SS_KVRANS_ROWS_MAX + first, right);
            for (uint32_t row = 0; row < 32 && first + row < rows; row++) {
                uint8_t *place = target + (first + row) * stride + column;
                __m256i piece = row < 16 ? _mm256_permute2x128_si256(left[row & 15], right[row & 15], 0x20)
                                         : _mm256_permute2x128_si256(left[row & 15], right[row & 15], 0x31);
                if (width == 32) {
                    store256(place, piece);
                } else {
                    _Alignas(32) uint8_t bytes[32];
                    store256(bytes, piece);
                    memcpy(place, bytes, width);
                }
            }
        }
    }
}

/* ---- Decode: a block ----------------------------------------------------------------------------------------- */

/* Code of its own for each size of the tables that go by rank, in sixteens. */
TARGET static void column_decode_1(struct ss_kvrans_decoding *decoding, const struct ss_kvrans_block *block,
                                   const struct ss_kvrans_ranks *table, uint8_t *target) {
    column_decode(decoding, block, table, 1, target);
}

TARGET static void column_decode_2(struct ss_kvrans_decoding *decoding, const struct ss_kvrans_block *block,
                                   const struct ss_kvrans_ranks *table, uint8_t *target) {
    column_decode(decoding, block, table, 2, target);
}

TARGET static void column_decode_3(struct ss_kvrans_decoding *decoding, const struct ss_kvrans_block *block,
                                   const struct ss_kvrans_ranks *table, uint8_t *target) {
    column_decode(decoding, block, table, 3, target);
}

TARGET static void column_decode_4(struct ss_kvrans_decoding *decoding, const struct ss_kvrans_block *block,
                                   const struct ss_kvrans_ranks *table, uint8_t *target) {
    column_decode(decoding, block, table, 4, target);
}

static enum ss_result decode(const struct ss_kvrans_block *block, uint8_t *target) {
    static const struct ss_kvrans_decode_steps steps = {
        .prepare = differences_all,
        .column = {column_decode_1, column_decode_2, column_decode_3, column_decode_4},
        .add_low_bits = add_low_bits,
        .tile_store = tile_store,
    };
    return ss_kvrans_decode_by_steps(&steps, block, target);
}

/* ---- Encode: rows to columns --------------------------------------------------------------------------------- */

/* What was seen of a block's bytes. */
struct extremes {
    __m256i least, most, signed_least, signed_most;
};

/* row_load() loads 'width' bytes of a row; what lies behind them is made equal to the first, which changes no extremes.
 */
TARGET_INLINE __m256i row_load(const uint8_t *source, uint32_t width, struct extremes *seen) {
    __m256i bytes;

    if (width == 32) {
        bytes = load256(source);
    } else {
        _Alignas(32) uint8_t padded[32];
        memset(padded, source[0], sizeof(padded));
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
    for (uint32_t row = 0; row < 16; row++)
        a[row] = row < rows ? row_load(source + row * stride, width, seen) : _mm256_setzero_si256();
    transpose_step(a, b);
    transpose_step(b, a);
    transpose_step(a, b);
    transpose_step(b, target);
}

/* least_of() returns the least of 32 bytes, each with 'flip' applied: 255 for the largest, 128 for signed ones. */
static int least_of(const uint8_t *bytes, uint8_t flip) {
    uint8_t least = 255;
    for (int lane = 0; lane < 32; lane++)
        least = (bytes[lane] ^ flip) < least ? bytes[lane] ^ flip : least;
    return least ^ flip;
}

TARGET static void transpose(const struct ss_kvrans_plan *plan, const uint8_t *source,
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

/* What bytes become indices with: registers, and a table in memory. */
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

TARGET_INLINE __m256i indices_of(struct mapping mapping, __m256i cell) {
    cell = _mm256_and_si256(_mm256_srl_epi16(cell, mapping.shift), mapping.kept);
    return mapping.listed ? lookup_256(mapping.differences, cell)
                          : _mm256_and_si256(_mm256_sub_epi8(cell, mapping.first), mapping.kept);
}

TARGET static void map(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet, uint8_t *planes) {
    const size_t plane_size = (plan->rows + 7) / 8;
    _Alignas(32) uint8_t table[256];
    const struct mapping mapping = mapping_make(alphabet, table);

    for (uint32_t column = 0; column < plan->columns; column++) {
        for (uint32_t row = 0; row < plan->rows; row += 32) {
            uint8_t *cells = plan->cells + (size_t)column * SS_KVRANS_ROWS_MAX + row;
            __m256i cell = load256(cells);
            for (uint32_t bit = 0; bit < alphabet->shift; bit++) {
                const size_t size = plane_size - row / 8 < 4 ? plane_size - row / 8 : 4;
                uint32_t plane = (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(cell, 7 - (int)bit));
                if (plan->rows - row < 32)
                    plane &= (1u << (plan->rows - row)) - 1;
                memcpy(planes + bit * plane_size + row / 8, &plane, size);
            }
            store256(cells, indices_of(mapping, cell));
        }
        planes += alphabet->shift * plane_size;
    }
}

TARGET static void count(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet) {
    _Alignas(32) uint8_t table[256];
    const struct mapping mapping = mapping_make(alphabet, table);

    for (uint32_t column = 0; column < plan->columns; column++) {
        const uint8_t *cells = plan->cells + (size_t)column * SS_KVRANS_ROWS_MAX;
        uint16_t *counts = plan->counts + (size_t)column * SS_KVRANS_INDEX_MAX;
        __m256i part[8];

        for (uint32_t index = 0; index < 8; index++) { /* what is behind the last row becomes 255, which is no index */
            const uint32_t left = plan->rows > 32 * index ? plan->rows - 32 * index : 0;
            const __m256i there = load256(edge + 32 - (left < 32 ? left : 32));
            part[index] = _mm256_or_si256(indices_of(mapping, load256(cells + (size_t)32 * index)),
                                          _mm256_andnot_si256(there, _mm256_set1_epi8(-1)));
        }
        memset(counts, 0, SS_KVRANS_INDEX_MAX * sizeof(*counts));
        for (uint32_t index = 0; index < alphabet->count; index++) {
            const __m256i wanted = _mm256_set1_epi8((char)index);
            __m256i found = _mm256_setzero_si256();
            __m128i sum;
            for (int each = 0; each < 8; each++)
                found = _mm256_sub_epi8(found, _mm256_cmpeq_epi8(part[each], wanted));
            found = _mm256_sad_epu8(found, _mm256_setzero_si256());
            sum = _mm_add_epi64(_mm256_castsi256_si128(found), _mm256_extracti128_si256(found, 1));
            sum = _mm_add_epi64(sum, _mm_unpackhi_epi64(sum, sum));
            counts[index] = (uint16_t)_mm_cvtsi128_si32(sum);
        }
    }
}

TARGET static void assign(const struct ss_kvrans_plan *plan, const struct ss_kvrans_costs *costs, uint32_t index_count,
                          uint8_t *column_table) {
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

/* group_encode() codes 32 rows; those that 'active' does not select leave their states as they are. */
TARGET_INLINE uint8_t *group_encode(struct ss_kvrans_encoding *encoding, const struct ss_kvrans_encode_table *table,
                                    uint32_t lane, uint32_t active, int steps, const uint8_t *cells, uint8_t *end) {
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

    end = pack(encoding, low, (uint32_t)_mm256_movemask_epi8(full) & active, end);
    new_low = _mm256_add_epi8(_mm256_or_si256(even_rest, _mm256_slli_epi16(odd_rest, 8)), start);
    new_high = _mm256_or_si256(even, _mm256_slli_epi16(odd, 8));
    if (active != UINT32_MAX) {
        const __m256i keep = load256(edge + 32 - _mm_popcnt_u32(active));
        new_low = _mm256_blendv_epi8(low, new_low, keep);
        new_high = _mm256_blendv_epi8(high, new_high, keep);
    }
    store256(encoding->low + lane, new_low);
    store256(encoding->high + lane, new_high);
    return end;
}

TARGET_INLINE uint8_t *columns_encode(struct ss_kvrans_encoding *encoding, const struct ss_kvrans_plan *plan, int steps,
                                      uint8_t *end) {
    const uint32_t lane_mask = plan->lanes - 1, whole = plan->rows / 32 * 32;

    for (uint32_t column = plan->columns; column-- > 0;) {
        const struct ss_kvrans_encode_table *table = &encoding->tables[plan->column_table[column]];
        const uint8_t *cells = plan->cells + (size_t)column * SS_KVRANS_ROWS_MAX;
        if (whole < plan->rows)
            end = group_encode(encoding, table, whole & lane_mask, (1u << (plan->rows - whole)) - 1, steps,
                               cells + whole, end);
        for (uint32_t row = whole; row > 0; row -= 32)
            end = group_encode(encoding, table, (row - 32) & lane_mask, UINT32_MAX, steps, cells + row - 32, end);
    }
    return end;
}

TARGET static uint8_t *columns_encode_1(struct ss_kvrans_encoding *encoding, const struct ss_kvrans_plan *plan,
                                        uint8_t *end) {
    return columns_encode(encoding, plan, 1, end);
}

TARGET static uint8_t *columns_encode_2(struct ss_kvrans_encoding *encoding, const struct ss_kvrans_plan *plan,
                                        uint8_t *end) {
    return columns_encode(encoding, plan, 2, end);
}

TARGET static uint8_t *columns_encode_4(struct ss_kvrans_encoding *encoding, const struct ss_kvrans_plan *plan,
                                        uint8_t *end) {
    return columns_encode(encoding, plan, 4, end);
}

static uint8_t *encode(const struct ss_kvrans_plan *plan, uint8_t *end, uint8_t *states_low, uint8_t *states_high) {
    const uint32_t states = plan->rows < plan->lanes ? plan->rows : plan->lanes;
    struct ss_kvrans_encoding encoding;

    ss_kvrans_encoding_begin(&encoding, plan);
    for (uint32_t number = 0; number < encoding.table_count; number++) {
        struct ss_kvrans_encode_table *table = &encoding.tables[number];
        differences(table->frequency, SS_KVRANS_INDEX_MAX);
        differences(table->start, SS_KVRANS_INDEX_MAX);
        differences(table->reciprocal_low, SS_KVRANS_INDEX_MAX);
        differences(table->reciprocal_high, SS_KVRANS_INDEX_MAX);
    }
    end = encoding.index_count <= STEP       ? columns_encode_1(&encoding, plan, end)
          : encoding.index_count <= 2 * STEP ? columns_encode_2(&encoding, plan, end)
                                             : columns_encode_4(&encoding, plan, end);
    memcpy(states_low, encoding.low, states);
    memcpy(states_high, encoding.high, states);
    return end;
}

const struct ss_kvrans_kernels ss_kvrans_kernels_avx2 = {
    .name = "own, avx2",
    .decode = decode,
    .transpose = transpose,
    .present = ss_kvrans_present_scalar,
    .map = map,
    .count = count,
    .total = ss_kvrans_total_scalar,
    .assign = assign,
    .encode = encode,
};
#else
typedef int ss_kvrans_avx2_unused; /* ISO C wants a declaration in every file */
#endif
