/* The kernel contract: what the driver may call, one table per ISA and dtype.
 *
 * A kernel knows registers. It sees pointers, sizes and strides, never a mask by name, never a thread.
 * A tile holds one *lane* per query row: tile[x * ld + lane], x a head_dim index, a key or a value_dim
 * index. ld is a multiple of `lanes`; every lane always holds something readable, so no kernel handles
 * a ragged row count: the driver repeats the last row in the lanes past the end and throws them away.
 *
 * MaskMap are the driver's own memory, of REAL (float or double, by table), 64-byte aligned. Rows are the
 * caller's memory: any byte stride, any alignment, read or written exactly inside their bounds.
 * Each lane's arithmetic is one fixed sequence of operations: it depends on nothing in other lanes.
 *
 * `stops` has an entry for each vector of lanes: the v-th has the keys j < stops[v] of the tile. It never falls
 * from one to the next. What a tile of scores holds past a vector's stop is nobody's to read.
 *
 * exponent_factor times a score is its natural value times log2(e): 1 or a power of two where scores are held times
 * log2(e), and log2(e) where they are natural. `fastattn._schedule.score_factors` chooses it.
 */
#ifndef FASTATTN_KERNELS_H
#define FASTATTN_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Sums over keys are formed this many keys at a time; the first `first_chunk` of a call make the first sum, a
 * multiple of 4, so that sums are cut at the same keys wherever a call starts. */
#define FASTATTN_KEY_CHUNK 64

/* The values of one head from some key on: in the caller's memory, or as `pack_values` leaves them. */
typedef struct {
    const char *at;
    ptrdiff_t row, col; /* bytes from one key to the next, and from one column to the next in a panel */
    ptrdiff_t panel;    /* bytes from one panel of columns to the next */
} fastattn_values;

typedef struct {
    const char *isa;
    int lanes;       /* query rows in one vector */
    int max_vectors; /* vectors in one tile, at most: block_q <= lanes * max_vectors */
    int panel_cols;  /* columns of the values in one panel, the last maybe fewer */

    /* tile[c][lane] = factor * rows[lane][c * stride], c < n_cols; `rows` has ld pointers. */
    void (*pack)(void *tile, ptrdiff_t ld, const char *const *rows, ptrdiff_t stride, ptrdiff_t n_cols,
                 double factor);

    /* S^T = K Q^T: s[j][lane] = sum over d of k[j * k_row + d * k_col] * q[d][lane]; tile_max (or NULL) takes them
     * in: tile_max[lane] = max(tile_max[lane], s[.][lane]), maybe with scores past the vector's stop.
     * Along the way it asks memory for the first prefetch_nbytes bytes of one row for each key, which nothing reads yet:
     * of key j at prefetch + j * prefetch_row. */
    void (*score)(void *s, void *tile_max, const void *q, ptrdiff_t ld, int n_vectors, const char *k,
                  const ptrdiff_t *stops, ptrdiff_t head_dim, ptrdiff_t k_row, ptrdiff_t k_col,
                  const char *prefetch, ptrdiff_t prefetch_row, ptrdiff_t prefetch_nbytes);

    /* Turns raw scores into scores: s = root * (root * s), in two steps as root * root may not be a number; then
     * s = softcap * tanh(s) when softcap > 0, then + bias, then -inf where the bias is -inf or bit j % 32 of
     * words[j / 32][lane] (or NULL) is 0; tile_max takes them in. bias_rows (or NULL) has ld pointers to rows of
     * REAL, of any alignment, without gaps, one for each lane. */
    void (*adjust)(void *s, void *tile_max, ptrdiff_t ld, const ptrdiff_t *stops, double root, double softcap,
                   const char *const *bias_rows, const uint32_t *words);

    /* One step of the online softmax: row_max takes in tile_max, s becomes exp2(factor * (s - row_max)),
     * row_sum = rescale * row_sum + the sum of the new s, rescale[lane] = exp2(factor * (old - new max)).
     * -inf scores give exactly 0, also while row_max is -inf. */
    void (*softmax)(void *s, const void *tile_max, void *row_max, void *row_sum, void *rescale, ptrdiff_t ld,
                    const ptrdiff_t *stops, ptrdiff_t first_chunk, double exponent_factor);

    /* Copies rows of values into panels, each with all its columns of a key, then of the next: `accumulate` reads
     * them so in the order of memory. panels: 64-byte aligned, `panel` bytes each. */
    void (*pack_values)(void *panels, ptrdiff_t panel, const char *v, ptrdiff_t v_row, ptrdiff_t v_col,
                        ptrdiff_t n_keys, ptrdiff_t value_dim);

    /* O^T = rescale * O^T + V^T P^T: acc[e][lane] = rescale[lane] * acc[e][lane] + sum over j of
     * v[j][e] * p[j][lane]. rescale NULL: acc is only written. Along the way it asks memory for
     * the first prefetch_nbytes bytes at each of the n_prefetch addresses `prefetch`, which nothing reads yet. */
    void (*accumulate)(void *acc, const void *p, const void *rescale, ptrdiff_t ld, int n_vectors,
                       const fastattn_values *v, const ptrdiff_t *stops, ptrdiff_t first_chunk, ptrdiff_t value_dim,
                       const char *const *prefetch, ptrdiff_t n_prefetch, ptrdiff_t prefetch_nbytes);

    /* What `accumulate` does where v holds NaN or inf that only some lanes may read: p must be 0 on the
     * others, allowed as in `adjust`; every vector has all keys. `clean` is room for a REAL for each key and value_dim. */
    void (*accumulate_nonfinite)(void *acc, const void *p, const void *rescale, ptrdiff_t ld, const fastattn_values *v,
                                const ptrdiff_t *stops, ptrdiff_t first_chunk, ptrdiff_t value_dim,
                                const char *const *bias_rows, const uint32_t *words, void *clean);

    /* inverse[lane] = 1 / row_sum rounded towards 0, 0 for an empty row, and inverse[ld + lane] what that left,
     * never 0 but for an empty row; lse[lane] = natural log of the sum (or NULL). */
    void (*finish)(void *inverse, void *lse, const void *row_max, const void *row_sum, ptrdiff_t ld,
                   double exponent_factor);

    /* rows[r][c * stride] = tile[c][r] * (factor[r] + factor[ld + r]), r < n_rows, c < n_cols, the two parts of
     * a factor as `finish` makes them; returns 1 if any is NaN, else 0. A zero in the tile comes out as +0: which
     * sign it has may depend on a masked value, whose product with its weight is 0 or -0. All other operations on
     * accumulators give the same numbers, up to the signs of zeros, whatever the signs of zeros are. */
    int (*unpack)(char *const *rows, ptrdiff_t stride, ptrdiff_t n_rows, const void *tile, ptrdiff_t ld,
                  ptrdiff_t n_cols, const void *factor);

    /* Clears bit j % 32 of words[j / 32][lane] where element j of rows[lane] is zero, j < n_cols; an element
     * is any integer of itemsize bytes. */
    void (*mask_words)(uint32_t *words, ptrdiff_t ld, const char *const *rows, ptrdiff_t stride, int itemsize,
                       ptrdiff_t n_cols);

    /* Row tiles: tile[r * ld + x], one row per query row, x a head_dim index, a key or a value_dim index. For few query
     * rows, where lanes of queries would stay empty; lanes run along x. ld is a multiple of `lanes`, a row is readable
     * and writable up to it, and what it holds past its end is nobody's to use, except that packed rows end in zeros.
     * Keys and values lie without gaps between their elements. Each row's arithmetic is one fixed sequence. */

    /* tile[r][c] = factor * rows[r][c * stride], c < n_cols. */
    void (*pack_rows)(void *tile, ptrdiff_t ld, const char *const *rows, ptrdiff_t n_rows, ptrdiff_t stride,
                      ptrdiff_t n_cols, double factor);

    /* s[r][j] = sum over d of q[r][d] * k[j * k_row][d]. Unless `distance` is 0, memory is asked for the row so many bytes
     * behind each key's along the way. */
    void (*score_rows)(void *s, ptrdiff_t ld, const void *q, ptrdiff_t q_ld, ptrdiff_t n_rows, const char *k,
                       ptrdiff_t k_row, ptrdiff_t n_keys, ptrdiff_t head_dim, ptrdiff_t distance);

    /* As `adjust`; the bit of key j is bit j % 32 of words[(j / 32) * n_rows + r]. */
    void (*adjust_rows)(void *s, ptrdiff_t ld, ptrdiff_t n_rows, ptrdiff_t n_keys, double root, double softcap,
                        const char *const *bias_rows, const uint32_t *words);

    /* s becomes exp2(factor * (s - row_max)), row_sum their sum; row_max is found here unless has_max. */
    void (*softmax_rows)(void *s, ptrdiff_t ld, void *row_max, void *row_sum, ptrdiff_t n_rows, ptrdiff_t n_keys,
                         double exponent_factor, int has_max);

    /* acc[r][e] = sum over j of p[r][j] * v[j * v_row][e]; `distance` as in `score_rows`. */
    void (*accumulate_rows)(void *acc, ptrdiff_t ld, const void *p, ptrdiff_t p_ld, ptrdiff_t n_rows, const char *v,
                            ptrdiff_t v_row, ptrdiff_t n_keys, ptrdiff_t value_dim, ptrdiff_t distance);

    /* As `accumulate_nonfinite`. */
    void (*accumulate_rows_nonfinite)(void *acc, ptrdiff_t ld, const void *p, ptrdiff_t p_ld, ptrdiff_t n_rows,
                                     const char *v, ptrdiff_t v_row, ptrdiff_t n_keys, ptrdiff_t value_dim,
                                     const char *const *bias_rows, const uint32_t *words, void *clean);

    /* acc, row_max and row_sum over some keys take in those over other keys; where a row has none of them this changes
     * nothing. */
    void (*merge_rows)(void *acc, void *row_max, void *row_sum, const void *acc_2, const void *row_max_2,
                       const void *row_sum_2, ptrdiff_t n_rows, ptrdiff_t ld, double exponent_factor);

    /* rows[r][c * stride] = tile[r][c] * (factor[r] + factor[factor_ld + r]), as `unpack`. */
    int (*unpack_rows)(char *const *rows, ptrdiff_t stride, ptrdiff_t n_rows, const void *tile, ptrdiff_t ld,
                       ptrdiff_t n_cols, const void *factor, ptrdiff_t factor_ld);
} fastattn_kernels;

/* The table for an ISA by name ("avx512", "avx2", "neon", "portable") and element size (4 or 8), or NULL
 * when it was not built or this CPU cannot run it. */
const fastattn_kernels *fastattn_find_kernels(const char *isa, int itemsize);

#endif
