/* SPDX-License-Identifier: Apache-2.0 */
/* test_index.c - the index against a naive model under random operations, and its order of eviction by example */
#include "index_check.h"

enum { KEYS = 300, TENANTS = 3, DEVICES = 3, OBJECTS_MAX = 200, STEPS = 60000, CHECK_EVERY = 500 };

/* What the model knows of a key: everything, by its number. A parent's number is less than its child's. */
struct model {
    struct ss_index_record record; /* kind 0: absent */
    uint32_t number;
    uint32_t parent; /* KEYS: none */
};

static struct model models[TENANTS][KEYS];

static void key_make(uint8_t *key, uint32_t number) {
    memset(key, 0, KEY_SIZE);
    memcpy(key, &number, sizeof number);
    key[31] = 1;
}

static struct ss_index *open_index(uint32_t objects_max, enum ss_index_policy policy) {
    struct ss_index *index;
    CHECK(ss_index_open(objects_max, policy, random64(), &index) == SS_OK, "open");
    return index;
}

static struct model *model_of(const struct ss_index_record *record) {
    uint32_t number;
    memcpy(&number, record->key, sizeof number);
    return &models[record->tenant][number];
}

static uint64_t model_count(int tenant, int device) {
    uint64_t count = 0;
    for (int owner = 0; owner < TENANTS; owner++) {
        for (size_t number = 0; number < KEYS; number++) {
            const struct ss_index_record *record = &models[owner][number].record;
            count += record->kind != 0 && (tenant < 0 || owner == tenant) && (device < 0 || record->device == device);
        }
    }
    return count;
}

static void insert_random(struct ss_index *index, uint32_t now_s) {
    struct model model = {.record = {.kind = SS_INDEX_PUT}, .number = (uint32_t)random_below(KEYS)};
    struct ss_index_record *record = &model.record;
    uint32_t slot;
    record->tenant = (uint16_t)random_below(TENANTS);
    record->device = random_below(8) == 0 ? 255 : (uint8_t)random_below(DEVICES);
    record->flags = (uint8_t)random_below(4);
    record->name_blocks = (record->flags & SS_INDEX_NAMED) != 0 ? (uint8_t)random_below(18) : 0;
    record->extent = (uint32_t)random64() >> 1;
    record->length = (uint32_t)random_below(1 << 24);
    record->header_length = (uint32_t)random_below(record->length < 1 << 20 ? record->length + 1 : 1 << 20);
    record->generation = (uint32_t)random64();
    record->expires_at_ms = random_below(4) == 0 ? (uint64_t)now_s * 1000 + random_below(400000) + 1000 : 0;
    record->pinned_until_s = random_below(8) == 0 ? now_s + (uint32_t)random_below(50) : 0;
    record->accessed_s = now_s;
    key_make(record->key, model.number);
    model.parent = random_below(4) != 0 && model.number > 0 ? model.number - 1 : (uint32_t)random_below(KEYS);
    if (model.parent < model.number) {
        key_make(record->parent, model.parent);
    } else {
        model.parent = KEYS;
    }
    bool replaces = models[record->tenant][model.number].record.kind != 0;
    enum ss_result result = ss_index_insert(index, record, NULL, 0, now_s, &slot);
    CHECK(result == (replaces || model_count(-1, -1) < OBJECTS_MAX ? SS_OK : SS_NO_SPACE), "result %d", (int)result);
    if (result == SS_OK) {
        models[record->tenant][model.number] = model;
    }
}

static bool has_children(const struct model *model) {
    const struct model *row = models[model->record.tenant];
    for (size_t number = 0; number < KEYS; number++) {
        if (row[number].record.kind != 0 && row[number].parent == model->number) {
            return true;
        }
    }
    return false;
}

/* Whether some object may be evicted: one that is not pinned and has no children. Links are never lost by these steps.
 */
static bool some_victim(int device, int tenant, uint32_t now_s) {
    for (int owner = 0; owner < TENANTS; owner++) {
        for (size_t number = 0; number < KEYS; number++) {
            const struct model *model = &models[owner][number];
            if (model->record.kind != 0 && (tenant < 0 || owner == tenant) &&
                (device < 0 || model->record.device == device) && model->record.pinned_until_s <= now_s &&
                !has_children(model)) {
                return true;
            }
        }
    }
    return false;
}

static void evict_one(struct ss_index *index, uint32_t now_s) {
    int device = (int)random_below(DEVICES + 1) - 1, tenant = (int)random_below(TENANTS + 1) - 1;
    uint32_t slot = ss_index_victim(index, device, tenant, now_s);
    struct ss_index_record record;
    if (slot == 0) {
        /* With dangling parents the index knows of more ancestors than the model. */
        CHECK(index->dangling.count != 0 || !some_victim(device, tenant, now_s), "no victim on %d of %d", device,
              tenant);
        return;
    }
    CHECK(ss_index_read(index, slot, &record) == SS_OK, "slot %u", slot);
    struct model *model = model_of(&record);
    CHECK(model->record.kind != 0 && (tenant < 0 || record.tenant == tenant), "a tenant's victim");
    if (record.expires_at_ms == 0 || record.expires_at_ms > (uint64_t)now_s * 1000) {
        /* Ancestors of pinned objects alone are evicted if there is no other victim. */
        CHECK(!has_children(model) || !some_victim(device, tenant, now_s), "evicted before its children");
        CHECK(model->record.pinned_until_s <= now_s, "evicted though pinned");
    }
    ss_index_evict(index, slot);
    CHECK(ss_index_ghost(index, record.tenant, record.key), "no ghost");
    model->record.kind = 0;
}

static void expire_some(struct ss_index *index, uint32_t now_s) {
    uint32_t slots[4];
    size_t found = ss_index_expired(index, (uint64_t)now_s * 1000, slots, 4);
    for (size_t at = 0; at < found; at++) {
        struct ss_index_record record;
        CHECK(ss_index_read(index, slots[at], &record) == SS_OK, "slot %u", slots[at]);
        CHECK(record.expires_at_ms != 0 && record.expires_at_ms <= (uint64_t)now_s * 1000, "not due");
        model_of(&record)->record.kind = 0;
        ss_index_remove(index, slots[at]);
    }
    for (int owner = 0; found < 4 && owner < TENANTS; owner++) {
        for (size_t number = 0; number < KEYS; number++) {
            const struct ss_index_record *record = &models[owner][number].record;
            CHECK(record->kind == 0 || record->expires_at_ms == 0 || record->expires_at_ms > (uint64_t)now_s * 1000,
                  "one that is due was not found");
        }
    }
}

static void change_random(struct ss_index *index, uint32_t now_s) {
    uint16_t tenant = (uint16_t)random_below(TENANTS);
    uint32_t number = (uint32_t)random_below(KEYS);
    struct model *model = &models[tenant][number];
    uint8_t key[KEY_SIZE];
    key_make(key, number);
    uint32_t slot = ss_index_find(index, tenant, key);
    CHECK((slot != 0) == (model->record.kind != 0), "key %u: slot %u", number, slot);
    if (slot == 0) {
        struct ss_index_record untouched = {.kind = SS_INDEX_CLEAR};
        CHECK(ss_index_get(index, tenant, key, now_s, &untouched) == 0 && untouched.kind == SS_INDEX_CLEAR, "absent");
        return;
    }
    switch (random_below(7)) {
    case 6: {
        uint32_t length = model->record.header_length + (uint32_t)random_below(10000);
        bool resized = ss_index_resize(index, slot, length) == SS_OK;
        CHECK(resized == (model->record.device == 255), "only what is in memory alone gets another length");
        model->record.length = resized ? length : model->record.length;
        break;
    }
    case 0:
        ss_index_remove(index, slot);
        model->record.kind = 0;
        break;
    case 1:
        model->record.expires_at_ms = random_below(2) == 0 ? 0 : (uint64_t)now_s * 1000 + 1000 + random_below(90000);
        CHECK(ss_index_expire(index, slot, model->record.expires_at_ms) == SS_OK, "expire");
        break;
    case 2:
        model->record.pinned_until_s = random_below(2) == 0 ? 0 : now_s + 1 + (uint32_t)random_below(40);
        ss_index_pin(index, slot, model->record.pinned_until_s);
        break;
    case 3: {
        struct ss_index_record found;
        CHECK(ss_index_get(index, tenant, key, 0, &found) == slot, "key %u", number);
        CHECK(found.accessed_s == model->record.accessed_s, "described as it was");
        CHECK(ss_index_get(index, tenant, key, now_s, &found) == slot, "key %u", number);
        CHECK(found.accessed_s == model->record.accessed_s && memcmp(found.key, key, KEY_SIZE) == 0,
              "as it was before");
        model->record.accessed_s = now_s;
        break;
    }
    default:
        model->record.accessed_s = now_s;
        ss_index_touch(index, slot, now_s);
    }
}

static void compare(struct ss_index *index, uint32_t now_s) {
    check_whole(index);
    uint64_t seen = 0;
    for (uint32_t slot = 0; (slot = ss_index_next(index, slot)) != 0; seen++) {
        struct ss_index_record record;
        CHECK(ss_index_read(index, slot, &record) == SS_OK, "slot %u", slot);
        struct ss_index_record expected = model_of(&record)->record;
        CHECK(expected.pinned_until_s == record.pinned_until_s || expected.pinned_until_s <= now_s, "pin");
        expected.pinned_until_s = record.pinned_until_s; /* one that is over is forgotten at some time */
        CHECK(memcmp(&expected, &record, sizeof record) == 0, "slot %u differs", slot);
    }
    CHECK(seen == model_count(-1, -1), "%llu objects", (unsigned long long)seen);
    for (int tenant = -1; tenant < TENANTS; tenant++) {
        for (int device = -1; device < DEVICES; device++) {
            struct ss_index_totals totals;
            ss_index_totals(index, tenant, device, &totals);
            CHECK(totals.objects == model_count(tenant, device), "tenant %d, device %d", tenant, device);
        }
    }
}

static void clear_one(struct ss_index *index) {
    int device = (int)random_below(DEVICES + 1) - 1, tenant = (int)random_below(TENANTS + 1) - 1;
    CHECK(ss_index_clear(index, tenant, device) == model_count(tenant, device), "cleared");
    for (int owner = 0; owner < TENANTS; owner++) {
        for (size_t number = 0; number < KEYS; number++) {
            struct ss_index_record *record = &models[owner][number].record;
            if ((tenant < 0 || owner == tenant) && (device < 0 || record->device == device)) {
                record->kind = 0;
            }
        }
    }
}

static void run_random(enum ss_index_policy policy) {
    /* Absent parents beyond the limit lose their children, but not in the model: so keep enough room for them. */
    struct ss_index *index = open_index(KEYS * TENANTS * 8, policy);
    index->objects_max = OBJECTS_MAX;
    memset(models, 0, sizeof models);
    for (uint32_t step = 0; step < STEPS; step++) {
        uint32_t now_s = 1000 + step / 16;
        size_t what = random_below(100);
        if (what < 45) {
            insert_random(index, now_s);
        } else if (what < 60) {
            evict_one(index, now_s);
        } else if (what < 65) {
            expire_some(index, now_s);
        } else if (step % 997 == 0) {
            clear_one(index);
        } else {
            change_random(index, now_s);
        }
        if (step % CHECK_EVERY == 0) {
            compare(index, now_s);
        }
    }
    CHECK(ss_index_clear(index, -1, -1) > 0 && ss_index_next(index, 0) == 0, "cleared");
    check_whole(index);
    index->objects_max = KEYS * TENANTS * 8;
    ss_index_close(index);
}

/* ---- By example ---------------------------------------------------------------------------------------------- */

enum { NONE = KEYS };

static uint32_t put(struct ss_index *index, uint32_t number, uint32_t parent, uint8_t device, uint32_t now_s) {
    struct ss_index_record record = {.kind = SS_INDEX_PUT, .device = device, .length = 100, .extent = number};
    uint32_t slot;
    key_make(record.key, number);
    if (parent != NONE) {
        key_make(record.parent, parent);
    }
    CHECK(ss_index_insert(index, &record, NULL, 0, now_s, &slot) == SS_OK, "insert %u", number);
    return slot;
}

static uint32_t number_of(const struct ss_index *index, uint32_t slot) {
    uint32_t number;
    CHECK(slot != 0, "nothing");
    memcpy(&number, index->entries[slot].key, sizeof number);
    return number;
}

static void expect_evicted(struct ss_index *index, int device, uint32_t now_s, const uint32_t *numbers, size_t count) {
    for (size_t at = 0; at < count; at++) {
        uint32_t slot = ss_index_victim(index, device, -1, now_s), number = number_of(index, slot);
        CHECK(number == numbers[at], "%u instead of %u", number, numbers[at]);
        ss_index_evict(index, slot);
        check_whole(index);
    }
}

static void test_lru(struct ss_index *index) {
    put(index, 1, NONE, 0, 1);
    put(index, 2, 1, 1, 2);
    put(index, 3, 2, 0, 3);
    put(index, 4, NONE, 0, 4);
    put(index, 5, NONE, 1, 5);
    ss_index_touch(index, put(index, 6, NONE, 1, 6), 3);
    /* The first chain's end, wherever it lies; then what is older of each device's. */
    expect_evicted(index, 0, 7, (uint32_t[]){3, 2, 1}, 3);
    expect_evicted(index, -1, 7, (uint32_t[]){4, 5, 6}, 3);
    CHECK(ss_index_victim(index, -1, -1, 7) == 0, "nothing is left");
}

static void test_pins(struct ss_index *index) {
    for (uint32_t number = 0; number < 100; number++) {
        put(index, number, number == 0 ? NONE : number - 1, 0, 1);
    }
    uint8_t key[KEY_SIZE];
    key_make(key, 99);
    uint32_t end = ss_index_find(index, 0, key);
    ss_index_pin(index, end, 50);
    put(index, 200, NONE, 0, 2);
    put(index, 201, 98, 0, 2);
    /* Objects without pinned descendants go first; then the ancestors of the pinned object. */
    expect_evicted(index, -1, 10, (uint32_t[]){201, 200}, 2);
    for (uint32_t number = 0; number < 99; number++) {
        uint32_t slot = ss_index_victim(index, -1, -1, 10);
        CHECK(slot != 0 && slot != end, "number %u", number);
        ss_index_evict(index, slot);
    }
    CHECK(ss_index_victim(index, -1, -1, 49) == 0, "not yet");
    expect_evicted(index, -1, 50, (uint32_t[]){99}, 1);
}

static void test_s3fifo(struct ss_index *index) {
    for (uint32_t number = 0; number < 10; number++) {
        uint32_t slot = put(index, number, NONE, 0, number);
        for (uint32_t uses = number % 3; uses > 0; uses--) {
            ss_index_touch(index, slot, 20);
        }
    }
    /* Used twice, 2, 5 and 8 go into the main queue as they meet the end; 0, which comes back, goes there at once. */
    expect_evicted(index, -1, 30, (uint32_t[]){0, 1, 3}, 3);
    put(index, 0, NONE, 0, 31);
    expect_evicted(index, -1, 30, (uint32_t[]){4, 6, 7, 9, 2, 0, 5, 8}, 8);
}

static void test_frequency(struct ss_index *index) {
    for (uint32_t number = 0; number < 10; number++) {
        uint32_t slot = put(index, number, NONE, 0, number);
        for (uint32_t uses = number % 3; uses > 0; uses--) {
            ss_index_touch(index, slot, 20);
        }
    }
    expect_evicted(index, -1, 30, (uint32_t[]){0, 3, 6, 9, 1, 4, 7, 2, 5, 8}, 10);
}

static void test_links(struct ss_index *index) {
    struct ss_index_record record;
    for (uint32_t number = 20; number > 0; number--) { /* the end first, and circles */
        put(index, number, number - 1, 0, 1);
        check_whole(index);
    }
    put(index, 0, 20, 0, 1);
    check_whole(index);
    uint32_t zero = put(index, 0, 0, 0, 1);
    check_whole(index);
    CHECK(index->entries[zero].parent == 0 && index->dangling.count == 0, "a circle");
    ss_index_remove(index, zero);
    CHECK(index->dangling.count == 1 && ss_index_read(index, zero, &record) == SS_NOT_FOUND, "a dangling parent");
    CHECK(put(index, 0, NONE, 0, 1) == zero && index->dangling.count == 0, "it came back");
    ss_index_clear(index, -1, -1);
    CHECK(index->dangling.count == 0, "dangling parents without children");
    for (uint32_t number = 0; number < 64; number++) {
        put(index, number, 100 + number, 0, 1);
        check_whole(index);
    }
    CHECK(index->dangling.count == 16, "%u dangling parents", index->dangling.count);
    ss_index_clear(index, -1, -1);
}

/* ---- Records ------------------------------------------------------------------------------------------------- */

static void expect_counts(struct ss_index *index, uint8_t device, const struct ss_index_record *record,
                          uint64_t applied, uint64_t ignored, uint64_t refused) {
    struct ss_index_counts counts = {0};
    CHECK(ss_index_replay(index, device, 1000, record, 1, &counts) == SS_OK, "replay");
    CHECK(counts.applied == applied && counts.ignored == ignored && counts.refused == refused,
          "kind %u, extent %u: %u applied, %u ignored, %u refused", record->kind, record->extent,
          (unsigned)counts.applied, (unsigned)counts.ignored, (unsigned)counts.refused);
    check_whole(index);
}

static void test_refused_records(struct ss_index *index) {
    struct ss_index_record good = {.kind = SS_INDEX_PUT, .extent = 997, .length = 3 * 4096 - 2048, .generation = 9};
    key_make(good.key, 1);
    struct ss_index_record bad[10];
    for (size_t at = 0; at < 10; at++) {
        bad[at] = good;
    }
    bad[0].extent = 998;
    bad[1].length++;
    bad[2].length = UINT32_MAX;
    bad[3].header_length = good.length + 1;
    bad[4].reserved = 1;
    bad[5].name_blocks = 1;
    bad[6].flags = SS_INDEX_EVERY_TENANT;
    bad[7].kind = 0;
    bad[8].kind = 8;
    bad[9].extent = UINT32_MAX;
    for (size_t at = 0; at < 10; at++) {
        expect_counts(index, 0, &bad[at], 0, 0, 1);
    }
    expect_counts(index, 0, &good, 1, 0, 0);
    good.generation = 8;
    expect_counts(index, 1, &good, 0, 1, 0); /* an older put of another device */
    good.kind = SS_INDEX_REMOVE;
    expect_counts(index, 1, &good, 0, 1, 0); /* it speaks of its own */
    expect_counts(index, 0, &good, 1, 0, 0);
    good.kind = SS_INDEX_TENANT;
    expect_counts(index, 0, &good, 0, 1, 0);
}

static void expect_superseded(const struct ss_index *index, uint8_t device, size_t expected) {
    struct ss_index_record records[7];
    uint32_t cursor = 0;
    size_t found = 0;
    do {
        size_t count = ss_index_superseded(index, device, &cursor, records, 7);
        for (size_t at = 0; at < count; at++) {
            CHECK(records[at].kind == SS_INDEX_REMOVE && records[at].length == 0, "no REMOVE");
        }
        found += count;
    } while (cursor != 0);
    CHECK(found == expected, "%zu superseded on device %u, not %zu", found, device, expected);
}

static void replay_one(struct ss_index *index, uint8_t device, uint8_t kind, uint32_t number, uint32_t generation) {
    struct ss_index_counts counts = {0};
    struct ss_index_record record = {.kind = kind, .generation = generation, .tenant = (uint16_t)(number % 2)};
    if (kind == SS_INDEX_CLEAR) {
        record.tenant = (uint16_t)number;
    } else {
        key_make(record.key, number);
    }
    if (kind == SS_INDEX_PUT) {
        record.extent = 1;
        record.length = 100;
    }
    CHECK(ss_index_replay(index, device, 1000, &record, 1, &counts) == SS_OK && counts.refused == 0, "replay");
}

/* A key on two devices: the log of the device with the earlier put needs a REMOVE record, unless it has one already. */
static void test_superseded(struct ss_index *index) {
    enum { COUNT = 300 }; /* half of objects_max */
    expect_superseded(index, 0, 0);
    for (uint32_t number = 0; number < COUNT; number++) {
        replay_one(index, 0, SS_INDEX_PUT, number, 2 * number + 1);
        replay_one(index, 1, SS_INDEX_PUT, number,
                   2 * number + (number % 3 == 0 ? 0 : 2)); /* of each third device 0's */
    }
    expect_superseded(index, 0, COUNT - COUNT / 3);
    expect_superseded(index, 1, COUNT / 3);
    replay_one(index, 1, SS_INDEX_REMOVE, 0, 0); /* its own log says so */
    replay_one(index, 1, SS_INDEX_REMOVE, 0, 0);
    expect_superseded(index, 1, COUNT / 3 - 1);
    replay_one(index, 1, SS_INDEX_REMOVE, 1, 0); /* the later one goes: what it beat is still in the other's log */
    expect_superseded(index, 0, COUNT - COUNT / 3);
    replay_one(index, 0, SS_INDEX_PUT, 1, 9999); /* it comes back there: a put like any other */
    expect_superseded(index, 0, COUNT - COUNT / 3 - 1);
    replay_one(index, 1, SS_INDEX_CLEAR, 0, 0);
    expect_superseded(index, 1, COUNT / 6);
    ss_index_clear(index, -1, 0);
    expect_superseded(index, 0, 0);
    for (uint32_t number = 0; number < COUNT; number++) { /* places are used again */
        replay_one(index, 0, SS_INDEX_PUT, number, 2 * COUNT + 2 * number);
    }
    check_whole(index);
}

static void test_replay_and_dump(struct ss_index *index) {
    enum { COUNT = 2000 }; /* objects_max, too */
    static struct ss_index_record records[COUNT], dumped[COUNT];
    struct ss_index_counts counts = {0};
    struct ss_extents *extents;
    uint64_t dropped;
    uint32_t cursor = 0;
    memset(records, 0, sizeof records);
    for (uint32_t at = 0; at < COUNT; at++) { /* in a mixed order: 1,201 has no divisor in common with 2,000 */
        uint32_t number = at * 1201 % COUNT;
        records[at] = (struct ss_index_record){
            .kind = SS_INDEX_PUT, .extent = number * 2, .length = 6000, .accessed_s = 5000 - number, .generation = at};
        key_make(records[at].key, number);
        if (number % 20 != 0) {
            key_make(records[at].parent, number - 1);
        }
    }
    records[0].extent = records[1].extent; /* overlaps: the later put stays */
    CHECK(ss_index_replay(index, 3, 10000, records, COUNT, &counts) == SS_OK, "replay");
    CHECK(ss_index_replayed(index) == SS_OK && counts.applied == COUNT, "replayed");
    check_whole(index);
    CHECK(ss_extents_open(10000, &extents) == SS_OK, "extents");
    CHECK(ss_index_reserve(index, 3, extents, &dropped) == SS_OK && dropped == 1, "dropped %u", (unsigned)dropped);
    CHECK(ss_extents_free_blocks(extents) == 10000 - 2 * (COUNT - 1), "%u free", ss_extents_free_blocks(extents));
    ss_extents_close(extents);
    size_t found = 0;
    do {
        found += ss_index_dump(index, 3, &cursor, dumped + found, 1 + random_below(50) % (COUNT - found + 1));
    } while (cursor != 0 && found < COUNT - 60);
    while (cursor != 0) {
        found += ss_index_dump(index, 3, &cursor, dumped + found, 1);
    }
    CHECK(found == COUNT - 1, "%zu dumped", found);
    uint32_t last = 0;
    for (size_t at = 0; at < 20; at++) { /* what was used least recently, 1,980 to 1,999, is one chain */
        uint32_t slot = ss_index_victim(index, 3, -1, 6000);
        CHECK(number_of(index, slot) == 1999 - at, "%u at %zu", number_of(index, slot), at);
        last = number_of(index, slot);
        ss_index_evict(index, slot);
    }
    CHECK(last == 1980, "%u", last);
    for (uint32_t slot = 0; (slot = ss_index_next(index, slot)) != 0;) { /* a full table, taken apart */
        ss_index_remove(index, slot);
        if (slot % 50 == 0) {
            check_whole(index);
        }
    }
    CHECK(ss_index_memory(index) < 100 * COUNT && index->totals.objects == 0, "memory");
    check_whole(index);
}

/* name_make() stores the pieces of a text of which every byte is its number, and returns how many they are. */
static size_t name_make(struct ss_index_record *records, uint32_t number, uint32_t length) {
    size_t count = 0;
    for (uint32_t start = 0; start < length || start == 0; start += 80) {
        uint8_t *record = (uint8_t *)&records[count++];
        uint16_t piece = (uint16_t)(length - start < 80 ? length - start : 80);
        memset(record, 0, sizeof *records);
        record[0] = SS_INDEX_NAME;
        memcpy(record + 6, &piece, sizeof piece);
        memcpy(record + 8, &start, sizeof start);
        memcpy(record + 12, &length, sizeof length);
        key_make(record + 16, number);
        memset(record + 48, (int)number, piece);
    }
    return count;
}

static struct ss_index_record named_put(uint32_t number, uint32_t generation) {
    struct ss_index_record put = {.kind = SS_INDEX_PUT, .flags = SS_INDEX_NAMED, .generation = generation};
    key_make(put.key, number);
    return put;
}

/* Checks the text of an object; -1: it has none. */
static void check_name(struct ss_index *index, uint32_t number, int64_t expected) {
    uint8_t key[KEY_SIZE];
    uint32_t length;
    key_make(key, number);
    const uint8_t *text = ss_index_name(index, ss_index_find(index, 0, key), &length);
    CHECK((text != NULL) == (expected >= 0) && (text == NULL || length == expected), "name of %u", number);
    for (uint32_t at = 0; at < length; at++) {
        CHECK(text[at] == (uint8_t)number, "byte %u of the name of %u", at, number);
    }
}

enum { LONG = 65536, PIECES = 820, ROOM = 2 * PIECES };
static const uint32_t lengths[] = {0, 1, 80, 81, 5000, LONG};
static struct ss_index_record records[ROOM], again[ROOM];

/* Puts objects 1 to 6 with their names: before its put as in a log, or behind it as in a snapshot. */
static void put_named(struct ss_index *index) {
    for (uint32_t number = 1; number <= 6; number++) {
        struct ss_index_record put = named_put(number, number);
        size_t count = name_make(records, number, lengths[number - 1]);
        if (number % 2 == 0) {
            expect_counts(index, 1, &put, 1, 0, 0);
        }
        for (size_t at = 0; at < count; at++) {
            expect_counts(index, 1, &records[at], 1, 0, 0);
        }
        if (number % 2 != 0) {
            expect_counts(index, 1, &put, 1, 0, 0);
        }
        check_name(index, number, lengths[number - 1]);
        check_whole(index);
    }
}

static void test_names(struct ss_index *index) {
    uint64_t before = ss_index_memory(index);
    put_named(index);
    CHECK(ss_index_memory(index) > before + LONG, "memory");
    /* A put that replaces it keeps the name; one that another device put later is not touched by this one's. */
    struct ss_index_record put = named_put(2, 7), older = named_put(2, 1);
    expect_counts(index, 1, &put, 1, 0, 0);
    expect_counts(index, 0, &older, 0, 1, 0);
    name_make(records, 2, 40);
    expect_counts(index, 0, records, 1, 0, 0);
    check_name(index, 2, 1);
    put.flags = 0;
    put.generation++;
    expect_counts(index, 1, &put, 1, 0, 0);
    check_name(index, 2, -1);
    /* A text that lacks a piece is none, and no other's. */
    put = named_put(8, 1);
    name_make(records, 8, 200);
    expect_counts(index, 1, &records[0], 1, 0, 0);
    expect_counts(index, 1, &records[2], 0, 0, 1);
    expect_counts(index, 1, &put, 1, 0, 0);
    check_name(index, 8, -1);
    uint32_t slot = ss_index_find(index, 0, put.key);
    CHECK(ss_index_set_name(index, slot, records->key, LONG + 1) == SS_BAD_ARGUMENT, "a name that is too long");
    CHECK(ss_index_purge(index, 0, SS_INDEX_NAMELESS) == 0, "another device's");
    CHECK(ss_index_purge(index, 1, SS_INDEX_NAMELESS) == 1 && ss_index_find(index, 0, put.key) == 0, "nameless");
    CHECK(ss_index_replayed(index) == SS_OK, "replayed");
    check_whole(index);
    ss_index_clear(index, 0, 1);
    check_whole(index);
    CHECK(ss_index_memory(index) <= before, "memory");
}

/* A put brings its name, or keeps the one that is there; one that fails leaves nothing behind. */
static void test_put_names(struct ss_index *index) {
    struct ss_index_record one = named_put(1, 1), other = named_put(2, 1), third = named_put(3, 1);
    uint64_t before = ss_index_memory(index);
    uint32_t slot, again_slot;
    uint8_t text[5000];
    memset(text, 1, sizeof text);
    CHECK(ss_index_insert(index, &one, text, LONG + 1, 1, &slot) == SS_BAD_ARGUMENT, "too long");
    CHECK(ss_index_insert(index, &one, text, 5000, 1, &slot) == SS_OK, "named");
    check_name(index, 1, 5000);
    CHECK(ss_index_insert(index, &one, NULL, 0, 1, &again_slot) == SS_OK && again_slot == slot, "without a text");
    check_name(index, 1, 5000);
    CHECK(ss_index_insert(index, &one, text, 80, 1, &again_slot) == SS_OK && again_slot == slot, "another text");
    check_name(index, 1, 80);
    memset(text, 2, sizeof text);
    CHECK(ss_index_insert(index, &other, text, 0, 1, &slot) == SS_OK, "an empty text");
    check_name(index, 2, 0);
    CHECK(ss_index_insert(index, &third, text, 80, 1, &slot) == SS_NO_SPACE, "full");
    check_whole(index);
    one.flags = 0;
    CHECK(ss_index_insert(index, &one, text, 80, 1, &slot) == SS_BAD_ARGUMENT, "a name of what has none");
    CHECK(ss_index_insert(index, &one, NULL, 0, 1, &slot) == SS_OK, "no name any more");
    check_name(index, 1, -1);
    ss_index_evict(index, slot);
    ss_index_clear(index, -1, -1);
    check_whole(index);
    CHECK(ss_index_memory(index) <= before, "memory");
}

/* A replay of the dump gives the same index. */
static void test_dumped_names(struct ss_index *index) {
    struct ss_index_totals totals;
    put_named(index);
    CHECK(ss_index_replayed(index) == SS_OK, "replayed");
    uint32_t cursor = 0;
    size_t count = ss_index_dump(index, 1, &cursor, again, 64);
    size_t names = ss_index_dump_names(index, again, count, NULL, 0);
    ss_index_totals(index, -1, 1, &totals);
    CHECK(count == 6 && names == 1 + 1 + 1 + 2 + 63 + PIECES && names == totals.name_records, "%zu names", names);
    CHECK(ss_index_dump_names(index, again, count, again + count, ROOM - count) == names, "dumped");
    struct ss_index *copy = open_index(64, SS_INDEX_LRU);
    struct ss_index_counts counts = {0};
    CHECK(ss_index_replay(copy, 1, UINT32_MAX, again, count + names, &counts) == SS_OK, "replay");
    CHECK(counts.applied == count + names, "%u applied", (unsigned)counts.applied);
    for (uint32_t number = 1; number <= 6; number++) {
        check_name(copy, number, lengths[number - 1]);
    }
    CHECK(ss_index_purge(copy, 1, SS_INDEX_UNPROVEN) == 6, "all but records");
    check_whole(copy);
    ss_index_close(copy);
}

int main(void) {
    static const struct {
        void (*test)(struct ss_index *index);
        uint32_t objects_max;
        enum ss_index_policy policy;
    } tests[] = {
        {test_names, 64, SS_INDEX_LRU},
        {test_put_names, 2, SS_INDEX_LRU},
        {test_dumped_names, 64, SS_INDEX_LRU},
        {test_lru, 10, SS_INDEX_LRU},
        {test_pins, 1000, SS_INDEX_LRU},
        {test_s3fifo, 100, SS_INDEX_S3FIFO},
        {test_frequency, 100, SS_INDEX_FREQUENCY},
        {test_links, 64, SS_INDEX_LRU}, /* 16 dangling parents */
        {test_refused_records, 64, SS_INDEX_LRU},
        {test_superseded, 600, SS_INDEX_LRU},
        {test_replay_and_dump, 2000, SS_INDEX_S3FIFO},
    };
    for (size_t at = 0; at < COUNT_OF(tests); at++) {
        struct ss_index *index = open_index(tests[at].objects_max, tests[at].policy);
        tests[at].test(index);
        ss_index_close(index);
    }
    run_random(SS_INDEX_LRU);
    run_random(SS_INDEX_S3FIFO);
    run_random(SS_INDEX_FREQUENCY);
    return 0;
}
