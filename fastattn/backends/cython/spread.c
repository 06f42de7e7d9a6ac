/* See spread.h. */

#define _GNU_SOURCE

#include "spread.h"

#ifdef __linux__

#include <pthread.h>
#include <sched.h>
#include <string.h>

static int32_t core_of[FASTATTN_MAX_CPUS];
static int known_cpus = 0;

void fastattn_set_cores(const int32_t *core_of_cpu, int n_cpus) {
    known_cpus = n_cpus < FASTATTN_MAX_CPUS ? n_cpus : FASTATTN_MAX_CPUS;
    memcpy(core_of, core_of_cpu, known_cpus * sizeof *core_of);
}

/* Claims a core or CPU; whether it was free. */
static int claim(uint64_t *claimed, int number) {
    uint64_t bit = (uint64_t)1 << number % 64;
    return !(__atomic_fetch_or(&claimed[number / 64], bit, __ATOMIC_RELAXED) & bit);
}

/* The CPU that the calling thread runs on, -1 where it is not one of those known. */
static int current_cpu(void) {
    int cpu = sched_getcpu();
    return cpu < known_cpus ? cpu : -1;
}

/* Claims an allowed CPU for the thread that runs on `cpu`: one of a free core, or else its own, or else any free one;
 * -1 where there are more threads than CPUs. The search starts after its own CPU, so that concurrent regions do not
 * all choose the first CPUs. */
static int claim_free(fastattn_spread *spread, const cpu_set_t *allowed, int cpu) {
    for (int step = 1; step < known_cpus; step++) {
        int other = (cpu + step) % known_cpus;
        if (CPU_ISSET(other, allowed) && claim(spread->cores, core_of[other])) {
            claim(spread->cpus, other);
            return other;
        }
    }
    for (int step = 0; step < known_cpus; step++) {
        int other = (cpu + step) % known_cpus;
        if (CPU_ISSET(other, allowed) && claim(spread->cpus, other))
            return other;
    }
    return -1;
}

/* Moves a thread to the CPU, then restores its affinity. */
static int move(pthread_t thread, int cpu, const cpu_set_t *allowed) {
    cpu_set_t chosen;
    CPU_ZERO(&chosen);
    CPU_SET(cpu, &chosen);
    if (pthread_setaffinity_np(thread, sizeof chosen, &chosen) != 0)
        return 0;
    pthread_setaffinity_np(thread, sizeof *allowed, allowed);
    return 1;
}

/* Moves the calling worker to another core if its own is claimed. */
static void move_apart(fastattn_spread *spread) {
    cpu_set_t allowed;
    int other, cpu = current_cpu();
    if (cpu < 0)
        return;
    if (claim(spread->cores, core_of[cpu])) {
        claim(spread->cpus, cpu);
        return;
    }
    if (pthread_getaffinity_np(pthread_self(), sizeof allowed, &allowed) != 0)
        return;
    other = claim_free(spread, &allowed, cpu);
    if (other >= 0 && other != cpu && move(pthread_self(), other, &allowed))
        __atomic_store_n(&spread->moved, (uintptr_t)pthread_self(), __ATOMIC_RELEASE);
}

/* Moves a worker that has moved before, and still runs, to the caller's core. Its thread exists: it waits for the
 * caller at the end of the region. */
static void give_core(pthread_t worker) {
    cpu_set_t allowed;
    int cpu = current_cpu();
    if (cpu >= 0 && pthread_getaffinity_np(worker, sizeof allowed, &allowed) == 0 && CPU_ISSET(cpu, &allowed))
        move(worker, cpu, &allowed);
}

void fastattn_spread_start(fastattn_spread *spread) {
    int cpu = current_cpu();
    memset(spread, 0, sizeof *spread);
    if (cpu >= 0) {
        claim(spread->cores, core_of[cpu]);
        claim(spread->cpus, cpu);
    }
}

void fastattn_spread_enter(fastattn_spread *spread, int thread) {
    if (thread > 0)
        move_apart(spread);
}

void fastattn_spread_leave(fastattn_spread *spread, int thread) {
    uintptr_t moved = __atomic_load_n(&spread->moved, __ATOMIC_ACQUIRE);
    if (moved == 0)
        return;
    if (thread == 0) {
        give_core((pthread_t)moved);
    } else {
        moved = (uintptr_t)pthread_self();
        __atomic_compare_exchange_n(&spread->moved, &moved, 0, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
    }
}

#else

void fastattn_set_cores(const int32_t *core_of_cpu, int n_cpus) {
    (void)core_of_cpu;
    (void)n_cpus;
}

void fastattn_spread_start(fastattn_spread *spread) { (void)spread; }

void fastattn_spread_enter(fastattn_spread *spread, int thread) {
    (void)spread;
    (void)thread;
}

void fastattn_spread_leave(fastattn_spread *spread, int thread) {
    (void)spread;
    (void)thread;
}

#endif
