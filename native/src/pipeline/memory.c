/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.c - memory that batches deliver to and store from, made known to the backend
 *
 * An engine reaches only what was registered with its device, and registering pins pages and fills tables, so it is
 * done once for all batches (ShadowServe section 4.3). A CPU reaches whatever is in its process.
 */
#include <errno.h>
#include <stdlib.h>

#include "pipeline/internal.h"

uint32_t ss_pipeline_memory_kinds(const struct ss_pipeline *pipeline) {
    /* Fused, the CPU writes the elements itself, so they have to be in its reach. */
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

enum ss_result ss_destination_register(struct ss_pipeline *pipeline, const struct ss_memory *memory,
                                       struct ss_destination **destination_out) {
    if (pipeline == NULL || memory == NULL || destination_out == NULL || (uint32_t)memory->kind > SS_MEMORY_CUDA_IPC) {
        return SS_BAD_ARGUMENT;
    }
    if ((ss_pipeline_memory_kinds(pipeline) >> memory->kind & 1) == 0) {
        return SS_NOT_SUPPORTED;
    }
    if (!memory_is_valid(memory)) {
        return SS_BAD_ARGUMENT;
    }
    struct ss_destination *destination = calloc(1, sizeof *destination);
    if (destination == NULL) {
        return SS_NO_MEMORY;
    }
    destination->pipeline = pipeline;
    destination->kind = memory->kind;
    destination->size = memory->size;
    enum ss_result result =
        pipeline->backend->memory_open(pipeline->device, memory, &destination->handle, &destination->address);
    if (result != SS_OK) {
        int error = errno;
        free(destination);
        errno = error;
        return result;
    }
    *destination_out = destination;
    return SS_OK;
}

void ss_destination_release(struct ss_destination *destination) {
    struct ss_pipeline *pipeline = destination->pipeline;
    if (atomic_load(&pipeline->given_up)) { /* the device may be at it: it keeps the right to be, as long as we live */
        pthread_mutex_lock(&pipeline->lock);
        destination->next = pipeline->kept;
        pipeline->kept = destination;
        pthread_mutex_unlock(&pipeline->lock);
        return;
    }
    pipeline->backend->memory_close(pipeline->device, destination->handle);
    free(destination);
}

uint8_t *ss_destination_address(const struct ss_destination *destination) {
    return destination->address;
}

enum ss_result ss_batch_memory_check(const struct ss_pipeline *pipeline, const struct ss_batch *batch, int plain) {
    for (uint32_t i = 0; i < batch->group_count; i++) {
        const struct ss_group *group = &batch->groups[i];
        const struct ss_destination *registered = group->registered;
        if (registered == NULL) {
            if (!plain && batch->piece_count > 0) {
                return SS_BAD_ARGUMENT;
            }
            continue;
        }
        uintptr_t offset = (uintptr_t)group->destination - (uintptr_t)registered->address; /* wraps where it is below */
        if (registered->pipeline != pipeline || offset > registered->size ||
            group->destination_size > registered->size - offset) {
            return SS_BAD_ARGUMENT;
        }
    }
    return SS_OK;
}
