/* SPDX-License-Identifier: Apache-2.0 */
/*
 * buf.c - bufs, their lists, and the inventories that they come from
 *
 * Getting and changing bufs is checked against the owner but does not make one: sets of bufs are prepared on one thread
 * and handed to another. Submitting a task binds the inventories and mmaps of its bufs (task.c).
 */
#include <stdlib.h>

#include "emulator.h"

/* Ends the process where the buf is back in its inventory, or its inventory is another thread's. */
static void buf_check(const struct doca_buf *buf, const char *call) {
    owner_check(&buf->inventory->owner, call, "buf's inventory");
    if (buf->refcount == 0 && buf->previous == NULL) {
        misuse(call, "a buf must not be used after its last reference was given back");
    }
}

/* As buf_check(), for calls that change the buf. */
static void buf_check_change(const struct doca_buf *buf, const char *call) {
    buf_check(buf, call);
    if (buf->sources + buf->targets > 0) {
        misuse(call, "a buf must not be changed while a task that uses it is in flight");
    }
}

size_t buf_free_space(const struct doca_buf *buf) {
    return (size_t)(buf->head + buf->len - (buf->data + buf->data_len));
}

uint32_t buf_list_length(const struct doca_buf *buf) {
    uint32_t length = 0;
    for (; buf != NULL; buf = buf->next) {
        length++;
    }
    return length;
}

/* ---- Inventories ---------------------------------------------------------------------------------------------- */

doca_error_t doca_buf_inventory_create(size_t num_elements, struct doca_buf_inventory **inventory) {
    if (inventory == NULL || num_elements == 0 || num_elements > UINT32_MAX) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    struct doca_buf_inventory *made = calloc(1, sizeof *made + num_elements * sizeof made->elements[0]);
    if (made == NULL) {
        return DOCA_ERROR_NO_MEMORY;
    }
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
    if (inventory == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    owner_check(&inventory->owner, __func__, "inventory");
    if (inventory->started) {
        return DOCA_ERROR_BAD_STATE;
    }
    inventory->started = true;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_inventory_stop(struct doca_buf_inventory *inventory) {
    if (inventory == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    owner_check(&inventory->owner, __func__, "inventory");
    if (!inventory->started) {
        return DOCA_ERROR_BAD_STATE;
    }
    if (inventory->free_count != inventory->count) {
        return DOCA_ERROR_IN_USE;
    }
    inventory->started = false;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_inventory_destroy(struct doca_buf_inventory *inventory) {
    if (inventory == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    owner_check(&inventory->owner, __func__, "inventory");
    if (inventory->free_count != inventory->count) {
        return DOCA_ERROR_IN_USE;
    }
    owner_release(&inventory->owner);
    free(inventory);
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_inventory_get_num_elements(const struct doca_buf_inventory *inventory,
                                                 uint32_t *num_of_elements) {
    if (inventory == NULL || num_of_elements == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    *num_of_elements = inventory->count;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_inventory_get_num_free_elements(const struct doca_buf_inventory *inventory,
                                                      uint32_t *num_of_free_elements) {
    if (inventory == NULL || num_of_free_elements == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    owner_check(&inventory->owner, __func__, "inventory");
    *num_of_free_elements = inventory->free_count;
    return DOCA_SUCCESS;
}

/* Whether [inner, inner + inner_size) is within the range around it. */
static bool range_within(const uint8_t *outer, size_t outer_size, const uint8_t *inner, size_t inner_size) {
    uintptr_t offset = (uintptr_t)inner - (uintptr_t)outer;
    return (uintptr_t)inner >= (uintptr_t)outer && offset <= outer_size && inner_size <= outer_size - offset;
}

doca_error_t doca_buf_inventory_buf_get_by_args(struct doca_buf_inventory *inventory, struct doca_mmap *mmap,
                                                void *addr, size_t len, void *data, size_t data_len,
                                                struct doca_buf **buf) {
    if (inventory == NULL || mmap == NULL || addr == NULL || data == NULL || buf == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    owner_check(&inventory->owner, __func__, "inventory");
    if (!mmap->thread_safe) {
        owner_check(&mmap->owner, __func__, "mmap");
    }
    if (!inventory->started || !mmap->started) {
        return DOCA_ERROR_BAD_STATE;
    }
    if (!range_within(mmap->address, mmap->size, addr, len) || !range_within(addr, len, data, data_len)) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    struct doca_buf *taken = inventory->free;
    if (taken == NULL) {
        return DOCA_ERROR_NO_MEMORY;
    }
    inventory->free = taken->next;
    inventory->free_count--;
    *taken = (struct doca_buf){.inventory = inventory,
                               .mmap = mmap,
                               .head = addr,
                               .len = len,
                               .data = data,
                               .data_len = data_len,
                               .counted = !mmap->thread_safe,
                               .refcount = 1};
    if (taken->counted) {
        atomic_fetch_add(&mmap->buf_count, 1);
    }
    *buf = taken;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_inventory_buf_dup(struct doca_buf_inventory *inventory, const struct doca_buf *src_buf,
                                        struct doca_buf **dst_buf) {
    if (inventory == NULL || src_buf == NULL || dst_buf == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    buf_check(src_buf, __func__);
    return doca_buf_inventory_buf_get_by_args(inventory, src_buf->mmap, src_buf->head, src_buf->len, src_buf->data,
                                              src_buf->data_len, dst_buf);
}

/* ---- References ----------------------------------------------------------------------------------------------- */

doca_error_t doca_buf_inc_refcount(struct doca_buf *buf, uint16_t *refcount) {
    if (buf == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    buf_check(buf, __func__);
    if (buf->refcount == UINT16_MAX) {
        return DOCA_ERROR_TOO_BIG;
    }
    if (refcount != NULL) {
        *refcount = buf->refcount;
    }
    buf->refcount++;
    return DOCA_SUCCESS;
}

/* Gives a list, most often of one, back to its inventories. */
static void list_give_back(struct doca_buf *buf, const char *call) {
    while (buf != NULL) {
        struct doca_buf *next = buf->next;
        struct doca_buf_inventory *inventory = buf->inventory;
        buf->refcount = 1; /* for the check: members of a list have none of their own */
        buf_check_change(buf, call);
        if (buf->counted) {
            atomic_fetch_sub(&buf->mmap->buf_count, 1);
        }
        buf->refcount = 0;
        buf->previous = NULL;
        buf->next = inventory->free;
        inventory->free = buf;
        inventory->free_count++;
        buf = next;
    }
}

doca_error_t doca_buf_dec_refcount(struct doca_buf *buf, uint16_t *refcount) {
    if (buf == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    owner_check(&buf->inventory->owner, __func__, "buf's inventory");
    if (buf->previous != NULL) {
        return DOCA_ERROR_NOT_PERMITTED;
    }
    if (buf->refcount == 0) {
        return DOCA_ERROR_BAD_STATE;
    }
    if (refcount != NULL) {
        *refcount = buf->refcount;
    }
    if (buf->refcount == 1) {
        list_give_back(buf, __func__);
    } else {
        buf->refcount--;
    }
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_get_refcount(const struct doca_buf *buf, uint16_t *refcount) {
    if (buf == NULL || refcount == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    *refcount = buf->refcount;
    return DOCA_SUCCESS;
}

/* ---- Data ----------------------------------------------------------------------------------------------------- */

doca_error_t doca_buf_get_len(const struct doca_buf *buf, size_t *len) {
    buf_check(buf, __func__);
    *len = buf->len;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_get_head(const struct doca_buf *buf, void **head) {
    buf_check(buf, __func__);
    *head = buf->head;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_get_data_len(const struct doca_buf *buf, size_t *data_len) {
    buf_check(buf, __func__);
    *data_len = buf->data_len;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_get_data(const struct doca_buf *buf, void **data) {
    buf_check(buf, __func__);
    *data = buf->data;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_set_data(struct doca_buf *buf, void *data, size_t data_len) {
    buf_check_change(buf, __func__);
    buf->data = data;
    buf->data_len = data_len;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_set_data_len(struct doca_buf *buf, size_t data_len) {
    buf_check_change(buf, __func__);
    buf->data_len = data_len;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_reset_data_len(struct doca_buf *buf) {
    buf_check_change(buf, __func__);
    buf->data_len = 0;
    return DOCA_SUCCESS;
}

/* ---- Lists ---------------------------------------------------------------------------------------------------- */

doca_error_t doca_buf_get_next_in_list(struct doca_buf *buf, struct doca_buf **next_buf) {
    buf_check(buf, __func__);
    *next_buf = buf->next;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_get_last_in_list(struct doca_buf *buf, struct doca_buf **last_buf) {
    buf_check(buf, __func__);
    while (buf->next != NULL) {
        buf = buf->next;
    }
    *last_buf = buf;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_is_last_in_list(const struct doca_buf *buf, uint8_t *is_last) {
    buf_check(buf, __func__);
    *is_last = buf->next == NULL;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_is_first_in_list(const struct doca_buf *buf, uint8_t *is_first) {
    buf_check(buf, __func__);
    *is_first = buf->previous == NULL;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_is_in_list(const struct doca_buf *buf, uint8_t *is_in_list) {
    buf_check(buf, __func__);
    *is_in_list = buf->next != NULL || buf->previous != NULL;
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_get_list_len(const struct doca_buf *buf, uint32_t *num_elements) {
    buf_check(buf, __func__);
    *num_elements = buf_list_length(buf);
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_chain_list(struct doca_buf *list1, struct doca_buf *list2) {
    if (list1 == NULL || list2 == NULL || list1 == list2) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    buf_check_change(list1, __func__);
    buf_check_change(list2, __func__);
    if (list1->previous != NULL || list2->previous != NULL || list2->refcount != 1) {
        return DOCA_ERROR_NOT_PERMITTED;
    }
    struct doca_buf *last = list1;
    while (last->next != NULL) {
        last = last->next;
    }
    last->next = list2;
    list2->previous = last;
    list2->refcount = 0; /* the list's head counts for it */
    return DOCA_SUCCESS;
}

doca_error_t doca_buf_unchain_list(struct doca_buf *list1, struct doca_buf *list2) {
    if (list1 == NULL || list2 == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    buf_check_change(list1, __func__);
    buf_check_change(list2, __func__);
    struct doca_buf *member = list1;
    while (member->next != NULL && member->next != list2) {
        member = member->next;
    }
    if (member->next == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    member->next = NULL;
    list2->previous = NULL;
    list2->refcount = 1;
    return DOCA_SUCCESS;
}
