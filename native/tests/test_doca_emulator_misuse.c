/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_doca_emulator_misuse.c - what is undefined with a card ends the process here, by a message that names the rule;
 * and what only looks like it does not
 */
#include <pthread.h>

#include "doca_fixture.h"

static struct doca_buf *source, *target;

/* A bench with a slow engine, so that what is submitted is in flight, and two bufs. */
static void start(void) {
    settings("LATENCY_US", "30000000", NULL);
    bench_open();
    source = data_at(0, 64);
    target = space_at(4096, 64);
}

static struct doca_task *start_in_flight(void) {
    start();
    return memcpy_submit(source, target, 0);
}

/* ---- Tasks and bufs ------------------------------------------------------------------------------------------- */

static void submit_twice(void) {
    doca_task_submit(start_in_flight());
}

static void free_in_flight(void) {
    doca_task_free(start_in_flight());
}

static void change_in_flight(void) {
    doca_dma_task_memcpy_set_src((struct doca_dma_task_memcpy *)start_in_flight(), target);
}

static void status_in_flight(void) {
    doca_task_get_status(start_in_flight());
}

static void free_twice(void) {
    start();
    struct doca_task *task = memcpy_task(source, target, 0);
    doca_task_free(task);
    doca_task_free(task);
}

static void buf_released_in_flight(void) {
    start_in_flight();
    buf_release(source);
}

static void buf_used_after_release(void) {
    start();
    buf_release(source);
    data_length(source);
}

static void buf_submitted_after_release(void) {
    start();
    struct doca_task *task = memcpy_task(source, target, 0);
    buf_release(target);
    doca_task_submit(task);
}

static void target_twice(void) {
    start_in_flight();
    memcpy_submit(source, target, 1);
}

static void source_of_a_target(void) {
    start_in_flight();
    memcpy_submit(target, space_at(8192, 64), 1);
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
    memcpy_submit(data_of(mmap, region, sizeof region), target, 0);
}

/* ---- Callbacks and threads ------------------------------------------------------------------------------------ */

static void progress(void) {
    doca_pe_progress(bench.pe);
}

static void note_and_progress(struct doca_dma_task_memcpy *task, union doca_data user, union doca_data context) {
    note_memcpy(task, user, context);
    progress();
}

static void progress_in_callback(void) {
    settings(NULL);
    bench_open();
    dma_configure(note_and_progress, 1);
    copy_once(data_at(0, 64), space_at(4096, 64));
}

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

static void submit(void) {
    doca_task_submit(kept);
}

static void stop(void) {
    doca_ctx_stop(bench.dma_ctx);
}

static void buf_get(void) {
    space_at(8192, 64);
}

static void buf_read(void) {
    data_length(source);
}

static void mmap_destroy(void) {
    doca_mmap_destroy(bench.mmap);
}

/* Makes the calling thread the owner of everything, then has another one do what it must not. */
static void (*act)(void);

static void elsewhere(void) {
    start_in_flight();
    on_another_thread(act);
}

static void submit_elsewhere(void) {
    start();
    kept = memcpy_task(source, target, 0);
    progress();
    on_another_thread(submit);
}

/* Facts 5 [H30], 8: bufs in flight; 7 [H30]: who owns a task when, callbacks; 12 [C]: one thread has what belongs to
 * it. */
static void test_misuse_aborts(void) {
    static const char threads[] = "one thread owns a progress engine and its contexts, tasks, inventories and mmaps";
    static const struct {
        void (*misuse)(void);
        const char *rule;
        void (*act)(void); /* of elsewhere() */
    } rules[] = {
        {submit_twice, "doca_task_submit: a submitted task belongs to the library until its callback", NULL},
        {free_in_flight, "doca_task_free: a submitted task belongs to the library until its callback", NULL},
        {change_in_flight, "memcpy_set_src: a submitted task belongs to the library until its callback", NULL},
        {status_in_flight, "get_status: a submitted task belongs to the library until its callback", NULL},
        {free_twice, "doca_task_free: a task must not be used after it was freed", NULL},
        {buf_released_in_flight, "a buf must not be given back while a task that uses it is in flight", NULL},
        {buf_used_after_release, "a buf must not be used after it was given back", NULL},
        {buf_submitted_after_release, "a task's bufs must not have been given back to their inventory", NULL},
        {target_twice, "the destination of a task must not be used by another one", NULL},
        {source_of_a_target, "the source of a task must not be another task's destination", NULL},
        {device_missing, "must have been given the context's device", NULL},
        {progress_in_callback, "a progress engine must not be progressed from within a callback", NULL},
        {elsewhere, "doca_pe_progress: ", progress},
        {elsewhere, threads, progress},
        {submit_elsewhere, threads, NULL},
        {elsewhere, threads, stop},
        {elsewhere, threads, buf_get},
        {elsewhere, threads, buf_read},
        {elsewhere, "this mmap belongs to thread", mmap_destroy},
    };
    for (size_t i = 0; i < COUNT_OF(rules); i++) {
        act = rules[i].act;
        expect_abort(rules[i].misuse, rules[i].rule);
    }
}

static void work(void) {
    report_count = 0;
    for (uint32_t i = 0; i < 10; i++) {
        memcpy_submit(source, target, i);
        progress_reports(i + 1);
        buf_release(target);
        target = space_at(4096, 64);
    }
}

/* Facts 12 (threads) [S storage applications]: prepared here, used by a worker, taken apart after it was joined. */
static void test_a_set_is_handed_to_a_worker_and_back(void) {
    source = data_at(0, 64);
    target = space_at(4096, 64);
    on_another_thread(work);
    on_another_thread(work);
    work();
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
        OK(doca_buf_dec_refcount(buf, NULL));
    }
    OK(doca_buf_inventory_destroy(inventory));
    return NULL;
}

static void test_a_thread_safe_mmap_is_shared(void) {
    pthread_t threads[2];
    shared = region_mmap(region[0], sizeof region, DOCA_ACCESS_FLAG_LOCAL_READ_WRITE);
    OK(doca_mmap_enable_thread_safety(shared));
    OK(doca_mmap_start(shared));
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_create(&threads[i], NULL, share, region[i]) == 0, "pthread_create");
    }
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0, "pthread_join");
    }
    OK(doca_mmap_destroy(shared));
}

int main(void) {
    test_misuse_aborts();
    RULE(test_a_set_is_handed_to_a_worker_and_back, NULL);
    RULE(test_a_thread_safe_mmap_is_shared, NULL);
    return 0;
}
