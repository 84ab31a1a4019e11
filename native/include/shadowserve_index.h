/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shadowserve_index.h - what is stored, and where there is room: the tables of the storage node's pool
 *
 * A part of shadowserve.h, with the same rules; docs/design/architecture.md says why they are as they are.
 */
#ifndef SHADOWSERVE_INDEX_H
#define SHADOWSERVE_INDEX_H

#include "shadowserve.h"

/* cffi:begin */
/* ---- Index of what is stored ----------------------------------------------------------------------------------- */

/*
 * One record of a device's log and snapshot (docs/reference/volume-format.md), and what ss_index_insert() and
 * ss_index_read() speak of an object in. Little-endian, 128 bytes, the rest zeros.
 */
enum ss_index_record_kind {
    SS_INDEX_PUT = 1,
    SS_INDEX_REMOVE = 2, /* tenant and key */
    SS_INDEX_EXPIRE = 3, /* tenant, key, expires_at_ms */
    SS_INDEX_PIN = 4,    /* tenant, key, pinned_until_s */
    SS_INDEX_CLEAR = 5,  /* all of the tenant's on this device; with SS_INDEX_EVERY_TENANT everyone's */
    SS_INDEX_NAME = 6,   /* a piece of a key's text, laid out otherwise (docs/reference/volume-format.md) */
    SS_INDEX_TENANT = 7  /* the volume's own: the index passes over it */
};
enum ss_index_flags { SS_INDEX_RECORD = 1, SS_INDEX_NAMED = 2, SS_INDEX_EVERY_TENANT = 0x80 };
struct ss_index_record {
    uint8_t kind;
    uint8_t flags; /* of the object; the index keeps them and counts SS_INDEX_RECORD */
    uint8_t device;
    uint8_t name_blocks; /* of a put: by how many blocks of 4 KiB a long name makes the object larger, up to 31 */
    uint16_t tenant;
    uint16_t reserved;
    uint32_t extent;         /* first 4 KiB block on the device; in memory alone (device 255) bytes beside the value */
    uint32_t length;         /* bytes of the value; on the device there are 2 KiB of header before it */
    uint32_t header_length;  /* of these the record's head; under 2 MiB */
    uint32_t accessed_s;     /* since 1970 */
    uint32_t pinned_until_s; /* likewise; 0: not pinned */
    uint32_t generation; /* grows with each put of the pool, and may wrap: of two devices' puts the later one counts */
    uint64_t expires_at_ms; /* since 1970; 0: never */
    uint8_t key[32];
    uint8_t parent[32]; /* zeros: none */
    uint8_t padding[24];
};

enum ss_index_policy { SS_INDEX_LRU = 0, SS_INDEX_S3FIFO = 1, SS_INDEX_FREQUENCY = 2 };
struct ss_index_totals {
    uint64_t objects;
    uint64_t bytes; /* with headers, rounded up to blocks of 4 KiB each; in memory alone length and 'extent' */
    uint64_t records;
    uint64_t expiring;
    uint64_t name_records; /* that their names take in a log or a snapshot */
};
/* What became of records that were replayed. */
struct ss_index_counts {
    uint64_t applied;
    uint64_t ignored; /* of other kinds, or about objects that are not here (any more) */
    uint64_t refused; /* some field is impossible */
};

/* Where an object lies. */
struct ss_index_place {
    uint32_t slot;
    uint32_t extent;
    uint32_t generation;
    uint32_t device;
};

struct ss_index;

/*
 * ss_index_open() reserves the addresses for 'objects_max' objects, 1 to 2^30; memory is taken as they come, and
 * nothing is ever moved. 'seed' is a secret, so that no client can choose keys that collide. All calls for an index
 * come from one thread at a time, and none but open, replayed and clear is longer than what it does to the objects that
 * it names.
 */
SS_API enum ss_result ss_index_open(uint32_t objects_max, enum ss_index_policy policy, uint64_t seed,
                                    struct ss_index **index);
SS_API void ss_index_close(struct ss_index *index);

/* ss_index_find() returns the object's slot, its number until it is removed; 0 where it is absent. It is no use of it.
 */
SS_API uint32_t ss_index_find(const struct ss_index *index, uint16_t tenant, const uint8_t *key);

/*
 * ss_index_find_many() does the same for 'count' keys of a tenant, 32 bytes each, one behind the other, and returns how
 * many are there. One call for a whole prefix.
 */
SS_API size_t ss_index_find_many(const struct ss_index *index, uint16_t tenant, const uint8_t *keys, size_t count,
                                 uint32_t *slots);

/*
 * ss_index_insert() puts an object in, as used last at 'now_s', and stores its slot; one of the same tenant and key is
 * replaced, in its slot. An object with SS_INDEX_NAMED is given 'name', its key's text, of at most 64 KiB; with NULL it
 * keeps the one that it has. SS_NO_SPACE with 'objects_max' objects, SS_BAD_ARGUMENT for a record that no log may hold
 * or a name that cannot be kept.
 * A parent may come later than its children, or be removed before them: its place is kept (for objects_max / 8 such
 * parents and no more: the children of the oldest then have none). A parent that is its own descendant is none.
 */
SS_API enum ss_result ss_index_insert(struct ss_index *index, const struct ss_index_record *record, const uint8_t *name,
                                      uint32_t name_length, uint32_t now_s, uint32_t *slot);

/* ss_index_read() describes the object as a PUT; SS_NOT_FOUND for a slot without one. */
SS_API enum ss_result ss_index_read(const struct ss_index *index, uint32_t slot, struct ss_index_record *record);
/*
 * ss_index_get() finds an object, describes it, and then counts a use of it, unless 'now_s' is 0. It returns its slot;
 * 0 where it is absent, and then the record is not touched.
 */
SS_API uint32_t ss_index_get(struct ss_index *index, uint16_t tenant, const uint8_t *key, uint32_t now_s,
                             struct ss_index_record *record);

/*
 * ss_index_places() says where the leading ones of 'count' chunks of a tenant lie on devices, and counts a use of each.
 * Those are before the first that is absent, of another length than 'lengths' has, in memory alone, or over at
 * 'now_ms', and are stored in 'places'. Keys have 32 bytes each, one behind the other; that of a name is no chunk's.
 * One call for a whole prefix.
 */
SS_API size_t ss_index_places(struct ss_index *index, uint16_t tenant, const uint8_t *keys, const uint32_t *lengths,
                              size_t count, uint64_t now_ms, struct ss_index_place *places);

/*
 * ss_index_set_name() gives an object put with SS_INDEX_NAMED its key's text, at most 64 KiB, which
 * the index keeps until the object goes or another without a name replaces it. ss_index_name() returns it and stores
 * its length; NULL where there is none. SS_NOT_FOUND for a slot without an object, SS_BAD_ARGUMENT for one that is not
 * named.
 */
SS_API enum ss_result ss_index_set_name(struct ss_index *index, uint32_t slot, const uint8_t *text, uint32_t length);
SS_API const uint8_t *ss_index_name(const struct ss_index *index, uint32_t slot, uint32_t *length);

/*
 * ss_index_remove() forgets an object, ss_index_evict() too, but remembers in the ghost queue that it was there. Of the
 * rest, too, each does nothing for a slot without an object.
 */
SS_API void ss_index_remove(struct ss_index *index, uint32_t slot);
SS_API void ss_index_evict(struct ss_index *index, uint32_t slot);
/* ss_index_clear() forgets all objects of a tenant (-1: of each one) on a device (-1: on each one); returns how many.
 */
SS_API uint64_t ss_index_clear(struct ss_index *index, int32_t tenant, int32_t device);
SS_API void ss_index_touch(struct ss_index *index, uint32_t slot, uint32_t now_s);
SS_API void ss_index_touch_each(struct ss_index *index, const uint32_t *slots, size_t count, uint32_t now_s);
SS_API enum ss_result ss_index_expire(struct ss_index *index, uint32_t slot, uint64_t expires_at_ms);
SS_API void ss_index_pin(struct ss_index *index, uint32_t slot, uint32_t until_s);
/* ss_index_resize() says how long the new value of an object in memory alone is; SS_NOT_FOUND for any other. */
SS_API enum ss_result ss_index_resize(struct ss_index *index, uint32_t slot, uint32_t length);

/*
 * ss_index_victim() returns what to evict next of a tenant's (-1: anyone's) on a device (-1: on any), 0 for nothing. An
 * object that has expired comes first (if it is among 64 of those). Then it is the next one of the policy's queue; of
 * several queues, the one whose next was used least recently; and instead of an object with descendants the one at the
 * end of the chain, which may lie on another device: ask again until there is room. Pinned objects are passed over, and
 * what they descend from as long as there is anything else.
 */
SS_API uint32_t ss_index_victim(struct ss_index *index, int32_t device, int32_t tenant, uint32_t now_s);

/*
 * The ghost queue: fingerprints of 16 bits of the last keys (about 'objects_max' of them; one in ten thousand is taken
 * for another). ss_index_ghost() returns whether the key is in it. For "admit at the second hit"; S3-FIFO has its own
 * use for it when an object comes back that was evicted.
 */
SS_API int ss_index_ghost(const struct ss_index *index, uint16_t tenant, const uint8_t *key);

/*
 * ss_index_next() returns the object's slot that comes after 'slot' (0: the first); 0 after the last. It reads its
 * way past free slots, a line of memory each, so that it is slow where an index of millions was nearly emptied.
 */
SS_API uint32_t ss_index_next(const struct ss_index *index, uint32_t slot);

/*
 * ss_index_scan() stores the slots of at most 'max' objects of a tenant (-1: of anyone), in an order that is made by
 * their keys and the seed alone. It goes on at '*cursor', 0 at first, which is 0 again behind the last one; it looks at
 * 'lines_max' lines of the table at most, of some ten objects each, and so may store none. Whatever comes and goes
 * meanwhile, an object that stays is stored exactly once. The cursor is a hash of the tenant's own key, or a fixed part
 * of all hashes: it tells nothing of others, but something of the seed, so show nobody.
 */
SS_API size_t ss_index_scan(const struct ss_index *index, int32_t tenant, uint64_t *cursor, uint32_t *slots, size_t max,
                            size_t lines_max);

/* ss_index_expired() stores the slots of at most 'max' objects that have expired, and returns how many. */
SS_API size_t ss_index_expired(const struct ss_index *index, uint64_t now_ms, uint32_t *slots, size_t max);

/* ss_index_totals() sums up a tenant's objects (-1: everyone's) on a device (-1: on all). */
SS_API void ss_index_totals(const struct ss_index *index, int32_t tenant, int32_t device,
                            struct ss_index_totals *totals);

/* ss_index_bytes() returns the bytes of a tenant's objects (-1: everyone's), as ss_index_totals() does. */
SS_API uint64_t ss_index_bytes(const struct ss_index *index, int32_t tenant);

/* ss_index_memory() returns the bytes of memory in use, all in, as far as the index knows without asking the kernel. */
SS_API uint64_t ss_index_memory(const struct ss_index *index);

/* ss_index_blocks() returns how many blocks of 4 KiB an object takes: ss_object_bytes(), in blocks. */
SS_API uint32_t ss_index_blocks(uint32_t length, uint32_t name_length);

/*
 * ss_index_replay() applies records of the log or the snapshot of 'device', which has 'blocks' blocks of 4 KiB, in
 * their order, and adds to '*counts'. Every field is checked; the record's own device is not looked at. Records are
 * about objects on this device only; a put whose key another device has put later (by generation) is ignored. After the
 * last record of the last device ss_index_replayed() puts the queues in order. SS_NO_SPACE, with the rest not applied,
 * when there are too many objects. The pieces of a name follow each other; it belongs to the object that has its key,
 * or to the put that comes next.
 */
SS_API enum ss_result ss_index_replay(struct ss_index *index, uint8_t device, uint32_t blocks,
                                      const struct ss_index_record *records, size_t count,
                                      struct ss_index_counts *counts);
SS_API enum ss_result ss_index_replayed(struct ss_index *index);

/*
 * ss_index_dump() stores PUT records of at most 'max' objects on 'device' (-1: on any), going on at '*cursor', 0 at
 * first; it is 0 again after the last. A call may store none. What changes between calls may be stored or not.
 */
SS_API size_t ss_index_dump(const struct ss_index *index, int32_t device, uint32_t *cursor,
                            struct ss_index_record *records, size_t max);

/*
 * ss_index_dump_names() stores the NAME records of those of 'count' objects, as PUTs, that have names, and returns how
 * many these are; none beyond 'max' is stored.
 */
SS_API size_t ss_index_dump_names(const struct ss_index *index, const struct ss_index_record *puts, size_t count,
                                  struct ss_index_record *records, size_t max);

/*
 * ss_index_purge() removes objects of 'device' and returns how many: SS_INDEX_UNPROVEN all objects that are not
 * records, SS_INDEX_NAMELESS objects whose key is a text that the log does not have.
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
 * ss_index_reserve() reserves the extents of all objects on 'device'. Of objects that overlap the later put stays; the
 * others are removed, which '*dropped' counts. For recovery: one call, in the order of the device.
 */
SS_API enum ss_result ss_index_reserve(struct ss_index *index, uint8_t device, struct ss_extents *extents,
                                       uint64_t *dropped);

/* ---- Extents ----------------------------------------------------------------------------------------------------- */

/*
 * ss_extents_open() makes an allocator of runs of blocks, all free: first fit in the order of addresses. Each call
 * takes O(log(free runs)); memory is 24 bytes for each free run, taken as they come. From one thread at a time.
 */
SS_API enum ss_result ss_extents_open(uint32_t blocks, struct ss_extents **extents);
SS_API void ss_extents_close(struct ss_extents *extents);

/* ss_extents_allocate() returns the first of 'count' blocks, UINT32_MAX where no free run is that long. */
SS_API uint32_t ss_extents_allocate(struct ss_extents *extents, uint32_t count);

/*
 * ss_extents_free() gives blocks back, ss_extents_reserve() takes given ones. SS_BAD_ARGUMENT, and nothing changes,
 * where one of them is free already, is taken already, or does not exist; SS_NO_MEMORY likewise.
 */
SS_API enum ss_result ss_extents_free(struct ss_extents *extents, uint32_t first, uint32_t count);
SS_API enum ss_result ss_extents_reserve(struct ss_extents *extents, uint32_t first, uint32_t count);
SS_API uint32_t ss_extents_free_blocks(const struct ss_extents *extents);
SS_API uint32_t ss_extents_largest(const struct ss_extents *extents);
/* ss_extents_runs() returns how many runs are free. */
SS_API uint32_t ss_extents_runs(const struct ss_extents *extents);
/* cffi:end */

#endif /* SHADOWSERVE_INDEX_H */
