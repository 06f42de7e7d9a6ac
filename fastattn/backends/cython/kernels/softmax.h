/* `softmax` of kernels.h. Included by lanes.h and pairs.c, which define how many groups of EXP2_KEYS keys are weighed at
 * once, SOFTMAX_GROUPS, and store_weights: stores those of n keys from `to` on, and returns where the next ones go. Of n
 * below EXP2_KEYS the others in x are 0. */

/* The sum of EXP2_KEYS vectors. */
INLINE VEC sum_tree(VEC x[]) {
#pragma GCC unroll 8
    for (int half = EXP2_KEYS / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

/* The weights of n groups of EXP2_KEYS keys. */
INLINE REAL *weigh_groups(const int n, const int scaled, REAL factor, REAL *to, const REAL *s, ptrdiff_t ld, VEC base,
                          VEC *sum) {
    VEC x[SOFTMAX_GROUPS * EXP2_KEYS];
#pragma GCC unroll 16
    for (int i = 0; i < n * EXP2_KEYS; i++) x[i] = load(s + i * ld) - base;
    exp2_vectors(n * EXP2_KEYS, scaled, factor, x);
    to = store_weights(to, ld, x, n * EXP2_KEYS);
#pragma GCC unroll 16
    for (int i = 0; i < n; i++) *sum += sum_tree(x + i * EXP2_KEYS);
    return to;
}

INLINE void softmax_scaled(const int scaled, REAL *s_tile, const REAL *tile_max, REAL *row_max, REAL *row_sum,
                           REAL *rescale, ptrdiff_t ld, const ptrdiff_t *stops, ptrdiff_t first_chunk,
                           REAL factor) {
    const VEC empty = splat(-(REAL)INFINITY);
    for (ptrdiff_t lane = 0; lane < ld; lane += LANES) {
        const ptrdiff_t n_keys = *stops++;
        const REAL *s = s_tile + lane;
        REAL *to = s_tile + lane;
        const VEC old = load(row_max + lane);
        const VEC top = max(old, load(tile_max + lane));
        /* -inf - 0 where the row is still empty: -inf - -inf would be NaN. */
        const VEC base = select_lanes((IVEC)(top == empty), (VEC){}, top);
        VEC total = {};
        for (ptrdiff_t start = 0, stop = first_chunk; start < n_keys; start = stop, stop += KEY_CHUNK) {
            VEC sum = {};
            ptrdiff_t left = (n_keys < stop ? n_keys : stop) - start;
            /* Several keys at once: the operations on one key depend on each other. */
            const ptrdiff_t most = SOFTMAX_GROUPS * EXP2_KEYS;
            for (; left >= most; left -= most, s += most * ld)
                to = weigh_groups(SOFTMAX_GROUPS, scaled, factor, to, s, ld, base, &sum);
            for (; left >= EXP2_KEYS; left -= EXP2_KEYS, s += EXP2_KEYS * ld)
                to = weigh_groups(1, scaled, factor, to, s, ld, base, &sum);
            if (left > 0) {
                /* As if the missing keys were masked: where a vector's keys end depends on its other lanes. */
                VEC x[EXP2_KEYS] = {};
                for (int i = 0; i < left; i++, s += ld) {
                    x[i] = load(s) - base;
                    exp2_vectors(1, scaled, factor, x + i);
                }
                to = store_weights(to, ld, x, left);
                sum += sum_tree(x);
            }
            total += sum;
        }
        VEC scale = old - base;
        exp2_vectors(1, scaled, factor, &scale);
        store(rescale + lane, scale);
        store(row_sum + lane, load(row_sum + lane) * scale + total);
        store(row_max + lane, top);
    }
}

static void softmax(void *s, const void *tile_max, void *row_max, void *row_sum, void *rescale, ptrdiff_t ld,
                    const ptrdiff_t *stops, ptrdiff_t first_chunk, double exponent_factor) {
    if (exponent_factor == 1)
        softmax_scaled(0, s, tile_max, row_max, row_sum, rescale, ld, stops, first_chunk, 1);
    else
        softmax_scaled(1, s, tile_max, row_max, row_sum, rescale, ld, stops, first_chunk,
                       (REAL)exponent_factor);
}
