/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shadowserve_block.h - block devices, and the objects that lie on them: the storage node's part of the C core's API
 *
 * A part of shadowserve.h, with the same rules; docs/guides/storage-devices.md says which device is accessed in which
 * way.
 */
#ifndef SHADOWSERVE_BLOCK_H
#define SHADOWSERVE_BLOCK_H

#include "shadowserve.h"

/* cffi:begin */
/* ---- Objects ------------------------------------------------------------------------------------------------- */

/*
 * An object is how a value lies on a device, and in memory that is written there: a header of 2048 bytes, the value,
 * its key's text where it has a name, zeros up to a multiple of 4096. docs/reference/volume-format.md has every field.
 */
struct ss_object_fields {
    uint8_t key[32];
    uint64_t generation;    /* of the write that made it */
    uint32_t length;        /* bytes of the value */
    uint32_t header_length; /* of a record's head, the first bytes of the value; 0: no record */
    uint32_t name_length;   /* bytes of text behind the value */
    uint16_t tenant;
    uint16_t flags; /* of the index; not interpreted here */
};

enum { SS_OBJECT_HEADER_BYTES = 2048 };

/* ss_object_bytes() returns the size of an object; a multiple of 4096. */
SS_API uint64_t ss_object_bytes(uint32_t length, uint32_t name_length);

/* ss_object_unit() returns how many bytes of a value of that length have one checksum; the last ones may be fewer. */
SS_API uint32_t ss_object_unit(uint32_t length);

/*
 * ss_object_seal() writes header and padding around a value that is in place at object + 2048 and a name behind it.
 * SS_BAD_ARGUMENT where 'size' is less than ss_object_bytes() says, or header_length more than length.
 */
SS_API enum ss_result ss_object_seal(void *object, uint64_t size, const struct ss_object_fields *fields);

/*
 * ss_object_read() reads a header's fields. SS_BAD_DATA: no header of an object, or of another version; SS_CHECKSUM:
 * not the header that was written.
 */
SS_API enum ss_result ss_object_read(const void *header, struct ss_object_fields *fields);

/*
 * ss_object_check() tells whether 'header' (2048 bytes) is that of the expected object, by key, tenant, length and,
 * unless 0, generation, and whether 'data' are 'count' units of its value from unit 'first' on (count 0: only the
 * header). SS_OK; SS_BAD_DATA and SS_CHECKSUM as above, or 'data' is not what was sealed; SS_NOT_FOUND: another sound
 * object (a read or a write that went elsewhere); SS_BAD_ARGUMENT: there are no such units.
 */
SS_API enum ss_result ss_object_check(const void *header, const struct ss_object_fields *expected, uint32_t first,
                                      uint32_t count, const void *data);

/* ss_object_check_name() does the same for the name: 'name' has header's name_length bytes. SS_OK or SS_CHECKSUM. */
SS_API enum ss_result ss_object_check_name(const void *header, const void *name);

/* ---- Block devices ------------------------------------------------------------------------------------------- */

enum ss_block_access {
    SS_BLOCK_AUTO = 0,    /* the first of the others that the device, the build and the kernel have: NVMe, io_uring */
    SS_BLOCK_URING = 1,   /* io_uring, one thread */
    SS_BLOCK_THREADS = 2, /* pread() and pwrite(), a thread for each request in flight */
    SS_BLOCK_NVME = 3     /* NVMe commands through io_uring, past the block layer */
};
enum ss_block_kind { SS_BLOCK_READ = 0, SS_BLOCK_WRITE = 1, SS_BLOCK_FLUSH = 2, SS_BLOCK_DISCARD = 3 };

/* What goes first. Anything may have any of them; a foreground operation is one that a client waits for. */
enum ss_block_priority {
    SS_BLOCK_PRIORITY_FOREGROUND = 0,
    SS_BLOCK_PRIORITY_WRITE = 1,      /* when nothing of the foreground waits or is under way, or after write_wait_ms */
    SS_BLOCK_PRIORITY_BACKGROUND = 2, /* when nothing else does, or after background_wait_ms */
};

/* Zero stands for the default of each number. */
struct ss_block_options {
    size_t options_size;                 /* sizeof(struct ss_block_options), so that it can grow */
    const char *path;                    /* a file, a block device, or an NVMe namespace's character device */
    uint64_t size;                       /* bytes to use: a file is made and its blocks are reserved; 0: as it is */
    enum ss_block_access access;         /* one that is not there is SS_NOT_SUPPORTED; AUTO always finds one */
    uint32_t buffered;                   /* 1: through the kernel's page cache, not past it */
    uint32_t queue_depth;                /* requests that the device has at a time: 1 to 1024, default 32 */
    uint32_t operations_max;             /* submitted and not yet taken back: default 1024 */
    uint32_t request_bytes_max;          /* larger operations are split: a multiple of 4096, default 1 MiB */
    uint32_t write_bytes_in_flight;      /* of SS_BLOCK_PRIORITY_WRITE, also the length of a turn: default 4 MiB */
    uint32_t write_wait_ms;              /* these get a turn after so long, although others go first: default 20;
                                            1000 where 'strict' has the device change over for it */
    uint32_t background_bytes_in_flight; /* likewise of SS_BLOCK_PRIORITY_BACKGROUND: default 1 MiB */
    uint32_t background_wait_ms;         /* default 500 */
    uint32_t strict;                     /* 1: nothing is in flight beside what has another priority */
    int32_t core;                        /* of the thread, or threads; -1: any */
};

/*
 * A read into pages: layers of extents on the device, a layer after the other, so that the first is there first. A
 * layer of an extent is one *part*: as many bytes as some pages have, which go to blocks of paged memory. So all of a
 * prefix is one operation, however many layers and blocks an engine keeps it in. Each part is checked by its CRC-32.
 *
 * All of it is the caller's, and stays as it is until the operation has completed. Whether blocks lie in the memory is
 * for the caller to know. Several operations may share 'left', 'word' and 'stop': those of one prefix on several
 * devices.
 */
struct ss_block_pages {
    uint64_t size;           /* bytes of a page, a multiple of 4096 */
    uint64_t stride;         /* bytes from one block's page to the next one's, a multiple of 512 */
    const uint64_t *layers;  /* where each layer's page of block 0 begins in the memory */
    const uint64_t *extents; /* where each begins on the device */
    const uint32_t *blocks;  /* whose pages they go to: those of the first extent, then those of the second... */
    const uint32_t
        *checksums;       /* of parts: those of the first layer, one for each extent, then those of the second... */
    uint32_t *verdicts;   /* of parts, likewise: enum ss_result; after an error, SS_OK of those that are in place */
    uint32_t *left;       /* of layers: sound parts of all operations that a layer still lacks */
    uint32_t *word;       /* ss_progress_tell() is told how many leading layers lack none; or NULL */
    const uint32_t *stop; /* once it is not 0, no further part is begun: ECANCELED; another thread may set it */
    uint32_t layer_count; /* at least 1, as are the others */
    uint32_t extent_count;
    uint32_t extent_blocks; /* pages of a part, all of one device's request or a few: at most 2 MiB */
};

/*
 * One read or write of bytes of the device, a flush, or advice that bytes are not needed any more (without effect on a
 * file, whose blocks stay reserved; what is read there afterwards is not defined).
 *
 * Operations are not ordered among each other. A flush makes durable what was written by operations that had been
 * completed before it was submitted.
 *
 * A read of an object, or of its first units, may be checked by the thread that read it before it is completed: so
 * devices check beside each other, and whoever takes completions only looks at verdicts.
 *
 * A read into pages reads 'length' bytes, those of extent_blocks pages, of each layer of each extent, where layers
 * follow each other from 'offset' on. Its verdict is SS_OK, or that of a part that is not sound.
 */
struct ss_block_operation {
    enum ss_block_kind kind;
    enum ss_block_priority priority;
    uint64_t
        offset; /* bytes; a multiple of 4096, as is 'length'; both 0 for a flush. Of a read into pages, see there */
    uint64_t length;
    void *memory; /* at a multiple of 512; the caller's alone to keep, and to leave alone, until completion */
    uint64_t tag; /* returned with the completion */
    struct ss_object_fields
        expected;            /* where it is checked: what must be in 'memory' then, as ss_object_check() says */
    uint32_t expected_units; /* from the first on; 0: the header alone */
    uint32_t is_checked;     /* 1: a read that is checked, of as many bytes as these units and the header */
    const struct ss_block_pages *pages; /* NULL: it is no read into pages */
};

struct ss_block_completion {
    uint64_t tag;
    uint64_t begin_ns; /* CLOCK_MONOTONIC: when its first request went to the device; of one that never did, end_ns */
    uint64_t end_ns;   /* when the device had done all of it: what checking took comes later */
    int32_t error;     /* errno, 0: all of it was done; ECANCELED: stopped before it began */
    enum ss_result verdict; /* of ss_object_check(); SS_NOT_SUPPORTED: was not to be checked, or failed */
};

struct ss_block_statistics {
    uint64_t operations[4]; /* done without error, by kind */
    uint64_t bytes[4];      /* of these */
    uint64_t errors[4];     /* operations that failed, by kind */
    uint64_t wait_ns[3];    /* between submission and the first request, summed, by priority */
    uint64_t service_ns[3]; /* between the first request and completion, summed, by priority */
    uint64_t busy_ns;       /* time with a request in flight */
    uint64_t oldest_ns;     /* when the request that is in flight for the longest went out; 0: none is */
    uint32_t waiting[3];    /* operations now, by priority: not begun */
    uint32_t in_flight;     /* requests now */
    uint32_t registered;    /* memory regions that the kernel has taken; 0 where that gains nothing */
    int32_t last_error;     /* errno of the last failure; 0: none yet */
    uint32_t gone;          /* an operation failed as on a device that was removed (ENODEV, ENXIO) */
};

struct ss_block;

/* ss_block_access_built() returns whether this build has 'access'. */
SS_API int ss_block_access_built(enum ss_block_access access);

/* ss_block_access_available() returns whether this build and the running kernel have 'access'. */
SS_API int ss_block_access_available(enum ss_block_access access);

/*
 * ss_block_open() takes a device for this process alone and starts its threads. Fails with SS_OS_ERROR (errno: EBUSY:
 * mounted, or used by another process; ENOSPC: no room for 'size' bytes; and what open() says), SS_NOT_SUPPORTED,
 * SS_BAD_ARGUMENT (no file and no device; less than 4096 bytes; numbers out of range), SS_NO_MEMORY.
 */
SS_API enum ss_result ss_block_open(const struct ss_block_options *options, struct ss_block **block);

/* ss_block_size() returns how many bytes can be used, a multiple of 4096. */
SS_API uint64_t ss_block_size(const struct ss_block *block);

/* ss_block_access_name() says how the device is accessed, such as "io_uring, direct", as long as it is open. */
SS_API const char *ss_block_access_name(const struct ss_block *block);

/*
 * ss_block_register() makes memory known to the kernel, so that it need not look up its pages for each request: at most
 * 256 GiB in all. Optional: operations on other memory are done all the same. The memory must stay until
 * ss_block_close(), or ss_block_unregister(). All of it or none. SS_NO_MEMORY where the limit of locked memory
 * (RLIMIT_MEMLOCK) is too low for it, SS_NO_SPACE when it is too much, SS_NOT_SUPPORTED where the access has no use for
 * it. From any thread.
 */
SS_API enum ss_result ss_block_register(struct ss_block *block, void *memory, uint64_t size);

/*
 * ss_block_unregister() has the kernel forget memory that ss_block_register() made known, which nothing under way uses.
 * Then it may go. What is not known is ignored. From any thread.
 */
SS_API void ss_block_unregister(struct ss_block *block, void *memory, uint64_t size);

/*
 * ss_block_submit() queues 'count' operations, all or none, and never blocks. SS_NO_SPACE: more than operations_max;
 * SS_BAD_ARGUMENT: one lies outside the device or is not aligned; SS_CANCELLED: stopped. From any thread.
 */
SS_API enum ss_result ss_block_submit(struct ss_block *block, const struct ss_block_operation *operations,
                                      size_t count);

/* ss_block_completions() takes back at most 'max' operations that ended, and never blocks. From any thread. */
SS_API size_t ss_block_completions(struct ss_block *block, struct ss_block_completion *completions, size_t max);

/* ss_block_descriptor() returns an eventfd that is readable while there are completions to take. Do not read it. */
SS_API int ss_block_descriptor(const struct ss_block *block);

/* ss_block_statistics() copies the counters since it was opened. From any thread. */
SS_API void ss_block_statistics(struct ss_block *block, struct ss_block_statistics *statistics);

/*
 * ss_block_stop() completes what has not begun with ECANCELED, waits for what the device has, and ends the threads.
 * Completions can be taken afterwards. SS_DEADLINE where the device holds on to a request for longer than 'timeout_ms':
 * the memory of such operations must then stay for ever, and so does the block, whose ss_block_close() frees nothing.
 */
SS_API enum ss_result ss_block_stop(struct ss_block *block, uint32_t timeout_ms);

/* ss_block_close() stops it, unless that was done, for at most 10 s, and lets the device go. NULL is allowed. */
SS_API void ss_block_close(struct ss_block *block);

/* cffi:end */

#endif /* SHADOWSERVE_BLOCK_H */
