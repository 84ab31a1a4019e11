/* SPDX-License-Identifier: Apache-2.0 */
/*
 * resp.c - pieces at storage servers: range requests out, stored bytes straight into the decompression buffer
 *
 * Each thread drives one connection to each node; a single storage server is one node. On each connection it requests
 * its run of the slices of every piece of the node, several requests ahead, and reads the answers, which arrive in
 * order. A body is received into the decompression buffer: one system call receives the rest of the body in place and
 * at most HEAD_BYTES behind it, the end of this answer and the head of the next, into a small buffer. Only the few
 * bytes of the next body in this buffer are copied. Alternatively, one request on one connection asks for the whole
 * batch (layers.c); if the server does not support it, the pieces are requested by ranges.
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
#include <string.h>
#include <sys/uio.h>

#include "net/channel.h"
#include "net/resp.h"
#include "sources/layers.h"
#include "sources/source.h"

/* Small, since bytes of a body in it are copied; more than CR LF and the longest expected "$n" head. */
enum { HEAD_BYTES = 64 };

/* For layers: bytes of the numbers at the beginning, and most parts that one system call fills. */
enum { NUMBERS_BYTES = 4096, PARTS_MAX = 64 };

/*
 * Most bytes of one system call. Each call also updates the sender's window, and on loopback does some of its work;
 * fewer calls cost less, down to this size (native/decisions.md).
 */
#define RECEIVE_BYTES_MAX ((size_t)4 << 20)

enum { OUTPUT_BYTES = 16 * SS_RESP_REQUEST_MAX };

enum phase { PHASE_HEAD, PHASE_BODY, PHASE_TAIL };

enum step { STEP_AGAIN, STEP_WAIT, STEP_FINISHED };

/* The run of a piece's slices that one connection fetches. 'slice_count' may be 0. */
struct run {
    uint64_t first_byte; /* of the body */
    uint64_t bytes;
    uint64_t decoded_before; /* bytes of symbols before its first slice */
    uint32_t slice_first;    /* index in the batch */
    uint32_t slice_count;
};

/* A requested range; or the ASKING before it, which has its own answer. */
struct request {
    struct run run;
    uint32_t piece;
    uint32_t asking;
};

struct connection {
    struct ss_channel channel;
    uint32_t node;
    int over;                 /* no work is left for it in this batch */
    int failed;               /* since it broke, or is out of step */
    struct request *requests; /* a ring, oldest first: asked for, not answered */
    uint32_t ahead_max;       /* ranges asked for ahead */
    uint32_t capacity;        /* one more, for the last one's ASKING */
    uint32_t head;
    uint32_t count;
    uint32_t next_piece; /* to ask for */

    struct ss_layers_reader
        *reader;            /* of the answer to the one request that the batch is; NULL: ranges are asked for */
    const uint8_t *request; /* unsent rest of this request */
    uint64_t request_left;

    uint8_t output[OUTPUT_BYTES];
    size_t output_begin;
    size_t output_end;
    int send_failed; /* the server does not read on, but may have answered before */

    enum phase phase; /* of the oldest request's answer */
    struct ss_resp_head reply;
    uint64_t body_length; /* as answered */
    uint64_t body_received;
    uint32_t tail_received;    /* of CR LF */
    struct ss_arrival arrival; /* of the run's slices */

    uint64_t wire_bytes; /* received in this batch */
    uint64_t body_bytes;
    uint64_t slices;
};

struct resp {
    const struct ss_feed *feed;
    struct ss_layers_reader reader;
    uint32_t nodes_max;
    struct connection connections[];
};

static int resp_takes(const struct ss_piece *piece) {
    return ss_piece_origin(piece) == SS_ORIGIN_SERVER;
}

static void resp_destroy(void *state) {
    struct resp *resp = state;
    for (uint32_t i = 0; i < resp->nodes_max; i++) {
        free(resp->connections[i].requests);
    }
    free(resp);
}

static void *resp_create(const struct ss_source_limits *limits) {
    struct resp *resp = calloc(1, sizeof *resp + limits->nodes_max * sizeof resp->connections[0]);
    if (resp == NULL) {
        return NULL;
    }
    resp->nodes_max = limits->nodes_max;
    for (uint32_t i = 0; i < limits->nodes_max; i++) {
        struct connection *connection = &resp->connections[i];
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

static void connection_start(const struct ss_feed *feed, struct connection *connection, uint32_t node) {
    uint32_t index = node * feed->threads + feed->thread;
    struct ss_tls_session *const *sessions = feed->batch->sessions;
    connection->channel.socket = feed->sockets[index];
    connection->channel.session = sessions != NULL ? sessions[index] : NULL;
    connection->node = node;
    connection->over = 0;
    connection->failed = 0;
    connection->head = 0;
    connection->count = 0;
    connection->next_piece = 0;
    connection->output_begin = 0;
    connection->output_end = 0;
    connection->send_failed = 0;
    connection->reader = NULL;
    connection->request_left = 0;
    connection->phase = PHASE_HEAD;
    connection->wire_bytes = 0;
    connection->body_bytes = 0;
    connection->slices = 0;
    ss_resp_head_start(&connection->reply);
    ss_socket_prepare(connection->channel.socket);
}

static void resp_begin(void *state, const struct ss_feed *feed) {
    struct resp *resp = state;
    resp->feed = feed;
    for (uint32_t i = 0; i < feed->nodes; i++) {
        connection_start(feed, &resp->connections[i], i);
    }
    const struct ss_layers *layers = feed->batch->layers;
    if (layers != NULL && feed->nodes > 0) {
        struct connection *connection = &resp->connections[0];
        ss_layers_begin(&resp->reader, feed);
        connection->reader = &resp->reader;
        connection->request = layers->request;
        connection->request_left = layers->request_size;
    }
}

/*
 * A slice belongs to the run with its middle byte, so the runs are contiguous, cover all slices, and differ by at most
 * a slice. The assignment of runs to connections rotates from piece to piece, so that pieces with fewer slices than
 * connections are spread over all connections.
 */
static struct run run_of(const struct ss_batch *batch, uint32_t piece_index, uint32_t thread, uint32_t threads) {
    const struct ss_piece *piece = &batch->pieces[piece_index];
    uint64_t part = (thread + piece_index) % threads;
    uint64_t begin = piece->body_length * part / threads; /* body_length is under 2^63 / 256: it fits a buffer */
    uint64_t end = piece->body_length * (part + 1) / threads;
    struct run run = {.slice_first = piece->slice_first};
    uint64_t decoded = 0;
    for (uint32_t i = 0; i < piece->slice_count; i++) {
        const struct ss_slice *slice = &batch->slices[piece->slice_first + i];
        uint64_t stored = (uint64_t)slice->scales_length + slice->encoded_length;
        uint64_t middle = slice->offset + stored / 2;
        if (middle >= end) {
            break;
        }
        if (middle >= begin) {
            if (run.slice_count == 0) {
                run.slice_first = piece->slice_first + i;
                run.first_byte = slice->offset;
                run.decoded_before = decoded;
            }
            run.slice_count++;
            run.bytes += stored;
        }
        decoded += slice->decoded_length;
    }
    return run;
}

static uint32_t resp_answers(const struct ss_batch *batch, uint32_t piece, uint32_t threads) {
    uint32_t answers = 0;
    for (uint32_t thread = 0; thread < threads; thread++) {
        answers += run_of(batch, piece, thread, threads).slice_count > 0;
    }
    return answers;
}

static struct request *oldest(struct connection *connection) {
    return &connection->requests[connection->head];
}

/* Goes past the pieces that are not for this connection, or of no use any more. Returns whether any is to be asked for.
 */
static int connection_has_more(const struct ss_feed *feed, struct connection *connection) {
    for (; connection->next_piece < feed->batch->piece_count; connection->next_piece++) {
        const struct ss_piece *piece = &feed->batch->pieces[connection->next_piece];
        if (resp_takes(piece) && piece->node == connection->node && ss_feed_useful(feed, connection->next_piece)) {
            return 1;
        }
    }
    return 0;
}

/* The connection is lost: fails its outstanding and future pieces, unless they are useless. */
static void connection_fail(const struct ss_feed *feed, struct connection *connection, enum ss_result result) {
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
    for (; connection_has_more(feed, connection); connection->next_piece++) {
        if (run_of(feed->batch, connection->next_piece, feed->thread, feed->threads).slice_count > 0) {
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

/* ---- Requests ------------------------------------------------------------------------------------------------ */

static void request_note(struct connection *connection, struct request request) {
    connection->requests[(connection->head + connection->count++) % connection->capacity] = request;
}

/* Appends a request for one run; SS_RESP_REQUEST_MAX has room for ASKING, too. */
static void request_append(const struct ss_feed *feed, struct connection *connection, uint32_t index, struct run run) {
    const struct ss_piece *piece = &feed->batch->pieces[index];
    if (piece->asking) {
        connection->output_end += ss_resp_asking(connection->output + connection->output_end);
        request_note(connection, (struct request){.piece = index, .asking = 1});
    }
    uint64_t first = piece->record_offset + run.first_byte;
    connection->output_end += ss_resp_getrange(connection->output + connection->output_end, piece->key,
                                               piece->key_length, first, first + run.bytes - 1);
    request_note(connection, (struct request){.run = run, .piece = index});
}

/* Appends requests for this connection's runs while they are useful and fit; returns their number. */
static uint32_t requests_fill(const struct ss_feed *feed, struct connection *connection) {
    uint32_t added = 0;
    if (connection->output_begin == connection->output_end) {
        connection->output_begin = 0;
        connection->output_end = 0;
    }
    while (connection->count < connection->ahead_max && connection->output_end + SS_RESP_REQUEST_MAX <= OUTPUT_BYTES &&
           connection_has_more(feed, connection)) {
        uint32_t index = connection->next_piece++;
        struct run run = run_of(feed->batch, index, feed->thread, feed->threads);
        if (run.slice_count > 0) {
            request_append(feed, connection, index, run);
            added++;
        }
    }
    return added;
}

static int is_sending(const struct connection *connection) {
    return connection->request_left > 0 || connection->output_begin < connection->output_end;
}

static void requests_send(struct connection *connection) {
    while (is_sending(connection) && !connection->send_failed) {
        int layers = connection->request_left > 0;
        const struct iovec part = {
            .iov_base = layers ? (void *)(uintptr_t)connection->request : connection->output + connection->output_begin,
            .iov_len = layers ? connection->request_left : connection->output_end - connection->output_begin};
        ssize_t sent = ss_channel_send(&connection->channel, &part, 1);
        if (sent >= 0 && layers) {
            connection->request += sent;
            connection->request_left -= (uint64_t)sent;
        } else if (sent >= 0) {
            connection->output_begin += (size_t)sent;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return;
        } else if (errno != EINTR) {
            connection->send_failed = 1; /* earlier answers are still read, and decide the results */
        }
    }
}

/* ---- Answers ------------------------------------------------------------------------------------------------- */

/* Passes on every slice whose last byte has arrived. */
static void slices_pass(const struct ss_feed *feed, struct connection *connection) {
    const struct request *request = oldest(connection);
    if (connection->body_length == request->run.bytes) { /* a shorter answer is not worth decoding */
        connection->slices += ss_feed_arrived(feed, request->piece, &connection->arrival, connection->body_received);
    }
}

/* Processes the head of an answer. Returns 0 if it breaks the connection. */
static int answer_head(const struct ss_feed *feed, struct connection *connection) {
    const struct request *request = oldest(connection);
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
        connection->phase = connection->body_length > 0 ? PHASE_BODY : PHASE_TAIL;
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
    connection->phase = PHASE_TAIL;
    connection->tail_received = 2; /* these answers have neither body nor tail */
    return 1;
}

/* It counts as work of its piece, so that no piece is done before its last CR LF. */
static void answer_end(const struct ss_feed *feed, struct connection *connection) {
    const struct request *request = oldest(connection);
    if (!request->asking) {
        ss_feed_answered(feed, request->piece);
    }
    connection->head = (connection->head + 1) % connection->capacity;
    connection->count--;
    connection->phase = PHASE_HEAD;
    ss_resp_head_start(&connection->reply);
}

static uint8_t *body_place(const struct ss_feed *feed, struct connection *connection) {
    const struct request *request = oldest(connection);
    return ss_feed_place(feed, request->piece) + request->run.first_byte + connection->body_received;
}

/* 'size' more bytes of the body are in place. */
static void body_advance(const struct ss_feed *feed, struct connection *connection, uint64_t size) {
    connection->body_received += size;
    connection->body_bytes += size;
    slices_pass(feed, connection);
    if (connection->body_received == connection->body_length) {
        connection->phase = PHASE_TAIL;
    }
}

/* Processes 'size' bytes that are not in place. Returns 0 if the server violated the protocol. */
static int bytes_take(const struct ss_feed *feed, struct connection *connection, const uint8_t *data, size_t size) {
    while (size > 0) {
        size_t taken = 0;
        if (connection->count == 0) {
            return 0; /* an answer without a request */
        }
        if (connection->phase == PHASE_HEAD) {
            enum ss_resp_status status = ss_resp_head_feed(&connection->reply, data, size, &taken);
            if (status == SS_RESP_INVALID || (status == SS_RESP_DONE && !answer_head(feed, connection))) {
                return 0;
            }
        } else if (connection->phase == PHASE_BODY) {
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
        if (connection->phase == PHASE_TAIL && connection->tail_received == 2) {
            answer_end(feed, connection);
        }
        data += taken;
        size -= taken;
    }
    return 1;
}

/* Receives into the parts, for a piece; '*received' is the number of bytes. STEP_AGAIN if it is not 0. */
static enum step connection_receive(const struct ss_feed *feed, struct connection *connection,
                                    const struct iovec *parts, size_t count, uint32_t piece, size_t *received_out) {
    uint64_t begin = ss_feed_trace_begin(feed);
    ssize_t received = ss_channel_receive(&connection->channel, parts, count);
    *received_out = 0;
    if (received < 0) {
        if (errno == EINTR) {
            return STEP_AGAIN;
        }
        if ((errno == EAGAIN || errno == EWOULDBLOCK) && !connection->send_failed) {
            return STEP_WAIT;
        }
        connection_fail(feed, connection, socket_error(feed, errno == EAGAIN ? EPIPE : errno));
        return STEP_FINISHED;
    }
    if (received == 0) {
        connection_fail(feed, connection, SS_DISCONNECTED);
        return STEP_FINISHED;
    }
    connection->wire_bytes += (uint64_t)received;
    if (begin != 0) {
        ss_feed_trace_end(feed, piece, begin, (uint64_t)received);
    }
    *received_out = (size_t)received;
    return STEP_AGAIN;
}

/* One receive: the rest of a body into place, what follows it into the small buffer. */
static enum step answers_receive(const struct ss_feed *feed, struct connection *connection) {
    uint8_t small[HEAD_BYTES];
    struct iovec parts[2];
    size_t count = 0;
    size_t direct = 0;
    size_t received;
    if (connection->phase == PHASE_BODY) {
        uint64_t left = connection->body_length - connection->body_received;
        direct = left < RECEIVE_BYTES_MAX ? (size_t)left : RECEIVE_BYTES_MAX;
        parts[count++] = (struct iovec){.iov_base = body_place(feed, connection), .iov_len = direct};
    }
    if (direct < RECEIVE_BYTES_MAX) {
        parts[count++] = (struct iovec){.iov_base = small, .iov_len = sizeof small};
    }
    enum step step = connection_receive(feed, connection, parts, count, oldest(connection)->piece, &received);
    size_t placed = received < direct ? received : direct;
    if (placed > 0) {
        body_advance(feed, connection, placed);
    }
    if (!bytes_take(feed, connection, small, received - placed)) {
        connection_fail(feed, connection, SS_PROTOCOL);
        return STEP_FINISHED;
    }
    return step;
}

static void layers_count(struct connection *connection) {
    connection->slices += connection->reader->slices;
    connection->body_bytes += connection->reader->body_bytes;
}

/* The answer to the batch's single request has ended, or failed. */
static enum step layers_end(const struct ss_feed *feed, struct connection *connection, enum ss_layers_status status) {
    if (status == SS_LAYERS_INVALID) {
        connection_fail(feed, connection, SS_PROTOCOL);
        return STEP_FINISHED;
    }
    layers_count(connection);
    connection->reader = NULL;
    connection->next_piece = status == SS_LAYERS_REFUSED ? 0 : feed->batch->piece_count;
    return STEP_AGAIN;
}

/* One receive of this answer: tables and pieces into place, the rest into a buffer, which is large for numbers. */
static enum step layers_receive(const struct ss_feed *feed, struct connection *connection) {
    struct ss_layers_reader *reader = connection->reader;
    uint8_t small[NUMBERS_BYTES];
    struct iovec parts[PARTS_MAX + 1];
    int whole;
    size_t direct = 0;
    size_t received;
    size_t count = ss_layers_parts(reader, parts, PARTS_MAX, RECEIVE_BYTES_MAX, &whole);
    for (size_t i = 0; i < count; i++) {
        direct += parts[i].iov_len;
    }
    if (whole) {
        parts[count] = (struct iovec){.iov_base = small, .iov_len = count > 0 ? HEAD_BYTES : sizeof small};
        count++;
    }
    uint32_t piece = ss_layers_position(reader);
    enum step step = connection_receive(feed, connection, parts, count,
                                        piece < feed->batch->piece_count ? piece : piece - 1, &received);
    if (received == 0) {
        return step;
    }
    size_t placed = received < direct ? received : direct;
    enum ss_layers_status status = ss_layers_placed(reader, placed);
    if (status == SS_LAYERS_MORE) {
        status = ss_layers_take(reader, small, received - placed);
    }
    return status == SS_LAYERS_MORE ? STEP_AGAIN : layers_end(feed, connection, status);
}

/* ---- Turns --------------------------------------------------------------------------------------------------- */

static int is_owed(const struct connection *connection) {
    return connection->count > 0 || connection->reader != NULL;
}

/* Returns whether the connection has finished all its work, or all useful work. */
static int connection_is_finished(const struct ss_feed *feed, struct connection *connection) {
    if (ss_feed_aborted(feed)) {
        return 1;
    }
    if (connection->reader != NULL) {
        return !ss_feed_useful(feed, 0); /* the first chunk: if it is useless, all later ones are, too */
    }
    if (connection->count > 0 && !ss_feed_broken(feed)) {
        return 0;
    }
    for (uint32_t i = 0; i < connection->count; i++) {
        if (ss_feed_useful(feed, connection->requests[(connection->head + i) % connection->capacity].piece)) {
            return 0;
        }
    }
    return !connection_has_more(feed, connection);
}

/* One turn of a connection that is not finished. */
static enum step connection_step(const struct ss_feed *feed, struct connection *connection) {
    do {
        requests_send(connection);
    } while (connection->reader == NULL && requests_fill(feed, connection) > 0);
    if (!is_owed(connection)) {
        return STEP_AGAIN; /* the pieces that were left had no run for this connection */
    }
    return connection->reader != NULL ? layers_receive(feed, connection) : answers_receive(feed, connection);
}

static void connection_end(const struct ss_feed *feed, struct connection *connection) {
    connection->over = 1;
    if (connection->failed || is_owed(connection) || is_sending(connection)) {
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
        struct connection *connection = &resp->connections[i];
        if (connection->over) {
            continue;
        }
        enum step step = STEP_FINISHED;
        if (!connection_is_finished(feed, connection)) {
            step = connection_step(feed, connection);
        }
        if (step == STEP_FINISHED) {
            connection_end(feed, connection);
            continue;
        }
        running++;
        again |= step == STEP_AGAIN;
    }
    return running == 0 ? SS_SOURCE_OVER : again ? SS_SOURCE_AGAIN : SS_SOURCE_WAIT;
}

/* Watches connections that are not over and have outstanding answers. */
static uint32_t resp_watch(void *state, struct pollfd *polled) {
    struct resp *resp = state;
    uint32_t count = 0;
    for (uint32_t i = 0; i < resp->feed->nodes; i++) {
        struct connection *connection = &resp->connections[i];
        if (!connection->over && is_owed(connection)) {
            int sending = is_sending(connection);
            /* Again before each wait: the kernel turns quick acknowledgement off automatically. */
            ss_socket_prepare(connection->channel.socket);
            polled[count++] = (struct pollfd){.fd = connection->channel.socket,
                                              .events = ss_channel_events(&connection->channel, sending)};
        }
    }
    return count;
}

const struct ss_source ss_source_resp = {
    .name = "resp",
    .takes = resp_takes,
    .answers = resp_answers,
    .create = resp_create,
    .destroy = resp_destroy,
    .begin = resp_begin,
    .step = resp_step,
    .watch = resp_watch,
};
