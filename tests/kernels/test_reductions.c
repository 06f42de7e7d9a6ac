/* Reductions over the keys of a tile, against plain loops. Included by test_kernels.c only. */

/* Few values, so that many are equal. */
static double any_score(void) { return below(12) ? small() : special(below(8)); }

static int is_larger(double x, double y) { return isnan(x) ? !isnan(y) : x > y; }

/* merges: the first tile, and the others beside it, which are then merged. */
static void check_topk(int vectors, int k, int n_tiles, int most_keys, int merges) {
    const ptrdiff_t ld = (ptrdiff_t)vectors * lanes, n_rows = 1 + below((int)ld);
    char **values = (char **)take(n_rows * (ptrdiff_t)sizeof *values, 8, 0);
    int64_t **index = (int64_t **)take(n_rows * (ptrdiff_t)sizeof *index, 8, 0);
    double wanted[64][20], wanted_at[64][20];
    char *all_values = take(2 * n_rows * k * size, size, 0), *all_index = take(2 * n_rows * k * 8, 8, 0);
    for (int i = 0; i < 2 * n_rows * k; i++) put(all_values, i, -INFINITY), ((int64_t *)all_index)[i] = -1;
    for (int r = 0; r < n_rows; r++) {
        values[r] = all_values + r * k * size;
        index[r] = (int64_t *)(all_index + r * k * 8);
        for (int i = 0; i < k; i++) {
            wanted[r][i] = -INFINITY;
            wanted_at[r][i] = -1;
        }
    }
    ptrdiff_t key0 = below(1000);
    for (int t = 0; t < n_tiles; t++) {
        const int before = n_taken;
        const ptrdiff_t n_keys = below(most_keys);
        ptrdiff_t *stops = key_stops(vectors, n_keys, t % 2);
        void *s = tile(n_keys + 1, ld);
        for (int i = 0; i < n_keys * ld; i++) put(s, i, any_score());
        for (int r = 0; r < n_rows && merges && t == 1; r++) values[r] += n_rows * k * size, index[r] += n_rows * k;
        kernels->topk_keys(values, index, k, n_rows, s, ld, stops, key0);
        for (int r = 0; r < n_rows; r++)
            for (int j = 0; j < stops[r / lanes]; j++) {
                const double x = get(s, j * ld + r);
                int at = k;
                while (at > 0 && is_larger(x, wanted[r][at - 1])) at--;
                for (int i = k - 1; i > at; i--) wanted[r][i] = wanted[r][i - 1], wanted_at[r][i] = wanted_at[r][i - 1];
                if (at < k) wanted[r][at] = x, wanted_at[r][at] = (double)(key0 + j);
            }
        key0 += n_keys;
        release_after(before);
    }
    for (int r = 0; r < n_rows && merges && n_tiles > 1; r++) {
        const char *others = values[r];
        const int64_t *others_index = index[r];
        values[r] -= n_rows * k * size, index[r] -= n_rows * k;
        kernels->merge_topk(values[r], index[r], k, others, others_index);
    }
    for (int r = 0; r < n_rows; r++)
        for (int i = 0; i < k; i++)
            CHECK(same(get(values[r], i), rounded(wanted[r][i])) && index[r][i] == (int64_t)wanted_at[r][i],
                  "row %d of %td, %d of %d: " NUMBER " at %lld, not " NUMBER " at %g", r, n_rows, i, k, get(values[r], i),
                  (long long)index[r][i], wanted[r][i], wanted_at[r][i]);
    release();
}

static void test_topk_keys(void) {
    const int ks[] = {1, 1, 2, 3, 7, 20};
    for (int n = 0; n < 300; n++)
        check_topk(1 + n % kernels->max_vectors, ks[n % COUNT(ks)], 1 + below(4), n % 5 ? 1 + below(40) : 200, n % 7 % 2);
}

static void test_max_keys(void) {
    for (int n_keys = 0; n_keys <= 40; n_keys++)
        for (int vectors = 1; vectors <= kernels->max_vectors; vectors++) {
            const ptrdiff_t ld = (ptrdiff_t)vectors * lanes;
            void *s = tile(n_keys + 1, ld), *top = tile(1, ld);
            double wanted[64];
            for (int i = 0; i < n_keys * ld; i++) put(s, i, below(40) ? uniform(-9, 9) : special(below(8)));
            for (int lane = 0; lane < ld; lane++) {
                wanted[lane] = lane % 5 ? -INFINITY : special(lane);
                put(top, lane, wanted[lane]);
                for (int j = 0; j < n_keys; j++)
                    if (is_larger(get(s, j * ld + lane), wanted[lane])) wanted[lane] = get(s, j * ld + lane);
            }
            kernels->max_keys(top, s, ld, n_keys);
            for (int lane = 0; lane < ld; lane++) {
                const double got = get(top, lane), exact = rounded(wanted[lane]);
                CHECK(got == exact || (isnan(got) && isnan(exact)), "%d keys, lane %d: " NUMBER ", not " NUMBER, n_keys, lane,
                      got, exact);
            }
            release();
        }
}
