/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cuda.c - copies between a buffer and a GPU's memory of another process
 *
 * Runs over the fake driver of fake_cuda.c, and over NVIDIA's where there is a GPU (scripts/gpu-check). The other
 * process is this program again: CUDA works in no child of a process that has used it. It allocates, writes its IPC
 * handle and its GPU's address, and compares what it finds in its memory at the end.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/wait.h>

#include "backends/cuda.h"
#include "check.h"

enum { WORK_BYTES = 65536, WORKS = 20, BYTES = WORKS * WORK_BYTES, HANDLE_BYTES = 64, ADDRESS_BYTES = 32, THREADS = 3 };

/* Message of an exporter. */
struct exported {
    uint8_t handle[HANDLE_BYTES];
    char gpu[ADDRESS_BYTES]; /* its PCI address */
};

struct exporter {
    pid_t process;
    int to; /* a byte: compare the memory, and exit */
    struct exported exported;
};

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    CHECK(found != NULL);
    return found;
}

/* Calls a function of the driver, and returns its result. */
#define RESULT(library, name, types, ...) (((int(*) types)(uintptr_t)symbol(library, name))(__VA_ARGS__))
#define CALL(library, name, types, ...) CHECK_EQUAL(RESULT(library, name, types, __VA_ARGS__), 0)

static uint8_t byte_at(size_t index) {
    return (uint8_t)(index * 31 + index / WORK_BYTES * 7 + 1);
}

static int export_and_wait(int ordinal) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(library != NULL);
    void *context = NULL;
    uint64_t address = 0;
    struct exported exported = {0};
    char go;
    CALL(library, "cuInit", (unsigned), 0);
    CALL(library, "cuDevicePrimaryCtxRetain", (void **, int), &context, ordinal);
    CALL(library, "cuCtxSetCurrent", (void *), context);
    CALL(library, "cuMemAlloc_v2", (uint64_t *, size_t), &address, BYTES);
    CALL(library, "cuIpcGetMemHandle", (void *, uint64_t), exported.handle, address);
    CALL(library, "cuDeviceGetPCIBusId", (char *, int, int), exported.gpu, ADDRESS_BYTES, ordinal);
    CHECK(write(STDOUT_FILENO, &exported, sizeof exported) == sizeof exported);
    CHECK(read(STDIN_FILENO, &go, 1) == 1);
    uint8_t *found = calloc(1, BYTES);
    void *stream = NULL;
    CHECK(found != NULL);
    CALL(library, "cuStreamCreate", (void **, unsigned), &stream, 1);
    CALL(library, "cuMemcpyDtoHAsync_v2", (void *, uint64_t, size_t, void *), found, address, BYTES, stream);
    CALL(library, "cuStreamSynchronize", (void *), stream);
    for (size_t i = 0; i < BYTES; i++) {
        CHECK_EQUAL(found[i], byte_at(i));
    }
    free(found);
    return 0;
}

static struct exporter exporter_start(int ordinal) {
    struct exporter exporter = {0};
    int down[2];
    int up[2];
    char number[16];
    snprintf(number, sizeof number, "%d", ordinal);
    CHECK(pipe2(down, O_CLOEXEC) == 0 && pipe2(up, O_CLOEXEC) == 0);
    exporter.process = fork();
    CHECK(exporter.process >= 0);
    if (exporter.process == 0) {
        CHECK(dup2(down[0], STDIN_FILENO) >= 0 && dup2(up[1], STDOUT_FILENO) >= 0);
        close(down[1]);
        close(up[0]);
        execl("/proc/self/exe", "exporter", number, (char *)NULL);
        _exit(127);
    }
    close(down[0]);
    close(up[1]);
    exporter.to = down[1];
    CHECK(read(up[0], &exporter.exported, sizeof exporter.exported) == sizeof exporter.exported);
    close(up[0]);
    return exporter;
}

static void exporter_end(const struct exporter *exporter) {
    int status = 0;
    CHECK(write(exporter->to, "", 1) == 1);
    CHECK(waitpid(exporter->process, &status, 0) == exporter->process);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(exporter->to);
}

static struct ss_memory described(const struct exporter *exporter) {
    return (struct ss_memory){.kind = SS_MEMORY_CUDA_IPC,
                              .size = BYTES,
                              .descriptor = exporter->exported.handle,
                              .descriptor_size = HANDLE_BYTES,
                              .device = exporter->exported.gpu};
}

static struct ss_cuda_memory *opened(const struct exporter *exporter, uint8_t **gpu) {
    struct ss_memory memory_described = described(exporter);
    struct ss_cuda_memory *memory = NULL;
    CHECK_EQUAL(ss_cuda_memory_open(&memory_described, &memory, gpu), SS_OK);
    return memory;
}

static uint8_t *buffer_new(void) {
    uint8_t *buffer = malloc(BYTES);
    CHECK(buffer != NULL);
    for (size_t i = 0; i < BYTES; i++) {
        buffer[i] = byte_at(i);
    }
    return buffer;
}

static struct ss_cuda_channel *channel_new(uint8_t *buffer) {
    struct ss_cuda_channel *channel = ss_cuda_channel_new((struct ss_backend_range){.data = buffer, .size = BYTES});
    CHECK(channel != NULL);
    return channel;
}

static void test_what_is_no_memory(const struct exporter *exporter) {
    struct ss_cuda_memory *memory = NULL;
    uint8_t *address = NULL;
    uint8_t garbage[HANDLE_BYTES] = {1};
    struct ss_memory wrong = described(exporter);
    wrong.device = "0000:7f:00.0";
    CHECK(ss_cuda_memory_open(&wrong, &memory, &address) == SS_BAD_ARGUMENT);
    wrong = described(exporter);
    wrong.descriptor_size = HANDLE_BYTES - 1;
    CHECK(ss_cuda_memory_open(&wrong, &memory, &address) == SS_BAD_ARGUMENT);
    wrong = described(exporter);
    wrong.descriptor = garbage;
    CHECK(ss_cuda_memory_open(&wrong, &memory, &address) == SS_BAD_ARGUMENT);
    CHECK(memory == NULL);
}

static _Thread_local uint32_t completed;

static void on_complete(struct ss_work *work) {
    CHECK(work->result == SS_OK);
    CHECK((uint32_t)(uintptr_t)work->user == completed); /* in the order of their starts */
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
        CHECK(ss_cuda_copy(channel, memory, &works[i], to_gpu) == SS_OK);
    }
    while (completed < WORKS) {
        ss_cuda_progress(channel);
    }
    CHECK(ss_cuda_progress(channel) == 0);
}

static void test_copies(const struct exporter *exporter) {
    uint8_t *gpu = NULL;
    struct ss_cuda_memory *memory = opened(exporter, &gpu);
    uint8_t *buffer = buffer_new();
    struct ss_cuda_channel *first = channel_new(buffer);
    struct ss_cuda_channel *second = channel_new(buffer); /* shares the buffer */
    copy_all(first, memory, buffer, gpu, 1);
    memset(buffer, 0, BYTES);
    copy_all(second, memory, buffer, gpu, 0);
    for (size_t i = 0; i < BYTES; i++) {
        CHECK(buffer[i] == byte_at(i));
    }
    struct ss_work outside = {.source = buffer, .target = gpu, .source_size = BYTES + (64U << 20)};
    CHECK(ss_cuda_copy(first, memory, &outside, 1) == SS_DEVICE); /* starts nothing */
    CHECK(ss_cuda_progress(first) == 0);
    ss_cuda_channel_free(first);
    ss_cuda_channel_free(second);
    ss_cuda_channel_free(NULL);
    ss_cuda_memory_close(memory);
    free(buffer);
}

static void *serve_engines(void *argument) {
    int ordinals = *(const int *)argument;
    uint8_t *buffer = buffer_new();
    struct ss_cuda_channel *channel = channel_new(buffer);
    for (int engine = 0; engine < 4; engine++) {
        struct exporter exporter = exporter_start(engine % ordinals);
        uint8_t *gpu = NULL;
        struct ss_cuda_memory *memory = opened(&exporter, &gpu);
        copy_all(channel, memory, buffer, gpu, 1);
        ss_cuda_memory_close(memory);
        exporter_end(&exporter);
    }
    ss_cuda_channel_free(channel);
    free(buffer);
    return NULL;
}

/*
 * A channel outlives the memory that it copied to: an idle engine's registration ends, and another engine registers.
 * Between the two no memory holds the GPU's primary context. It must not be reset under the channel's stream.
 */
static void test_a_channel_goes_on_after_the_last_memory_was_closed(void) {
    int ordinals = 1;
    serve_engines(&ordinals);
}

/* Threads whose memories come and go at any time, on each GPU in turn where there are two. */
static void test_threads_and_contexts(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    pthread_t threads[THREADS];
    int ordinals = 0;
    CHECK(library != NULL);
    CALL(library, "cuDeviceGetCount", (int *), &ordinals);
    ordinals = ordinals > 2 ? 2 : ordinals;
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, serve_engines, &ordinals) == 0);
    }
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    printf("%d threads, %d GPUs\n", THREADS, ordinals);
}

int main(int count, char **arguments) {
    if (count > 1) {
        return export_and_wait(atoi(arguments[1]));
    }
    CHECK(ss_cuda_present());
    struct exporter exporter = exporter_start(0);
    test_what_is_no_memory(&exporter);
    test_copies(&exporter);
    exporter_end(&exporter);
    struct ss_memory gone = described(&exporter);
    struct ss_cuda_memory *memory = NULL;
    uint8_t *address = NULL;
    CHECK(ss_cuda_memory_open(&gone, &memory, &address) == SS_BAD_ARGUMENT);
    test_a_channel_goes_on_after_the_last_memory_was_closed();
    test_threads_and_contexts();
    return 0;
}
