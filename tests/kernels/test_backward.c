/* The kernels of gradients, against their formulas in double. Included by test_kernels.c only. */

static void test_dot(void) {
    for (int n = 0; n <= 70; n++) {
        char *a = take((ptrdiff_t)n * size, 1, below(8)), *b = take((ptrdiff_t)n * size, 1, below(8));
        double sum = 0, reach = 0;
        for (int c = 0; c < n; c++) {
            put(a, c, uniform(-2, 2)), put(b, c, uniform(-2, 2));
            sum += get(a, c) * get(b, c);
            reach += fabs(get(a, c) * get(b, c));
        }
        const double got = kernels->dot(a, b, n);
        CHECK(fabs(got - sum) <= n * 0x1p-52 * reach, "%d elements: " NUMBER ", not " NUMBER, n, got, sum);
        if (n > 0) {
            put(a, below(n), NAN);
            CHECK(isnan(kernels->dot(a, b, n)), "%d elements, one of them NaN", n);
        }
        release();
    }
}

static void test_has_nonfinite(void) {
    for (int n = 0; n <= 70; n++) {
        char *a = take((ptrdiff_t)n * size, 1, below(8));
        for (int c = 0; c < n; c++) put(a, c, below(3) ? uniform(-2, 2) : below(2) ? largest() : -smallest());
        CHECK(!kernels->has_nonfinite(a, n), "%d finite numbers", n);
        for (int c = 0; c < n; c++) {
            const double before = get(a, c);
            put(a, c, special(below(3)));
            CHECK(kernels->has_nonfinite(a, n), "%d numbers, " NUMBER " at %d", n, get(a, c), c);
            put(a, c, before);
        }
        release();
    }
}

/* A difference of score and lse: of usual weights, of weights of any size, and far beyond. */
static double any_difference(void) {
    const double most = size == 4 ? 135 : 1030;
    switch (below(4)) {
    case 0: return uniform(-most, most);
    case 1: return uniform(-1, 1) * (size == 4 ? 1e30 : 1e300);
    default: return uniform(-20, 2);
    }
}

static void check_differentiate(int n_vectors, int n_keys, double factor, int is_large, int drops) {
    const int ld = n_vectors * kernels->lanes;
    const ptrdiff_t tile = (ptrdiff_t)ld * n_keys * size, row = (ptrdiff_t)ld * size;
    char *s = take(tile, 64, 0), *change = take(tile, 64, 0), *high = take(row, 1, 0), *low = take(row, 1, 0);
    char *delta = take(row, 1, 0);
    uint32_t *words = drops ? random_words(n_keys, ld) : NULL;
    const double unit = factor == LOG2E ? 1 : factor, kept_share = drops ? 0.625 : 1, eps = size == 4 ? 0x1p-23 : 0x1p-52;
    double scores[200], changes[200];
    void *weights = take(tile, 64, 0);
    for (int lane = 0; lane < ld; lane++) {
        put(high, lane, uniform(2, 5) / unit), put(low, lane, uniform(-1e-8, 1e-8) / unit), put(delta, lane, uniform(-1, 1));
        if (lane % 7 == 3) put(high, lane, NAN);
        if (lane % 7 == 5) put(high, lane, lane % 2 ? INFINITY : largest()), put(low, lane, 0);
        if (lane % 7 == 6 && is_large) {
            put(high, lane, uniform(-1, 1) * pow(2, uniform(8, size == 4 ? 100 : 1000)) / unit);
            put(low, lane, uniform(-1, 1) * fabs(get(high, lane)) * eps / 2);
        }
    }
    for (int i = 0; i < ld * n_keys; i++) {
        put(s, i, below(5) ? uniform(-20, 2) / unit : -INFINITY), put(change, i, uniform(-2, 2));
        if (get(s, i) == -INFINITY && below(2)) put(change, i, NAN); /* of a masked value */
        if (i % ld % 7 == 5 && get(s, i) != -INFINITY) put(s, i, -largest()); /* whose difference is -inf */
        if (i % ld % 7 == 6 && get(s, i) != -INFINITY) put(s, i, get(high, i % ld) + any_difference() / unit);
        scores[i] = get(s, i), changes[i] = get(change, i);
    }
    memcpy(weights, s, (size_t)tile);
    kernels->differentiate(weights, NULL, high, low, delta, ld, n_keys, factor, is_large, words, kept_share);
    kernels->differentiate(s, change, high, low, delta, ld, n_keys, factor, is_large, words, kept_share);
    CHECK(memcmp(weights, s, (size_t)tile) == 0, "weights alone differ: %d keys, %d vectors", n_keys, n_vectors);
    for (int i = 0; i < ld * n_keys; i++) {
        const int lane = i % ld;
        const double weight = (double)exp2l(factor * ((long double)scores[i] - get(high, lane) - get(low, lane)));
        const double kept = drops && !allowed(words, NULL, ld, i / ld, lane) ? 0 : 1 / kept_share;
        const double change_of_kept = kept == 0 ? 0 : kept * changes[i], slope = change_of_kept - get(delta, lane);
        if (scores[i] == -INFINITY) {
            CHECK(get(s, i) == 0 && get(change, i) == 0, "masked: weight " NUMBER ", change " NUMBER, get(s, i), get(change, i));
        } else if (isnan(get(high, lane))) {
            CHECK((kept == 0 ? get(s, i) == 0 : isnan(get(s, i))) && isnan(get(change, i)), "a row of NaN: weight " NUMBER,
                  get(s, i));
        } else if (weight == 0) {
            CHECK(get(s, i) == 0 && get(change, i) == 0, "far below: weight " NUMBER ", change " NUMBER, get(s, i), get(change, i));
        } else if (kept != 0 && kept * weight > largest() * (1 - 256 * eps)) {
            CHECK(get(s, i) > largest() * (1 - 512 * eps), "beyond the largest number: weight " NUMBER, get(s, i));
        } else if (weight < (size == 4 ? 0x1p-125 : 0x1p-1021)) {
            CHECK(fabs(get(s, i)) <= 2 * weight * kept, "too small: weight " NUMBER ", not " NUMBER, get(s, i), weight);
        } else if (weight < largest() / 8) {
            /* That the difference of score and lse is rounded does not count where the lse is the larger. */
            const double far = fabs(scores[i]) > fabs(get(high, lane)) ? fabs(factor * (scores[i] - get(high, lane))) : 0;
            /* `exp2` is exact to the rounding of its product with the factor, which counts where it is not fused. */
            const double exponent = factor * (scores[i] - get(high, lane) - get(low, lane));
            const double product = factor == 1 ? 0 : 0.35 * fabs(exponent);
            const double error = eps * (3 + drops + product + far);
            CHECK(fabs(get(s, i) - kept * weight) <= error * kept * weight, "weight " NUMBER ", not " NUMBER, get(s, i),
                  kept * weight);
            CHECK(fabs(get(change, i) - weight * slope) <= (error + 2 * eps) * weight * (fabs(change_of_kept) + fabs(get(delta, lane))),
                  "change " NUMBER ", not " NUMBER, get(change, i), weight * slope);
        }
    }
    release();
}

static void test_differentiate(void) {
    for (int n_vectors = 1; n_vectors <= 2; n_vectors++)
        for (int n_keys = 0; n_keys * n_vectors * kernels->lanes <= 200 && n_keys <= 13; n_keys++) {
            for (int drops = 0; drops < 2; drops++) {
                for (int is_large = 0; is_large < 2; is_large++) {
                    check_differentiate(n_vectors, n_keys, 1, is_large, drops);
                    check_differentiate(n_vectors, n_keys, LOG2E, is_large, drops);
                    check_differentiate(n_vectors, n_keys, 0x1p4, is_large, drops);
                    check_differentiate(n_vectors, n_keys, 0x1p21, is_large, drops);
                    check_differentiate(n_vectors, n_keys, 0x1p100, is_large, drops);
                }
            }
        }
}

static void test_largest_square(void) {
    for (int n_rows = 0; n_rows <= 2 * kernels->lanes + 3; n_rows++)
        for (int vectors = 1; vectors <= 3; vectors++) {
            const ptrdiff_t ld = vectors * kernels->lanes;
            char *rows = take(n_rows * ld * size, 1, 0);
            double largest = 0;
            for (int r = 0; r < n_rows; r++) {
                double square = 0;
                for (int c = 0; c < ld; c++) {
                    put(rows, r * ld + c, uniform(-2, 2));
                    square += get(rows, r * ld + c) * get(rows, r * ld + c);
                }
                if (r % 5 == 4)
                    put(rows, r * ld + below((int)ld), NAN);
                else if (square > largest)
                    largest = square;
            }
            const double got = kernels->largest_square(rows, n_rows, ld);
            CHECK(fabs(got - largest) <= 1e-5 * largest, "%d rows: " NUMBER ", not " NUMBER, n_rows, got, largest);
            release();
        }
}

static void test_find_largest(void) {
    for (int n_keys = 0; n_keys <= 9; n_keys++) {
        const ptrdiff_t ld = 2 * kernels->lanes;
        char *s = tile(n_keys, ld), *sizes = take((ptrdiff_t)n_keys * size, 1, 0), *tops = tile(1, ld), *largest = tile(1, ld);
        for (int i = 0; i < n_keys * ld; i++) put(s, i, below(3) ? uniform(-9, 9) : -INFINITY);
        for (int j = 0; j < n_keys; j++) put(sizes, j, uniform(0, 9));
        for (int lane = 0; lane < ld; lane++) put(tops, lane, lane % 2 ? -INFINITY : 4), put(largest, lane, lane % 3);
        kernels->find_largest(tops, largest, s, sizes, ld, n_keys);
        for (int lane = 0; lane < ld; lane++) {
            double top = lane % 2 ? -INFINITY : 4, most = lane % 3;
            for (int j = 0; j < n_keys; j++) {
                const double score = get(s, j * ld + lane);
                if (score > top) top = score;
                if (score != -INFINITY && get(sizes, j) > most) most = get(sizes, j);
            }
            CHECK(get(tops, lane) == top && get(largest, lane) == most, "%d keys: " NUMBER " and " NUMBER, n_keys,
                  get(tops, lane), get(largest, lane));
        }
        release();
    }
}

static void test_add_columns(void) {
    for (int n_rows = 1; n_rows <= 40; n_rows += n_rows < 3 ? 1 : 9)
        for (int n_keys = 1; n_keys <= 70; n_keys += n_keys < 3 ? 1 : 7)
            for (int way = 0; way < 4; way++) {
                const ptrdiff_t ld = (n_rows + lanes - 1) / lanes * lanes, stride = way % 2 ? 3 * size : size;
                void *source = tile(n_keys, ld);
                char **rows = (char **)take(n_rows * (ptrdiff_t)sizeof *rows, 8, 0);
                double sums[40][70];
                for (int i = 0; i < n_keys * ld; i++) put(source, i, below(64) - 32);
                for (int r = 0; r < n_rows; r++) {
                    /* In the ways 2 and 3 each row is that of two lanes. */
                    const int is_new = way < 2 || r % 2 == 0;
                    rows[r] = is_new ? take((n_keys - 1) * stride + size, 1, below(8)) : rows[r - 1];
                    for (int j = 0; j < n_keys && is_new; j++) {
                        sums[r][j] = below(64);
                        put(rows[r] + j * stride, 0, sums[r][j]);
                    }
                    for (int j = 0; j < n_keys; j++) {
                        const double x = get(source, j * ld + r);
                        if (is_new)
                            sums[r][j] += x;
                        else
                            sums[r][j] = sums[r - 1][j] += x;
                    }
                }
                kernels->add_columns(rows, stride, n_rows, source, ld, n_keys);
                for (int r = 0; r < n_rows; r++)
                    for (int j = 0; j < n_keys; j++)
                        CHECK(get(rows[r] + j * stride, 0) == sums[r][j], "%d rows, %d keys, way %d: row %d, key %d", n_rows,
                              n_keys, way, r, j);
                release();
            }
}

static void test_uncap(void) {
    const int n = 3 * kernels->lanes;
    const double cap = 1.75, eps = size == 4 ? 0x1p-23 : 0x1p-52;
    char *change = take((ptrdiff_t)n * size, 64, 0), *capped = take((ptrdiff_t)n * size, 64, 0), *before;
    before = take((ptrdiff_t)n * size, 1, 0);
    for (int i = 0; i < n; i++) {
        put(capped, i, i % 5 == 2 ? NAN : uniform(-cap, cap));
        put(change, i, i % 5 == 2 ? 0 : uniform(-2, 2));
    }
    memcpy(before, change, (size_t)(n * size));
    kernels->uncap(change, capped, kernels->lanes, 3, cap);
    for (int i = 0; i < n; i++) {
        const double ratio = get(capped, i) / cap, wanted = get(before, i) * (1 - ratio * ratio);
        if (i % 5 == 2)
            CHECK(get(change, i) == 0, "0 became " NUMBER, get(change, i));
        else
            CHECK(fabs(get(change, i) - wanted) <= 4 * eps * fabs(get(before, i)), NUMBER ", not " NUMBER, get(change, i), wanted);
    }
    release();
}
