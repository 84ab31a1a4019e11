/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shadowserve_index.h - index of stored objects and allocator of free space: the tables of the storage node's pool
 *
 * A part of shadowserve.h, with the same rules; docs/design/architecture.md explains the design.
 */
#ifndef SHADOWSERVE_INDEX_H
#define SHADOWSERVE_INDEX_H

#include "shadowserve.h"

/* cffi:begin */
/* ---- Index of stored objects ----------------------------------------------------------------------------------- */

/*
 * One record of a device's log and snapshot (docs/reference/volume-format.md); ss_index_insert() and ss_index_read()
 * also use it to describe an object. Little-endian, 128 bytes, unused bytes are zeros.
 */
enum ss_index_record_kind {
    SS_INDEX_PUT = 1,
    SS_INDEX_REMOVE = 2, /* tenant and key */
    SS_INDEX_EXPIRE = 3, /* tenant, key, expires_at_ms */
    SS_INDEX_PIN = 4,    /* tenant, key, pinned_until_s */
    SS_INDEX_CLEAR = 5,  /* all objects of the tenant on this device; with SS_INDEX_EVERY_TENANT of all tenants */
    SS_INDEX_NAME = 6,   /* a part of a key's text, with another layout (docs/reference/volume-format.md) */
    SS_INDEX_TENANT = 7  /* a record of the volume; the index ignores it */
};
enum ss_index_flags { SS_INDEX_RECORD = 1, SS_INDEX_NAMED = 2, SS_INDEX_EVERY_TENANT = 0x80 };
struct ss_index_record {
    uint8_t kind;
    uint8_t flags; /* of the object; the index keeps them and counts SS_INDEX_RECORD */
    uint8_t device;
    uint8_t name_blocks; /* of a put: additional blocks of 4 KiB for a long name, up to 31 */
    uint16_t tenant;
    uint16_t reserved;
    uint32_t extent;         /* first 4 KiB block on the device; only in memory (device 255): bytes beside the value */
    uint32_t length;         /* bytes of the value; on the device a header of 2 KiB precedes it */
    uint32_t header_length;  /* bytes of the record's header in the value; under 2 MiB */
    uint32_t accessed_s;     /* since 1970 */
    uint32_t pinned_until_s; /* likewise; 0: not pinned */
    uint32_t generation;     /* grows with each put of the pool, and may wrap; the later put of two devices is valid */
    uint64_t expires_at_ms;  /* since 1970; 0: never */
    uint8_t key[32];
    uint8_t parent[32]; /* zeros: none */
    uint8_t padding[24];
};

enum ss_index_policy { SS_INDEX_LRU = 0, SS_INDEX_S3FIFO = 1, SS_INDEX_FREQUENCY = 2 };
struct ss_index_totals {
    uint64_t objects;
    uint64_t bytes; /* with headers, each object rounded up to 4 KiB; only in memory: length plus 'extent' */
    uint64_t records;
    uint64_t expiring;
    uint64_t name_records; /* number of records that the names take in a log or a snapshot */
};
/* Results of a replay of records. */
struct ss_index_counts {
    uint64_t applied;
    uint64_t ignored; /* records of other kinds, or of absent objects */
    uint64_t refused; /* records with an invalid field */
};

/* Position of an object. */
struct ss_index_place {
    uint32_t slot;
    uint32_t extent;
    uint32_t generation;
    uint32_t device;
};

struct ss_index;

/*
 * ss_index_open() reserves the addresses for 'objects_max' objects, 1 to 2^30; memory is allocated as objects are
 * inserted, and never moved. 'seed' is a secret, so that no client can choose keys that collide. Only one thread at a
 * time may call functions of an index. Apart from open, replayed and clear, a call's time depends only on the number of
 * objects that it names.
 */
SS_API enum ss_result ss_index_open(uint32_t objects_max, enum ss_index_policy policy, uint64_t seed,
                                    struct ss_index **index);
SS_API void ss_index_close(struct ss_index *index);

/*
 * ss_index_find() returns the object's slot, its number until it is removed; 0 if it is absent. This does not count as
 * a use.
 */
SS_API uint32_t ss_index_find(const struct ss_index *index, uint16_t tenant, const uint8_t *key);

/*
 * ss_index_find_many() finds 'count' keys of a tenant, 32 bytes each, without gaps, and returns the number of those
 * found. One call is enough for a whole prefix.
 */
SS_API size_t ss_index_find_many(const struct ss_index *index, uint16_t tenant, const uint8_t *keys, size_t count,
                                 uint32_t *slots);

/*
 * ss_index_insert() inserts an object, last used at 'now_s', and stores its slot; an object of the same tenant and key
 * is replaced, in its slot. An object with SS_INDEX_NAMED gets 'name', the text of its key, at most 64 KiB; with NULL
 * it keeps its present name. SS_NO_SPACE with 'objects_max' objects, SS_BAD_ARGUMENT for a record that is not valid in
 * a log, or for an invalid name.
 * A parent may be inserted after its children, or removed before them: the index keeps its place. It keeps at most
 * objects_max / 8 such places; beyond that, the children of the oldest have no parent. A parent that is its own
 * descendant is ignored.
 */
SS_API enum ss_result ss_index_insert(struct ss_index *index, const struct ss_index_record *record, const uint8_t *name,
                                      uint32_t name_length, uint32_t now_s, uint32_t *slot);

/* ss_index_read() describes the object as a PUT; SS_NOT_FOUND for a slot without one. */
SS_API enum ss_result ss_index_read(const struct ss_index *index, uint32_t slot, struct ss_index_record *record);
/*
 * ss_index_get() finds an object, describes it, and then counts a use of it, unless 'now_s' is 0. It returns its slot;
 * 0 if it is absent, and the record is then unchanged.
 */
SS_API uint32_t ss_index_get(struct ss_index *index, uint16_t tenant, const uint8_t *key, uint32_t now_s,
                             struct ss_index_record *record);

/*
 * ss_index_places() stores the positions of the leading chunks, of 'count' chunks of a tenant, in 'places', and counts
 * a use of each. It ends before the first chunk that is absent, has another length than 'lengths', is only in memory,
 * or has expired at 'now_ms'. Keys have 32 bytes each, without gaps; named objects are no chunks. One call is enough
 * for a whole prefix.
 */
SS_API size_t ss_index_places(struct ss_index *index, uint16_t tenant, const uint8_t *keys, const uint32_t *lengths,
                              size_t count, uint64_t now_ms, struct ss_index_place *places);

/*
 * ss_index_set_name() sets the text of the key, at most 64 KiB, of an object with SS_INDEX_NAMED. The index keeps it
 * until the object is removed, or an object without a name replaces it. ss_index_name() returns it and stores its
 * length; NULL if it has none. SS_NOT_FOUND for a slot without an object, SS_BAD_ARGUMENT for an object that is not
 * named.
 */
SS_API enum ss_result ss_index_set_name(struct ss_index *index, uint32_t slot, const uint8_t *text, uint32_t length);
SS_API const uint8_t *ss_index_name(const struct ss_index *index, uint32_t slot, uint32_t *length);

/*
 * ss_index_remove() removes an object; ss_index_evict() removes it, too, and adds its key to the ghost queue. These
 * functions, and those below, do nothing for a slot without an object.
 */
SS_API void ss_index_remove(struct ss_index *index, uint32_t slot);
SS_API void ss_index_evict(struct ss_index *index, uint32_t slot);
/* ss_index_clear() removes all objects of a tenant (-1: all) on a device (-1: all), and returns their number. */
SS_API uint64_t ss_index_clear(struct ss_index *index, int32_t tenant, int32_t device);
SS_API void ss_index_touch(struct ss_index *index, uint32_t slot, uint32_t now_s);
SS_API void ss_index_touch_each(struct ss_index *index, const uint32_t *slots, size_t count, uint32_t now_s);
SS_API enum ss_result ss_index_expire(struct ss_index *index, uint32_t slot, uint64_t expires_at_ms);
SS_API void ss_index_pin(struct ss_index *index, uint32_t slot, uint32_t until_s);
/* ss_index_resize() sets the length of the new value of an object only in memory; SS_NOT_FOUND for any other object. */
SS_API enum ss_result ss_index_resize(struct ss_index *index, uint32_t slot, uint32_t length);

/*
 * ss_index_victim() returns the next object to evict of a tenant (-1: all) on a device (-1: all), 0 for none. An
 * expired object is first (if it is among the first 64 expired ones), then the next object of the policy's queue; with
 * several queues, the object that was used least recently. An object with descendants is replaced by the one at the end
 * of its chain, which may be on another device: repeat the call until the device has room. Pinned objects are skipped,
 * and so are their ancestors while other objects exist.
 */
SS_API uint32_t ss_index_victim(struct ss_index *index, int32_t device, int32_t tenant, uint32_t now_s);

/*
 * The ghost queue: fingerprints of 16 bits of the last evicted keys (about 'objects_max' of them; one in ten thousand
 * is confused with another key). ss_index_ghost() returns whether the key is in it. For "admit at the second hit";
 * S3-FIFO also uses it for an evicted object that is inserted again.
 */
SS_API int ss_index_ghost(const struct ss_index *index, uint16_t tenant, const uint8_t *key);

/*
 * ss_index_next() returns the slot of the next object after 'slot' (0: the first); 0 after the last. It reads one cache
 * line for each free slot on the way, so it is slow in an index of millions of objects that was nearly emptied.
 */
SS_API uint32_t ss_index_next(const struct ss_index *index, uint32_t slot);

/*
 * ss_index_scan() stores the slots of at most 'max' objects of a tenant (-1: all), in an order that depends only on
 * their keys and the seed. It continues at '*cursor', 0 at first and again after the last object. It reads at most
 * 'lines_max' lines of the table, of about ten objects each, so it may store none. An object that stays during the scan
 * is stored exactly once. The cursor is a hash of the tenant's own key, or a fixed part of all hashes. It reveals
 * nothing about other tenants, but something about the seed, so keep it secret.
 */
SS_API size_t ss_index_scan(const struct ss_index *index, int32_t tenant, uint64_t *cursor, uint32_t *slots, size_t max,
                            size_t lines_max);

/* ss_index_expired() stores the slots of at most 'max' objects that have expired, and returns their number. */
SS_API size_t ss_index_expired(const struct ss_index *index, uint64_t now_ms, uint32_t *slots, size_t max);

/* ss_index_totals() sums up the objects of a tenant (-1: all) on a device (-1: all). */
SS_API void ss_index_totals(const struct ss_index *index, int32_t tenant, int32_t device,
                            struct ss_index_totals *totals);

/* ss_index_bytes() returns the bytes of a tenant's objects (-1: all), as ss_index_totals() does. */
SS_API uint64_t ss_index_bytes(const struct ss_index *index, int32_t tenant);

/* ss_index_memory() returns the total bytes of memory in use, by the index's own count. */
SS_API uint64_t ss_index_memory(const struct ss_index *index);

/* ss_index_blocks() returns the number of 4 KiB blocks of an object: ss_object_bytes(), in blocks. */
SS_API uint32_t ss_index_blocks(uint32_t length, uint32_t name_length);

/*
 * ss_index_replay() applies records of the log or the snapshot of 'device', which has 'blocks' blocks of 4 KiB, in
 * their order, and adds to '*counts'. It checks every field, and ignores the record's device. Records apply only to
 * objects on this device; a put is ignored if another device has a later put of its key (by generation). After the last
 * record of the last device ss_index_replayed() sorts the queues. SS_NO_SPACE if the index is full; the remaining
 * records are then not applied. The parts of a name follow each other; the name belongs to the object with its key, or
 * to the next put.
 */
SS_API enum ss_result ss_index_replay(struct ss_index *index, uint8_t device, uint32_t blocks,
                                      const struct ss_index_record *records, size_t count,
                                      struct ss_index_counts *counts);
SS_API enum ss_result ss_index_replayed(struct ss_index *index);

/*
 * ss_index_dump() stores PUT records of at most 'max' objects on 'device' (-1: all). It continues at '*cursor', 0 at
 * first and again after the last object. A call may store none. Objects that change between calls may be missing.
 */
SS_API size_t ss_index_dump(const struct ss_index *index, int32_t device, uint32_t *cursor,
                            struct ss_index_record *records, size_t max);

/*
 * ss_index_dump_names() stores the NAME records of the named objects among 'count' PUT records, and returns the number
 * of NAME records; it stores at most 'max'.
 */
SS_API size_t ss_index_dump_names(const struct ss_index *index, const struct ss_index_record *puts, size_t count,
                                  struct ss_index_record *records, size_t max);

/*
 * ss_index_purge() removes objects of 'device' and returns their number: SS_INDEX_UNPROVEN all objects that are not
 * records, SS_INDEX_NAMELESS named objects whose name is not in the log.
 */
enum ss_index_purge { SS_INDEX_UNPROVEN = 0, SS_INDEX_NAMELESS = 1 };
SS_API uint64_t ss_index_purge(struct ss_index *index, uint8_t device, enum ss_index_purge what);

/*
 * ss_index_superseded() stores a REMOVE record for each put that is the last record of its key in the log of 'device',
 * but that a later put of another device supersedes; '*cursor' as above. Append them to that log before the later
 * object is removed.
 */
SS_API size_t ss_index_superseded(const struct ss_index *index, uint8_t device, uint32_t *cursor,
                                  struct ss_index_record *records, size_t max);

struct ss_extents;
/*
 * ss_index_reserve() reserves the extents of all objects on 'device'. Of overlapping objects the latest put stays; the
 * others are removed, and '*dropped' counts them. For recovery: one call, in the order of the device.
 */
SS_API enum ss_result ss_index_reserve(struct ss_index *index, uint8_t device, struct ss_extents *extents,
                                       uint64_t *dropped);

/* ---- Extents ----------------------------------------------------------------------------------------------------- */

/*
 * ss_extents_open() creates an allocator of runs of blocks, all free: first fit in the order of addresses. Each call
 * takes O(log(free runs)); memory is 24 bytes for each free run, allocated on demand. From one thread at a time.
 */
SS_API enum ss_result ss_extents_open(uint32_t blocks, struct ss_extents **extents);
SS_API void ss_extents_close(struct ss_extents *extents);

/* ss_extents_allocate() returns the first of 'count' blocks, UINT32_MAX if no free run is long enough. */
SS_API uint32_t ss_extents_allocate(struct ss_extents *extents, uint32_t count);

/*
 * ss_extents_free() frees blocks, ss_extents_reserve() reserves specific blocks. SS_BAD_ARGUMENT, and nothing changes,
 * if a block is already free, already reserved, or does not exist; SS_NO_MEMORY likewise.
 */
SS_API enum ss_result ss_extents_free(struct ss_extents *extents, uint32_t first, uint32_t count);
SS_API enum ss_result ss_extents_reserve(struct ss_extents *extents, uint32_t first, uint32_t count);
SS_API uint32_t ss_extents_free_blocks(const struct ss_extents *extents);
/* cffi:end */

#endif /* SHADOWSERVE_INDEX_H */
