/* Jobs of products as OpenBLAS's: each waits until all of its product run, and none may meet another of its number. */

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "blas.h"
#include "check.h"
#include "pool.h"

enum { MAX_THREADS = 64 };

typedef struct {
    int *arrived, n_jobs, times_run;
} job;

static fastattn_blas_callback callback;
static int blas_threads = 4, busy[MAX_THREADS], wrong, products;

static void set_callback(fastattn_blas_callback wanted) { callback = wanted; }
static int num_threads(void) { return blas_threads; }
static void set_num_threads(int n) { blas_threads = n; }

static void run_job(int number, void *data, int argument) {
    job *mine = data;
    /* Workers of OpenBLAS's own, which go on to exist, have the numbers below. */
    if (argument != 7 || number < blas_threads - 1 || number >= MAX_THREADS ||
        __atomic_fetch_add(&busy[number], 1, __ATOMIC_SEQ_CST) != 0)
        __atomic_store_n(&wrong, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(mine->arrived, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(mine->arrived, __ATOMIC_SEQ_CST) < mine->n_jobs)
        sched_yield();
    mine->times_run++;
    __atomic_fetch_sub(&busy[number], 1, __ATOMIC_SEQ_CST);
}

static void multiply_by(fastattn_blas_callback run, int n_jobs) {
    job jobs[MAX_THREADS];
    int arrived = 0;
    for (int n = 0; n < n_jobs; n++)
        jobs[n] = (job){&arrived, n_jobs, 0};
    run(1, run_job, n_jobs, sizeof(job), jobs, 7);
    for (int n = 0; n < n_jobs; n++)
        if (jobs[n].times_run != 1)
            __atomic_store_n(&wrong, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&products, 1, __ATOMIC_SEQ_CST);
}

static void multiply(int n_jobs) { multiply_by(callback, n_jobs); }

static void *multiply_often(void *unused) {
    const fastattn_blas_callback run = callback;
    for (int n = 0; n < 60; n++)
        multiply_by(run, 1 + n % 6);
    return unused;
}

static void multiply_ten_times(void *unused, int thread, int n_threads) {
    (void)unused, (void)n_threads;
    for (int n = 0; n < 10; n++)
        multiply(1 + (n + thread) % 5);
}

/* What a child forked by this thread finds: bit 0 for a callback that is still set, bit 1 for shared threads, and above
 * the number of threads that products have. */
static int in_a_child(void) {
    int status;
    pid_t child = fork();
    if (child == 0)
        _exit((callback != NULL) | (fastattn_blas_is_shared() << 1) | blas_threads << 2);
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int main(void) {
    const fastattn_blas blas = {set_callback, num_threads, set_num_threads, MAX_THREADS};
    pthread_t threads[8];

    alarm(100); /* a job that never starts is a hang */
    CHECK(!fastattn_blas_is_shared() && callback == NULL);
    CHECK(fastattn_blas_share(NULL) == 0 && callback == NULL);
    CHECK(fastattn_blas_share(&blas) == 0 && fastattn_blas_is_shared() && callback != NULL);
    CHECK(in_a_child() == 4 << 2);
    for (int n_jobs = 1; n_jobs <= 9; n_jobs++)
        multiply(n_jobs);
    CHECK(products == 9 && !wrong);
    CHECK(in_a_child() == 4 << 2); /* nobody else multiplies: all threads of the child's own */

    for (int n = 1; n <= 4; n++)
        fastattn_pool_run_all(multiply_ten_times, NULL, n); /* within a region of attention's */
    CHECK(!wrong);

    for (int n = 0; n < 8; n++)
        CHECK(pthread_create(&threads[n], NULL, multiply_often, NULL) == 0);
    for (int n = 0; n < 20; n++) {
        CHECK(in_a_child() == 1 << 2); /* it might wait for others' locks: one thread */
        CHECK(blas_threads == 4);
        usleep(1000);
    }
    for (int n = 0; n < 8; n++)
        pthread_join(threads[n], NULL);
    CHECK(!wrong);
    CHECK(fastattn_blas_is_shared());

    /* Sharing again and again disturbs no product under way. */
    for (int n = 0; n < 2; n++)
        CHECK(pthread_create(&threads[n], NULL, multiply_often, NULL) == 0);
    for (int n = 0; n < 50; n++) {
        CHECK(fastattn_blas_share(&blas) == 0);
        usleep(200);
    }
    for (int n = 0; n < 2; n++)
        pthread_join(threads[n], NULL);
    CHECK(!wrong);

    /* Too many threads of OpenBLAS's own to leave numbers for the jobs: it gets its products back. */
    blas_threads = MAX_THREADS - 2;
    multiply(3);
    CHECK(!wrong && fastattn_blas_is_shared());
    multiply(4);
    CHECK(callback == NULL && !fastattn_blas_is_shared());

    CHECK(fastattn_blas_share(&blas) == 0 && callback != NULL);
    CHECK(fastattn_blas_share(NULL) == 0 && callback == NULL && !fastattn_blas_is_shared());

    printf("blas: %d checks, %d failed\n", checks, failures);
    return failures > 0;
}
