/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_doca_decompress.c - any bytes, given to the decoders of the DOCA emulator
 *
 * Invariants: nothing outside of source and target is touched (both end at a guard page); no more is produced than
 * fits; where the library and zlib both take a Deflate stream, both make the same bytes and checksum.
 *
 * Input: one byte for the kind, two for the target's size, then the stream.
 */
#include "../doca_emulator/src/emulator.h"
#include "zlib_reference.h"

enum { SIZE_MAX_HERE = 65536 };

static void check_deflate(const struct doca_task *task, bool good, const uint8_t *source, size_t size,
                          const uint8_t *target, size_t capacity) {
    static uint8_t reference[SIZE_MAX_HERE];
    size_t produced = zlib_inflate(source, size, reference, capacity);
    if (good && produced != SIZE_MAX) {
        CHECK(task->produced == produced, "%zu bytes, not %zu", task->produced, produced);
        CHECK(memcmp(target, reference, task->produced) == 0, "other bytes than zlib");
        CHECK(task->crc32 == crc32(0, reference, (uInt)task->produced), "CRC-32");
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct guarded sources, targets;
    if (sources.map == NULL) {
        sources = guarded_make(SIZE_MAX_HERE);
        targets = guarded_make(SIZE_MAX_HERE);
    }
    if (size < 3 || size - 3 > SIZE_MAX_HERE) {
        return 0;
    }
    struct doca_task task = {.kind = (enum task_kind)(data[0] % TASK_KIND_COUNT)};
    size_t capacity = (size_t)data[1] | (size_t)data[2] << 8;
    size -= 3;
    uint8_t *source = guarded_place(&sources, size, 1), *target = guarded_place(&targets, capacity, 1);
    memcpy(source, data + 3, size);
    bool good = codec_decompress(&task, source, size, target, capacity);
    CHECK(!good || task.produced <= capacity, "%zu bytes into %zu", task.produced, capacity);
    if (task.kind == TASK_DEFLATE) {
        check_deflate(&task, good, source, size, target, capacity);
    } else if (good) {
        CHECK(task.crc32 == crc32(0, target, (uInt)task.produced), "CRC-32");
    }
    return 0;
}
