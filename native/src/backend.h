/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend.h - what does the pipeline's accelerated work: a CPU, a DPU's engines, or an emulator of them
 *
 * A backend decompresses slices and copies them to their destination. The executor does the rest: networking,
 * checksums of the stored bytes, dequantization, order, failure, deadlines. Where the stages are fused, a backend may
 * do dequantization in one go with decompression.
 *
 * Life: open() once for each pipeline, channel_open() once for each decompress and DMA thread; then any number of
 * decompress() or deliver() calls on each channel, always from that channel's one thread, so that a channel needs no
 * locks (it is one progress engine); then channel_close(), close(). A channel is closed with nothing in flight.
 *
 * Work: decompress() and deliver() start one slice. When they return SS_OK, the backend calls work->complete(work)
 * exactly once, with work->result set: from within this call, from a later one that starts another work (a CPU, which
 * decompresses several at a time), or from a later progress() (an engine).
 * When they return anything else, nothing was started and complete() is never called. The executor starts no more than
 * 'in_flight_max' works on a channel at a time, and calls progress() until all are complete; it never gives up on one,
 * since an engine may write until it says that it is done.
 */
#ifndef SS_BACKEND_H
#define SS_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#include "shadowserve.h"

/* The accelerator's limit on one operation (ShadowServe section 5), and so the limit on a slice everywhere. */
#define SS_SLICE_BYTES_MAX ((size_t)2 << 20)

/* The pipeline's buffers, for a backend that has to register them with a device. */
struct ss_backend_buffers {
    uint8_t *decompression;
    uint8_t *dequantization;
    uint8_t *dma_source;
    uint64_t decompression_bytes;
    uint64_t dequantization_bytes;
    uint64_t dma_source_bytes;
};

/* One slice for one engine. Belongs to the executor; must not move between the start and complete(). */
struct ss_work {
    const uint8_t *source; /* decompress: the stream, in the decompression buffer; deliver: in the DMA source buffer */
    uint8_t *target;       /* decompress: the symbols; deliver: in the destination */
    size_t source_size;
    size_t target_size;          /* deliver: equal to source_size */
    enum ss_codec codec;         /* decompress only */
    uint32_t decoded_crc32;      /* decompress only: what a backend with 'checks_decoded' compares with */
    uint32_t dequantized;        /* out, decompress only; 0 at first: the elements are there, the symbols may be not */
    struct ss_elements elements; /* decompress, fused, only: what the symbols are to become; else its target is NULL */
    enum ss_result result;       /* out: SS_OK, SS_BAD_DATA, SS_CHECKSUM, SS_NO_MEMORY, SS_OS_ERROR */
    void (*complete)(struct ss_work *work);
    void *user;              /* the executor's */
    uint64_t backend_use[4]; /* the backend's, from start to complete() */
};

struct ss_backend_capabilities {
    uint32_t codecs;          /* bit 1 << enum ss_codec for each that decompress() takes */
    uint32_t in_flight_max;   /* works on one channel at a time, at least 1 */
    uint64_t slice_bytes_max; /* of decompress's target_size; what deliver() gets may be 4 times that: split it */
    uint32_t fused;           /* decompress() can write into any memory, so that the executor may fuse the stages */
    uint32_t checks_decoded;  /* decompress() compares decoded_crc32; slices without scales need no CPU checksum */
};

struct ss_backend {
    const char *name;

    /* open() claims the device and registers the buffers. SS_NOT_SUPPORTED where there is no such device here. */
    enum ss_result (*open)(const struct ss_backend_buffers *buffers, void **device);
    void (*close)(void *device);

    /* capabilities() of an opened device. */
    struct ss_backend_capabilities (*capabilities)(void *device);

    /* channel_open() for one thread of SS_STAGE_DECOMPRESS or SS_STAGE_DMA. Called before that thread starts. */
    enum ss_result (*channel_open)(void *device, enum ss_stage stage, void **channel);
    void (*channel_close)(void *channel);

    enum ss_result (*decompress)(void *channel, struct ss_work *work);
    enum ss_result (*deliver)(void *channel, struct ss_work *work);

    /* progress() completes what is done, without waiting, and returns how many works that was. */
    uint32_t (*progress)(void *channel);
};

/* Does everything on the thread that asks. Always there. */
extern const struct ss_backend ss_backend_software;

/* ss_backend_find() returns the backend called 'name', NULL where this build has none. */
const struct ss_backend *ss_backend_find(const char *name);

#endif /* SS_BACKEND_H */
