/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doca.c - the backend of a BlueField: its accelerators, Compress and DMA, through DOCA
 *
 * A channel has a progress engine, one context, and the objects of the context: mmaps of the buffers, bufs, tasks. The
 * thread that uses the channel creates all of them when it opens the channel.
 *
 * Work is split into pieces for the accelerator: one for a stream, several for a copy above the device's limit. Pieces
 * wait for a free task, run, and end in their callback. The channel's thread does the work that the accelerator does
 * not support (another codec, a stream above the limit): such a record is slow to load, but not a miss.
 *
 * Failure of a piece. DOCA does not report whether the accelerator or the data is at fault. A DMA context stops after a
 * failure, and all pieces in flight fail (pe_task_error of DOCA's samples). So only the piece that failed first has
 * used an attempt, the others are victims. When all have ended, the context is created again, and all pieces restart. A
 * stream has one attempt, then the CPU decodes it and finds out whether it is corrupt. A copy has COPY_ATTEMPTS, then
 * it fails with SS_DEVICE: only the accelerator reaches its memory. After RESTARTS_MAX failures of the context without
 * a success in between, its pieces fail; new work tries the context again.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <doca_buf_inventory.h>
#include <doca_version.h>

#include "backends/backend.h"
#include "backends/doca_context.h"

/* Most works on one channel at a time. On BlueField, DMA needs about this number in flight for its full rate. */
enum { IN_FLIGHT_MAX = 32 };
enum { STREAM_ATTEMPTS = 1, COPY_ATTEMPTS = 3, RESTARTS_MAX = 8 };

struct device {
    pthread_mutex_t lock; /* for every call about the device that is not limited to one channel */
    struct doca_dev *dev;
    uint32_t kinds;
    uint64_t bytes_max[SS_DOCA_KIND_COUNT];
    uint32_t in_flight_max;
    uint32_t imports; /* takes what was exported */
    char name[96];
};

struct piece {
    struct channel *channel;
    struct piece *next; /* in a list */
    struct ss_work *work;
    enum ss_doca_kind kind;
    const uint8_t *source;
    uint8_t *target;
    size_t source_size;
    size_t target_size;
    uint32_t attempts; /* that failed */
    struct doca_buf *source_buf;
    struct doca_buf *target_buf;
    struct ss_doca_task tasks[SS_DOCA_KIND_COUNT];
};

struct channel {
    struct device *device;
    enum ss_stage stage;
    struct ss_doca_context context;
    struct doca_buf_inventory *inventory;
    struct doca_mmap *source; /* of the stage's buffers; NULL: it has none there */
    struct doca_mmap *target;
    struct piece *pieces;
    uint32_t piece_count;
    struct piece *free_pieces;
    struct piece *failed; /* pieces to be started again */
    struct ss_work *waiting_first;
    struct ss_work *waiting_last;           /* works whose pieces are not all created */
    uint32_t in_flight;                     /* pieces */
    uint32_t suspect;                       /* a piece failed: the context may have stopped */
    uint32_t restarts;                      /* without a success between */
    uint32_t own_crc32[SS_DOCA_KIND_COUNT]; /* the accelerator's CRC-32 is another one: the CPU computes it */
    uint32_t completed;
};

enum use {
    USE_CUT,    /* bytes already in pieces */
    USE_PIECES, /* pieces not ended */
    USE_RESULT, /* result of the ended pieces */
    USE_NEXT    /* the next waiting work */
};

/* ---- The end of a piece, and of a work ----------------------------------------------------------------------- */

static void work_end(struct channel *channel, struct ss_work *work) {
    work->result = (enum ss_result)work->backend_use[USE_RESULT];
    channel->completed++;
    work->complete(work);
}

static void piece_release_bufs(struct piece *piece) {
    if (piece->source_buf != NULL) {
        (void)doca_buf_dec_refcount(piece->source_buf, NULL);
    }
    if (piece->target_buf != NULL) {
        (void)doca_buf_dec_refcount(piece->target_buf, NULL);
    }
    piece->source_buf = NULL;
    piece->target_buf = NULL;
}

static void piece_end(struct piece *piece, enum ss_result result) {
    struct channel *channel = piece->channel;
    struct ss_work *work = piece->work;
    piece_release_bufs(piece);
    piece->work = NULL;
    piece->next = channel->free_pieces;
    channel->free_pieces = piece;
    if (work->backend_use[USE_RESULT] == SS_OK) {
        work->backend_use[USE_RESULT] = result;
    }
    work->backend_use[USE_PIECES]--;
    if (work->backend_use[USE_PIECES] == 0 && work->backend_use[USE_CUT] == work->source_size) {
        work_end(channel, work);
    }
}

/* Does work on the CPU that the accelerator does not support, or failed to do. */
static enum ss_result decompress_here(const struct ss_work *work) {
    enum ss_result result =
        ss_decompress(work->codec, work->source, work->source_size, work->target, work->target_size);
    if (result == SS_OK && ss_crc32(0, work->target, work->target_size) != work->decoded_crc32) {
        result = SS_CHECKSUM;
    }
    return result;
}

/*
 * Compares the accelerator's CRC-32 of the decoded bytes. DOCA documents the usual CRC-32 only for compression. So the
 * CPU checks each mismatch; if the CPU disagrees, the accelerator's CRC-32 is not used again.
 */
static enum ss_result check_decoded(struct piece *piece) {
    struct channel *channel = piece->channel;
    const struct ss_work *work = piece->work;
    if (!channel->own_crc32[piece->kind] &&
        ss_doca_task_crc32(piece->kind, &piece->tasks[piece->kind]) == work->decoded_crc32) {
        return SS_OK;
    }
    if (ss_crc32(0, work->target, work->target_size) != work->decoded_crc32) {
        return SS_CHECKSUM;
    }
    channel->own_crc32[piece->kind] = 1;
    return SS_OK;
}

static void piece_give_up(struct piece *piece) {
    piece_end(piece, piece->kind == SS_DOCA_COPY ? SS_DEVICE : decompress_here(piece->work));
}

/* Puts a failed piece into the list to restart; it has used an attempt unless another piece's failure is the cause. */
static void piece_failed(struct piece *piece) {
    struct channel *channel = piece->channel;
    piece_release_bufs(piece);
    if (!channel->suspect) {
        channel->suspect = 1;
        piece->attempts++;
    }
    piece->next = channel->failed;
    channel->failed = piece;
}

void ss_doca_task_ended(void *user, int failed) {
    struct piece *piece = user;
    struct channel *channel = piece->channel;
    size_t written = 0;
    channel->in_flight--;
    (void)doca_buf_get_data_len(piece->target_buf, &written);
    if (failed) {
        (void)ss_doca_result(doca_task_get_status(piece->tasks[piece->kind].task), "a task");
    }
    if (failed || written != piece->target_size) {
        piece_failed(piece);
        return;
    }
    channel->restarts = 0;
    piece_end(piece, piece->kind == SS_DOCA_COPY ? SS_OK : check_decoded(piece));
}

/* ---- The start of a piece ------------------------------------------------------------------------------------ */

/* Which sides of a stage's work are in the pipeline's buffers; the others are in memory of the host. */
static int reads_buffer(enum ss_stage stage) {
    return stage != SS_STAGE_QUANTIZE;
}

static int writes_buffer(enum ss_stage stage) {
    return stage != SS_STAGE_DMA;
}

static doca_error_t piece_take_bufs(struct piece *piece) {
    struct channel *channel = piece->channel;
    struct doca_mmap *source = reads_buffer(channel->stage) ? channel->source : piece->work->memory;
    struct doca_mmap *target = writes_buffer(channel->stage) ? channel->target : piece->work->memory;
    doca_error_t error = doca_buf_inventory_buf_get_by_data(channel->inventory, source, (void *)piece->source,
                                                            piece->source_size, &piece->source_buf);
    if (error == DOCA_SUCCESS) {
        error = doca_buf_inventory_buf_get_by_addr(channel->inventory, target, piece->target, piece->target_size,
                                                   &piece->target_buf);
    }
    return error;
}

/* Starts a piece; on failure, adds it to the failed pieces. */
static void piece_start(struct piece *piece) {
    struct channel *channel = piece->channel;
    struct ss_doca_task *task = &piece->tasks[piece->kind];
    doca_error_t error = channel->context.ctx != NULL ? piece_take_bufs(piece) : DOCA_ERROR_BAD_STATE;
    if (error == DOCA_SUCCESS) {
        error = ss_doca_task_prepare(&channel->context, piece->kind, piece->source_buf, piece->target_buf, piece, task);
    }
    if (error == DOCA_SUCCESS) {
        error = doca_task_submit(task->task);
    }
    if (error == DOCA_SUCCESS) {
        channel->in_flight++;
        return;
    }
    (void)ss_doca_result(error, "starting a task");
    piece_failed(piece);
}

static void work_cut(struct channel *channel, struct ss_work *work) {
    struct piece *piece = channel->free_pieces;
    channel->free_pieces = piece->next;
    uint64_t offset = work->backend_use[USE_CUT];
    piece->work = work;
    piece->attempts = 0;
    piece->source = work->source + offset;
    piece->target = work->target + offset;
    if (channel->stage == SS_STAGE_DECOMPRESS) {
        piece->kind = work->codec == SS_CODEC_LZ4 ? SS_DOCA_LZ4 : SS_DOCA_DEFLATE;
        piece->source_size = work->source_size;
        piece->target_size = work->target_size;
    } else {
        uint64_t left = work->source_size - offset;
        uint64_t most = channel->device->bytes_max[SS_DOCA_COPY];
        piece->kind = SS_DOCA_COPY;
        piece->source_size = piece->target_size = left < most ? left : most;
    }
    work->backend_use[USE_CUT] += piece->source_size;
    work->backend_use[USE_PIECES]++;
    piece_start(piece);
}

static void channel_pump(struct channel *channel) {
    while (channel->waiting_first != NULL && channel->free_pieces != NULL && !channel->suspect) {
        struct ss_work *work = channel->waiting_first;
        if (work->backend_use[USE_RESULT] == SS_OK) {
            work_cut(channel, work);
        } else {
            work->backend_use[USE_CUT] = work->source_size; /* the rest is of no use */
        }
        if (work->backend_use[USE_CUT] < work->source_size) {
            continue;
        }
        channel->waiting_first = (struct ss_work *)(uintptr_t)work->backend_use[USE_NEXT];
        if (work->backend_use[USE_PIECES] == 0) {
            work_end(channel, work);
        }
    }
}

/* ---- Failure ------------------------------------------------------------------------------------------------- */

/* Creates the context again. Nothing is in flight. */
static enum ss_result channel_restart(struct channel *channel) {
    for (uint32_t i = 0; i < channel->piece_count; i++) {
        for (int kind = 0; kind < SS_DOCA_KIND_COUNT; kind++) {
            ss_doca_task_release(&channel->pieces[i].tasks[kind]);
        }
    }
    pthread_mutex_lock(&channel->device->lock);
    (void)ss_doca_context_close(&channel->context); /* a context that does not stop is abandoned */
    enum ss_result result = ss_doca_context_open(&channel->context);
    pthread_mutex_unlock(&channel->device->lock);
    return result;
}

static struct piece *failed_pop(struct channel *channel) {
    struct piece *piece = channel->failed;
    channel->failed = piece->next;
    return piece;
}

/* Checks after a failure whether the context still runs, and restarts it once all pieces have ended. */
static void channel_recover(struct channel *channel) {
    if (!ss_doca_context_runs(&channel->context)) {
        if (channel->in_flight > 0) {
            return; /* the victims have not all ended */
        }
        channel->restarts++;
        if (channel_restart(channel) != SS_OK || channel->restarts > RESTARTS_MAX) {
            channel->restarts = 0;
            while (channel->failed != NULL) {
                piece_give_up(failed_pop(channel));
            }
        }
    }
    channel->suspect = 0;
    while (channel->failed != NULL && !channel->suspect) {
        struct piece *piece = failed_pop(channel);
        if (piece->attempts >= (piece->kind == SS_DOCA_COPY ? COPY_ATTEMPTS : STREAM_ATTEMPTS)) {
            piece_give_up(piece);
        } else {
            piece_start(piece);
        }
    }
}

/* ---- Channels ------------------------------------------------------------------------------------------------ */

static uint32_t channel_progress(void *argument) {
    struct channel *channel = argument;
    channel->completed = 0;
    while (doca_pe_progress(channel->context.pe)) {
    }
    if (channel->suspect) {
        channel_recover(channel);
    }
    channel_pump(channel);
    return channel->completed;
}

static enum ss_result channel_add(struct channel *channel, struct ss_work *work) {
    memset(work->backend_use, 0, sizeof work->backend_use);
    if (channel->waiting_first == NULL) {
        channel->waiting_first = work;
    } else {
        channel->waiting_last->backend_use[USE_NEXT] = (uintptr_t)work;
    }
    channel->waiting_last = work;
    channel_pump(channel);
    return SS_OK;
}

static int device_takes(const struct device *device, const struct ss_work *work) {
    enum ss_doca_kind kind = work->codec == SS_CODEC_LZ4 ? SS_DOCA_LZ4 : SS_DOCA_DEFLATE;
    return (work->codec == SS_CODEC_DEFLATE || work->codec == SS_CODEC_LZ4) && (device->kinds >> kind & 1) != 0 &&
           work->source_size <= device->bytes_max[kind] && work->target_size <= device->bytes_max[kind];
}

static enum ss_result channel_decompress(void *argument, struct ss_work *work) {
    struct channel *channel = argument;
    if (device_takes(channel->device, work)) {
        return channel_add(channel, work);
    }
    work->result = decompress_here(work);
    work->complete(work);
    return SS_OK;
}

static enum ss_result channel_copy(void *argument, struct ss_work *work) {
    return channel_add(argument, work);
}

static enum ss_result register_range(struct device *device, const struct ss_backend_range *range,
                                     struct doca_mmap **mmap) {
    if (range->data == NULL) {
        return SS_OK;
    }
    return ss_doca_register(device->dev, range->data, range->size, -1, DOCA_ACCESS_FLAG_LOCAL_READ_WRITE, 0, mmap);
}

static enum ss_result channel_create_pieces(struct channel *channel) {
    channel->piece_count = channel->context.tasks_max;
    channel->pieces = calloc(channel->piece_count, sizeof *channel->pieces);
    if (channel->pieces == NULL) {
        return SS_NO_MEMORY;
    }
    for (uint32_t i = 0; i < channel->piece_count; i++) {
        channel->pieces[i].channel = channel;
        channel->pieces[i].next = channel->free_pieces;
        channel->free_pieces = &channel->pieces[i];
    }
    enum ss_result result = ss_doca_result(
        doca_buf_inventory_create(2 * (size_t)channel->piece_count, &channel->inventory), "doca_buf_inventory_create");
    return result == SS_OK ? ss_doca_result(doca_buf_inventory_start(channel->inventory), "doca_buf_inventory_start")
                           : result;
}

static enum ss_result channel_create(struct channel *channel, const struct ss_backend_channel *setup) {
    struct device *device = channel->device;
    int decompresses = setup->stage == SS_STAGE_DECOMPRESS;
    enum ss_result result = register_range(device, &setup->source, &channel->source);
    if (result == SS_OK) {
        result = register_range(device, &setup->target, &channel->target);
    }
    if (result == SS_OK) {
        result = ss_doca_result(doca_pe_create(&channel->context.pe), "doca_pe_create");
    }
    if (result == SS_OK) {
        uint32_t copies = 1U << SS_DOCA_COPY;
        channel->context.device = device->dev;
        channel->context.kinds = decompresses ? device->kinds & ~copies : copies;
        channel->context.tasks_max = decompresses ? device->in_flight_max : IN_FLIGHT_MAX;
        result = ss_doca_context_open(&channel->context);
    }
    return result == SS_OK ? channel_create_pieces(channel) : result;
}

static void channel_free(struct channel *channel) {
    for (uint32_t i = 0; i < channel->piece_count && channel->pieces != NULL; i++) {
        for (int kind = 0; kind < SS_DOCA_KIND_COUNT; kind++) {
            ss_doca_task_release(&channel->pieces[i].tasks[kind]);
        }
    }
    (void)ss_doca_context_close(&channel->context);
    if (channel->context.pe != NULL) {
        (void)doca_pe_destroy(channel->context.pe);
    }
    if (channel->inventory != NULL) {
        (void)doca_buf_inventory_destroy(channel->inventory);
    }
    if (channel->source != NULL) {
        (void)doca_mmap_destroy(channel->source);
    }
    if (channel->target != NULL) {
        (void)doca_mmap_destroy(channel->target);
    }
    free(channel->pieces);
    free(channel);
}

static enum ss_result channel_open(void *argument, const struct ss_backend_channel *setup, void **channel_out) {
    struct device *device = argument;
    struct channel *channel = calloc(1, sizeof *channel);
    if (channel == NULL) {
        return SS_NO_MEMORY;
    }
    channel->device = device;
    channel->stage = setup->stage;
    pthread_mutex_lock(&device->lock);
    enum ss_result result = channel_create(channel, setup);
    if (result == SS_OK) {
        *channel_out = channel;
    } else {
        channel_free(channel);
    }
    pthread_mutex_unlock(&device->lock);
    return result;
}

static void channel_close(void *argument) {
    struct channel *channel = argument;
    struct device *device = channel->device;
    pthread_mutex_lock(&device->lock);
    channel_free(channel);
    pthread_mutex_unlock(&device->lock);
}

/* ---- Memory -------------------------------------------------------------------------------------------------- */

/*
 * Registered memory is one mmap for all channels. The pipeline's callers register and release it on their own threads
 * while channels use other mmaps, so it is the only kind of object here that must be thread-safe.
 */
static enum ss_result memory_open(void *argument, const struct ss_memory *memory, void **handle, uint8_t **address) {
    struct device *device = argument;
    struct doca_mmap *mmap = NULL;
    enum ss_result result;
    pthread_mutex_lock(&device->lock);
    if (memory->kind == SS_MEMORY_LOCAL) {
        result = ss_doca_register(device->dev, memory->address, memory->size, -1, DOCA_ACCESS_FLAG_LOCAL_READ_WRITE, 1,
                                  &mmap);
    } else {
        result = ss_doca_import(device->dev, memory->descriptor, memory->descriptor_size, &mmap);
    }
    pthread_mutex_unlock(&device->lock);
    if (result == SS_OK) {
        *handle = mmap;
        *address = memory->address;
    }
    return result;
}

static void memory_close(void *argument, void *handle) {
    struct device *device = argument;
    pthread_mutex_lock(&device->lock);
    (void)doca_mmap_destroy(handle);
    pthread_mutex_unlock(&device->lock);
}

/* ---- The device ---------------------------------------------------------------------------------------------- */

static int is_emulated(void) {
    return strstr(doca_version_runtime(), "emulator") != NULL;
}

static char description_text[64];

static void description_write(void) {
    const char *version = doca_version_runtime();
    (void)snprintf(description_text, sizeof description_text, "DOCA %s%.*s", is_emulated() ? "emulator " : "",
                   (int)strcspn(version, "-"), version);
}

static const char *description(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, description_write);
    return description_text;
}

static enum ss_result device_open(const char *name, uint32_t queue_depth, void **device_out) {
    struct device *device = calloc(1, sizeof *device);
    if (device == NULL) {
        return SS_NO_MEMORY;
    }
    enum ss_result result = ss_doca_open(name, SS_DOCA_WORK, &device->dev);
    if (result != SS_OK) {
        free(device);
        return result;
    }
    pthread_mutex_init(&device->lock, NULL);
    ss_doca_name(device->dev, device->name, sizeof device->name);
    device->kinds = ss_doca_kinds(device->dev, device->bytes_max);
    device->in_flight_max = queue_depth < IN_FLIGHT_MAX ? queue_depth : IN_FLIGHT_MAX;
    uint8_t imports = 0;
    (void)doca_mmap_cap_is_create_from_export_pci_supported(doca_dev_as_devinfo(device->dev), &imports);
    device->imports = imports;
    *device_out = device;
    return SS_OK;
}

static void device_close(void *argument) {
    struct device *device = argument;
    (void)doca_dev_close(device->dev);
    pthread_mutex_destroy(&device->lock);
    free(device);
}

static const char *device_name(void *argument) {
    const struct device *device = argument;
    return device->name;
}

static struct ss_backend_capabilities capabilities(void *argument) {
    const struct device *device = argument;
    return (struct ss_backend_capabilities){
        .in_flight_max = device->in_flight_max,
        .checks_decoded = 1,
        .memory_kinds = 1U << SS_MEMORY_LOCAL | (device->imports ? 1U << SS_MEMORY_EXPORTED : 0),
    };
}

const struct ss_backend ss_backend_doca = {
    .name = "doca",
    .description = description,
    .emulated = is_emulated,
    .open = device_open,
    .close = device_close,
    .device_name = device_name,
    .capabilities = capabilities,
    .channel_open = channel_open,
    .channel_close = channel_close,
    .memory_open = memory_open,
    .memory_close = memory_close,
    .decompress = channel_decompress,
    .deliver = channel_copy,
    .collect = channel_copy,
    .progress = channel_progress,
};
