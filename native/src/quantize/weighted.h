/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weighted.h - the quantizer 'weighted' for one vector: the arithmetic that every instruction set's file compiles
 *
 * This is the scalar arithmetic, which defines the result that every variant reaches bit for bit: each operation is of
 * IEEE single precision, and products are fused with sums only where it says so (-ffp-contract=off). A change of it
 * needs another SCHEMA_VERSION in shadowserve/keys.py, which is a part of records' keys.
 */
#ifndef SS_QUANTIZE_WEIGHTED_H
#define SS_QUANTIZE_WEIGHTED_H

#include "quantize/scalar.h"

enum { SS_WEIGHTED_LIMIT = 127, SS_HEAD_MAX = 1024 };
enum { SS_SHIFTS = 4 }; /* vectors that follow each other have other centres */
enum { SS_TURNS = 16 }; /* vectors that share a base: the angles of the first of them */

/* One row of a group's channels, and the rotation of one token. */
struct ss_weighing {
    const float *steps;
    const float *centres;
    const float *cosines; /* 'pairs' of them, as of the sines */
    const float *sines;
    size_t length; /* channels */
    size_t head;   /* channels of a head; 'length' is a multiple; without pairs all of them count as one */
    size_t pairs;  /* pairs of channels that are rotated; 0: none */
};

/* What the vectors of a slice have in common, and the angles of the current one. */
struct ss_weighted {
    const struct ss_quantize_kernels *kernels;
    const struct ss_channels *channels;
    const float *centres; /* of the row, for the slice's first vector */
    size_t shift;         /* numbers from there to those of the next vector */
    struct ss_weighing by;
    float first[SS_HEAD_MAX]; /* cosines, then sines, of the first token */
    float base[SS_HEAD_MAX];  /* cosines, then sines, of 'base_vector' */
    size_t base_vector;       /* first of the SS_TURNS vectors that the current one belongs to */
    float cosines[SS_HEAD_MAX / 2];
    float sines[SS_HEAD_MAX / 2];
    size_t exact; /* vectors that are stored as they are, where elements are made */
};

/*
 * ss_unweigh_begin() fails as ss_dequantize_weighted() does. Then ss_unweigh() makes elements of 'count' vectors from
 * 'vector' on, and at last ss_unweigh_end() copies the exact vectors. 'streamed': past the caches.
 */
enum ss_result ss_unweigh_begin(struct ss_weighted *slice, const struct ss_elements *elements);
void ss_unweigh(struct ss_weighted *slice, const struct ss_elements *elements, const uint8_t *symbols, size_t vector,
                size_t count, int streamed);
void ss_unweigh_end(const struct ss_weighted *slice, const struct ss_elements *elements);

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

/* What an element is stored as here; see ss_weighing_scale() for bfloat16. */
static inline void ss_float16_round(void *target, size_t index, float value) {
    ss_float16_store(target, index, value);
}

static inline void ss_bfloat16_round(void *target, size_t index, float value) {
    ss_store16(target, index, (uint16_t)(ss_bits_of_float(value) >> 16));
}

static inline void ss_float32_round(void *target, size_t index, float value) {
    ss_float32_store(target, index, value);
}

/* The most that an element and a step may add up to, so that nothing that is computed of them overflows. */
#define SS_MOST_FLOAT16 0x1p14f
#define SS_MOST_FLOAT32 0x1p109f

/*
 * A symbol becomes a number as a byte in the mantissa of 1: (32768 + 128 + symbol) / 32768, which costs vector kernels
 * one instruction. So elements are made of steps that are 32768 times as large, and of centres without the 32896 steps.
 * bfloat16 is the upper half of a float32, without any rounding: all numbers are larger by a 384th instead, by half to
 * all of what rounding adds on average. An element is within two thirds of its last place then, and those that bfloat16
 * has stay what they are.
 */
#define SS_NUMBER_BITS 0x3F808000u /* of 1, and of 128, which makes the symbol positive */
#define SS_NUMBER_STEPS 0x1p15f
#define SS_NUMBER_OFFSET 32896.0f

static inline float ss_round_factor(enum ss_dtype dtype) {
    return dtype == SS_DTYPE_BFLOAT16 ? 1.0f + 1.0f / 384 : 1.0f;
}

/* ss_weighing_scale() makes such steps and centres of 'count' channels. */
static inline void ss_weighing_scale(enum ss_dtype dtype, const float *steps, const float *centres, size_t count,
                                     float *scaled_steps, float *scaled_centres) {
    const float factor = ss_round_factor(dtype);

    for (size_t channel = 0; channel < count; channel++) {
        const float step = steps[channel] * factor;
        scaled_steps[channel] = step * SS_NUMBER_STEPS;
        scaled_centres[channel] = centres[channel] * factor - step * SS_NUMBER_OFFSET;
    }
}

/* ss_value() is the number that a symbol of a channel stands for, by such a step and centre. */
static inline float ss_value(const struct ss_weighing *by, const int8_t *symbols, size_t channel) {
    const float number = ss_float_of_bits(SS_NUMBER_BITS ^ (uint32_t)(uint8_t)symbols[channel] << 8);
    return fmaf(number, by->steps[channel], by->centres[channel]);
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
            ss_rotate_back(by->cosines[pair], by->sines[pair], &first, &second);                                       \
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
            ss_rotate(by->cosines[pair], by->sines[pair], &first, &second);                                            \
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

/*
 * angles() adds two angles, both given by their cosines and sines: 'first' of a token, 'turn' of a number of tokens. An
 * angle of a vector is that of the slice's first token, plus the turn to the vector's base, plus the turn from there to
 * the vector. So a kernel needs few angles, which stay in the nearest cache.
 */
#define SS_ANGLES(attributes)                                                                                          \
    attributes static void angles(const float *restrict first, const float *restrict turn, size_t pairs,               \
                                  float *restrict cosines, float *restrict sines) {                                    \
        for (size_t pair = 0; pair < pairs; pair++) {                                                                  \
            cosines[pair] = fmaf(-first[pairs + pair], turn[pairs + pair], first[pair] * turn[pair]);                  \
            sines[pair] = fmaf(first[pair], turn[pairs + pair], first[pairs + pair] * turn[pair]);                     \
        }                                                                                                              \
    }

#endif /* SS_QUANTIZE_WEIGHTED_H */
