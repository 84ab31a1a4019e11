/* SPDX-License-Identifier: Apache-2.0 */
/*
 * emulator.h - what the parts of the emulator share: settings, misuse, ownership, and the objects behind the handles
 *
 * There are three kinds of failure. Errors that DOCA documents return its error code. Errors of its accelerators fail
 * the task at its completion. Undefined behaviour - a task freed in flight, a context used by two threads - ends the
 * process with a message that names the rule, so that a test finds it reliably.
 */
#ifndef DOCA_EMULATOR_H
#define DOCA_EMULATOR_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "doca_buf.h"
#include "doca_buf_inventory.h"
#include "doca_ctx.h"
#include "doca_dev.h"
#include "doca_dma.h"
#include "doca_error.h"
#include "doca_mmap.h"
#include "doca_pe.h"
#include "doca_types.h"

/* What a call does not do: it returns the error that DOCA documents for the condition. */
#define REFUSE_IF(condition, error)                                                                                    \
    do {                                                                                                               \
        if (condition) {                                                                                               \
            return error;                                                                                              \
        }                                                                                                              \
    } while (0)

/* ---- Settings: settings.c ------------------------------------------------------------------------------------- */

enum accelerator { DECOMPRESSION, COPY, ACCELERATOR_COUNT };
enum profile { PROFILE_BF3, PROFILE_BF2, PROFILE_NONE };
enum fault_repeat { FAULT_ONCE, FAULT_FROM, FAULT_EVERY };
enum { DEVICES_MAX = 8, FAULTS_MAX = 16 };

/* Fails task 'number' (from 1) of an accelerator: it alone, it and all after it, or each such one. */
struct fault {
    enum accelerator accelerator;
    enum fault_repeat repeat;
    uint64_t number;
    bool hang; /* it does not fail, it never ends */
};

struct settings {
    enum profile profile;
    char devices[DEVICES_MAX][DOCA_DEVINFO_PCI_ADDR_SIZE];
    uint32_t device_count;
    uint64_t buf_bytes_max[ACCELERATOR_COUNT];
    uint32_t tasks_max;
    double bytes_per_second[ACCELERATOR_COUNT]; /* 0: unlimited */
    uint64_t latency_ns;
    uint64_t register_ns_per_mib;
    struct fault faults[FAULTS_MAX];
    uint32_t fault_count;
    uint64_t reorder_seed; /* 0: tasks complete in order */
    bool decompress_error_stops;
    bool dmabuf_export;
};

/* settings_read() reads DOCA_EMULATOR_*. Ends the process where one of them is malformed, or is none that it knows. */
void settings_read(struct settings *settings);

/* ---- Misuse, and which thread owns what: owner.c -------------------------------------------------------------- */

/* misuse() ends the process: 'call' broke the rule that the rest says, as for printf. */
_Noreturn void misuse(const char *call, const char *rule, ...) __attribute__((format(printf, 2, 3)));

/*
 * The thread that owns an object: the first that used it for work, until that thread ends. One thread may prepare an
 * object and pass it to another before its first use; any thread may destroy it after its owner has ended.
 */
struct owner {
    _Atomic(struct thread *) thread;
};

/* owner_use() makes the caller the owner where there is none; owner_check() does not. Both end the process where
 * another thread, which still lives, owns it. */
void owner_use(struct owner *owner, const char *call, const char *object);
void owner_check(const struct owner *owner, const char *call, const char *object);
void owner_release(struct owner *owner);

/* ---- Devices: dev.c ------------------------------------------------------------------------------------------- */

struct doca_devinfo {
    struct settings settings;
    uint32_t index; /* in settings.devices */
};

struct doca_dev {
    struct doca_devinfo info;
    struct doca_dev *next;
    uint32_t open_count;   /* under the lock of dev.c */
    atomic_uint resources; /* mmaps and contexts that use it */
    pthread_mutex_t lock;  /* over what follows */
    uint64_t submitted[ACCELERATOR_COUNT];
    uint64_t busy_until[ACCELERATOR_COUNT]; /* ns, monotonic */
};

/* ---- Memory: mmap.c, export.c --------------------------------------------------------------------------------- */

/* What export_pci hands out. All of it describes one machine, so it is written in that machine's byte order. */
struct export_descriptor {
    uint8_t magic[8];
    uint32_t access;
    uint32_t reserved;
    uint64_t process;
    uint64_t address; /* what bufs of the range are asked for by */
    uint64_t size;
    uint64_t location;      /* where the range is in the exporting process */
    uint64_t token_address; /* there, 'token' is to be found for as long as the export lives */
    uint64_t token;
    uint32_t crc32; /* of all before it */
    uint32_t reserved_end;
};

struct doca_mmap {
    struct owner owner;
    bool thread_safe;
    bool started;
    bool dmabuf;
    bool imported;
    struct doca_dev *devices[DEVICES_MAX];
    uint32_t device_count;
    uint8_t *address; /* NULL: not set yet */
    size_t size;
    uint8_t *location; /* where the range is in this process; not of an imported one */
    void *map;         /* of a dmabuf: what to unmap */
    size_t map_size;
    uint32_t access;
    atomic_uint buf_count;
    struct export_descriptor descriptor; /* exported or imported */
    bool exported;
    uint64_t token; /* 0 once the export is over: read by importers, from other processes */
};

bool mmap_has_device(const struct doca_mmap *mmap, const struct doca_dev *dev);

/* export_fill() makes the descriptor of 'mmap'; false where the system has no random numbers. */
bool export_fill(struct doca_mmap *mmap);

/* export_parse() parses untrusted bytes; false if they are no descriptor. */
bool export_parse(const void *bytes, size_t size, struct export_descriptor *descriptor);

/* These move bytes out of and into the exporting process; false where it is gone, or its export is. 'address' is one of
 * the range. */
bool export_read(const struct export_descriptor *descriptor, const uint8_t *address, void *target, size_t size);
bool export_write(const struct export_descriptor *descriptor, uint8_t *address, const void *source, size_t size);

/* ---- Bufs: buf.c ---------------------------------------------------------------------------------------------- */

struct doca_buf {
    struct doca_buf_inventory *inventory;
    struct doca_mmap *mmap;
    struct doca_buf *next; /* while free, in the inventory */
    uint8_t *head;
    size_t len;
    uint8_t *data;
    size_t data_len;
    bool taken;
    bool counted;     /* by its mmap; one with thread safety may be gone before its bufs are */
    uint32_t sources; /* tasks in flight that read it */
    uint32_t targets; /* tasks in flight that write it: at most one */
};

struct doca_buf_inventory {
    struct owner owner;
    bool started;
    uint32_t count;
    uint32_t free_count;
    struct doca_buf *free;
    struct doca_buf elements[];
};

/* ---- Contexts, tasks, the progress engine: ctx.c, task.c, pe.c, worker.c, kinds.c ----------------------------- */

enum task_kind { TASK_DEFLATE, TASK_LZ4, TASK_KIND_COUNT, TASK_MEMCPY = 0 };
enum task_state { TASK_FREE, TASK_OURS, TASK_SUBMITTED };

struct doca_task {
    struct doca_ctx *ctx;
    struct doca_task *next;
    enum task_kind kind;
    enum task_state state; /* TASK_OURS: the program's */
    union doca_data user_data;
    const struct doca_buf *source;
    struct doca_buf *target;
    bool fault; /* this one is to fail */
    bool hang;  /* this one never ends */
    /* Fields that the worker sets. */
    doca_error_t status;
    size_t produced;
    uint32_t crc32;
    uint64_t done_at; /* ns, monotonic */
};

struct task_queue {
    struct doca_task *first;
    struct doca_task **last;
    uint32_t count;
};

void queue_clear(struct task_queue *queue);
void queue_add(struct task_queue *queue, struct doca_task *task);
struct doca_task *queue_take(struct task_queue *queue, uint32_t index);

/* Any completion callback; 'call' of its task type knows which. */
typedef void (*task_callback_t)(void);

struct task_type {
    void (*call)(task_callback_t callback, struct doca_task *task);
    task_callback_t completed;
    task_callback_t failed;
    uint32_t task_max; /* 0: not configured */
    struct doca_task *tasks;
    struct doca_task *free;
};

struct doca_ctx {
    enum accelerator accelerator;
    struct doca_dev *dev;
    struct doca_pe *pe;
    struct doca_ctx *next; /* of the same progress engine */
    enum doca_ctx_states state;
    struct task_type types[TASK_KIND_COUNT];
    size_t allocated;
    size_t in_flight;
    pthread_t thread;
    pthread_cond_t wake;
    /* Under the progress engine's lock. */
    struct task_queue queued;    /* the worker takes from here */
    struct task_queue finishing; /* worked off, but not before their time */
    struct task_queue done;      /* doca_pe_progress() takes from here */
    uint64_t random;
    bool flushing; /* what is queued fails without being looked at */
    bool quit;
    /* The worker's. */
    uint8_t *source_scratch;
    uint8_t *target_scratch;
    size_t source_scratch_size;
    size_t target_scratch_size;
};

struct doca_pe {
    struct owner owner;
    struct doca_ctx *contexts;
    uint32_t context_count;
    uint32_t turn;
    bool in_callback;
    pthread_mutex_t lock;
};

/* ctx_init() makes an idle context of 'dev'; ctx_destroy() is IN_USE unless it is idle. */
void ctx_init(struct doca_ctx *ctx, struct doca_dev *dev, enum accelerator accelerator);
doca_error_t ctx_destroy(struct doca_ctx *ctx, const char *call);
void ctx_owner_check(const struct doca_ctx *ctx, const char *call);
void ctx_owner_use(const struct doca_ctx *ctx, const char *call);

/* ctx_progress() reports one completion, or that the context is idle; false where there is nothing to report. */
bool ctx_progress(struct doca_ctx *ctx);

doca_error_t task_configure(struct doca_ctx *ctx, enum task_kind kind, task_callback_t completed,
                            task_callback_t failed, uint32_t task_max, const char *call);
doca_error_t task_allocate(struct doca_ctx *ctx, enum task_kind kind, const struct doca_buf *source,
                           struct doca_buf *target, union doca_data user_data, struct doca_task **task,
                           const char *call);

/* task_settled() ends the process while the task is in flight, or is none. */
void task_settled(const struct doca_task *task, const char *call);

/* task_complete() gives a task back to the program, by its callback. */
void task_complete(struct doca_task *task);

/* failure_stops() says whether a failure of this context's tasks stops it. */
bool failure_stops(const struct doca_ctx *ctx);

/* worker_start() starts the context's thread; false without one. worker_end() waits for its end. */
bool worker_start(struct doca_ctx *ctx);
void worker_end(struct doca_ctx *ctx);
uint64_t worker_random(uint64_t *state);

/* ---- Formats: codec.c ----------------------------------------------------------------------------------------- */

bool codec_has_lz4(void);

/*
 * codec_decompress() decodes the task's stream; false where it is damaged, does not fit, or is followed by other bytes.
 * Sets produced and crc32 of the task.
 */
bool codec_decompress(struct doca_task *task, const uint8_t *source, size_t size, uint8_t *target, size_t capacity);
uint32_t codec_crc32(const void *data, size_t size);

#endif /* DOCA_EMULATOR_H */
