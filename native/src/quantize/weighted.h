/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weighted.h - the quantizer 'weighted' for one vector: the arithmetic that every instruction set's file compiles
 *
 * This is the scalar arithmetic, which defines the result that every variant reaches bit for bit: each operation is of
 * IEEE single precision, and products are fused with sums only where it says so (-ffp-contract=off).
 */
#ifndef SS_QUANTIZE_WEIGHTED_H
#define SS_QUANTIZE_WEIGHTED_H

#include "quantize/scalar.h"

enum { SS_WEIGHTED_LIMIT = 127 };
enum { SS_SHIFTS = 4 }; /* vectors that follow each other have other centres */

/* Channels of one row of a group, and the rotation of a slice's vectors. */
struct ss_weighing {
    const float *steps;
    const float *centres; /* of the slice's first vector */
    const float *angles;  /* of each vector from 'turned' on: 'pairs' cosines, then as many sines */
    size_t width;         /* channels of these, and symbols from one vector to the next */
    size_t head;          /* channels of a head; 'width' is a multiple; without pairs all of them count as one */
    size_t pairs;         /* pairs of channels that are rotated; 0: none */
    size_t pitch;         /* bytes from one vector's elements to the next one's */
    size_t shift;         /* numbers from one vector's centres to those of the next */
    size_t turned;
};

/* ss_weighing_at() describes one vector of a slice, as if it were the first. */
static inline struct ss_weighing ss_weighing_at(const struct ss_weighing *slice, size_t vector) {
    struct ss_weighing by = *slice;

    by.centres += vector % SS_SHIFTS * by.shift;
    by.angles += 2 * by.pairs * (vector - by.turned);
    return by;
}

/* ss_unweighing_of() describes 'width' channels of a slice from 'channel' on, whole heads. */
struct ss_weighing ss_unweighing_of(const struct ss_unweighing *unweighing, size_t channel, size_t width);

/*
 * ss_rotate() rotates a pair of channels by its angle, ss_rotate_back() back. The second product is not rounded before
 * it is added: every instruction set that has kernels can do so.
 */
static inline void ss_rotate(float cosine, float sine, float *first, float *second) {
    float rotated = fmaf(-*second, sine, *first * cosine);
    *second = fmaf(*first, sine, *second * cosine);
    *first = rotated;
}

static inline void ss_rotate_back(float cosine, float sine, float *first, float *second) {
    ss_rotate(cosine, -sine, first, second);
}

/* What an element is stored as here: bfloat16 halves are rounded up, where other kernels' go to the even neighbour. */
static inline void ss_float16_round(void *target, size_t index, float value) {
    ss_float16_store(target, index, value);
}

static inline void ss_bfloat16_round(void *target, size_t index, float value) {
    ss_store16(target, index, (uint16_t)((ss_bits_of_float(value) + 0x8000) >> 16));
}

static inline void ss_float32_round(void *target, size_t index, float value) {
    ss_float32_store(target, index, value);
}

/* Numbers that 'most' is a quarter of the largest of, so that the rounded element, rotated, cannot overflow. */
#define SS_MOST_FLOAT16 0x1p14f
#define SS_MOST_FLOAT32 0x1p125f

/* ss_value() is the number that a symbol of a channel stands for. */
static inline float ss_value(const struct ss_weighing *by, const int8_t *symbols, size_t channel) {
    return fmaf((float)symbols[channel], by->steps[channel], by->centres[channel]);
}

/*
 * ss_number_symbol() makes the symbol of a number, and returns whether it has none: it is not finite, or more than
 * SS_WEIGHTED_LIMIT steps from the centre, or its magnitude near 'most'.
 */
static inline int ss_number_symbol(const struct ss_weighing *by, float value, float most, int8_t *symbols,
                                   size_t channel) {
    float number = (value - by->centres[channel]) / by->steps[channel];
    int inside = (fabsf(number) <= (float)SS_WEIGHTED_LIMIT) & (fabsf(value) + by->steps[channel] <= most);

    symbols[channel] = (int8_t)(inside ? lrintf(number) : 0);
    return !inside;
}

/*
 * Of one head, which begins at channel 'head': ss_weigh_*_from() makes symbols, and returns whether an element has
 * none; ss_unweigh_*_from() makes elements. From pair 'pair' and from channel 'channel' of those without a pair on.
 */
#define SS_WEIGHTED_FROM(dtype, most)                                                                                  \
    static inline int ss_weigh_##dtype##_from(const struct ss_weighing *by, size_t head, size_t pair, size_t channel,  \
                                              const void *source, int8_t *symbols) {                                   \
        int outside = 0;                                                                                               \
                                                                                                                       \
        for (; pair < by->pairs; pair++) {                                                                             \
            const size_t at = head + pair, partner = at + by->pairs;                                                   \
            float first = ss_##dtype##_load(source, at), second = ss_##dtype##_load(source, partner);                  \
            ss_rotate_back(by->angles[pair], by->angles[by->pairs + pair], &first, &second);                                       \
            outside |= ss_number_symbol(by, first, most, symbols, at);                                                 \
            outside |= ss_number_symbol(by, second, most, symbols, partner);                                           \
        }                                                                                                              \
        for (; channel < by->head; channel++) {                                                                        \
            float value = ss_##dtype##_load(source, head + channel);                                                   \
            outside |= ss_number_symbol(by, value, most, symbols, head + channel);                                     \
        }                                                                                                              \
        return outside;                                                                                                \
    }                                                                                                                  \
                                                                                                                       \
    static inline void ss_unweigh_##dtype##_from(const struct ss_weighing *by, size_t head, size_t pair,               \
                                                 size_t channel, const int8_t *symbols, void *target) {                \
        for (; pair < by->pairs; pair++) {                                                                             \
            const size_t at = head + pair, partner = at + by->pairs;                                                   \
            float first = ss_value(by, symbols, at), second = ss_value(by, symbols, partner);                          \
            ss_rotate(by->angles[pair], by->angles[by->pairs + pair], &first, &second);                                            \
            ss_##dtype##_round(target, at, first);                                                                     \
            ss_##dtype##_round(target, partner, second);                                                               \
        }                                                                                                              \
        for (; channel < by->head; channel++) {                                                                        \
            ss_##dtype##_round(target, head + channel, ss_value(by, symbols, head + channel));                         \
        }                                                                                                              \
    }

SS_WEIGHTED_FROM(float16, SS_MOST_FLOAT16)
SS_WEIGHTED_FROM(bfloat16, SS_MOST_FLOAT32)
SS_WEIGHTED_FROM(float32, SS_MOST_FLOAT32)

/* angles() makes the cosines and sines of a token from those of the slice's first token and of its number in it. */
#define SS_ANGLES(attributes)                                                                                          \
    attributes static void angles(const float *restrict first, const float *restrict turn, size_t pairs,               \
                                  float *restrict made) {                                                              \
        for (size_t pair = 0; pair < pairs; pair++) {                                                                  \
            made[pair] = fmaf(-first[pairs + pair], turn[pairs + pair], first[pair] * turn[pair]);                     \
            made[pairs + pair] = fmaf(first[pair], turn[pairs + pair], first[pairs + pair] * turn[pair]);              \
        }                                                                                                              \
    }

#endif /* SS_QUANTIZE_WEIGHTED_H */
