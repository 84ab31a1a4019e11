/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doca_context.h - one interface for Compress and DMA: a context that is started and stopped, and tasks with two bufs
 *
 * A context and its progress engine belong to one thread. The number of its tasks is set before it starts; tasks are
 * allocated once and reused.
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
    struct doca_ctx *ctx; /* NULL: no context */
    void *owner;          /* struct doca_compress or struct doca_dma */
    uint32_t kinds;       /* bit 1 << kind of each kind of task that it takes */
    uint32_t tasks_max;   /* of each kind */
};

struct ss_doca_task {
    void *typed; /* NULL: not taken yet */
    struct doca_task *task;
};

/* ss_doca_kinds() returns bit 1 << kind for each kind that the device supports, and the most bytes of its buffers. */
uint32_t ss_doca_kinds(const struct doca_dev *device, uint64_t *bytes_max);

/*
 * ss_doca_context_open() makes the context for its 'kinds' (either decompression or copies) and starts it, with room
 * for 'tasks_max' tasks of each, or fewer where the device has no more: 'tasks_max' is then what it has.
 */
enum ss_result ss_doca_context_open(struct ss_doca_context *context);

/*
 * ss_doca_context_close() stops and frees the context. Nothing is in flight and all tasks are free. SS_DEVICE if it
 * does not stop: it is then abandoned, and never used again.
 */
enum ss_result ss_doca_context_close(struct ss_doca_context *context);

/* ss_doca_context_runs() returns whether the context accepts tasks: a failure of the accelerator stops it. */
int ss_doca_context_runs(const struct ss_doca_context *context);

/*
 * ss_doca_task_prepare() sets the bufs of a task, and allocates it from the context if necessary. 'user' is the
 * argument for ss_doca_task_ended().
 */
doca_error_t ss_doca_task_prepare(struct ss_doca_context *context, enum ss_doca_kind kind, struct doca_buf *source,
                                  struct doca_buf *target, void *user, struct ss_doca_task *task);

/* ss_doca_task_release() returns the task to the context, if it was allocated. */
void ss_doca_task_release(struct ss_doca_task *task);

/* ss_doca_task_crc32() returns the CRC-32 of the output of a successful decompression. */
uint32_t ss_doca_task_crc32(enum ss_doca_kind kind, const struct ss_doca_task *task);

/* ss_doca_task_ended() is defined in doca.c; doca_pe_progress() calls it. */
void ss_doca_task_ended(void *user, int failed);

#endif /* SS_DOCA_CONTEXT_H */
