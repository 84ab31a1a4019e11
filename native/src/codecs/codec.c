/* SPDX-License-Identifier: Apache-2.0 */
/*
 * codec.c - the codecs behind a few functions
 *
 * kvrans is our own (kvrans/kvrans.c). The work of the others is done by well-kept libraries (deflate.c, lz4.c,
 * zstd.c), but for Deflate without matches: its encoder (huffman_deflate.c) and decoder (literal_inflate.c) are
 * our own, too. This file holds what they share: argument checks, and the state that each thread keeps so that no slice
 * costs an allocation.
 */
#include "codecs/codec.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static size_t none_compress_bound(size_t size) {
    return size;
}

static enum ss_result none_compress(const uint8_t *source, size_t size, size_t row_length, uint8_t *target,
                                    size_t target_size, size_t *written) {
    (void)row_length;
    if (target_size < size) {
        return SS_NO_SPACE;
    }
    memcpy(target, source, size);
    *written = size;
    return SS_OK;
}

static enum ss_result none_decompress(const uint8_t *source, size_t size, uint8_t *target, size_t target_size) {
    if (size != target_size) {
        return SS_BAD_DATA;
    }
    memcpy(target, source, size);
    return SS_OK;
}

static const struct ss_codec_functions codec_none = {
    .implementation = "memcpy",
    .compress_bound = none_compress_bound,
    .compress = none_compress,
    .decompress = none_decompress,
};

static const struct ss_codec_functions *const codecs[] = {
    [SS_CODEC_NONE] = &codec_none,        [SS_CODEC_DEFLATE] = &ss_codec_deflate,
#ifdef SS_HAVE_LZ4
    [SS_CODEC_LZ4] = &ss_codec_lz4,
#endif
#ifdef SS_HAVE_ZSTD
    [SS_CODEC_ZSTD] = &ss_codec_zstd,
#endif
    [SS_CODEC_KVRANS] = &ss_codec_kvrans,
};

#define CODEC_COUNT (sizeof(codecs) / sizeof(codecs[0]))

static const struct ss_codec_functions *codec_find(enum ss_codec codec) {
    return (size_t)codec < CODEC_COUNT ? codecs[codec] : NULL;
}

/* ---- The state of a thread ----------------------------------------------------------------------------------- */

static pthread_once_t state_key_once = PTHREAD_ONCE_INIT;
static pthread_key_t state_key;
static int state_key_made;

static void state_destroy(void *pointer) {
    struct ss_codec_state *state = pointer;

    for (size_t codec = 0; codec < CODEC_COUNT; codec++) {
        if (codecs[codec] != NULL && codecs[codec]->state_free != NULL) {
            codecs[codec]->state_free(state);
        }
    }
    free(state);
}

static void state_key_make(void) {
    state_key_made = pthread_key_create(&state_key, state_destroy) == 0;
}

struct ss_codec_state *ss_codec_state(void) {
    struct ss_codec_state *state;

    pthread_once(&state_key_once, state_key_make);
    if (!state_key_made) {
        return NULL;
    }
    state = pthread_getspecific(state_key);
    if (state == NULL) {
        state = calloc(1, sizeof *state);
        if (state != NULL && pthread_setspecific(state_key, state) != 0) {
            free(state);
            state = NULL;
        }
    }
    return state;
}

/* By decoding something: a codec then makes whatever it makes, without a second description of what that is. */
void ss_codec_prepare(void) {
    static const uint8_t fixed[] = {0x4b, 0x04, 0x00}; /* Deflate of "a", in a block that our own decoder gives up */
    enum { SIZE = 4096, ROW = 64 };
    uint8_t symbols[SIZE];
    uint8_t stream[2 * SIZE];

    for (size_t codec = 0; codec < CODEC_COUNT; codec++) {
        size_t written = 0;

        for (size_t i = 0; i < SIZE; i++) {
            symbols[i] = (uint8_t)(i * i % 13 & i); /* worth coding, not storing */
        }
        if (codecs[codec] != NULL &&
            ss_compress((enum ss_codec)codec, symbols, SIZE, ROW, stream, sizeof stream, &written) == SS_OK) {
            (void)ss_decompress((enum ss_codec)codec, stream, written, symbols, SIZE);
        }
    }
    (void)ss_decompress(SS_CODEC_DEFLATE, fixed, sizeof fixed, symbols, 1);
}

/* ---- Public functions ---------------------------------------------------------------------------------------- */

const char *ss_codec_implementation(enum ss_codec codec) {
    const struct ss_codec_functions *functions = codec_find(codec);
    if (functions == NULL) {
        return NULL;
    }
    return functions->implementation != NULL ? functions->implementation : functions->implementation_now();
}

size_t ss_compress_bound(enum ss_codec codec, size_t size) {
    const struct ss_codec_functions *functions = codec_find(codec);
    return functions != NULL && size <= SS_CODEC_SIZE_MAX ? functions->compress_bound(size) : 0;
}

enum ss_result ss_compress(enum ss_codec codec, const void *source, size_t size, size_t row_length, void *target,
                           size_t target_size, size_t *written) {
    static const uint8_t nothing[1];
    uint8_t nowhere[1];
    const struct ss_codec_functions *functions = codec_find(codec);

    if (functions == NULL) {
        return SS_NOT_SUPPORTED;
    }
    if (written == NULL || (source == NULL && size != 0) || (target == NULL && target_size != 0) ||
        size > SS_CODEC_SIZE_MAX) {
        return SS_BAD_ARGUMENT;
    }
    *written = 0;
    return functions->compress(size != 0 ? source : nothing, size, row_length, target_size != 0 ? target : nowhere,
                               target_size, written);
}

/* stream_check() returns SS_OK for arguments that a codec may see; it points to something where there is nothing. */
static enum ss_result stream_check(struct ss_stream *stream) {
    static const uint8_t nothing[1];
    static uint8_t nowhere[1]; /* never written, since its size is zero */

    if ((stream->source == NULL && stream->source_size != 0) || (stream->target == NULL && stream->target_size != 0) ||
        stream->source_size > SS_CODEC_SIZE_MAX || stream->target_size > SS_CODEC_SIZE_MAX) {
        return SS_BAD_ARGUMENT;
    }
    if (stream->source_size == 0) {
        stream->source = nothing;
    }
    if (stream->target_size == 0) {
        stream->target = nowhere;
    }
    return SS_OK;
}

void ss_decompress_many(enum ss_codec codec, struct ss_stream *streams, size_t count) {
    const struct ss_codec_functions *functions = codec_find(codec);

    for (size_t index = 0; index < count; index++) {
        enum ss_result checked = functions != NULL ? stream_check(&streams[index]) : SS_NOT_SUPPORTED;

        streams[index].result = checked;
        if (checked == SS_OK && functions->decompress_many != NULL) {
            streams[index].result = SS_NOT_SUPPORTED;
        } else if (checked == SS_OK) {
            streams[index].result = functions->decompress(streams[index].source, streams[index].source_size,
                                                          streams[index].target, streams[index].target_size);
        }
    }
    if (functions != NULL && functions->decompress_many != NULL) {
        functions->decompress_many(streams, count);
    }
}

enum ss_result ss_decompress(enum ss_codec codec, const void *source, size_t size, void *target, size_t target_size) {
    struct ss_stream stream = {.source = source, .target = target, .source_size = size, .target_size = target_size};

    ss_decompress_many(codec, &stream, 1);
    return stream.result;
}
