/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_decompress.c - any bytes, given to any decoder
 *
 * Invariants: the result is SS_OK or SS_BAD_DATA; nothing outside source and target is touched (the decoders are
 * libraries, partly in assembly that a sanitizer does not see, so both buffers end at a guard page); where our Deflate
 * decoder accepts a stream that zlib accepts too, both make the same bytes. The decoder of literals is stricter than a
 * library may be: what it accepts, zlib accepts. And a stream that is decoded in turns with others, cut from the same
 * bytes, ends as it does alone.
 *
 * Input: one byte for the codec, two for the target's size, then the stream.
 */
#include "codecs/literal_inflate.h"
#include "shadowserve.h"
#include "zlib_reference.h"

enum { TARGET_MAX = 65536, SOURCE_MAX = 65536 };

/* check_turns() decodes the stream beside others, and compares with 'alone' and what that made. */
static void check_turns(const uint8_t *source, size_t size, const uint8_t *target, size_t target_size,
                        enum ss_result alone) {
    enum { COUNT = SS_LITERAL_INFLATE_LANES + 1 };
    static struct ss_literal_inflater *inflater;
    static uint8_t targets[COUNT][TARGET_MAX], reference[TARGET_MAX];
    struct ss_stream streams[COUNT];

    for (size_t index = 0; index < COUNT; index++) { /* the first is whole, the others begin later and later */
        size_t skipped = size * index / (COUNT + 1);
        streams[index] = (struct ss_stream){source + skipped, targets[index], size - skipped, target_size, SS_OK};
    }
    ss_decompress_many(SS_CODEC_DEFLATE, streams, COUNT);
    CHECK(streams[0].result == alone, "%d alone, %d with others", (int)alone, (int)streams[0].result);
    CHECK(alone != SS_OK || memcmp(target, targets[0], target_size) == 0, "other bytes with others");
    if (inflater == NULL) {
        inflater = ss_literal_inflater_create();
    }
    CHECK(inflater != NULL, "no memory");
    for (size_t index = 0; index < COUNT; index++) {
        streams[index].result = SS_NOT_SUPPORTED;
    }
    ss_literal_inflate(inflater, streams, COUNT);
    for (size_t index = 0; index < COUNT && target_size != 0; index++) {
        if (streams[index].result == SS_OK) {
            CHECK(zlib_inflate(streams[index].source, streams[index].source_size, reference, target_size) ==
                          target_size &&
                      memcmp(reference, targets[index], target_size) == 0,
                  "zlib makes something else of stream %zu", index);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct guarded source_region, target_region;
    static uint8_t reference[TARGET_MAX];
    size_t target_size;
    uint8_t *source, *target;
    enum ss_codec codec;
    enum ss_result result;

    if (size < 3 || size - 3 > SOURCE_MAX) {
        return -1;
    }
    if (source_region.map == NULL) {
        source_region = guarded_make(SOURCE_MAX);
        target_region = guarded_make(TARGET_MAX);
    }
    codec = (enum ss_codec)(data[0] & 3);
    target_size = (size_t)data[1] << 8 | data[2];
    source = guarded_place(&source_region, size - 3, 1);
    target = guarded_place(&target_region, target_size, 1);
    memcpy(source, data + 3, size - 3);
    result = ss_decompress(codec, source, size - 3, target, target_size);
    if (ss_codec_implementation(codec) == NULL) {
        CHECK(result == SS_NOT_SUPPORTED, "result %d", (int)result);
    } else {
        CHECK(result == SS_OK || result == SS_BAD_DATA, "result %d", (int)result);
    }
    if (codec == SS_CODEC_DEFLATE) {
        check_turns(source, size - 3, target, target_size, result);
    }
    if (codec == SS_CODEC_DEFLATE && result == SS_OK && target_size != 0 &&
        zlib_inflate(source, size - 3, reference, target_size) == target_size) {
        CHECK(memcmp(reference, target, target_size) == 0, "zlib decodes this stream to other bytes");
    }
    return 0;
}
