/* What a tile of scores is reduced to over its keys, in the place of the softmax. */

/* Keys that are looked at together: where none of them counts, nothing more is done. */
#define TOPK_KEYS 8

/* Whether a score is among the k largest of a row. */
INLINE int is_kept(const REAL *values, ptrdiff_t k, REAL x) {
    return !(x <= values[k - 1]) && values[k - 1] == values[k - 1];
}

/* Takes a score into a row of k falling ones, NaN first; it is larger than the last one. */
static void insert_score(REAL *values, int64_t *index, ptrdiff_t k, REAL x, int64_t key) {
    ptrdiff_t r = k - 1;
    for (; r > 0 && !(x <= values[r - 1]) && values[r - 1] == values[r - 1]; r--) {
        values[r] = values[r - 1];
        index[r] = index[r - 1];
    }
    values[r] = x;
    index[r] = key;
}

static void topk_keys(char *const *values, int64_t *const *index, ptrdiff_t k, ptrdiff_t n_rows, const void *s_tile,
                      ptrdiff_t ld, const ptrdiff_t *stops, ptrdiff_t key0) {
    for (ptrdiff_t lane = 0; lane < n_rows; lane += LANES) {
        const ptrdiff_t n_keys = *stops++, n_lanes = n_rows - lane < LANES ? n_rows - lane : LANES;
        const REAL *s = (const REAL *)s_tile + lane;
        REAL least[LANES]; /* of those kept; where it is NaN, no score is larger */
        for (ptrdiff_t i = 0; i < LANES; i++) least[i] = i < n_lanes ? ((const REAL *)values[lane + i])[k - 1] : (REAL)NAN;
        for (ptrdiff_t j = 0; j < n_keys; j += TOPK_KEYS, s += TOPK_KEYS * ld) {
            const ptrdiff_t n = n_keys - j < TOPK_KEYS ? n_keys - j : TOPK_KEYS;
            const VEC bound = load(least);
            IVEC beats = {};
            for (ptrdiff_t i = 0; i < n; i++) beats |= ~(IVEC)(load(s + i * ld) <= bound);
            beats &= (IVEC)(bound == bound);
            if (!any_lane(beats)) continue;
            for (ptrdiff_t r = 0; r < n_lanes; r++) {
                REAL *const row = (REAL *)values[lane + r];
                for (ptrdiff_t i = 0; beats[r] && i < n; i++)
                    if (is_kept(row, k, s[i * ld + r]))
                        insert_score(row, index[lane + r], k, s[i * ld + r], key0 + j + i);
                least[r] = row[k - 1];
            }
        }
    }
}

static void merge_topk(void *values, int64_t *index, ptrdiff_t k, const void *others, const int64_t *others_index) {
    const REAL *const x = others;
    for (ptrdiff_t i = 0; i < k && is_kept(values, k, x[i]); i++) insert_score(values, index, k, x[i], others_index[i]);
}

static void max_keys(void *top_row, const void *s_tile, ptrdiff_t ld, ptrdiff_t n_keys) {
    enum { CHAINS = 4 };
    for (ptrdiff_t lane = 0; lane < ld; lane += LANES) {
        const REAL *s = (const REAL *)s_tile + lane;
        REAL *const to = (REAL *)top_row + lane;
        const VEC before = load(to);
        VEC top[CHAINS];
        IVEC is_nan = (IVEC)(before != before);
        ptrdiff_t j = 0;
#pragma GCC unroll 4
        for (int i = 0; i < CHAINS; i++) top[i] = before;
#define KEYS(n)                                                                                                \
    _Pragma("GCC unroll 4") for (int i = 0; i < n; i++, s += ld) {                                             \
        const VEC x = load(s);                                                                                 \
        is_nan |= (IVEC)(x != x);                                                                              \
        top[i] = max(x, top[i]);                                                                               \
    }
        for (; j + CHAINS <= n_keys; j += CHAINS) KEYS(CHAINS)
        for (; j < n_keys; j++) KEYS(1)
#undef KEYS
        top[0] = max(max(top[0], top[1]), max(top[2], top[3]));
        store(to, select_lanes(is_nan, splat((REAL)NAN), top[0]));
    }
}
