/* SPDX-License-Identifier: Apache-2.0 */
/*
 * strided.c - blocks of memory from one order of their dimensions into another
 *
 * Where one dimension is contiguous on both sides, its runs are copied. Where each side has another one, both together
 * are a plane to be transposed: squares of 16 bytes by 16 in registers, as many side by side as make lines of the
 * target, and what is left at the edges one element at a time. Tiles whose columns are pairs, as CPUs that multiply
 * matrices want them, are zipped or unzipped, two side by side. Tiles and planes of pairs are such CPUs' KV, and take
 * the vectors that these have (strided_avx512.c).
 *
 * Whole lines go to memory past the caches, where the CPU has such stores: blocks are pages, of which there are more
 * than caches hold. That saves reading what is overwritten, and leaves in the caches what an engine computes with.
 */
#include "memory/strided.h"

#include <stddef.h>
#include <string.h>

#ifdef SS_ARCH_X86_64
#include <emmintrin.h>
#elif defined(SS_ARCH_AARCH64)
#include <arm_neon.h>
#endif

enum { DIMENSIONS = SS_STRIDED_DIMENSIONS, ELEMENT_MAX = 8, LINE = SS_STRIDED_LINE };

/* ---- Vectors that every CPU of the architecture has ------------------------------------------------------------- */

#ifdef SS_ARCH_X86_64
#define VECTOR 16
typedef __m128i vector;

static inline vector vector_load(const uint8_t *from) {
    return _mm_loadu_si128((const __m128i *)(const void *)from);
}

static inline void vector_store(uint8_t *to, vector value) {
    _mm_storeu_si128((__m128i *)(void *)to, value);
}

static inline void vector_stream(uint8_t *to, vector value) {
    _mm_stream_si128((__m128i *)(void *)to, value);
}

#define ZIP(bits)                                                                                                      \
    static inline void zip_##bits(vector *zipped, vector a, vector b) {                                                \
        zipped[0] = _mm_unpacklo_epi##bits(a, b);                                                                      \
        zipped[1] = _mm_unpackhi_epi##bits(a, b);                                                                      \
    }
#elif defined(SS_ARCH_AARCH64)
#define VECTOR 16
typedef uint8x16_t vector;

static inline vector vector_load(const uint8_t *from) {
    return vld1q_u8(from);
}

static inline void vector_store(uint8_t *to, vector value) {
    vst1q_u8(to, value);
}

static inline void vector_stream(uint8_t *to, vector value) {
    vst1q_u8(to, value);
}

#define U8(bits, value) vreinterpretq_u8_u##bits(value)
#define UN(bits, value) vreinterpretq_u##bits##_u8(value)
#define vreinterpretq_u8_u8(value) (value)
#define ZIP(bits)                                                                                                      \
    static inline void zip_##bits(vector *zipped, vector a, vector b) {                                                \
        zipped[0] = U8(bits, vzip1q_u##bits(UN(bits, a), UN(bits, b)));                                                \
        zipped[1] = U8(bits, vzip2q_u##bits(UN(bits, a), UN(bits, b)));                                                \
    }
#endif

#ifdef VECTOR
/* square_N() transposes 16 bytes of each of as many source rows as make 16 bytes, into lines one after the other. */
#define SQUARE(bits)                                                                                                   \
    ZIP(bits)                                                                                                          \
    static inline void square_##bits(uint8_t *lines, const uint8_t *from, int64_t stride) {                            \
        enum { SIDE = 8 * VECTOR / bits };                                                                             \
        vector rows[SIDE], zipped[SIDE];                                                                               \
        for (int i = 0; i < SIDE; i++) {                                                                               \
            rows[i] = vector_load(from + i * stride);                                                                  \
        }                                                                                                              \
        for (int size = 1; size < SIDE; size *= 2) {                                                                   \
            for (int i = 0; i < SIDE / 2; i++) {                                                                       \
                zip_##bits(&zipped[2 * i], rows[i], rows[i + SIDE / 2]);                                               \
            }                                                                                                          \
            memcpy(rows, zipped, sizeof rows);                                                                         \
        }                                                                                                              \
        for (int i = 0; i < SIDE; i++) {                                                                               \
            vector_store(lines + i * LINE, rows[i]);                                                                   \
        }                                                                                                              \
    }

/* line_write() writes a line, or the vectors that it has less. */
static inline void line_write(uint8_t *to, const uint8_t *line, uint64_t bytes) {
    if (bytes == LINE && (uintptr_t)to % LINE == 0) {
        for (int i = 0; i < LINE; i += VECTOR) {
            vector_stream(to + i, vector_load(line + i));
        }
        return;
    }
    for (uint64_t i = 0; i < bytes; i += VECTOR) {
        vector_store(to + i, vector_load(line + i));
    }
}

/* squares_N() transposes what divides into squares, and sets how many runs and rows that are. */
#define SQUARES(bits)                                                                                                  \
    SQUARE(bits)                                                                                                       \
    static inline void squares_##bits(const struct ss_strided *shape, uint8_t *to, const uint8_t *from,                \
                                      uint64_t *runs, uint64_t *rows) {                                                \
        enum { BYTES = bits / 8, SIDE = VECTOR / BYTES, WIDE = LINE / BYTES };                                         \
        uint8_t lines[WIDE * LINE];                                                                                    \
        *runs = shape->run.size / SIDE * SIDE;                                                                         \
        *rows = shape->row.size / SIDE * SIDE;                                                                         \
        for (uint64_t run = 0; run < *runs; run += WIDE) {                                                             \
            const uint64_t width = *runs - run < WIDE ? *runs - run : WIDE;                                            \
            for (uint64_t row = 0; row < *rows; row += WIDE) {                                                         \
                const uint64_t height = *rows - row < WIDE ? *rows - row : WIDE;                                       \
                const uint8_t *source = from + (int64_t)run * shape->run.from + row * BYTES;                           \
                uint8_t *target = to + (int64_t)row * shape->row.to + run * BYTES;                                     \
                for (uint64_t i = 0; i < width; i += SIDE) {                                                           \
                    for (uint64_t j = 0; j < height; j += SIDE) {                                                      \
                        square_##bits(lines + j * LINE + i * BYTES, source + (int64_t)i * shape->run.from + j * BYTES, \
                                      shape->run.from);                                                                \
                    }                                                                                                  \
                }                                                                                                      \
                for (uint64_t j = 0; j < height; j++) {                                                                \
                    line_write(target + (int64_t)j * shape->row.to, lines + j * LINE, width * BYTES);                  \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }
#else
#define SQUARES(bits)                                                                                                  \
    static inline void squares_##bits(const struct ss_strided *shape, uint8_t *to, const uint8_t *from,                \
                                      uint64_t *runs, uint64_t *rows) {                                                \
        (void)shape, (void)to, (void)from;                                                                             \
        *runs = *rows = 0;                                                                                             \
    }
#endif

/* ---- Innermost dimensions --------------------------------------------------------------------------------------- */

#define PLANE(bits)                                                                                                    \
    SQUARES(bits)                                                                                                      \
    static void plane_##bits(const struct ss_strided *shape, uint8_t *to, const uint8_t *from) {                       \
        uint64_t runs, rows;                                                                                           \
        squares_##bits(shape, to, from, &runs, &rows);                                                                 \
        for (uint64_t row = 0; row < shape->row.size; row++) {                                                         \
            for (uint64_t run = row < rows ? runs : 0; run < shape->run.size; run++) {                                 \
                memcpy(to + (int64_t)row * shape->row.to + run * (bits / 8),                                           \
                       from + (int64_t)run * shape->run.from + row * (bits / 8), bits / 8);                            \
            }                                                                                                          \
        }                                                                                                              \
    }

PLANE(8)
PLANE(16)
PLANE(32)
PLANE(64)

/*
 * A line of a tile is a row of 16 pairs, of one row each of two of the other side, where the row of the tile beside it
 * goes on. So lines of two tiles are two lines there. Where the other side is the target the tiles are unzipped.
 */
static void tiles(const struct ss_strided *shape, uint8_t *to, const uint8_t *from) {
#ifdef VECTOR
    const int zips = shape->run.size == 2;
    const int64_t to_next = zips ? shape->wide.to : shape->row.to;
    const int64_t from_next = zips ? shape->run.from : shape->wide.from;
    for (uint64_t beside = 0; beside < shape->wide.size; beside += 2) {
        uint8_t *target = to + (int64_t)beside * shape->wide.to;
        const uint8_t *source = from + (int64_t)beside * shape->wide.from;
        for (uint64_t below = 0; below < shape->deep.size; below++) {
            uint8_t lines[2][LINE];
            for (int i = 0; i < LINE / VECTOR; i++) {
                vector both[2], next[2];
                if (zips) {
                    zip_16(both, vector_load(source + i * VECTOR), vector_load(source + from_next + i * VECTOR));
                    vector_store(&lines[i / 2][i % 2 * 2 * VECTOR], both[0]);
                    vector_store(&lines[i / 2][i % 2 * 2 * VECTOR + VECTOR], both[1]);
                    continue;
                }
                const uint8_t *line = source + i / 2 * from_next + i % 2 * 2 * VECTOR;
                zip_16(next, vector_load(line), vector_load(line + VECTOR));
                zip_16(both, next[0], next[1]);
                zip_16(next, both[0], both[1]); /* once more, and they were as they lay */
                vector_store(&lines[0][i * VECTOR], next[0]);
                vector_store(&lines[1][i * VECTOR], next[1]);
            }
            line_write(target, lines[0], LINE);
            line_write(target + to_next, lines[1], LINE);
            target += shape->deep.to;
            source += shape->deep.from;
        }
    }
#else
    (void)shape, (void)to, (void)from;
#endif
}

static void run_copy(uint8_t *to, const uint8_t *from, uint64_t bytes) {
    uint64_t done = 0;
#ifdef VECTOR
    if ((uintptr_t)to % LINE == 0) {
        for (; done + LINE <= bytes; done += LINE) {
            line_write(to + done, from + done, LINE);
        }
    }
#endif
    memcpy(to + done, from + done, bytes - done);
}

/* wider() copies with wider vectors where there is a kernel, of squares of 16; returns whether there is. */
static int wider(const struct ss_strided *shape, uint8_t *to, const uint8_t *from) {
#ifdef SS_ARCH_X86_64
    if (shape->avx512 && shape->wide.size > 0) {
        ss_strided_tiles_avx512(shape, to, from);
        return 1;
    }
    if (shape->avx512 && shape->element == 4 && shape->run.size % 16 == 0 && shape->row.size % 16 == 0) {
        ss_strided_plane_avx512(shape, to, from);
        return 1;
    }
#endif
    (void)shape, (void)to, (void)from;
    return 0;
}

static void inner(const struct ss_strided *shape, uint8_t *to, const uint8_t *from) {
    if (wider(shape, to, from)) {
        return;
    }
    if (shape->wide.size > 0) {
        tiles(shape, to, from);
        return;
    }
    if (shape->row.size == 1 && shape->run.from == (int64_t)shape->element) {
        run_copy(to, from, shape->run.size * shape->element);
        return;
    }
    switch (shape->element) {
    case 1:
        plane_8(shape, to, from);
        break;
    case 2:
        plane_16(shape, to, from);
        break;
    case 4:
        plane_32(shape, to, from);
        break;
    default:
        plane_64(shape, to, from);
    }
}

/* find() returns the outer dimension with this stride on one side; the number of dimensions if there is none. */
static uint32_t find(const struct ss_strided *shape, int of_target, int64_t bytes) {
    uint32_t i = shape->count;
    while (i-- > 0) {
        if ((of_target ? shape->outer[i].to : shape->outer[i].from) == bytes) {
            return i;
        }
    }
    return shape->count;
}

static struct ss_dimension take(struct ss_strided *shape, uint32_t i) {
    const struct ss_dimension found = shape->outer[i];
    shape->count--;
    memmove(&shape->outer[i], &shape->outer[i + 1], (shape->count - i) * sizeof found);
    return found;
}

/* take_contiguous() takes the dimension out that is contiguous on one side, or makes one of size 1. */
static struct ss_dimension take_contiguous(struct ss_strided *shape, int of_target) {
    const uint32_t i = find(shape, of_target, (int64_t)shape->element);
    if (i < shape->count) {
        return take(shape, i);
    }
    return (struct ss_dimension){.size = 1, .to = (int64_t)shape->element, .from = (int64_t)shape->element};
}

/* take_tiles() takes out where tiles are, if there are tiles. */
static void take_tiles(struct ss_strided *shape) {
#ifdef VECTOR
    const int zips = shape->run.size == 2 && shape->row.to == 4;
    const int unzips = shape->row.size == 2 && shape->run.from == 4;
    const uint64_t columns = zips ? shape->row.size : shape->run.size;
    if (shape->element != 2 || zips == unzips || columns * 4 != LINE) {
        return;
    }
    const uint32_t wide = find(shape, unzips, LINE / 2), deep = find(shape, zips, LINE);
    if (wide == shape->count || deep == shape->count || wide == deep || shape->outer[wide].size % 2 != 0) {
        return;
    }
    shape->wide = take(shape, wide);
    shape->deep = take(shape, deep - (deep > wide));
#else
    (void)shape;
#endif
}

/* widen() takes neighbours on both sides for one element, up to eight bytes. */
static void widen(struct ss_strided *shape) {
    for (uint32_t i = 0; i < shape->count; i++) {
        const struct ss_dimension each = shape->outer[i];
        const int small = each.size == 2 || each.size == 4 || each.size == ELEMENT_MAX;
        if (small && each.size * shape->element <= ELEMENT_MAX && each.to == (int64_t)shape->element &&
            each.from == each.to) {
            shape->element *= each.size;
            shape->count--;
            memmove(&shape->outer[i], &shape->outer[i + 1], (shape->count - i) * sizeof each);
            return;
        }
    }
}

static void block(const struct ss_strided *shape, uint8_t *to, const uint8_t *from) {
    uint64_t at[DIMENSIONS] = {0};
    for (;;) {
        inner(shape, to, from);
        uint32_t i = shape->count;
        for (;;) {
            if (i-- == 0) {
                return;
            }
            to += shape->outer[i].to;
            from += shape->outer[i].from;
            if (++at[i] < shape->outer[i].size) {
                break;
            }
            at[i] = 0;
            to -= (int64_t)shape->outer[i].size * shape->outer[i].to;
            from -= (int64_t)shape->outer[i].size * shape->outer[i].from;
        }
    }
}

enum ss_result ss_copy_strided(void *const *to, const void *const *from, uint64_t count, uint32_t dimensions,
                               const uint64_t *sizes, const int64_t *to_strides, const int64_t *from_strides,
                               uint32_t element_bytes) {
    const int known = element_bytes == 1 || element_bytes == 2 || element_bytes == 4 || element_bytes == ELEMENT_MAX;
    if (dimensions > DIMENSIONS || !known) {
        return SS_BAD_ARGUMENT;
    }
    struct ss_strided shape = {.count = 0, .element = element_bytes, .avx512 = ss_isa_active() == SS_ISA_AVX512};
    for (uint32_t i = 0; i < dimensions; i++) {
        if (sizes[i] == 0) {
            return SS_OK;
        }
        if (sizes[i] > 1) {
            shape.outer[shape.count++] = (struct ss_dimension){sizes[i], to_strides[i], from_strides[i]};
        }
    }
    widen(&shape);
    shape.run = take_contiguous(&shape, 1);
    shape.row = (struct ss_dimension){.size = 1};
    if (shape.run.size == 1 || shape.run.from != (int64_t)shape.element) {
        shape.row = take_contiguous(&shape, 0);
    }
    take_tiles(&shape);
    for (uint64_t i = 0; i < count; i++) {
        block(&shape, to[i], from[i]);
    }
    ss_streams_order();
    return SS_OK;
}
