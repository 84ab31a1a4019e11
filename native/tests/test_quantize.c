/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantizers: every ISA writes the scalar variant's bytes at every length and alignment and touches nothing outside
 * its buffers. tests/native/test_quantizers.py compares their roundings and errors with numpy and torch.
 */
#include "check.h"
#include "shadowserve.h"

#include <math.h>

enum { ELEMENTS_MAX = 8192 };

static const char *const isa_names[] = {"scalar", "avx2", "avx512", "neon"};
static struct guarded source, symbols, scales, target, expected_symbols, expected_scales, expected_target;

/* ---- Data ---------------------------------------------------------------------------------------------------- */

/* elements_fill() writes finite elements of very different magnitudes, subnormals and both zeros among them. */
static void elements_fill(enum ss_dtype dtype, uint8_t *elements, size_t count) {
    size_t itemsize = ss_dtype_size(dtype);
    int calm = random_below(2) == 0;

    for (size_t index = 0; index < count; index++) {
        uint64_t bits = random64();
        if (dtype == SS_DTYPE_FLOAT8_E4M3) {
            bits = calm ? 0x30 | (bits & 0x8F) : (bits & 0x7F) == 0x7F ? bits & 0x83 : bits;
        } else if (dtype == SS_DTYPE_FLOAT16) {
            bits = calm ? 0x3000 | (bits & 0x8FFF) : (bits & 0x7C00) == 0x7C00 ? bits & 0x83FF : bits;
        } else if (dtype == SS_DTYPE_BFLOAT16) {
            bits = calm ? 0x3E00 | (bits & 0x81FF) : (bits & 0x7F80) == 0x7F80 ? bits & 0x807F : bits;
        } else if (dtype == SS_DTYPE_FLOAT32) {
            bits = calm                                ? 0x3E000000 | (bits & 0x81FFFFFF)
                   : (bits & 0x7F800000) == 0x7F800000 ? bits & 0x807FFFFF
                                                       : bits;
        }
        memcpy(elements + index * itemsize, &bits, itemsize);
    }
}

/* ---- Checks -------------------------------------------------------------------------------------------------- */

struct shape {
    enum ss_quantizer quantizer;
    enum ss_dtype dtype;
    uint32_t bins;
    size_t vectors;
    size_t vector_length;
};

/* check_isa() compares one ISA with what scalar wrote into the expected_ regions. */
static void check_isa(enum ss_isa isa, const struct shape *shape, int at_end) {
    size_t count = shape->vectors * shape->vector_length;
    size_t size = count * ss_dtype_size(shape->dtype);
    size_t symbols_size = shape->quantizer == SS_QUANTIZER_BINNED ? count : size;
    size_t scales_size = shape->quantizer == SS_QUANTIZER_BINNED ? 4 * shape->vectors : 0;
    uint8_t *elements = guarded_place(&source, size, at_end);
    uint8_t *made = guarded_place(&symbols, symbols_size, at_end);
    uint8_t *made_scales = guarded_place(&scales, scales_size, at_end);
    uint8_t *decoded = guarded_place(&target, size, at_end);

    CHECK(ss_quantize(shape->quantizer, shape->dtype, shape->bins, elements, shape->vectors, shape->vector_length, made,
                      made_scales) == SS_OK,
          "%s", isa_names[isa]);
    CHECK(memcmp(made, expected_symbols.start, symbols_size) == 0 &&
              memcmp(made_scales, expected_scales.start, scales_size) == 0,
          "quantizer %d dtype %d bins %u, %zu x %zu: %s differs from scalar", (int)shape->quantizer, (int)shape->dtype,
          shape->bins, shape->vectors, shape->vector_length, isa_names[isa]);
    CHECK(ss_dequantize(shape->quantizer, shape->dtype, made, made_scales, shape->vectors, shape->vector_length,
                        decoded) == SS_OK,
          "%s", isa_names[isa]);
    CHECK(memcmp(decoded, expected_target.start, size) == 0,
          "dequantizing: quantizer %d dtype %d bins %u, %zu x %zu: %s differs from scalar", (int)shape->quantizer,
          (int)shape->dtype, shape->bins, shape->vectors, shape->vector_length, isa_names[isa]);
    if (shape->quantizer != SS_QUANTIZER_BINNED) {
        CHECK(memcmp(decoded, elements, size) == 0, "quantizer %d is not exact", (int)shape->quantizer);
    }
}

static void check_shape(const struct shape *shape, int at_end) {
    size_t size = shape->vectors * shape->vector_length * ss_dtype_size(shape->dtype);
    uint8_t *elements = guarded_place(&source, size, at_end);

    elements_fill(shape->dtype, elements, shape->vectors * shape->vector_length);
    CHECK(ss_isa_force(SS_ISA_SCALAR) == SS_OK, "scalar is always there");
    CHECK(ss_quantize(shape->quantizer, shape->dtype, shape->bins, elements, shape->vectors, shape->vector_length,
                      expected_symbols.start, expected_scales.start) == SS_OK,
          "scalar");
    CHECK(ss_dequantize(shape->quantizer, shape->dtype, expected_symbols.start, expected_scales.start, shape->vectors,
                        shape->vector_length, expected_target.start) == SS_OK,
          "scalar");
    FOR_EACH_ISA (isa) {
        check_isa(isa, shape, at_end);
    }
}

static void check_all_shapes(void) {
    static const uint32_t bins_tested[] = {4, 16, 32, 64, 66, 256};

    for (enum ss_dtype dtype = SS_DTYPE_UINT8; dtype <= SS_DTYPE_FLOAT8_E4M3; dtype++) {
        for (enum ss_quantizer quantizer = SS_QUANTIZER_PASSTHROUGH; quantizer <= SS_QUANTIZER_BINNED; quantizer++) {
            if (quantizer == SS_QUANTIZER_BINNED && dtype == SS_DTYPE_UINT8) {
                continue;
            }
            for (size_t length = 0; length <= 140; length++) {
                struct shape shape = {quantizer, dtype, bins_tested[length % 6], 1 + length % 3, length};
                check_shape(&shape, 1);
                check_shape(&shape, 0);
            }
            for (int trial = 0; trial < 100; trial++) {
                size_t length = 1 + random_below(1500);
                struct shape shape = {quantizer, dtype, bins_tested[random_below(6)],
                                      1 + random_below(ELEMENTS_MAX / length), length};
                check_shape(&shape, (int)random_below(2));
            }
        }
    }
}

/* check_weighted() compares all ISAs with scalar, between guard pages, at both alignments. */
static void check_weighted(enum ss_dtype dtype, size_t vectors, uint32_t heads, uint32_t head_length, int at_end) {
    enum { PAIRS = 3, TOKENS = 16, LENGTH_MAX = 256 };
    static float steps[2 * LENGTH_MAX], centres[4 * 2 * LENGTH_MAX], turns[TOKENS * 2 * PAIRS];
    static double frequencies[PAIRS] = {1, 0.1, 0.01};
    const size_t length = (size_t)heads * head_length, count = vectors * length, size = count * ss_dtype_size(dtype);
    const size_t most = ss_weighted_exact_max(dtype, vectors, length);
    struct ss_channels channels = {.steps = steps,
                                   .centres = centres,
                                   .frequencies = frequencies,
                                   .turns = turns,
                                   .rows = 2,
                                   .kinds = 2,
                                   .vector_length = (uint32_t)length,
                                   .head_length = head_length,
                                   .pairs = head_length >= 2 * PAIRS ? PAIRS : 0,
                                   .tokens = TOKENS};
    uint8_t *elements = guarded_place(&source, size, at_end);

    for (size_t index = 0; index < 2 * length; index++) {
        steps[index] = 0.001f * (float)(1 + random_below(1000));
    }
    for (size_t index = 0; index < 4 * 2 * length; index++) {
        centres[index] = 0.001f * (float)random_below(1000);
    }
    for (int index = 0; index < TOKENS * PAIRS; index++) {
        double angle = frequencies[index % PAIRS] * (index / PAIRS);
        turns[index / PAIRS * 2 * PAIRS + index % PAIRS] = (float)cos(angle);
        turns[index / PAIRS * 2 * PAIRS + PAIRS + index % PAIRS] = (float)sin(angle);
    }
    elements_fill(dtype, elements, count);
    FOR_EACH_ISA (isa) {
        for (uint32_t row = 0; row < 2; row++) {
            static size_t lengths[2];
            static uint8_t wanted_symbols[2][ELEMENTS_MAX], wanted_exact[2][5 * ELEMENTS_MAX],
                wanted[2][4 * ELEMENTS_MAX];
            uint8_t *made = guarded_place(&symbols, count, at_end), *exact = guarded_place(&scales, most, at_end);
            uint8_t *decoded = guarded_place(&target, size, at_end);
            size_t exact_length = 0;
            CHECK(ss_quantize_weighted(dtype, &channels, row, 2, elements, vectors, made, exact, &exact_length) ==
                          SS_OK &&
                      exact_length <= most,
                  "%s", isa_names[isa]);
            CHECK(ss_dequantize_weighted(dtype, &channels, row, made, exact, exact_length, vectors, decoded) == SS_OK,
                  "%s", isa_names[isa]);
            if (isa == SS_ISA_SCALAR) {
                lengths[row] = exact_length;
                memcpy(wanted_symbols[row], made, count);
                memcpy(wanted_exact[row], exact, exact_length);
                memcpy(wanted[row], decoded, size);
            }
            CHECK(exact_length == lengths[row] && memcmp(made, wanted_symbols[row], count) == 0 &&
                      memcmp(exact, wanted_exact[row], exact_length) == 0 && memcmp(decoded, wanted[row], size) == 0,
                  "weighted, dtype %d, %zu x %u x %u: %s differs from scalar", (int)dtype, vectors, heads, head_length,
                  isa_names[isa]);
        }
    }
}

static void check_weighted_shapes(void) {
    for (enum ss_dtype dtype = SS_DTYPE_FLOAT16; dtype <= SS_DTYPE_FLOAT32; dtype++) {
        for (uint32_t head_length = 1; head_length <= 70; head_length++) {
            check_weighted(dtype, head_length % 17, 1 + head_length % 3, head_length, (int)(head_length & 1));
        }
        check_weighted(dtype, 16, 2, 128, 1);
    }
}

static void check_special_vectors(void) {
    float values[40] = {0}, scale = 1;
    uint8_t made[160];

    CHECK(ss_quantize(SS_QUANTIZER_BINNED, SS_DTYPE_FLOAT32, 32, values, 1, 40, made, &scale) == SS_OK && scale == 0,
          "an all-zero vector has scale 0");
    values[3] = 0x1p-140f; /* its scale has no finite inverse */
    CHECK(ss_quantize(SS_QUANTIZER_BINNED, SS_DTYPE_FLOAT32, 32, values, 1, 40, made, &scale) == SS_OK && scale == 0,
          "a vector of subnormals counts as zero");
    for (size_t index = 0; index < 40; index++) {
        CHECK(made[index] == 0, "symbol %zu is %d", index, made[index]);
    }
    for (size_t index = 0; index < 40; index++) {
        static const uint32_t bad[] = {0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001};
        memset(values, 0, sizeof(values));
        memcpy(&values[index], &bad[index % 4], 4);
        CHECK(ss_quantize(SS_QUANTIZER_BINNED, SS_DTYPE_FLOAT32, 32, values, 1, 40, made, &scale) == SS_NOT_FINITE,
              "element %zu is not finite", index);
        uint16_t halves[40] = {0};
        halves[index] = index % 2 ? 0x7C00 : 0xFE01;
        CHECK(ss_quantize(SS_QUANTIZER_BINNED, SS_DTYPE_FLOAT16, 32, halves, 1, 40, made, &scale) == SS_NOT_FINITE,
              "element %zu is not finite", index);
        halves[index] = index % 2 ? 0x7F80 : 0xFFC1;
        CHECK(ss_quantize(SS_QUANTIZER_BINNED, SS_DTYPE_BFLOAT16, 32, halves, 1, 40, made, &scale) == SS_NOT_FINITE,
              "element %zu is not finite", index);
    }
    for (size_t index = 0; index < 40; index++) {
        uint8_t bytes[40] = {0};
        bytes[index] = index % 2 ? 0x7F : 0xFF;
        CHECK(ss_quantize(SS_QUANTIZER_BINNED, SS_DTYPE_FLOAT8_E4M3, 32, bytes, 1, 40, made, &scale) == SS_NOT_FINITE,
              "element %zu is NaN", index);
        bytes[index] = 0xFE; /* the largest there is */
        CHECK(ss_quantize(SS_QUANTIZER_BINNED, SS_DTYPE_FLOAT8_E4M3, 32, bytes, 1, 40, made, &scale) == SS_OK &&
                  (int8_t)made[index] == -15 && (double)scale * 15 > 447.9,
              "element %zu is -448", index);
    }
    scale = INFINITY;
    CHECK(ss_dequantize(SS_QUANTIZER_BINNED, SS_DTYPE_FLOAT32, made, &scale, 1, 40, values) == SS_BAD_DATA, "scale");
    scale = NAN;
    CHECK(ss_dequantize(SS_QUANTIZER_BINNED, SS_DTYPE_FLOAT32, made, &scale, 1, 40, values) == SS_BAD_DATA, "scale");
}

/* A batch in which only one symbol, in any of its vectors, is beyond those of 64 bins; or none. */
static void check_one_symbol_of_more_bins(enum ss_isa isa) {
    enum { VECTORS = 4, LENGTH = 150, COUNT = VECTORS * LENGTH };
    static const int8_t beyond[] = {-33, 32, 127, -128};
    static const float vector_scales[VECTORS] = {0.37f, 3e-3f, 25.0f, -0x1.6p-15f};
    static const enum ss_dtype dtypes[] = {SS_DTYPE_FLOAT16, SS_DTYPE_BFLOAT16, SS_DTYPE_FLOAT32, SS_DTYPE_FLOAT8_E4M3};
    int8_t made[COUNT];
    uint8_t wanted[4 * COUNT], decoded[4 * COUNT];

    for (unsigned trial = 0; trial < 400; trial++) {
        const enum ss_dtype dtype = dtypes[trial % 4];
        for (size_t index = 0; index < COUNT; index++) {
            made[index] = (int8_t)((int)random_below(64) - 32);
        }
        if (trial % 5 != 0) {
            made[random_below(COUNT)] = beyond[random_below(4)];
        }
        CHECK(ss_isa_force(SS_ISA_SCALAR) == SS_OK, "scalar is always there");
        CHECK(ss_dequantize(SS_QUANTIZER_BINNED, dtype, (uint8_t *)made, vector_scales, VECTORS, LENGTH, wanted) ==
                  SS_OK,
              "scalar");
        CHECK(ss_isa_force(isa) == SS_OK, "%s", isa_names[isa]);
        CHECK(ss_dequantize(SS_QUANTIZER_BINNED, dtype, (uint8_t *)made, vector_scales, VECTORS, LENGTH, decoded) ==
                      SS_OK &&
                  memcmp(wanted, decoded, COUNT * ss_dtype_size(dtype)) == 0,
              "%s differs from scalar, dtype %d, trial %u", isa_names[isa], (int)dtype, trial);
    }
}

static void check_lossless_is_exact_for_every_pattern(void) {
    static uint16_t all[65536], back[65536];
    static uint8_t planes[2 * 65536];

    for (uint32_t pattern = 0; pattern < 65536; pattern++) {
        all[pattern] = (uint16_t)pattern;
    }
    CHECK(ss_quantize(SS_QUANTIZER_LOSSLESS, SS_DTYPE_BFLOAT16, 0, all, 256, 256, planes, NULL) == SS_OK, "lossless");
    for (uint32_t pattern = 0; pattern < 65536; pattern++) {
        CHECK(planes[pattern] == (pattern << 1 >> 8 & 0xFF) &&
                  planes[65536 + pattern] == ((pattern << 1 | pattern >> 15) & 0xFF),
              "planes of %04x", pattern);
    }
    CHECK(ss_dequantize(SS_QUANTIZER_LOSSLESS, SS_DTYPE_BFLOAT16, planes, NULL, 256, 256, back) == SS_OK, "lossless");
    CHECK(memcmp(all, back, sizeof(all)) == 0, "lossless is not exact");
}

static void check_arguments(void) {
    float values[4] = {1, 2, 3, 4}, scale;
    uint8_t made[16];
    static const uint32_t bad_bins[] = {0, 2, 3, 5, 33, 258, 512};

    for (size_t index = 0; index < COUNT_OF(bad_bins); index++) {
        CHECK(ss_quantize(SS_QUANTIZER_BINNED, SS_DTYPE_FLOAT32, bad_bins[index], values, 1, 4, made, &scale) ==
                  SS_BAD_ARGUMENT,
              "bins %u", bad_bins[index]);
    }
    CHECK(ss_quantize(SS_QUANTIZER_BINNED, SS_DTYPE_UINT8, 32, values, 1, 4, made, &scale) == SS_BAD_ARGUMENT, "uint8");
    CHECK(ss_quantize(SS_QUANTIZER_BINNED, (enum ss_dtype)9, 32, values, 1, 4, made, &scale) == SS_BAD_ARGUMENT, "9");
    CHECK(ss_quantize((enum ss_quantizer)7, SS_DTYPE_FLOAT32, 32, values, 1, 4, made, &scale) == SS_BAD_ARGUMENT, "7");
    CHECK(ss_quantize(SS_QUANTIZER_LOSSLESS, SS_DTYPE_FLOAT32, 0, values, SIZE_MAX / 2, 4, made, NULL) ==
              SS_BAD_ARGUMENT,
          "overflow");
    CHECK(ss_dequantize(SS_QUANTIZER_BINNED, SS_DTYPE_FLOAT32, made, NULL, 1, 4, values) == SS_BAD_ARGUMENT, "scales");
    CHECK(ss_dequantize((enum ss_quantizer)7, SS_DTYPE_FLOAT32, made, NULL, 0, 0, values) == SS_BAD_ARGUMENT, "7");
    CHECK(ss_dtype_size((enum ss_dtype)9) == 0, "unknown dtypes have no size");
}

int main(void) {
    enum ss_isa best = ss_isa_active();

    source = guarded_make(4 * ELEMENTS_MAX);
    symbols = guarded_make(4 * ELEMENTS_MAX);
    scales = guarded_make(4 * ELEMENTS_MAX);
    target = guarded_make(4 * ELEMENTS_MAX);
    expected_symbols = guarded_make(4 * ELEMENTS_MAX);
    expected_scales = guarded_make(4 * ELEMENTS_MAX);
    expected_target = guarded_make(4 * ELEMENTS_MAX);
    check_weighted_shapes();
    check_all_shapes();
    for (enum ss_isa isa = SS_ISA_SCALAR; isa <= SS_ISA_NEON; isa++) {
        if (ss_isa_available(isa)) {
            CHECK(ss_isa_force(isa) == SS_OK, "%s", isa_names[isa]);
            check_special_vectors();
            check_one_symbol_of_more_bins(isa);
            check_lossless_is_exact_for_every_pattern();
            check_arguments();
            printf("%s%s\n", isa_names[isa], isa == best ? " (the default here)" : "");
        } else {
            CHECK(ss_isa_force(isa) == SS_NOT_SUPPORTED, "%s", isa_names[isa]);
        }
    }
    CHECK(!ss_isa_available((enum ss_isa)99) && ss_isa_force((enum ss_isa)99) == SS_NOT_SUPPORTED, "unknown");
    return 0;
}
