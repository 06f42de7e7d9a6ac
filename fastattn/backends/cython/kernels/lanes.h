/* The kernels for many query rows, one in each lane; see kernels.h. Included by kernels.c. */

#define PANEL_ROW ((ptrdiff_t)(TILE_ROWS * sizeof(REAL)))

/* What the register tiles of `score` and `accumulate` are made of. */
#define BROADCAST(at) scalar(at)
#define ADD_PRODUCT(sum, x, y) ((sum) + (x) * (y))

/* Where query blocks have few vectors, many lack one. Register tiles of one or two vectors then have more keys or
 * columns, to hide the latency of the multiply-adds and of the loads of broadcast elements: `score` of one and of two
 * vectors takes 0.93 and 0.88 of the time, `accumulate` of one, which has WIDE_ROWS, 0.86. 2 cores of Emerald Rapids,
 * 2026-11-21, one thread over the kernels alone. */
#define NARROW_KEYS (2 * SCORE_ROWS)
#define NARROW_VECTORS 2
#define TILE_KEYS SCORE_ROWS
#define CHAIN SCORE_CHAIN
#define SHORT_CHAIN (CHAIN < 8 ? CHAIN : 8)
#define STEPS CHAIN
#define HAS_TOTALS 1
#define IS_UNIT(k_col) ((k_col) == sizeof(REAL))

/* `pack` and `unpack` for the columns c .. c + n - 1 of LANES rows, n <= LANES; with constant n the
 * usual full block has no branches. */
INLINE void pack_block(const int n, REAL *dst, ptrdiff_t ld, const char *const *rows, size_t at, VEC high,
                       VEC low) {
    VEC x[LANES];
    load_columns(n, x, rows, at);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (i < n) store(dst + i * ld, multiply_exactly(x[i], high, low));
}

/* Returns the lanes that are nonfinite. */
INLINE IVEC unpack_block(const int n, const int n_live, char *const *rows, size_t at, const REAL *src,
                         ptrdiff_t ld, VEC high, VEC low) {
    VEC x[LANES];
    IVEC nonfinite = {};
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        x[i] = i < n ? multiply_exactly(load(src + i * ld), high, low) : (VEC){};
    transpose(x);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i >= n_live) break;
        nonfinite |= nonfinite_lanes(x[i]);
        if (n == LANES)
            store(rows[i] + at, x[i]);
        else
            store_partial(rows[i] + at, x[i], n);
    }
    return nonfinite;
}

/* `factor` as high + low for `multiply_exactly`, so that its own rounding does not matter. */
INLINE void split_factor(double factor, VEC *high, VEC *low) {
    REAL rounded = (REAL)factor;
    if (fabs(rounded) > fabs(factor)) rounded = towards_zero(rounded);
    REAL rest = isfinite(rounded) ? (REAL)(factor - rounded) : rounded;
    if (rest == 0) rest = rounded * no_low;
    *high = splat(rounded);
    *low = splat(rest);
}

static void pack(void *tile, ptrdiff_t ld, const char *const *rows, ptrdiff_t stride, ptrdiff_t n_cols,
                 double factor) {
    const ptrdiff_t blocked = stride == sizeof(REAL) ? n_cols : 0;
    VEC high, low;
    split_factor(factor, &high, &low);
    for (ptrdiff_t lane = 0; lane < ld; lane += LANES, rows += LANES) {
        REAL *dst = (REAL *)tile + lane;
        ptrdiff_t c = 0;
        for (; c + LANES <= blocked; c += LANES, dst += LANES * ld)
            pack_block(LANES, dst, ld, rows, (size_t)c * sizeof(REAL), high, low);
        if (c < blocked)
            pack_block((int)(blocked - c), dst, ld, rows, (size_t)c * sizeof(REAL), high, low);
        for (c = blocked; c < n_cols; c++, dst += ld) {
            VEC x;
            for (int i = 0; i < LANES; i++) x[i] = scalar(rows[i] + c * stride);
            store(dst, multiply_exactly(x, high, low));
        }
    }
}

static int unpack(char *const *rows, ptrdiff_t stride, ptrdiff_t n_rows, const void *tile, ptrdiff_t ld,
                  ptrdiff_t n_cols, const void *factor) {
    const REAL *src_lane = tile, *high_lane = factor;
    const ptrdiff_t blocked = stride == sizeof(REAL) ? n_cols : 0;
    IVEC nonfinite = {};
    for (ptrdiff_t left = n_rows; left > 0; left -= LANES, rows += LANES, src_lane += LANES, high_lane += LANES) {
        const int n_live = left < LANES ? (int)left : LANES;
        const VEC high = load(high_lane), low = load(high_lane + ld);
        const REAL *src = src_lane;
        ptrdiff_t c = 0;
        if (n_live == LANES)
            for (; c + LANES <= blocked; c += LANES, src += LANES * ld)
                nonfinite |= unpack_block(LANES, LANES, rows, (size_t)c * sizeof(REAL), src, ld, high, low);
        for (; c < blocked; c += LANES, src += LANES * ld) {
            const int n = blocked - c < LANES ? (int)(blocked - c) : LANES;
            nonfinite |= unpack_block(n, n_live, rows, (size_t)c * sizeof(REAL), src, ld, high, low);
        }
        for (c = blocked; c < n_cols; c++, src += ld) {
            const VEC x = multiply_exactly(load(src), high, low);
            for (int i = 0; i < n_live; i++) {
                const REAL y = x[i];
                nonfinite[0] |= !isfinite(y);
                memcpy(rows[i] + c * stride, &y, sizeof y);
            }
        }
    }
    return any_lane(nonfinite);
}

#define ACCUMULATE_TILE accumulate_tile
#define COLUMN(row, r, col) scalar((row) + (r) * (col))
#define CHUNK_ROWS KEY_CHUNK
#define MOST_COLUMNS WIDE_ROWS
#include "accumulate_tile.h"

#include "score.h"

static void pack_values(void *panels, ptrdiff_t panel, const char *v, ptrdiff_t v_row, ptrdiff_t v_col,
                        ptrdiff_t n_keys, ptrdiff_t value_dim) {
    const ptrdiff_t blocked = v_col == sizeof(REAL) ? value_dim / TILE_ROWS : 0;
    for (ptrdiff_t j = 0; j < n_keys; j++, v += v_row) {
        char *to = (char *)panels + j * PANEL_ROW;
        for (ptrdiff_t at = 0; at < blocked * PANEL_ROW; at += 64) __builtin_prefetch(v + PREFETCH_PACKED * v_row + at);
        for (ptrdiff_t i = 0; i < blocked; i++) memcpy(to + i * panel, v + i * PANEL_ROW, PANEL_ROW);
        for (ptrdiff_t e = blocked * TILE_ROWS; e < value_dim; e++)
            memcpy(to + e / TILE_ROWS * panel + e % TILE_ROWS * (ptrdiff_t)sizeof(REAL), v + e * v_col, sizeof(REAL));
    }
}

/* `accumulate` for one group of V vectors, whose weights stay in L1 for all columns of the values. */
INLINE void accumulate_group(const int V, REAL *acc, const REAL *p, const REAL *rescale, ptrdiff_t ld,
                             const fastattn_values *values, const ptrdiff_t *stops, ptrdiff_t first_chunk,
                             ptrdiff_t value_dim, const char *const *prefetch, ptrdiff_t n_prefetch,
                             ptrdiff_t prefetch_nbytes) {
    const char *v = values->at;
    ptrdiff_t prefetch_byte = 0;
#define TILE(R, v_row, v_col)                                                                                  \
    accumulate_tile(R, V, (v_row == PANEL_ROW && v_col == sizeof(REAL)) || v_col == FASTATTN_GRADIENT_ROW, \
                          acc, p, rescale, ld, v, stops, first_chunk, v_row, v_col, prefetch, prefetch_byte < prefetch_nbytes ? n_prefetch : 0, prefetch_byte)
    if (V == 1 && WIDE_ROWS > TILE_ROWS && values->panel == TILE_ROWS * (ptrdiff_t)sizeof(REAL))
        for (; value_dim >= WIDE_ROWS; value_dim -= WIDE_ROWS, acc += WIDE_ROWS * ld, v += 2 * values->panel) {
            TILE(WIDE_ROWS, values->row, sizeof(REAL));
            prefetch_byte += 128;
        }
    for (; value_dim >= TILE_ROWS; value_dim -= TILE_ROWS, acc += TILE_ROWS * ld, v += values->panel) {
        if (values->row == sizeof(REAL) && values->col == FASTATTN_GRADIENT_ROW)
            TILE(TILE_ROWS, (ptrdiff_t)sizeof(REAL), FASTATTN_GRADIENT_ROW);
        else if (values->row == FASTATTN_GRADIENT_ROW && values->col == sizeof(REAL))
            TILE(TILE_ROWS, FASTATTN_GRADIENT_ROW, sizeof(REAL));
        else if (values->col != sizeof(REAL))
            TILE(TILE_ROWS, values->row, values->col);
        else if (values->row != PANEL_ROW)
            TILE(TILE_ROWS, values->row, sizeof(REAL));
        else
            TILE(TILE_ROWS, PANEL_ROW, sizeof(REAL));
        prefetch_byte += 64;
    }
#define REST(R)                                                                                                \
    for (; value_dim >= R; value_dim -= R, acc += R * ld, v += R * values->col, prefetch_byte += 64)           \
    TILE(R, values->row, values->col)
    REST(4);
    REST(2);
    REST(1);
#undef REST
#undef TILE
}

static void accumulate(void *acc, const void *p, const void *rescale, ptrdiff_t ld, int n_vectors,
                       const fastattn_values *v, const ptrdiff_t *stops, ptrdiff_t first_chunk,
                       ptrdiff_t value_dim, const char *const *prefetch, ptrdiff_t n_prefetch,
                       ptrdiff_t prefetch_nbytes) {
#define GROUP(V, unit, i)                                                                                      \
    accumulate_group(V, (REAL *)acc + (i)*LANES, (const REAL *)p + (i)*LANES,                                  \
                     rescale ? (const REAL *)rescale + (i)*LANES : NULL, ld, v, stops + (i),                   \
                           first_chunk, value_dim, prefetch, n_prefetch, prefetch_nbytes)
    EACH_GROUP(GROUP, TILE_VECTORS, 0, 0);
#undef GROUP
}

/* Bias and mask for the keys j .. j + n - 1 of one vector of lanes, n <= LANES; returns the new top. */
INLINE VEC adjust_keys(const int has_bias, const int has_words, const int n, VEC top, REAL *s, ptrdiff_t ld,
                       const char *const *bias_rows, ptrdiff_t j, const uint32_t *words) {
    const VEC masked = splat(-(REAL)INFINITY);
    VEC bias[LANES];
    if (has_bias) {
        const size_t at = (size_t)j * sizeof(REAL);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            bias[i] = n == LANES ? load(bias_rows[i] + at) : load_partial(bias_rows[i] + at, n);
        transpose(bias);
    }
    IVEC word = {};
    if (has_words) word = load_words(words + (j / 32) * ld) >> (j % 32);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i >= n) break;
        VEC x = load(s + i * ld);
        if (has_bias) x = select_lanes((IVEC)(bias[i] == masked), masked, x + bias[i]);
        if (has_words) x = select_by_bit(word >> i, x, masked);
        store(s + i * ld, x);
        top = max(top, x);
    }
    return top;
}

/* How many elements of a row come before the first at a vector boundary; 0 where none is at one. */
INLINE ptrdiff_t keys_to_boundary(const char *row) {
    const uintptr_t past = (uintptr_t)row % VECTOR_BYTES;
    return past % sizeof(REAL) ? 0 : (ptrdiff_t)((VECTOR_BYTES - past) % VECTOR_BYTES / sizeof(REAL));
}

static void adjust(void *s_tile, void *tile_max, ptrdiff_t ld, const ptrdiff_t *stops, double root,
                   double softcap, const char *const *bias_rows, const uint32_t *words) {
    const VEC half = splat((REAL)root), cap = splat((REAL)softcap);
    for (ptrdiff_t lane = 0; lane < ld; lane += LANES) {
        const ptrdiff_t n_keys = *stops++;
        REAL *s = (REAL *)s_tile + lane, *const lane_max = (REAL *)tile_max + lane;
        VEC top = load(lane_max);
        if (root != 1)
            for (ptrdiff_t j = 0; j < n_keys; j++) {
                const VEC x = half * (half * load(s + j * ld));
                store(s + j * ld, x);
                if (softcap == 0 && !bias_rows && !words) top = max(top, x);
            }
        if (softcap > 0)
            for (ptrdiff_t j = 0; j < n_keys; j++) {
                const VEC x = cap * tanh_vector(load(s + j * ld));
                store(s + j * ld, x);
                if (!bias_rows && !words) top = max(top, x);
            }
        if (bias_rows || words) {
            const char *const *const rows = bias_rows ? bias_rows + lane : NULL;
            const uint32_t *const lane_words = words ? words + lane : NULL;
#define KEYS(n)                                                                                                \
    (!words  ? adjust_keys(1, 0, n, top, s, ld, rows, j, lane_words)                                           \
     : !rows ? adjust_keys(0, 1, n, top, s, ld, rows, j, lane_words)                                           \
             : adjust_keys(1, 1, n, top, s, ld, rows, j, lane_words))
            /* Arrays often start 16 bytes into a cache line, and rows a power of two apart map to the same cache set:
             * of loads across two lines, each line would be evicted before its second use. So vectors are aligned,
             * except where there are words, of which each has 32 keys. */
            const ptrdiff_t lead = words ? 0 : keys_to_boundary(rows[0]);
            ptrdiff_t j = 0;
            if (0 < lead && lead <= n_keys) {
                top = KEYS((int)lead);
                j = lead;
                s += lead * ld;
            }
            for (; j + LANES <= n_keys; j += LANES, s += LANES * ld) top = KEYS(LANES);
            if (j < n_keys) top = KEYS((int)(n_keys - j));
#undef KEYS
        }
        store(lane_max, top);
    }
}

/* A run of add_bias, n elements. */
INLINE void add_run(const int has_row, const int adds, char *to, const char *from, REAL row, ptrdiff_t n) {
    const VEC row_vector = splat(row);
    ptrdiff_t j = 0;
    for (; j < n; j += LANES) {
        if (j + LANES > n) {
            if (adds || n < LANES) break;
            j = n - LANES; /* some are set twice */
        }
        VEC x = load(from + j * (ptrdiff_t)sizeof(REAL));
        if (has_row) x = row_vector + x;
        if (adds) x = load(to + j * (ptrdiff_t)sizeof(REAL)) + x;
        store(to + j * (ptrdiff_t)sizeof(REAL), x);
    }
    for (; j < n; j++) {
        REAL x = scalar(from + j * (ptrdiff_t)sizeof(REAL));
        if (has_row) x = row + x;
        if (adds) x = scalar(to + j * (ptrdiff_t)sizeof(REAL)) + x;
        *(real_unaligned *)(to + j * (ptrdiff_t)sizeof(REAL)) = x;
    }
}

static void add_bias(void *to_row, const char *array, const char *rows, ptrdiff_t rows_col, ptrdiff_t run,
                     ptrdiff_t key0, ptrdiff_t n_keys, int adds) {
    char *to = to_row;
    ptrdiff_t first = key0 % run;
    if (rows) rows += key0 / run * rows_col;
    while (n_keys > 0) {
        const ptrdiff_t n = n_keys < run - first ? n_keys : run - first;
        const char *const from = array + first * (ptrdiff_t)sizeof(REAL);
        if (rows) {
            if (adds)
                add_run(1, 1, to, from, scalar(rows), n);
            else
                add_run(1, 0, to, from, scalar(rows), n);
            rows += rows_col;
        } else if (adds) {
            add_run(0, 1, to, from, 0, n);
        } else {
            add_run(0, 0, to, from, 0, n);
        }
        to += n * (ptrdiff_t)sizeof(REAL);
        n_keys -= n;
        first = 0;
    }
}

/* Weights in the place of their scores. */
INLINE REAL *store_weights(REAL *to, ptrdiff_t ld, const VEC x[], ptrdiff_t n) {
#pragma GCC unroll 8
    for (ptrdiff_t i = 0; i < n; i++) store(to + i * ld, x[i]);
    return to + n * ld;
}

#define SOFTMAX_GROUPS 1
#include "softmax.h"

INLINE REAL value_at(const fastattn_values *v, ptrdiff_t j, ptrdiff_t e) {
    return scalar(v->at + j * v->row + e / TILE_ROWS * v->panel + e % TILE_ROWS * v->col);
}

/* Values without gaps, with 0 in the place of the nonfinite ones. */
static void clean_values(REAL *clean, const fastattn_values *v, ptrdiff_t n_keys, ptrdiff_t value_dim) {
    for (ptrdiff_t j = 0; j < n_keys; j++)
        for (ptrdiff_t e = 0; e < value_dim; e++) {
            const REAL x = value_at(v, j, e);
            clean[j * value_dim + e] = isfinite(x) ? x : 0;
        }
}

/* Adds the products with the nonfinite values, for the lanes (or rows) that may read them. Strides of acc and p are in
 * elements: from one lane to the next, and from one column or key to the next. */
static void add_nonfinite(REAL *acc, ptrdiff_t acc_lane, ptrdiff_t acc_col, const REAL *p, ptrdiff_t p_lane,
                          ptrdiff_t p_key, ptrdiff_t n_lanes, const fastattn_values *v, ptrdiff_t n_keys,
                          ptrdiff_t value_dim, const char *const *bias_rows, const uint32_t *words) {
    for (ptrdiff_t j = 0; j < n_keys; j++)
        for (ptrdiff_t e = 0; e < value_dim; e++) {
            const REAL x = value_at(v, j, e);
            if (isfinite(x)) continue;
            for (ptrdiff_t lane = 0; lane < n_lanes; lane++) {
                if (words && !(words[j / 32 * n_lanes + lane] >> (j % 32) & 1)) continue;
                if (bias_rows && scalar(bias_rows[lane] + j * (ptrdiff_t)sizeof(REAL)) == -(REAL)INFINITY) continue;
                acc[lane * acc_lane + e * acc_col] += p[lane * p_lane + j * p_key] * x;
            }
        }
}

static void accumulate_nonfinite(void *acc, const void *p, const void *rescale, ptrdiff_t ld,
                                 const fastattn_values *v, const ptrdiff_t *stops, ptrdiff_t first_chunk,
                                 ptrdiff_t value_dim, const char *const *bias_rows, const uint32_t *words,
                                 void *clean) {
    const fastattn_values finite = {clean, value_dim * (ptrdiff_t)sizeof(REAL), sizeof(REAL), PANEL_ROW};
    const ptrdiff_t n_keys = stops[ld / LANES - 1];
    clean_values(clean, v, n_keys, value_dim);
    accumulate(acc, p, rescale, ld, (int)(ld / LANES), &finite, stops, first_chunk, value_dim, NULL, 0, 0);
    add_nonfinite(acc, 1, ld, p, 1, ld, ld, v, n_keys, value_dim, bias_rows, words);
}

static void drop(void *s_tile, ptrdiff_t ld, const ptrdiff_t *stops, const uint32_t *words) {
    for (ptrdiff_t lane = 0; lane < ld; lane += LANES) {
        const ptrdiff_t n_keys = *stops++;
        REAL *s = (REAL *)s_tile + lane;
        IVEC word = {};
        for (ptrdiff_t j = 0; j < n_keys; j++, s += ld, word >>= 1) {
            if (j % 32 == 0) word = load_words(words + j / 32 * ld + lane);
            store(s, select_by_bit(word, load(s), (VEC){}));
        }
    }
}

/* What the sums of two partial results are multiplied by when they are merged; returns the merged row_max. */
INLINE VEC merge_factors(VEC factors[2], VEC row_max, VEC row_max_2, double exponent_factor) {
    const VEC top = max(row_max, row_max_2);
    const VEC base = select_lanes((IVEC)(top == splat(-(REAL)INFINITY)), (VEC){}, top);
    factors[0] = row_max - base;
    factors[1] = row_max_2 - base;
    exp2_vectors(2, 1, (REAL)exponent_factor, factors);
    return top;
}

static void merge(void *acc_v, void *row_max_v, void *row_sum_v, const void *acc_2_v, const void *row_max_2_v,
                  const void *row_sum_2_v, ptrdiff_t ld, ptrdiff_t value_dim, double exponent_factor) {
    REAL *acc = acc_v, *const row_max = row_max_v, *const row_sum = row_sum_v;
    const REAL *acc_2 = acc_2_v, *const row_max_2 = row_max_2_v, *const row_sum_2 = row_sum_2_v;
    VEC x[BLOCK_VECTORS][2];
    for (ptrdiff_t lane = 0; lane < ld; lane += LANES) {
        VEC *const factors = x[lane / LANES];
        const VEC top = merge_factors(factors, load(row_max + lane), load(row_max_2 + lane), exponent_factor);
        store(row_max + lane, top);
        store(row_sum + lane, load(row_sum + lane) * factors[0] + load(row_sum_2 + lane) * factors[1]);
    }
    for (ptrdiff_t e = 0; e < value_dim; e++, acc += ld, acc_2 += ld)
        for (ptrdiff_t lane = 0; lane < ld; lane += LANES)
            store(acc + lane, load(acc + lane) * x[lane / LANES][0] + load(acc_2 + lane) * x[lane / LANES][1]);
}

static void finish(void *inverse, void *lse, const void *row_max, const void *row_sum, ptrdiff_t ld,
                   double exponent_factor, double kept_share) {
    for (ptrdiff_t lane = 0; lane < ld; lane += LANES) {
        const VEC sum = load((const REAL *)row_sum + lane) * (REAL)kept_share;
        const IVEC is_some = (IVEC)(sum != 0);
        VEC high = 1 / sum;
        /* Down by one ULP where it was rounded up: for a positive float that is 1 less as an integer. */
        high = (VEC)((IVEC)high + (IVEC)(one_minus_product(high, sum) < 0));
        const VEC left = one_minus_product(high, sum);
        const VEC low = select_lanes((IVEC)(left == 0), high * no_low, left * high);
        store((REAL *)inverse + lane, (VEC)((IVEC)high & is_some));
        store((REAL *)inverse + ld + lane, (VEC)((IVEC)low & is_some));
    }
    if (!lse) return;
    for (ptrdiff_t lane = 0; lane < ld; lane++) {
        const double top = ((const REAL *)row_max)[lane], sum = ((const REAL *)row_sum)[lane];
        /* In natural units, whatever the units of the scores. */
        ((REAL *)lse)[lane] = (REAL)(top * (exponent_factor == LOG2E ? 1.0 : exponent_factor * LN2) + log(sum));
    }
}
