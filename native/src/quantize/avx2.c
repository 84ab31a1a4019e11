/* SPDX-License-Identifier: Apache-2.0 */
/* avx2.c - the kernels with AVX2, F16C and FMA. The scalar arithmetic finishes the vectors. */
#include "quantize/weighted.h"

#include <immintrin.h>

#define TARGET __attribute__((target("avx2,f16c,fma")))
#define TARGET_INLINE TARGET static inline __attribute__((always_inline))
#define ROUND (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

TARGET_INLINE __m256i load256(const void *source) {
    return _mm256_loadu_si256(source);
}

/* ---- What kernel_template.h asks for ------------------------------------------------------------------------- */

#define VECTOR_BYTES 32
#define VECTOR(bits) __m256i
#define ZERO(bits) _mm256_setzero_si256()
#define MAX(bits, a, b) _mm256_max_epu##bits(a, b)
#define MAGNITUDES(bits, source) _mm256_and_si256(load256(source), _mm256_set1_epi##bits(INT##bits##_MAX))

#define MAGNITUDES_REDUCE(bits)                                                                                        \
    TARGET_INLINE uint32_t magnitudes_reduce##bits(__m256i most) {                                                     \
        uint##bits##_t lanes[256 / (bits)];                                                                            \
        _mm256_storeu_si256((__m256i *)lanes, most);                                                                   \
        return ss_magnitude_max##bits##_from(0, lanes, 256 / (bits), 0);                                               \
    }

MAGNITUDES_REDUCE(8)
MAGNITUDES_REDUCE(16)
MAGNITUDES_REDUCE(32)

struct floats {
    __m256 low, high;
};

/* symbols_pack() packs sixteen 32-bit symbols. */
TARGET_INLINE __m128i symbols_pack(__m256i low, __m256i high) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
    return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

/* symbols_of() scales, rounds and clamps eight values to eight 32-bit symbols. */
TARGET_INLINE __m256i symbols_of(__m256 values, __m256 inverse, __m256i limit) {
    __m256i symbols = _mm256_cvtps_epi32(_mm256_round_ps(_mm256_mul_ps(values, inverse), ROUND));
    symbols = _mm256_min_epi32(symbols, limit);
    return _mm256_max_epi32(symbols, _mm256_sub_epi32(_mm256_setzero_si256(), limit));
}

TARGET_INLINE void symbols_store(struct floats numbers, float inverse, int limit, int8_t *symbols) {
    const __m256 inverses = _mm256_set1_ps(inverse);
    const __m256i limits = _mm256_set1_epi32(limit);
    __m256i low = symbols_of(numbers.low, inverses, limits), high = symbols_of(numbers.high, inverses, limits);
    _mm_storeu_si128((__m128i *)symbols, symbols_pack(low, high));
}

/* float8_widen() makes eight floats of the eight float8 at 'elements', as ss_float_of_float8() does. */
TARGET_INLINE __m256 float8_widen(const uint8_t *elements) {
    __m128i words = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)elements));
    __m128i sign = _mm_slli_epi16(_mm_srli_epi16(words, 7), 15);
    __m128i magnitude = _mm_srli_epi16(_mm_slli_epi16(words, 9), 2);
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(sign, magnitude)), _mm256_set1_ps(0x1p8f));
}

#define WIDEN_FLOAT8(at) float8_widen(source + (at))
#define WIDEN_FLOAT16(at) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(source + 2 * (at))))
#define WIDEN_BFLOAT16(at)                                                                                             \
    _mm256_castsi256_ps(                                                                                               \
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(source + 2 * (at)))), 16))
#define WIDEN_FLOAT32(at) _mm256_loadu_ps((const float *)(const void *)(source + 4 * (at)))
#define WIDEN(dtype, EIGHT)                                                                                            \
    TARGET_INLINE struct floats widen_##dtype(const uint8_t *source) { return (struct floats){EIGHT(0), EIGHT(8)}; }

WIDEN(float8, WIDEN_FLOAT8)
WIDEN(float16, WIDEN_FLOAT16)
WIDEN(bfloat16, WIDEN_BFLOAT16)
WIDEN(float32, WIDEN_FLOAT32)

enum { PLANES_STEP16 = 32, PLANES_STEP32 = 16 };

TARGET_INLINE void split16_step(const uint8_t *source, uint8_t *planes, size_t stride) {
    const __m256i low_bytes = _mm256_set1_epi16(0xFF);
    __m256i a = load256(source), b = load256(source + 32);
    __m256i high, low;
    a = _mm256_or_si256(_mm256_slli_epi16(a, 1), _mm256_srli_epi16(a, 15));
    b = _mm256_or_si256(_mm256_slli_epi16(b, 1), _mm256_srli_epi16(b, 15));
    high = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
    low = _mm256_packus_epi16(_mm256_and_si256(a, low_bytes), _mm256_and_si256(b, low_bytes));
    _mm256_storeu_si256((__m256i *)planes, _mm256_permute4x64_epi64(high, 0xD8));
    _mm256_storeu_si256((__m256i *)(planes + stride), _mm256_permute4x64_epi64(low, 0xD8));
}

/* half_store() stores 32 bytes: past the caches where 'streamed', for which 'target' has to be aligned. */
TARGET_INLINE void half_store(void *target, __m256i half, int streamed) {
    if (streamed) {
        _mm256_stream_si256(target, half);
    } else {
        _mm256_storeu_si256(target, half);
    }
}

/* is_half() returns whether 'target' is aligned for that. */
TARGET_INLINE int is_half(const void *target) {
    return (uintptr_t)target % 32 == 0;
}

TARGET_INLINE __m256i rotate_right16(__m256i value) {
    return _mm256_or_si256(_mm256_srli_epi16(value, 1), _mm256_slli_epi16(value, 15));
}

TARGET_INLINE void merge16_step(const uint8_t *planes, size_t stride, uint8_t *target, int streamed) {
    /* Unpacking works inside 128-bit lanes, so the quarters are put where it takes them from first. */
    __m256i high = _mm256_permute4x64_epi64(load256(planes), 0xD8);
    __m256i low = _mm256_permute4x64_epi64(load256(planes + stride), 0xD8);
    half_store(target, rotate_right16(_mm256_unpacklo_epi8(low, high)), streamed);
    half_store(target + 32, rotate_right16(_mm256_unpackhi_epi8(low, high)), streamed);
}

/* plane_store() writes byte 'shift' / 8 of each of 16 lanes. */
TARGET_INLINE void plane_store(uint8_t *plane, __m256i a, __m256i b, int shift) {
    const __m256i low_byte = _mm256_set1_epi32(0xFF);
    const __m128i shifts = _mm_cvtsi32_si128(shift);
    __m256i words = _mm256_packus_epi32(_mm256_and_si256(_mm256_srl_epi32(a, shifts), low_byte),
                                        _mm256_and_si256(_mm256_srl_epi32(b, shifts), low_byte));
    words = _mm256_permute4x64_epi64(words, 0xD8);
    _mm_storeu_si128((__m128i *)plane,
                     _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

TARGET_INLINE void split32_step(const uint8_t *source, uint8_t *planes, size_t stride) {
    __m256i a = load256(source), b = load256(source + 32);
    a = _mm256_or_si256(_mm256_slli_epi32(a, 1), _mm256_srli_epi32(a, 31));
    b = _mm256_or_si256(_mm256_slli_epi32(b, 1), _mm256_srli_epi32(b, 31));
    for (size_t plane = 0; plane < 4; plane++) {
        plane_store(planes + plane * stride, a, b, 24 - 8 * (int)plane);
    }
}

TARGET_INLINE void merge32_step(const uint8_t *planes, size_t stride, uint8_t *target, int streamed) {
    __m128i byte3 = _mm_loadu_si128((const __m128i *)planes);
    __m128i byte2 = _mm_loadu_si128((const __m128i *)(planes + stride));
    __m128i byte1 = _mm_loadu_si128((const __m128i *)(planes + 2 * stride));
    __m128i byte0 = _mm_loadu_si128((const __m128i *)(planes + 3 * stride));
    __m128i lower[2] = {_mm_unpacklo_epi8(byte0, byte1), _mm_unpackhi_epi8(byte0, byte1)};
    __m128i upper[2] = {_mm_unpacklo_epi8(byte2, byte3), _mm_unpackhi_epi8(byte2, byte3)};
    for (int half = 0; half < 2; half++) {
        __m128i first = _mm_unpacklo_epi16(lower[half], upper[half]);
        __m128i second = _mm_unpackhi_epi16(lower[half], upper[half]);
        __m256i value = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
        value = _mm256_or_si256(_mm256_srli_epi32(value, 1), _mm256_slli_epi32(value, 31));
        half_store(target + 32 * half, value, streamed);
    }
}

#include "quantize/kernel_template.h"

PLANES_MERGE(16, planes_merge16_past_caches, 1)

TARGET static void planes_merge16_streamed(const uint8_t *planes, size_t stride, size_t count, void *target) {
    if (is_half(target)) {
        planes_merge16_past_caches(planes, stride, count, target);
    } else {
        planes_merge16(planes, stride, count, target);
    }
}

/* ---- Binned: dequantize -------------------------------------------------------------------------------------- */

/* values_of() scales the eight symbols at 'symbols'. */
TARGET_INLINE __m256 values_of(const int8_t *symbols, __m256 scale) {
    __m256i words = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)symbols));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(words), scale);
}

/* bfloat16_round() leaves the rounded bfloat16 in the lower half of each lane, the upper half zero. */
TARGET_INLINE __m256i bfloat16_round(__m256 values) {
    __m256i bits = _mm256_castps_si256(values);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    return _mm256_srli_epi32(bits, 16);
}

/* float8_round() leaves the float8 of ss_float8_of_float() in the lowest byte of each lane, the others zero. */
TARGET_INLINE __m256i float8_round(__m256 values) {
    const __m256 steps = _mm256_set1_ps(SS_FLOAT8_STEPS);
    __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(_mm256_castps_si256(values), 31), 7);
    __m256 magnitude = _mm256_min_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), values), _mm256_set1_ps(SS_FLOAT8_MAX));
    __m256 small = _mm256_cmp_ps(magnitude, _mm256_set1_ps(SS_FLOAT8_NORMAL_MIN), _CMP_LT_OQ);
    __m256i bits = _mm256_castps_si256(magnitude);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), _mm256_set1_epi32(1));
    __m256i normal = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFFF - 0x3C000000)), odd);
    __m256i subnormal =
        _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(magnitude, steps)), _mm256_castps_si256(steps));
    normal = _mm256_srli_epi32(normal, 20);
    return _mm256_or_si256(sign, _mm256_blendv_epi8(normal, subnormal, _mm256_castps_si256(small)));
}

TARGET static inline void unbin_float8_vector(const int8_t *symbols, size_t count, float scale, void *target) {
    const __m256 scales = _mm256_set1_ps(scale);
    size_t index = 0;

    for (; index + 16 <= count; index += 16) {
        __m256i low = float8_round(values_of(symbols + index, scales));
        __m256i high = float8_round(values_of(symbols + index + 8, scales));
        __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
        __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128((__m128i *)((uint8_t *)target + index), packed);
    }
    ss_unbin_float8_from(index, symbols, count, scale, target);
}

TARGET_INLINE void unbin_bfloat16_to(const int8_t *symbols, size_t count, float scale, void *target, int streamed) {
    const __m256 scales = _mm256_set1_ps(scale);
    size_t index = 0;

    for (; index + 16 <= count; index += 16) {
        __m256i low = bfloat16_round(values_of(symbols + index, scales));
        __m256i high = bfloat16_round(values_of(symbols + index + 8, scales));
        __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
        half_store((uint16_t *)target + index, packed, streamed);
    }
    ss_unbin_bfloat16_from(index, symbols, count, scale, target);
}

TARGET_INLINE void unbin_float16_to(const int8_t *symbols, size_t count, float scale, void *target, int streamed) {
    const __m256 scales = _mm256_set1_ps(scale);
    size_t index = 0;

    for (; index + 16 <= count; index += 16) {
        __m128i low = _mm256_cvtps_ph(values_of(symbols + index, scales), ROUND);
        __m128i high = _mm256_cvtps_ph(values_of(symbols + index + 8, scales), ROUND);
        half_store((uint16_t *)target + index, _mm256_set_m128i(high, low), streamed);
    }
    ss_unbin_float16_from(index, symbols, count, scale, target);
}

#define UNBIN_VECTOR(name)                                                                                             \
    TARGET static inline void name##_vector(const int8_t *symbols, size_t count, float scale, void *target) {          \
        name##_to(symbols, count, scale, target, 0);                                                                   \
    }                                                                                                                  \
                                                                                                                       \
    TARGET static inline void name##_vector_streamed(const int8_t *symbols, size_t count, float scale, void *target) { \
        if (is_half(target))                                                                                           \
            name##_to(symbols, count, scale, target, 1);                                                               \
        else                                                                                                           \
            name##_to(symbols, count, scale, target, 0);                                                               \
    }

UNBIN_VECTOR(unbin_bfloat16)
UNBIN_VECTOR(unbin_float16)

TARGET static inline void unbin_float32_vector(const int8_t *symbols, size_t count, float scale, void *target) {
    const __m256 scales = _mm256_set1_ps(scale);
    size_t index = 0;

    for (; index + 8 <= count; index += 8) {
        _mm256_storeu_ps((float *)target + index, values_of(symbols + index, scales));
    }
    ss_unbin_float32_from(index, symbols, count, scale, target);
}

SS_UNBIN_BATCH(TARGET, unbin_float8, unbin_float8_vector, 1)
SS_UNBIN_BATCH(TARGET, unbin_float16, unbin_float16_vector, 2)
SS_UNBIN_BATCH(TARGET, unbin_bfloat16, unbin_bfloat16_vector, 2)
SS_UNBIN_BATCH(TARGET, unbin_float32, unbin_float32_vector, 4)
SS_UNBIN_BATCH(TARGET, unbin_float16_streamed, unbin_float16_vector_streamed, 2)
SS_UNBIN_BATCH(TARGET, unbin_bfloat16_streamed, unbin_bfloat16_vector_streamed, 2)

/* ---- Weighted: what weighted_template.h asks for ------------------------------------------------------------- */

#define NUMBERS struct floats

TARGET_INLINE struct floats numbers_load(const float *source) {
    return (struct floats){_mm256_loadu_ps(source), _mm256_loadu_ps(source + 8)};
}

TARGET_INLINE struct floats numbers_of(const int8_t *symbols) {
    const __m256i bits = _mm256_set1_epi32(SS_NUMBER_BITS);
    const __m256i order = _mm256_setr_epi32(0x80800080, 0x80800180, 0x80800280, 0x80800380, 0x80800480, 0x80800580,
                                            0x80800680, 0x80800780);
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)symbols));
    const __m256i low = _mm256_shuffle_epi8(both, order);
    const __m256i high = _mm256_shuffle_epi8(both, _mm256_add_epi32(order, _mm256_set1_epi32(0x0800)));
    return (struct floats){_mm256_castsi256_ps(_mm256_xor_si256(low, bits)),
                           _mm256_castsi256_ps(_mm256_xor_si256(high, bits))};
}

TARGET_INLINE struct floats numbers_multiply(struct floats a, struct floats b) {
    return (struct floats){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}

TARGET_INLINE struct floats numbers_add_product(struct floats sum, struct floats a, struct floats b) {
    return (struct floats){_mm256_fmadd_ps(a.low, b.low, sum.low), _mm256_fmadd_ps(a.high, b.high, sum.high)};
}

TARGET_INLINE struct floats numbers_subtract_product(struct floats sum, struct floats a, struct floats b) {
    return (struct floats){_mm256_fnmadd_ps(a.low, b.low, sum.low), _mm256_fnmadd_ps(a.high, b.high, sum.high)};
}

/* half_symbols() makes 32-bit symbols, and sets lanes of '*outside' where there are none. */
TARGET_INLINE __m256i half_symbols(__m256 values, __m256 steps, __m256 centres, __m256 most, __m256 *outside) {
    const __m256 sign = _mm256_set1_ps(-0.0f), limit = _mm256_set1_ps(SS_WEIGHTED_LIMIT);
    __m256 numbers = _mm256_div_ps(_mm256_sub_ps(values, centres), steps);
    __m256 far = _mm256_cmp_ps(_mm256_andnot_ps(sign, numbers), limit, _CMP_NLE_UQ);
    __m256 large = _mm256_cmp_ps(_mm256_add_ps(_mm256_andnot_ps(sign, values), steps), most, _CMP_NLE_UQ);
    *outside = _mm256_or_ps(*outside, _mm256_or_ps(far, large));
    return _mm256_cvtps_epi32(numbers);
}

TARGET_INLINE int numbers_symbols(struct floats values, struct floats steps, struct floats centres, float most,
                                  int8_t *symbols) {
    __m256 outside = _mm256_setzero_ps();
    __m256i low = half_symbols(values.low, steps.low, centres.low, _mm256_set1_ps(most), &outside);
    __m256i high = half_symbols(values.high, steps.high, centres.high, _mm256_set1_ps(most), &outside);
    _mm_storeu_si128((__m128i *)symbols, symbols_pack(low, high));
    return _mm256_movemask_ps(outside);
}

TARGET_INLINE void round_float16(uint8_t *target, struct floats values, int streamed) {
    __m128i low = _mm256_cvtps_ph(values.low, ROUND), high = _mm256_cvtps_ph(values.high, ROUND);
    half_store(target, _mm256_set_m128i(high, low), streamed);
}

TARGET_INLINE void round_bfloat16(uint8_t *target, struct floats values, int streamed) {
    __m256i low = _mm256_srli_epi32(_mm256_castps_si256(values.low), 16);
    __m256i high = _mm256_srli_epi32(_mm256_castps_si256(values.high), 16);
    half_store(target, _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8), streamed);
}

TARGET_INLINE void round_float32(uint8_t *target, struct floats values, int streamed) {
    half_store(target, _mm256_castps_si256(values.low), streamed);
    half_store(target + 32, _mm256_castps_si256(values.high), streamed);
}

#include "quantize/weighted_template.h"

const struct ss_quantize_kernels ss_quantize_kernels_avx2 = {
    SS_QUANTIZE_KERNELS,
    .unbin_streamed = {[SS_DTYPE_FLOAT16] = unbin_float16_streamed, [SS_DTYPE_BFLOAT16] = unbin_bfloat16_streamed},
    .planes_merge_streamed =
        {[SS_DTYPE_FLOAT16] = planes_merge16_streamed, [SS_DTYPE_BFLOAT16] = planes_merge16_streamed},
};
