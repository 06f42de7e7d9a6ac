/* Keeps the threads of a parallel region apart: each on a core of its own, as far as there are some.
 *
 * While idle threads of another pool spin (a BLAS between two products), all cores look busy, and the kernel wakes a
 * worker on the core of the thread that woke it as soon as on another. The two then share that core for the whole
 * region, and two threads are no faster than one. So each thread claims the core on which it finds itself, and a
 * worker whose core is taken moves to one that is free. There it may have to share with a spinning thread: when the
 * caller has nothing more to do and such a worker has, it gets the caller's core.
 *
 * Only workers of the region are moved, and each may at once run anywhere again that it was allowed to. Where no two
 * meet, this costs a look at the CPU's number for each thread. On Linux; elsewhere nothing happens.
 *
 * Calls with key intervals 0 .. i between two products of NumPy's OpenBLAS, shapes (1,12,512,64), (1,12,1024,64),
 * (16,12,64,32), two threads over one: 1.14, 0.99 and 1.43 times as fast without this, 1.63, 1.36 and 1.55 with moves
 * alone, 1.73, 1.42 and 1.61 with the caller's core as well. 2 cores of Cascade Lake, 2026-11-22, interleaved A/B.
 */
#ifndef FASTATTN_SPREAD_H
#define FASTATTN_SPREAD_H

#include <stdint.h>

#define FASTATTN_MAX_CPUS 1024 /* as many as a cpu_set_t has */

/* What the threads of one region have claimed, and which of them has moved. */
typedef struct {
    uint64_t cores[FASTATTN_MAX_CPUS / 64]; /* a core goes by the lowest number among its CPUs */
    uint64_t cpus[FASTATTN_MAX_CPUS / 64];
    uintptr_t moved; /* pthread_t of a worker that has moved and is still at work, or 0 */
} fastattn_spread;

/* Which core each CPU belongs to. Until this is called, and on other CPUs than these, nobody moves. */
void fastattn_set_cores(const int32_t *core_of_cpu, int n_cpus);

/* Ahead of the region, by the thread that starts it. */
void fastattn_spread_start(fastattn_spread *spread);

/* By every thread of the region, before and after its work; the one that started it is thread 0. */
void fastattn_spread_enter(fastattn_spread *spread, int thread);
void fastattn_spread_leave(fastattn_spread *spread, int thread);

#endif
