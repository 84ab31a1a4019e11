/* SPDX-License-Identifier: Apache-2.0 */
/* clock.h - the clocks and the counters of the pipeline's threads */
#ifndef SS_CLOCK_H
#define SS_CLOCK_H

#include <stdatomic.h>
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

/* One thread's share of one stage's statistics, on its own cache line. */
struct ss_counters {
    _Alignas(64) _Atomic uint64_t items;
    _Atomic uint64_t input_bytes;
    _Atomic uint64_t output_bytes;
    _Atomic uint64_t busy_ns;
};

static inline void ss_counters_add(struct ss_counters *counters, uint64_t items, uint64_t input_bytes,
                                   uint64_t output_bytes, uint64_t busy_ns) {
    atomic_fetch_add_explicit(&counters->items, items, memory_order_relaxed);
    atomic_fetch_add_explicit(&counters->input_bytes, input_bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&counters->output_bytes, output_bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&counters->busy_ns, busy_ns, memory_order_relaxed);
}

#endif /* SS_CLOCK_H */
