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

#ifdef SS_ARCH_X86_64
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

/* How far the bytes of the upper eight of 16 lanes begin behind those of the lower eight, which take that many. */
#define LATER(count)                                                                                                   \
    { 0, 0, 0, 0, 0, 0, 0, 0, count, count, count, count, count, count, count, count }
static const _Alignas(16) uint8_t spread_later[9][16] = {LATER(0), LATER(1), LATER(2), LATER(3), LATER(4),
                                                         LATER(5), LATER(6), LATER(7), LATER(8)};

/* spread16() gives the lanes that 'mask' selects the next bytes, in order, and all others 0. Reads 16 bytes. */
TARGET_INLINE __m128i spread16(const uint8_t *next, uint32_t low, uint32_t high) {
    const __m128i lower = _mm_loadl_epi64((const __m128i *)spread_order[low]);
    const __m128i both = _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(lower), (const __m64 *)spread_order[high]));
    const __m128i later = _mm_load_si128((const __m128i *)spread_later[_mm_popcnt_u32(low)]);
    return _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)next), _mm_add_epi8(both, later));
}

/* spread() does so for 32 lanes. Reads 32 bytes. */
TARGET_INLINE __m256i spread(const uint8_t *next, uint32_t mask) {
    const uint8_t *later = next + _mm_popcnt_u32(mask & 0xFFFF);
    return _mm256_set_m128i(spread16(later, mask >> 16 & 0xFF, mask >> 24),
                            spread16(next, mask & 0xFF, mask >> 8 & 0xFF));
}

/* What a group of 32 rows goes through; both bytes of a state become those of the next one, but for bytes to come. */
struct group {
    __m256i slot, factor, rank, frequency, rest, low, high, short_of;
    uint32_t mask; /* of what is short of a byte */
};

/* multiply() makes the states' bytes: frequency * factor + rest. */
TARGET_INLINE void multiply(struct group *group) {
    const __m256i low_byte = _mm256_set1_epi16(0xFF), high_byte = _mm256_set1_epi16((short)0xFF00);
    __m256i even =
        _mm256_mullo_epi16(_mm256_and_si256(group->frequency, low_byte), _mm256_and_si256(group->factor, low_byte));
    __m256i odd = _mm256_mullo_epi16(_mm256_srli_epi16(group->frequency, 8), _mm256_srli_epi16(group->factor, 8));

    even = _mm256_add_epi16(even, _mm256_and_si256(group->rest, low_byte));
    odd = _mm256_add_epi16(odd, _mm256_srli_epi16(group->rest, 8));
    group->high = _mm256_or_si256(_mm256_and_si256(odd, high_byte), _mm256_srli_epi16(even, 8));
    group->low = _mm256_or_si256(_mm256_slli_epi16(odd, 8), _mm256_and_si256(even, low_byte));
}

/*
 * groups_decode() decodes 32 rows, or twice as many: what they wait for is then waited for once. Those that 'active'
 * does not select leave their states as they are.
 */
TARGET_INLINE const uint8_t *groups_decode(const struct ss_kvrans_ranks *table, uint8_t *low, uint8_t *high,
                                           uint32_t active, int partial, int count, int steps, const uint8_t *next,
                                           uint8_t *target) {
    struct group groups[2];

    for (int each = 0; each < count; each++) {
        groups[each].slot = load256(low + 32 * each);
        groups[each].rank = rank_of(table, groups[each].slot);
    }
    for (int each = 0; each < count; each++) {
        struct group *group = &groups[each];
        group->frequency = lookup(table->frequency, group->rank, steps);
        group->rest = _mm256_sub_epi8(group->slot, lookup(table->start, group->rank, steps));
        store256(target + 32 * each, lookup(table->value, group->rank, steps));
    }
    for (int each = 0; each < count; each++) {
        struct group *group = &groups[each];
        group->factor = load256(high + 32 * each);
        multiply(group);
        group->short_of = _mm256_cmpeq_epi8(group->high, _mm256_setzero_si256());
        group->mask = (uint32_t)_mm256_movemask_epi8(group->short_of);
        if (partial)
            group->mask &= active;
    }
    for (int each = 0; each < count; each++) {
        const struct group *group = &groups[each];
        __m256i new_high = _mm256_or_si256(group->high, _mm256_and_si256(group->low, group->short_of));
        __m256i new_low = _mm256_or_si256(_mm256_andnot_si256(group->short_of, group->low), spread(next, group->mask));
        next += _mm_popcnt_u32(group->mask);
        if (partial) {
            __m256i keep = load256(edge + 32 - __builtin_popcount(active));
            new_low = _mm256_blendv_epi8(group->slot, new_low, keep);
            new_high = _mm256_blendv_epi8(group->factor, new_high, keep);
        }
        store256(low + 32 * each, new_low);
        store256(high + 32 * each, new_high);
    }
    return next;
}

TARGET_INLINE void column_decode(struct ss_kvrans_decoding *decoding, const struct ss_kvrans_block *block,
                                 const struct ss_kvrans_ranks *table, int steps, uint8_t *target) {
    const uint32_t rows = block->rows, lane_mask = block->lanes - 1;
    const uint8_t *next = decoding->next;
    uint32_t row = 0;

    for (; row + 64 <= rows; row += 64)
        next = groups_decode(table, decoding->low + (row & lane_mask), decoding->high + (row & lane_mask), 0, 0, 2,
                             steps, next, target + row);
    for (; row < rows; row += 32)
        next = groups_decode(table, decoding->low + (row & lane_mask), decoding->high + (row & lane_mask),
                             rows - row < 32 ? (1u << (rows - row)) - 1 : ~0u, 1, 1, steps, next, target + row);
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

/* ---- Decode: rows to elements -------------------------------------------------------------------------------- */

/*
 * place_of() puts columns where unpacking takes them from: it works inside 128-bit lanes, so that for elements of two
 * bytes, of 32 columns, lane k has columns 8k to 8k + 7 and then 16 + 8k and so on; for four 4k to 4k + 3, then 8 + 4k.
 */
static uint32_t place_of(uint32_t column, uint32_t size) {
    if (size == 2)
        return (column & 39) | (column & 8) << 1 | (column & 16) >> 1;
    return size == 4 ? (column & 35) | (column & 4) << 2 | (column & 24) >> 1 : column;
}

/* elements_lay() parts the bytes of elements, each laid out for lookup(). */
TARGET static void elements_lay(const uint16_t *elements, uint32_t index_count, uint8_t (*bytes)[SS_KVRANS_INDEX_MAX]) {
    const __m128i low_byte = _mm_set1_epi16(0xFF);
    __m128i low_before = _mm_setzero_si128(), high_before = low_before;

    for (uint32_t index = 0; index < index_count; index += STEP) {
        const __m128i first = _mm_loadu_si128((const __m128i *)(const void *)(elements + index));
        const __m128i second = _mm_loadu_si128((const __m128i *)(const void *)(elements + index + 8));
        const __m128i low = _mm_packus_epi16(_mm_and_si128(first, low_byte), _mm_and_si128(second, low_byte));
        const __m128i high = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
        _mm_store_si128((__m128i *)(void *)(bytes[0] + index), _mm_xor_si128(low, low_before));
        _mm_store_si128((__m128i *)(void *)(bytes[1] + index), _mm_xor_si128(high, high_before));
        low_before = low;
        high_before = high;
    }
}

/* stream() writes 32 bytes past the caches. */
TARGET_INLINE void stream(uint8_t *target, __m256i value) {
    _mm256_stream_si256((__m256i *)(void *)target, value);
}

/* binned2() writes 32 elements of the indices 'index'. */
TARGET_INLINE void binned2(const uint8_t (*bytes)[SS_KVRANS_INDEX_MAX], int steps_each, __m256i index,
                           uint8_t *target) {
    const __m256i low = lookup(bytes[0], index, steps_each), high = lookup(bytes[1], index, steps_each);

    stream(target, _mm256_unpacklo_epi8(low, high));
    stream(target + 32, _mm256_unpackhi_epi8(low, high));
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

/* line_make() makes 32 elements, the first of them number 'at' of the block, in row 'row'. */
TARGET_INLINE void line_make(const struct ss_kvrans_making *making, const struct ss_kvrans_planes *planes,
                             const uint8_t *line, uint32_t row, size_t at) {
    uint8_t *target = making->target + at * making->size;
    const __m256i first = load256(line);

    if (making->elements != NULL && making->index_count <= 2 * STEP)
        binned2(making->elements->bytes[row], 2, first, target);
    else if (making->elements != NULL)
        binned2(making->elements->bytes[row], 4, first, target);
    else if (making->size == 2)
        merge2(first, planes->lower[0] + at, target);
    else if (making->size == 4)
        merge4(first, planes->lower, at, target);
    else
        merge1(first, target);
}

TARGET static void rows_make(const struct ss_kvrans_making *making, const uint8_t *lines, uint32_t row, uint32_t count,
                             size_t at) {
    const struct ss_kvrans_making here = *making; /* in registers, whatever is written */
    struct ss_kvrans_planes planes = {.count = 1};

    if (here.planes != NULL)
        planes = *here.planes;
    for (const uint32_t end = row + count; row < end; row++) {
        const uint8_t *line = lines + (size_t)row * SS_KVRANS_TILE;
        const size_t first = row * here.columns + at;
        line_make(&here, &planes, line, row, first);
        line_make(&here, &planes, line + 32, row, first + 32);
        for (uint32_t plane = 0; plane + 1 < planes.count; plane++) /* of the next tile */
            _mm_prefetch((const char *)((uintptr_t)planes.lower[plane] + first + 2 * SS_KVRANS_TILE - 1), _MM_HINT_T0);
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
                                    uint8_t *target) {
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
#else
typedef int ss_kvrans_avx2_unused; /* ISO C wants a declaration in every file */
#endif
