/* SPDX-License-Identifier: Apache-2.0 */
/* scalar.c - the kernels of kvrans in portable C: the reference that all others match byte for byte */
#include "codecs/kvrans/scalar.h"

#include <string.h>

/* ---- Decode -------------------------------------------------------------------------------------------------- */

/* low_bits() returns the low bits of one row of one column. */
static uint8_t low_bits(const struct ss_kvrans_block *block, uint32_t column, uint32_t row) {
    const size_t plane_size = (block->rows + 7) / 8;
    const uint8_t *planes = block->planes + column * block->shift * plane_size;
    uint8_t bits = 0;

    for (uint32_t bit = 0; bit < block->shift; bit++) {
        bits |= (uint8_t)((planes[bit * plane_size + row / 8] >> row % 8 & 1) << bit);
    }
    return bits;
}

static enum ss_result decode(const struct ss_kvrans_block *block, uint8_t *target) {
    const uint8_t *next = block->coded, *end = block->coded + block->coded_size;
    const uint32_t states_used = block->rows < block->lanes ? block->rows : block->lanes;
    uint32_t states[SS_KVRANS_LANES_MAX];

    for (uint32_t lane = 0; lane < states_used; lane++) {
        states[lane] = (uint32_t)(block->states_high[lane] << 8 | block->states_low[lane]);
    }
    for (uint32_t column = 0; column < block->columns; column++) {
        const struct ss_kvrans_table *table = &block->tables[block->column_table[column]];
        for (uint32_t row = 0; row < block->rows; row++) {
            uint32_t *state = &states[row % block->lanes];
            uint32_t slot = *state & 255, index = table->index[slot];

            *state = table->frequency[index] * (*state >> 8) + slot - table->start[index];
            if (*state < SS_KVRANS_STATE_FIRST) {
                if (next == end) {
                    return SS_BAD_DATA;
                }
                *state = *state << 8 | *next++;
            }
            target[(size_t)row * block->columns + column] = block->value[index] | low_bits(block, column, row);
        }
    }
    for (uint32_t lane = 0; lane < states_used; lane++) {
        if (states[lane] != SS_KVRANS_STATE_FIRST) {
            return SS_BAD_DATA;
        }
    }
    return next == end ? SS_OK : SS_BAD_DATA;
}

/* ---- Encode -------------------------------------------------------------------------------------------------- */

void ss_kvrans_transpose_scalar(const struct ss_kvrans_plan *plan, const uint8_t *source,
                                struct ss_kvrans_extremes *extremes) {
    uint8_t least = 255, most = 0;
    int8_t signed_least = 127, signed_most = -128;

    for (uint32_t row = 0; row < plan->rows; row++) {
        for (uint32_t column = 0; column < plan->columns; column++) {
            uint8_t byte = source[(size_t)row * plan->columns + column];
            plan->cells[(size_t)column * SS_KVRANS_ROWS_MAX + row] = byte;
            least = byte < least ? byte : least;
            most = byte > most ? byte : most;
            signed_least = (int8_t)byte < signed_least ? (int8_t)byte : signed_least;
            signed_most = (int8_t)byte > signed_most ? (int8_t)byte : signed_most;
        }
    }
    *extremes = (struct ss_kvrans_extremes){
        .least = least, .most = most, .signed_least = signed_least, .signed_most = signed_most};
}

void ss_kvrans_present_scalar(const uint8_t *source, size_t size, uint8_t *seen) {
    for (size_t index = 0; index < size; index++) {
        seen[source[index]] = 1;
    }
}

void ss_kvrans_map_scalar(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet,
                          uint8_t *planes) {
    const size_t plane_size = (plan->rows + 7) / 8;

    memset(planes, 0, plan->columns * alphabet->shift * plane_size);
    for (uint32_t column = 0; column < plan->columns; column++) {
        uint8_t *cells = plan->cells + (size_t)column * SS_KVRANS_ROWS_MAX;
        for (uint32_t bit = 0; bit < alphabet->shift; bit++) {
            for (uint32_t row = 0; row < plan->rows; row++) {
                planes[row / 8] |= (uint8_t)((cells[row] >> bit & 1) << row % 8);
            }
            planes += plane_size;
        }
        for (uint32_t row = 0; row < plan->rows; row++) {
            cells[row] = alphabet->index[cells[row] >> alphabet->shift];
        }
    }
}

void ss_kvrans_count_scalar(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet) {
    memset(plan->counts, 0, (size_t)plan->columns * SS_KVRANS_INDEX_MAX * sizeof *plan->counts);
    for (uint32_t column = 0; column < plan->columns; column++) {
        const uint8_t *cells = plan->cells + (size_t)column * SS_KVRANS_ROWS_MAX;
        uint16_t *counts = plan->counts + (size_t)column * SS_KVRANS_INDEX_MAX;
        for (uint32_t row = 0; row < plan->rows; row++) {
            counts[alphabet->index[cells[row] >> alphabet->shift]]++;
        }
    }
}

void ss_kvrans_total_scalar(const struct ss_kvrans_plan *plan, const uint8_t *column_table, uint32_t index_count,
                            uint32_t (*totals)[SS_KVRANS_INDEX_MAX]) {
    for (uint32_t column = 0; column < plan->columns; column++) {
        const uint16_t *counts = plan->counts + (size_t)column * SS_KVRANS_INDEX_MAX;
        uint32_t *total = totals[column_table[column]];
        for (uint32_t index = 0; index < index_count; index++) {
            total[index] += counts[index];
        }
    }
}

void ss_kvrans_assign_scalar(const struct ss_kvrans_plan *plan, const struct ss_kvrans_costs *costs,
                             uint32_t index_count, uint8_t *column_table) {
    for (uint32_t column = 0; column < plan->columns; column++) {
        const uint16_t *counts = plan->counts + (size_t)column * SS_KVRANS_INDEX_MAX;
        int32_t sums[SS_KVRANS_TABLES_MAX] = {0};
        uint32_t best = 0;
        for (uint32_t pair = 0; pair < (index_count + 1) / 2; pair++) {
            for (uint32_t table = 0; table < SS_KVRANS_TABLES_MAX; table++) {
                sums[table] +=
                    counts[2 * pair] * costs->cost[pair][table][0] + counts[2 * pair + 1] * costs->cost[pair][table][1];
            }
        }
        for (uint32_t table = 1; table < SS_KVRANS_TABLES_MAX; table++) {
            best = sums[table] < sums[best] ? table : best;
        }
        column_table[column] = (uint8_t)best;
    }
}

uint8_t *ss_kvrans_encode_scalar(const struct ss_kvrans_plan *plan, uint8_t *end, uint8_t *states_low,
                                 uint8_t *states_high) {
    const uint32_t states_used = plan->rows < plan->lanes ? plan->rows : plan->lanes;
    uint32_t states[SS_KVRANS_LANES_MAX];

    for (uint32_t lane = 0; lane < states_used; lane++) {
        states[lane] = SS_KVRANS_STATE_FIRST;
    }
    for (uint32_t column = plan->columns; column-- > 0;) {
        const struct ss_kvrans_encode_table *table = &plan->tables[plan->column_table[column]];
        const uint8_t *cells = plan->cells + (size_t)column * SS_KVRANS_ROWS_MAX;
        for (uint32_t row = plan->rows; row-- > 0;) {
            uint32_t *state = &states[row % plan->lanes];
            uint32_t frequency = table->frequency[cells[row]], quotient;

            if (*state >= frequency << 8) {
                *--end = (uint8_t)*state;
                *state >>= 8;
            }
            quotient = *state / frequency;
            *state = (quotient << 8) + table->start[cells[row]] + (*state - quotient * frequency);
        }
    }
    for (uint32_t lane = 0; lane < states_used; lane++) {
        states_low[lane] = (uint8_t)states[lane];
        states_high[lane] = (uint8_t)(states[lane] >> 8);
    }
    return end;
}

const struct ss_kvrans_kernels ss_kvrans_kernels_scalar = {
    .name = "own, scalar",
    .decode = decode,
    .transpose = ss_kvrans_transpose_scalar,
    .present = ss_kvrans_present_scalar,
    .map = ss_kvrans_map_scalar,
    .count = ss_kvrans_count_scalar,
    .total = ss_kvrans_total_scalar,
    .assign = ss_kvrans_assign_scalar,
    .encode = ss_kvrans_encode_scalar,
};
