/* See pool.h.
 *
 * Life of a worker: it waits on its state, first spinning, then asleep. A caller takes it from the list of free workers,
 * writes its region and sets the state to HANDED. The worker changes HANDED to BEGUN, works, and sets IDLE. The caller,
 * done with its own work, changes HANDED back for workers that have not begun, waits for the others, and frees all.
 *
 * No wake-up is lost. A worker sleeps only while its state is ASLEEP, a caller only while it is AWAITED; both the futex
 * and the condition compare the state after the sleeper is known to `wake`. Whoever replaces one of the two by another
 * value calls `wake` afterwards, or has it called: the workers that a caller finds asleep are in the region's list, each
 * participant wakes two of them before it works, so the list becomes empty. Only a caller that ends the region first
 * leaves some there, and it sets their states back to ASLEEP. Those whose wake-up is on its way it sets to IDLE: they spin
 * then, for the next region. A wake-up for nothing is harmless, as states are read again.
 *
 * Regions are on their callers' stacks. A worker reads its region only between its change to BEGUN and its exchange
 * for IDLE, and the caller returns only when each worker has made that exchange or has lost HANDED, without which it
 * never reads the region. What follows the exchange, the wake-up of the caller, is on the worker's own memory, which is
 * never freed.
 */

#define _GNU_SOURCE

#include "pool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "turns.h"

#ifdef __wasm__ /* one thread */

int fastattn_pool_run(fastattn_work work, void *argument, int num_threads) {
    work(argument, 0, num_threads);
    return 1;
}

int fastattn_pool_run_short(fastattn_work work, void *argument, int num_threads) {
    return fastattn_pool_run(work, argument, num_threads);
}

void fastattn_pool_run_all(fastattn_work work, void *argument, int num_threads) {
    if (num_threads > 1)
        abort();
    work(argument, 0, num_threads);
}

int fastattn_pool_size(void) { return 0; }

void fastattn_set_cores(const int32_t *core_of_cpu, int n_cpus) {
    (void)core_of_cpu;
    (void)n_cpus;
}

#else

#ifdef _WIN32
typedef SRWLOCK mutex;
typedef CONDITION_VARIABLE condition;
#define MUTEX_INITIALIZER SRWLOCK_INIT
#define CONDITION_INITIALIZER CONDITION_VARIABLE_INIT
#define lock(mutex) AcquireSRWLockExclusive(mutex)
#define unlock(mutex) ReleaseSRWLockExclusive(mutex)
#define wait_for(condition, mutex) SleepConditionVariableSRW(condition, mutex, INFINITE, 0)
#define notify(condition) WakeAllConditionVariable(condition)
#else
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
typedef pthread_mutex_t mutex;
typedef pthread_cond_t condition;
#define MUTEX_INITIALIZER PTHREAD_MUTEX_INITIALIZER
#define CONDITION_INITIALIZER PTHREAD_COND_INITIALIZER
#define lock(mutex) pthread_mutex_lock(mutex)
#define unlock(mutex) pthread_mutex_unlock(mutex)
#define wait_for(condition, mutex) pthread_cond_wait(condition, mutex)
#define notify(condition) pthread_cond_broadcast(condition)
#endif

#ifdef __linux__
#include <sys/syscall.h>
enum { FUTEX_WAIT_OWN = 128, FUTEX_WAKE_OWN = 129 }; /* ..._PRIVATE of linux/futex.h, which musl comes without */
#endif

#include "placement.h"

/* Tests hold workers here, which are about to fall asleep, or have seen a region but not begun it. */
#ifndef FASTATTN_POOL_HOOK
#define FASTATTN_POOL_HOOK()
#endif

/* A spin is shorter than a sleeping worker takes to begin, some 125 us. tests/kernels/time_pool.c, 2 cores of Zen 3
 * EPYC, virtual, 2026-11-28. */
enum { STACK_NBYTES = 2 << 20, SPIN_NANOSECONDS = 30000, CREATE_ATTEMPTS = 10000 /* 1 ms apart */ };

typedef enum {
    IDLE,    /* no region; awake */
    ASLEEP,  /* no region; asleep, or about to be */
    HANDED,  /* a region that the worker has not begun */
    BEGUN,   /* within a region */
    AWAITED, /* within a region, whose caller sleeps until the worker is done */
} worker_state;

typedef struct region region;

typedef struct worker {
    char padding[64]; /* the state shares its cache line with nothing of others */
    int state;        /* a worker_state */
    int thread;       /* its number in the region */
    region *region;
    struct worker *next;        /* in the list of free workers, or in that of its region */
    struct worker *next_asleep; /* in the region's list of workers to wake */
    int needs_waking;           /* it slept when the region was handed to it, and nobody has woken it yet */
    int number;                 /* its name's */
    mutex lock;                 /* these two: where there is no futex */
    condition changed;
    thread_place place;
} worker;

struct region {
    fastattn_work work;
    void *argument;
    int num_threads, needs_all, is_short;
    int wakes;                /* whether it wakes workers that sleep, and starts new ones */
    int n_taken;              /* workers in its list */
    worker *first, *last;     /* its workers */
    worker *asleep;           /* those that nobody has woken yet */
    int spins;                /* whether those who wait spin first */
    region_places places;
};

static struct {
    mutex lock;
    worker *free;  /* the one that was freed last comes first: it may still spin */
    int n_workers; /* that exist or are being started */
    int n_active;  /* threads in regions */
    int64_t last_short; /* when the last short region ended */
} pool = {.lock = MUTEX_INITIALIZER};

/* ------------------------------------------------------------------ waiting */

static int state_of(const worker *w) { return __atomic_load_n(&w->state, __ATOMIC_ACQUIRE); }

/* Returns whether the state was `from`. */
static int change(worker *w, int from, int to) {
    return __atomic_compare_exchange_n(&w->state, &from, to, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static int replace(worker *w, int to) { return __atomic_exchange_n(&w->state, to, __ATOMIC_ACQ_REL); }

#if defined(__linux__) && defined(SYS_futex)

static void sleep_while(worker *w, int state) {
    while (state_of(w) == state)
        syscall(SYS_futex, &w->state, FUTEX_WAIT_OWN, state, NULL, NULL, 0);
}

/* The caller and the worker never sleep at once. */
static void wake(worker *w) { syscall(SYS_futex, &w->state, FUTEX_WAKE_OWN, 1, NULL, NULL, 0); }

#else

static void sleep_while(worker *w, int state) {
    lock(&w->lock);
    while (state_of(w) == state)
        wait_for(&w->changed, &w->lock);
    unlock(&w->lock);
}

static void wake(worker *w) {
    lock(&w->lock);
    notify(&w->changed);
    unlock(&w->lock);
}

#endif

static int64_t nanoseconds(void) {
#ifdef _WIN32
    LARGE_INTEGER ticks, per_second;
    QueryPerformanceFrequency(&per_second);
    QueryPerformanceCounter(&ticks);
    return (int64_t)((double)ticks.QuadPart * 1e9 / (double)per_second.QuadPart);
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
#endif
}

static void spin_while(const worker *w, int state) {
    const int64_t stop = nanoseconds() + SPIN_NANOSECONDS;
    do {
        for (int n = 0; n < 16; n++) {
            if (state_of(w) != state)
                return;
            FASTATTN_PAUSE();
        }
    } while (nanoseconds() < stop);
}

#ifdef __linux__

/* Waits for a worker. One that does not run meanwhile, as its core is another's, gets the caller's. */
static void await_running(region *r, worker *w) {
    int64_t before;
    spin_while(w, BEGUN);
    if (state_of(w) != BEGUN)
        return;
    before = time_used(&w->place);
    spin_while(w, BEGUN);
    if (state_of(w) == BEGUN && before >= 0 && time_used(&w->place) - before < SPIN_NANOSECONDS / 2)
        lend_core(&r->places, &w->place);
}

#else
#define await_running(r, w) spin_while(w, BEGUN)
#endif

/* ------------------------------------------------------------------ workers */

/* Wakes two sleeping workers of the region, which wake the next: 64 threads are awake after 6 steps, and a slow one does
 * not hold up all others. The calling participant keeps all of the region's workers in it, and none enters the list
 * twice: what the list begins with cannot go and come back between load and exchange. */
static void wake_two(region *r) {
    for (int n = 0; n < 2; n++) {
        worker *w = __atomic_load_n(&r->asleep, __ATOMIC_ACQUIRE);
        while (w != NULL &&
               !__atomic_compare_exchange_n(&r->asleep, &w, w->next_asleep, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            continue;
        if (w == NULL)
            return;
        __atomic_store_n(&w->needs_waking, 0, __ATOMIC_RELAXED);
        place_sleeper(&r->places, &w->place);
        wake(w);
    }
}

static void set_name(int number) {
#if defined(__linux__) || defined(__APPLE__)
    char name[16]; /* the most that Linux takes */
    snprintf(name, sizeof name, "fastattn-%d", number);
#ifdef __linux__
    pthread_setname_np(pthread_self(), name);
#else
    pthread_setname_np(name);
#endif
#elif defined(_WIN32) /* from Windows 10 on */
    HRESULT(WINAPI * set_description)(HANDLE, PCWSTR);
    FARPROC found = GetProcAddress(GetModuleHandleA("kernel32"), "SetThreadDescription");
    WCHAR name[32];
    if (found == NULL)
        return;
    memcpy(&set_description, &found, sizeof found);
    _snwprintf(name, 32, L"fastattn-%d", number);
    set_description(GetCurrentThread(), name);
#else
    (void)number;
#endif
}

static void run_worker(worker *w) {
    int spins = 1;
    introduce(&w->place);
    set_name(w->number);
    for (;;) {
        region *r;
        if (spins)
            spin_while(w, IDLE);
        FASTATTN_POOL_HOOK();
        change(w, IDLE, ASLEEP);
        sleep_while(w, ASLEEP);
        FASTATTN_POOL_HOOK();
        if (!change(w, HANDED, BEGUN))
            continue;
        r = w->region;
        spins = r->spins;
        wake_two(r);
        place_worker(&r->places, &w->place);
        r->work(r->argument, w->thread, r->num_threads);
        remember_place(&w->place);
        if (replace(w, IDLE) == AWAITED)
            wake(w);
    }
}

#ifdef _WIN32

static DWORD WINAPI run_thread(void *w) {
    run_worker(w);
    return 0;
}

static int start_thread(worker *w) {
    HANDLE thread = CreateThread(NULL, STACK_NBYTES, run_thread, w, STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
    return thread != NULL && CloseHandle(thread);
}

static void sleep_a_millisecond(void) { Sleep(1); }

#else

static void *run_thread(void *w) {
    run_worker(w);
    return NULL;
}

/* Signals are for the program's own threads, but those that an instruction causes are for the thread that ran it:
 * blocked, they would end the process without a word of the handler. */
static int start_thread(worker *w) {
    const int caused[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
    sigset_t blocked, before;
    pthread_attr_t attributes;
    pthread_t thread;
    int started;
    if (pthread_attr_init(&attributes) != 0)
        return 0;
    sigfillset(&blocked);
    for (size_t n = 0; n < sizeof caused / sizeof *caused; n++)
        sigdelset(&blocked, caused[n]);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_NBYTES);
    pthread_sigmask(SIG_BLOCK, &blocked, &before);
    started = pthread_create(&thread, &attributes, run_thread, w) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return started;
}

static void sleep_a_millisecond(void) { nanosleep(&(struct timespec){0, 1000000}, NULL); }

static void before_fork(void) { lock(&pool.lock); }

static void in_parent(void) { unlock(&pool.lock); }

/* The parent's workers do not exist here. Their memory stays: the forking thread may be within a region. */
static void in_child(void) {
    pool.free = NULL;
    pool.n_workers = pool.n_active = 0;
    unlock(&pool.lock);
}

/* When the library is loaded: handlers that wait for regions to end (blas.c) are registered later, hence run before the
 * lock is taken. */
__attribute__((constructor)) static void handle_forks(void) { pthread_atfork(before_fork, in_parent, in_child); }

#endif

/* ------------------------------------------------------------------ regions */

/* Adds a worker to the region's list; its number is known already. */
static void add(region *r, worker *w) {
    w->next = NULL;
    if (r->last == NULL)
        r->first = w;
    else
        r->last->next = w;
    r->last = w;
    r->n_taken++;
}

static void hand_over(region *r, worker *w) {
    w->needs_waking = replace(w, HANDED) == ASLEEP;
    if (w->needs_waking) {
        w->next_asleep = __atomic_load_n(&r->asleep, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(&r->asleep, &w->next_asleep, w, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
            continue;
    }
}

/* Starts a worker with the region handed to it; whether it could be created. */
static int start_worker(region *r, int number) {
    worker *w = calloc(1, sizeof *w);
    if (w == NULL)
        return 0;
    *w = (worker){.state = HANDED, .region = r, .thread = r->n_taken + 1, .number = number};
    w->lock = (mutex)MUTEX_INITIALIZER;
    w->changed = (condition)CONDITION_INITIALIZER;
    w->place = new_place(&r->places);
    if (!start_thread(w)) {
        free(w);
        return 0;
    }
    add(r, w);
    return 1;
}

/* Takes free workers and starts those that lack; returns how many still lack. */
static int gather(region *r, int is_first_attempt) {
    const int wanted = r->num_threads - 1, cpus = r->places.n_cpus - 1;
    worker *w, *last = r->last, **at = &pool.free;
    int lacking, room, number, has_sleepers = 0;

    lock(&pool.lock);
    while (r->n_taken < wanted && (w = *at) != NULL) {
        if (!r->wakes && state_of(w) != IDLE) {
            at = &w->next;
            continue;
        }
        *at = w->next;
        has_sleepers |= state_of(w) != IDLE;
        w->region = r;
        w->thread = r->n_taken + 1;
        add(r, w);
        pool.n_active++;
    }
    lacking = r->wakes ? wanted - r->n_taken : 0;
    room = (wanted > cpus ? wanted : cpus) - pool.n_workers;
    if (!r->needs_all && lacking > room)
        lacking = room > 0 ? room : 0;
    number = pool.n_workers;
    pool.n_workers += lacking;
    pool.n_active += lacking + is_first_attempt;
    if (is_first_attempt)
        r->spins = pool.n_active <= r->places.n_cpus;
    unlock(&pool.lock);

    if (has_sleepers)
        decide_placement(&r->places, r->is_short);
    for (w = last == NULL ? r->first : last->next; w != NULL; w = w->next)
        hand_over(r, w);
    wake_two(r);
    while (lacking > 0 && start_worker(r, ++number))
        lacking--;
    if (lacking > 0) {
        lock(&pool.lock);
        pool.n_workers -= lacking;
        pool.n_active -= lacking;
        unlock(&pool.lock);
    }
    return wanted - r->n_taken;
}

/* Ends the region; returns how many threads took part. */
static int finish(region *r) {
    int n_threads = r->n_taken + 1;
    worker *w;
    for (w = r->first; w != NULL; w = w->next)
        if (change(w, HANDED, __atomic_load_n(&w->needs_waking, __ATOMIC_RELAXED) ? ASLEEP : IDLE)) {
            n_threads--;
            if (r->needs_all) { /* as the worker would have done; those after it still have theirs */
                wake_two(r);
                r->work(r->argument, w->thread, r->num_threads);
            }
        }
    for (w = r->first; w != NULL; w = w->next) {
        if (r->spins)
            await_running(r, w);
        change(w, BEGUN, AWAITED);
        sleep_while(w, AWAITED);
    }
    for (w = r->first; w != NULL; w = w->next) /* nobody wakes one any more */
        restore(&r->places, &w->place);
    lock(&pool.lock);
    if (r->last != NULL) {
        r->last->next = pool.free;
        pool.free = r->first;
    }
    pool.n_active -= r->n_taken + 1;
    unlock(&pool.lock);
    return n_threads;
}

static int run(region *r) {
    if (r->num_threads > 1) {
        place_caller(&r->places);
        for (int attempt = 0; gather(r, attempt == 0) > 0 && r->needs_all; attempt++) {
            if (attempt == CREATE_ATTEMPTS) {
                fputs("fastattn: no thread can be created for jobs that wait for each other\n", stderr);
                abort();
            }
            sleep_a_millisecond();
        }
    }
    r->work(r->argument, 0, r->num_threads);
    return r->num_threads > 1 ? finish(r) : 1;
}

int fastattn_pool_run(fastattn_work work, void *argument, int num_threads) {
    region r = {.work = work, .argument = argument, .num_threads = num_threads, .wakes = 1};
    return run(&r);
}

int fastattn_pool_run_short(fastattn_work work, void *argument, int num_threads) {
    const int64_t before = __atomic_load_n(&pool.last_short, __ATOMIC_RELAXED);
    const int follows = nanoseconds() - before < SPIN_NANOSECONDS;
    region r = {.work = work, .argument = argument, .num_threads = num_threads, .is_short = 1, .wakes = follows};
    const int n_threads = run(&r);
    __atomic_store_n(&pool.last_short, nanoseconds(), __ATOMIC_RELAXED);
    return n_threads;
}

void fastattn_pool_run_all(fastattn_work work, void *argument, int num_threads) {
    region r = {.work = work, .argument = argument, .num_threads = num_threads, .needs_all = 1, .wakes = 1};
    run(&r);
}

int fastattn_pool_size(void) {
    int n_workers;
    lock(&pool.lock);
    n_workers = pool.n_workers;
    unlock(&pool.lock);
    return n_workers;
}

#endif
