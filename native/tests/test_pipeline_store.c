/* SPDX-License-Identifier: Apache-2.0 */
/* test_pipeline_store.c - encode, put, and fetch again what was put; and what goes wrong on that way */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "pipeline_support.h"

enum { HEAD_BYTES = RECORD_OFFSET };

static const uint8_t head[HEAD_BYTES] = "the record header, any bytes";

/* A batch for ss_pipeline_encode(), without the fields that encoding fills in. */
static struct ss_batch *encode_batch_make(const struct fixture *fixture) {
    struct ss_batch *batch = fixture_round(fixture);
    memcpy(batch->groups->memory, fixture->source, fixture->size);
    batch_make_room(batch);
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        batch->pieces[i].body_length = 0;
    }
    for (uint32_t i = 0; i < batch->slice_count; i++) {
        struct ss_slice *slice = &batch->slices[i];
        slice->offset = 0;
        slice->encoded_length = 0;
        slice->checksum = 0;
        slice->decoded_crc32 = 0;
    }
    return batch;
}

/* The batch that fetches the result of 'encoded'. */
static struct ss_batch *fetch_batch_make(const struct fixture *fixture, const struct ss_batch *encoded) {
    struct ss_batch *batch = fixture_round(fixture);
    memcpy(batch->pieces, encoded->pieces, batch->piece_count * sizeof *batch->pieces);
    memcpy(batch->slices, encoded->slices, batch->slice_count * sizeof *batch->slices);
    uint64_t offset = 0;
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        batch->pieces[i].record_offset = HEAD_BYTES;
        batch->pieces[i].decompression_offset = offset;
        offset += batch->pieces[i].body_length;
    }
    return batch;
}

/* STORE_TEST() is PIPELINE_TEST() with room to store; bench->batch is then for ss_pipeline_encode(). */
#define STORE_TEST(name, shape_changes, threads)                                                                       \
    static void name##_encoding(struct bench *bench);                                                                  \
    PIPELINE_TEST(name, shape_changes,                                                                                 \
                  (options->decompression_bytes += 1 << 20, options->store_threads = (threads))) {                     \
        bench->batch = encode_batch_make(bench->fixture);                                                              \
        name##_encoding(bench);                                                                                        \
    }                                                                                                                  \
    static void name##_encoding(struct bench *bench)

static enum ss_result put(struct bench *bench, const struct ss_piece *chunk, int32_t socket, uint64_t deadline_ns,
                          char *error, size_t error_size) {
    return ss_pipeline_put(bench->pipeline, chunk, head, sizeof head, 0, socket, NULL, deadline_ns, error, error_size);
}

/* Encoding writes the very bytes that the kernels write one by one. */
static void check_encoded(const struct fixture *fixture, const struct ss_batch *batch) {
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        CHECK_EQUAL(batch->pieces[i].result, SS_OK);
        CHECK_EQUAL(batch->pieces[i].body_length, fixture->chunks[i].body_length);
    }
    for (uint32_t i = 0; i < batch->slice_count; i++) {
        CHECK_EQUAL(batch->slices[i].offset, fixture->slices[i].offset);
        CHECK_EQUAL(batch->slices[i].encoded_length, fixture->slices[i].encoded_length);
        CHECK_EQUAL(batch->slices[i].checksum, fixture->slices[i].checksum);
        CHECK_EQUAL(batch->slices[i].decoded_crc32, fixture->slices[i].decoded_crc32);
    }
}

static struct shape trip; /* of test_round_trip() */

STORE_TEST(test_round_trip, *shape = trip, trip.dtype == SS_DTYPE_FLOAT32 ? 1 : 2) {
    const struct fixture *fixture = bench->fixture;
    const struct ss_batch *encoded = bench->batch;
    CHECK_EQUAL(ss_pipeline_encode(bench->pipeline, bench->batch), SS_OK);
    check_encoded(fixture, encoded);
    char error[64];
    for (uint32_t i = 0; i < encoded->piece_count; i++) {
        /* what bench_start() served is gone */
        server_keep(bench->server, encoded->pieces[i].key, encoded->pieces[i].key_length, "", 1);
        CHECK_EQUAL(put(bench, &encoded->pieces[i], bench->sockets[0], after_patience(), error, sizeof error), SS_OK);
        CHECK_EQUAL(error[0], '\0');
    }
    struct ss_batch *fetched = fetch_batch_make(fixture, encoded);
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, fetched, bench->sockets, 1), SS_OK);
    CHECK(memcmp(fetched->groups->memory, fixture->expected, fixture->size) == 0);
    struct ss_stage_statistics statistics[SS_STAGE_COUNT];
    ss_pipeline_statistics(bench->pipeline, statistics);
    CHECK_EQUAL(statistics[SS_STAGE_QUANTIZE].items, encoded->slice_count);
    CHECK_EQUAL(statistics[SS_STAGE_QUANTIZE].input_bytes, fixture->size);
    CHECK_EQUAL(statistics[SS_STAGE_COMPRESS].items, encoded->slice_count);
    CHECK_EQUAL(statistics[SS_STAGE_PUT].items, encoded->piece_count);
    CHECK_EQUAL(statistics[SS_STAGE_PUT].input_bytes, fixture->stored_bytes + sizeof head * encoded->piece_count);
    CHECK(statistics[SS_STAGE_PUT].output_bytes > statistics[SS_STAGE_PUT].input_bytes);
    batch_free(fetched);
}

static void test_round_trips(void) {
    static const struct {
        enum ss_quantizer quantizer;
        enum ss_dtype dtype;
        uint32_t scale_vectors;
    } layouts[] = {{SS_QUANTIZER_LOSSLESS, SS_DTYPE_FLOAT32, 1},   {SS_QUANTIZER_LOSSLESS, SS_DTYPE_BFLOAT16, 1},
                   {SS_QUANTIZER_BINNED, SS_DTYPE_BFLOAT16, 1},    {SS_QUANTIZER_BINNED, SS_DTYPE_BFLOAT16, 3},
                   {SS_QUANTIZER_BINNED, SS_DTYPE_FLOAT8_E4M3, 8}, {SS_QUANTIZER_PASSTHROUGH, SS_DTYPE_UINT8, 1}};
    for (uint32_t codec = SS_CODEC_NONE; codec <= SS_CODEC_ZSTD; codec++) {
        for (size_t i = 0; i < COUNT_OF(layouts); i++) {
            if (ss_codec_implementation((enum ss_codec)codec) != NULL) {
                trip = default_shape();
                trip.codec = (enum ss_codec)codec;
                trip.quantizer = layouts[i].quantizer;
                trip.dtype = layouts[i].dtype;
                trip.scale_vectors = layouts[i].scale_vectors;
                test_round_trip(1);
            }
        }
    }
}

/* ---- Puts that fail ------------------------------------------------------------------------------------------ */

STORE_TEST(test_put_failures, AS_BEFORE, 1) {
    static const struct {
        enum fault fault;
        enum ss_result result;
        const char *error;
    } cases[] = {
        {FAULT_NONE, SS_OK, ""},
        {FAULT_BYTE_BY_BYTE, SS_OK, ""},
        {FAULT_ERROR, SS_REFUSED, "OOM command not"}, /* cut to the caller's 16 bytes */
        {FAULT_NULL, SS_PROTOCOL, ""},
        {FAULT_GARBAGE, SS_PROTOCOL, ""},
        {FAULT_DISCONNECT, SS_DISCONNECTED, ""},
        {FAULT_STALL, SS_DEADLINE, ""},
    };
    CHECK_EQUAL(ss_pipeline_encode(bench->pipeline, bench->batch), SS_OK);
    const struct ss_piece *chunk = &bench->batch->pieces[1];
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char error[16] = "not overwritten";
        server_fault(bench->server, chunk->key, chunk->key_length, cases[i].fault);
        uint64_t deadline = cases[i].fault == FAULT_STALL ? after_ms(100) : after_patience();
        CHECK_EQUAL(put(bench, chunk, bench->sockets[0], deadline, error, sizeof error), cases[i].result);
        CHECK(strcmp(error, cases[i].error) == 0);
        bench_reconnect(bench);
    }
    struct ss_piece wrong = *chunk;
    wrong.body_length = UINT64_MAX;
    CHECK_EQUAL(put(bench, &wrong, bench->sockets[0], after_patience(), NULL, 0), SS_BAD_ARGUMENT);
    wrong = *chunk;
    wrong.key_length = 97;
    CHECK_EQUAL(put(bench, &wrong, bench->sockets[0], after_patience(), NULL, 0), SS_BAD_ARGUMENT);
    CHECK_EQUAL(put(bench, chunk, -1, after_patience(), NULL, 0), SS_BAD_ARGUMENT);
    CHECK_EQUAL(put(bench, chunk, bench->sockets[0], ss_now_ns() - 1, NULL, 0), SS_DEADLINE);
}

/* A server that answers an error before it has read the value, and reads no more: the error is what counts. */
STORE_TEST(test_refused_before_the_value_was_read,
           (shape->codec = SS_CODEC_NONE, shape->quantizer = SS_QUANTIZER_PASSTHROUGH, shape->vectors = 2048,
            shape->chunks = 1, shape->slices = 24 /* 24 MiB: more than the sockets' buffers take */),
           2) {
    CHECK_EQUAL(ss_pipeline_encode(bench->pipeline, bench->batch), SS_OK);
    struct ss_piece *chunk = &bench->batch->pieces[0];
    memcpy(chunk->key, "early", 5);
    chunk->key_length = 5;
    char error[64];
    CHECK_EQUAL(put(bench, chunk, bench->sockets[0], after_patience(), error, sizeof error), SS_REFUSED);
    CHECK(strcmp(error, "ERR Protocol error: invalid bulk length") == 0);
    /* Half a request was sent, so the connection must not be usable for another. */
    CHECK_EQUAL(put(bench, chunk, bench->sockets[0], after_patience(), error, sizeof error), SS_DISCONNECTED);
}

/* ---- Encodes that fail --------------------------------------------------------------------------------------- */

STORE_TEST(test_a_value_that_is_not_finite, AS_BEFORE, 2) {
    struct ss_batch *batch = bench->batch;
    uint64_t chunk_bytes = bench->fixture->size / bench->shape.chunks;
    uint16_t infinity = 0x7f80;
    memcpy(batch->groups->memory + 3 * chunk_bytes + 2 * 77, &infinity, sizeof infinity);
    CHECK_EQUAL(ss_pipeline_encode(bench->pipeline, batch), SS_NOT_FINITE);
    for (uint32_t i = 0; i < 3; i++) {
        CHECK_EQUAL(batch->pieces[i].result, SS_OK);
        CHECK_EQUAL(batch->pieces[i].body_length, bench->fixture->chunks[i].body_length);
    }
    CHECK_EQUAL(batch->pieces[3].result, SS_NOT_FINITE);
    CHECK(batch->pieces[4].result == SS_OK || batch->pieces[4].result == SS_SKIPPED);
}

STORE_TEST(test_encode_honours_deadline_and_cancel_and_arguments, AS_BEFORE, 2) {
    static const uint32_t bad_bins[] = {0, 2, 31, 258};
    struct ss_batch *batch = bench->batch;
    for (size_t i = 0; i < COUNT_OF(bad_bins); i++) {
        uint32_t bins = batch->slices[7].bins;
        batch->slices[7].bins = bad_bins[i];
        CHECK_EQUAL(ss_pipeline_encode(bench->pipeline, batch), SS_BAD_ARGUMENT);
        batch->slices[7].bins = bins;
    }
    batch->deadline_ns = ss_now_ns() - 1;
    CHECK_EQUAL(ss_pipeline_encode(bench->pipeline, batch), SS_DEADLINE);
    CHECK_EQUAL(batch->pieces[0].result, SS_DEADLINE);
    batch->deadline_ns = after_patience();
    ss_batch_cancel(batch);
    CHECK_EQUAL(ss_pipeline_encode(bench->pipeline, batch), SS_CANCELLED);
    batch->cancelled = 0;
    batch->pieces[1].decompression_offset -= 1; /* overlaps what chunk 0 might need */
    CHECK_EQUAL(ss_pipeline_encode(bench->pipeline, batch), SS_BAD_ARGUMENT);
    batch->pieces[1].decompression_offset += 1;
    CHECK_EQUAL(ss_pipeline_encode(bench->pipeline, batch), SS_OK);
    check_encoded(bench->fixture, batch);
    bench_close(bench);
    bench->options.store_threads = 0;
    bench_open(bench);
    CHECK_EQUAL(ss_pipeline_encode(bench->pipeline, batch), SS_BAD_ARGUMENT); /* no thread to do it */
}

/* ---- Both ways at once --------------------------------------------------------------------------------------- */

struct storing {
    struct bench *bench;
    atomic_int stop;
    uint32_t batches;
};

static void *store_all_the_time(void *argument) {
    struct storing *storing = argument;
    while (!atomic_load(&storing->stop) || storing->batches == 0) {
        struct ss_batch *batch = encode_batch_make(storing->bench->fixture);
        CHECK_EQUAL(ss_pipeline_encode(storing->bench->pipeline, batch), SS_OK);
        check_encoded(storing->bench->fixture, batch);
        batch_free(batch);
        storing->batches++;
    }
    return NULL;
}

STORE_TEST(test_fetches_and_stores_side_by_side, AS_BEFORE, 2) {
    struct storing storing = {.bench = bench};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, store_all_the_time, &storing) == 0);
    for (int i = 0; i < 50; i++) {
        bench_begin(bench);
        CHECK_EQUAL(bench_fetch(bench), SS_OK);
        check_delivered(bench);
    }
    atomic_store(&storing.stop, 1);
    pthread_join(thread, NULL);
    CHECK(storing.batches > 0);
}

static void *hang(void *argument) {
    CHECK_EQUAL(bench_fetch(argument), SS_CANCELLED);
    return NULL;
}

/* Stores starve no longer than their bound while a fetch batch hangs on a stalled server. */
STORE_TEST(test_a_store_goes_on_while_a_fetch_hangs, (shape->chunks = 1, shape->slices = 3), 1) {
    bench_fault(bench, 0, FAULT_STALL);
    bench_begin(bench);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, hang, bench) == 0);
    server_wait_stalled(bench->server);
    struct ss_batch *batch = encode_batch_make(bench->fixture);
    uint64_t begin = ss_now_ns();
    CHECK_EQUAL(ss_pipeline_encode(bench->pipeline, batch), SS_OK);
    uint64_t elapsed = ss_now_ns() - begin;
    printf("three slices stored beside a hanging fetch: %.1f ms\n", (double)elapsed / 1e6);
    CHECK(elapsed >= 3 * 45000000ULL); /* they let it go first, about 50 ms each */
    check_encoded(bench->fixture, batch);
    ss_batch_cancel(bench->batch);
    pthread_join(thread, NULL);
    batch_free(batch);
}

int main(void) {
    test_round_trips();
    test_put_failures(1);
    test_refused_before_the_value_was_read(1);
    test_a_value_that_is_not_finite(1);
    test_encode_honours_deadline_and_cancel_and_arguments(1);
    test_fetches_and_stores_side_by_side(1);
    test_a_store_goes_on_while_a_fetch_hangs(1);
    return 0;
}
