/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_dequantize.c - any symbols, scales and elements, through every ISA
 *
 * Invariants: every ISA returns what scalar returns and writes the same bytes; nothing outside the buffers is touched;
 * lossless and passthrough give back what went in.
 *
 * Input: one byte for quantizer and dtype, one for the vector length, one for the bins, then scales and symbols; the
 * same bytes are elements to quantize.
 */
#include "check.h"
#include "shadowserve.h"

enum { BYTES_MAX = 65536 };

struct outcome {
    enum ss_result quantized;
    enum ss_result dequantized;
    uint8_t *symbols;
    uint8_t *scales;
    uint8_t *elements;
};

static uint8_t *bytes_make(size_t size) {
    uint8_t *bytes = calloc(1, size != 0 ? size : 1);
    CHECK(bytes != NULL, "no memory");
    return bytes;
}

static void outcome_free(struct outcome *outcome) {
    free(outcome->symbols);
    free(outcome->scales);
    free(outcome->elements);
}

/* Any symbols and exact vectors of weighted: every ISA returns what scalar returns, and writes the same bytes. */
static void weighted(enum ss_dtype dtype, const uint8_t *data, size_t size, size_t length) {
    enum { LENGTH_MAX = 256 };
    static float steps[LENGTH_MAX], centres[4 * LENGTH_MAX];
    const size_t head_length = 1 + (length - 1) % LENGTH_MAX, vectors = size / (2 * head_length);
    const struct ss_channels channels = {.steps = steps,
                                         .centres = centres,
                                         .rows = 1,
                                         .kinds = 1,
                                         .vector_length = (uint32_t)head_length,
                                         .head_length = (uint32_t)head_length};
    const size_t symbols_size = vectors * head_length, elements_size = symbols_size * ss_dtype_size(dtype);
    uint8_t *scalar = bytes_make(elements_size);
    enum ss_result wanted = SS_OK;

    for (size_t index = 0; index < head_length; index++) {
        steps[index] = 0.25f * (float)(index + 1);
    }
    for (size_t index = 0; index < 4 * head_length; index++) {
        centres[index] = (float)index;
    }
    FOR_EACH_ISA (isa) {
        uint8_t *elements = bytes_make(elements_size);
        enum ss_result result = ss_dequantize_weighted(dtype, &channels, 0, data, data + symbols_size,
                                                       size - symbols_size, vectors, elements);
        if (isa == SS_ISA_SCALAR) {
            wanted = result;
            memcpy(scalar, elements, elements_size);
        }
        CHECK(result == wanted && memcmp(elements, scalar, elements_size) == 0, "weighted differs, isa %d", (int)isa);
        free(elements);
    }
    free(scalar);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    enum ss_quantizer quantizer;
    enum ss_dtype dtype;
    uint32_t bins;
    size_t length, itemsize, symbol_size, vectors, elements_size;
    struct outcome scalar = {SS_OK, SS_OK, NULL, NULL, NULL};

    if (size < 3 || size > BYTES_MAX) {
        return -1;
    }
    quantizer = (enum ss_quantizer)(data[0] & 3);
    dtype = (enum ss_dtype)((data[0] >> 2 & 7) % 5);
    length = (size_t)data[1] * (data[0] & 0x80 ? 7 : 1) + 1;
    bins = data[2] + 1u;
    data += 3;
    size -= 3;
    if (quantizer == SS_QUANTIZER_WEIGHTED) {
        weighted(dtype, data, size, length);
        return 0;
    }
    itemsize = ss_dtype_size(dtype);
    symbol_size = quantizer == SS_QUANTIZER_BINNED ? 1 : itemsize;
    vectors = size / (length * itemsize + 4);
    elements_size = vectors * length * itemsize;
    FOR_EACH_ISA (isa) {
        struct outcome outcome;
        outcome.symbols = bytes_make(vectors * length * symbol_size);
        outcome.scales = bytes_make(4 * vectors);
        outcome.elements = bytes_make(elements_size);
        outcome.quantized = ss_quantize(quantizer, dtype, bins, data, vectors, length, outcome.symbols, outcome.scales);
        outcome.dequantized =
            ss_dequantize(quantizer, dtype, data + 4 * vectors, data, vectors, length, outcome.elements);
        if (isa == SS_ISA_SCALAR) {
            scalar = outcome;
            continue;
        }
        CHECK(outcome.quantized == scalar.quantized && outcome.dequantized == scalar.dequantized, "isa %d", (int)isa);
        CHECK(outcome.quantized != SS_OK ||
                  (memcmp(outcome.symbols, scalar.symbols, vectors * length * symbol_size) == 0 &&
                   memcmp(outcome.scales, scalar.scales, 4 * vectors) == 0),
              "quantizing differs, isa %d", (int)isa);
        CHECK(memcmp(outcome.elements, scalar.elements, elements_size) == 0, "dequantizing differs, isa %d", (int)isa);
        outcome_free(&outcome);
    }
    if (quantizer != SS_QUANTIZER_BINNED) {
        CHECK(scalar.quantized == SS_OK, "exact quantizers take everything");
        CHECK(ss_dequantize(quantizer, dtype, scalar.symbols, NULL, vectors, length, scalar.elements) == SS_OK &&
                  memcmp(scalar.elements, data, elements_size) == 0,
              "quantizer %d is not exact", (int)quantizer);
    }
    outcome_free(&scalar);
    return 0;
}
