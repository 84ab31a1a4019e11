/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_doca_emulator_misuse.c - what is undefined with a card ends the process here, by a message that names the rule;
 * and what only looks like it does not
 */
#include <pthread.h>

#include "doca_fixture.h"

static struct bench bench;
static struct doca_buf *source, *target;

/* A bench with a slow engine, so that what is submitted is in flight, and two bufs. */
static void start(void) {
    settings("LATENCY_US", "30000000", NULL);
    bench_open(&bench);
    source = buf_data(&bench, 0, 64);
    target = buf_empty(&bench, 4096, 64);
}

static struct doca_task *task_make(void) {
    struct doca_dma_task_memcpy *task;
    OK(doca_dma_task_memcpy_alloc_init(bench.dma, source, target, (union doca_data){.u64 = 0}, &task));
    return doca_dma_task_memcpy_as_task(task);
}

/* ---- Tasks and bufs ------------------------------------------------------------------------------------------- */

static void submit_twice(void) {
    start();
    doca_task_submit(memcpy_submit(&bench, source, target, 0));
}

static void free_in_flight(void) {
    start();
    doca_task_free(memcpy_submit(&bench, source, target, 0));
}

static void change_in_flight(void) {
    start();
    doca_dma_task_memcpy_set_src((struct doca_dma_task_memcpy *)memcpy_submit(&bench, source, target, 0), target);
}

static void status_in_flight(void) {
    start();
    doca_task_get_status(memcpy_submit(&bench, source, target, 0));
}

static void free_twice(void) {
    start();
    struct doca_task *task = task_make();
    doca_task_free(task);
    doca_task_free(task);
}

static void buf_released_in_flight(void) {
    start();
    memcpy_submit(&bench, source, target, 0);
    buf_release(source);
}

static void buf_used_after_release(void) {
    start();
    buf_release(source);
    data_length(source);
}

static void buf_submitted_after_release(void) {
    start();
    struct doca_task *task = task_make();
    buf_release(target);
    doca_task_submit(task);
}

static void target_twice(void) {
    start();
    memcpy_submit(&bench, source, target, 0);
    memcpy_submit(&bench, source, target, 1);
}

static void source_of_a_target(void) {
    start();
    memcpy_submit(&bench, source, target, 0);
    struct doca_buf *other = buf_empty(&bench, 8192, 64);
    memcpy_submit(&bench, target, other, 1);
}

static void device_missing(void) {
    static uint8_t region[64];
    struct doca_mmap *mmap;
    start();
    settings("DEVICES", "0000:04:00.0", NULL);
    OK(doca_mmap_create(&mmap));
    OK(doca_mmap_add_dev(mmap, device_open()));
    OK(doca_mmap_set_memrange(mmap, region, sizeof region));
    OK(doca_mmap_start(mmap));
    OK(doca_buf_inventory_buf_get_by_data(bench.inventory, mmap, region, sizeof region, &source));
    memcpy_submit(&bench, source, target, 0);
}

/* Facts 7 [H30]: who owns a task when. Facts 5 [H30], 8: bufs in flight. */
static void test_tasks_and_bufs_in_flight_are_left_alone(void) {
    expect_abort(submit_twice, "doca_task_submit: a submitted task belongs to the library until its callback");
    expect_abort(free_in_flight, "doca_task_free: a submitted task belongs to the library until its callback");
    expect_abort(change_in_flight, "memcpy_set_src: a submitted task belongs to the library until its callback");
    expect_abort(status_in_flight, "get_status: a submitted task belongs to the library until its callback");
    expect_abort(free_twice, "doca_task_free: a task must not be used after it was freed");
    expect_abort(buf_released_in_flight, "a buf must not be given back while a task that uses it is in flight");
    expect_abort(buf_used_after_release, "a buf must not be used after it was given back");
    expect_abort(buf_submitted_after_release, "a task's bufs must not have been given back to their inventory");
    expect_abort(target_twice, "the destination of a task must not be used by another one");
    expect_abort(source_of_a_target, "the source of a task must not be another task's destination");
    expect_abort(device_missing, "must have been given the context's device");
}

/* ---- Callbacks ------------------------------------------------------------------------------------------------ */

static void (*in_callback)(void);

static void note_and_misuse(struct doca_dma_task_memcpy *task, union doca_data user, union doca_data context) {
    note_memcpy(task, user, context);
    in_callback();
}

static void run_in_callback(void (*misuse)(void)) {
    in_callback = misuse;
    settings(NULL);
    bench_open(&bench);
    OK(doca_ctx_stop(doca_dma_as_ctx(bench.dma)));
    OK(doca_dma_task_memcpy_set_conf(bench.dma, note_and_misuse, note_and_misuse, 1));
    OK(doca_ctx_start(doca_dma_as_ctx(bench.dma)));
    source = buf_data(&bench, 0, 64);
    target = buf_empty(&bench, 4096, 64);
    memcpy_submit(&bench, source, target, 0);
    progress_reports(bench.pe, 1);
}

static void progress(void) {
    doca_pe_progress(bench.pe);
}

static void progress_in_callback(void) {
    run_in_callback(progress);
}

/* Facts 7 [H30]: what a callback must not do. */
static void test_callbacks_do_not_progress(void) {
    expect_abort(progress_in_callback, "a progress engine must not be progressed from within a callback");
}

/* ---- Threads -------------------------------------------------------------------------------------------------- */

static void *run(void *argument) {
    void (**function)(void) = argument;
    (*function)();
    return NULL;
}

static void on_another_thread(void (*function)(void)) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, run, &function) == 0, "pthread_create");
    CHECK(pthread_join(thread, NULL) == 0, "pthread_join");
}

/* Makes the calling thread the owner of everything, then has another one do what it must not. */
static void owned_and_then(void (*misuse)(void)) {
    start();
    memcpy_submit(&bench, source, target, 0);
    on_another_thread(misuse);
}

static void submit(void) {
    doca_task_submit(kept);
}

static void stop(void) {
    doca_ctx_stop(doca_dma_as_ctx(bench.dma));
}

static void buf_get(void) {
    buf_empty(&bench, 8192, 64);
}

static void buf_read(void) {
    data_length(source);
}

static void mmap_destroy(void) {
    doca_mmap_destroy(bench.mmap);
}

static void progress_elsewhere(void) {
    owned_and_then(progress);
}

static void submit_elsewhere(void) {
    start();
    kept = task_make();
    progress();
    on_another_thread(submit);
}

static void stop_elsewhere(void) {
    owned_and_then(stop);
}

static void buf_get_elsewhere(void) {
    owned_and_then(buf_get);
}

static void buf_read_elsewhere(void) {
    owned_and_then(buf_read);
}

static void mmap_destroy_elsewhere(void) {
    owned_and_then(mmap_destroy);
}

/* Facts 12 (threads) [C]: one thread has a progress engine and what belongs to it. */
static void test_another_thread_is_refused(void) {
    static const char rule[] = "one thread owns a progress engine and its contexts, tasks, inventories and mmaps";
    expect_abort(progress_elsewhere, "doca_pe_progress: ");
    expect_abort(progress_elsewhere, rule);
    expect_abort(submit_elsewhere, rule);
    expect_abort(stop_elsewhere, rule);
    expect_abort(buf_get_elsewhere, rule);
    expect_abort(buf_read_elsewhere, rule);
    expect_abort(mmap_destroy_elsewhere, "this mmap belongs to thread");
}

static void work(void) {
    for (uint32_t i = 0; i < 10; i++) {
        buf_renew(&bench, &target, 4096, 64);
        memcpy_submit(&bench, source, target, i);
        progress_reports(bench.pe, i + 1);
    }
}

/* Facts 12 (threads) [S storage applications]: prepared here, used by a worker, taken apart after it was joined. */
static void test_a_set_is_handed_to_a_worker_and_back(void) {
    settings(NULL);
    bench_open(&bench);
    source = buf_data(&bench, 0, 64);
    target = buf_empty(&bench, 4096, 64);
    on_another_thread(work);
    report_count = 0;
    on_another_thread(work);
    report_count = 0;
    work();
    buf_release(source);
    buf_release(target);
    bench_close(&bench);
}

/* Facts 12 (threads) [S]: an mmap is shared where that was asked for. Each worker has the rest for itself. */
static struct doca_mmap *shared;
static uint8_t region[2][4096];

static void *share(void *argument) {
    struct doca_buf_inventory *inventory;
    uint8_t *mine = argument;
    OK(doca_buf_inventory_create(1, &inventory));
    OK(doca_buf_inventory_start(inventory));
    for (int i = 0; i < 1000; i++) {
        struct doca_buf *buf;
        OK(doca_buf_inventory_buf_get_by_addr(inventory, shared, mine, 4096, &buf));
        buf_release(buf);
    }
    OK(doca_buf_inventory_destroy(inventory));
    return NULL;
}

static void test_a_thread_safe_mmap_is_shared(void) {
    pthread_t threads[2];
    settings(NULL);
    struct doca_dev *dev = device_open();
    OK(doca_mmap_create(&shared));
    OK(doca_mmap_enable_thread_safety(shared));
    OK(doca_mmap_add_dev(shared, dev));
    OK(doca_mmap_set_memrange(shared, region, sizeof region));
    OK(doca_mmap_start(shared));
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_create(&threads[i], NULL, share, region[i]) == 0, "pthread_create");
    }
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0, "pthread_join");
    }
    OK(doca_mmap_destroy(shared));
    OK(doca_dev_close(dev));
}

int main(void) {
    test_tasks_and_bufs_in_flight_are_left_alone();
    test_callbacks_do_not_progress();
    test_another_thread_is_refused();
    test_a_set_is_handed_to_a_worker_and_back();
    test_a_thread_safe_mmap_is_shared();
    return 0;
}
