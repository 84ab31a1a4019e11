/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pipeline_trace.c - what a trace shows: every slice in every stage once, and spans that nest
 */
#include "codecs/kvrans/kvrans.h"
#include "pipeline_support.h"

enum { EVENTS = 1024, EVENTS_MAX = EVENTS * 16 };

static struct ss_trace_event events[EVENTS_MAX];
static uint64_t count, dropped, received_bytes;

static void fetch(struct bench *bench) {
    bench_begin(bench);
    CHECK_EQUAL(bench_fetch(bench), SS_OK);
    received_bytes += bench->batch->received_bytes;
}

static void trace_read(struct bench *bench) {
    count = ss_pipeline_trace_read(bench->pipeline, events, EVENTS_MAX, &dropped);
    CHECK(count <= EVENTS_MAX);
}

/* Every slice of 'batches' batches is in each stage exactly once, with its bytes. */
static void check_slices(const struct bench *bench, uint32_t batches) {
    const struct shape *shape = &bench->fixture->shape;
    uint32_t slices = shape->chunks * shape->slices;
    uint8_t *seen = calloc((size_t)batches * slices, SS_STAGE_COUNT);
    CHECK(seen != NULL);
    uint64_t received = 0;
    for (uint64_t i = 0; i < count; i++) {
        const struct ss_trace_event *event = &events[i];
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
    CHECK_EQUAL(received, received_bytes);
    for (size_t i = 0; i < (size_t)batches * slices * SS_STAGE_COUNT; i++) {
        size_t stage = i % SS_STAGE_COUNT;
        int expected =
            stage == SS_STAGE_DECOMPRESS || stage == SS_STAGE_DEQUANTIZE || (stage == SS_STAGE_DMA && !bench->fused);
        CHECK_EQUAL(seen[i], expected);
    }
    free(seen);
}

/* Spans lie in [begin, end]; those of one thread and stage nest or do not overlap. */
static void check_spans(uint64_t begin_ns, uint64_t end_ns) {
    for (uint64_t i = 0; i < count; i++) {
        const struct ss_trace_event *one = &events[i];
        CHECK(one->begin_ns >= begin_ns && one->begin_ns <= one->end_ns && one->end_ns <= end_ns);
        for (uint64_t j = i + 1; j < count; j++) {
            const struct ss_trace_event *later = &events[j];
            if (later->stage == one->stage && later->thread == one->thread) {
                CHECK(later->end_ns >= one->end_ns);
                CHECK(later->begin_ns >= one->end_ns || later->begin_ns <= one->begin_ns ||
                      later->end_ns == one->end_ns);
            }
        }
    }
}

PIPELINE_TEST(test_every_slice_is_in_every_stage_once, AS_BEFORE, options->trace_events = EVENTS) {
    uint64_t begin_ns = ss_now_ns();
    received_bytes = 0;
    CHECK_EQUAL(ss_pipeline_trace_start(bench->pipeline), SS_OK);
    fetch(bench);
    fetch(bench);
    ss_pipeline_trace_stop(bench->pipeline);
    trace_read(bench);
    CHECK_EQUAL(dropped, 0);
    check_slices(bench, 2);
    check_spans(begin_ns, ss_now_ns());
}

/* Where decompression dequantizes as well, slices are still in both stages, and all of the time is in the first. */
PIPELINE_TEST(test_two_stages_in_one_go, (shape->codec = SS_CODEC_KVRANS, shape->vectors = 256),
              options->trace_events = EVENTS) {
    struct ss_stage_statistics statistics[SS_STAGE_COUNT];
    received_bytes = 0;
    CHECK_EQUAL(ss_pipeline_trace_start(bench->pipeline), SS_OK);
    fetch(bench);
    trace_read(bench);
    check_slices(bench, 1);
    ss_pipeline_statistics(bench->pipeline, statistics);
    const struct ss_stage_statistics *dequantize = &statistics[SS_STAGE_DEQUANTIZE];
    int in_one_go = bench->fused && ss_kvrans_kernels_find(ss_isa_active())->decode_elements != NULL;
    CHECK_EQUAL(dequantize->items, bench->shape.chunks * bench->shape.slices);
    CHECK_EQUAL(dequantize->output_bytes, bench->fixture->size);
    CHECK_EQUAL(dequantize->busy_ns == 0, in_one_go);
    CHECK(statistics[SS_STAGE_DECOMPRESS].busy_ns > 0);
}

PIPELINE_TEST(test_a_recording_holds_only_its_own_rounds, AS_BEFORE, options->trace_events = EVENTS) {
    fetch(bench);
    trace_read(bench);
    CHECK_EQUAL(count, 0);
    CHECK_EQUAL(ss_pipeline_trace_start(bench->pipeline), SS_OK);
    fetch(bench);
    CHECK_EQUAL(ss_pipeline_trace_start(bench->pipeline), SS_OK);
    fetch(bench);
    ss_pipeline_trace_stop(bench->pipeline);
    fetch(bench);
    trace_read(bench);
    CHECK(count > 0);
    for (uint64_t i = 0; i < count; i++) {
        CHECK_EQUAL(events[i].batch, 3);
    }
    CHECK_EQUAL(ss_pipeline_trace_start(bench->pipeline), SS_OK);
    trace_read(bench);
    CHECK_EQUAL(count, 0);
}

PIPELINE_TEST(test_a_full_log_keeps_the_first_events_and_counts_the_rest, AS_BEFORE, options->trace_events = 3) {
    CHECK_EQUAL(ss_pipeline_trace_start(bench->pipeline), SS_OK);
    fetch(bench);
    ss_pipeline_trace_stop(bench->pipeline);
    trace_read(bench);
    CHECK(count <= 3 * 9); /* 3 net threads and 2 for each other stage */
    CHECK(dropped + count >= 3ULL * bench->shape.chunks * bench->shape.slices);
    CHECK_EQUAL(ss_pipeline_trace_read(bench->pipeline, events, 1, &dropped), count);
}

PIPELINE_TEST(test_no_room_for_events_is_no_tracing, AS_BEFORE, AS_BEFORE) {
    CHECK_EQUAL(ss_pipeline_trace_start(bench->pipeline), SS_NOT_SUPPORTED);
    fetch(bench);
    trace_read(bench);
    CHECK_EQUAL(count + dropped, 0);
}

int main(void) {
    for (int fused = 0; fused <= backend_fuses(); fused++) {
        test_every_slice_is_in_every_stage_once(fused);
        test_two_stages_in_one_go(fused);
    }
    test_a_recording_holds_only_its_own_rounds(1);
    test_a_full_log_keeps_the_first_events_and_counts_the_rest(0);
    test_no_room_for_events_is_no_tracing(1);
    return 0;
}
