/* Copies of rows of a caller's array that kernels do not read in place, of another type or with gaps; and sums of tiles that
 * the gradient of a bias is made of. */
#ifndef FASTATTN_CONVERT_H
#define FASTATTN_CONVERT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* to[i] (float or double, by to_size) = element i of the row, a float of from_size bytes, 4 or 8, i < n. */
static inline void fastattn_convert_row(char *to, int to_size, const char *from, int from_size, int swapped,
                                        ptrdiff_t stride, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; i++, from += stride) {
        uint64_t bits = 0;
        double x;
        if (from_size == 4) {
            uint32_t single;
            float y;
            memcpy(&single, from, 4);
            if (swapped) single = __builtin_bswap32(single);
            memcpy(&y, &single, 4);
            x = y;
        } else {
            memcpy(&bits, from, 8);
            if (swapped) bits = __builtin_bswap64(bits);
            memcpy(&x, &bits, 8);
        }
        if (to_size == 4) {
            const float y = (float)x;
            memcpy(to + i * 4, &y, 4);
        } else {
            memcpy(to + i * 8, &x, 8);
        }
    }
}

/* to[i * n_cols + c] = the element (i, c) of `from`, of itemsize bytes (2, 4 or 8), i < n_rows, c < n_cols. Later
 * rows are prefetched: they may be too far apart for the hardware prefetcher. */
static inline void fastattn_copy_rows(char *to, const char *from, ptrdiff_t row, ptrdiff_t col, ptrdiff_t itemsize,
                                      ptrdiff_t n_rows, ptrdiff_t n_cols) {
    enum { PREFETCH_ROWS = 8 };
    const ptrdiff_t nbytes = n_cols * itemsize;
    for (ptrdiff_t i = 0; i < n_rows; i++, from += row, to += nbytes) {
        if (col == itemsize) {
            for (ptrdiff_t at = 0; at < nbytes; at += 64) __builtin_prefetch(from + PREFETCH_ROWS * row + at);
            memcpy(to, from, (size_t)nbytes);
        } else if (itemsize == 2) {
            for (ptrdiff_t c = 0; c < n_cols; c++) memcpy(to + c * 2, from + c * col, 2);
        } else if (itemsize == 4) {
            for (ptrdiff_t c = 0; c < n_cols; c++) memcpy(to + c * 4, from + c * col, 4);
        } else {
            for (ptrdiff_t c = 0; c < n_cols; c++) memcpy(to + c * 8, from + c * col, 8);
        }
    }
}

/* sums[n][lane], of ld lanes: of a tile's keys in row n of a grid, from the row of its first key on, and then of those in
 * one column, from that of its first key on. That key is the element `first` of its row, and a row has `run` keys. */
static inline void fastattn_sum_grid(double *sums, const char *tile, int itemsize, ptrdiff_t ld, ptrdiff_t n_keys,
                                     ptrdiff_t first, ptrdiff_t run) {
    const ptrdiff_t n_rows = (first + n_keys - 1) / run + 1, n_columns = n_keys < run ? n_keys : run;
    memset(sums, 0, (size_t)((n_rows + n_columns) * ld) * sizeof(double));
    for (ptrdiff_t j = 0; j < n_keys; j++) {
        double *const row = sums + (first + j) / run * ld, *const column = sums + (n_rows + j % run) * ld;
        for (ptrdiff_t lane = 0; lane < ld; lane++) {
            float single;
            double x;
            if (itemsize == 4) {
                memcpy(&single, tile + (j * ld + lane) * 4, 4);
                x = single;
            } else {
                memcpy(&x, tile + (j * ld + lane) * 8, 8);
            }
            row[lane] += x;
            column[lane] += x;
        }
    }
}

#endif
