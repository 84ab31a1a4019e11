/* SPDX-License-Identifier: Apache-2.0 */
/*
 * feed.c - the network stage: threads that drive the sources, and the pipeline's calls for sources (sources/source.h)
 */
#define _GNU_SOURCE 1
#include <poll.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "pipeline/internal.h"

enum { PUSH_MAX = 64 };

/* Interval at which a thread that waits for the rate checks whether the batch has ended. */
#define PACE_LOOK_NS 5000000ULL

static const struct ss_source *const sources[SS_SOURCE_COUNT] = {&ss_source_resp, &ss_source_memory};

const struct ss_source *ss_source_of(const struct ss_piece *piece) {
    for (int i = 0; i < SS_SOURCE_COUNT; i++) {
        if (sources[i]->takes(piece)) {
            return sources[i];
        }
    }
    return NULL; /* unreachable: each piece belongs to one of the sources */
}

enum ss_result ss_sources_create(struct ss_worker *worker) {
    const struct ss_pipeline_options *options = &worker->pipeline->options;
    const struct ss_source_limits limits = {.nodes_max = options->nodes_max,
                                            .requests_in_flight = options->requests_in_flight,
                                            .pieces_max = SS_BATCH_PIECES_MAX};
    for (int i = 0; i < SS_SOURCE_COUNT; i++) {
        worker->sources[i] = sources[i]->create(&limits);
        if (worker->sources[i] == NULL) {
            return SS_NO_MEMORY;
        }
    }
    return SS_OK;
}

void ss_sources_destroy(struct ss_worker *worker) {
    for (int i = 0; i < SS_SOURCE_COUNT; i++) {
        if (worker->sources[i] != NULL) {
            sources[i]->destroy(worker->sources[i]);
        }
    }
}

/* ---- For the sources ----------------------------------------------------------------------------------------- */

static struct ss_pipeline *pipeline_of(const struct ss_feed *feed) {
    return feed->worker->pipeline;
}

int ss_feed_aborted(const struct ss_feed *feed) {
    return atomic_load(&pipeline_of(feed)->fetch.abort_result) != SS_OK;
}

int ss_feed_broken(const struct ss_feed *feed) {
    return atomic_load(&pipeline_of(feed)->fetch.broken) != 0;
}

int ss_feed_useful(const struct ss_feed *feed, uint32_t piece) {
    return ss_piece_useful(&pipeline_of(feed)->piece_states[piece]);
}

uint8_t *ss_feed_place(const struct ss_feed *feed, uint32_t index) {
    struct ss_pipeline *pipeline = pipeline_of(feed);
    const struct ss_piece *piece = &feed->batch->pieces[index];
    struct ss_piece_state *state = &pipeline->piece_states[index];
    if (ss_piece_origin(piece) == SS_ORIGIN_MEMORY && pipeline->capabilities.plain_memory) {
        state->stored = (uint8_t *)(uintptr_t)piece->memory; /* nothing writes to it */
    }
    return state->stored;
}

/*
 * Waits until a slice of a batch with a rate may be passed on. Each slice occupies its delivered bytes divided by the
 * rate, starting when the previous slice's time ends. Unused time is not saved up, so the rate is never exceeded. The
 * wait holds no lock, and ends at most PACE_LOOK_NS after the batch or its rate.
 */
static void wait_for_pace(struct ss_pipeline *pipeline, uint32_t piece, const struct ss_slice *slice, uint64_t rate) {
    struct ss_fetch *fetch = &pipeline->fetch;
    uint64_t bytes = (uint64_t)slice->decoded_length * pipeline->piece_states[piece].group->symbol_bytes;
    uint64_t lasts_ns = bytes * 1000000000ULL / rate;
    uint64_t now_ns = ss_now_ns();
    uint64_t free_ns = atomic_load(&fetch->pace_ns);
    uint64_t due_ns;
    do {
        due_ns = free_ns > now_ns ? free_ns : now_ns;
    } while (!atomic_compare_exchange_weak(&fetch->pace_ns, &free_ns, due_ns + lasts_ns));
    while (now_ns < due_ns && !ss_fetch_drops(pipeline, piece) && atomic_load(&fetch->rate) > 0) {
        uint64_t left_ns = due_ns - now_ns < PACE_LOOK_NS ? due_ns - now_ns : PACE_LOOK_NS;
        const struct timespec pause = {.tv_nsec = (long)left_ns};
        (void)nanosleep(&pause, NULL);
        now_ns = ss_now_ns();
    }
}

void ss_feed_slices(const struct ss_feed *feed, uint32_t piece, uint32_t slice_first, uint32_t count,
                    uint64_t decoded_before) {
    struct ss_pipeline *pipeline = pipeline_of(feed);
    struct ss_item items[PUSH_MAX];
    while (count > 0) {
        const uint64_t rate = atomic_load(&pipeline->fetch.rate);
        const uint32_t most = rate > 0 ? 1 : PUSH_MAX;
        uint32_t filled = 0;
        if (rate > 0) {
            wait_for_pace(pipeline, piece, &feed->batch->slices[slice_first], rate);
        }
        for (; filled < count && filled < most; filled++) {
            uint32_t slice = slice_first + filled;
            items[filled] = (struct ss_item){.decoded_before = decoded_before, .piece = piece, .slice = slice};
            decoded_before += feed->batch->slices[slice].decoded_length;
        }
        atomic_fetch_add(&pipeline->fetch.work, filled);
        ss_queue_push(&pipeline->decompress_queue, items, filled);
        slice_first += filled;
        count -= filled;
    }
}

uint32_t ss_feed_arrived(const struct ss_feed *feed, uint32_t piece, struct ss_arrival *arrival, uint64_t received) {
    uint32_t first = arrival->slice_first + arrival->passed;
    uint64_t decoded_before = arrival->decoded;
    uint32_t count = 0;
    while (arrival->passed < arrival->slice_count) {
        const struct ss_slice *slice = &feed->batch->slices[first + count];
        uint64_t end = arrival->stored + slice->scales_length + slice->encoded_length;
        if (end > received) {
            break;
        }
        arrival->stored = end;
        arrival->decoded += slice->decoded_length;
        arrival->passed++;
        count++;
    }
    ss_feed_slices(feed, piece, first, count, decoded_before);
    return count;
}

void ss_feed_answered(const struct ss_feed *feed, uint32_t piece) {
    ss_piece_part_done(pipeline_of(feed), piece);
}

void ss_feed_fail(const struct ss_feed *feed, uint32_t piece, enum ss_result result, int broken) {
    ss_fetch_fail(pipeline_of(feed), piece, result, broken);
}

static int is_redirection(const char *text, size_t length) {
    return (length > 6 && memcmp(text, "MOVED ", 6) == 0) || (length > 4 && memcmp(text, "ASK ", 4) == 0);
}

void ss_feed_refused(const struct ss_feed *feed, uint32_t index, const char *text, size_t length) {
    struct ss_piece *piece = &pipeline_of(feed)->fetch.batch->pieces[index];
    enum ss_result result = is_redirection(text, length) ? SS_REDIRECTED : SS_REFUSED;
    uint32_t expected = SS_OK;
    if (atomic_compare_exchange_strong(&pipeline_of(feed)->piece_states[index].result, &expected, (uint32_t)result)) {
        size_t kept = length < sizeof piece->error - 1 ? length : sizeof piece->error - 1;
        memcpy(piece->error, text, kept);
        piece->error[kept] = '\0';
    }
    if (result != SS_REDIRECTED) {
        ss_feed_fail(feed, index, result, 0);
    }
}

void ss_feed_os_error(const struct ss_feed *feed, int error) {
    atomic_store(&pipeline_of(feed)->fetch.os_error, error);
}

void ss_feed_out_of_sync(const struct ss_feed *feed) {
    atomic_store(&pipeline_of(feed)->fetch.out_of_sync, 1);
}

void ss_feed_count(const struct ss_feed *feed, uint64_t slices, uint64_t wire_bytes, uint64_t body_bytes) {
    atomic_fetch_add(&pipeline_of(feed)->fetch.received_bytes, wire_bytes);
    ss_counters_add(&feed->worker->counters[0], slices, wire_bytes, body_bytes, 0);
}

uint64_t ss_feed_trace_begin(const struct ss_feed *feed) {
    return ss_trace_now(pipeline_of(feed));
}

void ss_feed_trace_end(const struct ss_feed *feed, uint32_t piece, uint64_t begin_ns, uint64_t bytes) {
    ss_trace_add(feed->worker, (struct ss_trace_event){.begin_ns = begin_ns,
                                                       .end_ns = ss_now_ns(),
                                                       .input_bytes = bytes,
                                                       .output_bytes = bytes,
                                                       .piece = piece,
                                                       .slice = UINT32_MAX,
                                                       .stage = SS_STAGE_NET});
}

/* ---- The thread ---------------------------------------------------------------------------------------------- */

/* Sleeps until an event that a source waits for, or the wake event. */
static void wait_for_sources(struct ss_worker *worker, const int *over) {
    struct pollfd polled[1 + SS_NODES_MAX];
    nfds_t count = 1;
    polled[0] = (struct pollfd){.fd = worker->wake_event, .events = POLLIN};
    for (int i = 0; i < SS_SOURCE_COUNT; i++) {
        if (!over[i]) {
            count += sources[i]->watch(worker->sources[i], &polled[count]);
        }
    }
    (void)poll(polled, count, -1); /* the batch's owner keeps the time and writes the event */
    if (polled[0].revents & POLLIN) {
        uint64_t events;
        ssize_t drained = read(worker->wake_event, &events, sizeof events);
        (void)drained;
    }
}

static void sources_run(struct ss_worker *worker) {
    const struct ss_fetch *fetch = &worker->pipeline->fetch;
    const struct ss_feed feed = {.batch = fetch->batch,
                                 .sockets = fetch->sockets,
                                 .nodes = fetch->node_count,
                                 .thread = worker->index,
                                 .threads = fetch->net_threads,
                                 .worker = worker};
    int over[SS_SOURCE_COUNT] = {0};
    for (int i = 0; i < SS_SOURCE_COUNT; i++) {
        sources[i]->begin(worker->sources[i], &feed);
    }
    for (;;) {
        int running = 0;
        int again = 0;
        for (int i = 0; i < SS_SOURCE_COUNT; i++) {
            if (!over[i]) {
                enum ss_source_step step = sources[i]->step(worker->sources[i]);
                over[i] = step == SS_SOURCE_OVER;
                running |= !over[i];
                again |= step == SS_SOURCE_AGAIN;
            }
        }
        if (!running) {
            return;
        }
        if (!again) {
            wait_for_sources(worker, over);
        }
    }
}

void *ss_net_thread(void *argument) {
    struct ss_worker *worker = argument;
    struct ss_pipeline *pipeline = worker->pipeline;
    uint64_t generation = 0;
    ss_worker_ready(pipeline, SS_OK);
    for (;;) {
        pthread_mutex_lock(&pipeline->lock);
        while (!pipeline->stopping && pipeline->fetch_generation == generation) {
            pthread_cond_wait(&pipeline->net_go, &pipeline->lock);
        }
        generation = pipeline->fetch_generation;
        int stopping = pipeline->stopping;
        int wanted = pipeline->fetch_active && worker->index < pipeline->fetch.net_threads;
        pthread_mutex_unlock(&pipeline->lock);
        if (stopping) {
            return NULL;
        }
        if (!wanted) {
            continue;
        }
        uint64_t begin = ss_thread_ns();
        sources_run(worker);
        ss_counters_add(&worker->counters[0], 0, 0, 0, ss_thread_ns() - begin);
        ss_fetch_done(pipeline, 1);
    }
}
