/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doca_pe.h - the progress engine, and what is common to all tasks
 *
 * One thread owns a progress engine and all that is connected to it. A submitted task belongs to the library until its
 * callback is called, which doca_pe_progress() does.
 */
#ifndef DOCA_PE_H_
#define DOCA_PE_H_

#include <stddef.h>
#include <stdint.h>

#include "doca_compat.h"
#include "doca_ctx.h"
#include "doca_error.h"
#include "doca_types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct doca_pe;
struct doca_task;

DOCA_STABLE doca_error_t doca_pe_create(struct doca_pe **pe);
DOCA_STABLE doca_error_t doca_pe_destroy(struct doca_pe *pe);
DOCA_STABLE doca_error_t doca_pe_connect_ctx(struct doca_pe *pe, struct doca_ctx *ctx);

/* Returns 1 where something moved, one completion at most, else 0. */
DOCA_STABLE uint8_t doca_pe_progress(struct doca_pe *pe);

DOCA_STABLE doca_error_t doca_task_submit(struct doca_task *task);
DOCA_STABLE void doca_task_free(struct doca_task *task);
DOCA_STABLE doca_error_t doca_task_get_status(const struct doca_task *task);

#ifdef __cplusplus
}
#endif

#endif /* DOCA_PE_H_ */
