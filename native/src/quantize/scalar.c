/* SPDX-License-Identifier: Apache-2.0 */
/* scalar.c - the scalar kernels: the reference of all others, and what runs where none of those does */
#include "quantize/weighted.h"

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

#define PLANES(bits)                                                                                                   \
    static void planes_split##bits(const void *source, size_t count, uint8_t *planes, size_t stride) {                 \
        ss_planes_split##bits##_from(0, source, count, planes, stride);                                                \
    }                                                                                                                  \
    static void planes_merge##bits(const uint8_t *planes, size_t stride, size_t count, void *target) {                 \
        ss_planes_merge##bits##_from(0, planes, stride, count, target);                                                \
    }

PLANES(8)
PLANES(16)
PLANES(32)

#define WEIGHTED(dtype)                                                                                                \
    static int weigh_##dtype(const struct ss_weighing *by, const void *source, int8_t *symbols) {                      \
        int outside = 0;                                                                                               \
        for (size_t head = 0; head < by->length; head += by->head) {                                                   \
            outside |= ss_weigh_##dtype##_from(by, head, 0, 2 * by->pairs, source, symbols);                           \
        }                                                                                                              \
        return outside;                                                                                                \
    }                                                                                                                  \
                                                                                                                       \
    static void unweigh_##dtype(const struct ss_weighing *by, const int8_t *symbols, void *target, int streamed) {     \
        (void)streamed;                                                                                                \
        for (size_t head = 0; head < by->length; head += by->head) {                                                   \
            ss_unweigh_##dtype##_from(by, head, 0, 2 * by->pairs, symbols, target);                                    \
        }                                                                                                              \
    }

WEIGHTED(float16)
WEIGHTED(bfloat16)
WEIGHTED(float32)
SS_ANGLES()

const struct ss_quantize_kernels ss_quantize_kernels_scalar = {
    SS_QUANTIZE_KERNELS,
};
