/* SPDX-License-Identifier: Apache-2.0 */
/* index_check.h - whether an index is whole: every link both ways, every count, the heap's order, the table */
#ifndef SS_INDEX_CHECK_H
#define SS_INDEX_CHECK_H

#include "check.h"

#include "index/internal.h"

/* Checks one list, and returns how many are in it. */
static inline uint32_t check_list(const struct ss_index *index, const struct list_ends *ends, uint32_t list,
                                  bool dangling) {
    uint32_t count = 0, before = 0;
    for (uint32_t slot = ends->head; slot != 0; slot = index->entries[slot].next) {
        const struct entry *entry = &index->entries[slot];
        CHECK(slot <= index->slots_used && entry->used && entry->dangling == dangling, "slot %u", slot);
        CHECK(entry->previous == before, "slot %u: before it is %u, not %u", slot, entry->previous, before);
        CHECK(dangling || entry->list == list, "slot %u is in list %u, not %u", slot, entry->list, list);
        CHECK(++count <= index->slots_max, "a circle");
        before = slot;
    }
    CHECK(ends->tail == before && ends->count == count, "tail %u, %u entries of %u", ends->tail, count, ends->count);
    return count;
}

static inline void check_links(const struct ss_index *index, uint32_t slot) {
    const struct entry *entries = index->entries, *entry = &entries[slot];
    uint32_t before = 0, depth = 0;
    for (uint32_t child = entry->first_child; child != 0; child = entries[child].next_sibling) {
        CHECK(entries[child].used && entries[child].parent == slot, "child %u of %u", child, slot);
        CHECK(entries[child].previous_sibling == before, "sibling %u of %u", before, child);
        CHECK(entries[child].tenant == entry->tenant, "a child of another tenant");
        before = child;
    }
    for (uint32_t above = entry->parent; above != 0; above = entries[above].parent) {
        CHECK(entries[above].used && ++depth <= index->slots_max, "above %u", slot);
    }
    CHECK(!entry->dangling || entry->first_child != 0, "dangling parent %u has no children", slot);
    uint64_t hash = ss_index_hash(index, entry->tenant, entry->key);
    CHECK(ss_index_search(index, hash, entry->tenant, entry->key) == slot, "slot %u is not found", slot);
    CHECK(entry->expiry == 0 || (entry->expiry <= index->heap_count && index->heap[entry->expiry].slot == slot),
          "slot %u is elsewhere in the heap", slot);
}

/* Returns by how many lines an entry is behind the one where it belongs. */
static inline uint64_t lines_behind(const struct ss_index *index, uint32_t slot) {
    const struct entry *entry = &index->entries[slot];
    uint64_t hash = ss_index_hash(index, entry->tenant, entry->key);
    uint64_t home = (uint64_t)(((unsigned __int128)hash * index->line_count) >> 64);
    for (uint64_t behind = 0; behind < index->line_count; behind++) {
        const struct line *line = &index->lines[(home + behind) % index->line_count];
        for (size_t at = 0; at < LINE_SLOTS; at++) {
            if (line->tags[at] != 0 && line->slots[at] == slot) {
                return behind;
            }
        }
        CHECK(line->overflow > 0, "slot %u is behind a line that nothing passed", slot);
    }
    CHECK(false, "slot %u is in no line", slot);
}

static inline void check_whole(const struct ss_index *index) {
    uint64_t names = 0, objects = 0, bytes = 0, expiring = 0, dangling = 0, overflow = 0, tags = 0, listed = 0,
             behind = 0;
    for (uint32_t slot = 1; slot <= index->slots_used; slot++) {
        const struct entry *entry = &index->entries[slot];
        if (entry->used) {
            check_links(index, slot);
            behind += lines_behind(index, slot);
            dangling += entry->dangling;
            objects += !entry->dangling;
            bytes += entry->dangling ? 0 : ss_index_entry_bytes(entry);
            expiring += entry->expiry != 0;
            names += ss_index_name_records(index, entry);
        }
        CHECK(index->names[slot] == NULL || (ss_index_is_object(index, slot) && (entry->flags & SS_INDEX_NAMED) != 0),
              "slot %u has a name", slot);
    }
    for (uint32_t position = 2; position <= index->heap_count; position++) {
        CHECK(ss_index_expires_at(index, index->heap[position].slot) >=
                  ss_index_expires_at(index, index->heap[(position - 2) / 4 + 1].slot),
              "heap position %u", position);
    }
    for (uint64_t line = 0; line < index->line_count; line++) {
        overflow += index->lines[line].overflow;
        for (size_t at = 0; at < LINE_SLOTS; at++) {
            tags += index->lines[line].tags[at] != 0;
        }
    }
    for (uint32_t number = 1; number <= index->cell_count; number++) {
        const struct cell *cell = &index->cells[number];
        uint32_t count = 0;
        for (uint32_t list = LIST_SMALL; list < LIST_COUNT; list++) {
            count += check_list(index, &cell->lists[list], list, false);
        }
        CHECK((cell->id & 511u) == ANY_DEVICE || cell->totals.objects == count, "cell %u", number);
        listed += count;
    }
    CHECK(check_list(index, &index->dangling, 0, true) == dangling, "dangling parents");
    CHECK(objects == index->totals.objects && bytes == index->totals.bytes && listed == objects, "totals");
    CHECK(names == index->totals.name_records && (names == 0) == (index->names_size == 0), "names");
    CHECK(expiring == index->heap_count && expiring == index->totals.expiring, "expiring");
    CHECK(tags == objects + dangling && overflow == behind, "the table");
    CHECK(objects <= index->objects_max && (index->replaying || dangling <= index->dangling_max), "bounds");
}

#endif /* SS_INDEX_CHECK_H */
