/* SPDX-License-Identifier: Apache-2.0 */
/* index.c - the index: its memory, put, remove, walks and totals, over the table (table.c) */
#include "index/internal.h"
#include "shadowserve_block.h"

#include <stdlib.h>
#include <sys/mman.h>

/* ---- Memory -------------------------------------------------------------------------------------------------- */

static uint64_t heap_bytes(const struct ss_index *index) {
    return ((uint64_t)index->objects_max + 1) * sizeof(struct expiry);
}

static uint64_t entries_bytes(const struct ss_index *index) {
    return ((uint64_t)index->slots_max + 1) * sizeof(struct entry);
}

static uint64_t names_bytes(const struct ss_index *index) {
    return ((uint64_t)index->slots_max + 1) * sizeof(struct name *);
}

static void *reserve(uint64_t bytes, bool huge) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        return NULL;
    }
    if (huge) {
        madvise(memory, bytes, MADV_HUGEPAGE); /* fewer misses of the TLB; works without as well */
    }
    return memory;
}

static void unmap(void *memory, uint64_t bytes) {
    if (memory != NULL) {
        munmap(memory, bytes);
    }
}

enum ss_result ss_index_open(uint32_t objects_max, enum ss_index_policy policy, uint64_t seed,
                             struct ss_index **index) {
    if (objects_max == 0 || objects_max > 1u << 30 || policy > SS_INDEX_FREQUENCY) {
        return SS_BAD_ARGUMENT;
    }
    struct ss_index *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return SS_NO_MEMORY;
    }
    made->objects_max = objects_max;
    made->dangling_max = objects_max / 8 + 8;
    made->slots_max = objects_max + made->dangling_max;
    /* Eight slots in ten are used when it is full, nine with all dangling parents. */
    made->line_count = (uint64_t)objects_max * 10 / (8 * LINE_SLOTS) + 2;
    made->ghost_sets = objects_max / GHOST_WAYS + 1;
    made->policy = policy;
    made->seed = ss_hash_seed_of(seed);
    made->entries = reserve(entries_bytes(made), true);
    made->lines = reserve(made->line_count * sizeof(struct line), true);
    made->names = reserve(names_bytes(made), false);
    made->heap = reserve(heap_bytes(made), false);
    made->ghosts = reserve(made->ghost_sets * GHOST_WAYS * sizeof(uint16_t), false);
    made->cell_room = 8;
    made->cells = calloc(made->cell_room + 1, sizeof *made->cells);
    made->cell_table = calloc((size_t)made->cell_room * 2, sizeof *made->cell_table);
    if (!made->entries || !made->names || !made->lines || !made->heap || !made->ghosts || !made->cells ||
        !made->cell_table) {
        ss_index_close(made);
        return SS_NO_MEMORY;
    }
    *index = made;
    return SS_OK;
}

void ss_index_close(struct ss_index *index) {
    if (index == NULL) {
        return;
    }
    ss_index_close_names(index);
    unmap(index->names, names_bytes(index));
    unmap(index->entries, entries_bytes(index));
    unmap(index->lines, index->line_count * sizeof(struct line));
    unmap(index->heap, heap_bytes(index));
    unmap(index->ghosts, index->ghost_sets * GHOST_WAYS * sizeof(uint16_t));
    free(index->cells);
    free(index->cell_table);
    ss_index_superseded_close(index);
    free(index);
}

uint64_t ss_index_memory(const struct ss_index *index) {
    uint64_t pointers = index->names_size != 0 ? (uint64_t)(index->slots_used + 1) * sizeof(struct name *) : 0;
    return sizeof *index + pointers + index->names_size + (uint64_t)(index->slots_used + 1) * sizeof(struct entry) +
           index->line_count * sizeof(struct line) + (uint64_t)(index->heap_count + 1) * sizeof(struct expiry) +
           index->ghost_sets * GHOST_WAYS * sizeof(uint16_t) +
           (uint64_t)index->cell_room * (sizeof(struct cell) + 2 * sizeof(uint32_t));
}

/* ---- Objects ------------------------------------------------------------------------------------------------- */

uint32_t ss_index_blocks(uint32_t length, uint32_t name_length) {
    return (uint32_t)(ss_object_bytes(length, name_length) / BLOCK_SIZE);
}

static void add(struct ss_index_totals *totals, const struct entry *entry, int64_t sign, uint64_t name_records) {
    totals->objects += (uint64_t)sign;
    totals->bytes += (uint64_t)(sign * (int64_t)ss_index_entry_bytes(entry));
    totals->records += (entry->flags & SS_INDEX_RECORD) != 0 ? (uint64_t)sign : 0;
    totals->expiring += entry->expiry != 0 ? (uint64_t)sign : 0;
    totals->name_records += (uint64_t)sign * name_records;
}

void ss_index_count(struct ss_index *index, const struct entry *entry, int64_t sign) {
    uint64_t names = ss_index_name_records(index, entry);
    add(&index->totals, entry, sign, names);
    add(&index->devices[entry->device], entry, sign, names);
    add(&ss_index_cell(index, entry->tenant, ANY_DEVICE)->totals, entry, sign, names);
    add(&ss_index_cell(index, entry->tenant, entry->device)->totals, entry, sign, names);
}

bool ss_index_valid(const struct ss_index_record *record, uint32_t blocks) {
    return record->kind == SS_INDEX_PUT && record->reserved == 0 && record->name_blocks <= NAME_BLOCKS_MAX &&
           (record->name_blocks == 0 || (record->flags & SS_INDEX_NAMED) != 0) &&
           record->header_length <= record->length && record->header_length <= HEAD_LENGTH_MAX &&
           (record->flags & SS_INDEX_EVERY_TENANT) == 0 &&
           (uint64_t)record->extent + ss_index_blocks(record->length, 0) + record->name_blocks <= blocks;
}

/* Sets the fields of a put in an object that is in the table and not yet counted. */
static void fill(struct entry *entry, const struct ss_index_record *record, uint32_t accessed_s) {
    entry->device = record->device;
    entry->flags = record->flags;
    entry->extent = record->extent;
    entry->length = record->length;
    entry->header_length = record->header_length & HEAD_LENGTH_MAX;
    entry->name_blocks = record->name_blocks & NAME_BLOCKS_MAX;
    entry->generation = record->generation;
    entry->pinned_until_s = record->pinned_until_s;
    entry->accessed_s = accessed_s;
}

enum ss_result ss_index_store(struct ss_index *index, uint64_t hash, const struct ss_index_record *record,
                              struct name *name, uint32_t accessed_s, uint32_t *slot) {
    uint32_t found = ss_index_search(index, hash, record->tenant, record->key);
    bool replaces = found != 0 && !index->entries[found].dangling;
    if (!replaces && index->totals.objects >= index->objects_max) {
        return SS_NO_SPACE;
    }
    if (ss_index_cell_make(index, record->tenant, ANY_DEVICE) == NULL ||
        ss_index_cell_make(index, record->tenant, record->device) == NULL) {
        return SS_NO_MEMORY;
    }
    if (replaces) {
        struct entry *entry = &index->entries[found];
        ss_index_count(index, entry, -1);
        ss_index_dequeue(index, ss_index_cell(index, entry->tenant, entry->device), found);
    } else if (found != 0) {
        ss_index_pull(index, &index->dangling, found);
        index->entries[found].dangling = 0;
        index->entries[found].list = LIST_NONE;
    } else {
        found = ss_index_slot_allocate(index, hash, record->tenant, record->key);
        if (found == 0) { /* while replaying dangling parents may have all that are free */
            ss_index_dangling_drop(index, index->dangling_max);
            found = ss_index_slot_allocate(index, hash, record->tenant, record->key);
        }
    }
    struct entry *entry = &index->entries[found];
    if ((record->flags & SS_INDEX_NAMED) == 0) {
        ss_index_drop_name(index, found);
    }
    fill(entry, record, accessed_s);
    if (name != NULL) {
        ss_index_swap_name(index, found, name);
    }
    ss_index_set_expiry(index, found, record->expires_at_ms);
    ss_index_count(index, entry, 1);
    ss_index_enqueue(index, ss_index_cell(index, entry->tenant, entry->device), found,
                     index->policy == SS_INDEX_S3FIFO && ss_index_ghost_contains(index, hash));
    ss_index_parent_set(index, found, record->parent);
    *slot = found;
    return SS_OK;
}

enum ss_result ss_index_insert(struct ss_index *index, const struct ss_index_record *record, const uint8_t *name,
                               uint32_t name_length, uint32_t now_s, uint32_t *slot) {
    if (!ss_index_valid(record, UINT32_MAX)) {
        return SS_BAD_ARGUMENT;
    }
    struct name *made = NULL;
    enum ss_result result = name != NULL ? ss_index_make_name(record->flags, name, name_length, &made) : SS_OK;
    if (result == SS_OK) {
        uint64_t hash = ss_index_hash(index, record->tenant, record->key);
        result = ss_index_store(index, hash, record, made, now_s, slot);
        if (result != SS_OK) {
            free(made);
        }
    }
    return result;
}

enum ss_result ss_index_read(const struct ss_index *index, uint32_t slot, struct ss_index_record *record) {
    memset(record, 0, sizeof *record);
    if (!ss_index_is_object(index, slot)) {
        return SS_NOT_FOUND;
    }
    const struct entry *entry = &index->entries[slot];
    record->kind = SS_INDEX_PUT;
    record->flags = entry->flags;
    record->device = entry->device;
    record->name_blocks = entry->name_blocks;
    record->tenant = entry->tenant;
    record->extent = entry->extent;
    record->length = entry->length;
    record->header_length = entry->header_length;
    record->accessed_s = entry->accessed_s;
    record->pinned_until_s = entry->pinned_until_s;
    record->generation = entry->generation;
    record->expires_at_ms = ss_index_expires_at(index, slot);
    memcpy(record->key, entry->key, KEY_SIZE);
    if (entry->parent != 0) {
        memcpy(record->parent, index->entries[entry->parent].key, KEY_SIZE);
    }
    return SS_OK;
}

uint32_t ss_index_get(struct ss_index *index, uint16_t tenant, const uint8_t *key, uint32_t now_s,
                      struct ss_index_record *record) {
    uint32_t slot = ss_index_find(index, tenant, key);
    if (slot != 0) {
        ss_index_read(index, slot, record);
        if (now_s != 0) {
            ss_index_touch(index, slot, now_s);
        }
    }
    return slot;
}

size_t ss_index_places(struct ss_index *index, uint16_t tenant, const uint8_t *keys, const uint32_t *lengths,
                       size_t count, uint64_t now_ms, struct ss_index_place *places) {
    size_t found = 0;
    for (; found < count; found++) {
        uint32_t slot = ss_index_find(index, tenant, keys + found * KEY_SIZE);
        const struct entry *entry = &index->entries[slot];
        uint64_t ends_ms = slot == 0 ? 0 : ss_index_expires_at(index, slot);
        if (slot == 0 || (entry->flags & SS_INDEX_NAMED) != 0 || entry->length != lengths[found] ||
            entry->device == MEMORY || (ends_ms != 0 && ends_ms <= now_ms)) {
            break;
        }
        places[found] = (struct ss_index_place){
            .slot = slot, .extent = entry->extent, .generation = entry->generation, .device = entry->device};
        ss_index_touch(index, slot, (uint32_t)(now_ms / 1000));
    }
    return found;
}

void ss_index_forget(struct ss_index *index, uint32_t slot, bool remember) {
    struct entry *entry = &index->entries[slot];
    ss_index_count(index, entry, -1);
    ss_index_drop_name(index, slot);
    ss_index_set_expiry(index, slot, 0);
    ss_index_dequeue(index, ss_index_cell(index, entry->tenant, entry->device), slot);
    if (remember) {
        ss_index_ghost_add(index, ss_index_hash(index, entry->tenant, entry->key));
    }
    ss_index_unlink(index, slot);
}

void ss_index_remove(struct ss_index *index, uint32_t slot) {
    if (ss_index_is_object(index, slot)) {
        ss_index_forget(index, slot, false);
    }
}

void ss_index_evict(struct ss_index *index, uint32_t slot) {
    if (ss_index_is_object(index, slot)) {
        ss_index_forget(index, slot, true);
    }
}

enum ss_result ss_index_expire(struct ss_index *index, uint32_t slot, uint64_t expires_at_ms) {
    if (!ss_index_is_object(index, slot)) {
        return SS_NOT_FOUND;
    }
    ss_index_count(index, &index->entries[slot], -1);
    ss_index_set_expiry(index, slot, expires_at_ms);
    ss_index_count(index, &index->entries[slot], 1);
    return SS_OK;
}

enum ss_result ss_index_resize(struct ss_index *index, uint32_t slot, uint32_t length) {
    if (!ss_index_is_object(index, slot) || index->entries[slot].device != MEMORY) {
        return SS_NOT_FOUND;
    }
    struct entry *entry = &index->entries[slot];
    if (length < entry->header_length) {
        return SS_BAD_ARGUMENT;
    }
    ss_index_count(index, entry, -1);
    entry->length = length;
    ss_index_count(index, entry, 1);
    return SS_OK;
}

uint32_t ss_index_next(const struct ss_index *index, uint32_t slot) {
    while (slot < index->slots_used) {
        if (ss_index_is_object(index, ++slot)) {
            return slot;
        }
    }
    return 0;
}

/* Most objects whose home is one line of the table: its own places, and places in the lines after it. */
enum { HOME_MAX = 4096 };

struct found {
    uint64_t hash;
    uint32_t slot;
};

static int by_hash(const void *one, const void *other) {
    uint64_t first = ((const struct found *)one)->hash, second = ((const struct found *)other)->hash;
    return (first > second) - (first < second);
}

static bool is_of(const struct ss_index *index, uint32_t slot, int32_t tenant) {
    const struct entry *entry = &index->entries[slot];
    return !entry->dangling && (tenant < 0 || entry->tenant == tenant);
}

/* at_home() finds a tenant's objects whose home is a line, from a hash on, and sorts them; returns their number. */
static size_t at_home(const struct ss_index *index, uint64_t home, int32_t tenant, uint64_t from, struct found *found) {
    size_t count = 0;
    uint64_t number = home;
    for (uint64_t tried = 0; tried < index->line_count; tried++) {
        const struct line *line = &index->lines[number];
        for (uint32_t at = 0; at < LINE_SLOTS; at++) {
            if (line->tags[at] == 0 || !is_of(index, line->slots[at], tenant)) {
                continue;
            }
            const struct entry *entry = &index->entries[line->slots[at]];
            uint64_t hash = ss_index_hash(index, entry->tenant, entry->key);
            if (hash >= from && ss_index_line_of(index, hash) == home && count < HOME_MAX) {
                found[count++] = (struct found){.hash = hash, .slot = line->slots[at]};
            }
        }
        if (line->overflow == 0) {
            break;
        }
        number = number + 1 < index->line_count ? number + 1 : 0;
    }
    qsort(found, count, sizeof *found, by_hash);
    return count;
}

/* first_of() returns the least hash whose home is a line; 0 behind the last line. */
static uint64_t first_of(const struct ss_index *index, uint64_t line) {
    if (line >= index->line_count) {
        return 0;
    }
    unsigned __int128 first = (((unsigned __int128)line << 64) + index->line_count - 1) / index->line_count;
    return (uint64_t)first;
}

/* in_cell() adds a cell's objects, from a hash on; returns the number found so far. */
static size_t in_cell(const struct ss_index *index, const struct cell *cell, uint64_t from, struct found *found,
                      size_t count) {
    for (size_t list = LIST_SMALL; list < LIST_COUNT; list++) {
        for (uint32_t slot = cell->lists[list].head; slot != 0; slot = index->entries[slot].next) {
            uint64_t hash = ss_index_hash(index, index->entries[slot].tenant, index->entries[slot].key);
            if (hash >= from) {
                found[count++] = (struct found){.hash = hash, .slot = slot};
            }
        }
    }
    return count;
}

/* all_of() finds all objects of a tenant that has few, from a hash on, and sorts them; returns how many. */
static size_t all_of(const struct ss_index *index, int32_t tenant, uint64_t from, struct found *found) {
    size_t count = 0;
    for (uint32_t number = ss_index_next_cell(index, 0, tenant); number != 0;
         number = ss_index_next_cell(index, number, tenant)) {
        count = in_cell(index, &index->cells[number], from, found, count);
    }
    qsort(found, count, sizeof *found, by_hash);
    return count;
}

size_t ss_index_scan(const struct ss_index *index, int32_t tenant, uint64_t *cursor, uint32_t *slots, size_t max,
                     size_t lines_max) {
    struct found found[HOME_MAX];
    size_t stored = 0;
    uint64_t home = ss_index_line_of(index, *cursor);
    if (tenant > UINT16_MAX || max == 0) {
        *cursor = 0;
        return 0;
    }
    struct ss_index_totals totals;
    ss_index_totals(index, tenant, -1, &totals);
    if (totals.objects <= HOME_MAX) { /* faster than a scan of the objects of all tenants */
        size_t count = all_of(index, tenant, *cursor, found);
        for (; stored < count && stored < max; stored++) {
            slots[stored] = found[stored].slot;
        }
        *cursor = stored < count ? found[stored].hash : 0;
        return stored;
    }
    for (size_t looked = 0; looked < lines_max; looked++) {
        size_t count = at_home(index, home, tenant, *cursor, found);
        for (size_t at = 0; at < count; at++) {
            if (stored == max) {
                *cursor = found[at].hash;
                return stored;
            }
            slots[stored++] = found[at].slot;
        }
        *cursor = first_of(index, ++home);
        if (*cursor == 0) {
            break;
        }
    }
    return stored;
}

uint64_t ss_index_bytes(const struct ss_index *index, int32_t tenant) {
    struct ss_index_totals totals;
    ss_index_totals(index, tenant, -1, &totals);
    return totals.bytes;
}

void ss_index_totals(const struct ss_index *index, int32_t tenant, int32_t device, struct ss_index_totals *totals) {
    const struct cell *cell;
    memset(totals, 0, sizeof *totals);
    if (tenant > UINT16_MAX || device > UINT8_MAX) {
        return;
    }
    if (tenant < 0) {
        *totals = device < 0 ? index->totals : index->devices[device];
    } else if ((cell = ss_index_cell(index, (uint16_t)tenant, device < 0 ? ANY_DEVICE : (uint32_t)device)) != NULL) {
        *totals = cell->totals;
    }
}
