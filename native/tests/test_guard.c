/* SPDX-License-Identifier: Apache-2.0 */
/* test_guard.c - mappings whose file is made shorter while threads read and write them */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "pipeline_support.h"

enum { THREADS = 4, ROUNDS = 25, MAPPINGS = 3, SIZE = 64 * 4096 };

struct mapping {
    uint8_t *bytes;
    struct ss_guard *guard;
};

static struct mapping mappings[MAPPINGS];
static atomic_uint stop;
static atomic_uint passes[THREADS];

static void *touch(void *argument) {
    uint32_t self = (uint32_t)(uintptr_t)argument;
    while (!atomic_load(&stop)) {
        for (uint32_t i = 0; i < MAPPINGS; i++) {
            /* Each thread has its own bytes, of every page. */
            for (uint32_t offset = self; offset < SIZE; offset += 4096) {
                mappings[i].bytes[offset] = (uint8_t)self;
                (void)*(volatile uint8_t *)&mappings[i].bytes[offset];
            }
        }
        atomic_fetch_add(&passes[self], 1);
    }
    return NULL;
}

static void wait_for_passes(void) {
    for (uint32_t i = 0; i < THREADS; i++) {
        unsigned before = atomic_load(&passes[i]);
        while (atomic_load(&passes[i]) < before + 2) {
            usleep(100);
        }
    }
}

static void one_round(uint32_t number) {
    int file = memfd_create("guarded", MFD_CLOEXEC);
    pthread_t threads[THREADS];
    CHECK(file >= 0 && ftruncate(file, SIZE) == 0);
    for (uint32_t i = 0; i < MAPPINGS; i++) {
        mappings[i].bytes = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        CHECK(mappings[i].bytes != MAP_FAILED);
        CHECK_EQUAL(ss_guard_open(mappings[i].bytes, SIZE, &mappings[i].guard), SS_OK);
        CHECK(!ss_guard_lost(mappings[i].guard));
    }
    atomic_store(&stop, 0);
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, touch, (void *)(uintptr_t)i) == 0);
    }
    wait_for_passes();
    CHECK(ftruncate(file, number % 2 == 0 ? 0 : SIZE / 2) == 0);
    wait_for_passes();
    atomic_store(&stop, 1);
    for (uint32_t i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    for (uint32_t i = 0; i < MAPPINGS; i++) {
        CHECK(ss_guard_lost(mappings[i].guard));
        ss_guard_close(mappings[i].guard);
        CHECK(munmap(mappings[i].bytes, SIZE) == 0);
    }
    close(file);
}

static void test_arguments(void) {
    struct ss_guard *guard = NULL;
    static uint8_t bytes[2 * 4096];
    CHECK_EQUAL(ss_guard_open(NULL, 4096, &guard), SS_BAD_ARGUMENT);
    CHECK_EQUAL(ss_guard_open(bytes + ((uintptr_t)bytes % 4096 == 0), 16, &guard), SS_BAD_ARGUMENT);
    CHECK_EQUAL(ss_guard_open((void *)4096, 0, &guard), SS_BAD_ARGUMENT);
    CHECK_EQUAL(ss_guard_open((void *)4096, UINT64_MAX, &guard), SS_BAD_ARGUMENT);
    CHECK_EQUAL(ss_guard_open((void *)4096, 4096, NULL), SS_BAD_ARGUMENT);
    ss_guard_close(NULL);
}

int main(void) {
    test_arguments();
    for (uint32_t number = 0; number < ROUNDS; number++) {
        one_round(number);
    }
    return 0;
}
