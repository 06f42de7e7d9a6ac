/* How a row's elements are stored in the caller's memory: as REAL, in a 16-bit type that is converted where it is loaded
 * and stored, or in int8 with scales, which is only loaded. `storage` is a constant in all functions that are inlined.
 *
 * Integers tell NaN, inf and subnormals apart, and no result here depends on a sum or a product of subnormals: threads
 * whose FPU flushes those to 0 convert exactly, too. */

/* DO for REAL and, in kernels of float, for those of SET as well. */
#if REAL_BITS == 32
#define EACH_READ(SET, DO) DO(real, FASTATTN_REAL) SET(DO)
#else
#define EACH_READ(SET, DO) DO(real, FASTATTN_REAL)
#endif

#define REAL_BIAS (1 - EXPONENT_MIN)
#define STORED_SIZE(storage) STORED_SIZE_OF(storage, sizeof(REAL))
#define STORED_LINE(storage) (64 / STORED_SIZE(storage)) /* elements of a cache line */
#define STORED_MANTISSA(storage) ((storage) == FASTATTN_FLOAT16 ? 10 : 7)
#define STORED_BIAS(storage) ((storage) == FASTATTN_FLOAT16 ? 15 : 127)

typedef uint16_t HALVES __attribute__((vector_size(LANES * 2)));
typedef int8_t BYTES __attribute__((vector_size(LANES)));
typedef int8_t bytes_unaligned __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint16_t halves_unaligned __attribute__((vector_size(LANES * 2), aligned(1), may_alias));

INLINE VEC power_of_two(int exponent) {
    return (VEC)((IVEC){} + ((LANE_INT)(exponent + REAL_BIAS) << MANTISSA_BITS));
}

INLINE IVEC select_bits(IVEC mask, IVEC yes, IVEC no) { return (mask & yes) | (~mask & no); }

/* Each as an integer of the size of REAL. gcc 12 converts vectors half by half. */
INLINE IVEC widen_bits(HALVES x) {
#if defined(__AVX512F__) && VECTOR_BYTES == 64 && REAL_BITS == 32
    return (IVEC)_mm512_cvtepu16_epi32((__m256i)x);
#else
    return __builtin_convertvector(x, IVEC);
#endif
}

/* The numbers of 16-bit elements. */
INLINE VEC widen(const int storage, HALVES x) {
#if defined(__AVX512F__) && VECTOR_BYTES == 64 && REAL_BITS == 32
    if (storage == FASTATTN_FLOAT16) return (VEC)_mm512_cvtph_ps((__m256i)x);
#elif defined(__AVX2__) && VECTOR_BYTES == 32 && REAL_BITS == 32
    if (storage == FASTATTN_FLOAT16) return (VEC)_mm256_cvtph_ps((__m128i)x);
    /* A broadcast load and a shuffle: `score_rows` and `accumulate_rows` of 1 to 16 rows take 0.83 to 0.9 of the time
     * that they take with a conversion and a shift. 2 cores of Cascade Lake, 2026-11-23, keys in the cache, one thread
     * over the kernels alone, interleaved A/B. */
    const __m256i upper = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,
                                           -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
    return (VEC)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256((__m128i)x), upper);
#elif defined(__aarch64__) && REAL_BITS == 32
    if (storage == FASTATTN_FLOAT16) return (VEC)vcvt_f32_f16((float16x4_t)x);
#endif
    const int mantissa = STORED_MANTISSA(storage), shift = MANTISSA_BITS - mantissa;
    const LANE_INT rebias = (LANE_INT)(REAL_BIAS - STORED_BIAS(storage)) << MANTISSA_BITS;
    const IVEC bits = widen_bits(x);
    if (rebias == 0) return (VEC)(bits << shift); /* REAL has the same exponents */
    const IVEC sign = (bits & 0x8000) << (REAL_BITS - 16), magnitude = bits & 0x7fff;
    const IVEC is_subnormal = (IVEC)(magnitude < 1 << mantissa);
    const IVEC is_nonfinite = (IVEC)(magnitude >= 0x8000 - (1 << mantissa));
    /* The exponents of inf and NaN are all ones in both types. */
    const IVEC normal = (magnitude << shift) + rebias + (is_nonfinite & rebias);
    /* A multiple of the smallest subnormal: as an integer in the last places of 2^MANTISSA_BITS, less that. */
    const VEC one = power_of_two(MANTISSA_BITS);
    const VEC subnormal = ((VEC)((IVEC)one | magnitude) - one) * power_of_two(1 - STORED_BIAS(storage) - mantissa);
    return (VEC)(sign | select_bits(is_subnormal, (IVEC)subnormal, normal));
}

/* Each x rounded once, to the nearest, to even between two. */
INLINE HALVES narrow(const int storage, VEC x) {
#if defined(__AVX512F__) && VECTOR_BYTES == 64 && REAL_BITS == 32
    if (storage == FASTATTN_FLOAT16)
        return (HALVES)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__) && VECTOR_BYTES == 32 && REAL_BITS == 32
    if (storage == FASTATTN_FLOAT16)
        return (HALVES)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__) && REAL_BITS == 32
    if (storage == FASTATTN_FLOAT16) return (HALVES)vcvt_f16_f32((float32x4_t)x);
#endif
    const int mantissa = STORED_MANTISSA(storage), shift = MANTISSA_BITS - mantissa;
    const LANE_INT infinity = 0x8000 - (1 << mantissa), real_infinity = (LANE_INT)(2 * REAL_BIAS + 1) << MANTISSA_BITS;
    const LANE_INT rebias = (LANE_INT)(REAL_BIAS - STORED_BIAS(storage)) << MANTISSA_BITS;
    const IVEC sign = (IVEC)x >> (REAL_BITS - 16) & 0x8000, bits = (IVEC)x & ~(IVEC)splat(-(REAL)0);
    const IVEC is_nan = (IVEC)(bits > real_infinity), magnitude = bits & ~is_nan, rebiased = magnitude - rebias;
    /* The carry of a rounded mantissa goes to the exponent, up to infinity. */
    IVEC rounded = (rebiased + (((LANE_INT)1 << (shift - 1)) - 1) + (rebiased >> shift & 1)) >> shift;
    rounded = select_bits((IVEC)(rounded > infinity), infinity + (IVEC){}, rounded);
    if (rebias != 0) {
        /* The last place of this power of two is the smallest subnormal: the sum is rounded to a multiple of it. */
        const VEC power = power_of_two(1 - STORED_BIAS(storage) - mantissa + MANTISSA_BITS);
        const IVEC subnormal = (IVEC)((VEC)magnitude + power) - (IVEC)power;
        const IVEC is_subnormal = (IVEC)(magnitude < (IVEC)power_of_two(1 - STORED_BIAS(storage)));
        rounded = select_bits(is_subnormal, subnormal, rounded);
    }
    /* A quiet NaN with the first bits of its payload. */
    const IVEC nan = infinity | (LANE_INT)1 << (mantissa - 1) | (bits >> shift & (((LANE_INT)1 << mantissa) - 1));
    rounded = select_bits(is_nan, nan, rounded);
    return __builtin_convertvector(sign | rounded, HALVES);
}

/* The integers, without their scale. */
INLINE VEC widen_bytes(BYTES x) {
#if defined(__AVX512F__) && VECTOR_BYTES == 64 && REAL_BITS == 32
    return (VEC)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x));
#elif defined(__AVX2__) && VECTOR_BYTES == 32 && REAL_BITS == 32
    return (VEC)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)x)));
#else
    return __builtin_convertvector(x, VEC);
#endif
}

INLINE VEC load_stored(const int storage, const void *p) {
    if (storage == FASTATTN_REAL) return load(p);
    if (storage == FASTATTN_INT8) return widen_bytes(*(const bytes_unaligned *)p);
    return widen(storage, *(const halves_unaligned *)p);
}

/* As `load_partial`. */
INLINE VEC load_stored_partial(const int storage, const void *p, int n) {
    if (storage == FASTATTN_REAL) return load_partial(p, n);
    if (storage == FASTATTN_INT8) {
        BYTES x = {};
        memcpy(&x, p, (size_t)n);
        return widen_bytes(x);
    }
#if defined(__AVX512F__) && VECTOR_BYTES == 64 && REAL_BITS == 32
    const HALVES x = (HALVES)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p);
#else
    HALVES x = {};
    memcpy(&x, p, (size_t)n * 2);
#endif
    return widen(storage, x);
}

/* The first LANES of the n elements at p. */
INLINE VEC load_upto(const int storage, const void *p, ptrdiff_t n) {
    return n >= LANES ? load_stored(storage, p) : load_stored_partial(storage, p, (int)n);
}

/* The first LANES of n elements to p. */
INLINE void store_upto(const int storage, void *p, VEC x, ptrdiff_t n) {
    if (storage == FASTATTN_REAL) {
        if (n >= LANES)
            store(p, x);
        else
            store_partial(p, x, (int)n);
    } else {
        const HALVES halves = narrow(storage, x);
        if (n >= LANES)
            memcpy(p, &halves, sizeof halves);
        else
            memcpy(p, &halves, (size_t)n * 2);
    }
}

/* The elements d .. d + n - 1 of a row, n <= LANES, as numbers; `scale`: the row's scales, of int8. */
INLINE VEC load_elements(const int storage, const char *row, const char *scale, ptrdiff_t d, const int n) {
    const char *const at = row + d * STORED_SIZE(storage);
    const VEC x = n < LANES ? load_stored_partial(storage, at, n) : load_stored(storage, at);
    return storage == FASTATTN_INT8 ? x * splat((REAL)load_float(scale + d / FASTATTN_GROUP * 4)) : x;
}

/* A row of int8: each product with a scale is rounded to float32, whatever REAL is. */
static void load_row_int8(REAL *to, const char *from, ptrdiff_t stride, ptrdiff_t n, const char *scale,
                          ptrdiff_t scale_stride) {
    for (ptrdiff_t start = 0; start < n; start += FASTATTN_GROUP, scale += scale_stride) {
        const ptrdiff_t stop = n - start < FASTATTN_GROUP ? n : start + FASTATTN_GROUP;
        const float factor = load_float(scale);
        ptrdiff_t c = start;
        if (stride == 1 && REAL_BITS == 32)
            for (; c + LANES <= stop; c += LANES)
                store(to + c, load_stored(FASTATTN_INT8, from + c) * splat((REAL)factor));
        for (; c < stop; c++) to[c] = (REAL)(float)((float)*(const int8_t *)(from + c * stride) * factor);
    }
}

INLINE void load_row_stored(const int storage, REAL *to, const char *from, ptrdiff_t stride, ptrdiff_t n,
                            int swapped) {
    const ptrdiff_t nbytes = STORED_SIZE(storage);
    for (ptrdiff_t c = 0; c < n; c += LANES) {
        const int count = n - c < LANES ? (int)(n - c) : LANES;
        char elements[VECTOR_BYTES];
        const char *at = from + c * stride;
        if (stride != nbytes || swapped) at = gather_elements(elements, at, stride, (int)nbytes, count, swapped);
        const VEC x = load_upto(storage, at, count);
        store_upto(FASTATTN_REAL, to + c, x, count);
    }
}

static void load_row(void *to, const char *from, ptrdiff_t stride, ptrdiff_t n, int storage, int swapped,
                     const char *scale, ptrdiff_t scale_stride) {
    if (storage == FASTATTN_INT8)
        load_row_int8(to, from, stride, n, scale, scale_stride);
    else if (storage == FASTATTN_REAL)
        load_row_stored(FASTATTN_REAL, to, from, stride, n, swapped);
    else if (storage == FASTATTN_FLOAT16)
        load_row_stored(FASTATTN_FLOAT16, to, from, stride, n, swapped);
    else
        load_row_stored(FASTATTN_BFLOAT16, to, from, stride, n, swapped);
}

INLINE void store_row_stored(const int storage, char *to, ptrdiff_t stride, const REAL *from, ptrdiff_t n) {
    const ptrdiff_t nbytes = STORED_SIZE(storage);
    for (ptrdiff_t c = 0; c < n; c += LANES, to += LANES * stride) {
        const int count = n - c < LANES ? (int)(n - c) : LANES;
        const VEC x = load_upto(FASTATTN_REAL, from + c, n - c);
        char stored[VECTOR_BYTES];
        if (storage == FASTATTN_REAL) {
            store(stored, x);
        } else {
            const HALVES halves = narrow(storage, x);
            memcpy(stored, &halves, sizeof halves);
        }
        if (stride == nbytes && count == LANES)
            memcpy(to, stored, (size_t)(LANES * nbytes));
        else
            for (int i = 0; i < count; i++) memcpy(to + i * stride, stored + i * nbytes, (size_t)nbytes);
    }
}

static void store_row(char *to, ptrdiff_t stride, const void *from, ptrdiff_t n, int storage) {
    if (storage == FASTATTN_REAL)
        store_row_stored(FASTATTN_REAL, to, stride, from, n);
    else if (storage == FASTATTN_FLOAT16)
        store_row_stored(FASTATTN_FLOAT16, to, stride, from, n);
    else
        store_row_stored(FASTATTN_BFLOAT16, to, stride, from, n);
}

static void limit_row(void *row, ptrdiff_t n) {
    const VEC most = splat((REAL)0x1.fep127);
    REAL *at = row;
    for (; n > 0; n -= LANES, at += LANES) {
        const int count = n < LANES ? (int)n : LANES;
        const VEC x = count == LANES ? load(at) : load_partial(at, count);
        store_partial(at, select_lanes((IVEC)(nonfinite_lanes(x) == 0), max(-most, min(most, x)), x), count);
    }
}
