/* The contract of the kernels of pairs: products of bfloat16, for instruction sets that multiply two pairs of them at a
 * time (VDPBF16PS): twice as many products as in float32.
 *
 * For scores a pair is a word of two adjacent columns, the first in its lower half, as they lie in memory: keys are read
 * in place, and there is a query tile of pairs, tile[pair * ld + lane]. For the products of weights and values, where
 * weights are rounded to bfloat16, it is two keys, the one of even number in the lower half. The products are exact and
 * their sums float32's, which takes those of a pair one after the other, the second one first.
 *
 * The instruction takes denormal numbers, products and sums as 0. That changes no weight where a query is 0 or of usual
 * size: the driver has the scores of other queries computed by the kernels of float32.
 */
#ifndef FASTATTN_PAIRS_H
#define FASTATTN_PAIRS_H

#include <stddef.h>
#include <stdint.h>

/* Columns of values that are paired at once; a pair of rows has a multiple of it, the last ones 0. */
#define FASTATTN_PAIR_COLUMNS 32

/* Query rows of a block of the gradients, as many as `pack` takes: the addresses of their words are known to the compiler. */
#define FASTATTN_PAIR_LANES 64

/* Bytes of the pairs of two rows of values. */
static inline ptrdiff_t fastattn_pairs_nbytes(ptrdiff_t value_dim) {
    return (value_dim + FASTATTN_PAIR_COLUMNS - 1) / FASTATTN_PAIR_COLUMNS * FASTATTN_PAIR_COLUMNS * 4;
}

/* The byte at which they hold a column: of each 8 columns the first four are in one vector, the others in the next, as
 * two rows are interleaved. */
static inline ptrdiff_t fastattn_pair_at(ptrdiff_t column) {
    return column / 32 * 128 + column % 8 / 4 * 64 + column % 32 / 8 * 16 + column % 4 * 4;
}

/* The types of `score` and of `softmax`, of either kind. */
typedef void (*fastattn_score)(void *s, void *tile_max, const void *q, ptrdiff_t ld, int n_vectors, const char *k,
                               const ptrdiff_t *stops, ptrdiff_t head_dim, ptrdiff_t k_row, ptrdiff_t k_col,
                               const char *prefetch, ptrdiff_t prefetch_row, ptrdiff_t prefetch_nbytes);
typedef void (*fastattn_softmax)(void *s, const void *tile_max, void *row_max, void *row_sum, void *rescale, ptrdiff_t ld,
                                 const ptrdiff_t *stops, ptrdiff_t first_chunk, double exponent_factor);

typedef struct {
    /* tile[p][lane] = the p-th pair of rows[lane], each number times a power of two; `rows` has ld <= 64 pointers. Bit
     * `lane` of the result is set where a product is nonfinite, 2^60 or more, or denormal. */
    uint64_t (*pack)(void *tile, ptrdiff_t ld, const char *const *rows, ptrdiff_t n_pairs, float factor);

    /* As `score` of kernels.h, where columns are pairs: `head_dim` is their number. */
    fastattn_score score;

    /* As `softmax` of kernels.h followed by `pair_weights`; first_chunk is even. */
    fastattn_softmax softmax;

    /* Weights as `softmax` of kernels.h leaves them become pairs in place: tile[j / 2 * ld + lane] has those of the keys j
     * and j + 1 of the lane, each rounded to bfloat16 and to nearest even. Denormal weights become 0. */
    void (*pair_weights)(void *tile, ptrdiff_t ld, const ptrdiff_t *stops);

    /* n_keys rows of values, bfloat16 without gaps, as pairs, fastattn_pairs_nbytes for each two of them. */
    void (*pair_values)(char *to, const char *v, ptrdiff_t v_row, ptrdiff_t n_keys, ptrdiff_t value_dim);

    /* As `accumulate` of kernels.h, of pairs of weights and values; stops and first_chunk, which is even, are in keys. acc
     * has a multiple of 8 columns. */
    void (*accumulate)(void *acc, const void *weights, const void *rescale, ptrdiff_t ld, int n_vectors,
                       const char *values, const ptrdiff_t *stops, ptrdiff_t first_chunk, ptrdiff_t value_dim,
                       const char *const *prefetch, ptrdiff_t n_prefetch, ptrdiff_t prefetch_nbytes);

    /* As `accumulate` of kernels.h, with its bits, of values in bfloat16 as they lie in memory, `row` bytes from one to the
     * next and without gaps between columns. Their number is even. */
    void (*accumulate_stored)(void *acc, const void *weights, const void *rescale, ptrdiff_t ld, int n_vectors,
                              const char *values, ptrdiff_t row, const ptrdiff_t *stops, ptrdiff_t first_chunk,
                              ptrdiff_t value_dim, const char *const *prefetch, ptrdiff_t n_prefetch,
                              ptrdiff_t prefetch_nbytes);

    /* to[i] = numbers[i], i < n, rounded to bfloat16 as by `pair_weights`; n is a multiple of `lanes`. */
    void (*round_numbers)(char *to, const void *numbers, ptrdiff_t n);

    /* Products of gradients. acc[i][c] = the sum over pairs p of the products of rows[p * ld + c], a word of the numbers of two
     * rows in column c, and the word at words + p * row + i * col; added to acc[i][c] where `adds` is not 0. i < n_sums, and
     * c < ld, a multiple of `lanes`. */
    void (*accumulate_words)(void *acc, const void *rows, ptrdiff_t ld, const char *words, ptrdiff_t row, ptrdiff_t col,
                             ptrdiff_t n_pairs, ptrdiff_t n_sums, int adds);
} fastattn_pairs;

#endif
