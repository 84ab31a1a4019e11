/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvme.c - NVMe commands through io_uring (io_uring_cmd on /dev/ngXnY), past the kernel's block layer
 *
 * The kernel neither splits nor repeats such commands, so requests are within the limits of the device and its queue,
 * and failures are reported at once. This needs Linux 5.19 or newer, the rights of the character device, and before
 * Linux 6.2 CAP_SYS_ADMIN.
 */
#include "block/uring.h"

#include <errno.h>
#include <linux/nvme_ioctl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

/* NVM Express base specification 1.4, chapters 5.15 and 6. */
#define OPCODE_IDENTIFY 0x06
#define OPCODE_FLUSH 0x00
#define OPCODE_WRITE 0x01
#define OPCODE_READ 0x02
#define OPCODE_DATASET_MANAGEMENT 0x09
#define ATTRIBUTE_DEALLOCATE (1u << 2)
#define STATUS_CAPACITY_EXCEEDED 0x81
#define STATUS_INVALID_NAMESPACE 0x0B
#define STATUS_INVALID_OPCODE 0x01
#define STATUS_INVALID_FIELD 0x02

#define REQUEST_BYTES_DEFAULT (128u << 10)
#define PAGE_BYTES 4096u

struct nvme_ring {
    struct ss_ring ring; /* first: the driver's state is taken for it */
    /* Of dataset management commands, one for each request: its one range. */
    struct {
        uint32_t attributes, blocks;
        uint64_t first;
    } *ranges;
};

/* ---- Properties of the device ----------------------------------------------------------------------------------- */

static uint32_t queue_number(const char *name, const char *attribute) {
    char path[256];
    unsigned number = 0;

    snprintf(path, sizeof path, "/sys/block/%s/queue/%s", name, attribute);
    FILE *file = fopen(path, "re");
    if (file != NULL) {
        if (fscanf(file, "%u", &number) != 1) {
            number = 0;
        }
        fclose(file);
    }
    return number;
}

/* Returns the limit of one command in the device's queue, if all its pages are scattered. */
static uint32_t request_bytes_max(const char *name) {
    uint32_t kib = queue_number(name, "max_hw_sectors_kb"), segments = queue_number(name, "max_segments");
    uint64_t bytes = kib != 0 ? (uint64_t)kib << 10 : REQUEST_BYTES_DEFAULT;

    if (segments > 1 && bytes > (uint64_t)(segments - 1) * PAGE_BYTES) {
        bytes = (uint64_t)(segments - 1) * PAGE_BYTES;
    }
    bytes -= bytes % SS_BLOCK_ALIGNMENT;
    if (bytes < SS_BLOCK_ALIGNMENT) {
        return SS_BLOCK_ALIGNMENT;
    }
    return bytes < 1u << 30 ? (uint32_t)bytes : 1u << 30;
}

enum ss_result ss_block_nvme_identify(struct ss_block_device *device, const char *block_path) {
    int id = ioctl(device->fd, NVME_IOCTL_ID);
    if (id <= 0) {
        return id < 0 ? SS_OS_ERROR : SS_NOT_SUPPORTED;
    }
    uint8_t *identity = aligned_alloc(PAGE_BYTES, PAGE_BYTES);
    if (identity == NULL) {
        return SS_NO_MEMORY;
    }
    struct nvme_admin_cmd command = {
        .opcode = OPCODE_IDENTIFY, .nsid = (uint32_t)id, .addr = (uintptr_t)identity, .data_len = PAGE_BYTES};
    int status = ioctl(device->fd, NVME_IOCTL_ADMIN_CMD, &command);
    int error = errno;
    uint8_t format = identity[26] & 15;                             /* FLBAS */
    const uint8_t *described = identity + 128 + (size_t)4 * format; /* LBAF: 2 bytes metadata, 1 byte shift */
    int has_metadata = described[0] != 0 || described[1] != 0;
    device->nvme_shift = described[2];
    device->nvme_id = (uint32_t)id;
    free(identity);
    if (status != 0) {
        errno = status < 0 ? error : EIO;
        return SS_OS_ERROR;
    }
    if (has_metadata || device->nvme_shift < 9 || device->nvme_shift > 12) {
        return SS_NOT_SUPPORTED;
    }
    device->request_bytes_max = request_bytes_max(strrchr(block_path, '/') + 1);
    return SS_OK;
}

/* ---- Requests -------------------------------------------------------------------------------------------------- */

static void set_transfer(struct nvme_uring_cmd *command, const struct ss_block_device *device,
                         const struct ss_request *request) {
    uint64_t first = request->offset >> device->nvme_shift;
    uint64_t blocks = request->length >> device->nvme_shift;

    command->opcode = request->kind == SS_BLOCK_READ ? OPCODE_READ : OPCODE_WRITE;
    command->addr = (uintptr_t)request->memory;
    command->data_len = (uint32_t)request->length;
    command->cdw10 = (uint32_t)first;
    command->cdw11 = (uint32_t)(first >> 32);
    command->cdw12 = (uint32_t)(blocks - 1);
}

static void set_discard(struct nvme_uring_cmd *command, struct ss_block *block, const struct ss_request *request) {
    struct nvme_ring *ring = block->driver_state;
    size_t index = (size_t)(request - block->schedule.requests);

    ring->ranges[index].attributes = 0;
    ring->ranges[index].blocks = (uint32_t)(request->length >> block->device.nvme_shift);
    ring->ranges[index].first = request->offset >> block->device.nvme_shift;
    command->opcode = OPCODE_DATASET_MANAGEMENT;
    command->addr = (uintptr_t)&ring->ranges[index];
    command->data_len = sizeof ring->ranges[index];
    command->cdw10 = 0; /* one range, counted from zero */
    command->cdw11 = ATTRIBUTE_DEALLOCATE;
}

static void nvme_prepare(struct ss_block *block, struct ss_request *request, struct io_uring_sqe *sqe) {
    const struct ss_ring *ring = block->driver_state;
    struct nvme_uring_cmd *command = (struct nvme_uring_cmd *)sqe->cmd;

    memset(sqe, 0, sizeof *sqe);
    memset(command, 0, sizeof *command);
    sqe->opcode = IORING_OP_URING_CMD;
    sqe->fd = ring->has_file ? 0 : block->device.fd;
    sqe->flags = ring->has_file ? IOSQE_FIXED_FILE : 0;
    sqe->cmd_op = NVME_URING_CMD_IO;
    command->nsid = block->device.nvme_id;
    if (request->kind == SS_BLOCK_FLUSH) {
        command->opcode = OPCODE_FLUSH;
    } else if (request->kind == SS_BLOCK_DISCARD) {
        set_discard(command, block, request);
    } else if (request->vectors != NULL) {
        set_transfer(command, &block->device, request);
        sqe->cmd_op =
            NVME_URING_CMD_IO_VEC; /* pages of 4096 bytes, which is all that a list of the device's asks for */
        command->addr = (uintptr_t)request->vectors;
        command->data_len = ss_request_vectors(request);
    } else {
        set_transfer(command, &block->device, request);
        int region = ring->refuses_fixed ? -1 : ss_ring_region(ring, request->memory, request->length);
        request->is_fixed = region >= 0;
        if (request->is_fixed) {
            sqe->uring_cmd_flags = IORING_URING_CMD_FIXED;
            sqe->buf_index = (uint16_t)region;
        }
    }
}

static int64_t nvme_outcome(struct ss_block *block, const struct ss_request *request, int32_t result) {
    if (result == 0) {
        return (int64_t)request->length;
    }
    if (result == -EINVAL && request->is_fixed) {
        /* Linux 6.1 for one counts all pages up to the end of the registered memory, and finds them too many. */
        struct ss_ring *ring = block->driver_state;
        ring->refuses_fixed = 1;
        block->schedule.statistics.registered = 0;
        return -EAGAIN;
    }
    if (result < 0) {
        return result;
    }
    switch (result & 0x7FF) { /* status code type and status code */
    case STATUS_INVALID_OPCODE:
    case STATUS_INVALID_FIELD:
        return -EINVAL;
    case STATUS_INVALID_NAMESPACE:
        return -ENODEV;
    case STATUS_CAPACITY_EXCEEDED:
        return -ENOSPC;
    default:
        return -EIO;
    }
}

static enum ss_result nvme_start(struct ss_block *block) {
    struct nvme_ring *ring = calloc(1, sizeof *ring);

    if (ring == NULL) {
        return SS_NO_MEMORY;
    }
    block->driver_state = ring;
    ring->ring.wake_fd = -1;
    ring->ranges = calloc(block->options.queue_depth, sizeof *ring->ranges);
    if (ring->ranges == NULL) {
        return SS_NO_MEMORY;
    }
    ring->ring.prepare = nvme_prepare;
    ring->ring.outcome = nvme_outcome;
    return ss_ring_start(block, &ring->ring, IORING_SETUP_SQE128 | IORING_SETUP_CQE32);
}

static void nvme_finish(struct ss_block *block) {
    struct nvme_ring *ring = block->driver_state;

    if (ring != NULL) {
        free(ring->ranges);
    }
    ss_ring_finish(block);
}

const struct ss_block_driver ss_block_nvme = {.name = "nvme passthrough",
                                              .start = nvme_start,
                                              .run = ss_ring_run,
                                              .wake = ss_ring_wake,
                                              .add_memory = ss_ring_add_memory,
                                              .drop_memory = ss_ring_drop_memory,
                                              .finish = nvme_finish};
