/* Keeps the threads of a parallel region on different cores, as far as there are enough.
 *
 * While idle threads of another pool spin (a BLAS between two products), all cores look busy, and the kernel wakes a
 * worker on the core of the thread that woke it as soon as on another. The two then share that core for the whole
 * region, and two threads are no faster than one. So each thread claims the core on which it runs, and a worker whose
 * core is claimed moves to a free one. There it may share the core with a spinning thread: if the caller ends before
 * such a worker, the worker moves to the caller's core.
 *
 * Only workers of the region are moved, and their affinity is restored at once. Where every thread has a core of its
 * own, the cost is one sched_getcpu per thread. Linux only; a no-op elsewhere.
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
    uint64_t cores[FASTATTN_MAX_CPUS / 64]; /* a core has the lowest number among its CPUs */
    uint64_t cpus[FASTATTN_MAX_CPUS / 64];
    uintptr_t moved; /* pthread_t of a worker that has moved and still runs, or 0 */
} fastattn_spread;

/* Which core each CPU belongs to. Before this is called, and on CPUs past n_cpus, no thread moves. */
void fastattn_set_cores(const int32_t *core_of_cpu, int n_cpus);

/* To be called before the region, by the thread that starts it. */
void fastattn_spread_start(fastattn_spread *spread);

/* To be called by every thread of the region, before and after its work; the one that started it is thread 0. */
void fastattn_spread_enter(fastattn_spread *spread, int thread);
void fastattn_spread_leave(fastattn_spread *spread, int thread);

#endif
