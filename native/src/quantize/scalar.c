/* SPDX-License-Identifier: Apache-2.0 */
/* scalar.c - the scalar kernels: the reference of all others, and what runs where none of those does */
#include "quantize/scalar.h"

#define MAGNITUDE_MAX(bits)                                                                                            \
    static uint32_t magnitude_max##bits(const void *source, size_t count) {                                            \
        return ss_magnitude_max##bits##_from(0, source, count, 0);                                                     \
    }

#define BINNED(dtype, size)                                                                                            \
    static void bin_##dtype(const void *source, size_t count, float inverse, int limit, int8_t *symbols) {             \
        ss_bin_##dtype##_from(0, source, count, inverse, limit, symbols);                                              \
    }                                                                                                                  \
    static inline void unbin_##dtype##_vector(const int8_t *symbols, size_t count, float scale, void *target) {        \
        ss_unbin_##dtype##_from(0, symbols, count, scale, target);                                                     \
    }                                                                                                                  \
    SS_UNBIN_BATCH(, unbin_##dtype, unbin_##dtype##_vector, size)

MAGNITUDE_MAX(8)
MAGNITUDE_MAX(16)
MAGNITUDE_MAX(32)
BINNED(float8, 1)
BINNED(float16, 2)
BINNED(bfloat16, 2)
BINNED(float32, 4)

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
