/* SPDX-License-Identifier: Apache-2.0 */
/*
 * extents.c - runs of free blocks, in a treap by address in which each node knows the longest run below it
 *
 * So one walk down finds the first run that is long enough. Adjacent runs are merged, so each run has one node. Nodes
 * are in one array, which grows by halves.
 */
#include "shadowserve_index.h"

#include <stdbool.h>
#include <stdlib.h>

struct run {
    uint32_t first;
    uint32_t count;
    uint32_t longest; /* of the runs here and below */
    uint32_t priority;
    uint32_t left;
    uint32_t right;
};

struct ss_extents {
    struct run *runs; /* from 1 */
    uint32_t room;
    uint32_t used;
    uint32_t unused; /* list of nodes that were given back, by 'left' */
    uint32_t root;
    uint32_t blocks;
    uint32_t free_blocks;
    uint32_t random;
};

enum { ROOM_MIN = 16 };

static bool room_for_one(struct ss_extents *extents) {
    if (extents->unused != 0 || extents->used < extents->room) {
        return true;
    }
    uint32_t room = extents->room + extents->room / 2;
    struct run *runs = realloc(extents->runs, ((size_t)room + 1) * sizeof *runs);
    if (runs == NULL) {
        return false;
    }
    extents->runs = runs;
    extents->room = room;
    return true;
}

static uint32_t run_make(struct ss_extents *extents, uint32_t first, uint32_t count) {
    uint32_t node = extents->unused;
    if (node != 0) {
        extents->unused = extents->runs[node].left;
    } else {
        node = ++extents->used;
    }
    extents->random ^= extents->random << 13;
    extents->random ^= extents->random >> 17;
    extents->random ^= extents->random << 5;
    extents->runs[node] = (struct run){.first = first, .count = count, .longest = count, .priority = extents->random};
    return node;
}

static void run_drop(struct ss_extents *extents, uint32_t node) {
    extents->runs[node].left = extents->unused;
    extents->unused = node;
}

static void update(struct run *runs, uint32_t node) {
    uint32_t longest = runs[node].count;
    longest = runs[runs[node].left].longest > longest ? runs[runs[node].left].longest : longest;
    runs[node].longest = runs[runs[node].right].longest > longest ? runs[runs[node].right].longest : longest;
}

/* split() divides a tree into the runs before 'first' and the rest. Recursion is as deep as the tree, O(log). */
static void split(struct run *runs, uint32_t node, uint32_t first, uint32_t *before, uint32_t *rest) {
    if (node == 0) {
        *before = *rest = 0;
    } else if (runs[node].first < first) {
        uint32_t right;
        split(runs, runs[node].right, first, &right, rest);
        runs[node].right = right;
        update(runs, node);
        *before = node;
    } else {
        uint32_t left;
        split(runs, runs[node].left, first, before, &left);
        runs[node].left = left;
        update(runs, node);
        *rest = node;
    }
}

static uint32_t merge(struct run *runs, uint32_t before, uint32_t rest) {
    if (before == 0 || rest == 0) {
        return before != 0 ? before : rest;
    }
    if (runs[before].priority > runs[rest].priority) {
        runs[before].right = merge(runs, runs[before].right, rest);
        update(runs, before);
        return before;
    }
    runs[rest].left = merge(runs, before, runs[rest].left);
    update(runs, rest);
    return rest;
}

/* Inserts a node below 'root' at the depth of its priority, where it splits the tree, and returns the new root. */
static uint32_t insert(struct run *runs, uint32_t root, uint32_t node) {
    if (root == 0 || runs[node].priority > runs[root].priority) {
        uint32_t left, right;
        split(runs, root, runs[node].first, &left, &right);
        runs[node].left = left;
        runs[node].right = right;
        update(runs, node);
        return node;
    }
    if (runs[node].first < runs[root].first) {
        runs[root].left = insert(runs, runs[root].left, node);
    } else {
        runs[root].right = insert(runs, runs[root].right, node);
    }
    update(runs, root);
    return root;
}

static uint32_t take_out(struct run *runs, uint32_t root, uint32_t first) {
    if (runs[root].first == first) {
        return merge(runs, runs[root].left, runs[root].right);
    }
    if (first < runs[root].first) {
        runs[root].left = take_out(runs, runs[root].left, first);
    } else {
        runs[root].right = take_out(runs, runs[root].right, first);
    }
    update(runs, root);
    return root;
}

/* Changes the run that begins at 'was' in place; the order is unchanged, since it does not reach another run. */
static void change(struct run *runs, uint32_t root, uint32_t was, uint32_t first, uint32_t count) {
    if (runs[root].first == was) {
        runs[root].first = first;
        runs[root].count = count;
    } else {
        change(runs, was < runs[root].first ? runs[root].left : runs[root].right, was, first, count);
    }
    update(runs, root);
}

/* Returns the last run that begins at or before 'block', and in '*next' the first behind it; 0 for none. */
static uint32_t find(const struct ss_extents *extents, uint64_t block, uint32_t *next) {
    const struct run *runs = extents->runs;
    uint32_t node = extents->root, last = 0;
    *next = 0;
    while (node != 0) {
        if (runs[node].first <= block) {
            last = node;
            node = runs[node].right;
        } else {
            *next = node;
            node = runs[node].left;
        }
    }
    return last;
}

static void remove_run(struct ss_extents *extents, uint32_t node) {
    extents->root = take_out(extents->runs, extents->root, extents->runs[node].first);
    run_drop(extents, node);
}

static void cut_front(struct ss_extents *extents, uint32_t node, uint32_t count) {
    const struct run *run = &extents->runs[node];
    if (run->count == count) {
        remove_run(extents, node);
    } else {
        change(extents->runs, extents->root, run->first, run->first + count, run->count - count);
    }
    extents->free_blocks -= count;
}

enum ss_result ss_extents_open(uint32_t blocks, struct ss_extents **extents) {
    if (blocks == UINT32_MAX) {
        return SS_BAD_ARGUMENT;
    }
    struct ss_extents *made = calloc(1, sizeof *made);
    struct run *runs = calloc(ROOM_MIN + 1, sizeof *runs);
    if (made == NULL || runs == NULL) {
        free(made);
        free(runs);
        return SS_NO_MEMORY;
    }
    made->runs = runs;
    made->room = ROOM_MIN;
    made->blocks = made->free_blocks = blocks;
    made->random = 0x9E3779B9u;
    made->root = blocks != 0 ? run_make(made, 0, blocks) : 0;
    *extents = made;
    return SS_OK;
}

void ss_extents_close(struct ss_extents *extents) {
    if (extents != NULL) {
        free(extents->runs);
        free(extents);
    }
}

uint32_t ss_extents_allocate(struct ss_extents *extents, uint32_t count) {
    const struct run *runs = extents->runs;
    uint32_t node = extents->root;
    if (count == 0 || runs[node].longest < count) {
        return UINT32_MAX;
    }
    for (;;) {
        if (runs[runs[node].left].longest >= count) {
            node = runs[node].left;
        } else if (runs[node].count >= count) {
            uint32_t first = runs[node].first;
            cut_front(extents, node, count);
            return first;
        } else {
            node = runs[node].right;
        }
    }
}

enum ss_result ss_extents_free(struct ss_extents *extents, uint32_t first, uint32_t count) {
    uint64_t end = (uint64_t)first + count;
    if (count == 0 || end > extents->blocks) {
        return SS_BAD_ARGUMENT;
    }
    uint32_t next, last = find(extents, first, &next);
    const struct run *runs = extents->runs;
    if ((last != 0 && (uint64_t)runs[last].first + runs[last].count > first) || (next != 0 && runs[next].first < end)) {
        return SS_BAD_ARGUMENT;
    }
    bool joins_last = last != 0 && runs[last].first + runs[last].count == first;
    bool joins_next = next != 0 && runs[next].first == end;
    if (joins_last && joins_next) {
        uint32_t added = count + runs[next].count;
        remove_run(extents, next);
        change(extents->runs, extents->root, runs[last].first, runs[last].first, runs[last].count + added);
    } else if (joins_last) {
        change(extents->runs, extents->root, runs[last].first, runs[last].first, runs[last].count + count);
    } else if (joins_next) {
        change(extents->runs, extents->root, runs[next].first, first, runs[next].count + count);
    } else {
        if (!room_for_one(extents)) {
            return SS_NO_MEMORY;
        }
        uint32_t node = run_make(extents, first, count);
        extents->root = insert(extents->runs, extents->root, node);
    }
    extents->free_blocks += count;
    return SS_OK;
}

enum ss_result ss_extents_reserve(struct ss_extents *extents, uint32_t first, uint32_t count) {
    uint64_t end = (uint64_t)first + count;
    uint32_t next, node = find(extents, first, &next);
    if (count == 0 || node == 0 || (uint64_t)extents->runs[node].first + extents->runs[node].count < end) {
        return SS_BAD_ARGUMENT;
    }
    if (!room_for_one(extents)) {
        return SS_NO_MEMORY;
    }
    struct run was = extents->runs[node];
    if (was.first == first) {
        cut_front(extents, node, count);
        return SS_OK;
    }
    change(extents->runs, extents->root, was.first, was.first, first - was.first);
    if (was.first + was.count > end) {
        uint32_t made = run_make(extents, (uint32_t)end, (uint32_t)(was.first + was.count - end));
        extents->root = insert(extents->runs, extents->root, made);
    }
    extents->free_blocks -= count;
    return SS_OK;
}

uint32_t ss_extents_free_blocks(const struct ss_extents *extents) {
    return extents->free_blocks;
}
