/* SPDX-License-Identifier: Apache-2.0 */
/* connection.h - one connection of sources/resp.c: requests (requests.c), and the answers to ranges (answers.c) */
#ifndef SS_CONNECTION_H
#define SS_CONNECTION_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "net/channel.h"
#include "net/resp.h"
#include "sources/layers.h"
#include "sources/source.h"

/* Small, since bytes of a body in it are copied; more than CR LF and the longest expected "$n" head. */
enum { SS_HEAD_BYTES = 64 };

/*
 * Most bytes of one system call. Each call also updates the sender's window, and on loopback does some of its work;
 * fewer calls cost less, down to this size (native/decisions.md).
 */
#define SS_RECEIVE_BYTES_MAX ((size_t)4 << 20)

enum { SS_OUTPUT_BYTES = 16 * SS_RESP_REQUEST_MAX };

enum ss_phase { SS_PHASE_HEAD, SS_PHASE_BODY, SS_PHASE_TAIL };

/* The run of a piece's slices that one connection fetches. 'slice_count' may be 0. */
struct ss_run {
    uint64_t first_byte; /* of the body */
    uint64_t bytes;
    uint64_t decoded_before; /* bytes of symbols before its first slice */
    uint32_t slice_first;    /* index in the batch */
    uint32_t slice_count;
};

/* A requested range; or the ASKING before it, which has its own answer. */
struct ss_request_sent {
    struct ss_run run;
    uint32_t piece;
    uint32_t asking;
};

struct ss_connection {
    struct ss_channel channel;
    uint32_t node;
    int over;                         /* no work is left for it in this batch */
    int failed;                       /* since it broke, or is out of step */
    struct ss_request_sent *requests; /* a ring, oldest first: asked for, not answered */
    uint32_t ahead_max;               /* ranges asked for ahead */
    uint32_t capacity;                /* one more, for the last one's ASKING */
    uint32_t head;
    uint32_t count;
    uint32_t next_piece; /* to ask for */

    struct ss_layers_reader
        *reader;            /* of the answer to the one request that the batch is; NULL: ranges are asked for */
    const uint8_t *request; /* unsent rest of this request */
    uint64_t request_left;

    uint8_t output[SS_OUTPUT_BYTES];
    size_t output_begin;
    size_t output_end;
    int send_failed; /* the server does not read on, but may have answered before */

    enum ss_phase phase; /* of the oldest request's answer */
    struct ss_resp_head reply;
    uint64_t body_length; /* as answered */
    uint64_t body_received;
    uint32_t tail_received;    /* of CR LF */
    struct ss_arrival arrival; /* of the run's slices */

    uint64_t wire_bytes; /* received in this batch */
    uint64_t body_bytes;
    uint64_t slices;
};

/* The slices of a piece that a thread requests, of 'threads'. */
struct ss_run ss_run_of(const struct ss_batch *batch, uint32_t piece_index, uint32_t thread, uint32_t threads);

/* Goes past the pieces that are not for this connection, or of no use any more; returns whether one is left. */
int ss_connection_has_more(const struct ss_feed *feed, struct ss_connection *connection);

/* Appends requests for this connection's runs while they are useful and fit; returns their number. */
uint32_t ss_requests_fill(const struct ss_feed *feed, struct ss_connection *connection);
int ss_requests_left(const struct ss_connection *connection);
void ss_requests_send(struct ss_connection *connection);

/* The connection is lost: fails its outstanding and future pieces, unless they are useless. */
void ss_connection_fail(const struct ss_feed *feed, struct ss_connection *connection, enum ss_result result);

/* Receives into the parts, for a piece; '*received_out' is the number of bytes. SS_SOURCE_AGAIN if it is not 0. */
enum ss_source_step ss_connection_receive(const struct ss_feed *feed, struct ss_connection *connection,
                                          const struct iovec *parts, size_t count, uint32_t piece,
                                          size_t *received_out);

/* One receive: the rest of a body into place, what follows it into a small buffer. */
enum ss_source_step ss_answers_receive(const struct ss_feed *feed, struct ss_connection *connection);

static inline struct ss_request_sent *ss_request_oldest(struct ss_connection *connection) {
    return &connection->requests[connection->head];
}

#endif /* SS_CONNECTION_H */
