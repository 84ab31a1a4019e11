/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rivals.c - puts that their device's log still has, of keys that another device has put later
 *
 * A power cut may leave two values of a key, each in the log of another device. The later one counts; but the earlier
 * one's log has to be told so before the later one goes, or the next replay would have the earlier one back. There are
 * few of them: what was in flight when the power went.
 */
#include "index/internal.h"

#include <stdlib.h>

enum { RIVALS_FIRST = 64, NO_RIVAL = 0 };

struct rival {
    uint8_t key[KEY_SIZE];
    uint64_t hash;
    uint32_t next; /* in its chain, or of the free ones; from 1 */
    uint16_t tenant;
    uint8_t device;
    bool used;
};

struct ss_index_rivals {
    struct rival *rivals; /* from 1 */
    uint32_t *heads;      /* as many as there is room for: a power of two */
    uint32_t room;
    uint32_t used;
    uint32_t last; /* the highest that ever was */
    uint32_t free;
};

static uint32_t *head(const struct ss_index_rivals *table, uint64_t hash) {
    return &table->heads[hash & (table->room - 1)];
}

static bool is_of(const struct rival *rival, uint64_t hash, uint8_t device, uint16_t tenant, const uint8_t *key) {
    return rival->hash == hash && rival->device == device && rival->tenant == tenant &&
           memcmp(rival->key, key, KEY_SIZE) == 0;
}

static bool grow(struct ss_index_rivals *table) {
    uint32_t room = table->room == 0 ? RIVALS_FIRST : table->room * 2;
    struct rival *rivals = realloc(table->rivals, (size_t)(room + 1) * sizeof *rivals);
    if (rivals == NULL) {
        return false;
    }
    table->rivals = rivals;
    uint32_t *heads = calloc(room, sizeof *heads);
    if (heads == NULL) {
        return false;
    }
    free(table->heads);
    table->heads = heads;
    table->room = room;
    for (uint32_t at = 1; at <= table->last; at++) {
        if (rivals[at].used) {
            rivals[at].next = *head(table, rivals[at].hash);
            *head(table, rivals[at].hash) = at;
        }
    }
    return true;
}

enum ss_result ss_index_rival_add(struct ss_index *index, uint64_t hash, uint8_t device, uint16_t tenant,
                                  const uint8_t *key) {
    if (index->rivals == NULL) {
        index->rivals = calloc(1, sizeof *index->rivals);
        if (index->rivals == NULL) {
            return SS_NO_MEMORY;
        }
    }
    struct ss_index_rivals *table = index->rivals;
    ss_index_rival_drop(index, hash, device, tenant, key);
    if (table->free == NO_RIVAL && table->last == table->room && !grow(table)) {
        return SS_NO_MEMORY;
    }
    uint32_t at = table->free;
    if (at != NO_RIVAL) {
        table->free = table->rivals[at].next;
    } else {
        at = ++table->last;
    }
    struct rival *rival = &table->rivals[at];
    *rival = (struct rival){.hash = hash, .tenant = tenant, .device = device, .used = true};
    memcpy(rival->key, key, KEY_SIZE);
    rival->next = *head(table, hash);
    *head(table, hash) = at;
    table->used++;
    return SS_OK;
}

static void drop(struct ss_index_rivals *table, uint32_t *link) {
    uint32_t at = *link;
    struct rival *rival = &table->rivals[at];
    *link = rival->next;
    rival->used = false;
    rival->next = table->free;
    table->free = at;
    table->used--;
}

void ss_index_rival_drop(struct ss_index *index, uint64_t hash, uint8_t device, uint16_t tenant, const uint8_t *key) {
    struct ss_index_rivals *table = index->rivals;
    if (table == NULL || table->used == 0) {
        return;
    }
    for (uint32_t *link = head(table, hash); *link != NO_RIVAL; link = &table->rivals[*link].next) {
        if (is_of(&table->rivals[*link], hash, device, tenant, key)) {
            drop(table, link);
            return;
        }
    }
}

void ss_index_rivals_clear(struct ss_index *index, int32_t tenant, int32_t device) {
    struct ss_index_rivals *table = index->rivals;
    if (table == NULL || table->used == 0) {
        return;
    }
    for (uint32_t chain = 0; chain < table->room; chain++) {
        for (uint32_t *link = &table->heads[chain]; *link != NO_RIVAL;) {
            const struct rival *rival = &table->rivals[*link];
            if ((tenant < 0 || rival->tenant == tenant) && (device < 0 || rival->device == device)) {
                drop(table, link);
            } else {
                link = &table->rivals[*link].next;
            }
        }
    }
}

size_t ss_index_rivals(const struct ss_index *index, uint8_t device, uint32_t *cursor, struct ss_index_record *records,
                       size_t max) {
    const struct ss_index_rivals *table = index->rivals;
    uint32_t last = table == NULL ? 0 : table->last;
    size_t found = 0;
    while (found < max && *cursor < last) {
        const struct rival *rival = &table->rivals[++*cursor];
        if (rival->used && rival->device == device) {
            records[found] = (struct ss_index_record){.kind = SS_INDEX_REMOVE, .tenant = rival->tenant};
            memcpy(records[found++].key, rival->key, KEY_SIZE);
        }
    }
    if (*cursor >= last) {
        *cursor = 0;
    }
    return found;
}

void ss_index_rivals_close(struct ss_index *index) {
    if (index->rivals != NULL) {
        free(index->rivals->rivals);
        free(index->rivals->heads);
        free(index->rivals);
    }
}
