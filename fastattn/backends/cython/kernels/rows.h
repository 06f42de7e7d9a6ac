/* The kernels for few query rows, too few to fill vectors of lanes; see kernels.h, "Row tiles". Lanes run along
 * columns in products and along keys in the softmax. Included by kernels.c.
 *
 * A row's result does not depend on the other rows: register tiles of any number of rows do the same operations on
 * each, and lanes are added in a tree of fixed shape. */

/* Sums of one register tile of `score_rows`, each a vector: DOTS / R keys by R rows. Fewer would not hide the latency
 * of a multiply-add. */
#define DOTS (LANES < 8 ? 8 : LANES)

/* Vectors of columns in a register tile of `accumulate_rows` with R rows. */
#define ROW_VECTORS(R) (ROW_SUMS / (R) < 8 ? ROW_SUMS / (R) : 8)

#define FOLD_SELF(i, half) ((i) & (half) ? LANES + (i) : (i))
#define FOLD_OTHER(i, half) ((i) & (half) ? LANES + (i) - (half) : (i) + (half))

/* Lane i of the pair (a, b) folded at distance `half`: both halves of a where bit `half` of i is clear, else of b. */
#define FOLD(to, COMBINE, a, b, half)                                                                          \
    do {                                                                                                       \
        const VEC self = SHUFFLE(IVEC, a, b, EACH_LANE(FOLD_SELF, half));                                      \
        const VEC other = SHUFFLE(IVEC, a, b, EACH_LANE(FOLD_OTHER, half));                                    \
        to = COMBINE(self, other);                                                                             \
    } while (0)

/* Lane i of x[0] becomes all lanes of x[i] combined; EACH_FOLD names the distances, the largest first. */
#define FOLD_VECTORS(x, COMBINE, half)                                                                         \
    _Pragma("GCC unroll 16") for (int i = 0; i < (half); i++) FOLD((x)[i], COMBINE, (x)[i], (x)[i + (half)], half);
/* Every lane of x becomes all its lanes combined. */
#define FOLD_LANES(x, COMBINE, half) FOLD(x, COMBINE, x, x, half);

#if VECTOR_BYTES * 8 / REAL_BITS == 2
#define EACH_FOLD(M, x, COMBINE) M(x, COMBINE, 1)
#elif VECTOR_BYTES * 8 / REAL_BITS == 4
#define EACH_FOLD(M, x, COMBINE) M(x, COMBINE, 2) M(x, COMBINE, 1)
#elif VECTOR_BYTES * 8 / REAL_BITS == 8
#define EACH_FOLD(M, x, COMBINE) M(x, COMBINE, 4) M(x, COMBINE, 2) M(x, COMBINE, 1)
#else
#define EACH_FOLD(M, x, COMBINE) M(x, COMBINE, 8) M(x, COMBINE, 4) M(x, COMBINE, 2) M(x, COMBINE, 1)
#endif

INLINE VEC add(VEC a, VEC b) { return a + b; }

INLINE void sum_vectors(VEC x[LANES]) { EACH_FOLD(FOLD_VECTORS, x, add) }

INLINE VEC sum_lanes(VEC x) {
    EACH_FOLD(FOLD_LANES, x, add)
    return x;
}

INLINE VEC max_lanes(VEC x) {
    EACH_FOLD(FOLD_LANES, x, max)
    return x;
}

/* The number of each lane. */
INLINE IVEC lane_numbers(void) {
    IVEC x;
    for (int i = 0; i < LANES; i++) x[i] = i;
    return x;
}

static void pack_rows(void *tile, ptrdiff_t ld, const char *const *rows, ptrdiff_t n_rows, ptrdiff_t stride,
                      ptrdiff_t n_cols, double factor) {
    VEC high, low;
    split_factor(factor, &high, &low);
    REAL *to = tile;
    for (ptrdiff_t r = 0; r < n_rows; r++, to += ld)
        for (ptrdiff_t c = 0; c < n_cols; c += LANES) {
            VEC x = {};
            if (stride == sizeof(REAL))
                x = load_upto(FASTATTN_REAL, rows[r] + c * stride, n_cols - c);
            else
                for (int i = 0; i < LANES && c + i < n_cols; i++) x[i] = scalar(rows[r] + (c + i) * stride);
            store(to + c, multiply_exactly(x, high, low));
        }
}

static int unpack_rows(char *const *rows, ptrdiff_t stride, ptrdiff_t n_rows, const void *tile, ptrdiff_t ld,
                       ptrdiff_t n_cols, const void *factor, ptrdiff_t factor_ld) {
    const REAL *from = tile, *const high = factor, *const low = high + factor_ld;
    IVEC nonfinite = {};
    for (ptrdiff_t r = 0; r < n_rows; r++, from += ld)
        for (ptrdiff_t c = 0; c < n_cols; c += LANES) {
            const ptrdiff_t n = n_cols - c;
            char *const to = rows[r] + c * stride;
            VEC x = multiply_exactly(load(from + c), splat(high[r]), splat(low[r]));
            if (n < LANES) x = select_lanes((IVEC)(lane_numbers() < (LANE_INT)n), x, (VEC){});
            nonfinite |= nonfinite_lanes(x);
            if (stride != sizeof(REAL))
                for (int i = 0; i < LANES && i < n; i++) memcpy(to + i * stride, (const REAL *)&x + i, sizeof(REAL));
            else
                store_upto(FASTATTN_REAL, to, x, n);
        }
    return any_lane(nonfinite);
}

/* How many cache lines of a row of n_cols elements are prefetched before row r of n_rows is computed. The prefetches
 * are spread over the rows: a core has few outstanding loads, and none would be left for the time of the later rows.
 * With all prefetches in the first rows, 16 rows over 4096 keys took 1.14 to 1.19 times as long, 4 rows about 1.1. 2
 * cores of Emerald Rapids, 2026-11-21, keys and values from memory, interleaved A/B. */
INLINE ptrdiff_t lines_before(const int storage, ptrdiff_t r, ptrdiff_t n_rows, ptrdiff_t n_cols) {
    return (n_cols + STORED_LINE(storage) - 1) / STORED_LINE(storage) * r / n_rows;
}

/* One register tile of `score_rows`: R rows by DOTS / R keys from k on, of which n are to be written. Prefetches the
 * elements prefetch_from .. prefetch_to - 1 of the rows ahead. */
INLINE void score_rows_tile(const int storage, const int R, REAL *s, ptrdiff_t ld, const REAL *q,
                            ptrdiff_t q_ld, const fastattn_rows *k, ptrdiff_t first, ptrdiff_t n,
                            ptrdiff_t head_dim, ptrdiff_t prefetch_from, ptrdiff_t prefetch_to) {
    const int n_keys = DOTS / R;
    const char *key[DOTS], *scale[DOTS];
    VEC sum[DOTS] = {};
#pragma GCC unroll 16
    for (int j = 0; j < n_keys; j++) {
        const ptrdiff_t row = first + (j < n ? j : n - 1);
        key[j] = k->at + row * k->row;
        scale[j] = storage == FASTATTN_INT8 ? k->scale + row * k->scale_row : NULL;
    }
    const ptrdiff_t ahead = first < k->near ? k->ahead : k->far;
    if (storage == FASTATTN_INT8 && prefetch_from < prefetch_to)
        __builtin_prefetch(scale[0] + (first < k->near ? k->scale_ahead : k->scale_far), 0, 2);
    ptrdiff_t d = 0;
#define STEP(n_elements)                                                                                       \
    do {                                                                                                       \
        VEC x[4];                                                                                              \
        if (d % STORED_LINE(storage) == 0 && d >= prefetch_from && d < prefetch_to)                            \
            _Pragma("GCC unroll 16") for (int j = 0; j < n_keys; j++)                                          \
                __builtin_prefetch(key[j] + ahead + d * STORED_SIZE(storage), 0, 2);                           \
        _Pragma("GCC unroll 4") for (int r = 0; r < R; r++) x[r] = load(q + r * q_ld + d);                     \
        _Pragma("GCC unroll 16") for (int j = 0; j < n_keys; j++) {                                            \
            const VEC y = load_elements(storage, key[j], scale[j], d, n_elements);                             \
            _Pragma("GCC unroll 4") for (int r = 0; r < R; r++) sum[r * n_keys + j] += x[r] * y;               \
        }                                                                                                      \
    } while (0)
    for (; d + LANES <= head_dim; d += LANES) STEP(LANES);
    if (d < head_dim) STEP((int)(head_dim - d));
#undef STEP
    REAL score[DOTS];
#pragma GCC unroll 4
    for (int i = 0; i < DOTS; i += LANES) {
        sum_vectors(sum + i);
        store(score + i, sum[i]);
    }
    if (n >= n_keys) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) memcpy(s + r * ld, score + r * n_keys, (size_t)n_keys * sizeof(REAL));
    } else {
        for (int r = 0; r < R; r++) memcpy(s + r * ld, score + r * n_keys, (size_t)n * sizeof(REAL));
    }
}

INLINE void score_rows(const int storage, REAL *s, ptrdiff_t ld, const REAL *q, ptrdiff_t q_ld,
                       ptrdiff_t n_rows, const fastattn_rows *k, ptrdiff_t n_keys, ptrdiff_t head_dim) {
    /* All rows for DOTS keys before the next keys, so that those keys stay in L1. */
    for (ptrdiff_t start = 0; start < n_keys; start += DOTS) {
        const ptrdiff_t stop = n_keys - start < DOTS ? n_keys : start + DOTS;
        ptrdiff_t r = 0, prefetched = 0;
#define ROWS(R)                                                                                                \
    for (; r + R <= n_rows; r += R) {                                                                          \
        const ptrdiff_t prefetch_to =                                                                          \
            k->ahead ? lines_before(storage, r + R, n_rows, head_dim) * STORED_LINE(storage) : 0;              \
        for (ptrdiff_t j = start; j < stop; j += DOTS / R)                                                     \
            score_rows_tile(storage, R, s + r * ld + j, ld, q + r * q_ld, q_ld, k, j, stop - j, head_dim, \
                            prefetched, prefetch_to);                                                          \
        prefetched = prefetch_to;                                                                              \
    }
        ROWS(4)
        ROWS(2)
        ROWS(1)
#undef ROWS
    }
}

static void adjust_rows(void *s_tile, ptrdiff_t ld, ptrdiff_t n_rows, ptrdiff_t n_keys, double root,
                        double softcap, const char *const *bias_rows, const uint32_t *words) {
    const VEC masked = splat(-(REAL)INFINITY), cap = splat((REAL)softcap), half = splat((REAL)root);
    const IVEC lane = lane_numbers();
    for (ptrdiff_t r = 0; r < n_rows; r++)
        for (ptrdiff_t j = 0; j < n_keys; j += LANES) {
            REAL *const s = (REAL *)s_tile + r * ld + j;
            VEC x = load(s);
            if (root != 1) x = half * (half * x);
            if (softcap > 0) x = cap * tanh_vector(x);
            if (bias_rows) {
                const VEC bias = load_upto(FASTATTN_REAL, bias_rows[r] + j * (ptrdiff_t)sizeof(REAL), n_keys - j);
                x = select_lanes((IVEC)(bias == masked), masked, x + bias);
            }
            if (words) {
                const LANE_INT word = words[j / 32 * n_rows + r] >> (j % 32);
                x = select_by_bit((word - (IVEC){}) >> lane, x, masked);
            }
            store(s, x);
        }
}

/* Vectors of one row of scores from s on, less `base`; past the n-th score as if masked. */
INLINE void load_scores(const int n_vectors, VEC x[], const REAL *s, ptrdiff_t n, VEC base) {
    const VEC masked = splat(-(REAL)INFINITY);
    const IVEC lane = lane_numbers();
#pragma GCC unroll 8
    for (int i = 0; i < n_vectors; i++) {
        x[i] = load(s + i * LANES) - base;
        if (n - i * LANES < LANES) x[i] = select_lanes((IVEC)(lane < (LANE_INT)(n - i * LANES)), x[i], masked);
    }
}

INLINE void softmax_rows_scaled(const int scaled, REAL *s, ptrdiff_t ld, REAL *row_max, REAL *row_sum,
                                ptrdiff_t n_rows, ptrdiff_t n_keys, REAL factor, int has_max) {
    enum { STEP = EXP2_KEYS };
    const VEC empty = splat(-(REAL)INFINITY);
    for (ptrdiff_t r = 0; r < n_rows; r++, s += ld) {
        VEC top = has_max ? splat(row_max[r]) : empty;
        if (!has_max) {
            for (ptrdiff_t j = 0; j < n_keys; j += LANES) {
                VEC x;
                load_scores(1, &x, s + j, n_keys - j, (VEC){});
                top = max(top, x);
            }
            top = max_lanes(top);
            row_max[r] = top[0];
        }
        /* -inf - 0 where the row is empty: -inf - -inf would be NaN. */
        const VEC base = select_lanes((IVEC)(top == empty), (VEC){}, top);
        VEC sum = {};
        ptrdiff_t j = 0;
        for (; j + STEP * LANES <= n_keys; j += STEP * LANES) {
            VEC x[STEP];
            load_scores(STEP, x, s + j, STEP * LANES, base);
            exp2_vectors(STEP, scaled, factor, x);
#pragma GCC unroll 8
            for (int i = 0; i < STEP; i++) store(s + j + i * LANES, x[i]);
            sum += sum_tree(x);
        }
        if (j < n_keys) { /* the same tree, as if the missing keys were masked */
            VEC x[STEP] = {};
            for (int i = 0; i < STEP && j + i * LANES < n_keys; i++) {
                load_scores(1, x + i, s + j + i * LANES, n_keys - j - i * LANES, base);
                exp2_vectors(1, scaled, factor, x + i);
                store(s + j + i * LANES, x[i]);
            }
            sum += sum_tree(x);
        }
        row_sum[r] = sum_lanes(sum)[0];
    }
}

static void softmax_rows(void *s, ptrdiff_t ld, void *row_max, void *row_sum, ptrdiff_t n_rows,
                         ptrdiff_t n_keys, double exponent_factor, int has_max) {
    if (exponent_factor == 1)
        softmax_rows_scaled(0, s, ld, row_max, row_sum, n_rows, n_keys, 1, has_max);
    else
        softmax_rows_scaled(1, s, ld, row_max, row_sum, n_rows, n_keys, (REAL)exponent_factor, has_max);
}

/* One register tile of `accumulate_rows`: R rows by V vectors of columns from e on, the last of n_last columns, over one
 * chunk of keys, `first` and the next; added to what acc holds where `adds`. Prefetches for each key n_lines cache lines
 * of the row ahead from the byte `prefetch` on. */
INLINE void accumulate_rows_tile(const int storage, const int R, const int V, REAL *acc, ptrdiff_t ld,
                                 const REAL *p, ptrdiff_t p_ld, const fastattn_rows *v, ptrdiff_t first,
                                 ptrdiff_t n_keys, ptrdiff_t e, const int n_last, int adds,
                                 ptrdiff_t prefetch, ptrdiff_t n_lines) {
    const char *row = v->at + first * v->row, *ahead = row + prefetch + (first < v->near ? v->ahead : v->far);
    const char *scale = storage == FASTATTN_INT8 ? v->scale + first * v->scale_row : NULL;
    VEC sum[4][8] = {};
    for (ptrdiff_t j = 0; j < n_keys; j++, row += v->row, ahead += v->row) {
        VEC x[8];
        if (j && first + j == v->near) ahead += v->far - v->ahead;
        for (ptrdiff_t i = 0; i < n_lines; i++) __builtin_prefetch(ahead + i * 64, 0, 2);
#pragma GCC unroll 8
        for (int i = 0; i < V; i++)
            x[i] = load_elements(storage, row, scale, e + i * LANES, i == V - 1 ? n_last : LANES);
        if (storage == FASTATTN_INT8) {
            if (n_lines && j % 8 == 0) __builtin_prefetch(scale + (first + j < v->near ? v->scale_ahead : v->scale_far), 0, 2);
            scale += v->scale_row;
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const REAL y = p[r * p_ld + j];
#pragma GCC unroll 8
            for (int i = 0; i < V; i++) sum[r][i] += x[i] * y;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int i = 0; i < V; i++) {
            REAL *const to = acc + r * ld + e + i * LANES;
            if (adds) sum[r][i] += load(to);
            store(to, sum[r][i]);
        }
}

/* R rows of `accumulate_rows` over one chunk of keys, all columns; prefetches the cache lines from the `line`-th on. */
INLINE void accumulate_rows_chunk(const int storage, const int R, REAL *acc, ptrdiff_t ld, const REAL *p,
                                  ptrdiff_t p_ld, const fastattn_rows *v, ptrdiff_t first, ptrdiff_t n_keys,
                                  ptrdiff_t value_dim, int adds, ptrdiff_t line, ptrdiff_t n_lines) {
    ptrdiff_t e = 0, prefetched = 0;
#define TILE(V, n_last)                                                                                        \
    do {                                                                                                       \
        const ptrdiff_t stop = e + (V - 1) * LANES + n_last;                                                   \
        const ptrdiff_t prefetch_to = n_lines ? n_lines * stop / value_dim : 0;                                \
        accumulate_rows_tile(storage, R, V, acc, ld, p, p_ld, v, first, n_keys, e, n_last, adds,               \
                             (line + prefetched) * 64, prefetch_to - prefetched);                              \
        e = stop, prefetched = prefetch_to;                                                                    \
    } while (0)
#define COLUMNS(V)                                                                                             \
    while (value_dim - e >= V * LANES && V <= ROW_VECTORS(R)) TILE(V, LANES)
    COLUMNS(8);
    COLUMNS(4);
    COLUMNS(2);
    COLUMNS(1);
#undef COLUMNS
    if (e < value_dim) TILE(1, (int)(value_dim - e));
#undef TILE
}

INLINE void accumulate_rows(const int storage, REAL *acc, ptrdiff_t ld, const REAL *p, ptrdiff_t p_ld,
                            ptrdiff_t n_rows, const fastattn_rows *v, ptrdiff_t n_keys, ptrdiff_t value_dim,
                            int adds) {
    /* From memory, values are read fastest in the order in which they lie. Two rows have registers for twice the columns
     * of four: with 4 rows and value_dim 128 (on AVX-512) one thread takes 0.81, two 0.79 to 0.96 of the time of 64
     * columns at a time (float32; 16 bits 0.94 to 0.96), with 8 and more rows up to 1.07. 2 cores of Zen 5, 2026-11-25,
     * interleaved A/B. */
    const int by_pairs = v->ahead && n_rows <= 4 && value_dim > ROW_VECTORS(4) * LANES;
    for (ptrdiff_t start = 0; start < n_keys; start += KEY_CHUNK) {
        const ptrdiff_t n = n_keys - start < KEY_CHUNK ? n_keys - start : KEY_CHUNK;
        ptrdiff_t r = 0, prefetched = 0;
#define ROWS(R)                                                                                                \
    for (; r + R <= n_rows; r += R) {                                                                          \
        const ptrdiff_t prefetch_to = v->ahead ? lines_before(storage, r + R, n_rows, value_dim) : 0;          \
        accumulate_rows_chunk(storage, R, acc + r * ld, ld, p + r * p_ld + start, p_ld, v, start, n,           \
                              value_dim, adds || start > 0, prefetched, prefetch_to - prefetched);             \
        prefetched = prefetch_to;                                                                              \
    }
        if (!by_pairs) ROWS(4)
        ROWS(2)
        ROWS(1)
#undef ROWS
    }
}

/* The kernels of the table, for each storage. */
#define OF_STORAGE(name, storage)                                                                              \
    static void score_rows_##name(void *s, ptrdiff_t ld, const void *q, ptrdiff_t q_ld,                        \
                                  ptrdiff_t n_rows, const fastattn_rows *k, ptrdiff_t n_keys,                  \
                                  ptrdiff_t head_dim) {                                                        \
        score_rows(storage, s, ld, q, q_ld, n_rows, k, n_keys, head_dim);                                      \
    }                                                                                                          \
    static void accumulate_rows_##name(void *acc, ptrdiff_t ld, const void *p, ptrdiff_t p_ld,                 \
                                       ptrdiff_t n_rows, const fastattn_rows *v, ptrdiff_t n_keys,             \
                                       ptrdiff_t value_dim, int adds) {                                        \
        accumulate_rows(storage, acc, ld, p, p_ld, n_rows, v, n_keys, value_dim, adds);                        \
    }
EACH_READ(EACH_STORED, OF_STORAGE)
#undef OF_STORAGE

static void accumulate_rows_nonfinite(void *acc, ptrdiff_t ld, const void *p, ptrdiff_t p_ld,
                                      ptrdiff_t n_rows, const char *v, ptrdiff_t v_row, ptrdiff_t n_keys,
                                      ptrdiff_t value_dim, const char *const *bias_rows,
                                      const uint32_t *words, void *clean) {
    const fastattn_values values = {v, v_row, sizeof(REAL), PANEL_ROW};
    const fastattn_rows finite = {.at = clean, .row = value_dim * (ptrdiff_t)sizeof(REAL)};
    clean_values(clean, &values, n_keys, value_dim);
    accumulate_rows_real(acc, ld, p, p_ld, n_rows, &finite, n_keys, value_dim, 0);
    add_nonfinite(acc, ld, 1, p, p_ld, 1, n_rows, &values, n_keys, value_dim, bias_rows, words);
}

static void merge_rows(void *acc_v, void *row_max_v, void *row_sum_v, const void *acc_2_v,
                       const void *row_max_2_v, const void *row_sum_2_v, ptrdiff_t n_rows, ptrdiff_t ld,
                       double exponent_factor) {
    REAL *acc = acc_v, *const row_max = row_max_v, *const row_sum = row_sum_v;
    const REAL *acc_2 = acc_2_v, *const row_max_2 = row_max_2_v, *const row_sum_2 = row_sum_2_v;
    for (ptrdiff_t r = 0; r < n_rows; r++, acc += ld, acc_2 += ld) {
        VEC x[2];
        row_max[r] = merge_factors(x, splat(row_max[r]), splat(row_max_2[r]), exponent_factor)[0];
        row_sum[r] = row_sum[r] * x[0][0] + row_sum_2[r] * x[1][0];
        for (ptrdiff_t c = 0; c < ld; c += LANES)
            store(acc + c, load(acc + c) * x[0] + load(acc_2 + c) * x[1]);
    }
}
