/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_doca_export.c - any bytes, imported as another process's memory by the DOCA emulator
 *
 * Invariants: a refusal has one code and leaves no object behind. An imported mmap has a range and one PCI permission,
 * allows bufs only inside of this range, and a copy from it ends, even if its descriptor is wrong.
 *
 * Input: one byte that says whether to repair the checksum, then the descriptor. That every bit counts for the checksum
 * is tested in test_doca_emulator_export.c.
 */
#include "../doca_emulator/src/emulator.h"
#include "check.h"

static uint8_t target[64];

static void copied(struct doca_dma_task_memcpy *task, union doca_data user, union doca_data context) {
    (void)context;
    *(int *)user.ptr = 1;
    doca_task_free(doca_dma_task_memcpy_as_task(task));
}

/* Copies from the imported memory, which most likely fails. */
static void copy_from(struct doca_dev *dev, struct doca_mmap *local, struct doca_mmap *imported,
                      struct doca_buf_inventory *inventory, uint8_t *address, size_t size) {
    struct doca_dma_task_memcpy *task;
    struct doca_buf *source, *copy;
    enum doca_ctx_states state;
    struct doca_dma *dma;
    struct doca_pe *pe;
    int done = 0;
    CHECK(doca_pe_create(&pe) == DOCA_SUCCESS && doca_dma_create(dev, &dma) == DOCA_SUCCESS, "no DMA");
    struct doca_ctx *ctx = doca_dma_as_ctx(dma);
    CHECK(doca_pe_connect_ctx(pe, ctx) == DOCA_SUCCESS, "connect");
    CHECK(doca_dma_task_memcpy_set_conf(dma, copied, copied, 1) == DOCA_SUCCESS, "configure");
    CHECK(doca_ctx_start(ctx) == DOCA_SUCCESS, "start");
    CHECK(doca_buf_inventory_buf_get_by_data(inventory, imported, address, size, &source) == DOCA_SUCCESS, "source");
    CHECK(doca_buf_inventory_buf_get_by_addr(inventory, local, target, sizeof target, &copy) == DOCA_SUCCESS, "target");
    CHECK(doca_dma_task_memcpy_alloc_init(dma, source, copy, (union doca_data){.ptr = &done}, &task) == DOCA_SUCCESS,
          "task");
    CHECK(doca_task_submit(doca_dma_task_memcpy_as_task(task)) == DOCA_SUCCESS, "submit");
    while (!done) {
        doca_pe_progress(pe);
    }
    doca_ctx_stop(ctx);
    while (doca_ctx_get_state(ctx, &state) == DOCA_SUCCESS && state != DOCA_CTX_STATE_IDLE) {
        doca_pe_progress(pe);
    }
    doca_buf_dec_refcount(source, NULL);
    doca_buf_dec_refcount(copy, NULL);
    CHECK(doca_dma_destroy(dma) == DOCA_SUCCESS && doca_pe_destroy(pe) == DOCA_SUCCESS, "destroy");
}

static struct doca_dev *device_open(void) {
    struct doca_devinfo **list;
    struct doca_dev *dev;
    uint32_t count;
    CHECK(doca_devinfo_create_list(&list, &count) == DOCA_SUCCESS, "list");
    CHECK(doca_dev_open(list[0], &dev) == DOCA_SUCCESS, "open");
    doca_devinfo_destroy_list(list);
    return dev;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct doca_buf_inventory *inventory;
    struct export_descriptor descriptor;
    struct doca_mmap *imported, *local;
    struct doca_buf *buf;
    void *address;
    size_t length;
    if (size == 0) {
        return 0;
    }
    size_t given = size - 1 < sizeof descriptor ? size - 1 : sizeof descriptor;
    memcpy(&descriptor, data + 1, given);
    if (data[0] % 2 == 1 && given == sizeof descriptor) {
        descriptor.crc32 = codec_crc32(&descriptor, offsetof(struct export_descriptor, crc32));
    }
    struct doca_dev *dev = device_open();
    doca_error_t result = doca_mmap_create_from_export(NULL, &descriptor, given, dev, &imported);
    CHECK(result == DOCA_SUCCESS || result == DOCA_ERROR_INVALID_VALUE, "%s", doca_error_get_name(result));
    if (result == DOCA_SUCCESS) {
        CHECK(given == sizeof descriptor, "of %zu bytes", given);
        address = imported->address;
        length = imported->size;
        CHECK(length > 0, "range");
        CHECK(doca_mmap_create(&local) == DOCA_SUCCESS && doca_mmap_add_dev(local, dev) == DOCA_SUCCESS, "local");
        doca_mmap_set_memrange(local, target, sizeof target);
        doca_mmap_set_permissions(local, DOCA_ACCESS_FLAG_LOCAL_READ_WRITE);
        doca_mmap_start(local);
        doca_buf_inventory_create(2, &inventory);
        doca_buf_inventory_start(inventory);
        CHECK(doca_buf_inventory_buf_get_by_addr(inventory, imported, address, length + 1, &buf) != DOCA_SUCCESS,
              "a buf larger than the range");
        copy_from(dev, local, imported, inventory, address, length < sizeof target ? length : sizeof target);
        CHECK(doca_buf_inventory_destroy(inventory) == DOCA_SUCCESS, "inventory");
        CHECK(doca_mmap_destroy(imported) == DOCA_SUCCESS && doca_mmap_destroy(local) == DOCA_SUCCESS, "mmaps");
    }
    CHECK(doca_dev_close(dev) == DOCA_SUCCESS, "close");
    return 0;
}
