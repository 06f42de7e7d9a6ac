/* Checks of the tests of threads: how many there were, and which failed. */
#ifndef FASTATTN_CHECK_H
#define FASTATTN_CHECK_H

#include <stdio.h>

static int checks, failures;

#define CHECK(ok)                                                                                              \
    do {                                                                                                       \
        checks++;                                                                                              \
        if (!(ok)) {                                                                                           \
            failures++;                                                                                        \
            printf("FAILED line %d: %s\n", __LINE__, #ok);                                                     \
        }                                                                                                      \
    } while (0)

#endif
