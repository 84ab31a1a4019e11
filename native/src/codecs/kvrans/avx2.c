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
#include "codecs/kvrans/scalar.h"

#include <string.h>

#include "codecs/kvrans/avx2.h"

/* ---- Look-ups ------------------------------------------------------------------------------------------------ */

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

/*
 * Groups of 32 rows go through every step together, since each step waits for the one before: with the work of all of
 * them side by side there is always something to do meanwhile. Further ahead the CPU does not look.
 */
enum { GROUPS_MAX = 4 };

/* Constants; 'bit_counts' is how many bits each number under 16 has. */
struct constants {
    _Alignas(32) uint8_t eighths[32], nibbles[32], step[32], before[32], bit_counts[32], low_bytes[32],
        high_bytes[32], one[32], numbers[32], fours[32], eights[32];
};

#define TWICE(...)                                                                                                     \
    { __VA_ARGS__, __VA_ARGS__ }
static const struct constants constants = {
    .eighths = {[0 ... 31] = 31},
    .nibbles = {[0 ... 31] = 15},
    .step = {[0 ... 31] = STEP},
    .before = TWICE(0, 1, 3, 7, 15, 31, 63, 127, 0, 1, 3, 7, 15, 31, 63, 127),
    .bit_counts = TWICE(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4),
    .low_bytes = TWICE(255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0),
    .high_bytes = TWICE(0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255, 0, 255),
    .one = {[0 ... 31] = 1},
    .numbers = TWICE(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
    .fours = TWICE(128, 128, 128, 128, 3, 3, 3, 3, 128, 128, 128, 128, 11, 11, 11, 11),
    .eights = TWICE(128, 128, 128, 128, 128, 128, 128, 128, 7, 7, 7, 7, 7, 7, 7, 7),
};

/*
 * constants_find() hides the constants from the compiler. It would else build each of them before every column, and
 * store most of them again, as there are not enough registers.
 */
TARGET_INLINE const struct constants *constants_find(void) {
    const struct constants *found = &constants;
    __asm__("" : "+r"(found));
    return found;
}

/* lookups() is lookup() for 'count' groups. */
TARGET_INLINE void lookups(const uint8_t *table, const struct constants *by, const __m256i *indices, int count,
                           int steps, __m256i *found) {
    __m256i entries = twice(table), index[GROUPS_MAX];

    for (int each = 0; each < count; each++) {
        index[each] = indices[each];
        found[each] = _mm256_shuffle_epi8(entries, index[each]);
    }
    for (int step = 1; step < steps; step++) {
        entries = twice(table + STEP * step);
        for (int each = 0; each < count; each++) {
            index[each] = _mm256_sub_epi8(index[each], load256(by->step));
            found[each] = _mm256_xor_si256(found[each], _mm256_shuffle_epi8(entries, index[each]));
        }
    }
}

/* ranks_of() counts the breaks up to each slot: those of the eights before are in 'base'. */
TARGET_INLINE void ranks_of(const struct ss_kvrans_ranks *table, const struct constants *by, const __m256i *slots,
                            int count, __m256i *ranks) {
    __m256i eighths[GROUPS_MAX], breaks[GROUPS_MAX];

    for (int each = 0; each < count; each++) {
        eighths[each] = _mm256_and_si256(_mm256_srli_epi16(slots[each], 3), load256(by->eighths));
    }
    lookups(table->breaks, by, eighths, count, 2, breaks);
    for (int each = 0; each < count; each++) {
        const __m256i place = _mm256_and_si256(slots[each], load256(by->nibbles));
        breaks[each] = _mm256_and_si256(breaks[each], _mm256_shuffle_epi8(load256(by->before), place));
    }
    lookups(table->base, by, eighths, count, 2, ranks);
    for (int each = 0; each < count; each++) {
        const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(breaks[each], 4), load256(by->nibbles));
        const __m256i low = _mm256_shuffle_epi8(load256(by->bit_counts), breaks[each]); /* bit 7 is never set */
        const __m256i high = _mm256_shuffle_epi8(load256(by->bit_counts), upper);
        ranks[each] = _mm256_add_epi8(ranks[each], _mm256_add_epi8(low, high));
    }
}

/* ---- Decode: one column -------------------------------------------------------------------------------------- */

/*
 * spread() gives the lanes that 'mask' selects, those whose 'high' is 0, the next bytes, in order; what the others get
 * is of no meaning. Which of 16 bytes a lane gets is how many of the 16 lanes before it are selected: its own number
 * less those that are not, itself included. Lanes that no row uses come last. Reads 16 bytes for each half.
 */
TARGET_INLINE __m256i spread(const struct constants *by, const uint8_t *next, __m256i high, uint32_t mask) {
    const __m256i full = _mm256_min_epu8(high, load256(by->one));
    const __m128i lower = _mm_loadu_si128((const __m128i *)next);
    const __m128i upper = _mm_loadu_si128((const __m128i *)(next + _mm_popcnt_u32(mask & 0xFFFF)));
    __m256i sum = _mm256_mullo_epi32(full, load256(by->one)); /* of each four: what is up to each */

    sum = _mm256_add_epi8(sum, _mm256_shuffle_epi8(sum, load256(by->fours)));
    sum = _mm256_add_epi8(sum, _mm256_shuffle_epi8(sum, load256(by->eights)));
    return _mm256_shuffle_epi8(_mm256_set_m128i(upper, lower), _mm256_sub_epi8(load256(by->numbers), sum));
}

/* multiply() makes the states' bytes: frequency * factor + rest. */
TARGET_INLINE void multiply(const struct constants *by, const __m256i *frequency, const __m256i *factor,
                            const __m256i *rest, int count, __m256i *low, __m256i *high) {
    const __m256i low_byte = load256(by->low_bytes), high_byte = load256(by->high_bytes);
    __m256i even[GROUPS_MAX], odd[GROUPS_MAX];

    for (int each = 0; each < count; each++) {
        even[each] =
            _mm256_mullo_epi16(_mm256_and_si256(frequency[each], low_byte), _mm256_and_si256(factor[each], low_byte));
        odd[each] = _mm256_mullo_epi16(_mm256_srli_epi16(frequency[each], 8), _mm256_srli_epi16(factor[each], 8));
    }
    for (int each = 0; each < count; each++) {
        even[each] = _mm256_add_epi16(even[each], _mm256_and_si256(rest[each], low_byte));
        odd[each] = _mm256_add_epi16(odd[each], _mm256_srli_epi16(rest[each], 8));
    }
    for (int each = 0; each < count; each++) {
        high[each] = _mm256_or_si256(_mm256_and_si256(odd[each], high_byte), _mm256_srli_epi16(even[each], 8));
        low[each] = _mm256_or_si256(_mm256_slli_epi16(odd[each], 8), _mm256_and_si256(even[each], low_byte));
    }
}

/* groups_decode() decodes 'count' groups. Rows that 'active' does not select leave their states as they are. */
TARGET_INLINE const uint8_t *groups_decode(const struct ss_kvrans_ranks *table, const struct constants *by,
                                           uint8_t *lows, uint8_t *highs, uint32_t active, int partial, int count,
                                           int steps, const uint8_t *next, uint8_t *target) {
    __m256i slot[GROUPS_MAX], factor[GROUPS_MAX], rank[GROUPS_MAX], frequency[GROUPS_MAX], rest[GROUPS_MAX];
    __m256i value[GROUPS_MAX], low[GROUPS_MAX], high[GROUPS_MAX];

    for (int each = 0; each < count; each++) {
        slot[each] = load256(lows + 32 * each);
    }
    ranks_of(table, by, slot, count, rank);
    lookups(table->frequency, by, rank, count, steps, frequency);
    lookups(table->start, by, rank, count, steps, rest);
    lookups(table->value, by, rank, count, steps, value);
    for (int each = 0; each < count; each++) {
        store256(target + 32 * each, value[each]);
        rest[each] = _mm256_sub_epi8(slot[each], rest[each]);
        factor[each] = load256(highs + 32 * each);
    }
    multiply(by, frequency, factor, rest, count, low, high);
    for (int each = 0; each < count; each++) {
        const __m256i short_of = _mm256_cmpeq_epi8(high[each], _mm256_setzero_si256());
        const uint32_t mask = (uint32_t)_mm256_movemask_epi8(short_of) & (partial ? active : ~0u);
        __m256i new_high = _mm256_or_si256(high[each], _mm256_and_si256(low[each], short_of));
        __m256i new_low = _mm256_blendv_epi8(low[each], spread(by, next, high[each], mask), short_of);
        next += _mm_popcnt_u32(mask);
        if (partial) {
            __m256i keep = load256(edge + 32 - __builtin_popcount(active));
            new_low = _mm256_blendv_epi8(slot[each], new_low, keep);
            new_high = _mm256_blendv_epi8(factor[each], new_high, keep);
        }
        store256(lows + 32 * each, new_low);
        store256(highs + 32 * each, new_high);
    }
    return next;
}

TARGET_INLINE void column_decode(struct ss_kvrans_decoding *decoding, const struct ss_kvrans_block *block,
                                 const struct ss_kvrans_ranks *table, int steps, uint8_t *target) {
    const uint32_t rows = block->rows, lane_mask = block->lanes - 1;
    const struct constants *by = constants_find();
    const uint8_t *next = decoding->next;
    uint32_t row = 0;

    for (; block->lanes >= 128 && row + 128 <= rows; row += 128) {
        next = groups_decode(table, by, decoding->low + (row & lane_mask), decoding->high + (row & lane_mask), 0, 0, 4,
                             steps, next, target + row);
    }
    for (; row + 64 <= rows; row += 64) {
        next = groups_decode(table, by, decoding->low + (row & lane_mask), decoding->high + (row & lane_mask), 0, 0, 2,
                             steps, next, target + row);
    }
    for (; row < rows; row += 32) {
        next = groups_decode(table, by, decoding->low + (row & lane_mask), decoding->high + (row & lane_mask),
                             rows - row < 32 ? (1u << (rows - row)) - 1 : ~0u, 1, 1, steps, next, target + row);
    }
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
            if (size >= 4) {
                memcpy(&bits, from, 4);
            } else {
                for (uint32_t byte = 0; byte < size; byte++) {
                    bits |= (uint32_t)from[byte] << 8 * byte;
                }
            }
            set = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), byte_of_lane);
            set = _mm256_cmpeq_epi8(_mm256_and_si256(set, bit_of_lane), bit_of_lane);
            value = _mm256_or_si256(value, _mm256_and_si256(set, _mm256_set1_epi8((char)(1 << bit))));
        }
        store256(target + row, value);
    }
}

/* ---- Decode: columns to rows --------------------------------------------------------------------------------- */

/* transpose16() turns 16 columns of 32 rows into pieces of rows: rows r and r + 16 in register r. */
TARGET_INLINE void transpose16(const uint8_t *tile, __m256i *target) {
    __m256i a[16], b[16];
    for (int column = 0; column < 16; column++) {
        a[column] = load256(tile + column * SS_KVRANS_ROWS_MAX);
    }
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

/* ---- Decode: rows to elements -------------------------------------------------------------------------------- */

/*
 * place_of() puts columns where unpacking takes them from: it works inside 128-bit lanes, so that for elements of two
 * bytes, of 32 columns, lane k has columns 8k to 8k + 7 and then 16 + 8k and so on; for four 4k to 4k + 3, then 8 + 4k.
 */
static uint32_t place_of(uint32_t column, uint32_t size) {
    if (size == 2) {
        return (column & 39) | (column & 8) << 1 | (column & 16) >> 1;
    }
    return size == 4 ? (column & 35) | (column & 4) << 2 | (column & 24) >> 1 : column;
}

/* elements_lay() parts the bytes of elements, each laid out for lookup(). */
TARGET static void elements_lay(const uint16_t *elements, uint32_t count, uint8_t *bytes) {
    const __m128i low_byte = _mm_set1_epi16(0xFF);
    __m128i low_before = _mm_setzero_si128(), high_before = low_before;

    for (uint32_t index = 0; index < count; index += STEP) {
        const __m128i first = _mm_loadu_si128((const __m128i *)(const void *)(elements + index));
        const __m128i second = _mm_loadu_si128((const __m128i *)(const void *)(elements + index + 8));
        const __m128i low = _mm_packus_epi16(_mm_and_si128(first, low_byte), _mm_and_si128(second, low_byte));
        const __m128i high = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
        _mm_store_si128((__m128i *)(void *)(bytes + index), _mm_xor_si128(low, low_before));
        _mm_store_si128((__m128i *)(void *)(bytes + count + index), _mm_xor_si128(high, high_before));
        low_before = low;
        high_before = high;
    }
}

/* stream() writes 32 bytes past the caches. */
TARGET_INLINE void stream(uint8_t *target, __m256i value) {
    _mm256_stream_si256((__m256i *)(void *)target, value);
}

/* rows_bin() makes elements of lines of entries, which are under 16 * steps; see rows_make(). */
TARGET_INLINE void rows_bin(const struct ss_kvrans_making *making, int steps, const uint8_t *lines, uint32_t row,
                            uint32_t count, size_t at) {
    const size_t size = (size_t)steps * STEP;
    const struct constants *by = constants_find();
    const uint8_t *bytes = (const uint8_t *)making->elements->bytes + row * 2 * size;
    const uint8_t *line = lines + (size_t)row * SS_KVRANS_TILE;
    uint8_t *target = making->target + 2 * (row * making->columns + at);

    for (; count > 0; count--) {
        const __m256i index[2] = {load256(line), load256(line + 32)};
        __m256i low[2], high[2];
        lookups(bytes, by, index, 2, steps, low);
        lookups(bytes + size, by, index, 2, steps, high);
        for (int half = 0; half < 2; half++) {
            stream(target + 64 * half, _mm256_unpacklo_epi8(low[half], high[half]));
            stream(target + 64 * half + 32, _mm256_unpackhi_epi8(low[half], high[half]));
        }
        bytes += 2 * size;
        line += SS_KVRANS_TILE;
        target += 2 * making->columns;
    }
}

/* merge1(), merge2() and merge4() write 32 lossless elements, whose first bytes are in 'first'. */
TARGET_INLINE void merge1(__m256i first, uint8_t *target) {
    const __m256i upper = _mm256_set1_epi8((char)0x80);

    stream(target, _mm256_or_si256(_mm256_andnot_si256(upper, _mm256_srli_epi16(first, 1)),
                                   _mm256_and_si256(upper, _mm256_slli_epi16(first, 7))));
}

TARGET_INLINE void merge2(__m256i first, const uint8_t *second, uint8_t *target) {
    const __m256i lower = _mm256_permute4x64_epi64(load256(second), 0xD8);
    const __m256i low = _mm256_unpacklo_epi8(lower, first), high = _mm256_unpackhi_epi8(lower, first);

    stream(target, _mm256_or_si256(_mm256_srli_epi16(low, 1), _mm256_slli_epi16(low, 15)));
    stream(target + 32, _mm256_or_si256(_mm256_srli_epi16(high, 1), _mm256_slli_epi16(high, 15)));
}

TARGET_INLINE void merge4(__m256i first, const uint8_t *const *lower, size_t at, uint8_t *target) {
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    const __m256i second = _mm256_permutevar8x32_epi32(load256(lower[0] + at), order);
    const __m256i third = _mm256_permutevar8x32_epi32(load256(lower[1] + at), order);
    const __m256i fourth = _mm256_permutevar8x32_epi32(load256(lower[2] + at), order);
    const __m256i upper[2] = {_mm256_unpacklo_epi8(second, first), _mm256_unpackhi_epi8(second, first)};
    const __m256i under[2] = {_mm256_unpacklo_epi8(fourth, third), _mm256_unpackhi_epi8(fourth, third)};

    for (int half = 0; half < 2; half++) {
        const __m256i low = _mm256_unpacklo_epi16(under[half], upper[half]);
        const __m256i high = _mm256_unpackhi_epi16(under[half], upper[half]);
        stream(target + 64 * half, _mm256_or_si256(_mm256_srli_epi32(low, 1), _mm256_slli_epi32(low, 31)));
        stream(target + 64 * half + 32, _mm256_or_si256(_mm256_srli_epi32(high, 1), _mm256_slli_epi32(high, 31)));
    }
}

/* line_merge() makes 32 lossless elements, the first of them number 'at' of the block. */
TARGET_INLINE void line_merge(const struct ss_kvrans_making *making, const uint8_t *line, size_t at) {
    uint8_t *target = making->target + at * making->size;
    const __m256i first = load256(line);

    if (making->size == 2) {
        merge2(first, making->planes.lower[0] + at, target);
    } else if (making->size == 4) {
        merge4(first, making->planes.lower, at, target);
    } else {
        merge1(first, target);
    }
}

TARGET_INLINE void rows_merge(const struct ss_kvrans_making *making, const uint8_t *lines, uint32_t row, uint32_t count,
                              size_t at) {
    for (const uint32_t end = row + count; row < end; row++) {
        const uint8_t *line = lines + (size_t)row * SS_KVRANS_TILE;
        const size_t first = row * making->columns + at;
        line_merge(making, line, first);
        line_merge(making, line + 32, first + 32);
        for (uint32_t plane = 0; plane + 1 < making->planes.count; plane++) { /* of the next tile */
            _mm_prefetch((const char *)((uintptr_t)making->planes.lower[plane] + first + 2 * SS_KVRANS_TILE - 1),
                         _MM_HINT_T0);
        }
    }
}

TARGET static void rows_make(const struct ss_kvrans_making *making, const uint8_t *lines, uint32_t row, uint32_t count,
                             size_t at) {
    const struct ss_kvrans_making here = *making; /* in registers, whatever is written */

    if (here.elements == NULL) {
        rows_merge(&here, lines, row, count, at);
    } else if (here.table_size == STEP) {
        rows_bin(&here, 1, lines, row, count, at);
    } else if (here.table_size == 2 * STEP) {
        rows_bin(&here, 2, lines, row, count, at);
    } else {
        rows_bin(&here, 4, lines, row, count, at);
    }
}

/* ---- Decode: a block ----------------------------------------------------------------------------------------- */

SS_KVRANS_COLUMN_DECODE(TARGET, 1)
SS_KVRANS_COLUMN_DECODE(TARGET, 2)
SS_KVRANS_COLUMN_DECODE(TARGET, 3)
SS_KVRANS_COLUMN_DECODE(TARGET, 4)

static const struct ss_kvrans_decode_steps steps = {
    .prepare = differences_all,
    .column = {column_decode_1, column_decode_2, column_decode_3, column_decode_4},
    .add_low_bits = add_low_bits,
    .tile_store = tile_store,
    .place = place_of,
    .elements_lay = elements_lay,
    .rows_make = rows_make,
};

static enum ss_result decode(const struct ss_kvrans_block *block, uint8_t *target) {
    return ss_kvrans_decode_by_steps(&steps, block, target);
}

static enum ss_result decode_elements(const struct ss_kvrans_block *block, enum ss_dtype dtype, const float *scales,
                                      struct ss_kvrans_elements *scratch, uint8_t *target) {
    return ss_kvrans_elements_by_steps(&steps, block, dtype, scales, scratch, target);
}

static enum ss_result decode_planes(const struct ss_kvrans_block *block, const struct ss_kvrans_planes *planes,
                                    struct ss_kvrans_tiles *tiles, uint8_t *target) {
    (void)tiles;
    return ss_kvrans_planes_by_steps(&steps, block, planes, target);
}

const struct ss_kvrans_kernels ss_kvrans_kernels_avx2 = {
    .name = "own, avx2",
    .decode = decode,
    .decode_elements = decode_elements,
    .decode_planes = decode_planes,
    .transpose = ss_kvrans_transpose_avx2,
    .present = ss_kvrans_present_scalar,
    .map = ss_kvrans_map_avx2,
    .count = ss_kvrans_count_avx2,
    .total = ss_kvrans_total_scalar,
    .assign = ss_kvrans_assign_avx2,
    .encode = ss_kvrans_encode_avx2,
};
