/* SPDX-License-Identifier: Apache-2.0 */
/*
 * deflate.c - raw Deflate: our encoder, our decoder of what it writes, and a library for everything else
 *
 * Streams without matches, such as ours, are decoded several at a time by literal_inflate.c, twice as fast as ISA-L
 * decodes them one after the other. If it rejects a stream, a library decodes it from the beginning: streams of other
 * encoders, and damaged ones, for which the library's result counts.
 *
 * The library is chosen when the build is configured: ISA-L (twice as fast as the others on Huffman-only streams), else
 * libdeflate, else zlib. All of them bound every access by the two sizes; this file adds that the stream must
 * end exactly where the source and the target end.
 */
#include "codecs/codec.h"
#include "codecs/huffman_deflate.h"
#include "codecs/literal_inflate.h"

#include <stdlib.h>

#define TEXT_OF(macro) #macro
#define TEXT(macro) TEXT_OF(macro)

#if defined(SS_DEFLATE_ISAL)
#include <isa-l.h>

#define IMPLEMENTATION "isa-l " TEXT(ISAL_MAJOR_VERSION) "." TEXT(ISAL_MINOR_VERSION) "." TEXT(ISAL_PATCH_VERSION)

static enum ss_result library_decompress(const uint8_t *source, size_t size, uint8_t *target, size_t target_size) {
    struct ss_codec_state *state = ss_codec_state();
    struct inflate_state *decoder;
    int result;

    if (state == NULL) {
        return SS_NO_MEMORY;
    }
    if (state->deflate_decoder == NULL && (state->deflate_decoder = calloc(1, sizeof *decoder)) == NULL) {
        return SS_NO_MEMORY;
    }
    decoder = state->deflate_decoder;
    isal_inflate_init(decoder);
    decoder->crc_flag = ISAL_DEFLATE;
    decoder->next_in = (uint8_t *)source;
    decoder->avail_in = (uint32_t)size;
    decoder->next_out = target;
    decoder->avail_out = (uint32_t)target_size;
    result = isal_inflate_stateless(decoder);
    return result == ISAL_DECOMP_OK && decoder->block_state == ISAL_BLOCK_FINISH && decoder->avail_in == 0 &&
                   decoder->avail_out == 0
               ? SS_OK
               : SS_BAD_DATA;
}

static void library_state_free(struct ss_codec_state *state) {
    free(state->deflate_decoder);
}

#elif defined(SS_DEFLATE_LIBDEFLATE)
#include <libdeflate.h>

#define IMPLEMENTATION "libdeflate " LIBDEFLATE_VERSION_STRING

static enum ss_result library_decompress(const uint8_t *source, size_t size, uint8_t *target, size_t target_size) {
    struct ss_codec_state *state = ss_codec_state();
    size_t used = 0, made = 0;
    enum libdeflate_result result;

    if (state == NULL) {
        return SS_NO_MEMORY;
    }
    if (state->deflate_decoder == NULL && (state->deflate_decoder = libdeflate_alloc_decompressor()) == NULL) {
        return SS_NO_MEMORY;
    }
    result = libdeflate_deflate_decompress_ex(state->deflate_decoder, source, size, target, target_size, &used, &made);
    return result == LIBDEFLATE_SUCCESS && used == size && made == target_size ? SS_OK : SS_BAD_DATA;
}

static void library_state_free(struct ss_codec_state *state) {
    libdeflate_free_decompressor(state->deflate_decoder);
}

#elif defined(SS_DEFLATE_ZLIB)
#include <zlib.h>

#define IMPLEMENTATION "zlib " ZLIB_VERSION
#define RAW_DEFLATE (-15)

/* deflate_decoder() returns this thread's decoder, ready for a new stream, or NULL without memory. */
static z_stream *deflate_decoder(struct ss_codec_state *state) {
    z_stream *decoder = state->deflate_decoder;

    if (decoder != NULL) {
        return inflateReset(decoder) == Z_OK ? decoder : NULL;
    }
    decoder = calloc(1, sizeof *decoder);
    if (decoder != NULL && inflateInit2(decoder, RAW_DEFLATE) != Z_OK) {
        free(decoder);
        decoder = NULL;
    }
    state->deflate_decoder = decoder;
    return decoder;
}

static enum ss_result library_decompress(const uint8_t *source, size_t size, uint8_t *target, size_t target_size) {
    struct ss_codec_state *state = ss_codec_state();
    z_stream *decoder = state != NULL ? deflate_decoder(state) : NULL;
    int result;

    if (decoder == NULL) {
        return SS_NO_MEMORY;
    }
    decoder->next_in = (Bytef *)source;
    decoder->avail_in = (uInt)size;
    decoder->next_out = target;
    decoder->avail_out = (uInt)target_size;
    result = inflate(decoder, Z_FINISH);
    if (result == Z_MEM_ERROR) {
        return SS_NO_MEMORY;
    }
    return result == Z_STREAM_END && decoder->avail_in == 0 && decoder->avail_out == 0 ? SS_OK : SS_BAD_DATA;
}

static void library_state_free(struct ss_codec_state *state) {
    if (state->deflate_decoder != NULL) {
        inflateEnd(state->deflate_decoder);
    }
    free(state->deflate_decoder);
}

#else
#error "no Deflate decoder was configured"
#endif

static enum ss_result deflate_compress(const uint8_t *source, size_t size, size_t row_length, uint8_t *target,
                                       size_t target_size, size_t *written) {
    (void)row_length;
    return ss_huffman_deflate(source, size, target, target_size, written);
}

static void deflate_decompress_many(struct ss_stream *streams, size_t count) {
    struct ss_codec_state *state = ss_codec_state();

    if (state != NULL && state->deflate_inflater == NULL) {
        state->deflate_inflater = ss_literal_inflater_create();
    }
    if (state != NULL && state->deflate_inflater != NULL) {
        ss_literal_inflate(state->deflate_inflater, streams, count);
    }
    for (size_t index = 0; index < count; index++) {
        struct ss_stream *stream = &streams[index];
        if (stream->result == SS_NOT_SUPPORTED) {
            stream->result =
                library_decompress(stream->source, stream->source_size, stream->target, stream->target_size);
        }
    }
}

static void deflate_state_free(struct ss_codec_state *state) {
    free(state->deflate_inflater);
    library_state_free(state);
}

const struct ss_codec_functions ss_codec_deflate = {
    .implementation = IMPLEMENTATION,
    .compress_bound = ss_huffman_deflate_bound,
    .compress = deflate_compress,
    .decompress_many = deflate_decompress_many,
    .state_free = deflate_state_free,
};
