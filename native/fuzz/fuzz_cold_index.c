/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_cold_index.c - any bytes as an index object, whose objects then go into a table
 *
 * Invariants: what is accepted lies within the bytes; each of its records is found where its entry says, until its
 * object is removed; what is counted as known is no more once all objects are removed.
 *
 * Input: an index object, of the partition of its first entry.
 */
#include "../tests/cold_forge.h"
#include "shadowserve_cold.h"

enum { OBJECTS_MAX = 64, INDEX_BYTES_MAX = 1 << 16 };

static uint32_t u32_at(const uint8_t *bytes) {
    uint32_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

static void check_found(struct ss_cold_table *table, const uint8_t *bytes, const struct ss_cold_object *object) {
    uint64_t end = 0;
    for (uint32_t at = 0; at < object->records; at++) {
        const uint8_t *entry = bytes + object->begin + (size_t)at * COLD_ENTRY_BYTES;
        struct ss_cold_found found;
        uint32_t holders[1];
        CHECK(ss_cold_find(table, 1, entry, &found) == SS_OK, "record %u is not found", at);
        CHECK((uint64_t)found.offset + found.length < object->size || memcmp(found.digest, object->digest, 20) != 0,
              "record %u is behind the object", at);
        CHECK(ss_cold_holders(table, 1, entry, holders, 1) >= 1, "no holder");
        CHECK(u32_at(entry + 32) == end && u32_at(entry + 44) <= u32_at(entry + 40), "a gap before %u", at);
        end += u32_at(entry + 40);
    }
    CHECK(end + object->records * COLD_ENTRY_BYTES + object->tenant_length + COLD_FOOTER_BYTES == object->size, "size");
}

static void use(const uint8_t *bytes, const struct ss_cold_object *objects, size_t count) {
    struct ss_cold_table *table;
    struct ss_cold_sums sums = {0};
    struct ss_cold_row row;
    uint32_t positions[OBJECTS_MAX], numbers[OBJECTS_MAX];
    uint64_t objects_left = 0, records_left = 0;
    double written_s[OBJECTS_MAX] = {0};
    for (uint32_t at = 0; at < count; at++) {
        positions[at] = at;
    }
    CHECK(ss_cold_open(1, &table) == SS_OK, "open");
    CHECK(ss_cold_insert(table, 1, bytes, objects, positions, count, written_s, 1, SS_COLD_KNOWN, numbers, &sums) ==
              SS_OK,
          "insert");
    objects_left = sums.objects;
    records_left = sums.records;
    for (size_t at = 0; at < count; at++) {
        check_found(table, bytes, &objects[at]);
    }
    for (size_t at = 0; at < count; at++) {
        uint32_t number = ss_cold_number(table, objects[at].digest);
        if (number != 0) {
            records_left -= ss_cold_set_state(table, number, SS_COLD_HIDDEN, &row);
            objects_left--;
            ss_cold_remove(table, number);
        }
    }
    CHECK(objects_left == 0 && records_left == 0, "%u records left", (unsigned)records_left);
    ss_cold_close(table);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct ss_cold_object objects[OBJECTS_MAX];
    size_t count;
    if (size > INDEX_BYTES_MAX) {
        return 0;
    }
    uint16_t partition =
        size < 8 + 8 + COLD_KEY_BYTES ? 0 : (uint16_t)((data[8 + 8 + 24] & 15) << 8 | data[8 + 8 + 25]);
    if (ss_cold_read_index(data, size, partition, objects, OBJECTS_MAX, &count) == NULL) {
        for (size_t at = 0; at < count; at++) {
            const struct ss_cold_object *object = &objects[at];
            size_t needed = (size_t)object->records * COLD_ENTRY_BYTES + object->tenant_length + COLD_FOOTER_BYTES;
            CHECK(object->begin + needed <= size && object->partition == partition && object->records > 0, "%zu", at);
        }
        use(data, objects, count);
    }
    return 0;
}
