/* What reads the masks and numbers of a caller. Included by test_kernels.c only. */

#include "convert.h"

static void test_mask_words(void) {
    for (int item = 1; item <= 8; item *= 2)
        for (int n = 1; n <= 100; n++)
            for (int kind = 0; kind < 5; kind++) {
                const ptrdiff_t strides[] = {item, 2 * item, -item, 2 * item + 1, 0}, stride = strides[kind];
                const ptrdiff_t ld = 1 + below(lanes * kernels->max_vectors), span = (n - 1) * llabs(stride) + item;
                uint32_t *words = random_words(n, ld), *before = random_words(n, ld);
                const char **rows = (const char **)take(ld * (ptrdiff_t)sizeof *rows, 64, 0);
                memcpy(before, words, (size_t)((n + 31) / 32 * ld * 4));
                for (ptrdiff_t lane = 0; lane < ld; lane++) {
                    /* Runs of lanes share a row, as where a mask is broadcast. */
                    if (lane > 0 && (kind == 1 || below(3) == 0)) {
                        rows[lane] = rows[lane - 1];
                        continue;
                    }
                    char *block = take(span, 1, kind % 2 ? 1 + below(7) : 0);
                    char *row = stride < 0 ? block + span - item : block;
                    memset(block, 0, (size_t)span);
                    for (int j = 0; j < n; j++) {
                        /* One bit of the element, any of them. */
                        const uint64_t x = below(2) ? UINT64_C(1) << below(8 * item) : 0;
                        memcpy(row + j * stride, &x, (size_t)item);
                    }
                    rows[lane] = row;
                }
                kernels->mask_words(words, ld, rows, stride, item, n);
                for (int j = 0; j < n; j++)
                    for (ptrdiff_t lane = 0; lane < ld; lane++) {
                        uint64_t x = 0;
                        memcpy(&x, rows[lane] + j * stride, (size_t)item);
                        CHECK(allowed(words, NULL, ld, j, lane) == (allowed(before, NULL, ld, j, lane) && x != 0),
                              "%d bytes, %d columns, stride %td: column %d, lane %td", item, n, stride, j, lane);
                    }
                release();
            }
}

/* Block c of a stream of NumPy's Philox, by its definition. */
static void philox(uint64_t block[4], const uint64_t key[2], unsigned __int128 c) {
    uint64_t keys[2] = {key[0], key[1]};
    c++;
    block[0] = (uint64_t)c, block[1] = (uint64_t)(c >> 64), block[2] = block[3] = 0;
    for (int round = 0; round < 10; round++) {
        const unsigned __int128 a = (unsigned __int128)block[0] * UINT64_C(0xD2E7470EE14C6C93);
        const unsigned __int128 b = (unsigned __int128)block[2] * UINT64_C(0xCA5A826395121157);
        block[0] = (uint64_t)(b >> 64) ^ block[1] ^ keys[0];
        block[1] = (uint64_t)b;
        block[2] = (uint64_t)(a >> 64) ^ block[3] ^ keys[1];
        block[3] = (uint64_t)a;
        keys[0] += UINT64_C(0x9E3779B97F4A7C15), keys[1] += UINT64_C(0xBB67AE8584CAA73B);
    }
}

/* That this is NumPy's stream is for the tests of the package; here, that any part of it is drawn as the whole is. */
static void test_draw_words(void) {
    for (int run = 0; run < 60; run++) {
        const ptrdiff_t wide = FAR_AWAY, len_k = run % 3 ? 1 + below(2000) : wide - below(100);
        const ptrdiff_t n_keys = len_k < 200 ? 1 + below((int)len_k) : 1 + below(200);
        const ptrdiff_t key0 = run % 2 ? (len_k - n_keys) / 4 * 4 : (ptrdiff_t)(random_bits() % (uint64_t)(len_k - n_keys + 1));
        const ptrdiff_t ld = lanes * (1 + below(kernels->max_vectors));
        const fastattn_dropout dropout = {{random_bits() << 11 ^ random_bits(), run % 5 ? random_bits() : 0},
                                          run % 7 ? 1 + (uint64_t)below(65535) : run % 2 ? 1 : 65535};
        int64_t *rows = (int64_t *)take(ld * 8, 8, 0);
        uint32_t *words = random_words(n_keys, ld);
        for (ptrdiff_t lane = 0; lane < ld; lane++)
            rows[lane] = run % 4 ? below(100000) : wide - 1 - below(1000);
        kernels->draw_words(words, ld, rows, len_k, key0, n_keys, &dropout);
        for (ptrdiff_t lane = 0; lane < ld; lane++)
            for (ptrdiff_t j = 0; j < n_keys; j++) {
                uint64_t block[4];
                const ptrdiff_t key = key0 + j;
                philox(block, dropout.key, (unsigned __int128)rows[lane] * (uint64_t)((len_k + 15) / 16) + (uint64_t)(key / 16));
                const int kept = (block[key % 16 / 4] >> (16 * (key % 4)) & 0xffff) >= dropout.threshold;
                CHECK((int)(words[j / 32 * ld + lane] >> (j % 32) & 1) == kept, "row %td, key %td of %td, threshold %d",
                      (ptrdiff_t)rows[lane], key, len_k, (int)dropout.threshold);
            }
        release();
    }
}

/* Floats and doubles, to the compute type of this table. */
static void test_convert(void) {
    const ptrdiff_t gaps[] = {0, 1, 3};
    for (int from = 4; from <= 8; from *= 2)
        for (int kind = 0; kind < 12; kind++) {
            const int swapped = kind % 2, n = 5000;
            const ptrdiff_t stride = (kind / 2 % 2 ? -1 : 1) * (from + gaps[kind / 4]);
            const ptrdiff_t span = (n - 1) * llabs(stride) + from;
            char *block = take(span, 1, kind % 5), *row = stride < 0 ? block + span - from : block;
            char *to = take((ptrdiff_t)n * size, 1, 0);
            double *want = malloc((size_t)n * sizeof *want);
            for (int i = 0; i < n; i++) {
                char bytes[8];
                const double x = i < 8 ? special(i) : uniform(-1, 1) * exp2(below(1000) - 500);
                const float single = (float)x;
                want[i] = rounded(from == 4 ? single : x);
                memcpy(bytes, from == 4 ? (const void *)&single : &x, (size_t)from);
                for (int b = 0; b < from; b++) row[i * stride + b] = bytes[swapped ? from - 1 - b : b];
            }
            fastattn_convert_row(to, size, row, from, swapped, stride, n);
            for (int i = 0; i < n; i++)
                CHECK(same(get(to, i), want[i]), "%d bytes, swapped %d, stride %td: " NUMBER ", not " NUMBER, from,
                      swapped, stride, get(to, i), want[i]);
            free(want);
            release();
        }
}

static void check_copy(const Matrix *from) {
    char *to = take(from->rows * from->cols * from->nbytes, from->nbytes, 0);
    fastattn_copy_rows(to, from->at, from->row, from->col, from->nbytes, from->rows, from->cols);
    for (ptrdiff_t r = 0; r < from->rows; r++)
        for (ptrdiff_t c = 0; c < from->cols; c++, to += from->nbytes)
            CHECK(memcmp(to, element(from, r, c), (size_t)from->nbytes) == 0, "%td bytes, %td by %td, strides %td, %td: (%td, %td)",
                  from->nbytes, from->rows, from->cols, from->row, from->col, r, c);
    release();
}

/* A copy without gaps, of rows in any layout, also of 16 bits. */
static void test_copy_rows(void) {
    const ptrdiff_t cols_16[] = {2, -2, 3, 14};
    for (int rows = 1; rows <= 20; rows++) {
        for (int layout = 0; layout < LAYOUTS; layout++) {
            const Matrix from = integer_matrix(rows, 1 + below(70), layout);
            check_copy(&from);
        }
        for (int i = 0; i < COUNT(cols_16); i++) {
            const int n_cols = 1 + below(70);
            const Matrix from = matrix_of(rows, n_cols, n_cols * cols_16[i] + below(3), cols_16[i], 2, below(8));
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < n_cols; c++) memset(element(&from, r, c), below(256), 2);
            seal(&from);
            check_copy(&from);
        }
    }
}
