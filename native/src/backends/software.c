/* SPDX-License-Identifier: Apache-2.0 */
/*
 * software.c - the CPU backend, which every build has
 *
 * Mostly work is complete before the call that starts it returns, so that a slice is still in the cache for the next
 * stage. But several Deflate streams are faster in turns than one after the other (codecs/literal_inflate.c), so a
 * channel keeps slices until it has IN_FLIGHT_MAX of them, or until the executor polls. And a decoder may leave the
 * last elements of a slice to the call for the next one (codecs/decode.h): the slice is complete after that, or when
 * the executor polls. The executor polls as soon as it has no more slices to start, so slices never wait for slices
 * that have not arrived. Copies to and from a GPU's memory (cuda.h) are asynchronous, too; copies within this process'
 * memory are not.
 */
#include <stdlib.h>
#include <string.h>

#include "backends/backend.h"
#include "backends/cuda.h"
#include "codecs/decode.h"
#include "codecs/literal_inflate.h"

enum { IN_FLIGHT_MAX = SS_LITERAL_INFLATE_LANES };

struct channel {
    struct ss_work *works[IN_FLIGHT_MAX]; /* of one codec */
    uint32_t count;
    struct ss_work *left;           /* its last elements are perhaps not written yet; or NULL */
    struct ss_backend_range copied; /* source or target of copies */
    struct ss_cuda_channel *cuda;   /* NULL before the first copy to or from a GPU */
};

static const char *software_description(void) {
    return "CPU";
}

static int software_emulated(void) {
    return 0;
}

static enum ss_result software_open(const char *name, uint32_t queue_depth, void **device) {
    (void)queue_depth;
    if (name[0] != '\0') {
        return SS_NOT_SUPPORTED; /* there is none */
    }
    *device = NULL;
    return SS_OK;
}

static void software_close(void *device) {
    (void)device;
}

static const char *software_device_name(void *device) {
    (void)device;
    return "";
}

static struct ss_backend_capabilities software_capabilities(void *device) {
    (void)device;
    return (struct ss_backend_capabilities){
        .in_flight_max = IN_FLIGHT_MAX,
        .memory_kinds = 1U << SS_MEMORY_LOCAL | (ss_cuda_present() ? 1U << SS_MEMORY_CUDA_IPC : 0),
        .plain_memory = 1,
    };
}

static enum ss_result software_channel_open(void *device, const struct ss_backend_channel *setup, void **opened) {
    (void)device;
    struct channel *channel = calloc(1, sizeof *channel);
    if (channel == NULL) {
        return SS_NO_MEMORY;
    }
    channel->copied = setup->stage == SS_STAGE_DMA ? setup->source : setup->target;
    *opened = channel;
    return SS_OK;
}

static void software_channel_close(void *argument) {
    struct channel *channel = argument;
    ss_cuda_channel_free(channel->cuda);
    free(channel);
}

/* Memory of this process needs no registration, and has no handle. */
static enum ss_result software_memory_open(void *device, const struct ss_memory *memory, void **handle,
                                           uint8_t **address) {
    (void)device;
    if (memory->kind == SS_MEMORY_CUDA_IPC) {
        struct ss_cuda_memory *opened = NULL;
        enum ss_result result = ss_cuda_memory_open(memory, &opened, address);
        *handle = opened;
        return result;
    }
    *handle = NULL;
    *address = memory->address;
    return SS_OK;
}

static void software_memory_close(void *device, void *handle) {
    (void)device;
    if (handle != NULL) {
        ss_cuda_memory_close(handle);
    }
}

/* Completes the work that was left, now that its last elements are written; returns whether there was one. */
static uint32_t left_complete(struct channel *channel) {
    struct ss_work *work = channel->left;
    if (work == NULL) {
        return 0;
    }
    channel->left = NULL;
    work->complete(work);
    return 1;
}

/* Decompresses and dequantizes in one step, if possible. */
static int work_decodes(struct channel *channel, struct ss_work *work) {
    if (work->elements.target == NULL) {
        return 0;
    }
    const struct ss_stream stream = {.source = work->source,
                                     .target = work->target,
                                     .source_size = work->source_size,
                                     .target_size = work->target_size};
    const struct ss_stream next = {.source = work->next, .source_size = work->next_size};
    work->result = ss_decode_direct(work->codec, &stream, work->next_size != 0 ? &next : NULL, &work->elements);
    left_complete(channel);
    if (work->result == SS_NOT_SUPPORTED) {
        return 0;
    }
    work->dequantized = 1;
    channel->left = work;
    if (work->next_size == 0) {
        left_complete(channel);
    }
    return 1;
}

/* Decompresses the slices that the channel keeps, and completes finished copies. */
static uint32_t software_progress(void *argument) {
    struct channel *channel = argument;
    struct ss_work *works[IN_FLIGHT_MAX];
    struct ss_stream streams[IN_FLIGHT_MAX];
    uint32_t count = channel->count;
    uint32_t left;
    ss_decode_end();
    left = left_complete(channel);
    for (uint32_t i = 0; i < count; i++) {
        struct ss_work *work = works[i] = channel->works[i];
        streams[i] = (struct ss_stream){.source = work->source,
                                        .target = work->target,
                                        .source_size = work->source_size,
                                        .target_size = work->target_size};
    }
    channel->count = 0;
    if (count > 0) {
        ss_decompress_many(works[0]->codec, streams, count);
    }
    for (uint32_t i = 0; i < count; i++) {
        works[i]->result = streams[i].result;
        works[i]->complete(works[i]);
    }
    return count + left + (channel->cuda != NULL ? ss_cuda_progress(channel->cuda) : 0);
}

static enum ss_result software_decompress(void *argument, struct ss_work *work) {
    struct channel *channel = argument;
    if (work_decodes(channel, work)) {
        return SS_OK;
    }
    if (channel->count > 0 && channel->works[0]->codec != work->codec) {
        software_progress(channel);
    }
    channel->works[channel->count++] = work;
    if (channel->count == IN_FLIGHT_MAX || work->codec != SS_CODEC_DEFLATE) {
        software_progress(channel);
    }
    return SS_OK;
}

static enum ss_result copy(struct channel *channel, struct ss_work *work, int deliver) {
    if (work->memory == NULL) {
        memcpy(work->target, work->source, work->source_size);
        work->result = SS_OK;
        work->complete(work);
        return SS_OK;
    }
    if (channel->cuda == NULL) {
        channel->cuda = ss_cuda_channel_new(channel->copied);
    }
    return channel->cuda != NULL ? ss_cuda_copy(channel->cuda, work->memory, work, deliver) : SS_NO_MEMORY;
}

static enum ss_result software_deliver(void *channel, struct ss_work *work) {
    return copy(channel, work, 1);
}

static enum ss_result software_collect(void *channel, struct ss_work *work) {
    return copy(channel, work, 0);
}

const struct ss_backend ss_backend_software = {
    .name = "software",
    .description = software_description,
    .emulated = software_emulated,
    .open = software_open,
    .close = software_close,
    .device_name = software_device_name,
    .capabilities = software_capabilities,
    .channel_open = software_channel_open,
    .channel_close = software_channel_close,
    .memory_open = software_memory_open,
    .memory_close = software_memory_close,
    .decompress = software_decompress,
    .deliver = software_deliver,
    .collect = software_collect,
    .progress = software_progress,
};
