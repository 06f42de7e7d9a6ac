/* OpenBLAS's products on this library's threads, through the callback that it offers since 0.3.28. */
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
    int max_threads; /* that it was built for, at most FASTATTN_BLAS_MAX_THREADS of them */
} fastattn_blas;

/* Whether this library was built with threads that can run another's jobs. */
int fastattn_blas_is_supported(void);

/* Has the jobs of every product run here from now on, or (blas NULL) on OpenBLAS's own threads again. Returns 0, or -1
 * where not even the handlers for forks could be registered. Products under way are not disturbed by either. */
int fastattn_blas_share(const fastattn_blas *blas);

/* Whether products run here: not in a forked child, nor after OpenBLAS got more threads than leave room. */
int fastattn_blas_is_shared(void);

#endif
