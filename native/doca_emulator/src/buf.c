/* SPDX-License-Identifier: Apache-2.0 */
/*
 * buf.c - bufs, and the inventories that they come from
 *
 * Getting bufs is checked against the owner but does not make one: sets of bufs are prepared on one thread and handed
 * to another. Submitting a task binds the inventories and mmaps of its bufs (task.c).
 */
#include <stdlib.h>

#include "emulator.h"

/* ---- Inventories ---------------------------------------------------------------------------------------------- */

doca_error_t doca_buf_inventory_create(size_t num_elements, struct doca_buf_inventory **inventory) {
    REFUSE_IF(inventory == NULL || num_elements == 0 || num_elements > UINT32_MAX, DOCA_ERROR_INVALID_VALUE);
    struct doca_buf_inventory *made = calloc(1, sizeof *made + num_elements * sizeof made->elements[0]);
    REFUSE_IF(made == NULL, DOCA_ERROR_NO_MEMORY);
    made->count = made->free_count = (uint32_t)num_elements;
    for (size_t i = 0; i < num_elements; i++) {
        made->elements[i].inventory = made;
        made->elements[i].next = made->free;
        made->free = &made->elements[i];
    }
    *inventory = made;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_inventory_start(struct doca_buf_inventory *inventory) {
    REFUSE_IF(inventory == NULL, DOCA_ERROR_INVALID_VALUE);
    owner_check(&inventory->owner, __func__, "inventory");
    REFUSE_IF(inventory->started, DOCA_ERROR_BAD_STATE);
    inventory->started = true;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_inventory_destroy(struct doca_buf_inventory *inventory) {
    REFUSE_IF(inventory == NULL, DOCA_ERROR_INVALID_VALUE);
    owner_check(&inventory->owner, __func__, "inventory");
    REFUSE_IF(inventory->free_count != inventory->count, DOCA_ERROR_IN_USE);
    owner_release(&inventory->owner);
    free(inventory);
    return DOCA_SUCCESS;
}

/* ---- Bufs ----------------------------------------------------------------------------------------------------- */

/* Whether [inner, inner + inner_size) is within the range around it. */
static bool range_within(const uint8_t *outer, size_t outer_size, const uint8_t *inner, size_t inner_size) {
    uintptr_t offset = (uintptr_t)inner - (uintptr_t)outer;
    return (uintptr_t)inner >= (uintptr_t)outer && offset <= outer_size && inner_size <= outer_size - offset;
}

doca_error_t doca_buf_inventory_buf_get_by_args(struct doca_buf_inventory *inventory, struct doca_mmap *mmap,
                                                void *addr, size_t len, void *data, size_t data_len,
                                                struct doca_buf **buf) {
    REFUSE_IF(inventory == NULL || mmap == NULL || addr == NULL || data == NULL || buf == NULL,
              DOCA_ERROR_INVALID_VALUE);
    owner_check(&inventory->owner, __func__, "inventory");
    if (!mmap->thread_safe) {
        owner_check(&mmap->owner, __func__, "mmap");
    }
    REFUSE_IF(!inventory->started || !mmap->started, DOCA_ERROR_BAD_STATE);
    REFUSE_IF(!range_within(mmap->address, mmap->size, addr, len) || !range_within(addr, len, data, data_len),
              DOCA_ERROR_INVALID_VALUE);
    struct doca_buf *taken = inventory->free;
    REFUSE_IF(taken == NULL, DOCA_ERROR_NO_MEMORY);
    inventory->free = taken->next;
    inventory->free_count--;
    *taken = (struct doca_buf){.inventory = inventory,
                               .mmap = mmap,
                               .head = addr,
                               .len = len,
                               .data = data,
                               .data_len = data_len,
                               .taken = true,
                               .counted = !mmap->thread_safe};
    if (taken->counted) {
        atomic_fetch_add(&mmap->buf_count, 1);
    }
    *buf = taken;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_dec_refcount(struct doca_buf *buf, uint16_t *refcount) {
    REFUSE_IF(buf == NULL, DOCA_ERROR_INVALID_VALUE);
    struct doca_buf_inventory *inventory = buf->inventory;
    owner_check(&inventory->owner, __func__, "buf's inventory");
    REFUSE_IF(!buf->taken, DOCA_ERROR_BAD_STATE);
    if (buf->sources + buf->targets > 0) {
        misuse(__func__, "a buf must not be given back while a task that uses it is in flight");
    }
    if (refcount != NULL) {
        *refcount = 1;
    }
    if (buf->counted) {
        atomic_fetch_sub(&buf->mmap->buf_count, 1);
    }
    buf->taken = false;
    buf->next = inventory->free;
    inventory->free = buf;
    inventory->free_count++;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_get_data_len(const struct doca_buf *buf, size_t *data_len) {
    owner_check(&buf->inventory->owner, __func__, "buf's inventory");
    if (!buf->taken) {
        misuse(__func__, "a buf must not be used after it was given back");
    }
    *data_len = buf->data_len;
    return DOCA_SUCCESS;
}
