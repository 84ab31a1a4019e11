/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_roundtrip_deflate.c - any bytes, encoded
 *
 * Invariants: the encoder stays within its bound; exactly the stream's size is enough space and one byte less is not;
 * our decoder and zlib both give the input back.
 *
 * Input: one byte for how often the rest is repeated (so that blocks get long enough to be coded), one that is added
 * to each repetition times its number, then the data.
 */
#include "shadowserve.h"
#include "zlib_reference.h"

enum { PLAIN_MAX = 1 << 18 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static uint8_t plain[PLAIN_MAX], back[PLAIN_MAX + 1];
    size_t plain_size = 0, bound, written, again;
    uint8_t *stream, *exact;

    if (size < 2) {
        return -1;
    }
    for (size_t repetition = 0; repetition <= data[0]; repetition++) {
        for (size_t index = 2; index < size && plain_size < PLAIN_MAX; index++) {
            plain[plain_size++] = (uint8_t)(data[index] + data[1] * repetition);
        }
    }
    bound = ss_compress_bound(SS_CODEC_DEFLATE, plain_size);
    stream = malloc(bound);
    CHECK(stream != NULL, "no memory");
    CHECK(ss_compress(SS_CODEC_DEFLATE, plain, plain_size, 0, stream, bound, &written) == SS_OK, "compress");
    CHECK(ss_decompress(SS_CODEC_DEFLATE, stream, written, back, plain_size) == SS_OK, "decompress");
    CHECK(memcmp(plain, back, plain_size) == 0, "we make other bytes of it");
    CHECK(zlib_inflate(stream, written, back, sizeof back) == plain_size, "zlib rejects the stream");
    CHECK(memcmp(back, plain, plain_size) == 0, "zlib makes other bytes of it");
    exact = malloc(written);
    CHECK(exact != NULL, "no memory");
    CHECK(ss_compress(SS_CODEC_DEFLATE, plain, plain_size, 0, exact, written, &again) == SS_OK && again == written &&
              memcmp(exact, stream, written) == 0,
          "exact space");
    CHECK(ss_compress(SS_CODEC_DEFLATE, plain, plain_size, 0, exact, written - 1, &again) == SS_NO_SPACE, "no space");
    free(stream);
    free(exact);
    return 0;
}
