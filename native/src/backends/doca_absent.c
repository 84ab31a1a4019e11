/* SPDX-License-Identifier: Apache-2.0 */
/* doca_absent.c - for a build without DOCA: no backend "doca", and no export of memory to a DPU */
#include "shadowserve.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"

void ss_device_error(char *text, size_t size) {
    if (size > 0) {
        text[0] = '\0';
    }
}

enum ss_result ss_export_open(const char *device, void *address, uint64_t size, int32_t dmabuf_fd,
                              struct ss_export **exported) {
    return SS_NOT_SUPPORTED;
}

void ss_export_descriptor(const struct ss_export *exported, const void **bytes, size_t *size) {
    *bytes = NULL;
    *size = 0;
}

void ss_export_close(struct ss_export *exported) {
}
