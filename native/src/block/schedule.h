/* SPDX-License-Identifier: Apache-2.0 */
/*
 * schedule.h - selects the next of the waiting operations for a device; schedule.c has the rules
 *
 * No threads, no clock and no system calls: all calls of one schedule are made under one lock, with the time as an
 * argument.
 */
#ifndef SS_BLOCK_SCHEDULE_H
#define SS_BLOCK_SCHEDULE_H

#include "shadowserve_block.h"

#include <sys/uio.h>

#define SS_PRIORITIES 3u

/* Larger operations are split; also into requests that the device takes, if it takes less. */
#define SS_REQUEST_BYTES_MAX (1u << 20)

/* Most bytes of a part of a read into pages, and most memory ranges of its target, which IOV_MAX bounds. */
#define SS_PART_BYTES_MAX (2u << 20)
#define SS_VECTORS_MAX (SS_PART_BYTES_MAX / 4096)

/* An operation, from submission until its completion was taken. */
struct ss_entry {
    struct ss_block_operation operation;
    uint64_t submitted_ns;
    uint64_t begin_ns;
    uint64_t end_ns;
    uint64_t started;   /* bytes already in requests */
    uint32_t unchecked; /* of a read into pages: completed parts that are not checked */
    uint32_t in_flight; /* requests */
    int32_t error;
    enum ss_result verdict;
    int is_queued; /* in a queue: not all bytes are in requests */
    struct ss_entry *next;
};

/* A request to the device: an operation, or a part of one. */
struct ss_request {
    struct ss_entry *entry; /* NULL: free */
    enum ss_block_kind kind;
    uint64_t offset;
    uint64_t length;
    uint64_t cost; /* bytes that it counts for */
    uint64_t done; /* bytes, after a short read or write */
    uint8_t *memory;
    struct iovec *vectors; /* of a read into pages: its targets, set by ss_request_vectors() */
    uint64_t first;        /* bytes of the operation before it */
    uint64_t begin_ns;
    uint32_t tries;
    int is_fixed; /* for the driver: it uses registered memory */
    struct ss_request *next;
};

struct ss_entry_queue {
    struct ss_entry *head, *tail;
    uint32_t count;
};

struct ss_schedule {
    struct ss_entry *entries;
    struct ss_entry *free_entries;
    uint32_t free_count;
    struct ss_entry_queue waiting[SS_PRIORITIES];
    struct ss_entry_queue unchecked[SS_PRIORITIES]; /* done, but for the check */
    struct ss_request *unchecked_parts;             /* last requests of completed parts */
    struct ss_entry_queue completed;
    struct ss_request *requests;
    struct ss_request *free_requests;
    struct iovec *vectors; /* SS_VECTORS_MAX for each request */
    uint32_t requests_max;
    uint32_t yielding_max; /* requests of lower priorities in flight at a time */
    uint64_t request_bytes_max;
    uint64_t wait_ns[SS_PRIORITIES];         /* after which a lower priority has a turn */
    uint64_t bytes_max[SS_PRIORITIES];       /* in flight, and in a turn */
    uint64_t bytes_in_flight[SS_PRIORITIES]; /* of lower priorities */
    uint32_t in_flight[SS_PRIORITIES];       /* requests */
    uint64_t turn_bytes[SS_PRIORITIES];      /* left of its turn */
    uint64_t last_ns[SS_PRIORITIES];         /* when one was last started */
    uint64_t busy_since_ns;
    int is_strict;
    int is_stopped;
    struct ss_block_statistics statistics;
};

/* 'options' are complete: no number is 0. SS_NO_MEMORY. */
enum ss_result ss_schedule_init(struct ss_schedule *schedule, const struct ss_block_options *options);
void ss_schedule_free(struct ss_schedule *schedule);

/* Queues all, which are valid, or returns SS_NO_SPACE, or SS_CANCELLED. */
enum ss_result ss_schedule_submit(struct ss_schedule *schedule, const struct ss_block_operation *operations,
                                  size_t count, uint64_t now_ns);

/* Returns the next request for the device; NULL: none, until an operation is submitted or a request is done. */
struct ss_request *ss_schedule_next(struct ss_schedule *schedule, uint64_t now_ns);

/* A request ended; the operation is completed with the last one of its requests. */
void ss_schedule_done(struct ss_schedule *schedule, struct ss_request *request, int32_t error, uint64_t now_ns);

/* Bytes that an operation moves. */
uint64_t ss_operation_bytes(const struct ss_block_operation *operation);

/* Fills in the targets of the rest of a request, for a read into pages; returns the number of vectors. */
uint32_t ss_request_vectors(const struct ss_request *request);

/* Returns a completed read to check, the most urgent first; NULL: none. */
struct ss_entry *ss_schedule_unchecked(struct ss_schedule *schedule);

/* Returns whether there is a read to check. */
int ss_schedule_has_unchecked(const struct ss_schedule *schedule);

/* Returns the last request of a completed part to check; NULL: none. */
struct ss_request *ss_schedule_unchecked_part(struct ss_schedule *schedule);

/* It was checked; its operation is completed with the last part. */
void ss_schedule_part_checked(struct ss_schedule *schedule, struct ss_request *request, enum ss_result verdict,
                              uint64_t now_ns);

/* Number of the part that a request belongs to. */
size_t ss_request_part(const struct ss_request *request);

/* It was checked, and so is completed. */
void ss_schedule_checked(struct ss_schedule *schedule, struct ss_entry *entry, enum ss_result verdict);

/* Completes waiting operations with ECANCELED, and prevents the start of others. */
void ss_schedule_stop(struct ss_schedule *schedule, uint64_t now_ns);

/* Takes back at most 'max' completed operations. */
size_t ss_schedule_take(struct ss_schedule *schedule, struct ss_block_completion *completions, size_t max);

void ss_schedule_statistics(const struct ss_schedule *schedule, struct ss_block_statistics *statistics,
                            uint64_t now_ns);

#endif /* SS_BLOCK_SCHEDULE_H */
