/* SPDX-License-Identifier: Apache-2.0 */
/* mmap.c - memory that devices may reach: one range each, set once, with its permissions */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "emulator.h"

#define ACCESS_PCI (DOCA_ACCESS_FLAG_PCI_READ_ONLY | DOCA_ACCESS_FLAG_PCI_READ_WRITE)
#define ACCESS_ALL (2u * DOCA_ACCESS_FLAG_PCI_RELAXED_ORDERING - 1)

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

static void mmap_device_add(struct doca_mmap *mmap, struct doca_dev *dev) {
    mmap->devices[mmap->device_count++] = dev;
    atomic_fetch_add(&dev->resources, 1);
}

doca_error_t doca_mmap_create(struct doca_mmap **mmap) {
    REFUSE_IF(mmap == NULL, DOCA_ERROR_INVALID_VALUE);
    *mmap = calloc(1, sizeof **mmap);
    return *mmap != NULL ? DOCA_SUCCESS : DOCA_ERROR_NO_MEMORY;
}

doca_error_t doca_mmap_destroy(struct doca_mmap *mmap) {
    REFUSE_IF(mmap == NULL, DOCA_ERROR_INVALID_VALUE);
    mmap_owner_check(mmap, __func__);
    REFUSE_IF(atomic_load(&mmap->buf_count) > 0, DOCA_ERROR_NOT_PERMITTED);
    /* Importers look for the token before each access; it must not stay behind in freed memory. */
    __atomic_store_n(&mmap->token, 0, __ATOMIC_SEQ_CST);
    if (mmap->map != NULL) {
        munmap(mmap->map, mmap->map_size);
    }
    for (uint32_t i = 0; i < mmap->device_count; i++) {
        atomic_fetch_sub(&mmap->devices[i]->resources, 1);
    }
    owner_release(&mmap->owner);
    free(mmap);
    return DOCA_SUCCESS;
}

/* Waits for as long as it takes to enter the range's pages into the tables of its devices, and to take them out again.
 */
static void registration_wait(const struct doca_mmap *mmap) {
    uint64_t ns = 0;
    for (uint32_t i = 0; i < mmap->device_count; i++) {
        ns += (uint64_t)((double)mmap->size / (1 << 20) * (double)mmap->devices[i]->info.settings.register_ns_per_mib);
    }
    struct timespec left = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}

doca_error_t doca_mmap_start(struct doca_mmap *mmap) {
    REFUSE_IF(mmap == NULL, DOCA_ERROR_INVALID_VALUE);
    mmap_owner_check(mmap, __func__);
    REFUSE_IF(mmap->imported, DOCA_ERROR_NOT_PERMITTED);
    REFUSE_IF(mmap->started || mmap->address == NULL || mmap->device_count == 0, DOCA_ERROR_BAD_STATE);
    registration_wait(mmap);
    mmap->started = true;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_add_dev(struct doca_mmap *mmap, struct doca_dev *dev) {
    REFUSE_IF(mmap == NULL || dev == NULL, DOCA_ERROR_INVALID_VALUE);
    mmap_owner_check(mmap, __func__);
    REFUSE_IF(mmap->started || mmap->imported, DOCA_ERROR_NOT_PERMITTED);
    REFUSE_IF(mmap_has_device(mmap, dev), DOCA_ERROR_ALREADY_EXIST);
    REFUSE_IF(mmap->device_count == DEVICES_MAX, DOCA_ERROR_NO_MEMORY);
    mmap_device_add(mmap, dev);
    return DOCA_SUCCESS;
}

/* What says whether one of the set_*() calls may go on. */
static doca_error_t settable(const struct doca_mmap *mmap, const char *call) {
    REFUSE_IF(mmap == NULL, DOCA_ERROR_INVALID_VALUE);
    mmap_owner_check(mmap, call);
    REFUSE_IF(mmap->imported, DOCA_ERROR_NOT_PERMITTED);
    return mmap->started ? DOCA_ERROR_BAD_STATE : DOCA_SUCCESS;
}

static doca_error_t range_settable(const struct doca_mmap *mmap, const void *addr, size_t len, const char *call) {
    doca_error_t result = settable(mmap, call);
    if (result != DOCA_SUCCESS) {
        return result;
    }
    REFUSE_IF(addr == NULL || len == 0 || (uintptr_t)addr + len < (uintptr_t)addr, DOCA_ERROR_INVALID_VALUE);
    return mmap->address != NULL ? DOCA_ERROR_NOT_PERMITTED : DOCA_SUCCESS;
}

doca_error_t doca_mmap_set_memrange(struct doca_mmap *mmap, void *addr, size_t len) {
    doca_error_t result = range_settable(mmap, addr, len, __func__);
    if (result != DOCA_SUCCESS) {
        return result;
    }
    mmap->address = mmap->location = addr;
    mmap->size = len;
    return DOCA_SUCCESS;
}

/* Maps a piece of a file for the workers. In a function of its own since 'mmap' is a name of ours. */
static void *file_map(int fd, size_t offset, size_t size) {
    void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
    return map != MAP_FAILED ? map : NULL;
}

doca_error_t doca_mmap_set_dmabuf_memrange(struct doca_mmap *mmap, int dmabuf_fd, void *addr, size_t dmabuf_offset,
                                           size_t len) {
    doca_error_t result = range_settable(mmap, addr, len, __func__);
    if (result != DOCA_SUCCESS) {
        return result;
    }
    REFUSE_IF(dmabuf_fd < 0 || dmabuf_offset + len < len, DOCA_ERROR_INVALID_VALUE);
    size_t before = dmabuf_offset % (size_t)sysconf(_SC_PAGESIZE);
    void *map = file_map(dmabuf_fd, dmabuf_offset - before, before + len);
    REFUSE_IF(map == NULL, DOCA_ERROR_DRIVER);
    mmap->map = map;
    mmap->map_size = before + len;
    mmap->location = (uint8_t *)map + before;
    mmap->address = addr;
    mmap->size = len;
    mmap->dmabuf = true;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_set_permissions(struct doca_mmap *mmap, uint32_t access_mask) {
    doca_error_t result = settable(mmap, __func__);
    if (result != DOCA_SUCCESS) {
        return result;
    }
    REFUSE_IF((access_mask & ~ACCESS_ALL) != 0 || (access_mask & ACCESS_PCI) == ACCESS_PCI, DOCA_ERROR_INVALID_VALUE);
    mmap->access = access_mask;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_enable_thread_safety(struct doca_mmap *mmap) {
    REFUSE_IF(mmap == NULL, DOCA_ERROR_INVALID_VALUE);
    mmap_owner_check(mmap, __func__);
    REFUSE_IF((mmap->started && !mmap->imported) || atomic_load(&mmap->buf_count) > 0, DOCA_ERROR_BAD_STATE);
    mmap->thread_safe = true;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_cap_is_export_pci_supported(const struct doca_devinfo *devinfo, uint8_t *mmap_export) {
    REFUSE_IF(devinfo == NULL || mmap_export == NULL, DOCA_ERROR_INVALID_VALUE);
    *mmap_export = devinfo->settings.profile != PROFILE_NONE;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_cap_is_create_from_export_pci_supported(const struct doca_devinfo *devinfo,
                                                               uint8_t *from_export) {
    return doca_mmap_cap_is_export_pci_supported(devinfo, from_export);
}

doca_error_t doca_mmap_export_pci(struct doca_mmap *mmap, const struct doca_dev *dev, const void **export_desc,
                                  size_t *export_desc_len) {
    REFUSE_IF(mmap == NULL || dev == NULL || export_desc == NULL || export_desc_len == NULL, DOCA_ERROR_INVALID_VALUE);
    mmap_owner_check(mmap, __func__);
    REFUSE_IF(!mmap->started, DOCA_ERROR_BAD_STATE);
    REFUSE_IF(mmap->imported, DOCA_ERROR_NOT_PERMITTED);
    REFUSE_IF(!mmap_has_device(mmap, dev), DOCA_ERROR_NOT_FOUND);
    REFUSE_IF((mmap->access & ACCESS_PCI) == 0, DOCA_ERROR_NOT_PERMITTED);
    REFUSE_IF(dev->info.settings.profile == PROFILE_NONE || (mmap->dmabuf && !dev->info.settings.dmabuf_export),
              DOCA_ERROR_NOT_SUPPORTED);
    if ((mmap->access & DOCA_ACCESS_FLAG_PCI_RELAXED_ORDERING) != 0) { /* seen not to go with an export */
        return DOCA_ERROR_DRIVER;
    }
    REFUSE_IF(!mmap->exported && !export_fill(mmap), DOCA_ERROR_OPERATING_SYSTEM);
    mmap->exported = true;
    *export_desc = &mmap->descriptor;
    *export_desc_len = sizeof mmap->descriptor;
    return DOCA_SUCCESS;
}

doca_error_t doca_mmap_create_from_export(const union doca_data *user_data, const void *export_desc,
                                          size_t export_desc_len, struct doca_dev *dev, struct doca_mmap **mmap) {
    (void)user_data; /* has no getter */
    struct export_descriptor descriptor;
    REFUSE_IF(export_desc == NULL || dev == NULL || mmap == NULL, DOCA_ERROR_INVALID_VALUE);
    REFUSE_IF(dev->info.settings.profile == PROFILE_NONE, DOCA_ERROR_NOT_SUPPORTED);
    REFUSE_IF(!export_parse(export_desc, export_desc_len, &descriptor), DOCA_ERROR_INVALID_VALUE);
    struct doca_mmap *made = calloc(1, sizeof *made);
    REFUSE_IF(made == NULL, DOCA_ERROR_NO_MEMORY);
    mmap_device_add(made, dev);
    made->imported = made->started = true;
    made->descriptor = descriptor;
    made->access = descriptor.access;
    made->address = (uint8_t *)(uintptr_t)descriptor.address;
    made->size = descriptor.size;
    *mmap = made;
    return DOCA_SUCCESS;
}
