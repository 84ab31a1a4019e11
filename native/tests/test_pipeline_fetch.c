/* SPDX-License-Identifier: Apache-2.0 */
/* test_pipeline_fetch.c - batches that go well: every codec, quantizer and fusion, and odd numbers of everything */
#include <dirent.h>
#include <string.h>
#include <sys/resource.h>

#include "pipeline_support.h"

/* Fetches two batches over 'sockets' connections: the second on connections that have been used. */
static void fetch_and_check(struct bench *bench, uint32_t sockets) {
    for (int repeat = 0; repeat < 2; repeat++) {
        const struct ss_batch *batch = bench_begin(bench);
        CHECK_EQUAL(bench_fetch_over(bench, sockets), SS_OK);
        check_delivered(bench);
        CHECK(batch->received_bytes > bench->fixture->stored_bytes);
        CHECK(batch->received_bytes < bench->fixture->stored_bytes + 64ULL * SOCKETS_MAX * batch->piece_count);
    }
}

/* Makes what 'shape' says, serves it, fetches it with 1 to 3 connections. */
static void run_shape(const struct shape *shape, int fused, uint32_t queue_depth, uint32_t requests_in_flight) {
    struct bench bench = {.fused = fused, .shape = *shape};
    bench_prepare(&bench);
    bench.options.queue_depth = queue_depth;
    bench.options.requests_in_flight = requests_in_flight;
    bench_start(&bench);
    for (uint32_t sockets = 1; sockets <= 3; sockets++) {
        fetch_and_check(&bench, sockets);
    }
    bench_stop(&bench);
}

static void test_every_codec_and_quantizer(int fused) {
    static const struct {
        enum ss_quantizer quantizer;
        enum ss_dtype dtype;
        uint32_t scale_vectors;
    } layouts[] = {{SS_QUANTIZER_BINNED, SS_DTYPE_BFLOAT16, 1},     {SS_QUANTIZER_BINNED, SS_DTYPE_FLOAT32, 1},
                   {SS_QUANTIZER_BINNED, SS_DTYPE_BFLOAT16, 5},     {SS_QUANTIZER_BINNED, SS_DTYPE_FLOAT16, 16},
                   {SS_QUANTIZER_BINNED, SS_DTYPE_FLOAT8_E4M3, 17}, {SS_QUANTIZER_LOSSLESS, SS_DTYPE_FLOAT32, 1},
                   {SS_QUANTIZER_LOSSLESS, SS_DTYPE_BFLOAT16, 1},   {SS_QUANTIZER_LOSSLESS, SS_DTYPE_FLOAT8_E4M3, 1},
                   {SS_QUANTIZER_PASSTHROUGH, SS_DTYPE_UINT8, 1},   {SS_QUANTIZER_PASSTHROUGH, SS_DTYPE_FLOAT16, 1}};
    enum { LAYOUTS = COUNT_OF(layouts) };
    FOR_EACH_CODEC (codec) {
        for (uint32_t i = 0; i < LAYOUTS; i++) {
            if (test_is_brief() && (i + 2) % (SS_CODEC_KVRANS + 1) != (uint32_t)codec) {
                continue; /* each codec and each layout, not each with each; float8 is what kvrans does most with */
            }
            struct shape shape = default_shape();
            shape.codec = codec;
            shape.quantizer = layouts[i].quantizer;
            shape.dtype = layouts[i].dtype;
            shape.scale_vectors = layouts[i].scale_vectors;
            run_shape(&shape, fused, 16, 4);
        }
    }
}

/* Slices of whole blocks, which kvrans may decode straight into the group's memory. */
static void test_whole_blocks(int fused) {
    struct shape shape = default_shape();
    shape.codec = SS_CODEC_KVRANS;
    shape.chunks = 2;
    shape.vectors = 256;
    run_shape(&shape, fused, 16, 4);
    shape.dtype = SS_DTYPE_FLOAT16;
    shape.scale_vectors = 3;
    shape.vectors = 512 + 30;
    run_shape(&shape, fused, 16, 4);
    shape.quantizer = SS_QUANTIZER_LOSSLESS;
    shape.scale_vectors = 1;
    shape.vectors = 512;
    run_shape(&shape, fused, 16, 4);
}

static void test_more_slices_than_queues_and_requests_hold(int fused) {
    struct shape shape = default_shape();
    shape.chunks = test_is_brief() ? 10 : 40;
    shape.slices = 9;
    shape.vectors = 3;
    run_shape(&shape, fused, 1, 1);
    run_shape(&shape, fused, 2, 64);
}

static void test_fewer_slices_than_connections(int fused) {
    struct shape shape = default_shape();
    shape.slices = 1;
    run_shape(&shape, fused, 16, 4);
    shape.slices = 2;
    shape.chunks = 1;
    run_shape(&shape, fused, 16, 4);
}

static void test_largest_slice_there_is(int fused) {
    struct shape shape = default_shape();
    shape.chunks = 2;
    shape.slices = 2;
    shape.vectors = 2048;
    shape.vector_length = 1024;
    run_shape(&shape, fused, 4, 4);
}

PIPELINE_TEST(test_answers_split_byte_by_byte, (shape->chunks = 3, shape->slices = 3, shape->vectors = 2), AS_BEFORE) {
    for (uint32_t i = 0; i < bench->shape.chunks; i++) {
        bench_fault(bench, i, FAULT_BYTE_BY_BYTE);
    }
    fetch_and_check(bench, 2);
}

PIPELINE_TEST(test_statistics_count_every_slice_once, AS_BEFORE, AS_BEFORE) {
    const struct ss_pipeline_options *options = &bench->options;
    const struct fixture *fixture = bench->fixture;
    CHECK(ss_pipeline_locked_bytes(bench->pipeline) <= options->decompression_bytes + options->dequantization_bytes +
                                                           options->dma_source_bytes + options->store_bytes +
                                                           (24 << 20));
    fetch_and_check(bench, 2);
    struct ss_stage_statistics statistics[SS_STAGE_COUNT];
    ss_pipeline_statistics(bench->pipeline, statistics);
    uint64_t slices = 2ULL * bench->shape.chunks * bench->shape.slices;
    uint64_t symbols = fixture->size; /* bytes of symbols of two batches: half of bfloat16, twice */
    int fused = bench->fused;
    CHECK_EQUAL(statistics[SS_STAGE_NET].items, slices);
    CHECK_EQUAL(statistics[SS_STAGE_NET].output_bytes, 2 * fixture->stored_bytes);
    CHECK(statistics[SS_STAGE_NET].input_bytes > 2 * fixture->stored_bytes);
    CHECK_EQUAL(statistics[SS_STAGE_DECOMPRESS].items, slices);
    CHECK_EQUAL(statistics[SS_STAGE_DECOMPRESS].input_bytes, 2 * fixture->stored_bytes);
    CHECK_EQUAL(statistics[SS_STAGE_DECOMPRESS].output_bytes, symbols);
    CHECK_EQUAL(statistics[SS_STAGE_DEQUANTIZE].items, slices);
    CHECK_EQUAL(statistics[SS_STAGE_DEQUANTIZE].output_bytes, 2 * fixture->size);
    CHECK_EQUAL(statistics[SS_STAGE_DMA].items, fused ? 0 : slices);
    CHECK_EQUAL(statistics[SS_STAGE_DMA].output_bytes, fused ? 0 : 2 * fixture->size);
    CHECK(statistics[SS_STAGE_DECOMPRESS].busy_ns > 0 && statistics[SS_STAGE_DEQUANTIZE].busy_ns > 0);
    CHECK(statistics[SS_STAGE_NET].busy_ns > 0 && (fused || statistics[SS_STAGE_DMA].busy_ns > 0));
    CHECK_EQUAL(statistics[SS_STAGE_QUANTIZE].items, 0);
}

PIPELINE_TEST(test_a_batch_of_nothing, AS_BEFORE, AS_BEFORE) {
    struct ss_batch batch = {.deadline_ns = after_patience()};
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, &batch, bench->sockets, 1), SS_OK);
    CHECK_EQUAL(batch.sockets_in_sync, 1);
}

/* Reads a small file of /proc; returns its length, 0 where it is gone. */
static size_t read_file(const char *path, char *text, size_t size) {
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        return 0;
    }
    size_t length = fread(text, 1, size - 1, file);
    text[length] = '\0';
    fclose(file);
    return length;
}

/* Returns the expected difference to the process's niceness for a thread with this name. */
static int expected_niceness(const char *name) {
    return strncmp(name, "ss-net-", 7) == 0 ? 0 : strncmp(name, "ss-store-", 9) == 0 ? 10 : 5;
}

/* Every thread of the pipeline has its name, runs on core 0 alone, and goes behind those that bring it what it works
 * on. */
static void check_threads(uint32_t expected) {
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    uint32_t found = 0;
    for (struct dirent *task = readdir(tasks); task != NULL; task = readdir(tasks)) {
        char path[300];
        char text[4096];
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        if (task->d_name[0] == '.' || read_file(path, text, sizeof text) == 0 || strncmp(text, "ss-", 3) != 0) {
            continue;
        }
        int niceness = expected_niceness(text);
        found++;
        snprintf(path, sizeof path, "/proc/self/task/%s/status", task->d_name);
        CHECK(read_file(path, text, sizeof text) > 0);
        CHECK(strstr(text, "Cpus_allowed_list:\t0\n") != NULL);
        int expected_priority = getpriority(PRIO_PROCESS, 0) + niceness;
        if (expected_priority > 19) {
            expected_priority = 19; /* the highest there is */
        }
        CHECK_EQUAL(getpriority(PRIO_PROCESS, (id_t)atoi(task->d_name)), expected_priority);
    }
    closedir(tasks);
    CHECK_EQUAL(found, expected);
}

static void store_once(struct bench *bench) {
    struct ss_batch *batch = bench_begin(bench);
    batch_make_room(batch);
    memcpy(batch->groups->memory, bench->fixture->source, bench->fixture->size);
    CHECK_EQUAL(ss_pipeline_encode(bench->pipeline, batch), SS_OK);
}

static const int32_t first_core[4] = {0, 0, 0, 0};

PIPELINE_TEST(test_threads_are_named_and_pinned, AS_BEFORE,
              options->net_cores = options->decompress_cores = options->dequantize_cores = options->dma_cores =
                  options->store_cores = first_core) {
    const struct ss_pipeline_options *options = &bench->options;
    fetch_and_check(bench, 3);
    store_once(bench); /* so that the store threads have surely begun, and lowered their priority */
    check_threads(options->net_threads + options->decompress_threads + options->dequantize_threads +
                  options->dma_threads + options->store_threads);
}

static void test_options_that_make_no_sense(void) {
    static const int32_t wrong[4] = {-2, -1, -1, -1};
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    struct ss_pipeline_options good = pipeline_options(fixture, 0);
    struct ss_pipeline *pipeline = NULL;
    for (int i = 0; i < 11; i++) {
        struct ss_pipeline_options bad = good;
        bad.options_size -= i == 0;
        bad.backend = i == 1 ? NULL : bad.backend;
        bad.net_threads *= i != 2;
        bad.decompress_threads *= i != 3;
        bad.dequantize_threads *= i != 4;
        bad.dma_threads *= i != 5;
        bad.queue_depth *= i != 6;
        bad.requests_in_flight *= i != 7;
        bad.net_cores = i == 8 ? wrong : bad.net_cores;
        bad.decompression_bytes *= i != 9;
        bad.poll_interval_us = i == 10 ? 1000001 : bad.poll_interval_us;
        CHECK_EQUAL(ss_pipeline_create(&bad, &pipeline), SS_BAD_ARGUMENT);
    }
    good.backend = "abacus";
    CHECK_EQUAL(ss_pipeline_create(&good, &pipeline), SS_NOT_SUPPORTED);
    good.backend = "software";
    good.store_bytes = UINT64_MAX / 2;
    CHECK_EQUAL(ss_pipeline_create(&good, &pipeline), SS_NO_MEMORY);
    CHECK(pipeline == NULL);
    ss_pipeline_destroy(NULL);
    fixture_free(fixture);
}

int main(void) {
    for (int fused = 0; fused <= backend_fuses(); fused++) {
        test_every_codec_and_quantizer(fused);
        test_whole_blocks(fused);
        if (!test_is_brief()) {
            test_largest_slice_there_is(fused);
        }
        test_answers_split_byte_by_byte(fused);
        test_more_slices_than_queues_and_requests_hold(fused);
        test_fewer_slices_than_connections(fused);
        test_statistics_count_every_slice_once(fused);
    }
    test_a_batch_of_nothing(1);
    test_threads_are_named_and_pinned(0);
    test_options_that_make_no_sense();
    return 0;
}
