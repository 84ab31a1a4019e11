/* SPDX-License-Identifier: Apache-2.0 */
/* test_pipeline_sources.c - batches of chunks that lie in memory, alone and among those of a server */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#include "pipeline_support.h"

enum { CHUNKS = 5 };

/* Begins a batch whose chunks with a bit in 'mask' have their bodies in memory; they are known by no key. */
static struct ss_batch *bodies_begin(struct bench *bench, unsigned mask) {
    struct ss_batch *batch = bench_begin(bench);
    CHECK_EQUAL(batch->piece_count, CHUNKS);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        if (mask >> i & 1) {
            bench_body(bench, i);
            batch->pieces[i].key_length = 0;
            batch->pieces[i].node = UINT32_MAX;
        }
    }
    return batch;
}

/* As bodies_begin(), but they come later. */
static struct ss_batch *bodies_promise(struct bench *bench, unsigned mask) {
    struct ss_batch *batch = bodies_begin(bench, mask);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        batch->pieces[i].memory = NULL;
        batch->pieces[i].origin = mask >> i & 1 ? SS_ORIGIN_AWAITED : SS_ORIGIN_SERVER;
    }
    return batch;
}

static uint64_t bytes_of(const struct fixture *fixture, unsigned mask) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < CHUNKS; i++) {
        bytes += mask >> i & 1 ? fixture->chunks[i].body_length : 0;
    }
    return bytes;
}

/*
 * Each mixture, over one to three connections, on connections that have been used, too. The queue is shorter than a
 * chunk's slices: slices that are ready at once must wait for the decoder.
 */
PIPELINE_TEST(test_any_mixture_is_delivered, AS_BEFORE, options->queue_depth = 2) {
    for (unsigned mask = 0; mask < 1U << CHUNKS; mask++) {
        const struct ss_batch *batch = bodies_begin(bench, mask);
        CHECK_EQUAL(bench_fetch_over(bench, 1 + mask % 3), SS_OK);
        check_delivered(bench);
        uint64_t asked = bench->fixture->stored_bytes - bytes_of(bench->fixture, mask);
        CHECK(batch->received_bytes >= asked && batch->received_bytes <= asked + 64ULL * 3 * CHUNKS);
        CHECK((batch->received_bytes == 0) == (asked == 0));
    }
}

PIPELINE_TEST(test_memory_alone_needs_no_sockets, AS_BEFORE, AS_BEFORE) {
    struct ss_batch *batch = bodies_begin(bench, 0x1f);
    for (int repeat = 0; repeat < 2; repeat++) {
        memset(batch->groups->memory, 0xAA, batch->groups->memory_size);
        CHECK_EQUAL(bench_fetch_over(bench, 0), SS_OK);
        check_delivered(bench);
        CHECK_EQUAL(batch->received_bytes, 0);
    }
    batch->pieces[3].memory = NULL; /* that one is nowhere */
    CHECK_EQUAL(bench_fetch_over(bench, 0), SS_BAD_ARGUMENT);
}

/* The decoder reads where the bodies lie, so there need be no room for a copy; an engine that cannot has none. */
PIPELINE_TEST(test_nothing_is_copied_where_the_decoder_reads_anywhere, AS_BEFORE, options->decompression_bytes = 1) {
    int anywhere = strcmp(bench->options.backend, "software") == 0;
    struct ss_batch *batch = bodies_begin(bench, 0x1f);
    for (uint32_t i = 0; i < CHUNKS && anywhere; i++) {
        batch->pieces[i].decompression_offset = 0; /* unused: they may be equal */
    }
    CHECK_EQUAL(bench_fetch_over(bench, 0), anywhere ? SS_OK : SS_BAD_ARGUMENT);
}

/* A failure in one source skips later chunks of all sources, but no earlier ones. */
PIPELINE_TEST(test_the_first_failure_decides_whosever_it_is, AS_BEFORE, AS_BEFORE) {
    for (uint32_t failing = 0; failing < CHUNKS; failing++) {
        bench_serve(bench);
        bench_fault(bench, failing, FAULT_MISSING);
        for (int in_memory = 0; in_memory < 2; in_memory++) {
            unsigned others = 0x15 & ~(1U << failing);
            const struct ss_batch *batch = bodies_begin(bench, in_memory ? others | 1U << failing : others);
            enum ss_result expected = SS_NOT_FOUND;
            if (in_memory) {
                bench->bodies[failing][bench->fixture->slices[0].encoded_length / 2] ^= 4;
                expected = SS_CHECKSUM;
            }
            CHECK_EQUAL(bench_fetch_over(bench, 1), expected);
            for (uint32_t i = 0; i < failing; i++) {
                CHECK_EQUAL(batch->pieces[i].result, SS_OK);
            }
            CHECK_EQUAL(batch->pieces[failing].result, expected);
            CHECK_EQUAL(batch->sockets_in_sync, 1);
        }
    }
}

/* After a batch has returned, with any result, nothing reads the memory: it is freed at once. */
PIPELINE_TEST(test_an_end_before_all_is_there_leaves_the_memory_alone, AS_BEFORE, AS_BEFORE) {
    for (int late = 0; late < 2; late++) {
        pthread_t thread;
        bench_fault(bench, 2, FAULT_STALL);
        bodies_begin(bench, 0x1b)->deadline_ns = late ? after_ms(20) : after_patience();
        if (!late) {
            bench_cancel_stalled(bench, &thread);
        }
        CHECK_EQUAL(bench_fetch_over(bench, 1), late ? SS_DEADLINE : SS_CANCELLED);
        bench_free_bodies(bench);
        CHECK(late || pthread_join(thread, NULL) == 0);
        bench_reconnect(bench);
    }
}

struct supplying {
    struct bench *bench;
    uint32_t missing; /* CHUNKS: none */
};

/* The last first. */
static void *supply_backwards(void *argument) {
    struct supplying *supplying = argument;
    for (uint32_t i = CHUNKS; i-- > 0;) {
        uint8_t *body = supplying->bench->bodies[i];
        if (body != NULL) {
            ss_batch_supply(supplying->bench->batch, i, i == supplying->missing ? NULL : body);
        }
    }
    return NULL;
}

/* Alone and beside a server's, all of them or not that which is missing, before the batch runs and while it does. */
PIPELINE_TEST(test_what_is_awaited_comes_in_any_order, AS_BEFORE, AS_BEFORE) {
    for (uint32_t i = 0; i < 24; i++) {
        struct supplying supplying = {bench, i % 3 == 0 ? 2 : CHUNKS};
        pthread_t thread;
        bodies_promise(bench, i % 2 ? 0x1f : 0x16);
        CHECK_EQUAL(pthread_create(&thread, NULL, supply_backwards, &supplying), 0);
        CHECK(i % 4 || pthread_join(thread, NULL) == 0);
        CHECK_EQUAL(bench_fetch(bench), supplying.missing == CHUNKS ? SS_OK : SS_NOT_FOUND);
        CHECK(i % 4 == 0 || pthread_join(thread, NULL) == 0);
        for (uint32_t j = 0; j < supplying.missing; j++) {
            CHECK_EQUAL(bench->batch->pieces[j].result, SS_OK);
        }
        CHECK(supplying.missing == CHUNKS || bench->batch->pieces[2].result == SS_NOT_FOUND);
        CHECK_EQUAL(bench->batch->sockets_in_sync, 1);
    }
}

/* A body that is never supplied delays a batch until its deadline, unless the piece is useless. */
PIPELINE_TEST(test_what_never_comes_ends_with_the_deadline, AS_BEFORE, AS_BEFORE) {
    for (int useless = 0; useless < 2; useless++) {
        struct ss_batch *batch = bodies_promise(bench, 0x08);
        if (useless) {
            bench_fault(bench, 1, FAULT_MISSING);
        }
        batch->deadline_ns = useless ? after_patience() : after_ms(20);
        CHECK_EQUAL(bench_fetch_over(bench, 1), useless ? SS_NOT_FOUND : SS_DEADLINE);
        CHECK(batch->pieces[3].result != SS_OK);
        bench_reconnect(bench);
    }
}

/* The body of what a server sends is where it was wanted, and what is delivered is the same. */
PIPELINE_TEST(test_what_a_server_sends_is_left_in_memory, AS_BEFORE, AS_BEFORE) {
    struct ss_batch *batch = bodies_begin(bench, 0x0b);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        const struct ss_piece *known = &bench->fixture->chunks[i];
        batch->pieces[i].origin = SS_ORIGIN_SERVER;
        memcpy(batch->pieces[i].key, known->key, sizeof known->key);
        batch->pieces[i].key_length = known->key_length;
        batch->pieces[i].node = 0;
        if (bench->bodies[i] != NULL) {
            memset(bench->bodies[i], 0, known->body_length);
        }
    }
    CHECK_EQUAL(bench_fetch(bench), SS_OK);
    check_delivered(bench);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        CHECK(bench->bodies[i] == NULL ||
              memcmp(bench->bodies[i], bench->fixture->records[i] + RECORD_OFFSET, batch->pieces[i].body_length) == 0);
    }
}

/* Delivery takes the time of the bytes at the rate, for every source, and the elements are the same. */
PIPELINE_TEST(test_a_rate_holds_every_source_back, AS_BEFORE, AS_BEFORE) {
    for (unsigned mask = 0; mask < 0x20; mask += 0x1f) {
        bodies_begin(bench, mask)->rate = 25 * bench->fixture->size; /* so 40 ms, but for the last slice */
        uint64_t begin_ns = ss_now_ns();
        CHECK_EQUAL(bench_fetch(bench), SS_OK);
        CHECK(ss_now_ns() - begin_ns >= 20000000);
        check_delivered(bench);
    }
}

struct unlimiting {
    struct ss_pipeline *pipeline;
    atomic_int over;
};

static void *unlimit(void *argument) {
    struct unlimiting *unlimiting = argument;
    while (!atomic_load(&unlimiting->over)) {
        ss_pipeline_unlimit(unlimiting->pipeline);
        sched_yield();
    }
    return NULL;
}

/* At a byte a second its first slice alone would take hours. */
PIPELINE_TEST(test_a_batch_that_is_held_back_goes_on_without_its_rate, AS_BEFORE, AS_BEFORE) {
    struct unlimiting unlimiting = {.pipeline = bench->pipeline};
    pthread_t thread;
    bodies_begin(bench, 0x1f)->rate = 1;
    CHECK_EQUAL(pthread_create(&thread, NULL, unlimit, &unlimiting), 0);
    CHECK_EQUAL(bench_fetch(bench), SS_OK);
    atomic_store(&unlimiting.over, 1);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    check_delivered(bench);
}

PIPELINE_TEST(test_a_batch_that_is_held_back_ends_with_its_deadline, AS_BEFORE, AS_BEFORE) {
    struct ss_batch *batch = bodies_begin(bench, 0x1f);
    batch->rate = 1;
    batch->deadline_ns = after_ms(20);
    CHECK_EQUAL(bench_fetch_over(bench, 0), SS_DEADLINE);
    CHECK(batch->pieces[CHUNKS - 1].result != SS_OK);
}

int main(void) {
    for (int fused = 0; fused <= backend_fuses(); fused++) {
        test_any_mixture_is_delivered(fused);
        test_memory_alone_needs_no_sockets(fused);
        test_nothing_is_copied_where_the_decoder_reads_anywhere(fused);
        test_the_first_failure_decides_whosever_it_is(fused);
        test_an_end_before_all_is_there_leaves_the_memory_alone(fused);
        test_what_is_awaited_comes_in_any_order(fused);
        test_what_never_comes_ends_with_the_deadline(fused);
        test_what_a_server_sends_is_left_in_memory(fused);
        test_a_rate_holds_every_source_back(fused);
        test_a_batch_that_is_held_back_goes_on_without_its_rate(fused);
        test_a_batch_that_is_held_back_ends_with_its_deadline(fused);
    }
    return 0;
}
