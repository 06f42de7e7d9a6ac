/* `score` of kernels.h. Included once for each kind of products, BROADCAST and ADD_PRODUCT of accumulate_tile.h, by lanes.h
 * and pairs.c, which define its register tiles: TILE_KEYS, and NARROW_KEYS where a block has NARROW_VECTORS or fewer; CHAIN,
 * SHORT_CHAIN and HAS_TOTALS of score_tile.h; STEPS, the columns for which its loop is unrolled; IS_UNIT, whether columns
 * are adjacent. To pairs.c a pair is a column. */

/* sum[r][v] += q[v] * k[r] for one column: V lane vectors, R broadcasts. */
#define SCORE_STEP(sum)                                                                                        \
    do {                                                                                                       \
        VEC x[SCORE_VECTORS];                                                                                  \
        _Pragma("GCC unroll 8") for (int v = 0; v < V; v++) x[v] = load(q + v * LANES);                        \
        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {                                                 \
            const __auto_type y = BROADCAST(k + r * k_row);                                                    \
            _Pragma("GCC unroll 8") for (int v = 0; v < V; v++)(sum)[r][v] = ADD_PRODUCT((sum)[r][v], x[v], y); \
        }                                                                                                      \
    } while (0)

INLINE VEC add_score(REAL *to, VEC x, int adds) {
    if (adds) x += load(to);
    store(to, x);
    return x;
}

#define SCORE_TILE score_tile
#define ROWS TILE_KEYS
#include "score_tile.h"
#define SCORE_TILE score_narrow_tile
#define ROWS NARROW_KEYS
#include "score_tile.h"

/* `score` for the keys j .. stop - 1 and n_cols columns, see `score_tile`. */
static void score_columns(REAL *s, REAL *top, const REAL *q, ptrdiff_t ld, int n_vectors, const char *k,
                          const ptrdiff_t *stops, ptrdiff_t j, ptrdiff_t stop, ptrdiff_t n_cols,
                          ptrdiff_t k_row, ptrdiff_t k_col, int is_first, prefetched_rows ahead) {
    const int is_unit = IS_UNIT(k_col);
    const prefetched_rows none = {.nbytes = 0};
    int first = 0;
    s += j * ld;
    k += j * k_row;
    /* All lanes for a few keys before the next keys, so that those keys stay in L1. */
#define TILE(R, V, k_col, i, ahead)                                                                            \
    score_tile(R, V, s + (i)*LANES, top ? top + (i)*LANES : NULL, q + (i)*LANES, ld, k, n_cols, k_row,         \
                     k_col, is_first, ahead)
#define FULL(V, unit, i)                                                                                       \
    TILE(TILE_KEYS, V, unit ? (ptrdiff_t)sizeof(REAL) : k_col, i, i == first ? prefetched_from(ahead, j) : none)
#define PAIR(V, unit, i) TILE(2, V, k_col, i, none)
#define SINGLE(V, unit, i) TILE(1, V, k_col, i, none)
    for (; j + TILE_KEYS <= stop; j += TILE_KEYS, s += TILE_KEYS * ld, k += TILE_KEYS * k_row) {
        while (stops[first] <= j) first++;
        if (is_unit)
            EACH_GROUP(FULL, SCORE_VECTORS, 1, first);
        else
            EACH_GROUP(FULL, SCORE_VECTORS, 0, first);
    }
    for (; j + 2 <= stop; j += 2, s += 2 * ld, k += 2 * k_row) EACH_GROUP(PAIR, SCORE_VECTORS, 0, first);
    if (j < stop) EACH_GROUP(SINGLE, SCORE_VECTORS, 0, first);
#undef TILE
#undef FULL
#undef PAIR
#undef SINGLE
}

/* `score_columns` for blocks of one or two vectors and the keys that both have, NARROW_KEYS at a time. Returns where it
 * stopped. */
static ptrdiff_t score_narrow(REAL *s, REAL *top, const REAL *q, ptrdiff_t ld, int n_vectors, const char *k,
                              ptrdiff_t j, ptrdiff_t stop, ptrdiff_t n_cols, ptrdiff_t k_row, ptrdiff_t k_col,
                              int is_first, prefetched_rows ahead) {
    const int is_unit = IS_UNIT(k_col);
    s += j * ld;
    k += j * k_row;
    for (; j + NARROW_KEYS <= stop; j += NARROW_KEYS, s += NARROW_KEYS * ld, k += NARROW_KEYS * k_row) {
#define TILE(V, k_col)                                                                                         \
    score_narrow_tile(NARROW_KEYS, V, s, top, q, ld, k, n_cols, k_row, k_col, is_first,                        \
                            prefetched_from(ahead, j))
        if (n_vectors == 1 && is_unit)
            TILE(1, (ptrdiff_t)sizeof(REAL));
        else if (n_vectors == 1)
            TILE(1, k_col);
        else if (NARROW_VECTORS > 1 && is_unit)
            TILE(2, (ptrdiff_t)sizeof(REAL));
        else if (NARROW_VECTORS > 1)
            TILE(2, k_col);
#undef TILE
    }
    return j;
}

static void score(void *s, void *tile_max, const void *q, ptrdiff_t ld, int n_vectors, const char *k,
                  const ptrdiff_t *stops, ptrdiff_t head_dim, ptrdiff_t k_row, ptrdiff_t k_col,
                  const char *prefetch, ptrdiff_t prefetch_row, ptrdiff_t prefetch_nbytes) {
    const ptrdiff_t n_keys = stops[n_vectors - 1];
    for (ptrdiff_t j = 0; j < n_keys; j += SCORE_KEYS) {
        const ptrdiff_t stop = n_keys - j < SCORE_KEYS ? n_keys : j + SCORE_KEYS;
        for (ptrdiff_t start = 0; start < head_dim; start += SCORE_COLUMNS) {
            const int is_last = head_dim - start <= SCORE_COLUMNS;
            const ptrdiff_t n_cols = is_last ? head_dim - start : SCORE_COLUMNS;
            const prefetched_rows ahead = {prefetch, prefetch_row, start == 0 ? prefetch_nbytes : 0};
            const REAL *const columns = (const REAL *)q + start * ld;
            REAL *const top = is_last ? tile_max : NULL;
            ptrdiff_t from = j;
            if (BLOCK_VECTORS == SCORE_VECTORS && n_vectors <= NARROW_VECTORS) {
                from = score_narrow(s, top, columns, ld, n_vectors, k + start * k_col, j,
                                    stops[0] < stop ? stops[0] : stop, n_cols, k_row, k_col, start == 0,
                                    ahead);
                if (n_vectors == 2 && from >= stops[0])
                    from = score_narrow((REAL *)s + LANES, top ? top + LANES : NULL, columns + LANES, ld, 1,
                                        k + start * k_col, from, stop, n_cols, k_row, k_col, start == 0, ahead);
            }
            score_columns(s, top, columns, ld, n_vectors, k + start * k_col, stops, from, stop, n_cols, k_row,
                          k_col, start == 0, ahead);
        }
    }
}
