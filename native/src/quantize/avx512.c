/* SPDX-License-Identifier: Apache-2.0 */
/* avx512.c - the kernels with AVX-512 F, BW and VL. Masks finish what is dequantized, the scalar arithmetic the rest.
 */
#include "quantize/weighted.h"

#include "quantize/avx512.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx2,f16c,fma")))
#define TARGET_INLINE TARGET static inline __attribute__((always_inline))
#define ROUND (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

/* mask_of() selects the first 'count' lanes; 'count' is at most 31. */
TARGET_INLINE uint32_t mask_of(size_t count) {
    return (1u << count) - 1;
}

/* ---- What kernel_template.h asks for ------------------------------------------------------------------------- */

#define VECTOR_BYTES 64
#define VECTOR(bits) __m512i
#define ZERO(bits) _mm512_setzero_si512()
#define MAX(bits, a, b) _mm512_max_epu##bits(a, b)
#define MAGNITUDES(bits, source) _mm512_and_si512(_mm512_loadu_si512(source), _mm512_set1_epi##bits(INT##bits##_MAX))

TARGET_INLINE uint32_t magnitudes_reduce32(__m512i most) {
    return (uint32_t)_mm512_reduce_max_epu32(most);
}

TARGET_INLINE uint32_t magnitudes_reduce16(__m512i most) {
    __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
    return magnitudes_reduce32(_mm512_cvtepu16_epi32(half));
}

TARGET_INLINE uint32_t magnitudes_reduce8(__m512i most) {
    __m256i half = _mm256_max_epu8(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
    return magnitudes_reduce16(_mm512_cvtepu8_epi16(half));
}

/* symbols_of() scales, rounds and clamps 16 values to 16 symbols. */
TARGET_INLINE __m128i symbols_of(__m512 values, __m512 inverse, __m512i limit) {
    __m512i symbols = _mm512_cvt_roundps_epi32(_mm512_mul_ps(values, inverse), ROUND);
    symbols = _mm512_min_epi32(symbols, limit);
    symbols = _mm512_max_epi32(symbols, _mm512_sub_epi32(_mm512_setzero_si512(), limit));
    return _mm512_cvtepi32_epi8(symbols);
}

TARGET_INLINE void symbols_store(__m512 values, float inverse, int limit, int8_t *symbols) {
    __m128i packed = symbols_of(values, _mm512_set1_ps(inverse), _mm512_set1_epi32(limit));
    _mm_storeu_si128((__m128i *)symbols, packed);
}

/* float8_widen() makes 16 floats of 16 float8, as ss_float_of_float8() does. */
TARGET_INLINE __m512 float8_widen(__m128i bytes) {
    __m256i words = _mm256_cvtepu8_epi16(bytes);
    __m256i sign = _mm256_slli_epi16(_mm256_srli_epi16(words, 7), 15);
    __m256i magnitude = _mm256_srli_epi16(_mm256_slli_epi16(words, 9), 2);
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, magnitude)), _mm512_set1_ps(0x1p8f));
}

TARGET_INLINE __m512 widen_float8(const uint8_t *source) {
    return float8_widen(_mm_loadu_si128((const __m128i *)source));
}

TARGET_INLINE __m512 widen_float16(const uint8_t *source) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)source));
}

TARGET_INLINE __m512 widen_bfloat16(const uint8_t *source) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)source));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

TARGET_INLINE __m512 widen_float32(const uint8_t *source) {
    return _mm512_loadu_ps(source);
}

enum { PLANES_STEP16 = 32, PLANES_STEP32 = 16 };

TARGET_INLINE void split16_step(const uint8_t *source, uint8_t *planes, size_t stride) {
    __m512i value = _mm512_loadu_si512(source);
    value = _mm512_or_si512(_mm512_slli_epi16(value, 1), _mm512_srli_epi16(value, 15));
    _mm256_storeu_si256((__m256i *)planes, _mm512_cvtepi16_epi8(_mm512_srli_epi16(value, 8)));
    _mm256_storeu_si256((__m256i *)(planes + stride), _mm512_cvtepi16_epi8(value));
}

/* line_store() stores 64 bytes: past the caches where 'streamed', for which 'target' has to be aligned. */
TARGET_INLINE void line_store(void *target, __m512i line, int streamed) {
    if (streamed) {
        _mm512_stream_si512(target, line);
    } else {
        _mm512_storeu_si512(target, line);
    }
}

/* is_line() returns whether 'target' is aligned for that. */
TARGET_INLINE int is_line(const void *target) {
    return (uintptr_t)target % 64 == 0;
}

TARGET_INLINE void merge16_step(const uint8_t *planes, size_t stride, uint8_t *target, int streamed) {
    __m512i high = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)planes));
    __m512i low = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(planes + stride)));
    __m512i value = _mm512_or_si512(_mm512_slli_epi16(high, 8), low);
    line_store(target, _mm512_or_si512(_mm512_srli_epi16(value, 1), _mm512_slli_epi16(value, 15)), streamed);
}

TARGET_INLINE void split32_step(const uint8_t *source, uint8_t *planes, size_t stride) {
    __m512i value = _mm512_rol_epi32(_mm512_loadu_si512(source), 1);
    _mm_storeu_si128((__m128i *)planes, _mm512_cvtepi32_epi8(_mm512_srli_epi32(value, 24)));
    _mm_storeu_si128((__m128i *)(planes + stride), _mm512_cvtepi32_epi8(_mm512_srli_epi32(value, 16)));
    _mm_storeu_si128((__m128i *)(planes + 2 * stride), _mm512_cvtepi32_epi8(_mm512_srli_epi32(value, 8)));
    _mm_storeu_si128((__m128i *)(planes + 3 * stride), _mm512_cvtepi32_epi8(value));
}

/* plane_pair() joins two planes to 16-bit lanes. */
TARGET_INLINE __m256i plane_pair(const uint8_t *upper, const uint8_t *lower) {
    __m256i high = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)upper));
    return _mm256_or_si256(_mm256_slli_epi16(high, 8), _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)lower)));
}

TARGET_INLINE void merge32_step(const uint8_t *planes, size_t stride, uint8_t *target, int streamed) {
    __m256i upper = plane_pair(planes, planes + stride), lower = plane_pair(planes + 2 * stride, planes + 3 * stride);
    __m512i value = _mm512_or_si512(_mm512_slli_epi32(_mm512_cvtepu16_epi32(upper), 16), _mm512_cvtepu16_epi32(lower));
    line_store(target, _mm512_ror_epi32(value, 1), streamed);
}

#include "quantize/kernel_template.h"

PLANES_MERGE(16, planes_merge16_past_caches, 1)

TARGET static void planes_merge16_streamed(const uint8_t *planes, size_t stride, size_t count, void *target) {
    if (is_line(target)) {
        planes_merge16_past_caches(planes, stride, count, target);
    } else {
        planes_merge16(planes, stride, count, target);
    }
}

/* ---- Binned: dequantize -------------------------------------------------------------------------------------- */

TARGET_INLINE __m512 values_of(__m128i symbols, __m512 scale) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(symbols)), scale);
}

/* float8_of() leaves the float8 of ss_float8_of_float() in the lower byte of each lane, the upper byte zero. */
TARGET_INLINE __m256i float8_of(__m512 values) {
    const __m512 steps = _mm512_set1_ps(SS_FLOAT8_STEPS);
    __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(_mm512_castps_si512(values), 31), 7);
    __m512 magnitude = _mm512_min_ps(_mm512_abs_ps(values), _mm512_set1_ps(SS_FLOAT8_MAX));
    __mmask16 small = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(SS_FLOAT8_NORMAL_MIN), _CMP_LT_OQ);
    __m512i bits = _mm512_castps_si512(magnitude);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
    __m512i normal = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFFF - 0x3C000000)), odd);
    __m512i subnormal =
        _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(magnitude, steps)), _mm512_castps_si512(steps));
    normal = _mm512_mask_mov_epi32(_mm512_srli_epi32(normal, 20), small, subnormal);
    return _mm512_cvtepi32_epi16(_mm512_or_si512(sign, normal));
}

/*
 * A vector of up to 64 bins has 64 possible values. Where it is long enough to pay for their computation, they are put
 * into two registers, and each symbol picks its value with one permutation of 16-bit lanes: half the instructions of
 * the arithmetic, and the same bits, as the arithmetic made them.
 */
enum { TABLE_SYMBOLS = 64, TABLE_COUNT_MIN = 256 };

/* table_fits() returns whether all of 'count' symbols, a multiple of 64, lie in -32 .. 31. */
TARGET_INLINE int table_fits(const int8_t *symbols, size_t count) {
    __m512i outside = _mm512_setzero_si512();

    for (size_t index = 0; index < count; index += 64) {
        __m512i shifted = _mm512_add_epi8(_mm512_loadu_si512(symbols + index), _mm512_set1_epi8(32));
        outside = _mm512_or_si512(outside, shifted);
    }
    return _mm512_test_epi8_mask(outside, _mm512_set1_epi8((char)0xC0)) == 0;
}

/* Of 32 or 16 elements in 16-bit lanes, those of the 8-bit dtype are stored by their lower bytes. */
#define STORE32_16(elements, index, lanes, streamed) line_store((elements) + 2 * (index), lanes, streamed)
#define STORE32_8(elements, index, lanes, streamed)                                                                    \
    ((void)(streamed), _mm256_storeu_si256((__m256i *)((elements) + (index)), _mm512_cvtepi16_epi8(lanes)))
#define STORE16_16(elements, index, mask, lanes) _mm256_mask_storeu_epi16((elements) + 2 * (index), mask, lanes)
#define STORE16_8(elements, index, mask, lanes)                                                                        \
    _mm_mask_storeu_epi8((elements) + (index), mask, _mm256_cvtepi16_epi8(lanes))

/*
 * One function for each dtype of up to 16 bits: NARROW makes 16 elements of 16 floats. In the table, symbol s is found
 * at (s & 63).
 */
#define UNBIN(name, bits, NARROW)                                                                                      \
    TARGET_INLINE __m512i name##_pair(const int8_t *symbols, __m512 scale) {                                           \
        __m256i pair = _mm256_loadu_si256((const __m256i *)symbols);                                                   \
        __m256i low = NARROW(values_of(_mm256_castsi256_si128(pair), scale));                                          \
        __m256i high = NARROW(values_of(_mm256_extracti128_si256(pair, 1), scale));                                    \
        return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);                                               \
    }                                                                                                                  \
                                                                                                                       \
    TARGET_INLINE void name##_to(const int8_t *symbols, size_t count, float scale, void *target, int streamed) {       \
        const __m512 scales = _mm512_set1_ps(scale);                                                                   \
        uint8_t *elements = target;                                                                                    \
        size_t index = 0;                                                                                              \
                                                                                                                       \
        if (count >= TABLE_COUNT_MIN && table_fits(symbols, count & ~(size_t)63)) {                                    \
            const __m512i table0 = name##_pair(table_symbols, scales);                                                 \
            const __m512i table1 = name##_pair(table_symbols + 32, scales);                                            \
            for (; index < (count & ~(size_t)63); index += 32) {                                                       \
                __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(symbols + index)));           \
                STORE32_##bits(elements, index, _mm512_permutex2var_epi16(table0, wide, table1), streamed);            \
            }                                                                                                          \
        }                                                                                                              \
        for (; index + 32 <= count; index += 32)                                                                       \
            STORE32_##bits(elements, index, name##_pair(symbols + index, scales), streamed);                           \
        for (; index < count; index += 16) {                                                                           \
            __mmask16 mask = count - index >= 16 ? (__mmask16)0xFFFF : (__mmask16)mask_of(count - index);              \
            __m512 values = values_of(_mm_maskz_loadu_epi8(mask, symbols + index), scales);                            \
            STORE16_##bits(elements, index, mask, NARROW(values));                                                     \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    TARGET_INLINE void name##_vector(const int8_t *symbols, size_t count, float scale, void *target) {                 \
        name##_to(symbols, count, scale, target, 0);                                                                   \
    }                                                                                                                  \
                                                                                                                       \
    SS_UNBIN_BATCH(TARGET, name, name##_vector, (bits) / 8)

/* The symbols in the order of the table: 0 .. 31, then -32 .. -1. */
static const int8_t table_symbols[TABLE_SYMBOLS] = {
    0,   1,   2,   3,   4,   5,   6,   7,   8,   9,   10,  11,  12,  13,  14,  15,  16,  17,  18,  19,  20,  21,
    22,  23,  24,  25,  26,  27,  28,  29,  30,  31,  -32, -31, -30, -29, -28, -27, -26, -25, -24, -23, -22, -21,
    -20, -19, -18, -17, -16, -15, -14, -13, -12, -11, -10, -9,  -8,  -7,  -6,  -5,  -4,  -3,  -2,  -1};

UNBIN(unbin_float8, 8, float8_of)
UNBIN(unbin_float16, 16, ss_float16_of_16)
UNBIN(unbin_bfloat16, 16, ss_bfloat16_of_16)

#define UNBIN_STREAMED(name)                                                                                           \
    TARGET_INLINE void name##_vector_streamed(const int8_t *symbols, size_t count, float scale, void *target) {        \
        if (is_line(target))                                                                                           \
            name##_to(symbols, count, scale, target, 1);                                                               \
        else                                                                                                           \
            name##_to(symbols, count, scale, target, 0);                                                               \
    }                                                                                                                  \
                                                                                                                       \
    SS_UNBIN_BATCH(TARGET, name##_streamed, name##_vector_streamed, 2)

UNBIN_STREAMED(unbin_float16)
UNBIN_STREAMED(unbin_bfloat16)

TARGET_INLINE void unbin_float32_vector(const int8_t *symbols, size_t count, float scale, void *target) {
    const __m512 scales = _mm512_set1_ps(scale);
    float *elements = target;
    size_t index = 0;

    for (; index + 16 <= count; index += 16) {
        _mm512_storeu_ps(elements + index, values_of(_mm_loadu_si128((const __m128i *)(symbols + index)), scales));
    }
    if (index < count) {
        __mmask16 mask = (__mmask16)mask_of(count - index);
        _mm512_mask_storeu_ps(elements + index, mask, values_of(_mm_maskz_loadu_epi8(mask, symbols + index), scales));
    }
}

SS_UNBIN_BATCH(TARGET, unbin_float32, unbin_float32_vector, 4)

/* ---- Weighted: what weighted_template.h asks for ------------------------------------------------------------- */

#define NUMBERS __m512

TARGET_INLINE __m512 numbers_load(const float *source) {
    return _mm512_loadu_ps(source);
}

TARGET_INLINE __m512 numbers_of(const int8_t *symbols) {
    const __m512i order = _mm512_set_epi32(0x80800F80, 0x80800E80, 0x80800D80, 0x80800C80, 0x80800B80, 0x80800A80,
                                           0x80800980, 0x80800880, 0x80800780, 0x80800680, 0x80800580, 0x80800480,
                                           0x80800380, 0x80800280, 0x80800180, 0x80800080);
    const __m512i four = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)symbols));
    const __m512i bits = _mm512_xor_si512(_mm512_shuffle_epi8(four, order), _mm512_set1_epi32(SS_NUMBER_BITS));
    return _mm512_castsi512_ps(bits);
}

TARGET_INLINE __m512 numbers_multiply(__m512 a, __m512 b) {
    return _mm512_mul_ps(a, b);
}

TARGET_INLINE __m512 numbers_add_product(__m512 sum, __m512 a, __m512 b) {
    return _mm512_fmadd_ps(a, b, sum);
}

TARGET_INLINE __m512 numbers_subtract_product(__m512 sum, __m512 a, __m512 b) {
    return _mm512_fnmadd_ps(a, b, sum);
}

TARGET_INLINE int numbers_symbols(__m512 values, __m512 steps, __m512 centres, float most, int8_t *symbols) {
    __m512 numbers = _mm512_div_ps(_mm512_sub_ps(values, centres), steps);
    __mmask16 far = _mm512_cmp_ps_mask(_mm512_abs_ps(numbers), _mm512_set1_ps(SS_WEIGHTED_LIMIT), _CMP_NLE_UQ);
    __m512 magnitudes = _mm512_add_ps(_mm512_abs_ps(values), steps);
    _mm_storeu_si128((__m128i *)symbols, _mm512_cvtepi32_epi8(_mm512_cvt_roundps_epi32(numbers, ROUND)));
    return far | _mm512_cmp_ps_mask(magnitudes, _mm512_set1_ps(most), _CMP_NLE_UQ);
}

TARGET_INLINE void half_store(uint8_t *target, __m256i half, int streamed) {
    if (streamed) {
        _mm256_stream_si256((__m256i *)target, half);
    } else {
        _mm256_storeu_si256((__m256i *)target, half);
    }
}

TARGET_INLINE void round_float16(uint8_t *target, __m512 values, int streamed) {
    half_store(target, ss_float16_of_16(values), streamed);
}

TARGET_INLINE void round_bfloat16(uint8_t *target, __m512 values, int streamed) {
    const __m512i upper = _mm512_set_epi16(31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 29, 27,
                                           25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    half_store(target, _mm512_castsi512_si256(_mm512_permutexvar_epi16(upper, _mm512_castps_si512(values))), streamed);
}

TARGET_INLINE void round_float32(uint8_t *target, __m512 values, int streamed) {
    line_store(target, _mm512_castps_si512(values), streamed);
}

#include "quantize/weighted_template.h"

const struct ss_quantize_kernels ss_quantize_kernels_avx512 = {
    SS_QUANTIZE_KERNELS,
    .unbin_streamed = {[SS_DTYPE_FLOAT16] = unbin_float16_streamed, [SS_DTYPE_BFLOAT16] = unbin_bfloat16_streamed},
    .planes_merge_streamed =
        {[SS_DTYPE_FLOAT16] = planes_merge16_streamed, [SS_DTYPE_BFLOAT16] = planes_merge16_streamed},
};
