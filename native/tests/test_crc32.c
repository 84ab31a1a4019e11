/* SPDX-License-Identifier: Apache-2.0 */
/* ss_crc32() equals zlib's crc32 at every size, alignment and split, and reads nothing outside its input. */
#include "check.h"
#include "shadowserve.h"

#include <zlib.h>

enum { SIZE_MAX_TESTED = 20000 };

static void check_at(const uint8_t *data, size_t size) {
    uint32_t expected = (uint32_t)crc32(0, data, (uInt)size);
    uint32_t seed = (uint32_t)random64();
    size_t split = random_below(size + 1);

    CHECK(ss_crc32(0, data, size) == expected, "size %zu at %p", size, (const void *)data);
    CHECK(ss_crc32(ss_crc32(0, data, split), data + split, size - split) == expected, "size %zu split at %zu", size,
          split);
    CHECK(ss_crc32(seed, data, size) == (uint32_t)crc32(seed, data, (uInt)size), "size %zu seed %08x", size, seed);
}

int main(void) {
    struct guarded region = guarded_make(SIZE_MAX_TESTED);

    random_fill(region.start, (size_t)(region.end - region.start));
    CHECK(ss_crc32(0, "123456789", 9) == 0xCBF43926, "the check value of CRC-32/ISO-HDLC");
    CHECK(ss_crc32(0x12345678, NULL, 0) == 0x12345678, "nothing to add");
    for (size_t size = 0; size <= 1100; size++) {
        check_at(guarded_place(&region, size, 1), size);
        check_at(guarded_place(&region, size, 0), size);
        check_at(region.start + size % 64 + 1, size);
    }
    for (int trial = 0; trial < 2000; trial++) {
        size_t size = random_below(SIZE_MAX_TESTED);
        check_at(guarded_place(&region, size, (int)random_below(2)), size);
    }
    guarded_free(&region);
    return 0;
}
