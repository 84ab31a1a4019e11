/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_commands.c - any bytes, given to the reader of commands
 *
 * Invariants: written anew, what was found is byte for byte what is there; nothing is found behind the end, nothing
 * beyond the bounds; what is found of a part of the data is the beginning of what is found of all.
 *
 * Input: one byte for the bounds, one for the part, then the data.
 */
#include "check.h"
#include "shadowserve.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct ss_commands whole, part;

/* Compares the argument at '*at' with the header that its length has; moves behind it. */
static void check_argument(const uint8_t *data, size_t *at, uint32_t length) {
    char header[16];
    size_t size = (size_t)snprintf(header, sizeof header, "$%u\r\n", length);
    CHECK(memcmp(data + *at, header, size) == 0, "no argument of %u bytes", length);
    *at += size + length;
    CHECK(memcmp(data + *at, "\r\n", 2) == 0, "no end of %u bytes", length);
    *at += 2;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2) {
        return 0;
    }
    uint32_t arguments_max = data[0] % 16u + 1, bytes_max = (data[0] / 16u + 1) * 64;
    size_t cut = (size - 2) * data[1] / 255;
    data += 2;
    size -= 2;
    uint32_t count = ss_commands_read(data, 0, size, arguments_max, bytes_max, &whole);
    const char *layout = whole.layout;
    size_t at = 0;
    CHECK(count <= SS_COMMANDS_MAX && whole.end <= size, "%u commands", count);
    for (uint32_t command = 0; command < count; command++) {
        char header[16];
        size_t header_size = (size_t)snprintf(header, sizeof header, "*%u\r\n", whole.arguments[command]);
        CHECK(whole.arguments[command] <= arguments_max, "%u arguments", whole.arguments[command]);
        CHECK(memcmp(data + at, header, header_size) == 0, "no command of %u", whole.arguments[command]);
        at += header_size;
        for (uint32_t index = 0; index < whole.arguments[command]; index++) {
            char *end;
            strtoul(layout, &end, 10);
            uint32_t length = (uint32_t)strtoul(end + 1, &end, 10);
            CHECK(length <= bytes_max, "%u bytes", length);
            layout = end + 1;
            check_argument(data, &at, length);
        }
    }
    CHECK(at == whole.end && *layout == '\0', "ends at %zu", at);
    uint32_t fewer = ss_commands_read(data, 0, cut, arguments_max, bytes_max, &part);
    CHECK(fewer <= count && part.end <= cut, "%u of %u commands", fewer, count);
    CHECK(strncmp(part.layout, whole.layout, strlen(part.layout)) == 0, "%s is not of %s", part.layout, whole.layout);
    return 0;
}
