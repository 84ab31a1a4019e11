/* SPDX-License-Identifier: Apache-2.0 */
/*
 * count_instructions.c - how many instructions one call of each hot kernel runs, for each ISA of this CPU
 *
 * The number does not depend on the machine's load. On x86-64 the process sets its trap flag: each instruction ends in
 * a SIGTRAP, which takes 1 to 15 us, so the data is small. With --marks nothing is counted here: SIGUSR1 is raised
 * before each call and SIGUSR2 after it, for an emulator that counts; the first pair encloses nothing.
 *
 * Every kernel is called once before it is counted, so that dynamic linking and a thread's memory do not count. Prints
 * "compiler NAME-MAJOR ARCHITECTURE", then "KERNEL ISA INSTRUCTIONS BYTES" for each. Bytes are of elements for the
 * quantizers, of symbols for the codecs.
 */
#include "shadowserve.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

/* STREAM_SIZE is for codecs: tables take their share of a real slice's time, but are not the whole of it. */
enum { VECTORS = 2, VECTOR_LENGTH = 1024, COUNT = VECTORS * VECTOR_LENGTH, STREAM_SIZE = 8192, STREAMS = 3 };
/*
 * A block of kvrans. Encoding is mostly planning, which has few bytes to work on; so it has fewer columns, and is
 * counted for vector kernels only. Scalar decoding takes many instructions, so a quarter of the rows is enough.
 */
enum { ROWS = 256, ROWS_SCALAR = 64, COLUMNS_ENCODED = 16, COLUMNS_DECODED = 64, ROWS_SIZE = ROWS * COLUMNS_DECODED };
enum { STREAM_SIZE_MAX = 2 * ROWS_SIZE, TARGET_SIZE = 4 * ROWS_SIZE };

/* Of 'weighted': heads, the first half of whose channels are rotated with the second. */
enum { HEAD = 128, PAIRS = HEAD / 2, EXACT_SIZE = 8 };

#define TRAP_FLAG 0x100u

static int marks;

static void fail(const char *what) {
    fprintf(stderr, "count_instructions: %s\n", what);
    exit(2);
}

static void must(enum ss_result result, const char *what) {
    if (result != SS_OK) {
        fail(what);
    }
}

/* ---- Data: the same everywhere, so integers and exact floats only ---------------------------------------------- */

struct data {
    uint8_t *elements; /* COUNT bfloat16 */
    uint8_t *symbols;  /* COUNT of the quantizer */
    uint8_t *target;
    float scales[VECTORS];
    enum ss_quantizer quantizer;
    enum ss_dtype dtype;
    uint8_t *plain; /* STREAM_SIZE symbols */
    uint8_t *rows;  /* ROWS_SIZE symbols, each channel with a spread of its own, and as many that are noise */
    float row_scales[ROWS];
    float steps[2 * VECTOR_LENGTH], centres[8 * VECTOR_LENGTH], turns[2 * PAIRS * VECTORS];
    double frequencies[PAIRS]; /* zero: a library's cosine differs between machines, but hardly of zero */
    struct ss_channels channels;
    uint32_t row; /* of the channels: keys or values */
    uint8_t *exact;
    size_t rows_count;
    size_t columns;
    uint8_t *stream;
    size_t stream_size;
    uint32_t checksum;
};

static uint64_t random64(void) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * 0x2545F4914F6CDD1Du;
}

/* random_bell() is roughly normal around 0, with a spread of 1; a sum of integers, so exact. */
static float random_bell(void) {
    int64_t sum = 0;
    for (int term = 0; term < 12; term++) {
        sum += (int64_t)(random64() >> 48);
    }
    return (float)(sum - 6 * 65536) / 65536.0f;
}

/* symbol_of() is one of 32 bins: -15 to 15. */
static uint8_t symbol_of(float value) {
    return (uint8_t)(int8_t)(value > 15.0f ? 15.0f : value < -15.0f ? -15.0f : value);
}

static void *allocate(size_t size) {
    void *memory = aligned_alloc(64, (size + 63) / 64 * 64);
    if (memory == NULL) {
        fail("no memory");
    }
    memset(memory, 0, size);
    return memory;
}

static void data_make(struct data *data) {
    data->elements = allocate(4 * COUNT);
    data->symbols = allocate(4 * COUNT);
    data->target = allocate(TARGET_SIZE);
    data->rows = allocate(2 * ROWS_SIZE);
    data->plain = allocate(STREAM_SIZE);
    data->stream = allocate(STREAM_SIZE_MAX);
    for (size_t index = 0; index < COUNT; index++) {
        float value = random_bell();
        memcpy(data->elements + 2 * index, (const uint8_t *)&value + 2, 2); /* its upper half; little-endian */
    }
    for (size_t index = 0; index < STREAM_SIZE; index++) {
        data->plain[index] = symbol_of(random_bell() * 4.0f);
    }
    for (size_t index = 0; index < ROWS_SIZE; index++) {
        data->rows[index] = symbol_of(random_bell() * (float)(2 + index % COLUMNS_ENCODED % 5));
    }
    for (size_t index = ROWS_SIZE; index < 2 * ROWS_SIZE; index++) {
        data->rows[index] = (uint8_t)(random64() >> 40);
    }
    for (size_t index = 0; index < 2 * VECTOR_LENGTH; index++) {
        data->steps[index] = 0.25f;
    }
    for (size_t index = 0; index < 2 * PAIRS * VECTORS; index++) {
        data->turns[index] = index / PAIRS % 2 == 0 ? 0.75f : 0.5f;
    }
    data->channels = (struct ss_channels){.steps = data->steps,
                                          .centres = data->centres,
                                          .frequencies = data->frequencies,
                                          .turns = data->turns,
                                          .rows = 2,
                                          .kinds = 2,
                                          .vector_length = VECTOR_LENGTH,
                                          .head_length = HEAD,
                                          .pairs = PAIRS,
                                          .tokens = VECTORS};
    data->exact = allocate(ss_weighted_exact_max(SS_DTYPE_BFLOAT16, VECTORS, VECTOR_LENGTH));
    for (size_t row = 0; row < ROWS; row++) {
        data->row_scales[row] = 0.125f + (float)row;
    }
}

/* ---- Kernels --------------------------------------------------------------------------------------------------- */

static void run_nothing(struct data *data) {
    (void)data;
}

static void run_quantize(struct data *data) {
    must(ss_quantize(data->quantizer, data->dtype, 32, data->elements, VECTORS, VECTOR_LENGTH, data->symbols,
                     data->scales),
         "ss_quantize");
}

static void run_dequantize(struct data *data) {
    must(ss_dequantize(data->quantizer, data->dtype, data->symbols, data->scales, VECTORS, VECTOR_LENGTH, data->target),
         "ss_dequantize");
}

static void run_weigh(struct data *data) {
    size_t exact_size = 0;
    must(ss_quantize_weighted(SS_DTYPE_BFLOAT16, &data->channels, data->row, 1000, data->elements, VECTORS,
                              data->symbols, data->exact, &exact_size),
         "ss_quantize_weighted");
}

static void run_unweigh(struct data *data) {
    must(ss_dequantize_weighted(SS_DTYPE_BFLOAT16, &data->channels, data->row, data->symbols, data->exact, EXACT_SIZE,
                                VECTORS, data->target),
         "ss_dequantize_weighted");
}

static void run_deflate_encode(struct data *data) {
    must(ss_compress(SS_CODEC_DEFLATE, data->plain, STREAM_SIZE, 0, data->stream, STREAM_SIZE_MAX, &data->stream_size),
         "ss_compress");
}

static void run_deflate_decode(struct data *data) {
    struct ss_stream streams[STREAMS];
    for (size_t index = 0; index < STREAMS; index++) {
        streams[index] = (struct ss_stream){.source = data->stream,
                                            .target = data->target + index * STREAM_SIZE,
                                            .source_size = data->stream_size,
                                            .target_size = STREAM_SIZE};
    }
    ss_decompress_many(SS_CODEC_DEFLATE, streams, STREAMS);
    for (size_t index = 0; index < STREAMS; index++) {
        must(streams[index].result, "ss_decompress_many");
    }
}

/* planes_of() returns how many rows are coded for each of elements, as 'quantizer' says. */
static size_t planes_of(const struct data *data) {
    return data->quantizer == SS_QUANTIZER_LOSSLESS ? 2 : 1;
}

static void run_kvrans_encode(struct data *data) {
    must(ss_compress(SS_CODEC_KVRANS, data->rows, planes_of(data) * data->rows_count * data->columns, data->columns,
                     data->stream, STREAM_SIZE_MAX, &data->stream_size),
         "ss_compress");
}

static void run_kvrans_decode(struct data *data) {
    must(
        ss_decompress(SS_CODEC_KVRANS, data->stream, data->stream_size, data->target, data->rows_count * data->columns),
        "ss_decompress");
}

/* To elements, binned ones or lossless ones of two planes; the symbols, if there are any, go behind them.
 */
static void run_kvrans_elements(struct data *data) {
    struct ss_stream stream = {.source = data->stream,
                               .target = data->target + 2 * ROWS_SIZE,
                               .source_size = data->stream_size,
                               .target_size = planes_of(data) * data->rows_count * data->columns};
    const struct ss_elements elements = {.scales = data->row_scales,
                                         .target = data->target,
                                         .vectors = data->rows_count,
                                         .vector_length = data->columns,
                                         .scale_vectors = 1,
                                         .quantizer = data->quantizer,
                                         .dtype = SS_DTYPE_BFLOAT16};

    ss_decode_many(SS_CODEC_KVRANS, &stream, &elements, 1);
    must(stream.result, "ss_decode_many");
}

static void run_crc32(struct data *data) {
    data->checksum += ss_crc32(0, data->plain, STREAM_SIZE);
}

/* ---- Stepping -------------------------------------------------------------------------------------------------- */

typedef void (*kernel)(struct data *);

#ifdef __x86_64__
static volatile uint64_t steps;
static volatile uint64_t last_address;

/* A string instruction that repeats itself traps each time, at the same address. */
static void step_handle(int signal_number, siginfo_t *info, void *context) {
    uint64_t address = (uint64_t)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
    (void)signal_number;
    (void)info;
    steps += address != last_address;
    last_address = address;
}

static uint64_t steps_by_trap_flag(kernel run, struct data *data) {
    struct sigaction action = {.sa_sigaction = step_handle, .sa_flags = SA_SIGINFO};

    sigaction(SIGTRAP, &action, NULL);
    steps = 0;
    __builtin_ia32_writeeflags_u64(__builtin_ia32_readeflags_u64() | TRAP_FLAG);
    run(data);
    __builtin_ia32_writeeflags_u64(__builtin_ia32_readeflags_u64() & ~(unsigned long long)TRAP_FLAG);
    return steps;
}

#else
static uint64_t steps_by_trap_flag(kernel run, struct data *data) {
    (void)run;
    (void)data;
    fail("this architecture needs an emulator that counts, and --marks");
    return 0;
}
#endif

static void marks_ignore(int signal_number) {
    (void)signal_number;
}

static uint64_t steps_of(kernel run, struct data *data) {
    if (!marks) {
        return steps_by_trap_flag(run, data);
    }
    raise(SIGUSR1);
    run(data);
    raise(SIGUSR2);
    return 0;
}

/* count() prints one line. 'bytes' is what one call goes through. */
static void count(const char *name, const char *isa, kernel run, struct data *data, size_t bytes) {
    static uint64_t overhead;
    static int measured;

    if (!measured) {
        measured = 1;
        overhead = steps_of(run_nothing, data);
    }
    run(data);
    printf("%s %s %llu %zu\n", name, isa, (unsigned long long)(steps_of(run, data) - overhead), bytes);
    fflush(stdout);
}

/* ---- What is counted ------------------------------------------------------------------------------------------- */

static void count_quantizers(struct data *data, const char *isa) {
    data->quantizer = SS_QUANTIZER_BINNED;
    data->dtype = SS_DTYPE_BFLOAT16;
    count("quantize-bfloat16", isa, run_quantize, data, 2 * COUNT);
    count("dequantize-bfloat16", isa, run_dequantize, data, 2 * COUNT);
    data->dtype = SS_DTYPE_FLOAT16;
    count("dequantize-float16", isa, run_dequantize, data, 2 * COUNT);
    for (data->row = 0; data->row < 2; data->row++) {
        count(data->row == 0 ? "weigh-keys-16" : "weigh-values-16", isa, run_weigh, data, 2 * COUNT);
        count(data->row == 0 ? "unweigh-keys-16" : "unweigh-values-16", isa, run_unweigh, data, 2 * COUNT);
    }
    data->quantizer = SS_QUANTIZER_LOSSLESS;
    count("lossless-split-16", isa, run_quantize, data, 2 * COUNT);
    count("lossless-merge-16", isa, run_dequantize, data, 2 * COUNT);
}

/* Elements of a stream are counted where they have kernels of their own; scalar ones are two that are counted. */
static void count_kvrans(struct data *data, const char *isa, int scalar) {
    const size_t cells = (size_t)COLUMNS_DECODED * (scalar ? ROWS_SCALAR : ROWS);

    data->quantizer = SS_QUANTIZER_BINNED;
    data->rows_count = scalar ? ROWS_SCALAR : ROWS;
    data->columns = COLUMNS_ENCODED;
    if (!scalar) {
        count("kvrans-encode", isa, run_kvrans_encode, data, data->rows_count * data->columns);
    }
    data->columns = COLUMNS_DECODED;
    run_kvrans_encode(data);
    count("kvrans-decode", isa, run_kvrans_decode, data, cells);
    if (scalar) {
        return;
    }
    if (strcmp(isa, "neon") != 0) {
        count("kvrans-elements-16", isa, run_kvrans_elements, data, cells);
    }
    data->quantizer = SS_QUANTIZER_LOSSLESS;
    run_kvrans_encode(data);
    count("kvrans-lossless-16", isa, run_kvrans_elements, data, cells);
}

/* A library computes CRC-32. It chooses by the CPU and not by ss_isa_force(): the ISA here is its name and choice. */
static void count_crc32(struct data *data) {
#ifdef __x86_64__
    const char *library = ss_codec_implementation(SS_CODEC_DEFLATE);
    const char *multiply = __builtin_cpu_supports("vpclmulqdq") ? "vpclmulqdq" : "pclmulqdq";
    char isa[64];
    snprintf(isa, sizeof isa, "%.*s-%s", (int)strcspn(library, " "), library, multiply);
    count("crc32", isa, run_crc32, data, STREAM_SIZE);
#else
    count("crc32", "any", run_crc32, data, STREAM_SIZE);
#endif
}

static void compiler_print(void) {
#ifdef __clang__
    printf("compiler clang-%d ", __clang_major__);
#else
    printf("compiler gcc-%d ", __GNUC__);
#endif
#if defined(__x86_64__)
    puts("x86_64");
#elif defined(__aarch64__)
    puts("aarch64");
#else
    puts("other");
#endif
}

int main(int argument_count, char **arguments) {
    static const char *const isa_names[] = {"scalar", "avx2", "avx512", "neon"};
    static struct data data;
    struct sigaction action = {.sa_handler = marks_ignore};

    marks = argument_count > 1 && strcmp(arguments[1], "--marks") == 0;
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGUSR2, &action, NULL);
    compiler_print();
    data_make(&data);
    for (enum ss_isa isa = SS_ISA_SCALAR; isa <= SS_ISA_NEON; isa++) {
        if (ss_isa_force(isa) != SS_OK) {
            continue;
        }
        count_quantizers(&data, isa_names[isa]);
        count_kvrans(&data, isa_names[isa], isa == SS_ISA_SCALAR);
    }
    if (ss_codec_implementation(SS_CODEC_DEFLATE) != NULL) { /* a build for an emulator may do without libraries */
        count("deflate-encode", "any", run_deflate_encode, &data, STREAM_SIZE);
        count("deflate-decode", "any", run_deflate_decode, &data, STREAMS * STREAM_SIZE);
        if (strncmp(ss_codec_implementation(SS_CODEC_DEFLATE), "isa-l", 5) == 0) {
            count_crc32(&data);
        }
    }
    return 0;
}
