/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pipeline_server.c - a small RESP server for tests: GETRANGE and SET, and answers to KV.LAYERS that the test sets; one
 * thread for each connection
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "pipeline_support.h"

enum { VALUES_MAX = 256, REPLACED_MAX = 4096, CONNECTIONS_MAX = 4096, ARGUMENTS_MAX = 16 };

struct value {
    uint8_t key[96];
    size_t key_length;
    uint8_t *data;
    size_t size;
    enum fault fault;
    size_t fault_first; /* of ranges that begin there or behind it */
};

struct server {
    int listener;
    uint16_t port;
    pthread_t accepting;
    pthread_mutex_t lock;
    pthread_cond_t stalling;
    uint32_t stalled;
    struct value values[VALUES_MAX];
    uint32_t value_count;
    uint8_t *replaced[REPLACED_MAX]; /* values that an answer may still be reading */
    uint32_t replaced_count;
    struct value layers; /* the answer to KV.LAYERS */
    size_t layers_step;
    struct connection *connections[CONNECTIONS_MAX];
    uint32_t connection_count;
};

struct connection {
    struct server *server;
    int socket;
    FILE *input; /* of the socket */
    pthread_t thread;
    int asking; /* the command before was ASKING */
};

struct argument {
    uint8_t *data;
    size_t size;
};

/* ---- Output -------------------------------------------------------------------------------------------------- */

static int output(struct connection *connection, const void *data, size_t size, size_t step) {
    const uint8_t *bytes = data;
    while (size > 0) {
        ssize_t sent = send(connection->socket, bytes, size < step ? size : step, MSG_NOSIGNAL);
        if (sent <= 0) {
            return 0;
        }
        bytes += sent;
        size -= (size_t)sent;
    }
    return 1;
}

static int output_text(struct connection *connection, const char *text) {
    return output(connection, text, strlen(text), SIZE_MAX);
}

/* Signals that an answer is stalled, and waits until the peer has disconnected. */
static int stall(struct connection *connection) {
    struct server *server = connection->server;
    pthread_mutex_lock(&server->lock);
    server->stalled = 1;
    pthread_cond_broadcast(&server->stalling);
    pthread_mutex_unlock(&server->lock);
    uint8_t ignored[256];
    while (recv(connection->socket, ignored, sizeof ignored, 0) > 0) {
    }
    return 0;
}

/* Half of an answer, then 'fault'. Always the connection's end. */
static int output_half(struct connection *connection, const uint8_t *data, size_t size, enum fault fault) {
    char head[32];
    int length = snprintf(head, sizeof head, "$%zu\r\n", size);
    if (!output(connection, head, (size_t)length, SIZE_MAX) || !output(connection, data, size / 2, SIZE_MAX)) {
        return 0;
    }
    if (fault == FAULT_STALL) {
        return stall(connection);
    }
    if (fault == FAULT_RESET) {
        struct linger linger = {.l_onoff = 1, .l_linger = 0};
        setsockopt(connection->socket, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
    }
    return 0;
}

static int output_bulk(struct connection *connection, const uint8_t *data, size_t size, size_t step, const char *tail) {
    char head[32];
    int length = snprintf(head, sizeof head, "$%zu\r\n", size);
    return output(connection, head, (size_t)length, step) && output(connection, data, size, step) &&
           output(connection, tail, 2, step);
}

/* Sends the bytes [first, last] of 'value' in the way that it is to go wrong. */
static int answer_range(struct connection *connection, const struct value *value, size_t first, size_t last) {
    static const char *const texts[FAULT_STALL + 1] = {
        [FAULT_MISSING] = "$0\r\n\r\n",
        [FAULT_NULL] = "$-1\r\n",
        [FAULT_NULL_RESP3] = "_\r\n",
        [FAULT_ERROR] = "-ERR the test wants it so\r\n",
        [FAULT_MOVED] = "-MOVED 7 127.0.0.1:7001\r\n",
        [FAULT_ASK] = "-ASK 7 127.0.0.1:7001\r\n",
        [FAULT_GARBAGE] = "HTTP/1.1 400 Bad Request\r\n\r\n",
    };
    const uint8_t *data = value->data + first;
    size_t size = last - first + 1;
    enum fault fault = first < value->fault_first ? FAULT_NONE : value->fault;
    if (fault == FAULT_ASK && connection->asking) {
        fault = FAULT_NONE;
    }
    if (texts[fault] != NULL) {
        return output_text(connection, texts[fault]);
    }
    switch (fault) {
    case FAULT_NONE:
        return output_bulk(connection, data, size, SIZE_MAX, "\r\n");
    case FAULT_BYTE_BY_BYTE:
        return output_bulk(connection, data, size, 1, "\r\n");
    case FAULT_SHORT:
        return output_bulk(connection, data, size / 2, SIZE_MAX, "\r\n");
    case FAULT_LONG:
        return output_bulk(connection, data - 1, size + 1, SIZE_MAX, "\r\n");
    case FAULT_NO_TAIL:
        return output_bulk(connection, data, size, SIZE_MAX, "$5");
    default:
        return output_half(connection, data, size, fault);
    }
}

/* ---- Input --------------------------------------------------------------------------------------------------- */

/* Reads "<type><number>\r\n". */
static int input_number(FILE *input, char type, size_t *number) {
    char line[32];
    if (fgets(line, sizeof line, input) == NULL || strchr(line, '\n') == NULL) {
        return 0;
    }
    CHECK(line[0] == type && line[1] != '\r' && strcmp(line + strlen(line) - 2, "\r\n") == 0);
    *number = (size_t)strtoull(line + 1, NULL, 10);
    return 1;
}

static int input_argument(FILE *input, struct argument *argument) {
    if (!input_number(input, '$', &argument->size)) {
        return 0;
    }
    argument->data = malloc(argument->size + 2);
    CHECK(argument->data != NULL);
    if (fread(argument->data, 1, argument->size + 2, input) != argument->size + 2) {
        return 0;
    }
    CHECK(memcmp(argument->data + argument->size, "\r\n", 2) == 0);
    argument->data[argument->size] = '\0';
    return 1;
}

static int is_text(const struct argument *argument, const char *text) {
    return strcmp((const char *)argument->data, text) == 0;
}

/* Turns a value down before it has read it. */
static void refuse_early(struct connection *connection) {
    output_text(connection, "-ERR Protocol error: invalid bulk length\r\n");
    struct pollfd gone = {.fd = connection->socket}; /* unread: what the buffers do not take is never sent */
    while (poll(&gone, 1, -1) < 0) {
    }
}

/* Reads one request. Returns the number of arguments, 0 at the end; the caller frees their data. */
static size_t input_request(struct connection *connection, struct argument arguments[ARGUMENTS_MAX]) {
    size_t count;
    memset(arguments, 0, ARGUMENTS_MAX * sizeof *arguments);
    if (!input_number(connection->input, '*', &count)) {
        return 0;
    }
    CHECK(count > 0 && count <= ARGUMENTS_MAX);
    for (size_t i = 0; i < count; i++) {
        if (!input_argument(connection->input, &arguments[i])) {
            return 0;
        }
        if (i == 1 && is_text(&arguments[0], "SET") && is_text(&arguments[1], "early")) {
            refuse_early(connection);
            return 0;
        }
    }
    return count;
}

/* ---- Commands ------------------------------------------------------------------------------------------------ */

/* With the lock held. */
static struct value *find(struct server *server, const void *key, size_t key_length) {
    for (uint32_t i = 0; i < server->value_count; i++) {
        struct value *value = &server->values[i];
        if (value->key_length == key_length && memcmp(value->key, key, key_length) == 0) {
            return value;
        }
    }
    return NULL;
}

/* With the lock held: the value of 'key', made if it was not there. */
static struct value *find_or_add(struct server *server, const void *key, size_t key_length) {
    struct value *value = find(server, key, key_length);
    if (value == NULL) {
        CHECK(server->value_count < VALUES_MAX && key_length <= sizeof value->key);
        value = &server->values[server->value_count++];
        memset(value, 0, sizeof *value);
        memcpy(value->key, key, key_length);
        value->key_length = key_length;
    }
    return value;
}

static int serve_getrange(struct connection *connection, const struct argument *arguments) {
    struct server *server = connection->server;
    size_t first = (size_t)strtoull((char *)arguments[2].data, NULL, 10);
    size_t last = (size_t)strtoull((char *)arguments[3].data, NULL, 10);
    struct value value = {.fault = FAULT_MISSING};
    pthread_mutex_lock(&server->lock);
    const struct value *found = find(server, arguments[1].data, arguments[1].size);
    if (found != NULL && first < found->size) {
        value = *found; /* its data stays until the server stops */
    }
    pthread_mutex_unlock(&server->lock);
    if (value.data == NULL) {
        static const uint8_t nothing[1];
        value.data = (uint8_t *)(uintptr_t)nothing;
        return answer_range(connection, &value, 0, 0);
    }
    return answer_range(connection, &value, first, last < value.size ? last : value.size - 1);
}

static int serve_set(struct connection *connection, const struct argument *arguments) {
    struct server *server = connection->server;
    pthread_mutex_lock(&server->lock);
    struct value *found = find(server, arguments[1].data, arguments[1].size);
    enum fault fault = found == NULL ? FAULT_NONE : found->fault;
    pthread_mutex_unlock(&server->lock);
    switch (fault) {
    case FAULT_NONE:
        server_keep(server, arguments[1].data, arguments[1].size, arguments[2].data, arguments[2].size);
        return output_text(connection, "+OK\r\n");
    case FAULT_BYTE_BY_BYTE:
        return output(connection, "+OK\r\n", 5, 1);
    case FAULT_ERROR:
        return output_text(connection, "-OOM command not allowed when used memory > 'maxmemory'.\r\n");
    case FAULT_NULL:
        return output_text(connection, "$-1\r\n");
    case FAULT_GARBAGE:
        return output_text(connection, "+OK\r\n+OK\r\n");
    case FAULT_STALL:
        return stall(connection);
    default:
        return 0;
    }
}

static int serve_layers(struct connection *connection) {
    struct server *server = connection->server;
    pthread_mutex_lock(&server->lock);
    struct value answer = server->layers; /* its data stays until the server stops */
    size_t step = server->layers_step;
    pthread_mutex_unlock(&server->lock);
    if (answer.data == NULL) {
        return output_text(connection, "-ERR unknown command 'KV.LAYERS', with args beginning with: \r\n");
    }
    int sent = output(connection, answer.data, answer.size, step);
    return answer.fault == FAULT_STALL ? stall(connection) : sent && answer.fault != FAULT_DISCONNECT;
}

static void *serve(void *argument) {
    struct connection *connection = argument;
    struct argument arguments[ARGUMENTS_MAX];
    int going = 1;
    while (going) {
        size_t count = input_request(connection, arguments);
        if (count == 1 && is_text(&arguments[0], "ASKING")) {
            going = output_text(connection, "+OK\r\n");
            connection->asking = 2; /* for the next one alone */
        } else if (count == 4 && is_text(&arguments[0], "GETRANGE")) {
            going = serve_getrange(connection, arguments);
        } else if (count == 3 && is_text(&arguments[0], "SET")) {
            going = serve_set(connection, arguments);
        } else if (count > 4 && is_text(&arguments[0], "KV.LAYERS")) {
            going = serve_layers(connection);
        } else {
            CHECK_EQUAL(count, 0);
            going = 0;
        }
        connection->asking -= connection->asking > 0;
        for (size_t i = 0; i < ARGUMENTS_MAX; i++) {
            free(arguments[i].data);
        }
    }
    fclose(connection->input);
    return NULL;
}

/* ---- Life ---------------------------------------------------------------------------------------------------- */

static void *accept_all(void *argument) {
    struct server *server = argument;
    for (;;) {
        int accepted = accept(server->listener, NULL, NULL);
        if (accepted < 0) {
            return NULL;
        }
        int on = 1;
        setsockopt(accepted, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct connection *connection = calloc(1, sizeof *connection);
        CHECK(connection != NULL && server->connection_count < CONNECTIONS_MAX);
        connection->server = server;
        connection->socket = accepted;
        connection->input = fdopen(accepted, "r");
        server->connections[server->connection_count++] = connection;
        CHECK(connection->input != NULL && pthread_create(&connection->thread, NULL, serve, connection) == 0);
    }
}

struct server *server_start(void) {
    struct server *server = calloc(1, sizeof *server);
    CHECK(server != NULL);
    pthread_mutex_init(&server->lock, NULL);
    pthread_cond_init(&server->stalling, NULL);
    server->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    CHECK(server->listener >= 0 && bind(server->listener, (struct sockaddr *)&address, size) == 0);
    /* A bound on what a client can send unread: Linux 6.18 lets a receive buffer grow to 32 MiB. */
    int received_bytes = 1 << 20;
    CHECK(setsockopt(server->listener, SOL_SOCKET, SO_RCVBUF, &received_bytes, sizeof received_bytes) == 0);
    CHECK(listen(server->listener, 64) == 0);
    CHECK(getsockname(server->listener, (struct sockaddr *)&address, &size) == 0);
    server->port = address.sin_port;
    CHECK(pthread_create(&server->accepting, NULL, accept_all, server) == 0);
    return server;
}

/* Clients close their sockets first, so every connection's thread is at its end or about to be. */
void server_stop(struct server *server) {
    shutdown(server->listener, SHUT_RDWR);
    pthread_join(server->accepting, NULL);
    close(server->listener);
    for (uint32_t i = 0; i < server->connection_count; i++) {
        pthread_join(server->connections[i]->thread, NULL);
        free(server->connections[i]);
    }
    for (uint32_t i = 0; i < server->value_count; i++) {
        free(server->values[i].data);
    }
    free(server->layers.data);
    for (uint32_t i = 0; i < server->replaced_count; i++) {
        free(server->replaced[i]);
    }
    pthread_cond_destroy(&server->stalling);
    pthread_mutex_destroy(&server->lock);
    free(server);
}

/* Keeps what is not to be answered any more until the server stops: an answer may still be reading it. */
static void retire(struct server *server, uint8_t *data) {
    if (data != NULL) {
        CHECK(server->replaced_count < REPLACED_MAX);
        server->replaced[server->replaced_count++] = data;
    }
}

void server_answer_layers(struct server *server, const void *answer, size_t size, size_t step, enum fault then) {
    uint8_t *copy = malloc(size + 1);
    CHECK(copy != NULL);
    memcpy(copy, answer, size);
    pthread_mutex_lock(&server->lock);
    retire(server, server->layers.data);
    server->layers = (struct value){.data = copy, .size = size, .fault = then};
    server->layers_step = step;
    server->stalled = 0;
    pthread_mutex_unlock(&server->lock);
}

void server_keep(struct server *server, const void *key, size_t key_length, const void *data, size_t size) {
    uint8_t *copy = malloc(size);
    CHECK(copy != NULL);
    memcpy(copy, data, size);
    pthread_mutex_lock(&server->lock);
    struct value *value = find_or_add(server, key, key_length);
    retire(server, value->data);
    value->data = copy;
    value->size = size;
    pthread_mutex_unlock(&server->lock);
}

void server_fault(struct server *server, const void *key, size_t key_length, enum fault fault) {
    server_fault_from(server, key, key_length, fault, 0);
}

void server_fault_from(struct server *server, const void *key, size_t key_length, enum fault fault, size_t first) {
    pthread_mutex_lock(&server->lock);
    struct value *value = find_or_add(server, key, key_length);
    value->fault = fault;
    value->fault_first = first;
    server->stalled = 0;
    pthread_mutex_unlock(&server->lock);
}

void server_wait_stalled(struct server *server) {
    pthread_mutex_lock(&server->lock);
    while (!server->stalled) {
        pthread_cond_wait(&server->stalling, &server->lock);
    }
    pthread_mutex_unlock(&server->lock);
}

uint16_t server_port(const struct server *server) {
    return server->port;
}

int server_connect(struct server *server) {
    return server_connect_port(server->port);
}

int server_connect_port(uint16_t port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = port};
    int connected = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(connected >= 0 && connect(connected, (struct sockaddr *)&address, sizeof address) == 0);
    CHECK(fcntl(connected, F_SETFL, O_NONBLOCK) == 0);
    return connected;
}
