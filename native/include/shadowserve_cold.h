/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shadowserve_cold.h - objects of a bucket: the checks of what describes them, and the table of those that are known
 *
 * A part of shadowserve.h, with the same rules. shadowserve/pool/cold/layout.py and index_objects.py have the formats.
 */
#ifndef SHADOWSERVE_COLD_H
#define SHADOWSERVE_COLD_H

#include "shadowserve.h"

/* cffi:begin */
/* ---- Contents of a bucket's objects ------------------------------------------------------------------------------ */

/* An object by its entries and its footer. 48 bytes. */
struct ss_cold_object {
    uint32_t size;          /* bytes of the object */
    uint32_t begin;         /* where its first entry is in the bytes that were read */
    uint32_t records;       /* entries of 48 bytes each; the tenant's name is behind them */
    uint32_t tenant_length; /* bytes of that name */
    uint32_t used_h;        /* last use by an index object, in hours since 1970 */
    uint32_t longest;       /* bytes of the longest record */
    uint16_t partition;     /* of the key space, under 4096 */
    uint16_t reserved;
    uint8_t digest[20]; /* of its name: BLAKE2b of the tenant's name and the keys */
};

/*
 * ss_cold_read_footer() checks the entries and the footer of an object, but not their checksum, and describes it.
 * ss_cold_read_index() does so for all objects of an index object of a partition, of at most 4 GiB; its name has the
 * digest of its bytes, which the caller checks. Each object takes 96 bytes at least. Both return NULL for sound bytes,
 * else what is wrong; '*object', or the first 'max' objects, are then partly written.
 */
SS_API const char *ss_cold_read_footer(const uint8_t *footer, size_t size, struct ss_cold_object *object);
SS_API const char *ss_cold_read_index(const uint8_t *bytes, size_t size, uint16_t partition,
                                      struct ss_cold_object *objects, size_t max, size_t *count);

/* ---- Table of known objects -------------------------------------------------------------------------------------- */

enum ss_cold_state { SS_COLD_FREE = 0, SS_COLD_KNOWN = 1, SS_COLD_HIDDEN = 2 };

/* What the table has of an object. */
struct ss_cold_row {
    double written_s;
    uint32_t number; /* from 1, until the object is removed */
    uint32_t tenant;
    uint32_t size;
    uint32_t seen; /* the last list with it */
    uint32_t used_h;
    uint16_t partition;
    uint8_t state;
    uint8_t reserved;
    uint8_t digest[20];
    uint32_t padding;
};
struct ss_cold_found {
    uint32_t number;
    uint32_t offset;
    uint32_t length;
    uint32_t header_bytes;
    uint32_t tenant;
    uint16_t partition;
    uint16_t reserved;
    uint8_t digest[20];
};
struct ss_cold_sums {
    uint64_t objects;
    uint64_t records; /* a record of several objects counts once */
    uint64_t bytes;
};
/* Which objects to select: those for which all of this holds. */
struct ss_cold_filter {
    const uint16_t *partitions;
    uint32_t partition_count; /* 0: any */
    int64_t tenant;           /* -1: any */
    uint64_t seen_before;     /* UINT64_MAX: any */
    uint32_t is_known;        /* 0: any state but SS_COLD_FREE */
};

struct ss_cold_table;

/*
 * ss_cold_open() makes an empty table; 'seed' is a secret, so that no client can choose keys that collide. Any thread
 * may call the functions below at any time. Each holds the table for a time that depends on one object's records only,
 * or, to select, on 65,536 objects. An object needs 62 bytes, and each of its records 32.
 *
 * Keys of records are not kept. Of two with the same tenant and the same hash of 64 bits one is taken for the other,
 * which the check of the record finds.
 */
SS_API enum ss_result ss_cold_open(uint64_t seed, struct ss_cold_table **table);
SS_API void ss_cold_close(struct ss_cold_table *table);

/*
 * ss_cold_insert() inserts 'count' objects of a tenant, those with these 'positions' in 'objects', as
 * ss_cold_read_...() has described 'bytes'. It stores the number of each; 0 for an object that the table has already.
 * It adds to '*sums' what is known now and was not before. SS_NO_MEMORY: the numbers of the remaining objects are 0.
 */
SS_API enum ss_result ss_cold_insert(struct ss_cold_table *table, uint32_t tenant, const uint8_t *bytes,
                                     const struct ss_cold_object *objects, const uint32_t *positions, size_t count,
                                     const double *written_s, uint32_t seen, enum ss_cold_state state,
                                     uint32_t *numbers, struct ss_cold_sums *sums);

/* ss_cold_remove() forgets an object; it does nothing for a number without one, as all functions below. */
SS_API void ss_cold_remove(struct ss_cold_table *table, uint32_t number);

/* ss_cold_number() returns the number of the object with a name's digest of 20 bytes; 0: none. */
SS_API uint32_t ss_cold_number(struct ss_cold_table *table, const uint8_t *digest);

/*
 * ss_cold_see() notes that list 'seen' has an object, and if it is known, when that was written. It returns its number,
 * plus its state times 2^32; 0: it has none.
 */
SS_API uint64_t ss_cold_see(struct ss_cold_table *table, const uint8_t *digest, uint32_t seen, double written_s);

/* ss_cold_row() describes an object; SS_NOT_FOUND for a number without one. */
SS_API enum ss_result ss_cold_row(struct ss_cold_table *table, uint32_t number, struct ss_cold_row *row);

/* ss_cold_records() returns the number of an object's records. */
SS_API uint32_t ss_cold_records(struct ss_cold_table *table, uint32_t number);

/* ss_cold_use() notes the hour in which an object was used. */
SS_API void ss_cold_use(struct ss_cold_table *table, uint32_t number, uint32_t used_h);

/*
 * ss_cold_set_state() makes an object known or hidden, and describes how it was before. It returns the number of its
 * records that no other known object has.
 */
SS_API uint32_t ss_cold_set_state(struct ss_cold_table *table, uint32_t number, enum ss_cold_state state,
                                  struct ss_cold_row *before);

/* ss_cold_find() finds a record, by its key of 32 bytes, in a known object; SS_NOT_FOUND. */
SS_API enum ss_result ss_cold_find(struct ss_cold_table *table, uint32_t tenant, const uint8_t *key,
                                   struct ss_cold_found *found);

/* ss_cold_holders() stores the numbers of at most 'max' objects with a record, and returns the number of all. */
SS_API size_t ss_cold_holders(struct ss_cold_table *table, uint32_t tenant, const uint8_t *key, uint32_t *numbers,
                              size_t max);

/*
 * ss_cold_select() stores at most 'max' rows of objects, in the order of their numbers. It continues at '*cursor', 0 at
 * first and again at the end. A call may store none.
 */
SS_API size_t ss_cold_select(struct ss_cold_table *table, const struct ss_cold_filter *filter, uint32_t *cursor,
                             struct ss_cold_row *rows, size_t max);

/* ss_cold_memory() returns the bytes of memory that objects and records take, by the table's own count. */
SS_API uint64_t ss_cold_memory(struct ss_cold_table *table);
/* cffi:end */

#endif /* SHADOWSERVE_COLD_H */
