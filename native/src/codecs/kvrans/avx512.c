/* SPDX-License-Identifier: Apache-2.0 */
/*
 * avx512.c - the kernels of kvrans with AVX-512 F, BW, VL, VBMI, VBMI2 and VPOPCNTDQ, and GFNI
 *
 * A register holds one byte of the states of 64 lanes: low bytes in one, high bytes in another. So the slots of 64
 * lanes are a register as they are, every table is looked up for all of them at once, and the bytes that
 * renormalisation takes in or gives out are an expansion or a compression of whole registers. Only the multiplication
 * needs 16 bits: once for the even lanes, once for the odd ones.
 *
 * Columns are decoded into a tile of 64 of them, and the tile is transposed in registers to where its rows belong.
 */
#include "codecs/kvrans/kvrans.h"

#ifdef SS_ARCH_X86_64
#include <string.h>

#include "codecs/kvrans/avx512.h"
#include "quantize/avx512.h"

static const _Alignas(64) uint8_t numbers[64] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                                 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
                                                 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

/* ---- Transposition ------------------------------------------------------------------------------------------- */

/* lanes_transpose() transposes 16 x 16 bytes within each 128-bit lane of 16 registers: four perfect shuffles. */
TARGET_INLINE void lanes_transpose(__m512i *rows) {
    __m512i other[16];

#define SHUFFLE(to, from)                                                                                              \
    for (int index = 0; index < 8; index++) {                                                                          \
        (to)[2 * index] = _mm512_unpacklo_epi8((from)[index], (from)[index + 8]);                                      \
        (to)[2 * index + 1] = _mm512_unpackhi_epi8((from)[index], (from)[index + 8]);                                  \
    }
    SHUFFLE(other, rows)
    SHUFFLE(rows, other)
    SHUFFLE(other, rows)
    SHUFFLE(rows, other)
#undef SHUFFLE
}

/* tile_store() writes 64 columns of 64 rows, each column SS_KVRANS_ROWS_MAX bytes after the one before, row by row. */
TARGET static void tile_store(const uint8_t *tile, uint8_t *target, size_t stride, uint32_t rows, uint32_t columns) {
    const __mmask64 mask = mask_of(columns);
    __m512i quarters[16][4];

    for (int quarter = 0; quarter < 4; quarter++) {
        __m512i lines[16];
        for (int index = 0; index < 16; index++)
            lines[index] = _mm512_load_si512(tile + (size_t)(quarter * 16 + index) * SS_KVRANS_ROWS_MAX);
        lanes_transpose(lines);
        for (int index = 0; index < 16; index++)
            quarters[index][quarter] = lines[index];
    }
    for (uint32_t index = 0; index < 16; index++) {
        __m512i lines[4];
        quarters_join(quarters[index], lines);
        for (uint32_t quarter = 0; quarter < 4; quarter++) {
            uint32_t row = quarter * 16 + index;
            if (columns == TILE_COLUMNS && rows == GROUP)
                _mm512_storeu_si512(target + row * stride, lines[quarter]);
            else if (row < rows)
                _mm512_mask_storeu_epi8(target + row * stride, mask, lines[quarter]);
        }
    }
}

/* What was seen of a block's bytes. */
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
        for (int index = 0; index < 16; index++)
            quarters[index][quarter] = lines[index];
    }
    *seen = now;
    for (uint32_t index = 0; index < 16; index++) {
        __m512i lines[4];
        quarters_join(quarters[index], lines);
        for (uint32_t quarter = 0; quarter < 4; quarter++) {
            if (quarter * 16 + index < columns)
                _mm512_store_si512(tile + (size_t)(quarter * 16 + index) * SS_KVRANS_ROWS_MAX, lines[quarter]);
        }
    }
}

/* ---- Decode -------------------------------------------------------------------------------------------------- */

/* A table in registers. */
struct registers {
    __m512i index[4], frequency, start;
};

/* States of all lanes, their bytes apart; lanes without a row are not active. */
struct states {
    __m512i low[GROUPS], high[GROUPS];
    __mmask64 active[GROUPS]; /* by group of rows */
};

TARGET_INLINE struct registers registers_load(const struct ss_kvrans_table *table) {
    struct registers loaded = {.frequency = _mm512_load_si512(table->frequency),
                               .start = _mm512_load_si512(table->start)};
    for (int part = 0; part < 4; part++)
        loaded.index[part] = _mm512_load_si512(table->index + 64 * part);
    return loaded;
}

/* coded_load() loads 64 bytes into a register for sure: expanding them from memory is microcode on some CPUs. */
TARGET_INLINE __m512i coded_load(const uint8_t *next) {
    __m512i bytes = _mm512_loadu_si512(next);
    __asm__("" : "+v"(bytes));
    return bytes;
}

/* step() decodes one symbol for each of 64 lanes and returns their indices. */
TARGET_INLINE __m512i step(const struct registers *table, __m512i *low, __m512i *high, __mmask64 active,
                           const uint8_t **next) {
    const __m512i bytes = _mm512_set1_epi16(0x00FF), upper = _mm512_set1_epi16((short)0xFF00);
    __m512i index = _mm512_mask_blend_epi8(_mm512_movepi8_mask(*low),
                                           _mm512_permutex2var_epi8(table->index[0], *low, table->index[1]),
                                           _mm512_permutex2var_epi8(table->index[2], *low, table->index[3]));
    __m512i frequency = _mm512_permutexvar_epi8(index, table->frequency);
    __m512i offset = _mm512_sub_epi8(*low, _mm512_permutexvar_epi8(index, table->start));
    __m512i even = _mm512_mullo_epi16(_mm512_and_si512(*high, bytes), _mm512_and_si512(frequency, bytes));
    __m512i odd = _mm512_mulhi_epu16(_mm512_and_si512(*high, upper), _mm512_and_si512(frequency, upper));
    __m512i new_low, new_high;
    __mmask64 need;

    even = _mm512_add_epi16(even, _mm512_and_si512(offset, bytes));
    odd = _mm512_add_epi16(odd, _mm512_srli_epi16(offset, 8));
    /* 0xF8: a | (b & c) */
    new_high = _mm512_ternarylogic_epi64(_mm512_srli_epi16(even, 8), odd, upper, 0xF8);
    new_low = _mm512_ternarylogic_epi64(_mm512_slli_epi16(odd, 8), even, bytes, 0xF8);
    need = _mm512_mask_testn_epi8_mask(active, new_high, new_high);
    new_high = _mm512_mask_mov_epi8(new_high, need, new_low);
    new_low = _mm512_mask_expand_epi8(new_low, need, coded_load(*next));
    *high =
        _mm512_mask_mov_epi8(*high, active, new_high); /* a lane may be active in one group of rows, not in another */
    *low = _mm512_mask_mov_epi8(*low, active, new_low);
    *next += _mm_popcnt_u64(need);
    return index;
}

/*
 * values_of() turns indices into bytes. In a range, 'values' is the first one of all 64, else the list. 'planes' has
 * the low bits of the group's rows, 'plane_size' bytes apart.
 */
TARGET_INLINE __m512i values_of(__m512i values, int range, __m512i index, const uint8_t *planes, size_t plane_size,
                                size_t size, uint32_t shift) {
    __m512i value = range ? _mm512_add_epi8(index, values) : _mm512_permutexvar_epi8(index, values);

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
    int range; /* values are one range, and there are no low bits */
    int full;  /* there are no rows but whole groups */
    int bare;  /* indices are wanted, not values */
};

/* column_decode() decodes one column to 'tile'. */
TARGET_INLINE void column_decode(const struct ss_kvrans_block *block, uint32_t column, struct states *states,
                                 struct shape shape, const uint8_t **next, uint8_t *tile) {
    const struct registers table = registers_load(&block->tables[block->column_table[column]]);
    const __m512i values = shape.range ? _mm512_set1_epi8((char)block->value[0]) : _mm512_load_si512(block->value);
    const size_t plane_size = (block->rows + 7) / 8;
    const uint8_t *planes = block->planes + column * shape.shift * plane_size;
    const uint8_t *at = *next;

    for (uint32_t group = 0; group < shape.groups; group++) {
        const uint32_t lanes = group % shape.lane_groups;
        const size_t size = shape.full || plane_size - 8 * group > 8 ? 8 : plane_size - 8 * group;
        const __mmask64 active = shape.full ? ~0ull : states->active[group];
        __m512i index = step(&table, &states->low[lanes], &states->high[lanes], active, &at);
        if (!shape.bare)
            index = values_of(values, shape.range, index, planes + 8 * group, plane_size, size, shape.shift);
        _mm512_store_si512(tile + GROUP * group, index);
    }
    *next = at;
}

TARGET_INLINE enum ss_result columns_decode(const struct ss_kvrans_block *block, uint8_t *target, struct states *given,
                                            struct shape shape) {
    _Alignas(64) uint8_t tile[TILE_COLUMNS * SS_KVRANS_ROWS_MAX];
    struct input input = {.next = block->coded, .end = block->coded + block->coded_size};
    struct states states = *given;

    for (uint32_t first = 0; first < block->columns; first += TILE_COLUMNS) {
        uint32_t columns = block->columns - first < TILE_COLUMNS ? block->columns - first : TILE_COLUMNS;
        for (uint32_t column = 0; column < columns; column++) {
            input_ready(&input);
            column_decode(block, first + column, &states, shape, &input.next,
                          tile + (size_t)column * SS_KVRANS_ROWS_MAX);
            if (input.next > input.end)
                return SS_BAD_DATA;
        }
        for (uint32_t group = 0; group < shape.groups; group++) {
            uint32_t rows = block->rows - GROUP * group;
            tile_store(tile + (size_t)GROUP * group, target + (size_t)GROUP * group * block->columns + first,
                       block->columns, rows < GROUP ? rows : GROUP, columns);
        }
    }
    *given = states;
    return input.next == input.end ? SS_OK : SS_BAD_DATA;
}

/* The shapes that matter have code of their own: 256 rows, whose values are a range or have low bits. */
#define COLUMNS_DECODE(name, groups, lane_groups, shift, range, full)                                                  \
    TARGET static enum ss_result name(const struct ss_kvrans_block *block, uint8_t *target, struct states *states) {   \
        const struct shape shape = {groups, lane_groups, shift, range, full, 0};                                       \
        return columns_decode(block, target, states, shape);                                                           \
    }

COLUMNS_DECODE(columns_decode_any, (block->rows + GROUP - 1) / GROUP, block->lanes / GROUP, block->shift, 0, 0)
COLUMNS_DECODE(columns_decode_64, 4, 1, 0, 1, 1)
COLUMNS_DECODE(columns_decode_128, 4, 2, 0, 1, 1)
COLUMNS_DECODE(columns_decode_256, 4, 4, 0, 1, 1)
COLUMNS_DECODE(columns_decode_64_low, 4, 1, block->shift, 0, 1)
COLUMNS_DECODE(columns_decode_128_low, 4, 2, block->shift, 0, 1)
COLUMNS_DECODE(columns_decode_256_low, 4, 4, block->shift, 0, 1)

/* is_range() returns whether each index is a byte that much after the first one. */
TARGET static int is_range(const struct ss_kvrans_block *block) {
    const __m512i range = _mm512_add_epi8(_mm512_load_si512(numbers), _mm512_set1_epi8((char)block->value[0]));
    return block->shift == 0 && _mm512_cmpneq_epi8_mask(_mm512_load_si512(block->value), range) == 0;
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

    for (uint32_t group = 0; group < block->lanes / GROUP; group++)
        other |= _mm512_mask_cmpneq_epi8_mask(states->active[group], states->high[group], one) |
                 _mm512_mask_test_epi8_mask(states->active[group], states->low[group], states->low[group]);
    return other == 0;
}

TARGET static enum ss_result decode(const struct ss_kvrans_block *block, uint8_t *target) {
    struct states states = states_load(block);
    enum ss_result result;

    if (block->rows != SS_KVRANS_ROWS_MAX)
        result = columns_decode_any(block, target, &states);
    else if (block->lanes == 256)
        result = (is_range(block) ? columns_decode_256 : columns_decode_256_low)(block, target, &states);
    else if (block->lanes == 128)
        result = (is_range(block) ? columns_decode_128 : columns_decode_128_low)(block, target, &states);
    else
        result = (is_range(block) ? columns_decode_64 : columns_decode_64_low)(block, target, &states);
    return states_ended(block, &states) ? result : SS_BAD_DATA;
}

/* ---- Decode to elements -------------------------------------------------------------------------------------- */

/*
 * A row has one scale, so an index stands for one of 64 elements in it: two registers of bytes, the lower and the upper
 * ones. elements_fill() computes those of all rows, as quantize/avx512.c computes them.
 */
TARGET_INLINE void elements_fill(const struct ss_kvrans_block *block, int half, const float *scales,
                                 struct ss_kvrans_elements *elements) {
    const __m512i numbered = _mm512_load_si512(numbers), lower = _mm512_add_epi8(numbered, numbered);
    const __m512i upper = _mm512_add_epi8(lower, _mm512_set1_epi8(1));
    __m512 symbols[4];

    for (int part = 0; part < 4; part++)
        symbols[part] = _mm512_cvtepi32_ps(
            _mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)(const void *)(block->value + 16 * part))));
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
 * place_of() returns where in a line the index of a column is: unpacking bytes works inside 128-bit lanes, so that lane
 * k has columns 8k to 8k + 7 and then 32 + 8k to 32 + 8k + 7.
 */
TARGET_INLINE uint32_t place_of(uint32_t column) {
    return column % 32 / 8 * 16 + column / 32 * 8 + column % 8;
}

/* row_stream() writes 64 elements of a row past the caches, of indices in the order of place_of(). */
TARGET_INLINE void row_stream(const uint8_t *line, const uint8_t (*bytes)[SS_KVRANS_INDEX_MAX], uint8_t *target) {
    const __m512i index = _mm512_load_si512(line);
    const __m512i lower = _mm512_permutexvar_epi8(index, _mm512_load_si512(bytes[0]));
    const __m512i upper = _mm512_permutexvar_epi8(index, _mm512_load_si512(bytes[1]));

    _mm512_stream_si512((void *)target, _mm512_unpacklo_epi8(lower, upper));
    _mm512_stream_si512((void *)(target + 64), _mm512_unpackhi_epi8(lower, upper));
}

/*
 * coded_prefetch() asks for the lines that some columns later will need; three are what a column of 6 bits a symbol
 * takes. The hardware would ask in time if its requests did not queue with all that is written.
 */
TARGET_INLINE void coded_prefetch(const uint8_t *next) {
    enum { AHEAD = 2048 };
    for (int line = 0; line < 3; line++)
        _mm_prefetch((const char *)((uintptr_t)next + AHEAD + 64 * (uintptr_t)line), _MM_HINT_T0);
}

/*
 * elements_decode() decodes a tile while it writes the elements of the one before, some rows behind each column: memory
 * then takes the lines of one tile during all of the time that the next one takes.
 */
TARGET_INLINE enum ss_result elements_decode(const struct ss_kvrans_block *block,
                                             const struct ss_kvrans_elements *elements, uint8_t *target,
                                             struct states *given, struct shape shape) {
    enum { ROWS_EACH = SS_KVRANS_ROWS_MAX / TILE_COLUMNS };
    _Alignas(64) uint8_t tile[TILE_COLUMNS * SS_KVRANS_ROWS_MAX], lines[TILE_COLUMNS * SS_KVRANS_ROWS_MAX];
    const size_t stride = 2 * (size_t)block->columns;
    struct input input = {.next = block->coded, .end = block->coded + block->coded_size};
    struct states states = *given;

    for (uint32_t first = 0; first < block->columns; first += TILE_COLUMNS) {
        uint8_t *before = target + 2 * (size_t)first - 2 * TILE_COLUMNS;
        for (uint32_t column = 0; column < TILE_COLUMNS; column++) {
            input_ready(&input);
            coded_prefetch(input.next);
            column_decode(block, first + column, &states, shape, &input.next,
                          tile + (size_t)place_of(column) * SS_KVRANS_ROWS_MAX);
            if (input.next > input.end)
                return SS_BAD_DATA;
            for (uint32_t row = ROWS_EACH * column; first > 0 && row < ROWS_EACH * (column + 1); row++)
                row_stream(lines + (size_t)row * TILE_COLUMNS, elements->bytes[row], before + row * stride);
        }
        for (uint32_t group = 0; group < GROUPS; group++)
            tile_store(tile + (size_t)GROUP * group, lines + (size_t)GROUP * group * TILE_COLUMNS, TILE_COLUMNS, GROUP,
                       TILE_COLUMNS);
    }
    for (uint32_t row = 0; row < SS_KVRANS_ROWS_MAX; row++)
        row_stream(lines + (size_t)row * TILE_COLUMNS, elements->bytes[row],
                   target + stride - 2 * TILE_COLUMNS + row * stride);
    *given = states;
    return input.next == input.end ? SS_OK : SS_BAD_DATA;
}

#define ELEMENTS_DECODE(name, lane_groups)                                                                             \
    TARGET static enum ss_result name(const struct ss_kvrans_block *block, const struct ss_kvrans_elements *elements,  \
                                      uint8_t *target, struct states *states) {                                        \
        const struct shape shape = {GROUPS, lane_groups, 0, 0, 1, 1};                                                  \
        return elements_decode(block, elements, target, states, shape);                                                \
    }

ELEMENTS_DECODE(elements_decode_64, 1)
ELEMENTS_DECODE(elements_decode_128, 2)
ELEMENTS_DECODE(elements_decode_256, 4)

TARGET static enum ss_result decode_elements(const struct ss_kvrans_block *block, enum ss_dtype dtype,
                                             const float *scales, struct ss_kvrans_elements *scratch, uint8_t *target) {
    struct states states = states_load(block);
    enum ss_result result;

    if (dtype == SS_DTYPE_FLOAT16)
        elements_fill(block, 1, scales, scratch);
    else
        elements_fill(block, 0, scales, scratch);
    if (block->lanes == 256)
        result = elements_decode_256(block, scratch, target, &states);
    else
        result = (block->lanes == 128 ? elements_decode_128 : elements_decode_64)(block, scratch, target, &states);
    return states_ended(block, &states) ? result : SS_BAD_DATA;
}

/* ---- Encode -------------------------------------------------------------------------------------------------- */

enum { BAND_MAX = 256 * 1024 }; /* bytes of 64 rows that a second-level cache keeps until they are needed */

/* fetch() has bytes brought to the second-level cache; there need not be any. */
TARGET_INLINE void fetch(const uint8_t *source, size_t begin, size_t end, size_t limit) {
    for (size_t at = begin; at < end && at < limit; at += 64)
        _mm_prefetch((const char *)(source + at), _MM_HINT_T1);
}

TARGET static void transpose(const struct ss_kvrans_plan *plan, const uint8_t *source,
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
        if ((int8_t)bytes[2][lane] < extremes->signed_least)
            extremes->signed_least = (int8_t)bytes[2][lane];
        if ((int8_t)bytes[3][lane] > extremes->signed_most)
            extremes->signed_most = (int8_t)bytes[3][lane];
    }
}

TARGET static void total(const struct ss_kvrans_plan *plan, const uint8_t *column_table, uint32_t index_count,
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
    memcpy(&both, counts, sizeof(both));
    return _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_set1_epi32((int)both), cost));
}

TARGET static void assign(const struct ss_kvrans_plan *plan, const struct ss_kvrans_costs *costs, uint32_t index_count,
                          uint8_t *column_table) {
    enum { TOGETHER = 4 }; /* columns, for which costs are loaded once */
    uint32_t column = 0;

    for (; column + TOGETHER <= plan->columns; column += TOGETHER) {
        const uint16_t *counts = plan->counts + (size_t)column * SS_KVRANS_INDEX_MAX;
        __m512i sums[TOGETHER];
        for (int each = 0; each < TOGETHER; each++)
            sums[each] = _mm512_setzero_si512();
        for (uint32_t pair = 0; pair < (index_count + 1) / 2; pair++) {
            const __m512i cost = _mm512_load_si512(costs->cost[pair]);
            for (uint32_t each = 0; each < TOGETHER; each++)
                sums[each] = weighed(sums[each], counts + (size_t)each * SS_KVRANS_INDEX_MAX + 2 * pair, cost);
        }
        for (uint32_t each = 0; each < TOGETHER; each++)
            column_table[column + each] = least_of(sums[each]);
    }
    for (; column < plan->columns; column++) {
        const uint16_t *counts = plan->counts + (size_t)column * SS_KVRANS_INDEX_MAX;
        __m512i sums = _mm512_setzero_si512();
        for (uint32_t pair = 0; pair < (index_count + 1) / 2; pair++)
            sums = weighed(sums, counts + (size_t)2 * pair, _mm512_load_si512(costs->cost[pair]));
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
        for (uint32_t group = groups; group-- > 0;)
            end = encode_step(table, _mm512_load_si512(cells + GROUP * group), &states.low[group % lane_groups],
                              &states.high[group % lane_groups], full ? ~0ull : states.active[group], positions, end);
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

TARGET static uint8_t *encode(const struct ss_kvrans_plan *plan, uint8_t *end, uint8_t *states_low,
                              uint8_t *states_high) {
    struct states states;

    for (uint32_t group = 0; group < GROUPS; group++) {
        states.active[group] = plan->rows > GROUP * group ? mask_of(plan->rows - GROUP * group) : 0;
        states.low[group] = _mm512_setzero_si512();
        states.high[group] = _mm512_set1_epi8(SS_KVRANS_STATE_FIRST >> 8);
    }
    if (plan->rows != SS_KVRANS_ROWS_MAX)
        end = columns_encode_any(plan, end, &states);
    else if (plan->lanes == 256)
        end = columns_encode_256(plan, end, &states);
    else
        end = (plan->lanes == 128 ? columns_encode_128 : columns_encode_64)(plan, end, &states);
    for (uint32_t group = 0; group < plan->lanes / GROUP; group++) {
        _mm512_mask_storeu_epi8(states_low + GROUP * group, states.active[group], states.low[group]);
        _mm512_mask_storeu_epi8(states_high + GROUP * group, states.active[group], states.high[group]);
    }
    return end;
}

const struct ss_kvrans_kernels ss_kvrans_kernels_avx512 = {
    .name = "own, avx512",
    .decode = decode,
    .decode_elements = decode_elements,
    .transpose = transpose,
    .present = ss_kvrans_present_avx512,
    .map = ss_kvrans_map_avx512,
    .count = ss_kvrans_count_avx512,
    .total = total,
    .assign = assign,
    .encode = encode,
};

#endif /* SS_ARCH_X86_64 */
