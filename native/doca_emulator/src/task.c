/* SPDX-License-Identifier: Apache-2.0 */
/*
 * task.c - tasks of every kind: allocated, submitted, completed, freed
 *
 * From submission to callback the accelerator owns a task and its bufs. doca_task_submit() checks no sizes: a task that
 * the accelerator refuses fails at its completion. A task that no device could execute - with a released buf, or with
 * memory that is not registered with the device - is misuse.
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
    REFUSE_IF(ctx == NULL || completed == NULL || failed == NULL || task_max == 0, DOCA_ERROR_INVALID_VALUE);
    ctx_owner_check(ctx, call);
    REFUSE_IF(ctx->state != DOCA_CTX_STATE_IDLE, DOCA_ERROR_BAD_STATE);
    uint64_t sum = task_max;
    for (uint32_t other = 0; other < TASK_KIND_COUNT; other++) {
        sum += other != (uint32_t)kind ? ctx->types[other].task_max : 0;
    }
    REFUSE_IF(sum > ctx->dev->info.settings.tasks_max, DOCA_ERROR_INVALID_VALUE);
    struct task_type *type = &ctx->types[kind];
    type->completed = completed;
    type->failed = failed;
    type->task_max = task_max;
    return DOCA_SUCCESS;
}

doca_error_t task_allocate(struct doca_ctx *ctx, enum task_kind kind, const struct doca_buf *source,
                           struct doca_buf *target, union doca_data user_data, struct doca_task **task,
                           const char *call) {
    REFUSE_IF(ctx == NULL || source == NULL || target == NULL, DOCA_ERROR_INVALID_VALUE);
    ctx_owner_check(ctx, call);
    REFUSE_IF(ctx->state != DOCA_CTX_STATE_RUNNING, DOCA_ERROR_BAD_STATE);
    struct task_type *type = &ctx->types[kind];
    struct doca_task *taken = type->free;
    REFUSE_IF(taken == NULL, DOCA_ERROR_NO_MEMORY);
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

/* Checks each buf of a task. */
static void buf_submittable(const struct doca_buf *buf, const struct doca_dev *dev, const char *call) {
    if (!buf->taken) {
        misuse(call, "a task's bufs must not have been given back to their inventory");
    }
    owner_use(&buf->inventory->owner, call, "buf's inventory");
    if (!buf->mmap->thread_safe) {
        owner_use(&buf->mmap->owner, call, "buf's mmap");
    }
    if (!mmap_has_device(buf->mmap, dev)) {
        misuse(call, "the mmap of a task's buf must have been given the context's device (doca_mmap_add_dev)");
    }
}

static void bufs_mark(struct doca_task *task, int step) {
    ((struct doca_buf *)(uintptr_t)task->source)->sources += (uint32_t)step;
    task->target->targets += (uint32_t)step;
}

static void bufs_take(struct doca_task *task, const char *call) {
    buf_submittable(task->source, task->ctx->dev, call);
    buf_submittable(task->target, task->ctx->dev, call);
    if (task->source->targets > 0) {
        misuse(call, "the source of a task must not be another task's destination while that one is in flight");
    }
    if (task->target->sources + task->target->targets > 0) {
        misuse(call, "the destination of a task must not be used by another one while that one is in flight");
    }
    bufs_mark(task, 1);
}

/* Counts the task on its accelerator, and returns what is to become of it; NULL: nothing out of the ordinary. */
static const struct fault *fault_due(struct doca_dev *dev, enum accelerator accelerator) {
    pthread_mutex_lock(&dev->lock);
    uint64_t number = ++dev->submitted[accelerator];
    pthread_mutex_unlock(&dev->lock);
    for (uint32_t i = 0; i < dev->info.settings.fault_count; i++) {
        const struct fault *fault = &dev->info.settings.faults[i];
        bool due = fault->repeat == FAULT_FROM    ? number >= fault->number
                   : fault->repeat == FAULT_EVERY ? number % fault->number == 0
                                                  : number == fault->number;
        if (fault->accelerator == accelerator && due) {
            return fault;
        }
    }
    return NULL;
}

doca_error_t doca_task_submit(struct doca_task *task) {
    REFUSE_IF(task == NULL, DOCA_ERROR_INVALID_VALUE);
    struct doca_ctx *ctx = task->ctx;
    ctx_owner_use(ctx, __func__);
    task_settled(task, __func__);
    REFUSE_IF(ctx->state != DOCA_CTX_STATE_RUNNING, DOCA_ERROR_BAD_STATE);
    bufs_take(task, __func__);
    task->state = TASK_SUBMITTED;
    const struct fault *fault = fault_due(ctx->dev, ctx->accelerator);
    task->fault = fault != NULL && !fault->hang;
    task->hang = fault != NULL && fault->hang;
    ctx->in_flight++;
    pthread_mutex_lock(&ctx->pe->lock);
    queue_add(&ctx->queued, task);
    pthread_cond_signal(&ctx->wake);
    pthread_mutex_unlock(&ctx->pe->lock);
    return DOCA_SUCCESS;
}

/* ---- Completion ----------------------------------------------------------------------------------------------- */

void task_complete(struct doca_task *task) {
    struct doca_ctx *ctx = task->ctx;
    struct doca_pe *pe = ctx->pe;
    struct task_type *type = &ctx->types[task->kind];
    bufs_mark(task, -1);
    ctx->in_flight--;
    task->state = TASK_OURS;
    pe->in_callback = true;
    if (task->status == DOCA_SUCCESS) {
        task->target->data_len += task->produced;
        type->call(type->completed, task);
    } else {
        if (failure_stops(ctx)) {
            ctx->state = DOCA_CTX_STATE_STOPPING;
        }
        type->call(type->failed, task);
    }
    pe->in_callback = false;
}

doca_error_t doca_task_get_status(const struct doca_task *task) {
    task_settled(task, __func__);
    return task->status;
}
