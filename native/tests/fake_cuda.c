/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake_cuda.c - a libcuda.so.1 for tests on machines without a GPU: the driver calls that ShadowServe makes, no more
 *
 * "GPU memory" is an anonymous file, mapped into the process that allocated it and into those that opened its IPC
 * handle, so that a test can check the copied bytes. Nothing computes. The fake enforces the rules of NVIDIA's "CUDA
 * Driver API" that callers break most easily:
 *   - nothing works before cuInit() (CUDA_ERROR_NOT_INITIALIZED);
 *   - a context is current for each thread of its own, and most calls need one (CUDA_ERROR_INVALID_CONTEXT);
 *   - asynchronous copies between page-locked memory and the GPU have not happened until their stream or an event
 * behind them was waited for or asked; those from pageable memory have, when the call returns;
 *   - an IPC handle is of a whole allocation, and is opened in another process than the one that made it;
 *   - memory is page-locked once (CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
 *   - a primary context is counted: its last release resets it, which ends its streams, events, allocations, mappings
 * and page locks. A later call that names one of them fails (CUDA_ERROR_CONTEXT_IS_DESTROYED); the real driver may
 * crash instead.
 * Kept in mind beyond that: a process's allocations are known by address, so a copy that leaves one is an error.
 *
 * Environment, of which FAIL and DEVICES are read by each cuInit(), the others when they are asked for:
 *   FAKE_CUDA_DEVICES=N       GPUs [1]; GPU i is at 0000:0(i):00.0
 *   FAKE_CUDA_ORDERING=N      CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING [100: the owner sees them in order]
 *   FAKE_CUDA_FLUSH=N         CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS [1: the host can flush]
 *   FAKE_CUDA_DMABUF=0|1      CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED [1]; the descriptor is the anonymous file's
 *   FAKE_CUDA_FAIL=NAME:N=E   the N-th call of NAME from now on, and each one after it, returns error E
 */
#define _GNU_SOURCE 1
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    MAP_FAILED_ERROR = 205,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    CONTEXT_IS_DESTROYED = 709,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801
};
enum { DEVICES_MAX = 8, RANGES_MAX = 256, STREAMS_MAX = 64, COPIES_MAX = 4096, PAGE = 4096 };
enum { IPC_LAZY_PEER_ACCESS = 1, RANGE_DMA_BUF = 1, FLUSH_TARGET_CURRENT = 0 };
enum { ATTRIBUTE_FLUSH = 117, ATTRIBUTE_ORDERING = 118, ATTRIBUTE_DMA_BUF = 124, ATTRIBUTE_RDMA = 116 };

static const char MAGIC[8] = "FAKECUDA";

struct handle { /* the 64 bytes of a CUipcMemHandle */
    char magic[8];
    int64_t process;
    int64_t file;
    uint64_t size;
    int64_t device;
    char rest[24];
};

struct context {
    int device;
    int references;
    uint32_t resets; /* streams and events remember the count of their time */
};

enum range_kind { RANGE_FREE, RANGE_GPU, RANGE_OPENED, RANGE_PINNED };

struct range {
    enum range_kind kind;
    uint64_t begin;
    uint64_t size;
    int file;
    struct context *context;
};

struct copy {
    void *target;
    const void *source;
    size_t size;
};

struct stream {
    struct context *context;
    uint32_t resets;
    struct copy copies[COPIES_MAX];
    uint64_t begun; /* copies that were asked for */
    uint64_t done;
};

struct event {
    struct context *context;
    uint32_t resets;
    struct stream *stream;
    uint64_t position;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialised;
static int devices;
static struct context contexts[DEVICES_MAX];
static struct range ranges[RANGES_MAX];
static struct stream *streams[STREAMS_MAX];
static char fail_name[64];
static long fail_count;
static int fail_error;
static int flushes;
static _Thread_local struct context *current;

/* ---- Bookkeeping --------------------------------------------------------------------------------------------- */

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text != NULL ? atoi(text) : otherwise;
}

/* Every call begins so: holds the lock, unless it returns an error. */
static int enter(const char *name, int needs_context) {
    pthread_mutex_lock(&lock);
    int error = SUCCESS;
    if (!initialised) {
        error = NOT_INITIALIZED;
    } else if (strcmp(name, fail_name) == 0 && --fail_count <= 0) {
        error = fail_error;
    } else if (needs_context && current == NULL) {
        error = INVALID_CONTEXT;
    } else if (needs_context && current->references == 0) {
        error = CONTEXT_IS_DESTROYED;
    }
    if (error != SUCCESS) {
        pthread_mutex_unlock(&lock);
    }
    return error;
}

#define ENTER(needs_context)                                                                                           \
    do {                                                                                                               \
        int entered = enter(__func__, needs_context);                                                                  \
        if (entered != SUCCESS) {                                                                                      \
            return entered;                                                                                            \
        }                                                                                                              \
    } while (0)

static int leave(int error) {
    pthread_mutex_unlock(&lock);
    return error;
}

static struct range *range_of(uint64_t begin, uint64_t size, int pinned) {
    for (size_t i = 0; i < RANGES_MAX; i++) {
        struct range *range = &ranges[i];
        if (range->kind != RANGE_FREE && (range->kind == RANGE_PINNED) == pinned && begin >= range->begin &&
            begin + size <= range->begin + range->size) {
            return range;
        }
    }
    return NULL;
}

static struct range *range_new(enum range_kind kind, uint64_t begin, uint64_t size, int file) {
    for (size_t i = 0; i < RANGES_MAX; i++) {
        if (ranges[i].kind == RANGE_FREE) {
            ranges[i] = (struct range){.kind = kind, .begin = begin, .size = size, .file = file, .context = current};
            return &ranges[i];
        }
    }
    return NULL;
}

/* Returns whether a stream or an event outlived the context that it was created in. */
static int is_dead(const struct context *context, uint32_t resets) {
    return context->references == 0 || context->resets != resets;
}

static void stream_run(struct stream *stream, uint64_t until) {
    for (; stream->done < until; stream->done++) {
        const struct copy *copy = &stream->copies[stream->done % COPIES_MAX];
        memcpy(copy->target, copy->source, copy->size);
    }
}

/* ---- The driver and its devices ------------------------------------------------------------------------------ */

static void read_failure(void) {
    const char *fail = getenv("FAKE_CUDA_FAIL");
    fail_name[0] = '\0';
    if (fail != NULL && sscanf(fail, "%63[^:]:%ld=%d", fail_name, &fail_count, &fail_error) != 3) {
        fprintf(stderr, "FAKE_CUDA_FAIL is '%s'; it is NAME:N=ERROR\n", fail);
        abort();
    }
}

API int cuInit(unsigned flags) {
    pthread_mutex_lock(&lock);
    devices = number("FAKE_CUDA_DEVICES", 1);
    for (int i = 0; i < DEVICES_MAX; i++) {
        contexts[i].device = i;
    }
    read_failure();
    initialised = 1;
    return leave(flags != 0 ? INVALID_VALUE : devices == 0 ? NO_DEVICE : SUCCESS);
}

API int cuGetErrorString(int error, const char **text) {
    static _Thread_local char buffer[48];
    snprintf(buffer, sizeof buffer, "error %d of the fake CUDA driver", error);
    *text = buffer;
    return SUCCESS;
}

API int cuDeviceGetCount(int *count) {
    ENTER(0);
    *count = devices;
    return leave(SUCCESS);
}

API int cuDeviceGet(int *device, int ordinal) {
    ENTER(0);
    *device = ordinal;
    return leave(ordinal >= 0 && ordinal < devices ? SUCCESS : INVALID_DEVICE);
}

API int cuDeviceGetName(char *name, int size, int device) {
    snprintf(name, (size_t)size, "fake GPU %d (host memory)", device);
    return SUCCESS;
}

API int cuDeviceGetPCIBusId(char *text, int size, int device) {
    if (device < 0 || device >= devices) {
        return INVALID_DEVICE;
    }
    snprintf(text, (size_t)size, "0000:%02x:00.0", (unsigned)device);
    return SUCCESS;
}

API int cuDeviceGetByPCIBusId(int *device, const char *text) {
    ENTER(0);
    unsigned bus = 0;
    int whole = sscanf(text, "0000:%x:00.0", &bus) == 1 && (int)bus < devices;
    *device = (int)bus;
    return leave(whole ? SUCCESS : INVALID_DEVICE);
}

API int cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER(0);
    switch (attribute) {
    case ATTRIBUTE_RDMA:
        *value = 1;
        break;
    case ATTRIBUTE_FLUSH:
        *value = number("FAKE_CUDA_FLUSH", 1);
        break;
    case ATTRIBUTE_ORDERING:
        *value = number("FAKE_CUDA_ORDERING", 100);
        break;
    case ATTRIBUTE_DMA_BUF:
        *value = number("FAKE_CUDA_DMABUF", 1);
        break;
    default:
        return leave(INVALID_VALUE);
    }
    return leave(device >= 0 && device < devices ? SUCCESS : INVALID_DEVICE);
}

/* ---- Contexts ------------------------------------------------------------------------------------------------ */

API int cuDevicePrimaryCtxRetain(struct context **context, int device) {
    ENTER(0);
    if (device < 0 || device >= devices) {
        return leave(INVALID_DEVICE);
    }
    *context = &contexts[device];
    contexts[device].references++;
    return leave(SUCCESS);
}

static void range_end(struct range *range) {
    if (range->kind != RANGE_PINNED) {
        munmap((void *)(uintptr_t)range->begin, range->size); /* NOLINT */
        close(range->file);
    }
    range->kind = RANGE_FREE;
}

API int cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER(0);
    if (device < 0 || device >= devices || contexts[device].references == 0) {
        return leave(device < 0 || device >= devices ? INVALID_DEVICE : INVALID_CONTEXT);
    }
    struct context *context = &contexts[device];
    if (--context->references > 0) {
        return leave(SUCCESS);
    }
    context->resets++;
    for (size_t i = 0; i < RANGES_MAX; i++) {
        if (ranges[i].kind != RANGE_FREE && ranges[i].context == context) {
            range_end(&ranges[i]);
        }
    }
    return leave(SUCCESS);
}

API int cuCtxSetCurrent(struct context *context) {
    ENTER(0);
    if (context != NULL && context->references == 0) {
        return leave(CONTEXT_IS_DESTROYED);
    }
    current = context;
    return leave(SUCCESS);
}

/* ---- Memory -------------------------------------------------------------------------------------------------- */

static int map(int file, uint64_t size, enum range_kind kind, uint64_t *address) {
    void *data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (data == MAP_FAILED) {
        close(file);
        return MAP_FAILED_ERROR;
    }
    *address = (uint64_t)(uintptr_t)data;
    return range_new(kind, *address, size, file) != NULL ? SUCCESS : OUT_OF_MEMORY;
}

static int unmap(uint64_t address, enum range_kind kind) {
    struct range *range = range_of(address, 1, 0);
    if (range == NULL || range->kind != kind || range->begin != address) {
        return INVALID_VALUE;
    }
    range_end(range);
    return SUCCESS;
}

API int cuMemAlloc_v2(uint64_t *address, size_t size) {
    ENTER(1);
    uint64_t whole = (size + PAGE - 1) / PAGE * PAGE;
    int file = size > 0 ? memfd_create("fake GPU memory", MFD_CLOEXEC) : -1;
    if (size == 0 || file < 0) {
        return leave(size == 0 ? INVALID_VALUE : OUT_OF_MEMORY);
    }
    if (ftruncate(file, (off_t)whole) != 0) {
        close(file);
        return leave(OUT_OF_MEMORY);
    }
    return leave(map(file, whole, RANGE_GPU, address));
}

API int cuMemFree_v2(uint64_t address) {
    ENTER(1);
    return leave(unmap(address, RANGE_GPU));
}

API int cuMemHostRegister_v2(void *data, size_t size, unsigned flags) {
    ENTER(1);
    uint64_t begin = (uint64_t)(uintptr_t)data;
    for (size_t i = 0; i < RANGES_MAX; i++) {
        const struct range *range = &ranges[i];
        if (range->kind == RANGE_PINNED && begin < range->begin + range->size && range->begin < begin + size) {
            return leave(ALREADY_REGISTERED);
        }
    }
    (void)flags;
    return leave(range_new(RANGE_PINNED, begin, size, -1) != NULL ? SUCCESS : OUT_OF_MEMORY);
}

API int cuMemHostUnregister(void *data) {
    ENTER(1);
    struct range *range = range_of((uint64_t)(uintptr_t)data, 1, 1);
    if (range == NULL || range->begin != (uint64_t)(uintptr_t)data) {
        return leave(NOT_REGISTERED);
    }
    range->kind = RANGE_FREE;
    return leave(SUCCESS);
}

API int cuIpcGetMemHandle(struct handle *handle, uint64_t address) {
    ENTER(1);
    const struct range *range = range_of(address, 1, 0);
    if (range == NULL || range->kind != RANGE_GPU) {
        return leave(INVALID_VALUE);
    }
    *handle = (struct handle){
        .process = getpid(), .file = range->file, .size = range->size, .device = range->context->device};
    memcpy(handle->magic, MAGIC, sizeof MAGIC);
    return leave(SUCCESS);
}

API int cuIpcOpenMemHandle_v2(uint64_t *address, struct handle handle, unsigned flags) {
    ENTER(1);
    if (memcmp(handle.magic, MAGIC, sizeof MAGIC) != 0 || flags != IPC_LAZY_PEER_ACCESS) {
        return leave(INVALID_VALUE);
    }
    if (handle.process == getpid() || handle.device != current->device) {
        return leave(INVALID_CONTEXT);
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)handle.process, (long long)handle.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    return leave(file < 0 ? INVALID_HANDLE : map(file, handle.size, RANGE_OPENED, address));
}

API int cuIpcCloseMemHandle(uint64_t address) {
    ENTER(1);
    return leave(unmap(address, RANGE_OPENED));
}

API int cuMemGetHandleForAddressRange(void *handle, uint64_t address, size_t size, int type, unsigned long long flags) {
    ENTER(1);
    const struct range *range = range_of(address, size, 0);
    if (range == NULL || range->kind != RANGE_GPU || address % PAGE != 0 || size % PAGE != 0 || flags != 0) {
        return leave(INVALID_VALUE);
    }
    if (type != RANGE_DMA_BUF || !number("FAKE_CUDA_DMABUF", 1)) {
        return leave(NOT_SUPPORTED);
    }
    int file = fcntl(range->file, F_DUPFD_CLOEXEC, 0);
    *(int *)handle = file;
    return leave(file >= 0 ? SUCCESS : OUT_OF_MEMORY);
}

API int cuFlushGPUDirectRDMAWrites(int target, int scope) {
    ENTER(1);
    (void)scope;
    if (target != FLUSH_TARGET_CURRENT || (number("FAKE_CUDA_FLUSH", 1) & 1) == 0) {
        return leave(target != FLUSH_TARGET_CURRENT ? INVALID_VALUE : NOT_SUPPORTED);
    }
    flushes++;
    return leave(SUCCESS);
}

/* fake_cuda_flushes() is not CUDA's: how often cuFlushGPUDirectRDMAWrites() has worked in this process. */
API int fake_cuda_flushes(void) {
    return flushes;
}

/* ---- Streams and events -------------------------------------------------------------------------------------- */

API int cuStreamCreate(struct stream **stream, unsigned flags) {
    ENTER(1);
    (void)flags;
    for (size_t i = 0; i < STREAMS_MAX; i++) {
        if (streams[i] == NULL) {
            streams[i] = *stream = calloc(1, sizeof **stream);
            (*stream)->context = current;
            (*stream)->resets = current->resets;
            return leave(SUCCESS);
        }
    }
    return leave(OUT_OF_MEMORY);
}

API int cuStreamDestroy_v2(struct stream *stream) {
    ENTER(1);
    if (is_dead(stream->context, stream->resets)) {
        return leave(CONTEXT_IS_DESTROYED); /* and the memory stays, so that later calls find out */
    }
    stream_run(stream, stream->begun);
    for (size_t i = 0; i < STREAMS_MAX; i++) {
        streams[i] = streams[i] == stream ? NULL : streams[i];
    }
    free(stream);
    return leave(SUCCESS);
}

API int cuStreamSynchronize(struct stream *stream) {
    ENTER(1);
    if (is_dead(stream->context, stream->resets) || stream->context != current) {
        return leave(stream->context != current ? INVALID_CONTEXT : CONTEXT_IS_DESTROYED);
    }
    stream_run(stream, stream->begun);
    return leave(SUCCESS);
}

API int cuCtxSynchronize(void) {
    ENTER(1);
    for (size_t i = 0; i < STREAMS_MAX; i++) {
        if (streams[i] != NULL && streams[i]->context == current && !is_dead(current, streams[i]->resets)) {
            stream_run(streams[i], streams[i]->begun);
        }
    }
    return leave(SUCCESS);
}

static int copy(struct stream *stream, uint64_t gpu, void *host, size_t size, int to_gpu) {
    if (stream == NULL || stream->context != current || range_of(gpu, size, 0) == NULL) {
        return stream == NULL || stream->context != current ? INVALID_CONTEXT : INVALID_VALUE;
    }
    if (is_dead(stream->context, stream->resets)) {
        return CONTEXT_IS_DESTROYED;
    }
    void *there = (void *)(uintptr_t)gpu; /* NOLINT */
    int pinned = range_of((uint64_t)(uintptr_t)host, size, 1) != NULL;
    if (stream->begun - stream->done == COPIES_MAX) {
        stream_run(stream, stream->done + 1);
    }
    stream->copies[stream->begun++ % COPIES_MAX] =
        (struct copy){.target = to_gpu ? there : host, .source = to_gpu ? host : there, .size = size};
    if (!pinned) {
        stream_run(stream, stream->begun);
    }
    return SUCCESS;
}

API int cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t size, struct stream *stream) {
    ENTER(1);
    return leave(copy(stream, target, (void *)(uintptr_t)source, size, 1));
}

API int cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t size, struct stream *stream) {
    ENTER(1);
    return leave(copy(stream, source, target, size, 0));
}

API int cuEventCreate(struct event **event, unsigned flags) {
    ENTER(1);
    (void)flags;
    *event = calloc(1, sizeof **event);
    if (*event != NULL) {
        (*event)->context = current;
        (*event)->resets = current->resets;
    }
    return leave(*event != NULL ? SUCCESS : OUT_OF_MEMORY);
}

API int cuEventDestroy_v2(struct event *event) {
    free(event);
    return SUCCESS;
}

API int cuEventRecord(struct event *event, struct stream *stream) {
    ENTER(1);
    if (event->context != stream->context) {
        return leave(INVALID_HANDLE);
    }
    if (is_dead(event->context, event->resets) || is_dead(stream->context, stream->resets)) {
        return leave(CONTEXT_IS_DESTROYED);
    }
    event->stream = stream;
    event->position = stream->begun;
    return leave(SUCCESS);
}

/* Each second look finds the event ready, so that callers that look once are found out. */
API int cuEventQuery(struct event *event) {
    static unsigned looks;
    ENTER(0);
    if (is_dead(event->context, event->resets)) {
        return leave(CONTEXT_IS_DESTROYED);
    }
    if (event->stream != NULL && event->stream->done < event->position && ++looks % 2 != 0) {
        return leave(NOT_READY);
    }
    if (event->stream != NULL) {
        stream_run(event->stream, event->position);
    }
    return leave(SUCCESS);
}

API int cuEventSynchronize(struct event *event) {
    ENTER(1);
    if (is_dead(event->context, event->resets)) {
        return leave(CONTEXT_IS_DESTROYED);
    }
    if (event->stream != NULL) {
        stream_run(event->stream, event->position);
    }
    return leave(SUCCESS);
}
