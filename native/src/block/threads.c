/* SPDX-License-Identifier: Apache-2.0 */
/*
 * threads.c - a device through pread() and pwrite(): for builds without liburing, and kernels that refuse
 * io_uring
 *
 * One thread for each request in flight, up to THREADS_MAX: each takes one request, and waits in the kernel for it.
 */
#include "block/block.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#define THREADS_MAX 32u

static enum ss_result threads_start(struct ss_block *block) {
    uint32_t count = block->options.queue_depth < THREADS_MAX ? block->options.queue_depth : THREADS_MAX;
    enum ss_result result = SS_OK;

    for (uint32_t number = 0; number < count && result == SS_OK; number++) {
        result = ss_block_start_thread(block, number);
    }
    return result;
}

static int64_t perform(const struct ss_block *block, const struct ss_request *request) {
    int64_t outcome = 0;
    size_t left = (size_t)(request->length - request->done);
    off_t offset = (off_t)(request->offset + request->done);

    switch (request->kind) {
    case SS_BLOCK_READ:
        if (request->vectors != NULL) {
            outcome = preadv(block->device.fd, request->vectors, (int)ss_request_vectors(request), offset);
            break;
        }
        outcome = pread(block->device.fd, request->memory + request->done, left, offset);
        break;
    case SS_BLOCK_WRITE:
        outcome = pwrite(block->device.fd, request->memory + request->done, left, offset);
        break;
    case SS_BLOCK_FLUSH:
        outcome = fdatasync(block->device.fd);
        break;
    case SS_BLOCK_DISCARD:
        if (!block->device.is_file) {
            outcome = fallocate(block->device.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, (off_t)left);
        }
        break;
    }
    return outcome < 0 ? -errno : outcome;
}

static void threads_run(struct ss_block *block) {
    struct ss_request *request;

    for (;;) {
        while ((request = ss_block_next_request(block)) == NULL) {
            if (block->stopping) {
                return;
            }
            pthread_cond_wait(&block->changed, &block->lock);
        }
        pthread_cond_signal(&block->changed); /* another thread may find a request, too */
        int64_t outcome;
        do {
            pthread_mutex_unlock(&block->lock);
            outcome = perform(block, request);
            pthread_mutex_lock(&block->lock);
        } while (ss_block_finish_request(block, request, outcome));
        while (ss_block_check_next(block)) {
            /* this one's operation, if that is done, or another thread's */
        }
    }
}

static void threads_wake(struct ss_block *block) {
    pthread_cond_signal(&block->changed);
}

static void threads_finish(struct ss_block *block) {
    (void)block; /* nothing was made but threads */
}

const struct ss_block_driver ss_block_threads = {
    .name = "threads", .start = threads_start, .run = threads_run, .wake = threads_wake, .finish = threads_finish};
