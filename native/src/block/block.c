/* SPDX-License-Identifier: Apache-2.0 */
/*
 * block.c - a block device: its life cycle, and the path of an operation
 *
 *     submit -> [schedule] -> a driver's thread -> kernel -> the thread, check -> [completed] -> eventfd, completions
 *
 * Callers only queue operations and take completions, under one lock that is never held during a system call that may
 * wait. Drivers: uring.c and nvme.c have one thread with a ring, threads.c one thread for each request in flight. Each
 * thread gets requests from ss_block_next_request(), reports them with ss_block_finish_request(), and checks completed
 * reads with ss_block_check_next(), after it has given the device new requests.
 */
#include "block/block.h"

#include "cpu/clock.h"
#include "cpu/thread.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define CLOSE_MS 10000u
#define TRIES_MAX 32u

/* ---- Options --------------------------------------------------------------------------------------------------- */

static uint32_t or_default(uint32_t value, uint32_t default_value) {
    return value != 0 ? value : default_value;
}

static enum ss_result options_complete(struct ss_block_options *options) {
    if (options->options_size != sizeof *options || options->path == NULL || options->path[0] == '\0') {
        return SS_BAD_ARGUMENT;
    }
    options->queue_depth = or_default(options->queue_depth, 32);
    options->operations_max = or_default(options->operations_max, 1024);
    int is_valid = options->queue_depth <= 1024 && options->operations_max <= 1 << 20 &&
                   options->size % SS_BLOCK_ALIGNMENT == 0 && (unsigned)options->access <= SS_BLOCK_NVME &&
                   options->strict <= 1 && options->core >= -1 && options->core < CPU_SETSIZE;
    return is_valid ? SS_OK : SS_BAD_ARGUMENT;
}

/* ---- Threads --------------------------------------------------------------------------------------------------- */

static void *thread_main(void *context) {
    struct ss_block *block = context;

    pthread_mutex_lock(&block->lock);
    block->driver->run(block);
    block->threads_running--;
    pthread_cond_broadcast(&block->changed);
    pthread_mutex_unlock(&block->lock);
    return NULL;
}

enum ss_result ss_block_start_thread(struct ss_block *block, uint32_t number) {
    char name[16];

    snprintf(name, sizeof name, "ss-block-%u", number % 1000);
    /* Detached, since a thread that is stuck in the kernel never ends and cannot be joined; a counter replaces joins.
     */
    pthread_mutex_lock(&block->lock);
    enum ss_result result = ss_thread_start(NULL, block->options.core, name, thread_main, block);
    block->threads_running += result == SS_OK;
    pthread_mutex_unlock(&block->lock);
    return result;
}

/* ---- Opening --------------------------------------------------------------------------------------------------- */

static const struct ss_block_driver *driver_of(enum ss_block_access access) {
#ifdef SS_HAVE_URING
    if (access == SS_BLOCK_URING) {
        return &ss_block_uring;
    }
    if (access == SS_BLOCK_NVME) {
        return &ss_block_nvme;
    }
#endif
    return access == SS_BLOCK_THREADS ? &ss_block_threads : NULL;
}

/* Ends the threads, and returns whether they ended in time. With the lock held, which it releases while it waits. */
static int threads_end(struct ss_block *block, uint32_t timeout_ms) {
    const struct timespec until = ss_timespec(ss_now_ns() + timeout_ms * 1000000ULL);

    block->stopping = 1;
    block->driver->wake(block);
    pthread_cond_broadcast(&block->changed);
    while (block->threads_running > 0) {
        if (pthread_cond_timedwait(&block->changed, &block->lock, &until) == ETIMEDOUT && block->threads_running > 0) {
            return 0;
        }
    }
    return 1;
}

static enum ss_result try_access(struct ss_block *block, enum ss_block_access access,
                                 const struct ss_block_driver *driver) {
    if (driver == NULL) {
        return SS_NOT_SUPPORTED;
    }
    block->driver = driver;
    struct ss_block_options options = block->options;
    options.path = block->path;
    enum ss_result result = ss_block_device_open(&block->device, &options, access);
    if (result != SS_OK) {
        return result;
    }
    if (block->device.request_bytes_max != 0 && block->schedule.request_bytes_max > block->device.request_bytes_max) {
        block->schedule.request_bytes_max = block->device.request_bytes_max;
    }
    result = block->driver->start(block);
    if (result != SS_OK) {
        int error = errno;
        pthread_mutex_lock(&block->lock);
        (void)threads_end(block, CLOSE_MS); /* some threads may have started, and have no work */
        block->stopping = 0;
        pthread_mutex_unlock(&block->lock);
        block->driver->finish(block);
        ss_block_device_close(&block->device);
        block->schedule.request_bytes_max = SS_REQUEST_BYTES_MAX;
        errno = error;
        return result;
    }
    snprintf(block->access_name, sizeof block->access_name, "%s%s", block->driver->name,
             access == SS_BLOCK_NVME ? "" : (block->device.is_buffered ? ", buffered" : ", direct"));
    return SS_OK;
}

/* Returns whether to try another access after a failure: not if the device itself is not available. */
static int is_refusal(enum ss_result result, int error, enum ss_block_access access) {
    return result == SS_NOT_SUPPORTED ||
           (result == SS_OS_ERROR && access == SS_BLOCK_NVME && error != EBUSY && error != ENOSPC);
}

static enum ss_result open_any(struct ss_block *block) {
    static const enum ss_block_access best_first[] = {SS_BLOCK_NVME, SS_BLOCK_URING, SS_BLOCK_THREADS};
    enum ss_result result = SS_NOT_SUPPORTED;

    if (block->options.access != SS_BLOCK_AUTO) {
        return try_access(block, block->options.access, driver_of(block->options.access));
    }
    for (size_t index = 0; index < sizeof best_first / sizeof *best_first; index++) {
        result = try_access(block, best_first[index], driver_of(best_first[index]));
        if (result == SS_OK || !is_refusal(result, errno, best_first[index])) {
            return result;
        }
    }
    return result;
}

static void block_free(struct ss_block *block) {
    ss_schedule_free(&block->schedule);
    if (block->completion_fd >= 0) {
        close(block->completion_fd);
    }
    free(block->path);
    pthread_cond_destroy(&block->changed);
    pthread_mutex_destroy(&block->lock);
    free(block);
}

static struct ss_block *block_new(const struct ss_block_options *options) {
    struct ss_block *block = calloc(1, sizeof *block);
    pthread_condattr_t attributes;

    if (block == NULL) {
        return NULL;
    }
    pthread_mutex_init(&block->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&block->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    block->options = *options;
    block->options.path = NULL;
    block->device.fd = block->device.guard = -1;
    block->path = strdup(options->path);
    block->completion_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return block;
}

enum ss_result ss_block_open_with(const struct ss_block_options *options, const struct ss_block_driver *driver,
                                  struct ss_block **opened) {
    struct ss_block_options complete = *options;
    enum ss_result result = options_complete(&complete);

    *opened = NULL;
    if (result != SS_OK) {
        return result;
    }
    struct ss_block *block = block_new(&complete);
    if (block == NULL) {
        return SS_NO_MEMORY;
    }
    if (block->path == NULL) {
        result = SS_NO_MEMORY;
    } else if (block->completion_fd < 0) {
        result = SS_OS_ERROR;
    } else if ((result = ss_schedule_init(&block->schedule, &complete)) == SS_OK) {
        result = driver == NULL ? open_any(block) : try_access(block, complete.access, driver);
    }
    if (result != SS_OK) {
        int error = errno;
        block_free(block);
        errno = error;
        return result;
    }
    *opened = block;
    return SS_OK;
}

enum ss_result ss_block_open(const struct ss_block_options *options, struct ss_block **opened) {
    return ss_block_open_with(options, NULL, opened);
}

int ss_block_access_built(enum ss_block_access access) {
    return access == SS_BLOCK_AUTO || driver_of(access) != NULL;
}

int ss_block_access_available(enum ss_block_access access) {
    struct ss_block *block;
    struct ss_block_options options = {.options_size = sizeof options, .path = "/", .core = -1};

    if (access == SS_BLOCK_AUTO || access == SS_BLOCK_THREADS) {
        return 1;
    }
    if (driver_of(access) == NULL || options_complete(&options) != SS_OK || (block = block_new(&options)) == NULL) {
        return 0;
    }
    /* Checks whether the kernel can create such a ring, without a device. */
    int is_available = 0;
    block->driver = driver_of(access);
    if (ss_schedule_init(&block->schedule, &options) == SS_OK) {
        is_available = block->driver->start(block) == SS_OK;
        pthread_mutex_lock(&block->lock);
        (void)threads_end(block, CLOSE_MS);
        pthread_mutex_unlock(&block->lock);
        block->driver->finish(block);
    }
    block_free(block);
    return is_available;
}

/* ---- Operations ------------------------------------------------------------------------------------------------ */

/* Returns whether a checked read covers the header and its units. */
static int check_is_valid(const struct ss_block_operation *operation) {
    uint64_t value = (uint64_t)operation->expected_units * ss_object_unit(operation->expected.length);
    uint64_t length = operation->expected.length;

    return operation->kind == SS_BLOCK_READ &&
           operation->length >= SS_OBJECT_HEADER_BYTES + (value < length ? value : length);
}

/* Returns whether a read into pages is within the device, and its pages are aligned for a device. */
static int pages_are_valid(const struct ss_block *block, const struct ss_block_operation *operation) {
    const struct ss_block_pages *pages = operation->pages;
    uint64_t size = block->device.size, offset = operation->offset, length = operation->length;

    if (operation->kind != SS_BLOCK_READ || operation->is_checked || operation->memory == NULL ||
        pages->layers == NULL || pages->extents == NULL || pages->blocks == NULL || pages->checksums == NULL ||
        pages->verdicts == NULL || pages->left == NULL || pages->stop == NULL || pages->layer_count == 0 ||
        pages->extent_count == 0 || pages->size == 0 || pages->size % SS_BLOCK_ALIGNMENT != 0 ||
        pages->stride % SS_BLOCK_MEMORY_ALIGNMENT != 0 || length == 0 || length > SS_PART_BYTES_MAX ||
        length / pages->size != pages->extent_blocks || length % pages->size != 0 ||
        length > size / pages->layer_count || offset > size - length * pages->layer_count ||
        offset % SS_BLOCK_ALIGNMENT != 0 || (uintptr_t)operation->memory % SS_BLOCK_MEMORY_ALIGNMENT != 0) {
        return 0;
    }
    for (uint32_t index = 0; index < pages->layer_count; index++) {
        if (pages->layers[index] % SS_BLOCK_MEMORY_ALIGNMENT != 0) {
            return 0;
        }
    }
    for (uint32_t index = 0; index < pages->extent_count; index++) {
        if (pages->extents[index] % SS_BLOCK_ALIGNMENT != 0 ||
            pages->extents[index] > size - length * pages->layer_count - offset) {
            return 0;
        }
    }
    return 1;
}

static int is_valid(const struct ss_block *block, const struct ss_block_operation *operation) {
    if ((unsigned)operation->kind > SS_BLOCK_DISCARD || (unsigned)operation->priority >= SS_PRIORITIES) {
        return 0;
    }
    if (operation->pages != NULL) {
        return pages_are_valid(block, operation);
    }
    if (operation->is_checked && !check_is_valid(operation)) {
        return 0;
    }
    if (operation->kind == SS_BLOCK_FLUSH) {
        return operation->offset == 0 && operation->length == 0;
    }
    uint64_t size = block->device.size;
    if (operation->length == 0 || operation->length > size || operation->offset > size - operation->length ||
        operation->offset % SS_BLOCK_ALIGNMENT != 0 || operation->length % SS_BLOCK_ALIGNMENT != 0) {
        return 0;
    }
    return operation->kind == SS_BLOCK_DISCARD ||
           (operation->memory != NULL && (uintptr_t)operation->memory % SS_BLOCK_MEMORY_ALIGNMENT == 0);
}

enum ss_result ss_block_submit(struct ss_block *block, const struct ss_block_operation *operations, size_t count) {
    for (size_t index = 0; index < count; index++) {
        if (!is_valid(block, &operations[index])) {
            return SS_BAD_ARGUMENT;
        }
    }
    pthread_mutex_lock(&block->lock);
    enum ss_result result = ss_schedule_submit(&block->schedule, operations, count, ss_now_ns());
    if (result == SS_OK && count > 0) {
        block->driver->wake(block);
    }
    pthread_mutex_unlock(&block->lock);
    return result;
}

/* Makes the descriptor readable if it was not and there are completions. With the lock held. */
static void publish(struct ss_block *block, uint32_t completed_before) {
    if (completed_before == 0 && block->schedule.completed.count > 0) {
        (void)!eventfd_write(block->completion_fd, 1);
    }
}

struct ss_request *ss_block_next_request(struct ss_block *block) {
    uint32_t completed = block->schedule.completed.count;
    struct ss_request *request = ss_schedule_next(&block->schedule, ss_now_ns());

    publish(block, completed);
    return request;
}

int ss_block_finish_request(struct ss_block *block, struct ss_request *request, int64_t outcome) {
    uint32_t completed = block->schedule.completed.count;
    int is_transfer = request->kind == SS_BLOCK_READ || request->kind == SS_BLOCK_WRITE;
    int32_t error = outcome < 0 ? (int32_t)-outcome : 0;

    if ((error == EAGAIN || error == EINTR) && ++request->tries < TRIES_MAX) {
        return 1;
    }
    if (error == 0 && is_transfer) {
        /* The rest of a short request must begin at a block. */
        uint64_t done = request->done + (uint64_t)outcome;
        uint64_t kept = done < request->length ? done - done % SS_BLOCK_MEMORY_ALIGNMENT : done;
        if (kept < request->length && kept > request->done) {
            request->done = kept;
            return 1;
        }
        error = done >= request->length ? 0 : request->kind == SS_BLOCK_READ ? EIO : ENOSPC;
    }
    if (request->kind == SS_BLOCK_DISCARD && (error == EOPNOTSUPP || error == ENOTTY || error == EINVAL)) {
        error = 0; /* a device may not support discards */
    }
    /* A removed device has no size, so its error is "no space" or end of file. */
    if ((error == EIO || error == ENOSPC) && ss_block_device_is_gone(&block->device)) {
        error = ENODEV;
    }
    ss_schedule_done(&block->schedule, request, error, ss_now_ns());
    publish(block, completed);
    return 0;
}

/* Sets the number of complete leading layers in the word; threads of several devices may share one word. */
static void tell_layers(const struct ss_block_pages *pages) {
    uint32_t layers;

    do {
        layers = 0;
        while (layers < pages->layer_count && __atomic_load_n(&pages->left[layers], __ATOMIC_ACQUIRE) == 0) {
            layers++;
        }
        ss_progress_tell(pages->word, layers);
    } while (layers < pages->layer_count && __atomic_load_n(&pages->left[layers], __ATOMIC_ACQUIRE) == 0);
}

/* Checks a completed part of a read into pages. Without the lock. */
static enum ss_result check_part(const struct ss_request *request) {
    const struct ss_block_operation *operation = &request->entry->operation;
    const struct ss_block_pages *pages = operation->pages;
    size_t part = ss_request_part(request), layer = part / pages->extent_count;
    const uint32_t *blocks = pages->blocks + part % pages->extent_count * pages->extent_blocks;
    const uint8_t *memory = (const uint8_t *)operation->memory + pages->layers[layer];
    uint32_t sum = 0;

    for (uint32_t index = 0; index < pages->extent_blocks; index++) {
        sum = ss_crc32(sum, memory + blocks[index] * pages->stride, pages->size);
    }
    enum ss_result found = sum == pages->checksums[part] ? SS_OK : SS_CHECKSUM;
    pages->verdicts[part] = found;
    if (found == SS_OK && __atomic_sub_fetch(&pages->left[layer], 1, __ATOMIC_ACQ_REL) == 0 && pages->word != NULL) {
        tell_layers(pages);
    }
    return found;
}

static enum ss_result check_object(const struct ss_block_operation *operation) {
    const uint8_t *object = operation->memory;
    return ss_object_check(object, &operation->expected, 0, operation->expected_units, object + SS_OBJECT_HEADER_BYTES);
}

int ss_block_check_next(struct ss_block *block) {
    struct ss_request *request = ss_schedule_unchecked_part(&block->schedule);
    struct ss_entry *entry = request == NULL ? ss_schedule_unchecked(&block->schedule) : NULL;

    if (request == NULL && entry == NULL) {
        return 0;
    }
    pthread_mutex_unlock(&block->lock);
    enum ss_result verdict = request != NULL ? check_part(request) : check_object(&entry->operation);
    pthread_mutex_lock(&block->lock);
    uint32_t completed = block->schedule.completed.count;
    if (request != NULL) {
        ss_schedule_part_checked(&block->schedule, request, verdict, ss_now_ns());
    } else {
        ss_schedule_checked(&block->schedule, entry, verdict);
    }
    publish(block, completed);
    return 1;
}

size_t ss_block_completions(struct ss_block *block, struct ss_block_completion *completions, size_t max) {
    eventfd_t ignored;

    pthread_mutex_lock(&block->lock);
    size_t count = ss_schedule_take(&block->schedule, completions, max);
    if (count > 0 && block->schedule.completed.count == 0) {
        (void)!eventfd_read(block->completion_fd, &ignored);
    }
    pthread_mutex_unlock(&block->lock);
    return count;
}

enum ss_result ss_block_register(struct ss_block *block, void *memory, uint64_t size) {
    if (memory == NULL || size == 0 || (uintptr_t)memory % SS_BLOCK_MEMORY_ALIGNMENT != 0) {
        return SS_BAD_ARGUMENT;
    }
    if (block->driver->add_memory == NULL) {
        return SS_NOT_SUPPORTED;
    }
    return block->driver->add_memory(block, memory, size);
}

void ss_block_unregister(struct ss_block *block, void *memory, uint64_t size) {
    if (block->driver->drop_memory != NULL) {
        block->driver->drop_memory(block, memory, size);
    }
}

/* ---- Questions, and the end ------------------------------------------------------------------------------------ */

uint64_t ss_block_size(const struct ss_block *block) {
    return block->device.size;
}

const char *ss_block_access_name(const struct ss_block *block) {
    return block->access_name;
}

int ss_block_descriptor(const struct ss_block *block) {
    return block->completion_fd;
}

void ss_block_statistics(struct ss_block *block, struct ss_block_statistics *statistics) {
    pthread_mutex_lock(&block->lock);
    ss_schedule_statistics(&block->schedule, statistics, ss_now_ns());
    pthread_mutex_unlock(&block->lock);
}

enum ss_result ss_block_stop(struct ss_block *block, uint32_t timeout_ms) {
    pthread_mutex_lock(&block->lock);
    uint32_t completed = block->schedule.completed.count;
    ss_schedule_stop(&block->schedule, ss_now_ns());
    publish(block, completed);
    block->is_stopped = 1;
    block->is_stuck = !threads_end(block, timeout_ms);
    enum ss_result result = block->is_stuck ? SS_DEADLINE : SS_OK;
    pthread_mutex_unlock(&block->lock);
    return result;
}

void ss_block_close(struct ss_block *block) {
    if (block == NULL) {
        return;
    }
    if (!block->is_stopped) {
        (void)ss_block_stop(block, CLOSE_MS);
    }
    if (block->is_stuck) {
        return; /* its threads are still in the kernel, and will access the block when they return */
    }
    block->driver->finish(block);
    ss_block_device_close(&block->device);
    block_free(block);
}
