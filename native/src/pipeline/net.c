/* SPDX-License-Identifier: Apache-2.0 */
/*
 * net.c - the network stage: range requests out, stored bytes straight into the decompression buffer
 *
 * One thread drives one connection to each node; a storage server of its own is one node. On each it asks for its run
 * of the slices of every chunk that the node has, several requests ahead, and reads the answers, which come in order. A
 * body is received where it will be decompressed: one system call takes what is left of the body into place and at most
 * HEAD_BYTES behind it, the end of this answer and the head of the next, into a small buffer. What little of the next
 * body comes along is copied.
 *
 * Failure. What fails is the chunk of the oldest answer that is due; chunks before it have all their bytes from this
 * connection. A well-formed refusal leaves the connection in step, so after one the answers that are under way are
 * read and dropped and the connection can be used again. Anything else breaks it. A connection that is left with half
 * an answer is disconnected, so that no later reader can take that half for an answer of its own.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "net/channel.h"
#include "net/resp.h"
#include "pipeline/internal.h"

/* Small, since what it takes of a body is copied; more than CR LF and the longest "$n" head that is expected. */
enum { HEAD_BYTES = 64 };

/*
 * One system call's share. Each call also tells the sender that there is room again, and on loopback does some of its
 * work; fewer calls cost less, down to this size (docs/decisions.md).
 */
#define RECEIVE_BYTES_MAX ((size_t)4 << 20)

/* Slices handed to the next stage at a time, and requests' bytes sent at a time. */
enum { PUSH_MAX = 64, OUTPUT_BYTES = 16 * SS_RESP_REQUEST_MAX };

enum phase { PHASE_HEAD, PHASE_BODY, PHASE_TAIL };

/* What a step of the loop came to. */
enum step { STEP_AGAIN, STEP_WAIT, STEP_IDLE, STEP_FINISHED };

/* A range that was asked for; or the word before it, which is answered for itself. */
struct request {
    struct ss_run run;
    uint32_t chunk;
    uint32_t asking;
};

struct ss_connection {
    struct ss_channel channel;
    uint32_t node;
    int over;                 /* nothing more is to be done on it in this round */
    int failed;               /* since it broke, or is out of step */
    struct request *requests; /* a ring, oldest first: asked for, not answered */
    uint32_t ahead_max;       /* ranges asked for ahead */
    uint32_t capacity;        /* one more, for the last one's ASKING */
    uint32_t head;
    uint32_t count;
    uint32_t next_chunk; /* to ask for */

    uint8_t output[OUTPUT_BYTES];
    size_t output_begin;
    size_t output_end;
    int send_failed; /* the server takes no more, but may have answered before */

    enum phase phase; /* of the oldest request's answer */
    struct ss_resp_head reply;
    uint64_t body_length; /* as answered */
    uint64_t body_received;
    uint32_t tail_received;  /* of CR LF */
    uint32_t slices_passed;  /* of the run */
    uint64_t stored_passed;  /* bytes of the run's slices that were passed on */
    uint64_t decoded_passed; /* bytes of symbols of the same, from the chunk's first */

    uint64_t wire_bytes; /* received in this round */
    uint64_t body_bytes;
    uint64_t slices;
};

struct ss_connection *ss_connections_create(uint32_t count, uint32_t requests_in_flight) {
    struct ss_connection *connections = calloc(count, sizeof *connections);
    if (connections == NULL) {
        return NULL;
    }
    for (uint32_t i = 0; i < count; i++) {
        connections[i].ahead_max = requests_in_flight;
        connections[i].capacity = requests_in_flight + 1;
        connections[i].requests = calloc(connections[i].capacity, sizeof *connections[i].requests);
        if (connections[i].requests == NULL) {
            ss_connections_destroy(connections, count);
            return NULL;
        }
    }
    return connections;
}

void ss_connections_destroy(struct ss_connection *connections, uint32_t count) {
    for (uint32_t i = 0; connections != NULL && i < count; i++) {
        free(connections[i].requests);
    }
    free(connections);
}

static void connection_start(struct ss_worker *worker, uint32_t node) {
    struct ss_connection *connection = &worker->connections[node];
    const struct ss_fetch *fetch = &worker->pipeline->fetch;
    uint32_t index = node * fetch->connections + worker->index;
    struct ss_tls_session *const *sessions = fetch->round->sessions;
    connection->channel.socket = fetch->sockets[index];
    connection->channel.session = sessions != NULL ? sessions[index] : NULL;
    connection->node = node;
    connection->over = 0;
    connection->failed = 0;
    connection->head = 0;
    connection->count = 0;
    connection->next_chunk = 0;
    connection->output_begin = 0;
    connection->output_end = 0;
    connection->send_failed = 0;
    connection->phase = PHASE_HEAD;
    connection->wire_bytes = 0;
    connection->body_bytes = 0;
    connection->slices = 0;
    ss_resp_head_start(&connection->reply);
    ss_socket_prepare(connection->channel.socket);
}

static struct request *oldest(struct ss_connection *connection) {
    return &connection->requests[connection->head];
}

/* The chunk that a failure of the connection itself counts against. */
static void connection_fail(struct ss_worker *worker, struct ss_connection *connection, enum ss_result result) {
    struct ss_fetch *fetch = &worker->pipeline->fetch;
    uint32_t chunk = connection->count > 0 ? oldest(connection)->chunk : connection->next_chunk;
    connection->failed = 1;
    if (chunk < fetch->round->chunk_count) {
        ss_fetch_fail(worker->pipeline, chunk, result, 1);
    }
}

static enum ss_result socket_error(struct ss_fetch *fetch, int error) {
    if (error == EBADF || error == ENOTSOCK || error == ENOMEM || error == ENOBUFS || error == EFAULT) {
        atomic_store(&fetch->os_error, error);
        return SS_OS_ERROR;
    }
    return error == EPROTO ? SS_PROTOCOL : SS_DISCONNECTED;
}

/* ---- Requests ------------------------------------------------------------------------------------------------ */

static void request_note(struct ss_connection *connection, struct request request) {
    connection->requests[(connection->head + connection->count++) % connection->capacity] = request;
}

/* Appends a request for one run; SS_RESP_REQUEST_MAX has room for ASKING, too. */
static void request_append(struct ss_worker *worker, struct ss_connection *connection, uint32_t index,
                           struct ss_run run) {
    const struct ss_chunk *chunk = &worker->pipeline->fetch.round->chunks[index];
    if (chunk->asking) {
        connection->output_end += ss_resp_asking(connection->output + connection->output_end);
        request_note(connection, (struct request){.chunk = index, .asking = 1});
    }
    uint64_t first = chunk->record_offset + run.first_byte;
    connection->output_end += ss_resp_getrange(connection->output + connection->output_end, chunk->key,
                                               chunk->key_length, first, first + run.bytes - 1);
    request_note(connection, (struct request){.run = run, .chunk = index});
}

/* Appends requests for this connection's runs while they are wanted and there is room for them; how many. */
static uint32_t requests_fill(struct ss_worker *worker, struct ss_connection *connection) {
    struct ss_fetch *fetch = &worker->pipeline->fetch;
    uint32_t sound = atomic_load_explicit(&fetch->first_failed, memory_order_relaxed);
    uint32_t open = atomic_load(&fetch->open_chunks);
    uint32_t chunks = open < sound ? open : sound;
    uint32_t added = 0;
    if (connection->output_begin == connection->output_end) {
        connection->output_begin = 0;
        connection->output_end = 0;
    }
    while (connection->next_chunk < chunks && connection->count < connection->ahead_max &&
           connection->output_end + SS_RESP_REQUEST_MAX <= OUTPUT_BYTES) {
        uint32_t index = connection->next_chunk++;
        if (fetch->round->chunks[index].node != connection->node) {
            continue;
        }
        struct ss_run run = ss_chunk_run(fetch->round, index, worker->index, fetch->connections);
        if (run.slice_count == 0) {
            continue;
        }
        enum ss_result mapped = ss_chunk_map(worker->pipeline, index);
        if (mapped != SS_OK) {
            ss_fetch_fail(worker->pipeline, index, mapped, 0);
            ss_fetch_wake_net(worker->pipeline);
            break;
        }
        request_append(worker, connection, index, run);
        added++;
    }
    return added;
}

static void requests_send(struct ss_connection *connection) {
    while (connection->output_begin < connection->output_end && !connection->send_failed) {
        const struct iovec part = {.iov_base = connection->output + connection->output_begin,
                                   .iov_len = connection->output_end - connection->output_begin};
        ssize_t sent = ss_channel_send(&connection->channel, &part, 1);
        if (sent >= 0) {
            connection->output_begin += (size_t)sent;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return;
        } else if (errno != EINTR) {
            connection->send_failed = 1; /* what was answered before is still read: that has the last word */
        }
    }
}

/* ---- Answers ------------------------------------------------------------------------------------------------- */

/* Hands whole slices on, unless they have to wait for the rest of their chunk. */
static void slices_push(struct ss_worker *worker, struct ss_connection *connection, const struct ss_item *items,
                        uint32_t count) {
    struct ss_pipeline *pipeline = worker->pipeline;
    connection->slices += count;
    if (count > 0 && pipeline->options.chunked_pipeline) {
        atomic_fetch_add(&pipeline->fetch.work, count);
        ss_queue_push(&pipeline->decompress_queue, items, count);
    }
}

/* Passes on every slice whose last byte has arrived. */
static void slices_pass(struct ss_worker *worker, struct ss_connection *connection) {
    struct ss_fetch *fetch = &worker->pipeline->fetch;
    const struct request *request = oldest(connection);
    struct ss_item items[PUSH_MAX];
    uint32_t count = 0;
    if (connection->body_length != request->run.bytes) {
        return; /* a short answer: not worth decoding */
    }
    while (connection->slices_passed < request->run.slice_count) {
        uint32_t index = request->run.slice_first + connection->slices_passed;
        const struct ss_slice *slice = &fetch->round->slices[index];
        uint64_t end = connection->stored_passed + slice->scales_length + slice->encoded_length;
        if (end > connection->body_received) {
            break;
        }
        items[count++] =
            (struct ss_item){.decoded_before = connection->decoded_passed, .chunk = request->chunk, .slice = index};
        connection->stored_passed = end;
        connection->decoded_passed += slice->decoded_length;
        connection->slices_passed++;
        if (count == PUSH_MAX) {
            slices_push(worker, connection, items, count);
            count = 0;
        }
    }
    slices_push(worker, connection, items, count);
}

/* Takes the head of an answer. Returns 0 where it breaks the connection. */
static int answer_head(struct ss_worker *worker, struct ss_connection *connection) {
    const struct request *request = oldest(connection);
    uint64_t expected = request->run.bytes;
    if (request->asking && connection->reply.kind != SS_RESP_SIMPLE && connection->reply.kind != SS_RESP_ERROR) {
        return 0;
    }
    connection->body_length = 0;
    connection->body_received = 0;
    connection->tail_received = 0;
    connection->slices_passed = 0;
    connection->stored_passed = 0;
    connection->decoded_passed = request->run.decoded_before;
    switch (connection->reply.kind) {
    case SS_RESP_BULK:
        if (connection->reply.length > expected) {
            return 0;
        }
        connection->body_length = connection->reply.length;
        connection->phase = connection->body_length > 0 ? PHASE_BODY : PHASE_TAIL;
        if (connection->body_length < expected) {
            ss_fetch_fail(worker->pipeline, request->chunk, SS_NOT_FOUND, 0);
        }
        return 1;
    case SS_RESP_NULL:
        ss_fetch_fail(worker->pipeline, request->chunk, SS_NOT_FOUND, 0);
        break;
    case SS_RESP_ERROR:
        ss_fetch_refused(worker->pipeline, request->chunk, connection->reply.text, connection->reply.text_length);
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

/* An answer is whole. It counts as work of its chunk, so that no chunk is done before its last CR LF. */
static void answer_end(struct ss_worker *worker, struct ss_connection *connection) {
    const struct request *request = oldest(connection);
    if (!request->asking) {
        ss_chunk_part_done(worker->pipeline, request->chunk);
        if (!worker->pipeline->options.chunked_pipeline) {
            ss_barrier_leave(worker->pipeline, SS_STAGE_NET, request->chunk);
        }
    }
    connection->head = (connection->head + 1) % connection->capacity;
    connection->count--;
    connection->phase = PHASE_HEAD;
    ss_resp_head_start(&connection->reply);
}

static uint8_t *body_place(struct ss_worker *worker, struct ss_connection *connection) {
    const struct request *request = oldest(connection);
    return worker->pipeline->chunk_states[request->chunk].stored + request->run.first_byte + connection->body_received;
}

/* 'size' more bytes of the body are in place. */
static void body_advance(struct ss_worker *worker, struct ss_connection *connection, uint64_t size) {
    connection->body_received += size;
    connection->body_bytes += size;
    slices_pass(worker, connection);
    if (connection->body_received == connection->body_length) {
        connection->phase = PHASE_TAIL;
    }
}

/* Takes 'size' bytes that are not in place. Returns 0 where the server broke the protocol. */
static int bytes_take(struct ss_worker *worker, struct ss_connection *connection, const uint8_t *data, size_t size) {
    while (size > 0) {
        size_t taken = 0;
        if (connection->count == 0) {
            return 0; /* an answer to nothing */
        }
        if (connection->phase == PHASE_HEAD) {
            enum ss_resp_status status = ss_resp_head_feed(&connection->reply, data, size, &taken);
            if (status == SS_RESP_INVALID || (status == SS_RESP_DONE && !answer_head(worker, connection))) {
                return 0;
            }
        } else if (connection->phase == PHASE_BODY) {
            uint64_t left = connection->body_length - connection->body_received;
            taken = size < left ? size : (size_t)left;
            memcpy(body_place(worker, connection), data, taken);
            body_advance(worker, connection, taken);
        } else {
            taken = 1;
            if (data[0] != (connection->tail_received == 0 ? '\r' : '\n')) {
                return 0;
            }
            connection->tail_received++;
        }
        if (connection->phase == PHASE_TAIL && connection->tail_received == 2) {
            answer_end(worker, connection);
        }
        data += taken;
        size -= taken;
    }
    return 1;
}

static void trace_receive(struct ss_worker *worker, const struct ss_connection *connection, uint64_t begin_ns,
                          uint64_t bytes) {
    const struct ss_trace_work work = {
        .chunk = connection->count > 0 ? connection->requests[connection->head].chunk : connection->next_chunk,
        .slice = UINT32_MAX,
        .input_bytes = bytes,
        .output_bytes = bytes,
    };
    ss_trace_add(worker, SS_STAGE_NET, begin_ns, ss_now_ns(), &work);
}

/* One receive: the rest of a body into place, what follows it into the small buffer. */
static enum step answers_receive(struct ss_worker *worker, struct ss_connection *connection) {
    uint8_t small[HEAD_BYTES];
    struct iovec parts[2];
    size_t count = 0;
    size_t direct = 0;
    if (connection->count > 0 && connection->phase == PHASE_BODY) {
        uint64_t left = connection->body_length - connection->body_received;
        direct = left < RECEIVE_BYTES_MAX ? (size_t)left : RECEIVE_BYTES_MAX;
        parts[count++] = (struct iovec){.iov_base = body_place(worker, connection), .iov_len = direct};
    }
    if (direct < RECEIVE_BYTES_MAX) {
        parts[count++] = (struct iovec){.iov_base = small, .iov_len = sizeof small};
    }
    uint64_t begin = ss_trace_now(worker->pipeline);
    ssize_t received = ss_channel_receive(&connection->channel, parts, count);
    if (received < 0) {
        if (errno == EINTR) {
            return STEP_AGAIN;
        }
        if ((errno == EAGAIN || errno == EWOULDBLOCK) && !connection->send_failed) {
            return STEP_WAIT;
        }
        connection_fail(worker, connection, socket_error(&worker->pipeline->fetch, errno == EAGAIN ? EPIPE : errno));
        return STEP_FINISHED;
    }
    if (received == 0) {
        connection_fail(worker, connection, SS_DISCONNECTED);
        return STEP_FINISHED;
    }
    connection->wire_bytes += (uint64_t)received;
    if (begin != 0) {
        trace_receive(worker, connection, begin, (uint64_t)received);
    }
    size_t placed = (size_t)received < direct ? (size_t)received : direct;
    if (placed > 0) {
        body_advance(worker, connection, placed);
    }
    if (!bytes_take(worker, connection, small, (size_t)received - placed)) {
        connection_fail(worker, connection, SS_PROTOCOL);
        return STEP_FINISHED;
    }
    return STEP_AGAIN;
}

/* ---- The thread ---------------------------------------------------------------------------------------------- */

/* Whether the connection has done all it has to, or all that is of use. */
static int connection_is_finished(const struct ss_worker *worker, struct ss_connection *connection) {
    struct ss_fetch *fetch = &worker->pipeline->fetch;
    uint32_t chunks = atomic_load(&fetch->first_failed);
    if (atomic_load(&fetch->abort_result) != SS_OK) {
        return 1;
    }
    if (connection->count > 0) {
        return atomic_load(&fetch->broken) && oldest(connection)->chunk >= chunks;
    }
    return connection->next_chunk >= chunks;
}

/* One turn of a connection that is not finished. */
static enum step connection_step(struct ss_worker *worker, struct ss_connection *connection) {
    do {
        requests_send(connection);
    } while (requests_fill(worker, connection) > 0);
    if (connection->count == 0) {
        /* Wait for the next chunk to be opened; or the chunks that were left had no run for this connection. */
        return connection->next_chunk >= atomic_load(&worker->pipeline->fetch.open_chunks) ? STEP_IDLE : STEP_AGAIN;
    }
    return answers_receive(worker, connection);
}

/* Sleeps until something happens on a connection that is not over, or the wake event. */
static void wait_for_sockets(struct ss_worker *worker, uint32_t nodes) {
    struct pollfd polled[1 + SS_NODES_MAX];
    nfds_t count = 1;
    polled[0] = (struct pollfd){.fd = worker->wake_event, .events = POLLIN};
    for (uint32_t i = 0; i < nodes; i++) {
        struct ss_connection *connection = &worker->connections[i];
        if (!connection->over && connection->count > 0) {
            int sending = connection->output_begin < connection->output_end;
            ss_socket_prepare(connection->channel.socket); /* the kernel leaves quick acknowledgement by itself */
            polled[count++] = (struct pollfd){.fd = connection->channel.socket,
                                              .events = ss_channel_events(&connection->channel, sending)};
        }
    }
    (void)poll(polled, count, -1); /* the round's owner keeps the time and writes the event */
    if (polled[0].revents & POLLIN) {
        uint64_t events;
        ssize_t drained = read(worker->wake_event, &events, sizeof events);
        (void)drained;
    }
}

static void connection_end(struct ss_worker *worker, struct ss_connection *connection) {
    struct ss_fetch *fetch = &worker->pipeline->fetch;
    connection->over = 1;
    if (connection->failed || connection->count > 0 || connection->output_begin < connection->output_end) {
        atomic_store(&fetch->out_of_sync, 1);
        ss_socket_disconnect(connection->channel.socket);
    }
    atomic_fetch_add(&fetch->received_bytes, connection->wire_bytes);
}

/* Gives each connection its turns until all are over. */
static void connections_run(struct ss_worker *worker) {
    uint32_t nodes = worker->pipeline->fetch.node_count;
    for (uint32_t i = 0; i < nodes; i++) {
        connection_start(worker, i);
    }
    for (;;) {
        uint32_t running = 0;
        int again = 0;
        for (uint32_t i = 0; i < nodes; i++) {
            struct ss_connection *connection = &worker->connections[i];
            if (connection->over) {
                continue;
            }
            enum step step = STEP_FINISHED;
            if (!connection_is_finished(worker, connection)) {
                step = connection_step(worker, connection);
            }
            if (step == STEP_FINISHED) {
                connection_end(worker, connection);
                continue;
            }
            running++;
            again |= step == STEP_AGAIN || (step == STEP_IDLE && connection_is_finished(worker, connection));
        }
        if (running == 0) {
            return;
        }
        if (!again) {
            wait_for_sockets(worker, nodes);
        }
    }
}

void *ss_net_thread(void *argument) {
    struct ss_worker *worker = argument;
    struct ss_pipeline *pipeline = worker->pipeline;
    uint64_t generation = 0;
    ss_worker_ready(pipeline, SS_OK);
    for (;;) {
        pthread_mutex_lock(&pipeline->lock);
        while (!pipeline->stopping && pipeline->fetch_generation == generation) {
            pthread_cond_wait(&pipeline->net_go, &pipeline->lock);
        }
        generation = pipeline->fetch_generation;
        int stopping = pipeline->stopping;
        int wanted = pipeline->fetch_active && worker->index < pipeline->fetch.connections;
        uint32_t nodes = pipeline->fetch.node_count;
        pthread_mutex_unlock(&pipeline->lock);
        if (stopping) {
            return NULL;
        }
        if (!wanted) {
            continue;
        }
        uint64_t begin = ss_thread_ns();
        connections_run(worker);
        uint64_t busy = ss_thread_ns() - begin;
        for (uint32_t i = 0; i < nodes; i++) {
            const struct ss_connection *connection = &worker->connections[i];
            ss_counters_add(&worker->counters[0], connection->slices, connection->wire_bytes, connection->body_bytes,
                            i == 0 ? busy : 0);
        }
        ss_fetch_done(pipeline, 1);
    }
}
