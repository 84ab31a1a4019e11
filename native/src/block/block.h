/* SPDX-License-Identifier: Apache-2.0 */
/* block.h - declarations shared by the parts of a block device; block.c describes the threads */
#ifndef SS_BLOCK_INTERNAL_H
#define SS_BLOCK_INTERNAL_H

#include "block/schedule.h"

#include <pthread.h>
#include <sys/types.h>

#define SS_BLOCK_ALIGNMENT 4096u
#define SS_BLOCK_MEMORY_ALIGNMENT 512u

struct ss_block;

/* Driver of a device. All but add_memory() and drop_memory() are called with the block's lock held, or with
 * no thread yet. */
struct ss_block_driver {
    const char *name;
    /* Creates its state and starts threads that run ss_block_run(). SS_NOT_SUPPORTED: the kernel refuses it. */
    enum ss_result (*start)(struct ss_block *block);
    /* One of its threads: returns, with the lock held as before, when 'stopping' is set and it has no request, and
     * nothing that it finished is left to be checked. */
    void (*run)(struct ss_block *block);
    /* There may be requests to start, or 'stopping' was set. */
    void (*wake)(struct ss_block *block);
    /* May be NULL. Called from any thread. */
    enum ss_result (*add_memory)(struct ss_block *block, uint8_t *memory, uint64_t size);
    /* Only with add_memory(): removes the memory again. */
    void (*drop_memory)(struct ss_block *block, const uint8_t *memory, uint64_t size);
    /* Frees the state of start(), also after it failed half way; no thread runs any longer. */
    void (*finish)(struct ss_block *block);
};

extern const struct ss_block_driver ss_block_threads;
#ifdef SS_HAVE_URING
extern const struct ss_block_driver ss_block_uring;
extern const struct ss_block_driver ss_block_nvme;
#endif

/* An open file or device. */
struct ss_block_device {
    int fd;                     /* that requests go to */
    int guard;                  /* NVMe: the block device beside it, which is what others would use; else -1 */
    int is_file;                /* 1: a file in a file system, 0: a device */
    int is_buffered;            /* requests go through the page cache */
    uint64_t size;              /* bytes, a multiple of SS_BLOCK_ALIGNMENT */
    uint32_t nvme_id;           /* of the namespace */
    uint32_t nvme_shift;        /* its blocks have 1 << nvme_shift bytes */
    uint32_t request_bytes_max; /* that it takes; 0: any */
};

struct ss_block {
    pthread_mutex_t lock; /* of all that follows the dashes */
    pthread_cond_t changed;
    const struct ss_block_driver *driver;
    struct ss_block_device device;
    struct ss_block_options options; /* with the defaults filled in; no path */
    char *path;
    char access_name[64];
    int completion_fd; /* eventfd: readable while there are completions */
    /* ---- */
    struct ss_schedule schedule;
    void *driver_state;
    uint32_t threads_running;
    int stopping;
    int is_stopped; /* ss_block_stop() was called */
    int is_stuck;   /* and gave up */
};

/* ss_block_open_with() is ss_block_open() with a driver of the caller's; tests have one that fails on request. */
enum ss_result ss_block_open_with(const struct ss_block_options *options, const struct ss_block_driver *driver,
                                  struct ss_block **block);

/* ss_block_finish_request() reports the outcome of a request: bytes done or -errno. Returns whether to repeat the
 * request, or its rest. With the lock held. */
int ss_block_finish_request(struct ss_block *block, struct ss_request *request, int64_t outcome);

/* ss_block_next_request() is ss_schedule_next(), for drivers: it may complete operations that are not wanted any more.
 */
struct ss_request *ss_block_next_request(struct ss_block *block);

/* ss_block_check_next() checks one read that is done, or a part of it, and completes what is checked in full; returns
 * whether there was one. With the lock held, which it releases during the check. A driver's threads call it before they
 * wait, until it returns 0. */
int ss_block_check_next(struct ss_block *block);

/* ss_block_start_thread() runs driver->run() in a new thread. */
enum ss_result ss_block_start_thread(struct ss_block *block, uint32_t number);

/* ---- device.c ---- */

/* Opens a file or a block device, or for SS_BLOCK_NVME the namespace's character device. Results as ss_block_open(). */
enum ss_result ss_block_device_open(struct ss_block_device *device, const struct ss_block_options *options,
                                    enum ss_block_access access);
void ss_block_device_close(struct ss_block_device *device);

/* Returns whether a block device was removed, or is smaller than before; called after a failure. A file never is. */
int ss_block_device_is_gone(const struct ss_block_device *device);

/* Whether 'path' names an NVMe namespace; if so the names of its two devices, cut to 'size' bytes. */
int ss_block_nvme_paths(const char *path, char *block_path, char *character_path, size_t size);

#ifdef SS_HAVE_URING
/* ---- nvme.c: reads size and block size of the namespace of device->fd ---- */
enum ss_result ss_block_nvme_identify(struct ss_block_device *device, const char *path);
#endif

#endif /* SS_BLOCK_INTERNAL_H */
