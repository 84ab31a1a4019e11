/* SPDX-License-Identifier: Apache-2.0 */
/* The choice of the next operation: reads before writes, writes in the gaps, background last, none starves. The device
 * is this test: it holds what it was given, and a clock that it sets. */
#include "block/schedule.h"
#include "check.h"

#include <errno.h>

enum { MIB = 1 << 20, MS = 1000000 };

static struct ss_schedule schedule;
static uint64_t now_ns;
static uint64_t next_tag;
static uint8_t memory[4096];

static void start(uint32_t depth) {
    struct ss_block_options options = {.queue_depth = depth, .operations_max = 64};
    CHECK(ss_schedule_init(&schedule, &options) == SS_OK, "init");
    schedule.bytes_max[SS_BLOCK_PRIORITY_WRITE] = 2 * MIB; /* half of the limit: fewer operations show it */
    now_ns = 1000;
    next_tag = 0;
}

static enum ss_result submit(enum ss_block_kind kind, enum ss_block_priority priority, uint64_t length) {
    struct ss_block_operation operation = {
        .kind = kind, .priority = priority, .length = length, .memory = memory, .tag = ++next_tag};
    return ss_schedule_submit(&schedule, &operation, 1, now_ns);
}

static void submit_read(uint64_t length) {
    CHECK(submit(SS_BLOCK_READ, SS_BLOCK_PRIORITY_FOREGROUND, length) == SS_OK, "read");
}

static void submit_write(uint64_t length) {
    CHECK(submit(SS_BLOCK_WRITE, SS_BLOCK_PRIORITY_WRITE, length) == SS_OK, "write");
}

static void submit_scrub(uint64_t length) {
    CHECK(submit(SS_BLOCK_READ, SS_BLOCK_PRIORITY_BACKGROUND, length) == SS_OK, "scrub");
}

static struct ss_request *given(uint64_t tag) {
    struct ss_request *request = ss_schedule_next(&schedule, now_ns);
    CHECK(request != NULL, "nothing was given, not %d", (int)tag);
    CHECK(request->entry->operation.tag == tag, "%d was given, not %d", (int)request->entry->operation.tag, (int)tag);
    return request;
}

static void nothing_given(void) {
    struct ss_request *request = ss_schedule_next(&schedule, now_ns);
    CHECK(request == NULL, "%d was given", (int)request->entry->operation.tag);
}

static void done(struct ss_request *request, int32_t error) {
    now_ns += 1000;
    ss_schedule_done(&schedule, request, error, now_ns);
}

static void taken(uint64_t tag, int32_t error) {
    struct ss_block_completion completion;
    CHECK(ss_schedule_take(&schedule, &completion, 1) == 1, "%d has not ended", (int)tag);
    CHECK(completion.tag == tag && completion.error == error, "%d ended with %d", (int)completion.tag,
          completion.error);
    CHECK(completion.begin_ns <= completion.end_ns && completion.end_ns <= now_ns, "times");
}

static void nothing_taken(void) {
    struct ss_block_completion completion;
    CHECK(ss_schedule_take(&schedule, &completion, 1) == 0, "%d ended", (int)completion.tag);
}

static void test_reads_go_before_writes_and_these_before_background(void) {
    submit_scrub(4096);
    submit_write(4096);
    submit_read(4096);
    submit_read(4096);
    struct ss_request *first = given(3), *second = given(4);
    nothing_given(); /* while reads are in flight, no lower priority starts */
    done(second, 0);
    nothing_given();
    done(first, 0);
    struct ss_request *write = given(2);
    nothing_given();
    submit_read(4096);
    struct ss_request *third = given(5); /* beside the write */
    done(write, 0);
    nothing_given();
    done(third, 0);
    done(given(1), 0);
    taken(4, 0);
    taken(3, 0);
    taken(2, 0);
    taken(5, 0);
    taken(1, 0);
    nothing_taken();
}

static void test_a_read_waits_for_few_bytes_of_writes(void) {
    for (int count = 0; count < 6; count++) {
        submit_write(MIB);
    }
    struct ss_request *first = given(1), *second = given(2);
    nothing_given(); /* 2 MiB are in flight */
    done(first, 0);
    first = given(3);
    submit_read(MIB);
    struct ss_request *read = given(7);
    done(first, 0);
    done(second, 0);
    nothing_given();
    done(read, 0);
    (void)given(4);
    (void)given(5);
}

static void test_small_writes_leave_requests_for_reads(void) {
    for (int count = 0; count < 8; count++) {
        submit_write(4096);
    }
    for (uint64_t tag = 1; tag <= 4; tag++) {
        (void)given(tag);
    }
    nothing_given();
    submit_read(4096);
    (void)given(9);
}

/* Reads without end: writes have a turn of 2 MiB every 20 ms, background one of 1 MiB every 500 ms. */
static void test_all_of_them_have_turns(void) {
    uint64_t read_count = 0, writes = 0, scrubs = 0;
    struct ss_request *held[8] = {NULL};
    struct ss_block_completion completions[64];

    for (int count = 0; count < 16; count++) {
        submit_write(MIB);
        submit_scrub(MIB);
    }
    for (uint64_t step = 0; step < 20 * 1000; step++) { /* 100 us each: 2 s */
        now_ns += 100000;
        (void)ss_schedule_take(&schedule, completions, 64);
        while (schedule.waiting[SS_BLOCK_PRIORITY_FOREGROUND].count < 8) {
            submit_read(MIB);
        }
        for (size_t slot = 0; slot < 8; slot++) {
            if (held[slot] == NULL) {
                held[slot] = ss_schedule_next(&schedule, now_ns);
            }
        }
        struct ss_request *ended = held[step % 8];
        held[step % 8] = NULL;
        if (ended != NULL) {
            enum ss_block_priority priority = ended->entry->operation.priority;
            read_count += priority == SS_BLOCK_PRIORITY_FOREGROUND;
            writes += priority == SS_BLOCK_PRIORITY_WRITE;
            scrubs += priority == SS_BLOCK_PRIORITY_BACKGROUND;
            ss_schedule_done(&schedule, ended, 0, now_ns);
            (void)ss_schedule_take(&schedule, completions, 64);
            if (priority == SS_BLOCK_PRIORITY_WRITE) {
                submit_write(MIB);
            } else if (priority == SS_BLOCK_PRIORITY_BACKGROUND) {
                submit_scrub(MIB);
            }
        }
    }
    CHECK(writes >= 150 && writes <= 2 * 2000 / 20 + 2, "%d writes in 2 s", (int)writes);
    CHECK(scrubs >= 3 && scrubs <= 4, "%d scrubs in 2 s", (int)scrubs);
    CHECK(read_count > 15000, "%d reads in 2 s", (int)read_count);
}

static void test_writes_without_end_leave_bandwidth_for_reads(void) {
    for (int count = 0; count < 30; count++) {
        submit_write(MIB);
        submit_read(MIB);
    }
    now_ns += 1000 * (uint64_t)MS; /* all of them wait for long */
    struct ss_request *write = given(1), *read = given(2);
    for (uint64_t step = 0; step < 28; step++) { /* 1 us each, so that no second turn is due */
        done(read, 0);
        read = given(4 + 2 * step);
        if (step == 10) { /* the rest of the turn */
            done(write, 0);
            write = given(3);
        }
    }
}

/* In strict order, a turn waits for the end of all reads in flight, and new reads wait for the end of the turn. */
static void test_in_strict_order_nothing_is_beside_another_priority(void) {
    schedule.is_strict = 1;
    submit_write(MIB);
    struct ss_request *write = given(1);
    submit_read(4096);
    nothing_given();
    done(write, 0);
    struct ss_request *read = given(2);
    submit_write(MIB); /* 3 and 4 */
    submit_write(MIB);
    submit_scrub(4096); /* 5 */
    nothing_given();
    now_ns += 20 * (uint64_t)MS; /* the writes' turn is due */
    submit_read(4096);           /* 6 */
    nothing_given();
    done(read, 0);
    struct ss_request *first = given(3), *second = given(4);
    nothing_given();
    done(first, 0);
    nothing_given();
    done(second, 0);
    read = given(6);
    nothing_given();
    done(read, 0);
    struct ss_request *scrub = given(5);
    submit_write(4096); /* 7 */
    nothing_given();
    done(scrub, 0);
    (void)given(7);
}

static void test_large_operations_go_in_requests_and_end_once(void) {
    submit_read(2 * MIB + 4096);
    struct ss_request *requests[3];
    uint64_t offset = 0;
    for (int part = 0; part < 3; part++) {
        requests[part] = given(1);
        CHECK(requests[part]->offset == offset && requests[part]->memory == memory + offset, "part %d", part);
        offset += requests[part]->length;
    }
    CHECK(offset == 2 * MIB + 4096, "%d bytes", (int)offset);
    nothing_given();
    done(requests[1], 0);
    done(requests[0], 0);
    nothing_taken();
    done(requests[2], 0);
    taken(1, 0);
    nothing_taken();
}

static void test_after_a_failure_nothing_more_of_an_operation_begins(void) {
    struct ss_block_statistics statistics;
    submit_read(8 * MIB);
    submit_read(4096);
    struct ss_request *first = given(1), *second = given(1);
    done(first, EIO);
    nothing_taken(); /* the other request may write to its memory yet */
    struct ss_request *next = given(2);
    done(second, ENODEV);
    taken(1, EIO); /* the first cause */
    done(next, ENODEV);
    taken(2, ENODEV);
    ss_schedule_statistics(&schedule, &statistics, now_ns);
    CHECK(statistics.errors[SS_BLOCK_READ] == 2 && statistics.last_error == ENODEV && statistics.gone, "statistics");
    CHECK(statistics.operations[SS_BLOCK_READ] == 0 && statistics.in_flight == 0, "statistics");
}

static void test_what_is_submitted_is_bounded(void) {
    for (int count = 0; count < 64; count++) {
        submit_read(4096);
    }
    CHECK(submit(SS_BLOCK_READ, SS_BLOCK_PRIORITY_FOREGROUND, 4096) == SS_NO_SPACE, "65");
    done(given(1), 0);
    CHECK(submit(SS_BLOCK_READ, SS_BLOCK_PRIORITY_FOREGROUND, 4096) == SS_NO_SPACE, "until it is taken back");
    taken(1, 0);
    submit_read(4096);
}

static void test_stopping_ends_what_has_not_begun(void) {
    submit_read(2 * MIB);
    submit_write(4096);
    submit_scrub(4096);
    struct ss_request *half = given(1);
    ss_schedule_stop(&schedule, now_ns);
    taken(2, ECANCELED);
    taken(3, ECANCELED);
    nothing_taken();
    nothing_given();
    done(half, 0);
    taken(1, ECANCELED);
    CHECK(submit(SS_BLOCK_READ, SS_BLOCK_PRIORITY_FOREGROUND, 4096) == SS_CANCELLED, "after the end");
}

static enum ss_result submit_checked(enum ss_block_priority priority) {
    struct ss_block_operation operation = {.kind = SS_BLOCK_READ,
                                           .priority = priority,
                                           .length = 4096,
                                           .memory = memory,
                                           .tag = ++next_tag,
                                           .is_checked = 1};
    return ss_schedule_submit(&schedule, &operation, 1, now_ns);
}

static void test_what_is_to_be_checked_ends_with_its_check(void) {
    struct ss_block_completion completion;
    CHECK(submit_checked(SS_BLOCK_PRIORITY_BACKGROUND) == SS_OK, "scrub");
    done(given(1), 0);
    CHECK(submit_checked(SS_BLOCK_PRIORITY_FOREGROUND) == SS_OK, "read");
    CHECK(submit_checked(SS_BLOCK_PRIORITY_FOREGROUND) == SS_OK, "read");
    struct ss_request *second = given(2), *third = given(3);
    done(second, 0);
    done(third, EIO);
    taken(3, EIO); /* there is nothing to check */
    nothing_taken();
    CHECK(ss_schedule_has_unchecked(&schedule), "two are left");
    struct ss_entry *first = ss_schedule_unchecked(&schedule);
    CHECK(first != NULL && first->operation.tag == 2, "what a client waits for comes first");
    struct ss_entry *scrub = ss_schedule_unchecked(&schedule);
    CHECK(scrub != NULL && scrub->operation.tag == 1, "then others");
    CHECK(ss_schedule_unchecked(&schedule) == NULL && !ss_schedule_has_unchecked(&schedule), "no more");
    nothing_taken();
    ss_schedule_checked(&schedule, scrub, SS_CHECKSUM);
    CHECK(ss_schedule_take(&schedule, &completion, 1) == 1 && completion.tag == 1 && completion.error == 0 &&
              completion.verdict == SS_CHECKSUM,
          "its verdict");
    ss_schedule_checked(&schedule, first, SS_OK);
    CHECK(ss_schedule_take(&schedule, &completion, 1) == 1 && completion.verdict == SS_OK, "its verdict");
}

static void test_times_are_counted(void) {
    struct ss_block_statistics statistics;
    submit_read(4096);
    now_ns += 5 * MS;
    struct ss_request *request = given(1);
    uint64_t begun = now_ns;
    now_ns += 7 * MS;
    ss_schedule_statistics(&schedule, &statistics, now_ns);
    CHECK(statistics.busy_ns == 7 * MS && statistics.oldest_ns == begun && statistics.in_flight == 1, "in flight");
    ss_schedule_done(&schedule, request, 0, now_ns);
    now_ns += 9 * MS;
    ss_schedule_statistics(&schedule, &statistics, now_ns);
    CHECK(statistics.busy_ns == 7 * MS && statistics.oldest_ns == 0, "idle");
    CHECK(statistics.wait_ns[0] == 5 * MS && statistics.service_ns[0] == 7 * MS, "waited and served");
    CHECK(statistics.operations[SS_BLOCK_READ] == 1 && statistics.bytes[SS_BLOCK_READ] == 4096, "counted");
}

int main(void) {
    static const struct {
        void (*test)(void);
        uint32_t depth;
    } tests[] = {
        {test_reads_go_before_writes_and_these_before_background, 8},
        {test_a_read_waits_for_few_bytes_of_writes, 8},
        {test_small_writes_leave_requests_for_reads, 8},
        {test_all_of_them_have_turns, 8},
        {test_writes_without_end_leave_bandwidth_for_reads, 2},
        {test_in_strict_order_nothing_is_beside_another_priority, 8},
        {test_large_operations_go_in_requests_and_end_once, 8},
        {test_after_a_failure_nothing_more_of_an_operation_begins, 2},
        {test_what_is_submitted_is_bounded, 1},
        {test_stopping_ends_what_has_not_begun, 1},
        {test_what_is_to_be_checked_ends_with_its_check, 8},
        {test_times_are_counted, 4},
    };
    for (size_t index = 0; index < COUNT_OF(tests); index++) {
        start(tests[index].depth);
        tests[index].test();
        ss_schedule_free(&schedule);
    }
    return 0;
}
