/* Runs OpenBLAS's products on this library's threads, through the callback that OpenBLAS has since 0.3.28. */
#ifndef FASTATTN_BLAS_H
#define FASTATTN_BLAS_H

#include <stddef.h>

#define FASTATTN_BLAS_MAX_THREADS 1024

/* OpenBLAS's own types, by its header cblas.h. */
typedef void (*fastattn_blas_job)(int thread_num, void *job, int argument);
typedef void (*fastattn_blas_callback)(int sync, fastattn_blas_job run, int n_jobs, size_t job_nbytes, void *jobs,
                                       int argument);

typedef struct {
    void (*set_callback)(fastattn_blas_callback);
    int (*num_threads)(void);
    void (*set_num_threads)(int);
    int max_threads; /* that OpenBLAS was built for, at most FASTATTN_BLAS_MAX_THREADS */
} fastattn_blas;

/* Whether products can be shared here: not on Windows. */
int fastattn_blas_is_supported(void);

/* Runs every later product on this library's threads or, with blas NULL, on OpenBLAS's own again. Returns 0, or -1 if
 * the fork handlers could not be registered. Products that run already are not affected. */
int fastattn_blas_share(const fastattn_blas *blas);

/* Whether products run on this library's threads: not in a forked child, nor once OpenBLAS's thread count has been
 * raised so far that no job numbers are left after those of its workers. */
int fastattn_blas_is_shared(void);

#endif
