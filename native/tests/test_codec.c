/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Codecs: what was compressed comes back, and only that. Truncated, lengthened, flipped and random streams end in an
 * error or in other bytes, and never touch memory outside the two buffers.
 */
#include "check.h"
#include "shadowserve.h"

#include <pthread.h>

enum { SIZE_MAX_TESTED = 300000 };

static struct guarded plain, stream, decoded;

/* plain_fill() writes one of several kinds of data. */
static void plain_fill(uint8_t *data, size_t size, int kind) {
    for (size_t index = 0; index < size; index++) {
        switch (kind) {
        case 0:
            data[index] = 0;
            break;
        case 1: /* binned KV */
            data[index] = (uint8_t)(int8_t)(random_bell() * 4);
            break;
        case 2: /* noise */
            data[index] = (uint8_t)(random64() >> 33);
            break;
        case 3: /* matches */
            data[index] = (uint8_t)(index % 37 * (index / 1000));
            break;
        default: /* alternating regions */
            data[index] = (uint8_t)(index / 70000 % 2 ? random64() >> 33 : random64() >> 33 & 3);
        }
    }
}

/* check_round_trip() compresses into exactly the bound, and decodes between guard pages. */
static void check_round_trip(enum ss_codec codec, size_t size, int kind, int at_end) {
    uint8_t *data = guarded_place(&plain, size, at_end);
    uint8_t *target = guarded_place(&decoded, size, at_end);
    size_t bound = ss_compress_bound(codec, size);
    size_t written = SIZE_MAX;
    uint8_t *encoded = guarded_place(&stream, bound, at_end);

    plain_fill(data, size, kind);
    CHECK(ss_compress(codec, data, size, 0, encoded, bound, &written) == SS_OK && written <= bound,
          "codec %d, %zu bytes of kind %d: bound %zu, written %zu", (int)codec, size, kind, bound, written);
    if (at_end) {
        memmove(stream.end - written, encoded, written);
        encoded = stream.end - written;
    }
    memset(target, 0xA5, size);
    CHECK(ss_decompress(codec, encoded, written, target, size) == SS_OK && memcmp(target, data, size) == 0,
          "codec %d, %zu bytes of kind %d", (int)codec, size, kind);
    CHECK(ss_decompress(codec, encoded, written, guarded_place(&decoded, size + 1, at_end), size + 1) == SS_BAD_DATA,
          "codec %d, %zu bytes of kind %d: decoded to one byte more", (int)codec, size, kind);
    if (size > 0) {
        CHECK(ss_decompress(codec, encoded, written, target, size - 1) == SS_BAD_DATA,
              "codec %d, %zu bytes of kind %d: decoded to one byte less", (int)codec, size, kind);
    }
}

/* check_cut() expects failure for every shorter stream, for a longer one, and for every smaller target. */
static void check_cut(enum ss_codec codec, size_t size, int kind) {
    uint8_t *data = guarded_place(&plain, size, 1);
    static uint8_t whole[4096];
    size_t written, again;

    plain_fill(data, size, kind);
    CHECK(ss_compress(codec, data, size, 0, whole, sizeof(whole), &written) == SS_OK, "codec %d", (int)codec);
    for (size_t cut = 0; cut < written; cut++) {
        uint8_t *encoded = guarded_place(&stream, cut, 1);
        memcpy(encoded, whole, cut);
        CHECK(ss_decompress(codec, encoded, cut, guarded_place(&decoded, size, 1), size) == SS_BAD_DATA,
              "codec %d: %zu of %zu bytes decode", (int)codec, cut, written);
    }
    for (size_t more = 1; more <= 9; more++) {
        uint8_t *encoded = guarded_place(&stream, written + more, 1);
        memcpy(encoded, whole, written);
        memset(encoded + written, (int)(more * 37), more);
        CHECK(ss_decompress(codec, encoded, written + more, guarded_place(&decoded, size, 1), size) == SS_BAD_DATA,
              "codec %d: %zu bytes and %zu more decode", (int)codec, written, more);
    }
    for (size_t space = 0; space < written; space++) {
        enum ss_result result = ss_compress(codec, data, size, 0, guarded_place(&stream, space, 1), space, &again);
        CHECK(result == SS_NO_SPACE, "codec %d: %zu bytes fit %zu", (int)codec, written, space);
    }
    if (codec == SS_CODEC_DEFLATE || codec == SS_CODEC_NONE || codec == SS_CODEC_KVRANS) { /* exact space is enough */
        CHECK(ss_compress(codec, data, size, 0, guarded_place(&stream, written, 1), written, &again) == SS_OK &&
                  again == written && memcmp(stream.end - written, whole, written) == 0,
              "codec %d: %zu bytes do not fit exactly", (int)codec, written);
    }
}

/* check_damage() flips bits and cuts; where a damaged stream decodes, that must be to the size asked for. */
static void check_damage(enum ss_codec codec) {
    static uint8_t whole[70000];
    size_t sizes[] = {40, 700, 33000}, written;
    const int fewer = test_is_brief() ? 10 : 1;

    for (size_t which = 0; which < 3; which++) {
        size_t size = sizes[which];
        plain_fill(plain.start, size, which == 1 ? 3 : 1);
        CHECK(ss_compress(codec, plain.start, size, 0, whole, sizeof(whole), &written) == SS_OK, "codec %d",
              (int)codec);
        for (int trial = 0; trial < 3000 / fewer; trial++) {
            size_t kept = random_below(4) == 0 ? random_below(written + 1) : written;
            size_t wanted = random_below(4) == 0 ? random_below(2 * size) : size;
            uint8_t *encoded = guarded_place(&stream, kept, 1);
            memcpy(encoded, whole, kept);
            for (size_t flips = 1 + random_below(4); kept > 0 && flips > 0; flips--) {
                encoded[random_below(random_below(2) ? kept
                                     : kept < 80     ? kept
                                                     : 80)] ^= (uint8_t)(1u << random_below(8));
            }
            enum ss_result result = ss_decompress(codec, encoded, kept, guarded_place(&decoded, wanted, 1), wanted);
            CHECK(result == SS_OK || result == SS_BAD_DATA, "codec %d: result %d", (int)codec, (int)result);
        }
    }
    for (int trial = 0; trial < 20000 / fewer; trial++) {
        size_t size = random_below(300), wanted = random_below(2000);
        uint8_t *encoded = guarded_place(&stream, size, 1);
        random_fill(encoded, size);
        enum ss_result result = ss_decompress(codec, encoded, size, guarded_place(&decoded, wanted, 1), wanted);
        CHECK(result == SS_OK || result == SS_BAD_DATA, "codec %d: result %d", (int)codec, (int)result);
    }
}

static void check_arguments(void) {
    uint8_t buffer[64];
    size_t written;

    CHECK(strcmp(ss_codec_implementation(SS_CODEC_NONE), "memcpy") == 0, "none is always there");
    CHECK(ss_codec_implementation(SS_CODEC_DEFLATE) != NULL, "deflate is always there");
    CHECK(ss_codec_implementation((enum ss_codec)77) == NULL, "unknown");
    CHECK(ss_compress_bound((enum ss_codec)77, 10) == 0, "unknown");
    CHECK(ss_compress((enum ss_codec)77, buffer, 1, 0, buffer, 64, &written) == SS_NOT_SUPPORTED, "unknown");
    CHECK(ss_decompress((enum ss_codec)77, buffer, 1, buffer, 64) == SS_NOT_SUPPORTED, "unknown");
    FOR_EACH_CODEC (codec) {
        CHECK(ss_compress(codec, NULL, 1, 0, buffer, 64, &written) == SS_BAD_ARGUMENT, "codec %d", (int)codec);
        CHECK(ss_compress(codec, buffer, 1, 0, buffer, 64, NULL) == SS_BAD_ARGUMENT, "codec %d", (int)codec);
        CHECK(ss_decompress(codec, buffer, SIZE_MAX, buffer, 1) == SS_BAD_ARGUMENT, "codec %d", (int)codec);
        CHECK(ss_decompress(codec, buffer, 1, buffer, SIZE_MAX) == SS_BAD_ARGUMENT, "codec %d", (int)codec);
        CHECK(ss_compress(codec, NULL, 0, 0, buffer, 64, &written) == SS_OK, "codec %d: nothing", (int)codec);
        CHECK(ss_decompress(codec, buffer, written, NULL, 0) == SS_OK, "codec %d: nothing", (int)codec);
        CHECK(ss_decompress(codec, NULL, 0, buffer, 5) == SS_BAD_DATA, "codec %d: no stream", (int)codec);
    }
}

/* Several streams in one call: whole, damaged, with bad arguments, empty, and each of another size. */
static void check_many(enum ss_codec codec) {
    enum { COUNT = 7 };
    uint8_t *datas[COUNT], *encodeds[COUNT], *backs[COUNT];
    struct ss_stream streams[COUNT];

    for (size_t index = 0; index < COUNT; index++) {
        size_t size = index == 3 ? 0 : 1 + 40000 / (index + 1), bound = ss_compress_bound(codec, size);
        datas[index] = malloc(size + 1);
        backs[index] = malloc(size + 1);
        encodeds[index] = malloc(bound + 1);
        CHECK(datas[index] && backs[index] && encodeds[index], "no memory");
        plain_fill(datas[index], size, (int)index % 5);
        streams[index] = (struct ss_stream){
            .source = encodeds[index], .target = backs[index], .target_size = size, .result = SS_OS_ERROR};
        CHECK(ss_compress(codec, datas[index], size, 0, encodeds[index], bound, &streams[index].source_size) == SS_OK,
              "codec %d", (int)codec);
    }
    streams[1].source_size--;
    streams[4].source = NULL;
    streams[5].target_size++;
    ss_decompress_many(codec, streams, COUNT);
    for (size_t index = 0; index < COUNT; index++) {
        enum ss_result expected = index == 4 ? SS_BAD_ARGUMENT : index == 1 || index == 5 ? SS_BAD_DATA : SS_OK;
        CHECK(streams[index].result == expected, "codec %d, stream %zu: %d", (int)codec, index,
              (int)streams[index].result);
        CHECK(expected != SS_OK || memcmp(datas[index], backs[index], streams[index].target_size) == 0,
              "codec %d, stream %zu", (int)codec, index);
        free(datas[index]);
        free(encodeds[index]);
        free(backs[index]);
    }
    ss_decompress_many(codec, NULL, 0);
    streams[0].result = SS_OK;
    ss_decompress_many((enum ss_codec)77, streams, 1);
    CHECK(streams[0].result == SS_NOT_SUPPORTED, "unknown");
}

/* Threads share nothing: each decodes its own streams, and frees its decoders when it ends. */
static void *thread_run(void *argument) {
    static const size_t size = 20000;
    uint8_t *data = malloc(size), *back = malloc(size), *encoded = malloc(2 * size);
    size_t written;

    CHECK(data && back && encoded, "no memory");
    for (int trial = 0; trial < 20; trial++) {
        for (size_t index = 0; index < size; index++) {
            data[index] = (uint8_t)((index * index * (size_t)(trial + 3) >> 9) % (*(size_t *)argument + 2));
        }
        FOR_EACH_CODEC (codec) {
            CHECK(ss_compress(codec, data, size, 0, encoded, 2 * size, &written) == SS_OK, "codec %d", (int)codec);
            CHECK(ss_decompress(codec, encoded, written, back, size) == SS_OK && memcmp(data, back, size) == 0,
                  "codec %d", (int)codec);
        }
    }
    free(data);
    free(back);
    free(encoded);
    return NULL;
}

static void check_threads(void) {
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    size_t seeds[THREADS];

    for (size_t thread = 0; thread < THREADS; thread++) {
        seeds[thread] = 10 * thread;
        CHECK(pthread_create(&threads[thread], NULL, thread_run, &seeds[thread]) == 0, "thread %zu", thread);
    }
    for (size_t thread = 0; thread < THREADS; thread++) {
        pthread_join(threads[thread], NULL);
    }
}

int main(void) {
    const size_t step = test_is_brief() ? 11 : 1, cut = test_is_brief() ? 200 : 600;
    static const size_t sizes[] = {65534, 65535, 65536, 131069, 131070, 131071, 131072, 131073, 262144, 299000};

    plain = guarded_make(SIZE_MAX_TESTED);
    decoded = guarded_make(2 * SIZE_MAX_TESTED);
    stream = guarded_make(2 * SIZE_MAX_TESTED);
    check_arguments();
    FOR_EACH_CODEC (codec) {
        for (size_t size = 0; size <= 400; size += step) {
            check_round_trip(codec, size, (int)(size % 5), (int)(size / 5 % 2));
        }
        for (int trial = 0; trial < 60; trial += (int)step) {
            check_round_trip(codec, random_below(60000), trial % 5, trial % 2);
        }
        for (size_t index = 0; index < COUNT_OF(sizes); index++) {
            for (int kind = (int)(index % step % 5); kind < 5; kind += (int)step) {
                check_round_trip(codec, sizes[index], kind, (int)(index % 2));
            }
        }
        for (int kind = 0; kind < 4; kind++) {
            check_cut(codec, cut, kind);
        }
        check_damage(codec);
        check_many(codec);
        printf("%s\n", ss_codec_implementation(codec));
    }
    check_threads();
    guarded_free(&plain);
    guarded_free(&decoded);
    guarded_free(&stream);
    return 0;
}
