/* SPDX-License-Identifier: Apache-2.0 */
/*
 * crc32.c - CRC-32 (IEEE 802.3, reflected)
 *
 * Folding with carry-less multiplication is well done elsewhere: ISA-L, else libdeflate, else zlib, chosen when the
 * build is configured. All three pick an implementation for the CPU at run time by themselves, so ss_isa_force() does
 * not reach them; but it chooses between them and Arm's CRC-32 instructions (crc32_arm.c). zlib takes its length as a
 * 32-bit integer, so its input is cut into pieces.
 */
#include "cpu/crc32_arm.h"

#if defined(SS_CRC32_ISAL)
#include <isa-l/crc.h>
#elif defined(SS_CRC32_LIBDEFLATE)
#include <libdeflate.h>
#elif defined(SS_CRC32_ZLIB)
#include <zlib.h>
#else
#error "no CRC-32 was configured"
#endif

uint32_t ss_crc32(uint32_t crc, const void *data, size_t size) {
    if (size == 0) {
        return crc;
    }
#ifdef SS_ARCH_AARCH64
    if (ss_isa_active() == SS_ISA_NEON_CRC) {
        return ss_crc32_arm(crc, data, size);
    }
#endif
#if defined(SS_CRC32_ISAL)
    return crc32_gzip_refl(crc, data, size);
#elif defined(SS_CRC32_LIBDEFLATE)
    return libdeflate_crc32(crc, data, size);
#else
    const uint8_t *cursor = data;
    while (size > 0) {
        uInt piece = size > (1u << 30) ? 1u << 30 : (uInt)size;
        crc = (uint32_t)crc32(crc, cursor, piece);
        cursor += piece;
        size -= piece;
    }
    return crc;
#endif
}
