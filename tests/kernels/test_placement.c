/* Which core each thread of a region ends up on, on machines that are made up: pool.c with another kernel below it. */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

/* A thread is a number here, and runs somewhere. */
static int self, cpu_of[16], moves, restored;
static cpu_set_t allowed_of[16], last_set;

static int fake_getcpu(void) { return cpu_of[self]; }

static pthread_t fake_self(void) { return (pthread_t)(uintptr_t)(self + 1); }

static int fake_getaffinity(pthread_t thread, size_t size, cpu_set_t *set) {
    (void)size;
    *set = allowed_of[(uintptr_t)thread - 1];
    return 0;
}

/* As the kernel: who may not stay where it is goes to the first CPU of the set. */
static int fake_setaffinity(pthread_t number, size_t size, const cpu_set_t *set) {
    const int thread = (int)((uintptr_t)number - 1);
    (void)size;
    restored = CPU_EQUAL(set, &allowed_of[thread]);
    last_set = *set;
    if (CPU_ISSET(cpu_of[thread], set))
        return 0;
    for (int cpu = 0; cpu < 1024; cpu++)
        if (CPU_ISSET(cpu, set)) {
            cpu_of[thread] = cpu;
            moves++;
            return 0;
        }
    return 22;
}

#define sched_getcpu fake_getcpu
#define pthread_self fake_self
#define pthread_getaffinity_np fake_getaffinity
#define pthread_setaffinity_np fake_setaffinity
#include "pool.c"

static thread_place workers[16]; /* by thread; that of the caller is not used */

/* A region of n threads that wake on these CPUs, the first of them the caller. */
static void enter(region_places *r, int n, const int *cpus, uint64_t allowed) {
    moves = 0;
    restored = 1;
    for (int thread = 0; thread < n; thread++) {
        cpu_of[thread] = cpus[thread];
        CPU_ZERO(&allowed_of[thread]);
        for (int cpu = 0; cpu < 64; cpu++)
            if (allowed >> cpu & 1)
                CPU_SET(cpu, &allowed_of[thread]);
    }
    memset(r, 0, sizeof *r);
    self = 0;
    place_caller(r);
    for (self = 1; self < n; self++) {
        workers[self].id = fake_self();
        workers[self].allowed = allowed_of[self];
        workers[self].reserved = -1;
        place_worker(r, &workers[self]);
    }
    CHECK(restored);
    CHECK(cpu_of[0] == cpus[0]);
}

static int on_own_cores(int n, const int32_t *cores) {
    for (int a = 0; a < n; a++)
        for (int b = 0; b < a; b++)
            if (cores[cpu_of[a]] == cores[cpu_of[b]])
                return 0;
    return 1;
}

static void test_single_cores(void) {
    const int32_t cores[] = {0, 1, 2, 3};
    region_places r;
    fastattn_set_cores(cores, 4);
    for (int case_ = 0; case_ < 256; case_++) {
        const int cpus[] = {case_ & 3, case_ >> 2 & 3, case_ >> 4 & 3, case_ >> 6 & 3};
        int together = 0;
        for (int n = 1; n <= 4; n++) {
            for (int before = 0; before < n - 1; before++)
                together += cpus[before] == cpus[n - 1];
            enter(&r, n, cpus, 15);
            CHECK(on_own_cores(n, cores));
            CHECK(together > 0 || moves == 0);
        }
    }
}

/* Two CPUs for each core, numbered as on many servers: 0 and 4 are one core, 1 and 5 the next. */
static void test_hyper_threads(void) {
    const int32_t cores[] = {0, 1, 2, 3, 0, 1, 2, 3};
    region_places r;
    fastattn_set_cores(cores, 8);
    enter(&r, 2, (const int[]){1, 5}, 255);
    CHECK(moves == 1 && on_own_cores(2, cores));
    enter(&r, 4, (const int[]){3, 7, 3, 7}, 255);
    CHECK(on_own_cores(4, cores));
    /* More threads than cores: each on a CPU of its own. Who is on a sibling already stays. */
    enter(&r, 8, (const int[]){0, 4, 4, 4, 0, 0, 1, 1}, 255);
    for (int a = 0; a < 8; a++)
        for (int b = 0; b < a; b++)
            CHECK(cpu_of[a] != cpu_of[b]);
    enter(&r, 2, (const int[]){2, 6}, 1 << 2 | 1 << 6);
    CHECK(moves == 0);
    enter(&r, 2, (const int[]){2, 2}, 1 << 2 | 1 << 6);
    CHECK(cpu_of[1] == 6);
}

static void test_limits(void) {
    const int32_t cores[] = {0, 1, 2, 3};
    region_places r;
    fastattn_set_cores(cores, 4);
    enter(&r, 2, (const int[]){1, 1}, 1 << 1); /* nowhere to go */
    CHECK(moves == 0);
    enter(&r, 3, (const int[]){1, 1, 1}, 1 << 1 | 1 << 3);
    CHECK(cpu_of[1] == 3 && moves == 1);
    enter(&r, 2, (const int[]){5, 5}, 255); /* CPUs that nobody told of */
    CHECK(moves == 0);
    fastattn_set_cores(cores, 0);
    enter(&r, 2, (const int[]){1, 1}, 15);
    CHECK(moves == 0);
    fastattn_set_cores(cores, 4);
}

/* A worker that does not run gets the core of the caller, who waits for it. */
static void test_lent_core(void) {
    const int32_t cores[] = {0, 1, 2, 3};
    region_places r;
    fastattn_set_cores(cores, 4);
    enter(&r, 3, (const int[]){2, 2, 0}, 15);
    CHECK(cpu_of[1] == 3 && moves == 1);
    self = 0;
    lend_core(&r, &workers[2]);
    CHECK(cpu_of[2] == 2 && moves == 2 && restored);
    cpu_of[0] = 7; /* where nobody told of, or workers may not run */
    lend_core(&r, &workers[2]);
    CHECK(cpu_of[2] == 2 && moves == 2);
}

/* Workers get the caller's affinity, also where they move. */
static void test_affinity(void) {
    const int32_t cores[] = {0, 1, 2, 3};
    region_places r;
    fastattn_set_cores(cores, 4);
    enter(&r, 2, (const int[]){1, 1}, 15);
    for (int cpu = 0; cpu < 4; cpu++) {
        memset(&r, 0, sizeof r);
        self = 0;
        CPU_ZERO(&allowed_of[0]);
        CPU_SET(cpu, &allowed_of[0]);
        cpu_of[0] = cpu;
        place_caller(&r);
        CHECK(r.n_cpus == 1);
        self = 1;
        allowed_of[1] = allowed_of[0]; /* what the kernel would keep, for `restored` */
        place_worker(&r, &workers[1]);
        CHECK(cpu_of[1] == cpu && restored && CPU_EQUAL(&workers[1].allowed, &allowed_of[0]));
    }
}

/* Sleeping workers, which the kernel wakes where they ran last if they may run there; some kernels on the caller's core,
 * unless they are kept apart. */
static void test_asleep(void) {
    const int32_t cores[] = {0, 1, 2, 3, 0, 1, 2, 3};
    region_places r;
    for (int case_ = 0; case_ < 2 * 4 * 4 * 4 * 4; case_++) {
        const int last[] = {case_ & 3, case_ >> 2 & 3, case_ >> 4 & 3, case_ >> 6 & 3}, keeps_apart = case_ >> 8;
        fastattn_set_cores(cores, 8);
        enter(&r, 1, last, 255);
        r.keeps_apart = keeps_apart;
        for (self = 1; self < 4; self++) {
            workers[self] = (thread_place){.id = fake_self(), .cpu = last[self], .reserved = -1};
            allowed_of[self] = workers[self].allowed = allowed_of[0];
            cpu_of[self] = last[self];
            place_sleeper(&r, &workers[self]);
            CHECK(cores[cpu_of[self]] != cores[cpu_of[0]]); /* it need not wait for the caller */
            if (workers[self].reserved != -1)
                CHECK(workers[self].is_kept_apart == keeps_apart);
            if (workers[self].is_kept_apart)
                CHECK(!CPU_ISSET(cpu_of[0], &last_set));
            if (workers[self].is_kept_apart && workers[self].reserved != -1)
                CHECK(CPU_ISSET(last[self], &last_set));
        }
        for (self = 1; self < 4; self++) {
            restored = !workers[self].is_kept_apart;
            place_worker(&r, &workers[self]);
            CHECK(restored && !workers[self].is_kept_apart && workers[self].reserved == -1);
        }
        CHECK(on_own_cores(4, cores));
        /* One that is not woken in time. */
        place_sleeper(&r, &workers[1]);
        self = 0;
        restore(&r, &workers[1]);
        CHECK(!workers[1].is_kept_apart && workers[1].reserved == -1);
    }
    fastattn_set_cores(cores, 8);
    enter(&r, 1, (const int[]){1}, 1 << 1); /* nowhere else to wake */
    workers[1] = (thread_place){.cpu = 1};
    place_sleeper(&r, &workers[1]);
    CHECK(!workers[1].is_kept_apart);

    /* One that was cancelled before its thread ran has no number yet. */
    enter(&r, 1, (const int[]){0}, 15);
    workers[1] = (thread_place){.cpu = -1, .is_kept_apart = 1};
    restored = 0;
    restore(&r, &workers[1]);
    CHECK(!restored && CPU_COUNT(&workers[1].allowed) == 0);
    workers[1] = new_place(&r);
    place_sleeper(&r, &workers[1]);
    CHECK(!workers[1].is_kept_apart && CPU_EQUAL(&workers[1].allowed, &allowed_of[0]));
    self = 1;
    introduce(&workers[1]);
    CHECK(workers[1].id == fake_self());
}

int main(void) {
    test_asleep();
    test_single_cores();
    test_hyper_threads();
    test_limits();
    test_lent_core();
    test_affinity();
    printf("placement: %d checks, %d failed\n", checks, failures);
    return failures > 0;
}
