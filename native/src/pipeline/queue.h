/* SPDX-License-Identifier: Apache-2.0 */
/*
 * queue.h - the bounded queues between the pipeline's stages
 *
 * A ring of slices under one mutex. Nobody spins: the cores belong to the stages. A push wakes at most as many
 * consumers as it brought slices, and a full queue wakes its producers only when it is half empty, so that the two
 * sides do not hand the core back and forth for every slice.
 */
#ifndef SS_QUEUE_H
#define SS_QUEUE_H

#include <pthread.h>
#include <stdint.h>

#include "shadowserve.h"

/* One slice on its way. Its offsets are summed up once, by the thread that received it. */
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

/* ss_queue_init() makes an empty queue of 'capacity' slices for 'consumers' threads. SS_NO_MEMORY. */
enum ss_result ss_queue_init(struct ss_queue *queue, uint32_t capacity, uint32_t consumers);

/* ss_queue_destroy() frees a queue that no thread uses; one that was zeroed and never made is allowed. */
void ss_queue_destroy(struct ss_queue *queue);

/* ss_queue_push() appends 'count' items in order, waiting for room as often as it takes. */
void ss_queue_push(struct ss_queue *queue, const struct ss_item *items, uint32_t count);

/*
 * ss_queue_pop() takes up to 'count_max' items, but no more than a fair share of what is there, and returns how many.
 * Where the queue is empty it waits if 'wait' is set, else returns 0. 0 with 'wait' set: closed and empty.
 */
uint32_t ss_queue_pop(struct ss_queue *queue, struct ss_item *items, uint32_t count_max, int wait);

/* ss_queue_close() makes waiting consumers return 0 once the queue is empty. */
void ss_queue_close(struct ss_queue *queue);

#endif /* SS_QUEUE_H */
