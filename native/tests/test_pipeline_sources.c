/* SPDX-License-Identifier: Apache-2.0 */
/* test_pipeline_sources.c - rounds of chunks that lie in memory, alone and among those of a server */
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "pipeline_support.h"

enum { CHUNKS = 5 };

/* Bodies of chunks, each of its own and not a byte longer: what reads past one is seen. */
struct bodies {
    uint8_t *bytes[CHUNKS];
};

/* Gives the round's chunks whose bit is set their bodies in memory; they are known by no key. */
static struct bodies bodies_give(const struct fixture *fixture, struct ss_round *round, unsigned mask) {
    struct bodies bodies = {{NULL}};
    CHECK_EQUAL(round->piece_count, CHUNKS);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        struct ss_piece *chunk = &round->pieces[i];
        if (mask >> i & 1) {
            bodies.bytes[i] = malloc(chunk->body_length);
            CHECK(bodies.bytes[i] != NULL);
            memcpy(bodies.bytes[i], fixture->records[i] + RECORD_OFFSET, chunk->body_length);
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

static void check_all(const struct fixture *fixture, const struct ss_round *round) {
    for (uint32_t i = 0; i < CHUNKS; i++) {
        CHECK_EQUAL(round->pieces[i].result, SS_OK);
        CHECK(fixture_matches(fixture, round, i));
    }
    CHECK_EQUAL(round->delivered_bytes, fixture->size);
    CHECK_EQUAL(round->sockets_in_sync, 1);
}

/* Each mixture, over one to three connections, on connections that have been used, too. */
static void test_any_mixture_is_delivered(int mode) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    struct server *server = server_start();
    fixture_serve(fixture, server);
    struct ss_pipeline_options options = pipeline_options(fixture, mode);
    options.queue_depth = 2; /* fewer than a chunk's slices: what is there at once has to wait for the decoder */
    struct ss_pipeline *pipeline = pipeline_make(&options);
    int32_t sockets[3];
    for (uint32_t i = 0; i < 3; i++) {
        sockets[i] = server_connect(server);
    }
    for (unsigned mask = 0; mask < 1U << CHUNKS; mask++) {
        struct ss_round *round = fixture_round(fixture);
        struct bodies bodies = bodies_give(fixture, round, mask);
        CHECK_EQUAL(pipeline_fetch(pipeline, round, sockets, 1 + mask % 3), SS_OK);
        check_all(fixture, round);
        uint64_t asked = fixture->stored_bytes - bytes_of(fixture, mask);
        CHECK(round->received_bytes >= asked && round->received_bytes <= asked + 64ULL * 3 * CHUNKS);
        CHECK((round->received_bytes == 0) == (asked == 0));
        bodies_free(&bodies);
        round_free(round);
    }
    for (uint32_t i = 0; i < 3; i++) {
        close(sockets[i]);
    }
    ss_pipeline_destroy(pipeline);
    server_stop(server);
    fixture_free(fixture);
}

static void test_memory_alone_needs_no_sockets(int mode) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    struct ss_pipeline_options options = pipeline_options(fixture, mode);
    struct ss_pipeline *pipeline = pipeline_make(&options);
    struct ss_round *round = fixture_round(fixture);
    struct bodies bodies = bodies_give(fixture, round, 0x1f);
    for (int repeat = 0; repeat < 2; repeat++) {
        memset(round->groups->destination, 0xAA, round->groups->destination_size);
        CHECK_EQUAL(pipeline_fetch(pipeline, round, NULL, 0), SS_OK);
        check_all(fixture, round);
        CHECK_EQUAL(round->received_bytes, 0);
    }
    round->pieces[3].memory = NULL; /* that one is nowhere */
    CHECK_EQUAL(pipeline_fetch(pipeline, round, NULL, 0), SS_BAD_ARGUMENT);
    bodies_free(&bodies);
    round_free(round);
    ss_pipeline_destroy(pipeline);
    fixture_free(fixture);
}

/* The decoder reads where the bodies lie, so there need be no room for a copy; an engine that cannot has none. */
static void test_nothing_is_copied_where_the_decoder_reads_anywhere(int mode) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    struct ss_pipeline_options options = pipeline_options(fixture, mode);
    options.decompression_bytes = 1;
    int anywhere = strcmp(options.backend, "software") == 0 && options.memory_management;
    struct ss_pipeline *pipeline = pipeline_make(&options);
    struct ss_round *round = fixture_round(fixture);
    struct bodies bodies = bodies_give(fixture, round, 0x1f);
    for (uint32_t i = 0; i < CHUNKS && anywhere; i++) {
        round->pieces[i].decompression_offset = 0; /* nobody's: they may be alike */
    }
    CHECK_EQUAL(pipeline_fetch(pipeline, round, NULL, 0), anywhere ? SS_OK : SS_BAD_ARGUMENT);
    for (uint32_t i = 0; i < CHUNKS && anywhere; i++) {
        CHECK(fixture_matches(fixture, round, i));
    }
    bodies_free(&bodies);
    round_free(round);
    ss_pipeline_destroy(pipeline);
    fixture_free(fixture);
}

/* What fails in one source costs what is behind it in all, and nothing before it. */
static void test_the_first_failure_decides_whosever_it_is(int mode) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    struct server *server = server_start();
    struct ss_pipeline_options options = pipeline_options(fixture, mode);
    struct ss_pipeline *pipeline = pipeline_make(&options);
    for (uint32_t failing = 0; failing < CHUNKS; failing++) {
        fixture_serve(fixture, server);
        server_fault(server, fixture->chunks[failing].key, fixture->chunks[failing].key_length, FAULT_MISSING);
        int32_t socket = server_connect(server);
        for (int in_memory = 0; in_memory < 2; in_memory++) {
            struct ss_round *round = fixture_round(fixture);
            unsigned others = 0x15 & ~(1U << failing);
            struct bodies bodies = bodies_give(fixture, round, in_memory ? others | 1U << failing : others);
            enum ss_result expected = SS_NOT_FOUND;
            if (in_memory) {
                bodies.bytes[failing][fixture->slices[0].encoded_length / 2] ^= 4;
                expected = SS_CHECKSUM;
            }
            CHECK_EQUAL(pipeline_fetch(pipeline, round, &socket, 1), expected);
            for (uint32_t i = 0; i < failing; i++) {
                CHECK_EQUAL(round->pieces[i].result, SS_OK);
                CHECK(fixture_matches(fixture, round, i));
            }
            CHECK_EQUAL(round->pieces[failing].result, expected);
            CHECK_EQUAL(round->sockets_in_sync, 1);
            bodies_free(&bodies);
            round_free(round);
        }
        close(socket);
    }
    ss_pipeline_destroy(pipeline);
    server_stop(server);
    fixture_free(fixture);
}

struct cancelling {
    struct server *server;
    struct ss_round *round;
};

static void *cancel_when_stalled(void *argument) {
    struct cancelling *cancelling = argument;
    server_wait_stalled(cancelling->server);
    ss_round_cancel(cancelling->round);
    return NULL;
}

/* Once a round is back nothing reads the memory any more, however it ended: it is given back at once. */
static void test_an_end_before_all_is_there_leaves_the_memory_alone(int mode) {
    struct shape shape = default_shape();
    struct fixture *fixture = fixture_make(&shape);
    struct server *server = server_start();
    fixture_serve(fixture, server);
    server_fault(server, fixture->chunks[2].key, fixture->chunks[2].key_length, FAULT_STALL);
    struct ss_pipeline_options options = pipeline_options(fixture, mode);
    struct ss_pipeline *pipeline = pipeline_make(&options);
    for (int late = 0; late < 2; late++) {
        int32_t socket = server_connect(server);
        struct ss_round *round = fixture_round(fixture);
        struct bodies bodies = bodies_give(fixture, round, 0x1b);
        struct cancelling cancelling = {server, round};
        pthread_t thread;
        round->deadline_ns = late ? after_ms(20) : after_patience();
        CHECK(late || pthread_create(&thread, NULL, cancel_when_stalled, &cancelling) == 0);
        enum ss_result result = pipeline_fetch(pipeline, round, &socket, 1);
        CHECK_EQUAL(result, late ? SS_DEADLINE : SS_CANCELLED);
        bodies_free(&bodies);
        CHECK(late || pthread_join(thread, NULL) == 0);
        round_free(round);
        close(socket);
    }
    ss_pipeline_destroy(pipeline);
    server_stop(server);
    fixture_free(fixture);
}

int main(void) {
    for (int mode = 0; mode < MODE_COUNT; mode++) {
        if (mode_is_tried(mode)) {
            test_any_mixture_is_delivered(mode);
            test_memory_alone_needs_no_sockets(mode);
            test_nothing_is_copied_where_the_decoder_reads_anywhere(mode);
            test_the_first_failure_decides_whosever_it_is(mode);
            test_an_end_before_all_is_there_leaves_the_memory_alone(mode);
        }
    }
    return 0;
}
