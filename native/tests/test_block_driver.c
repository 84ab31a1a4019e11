/* SPDX-License-Identifier: Apache-2.0 */
/* A device that answers late, in parts, with errors, or not at all: the test's own driver simulates each case. */
#include "block/block.h"
#include "check.h"
#include "cpu/clock.h"

#include <errno.h>
#include <poll.h>

enum { SIZE = 1 << 20, PAGE = 4096, WAIT_MAX_MS = 120000 };

static char path[] = "./test_block_driver-XXXXXX";
static uint8_t memory[2 * PAGE] __attribute__((aligned(4096)));

/* What each attempt at a request comes to, with the block's lock held; 0 ends the list. HOLD: wait until it changes. */
#define HOLD INT64_MIN
static int64_t outcomes[64];
static size_t next_outcome;
static uint64_t attempted_at[64]; /* offset in the request */

static enum ss_result driver_start(struct ss_block *block) {
    return ss_block_start_thread(block, 0);
}

static void driver_run(struct ss_block *block) {
    struct ss_request *request;
    for (;;) {
        while ((request = ss_schedule_next(&block->schedule, ss_now_ns())) == NULL) {
            if (block->stopping) {
                return;
            }
            pthread_cond_wait(&block->changed, &block->lock);
        }
        int again = 1;
        while (again) {
            while (outcomes[next_outcome] == HOLD) {
                pthread_cond_wait(&block->changed, &block->lock);
            }
            attempted_at[next_outcome] = request->done;
            again = ss_block_finish_request(block, request, outcomes[next_outcome++]);
        }
        while (ss_block_check_next(block)) {
        }
    }
}

static void driver_wake(struct ss_block *block) {
    pthread_cond_broadcast(&block->changed);
}

static void driver_finish(struct ss_block *block) {
    (void)block;
}

static const struct ss_block_driver driver = {
    .name = "test", .start = driver_start, .run = driver_run, .wake = driver_wake, .finish = driver_finish};

static struct ss_block *open_with(const int64_t *list, size_t count) {
    struct ss_block_options options = {
        .options_size = sizeof options, .path = path, .size = SIZE, .access = SS_BLOCK_THREADS, .core = -1};
    struct ss_block *block;

    memset(outcomes, 0, sizeof outcomes);
    memcpy(outcomes, list, count * sizeof *list);
    next_outcome = 0;
    CHECK(ss_block_open_with(&options, &driver, &block) == SS_OK, "%s", strerror(errno));
    return block;
}

static struct ss_block_completion perform_one(struct ss_block *block, const struct ss_block_operation *operation) {
    struct pollfd poll_set = {.fd = ss_block_descriptor(block), .events = POLLIN};
    struct ss_block_completion completion;

    CHECK(ss_block_submit(block, operation, 1) == SS_OK, "submit");
    CHECK(poll(&poll_set, 1, WAIT_MAX_MS) == 1, "nothing ended");
    CHECK(ss_block_completions(block, &completion, 1) == 1, "nothing to take");
    CHECK(poll(&poll_set, 1, 0) == 0, "readable although there is nothing more");
    return completion;
}

static struct ss_block_completion perform(struct ss_block *block, enum ss_block_kind kind, uint64_t length) {
    struct ss_block_operation operation = {.kind = kind, .length = length, .memory = length != 0 ? memory : NULL};
    return perform_one(block, &operation);
}

static void check_error(const int64_t *list, size_t count, enum ss_block_kind kind, int32_t error) {
    struct ss_block *block = open_with(list, count);
    struct ss_block_completion completion = perform(block, kind, kind == SS_BLOCK_FLUSH ? 0 : 2 * PAGE);
    CHECK(completion.error == error, "%s, not %s", strerror(completion.error), strerror(error));
    ss_block_close(block);
    CHECK(next_outcome == count, "%zu attempts, not %zu", next_outcome, count);
}
#define CHECK_ERROR(kind, error, ...)                                                                                  \
    check_error((const int64_t[]){__VA_ARGS__}, sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t), kind, error)

static void test_each_error_is_reported_as_it_is(void) {
    static const int errors[] = {EIO, ENOSPC, ENODEV, ENXIO, EROFS, EINVAL, ETIMEDOUT};
    for (size_t index = 0; index < COUNT_OF(errors); index++) {
        CHECK_ERROR(SS_BLOCK_WRITE, errors[index], -errors[index]);
        CHECK_ERROR(SS_BLOCK_FLUSH, errors[index], -errors[index]);
    }
}

static void test_short_ones_are_continued(void) {
    CHECK_ERROR(SS_BLOCK_READ, 0, PAGE, PAGE);
    CHECK(attempted_at[1] == PAGE, "from %d on", (int)attempted_at[1]);
    CHECK_ERROR(SS_BLOCK_WRITE, 0, 1000, 2 * PAGE - 512); /* what is left begins at a sector */
    CHECK(attempted_at[1] == 512, "from %d on", (int)attempted_at[1]);
    CHECK_ERROR(SS_BLOCK_READ, EIO, PAGE, 0);
    CHECK_ERROR(SS_BLOCK_READ, EIO, 100);
    CHECK_ERROR(SS_BLOCK_WRITE, ENOSPC, PAGE, 0);
    CHECK_ERROR(SS_BLOCK_READ, ENODEV, PAGE, -ENODEV);
}

static void test_interruptions_are_tried_again_but_not_for_ever(void) {
    int64_t list[33];
    CHECK_ERROR(SS_BLOCK_READ, 0, -EINTR, -EAGAIN, 2 * PAGE);
    CHECK_ERROR(SS_BLOCK_FLUSH, 0, -EAGAIN, 0);
    for (size_t index = 0; index < 32; index++) {
        list[index] = -EAGAIN;
    }
    check_error(list, 32, SS_BLOCK_READ, EAGAIN);
}

static void test_a_discard_that_is_not_taken_is_no_error(void) {
    CHECK_ERROR(SS_BLOCK_DISCARD, 0, -EOPNOTSUPP);
    CHECK_ERROR(SS_BLOCK_DISCARD, EIO, -EIO);
}

static void test_a_device_that_went_away_is_told(void) {
    struct ss_block_statistics statistics;
    struct ss_block *block = open_with((const int64_t[]){-ENODEV, -EIO, -EIO}, 3);

    CHECK(perform(block, SS_BLOCK_READ, PAGE).error == ENODEV, "ENODEV");
    for (int count = 0; count < 2; count++) {
        CHECK(perform(block, SS_BLOCK_WRITE, PAGE).error == EIO, "EIO");
    }
    ss_block_statistics(block, &statistics);
    CHECK(statistics.gone && statistics.last_error == EIO && statistics.errors[SS_BLOCK_WRITE] == 2, "statistics");
    ss_block_close(block);
}

/* The thread that checks what was read meets the end of a client's file, which was cut off meanwhile. */
static void test_memory_that_is_lost_holds_no_object(void) {
    struct ss_guard *guard;
    int fd = memfd_create("lost", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, 2 * PAGE) == 0, "memfd");
    void *lost = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(lost != MAP_FAILED && ss_guard_open(lost, 2 * PAGE, &guard) == SS_OK && ftruncate(fd, 0) == 0, "guard");
    const struct ss_block_operation operation = {.kind = SS_BLOCK_READ,
                                                 .length = 2 * PAGE,
                                                 .memory = lost,
                                                 .expected = {.length = PAGE},
                                                 .expected_units = 1,
                                                 .is_checked = 1};
    struct ss_block *block = open_with((const int64_t[]){2 * PAGE}, 1);
    struct ss_block_completion completion = perform_one(block, &operation);
    CHECK(completion.error == 0 && completion.verdict == SS_BAD_DATA, "verdict %d", (int)completion.verdict);
    CHECK(ss_guard_lost(guard), "lost");
    ss_block_close(block);
    ss_guard_close(guard);
    CHECK(munmap(lost, 2 * PAGE) == 0 && close(fd) == 0, "end");
}

/* The block of a device that never answers is never freed: this pointer keeps it reachable for leak checkers. */
static struct ss_block *stuck;

static void test_a_device_that_does_not_answer_delays_no_other(void) {
    struct ss_block_completion completions[4];
    struct ss_block_operation operations[2] = {
        {.kind = SS_BLOCK_READ, .length = PAGE, .memory = memory, .tag = 1},
        {.kind = SS_BLOCK_WRITE, .priority = SS_BLOCK_PRIORITY_WRITE, .length = PAGE, .memory = memory, .tag = 2}};
    struct ss_block_statistics statistics;

    stuck = open_with((const int64_t[]){HOLD}, 1);
    CHECK(ss_block_submit(stuck, operations, 2) == SS_OK, "submit");
    do { /* until its thread has it */
        usleep(1000);
        ss_block_statistics(stuck, &statistics);
    } while (statistics.in_flight == 0);
    CHECK(statistics.oldest_ns != 0 && statistics.waiting[SS_BLOCK_PRIORITY_WRITE] == 1, "what it waits for");
    CHECK(ss_block_stop(stuck, 20) == SS_DEADLINE, "stop");
    CHECK(ss_block_completions(stuck, completions, 4) == 1 && completions[0].tag == 2 &&
              completions[0].error == ECANCELED,
          "what had not begun");
    ss_block_close(stuck);
    /* It comes back after all, and finds everything where it was. */
    pthread_mutex_lock(&stuck->lock);
    outcomes[0] = PAGE;
    pthread_cond_broadcast(&stuck->changed);
    while (stuck->threads_running > 0) {
        pthread_cond_wait(&stuck->changed, &stuck->lock);
    }
    pthread_mutex_unlock(&stuck->lock);
}

int main(void) {
    int fd = mkstemp(path);
    CHECK(fd >= 0 && close(fd) == 0, "%s", path);
    test_each_error_is_reported_as_it_is();
    test_short_ones_are_continued();
    test_interruptions_are_tried_again_but_not_for_ever();
    test_a_discard_that_is_not_taken_is_no_error();
    test_a_device_that_went_away_is_told();
    test_memory_that_is_lost_holds_no_object();
    test_a_device_that_does_not_answer_delays_no_other();
    CHECK(unlink(path) == 0, "unlink");
    return 0;
}
