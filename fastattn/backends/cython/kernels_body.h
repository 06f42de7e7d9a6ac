/* The kernels of one dtype; see kernels.h for what each promises. Included by kernels.c only. */

#include "vec.h"

static void NAME(pack)(void *tile, ptrdiff_t ld, const char *const *rows, ptrdiff_t stride, ptrdiff_t n_cols,
                       double factor) {
    REAL *const dst = tile;
    const ptrdiff_t blocked = stride == sizeof(REAL) ? n_cols : 0;
    /* The factor in two parts, so that x * factor is rounded about once however factor itself rounds. */
    const REAL high = (REAL)factor, low = isfinite(high) ? (REAL)(factor - high) : 0;
    for (ptrdiff_t lane = 0; lane < ld; lane += LANES) {
        for (ptrdiff_t c = 0; c < blocked; c += LANES) {
            const int n = blocked - c < LANES ? (int)(blocked - c) : LANES;
            VEC x[LANES];
            if (n == LANES) {
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) x[i] = NAME(load)(rows[lane + i] + c * sizeof(REAL));
            } else {
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) x[i] = NAME(load_partial)(rows[lane + i] + c * sizeof(REAL), n);
            }
            NAME(transpose)(x);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                if (i < n) NAME(store)(dst + (c + i) * ld + lane, x[i] * high + x[i] * low);
        }
        for (ptrdiff_t c = blocked; c < n_cols; c++)
            for (int i = 0; i < LANES; i++) {
                const REAL x = NAME(scalar)(rows[lane + i] + c * stride);
                dst[c * ld + lane + i] = x * high + x * low;
            }
    }
}

static int NAME(unpack)(char *const *rows, ptrdiff_t stride, ptrdiff_t n_rows, const void *tile, ptrdiff_t ld,
                        ptrdiff_t n_cols, const void *factor) {
    const REAL *const src = tile, *const scale = factor;
    const ptrdiff_t blocked = stride == sizeof(REAL) ? n_cols : 0;
    IVEC nan = {};
    for (ptrdiff_t lane = 0; lane < n_rows; lane += LANES) {
        const int n_live = n_rows - lane < LANES ? (int)(n_rows - lane) : LANES;
        const VEC lane_scale = NAME(load)(scale + lane);
        for (ptrdiff_t c = 0; c < blocked; c += LANES) {
            const int n = blocked - c < LANES ? (int)(blocked - c) : LANES;
            VEC x[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                x[i] = i < n ? NAME(load)(src + (c + i) * ld + lane) * lane_scale : (VEC){};
            NAME(transpose)(x);
            const size_t at = (size_t)c * sizeof(REAL);
            if (n == LANES && n_live == LANES) {
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) {
                    nan |= (IVEC)(x[i] != x[i]);
                    NAME(store)(rows[lane + i] + at, x[i]);
                }
            } else {
                for (int i = 0; i < n_live; i++) {
                    nan |= (IVEC)(x[i] != x[i]);
                    NAME(store_partial)(rows[lane + i] + at, x[i], n);
                }
            }
        }
        for (ptrdiff_t c = blocked; c < n_cols; c++)
            for (int i = 0; i < n_live; i++) {
                const REAL x = src[c * ld + lane + i] * scale[lane + i];
                nan[0] |= x != x;
                memcpy(rows[lane + i] + c * stride, &x, sizeof x);
            }
    }
    LANE_INT any = 0;
    for (int i = 0; i < LANES; i++) any |= nan[i];
    return any != 0;
}

/* One register tile of `score`: R keys by V vectors of lanes. Row r of K starts at k + r * k_row. */
INLINE void NAME(score_tile)(const int R, const int V, REAL *s, REAL *tile_max, const REAL *q, ptrdiff_t ld,
                             const char *k, ptrdiff_t head_dim, ptrdiff_t k_row, ptrdiff_t k_col) {
    VEC sum[TILE_ROWS][TILE_VECTORS] = {};
    /* The next rows, into L2: their lines are walked column by column, which no hardware prefetcher follows.
     * One line for every two columns is as many as there are. */
    const char *const next = k + R * k_row;
    for (ptrdiff_t d = 0; d < head_dim; d++, k += k_col, q += ld) {
        VEC x[TILE_VECTORS];
        if (d % 2 == 0) __builtin_prefetch(next + d / 2 % R * k_row + d / 2 / R * 64, 0, 2);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) x[v] = NAME(load)(q + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const REAL y = NAME(scalar)(k + r * k_row);
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sum[r][v] += x[v] * y;
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
        VEC top = NAME(load)(tile_max + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            NAME(store)(s + r * ld + v * LANES, sum[r][v]);
            top = NAME(max)(top, sum[r][v]);
        }
        NAME(store)(tile_max + v * LANES, top);
    }
}

/* One register tile of `accumulate`: R columns of V by V vectors of lanes. */
INLINE void NAME(accumulate_tile)(const int R, const int V, REAL *acc, const REAL *p, const REAL *rescale,
                                  ptrdiff_t ld, const char *v_rows, ptrdiff_t n_keys, ptrdiff_t v_row,
                                  ptrdiff_t v_col) {
    VEC sum[TILE_ROWS][TILE_VECTORS] = {};
    for (ptrdiff_t j = 0; j < n_keys; j++, v_rows += v_row, p += ld) {
        VEC x[TILE_VECTORS];
        __builtin_prefetch(v_rows + PREFETCH_ROWS * v_row);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) x[v] = NAME(load)(p + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const REAL y = NAME(scalar)(v_rows + r * v_col);
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sum[r][v] += x[v] * y;
        }
    }
    /* The tile's sum is formed from zero and added once: fewer roundings than one long chain. */
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
        const VEC scale = rescale ? NAME(load)(rescale + v * LANES) : (VEC){};
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            REAL *const to = acc + r * ld + v * LANES;
            NAME(store)(to, rescale ? NAME(load)(to) * scale + sum[r][v] : sum[r][v]);
        }
    }
}

#define SCORE(R, V)                                                                                            \
    NAME(score_tile)(R, V, s, tile_max, q, ld, k, head_dim, k_row, unit ? (ptrdiff_t)sizeof(REAL) : k_col)
#define ACCUMULATE(R, V)                                                                                       \
    NAME(accumulate_tile)(R, V, acc, p, rescale, ld, v, n_keys, v_row, unit ? (ptrdiff_t)sizeof(REAL) : v_col)

/* The last rows, fewer than a full tile: one case each, so that each is unrolled. */
#if TILE_ROWS == 8
#define REMAINDER(KERNEL, n, V)                                                                                \
    switch (n) {                                                                                               \
        case 7: KERNEL(7, V); break;                                                                           \
        case 6: KERNEL(6, V); break;                                                                           \
        case 5: KERNEL(5, V); break;                                                                           \
        case 4: KERNEL(4, V); break;                                                                           \
        case 3: KERNEL(3, V); break;                                                                           \
        case 2: KERNEL(2, V); break;                                                                           \
        case 1: KERNEL(1, V); break;                                                                           \
        default: break;                                                                                        \
    }
#elif TILE_ROWS == 4
#define REMAINDER(KERNEL, n, V)                                                                                \
    switch (n) {                                                                                               \
        case 3: KERNEL(3, V); break;                                                                           \
        case 2: KERNEL(2, V); break;                                                                           \
        case 1: KERNEL(1, V); break;                                                                           \
        default: break;                                                                                        \
    }
#endif

INLINE void NAME(score_rows)(const int V, const int unit, REAL *s, REAL *tile_max, const REAL *q, ptrdiff_t ld,
                             const char *k, ptrdiff_t n_keys, ptrdiff_t head_dim, ptrdiff_t k_row,
                             ptrdiff_t k_col) {
    for (; n_keys >= TILE_ROWS; n_keys -= TILE_ROWS, s += TILE_ROWS * ld, k += TILE_ROWS * k_row)
        SCORE(TILE_ROWS, V);
    REMAINDER(SCORE, n_keys, V)
}

INLINE void NAME(accumulate_rows)(const int V, const int unit, REAL *acc, const REAL *p, const REAL *rescale,
                                  ptrdiff_t ld, const char *v, ptrdiff_t n_keys, ptrdiff_t value_dim,
                                  ptrdiff_t v_row, ptrdiff_t v_col) {
    for (; value_dim >= TILE_ROWS; value_dim -= TILE_ROWS, acc += TILE_ROWS * ld, v += TILE_ROWS * v_col)
        ACCUMULATE(TILE_ROWS, V);
    REMAINDER(ACCUMULATE, value_dim, V)
}

#if TILE_VECTORS == 3
#define EACH_WIDTH(BODY, unit)                                                                                 \
    switch (n_vectors) {                                                                                       \
        case 3: BODY(3, unit); break;                                                                          \
        case 2: BODY(2, unit); break;                                                                          \
        default: BODY(1, unit); break;                                                                         \
    }
#else
#define EACH_WIDTH(BODY, unit)                                                                                 \
    switch (n_vectors) {                                                                                       \
        case 2: BODY(2, unit); break;                                                                          \
        default: BODY(1, unit); break;                                                                         \
    }
#endif

static void NAME(score)(void *s, void *tile_max, const void *q, ptrdiff_t ld, int n_vectors, const char *k,
                        ptrdiff_t n_keys, ptrdiff_t head_dim, ptrdiff_t k_row, ptrdiff_t k_col) {
#define BODY(V, unit) NAME(score_rows)(V, unit, s, tile_max, q, ld, k, n_keys, head_dim, k_row, k_col)
    if (k_col == sizeof(REAL))
        EACH_WIDTH(BODY, 1)
    else
        EACH_WIDTH(BODY, 0)
#undef BODY
}

static void NAME(accumulate)(void *acc, const void *p, const void *rescale, ptrdiff_t ld, int n_vectors,
                             const char *v, ptrdiff_t n_keys, ptrdiff_t value_dim, ptrdiff_t v_row,
                             ptrdiff_t v_col) {
#define BODY(V, unit) NAME(accumulate_rows)(V, unit, acc, p, rescale, ld, v, n_keys, value_dim, v_row, v_col)
    if (v_col == sizeof(REAL))
        EACH_WIDTH(BODY, 1)
    else
        EACH_WIDTH(BODY, 0)
#undef BODY
}

static void NAME(adjust)(void *s_tile, void *tile_max, ptrdiff_t ld, ptrdiff_t n_keys, double softcap,
                         const void *bias_tile, const uint32_t *words) {
    const VEC masked = NAME(splat)(-(REAL)INFINITY), cap = NAME(splat)((REAL)softcap);
    for (ptrdiff_t lane = 0; lane < ld; lane += LANES) {
        REAL *s = (REAL *)s_tile + lane;
        const REAL *bias = bias_tile ? (const REAL *)bias_tile + lane : NULL;
        VEC top = masked;
        IVEC word = {};
        for (ptrdiff_t j = 0; j < n_keys; j++, s += ld) {
            VEC x = NAME(load)(s);
            if (softcap > 0) x = cap * NAME(tanh)(x);
            if (bias) {
                const VEC y = NAME(load)(bias);
                x = NAME(select)((IVEC)(y == masked), masked, x + y);
                bias += ld;
            }
            if (words) {
                if (j % 32 == 0) word = NAME(load_words)(words + (j / 32) * ld + lane);
                x = NAME(keep_allowed)(x, word, (LANE_INT)1 << (j % 32));
            }
            NAME(store)(s, x);
            top = NAME(max)(top, x);
        }
        NAME(store)((REAL *)tile_max + lane, top);
    }
}

static void NAME(softmax)(void *s_tile, const void *tile_max, void *row_max, void *row_sum, void *rescale,
                          ptrdiff_t ld, ptrdiff_t n_keys, double exponent_factor) {
    const REAL factor = (REAL)exponent_factor;
    const VEC empty = NAME(splat)(-(REAL)INFINITY);
    for (ptrdiff_t lane = 0; lane < ld; lane += LANES) {
        REAL *s = (REAL *)s_tile + lane;
        const VEC old = NAME(load)((REAL *)row_max + lane);
        const VEC top = NAME(max)(old, NAME(load)((const REAL *)tile_max + lane));
        /* -inf - 0 where the row is still empty: -inf - -inf would be NaN. */
        const VEC base = NAME(select)((IVEC)(top == empty), (VEC){}, top);
        VEC sum = {};
        if (factor == 1)
            for (ptrdiff_t j = 0; j < n_keys; j++, s += ld) {
                const VEC p = NAME(exp2)(NAME(load)(s) - base);
                NAME(store)(s, p);
                sum += p;
            }
        else
            for (ptrdiff_t j = 0; j < n_keys; j++, s += ld) {
                const VEC p = NAME(exp2)((NAME(load)(s) - base) * factor);
                NAME(store)(s, p);
                sum += p;
            }
        const VEC scale = NAME(exp2)((old - base) * factor);
        NAME(store)((REAL *)rescale + lane, scale);
        NAME(store)((REAL *)row_sum + lane, NAME(load)((REAL *)row_sum + lane) * scale + sum);
        NAME(store)((REAL *)row_max + lane, top);
    }
}

static void NAME(accumulate_isolated)(void *acc, const void *p, const void *rescale, ptrdiff_t ld, const char *v,
                                      ptrdiff_t n_keys, ptrdiff_t value_dim, ptrdiff_t v_row, ptrdiff_t v_col,
                                      const void *bias, const uint32_t *words, void *clean_v) {
    REAL *const clean = clean_v;
    for (ptrdiff_t j = 0; j < n_keys; j++)
        for (ptrdiff_t e = 0; e < value_dim; e++) {
            const REAL x = NAME(scalar)(v + j * v_row + e * v_col);
            clean[j * value_dim + e] = isfinite(x) ? x : 0;
        }
    const ptrdiff_t n_vectors = ld / LANES;
    for (ptrdiff_t i = 0; i < n_vectors; i += TILE_VECTORS)
        NAME(accumulate)((REAL *)acc + i * LANES, (const REAL *)p + i * LANES,
                         rescale ? (const REAL *)rescale + i * LANES : NULL, ld,
                         (int)(n_vectors - i < TILE_VECTORS ? n_vectors - i : TILE_VECTORS), (const char *)clean,
                         n_keys, value_dim, value_dim * (ptrdiff_t)sizeof(REAL), sizeof(REAL));
    for (ptrdiff_t j = 0; j < n_keys; j++)
        for (ptrdiff_t e = 0; e < value_dim; e++) {
            const REAL x = NAME(scalar)(v + j * v_row + e * v_col);
            if (isfinite(x)) continue;
            for (ptrdiff_t lane = 0; lane < ld; lane++) {
                if (words && !(words[(j / 32) * ld + lane] >> (j % 32) & 1)) continue;
                if (bias && ((const REAL *)bias)[j * ld + lane] == -(REAL)INFINITY) continue;
                ((REAL *)acc)[e * ld + lane] += ((const REAL *)p)[j * ld + lane] * x;
            }
        }
}

static void NAME(finish)(void *inverse, void *lse, const void *row_max, const void *row_sum, ptrdiff_t ld,
                         double exponent_factor) {
    for (ptrdiff_t lane = 0; lane < ld; lane++) {
        const REAL top = ((const REAL *)row_max)[lane], sum = ((const REAL *)row_sum)[lane];
        ((REAL *)inverse)[lane] = sum == 0 ? 0 : 1 / sum;
        /* Back to natural units from whichever domain the scores were in. */
        if (lse) ((REAL *)lse)[lane] = (REAL)(top * (exponent_factor == 1 ? LN2 : 1.0) + log((double)sum));
    }
}

static double NAME(fma_peak)(long steps) {
    VEC sum[TILE_ROWS][TILE_VECTORS], x = NAME(splat)((REAL)1e-9), y = NAME(splat)((REAL)0.5);
    /* Opaque values: else equal sums are computed once, and the product only once. */
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; v++) {
            sum[r][v] = x;
            OPAQUE(sum[r][v]);
        }
    for (long i = 0; i < steps; i++) {
        OPAQUE(x);
#pragma GCC unroll 8
        for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 8
            for (int v = 0; v < TILE_VECTORS; v++) sum[r][v] += x * y;
    }
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < TILE_VECTORS; v++) OPAQUE(sum[r][v]);
    return 2.0 * TILE_ROWS * TILE_VECTORS * LANES * (double)steps;
}

const fastattn_kernels NAME(CONCAT(fastattn_kernels, FASTATTN_ISA)) = {
    .isa = STRING(FASTATTN_ISA),
    .lanes = LANES,
    .max_vectors = TILE_VECTORS,
    .pack = NAME(pack),
    .score = NAME(score),
    .adjust = NAME(adjust),
    .softmax = NAME(softmax),
    .accumulate = NAME(accumulate),
    .accumulate_isolated = NAME(accumulate_isolated),
    .finish = NAME(finish),
    .unpack = NAME(unpack),
    .mask_words = mask_words,
    .fma_peak = NAME(fma_peak),
};

#undef SCORE
#undef ACCUMULATE
#undef REMAINDER
#undef EACH_WIDTH
#undef LANES
#undef LANE_INT
#undef MANTISSA_BITS
#undef EXPONENT_MIN
#undef VEC
#undef IVEC
#undef REAL
#undef REAL_BITS
#undef NAME
