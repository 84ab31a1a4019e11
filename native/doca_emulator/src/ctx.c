/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ctx.c - contexts: idle, running, stopping, idle again
 *
 * A context starts at once. It stops at once where no task is out; else it goes by way of STOPPING, and
 * doca_pe_progress() reports that it is idle when the last task was freed.
 */
#include <stdlib.h>

#include "emulator.h"

void ctx_init(struct doca_ctx *ctx, struct doca_dev *dev, enum accelerator accelerator) {
    ctx->dev = dev;
    ctx->accelerator = accelerator;
    ctx->state = DOCA_CTX_STATE_IDLE;
    queue_clear(&ctx->queued);
    queue_clear(&ctx->finishing);
    queue_clear(&ctx->done);
    atomic_fetch_add(&dev->resources, 1);
}

void ctx_owner_check(const struct doca_ctx *ctx, const char *call) {
    if (ctx->pe != NULL) {
        owner_check(&ctx->pe->owner, call, "context's progress engine");
    }
}

void ctx_owner_use(const struct doca_ctx *ctx, const char *call) {
    owner_use(&ctx->pe->owner, call, "context's progress engine");
}

doca_error_t ctx_destroy(struct doca_ctx *ctx, const char *call) {
    REFUSE_IF(ctx == NULL, DOCA_ERROR_INVALID_VALUE);
    ctx_owner_check(ctx, call);
    REFUSE_IF(ctx->state != DOCA_CTX_STATE_IDLE, DOCA_ERROR_IN_USE);
    if (ctx->pe != NULL) {
        struct doca_ctx **place = &ctx->pe->contexts;
        while (*place != ctx) {
            place = &(*place)->next;
        }
        *place = ctx->next;
        ctx->pe->context_count--;
    }
    atomic_fetch_sub(&ctx->dev->resources, 1);
    return DOCA_SUCCESS;
}

static void task_pools_free(struct doca_ctx *ctx) {
    for (uint32_t kind = 0; kind < TASK_KIND_COUNT; kind++) {
        free(ctx->types[kind].tasks);
        ctx->types[kind].tasks = ctx->types[kind].free = NULL;
    }
}

/* Makes all tasks that the context may ever have out at a time; false without memory. */
static bool task_pools_make(struct doca_ctx *ctx) {
    for (uint32_t kind = 0; kind < TASK_KIND_COUNT; kind++) {
        struct task_type *type = &ctx->types[kind];
        if (type->task_max == 0) {
            continue;
        }
        type->tasks = calloc(type->task_max, sizeof *type->tasks);
        if (type->tasks == NULL) {
            task_pools_free(ctx);
            return false;
        }
        for (uint32_t i = 0; i < type->task_max; i++) {
            type->tasks[i].ctx = ctx;
            type->tasks[i].kind = (enum task_kind)kind;
            type->tasks[i].next = type->free;
            type->free = &type->tasks[i];
        }
    }
    return true;
}

static bool ctx_configured(const struct doca_ctx *ctx) {
    for (uint32_t kind = 0; kind < TASK_KIND_COUNT; kind++) {
        if (ctx->types[kind].task_max > 0) {
            return true;
        }
    }
    return false;
}

doca_error_t doca_ctx_start(struct doca_ctx *ctx) {
    REFUSE_IF(ctx == NULL, DOCA_ERROR_INVALID_VALUE);
    ctx_owner_check(ctx, __func__);
    REFUSE_IF(ctx->state != DOCA_CTX_STATE_IDLE, DOCA_ERROR_BAD_STATE);
    REFUSE_IF(ctx->pe == NULL, DOCA_ERROR_NOT_CONNECTED);
    REFUSE_IF(!ctx_configured(ctx), DOCA_ERROR_INVALID_VALUE);
    ctx->flushing = ctx->quit = false;
    ctx->random = ctx->dev->info.settings.reorder_seed;
    REFUSE_IF(!task_pools_make(ctx), DOCA_ERROR_NO_MEMORY);
    if (!worker_start(ctx)) {
        task_pools_free(ctx);
        return DOCA_ERROR_INITIALIZATION;
    }
    ctx->state = DOCA_CTX_STATE_RUNNING;
    return DOCA_SUCCESS;
}

static void ctx_become_idle(struct doca_ctx *ctx) {
    worker_end(ctx);
    task_pools_free(ctx);
    ctx->state = DOCA_CTX_STATE_IDLE;
}

doca_error_t doca_ctx_stop(struct doca_ctx *ctx) {
    REFUSE_IF(ctx == NULL, DOCA_ERROR_INVALID_VALUE);
    ctx_owner_check(ctx, __func__);
    REFUSE_IF(ctx->state == DOCA_CTX_STATE_IDLE, DOCA_ERROR_BAD_STATE);
    REFUSE_IF(ctx->state == DOCA_CTX_STATE_STOPPING, DOCA_ERROR_IN_PROGRESS);
    if (ctx->allocated == 0) {
        ctx_become_idle(ctx);
        return DOCA_SUCCESS;
    }
    pthread_mutex_lock(&ctx->pe->lock);
    ctx->flushing = true;
    pthread_mutex_unlock(&ctx->pe->lock);
    ctx->state = DOCA_CTX_STATE_STOPPING;
    return DOCA_ERROR_IN_PROGRESS;
}

doca_error_t doca_ctx_get_state(const struct doca_ctx *ctx, enum doca_ctx_states *state) {
    REFUSE_IF(ctx == NULL || state == NULL, DOCA_ERROR_INVALID_VALUE);
    ctx_owner_check(ctx, __func__);
    *state = ctx->state;
    return DOCA_SUCCESS;
}

/* Takes a task that is done; NULL where there is none, or where disorder has it wait for one behind it. */
static struct doca_task *ctx_take_done(struct doca_ctx *ctx) {
    struct doca_task *task = NULL;
    pthread_mutex_lock(&ctx->pe->lock);
    uint32_t count = ctx->done.count;
    bool ordered = ctx->dev->info.settings.reorder_seed == 0;
    if (count > 0 && (ordered || count == ctx->in_flight || worker_random(&ctx->random) % 2 == 0)) {
        task = queue_take(&ctx->done, ordered ? 0 : (uint32_t)(worker_random(&ctx->random) % count));
    }
    pthread_mutex_unlock(&ctx->pe->lock);
    return task;
}

bool ctx_progress(struct doca_ctx *ctx) {
    struct doca_task *task = ctx->in_flight > 0 ? ctx_take_done(ctx) : NULL;
    if (task != NULL) {
        task_complete(task);
        return true;
    }
    if (ctx->state == DOCA_CTX_STATE_STOPPING && ctx->allocated == 0) {
        ctx_become_idle(ctx);
        return true;
    }
    return false;
}
