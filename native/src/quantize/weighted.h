/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weighted.h - the quantizer 'weighted' for one vector: the arithmetic that every instruction set's file compiles
 *
 * The loops are plain C, which the compiler vectorizes. Each operation is IEEE single precision and none is contracted
 * (-ffp-contract=off), so all variants write the same bytes.
 */
#ifndef SS_QUANTIZE_WEIGHTED_H
#define SS_QUANTIZE_WEIGHTED_H

#include "quantize/scalar.h"

enum { SS_WEIGHTED_LIMIT = 127, SS_HEAD_MAX = 1024 };

/* One row of a group's channels, and the rotation of one token. */
struct ss_weighing {
    const float *steps;
    const float *centres;
    const float *cosines; /* 'pairs' of them, as of the sines */
    const float *sines;
    size_t length; /* channels */
    size_t head;   /* channels of a head; 'length' is a multiple */
    size_t pairs;  /* pairs of channels that are rotated; 0: none */
};

/* ss_rotate() rotates each pair of channels: by the angle with 'direction' 1, back with -1. */
static inline void ss_rotate(const struct ss_weighing *by, float direction, float *restrict values) {
    for (size_t pair = 0; pair < by->pairs; pair++) {
        float first = values[pair], second = values[by->pairs + pair];
        float cosine = by->cosines[pair], sine = direction * by->sines[pair];
        values[pair] = first * cosine - second * sine;
        values[by->pairs + pair] = second * cosine + first * sine;
    }
}

#define SS_ROUNDING 12582912.0f /* 1.5 * 2^23: adding it leaves no fraction, rounded to nearest even */

/*
 * ss_weigh_*() makes the symbols of a vector, and returns how many of its elements have none: they are not finite, or
 * more than SS_WEIGHTED_LIMIT steps from the centre, or so large that the rounded element, rotated, might overflow
 * ('most' is a quarter of the largest number). ss_unweigh_*() makes the elements.
 */
#define SS_WEIGHTED(attributes, dtype, most)                                                                           \
    attributes static uint32_t weigh_##dtype(const struct ss_weighing *by, const void *source,                         \
                                             int8_t *restrict symbols) {                                               \
        float values[SS_HEAD_MAX];                                                                                     \
        uint32_t outside = 0;                                                                                          \
                                                                                                                       \
        for (size_t first = 0; first < by->length; first += by->head) {                                                \
            const float *steps = by->steps + first, *centres = by->centres + first;                                    \
            for (size_t index = 0; index < by->head; index++) {                                                        \
                values[index] = ss_##dtype##_load(source, first + index);                                              \
            }                                                                                                          \
            ss_rotate(by, -1, values);                                                                                 \
            for (size_t index = 0; index < by->head; index++) {                                                        \
                float number = (values[index] - centres[index]) / steps[index];                                        \
                int inside =                                                                                           \
                    (fabsf(number) <= (float)SS_WEIGHTED_LIMIT) & (fabsf(values[index]) + steps[index] <= (most));     \
                outside += (uint32_t)!inside;                                                                          \
                number = inside ? number : 0.0f;                                                                       \
                symbols[first + index] = (int8_t)(int)((number + SS_ROUNDING) - SS_ROUNDING);                          \
            }                                                                                                          \
        }                                                                                                              \
        return outside;                                                                                                \
    }                                                                                                                  \
                                                                                                                       \
    attributes static void unweigh_##dtype(const struct ss_weighing *by, const int8_t *restrict symbols,               \
                                           void *restrict target) {                                                    \
        float values[SS_HEAD_MAX];                                                                                     \
                                                                                                                       \
        for (size_t first = 0; first < by->length; first += by->head) {                                                \
            const float *steps = by->steps + first, *centres = by->centres + first;                                    \
            for (size_t index = 0; index < by->head; index++) {                                                        \
                values[index] = (float)symbols[first + index] * steps[index] + centres[index];                         \
            }                                                                                                          \
            ss_rotate(by, 1, values);                                                                                  \
            for (size_t index = 0; index < by->head; index++) {                                                        \
                ss_##dtype##_store(target, first + index, values[index]);                                              \
            }                                                                                                          \
        }                                                                                                              \
    }

/* ss_angles() makes the cosines and sines of a token from those of the slice's first token and of its number in it. */
#define SS_ANGLES(attributes)                                                                                          \
    attributes static void angles(const float *restrict first, const float *restrict turn, size_t pairs,               \
                                  float *restrict cosines, float *restrict sines) {                                    \
        for (size_t pair = 0; pair < pairs; pair++) {                                                                  \
            cosines[pair] = first[pair] * turn[pair] - first[pairs + pair] * turn[pairs + pair];                       \
            sines[pair] = first[pairs + pair] * turn[pair] + first[pair] * turn[pairs + pair];                         \
        }                                                                                                              \
    }

#define SS_WEIGHTED_KERNELS(attributes)                                                                                \
    SS_WEIGHTED(attributes, float16, 0x1p14f)                                                                          \
    SS_WEIGHTED(attributes, bfloat16, 0x1p125f)                                                                        \
    SS_WEIGHTED(attributes, float32, 0x1p125f)                                                                         \
    SS_ANGLES(attributes)

#endif /* SS_QUANTIZE_WEIGHTED_H */
