/* SPDX-License-Identifier: Apache-2.0 */
/* links.c - parents and children; a dangling parent stands for a parent that is not in the index */
#include "index/internal.h"

enum { DEPTH_MAX = 1 << 16 }; /* 16 million tokens in chunks of 256 */

static bool is_none(const uint8_t *key) {
    static const uint8_t none[KEY_SIZE];
    return memcmp(key, none, KEY_SIZE) == 0;
}

static void attach(struct ss_index *index, uint32_t parent, uint32_t child) {
    struct entry *entries = index->entries;
    uint32_t sibling = entries[parent].first_child;
    entries[child].parent = parent;
    entries[child].next_sibling = sibling;
    if (sibling != 0) {
        entries[sibling].previous_sibling = child;
    }
    entries[parent].first_child = child;
    ss_index_dangling_unblock(index, parent);
}

static uint32_t detach(struct ss_index *index, uint32_t child) {
    struct entry *entries = index->entries, *entry = &entries[child];
    uint32_t parent = entry->parent;
    if (parent != 0) {
        if (entry->previous_sibling != 0) {
            entries[entry->previous_sibling].next_sibling = entry->next_sibling;
        } else {
            entries[parent].first_child = entry->next_sibling;
        }
        if (entry->next_sibling != 0) {
            entries[entry->next_sibling].previous_sibling = entry->previous_sibling;
        }
        entry->parent = 0;
        entry->previous_sibling = 0;
        entry->next_sibling = 0;
    }
    return parent;
}

/* Removes a child from its parent, and frees each dangling ancestor that has no child left. */
static void leave(struct ss_index *index, uint32_t child) {
    uint32_t parent = detach(index, child);
    while (parent != 0 && index->entries[parent].dangling && index->entries[parent].first_child == 0) {
        uint32_t dangling = parent;
        parent = detach(index, dangling);
        ss_index_pull(index, &index->dangling, dangling);
        ss_index_slot_free(index, dangling);
    }
}

void ss_index_dangling_unblock(struct ss_index *index, uint32_t slot) {
    struct entry *entries = index->entries;
    while (slot != 0 && entries[slot].dangling && entries[slot].list == LIST_BLOCKED) {
        entries[slot].list = LIST_NONE;
        slot = entries[slot].parent;
    }
}

void ss_index_dangling_push(struct ss_index *index, uint32_t slot) {
    index->entries[slot].dangling = 1;
    index->entries[slot].list = LIST_NONE;
    ss_index_push(index, &index->dangling, slot);
}

void ss_index_dangling_drop(struct ss_index *index, uint32_t max) {
    while (index->dangling.count > max) {
        uint32_t dangling = index->dangling.tail;
        while (index->entries[dangling].first_child != 0) {
            detach(index, index->entries[dangling].first_child);
        }
        leave(index, dangling);
        ss_index_pull(index, &index->dangling, dangling);
        ss_index_slot_free(index, dangling);
    }
}

void ss_index_unlink(struct ss_index *index, uint32_t slot) {
    if (index->entries[slot].first_child == 0) {
        leave(index, slot);
        ss_index_slot_free(index, slot);
        return;
    }
    ss_index_dangling_push(index, slot);
    if (!index->replaying) {
        ss_index_dangling_drop(index, index->dangling_max);
    }
}

/* descends() returns whether 'slot' is 'ancestor' or below it, or too deep to tell. */
static bool descends(const struct ss_index *index, uint32_t slot, uint32_t ancestor) {
    for (uint32_t depth = 0; depth < DEPTH_MAX; depth++) {
        if (slot == ancestor) {
            return true;
        }
        if (slot == 0) {
            return false;
        }
        slot = index->entries[slot].parent;
    }
    return true;
}

void ss_index_parent_set(struct ss_index *index, uint32_t slot, const uint8_t *parent) {
    const struct entry *entry = &index->entries[slot];
    if (entry->parent != 0) {
        if (memcmp(index->entries[entry->parent].key, parent, KEY_SIZE) == 0) {
            return;
        }
        leave(index, slot);
    }
    if (is_none(parent) || memcmp(entry->key, parent, KEY_SIZE) == 0) {
        return;
    }
    uint64_t hash = ss_index_hash(index, entry->tenant, parent);
    uint32_t found = ss_index_search(index, hash, entry->tenant, parent);
    if (found == 0) {
        if (!index->replaying) {
            ss_index_dangling_drop(index, index->dangling_max - 1);
        }
        found = ss_index_slot_allocate(index, hash, entry->tenant, parent);
        if (found == 0) {
            return;
        }
        ss_index_dangling_push(index, found);
    } else if (entry->first_child != 0 && descends(index, found, slot)) {
        return;
    }
    attach(index, found, slot);
}
