/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quantize_neon.c - the kernels with Advanced SIMD, as every AArch64 CPU has it. The scalar arithmetic finishes the
 * vectors.
 */
#include "quantize_scalar.h"

#ifdef SS_ARCH_AARCH64
#include <arm_neon.h>

/* Loads and stores of bytes, reinterpreted: elements may be unaligned. */
static inline uint16x8_t load16x8(const void *source, size_t index) {
    return vreinterpretq_u16_u8(vld1q_u8((const uint8_t *)source + 2 * index));
}

static inline uint32x4_t load32x4(const void *source, size_t index) {
    return vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)source + 4 * index));
}

static inline void store16x8(void *target, size_t index, uint16x8_t value) {
    vst1q_u8((uint8_t *)target + 2 * index, vreinterpretq_u8_u16(value));
}

static inline void store32x4(void *target, size_t index, uint32x4_t value) {
    vst1q_u8((uint8_t *)target + 4 * index, vreinterpretq_u8_u32(value));
}

/* ---- Binned: quantize ---------------------------------------------------------------------------------------- */

static uint32_t magnitude_max8(const void *source, size_t count) {
    const uint8x16_t magnitude = vdupq_n_u8(0x7F);
    uint8x16_t most = vdupq_n_u8(0);
    size_t index = 0;

    for (; index + 16 <= count; index += 16)
        most = vmaxq_u8(most, vandq_u8(vld1q_u8((const uint8_t *)source + index), magnitude));
    return ss_magnitude_max8_from(index, source, count, vmaxvq_u8(most));
}

static uint32_t magnitude_max16(const void *source, size_t count) {
    const uint16x8_t magnitude = vdupq_n_u16(0x7FFF);
    uint16x8_t most = vdupq_n_u16(0);
    size_t index = 0;

    for (; index + 8 <= count; index += 8)
        most = vmaxq_u16(most, vandq_u16(load16x8(source, index), magnitude));
    return ss_magnitude_max16_from(index, source, count, vmaxvq_u16(most));
}

static uint32_t magnitude_max32(const void *source, size_t count) {
    const uint32x4_t magnitude = vdupq_n_u32(0x7FFFFFFF);
    uint32x4_t most = vdupq_n_u32(0);
    size_t index = 0;

    for (; index + 4 <= count; index += 4)
        most = vmaxq_u32(most, vandq_u32(load32x4(source, index), magnitude));
    return ss_magnitude_max32_from(index, source, count, vmaxvq_u32(most));
}

/* symbols_of() scales, rounds and clamps eight values to eight symbols. */
static inline int8x8_t symbols_of(float32x4_t low, float32x4_t high, float inverse, int limit) {
    int32x4_t low_symbols = vcvtnq_s32_f32(vmulq_n_f32(low, inverse));
    int32x4_t high_symbols = vcvtnq_s32_f32(vmulq_n_f32(high, inverse));
    int16x8_t symbols = vcombine_s16(vqmovn_s32(low_symbols), vqmovn_s32(high_symbols));
    symbols = vminq_s16(symbols, vdupq_n_s16((int16_t)limit));
    symbols = vmaxq_s16(symbols, vdupq_n_s16((int16_t)-limit));
    return vmovn_s16(symbols);
}

static void bin_float8(const void *source, size_t count, float inverse, int limit, int8_t *symbols) {
    size_t index = 0;

    for (; index + 8 <= count; index += 8) { /* as ss_float_of_float8() */
        uint16x8_t words = vmovl_u8(vld1_u8((const uint8_t *)source + index));
        uint16x8_t sign = vshlq_n_u16(vshrq_n_u16(words, 7), 15);
        float16x8_t halves = vreinterpretq_f16_u16(vorrq_u16(sign, vshrq_n_u16(vshlq_n_u16(words, 9), 2)));
        float32x4_t low = vmulq_n_f32(vcvt_f32_f16(vget_low_f16(halves)), 0x1p8f);
        float32x4_t high = vmulq_n_f32(vcvt_f32_f16(vget_high_f16(halves)), 0x1p8f);
        vst1_s8(symbols + index, symbols_of(low, high, inverse, limit));
    }
    ss_bin_float8_from(index, source, count, inverse, limit, symbols);
}

static void bin_float16(const void *source, size_t count, float inverse, int limit, int8_t *symbols) {
    size_t index = 0;

    for (; index + 8 <= count; index += 8) {
        float16x8_t halves = vreinterpretq_f16_u16(load16x8(source, index));
        float32x4_t low = vcvt_f32_f16(vget_low_f16(halves));
        float32x4_t high = vcvt_f32_f16(vget_high_f16(halves));
        vst1_s8(symbols + index, symbols_of(low, high, inverse, limit));
    }
    ss_bin_float16_from(index, source, count, inverse, limit, symbols);
}

static void bin_bfloat16(const void *source, size_t count, float inverse, int limit, int8_t *symbols) {
    size_t index = 0;

    for (; index + 8 <= count; index += 8) {
        uint16x8_t halves = load16x8(source, index);
        float32x4_t low = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16));
        float32x4_t high = vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(halves), 16));
        vst1_s8(symbols + index, symbols_of(low, high, inverse, limit));
    }
    ss_bin_bfloat16_from(index, source, count, inverse, limit, symbols);
}

static void bin_float32(const void *source, size_t count, float inverse, int limit, int8_t *symbols) {
    size_t index = 0;

    for (; index + 8 <= count; index += 8) {
        float32x4_t low = vreinterpretq_f32_u32(load32x4(source, index));
        float32x4_t high = vreinterpretq_f32_u32(load32x4(source, index + 4));
        vst1_s8(symbols + index, symbols_of(low, high, inverse, limit));
    }
    ss_bin_float32_from(index, source, count, inverse, limit, symbols);
}

/* ---- Binned: dequantize -------------------------------------------------------------------------------------- */

/* values_of() scales the eight symbols at 'symbols'. */
static inline float32x4x2_t values_of(const int8_t *symbols, float scale) {
    int16x8_t words = vmovl_s8(vld1_s8(symbols));
    float32x4x2_t values = {{vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))), scale),
                             vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(words))), scale)}};
    return values;
}

static inline uint16x4_t bfloat16_round(float32x4_t values) {
    uint32x4_t bits = vreinterpretq_u32_f32(values);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vshrn_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd), 16);
}

/* float8_round() leaves the float8 of ss_float8_of_float() in the lower byte of each lane. */
static inline uint16x4_t float8_round(float32x4_t values) {
    const float32x4_t steps = vdupq_n_f32(SS_FLOAT8_STEPS);
    uint32x4_t sign = vshlq_n_u32(vshrq_n_u32(vreinterpretq_u32_f32(values), 31), 7);
    float32x4_t magnitude = vminq_f32(vabsq_f32(values), vdupq_n_f32(SS_FLOAT8_MAX));
    uint32x4_t small = vcltq_f32(magnitude, vdupq_n_f32(SS_FLOAT8_NORMAL_MIN));
    uint32x4_t bits = vreinterpretq_u32_f32(magnitude);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 20), vdupq_n_u32(1));
    uint32x4_t normal = vaddq_u32(vsubq_u32(bits, vdupq_n_u32(0x3C000000 - 0x7FFFF)), odd);
    uint32x4_t subnormal = vsubq_u32(vreinterpretq_u32_f32(vaddq_f32(magnitude, steps)), vreinterpretq_u32_f32(steps));
    return vmovn_u32(vorrq_u32(sign, vbslq_u32(small, subnormal, vshrq_n_u32(normal, 20))));
}

static inline void unbin_float8_vector(const int8_t *symbols, size_t count, float scale, void *target) {
    size_t index = 0;

    for (; index + 8 <= count; index += 8) {
        float32x4x2_t values = values_of(symbols + index, scale);
        uint16x8_t words = vcombine_u16(float8_round(values.val[0]), float8_round(values.val[1]));
        vst1_u8((uint8_t *)target + index, vmovn_u16(words));
    }
    ss_unbin_float8_from(index, symbols, count, scale, target);
}

static inline void unbin_bfloat16_vector(const int8_t *symbols, size_t count, float scale, void *target) {
    size_t index = 0;

    for (; index + 8 <= count; index += 8) {
        float32x4x2_t values = values_of(symbols + index, scale);
        store16x8(target, index, vcombine_u16(bfloat16_round(values.val[0]), bfloat16_round(values.val[1])));
    }
    ss_unbin_bfloat16_from(index, symbols, count, scale, target);
}

static inline void unbin_float16_vector(const int8_t *symbols, size_t count, float scale, void *target) {
    size_t index = 0;

    for (; index + 8 <= count; index += 8) {
        float32x4x2_t values = values_of(symbols + index, scale);
        float16x8_t halves = vcombine_f16(vcvt_f16_f32(values.val[0]), vcvt_f16_f32(values.val[1]));
        store16x8(target, index, vreinterpretq_u16_f16(halves));
    }
    ss_unbin_float16_from(index, symbols, count, scale, target);
}

static inline void unbin_float32_vector(const int8_t *symbols, size_t count, float scale, void *target) {
    size_t index = 0;

    for (; index + 8 <= count; index += 8) {
        float32x4x2_t values = values_of(symbols + index, scale);
        store32x4(target, index, vreinterpretq_u32_f32(values.val[0]));
        store32x4(target, index + 4, vreinterpretq_u32_f32(values.val[1]));
    }
    ss_unbin_float32_from(index, symbols, count, scale, target);
}

SS_UNBIN_BATCH(, unbin_float8, unbin_float8_vector, 1)
SS_UNBIN_BATCH(, unbin_float16, unbin_float16_vector, 2)
SS_UNBIN_BATCH(, unbin_bfloat16, unbin_bfloat16_vector, 2)
SS_UNBIN_BATCH(, unbin_float32, unbin_float32_vector, 4)

/* ---- Lossless ------------------------------------------------------------------------------------------------ */

static void planes_split16(const void *source, size_t count, uint8_t *planes, size_t stride) {
    size_t index = 0;

    for (; index + 8 <= count; index += 8) {
        uint16x8_t value = load16x8(source, index);
        value = vorrq_u16(vshlq_n_u16(value, 1), vshrq_n_u16(value, 15));
        vst1_u8(planes + index, vshrn_n_u16(value, 8));
        vst1_u8(planes + stride + index, vmovn_u16(value));
    }
    ss_planes_split16_from(index, source, count, planes, stride);
}

static void planes_merge16(const uint8_t *planes, size_t stride, size_t count, void *target) {
    size_t index = 0;

    for (; index + 8 <= count; index += 8) {
        uint16x8_t high = vshll_n_u8(vld1_u8(planes + index), 8);
        uint16x8_t value = vorrq_u16(high, vmovl_u8(vld1_u8(planes + stride + index)));
        store16x8(target, index, vorrq_u16(vshrq_n_u16(value, 1), vshlq_n_u16(value, 15)));
    }
    ss_planes_merge16_from(index, planes, stride, count, target);
}

static void planes_split32(const void *source, size_t count, uint8_t *planes, size_t stride) {
    size_t index = 0;

    for (; index + 8 <= count; index += 8) {
        uint32x4_t a = load32x4(source, index), b = load32x4(source, index + 4);
        uint16x8_t upper, lower;
        a = vorrq_u32(vshlq_n_u32(a, 1), vshrq_n_u32(a, 31));
        b = vorrq_u32(vshlq_n_u32(b, 1), vshrq_n_u32(b, 31));
        upper = vcombine_u16(vshrn_n_u32(a, 16), vshrn_n_u32(b, 16));
        lower = vcombine_u16(vmovn_u32(a), vmovn_u32(b));
        vst1_u8(planes + index, vshrn_n_u16(upper, 8));
        vst1_u8(planes + stride + index, vmovn_u16(upper));
        vst1_u8(planes + 2 * stride + index, vshrn_n_u16(lower, 8));
        vst1_u8(planes + 3 * stride + index, vmovn_u16(lower));
    }
    ss_planes_split32_from(index, source, count, planes, stride);
}

static inline uint32x4_t rotate_right32(uint32x4_t value) {
    return vorrq_u32(vshrq_n_u32(value, 1), vshlq_n_u32(value, 31));
}

static void planes_merge32(const uint8_t *planes, size_t stride, size_t count, void *target) {
    size_t index = 0;

    for (; index + 8 <= count; index += 8) {
        const uint8_t *plane = planes + index;
        uint16x8_t upper = vorrq_u16(vshll_n_u8(vld1_u8(plane), 8), vmovl_u8(vld1_u8(plane + stride)));
        uint16x8_t lower = vorrq_u16(vshll_n_u8(vld1_u8(plane + 2 * stride), 8), vmovl_u8(vld1_u8(plane + 3 * stride)));
        uint32x4_t first = vreinterpretq_u32_u16(vzip1q_u16(lower, upper));
        uint32x4_t second = vreinterpretq_u32_u16(vzip2q_u16(lower, upper));
        store32x4(target, index, rotate_right32(first));
        store32x4(target, index + 4, rotate_right32(second));
    }
    ss_planes_merge32_from(index, planes, stride, count, target);
}

static void planes_split8(const void *source, size_t count, uint8_t *planes, size_t stride) {
    ss_quantize_kernels_scalar.planes_split[SS_DTYPE_UINT8](source, count, planes, stride);
}

static void planes_merge8(const uint8_t *planes, size_t stride, size_t count, void *target) {
    ss_quantize_kernels_scalar.planes_merge[SS_DTYPE_UINT8](planes, stride, count, target);
}

const struct ss_quantize_kernels ss_quantize_kernels_neon = {
    .magnitude_max = {[SS_DTYPE_FLOAT16] = magnitude_max16,
                      [SS_DTYPE_BFLOAT16] = magnitude_max16,
                      [SS_DTYPE_FLOAT32] = magnitude_max32,
                      [SS_DTYPE_FLOAT8_E4M3] = magnitude_max8},
    .bin = {[SS_DTYPE_FLOAT16] = bin_float16,
            [SS_DTYPE_BFLOAT16] = bin_bfloat16,
            [SS_DTYPE_FLOAT32] = bin_float32,
            [SS_DTYPE_FLOAT8_E4M3] = bin_float8},
    .unbin = {[SS_DTYPE_FLOAT16] = unbin_float16,
              [SS_DTYPE_BFLOAT16] = unbin_bfloat16,
              [SS_DTYPE_FLOAT32] = unbin_float32,
              [SS_DTYPE_FLOAT8_E4M3] = unbin_float8},
    .planes_split = {[SS_DTYPE_UINT8] = planes_split8,
                     [SS_DTYPE_FLOAT16] = planes_split16,
                     [SS_DTYPE_BFLOAT16] = planes_split16,
                     [SS_DTYPE_FLOAT32] = planes_split32,
                     [SS_DTYPE_FLOAT8_E4M3] = planes_split8},
    .planes_merge = {[SS_DTYPE_UINT8] = planes_merge8,
                     [SS_DTYPE_FLOAT16] = planes_merge16,
                     [SS_DTYPE_BFLOAT16] = planes_merge16,
                     [SS_DTYPE_FLOAT32] = planes_merge32,
                     [SS_DTYPE_FLOAT8_E4M3] = planes_merge8},
};
#else
typedef int ss_quantize_neon_unused; /* ISO C wants a declaration in every file */
#endif
