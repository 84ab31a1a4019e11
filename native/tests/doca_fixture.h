/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doca_fixture.h - what the tests of the DOCA emulator share: one device, memory, an inventory, and both contexts
 *
 * "Facts 7" in a test is a section of the notes that native/doca_emulator/README.md sums up; a key in brackets is one
 * of its sources.
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

/* RULE() runs a test with the bench, under settings "NAME", "value" of DOCA_EMULATOR_NAME; BARE_RULE() without bench.
 */
#define BARE_RULE(test, ...)                                                                                           \
    do {                                                                                                               \
        settings(__VA_ARGS__, NULL);                                                                                   \
        test();                                                                                                        \
    } while (0)
#define RULE(test, ...)                                                                                                \
    do {                                                                                                               \
        settings(__VA_ARGS__, NULL);                                                                                   \
        bench_open();                                                                                                  \
        test();                                                                                                        \
        bench_close();                                                                                                 \
    } while (0)

enum { TASKS_MAX = 16, MEMORY_BYTES = 8 << 20, BUFS_MAX = 4 * TASKS_MAX };

extern struct bench {
    struct doca_dev *dev;
    struct doca_pe *pe;
    struct doca_compress *compress;
    struct doca_dma *dma;
    struct doca_ctx *compress_ctx;
    struct doca_ctx *dma_ctx;
    struct doca_mmap *mmap;
    struct doca_buf_inventory *inventory;
    uint8_t *memory;                 /* MEMORY_BYTES, read and written by both accelerators */
    struct doca_buf *bufs[BUFS_MAX]; /* to be released by bench_close() */
} bench;

/* Arguments of the callbacks, in order. */
extern struct report {
    uint64_t user_data;
    doca_error_t status;
    uint32_t crc32;
} reports[BUFS_MAX];
extern uint32_t report_count;
extern int reports_free_tasks; /* whether the callbacks free their tasks; else 'kept' is the last one */
extern struct doca_task *kept;

/* settings() replaces all DOCA_EMULATOR_* by "NAME", "value" pairs, with a NULL behind them. */
void settings(const char *name, ...);

struct doca_dev *device_open(void);
void bench_open(void);
void bench_close(void);

/* dma_configure() gives the bench's DMA context other callbacks. */
void dma_configure(doca_dma_task_memcpy_completion_cb_t completed, uint32_t tasks);

/* Callbacks that record their arguments in 'reports'. */
void note_deflate(struct doca_compress_task_decompress_deflate *task, union doca_data user, union doca_data context);
void note_block(struct doca_compress_task_decompress_lz4_block *task, union doca_data user, union doca_data context);
void note_memcpy(struct doca_dma_task_memcpy *task, union doca_data user, union doca_data context);

/* region_mmap() makes an mmap of the bench's device; the caller starts it. 'access' 0: none is set. */
struct doca_mmap *region_mmap(uint8_t *region, size_t size, uint32_t access);

/* A buf that holds data, or is empty, of any mmap or of the bench's memory. bench_close() releases what is left. */
struct doca_buf *data_of(struct doca_mmap *mmap, uint8_t *address, size_t size);
struct doca_buf *space_of(struct doca_mmap *mmap, uint8_t *address, size_t size);
struct doca_buf *data_at(size_t offset, size_t size);
struct doca_buf *space_at(size_t offset, size_t size);
void buf_release(struct doca_buf *buf);
size_t data_length(const struct doca_buf *buf);

/* These allocate a task, and submit it. */
struct doca_task *memcpy_task(struct doca_buf *source, struct doca_buf *target, uint64_t user);
struct doca_task *memcpy_submit(struct doca_buf *source, struct doca_buf *target, uint64_t user);
void inflate_submit(struct doca_buf *source, struct doca_buf *target, uint64_t user);

/* These run one task, and return its report. A copy that fails stops the context: it is started again. */
struct report copy_once(struct doca_buf *source, struct doca_buf *target);
struct report inflate_once(struct doca_buf *source, struct doca_buf *target);

/* progress_reports() progresses until 'count' reports are there, progress_state() until the context is in 'state'. */
void progress_reports(uint32_t count);
void progress_state(struct doca_ctx *ctx, enum doca_ctx_states state);
enum doca_ctx_states state_of(struct doca_ctx *ctx);

/* expect_abort() runs 'misuse' in a process of its own, which must abort and name 'rule'. No other thread may run. */
void expect_abort(void (*misuse)(void), const char *rule);

size_t deflate_raw(const void *plain, size_t size, uint8_t *stream, size_t stream_max);

/* text_fill() writes something that compresses. */
void text_fill(uint8_t *target, size_t size);

#endif /* SS_DOCA_FIXTURE_H */
