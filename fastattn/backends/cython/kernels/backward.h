/* The kernels that only gradients need; see kernels.h, "Gradients". Their five products are those of `score` and
 * `accumulate`. Included by body.h. */

/* The sum over c < n of a[c] * b[c], in double. */
static double NAME(dot)(const void *a, const void *b, ptrdiff_t n) {
    const NAME(real_unaligned) *const x = a, *const y = b;
    double sum[8] = {};
    ptrdiff_t c = 0;
    for (; c + 8 <= n; c += 8)
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) sum[i] += (double)x[c + i] * (double)y[c + i];
    for (int i = 0; c < n; c++, i++) sum[i] += (double)x[c] * (double)y[c];
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

/* Whether any of n REAL is NaN or inf. */
static int NAME(has_nonfinite)(const void *a, ptrdiff_t n) {
    const NAME(real_unaligned) *const x = a;
    VEC rest = {};
    REAL last = 0;
    ptrdiff_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        const VEC y = NAME(load)(x + c);
        rest += y - y; /* 0, or NaN */
    }
    for (; c < n; c++) last += x[c] - x[c];
    for (int i = 0; i < LANES; i++) last += rest[i];
    return last != 0;
}

/* The difference of a score and its row's lse is rounded to units of the lse, which would be the largest error of a weight.
 * So the weight is also multiplied by the power of 2 of what that leaves, to first order: of a unit of an lse below 2^10
 * the second is nothing. What is left is known where the lse is larger than the score; other weights are small. */
INLINE void NAME(differentiate_scaled)(const int scaled, const int drops, REAL *s_tile, REAL *change_tile,
                                       const REAL *high, const REAL *low, const REAL *delta, ptrdiff_t ld,
                                       ptrdiff_t n_keys, REAL factor, const uint32_t *words, REAL kept_factor) {
    const VEC masked = NAME(splat)(-(REAL)INFINITY);
    const REAL slope = (REAL)(LN2 * (scaled ? factor : 1));
    for (ptrdiff_t lane = 0; lane < ld; lane += LANES) {
        const VEC base = NAME(load)(high + lane), rest = NAME(load)(low + lane), mean = NAME(load)(delta + lane);
        REAL *s = s_tile + lane, *change = change_tile + lane;
#define KEYS(n)                                                                                                \
    do {                                                                                                       \
        VEC x[n], rounded[n];                                                                                  \
        IVEC allowed[n], word = {};                                                                            \
        if (drops) word = NAME(load_words)(words + j / 32 * ld + lane) >> (j % 32);                            \
        _Pragma("GCC unroll 8") for (int i = 0; i < n; i++) {                                                  \
            const VEC score = NAME(load)(s + i * ld);                                                          \
            allowed[i] = (IVEC)(score != masked);                                                              \
            x[i] = score - base;                                                                               \
            rounded[i] = (score - (x[i] + base)) - rest;                                                       \
        }                                                                                                      \
        NAME(exp2)(n, scaled, factor, x);                                                                      \
        _Pragma("GCC unroll 8") for (int i = 0; i < n; i++) {                                                  \
            /* 0 stays 0 where the lse, or the difference, is inf and its rest NaN. */                         \
            const VEC exact = NAME(select)((IVEC)(x[i] == 0), x[i], x[i] + x[i] * (rounded[i] * slope));       \
            const VEC weight = (VEC)((IVEC)exact & allowed[i]);                                                \
            VEC kept = weight, of_kept = NAME(load)(change + i * ld);                                          \
            if (drops) {                                                                                       \
                kept = NAME(select_by_bit)(word >> i, kept * kept_factor, (VEC){});                                 \
                of_kept = NAME(select_by_bit)(word >> i, of_kept * kept_factor, (VEC){});                           \
            }                                                                                                  \
            NAME(store)(change + i * ld, (VEC)((IVEC)(weight * (of_kept - mean)) & allowed[i]));               \
            NAME(store)(s + i * ld, kept);                                                                     \
        }                                                                                                      \
    } while (0)
        ptrdiff_t j = 0;
        for (; j + EXP2_KEYS <= n_keys; j += EXP2_KEYS, s += EXP2_KEYS * ld, change += EXP2_KEYS * ld) KEYS(EXP2_KEYS);
        for (; j < n_keys; j++, s += ld, change += ld) KEYS(1);
#undef KEYS
    }
}

static void NAME(differentiate)(void *s, void *change, const void *high, const void *low, const void *delta, ptrdiff_t ld,
                                ptrdiff_t n_keys, double exponent_factor, const uint32_t *words, double kept_share) {
    const REAL factor = (REAL)exponent_factor, kept_factor = (REAL)(1 / kept_share);
#define DIFFERENTIATE(scaled, drops)                                                                           \
    NAME(differentiate_scaled)(scaled, drops, s, change, high, low, delta, ld, n_keys, factor, words, kept_factor)
    if (words)
        DIFFERENTIATE(1, 1);
    else if (factor == 1)
        DIFFERENTIATE(0, 0);
    else
        DIFFERENTIATE(1, 0);
#undef DIFFERENTIATE
}

static void NAME(add_columns)(char *const *rows, ptrdiff_t stride, ptrdiff_t n_rows, const void *tile, ptrdiff_t ld,
                              ptrdiff_t n_keys) {
    const REAL *src = tile;
    const ptrdiff_t blocked = stride == sizeof(REAL) ? n_keys / LANES * LANES : 0;
    for (ptrdiff_t first = 0; first < n_rows; first += LANES) {
        const int n_live = n_rows - first < LANES ? (int)(n_rows - first) : LANES;
        ptrdiff_t j = 0;
        for (; j < blocked; j += LANES) {
            VEC x[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) x[i] = NAME(load)(src + (j + i) * ld + first);
            NAME(transpose)(x);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                if (i >= n_live) break;
                char *const to = rows[first + i] + j * stride;
                NAME(store)(to, NAME(load)(to) + x[i]);
            }
        }
        for (; j < n_keys; j++)
            for (int i = 0; i < n_live; i++) {
                char *const to = rows[first + i] + j * stride;
                const REAL sum = NAME(scalar)(to) + src[j * ld + first + i];
                memcpy(to, &sum, sizeof sum);
            }
    }
}

static void NAME(uncap)(void *change_tile, const void *capped_tile, ptrdiff_t ld, ptrdiff_t n_keys, double softcap) {
    REAL *change = change_tile;
    const REAL *capped = capped_tile;
    const VEC inverse = NAME(splat)((REAL)(1 / softcap));
    for (ptrdiff_t at = 0; at < n_keys * ld; at += LANES) {
        const VEC x = NAME(load)(change + at), ratio = NAME(load)(capped + at) * inverse;
        NAME(store)(change + at, NAME(select)((IVEC)(x == 0), x, x * ((1 - ratio) * (1 + ratio))));
    }
}
