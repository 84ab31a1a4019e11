/* SPDX-License-Identifier: Apache-2.0 */
/* narrow.c - what the AVX2 and the NEON kernels of kvrans share; see narrow.h */
#include "codecs/kvrans/narrow.h"

#include <string.h>

/* ranks_make() lays out one table, and returns how many symbols it has; 'values' are by index. */
static uint32_t ranks_make(const uint8_t *values, const struct ss_kvrans_table *table, struct ss_kvrans_ranks *ranks) {
    uint32_t rank = 0;

    memset(ranks, 0, sizeof *ranks);
    for (uint32_t slot = 0; slot < SS_KVRANS_SLOTS; rank++) {
        const uint32_t index = table->index[slot], end = slot + table->frequency[index];
        ranks->frequency[rank] = table->frequency[index];
        ranks->start[rank] = table->start[index];
        ranks->value[rank] = values[index];
        if (slot % 8 != 0) {
            ranks->breaks[slot / 8] |= (uint8_t)(1u << (slot % 8 - 1));
        }
        for (uint32_t eight = (slot + 7) / 8; eight < (end + 7) / 8; eight++) {
            ranks->base[eight] = (uint8_t)rank;
        }
        slot = end;
    }
    return rank;
}

/* decoding_begin() fills everything but the tile from a block, of which 'values' are wanted. */
static void decoding_begin(const struct ss_kvrans_decode_steps *steps, struct ss_kvrans_decoding *decoding,
                           const struct ss_kvrans_block *block, const uint8_t *values) {
    const uint32_t states = block->rows < block->lanes ? block->rows : block->lanes;
    uint32_t last = 0;

    for (uint32_t column = 0; column < block->columns; column++) {
        last = block->column_table[column] > last ? block->column_table[column] : last;
    }
    decoding->table_count = last + 1;
    decoding->index_count = decoding->symbols = 0;
    for (uint32_t number = 0; number <= last; number++) {
        const uint32_t symbols = ranks_make(values, &block->tables[number], &decoding->tables[number]);
        const uint32_t most = block->tables[number].index[SS_KVRANS_SLOTS - 1]; /* slots are in their symbols' order */
        decoding->index_count = most >= decoding->index_count ? most + 1 : decoding->index_count;
        decoding->symbols = symbols > decoding->symbols ? symbols : decoding->symbols;
    }
    if (steps->prepare != NULL) {
        steps->prepare(decoding);
    }
    memset(decoding->low, 0, sizeof(decoding->low)); /* lanes that no row uses go through the motions, too */
    memset(decoding->high, 0, sizeof(decoding->high));
    memcpy(decoding->low, block->states_low, states);
    memcpy(decoding->high, block->states_high, states);
    decoding->next = block->coded;
    decoding->end = block->coded + block->coded_size;
    decoding->in_tail = 0;
}

/* tail_begin() moves the last coded bytes to where one may read on behind them. */
static void tail_begin(struct ss_kvrans_decoding *decoding) {
    const size_t left = (size_t)(decoding->end - decoding->next);

    memset(decoding->tail, 0, sizeof(decoding->tail));
    memcpy(decoding->tail, decoding->next, left);
    decoding->next = decoding->tail;
    decoding->end = decoding->tail + left;
    decoding->in_tail = 1;
}

/* decoding_end() returns SS_OK where the coded bytes ended with the last row, in the states that they should. */
static enum ss_result decoding_end(const struct ss_kvrans_decoding *decoding, const struct ss_kvrans_block *block) {
    const uint32_t states = block->rows < block->lanes ? block->rows : block->lanes;
    uint32_t wrong = decoding->next != decoding->end;

    for (uint32_t lane = 0; lane < states; lane++) {
        wrong |= (uint32_t)(decoding->low[lane] | decoding->high[lane] << 8) ^ SS_KVRANS_STATE_FIRST;
    }
    return wrong == 0 ? SS_OK : SS_BAD_DATA;
}

/*
 * column_decode() decodes one column. Returns 0 where coded bytes are missing.
 *
 * A column takes at most one byte for each row, so it is decoded without a check of the end. Once fewer bytes are left,
 * it may also read bytes behind the end, so this is checked after the column.
 */
static int column_decode(const struct ss_kvrans_decode_steps *steps, struct ss_kvrans_decoding *decoding,
                         const struct ss_kvrans_block *block, uint32_t column, uint8_t *target) {
    const size_t planes_size = (size_t)(block->rows + 7) / 8 * block->shift;
    const struct ss_kvrans_ranks *table = &decoding->tables[block->column_table[column]];

    if (decoding->end - decoding->next < SS_KVRANS_ROWS_MAX + SS_KVRANS_READ_BEYOND && !decoding->in_tail) {
        tail_begin(decoding);
    }
    steps->column[(decoding->symbols - 1) / 16](decoding, block, table, target);
    if (decoding->next > decoding->end) {
        return 0;
    }
    if (block->shift > 0) {
        steps->add_low_bits(block->planes + column * planes_size, block->rows, block->shift, target);
    }
    return 1;
}

enum ss_result ss_kvrans_decode_by_steps(const struct ss_kvrans_decode_steps *steps,
                                         const struct ss_kvrans_block *block, uint8_t *target) {
    struct ss_kvrans_decoding decoding;

    decoding_begin(steps, &decoding, block, block->value);
    for (uint32_t first = 0; first < block->columns; first += SS_KVRANS_TILE) {
        const uint32_t left = block->columns - first, count = left < SS_KVRANS_TILE ? left : SS_KVRANS_TILE;
        for (uint32_t column = 0; column < count; column++) {
            if (!column_decode(steps, &decoding, block, first + column,
                               decoding.tile + (size_t)column * SS_KVRANS_ROWS_MAX)) {
                return SS_BAD_DATA;
            }
        }
        steps->tile_store(decoding.tile, block->rows, block->columns, count, target + first);
    }
    return decoding_end(&decoding, block);
}

/* rows_by_steps() decodes a tile while it makes elements of the one before, some rows behind each column. */
static enum ss_result rows_by_steps(const struct ss_kvrans_decode_steps *steps, struct ss_kvrans_decoding *decoding,
                                    const struct ss_kvrans_block *block, const struct ss_kvrans_making *making) {
    enum { ROWS_EACH = SS_KVRANS_ROWS_MAX / SS_KVRANS_TILE };
    _Alignas(64) uint8_t lines[SS_KVRANS_TILE * SS_KVRANS_ROWS_MAX];

    for (uint32_t first = 0; first < block->columns; first += SS_KVRANS_TILE) {
        for (uint32_t column = 0; column < SS_KVRANS_TILE; column++) {
            const size_t place = steps->place(column, making->size);
            if (!column_decode(steps, decoding, block, first + column, decoding->tile + place * SS_KVRANS_ROWS_MAX)) {
                return SS_BAD_DATA;
            }
            if (first > 0) {
                steps->rows_make(making, lines, ROWS_EACH * column, ROWS_EACH, first - SS_KVRANS_TILE);
            }
        }
        steps->tile_store(decoding->tile, SS_KVRANS_ROWS_MAX, SS_KVRANS_TILE, SS_KVRANS_TILE, lines);
    }
    steps->rows_make(making, lines, 0, SS_KVRANS_ROWS_MAX, block->columns - SS_KVRANS_TILE);
    return decoding_end(decoding, block);
}

enum ss_result ss_kvrans_elements_by_steps(const struct ss_kvrans_decode_steps *steps,
                                           const struct ss_kvrans_block *block, enum ss_dtype dtype,
                                           const float *scales, struct ss_kvrans_elements *scratch, uint8_t *target) {
    enum { TOGETHER = 16 }; /* rows whose elements are computed by one call */
    struct ss_kvrans_making making = {.elements = scratch, .target = target, .columns = block->columns, .size = 2};
    struct ss_kvrans_decoding decoding;
    uint8_t entries[SS_KVRANS_INDEX_MAX], bytes[SS_KVRANS_INDEX_MAX], values[TOGETHER * SS_KVRANS_INDEX_MAX];
    uint16_t elements[TOGETHER * SS_KVRANS_INDEX_MAX];
    uint32_t count;

    for (uint32_t index = 0; index < SS_KVRANS_INDEX_MAX; index++) {
        entries[index] = (uint8_t)(index << block->shift);
    }
    ss_kvrans_entries(block, bytes);
    decoding_begin(steps, &decoding, block, entries);
    count = decoding.index_count << block->shift;
    making.table_size = count = count <= 16 ? 16 : count <= 32 ? 32 : SS_KVRANS_INDEX_MAX;
    for (uint32_t row = 0; row < TOGETHER; row++) {
        memcpy(values + row * count, bytes, count);
    }
    for (uint32_t first = 0; first < SS_KVRANS_ROWS_MAX; first += TOGETHER) {
        enum ss_result result =
            ss_dequantize(SS_QUANTIZER_BINNED, dtype, values, scales + first, TOGETHER, count, elements);
        if (result != SS_OK) {
            return result;
        }
        for (uint32_t row = 0; row < TOGETHER; row++) {
            steps->elements_lay(elements + row * count, count, (uint8_t *)scratch->bytes + (first + row) * 2 * count);
        }
    }
    return rows_by_steps(steps, &decoding, block, &making);
}

enum ss_result ss_kvrans_planes_by_steps(const struct ss_kvrans_decode_steps *steps,
                                         const struct ss_kvrans_block *block, const struct ss_kvrans_planes *planes,
                                         uint8_t *target) {
    const struct ss_kvrans_making making = {
        .planes = *planes, .target = target, .columns = block->columns, .size = planes->count};
    struct ss_kvrans_decoding decoding;

    decoding_begin(steps, &decoding, block, block->value);
    return rows_by_steps(steps, &decoding, block, &making);
}

void ss_kvrans_encoding_begin(struct ss_kvrans_encoding *encoding, const struct ss_kvrans_plan *plan) {
    uint32_t last = 0, most = 0;

    for (uint32_t column = 0; column < plan->columns; column++) {
        last = plan->column_table[column] > last ? plan->column_table[column] : last;
    }
    for (uint32_t number = 0; number <= last; number++) {
        encoding->tables[number] = plan->tables[number];
        for (uint32_t index = most; index < SS_KVRANS_INDEX_MAX; index++) {
            most = plan->tables[number].frequency[index] != 0 ? index + 1 : most;
        }
    }
    encoding->table_count = last + 1;
    encoding->index_count = most;
    memset(encoding->low, 0, sizeof(encoding->low));
    memset(encoding->high, SS_KVRANS_STATE_FIRST >> 8, sizeof(encoding->high));
    for (uint32_t mask = 0; mask < 256; mask++) {
        uint32_t place = 8 - (uint32_t)__builtin_popcount(mask);
        encoding->count[mask] = (uint8_t)(8 - place);
        memset(encoding->order[mask], 0, 8);
        for (uint32_t lanes = mask; lanes != 0; lanes &= lanes - 1) {
            encoding->order[mask][place++] = (uint8_t)__builtin_ctz(lanes);
        }
    }
}
