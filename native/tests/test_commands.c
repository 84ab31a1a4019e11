/* SPDX-License-Identifier: Apache-2.0 */
/* test_commands.c - commands that were written are read, wherever they are cut; what is unusual ends the reading */
#include "check.h"
#include "shadowserve.h"

#include <stdbool.h>

static struct ss_commands found;

static uint32_t read_text(const char *text, size_t offset, uint32_t arguments_max, uint32_t bytes_max) {
    return ss_commands_read((const uint8_t *)text, offset, strlen(text), arguments_max, bytes_max, &found);
}

static void check_runs(const struct ss_command_run *runs, uint32_t count) {
    for (uint32_t run = 0; run < count; run++) {
        CHECK(found.runs[run].commands == runs[run].commands && found.runs[run].arguments == runs[run].arguments,
              "run %u: %u commands of %u arguments", run, found.runs[run].commands, found.runs[run].arguments);
    }
}

static void test_a_layout(void) {
    const char *text =
        "PING\r\n*2\r\n$3\r\nGET\r\n$16\r\nkey:000000000000\r\n*1\r\n$0\r\n\r\n*3\r\n$1\r\nx\r\n$2\r\nab";
    CHECK(read_text(text, 6, 255, 65535) == 2, "two whole commands, each of its own kind");
    CHECK(strcmp(found.layout, "8x3s7x16s10x0s") == 0, "layout %s", found.layout);
    check_runs((const struct ss_command_run[]){{1, 2}, {1, 1}}, 2);
    CHECK(found.end == 6 + 36 + 10, "ends at %llu", (unsigned long long)found.end);
}

static void test_runs(void) {
    CHECK(read_text("*2\r\n$1\r\na\r\n$1\r\nx\r\n"
                    "*2\r\n$1\r\na\r\n$2\r\nyy\r\n"
                    "*1\r\n$1\r\na\r\n"            /* fewer arguments */
                    "*2\r\n$1\r\nA\r\n$1\r\nx\r\n" /* another first argument */
                    "*2\r\n$2\r\nAA\r\n$0\r\n\r\n" /* a longer one */
                    "*2\r\n$2\r\nAA\r\n$2\r\nAA\r\n"
                    "*2\r\n$2\r\nAA\r\n$2\r\nA\r\n", /* is not whole */
                    0, 255, 65535) == 4,
          "four runs");
    check_runs((const struct ss_command_run[]){{2, 2}, {1, 1}, {1, 2}, {2, 2}}, 4);
}

static void test_what_is_unusual_ends_the_reading(void) {
    static const char *const texts[] = {
        "",
        "*",
        "*1",
        "*1\r",
        "*1\r\n",
        "*1\r\n$1\r\na",
        "*1\r\n$1\r\na\r",
        "PING\r\n",
        "*0\r\n",
        "*-1\r\n",
        "*01\r\n$1\r\na\r\n",
        "*1\r\n$01\r\na\r\n",
        "*1\r\n$+1\r\na\r\n",
        "*1\r\n:1\r\n",
        "*1\r\n$-1\r\n",
        "*1\r\n$1\r\nab\r\n",
        "*1\r\n$1\r\na\n\n",
        "*1\r\n$\r\n\r\n",
        "*1\n$1\na\n",
        "*1\r\n$65536\r\n",
        "*1\r\n$99999999999999999999\r\n",
        "*256\r\n",
        "*1\r\n$5\r\nabcde\r\n",
        "*3\r\n$1\r\na\r\n",
    };
    for (size_t index = 0; index < sizeof texts / sizeof *texts; index++) {
        CHECK(read_text(texts[index], 0, 2, 4) == 0 && found.end == 0, "'%s' was read", texts[index]);
        CHECK(found.layout[0] == '\0', "'%s' has a layout", texts[index]);
    }
}

/* Writes up to 'room' bytes of commands; returns their size, and how many arguments of which lengths. */
static size_t write_commands(char *text, size_t room, uint32_t *arguments, uint32_t *lengths, uint32_t *count) {
    size_t size = 0, argument = 0;
    *count = 0;
    while (room - size > 4096 && *count < 200) {
        uint32_t number = 1 + (uint32_t)random_below(random_below(4) ? 4 : 20);
        arguments[(*count)++] = number;
        size += (size_t)sprintf(text + size, "*%u\r\n", number);
        while (number-- > 0) {
            uint32_t length = (uint32_t)random_below(random_below(4) ? 12 : 130);
            lengths[argument++] = length;
            size += (size_t)sprintf(text + size, "$%u\r\n", length);
            random_fill((uint8_t *)text + size, length);
            size += length;
            memcpy(text + size, "\r\n", 2);
            size += 2;
        }
    }
    return size;
}

/* Follows the layout of what was found, and checks it against what was written; returns how many commands it is. */
static uint32_t check_found(uint32_t runs, const uint32_t *arguments, const uint32_t *lengths) {
    const char *layout = found.layout;
    uint64_t bytes = 0;
    uint32_t commands = 0;
    for (uint32_t run = 0; run < runs; run++) {
        for (uint32_t command = 0; command < found.runs[run].commands; command++, commands++) {
            CHECK(found.runs[run].arguments == arguments[commands], "%u arguments", found.runs[run].arguments);
            for (uint32_t index = 0; index < arguments[commands]; index++) {
                char *end;
                bytes += strtoul(layout, &end, 10);
                uint32_t length = (uint32_t)strtoul(end + 1, (char **)&layout, 10);
                CHECK(*end == 'x' && *layout++ == 's' && length == *lengths++, "an argument of %u bytes", length);
                bytes += length;
            }
        }
    }
    CHECK(*layout == '\0' && found.end == (commands > 0 ? bytes + 2 : 0), "a layout of %llu bytes",
          (unsigned long long)bytes);
    return commands;
}

static void test_what_was_written_is_read_wherever_it_is_cut(void) {
    static uint32_t arguments[256], lengths[256 * 20];
    struct guarded memory = guarded_make(32768);
    uint32_t count;
    for (int round = 0; round < 300; round++) {
        size_t size = write_commands((char *)memory.start, 32768 - 8192, arguments, lengths, &count);
        size_t cut = random_below(size + 1);
        uint8_t *data = memory.end - cut; /* a byte more is a fault */
        memmove(data, memory.start, cut);
        uint32_t runs = ss_commands_read(data, 0, cut, 255, 65535, &found);
        uint32_t read = check_found(runs, arguments, lengths);
        CHECK(read <= count && found.end <= cut, "%u of %u commands", read, count);
    }
    guarded_free(&memory);
}

static void test_no_more_than_there_is_room_for(void) {
    char text[4096];
    size_t size = 0;
    for (int command = 0; command < 300; command++) {
        size += (size_t)sprintf(text + size, "*1\r\n$1\r\n%c\r\n", 'a');
    }
    CHECK(ss_commands_read((uint8_t *)text, 0, size, 255, 65535, &found) == 1, "one run");
    check_runs((const struct ss_command_run[]){{SS_COMMANDS_MAX, 1}}, 1);
    for (int command = 0; command < 300; command++) {
        text[(size_t)command * 11 + 8] = (char)('a' + command % 2);
    }
    CHECK(ss_commands_read((uint8_t *)text, 0, size, 255, 65535, &found) == SS_COMMANDS_MAX, "as many runs");
    for (size = 0; size < 3000;) {
        size += (size_t)sprintf(text + size, "*100\r\n");
        for (int argument = 0; argument < 100; argument++) {
            size += (size_t)sprintf(text + size, "$0\r\n\r\n");
        }
    }
    CHECK(ss_commands_read((uint8_t *)text, 0, size, 255, 65535, &found) == 1, "one run");
    check_runs((const struct ss_command_run[]){{2, 100}}, 1);
}

int main(void) {
    test_a_layout();
    test_runs();
    test_what_is_unusual_ends_the_reading();
    test_what_was_written_is_read_wherever_it_is_cut();
    test_no_more_than_there_is_room_for();
    return 0;
}
