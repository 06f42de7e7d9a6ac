/* Times of a region of two threads, beside those of OpenMP: from the call to the second thread's first instruction, and
 * of a whole empty region; right after another region, and after a pause in which workers fall asleep.
 *
 *   gcc -std=gnu11 -O2 -fopenmp -I fastattn/backends/cython tests/kernels/time_pool.c fastattn/backends/cython/pool.c \
 *       -o time_pool && ./time_pool
 *
 * Microseconds, median and quartiles. In turns of some regions each, as machines are noisy, with a pause between them in
 * which the other's threads stop to spin.
 */

#define _GNU_SOURCE
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "pool.h"

enum { REPEATS = 400, REPEATS_OF_TURN = 20, PAUSE = 20000000 /* ns; libgomp's threads spin for 5 ms */ };

static int64_t second; /* when the second thread began, 0 before */

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void do_nothing(void *argument, int thread, int num_threads) {
    (void)argument;
    (void)thread;
    (void)num_threads;
}

/* The first thread waits for the second. */
static void note_second(void *argument, int thread, int num_threads) {
    (void)argument;
    (void)num_threads;
    if (thread == 1)
        __atomic_store_n(&second, now(), __ATOMIC_RELEASE);
    else
        while (__atomic_load_n(&second, __ATOMIC_ACQUIRE) == 0)
            continue;
}

static void run_openmp(fastattn_work work, void *argument, int num_threads) {
#pragma omp parallel num_threads(num_threads)
    work(argument, omp_get_thread_num(), num_threads);
}

static void run_pool(fastattn_work work, void *argument, int num_threads) {
    fastattn_pool_run(work, argument, num_threads);
}

static int compare(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) * 2 - 1; }

static void print(const char *what, double *microseconds) {
    qsort(microseconds, REPEATS, sizeof *microseconds, compare);
    printf("%-44s %7.2f  (%.2f to %.2f)\n", what, microseconds[REPEATS / 2], microseconds[REPEATS / 4],
           microseconds[REPEATS * 3 / 4]);
}

int main(void) {
    static void (*const runs[])(fastattn_work, void *, int) = {run_pool, run_openmp, fastattn_pool_run_all};
    static const char *const names[] = {"pool", "OpenMP", "pool, all"};
    static double began[2][3][REPEATS], whole[2][3][REPEATS];
    static const int32_t cores[64] = {0, 1, 2, 3, 4, 5, 6, 7}; /* as on a machine of single CPUs; no more than 8 are told */
    char what[80];
    fastattn_set_cores(cores, 8);
    for (int first = 0; first < REPEATS; first += REPEATS_OF_TURN)
        for (int asleep = 0; asleep < 2; asleep++)
            for (int which = 0; which < 3; which++) {
                nanosleep(&(struct timespec){0, PAUSE}, NULL);
                for (int n = first; n < first + REPEATS_OF_TURN; n++)
                    for (int empty = 0; empty < 2; empty++) {
                        int64_t start;
                        second = 0;
                        runs[which](note_second, NULL, 2); /* both are awake */
                        if (asleep)
                            nanosleep(&(struct timespec){0, PAUSE}, NULL);
                        second = 0;
                        start = now();
                        runs[which](empty ? do_nothing : note_second, NULL, 2);
                        if (empty)
                            whole[asleep][which][n] = (double)(now() - start) / 1e3;
                        else
                            began[asleep][which][n] = (double)(second - start) / 1e3;
                    }
            }
    for (int asleep = 0; asleep < 2; asleep++)
        for (int which = 0; which < 3; which++) {
            snprintf(what, sizeof what, "%s, %s: second thread", asleep ? "asleep" : "spinning", names[which]);
            print(what, began[asleep][which]);
            snprintf(what, sizeof what, "%s, %s: empty region", asleep ? "asleep" : "spinning", names[which]);
            print(what, whole[asleep][which]);
        }
    return 0;
}
