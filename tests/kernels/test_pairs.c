/* The kernels of pairs: which queries they take, scores against plain loops, what a lane's bits depend on, and the bits
 * of the instruction. Included by test_kernels.c only. */

static double largest_pair_error; /* of the scores, in the unit of its check */

static float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

static float half_of_pair(uint32_t pair, int half) { return flushed(float_of(half ? pair & 0xffff0000u : pair << 16)); }

/* x * y + sum, rounded once, and 0 where that is below 2^-126 before its exponent is limited: see bfloat16_model.h. */
static float flushed_fma(float x, float y, float sum) {
    const float scaled = fmaf(x * 0x1p64f, y, sum * 0x1p64f), exact = fmaf(x, y, sum);
    return fabsf(scaled) < 0x1p-62f ? copysignf(0, exact) : exact;
}

static float add_pair(uint32_t x, uint32_t y, float sum) {
    sum = flushed_fma(half_of_pair(x, 1), half_of_pair(y, 1), flushed(sum));
    return flushed_fma(half_of_pair(x, 0), half_of_pair(y, 0), sum);
}

static uint32_t pair_of(float low, float high) {
    uint32_t a, b;
    memcpy(&a, &low, 4);
    memcpy(&b, &high, 4);
    return a >> 16 | (b & 0xffff0000u);
}

static uint32_t word_at(const void *at) {
    uint32_t word;
    return memcpy(&word, at, 4), word;
}

/* ------------------------------------------------------------------ pack */

static float bfloat16_number(int usual) {
    static const float edges[] = {0, 0x1p-133f, 0x1.fcp-127f, 0x1p-126f, 0x1.fep59f, 0x1p60f, 0x1.fep127f, INFINITY, NAN};
    if (usual) return cut((float)uniform(-4, 4));
    return cut(below(2) ? float_of((uint32_t)random_bits()) : edges[below(COUNT(edges))] * (below(2) ? 1 : -1));
}

static void check_pack_pairs(int n_pairs, int vectors) {
    const ptrdiff_t ld = lanes * vectors;
    const float factor = ldexpf(below(2) ? 1 : -1, -below(12));
    char **const rows = lane_rows(ld, n_pairs * 4);
    char *const to = tile(n_pairs, ld);
    const int usual = below(2);
    uint64_t want = 0;
    for (ptrdiff_t lane = 0; lane < ld; lane++)
        for (int p = 0; p < n_pairs; p++) {
            const uint32_t pair = pair_of(bfloat16_number(usual || below(60)), bfloat16_number(usual || below(60)));
            memcpy(rows[lane] + p * 4, &pair, 4);
        }
    const uint64_t got = kernels->pairs->pack(to, ld, (const char *const *)rows, n_pairs, factor);
    for (ptrdiff_t lane = 0; lane < ld; lane++)
        for (int p = 0; p < n_pairs; p++) {
            const uint32_t from = word_at(rows[lane] + p * 4), packed = word_at(to + (p * ld + lane) * 4);
            for (int half = 0; half < 2; half++) {
                const float x = float_of(half ? from & 0xffff0000u : from << 16) * factor;
                const float y = float_of(half ? packed & 0xffff0000u : packed << 16);
                const int has_scores = x == 0 || (fabsf(x) >= 0x1p-126f && fabsf(x) < 0x1p60f);
                if (!has_scores) want |= (uint64_t)1 << lane;
                CHECK(!has_scores || same(x, y), "%d pairs, pair %d, half %d, lane %td: %g became %g", n_pairs, p, half, lane,
                      (double)x, (double)y);
            }
        }
    CHECK(got == want, "%d pairs: lanes %llx, not %llx", n_pairs, (unsigned long long)got, (unsigned long long)want);
    release();
}

static void test_pack_pairs(void) {
    for (int n_pairs = 1; n_pairs <= 70; n_pairs++)
        for (int vectors = 1; vectors <= kernels->max_vectors; vectors++) check_pack_pairs(n_pairs, vectors);
}

/* ------------------------------------------------------------------ score */

typedef struct {
    Matrix k; /* of pairs */
    char *q;  /* tile of pairs */
    ptrdiff_t ld;
    int n_pairs, vectors;
} Pairs;

static Pairs random_pairs(int n_keys, int n_pairs, int vectors) {
    const ptrdiff_t gaps[] = {0, 2, 4, 7}, span = n_pairs * 4 + gaps[below(4)];
    Pairs p = {.ld = lanes * kernels->max_vectors, .n_pairs = n_pairs, .vectors = vectors};
    p.k = matrix_of(n_keys, n_pairs, below(6) ? below(4) ? span : -span : 0, 4, 4, below(8));
    p.q = tile(n_pairs, p.ld); /* NaN in the lanes past the vectors, which are nobody's concern */
    for (int c = 0; c < n_pairs; c++) {
        for (int j = 0; j < n_keys; j++) {
            const uint32_t pair = pair_of(bfloat16_number(1), bfloat16_number(1));
            memcpy(element(&p.k, j, c), &pair, 4);
        }
        for (ptrdiff_t lane = 0; lane < lanes * vectors; lane++) {
            const uint32_t pair = pair_of(bfloat16_number(1), bfloat16_number(1));
            memcpy(p.q + (c * p.ld + lane) * 4, &pair, 4);
        }
    }
    seal(&p.k);
    return p;
}

static void score_pairs(const Pairs *p, float *s, float *top, const ptrdiff_t *stops) {
    kernels->pairs->score(s, top, p->q, p->ld, p->vectors, p->k.at, stops, p->n_pairs, p->k.row, 4, (const char *)FAR_AWAY,
                          below(200) - 100, below(3) * 100);
}

/* Each score is within the rounding of its sums: one for each product, in chains of partial sums. */
static void check_score_pairs(int n_keys, int n_pairs, int vectors) {
    const Pairs p = random_pairs(n_keys, n_pairs, vectors);
    const ptrdiff_t *const stops = key_stops(vectors, n_keys, below(3) == 0);
    float *const s = tile(n_keys, p.ld), *const top = filled(1, p.ld, -INFINITY);
    const int has_max = below(4) > 0;
    score_pairs(&p, s, has_max ? top : NULL, stops);
    for (ptrdiff_t lane = 0; lane < lanes * vectors; lane++) {
        float most = -INFINITY;
        for (ptrdiff_t j = 0; j < stops[lane / lanes]; j++) {
            double sum = 0, size_of_sum = 0;
            for (int c = 0; c < n_pairs; c++)
                for (int half = 0; half < 2; half++) {
                    const double product = (double)half_of_pair(word_at(p.q + (c * p.ld + lane) * 4), half)
                                         * half_of_pair(word_at(element(&p.k, j, c)), half);
                    sum += product;
                    size_of_sum += fabs(product);
                }
            const float got = s[j * p.ld + lane];
            const double error = fabs(got - sum) / (size_of_sum * 0x1p-24);
            if (size_of_sum > 0 && error > largest_pair_error) largest_pair_error = error;
            CHECK(size_of_sum > 0 ? error <= 2 * n_pairs : got == 0, "%d keys, %d pairs: key %td, lane %td is %g, not %g",
                  n_keys, n_pairs, j, lane, (double)got, sum);
            if (got > most) most = got;
        }
        CHECK(!has_max || (stops[lane / lanes] < n_keys ? top[lane] >= most : top[lane] == most), "lane %td: tile_max %g, not %g",
              lane, (double)top[lane], (double)most);
    }
    release();
}

static void test_score_pairs(void) {
    for (int n_pairs = 1; n_pairs <= 140; n_pairs++)
        check_score_pairs(1 + below(40), n_pairs, 1 + below(kernels->max_vectors));
    for (int n_keys = 1; n_keys <= 140; n_keys += 1 + below(3))
        check_score_pairs(n_keys, 1 + below(70), 1 + below(kernels->max_vectors));
}

/* A lane's bits are those that it has alone, whatever the others hold. */
static void test_pairs_independence(void) {
    for (int nth = 0; nth < 40; nth++) {
        const int n_keys = 1 + below(80), vectors = 1 + below(kernels->max_vectors), live = lanes * vectors;
        Pairs p = random_pairs(n_keys, 1 + below(70), vectors), other = p;
        const int kept = below(live), place = below(lanes);
        const ptrdiff_t *const stops = key_stops(kernels->max_vectors, n_keys, 0);
        float *const s = tile(n_keys, p.ld), *const alone = tile(n_keys, p.ld);
        other.q = tile(p.n_pairs, p.ld);
        other.vectors = 1;
        for (int c = 0; c < p.n_pairs; c++)
            for (int lane = 0; lane < lanes; lane++) {
                const uint32_t any = (uint32_t)random_bits();
                memcpy(other.q + (c * p.ld + lane) * 4, lane == place ? p.q + (c * p.ld + kept) * 4 : (const char *)&any, 4);
            }
        score_pairs(&p, s, NULL, stops);
        score_pairs(&other, alone, NULL, stops);
        for (int j = 0; j < n_keys; j++)
            CHECK(same(s[j * p.ld + kept], alone[j * p.ld + place]), "key %d, lane %d: %g, alone %g", j, kept,
                  (double)s[j * p.ld + kept], (double)alone[j * p.ld + place]);
        release();
    }
}

/* Any bits, and those near the limits of normal numbers: two pairs, the first added to 0 and the second to their sum. */
static void test_bits_of_pairs(void) {
    for (int nth = 0; nth < 3000; nth++) {
        const Pairs p = random_pairs(4, 2, 1);
        const ptrdiff_t *const stops = key_stops(1, 4, 0);
        float *const s = tile(4, p.ld);
        const int kind = below(3);
        for (int c = 0; c < 2; c++)
            for (int i = 0; i < 4 + lanes; i++) {
                uint32_t pair = (uint32_t)random_bits();
                if (kind) pair = (pair & 0x807f807fu) | (uint32_t)(kind == 1 ? below(20) : 54 + below(16)) << 7 | (uint32_t)below(70) << 23;
                memcpy(i < 4 ? element(&p.k, i, c) : p.q + (c * p.ld + i - 4) * 4, &pair, 4);
            }
        score_pairs(&p, s, NULL, stops);
        for (int j = 0; j < 4; j++)
            for (int lane = 0; lane < lanes; lane++) {
                float want = 0;
                for (int c = 0; c < 2; c++)
                    want = add_pair(word_at(p.q + (c * p.ld + lane) * 4), word_at(element(&p.k, j, c)), want);
                const float got = s[j * p.ld + lane];
                CHECK(got == want || (isnan(got) && isnan(want)), "kind %d: %a, not %a", kind, (double)got, (double)want);
            }
        release();
    }
}

/* ------------------------------------------------------------------ weights and values */

/* To 8 bits, to nearest even; denormal numbers become 0. */
static float rounded_to_8_bits(float x) {
    int exponent;
    const float mantissa = frexpf(flushed(x), &exponent);
    return ldexpf(nearbyintf(mantissa * 256), exponent - 8);
}

static float any_weight(void) {
    const int kind = below(8);
    if (kind == 0) return float_of((uint32_t)below(0x3f800000)); /* of any size, denormal numbers too */
    if (kind == 1) return float_of(0x3c000000u | (uint32_t)below(1 << 10) << 15); /* a tie, or none */
    return kind == 2 ? 0 : (float)exp2(uniform(-20, 0));
}

static void check_pair_weights(int n_keys, int vectors, int rising) {
    const ptrdiff_t ld = lanes * vectors, *const stops = key_stops(vectors, n_keys, rising);
    float *const p = tile(n_keys, ld), *const before = tile(n_keys, ld);
    for (ptrdiff_t i = 0; i < n_keys * ld; i++) p[i] = any_weight();
    memcpy(before, p, (size_t)(n_keys * ld) * 4);
    kernels->pairs->pair_weights(p, ld, stops);
    for (ptrdiff_t lane = 0; lane < ld; lane++)
        for (ptrdiff_t j = 0; j < stops[lane / lanes] + 1; j++) { /* the last pair may lack a key */
            if (j == stops[lane / lanes] && j % 2 == 0) continue;
            const float want = j < stops[lane / lanes] ? rounded_to_8_bits(before[j * ld + lane]) : 0;
            const uint32_t word = word_at(p + j / 2 * ld + lane);
            const float got = float_of(j % 2 ? word & 0xffff0000u : word << 16);
            CHECK(same(got, want), "%d keys: weight %td of lane %td is %a, not %a", n_keys, j, lane, (double)got, (double)want);
        }
    release();
}

/* `softmax` leaves what that of float32 and pair_weights leave. */
static void check_softmax_pairs(int n_keys, int vectors, int rising) {
    const ptrdiff_t ld = lanes * vectors, *const stops = key_stops(vectors, n_keys, rising);
    const ptrdiff_t first_chunk = 2 * (1 + below(FASTATTN_KEY_CHUNK / 2));
    const double factor = below(2) ? 1 : uniform(0.1, 2);
    float *const s = tile(n_keys + 1, ld), *const other = tile(n_keys + 1, ld), *const top = filled(1, ld, -INFINITY);
    float *rows[2][3];
    for (int i = 0; i < 3; i++) rows[0][i] = filled(1, ld, i == 0 ? (float)uniform(-30, 30) : 1), rows[1][i] = tile(1, ld);
    for (ptrdiff_t lane = 0; lane < ld; lane++) {
        if (below(4) == 0) rows[0][0][lane] = -INFINITY;
        for (ptrdiff_t j = 0; j < stops[lane / lanes]; j++) {
            float *const x = s + j * ld + lane;
            *x = below(9) ? (float)uniform(-150, 100) : -INFINITY;
            if (*x > top[lane]) top[lane] = *x;
        }
    }
    for (int i = 0; i < 3; i++) memcpy(rows[1][i], rows[0][i], (size_t)ld * 4);
    memcpy(other, s, (size_t)((n_keys + 1) * ld) * 4);
    kernels->softmax(other, top, rows[0][0], rows[0][1], rows[0][2], ld, stops, first_chunk, factor);
    kernels->pairs->pair_weights(other, ld, stops);
    kernels->pairs->softmax(s, top, rows[1][0], rows[1][1], rows[1][2], ld, stops, first_chunk, factor);
    for (ptrdiff_t lane = 0; lane < ld; lane++) {
        for (int i = 0; i < 3; i++)
            CHECK(same(rows[1][i][lane], rows[0][i][lane]), "%d keys: number %d of lane %td is %a, not %a", n_keys, i, lane,
                  (double)rows[1][i][lane], (double)rows[0][i][lane]);
        for (ptrdiff_t j = 0; j < stops[lane / lanes]; j += 2)
            CHECK(word_at(s + j / 2 * ld + lane) == word_at(other + j / 2 * ld + lane), "%d keys: pair %td of lane %td is %x, not %x",
                  n_keys, j / 2, lane, word_at(s + j / 2 * ld + lane), word_at(other + j / 2 * ld + lane));
    }
    release();
}

/* Values of n_keys keys in bfloat16, with gaps between them or without. */
static Matrix random_values(int n_keys, int value_dim) {
    const ptrdiff_t span = value_dim * 2 + (below(2) ? 0 : 2 * below(9));
    Matrix m = matrix_of(n_keys, value_dim, below(4) ? span : -span, 2, 2, below(8));
    for (int j = 0; j < n_keys; j++)
        for (int e = 0; e < value_dim; e++) {
            const float x = bfloat16_number(1);
            memcpy(element(&m, j, e), (const char *)&x + 2, 2);
        }
    seal(&m);
    return m;
}

static float value_at(const Matrix *m, int j, int e) {
    uint16_t half;
    memcpy(&half, element(m, j, e), 2);
    return float_of((uint32_t)half << 16);
}

static char *pairs_of_values(const Matrix *m) {
    const int n_keys = (int)m->rows, value_dim = (int)m->cols;
    char *const pairs = take((n_keys + 1) / 2 * fastattn_pairs_nbytes(value_dim), 64, 0);
    kernels->pairs->pair_values(pairs, m->at, m->row, n_keys, value_dim);
    return pairs;
}

static void check_pair_values(int n_keys, int value_dim) {
    const Matrix m = random_values(n_keys, value_dim);
    const char *const pairs = pairs_of_values(&m);
    const ptrdiff_t row = fastattn_pairs_nbytes(value_dim);
    for (int j = 0; j < n_keys + n_keys % 2; j++)
        for (int e = 0; e < row / 4; e++) {
            const uint32_t word = word_at(pairs + j / 2 * row + fastattn_pair_at(e));
            const float got = float_of(j % 2 ? word & 0xffff0000u : word << 16);
            const float want = j < n_keys && e < value_dim ? value_at(&m, j, e) : 0;
            CHECK(same(got, want), "%d keys, %d columns: key %d, column %d is %g, not %g", n_keys, value_dim, j, e,
                  (double)got, (double)want);
        }
    release();
}

static double largest_value_error;

/* Two roundings for each pair, in chains of partial sums; and of what was there, rescaled. */
static void check_accumulate_pairs(int n_keys, int value_dim, int vectors, int rescaled) {
    const ptrdiff_t ld = lanes * kernels->max_vectors, *const stops = key_stops(vectors, n_keys, below(3) == 0);
    const ptrdiff_t first_chunk = 4 * (1 + below(FASTATTN_KEY_CHUNK / 4)), columns = (value_dim + 7) / 8 * 8;
    const Matrix m = random_values(n_keys, value_dim);
    const char *const values = pairs_of_values(&m);
    float *const p = tile(n_keys, ld), *const rounded_p = tile(n_keys, ld);
    float *const acc = filled(columns, ld, 0), *const old = filled(columns, ld, 0), *const rescale = tile(1, ld);
    for (ptrdiff_t i = 0; i < n_keys * ld; i++) p[i] = (float)exp2(uniform(-20, 0)), rounded_p[i] = rounded_to_8_bits(p[i]);
    for (ptrdiff_t lane = 0; lane < ld; lane++) rescale[lane] = (float)uniform(0, 1);
    for (ptrdiff_t i = 0; i < columns * ld; i++) old[i] = acc[i] = (float)uniform(-10, 10);
    kernels->pairs->pair_weights(p, ld, key_stops(kernels->max_vectors, n_keys, 0));
    for (int v = 0; v < vectors; v++) /* what pair_weights leaves where a vector's keys end within a pair */
        for (ptrdiff_t lane = v * lanes; stops[v] % 2 && lane < (v + 1) * lanes; lane++) {
            const uint32_t word = word_at(p + stops[v] / 2 * ld + lane) & 0xffff;
            memcpy(p + stops[v] / 2 * ld + lane, &word, 4);
        }
    kernels->pairs->accumulate(acc, p, rescaled ? rescale : NULL, ld, vectors, values, stops, first_chunk, value_dim, NULL, 0, 0);
    for (ptrdiff_t lane = 0; lane < lanes * vectors; lane++)
        for (int e = 0; e < value_dim; e++) {
            long double sum = rescaled ? (long double)rescale[lane] * old[e * ld + lane] : 0, absolute = fabsl(sum);
            for (int j = 0; j < stops[lane / lanes]; j++) {
                const double product = (double)rounded_p[j * ld + lane] * value_at(&m, j, e);
                sum += product, absolute += fabs(product);
            }
            const float got = acc[e * ld + lane];
            const double error = absolute > 0 ? (double)(fabsl(got - sum) / absolute * 0x1p24L) : got == 0 ? 0 : INFINITY;
            if (error > largest_value_error) largest_value_error = error;
            CHECK(error <= FASTATTN_KEY_CHUNK + 2 + n_keys / FASTATTN_KEY_CHUNK, "%d keys: column %d, lane %td is %g, not %g", n_keys,
                  e, lane, (double)got, (double)sum);
        }
    release();
}

/* `accumulate_stored` has the bits that `accumulate` has of the same values in float32. */
static void check_accumulate_stored(int n_keys, int value_dim, int vectors, int rescaled) {
    const ptrdiff_t ld = lanes * kernels->max_vectors, *const stops = key_stops(vectors, n_keys, below(3) == 0);
    const ptrdiff_t first_chunk = 1 + below(FASTATTN_KEY_CHUNK);
    const Matrix m = random_values(n_keys, value_dim);
    float *const p = tile(n_keys, ld), *const rescale = tile(1, ld), *const converted = tile(n_keys, value_dim);
    float *const acc = filled(value_dim, ld, 0), *const want = filled(value_dim, ld, 0);
    const fastattn_values values = {(const char *)converted, value_dim * 4, 4, 4 * kernels->panel_cols};
    for (ptrdiff_t i = 0; i < n_keys * ld; i++) p[i] = (float)exp2(uniform(-20, 0));
    for (ptrdiff_t lane = 0; lane < ld; lane++) rescale[lane] = (float)uniform(0, 1);
    for (ptrdiff_t i = 0; i < value_dim * ld; i++) want[i] = acc[i] = (float)uniform(-10, 10);
    for (int j = 0; j < n_keys; j++)
        for (int e = 0; e < value_dim; e++) converted[j * value_dim + e] = value_at(&m, j, e);
    kernels->pairs->accumulate_stored(acc, p, rescaled ? rescale : NULL, ld, vectors, m.at, m.row, stops, first_chunk, value_dim,
                                      NULL, 0, 0);
    kernels->accumulate(want, p, rescaled ? rescale : NULL, ld, vectors, &values, stops, first_chunk, value_dim, NULL, 0, 0);
    for (int e = 0; e < value_dim; e++)
        for (ptrdiff_t lane = 0; lane < ld; lane++)
            CHECK(same(acc[e * ld + lane], want[e * ld + lane]), "%d keys: column %d of %d, lane %td is %a, not %a", n_keys, e,
                  value_dim, lane, (double)acc[e * ld + lane], (double)want[e * ld + lane]);
    release();
}

/* `layout` 0 and 1: the words of adjacent lanes and of adjacent keys, as the compiler knows them; 2: any others. */
static void check_accumulate_words(int n_pairs, int n_sums, int vectors, int layout, int adds) {
    const ptrdiff_t ld = lanes * vectors, of_rows = 4 * FASTATTN_PAIR_LANES;
    const ptrdiff_t row = layout == 0 ? 4 : layout == 1 ? of_rows : 4 * (n_sums + below(5));
    const ptrdiff_t col = layout == 0 ? of_rows / 2 : 4;
    float *const rows = tile(n_pairs + 1, ld), *const acc = filled(n_sums, ld, 0), *const old = filled(n_sums, ld, 0);
    char *const words = (char *)tile((n_pairs * row + n_sums * col) / 4 + 1, 1);
    for (ptrdiff_t i = 0; i < n_pairs * ld; i++) {
        const uint32_t word = pair_of(bfloat16_number(below(20)), bfloat16_number(1));
        memcpy(rows + i, &word, 4);
    }
    for (ptrdiff_t i = 0; i < (n_pairs * row + n_sums * col) / 4; i++) {
        const uint32_t word = pair_of(bfloat16_number(1), bfloat16_number(below(20)));
        memcpy(words + 4 * i, &word, 4);
    }
    for (ptrdiff_t i = 0; i < n_sums * ld; i++) old[i] = acc[i] = (float)uniform(-10, 10);
    kernels->pairs->accumulate_words(acc, rows, ld, words, row, col, n_pairs, n_sums, adds);
    for (ptrdiff_t i = 0; i < n_sums; i++)
        for (ptrdiff_t c = 0; c < ld; c++) {
            float want = adds ? old[i * ld + c] : 0;
            for (ptrdiff_t start = 0; start < n_pairs || start == 0; start += FASTATTN_KEY_CHUNK / 2) {
                float sum = 0;
                for (ptrdiff_t p = start; p < n_pairs && p < start + FASTATTN_KEY_CHUNK / 2; p++)
                    sum = add_pair(word_at(rows + p * ld + c), word_at(words + p * row + i * col), sum);
                want = adds || start > 0 ? sum + want : sum;
            }
            CHECK(same(acc[i * ld + c], want), "%d pairs: sum %td, column %td is %a, not %a", n_pairs, i, c,
                  (double)acc[i * ld + c], (double)want);
        }
    release();
}

static void test_round_numbers(void) {
    for (ptrdiff_t n = 0; n <= 40 * lanes; n += lanes) {
        float *const from = tile(n + 1, 1);
        char *const to = (char *)tile(n / 2 + 1, 1);
        for (ptrdiff_t i = 0; i < n; i++) from[i] = below(2) ? float_of((uint32_t)random_bits()) : any_weight() * (below(2) ? 1 : -1);
        for (ptrdiff_t i = 0; i < n; i += 7) from[i] = below(2) ? INFINITY : float_of(0x7fffffffu | (uint32_t)below(2) << 31);
        kernels->pairs->round_numbers(to, from, n);
        for (ptrdiff_t i = 0; i < n; i++) {
            uint16_t half;
            memcpy(&half, to + 2 * i, 2);
            const float got = float_of((uint32_t)half << 16), want = rounded_to_8_bits(from[i]);
            CHECK(same(got, want), "number %td of %td, %a, is %a, not %a", i, n, (double)from[i], (double)got, (double)want);
        }
        release();
    }
}

static void test_products_of_gradients(void) {
    for (int n_pairs = 0; n_pairs <= 140; n_pairs++)
        for (int layout = 0; layout < 3; layout++) {
            const int most = layout == 1 ? FASTATTN_PAIR_LANES : 140;
            if (layout != 0 || n_pairs <= FASTATTN_PAIR_LANES / 2)
                check_accumulate_words(n_pairs, 1 + below(most), 1 + below(8), layout, below(2));
        }
}

static void test_weights_and_values(void) {
    for (int n_keys = 1; n_keys <= 140; n_keys++) {
        check_pair_weights(n_keys, 1 + below(kernels->max_vectors), n_keys % 2);
        check_softmax_pairs(n_keys, 1 + below(kernels->max_vectors), n_keys % 2);
        check_pair_values(n_keys, 1 + below(200));
        check_accumulate_pairs(n_keys, 1 + below(100), 1 + below(kernels->max_vectors), n_keys % 3 == 0);
        check_accumulate_stored(n_keys, 2 + 2 * below(50), 1 + below(kernels->max_vectors), n_keys % 3 == 0);
    }
    for (int value_dim = 1; value_dim <= 140; value_dim++) {
        check_pair_values(1 + below(8), value_dim);
        check_accumulate_pairs(1 + below(80), value_dim, 1 + below(kernels->max_vectors), value_dim % 2);
    }
}

static void test_pairs(char *errors, size_t room) {
    static const struct {
        const char *name;
        void (*run)(void);
    } own[] = {
        {"pack_pairs", test_pack_pairs},
        {"score_pairs", test_score_pairs},
        {"pairs_independence", test_pairs_independence},
        {"bits_of_pairs", test_bits_of_pairs},
        {"weights_and_values", test_weights_and_values},
        {"round_numbers", test_round_numbers},
        {"products_of_gradients", test_products_of_gradients},
    };
    largest_pair_error = largest_value_error = 0;
    for (int t = 0; t < COUNT(own); t++) {
        current = own[t].name;
        own[t].run();
    }
    snprintf(errors, room, "scores %.2f, values %.2f of 2^-24 times absolute sums", largest_pair_error, largest_value_error);
}
