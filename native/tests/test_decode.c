/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ss_decode_many() against ss_decompress() and ss_dequantize(), with every variant of the kernels: the same bytes and
 * results for every codec, dtype and number of bins, odd shapes, shared and strange scales, unaligned targets, damaged
 * streams; nothing is touched outside the target. And ss_dequantize_streamed() against ss_dequantize().
 */
#include "backends/backend.h"
#include "check.h"
#include "codecs/decode.h"
#include "codecs/kvrans/kvrans.h"
#include "quantize/quantize.h"

#include <math.h>

enum { COUNT_MAX = 768 * 256, STREAM_MAX = 4 * COUNT_MAX + 4096, SCALES_MAX = 600 };
enum { AROUND = 4096 }; /* bytes before and behind the target that must not change */

static struct guarded stream, scratch, expected, target, scales;
static uint8_t symbols[4 * COUNT_MAX], encoded[STREAM_MAX];
static float scale_values[SCALES_MAX];

struct shape {
    enum ss_codec codec;
    enum ss_quantizer quantizer;
    enum ss_dtype dtype;
    size_t vectors, vector_length, scale_vectors;
    uint32_t bins;
    size_t misaligned;   /* bytes that the target is away from a multiple of 64 */
    size_t noise_planes; /* of lossless: how many of them no codec makes smaller */
};

static size_t shape_symbols(const struct shape *shape) {
    return shape->vectors * shape->vector_length *
           (shape->quantizer == SS_QUANTIZER_BINNED ? 1 : ss_dtype_size(shape->dtype));
}

/* scale_of() is mostly ordinary, sometimes zero, negative, subnormal, or large enough that elements overflow. */
static float scale_of(size_t index, size_t kind) {
    static const float strange[] = {0, -0.0f, 0x1p-149f, 0x1p-126f, 0x1.8p-24f, 0x1p-15f, 3e38f, 70000.0f, -1.5f};
    if (kind != 0 && index % 3 == 0) {
        return strange[(index / 3 + kind) % (COUNT_OF(strange))];
    }
    return (float)(0.001 + (double)random_below(1000) / 317);
}

static size_t stream_make(const struct shape *shape, size_t kind) {
    const size_t size = shape_symbols(shape),
                 count = (shape->vectors + shape->scale_vectors - 1) / shape->scale_vectors;
    const int limit = (int)shape->bins / 2 - 1;
    size_t written = 0;

    for (size_t index = 0; index < size; index++) {
        double spread = 1 + (double)(index % shape->vector_length * 2654435761u % 97) / 24;
        long symbol = lrint(random_bell() * spread * limit / 12);
        symbols[index] = (uint8_t)(int8_t)(symbol > limit ? limit : symbol < -limit ? -limit : symbol);
    }
    if (shape->noise_planes > 0) { /* the last ones */
        const size_t noise = shape->vectors * shape->vector_length * shape->noise_planes;
        random_fill(symbols + size - noise, noise);
    }
    for (size_t index = 0; index < count; index++) {
        scale_values[index] = scale_of(index, kind);
    }
    CHECK(ss_compress(shape->codec, symbols, size, shape->vector_length, encoded, STREAM_MAX, &written) == SS_OK,
          "codec %d", (int)shape->codec);
    return written;
}

/* elements_of() describes the shape's elements at 'place'; their scales are unaligned, between guard pages. */
static struct ss_elements elements_of(const struct shape *shape, uint8_t *place) {
    const size_t size = 4 * ((shape->vectors + shape->scale_vectors - 1) / shape->scale_vectors);
    const struct ss_elements elements = {.scales = memcpy(guarded_place(&scales, size, 1), scale_values, size),
                                         .target = place,
                                         .vectors = shape->vectors,
                                         .vector_length = shape->vector_length,
                                         .scale_vectors = shape->scale_vectors,
                                         .quantizer = shape->quantizer,
                                         .dtype = shape->dtype};
    return elements;
}

/* Where the target is: its end, or its beginning, next to a guard page, as near as the alignment lets it. */
static uint8_t *target_place(const struct shape *shape, size_t size) {
    uint8_t *place = shape->misaligned % 2 == 0 ? target.start : target.end - (size + 63) / 64 * 64 - 64;
    return place + shape->misaligned;
}

/* decode_one() decodes what is in 'encoded', with guard pages behind it, and checks that nothing around is touched. */
static enum ss_result decode_one(const struct shape *shape, size_t written, uint8_t **result_at) {
    const size_t size = shape->vectors * shape->vector_length * ss_dtype_size(shape->dtype);
    uint8_t *place = target_place(shape, size);
    const size_t room_before = (size_t)(place - target.start), room_after = (size_t)(target.end - place) - size;
    const size_t before = room_before < AROUND ? room_before : AROUND;
    const size_t after = room_after < AROUND ? room_after : AROUND;
    const struct ss_elements elements = elements_of(shape, place);
    struct ss_stream one = {.source = memcpy(guarded_place(&stream, written, 1), encoded, written),
                            .target = guarded_place(&scratch, shape_symbols(shape), 1),
                            .source_size = written,
                            .target_size = shape_symbols(shape)};

    memset(place - before, 0xA5, before + size + after);
    ss_decode_many(shape->codec, &one, &elements, 1);
    for (size_t index = 0; index < before; index++) {
        CHECK(place[-(ptrdiff_t)index - 1] == 0xA5, "wrote before the target");
    }
    for (size_t index = 0; index < after; index++) {
        CHECK(place[size + index] == 0xA5, "wrote behind the target");
    }
    *result_at = place;
    return one.result;
}

/* decode_apart() is the reference: one step after the other, with the scalar kernels. */
static enum ss_result decode_apart(const struct shape *shape, size_t written) {
    const enum ss_isa isa = ss_isa_active();
    const struct ss_elements elements = elements_of(shape, expected.start);
    enum ss_result result;

    CHECK(ss_isa_force(SS_ISA_SCALAR) == SS_OK, "scalar");
    result = ss_decompress(shape->codec, encoded, written, symbols, shape_symbols(shape));
    if (result == SS_OK) {
        result = ss_elements_make(&elements, symbols, 0);
    }
    CHECK(ss_isa_force(isa) == SS_OK, "back");
    return result;
}

/* check_stream() compares for every variant; returns the result that all have. */
static enum ss_result check_stream(const struct shape *shape, size_t written) {
    const size_t size = shape->vectors * shape->vector_length * ss_dtype_size(shape->dtype);
    const enum ss_result wanted = decode_apart(shape, written);

    FOR_EACH_ISA (isa) {
        uint8_t *made;
        enum ss_result result;
        result = decode_one(shape, written, &made);
        CHECK(result == wanted, "isa %d: %d, not %d", (int)isa, (int)result, (int)wanted);
        CHECK(result != SS_OK || memcmp(made, expected.start, size) == 0,
              "isa %d, codec %d, dtype %d, %zu x %zu, %u bins, %zu a scale, %zu off", (int)isa, (int)shape->codec,
              (int)shape->dtype, shape->vectors, shape->vector_length, shape->bins, shape->scale_vectors,
              shape->misaligned);
    }
    return wanted;
}

static void check(struct shape shape, size_t kind) {
    CHECK(check_stream(&shape, stream_make(&shape, kind)) == SS_OK, "a good stream");
}

static const enum ss_dtype dtypes[] = {SS_DTYPE_FLOAT16, SS_DTYPE_BFLOAT16, SS_DTYPE_FLOAT32, SS_DTYPE_FLOAT8_E4M3};

static struct shape binned(enum ss_dtype dtype, uint32_t bins, size_t vectors, size_t vector_length) {
    const struct shape shape = {.codec = SS_CODEC_KVRANS,
                                .quantizer = SS_QUANTIZER_BINNED,
                                .dtype = dtype,
                                .vectors = vectors,
                                .vector_length = vector_length,
                                .scale_vectors = 1,
                                .bins = bins};
    return shape;
}

static void check_bins(void) {
    for (uint32_t bins = 4; bins <= 72; bins += test_is_brief() ? 14 : 2) {
        check(binned(SS_DTYPE_FLOAT16, bins, 256, 128), bins / 2 % 9);
        check(binned(SS_DTYPE_BFLOAT16, bins, 256, 192), bins / 2 % 9);
    }
    for (size_t index = 0; index < COUNT_OF(dtypes); index++) {
        check(binned(dtypes[index], 32, 256, 320), 1);
        check(binned(dtypes[index], 256, 256, 320), 2); /* low bits */
    }
}

static void check_shapes(void) {
    static const size_t vectors[] = {1, 64, 255, 256, 257, 300, 511, 512, 600};
    static const size_t lengths[] = {1, 63, 64, 65, 128, 200, 320};

    for (size_t row = 0; row < COUNT_OF(vectors); row++) {
        for (size_t column = test_is_brief() ? row % 2 : 0; column < COUNT_OF(lengths);
             column += test_is_brief() ? 2 : 1) {
            struct shape shape = binned(dtypes[(row + column) % 2], 32, vectors[row], lengths[column]);
            shape.misaligned = column % 3 == 1 ? 2 * row : column % 3 == 2 ? 1 : 0;
            check(shape, (row + column) % 9);
            shape.misaligned = 0;
            shape.scale_vectors = 2 + row * 13 % 300;
            check(shape, 0);
        }
    }
    for (size_t misaligned = 0; misaligned < 64; misaligned += test_is_brief() ? 9 : 1) {
        struct shape shape = binned(dtypes[misaligned % 2], 32, 256, 64);
        shape.misaligned = misaligned;
        check(shape, 0);
    }
}

/* 64 bins, of which the lowest bit is not coded: an index and that bit are looked up together. */
static void check_low_bit(void) {
    static const size_t lengths[] = {64, 320, 832};
    uint32_t lanes = 0; /* a bit for each number that was met */

    for (size_t index = 0; index < 2 * COUNT_OF(lengths); index++) {
        const struct shape shape = binned(dtypes[index % 2], 64, 256, lengths[index / 2]);
        const size_t written = stream_make(&shape, index);
        const uint8_t layout = encoded[6]; /* of the first block: docs/design/kvrans.md */
        CHECK((layout & 3) == 1, "%zu columns have %d low bits", shape.vector_length, layout & 3);
        lanes |= 1u << (layout >> 2 & 3);
        CHECK(check_stream(&shape, written) == SS_OK, "a good stream");
    }
    CHECK(lanes == 7, "64, 128 and 256 lanes: %x", lanes);
}

static struct shape lossless(enum ss_dtype dtype, uint32_t bins, size_t vectors, size_t vector_length,
                             size_t noise_planes) {
    struct shape shape = binned(dtype, bins, vectors, vector_length);
    shape.quantizer = SS_QUANTIZER_LOSSLESS;
    shape.noise_planes = noise_planes;
    return shape;
}

/* Planes, of which any may be coded or stored; of several blocks, of 64 to 256 lanes, with low bits and without. */
static void check_lossless(void) {
    static const enum ss_dtype all[] = {SS_DTYPE_UINT8, SS_DTYPE_FLOAT8_E4M3, SS_DTYPE_FLOAT16, SS_DTYPE_BFLOAT16,
                                        SS_DTYPE_FLOAT32};
    static const size_t lengths[] = {64, 192, 320, 768, 100}; /* 64 lanes, 128, 128, 256, 64 */
    static const uint32_t bins[] = {32, 64, 200, 256};

    for (size_t index = 0; index < COUNT_OF(all); index++) {
        for (size_t noise = 0; noise <= ss_dtype_size(all[index]); noise++) {
            for (size_t length = 0; length < COUNT_OF(lengths); length++) {
                if (test_is_brief() && (index + length + noise) % 4 != 0) {
                    continue;
                }
                struct shape shape =
                    lossless(all[index], bins[(index + length + noise) % 4], 256, lengths[length], noise);
                check(shape, 0);
                shape.misaligned = 1 + random_below(63);
                check(shape, 0);
            }
            check(lossless(all[index], 32, 512, 64, noise), 0);
            check(lossless(all[index], 256, 512, 192, noise), 0);
            check(lossless(all[index], 32, 300, 64, noise), 0);
            check(lossless(all[index], 32, 128, 128, noise), 0); /* two planes in a block */
        }
    }
}

/* Other codecs and quantizers, and several streams at once of which some are bad. */
static void check_others(void) {
    FOR_EACH_CODEC (codec) {
        for (enum ss_quantizer quantizer = SS_QUANTIZER_PASSTHROUGH; quantizer <= SS_QUANTIZER_BINNED; quantizer++) {
            struct shape shape = binned(SS_DTYPE_BFLOAT16, 32, 300, 128);
            shape.codec = codec;
            shape.quantizer = quantizer;
            check(shape, 0);
            shape.misaligned = 2;
            check(shape, 0);
        }
    }
}

/* What check_weighted() decodes: exact vectors, and the angles of pairs. */
enum { EXACT = 3, TOKENS = 600, LENGTH_MAX = 320, PAIRS_MAX = 64 };
static float steps[2 * LENGTH_MAX], centres[8 * LENGTH_MAX], turns[TOKENS * 2 * PAIRS_MAX];
static double frequencies[PAIRS_MAX];
static uint8_t side[16 + 4 * EXACT * LENGTH_MAX];

static void channels_fill(size_t length, size_t pairs) {
    for (size_t index = 0; index < 2 * length; index++) {
        steps[index] = 0.001f * (float)(1 + random_below(1000));
    }
    for (size_t index = 0; index < 8 * length; index++) {
        centres[index] = 0.001f * (float)random_below(1000);
    }
    for (size_t index = 0; index < TOKENS * pairs; index++) {
        const size_t token = index / pairs, pair = index % pairs;
        frequencies[pair] = pow(1000, -(double)pair / (double)pairs);
        turns[token * 2 * pairs + pair] = (float)cos(frequencies[pair] * (double)token);
        turns[token * 2 * pairs + pairs + pair] = (float)sin(frequencies[pair] * (double)token);
    }
}

/* side_fill() makes exact vectors of a slice at some position, and returns their bytes. */
static size_t side_fill(size_t vectors, size_t vector_size) {
    const uint32_t words[2] = {(uint32_t)random_below(5000), vectors >= 250 ? EXACT : 0};
    const uint16_t names[EXACT + 1] = {0, 7, 249};

    random_fill(side, sizeof side);
    memcpy(side, words, sizeof words);
    if (words[1] == 0) {
        return sizeof words;
    }
    memcpy(side + sizeof words, names, sizeof names);
    return sizeof words + sizeof names + EXACT * vector_size;
}

/* weighted_direct() returns whether a variant has a kernel for such elements, if they are of 16 bits and aligned. */
static int weighted_direct(enum ss_isa isa, const struct ss_channels *channels, uint32_t row, size_t vectors) {
    const uint32_t head = channels->head_length, pairs = row % 2 == 0 ? channels->pairs : 0;

    return isa == SS_ISA_AVX512 && vectors >= 256 &&
           (pairs == 0 ? channels->vector_length % 64 == 0 : 2 * pairs == head && (head == 64 || head == 128));
}

/* encode_blocks() encodes symbols; the first block has 'lead' rows, if that is not 0. Returns the stream's bytes. */
static size_t encode_blocks(size_t count, size_t length, size_t lead) {
    enum { HEADER = 4 }; /* of a stream */
    const size_t before = lead * length;
    uint8_t last[HEADER];
    size_t written = 0, rest = 0;

    CHECK(ss_compress(SS_CODEC_KVRANS, symbols, lead != 0 ? before : count, length, encoded, STREAM_MAX, &written) ==
              SS_OK,
          "compress");
    if (lead != 0) {
        uint8_t *next = encoded + written - HEADER; /* the second stream's header is in the way */
        memcpy(last, next, HEADER);
        CHECK(ss_compress(SS_CODEC_KVRANS, symbols + before, count - before, length, next, STREAM_MAX - written,
                          &rest) == SS_OK,
              "compress the rest");
        memcpy(next, last, HEADER);
        written += rest - HEADER;
    }
    return written;
}

/* check_weighted() compares ss_decode_many() of 'weighted' with the scalar kernels in two steps: keys and values. */
static void check_weighted(struct ss_channels channels, enum ss_dtype dtype, size_t vectors, double spread,
                           size_t misaligned, size_t lead) {
    const size_t length = channels.vector_length, count = vectors * length, size = count * ss_dtype_size(dtype);
    const size_t side_size = side_fill(vectors, length * ss_dtype_size(dtype));
    size_t written;

    channels_fill(length, channels.pairs);
    for (size_t index = 0; index < count; index++) {
        const long even = random_below(2) == 0 ? (long)random_below(63) - 31 : 0; /* a table of many entries */
        const long symbol = spread == 0 ? even : lrint(random_bell() * spread);
        symbols[index] = (uint8_t)(int8_t)(symbol > 127 ? 127 : symbol < -127 ? -127 : symbol);
    }
    written = encode_blocks(count, length, lead);
    for (uint32_t row = 0; row < 2; row++) {
        struct ss_elements elements = {.scales = side,
                                       .target = expected.start,
                                       .vectors = vectors,
                                       .vector_length = length,
                                       .scale_vectors = 1,
                                       .quantizer = SS_QUANTIZER_WEIGHTED,
                                       .dtype = dtype,
                                       .channels = &channels,
                                       .scales_length = side_size,
                                       .row = row};
        CHECK(ss_isa_force(SS_ISA_SCALAR) == SS_OK && ss_elements_make(&elements, symbols, 0) == SS_OK, "scalar");
        elements.target = target.start + misaligned;
        FOR_EACH_ISA (isa) {
            struct ss_stream one = {.source = memcpy(guarded_place(&stream, written, 1), encoded, written),
                                    .target = guarded_place(&scratch, count, 1),
                                    .source_size = written,
                                    .target_size = count};
            memset(target.start, 0xA5, misaligned + size + 64);
            ss_decode_many(SS_CODEC_KVRANS, &one, &elements, 1);
            CHECK(one.result == SS_OK && memcmp(elements.target, expected.start, size) == 0 &&
                      ((uint8_t *)elements.target)[size] == 0xA5,
                  "isa %d, weighted, dtype %d, %zu x %u, %u pairs, %zu vectors: %d", (int)isa, (int)dtype, length,
                  channels.head_length, channels.pairs, vectors, (int)one.result);
            if (dtype != SS_DTYPE_FLOAT32 && misaligned == 0) {
                const int direct = weighted_direct(isa, &channels, row, vectors);
                CHECK(ss_decode_direct(SS_CODEC_KVRANS, &one, NULL, &elements) == (direct ? SS_OK : SS_NOT_SUPPORTED),
                      "isa %d, weighted, %zu x %u: direct is %d", (int)isa, length, channels.head_length, direct);
            }
            one.source_size--;
            ss_decode_many(SS_CODEC_KVRANS, &one, &elements, 1);
            CHECK(one.result == SS_BAD_DATA, "isa %d, a cut stream: %d", (int)isa, (int)one.result);
        }
    }
}

static void check_weighted_shapes(void) {
    static const uint32_t shapes[][3] = {{1, 64, 32},  {3, 64, 32}, {5, 64, 0},  {1, 128, 64}, {2, 128, 64},
                                         {2, 128, 32}, {4, 32, 16}, {2, 96, 48}, {1, 320, 8},  {2, 65, 31}};

    for (enum ss_dtype dtype = SS_DTYPE_FLOAT16; dtype <= SS_DTYPE_FLOAT32; dtype++) {
        for (size_t index = 0; index < COUNT_OF(shapes); index++) {
            const uint32_t heads = shapes[index][0], head_length = shapes[index][1];
            const struct ss_channels channels = {.steps = steps,
                                                 .centres = centres,
                                                 .frequencies = frequencies,
                                                 .turns = turns,
                                                 .rows = 2,
                                                 .kinds = 2,
                                                 .vector_length = heads * head_length,
                                                 .head_length = head_length,
                                                 .pairs = shapes[index][2],
                                                 .tokens = TOKENS};
            if (test_is_brief() && (index + dtype) % 3 != 0) {
                continue;
            }
            check_weighted(channels, dtype, 256, 3, 0, 0);
            check_weighted(channels, dtype, 256, 0.4, 0, 0); /* a symbol that is more than half of them */
            check_weighted(channels, dtype, 256, 13, 0, 0);  /* low bits */
            check_weighted(channels, dtype, 256, 0, 0, 0);   /* more entries than a register has */
            check_weighted(channels, dtype, 256, 40, 0, 0);  /* both */
            check_weighted(channels, dtype, 300 + 212 * (index % 2), 3, index % 3 * 2, 0);
            check_weighted(channels, dtype, 100, 3, 0, 0);
            check_weighted(channels, dtype, 356, 3, 0, 100); /* a block between two base angles */
            check_weighted(channels, dtype, 368, 3, 0, 112);
        }
    }
}

static void check_many(enum ss_codec codec) {
    enum { COUNT = 5, VECTORS = 256, LENGTH = 64, SIZE = 2 * VECTORS * LENGTH };
    struct shape shape = binned(SS_DTYPE_BFLOAT16, 32, VECTORS, LENGTH);
    struct ss_stream streams[COUNT];
    struct ss_elements elements[COUNT];
    size_t written;

    shape.codec = codec;
    written = stream_make(&shape, 0);
    CHECK(decode_apart(&shape, written) == SS_OK, "a good stream");
    memset(target.start, 0xA5, (size_t)COUNT * SIZE);
    for (size_t index = 0; index < COUNT; index++) {
        elements[index] = elements_of(&shape, target.start + index * SIZE + (index == 4 ? 2 : 0));
        streams[index] = (struct ss_stream){.source = encoded,
                                            .target = scratch.start + index * VECTORS * LENGTH,
                                            .source_size = written - (index == 1),
                                            .target_size = (size_t)VECTORS * LENGTH};
    }
    elements[3].vectors--; /* does not fit the stream */
    ss_decode_many(codec, streams, elements, COUNT);
    CHECK(streams[1].result == SS_BAD_DATA && streams[3].result == SS_BAD_ARGUMENT, "%d %d", (int)streams[1].result,
          (int)streams[3].result);
    for (size_t index = 0; index < COUNT; index++) {
        CHECK(index % 2 != 0 ||
                  (streams[index].result == SS_OK && memcmp(elements[index].target, expected.start, SIZE) == 0),
              "stream %zu of codec %d", index, (int)codec);
    }
    ss_decode_many((enum ss_codec)77, streams, elements, 1);
    CHECK(streams[0].result == SS_NOT_SUPPORTED, "no such codec");
}

/* damage() cuts a good stream, flips its bits and appends to it; returns its length. Of 800, 'least_found' are seen. */
static size_t damage(const struct shape *shape, size_t least_found) {
    const size_t less = test_is_brief() ? 8 : 1;
    const size_t written = stream_make(shape, 0);
    static uint8_t whole[STREAM_MAX];
    size_t bad = 0;

    memcpy(whole, encoded, written);
    for (size_t batch = 0; batch < 400 / less; batch++) {
        size_t at = batch < 100 / less ? batch % written : random_below(written);
        encoded[at] ^= (uint8_t)(1u << random_below(8));
        bad += check_stream(shape, written) == SS_BAD_DATA;
        encoded[at] = whole[at];
        bad += check_stream(shape, at) == SS_BAD_DATA;
    }
    CHECK(bad > least_found / less, "only %zu of %zu damaged streams were found out", bad, 800 / less);
    encoded[written] = 0;
    CHECK(check_stream(shape, written + 1) == SS_BAD_DATA, "a byte too many");
    return written;
}

/* Damage: cut streams, flipped bits, scales that are no numbers. All variants agree on what it is. */
static void check_damage(void) {
    const struct shape shape = binned(SS_DTYPE_FLOAT16, 32, 256, 128), low_bit = binned(SS_DTYPE_BFLOAT16, 64, 256, 64);
    const struct shape planes[] = {
        lossless(SS_DTYPE_BFLOAT16, 32, 256, 128, 1), lossless(SS_DTYPE_FLOAT16, 256, 512, 64, 0),
        lossless(SS_DTYPE_FLOAT32, 32, 256, 64, 2), lossless(SS_DTYPE_UINT8, 200, 256, 64, 0)};
    size_t written;

    for (size_t index = 0; index < COUNT_OF(planes); index++) {
        damage(&planes[index], 420); /* each cut, and what is not in a stored plane */
    }
    damage(&low_bit, 500); /* flipped low bits are not seen */
    written = damage(&shape, 600);
    for (size_t index = 0; index < 256; index += 85) {
        const float kept = scale_values[index];
        scale_values[index] = index % 2 == 0 ? (float)INFINITY : (float)NAN;
        CHECK(check_stream(&shape, written) == SS_BAD_DATA, "a scale that is no number");
        scale_values[index] = kept;
    }
    CHECK(check_stream(&shape, written) == SS_OK, "the whole stream");
}

/* Variants have kernels for the usual shapes, or these tests would compare two steps with two steps. */
static void check_direct(struct shape shape) {
    const size_t written = stream_make(&shape, 0);
    const size_t size = shape.vectors * shape.vector_length * ss_dtype_size(shape.dtype);
    const struct ss_elements elements = elements_of(&shape, target.start);
    const struct ss_stream one = {
        .source = encoded, .target = scratch.start, .source_size = written, .target_size = shape_symbols(&shape)};
    const struct ss_stream next = {.source = (const void *)4096, .source_size = 1 << 20}; /* asked for, never read */

    CHECK(decode_apart(&shape, written) == SS_OK, "a good stream");
    FOR_EACH_ISA (isa) {
        const int direct = shape.quantizer == SS_QUANTIZER_LOSSLESS ? isa != SS_ISA_SCALAR
                                                                    : isa == SS_ISA_AVX2 || isa == SS_ISA_AVX512;
        for (int known = 0; known < 2; known++) {
            memset(target.start, 0xA5, size);
            CHECK(ss_decode_direct(SS_CODEC_KVRANS, &one, known ? &next : NULL, &elements) ==
                      (direct ? SS_OK : SS_NOT_SUPPORTED),
                  "isa %d, next known %d", (int)isa, known);
            ss_decode_end();
            CHECK(!direct || memcmp(target.start, expected.start, size) == 0, "isa %d, next known %d: elements",
                  (int)isa, known);
        }
    }
}

/*
 * left_call() makes the call of that number after one that left elements; returns whether it makes good elements.
 * 'other' is the stream of another shape.
 */
static int left_call(int number, struct ss_stream one, struct ss_elements elements, const struct ss_stream *other,
                     const struct shape *other_shape) {
    enum { DAMAGED = 400 };
    const enum ss_isa isa = ss_isa_active();
    enum ss_codec codec = SS_CODEC_KVRANS;
    enum ss_result result, wanted = SS_BAD_DATA;

    switch (number) {
    case 0:
        return 0;
    case 1:
        wanted = SS_OK;
        break;
    case 2:
        wanted = SS_OK;
        CHECK(ss_isa_force(SS_ISA_AVX2) == SS_OK, "AVX2");
        break;
    case 3:
        one.source_size--;
        break;
    case 4:
        encoded[DAMAGED] ^= 0x40;
        break;
    case 5:
        one = *other;
        elements = elements_of(other_shape, elements.target);
        wanted = SS_OK;
        break;
    case 6:
        codec = SS_CODEC_DEFLATE;
        wanted = SS_NOT_SUPPORTED;
        break;
    default:
        elements.target = (uint8_t *)elements.target + 1;
        wanted = SS_NOT_SUPPORTED;
    }
    result = ss_decode_direct(codec, &one, &one, &elements);
    CHECK(result == wanted, "call %d: %d", number, (int)result);
    encoded[DAMAGED] ^= number == 4 ? 0x40 : 0;
    CHECK(ss_isa_force(isa) == SS_OK, "back");
    return wanted == SS_OK && number != 5;
}

/* Elements that a call leaves are complete after the next one, whatever that does. */
static void check_left(struct shape shape) {
    static uint8_t kept[2 * 256 * 64];
    const struct shape other_shape = binned(SS_DTYPE_BFLOAT16, 32, 256, 64);
    const size_t other_written = stream_make(&other_shape, 0);
    const struct ss_stream other = {memcpy(kept, encoded, other_written), scratch.start, other_written,
                                    shape_symbols(&other_shape), SS_OK};
    const size_t written = stream_make(&shape, 0);
    const size_t size = shape.vectors * shape.vector_length * ss_dtype_size(shape.dtype);
    const struct ss_stream one = {
        .source = encoded, .target = scratch.start, .source_size = written, .target_size = shape_symbols(&shape)};
    int incomplete = 0;

    CHECK(2 * size <= 4 * COUNT_MAX && decode_apart(&shape, written) == SS_OK, "a good stream");
    FOR_EACH_ISA (isa) {
        for (int number = 0; isa == SS_ISA_AVX512 && number < 8; number++) {
            const struct ss_elements first = elements_of(&shape, target.start);
            struct ss_elements second = first;
            int good;
            second.target = target.start + size;
            memset(target.start, 0xA5, 2 * size);
            CHECK(ss_decode_direct(SS_CODEC_KVRANS, &one, &one, &first) == SS_OK, "the first call");
            incomplete |= memcmp(target.start, expected.start, size) != 0;
            memset(scratch.start, 0xEE, shape_symbols(&shape));
            good = left_call(number, one, second, &other, &other_shape);
            if (number == 0) {
                ss_decode_end();
            }
            CHECK(memcmp(target.start, expected.start, size) == 0, "call %d: the elements before", number);
            ss_decode_end();
            CHECK(!good || memcmp(second.target, expected.start, size) == 0, "call %d: its elements", number);
        }
        CHECK(isa != SS_ISA_AVX512 || incomplete || shape.noise_planes == 0, "nothing is left");
    }
}

static void work_complete(struct ss_work *work) {
    ++*(int *)work->user;
}

/* work_start() starts a work on the stream in 'encoded', to elements at 'place'. 'more': another work follows. */
static void work_start(void *channel, struct ss_work *work, const struct shape *shape, size_t written, uint8_t *place,
                       int more, int *completions) {
    *work = (struct ss_work){.source = encoded,
                             .target = scratch.start,
                             .source_size = written,
                             .target_size = shape_symbols(shape),
                             .next = encoded,
                             .next_size = (size_t)more,
                             .codec = SS_CODEC_KVRANS,
                             .complete = work_complete,
                             .user = completions};
    if (place != NULL) {
        work->elements = elements_of(shape, place);
    }
    CHECK(ss_backend_software.decompress(channel, work) == SS_OK, "a work starts");
}

/* Works of the CPU backend are complete after the next work or the next poll, and then they are right. */
static void check_backend(struct shape shape) {
    const size_t written = stream_make(&shape, 0);
    const size_t size = shape.vectors * shape.vector_length * ss_dtype_size(shape.dtype);
    const struct ss_backend_channel setup = {.stage = SS_STAGE_DECOMPRESS};
    struct ss_work works[2];
    void *channel;

    CHECK(decode_apart(&shape, written) == SS_OK, "a good stream");
    CHECK(ss_backend_software.channel_open(NULL, &setup, &channel) == SS_OK, "a channel");
    FOR_EACH_ISA (isa) {
        for (int second = 0; second < 4; second++) { /* none, a good one, a cut one, one without elements */
            int completions[2] = {0, 0};
            uint8_t *places[2] = {target.start, second == 3 ? NULL : target.start + size};
            uint32_t polled;
            memset(target.start, 0xA5, 2 * size);
            work_start(channel, &works[0], &shape, written, places[0], 1, &completions[0]);
            if (second > 0) {
                work_start(channel, &works[1], &shape, written - (second == 2), places[1], 0, &completions[1]);
                CHECK(completions[1] == 1 && (works[1].result == SS_OK) == (second != 2), "the second work");
            }
            polled = ss_backend_software.progress(channel);
            CHECK(completions[0] == 1 && works[0].result == SS_OK && polled <= 1, "the first work");
            CHECK(works[0].dequantized == (isa != SS_ISA_SCALAR), "isa %d: in one step", (int)isa);
            CHECK(!works[0].dequantized || memcmp(places[0], expected.start, size) == 0, "its elements");
            CHECK(second != 1 || !works[1].dequantized || memcmp(places[1], expected.start, size) == 0, "the others");
            CHECK(ss_backend_software.progress(channel) == 0, "nothing is left");
        }
    }
    ss_backend_software.channel_close(channel);
}

static void check_streamed(void) {
    enum { VECTORS = 3 };
    for (size_t batch = 0; batch < (test_is_brief() ? 200 : 2000); batch++) {
        const enum ss_dtype dtype = dtypes[batch % 4];
        const enum ss_quantizer quantizer = batch / 4 % 2 == 0 ? SS_QUANTIZER_BINNED : SS_QUANTIZER_LOSSLESS;
        const size_t length = random_below(600), misaligned = batch % 3 == 0 ? random_below(64) : 0;
        const size_t size = VECTORS * length * ss_dtype_size(dtype);
        uint8_t *place = target_place(&(struct shape){.misaligned = misaligned}, size);
        random_fill(symbols, size);
        for (size_t index = 0; index < VECTORS; index++) {
            scale_values[index] = scale_of(index, batch % 9);
        }
        FOR_EACH_ISA (isa) {
            memset(place - (misaligned != 0), 0xA5, size + 1 + (misaligned != 0));
            CHECK(ss_dequantize(quantizer, dtype, symbols, scale_values, VECTORS, length, expected.start) == SS_OK &&
                      ss_dequantize_streamed(quantizer, dtype, symbols, scale_values, VECTORS, length, place) == SS_OK,
                  "isa %d, dtype %d", (int)isa, (int)dtype);
            CHECK(memcmp(place, expected.start, size) == 0 && place[size] == 0xA5, "isa %d, dtype %d, %zu elements",
                  (int)isa, (int)dtype, length);
        }
    }
}

int main(void) {
    const enum ss_isa best = ss_isa_active();

    stream = guarded_make(STREAM_MAX);
    scratch = guarded_make(4 * COUNT_MAX);
    expected = guarded_make(4 * COUNT_MAX);
    target = guarded_make(4 * COUNT_MAX + 256);
    scales = guarded_make(sizeof(scale_values));
    check_streamed();
    check_bins();
    check_low_bit();
    check_shapes();
    check_others();
    check_weighted_shapes();
    check_damage();
    check_direct(binned(SS_DTYPE_BFLOAT16, 32, 256, 128));
    check_direct(lossless(SS_DTYPE_BFLOAT16, 32, 256, 128, 1));
    check_direct(lossless(SS_DTYPE_FLOAT32, 256, 512, 64, 2));
    check_direct(lossless(SS_DTYPE_FLOAT8_E4M3, 256, 256, 64, 0));
    check_left(lossless(SS_DTYPE_BFLOAT16, 32, 256, 128, 1));
    check_left(lossless(SS_DTYPE_BFLOAT16, 32, 256, 64, 1));
    check_left(lossless(SS_DTYPE_FLOAT32, 32, 512, 64, 3));
    check_left(lossless(SS_DTYPE_FLOAT16, 32, 512, 192, 0));
    check_left(lossless(SS_DTYPE_FLOAT8_E4M3, 32, 256, 64, 0));
    check_backend(lossless(SS_DTYPE_BFLOAT16, 32, 256, 128, 1));
    check_lossless();
    CHECK(ss_isa_force(best) == SS_OK, "best");
    FOR_EACH_CODEC (codec) {
        check_many(codec);
    }
    return 0;
}
