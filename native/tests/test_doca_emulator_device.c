/* SPDX-License-Identifier: Apache-2.0 */
/* test_doca_emulator_device.c - devices, capabilities of the profiles, settings, error names */
#include "doca_fixture.h"

#include "doca_version.h"

/* Facts 1 [H25, H27, H30]: values and spellings of codes; unknown ones have a text, too. */
static void test_errors_have_their_numbers_and_names(void) {
    CHECK(DOCA_ERROR_NO_MEMORY == 7 && DOCA_ERROR_IO_FAILED == 17 && DOCA_ERROR_SKIPPED == 30, "numbers");
    CHECK(strcmp(doca_error_get_name(DOCA_SUCCESS), "DOCA_SUCCESS") == 0, "success");
    CHECK(strcmp(doca_error_get_name(DOCA_ERROR_IO_FAILED), "DOCA_ERROR_IO_FAILED") == 0, "name");
    CHECK(strcmp(doca_error_get_name((doca_error_t)99), "unrecognized error code") == 0, "unknown name");
    CHECK(strcmp(doca_error_get_name((doca_error_t)-1), "unrecognized error code") == 0, "no name at all");
    for (int code = 0; code <= DOCA_ERROR_SKIPPED; code++) {
        CHECK(strncmp(doca_error_get_name((doca_error_t)code), "DOCA_", 5) == 0, "name of %d", code);
    }
}

/* Facts 1 [H30]: the version that runs can be asked for. Ours says what it is. */
static void test_the_version_says_that_it_is_emulated(void) {
    CHECK(strcmp(doca_version_runtime(), "3.0.0-emulator") == 0, "%s", doca_version_runtime());
}

/* Facts 3 [H30]: lists, addresses in both forms, names; an opened device outlives its list. */
static void test_devices_are_listed_and_found_by_address(void) {
    struct doca_devinfo **list;
    struct doca_dev *dev;
    uint32_t count;
    uint8_t equal;
    char text[DOCA_DEVINFO_IBDEV_NAME_SIZE];
    settings("DEVICES", "0000:03:00.0,0001:3a:00.1", NULL);
    OK(doca_devinfo_create_list(&list, &count));
    CHECK(count == 2, "%u devices", count);
    OK(doca_devinfo_get_pci_addr_str(list[1], text));
    CHECK(strcmp(text, "0001:3a:00.1") == 0, "%s", text);
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
    EXPECT(doca_devinfo_create_list(NULL, &count), ERROR_INVALID_VALUE);
    settings("DEVICES", "", NULL);
    EXPECT(doca_devinfo_create_list(&list, &count), ERROR_NOT_FOUND);
}

/* Facts 3 [H30]: a device is counted, and in use while something hangs on it. */
static void test_a_device_is_closed_when_nothing_uses_it(void) {
    struct doca_dma *dma;
    settings(NULL);
    struct doca_dev *dev = device_open();
    CHECK(device_open() == dev, "the same device again");
    OK(doca_dma_create(dev, &dma));
    OK(doca_dev_close(dev));
    EXPECT(doca_dev_close(dev), ERROR_IN_USE);
    OK(doca_dma_destroy(dma));
    OK(doca_dev_close(dev));
}

/* Facts 8 [N29, DPDK] and 9 [FD]: what each card can do, and how large its bufs may be. */
static void test_each_profile_has_its_capabilities(void) {
    static const struct {
        const char *profile;
        doca_error_t deflate, lz4;
        uint64_t bytes;
    } profiles[] = {{"bf3", DOCA_SUCCESS, DOCA_SUCCESS, 2097152},
                    {"bf2", DOCA_SUCCESS, DOCA_ERROR_NOT_SUPPORTED, 134217728},
                    {"none", DOCA_ERROR_NOT_SUPPORTED, DOCA_ERROR_NOT_SUPPORTED, 0}};
    for (size_t i = 0; i < sizeof profiles / sizeof profiles[0]; i++) {
        doca_error_t deflate = profiles[i].deflate, lz4 = profiles[i].lz4;
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
        OK(doca_dev_close(dev));
    }
    EXPECT(doca_compress_cap_task_decompress_deflate_is_supported(NULL), ERROR_INVALID_VALUE);
    EXPECT(doca_dma_cap_task_memcpy_is_supported(NULL), ERROR_INVALID_VALUE);
}

/* Facts 12 (8): a card in NIC mode has no engines. */
static void test_a_card_without_engines_makes_no_contexts(void) {
    struct doca_compress *compress;
    struct doca_dma *dma;
    settings("PROFILE", "none", NULL);
    struct doca_dev *dev = device_open();
    EXPECT(doca_compress_create(dev, &compress), ERROR_INITIALIZATION);
    EXPECT(doca_dma_create(dev, &dma), ERROR_INITIALIZATION);
    OK(doca_dev_close(dev));
}

/* Ours: the limits can be set, so that a test needs no large data. */
static void test_limits_can_be_set(void) {
    struct doca_dma *dma;
    uint64_t bytes;
    uint32_t number;
    settings("MAX_BUF_BYTES", "4096", "MAX_TASKS", "3", NULL);
    struct doca_dev *dev = device_open();
    struct doca_devinfo *info = doca_dev_as_devinfo(dev);
    OK(doca_dma_cap_task_memcpy_get_max_buf_size(info, &bytes));
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
    static const char *const malformed[][2] = {{"PROFILE", "bf4"},
                                               {"DEVICES", "03:00.0"},
                                               {"DEVICES", "0000:03:00.9"},
                                               {"MAX_BUF_BYTES", "2M"},
                                               {"MAX_BUF_BYTES", "0"},
                                               {"MAX_TASKS", ""},
                                               {"DEFLATE_GBPS", "0"},
                                               {"DMA_GBPS", "fast"},
                                               {"LATENCY_US", "1.5"},
                                               {"REGISTER_US_PER_MIB", "-1"},
                                               {"FAULT", "dma"},
                                               {"HANG", "dma"},
                                               {"FAULT", "dma:0"},
                                               {"FAULT", "compress:3"},
                                               {"FAULT", "dma:1,"},
                                               {"FAULT", "dma:1-"},
                                               {"OUT_OF_ORDER", "yes"},
                                               {"DMABUF_EXPORT", "refused"},
                                               {"DECOMPRESS_ERROR", "ignore"},
                                               {"MAX_BUF_BYTES", "1073741825"},
                                               {"DEFLATE_GBPS", "nan"}};
    for (size_t i = 0; i < sizeof malformed / sizeof malformed[0]; i++) {
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

int main(void) {
    test_errors_have_their_numbers_and_names();
    test_the_version_says_that_it_is_emulated();
    test_devices_are_listed_and_found_by_address();
    test_a_device_is_closed_when_nothing_uses_it();
    test_each_profile_has_its_capabilities();
    test_a_card_without_engines_makes_no_contexts();
    test_limits_can_be_set();
    test_a_setting_that_is_none_aborts();
    return 0;
}
