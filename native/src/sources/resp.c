/* SPDX-License-Identifier: Apache-2.0 */
/*
 * resp.c - pieces at storage servers: range requests out (requests.c), stored bytes straight into the decompression
 * buffer (answers.c)
 *
 * Each thread drives one connection to each node; a single storage server is one node. On each connection it requests
 * its run of the slices of every piece of the node, several requests ahead, and reads the answers, which arrive in
 * order. A body is received into the decompression buffer: one system call receives the rest of the body in place and
 * at most SS_HEAD_BYTES behind it, the end of this answer and the head of the next, into a small buffer. Only the few
 * bytes of the next body in this buffer are copied. Alternatively, one request on one connection to a node asks for all
 * of the batch's pieces there (layers.c); if the node does not support it, the pieces are requested by ranges.
 *
 * Failure. A failure concerns the piece of the oldest outstanding answer; all earlier pieces have their bytes from this
 * connection. After a well-formed refusal the connection is still in step, so the outstanding answers are read and
 * dropped, and the connection can be used again. Any other failure breaks it. A connection with half an answer left is
 * disconnected, so that no later reader mistakes that half for its own answer.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <poll.h>
#include <stdlib.h>

#include "sources/connection.h"

/* For layers: bytes of the numbers at the beginning, and most parts that one system call fills. */
enum { NUMBERS_BYTES = 4096, PARTS_MAX = 64 };

struct resp {
    const struct ss_feed *feed;
    struct ss_layers_reader *readers; /* by node; untouched, so without memory, unless layers are requested */
    uint32_t nodes_max;
    struct ss_connection connections[];
};

static int resp_takes(const struct ss_piece *piece) {
    return ss_piece_origin(piece) == SS_ORIGIN_SERVER;
}

static void resp_destroy(void *state) {
    struct resp *resp = state;
    for (uint32_t i = 0; i < resp->nodes_max; i++) {
        free(resp->connections[i].requests);
    }
    free(resp->readers);
    free(resp);
}

static void *resp_create(const struct ss_source_limits *limits) {
    struct resp *resp = calloc(1, sizeof *resp + limits->nodes_max * sizeof resp->connections[0]);
    if (resp == NULL) {
        return NULL;
    }
    resp->nodes_max = limits->nodes_max;
    resp->readers = calloc(limits->nodes_max, sizeof *resp->readers);
    if (resp->readers == NULL) {
        resp_destroy(resp);
        return NULL;
    }
    for (uint32_t i = 0; i < limits->nodes_max; i++) {
        struct ss_connection *connection = &resp->connections[i];
        connection->ahead_max = limits->requests_in_flight;
        connection->capacity = limits->requests_in_flight + 1;
        connection->requests = calloc(connection->capacity, sizeof *connection->requests);
        if (connection->requests == NULL) {
            resp_destroy(resp);
            return NULL;
        }
    }
    return resp;
}

static void connection_start(const struct ss_feed *feed, struct ss_connection *connection, uint32_t node) {
    uint32_t index = node * feed->threads + feed->thread;
    struct ss_tls_session *const *sessions = feed->batch->sessions;
    *connection = (struct ss_connection){
        .channel = {.socket = feed->sockets[index], .session = sessions != NULL ? sessions[index] : NULL},
        .node = node,
        .requests = connection->requests,
        .ahead_max = connection->ahead_max,
        .capacity = connection->capacity};
    ss_resp_head_start(&connection->reply);
    ss_socket_prepare(connection->channel.socket);
}

static void resp_begin(void *state, const struct ss_feed *feed) {
    struct resp *resp = state;
    resp->feed = feed;
    for (uint32_t i = 0; i < feed->nodes; i++) {
        connection_start(feed, &resp->connections[i], i);
    }
    for (uint32_t i = 0; i < feed->batch->layers_count; i++) {
        struct ss_layers *layers = &feed->batch->layers[i];
        struct ss_connection *connection = &resp->connections[layers->node];
        connection->reader = &resp->readers[layers->node];
        ss_layers_begin(connection->reader, feed, layers);
        connection->request = layers->request;
        connection->request_left = layers->request_size;
    }
}

static uint32_t resp_answers(const struct ss_batch *batch, uint32_t piece, uint32_t threads) {
    uint32_t answers = 0;
    for (uint32_t thread = 0; thread < threads; thread++) {
        answers += ss_run_of(batch, piece, thread, threads).slice_count > 0;
    }
    return answers;
}

void ss_connection_fail(const struct ss_feed *feed, struct ss_connection *connection, enum ss_result result) {
    connection->failed = 1;
    if (connection->reader != NULL) {
        connection->next_piece = ss_layers_position(connection->reader);
    }
    for (uint32_t i = 0; i < connection->count; i++) {
        uint32_t piece = connection->requests[(connection->head + i) % connection->capacity].piece;
        if (i == 0 || ss_feed_useful(feed, piece)) {
            ss_feed_fail(feed, piece, result, 1);
        }
    }
    for (; ss_connection_has_more(feed, connection); connection->next_piece++) {
        if (ss_run_of(feed->batch, connection->next_piece, feed->thread, feed->threads).slice_count > 0) {
            ss_feed_fail(feed, connection->next_piece, result, 1);
        }
    }
}

static enum ss_result socket_error(const struct ss_feed *feed, int error) {
    if (error == EBADF || error == ENOTSOCK || error == ENOMEM || error == ENOBUFS || error == EFAULT) {
        ss_feed_os_error(feed, error);
        return SS_OS_ERROR;
    }
    return error == EPROTO ? SS_PROTOCOL : SS_DISCONNECTED;
}

/* ---- Receives ------------------------------------------------------------------------------------------------ */

enum ss_source_step ss_connection_receive(const struct ss_feed *feed, struct ss_connection *connection,
                                          const struct iovec *parts, size_t count, uint32_t piece,
                                          size_t *received_out) {
    uint64_t begin = ss_feed_trace_begin(feed);
    ssize_t received = ss_channel_receive(&connection->channel, parts, count);
    *received_out = 0;
    if (received < 0) {
        if (errno == EINTR) {
            return SS_SOURCE_AGAIN;
        }
        if ((errno == EAGAIN || errno == EWOULDBLOCK) && !connection->send_failed) {
            return SS_SOURCE_WAIT;
        }
        ss_connection_fail(feed, connection, socket_error(feed, errno == EAGAIN ? EPIPE : errno));
        return SS_SOURCE_OVER;
    }
    if (received == 0) {
        ss_connection_fail(feed, connection, SS_DISCONNECTED);
        return SS_SOURCE_OVER;
    }
    connection->wire_bytes += (uint64_t)received;
    if (begin != 0) {
        ss_feed_trace_end(feed, piece, begin, (uint64_t)received);
    }
    *received_out = (size_t)received;
    return SS_SOURCE_AGAIN;
}

static void layers_count(struct ss_connection *connection) {
    connection->slices += connection->reader->slices;
    connection->body_bytes += connection->reader->body_bytes;
}

/* The answer to a request for layers has ended, or failed. */
static enum ss_source_step layers_end(const struct ss_feed *feed, struct ss_connection *connection,
                                      enum ss_layers_status status) {
    if (status == SS_LAYERS_INVALID) {
        ss_connection_fail(feed, connection, SS_PROTOCOL);
        return SS_SOURCE_OVER;
    }
    layers_count(connection);
    connection->reader = NULL;
    connection->next_piece = status == SS_LAYERS_REFUSED ? 0 : feed->batch->piece_count;
    return SS_SOURCE_AGAIN;
}

/* One receive of this answer: tables and pieces into place, the rest into a buffer, which is large for numbers. */
static enum ss_source_step layers_receive(const struct ss_feed *feed, struct ss_connection *connection) {
    struct ss_layers_reader *reader = connection->reader;
    uint8_t small[NUMBERS_BYTES];
    struct iovec parts[PARTS_MAX + 1];
    int whole;
    size_t direct = 0;
    size_t received;
    size_t count = ss_layers_parts(reader, parts, PARTS_MAX, SS_RECEIVE_BYTES_MAX, &whole);
    for (size_t i = 0; i < count; i++) {
        direct += parts[i].iov_len;
    }
    if (whole) {
        parts[count] = (struct iovec){.iov_base = small, .iov_len = count > 0 ? SS_HEAD_BYTES : sizeof small};
        count++;
    }
    uint32_t piece = ss_layers_position(reader);
    enum ss_source_step step = ss_connection_receive(feed, connection, parts, count,
                                                     piece < feed->batch->piece_count ? piece : piece - 1, &received);
    if (received == 0) {
        return step;
    }
    size_t placed = received < direct ? received : direct;
    enum ss_layers_status status = ss_layers_placed(reader, placed);
    if (status == SS_LAYERS_MORE) {
        status = ss_layers_take(reader, small, received - placed);
    }
    return status == SS_LAYERS_MORE ? SS_SOURCE_AGAIN : layers_end(feed, connection, status);
}

/* ---- Turns --------------------------------------------------------------------------------------------------- */

static int is_owed(const struct ss_connection *connection) {
    return connection->count > 0 || connection->reader != NULL;
}

/* Returns whether the connection has finished all its work, or all useful work. */
static int connection_is_finished(const struct ss_feed *feed, struct ss_connection *connection) {
    if (ss_feed_aborted(feed)) {
        return 1;
    }
    if (connection->reader != NULL) {
        /* The first layer has a piece of each chunk, and usefulness ends at a chunk of each group. */
        const struct ss_layers *layers = connection->reader->layers;
        uint32_t key = 0;
        while (key < layers->keys && !ss_feed_useful(feed, layers->pieces[key])) {
            key++;
        }
        return key == layers->keys;
    }
    if (connection->count > 0 && !ss_feed_broken(feed)) {
        return 0;
    }
    for (uint32_t i = 0; i < connection->count; i++) {
        if (ss_feed_useful(feed, connection->requests[(connection->head + i) % connection->capacity].piece)) {
            return 0;
        }
    }
    return !ss_connection_has_more(feed, connection);
}

/* One turn of a connection that is not finished. */
static enum ss_source_step connection_step(const struct ss_feed *feed, struct ss_connection *connection) {
    do {
        ss_requests_send(connection);
    } while (connection->reader == NULL && ss_requests_fill(feed, connection) > 0);
    if (!is_owed(connection)) {
        return SS_SOURCE_AGAIN; /* the pieces that were left had no run for this connection */
    }
    return connection->reader != NULL ? layers_receive(feed, connection) : ss_answers_receive(feed, connection);
}

static void connection_end(const struct ss_feed *feed, struct ss_connection *connection) {
    connection->over = 1;
    if (connection->failed || is_owed(connection) || ss_requests_left(connection)) {
        ss_feed_out_of_sync(feed);
        ss_socket_disconnect(connection->channel.socket);
    }
    if (connection->reader != NULL) {
        layers_count(connection);
    }
    ss_feed_count(feed, connection->slices, connection->wire_bytes, connection->body_bytes);
}

static enum ss_source_step resp_step(void *state) {
    struct resp *resp = state;
    const struct ss_feed *feed = resp->feed;
    uint32_t running = 0;
    int again = 0;
    for (uint32_t i = 0; i < feed->nodes; i++) {
        struct ss_connection *connection = &resp->connections[i];
        if (connection->over) {
            continue;
        }
        enum ss_source_step step = SS_SOURCE_OVER;
        if (!connection_is_finished(feed, connection)) {
            step = connection_step(feed, connection);
        }
        if (step == SS_SOURCE_OVER) {
            connection_end(feed, connection);
            continue;
        }
        running++;
        again |= step == SS_SOURCE_AGAIN;
    }
    return running == 0 ? SS_SOURCE_OVER : again ? SS_SOURCE_AGAIN : SS_SOURCE_WAIT;
}

/* Watches connections that are not over and have outstanding answers. */
static uint32_t resp_watch(void *state, struct pollfd *polled) {
    struct resp *resp = state;
    uint32_t count = 0;
    for (uint32_t i = 0; i < resp->feed->nodes; i++) {
        struct ss_connection *connection = &resp->connections[i];
        if (!connection->over && is_owed(connection)) {
            int sending = ss_requests_left(connection);
            /* Again before each wait: the kernel turns quick acknowledgement off automatically. */
            ss_socket_prepare(connection->channel.socket);
            polled[count++] = (struct pollfd){.fd = connection->channel.socket,
                                              .events = ss_channel_events(&connection->channel, sending)};
        }
    }
    return count;
}

const struct ss_source ss_source_resp = {
    .takes = resp_takes,
    .answers = resp_answers,
    .create = resp_create,
    .destroy = resp_destroy,
    .begin = resp_begin,
    .step = resp_step,
    .watch = resp_watch,
};
