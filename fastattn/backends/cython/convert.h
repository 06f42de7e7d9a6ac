/* Copies of rows of a caller's array that kernels do not read in place: of another type, or with gaps. */
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

#endif
