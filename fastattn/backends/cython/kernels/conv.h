/* The short causal convolution of each channel by itself. Included by kernels.c. */

/* x / (1 + exp(-x)), and its limits: inf for inf, -0 for -inf. exp(-x) is inf below -88.7 in float, -709.7 in double. */
INLINE void silu_vectors(const int n, VEC x[]) {
    const VEC lowest = splat((REAL)((EXPONENT_MIN - 3) * LN2)); /* exp(-lowest) is inf */
    VEC power[FEATURE_VECTORS], rest[FEATURE_VECTORS] = {};
#pragma GCC unroll 4
    for (int i = 0; i < n; i++) x[i] = max(lowest, x[i]), power[i] = -x[i];
    exp_vectors(n, power, rest);
#pragma GCC unroll 4
    for (int i = 0; i < n; i++) x[i] /= 1 + power[i];
}

/* n vectors of up to `count` results: of n rows that follow one another, or `along` one row. The rows' elements, and the
 * weights unless `along`, begin at the vectors' column. */
INLINE void convolve_vectors(const int storage, const int along, const int n, char *to, ptrdiff_t to_step,
                             const char *const *rows, ptrdiff_t at, ptrdiff_t count, const REAL *weight, ptrdiff_t ld,
                             ptrdiff_t width, int silu) {
    VEC sum[FEATURE_VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < n; i++) sum[i] = along ? splat(weight[width * ld]) : load(weight + width * ld);
    for (ptrdiff_t j = 0; j < width; j++) {
        const VEC factor = along ? splat(weight[j * ld]) : load(weight + j * ld);
#pragma GCC unroll 4
        for (int i = 0; i < n; i++) {
            const char *const from = along ? rows[j] + i * LANES * STORED_SIZE(storage) : rows[i + j];
            sum[i] += factor * load_upto(storage, from + at, count);
        }
    }
    if (silu) silu_vectors(n, sum);
#pragma GCC unroll 4
    for (int i = 0; i < n; i++) store_upto(storage, to + at + i * to_step, sum[i], count);
}

INLINE void convolve_rows(const int storage, char *to, ptrdiff_t to_row, const char *const *rows, ptrdiff_t n_rows,
                          ptrdiff_t n_cols, const REAL *weight, ptrdiff_t ld, ptrdiff_t width, int along, int silu) {
    const ptrdiff_t size = STORED_SIZE(storage);
#define VECTORS(along, n, step) \
    convolve_vectors(storage, along, n, to, step, rows, c * size, n_cols - c, weight + (along ? 0 : c), ld, width, silu)
    if (along) {
        ptrdiff_t c = 0;
        for (; c + FEATURE_VECTORS * LANES <= n_cols; c += FEATURE_VECTORS * LANES) VECTORS(1, FEATURE_VECTORS, LANES * size);
        for (; c < n_cols; c += LANES) VECTORS(1, 1, 0);
        return;
    }
    for (; n_rows >= FEATURE_VECTORS; n_rows -= FEATURE_VECTORS, rows += FEATURE_VECTORS, to += FEATURE_VECTORS * to_row)
        for (ptrdiff_t c = 0; c < n_cols; c += LANES) VECTORS(0, FEATURE_VECTORS, to_row);
    for (; n_rows > 0; n_rows--, rows++, to += to_row)
        for (ptrdiff_t c = 0; c < n_cols; c += LANES) VECTORS(0, 1, 0);
#undef VECTORS
}

/* The kernels of the table, for each storage. */
#define OF_STORAGE(name, storage)                                                                                \
    static void convolve_##name(char *to, ptrdiff_t to_row, const char *const *rows, ptrdiff_t n_rows,           \
                                ptrdiff_t n_cols, const void *weight, ptrdiff_t ld, ptrdiff_t width, int along,  \
                                int silu) {                                                                      \
        convolve_rows(storage, to, to_row, rows, n_rows, n_cols, weight, ld, width, along, silu);                \
    }
EACH_READ(EACH_WRITTEN, OF_STORAGE)
#undef OF_STORAGE
