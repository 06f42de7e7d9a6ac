/* Rows stored in 16 or 8 bits: every number of both types, and the kernels that read them in place. Included by test_kernels.c
 * only. */

/* A sign, an exponent with this bias, and so many bits of a mantissa. */
static int mantissa_bits(int storage) { return storage == FASTATTN_FLOAT16 ? 10 : 7; }
static int exponent_bias(int storage) { return storage == FASTATTN_FLOAT16 ? 15 : 127; }
static const char *storage_name(int storage) {
    return storage == FASTATTN_FLOAT16 ? "float16" : storage == FASTATTN_BFLOAT16 ? "bfloat16" : "int8";
}
static unsigned infinity_bits(int storage) { return 0x8000u - (1u << mantissa_bits(storage)); }

static double stored_value(int storage, unsigned bits) {
    const int mantissa = mantissa_bits(storage), bias = exponent_bias(storage);
    const int exponent = (int)((bits & 0x7fff) >> mantissa), fraction = (int)(bits & ((1u << mantissa) - 1));
    double x = exponent ? ldexp((1 << mantissa) + fraction, exponent - bias - mantissa)
                        : ldexp(fraction, 1 - bias - mantissa);
    if (exponent == 2 * bias + 1) x = fraction ? NAN : INFINITY;
    return bits >> 15 ? -x : x;
}

/* x, which is not NaN, rounded to the nearest number, to even between two. */
static unsigned nearest_bits(int storage, double x) {
    const int mantissa = mantissa_bits(storage), bias = exponent_bias(storage);
    const unsigned sign = signbit(x) ? 0x8000 : 0;
    int exponent = 1 - bias;
    if (fabs(x) > ldexp(1, exponent)) frexp(x, &exponent), exponent--;
    if (isinf(x) || exponent > bias) return sign | infinity_bits(storage);
    const unsigned places = (unsigned)rint(ldexp(fabs(x), mantissa - exponent)); /* the scaling is exact */
    /* A sum, as 2^(mantissa + 1) places are a power of two and the next exponent; without 2^mantissa it is subnormal. */
    return sign | (((unsigned)(exponent + bias - 1) << mantissa) + places);
}

/* What `stored_value` gives for all patterns, and 4096 patterns of numbers between -2 and 2; made once. */
static const struct patterns {
    double values[1 << 16];
    uint16_t small[1 << 12];
} *patterns_of(int storage) {
    static struct patterns made[2];
    struct patterns *p = made + (storage == FASTATTN_FLOAT16);
    if (p->values[1] == 0) {
        for (unsigned bits = 0; bits < 1 << 16; bits++) p->values[bits] = stored_value(storage, bits);
        for (int i = 0; i < 1 << 12; i++) p->small[i] = (uint16_t)nearest_bits(storage, uniform(-2, 2));
    }
    return p;
}

static unsigned stored_at(const void *at) {
    uint16_t bits;
    return memcpy(&bits, at, 2), bits;
}

static int is_quiet_nan(int storage, unsigned bits) {
    return (bits & 0x7fff) > infinity_bits(storage) && bits >> (mantissa_bits(storage) - 1) & 1;
}

/* ------------------------------------------------------------------ load_row */

static void check_load_row(int storage, ptrdiff_t stride, int n, unsigned first, int swapped) {
    Matrix row = matrix_of(1, n, 0, stride, 2, below(8));
    char *to = take((ptrdiff_t)n * size, 1, below(8));
    for (int c = 0; c < n; c++) {
        const uint16_t bits = (uint16_t)(first + (unsigned)c);
        const uint16_t stored = swapped ? (uint16_t)(bits >> 8 | bits << 8) : bits;
        memcpy(element(&row, 0, c), &stored, 2);
    }
    seal(&row);
    kernels->load_row(to, row.at, stride, n, storage, swapped, NULL, 0);
    for (int c = 0; c < n; c++) {
        const unsigned bits = stride ? (first + (unsigned)c) & 0xffff : (first + (unsigned)n - 1) & 0xffff;
        CHECK(same(get(to, c), stored_value(storage, bits)), "%s, stride %td, swapped %d: %04x is " NUMBER ", not " NUMBER,
              storage_name(storage), stride, swapped, bits, get(to, c), stored_value(storage, bits));
    }
    release();
}

static void test_load_row(void) {
    const ptrdiff_t strides[] = {2, 6, 0, -2, 3, -7};
    for (int storage = FASTATTN_FLOAT16; storage <= FASTATTN_BFLOAT16; storage++)
        for (int swapped = 0; swapped < 2; swapped++)
            for (int i = 0; i < COUNT(strides); i++) {
                if (strides[i])
                    check_load_row(storage, strides[i], 1 << 16, 0, swapped);
                else
                    for (unsigned bits = 0; bits < 1 << 16; bits += 5) check_load_row(storage, 0, 1, bits, swapped);
                for (int n = 1; n <= 70; n++) check_load_row(storage, strides[i], n, (unsigned)below(1 << 16), swapped);
            }
}

static void test_load_row_real(void) {
    const ptrdiff_t strides[] = {size, 3 * size, 0, -size, size + 1};
    for (int kind = 0; kind < 2 * COUNT(strides); kind++)
        for (int n = 1; n <= 70; n++) {
            const int swapped = kind % 2;
            Matrix row = matrix(1, n, 0, strides[kind / 2], below(8)), back = matrix(1, n, 0, size + 3, below(8));
            char *to = take((ptrdiff_t)n * size, 1, below(8)), numbers[70 * 8];
            for (int c = 0; c < n; c++) {
                put(numbers, c, below(4) ? uniform(-1, 1) * exp2(below(200) - 100) : special(c));
                for (int b = 0; b < size; b++)
                    element(&row, 0, c)[b] = numbers[c * size + (swapped ? size - 1 - b : b)];
            }
            seal(&row);
            seal(&back);
            kernels->load_row(to, row.at, row.col, n, FASTATTN_REAL, swapped, NULL, 0);
            kernels->store_row(back.at, back.col, to, n, FASTATTN_REAL);
            for (int c = 0; c < n; c++) {
                const char *const want = numbers + (row.col ? c : n - 1) * size;
                CHECK(!memcmp(to + c * size, want, (size_t)size) && !memcmp(element(&back, 0, c), want, (size_t)size),
                      "stride %td, swapped %d: " NUMBER " and " NUMBER ", not " NUMBER, row.col, swapped, get(to, c),
                      entry(&back, 0, c), get(want, 0));
            }
            release();
        }
}

/* ------------------------------------------------------------------ store_row */

/* Numbers on their way to store_row, a row at a time. */
static struct {
    int storage, n;
    char numbers[64 * 8];
} outgoing;

static void store_outgoing(void) {
    char *to = take(outgoing.n * 2, 1, 0);
    kernels->store_row(to, 2, outgoing.numbers, outgoing.n, outgoing.storage);
    for (int c = 0; c < outgoing.n; c++) {
        const double x = get(outgoing.numbers, c);
        const unsigned got = stored_at(to + c * 2);
        if (isnan(x))
            CHECK(is_quiet_nan(outgoing.storage, got), "%s: NaN became %04x", storage_name(outgoing.storage), got);
        else
            CHECK(got == nearest_bits(outgoing.storage, x), "%s: " NUMBER " became %04x, not %04x",
                  storage_name(outgoing.storage), x, got, nearest_bits(outgoing.storage, x));
    }
    outgoing.n = 0;
    release();
}

static void store_bits(uint64_t bits) {
    const uint32_t low = (uint32_t)bits;
    memcpy(outgoing.numbers + outgoing.n++ * size, size == 8 ? (const void *)&bits : &low, (size_t)size);
    if (outgoing.n == 64) store_outgoing();
}

static void store_number(double x) {
    char number[8];
    uint64_t bits = 0;
    uint32_t low;
    put(number, 0, x);
    if (size == 8)
        memcpy(&bits, number, 8);
    else
        memcpy(&low, number, 4), bits = low;
    store_bits(bits);
}

static double next(double x, double towards) {
    return size == 8 ? nextafter(x, towards) : nextafterf((float)x, (float)towards);
}

static void test_store_row(void) {
    for (int storage = FASTATTN_FLOAT16; storage <= FASTATTN_BFLOAT16; storage++) {
        const double above = ldexp(1, exponent_bias(storage) + 1); /* the power of two past the largest number */
        outgoing.storage = storage;
        for (unsigned bits = 0; bits < 1 << 16; bits++) {
            const double x = stored_value(storage, bits);
            store_number(x); /* exact */
            if (bits >= infinity_bits(storage)) continue;
            const double after = bits + 1 == infinity_bits(storage) ? above : stored_value(storage, bits + 1);
            const double numbers[] = {(x + after) / 2, next(x, INFINITY), next(after, 0)};
            for (int i = 0; i < COUNT(numbers); i++) store_number(numbers[i]), store_number(-numbers[i]);
            store_number(next(numbers[0], 0)), store_number(-next(numbers[0], 0));
            store_number(next(numbers[0], INFINITY)), store_number(-next(numbers[0], INFINITY));
        }
        const double edges[] = {above, largest(), smallest(), next(0, 1), next(smallest(), 0), INFINITY};
        for (int i = 0; i < COUNT(edges); i++) store_number(edges[i]), store_number(-edges[i]);
        /* Any NaN, also one with no bit that a shorter mantissa would keep. */
        for (int bit = 0; bit < (size == 8 ? 52 : 23); bit++)
            for (uint64_t sign = 0; sign < 2; sign++)
                store_bits(size == 8 ? sign << 63 | UINT64_C(0x7ff) << 52 | UINT64_C(1) << bit
                                     : sign << 31 | UINT64_C(0xff) << 23 | UINT64_C(1) << bit);
        for (int i = 0; i < 1000000; i++) {
            const uint64_t bits = random_bits() << 32 ^ random_bits();
            /* Of all bits, and of those near the numbers of the type. */
            if (i % 2)
                store_bits(bits);
            else
                store_number(ldexp(uniform(-1, 1), below(2 * exponent_bias(storage) + 20) - exponent_bias(storage) - 15));
        }
        store_outgoing();
    }
}

static void test_limit_row(void) {
    const float most = 0x1.fep127f, edges[] = {0, most, 0x1.fe0002p127f, 0x1.fffffep127f, INFINITY, NAN};
    for (int n = 1; size == 4 && n < 70; n++) {
        float *const row = (float *)take(n * 4, 4, 0), *const before = (float *)take(n * 4, 4, 0);
        for (int i = 0; i < n; i++) row[i] = (below(2) ? edges[below(COUNT(edges))] : (float)uniform(-9, 9)) * (below(2) ? 1 : -1);
        memcpy(before, row, (size_t)n * 4);
        kernels->limit_row(row, n);
        for (int i = 0; i < n; i++) {
            const float x = before[i], want = isfinite(x) && fabsf(x) > most ? copysignf(most, x) : x;
            CHECK(row[i] == want || (isnan(row[i]) && isnan(want)), "%d numbers: %a became %a", n, (double)x, (double)row[i]);
        }
        release();
    }
}

static void test_store_row_layouts(void) {
    const ptrdiff_t strides[] = {2, 6, -2, 3, -7};
    for (int storage = FASTATTN_FLOAT16; storage <= FASTATTN_BFLOAT16; storage++)
        for (int i = 0; i < COUNT(strides); i++)
            for (int n = 1; n <= 70; n++) {
                Matrix row = matrix_of(1, n, 0, strides[i], 2, below(8));
                const ptrdiff_t gap = llabs(row.col);
                const unsigned char *lowest = (unsigned char *)element(&row, 0, row.col < 0 ? n - 1 : 0);
                char *from = take((ptrdiff_t)n * size, 1, below(8));
                for (int c = 0; c < n; c++) put(from, c, uniform(-9, 9));
                kernels->store_row(row.at, row.col, from, n, storage);
                for (int c = 0; c < n; c++)
                    CHECK(stored_at(element(&row, 0, c)) == nearest_bits(storage, get(from, c)), "%s, stride %td: " NUMBER
                          " became %04x", storage_name(storage), row.col, get(from, c), stored_at(element(&row, 0, c)));
                for (ptrdiff_t b = 0; b < (n - 1) * gap; b++)
                    CHECK(b % gap < 2 || lowest[b] == 0xff, "wrote between the elements, stride %td", row.col);
                release();
            }
}

/* ------------------------------------------------------------------ score_rows and accumulate_rows */

enum { GROUP = FASTATTN_GROUP };

/* A row of int8 stands for these products, rounded to float32 whatever REAL is. */
static double product(int element, float scale) { return (float)((float)element * scale); }

/* Rows of int8 with their scales, of which some are 0, subnormal or NaN, and the same numbers as REAL. */
static Matrix quantized_rows(int rows, int cols, Matrix *scales, Matrix *upcast) {
    const int groups = (cols + GROUP - 1) / GROUP;
    Matrix m = rows_of(rows, cols, 1);
    *scales = rows_of(rows, groups, 4);
    *upcast = laid_out(rows, cols, 0);
    for (int r = 0; r < rows; r++) {
        for (int g = 0; g < groups; g++) {
            const float special[] = {0, 0x1p-140f, NAN}, scale = below(8) ? (float)uniform(0, 0.02) : special[below(3)];
            memcpy(element(scales, r, g), &scale, 4);
        }
        for (int c = 0; c < cols; c++) *(int8_t *)element(&m, r, c) = (int8_t)(below(255) - 127);
    }
    for (int r = 0; r < rows; r++) /* after all of m, whose rows may share memory */
        for (int c = 0; c < cols; c++) {
            float scale;
            memcpy(&scale, element(scales, r, c / GROUP), 4);
            put(element(upcast, r, c), 0, product(*(int8_t *)element(&m, r, c), scale));
        }
    seal(&m), seal(scales);
    return m;
}

static void test_load_row_int8(void) {
    static const ptrdiff_t strides[] = {1, 3, -1};
    for (int i = 0; i < 3; i++)
        for (int n = 1; n <= 200; n++) {
            const int groups = (n + GROUP - 1) / GROUP;
            Matrix row = matrix_of(1, n, 0, strides[i], 1, below(8)), scale = matrix_of(1, groups, 0, 4 + 4 * below(2), 4, 0);
            for (int c = 0; c < n; c++) *(int8_t *)element(&row, 0, c) = (int8_t)(below(255) - 127);
            for (int g = 0; g < groups; g++) {
                const float x = (float)uniform(0, 0.02);
                memcpy(element(&scale, 0, g), &x, 4);
            }
            void *to = tile(1, n);
            kernels->load_row(to, row.at, row.col, n, FASTATTN_INT8, 0, scale.at, scale.col);
            for (int c = 0; c < n; c++) {
                float x;
                memcpy(&x, element(&scale, 0, c / GROUP), 4);
                const double want = product(*(int8_t *)element(&row, 0, c), x);
                CHECK(get(to, c) == want, "int8, %d elements, stride %td: element %d is " NUMBER ", not " NUMBER, n,
                      row.col, c, get(to, c), want);
            }
            release();
        }
}

/* Keys or values in 16 bits, any of them or finite ones only, and the same numbers as REAL. */
static Matrix stored_rows(int storage, int rows, int cols, int any, Matrix *upcast) {
    const struct patterns *p = patterns_of(storage);
    Matrix m = rows_of(rows, cols, 2);
    *upcast = laid_out(rows, cols, 0);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++) {
            const uint16_t bits = any ? (uint16_t)below(1 << 16) : p->small[below(1 << 12)];
            memcpy(element(&m, r, c), &bits, 2);
        }
    for (int r = 0; r < rows; r++) /* after all of m, whose rows may share memory */
        for (int c = 0; c < cols; c++) put(element(upcast, r, c), 0, p->values[stored_at(element(&m, r, c))]);
    seal(&m);
    return m;
}

static void *reals(ptrdiff_t rows, ptrdiff_t ld) {
    void *out = tile(rows, ld);
    for (ptrdiff_t i = 0; i < rows * ld; i++) put(out, i, uniform(-1, 1));
    return out;
}

static void check_stored(const char *name, int storage, const void *got, const void *want, int n_rows, ptrdiff_t ld,
                         int n_keys, int n_cols, int n) {
    for (int r = 0; r < n_rows; r++)
        for (int x = 0; x < n; x++)
            CHECK(same(get(got, r * ld + x), get(want, r * ld + x)),
                  "%s of %s: %d rows, %d keys, %d columns: row %d, %d is " NUMBER ", not " NUMBER, name,
                  storage_name(storage), n_rows, n_keys, n_cols, r, x, get(got, r * ld + x), get(want, r * ld + x));
}

/* The same bits as of the same numbers stored as REAL. */
static void check_each_storage(int n_rows, int n_keys, int n_cols) {
    for (int storage = FASTATTN_FLOAT16; storage < FASTATTN_STORAGES; storage++) {
        const ptrdiff_t ld = row_length(n_cols), s_ld = row_length(n_keys);
        const int any = below(4) == 0;
        void *q = reals(n_rows, ld), *p = reals(n_rows, s_ld);
        void *s[2] = {tile(n_rows, s_ld), tile(n_rows, s_ld)}, *acc[2] = {tile(n_rows, ld), tile(n_rows, ld)};
        Matrix k_real, v_real, k_scales, v_scales;
        fastattn_rows keys, values;
        if (storage == FASTATTN_INT8) {
            const Matrix k = quantized_rows(n_keys, n_cols, &k_scales, &k_real);
            const Matrix v = quantized_rows(n_keys, n_cols, &v_scales, &v_real);
            keys = rows_to_read(&k, 0), values = rows_to_read(&v, 0);
            keys.scale = k_scales.at, keys.scale_row = k_scales.row;
            values.scale = v_scales.at, values.scale_row = v_scales.row;
        } else {
            const Matrix k = stored_rows(storage, n_keys, n_cols, any, &k_real);
            const Matrix v = stored_rows(storage, n_keys, n_cols, any, &v_real);
            keys = rows_to_read(&k, 0), values = rows_to_read(&v, 0);
        }
        const fastattn_rows real_keys = rows_to_read(&k_real, 0), real_values = rows_to_read(&v_real, 0);
        for (int r = 0; r < n_rows; r++)
            for (ptrdiff_t d = n_cols; d < (n_cols + lanes - 1) / lanes * lanes; d++) put(q, r * ld + d, 0);
        kernels->score_rows[storage](s[0], s_ld, q, ld, n_rows, &keys, n_keys, n_cols);
        kernels->score_rows[FASTATTN_REAL](s[1], s_ld, q, ld, n_rows, &real_keys, n_keys, n_cols);
        check_stored("score_rows", storage, s[0], s[1], n_rows, s_ld, n_keys, n_cols, n_keys);
        kernels->accumulate_rows[storage](acc[0], ld, p, s_ld, n_rows, &values, n_keys, n_cols, 0);
        kernels->accumulate_rows[FASTATTN_REAL](acc[1], ld, p, s_ld, n_rows, &real_values, n_keys, n_cols, 0);
        check_stored("accumulate_rows", storage, acc[0], acc[1], n_rows, ld, n_keys, n_cols, n_cols);
        release();
    }
}

static void test_rows_of_each_storage(void) {
    if (size == 8) {
        for (int storage = FASTATTN_REAL + 1; storage < FASTATTN_STORAGES; storage++)
            CHECK(!kernels->score_rows[storage] && !kernels->accumulate_rows[storage], "float64 rows of stored numbers");
        return;
    }
    /* Each pair of a number of rows, of keys and of columns, with any third. */
    for (int n_keys = 1; n_keys <= 70; n_keys++)
        for (int n_cols = 1; n_cols <= 70; n_cols++) check_each_storage(1 + below(9), n_keys, n_cols);
    for (int n_rows = 1; n_rows <= 9; n_rows++)
        for (int n = 1; n <= 70; n++) check_each_storage(n_rows, n, 1 + below(70)), check_each_storage(n_rows, 1 + below(70), n);
    each_size(check_each_storage);
}
