/* SPDX-License-Identifier: Apache-2.0 */
/* doca_version.h - versions: of these headers, and of the library that runs */
#ifndef DOCA_VERSION_H_
#define DOCA_VERSION_H_

#include "doca_compat.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DOCA_VERSION_MAJOR 3
#define DOCA_VERSION_MINOR 0
#define DOCA_VERSION_PATCH 0
#define DOCA_VERSION_STRING "3.0.0-emulator"

static inline const char *doca_version(void) {
    return DOCA_VERSION_STRING;
}

/* Static strings both. */
DOCA_EXPERIMENTAL const char *doca_version_runtime(void);

#ifdef __cplusplus
}
#endif

#endif /* DOCA_VERSION_H_ */
