/* SPDX-License-Identifier: Apache-2.0 */
/*
 * object.c - the header in front of every object on a device: sealing and checking
 *
 * All numbers are little-endian. The value begins in the middle of a page, where sending it is cheapest
 * (shadowserve/pool/buffers.py). The header uses this space for the checksums of units: parts of the value that can be
 * read and checked alone. Bytes from a device are untrusted until their checksums match. The fields are validated even
 * then, since a CRC detects corruption, but no attack.
 */
#include "shadowserve_block.h"

#include <string.h>

#define HEADER_BYTES SS_OBJECT_HEADER_BYTES
#define ALIGNMENT 4096u
#define UNIT_BYTES_MIN 65536u
#define UNITS_MAX 448u
#define NAME_BYTES_MAX 65536u
#define VERSION 1u

enum {
    AT_MAGIC = 0,
    AT_VERSION = 8,
    AT_CHECKSUM = 12, /* CRC-32 of the whole header, with zeros here */
    AT_TENANT = 16,
    AT_FLAGS = 18,
    AT_UNIT = 20,
    AT_LENGTH = 24,
    AT_HEAD_LENGTH = 28,
    AT_KEY = 32,
    AT_GENERATION = 64,
    AT_NAME_LENGTH = 72,
    AT_NAME_CHECKSUM = 76,
    AT_UNIT_CHECKSUMS = 256 /* one for each unit; zeros from AT_NAME_CHECKSUM + 4 and behind the last */
};

static const uint8_t magic[8] = {'S', 'S', 'O', 'B', 'J', 'E', 'C', 'T'};
static const uint8_t zeros[4];

static void put_number(uint8_t *target, uint64_t value, int bytes) {
    for (int index = 0; index < bytes; index++) {
        target[index] = (uint8_t)(value >> (8 * index));
    }
}

static uint64_t get_number(const uint8_t *source, int bytes) {
    uint64_t value = 0;
    for (int index = 0; index < bytes; index++) {
        value |= (uint64_t)source[index] << (8 * index);
    }
    return value;
}

uint64_t ss_object_bytes(uint32_t length, uint32_t name_length) {
    uint64_t bytes = (uint64_t)HEADER_BYTES + length + name_length;
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

uint32_t ss_object_unit(uint32_t length) {
    uint32_t unit = UNIT_BYTES_MIN;
    while ((uint64_t)unit * UNITS_MAX < length) {
        unit *= 2;
    }
    return unit;
}

static uint32_t unit_count(uint32_t length, uint32_t unit) {
    return (uint32_t)(((uint64_t)length + unit - 1) / unit);
}

/* Bytes of unit 'index': all but the last have 'unit'. */
static uint32_t unit_bytes(uint32_t length, uint32_t unit, uint32_t index) {
    uint64_t left = length - (uint64_t)index * unit;
    return left < unit ? (uint32_t)left : unit;
}

static uint32_t header_checksum(const uint8_t *header) {
    uint32_t crc = ss_crc32(0, header, AT_CHECKSUM);
    crc = ss_crc32(crc, zeros, sizeof zeros);
    return ss_crc32(crc, header + AT_CHECKSUM + 4, HEADER_BYTES - AT_CHECKSUM - 4);
}

enum ss_result ss_object_seal(void *object, uint64_t size, const struct ss_object_fields *fields) {
    uint8_t *header = object;
    uint64_t bytes = ss_object_bytes(fields->length, fields->name_length);
    uint64_t used = (uint64_t)HEADER_BYTES + fields->length + fields->name_length;

    if (size < bytes || fields->header_length > fields->length || fields->name_length > NAME_BYTES_MAX) {
        return SS_BAD_ARGUMENT;
    }
    const uint8_t *value = header + HEADER_BYTES, *name = value + fields->length;
    memset(header, 0, HEADER_BYTES);
    memset(header + used, 0, (size_t)(bytes - used));
    memcpy(header + AT_MAGIC, magic, sizeof magic);
    uint32_t unit = ss_object_unit(fields->length), count = unit_count(fields->length, unit);
    put_number(header + AT_VERSION, VERSION, 4);
    put_number(header + AT_TENANT, fields->tenant, 2);
    put_number(header + AT_FLAGS, fields->flags, 2);
    put_number(header + AT_UNIT, unit, 4);
    put_number(header + AT_LENGTH, fields->length, 4);
    put_number(header + AT_HEAD_LENGTH, fields->header_length, 4);
    memcpy(header + AT_KEY, fields->key, sizeof fields->key);
    put_number(header + AT_GENERATION, fields->generation, 8);
    put_number(header + AT_NAME_LENGTH, fields->name_length, 4);
    put_number(header + AT_NAME_CHECKSUM, ss_crc32(0, name, fields->name_length), 4);
    for (uint32_t index = 0; index < count; index++) {
        uint32_t crc = ss_crc32(0, value + (size_t)index * unit, unit_bytes(fields->length, unit, index));
        put_number(header + AT_UNIT_CHECKSUMS + (size_t)4 * index, crc, 4);
    }
    put_number(header + AT_CHECKSUM, header_checksum(header), 4);
    return SS_OK;
}

enum ss_result ss_object_read(const void *object, struct ss_object_fields *fields) {
    const uint8_t *header = object;

    if (memcmp(header + AT_MAGIC, magic, sizeof magic) != 0 || get_number(header + AT_VERSION, 4) != VERSION) {
        return SS_BAD_DATA;
    }
    if (get_number(header + AT_CHECKSUM, 4) != header_checksum(header)) {
        return SS_CHECKSUM;
    }
    memcpy(fields->key, header + AT_KEY, sizeof fields->key);
    fields->generation = get_number(header + AT_GENERATION, 8);
    fields->length = (uint32_t)get_number(header + AT_LENGTH, 4);
    fields->header_length = (uint32_t)get_number(header + AT_HEAD_LENGTH, 4);
    fields->name_length = (uint32_t)get_number(header + AT_NAME_LENGTH, 4);
    fields->tenant = (uint16_t)get_number(header + AT_TENANT, 2);
    fields->flags = (uint16_t)get_number(header + AT_FLAGS, 2);
    if (get_number(header + AT_UNIT, 4) != ss_object_unit(fields->length) || fields->header_length > fields->length ||
        fields->name_length > NAME_BYTES_MAX) {
        return SS_BAD_DATA;
    }
    return SS_OK;
}

enum ss_result ss_object_check(const void *object, const struct ss_object_fields *expected, uint32_t first,
                               uint32_t count, const void *data) {
    const uint8_t *header = object, *bytes = data;
    struct ss_object_fields found;
    enum ss_result result = ss_object_read(object, &found);

    if (result != SS_OK) {
        return result;
    }
    if (memcmp(found.key, expected->key, sizeof found.key) != 0 || found.tenant != expected->tenant ||
        found.length != expected->length || (expected->generation != 0 && found.generation != expected->generation)) {
        return SS_NOT_FOUND;
    }
    uint32_t unit = ss_object_unit(found.length);
    if ((uint64_t)first + count > unit_count(found.length, unit)) {
        return SS_BAD_ARGUMENT;
    }
    for (uint32_t index = first; index < first + count; index++) {
        uint32_t size = unit_bytes(found.length, unit, index);
        if (ss_crc32(0, bytes, size) != get_number(header + AT_UNIT_CHECKSUMS + (size_t)4 * index, 4)) {
            return SS_CHECKSUM;
        }
        bytes += size;
    }
    return SS_OK;
}

enum ss_result ss_object_check_name(const void *object, const void *name) {
    const uint8_t *header = object;
    struct ss_object_fields found;
    enum ss_result result = ss_object_read(object, &found);

    if (result == SS_OK && ss_crc32(0, name, found.name_length) != get_number(header + AT_NAME_CHECKSUM, 4)) {
        result = SS_CHECKSUM;
    }
    return result;
}
