/* SPDX-License-Identifier: Apache-2.0 */
/*
 * crc32.c - CRC-32 (IEEE 802.3, reflected)
 *
 * A library computes it: ISA-L, libdeflate or zlib, chosen when the build is configured (dependencies.cmake). Each
 * picks an implementation for the CPU at run time, so ss_isa_force() has no effect on it. On Arm libdeflate comes
 * first: it uses the CRC-32 instructions, where ISA-L needs the cryptographic extension, which some BlueField CPUs
 * lack.
 *
 * zlib takes its length as a 32-bit integer, so its input is cut into pieces.
 */
#include <stddef.h>

#include "cpu/cpu.h"

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
