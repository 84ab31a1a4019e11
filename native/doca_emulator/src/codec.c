/* SPDX-License-Identifier: Apache-2.0 */
/*
 * codec.c - what is decompressed, and how
 *
 * Deflate and checksums come from the library that the C core was configured with, LZ4's blocks from liblz4. A task is
 * one whole stream: bytes behind its end are an error. DOCA does not document the card's behaviour for such bytes, so a
 * program must not depend on it.
 */
#include <stdlib.h>

#include "emulator.h"

#ifdef SS_HAVE_LZ4
#include <lz4.h>
#endif

/* ---- Raw Deflate, CRC-32 -------------------------------------------------------------------------------------- */

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

#else
#error "no Deflate decoder was configured"
#endif

/* ---- LZ4 ------------------------------------------------------------------------------------------------------ */

#ifdef SS_HAVE_LZ4
bool codec_has_lz4(void) {
    return true;
}

static bool lz4_block(const uint8_t *source, size_t size, uint8_t *target, size_t capacity, size_t *produced) {
    int result = LZ4_decompress_safe((const char *)source, (char *)target, (int)size, (int)capacity);
    *produced = result >= 0 ? (size_t)result : 0;
    return result >= 0;
}
#else
bool codec_has_lz4(void) {
    return false;
}

static bool lz4_block(const uint8_t *source, size_t size, uint8_t *target, size_t capacity, size_t *produced) {
    (void)source, (void)size, (void)target, (void)capacity;
    *produced = 0;
    return false;
}
#endif

/* ---- Tasks ---------------------------------------------------------------------------------------------------- */

bool codec_decompress(struct doca_task *task, const uint8_t *source, size_t size, uint8_t *target, size_t capacity) {
    size_t produced = 0;
    bool good = task->kind == TASK_DEFLATE ? inflate_whole(source, size, target, capacity, &produced)
                                           : lz4_block(source, size, target, capacity, &produced);
    if (good) {
        task->produced = produced;
        task->crc32 = codec_crc32(target, produced);
    }
    return good;
}
