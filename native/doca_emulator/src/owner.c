/* SPDX-License-Identifier: Apache-2.0 */
/*
 * owner.c - misuse, and the threads that objects belong to
 *
 * DOCA's objects take no locks: one thread owns a progress engine and all objects connected to it. DOCA's own programs
 * prepare such a set on the main thread and pass it to a worker, so an object has no owner until its first use. They
 * destroy it after they have joined the worker, so ownership ends with the thread.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "emulator.h"

/* A thread that owned something. Lives until it has ended and nothing points to it any more. */
struct thread {
    atomic_bool alive;
    atomic_uint references;
    long id;
};

static pthread_key_t thread_key;
static pthread_once_t thread_key_once = PTHREAD_ONCE_INIT;

void misuse(const char *call, const char *rule, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, rule);
    vsnprintf(text, sizeof text, rule, arguments);
    va_end(arguments);
    fprintf(stderr, "DOCA emulator: %s: %s\n", call, text);
    abort();
}

static void thread_release(struct thread *thread) {
    if (atomic_fetch_sub(&thread->references, 1) == 1) {
        free(thread);
    }
}

static void thread_end(void *argument) {
    struct thread *thread = argument;
    atomic_store(&thread->alive, false);
    thread_release(thread);
}

static void thread_key_make(void) {
    if (pthread_key_create(&thread_key, thread_end) != 0) {
        misuse("the emulator", "this process has no key of thread-specific data left");
    }
}

/* Returns this thread's struct, whose own reference thread_end() drops. */
static struct thread *thread_self(void) {
    pthread_once(&thread_key_once, thread_key_make);
    struct thread *thread = pthread_getspecific(thread_key);
    if (thread == NULL) {
        thread = malloc(sizeof *thread);
        if (thread == NULL) {
            misuse("the emulator", "out of memory");
        }
        atomic_init(&thread->alive, true);
        atomic_init(&thread->references, 1);
        thread->id = gettid();
        pthread_setspecific(thread_key, thread);
    }
    return thread;
}

static _Noreturn void owner_violated(const struct thread *thread, const char *call, const char *object) {
    misuse(call,
           "one thread owns a progress engine and its contexts, tasks, inventories and mmaps without thread safety; "
           "this %s belongs to thread %ld, which still runs, and thread %ld called",
           object, thread->id, (long)gettid());
}

void owner_check(const struct owner *owner, const char *call, const char *object) {
    struct thread *thread = atomic_load(&owner->thread);
    if (thread != NULL && thread != thread_self() && atomic_load(&thread->alive)) {
        owner_violated(thread, call, object);
    }
}

void owner_use(struct owner *owner, const char *call, const char *object) {
    struct thread *self = thread_self(), *before = atomic_load(&owner->thread);
    if (before == self) {
        return;
    }
    owner_check(owner, call, object);
    atomic_fetch_add(&self->references, 1);
    if (!atomic_compare_exchange_strong(&owner->thread, &before, self)) {
        owner_violated(before, call, object);
    }
    if (before != NULL) {
        thread_release(before);
    }
}

void owner_release(struct owner *owner) {
    struct thread *thread = atomic_exchange(&owner->thread, NULL);
    if (thread != NULL) {
        thread_release(thread);
    }
}
