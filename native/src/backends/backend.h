/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend.h - interface of the backends, which do the pipeline's accelerated work: CPU, DPU, or an emulator of a DPU
 *
 * A backend decompresses slices, copies elements to registered memory, and copies elements to store from there.
 * The executor does the rest: networking, checksums of the stored bytes, dequantization, order, failure, deadlines.
 * If the stages are fused, a backend may also dequantize while it decompresses.
 *
 * Life: open() once for each pipeline; channel_open() once for each thread that uses the backend, on that thread; then
 * any number of decompress(), deliver() or collect() calls on each channel, always from its one thread, so that a
 * channel needs no locks (it is one progress engine); then channel_close() on the same thread, and close(). A channel
 * is closed with nothing in flight. memory_open() and memory_close() come from any thread, between open() and close(),
 * and from within complete().
 *
 * Work: decompress(), deliver() and collect() start one slice. When they return SS_OK, the backend calls
 * work->complete(work) exactly once, with work->result set: within this call, within a later call that starts another
 * work (a CPU, which decompresses several at a time), or within a later progress() (an accelerator).
 * If they return another result, nothing was started and complete() is never called. The executor starts no more than
 * 'in_flight_max' works on a channel at a time, and calls progress() until all are complete. It never abandons a single
 * work, since an accelerator may write until it reports completion. If a device with work completes nothing for too
 * long, the executor abandons the device: it makes no further call for that channel, not even channel_close() or
 * close().
 */
#ifndef SS_BACKEND_H
#define SS_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#include "shadowserve.h"

/* The accelerator's limit on one operation (ShadowServe section 5), and so the limit on a slice everywhere. */
#define SS_SLICE_BYTES_MAX ((size_t)2 << 20)

/* Most bytes that are delivered or collected at a time: a slice of symbols with the largest element type. */
#define SS_DELIVERED_BYTES_MAX (4 * SS_SLICE_BYTES_MAX)

struct ss_backend_range {
    uint8_t *data; /* NULL: no such buffer */
    uint64_t size;
};

/* Description of a thread's use of its channel; a backend that must register memory with a device does this once. */
struct ss_backend_channel {
    enum ss_stage stage;            /* SS_STAGE_DECOMPRESS, SS_STAGE_DMA, or SS_STAGE_QUANTIZE: a thread that stores */
    struct ss_backend_range source; /* decompress: the decompression buffer; deliver: the DMA source buffer */
    struct ss_backend_range target; /* decompress: the dequantization buffer; collect: the thread's own buffer */
};

/* One slice for one channel. Belongs to the executor; must not move between the start and complete(). */
struct ss_work {
    const uint8_t *source; /* decompress: the stream; deliver: elements; collect: in 'memory' */
    uint8_t *target;       /* decompress: the symbols; deliver: in 'memory'; collect: elements */
    size_t source_size;
    size_t target_size;     /* deliver, collect: equal to source_size, at most SS_DELIVERED_BYTES_MAX */
    const uint8_t *next;    /* decompress: what the caller reads once this is done, to be asked for meanwhile; */
    size_t next_size;       /* 0: it does not know */
    void *memory;           /* deliver, collect: from memory_open(); NULL: plain memory */
    enum ss_codec codec;    /* decompress only */
    uint32_t decoded_crc32; /* decompress only: expected value, for a backend with 'checks_decoded' */
    uint32_t dequantized; /* out, decompress only; 0 at first; 1: the elements are complete, the symbols perhaps not */
    struct ss_elements elements; /* decompress, fused, only: the elements to make; else its target is NULL */
    enum ss_result result;       /* out: SS_OK, SS_BAD_DATA, SS_CHECKSUM, SS_NO_MEMORY, SS_DEVICE */
    void (*complete)(struct ss_work *work);
    void *user;              /* the executor's */
    uint64_t backend_use[4]; /* for the backend's own use, from start to complete() */
};

struct ss_backend_capabilities {
    uint32_t in_flight_max;  /* works on one channel at a time, at least 1 */
    uint32_t checks_decoded; /* decompress() compares decoded_crc32; slices without scales need no CPU checksum */
    uint32_t memory_kinds;   /* bit 1 << enum ss_memory_kind for each that memory_open() takes */
    uint32_t plain_memory;   /* decompress() reads and writes any memory of this process, so that the executor may fuse
                                the stages; deliver() also reaches memory that is not registered */
};

struct ss_backend {
    const char *name;

    /* description() and emulated() return the results of ss_backend_description() and ss_backend_emulated(). */
    const char *(*description)(void);
    int (*emulated)(void);

    /*
     * open() claims the device called 'name' ("": the first suitable one); queues between stages have 'queue_depth'
     * slices. SS_NOT_SUPPORTED if this machine has no such device.
     */
    enum ss_result (*open)(const char *name, uint32_t queue_depth, void **device);
    void (*close)(void *device);

    /* device_name() and capabilities() of an opened device. */
    const char *(*device_name)(void *device);
    struct ss_backend_capabilities (*capabilities)(void *device);

    enum ss_result (*channel_open)(void *device, const struct ss_backend_channel *setup, void **channel);
    void (*channel_close)(void *channel);

    /* memory_open() registers memory with all channels, and stores its address for works in '*address'. */
    enum ss_result (*memory_open)(void *device, const struct ss_memory *memory, void **handle, uint8_t **address);
    void (*memory_close)(void *device, void *handle);

    /* decompress() takes every codec of this build, and slices of up to SS_SLICE_BYTES_MAX. */
    enum ss_result (*decompress)(void *channel, struct ss_work *work);
    enum ss_result (*deliver)(void *channel, struct ss_work *work);

    /* collect() is the inverse of deliver(), from memory that this process cannot read itself. */
    enum ss_result (*collect)(void *channel, struct ss_work *work);

    /* progress() completes finished works without waiting, and returns their number. */
    uint32_t (*progress)(void *channel);
};

/* The CPU backend: works run on the calling thread. Every build has it. */
extern const struct ss_backend ss_backend_software;

/* A BlueField's accelerators through DOCA, or an emulator of that; only in a build with one of them. */
extern const struct ss_backend ss_backend_doca;

/* ss_backend_find() returns the backend called 'name', NULL if this build does not have it. */
const struct ss_backend *ss_backend_find(const char *name);

#endif /* SS_BACKEND_H */
