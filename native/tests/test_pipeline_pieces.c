/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pipeline_pieces.c - batches of pieces: some layers of chunks, of two groups, in any order, from servers and
 * memory; pieces that a failure skips, and pieces that it does not affect
 */
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "pipeline_support.h"

enum { GROUPS = 2, CHUNKS = 5, CONNECTIONS = SOCKETS + 1, ROOM = 1 << 16 };

/* The groups differ in all that a group says; and in their layers. */
static const uint32_t layers_of[GROUPS] = {4, 2};
enum { LAYER_SLICES = 2, LAYERS_MAX = 4, PIECES = CHUNKS * (4 + 2) };

/* Makes the second group, and room for it, before the bench starts. */
static void groups_prepare(struct bench *bench) {
    struct shape shape = default_shape();
    struct ss_pipeline_options *options = &bench->options;
    shape.chunks = CHUNKS;
    shape.slices = layers_of[1] * LAYER_SLICES;
    shape.quantizer = SS_QUANTIZER_LOSSLESS;
    shape.dtype = SS_DTYPE_FLOAT32;
    shape.vectors = 5;
    shape.vector_length = 192;
    bench->other = fixture_make(&shape);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        bench->other->chunks[i].key[0] = 'b';
    }
    const struct ss_pipeline_options other = pipeline_options(bench->other, bench->fused);
    options->decompression_bytes += other.decompression_bytes + ROOM;
    if (!options->fused) {
        options->dequantization_bytes += other.dequantization_bytes + ROOM;
        options->dma_source_bytes += other.dma_source_bytes + ROOM;
    }
    options->store_bytes += other.store_bytes;
}

#define GROUPS_TEST(name)                                                                                              \
    PIPELINE_TEST(name, (shape->chunks = CHUNKS, shape->slices = layers_of[0] * LAYER_SLICES), groups_prepare(&bench))

static const struct fixture *fixture_of(const struct bench *bench, uint32_t group) {
    return group == 0 ? bench->fixture : bench->other;
}

/* The second group's slices and regions are behind the first one's. */
static struct ss_piece piece_of(const struct bench *bench, uint32_t group, uint32_t chunk, uint32_t layer,
                                uint32_t layers) {
    uint32_t before = group == 0 ? 0 : CHUNKS * layers_of[0] * LAYER_SLICES;
    struct ss_piece piece =
        fixture_piece(fixture_of(bench, group), bench->batch->slices + before, chunk, layer, layers, LAYER_SLICES);
    piece.group = group;
    piece.slice_first += before;
    if (group == 1) {
        piece.layer = UINT32_MAX; /* progress is of one group */
        piece.decompression_offset += bench->fixture->decompression_bytes;
        piece.dequantization_offset += bench->fixture->dequantization_bytes;
    }
    return piece;
}

/* A batch of all layers of all chunks of both groups, a layer in each piece, layer by layer. */
static struct ss_batch *batch_begin(struct bench *bench) {
    struct ss_batch *batch = bench_begin(bench);
    struct ss_batch *other = fixture_round(bench->other);
    struct ss_group *groups = realloc(batch->groups, GROUPS * sizeof *groups);
    CHECK(groups != NULL);
    groups[1] = other->groups[0];
    other->group_count = 0;
    batch->groups = groups;
    batch->group_count = GROUPS;
    batch->slice_count += other->slice_count;
    batch_free(other);
    free(batch->pieces);
    free(batch->slices);
    batch->piece_count = 0;
    batch->pieces = calloc(PIECES, sizeof *batch->pieces);
    batch->slices = calloc(batch->slice_count, sizeof *batch->slices);
    CHECK(batch->pieces != NULL && batch->slices != NULL);
    for (uint32_t layer = 0; layer < LAYERS_MAX; layer++) {
        for (uint32_t group = 0; group < GROUPS; group++) {
            for (uint32_t chunk = 0; chunk < CHUNKS && layer < layers_of[group]; chunk++) {
                batch->pieces[batch->piece_count++] = piece_of(bench, group, chunk, layer, 1);
            }
        }
    }
    CHECK_EQUAL(batch->piece_count, PIECES);
    return batch;
}

static void shuffle(struct ss_batch *batch) {
    for (uint32_t i = batch->piece_count; i-- > 1;) {
        size_t other = random_below(i + 1);
        struct ss_piece swapped = batch->pieces[i];
        batch->pieces[i] = batch->pieces[other];
        batch->pieces[other] = swapped;
    }
}

/* The piece's place in the list. */
static uint32_t index_of(const struct bench *bench, uint32_t group, uint32_t chunk, uint32_t layer) {
    uint32_t first = (chunk * layers_of[group] + layer) * LAYER_SLICES;
    first += group == 0 ? 0 : CHUNKS * layers_of[0] * LAYER_SLICES;
    uint32_t index = 0;
    while (bench->batch->pieces[index].slice_first != first) {
        CHECK(++index < bench->batch->piece_count);
    }
    return index;
}

/* Gives every other piece, as the bits say, its body in memory. */
static void bodies_give(struct bench *bench, unsigned mask) {
    for (uint32_t i = 0; i < bench->batch->piece_count; i++) {
        if (mask >> i % 8 & 1) {
            bench_body(bench, i);
        }
    }
}

static int has_failed(const struct ss_piece *piece) {
    return piece->result != SS_OK && piece->result != SS_SKIPPED;
}

/*
 * Invariants of every finished batch: pieces with SS_OK are in place; skipped pieces are useless, since their group
 * failed at their chunk or before it.
 */
static void check_set(const struct bench *bench) {
    const struct ss_batch *batch = bench->batch;
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        const struct ss_piece *piece = &batch->pieces[i];
        CHECK(piece->result != SS_OK || fixture_piece_matches(fixture_of(bench, piece->group), batch, piece));
        int useless = 0;
        for (uint32_t j = 0; j < batch->piece_count; j++) {
            const struct ss_piece *other = &batch->pieces[j];
            useless |= has_failed(other) && other->group == piece->group && other->chunk <= piece->chunk;
        }
        CHECK(piece->result != SS_SKIPPED || useless);
    }
}

static enum ss_result fetch(struct bench *bench, uint32_t sockets) {
    enum ss_result result = pipeline_fetch(bench->pipeline, bench->batch, bench->sockets, sockets);
    check_set(bench);
    return result;
}

static void check_all(const struct bench *bench) {
    for (uint32_t i = 0; i < bench->batch->piece_count; i++) {
        CHECK_EQUAL(bench->batch->pieces[i].result, SS_OK);
    }
    CHECK_EQUAL(bench->batch->delivered_bytes, bench->fixture->size + bench->other->size);
    CHECK_EQUAL(bench->batch->sockets_in_sync, 1);
}

/* ---- Order --------------------------------------------------------------------------------------------------- */

GROUPS_TEST(test_any_order_is_delivered_from_anywhere) {
    static const unsigned masks[] = {0, 0xff, 0x55, 0x1b, 0x80};
    for (uint32_t i = 0; i < (test_is_brief() ? 5 : 10); i++) {
        batch_begin(bench);
        if (i > 0) {
            shuffle(bench->batch);
        }
        bodies_give(bench, masks[i % 5]);
        CHECK_EQUAL(fetch(bench, 1 + i % CONNECTIONS), SS_OK);
        check_all(bench);
    }
}

/* Some layers in one piece, others alone. */
GROUPS_TEST(test_pieces_have_as_many_layers_as_they_like) {
    struct ss_batch *batch = batch_begin(bench);
    batch->piece_count = 0;
    for (uint32_t chunk = CHUNKS; chunk-- > 0;) {
        batch->pieces[batch->piece_count++] = piece_of(bench, 0, chunk, 1, 3);
        batch->pieces[batch->piece_count++] = piece_of(bench, 1, chunk, 0, 2);
        batch->pieces[batch->piece_count++] = piece_of(bench, 0, chunk, 0, 1);
    }
    CHECK_EQUAL(fetch(bench, 2), SS_OK);
    check_all(bench);
}

struct stalled {
    struct bench *bench;
    uint64_t slices; /* that come through all the same */
    uint32_t layers; /* likewise, of the first group */
};

/* Slices that the last stage has seen. */
static uint64_t slices_through(const struct bench *bench) {
    struct ss_stage_statistics statistics[SS_STAGE_COUNT];
    ss_pipeline_statistics(bench->pipeline, statistics);
    return statistics[bench->fused ? SS_STAGE_DEQUANTIZE : SS_STAGE_DMA].items;
}

/* Cancels the batch when it cannot make progress. */
static void *cancel_stalled(void *argument) {
    const struct stalled *stalled = argument;
    server_wait_stalled(stalled->bench->server);
    while (slices_through(stalled->bench) < stalled->slices) {
        sched_yield();
    }
    uint32_t layers = 0; /* updated during the batch */
    while (layers < stalled->layers) {
        layers = ss_progress_wait(stalled->bench->batch->progress, layers, 1000000000);
        CHECK(layers <= stalled->layers);
    }
    ss_batch_cancel(stalled->bench->batch);
    return NULL;
}

/*
 * While a layer of one chunk does not come, all layers before it are there, and of this one the chunks before it; and
 * what is in memory, which waits for nothing.
 */
static void check_late_layer(struct bench *bench, unsigned mask) {
    batch_begin(bench);
    bodies_give(bench, mask);
    uint32_t late = index_of(bench, 0, 2, 2);
    struct ss_piece *piece = &bench->batch->pieces[late];
    CHECK(piece->origin == SS_ORIGIN_SERVER && piece[-1].origin == SS_ORIGIN_SERVER);
    server_fault_from(bench->server, piece->key, piece->key_length, FAULT_STALL, piece->record_offset);
    int comes[PIECES];
    /* Of the late one, half of its bytes come, and so perhaps its first slice, unless that waits for the others. */
    const struct ss_slice *first = &bench->batch->slices[piece->slice_first];
    uint64_t first_bytes = (uint64_t)first->scales_length + first->encoded_length;
    int is_half = first_bytes <= piece->body_length / 2;
    uint32_t progress = 0;
    bench->batch->progress = &progress;
    bench->batch->layers_end = layers_of[0];
    struct stalled stalled = {
        .bench = bench, .slices = slices_through(bench) + (uint64_t)is_half, .layers = piece->layer};
    for (uint32_t i = 0; i < PIECES; i++) {
        comes[i] = i < late || bench->batch->pieces[i].memory != NULL;
        stalled.slices += comes[i] ? LAYER_SLICES : 0;
    }
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, cancel_stalled, &stalled) == 0);
    CHECK_EQUAL(fetch(bench, 1), SS_CANCELLED);
    CHECK(pthread_join(thread, NULL) == 0);
    for (uint32_t i = 0; i < PIECES; i++) {
        /* Of the one before, all slices are there, but the end of its answer perhaps not. */
        CHECK(i + 1 == late || (bench->batch->pieces[i].result == SS_OK) == comes[i]);
    }
    CHECK_EQUAL(piece->result, SS_CANCELLED);
    CHECK_EQUAL(progress, piece->layer);
}

GROUPS_TEST(test_layers_come_one_by_one_while_answers_are_late) {
    check_late_layer(bench, 0);
    bench_serve(bench);
    bench_reconnect(bench);
    check_late_layer(bench, 0x09);
}

/* Layers that were there count, those that lack what is not in the batch do not; nor is a word out of step taken. */
GROUPS_TEST(test_progress_is_told_as_far_as_the_batch_brings_it) {
    struct ss_batch *batch = batch_begin(bench);
    uint32_t words[2] = {7, 7};
    batch->progress = words;
    batch->layers_first = 1;
    batch->layers_end = 3;
    CHECK_EQUAL(fetch(bench, 2), SS_OK);
    CHECK_EQUAL(words[0], 3);
    batch_begin(bench)->progress = words;
    bench->batch->layers_first = bench->batch->layers_end = 2;
    CHECK_EQUAL(fetch(bench, 2), SS_OK);
    CHECK_EQUAL(words[0], 3);
    bench->batch->layers_end = 1;
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, bench->batch, bench->sockets, 2), SS_BAD_ARGUMENT);
    bench->batch->layers_end = 2 + 4096 + 1;
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, bench->batch, bench->sockets, 2), SS_BAD_ARGUMENT);
    bench->batch->layers_end = 3;
    bench->batch->progress = (uint32_t *)(void *)((uint8_t *)words + 1);
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, bench->batch, bench->sockets, 2), SS_BAD_ARGUMENT);
    CHECK_EQUAL(words[1], 7);
}

/* ---- Failure ------------------------------------------------------------------------------------------------- */

/* Layer 3 of chunk 2 of the first group is bad: chunks 0 and 1 are whole all the same, and so is the other group. */
static void check_bad_layer(const struct bench *bench, enum ss_result expected) {
    uint32_t bad = index_of(bench, 0, 2, 3);
    CHECK_EQUAL(bench->batch->pieces[bad].result, expected);
    for (uint32_t i = 0; i < PIECES; i++) {
        const struct ss_piece *piece = &bench->batch->pieces[i];
        if (piece->group == 1 || piece->chunk < 2) {
            CHECK_EQUAL(piece->result, SS_OK);
        } else if (i != bad) {
            CHECK(piece->result == SS_OK || piece->result == SS_SKIPPED || piece->result == expected);
        }
    }
    CHECK_EQUAL(bench->batch->sockets_in_sync, 1);
}

GROUPS_TEST(test_a_bad_layer_costs_its_chunk_and_those_behind_alone) {
    static const struct {
        enum fault fault; /* FAULT_NONE: a bit is wrong */
        enum ss_result result;
    } faults[] = {{FAULT_NONE, SS_CHECKSUM}, {FAULT_MISSING, SS_NOT_FOUND}, {FAULT_ERROR, SS_REFUSED}};
    for (uint32_t i = 0; i < 3 * 6; i++) {
        batch_begin(bench);
        if (i / 3 % 3 > 0) {
            shuffle(bench->batch);
        }
        bodies_give(bench, i / 9 == 0 ? 0 : 0x55);
        struct ss_piece *bad = &bench->batch->pieces[index_of(bench, 0, 2, 3)];
        bad->origin = SS_ORIGIN_SERVER;
        if (faults[i % 3].fault == FAULT_NONE) {
            bench->batch->slices[bad->slice_first].checksum ^= 4;
        }
        server_fault_from(bench->server, bad->key, bad->key_length, faults[i % 3].fault, bad->record_offset);
        CHECK_EQUAL(fetch(bench, 1 + i % CONNECTIONS), faults[i % 3].result);
        check_bad_layer(bench, faults[i % 3].result);
        bench_serve(bench);
    }
}

/* Outstanding pieces of a lost connection fail at once, also those of lower chunks; other pieces are delivered. */
GROUPS_TEST(test_a_lost_connection_fails_all_that_it_owes) {
    static const enum fault faults[] = {FAULT_DISCONNECT, FAULT_GARBAGE};
    for (uint32_t i = 0; i < 12; i++) {
        batch_begin(bench);
        if (i / 2 % 2) {
            shuffle(bench->batch);
        }
        bodies_give(bench, i / 6 ? 0x41 : 0);
        uint32_t bad = index_of(bench, i % 2, 2, layers_of[i % 2] - 1); /* of its record, no range is behind it */
        const struct ss_piece *piece = &bench->batch->pieces[bad];
        bench->batch->pieces[bad].origin = SS_ORIGIN_SERVER;
        server_fault_from(bench->server, piece->key, piece->key_length, faults[i % 2], piece->record_offset);
        uint32_t sockets = 1 + i / 2 % CONNECTIONS;
        CHECK_EQUAL(fetch(bench, sockets), i % 2 ? SS_PROTOCOL : SS_DISCONNECTED);
        CHECK_EQUAL(bench->batch->sockets_in_sync, 0);
        for (uint32_t j = 0; j < PIECES; j++) {
            const struct ss_piece *other = &bench->batch->pieces[j];
            if (sockets == 1 && other->origin == SS_ORIGIN_SERVER) {
                CHECK(j < bad ? !has_failed(other) : other->result != SS_OK);
            }
        }
        bench_serve(bench);
        bench_reconnect(bench);
    }
}

/* ---- What is refused, and the way back ----------------------------------------------------------------------- */

GROUPS_TEST(test_pieces_share_no_slices) {
    struct ss_batch *batch = batch_begin(bench);
    struct ss_piece *last = &batch->pieces[PIECES - 1];
    const struct ss_piece *first = &batch->pieces[index_of(bench, 0, 0, 0)];
    last->slice_first = first->slice_first; /* all else is as it has to be */
    last->group = 0;
    last->chunk = 0;
    last->record_offset = first->record_offset;
    last->body_length = first->body_length;
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, batch, bench->sockets, 1), SS_BAD_ARGUMENT);
}

/* Each group's bounds are its own. */
GROUPS_TEST(test_a_piece_stays_within_its_groups_memory) {
    for (uint32_t group = 0; group < GROUPS; group++) {
        batch_begin(bench);
        bench->batch->groups[group].memory_size--;
        CHECK_EQUAL(pipeline_fetch(bench->pipeline, bench->batch, bench->sockets, 1), SS_BAD_ARGUMENT);
    }
}

GROUPS_TEST(test_records_of_two_groups_are_encoded_in_one_go) {
    struct ss_batch *batch = batch_begin(bench);
    batch->piece_count = 0;
    for (uint32_t i = 0; i < GROUPS * CHUNKS; i++) {
        batch->pieces[batch->piece_count++] = piece_of(bench, i % GROUPS, i / GROUPS, 0, layers_of[i % GROUPS]);
    }
    batch_make_room(batch);
    for (uint32_t group = 0; group < GROUPS; group++) {
        memcpy(batch->groups[group].memory, fixture_of(bench, group)->source, fixture_of(bench, group)->size);
    }
    CHECK_EQUAL(ss_pipeline_encode(bench->pipeline, batch), SS_OK);
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        const struct ss_piece *piece = &batch->pieces[i];
        const struct fixture *fixture = fixture_of(bench, piece->group);
        CHECK_EQUAL(piece->result, SS_OK);
        CHECK_EQUAL(piece->body_length, fixture->chunks[piece->chunk].body_length);
        for (uint32_t j = 0; j < piece->slice_count; j++) {
            const struct ss_slice *known = &fixture->slices[fixture->chunks[piece->chunk].slice_first + j];
            CHECK_EQUAL(batch->slices[piece->slice_first + j].checksum, known->checksum);
        }
    }
}

int main(void) {
    for (int fused = 0; fused <= backend_fuses(); fused++) {
        test_any_order_is_delivered_from_anywhere(fused);
        test_pieces_have_as_many_layers_as_they_like(fused);
        test_layers_come_one_by_one_while_answers_are_late(fused);
        test_progress_is_told_as_far_as_the_batch_brings_it(fused);
        test_a_bad_layer_costs_its_chunk_and_those_behind_alone(fused);
        test_a_lost_connection_fails_all_that_it_owes(fused);
        test_pieces_share_no_slices(fused);
        test_a_piece_stays_within_its_groups_memory(fused);
        test_records_of_two_groups_are_encoded_in_one_go(fused);
    }
    return 0;
}
