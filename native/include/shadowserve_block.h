/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shadowserve_block.h - block devices, and the objects stored on them: the storage node's part of the C core's API
 *
 * A part of shadowserve.h, with the same rules; docs/guides/storage-devices.md describes how each device is accessed.
 */
#ifndef SHADOWSERVE_BLOCK_H
#define SHADOWSERVE_BLOCK_H

#include "shadowserve.h"

/* cffi:begin */
/* ---- Objects ------------------------------------------------------------------------------------------------- */

/*
 * An object is the stored form of a value, on a device and in the memory that is written to it: a header of 2048 bytes,
 * the value, the text of its key if it has a name, and zeros up to a multiple of 4096.
 * docs/reference/volume-format.md describes every field.
 */
struct ss_object_fields {
    uint8_t key[32];
    uint64_t generation;    /* of the write that stored it */
    uint32_t length;        /* bytes of the value */
    uint32_t header_length; /* bytes of the record's header, at the start of the value; 0: no record */
    uint32_t name_length;   /* bytes of text behind the value */
    uint16_t tenant;
    uint16_t flags; /* of the index; not interpreted here */
};

enum { SS_OBJECT_HEADER_BYTES = 2048 };

/* ss_object_bytes() returns the size of an object; a multiple of 4096. */
SS_API uint64_t ss_object_bytes(uint32_t length, uint32_t name_length);

/* ss_object_unit() returns the bytes of a value of that length that share one checksum; the last unit may be shorter.
 */
SS_API uint32_t ss_object_unit(uint32_t length);

/*
 * ss_object_seal() writes header and padding around a value that is already at object + 2048 and a name behind it.
 * SS_BAD_ARGUMENT if 'size' is less than ss_object_bytes(), or header_length is more than length.
 */
SS_API enum ss_result ss_object_seal(void *object, uint64_t size, const struct ss_object_fields *fields);

/*
 * ss_object_read() reads a header's fields. SS_BAD_DATA: no header of an object, or of another version; SS_CHECKSUM:
 * not the header that was written.
 */
SS_API enum ss_result ss_object_read(const void *header, struct ss_object_fields *fields);

/*
 * ss_object_check() checks whether 'header' (2048 bytes) is that of the expected object, by key, tenant, length and,
 * unless 0, generation, and whether 'data' has 'count' units of its value from unit 'first' on (count 0: only the
 * header). SS_OK; SS_BAD_DATA and SS_CHECKSUM as above, or 'data' is not the sealed data; SS_NOT_FOUND: another valid
 * object (a read or a write used a wrong address); SS_BAD_ARGUMENT: these units do not exist.
 */
SS_API enum ss_result ss_object_check(const void *header, const struct ss_object_fields *expected, uint32_t first,
                                      uint32_t count, const void *data);

/* ss_object_check_name() checks 'name', which has the header's name_length bytes. SS_OK or SS_CHECKSUM. */
SS_API enum ss_result ss_object_check_name(const void *header, const void *name);

/* ---- Block devices ------------------------------------------------------------------------------------------- */

enum ss_block_access {
    SS_BLOCK_AUTO = 0,    /* the first available one of NVMe, io_uring, threads */
    SS_BLOCK_URING = 1,   /* io_uring, one thread */
    SS_BLOCK_THREADS = 2, /* pread() and pwrite(), a thread for each request in flight */
    SS_BLOCK_NVME = 3     /* NVMe commands through io_uring; bypasses the block layer */
};
enum ss_block_kind { SS_BLOCK_READ = 0, SS_BLOCK_WRITE = 1, SS_BLOCK_FLUSH = 2, SS_BLOCK_DISCARD = 3 };

/* Priority of an operation of any kind; a client waits for a foreground operation. */
enum ss_block_priority {
    SS_BLOCK_PRIORITY_FOREGROUND = 0,
    SS_BLOCK_PRIORITY_WRITE = 1,      /* while no foreground operation waits or is in flight; or after 20 ms */
    SS_BLOCK_PRIORITY_BACKGROUND = 2, /* while no other operation waits or is in flight; or after 500 ms */
};

/* For each number, zero is the default. */
struct ss_block_options {
    size_t options_size;         /* sizeof(struct ss_block_options), so that it can grow */
    const char *path;            /* a file, a block device, or an NVMe namespace's character device */
    uint64_t size;               /* bytes to use: a file is created, its blocks reserved; 0: present size */
    enum ss_block_access access; /* SS_NOT_SUPPORTED if it is not available; AUTO always finds one */
    uint32_t queue_depth;        /* requests that the device has at a time: 1 to 1024, default 32 */
    uint32_t operations_max;     /* operations submitted and not yet taken back: default 1024 */
    uint32_t strict;             /* 1: only operations of one priority are in flight; writes wait up to 1 s */
    int32_t core;                /* core of the threads; -1: any */
};

/*
 * A read into pages reads layers of extents on the device, layer by layer, so that the first layer is complete first. A
 * layer of an extent is one *part*: the bytes of some pages, which go to blocks of paged memory. A whole prefix is
 * therefore one operation, for any number of layers and blocks. Each part is checked by its CRC-32.
 *
 * The caller owns all tables, and does not change them until the operation has completed. The caller must ensure that
 * the blocks are inside the memory. Several operations may share 'left', 'word' and 'stop': those of one prefix on
 * several devices.
 */
struct ss_block_pages {
    uint64_t size;           /* bytes of a page, a multiple of 4096 */
    uint64_t stride;         /* bytes from one block's page to the next one's, a multiple of 512 */
    const uint64_t *layers;  /* offset in the memory of each layer's page of block 0 */
    const uint64_t *extents; /* offset on the device of each extent */
    const uint32_t *blocks;  /* target blocks: those of the first extent, then those of the second... */
    const uint32_t
        *checksums;       /* of parts: those of the first layer, one for each extent, then those of the second... */
    uint32_t *verdicts;   /* of parts, in the same order: enum ss_result; after an error, SS_OK for parts in place */
    uint32_t *left;       /* of layers: number of valid parts, of all operations, that a layer still lacks */
    uint32_t *word;       /* progress word (ss_progress_tell()): number of complete leading layers; or NULL */
    const uint32_t *stop; /* if it is not 0, no further part begins: ECANCELED; another thread may set it */
    uint32_t layer_count; /* at least 1, as are the other two */
    uint32_t extent_count;
    uint32_t extent_blocks; /* pages of a part, for one request of the device or a few: at most 2 MiB */
};

/*
 * One read or write of bytes of the device, a flush, or a discard of bytes that are no longer needed. A discard has no
 * effect on a file, whose blocks stay reserved; later reads of these bytes are undefined.
 *
 * Operations are not ordered. A flush makes the writes durable that had completed before it was submitted.
 *
 * The reading thread may check a read of an object, or of its first units, before completion. So devices check in
 * parallel, and the thread that takes completions reads only the verdicts.
 *
 * A read into pages reads 'length' bytes, those of extent_blocks pages, of each layer of each extent; the layers follow
 * each other from 'offset' on. Its verdict is SS_OK, or that of an invalid part.
 */
struct ss_block_operation {
    enum ss_block_kind kind;
    enum ss_block_priority priority;
    uint64_t offset; /* bytes; a multiple of 4096, as is 'length'; both 0 for a flush. Read into pages: see above */
    uint64_t length;
    void *memory; /* at a multiple of 512; the caller keeps it, and does not use it until completion */
    uint64_t tag; /* returned with the completion */
    struct ss_object_fields
        expected;            /* of a checked read: the object that must be in 'memory', see ss_object_check() */
    uint32_t expected_units; /* number of units from the first on; 0: only the header */
    uint32_t is_checked;     /* 1: a checked read of the header and these units */
    const struct ss_block_pages *pages; /* NULL: no read into pages */
};

struct ss_block_completion {
    uint64_t tag;
    uint64_t begin_ns;      /* CLOCK_MONOTONIC: time of its first request to the device; end_ns if it had none */
    uint64_t end_ns;        /* time when the device had completed it, without the time of the check */
    int32_t error;          /* errno; 0: success; ECANCELED: stopped before it began */
    enum ss_result verdict; /* of ss_object_check(); SS_NOT_SUPPORTED: not a checked read, or it failed */
};

struct ss_block_statistics {
    uint64_t operations[4]; /* operations without an error, by kind */
    uint64_t bytes[4];      /* of these operations */
    uint64_t errors[4];     /* operations that failed, by kind */
    uint64_t wait_ns[3];    /* between submission and the first request, summed, by priority */
    uint64_t service_ns[3]; /* between the first request and completion, summed, by priority */
    uint64_t busy_ns;       /* time with a request in flight */
    uint64_t oldest_ns;     /* start of the oldest request in flight; 0: none */
    uint32_t waiting[3];    /* operations that have not begun, by priority */
    uint32_t in_flight;     /* requests in flight */
    uint32_t registered;    /* memory regions registered with the kernel; 0 if the access does not use them */
    int32_t last_error;     /* errno of the last failure; 0: none yet */
    uint32_t gone;          /* an operation failed as on a device that was removed (ENODEV, ENXIO) */
};

struct ss_block;

/* ss_block_access_built() returns whether this build has 'access'. */
SS_API int ss_block_access_built(enum ss_block_access access);

/* ss_block_access_available() returns whether this build and the running kernel have 'access'. */
SS_API int ss_block_access_available(enum ss_block_access access);

/*
 * ss_block_open() opens a device for this process exclusively and starts its threads. Fails with SS_OS_ERROR (errno:
 * EBUSY: mounted, or used by another process; ENOSPC: no room for 'size' bytes; errors of open()), SS_NOT_SUPPORTED,
 * SS_BAD_ARGUMENT (no file and no device; less than 4096 bytes; numbers out of range), SS_NO_MEMORY.
 */
SS_API enum ss_result ss_block_open(const struct ss_block_options *options, struct ss_block **block);

/* ss_block_size() returns the number of usable bytes, a multiple of 4096. */
SS_API uint64_t ss_block_size(const struct ss_block *block);

/* ss_block_access_name() returns the access method, such as "io_uring, direct"; valid while the device is open. */
SS_API const char *ss_block_access_name(const struct ss_block *block);

/*
 * ss_block_register() registers memory with the kernel, which then does not look up its pages for each request: at most
 * 256 GiB in total. Optional: operations on other memory also work. The memory must exist until ss_block_close(), or
 * ss_block_unregister(). All of it or none. SS_NO_MEMORY if the limit of locked memory (RLIMIT_MEMLOCK) is too low,
 * SS_NO_SPACE if it is over 256 GiB, SS_NOT_SUPPORTED if the access method does not use it. From any thread.
 */
SS_API enum ss_result ss_block_register(struct ss_block *block, void *memory, uint64_t size);

/*
 * ss_block_unregister() removes a registration of ss_block_register(). No operation in flight may use the memory, which
 * can then be freed. Memory without a registration is ignored. From any thread.
 */
SS_API void ss_block_unregister(struct ss_block *block, void *memory, uint64_t size);

/*
 * ss_block_submit() queues 'count' operations, all or none, and never blocks. SS_NO_SPACE: more than operations_max;
 * SS_BAD_ARGUMENT: one lies outside the device or is not aligned; SS_CANCELLED: stopped. From any thread.
 */
SS_API enum ss_result ss_block_submit(struct ss_block *block, const struct ss_block_operation *operations,
                                      size_t count);

/* ss_block_completions() takes back at most 'max' completed operations, and never blocks. From any thread. */
SS_API size_t ss_block_completions(struct ss_block *block, struct ss_block_completion *completions, size_t max);

/* ss_block_descriptor() returns an eventfd that is readable while completions are waiting. Do not read from it. */
SS_API int ss_block_descriptor(const struct ss_block *block);

/* ss_block_statistics() copies the counters since the device was opened. From any thread. */
SS_API void ss_block_statistics(struct ss_block *block, struct ss_block_statistics *statistics);

/*
 * ss_block_stop() completes waiting operations with ECANCELED, waits for the requests in flight, and ends the threads.
 * Completions can be taken afterwards. SS_DEADLINE if the device does not finish a request within 'timeout_ms': the
 * memory of such operations must then exist until the process ends, and ss_block_close() does not free the block.
 */
SS_API enum ss_result ss_block_stop(struct ss_block *block, uint32_t timeout_ms);

/* ss_block_close() stops the block if necessary, for at most 10 s, and closes the device. NULL is allowed. */
SS_API void ss_block_close(struct ss_block *block);

/* cffi:end */

#endif /* SHADOWSERVE_BLOCK_H */
