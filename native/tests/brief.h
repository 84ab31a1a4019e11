/* SPDX-License-Identifier: Apache-2.0 */
/* brief.h - tests that try each path once, where another build tries all */
#ifndef SS_BRIEF_H
#define SS_BRIEF_H

#include <stdlib.h>

/*
 * test_is_brief() returns whether SHADOWSERVE_TEST_BRIEF is set, as 'make test' has it but for the build with the
 * address sanitizer: the same paths are taken, but not each with each, and with less data. That build tries all of it,
 * and what runs at night does so everywhere.
 */
static inline int test_is_brief(void) {
    return getenv("SHADOWSERVE_TEST_BRIEF") != NULL;
}

#endif /* SS_BRIEF_H */
