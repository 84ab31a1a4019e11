/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pipeline_trace.c - what a trace shows: every slice in every stage once, and spans that nest
 */
#include <string.h>
#include <unistd.h>

#include "codecs/kvrans/kvrans.h"
#include "pipeline_support.h"

enum { SOCKETS = 2, EVENTS = 1024, EVENTS_MAX = EVENTS * 16 };

struct bench {
    struct fixture *fixture;
    struct server *server;
    struct ss_pipeline *pipeline;
    int32_t sockets[SOCKETS];
    struct ss_trace_event *events;
    uint64_t count;
    uint64_t dropped;
    uint64_t received_bytes;
};

static struct bench bench_start_shape(const struct shape *shape, int fused, uint32_t trace_events) {
    struct bench bench = {.fixture = fixture_make(shape), .server = server_start()};
    fixture_serve(bench.fixture, bench.server);
    struct ss_pipeline_options options = pipeline_options(bench.fixture, fused);
    options.trace_events = trace_events;
    CHECK_EQUAL(ss_pipeline_create(&options, &bench.pipeline), SS_OK);
    for (int i = 0; i < SOCKETS; i++) {
        bench.sockets[i] = server_connect(bench.server);
    }
    bench.events = calloc(EVENTS_MAX, sizeof *bench.events);
    CHECK(bench.events != NULL);
    return bench;
}

static struct bench bench_start(int fused, uint32_t trace_events) {
    struct shape shape = default_shape();
    return bench_start_shape(&shape, fused, trace_events);
}

static void bench_fetch(struct bench *bench) {
    struct ss_batch *batch = fixture_round(bench->fixture);
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, batch, bench->sockets, SOCKETS), SS_OK);
    bench->received_bytes += batch->received_bytes;
    batch_free(batch);
}

static void bench_read(struct bench *bench) {
    bench->count = ss_pipeline_trace_read(bench->pipeline, bench->events, EVENTS_MAX, &bench->dropped);
    CHECK(bench->count <= EVENTS_MAX);
}

static void bench_stop(struct bench *bench) {
    ss_pipeline_destroy(bench->pipeline);
    for (int i = 0; i < SOCKETS; i++) {
        close(bench->sockets[i]);
    }
    server_stop(bench->server);
    free(bench->events);
    fixture_free(bench->fixture);
}

/* Every slice of 'batches' batches is in each stage exactly once, with its bytes. */
static void check_slices(const struct bench *bench, int fused, uint32_t batches) {
    const struct shape *shape = &bench->fixture->shape;
    uint32_t slices = shape->chunks * shape->slices;
    uint8_t *seen = calloc((size_t)batches * slices, SS_STAGE_COUNT);
    CHECK(seen != NULL);
    uint64_t received = 0;
    for (uint64_t i = 0; i < bench->count; i++) {
        const struct ss_trace_event *event = &bench->events[i];
        CHECK(event->stage < SS_STAGE_COUNT && event->batch >= 1 && event->batch <= batches);
        CHECK(event->core >= 0 && event->piece < shape->chunks);
        if (event->stage == SS_STAGE_NET) {
            CHECK_EQUAL(event->slice, UINT32_MAX);
            received += event->output_bytes;
            continue;
        }
        const struct ss_slice *slice = &bench->fixture->slices[event->slice];
        CHECK(event->slice / shape->slices == event->piece);
        seen[((event->batch - 1) * slices + event->slice) * SS_STAGE_COUNT + event->stage]++;
        if (event->stage == SS_STAGE_DECOMPRESS) {
            CHECK_EQUAL(event->input_bytes, slice->scales_length + slice->encoded_length);
            CHECK_EQUAL(event->output_bytes, slice->decoded_length);
        }
    }
    CHECK_EQUAL(received, bench->received_bytes);
    for (size_t i = 0; i < (size_t)batches * slices * SS_STAGE_COUNT; i++) {
        size_t stage = i % SS_STAGE_COUNT;
        int expected =
            stage == SS_STAGE_DECOMPRESS || stage == SS_STAGE_DEQUANTIZE || (stage == SS_STAGE_DMA && !fused);
        CHECK_EQUAL(seen[i], expected);
    }
    free(seen);
}

/* Spans lie in [begin, end]; those of one thread and stage nest or do not overlap. */
static void check_spans(const struct bench *bench, uint64_t begin_ns, uint64_t end_ns) {
    for (uint64_t i = 0; i < bench->count; i++) {
        const struct ss_trace_event *one = &bench->events[i];
        CHECK(one->begin_ns >= begin_ns && one->begin_ns <= one->end_ns && one->end_ns <= end_ns);
        for (uint64_t j = i + 1; j < bench->count; j++) {
            const struct ss_trace_event *later = &bench->events[j];
            if (later->stage == one->stage && later->thread == one->thread) {
                CHECK(later->end_ns >= one->end_ns);
                CHECK(later->begin_ns >= one->end_ns || later->begin_ns <= one->begin_ns ||
                      later->end_ns == one->end_ns);
            }
        }
    }
}

static void test_every_slice_is_in_every_stage_once(int fused) {
    struct bench bench = bench_start(fused, EVENTS);
    uint64_t begin_ns = now_ns();
    CHECK_EQUAL(ss_pipeline_trace_start(bench.pipeline), SS_OK);
    bench_fetch(&bench);
    bench_fetch(&bench);
    ss_pipeline_trace_stop(bench.pipeline);
    bench_read(&bench);
    CHECK_EQUAL(bench.dropped, 0);
    check_slices(&bench, fused, 2);
    check_spans(&bench, begin_ns, now_ns());
    bench_stop(&bench);
}

/* Where decompression dequantizes as well, slices are still in both stages, and all of the time is in the first. */
static void test_two_stages_in_one_go(int fused) {
    struct ss_stage_statistics statistics[SS_STAGE_COUNT];
    struct shape shape = default_shape();
    shape.codec = SS_CODEC_KVRANS;
    shape.vectors = 256;
    struct bench bench = bench_start_shape(&shape, fused, EVENTS);
    CHECK_EQUAL(ss_pipeline_trace_start(bench.pipeline), SS_OK);
    bench_fetch(&bench);
    bench_read(&bench);
    check_slices(&bench, fused, 1);
    ss_pipeline_statistics(bench.pipeline, statistics);
    const struct ss_stage_statistics *dequantize = &statistics[SS_STAGE_DEQUANTIZE];
    int in_one_go = fused && ss_kvrans_kernels_find(ss_isa_active())->decode_elements != NULL;
    CHECK_EQUAL(dequantize->items, shape.chunks * shape.slices);
    CHECK_EQUAL(dequantize->output_bytes, bench.fixture->size);
    CHECK_EQUAL(dequantize->busy_ns == 0, in_one_go);
    CHECK(statistics[SS_STAGE_DECOMPRESS].busy_ns > 0);
    bench_stop(&bench);
}

static void test_a_recording_holds_only_its_own_rounds(void) {
    struct bench bench = bench_start(1, EVENTS);
    bench_fetch(&bench);
    bench_read(&bench);
    CHECK_EQUAL(bench.count, 0);
    CHECK_EQUAL(ss_pipeline_trace_start(bench.pipeline), SS_OK);
    bench_fetch(&bench);
    CHECK_EQUAL(ss_pipeline_trace_start(bench.pipeline), SS_OK);
    bench_fetch(&bench);
    ss_pipeline_trace_stop(bench.pipeline);
    bench_fetch(&bench);
    bench_read(&bench);
    CHECK(bench.count > 0);
    for (uint64_t i = 0; i < bench.count; i++) {
        CHECK_EQUAL(bench.events[i].batch, 3);
    }
    CHECK_EQUAL(ss_pipeline_trace_start(bench.pipeline), SS_OK);
    bench_read(&bench);
    CHECK_EQUAL(bench.count, 0);
    bench_stop(&bench);
}

static void test_a_full_log_keeps_the_first_events_and_counts_the_rest(void) {
    struct bench bench = bench_start(0, 3);
    CHECK_EQUAL(ss_pipeline_trace_start(bench.pipeline), SS_OK);
    bench_fetch(&bench);
    ss_pipeline_trace_stop(bench.pipeline);
    bench_read(&bench);
    const struct shape *shape = &bench.fixture->shape;
    CHECK(bench.count <= 3 * 9); /* 3 net threads and 2 for each other stage */
    CHECK(bench.dropped + bench.count >= 3ULL * shape->chunks * shape->slices);
    uint64_t dropped;
    CHECK_EQUAL(ss_pipeline_trace_read(bench.pipeline, bench.events, 1, &dropped), bench.count);
    bench_stop(&bench);
}

static void test_no_room_for_events_is_no_tracing(void) {
    struct bench bench = bench_start(1, 0);
    CHECK_EQUAL(ss_pipeline_trace_start(bench.pipeline), SS_NOT_SUPPORTED);
    bench_fetch(&bench);
    bench_read(&bench);
    CHECK_EQUAL(bench.count + bench.dropped, 0);
    bench_stop(&bench);
}

int main(void) {
    for (int fused = 0; fused <= backend_fuses(); fused++) {
        test_every_slice_is_in_every_stage_once(fused);
        test_two_stages_in_one_go(fused);
    }
    test_a_recording_holds_only_its_own_rounds();
    test_a_full_log_keeps_the_first_events_and_counts_the_rest();
    test_no_room_for_events_is_no_tracing();
    return 0;
}
