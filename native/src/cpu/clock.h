/* SPDX-License-Identifier: Apache-2.0 */
/* clock.h - clocks in nanoseconds */
#ifndef SS_CLOCK_H
#define SS_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline uint64_t ss_clock_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000ULL + (uint64_t)now.tv_nsec;
}

static inline uint64_t ss_now_ns(void) {
    return ss_clock_ns(CLOCK_MONOTONIC);
}

/* ss_thread_ns() returns the CPU time of the calling thread. */
static inline uint64_t ss_thread_ns(void) {
    return ss_clock_ns(CLOCK_THREAD_CPUTIME_ID);
}

/* ss_timespec() converts a time or a duration, of at most 68 years. */
static inline struct timespec ss_timespec(uint64_t time_ns) {
    uint64_t seconds = time_ns / 1000000000ULL;
    return (struct timespec){.tv_sec = seconds > INT32_MAX ? INT32_MAX : (time_t)seconds,
                             .tv_nsec = (long)(time_ns % 1000000000ULL)};
}

#endif /* SS_CLOCK_H */
