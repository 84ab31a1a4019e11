/* SPDX-License-Identifier: Apache-2.0 */
/*
 * store.c - storing: quantize and compress into the store buffer
 *
 * Each store thread takes whole pieces, so that a piece's slices are stored without gaps. Storing must not disturb
 * serving: the threads have a low priority, and before each slice they wait for a running fetch batch, but only for a
 * limited time, since a server under constant load must still store.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <unistd.h>

#include "pipeline/internal.h"
#include "quantize/quantize.h"

/* The deadline has passed, or the caller has cancelled the call. */
static enum ss_result store_interrupted(const struct ss_batch *batch) {
    if (__atomic_load_n(&batch->cancelled, __ATOMIC_SEQ_CST)) {
        return SS_CANCELLED;
    }
    return ss_now_ns() >= batch->deadline_ns ? SS_DEADLINE : SS_OK;
}

/* Waits for the end of a running fetch, for at most SS_STORE_YIELD_NS. */
static void store_yield(struct ss_pipeline *pipeline, const struct ss_batch *batch) {
    pthread_mutex_lock(&pipeline->lock);
    if (pipeline->fetch_active) {
        uint64_t until = ss_now_ns() + SS_STORE_YIELD_NS;
        if (batch->deadline_ns < until) {
            until = batch->deadline_ns;
        }
        struct timespec time = ss_timespec(until);
        int error = 0;
        while (pipeline->fetch_active && error == 0 && !__atomic_load_n(&batch->cancelled, __ATOMIC_SEQ_CST)) {
            error = pthread_cond_timedwait(&pipeline->fetch_over, &pipeline->lock, &time);
        }
    }
    pthread_mutex_unlock(&pipeline->lock);
}

/* The bytes of one row of a slice's symbols: a token's, or those of a token in one byte plane. */
static size_t row_length(const struct ss_group *group) {
    return group->vector_length *
           (group->quantizer == SS_QUANTIZER_PASSTHROUGH ? ss_dtype_size(group->dtype) : (size_t)1);
}

static uint64_t slice_raw_bytes(const struct ss_group *group, const struct ss_slice *slice) {
    return (uint64_t)slice->decoded_length / ss_symbol_size(group->quantizer, group->dtype) *
           ss_dtype_size(group->dtype);
}

/* Quantizes one slice. Vectors that share a scale are one longer vector; the last such vector may be shorter. */
static enum ss_result quantize_slice(const struct ss_group *group, struct ss_slice *slice, const uint8_t *source,
                                     uint8_t *symbols, uint8_t *scales) {
    if (group->quantizer == SS_QUANTIZER_WEIGHTED) {
        size_t exact = 0;
        enum ss_result quantized = ss_quantize_weighted(group->dtype, group->channels, slice->row, slice->position,
                                                        source, slice->vectors, symbols, scales, &exact);
        slice->scales_length = (uint32_t)exact;
        return quantized;
    }
    size_t shared = group->quantizer == SS_QUANTIZER_BINNED ? group->scale_vectors : 1;
    size_t whole = slice->vectors / shared;
    size_t elements = whole * shared * group->vector_length;
    enum ss_result result = ss_quantize(group->quantizer, group->dtype, slice->bins, source, whole,
                                        shared * group->vector_length, symbols, scales);
    if (result != SS_OK || slice->vectors % shared == 0) {
        return result;
    }
    return ss_quantize(group->quantizer, group->dtype, slice->bins, source + elements * ss_dtype_size(group->dtype), 1,
                       slice->vectors % shared * group->vector_length, symbols + elements,
                       scales + whole * sizeof(float));
}

/* Copies a slice's elements to memory that the CPU can read, if necessary, and returns their address. */
static enum ss_result collect_slice(struct ss_worker *worker, const struct ss_group *group,
                                    const struct ss_slice *slice, const uint8_t **elements) {
    const struct ss_registered_memory *memory = group->registered;
    *elements = group->memory + slice->memory_offset;
    if (memory == NULL || memory->kind == SS_MEMORY_LOCAL) {
        return SS_OK;
    }
    const uint8_t *source = *elements;
    *elements = worker->collected;
    return ss_engine_collect(worker, memory, source, worker->collected, slice_raw_bytes(group, slice));
}

/* Encodes one slice at 'target', which has room for its bound, and fills in the result's fields. */
static enum ss_result encode_slice(struct ss_worker *worker, const struct ss_group *group, const struct ss_piece *piece,
                                   struct ss_slice *slice, uint8_t *target) {
    size_t written = 0;
    size_t bound = ss_compress_bound(piece->codec, slice->decoded_length);
    const uint8_t *elements;
    uint64_t begin = ss_thread_ns();
    enum ss_result result = collect_slice(worker, group, slice, &elements);
    if (result == SS_OK) {
        result = quantize_slice(group, slice, elements, worker->scratch, target);
    }
    uint64_t quantized = ss_thread_ns();
    ss_counters_add(&worker->counters[0], 1, slice_raw_bytes(group, slice),
                    (uint64_t)slice->decoded_length + slice->scales_length, quantized - begin);
    if (result != SS_OK) {
        return result;
    }
    result = ss_compress(piece->codec, worker->scratch, slice->decoded_length, row_length(group),
                         target + slice->scales_length, bound, &written);
    if (result != SS_OK) {
        return result;
    }
    slice->encoded_length = (uint32_t)written;
    slice->checksum = ss_crc32(0, target, slice->scales_length + written);
    slice->decoded_crc32 = ss_crc32(0, worker->scratch, slice->decoded_length);
    ss_counters_add(&worker->counters[1], 1, slice->decoded_length, written, ss_thread_ns() - quantized);
    return SS_OK;
}

static enum ss_result encode_piece(struct ss_worker *worker, struct ss_batch *batch, struct ss_piece *piece) {
    struct ss_pipeline *pipeline = worker->pipeline;
    const struct ss_group *group = &batch->groups[piece->group];
    uint8_t *body = pipeline->store_buffer.data + piece->decompression_offset;
    uint64_t length = 0;
    for (uint32_t i = 0; i < piece->slice_count; i++) {
        struct ss_slice *slice = &batch->slices[piece->slice_first + i];
        store_yield(pipeline, batch);
        enum ss_result result = store_interrupted(batch);
        if (result == SS_OK) {
            result = encode_slice(worker, group, piece, slice, body + length);
        }
        if (result != SS_OK) {
            return result;
        }
        slice->offset = length;
        length += (uint64_t)slice->scales_length + slice->encoded_length;
    }
    piece->body_length = length;
    return SS_OK;
}

static void encode_pieces(struct ss_worker *worker) {
    struct ss_store *store = &worker->pipeline->store;
    struct ss_batch *batch = store->batch;
    for (;;) {
        uint32_t index = atomic_fetch_add(&store->next_piece, 1);
        if (index >= batch->piece_count) {
            return;
        }
        struct ss_piece *piece = &batch->pieces[index];
        uint32_t lowest = atomic_load(&store->first_failed);
        piece->result = index > lowest ? SS_SKIPPED : encode_piece(worker, batch, piece);
        if (piece->result != SS_OK && piece->result != SS_SKIPPED) {
            while (index < lowest && !atomic_compare_exchange_weak(&store->first_failed, &lowest, index)) {
            }
        }
    }
}

void *ss_store_thread(void *argument) {
    struct ss_worker *worker = argument;
    struct ss_pipeline *pipeline = worker->pipeline;
    uint64_t generation = 0;
    enum ss_result opened = worker->engine != NULL ? ss_engine_open(worker) : SS_OK;
    ss_worker_ready(pipeline, opened);
    pthread_mutex_lock(&pipeline->lock);
    while (opened == SS_OK) {
        while (!pipeline->stopping && pipeline->encode_generation == generation) {
            pthread_cond_wait(&pipeline->store_go, &pipeline->lock);
        }
        if (pipeline->stopping) {
            break;
        }
        generation = pipeline->encode_generation;
        pthread_mutex_unlock(&pipeline->lock);
        encode_pieces(worker);
        pthread_mutex_lock(&pipeline->lock);
        if (--pipeline->store.threads_running == 0) {
            pthread_cond_signal(&pipeline->store_done);
        }
    }
    pthread_mutex_unlock(&pipeline->lock);
    if (worker->engine != NULL) {
        ss_engine_close(worker);
    }
    return NULL;
}

static enum ss_result encode_round(struct ss_pipeline *pipeline, struct ss_batch *batch) {
    struct ss_store *store = &pipeline->store;
    pthread_mutex_lock(&pipeline->lock);
    store->batch = batch;
    atomic_store(&store->next_piece, 0);
    atomic_store(&store->first_failed, batch->piece_count);
    store->threads_running = pipeline->options.store_threads;
    pipeline->encode_generation++;
    pthread_cond_broadcast(&pipeline->store_go);
    while (store->threads_running > 0) {
        pthread_cond_wait(&pipeline->store_done, &pipeline->lock);
    }
    store->batch = NULL;
    pthread_mutex_unlock(&pipeline->lock);
    uint32_t lowest = atomic_load(&store->first_failed);
    return lowest < batch->piece_count ? batch->pieces[lowest].result : SS_OK;
}

enum ss_result ss_pipeline_encode(struct ss_pipeline *pipeline, struct ss_batch *batch) {
    if (pipeline == NULL || batch == NULL || pipeline->options.store_threads == 0) {
        return SS_BAD_ARGUMENT;
    }
    pthread_mutex_lock(&pipeline->lock);
    int taken = pipeline->encode_active != 0;
    pipeline->encode_active = 1;
    pthread_mutex_unlock(&pipeline->lock);
    if (taken) {
        return SS_BAD_ARGUMENT;
    }
    enum ss_result result = ss_encode_check(pipeline, batch);
    if (result == SS_OK) {
        result = encode_round(pipeline, batch);
    } else {
        for (uint32_t i = 0; batch->pieces != NULL && i < batch->piece_count; i++) {
            batch->pieces[i].result = result;
        }
    }
    pthread_mutex_lock(&pipeline->lock);
    pipeline->encode_active = 0;
    pthread_mutex_unlock(&pipeline->lock);
    return result;
}
