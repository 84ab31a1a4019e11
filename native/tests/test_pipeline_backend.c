/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pipeline_backend.c - the backend interface, with a backend that works as an accelerator does: several works in
 * flight, complete later, in another order, only when polled
 *
 * What a backend must keep to is checked from its side: never more in flight than it allows, one thread for each
 * channel, nothing left in flight when a channel closes.
 */
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "backend.h"
#include "pipeline_internal.h"
#include "pipeline_support.h"

enum { IN_FLIGHT_MAX = 4, POLLS_UNTIL_DONE = 3 };

struct channel {
    struct ss_work *works[IN_FLIGHT_MAX];
    uint32_t count;
    uint32_t polls;
    int used;
    pthread_t thread;
};

static struct {
    enum ss_result start_fails;
    enum ss_result complete_fails;
    uint64_t fail_crc32; /* of the slice that fails */
    int checks_decoded;
    uint64_t slice_bytes_max;
    int mode;
    _Atomic uint32_t opened;
    _Atomic uint32_t closed;
    _Atomic uint32_t most_in_flight;
} late;

static enum ss_result late_open(const struct ss_backend_buffers *buffers, void **device) {
    CHECK(buffers->decompression != NULL && buffers->decompression_bytes > 0);
    *device = &late;
    return SS_OK;
}

static void late_close(void *device) {
    CHECK(device == &late);
    CHECK_EQUAL(late.opened, late.closed);
}

static struct ss_backend_capabilities late_capabilities(void *device) {
    CHECK(device == &late);
    return (struct ss_backend_capabilities){.codecs = 1U << SS_CODEC_DEFLATE,
                                            .in_flight_max = IN_FLIGHT_MAX,
                                            .slice_bytes_max =
                                                late.slice_bytes_max ? late.slice_bytes_max : SS_SLICE_BYTES_MAX,
                                            .fused = (late.mode & MODE_FUSED) != 0,
                                            .checks_decoded = (uint32_t)late.checks_decoded};
}

static enum ss_result late_channel_open(void *device, enum ss_stage stage, void **channel) {
    CHECK(device == &late && (stage == SS_STAGE_DECOMPRESS || stage == SS_STAGE_DMA));
    *channel = calloc(1, sizeof(struct channel));
    CHECK(*channel != NULL);
    atomic_fetch_add(&late.opened, 1);
    return SS_OK;
}

static void late_channel_close(void *argument) {
    struct channel *channel = argument;
    CHECK_EQUAL(channel->count, 0);
    free(channel);
    atomic_fetch_add(&late.closed, 1);
}

static void check_thread(struct channel *channel) {
    CHECK(!channel->used || pthread_equal(channel->thread, pthread_self()));
    channel->used = 1;
    channel->thread = pthread_self();
}

static void late_add(struct channel *channel, struct ss_work *work) {
    check_thread(channel);
    CHECK(channel->count < IN_FLIGHT_MAX);
    channel->works[channel->count++] = work;
    channel->polls = 0;
    if (channel->count > atomic_load(&late.most_in_flight)) {
        atomic_store(&late.most_in_flight, channel->count);
    }
}

static enum ss_result late_decompress(void *channel, struct ss_work *work) {
    if (late.start_fails != SS_OK && work->decoded_crc32 == late.fail_crc32) {
        return late.start_fails;
    }
    late_add(channel, work);
    return SS_OK;
}

static enum ss_result late_deliver(void *channel, struct ss_work *work) {
    work->codec = SS_CODEC_NONE; /* so that late_work() copies it */
    late_add(channel, work);
    return SS_OK;
}

static void late_work(struct ss_work *work) {
    work->result = ss_decompress(work->codec, work->source, work->source_size, work->target, work->target_size);
    if (work->codec != SS_CODEC_NONE && late.checks_decoded && work->result == SS_OK &&
        ss_crc32(0, work->target, work->target_size) != work->decoded_crc32) {
        work->result = SS_CHECKSUM;
    }
    if (work->codec != SS_CODEC_NONE && late.complete_fails != SS_OK && work->decoded_crc32 == late.fail_crc32) {
        work->result = late.complete_fails;
    }
}

/* Every few polls, everything completes, the last one first. */
static uint32_t late_progress(void *argument) {
    struct channel *channel = argument;
    check_thread(channel);
    if (++channel->polls < POLLS_UNTIL_DONE) {
        return 0;
    }
    uint32_t completed = 0;
    while (channel->count > 0) {
        struct ss_work *work = channel->works[--channel->count];
        late_work(work);
        work->complete(work);
        completed++;
    }
    return completed;
}

static const struct ss_backend late_backend = {
    .name = "late",
    .open = late_open,
    .close = late_close,
    .capabilities = late_capabilities,
    .channel_open = late_channel_open,
    .channel_close = late_channel_close,
    .decompress = late_decompress,
    .deliver = late_deliver,
    .progress = late_progress,
};

/* ---- Tests --------------------------------------------------------------------------------------------------- */

/* Fetches a round and checks what became of it; 'bad' is the chunk that is to fail, if any. */
static void run(const struct fixture *fixture, enum ss_result expected, uint32_t bad) {
    struct server *server = server_start();
    fixture_serve(fixture, server);
    struct ss_pipeline_options options = pipeline_options(fixture, late.mode);
    struct ss_pipeline *pipeline;
    CHECK_EQUAL(ss_pipeline_create_with(&options, &late_backend, &pipeline), SS_OK);
    int32_t sockets[2] = {server_connect(server), server_connect(server)};
    for (int repeat = 0; repeat < 3; repeat++) {
        struct ss_round *round = fixture_round(fixture);
        CHECK_EQUAL(ss_pipeline_fetch(pipeline, round, sockets, 2), expected);
        for (uint32_t i = 0; i < round->chunk_count; i++) {
            CHECK(i >= bad || round->chunks[i].result == SS_OK);
            CHECK(round->chunks[i].result != SS_OK || fixture_matches(fixture, round, i));
        }
        CHECK(bad >= round->chunk_count || round->chunks[bad].result == expected);
        round_free(round);
    }
    ss_pipeline_destroy(pipeline);
    CHECK_EQUAL(late.opened, late.closed);
    close(sockets[0]);
    close(sockets[1]);
    server_stop(server);
}

static void test_works_complete_late_and_out_of_order(int mode) {
    struct shape shape = default_shape();
    shape.slices = 16;
    struct fixture *fixture = fixture_make(&shape);
    memset(&late, 0, sizeof late);
    late.mode = mode;
    run(fixture, SS_OK, shape.chunks);
    CHECK(late.most_in_flight > 1);
    fixture_free(fixture);
}

static void test_works_that_fail(int mode) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    memset(&late, 0, sizeof late);
    late.mode = mode;
    late.fail_crc32 = fixture->slices[fixture->chunks[2].slice_first + 3].decoded_crc32;
    late.complete_fails = SS_BAD_DATA;
    run(fixture, SS_BAD_DATA, 2);
    late.complete_fails = SS_OK;
    late.start_fails = SS_OS_ERROR;
    run(fixture, SS_OS_ERROR, 2);
    fixture_free(fixture);
}

/* The engine's CRC-32 is the only check where there are no scales, and the CPU's is still made where there are. */
static void test_checks_of_decoded_bytes(enum ss_quantizer quantizer) {
    struct shape shape = default_shape();
    shape.quantizer = quantizer;
    struct fixture *fixture = fixture_make(&shape);
    memset(&late, 0, sizeof late);
    late.checks_decoded = 1;
    run(fixture, SS_OK, shape.chunks);
    struct ss_slice *slice = &fixture->slices[fixture->chunks[3].slice_first];
    slice->decoded_crc32 ^= 1;
    run(fixture, SS_CHECKSUM, 3);
    slice->decoded_crc32 ^= 1;
    slice->checksum ^= 1;
    int binned = quantizer == SS_QUANTIZER_BINNED;
    run(fixture, binned ? SS_CHECKSUM : SS_OK, binned ? 3 : shape.chunks);
    fixture_free(fixture);
}

static void test_codec_and_size_that_the_backend_lacks(void) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    memset(&late, 0, sizeof late);
    fixture->chunks[1].codec = SS_CODEC_NONE;
    run(fixture, SS_NOT_SUPPORTED, 1);
    fixture->chunks[1].codec = SS_CODEC_DEFLATE;
    late.slice_bytes_max = fixture->slices[0].decoded_length;
    run(fixture, SS_OK, shape.chunks);
    late.slice_bytes_max -= 1;
    run(fixture, SS_NOT_SUPPORTED, 0);
    fixture_free(fixture);
}

static void test_fusing_needs_the_backend(void) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    memset(&late, 0, sizeof late);
    struct ss_pipeline_options options = pipeline_options(fixture, 1);
    struct ss_pipeline *pipeline;
    CHECK_EQUAL(ss_pipeline_create_with(&options, &late_backend, &pipeline), SS_NOT_SUPPORTED);
    fixture_free(fixture);
}

int main(void) {
    for (int mode = 0; mode < MODE_UNMANAGED; mode++) {
        test_works_complete_late_and_out_of_order(mode);
        test_works_that_fail(mode);
    }
    test_checks_of_decoded_bytes(SS_QUANTIZER_BINNED);
    test_checks_of_decoded_bytes(SS_QUANTIZER_LOSSLESS);
    test_codec_and_size_that_the_backend_lacks();
    test_fusing_needs_the_backend();
    return 0;
}
