/* SPDX-License-Identifier: Apache-2.0 */
/* names.c - the texts of named keys: in memory, in a replay, and in snapshots */
#include "index/internal.h"

#include <stdlib.h>

/* A piece of a text (docs/reference/volume-format.md). */
struct name_record {
    uint8_t kind;
    uint8_t zeros[3];
    uint16_t tenant;
    uint16_t piece;
    uint32_t start;
    uint32_t length;
    uint8_t key[KEY_SIZE];
    uint8_t text[NAME_PIECE_SIZE];
};

_Static_assert(sizeof(struct name_record) == sizeof(struct ss_index_record), "both are records");

static uint32_t least(uint32_t one, uint32_t other) {
    return one < other ? one : other;
}

static uint32_t pieces_of(uint32_t length) {
    return length == 0 ? 1 : (length + NAME_PIECE_SIZE - 1) / NAME_PIECE_SIZE;
}

/* Bytes that malloc() uses for a text: in steps of 16 bytes, with 8 bytes of overhead. */
static uint64_t size_of(uint32_t length) {
    return (sizeof(struct name) + length + 8 + 15) / 16 * 16;
}

/* ---- Kept ---------------------------------------------------------------------------------------------------- */

static const struct name *name_of(const struct ss_index *index, const struct entry *entry) {
    return (entry->flags & SS_INDEX_NAMED) != 0 ? index->names[entry - index->entries] : NULL;
}

uint64_t ss_index_name_records(const struct ss_index *index, const struct entry *entry) {
    const struct name *name = name_of(index, entry);
    return name != NULL ? pieces_of(name->length) : 0;
}

void ss_index_drop_name(struct ss_index *index, uint32_t slot) {
    if (name_of(index, &index->entries[slot]) != NULL) {
        index->names_size -= size_of(index->names[slot]->length);
        free(index->names[slot]);
        index->names[slot] = NULL;
    }
}

void ss_index_close_names(struct ss_index *index) {
    free(index->replayed_name);
    for (uint32_t slot = 1; slot <= index->slots_used && index->names_size != 0; slot++) {
        ss_index_drop_name(index, slot);
    }
}

enum ss_result ss_index_make_name(uint8_t flags, const uint8_t *text, uint32_t length, struct name **name) {
    if ((flags & SS_INDEX_NAMED) == 0 || length > NAME_SIZE_MAX) {
        return SS_BAD_ARGUMENT;
    }
    *name = malloc(sizeof **name + length);
    if (*name == NULL) {
        return SS_NO_MEMORY;
    }
    (*name)->length = length;
    memcpy((*name)->text, text, length);
    return SS_OK;
}

void ss_index_swap_name(struct ss_index *index, uint32_t slot, struct name *name) {
    ss_index_drop_name(index, slot);
    index->names[slot] = name;
    index->names_size += size_of(name->length);
}

enum ss_result ss_index_set_name(struct ss_index *index, uint32_t slot, const uint8_t *text, uint32_t length) {
    if (!ss_index_is_object(index, slot)) {
        return SS_NOT_FOUND;
    }
    const struct entry *entry = &index->entries[slot];
    struct name *name;
    enum ss_result result = ss_index_make_name(entry->flags, text, length, &name);
    if (result == SS_OK) {
        ss_index_count(index, entry, -1);
        ss_index_swap_name(index, slot, name);
        ss_index_count(index, entry, 1);
    }
    return result;
}

const uint8_t *ss_index_name(const struct ss_index *index, uint32_t slot, uint32_t *length) {
    const struct name *name = ss_index_is_object(index, slot) ? name_of(index, &index->entries[slot]) : NULL;
    *length = name != NULL ? name->length : 0;
    return name != NULL ? name->text : NULL;
}

/* ---- Replay -------------------------------------------------------------------------------------------------- */

enum ss_result ss_index_take_name(struct ss_index *index, uint32_t slot) {
    const struct replayed_name *name = index->replayed_name;
    const struct entry *entry = &index->entries[slot];
    if (name == NULL || name->filled != name->length || name->device != entry->device ||
        name->tenant != entry->tenant || memcmp(name->key, entry->key, KEY_SIZE) != 0) {
        return SS_OK;
    }
    return ss_index_set_name(index, slot, name->text, name->length);
}

/* begin() allocates memory for a text, and drops the previous one, complete or not. */
static struct replayed_name *begin(struct ss_index *index, uint8_t device, const struct name_record *piece) {
    struct replayed_name *name = index->replayed_name;
    if (name == NULL && (name = malloc(sizeof *name)) == NULL) {
        return NULL;
    }
    index->replayed_name = name;
    memcpy(name->key, piece->key, KEY_SIZE);
    name->tenant = piece->tenant;
    name->device = device;
    name->length = piece->length;
    name->filled = 0;
    return name;
}

static bool is_next(const struct replayed_name *name, uint8_t device, const struct name_record *piece) {
    return name != NULL && name->device == device && name->tenant == piece->tenant && name->length == piece->length &&
           name->filled == piece->start && memcmp(name->key, piece->key, KEY_SIZE) == 0;
}

uint64_t *ss_index_replay_name(struct ss_index *index, uint8_t device, const struct ss_index_record *record,
                               struct ss_index_counts *counts, enum ss_result *result) {
    struct name_record piece;
    memcpy(&piece, record, sizeof piece);
    if (piece.length > NAME_SIZE_MAX || piece.start % NAME_PIECE_SIZE != 0 ||
        (piece.start > 0 && piece.start >= piece.length) ||
        piece.piece != least(NAME_PIECE_SIZE, piece.length - piece.start)) {
        return &counts->refused;
    }
    struct replayed_name *name = index->replayed_name;
    if (piece.start == 0) {
        name = begin(index, device, &piece);
        if (name == NULL) {
            *result = SS_NO_MEMORY;
            return &counts->refused;
        }
    } else if (!is_next(name, device, &piece)) {
        return &counts->refused;
    }
    memcpy(name->text + name->filled, piece.text, piece.piece);
    name->filled += piece.piece;
    uint32_t slot = name->filled == name->length ? ss_index_find(index, name->tenant, name->key) : 0;
    if (slot != 0 && (index->entries[slot].flags & SS_INDEX_NAMED) != 0) {
        *result = ss_index_take_name(index, slot);
    }
    return &counts->applied;
}

/* ---- Snapshots ----------------------------------------------------------------------------------------------- */

size_t ss_index_dump_names(const struct ss_index *index, const struct ss_index_record *puts, size_t count,
                           struct ss_index_record *records, size_t max) {
    size_t found = 0;
    for (size_t at = 0; at < count; at++) {
        uint32_t length, slot = ss_index_find(index, puts[at].tenant, puts[at].key);
        const uint8_t *text = ss_index_name(index, slot, &length);
        for (uint32_t number = 0; text != NULL && number < pieces_of(length); number++) {
            struct name_record piece = {.kind = SS_INDEX_NAME, .tenant = puts[at].tenant, .length = length};
            piece.start = number * NAME_PIECE_SIZE;
            piece.piece = (uint16_t)least(NAME_PIECE_SIZE, length - piece.start);
            memcpy(piece.key, puts[at].key, KEY_SIZE);
            memcpy(piece.text, text + piece.start, piece.piece);
            if (found < max) {
                memcpy(&records[found], &piece, sizeof piece);
            }
            found++;
        }
    }
    return found;
}
