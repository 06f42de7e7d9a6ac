/* The contract of the kernels of pairs: scores of bfloat16 queries and keys, for instruction sets that multiply two pairs
 * of bfloat16 numbers at a time (VDPBF16PS): twice as many products as in float32.
 *
 * A pair is a word of two adjacent columns, the first in its lower half, as they lie in memory: keys are read in place,
 * and there is a query tile of pairs, tile[pair * ld + lane]. The products are exact and their sums float32's, which
 * takes those of a pair one after the other, the second column first.
 *
 * The instruction takes denormal numbers, products and sums as 0. That changes no weight where a query is 0 or of usual
 * size: the driver has the scores of other queries computed by the kernels of float32.
 */
#ifndef FASTATTN_PAIRS_H
#define FASTATTN_PAIRS_H

#include <stddef.h>
#include <stdint.h>

/* The type of `score`, of either kind. */
typedef void (*fastattn_score)(void *s, void *tile_max, const void *q, ptrdiff_t ld, int n_vectors, const char *k,
                               const ptrdiff_t *stops, ptrdiff_t head_dim, ptrdiff_t k_row, ptrdiff_t k_col,
                               const char *prefetch, ptrdiff_t prefetch_row, ptrdiff_t prefetch_nbytes);

typedef struct {
    /* tile[p][lane] = the p-th pair of rows[lane], each number times a power of two; `rows` has ld <= 64 pointers. Bit
     * `lane` of the result is set where a product is nonfinite, 2^60 or more, or denormal. */
    uint64_t (*pack)(void *tile, ptrdiff_t ld, const char *const *rows, ptrdiff_t n_pairs, float factor);

    /* As `score` of kernels.h, where columns are pairs: `head_dim` is their number. */
    fastattn_score score;
} fastattn_pairs;

#endif
