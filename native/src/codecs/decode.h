/* SPDX-License-Identifier: Apache-2.0 */
/*
 * decode.h - from a stream to elements where they are wanted, in one go or in two; see decode.c
 */
#ifndef SS_DECODE_H
#define SS_DECODE_H

#include "shadowserve.h"

/*
 * ss_decode_direct() makes the elements of one stream without decompressing the whole of it first, if there is a kernel
 * for that. SS_NOT_SUPPORTED where there is none: nothing was done then. Otherwise as ss_decode_many();
 * 'stream->target' may be written, and 'stream->result' is left alone. 'next' is what this thread reads next, of which
 * only the source counts, or NULL: a kernel may ask memory for it meanwhile, and it may leave the last elements to the
 * next call, or to ss_decode_end(). Until then the stream, its target and the elements must stay where they are. Each
 * call writes what the one before it left, whatever it returns.
 */
enum ss_result ss_decode_direct(enum ss_codec codec, const struct ss_stream *stream, const struct ss_stream *next,
                                const struct ss_elements *elements);

/* ss_decode_end() writes what the last ss_decode_direct() of this thread left. */
void ss_decode_end(void);

/*
 * ss_elements_make() makes elements of a stream's symbols. 'streamed': past the caches, see ss_dequantize_streamed().
 * Fails as ss_dequantize() does.
 */
enum ss_result ss_elements_make(const struct ss_elements *elements, const uint8_t *symbols, int streamed);

#endif /* SS_DECODE_H */
