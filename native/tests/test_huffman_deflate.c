/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Our Deflate against zlib: zlib inflates what we encode, at every size and with every shape of code; our streams are
 * no larger than zlib's own Huffman-only ones; and our decoder inflates whatever zlib writes.
 */
#include "shadowserve.h"
#include "zlib_reference.h"

enum { SIZE_MAX_TESTED = 1 << 20 };

static uint8_t *plain, *encoded, *decoded;

/* check_plain() encodes plain[0 .. size) and lets zlib decode it. Returns the stream's size. */
static size_t check_plain(size_t size, const char *what) {
    size_t written = 0;

    CHECK(ss_compress(SS_CODEC_DEFLATE, plain, size, 0, encoded, ss_compress_bound(SS_CODEC_DEFLATE, size), &written) ==
              SS_OK,
          "%s, %zu bytes", what, size);
    memset(decoded, 0xA5, size + 1);
    CHECK(zlib_inflate(encoded, written, decoded, size + 1) == size && memcmp(plain, decoded, size) == 0,
          "%s, %zu bytes", what, size);
    return written;
}

static void check_codes(void) {
    /* Every number of symbols, from one to all, at equal frequencies: all shapes of flat codes and of headers. */
    for (size_t symbol_count = 1; symbol_count <= 256; symbol_count++) {
        size_t size = 3000 + symbol_count;
        for (size_t index = 0; index < size; index++) {
            plain[index] = (uint8_t)(index % symbol_count * 167);
        }
        check_plain(size, "flat code");
    }
    /* Fibonacci frequencies make the deepest tree that their sum allows: past every limit on lengths. */
    for (size_t deepest = 2; deepest <= 26; deepest++) {
        size_t previous = 1, frequency = 1, size = 0;
        for (size_t symbol = 0; symbol < deepest; symbol++) {
            memset(plain + size, (int)(255 - 3 * symbol), frequency);
            size += frequency;
            frequency += previous;
            previous = frequency - previous;
        }
        check_plain(size, "Fibonacci frequencies");
    }
    /* A few common bytes and a sprinkle of all others. */
    for (int trial = 0; trial < 200; trial++) {
        size_t size = 1 + random_below(200000);
        size_t rare = 2 + random_below(3000);
        for (size_t index = 0; index < size; index++) {
            plain[index] = (uint8_t)(random_below(rare) == 0 ? random64() >> 20 : random64() >> 20 & 3);
        }
        check_plain(size, "rare bytes");
    }
}

static void check_sizes(void) {
    /* Stored and coded regions in turn, so that runs of stored blocks begin and end everywhere. */
    for (int trial = 0; trial < 60; trial++) {
        size_t size = random_below(SIZE_MAX_TESTED);
        size_t region = 1 + random_below(300000);
        for (size_t index = 0; index < size; index++) {
            plain[index] = (uint8_t)(index / region % 2 ? random64() >> 30 : random64() >> 30 & 7);
        }
        check_plain(size, "mixed regions");
    }
    random_fill(plain, SIZE_MAX_TESTED);
    for (int trial = 0; trial < 20; trial++) {
        size_t size = random_below(SIZE_MAX_TESTED);
        size_t written = check_plain(size, "noise");
        CHECK(written <= size + 6 * (size / 65535 + 1), "%zu bytes of noise became %zu", size, written);
    }
}

/* KV-like: each of 1024 channels has its own spread; symbols of 'bins' bins. */
static void check_ratio(int bins) {
    size_t size = 1 << 18, ours, theirs;
    double spreads[1024];
    double limit = bins / 2.0 - 1;

    for (int channel = 0; channel < 1024; channel++) {
        spreads[channel] = 0.2 + random_bell() * random_bell();
    }
    for (size_t index = 0; index < size; index++) {
        double value = random_bell() * spreads[index % 1024] * limit / 5;
        plain[index] = (uint8_t)(int8_t)(value > limit ? limit : value < -limit ? -limit : value);
    }
    ours = check_plain(size, "KV");
    theirs = zlib_deflate(plain, size, encoded, 2 * size, 6, Z_HUFFMAN_ONLY, 0);
    printf("%d bins: %.4f bits per symbol, zlib's Huffman-only %.4f\n", bins, 8.0 * (double)ours / (double)size,
           8.0 * (double)theirs / (double)size);
    CHECK((double)ours <= 1.005 * (double)theirs, "%zu bytes against zlib's %zu", ours, theirs);
}

/* Whatever zlib writes, we decode: matches, fixed and stored blocks, all strategies. */
static void check_foreign_streams(void) {
    static const int strategies[] = {Z_DEFAULT_STRATEGY, Z_FILTERED, Z_HUFFMAN_ONLY, Z_RLE, Z_FIXED};

    for (int trial = 0; trial < 300; trial++) {
        size_t size = random_below(trial % 10 == 0 ? SIZE_MAX_TESTED : 5000);
        size_t period = 1 + random_below(40000);
        size_t written;
        for (size_t index = 0; index < size; index++) {
            plain[index] = (uint8_t)(index >= period && random_below(50) ? plain[index - period] : random64() >> 50);
        }
        written = zlib_deflate(plain, size, encoded, 2 * SIZE_MAX_TESTED, trial % 10, strategies[trial % 5], 0);
        CHECK(ss_decompress(SS_CODEC_DEFLATE, encoded, written, decoded, size) == SS_OK &&
                  memcmp(plain, decoded, size) == 0,
              "zlib level %d strategy %d, %zu bytes", trial % 10, strategies[trial % 5], size);
    }
}

int main(void) {
    plain = malloc(SIZE_MAX_TESTED);
    encoded = malloc(2 * SIZE_MAX_TESTED);
    decoded = malloc(SIZE_MAX_TESTED + 1);
    CHECK(plain && encoded && decoded, "no memory");
    check_codes();
    check_sizes();
    for (int bins = 16; bins <= 256; bins *= 2) {
        check_ratio(bins);
    }
    check_foreign_streams();
    free(plain);
    free(encoded);
    free(decoded);
    return 0;
}
