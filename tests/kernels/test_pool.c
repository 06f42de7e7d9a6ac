/* Regions of the pool: every number once, whoever calls, forks, exits or refuses threads. pool.c is included, with
 * another way to create threads below it.
 *
 *   test_pool [DIVISOR]    repeats everything so many times less often
 */

#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check.h"

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#undef near
#undef far
#else
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#ifdef WITHOUT_FUTEX /* the condition variables of other systems */
#include <sys/syscall.h>
#undef SYS_futex
#endif

/* Helgrind takes atomics for plain accesses: tell it which words are not, and what they order. */
#ifdef WITH_HELGRIND
#include <valgrind/helgrind.h>
#define ATOMIC(at, order, operation)                                                                           \
    ({                                                                                                         \
        VALGRIND_HG_DISABLE_CHECKING(at, sizeof *(at));                                                        \
        if ((order) != __ATOMIC_RELAXED)                                                                       \
            ANNOTATE_HAPPENS_BEFORE(at);                                                                       \
        __typeof__(operation) result_ = operation;                                                             \
        if ((order) != __ATOMIC_RELAXED)                                                                       \
            ANNOTATE_HAPPENS_AFTER(at);                                                                        \
        result_;                                                                                               \
    })
#define __atomic_load_n(at, order)                                                                             \
    ({                                                                                                         \
        VALGRIND_HG_DISABLE_CHECKING(at, sizeof *(at));                                                        \
        __typeof__(*(at) + 0) loaded_ = __atomic_load_n(at, order);                                            \
        if ((order) != __ATOMIC_RELAXED)                                                                       \
            ANNOTATE_HAPPENS_AFTER(at);                                                                        \
        loaded_;                                                                                               \
    })
#define __atomic_store_n(at, value, order)                                                                     \
    ({                                                                                                         \
        VALGRIND_HG_DISABLE_CHECKING(at, sizeof *(at));                                                        \
        ANNOTATE_HAPPENS_BEFORE(at);                                                                           \
        __atomic_store_n(at, value, order);                                                                    \
    })
#define __atomic_exchange_n(at, value, order) ATOMIC(at, order, __atomic_exchange_n(at, value, order))
#define __atomic_fetch_or(at, value, order) ATOMIC(at, order, __atomic_fetch_or(at, value, order))
#define __atomic_fetch_add(at, value, order) ATOMIC(at, order, __atomic_fetch_add(at, value, order))
#define __atomic_compare_exchange_n(at, expected, value, weak, order, otherwise)                               \
    ATOMIC(at, order, __atomic_compare_exchange_n(at, expected, value, weak, order, otherwise))
#endif

/* What tests do to the pool: refuse to create threads, and hold workers that have not begun. */
static int may_create = 1 << 30; /* threads */
static int refusals, attempts_refused, is_held, n_held, is_slow;

static int refuses(void) {
    if (__atomic_load_n(&refusals, __ATOMIC_SEQ_CST) > 0) {
        __atomic_fetch_add(&refusals, -1, __ATOMIC_SEQ_CST);
        __atomic_fetch_add(&attempts_refused, 1, __ATOMIC_SEQ_CST);
        return 1;
    }
    return __atomic_fetch_add(&may_create, -1, __ATOMIC_SEQ_CST) <= 0;
}

static void pause_briefly(void);
static void busy_for(int64_t duration);

static void hold(void) {
    if (__atomic_load_n(&is_slow, __ATOMIC_SEQ_CST))
        busy_for(5000);
    if (!__atomic_load_n(&is_held, __ATOMIC_SEQ_CST))
        return;
    __atomic_fetch_add(&n_held, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&is_held, __ATOMIC_SEQ_CST))
        pause_briefly();
    __atomic_fetch_add(&n_held, -1, __ATOMIC_SEQ_CST);
}

#ifdef _WIN32
static HANDLE create(LPSECURITY_ATTRIBUTES security, SIZE_T stack, LPTHREAD_START_ROUTINE start, void *argument, DWORD flags,
                     DWORD *id) {
    return refuses() ? NULL : CreateThread(security, stack, start, argument, flags, id);
}
#define CreateThread create
#else
static int create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
    return refuses() ? EAGAIN : pthread_create(thread, attributes, start, argument);
}
static int sleeps_short;

static int sleep_for(const struct timespec *duration, struct timespec *rest) {
    return sleeps_short ? 0 : nanosleep(duration, rest);
}
#define pthread_create create
#define nanosleep sleep_for
#endif

#define FASTATTN_POOL_HOOK hold
#include "pool.c"

#undef CreateThread
#undef pthread_create
#undef nanosleep

static int divisor = 1;
static int wrong; /* seen by other threads than the first */

/* For any thread: the line of the first failure. */
#define EXPECT(ok)                                                                                             \
    do {                                                                                                       \
        int none_ = 0;                                                                                         \
        if (!(ok))                                                                                             \
            __atomic_compare_exchange_n(&wrong, &none_, __LINE__, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);      \
    } while (0)

#define CHECK_NOTHING_WRONG()                                                                                  \
    do {                                                                                                       \
        const int line_ = __atomic_exchange_n(&wrong, 0, __ATOMIC_SEQ_CST);                                    \
        checks++;                                                                                              \
        if (line_ != 0) {                                                                                      \
            failures++;                                                                                        \
            printf("FAILED line %d, seen in line %d\n", line_, __LINE__);                                      \
        }                                                                                                      \
    } while (0)

static int get(int *at) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
static void set(int *at, int value) { __atomic_store_n(at, value, __ATOMIC_SEQ_CST); }
static int count(int *at) { return __atomic_fetch_add(at, 1, __ATOMIC_SEQ_CST); }
static int times(int n) { return n / divisor > 3 ? n / divisor : 3; }

static int random_below(uint64_t *state, int n) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int)((*state >> 33) % (uint64_t)n);
}

static void busy_for(int64_t duration) {
    const int64_t stop = nanoseconds() + duration;
    while (nanoseconds() < stop)
        FASTATTN_PAUSE();
}

/* ------------------------------------------------------------------ threads of the tests' own */

#ifdef _WIN32

typedef struct {
    HANDLE handle;
    void (*run)(void *);
    void *argument;
} test_thread;

static void pause_briefly(void) { Sleep(1); }

static DWORD WINAPI run_test_thread(void *thread) {
    ((test_thread *)thread)->run(((test_thread *)thread)->argument);
    return 0;
}

static void start(test_thread *thread, void (*run_)(void *), void *argument) {
    thread->run = run_;
    thread->argument = argument;
    thread->handle = CreateThread(NULL, 0, run_test_thread, thread, 0, NULL);
    CHECK(thread->handle != NULL);
}

static void join(test_thread *thread) {
    WaitForSingleObject(thread->handle, INFINITE);
    CloseHandle(thread->handle);
}

#else

typedef struct {
    pthread_t handle;
    void (*run)(void *);
    void *argument;
} test_thread;

static void pause_briefly(void) { usleep(100); }

static void *run_test_thread(void *thread) {
    ((test_thread *)thread)->run(((test_thread *)thread)->argument);
    return NULL;
}

static void start(test_thread *thread, void (*run_)(void *), void *argument) {
    thread->run = run_;
    thread->argument = argument;
    CHECK(pthread_create(&thread->handle, NULL, run_test_thread, thread) == 0);
}

static void join(test_thread *thread) { pthread_join(thread->handle, NULL); }

#endif

/* ------------------------------------------------------------------ work */

enum { N_INDICES = 200 };

typedef struct {
    int num_threads, next, n_began, depth;
    int done[N_INDICES]; /* not atomic: nobody else may write an index, and the caller sees all at the end */
    int began[64];       /* by thread */
} indices;

static void run_indices(int num_threads, int depth);

/* Claims indices and does each. */
static void do_indices(void *argument, int thread, int num_threads) {
    indices *all = argument;
    int index;
    EXPECT(num_threads == all->num_threads && thread >= 0 && thread < num_threads);
    EXPECT(count(&all->began[thread]) == 0);
    count(&all->n_began);
    while ((index = count(&all->next)) < N_INDICES) {
        all->done[index]++;
        if (all->depth > 0 && index % 50 == 0)
            run_indices(1 + index / 50, all->depth - 1);
    }
}

static void run_indices_by(int (*run_)(fastattn_work, void *, int), int num_threads, int depth) {
    indices all = {.num_threads = num_threads, .depth = depth};
    const int n_threads = run_(do_indices, &all, num_threads);
    EXPECT(n_threads >= 1 && n_threads <= num_threads && n_threads == all.n_began && all.began[0] == 1);
    for (int n = 0; n < N_INDICES; n++)
        EXPECT(all.done[n] == 1);
}

static void run_indices(int num_threads, int depth) { run_indices_by(fastattn_pool_run, num_threads, depth); }

/* Jobs that wait until all of their group have arrived. */
typedef struct {
    int num_threads, group, shift; /* shift: by how many jobs the first group is smaller */
    int arrived[64], done[64];
} jobs;

static void do_job(void *argument, int thread, int num_threads) {
    jobs *all = argument;
    const int number = (thread + all->shift) / all->group;
    const int first = number * all->group - all->shift, stop = first + all->group;
    const int n_jobs = (stop < num_threads ? stop : num_threads) - (first > 0 ? first : 0);
    EXPECT(num_threads == all->num_threads && thread >= 0 && thread < num_threads);
    count(&all->arrived[number]);
    while (get(&all->arrived[number]) < n_jobs)
        fastattn_yield();
    all->done[thread]++;
}

static void run_jobs_of(int num_threads, int group, int shift) {
    jobs all = {.num_threads = num_threads, .group = group, .shift = shift};
    fastattn_pool_run_all(do_job, &all, num_threads);
    for (int n = 0; n < 64; n++)
        EXPECT(all.done[n] == (n < num_threads));
}

static void run_jobs(int num_threads, int group) { run_jobs_of(num_threads, group, 0); }

/* ------------------------------------------------------------------ tests */

static void test_counts(void) {
    for (int repeat = 0; repeat < times(50); repeat++)
        for (int n = 1; n <= 16; n++)
            run_indices(n, 0);
    CHECK(fastattn_pool_size() == 15);
    CHECK_NOTHING_WRONG();
}

static void test_nested(void) {
    for (int repeat = 0; repeat < times(50); repeat++)
        for (int n = 1; n <= 5; n++)
            run_indices(n, 2);
    CHECK(fastattn_pool_size() == 15); /* a nested region starts no more */
    CHECK_NOTHING_WRONG();
}

static void test_jobs(void) {
    for (int repeat = 0; repeat < times(20); repeat++)
        for (int n = 1; n <= 16; n++)
            for (int group = 1; group <= n; group += 1 + group / 2) {
                run_jobs(n, group);
                run_jobs_of(n, group, group - 1); /* the caller's job waits for none */
            }
    CHECK_NOTHING_WRONG();
}

static void call_often(void *seed) {
    uint64_t state = (uintptr_t)seed;
    for (int n = 0; n < times(300); n++) {
        const int num_threads = 1 + random_below(&state, 8);
        switch (random_below(&state, 4)) {
        case 0: run_jobs_of(num_threads, 4, random_below(&state, 4)); break;
        case 1: run_indices(num_threads, 1); break;
        case 2: run_indices_by(fastattn_pool_run_short, num_threads, 0); break;
        default: run_indices(num_threads, 0);
        }
        busy_for(random_below(&state, 3) * 25000);
    }
}

static void test_callers_at_once(void) {
    test_thread threads[8];
    for (uintptr_t n = 0; n < 8; n++)
        start(&threads[n], call_often, (void *)(n + 1));
    for (int n = 0; n < 8; n++)
        join(&threads[n]);
    CHECK_NOTHING_WRONG();
}

/* Workers are about to fall asleep when they are wanted. */
static void test_no_wake_up_is_lost(void) {
    uint64_t state = 7;
    for (int n = 0; n < times(3000); n++) {
        run_jobs_of(2 + n % 7, 4, n % 4);
        set(&is_slow, n % 2);
        busy_for(random_below(&state, 2 * SPIN_NANOSECONDS));
    }
    set(&is_slow, 0);
    CHECK_NOTHING_WRONG();
}

static void test_changed_limits(void) {
    uint64_t state = 3;
    const int before = fastattn_pool_size();
    for (int n = 0; n < times(10000); n++)
        run_indices(1 + random_below(&state, 16), 0);
    CHECK(fastattn_pool_size() == before);
    CHECK_NOTHING_WRONG();
}

static void do_nothing(void *argument, int thread, int num_threads) {
    (void)argument;
    (void)thread;
    (void)num_threads;
}

/* Without any other thread at hand: those that exist are held, or more are wanted. */
static void test_refused_threads(void) {
    const int before = fastattn_pool_size();
    set(&may_create, 0);
    for (int n = 1; n <= before + 8; n++)
        run_indices(n, 0);
    CHECK(fastattn_pool_size() == before);
    set(&may_create, 3);
    run_indices(before + 9, 0);
    CHECK(fastattn_pool_size() == before + 3);
    CHECK(fastattn_pool_run(do_nothing, NULL, 1) == 1);
    set(&may_create, 1 << 30);
    set(&refusals, 20); /* for a while */
    set(&attempts_refused, 0);
    run_jobs(before + 6, before + 6);
    CHECK(fastattn_pool_size() == before + 5 && get(&attempts_refused) == 20);
    CHECK_NOTHING_WRONG();
}

static void wait_until(int *at, int value) {
    while (get(at) != value)
        pause_briefly();
}

/* Regions end while workers are held that were free, and that were started for them. */
static void test_late_workers(void) {
    const int before = fastattn_pool_size();
    set(&is_held, 1);
    for (int n = 2; n <= before + 3; n++) {
        indices all = {.num_threads = n};
        CHECK(fastattn_pool_run(do_indices, &all, n) == 1);
        CHECK(all.began[0] == 1 && all.n_began == 1);
        for (int index = 0; index < N_INDICES; index++)
            EXPECT(all.done[index] == 1);
    }
    CHECK(fastattn_pool_size() == before + 2);
    set(&is_held, 0);
    wait_until(&n_held, 0);
    run_jobs(before + 3, before + 3); /* and all of them are there afterwards */
    CHECK(fastattn_pool_size() == before + 2);
    CHECK_NOTHING_WRONG();
}

/* Independent jobs do not wait for late workers either: their caller does them. */
static void test_jobs_of_late_workers(void) {
    set(&is_held, 1);
    run_jobs(6, 1);
    CHECK_NOTHING_WRONG();
    set(&is_held, 0);
    wait_until(&n_held, 0);
}

static int are_asleep(void) {
    int all = 1;
    lock(&pool.lock);
    for (const worker *w = pool.free; w != NULL; w = w->next)
        all &= state_of(w) == ASLEEP;
    unlock(&pool.lock);
    return all;
}

static void do_briefly(void *argument, int thread, int num_threads) {
    (void)argument;
    (void)thread;
    (void)num_threads;
    busy_for(1000000);
}

/* A short region alone leaves workers asleep and starts none; of those that follow each other the next ones have workers,
 * sooner or later: the machine may have other work between two of them. */
static void test_short_regions(void) {
    const int before = fastattn_pool_size();
    int n = 0;
    for (int round = 0; round < 3; round++) {
        do
            pause_briefly(); /* longer than a spin */
        while (!are_asleep());
        CHECK(fastattn_pool_run_short(do_nothing, NULL, before + 3) == 1);
        CHECK(are_asleep() && fastattn_pool_size() == before);
    }
    while (fastattn_pool_run_short(do_briefly, NULL, before + 3) < 2 && n < 10000)
        n++;
    CHECK(n < 10000);
    for (int round = 0; round < 100; round++)
        run_indices_by(fastattn_pool_run_short, 4, 0);
    CHECK_NOTHING_WRONG();
}

/* A worker that is woken for a region but begins too late for it spins for the next one. */
static void test_workers_that_wake_too_late(void) {
    int n_idle = 0;
    run_jobs(3, 3); /* so many exist */
    do
        pause_briefly();
    while (!are_asleep());
    set(&is_held, 1);
    CHECK(fastattn_pool_run(do_nothing, NULL, 3) == 1);
    lock(&pool.lock);
    for (const worker *w = pool.free; w != NULL; w = w->next)
        n_idle += state_of(w) == IDLE;
    unlock(&pool.lock);
    CHECK(n_idle == 2);
    set(&is_held, 0);
    wait_until(&n_held, 0);
    CHECK_NOTHING_WRONG();
}

static void call_until(void *stop) {
    uint64_t state = (uintptr_t)&state;
    while (!get(stop)) {
        run_indices(1 + random_below(&state, 6), 0);
        run_jobs(1 + random_below(&state, 4), 2);
        busy_for(random_below(&state, 3) * 25000);
    }
}

#ifndef _WIN32

static int status_of(pid_t child) {
    int status = -1;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        continue;
    return status;
}

#ifndef WITHOUT_FORKS

/* Whether a child can run regions, and starts with no workers. */
static int child_is_fine(void) {
    const pid_t child = fork();
    if (child == 0) {
        const int fresh = fastattn_pool_size() == 0;
        alarm(60);
        set(&wrong, 0);
        run_indices(3, 0);
        run_jobs(3, 3);
        run_indices(2, 1);
        _exit(fresh && fastattn_pool_size() >= 2 && !get(&wrong) ? 0 : 1);
    }
    return child > 0 && status_of(child) == 0;
}

static void fork_once(void *parent, int thread, int num_threads) {
    (void)num_threads;
    if (thread == 0 || count(parent) == 0)
        EXPECT(child_is_fine());
}

static void test_forks(void) {
    test_thread threads[3];
    int stop = 0;
    for (int n = 0; n < 3; n++)
        start(&threads[n], call_until, &stop);
    for (int n = 0; n < times(1000); n++)
        EXPECT(child_is_fine());
    set(&stop, 1);
    for (int n = 0; n < 3; n++)
        join(&threads[n]);
    CHECK_NOTHING_WRONG();
    for (int n = 0; n < times(50); n++) { /* by the caller and a worker of a region */
        int forks = 0;
        fastattn_pool_run_all(fork_once, &forks, 3);
        run_indices(5, 1);
    }
    CHECK_NOTHING_WRONG();
}

static void exit_now(void *argument, int thread, int num_threads) {
    (void)argument;
    (void)num_threads;
    if (thread == 1)
        exit(3);
    pause();
}

static void exit_soon(void *unused) {
    (void)unused;
    usleep(500);
    exit(3);
}

/* From the main thread, from another, and from a worker. */
static void test_exits(void) {
    fflush(stdout);
    for (int n = 0; n < times(100); n++) {
        const pid_t child = fork();
        int status;
        if (child == 0) {
            test_thread threads[5];
            int stop = 0;
            alarm(60);
            for (int i = 0; i < 3; i++)
                start(&threads[i], call_until, &stop);
            if (n % 3 == 0)
                exit_soon(NULL);
            else if (n % 3 == 1)
                start(&threads[3], exit_soon, NULL);
            else
                fastattn_pool_run_all(exit_now, NULL, 2);
            call_until(&stop);
        }
        status = status_of(child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 3);
    }
}

#endif

/* Jobs that cannot all run end the process, with a message. */
static void test_abort(void) {
    char message[200] = "";
    int ends[2], status;
    pid_t child;
    CHECK(pipe(ends) == 0);
    child = fork();
    if (child == 0) {
        signal(SIGABRT, SIG_DFL);
        dup2(ends[1], 2);
        set(&may_create, 0);
        sleeps_short = 1;
        run_jobs(3, 3);
        _exit(0);
    }
    close(ends[1]);
    status = status_of(child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    CHECK(read(ends[0], message, sizeof message - 1) > 0);
    CHECK(strncmp(message, "fastattn: no thread can be created", 34) == 0);
    close(ends[0]);
}

/* Signals and names of workers; the caller's signals stay as they are. */
static void look_at_worker(void *caller, int thread, int num_threads) {
    sigset_t blocked;
    do_job(caller, thread, num_threads);
    if (thread == 0)
        return;
    pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    EXPECT(sigismember(&blocked, SIGINT) && sigismember(&blocked, SIGALRM) && !sigismember(&blocked, SIGSEGV));
#ifdef __linux__
    char name[16] = "";
    EXPECT(pthread_getname_np(pthread_self(), name, sizeof name) == 0 && strncmp(name, "fastattn-", 9) == 0);
#endif
}

static void test_new_workers(void) {
    sigset_t before, after;
    jobs all = {.num_threads = 12, .group = 12};
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    fastattn_pool_run_all(look_at_worker, &all, 12);
    CHECK_NOTHING_WRONG();
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    for (int signal_ = 1; signal_ < 32; signal_++)
        CHECK(sigismember(&before, signal_) == sigismember(&after, signal_));
}

#endif

#ifdef __linux__

static cpu_set_t wanted;

static void look_at_affinity(void *all, int thread, int num_threads) {
    cpu_set_t own; /* not in flux: a worker is moved again only when the caller is done, and that waits for all */
    EXPECT(pthread_getaffinity_np(pthread_self(), sizeof own, &own) == 0 && CPU_EQUAL(&own, &wanted));
    EXPECT(CPU_ISSET(sched_getcpu(), &wanted));
    do_job(all, thread, num_threads);
    EXPECT(CPU_ISSET(sched_getcpu(), &wanted));
}

/* The affinity of the caller changes between regions; with known cores, workers are moved as well. */
static void test_affinity(void) {
    int32_t cores[FASTATTN_MAX_CPUS];
    cpu_set_t every;
    int cpu = -1;
    CHECK(pthread_getaffinity_np(pthread_self(), sizeof every, &every) == 0);
    for (int n = 0; n < FASTATTN_MAX_CPUS; n++)
        cores[n] = n;
    for (int n = 0; n < times(300); n++) {
        const int num_threads = 2 + n % 7;
        jobs all = {.num_threads = num_threads, .group = num_threads};
        fastattn_set_cores(cores, n % 2 ? FASTATTN_MAX_CPUS : 0);
        wanted = every;
        if (n % 3) {
            do
                cpu = (cpu + 1) % FASTATTN_MAX_CPUS;
            while (!CPU_ISSET(cpu, &every));
            CPU_ZERO(&wanted);
            CPU_SET(cpu, &wanted);
        }
        CHECK(pthread_setaffinity_np(pthread_self(), sizeof wanted, &wanted) == 0);
        fastattn_pool_run_all(look_at_affinity, &all, num_threads);
        run_indices(num_threads, 0);
    }
    CHECK(pthread_setaffinity_np(pthread_self(), sizeof every, &every) == 0);
    CHECK_NOTHING_WRONG();
}

#endif

static void (*const tests[])(void) = {
#ifndef _WIN32
    test_new_workers,
#endif
    test_counts,
    test_nested,
    test_jobs,
    test_no_wake_up_is_lost,
    test_changed_limits,
    test_short_regions,
    test_workers_that_wake_too_late,
    test_late_workers,
    test_jobs_of_late_workers,
    test_refused_threads,
    test_callers_at_once,
#ifndef _WIN32
    test_abort,
#ifndef WITHOUT_FORKS /* qemu-user 7.2 has no threads in forked children */
    test_forks,
    test_exits,
#endif
#endif
#ifdef __linux__
    test_affinity,
#endif
};

int main(int n_arguments, char **arguments) {
    static test_thread last;
    static int never = 0;
    divisor = n_arguments > 1 ? atoi(arguments[1]) : 1;
#ifndef _WIN32
    alarm(600); /* a worker that is never woken is a hang */
#endif
    CHECK(fastattn_pool_size() == 0);
    for (size_t n = 0; n < sizeof tests / sizeof *tests; n++) {
        tests[n]();
        CHECK(pool.n_active == 0);
    }
    start(&last, call_until, &never); /* this process ends with calls in flight, too */
    pause_briefly();
    printf("pool: %d checks, %d failed\n", checks, failures);
    return failures > 0;
}
