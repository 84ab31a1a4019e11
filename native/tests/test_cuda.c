/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cuda.c - copies between a buffer and a GPU's memory of another process, over the fake driver of fake_cuda.c
 *
 * The other process is a child that allocates, hands over its IPC handle, and says in the end what it finds there.
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backends/cuda.h"
#include "check.h"

enum { WORK_BYTES = 65536, WORKS = 20, HANDLE_BYTES = 64 };
#define GPU_ADDRESS "0000:00:00.0"
#define HOLDS(condition) CHECK(condition, "errno is %d", errno)

struct exporter {
    pid_t process;
    int to;   /* a byte: look at the memory, and go */
    int from; /* the handle */
    uint8_t handle[HANDLE_BYTES];
};

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    HOLDS(found != NULL);
    return found;
}

/* Calls a function of the driver. */
#define CALL(library, name, types, ...) HOLDS(((int(*) types)(uintptr_t)symbol(library, name))(__VA_ARGS__) == 0)

static uint8_t byte_at(size_t index) {
    return (uint8_t)(index * 31 + index / WORK_BYTES * 7 + 1);
}

static void export_and_wait(int from, int to) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    HOLDS(library != NULL);
    void *context = NULL;
    uint64_t address = 0;
    uint8_t handle[HANDLE_BYTES];
    char go;
    CALL(library, "cuInit", (unsigned), 0);
    CALL(library, "cuDevicePrimaryCtxRetain", (void **, int), &context, 0);
    CALL(library, "cuCtxSetCurrent", (void *), context);
    CALL(library, "cuMemAlloc_v2", (uint64_t *, size_t), &address, WORKS * WORK_BYTES);
    CALL(library, "cuIpcGetMemHandle", (void *, uint64_t), handle, address);
    HOLDS(write(to, handle, sizeof handle) == sizeof handle);
    HOLDS(read(from, &go, 1) == 1);
    const uint8_t *memory = (const uint8_t *)(uintptr_t)address; /* as only the fake allows */
    for (size_t i = 0; i < WORKS * WORK_BYTES; i++) {
        HOLDS(memory[i] == byte_at(i));
    }
    exit(0);
}

static struct exporter exporter_start(void) {
    struct exporter exporter = {0};
    int down[2];
    int up[2];
    HOLDS(pipe(down) == 0 && pipe(up) == 0);
    exporter.process = fork();
    HOLDS(exporter.process >= 0);
    if (exporter.process == 0) {
        close(down[1]);
        close(up[0]);
        export_and_wait(down[0], up[1]);
    }
    close(down[0]);
    close(up[1]);
    exporter.to = down[1];
    exporter.from = up[0];
    HOLDS(read(exporter.from, exporter.handle, HANDLE_BYTES) == HANDLE_BYTES);
    return exporter;
}

static void exporter_end(const struct exporter *exporter) {
    int status = 0;
    HOLDS(write(exporter->to, "", 1) == 1);
    HOLDS(waitpid(exporter->process, &status, 0) == exporter->process);
    HOLDS(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(exporter->to);
    close(exporter->from);
}

static struct ss_memory described(const struct exporter *exporter) {
    return (struct ss_memory){.kind = SS_MEMORY_CUDA_IPC,
                              .size = WORKS * WORK_BYTES,
                              .descriptor = exporter->handle,
                              .descriptor_size = HANDLE_BYTES,
                              .device = GPU_ADDRESS};
}

static void test_what_is_no_memory(const struct exporter *exporter) {
    struct ss_cuda_memory *memory = NULL;
    uint8_t *address = NULL;
    uint8_t garbage[HANDLE_BYTES] = {1};
    struct ss_memory wrong = described(exporter);
    wrong.device = "0000:7f:00.0";
    HOLDS(ss_cuda_memory_open(&wrong, &memory, &address) == SS_BAD_ARGUMENT);
    wrong = described(exporter);
    wrong.descriptor_size = HANDLE_BYTES - 1;
    HOLDS(ss_cuda_memory_open(&wrong, &memory, &address) == SS_BAD_ARGUMENT);
    wrong = described(exporter);
    wrong.descriptor = garbage;
    HOLDS(ss_cuda_memory_open(&wrong, &memory, &address) == SS_BAD_ARGUMENT);
    HOLDS(memory == NULL);
}

static uint32_t completed;

static void on_complete(struct ss_work *work) {
    HOLDS(work->result == SS_OK);
    HOLDS((uint32_t)(uintptr_t)work->user == completed); /* in the order of their starts */
    completed++;
}

/* Copies all of 'buffer' to 'gpu', or back. */
static void copy_all(struct ss_cuda_channel *channel, struct ss_cuda_memory *memory, uint8_t *buffer, uint8_t *gpu,
                     int to_gpu) {
    struct ss_work works[WORKS] = {0};
    completed = 0;
    for (uint32_t i = 0; i < WORKS; i++) {
        uint8_t *here = buffer + (size_t)i * WORK_BYTES;
        uint8_t *there = gpu + (size_t)i * WORK_BYTES;
        works[i] = (struct ss_work){.source = to_gpu ? here : there,
                                    .target = to_gpu ? there : here,
                                    .source_size = WORK_BYTES,
                                    .target_size = WORK_BYTES,
                                    .complete = on_complete,
                                    .user = (void *)(uintptr_t)i};
        HOLDS(ss_cuda_copy(channel, memory, &works[i], to_gpu) == SS_OK);
        HOLDS(i > 0 || completed == 0); /* page-locked memory is read later */
    }
    while (completed < WORKS) {
        ss_cuda_progress(channel);
    }
    HOLDS(ss_cuda_progress(channel) == 0);
}

static void test_copies(const struct exporter *exporter) {
    struct ss_memory memory_described = described(exporter);
    struct ss_cuda_memory *memory = NULL;
    uint8_t *gpu = NULL;
    HOLDS(ss_cuda_memory_open(&memory_described, &memory, &gpu) == SS_OK);
    uint8_t *buffer = malloc((size_t)WORKS * WORK_BYTES);
    HOLDS(buffer != NULL);
    for (size_t i = 0; i < WORKS * WORK_BYTES; i++) {
        buffer[i] = byte_at(i);
    }
    const struct ss_backend_range range = {.data = buffer, .size = WORKS * WORK_BYTES};
    struct ss_cuda_channel *first = ss_cuda_channel_new(range);
    struct ss_cuda_channel *second = ss_cuda_channel_new(range); /* shares the buffer */
    HOLDS(first != NULL && second != NULL);
    copy_all(first, memory, buffer, gpu, 1);
    memset(buffer, 0, (size_t)WORKS * WORK_BYTES);
    copy_all(second, memory, buffer, gpu, 0);
    for (size_t i = 0; i < WORKS * WORK_BYTES; i++) {
        HOLDS(buffer[i] == byte_at(i));
    }
    struct ss_work outside = {.source = buffer, .target = gpu, .source_size = WORKS * WORK_BYTES + 4096};
    HOLDS(ss_cuda_copy(first, memory, &outside, 1) == SS_DEVICE); /* starts nothing */
    HOLDS(ss_cuda_progress(first) == 0);
    ss_cuda_channel_free(first);
    ss_cuda_channel_free(second);
    ss_cuda_channel_free(NULL);
    ss_cuda_memory_close(memory);
    free(buffer);
}

/*
 * A channel outlives the memory that it copied to: an idle engine's registration ends, and another engine registers.
 * Between the two no memory holds the GPU's primary context. It must not be reset under the channel's stream.
 */
static void test_a_channel_goes_on_after_the_last_memory_was_closed(void) {
    uint8_t *buffer = malloc((size_t)WORKS * WORK_BYTES);
    HOLDS(buffer != NULL);
    for (size_t i = 0; i < WORKS * WORK_BYTES; i++) {
        buffer[i] = byte_at(i);
    }
    struct ss_cuda_channel *channel =
        ss_cuda_channel_new((struct ss_backend_range){.data = buffer, .size = WORKS * WORK_BYTES});
    HOLDS(channel != NULL);
    for (uint32_t engine = 0; engine < 3; engine++) {
        struct exporter exporter = exporter_start();
        struct ss_memory memory_described = described(&exporter);
        struct ss_cuda_memory *memory = NULL;
        uint8_t *gpu = NULL;
        HOLDS(ss_cuda_memory_open(&memory_described, &memory, &gpu) == SS_OK);
        copy_all(channel, memory, buffer, gpu, 1); /* asynchronously, so the buffer is still page-locked, too */
        ss_cuda_memory_close(memory);
        exporter_end(&exporter);
    }
    ss_cuda_channel_free(channel);
    free(buffer);
}

int main(void) {
    HOLDS(ss_cuda_present());
    test_a_channel_goes_on_after_the_last_memory_was_closed();
    struct exporter exporter = exporter_start();
    test_what_is_no_memory(&exporter);
    test_copies(&exporter);
    exporter_end(&exporter);
    struct ss_memory gone = described(&exporter);
    struct ss_cuda_memory *memory = NULL;
    uint8_t *address = NULL;
    HOLDS(ss_cuda_memory_open(&gone, &memory, &address) == SS_BAD_ARGUMENT);
    return 0;
}
