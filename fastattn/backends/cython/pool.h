/* The threads of the package: one pool of workers for the process, which every call shares.
 *
 * A region runs one function on the calling thread and on workers. Workers are started when a region first needs them,
 * and stay. They are detached and end with the process: there is nothing to join or to clean up at its exit.
 *
 * Concurrent and nested regions take the workers that are free, and each caller works itself: none waits for another.
 * A forked child starts workers of its own. A child that is forked within a region must not return from that region.
 */
#ifndef FASTATTN_POOL_H
#define FASTATTN_POOL_H

#include <stdint.h>

/* thread: from 0, the caller, to num_threads - 1; no two threads of a region have the same. */
typedef void (*fastattn_work)(void *argument, int thread, int num_threads);

/* Runs `work` on the calling thread and on up to num_threads - 1 workers; returns how many threads took part, once all of
 * them are done. For work that threads claim from shared counters: workers may be fewer or begin late, and one that has
 * not begun when the caller's own work is done never does. */
int fastattn_pool_run(fastattn_work work, void *argument, int num_threads);

/* The same for work that is done before a sleeping worker would begin. Sleeping workers stay asleep, and no worker is
 * started. Where such regions follow each other closely, workers are woken and started: the next regions find them
 * spinning. */
int fastattn_pool_run_short(fastattn_work work, void *argument, int num_threads);

/* Runs `work` for each of num_threads numbers, for jobs that wait for each other: a job has a thread, whatever the others
 * do. Those that no worker has begun when the caller's own is done, the caller runs, one after the other. If a thread
 * cannot be created for 10 s, the process is aborted, as OpenMP and OpenBLAS do. */
void fastattn_pool_run_all(fastattn_work work, void *argument, int num_threads);

/* How many workers exist. */
int fastattn_pool_size(void);

#define FASTATTN_MAX_CPUS 1024 /* as many as a cpu_set_t has */

/* Which core each CPU belongs to: the lowest number among the core's CPUs. Before this is called, and on CPUs past n_cpus,
 * no worker is moved to another core. Not to be called while a region runs. */
void fastattn_set_cores(const int32_t *core_of_cpu, int n_cpus);

#endif
