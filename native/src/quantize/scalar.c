/* SPDX-License-Identifier: Apache-2.0 */
/* scalar.c - the scalar kernels: the reference of all others, and what runs where none of those does */
#include "quantize/scalar.h"

static uint32_t magnitude_max8(const void *source, size_t count) {
    return ss_magnitude_max8_from(0, source, count, 0);
}

static uint32_t magnitude_max16(const void *source, size_t count) {
    return ss_magnitude_max16_from(0, source, count, 0);
}

static uint32_t magnitude_max32(const void *source, size_t count) {
    return ss_magnitude_max32_from(0, source, count, 0);
}

static void bin_float8(const void *source, size_t count, float inverse, int limit, int8_t *symbols) {
    ss_bin_float8_from(0, source, count, inverse, limit, symbols);
}

static void bin_float16(const void *source, size_t count, float inverse, int limit, int8_t *symbols) {
    ss_bin_float16_from(0, source, count, inverse, limit, symbols);
}

static void bin_bfloat16(const void *source, size_t count, float inverse, int limit, int8_t *symbols) {
    ss_bin_bfloat16_from(0, source, count, inverse, limit, symbols);
}

static void bin_float32(const void *source, size_t count, float inverse, int limit, int8_t *symbols) {
    ss_bin_float32_from(0, source, count, inverse, limit, symbols);
}

static inline void unbin_float8_vector(const int8_t *symbols, size_t count, float scale, void *target) {
    ss_unbin_float8_from(0, symbols, count, scale, target);
}

static inline void unbin_float16_vector(const int8_t *symbols, size_t count, float scale, void *target) {
    ss_unbin_float16_from(0, symbols, count, scale, target);
}

static inline void unbin_bfloat16_vector(const int8_t *symbols, size_t count, float scale, void *target) {
    ss_unbin_bfloat16_from(0, symbols, count, scale, target);
}

static inline void unbin_float32_vector(const int8_t *symbols, size_t count, float scale, void *target) {
    ss_unbin_float32_from(0, symbols, count, scale, target);
}

SS_UNBIN_BATCH(, unbin_float8, unbin_float8_vector, 1)
SS_UNBIN_BATCH(, unbin_float16, unbin_float16_vector, 2)
SS_UNBIN_BATCH(, unbin_bfloat16, unbin_bfloat16_vector, 2)
SS_UNBIN_BATCH(, unbin_float32, unbin_float32_vector, 4)

static void planes_split8(const void *source, size_t count, uint8_t *planes, size_t stride) {
    const uint8_t *bytes = source;

    (void)stride;
    for (size_t index = 0; index < count; index++) {
        planes[index] = (uint8_t)(bytes[index] << 1 | bytes[index] >> 7);
    }
}

static void planes_merge8(const uint8_t *planes, size_t stride, size_t count, void *target) {
    uint8_t *bytes = target;

    (void)stride;
    for (size_t index = 0; index < count; index++) {
        bytes[index] = (uint8_t)(planes[index] >> 1 | planes[index] << 7);
    }
}

static void planes_split16(const void *source, size_t count, uint8_t *planes, size_t stride) {
    ss_planes_split16_from(0, source, count, planes, stride);
}

static void planes_merge16(const uint8_t *planes, size_t stride, size_t count, void *target) {
    ss_planes_merge16_from(0, planes, stride, count, target);
}

static void planes_split32(const void *source, size_t count, uint8_t *planes, size_t stride) {
    ss_planes_split32_from(0, source, count, planes, stride);
}

static void planes_merge32(const uint8_t *planes, size_t stride, size_t count, void *target) {
    ss_planes_merge32_from(0, planes, stride, count, target);
}

const struct ss_quantize_kernels ss_quantize_kernels_scalar = {
    SS_QUANTIZE_KERNELS,
};
