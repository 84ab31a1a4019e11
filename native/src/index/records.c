/* SPDX-License-Identifier: Apache-2.0 */
/* records.c - conversion between the records of logs and snapshots and the index */
#include "index/internal.h"

#include <stdlib.h>

enum { DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS, DUMP_LOOKS = 64, AHEAD = 8 };

_Static_assert(sizeof(struct ss_index_record) == 128, "docs/reference/volume-format.md says so");

/* ---- Replay -------------------------------------------------------------------------------------------------- */

/* Returns whether 'generation' is earlier than the other one; generations may wrap. */
static bool is_before(uint32_t generation, uint32_t other) {
    return other - generation - 1 < UINT32_MAX / 2;
}

/* put() replays a put; '*result' is SS_NO_SPACE or SS_NO_MEMORY if the replay cannot continue. */
static uint64_t *put(struct ss_index *index, uint8_t device, uint32_t blocks, const struct ss_index_record *record,
                     struct ss_index_counts *counts, enum ss_result *result) {
    uint64_t hash = ss_index_hash(index, record->tenant, record->key);
    uint32_t slot = ss_index_search(index, hash, record->tenant, record->key);
    struct ss_index_record own = *record;
    if (!ss_index_valid(record, blocks)) {
        return &counts->refused;
    }
    if (slot != 0 && !index->entries[slot].dangling && index->entries[slot].device != device) {
        bool later = is_before(index->entries[slot].generation, record->generation);
        uint8_t loser = later ? index->entries[slot].device : device;
        *result = ss_index_superseded_add(index, hash, loser, record->tenant, record->key);
        if (*result != SS_OK || !later) {
            return &counts->ignored;
        }
    }
    ss_index_superseded_drop(index, hash, device, record->tenant, record->key);
    own.device = device;
    *result = ss_index_store(index, hash, &own, NULL, record->accessed_s, &slot);
    if (*result == SS_OK && (own.flags & SS_INDEX_NAMED) != 0 && index->names[slot] == NULL) {
        *result = ss_index_take_name(index, slot);
    }
    return &counts->applied;
}

static uint64_t *change(struct ss_index *index, uint8_t device, const struct ss_index_record *record,
                        struct ss_index_counts *counts) {
    uint64_t hash = ss_index_hash(index, record->tenant, record->key);
    uint32_t slot = ss_index_search(index, hash, record->tenant, record->key);
    if (record->reserved != 0 || record->name_blocks != 0) {
        return &counts->refused;
    }
    if (record->kind == SS_INDEX_REMOVE) {
        ss_index_superseded_drop(index, hash, device, record->tenant, record->key);
    }
    if (!ss_index_is_object(index, slot) || index->entries[slot].device != device) {
        return &counts->ignored;
    }
    if (record->kind == SS_INDEX_REMOVE) {
        ss_index_remove(index, slot);
    } else if (record->kind == SS_INDEX_EXPIRE) {
        ss_index_expire(index, slot, record->expires_at_ms);
    } else {
        ss_index_pin(index, slot, record->pinned_until_s);
    }
    return &counts->applied;
}

static uint64_t *replay(struct ss_index *index, uint8_t device, uint32_t blocks, const struct ss_index_record *record,
                        struct ss_index_counts *counts, enum ss_result *result) {
    switch (record->kind) {
    case SS_INDEX_PUT:
        return put(index, device, blocks, record, counts, result);
    case SS_INDEX_REMOVE:
    case SS_INDEX_EXPIRE:
    case SS_INDEX_PIN:
        return change(index, device, record, counts);
    case SS_INDEX_CLEAR:
        if (record->reserved != 0 || record->name_blocks != 0 || (record->flags & ~SS_INDEX_EVERY_TENANT) != 0) {
            return &counts->refused;
        }
        ss_index_clear(index, (record->flags & SS_INDEX_EVERY_TENANT) != 0 ? -1 : record->tenant, device);
        return &counts->applied;
    case SS_INDEX_NAME:
        return ss_index_replay_name(index, device, record, counts, result);
    case SS_INDEX_TENANT:
        return &counts->ignored;
    default:
        return &counts->refused;
    }
}

enum ss_result ss_index_replay(struct ss_index *index, uint8_t device, uint32_t blocks,
                               const struct ss_index_record *records, size_t count, struct ss_index_counts *counts) {
    index->replaying = true;
    for (size_t at = 0; at < count; at++) {
        enum ss_result result = SS_OK;
        if (count - at > AHEAD) { /* the lines of the table are in no cache */
            ss_index_prefetch(index, records[at + AHEAD].tenant, records[at + AHEAD].key);
            ss_index_prefetch(index, records[at + AHEAD].tenant, records[at + AHEAD].parent);
        }
        uint64_t *counter = replay(index, device, blocks, &records[at], counts, &result);
        if (result != SS_OK) {
            return result;
        }
        ++*counter;
    }
    return SS_OK;
}

/* ---- After the replay ---------------------------------------------------------------------------------------- */

struct keyed {
    uint32_t key;
    uint32_t slot;
};

/* Stable sort by key, with scratch memory of the same size behind the array; returns the half with the result. */
static struct keyed *sort(struct keyed *items, size_t count) {
    struct keyed *source = items, *target = items + count;
    for (unsigned shift = 0; shift < 32; shift += DIGIT_BITS) {
        size_t starts[DIGITS + 1] = {0};
        for (size_t at = 0; at < count; at++) {
            starts[(source[at].key >> shift) % DIGITS + 1]++;
        }
        for (size_t digit = 1; digit < DIGITS; digit++) {
            starts[digit] += starts[digit - 1];
        }
        for (size_t at = 0; at < count; at++) {
            target[starts[(source[at].key >> shift) % DIGITS]++] = source[at];
        }
        struct keyed *swapped = source;
        source = target;
        target = swapped;
    }
    return source;
}

static void order_cell(struct ss_index *index, struct cell *cell, const struct keyed *sorted, size_t count) {
    memset(cell->lists, 0, sizeof cell->lists);
    for (size_t at = 0; at < count; at++) {
        struct entry *entry = &index->entries[sorted[at].slot];
        entry->list = entry->pinned_until_s != 0 ? LIST_BLOCKED : LIST_MAIN;
        ss_index_push(index, &cell->lists[entry->list], sorted[at].slot);
    }
}

enum ss_result ss_index_replayed(struct ss_index *index) {
    uint64_t largest = 0;
    for (uint32_t number = 1; number <= index->cell_count; number++) {
        const struct cell *cell = &index->cells[number];
        if ((cell->id & 511u) != ANY_DEVICE && cell->totals.objects > largest) {
            largest = cell->totals.objects;
        }
    }
    struct keyed *items = malloc((size_t)(largest * 2 + 1) * sizeof *items);
    if (items == NULL) {
        return SS_NO_MEMORY;
    }
    for (uint32_t number = 1; number <= index->cell_count; number++) {
        struct cell *cell = &index->cells[number];
        size_t count = 0;
        for (size_t list = LIST_SMALL; list < LIST_COUNT; list++) {
            for (uint32_t slot = cell->lists[list].tail; slot != 0; slot = index->entries[slot].previous) {
                items[count++] = (struct keyed){.key = index->entries[slot].accessed_s, .slot = slot};
            }
        }
        if (count > 0) {
            order_cell(index, cell, sort(items, count), count);
        }
    }
    free(items);
    free(index->replayed_name);
    index->replayed_name = NULL;
    index->replaying = false;
    ss_index_dangling_drop(index, index->dangling_max);
    return SS_OK;
}

uint64_t ss_index_purge(struct ss_index *index, uint8_t device, enum ss_index_purge what) {
    uint64_t removed = 0;
    for (uint32_t slot = 0; (slot = ss_index_next(index, slot)) != 0;) {
        const struct entry *entry = &index->entries[slot];
        bool goes = what == SS_INDEX_UNPROVEN ? (entry->flags & SS_INDEX_RECORD) == 0
                                              : (entry->flags & SS_INDEX_NAMED) != 0 && index->names[slot] == NULL;
        if (goes && entry->device == device) {
            ss_index_remove(index, slot);
            removed++;
        }
    }
    return removed;
}

enum ss_result ss_index_reserve(struct ss_index *index, uint8_t device, struct ss_extents *extents, uint64_t *dropped) {
    size_t count = 0;
    struct keyed *items = malloc((size_t)(index->devices[device].objects * 2 + 1) * sizeof *items);
    enum ss_result result = SS_OK;
    *dropped = 0;
    if (items == NULL) {
        return SS_NO_MEMORY;
    }
    for (uint32_t slot = 0; (slot = ss_index_next(index, slot)) != 0;) {
        if (index->entries[slot].device == device) {
            items[count++] = (struct keyed){.key = index->entries[slot].extent, .slot = slot};
        }
    }
    const struct keyed *sorted = sort(items, count);
    for (size_t at = 0; at < count && result == SS_OK;) {
        uint32_t kept = sorted[at].slot;
        uint64_t end = (uint64_t)sorted[at].key + ss_index_entry_blocks(&index->entries[kept]);
        for (at++; at < count && sorted[at].key < end; at++) {
            uint32_t other = sorted[at].slot;
            bool later = is_before(index->entries[kept].generation, index->entries[other].generation);
            ss_index_remove(index, later ? kept : other);
            kept = later ? other : kept;
            end = (uint64_t)index->entries[kept].extent + ss_index_entry_blocks(&index->entries[kept]);
            ++*dropped;
        }
        const struct entry *entry = &index->entries[kept];
        result = ss_extents_reserve(extents, entry->extent, ss_index_entry_blocks(entry));
        if (result == SS_BAD_ARGUMENT) { /* reserved by another object, or beyond the end */
            ss_index_remove(index, kept);
            ++*dropped;
            result = SS_OK;
        }
    }
    free(items);
    return result;
}

/* ---- Snapshots ----------------------------------------------------------------------------------------------- */

size_t ss_index_dump(const struct ss_index *index, int32_t device, uint32_t *cursor, struct ss_index_record *records,
                     size_t max) {
    size_t found = 0;
    for (size_t looks = max * DUMP_LOOKS; looks > 0 && found < max && *cursor < index->slots_used; looks--) {
        uint32_t slot = ++*cursor;
        if (ss_index_is_object(index, slot) && (device < 0 || index->entries[slot].device == device)) {
            ss_index_read(index, slot, &records[found++]);
        }
    }
    if (*cursor >= index->slots_used) {
        *cursor = 0;
    }
    return found;
}
