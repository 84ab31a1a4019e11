/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pipeline_failure.c - failing batches: each chunk has the right result, the call returns in time, good chunks are
 * delivered, bad ones are reported, and the next batch is not affected
 */
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "pipeline_support.h"

enum { SOCKETS = 2, BAD_CHUNK = 2 };

/* How late the promptest call came back, after its deadline and after its cancellation: the bound is 10 ms. */
static uint64_t deadline_late_ns = UINT64_MAX;
static uint64_t cancel_late_ns = UINT64_MAX;

static void note_late(const char *what, int fused, uint64_t late_ns, uint64_t *least_ns) {
    printf("%s, fused %d: back %.3f ms after it\n", what, fused, (double)late_ns / 1e6);
    CHECK(late_ns < WAIT_MAX_NS);
    *least_ns = late_ns < *least_ns ? late_ns : *least_ns;
}

struct bench {
    struct fixture *fixture;
    struct server *server;
    struct ss_pipeline *pipeline;
    struct ss_batch *batch;
    int32_t sockets[SOCKETS];
    int fused;
};

static struct bench bench_start(int fused, enum ss_quantizer quantizer) {
    struct shape shape = default_shape();
    shape.quantizer = quantizer;
    struct bench bench = {.fixture = fixture_make(&shape), .server = server_start(), .fused = fused};
    fixture_serve(bench.fixture, bench.server);
    struct ss_pipeline_options options = pipeline_options(bench.fixture, fused);
    CHECK_EQUAL(ss_pipeline_create(&options, &bench.pipeline), SS_OK);
    for (int i = 0; i < SOCKETS; i++) {
        bench.sockets[i] = server_connect(bench.server);
    }
    bench.batch = fixture_round(bench.fixture);
    return bench;
}

static void bench_reconnect(struct bench *bench) {
    for (int i = 0; i < SOCKETS; i++) {
        close(bench->sockets[i]);
        bench->sockets[i] = server_connect(bench->server);
    }
}

static enum ss_result bench_fetch(struct bench *bench) {
    return pipeline_fetch(bench->pipeline, bench->batch, bench->sockets, SOCKETS);
}

/* Everything before the bad chunk is there, the bad one says why, and later ones are whole or admit that they are not.
 */
static void check_chunks(const struct bench *bench, uint32_t bad, enum ss_result expected) {
    for (uint32_t i = 0; i < bench->batch->piece_count; i++) {
        enum ss_result result = bench->batch->pieces[i].result;
        if (i < bad) {
            CHECK_EQUAL(result, SS_OK);
        } else if (i == bad) {
            CHECK_EQUAL(result, expected);
        } else {
            CHECK(result == SS_OK || result == SS_SKIPPED || result == expected);
        }
        if (result == SS_OK) {
            CHECK(fixture_matches(bench->fixture, bench->batch, i));
        }
    }
}

/* The server is well again: the same pipeline fetches everything; on the same connections where they are in step. */
static void check_recovery(struct bench *bench) {
    int in_sync = (int)bench->batch->sockets_in_sync;
    batch_free(bench->batch);
    bench->batch = fixture_round(bench->fixture);
    fixture_serve(bench->fixture, bench->server);
    if (!in_sync) {
        bench_reconnect(bench);
    }
    CHECK_EQUAL(bench_fetch(bench), SS_OK);
    check_chunks(bench, bench->batch->piece_count, SS_OK);
}

static void bench_stop(struct bench *bench) {
    batch_free(bench->batch);
    ss_pipeline_destroy(bench->pipeline);
    for (int i = 0; i < SOCKETS; i++) {
        close(bench->sockets[i]);
    }
    server_stop(bench->server);
    fixture_free(bench->fixture);
}

/* A caller that uses a connection that is out of step finds it disconnected, not the rest of an old answer. */
static void check_no_leftovers(struct bench *bench) {
    batch_free(bench->batch);
    bench->batch = fixture_round(bench->fixture);
    fixture_serve(bench->fixture, bench->server);
    CHECK_EQUAL(bench_fetch(bench), SS_DISCONNECTED);
    check_chunks(bench, 0, SS_DISCONNECTED);
}

static void break_chunk(struct bench *bench, uint32_t chunk, enum fault fault) {
    server_fault(bench->server, bench->fixture->chunks[chunk].key, bench->fixture->chunks[chunk].key_length, fault);
}

static void test_server_faults(int fused) {
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
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        for (uint32_t chunk = 0; chunk < 5; chunk += BAD_CHUNK) { /* the first, one in the middle, the last */
            if (test_is_brief() && chunk != i % 3 * BAD_CHUNK) {
                continue;
            }
            struct bench bench = bench_start(fused, SS_QUANTIZER_BINNED);
            break_chunk(&bench, chunk, faults[i].fault);
            CHECK_EQUAL(bench_fetch(&bench), faults[i].result);
            check_chunks(&bench, chunk, faults[i].result);
            CHECK_EQUAL(bench.batch->sockets_in_sync, faults[i].in_sync);
            if (!faults[i].in_sync) {
                check_no_leftovers(&bench);
            }
            check_recovery(&bench);
            bench_stop(&bench);
        }
    }
}

static void test_the_lowest_failing_chunk_decides(int fused) {
    struct bench bench = bench_start(fused, SS_QUANTIZER_LOSSLESS);
    break_chunk(&bench, 4, FAULT_ERROR);
    break_chunk(&bench, 1, FAULT_MISSING);
    CHECK_EQUAL(bench_fetch(&bench), SS_NOT_FOUND);
    CHECK_EQUAL(bench.batch->pieces[0].result, SS_OK);
    CHECK_EQUAL(bench.batch->pieces[1].result, SS_NOT_FOUND);
    CHECK(bench.batch->pieces[4].result == SS_REFUSED || bench.batch->pieces[4].result == SS_SKIPPED);
    check_recovery(&bench);
    bench_stop(&bench);
}

static void test_server_gone_before_the_round(int fused) {
    struct bench bench = bench_start(fused, SS_QUANTIZER_BINNED);
    break_chunk(&bench, 0, FAULT_DISCONNECT);
    CHECK_EQUAL(bench_fetch(&bench), SS_DISCONNECTED);
    batch_free(bench.batch);
    bench.batch = fixture_round(bench.fixture);
    CHECK_EQUAL(bench_fetch(&bench), SS_DISCONNECTED); /* on the dead sockets */
    check_chunks(&bench, 0, SS_DISCONNECTED);
    check_recovery(&bench);
    bench_stop(&bench);
}

static void test_a_socket_that_is_none(int fused) {
    struct bench bench = bench_start(fused, SS_QUANTIZER_BINNED);
    int32_t pipes[2];
    CHECK(pipe(pipes) == 0);
    CHECK_EQUAL(pipeline_fetch(bench.pipeline, bench.batch, pipes, 1), SS_OS_ERROR);
    check_chunks(&bench, 0, SS_OS_ERROR);
    close(pipes[0]);
    close(pipes[1]);
    check_recovery(&bench);
    bench_stop(&bench);
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

static void test_flipped_bits(int fused, enum ss_quantizer quantizer) {
    struct bench bench = bench_start(fused, quantizer);
    const struct ss_piece *chunk = &bench.fixture->chunks[BAD_CHUNK];
    const struct ss_slice *last = &bench.fixture->slices[chunk->slice_first + chunk->slice_count - 1];
    uint64_t offsets[] = {0, last->offset, last->offset + last->scales_length, chunk->body_length - 1};
    for (size_t i = 0; i < sizeof offsets / sizeof offsets[0]; i++) {
        flip(&bench, BAD_CHUNK, offsets[i]);
        enum ss_result result = flipped_result(bench_fetch(&bench), quantizer);
        check_chunks(&bench, result == SS_OK ? bench.batch->piece_count : BAD_CHUNK, result);
        CHECK_EQUAL(bench.batch->sockets_in_sync, 1);
        check_recovery(&bench); /* on the same connections: they are in step */
        batch_free(bench.batch);
        bench.batch = fixture_round(bench.fixture);
    }
    bench_stop(&bench);
}

/* A stream with a valid checksum that decodes to fewer bytes than the slice says. */
static void test_stream_of_another_length(int fused) {
    struct bench bench = bench_start(fused, SS_QUANTIZER_BINNED);
    struct fixture *fixture = bench.fixture;
    struct ss_slice *slice = &fixture->slices[fixture->chunks[BAD_CHUNK].slice_first + 1];
    uint8_t *stored = fixture->records[BAD_CHUNK] + RECORD_OFFSET + slice->offset;
    uint8_t *symbols = calloc(1, slice->decoded_length);
    CHECK(symbols != NULL);
    CHECK_EQUAL(ss_decompress(SS_CODEC_DEFLATE, stored + slice->scales_length, slice->encoded_length, symbols,
                              slice->decoded_length),
                SS_OK);
    size_t written;
    uint8_t *other = calloc(1, ss_compress_bound(SS_CODEC_DEFLATE, slice->decoded_length));
    CHECK(other != NULL);
    CHECK_EQUAL(ss_compress(SS_CODEC_DEFLATE, symbols, slice->decoded_length - 64, 0, other,
                            ss_compress_bound(SS_CODEC_DEFLATE, slice->decoded_length), &written),
                SS_OK);
    CHECK(written < slice->encoded_length);
    memset(stored + slice->scales_length, 0, slice->encoded_length);
    memcpy(stored + slice->scales_length, other, written);
    slice->checksum = ss_crc32(0, stored, (size_t)slice->scales_length + slice->encoded_length);
    fixture_serve(fixture, bench.server);
    batch_free(bench.batch);
    bench.batch = fixture_round(fixture);
    CHECK_EQUAL(bench_fetch(&bench), SS_BAD_DATA);
    check_chunks(&bench, BAD_CHUNK, SS_BAD_DATA);
    CHECK_EQUAL(bench.batch->sockets_in_sync, 1);
    free(symbols);
    free(other);
    bench_stop(&bench);
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

static void test_stall_ends_at_the_deadline(int fused) {
    struct bench bench = bench_start(fused, SS_QUANTIZER_BINNED);
    break_chunk(&bench, BAD_CHUNK, FAULT_STALL);
    for (uint64_t milliseconds = 250;; milliseconds *= 4) {
        bench.batch->deadline_ns = after_ms(milliseconds);
        CHECK_EQUAL(bench_fetch(&bench), SS_DEADLINE);
        uint64_t back_ns = now_ns();
        CHECK(back_ns >= bench.batch->deadline_ns);
        note_late("deadline", fused, back_ns - bench.batch->deadline_ns, &deadline_late_ns);
        if (is_fetched_up_to(&bench, BAD_CHUNK)) {
            break;
        }
        CHECK(milliseconds * 1000000 < WAIT_MAX_NS); /* no machine stands still that long */
        batch_free(bench.batch);
        bench.batch = fixture_round(bench.fixture);
        bench_reconnect(&bench);
    }
    check_chunks(&bench, BAD_CHUNK, SS_DEADLINE);
    CHECK_EQUAL(bench.batch->sockets_in_sync, 0);
    check_recovery(&bench);
    bench_stop(&bench);
}

static void test_deadline_that_has_passed(int fused) {
    struct bench bench = bench_start(fused, SS_QUANTIZER_BINNED);
    bench.batch->deadline_ns = now_ns() - 1;
    CHECK_EQUAL(bench_fetch(&bench), SS_DEADLINE);
    CHECK_EQUAL(bench.batch->pieces[0].result, SS_DEADLINE);
    CHECK_EQUAL(bench.batch->pieces[1].result, SS_SKIPPED);
    CHECK_EQUAL(bench.batch->sockets_in_sync, 1); /* nothing was sent */
    check_recovery(&bench);
    bench_stop(&bench);
}

struct cancellation {
    struct bench *bench;
    uint64_t at_ns;
};

static void *cancel_when_stalled(void *argument) {
    struct cancellation *cancellation = argument;
    server_wait_stalled(cancellation->bench->server);
    cancellation->at_ns = now_ns();
    ss_batch_cancel(cancellation->bench->batch);
    return NULL;
}

static void test_cancel_from_another_thread(int fused) {
    struct bench bench = bench_start(fused, SS_QUANTIZER_BINNED);
    break_chunk(&bench, BAD_CHUNK, FAULT_STALL);
    struct cancellation cancellation = {.bench = &bench};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, cancel_when_stalled, &cancellation) == 0);
    CHECK_EQUAL(bench_fetch(&bench), SS_CANCELLED);
    uint64_t back_ns = now_ns();
    pthread_join(thread, NULL);
    note_late("cancel", fused, back_ns - cancellation.at_ns, &cancel_late_ns);
    for (uint32_t i = 0; i < bench.batch->piece_count; i++) {
        CHECK(bench.batch->pieces[i].result != SS_OK || fixture_matches(bench.fixture, bench.batch, i));
    }
    CHECK(bench.batch->pieces[BAD_CHUNK].result == SS_CANCELLED || bench.batch->pieces[BAD_CHUNK].result == SS_SKIPPED);
    check_recovery(&bench);
    bench_stop(&bench);
}

static void test_cancelled_before_it_began(int fused) {
    struct bench bench = bench_start(fused, SS_QUANTIZER_BINNED);
    ss_batch_cancel(bench.batch);
    CHECK_EQUAL(bench_fetch(&bench), SS_CANCELLED);
    CHECK_EQUAL(bench.batch->sockets_in_sync, 1);
    check_recovery(&bench);
    bench_stop(&bench);
}

static void *fetch_when_stalled(void *argument) {
    struct bench *bench = argument;
    server_wait_stalled(bench->server);
    struct ss_batch *second = fixture_round(bench->fixture);
    int32_t socket = server_connect(bench->server);
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, second, &socket, 1), SS_BAD_ARGUMENT);
    CHECK_EQUAL(second->groups->memory[0], 0xAA);
    close(socket);
    batch_free(second);
    ss_batch_cancel(bench->batch);
    return NULL;
}

static void test_a_second_batch_at_the_same_time_is_refused(int fused) {
    struct bench bench = bench_start(fused, SS_QUANTIZER_BINNED);
    break_chunk(&bench, BAD_CHUNK, FAULT_STALL);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, fetch_when_stalled, &bench) == 0);
    CHECK_EQUAL(bench_fetch(&bench), SS_CANCELLED);
    pthread_join(thread, NULL);
    check_recovery(&bench);
    bench_stop(&bench);
}

/* ---- A caller's bugs ----------------------------------------------------------------------------------------- */

typedef void (*mutation)(struct ss_batch *batch);

static void no_key(struct ss_batch *r) {
    r->pieces[1].key_length = 0;
}
static void long_key(struct ss_batch *r) {
    r->pieces[1].key_length = sizeof r->pieces[1].key + 1;
}
static void unknown_codec(struct ss_batch *r) {
    r->pieces[1].codec = (enum ss_codec)77;
}
static void negative_codec(struct ss_batch *r) {
    r->pieces[1].codec = (enum ss_codec) - 1;
}
static void unknown_quantizer(struct ss_batch *r) {
    r->groups->quantizer = (enum ss_quantizer)9;
}
static void unknown_dtype(struct ss_batch *r) {
    r->groups->dtype = (enum ss_dtype)9;
}
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
static void unknown_group(struct ss_batch *r) {
    r->pieces[2].group = 1;
}
static void no_chunk(struct ss_batch *r) {
    r->pieces[4].chunk = UINT32_MAX;
}
static void memory_is_null(struct ss_batch *r) {
    free(r->groups->memory);
    r->groups->memory = NULL;
}
static void no_scale_vectors(struct ss_batch *r) {
    r->groups->scale_vectors = 0;
}
static void other_scale_vectors(struct ss_batch *r) {
    r->groups->scale_vectors = 2;
}
static void no_vector_length(struct ss_batch *r) {
    r->groups->vector_length = 0;
}
static void huge_vector_length(struct ss_batch *r) {
    r->groups->vector_length = UINT32_MAX;
}
static void no_memory(struct ss_batch *r) {
    r->groups->memory_size = 0;
}
static void memory_too_short(struct ss_batch *r) {
    r->slices[3].memory_offset = r->groups->memory_size - 16 * 256 * 2 + 1;
}
static void memory_overflow(struct ss_batch *r) {
    r->slices[3].memory_offset = UINT64_MAX - 100;
}
static void slices_past_end(struct ss_batch *r) {
    r->pieces[4].slice_first = UINT32_MAX - 1;
}
static void slices_shared(struct ss_batch *r) {
    r->pieces[4].slice_first -= 1;
}
static void slice_count_zero(struct ss_batch *r) {
    r->pieces[4].slice_count = 0;
}
static void slice_count_huge(struct ss_batch *r) {
    r->pieces[4].slice_count = UINT32_MAX;
}
static void slice_gap(struct ss_batch *r) {
    r->slices[2].offset += 1;
}
static void slice_past_body(struct ss_batch *r) {
    r->slices[5].encoded_length += 1;
}
static void slice_empty(struct ss_batch *r) {
    r->slices[5].encoded_length = 0;
}
static void slice_longer(struct ss_batch *r) {
    r->slices[5].decoded_length += 1;
}
static void slice_more_vectors(struct ss_batch *r) {
    r->slices[5].vectors += 1;
}
static void slice_no_vectors(struct ss_batch *r) {
    r->slices[5].vectors = 0;
}
static void slice_scales(struct ss_batch *r) {
    r->slices[5].scales_length -= 4;
}
static void body_longer(struct ss_batch *r) {
    r->pieces[0].body_length += 1;
}
static void body_huge(struct ss_batch *r) {
    r->pieces[0].body_length = UINT64_MAX;
}
static void record_offset_huge(struct ss_batch *r) {
    r->pieces[0].record_offset = UINT64_MAX - 3;
}
static void stored_overlap(struct ss_batch *r) {
    r->pieces[1].decompression_offset -= 14;
}
static void stored_same(struct ss_batch *r) {
    r->pieces[4].decompression_offset = r->pieces[0].decompression_offset;
}
static void stored_past_end(struct ss_batch *r) {
    r->pieces[4].decompression_offset += 1;
}
static void stored_overflow(struct ss_batch *r) {
    r->pieces[4].decompression_offset = UINT64_MAX - 10;
}
static void no_chunks(struct ss_batch *r) {
    free(r->pieces);
    r->pieces = NULL;
}
static void symbols_overlap(struct ss_batch *r) {
    r->pieces[1].dequantization_offset -= 6;
}
static void symbols_past_end(struct ss_batch *r) {
    r->pieces[4].dequantization_offset += 1;
}

static void check_refused(struct bench *bench, mutation mutate) {
    batch_free(bench->batch);
    bench->batch = fixture_round(bench->fixture);
    mutate(bench->batch);
    CHECK_EQUAL(bench_fetch(bench), SS_BAD_ARGUMENT);
    if (bench->batch->groups != NULL && bench->batch->groups->memory != NULL && bench->batch->group_count > 0) {
        CHECK_EQUAL(bench->batch->groups->memory[0], 0xAA);
    }
    if (bench->batch->pieces != NULL && bench->batch->piece_count <= 5) {
        CHECK_EQUAL(bench->batch->pieces[0].result, SS_BAD_ARGUMENT);
    }
}

static void test_batches_that_do_not_fit(int fused) {
    static const mutation both[] = {no_key,
                                    long_key,
                                    unknown_codec,
                                    negative_codec,
                                    unknown_quantizer,
                                    unknown_dtype,
                                    no_groups,
                                    groups_none,
                                    groups_too_many,
                                    unknown_group,
                                    no_chunk,
                                    memory_is_null,
                                    no_scale_vectors,
                                    other_scale_vectors,
                                    no_vector_length,
                                    huge_vector_length,
                                    no_memory,
                                    memory_too_short,
                                    memory_overflow,
                                    slices_past_end,
                                    slices_shared,
                                    slice_count_zero,
                                    slice_count_huge,
                                    slice_gap,
                                    slice_past_body,
                                    slice_empty,
                                    slice_longer,
                                    slice_more_vectors,
                                    slice_no_vectors,
                                    slice_scales,
                                    body_longer,
                                    body_huge,
                                    record_offset_huge,
                                    stored_overlap,
                                    stored_same,
                                    stored_past_end,
                                    stored_overflow,
                                    no_chunks};
    struct bench bench = bench_start(fused, SS_QUANTIZER_BINNED);
    for (size_t i = 0; i < sizeof both / sizeof both[0]; i++) {
        check_refused(&bench, both[i]);
    }
    if (!fused) {
        check_refused(&bench, symbols_overlap);
        check_refused(&bench, symbols_past_end);
    }
    bench.batch->sockets_in_sync = 1;
    check_recovery(&bench);
    int32_t twice[2] = {bench.sockets[0], bench.sockets[0]};
    int32_t negative[1] = {-1};
    int32_t four[4] = {1000, 1001, 1002, 1003};
    CHECK_EQUAL(pipeline_fetch(bench.pipeline, bench.batch, twice, 2), SS_BAD_ARGUMENT);
    CHECK_EQUAL(pipeline_fetch(bench.pipeline, bench.batch, negative, 1), SS_BAD_ARGUMENT);
    CHECK_EQUAL(pipeline_fetch(bench.pipeline, bench.batch, four, 4), SS_BAD_ARGUMENT);
    CHECK_EQUAL(pipeline_fetch(bench.pipeline, bench.batch, twice, 0), SS_BAD_ARGUMENT);
    CHECK_EQUAL(pipeline_fetch(bench.pipeline, bench.batch, NULL, 1), SS_BAD_ARGUMENT);
    bench_stop(&bench);
}

static void test_more_chunks_than_any_batch_has(void) {
    struct bench bench = bench_start(1, SS_QUANTIZER_BINNED);
    struct ss_batch batch = *bench.batch;
    struct ss_piece *chunks = calloc(20000, sizeof *chunks);
    CHECK(chunks != NULL);
    batch.pieces = chunks;
    batch.piece_count = 20000;
    CHECK_EQUAL(pipeline_fetch(bench.pipeline, &batch, bench.sockets, SOCKETS), SS_BAD_ARGUMENT);
    free(chunks);
    bench_stop(&bench);
}

int main(void) {
    for (int fused = 0; fused <= backend_fuses(); fused++) {
        test_server_faults(fused);
        test_the_lowest_failing_chunk_decides(fused);
        test_server_gone_before_the_round(fused);
        test_a_socket_that_is_none(fused);
        test_flipped_bits(fused, SS_QUANTIZER_BINNED);
        test_flipped_bits(fused, SS_QUANTIZER_LOSSLESS);
        test_stream_of_another_length(fused);
        test_stall_ends_at_the_deadline(fused);
        test_deadline_that_has_passed(fused);
        test_cancel_from_another_thread(fused);
        test_cancelled_before_it_began(fused);
        test_a_second_batch_at_the_same_time_is_refused(fused);
        test_batches_that_do_not_fit(fused);
    }
    test_more_chunks_than_any_batch_has();
    CHECK(deadline_late_ns < PROMPT_NS && cancel_late_ns < PROMPT_NS);
    return 0;
}
