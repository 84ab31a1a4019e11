/* SPDX-License-Identifier: Apache-2.0 */
/* test_doca_emulator_memory.c - mmaps, inventories and bufs */
#include <sys/mman.h>

#include "doca_fixture.h"

static uint8_t region[4096];

static struct doca_mmap *mmap_of(struct doca_dev *dev) {
    struct doca_mmap *mmap;
    OK(doca_mmap_create(&mmap));
    OK(doca_mmap_add_dev(mmap, dev));
    OK(doca_mmap_set_memrange(mmap, region, sizeof region));
    OK(doca_mmap_set_permissions(mmap, DOCA_ACCESS_FLAG_LOCAL_READ_WRITE));
    return mmap;
}

/* Facts 4 [H30]: one range, set once and before the start; codes of each call that comes at the wrong time. */
static void test_a_range_is_set_once(struct doca_dev *dev) {
    struct doca_mmap *mmap;
    OK(doca_mmap_create(&mmap));
    OK(doca_mmap_add_dev(mmap, dev));
    EXPECT(doca_mmap_start(mmap), ERROR_BAD_STATE);
    EXPECT(doca_mmap_set_memrange(mmap, NULL, 16), ERROR_INVALID_VALUE);
    EXPECT(doca_mmap_set_memrange(mmap, region, 0), ERROR_INVALID_VALUE);
    EXPECT(doca_mmap_set_memrange(mmap, region, SIZE_MAX), ERROR_INVALID_VALUE);
    OK(doca_mmap_set_memrange(mmap, region, sizeof region));
    EXPECT(doca_mmap_set_memrange(mmap, region, sizeof region), ERROR_NOT_PERMITTED);
    EXPECT(doca_mmap_set_dmabuf_memrange(mmap, 0, region, 0, 16), ERROR_NOT_PERMITTED);
    OK(doca_mmap_start(mmap));
    EXPECT(doca_mmap_start(mmap), ERROR_BAD_STATE);
    EXPECT(doca_mmap_set_memrange(mmap, region, sizeof region), ERROR_BAD_STATE);
    EXPECT(doca_mmap_set_permissions(mmap, 0), ERROR_BAD_STATE);
    EXPECT(doca_mmap_add_dev(mmap, dev), ERROR_NOT_PERMITTED);
    EXPECT(doca_mmap_enable_thread_safety(mmap), ERROR_BAD_STATE);
    OK(doca_mmap_destroy(mmap));
}

/* Facts 4 [H30]: devices of an mmap. */
static void test_devices_are_added_before_the_start(struct doca_dev *dev) {
    struct doca_mmap *mmap;
    settings("DEVICES", "0000:04:00.0", NULL);
    struct doca_dev *other = device_open();
    OK(doca_mmap_create(&mmap));
    OK(doca_mmap_set_memrange(mmap, region, sizeof region));
    EXPECT(doca_mmap_start(mmap), ERROR_BAD_STATE);
    OK(doca_mmap_add_dev(mmap, dev));
    EXPECT(doca_mmap_add_dev(mmap, dev), ERROR_ALREADY_EXIST);
    OK(doca_mmap_add_dev(mmap, other));
    EXPECT(doca_dev_close(other), ERROR_IN_USE);
    OK(doca_mmap_destroy(mmap));
    OK(doca_dev_close(other));
}

/* Facts 4 [H30]: unknown and contradictory permissions. */
static void test_permissions_are_checked(struct doca_dev *dev) {
    struct doca_mmap *mmap = mmap_of(dev);
    EXPECT(doca_mmap_set_permissions(mmap, 1u << 7), ERROR_INVALID_VALUE);
    EXPECT(doca_mmap_set_permissions(mmap, DOCA_ACCESS_FLAG_PCI_READ_ONLY | DOCA_ACCESS_FLAG_PCI_READ_WRITE),
           ERROR_INVALID_VALUE);
    OK(doca_mmap_set_permissions(mmap, DOCA_ACCESS_FLAG_PCI_READ_ONLY));
    OK(doca_mmap_destroy(mmap));
}

/* Facts 4 [H30]: bufs that hold an mmap back, but not one with thread safety. */
static void test_an_mmap_goes_when_its_bufs_have(struct doca_dev *dev) {
    struct doca_buf_inventory *inventory;
    struct doca_buf *buf;
    OK(doca_buf_inventory_create(2, &inventory));
    OK(doca_buf_inventory_start(inventory));
    struct doca_mmap *mmap = mmap_of(dev);
    OK(doca_mmap_start(mmap));
    OK(doca_buf_inventory_buf_get_by_addr(inventory, mmap, region, 16, &buf));
    EXPECT(doca_mmap_destroy(mmap), ERROR_NOT_PERMITTED);
    EXPECT(doca_mmap_enable_thread_safety(mmap), ERROR_BAD_STATE);
    buf_release(buf);
    OK(doca_mmap_destroy(mmap));

    mmap = mmap_of(dev);
    OK(doca_mmap_enable_thread_safety(mmap));
    OK(doca_mmap_start(mmap));
    OK(doca_buf_inventory_buf_get_by_addr(inventory, mmap, region, 16, &buf));
    OK(doca_mmap_destroy(mmap));
    buf_release(buf);
    OK(doca_buf_inventory_destroy(inventory));
}

/* Facts 5 [H30]: what an inventory gives, and when it is empty, or not yet whole again. */
static void test_an_inventory_gives_what_it_has(struct doca_dev *dev) {
    struct doca_buf_inventory *inventory;
    struct doca_buf *bufs[2], *more;
    uint16_t references;
    struct doca_mmap *mmap = mmap_of(dev);
    EXPECT(doca_buf_inventory_create(0, &inventory), ERROR_INVALID_VALUE);
    OK(doca_buf_inventory_create(2, &inventory));
    OK(doca_buf_inventory_start(inventory));
    EXPECT(doca_buf_inventory_start(inventory), ERROR_BAD_STATE);
    EXPECT(doca_buf_inventory_buf_get_by_addr(inventory, mmap, region, 16, &more), ERROR_BAD_STATE);
    OK(doca_mmap_start(mmap));
    OK(doca_buf_inventory_buf_get_by_addr(inventory, mmap, region, 16, &bufs[0]));
    OK(doca_buf_inventory_buf_get_by_addr(inventory, mmap, region, 16, &bufs[1]));
    EXPECT(doca_buf_inventory_buf_get_by_addr(inventory, mmap, region, 16, &more), ERROR_NO_MEMORY);
    EXPECT(doca_buf_inventory_destroy(inventory), ERROR_IN_USE);
    OK(doca_buf_dec_refcount(bufs[0], &references));
    CHECK(references == 1, "%u before", references);
    EXPECT(doca_buf_dec_refcount(bufs[0], NULL), ERROR_BAD_STATE);
    buf_release(bufs[1]);
    OK(doca_buf_inventory_destroy(inventory));
    OK(doca_mmap_destroy(mmap));
}

/* Facts 5 [H30]: a buf lies inside of its mmap; by address it is empty, by data it is full. */
static void test_a_buf_is_inside_of_its_mmap(struct doca_dev *dev) {
    struct doca_buf_inventory *inventory;
    struct doca_buf *buf;
    struct doca_mmap *mmap = mmap_of(dev);
    void *before = (void *)((uintptr_t)region - 1);
    OK(doca_mmap_start(mmap));
    OK(doca_buf_inventory_create(2, &inventory));
    OK(doca_buf_inventory_start(inventory));
    EXPECT(doca_buf_inventory_buf_get_by_addr(inventory, mmap, region + 4081, 16, &buf), ERROR_INVALID_VALUE);
    EXPECT(doca_buf_inventory_buf_get_by_addr(inventory, mmap, region, SIZE_MAX, &buf), ERROR_INVALID_VALUE);
    EXPECT(doca_buf_inventory_buf_get_by_addr(inventory, mmap, before, 16, &buf), ERROR_INVALID_VALUE);
    EXPECT(doca_buf_inventory_buf_get_by_args(inventory, mmap, region, 16, region + 8, 9, &buf), ERROR_INVALID_VALUE);
    OK(doca_buf_inventory_buf_get_by_addr(inventory, mmap, region + 4080, 16, &buf));
    CHECK(data_length(buf) == 0, "by address: %zu", data_length(buf));
    buf_release(buf);
    OK(doca_buf_inventory_buf_get_by_data(inventory, mmap, region + 8, 16, &buf));
    CHECK(data_length(buf) == 16, "by data: %zu", data_length(buf));
    buf_release(buf);
    OK(doca_buf_inventory_destroy(inventory));
    OK(doca_mmap_destroy(mmap));
}

/* Facts 4 and 10 [H30]: of a dmabuf, lookups take the address that was given, bytes come from the offset in the file.
 */
static void test_a_dmabuf_is_reached_by_its_address(void) {
    struct bench bench;
    struct doca_mmap *mmap;
    struct doca_buf *target;
    uint8_t *address = (uint8_t *)(uintptr_t)0x7000000000, got[64];
    int fd = memfd_create("dmabuf", 0);
    CHECK(fd >= 0 && ftruncate(fd, 8192) == 0, "memfd");
    bench_open(&bench);
    OK(doca_mmap_create(&mmap));
    OK(doca_mmap_add_dev(mmap, bench.dev));
    OK(doca_mmap_set_permissions(mmap, DOCA_ACCESS_FLAG_LOCAL_READ_WRITE | DOCA_ACCESS_FLAG_PCI_READ_WRITE));
    EXPECT(doca_mmap_set_dmabuf_memrange(mmap, -1, address, 0, 4096), ERROR_INVALID_VALUE);
    EXPECT(doca_mmap_set_dmabuf_memrange(mmap, 1000000, address, 0, 4096), ERROR_DRIVER);
    OK(doca_mmap_set_dmabuf_memrange(mmap, fd, address, 100, 4096));
    OK(doca_mmap_start(mmap));
    text_fill(bench.memory, 64);
    struct doca_buf *source = buf_data(&bench, 0, 64);
    OK(doca_buf_inventory_buf_get_by_addr(bench.inventory, mmap, address + 50, 64, &target));
    memcpy_submit(&bench, source, target, 0);
    progress_reports(bench.pe, 1);
    CHECK(pread(fd, got, sizeof got, 150) == (ssize_t)sizeof got, "pread");
    CHECK(memcmp(got, bench.memory, sizeof got) == 0, "bytes in the file");
    buf_release(source);
    buf_release(target);
    OK(doca_mmap_destroy(mmap));
    bench_close(&bench);
    close(fd);
}

int main(void) {
    settings(NULL);
    struct doca_dev *dev = device_open();
    test_a_range_is_set_once(dev);
    test_devices_are_added_before_the_start(dev);
    test_permissions_are_checked(dev);
    test_an_mmap_goes_when_its_bufs_have(dev);
    test_an_inventory_gives_what_it_has(dev);
    test_a_buf_is_inside_of_its_mmap(dev);
    settings(NULL);
    test_a_dmabuf_is_reached_by_its_address();
    OK(doca_dev_close(dev));
    return 0;
}
