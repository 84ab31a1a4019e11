/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tls_absent.c - for a build without OpenSSL: TLS is not supported
 *
 * Sessions cannot be created, so functions with a session are never called; they fail nevertheless.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>

#include "net/channel.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"

const char *ss_tls_library(void) {
    return NULL;
}

enum ss_result ss_tls_create(const char *authorities, const char *certificate, const char *key, struct ss_tls **tls,
                             char *error, size_t error_size) {
    *tls = NULL;
    if (error_size > 0) {
        (void)snprintf(error, error_size, "this build has no TLS");
    }
    return SS_NOT_SUPPORTED;
}

void ss_tls_destroy(struct ss_tls *tls) {
}

enum ss_result ss_tls_session_create(struct ss_tls *tls, int32_t socket, const char *name,
                                     struct ss_tls_session **session) {
    *session = NULL;
    return SS_NOT_SUPPORTED;
}

void ss_tls_session_destroy(struct ss_tls_session *session) {
}

const char *ss_tls_reason(const struct ss_tls_session *session) {
    return "this build has no TLS";
}

enum ss_result ss_tls_handshake(struct ss_tls_session *session, uint32_t *events) {
    *events = 0;
    return SS_NOT_SUPPORTED;
}

enum ss_result ss_tls_send(struct ss_tls_session *session, const void *data, size_t size, size_t *sent,
                           uint32_t *events) {
    *sent = 0;
    *events = 0;
    return SS_NOT_SUPPORTED;
}

enum ss_result ss_tls_receive(struct ss_tls_session *session, void *data, size_t size, size_t *received,
                              uint32_t *events) {
    *received = 0;
    *events = 0;
    return SS_NOT_SUPPORTED;
}

int ss_tls_has_pending(const struct ss_tls_session *session) {
    return 0;
}

ssize_t ss_tls_session_send(struct ss_tls_session *session, const struct iovec *parts, size_t count) {
    errno = ENOTSUP;
    return -1;
}

ssize_t ss_tls_session_receive(struct ss_tls_session *session, const struct iovec *parts, size_t count) {
    return ss_tls_session_send(session, parts, count);
}

short ss_tls_session_events(const struct ss_tls_session *session, int sending) {
    return POLLIN;
}
