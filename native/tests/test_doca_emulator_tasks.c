/* SPDX-License-Identifier: Apache-2.0 */
/* test_doca_emulator_tasks.c - rules about copies and decompression: data, limits, failures, time */
#include <time.h>
#include <zlib.h>

#include "doca_fixture.h"

#ifdef SS_HAVE_LZ4
#include <lz4.h>
#endif

enum { TARGET_AT = 4 << 20 };

/* ---- Copies --------------------------------------------------------------------------------------------------- */

/* Facts 9 [H30, FD]: the source's data is copied, up to 2 MiB. */
static void test_data_is_copied(void) {
    static const size_t sizes[] = {1, 100, 65536, 2097152};
    random_fill(bench.memory, 2097152);
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        struct doca_buf *target = space_at(TARGET_AT, sizes[i] + 1);
        CHECK(copy_once(data_at(0, sizes[i]), target).status == DOCA_SUCCESS, "%zu bytes", sizes[i]);
        CHECK(data_length(target) == sizes[i], "%zu of %zu bytes", data_length(target), sizes[i]);
        CHECK(memcmp(bench.memory + TARGET_AT, bench.memory, sizes[i]) == 0, "bytes of %zu", sizes[i]);
        CHECK(bench.memory[TARGET_AT + sizes[i]] == 0, "no byte more");
    }
}

/* Facts 5 [S, B3], 12 (2), 17 (5): a destination is appended to, until it is full. */
static void test_a_destination_that_is_not_renewed_fills_up(void) {
    memcpy(bench.memory, "12345678", 8);
    struct doca_buf *source = data_at(0, 8), *target = space_at(TARGET_AT, 16);
    CHECK(copy_once(source, target).status == DOCA_SUCCESS, "first");
    CHECK(copy_once(source, target).status == DOCA_SUCCESS, "second");
    CHECK(memcmp(bench.memory + TARGET_AT, "1234567812345678", 16) == 0, "bytes");
    CHECK(copy_once(source, target).status == DOCA_ERROR_IO_FAILED, "it is full");
    CHECK(copy_once(source, space_at(TARGET_AT, 16)).status == DOCA_SUCCESS, "another one is empty");

    struct doca_buf *stream = data_at(64, deflate_raw("hello", 5, bench.memory + 64, 64));
    target = space_at(TARGET_AT, 11);
    CHECK(inflate_once(stream, target).status == DOCA_SUCCESS, "first");
    CHECK(inflate_once(stream, target).status == DOCA_SUCCESS, "second");
    CHECK(memcmp(bench.memory + TARGET_AT, "hellohello", 10) == 0, "bytes");
    CHECK(inflate_once(stream, target).status == DOCA_ERROR_IO_FAILED && data_length(target) == 10, "it is full");
}

/* Facts 8 [O], 9 [FD], 12 (1): without data or over the limit, submitting succeeds and completing fails. */
static void test_sizes_out_of_bounds_fail_at_completion(void) {
    struct doca_buf *over = data_at(0, 2097153), *empty = space_at(0, 64), *target = space_at(TARGET_AT, 2097153);
    CHECK(copy_once(empty, target).status == DOCA_ERROR_IO_FAILED, "without data");
    CHECK(copy_once(over, target).status == DOCA_ERROR_IO_FAILED, "over the limit");
    CHECK(copy_once(data_at(0, 64), space_at(TARGET_AT, 63)).status == DOCA_ERROR_IO_FAILED, "no space");
    CHECK(copy_once(data_at(0, 64), target).status == DOCA_SUCCESS, "nothing is left of that");

    struct doca_buf *stream = data_at(0, deflate_raw("x", 1, bench.memory, 64));
    CHECK(inflate_once(stream, space_at(TARGET_AT, 2097152)).status == DOCA_SUCCESS, "at the limit");
    CHECK(inflate_once(stream, space_at(TARGET_AT, 2097153)).status == DOCA_ERROR_IO_FAILED, "destination over it");
    CHECK(inflate_once(over, space_at(TARGET_AT, 64)).status == DOCA_ERROR_IO_FAILED, "source over it");
    CHECK(inflate_once(empty, space_at(TARGET_AT, 64)).status == DOCA_ERROR_IO_FAILED, "without data");
}

/* Facts 4 [H30], 17 (6): memory that was not permitted to be written is not; what is unset is read-only here. */
static void test_memory_without_permission_is_not_written(void) {
    static const uint32_t masks[] = {DOCA_ACCESS_FLAG_LOCAL_READ_ONLY, DOCA_ACCESS_FLAG_PCI_READ_WRITE, 0};
    static uint8_t region[64];
    struct doca_buf *source = data_at(0, 64);
    memset(bench.memory, 1, 64);
    for (size_t way = 0; way < 3; way++) {
        struct doca_mmap *mmap = region_mmap(region, sizeof region, masks[way]);
        OK(doca_mmap_start(mmap));
        struct doca_buf *target = space_of(mmap, region, 64), *readable = data_of(mmap, region, 64);
        CHECK(copy_once(source, target).status == DOCA_ERROR_IO_FAILED, "way %zu", way);
        CHECK(region[0] == 0, "way %zu wrote", way);
        CHECK(copy_once(readable, space_at(TARGET_AT, 64)).status == DOCA_SUCCESS, "way %zu may be read", way);
        buf_release(target);
        buf_release(readable);
        OK(doca_mmap_destroy(mmap));
    }
}

static uint32_t stopping_at = UINT32_MAX;

static void note_and_look(struct doca_dma_task_memcpy *task, union doca_data user, union doca_data context) {
    if (stopping_at == UINT32_MAX && state_of(bench.dma_ctx) == DOCA_CTX_STATE_STOPPING) {
        stopping_at = report_count;
    }
    note_memcpy(task, user, context);
}

/* Facts 9 [S pe_task_error], 12 (7): the context stops automatically, and all tasks in flight fail. */
static void test_a_failing_task_takes_those_behind_it_along(void) {
    struct doca_buf *sources[8], *targets[8];
    dma_configure(note_and_look, TASKS_MAX);
    memset(bench.memory, 1, 4096);
    for (size_t i = 0; i < 8; i++) {
        sources[i] = data_at(64 * i, 64);
        targets[i] = space_at(TARGET_AT + 64 * i, 64);
        memcpy_submit(sources[i], targets[i], i);
    }
    struct doca_task *task = memcpy_task(sources[0], targets[0], 0);
    progress_reports(8);
    CHECK(stopping_at == 3, "it stops before the report of the failing task: at %u", stopping_at);
    for (size_t i = 0; i < 8; i++) {
        doca_error_t expected = i < 3 ? DOCA_SUCCESS : DOCA_ERROR_IO_FAILED;
        CHECK(reports[i].user_data == i && reports[i].status == expected, "task %zu: %s", i,
              doca_error_get_name(reports[i].status));
        CHECK(data_length(targets[i]) == (i < 3 ? 64 : 0), "length %zu", i);
        CHECK(bench.memory[TARGET_AT + 64 * i + 63] == (i < 3), "bytes of task %zu", i);
    }
    CHECK(bench.memory[TARGET_AT + 3 * 64] == 1, "a failing task may have written some of its bytes");
    EXPECT(doca_task_submit(task), ERROR_BAD_STATE);
    CHECK(doca_pe_progress(bench.pe) == 0, "a task is not freed yet");
    doca_task_free(task);
    progress_state(bench.dma_ctx, DOCA_CTX_STATE_IDLE);
    OK(doca_ctx_start(bench.dma_ctx));
    CHECK(copy_once(sources[3], targets[3]).status == DOCA_SUCCESS, "it was started again");
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Ours: engines take the time that the model says, at least. 4 MB at 0.16 Gbps are 0.2 s, and 50 ms more to the end. */
static void test_an_engine_takes_its_time(void) {
    double start = seconds();
    for (size_t i = 0; i < 4; i++) {
        memcpy_submit(data_at(0, 1000000), space_at(TARGET_AT + 1000000 * i, 1000000), i);
    }
    progress_reports(4);
    CHECK(seconds() - start >= 0.249, "it took %f s", seconds() - start);
}

/* ---- Decompression -------------------------------------------------------------------------------------------- */

/* Decompresses 'size' bytes from 0 to 'capacity' bytes at TARGET_AT; returns the report. */
static struct report inflate_bytes(size_t size, size_t capacity, size_t *produced) {
    struct doca_buf *source = data_at(0, size), *target = space_at(TARGET_AT, capacity);
    struct report report = inflate_once(source, target);
    *produced = data_length(target);
    buf_release(source);
    buf_release(target);
    return report;
}

/*
 * Facts 8 [N29, DPDK, SH], 17 (7): raw streams of stored, fixed and dynamic blocks; the CRC-32 is the standard one, of
 * the plain bytes.
 */
static void test_streams_are_inflated_with_their_checksums(void) {
    static const size_t sizes[] = {0, 1, 40, 70000, 2097152};
    uint8_t *plain = malloc(2097152);
    size_t produced;
    for (size_t i = 0; i < 2 * COUNT_OF(sizes); i++) {
        size_t size = sizes[i / 2] - (i % 2 && sizes[i / 2] == 2097152 ? 4096 : 0); /* noise grows when it is stored */
        if (i % 2 == 0) {
            text_fill(plain, size);
        } else {
            random_fill(plain, size);
        }
        size_t stream = deflate_raw(plain, size, bench.memory, TARGET_AT);
        struct report report = inflate_bytes(stream, size > 0 ? size : 1, &produced);
        CHECK(report.status == DOCA_SUCCESS && produced == size, "%zu bytes: %zu", size, produced);
        CHECK(memcmp(bench.memory + TARGET_AT, plain, size) == 0, "bytes of %zu", size);
        CHECK(report.crc32 == crc32(0, plain, (uInt)size), "CRC-32 of %zu", size);
    }
    free(plain);
}

/* Facts 8 (error status), 17 (2): damaged, cut, followed by more, or too long: the task fails, and says IO_FAILED. */
static void test_bad_streams_fail_their_task(void) {
    uint8_t plain[5000], stream[8192];
    size_t produced;
    text_fill(plain, sizeof plain);
    size_t size = deflate_raw(plain, sizeof plain, stream, sizeof stream);
    for (int way = 0; way < 5; way++) {
        memcpy(bench.memory, stream, size);
        bench.memory[size] = 0x55;
        bench.memory[0] = way == 1 ? 0x07 : stream[0]; /* a block of no kind */
        size_t given = way == 2 ? size - 1 : way == 3 ? size + 1 : size;
        struct report report = inflate_bytes(given, sizeof plain - (way == 4), &produced);
        CHECK(report.status == (way == 0 ? DOCA_SUCCESS : DOCA_ERROR_IO_FAILED), "way %d", way);
        CHECK(produced == (way == 0 ? sizeof plain : 0), "way %d gives %zu bytes", way, produced);
        CHECK(state_of(bench.compress_ctx) == DOCA_CTX_STATE_RUNNING, "way %d", way);
    }
}

/* Facts 8 and 17 (2): whether an error stops the context as it does for DMA is not known, so by default it does. */
static void test_an_error_stops_the_context(void) {
    size_t produced;
    bench.memory[0] = 0x07;
    CHECK(inflate_bytes(64, 64, &produced).status == DOCA_ERROR_IO_FAILED, "damaged");
    CHECK(state_of(bench.compress_ctx) == DOCA_CTX_STATE_STOPPING, "stopping");
    progress_state(bench.compress_ctx, DOCA_CTX_STATE_IDLE);
    OK(doca_ctx_start(bench.compress_ctx));
    size_t stream = deflate_raw("again", 5, bench.memory, 64);
    CHECK(inflate_bytes(stream, 64, &produced).status == DOCA_SUCCESS && produced == 5, "again");
}

/* Facts 12 (fault injection) - ours: the n-th task fails, once, from then on, or each n-th. */
static void test_the_tasks_that_are_named_fail(void) {
    static const struct {
        const char *fault;
        uint32_t failing; /* a bit for each task */
    } faults[] = {
        {"decompress:3", 1u << 2}, {"decompress:3+", 0x7C}, {"decompress:3*", 1u << 2 | 1u << 5}, {"dma:1+", 0}};
    for (size_t i = 0; i < COUNT_OF(faults); i++) {
        settings("FAULT", faults[i].fault, "DECOMPRESS_ERROR", "continue", NULL);
        bench_open();
        size_t produced, stream = deflate_raw("hello", 5, bench.memory, 64);
        for (uint32_t task = 0; task < 7; task++) {
            doca_error_t expected = faults[i].failing >> task & 1 ? DOCA_ERROR_IO_FAILED : DOCA_SUCCESS;
            CHECK(inflate_bytes(stream, 64, &produced).status == expected, "task %u of %s", task, faults[i].fault);
        }
        bench_close();
    }
}

#ifdef SS_HAVE_LZ4

/* Facts 8 [H30]: "block" is the data of one block alone. */
static void test_lz4_blocks_are_decompressed(void) {
    uint8_t plain[10000];
    OK(doca_ctx_stop(bench.compress_ctx));
    OK(doca_compress_task_decompress_lz4_block_set_conf(bench.compress, note_block, note_block, 1));
    OK(doca_ctx_start(bench.compress_ctx));
    text_fill(plain, sizeof plain);
    int stream = LZ4_compress_default((const char *)plain, (char *)bench.memory, sizeof plain, TARGET_AT);
    for (uint32_t bad = 0; bad <= 1; bad++) {
        struct doca_compress_task_decompress_lz4_block *task;
        struct doca_buf *source = data_at(0, (size_t)stream - bad), *target = space_at(TARGET_AT, sizeof plain);
        OK(doca_compress_task_decompress_lz4_block_alloc_init(bench.compress, source, target,
                                                              (union doca_data){.u64 = 0}, &task));
        OK(doca_task_submit(doca_compress_task_decompress_lz4_block_as_task(task)));
        progress_reports(bad + 1);
        CHECK(bad || memcmp(bench.memory + TARGET_AT, plain, sizeof plain) == 0, "bytes");
    }
    CHECK(reports[0].status == DOCA_SUCCESS, "it is good");
    CHECK(reports[0].crc32 == crc32(0, plain, sizeof plain), "CRC-32");
    CHECK(reports[1].status == DOCA_ERROR_IO_FAILED, "its last byte is missing");
}

#endif

int main(void) {
    RULE(test_data_is_copied, NULL);
    RULE(test_a_destination_that_is_not_renewed_fills_up, NULL);
    RULE(test_sizes_out_of_bounds_fail_at_completion, "DECOMPRESS_ERROR", "continue");
    RULE(test_memory_without_permission_is_not_written, NULL);
    RULE(test_a_failing_task_takes_those_behind_it_along, "FAULT", "dma:4");
    RULE(test_an_engine_takes_its_time, "DMA_GBPS", "0.16", "LATENCY_US", "50000");
    RULE(test_streams_are_inflated_with_their_checksums, NULL);
    RULE(test_bad_streams_fail_their_task, "DECOMPRESS_ERROR", "continue");
    RULE(test_an_error_stops_the_context, NULL);
    BARE_RULE(test_the_tasks_that_are_named_fail, NULL);
#ifdef SS_HAVE_LZ4
    RULE(test_lz4_blocks_are_decompressed, "DECOMPRESS_ERROR", "continue");
#endif
    return 0;
}
