/* SPDX-License-Identifier: Apache-2.0 */
/* compress.c - the decompression engine's part of the API: three kinds of task, of one shape */
#include <stdlib.h>

#include "doca_compress.h"
#include "emulator.h"

struct doca_compress {
    struct doca_ctx ctx;
};

/* BlueField-2 has Deflate alone; where liblz4 is missing, so does this emulator. */
static doca_error_t kind_supported(const struct doca_devinfo *devinfo, enum task_kind kind) {
    if (devinfo == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    bool lz4 = devinfo->settings.profile == PROFILE_BF3 && codec_has_lz4();
    bool deflate = devinfo->settings.profile != PROFILE_NONE;
    return (kind == TASK_DEFLATE ? deflate : lz4) ? DOCA_SUCCESS : DOCA_ERROR_NOT_SUPPORTED;
}

static doca_error_t kind_buf_size(const struct doca_devinfo *devinfo, enum task_kind kind, uint64_t *size) {
    doca_error_t result = size != NULL ? kind_supported(devinfo, kind) : DOCA_ERROR_INVALID_VALUE;
    if (result == DOCA_SUCCESS) {
        *size = devinfo->settings.buf_bytes_max[ENGINE_DECOMPRESS];
    }
    return result;
}

static doca_error_t kind_list_length(const struct doca_devinfo *devinfo, enum task_kind kind, uint32_t *length) {
    doca_error_t result = length != NULL ? kind_supported(devinfo, kind) : DOCA_ERROR_INVALID_VALUE;
    if (result == DOCA_SUCCESS) {
        *length = devinfo->settings.buf_list_max;
    }
    return result;
}

static doca_error_t kind_configure(struct doca_compress *compress, enum task_kind kind, task_callback_t completed,
                                   task_callback_t failed, uint32_t task_max, const char *call) {
    if (compress == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    doca_error_t result = kind_supported(&compress->ctx.dev->info, kind);
    return result == DOCA_SUCCESS ? task_configure(&compress->ctx, kind, completed, failed, task_max, call) : result;
}

static doca_error_t kind_allocate(struct doca_compress *compress, enum task_kind kind, const struct doca_buf *source,
                                  struct doca_buf *target, union doca_data user_data, struct doca_task **task,
                                  const char *call) {
    return compress != NULL ? task_allocate(&compress->ctx, kind, source, target, user_data, task, call)
                            : DOCA_ERROR_INVALID_VALUE;
}

/* What all kinds have, but for the allocation, which differs in its arguments. 'other' is the second checksum. */
#define DECOMPRESS_KIND(name, kind, other)                                                                             \
    struct doca_compress_task_decompress_##name {                                                                      \
        struct doca_task task;                                                                                         \
    };                                                                                                                 \
    static void name##_call(task_callback_t callback, struct doca_task *task, union doca_data ctx_user_data) {         \
        ((doca_compress_task_decompress_##name##_completion_cb_t)callback)(                                            \
            (struct doca_compress_task_decompress_##name *)task, task->user_data, ctx_user_data);                      \
    }                                                                                                                  \
    doca_error_t doca_compress_cap_task_decompress_##name##_is_supported(const struct doca_devinfo *devinfo) {         \
        return kind_supported(devinfo, kind);                                                                          \
    }                                                                                                                  \
    doca_error_t doca_compress_cap_task_decompress_##name##_get_max_buf_size(const struct doca_devinfo *devinfo,       \
                                                                             uint64_t *max_buffer_size) {              \
        return kind_buf_size(devinfo, kind, max_buffer_size);                                                          \
    }                                                                                                                  \
    doca_error_t doca_compress_cap_task_decompress_##name##_get_max_buf_list_len(const struct doca_devinfo *devinfo,   \
                                                                                 uint32_t *max_buf_list_len) {         \
        return kind_list_length(devinfo, kind, max_buf_list_len);                                                      \
    }                                                                                                                  \
    doca_error_t doca_compress_task_decompress_##name##_set_conf(                                                      \
        struct doca_compress *compress, doca_compress_task_decompress_##name##_completion_cb_t task_completion_cb,     \
        doca_compress_task_decompress_##name##_completion_cb_t task_error_cb, uint32_t num_tasks) {                    \
        return kind_configure(compress, kind, (task_callback_t)task_completion_cb, (task_callback_t)task_error_cb,     \
                              num_tasks, __func__);                                                                    \
    }                                                                                                                  \
    struct doca_task *doca_compress_task_decompress_##name##_as_task(                                                  \
        struct doca_compress_task_decompress_##name *task) {                                                           \
        return &task->task;                                                                                            \
    }                                                                                                                  \
    void doca_compress_task_decompress_##name##_set_src(struct doca_compress_task_decompress_##name *task,             \
                                                        struct doca_buf const *src_buff) {                             \
        task_settled(&task->task, __func__);                                                                           \
        task->task.source = src_buff;                                                                                  \
    }                                                                                                                  \
    struct doca_buf const *doca_compress_task_decompress_##name##_get_src(                                             \
        const struct doca_compress_task_decompress_##name *task) {                                                     \
        return task->task.source;                                                                                      \
    }                                                                                                                  \
    void doca_compress_task_decompress_##name##_set_dst(struct doca_compress_task_decompress_##name *task,             \
                                                        struct doca_buf *dst_buff) {                                   \
        task_settled(&task->task, __func__);                                                                           \
        task->task.target = dst_buff;                                                                                  \
    }                                                                                                                  \
    struct doca_buf *doca_compress_task_decompress_##name##_get_dst(                                                   \
        const struct doca_compress_task_decompress_##name *task) {                                                     \
        return task->task.target;                                                                                      \
    }                                                                                                                  \
    uint32_t doca_compress_task_decompress_##name##_get_crc_cs(                                                        \
        const struct doca_compress_task_decompress_##name *task) {                                                     \
        task_settled(&task->task, __func__);                                                                           \
        return task->task.crc32;                                                                                       \
    }                                                                                                                  \
    uint32_t doca_compress_task_decompress_##name##_get_##other##_cs(                                                  \
        const struct doca_compress_task_decompress_##name *task) {                                                     \
        task_settled(&task->task, __func__);                                                                           \
        return task->task.other_checksum;                                                                              \
    }

DECOMPRESS_KIND(deflate, TASK_DEFLATE, adler)
DECOMPRESS_KIND(lz4_stream, TASK_LZ4_STREAM, xxh)
DECOMPRESS_KIND(lz4_block, TASK_LZ4_BLOCK, xxh)

doca_error_t doca_compress_create(struct doca_dev *dev, struct doca_compress **compress) {
    if (dev == NULL || compress == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    if (dev->info.settings.profile == PROFILE_NONE) {
        return DOCA_ERROR_INITIALIZATION;
    }
    *compress = calloc(1, sizeof **compress);
    if (*compress == NULL) {
        return DOCA_ERROR_NO_MEMORY;
    }
    ctx_init(&(*compress)->ctx, dev, ENGINE_DECOMPRESS);
    (*compress)->ctx.types[TASK_DEFLATE].call = deflate_call;
    (*compress)->ctx.types[TASK_LZ4_STREAM].call = lz4_stream_call;
    (*compress)->ctx.types[TASK_LZ4_BLOCK].call = lz4_block_call;
    return DOCA_SUCCESS;
}

doca_error_t doca_compress_destroy(struct doca_compress *compress) {
    doca_error_t result = ctx_destroy(compress != NULL ? &compress->ctx : NULL, __func__);
    if (result == DOCA_SUCCESS) {
        free(compress);
    }
    return result;
}

struct doca_ctx *doca_compress_as_ctx(struct doca_compress *compress) {
    return compress != NULL ? &compress->ctx : NULL;
}

doca_error_t doca_compress_cap_get_max_num_tasks(struct doca_compress *compress, uint32_t *max_num_tasks) {
    if (compress == NULL || max_num_tasks == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    *max_num_tasks = compress->ctx.dev->info.settings.tasks_max;
    return DOCA_SUCCESS;
}

doca_error_t doca_compress_task_decompress_deflate_alloc_init(struct doca_compress *compress,
                                                              struct doca_buf const *src_buff,
                                                              struct doca_buf *dst_buff, union doca_data user_data,
                                                              struct doca_compress_task_decompress_deflate **task) {
    struct doca_task *made = NULL;
    doca_error_t result = kind_allocate(compress, TASK_DEFLATE, src_buff, dst_buff, user_data, &made, __func__);
    if (result == DOCA_SUCCESS) {
        *task = (struct doca_compress_task_decompress_deflate *)made;
    }
    return result;
}

doca_error_t doca_compress_task_decompress_lz4_block_alloc_init(struct doca_compress *compress,
                                                                struct doca_buf const *src_buff,
                                                                struct doca_buf *dst_buff, union doca_data user_data,
                                                                struct doca_compress_task_decompress_lz4_block **task) {
    struct doca_task *made = NULL;
    doca_error_t result = kind_allocate(compress, TASK_LZ4_BLOCK, src_buff, dst_buff, user_data, &made, __func__);
    if (result == DOCA_SUCCESS) {
        *task = (struct doca_compress_task_decompress_lz4_block *)made;
    }
    return result;
}

doca_error_t
doca_compress_task_decompress_lz4_stream_alloc_init(struct doca_compress *compress, uint8_t has_block_checksum,
                                                    uint8_t are_blocks_independent, struct doca_buf const *src_buff,
                                                    struct doca_buf *dst_buff, union doca_data user_data,
                                                    struct doca_compress_task_decompress_lz4_stream **task) {
    struct doca_task *made = NULL;
    doca_error_t result = kind_allocate(compress, TASK_LZ4_STREAM, src_buff, dst_buff, user_data, &made, __func__);
    if (result == DOCA_SUCCESS) {
        made->has_block_checksum = has_block_checksum != 0;
        made->are_blocks_independent = are_blocks_independent != 0;
        *task = (struct doca_compress_task_decompress_lz4_stream *)made;
    }
    return result;
}

void doca_compress_task_decompress_lz4_stream_set_has_block_checksum(
    struct doca_compress_task_decompress_lz4_stream *task, uint8_t has_block_checksum) {
    task_settled(&task->task, __func__);
    task->task.has_block_checksum = has_block_checksum != 0;
}

void doca_compress_task_decompress_lz4_stream_set_are_blocks_independent(
    struct doca_compress_task_decompress_lz4_stream *task, uint8_t are_blocks_independent) {
    task_settled(&task->task, __func__);
    task->task.are_blocks_independent = are_blocks_independent != 0;
}
