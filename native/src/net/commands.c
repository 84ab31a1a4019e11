/* SPDX-License-Identifier: Apache-2.0 */
/*
 * commands.c - where the arguments of pipelined small commands are
 *
 * Only the plainest form is read, "*n" and n times "$length" with the bytes, all lengths canonical: that is what
 * clients send. At whatever else the reading stops, for a reader that knows the whole protocol and its errors.
 */
#include "shadowserve.h"

#include <stdbool.h>
#include <string.h>

/* "99999x99999s" and the zero behind it; lengths have LENGTH_DIGITS_MAX digits at most. */
enum { ITEM_TEXT_MAX = 13, LENGTH_DIGITS_MAX = 5 };

_Static_assert(SS_COMMANDS_LAYOUT_SIZE >= SS_COMMANDS_ARGUMENTS_MAX * ITEM_TEXT_MAX, "a layout of the most arguments");

struct reader {
    const uint8_t *next, *end;
};

/* Reads 'type', a number without leading zeros, CR, LF. */
static bool read_header(struct reader *reader, uint8_t type, uint32_t *number) {
    const uint8_t *next = reader->next, *end = reader->end;
    uint32_t value = 0, digits = 0;
    if (next == end || *next++ != type) {
        return false;
    }
    while (next != end && *next >= '0' && *next <= '9' && digits < LENGTH_DIGITS_MAX) {
        value = value * 10 + (uint32_t)(*next++ - '0');
        digits++;
    }
    if (digits == 0 || (digits > 1 && reader->next[1] == '0') || end - next < 2 || next[0] != '\r' || next[1] != '\n') {
        return false;
    }
    reader->next = next + 2;
    *number = value;
    return true;
}

static char *write_number(char *text, uint32_t number) {
    char digits[10];
    int count = 0;
    do {
        digits[count++] = (char)('0' + number % 10);
        number /= 10;
    } while (number > 0);
    while (count > 0) {
        *text++ = digits[--count];
    }
    return text;
}

/* A command that was read. */
struct command {
    const uint8_t *name;
    uint32_t name_length, arguments;
};

/* Reads one command that begins at 'begin', where the last argument before it ended; returns the layout's new end. */
static char *read_command(struct reader *reader, const uint8_t *begin, uint32_t arguments_max, uint32_t bytes_max,
                          struct command *command, char *layout) {
    uint32_t length;
    if (!read_header(reader, '*', &command->arguments) || command->arguments == 0 ||
        command->arguments > arguments_max) {
        return NULL;
    }
    for (uint32_t index = 0; index < command->arguments; index++) {
        if (!read_header(reader, '$', &length) || length > bytes_max ||
            (size_t)(reader->end - reader->next) < length + 2u) {
            return NULL;
        }
        layout = write_number(layout, (uint32_t)(reader->next - begin));
        *layout++ = 'x';
        layout = write_number(layout, length);
        *layout++ = 's';
        if (index == 0) {
            command->name = reader->next;
            command->name_length = length;
        }
        begin = reader->next + length;
        if (begin[0] != '\r' || begin[1] != '\n') {
            return NULL;
        }
        reader->next = begin + 2;
    }
    return layout;
}

static bool is_like(const struct command *one, const struct command *other) {
    return one->arguments == other->arguments && one->name_length == other->name_length &&
           memcmp(one->name, other->name, one->name_length) == 0;
}

uint32_t ss_commands_read(const uint8_t *data, size_t offset, size_t size, uint32_t arguments_max, uint32_t bytes_max,
                          struct ss_commands *commands) {
    struct reader reader = {data + offset, data + size};
    struct command command, last = {0};
    const uint8_t *begin = data + offset;
    char *layout = commands->layout;
    uint32_t room = SS_COMMANDS_ARGUMENTS_MAX, runs = 0;

    commands->end = offset;
    for (uint32_t count = 0; count < SS_COMMANDS_MAX && room > 0; count++) {
        char *end =
            read_command(&reader, begin, arguments_max < room ? arguments_max : room, bytes_max, &command, layout);
        if (end == NULL) {
            break;
        }
        layout = end;
        if (runs == 0 || !is_like(&command, &last)) {
            commands->runs[runs++] = (struct ss_command_run){.arguments = (uint8_t)command.arguments};
            last = command;
        }
        commands->runs[runs - 1].commands++;
        room -= command.arguments;
        begin = reader.next - 2; /* the last argument's CR LF is skipped together with the next header */
        commands->end = (size_t)(reader.next - data);
    }
    *layout = '\0';
    return runs;
}
