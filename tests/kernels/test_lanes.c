/* The kernels of lanes, one for each query row. Included by test_kernels.c only. */

/* ------------------------------------------------------------------ pack, unpack */

static void test_pack(void) {
    const ptrdiff_t odd = 2 * size + 1, strides[] = {size, 2 * size, -size, odd, -odd, 0};
    const double factors[] = {1, LOG2E / 8, -1 / 3.0, 0};
    for (int n = 1; n <= 67; n++) {
        const ptrdiff_t ld = lanes * (1 + n % kernels->max_vectors);
        const double factor = factors[n % 3 ? n % COUNT(factors) : 0];
        void *unit_stride = NULL;
        for (int i = 0; i < COUNT(strides); i++) {
            const char **rows = (const char **)take(ld * (ptrdiff_t)sizeof *rows, 64, 0);
            void *out = tile(n, ld);
            Matrix row[64];
            for (int r = 0; r < ld; r++) {
                /* The last lanes repeat one row, as for a block that is not full. */
                row[r] = r > 0 && r > ld - 3 ? row[r - 1] : matrix(1, n, 0, strides[i], (r * 3 + i) % 8);
                for (int c = 0; c < n; c++) {
                    const int nth = c * 7 + r;
                    put(element(&row[r], 0, c), 0, nth % 11 == 0 ? special(nth / 11) : sin(nth + n) * exp2(nth % 40));
                }
                seal(&row[r]);
                rows[r] = row[r].at;
            }
            kernels->pack(out, ld, rows, strides[i], n, factor);
            for (int c = 0; c < n; c++)
                for (int r = 0; r < ld; r++) {
                    const double x = entry(&row[r], 0, c), got = get(out, c * ld + r);
                    CHECK(is_product(got, x, factor), "n_cols %d, stride %td: " NUMBER " * " NUMBER " gave " NUMBER, n,
                          strides[i], x, factor, got);
                    if (i > 0 && strides[i] != 0 && r <= ld - 3)
                        CHECK(same(got, get(unit_stride, c * ld + r)), "stride %td has other bits", strides[i]);
                }
            if (i == 0) unit_stride = memcpy(malloc((size_t)(n * ld * size)), out, (size_t)(n * ld * size));
            release();
        }
        free(unit_stride);
    }
}

static void test_unpack(void) {
    const ptrdiff_t odd = 2 * size + 1, strides[] = {size, 2 * size, -size, odd, -odd};
    for (int n = 1; n <= 67; n++)
        for (int i = 0; i < COUNT(strides); i++) {
            const ptrdiff_t ld = lanes * (1 + (n + i) % kernels->max_vectors), n_rows = 1 + below((int)ld);
            /* 0: all are finite; 1: NaN in lanes that are not rows at most; 2: one in a row; then an infinity. */
            const int kind = below(4);
            const ptrdiff_t at_row = kind == 1 ? n_rows + below((int)(ld - n_rows + 1)) : below((int)n_rows);
            char **rows = (char **)take(n_rows * (ptrdiff_t)sizeof *rows, 64, 0);
            void *source = tile(n, ld), *factor = tile(2, ld);
            Matrix row[64];
            for (int r = 0; r < ld; r++) {
                put_factor(factor, ld, r);
                for (int c = 0; c < n; c++) put(source, c * ld + r, below(9) ? sin(c * 7 + r + n) * 100 : small() * 0.0);
            }
            const int at_col = below(n);
            if (kind && at_row < ld) put(source, at_col * ld + at_row, kind == 3 ? -INFINITY : NAN);
            for (int r = 0; r < n_rows; r++) rows[r] = (row[r] = matrix(1, n, 0, strides[i], (r + i) % 8)).at;
            const int any = kernels->unpack(rows, strides[i], n_rows, source, ld, n, factor);
            CHECK(any == (kind >= 2), "said %d, the kind is %d, n_cols %d, stride %td", any, kind, n, strides[i]);
            for (int r = 0; r < n_rows; r++) {
                for (int c = 0; c < n; c++) {
                    const double x = get(source, c * ld + r), got = entry(&row[r], 0, c);
                    CHECK(is_product(got, x, (long double)get(factor, r) + get(factor, ld + r)) && (x != 0 || same(got, 0)),
                          "n_cols %d, stride %td, row %d: " NUMBER " * " NUMBER " gave " NUMBER, n, strides[i], r, x,
                          get(factor, r), got);
                }
                const ptrdiff_t gap = strides[i] < 0 ? -strides[i] : strides[i];
                const unsigned char *lowest = (unsigned char *)element(&row[r], 0, strides[i] < 0 ? n - 1 : 0);
                for (ptrdiff_t b = 0; b < (n - 1) * gap; b++)
                    CHECK(b % gap < size || lowest[b] == 0xff, "wrote between the elements, stride %td", strides[i]);
            }
            release();
        }
}

/* ------------------------------------------------------------------ score */

/* Small integers: every sum is exact, so one wrong, missing or doubled term shows. */
static void check_score(ptrdiff_t n_keys, ptrdiff_t head_dim, int vectors, int layout) {
    const ptrdiff_t ld = lanes * kernels->max_vectors, live = lanes * vectors;
    const ptrdiff_t *stops = key_stops(vectors, n_keys, below(3) == 0);
    const int has_max = below(4) > 0;
    void *s = tile(n_keys, ld), *top = tile(1, ld), *q = integers(head_dim, ld);
    double sums[64];
    const Matrix k = integer_matrix(n_keys, head_dim, layout);
    for (ptrdiff_t lane = 0; lane < ld; lane++) {
        put(top, lane, lane >= live ? NAN : lane % 3 == 0 ? -INFINITY : lane % 3 == 1 ? 10.0 * small() : 1e30);
        /* What the lanes past n_vectors hold is nobody's concern. */
        for (ptrdiff_t d = 0; lane >= live && d < head_dim; d++) put(q, d * ld + lane, NAN);
    }
    void *want_top = tile(1, ld);
    memcpy(want_top, top, (size_t)(ld * size));
    /* What is fetched is never read: no memory is there. */
    kernels->score(s, has_max ? top : NULL, q, ld, vectors, k.at, stops, head_dim, k.row, k.col,
                   (const char *)FAR_AWAY, below(200) - 100, below(3) * 100);
    for (ptrdiff_t j = 0; j < n_keys; j++) {
        memset(sums, 0, sizeof sums);
        for (ptrdiff_t d = 0; d < head_dim; d++) {
            const double x = entry(&k, j, d);
            for (ptrdiff_t lane = 0; lane < live; lane++) sums[lane] += x * get(q, d * ld + lane);
        }
        for (ptrdiff_t lane = 0; lane < ld; lane++) {
            const double got = get(s, j * ld + lane);
            const int counts = lane < live && j < stops[lane / lanes];
            CHECK(counts ? got == sums[lane] : isnan(got) || (lane < live && got == sums[lane]),
                  "n_keys %td, head_dim %td, %d vectors, layout %d: key %td, lane %td is " NUMBER ", not " NUMBER, n_keys,
                  head_dim, vectors, layout, j, lane, got, sums[lane]);
            if (has_max && counts && sums[lane] > get(want_top, lane)) put(want_top, lane, sums[lane]);
        }
    }
    for (ptrdiff_t lane = 0; lane < ld; lane++) {
        /* A vector with fewer keys may have seen some more. */
        const double got = get(top, lane), want = get(want_top, lane);
        CHECK(has_max && lane < live && stops[lane / lanes] < n_keys ? got >= want : same(got, want),
              "n_keys %td, head_dim %td: tile_max " NUMBER ", not " NUMBER, n_keys, head_dim, got, want);
    }
    release();
}

static void test_score(void) {
    const int dims[] = {1, 15, 16, 17, 63, 64, 65};
    int nth = 0;
    for (int head_dim = 1; head_dim <= 130; head_dim++)
        for (int i = 0; i < 4; i++, nth++)
            check_score(1 + below(40), head_dim, 1 + nth % kernels->max_vectors, below(LAYOUTS));
    for (int n_keys = 1; n_keys <= 40; n_keys++)
        for (int i = 0; i < COUNT(dims); i++, nth++)
            check_score(n_keys, dims[i], 1 + below(kernels->max_vectors), nth % LAYOUTS);
    for (int n_keys = 60; n_keys <= 140; n_keys += 1 + below(4))
        check_score(n_keys, 1 + below(140), 1 + below(kernels->max_vectors), nth++ % LAYOUTS);
    for (int layout = 0; layout < LAYOUTS; layout++)
        check_score(256, layout % 2 ? 64 : 130, kernels->max_vectors, layout);
}

/* ------------------------------------------------------------------ add_bias */

static void test_add_bias(void) {
    for (int run = 1; run <= 70; run += run < 4 ? 1 : 11)
        for (int n_keys = 1; n_keys <= 70; n_keys += n_keys < 3 ? 1 : 7)
            for (int way = 0; way < 4; way++) {
                const int has_rows = way % 2, adds = way / 2, key0 = below(3 * run);
                const ptrdiff_t rows_col = 3 * size, n_runs = (key0 + n_keys - 1) / run + 1;
                char *array = take(run * size, 1, below(8)), *to = take(n_keys * size, 1, below(8));
                char *rows = take((n_runs - 1) * rows_col + size, 1, below(8));
                double sums[70];
                for (int j = 0; j < run; j++) put(array, j, below(64) - 32);
                for (int r = 0; r < n_runs; r++) put(rows + r * rows_col, 0, below(64) - 32);
                for (int j = 0; j < n_keys; j++) {
                    const int key = key0 + j;
                    const double earlier = below(64);
                    put(to, j, earlier);
                    sums[j] = get(array, key % run) + (adds ? earlier : 0);
                    if (has_rows) sums[j] += get(rows + key / run * rows_col, 0);
                }
                kernels->add_bias(to, array, has_rows ? rows : NULL, rows_col, run, key0, n_keys, adds);
                for (int j = 0; j < n_keys; j++)
                    CHECK(get(to, j) == sums[j], "run %d, %d keys from %d on, way %d: key %d", run, n_keys, key0, way, j);
                release();
            }
}

/* ------------------------------------------------------------------ adjust */

static void test_adjust(void) {
    for (int n_keys = 1; n_keys <= 70; n_keys++)
        for (int kind = 1; kind < 12; kind++) {
            const int vectors = 1 + (n_keys + kind) % kernels->max_vectors;
            const ptrdiff_t ld = lanes * vectors;
            const ptrdiff_t *stops = key_stops(vectors, n_keys, below(2));
            const double cap = kind % 3 ? kind % 3 * 12.75 : 0, root = below(2) ? 1 : exp2(below(5) - 2);
            void *s = tile(n_keys, ld), *before = tile(n_keys, ld), *top = tile(1, ld), *old_top = tile(1, ld);
            char **bias = kind / 3 % 2 ? lane_rows(ld, n_keys * size) : NULL;
            const uint32_t *words = kind / 6 ? random_words(n_keys, ld) : NULL;
            for (ptrdiff_t i = 0; i < n_keys * ld; i++) {
                put(s, i, below(40) ? uniform(-3, 3) : special(below(3)));
                if (bias) put(bias[i % ld], i / ld, below(10) ? uniform(-50, 50) : special(below(8)));
            }
            for (ptrdiff_t lane = 0; lane < ld; lane++) put(old_top, lane, below(2) ? -INFINITY : uniform(-3, 3));
            memcpy(top, old_top, (size_t)(ld * size));
            memcpy(before, s, (size_t)(n_keys * ld * size));
            kernels->adjust(s, top, ld, stops, root, cap, (const char *const *)bias, words);
            for (ptrdiff_t lane = 0; lane < ld; lane++) {
                double want_top = get(old_top, lane);
                int nan = 0;
                for (ptrdiff_t j = 0; j < stops[lane / lanes]; j++) {
                    const double x = root * root * get(before, j * ld + lane), got = get(s, j * ld + lane);
                    const double y = bias ? get(bias[lane], j) : 0;
                    const long double capped = cap > 0 ? (long double)cap * tanhl(x) : x, exact = capped + y;
                    if (!allowed(words, bias, ld, j, lane))
                        CHECK(got == -INFINITY, "masked, " NUMBER " + " NUMBER " gave " NUMBER, x, y, got);
                    else if (!isfinite((double)exact))
                        CHECK(same(got, (double)exact), NUMBER " + " NUMBER " gave " NUMBER, x, y, got);
                    else if (cap == 0)
                        CHECK(got == rounded(rounded(x) + y), NUMBER " + " NUMBER " gave " NUMBER, x, y, got);
                    /* tanh within 5 ULP, each up to two units; softcap, the product and the sum are rounded. */
                    else
                        CHECK(fabsl(got - exact) <= unit * (14 * fabsl(capped) + fabsl(exact)),
                              "softcap " NUMBER ": " NUMBER " + " NUMBER " gave " NUMBER, cap, x, y, got);
                    nan |= isnan(got);
                    if (got > want_top) want_top = got;
                }
                /* Where a score is NaN the row becomes NaN whatever its largest score is said to be. */
                CHECK(nan || get(top, lane) == want_top, "tile_max " NUMBER ", not " NUMBER, get(top, lane), want_top);
            }
            release();
        }
}

/* The largest error of tanh in ULP, softcap 1. Its roundings, each up to an ULP at the top of a binade and half
 * at its bottom: 2 in f = -2 log2(e) |x|, about 3 in expm1(f ln 2), 2 in the sum and the quotient. Seven
 * never meet. */
static double worst_tanh(double *where) {
    const ptrdiff_t ld = lanes * kernels->max_vectors, n_keys = 256;
    const double large[] = {20, 89, 1e4, 1e30, largest(), INFINITY, 0};
    double worst = 0;
    for (int round = 0; round < 12; round++) {
        void *s = tile(n_keys, ld), *x = tile(n_keys, ld), *top = tile(1, ld);
        for (ptrdiff_t i = 0; i < n_keys * ld; i++)
            put(x, i, small() * (round % 3 ? exp2(uniform(round % 3 == 1 ? -100 : -6, 2)) : uniform(0, 2)));
        memcpy(s, x, (size_t)(n_keys * ld * size));
        kernels->adjust(s, top, ld, key_stops(kernels->max_vectors, n_keys, 0), 1, 1, NULL, NULL);
        for (ptrdiff_t i = 0; i < n_keys * ld; i++) {
            const double error = ulps(get(s, i), size == 4 ? (long double)tanh(get(x, i)) : tanhl(get(x, i)));
            CHECK(fabs(get(s, i)) <= 1 && get(s, i) * get(x, i) >= 0, "tanh " NUMBER " is " NUMBER, get(x, i), get(s, i));
            if (error > worst) worst = error, *where = get(x, i);
        }
        release();
    }
    for (int sign = -1; sign <= 1; sign += 2)
        for (int i = 0; i < COUNT(large); i++) {
            void *s = filled(1, lanes, sign * large[i]), *top = tile(1, lanes);
            kernels->adjust(s, top, lanes, key_stops(1, 1, 0), 1, 1, NULL, NULL);
            CHECK(get(s, 0) == (large[i] > 0 ? sign : 0), "tanh " NUMBER " is " NUMBER, sign * large[i], get(s, 0));
            release();
        }
    return worst;
}

/* ------------------------------------------------------------------ softmax */

/* The largest error of exp2 in ULP on the whole range. 2^f = (2 + f y) / 2, |f| <= 1/2: half an ULP for the sum,
 * and y, known to about 1.1 ULP of its own (its last coefficient, its last rounding, an eighth of those before),
 * counts by |f|, most where f = -1/2. Without a fused multiply-add the products are rounded too: a quarter for f y,
 * an eighth inside y. Below 2^(min + 1/2) vec.h promises an exact 0: no denormals. */
static double worst_exp2(double *where) {
    const ptrdiff_t ld = lanes * kernels->max_vectors, n_keys = 256;
    const int least = size == 8 ? -1022 : -126;
    double worst = 0;
    for (int round = 0; round < 24; round++) {
        void *s = tile(n_keys, ld), *x = tile(n_keys, ld), *zero = filled(1, ld, 0);
        void *row_max = filled(1, ld, 0), *row_sum = filled(1, ld, 0), *rescale = tile(1, ld);
        for (ptrdiff_t i = 0; i < n_keys * ld; i++) {
            const double kinds[] = {uniform(least, 0), uniform(-1, 0), -exp2(uniform(-70, 10)),
                                    -(below(-least + 4) + 0.5) * (1 + small() * (double)unit)};
            put(x, i, kinds[round % 4]);
        }
        memcpy(s, x, (size_t)(n_keys * ld * size));
        kernels->softmax(s, zero, row_max, row_sum, rescale, ld, key_stops(kernels->max_vectors, n_keys, 0),
                         FASTATTN_KEY_CHUNK, 1);
        for (ptrdiff_t i = 0; i < n_keys * ld; i++) {
            const double at = get(x, i), got = get(s, i), edge = least + 0.5;
            const double error = ulps(got, size == 4 ? (long double)exp2(at) : exp2l(at));
            if (at > edge ? error > worst : at == edge && got != 0 && error > worst) worst = error, *where = at;
            CHECK(at >= edge || same(got, 0), "2^" NUMBER " is " NUMBER ", not 0", at, got);
            CHECK(got <= 1, "2^" NUMBER " is " NUMBER, at, got);
        }
        release();
    }
    return worst;
}

/* Three steps of the online softmax, in either domain, against the sums of what came out. */
static void check_softmax(ptrdiff_t n_keys, double factor, double spread) {
    const int vectors = 1 + (int)(n_keys % kernels->max_vectors);
    const ptrdiff_t ld = lanes * vectors;
    void *row_max = filled(1, ld, -INFINITY), *row_sum = filled(1, ld, 0), *rescale = tile(1, ld);
    long double sums[64] = {0};
    for (int step = 0; step < 3; step++) {
        void *s = tile(n_keys, ld), *before = tile(n_keys, ld), *tile_max = filled(1, ld, -INFINITY);
        void *old_max = tile(1, ld);
        const ptrdiff_t *stops = key_stops(vectors, n_keys, step != 1);
        for (ptrdiff_t i = 0; i < n_keys * ld; i++) {
            const ptrdiff_t lane = i % ld;
            /* Lane 0 sees nothing, lane 1 only in the first step, lane 2 only in the last, lane 3 a NaN. */
            const int none = lane == 0 || (lane == 1 && step > 0) || (lane == 2 && step < 2) || below(6) == 0;
            put(s, i, none ? -INFINITY : uniform(-spread, spread));
            if (lane == 3 && step == 1 && i / ld == n_keys / 2) put(s, i, NAN);
            if (i / ld < stops[lane / lanes] && get(s, i) > get(tile_max, lane)) put(tile_max, lane, get(s, i));
        }
        memcpy(before, s, (size_t)(n_keys * ld * size));
        memcpy(old_max, row_max, (size_t)(ld * size));
        kernels->softmax(s, tile_max, row_max, row_sum, rescale, ld, stops, FASTATTN_KEY_CHUNK, factor);
        for (ptrdiff_t lane = 0; lane < ld; lane++) {
            const double old = get(old_max, lane), top = get(row_max, lane), scale = get(rescale, lane);
            const double base = top == -INFINITY ? 0 : top;
            CHECK(top == fmax(old, get(tile_max, lane)), "row_max " NUMBER, top);
            /* The difference, the factor and the product are rounded, and exp2 is within 1.5 ULP. */
            const long double drop = factor * ((long double)old - base), scaled = old == -INFINITY ? 0 : exp2l(drop);
            CHECK(fabsl(scale - scaled) <= scaled * unit * (3 + 3 * fabsl(drop)) + DBL_MIN || scaled < FLT_MIN,
                  "rescale " NUMBER " for " NUMBER, scale, (double)drop);
            CHECK(old != top || top == -INFINITY || scale == 1, "row_max stays, rescale is " NUMBER, scale);
            CHECK(old != -INFINITY || same(scale, 0), "nothing was there, rescale is " NUMBER, scale);
            long double sum = 0;
            for (ptrdiff_t j = 0; j < stops[lane / lanes]; j++) {
                const double x = get(before, j * ld + lane), got = get(s, j * ld + lane);
                const long double y = factor * ((long double)x - base), exact = exp2l(y);
                sum += got;
                if (x == -INFINITY)
                    CHECK(same(got, 0), "-inf gave " NUMBER, got);
                else if (isnan(x))
                    CHECK(isnan(got), "NaN gave " NUMBER, got);
                else
                    CHECK(fabsl(got - exact) <= exact * unit * (3 + 3 * fabsl(y)) || (got == 0 && exact < 2 * FLT_MIN),
                          "exp2(" NUMBER ") gave " NUMBER, (double)y, got);
                CHECK(x != top || x == -INFINITY || got == 1, "the largest score gave " NUMBER, got);
            }
            sums[lane] = scale * sums[lane] + sum;
            /* Each step: chains of one chunk, the sum of the chunks, the rescaled sum. */
            const long double roundings = FASTATTN_KEY_CHUNK + n_keys / FASTATTN_KEY_CHUNK + 3;
            const double got = get(row_sum, lane);
            CHECK(isnan(got) || fabsl(got - sums[lane]) <= (step + 1) * roundings * unit * sums[lane],
                  "row_sum " NUMBER ", not " NUMBER, got, (double)sums[lane]);
            CHECK((lane == 3 && step > 0) == isnan(got), "row_sum " NUMBER " in lane %td", got, lane);
        }
    }
    release();
}

static void test_softmax(void) {
    for (int n_keys = 1; n_keys <= 70; n_keys++)
        for (int kind = 0; kind < 4; kind++) check_softmax(n_keys, kind % 2 ? LOG2E : 1, kind / 2 ? 3 : 40);
    check_softmax(256, 1, 10);
    check_softmax(256, LOG2E, 10);
    /* Huge finite scores are ordinary numbers: 1 for the largest, 0 far below it. */
    const double most = largest();
    const double huge[][3] = {{1e30, -1e30, 1}, {most, -most, 1}, {-most, -most, 2}, {-1e30, -1e30, 2}};
    for (int i = 0; i < COUNT(huge); i++) {
        void *s = filled(2, lanes, huge[i][0]), *top = filled(1, lanes, huge[i][0]), *row_sum = filled(1, lanes, 0);
        void *row_max = filled(1, lanes, -INFINITY), *rescale = tile(1, lanes);
        for (int lane = 0; lane < lanes; lane++) put(s, lanes + lane, huge[i][1]);
        kernels->softmax(s, top, row_max, row_sum, rescale, lanes, key_stops(1, 2, 0), FASTATTN_KEY_CHUNK, LOG2E);
        CHECK(get(row_sum, 0) == huge[i][2] && get(rescale, 0) == 0, "sum " NUMBER " for " NUMBER " and " NUMBER,
              get(row_sum, 0), huge[i][0], huge[i][1]);
        release();
    }
}

/* ------------------------------------------------------------------ accumulate */

/* The rows of a matrix from the first-th on, where they are. */
static fastattn_values values_at(const Matrix *v, ptrdiff_t first) {
    return (fastattn_values){element(v, first, 0), v->row, v->col, kernels->panel_cols * v->col};
}

/* The same rows packed, in two parts. */
static fastattn_values packed(const Matrix *v) {
    const ptrdiff_t row = kernels->panel_cols * size, panel = v->rows * row, part = below((int)v->rows + 1);
    const ptrdiff_t panels = (v->cols + kernels->panel_cols - 1) / kernels->panel_cols;
    char *const at = take(panels * panel, 64, 0);
    kernels->pack_values(at, panel, v->at, v->row, v->col, part, v->cols);
    kernels->pack_values(at + part * row, panel, v->at + part * v->row, v->row, v->col, v->rows - part, v->cols);
    return (fastattn_values){at, row, size, panel};
}

static void check_accumulate(ptrdiff_t n_keys, ptrdiff_t value_dim, int vectors, int layout, int rescaled) {
    const ptrdiff_t ld = lanes * kernels->max_vectors, live = lanes * vectors, n_fetch = below(80);
    const ptrdiff_t *stops = key_stops(vectors, n_keys, below(2));
    const char **fetch = (const char **)take(n_fetch * (ptrdiff_t)sizeof *fetch, 8, 0);
    void *p = integers(n_keys, ld), *rescale = rescaled ? integers(1, ld) : NULL;
    /* Without rescale what acc held is not read: it is NaN. */
    void *acc = rescaled ? integers(value_dim, ld) : tile(value_dim, ld), *before = tile(value_dim, ld);
    const Matrix v = integer_matrix(n_keys, value_dim, layout);
    double sums[64];
    memcpy(before, acc, (size_t)(value_dim * ld * size));
    for (ptrdiff_t j = 0; j < n_keys; j++)
        for (ptrdiff_t lane = 0; lane < live; lane++)
            if (j >= stops[lane / lanes]) put(p, j * ld + lane, NAN);
    /* What is fetched is never read: no memory is there. */
    for (ptrdiff_t i = 0; i < n_fetch; i++) fetch[i] = (const char *)(uintptr_t)(4096 + i);
    const ptrdiff_t first_chunk = 4 * (1 + below(FASTATTN_KEY_CHUNK / 4));
    const fastattn_values values = below(2) ? packed(&v) : values_at(&v, 0);
    kernels->accumulate(acc, p, rescale, ld, vectors, &values, stops, first_chunk, value_dim, fetch, n_fetch,
                        value_dim * size);
    for (ptrdiff_t e = 0; e < value_dim; e++) {
        for (ptrdiff_t lane = 0; lane < live; lane++)
            sums[lane] = rescaled ? get(rescale, lane) * get(before, e * ld + lane) : 0;
        for (ptrdiff_t j = 0; j < n_keys; j++) {
            const double x = entry(&v, j, e);
            for (ptrdiff_t lane = 0; lane < live; lane++)
                if (j < stops[lane / lanes]) sums[lane] += x * get(p, j * ld + lane);
        }
        for (ptrdiff_t lane = 0; lane < ld; lane++) {
            const double got = get(acc, e * ld + lane);
            CHECK(lane < live ? got == sums[lane] : same(got, get(before, e * ld + lane)),
                  "n_keys %td, value_dim %td, %d vectors, layout %d: column %td, lane %td is " NUMBER ", not " NUMBER,
                  n_keys, value_dim, vectors, layout, e, lane, got, sums[lane]);
        }
    }
    release();
}

static void test_accumulate(void) {
    const int keys[] = {1, 2, 3, 31, 32, 63, 64, 65, 129, 256};
    for (int value_dim = 1; value_dim <= 70; value_dim++)
        for (int i = 0; i < 8; i++)
            check_accumulate(i < 4 ? 1 + below(70) : keys[below(COUNT(keys))], value_dim,
                             1 + below(kernels->max_vectors), below(LAYOUTS), i % 2);
}

/* NaN and inf in a value reach the lanes that may read it, and change no bit of the others. */
static void test_accumulate_nonfinite(void) {
    for (int nth = 0; nth < 120; nth++) {
        const int vectors = 1 + nth % kernels->max_vectors;
        const ptrdiff_t ld = lanes * vectors, n_keys = 1 + below(100), value_dim = 1 + below(20);
        void *p = tile(n_keys, ld), *acc = tile(value_dim, ld), *plain = tile(value_dim, ld);
        void *rescale = nth % 5 ? tile(1, ld) : NULL, *clean = tile(n_keys, value_dim);
        char **bias = nth % 3 ? lane_rows(ld, n_keys * size) : NULL;
        uint32_t *words = nth % 2 ? random_words(n_keys, ld) : NULL;
        const ptrdiff_t *stops = key_stops(vectors, n_keys, 0);
        Matrix v = laid_out(n_keys, value_dim, nth % ONE_TO_ONE), finite = laid_out(n_keys, value_dim, 0);
        for (ptrdiff_t i = 0; i < n_keys * ld; i++)
            if (bias) put(bias[i % ld], i / ld, below(3) ? 1 : -INFINITY);
        for (ptrdiff_t j = 0; j < n_keys; j++) {
            for (ptrdiff_t lane = 0; lane < ld; lane++)
                put(p, j * ld + lane, allowed(words, bias, ld, j, lane) ? uniform(0, 1) : 0);
            for (ptrdiff_t e = 0; e < value_dim; e++) {
                const double x = uniform(-1, 1);
                put(element(&finite, j, e), 0, x);
                put(element(&v, j, e), 0, below(n_keys * 2 < 40 ? 40 : (int)n_keys * 2) ? x : special(below(3)));
            }
        }
        seal(&v);
        for (ptrdiff_t lane = 0; rescale && lane < ld; lane++) put(rescale, lane, uniform(0, 1));
        for (ptrdiff_t i = 0; rescale && i < value_dim * ld; i++) put(acc, i, uniform(-1, 1));
        memcpy(plain, acc, (size_t)(value_dim * ld * size));
        const fastattn_values plain_values = values_at(&finite, 0), values = nth % 4 ? values_at(&v, 0) : packed(&v);
        kernels->accumulate(plain, p, rescale, ld, vectors, &plain_values, stops, FASTATTN_KEY_CHUNK, value_dim, NULL, 0,
                            0);
        kernels->accumulate_nonfinite(acc, p, rescale, ld, &values, stops, FASTATTN_KEY_CHUNK, value_dim,
                                     (const char *const *)bias, words, clean);
        for (ptrdiff_t e = 0; e < value_dim; e++)
            for (ptrdiff_t lane = 0; lane < ld; lane++) {
                double reached = 0;
                for (ptrdiff_t j = 0; j < n_keys; j++) {
                    const double x = entry(&v, j, e);
                    if (!isfinite(x) && allowed(words, bias, ld, j, lane)) reached += get(p, j * ld + lane) * x;
                }
                const double got = get(acc, e * ld + lane), want = reached == 0 ? get(plain, e * ld + lane) : reached;
                CHECK(same(got, want), "column %td, lane %td is " NUMBER ", not " NUMBER, e, lane, got, want);
            }
        release();
    }
}

/* ------------------------------------------------------------------ sums of real numbers */

/* Any order of adding n terms errs by at most n - 1 roundings of the sum of their sizes; here 64 terms and
 * then the sums of 64, and one more for each product where there is no fused multiply-add. */
static void test_rounding(void) {
    const int vectors = kernels->max_vectors;
    const ptrdiff_t ld = lanes * vectors, sizes[][2] = {{64, 37}, {130, 40}, {256, 33}, {256, 256}};
    for (int i = 0; i < COUNT(sizes); i++) {
        const ptrdiff_t n = sizes[i][0], other = sizes[i][1];
        /* Scores: n columns, `other` keys. Values: n keys, `other` columns. The same sums twice. */
        void *x = tile(n, ld), *s = tile(other, ld), *acc = tile(other, ld), *top = filled(1, ld, -INFINITY);
        Matrix y = laid_out(other, n, 0);
        for (ptrdiff_t j = 0; j < n * ld; j++) put(x, j, uniform(-1, 1));
        for (ptrdiff_t j = 0; j < n * other; j++) put(y.at, j, uniform(-1, 1));
        kernels->score(s, top, x, ld, vectors, y.at, key_stops(vectors, other, 0), n, y.row, y.col, NULL, 0, 0);
        const fastattn_values columns = {y.at, y.col, y.row, kernels->panel_cols * y.row};
        kernels->accumulate(acc, x, NULL, ld, vectors, &columns, key_stops(vectors, n, 0), FASTATTN_KEY_CHUNK, other,
                            NULL, 0, 0);
        for (ptrdiff_t r = 0; r < other; r++)
            for (ptrdiff_t lane = 0; lane < ld; lane += 7) {
                long double sum = 0, sizes_sum = 0;
                for (ptrdiff_t c = 0; c < n; c++) {
                    const long double term = (long double)get(x, c * ld + lane) * entry(&y, r, c);
                    sum += term;
                    sizes_sum += fabsl(term);
                }
                const long double budget = (64 + n / 64 + 2) * unit * sizes_sum;
                CHECK(fabsl(get(s, r * ld + lane) - sum) <= budget, "score of %td terms: " NUMBER, n,
                      get(s, r * ld + lane));
                CHECK(fabsl(get(acc, r * ld + lane) - sum) <= budget,
                      "values of %td keys: " NUMBER, n, get(acc, r * ld + lane));
            }
        release();
    }
}

/* ------------------------------------------------------------------ drop */

static void test_drop(void) {
    for (int v = 1; v <= kernels->max_vectors; v++)
        for (ptrdiff_t n_keys = 0; n_keys <= 70; n_keys += n_keys < 3 ? 1 : 29) {
            const ptrdiff_t ld = lanes * v;
            void *s = tile(n_keys, ld);
            uint32_t *words = random_words(n_keys, ld);
            ptrdiff_t stops[16];
            double before[70 * 16 * 16];
            for (int i = 0; i < v; i++) stops[i] = i == v - 1 ? n_keys : n_keys * i / v;
            for (ptrdiff_t i = 0; i < n_keys * ld; i++) {
                put(s, i, below(9) ? uniform(0, 1) : NAN);
                before[i] = get(s, i);
            }
            kernels->drop(s, ld, stops, words);
            for (ptrdiff_t i = 0; i < n_keys * ld; i++) {
                const ptrdiff_t j = i / ld, lane = i % ld;
                if (j >= stops[lane / lanes]) continue;
                const int kept = words[j / 32 * ld + lane] >> (j % 32) & 1;
                CHECK(same(get(s, i), kept ? before[i] : 0), "key %td, lane %td, kept %d: " NUMBER, j, lane, kept, get(s, i));
            }
            release();
        }
}

/* ------------------------------------------------------------------ finish */

static void test_finish(void) {
    for (int v = 1; v <= kernels->max_vectors; v++)
        for (int way = 0; way < 6; way++) {
            const int domain = way % 3;
            const double factor = domain == 0 ? 1 : domain == 1 ? LOG2E : 32, kept_share = way < 3 ? 1 : 0.875;
            const ptrdiff_t ld = lanes * v;
            void *inverse = tile(2, ld), *lse = tile(1, ld), *row_max = tile(1, ld), *row_sum = tile(1, ld);
            for (ptrdiff_t lane = 0; lane < ld; lane++) {
                put(row_max, lane, lane == 1 ? -INFINITY : uniform(-200, 200));
                put(row_sum, lane, lane == 1 ? 0 : lane == 2 ? NAN : lane == 3 ? 1 : exp2(uniform(0, 30)));
            }
            kernels->finish(inverse, domain ? lse : NULL, row_max, row_sum, ld, factor, kept_share);
            if (!domain) kernels->finish(inverse, lse, row_max, row_sum, ld, factor, kept_share);
            for (ptrdiff_t lane = 0; lane < ld; lane++) {
                const double sum = get(row_sum, lane), high = get(inverse, lane), low = get(inverse, ld + lane);
                const double got = get(lse, lane);
                const long double top = get(row_max, lane) * (domain == 1 ? 1 : factor / (long double)M_LOG2E);
                const long double rest = logl(sum);
                const double kept = size == 4 ? (float)(kept_share * sum) : kept_share * sum;
                if (lane == 1) {
                    CHECK(same(high, 0) && low == 0 && got == -INFINITY, "empty row: " NUMBER ", " NUMBER, high, got);
                } else if (lane == 2) {
                    CHECK(isnan(high) && isnan(got), "NaN: " NUMBER ", " NUMBER, high, got);
                } else {
                    CHECK(high <= 1 / (long double)kept && ulps(high, 1 / (long double)kept) <= 1.001,
                          "1 / " NUMBER " is " NUMBER, kept, high);
                    CHECK(low > 0, "1 / " NUMBER " leaves " NUMBER, kept, low);
                    /* The first part leaves up to two units. What is said of that is rounded twice, and lacks its
                     * square; long double has 64 bits or more. */
                    const long double error = fabsl((long double)high + low - 1 / (long double)kept);
                    CHECK(error <= (8 * unit * unit + LDBL_EPSILON) / kept, "1 / " NUMBER " is " NUMBER " + " NUMBER, kept,
                          high, low);
                    CHECK(fabsl(got - (top + rest)) <= unit * fabsl(top + rest) + 3 * DBL_EPSILON * (fabsl(top) + rest),
                          "lse " NUMBER ", not " NUMBER, got, (double)(top + rest));
                }
            }
            release();
        }
}
