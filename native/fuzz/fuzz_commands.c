/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_commands.c - any bytes, given to the reader of commands
 *
 * Invariants: written anew, what was found is byte for byte what is there; nothing is found behind the end, nothing
 * beyond the bounds; commands are of one run exactly if they begin alike; what is found of a part of the data is the
 * beginning of what is found of all.
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

/* Checks the command at '*at', of a run, moves behind it, and returns the layout's rest; '*name' is where its first
 * argument's header is. */
static const char *check_command(const uint8_t *data, size_t *at, uint32_t arguments, uint32_t bytes_max,
                                 const char *layout, size_t *name) {
    char header[16];
    size_t size = (size_t)snprintf(header, sizeof header, "*%u\r\n", arguments);
    CHECK(memcmp(data + *at, header, size) == 0, "no command of %u", arguments);
    *at += size;
    *name = *at;
    for (uint32_t index = 0; index < arguments; index++) {
        char *end;
        strtoul(layout, &end, 10);
        uint32_t length = (uint32_t)strtoul(end + 1, &end, 10);
        CHECK(length <= bytes_max, "%u bytes", length);
        layout = end + 1;
        check_argument(data, at, length);
    }
    return layout;
}

/* Returns whether the bulks at 'one' and 'other', of whole commands, are the same. */
static int is_same(const uint8_t *data, size_t one, size_t other) {
    char *begin, *begin_of_other;
    unsigned long length = strtoul((const char *)data + one + 1, &begin, 10);
    return length == strtoul((const char *)data + other + 1, &begin_of_other, 10) &&
           memcmp(begin, begin_of_other, 2 + length) == 0;
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
    size_t at = 0, name = 0, last = 0;
    CHECK(count <= SS_COMMANDS_MAX && whole.end <= size, "%u runs", count);
    for (uint32_t run = 0; run < count; run++) {
        uint32_t arguments = whole.runs[run].arguments;
        CHECK(arguments <= arguments_max && whole.runs[run].commands > 0, "%u arguments", arguments);
        for (uint32_t command = 0; command < whole.runs[run].commands; command++, last = name) {
            int is_new = command == 0;
            layout = check_command(data, &at, arguments, bytes_max, layout, &name);
            if (run > 0 || !is_new) {
                int is_alike = whole.runs[is_new ? run - 1 : run].arguments == arguments && is_same(data, last, name);
                CHECK(is_alike != is_new, "run %u, command %u", run, command);
            }
        }
    }
    CHECK(at == whole.end && *layout == '\0', "ends at %zu", at);
    uint32_t fewer = ss_commands_read(data, 0, cut, arguments_max, bytes_max, &part);
    CHECK(fewer <= count && part.end <= cut, "%u of %u runs", fewer, count);
    CHECK(strncmp(part.layout, whole.layout, strlen(part.layout)) == 0, "%s is not of %s", part.layout, whole.layout);
    return 0;
}
