/* SPDX-License-Identifier: Apache-2.0 */
/*
 * guard.c - protection against SIGBUS in mappings of files that other processes may shrink
 *
 * An access to a page that its file no longer has, or that a full file system cannot allocate, raises SIGBUS, which by
 * default ends the process. The handler replaces the whole guarded mapping with anonymous memory, which reads as zeros,
 * and marks the mapping as lost. The instruction is then repeated, and the owner checks the mark before it reports a
 * result. The whole mapping is replaced, not a page, because a mapping that is lost in part is useless, and one fault
 * is then enough. Anonymous memory is allocated page by page on access, so it costs only the accessed pages.
 *
 * A handler installed after ours, such as Python's faulthandler, gets all faults. So each opened guard checks whether
 * our handler is still installed, and installs it in front again. Faults that are not ours go to the other handler,
 * which may pass them on to ours, the handler that it found. Such faults go to the handler that was first of all.
 *
 * A handler may not wait, so it reads the list without a lock: guards are added in front and reused, never freed. Each
 * opening and each closing increments a guard's version. The handler uses begin and end only if the version is odd and
 * the same before and after it reads them: else they may be those of two mappings. A guard that changes in between is
 * not the guard of the fault, since the owner of the faulting mapping still uses it.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "shadowserve.h"

struct ss_guard {
    _Atomic uint64_t version; /* odd: open; even: closed */
    _Atomic uintptr_t begin;
    _Atomic uintptr_t end;
    _Atomic uint32_t lost;
    struct ss_guard *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(struct ss_guard *) guards;
static struct sigaction first; /* the handler before ours, for other faults */
static struct sigaction last;  /* a handler that was installed after ours, which is now in front of it; else the same */
static int installed;
static _Thread_local volatile sig_atomic_t passing __attribute__((tls_model("initial-exec"))); /* to 'last' */

/* Returns whether the address is in a guarded mapping, and replaces that mapping with anonymous memory. */
static int replaced(uintptr_t address) {
    for (struct ss_guard *guard = atomic_load(&guards); guard != NULL; guard = guard->next) {
        uint64_t version = atomic_load(&guard->version);
        uintptr_t begin = atomic_load(&guard->begin);
        uintptr_t end = atomic_load(&guard->end);
        if (version % 2 == 0 || atomic_load(&guard->version) != version || address < begin || address >= end) {
            continue;
        }
        if (atomic_exchange(&guard->lost, 1)) {
            return 1; /* another thread replaces it, or has: repeat the instruction */
        }
        /* Not mmap(), which is not documented as async-signal-safe; the system call is safe. */
        long mapped = syscall(SYS_mmap, begin, end - begin, PROT_READ | PROT_WRITE,
                              MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0L);
        return mapped == (long)begin;
    }
    return 0;
}

static void pass_on(int number, siginfo_t *info, void *context) {
    /* Below 1 it was sent: by a handler that got a fault, restored the previous handler, and raised the signal again.
     */
    const struct sigaction *next = passing || info->si_code <= 0 ? &first : &last;
    if (next->sa_flags & SA_SIGINFO) {
        passing++;
        next->sa_sigaction(number, info, context);
        passing--;
    } else if (next->sa_handler != SIG_DFL && next->sa_handler != SIG_IGN) {
        passing++;
        next->sa_handler(number);
        passing--;
    } else {
        (void)sigaction(number, next, NULL);
        (void)raise(number); /* delivered when this handler returns */
    }
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
    int error = errno;
    /* Above 0 the kernel sent it, and the address is that of a fault. */
    if (info->si_code <= 0 || !replaced((uintptr_t)info->si_addr)) {
        pass_on(number, info, context);
    }
    errno = error;
}

static int is_ours(const struct sigaction *action) {
    return action->sa_flags & SA_SIGINFO && action->sa_sigaction == on_bus_error;
}

static enum ss_result install(void) {
    struct sigaction action = {.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
    struct sigaction found;
    action.sa_sigaction = on_bus_error;
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGBUS, NULL, &found) != 0) {
        return SS_OS_ERROR;
    }
    if (is_ours(&found)) {
        return SS_OK;
    }
    last = found;
    if (!installed) {
        first = found;
    }
    if (sigaction(SIGBUS, &action, NULL) != 0) {
        return SS_OS_ERROR;
    }
    installed = 1;
    return SS_OK;
}

static struct ss_guard *guard_take(void) {
    for (struct ss_guard *guard = atomic_load(&guards); guard != NULL; guard = guard->next) {
        if (atomic_load(&guard->version) % 2 == 0) {
            return guard;
        }
    }
    struct ss_guard *guard = calloc(1, sizeof *guard);
    if (guard != NULL) {
        guard->next = atomic_load(&guards);
        atomic_store(&guards, guard);
    }
    return guard;
}

enum ss_result ss_guard_open(void *address, uint64_t size, struct ss_guard **opened) {
    uintptr_t begin = (uintptr_t)address;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    if (opened == NULL || begin == 0 || begin % page != 0 || size == 0 || size > UINTPTR_MAX - begin - page) {
        return SS_BAD_ARGUMENT;
    }
    pthread_mutex_lock(&lock);
    enum ss_result result = install();
    struct ss_guard *guard = result == SS_OK ? guard_take() : NULL;
    if (guard != NULL) {
        atomic_store(&guard->lost, 0);
        atomic_store(&guard->end, begin + (size + page - 1) / page * page);
        atomic_store(&guard->begin, begin);
        atomic_fetch_add(&guard->version, 1);
        *opened = guard;
    } else if (result == SS_OK) {
        result = SS_NO_MEMORY;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int ss_guard_lost(const struct ss_guard *guard) {
    return atomic_load(&guard->lost) != 0;
}

void ss_guard_close(struct ss_guard *guard) {
    if (guard != NULL) {
        pthread_mutex_lock(&lock);
        atomic_fetch_add(&guard->version, 1);
        pthread_mutex_unlock(&lock);
    }
}
