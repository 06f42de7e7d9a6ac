/* SCORE_TILE, the register tile of `score` with at most ROWS keys. Included by score.h only, once for each ROWS: where
 * one function has an array of sums for NARROW_KEYS, gcc 12 makes the usual tile of three vectors 3 % slower. */

#define PREFETCH_DISTANCE (ROWS > PREFETCH_KEYS ? ROWS : PREFETCH_KEYS)

/* STEPS columns, and a prefetch of later rows into L1: they are read column by column, which no hardware prefetcher
 * follows. */
#define SCORE_STEPS()                                                                                          \
    do {                                                                                                       \
        _Pragma("GCC unroll 8") for (int d = 0; d < STEPS; d += LINE)                                          \
            _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                               \
                __builtin_prefetch(k + (PREFETCH_DISTANCE + r) * k_row + d * k_col, 0, 3);                     \
        _Pragma("GCC unroll 16") for (int d = 0; d < STEPS; d++, k += k_col, q += ld) SCORE_STEP(sum);         \
    } while (0)

/* R keys by V vectors of lanes, over n_cols columns, added to s unless is_first. Row r of K starts at k + r * k_row.
 * R of the rows `ahead` are prefetched meanwhile.
 *
 * Each score is a sum of partial sums over CHAIN columns, or SHORT_CHAIN where fewer are left: short chains round less, and
 * most of the error of attention comes from here. HAS_TOTALS: they are added up in registers, else in s. */
INLINE void SCORE_TILE(const int R, const int V, REAL *s, REAL *tile_max, const REAL *q, ptrdiff_t ld,
                       const char *k, ptrdiff_t n_cols, ptrdiff_t k_row, ptrdiff_t k_col, int is_first,
                       prefetched_rows ahead) {
    VEC total[ROWS][SCORE_VECTORS] = {}, sum[ROWS][SCORE_VECTORS];
    for (ptrdiff_t left = n_cols; left > 0;) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sum[r][v] = (VEC){};
        const int adds = !is_first || left < n_cols;
        if (ahead.nbytes > 0) prefetch_line(R, &ahead);
        /* A chain that is unrolled whole has no loop around it, which takes the portable kernels 3 to 4 % (gcc 12, a call of
         * 512 by 512 on 2 cores of Zen 5, 2026-11-29, interleaved A/B). */
        if (STEPS == CHAIN && left >= CHAIN) {
            SCORE_STEPS();
            left -= CHAIN;
        } else {
            ptrdiff_t n = left >= CHAIN ? CHAIN : left < SHORT_CHAIN ? left : SHORT_CHAIN;
            left -= n;
            if (STEPS < CHAIN)
                for (; n >= STEPS; n -= STEPS) SCORE_STEPS();
            for (; n > 0; n--, k += k_col, q += ld) SCORE_STEP(sum);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++)
                if (HAS_TOTALS)
                    total[r][v] += sum[r][v];
                else
                    sum[r][v] = add_score(s + r * ld + v * LANES, sum[r][v], adds);
    }
    while (ahead.nbytes > 0) prefetch_line(R, &ahead);
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
        VEC top = tile_max ? load(tile_max + v * LANES) : (VEC){};
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            REAL *const to = s + r * ld + v * LANES;
            top = max(top, HAS_TOTALS ? add_score(to, total[r][v], !is_first) : sum[r][v]);
        }
        if (tile_max) store(tile_max + v * LANES, top);
    }
}

#undef SCORE_TILE
#undef ROWS
#undef PREFETCH_DISTANCE
#undef SCORE_STEPS
