/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stages.c - from stored bytes to elements in registered memory
 *
 * Separate: decompress (backend) -> dequantize (CPU) -> DMA (backend), each with its queue and threads, each reading
 * the buffer that the one before it wrote. Fused: the decompress threads do all steps, slice by slice, with a scratch
 * buffer that stays in the cache; dequantization writes directly to the group's memory. A backend may do both at once;
 * all of the time then counts as decompression.
 *
 * Engine threads (decompress, DMA) drive a backend's channel, which they open and close themselves. They start slices
 * from the queue, and poll at once while slices are in flight: for a CPU, which decodes several slices in turns, the
 * first poll means that no more slices are waiting.
 *
 * A device that has work and completes none of it for 'device_timeout_ms' is abandoned. A work takes microseconds, so
 * after seconds it will never complete, and without a timeout the batch and the daemon would wait for ever.
 */
#define _GNU_SOURCE 1
#include <stdlib.h>
#include <sys/prctl.h>

#include "codecs/codec.h"
#include "codecs/decode.h"
#include "pipeline/internal.h"

/*
 * Slices passed on at a time. Waking a thread costs several microseconds, tens on a virtual machine; the delay of a few
 * slices is negligible for the next stage.
 */
enum { PASS_COUNT = SS_POP_MAX };

enum { DEVICE_TIMEOUT_MS = 10000 };

/* Most time that one poll of the backend counts for, in addition to the pauses between polls. */
#define LOOK_NS_MAX 100000000ULL

struct slot {
    struct ss_work work;
    struct ss_item item;
    uint32_t busy; /* the backend has it */
    struct ss_worker *worker;
    struct slot *next_free;
    uint8_t *scratch;  /* fused: the symbols */
    uint64_t begin_ns; /* for the trace: when the work was started */
};

struct ss_engine {
    void *channel; /* NULL: not open */
    struct slot *slots;
    struct slot *free_slots;
    uint32_t in_flight;
    uint32_t lost;      /* the device was abandoned because of this channel, which is no longer used */
    uint64_t waited_ns; /* counted time since the backend's oldest work began, or since its last completion */
    uint64_t looked_ns; /* time of the last poll */
    /* Results of complete() for engine_flush(): a slice is passed on only after it is in the statistics. */
    uint64_t dequantize_ns; /* fused: part of the time, which counts for another stage */
    struct ss_item *passed; /* to the next stage; room for in_flight_max more than PASS_COUNT */
    uint32_t passed_count;
    uint32_t retired;
    uint64_t completed_ns; /* for the trace: the first completion within one call of the backend; all share it */
    uint64_t before_ns;    /* likewise: the one before that */
};

/* ---- One slice ----------------------------------------------------------------------------------------------- */

static const struct ss_group_state *item_group(const struct ss_pipeline *pipeline, const struct ss_item *item) {
    return pipeline->piece_states[item->piece].group;
}

static const struct ss_piece *item_piece(const struct ss_pipeline *pipeline, const struct ss_item *item) {
    return &pipeline->fetch.batch->pieces[item->piece];
}

static const struct ss_slice *item_slice(const struct ss_pipeline *pipeline, const struct ss_item *item) {
    return &pipeline->fetch.batch->slices[item->slice];
}

static const uint8_t *item_stored(const struct ss_pipeline *pipeline, const struct ss_item *item) {
    return pipeline->piece_states[item->piece].stored + item_slice(pipeline, item)->offset;
}

static uint8_t *item_symbols(const struct ss_pipeline *pipeline, const struct ss_item *item) {
    return pipeline->piece_states[item->piece].symbols + item->decoded_before;
}

static uint8_t *item_dma_source(const struct ss_pipeline *pipeline, const struct ss_item *item) {
    return pipeline->piece_states[item->piece].dma_source +
           item->decoded_before * item_group(pipeline, item)->symbol_bytes;
}

static uint8_t *item_memory(const struct ss_pipeline *pipeline, const struct ss_item *item) {
    return item_group(pipeline, item)->group->memory + item_slice(pipeline, item)->memory_offset;
}

static uint64_t item_delivered_bytes(const struct ss_pipeline *pipeline, const struct ss_item *item) {
    return (uint64_t)item_slice(pipeline, item)->decoded_length * item_group(pipeline, item)->symbol_bytes;
}

/* A slice is in the group's memory; the caller still has to retire it. */
static void item_delivered(struct ss_pipeline *pipeline, const struct ss_item *item) {
    atomic_fetch_add(&pipeline->fetch.delivered_bytes, item_delivered_bytes(pipeline, item));
    ss_piece_part_done(pipeline, item->piece);
}

/* A slice's span in a stage. */
static void item_trace(struct ss_worker *worker, enum ss_stage stage, const struct ss_item *item, uint64_t begin_ns,
                       uint64_t end_ns, uint64_t input_bytes, uint64_t output_bytes) {
    ss_trace_add(worker, (struct ss_trace_event){.begin_ns = begin_ns,
                                                 .end_ns = end_ns,
                                                 .input_bytes = input_bytes,
                                                 .output_bytes = output_bytes,
                                                 .piece = item->piece,
                                                 .slice = item->slice,
                                                 .stage = stage});
}

/* Description of a slice's elements at 'target'. */
static struct ss_elements item_elements(const struct ss_pipeline *pipeline, const struct ss_item *item,
                                        uint8_t *target) {
    const struct ss_group *group = item_group(pipeline, item)->group;
    const struct ss_elements elements = {.scales = item_stored(pipeline, item),
                                         .target = target,
                                         .vectors = item_slice(pipeline, item)->vectors,
                                         .vector_length = group->vector_length,
                                         .scale_vectors = group->scale_vectors,
                                         .quantizer = group->quantizer,
                                         .dtype = group->dtype,
                                         .channels = group->channels,
                                         .scales_length = item_slice(pipeline, item)->scales_length,
                                         .row = item_slice(pipeline, item)->row};
    return elements;
}

/*
 * Dequantizes a slice's symbols to 'target', and updates 'counters'. Adds the time to '*elapsed_ns'. If 'symbols' is
 * 'target', the elements are already there: only counts. When fused, the elements are not read soon, so the stores
 * bypass the caches; otherwise the DMA stage reads them.
 */
static enum ss_result item_dequantize(struct ss_worker *worker, const struct ss_item *item, const uint8_t *symbols,
                                      uint8_t *target, struct ss_counters *counters, uint64_t *elapsed_ns) {
    struct ss_pipeline *pipeline = worker->pipeline;
    const struct ss_slice *slice = item_slice(pipeline, item);
    uint64_t traced = ss_trace_now(pipeline);
    uint64_t begin = ss_thread_ns();
    enum ss_result result = SS_OK;
    if (symbols != target) {
        const struct ss_elements elements = item_elements(pipeline, item, target);
        result = ss_elements_make(&elements, symbols, pipeline->options.fused != 0);
    }
    uint64_t elapsed = symbols != target ? ss_thread_ns() - begin : 0;
    *elapsed_ns += elapsed;
    uint64_t input_bytes = (uint64_t)slice->decoded_length + slice->scales_length;
    uint64_t output_bytes = item_delivered_bytes(pipeline, item);
    ss_counters_add(counters, 1, input_bytes, output_bytes, elapsed);
    if (traced != 0) {
        item_trace(worker, SS_STAGE_DEQUANTIZE, item, traced, ss_now_ns(), input_bytes, output_bytes);
    }
    return result;
}

/* ---- Decompress ---------------------------------------------------------------------------------------------- */

/* Restarts the timeout: the backend gets its first work, or has completed one. */
static void watch_begin(struct ss_engine *engine) {
    engine->waited_ns = 0;
    engine->looked_ns = ss_now_ns();
}

static struct slot *slot_take(struct ss_engine *engine) {
    struct slot *slot = engine->free_slots;
    engine->free_slots = slot->next_free;
    slot->busy = 1;
    if (engine->in_flight++ == 0) {
        watch_begin(engine);
    }
    return slot;
}

static void slot_finish(struct slot *slot, enum ss_result result, int delivered) {
    struct ss_engine *engine = slot->worker->engine;
    struct ss_pipeline *pipeline = slot->worker->pipeline;
    if (result == SS_OK && delivered) {
        item_delivered(pipeline, &slot->item);
    } else if (result != SS_OK) {
        ss_fetch_fail(pipeline, slot->item.piece, result, 0);
    }
    if (result == SS_OK && !delivered) {
        engine->passed[engine->passed_count++] = slot->item;
    } else {
        engine->retired++;
    }
    slot->busy = 0;
    slot->next_free = engine->free_slots;
    engine->free_slots = slot;
    engine->in_flight--;
}

/* A call of the backend begins, in which works may complete. */
static void completions_begin(struct ss_engine *engine) {
    if (engine->completed_ns != 0) {
        engine->before_ns = engine->completed_ns;
        engine->completed_ns = 0;
    }
}

/* Time when the backend finished. Works that it did together have the same end, without the time of later steps. */
static uint64_t completion_ns(struct ss_engine *engine) {
    if (engine->completed_ns == 0) {
        engine->completed_ns = ss_now_ns();
    }
    return engine->completed_ns;
}

/* Records the span of a complete work. Spans of queued works of one engine follow each other. */
static void slot_trace(const struct slot *slot, uint64_t input_bytes, uint64_t output_bytes) {
    struct ss_engine *engine = slot->worker->engine;
    if (slot->begin_ns != 0) {
        uint64_t end = completion_ns(engine);
        uint64_t begin = slot->begin_ns > engine->before_ns ? slot->begin_ns : engine->before_ns;
        item_trace(slot->worker, slot->worker->stage, &slot->item, begin, end, input_bytes, output_bytes);
    }
}

/* The symbols of a slice are complete: passes it on, or finishes it here. */
static void decompress_complete(struct ss_work *work) {
    struct slot *slot = work->user;
    struct ss_worker *worker = slot->worker;
    struct ss_pipeline *pipeline = worker->pipeline;
    int fused = pipeline->options.fused != 0;
    enum ss_result result = work->result;
    const struct ss_slice *slice = item_slice(pipeline, &slot->item);
    slot_trace(slot, (uint64_t)slice->scales_length + slice->encoded_length, slice->decoded_length);
    if (result == SS_OK && fused) {
        uint8_t *elements = item_memory(pipeline, &slot->item);
        const uint8_t *symbols = work->dequantized ? elements : work->target;
        result = item_dequantize(worker, &slot->item, symbols, elements, &worker->counters[1],
                                 &worker->engine->dequantize_ns);
    }
    slot_finish(slot, result, fused);
}

/* Returns the target of the symbols. Fused and without a quantizer, the symbols are the elements: direct delivery. */
static uint8_t *decompress_target(const struct ss_pipeline *pipeline, const struct slot *slot) {
    if (!pipeline->options.fused) {
        return item_symbols(pipeline, &slot->item);
    }
    if (item_group(pipeline, &slot->item)->group->quantizer == SS_QUANTIZER_PASSTHROUGH) {
        return item_memory(pipeline, &slot->item);
    }
    return slot->scratch;
}

static size_t stored_bytes(const struct ss_slice *slice) {
    return (size_t)slice->scales_length + slice->encoded_length;
}

/* The CPU checks the stored bytes, unless the engine checks the decoded ones and there is nothing else to check. */
static enum ss_result decompress_check(const struct ss_pipeline *pipeline, const struct ss_item *item) {
    const struct ss_slice *slice = item_slice(pipeline, item);
    if (pipeline->capabilities.checks_decoded && slice->scales_length == 0) {
        return SS_OK;
    }
    return ss_crc32(0, item_stored(pipeline, item), stored_bytes(slice)) == slice->checksum ? SS_OK : SS_CHECKSUM;
}

/* 'next' is the slice that the thread starts after it, or NULL. */
static void decompress_start(struct ss_worker *worker, const struct ss_item *item, const struct ss_item *next) {
    struct ss_pipeline *pipeline = worker->pipeline;
    const struct ss_slice *slice = item_slice(pipeline, item);
    struct slot *slot = slot_take(worker->engine);
    slot->item = *item;
    slot->work.source = item_stored(pipeline, item) + slice->scales_length;
    slot->work.source_size = slice->encoded_length;
    slot->work.next = next != NULL ? item_stored(pipeline, next) : NULL;
    slot->work.next_size = next != NULL ? stored_bytes(item_slice(pipeline, next)) : 0;
    slot->work.target = decompress_target(pipeline, slot);
    slot->work.target_size = slice->decoded_length;
    slot->work.codec = item_piece(pipeline, item)->codec;
    slot->work.decoded_crc32 = slice->decoded_crc32;
    slot->work.dequantized = 0;
    slot->work.elements.target = NULL;
    if (slot->work.target == slot->scratch) {
        slot->work.elements = item_elements(pipeline, item, item_memory(pipeline, item));
    }
    slot->work.complete = decompress_complete;
    slot->begin_ns = ss_trace_now(pipeline);
    completions_begin(worker->engine);
    enum ss_result result = decompress_check(pipeline, item);
    if (result == SS_OK) {
        result = pipeline->backend->decompress(worker->engine->channel, &slot->work);
    }
    if (result != SS_OK) {
        slot_finish(slot, result, 1);
    }
}

/* ---- DMA ----------------------------------------------------------------------------------------------------- */

static void deliver_complete(struct ss_work *work) {
    struct slot *slot = work->user;
    slot_trace(slot, work->source_size, work->target_size);
    slot_finish(slot, work->result, 1);
}

static void deliver_start(struct ss_worker *worker, const struct ss_item *item) {
    struct ss_pipeline *pipeline = worker->pipeline;
    const struct ss_registered_memory *registered = item_group(pipeline, item)->group->registered;
    struct slot *slot = slot_take(worker->engine);
    slot->item = *item;
    slot->work.source = item_dma_source(pipeline, item);
    slot->work.source_size = item_delivered_bytes(pipeline, item);
    slot->work.target = item_memory(pipeline, item);
    slot->work.target_size = slot->work.source_size;
    slot->work.memory = registered != NULL ? registered->handle : NULL;
    slot->work.complete = deliver_complete;
    slot->begin_ns = ss_trace_now(pipeline);
    completions_begin(worker->engine);
    enum ss_result result = pipeline->backend->deliver(worker->engine->channel, &slot->work);
    if (result != SS_OK) {
        slot_finish(slot, result, 1);
    }
}

/* ---- Threads ------------------------------------------------------------------------------------------------- */

/* Passes slices on to the next stage if there are at least 'least'. */
static void engine_pass(struct ss_worker *worker, uint32_t least) {
    struct ss_engine *engine = worker->engine;
    if (engine->passed_count >= least) {
        ss_queue_push(&worker->pipeline->dequantize_queue, engine->passed, engine->passed_count);
        engine->passed_count = 0;
    }
}

/* Counts the engine's work since 'begin_ns', then passes on the finished slices. */
static void engine_flush(struct ss_worker *worker, uint64_t begin_ns, uint64_t items, uint64_t input_bytes,
                         uint64_t output_bytes) {
    struct ss_pipeline *pipeline = worker->pipeline;
    struct ss_engine *engine = worker->engine;
    uint64_t elapsed = ss_thread_ns() - begin_ns;
    ss_counters_add(&worker->counters[0], items, input_bytes, output_bytes, elapsed - engine->dequantize_ns);
    engine->dequantize_ns = 0;
    engine_pass(worker, PASS_COUNT);
    if (engine->retired > 0) {
        ss_fetch_done(pipeline, engine->retired);
        engine->retired = 0;
    }
}

static void poll_pause(const struct ss_pipeline *pipeline) {
    const struct timespec time = ss_timespec(1000ULL * pipeline->options.poll_interval_us);
    if (pipeline->options.poll_interval_us > 0) {
        (void)nanosleep(&time, NULL);
    }
}

/*
 * Counts a poll of a backend that has work; returns whether the timeout has passed. A poll counts for little time, even
 * if the last one was long ago: this thread may have been suspended, and an emulated device with it.
 */
static int watch_look(const struct ss_pipeline *pipeline, struct ss_engine *engine) {
    uint32_t timeout = pipeline->options.device_timeout_ms;
    uint64_t most = LOOK_NS_MAX + 2000ULL * pipeline->options.poll_interval_us;
    uint64_t now = ss_now_ns();
    uint64_t since = now - engine->looked_ns;
    engine->looked_ns = now;
    engine->waited_ns += since < most ? since : most;
    return engine->waited_ns / 1000000 >= (timeout > 0 ? timeout : DEVICE_TIMEOUT_MS);
}

/* Fails the works of this channel on the device; it may still finish them at any time, which is ignored. */
static void engine_give_up(struct ss_worker *worker) {
    struct ss_engine *engine = worker->engine;
    engine->lost = 1;
    atomic_store(&worker->pipeline->given_up, 1);
    for (uint32_t i = 0; i < worker->pipeline->capabilities.in_flight_max; i++) {
        if (engine->slots[i].busy) {
            slot_finish(&engine->slots[i], SS_DEVICE, 1);
        }
    }
}

/* Completes the engine's finished works; if there are none, sleeps for a while. */
static void engine_progress(struct ss_worker *worker) {
    uint64_t begin = ss_thread_ns();
    completions_begin(worker->engine);
    uint32_t completed = worker->pipeline->backend->progress(worker->engine->channel);
    if (completed > 0) {
        watch_begin(worker->engine);
    } else if (worker->engine->in_flight > 0 && watch_look(worker->pipeline, worker->engine)) {
        engine_give_up(worker);
    }
    engine_flush(worker, begin, 0, 0, 0);
    engine_pass(worker, 1); /* all slices: the thread may wait next */
    if (completed == 0) {
        poll_pause(worker->pipeline);
    }
}

static void engine_item(struct ss_worker *worker, const struct ss_item *item, const struct ss_item *next) {
    struct ss_pipeline *pipeline = worker->pipeline;
    int given_up = atomic_load(&pipeline->given_up) != 0;
    if (given_up) {
        ss_fetch_fail(pipeline, item->piece, SS_DEVICE, 0);
    }
    if (given_up || ss_fetch_drops(pipeline, item->piece)) {
        ss_fetch_done(pipeline, 1);
        return;
    }
    const struct ss_slice *slice = item_slice(pipeline, item);
    uint64_t begin = ss_thread_ns();
    if (worker->stage == SS_STAGE_DECOMPRESS) {
        decompress_start(worker, item, next);
        engine_flush(worker, begin, 1, (uint64_t)slice->scales_length + slice->encoded_length, slice->decoded_length);
    } else {
        uint64_t bytes = item_delivered_bytes(pipeline, item);
        deliver_start(worker, item);
        engine_flush(worker, begin, 1, bytes, bytes);
    }
}

void *ss_engine_thread(void *argument) {
    struct ss_worker *worker = argument;
    struct ss_pipeline *pipeline = worker->pipeline;
    struct ss_queue *queue = worker->stage == SS_STAGE_DECOMPRESS ? &pipeline->decompress_queue : &pipeline->dma_queue;
    struct ss_item items[SS_POP_MAX];
    if (worker->stage == SS_STAGE_DECOMPRESS) {
        ss_codec_prepare();
    }
    enum ss_result opened = ss_engine_open(worker);
    ss_worker_ready(pipeline, opened);
    while (opened == SS_OK) {
        int idle = worker->engine->in_flight == 0; /* so no slice is left to pass on */
        uint32_t room = pipeline->capabilities.in_flight_max - worker->engine->in_flight;
        uint32_t count = ss_queue_pop(queue, items, room < SS_POP_MAX ? room : SS_POP_MAX, idle);
        if (count == 0 && idle) {
            break;
        }
        for (uint32_t i = 0; i < count; i++) {
            engine_item(worker, &items[i], i + 1 < count ? &items[i + 1] : NULL);
        }
        engine_pass(worker, 1);
        if (worker->engine->in_flight > 0) {
            engine_progress(worker);
        }
    }
    ss_engine_close(worker);
    return NULL;
}

/* Dequantizes one slice; returns whether it goes to the next stage. */
static int dequantize_item(struct ss_worker *worker, const struct ss_item *item) {
    struct ss_pipeline *pipeline = worker->pipeline;
    uint64_t elapsed = 0;
    int dropped = ss_fetch_drops(pipeline, item->piece);
    if (!dropped) {
        enum ss_result result = item_dequantize(worker, item, item_symbols(pipeline, item),
                                                item_dma_source(pipeline, item), &worker->counters[0], &elapsed);
        if (result != SS_OK) {
            ss_fetch_fail(pipeline, item->piece, result, 0);
            dropped = 1;
        }
    }
    if (dropped) {
        ss_fetch_done(pipeline, 1);
    }
    return !dropped;
}

void *ss_dequantize_thread(void *argument) {
    struct ss_worker *worker = argument;
    struct ss_pipeline *pipeline = worker->pipeline;
    struct ss_item items[SS_POP_MAX];
    ss_worker_ready(pipeline, SS_OK);
    for (;;) {
        uint32_t count = ss_queue_pop(&pipeline->dequantize_queue, items, SS_POP_MAX, 1);
        if (count == 0) {
            return NULL;
        }
        uint32_t passed = 0;
        for (uint32_t i = 0; i < count; i++) {
            if (dequantize_item(worker, &items[i])) {
                items[passed++] = items[i];
            }
            if (passed > 0 && (passed == PASS_COUNT || i + 1 == count)) {
                ss_queue_push(&pipeline->dma_queue, items, passed);
                passed = 0;
            }
        }
    }
}

/* ---- Life ---------------------------------------------------------------------------------------------------- */

static struct ss_backend_range buffer_range(const struct ss_buffer *buffer) {
    return (struct ss_backend_range){.data = buffer->data, .size = buffer->size};
}

struct ss_engine *ss_engine_create(struct ss_pipeline *pipeline, struct ss_worker *worker, uint8_t *scratch) {
    uint32_t count = pipeline->capabilities.in_flight_max;
    struct ss_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL) {
        return NULL;
    }
    engine->slots = calloc(count, sizeof *engine->slots);
    engine->passed = calloc((size_t)count + PASS_COUNT, sizeof *engine->passed);
    if (engine->slots == NULL || engine->passed == NULL) {
        ss_engine_destroy(engine);
        return NULL;
    }
    for (uint32_t i = 0; i < count; i++) {
        struct slot *slot = &engine->slots[i];
        slot->worker = worker;
        slot->work.user = slot;
        slot->scratch = scratch == NULL ? NULL : scratch + i * SS_SLICE_BYTES_MAX;
        slot->next_free = engine->free_slots;
        engine->free_slots = slot;
    }
    return engine;
}

void ss_engine_destroy(struct ss_engine *engine) {
    if (engine != NULL) {
        free(engine->passed);
        free(engine->slots);
        free(engine);
    }
}

/*
 * Precision of a thread's sleep. By default the kernel may wake it 50 us late, which is five times the polling
 * interval.
 */
enum { TIMER_SLACK_NS = 1000 };

enum ss_result ss_engine_open(struct ss_worker *worker) {
    struct ss_pipeline *pipeline = worker->pipeline;
    struct ss_backend_channel setup = {.stage = worker->stage};
    if (worker->stage == SS_STAGE_DECOMPRESS) {
        setup.source = buffer_range(&pipeline->decompression);
        setup.target = buffer_range(&pipeline->dequantization);
    } else if (worker->stage == SS_STAGE_DMA) {
        setup.source = buffer_range(&pipeline->dma_source);
    } else {
        setup.stage = SS_STAGE_QUANTIZE;
        setup.target = (struct ss_backend_range){.data = worker->collected, .size = SS_DELIVERED_BYTES_MAX};
    }
    (void)prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0); /* a wish */
    return pipeline->backend->channel_open(pipeline->device, &setup, &worker->engine->channel);
}

void ss_engine_close(struct ss_worker *worker) {
    if (worker->engine->channel != NULL && !worker->engine->lost) {
        worker->pipeline->backend->channel_close(worker->engine->channel);
        worker->engine->channel = NULL;
    }
}

/* ---- Storing ------------------------------------------------------------------------------------------------- */

static void collect_complete(struct ss_work *work) {
    struct slot *slot = work->user;
    slot->worker->engine->in_flight--;
}

enum ss_result ss_engine_collect(struct ss_worker *worker, const struct ss_registered_memory *memory,
                                 const uint8_t *source, uint8_t *target, size_t size) {
    struct ss_pipeline *pipeline = worker->pipeline;
    struct ss_engine *engine = worker->engine;
    struct slot *slot = engine->free_slots; /* stays free: one at a time */
    if (atomic_load(&pipeline->given_up)) {
        return SS_DEVICE;
    }
    slot->work.source = source;
    slot->work.target = target;
    slot->work.source_size = size;
    slot->work.target_size = size;
    slot->work.memory = memory->handle;
    slot->work.complete = collect_complete;
    engine->in_flight = 1;
    watch_begin(engine);
    enum ss_result result = pipeline->backend->collect(engine->channel, &slot->work);
    if (result != SS_OK) {
        engine->in_flight = 0;
        return result;
    }
    while (engine->in_flight > 0) {
        if (pipeline->backend->progress(engine->channel) > 0) {
            continue;
        }
        if (watch_look(pipeline, engine)) {
            engine_give_up(worker);
            engine->in_flight = 0;
            return SS_DEVICE;
        }
        poll_pause(pipeline);
    }
    return slot->work.result;
}
