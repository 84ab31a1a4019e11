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

static enum ss_result software_open(const struct ss_backend_buffers *buffers, void **device) {
    (void)buffers;
    *device = NULL;
    return SS_OK;
}

static void software_close(void *device) {
    (void)device;
}

static struct ss_backend_capabilities software_capabilities(void *device) {
    (void)device;
    struct ss_backend_capabilities capabilities = {
        .codecs = 0,
        .in_flight_max = IN_FLIGHT_MAX,
        .slice_bytes_max = SS_SLICE_BYTES_MAX,
        .fused = 1,
        .checks_decoded = 0,
    };
    for (uint32_t codec = SS_CODEC_NONE; codec <= SS_CODEC_KVRANS; codec++) {
        if (ss_codec_implementation((enum ss_codec)codec) != NULL) {
            capabilities.codecs |= 1U << codec;
        }
    }
    return capabilities;
}

static enum ss_result software_channel_open(void *device, enum ss_stage stage, void **channel) {
    (void)device;
    (void)stage;
    *channel = calloc(1, sizeof(struct channel));
    return *channel != NULL ? SS_OK : SS_NO_MEMORY;
}

static void software_channel_close(void *channel) {
    free(channel);
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

static enum ss_result software_deliver(void *channel, struct ss_work *work) {
    (void)channel;
    memcpy(work->target, work->source, work->source_size);
    work->result = SS_OK;
    work->complete(work);
    return SS_OK;
}

const struct ss_backend ss_backend_software = {
    .name = "software",
    .open = software_open,
    .close = software_close,
    .capabilities = software_capabilities,
    .channel_open = software_channel_open,
    .channel_close = software_channel_close,
    .decompress = software_decompress,
    .deliver = software_deliver,
    .progress = software_progress,
};

const struct ss_backend *ss_backend_find(const char *name) {
    static const struct ss_backend *const backends[] = {&ss_backend_software};
    for (size_t i = 0; i < sizeof backends / sizeof backends[0]; i++) {
        if (strcmp(backends[i]->name, name) == 0) {
            return backends[i];
        }
    }
    return NULL;
}
