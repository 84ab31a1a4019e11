/* SPDX-License-Identifier: Apache-2.0 */
/* zlib_reference.h - raw Deflate by zlib, which tests and fuzzers compare with */
#ifndef SS_ZLIB_REFERENCE_H
#define SS_ZLIB_REFERENCE_H

#include <zlib.h>

#include "check.h"

enum { ZLIB_RAW_DEFLATE = -15 };

/* zlib_inflate() returns the bytes that a stream decodes to; SIZE_MAX if they do not fit, or it is not one whole
 * stream.
 */
static inline size_t zlib_inflate(const uint8_t *source, size_t size, uint8_t *target, size_t target_size) {
    z_stream decoder = {.next_in = (Bytef *)(uintptr_t)source,
                        .avail_in = (uInt)size,
                        .next_out = target,
                        .avail_out = (uInt)target_size};
    CHECK(inflateInit2(&decoder, ZLIB_RAW_DEFLATE) == Z_OK);
    int result = inflate(&decoder, Z_FINISH);
    inflateEnd(&decoder);
    return result == Z_STREAM_END && decoder.avail_in == 0 ? decoder.total_out : SIZE_MAX;
}

/* zlib_deflate() returns the size of the stream. 'flush_every': bytes between empty stored blocks; 0: none. */
static inline size_t zlib_deflate(const uint8_t *source, size_t size, uint8_t *target, size_t target_size, int level,
                                  int strategy, size_t flush_every) {
    z_stream encoder = {.next_in = (Bytef *)(uintptr_t)source, .next_out = target, .avail_out = (uInt)target_size};
    CHECK(deflateInit2(&encoder, level, Z_DEFLATED, ZLIB_RAW_DEFLATE, 8, strategy) == Z_OK);
    for (size_t left = size; flush_every != 0 && left > flush_every; left -= flush_every) {
        encoder.avail_in = (uInt)flush_every;
        CHECK(deflate(&encoder, Z_FULL_FLUSH) == Z_OK && encoder.avail_in == 0);
    }
    encoder.avail_in = (uInt)(size - encoder.total_in);
    CHECK(deflate(&encoder, Z_FINISH) == Z_STREAM_END);
    deflateEnd(&encoder);
    return encoder.total_out;
}

#endif /* SS_ZLIB_REFERENCE_H */
