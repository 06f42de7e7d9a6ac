/* SCORE_TILE, for tiles of at most ROWS keys: one function for all sizes has one array for its sums, and where that has
 * room for NARROW_ROWS gcc 12 makes the usual tile of three vectors 3 % slower. Included by body.h only. */

#define AHEAD (ROWS > PREFETCH_KEYS ? ROWS : PREFETCH_KEYS)

/* One register tile of `score`: R keys by V vectors of lanes, over n_cols columns, added to what s holds unless
 * is_first. Row r of K starts at k + r * k_row.
 *
 * Each sum is formed SCORE_STRETCH columns at a time, or SCORE_REST where fewer are left, and the stretches are added
 * up: short chains round less, and this is where most of the error of attention comes from. */
INLINE void NAME(SCORE_TILE)(const int R, const int V, REAL *s, REAL *tile_max, const REAL *q, ptrdiff_t ld,
                             const char *k, ptrdiff_t n_cols, ptrdiff_t k_row, ptrdiff_t k_col, int is_first) {
    VEC total[ROWS][SCORE_VECTORS] = {};
    for (ptrdiff_t left = n_cols; left > 0;) {
        VEC sum[ROWS][SCORE_VECTORS] = {};
        if (left >= SCORE_STRETCH) {
            /* Rows to come, into L1: lines walked column by column, which no hardware prefetcher follows. */
#pragma GCC unroll 8
            for (int d = 0; d < SCORE_STRETCH; d += LINE)
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) __builtin_prefetch(k + (AHEAD + r) * k_row + d * k_col, 0, 3);
#pragma GCC unroll 16
            for (int d = 0; d < SCORE_STRETCH; d++, k += k_col, q += ld) SCORE_STEP(sum);
            left -= SCORE_STRETCH;
        } else {
            const ptrdiff_t rest = left < SCORE_REST ? left : SCORE_REST;
            for (ptrdiff_t d = 0; d < rest; d++, k += k_col, q += ld) SCORE_STEP(sum);
            left -= rest;
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) total[r][v] += sum[r][v];
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
        VEC top = tile_max ? NAME(load)(tile_max + v * LANES) : (VEC){};
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            REAL *const to = s + r * ld + v * LANES;
            if (!is_first) total[r][v] += NAME(load)(to);
            NAME(store)(to, total[r][v]);
            top = NAME(max)(top, total[r][v]);
        }
        if (tile_max) NAME(store)(tile_max + v * LANES, top);
    }
}

#undef SCORE_TILE
#undef ROWS
#undef AHEAD
