/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The best instruction set that the CPU has is the default, and one that it lacks is refused.
 */
#include "check.h"
#include "shadowserve.h"

int main(void) {
    static const enum ss_isa best_first[] = {SS_ISA_AVX512, SS_ISA_AVX2, SS_ISA_NEON, SS_ISA_SCALAR};
    size_t best = 0;

    while (!ss_isa_available(best_first[best])) {
        best++;
    }
    CHECK(ss_isa_active() == best_first[best], "%d is active, not %d", (int)ss_isa_active(), (int)best_first[best]);
    CHECK(ss_crc32(0, "123456789", 9) == 0xCBF43926, "the check value of CRC-32/ISO-HDLC");
    for (size_t index = 0; index < COUNT_OF(best_first); index++) {
        const enum ss_isa before = ss_isa_active(), isa = best_first[index];
        const enum ss_result result = ss_isa_force(isa);
        CHECK(result == (ss_isa_available(isa) ? SS_OK : SS_NOT_SUPPORTED), "%d: %d", (int)isa, (int)result);
        CHECK(ss_isa_active() == (result == SS_OK ? isa : before), "%d", (int)isa);
    }
    return 0;
}
