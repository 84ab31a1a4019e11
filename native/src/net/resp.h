/* SPDX-License-Identifier: Apache-2.0 */
/*
 * resp.h - the subset of the Redis protocol that the C core uses
 *
 * Requests are written to a buffer of the caller. Replies are read in two steps: the head (one line) with
 * ss_resp_head_feed(), byte by byte if necessary, and a bulk string's body by the caller, directly into place.
 */
#ifndef SS_RESP_H
#define SS_RESP_H

#include <stddef.h>
#include <stdint.h>

/* Bytes that hold any request that this file builds for a key of up to SS_RESP_KEY_MAX bytes, and ASKING before it. */
enum { SS_RESP_KEY_MAX = 96, SS_RESP_REQUEST_MAX = 256 };

/* Bytes that hold what follows the value of a SET. */
enum { SS_RESP_SET_END_MAX = 64 };

/* Longest error line that is accepted; Redis's own error lines are under 200 bytes. */
enum { SS_RESP_LINE_MAX = 4096 };

/* Most bytes that are kept of a simple string's or an error's text. */
enum { SS_RESP_TEXT_MAX = 256 };

enum ss_resp_kind {
    SS_RESP_BULK,    /* "$n": n bytes and CR LF follow */
    SS_RESP_NULL,    /* "$-1" (RESP2) or "_" (RESP3) */
    SS_RESP_SIMPLE,  /* "+text" */
    SS_RESP_ERROR,   /* "-text" */
    SS_RESP_INTEGER, /* ":n", 0 or more */
    SS_RESP_ARRAY    /* "*n": n replies follow */
};

enum ss_resp_status { SS_RESP_MORE, SS_RESP_DONE, SS_RESP_INVALID };

/* A reply head being read. 'kind', 'length' and 'text' are valid once the status is SS_RESP_DONE. */
struct ss_resp_head {
    enum ss_resp_kind kind;
    uint64_t length;            /* SS_RESP_BULK: bytes of the body; SS_RESP_INTEGER, SS_RESP_ARRAY: the number */
    uint32_t text_length;       /* SS_RESP_SIMPLE and SS_RESP_ERROR only: bytes kept in text, without a zero */
    uint32_t line_length;       /* bytes seen so far, type byte included */
    enum ss_resp_status status; /* sticky: a head that is DONE or INVALID takes no more bytes */
    char text[SS_RESP_TEXT_MAX];
    uint8_t carriage_return; /* the last byte was CR, so that LF must follow */
    uint8_t negative;        /* "$-" was seen */
};

/* ss_resp_head_start() makes 'head' ready for the first byte of a reply. */
void ss_resp_head_start(struct ss_resp_head *head);

/*
 * ss_resp_head_feed() reads up to 'size' bytes and stops after the LF that ends the head; '*consumed' tells how many
 * it took. Never takes a byte of what follows the head. Replies of other kinds, lengths with signs or leading zeros
 * and lines over SS_RESP_LINE_MAX are SS_RESP_INVALID.
 */
enum ss_resp_status ss_resp_head_feed(struct ss_resp_head *head, const uint8_t *data, size_t size, size_t *consumed);

/* ss_resp_getrange() writes "GETRANGE key first last" (last inclusive, as in Redis); returns its length. */
size_t ss_resp_getrange(uint8_t request[SS_RESP_REQUEST_MAX], const uint8_t *key, uint32_t key_length, uint64_t first,
                        uint64_t last);

/* ss_resp_asking() writes "ASKING"; with any request behind it, it is within SS_RESP_REQUEST_MAX. */
size_t ss_resp_asking(uint8_t request[SS_RESP_REQUEST_MAX]);

/*
 * ss_resp_set() writes "SET key value" up to the first byte of the value, and to 'end' what follows the value. With
 * 'lasts_ms' other than 0 the command is "SET key value NX PX lasts_ms": an existing value keeps its expiry.
 */
size_t ss_resp_set(uint8_t request[SS_RESP_REQUEST_MAX], const uint8_t *key, uint32_t key_length, uint64_t value_length,
                   uint32_t lasts_ms, char end[SS_RESP_SET_END_MAX]);

#endif /* SS_RESP_H */
