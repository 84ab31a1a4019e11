/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layers.h - the answer to KV.LAYERS, read: a batch's pieces at a node in one stream, layer after layer
 * (storage_kv/README.md)
 *
 * The caller receives bytes into ss_layers_parts(), and then calls ss_layers_placed(); or into any memory, and then
 * calls ss_layers_take(). No byte of a piece is placed before the lengths of its layer are checked against the batch. A
 * piece with another record than expected fails, and useless bytes are read and dropped.
 */
#ifndef SS_LAYERS_H
#define SS_LAYERS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "net/resp.h"
#include "sources/source.h"

enum ss_layers_status {
    SS_LAYERS_MORE,
    SS_LAYERS_OVER,    /* all of it has been read */
    SS_LAYERS_REFUSED, /* the server answered an error instead; the connection is in step */
    SS_LAYERS_INVALID  /* it is no such answer */
};

/* Part of the answer to read next. */
enum ss_layers_phase {
    SS_LAYERS_HEAD,   /* of the answer */
    SS_LAYERS_COUNT,  /* of the totals */
    SS_LAYERS_TOTALS, /* of each key */
    SS_LAYERS_LAYER,  /* head of a layer */
    SS_LAYERS_TABLE,  /* lengths of its pieces */
    SS_LAYERS_PIECES,
    SS_LAYERS_TAIL, /* CR LF */
    SS_LAYERS_END
};

/* Target of dropped bytes. */
enum { SS_LAYERS_DROPPED_BYTES = 16 << 10 };

struct ss_layers_reader {
    const struct ss_feed *feed;
    struct ss_layers *layers; /* the node's */
    enum ss_layers_phase phase;
    struct ss_resp_head head;
    uint32_t layer; /* position: of the request's layers */
    uint32_t key;   /* of its keys */
    uint64_t done;  /* bytes of the table, the piece or the tail */
    uint64_t payload;
    uint32_t decided; /* keys of this layer for which it is decided whether their pieces are kept */
    struct ss_arrival arrival;
    uint64_t body_bytes; /* that were placed in this batch */
    uint64_t slices;
    uint8_t table[4 * SS_LAYERS_KEYS_MAX];
    uint8_t taken[SS_LAYERS_KEYS_MAX];
    uint8_t dropped[SS_LAYERS_DROPPED_BYTES];
};

/* ss_layers_begin() begins to read the answer to one of a batch's requests. */
void ss_layers_begin(struct ss_layers_reader *reader, const struct ss_feed *feed, struct ss_layers *layers);

/*
 * ss_layers_parts() stores the targets of the next bytes, at most 'bytes_max' in at most 'count_max' parts; returns the
 * number of parts.
 * '*whole': the parts end with the table or the layer, so that bytes behind them can be received with them.
 */
size_t ss_layers_parts(struct ss_layers_reader *reader, struct iovec *parts, size_t count_max, size_t bytes_max,
                       int *whole);

/* ss_layers_placed() reports the number of bytes that were received into the parts. */
enum ss_layers_status ss_layers_placed(struct ss_layers_reader *reader, uint64_t size);

/* ss_layers_take() processes bytes that were received into other memory. */
enum ss_layers_status ss_layers_take(struct ss_layers_reader *reader, const uint8_t *data, size_t size);

/* ss_layers_position() returns the node's first piece that is not whole; the number of pieces at the end. */
uint32_t ss_layers_position(const struct ss_layers_reader *reader);

#endif /* SS_LAYERS_H */
