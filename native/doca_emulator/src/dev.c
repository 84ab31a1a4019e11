/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dev.c - devices: those of DOCA_EMULATOR_DEVICES, each with accelerators of its own
 *
 * Opening a device that is open gives the same one again, with the settings that it was first opened with.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emulator.h"

static pthread_mutex_t devices_lock = PTHREAD_MUTEX_INITIALIZER;
static struct doca_dev *devices;

doca_error_t doca_devinfo_create_list(struct doca_devinfo ***dev_list, uint32_t *nb_devs) {
    struct settings settings;
    REFUSE_IF(dev_list == NULL || nb_devs == NULL, DOCA_ERROR_INVALID_VALUE);
    settings_read(&settings);
    REFUSE_IF(settings.device_count == 0, DOCA_ERROR_NOT_FOUND);
    /* One block: the pointers, a NULL behind them, and what they point to. */
    size_t heads = (settings.device_count + 1) * sizeof(struct doca_devinfo *);
    struct doca_devinfo **list = calloc(1, heads + settings.device_count * sizeof(struct doca_devinfo));
    REFUSE_IF(list == NULL, DOCA_ERROR_NO_MEMORY);
    struct doca_devinfo *infos = (struct doca_devinfo *)(void *)((char *)list + heads);
    for (uint32_t i = 0; i < settings.device_count; i++) {
        infos[i] = (struct doca_devinfo){.settings = settings, .index = i};
        list[i] = &infos[i];
    }
    *dev_list = list;
    *nb_devs = settings.device_count;
    return DOCA_SUCCESS;
}

doca_error_t doca_devinfo_destroy_list(struct doca_devinfo **dev_list) {
    free(dev_list);
    return dev_list != NULL ? DOCA_SUCCESS : DOCA_ERROR_INVALID_VALUE;
}

static const char *address_of(const struct doca_devinfo *devinfo) {
    return devinfo->settings.devices[devinfo->index];
}

static doca_error_t device_open_locked(const struct doca_devinfo *devinfo, struct doca_dev **dev) {
    for (struct doca_dev *open = devices; open != NULL; open = open->next) {
        if (strcmp(address_of(&open->info), address_of(devinfo)) == 0) {
            open->open_count++;
            *dev = open;
            return DOCA_SUCCESS;
        }
    }
    struct doca_dev *made = calloc(1, sizeof *made);
    REFUSE_IF(made == NULL, DOCA_ERROR_NO_MEMORY);
    made->info = *devinfo;
    made->open_count = 1;
    pthread_mutex_init(&made->lock, NULL);
    made->next = devices;
    devices = made;
    *dev = made;
    return DOCA_SUCCESS;
}

doca_error_t doca_dev_open(struct doca_devinfo *devinfo, struct doca_dev **dev) {
    REFUSE_IF(devinfo == NULL || dev == NULL, DOCA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&devices_lock);
    doca_error_t result = device_open_locked(devinfo, dev);
    pthread_mutex_unlock(&devices_lock);
    return result;
}

static doca_error_t device_close_locked(struct doca_dev *dev) {
    if (dev->open_count == 1) {
        if (atomic_load(&dev->resources) > 0) {
            return DOCA_ERROR_IN_USE;
        }
        struct doca_dev **place = &devices;
        while (*place != dev) {
            place = &(*place)->next;
        }
        *place = dev->next;
        pthread_mutex_destroy(&dev->lock);
        free(dev);
        return DOCA_SUCCESS;
    }
    dev->open_count--;
    return DOCA_SUCCESS;
}

doca_error_t doca_dev_close(struct doca_dev *dev) {
    REFUSE_IF(dev == NULL, DOCA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&devices_lock);
    doca_error_t result = device_close_locked(dev);
    pthread_mutex_unlock(&devices_lock);
    return result;
}

struct doca_devinfo *doca_dev_as_devinfo(const struct doca_dev *dev) {
    return dev != NULL ? (struct doca_devinfo *)&dev->info : NULL;
}

doca_error_t doca_devinfo_get_pci_addr_str(const struct doca_devinfo *devinfo, char *pci_addr_str) {
    REFUSE_IF(devinfo == NULL || pci_addr_str == NULL, DOCA_ERROR_INVALID_VALUE);
    memcpy(pci_addr_str, address_of(devinfo), DOCA_DEVINFO_PCI_ADDR_SIZE);
    return DOCA_SUCCESS;
}

doca_error_t doca_devinfo_is_equal_pci_addr(const struct doca_devinfo *devinfo, const char *pci_addr_str,
                                            uint8_t *is_equal) {
    REFUSE_IF(devinfo == NULL || pci_addr_str == NULL || is_equal == NULL, DOCA_ERROR_INVALID_VALUE);
    const char *address = address_of(devinfo);
    size_t length = strlen(pci_addr_str);
    size_t domain = DOCA_DEVINFO_PCI_ADDR_SIZE - DOCA_DEVINFO_PCI_BDF_SIZE;
    REFUSE_IF(length != DOCA_DEVINFO_PCI_ADDR_SIZE - 1 && length != DOCA_DEVINFO_PCI_BDF_SIZE - 1,
              DOCA_ERROR_INVALID_VALUE);
    *is_equal = strcmp(pci_addr_str, length == DOCA_DEVINFO_PCI_ADDR_SIZE - 1 ? address : address + domain) == 0;
    return DOCA_SUCCESS;
}

doca_error_t doca_devinfo_get_ibdev_name(const struct doca_devinfo *devinfo, char *ibdev_name, uint32_t size) {
    REFUSE_IF(devinfo == NULL || ibdev_name == NULL || size < DOCA_DEVINFO_IBDEV_NAME_SIZE, DOCA_ERROR_INVALID_VALUE);
    snprintf(ibdev_name, size, "mlx5_%u", devinfo->index);
    return DOCA_SUCCESS;
}
