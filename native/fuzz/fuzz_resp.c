/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_resp.c - any bytes, given to the reader of reply heads, whole and in pieces
 *
 * Invariants: both ways end in the same state after the same number of bytes; a head that is done ends with CR LF and
 * says nothing that was not in its line; what is behind a head is never taken.
 *
 * Input: one byte for the size of the pieces, then the replies.
 */
#include "check.h"
#include "net/resp.h"

static void check_head(const struct ss_resp_head *head, const uint8_t *line, size_t size) {
    if (head->status != SS_RESP_DONE) {
        return;
    }
    CHECK(size >= 3 && line[size - 2] == '\r' && line[size - 1] == '\n', "done after %zu bytes", size);
    if (head->kind == SS_RESP_BULK || head->kind == SS_RESP_INTEGER || head->kind == SS_RESP_ARRAY) {
        char text[32], type = head->kind == SS_RESP_BULK ? '$' : head->kind == SS_RESP_INTEGER ? ':' : '*';
        int length = snprintf(text, sizeof text, "%c%llu\r\n", type, (unsigned long long)head->length);
        CHECK((size_t)length == size && memcmp(text, line, size) == 0, "length %llu", (unsigned long long)head->length);
    } else if (head->kind == SS_RESP_NULL) {
        CHECK((size == 3 && line[0] == '_') || (size == 5 && memcmp(line, "$-1", 3) == 0), "null of %zu bytes", size);
    } else {
        size_t kept = size - 3 < SS_RESP_TEXT_MAX ? size - 3 : SS_RESP_TEXT_MAX;
        CHECK(head->text_length == kept && memcmp(head->text, line + 1, kept) == 0, "text of %u", head->text_length);
    }
}

/* Reads one head in pieces; returns the bytes that it took. */
static size_t feed_pieces(struct ss_resp_head *head, const uint8_t *data, size_t size, size_t piece) {
    size_t total = 0;
    ss_resp_head_start(head);
    while (total < size && head->status == SS_RESP_MORE) {
        size_t given = size - total < piece ? size - total : piece, consumed;
        ss_resp_head_feed(head, data + total, given, &consumed);
        CHECK(consumed <= given, "took %zu of %zu", consumed, given);
        total += consumed;
    }
    return total;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct ss_resp_head whole, pieces;
    size_t consumed;

    if (size < 2) {
        return 0;
    }
    size_t piece = 1 + data[0] % 16u;
    data++;
    size--;
    do {
        ss_resp_head_start(&whole);
        ss_resp_head_feed(&whole, data, size, &consumed);
        CHECK(consumed <= size && consumed <= SS_RESP_LINE_MAX + 2, "took %zu of %zu", consumed, size);
        CHECK(feed_pieces(&pieces, data, size, piece) == consumed, "pieces of %zu took another number", piece);
        CHECK(whole.status == pieces.status, "status %d and %d", (int)whole.status, (int)pieces.status);
        check_head(&whole, data, consumed);
        check_head(&pieces, data, consumed);
        data += consumed;
        size -= consumed;
    } while (whole.status == SS_RESP_DONE && size > 0);
    return 0;
}
