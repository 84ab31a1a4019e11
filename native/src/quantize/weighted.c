/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weighted.c - the quantizer 'weighted' for the vectors of one slice
 *
 * Each channel has one step and one centre, which a calibration of the model made; the centre is shifted by parts of
 * the step from vector to vector. Keys are rotated back by RoPE's angles first, so that a channel has the same spread
 * at every position. Vectors that the steps do not fit are stored as they are, before the symbols:
 *
 *   uint32 position | uint32 count | count x uint16 vector, ascending | zeros up to a multiple of 4 bytes |
 *   count x elements
 *
 * The position is that of the first vector in its prompt.
 */
#include "quantize/weighted.h"

#include <stdlib.h>

enum { SINKS = 4 }; /* first tokens of a prompt: most heads attend to them */

enum { NAMES = 2 * sizeof(uint32_t) }; /* offset of the exact vectors' numbers */

static size_t names_bytes(size_t count) {
    return NAMES + (count + 1) / 2 * 4;
}

static int takes(enum ss_dtype dtype) {
    return dtype == SS_DTYPE_FLOAT16 || dtype == SS_DTYPE_BFLOAT16 || dtype == SS_DTYPE_FLOAT32;
}

size_t ss_weighted_exact_max(enum ss_dtype dtype, size_t vectors, size_t vector_length) {
    return names_bytes(vectors) + vectors * vector_length * ss_dtype_size(dtype);
}

int ss_channels_fit(const struct ss_channels *channels, enum ss_dtype dtype, size_t vector_length) {
    return takes(dtype) && channels != NULL && channels->steps != NULL && channels->centres != NULL &&
           channels->rows != 0 && channels->kinds != 0 && channels->head_length != 0 &&
           channels->head_length <= SS_HEAD_MAX && channels->vector_length == vector_length && vector_length != 0 &&
           vector_length % channels->head_length == 0 && 2 * (uint64_t)channels->pairs <= channels->head_length &&
           (channels->pairs == 0 || (channels->frequencies != NULL && channels->turns != NULL));
}

int ss_channels_cover(const struct ss_channels *channels, uint32_t row, size_t vectors) {
    return row < channels->rows && vectors <= UINT16_MAX + (size_t)1 &&
           (channels->pairs == 0 || row % channels->kinds != 0 || vectors <= channels->tokens);
}

/* pairs_of() returns how many pairs of a head are rotated in a row of the group's channels. */
static size_t pairs_of(const struct ss_channels *channels, uint32_t row) {
    return row % channels->kinds == 0 ? channels->pairs : 0;
}

/* first_angles() makes the cosines, then the sines, of a token at 'position'. */
static void first_angles(const struct ss_channels *channels, size_t pairs, uint32_t position, float *first) {
    for (size_t pair = 0; pair < pairs; pair++) {
        double angle = channels->frequencies[pair] * (double)position;
        first[pair] = (float)cos(angle);
        first[pairs + pair] = (float)sin(angle);
    }
}

/* weighing_of() describes 'width' channels of a row from 'channel' on, with the angles of vectors from 'turned' on. */
static struct ss_weighing weighing_of(const struct ss_channels *channels, uint32_t row, size_t channel, size_t width,
                                      const float *angles, size_t turned) {
    const size_t begin = (size_t)row * channels->vector_length + channel, pairs = pairs_of(channels, row);
    const struct ss_weighing by = {.steps = channels->steps + begin,
                                   .centres = channels->centres + begin,
                                   .angles = angles,
                                   .width = width,
                                   .head = pairs != 0 ? channels->head_length : width,
                                   .pairs = pairs,
                                   .shift = (size_t)channels->rows * channels->vector_length,
                                   .turned = turned};
    return by;
}

enum ss_result ss_quantize_weighted(enum ss_dtype dtype, const struct ss_channels *channels, uint32_t row,
                                    uint32_t position, const void *source, size_t vectors, uint8_t *symbols,
                                    void *exact, size_t *exact_length) {
    const size_t length = channels != NULL ? channels->vector_length : 0, bytes = length * ss_dtype_size(dtype);
    const struct ss_quantize_kernels *kernels = ss_quantize_kernels_active();
    float first[SS_HEAD_MAX], angles[SS_HEAD_MAX];
    uint8_t *const side = exact;
    uint32_t count = 0;

    if (!ss_channels_fit(channels, dtype, length) || !ss_channels_cover(channels, row, vectors) || exact == NULL ||
        exact_length == NULL || (vectors != 0 && (source == NULL || symbols == NULL))) {
        return SS_BAD_ARGUMENT;
    }
    first_angles(channels, pairs_of(channels, row), position, first);
    for (size_t vector = 0; vector < vectors; vector++) {
        const struct ss_weighing slice = weighing_of(channels, row, 0, length, angles, vector);
        const struct ss_weighing by = ss_weighing_at(&slice, vector);
        const uint8_t *elements = (const uint8_t *)source + vector * bytes;
        int8_t *its = (int8_t *)symbols + vector * length;
        if (by.pairs != 0) {
            kernels->angles(first, channels->turns + 2 * by.pairs * vector, by.pairs, angles);
        }
        if (kernels->weigh[dtype](&by, elements, its) != 0 || position + vector < SINKS) {
            memset(its, 0, length);
            ss_store16(side + NAMES, count++, (uint16_t)vector);
        }
    }
    ss_store32(side, 0, position);
    ss_store32(side, 1, count);
    memset(side + NAMES + 2 * (size_t)count, 0, names_bytes(count) - NAMES - 2 * (size_t)count);
    for (size_t index = 0; index < count; index++) {
        memcpy(side + names_bytes(count) + index * bytes,
               (const uint8_t *)source + ss_load16(side + NAMES, index) * bytes, bytes);
    }
    *exact_length = names_bytes(count) + count * bytes;
    return SS_OK;
}

/* exact_count() returns the number of exact vectors, or 'vectors' + 1 if the data before the symbols is damaged. */
static size_t exact_count(const uint8_t *side, size_t size, size_t vectors, size_t bytes) {
    size_t count = size >= NAMES ? ss_load32(side, 1) : vectors + 1;

    if (count > vectors || size != names_bytes(count) + count * bytes) {
        return vectors + 1;
    }
    if (count % 2 != 0 && ss_load16(side + NAMES, count) != 0) {
        return vectors + 1;
    }
    for (size_t index = 0; index < count; index++) {
        size_t vector = ss_load16(side + NAMES, index);
        if (vector >= vectors || (index != 0 && vector <= ss_load16(side + NAMES, index - 1))) {
            return vectors + 1;
        }
    }
    return count;
}

enum ss_result ss_unweighing_begin(struct ss_unweighing *unweighing, const struct ss_elements *elements, float *angles) {
    const struct ss_channels *const channels = elements->channels;
    const size_t bytes = elements->vector_length * ss_dtype_size(elements->dtype);

    if (!ss_channels_fit(channels, elements->dtype, elements->vector_length) ||
        !ss_channels_cover(channels, elements->row, elements->vectors) || elements->scales == NULL ||
        (elements->vectors != 0 && elements->target == NULL)) {
        return SS_BAD_ARGUMENT;
    }
    unweighing->kernels = ss_quantize_kernels_active();
    unweighing->elements = elements;
    unweighing->angles = angles;
    unweighing->exact = exact_count(elements->scales, elements->scales_length, elements->vectors, bytes);
    if (unweighing->exact > elements->vectors) {
        return SS_BAD_DATA;
    }
    unweighing->pairs = pairs_of(channels, elements->row);
    first_angles(channels, unweighing->pairs, ss_load32(elements->scales, 0), unweighing->first);
    return SS_OK;
}

void ss_unweighing_turn(struct ss_unweighing *unweighing, size_t vector, size_t count) {
    const size_t pairs = unweighing->pairs;
    const float *turns = unweighing->elements->channels->turns;

    unweighing->turned = vector;
    for (size_t index = 0; pairs != 0 && index < count; index++) {
        unweighing->kernels->angles(unweighing->first, turns + 2 * pairs * (vector + index), pairs,
                                    unweighing->angles + 2 * pairs * index);
    }
}

struct ss_weighing ss_unweighing_of(const struct ss_unweighing *unweighing, size_t channel, size_t width) {
    const struct ss_elements *const elements = unweighing->elements;
    struct ss_weighing slice =
        weighing_of(elements->channels, elements->row, channel, width, unweighing->angles, unweighing->turned);

    slice.pitch = elements->vector_length * ss_dtype_size(elements->dtype);
    return slice;
}

void ss_unweighing_make(const struct ss_unweighing *unweighing, const uint8_t *symbols, size_t vector, size_t count,
                        int streamed) {
    const struct ss_elements *const elements = unweighing->elements;
    const struct ss_weighing slice = ss_unweighing_of(unweighing, 0, elements->vector_length);

    unweighing->kernels->unweigh[elements->dtype](&slice, (const int8_t *)symbols, vector, count,
                                                  (uint8_t *)elements->target + vector * slice.pitch, streamed);
}

void ss_unweighing_end(const struct ss_unweighing *unweighing) {
    const struct ss_elements *const elements = unweighing->elements;
    const size_t bytes = elements->vector_length * ss_dtype_size(elements->dtype);
    const uint8_t *const side = elements->scales;

    ss_streams_order();
    for (size_t index = 0; index < unweighing->exact; index++) {
        memcpy((uint8_t *)elements->target + ss_load16(side + NAMES, index) * bytes,
               side + names_bytes(unweighing->exact) + index * bytes, bytes);
    }
}

enum ss_result ss_elements_unweigh(const struct ss_elements *elements, const uint8_t *symbols, int streamed) {
    enum { TOGETHER = 4 }; /* vectors whose angles are made by one call */
    float angles[TOGETHER * SS_HEAD_MAX];
    struct ss_unweighing unweighing;
    enum ss_result result = elements->vectors == 0 || symbols != NULL ? SS_OK : SS_BAD_ARGUMENT;

    if (result == SS_OK) {
        result = ss_unweighing_begin(&unweighing, elements, angles);
    }
    for (size_t vector = 0; result == SS_OK && vector < elements->vectors; vector += TOGETHER) {
        const size_t left = elements->vectors - vector, count = left < TOGETHER ? left : TOGETHER;
        ss_unweighing_turn(&unweighing, vector, count);
        ss_unweighing_make(&unweighing, symbols + vector * elements->vector_length, vector, count, streamed);
    }
    if (result == SS_OK) {
        ss_unweighing_end(&unweighing);
    }
    return result;
}

enum ss_result ss_dequantize_weighted(enum ss_dtype dtype, const struct ss_channels *channels, uint32_t row,
                                      const uint8_t *symbols, const void *exact, size_t exact_length, size_t vectors,
                                      void *target) {
    const struct ss_elements elements = {.scales = exact,
                                         .target = target,
                                         .vectors = vectors,
                                         .vector_length = channels != NULL ? channels->vector_length : 0,
                                         .dtype = dtype,
                                         .channels = channels,
                                         .scales_length = exact_length,
                                         .row = row};
    return ss_elements_unweigh(&elements, symbols, 0);
}
