/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pipeline_backend.c - a backend of which a channel does not open, or a thread stands still
 *
 * It is the software backend but for these calls. test_pipeline_doca.c shows with the emulator how works of an
 * accelerator end late, in any order, or fail.
 */
#include "backends/backend.h"
#include "pipeline/internal.h"
#include "pipeline_support.h"

static struct {
    uint32_t channel_fails; /* the first, second, ... channel that is opened; 0: none */
    _Atomic uint32_t tried;
    _Atomic uint32_t opened;
    _Atomic uint32_t closed;
    uint32_t stands_until; /* the first decompress() returns when the others have been called so often; 0: at once */
    uint32_t started;
    pthread_mutex_t lock;
    pthread_cond_t starts;
} held = {.lock = PTHREAD_MUTEX_INITIALIZER, .starts = PTHREAD_COND_INITIALIZER};

/* With memory of another kind, each store thread has a channel, too. */
static struct ss_backend_capabilities held_capabilities(void *device) {
    struct ss_backend_capabilities capabilities = ss_backend_software.capabilities(device);
    capabilities.memory_kinds |= 1U << SS_MEMORY_EXPORTED;
    return capabilities;
}

static enum ss_result held_channel_open(void *device, const struct ss_backend_channel *setup, void **channel) {
    if (atomic_fetch_add(&held.tried, 1) + 1 == held.channel_fails) {
        return SS_NO_MEMORY;
    }
    atomic_fetch_add(&held.opened, 1);
    return ss_backend_software.channel_open(device, setup, channel);
}

static void held_channel_close(void *channel) {
    atomic_fetch_add(&held.closed, 1);
    ss_backend_software.channel_close(channel);
}

/* The thread of the first slice stands still, as one does that is kept from its core. */
static enum ss_result held_decompress(void *channel, struct ss_work *work) {
    pthread_mutex_lock(&held.lock);
    int first = held.started++ == 0;
    pthread_cond_broadcast(&held.starts);
    while (first && held.started <= held.stands_until) {
        pthread_cond_wait(&held.starts, &held.lock);
    }
    pthread_mutex_unlock(&held.lock);
    return ss_backend_software.decompress(channel, work);
}

static struct ss_backend held_backend; /* of main() */

#define HELD_TEST(name, shape_changes, option_changes)                                                                 \
    PIPELINE_TEST(name, shape_changes, (bench.backend = &held_backend, option_changes))

/* A thread that is kept from its core in a piece of 64 slices, all of which are there at once, keeps no more of them
 * than it can start: the other thread decodes all others. */
HELD_TEST(test_a_thread_that_stands_still_keeps_few_slices, (shape->chunks = 1, shape->slices = 64),
          options->queue_depth = shape->slices) {
    struct ss_batch *batch = bench_begin(bench);
    held.stands_until = bench->shape.slices - held_capabilities(NULL).in_flight_max;
    batch->pieces[0].memory = bench->fixture->records[0] + RECORD_OFFSET;
    batch->pieces[0].origin = SS_ORIGIN_MEMORY;
    CHECK_EQUAL(bench_fetch_over(bench, 0), SS_OK);
    check_delivered(bench);
}

/* A pipeline of which one channel cannot be opened is not made, and leaves nothing behind. */
HELD_TEST(test_channels_that_do_not_open, AS_BEFORE, AS_BEFORE) {
    const struct ss_pipeline_options *options = &bench->options;
    uint32_t channels = options->decompress_threads + options->dma_threads + options->store_threads;
    bench_close(bench);
    for (uint32_t fails = 1; fails <= channels; fails++) {
        struct ss_pipeline *pipeline = NULL;
        held.channel_fails = fails;
        held.tried = held.opened = held.closed = 0;
        CHECK_EQUAL(ss_pipeline_create_with(options, &held_backend, &pipeline), SS_NO_MEMORY);
        CHECK(pipeline == NULL);
        CHECK_EQUAL(held.tried, channels);
        CHECK_EQUAL(held.opened, channels - 1);
        CHECK_EQUAL(held.closed, channels - 1);
    }
    held.channel_fails = 0;
    bench_open(bench);
}

int main(void) {
    held_backend = ss_backend_software;
    held_backend.capabilities = held_capabilities;
    held_backend.channel_open = held_channel_open;
    held_backend.channel_close = held_channel_close;
    held_backend.decompress = held_decompress;
    test_a_thread_that_stands_still_keeps_few_slices(1);
    test_channels_that_do_not_open(0);
    return 0;
}
