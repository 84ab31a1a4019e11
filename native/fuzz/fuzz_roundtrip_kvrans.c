/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_roundtrip_kvrans.c - any bytes in rows of any length, encoded by kvrans
 *
 * Invariants: the encoder stays within its bound; exactly the stream's size is enough space and one byte less is not;
 * every variant of the kernels writes the same stream and gives the input back.
 *
 * Input: two bytes for the length of a row, one for how often the rest is repeated, one that is added to each
 * repetition times its number, then the data.
 */
#include "check.h"
#include "shadowserve.h"

enum { PLAIN_MAX = 1 << 16 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static uint8_t plain[PLAIN_MAX], back[PLAIN_MAX], stream[2 * PLAIN_MAX], again[2 * PLAIN_MAX];
    size_t plain_size = 0, row_length, bound, first = 0, written;

    if (size < 4) {
        return -1;
    }
    row_length = (size_t)data[0] << 8 | data[1];
    for (size_t repetition = 0; repetition <= data[2]; repetition++) {
        for (size_t index = 4; index < size && plain_size < PLAIN_MAX; index++) {
            plain[plain_size++] = (uint8_t)(data[index] + data[3] * repetition);
        }
    }
    bound = ss_compress_bound(SS_CODEC_KVRANS, plain_size);
    FOR_EACH_ISA (isa) {
        uint8_t *target = isa == SS_ISA_SCALAR ? stream : again;
        CHECK(ss_compress(SS_CODEC_KVRANS, plain, plain_size, row_length, target, bound, &written) == SS_OK,
              "compress");
        first = isa == SS_ISA_SCALAR ? written : first;
        CHECK(written == first && memcmp(stream, target, first) == 0, "isa %d writes another stream", (int)isa);
        memset(back, 0xA5, plain_size);
        CHECK(ss_decompress(SS_CODEC_KVRANS, target, written, back, plain_size) == SS_OK, "isa %d", (int)isa);
        CHECK(memcmp(plain, back, plain_size) == 0, "isa %d makes other bytes of it", (int)isa);
    }
    CHECK(ss_compress(SS_CODEC_KVRANS, plain, plain_size, row_length, again, first, &written) == SS_OK, "exact space");
    CHECK(ss_compress(SS_CODEC_KVRANS, plain, plain_size, row_length, again, first - 1, &written) == SS_NO_SPACE,
          "no space");
    return 0;
}
