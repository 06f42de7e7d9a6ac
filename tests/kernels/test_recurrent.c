/* Recurrent forms: decays, the triangular system, sums of a state, and one token. Included by test_kernels.c only. */

/* n numbers in [low, high], then NaN up to ld. */
static void fill_row(char *row, int n, double low, double high) {
    for (int i = 0; i < n; i++) put(row, i, uniform(low, high));
}

static void test_copied_tokens(void) {
    for (int round = 0; round < 100; round++) {
        const int n = 1 + below(6), n_cols = 1 + below(5 * lanes), ld = (n_cols + lanes - 1) / lanes * lanes + lanes * below(2);
        const int row = (n_cols + below(3)) * size, at = below(n), bad = below(2);
        char *from = take((n - 1) * row + n_cols * size, size, 0), *to = tile(n, ld);
        for (int i = 0; i < n; i++) fill_row(from + i * row, n_cols, -1, 1);
        if (bad) put(from + at * row, below(n_cols), special(below(3)));
        const int found = kernels->copy_rows(to, ld, from, row, n, n_cols);
        int expected = 0;
        for (int i = 0; i < n; i++)
            for (int c = 0; c < ld; c++) {
                const double x = c < n_cols ? get(from + i * row, c) : 0, got = get(to, i * ld + c);
                CHECK(got == x || (isnan(got) && isnan(x)), "a copy is " NUMBER ", not " NUMBER, got, x);
                expected |= i > 0 && !isfinite(x);
            }
        CHECK(!found == !expected, "%s nonfinite", found ? "found" : "did not find");
        release();
    }
}

static void test_stored_tokens(void) {
    for (int round = 0; round < 100; round++) {
        const int n = 1 + below(6), n_cols = 1 + below(5 * lanes), ld = (n_cols + lanes - 1) / lanes * lanes + lanes * below(2);
        const int row = (n_cols + below(3)) * size, nbytes = (n - 1) * row + n_cols * size;
        char *from = tile(n, ld), *to = take(nbytes, size, 0), *was = take(nbytes, size, 0);
        for (int i = 0; i < n * ld; i++) put(from, i, uniform(-1, 1));
        memset(to, 7, (size_t)nbytes), memset(was, 7, (size_t)nbytes);
        kernels->store_rows(to, row, from, ld, n, n_cols);
        for (int i = 0; i < n; i++)
            for (int c = 0; (i * row + c * size) < nbytes && c * size < row; c++) {
                const double got = get(to + i * row, c), x = c < n_cols ? get(from, i * ld + c) : get(was, 0);
                CHECK(got == x, "a stored number is " NUMBER ", not " NUMBER, got, x);
            }
        release();
    }
}

static void test_stable_tokens(void) {
    const double margin = 0.25;
    for (int round = 0; round < 200; round++) {
        const int n = 1 + below(40), ld = lanes * (1 + below(4));
        char *keys = tile(n, ld), *beta = tile(1, n);
        int expected = n;
        for (int t = n - 1; t >= 0; t--) {
            long double square = 0;
            fill_row(keys + (size_t)t * ld * size, ld, -1, 1);
            if (below(60) == 0) put(keys, t * ld + below(ld), special(below(3)));
            for (int d = 0; d < ld; d++) square += (long double)get(keys, t * ld + d) * get(keys, t * ld + d);
            /* No closer to a bound than rounding of a sum is sure to be. */
            const double within[] = {0, 1, 2, -0.24, 2.24}, beyond[] = {-0.26, 2.26, 1e9};
            const int is_stable = below(20) > 0 && isfinite(square);
            put(beta, t, (double)((is_stable ? within[below(5)] : beyond[below(3)]) / (isfinite(square) ? square : 1)));
            if (!is_stable) expected = t;
        }
        const int found = (int)kernels->count_stable(keys, beta, ld, n, margin);
        CHECK(found == expected, "%d tokens are stable, not %d", found, expected);
        release();
    }
}

static void test_exponentials(void) {
    const double reach = size == 8 ? 740 : 100;
    for (int round = 0; round < 200; round++) {
        const int n = lanes * (1 + below(9));
        char *high = tile(1, n), *low = tile(1, n), *to = tile(1, n);
        for (int i = 0; i < n; i++) {
            const double x = below(9) == 0 ? special(below(8)) : uniform(-reach, reach);
            put(high, i, x), put(low, i, isfinite(x) ? uniform(-1, 1) * fabs(x) * (double)unit : 0);
        }
        kernels->exponentials(to, high, low, n);
        for (int i = 0; i < n; i++) {
            const long double exact = exact_exp((long double)get(high, i) + get(low, i));
            const double got = get(to, i);
            if (isnan(get(high, i)))
                CHECK(isnan(got), "exp(NaN) is " NUMBER, got);
            else if (exact < 2 * smallest())
                CHECK(got == 0 || ulps(got, exact) <= 3, "exp(" NUMBER ") is " NUMBER, get(high, i), got);
            else if (exact > largest() / 4)
                CHECK(got > largest() / 8, "exp(" NUMBER ") is " NUMBER, get(high, i), got);
            else
                CHECK(ulps(got, exact) <= 3, "exp(" NUMBER ") is " NUMBER ", %.2f ULP off", get(high, i), got, ulps(got, exact));
        }
        release();
    }
}

static void test_token_decays(void) {
    for (int round = 0; round < 100; round++) {
        const int n = 1 + below(40), padded = (n + lanes - 1) / lanes * lanes;
        const double most = below(2) ? 0.3 : 900, first = below(4) ? uniform(-1, 0) : below(2) ? -1e30 : special(below(3));
        char *decay = tile(1, padded), *high = tile(1, padded), *low = tile(1, padded), *starts = tile(1, padded), *ends = tile(1, padded);
        fill_row(decay, n, -most, 0), put(decay, 0, first);
        kernels->sum_token_decays(high, low, starts, ends, decay, n);
        long double whole = 0, sum = 0;
        for (int t = 1; t < n; t++) whole += get(decay, t);
        for (int t = 0; t < n; t++) {
            if (t > 0) sum += get(decay, t);
            CHECK(fabsl((long double)get(high, t) + get(low, t) - sum) <= (unit * unit + LDBL_EPSILON) * n * fabsl(sum),
                  "the sum is " NUMBER " + " NUMBER ", not %Lg", get(high, t), get(low, t), sum);
            const long double start = exact_exp(first + sum), end = exact_exp(whole - sum);
            const double a = get(starts, t), b = get(ends, t);
            CHECK(isnan(first) ? isnan(a) : start < 4 * smallest() ? a < 8 * smallest() : isinf(start) ? isinf(a) : ulps(a, start) <= 8,
                  "the decay before is " NUMBER ", not %Lg", a, start);
            CHECK(end < 4 * smallest() ? b < 8 * smallest() : ulps(b, end) <= 8, "the decay after is " NUMBER ", not %Lg", b, end);
        }
        release();
    }
}

static void test_decay_columns(void) {
    for (int round = 0; round < 60; round++) {
        const int n = 1 + below(48), dim = lanes * (1 + below(3)), most = 64;
        const double reach = round % 3 == 0 ? 0.5 : round % 3 == 1 ? 8 : 200;
        char *decay = tile(n, dim), *up = tile(n, dim), *down = tile(n, dim), *before = tile(1, dim), *after = tile(1, dim);
        for (int i = 0; i < n * dim; i++)
            put(decay, i, below(40) == 0 ? special(1 + below(2)) : below(3) ? uniform(-reach, 0) : 0);
        /* As the text says: the rows before the first of which a column leaves its range. */
        int fits = n;
        for (int d = 0; d < dim; d++) {
            long double sum = 0, least = 0, greatest = 0;
            for (int t = 1; t < fits; t++) {
                sum += get(decay, t * dim + d);
                least = fminl(sum, least), greatest = fmaxl(sum, greatest);
                if (!(greatest - least <= most) || isnan(sum)) fits = t;
            }
        }
        const int found = (int)kernels->sum_decays(up, down, decay, dim, n, dim, most);
        CHECK(found == fits, "%d tokens fit, not %d", found, fits);
        kernels->decay_columns(up, down, before, after, decay, dim, found, dim);
        for (int d = 0; d < dim; d++) {
            long double sum = 0;
            const double first = get(decay, d), start = get(before, d);
            for (int t = 0; t < found; t++) {
                if (t > 0) sum += get(decay, t * dim + d);
                const double a = get(up, t * dim + d), b = get(down, t * dim + d);
                CHECK(ulps(a * b, 1) <= 8, "up times down is " NUMBER, a * b);
                CHECK(a < 0x1p47 && b < 0x1p47, "a factor is " NUMBER, a > b ? a : b);
                int power;
                CHECK(t < found - 1 || (frexp(a, &power) == 0.5 && a * b == 1), "the last factor is " NUMBER, a);
                CHECK(ulps(rounded(a * get(down, d)), exact_exp(sum)) <= 12, "the decay is " NUMBER ", not %Lg", a * get(down, d), exact_exp(sum));
            }
            CHECK(get(after, d) == get(up, (found - 1) * dim + d), "after is " NUMBER, get(after, d));
            const long double exact = exact_exp(first) * get(down, d);
            if (isnan(first))
                CHECK(isnan(start), "before is " NUMBER, start);
            else
                CHECK(exact < 4 * smallest() ? start < 8 * smallest() : ulps(start, exact) <= 12, "before is " NUMBER ", not %Lg", start, exact);
        }
        release();
    }
}

/* Where the keys of each vector of lanes end: no earlier than those before. */
static ptrdiff_t *random_stops(int vectors, int ld) {
    ptrdiff_t *stops = (ptrdiff_t *)take(vectors * (ptrdiff_t)sizeof *stops, 64, 0);
    for (int v = 0; v < vectors; v++) stops[v] = v ? stops[v - 1] + below((int)(ld - stops[v - 1]) + 1) : below(ld + 1);
    return stops;
}

static void test_weigh_tokens(void) {
    for (int round = 0; round < 60; round++) {
        const int vectors = 1 + below(4), ld = vectors * lanes;
        char *w = tile(ld, ld), *high = tile(1, ld), *low = tile(1, ld);
        ptrdiff_t *stops = random_stops(vectors, ld);
        for (int i = 0; i < ld * ld; i++) put(w, i, 7);
        fill_row(high, ld, below(4) ? -40 : -31000, 0), fill_row(low, ld, -1e-9, 1e-9);
        kernels->weigh_tokens(w, ld, stops, high, low);
        for (int lane = 0; lane < ld; lane++)
            for (int j = 0; j < ld; j++) {
                const double got = get(w, j * ld + lane);
                if (j >= stops[lane / lanes] || j > lane) {
                    CHECK(got == (j >= stops[lane / lanes] ? 7 : 0), "a weight that is not asked for is " NUMBER, got);
                    continue;
                }
                /* The difference is rounded, so that a large exponential has some ULPs more. */
                const long double x = (long double)get(high, lane) + get(low, lane) - get(high, j) - get(low, j);
                const long double exact = exact_exp(x);
                CHECK(exact < 4 * smallest() ? got < 8 * smallest() : isinf(got) ? exact > largest() / 4 : ulps(got, exact) <= 8 + fabsl(x),
                      "the weight is " NUMBER ", not %Lg", got, exact);
            }
        release();
    }
}

static void test_gate(void) {
    for (int round = 0; round < 60; round++) {
        const int vectors = 1 + below(4), ld = vectors * lanes, has_weights = below(2), has_factor = below(2), seen = below(2);
        char *s = tile(ld, ld), *was = tile(ld, ld), *factor = tile(1, ld), *weights = tile(ld, ld);
        ptrdiff_t *stops = random_stops(vectors, ld);
        for (int i = 0; i < ld * ld; i++) put(s, i, below(9) ? uniform(-3, 3) : special(below(3))), put(weights, i, uniform(0, 1));
        memcpy(was, s, (size_t)(ld * ld * size));
        fill_row(factor, ld, -1, 1);
        kernels->gate(s, ld, stops, seen, has_factor ? factor : NULL, has_weights ? weights : NULL);
        for (int lane = 0; lane < ld; lane++)
            for (int j = 0; j < ld; j++) {
                const double got = get(s, j * ld + lane), old = get(was, j * ld + lane);
                const long double exact = (long double)old * (has_factor ? get(factor, lane) : 1)
                                          * (has_weights ? get(weights, j * ld + lane) : 1);
                if (j >= stops[lane / lanes])
                    CHECK(got == old || isnan(old), "a score past the stop is " NUMBER, got);
                else if (j >= lane + seen)
                    CHECK(got == 0, "a later key has " NUMBER, got);
                else
                    CHECK(isfinite(exact) ? ulps(got, exact) <= 2 : !isfinite(got), "the score is " NUMBER ", not %Lg", got, exact);
            }
        release();
    }
}

static void test_substitute(void) {
    for (int n = 1; n <= 40; n++)
        for (int round = 0; round < 4; round++) {
            const int ld = lanes * (1 + below(4)), n_cols = lanes * (1 + below(ld / lanes)), s_ld = n + below(5);
            char *u = tile(n, ld), *v = tile(n, ld), *rate = tile(1, n), *factor = tile(1, n), *was = tile(n, ld), *s = tile(n, s_ld);
            for (int i = 0; i < n * ld; i++) put(u, i, uniform(-1, 1)), put(v, i, uniform(-1, 1));
            fill_row(rate, n, 0, 2), fill_row(factor, n, -2, 2);
            for (int i = 0; i < n * s_ld; i++) put(s, i, uniform(-1, 1));
            memcpy(was, u, (size_t)(n * ld * size));
            const int found = kernels->substitute(u, factor, v, rate, ld, s, s_ld, n, n_cols);
            CHECK(!found, "found a nonfinite number of finite ones");
            for (int e = 0; e < ld; e++)
                for (int t = 0; t < n; t++) {
                    long double exact = get(was, t * ld + e) * (e < n_cols ? (long double)get(factor, t) : 1), sum = fabsl(exact);
                    for (int j = 0; j < t && e < n_cols; j++) {
                        exact += (long double)get(s, j * s_ld + t) * get(u, j * ld + e);
                        sum += fabsl((long double)get(s, j * s_ld + t) * get(u, j * ld + e));
                    }
                    if (e < n_cols) {
                        exact += (long double)get(rate, t) * get(v, t * ld + e);
                        sum += fabsl((long double)get(rate, t) * get(v, t * ld + e));
                    }
                    CHECK(fabsl(get(u, t * ld + e) - exact) <= 16 * unit * sum, "row %d is " NUMBER ", not %Lg", t, get(u, t * ld + e), exact);
                }
            put(v, below(n) * ld + below(n_cols), special(below(3)));
            CHECK(kernels->substitute(was, factor, v, rate, ld, s, s_ld, n, n_cols), "did not find a nonfinite number");
            release();
        }
}

static void test_rows_of_tokens(void) {
    for (int round = 0; round < 20; round++) {
        const int n = 1 + below(20), ld = lanes * (1 + below(5));
        char *u = tile(n, ld), *v = tile(n, ld), *beta = tile(1, n), *to = tile(n, ld);
        for (int i = 0; i < n * ld; i++) put(u, i, uniform(-1, 1)), put(v, i, uniform(-1, 1));
        fill_row(beta, n, 0, 2);
        kernels->scale_rows(to, v, beta, ld, n, ld);
        for (int i = 0; i < n * ld; i++)
            CHECK(get(to, i) == rounded(get(beta, i / ld) * get(v, i)), "a scaled number is " NUMBER, get(to, i));
        kernels->multiply(to, u, v, n * ld);
        for (int i = 0; i < n * ld; i++) CHECK(get(to, i) == rounded(get(u, i) * get(v, i)), "a product is " NUMBER, get(to, i));
        release();
    }
}

static void test_sums_of_a_state(void) {
    for (int round = 0; round < 40; round++) {
        const int dim = 1 + below(20), n_cols = lanes * (1 + below(5)), ld = n_cols + lanes * below(2), has = below(4);
        char *part = tile(dim, ld), *before = tile(1, dim), *after = tile(1, dim), *to = tile(dim, ld);
        double *sums = (double *)take(dim * ld * (ptrdiff_t)sizeof(double), 64, 0);
        double *was = (double *)take(dim * ld * (ptrdiff_t)sizeof(double), 64, 0);
        for (int i = 0; i < dim * ld; i++) was[i] = sums[i] = uniform(-1, 1), put(part, i, uniform(-1, 1));
        fill_row(before, dim, 0, 1), fill_row(after, dim, 0, 1);
        kernels->advance_sums(sums, to, part, has & 1 ? before : NULL, has & 2 ? after : NULL, ld, dim, n_cols);
        for (int d = 0; d < dim; d++)
            for (int e = 0; e < n_cols; e++) {
                const long double kept = has & 1 ? get(before, d) : 1, end = has & 2 ? get(after, d) : 1;
                const long double exact = end * (kept * was[d * ld + e] + get(part, d * ld + e));
                CHECK(fabsl(sums[d * ld + e] - exact) <= 0x1p-50, "a sum is " NUMBER ", not %Lg", sums[d * ld + e], exact);
                CHECK(get(to, d * ld + e) == rounded(sums[d * ld + e]), "a rounded one is " NUMBER, get(to, d * ld + e));
            }
        release();
    }
}

static void test_advance_token(void) {
    for (int round = 0; round < 120; round++) {
        const int dim = 1 + below(20), n_cols = 1 + below(9 * lanes), width = (n_cols + lanes - 1) / lanes * lanes;
        const int n_queries = 1 + below(9), has_beta = below(2), has_state = below(3), row = (n_cols + below(3)) * size;
        char *from = take((dim - 1) * row + n_cols * size, size, 0), *to = has_state == 2 ? from : take((dim - 1) * row + n_cols * size, size, 0);
        char *k = tile(1, dim), *v = tile(1, width), *kept = tile(1, dim), *beta = tile(1, 1), *q = tile(n_queries, dim);
        char *acc = tile(n_queries, width), *was = tile(dim, n_cols);
        fill_row(k, dim, -1, 1), fill_row(v, width, -1, 1), fill_row(kept, dim, 0, 1), fill_row(beta, 1, 0, 2);
        fill_row(q, n_queries * dim, -1, 1);
        for (int d = 0; d < dim; d++)
            for (int e = 0; e < n_cols; e++) {
                put(from + d * row, e, uniform(-1, 1));
                put(was, d * n_cols + e, has_state ? get(from + d * row, e) : 0);
            }
        kernels->advance_token(to, has_state ? from : NULL, row, row, k, v, kept, has_beta ? beta : NULL, q, dim, n_queries, dim,
                               n_cols, acc, width);
        for (int e = 0; e < n_cols; e++) {
            long double u = get(v, e);
            for (int d = 0; d < dim && has_beta; d++) u -= (long double)get(k, d) * get(kept, d) * get(was, d * n_cols + e);
            if (has_beta) u *= get(beta, 0);
            for (int d = 0; d < dim; d++) {
                const long double exact = (long double)get(kept, d) * get(was, d * n_cols + e) + get(k, d) * u;
                CHECK(fabsl(get(to + d * row, e) - exact) <= 200 * unit, "the state is " NUMBER ", not %Lg", get(to + d * row, e), exact);
            }
            for (int r = 0; r < n_queries; r++) {
                long double exact = 0;
                for (int d = 0; d < dim; d++) exact += (long double)get(q, r * dim + d) * get(to + d * row, e);
                CHECK(fabsl(get(acc, r * width + e) - exact) <= 200 * unit, "an answer is " NUMBER ", not %Lg", get(acc, r * width + e), exact);
            }
        }
        release();
    }
}

static void test_recurrent(void) {
    test_copied_tokens();
    test_stored_tokens();
    test_stable_tokens();
    test_exponentials();
    test_token_decays();
    test_decay_columns();
    test_weigh_tokens();
    test_gate();
    test_substitute();
    test_rows_of_tokens();
    test_sums_of_a_state();
    test_advance_token();
}
