/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doca_device.h - what the files that speak DOCA share
 *
 *   doca_device.c   devices, memory that they may reach, errors
 *   doca_context.c  the two accelerators, Compress and DMA, behind one interface
 *   doca.c          the backend: channels, and what happens when an accelerator fails
 *   doca_export.c   the host's side
 *
 * There is one source for DOCA and for its emulator (native/doca_emulator/): which headers and library these files get
 * is all the difference. One thread owns a progress engine and what goes with it; only mmaps that say so are shared.
 */
#ifndef SS_DOCA_DEVICE_H
#define SS_DOCA_DEVICE_H

#include <doca_dev.h>
#include <doca_error.h>
#include <doca_mmap.h>
#include <stddef.h>
#include <stdint.h>

#include "shadowserve.h"

/* What a device is wanted for. */
enum ss_doca_use { SS_DOCA_WORK, SS_DOCA_EXPORT };

/*
 * ss_doca_result() turns what 'call' returned into a result, and keeps both for ss_device_error() unless it was
 * DOCA_SUCCESS.
 */
enum ss_result ss_doca_result(doca_error_t error, const char *call);

/*
 * ss_doca_open() opens the device of that PCI address or name, or ("") the first one that is good for 'use'.
 * SS_NOT_SUPPORTED where there is none.
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

/* ss_doca_import() lets the device reach what another process exported, from several threads. */
enum ss_result ss_doca_import(struct doca_dev *device, const void *descriptor, size_t size, struct doca_mmap **mmap);

#endif /* SS_DOCA_DEVICE_H */
