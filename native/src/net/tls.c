/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tls.c - TLS on a connection to storage, by OpenSSL
 *
 * The caller owns the socket, which stays non-blocking. OpenSSL reads and writes it through our own BIO, since
 * OpenSSL's socket BIO raises SIGPIPE. Received bytes are decrypted directly into the decompression buffer: OpenSSL
 * keeps whole records in its buffer, decrypts them in place, and copies each once, to the given address.
 *
 * Only one thread at a time uses a session. The pipeline's lock orders threads that use it one after the other.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <limits.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "net/channel.h"

/* Bytes taken from the socket at a time: several records of 16 KiB, so that a system call costs little for each. */
enum { READ_AHEAD_BYTES = 128 << 10 };

enum { REASON_BYTES = 192 };

struct ss_tls {
    SSL_CTX *context;
};

struct ss_tls_session {
    SSL *ssl;
    int socket;
    int ended;            /* the peer's end of stream */
    int read_wants_write; /* what was read last waits for room to send an answer of the protocol's own */
    int write_wants_read; /* and the other way round */
    int broken;           /* nothing more can be sent, not even a farewell */
    char reason[REASON_BYTES];
};

/* ---- The socket, as OpenSSL sees it --------------------------------------------------------------------------- */

static pthread_once_t method_once = PTHREAD_ONCE_INIT;
static BIO_METHOD *method; /* made once, kept as long as the process */

static int socket_write(BIO *bio, const char *data, int size) {
    const struct ss_tls_session *session = BIO_get_data(bio);
    BIO_clear_retry_flags(bio);
    ssize_t sent = send(session->socket, data, (size_t)size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
        BIO_set_retry_write(bio);
    }
    return (int)sent;
}

static int socket_read(BIO *bio, char *data, int size) {
    struct ss_tls_session *session = BIO_get_data(bio);
    BIO_clear_retry_flags(bio);
    ssize_t received = recv(session->socket, data, (size_t)size, MSG_DONTWAIT);
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
        BIO_set_retry_read(bio);
    }
    session->ended |= received == 0;
    return (int)received;
}

static long socket_control(BIO *bio, int command, long number, void *pointer) {
    const struct ss_tls_session *session = BIO_get_data(bio);
    (void)number;
    (void)pointer;
    switch (command) {
    case BIO_CTRL_FLUSH:
        return 1;
    case BIO_CTRL_EOF:
        return session->ended;
    default:
        return 0;
    }
}

static void method_make(void) {
    method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "storage socket");
    if (method != NULL) {
        BIO_meth_set_write(method, socket_write);
        BIO_meth_set_read(method, socket_read);
        BIO_meth_set_ctrl(method, socket_control);
    }
}

/* ---- Trusted authorities and own certificate ------------------------------------------------------------------- */

const char *ss_tls_library(void) {
    return OpenSSL_version(OPENSSL_VERSION);
}

/* Refuses encrypted keys: a daemon has no user to type a passphrase. */
static int no_passphrase(char *buffer, int size, int writing, void *data) {
    (void)buffer;
    (void)size;
    (void)writing;
    (void)data;
    return 0;
}

static void explain(char *error, size_t error_size, const char *what) {
    unsigned long code = ERR_peek_error();
    const char *reason = code != 0 ? ERR_reason_error_string(code) : NULL;
    if (error != NULL && error_size > 0) {
        (void)snprintf(error, error_size, "%s%s%s", what, reason != NULL ? ": " : "", reason != NULL ? reason : "");
    }
    ERR_clear_error();
}

static int context_fill(SSL_CTX *context, const char *authorities, const char *certificate, const char *key,
                        char *error, size_t error_size) {
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER, NULL);
    SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_read_ahead(context, 1);
    SSL_CTX_set_default_read_buffer_len(context, READ_AHEAD_BYTES);
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_default_passwd_cb(context, no_passphrase);
    if (SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION) != 1 ||
        SSL_CTX_load_verify_locations(context, authorities, NULL) != 1) {
        explain(error, error_size, "the file of authorities cannot be used");
        return 0;
    }
    if (certificate != NULL &&
        (SSL_CTX_use_certificate_chain_file(context, certificate) != 1 ||
         SSL_CTX_use_PrivateKey_file(context, key, SSL_FILETYPE_PEM) != 1 || SSL_CTX_check_private_key(context) != 1)) {
        explain(error, error_size, "the certificate or its key cannot be used");
        return 0;
    }
    return 1;
}

enum ss_result ss_tls_create(const char *authorities, const char *certificate, const char *key, struct ss_tls **tls,
                             char *error, size_t error_size) {
    *tls = NULL;
    if (authorities == NULL || (certificate == NULL) != (key == NULL)) {
        return SS_BAD_ARGUMENT;
    }
    (void)pthread_once(&method_once, method_make);
    ERR_clear_error();
    struct ss_tls *made = calloc(1, sizeof *made);
    SSL_CTX *context = SSL_CTX_new(TLS_client_method());
    if (made == NULL || context == NULL || method == NULL) {
        SSL_CTX_free(context);
        free(made);
        return SS_NO_MEMORY;
    }
    if (!context_fill(context, authorities, certificate, key, error, error_size)) {
        SSL_CTX_free(context);
        free(made);
        return SS_BAD_DATA;
    }
    made->context = context;
    *tls = made;
    return SS_OK;
}

void ss_tls_destroy(struct ss_tls *tls) {
    if (tls != NULL) {
        SSL_CTX_free(tls->context);
        free(tls);
    }
}

/* ---- A session ------------------------------------------------------------------------------------------------ */

/* An address must be in the certificate as an address; a name is also sent to the server (SNI). */
static int expect_name(SSL *ssl, const char *name) {
    if (X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), name) == 1) {
        return 1;
    }
    ERR_clear_error();
    SSL_set_hostflags(ssl, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
    return SSL_set1_host(ssl, name) == 1 && SSL_set_tlsext_host_name(ssl, name) == 1;
}

enum ss_result ss_tls_session_create(struct ss_tls *tls, int32_t socket, const char *name,
                                     struct ss_tls_session **session) {
    *session = NULL;
    if (tls == NULL || socket < 0 || name == NULL || name[0] == '\0') {
        return SS_BAD_ARGUMENT;
    }
    struct ss_tls_session *made = calloc(1, sizeof *made);
    SSL *ssl = SSL_new(tls->context);
    BIO *bio = BIO_new(method);
    if (made == NULL || ssl == NULL || bio == NULL || !expect_name(ssl, name)) {
        ERR_clear_error();
        BIO_free(bio);
        SSL_free(ssl);
        free(made);
        return SS_NO_MEMORY;
    }
    made->ssl = ssl;
    made->socket = socket;
    BIO_set_data(bio, made);
    BIO_set_init(bio, 1);
    SSL_set_bio(ssl, bio, bio);
    SSL_set_connect_state(ssl);
    *session = made;
    return SS_OK;
}

void ss_tls_session_destroy(struct ss_tls_session *session) {
    if (session == NULL) {
        return;
    }
    if (SSL_is_init_finished(session->ssl) && !session->broken) {
        (void)SSL_shutdown(session->ssl); /* sends close_notify if the socket has room, without waiting */
    }
    ERR_clear_error();
    SSL_free(session->ssl);
    free(session);
}

static void note_reason(struct ss_tls_session *session) {
    long verified = SSL_get_verify_result(session->ssl);
    if (verified != X509_V_OK) {
        (void)snprintf(session->reason, sizeof session->reason, "certificate verify failed: %s",
                       X509_verify_cert_error_string(verified));
        ERR_clear_error();
        return;
    }
    explain(session->reason, sizeof session->reason,
            session->ended ? "the server closed the connection" : "TLS failed");
}

/* Result of a call that returned 'returned'. SS_OK: would block, see '*events'. */
static enum ss_result settle(struct ss_tls_session *session, int returned, uint32_t *events) {
    *events = 0;
    switch (SSL_get_error(session->ssl, returned)) {
    case SSL_ERROR_WANT_READ:
        *events = POLLIN;
        return SS_OK;
    case SSL_ERROR_WANT_WRITE:
        *events = POLLOUT;
        return SS_OK;
    case SSL_ERROR_ZERO_RETURN:
        session->ended = 1;
        note_reason(session);
        return SS_DISCONNECTED;
    case SSL_ERROR_SYSCALL:
        session->broken = 1;
        session->ended = 1;
        note_reason(session);
        return SS_DISCONNECTED;
    default:
        session->broken = 1;
        note_reason(session);
        return session->ended ? SS_DISCONNECTED : SS_PROTOCOL; /* closed without close_notify, or changed in transit */
    }
}

const char *ss_tls_reason(const struct ss_tls_session *session) {
    return session->reason;
}

enum ss_result ss_tls_handshake(struct ss_tls_session *session, uint32_t *events) {
    ERR_clear_error();
    *events = 0;
    int returned = SSL_do_handshake(session->ssl);
    return returned == 1 ? SS_OK : settle(session, returned, events);
}

enum ss_result ss_tls_send(struct ss_tls_session *session, const void *data, size_t size, size_t *sent,
                           uint32_t *events) {
    *sent = 0;
    *events = 0;
    if (size == 0) {
        return SS_OK;
    }
    ERR_clear_error();
    int returned = SSL_write(session->ssl, data, size > INT_MAX ? INT_MAX : (int)size);
    session->write_wants_read = 0;
    if (returned > 0) {
        *sent = (size_t)returned;
        return SS_OK;
    }
    enum ss_result result = settle(session, returned, events);
    session->write_wants_read = *events == POLLIN;
    return result;
}

enum ss_result ss_tls_receive(struct ss_tls_session *session, void *data, size_t size, size_t *received,
                              uint32_t *events) {
    *received = 0;
    *events = 0;
    if (size == 0) {
        return SS_OK;
    }
    ERR_clear_error();
    int returned = SSL_read(session->ssl, data, size > INT_MAX ? INT_MAX : (int)size);
    session->read_wants_write = 0;
    if (returned > 0) {
        *received = (size_t)returned;
        return SS_OK;
    }
    enum ss_result result = settle(session, returned, events);
    session->read_wants_write = *events == POLLOUT;
    return result;
}

int ss_tls_has_pending(const struct ss_tls_session *session) {
    return SSL_has_pending(session->ssl);
}

/* ---- As the pipeline uses it ---------------------------------------------------------------------------------- */

/* Return value and errno as of send() or recvmsg(). */
static ssize_t as_call(enum ss_result result, size_t done) {
    if (done > 0) {
        return (ssize_t)done; /* what stopped it is found by the next call */
    }
    switch (result) {
    case SS_OK:
        errno = EAGAIN;
        return -1;
    case SS_PROTOCOL:
        errno = EPROTO;
        return -1;
    default:
        return 0;
    }
}

ssize_t ss_tls_session_send(struct ss_tls_session *session, const struct iovec *parts, size_t count) {
    size_t done = 0;
    enum ss_result result = SS_OK;
    for (size_t i = 0; i < count; i++) {
        size_t part = 0;
        while (part < parts[i].iov_len) {
            size_t sent;
            uint32_t events;
            result =
                ss_tls_send(session, (const char *)parts[i].iov_base + part, parts[i].iov_len - part, &sent, &events);
            if (sent == 0) {
                ssize_t taken = as_call(result, done);
                if (taken == 0) {
                    errno = EPIPE;
                    return -1;
                }
                return taken;
            }
            part += sent;
            done += sent;
            if (done >= SS_TLS_BATCH_BYTES) {
                return (ssize_t)done; /* an answer may have come meanwhile */
            }
        }
    }
    return (ssize_t)done;
}

ssize_t ss_tls_session_receive(struct ss_tls_session *session, const struct iovec *parts, size_t count) {
    size_t done = 0;
    for (size_t i = 0; i < count; i++) {
        size_t part = 0;
        while (part < parts[i].iov_len && done < SS_TLS_BATCH_BYTES) {
            size_t received;
            uint32_t events;
            enum ss_result result =
                ss_tls_receive(session, (char *)parts[i].iov_base + part, parts[i].iov_len - part, &received, &events);
            if (received == 0) {
                return as_call(result, done);
            }
            part += received;
            done += received;
        }
    }
    return (ssize_t)done;
}

short ss_tls_session_events(const struct ss_tls_session *session, int sending) {
    int out = (sending && !session->write_wants_read) || session->read_wants_write;
    return (short)(POLLIN | (out ? POLLOUT : 0));
}
