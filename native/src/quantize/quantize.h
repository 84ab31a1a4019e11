/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quantize.h - the kernels behind ss_quantize() and ss_dequantize(), one table of them for each ISA
 *
 * Also the scalar arithmetic, as inline functions: it defines the result that every variant must reach bit for bit,
 * and finishes the elements at the end of a vector, except where AVX-512 dequantizes with masks.
 */
#ifndef SS_QUANTIZE_H
#define SS_QUANTIZE_H

#include "cpu/cpu.h"

#include <math.h>
#include <string.h>

/* Bit patterns without the sign: from this one on, infinities and NaN. */
#define SS_FLOAT16_INFINITY 0x7C00u
#define SS_BFLOAT16_INFINITY 0x7F80u
#define SS_FLOAT32_INFINITY 0x7F800000u
#define SS_FLOAT8_NAN 0x7Fu /* no infinity there */

enum { SS_DTYPE_COUNT = SS_DTYPE_FLOAT8_E4M3 + 1 };

struct ss_weighing;

/*
 * All pointers may be unaligned. Dtype-indexed members have no entry (NULL) for SS_DTYPE_UINT8, which is never binned.
 */
struct ss_quantize_kernels {
    /* Returns the largest bit pattern of 'count' elements with their signs cleared: it orders like the magnitude. */
    uint32_t (*magnitude_max[SS_DTYPE_COUNT])(const void *source, size_t count);
    /* symbols = clamp(round_to_nearest_even(source * inverse), -limit, limit) */
    void (*bin[SS_DTYPE_COUNT])(const void *source, size_t count, float inverse, int limit, int8_t *symbols);
    /* target = symbols * the vector's scale, rounded to nearest even; for many vectors at once, as vectors can be short
     */
    void (*unbin[SS_DTYPE_COUNT])(const int8_t *symbols, const uint8_t *scales, size_t vectors, size_t vector_length,
                                  uint8_t *target);
    /* The same past the caches, see ss_dequantize_streamed(). NULL where there is no such variant. */
    void (*unbin_streamed[SS_DTYPE_COUNT])(const int8_t *symbols, const uint8_t *scales, size_t vectors,
                                           size_t vector_length, uint8_t *target);
    /* Rotates each element left by one and writes its bytes to planes 'stride' bytes apart, most significant first. */
    void (*planes_split[SS_DTYPE_COUNT])(const void *source, size_t count, uint8_t *planes, size_t stride);
    void (*planes_merge[SS_DTYPE_COUNT])(const uint8_t *planes, size_t stride, size_t count, void *target);
    void (*planes_merge_streamed[SS_DTYPE_COUNT])(const uint8_t *planes, size_t stride, size_t count, void *target);
    /* 'weighted', one vector; see weighted.h */
    int (*weigh[SS_DTYPE_COUNT])(const struct ss_weighing *by, const void *source, int8_t *symbols);
    void (*unweigh[SS_DTYPE_COUNT])(const struct ss_weighing *by, const int8_t *symbols, void *target, int streamed);
    void (*angles)(const float *first, const float *turn, size_t pairs, float *cosines, float *sines);
};

/* ss_quantize_kernels_active() returns the kernels of the variant in use. */
const struct ss_quantize_kernels *ss_quantize_kernels_active(void);

/* ss_symbol_size() returns the bytes of one element's symbol. */
static inline size_t ss_symbol_size(enum ss_quantizer quantizer, enum ss_dtype dtype) {
    return quantizer == SS_QUANTIZER_BINNED || quantizer == SS_QUANTIZER_WEIGHTED ? 1 : ss_dtype_size(dtype);
}

/* ss_channels_fit() returns whether channels are those of such vectors. */
int ss_channels_fit(const struct ss_channels *channels, enum ss_dtype dtype, size_t vector_length);

/* ss_channels_cover() returns whether fitting channels have a row, and the angles for a slice of 'vectors'. */
int ss_channels_cover(const struct ss_channels *channels, uint32_t row, size_t vectors);

/* The members that every variant has, by the names that its file gives to the functions. */
#define SS_QUANTIZE_KERNELS                                                                                            \
    .magnitude_max = {[SS_DTYPE_FLOAT16] = magnitude_max16,                                                            \
                      [SS_DTYPE_BFLOAT16] = magnitude_max16,                                                           \
                      [SS_DTYPE_FLOAT32] = magnitude_max32,                                                            \
                      [SS_DTYPE_FLOAT8_E4M3] = magnitude_max8},                                                        \
    .bin = {[SS_DTYPE_FLOAT16] = bin_float16,                                                                          \
            [SS_DTYPE_BFLOAT16] = bin_bfloat16,                                                                        \
            [SS_DTYPE_FLOAT32] = bin_float32,                                                                          \
            [SS_DTYPE_FLOAT8_E4M3] = bin_float8},                                                                      \
    .unbin = {[SS_DTYPE_FLOAT16] = unbin_float16,                                                                      \
              [SS_DTYPE_BFLOAT16] = unbin_bfloat16,                                                                    \
              [SS_DTYPE_FLOAT32] = unbin_float32,                                                                      \
              [SS_DTYPE_FLOAT8_E4M3] = unbin_float8},                                                                  \
    .planes_split = {[SS_DTYPE_UINT8] = planes_split8,                                                                 \
                     [SS_DTYPE_FLOAT16] = planes_split16,                                                              \
                     [SS_DTYPE_BFLOAT16] = planes_split16,                                                             \
                     [SS_DTYPE_FLOAT32] = planes_split32,                                                              \
                     [SS_DTYPE_FLOAT8_E4M3] = planes_split8},                                                          \
    .planes_merge = {[SS_DTYPE_UINT8] = planes_merge8,                                                                 \
                     [SS_DTYPE_FLOAT16] = planes_merge16,                                                              \
                     [SS_DTYPE_BFLOAT16] = planes_merge16,                                                             \
                     [SS_DTYPE_FLOAT32] = planes_merge32,                                                              \
                     [SS_DTYPE_FLOAT8_E4M3] = planes_merge8},                                                          \
    .weigh = {[SS_DTYPE_FLOAT16] = weigh_float16,                                                                      \
              [SS_DTYPE_BFLOAT16] = weigh_bfloat16,                                                                    \
              [SS_DTYPE_FLOAT32] = weigh_float32},                                                                     \
    .unweigh = {[SS_DTYPE_FLOAT16] = unweigh_float16,                                                                  \
                [SS_DTYPE_BFLOAT16] = unweigh_bfloat16,                                                                \
                [SS_DTYPE_FLOAT32] = unweigh_float32},                                                                 \
    .angles = angles

extern const struct ss_quantize_kernels ss_quantize_kernels_scalar;
extern const struct ss_quantize_kernels ss_quantize_kernels_avx2;
extern const struct ss_quantize_kernels ss_quantize_kernels_avx512;
extern const struct ss_quantize_kernels ss_quantize_kernels_neon;

/*
 * ss_dequantize_streamed() is ss_dequantize() for a target that this core does not read soon, such as delivered slices.
 * It writes whole cache lines with non-temporal stores, if the CPU has them and the target is aligned. This avoids
 * reading the overwritten lines, and keeps the contents of the caches. After the call its stores are ordered before all
 * later operations of this thread, as ordinary stores are.
 */
enum ss_result ss_dequantize_streamed(enum ss_quantizer quantizer, enum ss_dtype dtype, const uint8_t *symbols,
                                      const void *scales, size_t vectors, size_t vector_length, void *target);

/* ss_elements_unweigh() is ss_dequantize_weighted(), 'streamed' or not, for sizes that are known to fit. */
enum ss_result ss_elements_unweigh(const struct ss_elements *elements, const uint8_t *symbols, int streamed);

/* ---- Scalar arithmetic --------------------------------------------------------------------------------------- */

static inline uint16_t ss_load16(const void *source, size_t index) {
    uint16_t value;
    memcpy(&value, (const uint8_t *)source + 2 * index, sizeof value);
    return value;
}

static inline uint32_t ss_load32(const void *source, size_t index) {
    uint32_t value;
    memcpy(&value, (const uint8_t *)source + 4 * index, sizeof value);
    return value;
}

static inline void ss_store16(void *target, size_t index, uint16_t value) {
    memcpy((uint8_t *)target + 2 * index, &value, sizeof value);
}

static inline void ss_store32(void *target, size_t index, uint32_t value) {
    memcpy((uint8_t *)target + 4 * index, &value, sizeof value);
}

static inline uint32_t ss_bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float ss_float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float ss_float_of_bfloat16(uint16_t half) {
    return ss_float_of_bits((uint32_t)half << 16);
}

/* ss_bfloat16_of_float() rounds to nearest even; 'value' is not NaN. */
static inline uint16_t ss_bfloat16_of_float(float value) {
    uint32_t bits = ss_bits_of_float(value);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* ss_float_of_float16() is exact; 'half' is finite. */
static inline float ss_float_of_float16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t exponent = half >> 10 & 0x1F;
    uint32_t mantissa = half & 0x3FF;

    if (exponent == 0) { /* zero and subnormals: mantissa * 2^-24, a normal float */
        float magnitude = (float)mantissa * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    return ss_float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

/* ss_float16_of_float() rounds to nearest even, overflowing to infinity; 'value' is not NaN. */
static inline uint16_t ss_float16_of_float(float value) {
    uint32_t bits = ss_bits_of_float(value);
    uint32_t sign = bits >> 16 & 0x8000;
    uint32_t magnitude = bits & 0x7FFFFFFF;

    if (magnitude >= 0x47800000) { /* 65536 and more, infinity too */
        return (uint16_t)(sign | SS_FLOAT16_INFINITY);
    }
    if (magnitude < 0x38800000) { /* under 2^-14: adding 0.5 leaves the mantissa in steps of 2^-24, rounded */
        return (uint16_t)(sign | (ss_bits_of_float(ss_float_of_bits(magnitude) + 0.5f) - 0x3F000000));
    }
    magnitude += 0xFFF + (magnitude >> 13 & 1);
    return (uint16_t)(sign | (magnitude - 0x38000000) >> 13); /* the exponent's bias goes from 127 to 15 */
}

/*
 * ss_float_of_float8() is exact; 'byte' is not NaN. Shifted by 7 its bits are those of a float16 whose exponent's bias
 * is 15 instead of 7.
 */
static inline float ss_float_of_float8(uint8_t byte) {
    return ss_float_of_float16((uint16_t)((byte & 0x80) << 8 | (byte & 0x7F) << 7)) * 0x1p8f;
}

#define SS_FLOAT8_MAX 448.0f
#define SS_FLOAT8_NORMAL_MIN 0x1p-6f
#define SS_FLOAT8_STEPS 0x1p14f /* added to a number under 2^-6, leaves its mantissa in steps of 2^-9, rounded */

/* ss_float8_of_float() rounds to nearest even and saturates at 448; 'value' is not NaN. */
static inline uint8_t ss_float8_of_float(float value) {
    uint32_t sign = ss_bits_of_float(value) >> 24 & 0x80;
    float magnitude = ss_float_of_bits(ss_bits_of_float(value) & 0x7FFFFFFF);
    uint32_t bits;

    magnitude = magnitude > SS_FLOAT8_MAX ? SS_FLOAT8_MAX : magnitude;
    bits = ss_bits_of_float(magnitude);
    if (magnitude < SS_FLOAT8_NORMAL_MIN) {
        return (uint8_t)(sign | (ss_bits_of_float(magnitude + SS_FLOAT8_STEPS) - ss_bits_of_float(SS_FLOAT8_STEPS)));
    }
    bits += 0x7FFFF + (bits >> 20 & 1);
    return (uint8_t)(sign | (bits - 0x3C000000) >> 20); /* the exponent's bias goes from 127 to 7 */
}

static inline int8_t ss_symbol(float value, float inverse, int limit) {
    int symbol = (int)lrintf(value * inverse);
    return (int8_t)(symbol > limit ? limit : symbol < -limit ? -limit : symbol);
}

static inline uint16_t ss_rotate_left16(uint16_t value) {
    return (uint16_t)(value << 1 | value >> 15);
}

static inline uint16_t ss_rotate_right16(uint16_t value) {
    return (uint16_t)(value >> 1 | value << 15);
}

/* SS_UNBIN_BATCH() defines an unbin[] member from a function for one vector. */
#define SS_UNBIN_BATCH(attributes, name, vector_function, element_size)                                                \
    attributes static void name(const int8_t *symbols, const uint8_t *scales, size_t vectors, size_t vector_length,    \
                                uint8_t *target) {                                                                     \
        for (size_t vector = 0; vector < vectors; vector++) {                                                          \
            vector_function(symbols, vector_length, ss_float_of_bits(ss_load32(scales, vector)), target);              \
            symbols += vector_length;                                                                                  \
            target += vector_length * (element_size);                                                                  \
        }                                                                                                              \
    }

#endif /* SS_QUANTIZE_H */
