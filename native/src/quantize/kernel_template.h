/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_template.h - the loops of the vector kernels that all instruction sets share
 *
 * A file of one instruction set includes this after it has defined, for 'bits' 8, 16 and 32:
 *
 *   TARGET                                 its function attributes
 *   VECTOR_BYTES, VECTOR(bits)             a register, and its type
 *   ZERO(bits), MAX(bits, a, b)            in each lane
 *   MAGNITUDES(bits, source)               loads a register, and clears its lanes' uppermost bits
 *   magnitudes_reduce##bits(vector)        the largest lane
 *   widen_DTYPE(source)                    16 elements to numbers
 *   symbols_store(numbers, inverse, limit, symbols)
 *   split16_step(), merge16_step(), split32_step(), merge32_step()   PLANES_STEP16 or PLANES_STEP32 elements
 *
 * What is left of a vector is the scalar arithmetic's. It is inlined here, so the compiler may vectorize it.
 */
#include "quantize/scalar.h"

#define MAGNITUDE_MAX(bits)                                                                                            \
    TARGET static uint32_t magnitude_max##bits(const void *source, size_t count) {                                     \
        enum { LANES = 8 * VECTOR_BYTES / (bits) };                                                                    \
        const uint8_t *bytes = source;                                                                                 \
        VECTOR(bits) most = ZERO(bits), other = most;                                                                  \
        size_t index = 0;                                                                                              \
                                                                                                                       \
        for (; index + 2 * LANES <= count; index += 2 * LANES, bytes += 2 * VECTOR_BYTES) {                            \
            most = MAX(bits, most, MAGNITUDES(bits, bytes));                                                           \
            other = MAX(bits, other, MAGNITUDES(bits, bytes + VECTOR_BYTES));                                          \
        }                                                                                                              \
        for (; index + LANES <= count; index += LANES, bytes += VECTOR_BYTES) {                                        \
            most = MAX(bits, most, MAGNITUDES(bits, bytes));                                                           \
        }                                                                                                              \
        return ss_magnitude_max##bits##_from(index, source, count, magnitudes_reduce##bits(MAX(bits, most, other)));   \
    }

#define BIN(dtype, size)                                                                                               \
    TARGET static void bin_##dtype(const void *source, size_t count, float inverse, int limit, int8_t *symbols) {      \
        size_t index = 0;                                                                                              \
                                                                                                                       \
        for (; index + 16 <= count; index += 16) {                                                                     \
            symbols_store(widen_##dtype((const uint8_t *)source + (size)*index), inverse, limit, symbols + index);     \
        }                                                                                                              \
        ss_bin_##dtype##_from(index, source, count, inverse, limit, symbols);                                          \
    }

#define PLANES(bits)                                                                                                   \
    TARGET static void planes_split##bits(const void *source, size_t count, uint8_t *planes, size_t stride) {          \
        size_t index = 0;                                                                                              \
                                                                                                                       \
        for (; index + PLANES_STEP##bits <= count; index += PLANES_STEP##bits) {                                       \
            split##bits##_step((const uint8_t *)source + (bits) / 8 * index, planes + index, stride);                  \
        }                                                                                                              \
        ss_planes_split##bits##_from(index, source, count, planes, stride);                                            \
    }                                                                                                                  \
    PLANES_MERGE(bits, planes_merge##bits, 0)

/* 'streamed': past the caches; the target is aligned for that. */
#define PLANES_MERGE(bits, name, streamed)                                                                             \
    TARGET static void name(const uint8_t *planes, size_t stride, size_t count, void *target) {                        \
        size_t index = 0;                                                                                              \
                                                                                                                       \
        for (; index + PLANES_STEP##bits <= count; index += PLANES_STEP##bits) {                                       \
            merge##bits##_step(planes + index, stride, (uint8_t *)target + (bits) / 8 * index, streamed);              \
        }                                                                                                              \
        ss_planes_merge##bits##_from(index, planes, stride, count, target);                                            \
    }

MAGNITUDE_MAX(8)
MAGNITUDE_MAX(16)
MAGNITUDE_MAX(32)
BIN(float8, 1)
BIN(float16, 2)
BIN(bfloat16, 2)
BIN(float32, 4)
PLANES(16)
PLANES(32)

TARGET static void planes_split8(const void *source, size_t count, uint8_t *planes, size_t stride) {
    ss_planes_split8_from(0, source, count, planes, stride);
}

TARGET static void planes_merge8(const uint8_t *planes, size_t stride, size_t count, void *target) {
    ss_planes_merge8_from(0, planes, stride, count, target);
}
