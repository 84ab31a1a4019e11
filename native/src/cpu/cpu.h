/* SPDX-License-Identifier: Apache-2.0 */
/* cpu.h - which instruction set the kernels use; see cpu.c */
#ifndef SS_CPU_H
#define SS_CPU_H

#include "shadowserve.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define SS_ARCH_X86_64 1
#elif defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))
#define SS_ARCH_AARCH64 1
#endif

#define SS_ABI_VERSION 18

/* ss_streams_order() orders this thread's streaming stores before all that it does next. */
static inline void ss_streams_order(void) {
#ifdef SS_ARCH_X86_64
    __builtin_ia32_sfence();
#endif
}

#endif /* SS_CPU_H */
