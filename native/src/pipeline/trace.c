/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trace.c - recordings of the threads' work
 *
 * Each thread writes to its own log, allocated with the pipeline, so recording neither locks nor allocates; while it is
 * off, it costs a load and a branch for each slice. A log keeps the first events and counts the rest, so an event is
 * never overwritten, and readers can run beside the writer: 'count' is stored after the event that it counts. A new
 * recording has a new generation; each thread empties its log when it finds a new generation.
 */
#define _GNU_SOURCE 1
#include <sched.h>
#include <stdlib.h>

#include "pipeline/internal.h"

struct ss_trace_log {
    _Atomic uint32_t generation; /* of the recording that the events are of */
    _Atomic uint32_t count;      /* events in the log */
    _Atomic uint32_t dropped;    /* events that found the log full */
    struct ss_trace_event events[];
};

struct ss_trace_log *ss_trace_log_create(uint32_t capacity) {
    struct ss_trace_log *log = NULL;
    return calloc(1, sizeof *log + capacity * sizeof log->events[0]);
}

static void log_append(struct ss_trace_log *log, uint32_t generation, uint32_t capacity,
                       const struct ss_trace_event *event) {
    if (atomic_load_explicit(&log->generation, memory_order_relaxed) != generation) {
        atomic_store_explicit(&log->count, 0, memory_order_relaxed);
        atomic_store_explicit(&log->dropped, 0, memory_order_relaxed);
        atomic_store_explicit(&log->generation, generation, memory_order_release);
    }
    uint32_t count = atomic_load_explicit(&log->count, memory_order_relaxed);
    if (count == capacity) {
        atomic_fetch_add_explicit(&log->dropped, 1, memory_order_relaxed);
        return;
    }
    log->events[count] = *event;
    atomic_store_explicit(&log->count, count + 1, memory_order_release);
}

void ss_trace_add(struct ss_worker *worker, struct ss_trace_event event) {
    struct ss_pipeline *pipeline = worker->pipeline;
    uint32_t generation = atomic_load_explicit(&pipeline->trace_recording, memory_order_relaxed);
    if (generation == 0 || event.begin_ns == 0) {
        return; /* no recording now, or none when the span began */
    }
    event.batch = pipeline->fetch.number;
    event.thread = worker->index;
    event.core = sched_getcpu();
    log_append(worker->trace, generation, pipeline->options.trace_events, &event);
}

enum ss_result ss_pipeline_trace_start(struct ss_pipeline *pipeline) {
    if (pipeline->options.trace_events == 0) {
        return SS_NOT_SUPPORTED;
    }
    pthread_mutex_lock(&pipeline->lock);
    if (++pipeline->trace_generation == 0) {
        pipeline->trace_generation = 1; /* 0 is off */
    }
    atomic_store(&pipeline->trace_recording, pipeline->trace_generation);
    pthread_mutex_unlock(&pipeline->lock);
    return SS_OK;
}

void ss_pipeline_trace_stop(struct ss_pipeline *pipeline) {
    atomic_store(&pipeline->trace_recording, 0);
}

uint64_t ss_pipeline_trace_read(struct ss_pipeline *pipeline, struct ss_trace_event *events, uint64_t count_max,
                                uint64_t *dropped) {
    uint64_t count = 0;
    *dropped = 0;
    pthread_mutex_lock(&pipeline->lock);
    uint32_t generation = pipeline->trace_generation;
    pthread_mutex_unlock(&pipeline->lock);
    for (uint32_t i = 0; i < pipeline->worker_count && pipeline->options.trace_events > 0; i++) {
        const struct ss_trace_log *log = pipeline->workers[i].trace;
        if (atomic_load_explicit(&log->generation, memory_order_acquire) != generation) {
            continue; /* an old recording's */
        }
        uint32_t recorded = atomic_load_explicit(&log->count, memory_order_acquire);
        *dropped += atomic_load_explicit(&log->dropped, memory_order_relaxed);
        for (uint32_t j = 0; j < recorded && count + j < count_max; j++) {
            events[count + j] = log->events[j];
        }
        count += recorded;
    }
    return count;
}
