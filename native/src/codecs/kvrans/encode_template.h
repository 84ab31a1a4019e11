/* SPDX-License-Identifier: Apache-2.0 */
/*
 * encode_template.h - the encoder's loops that the AVX2 and the NEON kernels of kvrans share
 *
 * A file of one instruction set includes this after it has defined:
 *
 *   KERNEL, KERNEL_STATIC, INLINE    what its kernels, and its inlined functions, are declared with
 *   MAP, COUNT, ENCODE               the kernels' names
 *   WIDTH, vector                    bytes of a register, 16 or 32, and its type
 *   vector_load(), vector_store()
 *   struct mapping, mapping_make(alphabet, room for 256 bytes), indices_of(mapping, bytes)
 *   bits_of(bytes, bit)              that bit of each lane
 *   or_behind(bytes, count)          lanes from 'count' on are 255
 *   matches(parts, index)            how many of PARTS registers' lanes are 'index'
 *   encoding_prepare(encoding)       lays out the tables
 *   encode_tables, tables_load(table, size)
 *   group_encode(encoding, tables, lane, rows, size, cells, end)   up to WIDTH rows
 */
KERNEL void MAP(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet, uint8_t *planes) {
    const size_t plane_size = (plan->rows + 7) / 8;
    _Alignas(32) uint8_t room[256];
    const struct mapping mapping = mapping_make(alphabet, room);

    for (uint32_t column = 0; column < plan->columns; column++) {
        for (uint32_t row = 0; row < plan->rows; row += WIDTH) {
            uint8_t *cells = plan->cells + (size_t)column * SS_KVRANS_ROWS_MAX + row;
            const vector cell = vector_load(cells);
            for (uint32_t bit = 0; bit < alphabet->shift; bit++) {
                const size_t size = plane_size - row / 8 < WIDTH / 8 ? plane_size - row / 8 : WIDTH / 8;
                uint32_t plane = bits_of(cell, bit);
                if (plan->rows - row < WIDTH) {
                    plane &= (1u << (plan->rows - row)) - 1;
                }
                memcpy(planes + bit * plane_size + row / 8, &plane, size);
            }
            vector_store(cells, indices_of(&mapping, cell));
        }
        planes += alphabet->shift * plane_size;
    }
}

KERNEL void COUNT(const struct ss_kvrans_plan *plan, const struct ss_kvrans_alphabet *alphabet) {
    _Alignas(32) uint8_t room[256];
    const struct mapping mapping = mapping_make(alphabet, room);

    for (uint32_t column = 0; column < plan->columns; column++) {
        const uint8_t *cells = plan->cells + (size_t)column * SS_KVRANS_ROWS_MAX;
        uint16_t *counts = plan->counts + (size_t)column * SS_KVRANS_INDEX_MAX;
        vector parts[PARTS];

        for (uint32_t number = 0; number < PARTS; number++) { /* what is behind the last row is 255, no index */
            const uint32_t left = plan->rows > WIDTH * number ? plan->rows - WIDTH * number : 0;
            const vector index = indices_of(&mapping, vector_load(cells + (size_t)WIDTH * number));
            parts[number] = or_behind(index, left < WIDTH ? left : WIDTH);
        }
        memset(counts, 0, SS_KVRANS_INDEX_MAX * sizeof *counts);
        for (uint32_t index = 0; index < alphabet->count; index++) {
            counts[index] = matches(parts, (uint8_t)index);
        }
    }
}

INLINE uint8_t *columns_encode(struct ss_kvrans_encoding *encoding, const struct ss_kvrans_plan *plan, int size,
                               uint8_t *end) {
    const uint32_t lane_mask = plan->lanes - 1, whole = plan->rows / WIDTH * WIDTH;

    for (uint32_t column = plan->columns; column-- > 0;) {
        const encode_tables tables = tables_load(&encoding->tables[plan->column_table[column]], size);
        const uint8_t *cells = plan->cells + (size_t)column * SS_KVRANS_ROWS_MAX;
        if (whole < plan->rows) {
            end = group_encode(encoding, tables, whole & lane_mask, plan->rows - whole, size, cells + whole, end);
        }
        for (uint32_t row = whole; row > 0; row -= WIDTH) {
            end = group_encode(encoding, tables, (row - WIDTH) & lane_mask, WIDTH, size, cells + row - WIDTH, end);
        }
    }
    return end;
}

/* The size is a constant in each of these. */
#define COLUMNS_ENCODE(size)                                                                                           \
    KERNEL_STATIC uint8_t *columns_encode_##size(struct ss_kvrans_encoding *encoding,                                  \
                                                 const struct ss_kvrans_plan *plan, uint8_t *end) {                    \
        return columns_encode(encoding, plan, size, end);                                                              \
    }

COLUMNS_ENCODE(1)
COLUMNS_ENCODE(2)
COLUMNS_ENCODE(4)

KERNEL uint8_t *ENCODE(const struct ss_kvrans_plan *plan, uint8_t *end, uint8_t *states_low, uint8_t *states_high) {
    const uint32_t states = plan->rows < plan->lanes ? plan->rows : plan->lanes;
    struct ss_kvrans_encoding encoding;

    ss_kvrans_encoding_begin(&encoding, plan);
    encoding_prepare(&encoding);
    end = encoding.index_count <= 16   ? columns_encode_1(&encoding, plan, end)
          : encoding.index_count <= 32 ? columns_encode_2(&encoding, plan, end)
                                       : columns_encode_4(&encoding, plan, end);
    memcpy(states_low, encoding.low, states);
    memcpy(states_high, encoding.high, states);
    return end;
}
