/* Linear attention: features. Included by kernels.c. */

#if REAL_BITS == 32
#define LN2_HIGH 0x1.63p-1 /* so few bits that its product with an exponent is exact */
#define LN2_LOW (-0x1.bd0106p-13)
#else
#define LN2_HIGH 0x1.62e42feep-1
#define LN2_LOW 0x1.a39ef35793c76p-33
#endif
#define FEATURE_VECTORS 4

/* exp(x) = 2^n 2^f for x <= 0: n from x * log2(e), and f from what is left of x, which Cody and Waite's two parts of
 * log(2) give to a rounding. Where x > 0 the power is 1. */
INLINE void elu_plus_one_vectors(const int n, REAL *x) {
    const REAL round = (REAL)1.5 * (REAL)((LANE_INT)1 << MANTISSA_BITS) - EXPONENT_MIN;
    const VEC lowest = splat((REAL)(EXPONENT_MIN * LN2));
    VEC above[FEATURE_VECTORS], f[FEATURE_VECTORS], half_power[FEATURE_VECTORS], y[FEATURE_VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < n; i++) {
        const VEC all = load(x + i * LANES);
        above[i] = max(all, (VEC){});
        f[i] = max(lowest, select_lanes((IVEC)(all > 0), (VEC){}, all)); /* NaN stays NaN */
        half_power[i] = f[i] * (REAL)LOG2E + round;
        const VEC whole = half_power[i] - round;
        f[i] = ((f[i] - whole * (REAL)LN2_HIGH) - whole * (REAL)LN2_LOW) * (REAL)LOG2E;
        half_power[i] = (VEC)((IVEC)half_power[i] << MANTISSA_BITS);
    }
    twice_exp2m1_over_f(n, f, y);
#pragma GCC unroll 4
    for (int i = 0; i < n; i++)
        store(x + i * LANES, above[i] + (y[i] * f[i] + 2) * half_power[i]);
}

static void elu_plus_one(void *tile, ptrdiff_t n) {
    REAL *x = tile;
    for (; n >= FEATURE_VECTORS * LANES; n -= FEATURE_VECTORS * LANES, x += FEATURE_VECTORS * LANES)
        elu_plus_one_vectors(FEATURE_VECTORS, x);
    for (; n > 0; n -= LANES, x += LANES) elu_plus_one_vectors(1, x);
}
