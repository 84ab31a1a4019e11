/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pipeline_net.c - the network stage: range requests out, stored bytes straight into the decompression buffer
 *
 * One thread drives one connection. It asks for its run of every chunk's slices, several requests ahead, and reads
 * the answers, which come in order. A body is received where it will be decompressed: one system call takes what is
 * left of the body into place and at most HEAD_BYTES behind it, the end of this answer and the head of the next, into
 * a small buffer. What little of the next body comes along is copied.
 *
 * Failure. What fails is the chunk of the oldest answer that is due; chunks before it have all their bytes from this
 * connection. A well-formed refusal leaves the connection in step, so after one the answers that are under way are
 * read and dropped and the connection can be used again. Anything else breaks it. A connection that is left with half
 * an answer is disconnected, so that no later reader can take that half for an answer of its own.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "pipeline_internal.h"
#include "resp.h"

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
enum step { STEP_AGAIN, STEP_WAIT, STEP_FINISHED };

/* A range that was asked for. */
struct request {
    struct ss_run run;
    uint32_t chunk;
};

struct ss_connection {
    struct request *requests; /* a ring, oldest first: asked for, not answered */
    uint32_t capacity;
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

struct ss_connection *ss_connection_create(uint32_t requests_in_flight) {
    struct ss_connection *connection = calloc(1, sizeof *connection);
    if (connection == NULL) {
        return NULL;
    }
    connection->requests = calloc(requests_in_flight, sizeof *connection->requests);
    connection->capacity = requests_in_flight;
    if (connection->requests == NULL) {
        free(connection);
        return NULL;
    }
    return connection;
}

void ss_connection_destroy(struct ss_connection *connection) {
    if (connection != NULL) {
        free(connection->requests);
        free(connection);
    }
}

void ss_socket_prepare(int socket) {
    int on = 1; /* both fail on sockets that are not TCP, and nothing is lost */
    (void)setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    (void)setsockopt(socket, IPPROTO_TCP, TCP_QUICKACK, &on, sizeof on);
}

/* Not shutdown(), after which what has arrived can still be read: this forgets it, and tells the server by a reset. */
void ss_socket_disconnect(int socket) {
    struct sockaddr nobody = {.sa_family = AF_UNSPEC};
    if (connect(socket, &nobody, sizeof nobody) != 0) {
        (void)shutdown(socket, SHUT_RDWR); /* not TCP */
    }
}

static void connection_start(struct ss_connection *connection) {
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
}

static struct request *oldest(struct ss_connection *connection) {
    return &connection->requests[connection->head];
}

/* The chunk that a failure of the connection itself counts against. */
static void connection_fail(struct ss_worker *worker, enum ss_result result) {
    struct ss_connection *connection = worker->connection;
    struct ss_fetch *fetch = &worker->pipeline->fetch;
    uint32_t chunk = connection->count > 0 ? oldest(connection)->chunk : connection->next_chunk;
    atomic_store(&fetch->out_of_sync, 1);
    if (chunk < fetch->round->chunk_count) {
        ss_fetch_fail(worker->pipeline, chunk, result, 1);
    }
}

static enum ss_result socket_error(struct ss_fetch *fetch, int error) {
    if (error == EBADF || error == ENOTSOCK || error == ENOMEM || error == ENOBUFS || error == EFAULT) {
        atomic_store(&fetch->os_error, error);
        return SS_OS_ERROR;
    }
    return SS_DISCONNECTED;
}

/* ---- Requests ------------------------------------------------------------------------------------------------ */

/* Appends requests for this connection's runs while they are wanted and there is room for them; how many. */
static uint32_t requests_fill(struct ss_worker *worker) {
    struct ss_connection *connection = worker->connection;
    struct ss_fetch *fetch = &worker->pipeline->fetch;
    uint32_t sound = atomic_load_explicit(&fetch->first_failed, memory_order_relaxed);
    uint32_t open = atomic_load(&fetch->open_chunks);
    uint32_t chunks = open < sound ? open : sound;
    uint32_t added = 0;
    if (connection->output_begin == connection->output_end) {
        connection->output_begin = 0;
        connection->output_end = 0;
    }
    while (connection->next_chunk < chunks && connection->count < connection->capacity &&
           connection->output_end + SS_RESP_REQUEST_MAX <= OUTPUT_BYTES) {
        uint32_t index = connection->next_chunk++;
        struct ss_run run = ss_chunk_run(fetch->round, index, worker->index, fetch->socket_count);
        if (run.slice_count == 0) {
            continue;
        }
        enum ss_result mapped = ss_chunk_map(worker->pipeline, index);
        if (mapped != SS_OK) {
            ss_fetch_fail(worker->pipeline, index, mapped, 0);
            ss_fetch_wake_net(worker->pipeline);
            break;
        }
        const struct ss_chunk *chunk = &fetch->round->chunks[index];
        uint64_t first = chunk->record_offset + run.first_byte;
        connection->output_end += ss_resp_getrange(connection->output + connection->output_end, chunk->key,
                                                   chunk->key_length, first, first + run.bytes - 1);
        uint32_t slot = (connection->head + connection->count++) % connection->capacity;
        connection->requests[slot] = (struct request){.run = run, .chunk = index};
        added++;
    }
    return added;
}

static void requests_send(struct ss_worker *worker, int socket) {
    struct ss_connection *connection = worker->connection;
    while (connection->output_begin < connection->output_end && !connection->send_failed) {
        ssize_t sent = send(socket, connection->output + connection->output_begin,
                            connection->output_end - connection->output_begin, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent >= 0) {
            connection->output_begin += (size_t)sent;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return;
        } else if (errno != EINTR) {
            connection->send_failed = 1; /* what was answered before is still read: recv() has the last word */
        }
    }
}

/* ---- Answers ------------------------------------------------------------------------------------------------- */

/* Hands whole slices on, unless they have to wait for the rest of their chunk. */
static void slices_push(struct ss_worker *worker, const struct ss_item *items, uint32_t count) {
    struct ss_pipeline *pipeline = worker->pipeline;
    worker->connection->slices += count;
    if (count > 0 && pipeline->options.chunked_pipeline) {
        atomic_fetch_add(&pipeline->fetch.work, count);
        ss_queue_push(&pipeline->decompress_queue, items, count);
    }
}

/* Passes on every slice whose last byte has arrived. */
static void slices_pass(struct ss_worker *worker) {
    struct ss_connection *connection = worker->connection;
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
            slices_push(worker, items, count);
            count = 0;
        }
    }
    slices_push(worker, items, count);
}

/* Takes the head of an answer. Returns 0 where it breaks the connection. */
static int answer_head(struct ss_worker *worker) {
    struct ss_connection *connection = worker->connection;
    const struct request *request = oldest(connection);
    uint64_t expected = request->run.bytes;
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
        ss_fetch_fail(worker->pipeline, request->chunk, SS_REFUSED, 0);
        break;
    default:
        return 0;
    }
    connection->phase = PHASE_TAIL;
    connection->tail_received = 2; /* these answers have neither body nor tail */
    return 1;
}

/* An answer is whole. It counts as work of its chunk, so that no chunk is done before its last CR LF. */
static void answer_end(struct ss_worker *worker) {
    struct ss_connection *connection = worker->connection;
    uint32_t chunk = oldest(connection)->chunk;
    ss_chunk_part_done(worker->pipeline, chunk);
    if (!worker->pipeline->options.chunked_pipeline) {
        ss_barrier_leave(worker->pipeline, SS_STAGE_NET, chunk);
    }
    connection->head = (connection->head + 1) % connection->capacity;
    connection->count--;
    connection->phase = PHASE_HEAD;
    ss_resp_head_start(&connection->reply);
}

static uint8_t *body_place(struct ss_worker *worker) {
    struct ss_connection *connection = worker->connection;
    const struct request *request = oldest(connection);
    return worker->pipeline->chunk_states[request->chunk].stored + request->run.first_byte + connection->body_received;
}

/* 'size' more bytes of the body are in place. */
static void body_advance(struct ss_worker *worker, uint64_t size) {
    struct ss_connection *connection = worker->connection;
    connection->body_received += size;
    connection->body_bytes += size;
    slices_pass(worker);
    if (connection->body_received == connection->body_length) {
        connection->phase = PHASE_TAIL;
    }
}

/* Takes 'size' bytes that are not in place. Returns 0 where the server broke the protocol. */
static int bytes_take(struct ss_worker *worker, const uint8_t *data, size_t size) {
    struct ss_connection *connection = worker->connection;
    while (size > 0) {
        size_t taken = 0;
        if (connection->count == 0) {
            return 0; /* an answer to nothing */
        }
        if (connection->phase == PHASE_HEAD) {
            enum ss_resp_status status = ss_resp_head_feed(&connection->reply, data, size, &taken);
            if (status == SS_RESP_INVALID || (status == SS_RESP_DONE && !answer_head(worker))) {
                return 0;
            }
        } else if (connection->phase == PHASE_BODY) {
            uint64_t left = connection->body_length - connection->body_received;
            taken = size < left ? size : (size_t)left;
            memcpy(body_place(worker), data, taken);
            body_advance(worker, taken);
        } else {
            taken = 1;
            if (data[0] != (connection->tail_received == 0 ? '\r' : '\n')) {
                return 0;
            }
            connection->tail_received++;
        }
        if (connection->phase == PHASE_TAIL && connection->tail_received == 2) {
            answer_end(worker);
        }
        data += taken;
        size -= taken;
    }
    return 1;
}

static void trace_receive(struct ss_worker *worker, uint64_t begin_ns, uint64_t bytes) {
    const struct ss_connection *connection = worker->connection;
    const struct ss_trace_work work = {
        .chunk = connection->count > 0 ? connection->requests[connection->head].chunk : connection->next_chunk,
        .slice = UINT32_MAX,
        .input_bytes = bytes,
        .output_bytes = bytes,
    };
    ss_trace_add(worker, SS_STAGE_NET, begin_ns, ss_now_ns(), &work);
}

/* One receive: the rest of a body into place, what follows it into the small buffer. */
static enum step answers_receive(struct ss_worker *worker, int socket) {
    struct ss_connection *connection = worker->connection;
    uint8_t small[HEAD_BYTES];
    struct iovec parts[2];
    struct msghdr message = {.msg_iov = parts};
    size_t direct = 0;
    if (connection->count > 0 && connection->phase == PHASE_BODY) {
        uint64_t left = connection->body_length - connection->body_received;
        direct = left < RECEIVE_BYTES_MAX ? (size_t)left : RECEIVE_BYTES_MAX;
        parts[message.msg_iovlen++] = (struct iovec){.iov_base = body_place(worker), .iov_len = direct};
    }
    if (direct < RECEIVE_BYTES_MAX) {
        parts[message.msg_iovlen++] = (struct iovec){.iov_base = small, .iov_len = sizeof small};
    }
    uint64_t begin = ss_trace_now(worker->pipeline);
    ssize_t received = recvmsg(socket, &message, MSG_DONTWAIT);
    if (received < 0) {
        if (errno == EINTR) {
            return STEP_AGAIN;
        }
        if ((errno == EAGAIN || errno == EWOULDBLOCK) && !connection->send_failed) {
            return STEP_WAIT;
        }
        connection_fail(worker, socket_error(&worker->pipeline->fetch, errno == EAGAIN ? EPIPE : errno));
        return STEP_FINISHED;
    }
    if (received == 0) {
        connection_fail(worker, SS_DISCONNECTED);
        return STEP_FINISHED;
    }
    connection->wire_bytes += (uint64_t)received;
    if (begin != 0) {
        trace_receive(worker, begin, (uint64_t)received);
    }
    size_t placed = (size_t)received < direct ? (size_t)received : direct;
    if (placed > 0) {
        body_advance(worker, placed);
    }
    if (!bytes_take(worker, small, (size_t)received - placed)) {
        connection_fail(worker, SS_PROTOCOL);
        return STEP_FINISHED;
    }
    return STEP_AGAIN;
}

/* ---- The thread ---------------------------------------------------------------------------------------------- */

/* Whether the connection has done all it has to, or all that is of use. */
static int connection_is_finished(struct ss_worker *worker) {
    struct ss_connection *connection = worker->connection;
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

/* Sleeps until something happens on the socket or the wake event; a socket of -1 is not looked at. */
static void wait_for_socket(struct ss_worker *worker, int socket) {
    struct ss_connection *connection = worker->connection;
    int sending = connection->output_begin < connection->output_end;
    struct pollfd polled[2] = {{.fd = socket, .events = (short)(POLLIN | (sending ? POLLOUT : 0))},
                               {.fd = worker->wake_event, .events = POLLIN}};
    if (socket >= 0) {
        ss_socket_prepare(socket); /* the kernel leaves quick acknowledgement again by itself */
    }
    (void)poll(polled, 2, -1); /* the round's owner keeps the time and writes the event */
    if (polled[1].revents & POLLIN) {
        uint64_t count;
        ssize_t drained = read(worker->wake_event, &count, sizeof count);
        (void)drained;
    }
}

static void connection_run(struct ss_worker *worker) {
    struct ss_connection *connection = worker->connection;
    struct ss_fetch *fetch = &worker->pipeline->fetch;
    int socket = fetch->sockets[worker->index];
    enum step step = STEP_AGAIN;
    connection_start(connection);
    ss_socket_prepare(socket);
    while (step != STEP_FINISHED && !connection_is_finished(worker)) {
        do {
            requests_send(worker, socket);
        } while (requests_fill(worker) > 0);
        if (connection->count == 0) {
            if (connection->next_chunk >= atomic_load(&fetch->open_chunks) && !connection_is_finished(worker)) {
                wait_for_socket(worker, -1); /* for the next chunk to be opened */
            }
            continue; /* the chunks that were left had no run for this connection */
        }
        step = answers_receive(worker, socket);
        if (step == STEP_WAIT) {
            wait_for_socket(worker, socket);
        }
    }
    if (step == STEP_FINISHED || connection->count > 0 || connection->output_begin < connection->output_end) {
        atomic_store(&fetch->out_of_sync, 1);
        ss_socket_disconnect(socket);
    }
    atomic_fetch_add(&fetch->received_bytes, connection->wire_bytes);
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
        int wanted = pipeline->fetch_active && worker->index < pipeline->fetch.socket_count;
        pthread_mutex_unlock(&pipeline->lock);
        if (stopping) {
            return NULL;
        }
        if (!wanted) {
            continue;
        }
        uint64_t begin = ss_thread_ns();
        connection_run(worker);
        ss_counters_add(&worker->counters[0], worker->connection->slices, worker->connection->wire_bytes,
                        worker->connection->body_bytes, ss_thread_ns() - begin);
        ss_fetch_done(pipeline, 1);
    }
}
