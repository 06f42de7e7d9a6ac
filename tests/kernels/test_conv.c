/* The short causal convolution: against a loop in long double, in every storage, and the same bits in both directions.
 * Included by test_kernels.c only. */

/* y / (1 + exp(-y)), with its limits. */
static long double silu(long double y) { return y == -INFINITY ? -0.0L : y / (1 + exact_exp(-y)); }

static void check_conv(int storage, int width, int n_rows, int n_cols, int along, int is_silu) {
    const int nbytes = storage == FASTATTN_REAL ? size : 2, n_inputs = along ? width : n_rows + width - 1;
    const ptrdiff_t ld = (n_cols + lanes - 1) / lanes * lanes, to_row = (ptrdiff_t)n_cols * nbytes + below(3) * nbytes;
    const ptrdiff_t nothing = along && below(2); /* one weight for all columns: its row has no other */
    char *weight = nothing ? take((width + 1) * size, size, 0) : tile(width + 1, ld);
    const ptrdiff_t weight_ld = nothing ? 1 : ld;
    char *to = take(to_row * (n_rows - 1) + n_cols * nbytes, 1, below(8));
    const char **rows = (void *)take(n_inputs * (ptrdiff_t)sizeof *rows, 8, 0);
    for (int j = 0; j <= width; j++)
        for (int c = 0; c < (along ? 1 : n_cols); c++) put(weight, j * weight_ld + c, uniform(-1, 1));
    /* Along a row of tokens its rows overlap, as they do in a sequence. */
    char *sequence = take((n_cols + width) * nbytes, 1, below(8));
    for (int i = 0; i < n_cols + width; i++) put_stored(storage, sequence + i * nbytes, below(50) ? uniform(-3, 3) : special(i));
    for (int r = 0; r < n_inputs; r++) {
        char *row = along ? sequence + r * nbytes : take(n_cols * nbytes, 1, below(8));
        for (int c = 0; c < n_cols && !along; c++)
            put_stored(storage, row + c * nbytes, below(50) ? uniform(-3, 3) : special(below(8)));
        rows[r] = row;
    }
    kernels->convolve[storage](to, to_row, rows, n_rows, n_cols, weight, weight_ld, width, along, is_silu);
    for (int r = 0; r < n_rows; r++) {
        for (int c = 0; c < n_cols; c++) {
            const int w = along ? 0 : c;
            long double sum = get(weight, width * weight_ld + w), magnitude = fabsl(sum);
            for (int j = 0; j < width; j++) {
                const long double x = get_stored(storage, rows[r + j] + c * nbytes);
                sum += get(weight, j * weight_ld + w) * x;
                magnitude += fabsl(get(weight, j * weight_ld + w) * x);
            }
            const long double exact = is_silu ? silu(sum) : sum;
            const char *at = to + r * to_row + c * nbytes;
            const double got = get_stored(storage, at);
            if (isnan((double)sum) || magnitude > largest() / 8) continue; /* NaN and overflow are checked by their bits, below */
            char nearest[8];
            put_stored(storage, nearest, (double)exact);
            const long double last = storage == FASTATTN_REAL ? 0 : fabsl(exact) / (storage == FASTATTN_FLOAT16 ? 1024 : 128);
            const long double bound = 2 * unit * (1.1L * (width + 1) * magnitude + 4 * fabsl(exact)) + last + 1e-7L * !!last;
            CHECK(got == (double)exact || fabsl(got - exact) <= bound || memcmp(at, nearest, (size_t)nbytes) == 0,
                  "storage %d, width %d, along %d, silu %d: (%d, %d) is " NUMBER ", not " NUMBER, storage, width, along,
                  is_silu, r, c, got, (double)exact);
        }
        for (ptrdiff_t i = n_cols * nbytes; r + 1 < n_rows && i < to_row; i++)
            CHECK((unsigned char)to[r * to_row + i] == 0xff, "wrote between the rows");
    }
    /* Column by column, which is a row by itself. */
    for (int c = 0; c < n_cols; c++) {
        const char *one[64];
        char column[8];
        const int r = below(n_rows);
        for (int j = 0; j < width; j++) one[j] = rows[r + j] + c * nbytes;
        kernels->convolve[storage](column, 0, one, 1, 1, weight + (along ? 0 : c) * size, weight_ld, width, 1, is_silu);
        CHECK(memcmp(column, to + r * to_row + c * nbytes, (size_t)nbytes) == 0, "the bits depend on the direction");
    }
    release();
}

static void test_conv(void) {
    for (int storage = FASTATTN_REAL; storage < FASTATTN_STORAGES; storage++) {
        if (storage == FASTATTN_INT8 || (size == 8 && storage != FASTATTN_REAL)) {
            CHECK(!kernels->convolve[storage], "int8 rows, or float64 beside 16 bits");
            continue;
        }
        for (int n_cols = 1; n_cols <= 70; n_cols++)
            for (int kind = 0; kind < 4; kind++)
                check_conv(storage, 1 + below(9), kind & 1 ? 1 : 1 + below(11), n_cols, kind & 1, kind >> 1);
    }
}
