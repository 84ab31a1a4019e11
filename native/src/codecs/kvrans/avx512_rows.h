/* SPDX-License-Identifier: Apache-2.0 */
/* avx512_rows.h - rows of symbols become elements of 'weighted'; a part of avx512.c */
#ifndef SS_KVRANS_AVX512_ROWS_H
#define SS_KVRANS_AVX512_ROWS_H

#include <string.h>

#include "codecs/kvrans/avx512.h"
#include "quantize/avx512.h"

/* Where 16 symbols of a row are in tiles that tile_turn() turned, each of 64 rows and 64 columns. */
enum { TILE_SIZE = GROUP * TILE_COLUMNS };

/* tile_turn() turns the bytes of 16 columns of 64 rows, but leaves each row in quarters, as lanes_transpose() does. */
TARGET static void tile_turn(const uint8_t *tile, uint8_t *turned) {
    __m512i lines[16];

    for (size_t index = 0; index < 16; index++) {
        lines[index] = _mm512_load_si512(tile + index * SS_KVRANS_ROWS_MAX);
    }
    lanes_transpose(lines);
    for (size_t index = 0; index < 16; index++) {
        _mm512_store_si512(turned + index * 4 * 64, lines[index]);
    }
}

/*
 * A tile of whole heads. What its rows are made of is copied here, because it need not be aligned elsewhere; and all of
 * it is written long before it is read, as a load of what is still on its way to the cache waits behind the elements.
 */
struct tile {
    _Alignas(64) uint8_t turned[SS_KVRANS_WIDTH_MAX * SS_KVRANS_ROWS_MAX];
    _Alignas(64) float steps[SS_KVRANS_WIDTH_MAX], centres[SS_SHIFTS][SS_KVRANS_WIDTH_MAX];
    const float *bases, *turns; /* angles of each SS_TURNS-th row, and the rows' turns from there on */
    uint8_t *target;
    size_t pitch;
};

/*
 * parted_place() returns the place of one of PARTED columns: the even ones are before the odd ones, so that those
 * of 32 bits that become the two halves of a 32-bit lane are in one lane of two registers. parted() puts numbers there.
 */
enum { PARTED = 32 };

TARGET_INLINE uint32_t parted_place(uint32_t column) {
    return column % 2 * (PARTED / 2) + column / 2;
}

TARGET_INLINE void parted(__m512 *low, __m512 *high) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512 first = *low, second = *high;

    *low = _mm512_permutex2var_ps(first, even, second);
    *high = _mm512_permutex2var_ps(first, odd, second);
}

/* A vector of cosines, and one of sines. */
struct angles {
    __m512 cosine, sine;
};

/* angles_load() loads 16 cosines, and the sines 'pairs' numbers behind them. */
TARGET_INLINE struct angles angles_load(const float *cosines, size_t pairs) {
    return (struct angles){_mm512_loadu_ps(cosines), _mm512_loadu_ps(cosines + pairs)};
}

/* turned() is angles() of weighted.h. */
TARGET_INLINE struct angles turned(struct angles from, struct angles turn) {
    return (struct angles){_mm512_fnmadd_ps(from.sine, turn.sine, _mm512_mul_ps(from.cosine, turn.cosine)),
                           _mm512_fmadd_ps(from.cosine, turn.sine, _mm512_mul_ps(from.sine, turn.cosine))};
}

/* angles_put() stores the angles of one row in that order. */
TARGET_INLINE void angles_put(struct angles first, struct angles second, size_t pairs, float *target) {
    parted(&first.cosine, &second.cosine);
    parted(&first.sine, &second.sine);
    _mm512_store_ps(target, first.cosine);
    _mm512_store_ps(target + 16, second.cosine);
    _mm512_store_ps(target + pairs, first.sine);
    _mm512_store_ps(target + pairs + 16, second.sine);
}

/* angles_make() makes the angles of every SS_TURNS-th row, and of as many turns. */
TARGET static void angles_make(const struct ss_kvrans_weighted *weighted) {
    const struct ss_weighted *slice = weighted->slice;
    const size_t pairs = slice->by.pairs;
    const float *turns = slice->channels->turns, *bases = turns + 2 * pairs * weighted->vector;
    float *target = weighted->angles;

    for (size_t at = 0; at < pairs; at += 32) {
        const struct angles first = angles_load(slice->first + at, pairs);
        const struct angles second = angles_load(slice->first + at + 16, pairs);
        for (size_t row = 0; row < SS_KVRANS_ROWS_MAX; row += SS_TURNS) {
            const float *base = bases + 2 * pairs * row + at;
            angles_put(turned(first, angles_load(base, pairs)), turned(second, angles_load(base + 16, pairs)), pairs,
                       target + 2 * pairs * (row / SS_TURNS) + at);
        }
        for (size_t turn = 0; turn < SS_TURNS; turn++) {
            const float *its = turns + 2 * pairs * turn + at;
            angles_put(angles_load(its, pairs), angles_load(its + 16, pairs), pairs,
                       target + 2 * pairs * (SS_KVRANS_ROWS_MAX / SS_TURNS + turn) + at);
        }
    }
}

/* tile_begin() copies what the tile's rows are made of, as ss_weighing_scale() computes it. */
TARGET static void tile_begin(struct tile *tile, const struct ss_kvrans_weighted *weighted, size_t column) {
    const struct ss_weighted *slice = weighted->slice;
    const __m512 factor = _mm512_set1_ps(ss_round_factor(weighted->elements->dtype));

    for (size_t at = 0; at < weighted->width; at += 32) {
        __m512 steps[2];
        for (size_t part = 0; part < 2; part++) {
            steps[part] = _mm512_mul_ps(_mm512_loadu_ps(slice->by.steps + column + at + 16 * part), factor);
        }
        parted(&steps[0], &steps[1]);
        for (size_t part = 0; part < 2; part++) {
            _mm512_store_ps(tile->steps + at + 16 * part, _mm512_mul_ps(steps[part], _mm512_set1_ps(SS_NUMBER_STEPS)));
        }
        for (size_t row = 0; row < SS_SHIFTS; row++) {
            const float *from = slice->centres + (weighted->vector + row) % SS_SHIFTS * slice->shift + column + at;
            __m512 centres[2] = {_mm512_mul_ps(_mm512_loadu_ps(from), factor),
                                 _mm512_mul_ps(_mm512_loadu_ps(from + 16), factor)};
            parted(&centres[0], &centres[1]);
            for (size_t part = 0; part < 2; part++) {
                _mm512_store_ps(
                    tile->centres[row] + at + 16 * part,
                    _mm512_sub_ps(centres[part], _mm512_mul_ps(steps[part], _mm512_set1_ps(SS_NUMBER_OFFSET))));
            }
        }
    }
    tile->bases = weighted->angles;
    tile->turns = tile->bases + 2 * slice->by.pairs * (SS_KVRANS_ROWS_MAX / SS_TURNS);
    tile->pitch = 2 * slice->by.length;
    tile->target = (uint8_t *)weighted->elements->target + weighted->vector * tile->pitch + 2 * column;
}

/* What the rows of one base have in common, in registers. */
struct rows {
    struct angles bases[TILE_COLUMNS / 16];
    __m512 steps[SS_KVRANS_WIDTH_MAX / 16];
};

/* One row: its symbols (TILE_SIZE apart, of 64 columns each), centres, turns and elements. */
struct row {
    const uint8_t *symbols;
    const float *centres, *turns;
    uint8_t *target;
};

/* numbers_of() are those of 16 columns of a row, as quantize/weighted.h computes them. */
TARGET_INLINE __m512 numbers_of(const struct rows *rows, const struct row *row, size_t column) {
    const uint8_t *place = row->symbols + column / TILE_COLUMNS * TILE_SIZE + column % TILE_COLUMNS * 4;
    const __m512i four = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)(const void *)place));
    const __m512i spread = _mm512_set_epi32(0x0F00, 0x0E00, 0x0D00, 0x0C00, 0x0B00, 0x0A00, 0x0900, 0x0800, 0x0700,
                                            0x0600, 0x0500, 0x0400, 0x0300, 0x0200, 0x0100, 0x0000);
    const __m512i number =
        _mm512_mask_shuffle_epi8(_mm512_castps_si512(_mm512_set1_ps(1)), 0x2222222222222222, four, spread);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(number), rows->steps[column / 16],
                           _mm512_load_ps(row->centres + column));
}

/* rounded_stream() writes 32 elements past the caches: those of even columns, and those of odd ones. */
TARGET_INLINE void rounded_stream(int half, __m512 even, __m512 odd, uint8_t *target) {
    __m512i line;

    if (half) {
        const __m256i evens = ss_float16_of_16(even), odds = ss_float16_of_16(odd);
        const __m512i order = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        line = _mm512_permutex2var_epi64(_mm512_castsi256_si512(_mm256_unpacklo_epi16(evens, odds)), order,
                                         _mm512_castsi256_si512(_mm256_unpackhi_epi16(evens, odds)));
    } else {
        line = _mm512_mask_alignr_epi8(_mm512_castps_si512(odd), 0x3333333333333333, _mm512_castps_si512(even),
                                       _mm512_castps_si512(even), 2);
    }
    _mm512_stream_si512((void *)target, line);
}

/* row_unweigh() makes elements of a row: of 64 columns with 0 or 32 rotated pairs, or of 128 with 64. */
TARGET_INLINE void row_unweigh(const struct rows *rows, const struct row *row, size_t pairs, int half) {
    for (size_t at = 0; at < pairs; at += 32) {
        __m512 first[2], second[2];
        for (size_t part = 0; part < 2; part++) {
            const size_t one = at + 16 * part, other = one + pairs;
            const __m512 a = numbers_of(rows, row, one), b = numbers_of(rows, row, other);
            const struct angles angles = turned(rows->bases[one / 16], angles_load(row->turns + one, pairs));
            first[part] = _mm512_fnmadd_ps(b, angles.sine, _mm512_mul_ps(a, angles.cosine));
            second[part] = _mm512_fmadd_ps(a, angles.sine, _mm512_mul_ps(b, angles.cosine));
        }
        rounded_stream(half, first[0], first[1], row->target + 2 * at);
        rounded_stream(half, second[0], second[1], row->target + 2 * (at + pairs));
    }
    for (size_t at = 0; pairs == 0 && at < TILE_COLUMNS; at += 32) {
        rounded_stream(half, numbers_of(rows, row, at), numbers_of(rows, row, at + 16), row->target + 2 * at);
    }
}

/* The rows of one base are those whose symbols tile_turn() puts 4 * GROUP apart. */
_Static_assert(SS_TURNS == 16 && SS_TURNS % SS_SHIFTS == 0, "rows of a base");

/* rows_unweigh() makes elements of 'count' rows of a tile, whole SS_TURNS of them. */
TARGET_INLINE void rows_unweigh(const struct tile *tile, size_t first, size_t count, size_t pairs, int half) {
    const size_t width = pairs == TILE_COLUMNS ? 2 * TILE_COLUMNS : TILE_COLUMNS;
    uint8_t *target = tile->target + first * tile->pitch;
    struct rows rows;

    for (size_t part = 0; part < width / 16; part++) {
        rows.steps[part] = _mm512_load_ps(tile->steps + 16 * part);
    }
    for (const size_t end = first + count; first < end; first += SS_TURNS) {
        const uint8_t *symbols = tile->turned + first / GROUP * GROUP * width + first % GROUP;
        for (size_t part = 0; part < pairs / 16; part++) {
            rows.bases[part] = angles_load(tile->bases + 2 * pairs * (first / SS_TURNS) + 16 * part, pairs);
        }
        for (size_t turn = 0; turn < SS_TURNS; turn++, target += tile->pitch) {
            const struct row row = {symbols + 4 * GROUP * turn, tile->centres[turn % SS_SHIFTS],
                                    tile->turns + 2 * pairs * turn, target};
            row_unweigh(&rows, &row, pairs, half);
        }
    }
}

typedef void (*rows_maker)(const struct tile *tile, size_t row, size_t count);

#define ROWS_UNWEIGH(name, pairs, half)                                                                                \
    TARGET static void name(const struct tile *tile, size_t row, size_t count) {                                       \
        rows_unweigh(tile, row, count, pairs, half);                                                                   \
    }

ROWS_UNWEIGH(rows_unweigh_bfloat16_0, 0, 0)
ROWS_UNWEIGH(rows_unweigh_bfloat16_32, 32, 0)
ROWS_UNWEIGH(rows_unweigh_bfloat16_64, 64, 0)
ROWS_UNWEIGH(rows_unweigh_float16_0, 0, 1)
ROWS_UNWEIGH(rows_unweigh_float16_32, 32, 1)
ROWS_UNWEIGH(rows_unweigh_float16_64, 64, 1)

#endif /* SS_KVRANS_AVX512_ROWS_H */
