/* SPDX-License-Identifier: Apache-2.0 */
/* test_doca_emulator_objects.c - rules about devices, settings, mmaps, bufs and contexts */
#include <sys/mman.h>

#include "doca_fixture.h"

#include "doca_version.h"

static uint8_t region[4096];

/* ---- Devices, capabilities, settings -------------------------------------------------------------------------- */

/* Facts 1 [H25, H27, H30]: values and spellings of codes; unknown ones have a text, too. Ours: the version. */
static void test_errors_have_their_numbers_and_names(void) {
    CHECK(DOCA_ERROR_NO_MEMORY == 7 && DOCA_ERROR_IO_FAILED == 17 && DOCA_ERROR_SKIPPED == 30, "numbers");
    CHECK(strcmp(doca_error_get_name(DOCA_SUCCESS), "DOCA_SUCCESS") == 0, "success");
    CHECK(strcmp(doca_error_get_name(DOCA_ERROR_IO_FAILED), "DOCA_ERROR_IO_FAILED") == 0, "name");
    CHECK(strcmp(doca_error_get_name((doca_error_t)99), "unrecognized error code") == 0, "unknown name");
    for (int code = 0; code <= DOCA_ERROR_SKIPPED; code++) {
        CHECK(strncmp(doca_error_get_name((doca_error_t)code), "DOCA_", 5) == 0, "name of %d", code);
    }
    CHECK(strcmp(doca_version_runtime(), "3.0.0-emulator") == 0, "%s", doca_version_runtime());
}

/* Facts 3 [H30]: lists, addresses in both forms, names; an opened device outlives its list. */
static void test_devices_are_listed_and_found_by_address(void) {
    struct doca_devinfo **list;
    struct doca_dev *dev;
    uint32_t count;
    uint8_t equal;
    char text[DOCA_DEVINFO_IBDEV_NAME_SIZE];
    OK(doca_devinfo_create_list(&list, &count));
    CHECK(count == 2, "%u devices", count);
    OK(doca_devinfo_is_equal_pci_addr(list[1], "3a:00.1", &equal));
    CHECK(equal == 1, "short form");
    OK(doca_devinfo_is_equal_pci_addr(list[1], "0000:3a:00.1", &equal));
    CHECK(equal == 0, "another domain");
    EXPECT(doca_devinfo_is_equal_pci_addr(list[1], "3a", &equal), ERROR_INVALID_VALUE);
    OK(doca_devinfo_get_ibdev_name(list[0], text, DOCA_DEVINFO_IBDEV_NAME_SIZE));
    CHECK(strcmp(text, "mlx5_0") == 0, "%s", text);
    EXPECT(doca_devinfo_get_ibdev_name(list[0], text, 8), ERROR_INVALID_VALUE);
    OK(doca_dev_open(list[1], &dev));
    OK(doca_devinfo_destroy_list(list));
    OK(doca_devinfo_get_pci_addr_str(doca_dev_as_devinfo(dev), text));
    CHECK(strcmp(text, "0001:3a:00.1") == 0, "%s", text);
    OK(doca_dev_close(dev));
    settings("DEVICES", "", NULL);
    EXPECT(doca_devinfo_create_list(&list, &count), ERROR_NOT_FOUND);
}

/* Facts 8 [N29, DPDK], 9 [FD], 12 (8): what each card can do, and how large its bufs may be; in NIC mode, nothing. */
static void test_each_profile_has_its_capabilities(void) {
    static const struct {
        const char *profile;
        doca_error_t deflate, lz4;
        uint64_t bytes;
    } profiles[] = {{"bf3", DOCA_SUCCESS, DOCA_SUCCESS, 2097152},
                    {"bf2", DOCA_SUCCESS, DOCA_ERROR_NOT_SUPPORTED, 134217728},
                    {"none", DOCA_ERROR_NOT_SUPPORTED, DOCA_ERROR_NOT_SUPPORTED, 0}};
    for (size_t i = 0; i < COUNT_OF(profiles); i++) {
        doca_error_t deflate = profiles[i].deflate, lz4 = profiles[i].lz4;
        struct doca_compress *compress;
        struct doca_dma *dma;
        uint64_t bytes = 0;
        uint8_t exports;
#ifndef SS_HAVE_LZ4
        lz4 = DOCA_ERROR_NOT_SUPPORTED;
#endif
        settings("PROFILE", profiles[i].profile, NULL);
        struct doca_dev *dev = device_open();
        struct doca_devinfo *info = doca_dev_as_devinfo(dev);
        CHECK(doca_compress_cap_task_decompress_deflate_is_supported(info) == deflate, "deflate %zu", i);
        CHECK(doca_compress_cap_task_decompress_lz4_block_is_supported(info) == lz4, "block %zu", i);
        CHECK(doca_compress_cap_task_decompress_deflate_get_max_buf_size(info, &bytes) == deflate, "%zu", i);
        CHECK(bytes == profiles[i].bytes, "%llu bytes", (unsigned long long)bytes);
        CHECK(doca_dma_cap_task_memcpy_is_supported(info) == deflate, "DMA %zu", i);
        CHECK(doca_dma_cap_task_memcpy_get_max_buf_size(info, &bytes) == deflate, "%zu", i);
        CHECK(bytes == (deflate == DOCA_SUCCESS ? 2097152 : 0), "DMA of %llu", (unsigned long long)bytes);
        OK(doca_mmap_cap_is_export_pci_supported(info, &exports));
        CHECK(exports == (deflate == DOCA_SUCCESS), "export %u", exports);
        OK(doca_mmap_cap_is_create_from_export_pci_supported(info, &exports));
        CHECK(exports == (deflate == DOCA_SUCCESS), "import %u", exports);
        if (deflate != DOCA_SUCCESS) {
            EXPECT(doca_compress_create(dev, &compress), ERROR_INITIALIZATION);
            EXPECT(doca_dma_create(dev, &dma), ERROR_INITIALIZATION);
        } else if (lz4 != DOCA_SUCCESS) {
            OK(doca_compress_create(dev, &compress));
            EXPECT(doca_compress_task_decompress_lz4_block_set_conf(compress, note_block, note_block, 1),
                   ERROR_NOT_SUPPORTED);
            OK(doca_compress_destroy(compress));
        }
        OK(doca_dev_close(dev));
    }
}

/* Ours: the limits can be set, so that a test needs no large data. */
static void test_limits_can_be_set(void) {
    struct doca_dma *dma;
    uint64_t bytes;
    uint32_t number;
    struct doca_dev *dev = device_open();
    OK(doca_dma_cap_task_memcpy_get_max_buf_size(doca_dev_as_devinfo(dev), &bytes));
    CHECK(bytes == 4096, "%llu bytes", (unsigned long long)bytes);
    OK(doca_dma_create(dev, &dma));
    OK(doca_dma_cap_get_max_num_tasks(dma, &number));
    CHECK(number == 3, "%u tasks", number);
    EXPECT(doca_dma_task_memcpy_set_conf(dma, note_memcpy, note_memcpy, 4), ERROR_INVALID_VALUE);
    OK(doca_dma_task_memcpy_set_conf(dma, note_memcpy, note_memcpy, 3));
    OK(doca_dma_destroy(dma));
    OK(doca_dev_close(dev));
}

static void list_devices(void) {
    struct doca_devinfo **list;
    uint32_t count;
    OK(doca_devinfo_create_list(&list, &count));
    OK(doca_devinfo_destroy_list(list));
}

/* Ours: a typing error does not pass for the default. */
static void test_a_setting_that_is_none_aborts(void) {
    static const char *const malformed[][2] = {
        {"PROFILE", "bf4"},      {"DEVICES", "03:00.0"},         {"DEVICES", "0000:03:00.9"},
        {"MAX_BUF_BYTES", "2M"}, {"MAX_BUF_BYTES", "0"},         {"MAX_TASKS", ""},
        {"DEFLATE_GBPS", "0"},   {"DMA_GBPS", "fast"},           {"LATENCY_US", "1.5"},
        {"FAULT", "dma"},        {"REGISTER_US_PER_MIB", "-1"},  {"HANG", "dma"},
        {"FAULT", "dma:0"},      {"FAULT", "compress:3"},        {"FAULT", "dma:1,"},
        {"FAULT", "dma:1-"},     {"OUT_OF_ORDER", "yes"},        {"DMABUF_EXPORT", "refused"},
        {"DEFLATE_GBPS", "nan"}, {"DECOMPRESS_ERROR", "ignore"}, {"MAX_BUF_BYTES", "1073741825"},
    };
    for (size_t i = 0; i < COUNT_OF(malformed); i++) {
        settings(malformed[i][0], malformed[i][1], NULL);
        expect_abort(list_devices, "is malformed; it takes ");
    }
    settings("FAULTS", "dma:1", NULL);
    expect_abort(list_devices, "there is no DOCA_EMULATOR_FAULTS");
    settings("PROFILE", "bf2", "DEVICES", "0000:03:00.0", "FAULT", "dma:1,decompress:2+,dma:30*", "DMA_GBPS",
             "unlimited", "DEFLATE_GBPS", "0.5", "LATENCY_US", "60000000", "OUT_OF_ORDER", "18446744073709551615",
             "DMABUF_EXPORT", "allow", "DECOMPRESS_ERROR", "continue", NULL);
    list_devices();
}

/* ---- Memory --------------------------------------------------------------------------------------------------- */

/* Facts 4 [H30]: bufs hold an mmap back, but not one with thread safety. */
static void test_an_mmap_goes_when_its_bufs_have(void) {
    for (int shared = 0; shared <= 1; shared++) {
        struct doca_mmap *mmap = region_mmap(region, sizeof region, DOCA_ACCESS_FLAG_LOCAL_READ_WRITE);
        if (shared) {
            OK(doca_mmap_enable_thread_safety(mmap));
        }
        OK(doca_mmap_start(mmap));
        struct doca_buf *buf = space_of(mmap, region, 16);
        if (!shared) {
            EXPECT(doca_mmap_destroy(mmap), ERROR_NOT_PERMITTED);
            EXPECT(doca_mmap_enable_thread_safety(mmap), ERROR_BAD_STATE);
            buf_release(buf);
        }
        OK(doca_mmap_destroy(mmap));
    }
}

/* Facts 5 [H30]: what an inventory gives, and when it is empty, or not yet whole again. */
static void test_an_inventory_gives_what_it_has(void) {
    struct doca_buf_inventory *inventory;
    struct doca_buf *bufs[2], *more;
    uint16_t references;
    EXPECT(doca_buf_inventory_create(0, &inventory), ERROR_INVALID_VALUE);
    OK(doca_buf_inventory_create(2, &inventory));
    EXPECT(doca_buf_inventory_buf_get_by_addr(inventory, bench.mmap, bench.memory, 16, &more), ERROR_BAD_STATE);
    OK(doca_buf_inventory_start(inventory));
    EXPECT(doca_buf_inventory_start(inventory), ERROR_BAD_STATE);
    for (int i = 0; i < 2; i++) {
        OK(doca_buf_inventory_buf_get_by_addr(inventory, bench.mmap, bench.memory, 16, &bufs[i]));
    }
    EXPECT(doca_buf_inventory_buf_get_by_addr(inventory, bench.mmap, bench.memory, 16, &more), ERROR_NO_MEMORY);
    EXPECT(doca_buf_inventory_destroy(inventory), ERROR_IN_USE);
    OK(doca_buf_dec_refcount(bufs[0], &references));
    CHECK(references == 1, "%u before", references);
    EXPECT(doca_buf_dec_refcount(bufs[0], NULL), ERROR_BAD_STATE);
    OK(doca_buf_dec_refcount(bufs[1], NULL));
    OK(doca_buf_inventory_destroy(inventory));
}

/* Facts 5 [H30]: a buf lies inside of its mmap, which has started; by address it is empty, by data it is full. */
static void test_a_buf_is_inside_of_its_mmap(void) {
    struct doca_buf *buf;
    struct doca_mmap *mmap = region_mmap(region, sizeof region, 0);
    void *before = (void *)((uintptr_t)region - 1);
    EXPECT(doca_buf_inventory_buf_get_by_addr(bench.inventory, mmap, region, 16, &buf), ERROR_BAD_STATE);
    OK(doca_mmap_start(mmap));
    EXPECT(doca_buf_inventory_buf_get_by_addr(bench.inventory, mmap, region + 4081, 16, &buf), ERROR_INVALID_VALUE);
    EXPECT(doca_buf_inventory_buf_get_by_addr(bench.inventory, mmap, region, SIZE_MAX, &buf), ERROR_INVALID_VALUE);
    EXPECT(doca_buf_inventory_buf_get_by_addr(bench.inventory, mmap, before, 16, &buf), ERROR_INVALID_VALUE);
    buf = space_of(mmap, region + 4080, 16);
    CHECK(data_length(buf) == 0, "by address: %zu", data_length(buf));
    buf_release(buf);
    buf = data_of(mmap, region + 8, 16);
    CHECK(data_length(buf) == 16, "by data: %zu", data_length(buf));
    buf_release(buf);
    OK(doca_mmap_destroy(mmap));
}

/* Facts 4 and 10 [H30]: of a dmabuf, lookups take the given address, bytes come from the offset in the file. */
static void test_a_dmabuf_is_reached_by_its_address(void) {
    struct doca_mmap *mmap;
    uint8_t *address = (uint8_t *)(uintptr_t)0x7000000000, got[64];
    int fd = memfd_create("dmabuf", 0);
    CHECK(fd >= 0 && ftruncate(fd, 8192) == 0, "memfd");
    OK(doca_mmap_create(&mmap));
    OK(doca_mmap_add_dev(mmap, bench.dev));
    OK(doca_mmap_set_permissions(mmap, DOCA_ACCESS_FLAG_LOCAL_READ_WRITE | DOCA_ACCESS_FLAG_PCI_READ_WRITE));
    EXPECT(doca_mmap_set_dmabuf_memrange(mmap, -1, address, 0, 4096), ERROR_INVALID_VALUE);
    EXPECT(doca_mmap_set_dmabuf_memrange(mmap, 1000000, address, 0, 4096), ERROR_DRIVER);
    OK(doca_mmap_set_dmabuf_memrange(mmap, fd, address, 100, 4096));
    OK(doca_mmap_start(mmap));
    text_fill(bench.memory, 64);
    struct doca_buf *target = space_of(mmap, address + 50, 64);
    CHECK(copy_once(data_at(0, 64), target).status == DOCA_SUCCESS, "copied");
    CHECK(pread(fd, got, sizeof got, 150) == (ssize_t)sizeof got, "pread");
    CHECK(memcmp(got, bench.memory, sizeof got) == 0, "bytes in the file");
    buf_release(target);
    OK(doca_mmap_destroy(mmap));
    close(fd);
}

/* ---- Contexts and tasks --------------------------------------------------------------------------------------- */

/* Facts 6 [H30] and 12 (3, 4): stopping goes on until all tasks are done, and freed. */
static void test_a_context_is_idle_when_its_tasks_are_freed(void) {
    reports_free_tasks = 0;
    struct doca_task *task = memcpy_submit(data_at(0, 64), space_at(64, 64), 1);
    EXPECT(doca_ctx_stop(bench.dma_ctx), ERROR_IN_PROGRESS);
    EXPECT(doca_ctx_stop(bench.dma_ctx), ERROR_IN_PROGRESS);
    CHECK(state_of(bench.dma_ctx) == DOCA_CTX_STATE_STOPPING, "it is stopping");
    progress_reports(1);
    CHECK(kept == task, "the task");
    for (int i = 0; i < 100; i++) {
        CHECK(doca_pe_progress(bench.pe) == 0, "nothing moves");
    }
    CHECK(state_of(bench.dma_ctx) == DOCA_CTX_STATE_STOPPING, "a task is not freed yet");
    EXPECT(doca_task_submit(task), ERROR_BAD_STATE);
    doca_task_free(task);
    CHECK(doca_pe_progress(bench.pe) == 1 && state_of(bench.dma_ctx) == DOCA_CTX_STATE_IDLE, "now it is idle");
}

/* Facts 7 [H30] and 12 (5): a call of progress reports one completion at most. */
static void test_progress_reports_one_at_a_time(void) {
    for (size_t i = 0; i < TASKS_MAX; i++) {
        memcpy_submit(data_at(64 * i, 64), space_at(65536 + 64 * i, 64), i);
    }
    for (uint32_t before = 0; report_count < TASKS_MAX; before = report_count) {
        uint8_t moved = doca_pe_progress(bench.pe);
        CHECK(moved <= 1 && report_count == before + moved, "%u reports by one call", report_count - before);
        CHECK(moved == 0 || reports[before].user_data == before, "in order, where nothing else was asked for");
    }
    CHECK(doca_pe_progress(bench.pe) == 0, "nothing is left");
}

/* Facts 9 [H30]: completions may come in any order. Here a seed says which. */
static void test_completions_come_out_of_order_by_a_seed(void) {
    struct doca_buf *source = data_at(0, 64);
    int out_of_order = 0;
    for (int trial = 0; trial < 20 && !out_of_order; trial++) {
        struct doca_buf *targets[TASKS_MAX];
        uint64_t seen = 0;
        report_count = 0;
        for (size_t i = 0; i < TASKS_MAX; i++) {
            targets[i] = space_at(65536 + 64 * i, 64);
            memcpy_submit(source, targets[i], i);
        }
        progress_reports(TASKS_MAX);
        for (size_t i = 0; i < TASKS_MAX; i++) {
            out_of_order |= reports[i].user_data != i;
            seen |= 1ull << reports[i].user_data;
            buf_release(targets[i]);
        }
        CHECK(seen == (1ull << TASKS_MAX) - 1, "each once: %llx", (unsigned long long)seen);
    }
    CHECK(out_of_order, "20 trials in order");
}

/* Facts 7 [H30]: a task that completed may be given other bufs, and submitted again. */
static void test_a_task_can_be_used_again(void) {
    reports_free_tasks = 0;
    struct doca_buf *target = space_at(64, 64), *other = space_at(128, 64);
    struct doca_task *task = memcpy_submit(data_at(0, 64), target, 9);
    progress_reports(1);
    doca_dma_task_memcpy_set_src((struct doca_dma_task_memcpy *)task, target);
    doca_dma_task_memcpy_set_dst((struct doca_dma_task_memcpy *)task, other);
    OK(doca_task_submit(task));
    progress_reports(2);
    CHECK(reports[1].user_data == 9 && reports[1].status == DOCA_SUCCESS, "again");
    CHECK(data_length(other) == 64, "into the other buf");
    doca_task_free(task);
}

/* Facts 8 and 9 [H30]: as many tasks at a time as were configured. */
static void test_tasks_run_out(void) {
    struct doca_task *tasks[TASKS_MAX];
    struct doca_dma_task_memcpy *more;
    struct doca_buf *source = data_at(0, 64), *target = space_at(64, 64);
    for (size_t i = 0; i < TASKS_MAX; i++) {
        tasks[i] = memcpy_task(source, target, 0);
    }
    EXPECT(doca_dma_task_memcpy_alloc_init(bench.dma, source, target, (union doca_data){.u64 = 0}, &more),
           ERROR_NO_MEMORY);
    doca_task_free(tasks[3]);
    tasks[3] = memcpy_task(source, target, 0);
    for (size_t i = 0; i < TASKS_MAX; i++) {
        doca_task_free(tasks[i]);
    }
}

int main(void) {
    BARE_RULE(test_errors_have_their_numbers_and_names, NULL);
    BARE_RULE(test_devices_are_listed_and_found_by_address, "DEVICES", "0000:03:00.0,0001:3a:00.1");
    BARE_RULE(test_each_profile_has_its_capabilities, NULL);
    BARE_RULE(test_limits_can_be_set, "MAX_BUF_BYTES", "4096", "MAX_TASKS", "3");
    BARE_RULE(test_a_setting_that_is_none_aborts, NULL);
    RULE(test_an_mmap_goes_when_its_bufs_have, NULL);
    RULE(test_an_inventory_gives_what_it_has, NULL);
    RULE(test_a_buf_is_inside_of_its_mmap, NULL);
    RULE(test_a_dmabuf_is_reached_by_its_address, NULL);
    RULE(test_a_context_is_idle_when_its_tasks_are_freed, "LATENCY_US", "1000");
    RULE(test_progress_reports_one_at_a_time, NULL);
    RULE(test_completions_come_out_of_order_by_a_seed, "OUT_OF_ORDER", "12345");
    RULE(test_a_task_can_be_used_again, NULL);
    RULE(test_tasks_run_out, NULL);
    return 0;
}
