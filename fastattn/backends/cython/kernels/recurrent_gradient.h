/* Gradients of recurrent forms; see kernels.h. Included by kernels.c.
 *
 * A decay is a factor of the terms between a token before its own and a later one or its own. Its gradient is the sum of these
 * terms, not a difference of sums of more: where a decay is strong, these are far smaller than what would cancel. */

static void add_products(void *sums, const void *a, const void *b, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i += LANES) {
        const VEC x = load((const REAL *)a + i);
        REAL *const to = (REAL *)sums + i;
        store(to, b ? load(to) + x * load((const REAL *)b + i) : load(to) + x);
    }
}

static void weigh(void *s, const void *weights, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i += LANES) {
        const VEC weight = load((const REAL *)weights + i);
        REAL *const to = (REAL *)s + i;
        store(to, select_lanes((IVEC)(weight == 0), (VEC){}, weight * load(to)));
    }
}

static void cross_tokens(double *sums, const void *s, const void *change, ptrdiff_t ld, ptrdiff_t n) {
    for (ptrdiff_t lane = 0; lane < n; lane += LANES) {
        const ptrdiff_t n_lanes = n - lane < LANES ? n - lane : LANES;
        VEC terms = {};
        for (ptrdiff_t t = 1; t < lane + n_lanes; t++) {
            const ptrdiff_t at = (t - 1) * ld + lane;
            double sum = 0;
            terms += load((const REAL *)s + at) * load((const REAL *)change + at);
            for (ptrdiff_t i = t > lane ? t - lane : 0; i < n_lanes; i++) sum += terms[i];
            sums[t] += sum;
        }
    }
}

static void cross_columns(void *sums, const void *rows, const void *keys, ptrdiff_t ld, const void *change,
                          ptrdiff_t change_ld, ptrdiff_t n, ptrdiff_t dim) {
    const REAL *const factor = change;
    for (ptrdiff_t d = 0; d < dim; d += LANES) {
        VEC later[FASTATTN_CROSSED_TOKENS] = {}; /* of each key the sum over the rows from t on */
        for (ptrdiff_t t = n - 1; t > 0; t--) {
            const VEC x = load((const REAL *)rows + t * ld + d);
            REAL *const to = (REAL *)sums + t * ld + d;
            VEC sum[2] = {};
            ptrdiff_t j = 0;
            for (; j + 2 <= t; j += 2)
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++) {
                    later[j + i] += x * factor[(j + i) * change_ld + t];
                    sum[i] += later[j + i] * load((const REAL *)keys + (j + i) * ld + d);
                }
            if (j < t) {
                later[j] += x * factor[j * change_ld + t];
                sum[0] += later[j] * load((const REAL *)keys + j * ld + d);
            }
            store(to, load(to) + (sum[0] + sum[1]));
        }
    }
}

static void add_outside(void *sums, const void *starts, const void *ends, const void *whole, ptrdiff_t ld, ptrdiff_t n,
                        ptrdiff_t dim) {
    for (ptrdiff_t d = 0; d < dim; d += LANES) {
        REAL *const to = (REAL *)sums + d;
        VEC sum = load((const REAL *)whole + d);
        for (ptrdiff_t t = 0; t < n; t++) {
            store(to + t * ld, load(to + t * ld) + sum);
            sum += load((const REAL *)ends + t * ld + d);
        }
        sum = (VEC){};
        for (ptrdiff_t t = n - 1; t >= 0; t--) {
            sum += load((const REAL *)starts + t * ld + d);
            store(to + t * ld, load(to + t * ld) + sum);
        }
    }
}
