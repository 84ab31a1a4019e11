/* SPDX-License-Identifier: Apache-2.0 */
/* avx512_encode.c - what the encoder of kvrans does with AVX-512 to columns: transpose, sort into kinds, code */
#include "cpu/cpu.h"

#include <string.h>

#include "codecs/kvrans/avx512.h"

struct extremes {
    __m512i least, most, signed_least, signed_most;
};

/* tile_load() is the way back, from rows to columns; bytes where there are none become 0. */
TARGET static void tile_load(const uint8_t *source, size_t stride, uint32_t rows, uint32_t columns, uint8_t *tile,
                             struct extremes *seen) {
    struct extremes now = *seen; /* in registers */
    const __mmask64 mask = mask_of(columns);
    __m512i quarters[16][4];

    for (uint32_t quarter = 0; quarter < 4; quarter++) {
        __m512i lines[16];
        for (uint32_t index = 0; index < 16; index++) {
            uint32_t row = quarter * 16 + index;
            __m512i line = _mm512_setzero_si512();
            if (row < rows) {
                line = _mm512_maskz_loadu_epi8(mask, source + row * stride);
                now.least = _mm512_mask_min_epu8(now.least, mask, now.least, line);
                now.most = _mm512_mask_max_epu8(now.most, mask, now.most, line);
                now.signed_least = _mm512_mask_min_epi8(now.signed_least, mask, now.signed_least, line);
                now.signed_most = _mm512_mask_max_epi8(now.signed_most, mask, now.signed_most, line);
            }
            lines[index] = line;
        }
        lanes_transpose(lines);
        for (int index = 0; index < 16; index++) {
            quarters[index][quarter] = lines[index];
        }
    }
    *seen = now;
    for (uint32_t index = 0; index < 16; index++) {
        __m512i lines[4];
        quarters_join(quarters[index], lines);
        for (uint32_t quarter = 0; quarter < 4; quarter++) {
            if (quarter * 16 + index < columns) {
                _mm512_store_si512(tile + (size_t)(quarter * 16 + index) * SS_KVRANS_ROWS_MAX, lines[quarter]);
            }
        }
    }
}
enum { BAND_MAX = 256 * 1024 }; /* bytes of 64 rows that a second-level cache keeps until they are needed */

/* fetch() has bytes brought to the second-level cache; there need not be any. */
TARGET_INLINE void fetch(const uint8_t *source, size_t begin, size_t end, size_t limit) {
    for (size_t at = begin; at < end && at < limit; at += 64) {
        _mm_prefetch((const char *)(source + at), _MM_HINT_T1);
    }
}

TARGET void ss_kvrans_transpose_avx512(const struct ss_kvrans_plan *plan, const uint8_t *source,
                                       struct ss_kvrans_extremes *extremes) {
    const size_t band = (size_t)GROUP * plan->columns;
    const size_t size = band <= BAND_MAX ? (size_t)plan->rows * plan->columns : 0; /* that is worth fetching ahead */
    struct extremes seen = {.least = _mm512_set1_epi8(-1),
                            .most = _mm512_setzero_si512(),
                            .signed_least = _mm512_set1_epi8(127),
                            .signed_most = _mm512_set1_epi8(-128)};
    uint8_t bytes[4][64];

    /* Tiles are too narrow for the CPU to foresee what comes next: memory is read a band of 64 rows ahead, in order. */
    fetch(source, 0, band, size);
    for (uint32_t row = 0; row < plan->rows; row += GROUP) {
        for (uint32_t column = 0; column < plan->columns; column += TILE_COLUMNS) {
            const size_t ahead = (size_t)(row + GROUP) * plan->columns + (size_t)GROUP * column;
            fetch(source, ahead, ahead + (size_t)GROUP * TILE_COLUMNS, size);
            tile_load(source + (size_t)row * plan->columns + column, plan->columns,
                      plan->rows - row < GROUP ? plan->rows - row : GROUP,
                      plan->columns - column < TILE_COLUMNS ? plan->columns - column : TILE_COLUMNS,
                      plan->cells + (size_t)column * SS_KVRANS_ROWS_MAX + row, &seen);
        }
    }
    memcpy(bytes[0], &seen.least, 64);
    memcpy(bytes[1], &seen.most, 64);
    memcpy(bytes[2], &seen.signed_least, 64);
    memcpy(bytes[3], &seen.signed_most, 64);
    *extremes = (struct ss_kvrans_extremes){.least = 255, .most = 0, .signed_least = 127, .signed_most = -128};
    for (int lane = 0; lane < 64; lane++) {
        extremes->least = bytes[0][lane] < extremes->least ? bytes[0][lane] : extremes->least;
        extremes->most = bytes[1][lane] > extremes->most ? bytes[1][lane] : extremes->most;
        if ((int8_t)bytes[2][lane] < extremes->signed_least) {
            extremes->signed_least = (int8_t)bytes[2][lane];
        }
        if ((int8_t)bytes[3][lane] > extremes->signed_most) {
            extremes->signed_most = (int8_t)bytes[3][lane];
        }
    }
}

TARGET void ss_kvrans_total_avx512(const struct ss_kvrans_plan *plan, const uint8_t *column_table, uint32_t index_count,
                                   uint32_t (*totals)[SS_KVRANS_INDEX_MAX]) {
    for (uint32_t column = 0; column < plan->columns; column++) {
        const uint16_t *counts = plan->counts + (size_t)column * SS_KVRANS_INDEX_MAX;
        uint32_t *sums = totals[column_table[column]];
        for (uint32_t index = 0; index < index_count; index += 16) {
            __m512i more = _mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i *)(const void *)(counts + index)));
            _mm512_storeu_si512(sums + index, _mm512_add_epi32(_mm512_loadu_si512(sums + index), more));
        }
    }
}

/* least_of() returns the number of the least of 16 sums, the first of several. */
TARGET_INLINE uint8_t least_of(__m512i sums) {
    __mmask16 least = _mm512_cmpeq_epi32_mask(sums, _mm512_set1_epi32(_mm512_reduce_min_epi32(sums)));
    return (uint8_t)__builtin_ctz(least);
}

/* weighed() adds to 'sums' what a pair of indices costs one column with each table. */
TARGET_INLINE __m512i weighed(__m512i sums, const uint16_t *counts, __m512i cost) {
    uint32_t both;
    memcpy(&both, counts, sizeof both);
    return _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_set1_epi32((int)both), cost));
}

TARGET void ss_kvrans_assign_avx512(const struct ss_kvrans_plan *plan, const struct ss_kvrans_costs *costs,
                                    uint32_t index_count, uint8_t *column_table) {
    enum { TOGETHER = 4 }; /* columns, for which costs are loaded once */
    uint32_t column = 0;

    for (; column + TOGETHER <= plan->columns; column += TOGETHER) {
        const uint16_t *counts = plan->counts + (size_t)column * SS_KVRANS_INDEX_MAX;
        __m512i sums[TOGETHER];
        for (int each = 0; each < TOGETHER; each++) {
            sums[each] = _mm512_setzero_si512();
        }
        for (uint32_t pair = 0; pair < (index_count + 1) / 2; pair++) {
            const __m512i cost = _mm512_load_si512(costs->cost[pair]);
            for (uint32_t each = 0; each < TOGETHER; each++) {
                sums[each] = weighed(sums[each], counts + (size_t)each * SS_KVRANS_INDEX_MAX + 2 * pair, cost);
            }
        }
        for (uint32_t each = 0; each < TOGETHER; each++) {
            column_table[column + each] = least_of(sums[each]);
        }
    }
    for (; column < plan->columns; column++) {
        const uint16_t *counts = plan->counts + (size_t)column * SS_KVRANS_INDEX_MAX;
        __m512i sums = _mm512_setzero_si512();
        for (uint32_t pair = 0; pair < (index_count + 1) / 2; pair++) {
            sums = weighed(sums, counts + (size_t)2 * pair, _mm512_load_si512(costs->cost[pair]));
        }
        column_table[column] = least_of(sums);
    }
}

/* divide() divides 32 states of 16 bits by their frequencies: quotients, and in '*rest' what is left. */
TARGET_INLINE __m512i divide(__m512i state, __m512i frequency, __m512i reciprocal, __m512i *rest) {
    __m512i quotient = _mm512_mulhi_epu16(state, reciprocal);
    __m512i left = _mm512_sub_epi16(state, _mm512_mullo_epi16(quotient, frequency));
    __mmask32 more = _mm512_cmpge_epu16_mask(left, frequency);

    *rest = _mm512_mask_sub_epi16(left, more, left, frequency);
    return _mm512_mask_add_epi16(quotient, more, quotient, _mm512_set1_epi16(1));
}

/* encode_step() codes one symbol for each of 64 lanes and writes the bytes that this gives out before 'end'. */
TARGET_INLINE uint8_t *encode_step(const struct ss_kvrans_encode_table *table, __m512i index, __m512i *low,
                                   __m512i *high, __mmask64 active, __m512i positions, uint8_t *end) {
    const __m512i bytes = _mm512_set1_epi16(0x00FF), upper = _mm512_set1_epi16((short)0xFF00);
    const __m512i frequency = _mm512_permutexvar_epi8(index, _mm512_load_si512(table->frequency));
    const __m512i start = _mm512_permutexvar_epi8(index, _mm512_load_si512(table->start));
    const __m512i reciprocal_low = _mm512_permutexvar_epi8(index, _mm512_load_si512(table->reciprocal_low));
    const __m512i reciprocal_high = _mm512_permutexvar_epi8(index, _mm512_load_si512(table->reciprocal_high));
    const __mmask64 given = _mm512_mask_cmpge_epu8_mask(active, *high, frequency);
    const int count_given = (int)_mm_popcnt_u64(given);
    __m512i out = _mm512_maskz_compress_epi8(given, *low), even, odd, even_rest, odd_rest, rest, state_low, state_high;

    /* Rotated so that the last byte comes last: what a whole store writes below is written again later. */
    out = _mm512_permutexvar_epi8(_mm512_add_epi8(positions, _mm512_set1_epi8((char)count_given)), out);
    _mm512_storeu_si512(end - 64, out);
    state_low = _mm512_mask_mov_epi8(*low, given, *high);
    state_high = _mm512_mask_mov_epi8(*high, given, _mm512_setzero_si512());
    /* 0xF8: a | (b & c) */
    even = divide(_mm512_ternarylogic_epi64(_mm512_slli_epi16(state_high, 8), state_low, bytes, 0xF8),
                  _mm512_and_si512(frequency, bytes),
                  _mm512_ternarylogic_epi64(_mm512_slli_epi16(reciprocal_high, 8), reciprocal_low, bytes, 0xF8),
                  &even_rest);
    odd = divide(_mm512_ternarylogic_epi64(_mm512_srli_epi16(state_low, 8), state_high, upper, 0xF8),
                 _mm512_srli_epi16(frequency, 8),
                 _mm512_ternarylogic_epi64(_mm512_srli_epi16(reciprocal_low, 8), reciprocal_high, upper, 0xF8),
                 &odd_rest);
    rest = _mm512_or_si512(even_rest, _mm512_slli_epi16(odd_rest, 8));
    *low = _mm512_mask_add_epi8(*low, active, rest, start);
    *high = _mm512_mask_mov_epi8(*high, active, _mm512_or_si512(even, _mm512_slli_epi16(odd, 8)));
    return end - count_given;
}

/* columns_encode() codes all columns; constants for the counts keep all states in registers. */
TARGET_INLINE uint8_t *columns_encode(const struct ss_kvrans_plan *plan, uint8_t *end, struct states *given,
                                      uint32_t groups, uint32_t lane_groups, int full) {
    const __m512i positions = _mm512_load_si512(numbers);
    struct states states = *given;

    for (uint32_t column = plan->columns; column-- > 0;) {
        const struct ss_kvrans_encode_table *table = &plan->tables[plan->column_table[column]];
        const uint8_t *cells = plan->cells + (size_t)column * SS_KVRANS_ROWS_MAX;
        for (uint32_t group = groups; group-- > 0;) {
            end = encode_step(table, _mm512_load_si512(cells + GROUP * group), &states.low[group % lane_groups],
                              &states.high[group % lane_groups], full ? ~0ull : states.active[group], positions, end);
        }
    }
    *given = states;
    return end;
}

#define COLUMNS_ENCODE(name, groups, lane_groups, full)                                                                \
    TARGET static uint8_t *name(const struct ss_kvrans_plan *plan, uint8_t *end, struct states *states) {              \
        return columns_encode(plan, end, states, groups, lane_groups, full);                                           \
    }

COLUMNS_ENCODE(columns_encode_any, (plan->rows + GROUP - 1) / GROUP, plan->lanes / GROUP, 0)
COLUMNS_ENCODE(columns_encode_64, 4, 1, 1)
COLUMNS_ENCODE(columns_encode_128, 4, 2, 1)
COLUMNS_ENCODE(columns_encode_256, 4, 4, 1)

TARGET uint8_t *ss_kvrans_encode_avx512(const struct ss_kvrans_plan *plan, uint8_t *end, uint8_t *states_low,
                                        uint8_t *states_high) {
    struct states states;

    for (uint32_t group = 0; group < GROUPS; group++) {
        states.active[group] = plan->rows > GROUP * group ? mask_of(plan->rows - GROUP * group) : 0;
        states.low[group] = _mm512_setzero_si512();
        states.high[group] = _mm512_set1_epi8(SS_KVRANS_STATE_FIRST >> 8);
    }
    if (plan->rows != SS_KVRANS_ROWS_MAX) {
        end = columns_encode_any(plan, end, &states);
    } else if (plan->lanes == 256) {
        end = columns_encode_256(plan, end, &states);
    } else {
        end = (plan->lanes == 128 ? columns_encode_128 : columns_encode_64)(plan, end, &states);
    }
    for (uint32_t group = 0; group < plan->lanes / GROUP; group++) {
        _mm512_mask_storeu_epi8(states_low + GROUP * group, states.active[group], states.low[group]);
        _mm512_mask_storeu_epi8(states_high + GROUP * group, states.active[group], states.high[group]);
    }
    return end;
}
