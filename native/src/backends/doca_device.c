/* SPDX-License-Identifier: Apache-2.0 */
/* doca_device.c - opens a DPU's devices, registers memory with them, and keeps DOCA's last error */
#include "backends/doca_device.h"

#include <doca_compress.h>
#include <doca_dma.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* ---- Errors -------------------------------------------------------------------------------------------------- */

/* A result does not identify the failed call among about thirty, which is important on a new machine. */
static pthread_mutex_t error_lock = PTHREAD_MUTEX_INITIALIZER;
static char error_text[160];

static void error_keep(doca_error_t error, const char *call) {
    pthread_mutex_lock(&error_lock);
    (void)snprintf(error_text, sizeof error_text, "%s: %s", call, doca_error_get_name(error));
    pthread_mutex_unlock(&error_lock);
}

void ss_device_error(char *text, size_t size) {
    pthread_mutex_lock(&error_lock);
    (void)snprintf(text, size, "%s", error_text);
    pthread_mutex_unlock(&error_lock);
}

enum ss_result ss_doca_result(doca_error_t error, const char *call) {
    if (error == DOCA_SUCCESS) {
        return SS_OK;
    }
    error_keep(error, call);
    switch (error) {
    case DOCA_ERROR_NO_MEMORY:
        return SS_NO_MEMORY;
    case DOCA_ERROR_NOT_SUPPORTED:
    case DOCA_ERROR_NOT_FOUND:
        return SS_NOT_SUPPORTED;
    case DOCA_ERROR_INVALID_VALUE:
        return SS_BAD_ARGUMENT;
    default:
        return SS_DEVICE;
    }
}

/* ---- Devices ------------------------------------------------------------------------------------------------- */

static int device_is_named(const struct doca_devinfo *info, const char *name) {
    uint8_t equal = 0;
    char text[DOCA_DEVINFO_IBDEV_NAME_SIZE];
    if (name[0] == '\0' || (doca_devinfo_is_equal_pci_addr(info, name, &equal) == DOCA_SUCCESS && equal)) {
        return 1;
    }
    return doca_devinfo_get_ibdev_name(info, text, sizeof text) == DOCA_SUCCESS && strcmp(text, name) == 0;
}

/* SS_OK if the device supports this use. */
static enum ss_result device_check(const struct doca_devinfo *info, enum ss_doca_use use) {
    uint8_t exports = 0;
    enum ss_result result;
    if (use == SS_DOCA_EXPORT) {
        result = ss_doca_result(doca_mmap_cap_is_export_pci_supported(info, &exports),
                                "doca_mmap_cap_is_export_pci_supported");
        return result != SS_OK || exports ? result : SS_NOT_SUPPORTED;
    }
    result = ss_doca_result(doca_compress_cap_task_decompress_deflate_is_supported(info),
                            "doca_compress_cap_task_decompress_deflate_is_supported");
    if (result == SS_OK) {
        result = ss_doca_result(doca_dma_cap_task_memcpy_is_supported(info), "doca_dma_cap_task_memcpy_is_supported");
    }
    return result;
}

enum ss_result ss_doca_open(const char *name, enum ss_doca_use use, struct doca_dev **device) {
    struct doca_devinfo **list;
    uint32_t count = 0;
    enum ss_result result = ss_doca_result(doca_devinfo_create_list(&list, &count), "doca_devinfo_create_list");
    if (result != SS_OK) {
        return result;
    }
    result = ss_doca_result(DOCA_ERROR_NOT_FOUND, name[0] == '\0' ? "looking for a device" : name);
    for (uint32_t i = 0; i < count && result != SS_OK; i++) {
        if (!device_is_named(list[i], name)) {
            continue;
        }
        result = device_check(list[i], use);
        if (result == SS_OK) {
            result = ss_doca_result(doca_dev_open(list[i], device), "doca_dev_open");
        }
    }
    (void)doca_devinfo_destroy_list(list);
    return result;
}

void ss_doca_name(const struct doca_dev *device, char *name, size_t size) {
    const struct doca_devinfo *info = doca_dev_as_devinfo(device);
    char pci[DOCA_DEVINFO_PCI_ADDR_SIZE] = "?";
    char text[DOCA_DEVINFO_IBDEV_NAME_SIZE] = "?";
    (void)doca_devinfo_get_pci_addr_str(info, pci);
    (void)doca_devinfo_get_ibdev_name(info, text, sizeof text);
    (void)snprintf(name, size, "%s (%s)", pci, text);
}

/* ---- Memory -------------------------------------------------------------------------------------------------- */

enum ss_result ss_doca_register(struct doca_dev *device, void *address, uint64_t size, int dmabuf_fd,
                                uint32_t permissions, int shared, struct doca_mmap **mmap_out) {
    struct doca_mmap *mmap;
    enum ss_result result = ss_doca_result(doca_mmap_create(&mmap), "doca_mmap_create");
    if (result != SS_OK) {
        return result;
    }
    result = ss_doca_result(doca_mmap_add_dev(mmap, device), "doca_mmap_add_dev");
    if (result == SS_OK && dmabuf_fd < 0) {
        result = ss_doca_result(doca_mmap_set_memrange(mmap, address, size), "doca_mmap_set_memrange");
    } else if (result == SS_OK) {
        result = ss_doca_result(doca_mmap_set_dmabuf_memrange(mmap, dmabuf_fd, address, 0, size),
                                "doca_mmap_set_dmabuf_memrange");
    }
    if (result == SS_OK) {
        result = ss_doca_result(doca_mmap_set_permissions(mmap, permissions), "doca_mmap_set_permissions");
    }
    if (result == SS_OK && shared) {
        result = ss_doca_result(doca_mmap_enable_thread_safety(mmap), "doca_mmap_enable_thread_safety");
    }
    if (result == SS_OK) {
        result = ss_doca_result(doca_mmap_start(mmap), "doca_mmap_start");
    }
    if (result != SS_OK) {
        (void)doca_mmap_destroy(mmap);
        return result;
    }
    *mmap_out = mmap;
    return SS_OK;
}

enum ss_result ss_doca_import(struct doca_dev *device, const void *descriptor, size_t size,
                              struct doca_mmap **mmap_out) {
    struct doca_mmap *mmap;
    enum ss_result result = ss_doca_result(doca_mmap_create_from_export(NULL, descriptor, size, device, &mmap),
                                           "doca_mmap_create_from_export");
    if (result != SS_OK) {
        return result;
    }
    result = ss_doca_result(doca_mmap_enable_thread_safety(mmap), "doca_mmap_enable_thread_safety");
    if (result != SS_OK) {
        (void)doca_mmap_destroy(mmap);
        return result;
    }
    *mmap_out = mmap;
    return SS_OK;
}
