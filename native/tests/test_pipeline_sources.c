/* SPDX-License-Identifier: Apache-2.0 */
/* test_pipeline_sources.c - batches of chunks that lie in memory, alone and among those of a server */
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "pipeline_support.h"

enum { CHUNKS = 5 };

/* Bodies of chunks, each of its own and not a byte longer: what reads past one is seen. */
struct bodies {
    uint8_t *bytes[CHUNKS];
};

/* Gives the batch's chunks whose bit is set their bodies in memory; they are known by no key. */
static struct bodies bodies_give(const struct fixture *fixture, struct ss_batch *batch, unsigned mask) {
    struct bodies bodies = {{NULL}};
    CHECK_EQUAL(batch->piece_count, CHUNKS);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        struct ss_piece *chunk = &batch->pieces[i];
        if (mask >> i & 1) {
            bodies.bytes[i] = malloc(chunk->body_length);
            CHECK(bodies.bytes[i] != NULL);
            memcpy(bodies.bytes[i], fixture->records[i] + RECORD_OFFSET, chunk->body_length);
            chunk->origin = SS_ORIGIN_MEMORY;
            chunk->memory = bodies.bytes[i];
            chunk->key_length = 0;
            chunk->node = UINT32_MAX;
        }
    }
    return bodies;
}

static void bodies_free(struct bodies *bodies) {
    for (uint32_t i = 0; i < CHUNKS; i++) {
        free(bodies->bytes[i]);
    }
}

static uint64_t bytes_of(const struct fixture *fixture, unsigned mask) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < CHUNKS; i++) {
        bytes += mask >> i & 1 ? fixture->chunks[i].body_length : 0;
    }
    return bytes;
}

static struct ss_pipeline *pipeline_make(const struct ss_pipeline_options *options) {
    struct ss_pipeline *pipeline;
    CHECK_EQUAL(ss_pipeline_create(options, &pipeline), SS_OK);
    return pipeline;
}

static void check_all(const struct fixture *fixture, const struct ss_batch *batch) {
    for (uint32_t i = 0; i < CHUNKS; i++) {
        CHECK_EQUAL(batch->pieces[i].result, SS_OK);
        CHECK(fixture_matches(fixture, batch, i));
    }
    CHECK_EQUAL(batch->delivered_bytes, fixture->size);
    CHECK_EQUAL(batch->sockets_in_sync, 1);
}

/* Each mixture, over one to three connections, on connections that have been used, too. */
static void test_any_mixture_is_delivered(int fused) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    struct server *server = server_start();
    fixture_serve(fixture, server);
    struct ss_pipeline_options options = pipeline_options(fixture, fused);
    options.queue_depth = 2; /* fewer than a chunk's slices: slices that are ready at once must wait for the decoder */
    struct ss_pipeline *pipeline = pipeline_make(&options);
    int32_t sockets[3];
    for (uint32_t i = 0; i < 3; i++) {
        sockets[i] = server_connect(server);
    }
    for (unsigned mask = 0; mask < 1U << CHUNKS; mask++) {
        struct ss_batch *batch = fixture_round(fixture);
        struct bodies bodies = bodies_give(fixture, batch, mask);
        CHECK_EQUAL(pipeline_fetch(pipeline, batch, sockets, 1 + mask % 3), SS_OK);
        check_all(fixture, batch);
        uint64_t asked = fixture->stored_bytes - bytes_of(fixture, mask);
        CHECK(batch->received_bytes >= asked && batch->received_bytes <= asked + 64ULL * 3 * CHUNKS);
        CHECK((batch->received_bytes == 0) == (asked == 0));
        bodies_free(&bodies);
        batch_free(batch);
    }
    for (uint32_t i = 0; i < 3; i++) {
        close(sockets[i]);
    }
    ss_pipeline_destroy(pipeline);
    server_stop(server);
    fixture_free(fixture);
}

static void test_memory_alone_needs_no_sockets(int fused) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    struct ss_pipeline_options options = pipeline_options(fixture, fused);
    struct ss_pipeline *pipeline = pipeline_make(&options);
    struct ss_batch *batch = fixture_round(fixture);
    struct bodies bodies = bodies_give(fixture, batch, 0x1f);
    for (int repeat = 0; repeat < 2; repeat++) {
        memset(batch->groups->memory, 0xAA, batch->groups->memory_size);
        CHECK_EQUAL(pipeline_fetch(pipeline, batch, NULL, 0), SS_OK);
        check_all(fixture, batch);
        CHECK_EQUAL(batch->received_bytes, 0);
    }
    batch->pieces[3].memory = NULL; /* that one is nowhere */
    CHECK_EQUAL(pipeline_fetch(pipeline, batch, NULL, 0), SS_BAD_ARGUMENT);
    bodies_free(&bodies);
    batch_free(batch);
    ss_pipeline_destroy(pipeline);
    fixture_free(fixture);
}

/* The decoder reads where the bodies lie, so there need be no room for a copy; an engine that cannot has none. */
static void test_nothing_is_copied_where_the_decoder_reads_anywhere(int fused) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    struct ss_pipeline_options options = pipeline_options(fixture, fused);
    options.decompression_bytes = 1;
    int anywhere = strcmp(options.backend, "software") == 0;
    struct ss_pipeline *pipeline = pipeline_make(&options);
    struct ss_batch *batch = fixture_round(fixture);
    struct bodies bodies = bodies_give(fixture, batch, 0x1f);
    for (uint32_t i = 0; i < CHUNKS && anywhere; i++) {
        batch->pieces[i].decompression_offset = 0; /* unused: they may be equal */
    }
    CHECK_EQUAL(pipeline_fetch(pipeline, batch, NULL, 0), anywhere ? SS_OK : SS_BAD_ARGUMENT);
    for (uint32_t i = 0; i < CHUNKS && anywhere; i++) {
        CHECK(fixture_matches(fixture, batch, i));
    }
    bodies_free(&bodies);
    batch_free(batch);
    ss_pipeline_destroy(pipeline);
    fixture_free(fixture);
}

/* A failure in one source skips later chunks of all sources, but no earlier ones. */
static void test_the_first_failure_decides_whosever_it_is(int fused) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    struct server *server = server_start();
    struct ss_pipeline_options options = pipeline_options(fixture, fused);
    struct ss_pipeline *pipeline = pipeline_make(&options);
    for (uint32_t failing = 0; failing < CHUNKS; failing++) {
        fixture_serve(fixture, server);
        server_fault(server, fixture->chunks[failing].key, fixture->chunks[failing].key_length, FAULT_MISSING);
        int32_t socket = server_connect(server);
        for (int in_memory = 0; in_memory < 2; in_memory++) {
            struct ss_batch *batch = fixture_round(fixture);
            unsigned others = 0x15 & ~(1U << failing);
            struct bodies bodies = bodies_give(fixture, batch, in_memory ? others | 1U << failing : others);
            enum ss_result expected = SS_NOT_FOUND;
            if (in_memory) {
                bodies.bytes[failing][fixture->slices[0].encoded_length / 2] ^= 4;
                expected = SS_CHECKSUM;
            }
            CHECK_EQUAL(pipeline_fetch(pipeline, batch, &socket, 1), expected);
            for (uint32_t i = 0; i < failing; i++) {
                CHECK_EQUAL(batch->pieces[i].result, SS_OK);
                CHECK(fixture_matches(fixture, batch, i));
            }
            CHECK_EQUAL(batch->pieces[failing].result, expected);
            CHECK_EQUAL(batch->sockets_in_sync, 1);
            bodies_free(&bodies);
            batch_free(batch);
        }
        close(socket);
    }
    ss_pipeline_destroy(pipeline);
    server_stop(server);
    fixture_free(fixture);
}

struct cancelling {
    struct server *server;
    struct ss_batch *batch;
};

static void *cancel_when_stalled(void *argument) {
    struct cancelling *cancelling = argument;
    server_wait_stalled(cancelling->server);
    ss_batch_cancel(cancelling->batch);
    return NULL;
}

/* After a batch has returned, with any result, nothing reads the memory: it is freed at once. */
static void test_an_end_before_all_is_there_leaves_the_memory_alone(int fused) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    struct server *server = server_start();
    fixture_serve(fixture, server);
    server_fault(server, fixture->chunks[2].key, fixture->chunks[2].key_length, FAULT_STALL);
    struct ss_pipeline_options options = pipeline_options(fixture, fused);
    struct ss_pipeline *pipeline = pipeline_make(&options);
    for (int late = 0; late < 2; late++) {
        int32_t socket = server_connect(server);
        struct ss_batch *batch = fixture_round(fixture);
        struct bodies bodies = bodies_give(fixture, batch, 0x1b);
        struct cancelling cancelling = {server, batch};
        pthread_t thread;
        batch->deadline_ns = late ? after_ms(20) : after_patience();
        CHECK(late || pthread_create(&thread, NULL, cancel_when_stalled, &cancelling) == 0);
        enum ss_result result = pipeline_fetch(pipeline, batch, &socket, 1);
        CHECK_EQUAL(result, late ? SS_DEADLINE : SS_CANCELLED);
        bodies_free(&bodies);
        CHECK(late || pthread_join(thread, NULL) == 0);
        batch_free(batch);
        close(socket);
    }
    ss_pipeline_destroy(pipeline);
    server_stop(server);
    fixture_free(fixture);
}

struct supplying {
    struct ss_batch *batch;
    struct bodies *bodies;
    uint32_t missing; /* CHUNKS: none */
};

/* The last first. */
static void *supply_backwards(void *argument) {
    struct supplying *supplying = argument;
    for (uint32_t i = CHUNKS; i-- > 0;) {
        if (supplying->bodies->bytes[i] != NULL) {
            ss_batch_supply(supplying->batch, i, i == supplying->missing ? NULL : supplying->bodies->bytes[i]);
        }
    }
    return NULL;
}

/* As bodies_give(), but they come later. */
static struct bodies bodies_promise(const struct fixture *fixture, struct ss_batch *batch, unsigned mask) {
    struct bodies bodies = bodies_give(fixture, batch, mask);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        batch->pieces[i].memory = NULL;
        batch->pieces[i].origin = mask >> i & 1 ? SS_ORIGIN_AWAITED : SS_ORIGIN_SERVER;
    }
    return bodies;
}

/* Alone and beside a server's, all of them or not that which is missing, before the batch runs and while it does. */
static void test_what_is_awaited_comes_in_any_order(int fused) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    struct server *server = server_start();
    fixture_serve(fixture, server);
    struct ss_pipeline_options options = pipeline_options(fixture, fused);
    struct ss_pipeline *pipeline = pipeline_make(&options);
    int32_t sockets[] = {server_connect(server), server_connect(server)};
    for (uint32_t i = 0; i < 24; i++) {
        unsigned mask = i % 2 ? 0x1f : 0x16;
        struct ss_batch *batch = fixture_round(fixture);
        struct bodies bodies = bodies_promise(fixture, batch, mask);
        struct supplying supplying = {batch, &bodies, i % 3 == 0 ? 2 : CHUNKS};
        pthread_t thread;
        CHECK_EQUAL(pthread_create(&thread, NULL, supply_backwards, &supplying), 0);
        CHECK(i % 4 || pthread_join(thread, NULL) == 0);
        enum ss_result expected = supplying.missing == CHUNKS ? SS_OK : SS_NOT_FOUND;
        CHECK_EQUAL(pipeline_fetch(pipeline, batch, sockets, 2), expected);
        CHECK(i % 4 == 0 || pthread_join(thread, NULL) == 0);
        for (uint32_t j = 0; j < supplying.missing; j++) {
            CHECK_EQUAL(batch->pieces[j].result, SS_OK);
            CHECK(fixture_matches(fixture, batch, j));
        }
        CHECK(supplying.missing == CHUNKS || batch->pieces[2].result == SS_NOT_FOUND);
        CHECK_EQUAL(batch->sockets_in_sync, 1);
        bodies_free(&bodies);
        batch_free(batch);
    }
    close(sockets[0]);
    close(sockets[1]);
    ss_pipeline_destroy(pipeline);
    server_stop(server);
    fixture_free(fixture);
}

/* A body that is never supplied delays a batch until its deadline, unless the piece is useless. */
static void test_what_never_comes_ends_with_the_deadline(int fused) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    struct server *server = server_start();
    fixture_serve(fixture, server);
    struct ss_pipeline_options options = pipeline_options(fixture, fused);
    struct ss_pipeline *pipeline = pipeline_make(&options);
    for (int useless = 0; useless < 2; useless++) {
        int32_t socket = server_connect(server);
        struct ss_batch *batch = fixture_round(fixture);
        struct bodies bodies = bodies_promise(fixture, batch, 0x08);
        if (useless) {
            server_fault(server, fixture->chunks[1].key, fixture->chunks[1].key_length, FAULT_MISSING);
        }
        batch->deadline_ns = useless ? after_patience() : after_ms(20);
        CHECK_EQUAL(pipeline_fetch(pipeline, batch, &socket, 1), useless ? SS_NOT_FOUND : SS_DEADLINE);
        CHECK(batch->pieces[3].result != SS_OK);
        bodies_free(&bodies);
        batch_free(batch);
        close(socket);
    }
    ss_pipeline_destroy(pipeline);
    server_stop(server);
    fixture_free(fixture);
}

/* The body of what a server sends is where it was wanted, and what is delivered is the same. */
static void test_what_a_server_sends_is_left_in_memory(int fused) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    struct server *server = server_start();
    fixture_serve(fixture, server);
    struct ss_pipeline_options options = pipeline_options(fixture, fused);
    struct ss_pipeline *pipeline = pipeline_make(&options);
    int32_t sockets[] = {server_connect(server), server_connect(server)};
    struct ss_batch *batch = fixture_round(fixture);
    struct bodies bodies = bodies_give(fixture, batch, 0x0b);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        batch->pieces[i].origin = SS_ORIGIN_SERVER;
        memcpy(batch->pieces[i].key, fixture->chunks[i].key, sizeof fixture->chunks[i].key);
        batch->pieces[i].key_length = fixture->chunks[i].key_length;
        batch->pieces[i].node = 0;
        if (bodies.bytes[i] != NULL) {
            memset(bodies.bytes[i], 0, batch->pieces[i].body_length);
        }
    }
    CHECK_EQUAL(pipeline_fetch(pipeline, batch, sockets, 2), SS_OK);
    check_all(fixture, batch);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        CHECK(bodies.bytes[i] == NULL ||
              memcmp(bodies.bytes[i], fixture->records[i] + RECORD_OFFSET, batch->pieces[i].body_length) == 0);
    }
    bodies_free(&bodies);
    batch_free(batch);
    close(sockets[0]);
    close(sockets[1]);
    ss_pipeline_destroy(pipeline);
    server_stop(server);
    fixture_free(fixture);
}

/* Delivery takes the time of the bytes at the rate, for every source, and the elements are the same. */
static void test_a_rate_holds_every_source_back(int fused) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    struct server *server = server_start();
    fixture_serve(fixture, server);
    struct ss_pipeline_options options = pipeline_options(fixture, fused);
    struct ss_pipeline *pipeline = pipeline_make(&options);
    for (unsigned mask = 0; mask < 0x20; mask += 0x1f) {
        int32_t sockets[] = {server_connect(server), server_connect(server)};
        struct ss_batch *batch = fixture_round(fixture);
        struct bodies bodies = bodies_give(fixture, batch, mask);
        batch->rate = 25 * fixture->size; /* so 40 ms, but for the last slice */
        uint64_t begin_ns = after_ms(0);
        CHECK_EQUAL(pipeline_fetch(pipeline, batch, sockets, 2), SS_OK);
        CHECK(after_ms(0) - begin_ns >= 20000000);
        check_all(fixture, batch);
        bodies_free(&bodies);
        batch_free(batch);
        close(sockets[0]);
        close(sockets[1]);
    }
    ss_pipeline_destroy(pipeline);
    server_stop(server);
    fixture_free(fixture);
}

/* At a byte a second its first slice alone would take hours. */
static void test_a_batch_that_is_held_back_ends_with_its_deadline(int fused) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    struct ss_pipeline_options options = pipeline_options(fixture, fused);
    struct ss_pipeline *pipeline = pipeline_make(&options);
    struct ss_batch *batch = fixture_round(fixture);
    struct bodies bodies = bodies_give(fixture, batch, 0x1f);
    batch->rate = 1;
    batch->deadline_ns = after_ms(20);
    CHECK_EQUAL(pipeline_fetch(pipeline, batch, NULL, 0), SS_DEADLINE);
    CHECK(batch->pieces[CHUNKS - 1].result != SS_OK);
    bodies_free(&bodies);
    batch_free(batch);
    ss_pipeline_destroy(pipeline);
    fixture_free(fixture);
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
        test_a_batch_that_is_held_back_ends_with_its_deadline(fused);
    }
    return 0;
}
