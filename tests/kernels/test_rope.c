/* Rotary position embedding: the same bits as a loop that rounds each operation, in every storage. Included by
 * test_kernels.c only. */

static void put_stored(int storage, char *at, double x) {
    const uint16_t bits = storage == FASTATTN_REAL ? 0 : (uint16_t)nearest_bits(storage, x);
    if (storage == FASTATTN_REAL)
        put(at, 0, x);
    else
        memcpy(at, &bits, 2);
}

static double get_stored(int storage, const char *at) {
    return storage == FASTATTN_REAL ? get(at, 0) : stored_value(storage, stored_at(at));
}

/* In REAL, as this file is compiled without contraction. */
static double turned(double a, double c, double b, double s) {
    return size == 8 ? a * c + b * s : (float)((float)((float)a * (float)c) + (float)((float)b * (float)s));
}

static void check_rope(int storage, int n_pairs, int rest, int interleaved, int inverse, int in_place) {
    const int dim = 2 * n_pairs + rest, n_rows = 1 + below(4), nbytes = storage == FASTATTN_REAL ? size : 2;
    const int one_table_row = below(2), gap = below(3) * nbytes;
    const ptrdiff_t row = (ptrdiff_t)dim * nbytes + gap, table_row = one_table_row ? 0 : (ptrdiff_t)n_pairs * size;
    const ptrdiff_t taken_bytes = row * n_rows - gap, tables = (ptrdiff_t)n_pairs * size * (one_table_row ? 1 : n_rows);
    const fastattn_rotation rotation = {dim, n_pairs, interleaved, inverse};
    char *from = take(taken_bytes, 1, below(8)), *to = in_place ? from : take(taken_bytes, 1, below(8));
    char *cosines = take(tables, 1, below(8)), *sines = take(tables, 1, below(8)), before[4 * 150 * 8];
    for (ptrdiff_t i = 0; i < tables / size; i++) put(cosines, i, uniform(-1, 1)), put(sines, i, uniform(-1, 1));
    for (int r = 0; r < n_rows; r++)
        for (int c = 0; c < dim; c++) put_stored(storage, from + r * row + c * nbytes, uniform(-2, 2));
    memcpy(before, from, (size_t)taken_bytes);
    kernels->rope[storage](to, row, from, row, cosines, sines, table_row, n_rows, &rotation);
    for (int r = 0; r < n_rows; r++) {
        for (int i = 0; i < n_pairs; i++) {
            const int one = interleaved ? 2 * i : i, other = interleaved ? 2 * i + 1 : n_pairs + i;
            const double a = get_stored(storage, before + r * row + one * nbytes);
            const double b = get_stored(storage, before + r * row + other * nbytes);
            const double c = get(cosines + r * table_row, i), s = get(sines + r * table_row, i) * (inverse ? -1 : 1);
            const double exact[] = {turned(a, c, b, -s), turned(b, c, a, s)};
            for (int n = 0; n < 2; n++) {
                char wanted[8];
                const char *got = to + r * row + (n ? other : one) * nbytes;
                put_stored(storage, wanted, exact[n]);
                CHECK(memcmp(got, wanted, (size_t)nbytes) == 0,
                      "storage %d, %d pairs, interleaved %d, inverse %d, in place %d: row %d, pair %d is " NUMBER
                      ", not " NUMBER, storage, n_pairs, interleaved, inverse, in_place, r, i, get_stored(storage, got),
                      get_stored(storage, wanted));
            }
        }
        CHECK(memcmp(to + r * row + 2 * n_pairs * nbytes, before + r * row + 2 * n_pairs * nbytes, (size_t)(rest * nbytes)) ==
                  0, "the columns that pass through");
        for (int i = 0; r + 1 < n_rows && i < gap; i++)
            CHECK((unsigned char)to[r * row + dim * nbytes + i] == 0xff, "wrote between the rows");
    }
    release();
}

static void test_rope(void) {
    for (int storage = FASTATTN_REAL; storage < FASTATTN_STORAGES; storage++) {
        if (storage == FASTATTN_INT8 || (size == 8 && storage != FASTATTN_REAL)) {
            CHECK(!kernels->rope[storage], "int8 rows, or float64 beside 16 bits");
            continue;
        }
        for (int n_pairs = 0; n_pairs <= 70; n_pairs++)
            for (int kind = 0; kind < 8; kind++)
                check_rope(storage, n_pairs, below(3) ? 0 : below(9), kind & 1, kind >> 1 & 1, kind >> 2);
    }
}
