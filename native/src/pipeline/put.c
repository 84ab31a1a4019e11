/* SPDX-License-Identifier: Apache-2.0 */
/*
 * put.c - SET of one encoded piece, on the caller's thread
 *
 * The request is a gathered write of its parts, so only the kernel copies the body. A server may answer before it has
 * read everything (a value that is too large). This answer is more useful than the broken pipe that follows, so the
 * loop polls for an answer while it writes, and reads once more after a write has failed.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <string.h>
#include <sys/uio.h>

#include "net/channel.h"
#include "net/resp.h"
#include "pipeline/internal.h"

enum { PUT_PARTS = 4 }; /* command, head, body, end of the command */

struct put {
    struct ss_channel channel;
    uint64_t deadline_ns;
    uint32_t lasts_ms;
    struct iovec parts[PUT_PARTS];
    int first_part; /* PUT_PARTS once all is sent */
    struct ss_resp_head reply;
    uint64_t sent;
};

static int is_again(int error) {
    return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

/* Sends without blocking. SS_OK also if the socket has no room now. */
static enum ss_result put_send(struct put *put) {
    while (put->first_part < PUT_PARTS) {
        ssize_t sent =
            ss_channel_send(&put->channel, &put->parts[put->first_part], (size_t)(PUT_PARTS - put->first_part));
        if (sent < 0) {
            return is_again(errno) ? SS_OK : SS_DISCONNECTED;
        }
        put->sent += (uint64_t)sent;
        size_t left = (size_t)sent;
        while (put->first_part < PUT_PARTS && left >= put->parts[put->first_part].iov_len) {
            left -= put->parts[put->first_part++].iov_len;
        }
        if (put->first_part < PUT_PARTS) {
            struct iovec *part = &put->parts[put->first_part];
            part->iov_base = (uint8_t *)part->iov_base + left;
            part->iov_len -= left;
        }
    }
    return SS_OK;
}

/* Reads the available bytes of the answer. SS_OK also while it is incomplete; see reply.status. */
static enum ss_result put_receive(struct put *put) {
    while (put->reply.status == SS_RESP_MORE) {
        uint8_t data[SS_RESP_TEXT_MAX];
        const struct iovec part = {.iov_base = data, .iov_len = sizeof data};
        ssize_t received = ss_channel_receive(&put->channel, &part, 1);
        if (received < 0) {
            return is_again(errno) ? SS_OK : errno == EPROTO ? SS_PROTOCOL : SS_DISCONNECTED;
        }
        if (received == 0) {
            return SS_DISCONNECTED;
        }
        size_t consumed;
        enum ss_resp_status status = ss_resp_head_feed(&put->reply, data, (size_t)received, &consumed);
        if (status == SS_RESP_INVALID || consumed < (size_t)received) {
            put->reply.status = SS_RESP_INVALID; /* also if more bytes follow it: no other answer is expected */
            return SS_PROTOCOL;
        }
    }
    return SS_OK;
}

static enum ss_result put_wait(const struct put *put) {
    uint64_t now = ss_now_ns();
    if (now >= put->deadline_ns) {
        return SS_DEADLINE;
    }
    uint64_t left_ms = (put->deadline_ns - now + 999999) / 1000000;
    int sending = put->first_part < PUT_PARTS;
    struct pollfd polled = {.fd = put->channel.socket, .events = ss_channel_events(&put->channel, sending)};
    int ready = poll(&polled, 1, left_ms > INT_MAX ? INT_MAX : (int)left_ms);
    if (ready < 0 && errno != EINTR) {
        return SS_OS_ERROR;
    }
    return ready > 0 && (polled.revents & POLLNVAL) ? SS_BAD_ARGUMENT : SS_OK;
}

static enum ss_result put_exchange(struct put *put) {
    for (;;) {
        enum ss_result sent = put_send(put);
        enum ss_result received = put_receive(put);
        if (put->reply.status == SS_RESP_DONE) {
            return SS_OK;
        }
        if (received != SS_OK || sent != SS_OK) {
            return received != SS_OK ? received : sent;
        }
        enum ss_result waited = put_wait(put);
        if (waited != SS_OK) {
            return waited;
        }
    }
}

static enum ss_result put_outcome(const struct put *put, char *error, size_t error_size) {
    if (put->reply.kind == SS_RESP_SIMPLE) {
        int accepted = put->reply.text_length == 2 && memcmp(put->reply.text, "OK", 2) == 0;
        return accepted && put->first_part == PUT_PARTS ? SS_OK : SS_PROTOCOL;
    }
    if (put->reply.kind == SS_RESP_NULL && put->lasts_ms != 0 && put->first_part == PUT_PARTS) {
        return SS_OK; /* the key has a value, which stays */
    }
    if (put->reply.kind != SS_RESP_ERROR) {
        return SS_PROTOCOL;
    }
    if (error != NULL && error_size > 0) {
        size_t length = put->reply.text_length < error_size - 1 ? put->reply.text_length : error_size - 1;
        memcpy(error, put->reply.text, length);
        error[length] = '\0';
    }
    return SS_REFUSED;
}

static int body_is_there(const struct ss_pipeline *pipeline, const struct ss_piece *piece) {
    return piece->body_length > 0 && piece->decompression_offset <= pipeline->store_buffer.size &&
           piece->body_length <= pipeline->store_buffer.size - piece->decompression_offset;
}

enum ss_result ss_pipeline_copy_body(const struct ss_pipeline *pipeline, const struct ss_piece *piece,
                                     uint8_t *target) {
    if (pipeline == NULL || piece == NULL || target == NULL || !body_is_there(pipeline, piece)) {
        return SS_BAD_ARGUMENT;
    }
    memcpy(target, pipeline->store_buffer.data + piece->decompression_offset, piece->body_length);
    return SS_OK;
}

enum ss_result ss_pipeline_put(struct ss_pipeline *pipeline, const struct ss_piece *piece, const void *head,
                               size_t head_size, uint32_t lasts_ms, int32_t socket, struct ss_tls_session *session,
                               uint64_t deadline_ns, char *error, size_t error_size) {
    if (error != NULL && error_size > 0) {
        error[0] = '\0';
    }
    if (pipeline == NULL || piece == NULL || (head == NULL && head_size > 0) || socket < 0 || piece->key_length == 0 ||
        piece->key_length > sizeof piece->key || !body_is_there(pipeline, piece) ||
        head_size > (uint64_t)INT64_MAX - piece->body_length) {
        return SS_BAD_ARGUMENT;
    }
    uint8_t command[SS_RESP_REQUEST_MAX];
    char end[SS_RESP_SET_END_MAX];
    size_t command_size =
        ss_resp_set(command, piece->key, piece->key_length, head_size + piece->body_length, lasts_ms, end);
    struct put put = {
        .channel = {.socket = socket, .session = session}, .deadline_ns = deadline_ns, .lasts_ms = lasts_ms};
    put.parts[0] = (struct iovec){.iov_base = command, .iov_len = command_size};
    put.parts[1] = (struct iovec){.iov_base = (void *)(uintptr_t)head, .iov_len = head_size};
    put.parts[2] = (struct iovec){.iov_base = pipeline->store_buffer.data + piece->decompression_offset,
                                  .iov_len = piece->body_length};
    put.parts[3] = (struct iovec){.iov_base = end, .iov_len = strlen(end)};
    ss_resp_head_start(&put.reply);
    uint64_t begin = ss_thread_ns();
    ss_socket_prepare(socket);
    enum ss_result result = put_exchange(&put);
    if (result == SS_OK) {
        result = put_outcome(&put, error, error_size);
    }
    if (put.first_part < PUT_PARTS && put.sent > 0) {
        ss_socket_disconnect(socket); /* half a request was sent: the connection cannot be used again */
    }
    ss_counters_add(&pipeline->put, result == SS_OK, head_size + piece->body_length, put.sent, ss_thread_ns() - begin);
    return result;
}
