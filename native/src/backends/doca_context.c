/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doca_context.c - the two accelerators behind one interface
 *
 * Kinds of tasks differ here only in the names of their calls, so each kind has a table of calls.
 */
#include "backends/doca_context.h"

#include <doca_compress.h>
#include <doca_dma.h>

#include "cpu/clock.h"

/* Longest time that an idle context may take to stop. It takes microseconds; more than seconds is a defect. */
#define STOP_TIME_NS 10000000000ULL

struct kind {
    doca_error_t (*is_supported)(const struct doca_devinfo *info);
    doca_error_t (*bytes_max)(const struct doca_devinfo *info, uint64_t *bytes);
    doca_error_t (*configure)(void *context, uint32_t tasks);
    doca_error_t (*take)(void *context, struct doca_buf *source, struct doca_buf *target, union doca_data user,
                         struct ss_doca_task *task);
    void (*set)(void *task, struct doca_buf *source, struct doca_buf *target);
    uint32_t (*crc32)(const void *task); /* NULL: none */
};

/* The calls of one kind of task: 'type' without its struct, 'prefix' of the calls, 'owner' of the tasks. */
#define KIND_CALLS(name, type, owner)                                                                                  \
    static void name##_done(struct type *task, union doca_data user, union doca_data context) {                        \
        (void)task;                                                                                                    \
        (void)context;                                                                                                 \
        ss_doca_task_ended(user.ptr, 0);                                                                               \
    }                                                                                                                  \
    static void name##_failed(struct type *task, union doca_data user, union doca_data context) {                      \
        (void)task;                                                                                                    \
        (void)context;                                                                                                 \
        ss_doca_task_ended(user.ptr, 1);                                                                               \
    }                                                                                                                  \
    static doca_error_t name##_configure(void *context, uint32_t tasks) {                                              \
        return type##_set_conf((struct owner *)context, name##_done, name##_failed, tasks);                            \
    }                                                                                                                  \
    static doca_error_t name##_take(void *context, struct doca_buf *source, struct doca_buf *target,                   \
                                    union doca_data user, struct ss_doca_task *task) {                                 \
        struct type *typed;                                                                                            \
        doca_error_t error = type##_alloc_init((struct owner *)context, source, target, user, &typed);                 \
        if (error == DOCA_SUCCESS) {                                                                                   \
            task->typed = typed;                                                                                       \
            task->task = type##_as_task(typed);                                                                        \
        }                                                                                                              \
        return error;                                                                                                  \
    }                                                                                                                  \
    static void name##_set(void *task, struct doca_buf *source, struct doca_buf *target) {                             \
        type##_set_src((struct type *)task, source);                                                                   \
        type##_set_dst((struct type *)task, target);                                                                   \
    }

KIND_CALLS(deflate, doca_compress_task_decompress_deflate, doca_compress)
KIND_CALLS(lz4, doca_compress_task_decompress_lz4_block, doca_compress)
KIND_CALLS(copy, doca_dma_task_memcpy, doca_dma)

static uint32_t deflate_crc32(const void *task) {
    return doca_compress_task_decompress_deflate_get_crc_cs(task);
}

static uint32_t lz4_crc32(const void *task) {
    return doca_compress_task_decompress_lz4_block_get_crc_cs(task);
}

static const struct kind kinds[SS_DOCA_KIND_COUNT] = {
    [SS_DOCA_DEFLATE] = {.is_supported = doca_compress_cap_task_decompress_deflate_is_supported,
                         .bytes_max = doca_compress_cap_task_decompress_deflate_get_max_buf_size,
                         .configure = deflate_configure,
                         .take = deflate_take,
                         .set = deflate_set,
                         .crc32 = deflate_crc32},
    [SS_DOCA_LZ4] = {.is_supported = doca_compress_cap_task_decompress_lz4_block_is_supported,
                     .bytes_max = doca_compress_cap_task_decompress_lz4_block_get_max_buf_size,
                     .configure = lz4_configure,
                     .take = lz4_take,
                     .set = lz4_set,
                     .crc32 = lz4_crc32},
    [SS_DOCA_COPY] = {.is_supported = doca_dma_cap_task_memcpy_is_supported,
                      .bytes_max = doca_dma_cap_task_memcpy_get_max_buf_size,
                      .configure = copy_configure,
                      .take = copy_take,
                      .set = copy_set},
};

uint32_t ss_doca_kinds(const struct doca_dev *device, uint64_t *bytes_max) {
    const struct doca_devinfo *info = doca_dev_as_devinfo(device);
    uint32_t found = 0;
    for (int kind = 0; kind < SS_DOCA_KIND_COUNT; kind++) {
        if (kinds[kind].is_supported(info) == DOCA_SUCCESS &&
            kinds[kind].bytes_max(info, &bytes_max[kind]) == DOCA_SUCCESS && bytes_max[kind] > 0) {
            found |= 1U << kind;
        }
    }
    return found;
}

/* ---- Life ---------------------------------------------------------------------------------------------------- */

static enum ss_result context_create(struct ss_doca_context *context, uint32_t *tasks) {
    if (context->kinds & 1U << SS_DOCA_COPY) {
        struct doca_dma *dma;
        enum ss_result result = ss_doca_result(doca_dma_create(context->device, &dma), "doca_dma_create");
        if (result != SS_OK) {
            return result;
        }
        context->owner = dma;
        context->ctx = doca_dma_as_ctx(dma);
        return ss_doca_result(doca_dma_cap_get_max_num_tasks(dma, tasks), "doca_dma_cap_get_max_num_tasks");
    }
    struct doca_compress *compress;
    enum ss_result result = ss_doca_result(doca_compress_create(context->device, &compress), "doca_compress_create");
    if (result != SS_OK) {
        return result;
    }
    context->owner = compress;
    context->ctx = doca_compress_as_ctx(compress);
    return ss_doca_result(doca_compress_cap_get_max_num_tasks(compress, tasks), "doca_compress_cap_get_max_num_tasks");
}

static enum ss_result context_start(struct ss_doca_context *context) {
    enum ss_result result = ss_doca_result(doca_pe_connect_ctx(context->pe, context->ctx), "doca_pe_connect_ctx");
    for (int kind = 0; kind < SS_DOCA_KIND_COUNT && result == SS_OK; kind++) {
        if (context->kinds >> kind & 1) {
            result = ss_doca_result(kinds[kind].configure(context->owner, context->tasks_max), "doca_task_set_conf");
        }
    }
    return result == SS_OK ? ss_doca_result(doca_ctx_start(context->ctx), "doca_ctx_start") : result;
}

enum ss_result ss_doca_context_open(struct ss_doca_context *context) {
    uint32_t tasks = 0;
    uint32_t kind_count = (uint32_t)__builtin_popcount(context->kinds);
    enum ss_result result = context_create(context, &tasks);
    if (result == SS_OK && tasks < kind_count) {
        result = ss_doca_result(DOCA_ERROR_NOT_SUPPORTED, "doca_cap_get_max_num_tasks");
    }
    if (result == SS_OK) {
        if (context->tasks_max > tasks / kind_count) {
            context->tasks_max = tasks / kind_count;
        }
        result = context_start(context);
    }
    if (result != SS_OK) {
        (void)ss_doca_context_close(context);
    }
    return result;
}

static int context_is_idle(const struct ss_doca_context *context) {
    enum doca_ctx_states state;
    return doca_ctx_get_state(context->ctx, &state) == DOCA_SUCCESS && state == DOCA_CTX_STATE_IDLE;
}

static enum ss_result context_stop(struct ss_doca_context *context) {
    if (ss_doca_context_runs(context)) {
        doca_error_t error = doca_ctx_stop(context->ctx);
        if (error != DOCA_SUCCESS && error != DOCA_ERROR_IN_PROGRESS) {
            return ss_doca_result(error, "doca_ctx_stop");
        }
    }
    uint64_t end = ss_now_ns() + STOP_TIME_NS;
    while (!context_is_idle(context)) {
        if (doca_pe_progress(context->pe)) {
            continue;
        }
        if (ss_now_ns() > end && !context_is_idle(context)) {
            return ss_doca_result(DOCA_ERROR_TIME_OUT, "waiting for a context to stop");
        }
        const struct timespec interval = {.tv_sec = 0, .tv_nsec = 10000};
        (void)nanosleep(&interval, NULL);
    }
    return SS_OK;
}

enum ss_result ss_doca_context_close(struct ss_doca_context *context) {
    if (context->ctx == NULL) {
        return SS_OK;
    }
    enum ss_result result = context_stop(context);
    if (result == SS_OK && context->kinds & 1U << SS_DOCA_COPY) {
        result = ss_doca_result(doca_dma_destroy(context->owner), "doca_dma_destroy");
    } else if (result == SS_OK) {
        result = ss_doca_result(doca_compress_destroy(context->owner), "doca_compress_destroy");
    }
    context->ctx = NULL;
    context->owner = NULL;
    return result;
}

int ss_doca_context_runs(const struct ss_doca_context *context) {
    enum doca_ctx_states state;
    return context->ctx != NULL && doca_ctx_get_state(context->ctx, &state) == DOCA_SUCCESS &&
           state == DOCA_CTX_STATE_RUNNING;
}

/* ---- Tasks --------------------------------------------------------------------------------------------------- */

doca_error_t ss_doca_task_prepare(struct ss_doca_context *context, enum ss_doca_kind kind, struct doca_buf *source,
                                  struct doca_buf *target, void *user, struct ss_doca_task *task) {
    if (task->typed != NULL) {
        kinds[kind].set(task->typed, source, target);
        return DOCA_SUCCESS;
    }
    const union doca_data data = {.ptr = user};
    return kinds[kind].take(context->owner, source, target, data, task);
}

void ss_doca_task_release(struct ss_doca_task *task) {
    if (task->typed != NULL) {
        doca_task_free(task->task);
        task->typed = NULL;
        task->task = NULL;
    }
}

uint32_t ss_doca_task_crc32(enum ss_doca_kind kind, const struct ss_doca_task *task) {
    return kinds[kind].crc32(task->typed);
}
