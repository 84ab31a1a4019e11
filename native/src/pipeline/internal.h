/* SPDX-License-Identifier: Apache-2.0 */
/*
 * internal.h - declarations shared by the pipeline's files
 *
 *   pipeline.c  buffers, threads, the life of a batch
 *   batch.c     checks a batch before any byte moves; its state at the start, its results at the end
 *   fetch_state.c  work, failures and pieces of the running fetch, for all threads
 *   feed.c      the network threads, which drive the sources (sources/source.h)
 *   stages.c    decompress, dequantize, DMA, or all of it fused
 *   trace.c     recordings of the threads' work
 *   memory.c    registered memory, which batches deliver to and store from
 *   store.c     storing: quantize and compress
 *
 * Threads. A batch belongs to the thread that called ss_pipeline_fetch(), which sleeps until the batch is quiet and
 * is the only one that reads the clock. Stage threads exist as long as the pipeline. They share struct ss_fetch in a
 * batch: plain fields are written before the batch is published (under the pipeline's lock) and only read until it is
 * quiet; the others are atomic.
 *
 * Quiet. 'work' counts the net threads that have not finished and the slices that have been pushed and not retired.
 * A slice that moves to the next queue stays counted, so zero means that nothing touches the batch any more.
 *
 * A device that never finishes its work would keep its slices counted for ever. The thread that waits for it abandons
 * it after a timeout (stages.c): its slices fail, and no thread uses it again. Then no thread of this process touches
 * the batch. The device may still do so, so all memory that it can reach is kept until the process ends.
 */
#ifndef SS_PIPELINE_INTERNAL_H
#define SS_PIPELINE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "backends/backend.h"
#include "cpu/clock.h"
#include "pipeline/queue.h"
#include "shadowserve.h"
#include "sources/source.h"

/*
 * Most pieces in one batch: 4 Mi tokens in chunks of 256, longer than any context; in pieces of one layer, some
 * gigabytes. And most groups; models have a few. These limits bound the memory that is allocated at creation.
 */
enum { SS_BATCH_PIECES_MAX = 16384, SS_BATCH_GROUPS_MAX = 64 };

/* Most layers whose progress a batch can report: more than a record can have. */
enum { SS_BATCH_LAYERS_MAX = 4096 };

/* Limits of the options, so that a typing error is reported and does not make the machine swap. */
enum { SS_THREADS_MAX = 256, SS_QUEUE_DEPTH_MAX = 1 << 20, SS_REQUESTS_IN_FLIGHT_MAX = 4096 };
enum { SS_TRACE_EVENTS_MAX = 1 << 24, SS_POLL_INTERVAL_US_MAX = 1000000 };

/* Most nodes of one batch: one poll() of a network thread watches all of them. */
enum { SS_NODES_MAX = 256 };

/* Number of sources. */
enum { SS_SOURCE_COUNT = 2 };

/*
 * The most slices that a stage thread takes at a time, and passes on at a time. No other thread can take the slices
 * that it holds, even while it waits for a core; so more of them would leave other threads idle at the end of a batch.
 */
enum { SS_POP_MAX = 4 };

/* The longest that a store thread waits for fetches before each slice: stores slow down under load, but never starve.
 */
#define SS_STORE_YIELD_NS 50000000ULL

/* One thread's share of one stage's statistics, on its own cache line. */
struct ss_counters {
    _Alignas(64) _Atomic uint64_t items;
    _Atomic uint64_t input_bytes;
    _Atomic uint64_t output_bytes;
    _Atomic uint64_t busy_ns;
};

static inline void ss_counters_add(struct ss_counters *counters, uint64_t items, uint64_t input_bytes,
                                   uint64_t output_bytes, uint64_t busy_ns) {
    atomic_fetch_add_explicit(&counters->items, items, memory_order_relaxed);
    atomic_fetch_add_explicit(&counters->input_bytes, input_bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&counters->output_bytes, output_bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&counters->busy_ns, busy_ns, memory_order_relaxed);
}

struct ss_buffer {
    uint8_t *data;
    uint64_t size;   /* as asked for */
    uint64_t mapped; /* rounded up to pages */
};

/* A group of the fetch batch that is running. */
struct ss_group_state {
    const struct ss_group *group;
    uint32_t symbol_bytes;   /* dequantized bytes for each byte of symbols */
    _Atomic uint32_t chunks; /* the lowest chunk with a failure; later pieces are dropped; UINT32_MAX: none */
};

/* A piece and its regions. */
struct ss_piece_state {
    _Atomic uint32_t remaining; /* slices not delivered, plus answers not received to their end */
    _Atomic uint32_t result;    /* the first failure */
    uint32_t answers;           /* answers of its source that it waits for */
    uint32_t chunk;
    struct ss_group_state *group;
    uint64_t symbols_bytes;
    uint8_t *stored;     /* its body, as received */
    uint8_t *symbols;    /* separate stages only */
    uint8_t *dma_source; /* likewise */
};

/* Layers in place, of a batch with 'progress'. */
struct ss_progress {
    uint32_t leading; /* complete layers from the batch's first one on; under the pipeline's progress_lock */
    _Atomic uint32_t missing[SS_BATCH_LAYERS_MAX]; /* pieces of each layer that are not in place */
};

/* The fetch batch that is running. */
struct ss_fetch {
    struct ss_batch *batch;
    const int32_t *sockets;
    uint32_t node_count;
    uint32_t net_threads;          /* threads that take part, and sockets to each node */
    uint32_t number;               /* of the batch */
    _Atomic uint32_t abort_result; /* SS_DEADLINE or SS_CANCELLED: everything unfinished ends */
    _Atomic uint32_t broken; /* a connection is lost or out of sync: do not wait for answers that are dropped anyway */
    _Atomic uint32_t out_of_sync; /* a socket holds half an answer */
    _Atomic int32_t os_error;     /* errno of the first SS_OS_ERROR */
    _Atomic uint64_t work;
    _Atomic uint64_t received_bytes;
    _Atomic uint64_t delivered_bytes;
    _Atomic uint64_t rate;    /* the batch's rate, or 0 after ss_pipeline_unlimit() */
    _Atomic uint64_t pace_ns; /* with a rate: when the next slice may be passed on */
    struct ss_group_state groups[SS_BATCH_GROUPS_MAX];
    struct ss_progress progress;
};

/* The encode call that is running. */
struct ss_store {
    struct ss_batch *batch;
    _Atomic uint32_t next_piece;
    _Atomic uint32_t first_failed;
    uint32_t threads_running; /* under the pipeline's lock */
};

struct ss_engine;    /* stages.c */
struct ss_trace_log; /* trace.c */

struct ss_registered_memory {
    struct ss_pipeline *pipeline;
    void *handle; /* the backend's */
    uint8_t *address;
    uint64_t size;
    enum ss_memory_kind kind;
    struct ss_registered_memory *next; /* in the list of kept memory */
};

struct ss_worker {
    struct ss_pipeline *pipeline;
    enum ss_stage stage;
    uint32_t index; /* within the stage */
    int32_t core;   /* -1: any */
    uint32_t started;
    pthread_t thread;
    int wake_event;                 /* net: eventfd that ends a poll */
    void *sources[SS_SOURCE_COUNT]; /* net: its state of each */
    struct ss_engine *engine;       /* decompress, dma; store, where memory has to be collected */
    uint8_t *scratch;               /* store: symbols of one slice */
    uint8_t *collected;             /* store, likewise: elements of one slice */
    struct ss_trace_log *trace;     /* NULL without room for events */
    struct ss_counters counters[2]; /* the stage's; and dequantize's when fused, compress's for store threads */
};

struct ss_pipeline {
    struct ss_pipeline_options options; /* its pointers are not valid after creation */
    const struct ss_backend *backend;
    void *device;
    uint32_t device_open;
    struct ss_backend_capabilities capabilities;
    struct ss_buffer decompression;
    struct ss_buffer dequantization;
    struct ss_buffer dma_source;
    struct ss_buffer store_buffer;
    struct ss_buffer scratch; /* of all threads that have one */
    uint64_t locked_bytes;

    struct ss_queue decompress_queue;
    struct ss_queue dequantize_queue;
    struct ss_queue dma_queue;
    struct ss_worker *workers; /* net, decompress, dequantize, dma, store, in this order */
    uint32_t worker_count;
    struct ss_piece_state *piece_states;
    uint32_t *fetch_order; /* scratch for checking a batch */
    uint32_t *encode_order;

    pthread_mutex_t progress_lock;
    pthread_mutex_t lock;
    pthread_cond_t net_go;     /* fetch_generation went up, or stopping */
    pthread_cond_t store_go;   /* encode_generation went up, or stopping */
    pthread_cond_t quiet;      /* the fetch batch's work is 0 */
    pthread_cond_t store_done; /* the encode call's threads are done */
    pthread_cond_t ready;      /* threads_ready went up */
    pthread_cond_t fetch_over; /* no fetch batch is active, or an encode batch was cancelled */
    uint64_t fetch_generation;
    uint64_t encode_generation;
    uint32_t threads_ready;
    enum ss_result ready_result; /* of the first thread that could not create its state */
    int ready_error;             /* errno, then */
    uint32_t stopping;
    _Atomic uint32_t given_up; /* the device did not finish its work; it is not used again */
    uint32_t fetch_active;
    uint32_t encode_active;
    struct ss_fetch fetch;
    struct ss_store store;
    struct ss_counters put;
    _Atomic uint32_t trace_recording; /* the generation that is recorded; 0: off */
    uint32_t trace_generation;        /* the last one; under the lock */

    struct ss_registered_memory *kept; /* released after the device was abandoned; under the lock */

    struct ss_pipeline *next; /* in the list that ss_batch_cancel() walks */
};

/* ---- pipeline.c ---- */

/* ss_pipeline_create_with() is ss_pipeline_create() with a backend that needs no name; for tests. */
enum ss_result ss_pipeline_create_with(const struct ss_pipeline_options *options, const struct ss_backend *backend,
                                       struct ss_pipeline **pipeline);

/* ---- buffer.c ---- */

/*
 * ss_buffer_map() maps, touches and, if asked, locks 'size' bytes; adds what was locked to '*locked_bytes'. Memory of
 * at least a huge page is aligned to one, and the kernel is asked for huge pages.
 */
enum ss_result ss_buffer_map(struct ss_buffer *buffer, uint64_t size, int lock, uint64_t *locked_bytes);
void ss_buffer_unmap(struct ss_buffer *buffer);

/* ---- batch.c ---- */

enum ss_result ss_fetch_check(struct ss_pipeline *pipeline, const struct ss_batch *batch, const int32_t *sockets,
                              uint32_t socket_count);
enum ss_result ss_encode_check(struct ss_pipeline *pipeline, const struct ss_batch *batch);

/* ss_fetch_begin() fills pipeline->fetch for a checked batch; the caller publishes it. */
void ss_fetch_begin(struct ss_pipeline *pipeline, struct ss_batch *batch, const int32_t *sockets,
                    uint32_t socket_count);

/* ss_fetch_finish() writes the results of a quiet batch and returns the batch's. */
enum ss_result ss_fetch_finish(struct ss_pipeline *pipeline);

/* ---- fetch_state.c ---- */

/*
 * Each thread calls ss_worker_ready() once it has created its state, or failed to: creation waits for all threads, and
 * fails with the first failure.
 */
void ss_worker_ready(struct ss_pipeline *pipeline, enum ss_result result);

/* ss_fetch_done() subtracts 'count' from the batch's work and wakes the batch's owner when it is 0. */
void ss_fetch_done(struct ss_pipeline *pipeline, uint64_t count);

/* ss_fetch_wake_net() wakes every net thread of the batch. */
void ss_fetch_wake_net(struct ss_pipeline *pipeline);

/*
 * ss_fetch_fail() records the failure of 'piece'; only its first failure counts. 'broken': its connection failed, too.
 * The chunk, and later chunks of its group, are then useless.
 */
void ss_fetch_fail(struct ss_pipeline *pipeline, uint32_t piece, enum ss_result result, int broken);

/* ss_piece_fail() records a failure of a piece; only its first one counts. */
void ss_piece_fail(struct ss_piece_state *state, enum ss_result result);

/* ss_group_ends() makes a group's chunks from 'chunk' on useless. */
void ss_group_ends(struct ss_group_state *group, uint32_t chunk);

/* ss_fetch_abort() ends the batch early with SS_DEADLINE or SS_CANCELLED; the first caller wins. */
void ss_fetch_abort(struct ss_pipeline *pipeline, enum ss_result result);

/* ss_piece_useful() returns whether a piece is still useful after the failures so far. */
static inline int ss_piece_useful(const struct ss_piece_state *state) {
    return state->chunk < atomic_load_explicit(&state->group->chunks, memory_order_relaxed);
}

/* ss_fetch_drops() returns whether work on 'piece' is no longer useful. */
int ss_fetch_drops(struct ss_pipeline *pipeline, uint32_t piece);

/* ss_piece_part_done() counts a slice that was delivered, or an answer that ended well. */
void ss_piece_part_done(struct ss_pipeline *pipeline, uint32_t piece);

/* ---- progress.c ---- */

int ss_progress_is_valid(const struct ss_batch *batch);

/* ss_progress_begin() begins to count the layers of the checked fetch batch. */
void ss_progress_begin(struct ss_pipeline *pipeline);

/* ss_progress_piece() counts a complete piece. */
void ss_progress_piece(struct ss_pipeline *pipeline, uint32_t piece);

/* ---- memory.c ---- */

/* ss_batch_memory_check() returns SS_OK if the backend reaches the memory of all groups; 'plain': also memory that is
 * not registered. */
enum ss_result ss_batch_memory_check(const struct ss_pipeline *pipeline, const struct ss_batch *batch, int plain);

/* ---- feed.c ---- */

/* ss_source_of() returns the source of a piece. */
const struct ss_source *ss_source_of(const struct ss_piece *piece);

/* ss_sources_create() creates a network thread's state of each source. SS_NO_MEMORY. */
enum ss_result ss_sources_create(struct ss_worker *worker);
void ss_sources_destroy(struct ss_worker *worker);
void *ss_net_thread(void *worker);

/* ---- stages.c ---- */

/* ss_engine_create() creates the state of a thread that drives the backend, without the channel; NULL: no memory. */
struct ss_engine *ss_engine_create(struct ss_pipeline *pipeline, struct ss_worker *worker, uint8_t *scratch);
void ss_engine_destroy(struct ss_engine *engine);

/* ss_engine_open() opens the channel, on the thread that will use it; ss_engine_close() closes it there. */
enum ss_result ss_engine_open(struct ss_worker *worker);
void ss_engine_close(struct ss_worker *worker);

/* ss_engine_collect() copies 'size' bytes at 'source' in the registered memory to 'target' and waits for it. */
enum ss_result ss_engine_collect(struct ss_worker *worker, const struct ss_registered_memory *memory,
                                 const uint8_t *source, uint8_t *target, size_t size);
void *ss_engine_thread(void *worker);
void *ss_dequantize_thread(void *worker);

/* ---- trace.c ---- */

struct ss_trace_log *ss_trace_log_create(uint32_t capacity);

/* ss_trace_now() returns the time for a span's begin or end; 0 while no recording runs. */
static inline uint64_t ss_trace_now(const struct ss_pipeline *pipeline) {
    return atomic_load_explicit(&pipeline->trace_recording, memory_order_relaxed) == 0 ? 0 : ss_now_ns();
}

/*
 * ss_trace_add() writes a span into the log of 'worker', on its own thread; nothing if its 'begin_ns' is 0. The call
 * sets batch, thread and core.
 */
void ss_trace_add(struct ss_worker *worker, struct ss_trace_event event);

/* ---- store.c ---- */

void *ss_store_thread(void *worker);

#endif /* SS_PIPELINE_INTERNAL_H */
