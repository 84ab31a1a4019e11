/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pipeline_layers.c - batches in one request, KV.LAYERS: what is answered, well and badly, and what a failure
 * costs
 */
#include <string.h>

#include "pipeline_support.h"

enum { CHUNKS = 5, LAYERS = 4, LAYER_SLICES = 2, PIECES = CHUNKS * LAYERS, ANSWER_MAX = 1 << 20 };

static const char request[] =
    "*9\r\n$9\r\nKV.LAYERS\r\n$3\r\n0-3\r\n$1\r\n0\r\n$1\r\n0\r\n$1\r\na\r\n$1\r\nb\r\n$1\r\nc\r\n"
    "$1\r\nd\r\n$1\r\ne\r\n";

/* An answer as the test puts it together. */
struct answer {
    uint8_t bytes[ANSWER_MAX];
    size_t size;
};

static struct answer answer;
static struct ss_layers layers;
static uint32_t places[PIECES];
static int out_of_sync; /* the connection cannot be used again */

static struct ss_batch *batch_begin(struct bench *bench) {
    struct ss_batch *batch = bench_begin(bench);
    free(batch->pieces);
    batch->pieces = calloc(PIECES, sizeof *batch->pieces);
    CHECK(batch->pieces != NULL);
    batch->piece_count = PIECES;
    for (uint32_t i = 0; i < PIECES; i++) {
        places[i] = i;
        batch->pieces[i] = fixture_piece(bench->fixture, batch->slices, i % CHUNKS, i / CHUNKS, 1, LAYER_SLICES);
    }
    layers = (struct ss_layers){.request = (const uint8_t *)request,
                                .request_size = sizeof request - 1,
                                .layers = LAYERS,
                                .keys = CHUNKS,
                                .pieces = places};
    batch->layers = &layers;
    batch->layers_count = 1;
    return batch;
}

#define LAYERS_TEST(name)                                                                                              \
    PIPELINE_TEST(name, (shape->chunks = CHUNKS, shape->slices = LAYERS * LAYER_SLICES), AS_BEFORE)

/* ---- Answers ------------------------------------------------------------------------------------------------- */

static void add(const void *data, size_t size) {
    CHECK(answer.size + size <= ANSWER_MAX);
    memcpy(answer.bytes + answer.size, data, size);
    answer.size += size;
}

static void add_line(const char *type, uint64_t number) {
    char line[32];
    add(line, (size_t)snprintf(line, sizeof line, "%s%llu\r\n", type, (unsigned long long)number));
}

static const struct ss_piece *piece_at(const struct bench *bench, const struct ss_layers *asked, uint32_t layer,
                                       uint32_t key) {
    return &bench->batch->pieces[asked->pieces[layer * asked->keys + key]];
}

/* Begins an answer; keys whose bit is set are missing, or have the given length. */
static void add_head(const struct bench *bench, const struct ss_layers *asked, unsigned others, uint64_t other_bytes) {
    answer.size = 0;
    add_line("*", 1 + LAYERS);
    add_line("*", asked->keys);
    for (uint32_t key = 0; key < asked->keys; key++) {
        int other = others >> key & 1;
        if (other && other_bytes == 0) {
            add("$-1\r\n", 5);
        } else {
            const struct ss_piece *chunk = &bench->fixture->chunks[piece_at(bench, asked, 0, key)->chunk];
            add_line(":", other ? other_bytes : chunk->body_length);
        }
    }
}

/* Adds a layer; keys whose bit is set have the given number of bytes, which no piece expects. */
static void add_layer(const struct bench *bench, const struct ss_layers *asked, uint32_t layer, unsigned others,
                      uint32_t other_bytes) {
    static const uint8_t nothing[100 << 10];
    uint32_t lengths[CHUNKS];
    uint64_t size = asked->keys * sizeof lengths[0];
    for (uint32_t key = 0; key < asked->keys; key++) {
        lengths[key] = others >> key & 1 ? other_bytes : (uint32_t)piece_at(bench, asked, layer, key)->body_length;
        size += lengths[key];
    }
    add_line("$", size);
    for (uint32_t key = 0; key < asked->keys; key++) {
        const uint8_t bytes[4] = {(uint8_t)lengths[key], (uint8_t)(lengths[key] >> 8), (uint8_t)(lengths[key] >> 16),
                                  (uint8_t)(lengths[key] >> 24)};
        add(bytes, sizeof bytes);
    }
    for (uint32_t key = 0; key < asked->keys; key++) {
        const struct ss_piece *piece = piece_at(bench, asked, layer, key);
        const uint8_t *stored = bench->fixture->records[piece->chunk] + piece->record_offset;
        add(others >> key & 1 ? nothing : stored, lengths[key]);
    }
    add("\r\n", 2);
}

static void answer_all(const struct bench *bench, const struct ss_layers *asked) {
    add_head(bench, asked, 0, 0);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        add_layer(bench, asked, layer, 0, 0);
    }
}

/* ---- Batches -------------------------------------------------------------------------------------------------- */

static enum ss_result fetch_over(struct bench *bench, const int32_t *sockets, uint32_t count) {
    enum ss_result result = pipeline_fetch(bench->pipeline, bench->batch, sockets, count);
    for (uint32_t i = 0; i < PIECES; i++) {
        CHECK(bench->batch->pieces[i].result != SS_OK ||
              fixture_piece_matches(bench->fixture, bench->batch, &bench->batch->pieces[i]));
    }
    return result;
}

/* Runs a batch, on a new connection where the last one is out of step. */
static enum ss_result fetch(struct bench *bench) {
    if (out_of_sync) {
        bench_reconnect(bench);
    }
    enum ss_result result = fetch_over(bench, bench->sockets, 1);
    out_of_sync = !bench->batch->sockets_in_sync;
    return result;
}

static enum ss_result fetch_answer(struct bench *bench, size_t step, enum fault then) {
    server_answer_layers(bench->server, answer.bytes, answer.size, step, then);
    return fetch(bench);
}

/* Of chunks before 'first' all is there; the first piece of that failed as it should, and nothing else did. */
static void check_ends_at(const struct bench *bench, uint32_t first, enum ss_result failure) {
    uint32_t failed = 0;
    for (uint32_t i = 0; i < PIECES; i++) {
        const struct ss_piece *piece = &bench->batch->pieces[i];
        if (piece->chunk < first) {
            CHECK_EQUAL(piece->result, SS_OK);
        } else if (piece->result != SS_SKIPPED && piece->result != SS_OK) {
            CHECK_EQUAL(piece->chunk, first);
            CHECK_EQUAL(piece->result, failure);
            failed++;
        }
    }
    CHECK_EQUAL(failed, first < CHUNKS);
}

LAYERS_TEST(test_a_batch_comes_in_one_answer_however_it_is_cut) {
    static const size_t steps[] = {SIZE_MAX, 7, 1000, 1};
    for (size_t i = 0; i < COUNT_OF(steps) - (test_is_brief() ? 1 : 0); i++) {
        uint32_t progress = 0;
        batch_begin(bench);
        bench->batch->progress = &progress;
        bench->batch->layers_end = LAYERS;
        answer_all(bench, &layers);
        CHECK_EQUAL(fetch_answer(bench, steps[i], FAULT_NONE), SS_OK);
        check_ends_at(bench, CHUNKS, SS_OK);
        CHECK_EQUAL(progress, LAYERS);
        CHECK_EQUAL(bench->batch->received_bytes, answer.size);
        CHECK_EQUAL(bench->batch->delivered_bytes, bench->fixture->size);
        CHECK_EQUAL(bench->batch->sockets_in_sync, 1);
        CHECK_EQUAL(layers.refused, 0);
    }
}

/* The same socket then asks by ranges, and what is before a chunk that fails there is completed all the same. */
LAYERS_TEST(test_a_server_that_does_not_know_it_is_asked_by_ranges) {
    for (int damaged = 0; damaged < 2; damaged++) {
        batch_begin(bench);
        const struct ss_piece *chunk = &bench->fixture->chunks[3];
        server_fault(bench->server, chunk->key, chunk->key_length, damaged ? FAULT_MISSING : FAULT_NONE);
        CHECK_EQUAL(fetch(bench), damaged ? SS_NOT_FOUND : SS_OK);
        check_ends_at(bench, damaged ? 3 : CHUNKS, SS_NOT_FOUND);
        CHECK_EQUAL(bench->batch->sockets_in_sync, 1);
        CHECK_EQUAL(layers.refused, 1);
        CHECK(strncmp(layers.error, "ERR unknown command 'KV.LAYERS'", 31) == 0);
    }
}

LAYERS_TEST(test_a_chunk_that_is_gone_costs_nothing_before_it) {
    for (uint32_t first = 0; first < CHUNKS; first++) {
        for (unsigned also = 0; also < 2; also++) {
            unsigned gone = 1U << first | (also ? 1U << (CHUNKS - 1) : 0);
            batch_begin(bench);
            add_head(bench, &layers, gone, 0);
            for (uint32_t layer = 0; layer < LAYERS; layer++) {
                add_layer(bench, &layers, layer, gone, 0);
            }
            CHECK_EQUAL(fetch_answer(bench, SIZE_MAX, FAULT_NONE), SS_NOT_FOUND);
            check_ends_at(bench, first, SS_NOT_FOUND);
            CHECK_EQUAL(bench->batch->sockets_in_sync, first > 0); /* where nothing is of use the rest is not read */
        }
    }
}

/* Lengths are not those that were planned for: longer than any buffer for what is dropped, or so in one layer alone. */
LAYERS_TEST(test_a_record_that_was_replaced_is_not_taken) {
    static const uint32_t lengths[] = {1, 3000, 100 << 10};
    for (size_t i = 0; i < COUNT_OF(lengths); i++) {
        for (int late = 0; late < 2; late++) {
            batch_begin(bench);
            add_head(bench, &layers, late ? 0 : 1U << 2,
                     (uint64_t)LAYERS * lengths[i]); /* the total says so, or does not */
            for (uint32_t layer = 0; layer < LAYERS; layer++) {
                add_layer(bench, &layers, layer, !late || layer == 3 ? 1U << 2 : 0, lengths[i]);
            }
            CHECK_EQUAL(fetch_answer(bench, SIZE_MAX, FAULT_NONE), SS_NOT_FOUND);
            check_ends_at(bench, 2, SS_NOT_FOUND);
            CHECK_EQUAL(bench->batch->sockets_in_sync, 1);
        }
    }
}

/* All placed bytes passed every check, at any point of failure; and no thread waits for bytes that cannot arrive. */
LAYERS_TEST(test_answers_that_are_none_break_the_connection) {
    const char *heads[] = {"*4\r\n*5\r\n", "*5\r\n*4\r\n",       "*5\r\n:5\r\n",       "$5\r\n", "+OK\r\n",
                           "_\r\n",        "*5\r\n*5\r\n$3\r\n", "*5\r\n*5\r\n+1\r\n", ":5\r\n", "HTTP/1.1 400\r\n"};
    for (size_t i = 0; i < COUNT_OF(heads); i++) {
        batch_begin(bench);
        answer.size = 0;
        add(heads[i], strlen(heads[i]));
        CHECK_EQUAL(fetch_answer(bench, SIZE_MAX, FAULT_STALL), SS_PROTOCOL);
        check_ends_at(bench, 0, SS_PROTOCOL);
        CHECK_EQUAL(bench->batch->sockets_in_sync, 0);
    }
    static const char *bad_layers[] = {"$3\r\n", "$100000000\r\n", "_\r\n", ":7\r\n", "*1\r\n"};
    for (size_t i = 0; i < COUNT_OF(bad_layers); i++) {
        batch_begin(bench);
        add_head(bench, &layers, 0, 0);
        add_layer(bench, &layers, 0, 0, 0);
        size_t before = answer.size;
        add_layer(bench, &layers, 1, 0, 0);
        uint8_t *line_end = memchr(answer.bytes + before, '\n', answer.size - before);
        size_t rest = answer.size - (size_t)(line_end + 1 - answer.bytes);
        uint8_t *copy = malloc(rest);
        CHECK(copy != NULL);
        memcpy(copy, line_end + 1, rest);
        answer.size = before;
        add(bad_layers[i], strlen(bad_layers[i]));
        add(copy, rest);
        free(copy);
        CHECK_EQUAL(fetch_answer(bench, SIZE_MAX, FAULT_STALL), SS_PROTOCOL);
        CHECK_EQUAL(bench->batch->pieces[CHUNKS].result, SS_PROTOCOL);
    }
    for (int behind = 0; behind < 2; behind++) {
        batch_begin(bench);
        answer_all(bench, &layers);
        answer.size -= behind ? 0 : 2;
        add(behind ? "$1" : "xx", 2);
        enum ss_result result = fetch_answer(bench, SIZE_MAX, FAULT_STALL);
        CHECK(result == SS_PROTOCOL || result == SS_OK);
        CHECK_EQUAL(bench->batch->sockets_in_sync, 0);
    }
}

LAYERS_TEST(test_an_error_in_place_of_a_layer_is_told) {
    batch_begin(bench);
    add_head(bench, &layers, 0, 0);
    add_layer(bench, &layers, 0, 0, 0);
    static const char error[] = "-ERR KV.LAYERS failed\r\n";
    for (uint32_t layer = 1; layer < LAYERS; layer++) {
        add(error, sizeof error - 1);
    }
    CHECK_EQUAL(fetch_answer(bench, SIZE_MAX, FAULT_STALL), SS_REFUSED);
    CHECK_EQUAL(bench->batch->pieces[CHUNKS].result, SS_REFUSED);
    CHECK(strcmp(bench->batch->pieces[CHUNKS].error, "ERR KV.LAYERS failed") == 0);
}

/* A byte is another, anywhere: of a piece it is found by its checksum, of anything else by its form. */
LAYERS_TEST(test_damage_anywhere_is_never_delivered) {
    for (int i = 0; i < (test_is_brief() ? 40 : 400); i++) {
        batch_begin(bench);
        answer_all(bench, &layers);
        answer.bytes[random_below(i % 2 ? answer.size : 120)] ^= 1U << random_below(8);
        enum ss_result result = fetch_answer(bench, SIZE_MAX, FAULT_DISCONNECT);
        CHECK(result != SS_BAD_ARGUMENT && result != SS_CANCELLED && result != SS_DEADLINE);
        out_of_sync = 1; /* the server has closed it */
    }
}

LAYERS_TEST(test_an_answer_that_is_cut_keeps_what_was_whole) {
    batch_begin(bench);
    answer_all(bench, &layers);
    size_t size = answer.size;
    for (size_t cut = 0; cut < size; cut += cut < 100 ? 9 : size / 11) {
        batch_begin(bench);
        answer.size = cut;
        CHECK_EQUAL(fetch_answer(bench, SIZE_MAX, FAULT_DISCONNECT), SS_DISCONNECTED);
        CHECK_EQUAL(bench->batch->sockets_in_sync, 0);
    }
}

LAYERS_TEST(test_a_batch_that_ends_early_is_quiet_and_its_connection_gone) {
    for (int late = 0; late < 2; late++) {
        batch_begin(bench);
        answer_all(bench, &layers);
        answer.size = answer.size * 2 / 3;
        server_answer_layers(bench->server, answer.bytes, answer.size, SIZE_MAX, FAULT_STALL);
        pthread_t thread;
        bench->batch->deadline_ns = late ? after_ms(50) : after_patience();
        if (!late) {
            bench_cancel_stalled(bench, &thread);
        }
        CHECK_EQUAL(fetch(bench), late ? SS_DEADLINE : SS_CANCELLED);
        CHECK(late || pthread_join(thread, NULL) == 0);
        CHECK_EQUAL(bench->batch->sockets_in_sync, 0);
    }
}

LAYERS_TEST(test_a_batch_that_is_no_such_request_is_refused) {
    for (int wrong = 0; wrong < 9; wrong++) {
        struct ss_batch *batch = batch_begin(bench);
        batch->layers->keys += wrong == 0;
        batch->layers->layers -= wrong == 1;
        batch->layers->request_size *= wrong != 2;
        batch->pieces[7].chunk += wrong == 3;
        batch->pieces[7].memory = wrong == 4 ? bench->fixture->records[0] : NULL;
        batch->pieces[7].origin = wrong == 4 ? SS_ORIGIN_MEMORY : SS_ORIGIN_SERVER;
        batch->pieces[7].asking = wrong == 5;
        if (wrong == 6) {
            *batch->layers = (struct ss_layers){.request = batch->layers->request, .request_size = 1};
        }
        for (uint32_t i = 0; i < PIECES && wrong == 7; i++) {
            batch->pieces[i].chunk = CHUNKS - batch->pieces[i].chunk;
        }
        places[3] += wrong == 8;
        CHECK_EQUAL(fetch(bench), SS_BAD_ARGUMENT);
    }
    batch_begin(bench);
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, bench->batch, bench->sockets, 2), SS_BAD_ARGUMENT);
}

/* ---- Two nodes ------------------------------------------------------------------------------------------------ */

static struct ss_layers both[2];
static uint32_t places_of[2][PIECES];

/* Even chunks are at node 0, odd ones at node 1; each is asked for all of its pieces by one request. */
static void two_begin(struct bench *bench) {
    struct ss_batch *batch = batch_begin(bench);
    batch->node_count = 2;
    batch->layers = both;
    batch->layers_count = 2;
    for (uint32_t node = 0; node < 2; node++) {
        uint32_t count = 0;
        for (uint32_t i = 0; i < PIECES; i++) {
            if (batch->pieces[i].chunk % 2 == node) {
                batch->pieces[i].node = node;
                places_of[node][count++] = i;
            }
        }
        both[node] = layers;
        both[node].node = node;
        both[node].keys = count / LAYERS;
        both[node].pieces = places_of[node];
    }
}

/* Makes a node answer its request, and then go on, close the connection, or stall; 'size': bytes of the answer. */
static void two_answer(struct bench *bench, uint32_t node, size_t size, enum fault then) {
    answer_all(bench, &both[node]);
    server_answer_layers(bench->servers[node], answer.bytes, size < answer.size ? size : answer.size, 1000, then);
}

static enum ss_result two_fetch(struct bench *bench) {
    const int32_t sockets[] = {bench->sockets[0], bench->sockets[SOCKETS]};
    return fetch_over(bench, sockets, 2);
}

PIPELINE_TEST(test_two_nodes_answer_side_by_side, (shape->chunks = CHUNKS, shape->slices = LAYERS * LAYER_SLICES),
              options->nodes_max = 2) {
    uint32_t progress = 0;
    two_begin(bench);
    two_answer(bench, 0, SIZE_MAX, FAULT_NONE);
    CHECK_EQUAL(two_fetch(bench), SS_OK); /* node 1 does not know the command: its pieces come by ranges */
    CHECK_EQUAL(both[0].refused, 0);
    CHECK_EQUAL(both[1].refused, 1);
    two_begin(bench);
    bench->batch->progress = &progress;
    bench->batch->layers_end = LAYERS;
    two_answer(bench, 0, SIZE_MAX, FAULT_NONE);
    two_answer(bench, 1, SIZE_MAX, FAULT_NONE);
    CHECK_EQUAL(two_fetch(bench), SS_OK);
    CHECK_EQUAL(progress, LAYERS);
    CHECK_EQUAL(bench->batch->delivered_bytes, bench->fixture->size);
    CHECK_EQUAL(bench->batch->sockets_in_sync, 1);
    for (int wrong = 0; wrong < 3; wrong++) {
        two_begin(bench);
        both[1].node = wrong == 0 ? 0 : wrong == 1 ? 2 : 1;
        bench->batch->pieces[6].node = wrong == 2 ? 0 : bench->batch->pieces[6].node;
        CHECK_EQUAL(two_fetch(bench), SS_BAD_ARGUMENT);
    }
    two_begin(bench);
    two_answer(bench, 0, SIZE_MAX, FAULT_NONE);
    two_answer(bench, 1, answer.size / 2, FAULT_DISCONNECT);
    CHECK_EQUAL(two_fetch(bench), SS_DISCONNECTED);
    for (uint32_t i = 0; i < PIECES; i += CHUNKS) {
        CHECK_EQUAL(bench->batch->pieces[i].result, SS_OK); /* chunk 0, of the other node */
    }
}

int main(void) {
    for (int fused = 0; fused <= backend_fuses(); fused++) {
        test_a_batch_that_is_no_such_request_is_refused(fused);
        test_a_batch_comes_in_one_answer_however_it_is_cut(fused);
        test_a_server_that_does_not_know_it_is_asked_by_ranges(fused);
        test_a_chunk_that_is_gone_costs_nothing_before_it(fused);
        test_a_record_that_was_replaced_is_not_taken(fused);
        test_answers_that_are_none_break_the_connection(fused);
        test_an_error_in_place_of_a_layer_is_told(fused);
        test_damage_anywhere_is_never_delivered(fused);
        test_an_answer_that_is_cut_keeps_what_was_whole(fused);
        test_a_batch_that_ends_early_is_quiet_and_its_connection_gone(fused);
        test_two_nodes_answer_side_by_side(fused);
    }
    return 0;
}
