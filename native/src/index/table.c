/* SPDX-License-Identifier: Apache-2.0 */
/*
 * table.c - the hash table: from tenant and key to a slot, and the free slots
 *
 * A key's hash names the line where the search begins. A full line counts in 'overflow' the entries that continued to
 * later lines, so a search ends at the first line that nothing passed.
 */
#include "index/internal.h"

uint64_t ss_index_hash(const struct ss_index *index, uint16_t tenant, const uint8_t *key) {
    return ss_hash_key(&index->seed, tenant, key);
}

void ss_index_prefetch(const struct ss_index *index, uint16_t tenant, const uint8_t *key) {
    __builtin_prefetch(&index->lines[ss_index_line_of(index, ss_index_hash(index, tenant, key))]);
}

static uint8_t tag_of(uint64_t hash) {
    uint8_t tag = (uint8_t)hash;
    return tag != 0 ? tag : 1;
}

/* place_find() returns the line that has the entry, and where in it; NULL for none. */
static struct line *place_find(const struct ss_index *index, uint64_t hash, uint16_t tenant, const uint8_t *key,
                               uint32_t *place) {
    uint64_t number = ss_index_line_of(index, hash);
    uint8_t tag = tag_of(hash);
    for (uint64_t tried = 0; tried < index->line_count; tried++) {
        struct line *line = &index->lines[number];
        for (uint32_t at = 0; at < LINE_SLOTS; at++) {
            if (line->tags[at] == tag) {
                const struct entry *entry = &index->entries[line->slots[at]];
                if (entry->tenant == tenant && memcmp(entry->key, key, KEY_SIZE) == 0) {
                    *place = at;
                    return line;
                }
            }
        }
        if (line->overflow == 0) {
            return NULL;
        }
        number = number + 1 < index->line_count ? number + 1 : 0;
    }
    return NULL;
}

uint32_t ss_index_search(const struct ss_index *index, uint64_t hash, uint16_t tenant, const uint8_t *key) {
    uint32_t place;
    const struct line *line = place_find(index, hash, tenant, key, &place);
    return line != NULL ? line->slots[place] : 0;
}

uint32_t ss_index_find(const struct ss_index *index, uint16_t tenant, const uint8_t *key) {
    uint32_t slot = ss_index_search(index, ss_index_hash(index, tenant, key), tenant, key);
    return index->entries[slot].dangling ? 0 : slot;
}

size_t ss_index_find_many(const struct ss_index *index, uint16_t tenant, const uint8_t *keys, size_t count,
                          uint32_t *slots) {
    size_t found = 0;
    for (size_t at = 0; at < count; at++) {
        slots[at] = ss_index_find(index, tenant, keys + at * KEY_SIZE);
        found += slots[at] != 0;
    }
    return found;
}

uint32_t ss_index_slot_allocate(struct ss_index *index, uint64_t hash, uint16_t tenant, const uint8_t *key) {
    uint32_t slot = index->free_slot;
    if (slot != 0) {
        index->free_slot = index->entries[slot].next;
    } else if (index->slots_used < index->slots_max) {
        slot = ++index->slots_used;
    } else {
        return 0;
    }
    struct entry *entry = &index->entries[slot];
    memset(entry, 0, sizeof *entry);
    memcpy(entry->key, key, KEY_SIZE);
    entry->tenant = tenant;
    entry->used = 1;
    /* There are more places than slots. */
    for (uint64_t number = ss_index_line_of(index, hash);; number = number + 1 < index->line_count ? number + 1 : 0) {
        struct line *line = &index->lines[number];
        for (uint32_t at = 0; at < LINE_SLOTS; at++) {
            if (line->tags[at] == 0) {
                line->tags[at] = tag_of(hash);
                line->slots[at] = slot;
                return slot;
            }
        }
        line->overflow++;
    }
}

void ss_index_slot_free(struct ss_index *index, uint32_t slot) {
    struct entry *entry = &index->entries[slot];
    uint64_t hash = ss_index_hash(index, entry->tenant, entry->key);
    uint32_t place;
    struct line *line = place_find(index, hash, entry->tenant, entry->key, &place);
    line->tags[place] = 0;
    for (uint64_t number = ss_index_line_of(index, hash); &index->lines[number] != line;
         number = number + 1 < index->line_count ? number + 1 : 0) {
        index->lines[number].overflow--;
    }
    entry->used = 0;
    entry->next = index->free_slot;
    index->free_slot = slot;
    if (index->totals.objects == 0 && index->dangling.count == 0) {
        index->slots_used = 0; /* so that an index that was emptied is walked through in no time */
        index->free_slot = 0;
    }
}
