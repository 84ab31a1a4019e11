/* SPDX-License-Identifier: Apache-2.0 */
/* test_pipeline_cluster.c - batches over the nodes of a cluster: each chunk from its own, redirections, nodes that go
 */
#include <string.h>
#include <unistd.h>

#include "pipeline_support.h"

enum { NODES = 3, CONNECTIONS = 2, SOCKETS = NODES * CONNECTIONS };

struct bench {
    struct fixture *fixture;
    struct server *servers[NODES];
    struct ss_pipeline *pipeline;
    int32_t sockets[SOCKETS];
};

static void connect_all(struct bench *bench) {
    for (int i = 0; i < SOCKETS; i++) {
        bench->sockets[i] = server_connect(bench->servers[i / CONNECTIONS]);
    }
}

static void close_all(struct bench *bench) {
    for (int i = 0; i < SOCKETS; i++) {
        close(bench->sockets[i]);
    }
}

static void fault(struct bench *bench, uint32_t node, uint32_t chunk, enum fault fault) {
    const struct ss_piece *known = &bench->fixture->chunks[chunk];
    server_fault(bench->servers[node], known->key, known->key_length, fault);
}

/* Chunk i is node i % NODES'; the others would send us there. */
static struct bench bench_make(int fused, uint32_t requests_in_flight) {
    struct shape shape = default_shape();
    shape.chunks = 10;
    shape.slices = 5;
    struct bench bench = {.fixture = fixture_make(&shape)};
    for (uint32_t node = 0; node < NODES; node++) {
        bench.servers[node] = server_start();
        fixture_serve(bench.fixture, bench.servers[node]);
        for (uint32_t chunk = 0; chunk < shape.chunks; chunk++) {
            fault(&bench, node, chunk, chunk % NODES == node ? FAULT_NONE : FAULT_MOVED);
        }
    }
    struct ss_pipeline_options options = pipeline_options(bench.fixture, fused);
    options.nodes_max = NODES;
    options.requests_in_flight = requests_in_flight;
    CHECK_EQUAL(ss_pipeline_create(&options, &bench.pipeline), SS_OK);
    connect_all(&bench);
    return bench;
}

static void bench_free(struct bench *bench) {
    close_all(bench);
    ss_pipeline_destroy(bench->pipeline);
    for (int node = 0; node < NODES; node++) {
        server_stop(bench->servers[node]);
    }
    fixture_free(bench->fixture);
}

static struct ss_batch *batch_make(const struct bench *bench) {
    struct ss_batch *batch = fixture_round(bench->fixture);
    batch->node_count = NODES;
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        batch->pieces[i].node = i % NODES;
    }
    return batch;
}

static enum ss_result fetch(struct bench *bench, struct ss_batch *batch) {
    return pipeline_fetch(bench->pipeline, batch, bench->sockets, SOCKETS);
}

static void test_every_chunk_comes_from_its_node(int fused, uint32_t requests_in_flight) {
    struct bench bench = bench_make(fused, requests_in_flight);
    for (int repeat = 0; repeat < 2; repeat++) {
        struct ss_batch *batch = batch_make(&bench);
        CHECK_EQUAL(fetch(&bench, batch), SS_OK);
        for (uint32_t i = 0; i < batch->piece_count; i++) {
            CHECK_EQUAL(batch->pieces[i].result, SS_OK);
            CHECK(fixture_matches(bench.fixture, batch, i));
        }
        CHECK_EQUAL(batch->sockets_in_sync, 1);
        batch_free(batch);
    }
    bench_free(&bench);
}

/* A chunk that has moved is no failure to those behind it, and is fetched alone from where it went. */
static void test_redirections(int fused, enum fault kind, const char *words) {
    struct bench bench = bench_make(fused, 4);
    fault(&bench, 1, 4, kind);
    fault(&bench, 2, 4, FAULT_NONE);
    struct ss_batch *batch = batch_make(&bench);
    CHECK_EQUAL(fetch(&bench, batch), SS_REDIRECTED);
    CHECK_EQUAL(strncmp(batch->pieces[4].error, words, strlen(words)), 0);
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        CHECK_EQUAL(batch->pieces[i].result, i == 4 ? SS_REDIRECTED : SS_OK);
        CHECK(i == 4 || fixture_matches(bench.fixture, batch, i));
    }
    CHECK_EQUAL(batch->sockets_in_sync, 1);
    struct ss_piece alone = batch->pieces[4];
    alone.node = 2;
    struct ss_piece *all = batch->pieces;
    uint32_t count = batch->piece_count;
    batch->pieces = &alone;
    batch->piece_count = 1;
    CHECK_EQUAL(fetch(&bench, batch), SS_OK);
    CHECK_EQUAL(alone.error[0], '\0');
    batch->pieces = all;
    batch->piece_count = count;
    CHECK(fixture_matches(bench.fixture, batch, 4));
    batch_free(batch);
    bench_free(&bench);
}

static void test_asking(int fused, uint32_t requests_in_flight) {
    struct bench bench = bench_make(fused, requests_in_flight);
    struct ss_batch *batch = batch_make(&bench);
    for (uint32_t i = 0; i < batch->piece_count; i += 2) {
        fault(&bench, i % NODES, i, FAULT_ASK);
        batch->pieces[i].asking = 1;
    }
    CHECK_EQUAL(fetch(&bench, batch), SS_OK);
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        CHECK(fixture_matches(bench.fixture, batch, i));
    }
    CHECK_EQUAL(batch->sockets_in_sync, 1);
    batch_free(batch);
    bench_free(&bench);
}

/* All chunks before the first missing chunk of the failing node are delivered, from all nodes. */
static void test_a_node_that_goes(int fused, enum fault kind, enum ss_result expected) {
    struct bench bench = bench_make(fused, 4);
    fault(&bench, 2, 5, kind);
    struct ss_batch *batch = batch_make(&bench);
    CHECK_EQUAL(fetch(&bench, batch), expected);
    for (uint32_t i = 0; i < 5; i++) {
        CHECK_EQUAL(batch->pieces[i].result, SS_OK);
        CHECK(fixture_matches(bench.fixture, batch, i));
    }
    CHECK_EQUAL(batch->pieces[5].result, expected);
    batch_free(batch);
    close_all(&bench);
    fault(&bench, 2, 5, FAULT_NONE);
    connect_all(&bench);
    batch = batch_make(&bench);
    CHECK_EQUAL(fetch(&bench, batch), SS_OK);
    batch_free(batch);
    bench_free(&bench);
}

static void test_a_node_that_stalls_ends_at_the_deadline(int fused) {
    struct bench bench = bench_make(fused, 4);
    fault(&bench, 0, 3, FAULT_STALL);
    struct ss_batch *batch = batch_make(&bench);
    batch->deadline_ns = after_ms(200);
    CHECK_EQUAL(fetch(&bench, batch), SS_DEADLINE);
    batch_free(batch);
    bench_free(&bench);
}

static void test_what_does_not_fit(void) {
    struct bench bench = bench_make(1, 4);
    struct ss_batch *batch = batch_make(&bench);
    batch->pieces[3].node = NODES;
    CHECK_EQUAL(fetch(&bench, batch), SS_BAD_ARGUMENT);
    batch->pieces[3].node = 0;
    batch->node_count = NODES + 1;
    CHECK_EQUAL(fetch(&bench, batch), SS_BAD_ARGUMENT);
    batch->node_count = NODES;
    CHECK_EQUAL(pipeline_fetch(bench.pipeline, batch, bench.sockets, SOCKETS - 1), SS_BAD_ARGUMENT);
    batch->node_count = 1; /* as many connections to one node as there are no threads for */
    CHECK_EQUAL(fetch(&bench, batch), SS_BAD_ARGUMENT);
    batch_free(batch);
    struct ss_pipeline_options options = pipeline_options(bench.fixture, 1);
    options.nodes_max = 257;
    struct ss_pipeline *pipeline;
    CHECK_EQUAL(ss_pipeline_create(&options, &pipeline), SS_BAD_ARGUMENT);
    bench_free(&bench);
}

int main(void) {
    for (int fused = 0; fused <= backend_fuses(); fused++) {
        test_every_chunk_comes_from_its_node(fused, 1);
        test_every_chunk_comes_from_its_node(fused, 8);
        test_redirections(fused, FAULT_MOVED, "MOVED 7 127.0.0.1:7001");
        test_redirections(fused, FAULT_ASK, "ASK 7 127.0.0.1:7001");
        test_asking(fused, 1);
        test_asking(fused, 3);
        test_a_node_that_goes(fused, FAULT_DISCONNECT, SS_DISCONNECTED);
        test_a_node_that_goes(fused, FAULT_RESET, SS_DISCONNECTED);
        test_a_node_that_goes(fused, FAULT_ERROR, SS_REFUSED);
        test_a_node_that_goes(fused, FAULT_GARBAGE, SS_PROTOCOL);
        test_a_node_that_stalls_ends_at_the_deadline(fused);
    }
    test_what_does_not_fit();
    return 0;
}
