/* SPDX-License-Identifier: Apache-2.0 */
/* mmap.c - memory that devices may reach: one range each, set once, with its permissions */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "emulator.h"

#define ACCESS_PCI (DOCA_ACCESS_FLAG_PCI_READ_ONLY | DOCA_ACCESS_FLAG_PCI_READ_WRITE)
#define ACCESS_ALL (2u * DOCA_ACCESS_FLAG_PCI_RELAXED_ORDERING - 1)

enum { DEVICES_DEFAULT = 8 };

static void mmap_owner_check(const struct doca_mmap *mmap, const char *call) {
    if (!mmap->thread_safe) {
        owner_check(&mmap->owner, call, "mmap");
    }
}

bool mmap_has_device(const struct doca_mmap *mmap, const struct doca_dev *dev) {
    for (uint32_t i = 0; i < mmap->device_count; i++) {
        if (mmap->devices[i] == dev) {
            return true;
        }
    }
    return false;
}

static struct doca_mmap *mmap_make(uint32_t device_max) {
    struct doca_mmap *mmap = calloc(1, sizeof *mmap);
    if (mmap == NULL || (mmap->devices = calloc(device_max, sizeof(struct doca_dev *))) == NULL) {
        free(mmap);
        return NULL;
    }
    mmap->device_max = device_max;
    return mmap;
}

static void mmap_device_add(struct doca_mmap *mmap, struct doca_dev *dev) {
    mmap->devices[mmap->device_count++] = dev;
    atomic_fetch_add(&dev->resources, 1);
}

doca_error_t doca_mmap_create(struct doca_mmap **mmap) {
    if (mmap == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    *mmap = mmap_make(DEVICES_DEFAULT);
    return *mmap != NULL ? DOCA_SUCCESS : DOCA_ERROR_NO_MEMORY;
}

doca_error_t doca_mmap_destroy(struct doca_mmap *mmap) {
    if (mmap == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    mmap_owner_check(mmap, __func__);
    if (atomic_load(&mmap->buf_count) > 0) {
        return DOCA_ERROR_NOT_PERMITTED;
    }
    /* Importers look for the token before each access; it must not stay behind in freed memory. */
    __atomic_store_n(&mmap->token, 0, __ATOMIC_SEQ_CST);
    if (mmap->free_cb != NULL && mmap->address != NULL) {
        mmap->free_cb(mmap->address, mmap->size, mmap->free_cookie);
    }
    if (mmap->map != NULL) {
        munmap(mmap->map, mmap->map_size);
    }
    for (uint32_t i = 0; i < mmap->device_count; i++) {
        atomic_fetch_sub(&mmap->devices[i]->resources, 1);
    }
    owner_release(&mmap->owner);
    free(mmap->devices);
    free(mmap);
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_start(struct doca_mmap *mmap) {
    if (mmap == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    mmap_owner_check(mmap, __func__);
    if (mmap->imported) {
        return DOCA_ERROR_NOT_PERMITTED;
    }
    if (mmap->started || mmap->address == NULL || mmap->device_count == 0) {
        return DOCA_ERROR_BAD_STATE;
    }
    mmap->started = mmap->started_once = true;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_stop(struct doca_mmap *mmap) {
    if (mmap == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    mmap_owner_check(mmap, __func__);
    if (mmap->imported || mmap->exported || atomic_load(&mmap->buf_count) > 0) {
        return DOCA_ERROR_NOT_PERMITTED;
    }
    if (!mmap->started) {
        return DOCA_ERROR_BAD_STATE;
    }
    mmap->started = false;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_add_dev(struct doca_mmap *mmap, struct doca_dev *dev) {
    if (mmap == NULL || dev == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    mmap_owner_check(mmap, __func__);
    if (mmap->started || mmap->imported) {
        return DOCA_ERROR_NOT_PERMITTED;
    }
    if (mmap_has_device(mmap, dev)) {
        return DOCA_ERROR_ALREADY_EXIST;
    }
    if (mmap->device_count == mmap->device_max) {
        return DOCA_ERROR_NO_MEMORY;
    }
    mmap_device_add(mmap, dev);
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_rm_dev(struct doca_mmap *mmap, struct doca_dev *dev) {
    if (mmap == NULL || dev == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    mmap_owner_check(mmap, __func__);
    if (mmap->started || mmap->imported) {
        return DOCA_ERROR_NOT_PERMITTED;
    }
    for (uint32_t i = 0; i < mmap->device_count; i++) {
        if (mmap->devices[i] == dev) {
            mmap->devices[i] = mmap->devices[--mmap->device_count];
            atomic_fetch_sub(&dev->resources, 1);
            return DOCA_SUCCESS;
        }
    }
    return DOCA_ERROR_NOT_FOUND;
}

/* What says whether one of the set_*() calls may go on. */
static doca_error_t settable(const struct doca_mmap *mmap, const char *call) {
    if (mmap == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    mmap_owner_check(mmap, call);
    if (mmap->imported) {
        return DOCA_ERROR_NOT_PERMITTED;
    }
    return mmap->started ? DOCA_ERROR_BAD_STATE : DOCA_SUCCESS;
}

static doca_error_t range_settable(const struct doca_mmap *mmap, const void *addr, size_t len, const char *call) {
    doca_error_t result = settable(mmap, call);
    if (DOCA_IS_ERROR(result)) {
        return result;
    }
    if (addr == NULL || len == 0 || (uintptr_t)addr + len < (uintptr_t)addr) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    return mmap->address != NULL ? DOCA_ERROR_NOT_PERMITTED : DOCA_SUCCESS;
}

doca_error_t doca_mmap_set_memrange(struct doca_mmap *mmap, void *addr, size_t len) {
    doca_error_t result = range_settable(mmap, addr, len, __func__);
    if (DOCA_IS_ERROR(result)) {
        return result;
    }
    mmap->address = mmap->location = addr;
    mmap->size = len;
    return DOCA_SUCCESS;
}

/* Maps a piece of a file for the engines, which run on the CPU. In a function of its own since 'mmap' is a name of
 * ours. */
static void *file_map(int fd, size_t offset, size_t size) {
    void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
    return map != MAP_FAILED ? map : NULL;
}

doca_error_t doca_mmap_set_dmabuf_memrange(struct doca_mmap *mmap, int dmabuf_fd, void *addr, size_t dmabuf_offset,
                                           size_t len) {
    doca_error_t result = range_settable(mmap, addr, len, __func__);
    if (DOCA_IS_ERROR(result)) {
        return result;
    }
    if (dmabuf_fd < 0 || dmabuf_offset + len < len) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    size_t before = dmabuf_offset % (size_t)sysconf(_SC_PAGESIZE);
    void *map = file_map(dmabuf_fd, dmabuf_offset - before, before + len);
    if (map == NULL) {
        emulator_log(DOCA_LOG_LEVEL_ERROR, "file descriptor %d cannot be mapped", dmabuf_fd);
        return DOCA_ERROR_DRIVER;
    }
    mmap->map = map;
    mmap->map_size = before + len;
    mmap->location = (uint8_t *)map + before;
    mmap->address = addr;
    mmap->size = len;
    mmap->dmabuf = true;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_get_memrange(const struct doca_mmap *mmap, void **addr, size_t *len) {
    if (mmap == NULL || addr == NULL || len == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    if (mmap->address == NULL) {
        return DOCA_ERROR_BAD_STATE;
    }
    *addr = mmap->address;
    *len = mmap->size;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_set_permissions(struct doca_mmap *mmap, uint32_t access_mask) {
    doca_error_t result = settable(mmap, __func__);
    if (DOCA_IS_ERROR(result)) {
        return result;
    }
    if ((access_mask & ~ACCESS_ALL) != 0 || (access_mask & ACCESS_PCI) == ACCESS_PCI) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    mmap->access = access_mask;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_set_free_cb(struct doca_mmap *mmap, doca_mmap_memrange_free_cb_t *free_cb, void *opaque) {
    doca_error_t result = settable(mmap, __func__);
    if (!DOCA_IS_ERROR(result)) {
        mmap->free_cb = free_cb;
        mmap->free_cookie = opaque;
    }
    return result;
}

doca_error_t doca_mmap_set_user_data(struct doca_mmap *mmap, union doca_data user_data) {
    doca_error_t result = settable(mmap, __func__);
    if (!DOCA_IS_ERROR(result)) {
        mmap->user_data = user_data;
    }
    return result;
}

doca_error_t doca_mmap_get_user_data(const struct doca_mmap *mmap, union doca_data *user_data) {
    if (mmap == NULL || user_data == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    *user_data = mmap->user_data;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_set_max_num_devices(struct doca_mmap *mmap, uint32_t max_num_devices) {
    doca_error_t result = settable(mmap, __func__);
    if (DOCA_IS_ERROR(result)) {
        return result;
    }
    if (mmap->started_once) {
        return DOCA_ERROR_BAD_STATE;
    }
    if (max_num_devices == 0 || max_num_devices < mmap->device_count) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    struct doca_dev **devices = realloc(mmap->devices, max_num_devices * sizeof(struct doca_dev *));
    if (devices == NULL) {
        return DOCA_ERROR_NO_MEMORY;
    }
    mmap->devices = devices;
    mmap->device_max = max_num_devices;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_get_max_num_devices(const struct doca_mmap *mmap, uint32_t *max_num_devices) {
    if (mmap == NULL || max_num_devices == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    *max_num_devices = mmap->device_max;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_get_num_bufs(const struct doca_mmap *mmap, uint32_t *num_bufs) {
    if (mmap == NULL || num_bufs == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    *num_bufs = atomic_load(&mmap->buf_count);
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_get_exported(const struct doca_mmap *mmap, uint8_t *exported) {
    if (mmap == NULL || exported == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    *exported = mmap->exported;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_get_from_export(const struct doca_mmap *mmap, uint8_t *from_export) {
    if (mmap == NULL || from_export == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    *from_export = mmap->imported;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_enable_thread_safety(struct doca_mmap *mmap) {
    if (mmap == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    mmap_owner_check(mmap, __func__);
    if ((mmap->started && !mmap->imported) || atomic_load(&mmap->buf_count) > 0) {
        return DOCA_ERROR_BAD_STATE;
    }
    mmap->thread_safe = true;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_cap_is_export_pci_supported(const struct doca_devinfo *devinfo, uint8_t *mmap_export) {
    if (devinfo == NULL || mmap_export == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    *mmap_export = devinfo->settings.profile != PROFILE_NONE;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_cap_is_create_from_export_pci_supported(const struct doca_devinfo *devinfo,
                                                               uint8_t *from_export) {
    return doca_mmap_cap_is_export_pci_supported(devinfo, from_export);
}

doca_error_t doca_mmap_export_pci(struct doca_mmap *mmap, const struct doca_dev *dev, const void **export_desc,
                                  size_t *export_desc_len) {
    if (mmap == NULL || dev == NULL || export_desc == NULL || export_desc_len == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    mmap_owner_check(mmap, __func__);
    if (!mmap->started) {
        return DOCA_ERROR_BAD_STATE;
    }
    if (mmap->imported) {
        return DOCA_ERROR_NOT_PERMITTED;
    }
    if (!mmap_has_device(mmap, dev)) {
        return DOCA_ERROR_NOT_FOUND;
    }
    if ((mmap->access & ACCESS_PCI) == 0) {
        return DOCA_ERROR_NOT_PERMITTED;
    }
    if (dev->info.settings.profile == PROFILE_NONE || (mmap->dmabuf && !dev->info.settings.dmabuf_export)) {
        return DOCA_ERROR_NOT_SUPPORTED;
    }
    if ((mmap->access & DOCA_ACCESS_FLAG_PCI_RELAXED_ORDERING) != 0) {
        emulator_log(DOCA_LOG_LEVEL_ERROR, "relaxed ordering was seen not to go with a PCI export");
        return DOCA_ERROR_DRIVER;
    }
    if (!mmap->exported && !export_fill(mmap)) {
        return DOCA_ERROR_OPERATING_SYSTEM;
    }
    mmap->exported = true;
    *export_desc = &mmap->descriptor;
    *export_desc_len = sizeof mmap->descriptor;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_create_from_export(const union doca_data *user_data, const void *export_desc,
                                          size_t export_desc_len, struct doca_dev *dev, struct doca_mmap **mmap) {
    struct export_descriptor descriptor;
    if (export_desc == NULL || dev == NULL || mmap == NULL) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    if (dev->info.settings.profile == PROFILE_NONE) {
        return DOCA_ERROR_NOT_SUPPORTED;
    }
    if (!export_parse(export_desc, export_desc_len, &descriptor)) {
        return DOCA_ERROR_INVALID_VALUE;
    }
    struct doca_mmap *made = mmap_make(1);
    if (made == NULL) {
        return DOCA_ERROR_NO_MEMORY;
    }
    mmap_device_add(made, dev);
    made->imported = made->started = made->started_once = true;
    made->descriptor = descriptor;
    made->access = descriptor.access;
    made->address = (uint8_t *)(uintptr_t)descriptor.address;
    made->size = descriptor.size;
    if (user_data != NULL) {
        made->user_data = *user_data;
    }
    *mmap = made;
    return DOCA_SUCCESS;
}
