/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The decoder of literals, compared with zlib: zlib decodes each accepted stream to the same bytes; our own streams are
 * accepted; all other streams are rejected; streams that are decoded in turns do not affect each other.
 */
#include "codecs/huffman_deflate.h"
#include "codecs/literal_inflate.h"
#include "zlib_reference.h"

enum { SIZE_MAX_TESTED = 400000, STREAMS_MAX = 9 };

static struct ss_literal_inflater *inflater;
static uint8_t *plains[STREAMS_MAX];
static struct guarded sources[STREAMS_MAX], targets[STREAMS_MAX];

/* plain_fill() makes bytes of one of several spreads: deep codes, flat ones, one symbol, noise, and these in turns. */
static void plain_fill(uint8_t *plain, size_t size, unsigned kind) {
    size_t region = 1 + random_below(100000);

    for (size_t index = 0; index < size; index++) {
        unsigned now = kind == 6 ? (unsigned)(index / region % 6) : kind;
        uint64_t random = random64() >> 8;
        plain[index] = now == 0   ? (uint8_t)(int8_t)(random_bell() * 4)
                       : now == 1 ? (uint8_t)random
                       : now == 2 ? 7
                       : now == 3 ? (uint8_t)(random & 3)
                       : now == 4 ? (uint8_t)__builtin_ctzll(random | 1ull << 40) /* as deep as codes get */
                                  : (uint8_t)(random % 300 == 0 ? random >> 20 : random >> 20 & 1);
    }
}

static size_t size_choose(void) {
    switch (random_below(4)) {
    case 0:
        return random_below(40);
    case 1:
        return random_below(3000);
    default:
        return random_below(SIZE_MAX_TESTED);
    }
}

/* stream_make() puts an encoded stream at the end of its guarded source. Returns whether it is ours to decode. */
static int stream_make(struct ss_stream *stream, size_t slot, size_t size) {
    static uint8_t encoded[2 * SIZE_MAX_TESTED + 4096];
    unsigned way = (unsigned)random_below(4);
    size_t written;

    plain_fill(plains[slot], size, (unsigned)random_below(7));
    if (way < 2) {
        CHECK(ss_huffman_deflate(plains[slot], size, encoded, sizeof(encoded), &written) == SS_OK, "encode");
    } else {
        written = zlib_deflate(plains[slot], size, encoded, sizeof(encoded), way == 2 ? 6 : (int)random_below(2),
                               way == 2 ? Z_HUFFMAN_ONLY : Z_DEFAULT_STRATEGY,
                               random_below(3) == 0 ? 1 + random_below(100000) : 0);
    }
    stream->source = memcpy(guarded_place(&sources[slot], written, 1), encoded, written);
    stream->source_size = written;
    stream->target = guarded_place(&targets[slot], size, (int)random_below(2));
    stream->target_size = size;
    stream->result = SS_NOT_SUPPORTED;
    memset(stream->target, 0xA5, size);
    return way < 3;
}

/* Any number of streams of any lengths, some of them damaged: each is what it would have been alone. */
static void check_together(void) {
    static uint8_t reference[SIZE_MAX_TESTED + 1];

    for (int trial = 0; trial < (test_is_brief() ? 100 : 400); trial++) {
        struct ss_stream streams[STREAMS_MAX];
        int ours[STREAMS_MAX], damaged[STREAMS_MAX];
        size_t count = random_below(STREAMS_MAX + 1);

        for (size_t slot = 0; slot < count; slot++) {
            ours[slot] = stream_make(&streams[slot], slot, trial % 8 == 0 ? size_choose() : size_choose() / 16);
            damaged[slot] = random_below(4) == 0 && streams[slot].source_size > 0;
            if (damaged[slot]) {
                ((uint8_t *)streams[slot].source)[random_below(streams[slot].source_size)] ^=
                    (uint8_t)(1u << random_below(8));
            }
        }
        ss_literal_inflate(inflater, streams, count);
        for (size_t slot = 0; slot < count; slot++) {
            struct ss_stream *stream = &streams[slot];
            if (!damaged[slot]) {
                CHECK(stream->result == SS_OK || !ours[slot], "trial %d, stream %zu of %zu", trial, slot, count);
            }
            if (stream->result == SS_OK) {
                CHECK(zlib_inflate(stream->source, stream->source_size, reference, stream->target_size + 1) ==
                              stream->target_size &&
                          memcmp(reference, stream->target, stream->target_size) == 0,
                      "trial %d, stream %zu of %zu: zlib makes something else of it", trial, slot, count);
            }
            if (stream->result == SS_OK && !damaged[slot]) {
                CHECK(memcmp(plains[slot], stream->target, stream->target_size) == 0, "trial %d", trial);
            }
        }
    }
}

/* alone() decodes one stream between guard pages; where that succeeds, zlib must agree. */
static int alone(const uint8_t *source, size_t size, size_t target_size) {
    static uint8_t reference[8192];
    struct ss_stream stream = {.source = memcpy(guarded_place(&sources[0], size, 1), source, size),
                               .target = guarded_place(&targets[0], target_size, 1),
                               .source_size = size,
                               .target_size = target_size,
                               .result = SS_NOT_SUPPORTED};

    ss_literal_inflate(inflater, &stream, 1);
    if (stream.result == SS_OK) {
        CHECK(zlib_inflate(stream.source, size, reference, target_size + 1) == target_size &&
                  memcmp(reference, stream.target, target_size) == 0,
              "zlib makes something else of %zu bytes", size);
    }
    return stream.result == SS_OK;
}

/* Every truncation, every flipped bit, a byte more on either side: small streams of all kinds of blocks. */
static void check_damage(void) {
    static uint8_t whole[8192], flipped[8192];

    for (unsigned kind = 0; kind < 7; kind++) {
        for (int way = 0; way < 4; way++) {
            size_t size = 300 + random_below(200), written;
            plain_fill(plains[0], size, kind);
            if (way == 0) {
                CHECK(ss_huffman_deflate(plains[0], size, whole, sizeof(whole), &written) == SS_OK, "encode");
            } else {
                written = zlib_deflate(plains[0], size, whole, sizeof(whole), way == 1 ? 0 : 6,
                                       way == 2   ? Z_HUFFMAN_ONLY
                                       : way == 3 ? Z_FIXED
                                                  : Z_DEFAULT_STRATEGY,
                                       way == 2 ? 200 : 0);
            }
            CHECK(alone(whole, written, size) || way == 3, "kind %u, way %d", kind, way); /* Z_FIXED has matches */
            CHECK(!alone(whole, written, size + 1) && !alone(whole, written, size - 1), "kind %u, way %d", kind, way);
            for (size_t cut = 0; cut < written; cut++) {
                CHECK(!alone(whole, cut, size), "kind %u, way %d: %zu of %zu bytes", kind, way, cut, written);
            }
            whole[written] = 0;
            CHECK(!alone(whole, written + 1, size), "kind %u, way %d: a byte more", kind, way);
            for (size_t bit = 0; bit < 8 * written; bit += test_is_brief() ? 9 : 1) {
                memcpy(flipped, whole, written);
                flipped[bit / 8] ^= (uint8_t)(1u << bit % 8);
                alone(flipped, written, size);
            }
        }
    }
}

/* bits_write() appends to a stream that is written by hand. */
static void bits_write(uint8_t *stream, size_t *position, unsigned value, unsigned count) {
    for (unsigned bit = 0; bit < count; bit++, ++*position) {
        stream[*position / 8] |= (uint8_t)((value >> bit & 1) << *position % 8);
    }
}

/* Fixed blocks of literals alone, which zlib does not write: the bytes 0 to 255, whose codes have eight or nine bits.
 */
static void check_fixed(void) {
    uint8_t stream[1024] = {0};
    size_t position = 0;

    bits_write(stream, &position, 3, 3);
    for (unsigned literal = 0; literal < 256; literal++) {
        unsigned length = literal < 144 ? 8 : 9, code = literal < 144 ? 0x30 + literal : 0x190 + literal - 144;
        for (unsigned bit = length; bit-- > 0;) {
            bits_write(stream, &position, code >> bit & 1, 1);
        }
    }
    bits_write(stream, &position, 0, 7);
    CHECK(alone(stream, (position + 7) / 8, 256), "a fixed block of all literals");
    for (unsigned literal = 0; literal < 256; literal++) {
        CHECK(targets[0].end[(int)literal - 256] == literal, "literal %u", literal);
    }
}

/* A stream that is not to be touched keeps its result. */
static void check_skipped(void) {
    struct ss_stream streams[3];

    for (size_t slot = 0; slot < 3; slot++) {
        while (!stream_make(&streams[slot], slot, 5000)) {
        }
    }
    streams[1].result = SS_BAD_ARGUMENT;
    ss_literal_inflate(inflater, streams, 3);
    CHECK(streams[0].result == SS_OK && streams[1].result == SS_BAD_ARGUMENT && streams[2].result == SS_OK, "results");
    CHECK(((uint8_t *)streams[1].target)[0] == 0xA5, "a stream that was to be left alone was decoded");
}

static void check_all(void) {
    check_together();
    check_damage();
    check_fixed();
    check_skipped();
}

int main(void) {
    inflater = ss_literal_inflater_create();
    CHECK(inflater != NULL, "no memory");
    for (size_t slot = 0; slot < STREAMS_MAX; slot++) {
        plains[slot] = malloc(SIZE_MAX_TESTED);
        sources[slot] = guarded_make(2 * SIZE_MAX_TESTED);
        targets[slot] = guarded_make(SIZE_MAX_TESTED + 1);
        CHECK(plains[slot] != NULL, "no memory");
    }
    check_all();
    CHECK(ss_isa_force(SS_ISA_SCALAR) == SS_OK, "scalar"); /* and the lockstep for any CPU */
    check_all();
    for (size_t slot = 0; slot < STREAMS_MAX; slot++) {
        free(plains[slot]);
        guarded_free(&sources[slot]);
        guarded_free(&targets[slot]);
    }
    free(inflater);
    return 0;
}
