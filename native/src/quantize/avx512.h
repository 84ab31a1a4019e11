/* SPDX-License-Identifier: Apache-2.0 */
/* avx512.h - 16 floats to 16 elements of 16 bits, rounded to nearest even, with AVX-512 F */
#ifndef SS_QUANTIZE_AVX512_H
#define SS_QUANTIZE_AVX512_H

#include <immintrin.h>

#define SS_TARGET_INLINE __attribute__((target("avx512f,avx2,f16c"), always_inline)) static inline

SS_TARGET_INLINE __m256i ss_float16_of_16(__m512 values) {
    return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

SS_TARGET_INLINE __m256i ss_bfloat16_of_16(__m512 values) {
    __m512i bits = _mm512_castps_si512(values);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
}

#undef SS_TARGET_INLINE

#endif /* SS_QUANTIZE_AVX512_H */
