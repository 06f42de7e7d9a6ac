/* The fused kernels: the parts of numbers, the three works of a step, what a lane's bits depend on, and the model of
 * the tile unit. Included by test_kernels.c only. */

enum {
    BLOCK_LANES = FASTATTN_FUSED_LANES,
    TILE_KEYS = FASTATTN_FUSED_KEYS,
    OF_GROUP = 32, /* rows or columns, keys and lanes */
    GROUP_NBYTES = FASTATTN_GROUP_NBYTES,
    PART_NBYTES = FASTATTN_PART_NBYTES,
    MOST_COLUMNS = 128
};

/* The largest errors seen, in the units of their checks. */
static struct {
    double scores, weights, sums;
} fused_errors;

static int groups_in(int n) { return (n + OF_GROUP - 1) / OF_GROUP; }
static char *groups_for(int n, int n_parts) { return take((ptrdiff_t)n * n_parts * PART_NBYTES, 64, 0); }
static int any_parts(void) { return below(3) ? 3 : 1; }
static int any_query_parts(int n_parts) { return n_parts == 1 && below(2) ? 1 : 3; }
static int any_weight_parts(int query_parts) { return query_parts == 1 && below(2) ? 1 : 3; }

static float float_of(uint32_t bits) {
    float x;
    return memcpy(&x, &bits, 4), x;
}

/* What the high half of x's bits stands for. Not inline: GCC 12 (split1, x86) loses the lower half's `and` with 0 where
 * a float is rounded from a double before. */
static __attribute__((noinline)) float cut(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return float_of(bits & 0xffff0000u);
}

/* The nearest number to 0 that so many parts hold. */
static float cut_to(int n_parts, float x) { return n_parts == 3 ? x : cut(x); }

/* Where a part of an element lies: the k-th of a sum's 32, of row x of the left operand (keys, values) or of lane x
 * of the right one (queries, weights). A word holds two elements, k and k + 16. */
static char *part_address(const char *group, int is_right, int part, int x, int k) {
    const int in_part = is_right ? x / 16 * 1024 + k % 16 * 64 + x % 16 * 4 : x * 64 + k % 16 * 4;
    return (char *)group + part * PART_NBYTES + in_part + k / 16 * 2;
}

static double part_of(const char *group, int is_right, int part, int x, int k) {
    uint16_t bits;
    memcpy(&bits, part_address(group, is_right, part, x, k), 2);
    return float_of((uint32_t)bits << 16);
}

/* Exact: a few more bits than those of a float32. */
static double parts_sum(const char *group, int is_right, int n_parts, int x, int k) {
    double sum = 0;
    for (int part = 0; part < n_parts; part++) sum += part_of(group, is_right, part, x, k);
    return sum;
}

/* ------------------------------------------------------------------ split_queries, split_keys, split_values */

enum { OF_QUERIES, OF_KEYS, OF_VALUES };

static int has_parts(int kind, float x) {
    const float magnitude = fabsf(x);
    if (kind != OF_VALUES) return magnitude < 0x1p60f;
    return x == 0 || (magnitude >= 0x1p-64f && magnitude < 0x1p120f);
}

static float number_with_parts(int kind, int n_parts, int wanted) {
    static const float edges[] = {0,        0x1p-149f,       0x1p-126f,   0x1.fffffep-65f, 0x1p-64f, 0x1.fffffep59f,
                                  0x1p60f,  0x1.fffffep119f, 0x1p120f,    FLT_MAX,         INFINITY, NAN,
                                  0x1.ffp0, 0x1.01p0,        0x1.00fffep3f, 0x1.fefffep3f};
    for (;;) {
        const float edge = edges[below(COUNT(edges))] * (below(2) ? 1 : -1);
        const float x = cut_to(n_parts, below(8) ? float_of((uint32_t)random_bits()) : edge);
        if (has_parts(kind, x) == wanted) return x;
    }
}

static void check_parts(const char *group, int kind, int n_parts, int x, int k, float number) {
    const int is_right = kind == OF_QUERIES, has = has_parts(kind, number);
    const double sum = parts_sum(group, is_right, n_parts, x, k), high = part_of(group, is_right, 0, x, k);
    /* A bfloat16 has no bit below 2^-133. */
    const int is_exact = n_parts == 1 || fabsf(number) >= 0x1p-110f || number == 0;
    CHECK(!has ? sum == 0 && high == 0 : is_exact ? sum == number : fabs(sum - number) < 0x1p-133,
          "kind %d, row or lane %d, number %d: %.9g became " NUMBER, kind, x, k, (double)number, sum);
    for (int part = 1; part < n_parts; part++) {
        const double lower = part_of(group, is_right, part, x, k);
        CHECK(!has ? lower == 0 : !is_exact || fabs(lower) <= fabs(high) * (part == 1 ? 0x1p-8 : 0x1p-16),
              "kind %d: part %d of %.9g is %g", kind, part, (double)number, lower);
    }
}

/* n rows of keys or values, or the lanes of queries; few have numbers without parts. */
static void check_split(int kind, int n_parts, int n, int n_columns) {
    const int tile_groups = kind == OF_VALUES ? 1 + below(8) : 1, at = below(tile_groups);
    const int column_groups = groups_in(n_columns), group_nbytes = n_parts * PART_NBYTES;
    const ptrdiff_t ld = BLOCK_LANES + below(3) * 16; /* of a packed tile of queries */
    const ptrdiff_t gaps[] = {0, 12, 1, 3}, span = n_columns * 4 + gaps[below(4)];
    const ptrdiff_t row = below(6) ? below(4) ? span : -span : 0;
    const Matrix m = kind == OF_QUERIES ? (Matrix){tile(n_columns, ld), n, n_columns, 4, ld * 4, 4}
                                        : matrix(n, n_columns, row, 4, below(8));
    char *const groups = groups_for(column_groups * tile_groups, n_parts);
    uint32_t want = 0, got;
    for (int r = 0; r < n; r++)
        for (int c = 0; c < n_columns; c++) put(element(&m, r, c), 0, number_with_parts(kind, n_parts, 1));
    for (int i = below(2) ? below(4) : 0; i > 0; i--)
        put(element(&m, below(n), below(n_columns)), 0, number_with_parts(kind, n_parts, 0));
    seal(&m);
    if (kind == OF_QUERIES)
        got = kernels->fused->split_queries(groups, (const float *)m.at, ld, n_columns);
    else if (kind == OF_KEYS)
        got = kernels->fused->split_keys(groups, n_parts, m.at, m.row, n, n_columns);
    else
        got = kernels->fused->split_values(groups, n_parts, tile_groups, m.at, m.row, n, n_columns, at);
    for (int r = 0; r < OF_GROUP; r++)
        for (int c = 0; c < column_groups * OF_GROUP; c++) {
            const float x = r < n && c < n_columns ? (float)entry(&m, r, c) : 0;
            const char *const group = groups + (c / OF_GROUP * tile_groups + at) * group_nbytes;
            if (!has_parts(kind, x)) want |= (uint32_t)1 << r;
            CHECK(kind != OF_VALUES || !fastattn_is_split(x) == !has_parts(kind, x), "fastattn_is_split(%.9g)",
                  (double)x);
            if (kind == OF_VALUES)
                check_parts(group, kind, n_parts, c % OF_GROUP, r, x);
            else
                check_parts(group, kind, n_parts, r, c % OF_GROUP, x);
        }
    CHECK(got == want, "kind %d, %d rows, %d columns: flags %08x, not %08x", kind, n, n_columns, got, want);
    for (int i = 0; i < column_groups * tile_groups; i++)
        for (int b = 0; i % tile_groups != at && b < group_nbytes; b++)
            CHECK((groups[i * group_nbytes + b] & 0xff) == 0xff, "group %d is not its own, %d", i, at);
    release();
}

static void test_split(void) {
    for (int n_columns = 1; n_columns <= 100; n_columns++) {
        check_split(OF_QUERIES, 3, BLOCK_LANES, n_columns);
        for (int i = 0; i < 3; i++)
            for (int kind = OF_KEYS; kind <= OF_VALUES; kind++)
                check_split(kind, any_parts(), 1 + below(OF_GROUP), n_columns);
    }
    for (int n = 1; n <= OF_GROUP; n++)
        check_split(OF_KEYS, any_parts(), n, 1 + below(100)), check_split(OF_VALUES, any_parts(), n, 1 + below(100));
}

/* ------------------------------------------------------------------ step: the three works */

/* Rows of keys or values, which all have parts, in groups as of one key tile. */
static int in_group(int n_keys, int j) { return n_keys - j < OF_GROUP ? n_keys - j : OF_GROUP; }

static char *key_groups(const float *k, int n_parts, int n_keys, int head_dim) {
    char *const groups = groups_for(groups_in(n_keys) * groups_in(head_dim), n_parts);
    for (int j = 0; j < n_keys; j += OF_GROUP)
        kernels->fused->split_keys(groups + j / OF_GROUP * groups_in(head_dim) * n_parts * PART_NBYTES, n_parts,
                                   (const char *)(k + j * head_dim), head_dim * 4, in_group(n_keys, j), head_dim);
    return groups;
}

static char *value_groups(const float *v, int n_parts, int n_keys, int value_dim, int tile_groups) {
    char *const groups = groups_for(tile_groups * groups_in(value_dim), n_parts);
    for (int j = 0; j < n_keys; j += OF_GROUP)
        kernels->fused->split_values(groups, n_parts, tile_groups, (const char *)(v + j * value_dim), value_dim * 4,
                                     in_group(n_keys, j), value_dim, j / OF_GROUP);
    return groups;
}

static char *query_groups(const float *q, int head_dim) {
    char *const groups = groups_for(groups_in(head_dim), 3);
    kernels->fused->split_queries(groups, q, BLOCK_LANES, head_dim);
    return groups;
}

/* Numbers that so many parts hold, of about the same size, or of many. */
static float *random_floats(ptrdiff_t n, int n_parts, int powers) {
    float *const x = (float *)take(n * 4, 64, 0);
    for (ptrdiff_t i = 0; i < n; i++)
        x[i] = cut_to(n_parts, (float)ldexp(uniform(-1, 1), powers ? below(2 * powers) - powers : 0));
    return x;
}

/* One step with the tile unit at hand. */
static void step(fastattn_unit *scored, fastattn_unit *weighted, fastattn_unit *added, int head_dim, int value_dim,
                 float factor) {
    kernels->fused->begin();
    kernels->fused->step(scored, weighted, added, head_dim, value_dim, factor);
    kernels->fused->end();
}

/* The error of a sum of products, in units of 2^-24 times the sum of their absolute values, is at most this. Two
 * chains of 16 are added, 17 roundings, and then all groups. Of the smaller products, together below 2^-6 of the sum,
 * there are five times as many. Products that are left out are less than 2^-22, 4 units. */
static double sum_bound(int n_groups) { return 22 + 1.2 * n_groups; }

static void check_sum(double *largest_error, double got, long double exact, long double absolute, int n_groups,
                      const char *what, int x, int lane) {
    const double error = absolute > 0 ? (double)(fabsl(got - exact) / absolute * 0x1p24L) : got == 0 ? 0 : INFINITY;
    if (error > *largest_error) *largest_error = error;
    CHECK(error <= sum_bound(n_groups), "%s %d, lane %d of %d groups is " NUMBER ", not " NUMBER, what, x, lane,
          n_groups, got, (double)exact);
}

/* `score`, and `step` with other parts of the same keys: the same numbers as those of `step`. */
static void check_other_scores(const fastattn_unit *u, const float *k, int head_dim) {
    const int n_keys = (int)u->n_keys, padded = groups_in(n_keys) * OF_GROUP, ld = BLOCK_LANES + below(3) * 16;
    float *const scores = tile(padded, ld);
    fastattn_unit other = *u;
    kernels->fused->begin();
    kernels->fused->score(scores, ld, u->query, u->key, u->n_parts, n_keys, head_dim);
    kernels->fused->end();
    if (u->n_parts == 1) {
        other.n_parts = other.query_parts = other.weight_parts = 3;
        other.key = key_groups(k, 3, n_keys, head_dim);
    }
    other.scores = tile(padded, BLOCK_LANES);
    step(&other, NULL, NULL, head_dim, 1, 1);
    for (int j = 0; j < padded; j++)
        for (int lane = 0; lane < ld; lane++) {
            const float want = lane < BLOCK_LANES ? u->scores[j * BLOCK_LANES + lane] : NAN;
            const float got = scores[j * ld + lane];
            CHECK(j < n_keys ? same(got, want) : lane < BLOCK_LANES ? got == 0 : isnan(got),
                  "`score` of key %d, lane %d is " NUMBER ", not " NUMBER, j, lane, (double)got, (double)want);
            CHECK(lane >= BLOCK_LANES || same(other.scores[j * BLOCK_LANES + lane], want),
                  "the score of key %d in 3 parts, lane %d is " NUMBER ", not " NUMBER, j, lane,
                  (double)other.scores[j * BLOCK_LANES + lane], (double)want);
        }
}

static void check_scores(int n_keys, int head_dim, int powers) {
    const int padded = groups_in(n_keys) * OF_GROUP, n_parts = any_parts(), query_parts = any_query_parts(n_parts);
    const float *const q = random_floats(head_dim * BLOCK_LANES, query_parts, powers);
    const float *const k = random_floats(n_keys * head_dim, n_parts, powers);
    fastattn_unit u = {.query = query_groups(q, head_dim), .key = key_groups(k, n_parts, n_keys, head_dim),
                       .n_parts = n_parts, .query_parts = query_parts,
                       .weight_parts = any_weight_parts(query_parts), .n_keys = n_keys};
    float top[BLOCK_LANES];
    u.plain = below(groups_in(n_keys) + 1) * OF_GROUP;
    u.plain_stop = below(2) ? n_keys : u.plain + below((padded - (int)u.plain) / OF_GROUP + 1) * OF_GROUP;
    if (u.plain > n_keys) u.plain = n_keys;
    if (u.plain_stop > n_keys) u.plain_stop = n_keys;
    u.scores = tile(padded, BLOCK_LANES);
    for (int lane = 0; lane < BLOCK_LANES; lane++) {
        u.tile_max[lane] = lane % 3 == 0 ? -INFINITY : lane % 3 == 1 ? (float)small() : 0x1p100f;
        top[lane] = u.tile_max[lane];
    }
    step(&u, NULL, NULL, head_dim, 1, 1);
    for (int j = 0; j < padded; j++)
        for (int lane = 0; lane < BLOCK_LANES; lane++) {
            const float got = u.scores[j * BLOCK_LANES + lane];
            long double sum = 0, absolute = 0;
            if (j >= n_keys) {
                CHECK(got == -INFINITY, "%d keys: the score of key %d is %g", n_keys, j, (double)got);
                continue;
            }
            for (int d = 0; d < head_dim; d++) {
                const double product = (double)q[d * BLOCK_LANES + lane] * k[j * head_dim + d]; /* exact */
                sum += product, absolute += fabs(product);
            }
            check_sum(&fused_errors.scores, got, sum, absolute, groups_in(head_dim), "the score of key", j, lane);
            if (j >= u.plain && j < u.plain_stop && got > top[lane]) top[lane] = got;
        }
    for (int lane = 0; lane < BLOCK_LANES; lane++)
        CHECK(u.tile_max[lane] == top[lane], "%d keys, plain %td to %td: tile_max of lane %d is %g, not %g", n_keys,
              u.plain, u.plain_stop, lane, (double)u.tile_max[lane], (double)top[lane]);
    check_other_scores(&u, k, head_dim);
    release();
}

static void test_scores(void) {
    const int dims[] = {1, 16, 17, 32, 33, 64, 65, 100, 128};
    for (int n_keys = 1; n_keys <= TILE_KEYS; n_keys++) check_scores(n_keys, 1 + below(70), below(2) * 10);
    for (int i = 0; i < 3; i++)
        for (int d = 0; d < COUNT(dims); d++) check_scores(1 + below(TILE_KEYS), dims[d], below(2) * 10);
}

/* A weight is within this of its exact value, in units of 2^-24 times that: 3 of `exp2`, and of the difference of
 * the scores and its product with the factor, which are rounded once each. */
static double weight_bound(double exponent) { return 4 + 2 * LN2 * fabs(exponent); }

/* Scores, of which lanes have none, one below an earlier one, or all. */
static fastattn_unit scores_to_weigh(int n_keys) {
    const int padded = groups_in(n_keys) * OF_GROUP;
    fastattn_unit u = {.n_parts = any_parts(), .n_keys = n_keys, .scores = tile(padded, BLOCK_LANES),
                       .weights = groups_for(groups_in(n_keys), 3), .row_max = tile(1, BLOCK_LANES),
                       .row_sum = tile(1, BLOCK_LANES)};
    u.query_parts = any_query_parts(u.n_parts);
    u.weight_parts = any_weight_parts(u.query_parts);
    for (int lane = 0; lane < BLOCK_LANES; lane++) {
        const int kind = lane % 4, only = below(n_keys);
        const double spread = lane % 5 ? 8 : 200;
        u.tile_max[lane] = -INFINITY;
        for (int j = 0; j < padded; j++) {
            const int has = j < n_keys && (kind == 0 || (kind == 1 && below(3)) || (kind == 2 && j == only));
            const float s = has ? (float)uniform(-spread, spread / 4) : -INFINITY;
            u.scores[j * BLOCK_LANES + lane] = s;
            if (s > u.tile_max[lane]) u.tile_max[lane] = s;
        }
        u.row_max[lane] = below(2) ? -INFINITY : (float)uniform(-spread, spread);
        if (kind == 2) u.row_max[lane] = (float)(spread / 4 + uniform(0, 5));
        u.row_sum[lane] = kind == 2 || u.row_max[lane] == -INFINITY ? 0 : (float)uniform(1, 20);
    }
    return u;
}

static void check_weights(int n_keys, float factor) {
    const int padded = groups_in(n_keys) * OF_GROUP;
    fastattn_unit u = scores_to_weigh(n_keys), dropped = u;
    const ptrdiff_t nbytes = (ptrdiff_t)groups_in(n_keys) * GROUP_NBYTES;
    float old_max[BLOCK_LANES], old_sum[BLOCK_LANES];
    uint32_t *const words = random_words(n_keys, BLOCK_LANES);
    memcpy(old_max, u.row_max, sizeof old_max), memcpy(old_sum, u.row_sum, sizeof old_sum);
    dropped.drop_words = words;
    dropped.weights = memset(groups_for(groups_in(n_keys), 3), 0xff, (size_t)nbytes);
    dropped.row_max = memcpy(tile(1, BLOCK_LANES), u.row_max, sizeof old_max);
    dropped.row_sum = memcpy(tile(1, BLOCK_LANES), u.row_sum, sizeof old_sum);
    step(NULL, &u, NULL, 1, 1, factor);
    step(NULL, &dropped, NULL, 1, 1, factor);
    for (int lane = 0; lane < BLOCK_LANES; lane++) {
        const float top = fmaxf(old_max[lane], u.tile_max[lane]);
        const double change = top == -INFINITY ? -INFINITY : (double)factor * ((double)old_max[lane] - top);
        const double want_scale = exp2(change), scale = u.rescale[lane];
        double sum = scale * old_sum[lane], sum_error = 0;
        CHECK(u.row_max[lane] == top, "row_max is %g, not %g", (double)u.row_max[lane], (double)top);
        CHECK(change == -INFINITY || change == 0 || (change < -125 && scale == 0)
                  ? scale == (change == 0 ? 1 : 0)
                  : fabs(scale - want_scale) <= weight_bound(change) * 0x1p-24 * want_scale,
              "rescale is " NUMBER ", not " NUMBER, scale, want_scale);
        for (int j = 0; j < padded; j++) {
            const char *const group = u.weights + j / OF_GROUP * GROUP_NBYTES;
            const float s = u.scores[j * BLOCK_LANES + lane];
            const int n_parts = u.weight_parts;
            const double got = parts_sum(group, 1, n_parts, lane, j % OF_GROUP);
            const double high = part_of(group, 1, 0, lane, j % OF_GROUP);
            const double middle = n_parts == 3 ? part_of(group, 1, 1, lane, j % OF_GROUP) : 0;
            const double low = n_parts == 3 ? part_of(group, 1, 2, lane, j % OF_GROUP) : 0;
            const long double exponent = (long double)factor * ((long double)s - top);
            const long double exact = s == -INFINITY ? 0 : exp2l(exponent);
            sum += n_parts == 3 || got == 0 ? got : (double)exact; /* weights of about 2^-126 may be 0 */
            sum_error += n_parts == 3 || got == 0 ? 0 : weight_bound((double)exponent) * 0x1p-24 * (double)exact;
            CHECK(high >= 0 && middle >= 0 && low >= 0 && middle <= high * 0x1p-7 && low <= high * 0x1p-15,
                  "the parts of a weight are %g, %g and %g", high, middle, low);
            if (s == -INFINITY) {
                CHECK(high == 0 && middle == 0 && low == 0, "the weight of -inf is %g", got);
            } else {
                /* A part has no bit below 2^-133; one part alone is rounded to 8 bits. */
                const double error = (double)((fabsl(got - exact) - 0x1p-133L) / exact * 0x1p24L);
                const double bound = weight_bound((double)exponent) + (n_parts == 3 ? 0 : 0x1p16);
                CHECK(error <= bound || (exponent < -125 && got == 0), "the weight of 2^" NUMBER " is " NUMBER,
                      (double)exponent, got);
                if (n_parts == 3 && got > 0 && error / bound > fused_errors.weights) fused_errors.weights = error / bound;
                /* The only one in this sum, of which no bit is lost. */
                if (lane % 4 == 2 && n_parts == 3)
                    CHECK(u.row_sum[lane] >= 0x1p-110f ? got == u.row_sum[lane] : u.row_sum[lane] - got <= 0x1p-133,
                          "the parts sum to " NUMBER ", not " NUMBER, got, (double)u.row_sum[lane]);
            }
            for (int part = 0; part < n_parts; part++) {
                const int is_kept = j < n_keys && words[j / 32 * BLOCK_LANES + lane] >> (j % 32) & 1;
                const double want = is_kept ? part_of(group, 1, part, lane, j % OF_GROUP) : 0;
                const char *const after_drop = dropped.weights + j / OF_GROUP * GROUP_NBYTES;
                const double after = part_of(after_drop, 1, part, lane, j % OF_GROUP);
                CHECK(after == want, "key %d, lane %d: kept %d, part %d is %g, not %g", j, lane, is_kept, part, after,
                      want);
            }
        }
        /* 16 sums of two keys are added, then the sums of the groups, then what was there. */
        CHECK(fabs(u.row_sum[lane] - sum) <= (16 + groups_in(n_keys) + 2) * 0x1p-24 * sum + sum_error + n_keys * 0x1p-133,
              "%d keys: row_sum is " NUMBER ", not " NUMBER, n_keys, (double)u.row_sum[lane], sum);
        CHECK(same(dropped.row_sum[lane], u.row_sum[lane]) && same(dropped.row_max[lane], u.row_max[lane]) &&
                  same(dropped.rescale[lane], u.rescale[lane]),
              "dropout makes the sum " NUMBER ", not " NUMBER, (double)dropped.row_sum[lane],
              (double)u.row_sum[lane]);
    }
    release();
}

static void test_weights(void) {
    const float factors[] = {1, (float)LOG2E, 0.5f, 4};
    for (int n_keys = 1; n_keys <= TILE_KEYS; n_keys++)
        for (int i = 0; i < 2; i++) check_weights(n_keys, factors[(n_keys + i * below(3)) % COUNT(factors)]);
}

static void check_sums(int n_keys, int value_dim, int is_first) {
    const int n_groups = groups_in(n_keys), first = below(3), tile_groups = first + n_groups + below(3);
    const int n_parts = any_parts(), rows = first * OF_GROUP + n_keys, query_parts = any_query_parts(n_parts);
    const int weight_parts = any_weight_parts(query_parts);
    const float *const v = random_floats(rows * value_dim, n_parts, below(2) * 10);
    char *const weights = groups_for(n_groups, 3);
    float *const acc = tile(value_dim, BLOCK_LANES), old[MOST_COLUMNS * BLOCK_LANES];
    float p[TILE_KEYS][BLOCK_LANES] = {};
    fastattn_unit u = {.value = value_groups(v, n_parts, rows, value_dim, tile_groups) + first * n_parts * PART_NBYTES,
                       .n_parts = n_parts, .query_parts = query_parts, .weight_parts = weight_parts,
                       .tile_groups = tile_groups, .n_keys = n_keys, .acc = acc,
                       .is_first = is_first, .weights = weights}, other;
    for (int j = 0; j < n_groups * OF_GROUP; j++)
        for (int lane = 0; lane < BLOCK_LANES; lane++) {
            float left = p[j][lane] = cut_to(weight_parts, j < n_keys && below(8) ? (float)exp2(uniform(-20, 0)) : 0);
            for (int part = 0; part < 3; part++) {
                uint32_t bits;
                memcpy(&bits, &left, 4);
                memcpy(part_address(weights + j / OF_GROUP * GROUP_NBYTES, 1, part, lane, j % OF_GROUP),
                       (char *)&bits + 2, 2);
                left -= cut(left);
            }
        }
    for (int lane = 0; lane < BLOCK_LANES; lane++)
        u.rescale[lane] = is_first ? NAN : lane % 4 == 0 ? 1 : lane % 4 == 1 ? 0 : (float)uniform(0, 1);
    for (int i = 0; !is_first && i < value_dim * BLOCK_LANES; i++) acc[i] = (float)uniform(-100, 100);
    memcpy(old, acc, (size_t)(value_dim * BLOCK_LANES) * 4);
    other = u;
    other.n_parts = other.query_parts = other.weight_parts = 3;
    other.value = value_groups(v, 3, rows, value_dim, tile_groups) + first * GROUP_NBYTES;
    other.acc = memcpy(tile(value_dim, BLOCK_LANES), acc, (size_t)(value_dim * BLOCK_LANES) * 4);
    step(NULL, NULL, &u, 1, value_dim, 1);
    step(NULL, NULL, &other, 1, value_dim, 1);
    for (int e = 0; e < value_dim; e++)
        for (int lane = 0; lane < BLOCK_LANES; lane++) {
            long double sum = is_first ? 0 : (long double)u.rescale[lane] * old[e * BLOCK_LANES + lane];
            long double absolute = fabsl(sum);
            for (int j = 0; j < n_keys; j++) {
                const double product = (double)p[j][lane] * v[(first * OF_GROUP + j) * value_dim + e];
                sum += product, absolute += fabs(product);
            }
            check_sum(&fused_errors.sums, acc[e * BLOCK_LANES + lane], sum, absolute, n_groups, "column", e, lane);
            CHECK(acc[e * BLOCK_LANES + lane] == other.acc[e * BLOCK_LANES + lane],
                  "column %d, lane %d is " NUMBER ", in 3 parts " NUMBER, e, lane, (double)acc[e * BLOCK_LANES + lane],
                  (double)other.acc[e * BLOCK_LANES + lane]);
        }
    release();
}

static void test_sums(void) {
    for (int n_keys = 1; n_keys <= TILE_KEYS; n_keys++) check_sums(n_keys, 1 + below(40), n_keys % 2);
    for (int value_dim = 1; value_dim <= 100; value_dim++) check_sums(1 + below(TILE_KEYS), value_dim, below(2));
}

/* ------------------------------------------------------------------ attention through the pipeline */

enum { MOST_BLOCKS = 3, MOST_KEYS = 600 };

typedef struct {
    int n_blocks, n_parts, query_parts, weight_parts, len_k, head_dim, value_dim;
    float factor;
    float *q, *k, *v;      /* q[block][d][lane], k[j][d], v[j][e] */
    unsigned char *masked; /* [block][lane][j] */
    int low, high;         /* no lane has other keys; low is a multiple of 32 */
    uint32_t nan_lanes;    /* their scores become NaN here and there */
    int apart;             /* each unit's works are steps of their own */
} Fused;

typedef struct {
    float row_max[MOST_BLOCKS][BLOCK_LANES], row_sum[MOST_BLOCKS][BLOCK_LANES];
    float acc[MOST_BLOCKS][MOST_COLUMNS][BLOCK_LANES];
} FusedResult;

static int is_masked(const Fused *f, int block, int lane, int j) {
    return f->masked[(block * BLOCK_LANES + lane) * f->len_k + j];
}

/* What the driver does between the scores of a unit and its weights. */
static void mask_unit(const Fused *f, fastattn_unit *u, int block, int key0) {
    for (int lane = 0; lane < BLOCK_LANES; lane++) {
        float *const top = &u->tile_max[lane];
        for (int j = 0; j < u->n_keys; j++) {
            float *const s = &u->scores[j * BLOCK_LANES + lane];
            if (is_masked(f, block, lane, key0 + j)) *s = -INFINITY;
            if (f->nan_lanes >> lane & 1 && below(2)) *s = NAN;
            if (u->plain_stop == 0 && *s > *top) *top = *s;
        }
        if (f->nan_lanes >> lane & 1) *top = NAN;
    }
}

/* A thread's share of the driver: query blocks over key tiles, through the pipeline. */
static struct {
    char *queries[MOST_BLOCKS], *keys[3], *values[3], *weights[2];
    float *acc[MOST_BLOCKS], *row_max[MOST_BLOCKS], *row_sum[MOST_BLOCKS], *scores[2];
    int is_started[MOST_BLOCKS];
} work;

static void split_all(const Fused *f) {
    for (int b = 0; b < f->n_blocks; b++) {
        work.queries[b] = query_groups(f->q + b * f->head_dim * BLOCK_LANES, f->head_dim);
        work.acc[b] = tile(f->value_dim, BLOCK_LANES);
        work.row_max[b] = filled(1, BLOCK_LANES, -INFINITY), work.row_sum[b] = filled(1, BLOCK_LANES, 0);
        work.is_started[b] = 0;
    }
    for (int t = 0; t * TILE_KEYS < f->len_k; t++) {
        const int first = t * TILE_KEYS, n = f->len_k - first < TILE_KEYS ? f->len_k - first : TILE_KEYS;
        work.keys[t] = key_groups(f->k + first * f->head_dim, f->n_parts, n, f->head_dim);
        work.values[t] = value_groups(f->v + first * f->value_dim, f->n_parts, n, f->value_dim, TILE_KEYS / OF_GROUP);
    }
    for (int i = 0; i < 2; i++) {
        work.scores[i] = tile(TILE_KEYS, BLOCK_LANES);
        work.weights[i] = groups_for(TILE_KEYS / OF_GROUP, 3);
    }
}

/* The t-th unit: the keys key0 .. stop - 1 of a block. */
static void start_unit(const Fused *f, fastattn_unit *u, int t, int block, int key0, int stop) {
    const int key_tile = key0 / TILE_KEYS, group = key0 % TILE_KEYS / OF_GROUP;
    int n_masked = 0;
    memset(u, 0, sizeof *u);
    u->query = work.queries[block];
    u->key = work.keys[key_tile] + group * groups_in(f->head_dim) * f->n_parts * PART_NBYTES;
    u->value = work.values[key_tile] + group * f->n_parts * PART_NBYTES;
    u->n_parts = f->n_parts;
    u->query_parts = f->query_parts;
    u->weight_parts = f->weight_parts;
    u->tile_groups = TILE_KEYS / OF_GROUP;
    u->n_keys = stop - key0;
    u->row_max = work.row_max[block], u->row_sum = work.row_sum[block], u->acc = work.acc[block];
    u->is_first = !work.is_started[block]++;
    u->scores = work.scores[t % 2], u->weights = work.weights[t % 2];
    for (int lane = 0; lane < BLOCK_LANES; lane++) {
        u->tile_max[lane] = -INFINITY;
        for (int j = key0; j < stop; j++) n_masked += is_masked(f, block, lane, j);
    }
    u->plain_stop = n_masked ? 0 : u->n_keys;
}

static void attend_fused(const Fused *f, FusedResult *out) {
    const int n_units = (f->len_k + TILE_KEYS - 1) / TILE_KEYS * f->n_blocks, taken_before = n_taken;
    const fastattn_fused *const fused = kernels->fused;
    fastattn_unit units[3], *weighted = NULL, *added = NULL;
    split_all(f);
    fused->begin();
    for (int t = 0, next = 0;; t++) {
        fastattn_unit *scored = NULL;
        int block = 0, key0 = 0;
        for (; !scored && next < n_units; next++) {
            const int start = next / f->n_blocks * TILE_KEYS, end = start + TILE_KEYS;
            const int stop = f->high < end ? f->high : end;
            block = next % f->n_blocks;
            key0 = f->low > start ? f->low : start;
            if (stop > key0) start_unit(f, scored = &units[t % 3], t, block, key0, stop);
        }
        if (!scored && !weighted && !added) break;
        if (f->apart) {
            if (added) fused->step(NULL, NULL, added, f->head_dim, f->value_dim, f->factor);
            if (weighted) fused->step(NULL, weighted, NULL, f->head_dim, f->value_dim, f->factor);
            if (scored) fused->step(scored, NULL, NULL, f->head_dim, f->value_dim, f->factor);
        } else {
            fused->step(scored, weighted, added, f->head_dim, f->value_dim, f->factor);
        }
        if (scored) mask_unit(f, scored, block, key0);
        added = weighted;
        weighted = scored;
    }
    fused->end();
    for (int b = 0; b < f->n_blocks; b++) {
        memcpy(out->row_max[b], work.row_max[b], sizeof out->row_max[b]);
        memcpy(out->row_sum[b], work.row_sum[b], sizeof out->row_sum[b]);
        memcpy(out->acc[b], work.acc[b], (size_t)(f->value_dim * BLOCK_LANES) * 4);
    }
    release_after(taken_before);
}

static unsigned char *no_masks(ptrdiff_t n) { return (unsigned char *)memset(take(n, 1, 0), 0, (size_t)n); }

static Fused fused_problem(int n_blocks, int len_k, int head_dim, int value_dim, int masks) {
    const float factors[] = {1, (float)LOG2E};
    const int n_parts = any_parts(), query_parts = any_query_parts(n_parts);
    Fused f = {n_blocks, n_parts, query_parts, any_weight_parts(query_parts), len_k, head_dim, value_dim,
               factors[below(2)], .high = len_k};
    f.q = random_floats(n_blocks * head_dim * BLOCK_LANES, f.query_parts, 0);
    f.k = random_floats(len_k * head_dim, f.n_parts, 0), f.v = random_floats(len_k * value_dim, f.n_parts, 0);
    f.masked = no_masks(n_blocks * BLOCK_LANES * len_k);
    for (int row = 0; row < n_blocks * BLOCK_LANES; row++) {
        const int kind = masks ? row % 4 : 0, stop = below(len_k);
        for (int j = 0; j < len_k; j++)
            f.masked[row * len_k + j] = kind == 1 ? j >= stop : kind == 2 ? below(3) == 0 : 0;
    }
    return f;
}

static void check_row(const Fused *f, const FusedResult *got, int block, int lane) {
    static long double p[MOST_KEYS];
    const double row_sum = got->row_sum[block][lane], row_max = got->row_max[block][lane];
    long double top = -INFINITY, sum = 0, most = 0;
    for (int j = 0; j < f->len_k; j++) {
        long double absolute = 0;
        p[j] = is_masked(f, block, lane, j) ? -INFINITY : 0;
        for (int d = 0; p[j] != -INFINITY && d < f->head_dim; d++) {
            const double q = f->q[(block * f->head_dim + d) * BLOCK_LANES + lane];
            p[j] += q * f->k[j * f->head_dim + d], absolute += fabs(q * f->k[j * f->head_dim + d]);
        }
        if (p[j] > top) top = p[j];
        if (absolute > most) most = absolute;
    }
    for (int j = 0; j < f->len_k; j++) sum += p[j] = p[j] == -INFINITY ? 0 : exp2l(f->factor * (p[j] - top));
    if (sum == 0) {
        CHECK(row_sum == 0 && row_max == -INFINITY, "an empty row has the sum " NUMBER, row_sum);
        return;
    }
    /* Of a weight, in units of 2^-24: of its score, and of its own computation and that of two factors which rescale
     * it; exponents are below twice the largest sum of absolute values. */
    const double exponent = f->factor * (double)most;
    const double error = 2 * (exponent * LN2 * sum_bound(groups_in(f->head_dim)) + 4 * weight_bound(2 * exponent));
    /* The sum is relative to the largest score as it was computed. */
    CHECK(fabsl(row_sum / sum - 1) <= 0x1p-24 * (error + f->len_k / 2),
          "block %d, lane %d: the sum is " NUMBER ", not " NUMBER, block, lane, row_sum, (double)sum);
    for (int e = 0; e < f->value_dim; e++) {
        const double out = got->acc[block][e][lane] / row_sum;
        long double want = 0, absolute = 0;
        for (int j = 0; j < f->len_k; j++) {
            const long double term = p[j] / sum * f->v[j * f->value_dim + e];
            want += term, absolute += fabsl(term);
        }
        const double of_rounding = f->weight_parts == 3 ? 0 : 0x1p16; /* of weights to 8 bits */
        CHECK(fabsl(out - want) <= 0x1p-24 * absolute * (error + of_rounding + f->len_k / 2 + sum_bound(3 * 8)),
              "block %d, lane %d, column %d is " NUMBER ", not " NUMBER, block, lane, e, out, (double)want);
    }
}

/* Numbers, not signs of zeros, which masked values may change; any NaN is as good as another. */
static int same_number(float a, float b) { return a == b || (isnan(a) && isnan(b)); }

static FusedResult fused_results[2];

/* A lane of the first result, and where it is in the second. */
static void check_lane(const Fused *f, int block, int lane, int to, const char *what) {
    const FusedResult *const a = &fused_results[0], *const b = &fused_results[1];
    CHECK(same_number(a->row_max[block][lane], b->row_max[block][to]) &&
              same_number(a->row_sum[block][lane], b->row_sum[block][to]),
          "%s: lane %d of block %d has the sum " NUMBER ", not " NUMBER, what, lane, block,
          (double)b->row_sum[block][to], (double)a->row_sum[block][lane]);
    for (int e = 0; e < f->value_dim; e++)
        CHECK(same_number(a->acc[block][e][lane], b->acc[block][e][to]),
              "%s: column %d of lane %d of block %d is " NUMBER ", not " NUMBER, what, e, lane, block,
              (double)b->acc[block][e][to], (double)a->acc[block][e][lane]);
}

static void test_pipeline(void) {
    for (int nth = 0; nth < 24; nth++) {
        Fused f = fused_problem(1 + nth % MOST_BLOCKS, 1 + below(MOST_KEYS), 1 + below(100), 1 + below(100), nth % 4);
        attend_fused(&f, &fused_results[0]);
        for (int row = 0; row < f.n_blocks * BLOCK_LANES; row++)
            check_row(&f, &fused_results[0], row / BLOCK_LANES, row % BLOCK_LANES);
        f.apart = 1;
        attend_fused(&f, &fused_results[1]);
        for (int block = 0; block < f.n_blocks; block++)
            for (int lane = 0; lane < BLOCK_LANES; lane++)
                check_lane(&f, block, lane, lane, "in steps of one work each");
        release();
    }
}

static float any_number(int n_parts) {
    return cut_to(n_parts, below(9) ? (float)uniform(-1e9, 1e9) : (float)special(below(8)));
}

/* One block; some lanes are kept, with their keys, while all that is not theirs changes. */
static void test_fused_independence(void) {
    for (int nth = 0; nth < 24; nth++) {
        const int value_dim = 1 + below(70), head_dim = 1 + below(70), len_k = 1 + below(MOST_KEYS);
        Fused f = fused_problem(1, len_k, head_dim, value_dim, 1);
        const uint32_t kept = nth ? (uint32_t)random_bits() | (uint32_t)1 << below(32) : 1;
        const int turn = below(BLOCK_LANES);
        const int low = below(len_k) / OF_GROUP * OF_GROUP, high = low + 1 + below(len_k - low);
        unsigned char *const is_used = no_masks(len_k);
        /* All lanes to keep have keys within low .. high alone, and share some that none of them has. */
        for (int lane = 0; lane < BLOCK_LANES; lane++)
            for (int j = 0; j < len_k; j++) {
                unsigned char *const masked = f.masked + lane * len_k + j;
                if (kept >> lane & 1) {
                    *masked |= j < low || j >= high || (j + nth) % 7 == 0;
                    is_used[j] |= !*masked;
                }
            }
        attend_fused(&f, &fused_results[0]);
        Fused other = f;
        other.q = random_floats(head_dim * BLOCK_LANES, f.query_parts, 0);
        other.masked = no_masks(BLOCK_LANES * len_k);
        other.k = (float *)memcpy(take(len_k * head_dim * 4, 4, 0), f.k, (size_t)(len_k * head_dim) * 4);
        other.v = (float *)memcpy(take(len_k * value_dim * 4, 4, 0), f.v, (size_t)(len_k * value_dim) * 4);
        other.nan_lanes = 0;
        /* The kept lanes move to other places; the others get any mask, and NaN. */
        for (int lane = 0; lane < BLOCK_LANES; lane++) {
            const int to = (lane + turn) % BLOCK_LANES;
            if (kept >> lane & 1) {
                memcpy(other.masked + to * len_k, f.masked + lane * len_k, (size_t)len_k);
                for (int d = 0; d < head_dim; d++) other.q[d * BLOCK_LANES + to] = f.q[d * BLOCK_LANES + lane];
                continue;
            }
            for (int d = 0; d < head_dim; d++)
                if (below(4) == 0) other.q[d * BLOCK_LANES + to] = (float)special(below(8));
            if (below(2)) other.nan_lanes |= (uint32_t)1 << to;
        }
        for (int j = 0; j < len_k; j++) {
            for (int d = 0; !is_used[j] && d < head_dim; d++)
                other.k[j * head_dim + d] = any_number(f.n_parts);
            for (int e = 0; !is_used[j] && e < value_dim; e++)
                other.v[j * value_dim + e] = any_number(f.n_parts);
        }
        for (int cut = 0; cut < 2; cut++) {
            if (cut) other.low = low, other.high = high;
            attend_fused(&other, &fused_results[1]);
            for (int lane = 0; lane < BLOCK_LANES; lane++)
                if (kept >> lane & 1)
                    check_lane(&f, 0, lane, (lane + turn) % BLOCK_LANES, cut ? "with fewer keys" : "beside others");
        }
        release();
    }
}

/* ------------------------------------------------------------------ the model and the tile unit */

/* Bits of a bfloat16: exponents from `least`, so many; one in `rare` is any pattern, 0 of them none. */
static unsigned any_bfloat16(int least, int exponents, int rare) {
    if (rare && below(rare) == 0) return (unsigned)below(1 << 16);
    const int exponent = least + below(exponents) + 127;
    const int field = exponent < 0 ? 0 : exponent > 255 ? 255 : exponent;
    return (unsigned)(below(2) << 15 | field << 7 | below(128));
}

/* Groups of any patterns: `few`: one in `few` is not 0; `powers`: of two only. */
static void fill_groups(char *groups, int n, int least, int exponents, int rare, int few, int powers) {
    for (ptrdiff_t i = 0; i < (ptrdiff_t)n * GROUP_NBYTES / 2; i++) {
        uint16_t bits = (uint16_t)(below(few) ? 0 : any_bfloat16(least, exponents, rare));
        if (powers && below(powers)) bits &= 0xff80;
        memcpy(groups + i * 2, &bits, 2);
    }
}

/* High parts whose sums are 2^-126 or 1.5 times that at first, and then change by about the last bit of a float32. */
static void fill_edges(char *groups, int n, int is_right) {
    memset(groups, 0, (size_t)n * GROUP_NBYTES);
    for (int i = 0; i < n; i++)
        for (int x = 0; x < OF_GROUP; x++)
            for (int k = 0; k < OF_GROUP; k++) {
                const unsigned first = (unsigned)(127 - 63) << 7 | (unsigned)(below(4) ? 0 : below(2)) << 6;
                const unsigned change = k % 16 < 3 ? any_bfloat16(-78, 6, 0) & 0xfff0 : 0;
                const uint16_t bits = (uint16_t)(k % 16 == 0 ? first : change);
                memcpy(part_address(groups + i * GROUP_NBYTES, is_right, 0, x, k), &bits, 2);
            }
}

static void test_model(void) {
    /* Exponents of the left operand and how many, `rare`, `few`, `powers`, and exponents of the right one: products
     * of any size; about the smallest normal number, where sums of a few of them cancel; about the largest. */
    static const int kinds[][6] = {{-20, 40, 0, 1, 0, -20}, {-128, 256, 0, 1, 0, -128}, {-75, 20, 0, 1, 0, -75},
                                   {-75, 13, 0, 6, 1, -76}, {-75, 13, 0, 16, 2, -75},   {-70, 8, 0, 3, 3, -70},
                                   {60, 5, 0, 1, 0, 60},    {-20, 40, 999, 1, 0, -20},  {-128, 4, 0, 2, 0, 60},
                                   {-75, 13, 0, 90, 2, -75}, {60, 4, 0, 2, 0, -128}};
    const char *const other = strcmp(kernels->isa, "amx") == 0 ? "amx_model" : "amx";
    const fastattn_kernels *const tables[] = {kernels, fastattn_find_kernels(other, 4)};
    if (!tables[1]) return;
    for (int nth = 0; nth < 20 * (COUNT(kinds) + 1); nth++) {
        const int kind = nth % (COUNT(kinds) + 1), n_keys = 32 * (1 + below(4)), n_groups = 1 + below(3);
        char *const key = groups_for(n_keys / OF_GROUP * n_groups, 3), *const q = groups_for(n_groups, 3);
        fastattn_unit u[2];
        if (kind < COUNT(kinds)) {
            const int *const k = kinds[kind];
            fill_groups(key, n_keys / OF_GROUP * n_groups, k[0], k[1], k[2], k[3], k[4]);
            fill_groups(q, n_groups, k[5], k[1], k[2], below(2) ? 1 : k[3], k[4]);
        } else {
            fill_edges(key, n_keys / OF_GROUP * n_groups, 0);
            fill_edges(q, n_groups, 1);
        }
        for (int i = 0; i < 2; i++) {
            u[i] = (fastattn_unit){.query = q, .key = key, .n_parts = 3, .query_parts = 3, .n_keys = n_keys,
                                   .scores = tile(n_keys, BLOCK_LANES)};
            tables[i]->fused->begin();
            tables[i]->fused->step(&u[i], NULL, NULL, n_groups * OF_GROUP, 1, 1);
            tables[i]->fused->end();
        }
        for (int i = 0; i < n_keys * BLOCK_LANES; i++)
            CHECK(same(u[0].scores[i], u[1].scores[i]), "kind %d, key %d, lane %d: %a, and %a of %s", kind,
                  i / BLOCK_LANES, i % BLOCK_LANES, (double)u[0].scores[i], (double)u[1].scores[i], other);
        release();
    }
    /* What the vector units do beside it, and how both are interleaved. */
    for (int nth = 0; nth < 12; nth++) {
        Fused f = fused_problem(1 + nth % MOST_BLOCKS, 1 + below(MOST_KEYS), 1 + below(100), 1 + below(100), nth % 4);
        for (int i = 0; i < 2; i++) {
            kernels = tables[i];
            attend_fused(&f, &fused_results[i]);
        }
        kernels = tables[0];
        for (int block = 0; block < f.n_blocks; block++)
            for (int lane = 0; lane < BLOCK_LANES; lane++) check_lane(&f, block, lane, lane, other);
        release();
    }
}

/* The work of so many steps: each 16 products of tiles, of which six make one of float32. */
static void test_peak(void) {
    for (long steps = 1; steps < 1000; steps *= 7) {
        double flops;
        kernels->fused->begin();
        flops = kernels->fused->peak(steps);
        kernels->fused->end();
        CHECK(flops == steps * 16 * (2.0 * 16 * 16 * 32) / 6, "%ld steps are %g FLOPs", steps, flops);
    }
}

/* All of these, and what the line of the table says about errors. */
static void test_fused(char *errors, size_t room) {
    static const struct {
        const char *name;
        void (*run)(void);
    } own[] = {
        {"split", test_split},       {"scores", test_scores},
        {"weights", test_weights},   {"sums", test_sums},
        {"pipeline", test_pipeline}, {"fused_independence", test_fused_independence},
        {"model", test_model},       {"peak", test_peak},
    };
    memset(&fused_errors, 0, sizeof fused_errors);
    for (int t = 0; t < COUNT(own); t++) {
        current = own[t].name;
        own[t].run();
    }
    snprintf(errors, room, "scores %.2f and sums %.2f of 2^-24 times absolute sums, weights %.2f of their bound",
             fused_errors.scores, fused_errors.sums, fused_errors.weights);
}
