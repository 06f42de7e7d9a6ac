/* Which weights dropout keeps; see kernels.h, "draw_words". Philox4x64-10 (Salmon, Moraes, Dror and Shaw, "Parallel random
 * numbers: as easy as 1, 2, 3", SC 2011) with a row in each lane of 64 bits. Included by kernels.c only. */

#ifdef __SSE2__
#include <emmintrin.h>
#endif

typedef uint64_t wide __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t quarters __attribute__((vector_size(VECTOR_BYTES)));

#define WIDE_LANES (VECTOR_BYTES / 8)
typedef uint32_t wide_words __attribute__((vector_size(WIDE_LANES * 4), aligned(4), may_alias));

/* The products of the lower halves. */
INLINE wide multiply_halves(wide a, wide b) {
#if defined(__AVX512F__)
    return (wide)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (wide)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (wide)_mm_mul_epu32((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
    return (wide)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
    return (a & 0xffffffff) * (b & 0xffffffff);
#endif
}

/* The upper half of a * b; the lower one to *low. */
INLINE wide multiply_wide(wide a, uint64_t b, wide *low) {
    const wide b_low = (b & 0xffffffff) - (wide){}, b_high = (b >> 32) - (wide){}, a_high = a >> 32;
    const wide low_low = multiply_halves(a, b_low);
    const wide middle = multiply_halves(a_high, b_low) + (low_low >> 32);
    const wide other = multiply_halves(a, b_high) + (middle & 0xffffffff);
    *low = (other << 32) | (low_low & 0xffffffff);
    return multiply_halves(a_high, b_high) + (middle >> 32) + (other >> 32);
}

/* The bits of the blocks counted by (low, high) and by 1 more, 16 each: bit i is set where the i-th number of 16 bits is
 * at least the threshold. */
INLINE wide draw_blocks(const fastattn_dropout *dropout, wide low, wide high) {
    const quarters least = (uint16_t)dropout->threshold - (quarters){};
    uint64_t key[2] = {dropout->key[0], dropout->key[1]};
    const wide next = low + 1;
    wide x[2][4] = {{low, high}, {next, high - (wide)(next == 0)}}, bits[2];
    for (int round = 0; round < 10; round++) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            wide low_0, low_1;
            const wide high_0 = multiply_wide(x[i][0], UINT64_C(0xD2E7470EE14C6C93), &low_0);
            const wide high_1 = multiply_wide(x[i][2], UINT64_C(0xCA5A826395121157), &low_1);
            x[i][0] = high_1 ^ x[i][1] ^ key[0];
            x[i][1] = low_1;
            x[i][2] = high_0 ^ x[i][3] ^ key[1];
            x[i][3] = low_0;
        }
        key[0] += UINT64_C(0x9E3779B97F4A7C15);
        key[1] += UINT64_C(0xBB67AE8584CAA73B);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        /* Bit 16 q + 4 k of `sparse` is that of the q-th quarter of x[k], whose place is bit q + 4 k. */
        wide sparse = {};
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++)
            sparse |= (wide)((quarters)((quarters)x[i][k] >= least) & (uint16_t)(1 << 4 * k));
        bits[i] = (sparse | sparse >> 15 | sparse >> 30 | sparse >> 45) & 0xffff;
    }
    return bits[0] | bits[1] << 16;
}

/* The number of a row's first block, row * row_blocks < 2^76, as 128 bits. */
INLINE void find_blocks(uint64_t row, uint64_t row_blocks, uint64_t *low, uint64_t *high) {
    const uint64_t lower = (row & 0xfffff) * row_blocks, upper = (row >> 20) * row_blocks;
    *low = lower + (upper << 20);
    *high = (upper >> 44) + (*low < lower);
}

static void draw_words(uint32_t *words, ptrdiff_t ld, const int64_t *rows, ptrdiff_t len_k, ptrdiff_t key0,
                       ptrdiff_t n_keys, const fastattn_dropout *dropout) {
    for (ptrdiff_t lane = 0; lane < ld; lane += WIDE_LANES) {
        uint64_t first[2][WIDE_LANES];
        wide low, high, bits = {};
        for (int i = 0; i < WIDE_LANES; i++)
            find_blocks((uint64_t)rows[lane + i], (uint64_t)(len_k + 15) / 16, &first[0][i], &first[1][i]);
        memcpy(&low, first[0], sizeof low);
        memcpy(&high, first[1], sizeof high);
        low += (uint64_t)(key0 / 32 * 2 + 1);
        high -= (wide)(low < (uint64_t)(key0 / 32 * 2 + 1));
        ptrdiff_t n = -(key0 % 32); /* bits of the next word that are drawn */
        for (ptrdiff_t j = 0; j < n_keys; j += 32, n -= 32) {
            const ptrdiff_t needed = n_keys - j < 32 ? n_keys - j : 32;
            for (; n < needed; n += 32) {
                const wide more = draw_blocks(dropout, low, high);
                bits |= n < 0 ? more >> -n : more << n;
                low += 2;
                high -= (wide)(low < 2);
            }
            *(wide_words *)(words + j / 32 * ld + lane) = __builtin_convertvector(bits, wide_words);
            bits >>= 32;
        }
    }
}
