/* SPDX-License-Identifier: Apache-2.0 */
/* log.c - the library's own messages. Without a backend there is nowhere to write them, and none is written. */
#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>

#include "emulator.h"

struct doca_log_backend {
    struct doca_log_backend *next;
    FILE *file; /* NULL: 'fd' */
    int fd;
    uint32_t level;
};

static pthread_mutex_t backends_lock = PTHREAD_MUTEX_INITIALIZER;
static struct doca_log_backend *backends;

static doca_error_t backend_add(FILE *file, int fd, struct doca_log_backend **backend) {
    if (backend == NULL || (*backend = malloc(sizeof **backend)) == NULL) {
        return backend == NULL ? DOCA_ERROR_INVALID_VALUE : DOCA_ERROR_NO_MEMORY;
    }
    pthread_mutex_lock(&backends_lock);
    **backend = (struct doca_log_backend){.next = backends, .file = file, .fd = fd, .level = DOCA_LOG_LEVEL_INFO};
    backends = *backend;
    pthread_mutex_unlock(&backends_lock);
    return DOCA_SUCCESS;
}

doca_error_t doca_log_backend_create_with_file_sdk(FILE *fptr, struct doca_log_backend **backend) {
    return fptr != NULL ? backend_add(fptr, -1, backend) : DOCA_ERROR_INVALID_VALUE;
}

doca_error_t doca_log_backend_create_with_fd_sdk(int fd, struct doca_log_backend **backend) {
    return fd >= 0 ? backend_add(NULL, fd, backend) : DOCA_ERROR_INVALID_VALUE;
}

doca_error_t doca_log_backend_set_sdk_level(struct doca_log_backend *backend, uint32_t level) {
    if (backend == NULL || level < DOCA_LOG_LEVEL_DISABLE || level > DOCA_LOG_LEVEL_TRACE) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&backends_lock);
    backend->level = level;
    pthread_mutex_unlock(&backends_lock);
    return DOCA_SUCCESS;
}

void emulator_log(enum doca_log_level level, const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&backends_lock);
    for (struct doca_log_backend *backend = backends; backend != NULL; backend = backend->next) {
        if ((uint32_t)level > backend->level) {
            continue;
        }
        if (backend->file != NULL) {
            fprintf(backend->file, "[DOCA emulator] %s\n", text);
            fflush(backend->file);
        } else {
            dprintf(backend->fd, "[DOCA emulator] %s\n", text);
        }
    }
    pthread_mutex_unlock(&backends_lock);
}
