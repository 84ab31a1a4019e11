/* SPDX-License-Identifier: Apache-2.0 */
/* brief.h - tests that try each path once */
#ifndef SS_BRIEF_H
#define SS_BRIEF_H

#include <stdlib.h>

/*
 * test_is_brief() returns whether SHADOWSERVE_TEST_BRIEF is set, as 'make test-native' has it: the same paths are
 * taken, but not each with each, and with less data. scripts/test-nightly tries all of it, with every sanitizer.
 */
static inline int test_is_brief(void) {
    return getenv("SHADOWSERVE_TEST_BRIEF") != NULL;
}

#endif /* SS_BRIEF_H */
