/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda.c - see cuda.h
 *
 * Facts about the CUDA driver API (NVIDIA's reference) that shape this file:
 *   - libcuda.so.1 comes with the driver, not with CUDA's toolkit, so it is loaded at run time and its few functions
 * are declared here; names with _v2 are what CUDA's own header makes of the plain ones;
 *   - a context is current in a thread. A thread makes the device's primary context current before each group of calls:
 *     where it is current already, that costs next to nothing;
 *   - the primary context is counted. Its last release resets it, which ends every stream, event, mapping and page lock
 *     in it. So each memory retains it, and each channel retains it for its stream and, separately, for its page lock:
 *     memory comes and goes with engines, channels stay. The price is that the context stays, too (some hundred MB of
 *     the GPU's memory), after the first engine;
 *   - a copy from pageable memory goes through the driver's own small buffer; page-locked memory of ours is read by the
 *     GPU itself, while this thread goes on;
 *   - cuIpcOpenMemHandle() maps a whole allocation, whatever part of it the exporter asked the handle for;
 *   - an event is ready once all that was put into its stream before it is done. Copies of one stream keep their order.
 */
#define _GNU_SOURCE 1
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "backends/cuda.h"
#include "cpu/clock.h"

typedef int cuda_result;
typedef int cuda_device;
typedef uint64_t cuda_address;
typedef struct {
    char bytes[64];
} cuda_ipc_handle;

enum { CUDA_OK = 0, CUDA_OUT_OF_MEMORY = 2, CUDA_NOT_READY = 600 };
enum { CUDA_IPC_LAZY_PEER_ACCESS = 1, CUDA_HOST_PORTABLE = 1, CUDA_STREAM_NON_BLOCKING = 1, CUDA_EVENT_NO_TIMING = 2 };

enum { COPIES_MAX = 8 };

/* Longest time to wait for earlier copies. They take milliseconds; more than seconds means that the GPU hangs. */
#define COPY_TIME_NS 10000000000ULL

static struct {
    void *library;
    cuda_result (*init)(unsigned);
    cuda_result (*device_by_address)(cuda_device *, const char *);
    cuda_result (*context_retain)(void **, cuda_device);
    cuda_result (*context_release)(cuda_device);
    cuda_result (*context_set)(void *);
    cuda_result (*host_register)(void *, size_t, unsigned);
    cuda_result (*host_unregister)(void *);
    cuda_result (*ipc_open)(cuda_address *, cuda_ipc_handle, unsigned);
    cuda_result (*ipc_close)(cuda_address);
    cuda_result (*stream_create)(void **, unsigned);
    cuda_result (*stream_destroy)(void *);
    cuda_result (*stream_wait)(void *);
    cuda_result (*event_create)(void **, unsigned);
    cuda_result (*event_destroy)(void *);
    cuda_result (*event_record)(void *, void *);
    cuda_result (*event_query)(void *);
    cuda_result (*copy_to_gpu)(cuda_address, const void *, size_t, void *);
    cuda_result (*copy_from_gpu)(void *, cuda_address, size_t, void *);
} cuda;
static pthread_once_t cuda_once = PTHREAD_ONCE_INIT;

struct ss_cuda_memory {
    cuda_device device;
    void *context;
    cuda_address address;
};

struct ss_cuda_channel {
    struct ss_backend_range buffer;
    void *context; /* of 'device', retained; NULL before the first copy */
    cuda_device device;
    void *pinned_context; /* of 'pinned_device', retained, in which this channel page-locked the buffer; else NULL */
    cuda_device pinned_device;
    void *stream;
    void *events[COPIES_MAX];
    struct ss_work *works[COPIES_MAX];
    uint32_t first; /* of those in flight, which are in the order of their starts */
    uint32_t count;
};

/* ---- The driver ---------------------------------------------------------------------------------------------- */

static void cuda_load(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        return;
    }
    const struct {
        const char *name;
        void *function; /* receives its address */
    } symbols[] = {
        {"cuInit", &cuda.init},
        {"cuDeviceGetByPCIBusId", &cuda.device_by_address},
        {"cuDevicePrimaryCtxRetain", &cuda.context_retain},
        {"cuDevicePrimaryCtxRelease_v2", &cuda.context_release},
        {"cuCtxSetCurrent", &cuda.context_set},
        {"cuMemHostRegister_v2", &cuda.host_register},
        {"cuMemHostUnregister", &cuda.host_unregister},
        {"cuIpcOpenMemHandle_v2", &cuda.ipc_open},
        {"cuIpcCloseMemHandle", &cuda.ipc_close},
        {"cuStreamCreate", &cuda.stream_create},
        {"cuStreamDestroy_v2", &cuda.stream_destroy},
        {"cuStreamSynchronize", &cuda.stream_wait},
        {"cuEventCreate", &cuda.event_create},
        {"cuEventDestroy_v2", &cuda.event_destroy},
        {"cuEventRecord", &cuda.event_record},
        {"cuEventQuery", &cuda.event_query},
        {"cuMemcpyHtoDAsync_v2", &cuda.copy_to_gpu},
        {"cuMemcpyDtoHAsync_v2", &cuda.copy_from_gpu},
    };
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        void *found = dlsym(library, symbols[i].name);
        if (found == NULL) {
            dlclose(library);
            return;
        }
        memcpy(symbols[i].function, &found, sizeof found);
    }
    cuda.library = library;
}

int ss_cuda_present(void) {
    pthread_once(&cuda_once, cuda_load);
    return cuda.library != NULL;
}

/* ---- Memory -------------------------------------------------------------------------------------------------- */

enum ss_result ss_cuda_memory_open(const struct ss_memory *memory, struct ss_cuda_memory **opened, uint8_t **address) {
    cuda_ipc_handle handle;
    struct ss_cuda_memory own = {0};
    if (!ss_cuda_present()) {
        return SS_NOT_SUPPORTED;
    }
    if (memory->descriptor_size != sizeof handle.bytes || memory->device == NULL) {
        return SS_BAD_ARGUMENT;
    }
    memcpy(handle.bytes, memory->descriptor, sizeof handle.bytes);
    if (cuda.init(0) != CUDA_OK) {
        return SS_DEVICE;
    }
    if (cuda.device_by_address(&own.device, memory->device) != CUDA_OK) {
        return SS_BAD_ARGUMENT;
    }
    if (cuda.context_retain(&own.context, own.device) != CUDA_OK) {
        return SS_DEVICE;
    }
    struct ss_cuda_memory *kept = malloc(sizeof *kept);
    cuda_result result = kept == NULL ? CUDA_OUT_OF_MEMORY : cuda.context_set(own.context);
    if (result == CUDA_OK) {
        result = cuda.ipc_open(&own.address, handle, CUDA_IPC_LAZY_PEER_ACCESS);
    }
    if (result != CUDA_OK) {
        cuda.context_release(own.device);
        free(kept);
        return result == CUDA_OUT_OF_MEMORY ? SS_NO_MEMORY : SS_BAD_ARGUMENT;
    }
    *kept = own;
    *opened = kept;
    *address = (uint8_t *)(uintptr_t)own.address;
    return SS_OK;
}

void ss_cuda_memory_close(struct ss_cuda_memory *memory) {
    if (cuda.context_set(memory->context) == CUDA_OK) {
        cuda.ipc_close(memory->address);
    }
    cuda.context_release(memory->device);
    free(memory);
}

/* ---- Channels ------------------------------------------------------------------------------------------------ */

struct ss_cuda_channel *ss_cuda_channel_new(struct ss_backend_range pinned) {
    struct ss_cuda_channel *channel = calloc(1, sizeof *channel);
    if (channel != NULL) {
        channel->buffer = pinned;
    }
    return channel;
}

/* Ends the channel's stream and events and releases their context. Waits for copies, which run only after a failure. */
static void channel_leave(struct ss_cuda_channel *channel) {
    if (channel->context == NULL) {
        return;
    }
    if (cuda.context_set(channel->context) == CUDA_OK) {
        if (channel->stream != NULL) {
            cuda.stream_wait(channel->stream);
            cuda.stream_destroy(channel->stream);
        }
        for (size_t i = 0; i < COPIES_MAX; i++) {
            if (channel->events[i] != NULL) {
                cuda.event_destroy(channel->events[i]);
            }
        }
    }
    memset(channel->events, 0, sizeof channel->events);
    cuda.context_release(channel->device);
    channel->stream = channel->context = NULL;
}

void ss_cuda_channel_free(struct ss_cuda_channel *channel) {
    if (channel == NULL) {
        return;
    }
    channel_leave(channel);
    if (channel->pinned_context != NULL) {
        if (cuda.context_set(channel->pinned_context) == CUDA_OK) {
            cuda.host_unregister(channel->buffer.data);
        }
        cuda.context_release(channel->pinned_device);
    }
    free(channel);
}

/* Page-locks the buffer, once for all contexts. If another channel has locked a shared buffer, that is sufficient. */
static void channel_pin(struct ss_cuda_channel *channel, cuda_device device) {
    void *context = NULL;
    if (channel->buffer.data == NULL || channel->pinned_context != NULL ||
        cuda.context_retain(&context, device) != CUDA_OK) {
        return;
    }
    if (cuda.host_register(channel->buffer.data, channel->buffer.size, CUDA_HOST_PORTABLE) != CUDA_OK) {
        cuda.context_release(device);
        return;
    }
    channel->pinned_context = context;
    channel->pinned_device = device;
}

/* Makes the channel ready for the GPU of 'memory'. A daemon serves one GPU, so this happens once. */
static enum ss_result channel_enter(struct ss_cuda_channel *channel, const struct ss_cuda_memory *memory) {
    if (channel->context == memory->context) {
        return cuda.context_set(memory->context) == CUDA_OK ? SS_OK : SS_DEVICE;
    }
    channel_leave(channel);
    if (cuda.context_retain(&channel->context, memory->device) != CUDA_OK) {
        channel->context = NULL;
        return SS_DEVICE;
    }
    channel->device = memory->device;
    cuda_result result = cuda.context_set(channel->context);
    if (result == CUDA_OK) {
        result = cuda.stream_create(&channel->stream, CUDA_STREAM_NON_BLOCKING);
    }
    for (size_t i = 0; i < COPIES_MAX && result == CUDA_OK; i++) {
        result = cuda.event_create(&channel->events[i], CUDA_EVENT_NO_TIMING);
    }
    if (result != CUDA_OK) {
        channel_leave(channel);
        return SS_DEVICE;
    }
    channel_pin(channel, channel->device);
    return SS_OK;
}

/* Waits for earlier copies, before another one; SS_DEVICE if they do not end. */
static enum ss_result channel_make_room(struct ss_cuda_channel *channel, const struct ss_cuda_memory *memory) {
    uint64_t end = ss_now_ns() + COPY_TIME_NS;
    while (channel->count > 0 && (channel->count == COPIES_MAX || channel->context != memory->context)) {
        uint64_t looked = ss_now_ns();
        if (ss_cuda_progress(channel) == 0 && looked > end) {
            return SS_DEVICE;
        }
    }
    return SS_OK;
}

enum ss_result ss_cuda_copy(struct ss_cuda_channel *channel, struct ss_cuda_memory *memory, struct ss_work *work,
                            int to_gpu) {
    enum ss_result entered = channel_make_room(channel, memory);
    if (entered == SS_OK) {
        entered = channel_enter(channel, memory);
    }
    if (entered != SS_OK) {
        return entered;
    }
    uint32_t slot = (channel->first + channel->count) % COPIES_MAX;
    cuda_result result;
    if (to_gpu) {
        result =
            cuda.copy_to_gpu((cuda_address)(uintptr_t)work->target, work->source, work->source_size, channel->stream);
    } else {
        result =
            cuda.copy_from_gpu(work->target, (cuda_address)(uintptr_t)work->source, work->source_size, channel->stream);
    }
    if (result == CUDA_OK && cuda.event_record(channel->events[slot], channel->stream) != CUDA_OK) {
        cuda.stream_wait(channel->stream); /* the copy was started: wait for its end before reporting a failure */
        result = CUDA_NOT_READY;
    }
    if (result != CUDA_OK) {
        return SS_DEVICE;
    }
    channel->works[slot] = work;
    channel->count++;
    return SS_OK;
}

uint32_t ss_cuda_progress(struct ss_cuda_channel *channel) {
    uint32_t completed = 0;
    while (channel->count > 0) {
        cuda_result result = cuda.event_query(channel->events[channel->first]);
        if (result == CUDA_NOT_READY) {
            break;
        }
        struct ss_work *work = channel->works[channel->first];
        channel->first = (channel->first + 1) % COPIES_MAX;
        channel->count--;
        work->result = result == CUDA_OK ? SS_OK : SS_DEVICE;
        work->complete(work);
        completed++;
    }
    return completed;
}
