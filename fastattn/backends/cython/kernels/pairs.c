/* The kernels of pairs; see pairs.h for what each promises. Built twice: for AVX-512 with products of bfloat16
 * (avx512_bf16), and for AVX2 with a C model of the instruction (bf16_model, FASTATTN_MODEL). */

#include "base.h"

#include "blocking.h"
#include "pairs.h"

#include "vec.h"

#define HIGH_HALF ((int32_t)0xffff0000)
#define LARGEST_BITS 0x5d800000 /* 2^60: a denormal key times less changes no weight */
#define LEAST_BITS 0x00800000   /* 2^-126 */

/* number * factor; is_other becomes nonzero in the lanes whose scores the kernels of float32 are to compute. */
INLINE IVEC scaled(VEC number, VEC factor, IVEC *is_other) {
    const IVEC product = (IVEC)(number * factor), size = product & INT32_MAX;
    *is_other |= (size >= LARGEST_BITS) | ((size < LEAST_BITS) & (size != 0));
    return product;
}

INLINE void pack_block(const int n, float *to, ptrdiff_t ld, const char *const *rows, size_t at, VEC factor,
                       IVEC *is_other) {
    VEC x[LANES];
    load_columns(n, x, rows, at);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i >= n) break;
        const IVEC low = scaled((VEC)((IVEC)x[i] << 16), factor, is_other);
        const IVEC high = scaled((VEC)((IVEC)x[i] & HIGH_HALF), factor, is_other);
        store(to + i * ld, (VEC)((IVEC)((WORDS)low >> 16) | (high & HIGH_HALF)));
    }
}

static uint64_t pack(void *tile, ptrdiff_t ld, const char *const *rows, ptrdiff_t n_pairs, float factor) {
    uint64_t other_lanes = 0;
    for (ptrdiff_t lane = 0; lane < ld; lane += LANES, rows += LANES) {
        float *const to = (float *)tile + lane;
        IVEC is_other = {};
        ptrdiff_t p = 0;
        for (; p + LANES <= n_pairs; p += LANES)
            pack_block(LANES, to + p * ld, ld, rows, (size_t)p * sizeof(REAL), splat(factor), &is_other);
        if (p < n_pairs)
            pack_block((int)(n_pairs - p), to + p * ld, ld, rows, (size_t)p * sizeof(REAL), splat(factor), &is_other);
        for (int i = 0; i < LANES; i++) other_lanes |= (uint64_t)(is_other[i] != 0) << (lane + i);
    }
    return other_lanes;
}

#if defined(FASTATTN_MODEL)
#include "bfloat16_model.h"
INLINE VEC add_products(VEC sum, VEC x, VEC y) {
    const model_words a = (model_words)x, b = (model_words)y;
    sum = model_multiply_add(model_high(a), model_high(b), model_flush(sum));
    return model_multiply_add(model_low(a), model_low(b), sum);
}
#else
INLINE VEC add_products(VEC sum, VEC x, VEC y) {
    return (VEC)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
}
#endif

/* Not as a float, whose bits an operation may change. */
INLINE VEC splat_pair(const char *at) {
    int32_t pair;
    memcpy(&pair, at, sizeof pair);
    return (VEC)(pair - (IVEC){});
}

#define BROADCAST(at) splat_pair(at)
#define ADD_PRODUCT(sum, x, y) add_products(sum, x, y)

/* A product takes 6 clocks, and two begin in each: 12 sums are too few to hide that, and 24 leave no registers for their
 * totals. Of longer chains fewer are stored. 8 keys by 3 vectors take 0.93 of the time of 4 by 3 with totals in
 * registers at head_dim 64, and 0.94 at 128. 2 cores of Zen 5, 2026-11-29, one thread over the kernels alone. */
#define TILE_KEYS 8
#define NARROW_KEYS TILE_KEYS
#define NARROW_VECTORS 0
#define CHAIN 32
#define SHORT_CHAIN CHAIN
#define STEPS 16
#define HAS_TOTALS 0
#define IS_UNIT(k_col) 1
#include "score.h"

/* ------------------------------------------------------------------ weights and values */

/* A pair of numbers of each lane, rounded to nearest even; denormal ones become 0 with their sign, NaN is quiet. */
#if defined(FASTATTN_MODEL)
INLINE WORDS rounded(VEC x) {
    const WORDS bits = (WORDS)x, size = bits & 0x7fffffffu;
    const WORDS is_nan = (WORDS)(size > 0x7f800000u), is_normal = (WORDS)(size >= 0x00800000u);
    const WORDS nearest = (bits + 0x7fff + (bits >> 16 & 1)) & (is_normal | 0x80000000u);
    return (is_nan & (bits | 0x00400000u)) | (~is_nan & nearest);
}
INLINE VEC pair(VEC low, VEC high) { return (VEC)((rounded(low) >> 16) | (rounded(high) & (uint32_t)HIGH_HALF)); }
#else
INLINE VEC pair(VEC low, VEC high) {
    static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    return (VEC)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), halves);
}
#endif

INLINE REAL *store_weights(REAL *to, ptrdiff_t ld, const VEC x[], ptrdiff_t n) {
#pragma GCC unroll 4
    for (ptrdiff_t i = 0; i < n; i += 2, to += ld) store(to, pair(x[i], x[i + 1]));
    return to;
}

/* 8 keys at once instead of 4 take 0.93 of its time: 2 cores of Zen 5, 2026-11-29, one thread over the kernels alone. Of
 * float32, whose weights are twice as many stores, they are no faster. */
#define SOFTMAX_GROUPS 2
#include "softmax.h"

static void pair_weights(void *tile, ptrdiff_t ld, const ptrdiff_t *stops) {
    for (ptrdiff_t lane = 0; lane < ld; lane += LANES) {
        const ptrdiff_t n_keys = *stops++;
        REAL *to = (REAL *)tile + lane;
        const REAL *p = to;
        ptrdiff_t j = 0;
        for (; j + 2 <= n_keys; j += 2, p += 2 * ld, to += ld) store(to, pair(load(p), load(p + ld)));
        if (j < n_keys) store(to, pair(load(p), (VEC){}));
    }
}

#define COLUMNS FASTATTN_PAIR_COLUMNS

/* Two rows of 32 columns or fewer, the second one possibly missing, as pairs. */
INLINE void pair_columns(char *to, const char *row, const char *next, ptrdiff_t n) {
#if defined(FASTATTN_MODEL)
    uint16_t x[COLUMNS] = {}, y[COLUMNS] = {};
    memcpy(x, row, (size_t)n * 2);
    if (next) memcpy(y, next, (size_t)n * 2);
    for (int c = 0; c < COLUMNS; c++) {
        const uint32_t word = x[c] | (uint32_t)y[c] << 16;
        memcpy(to + fastattn_pair_at(c), &word, 4);
    }
#else
    const __mmask32 columns = n >= COLUMNS ? UINT32_MAX : ((uint32_t)1 << n) - 1;
    const __m512i x = _mm512_maskz_loadu_epi16(columns, row);
    const __m512i y = next ? _mm512_maskz_loadu_epi16(columns, next) : _mm512_setzero_si512();
    _mm512_storeu_si512(to, _mm512_unpacklo_epi16(x, y));
    _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi16(x, y));
#endif
}

static void pair_values(char *to, const char *v, ptrdiff_t v_row, ptrdiff_t n_keys, ptrdiff_t value_dim) {
    for (ptrdiff_t j = 0; j < n_keys; j += 2, v += 2 * v_row)
        for (ptrdiff_t e = 0; e < value_dim; e += COLUMNS, to += 4 * COLUMNS) {
            const ptrdiff_t n = value_dim - e < COLUMNS ? value_dim - e : COLUMNS;
            pair_columns(to, v + 2 * e, j + 1 < n_keys ? v + v_row + 2 * e : NULL, n);
        }
}

#define PAIR_ROWS 8 /* columns of a register tile */
#define ACCUMULATE_TILE accumulate_pair_tile
#define COLUMN(row, r, col) ((void)(col), splat_pair((row) + fastattn_pair_at(r)))
#define CHUNK_ROWS (KEY_CHUNK / 2)
#define MOST_COLUMNS PAIR_ROWS
#include "accumulate_tile.h"

static void accumulate(void *acc, const void *p, const void *rescale, ptrdiff_t ld, int n_vectors,
                       const char *values, const ptrdiff_t *stops, ptrdiff_t first_chunk, ptrdiff_t value_dim,
                       const char *const *prefetch, ptrdiff_t n_prefetch, ptrdiff_t prefetch_nbytes) {
    const ptrdiff_t row = fastattn_pairs_nbytes(value_dim);
    ptrdiff_t pairs[BLOCK_VECTORS];
    for (int v = 0; v < n_vectors; v++) pairs[v] = (stops[v] + 1) / 2;
#define GROUP(V, unit, i)                                                                                      \
    for (ptrdiff_t e = 0, byte = 0; e < value_dim; e += PAIR_ROWS, byte += 64)                                 \
    accumulate_pair_tile(PAIR_ROWS, V, 1, (REAL *)acc + e * ld + (i)*LANES, (const REAL *)p + (i)*LANES,            \
                    rescale ? (const REAL *)rescale + (i)*LANES : NULL, ld, values + fastattn_pair_at(e),      \
                    pairs + (i), first_chunk / 2, row, 0, prefetch, byte < prefetch_nbytes ? n_prefetch : 0, byte)
    EACH_GROUP(GROUP, TILE_VECTORS, 0, 0);
#undef GROUP
}

/* ------------------------------------------------------------------ products of gradients */

static void round_numbers(char *to, const void *numbers, ptrdiff_t n) {
    const REAL *x = numbers;
    for (; n > 0; n -= LANES, x += LANES, to += 2 * LANES) {
#if defined(FASTATTN_MODEL)
        const WORDS bits = rounded(load(x)) >> 16;
        for (int i = 0; i < LANES; i++) memcpy(to + 2 * i, (const uint16_t[]){(uint16_t)bits[i]}, 2);
#else
        const __m256bh halves = _mm512_cvtneps_pbh((__m512)load(x));
        memcpy(to, &halves, sizeof halves);
#endif
    }
}

#define ACCUMULATE_TILE accumulate_word_tile
#define COLUMN(row, r, col) splat_pair((row) + (r) * (col))
#define CHUNK_ROWS (KEY_CHUNK / 2)
#define MOST_COLUMNS PAIR_ROWS
#include "accumulate_tile.h"

/* `accumulate_words` for V vectors of columns. */
INLINE void accumulate_word_group(const int V, REAL *acc, const REAL *rows, const REAL *rescale, ptrdiff_t ld,
                                  const char *words, ptrdiff_t row, ptrdiff_t col, ptrdiff_t n_pairs, ptrdiff_t n_sums) {
    ptrdiff_t stops[TILE_VECTORS];
    for (int v = 0; v < V; v++) stops[v] = n_pairs;
#define SUMS(R)                                                                                                \
    for (; n_sums >= R; n_sums -= R, acc += R * ld, words += R * col)                                          \
    accumulate_word_tile(R, V, 1, acc, rows, rescale, ld, words, stops, KEY_CHUNK / 2, row, col, NULL, 0, 0)
    SUMS(PAIR_ROWS);
    SUMS(4);
    SUMS(2);
    SUMS(1);
#undef SUMS
}

INLINE void accumulate_words_at(ptrdiff_t row, ptrdiff_t col, REAL *acc, const REAL *rows, ptrdiff_t ld, const char *words,
                                ptrdiff_t n_pairs, ptrdiff_t n_sums, int adds) {
    static const REAL ones[TILE_VECTORS * LANES] = {[0 ... TILE_VECTORS * LANES - 1] = 1};
    const int n_vectors = (int)(ld / LANES);
#define GROUP(V, unit, i)                                                                                      \
    accumulate_word_group(V, acc + (i)*LANES, rows + (i)*LANES, adds ? ones : NULL, ld, words, row, col, n_pairs, n_sums)
    EACH_GROUP(GROUP, TILE_VECTORS, 0, 0);
#undef GROUP
}

static void accumulate_words(void *acc, const void *rows, ptrdiff_t ld, const char *words, ptrdiff_t row, ptrdiff_t col,
                             ptrdiff_t n_pairs, ptrdiff_t n_sums, int adds) {
    const ptrdiff_t of_rows = 4 * FASTATTN_PAIR_LANES;
    if (row == 4 && col == of_rows / 2) /* pairs of lanes */
        accumulate_words_at(4, of_rows / 2, acc, rows, ld, words, n_pairs, n_sums, adds);
    else if (row == of_rows && col == 4) /* pairs of keys */
        accumulate_words_at(of_rows, 4, acc, rows, ld, words, n_pairs, n_sums, adds);
    else
        accumulate_words_at(row, col, acc, rows, ld, words, n_pairs, n_sums, adds);
}

/* ------------------------------------------------------------------ values as they are stored */

/* Two adjacent columns are one word: read once, and broadcast, for both. */
INLINE VEC stored_column(const char *row, int r) {
    const IVEC word = (IVEC)splat_pair(row + r / 2 * 4);
    return (VEC)(r % 2 ? word & HIGH_HALF : word << 16);
}

#undef ADD_PRODUCT
#define ADD_PRODUCT(sum, x, y) ((sum) + (x) * (y))
#define ACCUMULATE_TILE accumulate_stored_tile
#define COLUMN(row, r, col) ((void)(col), stored_column(row, r))
#define CHUNK_ROWS KEY_CHUNK
#define MOST_COLUMNS TILE_ROWS
#include "accumulate_tile.h"

INLINE void accumulate_stored_group(const int V, REAL *acc, const REAL *p, const REAL *rescale, ptrdiff_t ld,
                                    const char *values, ptrdiff_t row, const ptrdiff_t *stops, ptrdiff_t first_chunk,
                                    ptrdiff_t value_dim, const char *const *prefetch, ptrdiff_t n_prefetch,
                                    ptrdiff_t prefetch_nbytes) {
    ptrdiff_t byte = 0;
#define COLUMNS_OF(R)                                                                                          \
    for (; value_dim >= R; value_dim -= R, acc += R * ld, values += R * 2, byte += 64)                         \
    accumulate_stored_tile(R, V, 0, acc, p, rescale, ld, values, stops, first_chunk, row, 0, prefetch,         \
                           byte < prefetch_nbytes ? n_prefetch : 0, byte)
    COLUMNS_OF(TILE_ROWS);
    COLUMNS_OF(4);
    COLUMNS_OF(2);
#undef COLUMNS_OF
}

static void accumulate_stored(void *acc, const void *p, const void *rescale, ptrdiff_t ld, int n_vectors,
                              const char *values, ptrdiff_t row, const ptrdiff_t *stops, ptrdiff_t first_chunk,
                              ptrdiff_t value_dim, const char *const *prefetch, ptrdiff_t n_prefetch,
                              ptrdiff_t prefetch_nbytes) {
#define GROUP(V, unit, i)                                                                                      \
    accumulate_stored_group(V, (REAL *)acc + (i)*LANES, (const REAL *)p + (i)*LANES,                           \
                            rescale ? (const REAL *)rescale + (i)*LANES : NULL, ld, values, row, stops + (i),  \
                            first_chunk, value_dim, prefetch, n_prefetch, prefetch_nbytes)
    EACH_GROUP(GROUP, TILE_VECTORS, 0, 0);
#undef GROUP
}

const fastattn_pairs CONCAT(fastattn_pairs, FASTATTN_ISA) = {
    .pack = pack,
    .score = score,
    .softmax = softmax,
    .pair_weights = pair_weights,
    .pair_values = pair_values,
    .accumulate = accumulate,
    .accumulate_stored = accumulate_stored,
    .round_numbers = round_numbers,
    .accumulate_words = accumulate_words,
};
