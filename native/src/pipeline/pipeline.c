/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pipeline.c - buffers, threads and the life of a batch
 *
 * ss_pipeline_create() allocates everything, and ss_pipeline_destroy() frees it (ShadowServe sections 4.2 and 4.3): a
 * batch only moves bytes between existing buffers. internal.h describes the access rules of the threads.
 */
#define _GNU_SOURCE 1
#include "cpu/thread.h"
#include "pipeline/internal.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Pipelines that ss_batch_cancel() searches. This lock is taken before any pipeline's own lock. */
static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static struct ss_pipeline *registry;

/* Pipelines whose device was abandoned: their memory, which the device may still use, is kept. */
static struct ss_pipeline *given_up;

/* ---- Creation ------------------------------------------------------------------------------------------------ */

static int cores_are_valid(const int32_t *cores, uint32_t count) {
    if (count > SS_THREADS_MAX || (count > 0 && cores == NULL)) {
        return 0;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (cores[i] < -1 || cores[i] >= CPU_SETSIZE) {
            return 0;
        }
    }
    return 1;
}

static int options_are_valid(const struct ss_pipeline_options *options) {
    if (options->options_size != sizeof *options || options->net_threads == 0 || options->decompress_threads == 0 ||
        options->decompression_bytes == 0) {
        return 0;
    }
    if (options->queue_depth == 0 || options->queue_depth > SS_QUEUE_DEPTH_MAX || options->requests_in_flight == 0 ||
        options->requests_in_flight > SS_REQUESTS_IN_FLIGHT_MAX || options->trace_events > SS_TRACE_EVENTS_MAX ||
        options->poll_interval_us > SS_POLL_INTERVAL_US_MAX || options->nodes_max > SS_NODES_MAX) {
        return 0;
    }
    if (!cores_are_valid(options->net_cores, options->net_threads) ||
        !cores_are_valid(options->decompress_cores, options->decompress_threads) ||
        !cores_are_valid(options->store_cores, options->store_threads)) {
        return 0;
    }
    if (options->fused) {
        return 1;
    }
    return options->dequantize_threads > 0 && options->dma_threads > 0 &&
           cores_are_valid(options->dequantize_cores, options->dequantize_threads) &&
           cores_are_valid(options->dma_cores, options->dma_threads);
}

/* Returns whether the backend supports memory that store threads cannot read themselves. */
static int stores_collect(const struct ss_pipeline *pipeline) {
    return (ss_pipeline_memory_kinds(pipeline) & ~(1U << SS_MEMORY_LOCAL)) != 0;
}

/* Size of a pipeline's scratches: one slice for each fused work in flight, and for each store thread, plus
 * the memory for collected elements. */
static uint64_t scratch_bytes(const struct ss_pipeline *pipeline) {
    const struct ss_pipeline_options *options = &pipeline->options;
    uint64_t bytes = options->store_threads * SS_SLICE_BYTES_MAX;
    if (options->fused) {
        bytes += (uint64_t)options->decompress_threads * pipeline->capabilities.in_flight_max * SS_SLICE_BYTES_MAX;
    }
    if (stores_collect(pipeline)) {
        bytes += options->store_threads * SS_DELIVERED_BYTES_MAX;
    }
    return bytes;
}

static enum ss_result create_device(struct ss_pipeline *pipeline) {
    const char *name = pipeline->options.device != NULL ? pipeline->options.device : "";
    enum ss_result result = pipeline->backend->open(name, pipeline->options.queue_depth, &pipeline->device);
    if (result != SS_OK) {
        return result;
    }
    pipeline->device_open = 1;
    pipeline->capabilities = pipeline->backend->capabilities(pipeline->device);
    return pipeline->options.fused && !pipeline->capabilities.plain_memory ? SS_NOT_SUPPORTED : SS_OK;
}

static enum ss_result create_buffers(struct ss_pipeline *pipeline) {
    const struct ss_pipeline_options *options = &pipeline->options;
    const struct {
        struct ss_buffer *buffer;
        uint64_t size;
    } buffers[] = {{&pipeline->decompression, options->decompression_bytes},
                   {&pipeline->dequantization, options->dequantization_bytes},
                   {&pipeline->dma_source, options->dma_source_bytes},
                   {&pipeline->store_buffer, options->store_bytes},
                   {&pipeline->scratch, scratch_bytes(pipeline)}};
    enum ss_result result = SS_OK;
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0] && result == SS_OK; i++) {
        result = ss_buffer_map(buffers[i].buffer, buffers[i].size, options->pin_memory != 0, &pipeline->locked_bytes);
    }
    return result;
}

static enum ss_result create_queues(struct ss_pipeline *pipeline) {
    const struct ss_pipeline_options *options = &pipeline->options;
    enum ss_result result =
        ss_queue_init(&pipeline->decompress_queue, options->queue_depth, options->decompress_threads);
    if (result == SS_OK && !options->fused) {
        result = ss_queue_init(&pipeline->dequantize_queue, options->queue_depth, options->dequantize_threads);
    }
    if (result == SS_OK && !options->fused) {
        result = ss_queue_init(&pipeline->dma_queue, options->queue_depth, options->dma_threads);
    }
    pipeline->piece_states = calloc(SS_BATCH_PIECES_MAX, sizeof *pipeline->piece_states);
    pipeline->fetch_order = calloc(SS_BATCH_PIECES_MAX, sizeof *pipeline->fetch_order);
    pipeline->encode_order = calloc(SS_BATCH_PIECES_MAX, sizeof *pipeline->encode_order);
    if (pipeline->piece_states == NULL || pipeline->fetch_order == NULL || pipeline->encode_order == NULL) {
        return SS_NO_MEMORY;
    }
    return result;
}

/* Gives the next 'count' workers to 'stage'. */
static void assign_workers(struct ss_pipeline *pipeline, enum ss_stage stage, const int32_t *cores, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        struct ss_worker *worker = &pipeline->workers[pipeline->worker_count++];
        worker->pipeline = pipeline;
        worker->stage = stage;
        worker->index = i;
        worker->core = cores[i];
        worker->wake_event = -1;
    }
}

static enum ss_result create_workers(struct ss_pipeline *pipeline) {
    const struct ss_pipeline_options *options = &pipeline->options;
    size_t count = (size_t)options->net_threads + options->decompress_threads + options->dequantize_threads +
                   options->dma_threads + options->store_threads;
    pipeline->workers = aligned_alloc(_Alignof(struct ss_worker), count * sizeof *pipeline->workers);
    if (pipeline->workers == NULL) {
        return SS_NO_MEMORY;
    }
    memset(pipeline->workers, 0, count * sizeof *pipeline->workers);
    assign_workers(pipeline, SS_STAGE_NET, options->net_cores, options->net_threads);
    assign_workers(pipeline, SS_STAGE_DECOMPRESS, options->decompress_cores, options->decompress_threads);
    assign_workers(pipeline, SS_STAGE_DEQUANTIZE, options->dequantize_cores, options->dequantize_threads);
    assign_workers(pipeline, SS_STAGE_DMA, options->dma_cores, options->dma_threads);
    assign_workers(pipeline, SS_STAGE_COMPRESS, options->store_cores, options->store_threads);
    return SS_OK;
}

/* Creates a thread's state before it starts. '*scratch' is the next free scratch. */
static enum ss_result create_worker_state(struct ss_worker *worker, uint8_t **scratch) {
    struct ss_pipeline *pipeline = worker->pipeline;
    if (pipeline->options.trace_events > 0) {
        worker->trace = ss_trace_log_create(pipeline->options.trace_events);
        if (worker->trace == NULL) {
            return SS_NO_MEMORY;
        }
    }
    switch (worker->stage) {
    case SS_STAGE_NET:
        worker->wake_event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (worker->wake_event < 0) {
            return SS_OS_ERROR;
        }
        return ss_sources_create(worker);
    case SS_STAGE_DECOMPRESS:
        worker->engine = ss_engine_create(pipeline, worker, pipeline->options.fused ? *scratch : NULL);
        if (pipeline->options.fused) {
            *scratch += pipeline->capabilities.in_flight_max * SS_SLICE_BYTES_MAX;
        }
        return worker->engine != NULL ? SS_OK : SS_NO_MEMORY;
    case SS_STAGE_DMA:
        worker->engine = ss_engine_create(pipeline, worker, NULL);
        return worker->engine != NULL ? SS_OK : SS_NO_MEMORY;
    case SS_STAGE_COMPRESS:
        worker->scratch = *scratch;
        *scratch += SS_SLICE_BYTES_MAX;
        if (!stores_collect(pipeline)) {
            return SS_OK;
        }
        worker->collected = *scratch;
        *scratch += SS_DELIVERED_BYTES_MAX;
        worker->engine = ss_engine_create(pipeline, worker, NULL);
        return worker->engine != NULL ? SS_OK : SS_NO_MEMORY;
    default:
        return SS_OK;
    }
}

typedef void *(*thread_entry)(void *worker);

static thread_entry worker_entry(const struct ss_worker *worker) {
    switch (worker->stage) {
    case SS_STAGE_NET:
        return ss_net_thread;
    case SS_STAGE_DEQUANTIZE:
        return ss_dequantize_thread;
    case SS_STAGE_COMPRESS:
        return ss_store_thread;
    default:
        return ss_engine_thread;
    }
}

/*
 * Added to the process's own niceness. Threads that receive have a higher priority than threads that decode, or a core
 * may have nothing to decode while another core has both; 5 still gives decoders a quarter of a core that other
 * processes keep busy. Storing is in the middle: well below serving, but above processes with idle priority.
 */
static const int niceness[SS_STAGE_COUNT] = {
    [SS_STAGE_NET] = 0, [SS_STAGE_DECOMPRESS] = 5, [SS_STAGE_DEQUANTIZE] = 5,
    [SS_STAGE_DMA] = 5, [SS_STAGE_COMPRESS] = 10,
};

/* A SCHED_BATCH thread does not preempt the thread that woke it. The kernel always permits a lower priority; if the
 * call fails, the thread only disturbs others more. */
static void give_way(const struct ss_worker *worker) {
    if (niceness[worker->stage] > 0) {
        struct sched_param parameters = {.sched_priority = 0};
        (void)sched_setscheduler(0, SCHED_BATCH, &parameters);
        id_t self = (id_t)syscall(SYS_gettid);
        (void)setpriority(PRIO_PROCESS, self, getpriority(PRIO_PROCESS, self) + niceness[worker->stage]);
    }
}

static void *run_worker(void *argument) {
    const struct ss_worker *worker = argument;
    give_way(worker);
    return worker_entry(worker)(argument);
}

static enum ss_result start_worker(struct ss_worker *worker) {
    static const char *const names[SS_STAGE_COUNT] = {
        [SS_STAGE_NET] = "net", [SS_STAGE_DECOMPRESS] = "decomp", [SS_STAGE_DEQUANTIZE] = "dequant",
        [SS_STAGE_DMA] = "dma", [SS_STAGE_COMPRESS] = "store",
    };
    char name[16];
    (void)snprintf(name, sizeof name, "ss-%s-%u", names[worker->stage], worker->index & 0xfff);
    enum ss_result result = ss_thread_start(&worker->thread, worker->core, name, run_worker, worker);
    worker->started = result == SS_OK;
    return result;
}

/*
 * Each thread creates its own decoders and its channel, since they belong to it. Creation waits for this, so that the
 * first batch finds all of them.
 */
static enum ss_result wait_until_ready(struct ss_pipeline *pipeline) {
    pthread_mutex_lock(&pipeline->lock);
    while (pipeline->threads_ready < pipeline->worker_count) {
        pthread_cond_wait(&pipeline->ready, &pipeline->lock);
    }
    enum ss_result result = pipeline->ready_result;
    pthread_mutex_unlock(&pipeline->lock);
    errno = pipeline->ready_error;
    return result;
}

static enum ss_result start_workers(struct ss_pipeline *pipeline) {
    uint8_t *scratch = pipeline->scratch.data;
    enum ss_result result = SS_OK;
    for (uint32_t i = 0; i < pipeline->worker_count && result == SS_OK; i++) {
        result = create_worker_state(&pipeline->workers[i], &scratch);
    }
    for (uint32_t i = 0; i < pipeline->worker_count && result == SS_OK; i++) {
        result = start_worker(&pipeline->workers[i]);
    }
    return result == SS_OK ? wait_until_ready(pipeline) : result;
}

static void create_locks(struct ss_pipeline *pipeline) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&pipeline->lock, NULL);
    pthread_mutex_init(&pipeline->progress_lock, NULL);
    pthread_cond_init(&pipeline->net_go, &monotonic);
    pthread_cond_init(&pipeline->store_go, &monotonic);
    pthread_cond_init(&pipeline->quiet, &monotonic);
    pthread_cond_init(&pipeline->store_done, &monotonic);
    pthread_cond_init(&pipeline->fetch_over, &monotonic);
    pthread_cond_init(&pipeline->ready, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

enum ss_result ss_pipeline_create_with(const struct ss_pipeline_options *options, const struct ss_backend *backend,
                                       struct ss_pipeline **pipeline_out) {
    if (!options_are_valid(options)) {
        return SS_BAD_ARGUMENT;
    }
    size_t size = (sizeof(struct ss_pipeline) + _Alignof(struct ss_pipeline) - 1) / _Alignof(struct ss_pipeline) *
                  _Alignof(struct ss_pipeline);
    struct ss_pipeline *pipeline = aligned_alloc(_Alignof(struct ss_pipeline), size);
    if (pipeline == NULL) {
        return SS_NO_MEMORY;
    }
    memset(pipeline, 0, size);
    pipeline->options = *options;
    pipeline->options.nodes_max = options->nodes_max > 0 ? options->nodes_max : 1;
    if (options->fused) { /* these stages are not there */
        pipeline->options.dequantization_bytes = pipeline->options.dma_source_bytes = 0;
        pipeline->options.dequantize_threads = pipeline->options.dma_threads = 0;
    }
    pipeline->backend = backend;
    create_locks(pipeline);
    enum ss_result result = create_device(pipeline);
    if (result == SS_OK) {
        result = create_buffers(pipeline);
    }
    if (result == SS_OK) {
        result = create_queues(pipeline);
    }
    if (result == SS_OK) {
        result = create_workers(pipeline);
    }
    if (result == SS_OK) {
        result = start_workers(pipeline);
    }
    pthread_mutex_lock(&registry_lock);
    pipeline->next = registry;
    registry = pipeline;
    pthread_mutex_unlock(&registry_lock);
    if (result != SS_OK) {
        int error = errno;
        ss_pipeline_destroy(pipeline);
        errno = error;
        return result;
    }
    *pipeline_out = pipeline;
    return SS_OK;
}

enum ss_result ss_pipeline_create(const struct ss_pipeline_options *options, struct ss_pipeline **pipeline) {
    if (options == NULL || pipeline == NULL || options->options_size != sizeof *options || options->backend == NULL) {
        return SS_BAD_ARGUMENT;
    }
    const struct ss_backend *backend = ss_backend_find(options->backend);
    return backend == NULL ? SS_NOT_SUPPORTED : ss_pipeline_create_with(options, backend, pipeline);
}

/* ---- Destruction --------------------------------------------------------------------------------------------- */

static void unregister(struct ss_pipeline *pipeline) {
    pthread_mutex_lock(&registry_lock);
    for (struct ss_pipeline **link = &registry; *link != NULL; link = &(*link)->next) {
        if (*link == pipeline) {
            *link = pipeline->next;
            break;
        }
    }
    pthread_mutex_unlock(&registry_lock);
}

static void stop_workers(struct ss_pipeline *pipeline) {
    pthread_mutex_lock(&pipeline->lock);
    pipeline->stopping = 1;
    pthread_cond_broadcast(&pipeline->net_go);
    pthread_cond_broadcast(&pipeline->store_go);
    pthread_mutex_unlock(&pipeline->lock);
    ss_queue_close(&pipeline->decompress_queue);
    ss_queue_close(&pipeline->dequantize_queue);
    ss_queue_close(&pipeline->dma_queue);
    for (uint32_t i = 0; i < pipeline->worker_count; i++) {
        if (pipeline->workers[i].started) {
            pthread_join(pipeline->workers[i].thread, NULL);
        }
    }
}

static void free_workers(struct ss_pipeline *pipeline) {
    for (uint32_t i = 0; i < pipeline->worker_count; i++) {
        struct ss_worker *worker = &pipeline->workers[i];
        ss_sources_destroy(worker);
        ss_engine_destroy(worker->engine);
        free(worker->trace);
        if (worker->wake_event >= 0) {
            close(worker->wake_event);
        }
    }
    free(pipeline->workers);
}

void ss_pipeline_destroy(struct ss_pipeline *pipeline) {
    if (pipeline == NULL) {
        return;
    }
    unregister(pipeline);
    stop_workers(pipeline);
    if (atomic_load(&pipeline->given_up)) {
        pthread_mutex_lock(&registry_lock);
        pipeline->next = given_up;
        given_up = pipeline;
        pthread_mutex_unlock(&registry_lock);
        return;
    }
    free_workers(pipeline);
    if (pipeline->device_open) {
        pipeline->backend->close(pipeline->device);
    }
    ss_queue_destroy(&pipeline->decompress_queue);
    ss_queue_destroy(&pipeline->dequantize_queue);
    ss_queue_destroy(&pipeline->dma_queue);
    free(pipeline->piece_states);
    free(pipeline->fetch_order);
    free(pipeline->encode_order);
    ss_buffer_unmap(&pipeline->decompression);
    ss_buffer_unmap(&pipeline->dequantization);
    ss_buffer_unmap(&pipeline->dma_source);
    ss_buffer_unmap(&pipeline->store_buffer);
    ss_buffer_unmap(&pipeline->scratch);
    pthread_cond_destroy(&pipeline->ready);
    pthread_cond_destroy(&pipeline->fetch_over);
    pthread_cond_destroy(&pipeline->store_done);
    pthread_cond_destroy(&pipeline->quiet);
    pthread_cond_destroy(&pipeline->store_go);
    pthread_cond_destroy(&pipeline->net_go);
    pthread_mutex_destroy(&pipeline->lock);
    pthread_mutex_destroy(&pipeline->progress_lock);
    free(pipeline);
}

/* ---- A fetch batch ------------------------------------------------------------------------------------------- */

static void wait_until_quiet(struct ss_pipeline *pipeline) {
    struct timespec deadline = ss_timespec(pipeline->fetch.batch->deadline_ns);
    int late = 0;
    pthread_mutex_lock(&pipeline->lock);
    while (atomic_load(&pipeline->fetch.work) > 0) {
        if (late) {
            pthread_cond_wait(&pipeline->quiet, &pipeline->lock);
        } else if (pthread_cond_timedwait(&pipeline->quiet, &pipeline->lock, &deadline) == ETIMEDOUT) {
            late = 1;
            ss_fetch_abort(pipeline, SS_DEADLINE);
        }
    }
    pthread_mutex_unlock(&pipeline->lock);
}

static void mark_pieces(struct ss_batch *batch, enum ss_result result) {
    for (uint32_t i = 0; batch->pieces != NULL && i < batch->piece_count; i++) {
        batch->pieces[i].result = result;
    }
    batch->received_bytes = 0;
    batch->delivered_bytes = 0;
    batch->sockets_in_sync = 1; /* nothing was sent */
}

/* Publishes the batch to the net threads. */
static void publish(struct ss_pipeline *pipeline, struct ss_batch *batch, const int32_t *sockets,
                    uint32_t socket_count) {
    pthread_mutex_lock(&pipeline->lock);
    ss_fetch_begin(pipeline, batch, sockets, socket_count);
    if (__atomic_load_n(&batch->cancelled, __ATOMIC_SEQ_CST)) {
        ss_fetch_abort(pipeline, SS_CANCELLED);
    } else if (ss_now_ns() >= batch->deadline_ns) {
        ss_fetch_abort(pipeline, SS_DEADLINE);
    }
    pipeline->fetch_generation++;
    pthread_cond_broadcast(&pipeline->net_go);
    pthread_mutex_unlock(&pipeline->lock);
}

enum ss_result ss_pipeline_fetch(struct ss_pipeline *pipeline, struct ss_batch *batch, const int32_t *sockets,
                                 uint32_t socket_count) {
    if (pipeline == NULL || batch == NULL) {
        return SS_BAD_ARGUMENT;
    }
    pthread_mutex_lock(&pipeline->lock);
    int taken = pipeline->fetch_active != 0;
    pipeline->fetch_active = 1;
    pthread_mutex_unlock(&pipeline->lock);
    if (taken) {
        return SS_BAD_ARGUMENT; /* do not change the batch: it may be the one that is running */
    }
    enum ss_result result = ss_fetch_check(pipeline, batch, sockets, socket_count);
    if (result == SS_OK && atomic_load(&pipeline->given_up)) {
        result = SS_DEVICE;
    }
    if (result == SS_OK) {
        publish(pipeline, batch, sockets, socket_count);
        wait_until_quiet(pipeline);
        result = ss_fetch_finish(pipeline);
    } else {
        mark_pieces(batch, result);
    }
    int error = result == SS_OS_ERROR ? atomic_load(&pipeline->fetch.os_error) : 0;
    pthread_mutex_lock(&pipeline->lock);
    pipeline->fetch.batch = NULL;
    pipeline->fetch_active = 0;
    pthread_cond_broadcast(&pipeline->fetch_over);
    pthread_mutex_unlock(&pipeline->lock);
    if (error != 0) {
        errno = error;
    }
    return result;
}

void ss_batch_cancel(struct ss_batch *batch) {
    __atomic_store_n(&batch->cancelled, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&registry_lock);
    for (struct ss_pipeline *pipeline = registry; pipeline != NULL; pipeline = pipeline->next) {
        pthread_mutex_lock(&pipeline->lock);
        if (pipeline->fetch.batch == batch) {
            ss_fetch_abort(pipeline, SS_CANCELLED);
        }
        pthread_cond_broadcast(&pipeline->fetch_over); /* for store threads that wait for the end of fetches */
        pthread_mutex_unlock(&pipeline->lock);
    }
    pthread_mutex_unlock(&registry_lock);
}

void ss_pipeline_unlimit(struct ss_pipeline *pipeline) {
    atomic_store(&pipeline->fetch.rate, 0);
}

void ss_batch_supply(struct ss_batch *batch, uint32_t piece, const uint8_t *memory) {
    struct ss_piece *supplied = &batch->pieces[piece];
    supplied->memory = memory;
    __atomic_store_n(&supplied->origin, memory != NULL ? SS_ORIGIN_MEMORY : SS_ORIGIN_NOWHERE, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&registry_lock);
    for (struct ss_pipeline *pipeline = registry; pipeline != NULL; pipeline = pipeline->next) {
        pthread_mutex_lock(&pipeline->lock);
        if (pipeline->fetch.batch == batch) {
            ss_fetch_wake_net(pipeline);
        }
        pthread_mutex_unlock(&pipeline->lock);
    }
    pthread_mutex_unlock(&registry_lock);
}

/* ---- Statistics ---------------------------------------------------------------------------------------------- */

const char *ss_pipeline_device(const struct ss_pipeline *pipeline) {
    return pipeline->backend->device_name(pipeline->device);
}

int ss_pipeline_given_up(const struct ss_pipeline *pipeline) {
    return atomic_load(&pipeline->given_up) != 0;
}

uint64_t ss_pipeline_locked_bytes(const struct ss_pipeline *pipeline) {
    return pipeline->locked_bytes;
}

static void counters_sum(struct ss_stage_statistics *sum, const struct ss_counters *counters) {
    sum->items += atomic_load_explicit(&counters->items, memory_order_relaxed);
    sum->input_bytes += atomic_load_explicit(&counters->input_bytes, memory_order_relaxed);
    sum->output_bytes += atomic_load_explicit(&counters->output_bytes, memory_order_relaxed);
    sum->busy_ns += atomic_load_explicit(&counters->busy_ns, memory_order_relaxed);
}

void ss_pipeline_statistics(const struct ss_pipeline *pipeline, struct ss_stage_statistics *statistics) {
    memset(statistics, 0, SS_STAGE_COUNT * sizeof *statistics);
    for (uint32_t i = 0; i < pipeline->worker_count; i++) {
        const struct ss_worker *worker = &pipeline->workers[i];
        if (worker->stage == SS_STAGE_COMPRESS) {
            counters_sum(&statistics[SS_STAGE_QUANTIZE], &worker->counters[0]);
            counters_sum(&statistics[SS_STAGE_COMPRESS], &worker->counters[1]);
        } else {
            counters_sum(&statistics[worker->stage], &worker->counters[0]);
            counters_sum(&statistics[SS_STAGE_DEQUANTIZE], &worker->counters[1]);
        }
    }
    counters_sum(&statistics[SS_STAGE_PUT], &pipeline->put);
}
