/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_object.c - any bytes, taken for an object: as they are, and with a header checksum that fits them
 *
 * Invariants: nothing outside the header and the units that were given is read; what is found sound has fields that fit
 * each other; an object that was sealed with those fields is sound, and one with another byte in a unit is not.
 *
 * Input: one byte of choices, then the header, cut or filled up with zeros to 2048 bytes, then the value.
 */
#include "check.h"
#include "shadowserve_block.h"

enum { HEADER = 2048, UNIT = 65536 };

static void make_sound(uint8_t *header) {
    memset(header + 12, 0, 4);
    uint32_t crc = ss_crc32(0, header, HEADER);
    for (int index = 0; index < 4; index++) {
        header[12 + index] = (uint8_t)(crc >> (8 * index));
    }
}

/* Seals an object of the same fields, as far as there is memory for it, and looks for a changed byte. */
static void check_sealed(struct ss_object_fields fields, const uint8_t *value, size_t size) {
    fields.length = (uint32_t)size;
    fields.header_length = fields.header_length < size ? fields.header_length : (uint32_t)size;
    fields.name_length %= 100;
    uint64_t bytes = ss_object_bytes(fields.length, fields.name_length);
    uint8_t *object = calloc(1, (size_t)bytes);
    uint32_t units = (uint32_t)((size + UNIT - 1) / UNIT);

    CHECK(object != NULL, "no memory");
    if (size > 0) {
        memcpy(object + HEADER, value, size);
    }
    CHECK(ss_object_seal(object, bytes, &fields) == SS_OK, "seal");
    CHECK(ss_object_check(object, &fields, 0, units, object + HEADER) == SS_OK, "sealed");
    CHECK(ss_object_check_name(object, object + HEADER + size) == SS_OK, "name");
    if (size > 0) {
        object[HEADER + fields.generation % size] ^= 1;
        CHECK(ss_object_check(object, &fields, 0, units, object + HEADER) == SS_CHECKSUM, "changed");
    }
    free(object);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct ss_object_fields found;

    if (size == 0) {
        return 0;
    }
    uint8_t choices = *data++;
    size--;
    size_t head = size < HEADER ? size : HEADER, rest = size - head;
    uint8_t *header = calloc(1, HEADER), *value = malloc(rest + 1);
    CHECK(header != NULL && value != NULL, "no memory");
    memcpy(header, data, head);
    memcpy(value, data + head, rest);
    if (choices & 1) {
        make_sound(header);
    }
    if (ss_object_read(header, &found) == SS_OK) {
        uint32_t unit = ss_object_unit(found.length);
        CHECK(found.header_length <= found.length && (uint64_t)unit * 448 >= found.length, "fields");
        CHECK(ss_object_check(header, &found, 0, 0, NULL) == SS_OK, "the header alone");
        uint32_t units = (uint32_t)(rest / unit), whole = found.length / unit;
        (void)ss_object_check(header, &found, choices >> 4, units < whole ? units : 0, value);
        if (found.length <= rest) {
            (void)ss_object_check(header, &found, 0, (uint32_t)(((uint64_t)found.length + unit - 1) / unit), value);
        }
        if (found.name_length <= rest) {
            (void)ss_object_check_name(header, value);
        }
        check_sealed(found, value, rest);
    }
    free(header);
    free(value);
    return 0;
}
