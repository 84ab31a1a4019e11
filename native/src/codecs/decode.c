/* SPDX-License-Identifier: Apache-2.0 */
/*
 * decode.c - from a stream to elements where they are wanted
 *
 * In two steps, through symbols in a core's cache, any codec and any quantizer can. kvrans also has kernels that
 * do both at once: the core then decodes while the memory takes what was decoded, where two steps first keep the one
 * waiting and then the other.
 *
 * Elements are written past the caches: a slice's are read again after the whole round, by another core or a device.
 */
#include "codecs/decode.h"

#include "codecs/codec.h"
#include "quantize/quantize.h"

enum ss_result ss_elements_make(const struct ss_elements *elements, const uint8_t *symbols, int streamed) {
    if (elements->quantizer == SS_QUANTIZER_WEIGHTED) {
        return ss_elements_unweigh(elements, symbols, streamed);
    }
    /* Vectors that share a scale are one longer vector; the last of them are perhaps fewer. */
    const size_t shared = elements->quantizer == SS_QUANTIZER_BINNED ? elements->scale_vectors : 1;
    const size_t groups = elements->vectors / shared;
    const size_t count = groups * shared * elements->vector_length;
    const uint8_t *scales = elements->scales;
    enum ss_result (*const dequantize)(enum ss_quantizer, enum ss_dtype, const uint8_t *, const void *, size_t, size_t,
                                       void *) = streamed ? ss_dequantize_streamed : ss_dequantize;
    enum ss_result result = dequantize(elements->quantizer, elements->dtype, symbols, scales, groups,
                                       shared * elements->vector_length, elements->target);

    if (result != SS_OK || elements->vectors % shared == 0) {
        return result;
    }
    return dequantize(elements->quantizer, elements->dtype, symbols + count, scales + groups * sizeof(float), 1,
                      elements->vectors % shared * elements->vector_length,
                      (uint8_t *)elements->target + count * ss_dtype_size(elements->dtype));
}

enum ss_result ss_decode_direct(enum ss_codec codec, const struct ss_stream *stream, const struct ss_stream *next,
                                const struct ss_elements *elements) {
    if (codec != SS_CODEC_KVRANS) {
        ss_decode_end();
        return SS_NOT_SUPPORTED;
    }
    return ss_kvrans_decode(stream, next, elements);
}

void ss_decode_end(void) {
    ss_kvrans_decode_end();
}

/* elements_fit() returns whether a stream of 'size' bytes of symbols can be what 'elements' are made of. */
static int elements_fit(const struct ss_elements *elements, size_t size) {
    size_t symbols = ss_symbol_size(elements->quantizer, elements->dtype);

    if (ss_dtype_size(elements->dtype) == 0 || elements->scale_vectors == 0) {
        return 0;
    }
    return !__builtin_mul_overflow(symbols, elements->vectors, &symbols) &&
           !__builtin_mul_overflow(symbols, elements->vector_length, &symbols) && symbols == size &&
           (size == 0 || elements->target != NULL) &&
           (elements->quantizer != SS_QUANTIZER_BINNED || elements->vectors == 0 || elements->scales != NULL) &&
           (elements->quantizer != SS_QUANTIZER_WEIGHTED ||
            ss_channels_fit(elements->channels, elements->dtype, elements->vector_length));
}

/* two_steps() takes 'count' streams of which nothing is known to be wrong. */
static void two_steps(enum ss_codec codec, struct ss_stream *streams, const struct ss_elements *elements,
                      size_t count) {
    ss_decompress_many(codec, streams, count);
    for (size_t index = 0; index < count; index++) {
        if (streams[index].result == SS_OK) {
            streams[index].result = ss_elements_make(&elements[index], streams[index].target, 1);
        }
    }
}

void ss_decode_many(enum ss_codec codec, struct ss_stream *streams, const struct ss_elements *elements, size_t count) {
    size_t first = 0; /* of the streams that are still to be decoded, together */

    for (size_t index = 0; index < count; index++) {
        const struct ss_stream *next = index + 1 < count ? &streams[index + 1] : NULL;
        enum ss_result result = SS_BAD_ARGUMENT;
        if (elements_fit(&elements[index], streams[index].target_size)) {
            result = ss_decode_direct(codec, &streams[index], next, &elements[index]);
        }
        if (result == SS_NOT_SUPPORTED) {
            continue;
        }
        two_steps(codec, streams + first, elements + first, index - first);
        streams[index].result = result;
        first = index + 1;
    }
    ss_decode_end();
    two_steps(codec, streams + first, elements + first, count - first);
}
