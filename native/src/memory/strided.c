/* SPDX-License-Identifier: Apache-2.0 */
/*
 * strided.c - blocks of memory from one order of their dimensions into another
 *
 * Where one dimension is contiguous on both sides, its runs are copied. Where each side has another one, both together
 * are a plane to be transposed: eight elements that are neighbours in the target are read one by one, from eight lines
 * that then serve the rows that follow, too. More lines would not stay in the first cache, where they are pages apart.
 */
#include <stddef.h>
#include <string.h>

#include "shadowserve.h"

enum { DIMENSIONS = 6, TILE = 8, ELEMENT_MAX = 8 };

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

#define PLANE(name, type)                                                                                              \
    static inline uint64_t name##_tiles(const struct shape *shape, uint8_t *to, const uint8_t *from, uint64_t run,     \
                                        const int64_t tile) {                                                          \
        for (; run + (uint64_t)tile <= shape->run.size; run += (uint64_t)tile) {                                       \
            const uint8_t *source = from + (int64_t)run * shape->run.from;                                             \
            uint8_t *target = to + run * sizeof(type);                                                                 \
            for (uint64_t row = 0; row < shape->row.size; row++) {                                                     \
                type elements[TILE];                                                                                   \
                for (int64_t each = 0; each < tile; each++) {                                                          \
                    memcpy(&elements[each], source + each * shape->run.from, sizeof(type));                            \
                }                                                                                                      \
                memcpy(target, elements, (size_t)tile * sizeof(type));                                                 \
                source += sizeof(type);                                                                                \
                target += shape->row.to;                                                                               \
            }                                                                                                          \
        }                                                                                                              \
        return run;                                                                                                    \
    }                                                                                                                  \
    static void name(const struct shape *shape, uint8_t *to, const uint8_t *from) {                                    \
        name##_tiles(shape, to, from, name##_tiles(shape, to, from, 0, TILE), 1);                                      \
    }

PLANE(plane_1, uint8_t)
PLANE(plane_2, uint16_t)
PLANE(plane_4, uint32_t)
PLANE(plane_8, uint64_t)

static void inner(const struct shape *shape, uint8_t *to, const uint8_t *from) {
    if (shape->row.size == 1 && shape->run.from == (int64_t)shape->element) {
        memcpy(to, from, shape->run.size * shape->element);
        return;
    }
    switch (shape->element) {
    case 1:
        plane_1(shape, to, from);
        break;
    case 2:
        plane_2(shape, to, from);
        break;
    case 4:
        plane_4(shape, to, from);
        break;
    default:
        plane_8(shape, to, from);
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
    return SS_OK;
}
