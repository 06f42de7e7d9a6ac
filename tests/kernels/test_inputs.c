/* What reads the masks and numbers of a caller. Included by test_kernels.c only. */

#include "convert.h"

static void test_mask_words(void) {
    for (int item = 1; item <= 8; item *= 2)
        for (int n = 1; n <= 100; n++)
            for (int kind = 0; kind < 5; kind++) {
                const ptrdiff_t strides[] = {item, 2 * item, -item, 2 * item + 1, 0}, stride = strides[kind];
                const ptrdiff_t ld = 1 + below(lanes * kernels->max_vectors), span = (n - 1) * labs(stride) + item;
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

/* Floats and doubles, to the compute type of this table. */
static void test_convert(void) {
    const ptrdiff_t gaps[] = {0, 1, 3};
    for (int from = 4; from <= 8; from *= 2)
        for (int kind = 0; kind < 12; kind++) {
            const int swapped = kind % 2, n = 5000;
            const ptrdiff_t stride = (kind / 2 % 2 ? -1 : 1) * (from + gaps[kind / 4]);
            const ptrdiff_t span = (n - 1) * labs(stride) + from;
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

/* A copy without gaps, of rows in any layout. */
static void test_copy_rows(void) {
    for (int rows = 1; rows <= 20; rows++)
        for (int layout = 0; layout < LAYOUTS; layout++) {
            const int cols = 1 + below(70);
            const Matrix from = integer_matrix(rows, cols, layout);
            char *to = take((ptrdiff_t)rows * cols * size, size, 0);
            fastattn_copy_rows(to, from.at, from.row, from.col, size, rows, cols);
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < cols; c++)
                    CHECK(get(to, r * cols + c) == entry(&from, r, c), "%d rows, %d columns, layout %d: row %d, column %d",
                          rows, cols, layout, r, c);
            release();
        }
}
