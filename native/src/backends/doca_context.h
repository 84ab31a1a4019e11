/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doca_context.h - Compress and DMA as one thing: a context that is started and stopped, and tasks with two bufs
 *
 * A context is one thread's, with its progress engine. It has room for as many tasks as it was told before it started;
 * they are taken once and used again and again.
 */
#ifndef SS_DOCA_CONTEXT_H
#define SS_DOCA_CONTEXT_H

#include <doca_buf.h>
#include <doca_ctx.h>
#include <doca_pe.h>

#include "backends/doca_device.h"

enum ss_doca_kind { SS_DOCA_DEFLATE, SS_DOCA_LZ4, SS_DOCA_COPY, SS_DOCA_KIND_COUNT };

struct ss_doca_context {
    struct doca_dev *device;
    struct doca_pe *pe;
    struct doca_ctx *ctx; /* NULL: there is none */
    void *owner;          /* struct doca_compress or struct doca_dma */
    uint32_t kinds;       /* bit 1 << kind of each kind of task that it takes */
    uint32_t tasks_max;   /* of each kind */
};

struct ss_doca_task {
    void *typed; /* NULL: not taken yet */
    struct doca_task *task;
};

/* ss_doca_kinds() returns bit 1 << kind for each that the device does, and the most bytes of a buffer of each. */
uint32_t ss_doca_kinds(const struct doca_dev *device, uint64_t *bytes_max);

/*
 * ss_doca_context_open() makes the context for its 'kinds' (either decompression or copies) and starts it, with room
 * for 'tasks_max' tasks of each, or fewer where the device has no more: 'tasks_max' is then what it has.
 */
enum ss_result ss_doca_context_open(struct ss_doca_context *context);

/*
 * ss_doca_context_close() stops and frees the context. Nothing is in flight and all tasks are free. SS_DEVICE where it
 * does not come to rest: then it is abandoned, never to be looked at again.
 */
enum ss_result ss_doca_context_close(struct ss_doca_context *context);

/* ss_doca_context_runs() returns whether the context takes tasks: an accelerator that failed stops it. */
int ss_doca_context_runs(const struct ss_doca_context *context);

/*
 * ss_doca_task_prepare() gives a task its bufs, and takes it from the context if it has not been yet. 'user' is what
 * ss_doca_task_ended() is called with.
 */
doca_error_t ss_doca_task_prepare(struct ss_doca_context *context, enum ss_doca_kind kind, struct doca_buf *source,
                                  struct doca_buf *target, void *user, struct ss_doca_task *task);

/* ss_doca_task_release() gives the task back to the context, unless it was not taken. */
void ss_doca_task_release(struct ss_doca_task *task);

/* ss_doca_task_crc32() is what a decompression that ended well says of its output. */
uint32_t ss_doca_task_crc32(enum ss_doca_kind kind, const struct ss_doca_task *task);

/* ss_doca_task_ended() is doca.c's: called from within doca_pe_progress(). */
void ss_doca_task_ended(void *user, int failed);

#endif /* SS_DOCA_CONTEXT_H */
