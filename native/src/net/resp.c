/* SPDX-License-Identifier: Apache-2.0 */
/*
 * resp.c - RESP requests and reply heads
 *
 * Grammar: the Redis serialization protocol specification, RESP2, with RESP3's null. The parser keeps no input, only
 * where it is, so that a reply may arrive in pieces of any size.
 */
#include "net/resp.h"

#include <stdio.h>
#include <string.h>

/* Twelve digits are a terabyte: far over any limit of ours, far under an overflow. */
enum { LENGTH_DIGITS_MAX = 12 };

void ss_resp_head_start(struct ss_resp_head *head) {
    head->kind = SS_RESP_BULK;
    head->length = 0;
    head->text_length = 0;
    head->line_length = 0;
    head->status = SS_RESP_MORE;
    head->carriage_return = 0;
    head->negative = 0;
}

static enum ss_resp_status head_type(struct ss_resp_head *head, uint8_t byte) {
    static const char types[] = {'$', '_', '+', '-', ':', '*'}; /* in the order of enum ss_resp_kind */
    const char *found = memchr(types, byte, sizeof types);
    if (found == NULL) {
        return SS_RESP_INVALID;
    }
    head->kind = (enum ss_resp_kind)(found - types);
    return SS_RESP_MORE;
}

/* 'position' counts the bytes behind the type byte: 0 for the first digit or sign. */
static enum ss_resp_status head_length(struct ss_resp_head *head, uint32_t position, uint8_t byte) {
    if (position == 0 && byte == '-' && head->kind == SS_RESP_BULK) {
        head->negative = 1;
        return SS_RESP_MORE;
    }
    if (head->negative) {
        if (position != 1 || byte != '1') {
            return SS_RESP_INVALID;
        }
        head->kind = SS_RESP_NULL;
        return SS_RESP_MORE;
    }
    if (byte < '0' || byte > '9' || position >= LENGTH_DIGITS_MAX || (position == 1 && head->length == 0)) {
        return SS_RESP_INVALID;
    }
    head->length = head->length * 10 + (uint64_t)(byte - '0');
    return SS_RESP_MORE;
}

static int has_number(enum ss_resp_kind kind) {
    return kind == SS_RESP_BULK || kind == SS_RESP_INTEGER || kind == SS_RESP_ARRAY;
}

static enum ss_resp_status head_payload(struct ss_resp_head *head, uint32_t position, uint8_t byte) {
    if (has_number(head->kind) || head->negative) {
        return head_length(head, position, byte);
    }
    if (head->kind == SS_RESP_NULL) {
        return SS_RESP_INVALID;
    }
    if (head->text_length < SS_RESP_TEXT_MAX) {
        head->text[head->text_length++] = (char)byte;
    }
    return SS_RESP_MORE;
}

/* A line ends well where its kind says so: a number needs a digit, "$-" needs its 1. */
static enum ss_resp_status head_end(const struct ss_resp_head *head) {
    if (has_number(head->kind) && (head->line_length < 2 || head->negative)) {
        return SS_RESP_INVALID;
    }
    return SS_RESP_DONE;
}

static enum ss_resp_status head_byte(struct ss_resp_head *head, uint8_t byte) {
    if (head->carriage_return) {
        return byte == '\n' ? head_end(head) : SS_RESP_INVALID;
    }
    if (head->line_length == 0) {
        head->line_length = 1;
        return head_type(head, byte);
    }
    if (byte == '\r') {
        head->carriage_return = 1;
        return SS_RESP_MORE;
    }
    if (byte == '\n' || head->line_length >= SS_RESP_LINE_MAX) {
        return SS_RESP_INVALID;
    }
    return head_payload(head, head->line_length++ - 1, byte);
}

enum ss_resp_status ss_resp_head_feed(struct ss_resp_head *head, const uint8_t *data, size_t size, size_t *consumed) {
    size_t taken = 0;
    while (taken < size && head->status == SS_RESP_MORE) {
        head->status = head_byte(head, data[taken++]);
    }
    *consumed = taken;
    return head->status;
}

static size_t decimal_digits(uint64_t value) {
    size_t digits = 1;
    while (value >= 10) {
        value /= 10;
        digits++;
    }
    return digits;
}

/* snprintf cannot fail or cut here: SS_RESP_REQUEST_MAX covers the longest key and three 20-digit numbers. */
static size_t request_key(uint8_t *request, const char *command, const uint8_t *key, uint32_t key_length) {
    size_t size = (size_t)snprintf((char *)request, SS_RESP_REQUEST_MAX, "%s$%u\r\n", command, key_length);
    memcpy(request + size, key, key_length);
    memcpy(request + size + key_length, "\r\n", 2);
    return size + key_length + 2;
}

size_t ss_resp_getrange(uint8_t request[SS_RESP_REQUEST_MAX], const uint8_t *key, uint32_t key_length, uint64_t first,
                        uint64_t last) {
    size_t size = request_key(request, "*4\r\n$8\r\nGETRANGE\r\n", key, key_length);
    size += (size_t)snprintf((char *)request + size, SS_RESP_REQUEST_MAX - size, "$%zu\r\n%llu\r\n$%zu\r\n%llu\r\n",
                             decimal_digits(first), (unsigned long long)first, decimal_digits(last),
                             (unsigned long long)last);
    return size;
}

size_t ss_resp_asking(uint8_t request[SS_RESP_REQUEST_MAX]) {
    static const char command[] = "*1\r\n$6\r\nASKING\r\n";
    memcpy(request, command, sizeof command - 1);
    return sizeof command - 1;
}

size_t ss_resp_set(uint8_t request[SS_RESP_REQUEST_MAX], const uint8_t *key, uint32_t key_length, uint64_t value_length,
                   uint32_t lasts_ms, char end[SS_RESP_SET_END_MAX]) {
    const char *command = lasts_ms == 0 ? "*3\r\n$3\r\nSET\r\n" : "*6\r\n$3\r\nSET\r\n";
    size_t size = request_key(request, command, key, key_length);
    if (lasts_ms == 0) {
        (void)snprintf(end, SS_RESP_SET_END_MAX, "\r\n");
    } else {
        (void)snprintf(end, SS_RESP_SET_END_MAX, "\r\n$2\r\nNX\r\n$2\r\nPX\r\n$%zu\r\n%u\r\n", decimal_digits(lasts_ms),
                       lasts_ms);
    }
    size += (size_t)snprintf((char *)request + size, SS_RESP_REQUEST_MAX - size, "$%llu\r\n",
                             (unsigned long long)value_length);
    return size;
}
