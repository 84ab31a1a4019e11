/* SPDX-License-Identifier: Apache-2.0 */
/*
 * task.c - tasks of every kind: allocated, submitted, completed, freed
 *
 * From submission to callback a task is the engine's, and so are its bufs. doca_task_submit() looks at no size: what
 * the engine refuses fails when it completes. What no engine could even be told - a buf that was given back, data
 * outside of its buf, memory that the device was never given - is misuse.
 */
#include <stdlib.h>

#include "emulator.h"

void queue_clear(struct task_queue *queue) {
    *queue = (struct task_queue){.last = &queue->first};
}

void queue_add(struct task_queue *queue, struct doca_task *task) {
    task->next = NULL;
    *queue->last = task;
    queue->last = &task->next;
    queue->count++;
}

struct doca_task *queue_take(struct task_queue *queue, uint32_t index) {
    struct doca_task **place = &queue->first;
    while (index-- > 0) {
        place = &(*place)->next;
    }
    struct doca_task *task = *place;
    *place = task->next;
    if (queue->last == &task->next) {
        queue->last = place;
    }
    queue->count--;
    return task;
}

doca_error_t task_configure(struct doca_ctx *ctx, enum task_kind kind, task_callback_t completed,
                            task_callback_t failed, uint32_t task_max, const char *call) {
    if (ctx == NULL || completed == NULL || failed == NULL || task_max == 0) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    ctx_owner_check(ctx, call);
    if (ctx->state != DOCA_CTX_STATE_IDLE) {
        return DOCA_ERROR_BAD_STATE;
    }
    uint64_t sum = task_max;
    for (uint32_t other = 0; other < TASK_KIND_COUNT; other++) {
        sum += other != (uint32_t)kind ? ctx->types[other].task_max : 0;
    }
    if (sum > ctx->dev->info.settings.tasks_max) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    struct task_type *type = &ctx->types[kind];
    type->completed = completed;
    type->failed = failed;
    type->task_max = task_max;
    return DOCA_SUCCESS;
}

doca_error_t task_allocate(struct doca_ctx *ctx, enum task_kind kind, const struct doca_buf *source,
                           struct doca_buf *target, union doca_data user_data, struct doca_task **task,
                           const char *call) {
    if (ctx == NULL || source == NULL || target == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    ctx_owner_check(ctx, call);
    if (ctx->state != DOCA_CTX_STATE_RUNNING) {
        return DOCA_ERROR_BAD_STATE;
    }
    struct task_type *type = &ctx->types[kind];
    struct doca_task *taken = type->free;
    if (taken == NULL) {
        return DOCA_ERROR_NO_MEMORY;
    }
    type->free = taken->next;
    ctx->allocated++;
    *taken = (struct doca_task){
        .ctx = ctx, .kind = kind, .state = TASK_OURS, .user_data = user_data, .source = source, .target = target};
    *task = taken;
    return DOCA_SUCCESS;
}

void task_settled(const struct doca_task *task, const char *call) {
    ctx_owner_check(task->ctx, call);
    if (task->state == TASK_FREE) {
        misuse(call, "a task must not be used after it was freed");
    }
    if (task->state == TASK_SUBMITTED) {
        misuse(call, "a submitted task belongs to the library until its callback; it must not be changed, submitted "
                     "again or freed");
    }
}

void doca_task_free(struct doca_task *task) {
    task_settled(task, __func__);
    struct task_type *type = &task->ctx->types[task->kind];
    task->state = TASK_FREE;
    task->next = type->free;
    type->free = task;
    task->ctx->allocated--;
}

/* ---- Submission ----------------------------------------------------------------------------------------------- */

/* What must hold of each buf of a task. */
static void buf_submittable(const struct doca_buf *buf, const struct doca_dev *dev, const char *call) {
    for (; buf != NULL; buf = buf->next) {
        if (buf->refcount == 0 && buf->previous == NULL) {
            misuse(call, "a task's bufs must not have been given back to their inventory");
        }
        owner_use(&buf->inventory->owner, call, "buf's inventory");
        if (!buf->mmap->thread_safe) {
            owner_use(&buf->mmap->owner, call, "buf's mmap");
        }
        if (!mmap_has_device(buf->mmap, dev)) {
            misuse(call, "the mmap of a task's buf must have been given the context's device (doca_mmap_add_dev)");
        }
        uintptr_t head = (uintptr_t)buf->head, data = (uintptr_t)buf->data;
        if (data < head || data - head > buf->len || buf->data_len > buf->len - (data - head)) {
            misuse(call, "a buf's data must be inside of the buf; what lies outside is undefined");
        }
    }
}

static void bufs_mark(struct doca_task *task, int step) {
    for (struct doca_buf *buf = (struct doca_buf *)(uintptr_t)task->source; buf != NULL; buf = buf->next) {
        buf->sources += (uint32_t)step;
    }
    for (struct doca_buf *buf = task->target; buf != NULL; buf = buf->next) {
        buf->targets += (uint32_t)step;
    }
}

static void bufs_take(struct doca_task *task, const char *call) {
    buf_submittable(task->source, task->ctx->dev, call);
    buf_submittable(task->target, task->ctx->dev, call);
    for (const struct doca_buf *buf = task->source; buf != NULL; buf = buf->next) {
        if (buf->targets > 0) {
            misuse(call, "the source of a task must not be another task's destination while that one is in flight");
        }
    }
    for (const struct doca_buf *buf = task->target; buf != NULL; buf = buf->next) {
        if (buf->sources + buf->targets > 0) {
            misuse(call, "the destination of a task must not be used by another one while that one is in flight");
        }
    }
    bufs_mark(task, 1);
}

/* Counts the task on its device's engine, and returns what is to become of it; NULL: nothing out of the ordinary. */
static const struct fault *fault_due(struct doca_dev *dev, enum engine engine) {
    pthread_mutex_lock(&dev->lock);
    uint64_t number = ++dev->submitted[engine];
    pthread_mutex_unlock(&dev->lock);
    for (uint32_t i = 0; i < dev->info.settings.fault_count; i++) {
        const struct fault *fault = &dev->info.settings.faults[i];
        bool due = fault->repeat == FAULT_FROM    ? number >= fault->number
                   : fault->repeat == FAULT_EVERY ? number % fault->number == 0
                                                  : number == fault->number;
        if (fault->engine == engine && due) {
            return fault;
        }
    }
    return NULL;
}

static doca_error_t task_submit(struct doca_task *task, uint32_t flags, bool validate, const char *call) {
    if (task == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    struct doca_ctx *ctx = task->ctx;
    ctx_owner_use(ctx, call);
    task_settled(task, call);
    if (ctx->state != DOCA_CTX_STATE_RUNNING) {
        return DOCA_ERROR_BAD_STATE;
    }
    if (validate && task_refusal(task) != NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    bufs_take(task, call);
    task->state = TASK_SUBMITTED;
    const struct fault *fault = fault_due(ctx->dev, ctx->engine);
    task->fault = fault != NULL && !fault->hang;
    task->hang = fault != NULL && fault->hang;
    ctx->in_flight++;
    queue_add(&ctx->held, task);
    if ((flags & DOCA_TASK_SUBMIT_FLAG_FLUSH) != 0) {
        doca_ctx_flush_tasks(ctx);
    }
    return DOCA_SUCCESS;
}

doca_error_t doca_task_submit(struct doca_task *task) {
    return task_submit(task, DOCA_TASK_SUBMIT_FLAG_FLUSH, false, __func__);
}

doca_error_t doca_task_try_submit(struct doca_task *task) {
    return task_submit(task, DOCA_TASK_SUBMIT_FLAG_FLUSH, true, __func__);
}

doca_error_t doca_task_submit_ex(struct doca_task *task, uint32_t flags) {
    const uint32_t known = DOCA_TASK_SUBMIT_FLAG_FLUSH | DOCA_TASK_SUBMIT_FLAG_OPTIMIZE_REPORTS;
    return (flags & ~known) != 0 ? DOCA_ERROR_INVALID_VALUE : task_submit(task, flags, false, __func__);
}

void doca_ctx_flush_tasks(struct doca_ctx *ctx) {
    ctx_owner_check(ctx, __func__);
    if (ctx->held.count == 0) {
        return;
    }
    pthread_mutex_lock(&ctx->pe->lock);
    while (ctx->held.count > 0) {
        queue_add(&ctx->queued, queue_take(&ctx->held, 0));
    }
    pthread_cond_signal(&ctx->wake);
    pthread_mutex_unlock(&ctx->pe->lock);
}

/* ---- Completion ----------------------------------------------------------------------------------------------- */

/* Adds what the engine wrote to the destination's data, element by element. */
static void target_grow(struct doca_task *task) {
    size_t left = task->produced;
    for (struct doca_buf *buf = task->target; buf != NULL && left > 0; buf = buf->next) {
        size_t space = buf_free_space(buf), taken = left < space ? left : space;
        buf->data_len += taken;
        left -= taken;
    }
}

void task_complete(struct doca_task *task) {
    struct doca_ctx *ctx = task->ctx;
    struct doca_pe *pe = ctx->pe;
    struct task_type *type = &ctx->types[task->kind];
    bool stops = ctx->engine == ENGINE_DMA || ctx->dev->info.settings.decompress_error_stops;
    bufs_mark(task, -1);
    ctx->in_flight--;
    task->state = TASK_OURS;
    pe->in_callback = true;
    if (task->status == DOCA_SUCCESS) {
        target_grow(task);
        type->call(type->completed, task, ctx->user_data);
    } else {
        if (stops && ctx->state == DOCA_CTX_STATE_RUNNING) {
            /* Tasks that were held back go the way of those in flight. */
            doca_ctx_flush_tasks(ctx);
            ctx_state_set(ctx, DOCA_CTX_STATE_STOPPING);
        }
        type->call(type->failed, task, ctx->user_data);
    }
    pe->in_callback = false;
}

/* ---- What a program may ask of a task ------------------------------------------------------------------------- */

doca_error_t doca_task_get_status(const struct doca_task *task) {
    task_settled(task, __func__);
    return task->status;
}

union doca_data doca_task_get_user_data(const struct doca_task *task) {
    return task->user_data;
}

void doca_task_set_user_data(struct doca_task *task, union doca_data user_data) {
    task_settled(task, __func__);
    task->user_data = user_data;
}

struct doca_ctx *doca_task_get_ctx(const struct doca_task *task) {
    return task->ctx;
}
