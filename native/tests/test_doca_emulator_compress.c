/* SPDX-License-Identifier: Apache-2.0 */
/* test_doca_emulator_compress.c - what the decompression engine does with good streams, bad ones, and sizes */
#include <zlib.h>

#include "doca_fixture.h"

#ifdef SS_HAVE_LZ4
#include <lz4.h>
#endif

enum { STREAM_AT = 0, PLAIN_AT = 4 << 20 };

/* Decompresses 'size' bytes at STREAM_AT to 'capacity' bytes at PLAIN_AT; returns the report. */
static struct report inflate_once(struct bench *bench, size_t size, size_t capacity, size_t *produced) {
    struct doca_buf *source = buf_data(bench, STREAM_AT, size), *target = buf_empty(bench, PLAIN_AT, capacity);
    report_count = 0;
    inflate_submit(bench, source, target, 0);
    progress_reports(bench->pe, 1);
    *produced = data_length(target);
    buf_release(source);
    buf_release(target);
    return reports[0];
}

/* Facts 8 [N29, DPDK]: raw streams of stored, fixed and dynamic blocks; CRC-32 and Adler-32 are of the plain bytes. */
static void test_streams_are_inflated_with_their_checksums(void) {
    static const size_t sizes[] = {0, 1, 40, 70000, 2097152};
    struct bench bench;
    uint8_t *plain = malloc(2097152);
    size_t produced;
    settings(NULL);
    bench_open(&bench);
    for (size_t i = 0; i < 2 * sizeof sizes / sizeof sizes[0]; i++) {
        size_t size = sizes[i / 2] - (i % 2 && sizes[i / 2] == 2097152 ? 4096 : 0); /* noise grows when it is stored */
        if (i % 2 == 0) {
            text_fill(plain, size);
        } else {
            random_fill(plain, size);
        }
        size_t stream = deflate_raw(plain, size, bench.memory + STREAM_AT, PLAIN_AT);
        struct report report = inflate_once(&bench, stream, size > 0 ? size : 1, &produced);
        CHECK(report.status == DOCA_SUCCESS && produced == size, "%zu bytes: %zu", size, produced);
        CHECK(memcmp(bench.memory + PLAIN_AT, plain, size) == 0, "bytes of %zu", size);
        CHECK(report.crc32 == crc32(0, plain, (uInt)size), "CRC-32 of %zu", size);
        CHECK(report.other_checksum == adler32(1, plain, (uInt)size), "Adler-32 of %zu", size);
    }
    free(plain);
    bench_close(&bench);
}

/* Facts 8 [SH], 17 (7): they are the standard ones, which a card's were seen to be. */
static void test_checksums_are_the_standard_ones(void) {
    struct bench bench;
    size_t produced;
    settings(NULL);
    bench_open(&bench);
    static const char digits[] = "123456789"; /* what check values are published for */
    size_t stream = deflate_raw((const uint8_t *)digits, 9, bench.memory, 64);
    struct report report = inflate_once(&bench, stream, 64, &produced);
    CHECK(report.crc32 == 0xCBF43926u, "CRC-32 is %08x", report.crc32);
    CHECK(report.other_checksum == 0x091E01DEu, "Adler-32 is %08x", report.other_checksum);
    bench_close(&bench);
}

/* Facts 5 [S, B3], 17 (5): a destination is written behind its data, and its length grows. */
static void test_output_is_appended_to_the_destination(void) {
    struct bench bench;
    settings(NULL);
    bench_open(&bench);
    size_t stream = deflate_raw((const uint8_t *)"world", 5, bench.memory, 64);
    memcpy(bench.memory + PLAIN_AT, "hello ......", 12);
    struct doca_buf *source = buf_data(&bench, 0, stream), *target = buf_empty(&bench, PLAIN_AT, 11);
    OK(doca_buf_set_data(target, bench.memory + PLAIN_AT, 6));
    inflate_submit(&bench, source, target, 0);
    progress_reports(bench.pe, 1);
    CHECK(reports[0].status == DOCA_SUCCESS && data_length(target) == 11, "%zu bytes", data_length(target));
    CHECK(memcmp(bench.memory + PLAIN_AT, "hello world.", 12) == 0, "bytes");
    inflate_submit(&bench, source, target, 1);
    progress_reports(bench.pe, 2);
    CHECK(reports[1].status == DOCA_ERROR_IO_FAILED && data_length(target) == 11, "it is full");
    buf_release(source);
    buf_release(target);
    bench_close(&bench);
}

/* Facts 8 (error status), 17 (2): damaged, cut, followed by more, or too long: the task fails, and says IO_FAILED. */
static void test_bad_streams_fail_their_task(void) {
    struct bench bench;
    uint8_t plain[5000], stream[8192];
    size_t produced;
    settings("DECOMPRESS_ERROR", "continue", NULL);
    bench_open(&bench);
    text_fill(plain, sizeof plain);
    size_t size = deflate_raw(plain, sizeof plain, stream, sizeof stream);
    for (int way = 0; way < 5; way++) {
        memcpy(bench.memory, stream, size);
        bench.memory[size] = 0x55;
        bench.memory[0] = way == 1 ? 0x07 : stream[0]; /* a block of no kind */
        size_t given = way == 2 ? size - 1 : way == 3 ? size + 1 : size;
        struct report report = inflate_once(&bench, given, sizeof plain - (way == 4), &produced);
        CHECK(report.status == (way == 0 ? DOCA_SUCCESS : DOCA_ERROR_IO_FAILED), "way %d", way);
        CHECK(produced == (way == 0 ? sizeof plain : 0), "way %d gives %zu bytes", way, produced);
        CHECK(state_of(doca_compress_as_ctx(bench.compress)) == DOCA_CTX_STATE_RUNNING, "way %d", way);
    }
    bench_close(&bench);
}

/* Facts 8 and 17 (2): whether an error stops the context as it does for DMA is not known, so by default it does. */
static void test_an_error_stops_the_context(void) {
    struct bench bench;
    size_t produced;
    settings(NULL);
    bench_open(&bench);
    struct doca_ctx *ctx = doca_compress_as_ctx(bench.compress);
    bench.memory[0] = 0x07;
    CHECK(inflate_once(&bench, 64, 64, &produced).status == DOCA_ERROR_IO_FAILED, "damaged");
    CHECK(state_of(ctx) == DOCA_CTX_STATE_STOPPING, "stopping");
    progress_state(bench.pe, ctx, DOCA_CTX_STATE_IDLE);
    OK(doca_ctx_start(ctx));
    size_t stream = deflate_raw((const uint8_t *)"again", 5, bench.memory, 64);
    CHECK(inflate_once(&bench, stream, 64, &produced).status == DOCA_SUCCESS && produced == 5, "again");
    bench_close(&bench);
}

/* Facts 8 [O], 9 [FD], 12 (1): no data, or more than the limit: submitted, and failed at completion. */
static void test_sizes_out_of_bounds_fail_at_completion(void) {
    struct bench bench;
    size_t produced;
    settings("DECOMPRESS_ERROR", "continue", NULL);
    bench_open(&bench);
    size_t stream = deflate_raw((const uint8_t *)"x", 1, bench.memory, 64);
    CHECK(inflate_once(&bench, stream, 2097152, &produced).status == DOCA_SUCCESS, "at the limit");
    CHECK(inflate_once(&bench, stream, 2097153, &produced).status == DOCA_ERROR_IO_FAILED, "the destination is over");
    CHECK(inflate_once(&bench, 2097153, 64, &produced).status == DOCA_ERROR_IO_FAILED, "the source is over");
    struct doca_buf *empty = buf_empty(&bench, 0, 64), *target = buf_empty(&bench, PLAIN_AT, 64);
    struct doca_compress_task_decompress_deflate *task;
    report_count = 0;
    inflate_submit(&bench, empty, target, 0);
    progress_reports(bench.pe, 1);
    CHECK(reports[0].status == DOCA_ERROR_IO_FAILED, "a source without data");
    /* Facts 7 [H30]: try_submit looks before. */
    OK(doca_compress_task_decompress_deflate_alloc_init(bench.compress, empty, target, (union doca_data){.u64 = 0},
                                                        &task));
    EXPECT(doca_task_try_submit(doca_compress_task_decompress_deflate_as_task(task)), ERROR_INVALID_VALUE);
    doca_task_free(doca_compress_task_decompress_deflate_as_task(task));
    buf_release(empty);
    buf_release(target);
    bench_close(&bench);
}

/* Facts 5 [DPDK]: one buf for each side, unless the limit says more. */
static void test_lists_are_taken_up_to_the_limit(void) {
    for (int limit = 1; limit <= 2; limit++) {
        struct bench bench;
        uint8_t plain[3000];
        settings("MAX_BUF_LIST", limit == 1 ? "1" : "2", NULL);
        bench_open(&bench);
        text_fill(plain, sizeof plain);
        size_t stream = deflate_raw(plain, sizeof plain, bench.memory, PLAIN_AT);
        struct doca_buf *sources[] = {buf_data(&bench, 0, 100), buf_data(&bench, 100, stream - 100)};
        struct doca_buf *targets[] = {buf_empty(&bench, PLAIN_AT, 1000), buf_empty(&bench, PLAIN_AT + 5000, 2500)};
        OK(doca_buf_chain_list(sources[0], sources[1]));
        OK(doca_buf_chain_list(targets[0], targets[1]));
        inflate_submit(&bench, sources[0], targets[0], 0);
        progress_reports(bench.pe, 1);
        CHECK(reports[0].status == (limit == 1 ? DOCA_ERROR_IO_FAILED : DOCA_SUCCESS), "limit %d", limit);
        if (limit == 2) {
            CHECK(data_length(targets[0]) == 1000 && data_length(targets[1]) == 2000, "lengths");
            CHECK(memcmp(bench.memory + PLAIN_AT, plain, 1000) == 0, "first bytes");
            CHECK(memcmp(bench.memory + PLAIN_AT + 5000, plain + 1000, 2000) == 0, "last bytes");
        }
        buf_release(sources[0]);
        buf_release(targets[0]);
        bench_close(&bench);
    }
}

/* Facts 12 (fault injection) - ours: the n-th task fails, once, from then on, or each n-th. */
static void test_the_task_that_was_asked_for_fails(void) {
    static const char *const faults[] = {"decompress:3", "decompress:3+", "decompress:3*", "dma:1+"};
    static const uint32_t failing[] = {1u << 2, 0x7C, 1u << 2 | 1u << 5, 0};
    for (size_t way = 0; way < 4; way++) {
        struct bench bench;
        size_t produced;
        settings("FAULT", faults[way], "DECOMPRESS_ERROR", "continue", NULL);
        bench_open(&bench);
        size_t stream = deflate_raw((const uint8_t *)"hello", 5, bench.memory, 64);
        for (uint32_t task = 0; task < 7; task++) {
            doca_error_t expected = failing[way] >> task & 1 ? DOCA_ERROR_IO_FAILED : DOCA_SUCCESS;
            CHECK(inflate_once(&bench, stream, 64, &produced).status == expected, "%s, task %u", faults[way], task);
        }
        bench_close(&bench);
    }
}

#ifdef SS_HAVE_LZ4

/* Gives the compression context a kind of LZ4 in place of Deflate. */
static struct doca_ctx *lz4_open(struct bench *bench) {
    bench_open(bench);
    struct doca_ctx *ctx = doca_compress_as_ctx(bench->compress);
    OK(doca_ctx_stop(ctx));
    OK(doca_compress_task_decompress_lz4_stream_set_conf(bench->compress, note_stream, note_stream, 1));
    OK(doca_compress_task_decompress_lz4_block_set_conf(bench->compress, note_block, note_block, 1));
    OK(doca_ctx_start(ctx));
    return ctx;
}

/* Facts 8 [H30]: "block" is the data of one block alone. */
static void test_lz4_blocks_are_decompressed(void) {
    struct bench bench;
    struct doca_compress_task_decompress_lz4_block *task;
    uint8_t plain[10000];
    settings("DECOMPRESS_ERROR", "continue", NULL);
    lz4_open(&bench);
    text_fill(plain, sizeof plain);
    int stream = LZ4_compress_default((const char *)plain, (char *)bench.memory, sizeof plain, PLAIN_AT);
    for (int bad = 0; bad <= 1; bad++) {
        struct doca_buf *source = buf_data(&bench, 0, (size_t)stream - (size_t)bad);
        struct doca_buf *target = buf_empty(&bench, PLAIN_AT, sizeof plain);
        OK(doca_compress_task_decompress_lz4_block_alloc_init(bench.compress, source, target,
                                                              (union doca_data){.u64 = 0}, &task));
        CHECK(doca_compress_task_decompress_lz4_block_get_src(task) == source, "source");
        CHECK(doca_compress_task_decompress_lz4_block_get_dst(task) == target, "destination");
        OK(doca_task_submit(doca_compress_task_decompress_lz4_block_as_task(task)));
        progress_reports(bench.pe, (uint32_t)bad + 1);
        CHECK(bad || memcmp(bench.memory + PLAIN_AT, plain, sizeof plain) == 0, "bytes");
        buf_release(source);
        buf_release(target);
    }
    CHECK(reports[0].status == DOCA_SUCCESS, "it is good");
    CHECK(reports[0].crc32 == crc32(0, plain, sizeof plain), "CRC-32");
    CHECK(reports[1].status == DOCA_ERROR_IO_FAILED, "its last byte is missing");
    bench_close(&bench);
}

static struct report stream_once(struct bench *bench, size_t size, int checksums, int independent) {
    struct doca_compress_task_decompress_lz4_stream *task;
    struct doca_buf *source = buf_data(bench, 0, size), *target = buf_empty(bench, PLAIN_AT, 2097152);
    report_count = 0;
    OK(doca_compress_task_decompress_lz4_stream_alloc_init(bench->compress, 0, 0, source, target,
                                                           (union doca_data){.u64 = 0}, &task));
    doca_compress_task_decompress_lz4_stream_set_has_block_checksum(task, (uint8_t)checksums);
    doca_compress_task_decompress_lz4_stream_set_are_blocks_independent(task, (uint8_t)independent);
    OK(doca_task_submit(doca_compress_task_decompress_lz4_stream_as_task(task)));
    progress_reports(bench->pe, 1);
    buf_release(source);
    buf_release(target);
    return reports[0];
}

static uint8_t *size_write(uint8_t *target, uint32_t size) {
    for (int i = 0; i < 4; i++) {
        *target++ = (uint8_t)(size >> 8 * i);
    }
    return target;
}

/* Facts 8 [H30]: "stream" is blocks behind their sizes, without a frame; they may lean on those before them. */
static void test_lz4_streams_are_decompressed(void) {
    struct bench bench;
    uint8_t plain[3000];
    settings("DECOMPRESS_ERROR", "continue", NULL);
    lz4_open(&bench);
    random_fill(plain, 1000); /* stored, and then met again */
    memcpy(plain + 1000, plain, 1000);
    memcpy(plain + 2000, plain, 1000);
    uint8_t *end = size_write(bench.memory, 1u << 31 | 1000);
    memcpy(end, plain, 1000);
    LZ4_stream_t *encoder = LZ4_createStream();
    LZ4_loadDict(encoder, (const char *)plain, 1000);
    int block = LZ4_compress_fast_continue(encoder, (const char *)plain + 1000, (char *)end + 1004, 2000, 4000, 1);
    LZ4_freeStream(encoder);
    CHECK(block > 0 && block < 1000, "it leans on the first: %d", block);
    size_write(end + 1000, (uint32_t)block);
    size_t size = 4 + 1000 + 4 + (size_t)block;
    CHECK(stream_once(&bench, size, 0, 0).status == DOCA_SUCCESS, "dependent blocks");
    CHECK(memcmp(bench.memory + PLAIN_AT, plain, sizeof plain) == 0, "bytes");
    CHECK(reports[0].crc32 == crc32(0, plain, sizeof plain), "CRC-32");
    CHECK(stream_once(&bench, size, 0, 1).status == DOCA_ERROR_IO_FAILED, "they are not independent");
    CHECK(stream_once(&bench, size - 1, 0, 0).status == DOCA_ERROR_IO_FAILED, "cut");
    CHECK(stream_once(&bench, 1007, 0, 0).status == DOCA_ERROR_IO_FAILED, "cut within a size");
    CHECK(stream_once(&bench, size, 1, 0).status == DOCA_ERROR_IO_FAILED, "without the checksums that were promised");
    bench_close(&bench);
}

/* Facts 8 [H30]: block checksums; they and 'xxh_cs' are xxHash-32, whose values for "" and "a" its authors publish. */
static void test_lz4_checksums_are_xxhash(void) {
    struct bench bench;
    settings("DECOMPRESS_ERROR", "continue", NULL);
    lz4_open(&bench);
    uint8_t *end = size_write(bench.memory, 1u << 31 | 1);
    *end++ = 'a';
    size_write(end, 0x550D7456);
    struct report report = stream_once(&bench, 9, 1, 1);
    CHECK(report.status == DOCA_SUCCESS && report.other_checksum == 0x550D7456, "it is %08x", report.other_checksum);
    end[0] ^= 1;
    CHECK(stream_once(&bench, 9, 1, 1).status == DOCA_ERROR_IO_FAILED, "a wrong checksum");
    /* 43 bytes go through all parts of the hash. */
    static const char text[] = "The quick brown fox jumps over the lazy dog";
    memcpy(size_write(bench.memory, 1u << 31 | 43), text, 43);
    report = stream_once(&bench, 47, 0, 1);
    CHECK(report.status == DOCA_SUCCESS && report.other_checksum == 0xE85EA4DE, "it is %08x", report.other_checksum);
    bench_close(&bench);
}

/* Facts 8 [N29]: BlueField-2 has no LZ4. */
static void test_bf2_has_no_lz4(void) {
    struct doca_compress *compress;
    settings("PROFILE", "bf2", NULL);
    struct doca_dev *dev = device_open();
    OK(doca_compress_create(dev, &compress));
    EXPECT(doca_compress_task_decompress_lz4_block_set_conf(compress, note_block, note_block, 1), ERROR_NOT_SUPPORTED);
    OK(doca_compress_destroy(compress));
    OK(doca_dev_close(dev));
}

#endif

int main(void) {
    test_streams_are_inflated_with_their_checksums();
    test_checksums_are_the_standard_ones();
    test_output_is_appended_to_the_destination();
    test_bad_streams_fail_their_task();
    test_an_error_stops_the_context();
    test_sizes_out_of_bounds_fail_at_completion();
    test_lists_are_taken_up_to_the_limit();
    test_the_task_that_was_asked_for_fails();
#ifdef SS_HAVE_LZ4
    test_lz4_blocks_are_decompressed();
    test_lz4_streams_are_decompressed();
    test_lz4_checksums_are_xxhash();
    test_bf2_has_no_lz4();
#endif
    return 0;
}
