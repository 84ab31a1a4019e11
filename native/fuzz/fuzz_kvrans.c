/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_kvrans.c - any bytes, given to kvrans's decoder
 *
 * Invariants: the result is SS_OK or SS_BAD_DATA; nothing outside source and target is touched, both of which end at a
 * guard page; every variant of the kernels comes to the same result, and to the same bytes where that is SS_OK.
 *
 * So do lossless elements that are made of it, and rotated ones of 'weighted', where the size is that of whole vectors.
 *
 * Input: three bytes for the target's size, and the elements' dtype in its upper bits, then the stream.
 */
#include "check.h"
#include "shadowserve.h"

enum { TARGET_MAX = 1 << 18, SOURCE_MAX = 1 << 18 };

/* check_elements() makes elements of a stream whose result and symbols are known. */
static void check_elements(const uint8_t *source, size_t source_size, enum ss_dtype dtype, const uint8_t *symbols,
                           size_t size, enum ss_result expected) {
    static _Alignas(64) uint8_t scratch[TARGET_MAX], wanted[TARGET_MAX], made[TARGET_MAX];
    const size_t columns = source_size >= 4 ? (size_t)source[1] | (size_t)source[2] << 8 | (size_t)source[3] << 16 : 0;
    const size_t vector = columns * ss_dtype_size(dtype);
    struct ss_stream stream = {.source = source, .target = scratch, .source_size = source_size, .target_size = size};
    const struct ss_elements elements = {.target = made,
                                         .vectors = vector != 0 ? size / vector : 0,
                                         .vector_length = columns,
                                         .scale_vectors = 1,
                                         .quantizer = SS_QUANTIZER_LOSSLESS,
                                         .dtype = dtype};

    if (elements.vectors == 0 || size % vector != 0) {
        return;
    }
    ss_decode_many(SS_CODEC_KVRANS, &stream, &elements, 1);
    CHECK(stream.result == expected, "dtype %d: result %d, not %d", (int)dtype, (int)stream.result, (int)expected);
    if (expected == SS_OK) {
        CHECK(ss_dequantize(SS_QUANTIZER_LOSSLESS, dtype, symbols, NULL, elements.vectors, columns, wanted) == SS_OK &&
                  memcmp(made, wanted, size) == 0,
              "dtype %d: other elements", (int)dtype);
    }
}

/* check_weighted() is check_elements() for keys of 'weighted', whose heads have 64 or 128 channels. */
static void check_weighted(const uint8_t *source, size_t source_size, const uint8_t *symbols, size_t size,
                           enum ss_result expected) {
    enum { COLUMNS_MAX = 512, TOKENS = 512, HEAD_MAX = 128 };
    static _Alignas(64) uint8_t scratch[TARGET_MAX], wanted[2 * TARGET_MAX], made[2 * TARGET_MAX];
    static float numbers[4 * COLUMNS_MAX], turns[TOKENS * HEAD_MAX];
    static double frequencies[HEAD_MAX / 2];
    static const uint8_t side[8] = {7}; /* the position; no exact vectors */
    const size_t columns = source_size >= 4 ? (size_t)source[1] | (size_t)source[2] << 8 | (size_t)source[3] << 16 : 0;
    const uint32_t head = columns % HEAD_MAX == 0 ? HEAD_MAX : HEAD_MAX / 2;
    const struct ss_channels channels = {.steps = numbers,
                                         .centres = numbers,
                                         .frequencies = frequencies,
                                         .turns = turns,
                                         .rows = 1,
                                         .kinds = 1,
                                         .vector_length = (uint32_t)columns,
                                         .head_length = head,
                                         .pairs = head / 2,
                                         .tokens = TOKENS};
    struct ss_stream stream = {.source = source, .target = scratch, .source_size = source_size, .target_size = size};
    const struct ss_elements elements = {.scales = side,
                                         .target = made,
                                         .vectors = columns != 0 ? size / columns : 0,
                                         .vector_length = columns,
                                         .scale_vectors = 1,
                                         .quantizer = SS_QUANTIZER_WEIGHTED,
                                         .dtype = SS_DTYPE_BFLOAT16,
                                         .channels = &channels,
                                         .scales_length = sizeof side};

    if (columns > COLUMNS_MAX || columns % (HEAD_MAX / 2) != 0 || elements.vectors == 0 || elements.vectors > TOKENS ||
        size % columns != 0) {
        return;
    }
    for (size_t index = 0; index < COUNT_OF(numbers); index++) {
        numbers[index] = 0.25f + (float)(index % 11);
    }
    for (size_t index = 0; index < COUNT_OF(turns); index++) {
        turns[index] = 0.5f + 0.03125f * (float)(index % 13);
    }
    ss_decode_many(SS_CODEC_KVRANS, &stream, &elements, 1);
    CHECK(stream.result == expected, "weighted: result %d, not %d", (int)stream.result, (int)expected);
    if (expected == SS_OK) {
        CHECK(ss_dequantize_weighted(SS_DTYPE_BFLOAT16, &channels, 0, symbols, side, sizeof side, elements.vectors,
                                     wanted) == SS_OK &&
                  memcmp(made, wanted, 2 * size) == 0,
              "weighted: other elements");
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct guarded source_region, target_region;
    static uint8_t reference[TARGET_MAX];
    static const enum ss_dtype dtypes[] = {SS_DTYPE_UINT8, SS_DTYPE_BFLOAT16, SS_DTYPE_FLOAT32};
    enum ss_result expected = SS_OK;
    size_t target_size;

    if (size < 3 || size - 3 > SOURCE_MAX) {
        return -1;
    }
    if (source_region.map == NULL) {
        source_region = guarded_make(SOURCE_MAX);
        target_region = guarded_make(TARGET_MAX);
    }
    target_size = ((size_t)data[0] << 16 | (size_t)data[1] << 8 | data[2]) % TARGET_MAX;
    FOR_EACH_ISA (isa) {
        uint8_t *source = guarded_place(&source_region, size - 3, 1);
        uint8_t *target = guarded_place(&target_region, target_size, 1);
        enum ss_result result;
        memcpy(source, data + 3, size - 3);
        result = ss_decompress(SS_CODEC_KVRANS, source, size - 3, target, target_size);
        CHECK(result == SS_OK || result == SS_BAD_DATA, "isa %d: result %d", (int)isa, (int)result);
        if (isa == SS_ISA_SCALAR) {
            expected = result;
            memcpy(reference, target, target_size);
        }
        CHECK(result == expected, "isa %d: result %d, scalar %d", (int)isa, (int)result, (int)expected);
        CHECK(result != SS_OK || memcmp(target, reference, target_size) == 0, "isa %d: other bytes", (int)isa);
        if (isa != SS_ISA_SCALAR) {
            check_elements(source, size - 3, dtypes[(data[0] >> 2) % 3], reference, target_size, expected);
            check_weighted(source, size - 3, reference, target_size, expected);
        }
    }
    return 0;
}
