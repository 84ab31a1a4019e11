/* SPDX-License-Identifier: Apache-2.0 */
/* Objects: what was sealed is found sound, any byte that changed is found out, and a header of any content is read
 * without harm. */
#include "check.h"
#include "shadowserve_block.h"

enum { HEADER = 2048, PAGE = 4096 };

static struct ss_object_fields fields_of(uint32_t length, uint32_t name_length) {
    struct ss_object_fields fields = {.generation = 7,
                                      .length = length,
                                      .header_length = length / 2,
                                      .name_length = name_length,
                                      .tenant = 3,
                                      .flags = 5};
    random_fill(fields.key, sizeof fields.key);
    return fields;
}

static uint8_t *object_make(const struct ss_object_fields *fields, uint64_t *size) {
    *size = ss_object_bytes(fields->length, fields->name_length);
    uint8_t *object = malloc((size_t)*size);
    CHECK(object != NULL, "no memory");
    random_fill(object, (size_t)*size);
    CHECK(ss_object_seal(object, *size, fields) == SS_OK, "seal");
    return object;
}

static uint32_t units_of(uint32_t length) {
    uint32_t unit = ss_object_unit(length);
    return (uint32_t)(((uint64_t)length + unit - 1) / unit);
}

static void test_sizes(void) {
    CHECK(ss_object_bytes(0, 0) == PAGE && ss_object_bytes(2048, 0) == PAGE && ss_object_bytes(2049, 0) == 2 * PAGE,
          "pages");
    CHECK(ss_object_bytes(2000, 48) == PAGE && ss_object_bytes(2000, 49) == 2 * PAGE, "with a name");
    CHECK(ss_object_bytes(UINT32_MAX, 65536) == ((uint64_t)UINT32_MAX + 1) + 65536 + PAGE, "the largest");
    CHECK(ss_object_unit(0) == 65536 && ss_object_unit(448 * 65536) == 65536, "small units");
    CHECK(ss_object_unit(448 * 65536 + 1) == 131072, "one byte more");
    CHECK(units_of(UINT32_MAX) <= 448, "the largest has %u units", units_of(UINT32_MAX));
}

static void test_what_was_sealed_is_sound(uint32_t length, uint32_t name_length) {
    struct ss_object_fields fields = fields_of(length, name_length), found;
    uint64_t size;
    uint8_t *object = object_make(&fields, &size);
    uint32_t units = units_of(length), unit = ss_object_unit(length);

    CHECK(ss_object_read(object, &found) == SS_OK, "read");
    CHECK(memcmp(found.key, fields.key, 32) == 0 && found.generation == 7 && found.length == length &&
              found.header_length == length / 2 && found.name_length == name_length && found.tenant == 3 &&
              found.flags == 5,
          "the fields");
    CHECK(ss_object_check(object, &fields, 0, units, object + HEADER) == SS_OK, "all units of %u", length);
    for (uint32_t index = 0; index < units; index++) {
        CHECK(ss_object_check(object, &fields, index, 1, object + HEADER + (size_t)index * unit) == SS_OK, "%u", index);
    }
    CHECK(ss_object_check(object, &fields, 0, 0, NULL) == SS_OK, "the header alone");
    CHECK(ss_object_check(object, &fields, 0, units + 1, object + HEADER) == SS_BAD_ARGUMENT, "one unit too many");
    CHECK(ss_object_check(object, &fields, UINT32_MAX, 2, object + HEADER) == SS_BAD_ARGUMENT, "far behind");
    CHECK(ss_object_check_name(object, object + HEADER + length) == SS_OK, "the name");
    for (uint64_t index = (uint64_t)HEADER + length + name_length; index < size; index++) {
        CHECK(object[index] == 0, "padding");
    }
    free(object);
}

static void test_each_byte_of_the_header_counts(void) {
    struct ss_object_fields fields = fields_of(100000, 10);
    uint64_t size;
    uint8_t *object = object_make(&fields, &size);

    for (size_t index = 0; index < HEADER; index++) {
        uint8_t flip = (uint8_t)(1u << random_below(8));
        object[index] ^= flip;
        enum ss_result expected = index < 12 ? SS_BAD_DATA : SS_CHECKSUM;
        CHECK(ss_object_check(object, &fields, 0, 2, object + HEADER) == expected, "byte %zu", index);
        object[index] ^= flip;
    }
    CHECK(ss_object_check(object, &fields, 0, 2, object + HEADER) == SS_OK, "as it was");
    free(object);
}

static void test_each_unit_has_its_checksum(void) {
    struct ss_object_fields fields = fields_of(5 * 65536 + 17, 6);
    uint64_t size;
    uint8_t *object = object_make(&fields, &size), *value = object + HEADER;

    for (int batch = 0; batch < 200; batch++) {
        uint32_t at = (uint32_t)random_below(fields.length), bad = at / 65536;
        value[at] ^= 0x10;
        CHECK(ss_object_check(object, &fields, 0, 6, value) == SS_CHECKSUM, "byte %u", at);
        for (uint32_t index = 0; index < 6; index++) {
            CHECK(ss_object_check(object, &fields, index, 1, value + (size_t)index * 65536) ==
                      (index == bad ? SS_CHECKSUM : SS_OK),
                  "byte %u, unit %u", at, index);
        }
        value[at] ^= 0x10;
    }
    CHECK(ss_object_check(object, &fields, 1, 1, value) == SS_CHECKSUM, "the bytes of another unit");
    value[fields.length + 2] ^= 1;
    CHECK(ss_object_check_name(object, value + fields.length) == SS_CHECKSUM, "the name");
    free(object);
}

static void test_another_object_is_told_from_rot(void) {
    struct ss_object_fields fields = fields_of(5000, 0), other;
    uint64_t size;
    uint8_t *object = object_make(&fields, &size);

    for (int which = 0; which < 4; which++) {
        other = fields;
        other.key[31] ^= which == 0;
        other.tenant = (uint16_t)(other.tenant + (which == 1));
        other.length += which == 2;
        other.generation += which == 3;
        CHECK(ss_object_check(object, &other, 0, 1, object + HEADER) == SS_NOT_FOUND, "difference %d", which);
    }
    other = fields;
    other.generation = 0;
    CHECK(ss_object_check(object, &other, 0, 1, object + HEADER) == SS_OK, "any generation");
    free(object);
}

static void test_what_does_not_fit_is_not_sealed(void) {
    struct ss_object_fields fields = fields_of(5000, 20);
    uint8_t object[8192];

    CHECK(ss_object_seal(object, 8191, &fields) == SS_BAD_ARGUMENT, "too small");
    fields.header_length = 5001;
    CHECK(ss_object_seal(object, 8192, &fields) == SS_BAD_ARGUMENT, "the head is longer than the value");
    fields = fields_of(0, 65537);
    CHECK(ss_object_seal(object, UINT64_MAX, &fields) == SS_BAD_ARGUMENT, "a name that is too long");
}

/* A header with a correct checksum may be forged: inconsistent fields are still no object. */
static void test_a_forged_header_is_read_without_harm(void) {
    struct guarded region = guarded_make(HEADER);
    uint8_t *header = guarded_place(&region, HEADER, 1);
    struct ss_object_fields fields = fields_of(64, 0), found;
    static const size_t fields_at[] = {20, 24, 28, 72};
    uint64_t size;
    uint8_t *object = object_make(&fields, &size);

    for (int batch = 0; batch < 20000; batch++) {
        memcpy(header, object, HEADER);
        size_t at = fields_at[random_below(4)];
        uint32_t value = (uint32_t)(random64() >> random_below(60));
        memcpy(header + at, &value, 4);
        memset(header + 12, 0, 4);
        uint32_t crc = ss_crc32(0, header, HEADER);
        uint8_t bytes[4] = {(uint8_t)crc, (uint8_t)(crc >> 8), (uint8_t)(crc >> 16), (uint8_t)(crc >> 24)};
        memcpy(header + 12, bytes, 4);
        if (ss_object_read(header, &found) == SS_OK) {
            CHECK(found.header_length <= found.length && found.name_length <= 65536, "fields that cannot be");
            CHECK(units_of(found.length) <= 448, "units");
        }
        (void)ss_object_check(header, &fields, 0, 1, object + HEADER);
    }
    random_fill(header, HEADER);
    CHECK(ss_object_read(header, &found) == SS_BAD_DATA, "noise");
    free(object);
    guarded_free(&region);
}

int main(void) {
    static const uint32_t lengths[] = {0, 1, 2047, 2048, 65536, 65537, 1000000, 448 * 65536 + 1};

    test_sizes();
    for (size_t index = 0; index < COUNT_OF(lengths); index++) {
        test_what_was_sealed_is_sound(lengths[index], (uint32_t)index * 13);
    }
    test_each_byte_of_the_header_counts();
    test_each_unit_has_its_checksum();
    test_another_object_is_told_from_rot();
    test_what_does_not_fit_is_not_sealed();
    test_a_forged_header_is_read_without_harm();
    return 0;
}
