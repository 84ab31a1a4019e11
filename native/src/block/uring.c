/* SPDX-License-Identifier: Apache-2.0 */
/*
 * uring.c - a device through io_uring: one thread, one ring, the file and the arenas registered with it
 *
 * The thread fills the ring with the schedule's requests, submits them, checks one completed read or, if there is none,
 * waits for completions. A pending read of an eventfd lets other threads wake it. They do so only while it waits, so a
 * busy device costs no extra calls.
 *
 * Neither a polling thread of the kernel (SQPOLL) nor polling for completions (IOPOLL) is used:
 * docs/guides/storage-devices.md has the measurements.
 */
#include "block/uring.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define REGION_BYTES_MAX (1u << 30)
#define PAUSE_US 1000
#define OPCODE_READV_FIXED 60 /* IORING_OP_READV_FIXED, of Linux 6.15 */

int ss_ring_region(const struct ss_ring *ring, const uint8_t *memory, uint64_t size) {
    for (uint32_t index = 0; index < ring->region_count; index++) {
        const struct ss_region *region = &ring->regions[index];
        if (memory >= region->memory && memory + size <= region->memory + region->size) {
            return (int)index;
        }
    }
    return -1;
}

/* ---- Life ------------------------------------------------------------------------------------------------------ */

/* The kernel is too old, built without io_uring, or configured to refuse it, as container runtimes do. */
static int is_unavailable(int error) {
    return error == ENOSYS || error == EPERM || error == EACCES || error == EINVAL || error == ENOMEM;
}

static int has_opcode(struct io_uring *ring, int opcode) {
    struct io_uring_probe *probe = io_uring_get_probe_ring(ring);
    int has = probe != NULL && io_uring_opcode_supported(probe, opcode);

    io_uring_free_probe(probe);
    return has;
}

enum ss_result ss_ring_start(struct ss_block *block, struct ss_ring *ring, uint32_t flags) {
    block->driver_state = ring;
    ring->wake_fd = -1;
    pthread_mutex_init(&ring->region_lock, NULL);
    struct io_uring_params parameters = {.flags = flags};
    int error = -io_uring_queue_init_params(block->options.queue_depth + 2, &ring->ring, &parameters);
    if (error != 0) {
        errno = error;
        return is_unavailable(error) ? SS_NOT_SUPPORTED : SS_OS_ERROR;
    }
    ring->is_made = 1;
    ring->wake_fd = eventfd(0, EFD_CLOEXEC);
    if (ring->wake_fd < 0) {
        return SS_OS_ERROR;
    }
    if (block->device.fd >= 0) {
        ring->has_file = io_uring_register_files(&ring->ring, &block->device.fd, 1) == 0;
    }
    ring->has_buffers = io_uring_register_buffers_sparse(&ring->ring, SS_REGIONS_MAX) == 0;
    ring->has_fixed_vectors = has_opcode(&ring->ring, OPCODE_READV_FIXED);
    return ss_block_start_thread(block, 0);
}

void ss_ring_finish(struct ss_block *block) {
    struct ss_ring *ring = block->driver_state;

    block->driver_state = NULL;
    if (ring == NULL) {
        return;
    }
    if (ring->is_made) {
        /* The kernel frees rings asynchronously, and would keep the device open until then. */
        if (ring->has_file) {
            (void)io_uring_unregister_files(&ring->ring);
        }
        io_uring_queue_exit(&ring->ring);
    }
    if (ring->wake_fd >= 0) {
        close(ring->wake_fd);
    }
    pthread_mutex_destroy(&ring->region_lock);
    free(ring);
}

void ss_ring_wake(struct ss_block *block) {
    struct ss_ring *ring = block->driver_state;

    if (ring != NULL && ring->is_waiting) {
        ring->is_waiting = 0;
        (void)!eventfd_write(ring->wake_fd, 1);
    }
}

/* ---- Memory ---------------------------------------------------------------------------------------------------- */

static int set_region(struct ss_ring *ring, uint32_t index, const uint8_t *memory, uint64_t size) {
    struct iovec vector = {.iov_base = (void *)(uintptr_t)memory, .iov_len = (size_t)size};
    __u64 tag = 0;

    int result = io_uring_register_buffers_update_tag(&ring->ring, index, &vector, &tag, 1);
    return result < 0 ? -result : 0;
}

static enum ss_result add_region(struct ss_block *block, uint8_t *memory, uint64_t size) {
    struct ss_ring *ring = block->driver_state;
    uint32_t index = 0;

    while (index < ring->region_count && ring->regions[index].size > 0) {
        index++;
    }
    if (index == SS_REGIONS_MAX) {
        return SS_NO_SPACE;
    }
    int error = set_region(ring, index, memory, size);
    if (error > 0) {
        errno = error;
        return error == ENOMEM ? SS_NO_MEMORY : SS_OS_ERROR;
    }
    pthread_mutex_lock(&block->lock);
    ring->regions[index] = (struct ss_region){.memory = memory, .size = size};
    ring->region_count += index == ring->region_count;
    pthread_mutex_unlock(&block->lock);
    return SS_OK;
}

/* Unregisters all regions within some memory. Requests in flight keep their references. */
static void drop_regions(struct ss_block *block, const uint8_t *memory, uint64_t size) {
    struct ss_ring *ring = block->driver_state;

    for (uint32_t index = 0; index < ring->region_count; index++) {
        struct ss_region *region = &ring->regions[index];
        if (region->size > 0 && region->memory >= memory && region->memory < memory + size) {
            pthread_mutex_lock(&block->lock);
            *region = (struct ss_region){.memory = NULL};
            pthread_mutex_unlock(&block->lock);
            (void)set_region(ring, index, NULL, 0);
        }
    }
}

static void count_regions(struct ss_block *block) {
    const struct ss_ring *ring = block->driver_state;
    uint32_t count = 0;

    for (uint32_t index = 0; index < ring->region_count; index++) {
        count += ring->regions[index].size > 0;
    }
    pthread_mutex_lock(&block->lock);
    block->schedule.statistics.registered = ring->refuses_fixed ? 0 : count;
    pthread_mutex_unlock(&block->lock);
}

void ss_ring_drop_memory(struct ss_block *block, const uint8_t *memory, uint64_t size) {
    struct ss_ring *ring = block->driver_state;

    pthread_mutex_lock(&ring->region_lock);
    drop_regions(block, memory, size);
    count_regions(block);
    pthread_mutex_unlock(&ring->region_lock);
}

enum ss_result ss_ring_add_memory(struct ss_block *block, uint8_t *memory, uint64_t size) {
    struct ss_ring *ring = block->driver_state;
    enum ss_result result = SS_OK;

    if (!ring->has_buffers) {
        return SS_NOT_SUPPORTED;
    }
    pthread_mutex_lock(&ring->region_lock);
    for (uint64_t done = 0, part; done < size && result == SS_OK; done += part) {
        part = size - done < REGION_BYTES_MAX ? size - done : REGION_BYTES_MAX;
        result = add_region(block, memory + done, part);
    }
    int error = errno;
    if (result != SS_OK) {
        drop_regions(block, memory, size);
    }
    count_regions(block);
    pthread_mutex_unlock(&ring->region_lock);
    errno = error;
    return result;
}

/* ---- Requests -------------------------------------------------------------------------------------------------- */

/* Reads into pages: from registered memory, if one region has them all. */
static void prepare_vectors(const struct ss_ring *ring, const struct ss_request *request, int fd, uint64_t offset,
                            struct io_uring_sqe *sqe) {
    uint32_t count = ss_request_vectors(request);
    int region = ring->has_fixed_vectors ? 0 : -1;

    for (uint32_t index = 0; index < count && region >= 0; index++) {
        const struct iovec *vector = &request->vectors[index];
        int found = ss_ring_region(ring, vector->iov_base, vector->iov_len);
        region = index == 0 || found == region ? found : -1;
    }
    io_uring_prep_readv(sqe, fd, request->vectors, count, offset);
    if (region >= 0) {
        sqe->opcode = OPCODE_READV_FIXED;
        sqe->buf_index = (uint16_t)region;
    }
}

static void uring_prepare(struct ss_block *block, struct ss_request *request, struct io_uring_sqe *sqe) {
    const struct ss_ring *ring = block->driver_state;
    const struct ss_block_device *device = &block->device;
    int fd = ring->has_file ? 0 : device->fd;
    uint8_t *memory = request->memory != NULL ? request->memory + request->done : NULL;
    uint64_t left = request->length - request->done, offset = request->offset + request->done;
    int region = memory != NULL ? ss_ring_region(ring, memory, left) : -1;

    switch (request->kind) {
    case SS_BLOCK_READ:
        if (request->vectors != NULL) {
            prepare_vectors(ring, request, fd, offset, sqe);
        } else if (region >= 0) {
            io_uring_prep_read_fixed(sqe, fd, memory, (unsigned)left, offset, region);
        } else {
            io_uring_prep_read(sqe, fd, memory, (unsigned)left, offset);
        }
        break;
    case SS_BLOCK_WRITE:
        if (region >= 0) {
            io_uring_prep_write_fixed(sqe, fd, memory, (unsigned)left, offset, region);
        } else {
            io_uring_prep_write(sqe, fd, memory, (unsigned)left, offset);
        }
        break;
    case SS_BLOCK_FLUSH:
        io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC);
        break;
    case SS_BLOCK_DISCARD:
        if (device->is_file) {
            io_uring_prep_nop(sqe);
            return;
        }
        io_uring_prep_fallocate(sqe, fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, left);
        break;
    }
    if (ring->has_file) {
        sqe->flags |= IOSQE_FIXED_FILE;
    }
}

static int64_t uring_outcome(struct ss_block *block, const struct ss_request *request, int32_t result) {
    (void)block;
    (void)request;
    return result;
}

static void start_request(struct ss_block *block, struct ss_request *request) {
    struct ss_ring *ring = block->driver_state;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->ring); /* there is one for each request, and for the eventfd */

    ring->prepare(block, request, sqe);
    io_uring_sqe_set_data(sqe, request);
}

static void arm_wake(struct ss_ring *ring) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->ring);

    io_uring_prep_read(sqe, ring->wake_fd, &ring->wake_value, sizeof ring->wake_value, 0);
    io_uring_sqe_set_data(sqe, NULL);
}

/* Processes completions. With the lock held. */
static void reap(struct ss_block *block) {
    struct ss_ring *ring = block->driver_state;
    struct io_uring_cqe *cqe;

    while (io_uring_peek_cqe(&ring->ring, &cqe) == 0) {
        struct ss_request *request = io_uring_cqe_get_data(cqe);
        int32_t result = cqe->res;
        io_uring_cqe_seen(&ring->ring, cqe);
        if (request == NULL) {
            arm_wake(ring);
        } else if (ss_block_finish_request(block, request, ring->outcome(block, request, result))) {
            start_request(block, request);
        }
    }
}

void ss_ring_run(struct ss_block *block) {
    struct ss_ring *ring = block->driver_state;
    struct ss_request *request;

    arm_wake(ring);
    for (;;) {
        while ((request = ss_block_next_request(block)) != NULL) {
            start_request(block, request);
        }
        if (ss_schedule_has_unchecked(&block->schedule)) {
            pthread_mutex_unlock(&block->lock);
            (void)io_uring_submit(
                &ring->ring); /* first the device's requests; requests that it does not accept now stay in the ring */
            pthread_mutex_lock(&block->lock);
            (void)ss_block_check_next(block);
            reap(block);
            continue;
        }
        if (block->stopping && block->schedule.statistics.in_flight == 0) {
            return; /* the read of the eventfd ends with the ring */
        }
        ring->is_waiting = 1;
        pthread_mutex_unlock(&block->lock);
        int result = io_uring_submit_and_wait(&ring->ring, 1);
        if (result < 0 && result != -EINTR) {
            /* No memory, or more completions than were taken: what is not submitted stays in the ring. */
            usleep(PAUSE_US);
        }
        pthread_mutex_lock(&block->lock);
        ring->is_waiting = 0;
        reap(block);
    }
}

static enum ss_result uring_start(struct ss_block *block) {
    struct ss_ring *ring = calloc(1, sizeof *ring);

    if (ring == NULL) {
        return SS_NO_MEMORY;
    }
    ring->prepare = uring_prepare;
    ring->outcome = uring_outcome;
    return ss_ring_start(block, ring, 0);
}

const struct ss_block_driver ss_block_uring = {.name = "io_uring",
                                               .start = uring_start,
                                               .run = ss_ring_run,
                                               .wake = ss_ring_wake,
                                               .add_memory = ss_ring_add_memory,
                                               .drop_memory = ss_ring_drop_memory,
                                               .finish = ss_ring_finish};
