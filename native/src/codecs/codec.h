/* SPDX-License-Identifier: Apache-2.0 */
/*
 * codec.h - what one entropy codec offers to codec.c
 *
 * Codecs that were not built in have no struct. A codec sees only sizes up to SS_CODEC_SIZE_MAX and pointers that are
 * valid even where the size is zero.
 */
#ifndef SS_CODEC_H
#define SS_CODEC_H

#include "shadowserve.h"

/* LZ4's limit is the smallest one of the libraries' (LZ4_MAX_INPUT_SIZE); slices are far smaller, 2 MiB at most. */
#define SS_CODEC_SIZE_MAX ((size_t)0x7E000000)

/*
 * State of one thread, kept between calls so that decoding a slice allocates nothing. Each field is NULL until its
 * codec first needs it.
 */
struct ss_codec_state {
    void *deflate_decoder;
    void *deflate_inflater; /* of literals: literal_inflate.c */
    struct ss_kvrans_decoder *kvrans_decoder;
    struct ss_kvrans_encoder *kvrans_encoder;
    void *zstd_decoder;
    void *zstd_encoder;
};

struct ss_codec_functions {
    const char *implementation;              /* NULL where it depends on the CPU: */
    const char *(*implementation_now)(void); /* a static string */
    size_t (*compress_bound)(size_t size);
    enum ss_result (*compress)(const uint8_t *source, size_t size, size_t row_length, uint8_t *target,
                               size_t target_size, size_t *written);
    /* One of these two is NULL. */
    enum ss_result (*decompress)(const uint8_t *source, size_t size, uint8_t *target, size_t target_size);
    /* Several at a time. Streams whose result is not SS_NOT_SUPPORTED are to be left alone. */
    void (*decompress_many)(struct ss_stream *streams, size_t count);
    /* Frees what this codec keeps in 'state'; NULL where it keeps nothing. */
    void (*state_free)(struct ss_codec_state *state);
};

extern const struct ss_codec_functions ss_codec_deflate;
extern const struct ss_codec_functions ss_codec_kvrans;
extern const struct ss_codec_functions ss_codec_lz4;
extern const struct ss_codec_functions ss_codec_zstd;

/* ss_kvrans_decode() and ss_kvrans_decode_end() are ss_decode_direct() and ss_decode_end() (decode.h) for kvrans. */
enum ss_result ss_kvrans_decode(const struct ss_stream *stream, const struct ss_stream *next,
                                const struct ss_elements *elements);
void ss_kvrans_decode_end(void);

/*
 * ss_codec_prepare() has every codec make what it keeps for decoding on this thread, so that no slice has to. Without
 * memory nothing is said: the slice that needs it then fails.
 */
void ss_codec_prepare(void);

/* ss_codec_state() returns this thread's state, or NULL without memory. It is freed when the thread ends. */
struct ss_codec_state *ss_codec_state(void);

#endif /* SS_CODEC_H */
