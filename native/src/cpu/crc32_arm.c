/* SPDX-License-Identifier: Apache-2.0 */
/*
 * crc32_arm.c - CRC-32 by the instructions that Arm has for it
 *
 * The libraries multiply without carries, for which a CPU needs the cryptographic extension: some BlueField parts lack
 * it, and the libraries then look bytes up one by one. The CRC-32 instructions are in all of them.
 *
 * crc32x takes eight bytes, one each cycle, but two cycles until its result is there. So two stretches of data are
 * taken side by side, each with a state of its own. The state of the first then has to go past the second: that is
 * linear, so it is the sum (exclusive or) of what becomes of its eight half-bytes, which a table has. This prints it:
 *
 *   import zlib
 *   for nibble in range(8):
 *       for value in range(16):
 *           state = zlib.crc32(bytes(2048), (value << 4 * nibble) ^ 0xFFFFFFFF) ^ 0xFFFFFFFF
 *           print(f"0x{state:08X}")
 */
#include "cpu/crc32_arm.h"

#ifdef SS_ARCH_AARCH64
#include <string.h>

enum { STRETCH = 2048 };

static const uint32_t past_stretch[8][16] = {
    {0x00000000, 0x88B6BA63, 0xCA1C7287, 0x42AAC8E4, 0x4F49E34F, 0xC7FF592C, 0x855591C8, 0x0DE32BAB, 0x9E93C69E,
     0x16257CFD, 0x548FB419, 0xDC390E7A, 0xD1DA25D1, 0x596C9FB2, 0x1BC65756, 0x9370ED35},
    {0x00000000, 0xE6568B7D, 0x17DC10BB, 0xF18A9BC6, 0x2FB82176, 0xC9EEAA0B, 0x386431CD, 0xDE32BAB0, 0x5F7042EC,
     0xB926C991, 0x48AC5257, 0xAEFAD92A, 0x70C8639A, 0x969EE8E7, 0x67147321, 0x8142F85C},
    {0x00000000, 0xBEE085D8, 0xA6B00DF1, 0x18508829, 0x96111DA3, 0x28F1987B, 0x30A11052, 0x8E41958A, 0xF7533D07,
     0x49B3B8DF, 0x51E330F6, 0xEF03B52E, 0x614220A4, 0xDFA2A57C, 0xC7F22D55, 0x7912A88D},
    {0x00000000, 0x35D77C4F, 0x6BAEF89E, 0x5E7984D1, 0xD75DF13C, 0xE28A8D73, 0xBCF309A2, 0x892475ED, 0x75CAE439,
     0x401D9876, 0x1E641CA7, 0x2BB360E8, 0xA2971505, 0x9740694A, 0xC939ED9B, 0xFCEE91D4},
    {0x00000000, 0xEB95C872, 0x0C5A96A5, 0xE7CF5ED7, 0x18B52D4A, 0xF320E538, 0x14EFBBEF, 0xFF7A739D, 0x316A5A94,
     0xDAFF92E6, 0x3D30CC31, 0xD6A50443, 0x29DF77DE, 0xC24ABFAC, 0x2585E17B, 0xCE102909},
    {0x00000000, 0x62D4B528, 0xC5A96A50, 0xA77DDF78, 0x5023D2E1, 0x32F767C9, 0x958AB8B1, 0xF75E0D99, 0xA047A5C2,
     0xC29310EA, 0x65EECF92, 0x073A7ABA, 0xF0647723, 0x92B0C20B, 0x35CD1D73, 0x5719A85B},
    {0x00000000, 0x9BFE4DC5, 0xEC8D9DCB, 0x7773D00E, 0x026A3DD7, 0x99947012, 0xEEE7A01C, 0x7519EDD9, 0x04D47BAE,
     0x9F2A366B, 0xE859E665, 0x73A7ABA0, 0x06BE4679, 0x9D400BBC, 0xEA33DBB2, 0x71CD9677},
    {0x00000000, 0x09A8F75C, 0x1351EEB8, 0x1AF919E4, 0x26A3DD70, 0x2F0B2A2C, 0x35F233C8, 0x3C5AC494, 0x4D47BAE0,
     0x44EF4DBC, 0x5E165458, 0x57BEA304, 0x6BE46790, 0x624C90CC, 0x78B58928, 0x711D7E74},
};

/* Assembly, as what intrinsics need differs from compiler to compiler. */
static inline uint32_t crc_of_eight(uint32_t crc, const uint8_t *data) {
    uint64_t word;
    memcpy(&word, data, sizeof word);
    __asm__(".arch_extension crc\n\tcrc32x %w0, %w1, %x2" : "=r"(crc) : "r"(crc), "r"(word));
    return crc;
}

static inline uint32_t crc_of_one(uint32_t crc, uint8_t byte) {
    __asm__(".arch_extension crc\n\tcrc32b %w0, %w1, %w2" : "=r"(crc) : "r"(crc), "r"(byte));
    return crc;
}

static inline uint32_t skip_stretch(uint32_t crc) {
    uint32_t sum = 0;
    for (int nibble = 0; nibble < 8; nibble++) {
        sum ^= past_stretch[nibble][crc >> 4 * nibble & 15];
    }
    return sum;
}

uint32_t ss_crc32_arm(uint32_t crc, const uint8_t *data, size_t size) {
    crc = ~crc;
    for (; size >= 2 * STRETCH; size -= 2 * STRETCH, data += 2 * STRETCH) {
        uint32_t of_second = 0;
        for (size_t at = 0; at < STRETCH; at += 32) {
            for (size_t word = at; word < at + 32; word += 8) {
                crc = crc_of_eight(crc, data + word);
                of_second = crc_of_eight(of_second, data + STRETCH + word);
            }
        }
        crc = skip_stretch(crc) ^ of_second;
    }
    for (; size >= 8; size -= 8, data += 8) {
        crc = crc_of_eight(crc, data);
    }
    for (; size > 0; size--, data++) {
        crc = crc_of_one(crc, *data);
    }
    return ~crc;
}
#else
typedef int ss_crc32_arm_unused; /* ISO C wants a declaration in every file */
#endif
