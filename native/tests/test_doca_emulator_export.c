/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_doca_emulator_export.c - memory of another process: exported there, imported here
 *
 * The exporter is a child, started before this process has any thread. It executes commands of one letter each.
 */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "doca_fixture.h"

enum { DESCRIPTOR_MAX = 256, REGION_BYTES = 1 << 20 };

struct exporter {
    pid_t process;
    int commands;
    int answers;
    uint8_t *address; /* of its region, over there */
    uint8_t descriptor[DESCRIPTOR_MAX];
    size_t descriptor_size;
};

static void transfer(int fd, void *bytes, size_t size, int write_it) {
    ssize_t done = write_it ? write(fd, bytes, size) : read(fd, bytes, size);
    CHECK(done == (ssize_t)size, "pipe: %zd of %zu", done, size);
}

static struct doca_mmap *region_exported(uint8_t *region, uint32_t access, const void **descriptor, size_t *size) {
    struct doca_mmap *mmap = region_mmap(region, REGION_BYTES, access);
    OK(doca_mmap_start(mmap));
    OK(doca_mmap_export_pci(mmap, bench.dev, descriptor, size));
    return mmap;
}

/* The child: 's' answers with the sum of the region, 'd' destroys the mmap, 'q' ends. */
static void exporter_run(int commands, int answers, uint32_t access) {
    uint8_t *region = mmap(NULL, REGION_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(region != MAP_FAILED, "mmap");
    memset(region, 3, REGION_BYTES);
    bench.dev = device_open();
    const void *descriptor;
    size_t size;
    struct doca_mmap *mmap = region_exported(region, access, &descriptor, &size);
    transfer(answers, &region, sizeof region, 1);
    transfer(answers, &size, sizeof size, 1);
    transfer(answers, (void *)(uintptr_t)descriptor, size, 1);
    for (;;) {
        char command;
        uint64_t sum = 0;
        transfer(commands, &command, 1, 0);
        if (command == 'd') {
            OK(doca_mmap_destroy(mmap));
        } else if (command == 'q') {
            _exit(0);
        }
        for (size_t i = 0; command == 's' && i < REGION_BYTES; i++) {
            sum += region[i];
        }
        transfer(answers, &sum, sizeof sum, 1);
    }
}

static uint64_t exporter_ask(struct exporter *exporter, char command) {
    uint64_t answer;
    transfer(exporter->commands, &command, 1, 1);
    transfer(exporter->answers, &answer, sizeof answer, 0);
    return answer;
}

static void exporter_start(struct exporter *exporter, uint32_t access) {
    int commands[2], answers[2];
    CHECK(pipe(commands) == 0 && pipe(answers) == 0, "pipe");
    exporter->process = fork();
    CHECK(exporter->process >= 0, "fork");
    if (exporter->process == 0) {
        close(commands[1]);
        exporter_run(commands[0], answers[1], access);
    }
    close(commands[0]);
    close(answers[1]);
    exporter->commands = commands[1];
    exporter->answers = answers[0];
    transfer(answers[0], &exporter->address, sizeof exporter->address, 0);
    transfer(answers[0], &exporter->descriptor_size, sizeof exporter->descriptor_size, 0);
    CHECK(exporter->descriptor_size <= DESCRIPTOR_MAX, "%zu bytes", exporter->descriptor_size);
    transfer(answers[0], exporter->descriptor, exporter->descriptor_size, 0);
}

static void exporter_end(struct exporter *exporter) {
    if (exporter->process > 0) {
        char quit = 'q';
        transfer(exporter->commands, &quit, 1, 1);
        CHECK(waitpid(exporter->process, NULL, 0) == exporter->process, "waitpid");
    }
    close(exporter->commands);
    close(exporter->answers);
}

/* Starts an exporter and the bench, and imports the region. */
static struct doca_mmap *import_region(struct exporter *exporter, uint32_t access) {
    struct doca_mmap *mmap;
    exporter_start(exporter, DOCA_ACCESS_FLAG_LOCAL_READ_WRITE | access);
    bench_open();
    OK(doca_mmap_create_from_export(NULL, exporter->descriptor, exporter->descriptor_size, bench.dev, &mmap));
    return mmap;
}

/* Ends all that import_region() started, and releases the two bufs of the import. */
static void import_end(struct exporter *exporter, struct doca_mmap *mmap, struct doca_buf *first,
                       struct doca_buf *second) {
    buf_release(first);
    buf_release(second);
    OK(doca_mmap_destroy(mmap));
    bench_close();
    exporter_end(exporter);
}

/* Facts 4 [H30], 10: an importer reads and writes by the exporter's addresses, by DMA and straight from Deflate. */
static void test_an_importer_reaches_the_exporter(void) {
    struct exporter exporter;
    struct doca_mmap *mmap = import_region(&exporter, DOCA_ACCESS_FLAG_PCI_READ_WRITE);
    const void *descriptor;
    size_t size;
    EXPECT(doca_mmap_start(mmap), ERROR_NOT_PERMITTED);
    EXPECT(doca_mmap_set_memrange(mmap, bench.memory, 16), ERROR_NOT_PERMITTED);
    EXPECT(doca_mmap_add_dev(mmap, bench.dev), ERROR_NOT_PERMITTED);
    EXPECT(doca_mmap_export_pci(mmap, bench.dev, &descriptor, &size), ERROR_NOT_PERMITTED);

    uint8_t *last = exporter.address + REGION_BYTES - 1000;
    struct doca_buf *there = space_of(mmap, last, 1000), *again = space_of(mmap, last, 1000), *outside;
    CHECK(exporter_ask(&exporter, 's') == 3ull * REGION_BYTES, "as it was");
    memset(bench.memory, 7, 1000);
    CHECK(copy_once(data_at(0, 1000), there).status == DOCA_SUCCESS, "written");
    CHECK(exporter_ask(&exporter, 's') == 3ull * REGION_BYTES + 4000, "what was written");
    CHECK(copy_once(there, space_at(4096, 1000)).status == DOCA_SUCCESS, "read");
    CHECK(memcmp(bench.memory, bench.memory + 4096, 1000) == 0, "what was read");

    size_t stream = deflate_raw(memset(bench.memory + 8192, 5, 1000), 1000, bench.memory + 16384, 4096);
    CHECK(inflate_once(data_at(16384, stream), again).status == DOCA_SUCCESS, "inflated");
    CHECK(data_length(again) == 1000 && exporter_ask(&exporter, 's') == 3ull * REGION_BYTES + 2000, "its bytes");
    EXPECT(doca_buf_inventory_buf_get_by_addr(bench.inventory, mmap, last + 1, 1000, &outside), ERROR_INVALID_VALUE);
    import_end(&exporter, mmap, there, again);
}

/* Facts 4 [H30]: what was exported for reading is not written. */
static void test_an_export_for_reading_is_not_written(void) {
    struct exporter exporter;
    struct doca_mmap *mmap = import_region(&exporter, DOCA_ACCESS_FLAG_PCI_READ_ONLY);
    struct doca_buf *space = space_of(mmap, exporter.address, 100), *data = data_of(mmap, exporter.address, 100);
    CHECK(copy_once(data_at(0, 100), space).status == DOCA_ERROR_IO_FAILED, "written");
    CHECK(exporter_ask(&exporter, 's') == 3ull * REGION_BYTES, "nothing has changed");
    CHECK(copy_once(data, space_at(0, 100)).status == DOCA_SUCCESS && bench.memory[99] == 3, "but read");
    import_end(&exporter, mmap, space, data);
}

/* Facts 4 [H30]: destroying an export invalidates its importers; so does the end of its process. */
static void test_the_end_of_an_export_fails_tasks(void) {
    for (int death = 0; death <= 1; death++) {
        struct exporter exporter;
        struct doca_mmap *mmap = import_region(&exporter, DOCA_ACCESS_FLAG_PCI_READ_WRITE);
        struct doca_buf *space = space_of(mmap, exporter.address, 200), *data = data_of(mmap, exporter.address, 100);
        CHECK(copy_once(data_at(0, 100), space).status == DOCA_SUCCESS, "it lives");
        if (death) {
            CHECK(kill(exporter.process, SIGKILL) == 0, "kill");
            CHECK(waitpid(exporter.process, NULL, 0) == exporter.process, "waitpid");
            exporter.process = 0;
        } else {
            exporter_ask(&exporter, 'd');
        }
        CHECK(copy_once(data_at(0, 100), space).status == DOCA_ERROR_IO_FAILED, "it is gone, death %d", death);
        CHECK(copy_once(data, space_at(0, 100)).status == DOCA_ERROR_IO_FAILED, "nor can it be read");
        import_end(&exporter, mmap, space, data);
    }
}

/* Facts 10 and 17 (4): whether a card exports a dmabuf is not known; here it does so on request. */
static void test_a_dmabuf_is_exported_on_request(void) {
    struct doca_mmap *exported, *imported;
    const void *descriptor;
    size_t size;
    uint8_t *address = (uint8_t *)(uintptr_t)0x7000000000, got[64];
    int fd = memfd_create("dmabuf", 0);
    CHECK(fd >= 0 && ftruncate(fd, 8192) == 0, "memfd");
    OK(doca_mmap_create(&exported));
    OK(doca_mmap_add_dev(exported, bench.dev));
    OK(doca_mmap_set_permissions(exported, DOCA_ACCESS_FLAG_PCI_READ_WRITE));
    OK(doca_mmap_set_dmabuf_memrange(exported, fd, address, 0, 8192));
    OK(doca_mmap_start(exported));
    doca_error_t result = doca_mmap_export_pci(exported, bench.dev, &descriptor, &size);
    int is_allowed = getenv("DOCA_EMULATOR_DMABUF_EXPORT") != NULL;
    CHECK(result == (is_allowed ? DOCA_SUCCESS : DOCA_ERROR_NOT_SUPPORTED), "%s", doca_error_get_name(result));
    if (is_allowed) {
        OK(doca_mmap_create_from_export(NULL, descriptor, size, bench.dev, &imported));
        text_fill(bench.memory, 64);
        struct doca_buf *there = space_of(imported, address + 100, 64);
        CHECK(copy_once(data_at(0, 64), there).status == DOCA_SUCCESS, "copied");
        CHECK(pread(fd, got, 64, 100) == 64 && memcmp(got, bench.memory, 64) == 0, "bytes in the file");
        buf_release(there);
        OK(doca_mmap_destroy(imported));
    }
    OK(doca_mmap_destroy(exported));
    close(fd);
}

int main(void) {
    BARE_RULE(test_an_importer_reaches_the_exporter, NULL);
    BARE_RULE(test_an_export_for_reading_is_not_written, NULL);
    BARE_RULE(test_the_end_of_an_export_fails_tasks, NULL);
    RULE(test_a_dmabuf_is_exported_on_request, "DMABUF_EXPORT", "allow");
    RULE(test_a_dmabuf_is_exported_on_request, NULL);
    return 0;
}
