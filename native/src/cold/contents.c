/* SPDX-License-Identifier: Apache-2.0 */
/* contents.c - checks what describes objects of a bucket: entries and footers, alone or in an index object */
#include "cold/blake2b.h"
#include "shadowserve_cold.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum {
    KEY_BYTES = 32,
    ENTRY_BYTES = 48,  /* key, offset (u64), length (u32), length of its header (u32) */
    FOOTER_BYTES = 40, /* magic, entries (u32), bytes of the tenant's name (u32), bytes of the object (u64), checksum */
    RECORDS_MAX = 4096,
    TENANT_LENGTH_MAX = 128,
    MAGIC_BYTES = 8,
    INDEX_ENTRY_BYTES = 8 /* hour of its last use (u32), bytes of its footer (u32) */
};

static uint32_t u32_at(const uint8_t *bytes) {
    uint32_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

static uint64_t u64_at(const uint8_t *bytes) {
    uint64_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

/* The partition is a part of the key's last eight bytes, those of its segment (shadowserve/placement.py). */
static uint16_t partition_of(const uint8_t *key) {
    return (uint16_t)((key[24] & 0x0F) << 8 | key[25]);
}

static int compare_keys(const void *one, const void *other) {
    return memcmp(*(const uint8_t *const *)one, *(const uint8_t *const *)other, KEY_BYTES);
}

static bool has_duplicates(const uint8_t *entries, uint32_t records) {
    const uint8_t *keys[RECORDS_MAX];
    for (uint32_t at = 0; at < records; at++) {
        keys[at] = entries + (size_t)at * ENTRY_BYTES;
    }
    qsort(keys, records, sizeof *keys, compare_keys);
    for (uint32_t at = 1; at < records; at++) {
        if (memcmp(keys[at - 1], keys[at], KEY_BYTES) == 0) {
            return true;
        }
    }
    return false;
}

static void name_digest(const uint8_t *entries, struct ss_cold_object *object) {
    struct ss_blake2b hash;
    ss_blake2b_begin(&hash, sizeof object->digest);
    ss_blake2b_add(&hash, &object->tenant_length, sizeof object->tenant_length);
    ss_blake2b_add(&hash, entries + (size_t)object->records * ENTRY_BYTES, object->tenant_length);
    for (uint32_t at = 0; at < object->records; at++) {
        ss_blake2b_add(&hash, entries + (size_t)at * ENTRY_BYTES, KEY_BYTES);
    }
    ss_blake2b_end(&hash, object->digest);
}

/* Checks the entries; stores the partition and the longest record. */
static const char *read_entries(const uint8_t *entries, uint64_t records_bytes, struct ss_cold_object *object) {
    uint64_t end = 0;
    object->partition = partition_of(entries);
    for (uint32_t at = 0; at < object->records; at++) {
        const uint8_t *entry = entries + (size_t)at * ENTRY_BYTES;
        uint32_t length = u32_at(entry + 40), header_bytes = u32_at(entry + 44);
        if (u64_at(entry + KEY_BYTES) != end || header_bytes == 0 || header_bytes > length) {
            return "its entries do not say where its records begin, without gaps";
        }
        if (partition_of(entry) != object->partition) {
            return "its records are of several partitions";
        }
        end += length;
        object->longest = length > object->longest ? length : object->longest;
    }
    if (end != records_bytes || has_duplicates(entries, object->records)) {
        return "its entries do not cover its records, each once";
    }
    return NULL;
}

const char *ss_cold_read_footer(const uint8_t *footer, size_t size, struct ss_cold_object *object) {
    memset(object, 0, sizeof *object);
    if (size < FOOTER_BYTES) {
        return "its footer is too short";
    }
    const uint8_t *fields = footer + size - FOOTER_BYTES;
    uint64_t object_size = u64_at(fields + 16);
    if (memcmp(fields, "SSCOLD01", MAGIC_BYTES) != 0) {
        return "it does not end in a footer of ShadowServe";
    }
    object->records = u32_at(fields + 8);
    object->tenant_length = u32_at(fields + 12);
    if (object->records == 0 || object->records > RECORDS_MAX || object->tenant_length > TENANT_LENGTH_MAX) {
        return "its footer names too many records, none, or too long a tenant";
    }
    if (size != (size_t)object->records * ENTRY_BYTES + object->tenant_length + FOOTER_BYTES) {
        return "its entries do not fit its footer";
    }
    if (object_size > UINT32_MAX || object_size <= size) {
        return "its records do not fit its size";
    }
    object->size = (uint32_t)object_size;
    const uint8_t *tenant = footer + (size_t)object->records * ENTRY_BYTES;
    for (uint32_t at = 0; at < object->tenant_length; at++) {
        if (tenant[at] < '!' || tenant[at] > '~') {
            return "no tenant has the name in its footer";
        }
    }
    const char *fault = read_entries(footer, object_size - size, object);
    if (fault == NULL) {
        name_digest(footer, object);
    }
    return fault;
}

const char *ss_cold_read_index(const uint8_t *bytes, size_t size, uint16_t partition, struct ss_cold_object *objects,
                               size_t max, size_t *count) {
    size_t at = MAGIC_BYTES;
    *count = 0;
    if (size < MAGIC_BYTES || size > UINT32_MAX || memcmp(bytes, "SSINDX01", MAGIC_BYTES) != 0) {
        return "it is of another version";
    }
    while (at < size) {
        if (size - at < INDEX_ENTRY_BYTES) {
            return "it ends within an entry";
        }
        uint32_t used_h = u32_at(bytes + at), footer_bytes = u32_at(bytes + at + 4);
        at += INDEX_ENTRY_BYTES;
        if (footer_bytes > size - at) {
            return "it ends within a footer";
        }
        if (*count == max) {
            return "it has too many entries";
        }
        struct ss_cold_object *object = &objects[*count];
        const char *fault = ss_cold_read_footer(bytes + at, footer_bytes, object);
        if (fault != NULL) {
            return fault;
        }
        if (object->partition != partition) {
            return "it has an entry of another partition";
        }
        object->begin = (uint32_t)at;
        object->used_h = used_h;
        at += footer_bytes;
        ++*count;
    }
    return NULL;
}
