/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doca_device.h - declarations shared by the files that use DOCA
 *
 *   doca_device.c   devices, memory that they may reach, errors
 *   doca_context.c  the two accelerators, Compress and DMA, behind one interface
 *   doca.c          the backend: channels, and failures of an accelerator
 *   doca_export.c   the host's side
 *
 * DOCA and its emulator (native/doca_emulator/) use the same source; only the headers and the library differ. One
 * thread owns a progress engine and its objects; only mmaps with 'shared' are used by several threads.
 */
#ifndef SS_DOCA_DEVICE_H
#define SS_DOCA_DEVICE_H

#include <doca_dev.h>
#include <doca_error.h>
#include <doca_mmap.h>
#include <stddef.h>
#include <stdint.h>

#include "shadowserve.h"

/* Use of a device. */
enum ss_doca_use { SS_DOCA_WORK, SS_DOCA_EXPORT };

/*
 * ss_doca_result() converts the return value of 'call' into a result, and keeps both for ss_device_error() unless it
 * was DOCA_SUCCESS.
 */
enum ss_result ss_doca_result(doca_error_t error, const char *call);

/*
 * ss_doca_open() opens the device with this PCI address or name, or ("") the first device that supports 'use'.
 * SS_NOT_SUPPORTED if there is no such device.
 */
enum ss_result ss_doca_open(const char *name, enum ss_doca_use use, struct doca_dev **device);

/* ss_doca_name() writes a device's PCI address and name. */
void ss_doca_name(const struct doca_dev *device, char *name, size_t size);

/*
 * ss_doca_register() lets the device reach memory of this process, or of a GPU by 'dmabuf_fd' unless that is -1.
 * 'shared': several threads will use the mmap.
 */
enum ss_result ss_doca_register(struct doca_dev *device, void *address, uint64_t size, int dmabuf_fd,
                                uint32_t permissions, int shared, struct doca_mmap **mmap);

/* ss_doca_import() lets the device reach memory that another process exported, from several threads. */
enum ss_result ss_doca_import(struct doca_dev *device, const void *descriptor, size_t size, struct doca_mmap **mmap);

#endif /* SS_DOCA_DEVICE_H */
