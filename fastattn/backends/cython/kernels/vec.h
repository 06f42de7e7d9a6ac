/* One vector of REAL: the few operations the kernels need, in gcc/clang vector types.
 *
 * Included once per dtype by each source of kernels, after REAL, REAL_BITS and NAME() are defined. VECTOR_BYTES is the
 * register width of the ISA this object is built for. Only what compiles badly from vector types (max with a
 * known NaN rule, the test of a mask bit) has intrinsics beside the portable code.
 */

#define LANES ((int)(VECTOR_BYTES / sizeof(REAL)))
#define LINE ((int)(64 / sizeof(REAL))) /* elements of a cache line */

#if REAL_BITS == 32
typedef int32_t NAME(lane_int);
#define LANE_INT NAME(lane_int)
#define MANTISSA_BITS 23
#define EXPONENT_MIN (-126)
#else
typedef int64_t NAME(lane_int);
#define LANE_INT NAME(lane_int)
#define MANTISSA_BITS 52
#define EXPONENT_MIN (-1022)
#endif

typedef REAL NAME(vec) __attribute__((vector_size(VECTOR_BYTES)));
typedef LANE_INT NAME(ivec) __attribute__((vector_size(VECTOR_BYTES)));
/* The caller's memory has any alignment. */
typedef REAL NAME(vec_unaligned) __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));
typedef REAL NAME(real_unaligned) __attribute__((aligned(1), may_alias));
typedef uint32_t NAME(words) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

#define VEC NAME(vec)
#define IVEC NAME(ivec)

INLINE VEC NAME(load)(const void *p) { return *(const NAME(vec_unaligned) *)p; }
INLINE void NAME(store)(void *p, VEC x) { *(NAME(vec_unaligned) *)p = x; }
INLINE REAL NAME(scalar)(const char *p) { return *(const NAME(real_unaligned) *)p; }
INLINE VEC NAME(splat)(REAL x) { return x - (VEC){}; }

/* The first n lanes (0 < n <= LANES) from p, the rest 0; and back. Accesses no memory past them. */
INLINE VEC NAME(load_partial)(const void *p, int n) {
#if defined(__AVX512F__) && VECTOR_BYTES == 64 && REAL_BITS == 32
    return (VEC)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#elif defined(__AVX512F__) && VECTOR_BYTES == 64
    return (VEC)_mm512_maskz_loadu_pd((__mmask8)((1u << n) - 1), p);
#else
    VEC x = {};
    memcpy(&x, p, (size_t)n * sizeof(REAL));
    return x;
#endif
}

INLINE void NAME(store_partial)(void *p, VEC x, int n) {
#if defined(__AVX512F__) && VECTOR_BYTES == 64 && REAL_BITS == 32
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x);
#elif defined(__AVX512F__) && VECTOR_BYTES == 64
    _mm512_mask_storeu_pd(p, (__mmask8)((1u << n) - 1), (__m512d)x);
#else
    memcpy(p, &x, (size_t)n * sizeof(REAL));
#endif
}

INLINE VEC NAME(select)(IVEC mask, VEC yes, VEC no) {
    return (VEC)((mask & (IVEC)yes) | (~mask & (IVEC)no));
}

/* x * (high + low), where low is the remainder of rounding high towards 0: rounded about once where multiply-adds are
 * fused, else low is mostly lost. inf stays inf, as low has the sign of high and is 0 only where high is. 0 and -0
 * both give +0: for that 0 is added, which makes a fused multiply-add of the product x * low. */
INLINE VEC NAME(multiply_exactly)(VEC x, VEC high, VEC low) { return x * high + (x * low + 0); }

/* 0 in the lanes of x that are finite, some other bits in those that are not. */
INLINE IVEC NAME(nonfinite)(VEC x) { return (IVEC)(x - x); }

/* A finite x that is not 0, rounded towards 0 by one unit in the last place. */
INLINE REAL NAME(towards_zero)(REAL x) {
    LANE_INT bits;
    memcpy(&bits, &x, sizeof x);
    bits--;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Times `high` it is the `low` of `multiply_exactly` where the remainder is 0: too small to change a result. */
static const REAL NAME(no_low) = (REAL)(REAL_BITS == 32 ? 0x1p-60 : 0x1p-118);

/* 1 - a * b, rounded once: exact where a is the rounded 1 / b. */
INLINE VEC NAME(one_minus_product)(VEC a, VEC b) {
#if defined(__AVX512F__) && VECTOR_BYTES == 64
#if REAL_BITS == 32
    return (VEC)_mm512_fnmadd_ps((__m512)a, (__m512)b, _mm512_set1_ps(1));
#else
    return (VEC)_mm512_fnmadd_pd((__m512d)a, (__m512d)b, _mm512_set1_pd(1));
#endif
#else
    for (int i = 0; i < LANES; i++) a[i] = REAL_BITS == 32 ? fmaf(-(float)a[i], (float)b[i], 1) : fma(-a[i], b[i], 1);
    return a;
#endif
}

/* max(a, b) and min(a, b) lane by lane; b where either is NaN. */
#if defined(__AVX512F__) && VECTOR_BYTES == 64 && REAL_BITS == 32
#define EXTREME(which, a, b, compare) (VEC) _mm512_##which##_ps((__m512)(a), (__m512)(b))
#elif defined(__AVX512F__) && VECTOR_BYTES == 64
#define EXTREME(which, a, b, compare) (VEC) _mm512_##which##_pd((__m512d)(a), (__m512d)(b))
#elif defined(__AVX2__) && VECTOR_BYTES == 32 && REAL_BITS == 32
#define EXTREME(which, a, b, compare) (VEC) _mm256_##which##_ps((__m256)(a), (__m256)(b))
#elif defined(__AVX2__) && VECTOR_BYTES == 32
#define EXTREME(which, a, b, compare) (VEC) _mm256_##which##_pd((__m256d)(a), (__m256d)(b))
#else
#define EXTREME(which, a, b, compare) NAME(select)((IVEC)((a)compare(b)), a, b)
#endif
INLINE VEC NAME(max)(VEC a, VEC b) { return EXTREME(max, a, b, >); }
INLINE VEC NAME(min)(VEC a, VEC b) { return EXTREME(min, a, b, <); }
#undef EXTREME

/* x where the lowest bit of the lane's word is set, `other` elsewhere. */
INLINE VEC NAME(select_by_bit)(IVEC words, VEC x, VEC other) {
#if defined(__AVX512F__) && VECTOR_BYTES == 64
#if REAL_BITS == 32
    const __mmask16 is_set = _mm512_test_epi32_mask((__m512i)words, _mm512_set1_epi32(1));
    return (VEC)_mm512_mask_mov_ps((__m512)other, is_set, (__m512)x);
#else
    const __mmask8 is_set = _mm512_test_epi64_mask((__m512i)words, _mm512_set1_epi64(1));
    return (VEC)_mm512_mask_mov_pd((__m512d)other, is_set, (__m512d)x);
#endif
#else
    return NAME(select)((IVEC)((words & 1) != 0), x, other);
#endif
}

/* The words of LANES rows, one a lane; bits above 32 are 0. */
INLINE IVEC NAME(load_words)(const uint32_t *p) {
#if REAL_BITS == 32
    return (IVEC)*(const NAME(words) *)p;
#else
    return __builtin_convertvector(*(const NAME(words) *)p, IVEC);
#endif
}

/* 2 (2^f - 1) / f on [-1/2, 1/2] as a polynomial; minimax in the relative error of 2^f (Lawson iteration at
 * 40 digits): 2.0e-9 for float32, 3.4e-18 for float64, so the rest of the error is rounding. */
#if REAL_BITS == 32
#define EXP2_DEGREE 5
static const REAL NAME(exp2_coefficients)[] = {
    1.386294405711940786f,    0.4804529582699803028f,  0.11100664939387825982f,
    0.019236874732831904476f, 0.002679774973317259018f, 0.0003070672126048424178f};
#else
#define EXP2_DEGREE 10
static const REAL NAME(exp2_coefficients)[] = {
    1.3862943611198906516,    0.4804530139182026252,    0.11100821732964016804,   0.019236258215188238088,
    0.002666711629354889396,  0.0003080706091422534998, 0.000030505466986563373,  0.000002643087056470190644,
    2.035639902501223256e-7,  1.4147566389765493892e-8, 8.869559076315603354e-10};
#endif

/* Splits each factor * x, x <= 0 < factor, into n + f with |f| <= 1/2: x becomes f, and half_power becomes 2^(n-1),
 * exactly 0 where 2^(factor * x) would be below 2^(EXPONENT_MIN + 1/2): -inf gives 0, and no denormal is ever made.
 * NaN gives f = NaN. Not `scaled`: factor is 1. */
INLINE void NAME(split_exponent)(const int n, const int scaled, REAL factor, VEC x[], VEC half_power[]) {
    const REAL round = (REAL)1.5 * (REAL)((LANE_INT)1 << MANTISSA_BITS) - EXPONENT_MIN;
    const VEC lowest = NAME(splat)(scaled ? EXPONENT_MIN / factor : EXPONENT_MIN);
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) x[i] = NAME(max)(lowest, x[i]);
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) half_power[i] = scaled ? x[i] * factor + round : x[i] + round;
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) x[i] = (scaled ? x[i] * factor : x[i]) - (half_power[i] - round);
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) half_power[i] = (VEC)((IVEC)half_power[i] << MANTISSA_BITS);
}

/* y = 2 (2^f - 1) / f, |f| <= 1/2. */
INLINE void NAME(twice_exp2m1_over_f)(const int n, const VEC f[], VEC y[]) {
    const REAL *const c = NAME(exp2_coefficients);
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) y[i] = f[i] * c[EXP2_DEGREE] + c[EXP2_DEGREE - 1];
#pragma GCC unroll 16
    for (int power = EXP2_DEGREE - 2; power >= 0; power--)
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) y[i] = y[i] * f[i] + c[power];
}

/* Each x <= 0 becomes 2^(factor * x), about 1 ULP of what factor * x rounds to; 0 for -inf, NaN for NaN, exactly 1
 * for 0. */
INLINE void NAME(exp2)(const int n, const int scaled, REAL factor, VEC x[]) {
    VEC half_power[8], y[8];
    NAME(split_exponent)(n, scaled, factor, x, half_power);
    NAME(twice_exp2m1_over_f)(n, x, y);
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) y[i] = y[i] * x[i] + 2;
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) x[i] = y[i] * half_power[i];
}

/* tanh(x), a few ULP relative for small x too: with e = exp(-2|x|) - 1, tanh|x| = -e / (2 + e). */
INLINE VEC NAME(tanh)(VEC x) {
    const IVEC sign = (IVEC)x & (IVEC)NAME(splat)(-(REAL)0);
    VEC f = (VEC)((IVEC)x ^ sign) * (REAL)(-2 * LOG2E), half_power, y;
    NAME(split_exponent)(1, 0, 1, &f, &half_power);
    NAME(twice_exp2m1_over_f)(1, &f, &y);
    const VEC e = half_power * (f * y) + (2 * half_power - 1);
    return (VEC)((IVEC)(-e / (2 + e)) ^ sign);
}

/* Lane i of the pair (a, b) after its off-diagonal blocks of `half` lanes are swapped. */
#define SWAP_LOW(i, half) ((i) & (half) ? LANES + (i) - (half) : (i))
#define SWAP_HIGH(i, half) ((i) & (half) ? LANES + (i) : (i) + (half))
#if VECTOR_BYTES * 8 / REAL_BITS == 2
#define EACH_LANE(M, h) M(0, h), M(1, h)
#elif VECTOR_BYTES * 8 / REAL_BITS == 4
#define EACH_LANE(M, h) M(0, h), M(1, h), M(2, h), M(3, h)
#elif VECTOR_BYTES * 8 / REAL_BITS == 8
#define EACH_LANE(M, h) M(0, h), M(1, h), M(2, h), M(3, h), M(4, h), M(5, h), M(6, h), M(7, h)
#else
#define EACH_LANE(M, h)                                                                                        \
    M(0, h), M(1, h), M(2, h), M(3, h), M(4, h), M(5, h), M(6, h), M(7, h), M(8, h), M(9, h), M(10, h),        \
        M(11, h), M(12, h), M(13, h), M(14, h), M(15, h)
#endif
#define SWAP_BLOCKS(x, half)                                                                                   \
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) {                                                 \
        if (i & (half)) continue;                                                                              \
        const VEC a = x[i], b = x[i + (half)];                                                                 \
        x[i] = SHUFFLE(IVEC, a, b, EACH_LANE(SWAP_LOW, half));                                                 \
        x[i + (half)] = SHUFFLE(IVEC, a, b, EACH_LANE(SWAP_HIGH, half));                                       \
    }

/* Rows to columns: the LANES x LANES block in x, in log2(LANES) rounds of swapping off-diagonal blocks. */
INLINE void NAME(transpose)(VEC x[LANES]) {
#if VECTOR_BYTES * 8 / REAL_BITS >= 16
    SWAP_BLOCKS(x, 8)
#endif
#if VECTOR_BYTES * 8 / REAL_BITS >= 8
    SWAP_BLOCKS(x, 4)
#endif
#if VECTOR_BYTES * 8 / REAL_BITS >= 4
    SWAP_BLOCKS(x, 2)
#endif
    SWAP_BLOCKS(x, 1)
}

/* Columns of n <= LANES elements of LANES rows, from the byte `at` of each on. */
INLINE void NAME(load_columns)(const int n, VEC x[LANES], const char *const *rows, size_t at) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        x[i] = n == LANES ? NAME(load)(rows[i] + at) : NAME(load_partial)(rows[i] + at, n);
    NAME(transpose)(x);
}
