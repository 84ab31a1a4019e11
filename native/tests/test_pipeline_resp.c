/* SPDX-License-Identifier: Apache-2.0 */
/* test_pipeline_resp.c - reply heads: one table, read whole, byte by byte, and with data behind */
#include <string.h>

#include "net/resp.h"
#include "pipeline_support.h"

struct head_case {
    const char *text;
    enum ss_resp_status status;
    enum ss_resp_kind kind;
    uint64_t length;
    const char *kept;
};

static const struct head_case heads[] = {
    {"$0\r\n", SS_RESP_DONE, SS_RESP_BULK, 0, ""},
    {"$1\r\n", SS_RESP_DONE, SS_RESP_BULK, 1, ""},
    {"$536870912\r\n", SS_RESP_DONE, SS_RESP_BULK, 536870912, ""},
    {"$999999999999\r\n", SS_RESP_DONE, SS_RESP_BULK, 999999999999, ""},
    {"$-1\r\n", SS_RESP_DONE, SS_RESP_NULL, 0, ""},
    {"_\r\n", SS_RESP_DONE, SS_RESP_NULL, 0, ""},
    {"+OK\r\n", SS_RESP_DONE, SS_RESP_SIMPLE, 0, "OK"},
    {"+\r\n", SS_RESP_DONE, SS_RESP_SIMPLE, 0, ""},
    {"-ERR no\r\n", SS_RESP_DONE, SS_RESP_ERROR, 0, "ERR no"},
    {"-NOAUTH Authentication required.\r\n", SS_RESP_DONE, SS_RESP_ERROR, 0, "NOAUTH Authentication required."},
    {"$9999999999999\r\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {"$\r\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {"$-\r\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {"$-2\r\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {"$-10\r\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {"$+1\r\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {"$01\r\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {"$ 1\r\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {"$1 \r\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {"$1\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {"$1\r1", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {"$?\r\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {"_1\r\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {":0\r\n", SS_RESP_DONE, SS_RESP_INTEGER, 0, ""},
    {":123456789012\r\n", SS_RESP_DONE, SS_RESP_INTEGER, 123456789012, ""},
    {"*33\r\n", SS_RESP_DONE, SS_RESP_ARRAY, 33, ""},
    {":-1\r\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {"*-1\r\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {":\r\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {"*01\r\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {":1234567890123\r\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {"\r\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {"HTTP/1.1 200 OK\r\n", SS_RESP_INVALID, SS_RESP_BULK, 0, ""},
    {"$12", SS_RESP_MORE, SS_RESP_BULK, 0, ""},
    {"-ERR", SS_RESP_MORE, SS_RESP_BULK, 0, ""},
};

static void check_head(const struct head_case *expected, const struct ss_resp_head *head, size_t consumed) {
    CHECK_EQUAL(head->status, expected->status);
    if (expected->status != SS_RESP_DONE) {
        return;
    }
    CHECK_EQUAL(consumed, strlen(expected->text));
    CHECK_EQUAL(head->kind, expected->kind);
    if (head->kind == SS_RESP_BULK || head->kind == SS_RESP_INTEGER || head->kind == SS_RESP_ARRAY) {
        CHECK_EQUAL(head->length, expected->length);
    }
    CHECK_EQUAL(head->text_length, strlen(expected->kept));
    CHECK(memcmp(head->text, expected->kept, head->text_length) == 0);
}

static void test_heads(void) {
    for (size_t i = 0; i < COUNT_OF(heads); i++) {
        const struct head_case *expected = &heads[i];
        size_t size = strlen(expected->text);
        struct ss_resp_head head;
        size_t consumed;

        ss_resp_head_start(&head);
        ss_resp_head_feed(&head, (const uint8_t *)expected->text, size, &consumed);
        check_head(expected, &head, consumed);

        ss_resp_head_start(&head);
        size_t total = 0;
        for (size_t at = 0; at < size; at++) {
            ss_resp_head_feed(&head, (const uint8_t *)expected->text + at, 1, &consumed);
            total += consumed;
        }
        check_head(expected, &head, total);

        if (expected->status == SS_RESP_DONE) {
            uint8_t longer[128];
            memcpy(longer, expected->text, size);
            memcpy(longer + size, "$7\r\n", 4);
            ss_resp_head_start(&head);
            ss_resp_head_feed(&head, longer, size + 4, &consumed);
            check_head(expected, &head, consumed);
            ss_resp_head_feed(&head, longer + size, 4, &consumed);
            CHECK_EQUAL(consumed, 0);
        }
    }
}

static void test_an_endless_line_is_refused_and_a_long_one_is_cut(void) {
    struct ss_resp_head head;
    size_t consumed;
    uint8_t text[SS_RESP_LINE_MAX + 1];
    memset(text, 'x', sizeof text);
    text[0] = '-';
    ss_resp_head_start(&head);
    CHECK_EQUAL(ss_resp_head_feed(&head, text, SS_RESP_LINE_MAX, &consumed), SS_RESP_MORE);
    CHECK_EQUAL(head.text_length, SS_RESP_TEXT_MAX);
    CHECK_EQUAL(ss_resp_head_feed(&head, text, 1, &consumed), SS_RESP_INVALID);
}

static void test_requests(void) {
    uint8_t request[SS_RESP_REQUEST_MAX];
    uint8_t key[SS_RESP_KEY_MAX];
    memset(key, 'k', sizeof key);
    static const char range[] = "*4\r\n$8\r\nGETRANGE\r\n$3\r\nkkk\r\n$1\r\n0\r\n$4\r\n1023\r\n";
    size_t size = ss_resp_getrange(request, key, 3, 0, 1023);
    CHECK_EQUAL(size, sizeof range - 1);
    CHECK(memcmp(request, range, size) == 0);
    static const char set[] = "*3\r\n$3\r\nSET\r\n$3\r\nkkk\r\n$77\r\n";
    char end[SS_RESP_SET_END_MAX];
    size = ss_resp_set(request, key, 3, 77, 0, end);
    CHECK_EQUAL(size, sizeof set - 1);
    CHECK(memcmp(request, set, size) == 0);
    CHECK(strcmp(end, "\r\n") == 0);
    size = ss_resp_set(request, key, 3, 77, UINT32_MAX, end);
    CHECK_EQUAL(size, sizeof set - 1);
    CHECK(memcmp(request, "*6\r\n", 4) == 0);
    CHECK(strcmp(end, "\r\n$2\r\nNX\r\n$2\r\nPX\r\n$10\r\n4294967295\r\n") == 0);
    CHECK(ss_resp_getrange(request, key, SS_RESP_KEY_MAX, UINT64_MAX, UINT64_MAX) < SS_RESP_REQUEST_MAX);
    CHECK(ss_resp_set(request, key, SS_RESP_KEY_MAX, UINT64_MAX, 0, end) < SS_RESP_REQUEST_MAX);
}

int main(void) {
    test_heads();
    test_an_endless_line_is_refused_and_a_long_one_is_cut();
    test_requests();
    return 0;
}
