/* The kernel contract: what the driver may call, one table per ISA and dtype.
 *
 * A kernel knows registers. It sees pointers, sizes and strides, never a mask by name, never a thread.
 * A tile holds one *lane* per query row: tile[x * ld + lane], x a head_dim index, a key or a value_dim
 * index. ld is a multiple of `lanes` and every lane is initialised, so no kernel handles a partial vector of
 * rows: the driver repeats the last row in the lanes past the end and discards their results.
 *
 * Tiles are in the driver's own memory, of REAL (float or double, by table), 64-byte aligned. Rows are in the
 * caller's memory: any byte stride, any alignment, read or written exactly inside their bounds.
 * Each lane's arithmetic is one fixed sequence of operations: it depends on nothing in other lanes.
 *
 * `stops` has one entry per vector of lanes, in non-decreasing order: the v-th vector has the keys j < stops[v]
 * of the tile. Scores past a vector's stop are undefined.
 *
 * exponent_factor times a score is its natural value times log2(e): 1 or a power of two where scores are stored
 * times log2(e), and log2(e) where they are natural. `fastattn._call.schedule.score_factors` chooses it.
 */
#ifndef FASTATTN_KERNELS_H
#define FASTATTN_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "fused.h"
#include "pairs.h"

/* Keys of one partial sum. The first partial sum of a call has `first_chunk` keys, a multiple of 4, so that partial
 * sums cover the same keys wherever a call starts. */
#define FASTATTN_KEY_CHUNK 64

/* Bytes of a row of the score tiles of gradients, which two of their products read in both directions: known to the
 * compiler, or the addresses of a register tile's elements do not fit the registers. */
#define FASTATTN_GRADIENT_ROW 384

/* Tokens that `cross_columns` takes at most. */
#define FASTATTN_CROSSED_TOKENS 64

/* How elements are stored in the caller's memory: as REAL, in 16 bits, or in 8 bits. The numbers of 16 bits are exact as
 * REAL; an int8 stands for its product with the float32 scale of its group of 64 elements, rounded to float32. */
enum { FASTATTN_REAL, FASTATTN_FLOAT16, FASTATTN_BFLOAT16, FASTATTN_INT8, FASTATTN_STORAGES };

/* DO(name, storage): those that are written too, and all others than REAL that are read. */
#define EACH_WRITTEN(DO) DO(float16, FASTATTN_FLOAT16) DO(bfloat16, FASTATTN_BFLOAT16)
#define EACH_STORED(DO) EACH_WRITTEN(DO) DO(int8, FASTATTN_INT8)

/* Bytes of an element; those of REAL are `itemsize`. */
#define STORED_SIZE_OF(storage, itemsize)                                                                      \
    ((storage) == FASTATTN_REAL ? (ptrdiff_t)(itemsize) : (storage) == FASTATTN_INT8 ? (ptrdiff_t)1 : (ptrdiff_t)2)
static inline ptrdiff_t fastattn_stored_size(int64_t storage, ptrdiff_t itemsize) {
    return STORED_SIZE_OF(storage, itemsize);
}

#define FASTATTN_GROUP 64 /* elements of a row that share a scale; a row's scales are contiguous float32 */

/* Rows of keys or values whose elements are contiguous, by the kernels of few rows. */
typedef struct {
    const char *at;
    ptrdiff_t row; /* bytes from one row to the next */
    const char *scale; /* of int8: the scales of the first row */
    ptrdiff_t scale_row;
    /* Bytes from a row, and from its scales, to those that are prefetched meanwhile; `ahead` 0: none are. From the row
     * `near` on, a multiple of 16, they are `far` bytes ahead, as in another page. */
    ptrdiff_t ahead, scale_ahead, near, far, scale_far;
} fastattn_rows;

/* The values of one head from some key on: in the caller's memory, or packed by `pack_values`. */
typedef struct {
    const char *at;
    ptrdiff_t row, col; /* bytes from one key to the next, and from one column to the next in a panel */
    ptrdiff_t panel;    /* bytes from one panel of columns to the next */
} fastattn_values;

/* What `draw_words` draws. */
typedef struct {
    uint64_t key[2];    /* the lower half first */
    uint64_t threshold; /* 1 .. 65535: a weight whose 16 bits are less is dropped */
} fastattn_dropout;

/* What `rope` does with each row. */
typedef struct {
    ptrdiff_t dim, n_pairs; /* elements of a row; the first 2 * n_pairs are rotated, the others are copied */
    int interleaved;        /* pairs (2i, 2i + 1) rather than (i, n_pairs + i) */
    int inverse;            /* by the negative angles */
} fastattn_rotation;

typedef struct {
    const char *isa;
    const char *vectors; /* the instruction set of all kernels here but those of `fused` and `pairs` */
    const fastattn_fused *fused; /* NULL: it has none */
    const fastattn_pairs *pairs; /* likewise */
    int lanes;       /* query rows in one vector */
    int max_vectors; /* vectors in a query block, at most: block_q <= lanes * max_vectors */
    int panel_cols;  /* columns of the values in one panel, the last maybe fewer */

    /* tile[c][lane] = factor * rows[lane][c * stride], c < n_cols; `rows` has ld pointers. */
    void (*pack)(void *tile, ptrdiff_t ld, const char *const *rows, ptrdiff_t stride, ptrdiff_t n_cols,
                 double factor);

    /* S^T = K Q^T: s[j][lane] = sum over d of k[j * k_row + d * k_col] * q[d][lane]. Unless tile_max is
     * NULL, tile_max[lane] = max(tile_max[lane], s[.][lane]), which may include scores past the vector's stop.
     * Prefetches for each key j the first prefetch_nbytes bytes at prefetch + j * prefetch_row. */
    fastattn_score score;

    /* Turns raw scores into scores: s = root * (root * s), in two steps as root * root may overflow or underflow; then
     * s = softcap * tanh(s) when softcap > 0, then + bias, then -inf where the bias is -inf or bit j % 32 of
     * words[j / 32][lane] (or NULL) is 0; tile_max is updated as by `score`. bias_rows (or NULL) has ld
     * pointers, one per lane, to contiguous REAL of any alignment. */
    void (*adjust)(void *s, void *tile_max, ptrdiff_t ld, const ptrdiff_t *stops, double root, double softcap,
                   const char *const *bias_rows, const uint32_t *words);

    /* to[j], or where `adds` is not 0 to[j] + it: a term of the bias at key key0 + j, j < n_keys. Keys are in runs of `run`:
     * it is element (key0 + j) % run of `array`, added to element (key0 + j) / run of `rows`, rows_col bytes apart, unless
     * that is NULL. `to` and `array` are contiguous REAL, all of any alignment. */
    void (*add_bias)(void *to, const char *array, const char *rows, ptrdiff_t rows_col, ptrdiff_t run, ptrdiff_t key0,
                     ptrdiff_t n_keys, int adds);

    /* One step of the online softmax: row_max = max(row_max, tile_max), s becomes exp2(factor * (s - row_max)),
     * row_sum = rescale * row_sum + the sum of the new s, rescale[lane] = exp2(factor * (old - new max)).
     * -inf scores give exactly 0, also while row_max is -inf. */
    fastattn_softmax softmax;

    /* Copies rows of values into panels of panel_cols columns, row by row within a panel: `accumulate` then reads
     * memory sequentially. panels: 64-byte aligned, `panel` bytes each. */
    void (*pack_values)(void *panels, ptrdiff_t panel, const char *v, ptrdiff_t v_row, ptrdiff_t v_col,
                        ptrdiff_t n_keys, ptrdiff_t value_dim);

    /* O^T = rescale * O^T + V^T P^T: acc[e][lane] = rescale[lane] * acc[e][lane] + sum over j of
     * v[j][e] * p[j][lane]. rescale NULL: acc is only written. Prefetches the first
     * prefetch_nbytes bytes at each of the n_prefetch addresses `prefetch`. */
    void (*accumulate)(void *acc, const void *p, const void *rescale, ptrdiff_t ld, int n_vectors,
                       const fastattn_values *v, const ptrdiff_t *stops, ptrdiff_t first_chunk, ptrdiff_t value_dim,
                       const char *const *prefetch, ptrdiff_t n_prefetch, ptrdiff_t prefetch_nbytes);

    /* `accumulate` where v holds NaN or inf that only some lanes may read, which bias_rows and words say as in
     * `adjust`; p must be 0 for the others. Every vector has all keys. clean: scratch for a REAL per key and column. */
    void (*accumulate_nonfinite)(void *acc, const void *p, const void *rescale, ptrdiff_t ld, const fastattn_values *v,
                                const ptrdiff_t *stops, ptrdiff_t first_chunk, ptrdiff_t value_dim,
                                const char *const *bias_rows, const uint32_t *words, void *clean);

    /* s = 0 where bit j % 32 of words[j / 32][lane] is 0: dropout. */
    void (*drop)(void *s, ptrdiff_t ld, const ptrdiff_t *stops, const uint32_t *words);

    /* Merges the partial result (acc_2, row_max_2, row_sum_2) over other keys into (acc, row_max, row_sum), acc[e][lane];
     * a lane that has no keys in it is not changed. ld is at most that of a query block. */
    void (*merge)(void *acc, void *row_max, void *row_sum, const void *acc_2, const void *row_max_2,
                  const void *row_sum_2, ptrdiff_t ld, ptrdiff_t value_dim, double exponent_factor);

    /* inverse[lane] = 1 / (kept_share * row_sum) rounded towards 0, 0 for an empty row, and inverse[ld + lane] the remainder,
     * 0 for an empty row only; lse[lane] = natural log of the sum (or NULL). */
    void (*finish)(void *inverse, void *lse, const void *row_max, const void *row_sum, ptrdiff_t ld,
                   double exponent_factor, double kept_share);

    /* rows[r][c * stride] = tile[c][r] * (factor[r] + factor[ld + r]), r < n_rows, c < n_cols, the two terms of
     * a factor as computed by `finish`; returns 1 if any is nonfinite, else 0. Zeros are written as +0: their sign in the
     * tile may depend on a masked value, whose product with its weight is 0 or -0. The signs of zeros change
     * nothing but signs of zeros in all other operations on accumulators. */
    int (*unpack)(char *const *rows, ptrdiff_t stride, ptrdiff_t n_rows, const void *tile, ptrdiff_t ld,
                  ptrdiff_t n_cols, const void *factor);

    /* Clears bit j % 32 of words[j / 32][lane] where element j of rows[lane] is zero, j < n_cols; an element
     * is any integer of itemsize bytes. */
    void (*mask_words)(uint32_t *words, ptrdiff_t ld, const char *const *rows, ptrdiff_t stride, int itemsize,
                       ptrdiff_t n_cols);

    /* Bit j % 32 of words[j / 32][lane] is whether dropout keeps the weight of key key0 + j, j < n_keys; later bits are of
     * no use. The random numbers are those of numpy.random.Philox: block c of 256 bits is a function of the key and of the
     * counter c + 1, and row r of the weights, counted over items, heads and queries, has the ceil(len_k / 16) blocks from
     * r * ceil(len_k / 16) on, 16 bits a key. rows[lane] < 2^40, len_k <= 2^40; ld is a multiple of `lanes`. */
    void (*draw_words)(uint32_t *words, ptrdiff_t ld, const int64_t *rows, ptrdiff_t len_k, ptrdiff_t key0,
                       ptrdiff_t n_keys, const fastattn_dropout *dropout);

    /* to[c] = element c of a row, at from + c * stride, c < n; of reversed bytes where `swapped`. NaN stays NaN. `to` is
     * of any alignment. Scales of int8 are at scale + (c / 64) * scale_stride. */
    void (*load_row)(void *to, const char *from, ptrdiff_t stride, ptrdiff_t n, int storage, int swapped,
                     const char *scale, ptrdiff_t scale_stride);

    /* Element c of a row, at to + c * stride, = from[c], c < n: rounded once, to the nearest, to even between two, and
     * to inf from half a unit past the largest number on. NaN stays NaN, and is quiet. `from` is of any alignment. */
    void (*store_row)(char *to, ptrdiff_t stride, const void *from, ptrdiff_t n, int storage);

    /* Finite numbers past the largest bfloat16 become that, which they would round past. */
    void (*limit_row)(void *row, ptrdiff_t n);

    /* Row tiles: tile[r * ld + x], one row per query row, x a head_dim index, a key or a value_dim index. For few query
     * rows, too few to fill vectors of lanes; lanes run along x. ld is a multiple of `lanes`, a row is readable and
     * writable up to ld; past its end it is undefined, except that packed rows are padded with zeros. The elements of
     * a key and of a value are contiguous. Each row's arithmetic is one fixed sequence, the same for each storage: it
     * gives the bits that the same numbers give as REAL. */

    /* tile[r][c] = factor * rows[r][c * stride], c < n_cols. */
    void (*pack_rows)(void *tile, ptrdiff_t ld, const char *const *rows, ptrdiff_t n_rows, ptrdiff_t stride,
                      ptrdiff_t n_cols, double factor);

    /* By storage of k, other than REAL for float only: s[r][j] = sum over d of q[r][d] * k[j][d]. */
    void (*score_rows[FASTATTN_STORAGES])(void *s, ptrdiff_t ld, const void *q, ptrdiff_t q_ld, ptrdiff_t n_rows,
                                          const fastattn_rows *k, ptrdiff_t n_keys, ptrdiff_t head_dim);

    /* As `adjust`; the bit of key j is bit j % 32 of words[(j / 32) * n_rows + r]. */
    void (*adjust_rows)(void *s, ptrdiff_t ld, ptrdiff_t n_rows, ptrdiff_t n_keys, double root, double softcap,
                        const char *const *bias_rows, const uint32_t *words);

    /* s becomes exp2(factor * (s - row_max)), row_sum their sum; row_max is found here unless has_max. */
    void (*softmax_rows)(void *s, ptrdiff_t ld, void *row_max, void *row_sum, ptrdiff_t n_rows, ptrdiff_t n_keys,
                         double exponent_factor, int has_max);

    /* By storage of v as `score_rows`: acc[r][e] = sum over j of p[r][j] * v[j][e], added to acc where `adds`. The first
     * key is that of a partial sum. */
    void (*accumulate_rows[FASTATTN_STORAGES])(void *acc, ptrdiff_t ld, const void *p, ptrdiff_t p_ld, ptrdiff_t n_rows,
                                               const fastattn_rows *v, ptrdiff_t n_keys, ptrdiff_t value_dim, int adds);

    /* As `accumulate_nonfinite`, v stored as REAL. */
    void (*accumulate_rows_nonfinite)(void *acc, ptrdiff_t ld, const void *p, ptrdiff_t p_ld, ptrdiff_t n_rows,
                                     const char *v, ptrdiff_t v_row, ptrdiff_t n_keys, ptrdiff_t value_dim,
                                     const char *const *bias_rows, const uint32_t *words, void *clean);

    /* As `merge`, acc[r][e]. */
    void (*merge_rows)(void *acc, void *row_max, void *row_sum, const void *acc_2, const void *row_max_2,
                       const void *row_sum_2, ptrdiff_t n_rows, ptrdiff_t ld, double exponent_factor);

    /* rows[r][c * stride] = tile[r][c] * (factor[r] + factor[factor_ld + r]), as `unpack`. */
    int (*unpack_rows)(char *const *rows, ptrdiff_t stride, ptrdiff_t n_rows, const void *tile, ptrdiff_t ld,
                       ptrdiff_t n_cols, const void *factor, ptrdiff_t factor_ld);

    /* By storage of the rows, 16 bits for float only: row r at to + r * to_row = row r at from + r * from_row with each
     * pair (a, b) turned to (a cos - b sin, b cos + a sin), cos and sin at cosines and sines + r * table_row, n_pairs
     * contiguous REAL each. A row's elements are contiguous. Each operation is rounded, so that all ISAs give the same
     * bits; 16-bit results are rounded once more. Rows may be rotated in place, and may not overlap otherwise. */
    void (*rope[FASTATTN_STORAGES])(char *to, ptrdiff_t to_row, const char *from, ptrdiff_t from_row,
                                    const char *cosines, const char *sines, ptrdiff_t table_row, ptrdiff_t n_rows,
                                    const fastattn_rotation *rotation);

    /* Each of n REAL becomes x + 1 where it is above 0 and exp(x) elsewhere, 0 from the logarithm of the smallest normal
     * number on. NaN stays NaN. */
    void (*elu_plus_one)(void *tile, ptrdiff_t n);

    /* Recurrent forms. Their products are those of `score` and `accumulate`, too. Decays are natural logarithms; where a sum
     * of them is in two arrays, high and low, it is their sum. ld and n_cols are multiples of `lanes`. */

    /* to[i * ld + c] = element c of row i, contiguous REAL of any alignment, c < n_cols, and 0 for the other c < ld, i < n.
     * Returns whether a row but row 0 has NaN or inf. */
    int (*copy_rows)(void *to, ptrdiff_t ld, const char *from, ptrdiff_t row, ptrdiff_t n, ptrdiff_t n_cols);

    /* Element c of row r at to + r * row, contiguous REAL of any alignment, = tile[r * ld + c], r < n, c < n_cols, any number. */
    void (*store_rows)(char *to, ptrdiff_t row, const void *tile, ptrdiff_t ld, ptrdiff_t n, ptrdiff_t n_cols);

    /* The first of n rows of keys whose product with itself, times its beta, is not within 0 - margin and 2 + margin, or n. */
    ptrdiff_t (*count_stable)(const void *keys, const void *beta, ptrdiff_t ld, ptrdiff_t n, double margin);

    /* to[i] = exp(high[i] + low[i]), i < n, a multiple of `lanes`. */
    void (*exponentials)(void *to, const void *high, const void *low, ptrdiff_t n);

    /* Decays of whole tokens: high[t] and low[t] = the sum of decay[1 .. t], starts[t] = exp(decay[0] + that) and ends[t] =
     * exp(the sum of decay[t + 1 .. n - 1]), t < n. starts and ends are writable up to whole vectors. */
    void (*sum_token_decays)(void *high, void *low, void *starts, void *ends, const void *decay, ptrdiff_t n);

    /* high and low of row t = the sum of decay[1 .. t][d], for the rows up to n before which no sum of consecutive decays
     * of a column is beyond `most` in magnitude; returns how many these are, at least 1. */
    ptrdiff_t (*sum_decays)(void *high, void *low, const void *decay, ptrdiff_t ld, ptrdiff_t n, ptrdiff_t dim, double most);

    /* Of such sums, high in `up` and low in `down`, and m, close to the middle between the least and the greatest of a column:
     * up[t][d] = exp(sum - m), down[t][d] = exp(m - sum), before[d] = exp(first[d] + m), and after = the last row of up, powers
     * of two. */
    void (*decay_columns)(void *up, void *down, void *before, void *after, const void *first, ptrdiff_t ld, ptrdiff_t n,
                          ptrdiff_t dim);

    /* The decay from token j to the token of a lane: weights[j][lane] = exp(the sum of token `lane` - that of token j)
     * for j <= lane, and 0 for the other j < the stop of the lane's vector. */
    void (*weigh_tokens)(void *weights, ptrdiff_t ld, const ptrdiff_t *stops, const void *high, const void *low);

    /* Scores of tokens in lanes with earlier ones: s[j][lane] becomes factor[lane] * weights[j][lane] * s[j][lane] for
     * j < lane + seen, and 0 for the other j < the stop of the lane's vector. NULL stands for 1. */
    void (*gate)(void *s, ptrdiff_t ld, const ptrdiff_t *stops, ptrdiff_t seen, const void *factor, const void *weights);

    /* u[t] = factor[t] * u[t] + the sum over j < t of s[j][t] * u[j], and then + rate[t] * v[t], for one t after another,
     * t < n. Returns whether one of u is NaN or inf. */
    int (*substitute)(void *u, const void *factor, const void *v, const void *rate, ptrdiff_t ld, const void *s,
                      ptrdiff_t s_ld, ptrdiff_t n, ptrdiff_t n_cols);

    /* to[t] = factor[t] * from[t], t < n. */
    void (*scale_rows)(void *to, const void *from, const void *factor, ptrdiff_t ld, ptrdiff_t n, ptrdiff_t n_cols);

    /* to[i] = a[i] * b[i], i < n, a multiple of `lanes`. */
    void (*multiply)(void *to, const void *a, const void *b, ptrdiff_t n);

    /* sums[d] = after[d] * (before[d] * sums[d] + part[d]), and rounded[d] the same as REAL, d < dim; NULL stands for 1. */
    void (*advance_sums)(double *sums, void *rounded, const void *part, const void *before, const void *after, ptrdiff_t ld,
                         ptrdiff_t dim, ptrdiff_t n_cols);

    /* One token of a state (dim, n_cols), by rows to_row and from_row bytes apart: row d of `to` = kept[d] * row d of `from` +
     * k[d] * u, where u = v, or with beta, unless NULL, u = beta * (v - the sum over d of k[d] * kept[d] * row d of `from`); and
     * acc[r] = the sum over d of q[r * ld + d] * row d of `to`, r < n_queries. from NULL: zeros; it may be `to`. v and acc are
     * readable and writable up to whole vectors. */
    void (*advance_token)(char *to, const char *from, ptrdiff_t to_row, ptrdiff_t from_row, const void *k, const void *v,
                          const void *kept, const void *beta, const void *q, ptrdiff_t ld, ptrdiff_t n_queries, ptrdiff_t dim,
                          ptrdiff_t n_cols, void *acc, ptrdiff_t acc_ld);

    /* By storage of the rows, 16 bits for float only: row r at to + r * to_row = weight[width] + the sum over j < width of
     * weight[j] * rows[r + j], added up in the order of j, column by column; then x / (1 + exp(-x)) of it where `silu`. Row
     * j of the weights is of REAL, ld elements behind the one before, and readable up to whole vectors. `along`: n_rows is
     * 1, and one weight stands for all columns, the first of its row, of which no other is read. Rows are contiguous, and
     * `to` overlaps none of them. */
    void (*convolve[FASTATTN_STORAGES])(char *to, ptrdiff_t to_row, const char *const *rows, ptrdiff_t n_rows,
                                        ptrdiff_t n_cols, const void *weight, ptrdiff_t ld, ptrdiff_t width, int along,
                                        int silu);

    /* Gradients of recurrent forms, beside these. A tile of scores has the token of its lane for each lane. */

    /* sums[i] += a[i] * b[i], i < n, a multiple of `lanes`; b NULL stands for 1. */
    void (*add_products)(void *sums, const void *a, const void *b, ptrdiff_t n);

    /* s[i] *= weights[i], i < n, a multiple of `lanes`; 0 where the weight is 0, also of NaN and inf. */
    void (*weigh)(void *s, const void *weights, ptrdiff_t n);

    /* u[t] += the sum over j > t of s[t][j] * u[j], for one t before another, t < n. */
    void (*substitute_back)(void *u, ptrdiff_t ld, const void *s, ptrdiff_t s_ld, ptrdiff_t n, ptrdiff_t n_cols);

    /* sums[t] += the sum over the lanes from t on, and the keys j < t, of s[j][lane] * change[j][lane], 0 < t < n. */
    void (*cross_tokens)(double *sums, const void *s, const void *change, ptrdiff_t ld, ptrdiff_t n);

    /* The same of columns: sums[t][d] += the sum over the rows i >= t, and the keys j < t, of change[j][i] * rows[i][d] *
     * keys[j][d], 0 < t < n <= FASTATTN_CROSSED_TOKENS, d < dim, a multiple of `lanes`. */
    void (*cross_columns)(void *sums, const void *rows, const void *keys, ptrdiff_t ld, const void *change,
                          ptrdiff_t change_ld, ptrdiff_t n, ptrdiff_t dim);

    /* sums[t][d] += whole[d] + the sum over i >= t of starts[i][d] + the sum over j < t of ends[j][d], t < n, d < dim, a
     * multiple of `lanes`. */
    void (*add_outside)(void *sums, const void *starts, const void *ends, const void *whole, ptrdiff_t ld, ptrdiff_t n,
                        ptrdiff_t dim);

    /* Gradients. Their products are those of `score` and `accumulate`, with rows of queries in the place of keys. */

    /* The sum over c < n of a[c] * b[c], contiguous REAL, added up in double. */
    double (*dot)(const void *a, const void *b, ptrdiff_t n);

    /* Whether any of n contiguous REAL is NaN or inf. */
    int (*has_nonfinite)(const void *a, ptrdiff_t n);

    /* The scores s become weights, exp2(factor * ((s - high[lane]) - low[lane])), and `change`, which holds the gradient
     * of each weight, becomes that of its score: weight * (change - delta[lane]). Both are exactly 0 where s is -inf. A
     * weight may be of any size, inf included. change may be NULL: weights alone. is_large: not every |high| is known to be below 2^10 / factor.
     * With words, unless NULL, it is the gradient of each weight after dropout, which divides it by kept_share or drops
     * it as `drop` does; s becomes those weights. */
    void (*differentiate)(void *s, void *change, const void *high, const void *low, const void *delta, ptrdiff_t ld,
                          ptrdiff_t n_keys, double exponent_factor, int is_large, const uint32_t *words,
                          double kept_share);

    /* The largest of the sums of the squares of each row, in REAL and in any order; rows of NaN count as 0. ld is a
     * multiple of `lanes`. */
    double (*largest_square)(const void *rows, ptrdiff_t n_rows, ptrdiff_t ld);

    /* tile_max[lane] = max(tile_max[lane], s[j][lane]), and largest[lane] = max(largest[lane], sizes[j]) over the keys j
     * whose score is not -inf. */
    void (*find_largest)(void *tile_max, void *largest, const void *s, const void *sizes, ptrdiff_t ld,
                         ptrdiff_t n_keys);

    /* rows[r][j * stride] += tile[j][r], r < n_rows, j < n_keys; one row after another, which may be the same. */
    void (*add_columns)(char *const *rows, ptrdiff_t stride, ptrdiff_t n_rows, const void *tile, ptrdiff_t ld,
                        ptrdiff_t n_keys);

    /* change *= 1 - (capped / softcap)^2, the slope of the soft-cap; 0 stays 0. */
    void (*uncap)(void *change, const void *capped, ptrdiff_t ld, ptrdiff_t n_keys, double softcap);

    /* Reductions over keys, in the place of the softmax. NaN counts as the largest number. */

    /* Takes scores into the k largest of each row so far: values[r], k contiguous REAL in falling order, of equal ones the
     * earliest key first, and index[r], their keys, of which s[j] has key0 + j. -inf is never taken. At first values are
     * -inf; the keys come in rising order. r < n_rows, whose vectors `stops` has. */
    void (*topk_keys)(char *const *values, int64_t *const *index, ptrdiff_t k, ptrdiff_t n_rows, const void *s, ptrdiff_t ld,
                      const ptrdiff_t *stops, ptrdiff_t key0);

    /* Takes the k scores and keys of a row of `topk_keys` into those of another row, whose keys are all lower. */
    void (*merge_topk)(void *values, int64_t *index, ptrdiff_t k, const void *others, const int64_t *others_index);

    /* top[lane] = max(top[lane], s[j][lane]), j < n_keys; once NaN it stays NaN. */
    void (*max_keys)(void *top, const void *s, ptrdiff_t ld, ptrdiff_t n_keys);
} fastattn_kernels;

/* The table for an ISA by name ("avx512", "avx2", "neon", "portable") and element size (4 or 8), or NULL
 * when it was not built or this CPU cannot run it. */
const fastattn_kernels *fastattn_find_kernels(const char *isa, int itemsize);

#endif
