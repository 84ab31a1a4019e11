/* SPDX-License-Identifier: Apache-2.0 */
/*
 * schedule.c - selects the next of the waiting operations for a device
 *
 * Mixing reads and writes costs an SSD much of its bandwidth, and clients wait only for reads. So:
 *
 * - Foreground operations go first, in the order of submission.
 * - Writes go while no foreground operation waits or is in flight, background operations while no write does either.
 * - Lower priorities have a limit of bytes and half the requests in flight, which bounds the wait of a new operation.
 * - A lower priority that has waited too long gets a turn before all others: as many bytes as may be in flight. So both
 *   lower priorities have some bandwidth with any number of reads, and reads have the rest with any number of writes.
 *
 * In strict order, operations of different priorities are never in flight at the same time, since mixing makes both
 * slower. A turn begins when the device has finished all requests, and reads continue when the turn's writes are done.
 *
 * Large operations are split into requests. In each priority, only the operation at the head of the queue is split at
 * a time. After a request failed, no other request of its operation begins.
 */
#include "block/schedule.h"

#include <errno.h>
#include <stdlib.h>

#define NS_PER_MS 1000000u
/* Of lower priorities: bytes in flight, which are also the length of a turn, and the longest wait for a turn. */
#define WRITE_BYTES_MAX (4u << 20)
#define WRITE_WAIT_MS 20u
#define WRITE_WAIT_STRICT_MS 1000u /* the device must change between priorities */
#define BACKGROUND_BYTES_MAX (1u << 20)
#define BACKGROUND_WAIT_MS 500u

#define DISCARD_BYTES_MAX (1u << 30)
#define REQUEST_COST_MIN 4096u /* bytes that a flush counts for */

/* ---- Queues ---------------------------------------------------------------------------------------------------- */

static void queue_push(struct ss_entry_queue *queue, struct ss_entry *entry) {
    entry->next = NULL;
    if (queue->tail != NULL) {
        queue->tail->next = entry;
    } else {
        queue->head = entry;
    }
    queue->tail = entry;
    queue->count++;
}

static struct ss_entry *queue_pop(struct ss_entry_queue *queue) {
    struct ss_entry *entry = queue->head;
    if (entry != NULL) {
        queue->head = entry->next;
        if (queue->head == NULL) {
            queue->tail = NULL;
        }
        queue->count--;
    }
    return entry;
}

/* ---- Life ------------------------------------------------------------------------------------------------------ */

enum ss_result ss_schedule_init(struct ss_schedule *schedule, const struct ss_block_options *options) {
    *schedule = (struct ss_schedule){.requests_max = options->queue_depth, .request_bytes_max = SS_REQUEST_BYTES_MAX};
    schedule->entries = calloc(options->operations_max, sizeof *schedule->entries);
    schedule->requests = calloc(options->queue_depth, sizeof *schedule->requests);
    schedule->vectors = calloc((size_t)options->queue_depth * SS_VECTORS_MAX, sizeof *schedule->vectors);
    if (schedule->entries == NULL || schedule->requests == NULL || schedule->vectors == NULL) {
        ss_schedule_free(schedule);
        return SS_NO_MEMORY;
    }
    for (uint32_t index = options->operations_max; index-- > 0;) {
        schedule->entries[index].next = schedule->free_entries;
        schedule->free_entries = &schedule->entries[index];
    }
    for (uint32_t index = options->queue_depth; index-- > 0;) {
        schedule->requests[index].next = schedule->free_requests;
        schedule->free_requests = &schedule->requests[index];
    }
    schedule->free_count = options->operations_max;
    schedule->yielding_max = (options->queue_depth + 1) / 2;
    schedule->is_strict = options->strict != 0;
    schedule->wait_ns[SS_BLOCK_PRIORITY_WRITE] =
        (uint64_t)(schedule->is_strict ? WRITE_WAIT_STRICT_MS : WRITE_WAIT_MS) * NS_PER_MS;
    schedule->wait_ns[SS_BLOCK_PRIORITY_BACKGROUND] = (uint64_t)BACKGROUND_WAIT_MS * NS_PER_MS;
    schedule->bytes_max[SS_BLOCK_PRIORITY_WRITE] = WRITE_BYTES_MAX;
    schedule->bytes_max[SS_BLOCK_PRIORITY_BACKGROUND] = BACKGROUND_BYTES_MAX;
    return SS_OK;
}

void ss_schedule_free(struct ss_schedule *schedule) {
    free(schedule->entries);
    free(schedule->requests);
    free(schedule->vectors);
    schedule->entries = NULL;
    schedule->requests = NULL;
    schedule->vectors = NULL;
}

/* ---- From submission to completion ------------------------------------------------------------------------------ */

/* A part's verdict counts its requests until they are done. */
static void count_requests(const struct ss_schedule *schedule, const struct ss_block_operation *operation) {
    const struct ss_block_pages *pages = operation->pages;
    uint64_t max = schedule->request_bytes_max;

    for (size_t part = 0; pages != NULL && part < (size_t)pages->layer_count * pages->extent_count; part++) {
        pages->verdicts[part] = (uint32_t)((operation->length + max - 1) / max);
    }
}

enum ss_result ss_schedule_submit(struct ss_schedule *schedule, const struct ss_block_operation *operations,
                                  size_t count, uint64_t now_ns) {
    if (schedule->is_stopped) {
        return SS_CANCELLED;
    }
    if (count > schedule->free_count) {
        return SS_NO_SPACE;
    }
    for (size_t index = 0; index < count; index++) {
        struct ss_entry *entry = schedule->free_entries;
        schedule->free_entries = entry->next;
        schedule->free_count--;
        count_requests(schedule, &operations[index]);
        *entry = (struct ss_entry){
            .operation = operations[index], .submitted_ns = now_ns, .verdict = SS_NOT_SUPPORTED, .is_queued = 1};
        queue_push(&schedule->waiting[operations[index].priority], entry);
    }
    return SS_OK;
}

/* For an operation that the device has finished: none of its requests is in flight, and it is in no queue. */
static void complete(struct ss_schedule *schedule, struct ss_entry *entry, uint64_t now_ns) {
    struct ss_block_statistics *statistics = &schedule->statistics;
    const struct ss_block_operation *operation = &entry->operation;

    entry->end_ns = now_ns;
    if (entry->begin_ns == 0) {
        entry->begin_ns = now_ns;
    } else {
        statistics->wait_ns[operation->priority] += entry->begin_ns - entry->submitted_ns;
        statistics->service_ns[operation->priority] += now_ns - entry->begin_ns;
    }
    if (entry->error == 0) {
        statistics->operations[operation->kind]++;
        statistics->bytes[operation->kind] += ss_operation_bytes(operation);
    } else if (entry->error != ECANCELED) {
        statistics->errors[operation->kind]++;
        statistics->last_error = entry->error;
        statistics->gone |= entry->error == ENODEV || entry->error == ENXIO;
    }
    int is_unchecked = entry->error == 0 && operation->is_checked;
    queue_push(is_unchecked ? &schedule->unchecked[operation->priority] : &schedule->completed, entry);
}

struct ss_entry *ss_schedule_unchecked(struct ss_schedule *schedule) {
    struct ss_entry *entry = NULL;

    for (uint32_t priority = 0; priority < SS_PRIORITIES && entry == NULL; priority++) {
        entry = queue_pop(&schedule->unchecked[priority]);
    }
    return entry;
}

struct ss_request *ss_schedule_unchecked_part(struct ss_schedule *schedule) {
    struct ss_request *request = schedule->unchecked_parts;

    if (request != NULL) {
        schedule->unchecked_parts = request->next;
    }
    return request;
}

static void request_free(struct ss_schedule *schedule, struct ss_request *request) {
    request->entry = NULL;
    request->next = schedule->free_requests;
    schedule->free_requests = request;
}

/* Completes a finished operation. */
static void settle(struct ss_schedule *schedule, struct ss_entry *entry, uint64_t now_ns) {
    if (!entry->is_queued && entry->in_flight == 0 && entry->unchecked == 0) {
        complete(schedule, entry, now_ns);
    }
}

void ss_schedule_part_checked(struct ss_schedule *schedule, struct ss_request *request, enum ss_result verdict,
                              uint64_t now_ns) {
    struct ss_entry *entry = request->entry;

    entry->unchecked--;
    if (entry->verdict == SS_NOT_SUPPORTED || verdict != SS_OK) {
        entry->verdict = verdict;
    }
    request_free(schedule, request);
    settle(schedule, entry, now_ns);
}

int ss_schedule_has_unchecked(const struct ss_schedule *schedule) {
    uint32_t count = schedule->unchecked_parts != NULL;

    for (uint32_t priority = 0; priority < SS_PRIORITIES; priority++) {
        count += schedule->unchecked[priority].count;
    }
    return count > 0;
}

void ss_schedule_checked(struct ss_schedule *schedule, struct ss_entry *entry, enum ss_result verdict) {
    entry->verdict = verdict;
    queue_push(&schedule->completed, entry);
}

void ss_schedule_done(struct ss_schedule *schedule, struct ss_request *request, int32_t error, uint64_t now_ns) {
    struct ss_entry *entry = request->entry;
    enum ss_block_priority priority = entry->operation.priority;

    schedule->in_flight[priority]--;
    schedule->bytes_in_flight[priority] -= request->cost;
    if (--schedule->statistics.in_flight == 0) {
        schedule->statistics.busy_ns += now_ns - schedule->busy_since_ns;
    }
    entry->in_flight--;
    if (error != 0 && entry->error == 0) {
        entry->error = error;
        if (entry->is_queued) {
            queue_pop(&schedule->waiting[priority]); /* only the head has requests */
            entry->is_queued = 0;
        }
    }
    if (error == 0 && entry->operation.pages != NULL &&
        --entry->operation.pages->verdicts[ss_request_part(request)] == 0) {
        entry->unchecked++;
        request->next = schedule->unchecked_parts;
        schedule->unchecked_parts = request;
    } else {
        request_free(schedule, request);
    }
    settle(schedule, entry, now_ns);
}

void ss_schedule_stop(struct ss_schedule *schedule, uint64_t now_ns) {
    struct ss_entry *entry;

    schedule->is_stopped = 1;
    for (uint32_t priority = 0; priority < SS_PRIORITIES; priority++) {
        while ((entry = queue_pop(&schedule->waiting[priority])) != NULL) {
            entry->is_queued = 0;
            entry->error = ECANCELED;
            settle(schedule, entry, now_ns);
        }
    }
}

size_t ss_schedule_take(struct ss_schedule *schedule, struct ss_block_completion *completions, size_t max) {
    size_t count = 0;
    struct ss_entry *entry;

    while (count < max && (entry = queue_pop(&schedule->completed)) != NULL) {
        completions[count++] = (struct ss_block_completion){.tag = entry->operation.tag,
                                                            .begin_ns = entry->begin_ns,
                                                            .end_ns = entry->end_ns,
                                                            .error = entry->error,
                                                            .verdict = entry->verdict};
        entry->next = schedule->free_entries;
        schedule->free_entries = entry;
        schedule->free_count++;
    }
    return count;
}

/* ---- The choice ------------------------------------------------------------------------------------------------ */

uint64_t ss_operation_bytes(const struct ss_block_operation *operation) {
    const struct ss_block_pages *pages = operation->pages;
    return pages != NULL ? operation->length * pages->extent_count * pages->layer_count : operation->length;
}

size_t ss_request_part(const struct ss_request *request) {
    return request->first / request->entry->operation.length;
}

/* Requests of a read into pages end at the ends of parts. */
static uint64_t next_bytes(const struct ss_schedule *schedule, const struct ss_entry *entry) {
    const struct ss_block_operation *operation = &entry->operation;
    uint64_t max = operation->kind == SS_BLOCK_DISCARD ? DISCARD_BYTES_MAX : schedule->request_bytes_max;
    uint64_t left =
        operation->length - (operation->pages != NULL ? entry->started % operation->length : entry->started);
    return left < max ? left : max;
}

static uint64_t next_offset(const struct ss_entry *entry) {
    const struct ss_block_operation *operation = &entry->operation;
    const struct ss_block_pages *pages = operation->pages;

    if (pages == NULL) {
        return operation->offset + entry->started;
    }
    uint64_t part = entry->started / operation->length;
    return pages->extents[part % pages->extent_count] + operation->offset +
           part / pages->extent_count * operation->length + entry->started % operation->length;
}

uint32_t ss_request_vectors(const struct ss_request *request) {
    const struct ss_block_operation *operation = &request->entry->operation;
    const struct ss_block_pages *pages = operation->pages;
    size_t part = ss_request_part(request), extent = part % pages->extent_count;
    uint8_t *layer = (uint8_t *)operation->memory + pages->layers[part / pages->extent_count];
    uint64_t at = request->first % operation->length, end = at + request->length;
    uint32_t count = 0;

    for (at += request->done; at < end;) {
        uint64_t within = at % pages->size, left = pages->size - within;
        uint32_t block = pages->blocks[extent * pages->extent_blocks + at / pages->size];
        uint8_t *memory = layer + block * pages->stride + within;
        uint64_t bytes = end - at < left ? end - at : left;
        struct iovec *last = count > 0 ? &request->vectors[count - 1] : NULL;
        if (last != NULL && (uint8_t *)last->iov_base + last->iov_len == memory) {
            last->iov_len += bytes; /* neighbours in memory, too */
        } else {
            request->vectors[count++] = (struct iovec){.iov_base = memory, .iov_len = (size_t)bytes};
        }
        at += bytes;
    }
    return count;
}

/* Ends reads into pages that were stopped, at the heads of queues. */
static void drop_unwanted(struct ss_schedule *schedule, uint64_t now_ns) {
    for (uint32_t priority = 0; priority < SS_PRIORITIES; priority++) {
        struct ss_entry *head;
        while ((head = schedule->waiting[priority].head) != NULL && head->operation.pages != NULL &&
               __atomic_load_n(head->operation.pages->stop, __ATOMIC_RELAXED) != 0) {
            queue_pop(&schedule->waiting[priority]);
            head->is_queued = 0;
            head->error = head->error != 0 ? head->error : ECANCELED;
            settle(schedule, head, now_ns);
        }
    }
}

/* Bytes that an operation moves: none for a discard. */
static uint64_t cost(const struct ss_entry *entry, uint64_t bytes) {
    return entry->operation.kind == SS_BLOCK_DISCARD || bytes < REQUEST_COST_MIN ? REQUEST_COST_MIN : bytes;
}

/* Returns whether the head of a lower priority's queue may start, with the present requests in flight. */
static int has_room(const struct ss_schedule *schedule, uint32_t priority) {
    const struct ss_entry *head = schedule->waiting[priority].head;
    uint64_t bytes = schedule->bytes_in_flight[priority];
    uint32_t yielding =
        schedule->in_flight[SS_BLOCK_PRIORITY_WRITE] + schedule->in_flight[SS_BLOCK_PRIORITY_BACKGROUND];

    return yielding < schedule->yielding_max &&
           (schedule->in_flight[priority] == 0 ||
            bytes + cost(head, next_bytes(schedule, head)) <= schedule->bytes_max[priority]);
}

static int has_turn(struct ss_schedule *schedule, uint32_t priority, uint64_t now_ns) {
    const struct ss_entry *head = schedule->waiting[priority].head;

    if (head == NULL) {
        schedule->turn_bytes[priority] = 0;
        return 0;
    }
    if (schedule->turn_bytes[priority] == 0) {
        uint64_t since = schedule->last_ns[priority];
        since = since > head->submitted_ns ? since : head->submitted_ns;
        if (now_ns < since + schedule->wait_ns[priority]) {
            return 0;
        }
        schedule->turn_bytes[priority] = schedule->bytes_max[priority];
    }
    return has_room(schedule, priority);
}

/* Returns whether a request of 'priority' may start, with the present requests in flight. */
static int may_join(const struct ss_schedule *schedule, uint32_t priority) {
    return !schedule->is_strict || schedule->statistics.in_flight == schedule->in_flight[priority];
}

static int choose(struct ss_schedule *schedule, uint64_t now_ns) {
    const struct ss_entry_queue *waiting = schedule->waiting;
    const uint32_t *in_flight = schedule->in_flight;

    for (uint32_t priority = SS_BLOCK_PRIORITY_WRITE; priority < SS_PRIORITIES; priority++) {
        if (has_turn(schedule, priority, now_ns)) {
            return may_join(schedule, priority) ? (int)priority : -1;
        }
    }
    for (uint32_t priority = 0; priority < SS_PRIORITIES; priority++) {
        if (waiting[priority].count > 0) {
            int may_begin = may_join(schedule, priority) && (priority == 0 || has_room(schedule, priority));
            return may_begin ? (int)priority : -1;
        }
        if (in_flight[priority] > 0) {
            return -1;
        }
    }
    return -1;
}

struct ss_request *ss_schedule_next(struct ss_schedule *schedule, uint64_t now_ns) {
    struct ss_request *request = schedule->free_requests;
    int priority;

    drop_unwanted(schedule, now_ns);
    if (request == NULL || schedule->is_stopped || (priority = choose(schedule, now_ns)) < 0) {
        return NULL;
    }
    struct ss_entry *entry = schedule->waiting[priority].head;
    uint64_t bytes = next_bytes(schedule, entry), *turn_bytes = &schedule->turn_bytes[priority];
    schedule->free_requests = request->next;
    *request = (struct ss_request){.entry = entry,
                                   .kind = entry->operation.kind,
                                   .offset = next_offset(entry),
                                   .length = bytes,
                                   .cost = cost(entry, bytes),
                                   .memory = entry->operation.memory,
                                   .first = entry->started,
                                   .begin_ns = now_ns};
    if (entry->operation.pages != NULL) {
        request->vectors = schedule->vectors + (size_t)(request - schedule->requests) * SS_VECTORS_MAX;
        request->memory = NULL;
    } else if (request->memory != NULL) {
        request->memory += entry->started;
    }
    if (entry->begin_ns == 0) {
        entry->begin_ns = now_ns;
    }
    entry->started += bytes;
    entry->in_flight++;
    if (entry->started == ss_operation_bytes(&entry->operation)) {
        queue_pop(&schedule->waiting[priority]);
        entry->is_queued = 0;
    }
    schedule->in_flight[priority]++;
    schedule->bytes_in_flight[priority] += request->cost;
    schedule->last_ns[priority] = now_ns;
    *turn_bytes -= request->cost < *turn_bytes ? request->cost : *turn_bytes;
    if (schedule->statistics.in_flight++ == 0) {
        schedule->busy_since_ns = now_ns;
    }
    return request;
}

void ss_schedule_statistics(const struct ss_schedule *schedule, struct ss_block_statistics *statistics,
                            uint64_t now_ns) {
    *statistics = schedule->statistics;
    if (statistics->in_flight > 0) {
        statistics->busy_ns += now_ns - schedule->busy_since_ns;
    }
    for (uint32_t index = 0; index < schedule->requests_max; index++) {
        const struct ss_request *request = &schedule->requests[index];
        if (request->entry != NULL && (statistics->oldest_ns == 0 || request->begin_ns < statistics->oldest_ns)) {
            statistics->oldest_ns = request->begin_ns;
        }
    }
    for (uint32_t priority = 0; priority < SS_PRIORITIES; priority++) {
        statistics->waiting[priority] = schedule->waiting[priority].count;
    }
}
