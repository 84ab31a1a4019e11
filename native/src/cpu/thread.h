/* SPDX-License-Identifier: Apache-2.0 */
/* thread.h - the threads of pipelines and of block devices */
#ifndef SS_THREAD_H
#define SS_THREAD_H

#include <pthread.h>
#include <stdint.h>

#include "shadowserve.h"

/*
 * ss_thread_start() runs entry(argument) in a new thread, on one core (-1: any). 'name' has at most 15 bytes. The
 * caller joins the thread, unless 'thread' is NULL: a detached thread must not end before this call. SS_OS_ERROR.
 */
enum ss_result ss_thread_start(pthread_t *thread, int32_t core, const char *name, void *(*entry)(void *),
                               void *argument);

#endif /* SS_THREAD_H */
