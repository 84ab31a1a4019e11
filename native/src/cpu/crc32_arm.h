/* SPDX-License-Identifier: Apache-2.0 */
/* crc32_arm.h - CRC-32 by the instructions that Arm has for it; see crc32_arm.c */
#ifndef SS_CRC32_ARM_H
#define SS_CRC32_ARM_H

#include "cpu/cpu.h"

#include <stddef.h>

#ifdef SS_ARCH_AARCH64
/* ss_crc32_arm() is ss_crc32(), for CPUs with SS_ISA_NEON_CRC. */
uint32_t ss_crc32_arm(uint32_t crc, const uint8_t *data, size_t size);
#endif

#endif /* SS_CRC32_ARM_H */
