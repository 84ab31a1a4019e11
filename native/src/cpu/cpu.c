/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu.c - run-time CPU dispatch
 *
 * One library runs on every CPU of its architecture: each kernel exists in several variants, compiled with
 * per-function target attributes, and the best one that this CPU can run is picked when the first kernel is called.
 * The choice is one atomic integer. Racing first calls compute the same value, so they need no lock.
 *
 * What each variant stands for:
 *   SCALAR    portable C; the reference that all others must match bit for bit
 *   AVX2      AVX2 and F16C (half precision conversion)
 *   AVX512    AVX-512 F, BW, VL, on top of the above
 *   NEON      Advanced SIMD, which every AArch64 CPU has (its base half precision conversions, not
 *             Armv8.2's fp16)
 */
#include "cpu/cpu.h"

#include <stdatomic.h>

#ifdef SS_ARCH_X86_64
#include <cpuid.h>
#endif

#define ISA_UNKNOWN (-1)

static atomic_int active_isa = ISA_UNKNOWN;

uint32_t ss_abi_version(void) {
    return SS_ABI_VERSION;
}

#ifdef SS_ARCH_X86_64
/*
 * extras_available() asks CPUID itself: not every supported compiler knows "f16c" in __builtin_cpu_supports(). Once: a
 * virtual machine leaves its guest to answer, which takes longer than most kernels.
 */
static int extras_available(void) {
    static atomic_int known = ISA_UNKNOWN;
    int available = atomic_load_explicit(&known, memory_order_relaxed);
    if (available == ISA_UNKNOWN) {
        const unsigned extras = bit_F16C | bit_FMA;
        unsigned eax, ebx, ecx, edx;
        available = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & extras) == extras;
        atomic_store_explicit(&known, available, memory_order_relaxed);
    }
    return available;
}
#endif

int ss_isa_available(enum ss_isa isa) {
    switch (isa) {
    case SS_ISA_SCALAR:
        return 1;
#ifdef SS_ARCH_X86_64
    /* __builtin_cpu_supports() also checks that the operating system saves the registers. */
    case SS_ISA_AVX2:
        __builtin_cpu_init();
        return __builtin_cpu_supports("avx2") && extras_available();
    case SS_ISA_AVX512:
        return ss_isa_available(SS_ISA_AVX2) && __builtin_cpu_supports("avx512f") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#endif
#ifdef SS_ARCH_AARCH64
    case SS_ISA_NEON:
        return 1;
#endif
    default:
        return 0;
    }
}

enum ss_isa ss_isa_active(void) {
    static const enum ss_isa best_first[] = {SS_ISA_AVX512, SS_ISA_AVX2, SS_ISA_NEON, SS_ISA_SCALAR};
    int isa = atomic_load_explicit(&active_isa, memory_order_relaxed);

    if (isa == ISA_UNKNOWN) {
        for (unsigned index = 0; isa == ISA_UNKNOWN; index++) {
            if (ss_isa_available(best_first[index])) {
                isa = (int)best_first[index];
            }
        }
        atomic_store_explicit(&active_isa, isa, memory_order_relaxed);
    }
    return (enum ss_isa)isa;
}

enum ss_result ss_isa_force(enum ss_isa isa) {
    if (!ss_isa_available(isa)) {
        return SS_NOT_SUPPORTED;
    }
    atomic_store_explicit(&active_isa, (int)isa, memory_order_relaxed);
    return SS_OK;
}
