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

static void slice_begin(struct ss_weighted *slice, const struct ss_channels *channels, uint32_t row,
                        uint32_t position) {
    const size_t begin = (size_t)row * channels->vector_length;

    slice->kernels = ss_quantize_kernels_active();
    slice->channels = channels;
    slice->centres = channels->centres + begin;
    slice->shift = (size_t)channels->rows * channels->vector_length;
    slice->by = (struct ss_weighing){.steps = channels->steps + begin,
                                     .cosines = slice->cosines,
                                     .sines = slice->sines,
                                     .length = channels->vector_length,
                                     .pairs = row % channels->kinds == 0 ? channels->pairs : 0};
    slice->base_vector = SIZE_MAX; /* none */
    slice->by.head = slice->by.pairs != 0 ? channels->head_length : channels->vector_length;
    for (size_t pair = 0; pair < slice->by.pairs; pair++) {
        double angle = channels->frequencies[pair] * (double)position;
        slice->first[pair] = (float)cos(angle);
        slice->first[slice->by.pairs + pair] = (float)sin(angle);
    }
}

static void slice_at(struct ss_weighted *slice, size_t vector) {
    const size_t pairs = slice->by.pairs, base = vector - vector % SS_TURNS;
    const float *turns = slice->channels->turns;

    slice->by.centres = slice->centres + vector % SS_SHIFTS * slice->shift;
    if (pairs == 0) {
        return;
    }
    if (slice->base_vector != base) {
        slice->kernels->angles(slice->first, turns + 2 * pairs * base, pairs, slice->base, slice->base + pairs);
        slice->base_vector = base;
    }
    slice->kernels->angles(slice->base, turns + 2 * pairs * (vector - base), pairs, slice->cosines, slice->sines);
}

enum ss_result ss_quantize_weighted(enum ss_dtype dtype, const struct ss_channels *channels, uint32_t row,
                                    uint32_t position, const void *source, size_t vectors, uint8_t *symbols,
                                    void *exact, size_t *exact_length) {
    const size_t length = channels != NULL ? channels->vector_length : 0, bytes = length * ss_dtype_size(dtype);
    uint8_t *const side = exact;
    uint32_t count = 0;
    struct ss_weighted slice;

    if (!ss_channels_fit(channels, dtype, length) || !ss_channels_cover(channels, row, vectors) || exact == NULL ||
        exact_length == NULL || (vectors != 0 && (source == NULL || symbols == NULL))) {
        return SS_BAD_ARGUMENT;
    }
    slice_begin(&slice, channels, row, position);
    for (size_t vector = 0; vector < vectors; vector++) {
        const uint8_t *elements = (const uint8_t *)source + vector * bytes;
        int8_t *its = (int8_t *)symbols + vector * length;
        slice_at(&slice, vector);
        if (slice.kernels->weigh[dtype](&slice.by, elements, its) != 0 || position + vector < SINKS) {
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

enum ss_result ss_unweigh_begin(struct ss_weighted *slice, const struct ss_elements *elements) {
    const struct ss_channels *const channels = elements->channels;
    const size_t length = elements->vector_length, bytes = length * ss_dtype_size(elements->dtype);
    const uint8_t *const side = elements->scales;

    if (!ss_channels_fit(channels, elements->dtype, length) ||
        !ss_channels_cover(channels, elements->row, elements->vectors) || side == NULL ||
        (elements->vectors != 0 && elements->target == NULL)) {
        return SS_BAD_ARGUMENT;
    }
    slice->exact = exact_count(side, elements->scales_length, elements->vectors, bytes);
    if (slice->exact > elements->vectors) {
        return SS_BAD_DATA;
    }
    slice_begin(slice, channels, elements->row, ss_load32(side, 0));
    return SS_OK;
}

void ss_unweigh(struct ss_weighted *slice, const struct ss_elements *elements, const uint8_t *symbols, size_t vector,
                size_t count, int streamed) {
    enum { SPAN = 2 * SS_HEAD_MAX }; /* channels whose steps and centres are scaled at a time: whole heads */
    const size_t length = elements->vector_length, size = ss_dtype_size(elements->dtype);
    const size_t span = slice->by.pairs != 0 ? SPAN / slice->by.head * slice->by.head : SPAN;
    float steps[SPAN], centres[SS_SHIFTS][SPAN];
    struct ss_weighing by = slice->by;

    for (size_t first = 0; first < length; first += span) {
        by.length = length - first < span ? length - first : span;
        by.head = by.pairs != 0 ? by.head : by.length;
        by.steps = steps;
        for (size_t shift = 0; shift < SS_SHIFTS && shift < count; shift++) {
            const size_t row = (vector + shift) % SS_SHIFTS;
            ss_weighing_scale(elements->dtype, slice->by.steps + first, slice->centres + row * slice->shift + first,
                              by.length, steps, centres[row]);
        }
        for (size_t index = 0; index < count; index++) {
            slice_at(slice, vector + index);
            by.centres = centres[(vector + index) % SS_SHIFTS];
            slice->kernels->unweigh[elements->dtype](
                &by, (const int8_t *)symbols + index * length + first,
                (uint8_t *)elements->target + ((vector + index) * length + first) * size, streamed);
        }
    }
}

void ss_unweigh_end(const struct ss_weighted *slice, const struct ss_elements *elements) {
    const size_t bytes = elements->vector_length * ss_dtype_size(elements->dtype);
    const uint8_t *const side = elements->scales;

    ss_streams_order();
    for (size_t index = 0; index < slice->exact; index++) {
        memcpy((uint8_t *)elements->target + ss_load16(side + NAMES, index) * bytes,
               side + names_bytes(slice->exact) + index * bytes, bytes);
    }
}

enum ss_result ss_elements_unweigh(const struct ss_elements *elements, const uint8_t *symbols, int streamed) {
    struct ss_weighted slice;
    enum ss_result result = elements->vectors != 0 && symbols == NULL ? SS_BAD_ARGUMENT : SS_OK;

    if (result == SS_OK) {
        result = ss_unweigh_begin(&slice, elements);
    }
    if (result == SS_OK) {
        ss_unweigh(&slice, elements, symbols, 0, elements->vectors, streamed);
        ss_unweigh_end(&slice, elements);
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
