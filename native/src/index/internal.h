/* SPDX-License-Identifier: Apache-2.0 */
/*
 * internal.h - declarations shared by the parts of the index
 *
 * A table of lines of 64 bytes, each with twelve slots and a byte of each one's hash, finds an entry: most look-ups
 * read one line and one entry. Entries have links for a queue of their cell (a tenant's objects on a device), and for
 * the tree of parents and children. The address range is reserved once; the kernel allocates pages at their first
 * write. So nothing is ever moved, and an object keeps its slot until it is removed.
 *
 * The texts of named keys are in separate memory, with an array of pointers by slot; without named keys, no page of
 * this array is used.
 *
 * A dangling parent is an entry without an object. It keeps the children of a missing parent together. It is in the
 * table and in the list of dangling parents, but in no cell, and is freed with its last child.
 */
#ifndef SS_INDEX_INTERNAL_H
#define SS_INDEX_INTERNAL_H

#include "index/hash.h"
#include "shadowserve_block.h"
#include "shadowserve_index.h"

#include <stdbool.h>
#include <string.h>

enum {
    LINE_SLOTS = 12,
    KEY_SIZE = 32,
    BLOCK_SIZE = 4096,
    MEMORY = 255, /* the device of objects only in memory: their 'extent' is the bytes in addition to the value */
    ANY_DEVICE = 256,
    GHOST_WAYS = 8,
    FREQUENCY_MAX = 3,
    HEAD_LENGTH_MAX = (1 << 21) - 1,
    NAME_BLOCKS_MAX = 31,
    NAME_PIECE_SIZE = 80,
    NAME_SIZE_MAX = 64 << 10
};

enum list { LIST_NONE = 0, LIST_SMALL = 1, LIST_MAIN = 2, LIST_BLOCKED = 3, LIST_COUNT = 4 };

struct line {
    uint32_t slots[LINE_SLOTS];
    uint8_t tags[LINE_SLOTS]; /* 0: empty */
    uint32_t overflow;        /* entries that are in a later line because this one was full */
};

struct entry {
    uint8_t key[KEY_SIZE];
    uint16_t tenant;
    uint8_t device;
    uint8_t flags;
    uint32_t extent;
    uint32_t length;
    uint32_t generation;
    uint32_t pinned_until_s;
    uint32_t accessed_s;
    uint32_t expiry; /* where it is in the heap, from 1; 0: never */
    uint32_t previous;
    uint32_t next; /* towards the tail; of a free entry the next free one */
    uint32_t parent;
    uint32_t first_child;
    uint32_t previous_sibling;
    uint32_t next_sibling;
    uint32_t header_length : 21;
    uint32_t name_blocks : 5;
    uint32_t list : 2; /* of a dangling parent: LIST_BLOCKED if no descendant may be evicted, else LIST_NONE */
    uint32_t frequency : 2;
    uint32_t used : 1;
    uint32_t dangling : 1;
};

struct list_ends {
    uint32_t head;
    uint32_t tail;
    uint32_t count;
};

/* A tenant's objects on a device. With ANY_DEVICE it has no lists: the tenant's totals, and the first of its cells. */
struct cell {
    struct ss_index_totals totals;
    struct list_ends lists[LIST_COUNT]; /* LIST_NONE is not used */
    uint32_t id;                        /* tenant << 9 | device */
    uint32_t next;                      /* of the tenant's, from 1; 0: none */
};

struct expiry {
    uint32_t slot;
    uint32_t low; /* of the time in ms */
    uint32_t high;
};

struct name {
    uint32_t length;
    uint8_t text[];
};

/* The text of a key from its records, part by part; complete when 'filled' is its length. */
struct replayed_name {
    uint8_t key[KEY_SIZE];
    uint16_t tenant;
    uint8_t device;
    uint32_t length;
    uint32_t filled;
    uint8_t text[NAME_SIZE_MAX];
};

struct ss_index {
    struct entry *entries; /* from 1 */
    struct name **names;   /* by slots */
    struct line *lines;
    struct expiry *heap; /* from 1 */
    uint16_t *ghosts;
    struct cell *cells; /* from 1 */
    uint32_t *cell_table;
    struct replayed_name *replayed_name; /* NULL: none has come */
    uint64_t names_size;                 /* of all texts, with what malloc() adds */
    struct ss_hash_seed seed;
    uint64_t line_count;
    uint64_t ghost_sets;
    uint32_t objects_max;
    uint32_t slots_max;
    uint32_t dangling_max;
    uint32_t slots_used; /* the highest that ever was */
    uint32_t free_slot;
    uint32_t heap_count;
    uint32_t cell_count;
    uint32_t cell_room; /* a power of two; the table has twice as many places */
    uint32_t looked_at; /* the cell whose blocked objects were looked at last */
    struct list_ends dangling;
    struct ss_index_totals totals;
    struct ss_index_totals devices[256];
    struct ss_index_superseded *superseded; /* NULL: none yet */
    enum ss_index_policy policy;
    bool replaying;
};

static inline bool ss_index_is_object(const struct ss_index *index, uint32_t slot) {
    return slot != 0 && slot <= index->slots_used && index->entries[slot].used && !index->entries[slot].dangling;
}

static inline uint32_t ss_index_entry_blocks(const struct entry *entry) {
    return ss_index_blocks(entry->length, 0) + entry->name_blocks;
}

static inline uint64_t ss_index_entry_bytes(const struct entry *entry) {
    return entry->device == MEMORY ? (uint64_t)entry->length + entry->extent
                                   : (uint64_t)ss_index_entry_blocks(entry) * BLOCK_SIZE;
}

/* ss_index_line_of() returns the number of the line where the search for a hash begins. */
static inline uint64_t ss_index_line_of(const struct ss_index *index, uint64_t hash) {
    return (uint64_t)(((unsigned __int128)hash * index->line_count) >> 64);
}

/* table.c */
uint64_t ss_index_hash(const struct ss_index *index, uint16_t tenant, const uint8_t *key);
uint32_t ss_index_search(const struct ss_index *index, uint64_t hash, uint16_t tenant, const uint8_t *key);
uint32_t ss_index_slot_allocate(struct ss_index *index, uint64_t hash, uint16_t tenant,
                                const uint8_t *key); /* 0: no slot */
void ss_index_prefetch(const struct ss_index *index, uint16_t tenant, const uint8_t *key);
void ss_index_slot_free(struct ss_index *index, uint32_t slot); /* also from the table; it must be in no list */

/* index.c */
enum ss_result ss_index_store(struct ss_index *index, uint64_t hash, const struct ss_index_record *record,
                              struct name *name, uint32_t accessed_s, uint32_t *slot); /* 'name' is the index's then */
bool ss_index_valid(const struct ss_index_record *record, uint32_t blocks);
void ss_index_forget(struct ss_index *index, uint32_t slot, bool remember);
void ss_index_count(struct ss_index *index, const struct entry *entry, int64_t sign); /* in all totals that it is in */

/* names.c */
uint64_t ss_index_name_records(const struct ss_index *index, const struct entry *entry);
enum ss_result ss_index_make_name(uint8_t flags, const uint8_t *text, uint32_t length, struct name **name);
void ss_index_swap_name(struct ss_index *index, uint32_t slot, struct name *name); /* of one that is not counted */
void ss_index_drop_name(struct ss_index *index, uint32_t slot); /* of an object that is not counted */
void ss_index_close_names(struct ss_index *index);
enum ss_result ss_index_take_name(struct ss_index *index, uint32_t slot); /* the replayed one, if it is this object's */
uint64_t *ss_index_replay_name(struct ss_index *index, uint8_t device, const struct ss_index_record *record,
                               struct ss_index_counts *counts, enum ss_result *result);

/* links.c */
void ss_index_parent_set(struct ss_index *index, uint32_t slot, const uint8_t *parent);
void ss_index_unlink(struct ss_index *index,
                     uint32_t slot); /* takes the object out of the tree, or makes it a dangling parent */
void ss_index_dangling_drop(struct ss_index *index, uint32_t max);
void ss_index_dangling_unblock(struct ss_index *index,
                               uint32_t slot); /* dangling parents from here upwards may have something to evict */
void ss_index_dangling_push(struct ss_index *index, uint32_t slot);

/* queues.c */
struct cell *ss_index_cell(const struct ss_index *index, uint16_t tenant, uint32_t device); /* NULL: none */
struct cell *ss_index_cell_make(struct ss_index *index, uint16_t tenant, uint32_t device);  /* NULL: no memory */
uint32_t ss_index_next_cell(const struct ss_index *index, uint32_t number, int32_t tenant); /* of one tenant, or all */
void ss_index_enqueue(struct ss_index *index, struct cell *cell, uint32_t slot, bool ghost);
void ss_index_dequeue(struct ss_index *index, struct cell *cell, uint32_t slot);
void ss_index_push(struct ss_index *index, struct list_ends *ends, uint32_t slot);
void ss_index_pull(struct ss_index *index, struct list_ends *ends, uint32_t slot);
bool ss_index_ghost_contains(const struct ss_index *index, uint64_t hash);
void ss_index_ghost_add(struct ss_index *index, uint64_t hash);

/* expiry.c */
uint64_t ss_index_expires_at(const struct ss_index *index, uint32_t slot);
void ss_index_set_expiry(struct ss_index *index, uint32_t slot, uint64_t expires_at_ms);
uint32_t ss_index_due(const struct ss_index *index, uint64_t now_ms, int32_t device, int32_t tenant);

/* superseded.c */
enum ss_result ss_index_superseded_add(struct ss_index *index, uint64_t hash, uint8_t device, uint16_t tenant,
                                       const uint8_t *key);
void ss_index_superseded_drop(struct ss_index *index, uint64_t hash, uint8_t device, uint16_t tenant,
                              const uint8_t *key);
void ss_index_superseded_clear(struct ss_index *index, int32_t tenant, int32_t device);
void ss_index_superseded_close(struct ss_index *index);

#endif /* SS_INDEX_INTERNAL_H */
