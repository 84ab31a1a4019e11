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

enum doca_pe_event_mode { DOCA_PE_EVENT_MODE_PROGRESS_SELECTIVE = 0, DOCA_PE_EVENT_MODE_PROGRESS_ALL = 1 };

/* Without FLUSH a task may wait until another one, or doca_ctx_flush_tasks(), flushes. */
enum doca_task_submit_flag {
    DOCA_TASK_SUBMIT_FLAG_NONE = 0,
    DOCA_TASK_SUBMIT_FLAG_FLUSH = 1 << 0,
    DOCA_TASK_SUBMIT_FLAG_OPTIMIZE_REPORTS = 1 << 1
};

DOCA_STABLE doca_error_t doca_pe_create(struct doca_pe **pe);
DOCA_STABLE doca_error_t doca_pe_destroy(struct doca_pe *pe);
DOCA_STABLE doca_error_t doca_pe_connect_ctx(struct doca_pe *pe, struct doca_ctx *ctx);

/* Returns 1 where something moved, one completion at most, else 0. */
DOCA_STABLE uint8_t doca_pe_progress(struct doca_pe *pe);
DOCA_STABLE doca_error_t doca_pe_get_notification_handle(const struct doca_pe *pe, doca_notification_handle_t *handle);
DOCA_STABLE doca_error_t doca_pe_request_notification(struct doca_pe *pe);
DOCA_STABLE doca_error_t doca_pe_clear_notification(struct doca_pe *pe, doca_notification_handle_t handle);
DOCA_STABLE doca_error_t doca_pe_get_num_inflight_tasks(const struct doca_pe *pe, size_t *num_inflight_tasks);
DOCA_EXPERIMENTAL doca_error_t doca_pe_set_event_mode(struct doca_pe *pe, enum doca_pe_event_mode event_mode);

DOCA_STABLE doca_error_t doca_task_submit(struct doca_task *task);
DOCA_STABLE doca_error_t doca_task_try_submit(struct doca_task *task);
DOCA_EXPERIMENTAL doca_error_t doca_task_submit_ex(struct doca_task *task, uint32_t flags);
DOCA_STABLE void doca_task_free(struct doca_task *task);
DOCA_STABLE doca_error_t doca_task_get_status(const struct doca_task *task);
DOCA_STABLE union doca_data doca_task_get_user_data(const struct doca_task *task);
DOCA_STABLE void doca_task_set_user_data(struct doca_task *task, union doca_data user_data);
DOCA_STABLE struct doca_ctx *doca_task_get_ctx(const struct doca_task *task);

#ifdef __cplusplus
}
#endif

#endif /* DOCA_PE_H_ */
