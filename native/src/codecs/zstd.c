/* SPDX-License-Identifier: Apache-2.0 */
/* zstd.c - one Zstandard frame, by libzstd, at level 1: quantized KV has few matches for higher ones to find. */
#include "codecs/codec.h"

#include <zstd.h>
#include <zstd_errors.h>

#define LEVEL 1

static size_t zstd_compress_bound(size_t size) {
    return ZSTD_compressBound(size);
}

static enum ss_result zstd_compress(const uint8_t *source, size_t size, size_t row_length, uint8_t *target,
                                    size_t target_size, size_t *written) {
    (void)row_length;
    struct ss_codec_state *state = ss_codec_state();
    size_t result;

    if (state == NULL) {
        return SS_NO_MEMORY;
    }
    if (state->zstd_encoder == NULL && (state->zstd_encoder = ZSTD_createCCtx()) == NULL) {
        return SS_NO_MEMORY;
    }
    result = ZSTD_compressCCtx(state->zstd_encoder, target, target_size, source, size, LEVEL);
    if (ZSTD_isError(result)) {
        return ZSTD_getErrorCode(result) == ZSTD_error_memory_allocation ? SS_NO_MEMORY : SS_NO_SPACE;
    }
    *written = result;
    return SS_OK;
}

static enum ss_result zstd_decompress(const uint8_t *source, size_t size, uint8_t *target, size_t target_size) {
    struct ss_codec_state *state = ss_codec_state();
    size_t result;

    if (state == NULL) {
        return SS_NO_MEMORY;
    }
    if (state->zstd_decoder == NULL && (state->zstd_decoder = ZSTD_createDCtx()) == NULL) {
        return SS_NO_MEMORY;
    }
    /* The library would go on with further frames, and skip skippable ones; a slice is one frame and nothing more. */
    result = ZSTD_findFrameCompressedSize(source, size);
    if (ZSTD_isError(result) || result != size) {
        return SS_BAD_DATA;
    }
    result = ZSTD_decompressDCtx(state->zstd_decoder, target, target_size, source, size);
    if (ZSTD_isError(result)) {
        return ZSTD_getErrorCode(result) == ZSTD_error_memory_allocation ? SS_NO_MEMORY : SS_BAD_DATA;
    }
    return result == target_size ? SS_OK : SS_BAD_DATA;
}

static void zstd_state_free(struct ss_codec_state *state) {
    ZSTD_freeDCtx(state->zstd_decoder);
    ZSTD_freeCCtx(state->zstd_encoder);
}

const struct ss_codec_functions ss_codec_zstd = {
    .implementation = "zstd " ZSTD_VERSION_STRING,
    .compress_bound = zstd_compress_bound,
    .compress = zstd_compress,
    .decompress = zstd_decompress,
    .state_free = zstd_state_free,
};
