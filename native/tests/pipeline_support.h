/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pipeline_support.h - what the pipeline's tests share: a small RESP server that misbehaves on demand, and records
 * with everything that is known about them
 */
#ifndef PIPELINE_SUPPORT_H
#define PIPELINE_SUPPORT_H

#include <pthread.h>

#include "check.h"
#include "cpu/clock.h"
#include "shadowserve.h"

/* ---- Server -------------------------------------------------------------------------------------------------- */

/* Fault of the server, for one key. */
enum fault {
    FAULT_NONE,
    FAULT_BYTE_BY_BYTE, /* nothing wrong: every byte in its own segment */
    FAULT_MISSING,      /* $0, as GETRANGE answers for a key that is not there */
    FAULT_NULL,         /* $-1 */
    FAULT_NULL_RESP3,   /* _ */
    FAULT_SHORT,        /* half of the range, well formed */
    FAULT_LONG,         /* one byte more than was asked for */
    FAULT_ERROR,        /* -ERR */
    FAULT_MOVED,        /* -MOVED */
    FAULT_ASK,          /* -ASK, unless ASKING went before */
    FAULT_GARBAGE,
    FAULT_NO_TAIL,    /* the body is not followed by CR LF */
    FAULT_DISCONNECT, /* half of the body, then the connection closes */
    FAULT_RESET,      /* half of the body, then RST */
    FAULT_STALL,      /* half of the body, then nothing until the peer goes */
};

struct server;

struct server *server_start(void);

/* server_stop() ends all connections and frees the values. */
void server_stop(struct server *server);

/* server_keep() copies a value; a value that is there is replaced. */
void server_keep(struct server *server, const void *key, size_t key_length, const void *value, size_t size);

/* server_fault() makes every answer about 'key' go wrong from now on. */
void server_fault(struct server *server, const void *key, size_t key_length, enum fault fault);

/* server_fault_from() does so of ranges that begin at byte 'first' of the value, or behind it. */
void server_fault_from(struct server *server, const void *key, size_t key_length, enum fault fault, size_t first);

/*
 * server_answer_layers() makes the server answer KV.LAYERS, whatever is asked for, with a copy of these bytes, 'step'
 * at a time, and then go on, close the connection (FAULT_DISCONNECT) or stall. Before that it does not know the
 * command.
 */
void server_answer_layers(struct server *server, const void *answer, size_t size, size_t step, enum fault then);

/* server_wait_stalled() blocks until an answer is stalled. */
void server_wait_stalled(struct server *server);

/* server_connect() returns a connected, non-blocking socket. */
int server_connect(struct server *server);

/* The same across processes. The port is in network byte order. */
uint16_t server_port(const struct server *server);
int server_connect_port(uint16_t port);

/* ---- Records ------------------------------------------------------------------------------------------------- */

struct shape {
    enum ss_codec codec;
    enum ss_quantizer quantizer;
    enum ss_dtype dtype;
    uint32_t bins; /* of even slices; odd ones have two more */
    uint32_t scale_vectors;
    uint32_t chunks;
    uint32_t slices;  /* of a chunk */
    uint32_t vectors; /* of a slice */
    uint32_t vector_length;
};

/* Source data, what it must come back as, and its stored form. */
struct fixture {
    struct shape shape;
    uint8_t *source;
    uint8_t *expected;
    uint64_t size;     /* bytes of both, and of a group's memory */
    uint8_t **records; /* of each chunk: RECORD_OFFSET bytes of head, then the body */
    uint64_t *record_sizes;
    struct ss_piece *chunks; /* all of each in one piece, as a fetch batch wants them */
    struct ss_slice *slices;
    uint64_t stored_bytes; /* of all bodies */
    uint64_t decompression_bytes;
    uint64_t dequantization_bytes;
};

enum { RECORD_OFFSET = 37, GROUPS_MAX = 4 };

struct fixture *fixture_make(const struct shape *shape);
void fixture_free(struct fixture *fixture);
void fixture_serve(const struct fixture *fixture, struct server *server);

/*
 * fixture_round() makes a batch of one group, chunk by chunk, with tables of its own over memory that is filled
 * with 0xAA.
 */
struct ss_batch *fixture_round(const struct fixture *fixture);
void batch_free(struct ss_batch *batch);

/* batch_make_room() places the pieces in the store buffer, as ss_pipeline_encode() needs it. */
void batch_make_room(struct ss_batch *batch);

/* fixture_matches() returns whether chunk 'chunk' was delivered right. */
int fixture_matches(const struct fixture *fixture, const struct ss_batch *batch, uint32_t chunk);

/*
 * fixture_piece() returns 'layers' layers of 'layer_slices' slices each, from 'layer' on, of a chunk as a piece, and
 * puts its slices into 'slices', which are all of the fixture's: their offsets begin at the piece's own first byte.
 */
struct ss_piece fixture_piece(const struct fixture *fixture, struct ss_slice *slices, uint32_t chunk, uint32_t layer,
                              uint32_t layers, uint32_t layer_slices);
int fixture_piece_matches(const struct fixture *fixture, const struct ss_batch *batch, const struct ss_piece *piece);

/*
 * The backend that a test runs over: SHADOWSERVE_TEST_BACKEND, or software. CTest runs what is about the pipeline over
 * each of them.
 */
const char *test_backend(void);

/* backend_fuses() returns 1 where that backend can fuse the stages, which an accelerator cannot, else 0. */
int backend_fuses(void);

/*
 * pipeline_options() fits a fixture: two threads for each stage, unpinned, and the stages fused or separate.
 */
struct ss_pipeline_options pipeline_options(const struct fixture *fixture, int fused);

/* pipeline_fetch() is ss_pipeline_fetch() to memory that is registered for as long as it takes, where it can be. */
enum ss_result pipeline_fetch(struct ss_pipeline *pipeline, struct ss_batch *batch, const int32_t *sockets,
                              uint32_t socket_count);

/* default_shape() is a small binned bfloat16 batch over Deflate. */
struct shape default_shape(void);

/* ---- Benches ------------------------------------------------------------------------------------------------- */

enum { NODES_MAX = 3, SOCKETS = 2, SOCKETS_MAX = NODES_MAX * SOCKETS, BODIES_MAX = 64 };

/* What most tests need: a fixture, its servers (one, or options.nodes_max), a pipeline, connections, and a batch. */
struct bench {
    int fused;
    struct shape shape;
    struct fixture *fixture;
    struct fixture *other;            /* of a second group, which the same servers have; or NULL */
    const struct ss_backend *backend; /* NULL: that of the options */
    struct ss_pipeline_options options;
    struct ss_pipeline *pipeline;
    struct server *servers[NODES_MAX];
    struct server *server; /* the first */
    uint32_t node_count;
    int32_t sockets[SOCKETS_MAX]; /* SOCKETS for each node, and a third of the only one */
    uint32_t socket_count;
    struct ss_batch *batch;      /* NULL, or of bench_begin() */
    uint8_t *bodies[BODIES_MAX]; /* of bench_body() */
};

/*
 * PIPELINE_TEST(name, shape, options) { ... } defines name(fused), a test with 'struct bench *bench'. Its two other
 * arguments are empty, or assign to 'shape->' and 'options->' what differs from the defaults.
 */
#define PIPELINE_TEST(name, shape_changes, option_changes)                                                             \
    static void name##_with(struct bench *bench);                                                                      \
    static void name(int fused) {                                                                                      \
        struct bench bench = {.fused = fused, .shape = default_shape()};                                               \
        struct shape *const shape = &bench.shape;                                                                      \
        struct ss_pipeline_options *const options = &bench.options;                                                    \
        (void)shape, shape_changes;                                                                                    \
        bench_prepare(&bench);                                                                                         \
        (void)options, option_changes;                                                                                 \
        bench_start(&bench);                                                                                           \
        name##_with(&bench);                                                                                           \
        bench_stop(&bench);                                                                                            \
    }                                                                                                                  \
    static void name##_with(struct bench *bench)
#define AS_BEFORE (void)0

/* bench_prepare() makes the fixture of 'shape', and its options; bench_start() all else but the batch. */
void bench_prepare(struct bench *bench);
void bench_start(struct bench *bench);
void bench_stop(struct bench *bench);

/* bench_open() makes the pipeline again, by the options; bench_close() ends it. */
void bench_open(struct bench *bench);
void bench_close(struct bench *bench);

/* bench_begin() replaces the batch by a new one, over memory that is filled with 0xAA. */
struct ss_batch *bench_begin(struct bench *bench);

/*
 * bench_body() gives a piece of the batch its stored body in memory of this process, each of its own and not a byte
 * longer: what reads past one is seen. bench_begin() frees the bodies.
 */
void bench_body(struct bench *bench, uint32_t piece);
void bench_free_bodies(struct bench *bench);

/* bench_serve() has every server answer well again. */
void bench_serve(struct bench *bench);

/* bench_reconnect() replaces all connections. */
void bench_reconnect(struct bench *bench);

/* bench_fault() makes answers about a chunk go wrong. */
void bench_fault(struct bench *bench, uint32_t chunk, enum fault fault);

/* bench_fetch() runs the batch; every piece with SS_OK must be in place. Over the first 'sockets', or SOCKETS a node.
 */
enum ss_result bench_fetch_over(struct bench *bench, uint32_t sockets);
enum ss_result bench_fetch(struct bench *bench);

/* check_delivered() checks that all of the batch is there. */
void check_delivered(const struct bench *bench);

/* bench_cancel_stalled() starts a thread that cancels the batch when an answer has stalled. */
void bench_cancel_stalled(struct bench *bench, pthread_t *thread);

/* emulate() sets DOCA_EMULATOR_<name>, or with NULL removes it. The emulator reads it when it opens a closed device. */
void emulate(const char *name, const char *value);

/* ---- Time ---------------------------------------------------------------------------------------------------- */

/* Time that what must end may take, on a machine that stands still for seconds; and what it takes on one that does not,
 * once at least in several tries: then the call itself is prompt. */
#define WAIT_MAX_NS 60000000000ULL
#define PROMPT_NS 1000000000ULL

static inline uint64_t after_ms(uint64_t milliseconds) {
    return ss_now_ns() + milliseconds * 1000000ULL;
}

/* after_patience() is a deadline that is not meant to be hit. */
static inline uint64_t after_patience(void) {
    return ss_now_ns() + WAIT_MAX_NS;
}

#endif /* PIPELINE_SUPPORT_H */
