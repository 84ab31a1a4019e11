/* SPDX-License-Identifier: Apache-2.0 */
/*
 * neon.c - the kernels of kvrans with Advanced SIMD
 *
 * A table of 16, 32 or 64 bytes is looked up by one instruction (tbl) in one, two or four registers, so all of a
 * column's tables stay in registers; narrow.h says how 256 slots do with 32 bytes. As with the other variants, a
 * register holds the low bytes of states and another the high ones.
 *
 * The lanes that take a byte find out which one by counting the lanes before them that take one, too: a sum over all
 * lanes before each, in four steps. That takes no more instructions than getting a mask out of a register and into a
 * table of orders, which Arm has no instruction for.
 */
#include "codecs/kvrans/narrow.h"
#include "codecs/kvrans/scalar.h"

#include <arm_neon.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { WIDTH = 16 };

/* ---- Look-ups ------------------------------------------------------------------------------------------------ */

/* A column's tables. Of those by rank, 'registers' of four are used. */
struct tables {
    uint8x16x2_t base, breaks;
    uint8x16x4_t frequency, start, value;
};

INLINE uint8x16x4_t table_load(const uint8_t *bytes, int registers) {
    uint8x16x4_t table = {{vld1q_u8(bytes), vdupq_n_u8(0), vdupq_n_u8(0), vdupq_n_u8(0)}};
    for (int index = 1; index < registers; index++) {
        table.val[index] = vld1q_u8(bytes + WIDTH * index);
    }
    return table;
}

INLINE uint8x16_t lookup(uint8x16x4_t table, uint8x16_t index, int registers) {
    const uint8x16x2_t two = {{table.val[0], table.val[1]}};
    const uint8x16x3_t three = {{table.val[0], table.val[1], table.val[2]}};
    return registers == 1   ? vqtbl1q_u8(table.val[0], index)
           : registers == 2 ? vqtbl2q_u8(two, index)
           : registers == 3 ? vqtbl3q_u8(three, index)
                            : vqtbl4q_u8(table, index);
}

/* rank_of() counts the breaks up to each slot: those of the eights before are in 'base'. */
INLINE uint8x16_t rank_of(const struct tables *tables, uint8x16_t slot) {
    static const uint8_t before[WIDTH] = {0, 1, 3, 7, 15, 31, 63, 127, 0, 1, 3, 7, 15, 31, 63, 127};
    const uint8x16_t eighth = vshrq_n_u8(slot, 3);
    const uint8x16_t earlier = vqtbl1q_u8(vld1q_u8(before), vandq_u8(slot, vdupq_n_u8(15)));
    const uint8x16_t breaks = vandq_u8(vqtbl2q_u8(tables->breaks, eighth), earlier);
    return vaddq_u8(vqtbl2q_u8(tables->base, eighth), vcntq_u8(breaks));
}

/* ---- Decode: one column -------------------------------------------------------------------------------------- */

/* sums_of() adds to each lane all lanes before it. */
INLINE uint8x16_t sums_of(uint8x16_t lanes) {
    const uint8x16_t zero = vdupq_n_u8(0);
    lanes = vaddq_u8(lanes, vextq_u8(zero, lanes, WIDTH - 1));
    lanes = vaddq_u8(lanes, vextq_u8(zero, lanes, WIDTH - 2));
    lanes = vaddq_u8(lanes, vextq_u8(zero, lanes, WIDTH - 4));
    return vaddq_u8(lanes, vextq_u8(zero, lanes, WIDTH - 8));
}

/* group_decode() decodes 16 rows; lanes that are not active leave their states as they are. Returns the next byte. */
INLINE const uint8_t *group_decode(const struct tables *tables, uint8_t *low, uint8_t *high, uint8x16_t active,
                                   int registers, const uint8_t *next, uint8_t *target) {
    const uint8x16_t slot = vld1q_u8(low), factor = vld1q_u8(high);
    const uint8x16_t rank = rank_of(tables, slot);
    const uint8x16_t frequency = lookup(tables->frequency, rank, registers);
    const uint8x16_t rest = vsubq_u8(slot, lookup(tables->start, rank, registers));
    const uint16x8_t first = vaddw_u8(vmull_u8(vget_low_u8(frequency), vget_low_u8(factor)), vget_low_u8(rest));
    const uint16x8_t second = vaddw_high_u8(vmull_high_u8(frequency, factor), rest);
    const uint8x16_t new_low = vuzp1q_u8(vreinterpretq_u8_u16(first), vreinterpretq_u8_u16(second));
    const uint8x16_t new_high = vuzp2q_u8(vreinterpretq_u8_u16(first), vreinterpretq_u8_u16(second));
    const uint8x16_t short_of = vandq_u8(vceqzq_u8(new_high), active);
    const uint8x16_t counts = sums_of(short_of);                   /* negative: a true lane is -1 */
    const uint8x16_t order = vmvnq_u8(vandq_u8(counts, short_of)); /* count - 1, or 255: no byte, but 0 */
    const uint8x16_t bytes = vqtbl1q_u8(vld1q_u8(next), order);

    vst1q_u8(target, lookup(tables->value, rank, registers));
    vst1q_u8(low, vbslq_u8(active, vbslq_u8(short_of, bytes, new_low), slot));
    vst1q_u8(high, vbslq_u8(active, vbslq_u8(short_of, new_low, new_high), factor));
    return next + (uint8_t)-vgetq_lane_u8(counts, WIDTH - 1);
}

INLINE uint8x16_t lanes_before(uint32_t count) {
    static const uint8_t numbers[WIDTH] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return vcltq_u8(vld1q_u8(numbers), vdupq_n_u8((uint8_t)count));
}

INLINE void column_decode(struct ss_kvrans_decoding *decoding, const struct ss_kvrans_block *block,
                          const struct ss_kvrans_ranks *ranks, int registers, uint8_t *target) {
    const uint32_t rows = block->rows, lane_mask = block->lanes - 1;
    const struct tables tables = {.base = {{vld1q_u8(ranks->base), vld1q_u8(ranks->base + WIDTH)}},
                                  .breaks = {{vld1q_u8(ranks->breaks), vld1q_u8(ranks->breaks + WIDTH)}},
                                  .frequency = table_load(ranks->frequency, registers),
                                  .start = table_load(ranks->start, registers),
                                  .value = table_load(ranks->value, registers)};
    const uint8_t *next = decoding->next;
    uint32_t row = 0;

    for (; row + WIDTH <= rows; row += WIDTH) {
        next = group_decode(&tables, decoding->low + (row & lane_mask), decoding->high + (row & lane_mask),
                            vdupq_n_u8(255), registers, next, target + row);
    }
    if (row < rows) {
        next = group_decode(&tables, decoding->low + (row & lane_mask), decoding->high + (row & lane_mask),
                            lanes_before(rows - row), registers, next, target + row);
    }
    decoding->next = next;
}

/* add_low_bits() adds 'shift' planes of low bits to the bytes of one column. */
static void add_low_bits(const uint8_t *planes, uint32_t rows, uint32_t shift, uint8_t *target) {
    static const uint8_t bit_of_lane[WIDTH] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint32_t plane_size = (rows + 7) / 8;

    for (uint32_t row = 0; row < rows; row += WIDTH) {
        uint8x16_t value = vld1q_u8(target + row);
        for (uint32_t bit = 0; bit < shift; bit++) {
            const uint8_t *from = planes + bit * plane_size + row / 8;
            const uint8x16_t bits = vcombine_u8(vdup_n_u8(from[0]), vdup_n_u8(row + 8 < rows ? from[1] : 0));
            const uint8x16_t set = vtstq_u8(bits, vld1q_u8(bit_of_lane));
            value = vorrq_u8(value, vandq_u8(set, vdupq_n_u8((uint8_t)(1 << bit))));
        }
        vst1q_u8(target + row, value);
    }
}

/* ---- Decode: columns to rows --------------------------------------------------------------------------------- */

/* interleave() interleaves the bytes of the first half of the registers with those of the second. */
INLINE void interleave(const uint8x16_t *source, uint8x16_t *target) {
    for (int index = 0; index < 8; index++) {
        target[2 * index] = vzip1q_u8(source[index], source[index + 8]);
        target[2 * index + 1] = vzip2q_u8(source[index], source[index + 8]);
    }
}

/* transpose16() turns 16 columns of 16 rows into pieces of rows. Columns lie SS_KVRANS_ROWS_MAX apart. */
INLINE void transpose16(const uint8_t *columns, uint8x16_t *rows) {
    uint8x16_t other[16];
    for (int column = 0; column < 16; column++) {
        rows[column] = vld1q_u8(columns + column * SS_KVRANS_ROWS_MAX);
    }
    interleave(rows, other);
    interleave(other, rows);
    interleave(rows, other);
    interleave(other, rows);
}

/* tile_store() writes 'columns' decoded columns as pieces of rows. */
static void tile_store(const uint8_t *tile, uint32_t rows, size_t stride, uint32_t columns, uint8_t *target) {
    for (uint32_t first = 0; first < rows; first += 16) {
        for (uint32_t column = 0; column < columns; column += 16) {
            const uint32_t width = columns - column < 16 ? columns - column : 16;
            uint8x16_t pieces[16];
            transpose16(tile + (size_t)column * SS_KVRANS_ROWS_MAX + first, pieces);
            for (uint32_t row = 0; row < 16 && first + row < rows; row++) {
                uint8_t *place = target + (first + row) * stride + column;
                if (width == 16) {
                    vst1q_u8(place, pieces[row]);
                } else {
                    memcpy(place, &pieces[row], width);
                }
            }
        }
    }
}

/* ---- Decode: rows to elements -------------------------------------------------------------------------------- */

/* place_of() leaves columns where they are: stores interleave bytes. */
static uint32_t place_of(uint32_t column, uint32_t size) {
    (void)size;
    return column;
}

/* rotated() returns bytes shifted right by one, with the lowest bits of those before them, which come in from the left.
 */
INLINE uint8x16_t rotated(uint8x16_t bytes, uint8x16_t before) {
    return vsliq_n_u8(vshrq_n_u8(bytes, 1), before, 7);
}

/* rows_make() makes lossless elements only: binned ones take longer to lay out than their look-ups would save. */
static void rows_make(const struct ss_kvrans_making *making, const uint8_t *lines, uint32_t row, uint32_t count,
                      size_t at) {
    const struct ss_kvrans_planes planes = making->planes; /* in registers, whatever is written */
    const size_t columns = making->columns;
    uint8_t *elements = making->target;

    for (const uint32_t end = row + count; row < end; row++) {
        for (uint32_t column = 0; column < SS_KVRANS_TILE; column += WIDTH) {
            const uint8x16_t first = vld1q_u8(lines + (size_t)row * SS_KVRANS_TILE + column);
            const size_t place = row * columns + at + column;
            if (planes.count == 2) {
                const uint8x16_t second = vld1q_u8(planes.lower[0] + place);
                const uint8x16x2_t both = {{rotated(second, first), rotated(first, second)}};
                vst2q_u8(elements + 2 * place, both);
            } else if (planes.count == 4) {
                const uint8x16_t second = vld1q_u8(planes.lower[0] + place);
                const uint8x16_t third = vld1q_u8(planes.lower[1] + place);
                const uint8x16_t fourth = vld1q_u8(planes.lower[2] + place);
                const uint8x16x4_t all = {
                    {rotated(fourth, third), rotated(third, second), rotated(second, first), rotated(first, fourth)}};
                vst4q_u8(elements + 4 * place, all);
            } else {
                vst1q_u8(elements + place, rotated(first, first));
            }
        }
    }
}

/* ---- Decode: a block ----------------------------------------------------------------------------------------- */

SS_KVRANS_COLUMN_DECODE(, 1)
SS_KVRANS_COLUMN_DECODE(, 2)
SS_KVRANS_COLUMN_DECODE(, 3)
SS_KVRANS_COLUMN_DECODE(, 4)

static const struct ss_kvrans_decode_steps steps = {
    .prepare = NULL,
    .column = {column_decode_1, column_decode_2, column_decode_3, column_decode_4},
    .add_low_bits = add_low_bits,
    .tile_store = tile_store,
    .place = place_of,
    .rows_make = rows_make,
};

static enum ss_result decode(const struct ss_kvrans_block *block, uint8_t *target) {
    return ss_kvrans_decode_by_steps(&steps, block, target);
}

static enum ss_result decode_planes(const struct ss_kvrans_block *block, const struct ss_kvrans_planes *planes,
                                    struct ss_kvrans_tiles *tiles, uint8_t *target) {
    (void)tiles;
    return ss_kvrans_planes_by_steps(&steps, block, planes, target);
}

/* ---- Encode: rows to columns --------------------------------------------------------------------------------- */

struct extremes {
    uint8x16_t least, most;
    int8x16_t signed_least, signed_most;
};

/* row_load() loads 'width' bytes of a row; the bytes behind them are set to the first, which changes no extremes. */
INLINE uint8x16_t row_load(const uint8_t *source, uint32_t width, struct extremes *seen) {
    uint8x16_t bytes;

    if (width == 16) {
        bytes = vld1q_u8(source);
    } else {
        uint8_t padded[WIDTH];
        memset(padded, source[0], sizeof padded);
        memcpy(padded, source, width);
        bytes = vld1q_u8(padded);
    }
    seen->least = vminq_u8(seen->least, bytes);
    seen->most = vmaxq_u8(seen->most, bytes);
    seen->signed_least = vminq_s8(seen->signed_least, vreinterpretq_s8_u8(bytes));
    seen->signed_most = vmaxq_s8(seen->signed_most, vreinterpretq_s8_u8(bytes));
    return bytes;
}

static void transpose(const struct ss_kvrans_plan *plan, const uint8_t *source, struct ss_kvrans_extremes *extremes) {
    struct extremes seen = {vdupq_n_u8(255), vdupq_n_u8(0), vdupq_n_s8(127), vdupq_n_s8(-128)};

    for (uint32_t row = 0; row < plan->rows; row += 16) {
        for (uint32_t column = 0; column < plan->columns; column += 16) {
            const uint32_t width = plan->columns - column < 16 ? plan->columns - column : 16;
            uint8x16_t a[16], b[16];
            for (uint32_t each = 0; each < 16; each++) {
                a[each] = row + each < plan->rows
                              ? row_load(source + (size_t)(row + each) * plan->columns + column, width, &seen)
                              : vdupq_n_u8(0);
            }
            interleave(a, b);
            interleave(b, a);
            interleave(a, b);
            interleave(b, a);
            for (uint32_t each = 0; each < width; each++) {
                vst1q_u8(plan->cells + (size_t)(column + each) * SS_KVRANS_ROWS_MAX + row, a[each]);
            }
        }
    }
    *extremes = (struct ss_kvrans_extremes){.least = vminvq_u8(seen.least),
                                            .most = vmaxvq_u8(seen.most),
                                            .signed_least = vminvq_s8(seen.signed_least),
                                            .signed_most = vmaxvq_s8(seen.signed_most)};
}

/* ---- Encode: indices, tables --------------------------------------------------------------------------------- */

/*
 * present() looks bytes up in a set of what was seen, 16 at a time: soon there is hardly one that is not in it. The set
 * is a bit for each of 256 bytes.
 */
static void present(const uint8_t *source, size_t size, uint8_t *seen) {
    static const uint8_t bit_of[WIDTH] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint8_t bits[2 * WIDTH] = {0};
    uint8x16x2_t set = {{vdupq_n_u8(0), vdupq_n_u8(0)}};
    size_t at = 0;

    for (; at + WIDTH <= size; at += WIDTH) {
        const uint8x16_t bytes = vld1q_u8(source + at);
        const uint8x16_t wanted = vqtbl1q_u8(vld1q_u8(bit_of), vandq_u8(bytes, vdupq_n_u8(15)));
        const uint8x16_t there = vtstq_u8(vqtbl2q_u8(set, vshrq_n_u8(bytes, 3)), wanted);
        if (__builtin_expect(vminvq_u8(there) != 0, 1)) {
            continue;
        }
        for (size_t each = at; each < at + WIDTH; each++) {
            bits[source[each] / 8] |= (uint8_t)(1 << source[each] % 8);
            seen[source[each]] = 1;
        }
        set.val[0] = vld1q_u8(bits);
        set.val[1] = vld1q_u8(bits + WIDTH);
    }
    ss_kvrans_present_scalar(source + at, size - at, seen);
}

/* masks_of() gathers a bit of each lane; lanes are all ones or zero. The upper byte is that of the upper eight lanes.
 */
INLINE uint32_t masks_of(uint8x16_t lanes) {
    static const uint8_t bit_of_lane[WIDTH] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t bits = vandq_u8(lanes, vld1q_u8(bit_of_lane));
    return (uint32_t)vaddv_u8(vget_low_u8(bits)) | (uint32_t)vaddv_u8(vget_high_u8(bits)) << 8;
}

/* lookup_256() takes any byte: an index beyond a table leaves the lane as it is. */
INLINE uint8x16_t lookup_256(const uint8x16x4_t *tables, uint8x16_t index) {
    uint8x16_t found = vqtbl4q_u8(tables[0], index);
    for (int part = 1; part < 4; part++) {
        found = vqtbx4q_u8(found, tables[part], vsubq_u8(index, vdupq_n_u8((uint8_t)(64 * part))));
    }
    return found;
}

struct mapping {
    uint8x16x4_t index[4];
    uint8x16_t kept, first;
    int8x16_t shift;
    uint32_t listed;
};

INLINE struct mapping mapping_make(const struct ss_kvrans_alphabet *alphabet, const uint8_t *room) {
    (void)room;
    struct mapping mapping = {.kept = vdupq_n_u8((uint8_t)(255 >> alphabet->shift)),
                              .first = vdupq_n_u8(alphabet->value[0]),
                              .shift = vdupq_n_s8((int8_t)(0 - (int)alphabet->shift)),
                              .listed = alphabet->listed};
    for (int part = 0; part < 4; part++) {
        mapping.index[part] = table_load(alphabet->index + 64 * part, 4);
    }
    return mapping;
}

INLINE uint8x16_t indices_of(const struct mapping *mapping, uint8x16_t cell) {
    cell = vshlq_u8(cell, mapping->shift);
    return mapping->listed ? lookup_256(mapping->index, cell) : vandq_u8(vsubq_u8(cell, mapping->first), mapping->kept);
}

INLINE uint32_t bits_of(uint8x16_t cell, uint32_t bit) {
    return masks_of(vtstq_u8(cell, vdupq_n_u8((uint8_t)(1 << bit))));
}

INLINE uint8x16_t or_behind(uint8x16_t bytes, uint32_t count) {
    return vornq_u8(bytes, lanes_before(count));
}

enum { PARTS = SS_KVRANS_ROWS_MAX / WIDTH };

/* matches() counts: at most 16 lanes above each other are the index, and all 256 are 256. */
INLINE uint16_t matches(const uint8x16_t *parts, uint8_t index) {
    const uint8x16_t wanted = vdupq_n_u8(index);
    uint8x16_t even = vceqq_u8(parts[0], wanted), odd = vceqq_u8(parts[1], wanted); /* a true lane is -1 */
    for (int pair = 1; pair < PARTS / 2; pair++) {
        even = vaddq_u8(even, vceqq_u8(parts[2 * pair], wanted));
        odd = vaddq_u8(odd, vceqq_u8(parts[2 * pair + 1], wanted));
    }
    return vaddlvq_u8(vsubq_u8(vdupq_n_u8(0), vaddq_u8(even, odd)));
}

static void assign(const struct ss_kvrans_plan *plan, const struct ss_kvrans_costs *costs, uint32_t index_count,
                   uint8_t *column_table) {
    for (uint32_t column = 0; column < plan->columns; column++) {
        const uint16_t *counts = plan->counts + (size_t)column * SS_KVRANS_INDEX_MAX;
        int32x4_t sums[4] = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
        int32_t every[SS_KVRANS_TABLES_MAX];
        uint32_t best = 0;
        for (uint32_t pair = 0; pair < (index_count + 1) / 2; pair++) {
            for (int half = 0; half < 2; half++) {
                const int16x8x2_t cost = vld2q_s16(costs->cost[pair][8 * half]);
                for (int each = 0; each < 2; each++) {
                    const int16_t times = (int16_t)counts[2 * pair + (uint32_t)each];
                    sums[2 * half] = vmlal_n_s16(sums[2 * half], vget_low_s16(cost.val[each]), times);
                    sums[2 * half + 1] = vmlal_n_s16(sums[2 * half + 1], vget_high_s16(cost.val[each]), times);
                }
            }
        }
        for (int quarter = 0; quarter < 4; quarter++) {
            vst1q_s32(every + 4 * quarter, sums[quarter]);
        }
        for (uint32_t table = 1; table < SS_KVRANS_TABLES_MAX; table++) {
            best = every[table] < every[best] ? table : best;
        }
        column_table[column] = (uint8_t)best;
    }
}

/* ---- Encode: coded bytes ------------------------------------------------------------------------------------- */

/* A column's tables, as for decoding. */
typedef struct {
    uint8x16x4_t frequency, start, reciprocal_low, reciprocal_high;
} encode_tables;

INLINE encode_tables tables_load(const struct ss_kvrans_encode_table *table, int registers) {
    return (encode_tables){.frequency = table_load(table->frequency, registers),
                           .start = table_load(table->start, registers),
                           .reciprocal_low = table_load(table->reciprocal_low, registers),
                           .reciprocal_high = table_load(table->reciprocal_high, registers)};
}

/* pack() writes the lanes of 'bytes' that 'masks' selects right before 'end', and anything up to 8 bytes before that.
 */
INLINE uint8_t *pack(const struct ss_kvrans_encoding *encoding, uint8x16_t bytes, uint32_t masks, uint8_t *end) {
    const uint32_t upper = masks >> 8, lower = masks & 255;
    vst1_u8(end - 8, vtbl1_u8(vget_high_u8(bytes), vld1_u8(encoding->order[upper])));
    end -= encoding->count[upper];
    vst1_u8(end - 8, vtbl1_u8(vget_low_u8(bytes), vld1_u8(encoding->order[lower])));
    return end - encoding->count[lower];
}

/* divide() divides eight states by their frequencies: quotients, and in '*rest' what is left. */
INLINE uint16x8_t divide(uint16x8_t state, uint16x8_t frequency, uint16x8_t reciprocal, uint16x8_t *rest) {
    const uint16x8_t quotient =
        vshrn_high_n_u32(vshrn_n_u32(vmull_u16(vget_low_u16(state), vget_low_u16(reciprocal)), 16),
                         vmull_high_u16(state, reciprocal), 16);
    const uint16x8_t left = vmlsq_u16(state, quotient, frequency);
    const uint16x8_t more = vcgeq_u16(left, frequency);

    *rest = vsubq_u16(left, vandq_u16(more, frequency));
    return vsubq_u16(quotient, more);
}

/* words() makes 16-bit numbers of the lower, or the upper, bytes of two registers. */
INLINE uint16x8_t words(uint8x16_t low, uint8x16_t high, int upper) {
    return vreinterpretq_u16_u8(upper ? vzip2q_u8(low, high) : vzip1q_u8(low, high));
}

/* group_encode() codes the first 'rows' of 16; the others leave their states as they are. */
INLINE uint8_t *group_encode(struct ss_kvrans_encoding *encoding, encode_tables tables, uint32_t lane, uint32_t rows,
                             int registers, const uint8_t *cells, uint8_t *end) {
    const uint8x16_t low = vld1q_u8(encoding->low + lane), high = vld1q_u8(encoding->high + lane);
    const uint8x16_t index = vld1q_u8(cells), active = rows < WIDTH ? lanes_before(rows) : vdupq_n_u8(255);
    const uint8x16_t frequency = lookup(tables.frequency, index, registers);
    const uint8x16_t reciprocal_low = lookup(tables.reciprocal_low, index, registers);
    const uint8x16_t reciprocal_high = lookup(tables.reciprocal_high, index, registers);
    const uint8x16_t full = vcgeq_u8(high, frequency);
    const uint8x16_t state_low = vbslq_u8(full, high, low), state_high = vbicq_u8(high, full);
    uint16x8_t quotients[2], rests[2];
    uint8x16_t new_low, new_high;

    quotients[0] = divide(words(state_low, state_high, 0), vmovl_u8(vget_low_u8(frequency)),
                          words(reciprocal_low, reciprocal_high, 0), &rests[0]);
    quotients[1] = divide(words(state_low, state_high, 1), vmovl_high_u8(frequency),
                          words(reciprocal_low, reciprocal_high, 1), &rests[1]);
    new_low = vuzp1q_u8(vreinterpretq_u8_u16(rests[0]), vreinterpretq_u8_u16(rests[1]));
    new_low = vaddq_u8(new_low, lookup(tables.start, index, registers));
    new_high = vuzp1q_u8(vreinterpretq_u8_u16(quotients[0]), vreinterpretq_u8_u16(quotients[1]));
    vst1q_u8(encoding->low + lane, vbslq_u8(active, new_low, low));
    vst1q_u8(encoding->high + lane, vbslq_u8(active, new_high, high));
    return pack(encoding, low, masks_of(vandq_u8(full, active)), end);
}

static void encoding_prepare(struct ss_kvrans_encoding *encoding) {
    (void)encoding; /* tables are looked up as they are */
}

typedef uint8x16_t vector;

#define KERNEL static
#define KERNEL_STATIC static
#define MAP map
#define COUNT count
#define ENCODE encode
#define vector_load vld1q_u8
#define vector_store vst1q_u8
#include "codecs/kvrans/encode_template.h"

const struct ss_kvrans_kernels ss_kvrans_kernels_neon = {
    .name = "own, neon",
    .decode = decode,
    .decode_planes = decode_planes,
    .transpose = transpose,
    .present = present,
    .map = map,
    .count = count,
    .total = ss_kvrans_total_scalar,
    .assign = assign,
    .encode = encode,
};
