/* Recurrent forms of attention: decays, and the triangular system of the delta rule. Included by kernels.c.
 *
 * A decay is a natural logarithm. Sums of decays are in two REALs, high and low, so that differences of long sums are
 * those of the decays to a rounding. */

/* exp(high + low), |low| far below |high|; 0 from the logarithm of the smallest normal number on, inf from that of the
 * largest on, NaN for NaN. */
INLINE void exp_vectors(const int n, VEC high[], const VEC low[]) {
    const REAL round = (REAL)1.5 * (REAL)((LANE_INT)1 << MANTISSA_BITS) - EXPONENT_MIN;
    const VEC lowest = splat((REAL)(EXPONENT_MIN * LN2)), highest = splat((REAL)((3 - EXPONENT_MIN) * LN2));
    VEC half_power[FEATURE_VECTORS], y[FEATURE_VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < n; i++) {
        const VEC x = max(lowest, min(highest, high[i]));
        const VEC rest = (VEC)((IVEC)low[i] & (IVEC)(x == high[i])); /* 0 beyond either, where it may be large */
        half_power[i] = x * (REAL)LOG2E + round;
        const VEC whole = half_power[i] - round;
        high[i] = (((x - whole * (REAL)LN2_HIGH) - whole * (REAL)LN2_LOW) + rest) * (REAL)LOG2E;
        half_power[i] = (VEC)((IVEC)half_power[i] << MANTISSA_BITS);
    }
    twice_exp2m1_over_f(n, high, y);
#pragma GCC unroll 4
    for (int i = 0; i < n; i++) high[i] = (y[i] * high[i] + 2) * half_power[i];
}

static int copy_rows(void *tile, ptrdiff_t ld, const char *from, ptrdiff_t row, ptrdiff_t n, ptrdiff_t n_cols) {
    IVEC nonfinite = {};
    for (ptrdiff_t i = 0; i < n; i++, from += row) {
        REAL *const to = (REAL *)tile + i * ld;
        IVEC own = {};
        ptrdiff_t c = 0;
        for (; c + LANES <= n_cols; c += LANES) {
            const VEC x = load((const REAL *)from + c);
            own |= nonfinite_lanes(x);
            store(to + c, x);
        }
        if (c < n_cols) {
            const VEC x = load_partial((const REAL *)from + c, (int)(n_cols - c));
            own |= nonfinite_lanes(x);
            store(to + c, x);
            c += LANES;
        }
        for (; c < ld; c += LANES) store(to + c, (VEC){});
        if (i > 0) nonfinite |= own;
    }
    return any_lane(nonfinite);
}

static void store_rows(char *to, ptrdiff_t row, const void *tile, ptrdiff_t ld, ptrdiff_t n, ptrdiff_t n_cols) {
    for (const REAL *from = tile; n > 0; n--, to += row, from += ld) {
        ptrdiff_t c = 0;
        for (; c + LANES <= n_cols; c += LANES) store((REAL *)to + c, load(from + c));
        if (c < n_cols) store_partial((REAL *)to + c, load(from + c), (int)(n_cols - c));
    }
}

static void exponentials(void *to, const void *high, const void *low, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i += LANES) {
        VEC x = load((const REAL *)high + i);
        const VEC rest = load((const REAL *)low + i);
        exp_vectors(1, &x, &rest);
        store((REAL *)to + i, x);
    }
}

static ptrdiff_t count_stable(const void *keys, const void *beta, ptrdiff_t ld, ptrdiff_t n, double margin) {
    for (ptrdiff_t t = 0; t < n; t++) {
        const REAL *const row = (const REAL *)keys + t * ld;
        VEC sum = {};
        for (ptrdiff_t d = 0; d < ld; d += LANES) sum += load(row + d) * load(row + d);
        const REAL rate = ((const REAL *)beta)[t] * sum_lanes(sum)[0];
        if (!(rate >= (REAL)-margin && rate <= (REAL)(2 + margin))) return t;
    }
    return n;
}

/* (high, low) += x, with Knuth's TwoSum: the error of the sum of high goes into low. */
INLINE void add_exactly(VEC *high, VEC *low, VEC x) {
    const VEC sum = *high + x, other = sum - *high;
    *low += (*high - (sum - other)) + (x - other);
    *high = sum;
}

static void sum_token_decays(void *high_sums, void *low_sums, void *starts, void *ends, const void *decay, ptrdiff_t n) {
    const REAL *const decays = decay;
    REAL *const highs = high_sums, *const lows = low_sums;
    const double first = decays[0];
    double total = 0, rest = 0;
    for (ptrdiff_t t = 0; t < n; t++) {
        /* Knuth's TwoSum. */
        const double more = t > 0 ? decays[t] : 0, sum = total + more, other = sum - total;
        rest += (total - (sum - other)) + (more - other);
        total = sum;
        highs[t] = (REAL)total;
        lows[t] = (REAL)((total - highs[t]) + rest);
    }
    for (ptrdiff_t t = 0; t < n; t += LANES) {
        REAL high[2][LANES] = {}, low[2][LANES] = {};
        const int n_lanes = n - t < LANES ? (int)(n - t) : LANES;
        for (int i = 0; i < n_lanes; i++) {
            const double sum = highs[t + i], other = lows[t + i];
            high[0][i] = (REAL)(first + sum);
            low[0][i] = (REAL)((first - (high[0][i] - sum)) + other); /* any number where that is beyond all exponents */
            high[1][i] = (REAL)(total - sum);
            low[1][i] = (REAL)(((total - sum) - high[1][i]) + (rest - other));
        }
        VEC x[2] = {load(high[0]), load(high[1])};
        const VEC y[2] = {load(low[0]), load(low[1])};
        exp_vectors(2, x, y);
        store((REAL *)starts + t, x[0]);
        store((REAL *)ends + t, x[1]);
    }
}

static ptrdiff_t sum_decays(void *high_rows, void *low_rows, const void *decay, ptrdiff_t ld, ptrdiff_t n, ptrdiff_t dim,
                            double most) {
    REAL *high = high_rows, *low = low_rows;
    ptrdiff_t fits = n;
    for (ptrdiff_t d = 0; d < dim; d += LANES) {
        VEC sum = {}, rest = {}, least = {}, greatest = {};
        store(high + d, sum);
        store(low + d, rest);
        for (ptrdiff_t t = 1; t < fits; t++) {
            add_exactly(&sum, &rest, load((const REAL *)decay + t * ld + d));
            least = min(sum, least);
            greatest = max(sum, greatest);
            const IVEC is_near = (IVEC)(greatest - least <= (REAL)most) & (IVEC)(sum == sum);
            if (any_lane(~is_near)) {
                fits = t;
                break;
            }
            store(high + t * ld + d, sum);
            store(low + t * ld + d, rest);
        }
    }
    return fits;
}

static void decay_columns(void *up_rows, void *down_rows, void *before, void *after, const void *first, ptrdiff_t ld,
                          ptrdiff_t n, ptrdiff_t dim) {
    for (ptrdiff_t d = 0; d < dim; d += LANES) {
        REAL *const up = (REAL *)up_rows + d, *const down = (REAL *)down_rows + d;
        VEC least = {}, greatest = {};
        for (ptrdiff_t t = 1; t < n; t++) {
            const VEC x = load(up + t * ld);
            least = min(x, least);
            greatest = max(x, greatest);
        }
        /* The factors of the last token are powers of two, as that of the state is then: what it adds loses no bit. */
        const REAL round = (REAL)1.5 * (REAL)((LANE_INT)1 << MANTISSA_BITS);
        const VEC last = load(up + (n - 1) * ld), last_low = load(down + (n - 1) * ld);
        const VEC power = ((last - (least + greatest) * (REAL)0.5) * (REAL)LOG2E + round) - round;
        const VEC step = power * (REAL)LN2_HIGH, step_low = power * (REAL)LN2_LOW;
        VEC whole = load((const REAL *)first + d), rest = last_low - step_low;
        add_exactly(&whole, &rest, last);
        add_exactly(&whole, &rest, -step);
        rest = select_lanes((IVEC)(nonfinite_lanes(whole) != 0), (VEC){}, rest);
        exp_vectors(1, &whole, &rest);
        store((REAL *)before + d, whole);
        for (ptrdiff_t t = 0; t < n; t++) {
            VEC x[2], low[2];
            x[0] = load(up + t * ld);
            low[0] = load(down + t * ld);
            add_exactly(&x[0], &low[0], -last);
            add_exactly(&x[0], &low[0], step);
            low[0] += step_low - last_low;
            x[1] = -x[0];
            low[1] = -low[0];
            exp_vectors(2, x, low);
            store(up + t * ld, x[0]);
            store(down + t * ld, x[1]);
        }
        store((REAL *)after + d, load(up + (n - 1) * ld));
    }
}

/* `weigh_tokens` for n rows from row j on, of the vector of lanes whose first is `lane`. */
INLINE void weigh_rows(const int n, REAL *w, ptrdiff_t ld, ptrdiff_t j, ptrdiff_t lane, VEC high, VEC low,
                       const REAL *key_high, const REAL *key_low) {
    VEC weight[FEATURE_VECTORS], rest[FEATURE_VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < n; i++) {
        weight[i] = high - key_high[j + i];
        rest[i] = low - key_low[j + i];
    }
    exp_vectors(n, weight, rest);
#pragma GCC unroll 4
    for (int i = 0; i < n; i++)
        store(w + i * ld, select_lanes(lane_numbers() >= (LANE_INT)(j + i - lane), weight[i], (VEC){}));
}

static void weigh_tokens(void *weights, ptrdiff_t ld, const ptrdiff_t *stops, const void *high_sums, const void *low_sums) {
    const REAL *const sums = high_sums, *const rests = low_sums;
    for (ptrdiff_t lane = 0; lane < ld; lane += LANES) {
        const ptrdiff_t n_keys = *stops++;
        const VEC high = load(sums + lane), low = load(rests + lane);
        REAL *const w = (REAL *)weights + lane;
        ptrdiff_t j = 0;
        for (; j + 4 <= n_keys; j += 4) weigh_rows(4, w + j * ld, ld, j, lane, high, low, sums, rests);
        for (; j < n_keys; j++) weigh_rows(1, w + j * ld, ld, j, lane, high, low, sums, rests);
    }
}

static void gate(void *s_tile, ptrdiff_t ld, const ptrdiff_t *stops, ptrdiff_t seen, const void *factor, const void *weights) {
    for (ptrdiff_t lane = 0; lane < ld; lane += LANES) {
        const ptrdiff_t n_keys = *stops++;
        const VEC scale = factor ? load((const REAL *)factor + lane) : splat(1);
        REAL *s = (REAL *)s_tile + lane;
        for (ptrdiff_t j = 0; j < n_keys; j++, s += ld) {
            const VEC x = load(s) * (weights ? scale * load((const REAL *)weights + j * ld + lane) : scale);
            store(s, select_lanes(lane_numbers() > (LANE_INT)(j - lane - seen), x, (VEC){}));
        }
    }
}

/* Rows and vectors of columns that stay in registers. A row waits for two operations on the one before it, so that two
 * vectors are worked on at once where there are 32 registers: one at a time takes 1.00 to 1.02 of a call by the delta rule,
 * heads of 32 and 64 (two threads of Zen 5, AVX-512, 2026-11-29, interleaved). */
#define SYSTEM_ROWS 8
#define SYSTEM_VECTORS (TILE_ROWS * TILE_VECTORS >= 24 ? 2 : 1)

/* n rows of `substitute` from row `first` on, those before being solved, or with `back` of `substitute_back`, where those from
 * first + n to stop - 1 are. */
INLINE void solve_rows(const int n, const int V, const int back, REAL *u, const REAL *factor, const REAL *v, const REAL *rate,
                       ptrdiff_t ld, const REAL *s, ptrdiff_t s_ld, ptrdiff_t first, ptrdiff_t stop, IVEC *nonfinite) {
#define SCORE(earlier, later) s[back ? (later) * s_ld + (earlier) : (earlier) * s_ld + (later)]
    VEC x[SYSTEM_ROWS][SYSTEM_VECTORS] = {};
    for (ptrdiff_t j = back ? first + n : 0; j < (back ? stop : first); j++)
#pragma GCC unroll 8
        for (int t = 0; t < n; t++)
#pragma GCC unroll 2
            for (int i = 0; i < V; i++) x[t][i] += load(u + j * ld + i * LANES) * SCORE(j, first + t);
#pragma GCC unroll 8
    for (int t = 0; t < n; t++)
#pragma GCC unroll 2
        for (int i = 0; i < V; i++) {
            const VEC own = load(u + (first + t) * ld + i * LANES);
            x[t][i] += back ? own : factor[first + t] * own;
        }
#pragma GCC unroll 8
    for (int step = 0; step < n; step++) {
        const int t = back ? n - 1 - step : step;
#pragma GCC unroll 2
        for (int i = 0; i < V; i++) {
            if (!back) x[t][i] += rate[first + t] * load(v + (first + t) * ld + i * LANES);
            *nonfinite |= nonfinite_lanes(x[t][i]);
            store(u + (first + t) * ld + i * LANES, x[t][i]);
        }
#pragma GCC unroll 8
        for (int next = step + 1; next < n; next++) {
            const int later = back ? n - 1 - next : next;
#pragma GCC unroll 2
            for (int i = 0; i < V; i++) x[later][i] += x[t][i] * SCORE(first + t, first + later);
        }
    }
#undef SCORE
}

INLINE void solve_columns(const int V, const int back, REAL *u, const REAL *factor, const REAL *v, const REAL *rate,
                          ptrdiff_t ld, const REAL *s, ptrdiff_t s_ld, ptrdiff_t n, IVEC *nonfinite) {
    const ptrdiff_t blocks = (n + SYSTEM_ROWS - 1) / SYSTEM_ROWS;
    for (ptrdiff_t block = 0; block < blocks; block++) {
        const ptrdiff_t first = (back ? blocks - 1 - block : block) * SYSTEM_ROWS;
        switch (n - first) {
#define CASE(rows) case rows: solve_rows(rows, V, back, u, factor, v, rate, ld, s, s_ld, first, n, nonfinite); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
        default: solve_rows(SYSTEM_ROWS, V, back, u, factor, v, rate, ld, s, s_ld, first, n, nonfinite);
#undef CASE
        }
    }
}

static int substitute(void *u, const void *factor, const void *v, const void *rate, ptrdiff_t ld, const void *s, ptrdiff_t s_ld,
                      ptrdiff_t n, ptrdiff_t n_cols) {
    IVEC nonfinite = {};
    ptrdiff_t e = 0;
#define COLUMNS(V) \
    solve_columns(V, 0, (REAL *)u + e, factor, (const REAL *)v + e, rate, ld, s, s_ld, n, &nonfinite)
    for (; e + SYSTEM_VECTORS * LANES <= n_cols; e += SYSTEM_VECTORS * LANES) COLUMNS(SYSTEM_VECTORS);
    if (e < n_cols) COLUMNS(1);
#undef COLUMNS
    return any_lane(nonfinite);
}

static void substitute_back(void *u, ptrdiff_t ld, const void *s, ptrdiff_t s_ld, ptrdiff_t n, ptrdiff_t n_cols) {
    IVEC nonfinite = {};
    for (ptrdiff_t e = 0; e < n_cols; e += LANES)
        solve_columns(1, 1, (REAL *)u + e, NULL, NULL, NULL, ld, s, s_ld, n, &nonfinite);
}

static void scale_rows(void *to, const void *from, const void *factor, ptrdiff_t ld, ptrdiff_t n, ptrdiff_t n_cols) {
    for (ptrdiff_t t = 0; t < n; t++) {
        const REAL scale = ((const REAL *)factor)[t];
        for (ptrdiff_t e = 0; e < n_cols; e += LANES)
            store((REAL *)to + t * ld + e, scale * load((const REAL *)from + t * ld + e));
    }
}

static void multiply(void *to, const void *a, const void *b, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i += LANES)
        store((REAL *)to + i, load((const REAL *)a + i) * load((const REAL *)b + i));
}

static void advance_sums(double *restrict sums, void *restrict rounded, const void *restrict part, const void *before,
                         const void *after, ptrdiff_t ld, ptrdiff_t dim, ptrdiff_t n_cols) {
    const REAL *from = part;
    REAL *to = rounded;
    for (ptrdiff_t d = 0; d < dim; d++, sums += ld, from += ld, to += ld) {
        const double added = after ? ((const REAL *)after)[d] : 1, kept = added * (before ? ((const REAL *)before)[d] : 1);
        for (ptrdiff_t e = 0; e < n_cols; e++) to[e] = (REAL)(sums[e] = kept * sums[e] + added * from[e]);
    }
}

/* `advance_token` for the columns of V vectors, the last of `last` elements. */
INLINE void advance_columns(const int V, int last, char *to, const char *from, ptrdiff_t to_row, ptrdiff_t from_row,
                            const REAL *k, const REAL *v, const REAL *kept, const REAL *beta, const REAL *q, ptrdiff_t ld,
                            ptrdiff_t n_queries, ptrdiff_t dim, REAL *acc, ptrdiff_t acc_ld) {
    enum { QUERIES = 4 };
#define LOAD(at, i) ((i) == V - 1 && last < LANES ? load_partial(at, last) : load(at))
    VEC u[4];
#pragma GCC unroll 4
    for (int i = 0; i < V; i++) u[i] = LOAD(v + i * LANES, i);
    if (beta) {
        VEC answer[2][4] = {};
        if (from)
            for (ptrdiff_t d = 0; d < dim; d++) {
                const REAL weight = kept[d] * k[d];
#pragma GCC unroll 4
                for (int i = 0; i < V; i++)
                    answer[d % 2][i] += weight * LOAD(from + d * from_row + i * VECTOR_BYTES, i);
            }
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) u[i] = *beta * (u[i] - (answer[0][i] + answer[1][i]));
    }
    for (ptrdiff_t first = 0; first < n_queries || first == 0; first += QUERIES) {
        VEC sum[QUERIES][4] = {};
        const int n = n_queries - first < QUERIES ? (int)(n_queries - first) : QUERIES;
        for (ptrdiff_t d = 0; d < dim; d++) {
            VEC x[4];
#pragma GCC unroll 4
            for (int i = 0; i < V; i++) {
                char *const at = to + d * to_row + i * VECTOR_BYTES;
                if (first > 0) {
                    x[i] = LOAD(at, i);
                    continue;
                }
                x[i] = round_product(k[d] * u[i]); /* the same product is fused in each column */
                if (from) x[i] += kept[d] * LOAD(from + d * from_row + i * VECTOR_BYTES, i);
                if (i == V - 1 && last < LANES)
                    store_partial(at, x[i], last);
                else
                    store(at, x[i]);
            }
            for (int g = 0; g < n; g++)
#pragma GCC unroll 4
                for (int i = 0; i < V; i++) sum[g][i] += q[(first + g) * ld + d] * x[i];
        }
        for (int g = 0; g < n; g++)
#pragma GCC unroll 4
            for (int i = 0; i < V; i++) store(acc + (first + g) * acc_ld + i * LANES, sum[g][i]);
    }
#undef LOAD
}

static void advance_token(char *to, const char *from, ptrdiff_t to_row, ptrdiff_t from_row, const void *k, const void *v,
                          const void *kept, const void *beta, const void *q, ptrdiff_t ld, ptrdiff_t n_queries,
                          ptrdiff_t dim, ptrdiff_t n_cols, void *acc, ptrdiff_t acc_ld) {
    for (ptrdiff_t e = 0; e < n_cols; e += 4 * LANES) {
        const ptrdiff_t left = n_cols - e, vectors = (left + LANES - 1) / LANES;
        const size_t at = (size_t)e * sizeof(REAL);
        const int last = vectors > 4 || left % LANES == 0 ? LANES : (int)(left % LANES);
#define COLUMNS(V)                                                                                             \
    advance_columns(V, last, to + at, from ? from + at : NULL, to_row, from_row, k, (const REAL *)v + e, kept, beta, q, ld, \
                    n_queries, dim, (REAL *)acc + e, acc_ld)
        if (vectors >= 4)
            COLUMNS(4);
        else if (vectors == 3)
            COLUMNS(3);
        else if (vectors == 2)
            COLUMNS(2);
        else
            COLUMNS(1);
#undef COLUMNS
    }
}
