/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_index_records.c - any bytes as records of a log, replayed into an index and used
 *
 * Invariants: every record is counted once; the index stays whole, as index_check.h has it; what is dumped can be
 * replayed into the same objects; victims come until only pinned objects are left, what others need last.
 *
 * Input: one byte for the policy, then 128 bytes for each record. Keys, parents and tenants are cut to few, so that
 * they meet; a record of a kind over 0x7F asks for a victim and evicts it. A NAME's key and tenant are cut likewise.
 */
#include "../tests/index_check.h"

enum { OBJECTS_MAX = 64, RECORDS_MAX = 512, BLOCKS = 1 << 20, NOW_S = 1 << 30 };

static void narrow(struct ss_index_record *record) {
    if (record->kind == SS_INDEX_NAME) { /* whose key lies elsewhere, and at whose end its text is */
        uint8_t *bytes = (uint8_t *)record;
        memset(bytes + 17, 0, KEY_SIZE - 1);
        bytes[16] = bytes[16] % 96 + 1;
        record->tenant %= 3;
        return;
    }
    memset(record->key + 1, 0, sizeof record->key - 1);
    memset(record->parent + 1, 0, sizeof record->parent - 1);
    record->key[0] = record->key[0] % 96 + 1;
    record->parent[0] %= 97;
    record->tenant %= 3;
}

static void check_dump(struct ss_index *index) {
    struct ss_index *copy;
    const size_t room = OBJECTS_MAX + 1 + index->totals.name_records;
    struct ss_index_record *records = malloc(room * sizeof *records);
    struct ss_index_counts counts = {0};
    CHECK(records != NULL && ss_index_open(OBJECTS_MAX, SS_INDEX_LRU, 1, &copy) == SS_OK, "memory");
    for (int device = 0; device < 4; device++) {
        uint32_t cursor = 0;
        size_t found = ss_index_dump(index, device, &cursor, records, OBJECTS_MAX + 1);
        found += ss_index_dump_names(index, records, found, records + found, room - found);
        CHECK(cursor == 0 && ss_index_replay(copy, (uint8_t)device, BLOCKS, records, found, &counts) == SS_OK, "dump");
    }
    CHECK(counts.refused == 0 && counts.ignored == 0, "what was dumped was refused");
    CHECK(ss_index_replayed(copy) == SS_OK, "replayed");
    check_whole(copy);
    CHECK(memcmp(&copy->totals, &index->totals, sizeof copy->totals) == 0, "other totals");
    ss_index_close(copy);
    free(records);
}

/* Returns whether an object may be evicted that has no needed descendants. */
static bool some_end(struct ss_index *index) {
    for (uint32_t slot = 1; slot <= OBJECTS_MAX; slot++) {
        const struct entry *entry = &index->entries[slot];
        if (ss_index_is_object(index, slot) && entry->first_child == 0 && entry->pinned_until_s <= NOW_S) {
            return true;
        }
    }
    return false;
}

static void check_victims(struct ss_index *index) {
    uint32_t slot;
    while ((slot = ss_index_victim(index, -1, -1, NOW_S)) != 0) {
        CHECK(ss_index_is_object(index, slot), "slot %u", slot);
        const struct entry *entry = &index->entries[slot];
        CHECK(entry->expiry != 0 || entry->pinned_until_s <= NOW_S, "slot %u", slot);
        CHECK(entry->expiry != 0 || entry->first_child == 0 || !some_end(index), "slot %u", slot);
        ss_index_evict(index, slot);
        check_whole(index);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct ss_index *index;
    struct ss_index_counts counts = {0};
    uint64_t replayed = 0, dropped;
    struct ss_extents *extents;
    if (size == 0) {
        return 0;
    }
    CHECK(ss_index_open(OBJECTS_MAX, data[0] & 1, 1, &index) == SS_OK, "open");
    for (size_t at = 1; at + sizeof(struct ss_index_record) <= size && replayed < RECORDS_MAX;
         at += sizeof(struct ss_index_record)) {
        struct ss_index_record record;
        memcpy(&record, data + at, sizeof record);
        narrow(&record);
        if (record.kind > 0x7F) {
            ss_index_evict(index, ss_index_victim(index, record.device % 5 - 1, record.tenant - 1, NOW_S));
        } else {
            enum ss_result result = ss_index_replay(index, record.device % 4, BLOCKS, &record, 1, &counts);
            CHECK(result == SS_OK || result == SS_NO_SPACE, "result %d", (int)result);
            replayed += result == SS_OK;
        }
        CHECK(counts.applied + counts.ignored + counts.refused == replayed, "counts");
        check_whole(index);
    }
    CHECK(ss_index_replayed(index) == SS_OK, "replayed");
    check_whole(index);
    check_dump(index);
    CHECK(ss_extents_open(BLOCKS / 2, &extents) == SS_OK, "extents");
    CHECK(ss_index_reserve(index, 0, extents, &dropped) == SS_OK, "reserve");
    ss_extents_close(extents);
    check_whole(index);
    check_victims(index);
    ss_index_close(index);
    return 0;
}
