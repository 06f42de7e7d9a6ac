/* One vector of REAL: the few operations the kernels need, in gcc/clang vector types.
 *
 * VECTOR_BYTES and REAL_BITS say for which ISA and dtype an object is built. Only what compiles badly from vector
 * types (max with a known NaN rule, the test of a mask bit) has intrinsics beside the portable code.
 */

#if REAL_BITS == 32
typedef float REAL;
typedef int32_t LANE_INT;
#else
typedef double REAL;
typedef int64_t LANE_INT;
#endif

#define LANES ((int)(VECTOR_BYTES / sizeof(REAL)))
#define LINE ((int)(64 / sizeof(REAL))) /* elements of a cache line */

typedef REAL VEC __attribute__((vector_size(VECTOR_BYTES)));
typedef LANE_INT IVEC __attribute__((vector_size(VECTOR_BYTES)));
/* The caller's memory has any alignment. */
typedef REAL vec_unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));
typedef REAL real_unaligned __attribute__((aligned(1), may_alias));
typedef uint32_t WORDS __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

/* The intrinsics of AVX-512 and AVX2 for vectors of REAL, and the type of their operands. */
#if REAL_BITS == 32
#define OF_DTYPE(name) name##_ps
#define LANE_MASK __mmask16
#define TEST_BITS _mm512_test_epi32_mask
#else
#define OF_DTYPE(name) name##_pd
#define LANE_MASK __mmask8
#define TEST_BITS _mm512_test_epi64_mask
#endif
#if defined(__AVX512F__) && VECTOR_BYTES == 64
#define HAS_LANE_MASKS 1
#define INTRINSIC(name) OF_DTYPE(_mm512_##name)
typedef __typeof__(INTRINSIC(setzero)()) REGISTER;
#elif defined(__AVX2__) && VECTOR_BYTES == 32
#define INTRINSIC(name) OF_DTYPE(_mm256_##name)
typedef __typeof__(INTRINSIC(setzero)()) REGISTER;
#endif

INLINE VEC load(const void *p) { return *(const vec_unaligned *)p; }
INLINE void store(void *p, VEC x) { *(vec_unaligned *)p = x; }
INLINE REAL scalar(const char *p) { return *(const real_unaligned *)p; }
INLINE VEC splat(REAL x) { return x - (VEC){}; }

/* The next operation takes x as it is, and does not fuse with the multiplication before it. */
INLINE VEC round_product(VEC x) {
#if defined(__AVX512F__) || (defined(__FMA__) && VECTOR_BYTES <= 32)
    __asm__("" : "+v"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#elif !defined(__x86_64__) || defined(__FMA__) /* a model's vectors are wider than registers */
    __asm__("" : "+m"(x));
#endif
    return x;
}

/* The first n lanes (0 < n <= LANES) from p, the rest 0; and back. Accesses no memory past them. */
INLINE VEC load_partial(const void *p, int n) {
#if HAS_LANE_MASKS
    return (VEC)INTRINSIC(maskz_loadu)((LANE_MASK)((1u << n) - 1), p);
#else
    VEC x = {};
    memcpy(&x, p, (size_t)n * sizeof(REAL));
    return x;
#endif
}

INLINE void store_partial(void *p, VEC x, int n) {
#if HAS_LANE_MASKS
    INTRINSIC(mask_storeu)(p, (LANE_MASK)((1u << n) - 1), (REGISTER)x);
#else
    memcpy(p, &x, (size_t)n * sizeof(REAL));
#endif
}

INLINE VEC select_lanes(IVEC mask, VEC yes, VEC no) {
    return (VEC)((mask & (IVEC)yes) | (~mask & (IVEC)no));
}

/* x * (high + low), where low is the remainder of rounding high towards 0: rounded about once where multiply-adds are
 * fused, else low is mostly lost. inf stays inf, as low has the sign of high and is 0 only where high is. 0 and -0
 * both give +0: for that 0 is added, which makes a fused multiply-add of the product x * low. */
INLINE VEC multiply_exactly(VEC x, VEC high, VEC low) { return x * high + (x * low + 0); }

/* 0 in the lanes of x that are finite, some other bits in those that are not. */
INLINE IVEC nonfinite_lanes(VEC x) { return (IVEC)(x - x); }

INLINE int any_lane(IVEC x) {
    LANE_INT any = 0;
    for (int i = 0; i < LANES; i++) any |= x[i];
    return any != 0;
}

/* A finite x that is not 0, rounded towards 0 by one unit in the last place. */
INLINE REAL towards_zero(REAL x) {
    LANE_INT bits;
    memcpy(&bits, &x, sizeof x);
    bits--;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Times `high` it is the `low` of `multiply_exactly` where the remainder is 0: too small to change a result. */
static const REAL no_low = (REAL)(REAL_BITS == 32 ? 0x1p-60 : 0x1p-118);

/* 1 - a * b, rounded once: exact where a is the rounded 1 / b. */
INLINE VEC one_minus_product(VEC a, VEC b) {
#if HAS_LANE_MASKS
    return (VEC)INTRINSIC(fnmadd)((REGISTER)a, (REGISTER)b, INTRINSIC(set1)(1));
#else
    for (int i = 0; i < LANES; i++) a[i] = REAL_BITS == 32 ? fmaf(-(float)a[i], (float)b[i], 1) : fma(-a[i], b[i], 1);
    return a;
#endif
}

/* max(a, b) and min(a, b) lane by lane; b where either is NaN. */
#if defined(INTRINSIC)
#define EXTREME(which, a, b, compare) (VEC) INTRINSIC(which)((REGISTER)(a), (REGISTER)(b))
#else
#define EXTREME(which, a, b, compare) select_lanes((IVEC)((a)compare(b)), a, b)
#endif
INLINE VEC max(VEC a, VEC b) { return EXTREME(max, a, b, >); }
INLINE VEC min(VEC a, VEC b) { return EXTREME(min, a, b, <); }
#undef EXTREME

/* x where the lowest bit of the lane's word is set, `other` elsewhere. */
INLINE VEC select_by_bit(IVEC words, VEC x, VEC other) {
#if HAS_LANE_MASKS
    const LANE_MASK is_set = TEST_BITS((__m512i)words, (__m512i)((IVEC){} + 1));
    return (VEC)INTRINSIC(mask_mov)((REGISTER)other, is_set, (REGISTER)x);
#else
    return select_lanes((IVEC)((words & 1) != 0), x, other);
#endif
}

/* The words of LANES rows, one a lane; bits above 32 are 0. */
INLINE IVEC load_words(const uint32_t *p) {
#if REAL_BITS == 32
    return (IVEC)*(const WORDS *)p;
#else
    return __builtin_convertvector(*(const WORDS *)p, IVEC);
#endif
}

/* 2 (2^f - 1) / f on [-1/2, 1/2] as a polynomial, see _machine/constants.py. */
static const REAL exp2_coefficients[] = {EXP2_COEFFICIENTS};
#define EXP2_DEGREE ((int)(sizeof exp2_coefficients / sizeof(REAL)) - 1)

/* Splits each factor * x, x <= 0 < factor, into n + f with |f| <= 1/2: x becomes f, and half_power becomes 2^(n-1),
 * exactly 0 where 2^(factor * x) would be below 2^(EXPONENT_MIN + 1/2): -inf gives 0, and no denormal is ever made.
 * NaN gives f = NaN. Not `scaled`: factor is 1. */
INLINE void split_exponent(const int n, const int scaled, REAL factor, VEC x[], VEC half_power[]) {
    const REAL round = (REAL)1.5 * (REAL)((LANE_INT)1 << MANTISSA_BITS) - EXPONENT_MIN;
    const VEC lowest = splat(scaled ? EXPONENT_MIN / factor : EXPONENT_MIN);
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) x[i] = max(lowest, x[i]);
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) half_power[i] = scaled ? x[i] * factor + round : x[i] + round;
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) x[i] = (scaled ? x[i] * factor : x[i]) - (half_power[i] - round);
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) half_power[i] = (VEC)((IVEC)half_power[i] << MANTISSA_BITS);
}

/* y = 2 (2^f - 1) / f, |f| <= 1/2. */
INLINE void twice_exp2m1_over_f(const int n, const VEC f[], VEC y[]) {
    const REAL *const c = exp2_coefficients;
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) y[i] = f[i] * c[EXP2_DEGREE] + c[EXP2_DEGREE - 1];
#pragma GCC unroll 16
    for (int power = EXP2_DEGREE - 2; power >= 0; power--)
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) y[i] = y[i] * f[i] + c[power];
}

/* Each x <= 0 becomes 2^(factor * x), about 1 ULP of what factor * x rounds to; 0 for -inf, NaN for NaN, exactly 1
 * for 0. */
INLINE void exp2_vectors(const int n, const int scaled, REAL factor, VEC x[]) {
    VEC half_power[8], y[8];
    split_exponent(n, scaled, factor, x, half_power);
    twice_exp2m1_over_f(n, x, y);
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) y[i] = y[i] * x[i] + 2;
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) x[i] = y[i] * half_power[i];
}

/* tanh(x), a few ULP relative for small x too: with e = exp(-2|x|) - 1, tanh|x| = -e / (2 + e). */
INLINE VEC tanh_vector(VEC x) {
    const IVEC sign = (IVEC)x & (IVEC)splat(-(REAL)0);
    VEC f = (VEC)((IVEC)x ^ sign) * (REAL)(-2 * LOG2E), half_power, y;
    split_exponent(1, 0, 1, &f, &half_power);
    twice_exp2m1_over_f(1, &f, &y);
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
INLINE void transpose(VEC x[LANES]) {
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
INLINE void load_columns(const int n, VEC x[LANES], const char *const *rows, size_t at) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        x[i] = n == LANES ? load(rows[i] + at) : load_partial(rows[i] + at, n);
    transpose(x);
}
