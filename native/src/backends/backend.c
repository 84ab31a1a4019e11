/* SPDX-License-Identifier: Apache-2.0 */
/* backend.c - table of the backends of this build */
#include "backends/backend.h"

#include <string.h>

const struct ss_backend *ss_backend_find(const char *name) {
    static const struct ss_backend *const backends[] = {
        &ss_backend_software,
#ifdef SS_HAVE_DOCA
        &ss_backend_doca,
#endif
    };
    for (size_t i = 0; i < sizeof backends / sizeof backends[0]; i++) {
        if (strcmp(backends[i]->name, name) == 0) {
            return backends[i];
        }
    }
    return NULL;
}

const char *ss_backend_description(const char *name) {
    const struct ss_backend *backend = ss_backend_find(name);
    return backend == NULL ? NULL : backend->description();
}

int ss_backend_emulated(const char *name) {
    const struct ss_backend *backend = ss_backend_find(name);
    return backend != NULL && backend->emulated();
}
