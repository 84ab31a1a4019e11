/* SPDX-License-Identifier: Apache-2.0 */
/*
 * codec.c - what the decompression engine decodes
 *
 * Deflate and checksums come from the library that the C core was configured with, LZ4's blocks from liblz4. A task is
 * one whole stream: bytes behind its end are an error. What a card does with them is not documented, and a program that
 * sends them depends on it.
 */
#include <stdlib.h>
#include <string.h>

#include "emulator.h"

#ifdef SS_HAVE_LZ4
#include <lz4.h>
#endif

/* ---- Raw Deflate, CRC-32, Adler-32 ---------------------------------------------------------------------------- */

#if defined(SS_DEFLATE_ISAL)
#include <isa-l.h>

static bool inflate_whole(const uint8_t *source, size_t size, uint8_t *target, size_t capacity, size_t *produced) {
    struct inflate_state *decoder = malloc(sizeof *decoder);
    if (decoder == NULL) {
        return false;
    }
    isal_inflate_init(decoder);
    decoder->crc_flag = ISAL_DEFLATE;
    decoder->next_in = (uint8_t *)(uintptr_t)source;
    decoder->avail_in = (uint32_t)size;
    decoder->next_out = target;
    decoder->avail_out = (uint32_t)capacity;
    bool good = isal_inflate_stateless(decoder) == ISAL_DECOMP_OK && decoder->block_state == ISAL_BLOCK_FINISH &&
                decoder->avail_in == 0;
    *produced = capacity - decoder->avail_out;
    free(decoder);
    return good;
}

uint32_t codec_crc32(const void *data, size_t size) {
    return crc32_gzip_refl(0, data, size);
}

static uint32_t codec_adler32(const uint8_t *data, size_t size) {
    return isal_adler32(1, data, size);
}

#elif defined(SS_DEFLATE_LIBDEFLATE)
#include <libdeflate.h>

static bool inflate_whole(const uint8_t *source, size_t size, uint8_t *target, size_t capacity, size_t *produced) {
    struct libdeflate_decompressor *decoder = libdeflate_alloc_decompressor();
    size_t used = 0;
    if (decoder == NULL) {
        return false;
    }
    bool good = libdeflate_deflate_decompress_ex(decoder, source, size, target, capacity, &used, produced) ==
                    LIBDEFLATE_SUCCESS &&
                used == size;
    libdeflate_free_decompressor(decoder);
    return good;
}

uint32_t codec_crc32(const void *data, size_t size) {
    return libdeflate_crc32(0, data, size);
}

static uint32_t codec_adler32(const uint8_t *data, size_t size) {
    return libdeflate_adler32(1, data, size);
}

#elif defined(SS_DEFLATE_ZLIB)
#include <zlib.h>

#define RAW_DEFLATE (-15)

static bool inflate_whole(const uint8_t *source, size_t size, uint8_t *target, size_t capacity, size_t *produced) {
    z_stream decoder = {
        .next_in = (Bytef *)(uintptr_t)source, .avail_in = (uInt)size, .next_out = target, .avail_out = (uInt)capacity};
    if (inflateInit2(&decoder, RAW_DEFLATE) != Z_OK) {
        return false;
    }
    bool good = inflate(&decoder, Z_FINISH) == Z_STREAM_END && decoder.avail_in == 0;
    *produced = decoder.total_out;
    inflateEnd(&decoder);
    return good;
}

uint32_t codec_crc32(const void *data, size_t size) {
    return (uint32_t)crc32(0, data, (uInt)size);
}

static uint32_t codec_adler32(const uint8_t *data, size_t size) {
    return (uint32_t)adler32(1, data, (uInt)size);
}

#else
#error "no Deflate decoder was configured"
#endif

/* ---- LZ4 and xxHash-32 ---------------------------------------------------------------------------------------- */

static uint32_t little_endian32(const uint8_t *bytes) {
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static uint32_t rotate(uint32_t value, int bits) {
    return value << bits | value >> (32 - bits);
}

/* xxHash-32 with seed 0, by its specification. */
uint32_t codec_xxh32(const uint8_t *data, size_t size) {
    static const uint32_t prime[] = {2654435761u, 2246822519u, 3266489917u, 668265263u, 374761393u};
    uint32_t lanes[4] = {prime[0] + prime[1], prime[1], 0, 0u - prime[0]}, hash = prime[4];
    size_t left = size;
    for (; left >= 16; left -= 16) {
        for (int lane = 0; lane < 4; lane++, data += 4) {
            lanes[lane] = rotate(lanes[lane] + little_endian32(data) * prime[1], 13) * prime[0];
        }
    }
    if (size >= 16) {
        hash = rotate(lanes[0], 1) + rotate(lanes[1], 7) + rotate(lanes[2], 12) + rotate(lanes[3], 18);
    }
    hash += (uint32_t)size;
    for (; left >= 4; left -= 4, data += 4) {
        hash = rotate(hash + little_endian32(data) * prime[2], 17) * prime[3];
    }
    for (; left > 0; left--, data++) {
        hash = rotate(hash + *data * prime[4], 11) * prime[0];
    }
    hash = (hash ^ hash >> 15) * prime[1];
    hash = (hash ^ hash >> 13) * prime[2];
    return hash ^ hash >> 16;
}

#ifdef SS_HAVE_LZ4
bool codec_has_lz4(void) {
    return true;
}

/* Decodes one block behind 'made' bytes, of which it may use 'history' as its dictionary. */
static bool lz4_block(const uint8_t *source, size_t size, uint8_t *target, size_t capacity, size_t history,
                      size_t *produced) {
    int result = LZ4_decompress_safe_usingDict((const char *)source, (char *)target, (int)size, (int)capacity,
                                               (const char *)target - history, (int)history);
    *produced = result >= 0 ? (size_t)result : 0;
    return result >= 0;
}
#else
bool codec_has_lz4(void) {
    return false;
}

static bool lz4_block(const uint8_t *source, size_t size, uint8_t *target, size_t capacity, size_t history,
                      size_t *produced) {
    (void)source, (void)size, (void)target, (void)capacity, (void)history;
    *produced = 0;
    return false;
}
#endif

/* Blocks, each behind its size, whose highest bit says that it is stored as it is. No frame is around them. */
static bool lz4_stream(const struct doca_task *task, const uint8_t *source, size_t size, uint8_t *target,
                       size_t capacity, size_t *produced) {
    const uint32_t stored = 1u << 31;
    const size_t window = 64 << 10, trailer = task->has_block_checksum ? 4 : 0;
    *produced = 0;
    while (size > 0) {
        uint32_t head = size >= 4 ? little_endian32(source) : 0;
        size_t block = head & ~stored, room = capacity - *produced, made = block;
        if (block == 0 || block > size - 4 || trailer > size - 4 - block) {
            return false;
        }
        const uint8_t *bytes = source + 4;
        if (trailer > 0 && little_endian32(bytes + block) != codec_xxh32(bytes, block)) {
            return false;
        }
        size_t history = task->are_blocks_independent ? 0 : *produced < window ? *produced : window;
        if ((head & stored) == 0 && !lz4_block(bytes, block, target + *produced, room, history, &made)) {
            return false;
        }
        if ((head & stored) != 0) {
            if (block > room) {
                return false;
            }
            memcpy(target + *produced, bytes, block);
        }
        *produced += made;
        source = bytes + block + trailer;
        size -= 4 + block + trailer;
    }
    return true;
}

/* ---- Tasks ---------------------------------------------------------------------------------------------------- */

bool codec_decompress(struct doca_task *task, const uint8_t *source, size_t size, uint8_t *target, size_t capacity) {
    size_t produced = 0;
    bool good = task->kind == TASK_DEFLATE      ? inflate_whole(source, size, target, capacity, &produced)
                : task->kind == TASK_LZ4_STREAM ? lz4_stream(task, source, size, target, capacity, &produced)
                                                : lz4_block(source, size, target, capacity, 0, &produced);
    if (good) {
        task->produced = produced;
        task->crc32 = codec_crc32(target, produced);
        task->other_checksum =
            task->kind == TASK_DEFLATE ? codec_adler32(target, produced) : codec_xxh32(target, produced);
    }
    return good;
}
