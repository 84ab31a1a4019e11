/* SPDX-License-Identifier: Apache-2.0 */
/* uring.h - the ring that files, block devices and NVMe namespaces are accessed through; see uring.c */
#ifndef SS_BLOCK_URING_H
#define SS_BLOCK_URING_H

#include "block/block.h"

#include <liburing.h>

#define SS_REGIONS_MAX 256u

/* Registered memory: the kernel takes at most 1 GiB in one piece. */
struct ss_region {
    const uint8_t *memory;
    uint64_t size;
};

struct ss_ring {
    struct io_uring ring;
    int is_made;
    int has_buffers;             /* the table of registered memory exists */
    int has_file;                /* file 0 is the device */
    int has_fixed_vectors;       /* a request may go to several pieces of registered memory */
    int refuses_fixed;           /* the kernel refused requests on registered memory: do not use it */
    int is_waiting;              /* its thread may be in the kernel: wake it */
    int wake_fd;                 /* eventfd that the ring reads */
    uint64_t wake_value;         /* where it reads to */
    pthread_mutex_t region_lock; /* one registration at a time; region_count changes with the block's lock held */
    uint32_t region_count;       /* those of no size are free again */
    struct ss_region regions[SS_REGIONS_MAX];
    /* Fills in the request, except for its user data. */
    void (*prepare)(struct ss_block *block, struct ss_request *request, struct io_uring_sqe *sqe);
    /* Turns a completion's result into bytes done or -errno. */
    int64_t (*outcome)(struct ss_block *block, const struct ss_request *request, int32_t result);
};

/* Parts of the drivers. */
enum ss_result ss_ring_start(struct ss_block *block, struct ss_ring *ring, uint32_t flags);
void ss_ring_run(struct ss_block *block);
void ss_ring_wake(struct ss_block *block);
enum ss_result ss_ring_add_memory(struct ss_block *block, uint8_t *memory, uint64_t size);
void ss_ring_drop_memory(struct ss_block *block, const uint8_t *memory, uint64_t size);
void ss_ring_finish(struct ss_block *block);

/* Returns the index of the registered region that holds all of it; -1: none does. */
int ss_ring_region(const struct ss_ring *ring, const uint8_t *memory, uint64_t size);

#endif /* SS_BLOCK_URING_H */
