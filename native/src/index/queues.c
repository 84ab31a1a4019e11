/* SPDX-License-Identifier: Apache-2.0 */
/*
 * queues.c - cells, their queues, the ghost queue, and the choice of the victim
 *
 * LRU has one queue, LIST_MAIN, from the last used object to the victim. S3-FIFO (SOSP '23) has two. New objects go
 * into the small queue, a tenth of the objects. At its end an object moves to the main queue if it was used twice
 * since, else it is evicted. Objects of the main queue that were used since go round again. The frequency policy has
 * only the main queue: an object goes round once for each recent use, at most three times (GCLOCK). Objects that may
 * not be evicted are in LIST_BLOCKED, so that searches do not find them repeatedly: pinned objects, and objects with
 * only such descendants.
 */
#include "index/internal.h"

#include <stdlib.h>

enum { LOOK_AT_BLOCKED = 4, LOOK_AT_BLOCKED_MAX = 1024, SMALL_PART = 10 };

/* ---- Cells --------------------------------------------------------------------------------------------------- */

static uint32_t cell_place(const struct ss_index *index, uint32_t id) {
    uint32_t mask = index->cell_room * 2 - 1, place = id * 2654435761u >> 7 & mask;
    while (index->cell_table[place] != 0 && index->cells[index->cell_table[place]].id != id) {
        place = (place + 1) & mask;
    }
    return place;
}

struct cell *ss_index_cell(const struct ss_index *index, uint16_t tenant, uint32_t device) {
    uint32_t number = index->cell_table[cell_place(index, (uint32_t)tenant << 9 | device)];
    return number != 0 ? &index->cells[number] : NULL;
}

static bool cells_grow(struct ss_index *index) {
    uint32_t room = index->cell_room * 2;
    struct cell *cells = realloc(index->cells, ((size_t)room + 1) * sizeof *cells);
    if (cells == NULL) {
        return false;
    }
    index->cells = cells;
    uint32_t *table = calloc((size_t)room * 2, sizeof *table);
    if (table == NULL) {
        return false;
    }
    free(index->cell_table);
    index->cell_table = table;
    index->cell_room = room;
    for (uint32_t number = 1; number <= index->cell_count; number++) {
        table[cell_place(index, cells[number].id)] = number;
    }
    return true;
}

struct cell *ss_index_cell_make(struct ss_index *index, uint16_t tenant, uint32_t device) {
    struct cell *cell = ss_index_cell(index, tenant, device);
    if (cell != NULL) {
        return cell;
    }
    if (index->cell_count == index->cell_room && !cells_grow(index)) {
        return NULL;
    }
    uint32_t id = (uint32_t)tenant << 9 | device, number = ++index->cell_count;
    index->cell_table[cell_place(index, id)] = number;
    cell = &index->cells[number];
    memset(cell, 0, sizeof *cell);
    cell->id = id;
    if (device != ANY_DEVICE) {
        struct cell *whole = ss_index_cell(index, tenant, ANY_DEVICE);
        cell->next = whole->next;
        whole->next = number;
    }
    return cell;
}

/* ---- Lists --------------------------------------------------------------------------------------------------- */

/* Puts an entry at the head. */
void ss_index_push(struct ss_index *index, struct list_ends *ends, uint32_t slot) {
    struct entry *entries = index->entries;
    entries[slot].previous = 0;
    entries[slot].next = ends->head;
    if (ends->head != 0) {
        entries[ends->head].previous = slot;
    } else {
        ends->tail = slot;
    }
    ends->head = slot;
    ends->count++;
}

static void push_tail(struct ss_index *index, struct list_ends *ends, uint32_t slot) {
    struct entry *entries = index->entries;
    entries[slot].next = 0;
    entries[slot].previous = ends->tail;
    if (ends->tail != 0) {
        entries[ends->tail].next = slot;
    } else {
        ends->head = slot;
    }
    ends->tail = slot;
    ends->count++;
}

void ss_index_pull(struct ss_index *index, struct list_ends *ends, uint32_t slot) {
    struct entry *entries = index->entries;
    uint32_t previous = entries[slot].previous, next = entries[slot].next;
    if (previous != 0) {
        entries[previous].next = next;
    } else {
        ends->head = next;
    }
    if (next != 0) {
        entries[next].previous = previous;
    } else {
        ends->tail = previous;
    }
    ends->count--;
}

static void move_to(struct ss_index *index, struct cell *cell, uint32_t slot, enum list list) {
    ss_index_pull(index, &cell->lists[index->entries[slot].list], slot);
    index->entries[slot].list = list & 3u;
    ss_index_push(index, &cell->lists[list], slot);
}

void ss_index_enqueue(struct ss_index *index, struct cell *cell, uint32_t slot, bool ghost) {
    struct entry *entry = &index->entries[slot];
    enum list list = index->policy == SS_INDEX_S3FIFO && !ghost ? LIST_SMALL : LIST_MAIN;
    if (entry->pinned_until_s != 0) {
        list = LIST_BLOCKED;
    }
    entry->list = list & 3u;
    entry->frequency = 0;
    ss_index_push(index, &cell->lists[list], slot);
}

void ss_index_dequeue(struct ss_index *index, struct cell *cell, uint32_t slot) {
    ss_index_pull(index, &cell->lists[index->entries[slot].list], slot);
    index->entries[slot].list = LIST_NONE;
}

static struct cell *cell_of(const struct ss_index *index, const struct entry *entry) {
    return ss_index_cell(index, entry->tenant, entry->device);
}

void ss_index_touch(struct ss_index *index, uint32_t slot, uint32_t now_s) {
    if (!ss_index_is_object(index, slot)) {
        return;
    }
    struct entry *entry = &index->entries[slot];
    entry->accessed_s = now_s;
    if (index->policy != SS_INDEX_LRU) {
        entry->frequency = entry->frequency < FREQUENCY_MAX ? (entry->frequency + 1u) & 3u : FREQUENCY_MAX;
    } else if (entry->list == LIST_MAIN) {
        struct cell *cell = cell_of(index, entry);
        if (cell->lists[LIST_MAIN].head != slot) {
            move_to(index, cell, slot, LIST_MAIN);
        }
    }
}

void ss_index_touch_each(struct ss_index *index, const uint32_t *slots, size_t count, uint32_t now_s) {
    for (size_t at = 0; at < count; at++) {
        ss_index_touch(index, slots[at], now_s);
    }
}

/* unblock() moves an object back to a queue; the end of its pin counts as a use of it. */
static void unblock(struct ss_index *index, struct cell *cell, uint32_t slot) {
    index->entries[slot].pinned_until_s = 0;
    move_to(index, cell, slot, LIST_MAIN);
    ss_index_dangling_unblock(index, index->entries[slot].parent);
}

void ss_index_pin(struct ss_index *index, uint32_t slot, uint32_t until_s) {
    if (!ss_index_is_object(index, slot)) {
        return;
    }
    struct entry *entry = &index->entries[slot];
    struct cell *cell = cell_of(index, entry);
    if (until_s == 0 && entry->pinned_until_s != 0) {
        unblock(index, cell, slot);
    } else if (until_s != 0 && entry->list != LIST_BLOCKED) {
        move_to(index, cell, slot, LIST_BLOCKED);
    }
    entry->pinned_until_s = until_s;
}

/* ---- Ghosts -------------------------------------------------------------------------------------------------- */

/* Sets of eight, each one a queue: different bits of the key's hash select the set, and are the fingerprint. */
static uint16_t *ghost_set(const struct ss_index *index, uint64_t hash, uint16_t *ghost) {
    uint16_t bits = (uint16_t)(hash >> 8);
    *ghost = bits != 0 ? bits : 1;
    return &index->ghosts[(size_t)(((unsigned __int128)hash * index->ghost_sets) >> 64) * GHOST_WAYS];
}

bool ss_index_ghost_contains(const struct ss_index *index, uint64_t hash) {
    uint16_t ghost;
    const uint16_t *set = ghost_set(index, hash, &ghost);
    for (size_t way = 0; way < GHOST_WAYS; way++) {
        if (set[way] == ghost) {
            return true;
        }
    }
    return false;
}

void ss_index_ghost_add(struct ss_index *index, uint64_t hash) {
    uint16_t ghost;
    uint16_t *set = ghost_set(index, hash, &ghost);
    size_t way = 0;
    while (way < GHOST_WAYS - 1 && set[way] != ghost) {
        way++;
    }
    memmove(set + 1, set, way * sizeof *set);
    set[0] = ghost;
}

int ss_index_ghost(const struct ss_index *index, uint16_t tenant, const uint8_t *key) {
    return ss_index_ghost_contains(index, ss_index_hash(index, tenant, key));
}

/* ---- Victims ------------------------------------------------------------------------------------------------- */

/* candidate() returns the next object of a cell to evict by the policy, 0 if all its objects are blocked. */
static uint32_t candidate(struct ss_index *index, struct cell *cell) {
    struct list_ends *small = &cell->lists[LIST_SMALL], *main = &cell->lists[LIST_MAIN];
    for (;;) {
        uint32_t objects = small->count + main->count;
        if (small->count > 0 && (main->count == 0 || small->count >= objects / SMALL_PART)) {
            if (index->entries[small->tail].frequency < 2) {
                return small->tail;
            }
            index->entries[small->tail].frequency = 0;
            move_to(index, cell, small->tail, LIST_MAIN);
        } else if (main->count > 0) {
            struct entry *entry = &index->entries[main->tail];
            if (entry->frequency == 0) {
                return main->tail;
            }
            entry->frequency = (entry->frequency - 1u) & 3u;
            move_to(index, cell, main->tail, LIST_MAIN);
        } else {
            return 0;
        }
    }
}

static void block(struct ss_index *index, uint32_t slot) {
    struct entry *entry = &index->entries[slot];
    if (entry->dangling) {
        entry->list = LIST_BLOCKED;
    } else {
        move_to(index, cell_of(index, entry), slot, LIST_BLOCKED);
    }
}

static uint32_t unblocked(const struct ss_index *index, uint32_t sibling) {
    while (sibling != 0 && index->entries[sibling].list == LIST_BLOCKED) {
        sibling = index->entries[sibling].next_sibling;
    }
    return sibling;
}

/*
 * leaf_below() returns a leaf below 'top', a cell's candidate, or 'top' itself; 0 if all of them, and 'top', are
 * blocked. The objects on the way down move to the end of the candidate's queue, so that later evictions of this chain
 * need not walk down again.
 */
static uint32_t leaf_below(struct ss_index *index, struct cell *cell, uint32_t top) {
    struct entry *entries = index->entries;
    uint32_t list = entries[top].list, slot = top, child = unblocked(index, entries[top].first_child);
    for (;;) {
        while (child != 0) {
            slot = child;
            const struct entry *entry = &entries[slot];
            if (!entry->dangling && entry->list == list && cell_of(index, entry) == cell) {
                ss_index_pull(index, &cell->lists[list], slot);
                push_tail(index, &cell->lists[list], slot);
            }
            child = unblocked(index, entry->first_child);
        }
        if (entries[slot].first_child == 0) {
            return slot;
        }
        block(index, slot);
        if (slot == top) {
            return 0;
        }
        child = unblocked(index, entries[slot].next_sibling);
        slot = entries[slot].parent;
    }
}

/* Unblocks some objects that no pin protects any longer; returns their number. */
static uint32_t look_at_blocked(struct ss_index *index, struct cell *cell, uint32_t now_s, uint32_t *looks) {
    struct list_ends *blocked = &cell->lists[LIST_BLOCKED];
    uint32_t freed = 0, left = blocked->count;
    for (; left > 0 && *looks > 0; left--, --*looks) {
        uint32_t slot = blocked->tail;
        if (index->entries[slot].pinned_until_s <= now_s) {
            unblock(index, cell, slot);
            freed++;
        } else {
            move_to(index, cell, slot, LIST_BLOCKED);
        }
    }
    return freed;
}

static bool cell_matches(const struct cell *cell, int32_t device, int32_t tenant) {
    uint32_t own = cell->id & 511u;
    return own != ANY_DEVICE && (device < 0 || own == (uint32_t)device) &&
           (tenant < 0 || cell->id >> 9 == (uint32_t)tenant);
}

uint32_t ss_index_next_cell(const struct ss_index *index, uint32_t number, int32_t tenant) {
    if (tenant < 0) {
        return number < index->cell_count ? number + 1 : 0;
    }
    if (number != 0) {
        return index->cells[number].next;
    }
    const struct cell *whole = ss_index_cell(index, (uint16_t)tenant, ANY_DEVICE);
    return whole != NULL ? whole->next : 0;
}

/* oldest_cell() returns the cell whose next candidate was used least recently; NULL if there is no candidate. */
static struct cell *oldest_cell(const struct ss_index *index, int32_t device, int32_t tenant) {
    struct cell *oldest = NULL;
    uint32_t oldest_s = 0;
    for (uint32_t number = ss_index_next_cell(index, 0, tenant); number != 0;
         number = ss_index_next_cell(index, number, tenant)) {
        struct cell *cell = &index->cells[number];
        uint32_t tails[2] = {cell->lists[LIST_SMALL].tail, cell->lists[LIST_MAIN].tail};
        for (size_t at = 0; at < 2; at++) {
            if (tails[at] != 0 && cell_matches(cell, device, tenant) &&
                (oldest == NULL || index->entries[tails[at]].accessed_s < oldest_s)) {
                oldest = cell;
                oldest_s = index->entries[tails[at]].accessed_s;
            }
        }
    }
    return oldest;
}

static uint32_t search(struct ss_index *index, int32_t device, int32_t tenant) {
    struct cell *cell;
    while ((cell = oldest_cell(index, device, tenant)) != NULL) {
        uint32_t top = candidate(index, cell);
        uint32_t leaf = top != 0 ? leaf_below(index, cell, top) : 0;
        if (leaf != 0) {
            return leaf;
        }
    }
    return 0;
}

/* Examines at most 'max' objects, for any number of cells: the next call continues after the last cell. */
static uint32_t look_at_all_blocked(struct ss_index *index, int32_t device, int32_t tenant, uint32_t now_s,
                                    uint32_t max) {
    uint32_t freed = 0, looks = max;
    for (uint32_t tried = 0; tenant < 0 && tried < index->cell_count && looks > 0; tried++) {
        index->looked_at = index->looked_at % index->cell_count + 1;
        if (cell_matches(&index->cells[index->looked_at], device, tenant)) {
            freed += look_at_blocked(index, &index->cells[index->looked_at], now_s, &looks);
        }
    }
    for (uint32_t number = tenant < 0 ? 0 : ss_index_next_cell(index, 0, tenant); number != 0 && looks > 0;
         number = ss_index_next_cell(index, number, tenant)) {
        if (cell_matches(&index->cells[number], device, tenant)) {
            freed += look_at_blocked(index, &index->cells[number], now_s, &looks);
        }
    }
    return freed;
}

/*
 * ancestor() returns an object that is blocked only by pinned descendants; 0 for none. Else the pin of one small object
 * at the end would keep a whole chain. search() has just blocked such objects: they are at the heads.
 */
static uint32_t ancestor(const struct ss_index *index, int32_t device, int32_t tenant, uint32_t now_s) {
    uint32_t looks = LOOK_AT_BLOCKED_MAX;
    for (uint32_t number = ss_index_next_cell(index, 0, tenant); number != 0;
         number = ss_index_next_cell(index, number, tenant)) {
        if (!cell_matches(&index->cells[number], device, tenant)) {
            continue;
        }
        uint32_t slot = index->cells[number].lists[LIST_BLOCKED].head;
        for (; slot != 0 && looks > 0; slot = index->entries[slot].next, looks--) {
            if (index->entries[slot].pinned_until_s <= now_s) {
                return slot;
            }
        }
    }
    return 0;
}

uint32_t ss_index_victim(struct ss_index *index, int32_t device, int32_t tenant, uint32_t now_s) {
    if (device > UINT8_MAX || tenant > UINT16_MAX) {
        return 0;
    }
    uint32_t slot = ss_index_due(index, (uint64_t)now_s * 1000, device, tenant);
    if (slot != 0) {
        return slot;
    }
    look_at_all_blocked(index, device, tenant, now_s, LOOK_AT_BLOCKED);
    slot = search(index, device, tenant);
    if (slot == 0 && look_at_all_blocked(index, device, tenant, now_s, LOOK_AT_BLOCKED_MAX) > 0) {
        slot = search(index, device, tenant);
    }
    return slot != 0 ? slot : ancestor(index, device, tenant, now_s);
}

static uint64_t clear_cell(struct ss_index *index, uint32_t number) {
    uint64_t cleared = 0;
    for (size_t list = LIST_SMALL; list < LIST_COUNT; list++) {
        uint32_t slot;
        while ((slot = index->cells[number].lists[list].head) != 0) {
            ss_index_forget(index, slot, false);
            cleared++;
        }
    }
    return cleared;
}

uint64_t ss_index_clear(struct ss_index *index, int32_t tenant, int32_t device) {
    uint64_t cleared = 0;
    if (device > UINT8_MAX || tenant > UINT16_MAX) {
        return 0;
    }
    for (uint32_t number = ss_index_next_cell(index, 0, tenant); number != 0;
         number = ss_index_next_cell(index, number, tenant)) {
        if (cell_matches(&index->cells[number], device, tenant)) {
            cleared += clear_cell(index, number);
        }
    }
    ss_index_superseded_clear(index, tenant, device);
    return cleared;
}
