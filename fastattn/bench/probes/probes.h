/* Probes of what a core can do at most: one table per ISA. */
#ifndef FASTATTN_PROBES_H
#define FASTATTN_PROBES_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    /* Runs fused multiply-adds in registers at their peak rate for `steps` steps; returns the FLOPs done. */
    double (*fma_peak_float)(long steps);
    double (*fma_peak_double)(long steps);

    /* The same for the additions of integers, four that do not wait for each other in turn; returns how many. */
    double (*integer_peak)(long steps);

    /* Reads nbytes of memory, a multiple of 1024, from a line on; returns something that depends on all of them. */
    uint64_t (*read_memory)(const void *at, ptrdiff_t nbytes);
} fastattn_probes;

/* The table for an ISA by name ("avx512", "avx2", "neon", "portable"), or NULL when it was not built. Whether this
 * CPU can run it is for the caller to know. */
const fastattn_probes *fastattn_find_probes(const char *isa);

#endif
