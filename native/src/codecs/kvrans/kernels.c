/* SPDX-License-Identifier: Apache-2.0 */
/* kernels.c - which kernels of kvrans this CPU has */
#include "codecs/kvrans/kvrans.h"

#ifdef SS_ARCH_X86_64
/* byte_permutes_available() returns whether bytes can be looked up in and compressed into whole registers. */
static int byte_permutes_available(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
           __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("gfni");
}
#endif

const struct ss_kvrans_kernels *ss_kvrans_kernels_find(enum ss_isa isa) {
#ifdef SS_ARCH_X86_64
    if (isa == SS_ISA_AVX512 && byte_permutes_available()) {
        return &ss_kvrans_kernels_avx512;
    }
    if (isa == SS_ISA_AVX512 || isa == SS_ISA_AVX2) {
        return &ss_kvrans_kernels_avx2;
    }
#endif
#ifdef SS_ARCH_AARCH64
    if (isa == SS_ISA_NEON) {
        return &ss_kvrans_kernels_neon;
    }
#endif
    (void)isa;
    return &ss_kvrans_kernels_scalar;
}
