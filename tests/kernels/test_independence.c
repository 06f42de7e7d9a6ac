/* A row's bits, whatever stands beside it. Included by test_kernels.c only. */

enum { ROWS = 9, KEYS = 300, HEAD_DIM = 70, VALUE_DIM = 37, BLOCK_K = 128 };
static Matrix query, key, value, bias_rows;
static int starts[ROWS], stops[ROWS]; /* the keys each query row may attend */
static double results[ROWS][VALUE_DIM + 1];

/* All kernels, in the order and with the key tiles of the driver, on the row rows_of[r] in the r-th place; out[r]
 * becomes its outputs and lse. */
typedef void attend(const int *rows_of, int n_rows, int nonfinite, double softcap, double (*out)[VALUE_DIM + 1]);

static void attend_lanes(const int *rows_of, int n_rows, int nonfinite, double softcap, double (*out)[VALUE_DIM + 1]) {
    const int vectors = n_rows / lanes;
    const ptrdiff_t ld = n_rows;
    void *q = tile(HEAD_DIM, ld), *s = tile(BLOCK_K, ld), *acc = tile(VALUE_DIM, ld), *clean = tile(BLOCK_K, VALUE_DIM);
    void *row_max = filled(1, ld, -INFINITY), *row_sum = filled(1, ld, 0), *rescale = tile(1, ld);
    void *tile_max = tile(1, ld), *inverse = tile(2, ld), *lse = tile(1, ld);
    uint32_t *words = random_words(BLOCK_K, ld);
    ptrdiff_t *stops_of = key_stops(vectors, 0, 0);
    const char *rows[64], *bias[64];
    Matrix outs = matrix(ld, VALUE_DIM, VALUE_DIM * size, size, 0);
    int low = KEYS, high = 0, first = 1;
    for (int lane = 0; lane < ld; lane++) {
        rows[lane] = element(&query, rows_of[lane], 0);
        if (starts[rows_of[lane]] < low) low = starts[rows_of[lane]];
        if (stops[rows_of[lane]] > high) high = stops[rows_of[lane]];
    }
    low = low / 4 * 4;
    kernels->pack(q, ld, rows, query.col, HEAD_DIM, 0.3);
    for (int start = low / BLOCK_K * BLOCK_K; start < high; start += BLOCK_K) {
        const int key0 = start < low ? low : start, n_keys = (start + BLOCK_K < high ? start + BLOCK_K : high) - key0;
        const int first_chunk = FASTATTN_KEY_CHUNK - key0 % FASTATTN_KEY_CHUNK;
        for (int lane = 0; lane < ld; lane++) {
            const int row = rows_of[lane];
            put(tile_max, lane, -INFINITY);
            for (int w = 0; w < BLOCK_K / 32; w++) words[w * ld + lane] = 0;
            for (int j = 0; j < n_keys; j++)
                words[j / 32 * ld + lane] |= (uint32_t)(key0 + j >= starts[row] && key0 + j < stops[row]) << j % 32;
            bias[lane] = element(&bias_rows, row, key0);
            ptrdiff_t *const stop = &stops_of[lane / lanes];
            if (lane % lanes == 0) *stop = nonfinite ? n_keys : lane ? stop[-1] : 0;
            if (stops[row] - key0 > *stop) *stop = stops[row] - key0 < n_keys ? stops[row] - key0 : n_keys;
        }
        kernels->score(s, NULL, q, ld, vectors, element(&key, key0, 0), stops_of, HEAD_DIM, key.row, key.col, NULL, 0, 0);
        kernels->adjust(s, tile_max, ld, stops_of, 1, softcap, bias, words);
        kernels->softmax(s, tile_max, row_max, row_sum, rescale, ld, stops_of, first_chunk, LOG2E);
        const fastattn_values values = values_at(&value, key0);
        void *const scale = first ? NULL : rescale;
        if (nonfinite)
            kernels->accumulate_nonfinite(acc, s, scale, ld, &values, stops_of, first_chunk, VALUE_DIM, bias, words, clean);
        else
            kernels->accumulate(acc, s, scale, ld, vectors, &values, stops_of, first_chunk, VALUE_DIM, NULL, 0, 0);
        first = 0;
    }
    kernels->finish(inverse, lse, row_max, row_sum, ld, LOG2E, 1);
    for (int lane = 0; lane < ld; lane++) rows[lane] = element(&outs, lane, 0);
    kernels->unpack((char *const *)rows, outs.col, ld, acc, ld, VALUE_DIM, inverse);
    for (int lane = 0; lane < ld; lane++) {
        for (int e = 0; e < VALUE_DIM; e++) out[lane][e] = entry(&outs, lane, e);
        out[lane][VALUE_DIM] = get(lse, lane);
    }
}

/* The same in row tiles; the partial results of three key tiles are merged as in their tree. */
static void attend_rows(const int *rows_of, int n_rows, int nonfinite, double softcap, double (*out)[VALUE_DIM + 1]) {
    enum { KEY_TILES = (KEYS + BLOCK_K - 1) / BLOCK_K };
    const ptrdiff_t q_ld = (HEAD_DIM + lanes - 1) / lanes * lanes, ld = (VALUE_DIM + lanes - 1) / lanes * lanes;
    const ptrdiff_t n_lanes = (n_rows + lanes - 1) / lanes * lanes;
    void *q = tile(n_rows, q_ld), *s = tile(n_rows, BLOCK_K), *clean = tile(BLOCK_K, VALUE_DIM);
    void *inverse = tile(2, n_lanes), *lse = tile(1, n_lanes);
    void *acc[KEY_TILES], *row_max[KEY_TILES], *row_sum[KEY_TILES];
    uint32_t *words = random_words(BLOCK_K, n_rows);
    const char *rows[64], *bias[64];
    Matrix outs = matrix(n_rows, VALUE_DIM, VALUE_DIM * size, size, 0);
    int low = KEYS, high = 0;
    for (int r = 0; r < n_rows; r++) {
        rows[r] = element(&query, rows_of[r], 0);
        if (starts[rows_of[r]] < low) low = starts[rows_of[r]];
        if (stops[rows_of[r]] > high) high = stops[rows_of[r]];
    }
    low = low / FASTATTN_KEY_CHUNK * FASTATTN_KEY_CHUNK;
    kernels->pack_rows(q, q_ld, rows, n_rows, query.col, HEAD_DIM, 0.3);
    for (int key_tile = 0; key_tile < KEY_TILES; key_tile++) {
        const int start = key_tile * BLOCK_K, key0 = start < low ? low : start;
        const int n_keys = (start + BLOCK_K < high ? start + BLOCK_K : high) - key0;
        acc[key_tile] = filled(n_rows, ld, 0);
        row_max[key_tile] = filled(1, n_lanes, -INFINITY), row_sum[key_tile] = filled(1, n_lanes, 0);
        if (n_keys <= 0) continue;
        for (int r = 0; r < n_rows; r++) {
            const int row = rows_of[r];
            for (int w = 0; w < BLOCK_K / 32; w++) words[w * n_rows + r] = 0;
            for (int j = 0; j < n_keys; j++)
                words[j / 32 * n_rows + r] |= (uint32_t)(key0 + j >= starts[row] && key0 + j < stops[row]) << j % 32;
            bias[r] = element(&bias_rows, row, key0);
        }
        const fastattn_rows keys = rows_to_read(&key, key0), values = rows_to_read(&value, key0);
        kernels->score_rows[FASTATTN_REAL](s, BLOCK_K, q, q_ld, n_rows, &keys, n_keys, HEAD_DIM);
        kernels->adjust_rows(s, BLOCK_K, n_rows, n_keys, 1, softcap, bias, words);
        kernels->softmax_rows(s, BLOCK_K, row_max[key_tile], row_sum[key_tile], n_rows, n_keys, LOG2E, 0);
        if (nonfinite)
            kernels->accumulate_rows_nonfinite(acc[key_tile], ld, s, BLOCK_K, n_rows, element(&value, key0, 0), value.row,
                                              n_keys, VALUE_DIM, bias, words, clean);
        else
            kernels->accumulate_rows[FASTATTN_REAL](acc[key_tile], ld, s, BLOCK_K, n_rows, &values, n_keys, VALUE_DIM, 0);
    }
    for (int key_tile = 1; key_tile < KEY_TILES; key_tile++)
        kernels->merge_rows(acc[0], row_max[0], row_sum[0], acc[key_tile], row_max[key_tile], row_sum[key_tile], n_rows,
                            ld, LOG2E);
    kernels->finish(inverse, lse, row_max[0], row_sum[0], n_lanes, LOG2E, 1);
    for (int r = 0; r < n_rows; r++) rows[r] = element(&outs, r, 0);
    kernels->unpack_rows((char *const *)rows, outs.col, n_rows, acc[0], ld, VALUE_DIM, inverse, n_lanes);
    for (int r = 0; r < n_rows; r++) {
        for (int e = 0; e < VALUE_DIM; e++) out[r][e] = entry(&outs, r, e);
        out[r][VALUE_DIM] = get(lse, r);
    }
}

/* Rows with their keys, some of them no one's model. */
static void random_problem(int nonfinite) {
    const int intervals[ROWS][2] = {{0, KEYS},  {0, 1},      {5, 130}, {64, 221},  {70, 71},
                                    {190, 191}, {129, KEYS}, {0, 64},  {200, 263}};
    query = laid_out(ROWS, HEAD_DIM, 0), key = laid_out(KEYS, HEAD_DIM, 0);
    value = laid_out(KEYS, VALUE_DIM, 0), bias_rows = laid_out(ROWS, KEYS, 0);
    Matrix *const arrays[] = {&query, &key, &value, &bias_rows};
    for (int i = 0; i < COUNT(arrays); i++)
        for (ptrdiff_t j = 0; j < arrays[i]->rows * arrays[i]->cols; j++) put(arrays[i]->at, j, uniform(-2, 2));
    for (int r = 0; r < ROWS; r++) starts[r] = intervals[r][0], stops[r] = intervals[r][1];
    for (int j = 0; j < KEYS; j++)
        if (below(5) == 0) put(element(&bias_rows, j % ROWS, j), 0, -INFINITY);
    for (int d = 0; d < HEAD_DIM; d++) {
        put(element(&query, 6, d), 0, NAN);
        put(element(&query, 7, d), 0, special(d));
        put(element(&query, 8, d), 0, largest());
    }
    for (int e = 0; nonfinite && e < VALUE_DIM; e++) put(element(&value, e % 2 ? 70 : 220 + e, 0), e, special(e % 3));
}

/* A row's bits are the same alone and among any others, in any place, over any range of keys that the others need, and
 * in any layout of the arrays. counts: how many rows stand together; gapless: the layouts that keys and values may have. */
static void check_independence(attend *run, const int *counts, int n_counts, const int *gapless, int n_gapless) {
    for (int nonfinite = 0; nonfinite < 2; nonfinite++) {
        static double out[64][VALUE_DIM + 1];
        const double softcap = nonfinite ? 0 : 5;
        int rows_of[64];
        random_problem(nonfinite);
        Matrix *const arrays[] = {&query, &key, &value, &bias_rows};
        Matrix plain[COUNT(arrays)];
        for (int i = 0; i < COUNT(arrays); i++) plain[i] = *arrays[i];
        const int arrays_taken = n_taken;
        for (int r = 0; r < ROWS; r++) {
            for (int i = 0; i < counts[0]; i++) rows_of[i] = r;
            release_after(arrays_taken);
            run(rows_of, counts[0], nonfinite, softcap, out);
            memcpy(results[r], out[0], sizeof out[0]);
            CHECK(r > 5 || nonfinite || isfinite(out[0][0]), "row %d: " NUMBER, r, out[0][0]);
            for (int i = 0; i < counts[0]; i++)
                for (int e = 0; e <= VALUE_DIM; e++)
                    CHECK(same(out[i][e], out[0][e]), "row %d, place %d: " NUMBER ", not " NUMBER, r, i, out[i][e], out[0][e]);
        }
        for (int nth = 0; nth < 40; nth++) {
            const int n_rows = counts[nth % n_counts];
            release_after(arrays_taken);
            /* The elements of a row of bias are contiguous, as in the layouts 0 and 5. */
            for (int i = 0; i < COUNT(arrays); i++)
                *arrays[i] = same_numbers(&plain[i], i == 0   ? nth % ONE_TO_ONE
                                                     : i == 3 ? nth % 2 * 5
                                                              : gapless[(nth + i) % n_gapless]);
            for (int r = 0; r < n_rows; r++) rows_of[r] = below(nth % 3 ? 6 : ROWS);
            run(rows_of, n_rows, nonfinite, softcap, out);
            for (int r = 0; r < n_rows; r++)
                for (int e = 0; e <= VALUE_DIM; e++) {
                    const double got = out[r][e], alone = results[rows_of[r]][e];
                    CHECK(same(got, alone), "row %d in place %d of %d, nonfinite %d: " NUMBER ", alone " NUMBER, rows_of[r], r,
                          n_rows, nonfinite, got, alone);
                }
        }
        release();
    }
}

static void test_lanes_are_independent(void) {
    const int any[] = {0, 1, 2, 3, 4, 5};
    int counts[64];
    for (int v = 0; v < kernels->max_vectors; v++) counts[v] = lanes * (v + 1);
    check_independence(attend_lanes, counts, kernels->max_vectors, any, ONE_TO_ONE);
}

static void test_rows_are_independent(void) {
    const int counts[] = {1, 2, 3, 4, 5, 7, 8, 15, 16, 17}, gapless[] = {0, 1, 5};
    check_independence(attend_rows, counts, COUNT(counts), gapless, COUNT(gapless));
}
