/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quantize.c - elements to symbols and back
 *
 * Binned (ShadowServe section 5, after CacheGen's vector-wise data binning): with limit = bins/2 - 1,
 *
 *   scale   = largest magnitude / limit                      (one rounding to float)
 *   symbol  = round_to_nearest_even(x * (1 / scale))          clamped to -limit .. limit
 *   decoded = symbol * scale                                  (one rounding to float, one to the dtype)
 *
 * The division is done once for each vector. The product with the rounded inverse can exceed the limit by a rounding
 * error, so it is clamped. If the scale is so small that its inverse overflows (under about 2^-128, which float16
 * cannot represent and KV vectors never have), the vector counts as zero: scale 0, all symbols 0.
 *
 * The largest magnitude is found on bit patterns without their sign: as unsigned integers they order like the
 * numbers, infinities and NaN come out on top, and no conversion is needed.
 *
 * All variants of the kernels do the same IEEE operations in the same order, so they write the same bytes; they
 * assume the default rounding mode and honoured subnormals. The thread that calls us must not have changed that.
 */
#include "quantize/quantize.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const struct ss_quantize_kernels *ss_quantize_kernels_active(void) {
    switch (ss_isa_active()) {
#ifdef SS_ARCH_X86_64
    case SS_ISA_AVX2:
        return &ss_quantize_kernels_avx2;
    case SS_ISA_AVX512:
        return &ss_quantize_kernels_avx512;
#endif
#ifdef SS_ARCH_AARCH64
    case SS_ISA_NEON:
        return &ss_quantize_kernels_neon;
#endif
    default:
        return &ss_quantize_kernels_scalar;
    }
}

size_t ss_dtype_size(enum ss_dtype dtype) {
    switch (dtype) {
    case SS_DTYPE_UINT8:
    case SS_DTYPE_FLOAT8_E4M3:
        return 1;
    case SS_DTYPE_FLOAT16:
    case SS_DTYPE_BFLOAT16:
        return 2;
    case SS_DTYPE_FLOAT32:
        return 4;
    default:
        return 0;
    }
}

/* element_count() multiplies; SIZE_MAX stands for a number whose bytes would not fit the address space. */
static size_t element_count(size_t vectors, size_t vector_length) {
    size_t count;
    if (__builtin_mul_overflow(vectors, vector_length, &count) || count > SIZE_MAX / 8) {
        return SIZE_MAX;
    }
    return count;
}

/* binned_scale() returns the scale of a vector, or 0 where that has no finite inverse, which goes to '*inverse'. */
static float binned_scale(float magnitude, int limit, float *inverse) {
    float scale = magnitude / (float)limit;

    *inverse = scale != 0 ? 1.0f / scale : 0;
    if (scale == 0 || isinf(*inverse)) {
        *inverse = 0;
        return 0;
    }
    return scale;
}

static float magnitude_value(enum ss_dtype dtype, uint32_t bits) {
    switch (dtype) {
    case SS_DTYPE_FLOAT8_E4M3:
        return ss_float_of_float8((uint8_t)bits);
    case SS_DTYPE_FLOAT16:
        return ss_float_of_float16((uint16_t)bits);
    case SS_DTYPE_BFLOAT16:
        return ss_float_of_bfloat16((uint16_t)bits);
    default:
        return ss_float_of_bits(bits);
    }
}

static enum ss_result quantize_binned(enum ss_dtype dtype, uint32_t bins, const uint8_t *source, size_t vectors,
                                      size_t vector_length, uint8_t *symbols, uint8_t *scales) {
    static const uint32_t infinities[] = {[SS_DTYPE_FLOAT16] = SS_FLOAT16_INFINITY,
                                          [SS_DTYPE_BFLOAT16] = SS_BFLOAT16_INFINITY,
                                          [SS_DTYPE_FLOAT32] = SS_FLOAT32_INFINITY,
                                          [SS_DTYPE_FLOAT8_E4M3] = SS_FLOAT8_NAN};
    const struct ss_quantize_kernels *kernels = ss_quantize_kernels_active();
    const size_t vector_size = vector_length * ss_dtype_size(dtype);
    const int limit = (int)bins / 2 - 1;

    for (size_t vector = 0; vector < vectors; vector++) {
        uint32_t magnitude = kernels->magnitude_max[dtype](source, vector_length);
        float scale, inverse;

        if (magnitude >= infinities[dtype]) {
            return SS_NOT_FINITE;
        }
        scale = binned_scale(magnitude_value(dtype, magnitude), limit, &inverse);
        kernels->bin[dtype](source, vector_length, inverse, limit, (int8_t *)symbols);
        ss_store32(scales, vector, ss_bits_of_float(scale));
        source += vector_size;
        symbols += vector_length;
    }
    return SS_OK;
}

static enum ss_result dequantize_binned(enum ss_dtype dtype, const uint8_t *symbols, const uint8_t *scales,
                                        size_t vectors, size_t vector_length, uint8_t *target, int streamed) {
    const struct ss_quantize_kernels *kernels = ss_quantize_kernels_active();
    uint32_t magnitude_max = 0;

    for (size_t vector = 0; vector < vectors; vector++) {
        uint32_t magnitude = ss_load32(scales, vector) & 0x7FFFFFFFu;
        magnitude_max = magnitude > magnitude_max ? magnitude : magnitude_max;
    }
    /* NaN would differ between instruction sets; no quantizer writes one, nor an infinity. */
    if (magnitude_max >= SS_FLOAT32_INFINITY) {
        return SS_BAD_DATA;
    }
    streamed = streamed && kernels->unbin_streamed[dtype] != NULL;
    (streamed ? kernels->unbin_streamed : kernels->unbin)[dtype]((const int8_t *)symbols, scales, vectors,
                                                                 vector_length, target);
    return SS_OK;
}

enum ss_result ss_quantize(enum ss_quantizer quantizer, enum ss_dtype dtype, uint32_t bins, const void *source,
                           size_t vectors, size_t vector_length, uint8_t *symbols, void *scales) {
    const size_t count = element_count(vectors, vector_length);

    if (ss_dtype_size(dtype) == 0 || count == SIZE_MAX) {
        return SS_BAD_ARGUMENT;
    }
    if (quantizer == SS_QUANTIZER_BINNED &&
        (dtype == SS_DTYPE_UINT8 || bins < 4 || bins > 256 || bins % 2 != 0 || (scales == NULL && vectors != 0))) {
        return SS_BAD_ARGUMENT;
    }
    if (count == 0 && (quantizer == SS_QUANTIZER_PASSTHROUGH || quantizer == SS_QUANTIZER_LOSSLESS)) {
        return SS_OK;
    }
    if (count != 0 && (source == NULL || symbols == NULL)) {
        return SS_BAD_ARGUMENT;
    }
    switch (quantizer) {
    case SS_QUANTIZER_PASSTHROUGH:
        memcpy(symbols, source, count * ss_dtype_size(dtype));
        return SS_OK;
    case SS_QUANTIZER_LOSSLESS:
        ss_quantize_kernels_active()->planes_split[dtype](source, count, symbols, count);
        return SS_OK;
    case SS_QUANTIZER_BINNED:
        return quantize_binned(dtype, bins, source, vectors, vector_length, symbols, scales);
    default:
        return SS_BAD_ARGUMENT;
    }
}

static void dequantize_lossless(enum ss_dtype dtype, const uint8_t *symbols, size_t count, void *target, int streamed) {
    const struct ss_quantize_kernels *kernels = ss_quantize_kernels_active();

    streamed = streamed && kernels->planes_merge_streamed[dtype] != NULL;
    (streamed ? kernels->planes_merge_streamed : kernels->planes_merge)[dtype](symbols, count, count, target);
}

static enum ss_result dequantize(enum ss_quantizer quantizer, enum ss_dtype dtype, const uint8_t *symbols,
                                 const void *scales, size_t vectors, size_t vector_length, void *target, int streamed) {
    const size_t count = element_count(vectors, vector_length);

    if (ss_dtype_size(dtype) == 0 || count == SIZE_MAX) {
        return SS_BAD_ARGUMENT;
    }
    if (quantizer == SS_QUANTIZER_BINNED && (dtype == SS_DTYPE_UINT8 || (scales == NULL && vectors != 0))) {
        return SS_BAD_ARGUMENT;
    }
    if (count == 0) {
        return quantizer <= SS_QUANTIZER_BINNED ? SS_OK : SS_BAD_ARGUMENT;
    }
    if (symbols == NULL || target == NULL) {
        return SS_BAD_ARGUMENT;
    }
    switch (quantizer) {
    case SS_QUANTIZER_PASSTHROUGH:
        memcpy(target, symbols, count * ss_dtype_size(dtype));
        return SS_OK;
    case SS_QUANTIZER_LOSSLESS:
        dequantize_lossless(dtype, symbols, count, target, streamed);
        return SS_OK;
    case SS_QUANTIZER_BINNED:
        return dequantize_binned(dtype, symbols, scales, vectors, vector_length, target, streamed);
    default:
        return SS_BAD_ARGUMENT;
    }
}

enum ss_result ss_dequantize(enum ss_quantizer quantizer, enum ss_dtype dtype, const uint8_t *symbols,
                             const void *scales, size_t vectors, size_t vector_length, void *target) {
    return dequantize(quantizer, dtype, symbols, scales, vectors, vector_length, target, 0);
}

enum ss_result ss_dequantize_streamed(enum ss_quantizer quantizer, enum ss_dtype dtype, const uint8_t *symbols,
                                      const void *scales, size_t vectors, size_t vector_length, void *target) {
    enum ss_result result = dequantize(quantizer, dtype, symbols, scales, vectors, vector_length, target, 1);

    ss_streams_order();
    return result;
}
