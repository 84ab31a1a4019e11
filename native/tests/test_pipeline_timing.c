/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pipeline_timing.c - how near a batch comes to its ideal
 *
 * Ideal: the larger of the slowest stage on its threads alone, and all CPU time (the server's included, which shares
 * the cores here) over the cores. Without arguments a small batch is run once, so that this never rots; with --full
 * the batch of the design: 16 chunks of 64 slices of 256 KiB of symbols (32 bins, Huffman-only Deflate). Prints, and
 * fails only when a batch does, since a shared machine's times are no reason to.
 */
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "pipeline_support.h"

enum { CORES = 2 };

struct setup {
    const char *name;
    struct shape shape; /* of one chunk; it is served under many keys */
    uint32_t chunks;
    uint32_t net_threads;
    int fused;
    int repeats;
};

static uint64_t cpu_ns(clockid_t clock) {
    struct timespec used;
    CHECK(clock_gettime(clock, &used) == 0);
    return (uint64_t)used.tv_sec * 1000000000ULL + (uint64_t)used.tv_nsec;
}

static void name_chunk(struct ss_piece *chunk, uint32_t index) {
    chunk->key_length = (uint32_t)snprintf((char *)chunk->key, sizeof chunk->key, "copy:%u", index);
}

/* Serves the one record under 'chunks' keys from a process of its own; its port comes back through a pipe. */
static pid_t start_server(const struct fixture *fixture, uint32_t chunks, uint16_t *port) {
    int32_t pipes[2];
    CHECK(pipe(pipes) == 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* also where a check fails */
        struct server *server = server_start();
        for (uint32_t i = 0; i < chunks; i++) {
            struct ss_piece chunk;
            name_chunk(&chunk, i);
            server_keep(server, chunk.key, chunk.key_length, fixture->records[0], fixture->record_sizes[0]);
        }
        uint16_t own = server_port(server);
        CHECK(write(pipes[1], &own, sizeof own) == sizeof own);
        for (;;) {
            pause();
        }
    }
    CHECK(read(pipes[0], port, sizeof *port) == sizeof *port);
    close(pipes[0]);
    close(pipes[1]);
    return pid;
}

/* A batch of 'chunks' copies of the fixture's only chunk. */
static struct ss_batch *make_batch(const struct fixture *fixture, uint32_t chunks) {
    struct ss_batch *one = fixture_round(fixture);
    struct ss_batch *batch = calloc(1, sizeof *batch);
    CHECK(batch != NULL);
    *batch = *one;
    uint32_t slices = one->slice_count;
    uint64_t symbols = fixture->dequantization_bytes;
    batch->piece_count = chunks;
    batch->slice_count = chunks * slices;
    batch->pieces = calloc(chunks, sizeof *batch->pieces);
    batch->slices = calloc((size_t)chunks * slices, sizeof *batch->slices);
    batch->groups = calloc(1, sizeof *batch->groups);
    CHECK(batch->groups != NULL);
    *batch->groups = *one->groups;
    batch->groups->memory_size = fixture->size * chunks;
    batch->groups->memory = malloc(batch->groups->memory_size);
    CHECK(batch->pieces != NULL && batch->slices != NULL && batch->groups->memory != NULL);
    memset(batch->groups->memory, 1, batch->groups->memory_size);
    for (uint32_t i = 0; i < chunks; i++) {
        batch->pieces[i] = one->pieces[0];
        name_chunk(&batch->pieces[i], i);
        batch->pieces[i].slice_first = i * slices;
        batch->pieces[i].decompression_offset = i * fixture->decompression_bytes;
        batch->pieces[i].dequantization_offset = i * symbols;
        for (uint32_t j = 0; j < slices; j++) {
            batch->slices[i * slices + j] = one->slices[j];
            batch->slices[i * slices + j].memory_offset += i * fixture->size;
        }
    }
    batch_free(one);
    return batch;
}

static struct ss_pipeline *make_pipeline(const struct setup *setup, const struct fixture *fixture) {
    static const int32_t both[2] = {0, 1};
    struct ss_pipeline_options options = pipeline_options(fixture, setup->fused);
    options.queue_depth = 64;
    options.requests_in_flight = 16;
    options.decompression_bytes = fixture->decompression_bytes * setup->chunks;
    options.dequantization_bytes = setup->fused ? 0 : fixture->dequantization_bytes * setup->chunks;
    options.dma_source_bytes = setup->fused ? 0 : fixture->size * setup->chunks;
    options.store_bytes = 0;
    options.store_threads = 0;
    options.net_threads = setup->net_threads;
    if (sysconf(_SC_NPROCESSORS_ONLN) >= CORES) {
        options.decompress_cores = both;
    }
    struct ss_pipeline *pipeline;
    CHECK_EQUAL(ss_pipeline_create(&options, &pipeline), SS_OK);
    return pipeline;
}

struct sample {
    uint64_t wall_ns;
    uint64_t client_ns;
    uint64_t server_ns;
    struct ss_stage_statistics stages[SS_STAGE_COUNT];
};

static double ideal_ns(const struct setup *setup, const struct sample *sample) {
    const uint32_t threads[4] = {setup->net_threads, 2, 2, 2};
    double ideal = (double)(sample->client_ns + sample->server_ns) / CORES;
    for (int stage = SS_STAGE_NET; stage <= SS_STAGE_DMA; stage++) {
        uint64_t busy = sample->stages[stage].busy_ns;
        if (setup->fused && stage == SS_STAGE_DECOMPRESS) {
            busy += sample->stages[SS_STAGE_DEQUANTIZE].busy_ns;
        }
        double alone = (double)busy / threads[stage];
        ideal = alone > ideal ? alone : ideal;
    }
    return ideal;
}

static void print_sample(const struct setup *setup, const struct ss_batch *batch, const struct sample *sample) {
    double ideal = ideal_ns(setup, sample);
    double slices = (double)batch->slice_count;
    printf(
        "%s: wall %.1f ms, ideal %.1f ms, ratio %.3f; %.2f GB/s delivered; CPU ms: client %.1f server %.1f, net %.1f "
        "decompress %.1f dequantize %.1f dma %.1f, rest %.2f us a slice\n",
        setup->name, (double)sample->wall_ns / 1e6, ideal / 1e6, (double)sample->wall_ns / ideal,
        (double)batch->delivered_bytes / (double)sample->wall_ns, (double)sample->client_ns / 1e6,
        (double)sample->server_ns / 1e6, (double)sample->stages[SS_STAGE_NET].busy_ns / 1e6,
        (double)sample->stages[SS_STAGE_DECOMPRESS].busy_ns / 1e6,
        (double)sample->stages[SS_STAGE_DEQUANTIZE].busy_ns / 1e6, (double)sample->stages[SS_STAGE_DMA].busy_ns / 1e6,
        ((double)sample->client_ns - (double)sample->stages[SS_STAGE_NET].busy_ns -
         (double)sample->stages[SS_STAGE_DECOMPRESS].busy_ns - (double)sample->stages[SS_STAGE_DEQUANTIZE].busy_ns -
         (double)sample->stages[SS_STAGE_DMA].busy_ns) /
            1e3 / slices);
}

static void run_round(const struct setup *setup, struct ss_pipeline *pipeline, struct ss_batch *batch,
                      const int32_t *sockets, clockid_t server_clock) {
    struct sample sample;
    struct ss_stage_statistics before[SS_STAGE_COUNT];
    ss_pipeline_statistics(pipeline, before);
    uint64_t server = cpu_ns(server_clock);
    uint64_t client = cpu_ns(CLOCK_PROCESS_CPUTIME_ID);
    uint64_t begin = now_ns();
    batch->deadline_ns = after_patience();
    CHECK_EQUAL(ss_pipeline_fetch(pipeline, batch, sockets, setup->net_threads), SS_OK);
    sample.wall_ns = now_ns() - begin;
    sample.client_ns = cpu_ns(CLOCK_PROCESS_CPUTIME_ID) - client;
    sample.server_ns = cpu_ns(server_clock) - server;
    ss_pipeline_statistics(pipeline, sample.stages);
    for (int stage = 0; stage < SS_STAGE_COUNT; stage++) {
        sample.stages[stage].busy_ns -= before[stage].busy_ns;
    }
    print_sample(setup, batch, &sample);
}

static void run(const struct setup *setup) {
    struct fixture *fixture = fixture_make(&setup->shape);
    uint16_t port;
    pid_t pid = start_server(fixture, setup->chunks, &port);
    clockid_t server_clock;
    CHECK(clock_getcpuclockid(pid, &server_clock) == 0);
    struct ss_pipeline *pipeline = make_pipeline(setup, fixture);
    struct ss_batch *batch = make_batch(fixture, setup->chunks);
    int32_t sockets[4];
    for (uint32_t i = 0; i < setup->net_threads; i++) {
        sockets[i] = server_connect_port(port);
    }
    for (int i = 0; i < setup->repeats; i++) {
        run_round(setup, pipeline, batch, sockets, server_clock);
    }
    for (uint32_t i = 0; i < setup->chunks; i++) {
        CHECK(memcmp(batch->groups->memory + i * fixture->size, fixture->expected, fixture->size) == 0);
    }
    for (uint32_t i = 0; i < setup->net_threads; i++) {
        close(sockets[i]);
    }
    batch_free(batch);
    ss_pipeline_destroy(pipeline);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    fixture_free(fixture);
}

int main(int argc, char **argv) {
    int full = argc > 1 && strcmp(argv[1], "--full") == 0;
    struct shape deflate = default_shape();
    deflate.chunks = 1;
    deflate.slices = full ? 64 : 4;
    deflate.vectors = full ? 256 : 16;
    deflate.vector_length = 1024;
    struct shape tiny = deflate;
    tiny.codec = SS_CODEC_NONE;
    tiny.quantizer = SS_QUANTIZER_PASSTHROUGH;
    tiny.dtype = SS_DTYPE_UINT8;
    tiny.slices = full ? 2048 : 16;
    tiny.vectors = 4;
    uint32_t chunks = full ? 16 : 2;
    int repeats = full ? 7 : 1;
    const struct setup setups[] = {
        {"fused, 1 connection", deflate, chunks, 1, 1, repeats},
        {"fused, 2 connections", deflate, chunks, 2, 1, repeats},
        {"separate, 1 connection", deflate, chunks, 1, 0, repeats},
        {"separate, 2 connections", deflate, chunks, 2, 0, repeats},
        {"fused, 4 KiB slices", tiny, chunks, 1, 1, repeats},
        {"separate, 4 KiB slices", tiny, chunks, 1, 0, repeats},
    };
    for (size_t i = 0; i < sizeof setups / sizeof setups[0]; i++) {
        run(&setups[i]);
    }
    return 0;
}
