/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_layers.c - any bytes, given to the reader of KV.LAYERS, into place and not
 *
 * Invariants: parts lie in a piece's own place, the table or what is dropped, and are never empty; a piece has all its
 * slices handed on, in order and once, before it is answered; a piece that was of no use when it began is left alone.
 *
 * Input: one byte for how it is cut, one for when a chunk becomes useless, then the answer.
 */
#include <string.h>

#include "check.h"
#include "sources/layers.h"

enum { KEYS = 3, LAYERS = 2, PIECES = KEYS * LAYERS, PIECE_BYTES = 5 };

static struct ss_piece pieces[PIECES];
static uint8_t places[PIECES][PIECE_BYTES];
static uint32_t slices_of[PIECES], answers_of[PIECES], useful_chunks;
static int wanted[PIECES], placed[PIECES];

/* ---- What the pipeline does for a source ---- */

int ss_feed_useful(const struct ss_feed *feed, uint32_t piece) {
    (void)feed;
    CHECK(piece < PIECES, "piece %u", piece);
    int useful = pieces[piece].chunk < useful_chunks;
    wanted[piece] |= useful;
    return useful;
}

uint8_t *ss_feed_place(const struct ss_feed *feed, uint32_t piece) {
    (void)feed;
    CHECK(piece < PIECES && wanted[piece], "piece %u was never useful", piece);
    placed[piece] = 1;
    return places[piece];
}

uint32_t ss_feed_arrived(const struct ss_feed *feed, uint32_t piece, struct ss_arrival *arrival, uint64_t received) {
    (void)feed;
    CHECK(wanted[piece] && received <= PIECE_BYTES, "%llu bytes", (unsigned long long)received);
    CHECK(arrival->slice_first == piece && arrival->passed == slices_of[piece], "slices of piece %u", piece);
    if (received < PIECE_BYTES || arrival->passed == arrival->slice_count) {
        return 0;
    }
    arrival->passed++;
    slices_of[piece]++;
    return 1;
}

void ss_feed_answered(const struct ss_feed *feed, uint32_t piece) {
    (void)feed;
    CHECK(slices_of[piece] == 1 && answers_of[piece]++ == 0, "piece %u is answered too early or twice", piece);
}

void ss_feed_fail(const struct ss_feed *feed, uint32_t piece, enum ss_result result, int broken) {
    (void)feed;
    CHECK(result == SS_NOT_FOUND && !broken && piece < PIECES, "piece %u", piece);
    useful_chunks = pieces[piece].chunk < useful_chunks ? pieces[piece].chunk : useful_chunks;
}

void ss_feed_refused(const struct ss_feed *feed, uint32_t piece, const char *text, size_t length) {
    CHECK(length <= SS_RESP_TEXT_MAX && (length == 0 || text != NULL), "%zu bytes of text", length);
    ss_feed_fail(feed, piece, SS_NOT_FOUND, 0);
}

/* ---- The reader ---- */

/* Gives the reader some bytes as a socket would: into its parts, and behind them. */
static enum ss_layers_status give(struct ss_layers_reader *reader, const uint8_t *data, size_t size) {
    struct iovec parts[2];
    int whole;
    size_t moved = 0, count = ss_layers_parts(reader, parts, 2, 7, &whole);
    for (size_t i = 0; i < count && moved < size; i++) {
        size_t taken = size - moved < parts[i].iov_len ? size - moved : parts[i].iov_len;
        CHECK(taken > 0, "an empty part");
        memcpy(parts[i].iov_base, data + moved, taken); /* the address sanitizer sees whether it belongs there */
        moved += taken;
    }
    CHECK(count > 0 || whole, "neither a part nor an end");
    enum ss_layers_status status = ss_layers_placed(reader, moved);
    if (status != SS_LAYERS_MORE || moved == size) {
        return status;
    }
    return whole ? ss_layers_take(reader, data + moved, size - moved) : give(reader, data + moved, size - moved);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct ss_layers_reader reader;
    uint32_t order[PIECES];
    struct ss_layers layers = {.layers = LAYERS, .keys = KEYS, .pieces = order};
    struct ss_batch batch = {.pieces = pieces, .piece_count = PIECES, .layers = &layers, .layers_count = 1};
    const struct ss_feed feed = {.batch = &batch};
    if (size < 2) {
        return 0;
    }
    size_t step = 1 + data[0] % 32, useless = data[1];
    for (uint32_t i = 0; i < PIECES; i++) {
        order[i] = i;
        pieces[i] =
            (struct ss_piece){.chunk = i % KEYS, .body_length = PIECE_BYTES, .slice_first = i, .slice_count = 1};
    }
    memset(slices_of, 0, sizeof slices_of);
    memset(answers_of, 0, sizeof answers_of);
    memset(wanted, 0, sizeof wanted);
    memset(placed, 0, sizeof placed);
    useful_chunks = KEYS;
    ss_layers_begin(&reader, &feed, &layers);
    enum ss_layers_status status = SS_LAYERS_MORE;
    for (size_t at = 2; at < size && status == SS_LAYERS_MORE; at += step) {
        size_t some = size - at < step ? size - at : step;
        status = data[0] & 32 ? ss_layers_take(&reader, data + at, some) : give(&reader, data + at, some);
        CHECK(ss_layers_position(&reader) <= PIECES, "position %u", ss_layers_position(&reader));
        if (at > useless && useful_chunks > 1) {
            useful_chunks = 1;
        }
    }
    for (uint32_t i = 0; i < PIECES && status == SS_LAYERS_OVER; i++) {
        CHECK(answers_of[i] == (uint32_t)placed[i], "piece %u is not whole", i);
    }
    CHECK(status != SS_LAYERS_REFUSED || layers.refused, "refused, and nothing says so");
    return 0;
}
