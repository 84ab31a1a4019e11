/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.c - registered memory, which batches deliver to and store from
 *
 * An engine reaches only memory that is registered with its device. Registration pins pages and fills tables, so it is
 * done once for all batches (ShadowServe section 4.3). A CPU reaches all memory of its process.
 */
#include <errno.h>
#include <stdlib.h>

#include "pipeline/internal.h"

uint32_t ss_pipeline_memory_kinds(const struct ss_pipeline *pipeline) {
    /* When fused, the CPU itself writes the elements, so it must be able to reach them. */
    uint32_t reachable = pipeline->options.fused ? 1U << SS_MEMORY_LOCAL : UINT32_MAX;
    return pipeline->capabilities.memory_kinds & reachable;
}

static int memory_is_valid(const struct ss_memory *memory) {
    if (memory->size == 0 || (memory->kind != SS_MEMORY_CUDA_IPC && memory->address == NULL) ||
        memory->size > UINTPTR_MAX - (uintptr_t)memory->address) {
        return 0;
    }
    return memory->kind == SS_MEMORY_LOCAL || (memory->descriptor != NULL && memory->descriptor_size > 0);
}

enum ss_result ss_memory_register(struct ss_pipeline *pipeline, const struct ss_memory *memory,
                                  struct ss_registered_memory **registered_out) {
    if (pipeline == NULL || memory == NULL || registered_out == NULL || (uint32_t)memory->kind > SS_MEMORY_CUDA_IPC) {
        return SS_BAD_ARGUMENT;
    }
    if ((ss_pipeline_memory_kinds(pipeline) >> memory->kind & 1) == 0) {
        return SS_NOT_SUPPORTED;
    }
    if (!memory_is_valid(memory)) {
        return SS_BAD_ARGUMENT;
    }
    struct ss_registered_memory *registered = calloc(1, sizeof *registered);
    if (registered == NULL) {
        return SS_NO_MEMORY;
    }
    registered->pipeline = pipeline;
    registered->kind = memory->kind;
    registered->size = memory->size;
    enum ss_result result =
        pipeline->backend->memory_open(pipeline->device, memory, &registered->handle, &registered->address);
    if (result != SS_OK) {
        int error = errno;
        free(registered);
        errno = error;
        return result;
    }
    *registered_out = registered;
    return SS_OK;
}

void ss_memory_release(struct ss_registered_memory *registered) {
    struct ss_pipeline *pipeline = registered->pipeline;
    if (atomic_load(
            &pipeline->given_up)) { /* the device may still access it: keep the registration until the process ends */
        pthread_mutex_lock(&pipeline->lock);
        registered->next = pipeline->kept;
        pipeline->kept = registered;
        pthread_mutex_unlock(&pipeline->lock);
        return;
    }
    pipeline->backend->memory_close(pipeline->device, registered->handle);
    free(registered);
}

uint8_t *ss_memory_address(const struct ss_registered_memory *registered) {
    return registered->address;
}

enum ss_result ss_batch_memory_check(const struct ss_pipeline *pipeline, const struct ss_batch *batch, int plain) {
    for (uint32_t i = 0; i < batch->group_count; i++) {
        const struct ss_group *group = &batch->groups[i];
        const struct ss_registered_memory *registered = group->registered;
        if (registered == NULL) {
            if (!plain && batch->piece_count > 0) {
                return SS_BAD_ARGUMENT;
            }
            continue;
        }
        uintptr_t offset = (uintptr_t)group->memory - (uintptr_t)registered->address; /* wraps where it is below */
        if (registered->pipeline != pipeline || offset > registered->size ||
            group->memory_size > registered->size - offset) {
            return SS_BAD_ARGUMENT;
        }
    }
    return SS_OK;
}
