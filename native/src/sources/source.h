/* SPDX-License-Identifier: Apache-2.0 */
/*
 * source.h - interface of the sources of stored bytes, and the pipeline's calls for sources
 *
 * A source receives the bodies of its pieces and reports each complete slice. A batch may mix sources: each piece has
 * one source. The network threads drive the sources, each thread with its own state of every source. All calls for a
 * state come from its thread. None of them blocks, except for ss_feed_slices() while the next queue is full.
 *
 * Quiet. After step() has returned SS_SOURCE_OVER, that state no longer reads or writes for this batch. It returns this
 * when all work is done, when the rest is useless, and soon after ss_feed_aborted(). Unfinished requests are then left
 * such that their answers cannot be mistaken for other answers.
 */
#ifndef SS_SOURCE_H
#define SS_SOURCE_H

#include <poll.h>
#include <stddef.h>
#include <stdint.h>

#include "shadowserve.h"

struct ss_worker; /* the pipeline's */

/* Keys of a batch in one request: the storage node's limit (storage_kv/layers.py). */
enum { SS_LAYERS_KEYS_MAX = 8192 };

/* One batch as one thread has it; sources only read it. */
struct ss_feed {
    const struct ss_batch *batch;
    const int32_t *sockets; /* node by node, 'threads' for each */
    uint32_t nodes;         /* 0: there are no sockets */
    uint32_t thread;        /* of those that take part, this one */
    uint32_t threads;
    struct ss_worker *worker;
};

/* Limits of a state. */
struct ss_source_limits {
    uint32_t nodes_max;
    uint32_t requests_in_flight; /* to each node */
    uint32_t pieces_max;
};

enum ss_source_step {
    SS_SOURCE_AGAIN, /* progress: another call may find more work */
    SS_SOURCE_WAIT,  /* no work until a watched event, or until the thread is woken */
    SS_SOURCE_OVER   /* no work is left in this batch */
};

struct ss_source {
    /* takes() returns whether a piece belongs to this source. */
    int (*takes)(const struct ss_piece *piece);

    /* answers() returns the number of ss_feed_answered() calls for a piece of this source, by all threads in total. */
    uint32_t (*answers)(const struct ss_batch *batch, uint32_t piece, uint32_t threads);

    /* create() makes a thread's state; NULL: no memory. */
    void *(*create)(const struct ss_source_limits *limits);
    void (*destroy)(void *state);

    /* begin() begins a batch; step() gets on with it; watch() adds at most 'nodes_max' that poll() is to wait for. */
    void (*begin)(void *state, const struct ss_feed *feed);
    enum ss_source_step (*step)(void *state);
    uint32_t (*watch)(void *state, struct pollfd *polled);
};

/* Pieces at a server, or at the nodes of a cluster. */
extern const struct ss_source ss_source_resp;

/* Pieces in memory of this process, now or later (awaited). */
extern const struct ss_source ss_source_memory;

/* ss_piece_origin() returns a piece's present origin: an awaited piece may arrive at any moment. */
static inline enum ss_origin ss_piece_origin(const struct ss_piece *piece) {
    return __atomic_load_n(&piece->origin, __ATOMIC_SEQ_CST);
}

/* ---- The pipeline's calls for sources (pipeline/feed.c) ---- */

/* ss_feed_aborted() returns whether the batch must end now, with unfinished pieces. */
int ss_feed_aborted(const struct ss_feed *feed);

/* ss_feed_broken() returns whether some answer will never arrive; then do not wait for useless answers. */
int ss_feed_broken(const struct ss_feed *feed);

/* ss_feed_useful() returns whether a piece is useful. A useless piece stays useless, and no thread waits for it. */
int ss_feed_useful(const struct ss_feed *feed, uint32_t piece);

/* ss_feed_place() returns the target of the body: its 'memory', if it has one that the decoder can read. */
uint8_t *ss_feed_place(const struct ss_feed *feed, uint32_t piece);

/* ss_feed_slices() passes complete slices on. 'decoded_before': bytes of symbols of the piece's earlier slices. */
void ss_feed_slices(const struct ss_feed *feed, uint32_t piece, uint32_t slice_first, uint32_t count,
                    uint64_t decoded_before);

/* Consecutive slices of a piece whose bytes arrive in order, and the number of them that were passed on. */
struct ss_arrival {
    uint32_t slice_first;
    uint32_t slice_count;
    uint32_t passed;
    uint64_t stored;  /* bytes that these were */
    uint64_t decoded; /* bytes of symbols of all slices of the piece before the next one */
};

/* ss_feed_arrived() passes on the slices that are complete after 'received' bytes; returns their number. */
uint32_t ss_feed_arrived(const struct ss_feed *feed, uint32_t piece, struct ss_arrival *arrival, uint64_t received);

/* ss_feed_answered() reports the end of one of a piece's answers(). */
void ss_feed_answered(const struct ss_feed *feed, uint32_t piece);

/* ss_feed_fail() reports the failure of a piece; 'broken': its connection failed, too. */
void ss_feed_fail(const struct ss_feed *feed, uint32_t piece, enum ss_result result, int broken);

/* ss_feed_refused() reports a server's error for a piece: a redirection to another node does not affect other pieces.
 */
void ss_feed_refused(const struct ss_feed *feed, uint32_t piece, const char *text, size_t length);

/* ss_feed_os_error() keeps the errno of an SS_OS_ERROR; ss_feed_out_of_sync() says that a socket cannot be used again.
 */
void ss_feed_os_error(const struct ss_feed *feed, int error);
void ss_feed_out_of_sync(const struct ss_feed *feed);

/* ss_feed_count() adds to the batch's and the stage's figures. */
void ss_feed_count(const struct ss_feed *feed, uint64_t slices, uint64_t wire_bytes, uint64_t body_bytes);

/* ss_feed_trace_begin() is the time, 0 while nothing is recorded; ss_feed_trace_end() then records bytes of a piece. */
uint64_t ss_feed_trace_begin(const struct ss_feed *feed);
void ss_feed_trace_end(const struct ss_feed *feed, uint32_t piece, uint64_t begin_ns, uint64_t bytes);

#endif /* SS_SOURCE_H */
