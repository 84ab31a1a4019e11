/* SPDX-License-Identifier: Apache-2.0 */
#include "cpu/thread.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>

/*
 * All signals are blocked: the host program handles them, on its own threads. But not SIGBUS, which a thread's own
 * access to guarded memory raises (memory/guard.c).
 */
enum ss_result ss_thread_start(pthread_t *thread, int32_t core, const char *name, void *(*entry)(void *),
                               void *argument) {
    pthread_attr_t attributes;
    pthread_t detached;
    pthread_t *started = thread != NULL ? thread : &detached;
    sigset_t blocked, before;
    sigfillset(&blocked);
    sigdelset(&blocked, SIGBUS);
    int error = pthread_attr_init(&attributes);
    if (error == 0 && thread == NULL) {
        error = pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    }
    if (error == 0 && core >= 0) {
        cpu_set_t cores;
        CPU_ZERO(&cores);
        CPU_SET((size_t)core, &cores);
        error = pthread_attr_setaffinity_np(&attributes, sizeof cores, &cores);
    }
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    if (error == 0) {
        error = pthread_create(started, &attributes, entry, argument);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error == 0) {
        (void)pthread_setname_np(*started, name);
    }
    (void)pthread_attr_destroy(&attributes);
    errno = error;
    return error == 0 ? SS_OK : SS_OS_ERROR;
}
