/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doca_buf.h - a piece of an mmap, as tasks take it
 *
 * A source is read from 'data' for 'data_len' bytes. A destination is written behind its data, up to 'head' + 'len',
 * and its data length grows by what was written.
 */
#ifndef DOCA_BUF_H_
#define DOCA_BUF_H_

#include <stddef.h>
#include <stdint.h>

#include "doca_compat.h"
#include "doca_error.h"
#include "doca_types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct doca_buf;

/* 'refcount' may be NULL; it receives the count from before the call. With the last one the buf goes back. */
DOCA_STABLE doca_error_t doca_buf_dec_refcount(struct doca_buf *buf, uint16_t *refcount);

DOCA_STABLE doca_error_t doca_buf_get_data_len(const struct doca_buf *buf, size_t *data_len);

#ifdef __cplusplus
}
#endif

#endif /* DOCA_BUF_H_ */
