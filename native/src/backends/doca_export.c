/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doca_export.c - the host's side of a DPU: memory that its accelerators may reach
 *
 * The serving process exports its registered memory once. The DPU's daemon imports the descriptor and then copies to
 * and from this memory, without any work of the host.
 */
#include <stdlib.h>

#include "backends/doca_device.h"

struct ss_export {
    struct doca_dev *device;
    struct doca_mmap *mmap;
    const void *descriptor; /* the mmap's */
    size_t descriptor_size;
};

enum ss_result ss_export_open(const char *device, void *address, uint64_t size, int32_t dmabuf_fd,
                              struct ss_export **exported_out) {
    if (address == NULL || size == 0 || size > UINTPTR_MAX - (uintptr_t)address || exported_out == NULL) {
        return SS_BAD_ARGUMENT;
    }
    struct ss_export *exported = calloc(1, sizeof *exported);
    if (exported == NULL) {
        return SS_NO_MEMORY;
    }
    enum ss_result result = ss_doca_open(device != NULL ? device : "", SS_DOCA_EXPORT, &exported->device);
    if (result == SS_OK) {
        result =
            ss_doca_register(exported->device, address, size, dmabuf_fd,
                             DOCA_ACCESS_FLAG_LOCAL_READ_WRITE | DOCA_ACCESS_FLAG_PCI_READ_WRITE, 0, &exported->mmap);
    }
    if (result == SS_OK) {
        result = ss_doca_result(
            doca_mmap_export_pci(exported->mmap, exported->device, &exported->descriptor, &exported->descriptor_size),
            "doca_mmap_export_pci");
    }
    if (result != SS_OK) {
        ss_export_close(exported);
        return result;
    }
    *exported_out = exported;
    return SS_OK;
}

void ss_export_descriptor(const struct ss_export *exported, const void **bytes, size_t *size) {
    *bytes = exported->descriptor;
    *size = exported->descriptor_size;
}

void ss_export_close(struct ss_export *exported) {
    if (exported == NULL) {
        return;
    }
    if (exported->mmap != NULL) {
        (void)doca_mmap_destroy(exported->mmap); /* without a stop before: DOCA may refuse to stop an exported mmap */
    }
    if (exported->device != NULL) {
        (void)doca_dev_close(exported->device);
    }
    free(exported);
}
