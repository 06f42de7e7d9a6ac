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

static void test_pairs(char *errors, size_t room) {
    static const struct {
        const char *name;
        void (*run)(void);
    } own[] = {
        {"pack_pairs", test_pack_pairs},
        {"score_pairs", test_score_pairs},
        {"pairs_independence", test_pairs_independence},
        {"bits_of_pairs", test_bits_of_pairs},
    };
    largest_pair_error = 0;
    for (int t = 0; t < COUNT(own); t++) {
        current = own[t].name;
        own[t].run();
    }
    snprintf(errors, room, "scores %.2f of 2^-24 times absolute sums", largest_pair_error);
}
