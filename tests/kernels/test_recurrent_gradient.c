/* Gradients of recurrent forms. Their numbers are small integers, and their sums exact. Included by test_kernels.c only. */

/* n small integers. */
static char *small_integers(int n, int most) {
    char *to = tile(1, n);
    for (int i = 0; i < n; i++) put(to, i, below(2 * most + 1) - most);
    return to;
}

static void test_products_and_weights(void) {
    for (int round = 0; round < 20; round++) {
        const int n = lanes * (1 + below(6)), has_b = below(2);
        char *a = small_integers(n, 9), *b = small_integers(n, 9), *sums = small_integers(n, 9), *was = tile(1, n);
        memcpy(was, sums, (size_t)(n * size));
        kernels->add_products(sums, a, has_b ? b : NULL, n);
        for (int i = 0; i < n; i++)
            CHECK(get(sums, i) == get(was, i) + get(a, i) * (has_b ? get(b, i) : 1), "a sum is " NUMBER, get(sums, i));
        for (int i = 0; i < n; i++)
            if (get(b, i) == 0) put(a, i, special(below(3)));
        memcpy(was, a, (size_t)(n * size));
        kernels->weigh(a, b, n);
        for (int i = 0; i < n; i++)
            CHECK(get(a, i) == (get(b, i) == 0 ? 0 : get(was, i) * get(b, i)), "a weighed score is " NUMBER, get(a, i));
        release();
    }
}

static void test_substitute_back(void) {
    for (int n = 1; n <= 40; n++) {
        const int ld = lanes * (1 + below(4)), n_cols = lanes * (1 + below(ld / lanes)), s_ld = n + below(5);
        char *u = small_integers(n * ld, 2), *was = tile(n, ld), *s = small_integers(n * s_ld, 1);
        /* Of more rows most scores are 0, so that all numbers stay integers. */
        for (int i = 0; i < n * s_ld && n > 16; i++)
            if (below(8)) put(s, i, 0);
        memcpy(was, u, (size_t)(n * ld * size));
        kernels->substitute_back(u, ld, s, s_ld, n, n_cols);
        for (int e = 0; e < ld; e++)
            for (int t = 0; t < n; t++) {
                double exact = get(was, t * ld + e);
                for (int j = t + 1; j < n && e < n_cols; j++) exact += get(s, t * s_ld + j) * get(u, j * ld + e);
                CHECK(get(u, t * ld + e) == exact, "row %d is " NUMBER ", not " NUMBER, t, get(u, t * ld + e), exact);
            }
        release();
    }
}

static void test_cross(void) {
    for (int round = 0; round < 40; round++) {
        const int n = round == 0 ? FASTATTN_CROSSED_TOKENS : 1 + below(48), ld = (n + lanes - 1) / lanes * lanes;
        const int dim = lanes * (1 + below(3));
        char *s = small_integers(n * ld, 2), *change = small_integers(n * ld, 2), *rows = small_integers(n * dim, 2), *keys = small_integers(n * dim, 2);
        char *columns = small_integers(n * dim, 9), *was = tile(n, dim);
        double sums[FASTATTN_CROSSED_TOKENS] = {};
        /* What no lane sees, and lanes of no token, may hold anything. */
        for (int j = 0; j < n; j++)
            for (int lane = 0; lane < ld; lane++)
                if (lane >= n || lane <= j) put(s, j * ld + lane, NAN), put(change, j * ld + lane, NAN);
        memcpy(was, columns, (size_t)(n * dim * size));
        kernels->cross_tokens(sums, s, change, ld, n);
        kernels->cross_columns(columns, rows, keys, dim, change, ld, n, dim);
        for (int t = 0; t < n; t++) {
            double exact = 0;
            for (int i = t; i < n; i++)
                for (int j = 0; j < t; j++) exact += get(s, j * ld + i) * get(change, j * ld + i);
            CHECK(sums[t] == exact, "token %d of %d has " NUMBER ", not " NUMBER, t, n, sums[t], exact);
            for (int d = 0; d < dim; d++) {
                exact = get(was, t * dim + d);
                for (int i = t; i < n; i++)
                    for (int j = 0; j < t; j++) exact += get(change, j * ld + i) * get(rows, i * dim + d) * get(keys, j * dim + d);
                CHECK(get(columns, t * dim + d) == exact, "a column has " NUMBER ", not " NUMBER, get(columns, t * dim + d), exact);
            }
        }
        release();
    }
}

static void test_add_outside(void) {
    for (int round = 0; round < 20; round++) {
        const int n = 1 + below(48), dim = lanes * (1 + below(3));
        char *sums = small_integers(n * dim, 9), *was = tile(n, dim), *whole = small_integers(dim, 9);
        char *starts = small_integers(n * dim, 9), *ends = small_integers(n * dim, 9);
        memcpy(was, sums, (size_t)(n * dim * size));
        kernels->add_outside(sums, starts, ends, whole, dim, n, dim);
        for (int d = 0; d < dim; d++)
            for (int t = 0; t < n; t++) {
                double exact = get(was, t * dim + d) + get(whole, d);
                for (int i = 0; i < n; i++) exact += i >= t ? get(starts, i * dim + d) : get(ends, i * dim + d);
                CHECK(get(sums, t * dim + d) == exact, "a sum is " NUMBER ", not " NUMBER, get(sums, t * dim + d), exact);
            }
        release();
    }
}

static void test_recurrent_gradient(void) {
    test_products_and_weights();
    test_substitute_back();
    test_cross();
    test_add_outside();
}
