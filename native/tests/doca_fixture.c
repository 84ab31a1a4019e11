/* SPDX-License-Identifier: Apache-2.0 */
/* doca_fixture.c - see doca_fixture.h */
#include "doca_fixture.h"

#include <signal.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include "zlib_reference.h"

enum { WAIT_MAX_SECONDS = 60 };

struct bench bench;
struct report reports[BUFS_MAX];
uint32_t report_count;
int reports_free_tasks = 1;
struct doca_task *kept;

extern char **environ;

static void settings_clear(void) {
    for (char **variable = environ; *variable != NULL;) {
        char name[64] = "";
        sscanf(*variable, "%63[^=]", name);
        if (strncmp(name, "DOCA_EMULATOR_", 14) == 0) {
            unsetenv(name);
            variable = environ;
        } else {
            variable++;
        }
    }
}

void settings(const char *name, ...) {
    va_list arguments;
    settings_clear();
    va_start(arguments, name);
    for (; name != NULL; name = va_arg(arguments, const char *)) {
        char variable[64];
        snprintf(variable, sizeof variable, "DOCA_EMULATOR_%s", name);
        setenv(variable, va_arg(arguments, const char *), 1);
    }
    va_end(arguments);
}

struct doca_dev *device_open(void) {
    struct doca_devinfo **list;
    struct doca_dev *dev;
    uint32_t count;
    OK(doca_devinfo_create_list(&list, &count));
    OK(doca_dev_open(list[0], &dev));
    OK(doca_devinfo_destroy_list(list));
    return dev;
}

static void note(struct doca_task *task, union doca_data user, uint32_t crc32) {
    CHECK(report_count < BUFS_MAX, "too many reports");
    reports[report_count++] =
        (struct report){.user_data = user.u64, .status = doca_task_get_status(task), .crc32 = crc32};
    if (reports_free_tasks) {
        doca_task_free(task);
    } else {
        kept = task;
    }
}

void note_deflate(struct doca_compress_task_decompress_deflate *task, union doca_data user, union doca_data context) {
    (void)context;
    note(doca_compress_task_decompress_deflate_as_task(task), user,
         doca_compress_task_decompress_deflate_get_crc_cs(task));
}

void note_block(struct doca_compress_task_decompress_lz4_block *task, union doca_data user, union doca_data context) {
    (void)context;
    note(doca_compress_task_decompress_lz4_block_as_task(task), user,
         doca_compress_task_decompress_lz4_block_get_crc_cs(task));
}

void note_memcpy(struct doca_dma_task_memcpy *task, union doca_data user, union doca_data context) {
    (void)context;
    note(doca_dma_task_memcpy_as_task(task), user, 0);
}

void bench_open(void) {
    report_count = 0;
    reports_free_tasks = 1;
    bench = (struct bench){.dev = device_open(), .memory = calloc(1, MEMORY_BYTES)};
    CHECK(bench.memory != NULL, "no memory");
    bench.mmap = region_mmap(bench.memory, MEMORY_BYTES, DOCA_ACCESS_FLAG_LOCAL_READ_WRITE);
    OK(doca_mmap_start(bench.mmap));
    OK(doca_buf_inventory_create(BUFS_MAX, &bench.inventory));
    OK(doca_buf_inventory_start(bench.inventory));
    OK(doca_pe_create(&bench.pe));
    OK(doca_compress_create(bench.dev, &bench.compress));
    bench.compress_ctx = doca_compress_as_ctx(bench.compress);
    OK(doca_pe_connect_ctx(bench.pe, bench.compress_ctx));
    OK(doca_compress_task_decompress_deflate_set_conf(bench.compress, note_deflate, note_deflate, TASKS_MAX));
    OK(doca_ctx_start(bench.compress_ctx));
    OK(doca_dma_create(bench.dev, &bench.dma));
    bench.dma_ctx = doca_dma_as_ctx(bench.dma);
    OK(doca_pe_connect_ctx(bench.pe, bench.dma_ctx));
    OK(doca_dma_task_memcpy_set_conf(bench.dma, note_memcpy, note_memcpy, TASKS_MAX));
    OK(doca_ctx_start(bench.dma_ctx));
}

static void context_end(struct doca_ctx *ctx) {
    if (state_of(ctx) == DOCA_CTX_STATE_RUNNING) {
        doca_error_t result = doca_ctx_stop(ctx);
        CHECK(result == DOCA_SUCCESS || result == DOCA_ERROR_IN_PROGRESS, "%s", doca_error_get_name(result));
    }
    progress_state(ctx, DOCA_CTX_STATE_IDLE);
}

void bench_close(void) {
    context_end(bench.compress_ctx);
    context_end(bench.dma_ctx);
    for (size_t i = 0; i < BUFS_MAX; i++) {
        if (bench.bufs[i] != NULL) {
            buf_release(bench.bufs[i]);
        }
    }
    OK(doca_compress_destroy(bench.compress));
    OK(doca_dma_destroy(bench.dma));
    OK(doca_pe_destroy(bench.pe));
    OK(doca_buf_inventory_destroy(bench.inventory));
    OK(doca_mmap_destroy(bench.mmap));
    OK(doca_dev_close(bench.dev));
    free(bench.memory);
}

void dma_configure(doca_dma_task_memcpy_completion_cb_t completed, uint32_t tasks) {
    OK(doca_ctx_stop(bench.dma_ctx));
    OK(doca_dma_task_memcpy_set_conf(bench.dma, completed, completed, tasks));
    OK(doca_ctx_start(bench.dma_ctx));
}

struct doca_mmap *region_mmap(uint8_t *region, size_t size, uint32_t access) {
    struct doca_mmap *mmap;
    OK(doca_mmap_create(&mmap));
    OK(doca_mmap_add_dev(mmap, bench.dev));
    OK(doca_mmap_set_memrange(mmap, region, size));
    if (access != 0) {
        OK(doca_mmap_set_permissions(mmap, access));
    }
    return mmap;
}

static struct doca_buf *buf_keep(struct doca_buf *buf) {
    size_t slot = 0;
    while (bench.bufs[slot] != NULL) {
        slot++;
    }
    return bench.bufs[slot] = buf;
}

struct doca_buf *data_of(struct doca_mmap *mmap, uint8_t *address, size_t size) {
    struct doca_buf *buf;
    OK(doca_buf_inventory_buf_get_by_data(bench.inventory, mmap, address, size, &buf));
    return buf_keep(buf);
}

struct doca_buf *space_of(struct doca_mmap *mmap, uint8_t *address, size_t size) {
    struct doca_buf *buf;
    OK(doca_buf_inventory_buf_get_by_addr(bench.inventory, mmap, address, size, &buf));
    return buf_keep(buf);
}

struct doca_buf *data_at(size_t offset, size_t size) {
    return data_of(bench.mmap, bench.memory + offset, size);
}

struct doca_buf *space_at(size_t offset, size_t size) {
    return space_of(bench.mmap, bench.memory + offset, size);
}

void buf_release(struct doca_buf *buf) {
    for (size_t i = 0; i < BUFS_MAX; i++) {
        bench.bufs[i] = bench.bufs[i] != buf ? bench.bufs[i] : NULL;
    }
    OK(doca_buf_dec_refcount(buf, NULL));
}

size_t data_length(const struct doca_buf *buf) {
    size_t length;
    OK(doca_buf_get_data_len(buf, &length));
    return length;
}

struct doca_task *memcpy_task(struct doca_buf *source, struct doca_buf *target, uint64_t user) {
    struct doca_dma_task_memcpy *task;
    OK(doca_dma_task_memcpy_alloc_init(bench.dma, source, target, (union doca_data){.u64 = user}, &task));
    return doca_dma_task_memcpy_as_task(task);
}

struct doca_task *memcpy_submit(struct doca_buf *source, struct doca_buf *target, uint64_t user) {
    struct doca_task *task = memcpy_task(source, target, user);
    OK(doca_task_submit(task));
    return task;
}

void inflate_submit(struct doca_buf *source, struct doca_buf *target, uint64_t user) {
    struct doca_compress_task_decompress_deflate *task;
    OK(doca_compress_task_decompress_deflate_alloc_init(bench.compress, source, target, (union doca_data){.u64 = user},
                                                        &task));
    OK(doca_task_submit(doca_compress_task_decompress_deflate_as_task(task)));
}

struct report copy_once(struct doca_buf *source, struct doca_buf *target) {
    report_count = 0;
    memcpy_submit(source, target, 0);
    progress_reports(1);
    if (reports[0].status != DOCA_SUCCESS) {
        CHECK(state_of(bench.dma_ctx) == DOCA_CTX_STATE_STOPPING, "an error stops the context");
        progress_state(bench.dma_ctx, DOCA_CTX_STATE_IDLE);
        OK(doca_ctx_start(bench.dma_ctx));
    }
    return reports[0];
}

struct report inflate_once(struct doca_buf *source, struct doca_buf *target) {
    report_count = 0;
    inflate_submit(source, target, 0);
    progress_reports(1);
    return reports[0];
}

enum doca_ctx_states state_of(struct doca_ctx *ctx) {
    enum doca_ctx_states state;
    OK(doca_ctx_get_state(ctx, &state));
    return state;
}

/* Progresses once; ends the test where that went on for too long. */
static void progress_patiently(time_t *deadline) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *deadline = *deadline == 0 ? now.tv_sec + WAIT_MAX_SECONDS : *deadline;
    CHECK(now.tv_sec < *deadline, "nothing moves");
    if (!doca_pe_progress(bench.pe)) {
        usleep(100);
    }
}

void progress_reports(uint32_t count) {
    for (time_t deadline = 0; report_count < count;) {
        progress_patiently(&deadline);
    }
}

void progress_state(struct doca_ctx *ctx, enum doca_ctx_states state) {
    for (time_t deadline = 0; state_of(ctx) != state;) {
        progress_patiently(&deadline);
    }
}

void expect_abort(void (*misuse)(void), const char *rule) {
    char said[4096] = "";
    size_t length = 0;
    int ends[2], status;
    CHECK(pipe(ends) == 0, "pipe");
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        dup2(ends[1], STDERR_FILENO);
        alarm(WAIT_MAX_SECONDS);
        misuse();
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t got; length < sizeof said - 1 && (got = read(ends[0], said + length, sizeof said - 1 - length)) > 0;) {
        length += (size_t)got;
    }
    close(ends[0]);
    CHECK(waitpid(child, &status, 0) == child, "waitpid");
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "no abort (status %d) for \"%s\": %s", status, rule,
          said);
    CHECK(strstr(said, rule) != NULL, "it aborts with \"%s\", not \"%s\"", said, rule);
}

size_t deflate_raw(const void *plain, size_t size, uint8_t *stream, size_t stream_max) {
    return zlib_deflate(plain, size, stream, stream_max, 6, Z_DEFAULT_STRATEGY, 0);
}

void text_fill(uint8_t *target, size_t size) {
    for (size_t i = 0; i < size; i++) {
        target[i] = (uint8_t)("abcdefgh"[random_below(8)]);
    }
}
