/* SPDX-License-Identifier: Apache-2.0 */
/* answers.c - the answers to range requests, bodies straight into the decompression buffer */
#include <string.h>

#include "sources/connection.h"

/* Passes on every slice whose last byte has arrived. */
static void slices_pass(const struct ss_feed *feed, struct ss_connection *connection) {
    const struct ss_request_sent *request = ss_request_oldest(connection);
    if (connection->body_length == request->run.bytes) { /* a shorter answer is not worth decoding */
        connection->slices += ss_feed_arrived(feed, request->piece, &connection->arrival, connection->body_received);
    }
}

/* Processes the head of an answer. Returns 0 if it breaks the connection. */
static int answer_head(const struct ss_feed *feed, struct ss_connection *connection) {
    const struct ss_request_sent *request = ss_request_oldest(connection);
    uint64_t expected = request->run.bytes;
    if (request->asking && connection->reply.kind != SS_RESP_SIMPLE && connection->reply.kind != SS_RESP_ERROR) {
        return 0;
    }
    connection->body_length = 0;
    connection->body_received = 0;
    connection->tail_received = 0;
    connection->arrival = (struct ss_arrival){.slice_first = request->run.slice_first,
                                              .slice_count = request->run.slice_count,
                                              .decoded = request->run.decoded_before};
    switch (connection->reply.kind) {
    case SS_RESP_BULK:
        if (connection->reply.length > expected) {
            return 0;
        }
        connection->body_length = connection->reply.length;
        connection->phase = connection->body_length > 0 ? SS_PHASE_BODY : SS_PHASE_TAIL;
        if (connection->body_length < expected) {
            ss_feed_fail(feed, request->piece, SS_NOT_FOUND, 0);
        }
        return 1;
    case SS_RESP_NULL:
        ss_feed_fail(feed, request->piece, SS_NOT_FOUND, 0);
        break;
    case SS_RESP_ERROR:
        ss_feed_refused(feed, request->piece, connection->reply.text, connection->reply.text_length);
        break;
    case SS_RESP_SIMPLE:
        if (request->asking) {
            break;
        }
        return 0;
    default:
        return 0;
    }
    connection->phase = SS_PHASE_TAIL;
    connection->tail_received = 2; /* these answers have neither body nor tail */
    return 1;
}

/* The end of an answer counts as work of its piece, so that no piece is done before its last CR LF. */
static void answer_end(const struct ss_feed *feed, struct ss_connection *connection) {
    const struct ss_request_sent *request = ss_request_oldest(connection);
    if (!request->asking) {
        ss_feed_answered(feed, request->piece);
    }
    connection->head = (connection->head + 1) % connection->capacity;
    connection->count--;
    connection->phase = SS_PHASE_HEAD;
    ss_resp_head_start(&connection->reply);
}

static uint8_t *body_place(const struct ss_feed *feed, struct ss_connection *connection) {
    const struct ss_request_sent *request = ss_request_oldest(connection);
    return ss_feed_place(feed, request->piece) + request->run.first_byte + connection->body_received;
}

/* 'size' more bytes of the body are in place. */
static void body_advance(const struct ss_feed *feed, struct ss_connection *connection, uint64_t size) {
    connection->body_received += size;
    connection->body_bytes += size;
    slices_pass(feed, connection);
    if (connection->body_received == connection->body_length) {
        connection->phase = SS_PHASE_TAIL;
    }
}

/* Processes 'size' bytes that are not in place. Returns 0 if the server violated the protocol. */
static int bytes_take(const struct ss_feed *feed, struct ss_connection *connection, const uint8_t *data, size_t size) {
    while (size > 0) {
        size_t taken = 0;
        if (connection->count == 0) {
            return 0; /* an answer without a request */
        }
        if (connection->phase == SS_PHASE_HEAD) {
            enum ss_resp_status status = ss_resp_head_feed(&connection->reply, data, size, &taken);
            if (status == SS_RESP_INVALID || (status == SS_RESP_DONE && !answer_head(feed, connection))) {
                return 0;
            }
        } else if (connection->phase == SS_PHASE_BODY) {
            uint64_t left = connection->body_length - connection->body_received;
            taken = size < left ? size : (size_t)left;
            memcpy(body_place(feed, connection), data, taken);
            body_advance(feed, connection, taken);
        } else {
            taken = 1;
            if (data[0] != (connection->tail_received == 0 ? '\r' : '\n')) {
                return 0;
            }
            connection->tail_received++;
        }
        if (connection->phase == SS_PHASE_TAIL && connection->tail_received == 2) {
            answer_end(feed, connection);
        }
        data += taken;
        size -= taken;
    }
    return 1;
}

enum ss_source_step ss_answers_receive(const struct ss_feed *feed, struct ss_connection *connection) {
    uint8_t small[SS_HEAD_BYTES];
    struct iovec parts[2];
    size_t count = 0;
    size_t direct = 0;
    size_t received;
    if (connection->phase == SS_PHASE_BODY) {
        uint64_t left = connection->body_length - connection->body_received;
        direct = left < SS_RECEIVE_BYTES_MAX ? (size_t)left : SS_RECEIVE_BYTES_MAX;
        parts[count++] = (struct iovec){.iov_base = body_place(feed, connection), .iov_len = direct};
    }
    if (direct < SS_RECEIVE_BYTES_MAX) {
        parts[count++] = (struct iovec){.iov_base = small, .iov_len = sizeof small};
    }
    enum ss_source_step step =
        ss_connection_receive(feed, connection, parts, count, ss_request_oldest(connection)->piece, &received);
    size_t placed = received < direct ? received : direct;
    if (placed > 0) {
        body_advance(feed, connection, placed);
    }
    if (!bytes_take(feed, connection, small, received - placed)) {
        ss_connection_fail(feed, connection, SS_PROTOCOL);
        return SS_SOURCE_OVER;
    }
    return step;
}
