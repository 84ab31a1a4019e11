/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend_software.c - the backend that is always there: the CPU
 *
 * Work is complete before the call that starts it returns, so that a slice is still in the cache for the next stage;
 * but for Deflate. Decompressing several of its streams in turns is faster than one after the other
 * (literal_inflate.c), so a channel keeps slices until it has IN_FLIGHT_MAX of them, or until the executor polls, which
 * it does as soon as it has no more to start: nothing waits for a slice that is not there yet.
 */
#include <stdlib.h>
#include <string.h>

#include "backend.h"
#include "decode.h"
#include "literal_inflate.h"

enum { IN_FLIGHT_MAX = SS_LITERAL_INFLATE_LANES };

struct channel {
    struct ss_work *works[IN_FLIGHT_MAX]; /* of one codec */
    uint32_t count;
};

static const char *software_description(void) {
    return "CPU";
}

static int software_emulated(void) {
    return 0;
}

static enum ss_result software_open(const struct ss_backend_setup *setup, void **device) {
    if (setup->device[0] != '\0') {
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
    struct ss_backend_capabilities capabilities = {
        .codecs = 0,
        .in_flight_max = IN_FLIGHT_MAX,
        .slice_bytes_max = SS_SLICE_BYTES_MAX,
        .fused = 1,
        .checks_decoded = 0,
        .memory_kinds = 1U << SS_MEMORY_LOCAL,
        .plain_memory = 1,
    };
    for (uint32_t codec = SS_CODEC_NONE; codec <= SS_CODEC_KVRANS; codec++) {
        if (ss_codec_implementation((enum ss_codec)codec) != NULL) {
            capabilities.codecs |= 1U << codec;
        }
    }
    return capabilities;
}

static enum ss_result software_channel_open(void *device, const struct ss_backend_channel *setup, void **channel) {
    (void)device;
    (void)setup;
    *channel = calloc(1, sizeof(struct channel));
    return *channel != NULL ? SS_OK : SS_NO_MEMORY;
}

static void software_channel_close(void *channel) {
    free(channel);
}

/* Memory of this process needs nothing. */
static enum ss_result software_memory_open(void *device, const struct ss_memory *memory, void **handle,
                                           uint8_t **address) {
    (void)device;
    *handle = NULL;
    *address = memory->address;
    return SS_OK;
}

static void software_memory_close(void *device, void *handle) {
    (void)device;
    (void)handle;
}

/* Decompresses and dequantizes at once, if that can be. */
static int work_decodes(struct ss_work *work) {
    if (work->elements.target == NULL) {
        return 0;
    }
    const struct ss_stream stream = {.source = work->source,
                                     .target = work->target,
                                     .source_size = work->source_size,
                                     .target_size = work->target_size};
    work->result = ss_decode_direct(work->codec, &stream, &work->elements);
    work->dequantized = work->result != SS_NOT_SUPPORTED;
    return work->dequantized != 0;
}

/* Decompresses what the channel keeps. */
static uint32_t software_progress(void *argument) {
    struct channel *channel = argument;
    struct ss_work *works[IN_FLIGHT_MAX];
    struct ss_stream streams[IN_FLIGHT_MAX];
    uint32_t count = channel->count;
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
    return count;
}

static enum ss_result software_decompress(void *argument, struct ss_work *work) {
    struct channel *channel = argument;
    if (work_decodes(work)) {
        work->complete(work);
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

static enum ss_result software_copy(void *channel, struct ss_work *work) {
    (void)channel;
    memcpy(work->target, work->source, work->source_size);
    work->result = SS_OK;
    work->complete(work);
    return SS_OK;
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
    .deliver = software_copy,
    .collect = software_copy,
    .progress = software_progress,
};
