/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_kvrans.c - any bytes, given to kvrans's decoder
 *
 * Invariants: the result is SS_OK or SS_BAD_DATA; nothing outside source and target is touched, both of which end at a
 * guard page; every variant of the kernels comes to the same result, and to the same bytes where that is SS_OK.
 *
 * Input: three bytes for the target's size, then the stream.
 */
#include "check.h"
#include "shadowserve.h"

enum { TARGET_MAX = 1 << 18, SOURCE_MAX = 1 << 18 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct guarded source_region, target_region;
    static uint8_t reference[TARGET_MAX];
    enum ss_result expected = SS_OK;
    size_t target_size;

    if (size < 3 || size - 3 > SOURCE_MAX)
        return -1;
    if (source_region.map == NULL) {
        source_region = guarded_make(SOURCE_MAX);
        target_region = guarded_make(TARGET_MAX);
    }
    target_size = ((size_t)data[0] << 16 | (size_t)data[1] << 8 | data[2]) % TARGET_MAX;
    for (enum ss_isa isa = SS_ISA_SCALAR; isa <= SS_ISA_NEON_CRC; isa++) {
        uint8_t *source = guarded_place(&source_region, size - 3, 1);
        uint8_t *target = guarded_place(&target_region, target_size, 1);
        enum ss_result result;
        if (ss_isa_force(isa) != SS_OK)
            continue;
        memcpy(source, data + 3, size - 3);
        result = ss_decompress(SS_CODEC_KVRANS, source, size - 3, target, target_size);
        CHECK(result == SS_OK || result == SS_BAD_DATA, "isa %d: result %d", (int)isa, (int)result);
        if (isa == SS_ISA_SCALAR) {
            expected = result;
            memcpy(reference, target, target_size);
        }
        CHECK(result == expected, "isa %d: result %d, scalar %d", (int)isa, (int)result, (int)expected);
        CHECK(result != SS_OK || memcmp(target, reference, target_size) == 0, "isa %d: other bytes", (int)isa);
    }
    return 0;
}
