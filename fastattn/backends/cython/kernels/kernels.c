/* The micro-kernels for one ISA, float32 and float64: one body, instantiated twice here and once more for
 * each ISA that setup.py builds an object for (FASTATTN_ISA names it, the compiler's -m flags enable it).
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

#include "base.h"

#include "kernels.h"

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define TILE_ROWS 8
#define TILE_VECTORS 3
#define WIDE_ROWS 16
#define SCORE_ROWS 4
#define SCORE_VECTORS 3
#define SCORE_CHAIN 16
#define BLOCK_VECTORS 3
#define ROW_SUMS 16
#define EXP2_KEYS 4
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#define TILE_ROWS 6
#define TILE_VECTORS 2
#define SCORE_ROWS 4
#define SCORE_VECTORS 3
#define SCORE_CHAIN 16
#define BLOCK_VECTORS 6
#define ROW_SUMS 8
#define EXP2_KEYS 4
#elif defined(__aarch64__)
#define VECTOR_BYTES 16
#define TILE_ROWS 8
#define TILE_VECTORS 3
#define SCORE_ROWS 4
#define SCORE_VECTORS 3
#define SCORE_CHAIN 8
#define BLOCK_VECTORS 12
#define ROW_SUMS 16
#define EXP2_KEYS 4
#else
#define VECTOR_BYTES 16
#define TILE_ROWS 4
#define TILE_VECTORS 2
#define SCORE_ROWS 4
#define SCORE_VECTORS 2
#define SCORE_CHAIN 4
#define SCORE_COLUMNS 16 /* without fused multiply-adds every product rounds too */
#define BLOCK_VECTORS 6
#define ROW_SUMS 8
#define EXP2_KEYS 2
#endif

/* Where query blocks have few vectors, many lack one. Register tiles of one or two vectors then have more keys or
 * columns, to hide the latency of the multiply-adds and of the loads of broadcast elements: `score` of one and of two
 * vectors takes 0.93 and 0.88 of the time, `accumulate` of one 0.86. 2 cores of Emerald Rapids, 2026-11-21, one
 * thread over the kernels alone. */
#define NARROW_ROWS (2 * SCORE_ROWS) /* of `score` */
#ifndef WIDE_ROWS                    /* of `accumulate`, for one vector */
#define WIDE_ROWS TILE_ROWS
#endif

/* Columns of a partial sum where fewer than SCORE_CHAIN are left. */
#define SCORE_REST (SCORE_CHAIN < 8 ? SCORE_CHAIN : 8)

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

/* Prefetch distance in rows of K and V, to cover the latency of memory. Past the last row the next head's follow in
 * the usual layout; a prefetch of an unmapped address is ignored. 16 rows of V were too few where pages are small. 2
 * cores of Zen 4 EPYC, 2026-11-20, one thread over the kernels alone. */
#define PREFETCH_KEYS 4
#define PREFETCH_VALUES 32
#define PREFETCH_PACKED 8 /* of V while it is packed */

/* The word of one row's keys [0, n), n <= 32: bit j is element j != 0. */
INLINE uint32_t row_word(const char *row, ptrdiff_t stride, int itemsize, int n) {
    if (stride == 1 && itemsize == 1 && n == 32) {
#if defined(__AVX2__)
        const __m256i x = _mm256_loadu_si256((const __m256i *)row);
        return ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, _mm256_setzero_si256()));
#else
        uint32_t word = 0;
        for (int i = 0; i < 4; i++) {
            uint64_t x;
            memcpy(&x, row + 8 * i, 8);
            /* Gathers each byte's bits into its lowest, then the eight lowest bits into the top byte. */
            x |= x >> 4;
            x |= x >> 2;
            x |= x >> 1;
            x &= UINT64_C(0x0101010101010101);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
            x = __builtin_bswap64(x);
#endif
            word |= (uint32_t)((x * UINT64_C(0x0102040810204080)) >> 56) << (8 * i);
        }
        return word;
#endif
    }
    uint32_t word = 0;
    for (int j = 0; j < n; j++) {
        uint64_t x = 0;
        memcpy(&x, row + j * stride, (size_t)itemsize);
        word |= (uint32_t)(x != 0) << j;
    }
    return word;
}

static void mask_words(uint32_t *words, ptrdiff_t ld, const char *const *rows, ptrdiff_t stride, int itemsize,
                       ptrdiff_t n_cols) {
    for (ptrdiff_t j = 0; j < n_cols; j += 32, words += ld) {
        const int n = n_cols - j < 32 ? (int)(n_cols - j) : 32;
        uint32_t word = 0;
        for (ptrdiff_t lane = 0; lane < ld; lane++) {
            /* A mask broadcast over queries or heads has one row for many lanes. */
            if (lane == 0 || rows[lane] != rows[lane - 1])
                word = row_word(rows[lane] + j * stride, stride, itemsize, n);
            words[lane] &= word;
        }
    }
}

#include "philox.h"

static inline float load_float(const char *at) {
    float x;
    memcpy(&x, at, sizeof x);
    return x;
}

/* Copies n elements of nbytes bytes, 2, 4 or 8, their bytes reversed where `swapped`; returns `to`. Not inline: it is
 * for rows of unusual layouts. */
static __attribute__((noinline)) const char *gather_elements(char *to, const char *from, ptrdiff_t stride, int nbytes,
                                                             int n, int swapped) {
#define GATHER(type, swap)                                                                                     \
    for (int i = 0; i < n; i++) {                                                                              \
        type x;                                                                                                \
        memcpy(&x, from + i * stride, sizeof x);                                                               \
        if (swapped) x = swap(x);                                                                              \
        memcpy(to + i * (int)sizeof x, &x, sizeof x);                                                          \
    }
    if (nbytes == 2)
        GATHER(uint16_t, __builtin_bswap16)
    else if (nbytes == 4)
        GATHER(uint32_t, __builtin_bswap32)
    else
        GATHER(uint64_t, __builtin_bswap64)
#undef GATHER
    return to;
}

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

#define REAL float
#define REAL_BITS 32
#define NAME(name) CONCAT(name, f32)
#include "body.h"

#define REAL double
#define REAL_BITS 64
#define NAME(name) CONCAT(name, f64)
#include "body.h"
