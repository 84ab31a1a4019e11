/* SPDX-License-Identifier: Apache-2.0 */
/* error.c - names and sentences of result codes, and the version */
#include "doca_error.h"
#include "doca_version.h"

/* Only IO_FAILED's sentence was ever seen of the SDK's; no program may depend on the others. */
static const struct {
    const char *name;
    const char *description;
} errors[] = {
    [DOCA_SUCCESS] = {"DOCA_SUCCESS", "Success"},
    [DOCA_ERROR_UNKNOWN] = {"DOCA_ERROR_UNKNOWN", "Unknown error"},
    [DOCA_ERROR_NOT_PERMITTED] = {"DOCA_ERROR_NOT_PERMITTED", "Operation not permitted"},
    [DOCA_ERROR_IN_USE] = {"DOCA_ERROR_IN_USE", "Resource still in use"},
    [DOCA_ERROR_NOT_SUPPORTED] = {"DOCA_ERROR_NOT_SUPPORTED", "Operation not supported"},
    [DOCA_ERROR_AGAIN] = {"DOCA_ERROR_AGAIN", "Not ready yet, try again"},
    [DOCA_ERROR_INVALID_VALUE] = {"DOCA_ERROR_INVALID_VALUE", "Invalid argument"},
    [DOCA_ERROR_NO_MEMORY] = {"DOCA_ERROR_NO_MEMORY", "No memory or element left"},
    [DOCA_ERROR_INITIALIZATION] = {"DOCA_ERROR_INITIALIZATION", "Initialization failed"},
    [DOCA_ERROR_TIME_OUT] = {"DOCA_ERROR_TIME_OUT", "Time ran out"},
    [DOCA_ERROR_SHUTDOWN] = {"DOCA_ERROR_SHUTDOWN", "Shut down, or shutting down"},
    [DOCA_ERROR_CONNECTION_RESET] = {"DOCA_ERROR_CONNECTION_RESET", "Connection reset"},
    [DOCA_ERROR_CONNECTION_ABORTED] = {"DOCA_ERROR_CONNECTION_ABORTED", "Connection aborted"},
    [DOCA_ERROR_CONNECTION_INPROGRESS] = {"DOCA_ERROR_CONNECTION_INPROGRESS", "Connection being made"},
    [DOCA_ERROR_NOT_CONNECTED] = {"DOCA_ERROR_NOT_CONNECTED", "Not connected"},
    [DOCA_ERROR_NO_LOCK] = {"DOCA_ERROR_NO_LOCK", "Lock not obtained"},
    [DOCA_ERROR_NOT_FOUND] = {"DOCA_ERROR_NOT_FOUND", "Not found"},
    [DOCA_ERROR_IO_FAILED] = {"DOCA_ERROR_IO_FAILED", "Input/Output Operation Failed"},
    [DOCA_ERROR_BAD_STATE] = {"DOCA_ERROR_BAD_STATE", "Not possible in this state"},
    [DOCA_ERROR_UNSUPPORTED_VERSION] = {"DOCA_ERROR_UNSUPPORTED_VERSION", "Version not supported"},
    [DOCA_ERROR_OPERATING_SYSTEM] = {"DOCA_ERROR_OPERATING_SYSTEM", "The operating system refused"},
    [DOCA_ERROR_DRIVER] = {"DOCA_ERROR_DRIVER", "The driver refused"},
    [DOCA_ERROR_UNEXPECTED] = {"DOCA_ERROR_UNEXPECTED", "Unexpected situation"},
    [DOCA_ERROR_ALREADY_EXIST] = {"DOCA_ERROR_ALREADY_EXIST", "Already there"},
    [DOCA_ERROR_FULL] = {"DOCA_ERROR_FULL", "Full"},
    [DOCA_ERROR_EMPTY] = {"DOCA_ERROR_EMPTY", "Empty"},
    [DOCA_ERROR_IN_PROGRESS] = {"DOCA_ERROR_IN_PROGRESS", "Still in progress"},
    [DOCA_ERROR_TOO_BIG] = {"DOCA_ERROR_TOO_BIG", "Too big"},
    [DOCA_ERROR_AUTHENTICATION] = {"DOCA_ERROR_AUTHENTICATION", "Authentication failed"},
    [DOCA_ERROR_BAD_CONFIG] = {"DOCA_ERROR_BAD_CONFIG", "Bad configuration"},
    [DOCA_ERROR_SKIPPED] = {"DOCA_ERROR_SKIPPED", "Skipped"},
};

static int error_known(doca_error_t error) {
    return (int)error >= 0 && (unsigned)error < sizeof errors / sizeof errors[0];
}

const char *doca_error_get_name(doca_error_t error) {
    return error_known(error) ? errors[error].name : "unrecognized error code";
}

const char *doca_error_get_descr(doca_error_t error) {
    return error_known(error) ? errors[error].description : "unrecognized error code";
}

const char *doca_version_runtime(void) {
    return DOCA_VERSION_STRING;
}
