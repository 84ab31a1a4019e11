/* SPDX-License-Identifier: Apache-2.0 */
/* test_guard.c - mappings whose file is made shorter while threads read and write them */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "check.h"
#include "shadowserve.h"

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

#ifdef __x86_64__
/*
 * One region of memory, in order: a page that is guarded at times, memory that is not guarded, a page of a file that is
 * made shorter again and again, and another page that is guarded at times. A handler that takes the begin of one guard
 * with the end of the next one, which uses the same entry of the list, finds the fault between the two and maps zeros
 * over all of it. So the guard is closed and opened elsewhere after each single instruction of the handler: another
 * handler, which comes first and calls it, sets the CPU's trap flag.
 */
enum { FAULTS = 20, LOW = 0, BYSTANDER = 4096, FAULTING = 2 * 4096, HIGH = 3 * 4096, REGION = 4 * 4096 };
enum { TRAP_FLAG = 0x100 };

static uint8_t *region;
static struct ss_guard *moved_guard;
static volatile sig_atomic_t moves;
static struct sigaction guarding;

static void move_guard(int number) {
    (void)number;
    moves++;
    ss_guard_close(moved_guard);
    CHECK_EQUAL(ss_guard_open(region + (moves % 2 ? HIGH : LOW), 4096, &moved_guard), SS_OK);
}

static void toggle_stepping(int number, siginfo_t *info, void *interrupted) {
    (void)number;
    (void)info;
    ((ucontext_t *)interrupted)->uc_mcontext.gregs[REG_EFL] ^= TRAP_FLAG;
}

static void step_through(int number, siginfo_t *info, void *interrupted) {
    (void)raise(SIGUSR1);
    guarding.sa_sigaction(number, info, interrupted);
    (void)raise(SIGUSR1);
}

static void test_a_guard_that_is_reopened_while_the_handler_reads_it_costs_no_other_memory(void) {
    struct sigaction toggle = {.sa_sigaction = toggle_stepping, .sa_flags = SA_SIGINFO};
    struct sigaction move = {.sa_handler = move_guard};
    struct sigaction step = {.sa_sigaction = step_through, .sa_flags = SA_SIGINFO};
    struct ss_guard *guard = NULL;
    int file = memfd_create("guarded", MFD_CLOEXEC);
    CHECK(file >= 0 && sigaction(SIGUSR1, &toggle, NULL) == 0 && sigaction(SIGTRAP, &move, NULL) == 0);
    region = mmap(NULL, REGION, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(region != MAP_FAILED);
    memset(region + BYSTANDER, 7, 4096);
    /* Guards that are opened later are looked at first. */
    CHECK_EQUAL(ss_guard_open(region + FAULTING, 4096, &guard), SS_OK);
    CHECK_EQUAL(ss_guard_open(region + LOW, 4096, &moved_guard), SS_OK);
    ss_guard_close(guard);
    CHECK(sigaction(SIGBUS, NULL, &guarding) == 0);
    for (uint32_t i = 0; i < FAULTS; i++) {
        CHECK(ftruncate(file, 4096) == 0);
        CHECK(mmap(region + FAULTING, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) ==
              region + FAULTING);
        CHECK_EQUAL(ss_guard_open(region + FAULTING, 4096, &guard), SS_OK);
        CHECK(ftruncate(file, 0) == 0);
        if (i % 2 != 0) {
            move_guard(0); /* so that it is elsewhere at each instruction than in the fault before */
        }
        CHECK(sigaction(SIGBUS, &step, NULL) == 0);
        *(volatile uint8_t *)(region + FAULTING) = 1;
        CHECK(ss_guard_lost(guard));
        ss_guard_close(guard);
        CHECK_EQUAL(*(volatile uint8_t *)(region + BYSTANDER + i), 7);
    }
    CHECK(moves > FAULTS);
    CHECK(sigaction(SIGBUS, &guarding, NULL) == 0);
    ss_guard_close(moved_guard);
    CHECK(munmap(region, REGION) == 0);
    close(file);
}
#endif

int main(void) {
    test_arguments();
#ifdef __x86_64__
    test_a_guard_that_is_reopened_while_the_handler_reads_it_costs_no_other_memory();
#endif
    for (uint32_t number = 0; number < ROUNDS; number++) {
        one_round(number);
    }
    return 0;
}
