/* Register tiles and block sizes of the kernels. Those that each instruction set has for itself are in the table VECTORS of
 * _machine/constants.py, from which setup.py writes isas.h.
 *
 * Register blocking: `accumulate` holds TILE_ROWS x TILE_VECTORS sums, `score` SCORE_ROWS x SCORE_VECTORS and as
 * many totals, to which it adds its partial sums over SCORE_CHAIN columns. With the lane vectors and a broadcast
 * they fill the register file: 24 sums of 32 registers (AVX-512, NEON) or 12 of 16, where the totals are on the
 * stack. Beside full pipes, the loads and instructions per multiply-add matter: under AVX2 a 4 x 3 register tile
 * needs 7 loads for 12 multiply-adds, two of them of half a cache line; `accumulate` reads a column of weights per
 * register tile, and 2 vectors of them stay in L1 where 3 do not. BLOCK_VECTORS is how many vectors a query block
 * has at most, EXP2_KEYS how many keys `softmax` works on at once. The kernels for few rows hold ROW_SUMS vectors
 * of sums, half of the registers; other numbers were not measured.
 *
 * SCORE_CHAIN 16 instead of 8 raises the rounding error by 1 %; where additions share the pipes of the
 * multiply-adds it saves 7 % of `score`, and 32 would save another 1 %, but raise the error by 12 %. 2 cores of
 * Emerald Rapids, 2026-11-21, AVX-512, one thread over the kernels alone. Under AVX2 too: 32 saved 2 % of a call,
 * with a larger error than PyTorch's products have on AMD's cores; 8 cost another 5 % (2 cores of a Zen 3 EPYC,
 * 2026-11-22, interleaved A/B).
 */
#ifndef FASTATTN_BLOCKING_H
#define FASTATTN_BLOCKING_H

#include <stddef.h>

#include "../generated/isas.h"
#include "base.h"
#include "kernels.h"

/* Keys that one partial sum of `softmax` and `accumulate` runs over. 64 instead of 128 leave 83 % of the root mean
 * square error of 400 keys. Writing the accumulators back stalls the multiply-adds where a store of 64 bytes takes as
 * long as one and a half of them: 1 to 2 % of a call (2 cores of Zen 4 EPYC, 2026-11-20); nothing measurable on 2
 * cores of Emerald Rapids (2026-11-21), both with one thread over the kernels alone. */
#define KEY_CHUNK ((ptrdiff_t)FASTATTN_KEY_CHUNK)

/* `score` works on this many keys and columns at a time: with 48 query rows 6 KB of scores and 24 KB of queries in
 * float32, which stay in L1, where all columns of wide heads do not. 64 keys and 64 columns take 2 to 3 % longer at
 * head_dim 128 and 256; all keys and columns of a tile 8 % at 256. 2 cores of Emerald Rapids, 2026-11-21,
 * interleaved A/B and one thread over the kernels alone. */
#define SCORE_KEYS 32
#ifndef SCORE_COLUMNS
#define SCORE_COLUMNS 128
#endif
#ifndef EXP2_KEYS
#define EXP2_KEYS 4
#endif

/* Prefetch distance in rows of K and V, to cover the latency of memory. Past the last row the next head's follow in
 * the usual layout; a prefetch of an unmapped address is ignored. 16 rows of V were too few where pages are small. 2
 * cores of Zen 4 EPYC, 2026-11-20, one thread over the kernels alone. */
#define PREFETCH_KEYS 4
#define PREFETCH_VALUES 32
#define PREFETCH_PACKED 8 /* of V while it is packed */

/* Splits the vectors of a block from `first` on into groups of `width` vectors, 2 or 3, as a register tile has; the
 * last may have fewer, but of four vectors none is alone, as its tile would have a load for each multiply-add: a call of
 * 64 x 12 heads of 32 query rows and as many keys takes 0.85 of the time in AVX2 (2 cores of Zen 5, 2026-11-29, interleaved
 * A/B). BODY(V, unit, i) runs the group of V vectors from the i-th. */
#define EACH_GROUP(BODY, width, unit, first)                                                                   \
    do {                                                                                                       \
        int i = first;                                                                                         \
        for (; n_vectors - i >= width && (width < 3 || n_vectors - i != 4); i += width) BODY(width, unit, i);  \
        if (width == 3)                                                                                        \
            for (; n_vectors - i >= 2; i += 2) BODY(2, unit, i);                                               \
        if (n_vectors - i == 1) BODY(1, unit, i);                                                              \
    } while (0)

/* Rows to prefetch, of nbytes each; 0: none. */
typedef struct {
    const char *at;
    ptrdiff_t row, nbytes;
} prefetched_rows;

/* Prefetches the next cache line of each of n rows into L2: L1 has no room for a tile of them. A line of each row at a
 * time, between the products, as a core has few outstanding loads: the products wait for them where all lines of 8 rows
 * are prefetched at once, which takes 1.04 to 1.1 times as long at 20 and 32 query rows and keys from memory (2 cores of Zen
 * 5, 2026-11-25, interleaved A/B). */
INLINE void prefetch_line(const int n, prefetched_rows *rows) {
#pragma GCC unroll 8
    for (int r = 0; r < n; r++) __builtin_prefetch(rows->at + r * rows->row, 0, 2);
    rows->at += 64;
    rows->nbytes -= 64;
}

/* `rows` from the j-th on. */
INLINE prefetched_rows prefetched_from(prefetched_rows rows, ptrdiff_t j) {
    rows.at += j * rows.row;
    return rows;
}

#endif
