/* The kernels that only gradients need; see kernels.h, "Gradients". Their five products are those of `score` and
 * `accumulate`. Included by kernels.c. */

/* The sum over c < n of a[c] * b[c], in double. */
static double dot(const void *a, const void *b, ptrdiff_t n) {
    const real_unaligned *const x = a, *const y = b;
    double sum[8] = {};
    ptrdiff_t c = 0;
    for (; c + 8 <= n; c += 8)
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) sum[i] += (double)x[c + i] * (double)y[c + i];
    for (int i = 0; c < n; c++, i++) sum[i] += (double)x[c] * (double)y[c];
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

/* Whether any of n REAL is NaN or inf. */
static int has_nonfinite(const void *a, ptrdiff_t n) {
    const real_unaligned *const x = a;
    VEC rest = {};
    REAL last = 0;
    ptrdiff_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        const VEC y = load(x + c);
        rest += y - y; /* 0, or NaN */
    }
    for (; c < n; c++) last += x[c] - x[c];
    for (int i = 0; i < LANES; i++) last += rest[i];
    return last != 0;
}

/* Each x becomes 2^(factor * x) * (1 + correction), factor >= 1 and |correction| <= 1/2, for x of any size and sign: 0 and
 * inf beyond what REAL holds, NaN for NaN. */
INLINE void exp2_of_any(const int n, const int scaled, REAL factor, VEC x[], const VEC correction[]) {
    const VEC highest = splat((3 - EXPONENT_MIN) / factor); /* of which the power is inf, by its exponent alone */
    VEC half_power[8], y[8];
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) x[i] = min(highest, x[i]);
    split_exponent(n, scaled, factor, x, half_power);
    twice_exp2m1_over_f(n, x, y);
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) y[i] = y[i] * x[i] + 2;
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) y[i] += y[i] * correction[i];
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) x[i] = y[i] * half_power[i];
}

/* Above this, times the factor, the first-order correction of an exponent is not exact. */
#define CORRECTED ((REAL)(REAL_BITS == 32 ? 0x1p-12 : 0x1p-27))
#define LARGEST ((REAL)(REAL_BITS == 32 ? (double)FLT_MAX : DBL_MAX))

/* score - lse is rounded to a unit of the lse, which would be the largest error of a weight. So the weight is multiplied
 * by the power of 2 of the remainder, to first order: for an lse below 2^10 the second order is lost in rounding. With
 * is_large the remainder may be large, and is added to the difference first. The remainder is exact where the lse is
 * larger than the score; other weights are small, or their lse is not of these scores. */
INLINE void differentiate_scaled(const int scaled, const int drops, const int is_large, REAL *s_tile,
                                 REAL *change_tile, const REAL *high, const REAL *low, const REAL *delta,
                                 ptrdiff_t ld, ptrdiff_t n_keys, REAL factor, const uint32_t *words,
                                 REAL kept_factor) {
    const VEC masked = splat(-(REAL)INFINITY), half = splat((REAL)0.5), largest = splat(LARGEST);
    const VEC corrected = splat(CORRECTED / factor);
    const REAL slope = (REAL)(LN2 * (scaled ? factor : 1));
    for (ptrdiff_t lane = 0; lane < ld; lane += LANES) {
        const VEC base = load(high + lane), rest = load(low + lane), mean = load(delta + lane);
        REAL *s = s_tile + lane, *change = change_tile ? change_tile + lane : NULL;
#define KEYS(n)                                                                                                \
    do {                                                                                                       \
        VEC x[n], correction[n];                                                                               \
        IVEC allowed[n], word = {};                                                                            \
        if (drops) word = load_words(words + j / 32 * ld + lane) >> (j % 32);                                  \
        _Pragma("GCC unroll 8") for (int i = 0; i < n; i++) {                                                  \
            const VEC score = load(s + i * ld);                                                                \
            allowed[i] = (IVEC)(score != masked);                                                              \
            x[i] = score - base;                                                                               \
            VEC left = (score - (x[i] + base)) - rest;                                                         \
            if (is_large) {                                                                                    \
                /* NaN beside an infinite difference must not change it. */                                    \
                left = min(largest, max(left, -largest));                                                      \
                const IVEC small = (IVEC)(max(left, -left) <= corrected);                                      \
                const VEC sum = x[i] + left;                                                                   \
                left = select_lanes(small, left, left - (sum - x[i]));                                         \
                x[i] = select_lanes(small, x[i], sum);                                                         \
            }                                                                                                  \
            correction[i] = min(half, max(left * slope, -half));                                               \
        }                                                                                                      \
        exp2_of_any(n, scaled, factor, x, correction);                                                         \
        _Pragma("GCC unroll 8") for (int i = 0; i < n; i++) {                                                  \
            const VEC weight = (VEC)((IVEC)x[i] & allowed[i]);                                                 \
            const VEC kept = drops ? select_by_bit(word >> i, weight * kept_factor, (VEC){}) : weight;         \
            store(s + i * ld, kept);                                                                           \
            if (!change) continue;                                                                             \
            VEC of_kept = load(change + i * ld);                                                               \
            if (drops) of_kept = select_by_bit(word >> i, of_kept * kept_factor, (VEC){});                     \
            store(change + i * ld, (VEC)((IVEC)(weight * (of_kept - mean)) & allowed[i]));                     \
        }                                                                                                      \
    } while (0)
        ptrdiff_t j = 0;
        for (; j + EXP2_KEYS <= n_keys; j += EXP2_KEYS) {
            KEYS(EXP2_KEYS);
            s += EXP2_KEYS * ld;
            if (change) change += EXP2_KEYS * ld;
        }
        for (; j < n_keys; j++) {
            KEYS(1);
            s += ld;
            if (change) change += ld;
        }
#undef KEYS
    }
}

static void differentiate(void *s, void *change, const void *high, const void *low, const void *delta,
                          ptrdiff_t ld, ptrdiff_t n_keys, double exponent_factor, int is_large,
                          const uint32_t *words, double kept_share) {
    const REAL factor = (REAL)exponent_factor, kept_factor = (REAL)(1 / kept_share);
#define DIFFERENTIATE(scaled, drops, is_large)                                                                 \
    differentiate_scaled(scaled, drops, is_large, s, change, high, low, delta, ld, n_keys, factor, words,      \
                               kept_factor)
    if (words && is_large)
        DIFFERENTIATE(1, 1, 1);
    else if (words)
        DIFFERENTIATE(1, 1, 0);
    else if (is_large)
        DIFFERENTIATE(1, 0, 1);
    else if (factor == 1)
        DIFFERENTIATE(0, 0, 0);
    else
        DIFFERENTIATE(1, 0, 0);
#undef DIFFERENTIATE
}

static double largest_square(const void *rows, ptrdiff_t n_rows, ptrdiff_t ld) {
    const REAL *row = rows;
    VEC largest = {};
    for (ptrdiff_t left = n_rows; left > 0; left -= LANES) {
        VEC sum[LANES] = {};
        for (int i = 0; i < LANES && i < left; i++, row += ld)
            for (ptrdiff_t c = 0; c < ld; c += LANES) {
                const VEC x = load(row + c);
                sum[i] += x * x;
            }
        transpose(sum);
        for (int i = 1; i < LANES; i++) sum[0] += sum[i];
        largest = max(sum[0], largest);
    }
    REAL square = 0;
    for (int i = 0; i < LANES; i++) square = largest[i] > square ? largest[i] : square;
    return square;
}

static void find_largest(void *tile_max, void *largest, const void *s, const void *sizes, ptrdiff_t ld,
                         ptrdiff_t n_keys) {
    for (ptrdiff_t lane = 0; lane < ld; lane += LANES) {
        REAL *const to_max = (REAL *)tile_max + lane, *const to_largest = (REAL *)largest + lane;
        VEC top = load(to_max), size = load(to_largest);
        for (ptrdiff_t j = 0; j < n_keys; j++) {
            const VEC score = load((const REAL *)s + j * ld + lane);
            const IVEC allowed = (IVEC)(score != -(REAL)INFINITY);
            top = max(top, score);
            size = max(size, (VEC)((IVEC)splat(((const REAL *)sizes)[j]) & allowed));
        }
        store(to_max, top);
        store(to_largest, size);
    }
}

static void add_columns(char *const *rows, ptrdiff_t stride, ptrdiff_t n_rows, const void *tile, ptrdiff_t ld,
                        ptrdiff_t n_keys) {
    const REAL *src = tile;
    const ptrdiff_t blocked = stride == sizeof(REAL) ? n_keys / LANES * LANES : 0;
    for (ptrdiff_t first = 0; first < n_rows; first += LANES) {
        const int n_live = n_rows - first < LANES ? (int)(n_rows - first) : LANES;
        ptrdiff_t j = 0;
        for (; j < blocked; j += LANES) {
            VEC x[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) x[i] = load(src + (j + i) * ld + first);
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                if (i >= n_live) break;
                char *const to = rows[first + i] + j * stride;
                store(to, load(to) + x[i]);
            }
        }
        for (; j < n_keys; j++)
            for (int i = 0; i < n_live; i++) {
                char *const to = rows[first + i] + j * stride;
                const REAL sum = scalar(to) + src[j * ld + first + i];
                memcpy(to, &sum, sizeof sum);
            }
    }
}

static void uncap(void *change_tile, const void *capped_tile, ptrdiff_t ld, ptrdiff_t n_keys, double softcap) {
    REAL *change = change_tile;
    const REAL *capped = capped_tile;
    const VEC inverse = splat((REAL)(1 / softcap));
    for (ptrdiff_t at = 0; at < n_keys * ld; at += LANES) {
        const VEC x = load(change + at), ratio = load(capped + at) * inverse;
        store(change + at, select_lanes((IVEC)(x == 0), x, x * ((1 - ratio) * (1 + ratio))));
    }
}
