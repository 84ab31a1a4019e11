/* SPDX-License-Identifier: Apache-2.0 */
/*
 * superseded.c - puts in the log of one device that a later put on another device supersedes
 *
 * A power cut may leave two values of a key, each in the log of another device. The later one is valid. Before it is
 * removed, the other log needs a REMOVE record for the key: else the next replay restores the superseded value. There
 * are few of them: only puts that were in flight at the power cut.
 */
#include "index/internal.h"

#include <stdlib.h>

enum { ROOM_FIRST = 64, NO_PUT = 0 };

struct superseded {
    uint8_t key[KEY_SIZE];
    uint64_t hash;
    uint32_t next; /* in its chain, or of the free ones; from 1 */
    uint16_t tenant;
    uint8_t device;
    bool used;
};

struct ss_index_superseded {
    struct superseded *puts; /* from 1 */
    uint32_t *heads;         /* heads of the hash chains; their number is a power of two */
    uint32_t room;
    uint32_t used;
    uint32_t last; /* the highest that ever was */
    uint32_t free;
};

static uint32_t *head(const struct ss_index_superseded *table, uint64_t hash) {
    return &table->heads[hash & (table->room - 1)];
}

static bool is_of(const struct superseded *put, uint64_t hash, uint8_t device, uint16_t tenant, const uint8_t *key) {
    return put->hash == hash && put->device == device && put->tenant == tenant && memcmp(put->key, key, KEY_SIZE) == 0;
}

static bool grow(struct ss_index_superseded *table) {
    uint32_t room = table->room == 0 ? ROOM_FIRST : table->room * 2;
    struct superseded *puts = realloc(table->puts, (size_t)(room + 1) * sizeof *puts);
    if (puts == NULL) {
        return false;
    }
    table->puts = puts;
    uint32_t *heads = calloc(room, sizeof *heads);
    if (heads == NULL) {
        return false;
    }
    free(table->heads);
    table->heads = heads;
    table->room = room;
    for (uint32_t at = 1; at <= table->last; at++) {
        if (puts[at].used) {
            puts[at].next = *head(table, puts[at].hash);
            *head(table, puts[at].hash) = at;
        }
    }
    return true;
}

enum ss_result ss_index_superseded_add(struct ss_index *index, uint64_t hash, uint8_t device, uint16_t tenant,
                                       const uint8_t *key) {
    if (index->superseded == NULL) {
        index->superseded = calloc(1, sizeof *index->superseded);
        if (index->superseded == NULL) {
            return SS_NO_MEMORY;
        }
    }
    struct ss_index_superseded *table = index->superseded;
    ss_index_superseded_drop(index, hash, device, tenant, key);
    if (table->free == NO_PUT && table->last == table->room && !grow(table)) {
        return SS_NO_MEMORY;
    }
    uint32_t at = table->free;
    if (at != NO_PUT) {
        table->free = table->puts[at].next;
    } else {
        at = ++table->last;
    }
    struct superseded *put = &table->puts[at];
    *put = (struct superseded){.hash = hash, .tenant = tenant, .device = device, .used = true};
    memcpy(put->key, key, KEY_SIZE);
    put->next = *head(table, hash);
    *head(table, hash) = at;
    table->used++;
    return SS_OK;
}

static void drop(struct ss_index_superseded *table, uint32_t *link) {
    uint32_t at = *link;
    struct superseded *put = &table->puts[at];
    *link = put->next;
    put->used = false;
    put->next = table->free;
    table->free = at;
    table->used--;
}

void ss_index_superseded_drop(struct ss_index *index, uint64_t hash, uint8_t device, uint16_t tenant,
                              const uint8_t *key) {
    struct ss_index_superseded *table = index->superseded;
    if (table == NULL || table->used == 0) {
        return;
    }
    for (uint32_t *link = head(table, hash); *link != NO_PUT; link = &table->puts[*link].next) {
        if (is_of(&table->puts[*link], hash, device, tenant, key)) {
            drop(table, link);
            return;
        }
    }
}

void ss_index_superseded_clear(struct ss_index *index, int32_t tenant, int32_t device) {
    struct ss_index_superseded *table = index->superseded;
    if (table == NULL || table->used == 0) {
        return;
    }
    for (uint32_t chain = 0; chain < table->room; chain++) {
        for (uint32_t *link = &table->heads[chain]; *link != NO_PUT;) {
            const struct superseded *put = &table->puts[*link];
            if ((tenant < 0 || put->tenant == tenant) && (device < 0 || put->device == device)) {
                drop(table, link);
            } else {
                link = &table->puts[*link].next;
            }
        }
    }
}

size_t ss_index_superseded(const struct ss_index *index, uint8_t device, uint32_t *cursor,
                           struct ss_index_record *records, size_t max) {
    const struct ss_index_superseded *table = index->superseded;
    uint32_t last = table == NULL ? 0 : table->last;
    size_t found = 0;
    while (found < max && *cursor < last) {
        const struct superseded *put = &table->puts[++*cursor];
        if (put->used && put->device == device) {
            records[found] = (struct ss_index_record){.kind = SS_INDEX_REMOVE, .tenant = put->tenant};
            memcpy(records[found++].key, put->key, KEY_SIZE);
        }
    }
    if (*cursor >= last) {
        *cursor = 0;
    }
    return found;
}

void ss_index_superseded_close(struct ss_index *index) {
    if (index->superseded != NULL) {
        free(index->superseded->puts);
        free(index->superseded->heads);
        free(index->superseded);
    }
}
