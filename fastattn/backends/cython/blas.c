/* See blas.h.
 *
 * The jobs of one product busy-wait for each other's packed panels, so all of them must run at once, whatever else the
 * pool does: `fastattn_pool_run_all`.
 *
 * OpenBLAS's description of `thread_num` is incomplete: it is an index into the buffers and states of its own workers,
 * which continue to exist. With the number of the job, as in OpenBLAS's example,
 *   - two concurrent products would share buffers: hence a lock that serialises products (a lock of OpenBLAS's
 *     serialises its level-3 routines anyway);
 *   - a product concurrent with an LU factorisation, which uses the workers directly, would clear their states and
 *     share their buffers: hence job numbers start after those of the workers.
 * (OpenBLAS 0.3.31, driver/others/blas_server.c.)
 */

#include "blas.h"

#if !defined(_WIN32)

#include <pthread.h>
#include <string.h>

#include "pool.h"

static fastattn_blas shared;                                /* set_callback NULL: nothing is shared */
static pthread_mutex_t product = PTHREAD_MUTEX_INITIALIZER; /* held while a product runs */
static pthread_t caller;                                    /* the first thread that ran a product */
static enum { NO_THREAD, ONE_THREAD, SEVERAL_THREADS } callers = NO_THREAD;

typedef struct {
    fastattn_blas_job run;
    int first, argument;
    size_t nbytes;
    char *jobs;
} jobs_of_product;

static void run_job(void *argument, int number, int n_jobs) {
    const jobs_of_product *jobs = argument;
    (void)n_jobs;
    jobs->run(jobs->first + number, jobs->jobs + number * jobs->nbytes, jobs->argument);
}

static void run_product(int sync, fastattn_blas_job run, int n_jobs, size_t nbytes, void *data, int argument) {
    jobs_of_product jobs = {run, 0, argument, nbytes, data};
    (void)sync; /* always true: OpenBLAS goes on when this returns */

    pthread_mutex_lock(&product);
    if (callers == NO_THREAD) {
        callers = ONE_THREAD;
        caller = pthread_self();
    } else if (!pthread_equal(caller, pthread_self())) {
        callers = SEVERAL_THREADS;
    }
    if (shared.set_callback != NULL) {
        jobs.first = shared.num_threads() - 1;
        if (jobs.first + n_jobs > shared.max_threads) {
            /* OpenBLAS's thread count has been raised too far: from the next product on it uses its own threads. */
            jobs.first = shared.max_threads - n_jobs;
            shared.set_callback(NULL);
            shared.set_callback = NULL;
        }
    }
    fastattn_pool_run_all(run_job, &jobs, n_jobs);
    pthread_mutex_unlock(&product);
}

static int threads_before_fork;

/* No fork during a product: the child would inherit a held lock and partly filled buffers.
 *
 * OpenBLAS ends its threads before a fork, and whoever needs them next creates them again, under a lock of its own. A
 * thread that did so between its handler and the fork would leave that lock held in the child, for ever. Products on
 * one thread need no other threads: hence none but these until the fork is over. */
static void before_fork(void) {
    pthread_mutex_lock(&product);
    if (shared.set_callback != NULL) {
        threads_before_fork = shared.num_threads();
        shared.set_num_threads(1);
    }
}

static void in_parent(void) {
    if (shared.set_callback != NULL)
        shared.set_num_threads(threads_before_fork);
    pthread_mutex_unlock(&product);
}

/* The threads exist in the parent only: OpenBLAS creates its own again. If another thread of the parent may have been
 * about to start or end a product, with a lock of OpenBLAS's held, the child's products stay on one thread: they take
 * none of those locks, and neither does this handler. */
static void in_child(void) {
    pthread_mutex_init(&product, NULL);
    if (shared.set_callback != NULL) {
        shared.set_callback(NULL);
        if (callers == NO_THREAD || (callers == ONE_THREAD && pthread_equal(caller, pthread_self())))
            shared.set_num_threads(threads_before_fork);
    }
    shared.set_callback = NULL;
}

int fastattn_blas_is_supported(void) { return 1; }

int fastattn_blas_share(const fastattn_blas *blas) {
    static int handles_forks = 0;
    pthread_mutex_lock(&product);
    if (!handles_forks && pthread_atfork(before_fork, in_parent, in_child) != 0) {
        pthread_mutex_unlock(&product);
        return -1;
    }
    handles_forks = 1;
    if (shared.set_callback != NULL)
        shared.set_callback(NULL);
    memset(&shared, 0, sizeof shared);
    if (blas != NULL) {
        shared = *blas;
        shared.set_callback(run_product);
    }
    pthread_mutex_unlock(&product);
    return 0;
}

int fastattn_blas_is_shared(void) { return shared.set_callback != NULL; }

#else

int fastattn_blas_is_supported(void) { return 0; }

int fastattn_blas_share(const fastattn_blas *blas) { return blas == NULL ? 0 : -1; }

int fastattn_blas_is_shared(void) { return 0; }

#endif
