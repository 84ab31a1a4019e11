/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_fixture.c - records made with the kernels alone, so that the pipeline is not its own witness */
#include <string.h>
#include <unistd.h>

#include "pipeline/internal.h"
#include "pipeline_support.h"

static void fill(uint8_t *data, uint64_t size, enum ss_dtype dtype) {
    size_t element = ss_dtype_size(dtype);
    for (uint64_t offset = 0; offset < size; offset += element) {
        float value = (float)random_bell();
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if (dtype == SS_DTYPE_BFLOAT16) {
            bits >>= 16;
        } else if (dtype != SS_DTYPE_FLOAT32) {
            bits = (uint32_t)(int32_t)(value * 8.0F) & 0xff;     /* for bytes; float16 takes it as small subnormals */
            bits &= dtype == SS_DTYPE_FLOAT8_E4M3 ? 0xbf : 0xff; /* no NaN there */
        }
        memcpy(data + offset, &bits, element);
    }
}

struct shape default_shape(void) {
    return (struct shape){.codec = SS_CODEC_DEFLATE,
                          .quantizer = SS_QUANTIZER_BINNED,
                          .dtype = SS_DTYPE_BFLOAT16,
                          .bins = 32,
                          .scale_vectors = 1,
                          .chunks = 5,
                          .slices = 6,
                          .vectors = 16,
                          .vector_length = 256};
}

/* Encodes slice 'index', whose raw bytes are at 'raw', at 'target'; returns the bytes that it took. */
static uint64_t encode_slice(struct fixture *fixture, uint32_t index, uint64_t raw, uint8_t *target) {
    const struct shape *shape = &fixture->shape;
    struct ss_slice *slice = &fixture->slices[index];
    int binned = shape->quantizer == SS_QUANTIZER_BINNED;
    uint32_t elements = shape->vectors * shape->vector_length;
    slice->vectors = shape->vectors;
    slice->decoded_length = elements * (uint32_t)(binned ? 1 : ss_dtype_size(shape->dtype));
    slice->bins = shape->bins + 2 * (index % 2); /* so that it matters whose bins are taken */
    slice->scales_length = binned ? 4 * ((shape->vectors + shape->scale_vectors - 1) / shape->scale_vectors) : 0;
    slice->memory_offset = raw;
    uint8_t *symbols = malloc(slice->decoded_length);
    CHECK(symbols != NULL);
    size_t element = ss_dtype_size(shape->dtype);
    uint32_t together = binned ? shape->scale_vectors : shape->vectors;
    for (uint32_t first = 0; first < shape->vectors; first += together) {
        uint32_t count = shape->vectors - first < together ? shape->vectors - first : together;
        size_t at = (size_t)first * shape->vector_length, length = (size_t)count * shape->vector_length;
        uint8_t *scale = target + 4 * (first / together);
        uint8_t *made = symbols + at * (binned ? 1 : element);
        CHECK_EQUAL(ss_quantize(shape->quantizer, shape->dtype, slice->bins, fixture->source + raw + at * element, 1,
                                length, made, scale),
                    SS_OK);
        CHECK_EQUAL(ss_dequantize(shape->quantizer, shape->dtype, made, scale, 1, length,
                                  fixture->expected + raw + at * element),
                    SS_OK);
    }
    size_t written, row_length = slice->decoded_length / shape->vectors;
    CHECK_EQUAL(ss_compress(shape->codec, symbols, slice->decoded_length, row_length, target + slice->scales_length,
                            ss_compress_bound(shape->codec, slice->decoded_length), &written),
                SS_OK);
    slice->encoded_length = (uint32_t)written;
    slice->checksum = ss_crc32(0, target, slice->scales_length + written);
    slice->decoded_crc32 = ss_crc32(0, symbols, slice->decoded_length);
    free(symbols);
    return slice->scales_length + written;
}

/* Slices are delivered in reverse order, so that no test passes by luck of order. */
static void make_chunk(struct fixture *fixture, uint32_t index, uint64_t slice_bytes) {
    const struct shape *shape = &fixture->shape;
    struct ss_piece *chunk = &fixture->chunks[index];
    uint64_t room = RECORD_OFFSET;
    room += shape->slices * (4ULL * shape->vectors + ss_compress_bound(shape->codec, slice_bytes));
    uint8_t *record = malloc(room);
    CHECK(record != NULL);
    memset(record, 0x5A, RECORD_OFFSET);
    chunk->key_length = (uint32_t)snprintf((char *)chunk->key, sizeof chunk->key, "chunk:%u", index);
    chunk->codec = shape->codec;
    chunk->chunk = index;
    chunk->record_offset = RECORD_OFFSET;
    chunk->slice_first = index * shape->slices;
    chunk->slice_count = shape->slices;
    chunk->decompression_offset = fixture->decompression_bytes + 13;
    chunk->dequantization_offset = fixture->dequantization_bytes + 5;
    uint64_t symbols = 0;
    for (uint32_t i = 0; i < shape->slices; i++) {
        uint32_t slice = chunk->slice_first + i;
        uint64_t raw = (chunk->slice_first + shape->slices - 1 - i) * slice_bytes;
        fixture->slices[slice].offset = chunk->body_length;
        chunk->body_length += encode_slice(fixture, slice, raw, record + RECORD_OFFSET + chunk->body_length);
        symbols += fixture->slices[slice].decoded_length;
    }
    fixture->records[index] = record;
    fixture->record_sizes[index] = RECORD_OFFSET + chunk->body_length;
    fixture->stored_bytes += chunk->body_length;
    fixture->decompression_bytes = chunk->decompression_offset + chunk->body_length;
    fixture->dequantization_bytes = chunk->dequantization_offset + symbols;
}

struct fixture *fixture_make(const struct shape *shape) {
    struct fixture *fixture = calloc(1, sizeof *fixture);
    CHECK(fixture != NULL);
    fixture->shape = *shape;
    uint64_t slice_bytes = (uint64_t)shape->vectors * shape->vector_length * ss_dtype_size(shape->dtype);
    fixture->size = slice_bytes * shape->slices * shape->chunks;
    fixture->source = malloc(fixture->size);
    fixture->expected = malloc(fixture->size);
    fixture->records = calloc(shape->chunks, sizeof *fixture->records);
    fixture->record_sizes = calloc(shape->chunks, sizeof *fixture->record_sizes);
    fixture->chunks = calloc(shape->chunks, sizeof *fixture->chunks);
    fixture->slices = calloc((size_t)shape->chunks * shape->slices, sizeof *fixture->slices);
    CHECK(fixture->source != NULL && fixture->expected != NULL && fixture->records != NULL);
    CHECK(fixture->record_sizes != NULL && fixture->chunks != NULL && fixture->slices != NULL);
    fill(fixture->source, fixture->size, shape->dtype);
    for (uint32_t i = 0; i < shape->chunks; i++) {
        make_chunk(fixture, i, slice_bytes);
    }
    if (shape->quantizer != SS_QUANTIZER_BINNED) {
        CHECK(memcmp(fixture->source, fixture->expected, fixture->size) == 0);
    }
    return fixture;
}

void fixture_free(struct fixture *fixture) {
    for (uint32_t i = 0; i < fixture->shape.chunks; i++) {
        free(fixture->records[i]);
    }
    free(fixture->records);
    free(fixture->record_sizes);
    free(fixture->chunks);
    free(fixture->slices);
    free(fixture->source);
    free(fixture->expected);
    free(fixture);
}

void fixture_serve(const struct fixture *fixture, struct server *server) {
    for (uint32_t i = 0; i < fixture->shape.chunks; i++) {
        const struct ss_piece *chunk = &fixture->chunks[i];
        server_keep(server, chunk->key, chunk->key_length, fixture->records[i], fixture->record_sizes[i]);
        server_fault(server, chunk->key, chunk->key_length, FAULT_NONE);
    }
}

struct ss_batch *fixture_round(const struct fixture *fixture) {
    const struct shape *shape = &fixture->shape;
    struct ss_batch *batch = calloc(1, sizeof *batch);
    CHECK(batch != NULL);
    batch->piece_count = shape->chunks;
    batch->slice_count = shape->chunks * shape->slices;
    batch->pieces = calloc(batch->piece_count, sizeof *batch->pieces);
    batch->slices = calloc(batch->slice_count, sizeof *batch->slices);
    batch->group_count = 1;
    batch->groups = calloc(1, sizeof *batch->groups);
    CHECK(batch->pieces != NULL && batch->slices != NULL && batch->groups != NULL);
    batch->groups->memory = aligned_alloc(64, (fixture->size + 63) / 64 * 64); /* as registered memory is */
    CHECK(batch->groups->memory != NULL);
    memcpy(batch->pieces, fixture->chunks, batch->piece_count * sizeof *batch->pieces);
    memcpy(batch->slices, fixture->slices, batch->slice_count * sizeof *batch->slices);
    memset(batch->groups->memory, 0xAA, fixture->size);
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        batch->pieces[i].result = (enum ss_result)99; /* must be overwritten */
    }
    batch->groups->memory_size = fixture->size;
    batch->groups->quantizer = shape->quantizer;
    batch->groups->dtype = shape->dtype;
    batch->groups->scale_vectors = shape->scale_vectors;
    batch->groups->vector_length = shape->vector_length;
    batch->deadline_ns = after_patience();
    return batch;
}

void batch_free(struct ss_batch *batch) {
    free(batch->pieces);
    free(batch->slices);
    for (uint32_t i = 0; batch->groups != NULL && i < batch->group_count; i++) {
        free(batch->groups[i].memory);
    }
    free(batch->groups);
    free(batch);
}

void batch_make_room(struct ss_batch *batch) {
    uint64_t offset = 0;
    for (uint32_t i = 0; i < batch->piece_count; i++) {
        struct ss_piece *piece = &batch->pieces[i];
        piece->decompression_offset = offset;
        for (uint32_t j = 0; j < piece->slice_count; j++) {
            const struct ss_slice *slice = &batch->slices[piece->slice_first + j];
            offset += slice->scales_length + ss_compress_bound(piece->codec, slice->decoded_length);
        }
    }
}

int fixture_matches(const struct fixture *fixture, const struct ss_batch *batch, uint32_t chunk) {
    uint64_t size = fixture->size / fixture->shape.chunks;
    return memcmp(batch->groups->memory + chunk * size, fixture->expected + chunk * size, size) == 0;
}

struct ss_piece fixture_piece(const struct fixture *fixture, struct ss_slice *slices, uint32_t chunk, uint32_t layer,
                              uint32_t layers, uint32_t layer_slices) {
    struct ss_piece piece = fixture->chunks[chunk];
    piece.result = (enum ss_result)99; /* must be overwritten */
    piece.layer = layer;
    piece.slice_first += layer * layer_slices;
    piece.slice_count = layers * layer_slices;
    piece.body_length = 0;
    const struct ss_slice *first = &fixture->slices[piece.slice_first];
    for (uint32_t i = 0; i < piece.slice_count; i++) {
        piece.body_length += (uint64_t)first[i].scales_length + first[i].encoded_length;
        slices[piece.slice_first + i] = first[i];
        slices[piece.slice_first + i].offset -= first->offset;
    }
    piece.record_offset += first->offset;
    piece.decompression_offset += first->offset;
    piece.dequantization_offset += (uint64_t)layer * layer_slices * first->decoded_length;
    return piece;
}

int fixture_piece_matches(const struct fixture *fixture, const struct ss_batch *batch, const struct ss_piece *piece) {
    const struct shape *shape = &fixture->shape;
    size_t size = (size_t)shape->vectors * shape->vector_length * ss_dtype_size(shape->dtype);
    int same = 1;
    for (uint32_t i = 0; i < piece->slice_count; i++) {
        uint64_t offset = batch->slices[piece->slice_first + i].memory_offset;
        same &= memcmp(batch->groups[piece->group].memory + offset, fixture->expected + offset, size) == 0;
    }
    return same;
}

const char *test_backend(void) {
    const char *name = getenv("SHADOWSERVE_TEST_BACKEND");
    return name != NULL ? name : "software";
}

static int backend_is_software(void) {
    return strcmp(test_backend(), "software") == 0;
}

int backend_fuses(void) {
    return backend_is_software();
}

enum ss_result pipeline_fetch(struct ss_pipeline *pipeline, struct ss_batch *batch, const int32_t *sockets,
                              uint32_t socket_count) {
    struct ss_registered_memory *registered[GROUPS_MAX] = {NULL};
    for (uint32_t i = 0; batch->groups != NULL && i < batch->group_count && i < GROUPS_MAX; i++) {
        struct ss_group *group = &batch->groups[i];
        const struct ss_memory memory = {.kind = SS_MEMORY_LOCAL, .address = group->memory, .size = group->memory_size};
        if (group->registered == NULL && ss_memory_register(pipeline, &memory, &registered[i]) == SS_OK) {
            group->registered = registered[i];
        }
    }
    enum ss_result result = ss_pipeline_fetch(pipeline, batch, sockets, socket_count);
    for (uint32_t i = 0; i < GROUPS_MAX; i++) {
        if (registered[i] != NULL) {
            batch->groups[i].registered = NULL;
            ss_memory_release(registered[i]);
        }
    }
    return result;
}

struct ss_pipeline_options pipeline_options(const struct fixture *fixture, int fused) {
    fused = fused && backend_is_software();
    static const int32_t any[4] = {-1, -1, -1, -1};
    struct ss_pipeline_options options = {
        .options_size = sizeof options,
        .backend = test_backend(),
        .fused = (uint32_t)fused,
        .queue_depth = 16,
        .requests_in_flight = 4,
        .pin_memory = 1,
        .decompression_bytes = fixture->decompression_bytes,
        .dequantization_bytes = fused ? 0 : fixture->dequantization_bytes,
        .dma_source_bytes = fused ? 0 : fixture->size,
        .store_bytes = 2 * fixture->size + (1 << 20),
        .net_cores = any,
        .decompress_cores = any,
        .dequantize_cores = any,
        .dma_cores = any,
        .store_cores = any,
        .net_threads = 3,
        .decompress_threads = 2,
        .dequantize_threads = 2,
        .dma_threads = 2,
        .store_threads = 2,
        .poll_interval_us = 100, /* ten times the default: a look costs a wake-up, and here nothing is measured */
    };
    return options;
}

/* ---- Benches ------------------------------------------------------------------------------------------------- */

void bench_prepare(struct bench *bench) {
    bench->fixture = fixture_make(&bench->shape);
    bench->options = pipeline_options(bench->fixture, bench->fused);
}

void bench_open(struct bench *bench) {
    CHECK_EQUAL(bench->backend == NULL ? ss_pipeline_create(&bench->options, &bench->pipeline)
                                       : ss_pipeline_create_with(&bench->options, bench->backend, &bench->pipeline),
                SS_OK);
}

void bench_close(struct bench *bench) {
    ss_pipeline_destroy(bench->pipeline);
    bench->pipeline = NULL;
}

void bench_start(struct bench *bench) {
    bench->node_count = bench->options.nodes_max != 0 ? bench->options.nodes_max : 1;
    bench->socket_count = bench->node_count == 1 ? SOCKETS + 1 : bench->node_count * SOCKETS;
    for (uint32_t node = 0; node < bench->node_count; node++) {
        bench->servers[node] = server_start();
    }
    bench->server = bench->servers[0];
    bench_serve(bench);
    bench_open(bench);
    memset(bench->sockets, -1, sizeof bench->sockets);
    bench_reconnect(bench);
}

static void bench_disconnect(struct bench *bench) {
    for (uint32_t i = 0; i < bench->socket_count; i++) {
        if (bench->sockets[i] >= 0) {
            close(bench->sockets[i]);
        }
    }
}

static void bench_end(struct bench *bench) {
    bench_free_bodies(bench);
    if (bench->batch != NULL) {
        batch_free(bench->batch);
    }
}

void bench_stop(struct bench *bench) {
    bench_end(bench);
    bench_close(bench);
    bench_disconnect(bench);
    for (uint32_t node = 0; node < bench->node_count; node++) {
        server_stop(bench->servers[node]);
    }
    fixture_free(bench->fixture);
    if (bench->other != NULL) {
        fixture_free(bench->other);
    }
}

struct ss_batch *bench_begin(struct bench *bench) {
    bench_end(bench);
    bench->batch = fixture_round(bench->fixture);
    return bench->batch;
}

void bench_body(struct bench *bench, uint32_t index) {
    struct ss_piece *piece = &bench->batch->pieces[index];
    const struct fixture *fixture = piece->group == 0 ? bench->fixture : bench->other;
    uint8_t *body = malloc(piece->body_length);
    CHECK(body != NULL && index < BODIES_MAX);
    memcpy(body, fixture->records[piece->chunk] + piece->record_offset, piece->body_length);
    piece->origin = SS_ORIGIN_MEMORY;
    piece->memory = bench->bodies[index] = body;
}

void bench_free_bodies(struct bench *bench) {
    for (uint32_t i = 0; i < BODIES_MAX; i++) {
        free(bench->bodies[i]);
        bench->bodies[i] = NULL;
    }
}

void bench_serve(struct bench *bench) {
    for (uint32_t node = 0; node < bench->node_count; node++) {
        fixture_serve(bench->fixture, bench->servers[node]);
        if (bench->other != NULL) {
            fixture_serve(bench->other, bench->servers[node]);
        }
    }
}

void bench_reconnect(struct bench *bench) {
    bench_disconnect(bench);
    for (uint32_t i = 0; i < bench->socket_count; i++) {
        bench->sockets[i] = server_connect(bench->servers[bench->node_count == 1 ? 0 : i / SOCKETS]);
    }
}

void bench_fault(struct bench *bench, uint32_t chunk, enum fault fault) {
    const struct ss_piece *piece = &bench->fixture->chunks[chunk];
    server_fault(bench->server, piece->key, piece->key_length, fault);
}

enum ss_result bench_fetch_over(struct bench *bench, uint32_t sockets) {
    struct ss_batch *batch = bench->batch != NULL ? bench->batch : bench_begin(bench);
    enum ss_result result = pipeline_fetch(bench->pipeline, batch, bench->sockets, sockets);
    for (uint32_t i = 0; batch->pieces != NULL && i < batch->piece_count && result != SS_BAD_ARGUMENT; i++) {
        CHECK(batch->pieces[i].result != SS_OK || fixture_matches(bench->fixture, batch, batch->pieces[i].chunk));
    }
    return result;
}

enum ss_result bench_fetch(struct bench *bench) {
    return bench_fetch_over(bench, bench->node_count * SOCKETS);
}

void check_delivered(const struct bench *bench) {
    for (uint32_t i = 0; i < bench->batch->piece_count; i++) {
        CHECK_EQUAL(bench->batch->pieces[i].result, SS_OK);
        CHECK(fixture_matches(bench->fixture, bench->batch, bench->batch->pieces[i].chunk));
    }
    CHECK_EQUAL(bench->batch->delivered_bytes, bench->fixture->size);
    CHECK_EQUAL(bench->batch->sockets_in_sync, 1);
}

static void *cancel_when_stalled(void *argument) {
    struct bench *bench = argument;
    server_wait_stalled(bench->server);
    ss_batch_cancel(bench->batch);
    return NULL;
}

void bench_cancel_stalled(struct bench *bench, pthread_t *thread) {
    CHECK(pthread_create(thread, NULL, cancel_when_stalled, bench) == 0);
}

void emulate(const char *name, const char *value) {
    char variable[64];
    (void)snprintf(variable, sizeof variable, "DOCA_EMULATOR_%s", name);
    CHECK((value != NULL ? setenv(variable, value, 1) : unsetenv(variable)) == 0);
}
