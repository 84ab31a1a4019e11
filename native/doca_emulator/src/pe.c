/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pe.c - progress engines and their notifications
 *
 * The file descriptor becomes readable where a task completes while notifications are armed, or had completed before
 * they were: a program may progress until nothing moves, arm, and sleep. While armed, and in the mode that is the
 * default, only contexts with such an event are looked at, until the notification is cleared.
 */
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "emulator.h"

doca_error_t doca_pe_create(struct doca_pe **pe) {
    if (pe == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    struct doca_pe *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return DOCA_ERROR_NO_MEMORY;
    }
    made->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (made->event_fd < 0) {
        free(made);
        return DOCA_ERROR_OPERATING_SYSTEM;
    }
    pthread_mutex_init(&made->lock, NULL);
    *pe = made;
    return DOCA_SUCCESS;
}

doca_error_t doca_pe_destroy(struct doca_pe *pe) {
    if (pe == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    owner_check(&pe->owner, __func__, "progress engine");
    if (pe->context_count > 0) {
        return DOCA_ERROR_IN_USE;
    }
    if (pe->in_callback) {
        misuse(__func__, "a progress engine must not be destroyed from within a callback");
    }
    close(pe->event_fd);
    pthread_mutex_destroy(&pe->lock);
    owner_release(&pe->owner);
    free(pe);
    return DOCA_SUCCESS;
}

doca_error_t doca_pe_connect_ctx(struct doca_pe *pe, struct doca_ctx *ctx) {
    if (pe == NULL || ctx == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    owner_check(&pe->owner, __func__, "progress engine");
    if (ctx->state != DOCA_CTX_STATE_IDLE) {
        return DOCA_ERROR_BAD_STATE;
    }
    if (ctx->pe != NULL) {
        return DOCA_ERROR_NOT_PERMITTED;
    }
    ctx->pe = pe;
    ctx->next = pe->contexts;
    pe->contexts = ctx;
    pe->context_count++;
    return DOCA_SUCCESS;
}

/* Whether this context's turn has anything to look at. */
static bool ctx_awake(struct doca_pe *pe, const struct doca_ctx *ctx) {
    pthread_mutex_lock(&pe->lock);
    bool awake = !pe->armed || pe->mode == DOCA_PE_EVENT_MODE_PROGRESS_ALL || ctx->event;
    pthread_mutex_unlock(&pe->lock);
    return awake;
}

uint8_t doca_pe_progress(struct doca_pe *pe) {
    owner_use(&pe->owner, __func__, "progress engine");
    if (pe->in_callback) {
        misuse(__func__, "a progress engine must not be progressed from within a callback");
    }
    for (uint32_t i = 0, count = pe->context_count; i < count; i++) {
        struct doca_ctx *ctx = pe->contexts;
        for (uint32_t skip = pe->turn++ % count; skip > 0; skip--) {
            ctx = ctx->next;
        }
        /* Its callbacks may have destroyed the context, so that nothing may be asked of it then. */
        if (ctx_awake(pe, ctx) && ctx_progress(ctx)) {
            return 1;
        }
    }
    return 0;
}

doca_error_t doca_pe_get_notification_handle(const struct doca_pe *pe, doca_notification_handle_t *handle) {
    if (pe == NULL || handle == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    *handle = pe->event_fd;
    return DOCA_SUCCESS;
}

static void event_drain(struct doca_pe *pe) {
    uint64_t count;
    while (read(pe->event_fd, &count, sizeof count) > 0) {
    }
    for (struct doca_ctx *ctx = pe->contexts; ctx != NULL; ctx = ctx->next) {
        ctx->event = false;
    }
}

void pe_notify(struct doca_pe *pe, struct doca_ctx *ctx) {
    const uint64_t one = 1;
    ctx->event = true;
    if (write(pe->event_fd, &one, sizeof one) < 0) {
        emulator_log(DOCA_LOG_LEVEL_ERROR, "a notification could not be given");
    }
}

doca_error_t doca_pe_request_notification(struct doca_pe *pe) {
    if (pe == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    owner_use(&pe->owner, __func__, "progress engine");
    pthread_mutex_lock(&pe->lock);
    event_drain(pe);
    pe->armed = true;
    for (struct doca_ctx *ctx = pe->contexts; ctx != NULL; ctx = ctx->next) {
        if (ctx->done.count > 0) {
            pe_notify(pe, ctx);
        }
    }
    pthread_mutex_unlock(&pe->lock);
    return DOCA_SUCCESS;
}

doca_error_t doca_pe_clear_notification(struct doca_pe *pe, doca_notification_handle_t handle) {
    (void)handle; /* nothing on Linux */
    if (pe == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    owner_use(&pe->owner, __func__, "progress engine");
    pthread_mutex_lock(&pe->lock);
    event_drain(pe);
    pe->armed = false;
    pthread_mutex_unlock(&pe->lock);
    return DOCA_SUCCESS;
}

doca_error_t doca_pe_get_num_inflight_tasks(const struct doca_pe *pe, size_t *num_inflight_tasks) {
    if (pe == NULL || num_inflight_tasks == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    owner_check(&pe->owner, __func__, "progress engine");
    *num_inflight_tasks = 0;
    for (const struct doca_ctx *ctx = pe->contexts; ctx != NULL; ctx = ctx->next) {
        *num_inflight_tasks += ctx->in_flight;
    }
    return DOCA_SUCCESS;
}

doca_error_t doca_pe_set_event_mode(struct doca_pe *pe, enum doca_pe_event_mode event_mode) {
    if (pe == NULL ||
        (event_mode != DOCA_PE_EVENT_MODE_PROGRESS_SELECTIVE && event_mode != DOCA_PE_EVENT_MODE_PROGRESS_ALL)) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    owner_check(&pe->owner, __func__, "progress engine");
    if (pe->in_callback) {
        misuse(__func__, "the event mode must not be set from within a callback");
    }
    pe->mode = event_mode;
    return DOCA_SUCCESS;
}
