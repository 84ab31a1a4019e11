/* SPDX-License-Identifier: Apache-2.0 */
/* dma.c - the copy engine's part of the API */
#include <stdlib.h>

#include "emulator.h"

struct doca_dma {
    struct doca_ctx ctx;
};

struct doca_dma_task_memcpy {
    struct doca_task task;
};

static void memcpy_call(task_callback_t callback, struct doca_task *task, union doca_data ctx_user_data) {
    ((doca_dma_task_memcpy_completion_cb_t)callback)((struct doca_dma_task_memcpy *)task, task->user_data,
                                                     ctx_user_data);
}

doca_error_t doca_dma_create(struct doca_dev *dev, struct doca_dma **dma) {
    if (dev == NULL || dma == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    if (dev->info.settings.profile == PROFILE_NONE) {
        return DOCA_ERROR_INITIALIZATION;
    }
    *dma = calloc(1, sizeof **dma);
    if (*dma == NULL) {
        return DOCA_ERROR_NO_MEMORY;
    }
    ctx_init(&(*dma)->ctx, dev, ENGINE_DMA);
    (*dma)->ctx.types[TASK_MEMCPY].call = memcpy_call;
    return DOCA_SUCCESS;
}

doca_error_t doca_dma_destroy(struct doca_dma *dma) {
    doca_error_t result = ctx_destroy(dma != NULL ? &dma->ctx : NULL, __func__);
    if (result == DOCA_SUCCESS) {
        free(dma);
    }
    return result;
}

struct doca_ctx *doca_dma_as_ctx(struct doca_dma *dma) {
    return dma != NULL ? &dma->ctx : NULL;
}

doca_error_t doca_dma_cap_task_memcpy_is_supported(const struct doca_devinfo *devinfo) {
    if (devinfo == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    return devinfo->settings.profile != PROFILE_NONE ? DOCA_SUCCESS : DOCA_ERROR_NOT_SUPPORTED;
}

doca_error_t doca_dma_cap_get_max_num_tasks(struct doca_dma *dma, uint32_t *max_num_tasks) {
    if (dma == NULL || max_num_tasks == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    *max_num_tasks = dma->ctx.dev->info.settings.tasks_max;
    return DOCA_SUCCESS;
}

doca_error_t doca_dma_cap_task_memcpy_get_max_buf_list_len(const struct doca_devinfo *devinfo,
                                                           uint32_t *max_buf_list_len) {
    doca_error_t result = doca_dma_cap_task_memcpy_is_supported(devinfo);
    if (result == DOCA_SUCCESS && max_buf_list_len == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    if (result == DOCA_SUCCESS) {
        *max_buf_list_len = devinfo->settings.buf_list_max;
    }
    return result;
}

doca_error_t doca_dma_cap_task_memcpy_get_max_buf_size(const struct doca_devinfo *devinfo, uint64_t *buf_size) {
    doca_error_t result = doca_dma_cap_task_memcpy_is_supported(devinfo);
    if (result == DOCA_SUCCESS && buf_size == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    if (result == DOCA_SUCCESS) {
        *buf_size = devinfo->settings.buf_bytes_max[ENGINE_DMA];
    }
    return result;
}

doca_error_t doca_dma_task_memcpy_set_conf(struct doca_dma *dma,
                                           doca_dma_task_memcpy_completion_cb_t task_completion_cb,
                                           doca_dma_task_memcpy_completion_cb_t task_error_cb,
                                           uint32_t num_memcpy_tasks) {
    return task_configure(dma != NULL ? &dma->ctx : NULL, TASK_MEMCPY, (task_callback_t)task_completion_cb,
                          (task_callback_t)task_error_cb, num_memcpy_tasks, __func__);
}

doca_error_t doca_dma_task_memcpy_alloc_init(struct doca_dma *dma, const struct doca_buf *src, struct doca_buf *dst,
                                             union doca_data user_data, struct doca_dma_task_memcpy **task) {
    struct doca_task *made = NULL;
    if (dma == NULL || task == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    doca_error_t result = task_allocate(&dma->ctx, TASK_MEMCPY, src, dst, user_data, &made, __func__);
    if (result == DOCA_SUCCESS) {
        *task = (struct doca_dma_task_memcpy *)made;
    }
    return result;
}

struct doca_task *doca_dma_task_memcpy_as_task(struct doca_dma_task_memcpy *task) {
    return &task->task;
}

void doca_dma_task_memcpy_set_src(struct doca_dma_task_memcpy *task, const struct doca_buf *src) {
    task_settled(&task->task, __func__);
    task->task.source = src;
}

const struct doca_buf *doca_dma_task_memcpy_get_src(const struct doca_dma_task_memcpy *task) {
    return task->task.source;
}

void doca_dma_task_memcpy_set_dst(struct doca_dma_task_memcpy *task, struct doca_buf *dst) {
    task_settled(&task->task, __func__);
    task->task.target = dst;
}

struct doca_buf *doca_dma_task_memcpy_get_dst(const struct doca_dma_task_memcpy *task) {
    return task->task.target;
}
