/* ACCUMULATE_TILE, the register tile of `accumulate`. Included once for each kind of values, by lanes.h and pairs.c, which
 * define COLUMN, the r-th number or pair of a row for all lanes; ADD_PRODUCT; and how many rows a partial sum has,
 * CHUNK_ROWS, and a tile columns at most, MOST_COLUMNS. */

/* R columns of V by V vectors of lanes. Partial sums run over CHUNK_ROWS rows each, as short chains round less.
 * is_packed: the rows of values are contiguous, and prefetched by the hardware. */
INLINE void ACCUMULATE_TILE(const int R, const int V, const int is_packed, REAL *acc, const REAL *p,
                            const REAL *rescale, ptrdiff_t ld, const char *v_rows, const ptrdiff_t *stops,
                            ptrdiff_t chunk_stop, ptrdiff_t v_row, ptrdiff_t v_col,
                            const char *const *prefetch, ptrdiff_t n_prefetch, ptrdiff_t prefetch_byte) {
    ptrdiff_t j = 0, start = 0;
    do { /* once even without a key: acc may have to be written */
        VEC sum[MOST_COLUMNS][TILE_VECTORS] = {};
        /* The vectors before `first` have no more keys in this chunk. */
#pragma GCC unroll 8
        for (int first = 0; first < V; first++) {
            const ptrdiff_t stop = stops[first] < chunk_stop ? stops[first] : chunk_stop;
            for (; j < stop; j++, v_rows += v_row, p += ld) {
                VEC x[TILE_VECTORS];
                if (R > TILE_ROWS && j < n_prefetch) __builtin_prefetch(prefetch[j] + prefetch_byte + 64, 0, 3);
                if (!is_packed)
                    __builtin_prefetch(j < n_prefetch ? prefetch[j] + prefetch_byte : v_rows + PREFETCH_VALUES * v_row, 0, 3);
                else if (j < n_prefetch)
                    __builtin_prefetch(prefetch[j] + prefetch_byte, 0, 3);
#pragma GCC unroll 8
                for (int v = first; v < V; v++) x[v] = load(p + v * LANES);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    const __auto_type y = COLUMN(v_rows, r, v_col);
#pragma GCC unroll 8
                    for (int v = first; v < V; v++) sum[r][v] = ADD_PRODUCT(sum[r][v], x[v], y);
                }
            }
        }
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const VEC scale = rescale ? load(rescale + v * LANES) : splat(1);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                REAL *const to = acc + r * ld + v * LANES;
                if (start > 0)
                    sum[r][v] += load(to);
                else if (rescale)
                    sum[r][v] += load(to) * scale;
                store(to, sum[r][v]);
            }
        }
        start = chunk_stop;
        chunk_stop += CHUNK_ROWS;
    } while (start < stops[V - 1]);
}

#undef ACCUMULATE_TILE
#undef COLUMN
#undef CHUNK_ROWS
#undef MOST_COLUMNS
