/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pipeline_doca_hang.c - a device that never finishes its work: the batch fails in time, and so does all later
 * work
 *
 * The emulator never completes some tasks. An abandoned device stays open until the process ends, and an open device
 * keeps its settings, so each case uses another card.
 */
#include <string.h>
#include <unistd.h>

#include "pipeline_support.h"

enum { SOCKETS = 2 };

struct bench {
    struct fixture *fixture;
    struct server *server;
    struct ss_pipeline *pipeline;
    int32_t sockets[SOCKETS];
};

static void emulate(const char *name, const char *value) {
    char variable[64];
    (void)snprintf(variable, sizeof variable, "DOCA_EMULATOR_%s", name);
    CHECK((value != NULL ? setenv(variable, value, 1) : unsetenv(variable)) == 0);
}

static struct bench bench_start(const char *device, uint32_t device_timeout_ms) {
    struct shape shape = default_shape();
    struct bench bench = {.fixture = fixture_make(&shape), .server = server_start()};
    fixture_serve(bench.fixture, bench.server);
    for (int i = 0; i < SOCKETS; i++) {
        bench.sockets[i] = server_connect(bench.server);
    }
    struct ss_pipeline_options options = pipeline_options(bench.fixture, 0);
    options.device = device;
    options.device_timeout_ms = device_timeout_ms;
    CHECK_EQUAL(ss_pipeline_create(&options, &bench.pipeline), SS_OK);
    return bench;
}

static void bench_stop(struct bench *bench) {
    ss_pipeline_destroy(bench->pipeline);
    for (int i = 0; i < SOCKETS; i++) {
        close(bench->sockets[i]);
    }
    server_stop(bench->server);
    fixture_free(bench->fixture);
}

/* Runs a batch and checks that all pieces with SS_OK are in place; returns its result. */
static enum ss_result bench_fetch(struct bench *bench) {
    struct ss_batch *batch = fixture_round(bench->fixture);
    enum ss_result result = pipeline_fetch(bench->pipeline, batch, bench->sockets, SOCKETS);
    CHECK(batch->sockets_in_sync);
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        CHECK(batch->pieces[i].result != SS_OK || fixture_matches(bench->fixture, batch, i));
    }
    batch_free(batch);
    return result;
}

static void test_tasks_that_never_end(const char *device, const char *tasks) {
    emulate("HANG", tasks);
    struct bench bench = bench_start(device, 300);
    CHECK_EQUAL(ss_pipeline_given_up(bench.pipeline), 0);
    CHECK_EQUAL(bench_fetch(&bench), SS_DEVICE);
    CHECK_EQUAL(ss_pipeline_given_up(bench.pipeline), 1);
    for (int repeat = 0; repeat < 3; repeat++) {
        CHECK_EQUAL(bench_fetch(&bench), SS_DEVICE); /* it is not asked again */
    }
    emulate("HANG", NULL);
    bench_stop(&bench);
}

/* The way back: what is to be stored is collected from memory that only the device reaches. */
static void test_a_store_that_never_ends(const char *device) {
    emulate("HANG", "dma:2");
    struct bench bench = bench_start(device, 300);
    struct ss_batch *batch = fixture_round(bench.fixture);
    struct ss_export *exported = NULL;
    struct ss_memory memory = {
        .kind = SS_MEMORY_EXPORTED, .address = batch->groups->memory, .size = bench.fixture->size};
    CHECK_EQUAL(ss_export_open(device, memory.address, memory.size, -1, &exported), SS_OK);
    ss_export_descriptor(exported, &memory.descriptor, &memory.descriptor_size);
    CHECK_EQUAL(ss_memory_register(bench.pipeline, &memory, &batch->groups->registered), SS_OK);
    uint64_t room = bench.fixture->size / batch->piece_count + (1 << 16);
    for (int repeat = 0; repeat < 2; repeat++) {
        for (uint32_t i = 0; i < batch->piece_count; i++) {
            batch->pieces[i].decompression_offset = i * room;
            batch->pieces[i].result = SS_SKIPPED;
        }
        batch->deadline_ns = after_patience();
        CHECK_EQUAL(ss_pipeline_encode(bench.pipeline, batch), SS_DEVICE);
        CHECK_EQUAL(ss_pipeline_given_up(bench.pipeline), 1);
    }
    emulate("HANG", NULL);
    ss_memory_release(batch->groups->registered);
    batch->groups->registered = NULL;
    ss_export_close(exported);
    batch_free(batch);
    bench_stop(&bench);
}

/* A slow device that completes some work at intervals is not abandoned. */
static void test_a_slow_device_is_not_given_up(const char *device) {
    emulate("LATENCY_US", "400000");
    struct bench bench = bench_start(device, 3000);
    for (int repeat = 0; repeat < 5; repeat++) {
        CHECK_EQUAL(bench_fetch(&bench), SS_OK);
    }
    CHECK_EQUAL(ss_pipeline_given_up(bench.pipeline), 0);
    emulate("LATENCY_US", NULL);
    bench_stop(&bench);
}

int main(void) {
    CHECK(setenv("SHADOWSERVE_TEST_BACKEND", "doca", 1) == 0);
    emulate("DEVICES", "0000:03:00.0,0000:04:00.0,0000:05:00.0,0000:06:00.0,0000:07:00.0,0000:09:00.0");
    test_a_slow_device_is_not_given_up("0000:03:00.0");
    test_tasks_that_never_end("0000:04:00.0", "decompress:3");
    test_tasks_that_never_end("0000:05:00.0", "decompress:1+");
    test_tasks_that_never_end("0000:06:00.0", "dma:3");
    test_tasks_that_never_end("0000:07:00.0", "dma:1+");
    test_a_store_that_never_ends("0000:09:00.0");
    return 0;
}
