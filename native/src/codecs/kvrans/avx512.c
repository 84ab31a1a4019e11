/* SPDX-License-Identifier: Apache-2.0 */
/*
 * avx512.c - the kernels of kvrans with AVX-512 F, BW, VL, VBMI, VBMI2 and VPOPCNTDQ, and GFNI
 *
 * A register holds one byte of the states of 64 lanes: low bytes in one, high bytes in another. So the slots of 64
 * lanes are a register as they are, every table is looked up for all of them at once, and the bytes that
 * renormalisation takes in or gives out are an expansion or a compression of whole registers. Only the multiplication
 * needs 16 bits: once for the even lanes, once for the odd ones.
 *
 * Columns are decoded into strips of 16. Strips are transposed in registers, four to a tile, whose rows are then
 * written.
 */
#include "codecs/kvrans/kvrans.h"

#include <string.h>

#include "codecs/kvrans/avx512.h"
#include "codecs/kvrans/avx512_rows.h"
#include "codecs/kvrans/avx512_step.h"
#include "quantize/avx512.h"

/* ---- Decode -------------------------------------------------------------------------------------------------- */

/* low_bits_add() adds the low bits of a group's rows, which are in 'planes', 'plane_size' bytes apart. */
TARGET_INLINE __m512i low_bits_add(__m512i value, const uint8_t *planes, size_t plane_size, size_t size,
                                   uint32_t shift) {
    for (uint32_t bit = 0; bit < shift; bit++) {
        uint64_t plane = 0;
        memcpy(&plane, planes + bit * plane_size, size);
        value = _mm512_mask_add_epi8(value, plane, value, _mm512_set1_epi8((char)(1 << bit)));
    }
    return value;
}

/* The most that one column takes, and what loading it may read. */
enum { COLUMN_READ_MAX = SS_KVRANS_ROWS_MAX + 64 };

/*
 * The coded bytes. Near their end they are copied to where zeros follow, so that whole registers can be loaded: once,
 * since as long as 'next' is not behind 'end', what one column may read is there.
 */
struct input {
    const uint8_t *next, *end;
    int copied;
    uint8_t padded[2 * COLUMN_READ_MAX];
};

static inline void input_ready(struct input *input) {
    size_t left = (size_t)(input->end - input->next);
    if (__builtin_expect(left < COLUMN_READ_MAX, 0) && !input->copied) {
        input->copied = 1;
        memcpy(input->padded, input->next, left);
        memset(input->padded + left, 0, sizeof(input->padded) - left);
        input->next = input->padded;
        input->end = input->padded + left;
    }
}

/* What the code for a kind of block may take for granted, as constants: that keeps all states in registers. */
struct shape {
    uint32_t groups;      /* of rows */
    uint32_t lane_groups; /* of lanes */
    uint32_t shift;
    int full;     /* there are no rows but whole groups */
    enum fit fit; /* unless FIT_NOT, tables are in 'quarters'; then rows are full */
    const struct quarters *quarters;
};

/* column_decode() decodes one column to 'tile'. */
TARGET_INLINE void column_decode(const struct ss_kvrans_block *block, uint32_t column, struct states *states,
                                 struct shape shape, const uint8_t **next, uint8_t *tile) {
    const size_t plane_size = (block->rows + 7) / 8;
    const uint8_t *planes = block->planes + column * shape.shift * plane_size, *at = *next;

    if (shape.fit != FIT_NOT) {
        const struct quarter_registers quarters = quarters_load(&shape.quarters[block->column_table[column]]);
#pragma GCC unroll 4 /* keeps states in registers */
        for (uint32_t group = 0; group < shape.groups; group++) {
            const uint32_t lanes = group % shape.lane_groups;
            const __m512i value =
                quarters_step(&quarters, shape.fit == FIT_LARGE, &states->low[lanes], &states->high[lanes], &at);
            _mm512_store_si512(tile + GROUP * group,
                               low_bits_add(value, planes + 8 * group, plane_size, 8, shape.shift));
        }
        *next = at;
        return;
    }
    const struct registers table = registers_load(&block->tables[block->column_table[column]]);
    const __m512i values = _mm512_load_si512(block->value); /* of each index */

    for (uint32_t group = 0; group < shape.groups; group++) {
        const uint32_t lanes = group % shape.lane_groups;
        const size_t size = shape.full || plane_size - 8 * group > 8 ? 8 : plane_size - 8 * group;
        const __mmask64 active = shape.full ? ~0ull : states->active[group];
        __m512i value = step(&table, &states->low[lanes], &states->high[lanes], active, &at);
        value = _mm512_permutexvar_epi8(value, values);
        value = low_bits_add(value, planes + 8 * group, plane_size, size, shape.shift);
        _mm512_store_si512(tile + GROUP * group, value);
    }
    *next = at;
}

TARGET static struct states states_load(const struct ss_kvrans_block *block) {
    struct states states;

    for (uint32_t group = 0; group < GROUPS; group++) {
        uint32_t rows = block->rows > GROUP * group ? block->rows - GROUP * group : 0;
        states.active[group] = mask_of(rows);
        states.low[group] = states.high[group] = _mm512_setzero_si512();
        if (rows > 0 && GROUP * group < block->lanes) {
            states.low[group] = _mm512_maskz_loadu_epi8(states.active[group], block->states_low + GROUP * group);
            states.high[group] = _mm512_maskz_loadu_epi8(states.active[group], block->states_high + GROUP * group);
        }
    }
    return states;
}

/* states_ended() returns whether the states are those that a stream ends with. */
TARGET static int states_ended(const struct ss_kvrans_block *block, const struct states *states) {
    const __m512i one = _mm512_set1_epi8(1);
    __mmask64 other = 0;

    for (uint32_t group = 0; group < block->lanes / GROUP; group++) {
        other |= _mm512_mask_cmpneq_epi8_mask(states->active[group], states->high[group], one) |
                 _mm512_mask_test_epi8_mask(states->active[group], states->low[group], states->low[group]);
    }
    return other == 0;
}

/*
 * DECODERS() defines the variants of a decoder that takes 'type', by lanes and by the look-up of tables, and a function
 * name_any() that decodes a block with the right one.
 */
#define DECODER(name, type, lane_groups, shift, fit, suffix)                                                           \
    TARGET static enum ss_result name##suffix(const struct ss_kvrans_block *block, const struct type *making,          \
                                              const struct quarters *quarters, struct states *states) {                \
        const struct shape shape = {GROUPS, lane_groups, shift, 1, fit, quarters};                                     \
        return name(block, making, states, shape);                                                                     \
    }

#define DECODERS(name, type)                                                                                           \
    DECODER(name, type, 1, block->shift, FIT_NOT, _64)                                                                 \
    DECODER(name, type, 2, block->shift, FIT_NOT, _128)                                                                \
    DECODER(name, type, 4, block->shift, FIT_NOT, _256)                                                                \
    DECODER(name, type, 1, 0, FIT, _64_fit)                                                                            \
    DECODER(name, type, 2, 0, FIT, _128_fit)                                                                           \
    DECODER(name, type, 4, 0, FIT, _256_fit)                                                                           \
    DECODER(name, type, 1, block->shift, FIT_LARGE, _64_fit_low)                                                       \
    DECODER(name, type, 2, block->shift, FIT_LARGE, _128_fit_low)                                                      \
    DECODER(name, type, 4, block->shift, FIT_LARGE, _256_fit_low)                                                      \
    TARGET static enum ss_result name##_any(const struct ss_kvrans_block *block, const struct type *making) {          \
        static enum ss_result (*const decoders[3][3])(const struct ss_kvrans_block *, const struct type *,             \
                                                      const struct quarters *, struct states *) = {                    \
            {name##_64, name##_128, name##_256},                                                                       \
            {name##_64_fit, name##_128_fit, name##_256_fit},                                                           \
            {name##_64_fit_low, name##_128_fit_low, name##_256_fit_low}};                                              \
        struct quarters quarters[SS_KVRANS_TABLES_MAX];                                                                \
        struct states states = states_load(block);                                                                     \
        const enum fit fit = quarters_all(block, quarters);                                                            \
        const int kind = fit == FIT_NOT ? 0 : fit == FIT && block->shift == 0 ? 1 : 2;                                 \
        const enum ss_result result = decoders[kind][block->lanes / 128](block, making, quarters, &states);            \
        return states_ended(block, &states) ? result : SS_BAD_DATA;                                                    \
    }

/*
 * coded_prefetch() asks for the lines that some columns later will need; three are what a column of 6 bits a symbol
 * takes. The hardware would ask in time if its requests did not queue with all that is written.
 */
TARGET_INLINE void coded_prefetch(const uint8_t *next) {
    enum { AHEAD = 2048 };
    for (int line = 0; line < 3; line++) {
        _mm_prefetch((const char *)((uintptr_t)next + AHEAD + 64 * (uintptr_t)line), _MM_HINT_T0);
    }
}

/* ---- Decode to symbols and elements -------------------------------------------------------------------------- */

/*
 * A row has one scale, so an entry stands for one of 64 elements in it: two registers of bytes, the lower and the upper
 * ones. elements_fill() computes those of all rows, as quantize/avx512.c computes them.
 */
TARGET_INLINE void elements_fill(const struct ss_kvrans_block *block, int half, const float *scales,
                                 struct ss_kvrans_elements *elements) {
    const __m512i numbered = _mm512_load_si512(numbers), lower = _mm512_add_epi8(numbered, numbered);
    const __m512i upper = _mm512_add_epi8(lower, _mm512_set1_epi8(1));
    _Alignas(64) uint8_t bytes[SS_KVRANS_INDEX_MAX];
    __m512 symbols[4];

    ss_kvrans_entries(block, bytes);
    for (int part = 0; part < 4; part++) {
        symbols[part] = _mm512_cvtepi32_ps(
            _mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)(const void *)(bytes + 16 * part))));
    }
    for (uint32_t row = 0; row < SS_KVRANS_ROWS_MAX; row++) {
        const __m512 scale = _mm512_set1_ps(scales[row]);
        __m512i words[2];
        for (int part = 0; part < 2; part++) {
            const __m512 first = _mm512_mul_ps(symbols[2 * part], scale);
            const __m512 second = _mm512_mul_ps(symbols[2 * part + 1], scale);
            words[part] =
                _mm512_inserti64x4(_mm512_castsi256_si512(half ? ss_float16_of_16(first) : ss_bfloat16_of_16(first)),
                                   half ? ss_float16_of_16(second) : ss_bfloat16_of_16(second), 1);
        }
        _mm512_store_si512(elements->bytes[row][0], _mm512_permutex2var_epi8(words[0], lower, words[1]));
        _mm512_store_si512(elements->bytes[row][1], _mm512_permutex2var_epi8(words[0], upper, words[1]));
    }
}

/*
 * A tile is turned STRIP columns at a time. tile_turn() then has its rows in sets of four, which are STRIP rows apart:
 * a set is four registers, with a quarter of each of the rows.
 */
enum { STRIP = SS_KVRANS_STRIP, STRIPS = TILE_COLUMNS / STRIP, SET_BYTES = 4 * TILE_COLUMNS };

/* row_of() returns the first row of a set. */
TARGET_INLINE size_t row_of(uint32_t set) {
    return set / STRIP * GROUP + set % STRIP;
}

/*
 * rows_join() loads the rows of a set of elements of 'size' bytes. Unpacking bytes works inside 128-bit lanes, so of
 * two bytes lane k has columns 8k to 8k + 7 and then 32 + 8k to 32 + 8k + 7; of four, 4k to 4k + 3, then 16 + 4k and so
 * on.
 */
TARGET_INLINE void rows_join(const uint8_t *turned, uint32_t size, __m512i *rows) {
    const __m512i even2 = _mm512_setr_epi64(0, 8, 1, 9, 4, 12, 5, 13);
    const __m512i even4 = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    const __m512i orders2[2] = {even2, _mm512_or_si512(even2, _mm512_set1_epi64(2))}; /* of even and of odd rows */
    const __m512i orders4[2] = {even4, _mm512_or_si512(even4, _mm512_set1_epi32(4))};
    __m512i quarters[4], halves[4];

    for (int quarter = 0; quarter < 4; quarter++) {
        quarters[quarter] = _mm512_load_si512(turned + 64 * quarter);
    }
    if (size == 1) {
        quarters_join(quarters, rows);
        return;
    }
    quarters_pair(quarters, halves);
    for (int row = 0; row < 4; row++) {
        const __m512i first = halves[row / 2 * 2], second = halves[row / 2 * 2 + 1];
        rows[row] = size == 2 ? _mm512_permutex2var_epi64(first, orders2[row % 2], second)
                              : _mm512_permutex2var_epi32(first, orders4[row % 2], second);
    }
}

/* row_merge2() and row_merge4() write 64 elements of a row past the caches. 'first' is in the order of rows_join(). */
TARGET_INLINE void row_merge2(__m512i first, const uint8_t *second, uint8_t *target) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i lower = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(second));
    const __m512i low = _mm512_unpacklo_epi8(lower, first), high = _mm512_unpackhi_epi8(lower, first);

    _mm512_stream_si512((void *)target, _mm512_shrdi_epi16(low, low, 1));
    _mm512_stream_si512((void *)(target + 64), _mm512_shrdi_epi16(high, high, 1));
}

TARGET_INLINE void row_merge4(__m512i first, const uint8_t *const *lower, size_t at, uint8_t *target) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i second = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(lower[0] + at));
    const __m512i third = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(lower[1] + at));
    const __m512i fourth = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(lower[2] + at));
    const __m512i upper[2] = {_mm512_unpacklo_epi8(second, first), _mm512_unpackhi_epi8(second, first)};
    const __m512i under[2] = {_mm512_unpacklo_epi8(fourth, third), _mm512_unpackhi_epi8(fourth, third)};

    for (int half = 0; half < 2; half++) {
        const __m512i low = _mm512_unpacklo_epi16(under[half], upper[half]);
        const __m512i high = _mm512_unpackhi_epi16(under[half], upper[half]);
        _mm512_stream_si512((void *)(target + 128 * half), _mm512_ror_epi32(low, 1));
        _mm512_stream_si512((void *)(target + 128 * half + 64), _mm512_ror_epi32(high, 1));
    }
}

/* row_entries() is row_merge2() for binned elements: 'first' has entries, and 'bytes' what each of them stands for. */
TARGET_INLINE void row_entries(__m512i first, const uint8_t (*bytes)[SS_KVRANS_INDEX_MAX], uint8_t *target) {
    const __m512i lower = _mm512_permutexvar_epi8(first, _mm512_load_si512(bytes[0]));
    const __m512i upper = _mm512_permutexvar_epi8(first, _mm512_load_si512(bytes[1]));

    _mm512_stream_si512((void *)target, _mm512_unpacklo_epi8(lower, upper));
    _mm512_stream_si512((void *)(target + 64), _mm512_unpackhi_epi8(lower, upper));
}

/* row_rotate() is row_merge2() for elements of one byte. 0xCA: a ? b : c */
TARGET_INLINE void row_rotate(__m512i first, uint8_t *target) {
    const __m512i low7 = _mm512_set1_epi8(0x7F);

    _mm512_stream_si512((void *)target, _mm512_ternarylogic_epi64(low7, _mm512_srli_epi16(first, 1),
                                                                  _mm512_slli_epi16(first, 7), 0xCA));
}

/* symbols_store() writes up to 64 symbols of each row of a set: the columns and rows that the block has. */
TARGET_INLINE void symbols_store(const struct ss_kvrans_making *making, const __m512i *rows, uint32_t set, size_t first,
                                 uint8_t *target) {
    const __mmask64 mask = mask_of(making->columns - first);

    for (size_t row = 0; row < 4; row++) {
        if (mask == ~0ull && making->rows == SS_KVRANS_ROWS_MAX) {
            _mm512_storeu_si512(target + STRIP * row * making->columns, rows[row]);
        } else if (row_of(set) + STRIP * row < making->rows) {
            _mm512_mask_storeu_epi8(target + STRIP * row * making->columns, mask, rows[row]);
        }
    }
}

/* set_write() writes 64 elements or symbols of each row of a set, from column 'first' on. */
TARGET_INLINE void set_write(const struct ss_kvrans_making *making, const uint8_t *tile, uint32_t set, size_t first) {
    const size_t at = row_of(set) * making->columns + first, pitch = STRIP * making->columns;
    const uint8_t *turned = tile + (size_t)set * SET_BYTES;
    uint8_t *target = making->target + at * making->size;
    __m512i rows[4];

    if (making->elements != NULL) {
        rows_join(turned, 2, rows);
        for (size_t row = 0; row < 4; row++) {
            row_entries(rows[row], making->elements->bytes[row_of(set) + STRIP * row], target + 2 * row * pitch);
        }
    } else if (making->size == 2) {
        rows_join(turned, 2, rows);
        for (size_t row = 0; row < 4; row++) {
            row_merge2(rows[row], making->planes.lower[0] + at + row * pitch, target + 2 * row * pitch);
        }
    } else if (making->size == 4) {
        rows_join(turned, 4, rows);
        for (size_t row = 0; row < 4; row++) {
            row_merge4(rows[row], making->planes.lower, at + row * pitch, target + 4 * row * pitch);
        }
    } else if (making->planes.count != 0) {
        rows_join(turned, 1, rows);
        for (size_t row = 0; row < 4; row++) {
            row_rotate(rows[row], target + row * pitch);
        }
    } else {
        rows_join(turned, 1, rows);
        symbols_store(making, rows, set, first, target);
    }
}

/*
 * set_prefetch() asks for what set_write() will read; lines at the ends, as those at the beginnings were the last.
 * Only into the second-level cache: the first one's line fill buffers are what streaming stores wait for.
 */
TARGET_INLINE void set_prefetch(const struct ss_kvrans_making *making, uint32_t set, size_t first) {
    const size_t at = row_of(set) * making->columns + first + 63, pitch = STRIP * making->columns;

    for (uint32_t plane = 0; making->planes.count != 0 && plane + 1 < making->size; plane++) {
        for (size_t row = 0; row < 4; row++) {
            _mm_prefetch((const char *)(making->planes.lower[plane] + at + row * pitch), _MM_HINT_T1);
        }
    }
}

/*
 * next_prefetch() asks for the lines up to 'end' of what is read after the block, and returns where the rest begins.
 * Waiting for them then would cost more: memory would have nothing else to do, and here it takes what is written, too.
 */
TARGET_INLINE uintptr_t next_prefetch(uintptr_t next, uintptr_t end) {
    for (; next < end; next += 64) {
        _mm_prefetch((const char *)next, _MM_HINT_T1);
    }
    return next;
}

/*
 * previous_write() turns a part of the strip before column 'set' of the tile that is decoded now, and writes a set of
 * the tile before it.
 */
TARGET_INLINE void previous_write(struct ss_kvrans_tiles *tiles, uint32_t set) {
    const struct ss_kvrans_tile *before = &tiles->pair[1 - tiles->now];
    struct ss_kvrans_tile *decoded = &tiles->pair[set < STRIP ? 1 - tiles->now : tiles->now];
    const uint32_t strip = (set / STRIP + STRIPS - 1) % STRIPS;
    const size_t group = set % STRIP / 4;

    if (set % 4 == 0 && GROUP * group < decoded->making.rows) {
        tile_turn(tiles->strips[strip % 2] + GROUP * group, decoded->turned + TILE_SIZE * group + (size_t)64 * strip);
    }
    if (row_of(set) < before->making.rows) {
        set_write(&before->making, before->turned, set, before->first);
    }
}

/* rest_write() goes on with previous_write() from 'set' to the end of the tile that is decoded now. */
TARGET static void rest_write(struct ss_kvrans_tiles *tiles, uint32_t set) {
    for (; set < TILE_COLUMNS; set++) {
        previous_write(tiles, set);
    }
}

/* tile_next() goes on to a tile of 'making', or to none if that has no rows. */
TARGET_INLINE void tile_next(struct ss_kvrans_tiles *tiles, const struct ss_kvrans_making *making, size_t first) {
    tiles->now = 1 - tiles->now;
    tiles->pair[tiles->now].making = *making;
    tiles->pair[tiles->now].first = first;
}

/* tiles_begin() forgets both tiles. */
static void tiles_begin(struct ss_kvrans_tiles *tiles) {
    tiles->now = 0;
    tiles->pair[0].making.rows = tiles->pair[1].making.rows = 0;
}

TARGET static void tiles_write(struct ss_kvrans_tiles *tiles) {
    tile_next(tiles, &(struct ss_kvrans_making){.rows = 0}, 0);
    rest_write(tiles, 0);
    tiles_begin(tiles);
}

/*
 * rows_decode() decodes a tile while it turns and writes the one before, some rows behind each column: memory then
 * takes the lines of one tile during all of the time that the next one takes, and the core turns rows while a lane's
 * next symbol waits for the last one. The last tile is left to tiles_write(), or to the next block.
 */
TARGET_INLINE enum ss_result rows_decode(const struct ss_kvrans_block *block, const struct ss_kvrans_making *making,
                                         struct states *given, struct shape shape) {
    struct ss_kvrans_tiles *tiles = making->tiles;
    const size_t share = (block->next_size + block->columns - 1) / block->columns; /* asked for with each column */
    uintptr_t next = (uintptr_t)block->next;
    struct input input = {.next = block->coded, .end = block->coded + block->coded_size};
    struct states states = *given;

    for (uint32_t column = 0; column < block->columns; column++) {
        const uint32_t set = column % TILE_COLUMNS; /* a tile has one for each column */
        if (set == 0) {
            tile_next(tiles, making, column);
        }
        input_ready(&input);
        coded_prefetch(input.next);
        next = next_prefetch(next, (uintptr_t)block->next + share * (column + 1));
        column_decode(block, column, &states, shape, &input.next,
                      tiles->strips[column / STRIP % 2] + (size_t)(column % STRIP) * SS_KVRANS_ROWS_MAX);
        if (input.next > input.end) {
            rest_write(tiles, set);
            tiles_begin(tiles);
            return SS_BAD_DATA;
        }
        set_prefetch(making, set, column - set);
        previous_write(tiles, set);
    }
    if (block->columns % TILE_COLUMNS != 0) {
        rest_write(tiles, block->columns % TILE_COLUMNS);
    }
    *given = states;
    return input.next == input.end ? SS_OK : SS_BAD_DATA;
}

DECODERS(rows_decode, ss_kvrans_making)

TARGET static enum ss_result decode(const struct ss_kvrans_block *block, uint8_t *target) {
    struct ss_kvrans_tiles tiles;
    const struct ss_kvrans_making making = {
        .tiles = &tiles, .target = target, .rows = block->rows, .columns = block->columns, .size = 1};
    const struct shape shape = {
        (block->rows + GROUP - 1) / GROUP, block->lanes / GROUP, block->shift, 0, FIT_NOT, NULL};
    struct states states;
    enum ss_result result;

    tiles_begin(&tiles);
    if (block->rows == SS_KVRANS_ROWS_MAX) {
        result = rows_decode_any(block, &making);
    } else {
        states = states_load(block);
        result = rows_decode(block, &making, &states, shape);
        result = states_ended(block, &states) ? result : SS_BAD_DATA;
    }
    tiles_write(&tiles);
    return result;
}

/* decode_elements() decodes entries as if they were the bytes of the indices. */
TARGET static enum ss_result decode_elements(const struct ss_kvrans_block *given, enum ss_dtype dtype,
                                             const float *scales, struct ss_kvrans_elements *scratch, uint8_t *target) {
    struct ss_kvrans_tiles tiles;
    const struct ss_kvrans_making making = {.tiles = &tiles,
                                            .elements = scratch,
                                            .target = target,
                                            .rows = given->rows,
                                            .columns = given->columns,
                                            .size = 2};
    struct ss_kvrans_block block = *given;
    enum ss_result result;

    for (uint32_t index = 0; index < SS_KVRANS_INDEX_MAX; index++) {
        block.value[index] = (uint8_t)(index << block.shift);
    }
    if (dtype == SS_DTYPE_FLOAT16) {
        elements_fill(given, 1, scales, scratch);
    } else {
        elements_fill(given, 0, scales, scratch);
    }
    tiles_begin(&tiles);
    result = rows_decode_any(&block, &making);
    tiles_write(&tiles);
    return result;
}

TARGET static enum ss_result decode_planes(const struct ss_kvrans_block *block, const struct ss_kvrans_planes *planes,
                                           struct ss_kvrans_tiles *tiles, uint8_t *target) {
    const struct ss_kvrans_making making = {.tiles = tiles,
                                            .planes = *planes,
                                            .target = target,
                                            .rows = block->rows,
                                            .columns = block->columns,
                                            .size = planes->count};
    return rows_decode_any(block, &making);
}

/* ---- Decode to elements of 'weighted' ------------------------------------------------------------------------ */

/* weighted_decode() is rows_decode() with tiles that are as wide as whole heads. */
TARGET_INLINE enum ss_result weighted_decode(const struct ss_kvrans_block *block,
                                             const struct ss_kvrans_weighted *weighted, struct states *given,
                                             struct shape shape) {
    enum { TOGETHER = 8 }; /* columns behind which rows are made: states leave their registers for that */
    _Static_assert(SS_KVRANS_ROWS_MAX / SS_KVRANS_WIDTH_MAX * TOGETHER % SS_TURNS == 0, "rows of whole bases");
    static const rows_maker makers[2][3] = {
        {rows_unweigh_bfloat16_0, rows_unweigh_bfloat16_32, rows_unweigh_bfloat16_64},
        {rows_unweigh_float16_0, rows_unweigh_float16_32, rows_unweigh_float16_64}};
    const int half = weighted->elements->dtype == SS_DTYPE_FLOAT16;
    const rows_maker rows_make = makers[half][weighted->slice->by.pairs / 32];
    const uint32_t width = weighted->width, rows_each = SS_KVRANS_ROWS_MAX / width;
    _Alignas(64) uint8_t decoded[PARTED * SS_KVRANS_ROWS_MAX];
    struct tile tiles[2]; /* that is written, and that is decoded */
    const size_t share = (block->next_size + block->columns - 1) / block->columns; /* asked for with each column */
    uintptr_t next = (uintptr_t)block->next;
    struct input input = {.next = block->coded, .end = block->coded + block->coded_size};
    struct states states = *given;

    for (uint32_t first = 0; first < block->columns; first += width) {
        const uint32_t side = first / width % 2;
        tile_begin(&tiles[side], weighted, first);
        for (uint32_t column = 0; column < width; column++) {
            input_ready(&input);
            coded_prefetch(input.next);
            next = next_prefetch(next, (uintptr_t)block->next + share * (first + column + 1));
            column_decode(block, first + column, &states, shape, &input.next,
                          decoded + (size_t)parted_place(column % PARTED) * SS_KVRANS_ROWS_MAX);
            if (input.next > input.end) {
                return SS_BAD_DATA;
            }
            if (first > 0 && column % TOGETHER == TOGETHER - 1) {
                rows_make(&tiles[1 - side], rows_each * (column + 1 - TOGETHER), rows_each * TOGETHER);
            }
            for (size_t group = 0; column % PARTED == PARTED - 1 && group < GROUPS; group++) {
                uint8_t *turned = tiles[side].turned +
                                  (group * width / TILE_COLUMNS + column / TILE_COLUMNS) * TILE_SIZE +
                                  column % TILE_COLUMNS / PARTED * 4 * PARTED;
                tile_turn(decoded + GROUP * group, turned);
                tile_turn(decoded + GROUP * group + PARTED / 2 * SS_KVRANS_ROWS_MAX, turned + 2 * PARTED);
            }
        }
    }
    rows_make(&tiles[1 - block->columns / width % 2], 0, SS_KVRANS_ROWS_MAX);
    *given = states;
    return input.next == input.end ? SS_OK : SS_BAD_DATA;
}

DECODERS(weighted_decode, ss_kvrans_weighted)

TARGET static enum ss_result decode_weighted(const struct ss_kvrans_block *given,
                                             const struct ss_kvrans_weighted *weighted) {
    struct ss_kvrans_block shifted = *given;

    for (size_t index = 0; index < SS_KVRANS_INDEX_MAX; index++) {
        shifted.value[index] ^= 0x80; /* numbers_of() takes symbols plus 128 */
    }
    angles_make(weighted);
    return weighted_decode_any(&shifted, weighted);
}

const struct ss_kvrans_kernels ss_kvrans_kernels_avx512 = {
    .name = "own, avx512",
    .decode = decode,
    .decode_elements = decode_elements,
    .decode_planes = decode_planes,
    .tiles_write = tiles_write,
    .decode_weighted = decode_weighted,
    .transpose = ss_kvrans_transpose_avx512,
    .present = ss_kvrans_present_avx512,
    .map = ss_kvrans_map_avx512,
    .count = ss_kvrans_count_avx512,
    .total = ss_kvrans_total_avx512,
    .assign = ss_kvrans_assign_avx512,
    .encode = ss_kvrans_encode_avx512,
};
