/* SPDX-License-Identifier: Apache-2.0 */
/*
 * strided.c - blocks of memory from one order of their dimensions into another
 *
 * Where one dimension is contiguous on both sides, its runs are copied. Where each side has another one, both together
 * are a plane to be transposed: squares of 16 bytes by 16 in registers, as many side by side as make lines of the
 * target, and what is left at the edges one element at a time.
 *
 * Whole lines go to memory past the caches, where the CPU has such stores: blocks are pages, of which there are more
 * than caches hold. That saves reading what is overwritten, and leaves in the caches what an engine computes with.
 */
#include <stddef.h>
#include <string.h>

#include "cpu/cpu.h"

#ifdef SS_ARCH_X86_64
#include <emmintrin.h>
#elif defined(SS_ARCH_AARCH64)
#include <arm_neon.h>
#endif

enum { DIMENSIONS = 6, ELEMENT_MAX = 8, LINE = 64 };

struct dimension {
    uint64_t size;
    int64_t to;   /* bytes from one to the next */
    int64_t from; /* likewise */
};

struct shape {
    struct dimension outer[DIMENSIONS]; /* all but the next two */
    uint32_t count;
    struct dimension run; /* contiguous in the target */
    struct dimension row; /* contiguous in the source; of size 1 where 'run' is that, too */
    uint64_t element;     /* bytes */
};

/* ---- Vectors: of what every CPU of the architecture has, so that nothing is left to be chosen at run time
 * ------------ */

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
            memcpy(rows, zipped, sizeof(rows));                                                                        \
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
    static inline void squares_##bits(const struct shape *shape, uint8_t *to, const uint8_t *from, uint64_t *runs,     \
                                      uint64_t *rows) {                                                                \
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
    static inline void squares_##bits(const struct shape *shape, uint8_t *to, const uint8_t *from, uint64_t *runs,     \
                                      uint64_t *rows) {                                                                \
        (void)shape, (void)to, (void)from;                                                                             \
        *runs = *rows = 0;                                                                                             \
    }
#endif

/* ---- What lies innermost
 * --------------------------------------------------------------------------------------------- */

#define PLANE(bits)                                                                                                    \
    SQUARES(bits)                                                                                                      \
    static void plane_##bits(const struct shape *shape, uint8_t *to, const uint8_t *from) {                            \
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

static void inner(const struct shape *shape, uint8_t *to, const uint8_t *from) {
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

/* take() removes the dimension that is contiguous on one side from the outer ones, or makes one of size 1. */
static struct dimension take(struct shape *shape, int of_target) {
    for (uint32_t i = shape->count; i-- > 0;) {
        const struct dimension found = shape->outer[i];
        if ((of_target ? found.to : found.from) == (int64_t)shape->element) {
            shape->count--;
            memmove(&shape->outer[i], &shape->outer[i + 1], (shape->count - i) * sizeof(found));
            return found;
        }
    }
    return (struct dimension){.size = 1, .to = (int64_t)shape->element, .from = (int64_t)shape->element};
}

/* widen() takes neighbours on both sides for one element, up to eight bytes. */
static void widen(struct shape *shape) {
    for (uint32_t i = 0; i < shape->count; i++) {
        const struct dimension each = shape->outer[i];
        const int small = each.size == 2 || each.size == 4 || each.size == ELEMENT_MAX;
        if (small && each.size * shape->element <= ELEMENT_MAX && each.to == (int64_t)shape->element &&
            each.from == each.to) {
            shape->element *= each.size;
            shape->count--;
            memmove(&shape->outer[i], &shape->outer[i + 1], (shape->count - i) * sizeof(each));
            return;
        }
    }
}

static void block(const struct shape *shape, uint8_t *to, const uint8_t *from) {
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
    struct shape shape = {.count = 0, .element = element_bytes};
    for (uint32_t i = 0; i < dimensions; i++) {
        if (sizes[i] == 0) {
            return SS_OK;
        }
        if (sizes[i] > 1) {
            shape.outer[shape.count++] = (struct dimension){sizes[i], to_strides[i], from_strides[i]};
        }
    }
    widen(&shape);
    shape.run = take(&shape, 1);
    shape.row = (struct dimension){.size = 1};
    if (shape.run.size == 1 || shape.run.from != (int64_t)shape.element) {
        shape.row = take(&shape, 0);
    }
    for (uint64_t i = 0; i < count; i++) {
        block(&shape, to[i], from[i]);
    }
    ss_streams_order();
    return SS_OK;
}
