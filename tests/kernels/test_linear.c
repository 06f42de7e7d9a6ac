/* Linear attention: features. Included by test_kernels.c only. */

static void check_feature(const char *got, double x) {
    const long double exact = x > 0 ? (long double)x + 1 : exact_exp(x);
    const double smallest = size == 8 ? 0x1p-1022 : 0x1p-126, y = get(got, 0);
    if (exact < 2 * smallest)
        CHECK(y == 0 || ulps(y, exact) <= 2, "the feature of " NUMBER " is " NUMBER, x, y);
    else
        CHECK(ulps(y, exact) <= 2, "the feature of " NUMBER " is " NUMBER ", %.2f ULP off", x, y, ulps(y, exact));
}

static void test_linear(void) {
    const double special[] = {0.0, -0.0, INFINITY, -INFINITY, NAN, 1e30, -1e30, 1e-30, -1e-30};
    const int n_special = (int)(sizeof special / sizeof *special);
    for (int vectors = 1; vectors <= 19; vectors++) {
        const int n = vectors * kernels->lanes;
        char *x = tile(1, n), *before = tile(1, n);
        for (int round = 0; round < 50; round++) {
            const double reach = round % 3 == 0 ? 1 : round % 3 == 1 ? 20 : size == 8 ? 720 : 90;
            for (int i = 0; i < n; i++)
                put(x, i, below(8) == 0 ? special[below(n_special)] : uniform(-reach, reach / 4));
            memcpy(before, x, (size_t)(n * size));
            kernels->elu_plus_one(x, n);
            for (int i = 0; i < n; i++)
                if (isnan(get(before, i)))
                    CHECK(isnan(get(x, i)), "the feature of NaN is " NUMBER, get(x, i));
                else if (isinf(get(before, i)))
                    CHECK(get(x, i) == (get(before, i) > 0 ? INFINITY : 0), "the feature of an infinity is " NUMBER, get(x, i));
                else
                    check_feature(x + i * size, get(before, i));
        }
        release();
    }
}
