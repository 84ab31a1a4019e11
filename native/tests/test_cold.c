/* SPDX-License-Identifier: Apache-2.0 */
/* test_cold.c - the table of a bucket's objects against a naive model, also with threads; the checks of footers */
#include "cold/blake2b.h"
#include "cold_forge.h"
#include "shadowserve_cold.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

enum {
    OBJECTS = 600,
    RECORDS_MAX = 6,
    KEYS = 1500,
    TENANTS = 3,
    PARTITIONS = 5,
    LENGTH = 1000,
    STEPS = 40000,
    CHECK_EVERY = 1000,
    ROOM = 4096
};

/* An object that may be inserted, and what the model knows of it. */
struct model {
    struct ss_cold_object described;
    uint32_t tenant;
    uint32_t keys[RECORDS_MAX];
    enum ss_cold_state state;
    uint32_t number;
    uint32_t seen;
    uint32_t used_h;
    double written_s;
};

static struct model models[OBJECTS];
static uint8_t bytes[OBJECTS * RECORDS_MAX * COLD_ENTRY_BYTES + OBJECTS * 200];
static size_t bytes_size;
static struct ss_cold_row rows[ROOM];

static void key_make(uint8_t *key, uint32_t number, uint32_t partition) {
    memset(key, 0, COLD_KEY_BYTES);
    memcpy(key, &number, sizeof number);
    key[24] = (uint8_t)(0xA0 | partition >> 8);
    key[25] = (uint8_t)partition;
}

/* ---- Footers ----------------------------------------------------------------------------------------------------- */

static void test_blake2b(void) {
    static const uint8_t expected[] = {0x38, 0x42, 0x64, 0xF6, 0x76, 0xF3, 0x95, 0x36, 0x84, 0x05,
                                       0x23, 0xF2, 0x84, 0x92, 0x1C, 0xDC, 0x68, 0xB6, 0x84, 0x6B};
    uint8_t digest[64], whole[64], data[1000];
    struct ss_blake2b hash;
    ss_blake2b_begin(&hash, 20);
    ss_blake2b_add(&hash, "abc", 3);
    ss_blake2b_end(&hash, digest);
    CHECK(memcmp(digest, expected, 20) == 0, "of abc it is %02x %02x", digest[0], digest[1]);
    random_fill(data, sizeof data);
    for (size_t size = 0; size <= sizeof data; size += 1 + size / 9) {
        ss_blake2b_begin(&hash, 64);
        ss_blake2b_add(&hash, data, size);
        ss_blake2b_end(&hash, whole);
        ss_blake2b_begin(&hash, 64);
        for (size_t at = 0, part; at < size; at += part) {
            part = random_below(size - at) + 1;
            ss_blake2b_add(&hash, data + at, part);
        }
        ss_blake2b_end(&hash, digest);
        CHECK(memcmp(digest, whole, 64) == 0, "in parts of %zu bytes", size);
    }
}

/* The bytes lie at the end of readable memory. */
static const char *read_copy(const uint8_t *footer, size_t size, struct ss_cold_object *object) {
    static struct guarded memory;
    memory = memory.map == NULL ? guarded_make(1 << 20) : memory;
    memcpy(memory.end - size, footer, size);
    return ss_cold_read_footer(memory.end - size, size, object);
}

/* Returns whether a bit of a footer of two entries and the tenant "team" may change: in names and lengths of headers.
 */
static bool may_change(size_t at, int bit) {
    if (at >= 96) {
        int letter = at < 100 ? "team"[at - 96] ^ 1 << bit : 0;
        return letter >= '!' && letter <= '~';
    }
    at %= COLD_ENTRY_BYTES;
    uint32_t header_bytes = at < 44 ? 0 : 1u ^ 1u << (8 * (at - 44) + (size_t)bit);
    return at < 24 || (at == 24 && bit >= 4) || (at > 25 && at < 32) || (header_bytes > 0 && header_bytes <= LENGTH);
}

static void test_footers(void) {
    static uint8_t footer[4097 * COLD_ENTRY_BYTES + 256], keys[4097 * COLD_KEY_BYTES], changed[sizeof footer];
    struct ss_cold_object object, other;
    char tenant[130];
    for (uint32_t number = 0; number < 4097; number++) {
        key_make(keys + (size_t)number * COLD_KEY_BYTES, number, 0xABC);
    }
    for (uint32_t records = 1; records <= 4096; records += 1 + records * 3) {
        size_t size = cold_footer(footer, keys, records, LENGTH, "team");
        CHECK(read_copy(footer, size, &object) == NULL, "%u records", records);
        CHECK(object.records == records && object.partition == 0xABC && object.longest == LENGTH, "%u", records);
        CHECK(object.size == records * LENGTH + size && object.tenant_length == 4, "%u bytes", object.size);
    }
    CHECK(read_copy(footer, cold_footer(footer, keys, 4097, LENGTH, ""), &object) != NULL, "too many records");
    memset(tenant, '~', sizeof tenant);
    tenant[129] = 0;
    CHECK(read_copy(footer, cold_footer(footer, keys, 1, LENGTH, tenant), &object) != NULL, "too long a tenant");
    CHECK(read_copy(footer, cold_footer(footer, keys, 1, LENGTH, tenant + 1), &object) == NULL, "the longest tenant");
    CHECK(read_copy(footer, cold_footer(footer, keys, 1, LENGTH, "a b"), &object) != NULL, "no tenant's name");
    CHECK(read_copy(footer, cold_footer(footer, keys, 1, 3000000000u, ""), &object) == NULL, "nearly 4 GiB");
    CHECK(read_copy(footer, cold_footer(footer, keys, 2, 3000000000u, ""), &object) != NULL, "more than 4 GiB");
    memcpy(keys + 2 * COLD_KEY_BYTES, keys, COLD_KEY_BYTES);
    CHECK(read_copy(footer, cold_footer(footer, keys, 3, LENGTH, ""), &object) != NULL, "a key twice");
    key_make(keys + COLD_KEY_BYTES, 0xFFFF, 0xABC); /* no bit makes it the first one */
    size_t size = cold_footer(footer, keys, 2, LENGTH, "team");
    CHECK(read_copy(footer, size, &object) == NULL, "two records");
    for (size_t at = 0; at < size - 16; at++) {
        for (int bit = 0; bit < 8; bit++) {
            memcpy(changed, footer, size);
            changed[at] ^= (uint8_t)(1 << bit);
            const char *fault = read_copy(changed, size, &other);
            CHECK((fault == NULL) == may_change(at, bit), "bit %d of byte %zu", bit, at);
            CHECK(fault != NULL || at % 48 >= 44 || memcmp(&object, &other, sizeof object) != 0, "byte %zu", at);
        }
    }
    for (size_t cut = 1; cut <= size; cut++) {
        CHECK(read_copy(footer + cut, size - cut, &other) != NULL, "without the first %zu bytes", cut);
        CHECK(read_copy(footer, size - cut, &other) != NULL, "without the last %zu bytes", cut);
    }
}

static void test_index_objects(void) {
    static uint8_t index[4096];
    uint8_t key[COLD_KEY_BYTES];
    struct ss_cold_object objects[8];
    size_t size = 8, ends[8] = {8}, count;
    memcpy(index, "SSINDX01", 8);
    for (uint32_t number = 1; number < 8; number++) {
        uint32_t used_h = 100 + number, footer_bytes = (uint32_t)cold_footer_bytes(1, "t");
        key_make(key, number, 7);
        memcpy(index + size, &used_h, 4);
        memcpy(index + size + 4, &footer_bytes, 4);
        size += 8 + cold_footer(index + size + 8, key, 1, LENGTH, "t");
        ends[number] = size;
    }
    CHECK(ss_cold_read_index(index, size, 7, objects, 8, &count) == NULL && count == 7, "%zu objects", count);
    for (uint32_t number = 0; number < 7; number++) {
        CHECK(objects[number].used_h == 101 + number && objects[number].begin == ends[number] + 8, "object %u", number);
    }
    CHECK(ss_cold_read_index(index, size, 6, objects, 8, &count) != NULL, "another partition");
    CHECK(ss_cold_read_index(index, size, 7, objects, 6, &count) != NULL, "more than there is room for");
    for (size_t cut = 0, number = 0; cut < size; cut++) {
        number += cut > ends[number];
        bool is_whole = ss_cold_read_index(index, cut, 7, objects, 8, &count) == NULL;
        CHECK(is_whole == (cut == ends[number]) && (!is_whole || count == number), "%zu of %zu bytes", cut, size);
    }
    index[7]++;
    CHECK(ss_cold_read_index(index, size, 7, objects, 8, &count) != NULL, "another version");
}

/* ---- The table --------------------------------------------------------------------------------------------------- */

static void make_models(void) {
    static const char *tenants[TENANTS] = {"", "a", "other"};
    for (uint32_t at = 0; at < OBJECTS; at++) {
        struct model *model = &models[at];
        uint8_t keys[RECORDS_MAX * COLD_KEY_BYTES];
        uint32_t count = (uint32_t)random_below(RECORDS_MAX) + 1, first = (uint32_t)random_below(KEYS - RECORDS_MAX);
        uint32_t partition = first % PARTITIONS;
        model->tenant = (uint32_t)random_below(TENANTS);
        for (uint32_t record = 0; record < count; record++) {
            model->keys[record] = first + record; /* a key's partition differs between objects: that does not matter */
            key_make(keys + (size_t)record * COLD_KEY_BYTES, first + record, 0);
            keys[(size_t)record * COLD_KEY_BYTES + 25] = (uint8_t)partition;
        }
        size_t size = cold_footer(bytes + bytes_size, keys, count, LENGTH, tenants[model->tenant]);
        CHECK(ss_cold_read_footer(bytes + bytes_size, size, &model->described) == NULL, "object %u", at);
        model->described.begin = (uint32_t)bytes_size;
        bytes_size += size;
    }
}

/* The key of an object's record, with the object's partition. */
static void model_key(uint8_t *key, const struct model *model, uint32_t record) {
    key_make(key, model->keys[record], model->described.partition);
}

static bool has_key(const struct model *model, const uint8_t *key) {
    uint8_t own[COLD_KEY_BYTES];
    for (uint32_t record = 0; record < model->described.records; record++) {
        model_key(own, model, record);
        if (memcmp(own, key, sizeof own) == 0) {
            return true;
        }
    }
    return false;
}

/* Counts the present objects with a record; only known ones, or also hidden ones. */
static uint32_t model_holders(uint32_t tenant, const uint8_t *key, bool only_known) {
    uint32_t count = 0;
    for (uint32_t at = 0; at < OBJECTS; at++) {
        const struct model *model = &models[at];
        count += model->tenant == tenant &&
                 (only_known ? model->state == SS_COLD_KNOWN : model->state != SS_COLD_FREE) && has_key(model, key);
    }
    return count;
}

static uint64_t model_alone(const struct model *model) {
    uint8_t key[COLD_KEY_BYTES];
    uint64_t count = 0;
    for (uint32_t record = 0; record < model->described.records; record++) {
        model_key(key, model, record);
        count += model_holders(model->tenant, key, true) == (model->state == SS_COLD_KNOWN);
    }
    return count;
}

static struct model *model_of(const uint8_t *digest, uint32_t number) {
    for (uint32_t at = 0; at < OBJECTS; at++) {
        struct model *model = &models[at];
        if (model->state != SS_COLD_FREE && model->number == number &&
            memcmp(model->described.digest, digest, sizeof model->described.digest) == 0) {
            return model;
        }
    }
    CHECK(false, "no object has number %u", number);
}

/* Returns whether another object of the model with the same name is present; names are made from tenant and keys. */
static struct model *same_name(const struct model *model) {
    for (uint32_t at = 0; at < OBJECTS; at++) {
        if (models[at].state != SS_COLD_FREE &&
            memcmp(models[at].described.digest, model->described.digest, sizeof model->described.digest) == 0) {
            return &models[at];
        }
    }
    return NULL;
}

static void insert_some(struct ss_cold_table *table, uint32_t list) {
    struct ss_cold_object described[4];
    uint32_t positions[4], numbers[4], tenant = (uint32_t)random_below(TENANTS);
    struct model *chosen[4];
    double written_s[4];
    size_t count = 0, wanted = random_below(4) + 1;
    while (count < wanted) {
        struct model *model = &models[random_below(OBJECTS)];
        if (model->tenant == tenant) {
            chosen[count] = model;
            written_s[count] = (double)random_below(1000);
            positions[count] = (uint32_t)(3 - count);
            described[3 - count] = model->described;
            described[3 - count].used_h = (uint32_t)random_below(100);
            count++;
        }
    }
    struct ss_cold_sums sums = {0}, expected = {0};
    enum ss_cold_state state = random_below(4) == 0 ? SS_COLD_HIDDEN : SS_COLD_KNOWN;
    enum ss_result result =
        ss_cold_insert(table, tenant, bytes, described, positions, count, written_s, list, state, numbers, &sums);
    CHECK(result == SS_OK, "result %d", (int)result);
    for (size_t at = 0; at < count; at++) {
        struct model *model = chosen[at];
        bool is_new = same_name(model) == NULL;
        CHECK((numbers[at] != 0) == is_new, "number %u", numbers[at]);
        if (is_new) {
            model->state = state;
            model->number = numbers[at];
            model->seen = list;
            model->used_h = described[positions[at]].used_h;
            model->written_s = written_s[at];
            expected.objects += state == SS_COLD_KNOWN;
            expected.records += state == SS_COLD_KNOWN ? model_alone(model) : 0;
            expected.bytes += state == SS_COLD_KNOWN ? model->described.size : 0;
        }
    }
    CHECK(memcmp(&sums, &expected, sizeof sums) == 0, "%u of %u records", (unsigned)sums.records,
          (unsigned)expected.records);
}

static void change_one(struct ss_cold_table *table, struct model *model, uint32_t list) {
    struct ss_cold_row row;
    enum ss_cold_state before = model->state;
    if (before == SS_COLD_FREE) {
        bool is_there = ss_cold_number(table, model->described.digest) != 0;
        CHECK(is_there == (same_name(model) != NULL), "an absent one");
        return;
    }
    switch (random_below(4)) {
    case 0:
        ss_cold_remove(table, model->number);
        model->state = SS_COLD_FREE;
        CHECK(ss_cold_number(table, model->described.digest) == 0, "it was removed");
        break;
    case 1:
        model->state = random_below(2) == 0 ? SS_COLD_HIDDEN : SS_COLD_KNOWN;
        CHECK(ss_cold_set_state(table, model->number, model->state, &row) == model_alone(model), "alone");
        CHECK(row.state == before && row.size == model->described.size, "state %u before", row.state);
        break;
    case 2:
        model->seen = list;
        model->written_s = before == SS_COLD_KNOWN ? list : model->written_s;
        CHECK(ss_cold_see(table, model->described.digest, list, list) == (model->number | (uint64_t)before << 32),
              "see");
        break;
    default:
        model->used_h = list;
        ss_cold_use(table, model->number, list);
    }
}

static void check_record(struct ss_cold_table *table, const struct model *model) {
    uint8_t key[COLD_KEY_BYTES];
    struct ss_cold_found found;
    uint32_t holders[2], record = (uint32_t)random_below(model->described.records);
    model_key(key, model, record);
    uint32_t known = model_holders(model->tenant, key, true), all = model_holders(model->tenant, key, false);
    CHECK(ss_cold_find(table, model->tenant, key, &found) == (known != 0 ? SS_OK : SS_NOT_FOUND), "find");
    CHECK(ss_cold_holders(table, model->tenant, key, holders, 2) == all, "holders");
    if (known != 0) {
        const struct model *holder = model_of(found.digest, found.number);
        CHECK(holder->state == SS_COLD_KNOWN && has_key(holder, key), "another object's record");
        CHECK(found.length == LENGTH && found.header_bytes == 1 && found.offset % LENGTH == 0, "at %u", found.offset);
        uint8_t own[COLD_KEY_BYTES];
        model_key(own, holder, found.offset / LENGTH);
        CHECK(memcmp(own, key, sizeof own) == 0 && found.partition == holder->described.partition, "another record");
    }
}

static size_t select_all(struct ss_cold_table *table, const struct ss_cold_filter *filter, size_t at_once) {
    size_t count = 0;
    uint32_t cursor = 0;
    do {
        count += ss_cold_select(table, filter, &cursor, rows + count, at_once);
    } while (cursor != 0);
    return count;
}

static void check_selection(struct ss_cold_table *table, uint32_t list) {
    uint16_t partitions[] = {(uint16_t)random_below(PARTITIONS), (uint16_t)random_below(PARTITIONS)};
    struct ss_cold_filter filter = {
        .partitions = partitions,
        .partition_count = (uint32_t)random_below(3),
        .tenant = (int64_t)random_below(TENANTS + 1) - 1,
        .seen_before = random_below(2) == 0 ? UINT64_MAX : list - random_below(list),
        .is_known = (uint32_t)random_below(2),
    };
    size_t found = select_all(table, &filter, random_below(50) + 1), expected = 0;
    for (uint32_t at = 0; at < OBJECTS; at++) {
        const struct model *model = &models[at];
        uint16_t partition = model->described.partition;
        bool is_in = filter.partition_count == 0 || partition == partitions[0] ||
                     (filter.partition_count == 2 && partition == partitions[1]);
        expected += is_in && model->state != SS_COLD_FREE && (filter.is_known == 0 || model->state == SS_COLD_KNOWN) &&
                    (filter.tenant < 0 || model->tenant == filter.tenant) && model->seen < filter.seen_before;
    }
    CHECK(found == expected, "%zu of %zu", found, expected);
    for (size_t at = 0; at < found; at++) {
        const struct model *model = model_of(rows[at].digest, rows[at].number);
        struct ss_cold_row row;
        CHECK(ss_cold_row(table, rows[at].number, &row) == SS_OK && memcmp(&row, &rows[at], sizeof row) == 0, "row");
        CHECK(row.written_s == model->written_s && row.tenant == model->tenant && row.size == model->described.size &&
                  row.seen == model->seen && row.used_h == model->used_h && row.state == model->state &&
                  row.partition == model->described.partition,
              "object %u", row.number);
        CHECK(ss_cold_records(table, row.number) == model->described.records, "records of %u", row.number);
        CHECK(at == 0 || rows[at - 1].number < row.number, "the order of numbers");
    }
}

static void test_random(struct ss_cold_table *table) {
    const uint32_t steps = test_is_brief() ? STEPS / 8 : STEPS;
    for (uint32_t step = 1; step <= steps; step++) {
        bool is_growing = step / 2048 % 2 == 0; /* it becomes full and nearly empty */
        if (random_below(4) < (is_growing ? 2 : 1)) {
            insert_some(table, step);
        } else {
            change_one(table, &models[random_below(OBJECTS)], step);
        }
        check_record(table, &models[random_below(OBJECTS)]);
        if (step % CHECK_EVERY == 0) {
            check_selection(table, step);
        }
    }
    for (uint32_t at = 0; at < OBJECTS; at++) {
        if (models[at].state != SS_COLD_FREE) {
            ss_cold_remove(table, models[at].number);
            models[at].state = SS_COLD_FREE;
        }
    }
    check_selection(table, 1);
}

/* Numbers without an object change nothing, whatever they are. */
static void test_absent_numbers(struct ss_cold_table *table) {
    static const uint32_t numbers[] = {0, 1, 17, UINT32_MAX};
    struct ss_cold_row row;
    for (size_t at = 0; at < COUNT_OF(numbers); at++) {
        ss_cold_remove(table, numbers[at]);
        ss_cold_use(table, numbers[at], 1);
        CHECK(ss_cold_row(table, numbers[at], &row) == SS_NOT_FOUND, "number %u", numbers[at]);
        CHECK(ss_cold_set_state(table, numbers[at], SS_COLD_KNOWN, &row) == 0 && row.number == 0, "a state");
        CHECK(ss_cold_records(table, numbers[at]) == 0, "records");
    }
}

/* A table of many objects, in a row longer than what a selection looks at at once. */
static void test_large(struct ss_cold_table *table) {
    enum { COUNT = 150000, WANTED = 77777 };
    struct ss_cold_object object = {.size = 100, .records = 1};
    uint32_t position = 0, number, cursor = 0;
    double written_s = 1;
    struct ss_cold_sums sums = {0};
    uint16_t partition = 4095;
    for (uint32_t at = 1; at <= COUNT; at++) {
        uint8_t footer[256], key[COLD_KEY_BYTES];
        key_make(key, at, 0);
        cold_footer(footer, key, 1, 50, "");
        memcpy(object.digest, &at, sizeof at);
        object.partition = at == WANTED ? partition : (uint16_t)(at % 4000);
        CHECK(ss_cold_insert(table, 0, footer, &object, &position, 1, &written_s, 1, SS_COLD_KNOWN, &number, &sums) ==
                      SS_OK &&
                  number == at,
              "number %u", number);
    }
    CHECK(sums.objects == COUNT && sums.records == COUNT, "%u records", (unsigned)sums.records);
    struct ss_cold_filter filter = {
        .partitions = &partition, .partition_count = 1, .tenant = -1, .seen_before = UINT64_MAX};
    size_t calls = 0, count = 0;
    do {
        count += ss_cold_select(table, &filter, &cursor, rows + count, ROOM);
        calls++;
    } while (cursor != 0);
    CHECK(count == 1 && rows[0].number == WANTED && calls == 3, "%zu rows in %zu calls", count, calls);
    CHECK(ss_cold_memory(table) <= (uint64_t)COUNT * 100, "%u bytes a record",
          (unsigned)(ss_cold_memory(table) / COUNT));
}

static atomic_bool is_over;

static void *find_always(void *given) {
    struct ss_cold_table *table = given;
    uint8_t key[COLD_KEY_BYTES];
    struct ss_cold_found found;
    for (uint32_t at = 0; !atomic_load(&is_over); at = (at + 7) % OBJECTS) {
        model_key(key, &models[at], 0);
        if (ss_cold_find(table, models[at].tenant, key, &found) == SS_OK) {
            CHECK(found.length == LENGTH, "%u bytes", found.length);
            ss_cold_use(table, found.number, 1);
        }
    }
    return NULL;
}

static void test_threads(struct ss_cold_table *table) {
    pthread_t threads[2];
    uint32_t position = 0, number;
    double written_s = 1;
    struct ss_cold_sums sums = {0};
    for (size_t at = 0; at < 2; at++) {
        CHECK(pthread_create(&threads[at], NULL, find_always, table) == 0, "thread");
    }
    for (uint32_t step = 0; step < 20000; step++) {
        const struct model *model = &models[random_below(OBJECTS)];
        CHECK(ss_cold_insert(table, model->tenant, bytes, &model->described, &position, 1, &written_s, 1, SS_COLD_KNOWN,
                             &number, &sums) == SS_OK,
              "insert");
        if (number == 0) {
            ss_cold_remove(table, ss_cold_number(table, model->described.digest));
        }
    }
    atomic_store(&is_over, true);
    for (size_t at = 0; at < 2; at++) {
        pthread_join(threads[at], NULL);
    }
}

int main(void) {
    static void (*const tests[])(struct ss_cold_table * table) = {test_absent_numbers, test_random, test_large,
                                                                  test_threads};
    test_blake2b();
    test_footers();
    test_index_objects();
    make_models();
    for (size_t at = 0; at < COUNT_OF(tests); at++) {
        struct ss_cold_table *table;
        CHECK(ss_cold_open(random64(), &table) == SS_OK, "open");
        tests[at](table);
        ss_cold_close(table);
    }
    return 0;
}
