/* SPDX-License-Identifier: Apache-2.0 */
/* test_pipeline_cluster.c - batches over the nodes of a cluster: each chunk from its own, redirections, nodes that go
 */
#include <string.h>

#include "pipeline_support.h"

enum { NODES = NODES_MAX };

static void fault(struct bench *bench, uint32_t node, uint32_t chunk, enum fault fault) {
    const struct ss_piece *known = &bench->fixture->chunks[chunk];
    server_fault(bench->servers[node], known->key, known->key_length, fault);
}

/* Chunk i is node i % NODES'; the others would send us there. */
static struct ss_batch *cluster_begin(struct bench *bench) {
    struct ss_batch *batch = bench_begin(bench);
    batch->node_count = NODES;
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        batch->pieces[i].node = i % NODES;
    }
    return batch;
}

/* Starts the nodes and a batch; some tests vary how many requests may be in flight. */
static void cluster_start(struct bench *bench, int fused, uint32_t requests_in_flight) {
    *bench = (struct bench){.fused = fused, .shape = default_shape()};
    bench->shape.chunks = 10;
    bench->shape.slices = 5;
    bench_prepare(bench);
    bench->options.nodes_max = NODES;
    bench->options.requests_in_flight = requests_in_flight;
    bench_start(bench);
    for (uint32_t node = 0; node < NODES; node++) {
        for (uint32_t chunk = 0; chunk < bench->shape.chunks; chunk++) {
            fault(bench, node, chunk, chunk % NODES == node ? FAULT_NONE : FAULT_MOVED);
        }
    }
    cluster_begin(bench);
}

static void test_every_chunk_comes_from_its_node(int fused, uint32_t requests_in_flight) {
    struct bench bench;
    cluster_start(&bench, fused, requests_in_flight);
    for (int repeat = 0; repeat < 2; repeat++) {
        cluster_begin(&bench);
        CHECK_EQUAL(bench_fetch(&bench), SS_OK);
        check_delivered(&bench);
    }
    bench_stop(&bench);
}

/* A chunk that has moved is no failure to those behind it, and is fetched alone from where it went. */
static void test_redirections(int fused, enum fault kind, const char *words) {
    struct bench bench;
    cluster_start(&bench, fused, 4);
    fault(&bench, 1, 4, kind);
    fault(&bench, 2, 4, FAULT_NONE);
    struct ss_batch *batch = bench.batch;
    CHECK_EQUAL(bench_fetch(&bench), SS_REDIRECTED);
    CHECK_EQUAL(strncmp(batch->pieces[4].error, words, strlen(words)), 0);
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        CHECK_EQUAL(batch->pieces[i].result, i == 4 ? SS_REDIRECTED : SS_OK);
    }
    CHECK_EQUAL(batch->sockets_in_sync, 1);
    struct ss_piece alone = batch->pieces[4];
    alone.node = 2;
    struct ss_piece *all = batch->pieces;
    uint32_t count = batch->piece_count;
    batch->pieces = &alone;
    batch->piece_count = 1;
    CHECK_EQUAL(bench_fetch(&bench), SS_OK);
    CHECK_EQUAL(alone.error[0], '\0');
    batch->pieces = all;
    batch->piece_count = count;
    bench_stop(&bench);
}

static void test_asking(int fused, uint32_t requests_in_flight) {
    struct bench bench;
    cluster_start(&bench, fused, requests_in_flight);
    for (uint32_t i = 0; i < bench.batch->piece_count; i += 2) {
        fault(&bench, i % NODES, i, FAULT_ASK);
        bench.batch->pieces[i].asking = 1;
    }
    CHECK_EQUAL(bench_fetch(&bench), SS_OK);
    check_delivered(&bench);
    bench_stop(&bench);
}

/* All chunks before the first missing chunk of the failing node are delivered, from all nodes. */
static void test_a_node_that_goes(int fused, enum fault kind, enum ss_result expected) {
    struct bench bench;
    cluster_start(&bench, fused, 4);
    fault(&bench, 2, 5, kind);
    CHECK_EQUAL(bench_fetch(&bench), expected);
    for (uint32_t i = 0; i < 5; i++) {
        CHECK_EQUAL(bench.batch->pieces[i].result, SS_OK);
    }
    CHECK_EQUAL(bench.batch->pieces[5].result, expected);
    fault(&bench, 2, 5, FAULT_NONE);
    bench_reconnect(&bench);
    cluster_begin(&bench);
    CHECK_EQUAL(bench_fetch(&bench), SS_OK);
    bench_stop(&bench);
}

static void test_a_node_that_stalls_ends_at_the_deadline(int fused) {
    struct bench bench;
    cluster_start(&bench, fused, 4);
    fault(&bench, 0, 3, FAULT_STALL);
    bench.batch->deadline_ns = after_ms(200);
    CHECK_EQUAL(bench_fetch(&bench), SS_DEADLINE);
    bench_stop(&bench);
}

static void test_what_does_not_fit(void) {
    struct bench bench;
    cluster_start(&bench, 1, 4);
    struct ss_batch *batch = bench.batch;
    batch->pieces[3].node = NODES;
    CHECK_EQUAL(bench_fetch(&bench), SS_BAD_ARGUMENT);
    batch->pieces[3].node = 0;
    batch->node_count = NODES + 1;
    CHECK_EQUAL(bench_fetch(&bench), SS_BAD_ARGUMENT);
    batch->node_count = NODES;
    CHECK_EQUAL(bench_fetch_over(&bench, bench.socket_count - 1), SS_BAD_ARGUMENT);
    batch->node_count = 1; /* as many connections to one node as there are no threads for */
    CHECK_EQUAL(bench_fetch(&bench), SS_BAD_ARGUMENT);
    bench.options.nodes_max = 257;
    struct ss_pipeline *pipeline;
    CHECK_EQUAL(ss_pipeline_create(&bench.options, &pipeline), SS_BAD_ARGUMENT);
    bench_stop(&bench);
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
