/* SPDX-License-Identifier: Apache-2.0 */
#include "pipeline/queue.h"

#include <stdlib.h>
#include <string.h>

enum ss_result ss_queue_init(struct ss_queue *queue, uint32_t capacity, uint32_t consumers) {
    memset(queue, 0, sizeof *queue);
    struct ss_item *items = calloc(capacity, sizeof *items);
    if (items == NULL) {
        return SS_NO_MEMORY;
    }
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->filled, NULL);
    pthread_cond_init(&queue->drained, NULL);
    queue->items = items;
    queue->capacity = capacity;
    queue->consumers = consumers;
    return SS_OK;
}

void ss_queue_destroy(struct ss_queue *queue) {
    if (queue->items == NULL) {
        return;
    }
    pthread_cond_destroy(&queue->drained);
    pthread_cond_destroy(&queue->filled);
    pthread_mutex_destroy(&queue->lock);
    free(queue->items);
    queue->items = NULL;
}

static void queue_wake_consumers(struct ss_queue *queue, uint32_t added) {
    if (added >= queue->consumers_waiting) {
        if (queue->consumers_waiting > 0) {
            pthread_cond_broadcast(&queue->filled);
        }
        return;
    }
    for (uint32_t woken = 0; woken < added; woken++) {
        pthread_cond_signal(&queue->filled);
    }
}

void ss_queue_push(struct ss_queue *queue, const struct ss_item *items, uint32_t count) {
    pthread_mutex_lock(&queue->lock);
    while (count > 0) {
        while (queue->count == queue->capacity) {
            queue->producers_waiting++;
            pthread_cond_wait(&queue->drained, &queue->lock);
            queue->producers_waiting--;
        }
        uint32_t room = queue->capacity - queue->count;
        uint32_t added = count < room ? count : room;
        for (uint32_t i = 0; i < added; i++) {
            queue->items[(queue->head + queue->count + i) % queue->capacity] = items[i];
        }
        queue->count += added;
        queue_wake_consumers(queue, added);
        items += added;
        count -= added;
    }
    pthread_mutex_unlock(&queue->lock);
}

uint32_t ss_queue_pop(struct ss_queue *queue, struct ss_item *items, uint32_t count_max, int wait) {
    pthread_mutex_lock(&queue->lock);
    while (queue->count == 0 && wait && !queue->closed) {
        queue->consumers_waiting++;
        pthread_cond_wait(&queue->filled, &queue->lock);
        queue->consumers_waiting--;
    }
    uint32_t share = (queue->count + queue->consumers - 1) / queue->consumers;
    uint32_t taken = share < count_max ? share : count_max;
    for (uint32_t i = 0; i < taken; i++) {
        items[i] = queue->items[queue->head];
        queue->head = (queue->head + 1) % queue->capacity;
    }
    queue->count -= taken;
    if (queue->producers_waiting > 0 && queue->count <= queue->capacity / 2) {
        pthread_cond_broadcast(&queue->drained);
    }
    pthread_mutex_unlock(&queue->lock);
    return taken;
}

void ss_queue_close(struct ss_queue *queue) {
    if (queue->items == NULL) {
        return;
    }
    pthread_mutex_lock(&queue->lock);
    queue->closed = 1;
    pthread_cond_broadcast(&queue->filled);
    pthread_mutex_unlock(&queue->lock);
}
