/* SPDX-License-Identifier: Apache-2.0 */
/*
 * channel.h - one connection to storage as the pipeline uses it: a socket, and with TLS the session on it
 *
 * Both kinds answer as send() and recvmsg() do: a count, 0 for the end of the stream, -1 with errno. Neither blocks.
 */
#ifndef SS_CHANNEL_H
#define SS_CHANNEL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "shadowserve.h"

struct ss_channel {
    int socket;
    struct ss_tls_session *session; /* NULL: not encrypted */
};

/* ss_channel_send() sends 'count' parts, as far as the socket has room now. */
ssize_t ss_channel_send(const struct ss_channel *channel, const struct iovec *parts, size_t count);

/*
 * ss_channel_receive() fills the parts in order with the available bytes. With TLS it stops at SS_TLS_BATCH_BYTES, so
 * that complete slices are passed on while the rest is decrypted. EPROTO: the stream fails its cipher's check.
 */
ssize_t ss_channel_receive(const struct ss_channel *channel, const struct iovec *parts, size_t count);

/* ss_channel_events() returns the events for poll(): an answer, and room in the socket if 'sending'. */
short ss_channel_events(const struct ss_channel *channel, int sending);

/* ss_socket_prepare() turns Nagle's algorithm and delayed acknowledgements off, if the socket has them. */
void ss_socket_prepare(int socket);

/* ss_socket_disconnect() disconnects the socket, so that any later use fails; the caller still closes it. */
void ss_socket_disconnect(int socket);

/* ---- tls.c, or tls_absent.c where this build has no TLS ---- */

enum { SS_TLS_BATCH_BYTES = 256 << 10 };

ssize_t ss_tls_session_send(struct ss_tls_session *session, const struct iovec *parts, size_t count);
ssize_t ss_tls_session_receive(struct ss_tls_session *session, const struct iovec *parts, size_t count);
short ss_tls_session_events(const struct ss_tls_session *session, int sending);

#endif /* SS_CHANNEL_H */
