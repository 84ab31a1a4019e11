/* SPDX-License-Identifier: Apache-2.0 */
/* doca_fixture.c - see doca_fixture.h */
#include "doca_fixture.h"

#include <signal.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <zlib.h>

enum { WAIT_MAX_SECONDS = 60 };

struct report reports[4 * TASKS_MAX];
uint32_t report_count;
int reports_free_tasks = 1;
struct doca_task *kept;

extern char **environ;

void settings_clear(void) {
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
    CHECK(report_count < 4 * TASKS_MAX, "too many reports");
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

void bench_open(struct bench *bench) {
    report_count = 0;
    reports_free_tasks = 1;
    bench->dev = device_open();
    bench->memory = calloc(1, MEMORY_BYTES);
    CHECK(bench->memory != NULL, "no memory");
    OK(doca_mmap_create(&bench->mmap));
    OK(doca_mmap_add_dev(bench->mmap, bench->dev));
    OK(doca_mmap_set_memrange(bench->mmap, bench->memory, MEMORY_BYTES));
    OK(doca_mmap_set_permissions(bench->mmap, DOCA_ACCESS_FLAG_LOCAL_READ_WRITE));
    OK(doca_mmap_start(bench->mmap));
    OK(doca_buf_inventory_create(4 * TASKS_MAX, &bench->inventory));
    OK(doca_buf_inventory_start(bench->inventory));
    OK(doca_pe_create(&bench->pe));
    OK(doca_compress_create(bench->dev, &bench->compress));
    OK(doca_pe_connect_ctx(bench->pe, doca_compress_as_ctx(bench->compress)));
    OK(doca_compress_task_decompress_deflate_set_conf(bench->compress, note_deflate, note_deflate, TASKS_MAX));
    OK(doca_ctx_start(doca_compress_as_ctx(bench->compress)));
    OK(doca_dma_create(bench->dev, &bench->dma));
    OK(doca_pe_connect_ctx(bench->pe, doca_dma_as_ctx(bench->dma)));
    OK(doca_dma_task_memcpy_set_conf(bench->dma, note_memcpy, note_memcpy, TASKS_MAX));
    OK(doca_ctx_start(doca_dma_as_ctx(bench->dma)));
}

static void context_end(struct bench *bench, struct doca_ctx *ctx) {
    if (state_of(ctx) == DOCA_CTX_STATE_RUNNING) {
        doca_error_t result = doca_ctx_stop(ctx);
        CHECK(result == DOCA_SUCCESS || result == DOCA_ERROR_IN_PROGRESS, "%s", doca_error_get_name(result));
    }
    progress_state(bench->pe, ctx, DOCA_CTX_STATE_IDLE);
}

void bench_close(struct bench *bench) {
    context_end(bench, doca_compress_as_ctx(bench->compress));
    context_end(bench, doca_dma_as_ctx(bench->dma));
    OK(doca_compress_destroy(bench->compress));
    OK(doca_dma_destroy(bench->dma));
    OK(doca_pe_destroy(bench->pe));
    OK(doca_buf_inventory_destroy(bench->inventory));
    OK(doca_mmap_destroy(bench->mmap));
    OK(doca_dev_close(bench->dev));
    free(bench->memory);
}

struct doca_buf *buf_data(struct bench *bench, size_t offset, size_t size) {
    struct doca_buf *buf;
    OK(doca_buf_inventory_buf_get_by_data(bench->inventory, bench->mmap, bench->memory + offset, size, &buf));
    return buf;
}

struct doca_buf *buf_empty(struct bench *bench, size_t offset, size_t size) {
    struct doca_buf *buf;
    OK(doca_buf_inventory_buf_get_by_addr(bench->inventory, bench->mmap, bench->memory + offset, size, &buf));
    return buf;
}

void buf_release(struct doca_buf *buf) {
    OK(doca_buf_dec_refcount(buf, NULL));
}

void buf_renew(struct bench *bench, struct doca_buf **buf, size_t offset, size_t size) {
    buf_release(*buf);
    *buf = buf_empty(bench, offset, size);
}

size_t data_length(const struct doca_buf *buf) {
    size_t length;
    OK(doca_buf_get_data_len(buf, &length));
    return length;
}

struct doca_task *memcpy_submit(struct bench *bench, struct doca_buf *source, struct doca_buf *target, uint64_t user) {
    struct doca_dma_task_memcpy *task;
    OK(doca_dma_task_memcpy_alloc_init(bench->dma, source, target, (union doca_data){.u64 = user}, &task));
    OK(doca_task_submit(doca_dma_task_memcpy_as_task(task)));
    return doca_dma_task_memcpy_as_task(task);
}

struct doca_task *inflate_submit(struct bench *bench, struct doca_buf *source, struct doca_buf *target, uint64_t user) {
    struct doca_compress_task_decompress_deflate *task;
    OK(doca_compress_task_decompress_deflate_alloc_init(bench->compress, source, target, (union doca_data){.u64 = user},
                                                        &task));
    OK(doca_task_submit(doca_compress_task_decompress_deflate_as_task(task)));
    return doca_compress_task_decompress_deflate_as_task(task);
}

enum doca_ctx_states state_of(struct doca_ctx *ctx) {
    enum doca_ctx_states state;
    OK(doca_ctx_get_state(ctx, &state));
    return state;
}

/* Progresses once; ends the test where that went on for too long. */
static void progress_patiently(struct doca_pe *pe, time_t *deadline) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *deadline = *deadline == 0 ? now.tv_sec + WAIT_MAX_SECONDS : *deadline;
    CHECK(now.tv_sec < *deadline, "nothing moves");
    if (!doca_pe_progress(pe)) {
        usleep(100);
    }
}

void progress_reports(struct doca_pe *pe, uint32_t count) {
    for (time_t deadline = 0; report_count < count;) {
        progress_patiently(pe, &deadline);
    }
}

void progress_state(struct doca_pe *pe, struct doca_ctx *ctx, enum doca_ctx_states state) {
    for (time_t deadline = 0; state_of(ctx) != state;) {
        progress_patiently(pe, &deadline);
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

size_t deflate_raw(const uint8_t *plain, size_t size, uint8_t *stream, size_t stream_max) {
    z_stream encoder = {.next_in = (Bytef *)(uintptr_t)plain,
                        .avail_in = (uInt)size,
                        .next_out = stream,
                        .avail_out = (uInt)stream_max};
    CHECK(deflateInit2(&encoder, 6, Z_DEFLATED, -15, 8, Z_DEFAULT_STRATEGY) == Z_OK, "deflateInit2");
    CHECK(deflate(&encoder, Z_FINISH) == Z_STREAM_END, "deflate");
    deflateEnd(&encoder);
    return encoder.total_out;
}

void text_fill(uint8_t *target, size_t size) {
    for (size_t i = 0; i < size; i++) {
        target[i] = (uint8_t)("abcdefgh"[random_below(8)]);
    }
}
