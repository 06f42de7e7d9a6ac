/* The kernels of row tiles: one row for each query row, lanes along keys and columns. Included by test_kernels.c only. */

enum { MAX_ROWS = 17 };

/* From one row to the next: a row in whole vectors, and now and then one more. */
static ptrdiff_t row_length(ptrdiff_t n) { return (n + lanes - 1) / lanes * lanes + lanes * below(2); }

/* Keys or values: rows without gaps between their elements of nbytes bytes, at any alignment and any distance. */
static Matrix rows_of(ptrdiff_t rows, ptrdiff_t cols, int nbytes) {
    const ptrdiff_t strides[] = {cols * nbytes, (cols + 3) * nbytes, cols * nbytes + 1, -cols * nbytes,
                                 0,             -cols * nbytes - 5,  nbytes};
    return matrix_of(rows, cols, strides[below(COUNT(strides))], nbytes, nbytes, below(8));
}

static Matrix rows_without_gaps(ptrdiff_t rows, ptrdiff_t cols) { return rows_of(rows, cols, size); }

/* Each pair of a number of rows, of keys and of columns, with any third. */
static void each_size(void (*check)(int n_rows, int n_keys, int n_cols)) {
    static const int keys[] = {1, 2, 3, 15, 16, 17, 31, 33, 64, 65, 255, 256};
    static const int cols[] = {1, 2, 3, 7, 8, 16, 17, 33, 40, 64, 65, 128};
    for (int r = 1; r <= MAX_ROWS; r++) {
        for (int i = 0; i < COUNT(keys); i++) check(r, keys[i], cols[below(COUNT(cols))]);
        for (int i = 0; i < COUNT(cols); i++) check(r, keys[below(COUNT(keys))], cols[i]);
    }
    for (int i = 0; i < COUNT(keys); i++)
        for (int j = 0; j < COUNT(cols); j++) check(1 + below(MAX_ROWS), keys[i], cols[j]);
}

/* ------------------------------------------------------------------ pack_rows, unpack_rows */

static void test_pack_rows(void) {
    const ptrdiff_t odd = 2 * size + 1, strides[] = {size, 2 * size, -size, odd, -odd, 0};
    const double factors[] = {1, LOG2E / 8, -1 / 3.0, 0};
    for (int n = 1; n <= 130; n += n < 67 ? 1 : 7) {
        const ptrdiff_t ld = row_length(n), whole = (n + lanes - 1) / lanes * lanes, n_rows = 1 + below(MAX_ROWS);
        const double factor = factors[n % 3 ? n % COUNT(factors) : 0];
        void *unit_stride = malloc((size_t)(n_rows * ld * size));
        for (int i = 0; i < COUNT(strides); i++) {
            const char **rows = (const char **)take(n_rows * (ptrdiff_t)sizeof *rows, 8, 0);
            void *out = tile(n_rows, ld);
            Matrix row[MAX_ROWS];
            for (int r = 0; r < n_rows; r++) {
                row[r] = matrix(1, n, 0, strides[i], (r * 3 + i) % 8);
                for (int c = 0; c < n; c++) {
                    const int nth = c * 7 + r;
                    put(element(&row[r], 0, c), 0, nth % 11 == 0 ? special(nth / 11) : sin(nth + n) * exp2(nth % 40));
                }
                seal(&row[r]);
                rows[r] = row[r].at;
            }
            kernels->pack_rows(out, ld, rows, n_rows, strides[i], n, factor);
            if (i == 0) memcpy(unit_stride, out, (size_t)(n_rows * ld * size));
            for (int r = 0; r < n_rows; r++) {
                for (int c = 0; c < n; c++) {
                    const double x = entry(&row[r], 0, c), got = get(out, r * ld + c);
                    CHECK(is_product(got, x, factor), "n_cols %d, stride %td: " NUMBER " * " NUMBER " gave " NUMBER, n,
                          strides[i], x, factor, got);
                    if (strides[i] != 0)
                        CHECK(same(got, get(unit_stride, r * ld + c)), "stride %td has other bits", strides[i]);
                }
                for (ptrdiff_t c = n; c < whole; c++)
                    CHECK(get(out, r * ld + c) == 0, "a row of %d ends in " NUMBER, n, get(out, r * ld + c));
            }
            release();
        }
        free(unit_stride);
    }
}

static void test_unpack_rows(void) {
    const ptrdiff_t odd = 2 * size + 1, strides[] = {size, 2 * size, -size, odd, -odd};
    enum { CLEAN, ONE_NAN, ONE_INF, KINDS };
    for (int n = 1; n <= 130; n += n < 67 ? 1 : 7)
        for (int i = 0; i < COUNT(strides); i++) {
            /* Past the columns the tile is full of NaN, and past the rows the factors are. */
            const ptrdiff_t ld = row_length(n), n_rows = 1 + below(MAX_ROWS), factor_ld = row_length(n_rows);
            const int kind = below(KINDS);
            char **rows = (char **)take(n_rows * (ptrdiff_t)sizeof *rows, 8, 0);
            void *source = tile(n_rows, ld), *factor = tile(2, factor_ld);
            Matrix row[MAX_ROWS];
            for (int r = 0; r < n_rows; r++) {
                put_factor(factor, factor_ld, r);
                for (int c = 0; c < n; c++) put(source, r * ld + c, below(9) ? sin(c * 7 + r + n) * 100 : small() * 0.0);
                rows[r] = (row[r] = matrix(1, n, 0, strides[i], (r + i) % 8)).at;
            }
            if (kind != CLEAN) put(source, below((int)n_rows) * ld + below(n), kind == ONE_NAN ? NAN : INFINITY);
            const int any = kernels->unpack_rows(rows, strides[i], n_rows, source, ld, n, factor, factor_ld);
            for (int r = 0; r < n_rows; r++) {
                for (int c = 0; c < n; c++) {
                    const double x = get(source, r * ld + c), got = entry(&row[r], 0, c);
                    CHECK(is_product(got, x, (long double)get(factor, r) + get(factor, factor_ld + r)) &&
                              (x != 0 || same(got, 0)),
                          "n_cols %d, stride %td, row %d: " NUMBER " * " NUMBER " gave " NUMBER, n, strides[i], r, x,
                          get(factor, r), got);
                }
                const ptrdiff_t gap = llabs(strides[i]);
                const unsigned char *lowest = (unsigned char *)element(&row[r], 0, strides[i] < 0 ? n - 1 : 0);
                for (ptrdiff_t b = 0; b < (n - 1) * gap; b++)
                    CHECK(b % gap < size || lowest[b] == 0xff, "wrote between the elements, stride %td", strides[i]);
            }
            CHECK(any == (kind != CLEAN), "said %d, the kind is %d, n_cols %d, stride %td", any, kind, n, strides[i]);
            release();
        }
}

/* ------------------------------------------------------------------ score_rows */

/* Small integers: every sum is exact, so one wrong, missing or doubled term shows. What is not finite in a row or
 * a key makes what it does there, and nothing elsewhere. */
static void check_score_rows(int n_rows, int n_keys, int head_dim) {
    const ptrdiff_t ld = row_length(n_keys), q_ld = row_length(head_dim), whole = (head_dim + lanes - 1) / lanes * lanes;
    void *s = tile(n_rows, ld), *q = integers(n_rows, q_ld);
    Matrix k = rows_without_gaps(n_keys, head_dim);
    for (int j = 0; j < n_keys; j++)
        for (int d = 0; d < head_dim; d++) put(element(&k, j, d), 0, small());
    if (below(3) == 0) put(element(&k, below(n_keys), below(head_dim)), 0, special(below(3)));
    if (below(3) == 0) put(q, below(n_rows) * q_ld + below(head_dim), special(below(3)));
    for (int r = 0; r < n_rows; r++)
        for (ptrdiff_t d = head_dim; d < q_ld; d++) put(q, r * q_ld + d, d < whole ? 0 : NAN);
    seal(&k);
    const fastattn_rows keys = rows_to_read(&k, 0);
    kernels->score_rows[FASTATTN_REAL](s, ld, q, q_ld, n_rows, &keys, n_keys, head_dim);
    for (int j = 0; j < n_keys; j++) {
        double x[128];
        for (int d = 0; d < head_dim; d++) x[d] = entry(&k, j, d);
        for (int r = 0; r < n_rows; r++) {
            double sum = 0;
            for (int d = 0; d < head_dim; d++) sum += get(q, r * q_ld + d) * x[d];
            CHECK(same(get(s, r * ld + j), sum),
                  "%d rows, %d keys, head_dim %d, row stride %td: row %d, key %d is " NUMBER ", not " NUMBER, n_rows, n_keys,
                  head_dim, k.row, r, j, get(s, r * ld + j), sum);
        }
    }
    release();
}

static void test_score_rows(void) {
    each_size(check_score_rows);
    for (int head_dim = 1; head_dim <= 70; head_dim++) check_score_rows(1 + below(MAX_ROWS), 1 + below(70), head_dim);
}

/* ------------------------------------------------------------------ adjust_rows */

static void check_adjust_rows(int n_rows, int n_keys, int kind) {
    const ptrdiff_t ld = row_length(n_keys);
    const double cap = kind % 3 ? kind % 3 * 12.75 : 0, root = below(2) ? 1 : exp2(below(5) - 2);
    void *s = tile(n_rows, ld), *before = tile(n_rows, ld);
    char **bias = kind / 3 % 2 ? lane_rows(n_rows, n_keys * size) : NULL;
    const uint32_t *words = kind / 6 ? random_words(n_keys, n_rows) : NULL;
    for (int r = 0; r < n_rows; r++)
        for (int j = 0; j < n_keys; j++) {
            put(s, r * ld + j, below(40) ? uniform(-3, 3) : special(below(3)));
            if (bias) put(bias[r], j, below(10) ? uniform(-50, 50) : special(below(8)));
        }
    memcpy(before, s, (size_t)(n_rows * ld * size));
    kernels->adjust_rows(s, ld, n_rows, n_keys, root, cap, (const char *const *)bias, words);
    for (int r = 0; r < n_rows; r++)
        for (int j = 0; j < n_keys; j++) {
            const double x = root * root * get(before, r * ld + j), got = get(s, r * ld + j);
            const double y = bias ? get(bias[r], j) : 0;
            const long double capped = cap > 0 ? (long double)cap * tanhl(x) : x, exact = capped + y;
            if (!allowed(words, bias, n_rows, j, r))
                CHECK(got == -INFINITY, "%d rows, key %d of %d: masked, " NUMBER " + " NUMBER " gave " NUMBER, n_rows, j,
                      n_keys, x, y, got);
            else if (!isfinite((double)exact))
                CHECK(same(got, (double)exact), NUMBER " + " NUMBER " gave " NUMBER, x, y, got);
            else if (cap == 0)
                CHECK(got == rounded(rounded(x) + y), "%d rows, row %d, key %d of %d: " NUMBER " + " NUMBER " gave " NUMBER,
                      n_rows, r, j, n_keys, x, y, got);
            else /* the bound of test_adjust */
                CHECK(fabsl(got - exact) <= unit * (14 * fabsl(capped) + fabsl(exact)),
                      "softcap " NUMBER ": " NUMBER " + " NUMBER " gave " NUMBER, cap, x, y, got);
        }
    release();
}

static void test_adjust_rows(void) {
    const int keys[] = {127, 128, 129, 255, 256};
    int kind = 1;
    for (int n_rows = 1; n_rows <= MAX_ROWS; n_rows++)
        for (int n_keys = 1 + below(3); n_keys <= 70; n_keys += 1 + below(5), kind = kind % 11 + 1)
            check_adjust_rows(n_rows, n_keys, kind);
    for (int i = 0; i < COUNT(keys); i++)
        for (kind = 1; kind < 12; kind++) check_adjust_rows(1 + below(MAX_ROWS), keys[i], kind);
}

/* ------------------------------------------------------------------ softmax_rows */

static void check_softmax_rows(int n_rows, int n_keys, double factor, double spread, int has_max) {
    enum { EMPTY, ONLY_FIRST, ONLY_LAST, WITH_NAN, WITH_INF, KINDS }; /* further rows are usual ones */
    const ptrdiff_t ld = row_length(n_keys);
    void *s = tile(n_rows, ld), *before = tile(n_rows, ld), *row_max = tile(1, n_rows), *row_sum = tile(1, n_rows);
    int kinds[MAX_ROWS];
    for (int r = 0; r < n_rows; r++) {
        const int kind = kinds[r] = below(2 * KINDS), odd_one = below(n_keys);
        double top = -INFINITY;
        for (int j = 0; j < n_keys; j++) {
            const int only = kind == ONLY_FIRST ? 0 : kind == ONLY_LAST ? n_keys - 1 : j;
            const double x = kind == EMPTY || j != only || below(6) == 0 ? -INFINITY : uniform(-spread, spread);
            put(s, r * ld + j, kind == WITH_NAN && j == odd_one ? NAN : kind == WITH_INF && j == odd_one ? INFINITY : x);
            if (get(s, r * ld + j) > top) top = get(s, r * ld + j);
        }
        /* What lies past the last key counts for nothing. */
        for (ptrdiff_t j = n_keys; j < ld; j++) put(s, r * ld + j, special(below(6)));
        if (has_max) put(row_max, r, top > 0 && below(2) ? top + 1 : top);
    }
    memcpy(before, s, (size_t)(n_rows * ld * size));
    void *old_max = tile(1, n_rows);
    memcpy(old_max, row_max, (size_t)(n_rows * size));
    kernels->softmax_rows(s, ld, row_max, row_sum, n_rows, n_keys, factor, has_max);
    for (int r = 0; r < n_rows; r++) {
        const double top = get(row_max, r), base = top == -INFINITY ? 0 : top;
        double most = -INFINITY;
        long double sum = 0;
        for (int j = 0; j < n_keys; j++) {
            const double x = get(before, r * ld + j), got = get(s, r * ld + j);
            if (x > most) most = x;
            sum += got;
            if (kinds[r] == WITH_NAN || kinds[r] == WITH_INF) {
                if (isnan(x) || x == INFINITY) CHECK(isnan(got), NUMBER " gave " NUMBER, x, got);
                continue;
            }
            /* The difference, the factor and the product are rounded, and exp2 is within 1.5 ULP. */
            const long double y = factor * ((long double)x - base), exact = exp2l(y);
            if (x == -INFINITY)
                CHECK(same(got, 0), "-inf gave " NUMBER, got);
            else
                CHECK(fabsl(got - exact) <= exact * unit * (3 + 3 * fabsl(y)) || (got == 0 && exact < 2 * smallest()),
                      "%d rows, key %d of %d: exp2(" NUMBER ") gave " NUMBER, n_rows, j, n_keys, (double)y, got);
            CHECK(x != top || x == -INFINITY || got == 1, "the largest score gave " NUMBER, got);
        }
        const double got = get(row_sum, r);
        if (has_max) {
            CHECK(same(top, get(old_max, r)), "row_max was " NUMBER " and is " NUMBER, get(old_max, r), top);
        } else if (kinds[r] != WITH_NAN) {
            CHECK(top == most, "row_max " NUMBER ", not " NUMBER, top, most);
        }
        if (kinds[r] == WITH_NAN || kinds[r] == WITH_INF) {
            CHECK(isnan(got), "%d keys with NaN or inf: row_sum " NUMBER, n_keys, got);
        } else {
            /* Every lane of at least two vectors sums up on its own, then a tree of at most 4 + 2 levels. */
            const long double roundings = n_keys / (2.0L * lanes) + 8;
            CHECK(fabsl(got - sum) <= roundings * unit * sum, "%d rows, %d keys: row_sum " NUMBER ", not " NUMBER, n_rows,
                  n_keys, got, (double)sum);
        }
    }
    release();
}

static void test_softmax_rows(void) {
    for (int n_keys = 1; n_keys <= 257; n_keys += n_keys < 131 ? 1 : 9)
        for (int kind = 0; kind < 4; kind++)
            check_softmax_rows(1 + below(MAX_ROWS), n_keys, kind % 2 ? LOG2E : 1, below(2) ? 3 : 40, kind / 2);
    check_softmax_rows(MAX_ROWS, 256, 1, 10, 0);
    check_softmax_rows(MAX_ROWS, 256, LOG2E, 10, 0);
    /* Huge finite scores are ordinary numbers: 1 for the largest, 0 far below it. */
    const double most = largest();
    const double huge[][3] = {{1e30, -1e30, 1}, {most, -most, 1}, {-most, -most, 2}, {-1e30, -1e30, 2}};
    for (int i = 0; i < COUNT(huge); i++) {
        void *s = tile(1, lanes), *row_max = tile(1, 1), *row_sum = tile(1, 1);
        put(s, 0, huge[i][1]), put(s, 1, huge[i][0]);
        kernels->softmax_rows(s, lanes, row_max, row_sum, 1, 2, LOG2E, 0);
        CHECK(get(row_sum, 0) == huge[i][2] && get(row_max, 0) == rounded(huge[i][0]), "sum " NUMBER " for " NUMBER " and " NUMBER,
              get(row_sum, 0), huge[i][0], huge[i][1]);
        release();
    }
}

/* ------------------------------------------------------------------ accumulate_rows */

static void check_accumulate_rows(int n_rows, int n_keys, int value_dim) {
    const ptrdiff_t ld = row_length(value_dim), p_ld = row_length(n_keys);
    /* What acc held is not read, nor what lies past the keys: NaN. */
    void *acc = tile(n_rows, ld), *p = tile(n_rows, p_ld);
    Matrix v = rows_without_gaps(n_keys, value_dim);
    for (int j = 0; j < n_keys; j++) {
        for (int r = 0; r < n_rows; r++) put(p, r * p_ld + j, small());
        for (int e = 0; e < value_dim; e++) put(element(&v, j, e), 0, small());
    }
    /* A row of NaN and one of inf stand beside the others and change nothing there. */
    if (n_rows > 3) put(p, below(n_rows) * p_ld + below(n_keys), below(2) ? NAN : INFINITY);
    seal(&v);
    /* In two calls, of which the second adds to the first, from the start of a partial sum on. */
    const int split = below(2) ? FASTATTN_KEY_CHUNK * below(n_keys / FASTATTN_KEY_CHUNK + 1) : 0;
    const fastattn_rows values = rows_to_read(&v, 0), rest = rows_to_read(&v, split < n_keys ? split : 0);
    if (split) kernels->accumulate_rows[FASTATTN_REAL](acc, ld, p, p_ld, n_rows, &values, split, value_dim, 0);
    if (split < n_keys)
        kernels->accumulate_rows[FASTATTN_REAL](acc, ld, (char *)p + split * size, p_ld, n_rows, &rest, n_keys - split,
                                                value_dim, split > 0);
    for (int e = 0; e < value_dim; e++) {
        double x[256];
        for (int j = 0; j < n_keys; j++) x[j] = entry(&v, j, e);
        for (int r = 0; r < n_rows; r++) {
            double sum = 0;
            for (int j = 0; j < n_keys; j++) sum += get(p, r * p_ld + j) * x[j];
            CHECK(same(get(acc, r * ld + e), sum),
                  "%d rows, %d keys, value_dim %d, row stride %td: row %d, column %d is " NUMBER ", not " NUMBER, n_rows,
                  n_keys, value_dim, v.row, r, e, get(acc, r * ld + e), sum);
        }
    }
    release();
}

static void test_accumulate_rows(void) {
    each_size(check_accumulate_rows);
    for (int value_dim = 1; value_dim <= 140; value_dim++)
        check_accumulate_rows(1 + below(MAX_ROWS), 1 + below(140), value_dim);
}

/* NaN and inf in a value reach the rows that may read it, and change no bit of the others. */
static void test_accumulate_rows_nonfinite(void) {
    for (int nth = 0; nth < 240; nth++) {
        const int n_rows = 1 + nth % MAX_ROWS, n_keys = 1 + below(nth % 8 ? 100 : 256), value_dim = 1 + below(40);
        const ptrdiff_t ld = row_length(value_dim), p_ld = row_length(n_keys);
        void *p = tile(n_rows, p_ld), *acc = tile(n_rows, ld), *plain = tile(n_rows, ld);
        void *clean = take((ptrdiff_t)n_keys * value_dim * size, size, 0);
        char **bias = nth % 3 ? lane_rows(n_rows, n_keys * size) : NULL;
        uint32_t *words = nth % 2 ? random_words(n_keys, n_rows) : NULL;
        Matrix v = rows_without_gaps(n_keys, value_dim), finite = laid_out(n_keys, value_dim, 0);
        for (int j = 0; j < n_keys; j++) {
            for (int r = 0; r < n_rows; r++) {
                if (bias) put(bias[r], j, below(3) ? 1 : -INFINITY);
                put(p, r * p_ld + j, allowed(words, bias, n_rows, j, r) ? uniform(0, 1) : 0);
            }
            for (int e = 0; e < value_dim; e++)
                put(element(&v, j, e), 0, below(n_keys < 20 ? 40 : n_keys * 2) ? uniform(-1, 1) : special(below(3)));
        }
        for (int j = 0; j < n_keys; j++) /* after all of v, whose rows may share memory */
            for (int e = 0; e < value_dim; e++)
                put(element(&finite, j, e), 0, isfinite(entry(&v, j, e)) ? entry(&v, j, e) : 0);
        seal(&v);
        const fastattn_rows finite_rows = rows_to_read(&finite, 0);
        kernels->accumulate_rows[FASTATTN_REAL](plain, ld, p, p_ld, n_rows, &finite_rows, n_keys, value_dim, 0);
        kernels->accumulate_rows_nonfinite(acc, ld, p, p_ld, n_rows, v.at, v.row, n_keys, value_dim,
                                          (const char *const *)bias, words, clean);
        for (int e = 0; e < value_dim; e++)
            for (int r = 0; r < n_rows; r++) {
                double reached = 0;
                for (int j = 0; j < n_keys; j++) {
                    const double x = entry(&v, j, e);
                    if (!isfinite(x) && allowed(words, bias, n_rows, j, r)) reached += get(p, r * p_ld + j) * x;
                }
                const double got = get(acc, r * ld + e), want = reached == 0 ? get(plain, r * ld + e) : reached;
                CHECK(same(got, want), "%d rows, %d keys: column %d, row %d is " NUMBER ", not " NUMBER, n_rows, n_keys, e, r,
                      got, want);
            }
        release();
    }
}

/* Masked keys, any number behind the others and whole chunks in front, change no bit of a row. */
static void test_masked_keys_around(void) {
    for (int nth = 0; nth < 400; nth++) {
        const int n_rows = 1 + below(MAX_ROWS), n_keys = 1 + below(130), value_dim = 1 + below(20);
        const int front = FASTATTN_KEY_CHUNK * below(3), n_all = front + n_keys + below(130);
        const double factor = nth % 2 ? LOG2E : 1;
        const ptrdiff_t ld = row_length(value_dim), s_ld = row_length(n_keys), all_ld = row_length(n_all);
        void *s = tile(n_rows, s_ld), *row_max = tile(1, n_rows), *row_sum = tile(1, n_rows), *acc = tile(n_rows, ld);
        void *all = filled(n_rows, all_ld, -INFINITY), *all_max = tile(1, n_rows), *all_sum = tile(1, n_rows);
        void *all_acc = tile(n_rows, ld);
        const Matrix v = laid_out(n_all, value_dim, 0);
        for (ptrdiff_t i = 0; i < n_all * value_dim; i++) put(v.at, i, uniform(-1, 1));
        for (int r = 0; r < n_rows; r++)
            for (int j = 0; j < n_keys; j++) {
                const double x = below(6) ? uniform(-2, 2) : -INFINITY;
                put(s, r * s_ld + j, x);
                put(all, r * all_ld + front + j, x);
            }
        kernels->softmax_rows(s, s_ld, row_max, row_sum, n_rows, n_keys, factor, 0);
        kernels->softmax_rows(all, all_ld, all_max, all_sum, n_rows, n_all, factor, 0);
        const fastattn_rows some_values = rows_to_read(&v, front), all_values = rows_to_read(&v, 0);
        kernels->accumulate_rows[FASTATTN_REAL](acc, ld, s, s_ld, n_rows, &some_values, n_keys, value_dim, 0);
        kernels->accumulate_rows[FASTATTN_REAL](all_acc, ld, all, all_ld, n_rows, &all_values, n_all, value_dim, 0);
        for (int r = 0; r < n_rows; r++) {
            CHECK(same(get(row_max, r), get(all_max, r)) && same(get(row_sum, r), get(all_sum, r)),
                  "%d keys: row_sum " NUMBER ", but " NUMBER " with %d in front and %d in all", n_keys, get(row_sum, r),
                  get(all_sum, r), front, n_all);
            for (int e = 0; e < value_dim; e++)
                CHECK(same(get(acc, r * ld + e), get(all_acc, r * ld + e)), "%d keys: " NUMBER ", but " NUMBER
                      " with %d in front and %d in all", n_keys, get(acc, r * ld + e), get(all_acc, r * ld + e), front, n_all);
        }
        release();
    }
}

/* ------------------------------------------------------------------ merge_rows, and merge of lanes */

/* Some keys of a row: the largest score, the sum and its accumulators; none where `none`. */
static void random_part(void *acc, void *row_max, void *row_sum, int r, ptrdiff_t row, ptrdiff_t col, int n_cols,
                        double spread, int none) {
    put(row_max, r, none ? -INFINITY : uniform(-spread, spread));
    put(row_sum, r, none ? 0 : uniform(1, 300));
    for (int c = 0; c < n_cols; c++) put(acc, r * row + c * col, none ? 0 : uniform(-9, 9));
}

/* as_lanes: n_rows is a multiple of the kernels' lanes. */
static void check_merge(int as_lanes, int n_rows, int n_cols, double factor, double spread) {
    const ptrdiff_t ld = as_lanes ? n_rows : row_length(n_cols), row = as_lanes ? 1 : ld, col = as_lanes ? ld : 1;
    void *acc[3], *row_max[3], *row_sum[3]; /* one part, the other, and the first before it is merged */
    int none[64][2];
    for (int i = 0; i < 3; i++) acc[i] = tile(as_lanes ? n_cols : n_rows, ld), row_max[i] = tile(1, n_rows), row_sum[i] = tile(1, n_rows);
    for (int r = 0; r < n_rows; r++)
        for (int i = 0; i < 2; i++)
            random_part(acc[i], row_max[i], row_sum[i], r, row, col, n_cols, spread, none[r][i] = below(4) == 0);
    const int nan_row = below(3 * n_rows);
    if (nan_row < n_rows) put(row_max[below(2)], nan_row, NAN);
    memcpy(acc[2], acc[0], (size_t)((as_lanes ? n_cols : n_rows) * ld * size));
    memcpy(row_max[2], row_max[0], (size_t)(n_rows * size));
    memcpy(row_sum[2], row_sum[0], (size_t)(n_rows * size));
    if (as_lanes)
        kernels->merge(acc[0], row_max[0], row_sum[0], acc[1], row_max[1], row_sum[1], ld, n_cols, factor);
    else
        kernels->merge_rows(acc[0], row_max[0], row_sum[0], acc[1], row_max[1], row_sum[1], n_rows, ld, factor);
    for (int r = 0; r < n_rows; r++) {
        const double a = get(row_max[2], r), b = get(row_max[1], r), top = get(row_max[0], r);
        if (r == nan_row) {
            CHECK(isnan(get(row_sum[0], r)), "row_max " NUMBER " and " NUMBER ": the sum is not NaN", a, b);
            for (int c = 0; c < n_cols; c++) CHECK(isnan(get(acc[0], r * row + c * col)), "a row of NaN: column %d is not", c);
            continue;
        }
        CHECK(top == fmax(a, b), "row_max " NUMBER " of " NUMBER " and " NUMBER, top, a, b);
        if (none[r][0] || none[r][1]) { /* what is not empty stays as it is, to the bit */
            const int i = none[r][1] ? 2 : 1;
            CHECK(same(top, get(row_max[i], r)) && same(get(row_sum[0], r), get(row_sum[i], r)),
                  "with an empty part: row_sum " NUMBER ", not " NUMBER, get(row_sum[0], r), get(row_sum[i], r));
            for (int c = 0; c < n_cols; c++)
                CHECK(same(get(acc[0], r * row + c * col), get(acc[i], r * row + c * col)), "with an empty part: " NUMBER ", not " NUMBER,
                      get(acc[0], r * row + c * col), get(acc[i], r * row + c * col));
            continue;
        }
        /* Each factor is known as in softmax; one product each and their sum are rounded. */
        const long double y = factor * ((long double)a - top), z = factor * ((long double)b - top);
        const long double error = unit * (6 + 3 * fabsl(y + z)), tiny = 600 * smallest();
        const long double sum = get(row_sum[2], r) * exp2l(y) + get(row_sum[1], r) * exp2l(z);
        CHECK(fabsl(get(row_sum[0], r) - sum) <= error * sum + tiny, "row_sum " NUMBER ", not " NUMBER, get(row_sum[0], r),
              (double)sum);
        for (int c = 0; c < n_cols; c++) {
            const long double first = get(acc[2], r * row + c * col) * exp2l(y), second = get(acc[1], r * row + c * col) * exp2l(z);
            CHECK(fabsl(get(acc[0], r * row + c * col) - (first + second)) <= error * (fabsl(first) + fabsl(second)) + tiny,
                  "%d rows, %d columns: row %d, column %d is " NUMBER ", not " NUMBER, n_rows, n_cols, r, c,
                  get(acc[0], r * row + c * col), (double)(first + second));
        }
    }
    release();
}

static void test_merge(void) {
    const double spreads[] = {3, 60, 1e4, 1e30, largest() / 2};
    int nth = 0;
    for (int n_rows = 1; n_rows <= MAX_ROWS; n_rows++)
        for (int n_cols = 1; n_cols <= 70; n_cols += 1 + below(3), nth++)
            check_merge(0, n_rows, n_cols, nth % 2 ? LOG2E : 1, spreads[nth % COUNT(spreads)]);
    for (int vectors = 1; vectors <= kernels->max_vectors; vectors++)
        for (int n_cols = 1; n_cols <= 70; n_cols += 1 + below(3), nth++)
            check_merge(1, vectors * kernels->lanes, n_cols, nth % 2 ? LOG2E : 1, spreads[nth % COUNT(spreads)]);
}

/* ------------------------------------------------------------------ sums of real numbers */

/* Any order of adding n terms errs by at most n - 1 roundings of the sum of their sizes, and one more for each product
 * where there is no fused multiply-add. A score is summed up in each lane, then over the lanes by a tree; values over
 * 64 keys, then over these sums. */
static void test_rounding_rows(void) {
    const int n_rows = 7;
    const ptrdiff_t sizes[][2] = {{64, 37}, {130, 40}, {256, 33}, {256, 256}};
    for (int i = 0; i < COUNT(sizes); i++) {
        const ptrdiff_t n = sizes[i][0], other = sizes[i][1], ld = row_length(n), to_ld = row_length(other);
        /* Scores: n columns, `other` keys. Values: n keys, `other` columns. The same sums twice. */
        void *x = filled(n_rows, ld, 0), *s = tile(n_rows, to_ld), *acc = tile(n_rows, to_ld);
        Matrix k = laid_out(other, n, 0), v = laid_out(n, other, 0);
        for (ptrdiff_t c = 0; c < n; c++) {
            for (int r = 0; r < n_rows; r++) put(x, r * ld + c, uniform(-1, 1));
            for (ptrdiff_t j = 0; j < other; j++) {
                put(element(&k, j, c), 0, uniform(-1, 1));
                put(element(&v, c, j), 0, entry(&k, j, c));
            }
        }
        const fastattn_rows keys = rows_to_read(&k, 0), values = rows_to_read(&v, 0);
        kernels->score_rows[FASTATTN_REAL](s, to_ld, x, ld, n_rows, &keys, other, n);
        kernels->accumulate_rows[FASTATTN_REAL](acc, to_ld, x, ld, n_rows, &values, n, other, 0);
        for (int r = 0; r < n_rows; r++)
            for (ptrdiff_t j = 0; j < other; j++) {
                long double sum = 0, sizes_sum = 0;
                for (ptrdiff_t c = 0; c < n; c++) {
                    const long double term = (long double)get(x, r * ld + c) * entry(&k, j, c);
                    sum += term;
                    sizes_sum += fabsl(term);
                }
                const double score = get(s, r * to_ld + j), total = get(acc, r * to_ld + j);
                CHECK(fabsl(score - sum) <= (n / lanes + 1 + log2(lanes) + 1) * unit * sizes_sum,
                      "score of %td terms: " NUMBER ", not " NUMBER, n, score, (double)sum);
                CHECK(fabsl(total - sum) <= (64 + n / 64 + 2) * unit * sizes_sum,
                      "values of %td keys: " NUMBER ", not " NUMBER, n, total, (double)sum);
            }
        release();
    }
}
