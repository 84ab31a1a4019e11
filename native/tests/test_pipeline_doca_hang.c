/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pipeline_doca_hang.c - a device that never finishes its work: the batch fails in time, and so does all later
 * work
 *
 * The emulator never completes some tasks. An abandoned device stays open until the process ends, and an open device
 * keeps its settings, so each case uses another card.
 */
#include "pipeline_support.h"

static void hang_start(struct bench *bench, const char *device, uint32_t device_timeout_ms) {
    *bench = (struct bench){.shape = default_shape()};
    bench_prepare(bench);
    bench->options.device = device;
    bench->options.device_timeout_ms = device_timeout_ms;
    bench_start(bench);
}

static enum ss_result fetch(struct bench *bench) {
    bench_begin(bench);
    enum ss_result result = bench_fetch(bench);
    CHECK(bench->batch->sockets_in_sync);
    return result;
}

static void test_tasks_that_never_end(const char *device, const char *tasks) {
    struct bench bench;
    emulate("HANG", tasks);
    hang_start(&bench, device, 300);
    CHECK_EQUAL(ss_pipeline_given_up(bench.pipeline), 0);
    CHECK_EQUAL(fetch(&bench), SS_DEVICE);
    CHECK_EQUAL(ss_pipeline_given_up(bench.pipeline), 1);
    for (int repeat = 0; repeat < 3; repeat++) {
        CHECK_EQUAL(fetch(&bench), SS_DEVICE); /* it is not asked again */
    }
    emulate("HANG", NULL);
    bench_stop(&bench);
}

/* The way back: what is to be stored is collected from memory that only the device reaches. */
static void test_a_store_that_never_ends(const char *device) {
    struct bench bench;
    emulate("HANG", "dma:2");
    hang_start(&bench, device, 300);
    struct ss_batch *batch = bench_begin(&bench);
    struct ss_export *exported = NULL;
    struct ss_memory memory = {
        .kind = SS_MEMORY_EXPORTED, .address = batch->groups->memory, .size = bench.fixture->size};
    CHECK_EQUAL(ss_export_open(device, memory.address, memory.size, -1, &exported), SS_OK);
    ss_export_descriptor(exported, &memory.descriptor, &memory.descriptor_size);
    CHECK_EQUAL(ss_memory_register(bench.pipeline, &memory, &batch->groups->registered), SS_OK);
    batch_make_room(batch);
    for (int repeat = 0; repeat < 2; repeat++) {
        batch->deadline_ns = after_patience();
        CHECK_EQUAL(ss_pipeline_encode(bench.pipeline, batch), SS_DEVICE);
        CHECK_EQUAL(ss_pipeline_given_up(bench.pipeline), 1);
    }
    emulate("HANG", NULL);
    ss_memory_release(batch->groups->registered);
    ss_export_close(exported);
    bench_stop(&bench);
}

/* A slow device that completes some work at intervals is not abandoned. */
static void test_a_slow_device_is_not_given_up(const char *device) {
    struct bench bench;
    emulate("LATENCY_US", "400000");
    hang_start(&bench, device, 3000);
    for (int repeat = 0; repeat < 5; repeat++) {
        CHECK_EQUAL(fetch(&bench), SS_OK);
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
