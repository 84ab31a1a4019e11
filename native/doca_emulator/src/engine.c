/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine.c - the thread behind a context, which works its tasks off
 *
 * Time is a model laid over that: the engines of one device do one task after the other at their throughput, and each
 * completion comes a latency later. A task whose work took less than that is held until its time; one whose work took
 * longer, since a CPU is no card, completes as soon as it can.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "emulator.h"

#define NS_PER_SECOND 1000000000ull

uint64_t engine_random(uint64_t *state) {
    *state += 0x9E3779B97F4A7C15u; /* splitmix64 */
    uint64_t value = *state;
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
    value = (value ^ value >> 27) * 0x94D049BB133111EBu;
    return value ^ value >> 31;
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * NS_PER_SECOND + (uint64_t)now.tv_nsec;
}

/* ---- Bufs as plain memory ------------------------------------------------------------------------------------- */

static size_t source_size(const struct doca_task *task) {
    size_t size = 0;
    for (const struct doca_buf *buf = task->source; buf != NULL; buf = buf->next) {
        size += buf->data_len;
    }
    return size;
}

static size_t target_space(const struct doca_task *task) {
    size_t size = 0;
    for (const struct doca_buf *buf = task->target; buf != NULL; buf = buf->next) {
        size += buf_free_space(buf);
    }
    return size;
}

static size_t target_length(const struct doca_task *task) {
    size_t size = 0;
    for (const struct doca_buf *buf = task->target; buf != NULL; buf = buf->next) {
        size += buf->len;
    }
    return size;
}

static uint8_t *local_address(const struct doca_mmap *mmap, const uint8_t *address) {
    return mmap->location + (address - mmap->address);
}

/* Makes 'scratch' large enough; NULL without memory. */
static uint8_t *scratch_reserve(uint8_t **scratch, size_t *scratch_size, size_t size) {
    if (*scratch_size < size) {
        free(*scratch);
        *scratch = malloc(size);
        *scratch_size = *scratch != NULL ? size : 0;
    }
    return *scratch;
}

/* Returns the source's bytes in one piece: where they are if they can be read there, else copied. NULL: unreachable. */
static const uint8_t *source_view(const struct doca_task *task, size_t size) {
    struct doca_ctx *ctx = task->ctx;
    const struct doca_buf *buf = task->source;
    if (buf->next == NULL && !buf->mmap->imported) {
        return local_address(buf->mmap, buf->data);
    }
    uint8_t *scratch = scratch_reserve(&ctx->source_scratch, &ctx->source_scratch_size, size);
    size_t offset = 0;
    for (; scratch != NULL && buf != NULL; buf = buf->next) {
        if (!buf->mmap->imported) {
            memcpy(scratch + offset, local_address(buf->mmap, buf->data), buf->data_len);
        } else if (!export_read(&buf->mmap->descriptor, buf->data, scratch + offset, buf->data_len)) {
            return NULL;
        }
        offset += buf->data_len;
    }
    return scratch;
}

/* Writes behind the destination's data, which has the space; false where that is unreachable. */
static bool target_write(const struct doca_task *task, const uint8_t *bytes, size_t size) {
    for (const struct doca_buf *buf = task->target; buf != NULL && size > 0; buf = buf->next) {
        size_t space = buf_free_space(buf), piece = size < space ? size : space;
        uint8_t *end = buf->data + buf->data_len;
        if (!buf->mmap->imported) {
            memmove(local_address(buf->mmap, end), bytes, piece);
        } else if (!export_write(&buf->mmap->descriptor, end, bytes, piece)) {
            return false;
        }
        bytes += piece;
        size -= piece;
    }
    return true;
}

/* ---- One task ------------------------------------------------------------------------------------------------- */

static bool target_writable(const struct doca_task *task) {
    for (const struct doca_buf *buf = task->target; buf != NULL; buf = buf->next) {
        uint32_t needed = buf->mmap->imported ? DOCA_ACCESS_FLAG_PCI_READ_WRITE : DOCA_ACCESS_FLAG_LOCAL_READ_WRITE;
        if ((buf->mmap->access & needed) == 0) {
            return false;
        }
    }
    return true;
}

const char *task_refusal(const struct doca_task *task) {
    const struct doca_ctx *ctx = task->ctx;
    const struct settings *settings = &ctx->dev->info.settings;
    uint64_t bytes_max = settings->buf_bytes_max[ctx->engine];
    size_t size = source_size(task);
    if (buf_list_length(task->source) > settings->buf_list_max ||
        buf_list_length(task->target) > settings->buf_list_max) {
        return "a list has more bufs than the engine takes";
    }
    if (size == 0) {
        return "the source has no data; its data length was not set";
    }
    if (size > bytes_max) {
        return "the source has more bytes than the engine takes";
    }
    if (ctx->engine == ENGINE_DECOMPRESS && target_length(task) > bytes_max) {
        return "the destination's buf is larger than the engine takes";
    }
    return target_writable(task) ? NULL : "the destination's mmap does not permit to write";
}

static const char *memcpy_run(struct doca_task *task, const uint8_t *source, size_t size) {
    if (target_space(task) < size) {
        return "the destination has no space for the source's data";
    }
    task->produced = size;
    return target_write(task, source, size) ? NULL : "the destination is out of reach: its exporter or export is gone";
}

static const char *decompress_run(struct doca_task *task, const uint8_t *source, size_t size) {
    struct doca_ctx *ctx = task->ctx;
    const struct doca_buf *target = task->target;
    size_t space = target_space(task);
    bool direct = target->next == NULL && !target->mmap->imported;
    uint8_t *plain = direct ? local_address(target->mmap, target->data + target->data_len)
                            : scratch_reserve(&ctx->target_scratch, &ctx->target_scratch_size, space + 1);
    if (plain == NULL || !codec_decompress(task, source, size, plain, space)) {
        return "the stream is damaged, is followed by other bytes, or does not fit into the destination";
    }
    return direct || target_write(task, plain, task->produced) ? NULL : "the destination is out of reach";
}

/* Does the task's work. One that is to fail sees the first half of its source, so that what it leaves is of no use. */
static void task_run(struct doca_task *task) {
    struct doca_ctx *ctx = task->ctx;
    task->produced = 0;
    const char *failure = task_refusal(task);
    if (failure == NULL) {
        size_t size = source_size(task);
        const uint8_t *source = source_view(task, size);
        size = task->fault ? size / 2 : size;
        failure = source == NULL                     ? "the source is out of reach: its exporter or export is gone"
                  : ctx->engine == ENGINE_DECOMPRESS ? decompress_run(task, source, size)
                                                     : memcpy_run(task, source, size);
    }
    if (task->fault) {
        failure = "DOCA_EMULATOR_FAULT says so";
    }
    task->status = failure == NULL ? DOCA_SUCCESS : DOCA_ERROR_IO_FAILED;
    if (failure != NULL) {
        emulator_log(DOCA_LOG_LEVEL_WARNING, "a %s task failed: %s", ctx->engine == ENGINE_DMA ? "DMA" : "decompress",
                     failure);
    }
}

/* When this task completes, by the model. */
static uint64_t task_time(const struct doca_task *task) {
    struct doca_dev *dev = task->ctx->dev;
    const struct settings *settings = &dev->info.settings;
    double rate = settings->bytes_per_second[task->ctx->engine];
    uint64_t takes = rate > 0 ? (uint64_t)((double)task->produced / rate * 1e9) : 0, now = now_ns();
    pthread_mutex_lock(&dev->lock);
    uint64_t *busy_until = &dev->busy_until[task->ctx->engine];
    *busy_until = (*busy_until > now ? *busy_until : now) + takes;
    uint64_t done_at = *busy_until + settings->latency_ns;
    pthread_mutex_unlock(&dev->lock);
    return done_at;
}

/* ---- The thread ----------------------------------------------------------------------------------------------- */

/* Moves to 'done' what has had its time, under the lock. */
static void finishing_report(struct doca_ctx *ctx) {
    bool any = false;
    for (uint64_t now = now_ns(); ctx->finishing.count > 0 && ctx->finishing.first->done_at <= now; any = true) {
        queue_add(&ctx->done, queue_take(&ctx->finishing, 0));
    }
    if (any && ctx->pe->armed) {
        pe_notify(ctx->pe, ctx);
    }
}

static void queued_work(struct doca_ctx *ctx) {
    bool ordered = ctx->dev->info.settings.reorder_seed == 0;
    uint32_t index = ordered ? 0 : (uint32_t)(engine_random(&ctx->random) % ctx->queued.count);
    struct doca_task *task = queue_take(&ctx->queued, index);
    if (task->hang) {
        return; /* in flight for ever, and its context never idle again */
    }
    bool flushed = ctx->flushing;
    pthread_mutex_unlock(&ctx->pe->lock);
    if (flushed) {
        task->status = ctx->dev->info.settings.flush_status;
        task->produced = 0;
    } else {
        task_run(task);
    }
    task->done_at = task_time(task);
    pthread_mutex_lock(&ctx->pe->lock);
    if (task->status != DOCA_SUCCESS && (ctx->engine == ENGINE_DMA || ctx->dev->info.settings.decompress_error_stops)) {
        ctx->flushing = true;
    }
    queue_add(&ctx->finishing, task);
}

static void *engine_thread(void *argument) {
    struct doca_ctx *ctx = argument;
    pthread_mutex_lock(&ctx->pe->lock);
    for (;;) {
        finishing_report(ctx);
        if (ctx->queued.count > 0) {
            queued_work(ctx);
        } else if (ctx->finishing.count > 0) {
            uint64_t until = ctx->finishing.first->done_at;
            struct timespec time = {.tv_sec = (time_t)(until / NS_PER_SECOND),
                                    .tv_nsec = (long)(until % NS_PER_SECOND)};
            pthread_cond_timedwait(&ctx->wake, &ctx->pe->lock, &time);
        } else if (ctx->quit) {
            break;
        } else {
            pthread_cond_wait(&ctx->wake, &ctx->pe->lock);
        }
    }
    pthread_mutex_unlock(&ctx->pe->lock);
    return NULL;
}

bool engine_start(struct doca_ctx *ctx) {
    pthread_condattr_t monotonic;
    sigset_t all, before;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&ctx->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    /* Signals are for the program's threads, but for what comes of memory that is touched here and would be pinned. */
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&ctx->thread, NULL, engine_thread, ctx);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        pthread_cond_destroy(&ctx->wake);
        return false;
    }
    pthread_setname_np(ctx->thread, ctx->engine == ENGINE_DMA ? "doca-dma" : "doca-compress");
    return true;
}

void engine_end(struct doca_ctx *ctx) {
    pthread_mutex_lock(&ctx->pe->lock);
    ctx->quit = true;
    pthread_cond_signal(&ctx->wake);
    pthread_mutex_unlock(&ctx->pe->lock);
    pthread_join(ctx->thread, NULL);
    pthread_cond_destroy(&ctx->wake);
    free(ctx->source_scratch);
    free(ctx->target_scratch);
    ctx->source_scratch = ctx->target_scratch = NULL;
    ctx->source_scratch_size = ctx->target_scratch_size = 0;
}
