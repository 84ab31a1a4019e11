/* SPDX-License-Identifier: Apache-2.0 */
/*
 * table.c - known objects of a bucket and their records, in little memory
 *
 * Objects and records are in arrays that grow by halves, and have numbers from 1; free ones are in lists. Both are
 * found by chains whose heads grow one by one (linear hashing: Litwin, 1980), so there are as many heads as numbers in
 * use, and no insertion takes longer than another. The partitions and states are in an array of their own, which a
 * selection reads.
 */
#include "index/hash.h"
#include "shadowserve_cold.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

enum {
    KEY_BYTES = 32,
    ENTRY_BYTES = 48,
    DIGEST_BYTES = 20,
    PARTITIONS = 4096,
    STATE_SHIFT = 12, /* of a place: a partition, and the state above it */
    ROOM_MIN = 16,
    SELECTED_AT_ONCE = 65536,
    LANES = 64
};

struct record {
    uint32_t hash[2]; /* of the tenant and the key, low half first; 64 bits would be aligned to 8 bytes */
    uint32_t offset;
    uint32_t header_bytes;
    uint32_t object;
    uint32_t next;   /* in its chain, or of the free ones */
    uint32_t behind; /* the object's next record; 0: none */
};

struct object {
    double written_s;
    uint8_t digest[DIGEST_BYTES];
    uint32_t tenant;
    uint32_t size;
    uint32_t end; /* of its last record */
    uint32_t seen;
    uint32_t used_h;
    uint32_t first; /* record */
    uint32_t next;  /* in its chain, or of the free ones */
};

/* Numbers by hash. 'count' is that of heads, from mask / 2 + 1 up to mask + 1. */
struct chains {
    uint32_t *heads;
    uint32_t room;
    uint32_t count;
    uint32_t mask;
};

/* Numbers of one kind: 'used' is the highest that ever was. */
struct numbers {
    uint32_t room;
    uint32_t used;
    uint32_t free;
    uint32_t count;
};

struct ss_cold_table {
    pthread_mutex_t mutex;
    struct ss_hash_seed seed;
    struct object *objects;
    uint16_t *places;
    struct record *records;
    struct numbers of_objects;
    struct numbers of_records;
    struct chains by_digest;
    struct chains by_key;
};

/* ---- Chains ------------------------------------------------------------------------------------------------------ */

static uint64_t hash_of_digest(const struct ss_cold_table *table, const uint8_t *digest) {
    uint8_t key[KEY_BYTES] = {0};
    memcpy(key, digest, DIGEST_BYTES);
    return ss_hash_key(&table->seed, UINT64_MAX, key);
}

static uint64_t hash_of_record(const struct record *record) {
    return record->hash[0] | (uint64_t)record->hash[1] << 32;
}

static uint64_t hash_of(const struct ss_cold_table *table, const struct chains *chains, uint32_t number) {
    return chains == &table->by_key ? hash_of_record(&table->records[number])
                                    : hash_of_digest(table, table->objects[number].digest);
}

static uint32_t *next_of(struct ss_cold_table *table, const struct chains *chains, uint32_t number) {
    return chains == &table->by_key ? &table->records[number].next : &table->objects[number].next;
}

static uint32_t *head_of(const struct chains *chains, uint64_t hash) {
    uint32_t at = (uint32_t)hash & chains->mask;
    return &chains->heads[at < chains->count ? at : at & (chains->mask >> 1)];
}

/* Makes one more head, and moves to it what belongs there. */
static void split(struct ss_cold_table *table, struct chains *chains) {
    uint32_t made = chains->count;
    if (made > chains->mask) {
        chains->mask = chains->mask << 1 | 1;
    }
    uint32_t *link = &chains->heads[made & (chains->mask >> 1)], *end = &chains->heads[made];
    chains->count++;
    while (*link != 0) {
        uint32_t number = *link, *next = next_of(table, chains, number);
        if (((uint32_t)hash_of(table, chains, number) & chains->mask) == made) {
            *link = *next;
            *end = number;
            end = next;
        } else {
            link = next;
        }
    }
    *end = 0;
}

static void chain(struct ss_cold_table *table, struct chains *chains, uint64_t hash, uint32_t number) {
    uint32_t *head = head_of(chains, hash);
    *next_of(table, chains, number) = *head;
    *head = number;
}

static void unchain(struct ss_cold_table *table, struct chains *chains, uint64_t hash, uint32_t number) {
    uint32_t *link = head_of(chains, hash);
    while (*link != number) {
        link = next_of(table, chains, *link);
    }
    *link = *next_of(table, chains, number);
}

/* ---- Room -------------------------------------------------------------------------------------------------------- */

static bool grow(void **array, size_t count, size_t size) {
    void *grown = realloc(*array, count * size);
    if (grown != NULL) {
        *array = grown;
    }
    return grown != NULL;
}

/* Returns the room for 'wanted' more numbers; 0: they would be too many. */
static uint32_t room_for(const struct numbers *numbers, uint32_t wanted) {
    uint64_t needed = (uint64_t)numbers->count + wanted;
    uint64_t room = numbers->room;
    while (room < needed) {
        room += room / 2;
    }
    return room < UINT32_MAX ? (uint32_t)room : 0;
}

static bool heads_grow(struct chains *chains, uint32_t room) {
    if (chains->room < room) {
        if (!grow((void **)&chains->heads, room, sizeof *chains->heads)) {
            return false;
        }
        chains->room = room;
    }
    return true;
}

/* Makes room for one more object with some records: what is inserted then needs no memory. */
static bool make_room(struct ss_cold_table *table, uint32_t records) {
    uint32_t room = room_for(&table->of_objects, 1);
    if (room == 0 || !heads_grow(&table->by_digest, room)) {
        return false;
    }
    if (room > table->of_objects.room) {
        if (!grow((void **)&table->objects, (size_t)room + 1, sizeof *table->objects) ||
            !grow((void **)&table->places, (size_t)room + 1, sizeof *table->places)) {
            return false;
        }
        table->of_objects.room = room;
    }
    room = room_for(&table->of_records, records);
    if (room == 0 || !heads_grow(&table->by_key, room)) {
        return false;
    }
    if (room > table->of_records.room) {
        if (!grow((void **)&table->records, (size_t)room + 1, sizeof *table->records)) {
            return false;
        }
        table->of_records.room = room;
    }
    return true;
}

/* Returns a number, for which there is room, in its chain. */
static uint32_t take(struct ss_cold_table *table, struct numbers *numbers, struct chains *chains) {
    uint32_t number = numbers->free;
    if (number != 0) {
        numbers->free = *next_of(table, chains, number);
    } else {
        number = ++numbers->used;
    }
    if (++numbers->count > chains->count) {
        split(table, chains);
    }
    return number;
}

static void give_back(struct ss_cold_table *table, struct numbers *numbers, struct chains *chains, uint32_t number) {
    *next_of(table, chains, number) = numbers->free;
    numbers->free = number;
    numbers->count--;
}

static bool open_chains(struct chains *chains) {
    *chains = (struct chains){.heads = calloc(ROOM_MIN, sizeof(uint32_t)), .room = ROOM_MIN, .count = 1, .mask = 0};
    return chains->heads != NULL;
}

enum ss_result ss_cold_open(uint64_t seed, struct ss_cold_table **table) {
    struct ss_cold_table *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return SS_NO_MEMORY;
    }
    pthread_mutex_init(&made->mutex, NULL);
    made->seed = ss_hash_seed_of(seed);
    made->of_objects.room = made->of_records.room = ROOM_MIN;
    made->objects = calloc(ROOM_MIN + 1, sizeof *made->objects);
    made->places = calloc(ROOM_MIN + 1, sizeof *made->places);
    made->records = calloc(ROOM_MIN + 1, sizeof *made->records);
    bool is_whole = open_chains(&made->by_digest) && open_chains(&made->by_key);
    if (!is_whole || made->objects == NULL || made->places == NULL || made->records == NULL) {
        ss_cold_close(made);
        return SS_NO_MEMORY;
    }
    *table = made;
    return SS_OK;
}

void ss_cold_close(struct ss_cold_table *table) {
    pthread_mutex_destroy(&table->mutex);
    free(table->objects);
    free(table->places);
    free(table->records);
    free(table->by_digest.heads);
    free(table->by_key.heads);
    free(table);
}

/* ---- Objects ----------------------------------------------------------------------------------------------------- */

static enum ss_cold_state state_of(const struct ss_cold_table *table, uint32_t number) {
    return (enum ss_cold_state)(table->places[number] >> STATE_SHIFT);
}

static bool is_object(const struct ss_cold_table *table, uint32_t number) {
    return number != 0 && number <= table->of_objects.used && state_of(table, number) != SS_COLD_FREE;
}

static void set_state(struct ss_cold_table *table, uint32_t number, enum ss_cold_state state) {
    table->places[number] = (uint16_t)((table->places[number] & (PARTITIONS - 1)) | state << STATE_SHIFT);
}

static void describe(const struct ss_cold_table *table, uint32_t number, struct ss_cold_row *row) {
    const struct object *object = &table->objects[number];
    *row = (struct ss_cold_row){
        .written_s = object->written_s,
        .number = number,
        .tenant = object->tenant,
        .size = object->size,
        .seen = object->seen,
        .used_h = object->used_h,
        .partition = table->places[number] & (PARTITIONS - 1),
        .state = (uint8_t)state_of(table, number),
    };
    memcpy(row->digest, object->digest, DIGEST_BYTES);
}

static uint32_t search(const struct ss_cold_table *table, const uint8_t *digest) {
    uint32_t number = *head_of(&table->by_digest, hash_of_digest(table, digest));
    while (number != 0 && memcmp(table->objects[number].digest, digest, DIGEST_BYTES) != 0) {
        number = table->objects[number].next;
    }
    return number;
}

/* Returns whether a known object, other than the record's own, has it too. */
static bool is_elsewhere(const struct ss_cold_table *table, const struct record *record) {
    for (uint32_t at = *head_of(&table->by_key, hash_of_record(record)); at != 0; at = table->records[at].next) {
        const struct record *other = &table->records[at];
        if (hash_of_record(other) == hash_of_record(record) && other->object != record->object &&
            state_of(table, other->object) == SS_COLD_KNOWN) {
            return true;
        }
    }
    return false;
}

/* Returns the number of an object's records that no other known object has. */
static uint32_t alone(const struct ss_cold_table *table, uint32_t number) {
    uint32_t count = 0;
    for (uint32_t at = table->objects[number].first; at != 0; at = table->records[at].behind) {
        count += !is_elsewhere(table, &table->records[at]);
    }
    return count;
}

static void insert_records(struct ss_cold_table *table, uint32_t number, const uint8_t *entries, uint32_t count) {
    uint32_t first = 0, end = 0;
    for (uint32_t at = count; at-- != 0;) {
        const uint8_t *entry = entries + (size_t)at * ENTRY_BYTES;
        uint32_t taken = take(table, &table->of_records, &table->by_key), length;
        struct record *record = &table->records[taken];
        uint64_t hash = ss_hash_key(&table->seed, table->objects[number].tenant, entry);
        memcpy(&record->offset, entry + KEY_BYTES, sizeof record->offset); /* an object is smaller than 4 GiB */
        memcpy(&length, entry + KEY_BYTES + 8, sizeof length);
        memcpy(&record->header_bytes, entry + KEY_BYTES + 12, sizeof record->header_bytes);
        record->hash[0] = (uint32_t)hash;
        record->hash[1] = (uint32_t)(hash >> 32);
        record->object = number;
        record->behind = first;
        chain(table, &table->by_key, hash, taken);
        first = taken;
        end = at == count - 1 ? record->offset + length : end;
    }
    table->objects[number].first = first;
    table->objects[number].end = end;
}

static uint32_t insert(struct ss_cold_table *table, uint32_t tenant, const uint8_t *bytes,
                       const struct ss_cold_object *from, double written_s, uint32_t seen) {
    uint32_t number = take(table, &table->of_objects, &table->by_digest);
    struct object *object = &table->objects[number];
    *object = (struct object){
        .written_s = written_s, .tenant = tenant, .size = from->size, .seen = seen, .used_h = from->used_h};
    memcpy(object->digest, from->digest, DIGEST_BYTES);
    chain(table, &table->by_digest, hash_of_digest(table, from->digest), number);
    table->places[number] = from->partition & (PARTITIONS - 1);
    insert_records(table, number, bytes + from->begin, from->records);
    return number;
}

enum ss_result ss_cold_insert(struct ss_cold_table *table, uint32_t tenant, const uint8_t *bytes,
                              const struct ss_cold_object *objects, const uint32_t *positions, size_t count,
                              const double *written_s, uint32_t seen, enum ss_cold_state state, uint32_t *numbers,
                              struct ss_cold_sums *sums) {
    enum ss_result result = SS_OK;
    for (size_t at = 0; at < count; at++) {
        const struct ss_cold_object *object = &objects[positions[at]];
        numbers[at] = 0;
        if (result != SS_OK) {
            continue;
        }
        pthread_mutex_lock(&table->mutex);
        if (!make_room(table, object->records)) {
            result = SS_NO_MEMORY;
        } else if (search(table, object->digest) == 0) {
            numbers[at] = insert(table, tenant, bytes, object, written_s[at], seen);
            set_state(table, numbers[at], state);
            if (state == SS_COLD_KNOWN) {
                sums->objects++;
                sums->records += alone(table, numbers[at]);
                sums->bytes += object->size;
            }
        }
        pthread_mutex_unlock(&table->mutex);
    }
    return result;
}

void ss_cold_remove(struct ss_cold_table *table, uint32_t number) {
    pthread_mutex_lock(&table->mutex);
    if (is_object(table, number)) {
        struct object *object = &table->objects[number];
        for (uint32_t at = object->first, behind; at != 0; at = behind) {
            behind = table->records[at].behind;
            unchain(table, &table->by_key, hash_of_record(&table->records[at]), at);
            give_back(table, &table->of_records, &table->by_key, at);
        }
        unchain(table, &table->by_digest, hash_of_digest(table, object->digest), number);
        give_back(table, &table->of_objects, &table->by_digest, number);
        set_state(table, number, SS_COLD_FREE);
    }
    pthread_mutex_unlock(&table->mutex);
}

uint32_t ss_cold_number(struct ss_cold_table *table, const uint8_t *digest) {
    pthread_mutex_lock(&table->mutex);
    uint32_t number = search(table, digest);
    pthread_mutex_unlock(&table->mutex);
    return number;
}

uint64_t ss_cold_see(struct ss_cold_table *table, const uint8_t *digest, uint32_t seen, double written_s) {
    pthread_mutex_lock(&table->mutex);
    uint32_t number = search(table, digest);
    uint64_t state = number != 0 ? state_of(table, number) : SS_COLD_FREE;
    if (number != 0) {
        table->objects[number].seen = seen;
        table->objects[number].written_s = state == SS_COLD_KNOWN ? written_s : table->objects[number].written_s;
    }
    pthread_mutex_unlock(&table->mutex);
    return number | state << 32;
}

enum ss_result ss_cold_row(struct ss_cold_table *table, uint32_t number, struct ss_cold_row *row) {
    pthread_mutex_lock(&table->mutex);
    bool is_there = is_object(table, number);
    if (is_there) {
        describe(table, number, row);
    }
    pthread_mutex_unlock(&table->mutex);
    return is_there ? SS_OK : SS_NOT_FOUND;
}

uint32_t ss_cold_records(struct ss_cold_table *table, uint32_t number) {
    uint32_t count = 0;
    pthread_mutex_lock(&table->mutex);
    if (is_object(table, number)) {
        for (uint32_t at = table->objects[number].first; at != 0; at = table->records[at].behind) {
            count++;
        }
    }
    pthread_mutex_unlock(&table->mutex);
    return count;
}

void ss_cold_use(struct ss_cold_table *table, uint32_t number, uint32_t used_h) {
    pthread_mutex_lock(&table->mutex);
    if (is_object(table, number)) {
        table->objects[number].used_h = used_h;
    }
    pthread_mutex_unlock(&table->mutex);
}

uint32_t ss_cold_set_state(struct ss_cold_table *table, uint32_t number, enum ss_cold_state state,
                           struct ss_cold_row *before) {
    uint32_t count = 0;
    memset(before, 0, sizeof *before);
    pthread_mutex_lock(&table->mutex);
    if (is_object(table, number)) {
        describe(table, number, before);
        set_state(table, number, state);
        count = alone(table, number);
    }
    pthread_mutex_unlock(&table->mutex);
    return count;
}

/* ---- Records ----------------------------------------------------------------------------------------------------- */

static uint32_t next_holder(const struct ss_cold_table *table, uint32_t at, uint64_t hash) {
    while (at != 0 && hash_of_record(&table->records[at]) != hash) {
        at = table->records[at].next;
    }
    return at;
}

enum ss_result ss_cold_find(struct ss_cold_table *table, uint32_t tenant, const uint8_t *key,
                            struct ss_cold_found *found) {
    uint64_t hash = ss_hash_key(&table->seed, tenant, key);
    pthread_mutex_lock(&table->mutex);
    uint32_t at = next_holder(table, *head_of(&table->by_key, hash), hash);
    while (at != 0 && state_of(table, table->records[at].object) != SS_COLD_KNOWN) {
        at = next_holder(table, table->records[at].next, hash);
    }
    if (at != 0) {
        const struct record *record = &table->records[at];
        const struct object *object = &table->objects[record->object];
        uint32_t end = record->behind != 0 ? table->records[record->behind].offset : object->end;
        *found = (struct ss_cold_found){
            .number = record->object,
            .offset = record->offset,
            .length = end - record->offset,
            .header_bytes = record->header_bytes,
            .tenant = object->tenant,
            .partition = table->places[record->object] & (PARTITIONS - 1),
        };
        memcpy(found->digest, object->digest, DIGEST_BYTES);
    }
    pthread_mutex_unlock(&table->mutex);
    return at != 0 ? SS_OK : SS_NOT_FOUND;
}

size_t ss_cold_holders(struct ss_cold_table *table, uint32_t tenant, const uint8_t *key, uint32_t *numbers,
                       size_t max) {
    uint64_t hash = ss_hash_key(&table->seed, tenant, key);
    size_t count = 0;
    pthread_mutex_lock(&table->mutex);
    for (uint32_t at = next_holder(table, *head_of(&table->by_key, hash), hash); at != 0;
         at = next_holder(table, table->records[at].next, hash)) {
        if (count < max) {
            numbers[count] = table->records[at].object;
        }
        count++;
    }
    pthread_mutex_unlock(&table->mutex);
    return count;
}

/* ---- Selection --------------------------------------------------------------------------------------------------- */

/* Returns whether one of LANES places has the partition; one pass without branches, as most of them have not. */
static bool has_partition(const uint16_t *places, uint16_t partition) {
    uint16_t same = 0;
    for (int at = 0; at < LANES; at++) {
        same |= (places[at] & (PARTITIONS - 1)) == partition;
    }
    return same != 0;
}

static bool is_selected(const struct ss_cold_table *table, uint32_t number, const struct ss_cold_filter *filter,
                        const uint8_t *included) {
    enum ss_cold_state state = state_of(table, number);
    const struct object *object = &table->objects[number];
    return state != SS_COLD_FREE && (state == SS_COLD_KNOWN || filter->is_known == 0) &&
           (included == NULL || included[table->places[number] & (PARTITIONS - 1)]) &&
           (filter->tenant < 0 || object->tenant == filter->tenant) && object->seen < filter->seen_before;
}

size_t ss_cold_select(struct ss_cold_table *table, const struct ss_cold_filter *filter, uint32_t *cursor,
                      struct ss_cold_row *rows, size_t max) {
    uint8_t included[PARTITIONS] = {0};
    size_t count = 0;
    for (uint32_t at = 0; at < filter->partition_count; at++) {
        included[filter->partitions[at] & (PARTITIONS - 1)] = 1;
    }
    const uint8_t *any = filter->partition_count != 0 ? included : NULL;
    pthread_mutex_lock(&table->mutex);
    uint64_t number = (uint64_t)*cursor + 1, used = table->of_objects.used, end = number + SELECTED_AT_ONCE;
    end = end < used + 1 ? end : used + 1;
    uint64_t looked_at = number; /* up to here one by one */
    while (number < end && count < max) {
        if (filter->partition_count == 1 && number >= looked_at && number + LANES <= used + 1) {
            if (!has_partition(&table->places[number], filter->partitions[0] & (PARTITIONS - 1))) {
                number += LANES;
                continue;
            }
            looked_at = number + LANES;
        }
        if (is_selected(table, (uint32_t)number, filter, any)) {
            describe(table, (uint32_t)number, &rows[count++]);
        }
        number++;
    }
    *cursor = number <= used ? (uint32_t)(number - 1) : 0;
    pthread_mutex_unlock(&table->mutex);
    return count;
}

uint64_t ss_cold_memory(struct ss_cold_table *table) {
    pthread_mutex_lock(&table->mutex);
    uint64_t size = (uint64_t)table->of_objects.used * (sizeof *table->objects + sizeof *table->places) +
                    (uint64_t)table->of_records.used * sizeof *table->records +
                    ((uint64_t)table->by_digest.count + table->by_key.count) * sizeof(uint32_t);
    pthread_mutex_unlock(&table->mutex);
    return size;
}
