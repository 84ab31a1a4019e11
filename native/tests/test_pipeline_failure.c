/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pipeline_failure.c - failing batches: each chunk has the right result, the call returns in time, good chunks are
 * delivered, bad ones are reported, and the next batch is not affected
 */
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "pipeline_support.h"

enum { BAD_CHUNK = 2 };

/* How late the promptest call came back, after its deadline and after its cancellation: the bound is 10 ms. */
static uint64_t deadline_late_ns = UINT64_MAX;
static uint64_t cancel_late_ns = UINT64_MAX;

static void note_late(const char *what, int fused, uint64_t late_ns, uint64_t *least_ns) {
    printf("%s, fused %d: back %.3f ms after it\n", what, fused, (double)late_ns / 1e6);
    CHECK(late_ns < WAIT_MAX_NS);
    *least_ns = late_ns < *least_ns ? late_ns : *least_ns;
}

/* Everything before the bad chunk is there, the bad one says why, and later ones are whole or admit that they are not.
 */
static void check_chunks(const struct bench *bench, uint32_t bad, enum ss_result expected) {
    for (uint32_t i = 0; i < bench->batch->piece_count; i++) {
        enum ss_result result = bench->batch->pieces[i].result;
        if (i <= bad) {
            CHECK_EQUAL(result, i < bad ? SS_OK : expected);
        } else {
            CHECK(result == SS_OK || result == SS_SKIPPED || result == expected);
        }
        CHECK(result != SS_OK || fixture_matches(bench->fixture, bench->batch, i));
    }
}

/* The server is well again: the same pipeline fetches everything; on the same connections where they are in step. */
static void check_recovery(struct bench *bench) {
    int in_sync = (int)bench->batch->sockets_in_sync;
    bench_begin(bench);
    bench_serve(bench);
    if (!in_sync) {
        bench_reconnect(bench);
    }
    CHECK_EQUAL(bench_fetch(bench), SS_OK);
    check_delivered(bench);
}

/* A caller that uses a connection that is out of step finds it disconnected, not the rest of an old answer. */
static void check_no_leftovers(struct bench *bench) {
    bench_begin(bench);
    bench_serve(bench);
    CHECK_EQUAL(bench_fetch(bench), SS_DISCONNECTED);
    check_chunks(bench, 0, SS_DISCONNECTED);
}

PIPELINE_TEST(test_server_faults, AS_BEFORE, AS_BEFORE) {
    static const struct {
        enum fault fault;
        enum ss_result result;
        uint32_t in_sync;
    } faults[] = {
        {FAULT_MISSING, SS_NOT_FOUND, 1},  {FAULT_NULL, SS_NOT_FOUND, 1},   {FAULT_NULL_RESP3, SS_NOT_FOUND, 1},
        {FAULT_SHORT, SS_NOT_FOUND, 1},    {FAULT_ERROR, SS_REFUSED, 1},    {FAULT_LONG, SS_PROTOCOL, 0},
        {FAULT_GARBAGE, SS_PROTOCOL, 0},   {FAULT_NO_TAIL, SS_PROTOCOL, 0}, {FAULT_DISCONNECT, SS_DISCONNECTED, 0},
        {FAULT_RESET, SS_DISCONNECTED, 0},
    };
    for (size_t i = 0; i < COUNT_OF(faults); i++) {
        for (uint32_t chunk = 0; chunk < 5; chunk += BAD_CHUNK) { /* the first, one in the middle, the last */
            if (test_is_brief() && chunk != i % 3 * BAD_CHUNK) {
                continue;
            }
            bench_begin(bench);
            bench_fault(bench, chunk, faults[i].fault);
            CHECK_EQUAL(bench_fetch(bench), faults[i].result);
            check_chunks(bench, chunk, faults[i].result);
            CHECK_EQUAL(bench->batch->sockets_in_sync, faults[i].in_sync);
            if (!faults[i].in_sync) {
                check_no_leftovers(bench);
            }
            check_recovery(bench);
        }
    }
}

PIPELINE_TEST(test_the_lowest_failing_chunk_decides, shape->quantizer = SS_QUANTIZER_LOSSLESS, AS_BEFORE) {
    bench_fault(bench, 4, FAULT_ERROR);
    bench_fault(bench, 1, FAULT_MISSING);
    CHECK_EQUAL(bench_fetch(bench), SS_NOT_FOUND);
    CHECK_EQUAL(bench->batch->pieces[0].result, SS_OK);
    CHECK_EQUAL(bench->batch->pieces[1].result, SS_NOT_FOUND);
    CHECK(bench->batch->pieces[4].result == SS_REFUSED || bench->batch->pieces[4].result == SS_SKIPPED);
    check_recovery(bench);
}

PIPELINE_TEST(test_server_gone_before_the_round, AS_BEFORE, AS_BEFORE) {
    bench_fault(bench, 0, FAULT_DISCONNECT);
    CHECK_EQUAL(bench_fetch(bench), SS_DISCONNECTED);
    bench_begin(bench);
    CHECK_EQUAL(bench_fetch(bench), SS_DISCONNECTED); /* on the dead sockets */
    check_chunks(bench, 0, SS_DISCONNECTED);
    check_recovery(bench);
}

PIPELINE_TEST(test_a_socket_that_is_none, AS_BEFORE, AS_BEFORE) {
    int32_t pipes[2];
    CHECK(pipe(pipes) == 0);
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, bench_begin(bench), pipes, 1), SS_OS_ERROR);
    check_chunks(bench, 0, SS_OS_ERROR);
    close(pipes[0]);
    close(pipes[1]);
    check_recovery(bench);
}

/* ---- Data that is not what was stored ------------------------------------------------------------------------- */

static void flip(struct bench *bench, uint32_t chunk, uint64_t offset) {
    struct fixture *fixture = bench->fixture;
    fixture->records[chunk][RECORD_OFFSET + offset] ^= 0x10;
    fixture_serve(fixture, bench->server);
    fixture->records[chunk][RECORD_OFFSET + offset] ^= 0x10;
}

/*
 * Checks the result of a batch with a flipped bit. If only an engine's checksum of the decoded bytes is checked, the
 * stream may not decode, or, if the bit has no meaning, decode correctly.
 */
static enum ss_result flipped_result(enum ss_result result, enum ss_quantizer quantizer) {
    int engine_checks = strcmp(test_backend(), "software") != 0 && quantizer == SS_QUANTIZER_LOSSLESS;
    CHECK(result == SS_CHECKSUM || (engine_checks && (result == SS_BAD_DATA || result == SS_OK)));
    return result;
}

static void check_flipped_bits(struct bench *bench) {
    const struct ss_piece *chunk = &bench->fixture->chunks[BAD_CHUNK];
    const struct ss_slice *last = &bench->fixture->slices[chunk->slice_first + chunk->slice_count - 1];
    uint64_t offsets[] = {0, last->offset, last->offset + last->scales_length, chunk->body_length - 1};
    for (size_t i = 0; i < COUNT_OF(offsets); i++) {
        bench_begin(bench);
        flip(bench, BAD_CHUNK, offsets[i]);
        enum ss_result result = flipped_result(bench_fetch(bench), bench->shape.quantizer);
        check_chunks(bench, result == SS_OK ? bench->batch->piece_count : BAD_CHUNK, result);
        CHECK_EQUAL(bench->batch->sockets_in_sync, 1);
        check_recovery(bench); /* on the same connections: they are in step */
    }
}

PIPELINE_TEST(test_flipped_bits_of_binned_data, AS_BEFORE, AS_BEFORE) {
    check_flipped_bits(bench);
}

PIPELINE_TEST(test_flipped_bits_of_lossless_data, shape->quantizer = SS_QUANTIZER_LOSSLESS, AS_BEFORE) {
    check_flipped_bits(bench);
}

/* A stream with a valid checksum that decodes to fewer bytes than the slice says. */
PIPELINE_TEST(test_stream_of_another_length, AS_BEFORE, AS_BEFORE) {
    struct fixture *fixture = bench->fixture;
    struct ss_slice *slice = &fixture->slices[fixture->chunks[BAD_CHUNK].slice_first + 1];
    uint8_t *stored = fixture->records[BAD_CHUNK] + RECORD_OFFSET + slice->offset;
    size_t written, room = ss_compress_bound(SS_CODEC_DEFLATE, slice->decoded_length);
    uint8_t *symbols = calloc(1, slice->decoded_length), *other = calloc(1, room);
    CHECK(symbols != NULL && other != NULL);
    CHECK_EQUAL(ss_decompress(SS_CODEC_DEFLATE, stored + slice->scales_length, slice->encoded_length, symbols,
                              slice->decoded_length),
                SS_OK);
    CHECK_EQUAL(ss_compress(SS_CODEC_DEFLATE, symbols, slice->decoded_length - 64, 0, other, room, &written), SS_OK);
    CHECK(written < slice->encoded_length);
    memset(stored + slice->scales_length, 0, slice->encoded_length);
    memcpy(stored + slice->scales_length, other, written);
    slice->checksum = ss_crc32(0, stored, (size_t)slice->scales_length + slice->encoded_length);
    bench_serve(bench);
    CHECK_EQUAL(bench_fetch(bench), SS_BAD_DATA);
    check_chunks(bench, BAD_CHUNK, SS_BAD_DATA);
    CHECK_EQUAL(bench->batch->sockets_in_sync, 1);
    free(symbols);
    free(other);
}

/* ---- Time ---------------------------------------------------------------------------------------------------- */

/* Returns whether the chunks before the stalled chunk had enough time. */
static int is_fetched_up_to(const struct bench *bench, uint32_t chunk) {
    for (uint32_t i = 0; i < chunk; i++) {
        if (bench->batch->pieces[i].result != SS_OK) {
            return 0;
        }
    }
    return 1;
}

PIPELINE_TEST(test_stall_ends_at_the_deadline, AS_BEFORE, AS_BEFORE) {
    bench_fault(bench, BAD_CHUNK, FAULT_STALL);
    for (uint64_t milliseconds = 250;; milliseconds *= 4) {
        bench_begin(bench)->deadline_ns = after_ms(milliseconds);
        CHECK_EQUAL(bench_fetch(bench), SS_DEADLINE);
        uint64_t back_ns = ss_now_ns();
        CHECK(back_ns >= bench->batch->deadline_ns);
        note_late("deadline", bench->fused, back_ns - bench->batch->deadline_ns, &deadline_late_ns);
        if (is_fetched_up_to(bench, BAD_CHUNK)) {
            break;
        }
        CHECK(milliseconds * 1000000 < WAIT_MAX_NS); /* no machine stands still that long */
        bench_reconnect(bench);
    }
    check_chunks(bench, BAD_CHUNK, SS_DEADLINE);
    CHECK_EQUAL(bench->batch->sockets_in_sync, 0);
    check_recovery(bench);
}

PIPELINE_TEST(test_deadline_that_has_passed, AS_BEFORE, AS_BEFORE) {
    bench_begin(bench)->deadline_ns = ss_now_ns() - 1;
    CHECK_EQUAL(bench_fetch(bench), SS_DEADLINE);
    CHECK_EQUAL(bench->batch->pieces[0].result, SS_DEADLINE);
    CHECK_EQUAL(bench->batch->pieces[1].result, SS_SKIPPED);
    CHECK_EQUAL(bench->batch->sockets_in_sync, 1); /* nothing was sent */
    check_recovery(bench);
}

static _Atomic uint64_t cancelled_at_ns;

static void *cancel_timed(void *argument) {
    struct bench *bench = argument;
    server_wait_stalled(bench->server);
    cancelled_at_ns = ss_now_ns();
    ss_batch_cancel(bench->batch);
    return NULL;
}

PIPELINE_TEST(test_cancel_from_another_thread, AS_BEFORE, AS_BEFORE) {
    pthread_t thread;
    bench_fault(bench, BAD_CHUNK, FAULT_STALL);
    bench_begin(bench);
    CHECK(pthread_create(&thread, NULL, cancel_timed, bench) == 0);
    CHECK_EQUAL(bench_fetch(bench), SS_CANCELLED);
    uint64_t back_ns = ss_now_ns();
    pthread_join(thread, NULL);
    note_late("cancel", bench->fused, back_ns - cancelled_at_ns, &cancel_late_ns);
    enum ss_result result = bench->batch->pieces[BAD_CHUNK].result;
    CHECK(result == SS_CANCELLED || result == SS_SKIPPED);
    check_recovery(bench);
}

PIPELINE_TEST(test_cancelled_before_it_began, AS_BEFORE, AS_BEFORE) {
    ss_batch_cancel(bench_begin(bench));
    CHECK_EQUAL(bench_fetch(bench), SS_CANCELLED);
    CHECK_EQUAL(bench->batch->sockets_in_sync, 1);
    check_recovery(bench);
}

static void *fetch_when_stalled(void *argument) {
    struct bench *bench = argument;
    server_wait_stalled(bench->server);
    struct ss_batch *second = fixture_round(bench->fixture);
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, second, &bench->sockets[SOCKETS], 1), SS_BAD_ARGUMENT);
    CHECK_EQUAL(second->groups->memory[0], 0xAA);
    batch_free(second);
    ss_batch_cancel(bench->batch);
    return NULL;
}

PIPELINE_TEST(test_a_second_batch_at_the_same_time_is_refused, AS_BEFORE, AS_BEFORE) {
    pthread_t thread;
    bench_fault(bench, BAD_CHUNK, FAULT_STALL);
    bench_begin(bench);
    CHECK(pthread_create(&thread, NULL, fetch_when_stalled, bench) == 0);
    CHECK_EQUAL(bench_fetch(bench), SS_CANCELLED);
    pthread_join(thread, NULL);
    check_recovery(bench);
}

/* ---- A caller's bugs ----------------------------------------------------------------------------------------- */

/* Mutations of a batch 'r', each of which must be refused: by a name for the debugger, and a statement. */
#define MUTATIONS(X)                                                                                                   \
    X(no_key, r->pieces[1].key_length = 0)                                                                             \
    X(long_key, r->pieces[1].key_length = sizeof r->pieces[1].key + 1)                                                 \
    X(unknown_codec, r->pieces[1].codec = (enum ss_codec)77)                                                           \
    X(negative_codec, r->pieces[1].codec = (enum ss_codec) - 1)                                                        \
    X(unknown_quantizer, r->groups->quantizer = (enum ss_quantizer)9)                                                  \
    X(unknown_dtype, r->groups->dtype = (enum ss_dtype)9)                                                              \
    X(unknown_group, r->pieces[2].group = 1)                                                                           \
    X(no_chunk, r->pieces[4].chunk = UINT32_MAX)                                                                       \
    X(no_scale_vectors, r->groups->scale_vectors = 0)                                                                  \
    X(other_scale_vectors, r->groups->scale_vectors = 2)                                                               \
    X(no_vector_length, r->groups->vector_length = 0)                                                                  \
    X(huge_vector_length, r->groups->vector_length = UINT32_MAX)                                                       \
    X(no_memory, r->groups->memory_size = 0)                                                                           \
    X(memory_too_short, r->slices[3].memory_offset = r->groups->memory_size - 16 * 256 * 2 + 1)                        \
    X(memory_overflow, r->slices[3].memory_offset = UINT64_MAX - 100)                                                  \
    X(slices_past_end, r->pieces[4].slice_first = UINT32_MAX - 1)                                                      \
    X(slices_shared, r->pieces[4].slice_first -= 1)                                                                    \
    X(slice_count_zero, r->pieces[4].slice_count = 0)                                                                  \
    X(slice_count_huge, r->pieces[4].slice_count = UINT32_MAX)                                                         \
    X(slice_gap, r->slices[2].offset += 1)                                                                             \
    X(slice_past_body, r->slices[5].encoded_length += 1)                                                               \
    X(slice_empty, r->slices[5].encoded_length = 0)                                                                    \
    X(slice_longer, r->slices[5].decoded_length += 1)                                                                  \
    X(slice_more_vectors, r->slices[5].vectors += 1)                                                                   \
    X(slice_no_vectors, r->slices[5].vectors = 0)                                                                      \
    X(slice_scales, r->slices[5].scales_length -= 4)                                                                   \
    X(body_longer, r->pieces[0].body_length += 1)                                                                      \
    X(body_huge, r->pieces[0].body_length = UINT64_MAX)                                                                \
    X(record_offset_huge, r->pieces[0].record_offset = UINT64_MAX - 3)                                                 \
    X(stored_overlap, r->pieces[1].decompression_offset -= 14)                                                         \
    X(stored_same, r->pieces[4].decompression_offset = r->pieces[0].decompression_offset)                              \
    X(stored_past_end, r->pieces[4].decompression_offset += 1)                                                         \
    X(stored_overflow, r->pieces[4].decompression_offset = UINT64_MAX - 10)

/* What only buffers between the stages have. */
#define SEPARATE_MUTATIONS(X)                                                                                          \
    X(symbols_overlap, r->pieces[1].dequantization_offset -= 6)                                                        \
    X(symbols_past_end, r->pieces[4].dequantization_offset += 1)

#define MUTATION_FUNCTION(name, statement)                                                                             \
    static void name(struct ss_batch *r) { statement; }
#define MUTATION_ENTRY(name, statement) name,
MUTATIONS(MUTATION_FUNCTION)
SEPARATE_MUTATIONS(MUTATION_FUNCTION)

static void no_groups(struct ss_batch *r) {
    free(r->groups->memory);
    free(r->groups);
    r->groups = NULL;
}

static void groups_none(struct ss_batch *r) {
    free(r->groups->memory);
    r->group_count = 0;
}

static void groups_too_many(struct ss_batch *r) {
    struct ss_group one = *r->groups;
    free(r->groups);
    r->group_count = 65;
    r->groups = calloc(r->group_count, sizeof one);
    CHECK(r->groups != NULL);
    for (uint32_t i = 0; i < r->group_count; i++) {
        r->groups[i] = one;
        r->groups[i].memory = i == 0 ? one.memory : malloc(one.memory_size);
    }
}

static void memory_is_null(struct ss_batch *r) {
    free(r->groups->memory);
    r->groups->memory = NULL;
}

static void no_chunks(struct ss_batch *r) {
    free(r->pieces);
    r->pieces = NULL;
}

static void check_refused(struct bench *bench, void (*mutate)(struct ss_batch *batch)) {
    struct ss_batch *batch = bench_begin(bench);
    mutate(batch);
    CHECK_EQUAL(bench_fetch(bench), SS_BAD_ARGUMENT);
    if (batch->groups != NULL && batch->groups->memory != NULL && batch->group_count > 0) {
        CHECK_EQUAL(batch->groups->memory[0], 0xAA);
    }
    if (batch->pieces != NULL && batch->piece_count <= 5) {
        CHECK_EQUAL(batch->pieces[0].result, SS_BAD_ARGUMENT);
    }
}

PIPELINE_TEST(test_batches_that_do_not_fit, AS_BEFORE, AS_BEFORE) {
    static void (*const both[])(struct ss_batch *) = {MUTATIONS(MUTATION_ENTRY) no_groups, groups_none, groups_too_many,
                                                      memory_is_null, no_chunks};
    static void (*const separate[])(struct ss_batch *) = {SEPARATE_MUTATIONS(MUTATION_ENTRY)};
    for (size_t i = 0; i < COUNT_OF(both); i++) {
        check_refused(bench, both[i]);
    }
    for (size_t i = 0; i < COUNT_OF(separate) && !bench->fused; i++) {
        check_refused(bench, separate[i]);
    }
    bench->batch->sockets_in_sync = 1;
    check_recovery(bench);
    int32_t twice[2] = {bench->sockets[0], bench->sockets[0]};
    int32_t negative[1] = {-1};
    int32_t four[4] = {1000, 1001, 1002, 1003};
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, bench->batch, twice, 2), SS_BAD_ARGUMENT);
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, bench->batch, negative, 1), SS_BAD_ARGUMENT);
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, bench->batch, four, 4), SS_BAD_ARGUMENT);
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, bench->batch, twice, 0), SS_BAD_ARGUMENT);
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, bench->batch, NULL, 1), SS_BAD_ARGUMENT);
}

PIPELINE_TEST(test_more_chunks_than_any_batch_has, AS_BEFORE, AS_BEFORE) {
    struct ss_batch batch = *bench_begin(bench);
    batch.piece_count = 20000;
    batch.pieces = calloc(batch.piece_count, sizeof *batch.pieces);
    CHECK(batch.pieces != NULL);
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, &batch, bench->sockets, SOCKETS), SS_BAD_ARGUMENT);
    free(batch.pieces);
}

int main(void) {
    for (int fused = 0; fused <= backend_fuses(); fused++) {
        test_server_faults(fused);
        test_the_lowest_failing_chunk_decides(fused);
        test_server_gone_before_the_round(fused);
        test_a_socket_that_is_none(fused);
        test_flipped_bits_of_binned_data(fused);
        test_flipped_bits_of_lossless_data(fused);
        test_stream_of_another_length(fused);
        test_stall_ends_at_the_deadline(fused);
        test_deadline_that_has_passed(fused);
        test_cancel_from_another_thread(fused);
        test_cancelled_before_it_began(fused);
        test_a_second_batch_at_the_same_time_is_refused(fused);
        test_batches_that_do_not_fit(fused);
    }
    test_more_chunks_than_any_batch_has(1);
    CHECK(deadline_late_ns < PROMPT_NS && cancel_late_ns < PROMPT_NS);
    return 0;
}
