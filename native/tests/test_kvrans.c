/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvrans alone: every variant of the kernels writes the same streams and reads them to the same bytes, for every
 * number of rows, odd numbers of columns, all alphabets and alignments, between guard pages; damaged streams end in
 * SS_BAD_DATA or in other bytes, the same with every variant. The tests in Python check the format of streams.
 */
#include "check.h"
#include "codecs/kvrans/kvrans.h"

#include <math.h>

enum { CELLS_MAX = 300 * 1024, STREAM_MAX = CELLS_MAX + CELLS_MAX / 64 + 64 };

static struct guarded plain, stream, decoded;
static uint8_t reference[STREAM_MAX];

/* Kinds of test blocks. */
enum kind { BINNED, CONSTANT, NOISE, WIDE, LISTED, EXPONENTS, NARROW, LAST_SYMBOL, KINDS };

static uint8_t cell(enum kind kind, size_t column, size_t index) {
    double spread = 1 + (double)(column * 2654435761u % 97) / 24, value = random_bell() * spread;

    switch (kind) {
    case BINNED:
        value += (double)(column % 5);
        return (uint8_t)(int8_t)lrint(value > 15 ? 15 : value < -15 ? -15 : value);
    case CONSTANT:
        return 0x9C;
    case NOISE:
        return (uint8_t)(random64() >> 40);
    case WIDE: /* all 256 values, most of them near zero: low bits */
        return (uint8_t)(int8_t)lrint(fmax(-128, fmin(127, value * 20)));
    case LISTED: /* 64 values, far apart */
        return (uint8_t)(random_below(1 + random_below(64)) * 4 + 1);
    case EXPONENTS:
        return (uint8_t)(120 - (int)fmin(40, fabs(value * 2)) - (index % 1000 == 999 ? 100 : 0));
    case NARROW: /* two values, one of them very rare */
        return random_below(500) == 0;
    default: /* the alphabet's 64 values, one of them in nearly all cells of the last column */
        return (uint8_t)(column % 3 == 2 ? 63 : random_below(64));
    }
}

static void fill(uint8_t *data, size_t size, size_t columns, enum kind kind) {
    for (size_t index = 0; index < size; index++) {
        data[index] = cell(kind, index % columns, index);
    }
}

/* check_all() codes 'size' bytes in rows of 'columns' with each variant, and decodes them with each. */
static size_t check_all(size_t size, size_t columns, enum kind kind, int at_end) {
    uint8_t *data = guarded_place(&plain, size, at_end);
    const size_t bound = ss_compress_bound(SS_CODEC_KVRANS, size);
    size_t first_written = 0;

    fill(data, size, columns, kind);
    FOR_EACH_ISA (isa) {
        uint8_t *encoded = guarded_place(&stream, bound, at_end);
        size_t written = SIZE_MAX;
        CHECK(ss_compress(SS_CODEC_KVRANS, data, size, columns, encoded, bound, &written) == SS_OK && written <= bound,
              "isa %d, %zu bytes in rows of %zu, kind %d", (int)isa, size, columns, (int)kind);
        if (isa == SS_ISA_SCALAR) {
            memcpy(reference, encoded, written);
            first_written = written;
        }
        CHECK(written == first_written && memcmp(reference, encoded, written) == 0,
              "isa %d writes another stream: %zu bytes in rows of %zu, kind %d", (int)isa, size, columns, (int)kind);
    }
    FOR_EACH_ISA (isa) {
        uint8_t *encoded = guarded_place(&stream, first_written, at_end);
        uint8_t *target = guarded_place(&decoded, size, at_end);
        memcpy(encoded, reference, first_written);
        memset(target, 0xA5, size);
        CHECK(ss_decompress(SS_CODEC_KVRANS, encoded, first_written, target, size) == SS_OK &&
                  memcmp(target, data, size) == 0,
              "isa %d: %zu bytes in rows of %zu, kind %d", (int)isa, size, columns, (int)kind);
    }
    return first_written;
}

static void check_shapes(void) {
    static const size_t columns[] = {1, 2, 63, 64, 65, 127, 129};
    const size_t every = test_is_brief() ? 35 : 7;

    for (size_t rows = 1; rows <= 300; rows++) {
        for (size_t index = 0; index < COUNT_OF(columns); index++) {
            enum kind kind = (enum kind)((rows + index) % KINDS);
            size_t tail = rows % 3 == 0 ? columns[index] / 2 : 0;
            if (rows % every == index) {
                check_all(rows * columns[index] + tail, columns[index], kind, (int)(rows / 2 % 2));
            }
        }
    }
    for (enum kind kind = BINNED; kind < KINDS; kind += test_is_brief() ? 3 : 1) {
        check_all(256 * 64, 64, kind, 0);     /* 64 lanes */
        check_all(256 * 300, 300, kind, 1);   /* 128 lanes */
        check_all(256 * 1024, 1024, kind, 1); /* 256 lanes */
        check_all(200 * 1000, 1000, kind, 0); /* 256 lanes, not all of them in use */
        check_all(130 * 600, 600, kind, 1);
        check_all(100 * 700, 700, kind, 0); /* 128 lanes, not all of them in use */
        check_all(4 * 65536, 65536, kind, 1);
    }
    for (size_t size = 0; size <= 300; size++) {
        check_all(size, 1 + random_below(size + 1), (enum kind)(size % KINDS), (int)(size % 2));
    }
}

/* Sizes: what has structure in its columns is smaller than its entropy without, and nothing grows but by its headers.
 */
static void check_sizes(void) {
    size_t sizes[KINDS], deflated;

    for (enum kind kind = BINNED; kind < KINDS; kind++) {
        sizes[kind] = check_all(256 * 1024, 1024, kind, 0);
    }
    CHECK(sizes[CONSTANT] < 1000, "%zu", sizes[CONSTANT]);
    CHECK(sizes[NARROW] < 256 * 1024 / 8 / 20, "%zu", sizes[NARROW]);
    CHECK(sizes[NOISE] == 256 * 1024 + SS_KVRANS_STREAM_HEADER + SS_KVRANS_STORED_HEADER, "%zu", sizes[NOISE]);
    fill(plain.start, 256 * 1024, 1024, BINNED);
    CHECK(ss_compress(SS_CODEC_DEFLATE, plain.start, 256 * 1024, 0, stream.start, STREAM_MAX, &deflated) == SS_OK,
          "Deflate");
    CHECK((double)sizes[BINNED] < 0.95 * (double)deflated, "%zu, Deflate %zu", sizes[BINNED], deflated);
    CHECK(ss_compress_bound(SS_CODEC_KVRANS, 1 << 20) < (1 << 20) + (1 << 14), "bound");
}

/* lanes_written() returns the lanes of the first block of a stream of two, the second of which is of 'kind'. */
static uint32_t lanes_written(size_t columns, enum kind kind) {
    const size_t size = SS_KVRANS_ROWS_MAX * columns;
    size_t written;

    fill(plain.start, size, columns, BINNED);
    fill(plain.start + size, size, columns, kind);
    CHECK(ss_compress(SS_CODEC_KVRANS, plain.start, 2 * size, columns, stream.start, STREAM_MAX, &written) == SS_OK,
          "two blocks");
    return SS_KVRANS_GROUP << (stream.start[6] >> 2 & 3); /* docs/design/kvrans.md */
}

/* Lanes cost bytes: there are more only where other blocks are stored, as the lower planes of lossless elements are. */
static void check_lanes(void) {
    CHECK(lanes_written(64, BINNED) == 64 && lanes_written(64, NOISE) == 128, "of 64 columns");
    CHECK(lanes_written(128, BINNED) == 128 && lanes_written(128, NOISE) == 256, "of 128 columns");
    CHECK(lanes_written(512, BINNED) == 128 && lanes_written(512, NOISE) == 256, "of 512 columns");
}

/* check_damaged() expects that every variant makes the same of a damaged stream. */
static void check_damaged(size_t size, const uint8_t *encoded, size_t encoded_size, size_t where) {
    static uint8_t made[CELLS_MAX];
    enum ss_result expected = SS_NOT_SUPPORTED;

    FOR_EACH_ISA (isa) {
        uint8_t *source = guarded_place(&stream, encoded_size, (int)(where % 2));
        uint8_t *target = guarded_place(&decoded, size, (int)(where % 2));
        enum ss_result result;
        memcpy(source, encoded, encoded_size);
        result = ss_decompress(SS_CODEC_KVRANS, source, encoded_size, target, size);
        CHECK(result == SS_OK || result == SS_BAD_DATA, "isa %d: result %d", (int)isa, (int)result);
        if (isa == SS_ISA_SCALAR) {
            expected = result;
            memcpy(made, target, size);
        }
        CHECK(result == expected && (result != SS_OK || memcmp(made, target, size) == 0),
              "isa %d makes something else of a stream damaged at %zu", (int)isa, where);
    }
}

static void check_damage(size_t rows, size_t columns, enum kind kind) {
    static uint8_t damaged[STREAM_MAX];
    const size_t size = rows * columns, written = check_all(size, columns, kind, 0);

    for (size_t cut = 0; cut < written; cut++) {
        uint8_t *source = guarded_place(&stream, cut, 1);
        memcpy(source, reference, cut);
        CHECK(ss_decompress(SS_CODEC_KVRANS, source, cut, guarded_place(&decoded, size, 1), size) == SS_BAD_DATA,
              "%zu of %zu bytes decode", cut, written);
    }
    for (size_t where = 0; where < written; where++) {
        for (int flip = 0; flip < 3; flip++) {
            memcpy(damaged, reference, written);
            damaged[where] ^= (uint8_t)(flip < 2 ? 1u << random_below(8) : 1 + random_below(255));
            check_damaged(size, damaged, written, where);
        }
    }
}

/* A block that says that it has fewer coded bytes, or more, than its symbols take is damaged, whatever they are. */
static void check_lengths(void) {
    static uint8_t changed[STREAM_MAX];
    const size_t size = 64 * 70, written = check_all(size, 70, BINNED, 0), header = SS_KVRANS_STREAM_HEADER;
    uint32_t length;

    memcpy(&length, reference + header + 4, 4);
    CHECK(written == header + SS_KVRANS_CODED_HEADER + length, "one block");
    for (uint32_t less = 1; less < 600; less += test_is_brief() ? 37 : 1) {
        uint32_t other = length - less;
        memcpy(changed, reference, written);
        memcpy(changed + header + 4, &other, 4);
        check_damaged(size, changed, written - less, less);
        CHECK(ss_decompress(SS_CODEC_KVRANS, changed, written - less, decoded.start, size) == SS_BAD_DATA, "%u less",
              less);
        other = length + less;
        memcpy(changed + header + 4, &other, 4);
        memset(changed + written, 0, less);
        CHECK(ss_decompress(SS_CODEC_KVRANS, changed, written + less, decoded.start, size) == SS_BAD_DATA, "%u more",
              less);
    }
}

int main(void) {
    plain = guarded_make(CELLS_MAX);
    decoded = guarded_make(CELLS_MAX);
    stream = guarded_make(STREAM_MAX);
    check_shapes();
    check_sizes();
    check_lanes();
    for (enum kind kind = BINNED; kind < KINDS; kind++) {
        check_damage(30, 9, kind);
        if (!test_is_brief()) {
            check_damage(130, 20, kind);
        }
    }
    check_lengths();
    return 0;
}
