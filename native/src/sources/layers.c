/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layers.c - the answer to KV.LAYERS
 *
 * The answer is an array. Its first item is an array with the length of each key's record, or null. Then it has one
 * bulk string for each layer: the lengths of the keys' pieces, 32 bits each in little-endian order, and the pieces.
 * Each part may arrive in any number of fragments.
 */
#include "sources/layers.h"

#include <string.h>

void ss_layers_begin(struct ss_layers_reader *reader, const struct ss_feed *feed, struct ss_layers *layers) {
    reader->feed = feed;
    reader->layers = layers;
    reader->phase = SS_LAYERS_HEAD;
    reader->layer = 0;
    reader->key = 0;
    reader->done = 0;
    reader->body_bytes = 0;
    reader->slices = 0;
    ss_resp_head_start(&reader->head);
}

static uint32_t index_of(const struct ss_layers_reader *reader, uint32_t layer, uint32_t key) {
    return reader->layers->pieces[layer * reader->layers->keys + key];
}

uint32_t ss_layers_position(const struct ss_layers_reader *reader) {
    const struct ss_layers *layers = reader->layers;
    uint32_t key = reader->phase == SS_LAYERS_PIECES ? reader->key : 0;
    key = reader->phase == SS_LAYERS_TAIL ? layers->keys : key;
    uint32_t place = reader->layer * layers->keys + key;
    return place < layers->layers * layers->keys ? layers->pieces[place] : reader->feed->batch->piece_count;
}

static const struct ss_piece *piece_of(const struct ss_layers_reader *reader, uint32_t key) {
    return &reader->feed->batch->pieces[index_of(reader, reader->layer, key)];
}

static uint32_t length_of(const struct ss_layers_reader *reader, uint32_t key) {
    const uint8_t *entry = &reader->table[4 * (size_t)key];
    return entry[0] | (uint32_t)entry[1] << 8 | (uint32_t)entry[2] << 16 | (uint32_t)entry[3] << 24;
}

/* ---- Heads --------------------------------------------------------------------------------------------------- */

static void phase_begin(struct ss_layers_reader *reader, enum ss_layers_phase phase) {
    reader->phase = phase;
    reader->done = 0;
    ss_resp_head_start(&reader->head);
}

static void layer_end(struct ss_layers_reader *reader) {
    reader->layer++;
    reader->key = 0;
    phase_begin(reader, reader->layer == reader->layers->layers ? SS_LAYERS_END : SS_LAYERS_LAYER);
}

/* Fails a piece that is still useful: the record does not exist, or is not the expected one. */
static void piece_is_gone(const struct ss_layers_reader *reader, uint32_t key) {
    uint32_t index = index_of(reader, reader->layer, key);
    if (ss_feed_useful(reader->feed, index)) {
        ss_feed_fail(reader->feed, index, SS_NOT_FOUND, 0);
    }
}

static enum ss_layers_status total_take(struct ss_layers_reader *reader) {
    uint64_t expected = 0;
    if (reader->head.kind != SS_RESP_INTEGER && reader->head.kind != SS_RESP_NULL) {
        return SS_LAYERS_INVALID;
    }
    for (uint32_t layer = 0; layer < reader->layers->layers; layer++) {
        expected += reader->feed->batch->pieces[index_of(reader, layer, reader->key)].body_length;
    }
    if (reader->head.kind == SS_RESP_NULL || reader->head.length != expected) {
        piece_is_gone(reader, reader->key);
    }
    if (++reader->key == reader->layers->keys) {
        reader->key = 0;
        phase_begin(reader, SS_LAYERS_LAYER);
    } else {
        ss_resp_head_start(&reader->head);
    }
    return SS_LAYERS_MORE;
}

static enum ss_layers_status layer_take(struct ss_layers_reader *reader) {
    if (reader->head.kind == SS_RESP_ERROR) { /* only for this layer: the others are still answered */
        ss_feed_refused(reader->feed, ss_layers_position(reader), reader->head.text, reader->head.text_length);
        layer_end(reader);
        return SS_LAYERS_MORE;
    }
    if (reader->head.kind != SS_RESP_BULK || reader->head.length < 4ULL * reader->layers->keys) {
        return SS_LAYERS_INVALID;
    }
    reader->payload = reader->head.length;
    phase_begin(reader, SS_LAYERS_TABLE);
    return SS_LAYERS_MORE;
}

static enum ss_layers_status head_take(struct ss_layers_reader *reader) {
    struct ss_layers *layers = reader->layers;
    const struct ss_resp_head *head = &reader->head;
    switch (reader->phase) {
    case SS_LAYERS_HEAD:
        if (head->kind == SS_RESP_ERROR) {
            size_t kept = head->text_length < sizeof layers->error - 1 ? head->text_length : sizeof layers->error - 1;
            memcpy(layers->error, head->text, kept);
            layers->error[kept] = '\0';
            layers->refused = 1;
            return SS_LAYERS_REFUSED;
        }
        if (head->kind != SS_RESP_ARRAY || head->length != 1ULL + layers->layers) {
            return SS_LAYERS_INVALID;
        }
        phase_begin(reader, SS_LAYERS_COUNT);
        return SS_LAYERS_MORE;
    case SS_LAYERS_COUNT:
        if (head->kind != SS_RESP_ARRAY || head->length != layers->keys) {
            return SS_LAYERS_INVALID;
        }
        phase_begin(reader, SS_LAYERS_TOTALS);
        return SS_LAYERS_MORE;
    case SS_LAYERS_TOTALS:
        return total_take(reader);
    default:
        return layer_take(reader);
    }
}

/* ---- Pieces -------------------------------------------------------------------------------------------------- */

/* Skips pieces without bytes, up to the next piece with bytes, or to the layer's end. */
static void piece_begin(struct ss_layers_reader *reader) {
    reader->done = 0;
    while (reader->key < reader->layers->keys && length_of(reader, reader->key) == 0) {
        reader->key++;
    }
    if (reader->key == reader->layers->keys) {
        phase_begin(reader, SS_LAYERS_TAIL);
        return;
    }
    const struct ss_piece *piece = piece_of(reader, reader->key);
    reader->arrival = (struct ss_arrival){.slice_first = piece->slice_first, .slice_count = piece->slice_count};
}

/* Checks the lengths of a layer: they must match the layer's total length, and the batch. */
static enum ss_layers_status table_end(struct ss_layers_reader *reader) {
    uint64_t sum = 4ULL * reader->layers->keys;
    for (uint32_t key = 0; key < reader->layers->keys; key++) {
        sum += length_of(reader, key);
    }
    if (sum != reader->payload) {
        return SS_LAYERS_INVALID;
    }
    for (uint32_t key = 0; key < reader->layers->keys; key++) {
        if (length_of(reader, key) != piece_of(reader, key)->body_length) {
            piece_is_gone(reader, key);
        }
    }
    reader->decided = 0;
    phase_begin(reader, SS_LAYERS_PIECES);
    piece_begin(reader);
    return SS_LAYERS_MORE;
}

/* Returns the target of a piece, NULL if it is useless. The first decision is final: part of it may be in place. */
static uint8_t *place_of(struct ss_layers_reader *reader, uint32_t key) {
    for (; reader->decided <= key; reader->decided++) {
        uint32_t index = index_of(reader, reader->layer, reader->decided);
        reader->taken[reader->decided] = length_of(reader, reader->decided) > 0 && ss_feed_useful(reader->feed, index);
    }
    return reader->taken[key] ? ss_feed_place(reader->feed, index_of(reader, reader->layer, key)) : NULL;
}

size_t ss_layers_parts(struct ss_layers_reader *reader, struct iovec *parts, size_t count_max, size_t bytes_max,
                       int *whole) {
    size_t count = 0;
    uint64_t done = reader->done;
    *whole = 1;
    if (reader->phase == SS_LAYERS_TABLE) {
        parts[0] = (struct iovec){.iov_base = reader->table + done,
                                  .iov_len = 4 * (size_t)reader->layers->keys - (size_t)done};
        return 1;
    }
    for (uint32_t key = reader->key; reader->phase == SS_LAYERS_PIECES && key < reader->layers->keys; key++) {
        uint64_t left = length_of(reader, key) - done;
        uint8_t *place = place_of(reader, key);
        uint64_t room = place != NULL || bytes_max < SS_LAYERS_DROPPED_BYTES ? bytes_max : SS_LAYERS_DROPPED_BYTES;
        size_t size = (size_t)(left < room ? left : room);
        if (left > 0 && (size == 0 || count == count_max)) {
            *whole = 0;
            return count;
        }
        if (left > 0) {
            parts[count++] =
                (struct iovec){.iov_base = place != NULL ? place + done : reader->dropped, .iov_len = size};
        }
        if (size < left) {
            *whole = 0;
            return count;
        }
        bytes_max -= size;
        done = 0;
    }
    return count;
}

/* 'size' more bytes of pieces have been received, into place or not. */
static void pieces_advance(struct ss_layers_reader *reader, uint64_t size) {
    while (size > 0 && reader->phase == SS_LAYERS_PIECES) {
        uint32_t index = ss_layers_position(reader);
        uint64_t left = length_of(reader, reader->key) - reader->done;
        uint64_t taken = size < left ? size : left;
        reader->done += taken;
        size -= taken;
        if (reader->taken[reader->key]) {
            reader->body_bytes += taken;
            reader->slices += ss_feed_arrived(reader->feed, index, &reader->arrival, reader->done);
        }
        if (taken == left) {
            if (reader->taken[reader->key]) {
                ss_feed_answered(reader->feed, index);
            }
            reader->key++;
            piece_begin(reader);
        }
    }
}

enum ss_layers_status ss_layers_placed(struct ss_layers_reader *reader, uint64_t size) {
    if (reader->phase == SS_LAYERS_PIECES) {
        pieces_advance(reader, size);
        return SS_LAYERS_MORE;
    }
    reader->done += size; /* of the table: there are no other parts */
    return size > 0 && reader->done == 4ULL * reader->layers->keys ? table_end(reader) : SS_LAYERS_MORE;
}

/* Consumes bytes that are not in place; '*taken' is their number. */
static enum ss_layers_status bytes_take(struct ss_layers_reader *reader, const uint8_t *data, size_t size,
                                        size_t *taken) {
    struct iovec part;
    int whole;
    if (reader->phase == SS_LAYERS_TABLE || reader->phase == SS_LAYERS_PIECES) {
        (void)ss_layers_parts(reader, &part, 1, size, &whole); /* a part of at least a byte: something is lacking */
        *taken = size < part.iov_len ? size : part.iov_len;
        memcpy(part.iov_base, data, *taken);
        return ss_layers_placed(reader, *taken);
    }
    if (reader->phase == SS_LAYERS_TAIL) {
        *taken = 1;
        if (data[0] != (reader->done++ == 0 ? '\r' : '\n')) {
            return SS_LAYERS_INVALID;
        }
        if (reader->done == 2) {
            layer_end(reader);
        }
        return SS_LAYERS_MORE;
    }
    switch (reader->phase == SS_LAYERS_END ? SS_RESP_INVALID : ss_resp_head_feed(&reader->head, data, size, taken)) {
    case SS_RESP_MORE:
        return SS_LAYERS_MORE;
    case SS_RESP_DONE:
        return head_take(reader);
    default:
        return SS_LAYERS_INVALID;
    }
}

enum ss_layers_status ss_layers_take(struct ss_layers_reader *reader, const uint8_t *data, size_t size) {
    while (size > 0) {
        size_t taken = 0;
        enum ss_layers_status status = bytes_take(reader, data, size, &taken);
        data += taken;
        size -= taken;
        if (status != SS_LAYERS_MORE) {
            return size > 0 ? SS_LAYERS_INVALID : status; /* no more bytes are expected */
        }
    }
    return reader->phase == SS_LAYERS_END ? SS_LAYERS_OVER : SS_LAYERS_MORE;
}
