/* SPDX-License-Identifier: Apache-2.0 */
/* pe.c - progress engines: each reports what their contexts have done, in turns */
#include <stdlib.h>

#include "emulator.h"

doca_error_t doca_pe_create(struct doca_pe **pe) {
    REFUSE_IF(pe == NULL, DOCA_ERROR_INVALID_VALUE);
    struct doca_pe *made = calloc(1, sizeof *made);
    REFUSE_IF(made == NULL, DOCA_ERROR_NO_MEMORY);
    pthread_mutex_init(&made->lock, NULL);
    *pe = made;
    return DOCA_SUCCESS;
}

doca_error_t doca_pe_destroy(struct doca_pe *pe) {
    REFUSE_IF(pe == NULL, DOCA_ERROR_INVALID_VALUE);
    owner_check(&pe->owner, __func__, "progress engine");
    REFUSE_IF(pe->context_count > 0, DOCA_ERROR_IN_USE);
    if (pe->in_callback) {
        misuse(__func__, "a progress engine must not be destroyed from within a callback");
    }
    pthread_mutex_destroy(&pe->lock);
    owner_release(&pe->owner);
    free(pe);
    return DOCA_SUCCESS;
}

doca_error_t doca_pe_connect_ctx(struct doca_pe *pe, struct doca_ctx *ctx) {
    REFUSE_IF(pe == NULL || ctx == NULL, DOCA_ERROR_INVALID_VALUE);
    owner_check(&pe->owner, __func__, "progress engine");
    REFUSE_IF(ctx->state != DOCA_CTX_STATE_IDLE, DOCA_ERROR_BAD_STATE);
    REFUSE_IF(ctx->pe != NULL, DOCA_ERROR_NOT_PERMITTED);
    ctx->pe = pe;
    ctx->next = pe->contexts;
    pe->contexts = ctx;
    pe->context_count++;
    return DOCA_SUCCESS;
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
        if (ctx_progress(ctx)) {
            return 1;
        }
    }
    return 0;
}
