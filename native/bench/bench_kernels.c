/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_kernels.c - GB/s of each kernel, for each ISA of this CPU, beside memcpy
 *
 * Prints one line for each: bytes of elements (or of symbols, for the codecs) per second of CPU time on one core, best
 * of several runs, and for the quantizers the share of memcpy's speed on the same elements. The data is KV-like: each
 * channel has its own spread. A slice fits the second-level cache, as it does in the pipeline.
 *
 * bench_kernels [SECONDS_PER_LINE]
 */
#include "shadowserve.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { VECTORS = 256, VECTOR_LENGTH = 1024, COUNT = VECTORS * VECTOR_LENGTH, ROUNDS = 5, STREAMS_MAX = 4 };

static double seconds_per_line = 0.1;
static uint64_t random_state = 88172645463325252u;

/* CPU time, so that other processes on the machine count less. */
static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static double uniform(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (double)(random_state >> 11) * 0x1p-53;
}

static double normal(void) {
    return sqrt(-2 * log(1 - uniform())) * cos(6.283185307179586 * uniform());
}

static void must(enum ss_result result, const char *what) {
    if (result != SS_OK) {
        fprintf(stderr, "bench_kernels: %s returned %d\n", what, (int)result);
        exit(1);
    }
}

struct buffers {
    uint8_t *elements; /* COUNT of the dtype in use */
    uint8_t *decoded;
    uint8_t *symbols;
    uint8_t *stream;
    float scales[VECTORS];
    size_t stream_size;
    size_t streams;
    enum ss_quantizer quantizer;
    enum ss_dtype dtype;
    enum ss_codec codec;
    size_t vector_length;
    uint32_t bins;
    uint32_t checksum;
};

static void run_memcpy(struct buffers *b) {
    memcpy(b->decoded, b->elements, COUNT * ss_dtype_size(b->dtype));
    __asm__ volatile("" ::"r"(b->decoded) : "memory");
}

static void run_quantize(struct buffers *b) {
    must(ss_quantize(b->quantizer, b->dtype, b->bins, b->elements, VECTORS, VECTOR_LENGTH, b->symbols, b->scales),
         "ss_quantize");
}

static void run_dequantize(struct buffers *b) {
    static float scales[COUNT / 16];
    size_t vectors = COUNT / b->vector_length;
    for (size_t vector = 0; vector < vectors; vector++)
        scales[vector] = 0.25f;
    must(ss_dequantize(b->quantizer, b->dtype, b->symbols, scales, vectors, b->vector_length, b->decoded),
         "ss_dequantize");
}

static void run_compress(struct buffers *b) {
    must(ss_compress(b->codec, b->symbols, COUNT, b->vector_length, b->stream, ss_compress_bound(b->codec, COUNT),
                     &b->stream_size),
         "ss_compress");
}

static void run_decompress(struct buffers *b) {
    must(ss_decompress(b->codec, b->stream, b->stream_size, b->decoded, COUNT), "ss_decompress");
}

/* The same stream several times over, each to a target of its own, as the slices of a chunk come. */
static void run_decompress_many(struct buffers *b) {
    struct ss_stream streams[STREAMS_MAX];
    for (size_t index = 0; index < b->streams; index++)
        streams[index] = (struct ss_stream){.source = b->stream,
                                            .target = b->decoded + index * COUNT,
                                            .source_size = b->stream_size,
                                            .target_size = COUNT};
    ss_decompress_many(b->codec, streams, b->streams);
    for (size_t index = 0; index < b->streams; index++)
        must(streams[index].result, "ss_decompress_many");
}

/* The same, and each slice's values right after its symbols, as the fused pipeline has it. */
static void run_decompress_dequantize(struct buffers *b) {
    static float scales[VECTORS];
    for (size_t vector = 0; vector < VECTORS; vector++)
        scales[vector] = 0.25f;
    must(ss_decompress(b->codec, b->stream, b->stream_size, b->symbols, COUNT), "ss_decompress");
    must(ss_dequantize(b->quantizer, b->dtype, b->symbols, scales, VECTORS, VECTOR_LENGTH, b->decoded),
         "ss_dequantize");
}

static void run_crc32(struct buffers *b) {
    b->checksum += ss_crc32(0, b->symbols, COUNT);
}

/* rate() returns the best GB/s of ROUNDS runs over 'bytes' each call. */
static double rate(void (*run)(struct buffers *), struct buffers *buffers, size_t bytes) {
    double best = 0;

    run(buffers);
    for (int round = 0; round < ROUNDS; round++) {
        double start = now(), elapsed;
        size_t calls = 0;
        do {
            run(buffers);
            calls++;
            elapsed = now() - start;
        } while (elapsed < seconds_per_line / ROUNDS);
        if ((double)calls * (double)bytes / elapsed > best)
            best = (double)calls * (double)bytes / elapsed;
    }
    return best / 1e9;
}

static void elements_fill(struct buffers *b) {
    double spreads[VECTOR_LENGTH];

    for (size_t channel = 0; channel < VECTOR_LENGTH; channel++)
        spreads[channel] = exp(0.5 * normal());
    for (size_t index = 0; index < COUNT; index++) {
        float value = (float)(normal() * spreads[index % VECTOR_LENGTH]);
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        if (b->dtype == SS_DTYPE_FLOAT32) {
            memcpy(b->elements + 4 * index, &bits, 4);
        } else if (b->dtype == SS_DTYPE_FLOAT8_E4M3) { /* likewise, bias 7 */
            uint32_t magnitude = bits & 0x7FFFFFFF;
            magnitude = magnitude < 0x3C800000 ? 0 : magnitude - 0x3C000000;
            b->elements[index] = (uint8_t)((bits >> 24 & 0x80) | (magnitude >= 0x7F << 20 ? 0x7E : magnitude >> 20));
        } else { /* float16's bits of a float of this range: exponent bias 15, mantissa cut */
            uint16_t half = (uint16_t)(bits >> 16);
            if (b->dtype == SS_DTYPE_FLOAT16)
                half = (bits & 0x7FFFFFFF) < 0x38800000
                           ? 0
                           : (uint16_t)((bits >> 16 & 0x8000) | ((bits & 0x7FFFFFFF) - 0x38000000) >> 13);
            memcpy(b->elements + 2 * index, &half, 2);
        }
    }
}

/*
 * In the pipeline the elements go to memory that is in no cache, so both ways are also measured into a destination much
 * larger than the caches, one slice after the other.
 */
static void bench_cold_destination(struct buffers *b) {
    enum { SLICES = 256 };
    size_t slice_size = COUNT * ss_dtype_size(b->dtype);
    uint8_t *decoded = b->decoded, *destination = malloc(SLICES * slice_size);
    double best[2] = {1e9, 1e9};

    if (destination == NULL)
        return;
    memset(destination, 0, SLICES * slice_size);
    for (int round = 0; round < 2 * ROUNDS; round++) {
        double start = now(), elapsed;
        for (size_t slice = 0; slice < SLICES; slice++) {
            b->decoded = destination + slice * slice_size;
            (round % 2 ? run_dequantize : run_memcpy)(b);
        }
        elapsed = now() - start;
        if (elapsed < best[round % 2])
            best[round % 2] = elapsed;
    }
    printf("binned bfloat16, best isa, destination in memory: memcpy %.2f GB/s, dequantize %.2f GB/s, x %.2f\n",
           (double)(SLICES * slice_size) / best[0] / 1e9, (double)(SLICES * slice_size) / best[1] / 1e9,
           best[0] / best[1]);
    b->decoded = decoded;
    free(destination);
}

static void bench_quantizers(struct buffers *b) {
    static const char *const isa_names[] = {"scalar", "avx2", "avx512", "neon", "neon_crc"};
    static const char *const dtype_names[] = {"uint8", "float16", "bfloat16", "float32", "float8_e4m3"};

    printf("%-12s %-11s %-8s %10s %10s %10s %10s   (GB/s of elements; x: of memcpy)\n", "quantizer", "dtype", "isa",
           "memcpy", "quantize", "dequantize", "x");
    for (b->quantizer = SS_QUANTIZER_LOSSLESS; b->quantizer <= SS_QUANTIZER_BINNED; b->quantizer++) {
        for (b->dtype = SS_DTYPE_FLOAT16; b->dtype <= SS_DTYPE_FLOAT8_E4M3; b->dtype++) {
            size_t bytes = COUNT * ss_dtype_size(b->dtype);
            elements_fill(b);
            for (enum ss_isa isa = SS_ISA_SCALAR; isa <= SS_ISA_NEON_CRC; isa++) {
                double copy, quantize, dequantize;
                if (ss_isa_force(isa) != SS_OK)
                    continue;
                copy = rate(run_memcpy, b, bytes);
                quantize = rate(run_quantize, b, bytes);
                dequantize = rate(run_dequantize, b, bytes);
                printf("%-12s %-11s %-8s %10.2f %10.2f %10.2f %10.2f\n",
                       b->quantizer == SS_QUANTIZER_BINNED ? "binned" : "lossless", dtype_names[b->dtype],
                       isa_names[isa], copy, quantize, dequantize, dequantize / copy);
            }
        }
    }
    b->dtype = SS_DTYPE_BFLOAT16;
    b->quantizer = SS_QUANTIZER_BINNED;
    for (b->vector_length = 64; b->vector_length <= 128; b->vector_length *= 2)
        printf("binned bfloat16, best isa, vectors of %zu: dequantize %.2f GB/s\n", b->vector_length,
               rate(run_dequantize, b, COUNT * 2));
    b->vector_length = VECTOR_LENGTH;
    bench_cold_destination(b);
}

/* bench_codec() prints one line for the codec in use. */
static void bench_codec(struct buffers *b) {
    double compress, decompress, both;

    run_quantize(b);
    compress = rate(run_compress, b, COUNT);
    decompress = rate(run_decompress, b, COUNT);
    both = rate(run_decompress_dequantize, b, COUNT);
    printf("%-28s %6u %10.3f %10.3f %10.3f %8.3f\n", ss_codec_implementation(b->codec), b->bins, compress, decompress,
           both, 8.0 * (double)b->stream_size / COUNT);
}

static void bench_codecs(struct buffers *b) {
    printf("\n%-28s %6s %10s %10s %10s %8s   (GB/s of symbols; to bf16: with dequantization)\n", "codec", "bins",
           "compress", "decompress", "to bf16", "bits");
    b->dtype = SS_DTYPE_BFLOAT16;
    b->quantizer = SS_QUANTIZER_BINNED;
    elements_fill(b);
    printf("memcpy of bf16: %.2f GB/s of symbols\n", rate(run_memcpy, b, COUNT));
    for (b->bins = 16; b->bins <= 256; b->bins *= b->bins == 64 ? 4 : 2) {
        for (b->codec = SS_CODEC_DEFLATE; b->codec <= SS_CODEC_ZSTD; b->codec++) {
            if (ss_codec_implementation(b->codec) != NULL)
                bench_codec(b);
        }
        b->codec = SS_CODEC_KVRANS;
        for (enum ss_isa isa = SS_ISA_SCALAR; isa <= SS_ISA_NEON_CRC; isa++) { /* ends with the best one */
            if (ss_isa_force(isa) == SS_OK)
                bench_codec(b);
        }
        b->codec = SS_CODEC_DEFLATE;
        run_compress(b);
        for (b->streams = 1; b->streams <= STREAMS_MAX; b->streams++)
            printf("%-19s x %zu streams %5u %10s %10.3f\n", "deflate", b->streams, b->bins, "",
                   rate(run_decompress_many, b, COUNT * b->streams));
    }
    printf("crc32: %.2f GB/s\n", rate(run_crc32, b, COUNT));
}

int main(int argument_count, char **arguments) {
    static struct buffers buffers = {.vector_length = VECTOR_LENGTH, .bins = 32};

    if (argument_count > 1)
        seconds_per_line = atof(arguments[1]);
    buffers.elements = malloc(COUNT * 4);
    buffers.decoded = malloc(COUNT * 4);
    buffers.symbols = malloc(COUNT * 4);
    buffers.stream = malloc(COUNT * 8);
    if (!buffers.elements || !buffers.decoded || !buffers.symbols || !buffers.stream)
        return 1;
    bench_quantizers(&buffers);
    bench_codecs(&buffers);
    free(buffers.elements);
    free(buffers.decoded);
    free(buffers.symbols);
    free(buffers.stream);
    return 0;
}
