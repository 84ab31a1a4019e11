/* SPDX-License-Identifier: Apache-2.0 */
/*
 * queue.h - the bounded queues between the pipeline's stages
 *
 * A ring of slices under one mutex. Waiting threads do not spin: the cores belong to the stages. A push wakes at most
 * one consumer for each new slice, and a full queue wakes its producers only when it is half empty, so that the two
 * sides do not switch threads for every slice.
 */
#ifndef SS_QUEUE_H
#define SS_QUEUE_H

#include <pthread.h>
#include <stdint.h>

#include "shadowserve.h"

/* One slice in the pipeline. The thread that received it computes the offsets once. */
struct ss_item {
    uint64_t decoded_before; /* bytes of symbols of the piece's slices before this one */
    uint32_t piece;          /* index in the batch */
    uint32_t slice;          /* likewise */
};

struct ss_queue {
    pthread_mutex_t lock;
    pthread_cond_t filled;
    pthread_cond_t drained;
    struct ss_item *items;
    uint32_t capacity;
    uint32_t head;
    uint32_t count;
    uint32_t consumers; /* threads that pop, for fair shares */
    uint32_t consumers_waiting;
    uint32_t producers_waiting;
    uint32_t closed;
};

/* ss_queue_init() initializes an empty queue of 'capacity' slices for 'consumers' threads. SS_NO_MEMORY. */
enum ss_result ss_queue_init(struct ss_queue *queue, uint32_t capacity, uint32_t consumers);

/* ss_queue_destroy() frees a queue that no thread uses; a zeroed queue without ss_queue_init() is allowed. */
void ss_queue_destroy(struct ss_queue *queue);

/* ss_queue_push() appends 'count' items in order, and waits for room if necessary. */
void ss_queue_push(struct ss_queue *queue, const struct ss_item *items, uint32_t count);

/*
 * ss_queue_pop() takes up to 'count_max' items, but at most a fair share of the queued ones, and returns their number.
 * If the queue is empty, it waits if 'wait' is set, else returns 0. 0 with 'wait' set: closed and empty.
 */
uint32_t ss_queue_pop(struct ss_queue *queue, struct ss_item *items, uint32_t count_max, int wait);

/* ss_queue_close() makes waiting consumers return 0 once the queue is empty. */
void ss_queue_close(struct ss_queue *queue);

#endif /* SS_QUEUE_H */
