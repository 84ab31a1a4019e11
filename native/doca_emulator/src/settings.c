/* SPDX-License-Identifier: Apache-2.0 */
/*
 * settings.c - the environment variables DOCA_EMULATOR_*, told in the README
 *
 * They are read when devices are listed, so a test can change them between two lists. A typing error must not pass for
 * the default: an unknown name or a malformed value ends the process.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "emulator.h"

#define PREFIX "DOCA_EMULATOR_"

extern char **environ;

static _Noreturn void malformed(const char *name, const char *value, const char *expected) {
    misuse("settings", PREFIX "%s=\"%s\" is malformed; it takes %s", name, value, expected);
}

static uint64_t whole_number(const char *name, const char *value, uint64_t least, uint64_t most, const char *expected) {
    char *end = NULL;
    errno = 0;
    unsigned long long number = strtoull(value, &end, 10);
    if (value[0] < '0' || value[0] > '9' || *end != '\0' || errno != 0 || number < least || number > most) {
        malformed(name, value, expected);
    }
    return number;
}

static void profile_set(struct settings *settings, const char *name, const char *value) {
    if (strcmp(value, "bf3") == 0) {
        settings->profile = PROFILE_BF3;
    } else if (strcmp(value, "bf2") == 0) {
        settings->profile = PROFILE_BF2;
    } else if (strcmp(value, "none") == 0) {
        settings->profile = PROFILE_NONE;
    } else {
        malformed(name, value, "bf3, bf2 or none");
    }
}

static void devices_set(struct settings *settings, const char *name, const char *value) {
    static const char shape[] = "hhhh:hh:hh.o"; /* hexadecimal, octal */
    settings->device_count = 0;
    for (const char *cursor = value; *cursor != '\0'; cursor += *cursor == ',') {
        size_t length = strcspn(cursor, ",");
        bool good = length == sizeof shape - 1 && settings->device_count < DEVICES_MAX;
        for (size_t i = 0; good && i < length; i++) {
            const char *digits = shape[i] == 'h' ? "0123456789abcdef" : "01234567";
            good = shape[i] == 'h' || shape[i] == 'o' ? strchr(digits, cursor[i]) != NULL : cursor[i] == shape[i];
        }
        if (!good) {
            malformed(name, value, "at most 8 PCI addresses such as 0000:03:00.0, with commas between them");
        }
        memcpy(settings->devices[settings->device_count], cursor, length);
        settings->devices[settings->device_count++][length] = '\0';
        cursor += length;
    }
}

static double gigabits(const char *name, const char *value) {
    char *end = NULL;
    if (strcmp(value, "unlimited") == 0) {
        return 0;
    }
    double number = strtod(value, &end);
    if (end == value || *end != '\0' || !isfinite(number) || number <= 0) {
        malformed(name, value, "a number above 0, or unlimited");
    }
    return number * 1e9 / 8;
}

/* Adds tasks that fail, or ('hang') that never end. */
static void fault_set(struct settings *settings, const char *name, const char *value, bool hang) {
    static const char expected[] =
        "such as dma:3,decompress:7 - the accelerator and the number of the task, at most 16; "
        "3+ is also all behind it, 3* every third";
    static const char *const accelerators[] = {[DECOMPRESSION] = "decompress:", [COPY] = "dma:"};
    for (const char *cursor = value; *cursor != '\0';) {
        struct fault fault = {.accelerator = DECOMPRESSION, .hang = hang};
        while (fault.accelerator < ACCELERATOR_COUNT &&
               strncmp(cursor, accelerators[fault.accelerator], strlen(accelerators[fault.accelerator]))) {
            fault.accelerator++;
        }
        if (fault.accelerator == ACCELERATOR_COUNT || settings->fault_count == FAULTS_MAX) {
            malformed(name, value, expected);
        }
        cursor += strlen(accelerators[fault.accelerator]);
        char *end = NULL;
        errno = 0;
        fault.number = *cursor >= '1' && *cursor <= '9' ? strtoull(cursor, &end, 10) : 0;
        if (fault.number == 0 || errno != 0) {
            malformed(name, value, expected);
        }
        if (*end == '+' || *end == '*') {
            fault.repeat = *end++ == '+' ? FAULT_FROM : FAULT_EVERY;
        }
        if (*end != '\0' && (*end != ',' || end[1] == '\0')) {
            malformed(name, value, expected);
        }
        settings->faults[settings->fault_count++] = fault;
        cursor = end + (*end == ',');
    }
}

static bool choice(const char *name, const char *value, const char *yes, const char *no, const char *expected) {
    if (strcmp(value, yes) != 0 && strcmp(value, no) != 0) {
        malformed(name, value, expected);
    }
    return strcmp(value, yes) == 0;
}

/* Sets what one variable says; false where there is none of this name. */
static bool setting_set(struct settings *settings, const char *name, const char *value) {
    if (strcmp(name, "PROFILE") == 0) {
        profile_set(settings, name, value);
    } else if (strcmp(name, "DEVICES") == 0) {
        devices_set(settings, name, value);
    } else if (strcmp(name, "MAX_BUF_BYTES") == 0) {
        uint64_t most = whole_number(name, value, 1, 1 << 30, "bytes, from 1 to 1073741824");
        settings->buf_bytes_max[DECOMPRESSION] = settings->buf_bytes_max[COPY] = most;
    } else if (strcmp(name, "MAX_TASKS") == 0) {
        settings->tasks_max = (uint32_t)whole_number(name, value, 1, 1 << 20, "a number from 1 to 1048576");
    } else if (strcmp(name, "DEFLATE_GBPS") == 0) {
        settings->bytes_per_second[DECOMPRESSION] = gigabits(name, value);
    } else if (strcmp(name, "DMA_GBPS") == 0) {
        settings->bytes_per_second[COPY] = gigabits(name, value);
    } else if (strcmp(name, "LATENCY_US") == 0) {
        settings->latency_ns = 1000 * whole_number(name, value, 0, 60000000, "microseconds, at most a minute");
    } else if (strcmp(name, "REGISTER_US_PER_MIB") == 0) {
        settings->register_ns_per_mib = 1000 * whole_number(name, value, 0, 60000000, "microseconds, at most a minute");
    } else if (strcmp(name, "FAULT") == 0) {
        fault_set(settings, name, value, false);
    } else if (strcmp(name, "HANG") == 0) {
        fault_set(settings, name, value, true);
    } else if (strcmp(name, "OUT_OF_ORDER") == 0) {
        settings->reorder_seed = whole_number(name, value, 0, UINT64_MAX, "a seed; 0 is in order");
    } else if (strcmp(name, "DECOMPRESS_ERROR") == 0) {
        settings->decompress_error_stops = choice(name, value, "stop", "continue", "stop or continue");
    } else if (strcmp(name, "DMABUF_EXPORT") == 0) {
        settings->dmabuf_export = choice(name, value, "allow", "refuse", "allow or refuse");
    } else {
        return false;
    }
    return true;
}

/* Calls setting_set() for each variable; with 'profile_only', only for the one that the others' defaults hang on. */
static void environment_apply(struct settings *settings, bool profile_only) {
    for (char **variable = environ; variable != NULL && *variable != NULL; variable++) {
        const char *equals = strchr(*variable, '=');
        if (equals == NULL || strncmp(*variable, PREFIX, strlen(PREFIX)) != 0) {
            continue;
        }
        char name[64] = "";
        size_t length = (size_t)(equals - *variable) - strlen(PREFIX);
        memcpy(name, *variable + strlen(PREFIX), length < sizeof name ? length : sizeof name - 1);
        if (profile_only != (strcmp(name, "PROFILE") == 0)) {
            continue;
        }
        if (!setting_set(settings, name, equals + 1)) {
            misuse("settings", "there is no " PREFIX "%s; native/doca_emulator/README.md lists the settings", name);
        }
    }
}

void settings_read(struct settings *settings) {
    *settings = (struct settings){
        .profile = PROFILE_BF3,
        .devices = {"0000:03:00.0"},
        .device_count = 1,
        .tasks_max = 1024,
        .bytes_per_second = {[DECOMPRESSION] = 276e9 / 8, [COPY] = 230e9 / 8},
        .register_ns_per_mib = 128000,
        .decompress_error_stops = true,
    };
    environment_apply(settings, true);
    settings->buf_bytes_max[DECOMPRESSION] = settings->profile == PROFILE_BF2 ? 128ull << 20 : 2ull << 20;
    settings->buf_bytes_max[COPY] = 2ull << 20;
    environment_apply(settings, false);
}
