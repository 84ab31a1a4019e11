/* SPDX-License-Identifier: Apache-2.0 */
/* test_pipeline_tls.c - batches and puts over TLS: a server with a certificate made here, in front of the plain one */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "pipeline_support.h"

enum { CONNECTIONS_MAX = 64, RELAY_BYTES = 1 << 15 };

/* ---- A TLS server that relays to a plain one ------------------------------------------------------------------- */

struct relay {
    SSL_CTX *context;
    int listener;
    uint16_t port;    /* in network byte order */
    uint16_t target;  /* likewise */
    size_t cut_after; /* bytes of answers on each connection, then it is cut off without a farewell; 0: never */
    pthread_t accepting;
    pthread_t threads[CONNECTIONS_MAX];
    uint32_t count;
};

struct relayed {
    struct relay *relay;
    int front;
};

/* Moves the available bytes from one side to the other. Returns 0 at the end. */
static int relay_step(SSL *ssl, int behind, size_t *left) {
    uint8_t data[RELAY_BYTES];
    struct pollfd polled[2] = {{.fd = SSL_get_fd(ssl), .events = POLLIN}, {.fd = behind, .events = POLLIN}};
    if (!SSL_pending(ssl) && poll(polled, 2, -1) < 0) {
        return 0;
    }
    if (SSL_pending(ssl) || polled[0].revents != 0) {
        int received = SSL_read(ssl, data, sizeof data);
        if (received <= 0 || send(behind, data, (size_t)received, MSG_NOSIGNAL) != received) {
            return 0;
        }
    }
    if (polled[1].revents != 0) {
        ssize_t received = recv(behind, data, sizeof data, 0);
        if (received <= 0) {
            return 0;
        }
        size_t passed = (size_t)received < *left ? (size_t)received : *left;
        if (passed > 0 && SSL_write(ssl, data, (int)passed) <= 0) {
            return 0;
        }
        *left -= passed;
        return *left > 0;
    }
    return 1;
}

static void *relay_serve(void *argument) {
    struct relayed relayed = *(struct relayed *)argument;
    free(argument);
    sigset_t broken_pipe; /* OpenSSL raises SIGPIPE in the thread that writes to a closed connection: only here */
    CHECK(sigemptyset(&broken_pipe) == 0 && sigaddset(&broken_pipe, SIGPIPE) == 0);
    CHECK(pthread_sigmask(SIG_BLOCK, &broken_pipe, NULL) == 0);
    size_t left = relayed.relay->cut_after > 0 ? relayed.relay->cut_after : SIZE_MAX;
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = relayed.relay->target};
    int behind = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(behind >= 0 && connect(behind, (struct sockaddr *)&address, sizeof address) == 0);
    SSL *ssl = SSL_new(relayed.relay->context);
    CHECK(ssl != NULL && SSL_set_fd(ssl, relayed.front) == 1);
    if (SSL_accept(ssl) == 1) {
        while (relay_step(ssl, behind, &left)) {
        }
    }
    ERR_clear_error();
    SSL_free(ssl);
    close(behind);
    close(relayed.front);
    return NULL;
}

static void *relay_accept(void *argument) {
    struct relay *relay = argument;
    for (;;) {
        int front = accept(relay->listener, NULL, NULL);
        if (front < 0) {
            return NULL;
        }
        struct relayed *relayed = malloc(sizeof *relayed);
        CHECK(relayed != NULL && relay->count < CONNECTIONS_MAX);
        *relayed = (struct relayed){.relay = relay, .front = front};
        CHECK(pthread_create(&relay->threads[relay->count++], NULL, relay_serve, relayed) == 0);
    }
}

static void relay_start(struct relay *relay, SSL_CTX *context, struct server *server, size_t cut_after) {
    *relay = (struct relay){.context = context, .target = server_port(server), .cut_after = cut_after};
    relay->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    CHECK(relay->listener >= 0 && bind(relay->listener, (struct sockaddr *)&address, size) == 0);
    CHECK(listen(relay->listener, 16) == 0);
    CHECK(getsockname(relay->listener, (struct sockaddr *)&address, &size) == 0);
    relay->port = address.sin_port;
    CHECK(pthread_create(&relay->accepting, NULL, relay_accept, relay) == 0);
}

/* Clients are gone, so every connection's thread is about to end. */
static void relay_stop(struct relay *relay) {
    shutdown(relay->listener, SHUT_RDWR);
    pthread_join(relay->accepting, NULL);
    close(relay->listener);
    for (uint32_t i = 0; i < relay->count; i++) {
        pthread_join(relay->threads[i], NULL);
    }
}

/* ---- A certificate that signs itself --------------------------------------------------------------------------- */

/* Writes it to 'path' as an authority, and returns a server's context with it. */
static SSL_CTX *make_server_context(const char *path) {
    EVP_PKEY *key = EVP_EC_gen("P-256");
    X509 *certificate = X509_new();
    CHECK(key != NULL && certificate != NULL);
    CHECK(X509_set_version(certificate, X509_VERSION_3) == 1);
    CHECK(ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1) == 1);
    CHECK(X509_gmtime_adj(X509_getm_notBefore(certificate), -86400L) != NULL);
    CHECK(X509_gmtime_adj(X509_getm_notAfter(certificate), 86400L) != NULL);
    X509_NAME *name = X509_get_subject_name(certificate);
    CHECK(X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, (const uint8_t *)"storage", -1, -1, 0) == 1);
    CHECK(X509_set_issuer_name(certificate, name) == 1 && X509_set_pubkey(certificate, key) == 1);
    X509_EXTENSION *names = X509V3_EXT_conf_nid(NULL, NULL, NID_subject_alt_name, "DNS:localhost,IP:127.0.0.1");
    CHECK(names != NULL && X509_add_ext(certificate, names, -1) == 1);
    X509_EXTENSION_free(names);
    CHECK(X509_sign(certificate, key, EVP_sha256()) > 0);
    FILE *file = fopen(path, "w");
    CHECK(file != NULL && PEM_write_X509(file, certificate) == 1);
    fclose(file);
    SSL_CTX *made = SSL_CTX_new(TLS_server_method());
    CHECK(made != NULL && SSL_CTX_use_certificate(made, certificate) == 1);
    CHECK(SSL_CTX_use_PrivateKey(made, key) == 1);
    X509_free(certificate);
    EVP_PKEY_free(key);
    return made;
}

/* ---- The client ------------------------------------------------------------------------------------------------ */

static struct ss_tls *tls;
static SSL_CTX *context; /* the server's */

static enum ss_result shake_hands(struct ss_tls_session *session, int socket) {
    for (;;) {
        uint32_t events;
        enum ss_result result = ss_tls_handshake(session, &events);
        if (result != SS_OK || events == 0) {
            return result;
        }
        struct pollfd polled = {.fd = socket, .events = (short)events};
        CHECK(poll(&polled, 1, (int)(WAIT_MAX_NS / 1000000)) == 1);
    }
}

/* Connections through a relay of their own. */
struct link {
    struct relay relay;
    int32_t sockets[SOCKETS];
    struct ss_tls_session *sessions[SOCKETS];
};

static void link_open(struct link *link, struct bench *bench, size_t cut_after) {
    relay_start(&link->relay, context, bench->server, cut_after);
    for (int i = 0; i < SOCKETS; i++) {
        link->sockets[i] = server_connect_port(link->relay.port);
        CHECK_EQUAL(ss_tls_session_create(tls, link->sockets[i], "127.0.0.1", &link->sessions[i]), SS_OK);
        CHECK_EQUAL(shake_hands(link->sessions[i], link->sockets[i]), SS_OK);
    }
}

static void link_close(struct link *link) {
    for (int i = 0; i < SOCKETS; i++) {
        ss_tls_session_destroy(link->sessions[i]);
        close(link->sockets[i]);
    }
    relay_stop(&link->relay);
}

static struct ss_batch *batch_begin(struct bench *bench, struct link *link) {
    struct ss_batch *batch = bench_begin(bench);
    batch->sessions = link->sessions;
    return batch;
}

/* ---- Tests ----------------------------------------------------------------------------------------------------- */

/* Several of TLS's records are in a chunk. */
PIPELINE_TEST(test_batches, (shape->chunks = 6, shape->vectors = 128), AS_BEFORE) {
    struct link link;
    link_open(&link, bench, 0);
    for (int repeat = 0; repeat < 3; repeat++) {
        struct ss_batch *batch = batch_begin(bench, &link);
        CHECK_EQUAL(pipeline_fetch(bench->pipeline, batch, link.sockets, SOCKETS), SS_OK);
        check_delivered(bench);
        CHECK(!ss_tls_has_pending(link.sessions[0]));
    }
    bench_fault(bench, 3, FAULT_ERROR);
    struct ss_batch *batch = batch_begin(bench, &link);
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, batch, link.sockets, SOCKETS), SS_REFUSED);
    CHECK_EQUAL(batch->sockets_in_sync, 1);
    bench_fault(bench, 2, FAULT_STALL);
    batch = batch_begin(bench, &link);
    batch->deadline_ns = after_ms(200);
    CHECK_EQUAL(pipeline_fetch(bench->pipeline, batch, link.sockets, SOCKETS), SS_DEADLINE);
    link_close(&link);
}

/* Wherever the stream ends, what is delivered is right, and the rest is known to be missing. */
PIPELINE_TEST(test_cut_off, (shape->chunks = 6, shape->vectors = 256), AS_BEFORE) {
    for (uint64_t part = 1; part < 8; part += 2) {
        struct link link;
        link_open(&link, bench, 1 + bench->fixture->stored_bytes * part / 16);
        struct ss_batch *batch = batch_begin(bench, &link);
        CHECK_EQUAL(pipeline_fetch(bench->pipeline, batch, link.sockets, SOCKETS), SS_DISCONNECTED);
        for (uint32_t i = 0; i < batch->piece_count && batch->pieces[i].result == SS_OK; i++) {
            CHECK(fixture_matches(bench->fixture, batch, i));
        }
        link_close(&link);
    }
}

static enum ss_result put(struct bench *bench, struct link *link, uint64_t deadline_ns, char *error, size_t size) {
    static const uint8_t head[100];
    return ss_pipeline_put(bench->pipeline, &bench->fixture->chunks[0], head, sizeof head, 0, link->sockets[0],
                           link->sessions[0], deadline_ns, error, size);
}

PIPELINE_TEST(test_put, shape->vectors = 2048, AS_BEFORE) {
    struct link link;
    char error[64];
    link_open(&link, bench, 0);
    for (int repeat = 0; repeat < 3; repeat++) {
        CHECK_EQUAL(put(bench, &link, after_patience(), error, sizeof error), SS_OK);
    }
    bench_fault(bench, 0, FAULT_ERROR);
    CHECK_EQUAL(put(bench, &link, after_patience(), error, sizeof error), SS_REFUSED);
    CHECK_EQUAL(strncmp(error, "OOM", 3), 0);
    bench_fault(bench, 0, FAULT_STALL);
    CHECK_EQUAL(put(bench, &link, after_ms(100), error, sizeof error), SS_DEADLINE);
    link_close(&link);
}

static void test_what_cannot_be(void) {
    char error[128];
    struct ss_tls *none;
    struct ss_tls_session *session;
    CHECK_EQUAL(ss_tls_create("/nowhere/ca.pem", NULL, NULL, &none, error, sizeof error), SS_BAD_DATA);
    CHECK(error[0] != '\0');
    CHECK_EQUAL(ss_tls_create(NULL, NULL, NULL, &none, error, sizeof error), SS_BAD_ARGUMENT);
    CHECK_EQUAL(ss_tls_create("ca.pem", "own.pem", NULL, &none, error, sizeof error), SS_BAD_ARGUMENT);
    CHECK_EQUAL(ss_tls_session_create(tls, -1, "localhost", &session), SS_BAD_ARGUMENT);
    CHECK_EQUAL(ss_tls_session_create(tls, 0, "", &session), SS_BAD_ARGUMENT);
    CHECK(strstr(ss_tls_library(), "SSL") != NULL);
    ss_tls_session_destroy(NULL);
    ss_tls_destroy(NULL);
}

int main(void) {
    char folder[] = "/tmp/shadowserve-tls-XXXXXX";
    char path[64];
    CHECK(mkdtemp(folder) != NULL);
    CHECK(snprintf(path, sizeof path, "%s/ca.pem", folder) < (int)sizeof path);
    context = make_server_context(path);
    CHECK_EQUAL(ss_tls_create(path, NULL, NULL, &tls, NULL, 0), SS_OK);
    for (int fused = 0; fused <= backend_fuses(); fused++) {
        test_batches(fused);
    }
    test_cut_off(1);
    test_put(1);
    test_what_cannot_be();
    ss_tls_destroy(tls);
    SSL_CTX_free(context);
    CHECK(unlink(path) == 0 && rmdir(folder) == 0);
    return 0;
}
