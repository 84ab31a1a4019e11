/* SPDX-License-Identifier: Apache-2.0 */
/* expiry.c - times of expiry in a heap of four children a node: only objects that expire have one */
#include "index/internal.h"

enum { CHILDREN = 4, LOOK_AT_MAX = 64 };

static uint64_t time_of(const struct expiry *expiry) {
    return (uint64_t)expiry->high << 32 | expiry->low;
}

static void place(struct ss_index *index, uint32_t position, struct expiry expiry) {
    index->heap[position] = expiry;
    index->entries[expiry.slot].expiry = position;
}

static uint32_t first_below(uint32_t position) {
    uint64_t first = (uint64_t)(position - 1) * CHILDREN + 2;
    return first <= UINT32_MAX - CHILDREN ? (uint32_t)first : UINT32_MAX - CHILDREN;
}

/* settle() puts 'expiry' where it belongs, from a free position, upwards or downwards. */
static void settle(struct ss_index *index, uint32_t position, struct expiry expiry) {
    uint64_t when = time_of(&expiry);
    while (position > 1) {
        uint32_t above = (position - 2) / CHILDREN + 1;
        if (time_of(&index->heap[above]) <= when) {
            break;
        }
        place(index, position, index->heap[above]);
        position = above;
    }
    for (;;) {
        uint32_t first = first_below(position), best = 0;
        for (uint32_t child = first; child < first + CHILDREN && child <= index->heap_count; child++) {
            if (best == 0 || time_of(&index->heap[child]) < time_of(&index->heap[best])) {
                best = child;
            }
        }
        if (best == 0 || time_of(&index->heap[best]) >= when) {
            break;
        }
        place(index, position, index->heap[best]);
        position = best;
    }
    place(index, position, expiry);
}

uint64_t ss_index_expires_at(const struct ss_index *index, uint32_t slot) {
    uint32_t position = index->entries[slot].expiry;
    return position != 0 ? time_of(&index->heap[position]) : 0;
}

void ss_index_set_expiry(struct ss_index *index, uint32_t slot, uint64_t expires_at_ms) {
    uint32_t position = index->entries[slot].expiry;
    if (expires_at_ms != 0) {
        struct expiry expiry = {.slot = slot, .low = (uint32_t)expires_at_ms, .high = (uint32_t)(expires_at_ms >> 32)};
        settle(index, position != 0 ? position : ++index->heap_count, expiry);
    } else if (position != 0) {
        struct expiry last = index->heap[index->heap_count--];
        index->entries[slot].expiry = 0;
        if (last.slot != slot) {
            settle(index, position, last);
        }
    }
}

/* due() stores positions of the heap whose time has come, breadth first. */
static size_t due(const struct ss_index *index, uint64_t now_ms, uint32_t *positions, size_t max) {
    size_t found = 0;
    if (max > 0 && index->heap_count > 0 && time_of(&index->heap[1]) <= now_ms) {
        positions[found++] = 1;
    }
    for (size_t at = 0; at < found; at++) {
        uint32_t first = first_below(positions[at]);
        for (uint32_t child = first; child < first + CHILDREN && child <= index->heap_count && found < max; child++) {
            if (time_of(&index->heap[child]) <= now_ms) {
                positions[found++] = child;
            }
        }
    }
    return found;
}

size_t ss_index_expired(const struct ss_index *index, uint64_t now_ms, uint32_t *slots, size_t max) {
    size_t found = due(index, now_ms, slots, max);
    for (size_t at = 0; at < found; at++) {
        slots[at] = index->heap[slots[at]].slot;
    }
    return found;
}

uint32_t ss_index_due(const struct ss_index *index, uint64_t now_ms, int32_t device, int32_t tenant) {
    uint32_t slots[LOOK_AT_MAX];
    size_t found = ss_index_expired(index, now_ms, slots, LOOK_AT_MAX);
    for (size_t at = 0; at < found; at++) {
        const struct entry *entry = &index->entries[slots[at]];
        if ((device < 0 || entry->device == device) && (tenant < 0 || entry->tenant == tenant)) {
            return slots[at];
        }
    }
    return 0;
}
