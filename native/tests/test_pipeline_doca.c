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

#include "brief.h"
#include "pipeline_support.h"

enum { SOCKETS = 2 };

struct bench {
    struct fixture *fixture;
    struct server *server;
    struct ss_pipeline *pipeline;
    int32_t sockets[SOCKETS];
};

/* The emulator reads its settings when a device is opened that was not open. */
static void emulate(const char *name, const char *value) {
    char variable[64];
    (void)snprintf(variable, sizeof variable, "DOCA_EMULATOR_%s", name);
    CHECK((value != NULL ? setenv(variable, value, 1) : unsetenv(variable)) == 0);
}

static void emulate_fault(const char *engine, unsigned number, const char *repeat) {
    char fault[64];
    (void)snprintf(fault, sizeof fault, "%s:%u%s", engine, number, repeat);
    emulate("FAULT", fault);
}

static struct shape shape_of(enum ss_codec codec, enum ss_quantizer quantizer) {
    struct shape shape = default_shape();
    shape.codec = codec;
    shape.quantizer = quantizer;
    return shape;
}

static struct bench bench_start(const struct shape *shape) {
    struct bench bench = {.fixture = fixture_make(shape), .server = server_start()};
    fixture_serve(bench.fixture, bench.server);
    for (int i = 0; i < SOCKETS; i++) {
        bench.sockets[i] = server_connect(bench.server);
    }
    return bench;
}

static void bench_open(struct bench *bench) {
    struct ss_pipeline_options options = pipeline_options(bench->fixture, 0);
    CHECK_EQUAL(ss_pipeline_create(&options, &bench->pipeline), SS_OK);
}

static void bench_close(struct bench *bench) {
    ss_pipeline_destroy(bench->pipeline);
    bench->pipeline = NULL;
}

static void bench_stop(struct bench *bench) {
    bench_close(bench);
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
    enum ss_result first = SS_OK;
    CHECK(batch->sockets_in_sync);
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        CHECK(batch->pieces[i].result != SS_OK || fixture_matches(bench->fixture, batch, i));
        CHECK(first != SS_OK || batch->pieces[i].result != SS_SKIPPED);
        first = first == SS_OK ? batch->pieces[i].result : first;
    }
    CHECK_EQUAL(result, first);
    batch_free(batch);
    return result;
}

/* ---- Limits, profiles, orders --------------------------------------------------------------------------------- */

static void fetch_all(enum ss_codec codec, enum ss_quantizer quantizer) {
    struct shape shape = shape_of(codec, quantizer);
    struct bench bench = bench_start(&shape);
    bench_open(&bench);
    for (int repeat = 0; repeat < 3; repeat++) {
        CHECK_EQUAL(bench_fetch(&bench), SS_OK);
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
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
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
static void test_slices_of_the_largest_size(void) {
    struct shape shape = shape_of(SS_CODEC_DEFLATE, SS_QUANTIZER_BINNED);
    shape.dtype = SS_DTYPE_FLOAT32;
    shape.chunks = 2;
    shape.slices = 2;
    shape.vectors = 512;
    shape.vector_length = 4096;
    struct bench bench = bench_start(&shape);
    bench_open(&bench);
    CHECK_EQUAL(bench_fetch(&bench), SS_OK);
    bench_stop(&bench);
}

static void test_devices_by_name(void) {
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
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    emulate("DEVICES", "0000:03:00.0,0000:03:00.1");
    for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++) {
        struct ss_pipeline_options options = pipeline_options(fixture, 0);
        struct ss_pipeline *pipeline = NULL;
        options.device = devices[i].name;
        CHECK_EQUAL(ss_pipeline_create(&options, &pipeline), devices[i].result);
        CHECK(pipeline == NULL || strstr(ss_pipeline_device(pipeline), devices[i].name) != NULL);
        ss_pipeline_destroy(pipeline);
    }
    emulate("DEVICES", NULL);
    fixture_free(fixture);
}

static void test_a_device_that_cannot_and_none_at_all(void) {
    static const char *const settings[][3] = {
        {"PROFILE", "none", "doca_compress_cap_task_decompress_deflate_is_supported: DOCA_ERROR_NOT_SUPPORTED"},
        {"DEVICES", "", "doca_devinfo_create_list: DOCA_ERROR_NOT_FOUND"},
    };
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    struct ss_pipeline_options options = pipeline_options(fixture, 0);
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        struct ss_pipeline *pipeline = NULL;
        struct ss_export *exported = NULL;
        char text[128];
        emulate(settings[i][0], settings[i][1]);
        CHECK_EQUAL(ss_pipeline_create(&options, &pipeline), SS_NOT_SUPPORTED);
        ss_device_error(text, sizeof text);
        CHECK(strcmp(text, settings[i][2]) == 0);
        CHECK_EQUAL(ss_export_open("", text, sizeof text, -1, &exported), SS_NOT_SUPPORTED);
        emulate(settings[i][0], NULL);
    }
    fixture_free(fixture);
}

static void test_options_that_engines_do_not_take(void) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    struct ss_pipeline *pipeline = NULL;
    struct ss_pipeline_options options = pipeline_options(fixture, 0);
    options.fused = 1;
    CHECK_EQUAL(ss_pipeline_create(&options, &pipeline), SS_NOT_SUPPORTED);
    CHECK(pipeline == NULL);
    fixture_free(fixture);
}

static void test_two_pipelines_on_one_device(void) {
    struct shape shape = default_shape();
    struct bench first = bench_start(&shape), second = bench_start(&shape);
    bench_open(&first);
    bench_open(&second);
    CHECK_EQUAL(bench_fetch(&first), SS_OK);
    CHECK_EQUAL(bench_fetch(&second), SS_OK);
    bench_stop(&first);
    CHECK_EQUAL(bench_fetch(&second), SS_OK);
    bench_stop(&second);
}

/* ---- Data that is not as it should be -------------------------------------------------------------------------- */

/* Without scales only the engine checks the data: a stream that it cannot decode, and one that decodes to other bytes.
 */
static void test_data_that_is_wrong(enum ss_codec codec) {
    struct shape shape = shape_of(codec, SS_QUANTIZER_LOSSLESS);
    struct bench bench = bench_start(&shape);
    struct ss_slice *slice = &bench.fixture->slices[bench.fixture->chunks[3].slice_first + 2];
    bench_open(&bench);
    slice->decoded_crc32 ^= 1;
    CHECK_EQUAL(bench_fetch(&bench), SS_CHECKSUM);
    slice->decoded_crc32 ^= 1;
    CHECK_EQUAL(bench_fetch(&bench), SS_OK);
    uint8_t *stream = bench.fixture->records[3] + RECORD_OFFSET + slice->offset;
    memset(stream, 0xFF, slice->encoded_length);
    fixture_serve(bench.fixture, bench.server);
    CHECK_EQUAL(bench_fetch(&bench), SS_BAD_DATA);
    bench_stop(&bench);
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

static void test_a_fault_at_each_task_of_a_fetch(const char *engine, const char *decompress_error, const char *order) {
    static const char *const repeats[] = {"", "+", "*"};
    struct shape shape = default_shape();
    struct bench bench = bench_start(&shape);
    unsigned tasks = shape.chunks * shape.slices;
    emulate("DECOMPRESS_ERROR", decompress_error);
    emulate("OUT_OF_ORDER", order);
    for (size_t i = 0; i < sizeof repeats / sizeof repeats[0]; i++) {
        for (unsigned number = 1; number <= tasks; number++) {
            if (test_is_brief() && number % 3 != i) {
                continue; /* each task fails, in one of the three ways */
            }
            emulate_fault(engine, number, repeats[i]);
            bench_open(&bench);
            check_fetch_fault(bench_fetch(&bench), engine, number, repeats[i]);
            if (repeats[i][0] == '\0') {
                CHECK_EQUAL(bench_fetch(&bench), SS_OK); /* as good as new */
            }
            bench_close(&bench);
        }
    }
    emulate("FAULT", NULL);
    emulate("DECOMPRESS_ERROR", NULL);
    emulate("OUT_OF_ORDER", NULL);
    bench_stop(&bench);
}

/* Several pieces of one slice, of which one fails. */
static void test_a_fault_at_each_piece(void) {
    struct shape shape = default_shape();
    shape.chunks = 2;
    shape.slices = 2;
    struct bench bench = bench_start(&shape);
    emulate("MAX_BUF_BYTES", "1500");
    unsigned pieces = shape.chunks * shape.slices * ((2 * shape.vectors * shape.vector_length + 1499) / 1500);
    for (unsigned number = 1; number <= pieces; number++) {
        emulate_fault("dma", number, "");
        bench_open(&bench);
        CHECK_EQUAL(bench_fetch(&bench), SS_OK);
        bench_close(&bench);
        emulate_fault("dma", number, "+");
        bench_open(&bench);
        CHECK_EQUAL(bench_fetch(&bench), SS_DEVICE);
        bench_close(&bench);
    }
    emulate("FAULT", NULL);
    emulate("MAX_BUF_BYTES", NULL);
    bench_stop(&bench);
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
    uint64_t room = bench->fixture->size / batch->piece_count + (1 << 16);
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        batch->pieces[i].decompression_offset = i * room;
        batch->pieces[i].result = SS_SKIPPED;
    }
    batch->deadline_ns = after_patience(); /* of this store: a test has hundreds */
    enum ss_result result = ss_pipeline_encode(bench->pipeline, batch);
    for (uint32_t i = 0; i < batch->slice_count; i++) {
        const struct ss_piece *chunk = &batch->pieces[i / bench->fixture->shape.slices];
        CHECK(chunk->result != SS_OK || batch->slices[i].checksum == bench->fixture->slices[i].checksum);
    }
    return result;
}

static void test_exported_memory(void) {
    struct shape shape = default_shape();
    struct bench bench = bench_start(&shape);
    bench_open(&bench);
    struct ss_batch *batch = fixture_round(bench.fixture);
    struct elsewhere elsewhere = export_memory(batch->groups->memory, bench.fixture->size);
    CHECK_EQUAL(ss_memory_register(bench.pipeline, &elsewhere.memory, &batch->groups->registered), SS_OK);
    CHECK(ss_memory_address(batch->groups->registered) == batch->groups->memory);
    CHECK_EQUAL(pipeline_fetch(bench.pipeline, batch, bench.sockets, SOCKETS), SS_OK);
    CHECK(memcmp(batch->groups->memory, bench.fixture->expected, bench.fixture->size) == 0);
    ss_export_close(elsewhere.exported);
    memset(batch->groups->memory, 0, bench.fixture->size);
    CHECK_EQUAL(pipeline_fetch(bench.pipeline, batch, bench.sockets, SOCKETS), SS_DEVICE);
    CHECK_EQUAL(store(&bench, batch), SS_DEVICE);
    ss_memory_release(batch->groups->registered);
    CHECK_EQUAL(bench_fetch(&bench), SS_OK); /* to other memory */
    batch->groups->registered = NULL;
    batch_free(batch);
    bench_stop(&bench);
}

static void test_descriptors_that_are_none(void) {
    struct shape shape = default_shape();
    struct bench bench = bench_start(&shape);
    bench_open(&bench);
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
        CHECK_EQUAL(ss_memory_register(bench.pipeline, &memory, &destination), SS_BAD_ARGUMENT);
        memcpy(forged, elsewhere.memory.descriptor, size);
        memory.descriptor_size = i;
        CHECK_EQUAL(ss_memory_register(bench.pipeline, &memory, &destination), SS_BAD_ARGUMENT);
        memory.descriptor_size = size;
    }
    ss_export_close(elsewhere.exported);
    struct ss_export *none = NULL;
    CHECK_EQUAL(ss_export_open("", NULL, 1, -1, &none), SS_BAD_ARGUMENT);
    CHECK_EQUAL(ss_export_open("", bytes, 0, -1, &none), SS_BAD_ARGUMENT);
    CHECK_EQUAL(ss_export_open("", bytes, UINT64_MAX, -1, &none), SS_BAD_ARGUMENT);
    CHECK_EQUAL(ss_export_open("mlx5_9", bytes, sizeof bytes, -1, &none), SS_NOT_SUPPORTED);
    bench_stop(&bench);
}

static void test_a_fault_at_each_task_of_a_store(void) {
    static const char *const repeats[] = {"", "+", "*"};
    struct shape shape = default_shape();
    struct bench bench = bench_start(&shape);
    struct ss_batch *batch = fixture_round(bench.fixture);
    memcpy(batch->groups->memory, bench.fixture->source, bench.fixture->size);
    struct elsewhere elsewhere = export_memory(batch->groups->memory, bench.fixture->size);
    for (unsigned i = 0; i < 3 * shape.chunks * shape.slices; i++) {
        if (test_is_brief() && i / 3 % 3 != i % 3) {
            continue;
        }
        const char *repeat = repeats[i % 3];
        emulate_fault("dma", i / 3 + 1, repeat);
        ss_export_close(elsewhere.exported); /* or the device would stay open, with the settings that it has */
        elsewhere.exported = NULL;
        bench_open(&bench);
        elsewhere = export_memory(batch->groups->memory, bench.fixture->size);
        CHECK_EQUAL(ss_memory_register(bench.pipeline, &elsewhere.memory, &batch->groups->registered), SS_OK);
        enum ss_result result = store(&bench, batch);
        CHECK(result == SS_OK || (result == SS_DEVICE && repeat[0] != '\0'));
        CHECK(result == SS_DEVICE || (repeat[0] != '+' && (repeat[0] != '*' || i / 3 > 0)));
        ss_memory_release(batch->groups->registered);
        bench_close(&bench);
    }
    emulate("FAULT", NULL);
    ss_export_close(elsewhere.exported);
    batch->groups->registered = NULL;
    batch_free(batch);
    bench_stop(&bench);
}

/* ---- The end ---------------------------------------------------------------------------------------------------- */

static void *cancel_soon(void *argument) {
    struct ss_batch *batch = argument;
    usleep(3000); /* whenever it comes, it has to be right; on most machines some slices are in flight then */
    ss_batch_cancel(batch);
    return NULL;
}

/* A finished batch has nothing in flight, and a closed pipeline has freed everything. */
static void test_a_batch_that_is_cancelled_while_engines_work(void) {
    struct shape shape = default_shape();
    struct bench bench = bench_start(&shape);
    emulate("LATENCY_US", "2000");
    bench_open(&bench);
    for (int repeat = 0; repeat < 5; repeat++) {
        struct ss_batch *batch = fixture_round(bench.fixture);
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, cancel_soon, batch) == 0);
        enum ss_result result = pipeline_fetch(bench.pipeline, batch, bench.sockets, SOCKETS);
        CHECK(result == SS_OK || result == SS_CANCELLED);
        pthread_join(thread, NULL);
        batch_free(batch);
        for (int i = 0; i < SOCKETS; i++) {
            close(bench.sockets[i]);
            bench.sockets[i] = server_connect(bench.server);
        }
    }
    CHECK_EQUAL(bench_fetch(&bench), SS_OK);
    emulate("LATENCY_US", NULL);
    bench_stop(&bench);
}

static void test_it_says_what_it_is(void) {
    CHECK(strncmp(ss_backend_description("doca"), "DOCA emulator ", strlen("DOCA emulator ")) == 0);
    CHECK_EQUAL(ss_backend_emulated("doca"), 1);
}

int main(void) {
    CHECK(setenv("SHADOWSERVE_TEST_BACKEND", "doca", 1) == 0);
    test_it_says_what_it_is();
    test_settings_that_change_nothing();
    test_slices_of_the_largest_size();
    test_devices_by_name();
    test_a_device_that_cannot_and_none_at_all();
    test_options_that_engines_do_not_take();
    test_two_pipelines_on_one_device();
    test_data_that_is_wrong(SS_CODEC_DEFLATE);
    if (ss_codec_implementation(SS_CODEC_LZ4) != NULL) {
        test_data_that_is_wrong(SS_CODEC_LZ4);
    }
    test_a_fault_at_each_task_of_a_fetch("decompress", "stop", "0");
    test_a_fault_at_each_task_of_a_fetch("decompress", "continue", "5");
    test_a_fault_at_each_task_of_a_fetch("dma", "stop", "0");
    test_a_fault_at_each_task_of_a_fetch("dma", "stop", "9");
    test_a_fault_at_each_piece();
    test_exported_memory();
    test_descriptors_that_are_none();
    test_a_fault_at_each_task_of_a_store();
    test_a_batch_that_is_cancelled_while_engines_work();
    return 0;
}
