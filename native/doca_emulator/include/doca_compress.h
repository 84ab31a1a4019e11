/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doca_compress.h - decompression
 *
 * Two kinds of task of one shape: a raw Deflate stream, and one LZ4 block. A task takes one whole stream. Checksums are
 * of the plain bytes.
 */
#ifndef DOCA_COMPRESS_H_
#define DOCA_COMPRESS_H_

#include <stdint.h>

#include "doca_buf.h"
#include "doca_compat.h"
#include "doca_ctx.h"
#include "doca_dev.h"
#include "doca_error.h"
#include "doca_pe.h"
#include "doca_types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct doca_compress;

DOCA_EXPERIMENTAL doca_error_t doca_compress_create(struct doca_dev *dev, struct doca_compress **compress);
DOCA_EXPERIMENTAL doca_error_t doca_compress_destroy(struct doca_compress *compress);
DOCA_EXPERIMENTAL struct doca_ctx *doca_compress_as_ctx(struct doca_compress *compress);
DOCA_EXPERIMENTAL doca_error_t doca_compress_cap_get_max_num_tasks(struct doca_compress *compress,
                                                                   uint32_t *max_num_tasks);

/* ---- raw Deflate --------------------------------------------------------------------------------------------- */

struct doca_compress_task_decompress_deflate;

typedef void (*doca_compress_task_decompress_deflate_completion_cb_t)(
    struct doca_compress_task_decompress_deflate *task, union doca_data task_user_data, union doca_data ctx_user_data);

DOCA_EXPERIMENTAL doca_error_t
doca_compress_cap_task_decompress_deflate_is_supported(const struct doca_devinfo *devinfo);
DOCA_EXPERIMENTAL doca_error_t doca_compress_cap_task_decompress_deflate_get_max_buf_size(
    const struct doca_devinfo *devinfo, uint64_t *max_buffer_size);
DOCA_EXPERIMENTAL doca_error_t doca_compress_task_decompress_deflate_set_conf(
    struct doca_compress *compress, doca_compress_task_decompress_deflate_completion_cb_t task_completion_cb,
    doca_compress_task_decompress_deflate_completion_cb_t task_error_cb, uint32_t num_tasks);
DOCA_EXPERIMENTAL doca_error_t doca_compress_task_decompress_deflate_alloc_init(
    struct doca_compress *compress, struct doca_buf const *src_buff, struct doca_buf *dst_buff,
    union doca_data user_data, struct doca_compress_task_decompress_deflate **task);
DOCA_EXPERIMENTAL struct doca_task *
doca_compress_task_decompress_deflate_as_task(struct doca_compress_task_decompress_deflate *task);
DOCA_EXPERIMENTAL void doca_compress_task_decompress_deflate_set_src(struct doca_compress_task_decompress_deflate *task,
                                                                     struct doca_buf const *src_buff);
DOCA_EXPERIMENTAL void doca_compress_task_decompress_deflate_set_dst(struct doca_compress_task_decompress_deflate *task,
                                                                     struct doca_buf *dst_buff);
DOCA_EXPERIMENTAL uint32_t
doca_compress_task_decompress_deflate_get_crc_cs(const struct doca_compress_task_decompress_deflate *task);

/* ---- LZ4: one block ------------------------------------------------------------------------------------------ */

struct doca_compress_task_decompress_lz4_block;

typedef void (*doca_compress_task_decompress_lz4_block_completion_cb_t)(
    struct doca_compress_task_decompress_lz4_block *task, union doca_data task_user_data,
    union doca_data ctx_user_data);

DOCA_EXPERIMENTAL doca_error_t
doca_compress_cap_task_decompress_lz4_block_is_supported(const struct doca_devinfo *devinfo);
DOCA_EXPERIMENTAL doca_error_t doca_compress_cap_task_decompress_lz4_block_get_max_buf_size(
    const struct doca_devinfo *devinfo, uint64_t *max_buffer_size);
DOCA_EXPERIMENTAL doca_error_t doca_compress_task_decompress_lz4_block_set_conf(
    struct doca_compress *compress, doca_compress_task_decompress_lz4_block_completion_cb_t task_completion_cb,
    doca_compress_task_decompress_lz4_block_completion_cb_t task_error_cb, uint32_t num_tasks);
DOCA_EXPERIMENTAL doca_error_t doca_compress_task_decompress_lz4_block_alloc_init(
    struct doca_compress *compress, struct doca_buf const *src_buff, struct doca_buf *dst_buff,
    union doca_data user_data, struct doca_compress_task_decompress_lz4_block **task);
DOCA_EXPERIMENTAL struct doca_task *
doca_compress_task_decompress_lz4_block_as_task(struct doca_compress_task_decompress_lz4_block *task);
DOCA_EXPERIMENTAL void
doca_compress_task_decompress_lz4_block_set_src(struct doca_compress_task_decompress_lz4_block *task,
                                                struct doca_buf const *src_buff);
DOCA_EXPERIMENTAL void
doca_compress_task_decompress_lz4_block_set_dst(struct doca_compress_task_decompress_lz4_block *task,
                                                struct doca_buf *dst_buff);
DOCA_EXPERIMENTAL uint32_t
doca_compress_task_decompress_lz4_block_get_crc_cs(const struct doca_compress_task_decompress_lz4_block *task);

#ifdef __cplusplus
}
#endif

#endif /* DOCA_COMPRESS_H_ */
