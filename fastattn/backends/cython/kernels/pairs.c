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

#define SCORE_STEP(sum)                                                                                        \
    do {                                                                                                       \
        VEC x[SCORE_VECTORS];                                                                                  \
        _Pragma("GCC unroll 8") for (int v = 0; v < V; v++) x[v] = load(q + v * LANES);                        \
        _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {                                                  \
            const VEC y = splat_pair(k + r * k_row);                                                           \
            _Pragma("GCC unroll 8") for (int v = 0; v < V; v++)(sum)[r][v] = add_products((sum)[r][v], x[v], y); \
        }                                                                                                      \
    } while (0)
#include "score.h"

const fastattn_pairs CONCAT(fastattn_pairs, FASTATTN_ISA) = {.pack = pack, .score = score};
