/* SPDX-License-Identifier: Apache-2.0 */
/* kinds.c - DOCA Compress and DOCA DMA: two contexts, and three kinds of task of one shape */
#include <stdlib.h>

#include "doca_compress.h"
#include "emulator.h"

/* BlueField-2 has Deflate alone; where liblz4 is missing, so does this emulator. */
static doca_error_t kind_supported(const struct doca_devinfo *devinfo, bool lz4) {
    REFUSE_IF(devinfo == NULL, DOCA_ERROR_INVALID_VALUE);
    enum profile profile = devinfo->settings.profile;
    bool supported = lz4 ? profile == PROFILE_BF3 && codec_has_lz4() : profile != PROFILE_NONE;
    return supported ? DOCA_SUCCESS : DOCA_ERROR_NOT_SUPPORTED;
}

static doca_error_t context_make(struct doca_dev *dev, size_t size, enum accelerator accelerator, void **made) {
    REFUSE_IF(dev == NULL, DOCA_ERROR_INVALID_VALUE);
    REFUSE_IF(dev->info.settings.profile == PROFILE_NONE, DOCA_ERROR_INITIALIZATION);
    *made = calloc(1, size);
    REFUSE_IF(*made == NULL, DOCA_ERROR_NO_MEMORY);
    ctx_init(*made, dev, accelerator);
    return DOCA_SUCCESS;
}

/* Functions of both contexts. 'name' is without its struct. */
#define CONTEXT(name, accelerator)                                                                                     \
    struct name {                                                                                                      \
        struct doca_ctx ctx;                                                                                           \
    };                                                                                                                 \
    doca_error_t name##_create(struct doca_dev *dev, struct name **context) {                                          \
        void *made = NULL;                                                                                             \
        doca_error_t result =                                                                                          \
            context != NULL ? context_make(dev, sizeof **context, accelerator, &made) : DOCA_ERROR_INVALID_VALUE;      \
        if (result == DOCA_SUCCESS) {                                                                                  \
            *context = made;                                                                                           \
        }                                                                                                              \
        return result;                                                                                                 \
    }                                                                                                                  \
    doca_error_t name##_destroy(struct name *context) {                                                                \
        doca_error_t result = ctx_destroy(context != NULL ? &context->ctx : NULL, __func__);                           \
        if (result == DOCA_SUCCESS) {                                                                                  \
            free(context);                                                                                             \
        }                                                                                                              \
        return result;                                                                                                 \
    }                                                                                                                  \
    struct doca_ctx *name##_as_ctx(struct name *context) { return context != NULL ? &context->ctx : NULL; }            \
    doca_error_t name##_cap_get_max_num_tasks(struct name *context, uint32_t *tasks) {                                 \
        if (context == NULL || tasks == NULL) {                                                                        \
            return DOCA_ERROR_INVALID_VALUE;                                                                           \
        }                                                                                                              \
        *tasks = context->ctx.dev->info.settings.tasks_max;                                                            \
        return DOCA_SUCCESS;                                                                                           \
    }

/* What all kinds of task have: 'owner' is the context, 'type' the task, 'name' what its capabilities are called by. */
#define KIND(owner, name, type, kind, accelerator)                                                                     \
    struct type {                                                                                                      \
        struct doca_task task;                                                                                         \
    };                                                                                                                 \
    doca_error_t owner##_cap_##name##_is_supported(const struct doca_devinfo *devinfo) {                               \
        return kind_supported(devinfo, (accelerator) == DECOMPRESSION && (kind) == TASK_LZ4);                          \
    }                                                                                                                  \
    doca_error_t owner##_cap_##name##_get_max_buf_size(const struct doca_devinfo *devinfo, uint64_t *bytes) {          \
        doca_error_t result = bytes != NULL ? owner##_cap_##name##_is_supported(devinfo) : DOCA_ERROR_INVALID_VALUE;   \
        if (result == DOCA_SUCCESS) {                                                                                  \
            *bytes = devinfo->settings.buf_bytes_max[accelerator];                                                     \
        }                                                                                                              \
        return result;                                                                                                 \
    }                                                                                                                  \
    static void name##_call(task_callback_t callback, struct doca_task *task) {                                        \
        ((type##_completion_cb_t)callback)((struct type *)task, task->user_data, (union doca_data){.u64 = 0});         \
    }                                                                                                                  \
    doca_error_t type##_set_conf(struct owner *context, type##_completion_cb_t completed,                              \
                                 type##_completion_cb_t failed, uint32_t tasks) {                                      \
        if (context == NULL) {                                                                                         \
            return DOCA_ERROR_INVALID_VALUE;                                                                           \
        }                                                                                                              \
        context->ctx.types[kind].call = name##_call;                                                                   \
        doca_error_t result = owner##_cap_##name##_is_supported(&context->ctx.dev->info);                              \
        return result != DOCA_SUCCESS ? result                                                                         \
                                      : task_configure(&context->ctx, kind, (task_callback_t)completed,                \
                                                       (task_callback_t)failed, tasks, __func__);                      \
    }                                                                                                                  \
    doca_error_t type##_alloc_init(struct owner *context, const struct doca_buf *source, struct doca_buf *target,      \
                                   union doca_data user_data, struct type **task) {                                    \
        struct doca_task *made = NULL;                                                                                 \
        if (context == NULL || task == NULL) {                                                                         \
            return DOCA_ERROR_INVALID_VALUE;                                                                           \
        }                                                                                                              \
        doca_error_t result = task_allocate(&context->ctx, kind, source, target, user_data, &made, __func__);          \
        if (result == DOCA_SUCCESS) {                                                                                  \
            *task = (struct type *)made;                                                                               \
        }                                                                                                              \
        return result;                                                                                                 \
    }                                                                                                                  \
    struct doca_task *type##_as_task(struct type *task) { return &task->task; }                                        \
    void type##_set_src(struct type *task, const struct doca_buf *source) {                                            \
        task_settled(&task->task, __func__);                                                                           \
        task->task.source = source;                                                                                    \
    }                                                                                                                  \
    void type##_set_dst(struct type *task, struct doca_buf *target) {                                                  \
        task_settled(&task->task, __func__);                                                                           \
        task->task.target = target;                                                                                    \
    }

CONTEXT(doca_compress, DECOMPRESSION)
CONTEXT(doca_dma, COPY)
KIND(doca_compress, task_decompress_deflate, doca_compress_task_decompress_deflate, TASK_DEFLATE, DECOMPRESSION)
KIND(doca_compress, task_decompress_lz4_block, doca_compress_task_decompress_lz4_block, TASK_LZ4, DECOMPRESSION)
KIND(doca_dma, task_memcpy, doca_dma_task_memcpy, TASK_MEMCPY, COPY)

uint32_t doca_compress_task_decompress_deflate_get_crc_cs(const struct doca_compress_task_decompress_deflate *task) {
    task_settled(&task->task, __func__);
    return task->task.crc32;
}

uint32_t
doca_compress_task_decompress_lz4_block_get_crc_cs(const struct doca_compress_task_decompress_lz4_block *task) {
    task_settled(&task->task, __func__);
    return task->task.crc32;
}
