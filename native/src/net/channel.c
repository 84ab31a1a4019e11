/* SPDX-License-Identifier: Apache-2.0 */
/*
 * channel.c - one connection to storage: plain calls to the kernel, or to TLS
 */
#define _GNU_SOURCE 1
#include "net/channel.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

ssize_t ss_channel_send(const struct ss_channel *channel, const struct iovec *parts, size_t count) {
    if (channel->session != NULL) {
        return ss_tls_session_send(channel->session, parts, count);
    }
    /* The kernel does not write to the memory of a send. */
    struct msghdr message = {.msg_iov = (struct iovec *)(uintptr_t)parts, .msg_iovlen = count};
    return sendmsg(channel->socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

ssize_t ss_channel_receive(const struct ss_channel *channel, const struct iovec *parts, size_t count) {
    if (channel->session != NULL) {
        return ss_tls_session_receive(channel->session, parts, count);
    }
    struct msghdr message = {.msg_iov = (struct iovec *)(uintptr_t)parts, .msg_iovlen = count};
    return recvmsg(channel->socket, &message, MSG_DONTWAIT);
}

short ss_channel_events(const struct ss_channel *channel, int sending) {
    if (channel->session != NULL) {
        return ss_tls_session_events(channel->session, sending);
    }
    return (short)(POLLIN | (sending ? POLLOUT : 0));
}

void ss_socket_prepare(int socket) {
    int on = 1; /* both fail on sockets that are not TCP, and nothing is lost */
    (void)setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    (void)setsockopt(socket, IPPROTO_TCP, TCP_QUICKACK, &on, sizeof on);
}

/* Not shutdown(), after which received bytes can still be read: this drops them, and sends a reset to the server. */
void ss_socket_disconnect(int socket) {
    struct sockaddr no_address = {.sa_family = AF_UNSPEC};
    if (connect(socket, &no_address, sizeof no_address) != 0) {
        (void)shutdown(socket, SHUT_RDWR); /* not TCP */
    }
}
