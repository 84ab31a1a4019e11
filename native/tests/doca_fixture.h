/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doca_fixture.h - what the tests of the DOCA emulator share
 *
 * These tests say what the emulator has to be. Each names where that is from: "facts 7" is section 7 of the notes that
 * native/doca_emulator/README.md sums up, and a key in brackets the source that they cite there, of which the README
 * has the list.
 */
#ifndef SS_DOCA_FIXTURE_H
#define SS_DOCA_FIXTURE_H

#include "check.h"

#include "doca_buf.h"
#include "doca_buf_inventory.h"
#include "doca_compress.h"
#include "doca_ctx.h"
#include "doca_dev.h"
#include "doca_dma.h"
#include "doca_error.h"
#include "doca_mmap.h"
#include "doca_pe.h"

/* EXPECT() ends the test unless 'call' returns DOCA_<name>. */
#define EXPECT(call, name)                                                                                             \
    do {                                                                                                               \
        doca_error_t expect_result = (call);                                                                           \
        CHECK(expect_result == DOCA_##name, "it is %s", doca_error_get_name(expect_result));                           \
    } while (0)
#define OK(call) EXPECT(call, SUCCESS)

enum { TASKS_MAX = 16, MEMORY_BYTES = 8 << 20 };

/* One device with all that hangs on it: memory that both engines may read and write, an inventory, both contexts. */
struct bench {
    struct doca_dev *dev;
    struct doca_pe *pe;
    struct doca_compress *compress;
    struct doca_dma *dma;
    struct doca_mmap *mmap;
    struct doca_buf_inventory *inventory;
    uint8_t *memory; /* MEMORY_BYTES */
};

/* Arguments of the callbacks, in order. */
struct report {
    uint64_t user_data;
    doca_error_t status;
    uint32_t crc32;
};

extern struct report reports[4 * TASKS_MAX];
extern uint32_t report_count;
extern int reports_free_tasks; /* whether the callbacks free their tasks; else 'kept' has the last one */
extern struct doca_task *kept;

/* settings() clears all of DOCA_EMULATOR_* and sets those given, as "NAME", "value" pairs with a NULL behind them. */
void settings_clear(void);
void settings(const char *name, ...);

/* device_open() opens the first device, by the settings that are set. */
struct doca_dev *device_open(void);

/* bench_open() makes everything; both contexts run. bench_close() takes it apart, whatever state they are in. */
void bench_open(struct bench *bench);
void bench_close(struct bench *bench);

/* Callbacks that record their arguments in 'reports'. */
void note_deflate(struct doca_compress_task_decompress_deflate *task, union doca_data user, union doca_data context);
void note_block(struct doca_compress_task_decompress_lz4_block *task, union doca_data user, union doca_data context);
void note_memcpy(struct doca_dma_task_memcpy *task, union doca_data user, union doca_data context);

/* These return a buf of the bench's memory: one that holds data, one that is empty. */
struct doca_buf *buf_data(struct bench *bench, size_t offset, size_t size);
struct doca_buf *buf_empty(struct bench *bench, size_t offset, size_t size);
void buf_release(struct doca_buf *buf);

/* buf_renew() gives an empty buf back for another one of the same place: a buf that was written to is not empty. */
void buf_renew(struct bench *bench, struct doca_buf **buf, size_t offset, size_t size);
size_t data_length(const struct doca_buf *buf);

/* These make a task and submit it. */
struct doca_task *memcpy_submit(struct bench *bench, struct doca_buf *source, struct doca_buf *target, uint64_t user);
struct doca_task *inflate_submit(struct bench *bench, struct doca_buf *source, struct doca_buf *target, uint64_t user);

/* progress_reports() progresses until 'count' reports are there, progress_state() until the context is in 'state'. */
void progress_reports(struct doca_pe *pe, uint32_t count);
void progress_state(struct doca_pe *pe, struct doca_ctx *ctx, enum doca_ctx_states state);
enum doca_ctx_states state_of(struct doca_ctx *ctx);

/* expect_abort() runs 'misuse' in a process of its own, which has to abort and say 'rule'. No other thread may run. */
void expect_abort(void (*misuse)(void), const char *rule);

/* deflate() makes a raw stream; returns its size. */
size_t deflate_raw(const uint8_t *plain, size_t size, uint8_t *stream, size_t stream_max);

/* text_fill() writes something that compresses. */
void text_fill(uint8_t *target, size_t size);

#endif /* SS_DOCA_FIXTURE_H */
