/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pipeline_backend.c - the backend interface, with a backend that works as an accelerator does: several works in
 * flight, complete later, in another order, only when polled
 *
 * The backend checks the executor's rules: never more works in flight than it allows, one thread for each channel, no
 * work in flight when a channel closes.
 */
#include <string.h>

#include "backends/backend.h"
#include "pipeline/internal.h"
#include "pipeline_support.h"

enum { IN_FLIGHT_MAX = 4, POLLS_UNTIL_DONE = 3 };

struct channel {
    struct ss_work *works[IN_FLIGHT_MAX];
    uint32_t count;
    uint32_t polls;
    enum ss_stage stage;
    pthread_t thread;
};

static struct {
    enum ss_result start_fails;
    enum ss_result complete_fails;
    uint64_t fail_crc32; /* of the slice that fails */
    int checks_decoded;
    uint64_t slice_bytes_max;
    int fused;
    int plain_memory;
    int collect_fails;
    uint32_t channel_fails; /* the first, second, ... channel that is opened; 0: none */
    _Atomic uint32_t tried;
    _Atomic uint32_t opened;
    _Atomic uint32_t closed;
    _Atomic uint32_t most_in_flight;
    uint32_t stands_until; /* the first decompress() returns when the others have been called so often; 0: at once */
    uint32_t started;
    pthread_mutex_t lock;
    pthread_cond_t starts;
} late;

static const char *late_description(void) {
    return "late";
}

static int late_emulated(void) {
    return 1;
}

static enum ss_result late_open(const struct ss_backend_setup *setup, void **device) {
    CHECK(setup->device[0] == '\0' && setup->queue_depth > 0);
    *device = &late;
    return SS_OK;
}

static const char *late_device_name(void *device) {
    CHECK(device == &late);
    return "late0";
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
                                            .fused = (uint32_t)late.fused,
                                            .checks_decoded = (uint32_t)late.checks_decoded,
                                            .memory_kinds = 1U << SS_MEMORY_LOCAL | 1U << SS_MEMORY_EXPORTED,
                                            .plain_memory = (uint32_t)late.plain_memory};
}

static enum ss_result late_channel_open(void *device, const struct ss_backend_channel *setup, void **argument) {
    CHECK(device == &late);
    if (atomic_fetch_add(&late.tried, 1) + 1 == late.channel_fails) {
        return SS_NO_MEMORY;
    }
    struct channel *channel = calloc(1, sizeof *channel);
    CHECK(channel != NULL);
    int separate = !late.fused;
    CHECK_EQUAL(setup->source.data != NULL, setup->stage != SS_STAGE_QUANTIZE);
    CHECK_EQUAL(setup->target.data != NULL,
                setup->stage == SS_STAGE_QUANTIZE || (separate && setup->stage == SS_STAGE_DECOMPRESS));
    CHECK(setup->stage != SS_STAGE_QUANTIZE || setup->target.size == SS_DELIVERED_BYTES_MAX);
    channel->stage = setup->stage;
    channel->thread = pthread_self();
    *argument = channel;
    atomic_fetch_add(&late.opened, 1);
    return SS_OK;
}

static void check_thread(const struct channel *channel) {
    CHECK(pthread_equal(channel->thread, pthread_self()));
}

static void late_channel_close(void *argument) {
    struct channel *channel = argument;
    check_thread(channel);
    CHECK_EQUAL(channel->count, 0);
    free(channel);
    atomic_fetch_add(&late.closed, 1);
}

/* Exported memory has an address of which nothing is true here: where it really is, only the backend knows. */
#define ELSEWHERE ((uintptr_t)1 << 60)

struct late_memory {
    uint8_t *address; /* as batches name it */
    uint8_t *bytes;
    uint64_t size;
};

static enum ss_result late_memory_open(void *device, const struct ss_memory *memory, void **handle, uint8_t **address) {
    CHECK(device == &late);
    struct late_memory *opened = calloc(1, sizeof *opened);
    CHECK(opened != NULL);
    opened->address = opened->bytes = memory->address;
    opened->size = memory->size;
    if (memory->kind == SS_MEMORY_EXPORTED) {
        CHECK_EQUAL(memory->descriptor_size, sizeof opened->bytes);
        memcpy(&opened->bytes, memory->descriptor, sizeof opened->bytes);
    }
    *handle = opened;
    *address = opened->address;
    atomic_fetch_add(&late.opened, 1);
    return SS_OK;
}

static void late_memory_close(void *device, void *handle) {
    CHECK(device == &late);
    free(handle);
    atomic_fetch_add(&late.closed, 1);
}

static uint8_t *late_reach(const struct ss_work *work, const uint8_t *address) {
    const struct late_memory *memory = work->memory;
    if (memory == NULL) {
        CHECK(late.plain_memory);
        return (uint8_t *)address;
    }
    uint64_t offset = (uintptr_t)address - (uintptr_t)memory->address;
    CHECK(offset <= memory->size && work->source_size <= memory->size - offset);
    return memory->bytes + offset;
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

/* The thread of the first slice stands still, as one does that is kept from its core. */
static void late_stand(void) {
    pthread_mutex_lock(&late.lock);
    int first = late.started++ == 0;
    pthread_cond_broadcast(&late.starts);
    while (first && late.started <= late.stands_until) {
        pthread_cond_wait(&late.starts, &late.lock);
    }
    pthread_mutex_unlock(&late.lock);
}

static enum ss_result late_decompress(void *channel, struct ss_work *work) {
    late_stand();
    if (late.start_fails != SS_OK && work->decoded_crc32 == late.fail_crc32) {
        return late.start_fails;
    }
    late_add(channel, work);
    return SS_OK;
}

static enum ss_result late_deliver(void *argument, struct ss_work *work) {
    struct channel *channel = argument;
    CHECK_EQUAL(channel->stage, SS_STAGE_DMA);
    work->codec = SS_CODEC_NONE; /* so that late_work() copies it */
    work->target = late_reach(work, work->target);
    late_add(channel, work);
    return SS_OK;
}

static enum ss_result late_collect(void *argument, struct ss_work *work) {
    struct channel *channel = argument;
    CHECK_EQUAL(channel->stage, SS_STAGE_QUANTIZE);
    if (late.collect_fails) {
        return SS_DEVICE;
    }
    work->codec = SS_CODEC_NONE;
    work->source = late_reach(work, work->source);
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
    .description = late_description,
    .emulated = late_emulated,
    .open = late_open,
    .close = late_close,
    .device_name = late_device_name,
    .capabilities = late_capabilities,
    .channel_open = late_channel_open,
    .channel_close = late_channel_close,
    .memory_open = late_memory_open,
    .memory_close = late_memory_close,
    .decompress = late_decompress,
    .deliver = late_deliver,
    .collect = late_collect,
    .progress = late_progress,
};

/* ---- Tests --------------------------------------------------------------------------------------------------- */

static void late_reset(int fused) {
    memset(&late, 0, sizeof late);
    late.fused = fused;
    late.plain_memory = 1;
    CHECK_EQUAL(pthread_mutex_init(&late.lock, NULL), 0);
    CHECK_EQUAL(pthread_cond_init(&late.starts, NULL), 0);
}

/* Fetches batches over a new pipeline and checks their results; 'bad' is the chunk that must fail, if any. */
static void run(struct bench *bench, enum ss_result expected, uint32_t bad) {
    bench_close(bench);
    bench_open(bench);
    for (int repeat = 0; repeat < 3; repeat++) {
        const struct ss_batch *batch = bench_begin(bench);
        CHECK_EQUAL(ss_pipeline_fetch(bench->pipeline, bench->batch, bench->sockets, SOCKETS), expected);
        for (uint32_t i = 0; i < batch->piece_count; i++) {
            CHECK(i >= bad || batch->pieces[i].result == SS_OK);
            CHECK(batch->pieces[i].result != SS_OK || fixture_matches(bench->fixture, batch, i));
        }
        CHECK(bad >= batch->piece_count || batch->pieces[bad].result == expected);
    }
}

/* LATE_TEST() is PIPELINE_TEST() over this backend; at its end all that was opened is closed. */
#define LATE_TEST(name, shape_changes, option_changes)                                                                 \
    PIPELINE_TEST(name, (late_reset(bench.fused), shape_changes), (bench.backend = &late_backend, option_changes))

LATE_TEST(test_works_complete_late_and_out_of_order, shape->slices = 16, AS_BEFORE) {
    run(bench, SS_OK, bench->shape.chunks);
    CHECK(late.most_in_flight > 1);
}

/* A thread that is kept from its core in a piece of 64 slices, all of which are there at once, keeps no more of them
 * than it can start: the other thread decodes all others. */
LATE_TEST(test_a_thread_that_stands_still_keeps_few_slices, (shape->chunks = 1, shape->slices = 64),
          options->queue_depth = shape->slices) {
    struct ss_batch *batch = bench_begin(bench);
    late.stands_until = bench->shape.slices - IN_FLIGHT_MAX;
    batch->pieces[0].memory = bench->fixture->records[0] + RECORD_OFFSET;
    batch->pieces[0].origin = SS_ORIGIN_MEMORY;
    CHECK_EQUAL(bench_fetch_over(bench, 0), SS_OK);
    check_delivered(bench);
}

LATE_TEST(test_works_that_fail, AS_BEFORE, AS_BEFORE) {
    late.fail_crc32 = bench->fixture->slices[bench->fixture->chunks[2].slice_first + 3].decoded_crc32;
    late.complete_fails = SS_BAD_DATA;
    run(bench, SS_BAD_DATA, 2);
    late.complete_fails = SS_OK;
    late.start_fails = SS_OS_ERROR;
    run(bench, SS_OS_ERROR, 2);
}

/* The engine's CRC-32 is the only check where there are no scales, and the CPU's is still made where there are. */
static void check_decoded_bytes(struct bench *bench) {
    int binned = bench->shape.quantizer == SS_QUANTIZER_BINNED;
    struct ss_slice *slice = &bench->fixture->slices[bench->fixture->chunks[3].slice_first];
    late.checks_decoded = 1;
    run(bench, SS_OK, bench->shape.chunks);
    slice->decoded_crc32 ^= 1;
    run(bench, SS_CHECKSUM, 3);
    slice->decoded_crc32 ^= 1;
    slice->checksum ^= 1;
    run(bench, binned ? SS_CHECKSUM : SS_OK, binned ? 3 : bench->shape.chunks);
}

LATE_TEST(test_checks_of_binned_bytes, AS_BEFORE, AS_BEFORE) {
    check_decoded_bytes(bench);
}

LATE_TEST(test_checks_of_lossless_bytes, shape->quantizer = SS_QUANTIZER_LOSSLESS, AS_BEFORE) {
    check_decoded_bytes(bench);
}

LATE_TEST(test_codec_and_size_that_the_backend_lacks, AS_BEFORE, AS_BEFORE) {
    bench->fixture->chunks[1].codec = SS_CODEC_NONE;
    run(bench, SS_NOT_SUPPORTED, 1);
    bench->fixture->chunks[1].codec = SS_CODEC_DEFLATE;
    late.slice_bytes_max = bench->fixture->slices[0].decoded_length;
    run(bench, SS_OK, bench->shape.chunks);
    late.slice_bytes_max -= 1;
    run(bench, SS_NOT_SUPPORTED, 0);
}

LATE_TEST(test_fusing_needs_the_backend, AS_BEFORE, AS_BEFORE) {
    struct ss_pipeline *pipeline;
    bench_close(bench);
    bench->options.fused = 1;
    CHECK_EQUAL(ss_pipeline_create_with(&bench->options, &late_backend, &pipeline), SS_NOT_SUPPORTED);
}

static struct ss_memory exported(uint8_t *bytes, uint64_t size) {
    static uint8_t *descriptor;
    descriptor = bytes;
    return (struct ss_memory){.kind = SS_MEMORY_EXPORTED,
                              .address = (uint8_t *)((uintptr_t)bytes ^ ELSEWHERE),
                              .size = size,
                              .descriptor = &descriptor,
                              .descriptor_size = sizeof descriptor};
}

/* A batch to memory of another process, and back: storing from it gives the fetched records. */
LATE_TEST(test_memory_that_is_elsewhere, AS_BEFORE, late.plain_memory = 0) {
    const struct fixture *fixture = bench->fixture;
    struct ss_batch *batch = bench_begin(bench);
    uint8_t *bytes = batch->groups->memory;
    struct ss_memory memory = exported(bytes, fixture->size);
    CHECK_EQUAL(ss_memory_register(bench->pipeline, &memory, &batch->groups->registered), SS_OK);
    batch->groups->memory = ss_memory_address(batch->groups->registered);
    CHECK_EQUAL(ss_pipeline_fetch(bench->pipeline, batch, bench->sockets, 1), SS_OK);
    CHECK(memcmp(bytes, fixture->expected, fixture->size) == 0);
    batch_make_room(batch);
    late.collect_fails = 1;
    CHECK_EQUAL(ss_pipeline_encode(bench->pipeline, batch), SS_DEVICE);
    late.collect_fails = 0;
    CHECK_EQUAL(ss_pipeline_encode(bench->pipeline, batch), SS_OK);
    for (uint32_t i = 0; i < batch->slice_count; i++) {
        CHECK_EQUAL(batch->slices[i].decoded_crc32, fixture->slices[i].decoded_crc32);
    }
    ss_memory_release(batch->groups->registered);
    batch->groups->memory = bytes;
}

LATE_TEST(test_memory_that_does_not_fit, AS_BEFORE, late.plain_memory = 0) {
    struct ss_pipeline *pipeline = bench->pipeline;
    CHECK(strcmp(ss_pipeline_device(pipeline), "late0") == 0);
    CHECK_EQUAL(ss_pipeline_memory_kinds(pipeline), 1U << SS_MEMORY_LOCAL | 1U << SS_MEMORY_EXPORTED);
    struct ss_batch *batch = bench_begin(bench);
    int32_t *sockets = bench->sockets;                                            /* never used */
    CHECK_EQUAL(ss_pipeline_fetch(pipeline, batch, sockets, 1), SS_BAD_ARGUMENT); /* not registered */
    struct ss_memory memory = exported(batch->groups->memory, bench->fixture->size);
    CHECK_EQUAL(ss_memory_register(pipeline, &memory, &batch->groups->registered), SS_OK);
    CHECK_EQUAL(ss_pipeline_fetch(pipeline, batch, sockets, 1), SS_BAD_ARGUMENT); /* not that memory's address */
    uint8_t *bytes = batch->groups->memory;
    batch->groups->memory = ss_memory_address(batch->groups->registered) + 1;
    CHECK_EQUAL(ss_pipeline_fetch(pipeline, batch, sockets, 1), SS_BAD_ARGUMENT); /* ends outside */
    CHECK_EQUAL(ss_pipeline_encode(pipeline, batch), SS_BAD_ARGUMENT);
    batch->groups->memory = bytes;
    ss_memory_release(batch->groups->registered);
    struct ss_registered_memory *none = NULL;
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

/* A pipeline of which one channel cannot be opened is not made, and leaves nothing behind. */
LATE_TEST(test_channels_that_do_not_open, AS_BEFORE, AS_BEFORE) {
    const struct ss_pipeline_options *options = &bench->options;
    uint32_t channels = options->decompress_threads + options->dma_threads + options->store_threads;
    bench_close(bench);
    for (uint32_t fails = 1; fails <= channels; fails++) {
        late_reset(0);
        late.channel_fails = fails;
        struct ss_pipeline *pipeline = NULL;
        CHECK_EQUAL(ss_pipeline_create_with(options, &late_backend, &pipeline), SS_NO_MEMORY);
        CHECK(pipeline == NULL);
        CHECK_EQUAL(late.tried, channels);
        CHECK_EQUAL(late.opened, channels - 1);
        CHECK_EQUAL(late.closed, channels - 1);
    }
}

static void test_backends_by_name(void) {
    CHECK(strcmp(ss_backend_description("software"), "CPU") == 0);
    CHECK_EQUAL(ss_backend_emulated("software"), 0);
    CHECK(ss_backend_description("fpga") == NULL);
    CHECK_EQUAL(ss_backend_emulated("fpga"), 0);
}

int main(void) {
    for (int fused = 0; fused <= backend_fuses(); fused++) {
        test_works_complete_late_and_out_of_order(fused);
        test_works_that_fail(fused);
    }
    test_a_thread_that_stands_still_keeps_few_slices(1);
    test_checks_of_binned_bytes(0);
    test_checks_of_lossless_bytes(0);
    test_codec_and_size_that_the_backend_lacks(0);
    test_fusing_needs_the_backend(0);
    test_memory_that_is_elsewhere(0);
    test_memory_that_does_not_fit(0);
    test_channels_that_do_not_open(0);
    test_backends_by_name();
    return 0;
}
