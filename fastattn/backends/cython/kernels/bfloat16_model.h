/* C models of instructions that multiply bfloat16 numbers, with the bits of the hardware: what their arithmetic has in
 * common, on vectors of AVX2. */
#ifndef FASTATTN_BFLOAT16_MODEL_H
#define FASTATTN_BFLOAT16_MODEL_H

#include <stdint.h>

#if defined(__FMA__)
#include <immintrin.h>
#endif

#define MODEL_LANES 8
typedef float model_row __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t model_words __attribute__((vector_size(32), aligned(4), may_alias));

static inline model_row model_fma(model_row x, model_row y, model_row sum) {
#if defined(__FMA__)
    return (model_row)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
#else
    for (int n = 0; n < MODEL_LANES; n++) sum[n] = __builtin_fmaf(x[n], y[n], sum[n]);
    return sum;
#endif
}

/* Denormal operands, products and sums are 0; inf and NaN stay as they are. */
static inline model_row model_flush(model_row x) {
    const model_words bits = (model_words)x, is_normal = (model_words)((bits & 0x7f800000u) != 0);
    return (model_row)(bits & (is_normal | 0x80000000u));
}

/* x * y + sum, rounded once, and 0 where it would be denormal if exponents had no end: what rounds to 24 bits below
 * 2^-126 is 0, also where its nearest float32 is 2^-126. That is decided at 2^64 times the number, where there are no
 * denormal numbers; what overflows there is not small. */
static inline model_row model_multiply_add(model_row x, model_row y, model_row sum) {
    const model_row scaled = model_fma(x * 0x1p64f, y, sum * 0x1p64f);
    const model_words is_normal = (model_words)(((model_words)scaled & 0x7fffffffu) >= 0x20800000u); /* 2^(64 - 126) */
    return (model_row)((model_words)model_fma(x, y, sum) & (is_normal | 0x80000000u));
}

/* Of each word, the number in its lower half, and that in its upper one. */
static inline model_row model_low(model_words x) { return model_flush((model_row)(x << 16)); }
static inline model_row model_high(model_words x) { return model_flush((model_row)(x & 0xffff0000u)); }

#endif
