/* SPDX-License-Identifier: Apache-2.0 */
/*
 * worker.c - the thread behind a context, which works its tasks off
 *
 * Time is a model laid over that: the accelerators of one device do one task after the other at their throughput, and
 * each completion comes a latency later. A task whose work took less than that is held until its time; one whose work
 * took longer, since a CPU is no card, completes as soon as it can.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "emulator.h"

#define NS_PER_SECOND 1000000000ull

uint64_t worker_random(uint64_t *state) {
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

/* ---- One task ------------------------------------------------------------------------------------------------- */

static size_t target_space(const struct doca_task *task) {
    const struct doca_buf *buf = task->target;
    return (size_t)(buf->head + buf->len - (buf->data + buf->data_len));
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

/* Returns the source's bytes: where they are if they can be read there, else copied. NULL: unreachable. */
static const uint8_t *source_view(const struct doca_task *task) {
    struct doca_ctx *ctx = task->ctx;
    const struct doca_buf *buf = task->source;
    if (!buf->mmap->imported) {
        return local_address(buf->mmap, buf->data);
    }
    uint8_t *scratch = scratch_reserve(&ctx->source_scratch, &ctx->source_scratch_size, buf->data_len);
    bool good = scratch != NULL && export_read(&buf->mmap->descriptor, buf->data, scratch, buf->data_len);
    return good ? scratch : NULL;
}

/* Writes behind the destination's data, which has the space; false where that is unreachable. */
static bool target_write(const struct doca_task *task, const uint8_t *bytes, size_t size) {
    const struct doca_buf *buf = task->target;
    uint8_t *end = buf->data + buf->data_len;
    if (buf->mmap->imported) {
        return export_write(&buf->mmap->descriptor, end, bytes, size);
    }
    memmove(local_address(buf->mmap, end), bytes, size);
    return true;
}

/* Whether the accelerator takes such a task: its source has data, neither side is too large, and it may write. */
static bool task_taken(const struct doca_task *task) {
    const struct doca_ctx *ctx = task->ctx;
    const struct doca_mmap *mmap = task->target->mmap;
    uint64_t bytes_max = ctx->dev->info.settings.buf_bytes_max[ctx->accelerator];
    uint32_t needed = mmap->imported ? DOCA_ACCESS_FLAG_PCI_READ_WRITE : DOCA_ACCESS_FLAG_LOCAL_READ_WRITE;
    return task->source->data_len > 0 && task->source->data_len <= bytes_max &&
           (ctx->accelerator != DECOMPRESSION || task->target->len <= bytes_max) && (mmap->access & needed) != 0;
}

static bool copy_run(struct doca_task *task, const uint8_t *source, size_t size) {
    task->produced = size;
    return target_space(task) >= size && target_write(task, source, size);
}

static bool decompress_run(struct doca_task *task, const uint8_t *source, size_t size) {
    struct doca_ctx *ctx = task->ctx;
    const struct doca_buf *target = task->target;
    size_t space = target_space(task);
    bool direct = !target->mmap->imported;
    uint8_t *plain = direct ? local_address(target->mmap, target->data + target->data_len)
                            : scratch_reserve(&ctx->target_scratch, &ctx->target_scratch_size, space + 1);
    return plain != NULL && codec_decompress(task, source, size, plain, space) &&
           (direct || target_write(task, plain, task->produced));
}

/* Does the task's work. One that is to fail sees the first half of its source, so that what it leaves is of no use. */
static void task_run(struct doca_task *task) {
    const uint8_t *source = task_taken(task) ? source_view(task) : NULL;
    size_t size = task->fault ? task->source->data_len / 2 : task->source->data_len;
    bool good = source != NULL && (task->ctx->accelerator == DECOMPRESSION ? decompress_run(task, source, size)
                                                                           : copy_run(task, source, size));
    task->status = good && !task->fault ? DOCA_SUCCESS : DOCA_ERROR_IO_FAILED;
}

static uint64_t task_time(const struct doca_task *task) {
    struct doca_dev *dev = task->ctx->dev;
    const struct settings *settings = &dev->info.settings;
    double rate = settings->bytes_per_second[task->ctx->accelerator];
    uint64_t takes = rate > 0 ? (uint64_t)((double)task->produced / rate * 1e9) : 0, now = now_ns();
    pthread_mutex_lock(&dev->lock);
    uint64_t *busy_until = &dev->busy_until[task->ctx->accelerator];
    *busy_until = (*busy_until > now ? *busy_until : now) + takes;
    uint64_t done_at = *busy_until + settings->latency_ns;
    pthread_mutex_unlock(&dev->lock);
    return done_at;
}

/* ---- The thread ----------------------------------------------------------------------------------------------- */

/* Moves to 'done' what has had its time, under the lock. */
static void finishing_report(struct doca_ctx *ctx) {
    for (uint64_t now = now_ns(); ctx->finishing.count > 0 && ctx->finishing.first->done_at <= now;) {
        queue_add(&ctx->done, queue_take(&ctx->finishing, 0));
    }
}

bool failure_stops(const struct doca_ctx *ctx) {
    return ctx->accelerator == COPY || ctx->dev->info.settings.decompress_error_stops;
}

static void queued_work(struct doca_ctx *ctx) {
    bool ordered = ctx->dev->info.settings.reorder_seed == 0;
    uint32_t index = ordered ? 0 : (uint32_t)(worker_random(&ctx->random) % ctx->queued.count);
    struct doca_task *task = queue_take(&ctx->queued, index);
    if (task->hang) {
        return; /* in flight for ever, and its context never idle again */
    }
    bool flushed = ctx->flushing;
    pthread_mutex_unlock(&ctx->pe->lock);
    task->produced = 0;
    task->status = DOCA_ERROR_IO_FAILED;
    if (!flushed) {
        task_run(task);
    }
    task->done_at = task_time(task);
    pthread_mutex_lock(&ctx->pe->lock);
    if (task->status != DOCA_SUCCESS && failure_stops(ctx)) {
        ctx->flushing = true;
    }
    queue_add(&ctx->finishing, task);
}

static void *worker(void *argument) {
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

bool worker_start(struct doca_ctx *ctx) {
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
    int error = pthread_create(&ctx->thread, NULL, worker, ctx);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        pthread_cond_destroy(&ctx->wake);
        return false;
    }
    pthread_setname_np(ctx->thread, ctx->accelerator == COPY ? "doca-dma" : "doca-compress");
    return true;
}

void worker_end(struct doca_ctx *ctx) {
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
