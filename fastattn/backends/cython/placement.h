/* Where the threads of a region run. Included by pool.c.
 *
 * While idle threads of another pool spin (a BLAS between two products), all cores look busy, and the kernel wakes a
 * worker on the core of the thread that woke it as soon as on another. The two then share that core for the whole
 * region, and two threads are no faster than one. So each thread claims the core on which it runs, and a worker whose
 * core is claimed moves to a free one. There it may share the core with a spinning thread: while the caller waits for a
 * worker that gets little time, the worker moves to the caller's core.
 *
 * A worker that is asleep is woken where it ran last. Where that core is claimed and no other looks idle, it would wait
 * there for the end of a time slice, milliseconds, so it is kept off the claimed cores until it has begun.
 *
 * The kernel may choose another core than that: in a virtual machine a halted CPU does not count as idle, and a caller
 * that has slept leaves its own CPU as little used as the worker's. It then woke workers on the caller's core, 3.8 ms too
 * late, and 1.4 ms of two threads took 2.5 ms (2 cores of Zen 5 EPYC, 2026-11-29). So a caller that has slept since it
 * last woke workers keeps all of them off the claimed cores. Short regions do so always: they have no time to lose.
 *
 * Only workers are moved, and their affinity, which is the caller's, is restored at once. Where every thread has a core
 * of its own, the cost is two sched_getcpu per thread. Linux only.
 *
 * Calls with key intervals 0 .. i between two products of NumPy's OpenBLAS, shapes (1,12,512,64), (1,12,1024,64),
 * (16,12,64,32), two threads over one: 1.14, 0.99 and 1.43 times as fast without this, 1.63, 1.36 and 1.55 with moves
 * alone, 1.73, 1.42 and 1.61 with the caller's core as well. 2 cores of Cascade Lake, 2026-11-22, interleaved A/B, on
 * threads of OpenMP.
 */

#ifndef FASTATTN_PLACEMENT_H
#define FASTATTN_PLACEMENT_H

#include <string.h>

#include "pool.h"
#include "turns.h" /* windows.h, where there is one */

#ifndef _WIN32
#include <unistd.h>
#endif

#ifdef __linux__

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <time.h>

/* Of a worker. */
typedef struct {
    pthread_t id;      /* 0 until it has run */
    cpu_set_t allowed; /* its affinity, as last set */
    int cpu;           /* where it ended its last region */
    int reserved;      /* the CPU that was claimed for it while it was asleep, or -1 */
    int is_kept_apart; /* whether its affinity is less than `allowed` until it has begun */
} thread_place;

/* Of a region. */
typedef struct {
    int n_cpus;        /* that the caller may use */
    int keeps_apart;   /* whether all that it wakes are kept off the claimed cores */
    cpu_set_t allowed; /* the caller's affinity, which its workers get; empty where it is unknown */
    uint64_t cores[FASTATTN_MAX_CPUS / 64], cpus[FASTATTN_MAX_CPUS / 64]; /* claimed by threads */
} region_places;

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
static int claim_free(region_places *r, int cpu) {
    for (int step = 1; step < known_cpus; step++) {
        int other = (cpu + step) % known_cpus;
        if (CPU_ISSET(other, &r->allowed) && claim(r->cores, core_of[other])) {
            claim(r->cpus, other);
            return other;
        }
    }
    for (int step = 0; step < known_cpus; step++) {
        int other = (cpu + step) % known_cpus;
        if (CPU_ISSET(other, &r->allowed) && claim(r->cpus, other))
            return other;
    }
    return -1;
}

/* Whether it could be set. That of a thread which has not run yet cannot. */
static int set_affinity(const thread_place *w, const cpu_set_t *cpus) {
    const pthread_t id = __atomic_load_n(&w->id, __ATOMIC_ACQUIRE);
    return id != 0 && pthread_setaffinity_np(id, sizeof *cpus, cpus) == 0;
}

/* Moves a worker to the CPU, then restores its affinity. */
static void move(const thread_place *w, int cpu, const cpu_set_t *allowed) {
    cpu_set_t chosen;
    CPU_ZERO(&chosen);
    CPU_SET(cpu, &chosen);
    if (set_affinity(w, &chosen))
        set_affinity(w, allowed);
}

/* Learns the caller's affinity and claims its core. */
static void place_caller(region_places *r) {
    int cpu = current_cpu();
    if (pthread_getaffinity_np(pthread_self(), sizeof r->allowed, &r->allowed) != 0)
        CPU_ZERO(&r->allowed);
    r->n_cpus = CPU_COUNT(&r->allowed);
    if (r->n_cpus == 0)
        r->n_cpus = FASTATTN_MAX_CPUS; /* more than that */
    if (cpu >= 0) {
        claim(r->cores, core_of[cpu]);
        claim(r->cpus, cpu);
    }
}

/* Before workers are woken: whether all are kept off the claimed cores. Sleeps of the caller within regions count, too. */
static void decide_placement(region_places *r, int is_short) {
    static __thread long switches;
    struct rusage usage;
    if (getrusage(RUSAGE_THREAD, &usage) == 0) {
        r->keeps_apart = is_short || usage.ru_nvcsw != switches;
        switches = usage.ru_nvcsw;
    }
}

/* Claims the core of a worker that is about to be woken, or keeps it off the cores that are claimed. It may begin
 * meanwhile, as it was about to sleep: then the end of the region restores its affinity. */
static void place_sleeper(region_places *r, thread_place *w) {
    const int last = __atomic_load_n(&w->cpu, __ATOMIC_RELAXED);
    cpu_set_t others = r->allowed;
    int has_core;
    if (last < 0 || last >= known_cpus)
        return;
    has_core = CPU_ISSET(last, &r->allowed) && claim(r->cores, core_of[last]);
    if (has_core) {
        claim(r->cpus, last);
        __atomic_store_n(&w->reserved, last, __ATOMIC_RELAXED);
        if (!r->keeps_apart)
            return;
    }
    for (int cpu = 0; cpu < known_cpus; cpu++)
        if (__atomic_load_n(&r->cores[core_of[cpu] / 64], __ATOMIC_RELAXED) >> core_of[cpu] % 64 & 1)
            CPU_CLR(cpu, &others);
    if (has_core)
        CPU_SET(last, &others);
    if (CPU_COUNT(&others) > 0) {
        __atomic_store_n(&w->is_kept_apart, 1, __ATOMIC_RELAXED);
        set_affinity(w, &others);
    }
}

/* Gives a worker the caller's affinity, and forgets what was claimed for it. */
static void restore(region_places *r, thread_place *w) {
    __atomic_store_n(&w->reserved, -1, __ATOMIC_RELAXED);
    if ((__atomic_exchange_n(&w->is_kept_apart, 0, __ATOMIC_RELAXED) || !CPU_EQUAL(&w->allowed, &r->allowed)) &&
        set_affinity(w, &r->allowed))
        w->allowed = r->allowed;
}

/* Restores the calling worker's affinity, and moves it to another core if its own is claimed by another. */
static void place_worker(region_places *r, thread_place *w) {
    const int reserved = __atomic_load_n(&w->reserved, __ATOMIC_RELAXED);
    int other, cpu = current_cpu();
    restore(r, w);
    if (cpu < 0 || cpu == reserved)
        return;
    if (claim(r->cores, core_of[cpu])) {
        claim(r->cpus, cpu);
        return;
    }
    other = claim_free(r, cpu);
    if (other >= 0 && other != cpu)
        move(w, other, &r->allowed);
}

/* Where the calling worker ends its region. */
static void remember_place(thread_place *w) { __atomic_store_n(&w->cpu, current_cpu(), __ATOMIC_RELAXED); }

/* Time that a worker has run, in nanoseconds; -1 where it is unknown. */
static int64_t time_used(const thread_place *w) {
    clockid_t clock;
    struct timespec used;
    if (pthread_getcpuclockid(w->id, &clock) != 0 || clock_gettime(clock, &used) != 0)
        return -1;
    return (int64_t)used.tv_sec * 1000000000 + used.tv_nsec;
}

/* Moves a worker to the core of the caller, who waits for it. */
static void lend_core(region_places *r, thread_place *w) {
    int cpu = current_cpu();
    if (cpu >= 0 && CPU_ISSET(cpu, &r->allowed))
        move(w, cpu, &r->allowed);
}

/* Of a worker that is about to be created: a thread inherits the affinity. */
static thread_place new_place(const region_places *r) {
    return (thread_place){.allowed = r->allowed, .cpu = -1, .reserved = -1};
}

/* By a worker, before anything else. */
static void introduce(thread_place *w) { __atomic_store_n(&w->id, pthread_self(), __ATOMIC_RELEASE); }

#else

typedef struct {
    int n_cpus;
} region_places;
typedef struct {
    int none;
} thread_place;

void fastattn_set_cores(const int32_t *core_of_cpu, int n_cpus) {
    (void)core_of_cpu;
    (void)n_cpus;
}

static void place_caller(region_places *r) {
#ifdef _WIN32
    r->n_cpus = (int)GetActiveProcessorCount(ALL_PROCESSOR_GROUPS);
#else
    r->n_cpus = (int)sysconf(_SC_NPROCESSORS_ONLN);
#endif
}

#define new_place(r) (thread_place){0}
#define introduce(w) (void)0
#define decide_placement(r, is_short) (void)0
#define place_sleeper(r, w) (void)0
#define restore(r, w) (void)0
#define place_worker(r, w) (void)0
#define remember_place(w) (void)0

#endif

#endif
