/* SPDX-License-Identifier: Apache-2.0 */
/* test_doca_emulator_context.c - contexts, the progress engine, and how tasks are submitted */
#include "doca_fixture.h"

/* Facts 6 and 7 [H30]: from making to destroying, with the code of each call that comes at the wrong time. */
static void test_a_context_goes_through_its_states(void) {
    struct doca_compress_task_decompress_deflate *task;
    struct doca_compress *compress;
    struct doca_pe *pe, *other;
    settings(NULL);
    struct doca_dev *dev = device_open();
    OK(doca_pe_create(&pe));
    OK(doca_pe_create(&other));
    OK(doca_compress_create(dev, &compress));
    struct doca_ctx *ctx = doca_compress_as_ctx(compress);
    CHECK(state_of(ctx) == DOCA_CTX_STATE_IDLE, "idle at first");
    EXPECT(doca_ctx_start(ctx), ERROR_NOT_CONNECTED);
    EXPECT(doca_ctx_stop(ctx), ERROR_BAD_STATE);
    OK(doca_pe_connect_ctx(pe, ctx));
    EXPECT(doca_pe_connect_ctx(other, ctx), ERROR_NOT_PERMITTED);
    EXPECT(doca_pe_destroy(pe), ERROR_IN_USE);
    EXPECT(doca_compress_task_decompress_deflate_set_conf(compress, note_deflate, NULL, 1), ERROR_INVALID_VALUE);
    EXPECT(doca_compress_task_decompress_deflate_set_conf(compress, note_deflate, note_deflate, 0),
           ERROR_INVALID_VALUE);
    EXPECT(doca_ctx_start(ctx), ERROR_INVALID_VALUE);
    OK(doca_compress_task_decompress_deflate_set_conf(compress, note_deflate, note_deflate, 1));
    static uint8_t anything[8];
    EXPECT(doca_compress_task_decompress_deflate_alloc_init(compress, (void *)anything, (void *)anything,
                                                            (union doca_data){.u64 = 0}, &task),
           ERROR_BAD_STATE);
    OK(doca_ctx_start(ctx));
    CHECK(state_of(ctx) == DOCA_CTX_STATE_RUNNING, "it runs at once");
    EXPECT(doca_ctx_start(ctx), ERROR_BAD_STATE);
    EXPECT(doca_pe_connect_ctx(other, ctx), ERROR_BAD_STATE);
    EXPECT(doca_compress_task_decompress_deflate_set_conf(compress, note_deflate, note_deflate, 1), ERROR_BAD_STATE);
    EXPECT(doca_compress_destroy(compress), ERROR_IN_USE);
    OK(doca_ctx_stop(ctx));
    CHECK(state_of(ctx) == DOCA_CTX_STATE_IDLE, "it stops at once");
    OK(doca_ctx_start(ctx));
    OK(doca_ctx_stop(ctx));
    OK(doca_compress_destroy(compress));
    OK(doca_pe_destroy(pe));
    OK(doca_pe_destroy(other));
    OK(doca_dev_close(dev));
}

/* Facts 6 [H30] and 12 (3, 4): stopping goes on until all tasks are done, and freed. */
static void test_a_context_is_idle_when_its_tasks_are_freed(void) {
    struct bench bench;
    settings("LATENCY_US", "1000", NULL);
    bench_open(&bench);
    reports_free_tasks = 0;
    struct doca_ctx *ctx = doca_dma_as_ctx(bench.dma);
    struct doca_buf *source = buf_data(&bench, 0, 64), *target = buf_empty(&bench, 64, 64);
    struct doca_task *task = memcpy_submit(&bench, source, target, 1);
    EXPECT(doca_ctx_stop(ctx), ERROR_IN_PROGRESS);
    EXPECT(doca_ctx_stop(ctx), ERROR_IN_PROGRESS);
    CHECK(state_of(ctx) == DOCA_CTX_STATE_STOPPING, "it is stopping");
    progress_reports(bench.pe, 1);
    CHECK(kept == task, "the task");
    for (int i = 0; i < 100; i++) {
        CHECK(doca_pe_progress(bench.pe) == 0, "nothing moves");
    }
    CHECK(state_of(ctx) == DOCA_CTX_STATE_STOPPING, "a task is not freed yet");
    EXPECT(doca_task_submit(task), ERROR_BAD_STATE);
    doca_task_free(task);
    CHECK(doca_pe_progress(bench.pe) == 1 && state_of(ctx) == DOCA_CTX_STATE_IDLE, "now it is idle");
    buf_release(source);
    buf_release(target);
    bench_close(&bench);
}

static struct doca_ctx *stop_in_callback;

static void note_and_stop(struct doca_dma_task_memcpy *task, union doca_data user, union doca_data context) {
    note_memcpy(task, user, context);
    OK(doca_ctx_stop(stop_in_callback));
}

/* Facts 6 [SH]: a context may be stopped from within a completion callback. */
static void test_a_callback_may_stop_its_context(void) {
    struct bench bench;
    settings(NULL);
    bench_open(&bench);
    stop_in_callback = doca_dma_as_ctx(bench.dma);
    OK(doca_ctx_stop(stop_in_callback));
    OK(doca_dma_task_memcpy_set_conf(bench.dma, note_and_stop, note_memcpy, 1));
    OK(doca_ctx_start(stop_in_callback));
    struct doca_buf *source = buf_data(&bench, 0, 64), *target = buf_empty(&bench, 64, 64);
    memcpy_submit(&bench, source, target, 1);
    progress_reports(bench.pe, 1);
    CHECK(state_of(stop_in_callback) == DOCA_CTX_STATE_IDLE, "idle");
    buf_release(source);
    buf_release(target);
    bench_close(&bench);
}

/* Facts 7 [H30] and 12 (5): a call of progress reports one completion at most. */
static void test_progress_reports_one_at_a_time(void) {
    struct bench bench;
    struct doca_buf *sources[TASKS_MAX], *targets[TASKS_MAX];
    settings(NULL);
    bench_open(&bench);
    for (size_t i = 0; i < TASKS_MAX; i++) {
        sources[i] = buf_data(&bench, 64 * i, 64);
        targets[i] = buf_empty(&bench, 65536 + 64 * i, 64);
        memcpy_submit(&bench, sources[i], targets[i], i);
    }
    for (uint32_t before = 0; report_count < TASKS_MAX; before = report_count) {
        uint8_t moved = doca_pe_progress(bench.pe);
        CHECK(moved <= 1 && report_count == before + moved, "%u reports by one call", report_count - before);
        CHECK(moved == 0 || reports[before].user_data == before, "in order, where nothing else was asked for");
    }
    CHECK(doca_pe_progress(bench.pe) == 0, "nothing is left");
    for (size_t i = 0; i < TASKS_MAX; i++) {
        buf_release(sources[i]);
        buf_release(targets[i]);
    }
    bench_close(&bench);
}

/* Facts 9 [H30]: completions may come in any order. Here a seed says which. */
static void test_completions_come_out_of_order_by_a_seed(void) {
    struct bench bench;
    struct doca_buf *sources[TASKS_MAX], *targets[TASKS_MAX];
    int out_of_order = 0;
    settings("OUT_OF_ORDER", "12345", NULL);
    bench_open(&bench);
    for (size_t i = 0; i < TASKS_MAX; i++) {
        sources[i] = buf_data(&bench, 64 * i, 64);
        targets[i] = buf_empty(&bench, 65536 + 64 * i, 64);
    }
    for (int trial = 0; trial < 20 && !out_of_order; trial++) {
        uint64_t seen = 0;
        report_count = 0;
        for (size_t i = 0; i < TASKS_MAX; i++) {
            buf_renew(&bench, &targets[i], 65536 + 64 * i, 64);
            memcpy_submit(&bench, sources[i], targets[i], i);
        }
        progress_reports(bench.pe, TASKS_MAX);
        for (size_t i = 0; i < TASKS_MAX; i++) {
            out_of_order |= reports[i].user_data != i;
            seen |= 1ull << reports[i].user_data;
        }
        CHECK(seen == (1ull << TASKS_MAX) - 1, "each once: %llx", (unsigned long long)seen);
    }
    CHECK(out_of_order, "20 trials in order");
    for (size_t i = 0; i < TASKS_MAX; i++) {
        buf_release(sources[i]);
        buf_release(targets[i]);
    }
    bench_close(&bench);
}

/* Facts 7 [H30]: a task that completed may be given other bufs, and submitted again. */
static void test_a_task_can_be_used_again(void) {
    struct bench bench;
    settings(NULL);
    bench_open(&bench);
    reports_free_tasks = 0;
    struct doca_buf *source = buf_data(&bench, 0, 64), *target = buf_empty(&bench, 64, 64), *other;
    struct doca_task *task = memcpy_submit(&bench, source, target, 9);
    progress_reports(bench.pe, 1);
    other = buf_empty(&bench, 128, 64);
    doca_dma_task_memcpy_set_src((struct doca_dma_task_memcpy *)task, target);
    doca_dma_task_memcpy_set_dst((struct doca_dma_task_memcpy *)task, other);
    OK(doca_task_submit(task));
    progress_reports(bench.pe, 2);
    CHECK(reports[1].user_data == 9 && reports[1].status == DOCA_SUCCESS, "again");
    CHECK(data_length(other) == 64, "into the other buf");
    doca_task_free(task);
    buf_release(source);
    buf_release(target);
    buf_release(other);
    bench_close(&bench);
}

/* Facts 8 and 9 [H30]: as many tasks at a time as were configured. */
static void test_tasks_run_out(void) {
    struct bench bench;
    struct doca_dma_task_memcpy *tasks[TASKS_MAX], *more;
    settings(NULL);
    bench_open(&bench);
    struct doca_buf *source = buf_data(&bench, 0, 64), *target = buf_empty(&bench, 64, 64);
    union doca_data data = {.u64 = 0};
    for (size_t i = 0; i < TASKS_MAX; i++) {
        OK(doca_dma_task_memcpy_alloc_init(bench.dma, source, target, data, &tasks[i]));
    }
    EXPECT(doca_dma_task_memcpy_alloc_init(bench.dma, source, target, data, &more), ERROR_NO_MEMORY);
    doca_task_free(doca_dma_task_memcpy_as_task(tasks[3]));
    OK(doca_dma_task_memcpy_alloc_init(bench.dma, source, target, data, &tasks[3]));
    for (size_t i = 0; i < TASKS_MAX; i++) {
        doca_task_free(doca_dma_task_memcpy_as_task(tasks[i]));
    }
    buf_release(source);
    buf_release(target);
    bench_close(&bench);
}

int main(void) {
    test_a_context_goes_through_its_states();
    test_a_context_is_idle_when_its_tasks_are_freed();
    test_a_callback_may_stop_its_context();
    test_progress_reports_one_at_a_time();
    test_completions_come_out_of_order_by_a_seed();
    test_a_task_can_be_used_again();
    test_tasks_run_out();
    return 0;
}
