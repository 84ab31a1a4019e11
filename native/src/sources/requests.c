/* SPDX-License-Identifier: Apache-2.0 */
/* requests.c - the runs of slices that a connection requests, by ranges or the whole batch in one request */
#include <errno.h>

#include "sources/connection.h"

/*
 * A slice belongs to the run with its middle byte, so the runs are contiguous, cover all slices, and differ by at most
 * a slice. The assignment of runs to connections rotates from piece to piece, so that pieces with fewer slices than
 * connections are spread over all connections.
 */
struct ss_run ss_run_of(const struct ss_batch *batch, uint32_t piece_index, uint32_t thread, uint32_t threads) {
    const struct ss_piece *piece = &batch->pieces[piece_index];
    uint64_t part = (thread + piece_index) % threads;
    uint64_t begin = piece->body_length * part / threads; /* body_length is under 2^63 / 256: it fits a buffer */
    uint64_t end = piece->body_length * (part + 1) / threads;
    struct ss_run run = {.slice_first = piece->slice_first};
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

int ss_connection_has_more(const struct ss_feed *feed, struct ss_connection *connection) {
    for (; connection->next_piece < feed->batch->piece_count; connection->next_piece++) {
        const struct ss_piece *piece = &feed->batch->pieces[connection->next_piece];
        if (ss_piece_origin(piece) == SS_ORIGIN_SERVER && piece->node == connection->node &&
            ss_feed_useful(feed, connection->next_piece)) {
            return 1;
        }
    }
    return 0;
}

static void request_note(struct ss_connection *connection, struct ss_request_sent request) {
    connection->requests[(connection->head + connection->count++) % connection->capacity] = request;
}

/* Appends a request for one run; SS_RESP_REQUEST_MAX has room for ASKING, too. */
static void request_append(const struct ss_feed *feed, struct ss_connection *connection, uint32_t index,
                           struct ss_run run) {
    const struct ss_piece *piece = &feed->batch->pieces[index];
    if (piece->asking) {
        connection->output_end += ss_resp_asking(connection->output + connection->output_end);
        request_note(connection, (struct ss_request_sent){.piece = index, .asking = 1});
    }
    uint64_t first = piece->record_offset + run.first_byte;
    connection->output_end += ss_resp_getrange(connection->output + connection->output_end, piece->key,
                                               piece->key_length, first, first + run.bytes - 1);
    request_note(connection, (struct ss_request_sent){.run = run, .piece = index});
}

uint32_t ss_requests_fill(const struct ss_feed *feed, struct ss_connection *connection) {
    uint32_t added = 0;
    if (connection->output_begin == connection->output_end) {
        connection->output_begin = 0;
        connection->output_end = 0;
    }
    while (connection->count < connection->ahead_max &&
           connection->output_end + SS_RESP_REQUEST_MAX <= SS_OUTPUT_BYTES &&
           ss_connection_has_more(feed, connection)) {
        uint32_t index = connection->next_piece++;
        struct ss_run run = ss_run_of(feed->batch, index, feed->thread, feed->threads);
        if (run.slice_count > 0) {
            request_append(feed, connection, index, run);
            added++;
        }
    }
    return added;
}

int ss_requests_left(const struct ss_connection *connection) {
    return connection->request_left > 0 || connection->output_begin < connection->output_end;
}

void ss_requests_send(struct ss_connection *connection) {
    while (ss_requests_left(connection) && !connection->send_failed) {
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
