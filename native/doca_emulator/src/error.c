/* SPDX-License-Identifier: Apache-2.0 */
/* error.c - names of result codes, and the version */
#include "doca_error.h"
#include "doca_version.h"

#define NAME(code) [code] = #code

static const char *const names[] = {NAME(DOCA_SUCCESS),
                                    NAME(DOCA_ERROR_UNKNOWN),
                                    NAME(DOCA_ERROR_NOT_PERMITTED),
                                    NAME(DOCA_ERROR_IN_USE),
                                    NAME(DOCA_ERROR_NOT_SUPPORTED),
                                    NAME(DOCA_ERROR_AGAIN),
                                    NAME(DOCA_ERROR_INVALID_VALUE),
                                    NAME(DOCA_ERROR_NO_MEMORY),
                                    NAME(DOCA_ERROR_INITIALIZATION),
                                    NAME(DOCA_ERROR_TIME_OUT),
                                    NAME(DOCA_ERROR_SHUTDOWN),
                                    NAME(DOCA_ERROR_CONNECTION_RESET),
                                    NAME(DOCA_ERROR_CONNECTION_ABORTED),
                                    NAME(DOCA_ERROR_CONNECTION_INPROGRESS),
                                    NAME(DOCA_ERROR_NOT_CONNECTED),
                                    NAME(DOCA_ERROR_NO_LOCK),
                                    NAME(DOCA_ERROR_NOT_FOUND),
                                    NAME(DOCA_ERROR_IO_FAILED),
                                    NAME(DOCA_ERROR_BAD_STATE),
                                    NAME(DOCA_ERROR_UNSUPPORTED_VERSION),
                                    NAME(DOCA_ERROR_OPERATING_SYSTEM),
                                    NAME(DOCA_ERROR_DRIVER),
                                    NAME(DOCA_ERROR_UNEXPECTED),
                                    NAME(DOCA_ERROR_ALREADY_EXIST),
                                    NAME(DOCA_ERROR_FULL),
                                    NAME(DOCA_ERROR_EMPTY),
                                    NAME(DOCA_ERROR_IN_PROGRESS),
                                    NAME(DOCA_ERROR_TOO_BIG),
                                    NAME(DOCA_ERROR_AUTHENTICATION),
                                    NAME(DOCA_ERROR_BAD_CONFIG),
                                    NAME(DOCA_ERROR_SKIPPED)};

const char *doca_error_get_name(doca_error_t error) {
    int known = (int)error >= 0 && (unsigned)error < sizeof names / sizeof names[0];
    return known ? names[error] : "unrecognized error code";
}

const char *doca_version_runtime(void) {
    return "3.0.0-emulator";
}
