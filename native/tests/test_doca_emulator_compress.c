/* SPDX-License-Identifier: Apache-2.0 */
/* test_doca_emulator_compress.c - what decompression does with good streams, bad ones, and sizes */
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

/* Facts 8 [N29, DPDK]: raw streams of stored, fixed and dynamic blocks; the CRC-32 is of the plain bytes. */
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
    }
    free(plain);
    bench_close(&bench);
}

/* Facts 8 [SH], 17 (7): it is the standard one, which a card's was seen to be. */
static void test_the_checksum_is_the_standard_one(void) {
    struct bench bench;
    size_t produced;
    settings(NULL);
    bench_open(&bench);
    static const char digits[] = "123456789"; /* what check values are published for */
    size_t stream = deflate_raw((const uint8_t *)digits, 9, bench.memory, 64);
    struct report report = inflate_once(&bench, stream, 64, &produced);
    CHECK(report.crc32 == 0xCBF43926u, "CRC-32 is %08x", report.crc32);
    bench_close(&bench);
}

/* Facts 5 [S, B3], 17 (5): a destination is written behind its data, and its length grows. */
static void test_output_is_appended_to_the_destination(void) {
    struct bench bench;
    settings(NULL);
    bench_open(&bench);
    size_t stream = deflate_raw((const uint8_t *)"hello", 5, bench.memory, 64);
    struct doca_buf *source = buf_data(&bench, 0, stream), *target = buf_empty(&bench, PLAIN_AT, 11);
    for (uint32_t i = 0; i < 3; i++) {
        inflate_submit(&bench, source, target, i);
        progress_reports(bench.pe, i + 1);
    }
    CHECK(reports[0].status == DOCA_SUCCESS && reports[1].status == DOCA_SUCCESS, "two fit");
    CHECK(memcmp(bench.memory + PLAIN_AT, "hellohello", 10) == 0, "bytes");
    CHECK(reports[2].status == DOCA_ERROR_IO_FAILED && data_length(target) == 10, "it is full");
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
    report_count = 0;
    inflate_submit(&bench, empty, target, 0);
    progress_reports(bench.pe, 1);
    CHECK(reports[0].status == DOCA_ERROR_IO_FAILED, "a source without data");
    buf_release(empty);
    buf_release(target);
    bench_close(&bench);
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
static void lz4_open(struct bench *bench) {
    bench_open(bench);
    struct doca_ctx *ctx = doca_compress_as_ctx(bench->compress);
    OK(doca_ctx_stop(ctx));
    OK(doca_compress_task_decompress_lz4_block_set_conf(bench->compress, note_block, note_block, 1));
    OK(doca_ctx_start(ctx));
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
    test_the_checksum_is_the_standard_one();
    test_output_is_appended_to_the_destination();
    test_bad_streams_fail_their_task();
    test_an_error_stops_the_context();
    test_sizes_out_of_bounds_fail_at_completion();
    test_the_task_that_was_asked_for_fails();
#ifdef SS_HAVE_LZ4
    test_lz4_blocks_are_decompressed();
    test_bf2_has_no_lz4();
#endif
    return 0;
}
