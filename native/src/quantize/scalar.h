/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scalar.h - the kernels in portable C, from element 'start' on
 *
 * scalar.c makes the scalar variant of them; the others finish their vectors with them.
 */
#ifndef SS_QUANTIZE_SCALAR_H
#define SS_QUANTIZE_SCALAR_H

#include "quantize/quantize.h"

/* What one element is loaded and stored as, and converted with. */
static inline float ss_float8_load(const void *source, size_t index) {
    return ss_float_of_float8(((const uint8_t *)source)[index]);
}

static inline float ss_float16_load(const void *source, size_t index) {
    return ss_float_of_float16(ss_load16(source, index));
}

static inline float ss_bfloat16_load(const void *source, size_t index) {
    return ss_float_of_bfloat16(ss_load16(source, index));
}

static inline float ss_float32_load(const void *source, size_t index) {
    return ss_float_of_bits(ss_load32(source, index));
}

static inline void ss_float8_store(void *target, size_t index, float value) {
    ((uint8_t *)target)[index] = ss_float8_of_float(value);
}

static inline void ss_float16_store(void *target, size_t index, float value) {
    ss_store16(target, index, ss_float16_of_float(value));
}

static inline void ss_bfloat16_store(void *target, size_t index, float value) {
    ss_store16(target, index, ss_bfloat16_of_float(value));
}

static inline void ss_float32_store(void *target, size_t index, float value) {
    ss_store32(target, index, ss_bits_of_float(value));
}

#define SS_MAGNITUDE_MAX_FROM(bits, ELEMENT)                                                                           \
    static inline uint32_t ss_magnitude_max##bits##_from(size_t start, const void *source, size_t count,               \
                                                         uint32_t most) {                                              \
        for (size_t index = start; index < count; index++) {                                                           \
            uint32_t magnitude = ELEMENT(source, index) & (uint32_t)INT##bits##_MAX;                                   \
            most = magnitude > most ? magnitude : most;                                                                \
        }                                                                                                              \
        return most;                                                                                                   \
    }

#define SS_BINNED_FROM(dtype)                                                                                          \
    static inline void ss_bin_##dtype##_from(size_t start, const void *source, size_t count, float inverse, int limit, \
                                             int8_t *symbols) {                                                        \
        for (size_t index = start; index < count; index++) {                                                           \
            symbols[index] = ss_symbol(ss_##dtype##_load(source, index), inverse, limit);                              \
        }                                                                                                              \
    }                                                                                                                  \
    static inline void ss_unbin_##dtype##_from(size_t start, const int8_t *symbols, size_t count, float scale,         \
                                               void *target) {                                                         \
        for (size_t index = start; index < count; index++) {                                                           \
            ss_##dtype##_store(target, index, (float)symbols[index] * scale);                                          \
        }                                                                                                              \
    }

#define SS_LOAD8(source, index) (((const uint8_t *)(source))[index])
SS_MAGNITUDE_MAX_FROM(8, SS_LOAD8)
SS_MAGNITUDE_MAX_FROM(16, ss_load16)
SS_MAGNITUDE_MAX_FROM(32, ss_load32)
SS_BINNED_FROM(float8)
SS_BINNED_FROM(float16)
SS_BINNED_FROM(bfloat16)
SS_BINNED_FROM(float32)

static inline void ss_planes_split8_from(size_t start, const void *source, size_t count, uint8_t *planes,
                                         size_t stride) {
    const uint8_t *bytes = source;

    (void)stride;
    for (size_t index = start; index < count; index++) {
        planes[index] = (uint8_t)(bytes[index] << 1 | bytes[index] >> 7);
    }
}

static inline void ss_planes_merge8_from(size_t start, const uint8_t *planes, size_t stride, size_t count,
                                         void *target) {
    uint8_t *bytes = target;

    (void)stride;
    for (size_t index = start; index < count; index++) {
        bytes[index] = (uint8_t)(planes[index] >> 1 | planes[index] << 7);
    }
}

static inline void ss_planes_split16_from(size_t start, const void *source, size_t count, uint8_t *planes,
                                          size_t stride) {
    for (size_t index = start; index < count; index++) {
        uint16_t value = ss_rotate_left16(ss_load16(source, index));
        planes[index] = (uint8_t)(value >> 8);
        planes[stride + index] = (uint8_t)value;
    }
}

static inline void ss_planes_merge16_from(size_t start, const uint8_t *planes, size_t stride, size_t count,
                                          void *target) {
    for (size_t index = start; index < count; index++) {
        ss_store16(target, index, ss_rotate_right16((uint16_t)(planes[index] << 8 | planes[stride + index])));
    }
}

static inline void ss_planes_split32_from(size_t start, const void *source, size_t count, uint8_t *planes,
                                          size_t stride) {
    for (size_t index = start; index < count; index++) {
        uint32_t value = ss_load32(source, index);
        value = value << 1 | value >> 31;
        planes[index] = (uint8_t)(value >> 24);
        planes[stride + index] = (uint8_t)(value >> 16);
        planes[2 * stride + index] = (uint8_t)(value >> 8);
        planes[3 * stride + index] = (uint8_t)value;
    }
}

static inline void ss_planes_merge32_from(size_t start, const uint8_t *planes, size_t stride, size_t count,
                                          void *target) {
    for (size_t index = start; index < count; index++) {
        uint32_t value = (uint32_t)planes[index] << 24 | (uint32_t)planes[stride + index] << 16 |
                         (uint32_t)planes[2 * stride + index] << 8 | planes[3 * stride + index];
        ss_store32(target, index, value >> 1 | value << 31);
    }
}

#endif /* SS_QUANTIZE_SCALAR_H */
