/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pipeline_doca.c - the DOCA backend over the emulator: limits, profiles, memory of other processes, and an engine
 * that fails at any task of a fetch or a store
 *
 * The other pipeline tests check the common rules of all backends with this one, too (SHADOWSERVE_TEST_BACKEND). After
 * any failure here, all pieces with SS_OK are correct, and the next batch is not affected.
 */
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "pipeline_support.h"

/* Opens the pipeline again, over an engine whose tasks fail from 'number' on, each time or once. */
static void reopen_with_fault(struct bench *bench, const char *engine, unsigned number, const char *repeat) {
    char fault[64];
    (void)snprintf(fault, sizeof fault, "%s:%u%s", engine, number, repeat);
    bench_close(bench);
    emulate("FAULT", fault);
    bench_open(bench);
}

/* Runs a batch and checks that all pieces with SS_OK are in place; returns its result. */
static enum ss_result fetch(struct bench *bench) {
    const struct ss_batch *batch = bench_begin(bench);
    enum ss_result result = bench_fetch(bench), first = SS_OK;
    CHECK(batch->sockets_in_sync);
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        CHECK(first != SS_OK || batch->pieces[i].result != SS_SKIPPED);
        first = first == SS_OK ? batch->pieces[i].result : first;
    }
    CHECK_EQUAL(result, first);
    return result;
}

/* ---- Limits, profiles, orders --------------------------------------------------------------------------------- */

static void fetch_all(enum ss_codec codec, enum ss_quantizer quantizer) {
    struct bench bench = {.shape = default_shape()};
    bench.shape.codec = codec;
    bench.shape.quantizer = quantizer;
    bench_prepare(&bench);
    bench_start(&bench);
    for (int repeat = 0; repeat < 3; repeat++) {
        CHECK_EQUAL(fetch(&bench), SS_OK);
    }
    bench_stop(&bench);
}

/* The batch has the same result for work that the device does not support, or does only in pieces. */
static void test_settings_that_change_nothing(void) {
    static const char *const settings[][2] = {
        {"PROFILE", "bf3"},        {"PROFILE", "bf2"},    {"MAX_BUF_BYTES", "8191"}, {"MAX_BUF_BYTES", "1000"},
        {"MAX_BUF_BYTES", "97"},   {"MAX_TASKS", "2"},    {"MAX_TASKS", "5"},        {"OUT_OF_ORDER", "1"},
        {"OUT_OF_ORDER", "77"},    {"LATENCY_US", "200"}, {"DEFLATE_GBPS", "0.1"},   {"DMA_GBPS", "0.5"},
        {"DMA_GBPS", "unlimited"},
    };
    for (size_t i = 0; i < COUNT_OF(settings); i++) {
        emulate(settings[i][0], settings[i][1]);
        fetch_all(SS_CODEC_DEFLATE, SS_QUANTIZER_BINNED);
        fetch_all(SS_CODEC_DEFLATE, SS_QUANTIZER_LOSSLESS);
        fetch_all(SS_CODEC_KVRANS, SS_QUANTIZER_BINNED); /* no engine decodes it */
        if (ss_codec_implementation(SS_CODEC_LZ4) != NULL) {
            fetch_all(SS_CODEC_LZ4, SS_QUANTIZER_PASSTHROUGH);
        }
        emulate(settings[i][0], NULL);
    }
}

/* The largest slice is four times the device's limit when it is delivered as float32. */
PIPELINE_TEST(test_slices_of_the_largest_size,
              (shape->dtype = SS_DTYPE_FLOAT32, shape->chunks = shape->slices = 2, shape->vectors = 512,
               shape->vector_length = 4096),
              AS_BEFORE) {
    CHECK_EQUAL(fetch(bench), SS_OK);
}

PIPELINE_TEST(test_devices_by_name, AS_BEFORE, AS_BEFORE) {
    static const struct {
        const char *name;
        enum ss_result result;
    } devices[] = {
        {"", SS_OK},
        {"0000:03:00.0", SS_OK},
        {"03:00.0", SS_OK},
        {"0000:03:00.1", SS_OK},
        {"mlx5_1", SS_OK},
        {"mlx5_7", SS_NOT_SUPPORTED},
        {"0000:03:00.2", SS_NOT_SUPPORTED},
    };
    bench_close(bench);
    emulate("DEVICES", "0000:03:00.0,0000:03:00.1");
    for (size_t i = 0; i < COUNT_OF(devices); i++) {
        struct ss_pipeline *pipeline = NULL;
        bench->options.device = devices[i].name;
        CHECK_EQUAL(ss_pipeline_create(&bench->options, &pipeline), devices[i].result);
        CHECK(pipeline == NULL || strstr(ss_pipeline_device(pipeline), devices[i].name) != NULL);
        ss_pipeline_destroy(pipeline);
    }
    emulate("DEVICES", NULL);
}

PIPELINE_TEST(test_a_device_that_cannot_and_none_at_all, AS_BEFORE, AS_BEFORE) {
    static const char *const settings[][3] = {
        {"PROFILE", "none", "doca_compress_cap_task_decompress_deflate_is_supported: DOCA_ERROR_NOT_SUPPORTED"},
        {"DEVICES", "", "doca_devinfo_create_list: DOCA_ERROR_NOT_FOUND"},
    };
    bench_close(bench);
    for (size_t i = 0; i < COUNT_OF(settings); i++) {
        struct ss_pipeline *pipeline = NULL;
        struct ss_export *exported = NULL;
        char text[128];
        emulate(settings[i][0], settings[i][1]);
        CHECK_EQUAL(ss_pipeline_create(&bench->options, &pipeline), SS_NOT_SUPPORTED);
        ss_device_error(text, sizeof text);
        CHECK(strcmp(text, settings[i][2]) == 0);
        CHECK_EQUAL(ss_export_open("", text, sizeof text, -1, &exported), SS_NOT_SUPPORTED);
        emulate(settings[i][0], NULL);
    }
}

PIPELINE_TEST(test_options_that_engines_do_not_take, AS_BEFORE, AS_BEFORE) {
    struct ss_pipeline *pipeline = NULL;
    bench->options.fused = 1;
    CHECK_EQUAL(ss_pipeline_create(&bench->options, &pipeline), SS_NOT_SUPPORTED);
    CHECK(pipeline == NULL);
}

PIPELINE_TEST(test_two_pipelines_on_one_device, AS_BEFORE, AS_BEFORE) {
    struct ss_pipeline *second;
    CHECK_EQUAL(ss_pipeline_create(&bench->options, &second), SS_OK);
    CHECK_EQUAL(fetch(bench), SS_OK);
    CHECK_EQUAL(pipeline_fetch(second, bench_begin(bench), bench->sockets, SOCKETS), SS_OK);
    check_delivered(bench);
    bench_close(bench);
    CHECK_EQUAL(pipeline_fetch(second, bench_begin(bench), bench->sockets, SOCKETS), SS_OK);
    check_delivered(bench);
    ss_pipeline_destroy(second);
}

/* ---- Data that is not as it should be -------------------------------------------------------------------------- */

/* Without scales only the engine checks the data: a stream that it cannot decode, and one that decodes to other bytes.
 */
static void check_wrong_data(struct bench *bench) {
    struct ss_slice *slice = &bench->fixture->slices[bench->fixture->chunks[3].slice_first + 2];
    slice->decoded_crc32 ^= 1;
    CHECK_EQUAL(fetch(bench), SS_CHECKSUM);
    slice->decoded_crc32 ^= 1;
    slice->checksum ^= 1; /* of the stored bytes, which no core looks at */
    CHECK_EQUAL(fetch(bench), SS_OK);
    memset(bench->fixture->records[3] + RECORD_OFFSET + slice->offset, 0xFF, slice->encoded_length);
    bench_serve(bench);
    CHECK_EQUAL(fetch(bench), SS_BAD_DATA);
}

PIPELINE_TEST(test_wrong_deflate_data, shape->quantizer = SS_QUANTIZER_LOSSLESS, AS_BEFORE) {
    check_wrong_data(bench);
}

PIPELINE_TEST(test_wrong_lz4_data, (shape->codec = SS_CODEC_LZ4, shape->quantizer = SS_QUANTIZER_LOSSLESS), AS_BEFORE) {
    check_wrong_data(bench);
}

/* ---- An engine that fails --------------------------------------------------------------------------------------- */

/* What a fetch may end with while tasks of one engine fail at 'number' (and then, or each time). */
static void check_fetch_fault(enum ss_result result, const char *engine, unsigned number, const char *repeat) {
    if (strcmp(engine, "decompress") == 0 || repeat[0] == '\0' || (repeat[0] == '*' && number > 90)) {
        CHECK_EQUAL(result, SS_OK); /* a core decodes it; a copy that failed once is made again */
    } else if (repeat[0] == '+' || number == 1) {
        CHECK_EQUAL(result, SS_DEVICE);
    } else {
        CHECK(result == SS_OK || result == SS_DEVICE);
    }
}

static void check_faulty_fetches(struct bench *bench, const char *engine, const char *decompress_error,
                                 const char *order) {
    static const char *const repeats[] = {"", "+", "*"};
    unsigned tasks = bench->shape.chunks * bench->shape.slices;
    emulate("DECOMPRESS_ERROR", decompress_error);
    emulate("OUT_OF_ORDER", order);
    for (unsigned i = 0; i < 3 * tasks; i++) {
        unsigned number = i % tasks + 1;
        const char *repeat = repeats[i / tasks];
        if (test_is_brief() && number % 3 != i / tasks) {
            continue; /* each task fails, in one of the three ways */
        }
        reopen_with_fault(bench, engine, number, repeat);
        check_fetch_fault(fetch(bench), engine, number, repeat);
        if (repeat[0] == '\0') {
            CHECK_EQUAL(fetch(bench), SS_OK); /* as good as new */
        }
    }
    emulate("FAULT", NULL);
    emulate("DECOMPRESS_ERROR", NULL);
    emulate("OUT_OF_ORDER", NULL);
}

PIPELINE_TEST(test_a_fault_at_each_task_of_a_fetch, AS_BEFORE, AS_BEFORE) {
    check_faulty_fetches(bench, "decompress", "stop", "0");
    check_faulty_fetches(bench, "decompress", "continue", "5");
    check_faulty_fetches(bench, "dma", "stop", "0");
    check_faulty_fetches(bench, "dma", "stop", "9");
}

/* Several pieces of one slice, of which one fails. */
PIPELINE_TEST(test_a_fault_at_each_piece, shape->chunks = shape->slices = 2, AS_BEFORE) {
    const struct shape *shape = &bench->shape;
    unsigned pieces = shape->chunks * shape->slices * ((2 * shape->vectors * shape->vector_length + 1499) / 1500);
    emulate("MAX_BUF_BYTES", "1500");
    for (unsigned i = 0; i < 2 * pieces; i++) {
        reopen_with_fault(bench, "dma", i / 2 + 1, i % 2 ? "+" : "");
        CHECK_EQUAL(fetch(bench), i % 2 ? SS_DEVICE : SS_OK);
    }
    emulate("FAULT", NULL);
    emulate("MAX_BUF_BYTES", NULL);
}

/* ---- Memory that is elsewhere ----------------------------------------------------------------------------------- */

struct elsewhere {
    struct ss_export *exported;
    struct ss_memory memory;
};

static struct elsewhere export_memory(uint8_t *bytes, uint64_t size) {
    struct elsewhere elsewhere = {.memory = {.kind = SS_MEMORY_EXPORTED, .address = bytes, .size = size}};
    CHECK_EQUAL(ss_export_open("", bytes, size, -1, &elsewhere.exported), SS_OK);
    ss_export_descriptor(elsewhere.exported, &elsewhere.memory.descriptor, &elsewhere.memory.descriptor_size);
    CHECK(elsewhere.memory.descriptor_size > 0);
    return elsewhere;
}

/* Encodes from exported memory; what came out is what the fixture has. */
static enum ss_result store(const struct bench *bench, struct ss_batch *batch) {
    batch_make_room(batch);
    batch->deadline_ns = after_patience(); /* of this store: a test has hundreds */
    enum ss_result result = ss_pipeline_encode(bench->pipeline, batch);
    for (uint32_t i = 0; i < batch->slice_count; i++) {
        const struct ss_piece *chunk = &batch->pieces[i / bench->fixture->shape.slices];
        CHECK(chunk->result != SS_OK || batch->slices[i].checksum == bench->fixture->slices[i].checksum);
    }
    return result;
}

PIPELINE_TEST(test_exported_memory, AS_BEFORE, AS_BEFORE) {
    struct ss_batch *batch = bench_begin(bench);
    struct elsewhere elsewhere = export_memory(batch->groups->memory, bench->fixture->size);
    CHECK_EQUAL(ss_memory_register(bench->pipeline, &elsewhere.memory, &batch->groups->registered), SS_OK);
    CHECK(ss_memory_address(batch->groups->registered) == batch->groups->memory);
    CHECK_EQUAL(bench_fetch(bench), SS_OK);
    CHECK(memcmp(batch->groups->memory, bench->fixture->expected, bench->fixture->size) == 0);
    ss_export_close(elsewhere.exported);
    memset(batch->groups->memory, 0, bench->fixture->size);
    CHECK_EQUAL(bench_fetch(bench), SS_DEVICE);
    CHECK_EQUAL(store(bench, batch), SS_DEVICE);
    ss_memory_release(batch->groups->registered);
    CHECK_EQUAL(fetch(bench), SS_OK); /* to other memory */
}

PIPELINE_TEST(test_memory_that_does_not_fit, AS_BEFORE, AS_BEFORE) {
    struct ss_pipeline *pipeline = bench->pipeline;
    struct ss_batch *batch = bench_begin(bench);
    struct ss_group *group = batch->groups;
    uint8_t *bytes = group->memory;
    struct ss_registered_memory *none = NULL;
    CHECK_EQUAL(ss_pipeline_memory_kinds(pipeline), 1U << SS_MEMORY_LOCAL | 1U << SS_MEMORY_EXPORTED);
    CHECK_EQUAL(ss_pipeline_fetch(pipeline, batch, bench->sockets, 1), SS_BAD_ARGUMENT); /* not registered */
    struct elsewhere elsewhere = export_memory(bytes, bench->fixture->size);
    struct ss_memory memory = elsewhere.memory;
    CHECK_EQUAL(ss_memory_register(pipeline, &memory, &group->registered), SS_OK);
    for (int outside = -1; outside <= 1; outside += 2) { /* it begins outside, or ends there */
        group->memory = bytes + outside;
        CHECK_EQUAL(ss_pipeline_fetch(pipeline, batch, bench->sockets, 1), SS_BAD_ARGUMENT);
    }
    group->memory = bytes;
    CHECK_EQUAL(ss_pipeline_fetch(pipeline, batch, bench->sockets, 1), SS_OK);
    CHECK_EQUAL(store(bench, batch), SS_OK);
    group->memory = bytes + 1;
    CHECK_EQUAL(store(bench, batch), SS_BAD_ARGUMENT);
    group->memory = bytes;
    ss_memory_release(group->registered);
    ss_export_close(elsewhere.exported);
    memory.descriptor_size = 0;
    CHECK_EQUAL(ss_memory_register(pipeline, &memory, &none), SS_BAD_ARGUMENT);
    memory.kind = SS_MEMORY_CUDA_IPC;
    CHECK_EQUAL(ss_memory_register(pipeline, &memory, &none), SS_NOT_SUPPORTED);
    memory.kind = SS_MEMORY_LOCAL;
    memory.size = 0;
    CHECK_EQUAL(ss_memory_register(pipeline, &memory, &none), SS_BAD_ARGUMENT);
    memory.size = UINT64_MAX;
    CHECK_EQUAL(ss_memory_register(pipeline, &memory, &none), SS_BAD_ARGUMENT);
}

PIPELINE_TEST(test_descriptors_that_are_none, AS_BEFORE, AS_BEFORE) {
    uint8_t bytes[4096] = {0};
    struct elsewhere elsewhere = export_memory(bytes, sizeof bytes);
    uint8_t forged[512];
    size_t size = elsewhere.memory.descriptor_size;
    CHECK(size <= sizeof forged);
    struct ss_memory memory = elsewhere.memory;
    memory.descriptor = forged;
    for (size_t i = 0; i < size; i++) {
        struct ss_registered_memory *destination = NULL;
        memcpy(forged, elsewhere.memory.descriptor, size);
        forged[i] ^= 0x10;
        CHECK_EQUAL(ss_memory_register(bench->pipeline, &memory, &destination), SS_BAD_ARGUMENT);
        memcpy(forged, elsewhere.memory.descriptor, size);
        memory.descriptor_size = i;
        CHECK_EQUAL(ss_memory_register(bench->pipeline, &memory, &destination), SS_BAD_ARGUMENT);
        memory.descriptor_size = size;
    }
    ss_export_close(elsewhere.exported);
    struct ss_export *none = NULL;
    CHECK_EQUAL(ss_export_open("", NULL, 1, -1, &none), SS_BAD_ARGUMENT);
    CHECK_EQUAL(ss_export_open("", bytes, 0, -1, &none), SS_BAD_ARGUMENT);
    CHECK_EQUAL(ss_export_open("", bytes, UINT64_MAX, -1, &none), SS_BAD_ARGUMENT);
    CHECK_EQUAL(ss_export_open("mlx5_9", bytes, sizeof bytes, -1, &none), SS_NOT_SUPPORTED);
}

PIPELINE_TEST(test_a_fault_at_each_task_of_a_store, AS_BEFORE, AS_BEFORE) {
    static const char *const repeats[] = {"", "+", "*"};
    struct ss_batch *batch = bench_begin(bench);
    memcpy(batch->groups->memory, bench->fixture->source, bench->fixture->size);
    for (unsigned i = 0; i < 3 * bench->shape.chunks * bench->shape.slices; i++) {
        if (test_is_brief() && i / 3 % 3 != i % 3) {
            continue;
        }
        const char *repeat = repeats[i % 3];
        /* No export is open, or the device would stay open, with the settings that it has. */
        reopen_with_fault(bench, "dma", i / 3 + 1, repeat);
        struct elsewhere elsewhere = export_memory(batch->groups->memory, bench->fixture->size);
        CHECK_EQUAL(ss_memory_register(bench->pipeline, &elsewhere.memory, &batch->groups->registered), SS_OK);
        enum ss_result result = store(bench, batch);
        CHECK(result == SS_OK || (result == SS_DEVICE && repeat[0] != '\0'));
        CHECK(result == SS_DEVICE || (repeat[0] != '+' && (repeat[0] != '*' || i / 3 > 0)));
        ss_memory_release(batch->groups->registered);
        ss_export_close(elsewhere.exported);
    }
    emulate("FAULT", NULL);
}

/* ---- The end ---------------------------------------------------------------------------------------------------- */

static void *cancel_soon(void *argument) {
    struct ss_batch *batch = argument;
    usleep(3000); /* whenever it comes, it has to be right; on most machines some slices are in flight then */
    ss_batch_cancel(batch);
    return NULL;
}

/* A finished batch has nothing in flight, and a closed pipeline has freed everything. */
PIPELINE_TEST(test_a_batch_that_is_cancelled_while_engines_work, AS_BEFORE, AS_BEFORE) {
    bench_close(bench);
    emulate("LATENCY_US", "2000");
    bench_open(bench);
    for (int repeat = 0; repeat < 5; repeat++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, cancel_soon, bench_begin(bench)) == 0);
        enum ss_result result = bench_fetch(bench);
        CHECK(result == SS_OK || result == SS_CANCELLED);
        pthread_join(thread, NULL);
        bench_reconnect(bench);
    }
    CHECK_EQUAL(fetch(bench), SS_OK);
    emulate("LATENCY_US", NULL);
}

int main(void) {
    CHECK(setenv("SHADOWSERVE_TEST_BACKEND", "doca", 1) == 0);
    test_settings_that_change_nothing();
    test_slices_of_the_largest_size(0);
    test_devices_by_name(0);
    test_a_device_that_cannot_and_none_at_all(0);
    test_options_that_engines_do_not_take(0);
    test_two_pipelines_on_one_device(0);
    test_wrong_deflate_data(0);
    if (ss_codec_implementation(SS_CODEC_LZ4) != NULL) {
        test_wrong_lz4_data(0);
    }
    test_a_fault_at_each_task_of_a_fetch(0);
    test_a_fault_at_each_piece(0);
    test_exported_memory(0);
    test_memory_that_does_not_fit(0);
    test_descriptors_that_are_none(0);
    test_a_fault_at_each_task_of_a_store(0);
    test_a_batch_that_is_cancelled_while_engines_work(0);
    return 0;
}
