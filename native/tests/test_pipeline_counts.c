/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pipeline_counts.c - a batch never allocates, maps, locks, or frees memory, on any thread
 *
 * This program's own malloc(), mmap() and so on are the ones that the core and its libraries call, and they count. The
 * server is another process, so that everything that is counted is the pipeline's. Sanitizers bring allocators of their
 * own; there the same is counted through their hooks, but for mmap() and mlock().
 */
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pipeline_support.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#endif

enum { ROUNDS = 3 };

static _Atomic uint64_t allocations; /* and frees */
static _Atomic uint64_t mappings;    /* and unmappings, and locks */

#ifdef SANITIZED
int __sanitizer_install_malloc_and_free_hooks(void (*allocated)(const volatile void *, size_t),
                                              void (*freed)(const volatile void *));

static void count_malloc(const volatile void *memory, size_t size) {
    (void)memory;
    (void)size;
    atomic_fetch_add(&allocations, 1);
}

static void count_free(const volatile void *memory) {
    (void)memory;
    atomic_fetch_add(&allocations, 1);
}

static void count_from_here_on(void) {
    CHECK(__sanitizer_install_malloc_and_free_hooks(count_malloc, count_free) > 0);
}
#else
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *memory);

void *malloc(size_t size) {
    atomic_fetch_add(&allocations, 1);
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
    atomic_fetch_add(&allocations, 1);
    return __libc_calloc(count, size);
}

void *realloc(void *memory, size_t size) {
    atomic_fetch_add(&allocations, 1);
    return __libc_realloc(memory, size);
}

void *memalign(size_t alignment, size_t size);
void *memalign(size_t alignment, size_t size) {
    atomic_fetch_add(&allocations, 1);
    return __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size) {
    return memalign(alignment, size);
}

int posix_memalign(void **memory, size_t alignment, size_t size) {
    *memory = memalign(alignment, size);
    return *memory != NULL ? 0 : ENOMEM;
}

void free(void *memory) {
    atomic_fetch_add(&allocations, 1);
    __libc_free(memory);
}

void *mmap(void *address, size_t size, int protection, int flags, int file, off_t offset) {
    atomic_fetch_add(&mappings, 1);
    long mapped = syscall(SYS_mmap, address, size, protection, flags, file, offset);
    return mapped == -1 ? MAP_FAILED : (void *)mapped;
}

int munmap(void *address, size_t size) {
    atomic_fetch_add(&mappings, 1);
    return (int)syscall(SYS_munmap, address, size);
}

int mlock(const void *address, size_t size) {
    atomic_fetch_add(&mappings, 1);
    return (int)syscall(SYS_mlock, address, size);
}

int madvise(void *address, size_t size, int advice) {
    atomic_fetch_add(&mappings, 1);
    return (int)syscall(SYS_madvise, address, size, advice);
}

static void count_from_here_on(void) {
}
#endif

/* Serves the fixture from a process of its own. */
static pid_t start_server(const struct fixture *fixture, uint16_t *port) {
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* also where a check fails */
        struct server *server = server_start();
        fixture_serve(fixture, server);
        uint16_t own = server_port(server);
        CHECK(write(pipes[1], &own, sizeof own) == sizeof own);
        for (;;) {
            pause();
        }
    }
    CHECK(read(pipes[0], port, sizeof *port) == sizeof *port);
    close(pipes[0]);
    close(pipes[1]);
    return pid;
}

struct counts {
    uint64_t allocations;
    uint64_t mappings;
};

/* Runs the very first batches of a new pipeline, the third of them traced; returns what all of them did together. */
static struct counts count_rounds(const struct fixture *fixture, uint16_t port, int fused) {
    struct ss_pipeline_options options = pipeline_options(fixture, fused);
    options.trace_events = 1024;
    struct ss_pipeline *pipeline;
    CHECK_EQUAL(ss_pipeline_create(&options, &pipeline), SS_OK);
    int32_t sockets[SOCKETS];
    for (int i = 0; i < SOCKETS; i++) {
        sockets[i] = server_connect_port(port);
    }
    struct counts counts = {0};
    for (int i = 0; i < ROUNDS; i++) {
        struct ss_batch *batch = fixture_round(fixture);
        if (i + 1 == ROUNDS) {
            CHECK_EQUAL(ss_pipeline_trace_start(pipeline), SS_OK);
        }
        uint64_t allocated = atomic_load(&allocations);
        uint64_t mapped = atomic_load(&mappings);
        CHECK_EQUAL(ss_pipeline_fetch(pipeline, batch, sockets, SOCKETS), SS_OK);
        counts.allocations += atomic_load(&allocations) - allocated;
        counts.mappings += atomic_load(&mappings) - mapped;
        for (uint32_t chunk = 0; chunk < batch->piece_count; chunk++) {
            CHECK(fixture_matches(fixture, batch, chunk));
        }
        batch_free(batch);
    }
    for (int i = 0; i < SOCKETS; i++) {
        close(sockets[i]);
    }
    ss_pipeline_destroy(pipeline);
    return counts;
}

static void test_a_batch_allocates_nothing(const struct shape *shape) {
    struct fixture *fixture = fixture_make(shape);
    uint16_t port;
    pid_t pid = start_server(fixture, &port);
    for (int fused = 0; fused <= backend_fuses(); fused++) {
        struct counts counts = count_rounds(fixture, port, fused);
        CHECK_EQUAL(counts.allocations, 0);
        CHECK_EQUAL(counts.mappings, 0);
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    fixture_free(fixture);
}

static void test_the_counters_count(void) {
    uint64_t before = atomic_load(&allocations);
    void *volatile memory = malloc(1);
    free(memory);
    CHECK_EQUAL(atomic_load(&allocations) - before, 2);
}

int main(void) {
    count_from_here_on();
    test_the_counters_count();
    FOR_EACH_CODEC (codec) {
        struct shape shape = default_shape();
        shape.codec = codec;
        test_a_batch_allocates_nothing(&shape);
    }
    return 0;
}
