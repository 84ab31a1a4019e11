/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Block devices, with each available access: written bytes are read back, from several threads, with registered and
 * other memory, and with checks; invalid operations are refused.
 *
 * Without arguments on files in this folder and in memory. 'test_block ACCESS PATH' does on a device what can be done
 * there, and destroys what is on it; 'test_block ACCESS PATH removed' reads and writes it until it is taken away.
 */
#include "check.h"
#include "shadowserve_block.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

enum { SIZE = 32 << 20, HALF = SIZE / 2, OPERATIONS = 64, PAGE = 4096, WAIT_MAX_MS = 120000 };

static const char *const access_names[] = {"auto", "uring", "threads", "nvme"};
static const char *path; /* of the device that is tested */

static struct ss_block *device_open(enum ss_block_access access, uint64_t size) {
    struct ss_block_options options = {
        .options_size = sizeof options, .path = path, .size = size, .access = access, .core = -1};
    struct ss_block *block = NULL;
    enum ss_result result;

    /* The kernel may not have released the closed device yet. */
    for (int tries = 0; (result = ss_block_open(&options, &block)) == SS_OS_ERROR && errno == EBUSY && tries < 1000;
         tries++) {
        usleep(10000);
    }
    CHECK(result == SS_OK, "%s by %s: %d, %s", path, access_names[access], (int)result, strerror(errno));
    return block;
}

static uint8_t *memory_make(size_t size) {
    uint8_t *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED, "no memory");
    return memory;
}

static struct ss_block_completion completion_await(struct ss_block *block) {
    struct ss_block_completion completion;
    struct pollfd poll_set = {.fd = ss_block_descriptor(block), .events = POLLIN};

    while (ss_block_completions(block, &completion, 1) == 0) {
        CHECK(poll(&poll_set, 1, WAIT_MAX_MS) == 1, "nothing ended");
    }
    return completion;
}

/* Awaits 'count' completions, which must all have ended with 'error'; returns the sum of their tags. */
static uint64_t await(struct ss_block *block, size_t count, int32_t error) {
    uint64_t tags = 0;

    for (; count > 0; count--) {
        struct ss_block_completion completion = completion_await(block);
        CHECK(completion.error == error, "%s, not %s", strerror(completion.error), strerror(error));
        tags += completion.tag;
    }
    return tags;
}

static void perform(struct ss_block *block, enum ss_block_kind kind, uint64_t offset, uint64_t length, void *memory,
                    int32_t error) {
    struct ss_block_operation operation = {
        .kind = kind, .offset = offset, .length = length, .memory = memory, .tag = 1};
    CHECK(ss_block_submit(block, &operation, 1) == SS_OK, "submit");
    CHECK(await(block, 1, error) == 1, "the tag");
}

/* Cuts 'size' bytes into operations of random lengths, all of one kind, in random order. */
static size_t operations_cut(struct ss_block_operation *operations, enum ss_block_kind kind, uint64_t size,
                             uint8_t *memory) {
    size_t count = 0;
    for (uint64_t offset = 0; offset < size; count++) {
        uint64_t length = (1 + random_below(count % 4 == 0 ? 700 : 40)) * PAGE;
        length = count == OPERATIONS - 1 || length > size - offset ? size - offset : length;
        operations[count] = (struct ss_block_operation){.kind = kind,
                                                        .priority = (enum ss_block_priority)random_below(3),
                                                        .offset = offset,
                                                        .length = length,
                                                        .memory = memory + offset,
                                                        .tag = count};
        offset += length;
    }
    for (size_t index = count; index > 1; index--) {
        size_t other = random_below(index);
        struct ss_block_operation kept = operations[index - 1];
        operations[index - 1] = operations[other];
        operations[other] = kept;
    }
    return count;
}

static void test_content(struct ss_block *block, uint8_t *memory, uint8_t *expected) {
    struct ss_block_operation operations[OPERATIONS];

    random_fill(memory, HALF);
    memcpy(expected, memory, HALF);
    size_t count = operations_cut(operations, SS_BLOCK_WRITE, HALF, memory);
    CHECK(ss_block_submit(block, operations, count) == SS_OK, "submit %zu", count);
    CHECK(await(block, count, 0) == count * (count - 1) / 2, "each once");
    perform(block, SS_BLOCK_FLUSH, 0, 0, NULL, 0);
    memset(memory, 0, HALF);
    count = operations_cut(operations, SS_BLOCK_READ, HALF, memory);
    CHECK(ss_block_submit(block, operations, count) == SS_OK, "submit %zu", count);
    CHECK(await(block, count, 0) == count * (count - 1) / 2, "each once");
    CHECK(memcmp(memory, expected, HALF) == 0, "the bytes");
}

/* Every test has the device, which it does not close, and HALF bytes of memory. */
static void test_what_was_written_is_read(struct ss_block *block, uint8_t *memory) {
    uint8_t *expected = malloc(HALF);
    struct ss_block_statistics statistics;

    CHECK(ss_block_size(block) >= SIZE && expected != NULL, "%d bytes are needed", (int)SIZE);
    test_content(block, memory, expected);
    enum ss_result registered = ss_block_register(block, memory, HALF / 2); /* half of operations can use it */
    CHECK(registered == SS_OK || registered == SS_NOT_SUPPORTED || registered == SS_NO_MEMORY, "%d", (int)registered);
    test_content(block, memory, expected);
    perform(block, SS_BLOCK_DISCARD, 0, HALF, NULL, 0);
    perform(block, SS_BLOCK_WRITE, SIZE - PAGE, PAGE, memory, 0);
    perform(block, SS_BLOCK_READ, SIZE - PAGE, PAGE, memory + PAGE, 0);
    CHECK(memcmp(memory, memory + PAGE, PAGE) == 0, "the last page");
    ss_block_statistics(block, &statistics);
    CHECK(statistics.bytes[SS_BLOCK_READ] == (uint64_t)2 * HALF + PAGE && statistics.last_error == 0, "statistics");
    CHECK(statistics.operations[SS_BLOCK_FLUSH] == 2 && statistics.operations[SS_BLOCK_DISCARD] == 1, "statistics");
    printf("%s: %s%s\n", path, ss_block_access_name(block), registered == SS_OK ? ", registered memory" : "");
    free(expected);
}

enum { OBJECTS = 24, VALUE_MAX = 300000, LARGE = 2500000 /* more than devices take in one request */ };

struct stored {
    struct ss_object_fields fields;
    uint64_t offset, size;
    enum ss_result verdict; /* that is right */
};

/* Seals objects one after the other, and spoils some of them, or what is expected of them. */
static void objects_make(struct stored *objects, uint8_t *memory) {
    uint64_t offset = 0;

    random_fill(memory, HALF);
    for (uint32_t index = 0; index < OBJECTS; index++) {
        struct ss_object_fields fields = {.generation = 1 + index, .length = (uint32_t)random_below(VALUE_MAX) + 70000};
        fields.length += index / 6 == 1 && index % 6 < 2 ? LARGE : 0; /* a sound one, and one with rot */
        random_fill(fields.key, sizeof fields.key);
        uint64_t size = ss_object_bytes(fields.length, 0);
        uint8_t *object = memory + offset;
        CHECK(ss_object_seal(object, size, &fields) == SS_OK, "seal");
        objects[index] = (struct stored){.fields = fields, .offset = offset, .size = size, .verdict = SS_OK};
        offset += size;
        switch (index % 6) {
        case 1: /* rot in the last unit */
            object[SS_OBJECT_HEADER_BYTES + fields.length - 1] ^= 1;
            objects[index].verdict = SS_CHECKSUM;
            break;
        case 2:
            object[100] ^= 1;
            objects[index].verdict = SS_CHECKSUM;
            break;
        case 3: /* an earlier put */
            objects[index].fields.generation++;
            objects[index].verdict = SS_NOT_FOUND;
            break;
        case 4:
            memset(object, 0, PAGE);
            objects[index].verdict = SS_BAD_DATA;
            break;
        }
    }
}

static struct ss_block_operation checked_read(const struct stored *object, uint8_t *memory, uint64_t tag) {
    return (struct ss_block_operation){.kind = SS_BLOCK_READ,
                                       .priority = (enum ss_block_priority)(tag % 3),
                                       .offset = object->offset,
                                       .length = object->size,
                                       .memory = memory + object->offset,
                                       .tag = tag,
                                       .expected = object->fields,
                                       .expected_units = (object->fields.length + 65535) / 65536,
                                       .is_checked = 1};
}

/* Awaits all completions, and notes their verdicts by tag. */
static void verdicts_await(struct ss_block *block, enum ss_result *verdicts, int32_t *errors) {
    for (size_t index = 0; index < OBJECTS; index++) {
        struct ss_block_completion completion = completion_await(block);
        verdicts[completion.tag] = completion.verdict;
        errors[completion.tag] = completion.error;
    }
}

static void test_reads_are_checked(struct ss_block *block, uint8_t *memory) {
    struct stored objects[OBJECTS];
    struct ss_block_operation operations[OBJECTS];
    enum ss_result verdicts[OBJECTS];
    int32_t errors[OBJECTS];

    objects_make(objects, memory);
    perform(block, SS_BLOCK_WRITE, 0, HALF, memory, 0);
    for (int how = 0; how < 3; how++) { /* whole; only the first unit; not at all */
        memset(memory, 0, HALF);
        for (size_t index = 0; index < OBJECTS; index++) {
            operations[index] = checked_read(&objects[index], memory, index);
            operations[index].is_checked = how < 2;
            if (how == 1) {
                operations[index].expected_units = 1;
                operations[index].length = (uint64_t)17 * PAGE;
            }
        }
        CHECK(ss_block_submit(block, operations, OBJECTS) == SS_OK, "submit");
        verdicts_await(block, verdicts, errors);
        for (size_t index = 0; index < OBJECTS; index++) {
            enum ss_result right = how == 2                     ? SS_NOT_SUPPORTED
                                   : how == 1 && index % 6 == 1 ? SS_OK /* the rot is further on */
                                                                : objects[index].verdict;
            CHECK(verdicts[index] == right && errors[index] == 0, "object %zu: %d, not %d", index, (int)verdicts[index],
                  (int)right);
        }
    }
    struct ss_block_operation wrong = checked_read(&objects[0], memory, 0);
    wrong.length = wrong.length / PAGE / 2 * PAGE;
    CHECK(ss_block_submit(block, &wrong, 1) == SS_BAD_ARGUMENT, "less than what is to be checked");
    wrong = checked_read(&objects[0], memory, 0);
    wrong.kind = SS_BLOCK_WRITE;
    CHECK(ss_block_submit(block, &wrong, 1) == SS_BAD_ARGUMENT, "a write");
    /* Operations that end when the device closes are either checked or cancelled. */
    for (size_t index = 0; index < OBJECTS; index++) {
        operations[index] = checked_read(&objects[index], memory, index);
    }
    CHECK(ss_block_submit(block, operations, OBJECTS) == SS_OK, "submit");
    CHECK(ss_block_stop(block, WAIT_MAX_MS) == SS_OK, "stop");
    verdicts_await(block, verdicts, errors);
    for (size_t index = 0; index < OBJECTS; index++) {
        enum ss_result right = errors[index] == 0 ? objects[index].verdict : SS_NOT_SUPPORTED;
        CHECK(verdicts[index] == right && (errors[index] == 0 || errors[index] == ECANCELED), "object %zu", index);
    }
}

enum {
    LAYERS = 3,
    EXTENTS = 6,
    EXTENT_BLOCKS = 5,
    BLOCK_BYTES = 3 * PAGE,
    STRIDE = LAYERS * BLOCK_BYTES + PAGE,
    BLOCKS = 128,
    LARGE_BLOCKS = 120, /* of one part: more than devices take in one request */
    PARTS = LAYERS * EXTENTS
};

/* Paged memory, the tables of reads into it, and their results. */
struct paged {
    uint8_t *memory;
    uint64_t layers[LAYERS], extents[EXTENTS];
    uint32_t blocks[BLOCKS], checksums[PARTS], verdicts[PARTS], left[LAYERS], word, stop;
    struct ss_block_pages pages;
    struct ss_block_operation operation;
};

/* Blocks are taken in random order, no page twice; a block has the pages of all layers beside each other. */
static void paged_make(struct paged *paged, const uint8_t *content, uint32_t extent_count, uint32_t extent_blocks) {
    uint64_t length = (uint64_t)extent_blocks * BLOCK_BYTES, offset = PAGE;

    for (uint32_t index = 0; index < BLOCKS; index++) {
        paged->blocks[index] = index;
    }
    for (uint32_t index = BLOCKS; index > 1; index--) {
        uint32_t other = (uint32_t)random_below(index), kept = paged->blocks[index - 1];
        paged->blocks[index - 1] = paged->blocks[other];
        paged->blocks[other] = kept;
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        paged->layers[layer] = (uint64_t)(LAYERS - 1 - layer) * BLOCK_BYTES;
        paged->left[layer] = extent_count;
        for (uint32_t index = 0; index < extent_count; index++) {
            paged->extents[index] = (extent_count - 1 - index) * LAYERS * length;
            uint32_t part = layer * extent_count + index;
            paged->checksums[part] = ss_crc32(0, content + paged->extents[index] + offset + layer * length, length);
        }
    }
    paged->word = paged->stop = 0;
    paged->pages = (struct ss_block_pages){.size = BLOCK_BYTES,
                                           .stride = STRIDE,
                                           .layers = paged->layers,
                                           .extents = paged->extents,
                                           .blocks = paged->blocks,
                                           .checksums = paged->checksums,
                                           .verdicts = paged->verdicts,
                                           .left = paged->left,
                                           .word = &paged->word,
                                           .stop = &paged->stop,
                                           .layer_count = LAYERS,
                                           .extent_count = extent_count,
                                           .extent_blocks = extent_blocks};
    paged->operation = (struct ss_block_operation){.kind = SS_BLOCK_READ,
                                                   .offset = offset,
                                                   .length = length,
                                                   .memory = paged->memory,
                                                   .tag = 7,
                                                   .pages = &paged->pages};
    memset(paged->memory, 0xA5, (size_t)BLOCKS * STRIDE);
}

static void paged_read(struct ss_block *block, struct paged *paged, int32_t error, enum ss_result verdict) {
    CHECK(ss_block_submit(block, &paged->operation, 1) == SS_OK, "submit");
    struct ss_block_completion completion = completion_await(block);
    CHECK(completion.error == error && completion.tag == 7, "%s", strerror(completion.error));
    CHECK(completion.verdict == verdict, "verdict %d", (int)completion.verdict);
}

/* One operation brings all layers of all extents into their pages, and touches nothing beside them. */
static void test_read_into_pages(struct ss_block *block, const uint8_t *content, struct paged *paged,
                                 uint32_t extent_count, uint32_t extent_blocks, uint32_t rotten) {
    uint32_t parts = LAYERS * extent_count;

    paged_make(paged, content, extent_count, extent_blocks);
    if (rotten < parts) {
        paged->checksums[rotten] ^= 1;
    }
    paged_read(block, paged, 0, rotten < parts ? SS_CHECKSUM : SS_OK);
    CHECK(paged->word == (rotten < parts ? rotten / extent_count : LAYERS), "%d layers", (int)paged->word);
    for (uint32_t index = 0; index < BLOCKS; index++) {
        uint32_t extent = index / extent_blocks;
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            const uint8_t *page = paged->memory + (size_t)paged->blocks[index] * STRIDE + paged->layers[layer];
            uint32_t part = layer * extent_count + extent;
            if (extent < extent_count) {
                const uint8_t *right = content + paged->extents[extent] + paged->operation.offset +
                                       layer * paged->operation.length +
                                       (uint64_t)(index % extent_blocks) * BLOCK_BYTES;
                CHECK(memcmp(page, right, BLOCK_BYTES) == 0, "block %d of layer %d", (int)index, (int)layer);
                CHECK(paged->verdicts[part] == (part == rotten ? SS_CHECKSUM : SS_OK), "part %d", (int)part);
            }
            for (size_t at = 0; extent >= extent_count && at < BLOCK_BYTES; at++) {
                CHECK(page[at] == 0xA5, "byte %d of block %d was written", (int)at, (int)index);
            }
        }
        for (size_t at = (size_t)LAYERS * BLOCK_BYTES; at < STRIDE; at++) {
            CHECK(paged->memory[(size_t)index * STRIDE + at] == 0xA5, "byte %d behind block %d", (int)at, (int)index);
        }
    }
}

static void test_pages_that_are_refused(struct ss_block *block, const uint8_t *content, struct paged *paged) {
#define REFUSE(why, change)                                                                                            \
    paged_make(paged, content, EXTENTS, EXTENT_BLOCKS);                                                                \
    (change);                                                                                                          \
    CHECK(ss_block_submit(block, &paged->operation, 1) == SS_BAD_ARGUMENT, why)
    REFUSE("no whole pages", paged->operation.length -= PAGE);
    REFUSE("a write", paged->operation.kind = SS_BLOCK_WRITE);
    REFUSE("memory that a device does not reach", paged->operation.memory = paged->memory + 1);
    REFUSE("a layer that a device does not reach", paged->layers[1]++);
    REFUSE("nowhere to say what was found", paged->pages.verdicts = NULL);
    REFUSE("beyond the device", paged->extents[3] = SIZE - LAYERS * paged->operation.length);
    REFUSE("far beyond it", paged->extents[3] = UINT64_MAX - PAGE + 1);
    REFUSE("more layers than the device has room for", paged->pages.layer_count = UINT32_MAX);
    REFUSE("nothing", paged->pages.extent_count = 0);
#undef REFUSE
}

static void test_pages(struct ss_block *block, uint8_t *content) {
    struct paged *paged = calloc(1, sizeof *paged);
    struct ss_block_statistics statistics;

    paged->memory = memory_make((size_t)BLOCKS * STRIDE);
    random_fill(content, HALF);
    perform(block, SS_BLOCK_WRITE, 0, HALF, content, 0);
    for (int is_known = 0; is_known < 3; is_known++) { /* to the kernel: not, half of it, all of it */
        if (is_known > 0) {
            enum ss_result known = ss_block_register(block, paged->memory, (size_t)is_known * BLOCKS * STRIDE / 2);
            CHECK(known == SS_OK || known == SS_NOT_SUPPORTED || known == SS_NO_MEMORY, "%d", (int)known);
        }
        test_read_into_pages(block, content, paged, EXTENTS, EXTENT_BLOCKS, PARTS);
        test_read_into_pages(block, content, paged, EXTENTS, EXTENT_BLOCKS, EXTENTS + 2);
        test_read_into_pages(block, content, paged, 1, LARGE_BLOCKS, PARTS);
        test_read_into_pages(block, content, paged, 1, 1, 0);
        ss_block_unregister(block, paged->memory, (size_t)BLOCKS * STRIDE);
        ss_block_statistics(block, &statistics);
        CHECK(statistics.registered == 0, "%d regions are still known", (int)statistics.registered);
    }
    paged_make(paged, content, EXTENTS, EXTENT_BLOCKS);
    paged->stop = 1;
    paged_read(block, paged, ECANCELED, SS_NOT_SUPPORTED);
    CHECK(paged->word == 0 && paged->memory[0] == 0xA5, "nothing was begun");
    test_pages_that_are_refused(block, content, paged);
    munmap(paged->memory, (size_t)BLOCKS * STRIDE);
    free(paged);
}

enum { CHECKED = 1, OBJECT_LENGTH = 3 * PAGE - SS_OBJECT_HEADER_BYTES };

/* Submits 'count' operations, and returns the errno of the last one that failed. Successful reads have the expected
 * bytes. */
static int32_t last_error(struct ss_block *block, const struct ss_block_operation *operations, size_t count) {
    int32_t error = 0;

    CHECK(ss_block_submit(block, operations, count) == SS_OK, "submit");
    for (; count > 0; count--) {
        struct ss_block_completion completion = completion_await(block);
        int was_checked = completion.error == 0 && completion.tag == CHECKED;
        CHECK(completion.verdict == (was_checked ? SS_OK : SS_NOT_SUPPORTED), "verdict %d of %d, error %d",
              (int)completion.verdict, (int)completion.tag, completion.error);
        error = completion.error != 0 ? completion.error : error;
    }
    return error;
}

static void test_a_device_that_is_taken_away(enum ss_block_access access) {
    struct ss_block *block = device_open(access, 0);
    uint8_t *memory = memory_make((size_t)5 * PAGE);
    struct ss_block_statistics statistics;
    struct ss_object_fields fields = {.generation = 1, .length = OBJECT_LENGTH};
    const struct ss_block_operation operations[] = {
        {.kind = SS_BLOCK_READ,
         .length = (uint64_t)3 * PAGE,
         .memory = memory,
         .tag = CHECKED,
         .expected = fields,
         .expected_units = 1,
         .is_checked = 1},
        {.kind = SS_BLOCK_WRITE, .length = PAGE, .offset = (uint64_t)3 * PAGE, .memory = memory + (size_t)3 * PAGE},
        {.kind = SS_BLOCK_READ, .length = PAGE, .offset = HALF, .memory = memory + (size_t)4 * PAGE},
        {.kind = SS_BLOCK_FLUSH}};
    int32_t first;

    random_fill(memory, (size_t)3 * PAGE);
    CHECK(ss_object_seal(memory, (uint64_t)3 * PAGE, &fields) == SS_OK, "seal");
    perform(block, SS_BLOCK_WRITE, 0, (uint64_t)3 * PAGE, memory, 0);
    printf("%s: %s, until it is taken away\n", path, ss_block_access_name(block));
    fflush(stdout);
    do {
        first = last_error(block, operations, 4);
    } while (first == 0);
    int32_t second = last_error(block, operations, 3);
    CHECK(second == ENODEV, "%s", strerror(second));
    ss_block_statistics(block, &statistics);
    CHECK(statistics.gone && statistics.in_flight == 0 && statistics.errors[SS_BLOCK_READ] >= 2, "statistics");
    CHECK(ss_block_stop(block, WAIT_MAX_MS) == SS_OK, "stop");
    ss_block_close(block);
    munmap(memory, (size_t)5 * PAGE);
    printf("%s: %s, then %s\n", path, strerror(first), strerror(second));
}

struct submitter {
    struct ss_block *block;
    uint64_t offset;
    uint8_t *memory;
};

static void *submit_many(void *context) {
    struct submitter *submitter = context;
    for (int trial = 0; trial < 100; trial++) {
        struct ss_block_operation operation = {.kind = trial % 2 == 0 ? SS_BLOCK_WRITE : SS_BLOCK_READ,
                                               .priority = (enum ss_block_priority)(trial % 3),
                                               .offset = submitter->offset + (uint64_t)(trial / 2) * PAGE,
                                               .length = PAGE,
                                               .memory = submitter->memory + (size_t)trial * PAGE,
                                               .tag = 1};
        enum ss_result result;
        while ((result = ss_block_submit(submitter->block, &operation, 1)) == SS_NO_SPACE) {
            usleep(1000);
        }
        CHECK(result == SS_OK, "submit");
    }
    return NULL;
}

static void test_several_threads(struct ss_block *block, uint8_t *arena) {
    struct submitter submitters[3];
    pthread_t threads[3];

    for (size_t index = 0; index < 3; index++) {
        submitters[index] = (struct submitter){block, index * (SIZE / 4), arena + index * 100 * PAGE};
        CHECK(pthread_create(&threads[index], NULL, submit_many, &submitters[index]) == 0, "thread");
    }
    (void)ss_block_register(block, arena, HALF); /* meanwhile */
    CHECK(await(block, 300, 0) == 300, "each once");
    for (size_t index = 0; index < 3; index++) {
        CHECK(pthread_join(threads[index], NULL) == 0, "join");
    }
}

static void test_a_file_that_was_cut_off_is_an_error(struct ss_block *block, uint8_t *memory) {
    struct ss_block_statistics statistics;

    CHECK(truncate(path, 1 << 20) == 0, "truncate");
    perform(block, SS_BLOCK_READ, 0, 4 << 20, memory, EIO);
    perform(block, SS_BLOCK_READ, 8 << 20, PAGE, memory, EIO);
    perform(block, SS_BLOCK_READ, 0, PAGE, memory, 0);
    ss_block_statistics(block, &statistics);
    CHECK(statistics.errors[SS_BLOCK_READ] == 2 && statistics.last_error == EIO && !statistics.gone, "statistics");
}

static void test_stopping_ends_everything(struct ss_block *block, uint8_t *memory) {
    struct ss_block_operation operations[OPERATIONS];
    struct ss_block_completion completions[OPERATIONS];
    size_t count = operations_cut(operations, SS_BLOCK_WRITE, HALF, memory);

    CHECK(ss_block_submit(block, operations, count) == SS_OK, "submit");
    CHECK(ss_block_stop(block, WAIT_MAX_MS) == SS_OK, "stop");
    CHECK(ss_block_submit(block, operations, count) == SS_CANCELLED, "after the end");
    CHECK(ss_block_completions(block, completions, OPERATIONS) == count, "all of them ended");
    for (size_t index = 0; index < count; index++) {
        CHECK(completions[index].error == 0 || completions[index].error == ECANCELED, "%d", completions[index].error);
    }
}

static void test_what_is_refused(void) {
    struct ss_block_options options = {.options_size = sizeof options, .path = path, .size = SIZE, .core = -1};
    struct ss_block *block = device_open(SS_BLOCK_AUTO, SIZE), *other;

    CHECK(ss_block_open(&options, &other) == SS_OS_ERROR && errno == EBUSY && other == NULL, "in use");
    CHECK(ss_block_register(block, NULL, 4096) == SS_BAD_ARGUMENT, "no memory");
    ss_block_close(block);
    options.options_size--;
    CHECK(ss_block_open(&options, &other) == SS_BAD_ARGUMENT, "another struct");
    options.options_size++;
    options.size = SIZE + 1;
    CHECK(ss_block_open(&options, &other) == SS_BAD_ARGUMENT, "half a block");
    ss_block_close(NULL);
}

/* As a container does: io_uring is refused, to this thread from now on. Returns whether that could be done. */
static int refuse_uring(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 425 /* io_uring_setup, everywhere */, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = COUNT_OF(filter), .filter = filter};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static void test_without_uring_threads_do_it(void) {
    if (!refuse_uring()) {
        printf("no seccomp here: that io_uring is refused was not tried\n");
        return;
    }
    struct ss_block_options options = {
        .options_size = sizeof options, .path = path, .size = SIZE, .access = SS_BLOCK_URING, .core = -1};
    struct ss_block *block;
    CHECK(ss_block_open(&options, &block) == SS_NOT_SUPPORTED, "refused");
    CHECK(!ss_block_access_available(SS_BLOCK_URING) && ss_block_access_available(SS_BLOCK_THREADS), "available");
    block = device_open(SS_BLOCK_AUTO, SIZE);
    CHECK(strncmp(ss_block_access_name(block), "threads, ", 9) == 0, "%s", ss_block_access_name(block));
    ss_block_close(block);
}

/* Runs the tests; the last one needs a file. */
static void test_with(enum ss_block_access access, int is_file) {
    static void (*const tests[])(struct ss_block * block, uint8_t * memory) = {
        test_what_was_written_is_read, test_reads_are_checked,        test_pages,
        test_several_threads,          test_stopping_ends_everything, test_a_file_that_was_cut_off_is_an_error};
    for (size_t index = 0; index < COUNT_OF(tests) - !is_file; index++) {
        uint8_t *memory = memory_make(HALF);
        struct ss_block *block = device_open(access, SIZE);
        tests[index](block, memory);
        ss_block_close(block);
        munmap(memory, HALF);
    }
}

static int test_on_device(const char *access_name, int is_removed) {
    size_t index = 0;
    while (index < COUNT_OF(access_names) && strcmp(access_name, access_names[index]) != 0) {
        index++;
    }
    CHECK(index < COUNT_OF(access_names), "there is no access '%s'", access_name);
    if (is_removed) {
        test_a_device_that_is_taken_away((enum ss_block_access)index);
    } else {
        test_with((enum ss_block_access)index, 0);
    }
    return 0;
}

int main(int argc, char **argv) {
    static const enum ss_block_access accesses[] = {SS_BLOCK_URING, SS_BLOCK_THREADS};
    char file[] = "./test_block-XXXXXX", in_memory[] = "/dev/shm/test_block-XXXXXX";
    char *paths[] = {in_memory, file};

    if (argc >= 3) {
        path = argv[2];
        return test_on_device(argv[1], argc > 3);
    }
    CHECK(argc == 1, "usage: test_block [auto|uring|threads|nvme DEVICE [removed]]");
    for (size_t which = 0; which < 2; which++) {
        int fd = mkstemp(paths[which]);
        CHECK(fd >= 0 && close(fd) == 0, "%s", paths[which]);
        path = paths[which];
        for (size_t index = 0; index < COUNT_OF(accesses); index++) {
            if (test_is_brief() && which == index) {
                continue; /* tests/native/test_block.py has each on each */
            }
            if (ss_block_access_available(accesses[index])) {
                test_with(accesses[index], 1);
            } else {
                printf("%s: not here\n", access_names[accesses[index]]);
            }
        }
        test_what_is_refused();
    }
    test_without_uring_threads_do_it();
    CHECK(unlink(file) == 0 && unlink(in_memory) == 0, "unlink");
    return 0;
}
