/* SPDX-License-Identifier: Apache-2.0 */
/* test_doca_emulator_dma.c - copies, their limits, and what a failing one does to its context */
#include <time.h>

#include "doca_fixture.h"

enum { SOURCE_AT = 0, TARGET_AT = 4 << 20 };

static struct report copy_once(struct bench *bench, struct doca_buf *source, struct doca_buf *target) {
    report_count = 0;
    memcpy_submit(bench, source, target, 0);
    progress_reports(bench->pe, 1);
    return reports[0];
}

/* Brings a context that was stopped by an error back. */
static void context_restart(struct bench *bench) {
    struct doca_ctx *ctx = doca_dma_as_ctx(bench->dma);
    CHECK(state_of(ctx) == DOCA_CTX_STATE_STOPPING, "an error stops the context");
    progress_state(bench->pe, ctx, DOCA_CTX_STATE_IDLE);
    OK(doca_ctx_start(ctx));
}

/* Facts 9 [H30, FD]: the source's data is copied, up to 2 MiB. */
static void test_data_is_copied(void) {
    static const size_t sizes[] = {1, 100, 65536, 2097152};
    struct bench bench;
    settings(NULL);
    bench_open(&bench);
    random_fill(bench.memory, 2097152);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct doca_buf *source = buf_data(&bench, SOURCE_AT, sizes[i]);
        struct doca_buf *target = buf_empty(&bench, TARGET_AT, sizes[i] + 1);
        CHECK(copy_once(&bench, source, target).status == DOCA_SUCCESS, "%zu bytes", sizes[i]);
        CHECK(data_length(target) == sizes[i], "%zu of %zu bytes", data_length(target), sizes[i]);
        CHECK(memcmp(bench.memory + TARGET_AT, bench.memory, sizes[i]) == 0, "bytes of %zu", sizes[i]);
        CHECK(bench.memory[TARGET_AT + sizes[i]] == 0, "no byte more");
        buf_release(source);
        buf_release(target);
    }
    bench_close(&bench);
}

/* Facts 5 [B3], 12 (2): a destination is appended to, until it is full. */
static void test_a_destination_that_is_not_renewed_fills_up(void) {
    struct bench bench;
    settings(NULL);
    bench_open(&bench);
    memcpy(bench.memory, "12345678", 8);
    struct doca_buf *source = buf_data(&bench, SOURCE_AT, 8), *target = buf_empty(&bench, TARGET_AT, 16);
    CHECK(copy_once(&bench, source, target).status == DOCA_SUCCESS, "first");
    CHECK(copy_once(&bench, source, target).status == DOCA_SUCCESS, "second");
    CHECK(memcmp(bench.memory + TARGET_AT, "1234567812345678", 16) == 0, "bytes");
    CHECK(copy_once(&bench, source, target).status == DOCA_ERROR_IO_FAILED, "it is full");
    context_restart(&bench);
    buf_renew(&bench, &target, TARGET_AT, 16);
    CHECK(copy_once(&bench, source, target).status == DOCA_SUCCESS, "another one is empty");
    buf_release(source);
    buf_release(target);
    bench_close(&bench);
}

/* Facts 9 [FD], 12 (1): without data or over the limit, submitting succeeds and completing fails. */
static void test_sizes_out_of_bounds_fail_at_completion(void) {
    struct bench bench;
    settings(NULL);
    bench_open(&bench);
    struct doca_buf *empty = buf_empty(&bench, SOURCE_AT, 64), *over = buf_data(&bench, SOURCE_AT, 2097153);
    struct doca_buf *target = buf_empty(&bench, TARGET_AT, 3000000), *small = buf_empty(&bench, TARGET_AT, 63);
    struct doca_buf *good = buf_data(&bench, SOURCE_AT, 64);
    CHECK(copy_once(&bench, empty, target).status == DOCA_ERROR_IO_FAILED, "without data");
    context_restart(&bench);
    CHECK(copy_once(&bench, over, target).status == DOCA_ERROR_IO_FAILED, "over the limit");
    context_restart(&bench);
    CHECK(copy_once(&bench, good, small).status == DOCA_ERROR_IO_FAILED, "the destination is too small");
    context_restart(&bench);
    CHECK(copy_once(&bench, good, target).status == DOCA_SUCCESS, "nothing is left of that");
    buf_release(empty);
    buf_release(good);
    buf_release(over);
    buf_release(target);
    buf_release(small);
    bench_close(&bench);
}

/* Facts 4 [H30], 17 (6): memory that was not permitted to be written is not; what is unset is read-only here. */
static void test_memory_without_permission_is_not_written(void) {
    static const uint32_t masks[] = {DOCA_ACCESS_FLAG_LOCAL_READ_ONLY, DOCA_ACCESS_FLAG_PCI_READ_WRITE};
    static uint8_t region[64];
    struct bench bench;
    struct doca_mmap *mmap;
    struct doca_buf *target;
    settings(NULL);
    bench_open(&bench);
    struct doca_buf *source = buf_data(&bench, SOURCE_AT, 64), *back = buf_empty(&bench, TARGET_AT, 64);
    memset(bench.memory, 1, 64);
    for (size_t way = 0; way < 3; way++) {
        OK(doca_mmap_create(&mmap));
        OK(doca_mmap_add_dev(mmap, bench.dev));
        OK(doca_mmap_set_memrange(mmap, region, sizeof region));
        if (way < 2) {
            OK(doca_mmap_set_permissions(mmap, masks[way]));
        }
        OK(doca_mmap_start(mmap));
        OK(doca_buf_inventory_buf_get_by_addr(bench.inventory, mmap, region, 64, &target));
        CHECK(copy_once(&bench, source, target).status == DOCA_ERROR_IO_FAILED, "way %zu", way);
        CHECK(region[0] == 0, "way %zu wrote", way);
        context_restart(&bench);
        buf_release(target);
        OK(doca_buf_inventory_buf_get_by_data(bench.inventory, mmap, region, 64, &target));
        buf_renew(&bench, &back, TARGET_AT, 64);
        CHECK(copy_once(&bench, target, back).status == DOCA_SUCCESS, "way %zu may be read", way);
        buf_release(target);
        OK(doca_mmap_destroy(mmap));
    }
    buf_release(source);
    buf_release(back);
    bench_close(&bench);
}

static struct doca_ctx *looked_at;
static uint32_t stopping_at = UINT32_MAX;

static void note_and_look(struct doca_dma_task_memcpy *task, union doca_data user, union doca_data context) {
    if (stopping_at == UINT32_MAX && state_of(looked_at) == DOCA_CTX_STATE_STOPPING) {
        stopping_at = report_count;
    }
    note_memcpy(task, user, context);
}

/* Facts 9 [S pe_task_error], 12 (7): the context stops automatically, and all tasks in flight fail. */
static void test_a_failing_task_takes_those_behind_it_along(void) {
    struct bench bench;
    struct doca_buf *sources[8], *targets[8];
    struct doca_dma_task_memcpy *task;
    settings("FAULT", "dma:4", NULL);
    bench_open(&bench);
    struct doca_ctx *ctx = doca_dma_as_ctx(bench.dma);
    OK(doca_ctx_stop(ctx));
    looked_at = ctx;
    OK(doca_dma_task_memcpy_set_conf(bench.dma, note_and_look, note_and_look, TASKS_MAX));
    OK(doca_ctx_start(ctx));
    memset(bench.memory, 1, 4096);
    for (size_t i = 0; i < 8; i++) {
        sources[i] = buf_data(&bench, 64 * i, 64);
        targets[i] = buf_empty(&bench, TARGET_AT + 64 * i, 64);
        memcpy_submit(&bench, sources[i], targets[i], i);
    }
    OK(doca_dma_task_memcpy_alloc_init(bench.dma, sources[0], targets[0], (union doca_data){.u64 = 0}, &task));
    progress_reports(bench.pe, 8);
    CHECK(stopping_at == 3, "it stops before the report of the failing task: at %u", stopping_at);
    for (size_t i = 0; i < 8; i++) {
        doca_error_t expected = i < 3 ? DOCA_SUCCESS : DOCA_ERROR_IO_FAILED;
        CHECK(reports[i].user_data == i && reports[i].status == expected, "task %zu: %s", i,
              doca_error_get_name(reports[i].status));
        CHECK(data_length(targets[i]) == (i < 3 ? 64 : 0), "length %zu", i);
        CHECK(bench.memory[TARGET_AT + 64 * i + 63] == (i < 3), "bytes of task %zu", i);
    }
    CHECK(bench.memory[TARGET_AT + 3 * 64] == 1, "a failing task may have written some of its bytes");
    EXPECT(doca_task_submit(doca_dma_task_memcpy_as_task(task)), ERROR_BAD_STATE);
    CHECK(doca_pe_progress(bench.pe) == 0, "a task is not freed yet");
    doca_task_free(doca_dma_task_memcpy_as_task(task));
    context_restart(&bench);
    memcpy_submit(&bench, sources[3], targets[3], 8);
    progress_reports(bench.pe, 9);
    CHECK(reports[8].status == DOCA_SUCCESS, "it was started again");
    for (size_t i = 0; i < 8; i++) {
        buf_release(sources[i]);
        buf_release(targets[i]);
    }
    bench_close(&bench);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Ours: engines take the time that the model says, at least. 4 MB at 0.16 Gbps are 0.2 s, and 50 ms more to the end. */
static void test_an_engine_takes_its_time(void) {
    struct bench bench;
    settings("DMA_GBPS", "0.16", "LATENCY_US", "50000", NULL);
    bench_open(&bench);
    struct doca_buf *source = buf_data(&bench, 0, 1000000), *targets[4];
    double start = seconds();
    for (size_t i = 0; i < 4; i++) {
        targets[i] = buf_empty(&bench, TARGET_AT + 1000000 * i, 1000000);
        memcpy_submit(&bench, source, targets[i], i);
    }
    progress_reports(bench.pe, 4);
    CHECK(seconds() - start >= 0.249, "it took %f s", seconds() - start);
    buf_release(source);
    for (size_t i = 0; i < 4; i++) {
        buf_release(targets[i]);
    }
    bench_close(&bench);
}

int main(void) {
    test_data_is_copied();
    test_a_destination_that_is_not_renewed_fills_up();
    test_sizes_out_of_bounds_fail_at_completion();
    test_memory_without_permission_is_not_written();
    test_a_failing_task_takes_those_behind_it_along();
    test_an_engine_takes_its_time();
    return 0;
}
