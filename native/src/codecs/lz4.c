/* SPDX-License-Identifier: Apache-2.0 */
/* lz4.c - LZ4's block format, by liblz4. Encoding keeps its 16 KiB of state on the stack, decoding has none. */
#include "codecs/codec.h"

#include <lz4.h>

static size_t lz4_compress_bound(size_t size) {
    return (size_t)LZ4_compressBound((int)size);
}

static enum ss_result lz4_compress(const uint8_t *source, size_t size, size_t row_length, uint8_t *target,
                                   size_t target_size, size_t *written) {
    (void)row_length;
    int capacity = target_size > SS_CODEC_SIZE_MAX ? (int)SS_CODEC_SIZE_MAX : (int)target_size;
    int result = LZ4_compress_default((const char *)source, (char *)target, (int)size, capacity);

    if (result <= 0) {
        return SS_NO_SPACE;
    }
    *written = (size_t)result;
    return SS_OK;
}

static enum ss_result lz4_decompress(const uint8_t *source, size_t size, uint8_t *target, size_t target_size) {
    /* A block has no end marker: it ends with its last byte, so none can be left over. */
    int result = LZ4_decompress_safe((const char *)source, (char *)target, (int)size, (int)target_size);
    return result >= 0 && (size_t)result == target_size ? SS_OK : SS_BAD_DATA;
}

const struct ss_codec_functions ss_codec_lz4 = {
    .implementation = "lz4 " LZ4_VERSION_STRING,
    .compress_bound = lz4_compress_bound,
    .compress = lz4_compress,
    .decompress = lz4_decompress,
};
