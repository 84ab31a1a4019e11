/* SPDX-License-Identifier: Apache-2.0 */
/*
 * buffer.c - memory that is allocated before the first batch: mapped, in huge pages if possible, touched, locked
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "pipeline/internal.h"

#define HUGE_PAGE_BYTES ((uint64_t)2 << 20)

/* Maps 'size' bytes, a multiple of 'alignment', at a multiple of 'alignment'; NULL with errno set. */
static uint8_t *map_aligned(uint64_t size, uint64_t alignment) {
    uint64_t span = size + alignment;
    uint8_t *start = mmap(NULL, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) {
        return NULL;
    }
    uint64_t before = (alignment - (uintptr_t)start % alignment) % alignment;
    if (before > 0) {
        munmap(start, before);
    }
    munmap(start + before + size, span - before - size);
    return start + before;
}

static void touch(uint8_t *data, uint64_t size, uint64_t page) {
#ifdef MADV_POPULATE_WRITE
    if (madvise(data, size, MADV_POPULATE_WRITE) == 0) {
        return;
    }
#endif
    for (uint64_t offset = 0; offset < size; offset += page) {
        ((volatile uint8_t *)data)[offset] = 0;
    }
}

enum ss_result ss_buffer_map(struct ss_buffer *buffer, uint64_t size, int lock, uint64_t *locked_bytes) {
    buffer->data = NULL;
    buffer->size = size;
    buffer->mapped = 0;
    if (size == 0) {
        return SS_OK;
    }
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t unit = size >= HUGE_PAGE_BYTES ? HUGE_PAGE_BYTES : page;
    if (size > UINT64_MAX / 4 || size > SIZE_MAX - 2 * unit) {
        return SS_NO_MEMORY;
    }
    uint64_t mapped = (size + unit - 1) / unit * unit;
    buffer->data = map_aligned(mapped, unit);
    if (buffer->data == NULL) {
        return errno == ENOMEM ? SS_NO_MEMORY : SS_OS_ERROR;
    }
    buffer->mapped = mapped;
#ifdef MADV_HUGEPAGE
    if (unit == HUGE_PAGE_BYTES) {
        /* Only a hint: without huge pages, page faults are more frequent. */
        (void)madvise(buffer->data, mapped, MADV_HUGEPAGE);
    }
#endif
    touch(buffer->data, mapped, page);
    if (lock && mlock(buffer->data, mapped) == 0) {
        *locked_bytes += size;
    }
    return SS_OK;
}

void ss_buffer_unmap(struct ss_buffer *buffer) {
    if (buffer->data != NULL) {
        munmap(buffer->data, buffer->mapped);
        buffer->data = NULL;
    }
}
