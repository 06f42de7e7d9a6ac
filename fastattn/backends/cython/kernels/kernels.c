/* The micro-kernels for one ISA and dtype: setup.py builds an object for each (FASTATTN_ISA names the ISA, the compiler's
 * -m flags enable it; REAL_BITS is 32 or 64). */

#include "base.h"

#include "blocking.h"
#include "kernels.h"

/* The word of 32 bytes: bit j is byte j != 0. */
INLINE uint32_t word_of_bytes(const char *bytes) {
#if defined(__AVX2__)
    const __m256i x = _mm256_loadu_si256((const __m256i *)bytes);
    return ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, _mm256_setzero_si256()));
#else
    uint32_t word = 0;
    for (int i = 0; i < 4; i++) {
        uint64_t x;
        memcpy(&x, bytes + 8 * i, 8);
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

/* The word of one row's keys [0, n), n <= 32: bit j is element j != 0. */
INLINE uint32_t row_word(const char *row, ptrdiff_t stride, int itemsize, int n) {
    char bytes[32] = {0};
    if (stride == 1 && itemsize == 1) {
        if (n == 32) return word_of_bytes(row);
        memcpy(bytes, row, (size_t)n);
        return word_of_bytes(bytes);
    }
#define SET_BYTES(type)                                                                                        \
    for (int j = 0; j < n; j++) {                                                                              \
        type x;                                                                                                \
        memcpy(&x, row + j * stride, sizeof x);                                                                \
        bytes[j] = x != 0;                                                                                     \
    }
    if (itemsize == 1)
        SET_BYTES(uint8_t)
    else if (itemsize == 2)
        SET_BYTES(uint16_t)
    else if (itemsize == 4)
        SET_BYTES(uint32_t)
    else
        SET_BYTES(uint64_t)
#undef SET_BYTES
    return word_of_bytes(bytes);
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

#include "vec.h"

#include "storage.h"

#include "lanes.h"
#include "rows.h"

#include "backward.h"
#include "linear.h"
#include "recurrent.h"
#include "conv.h"
#include "recurrent_gradient.h"
#include "reductions.h"
#include "rope.h"

#define KERNEL(name) .name = name
#define SCORE_ROWS_OF(name, storage) [storage] = score_rows_##name,
#define ACCUMULATE_ROWS_OF(name, storage) [storage] = accumulate_rows_##name,
#define ROPE_OF(name, storage) [storage] = rope_##name,
#define CONVOLVE_OF(name, storage) [storage] = convolve_##name,

const fastattn_kernels CONCAT(CONCAT(fastattn_kernels, FASTATTN_ISA), REAL_BITS) = {
    .isa = STRING(FASTATTN_ISA),
    .vectors = STRING(FASTATTN_ISA),
    .lanes = LANES,
    .max_vectors = BLOCK_VECTORS,
    .panel_cols = TILE_ROWS,
    KERNEL(pack), KERNEL(score), KERNEL(adjust), KERNEL(add_bias), KERNEL(softmax), KERNEL(drop), KERNEL(pack_values),
    KERNEL(accumulate), KERNEL(accumulate_nonfinite), KERNEL(merge), KERNEL(finish), KERNEL(unpack),
    KERNEL(mask_words), KERNEL(draw_words), KERNEL(load_row), KERNEL(store_row), KERNEL(limit_row),
    KERNEL(pack_rows), KERNEL(adjust_rows), KERNEL(softmax_rows), KERNEL(merge_rows), KERNEL(unpack_rows),
    .score_rows = {EACH_READ(EACH_STORED, SCORE_ROWS_OF)},
    .accumulate_rows = {EACH_READ(EACH_STORED, ACCUMULATE_ROWS_OF)}, KERNEL(accumulate_rows_nonfinite),
    .rope = {EACH_READ(EACH_WRITTEN, ROPE_OF)},
    KERNEL(elu_plus_one),
    KERNEL(copy_rows), KERNEL(store_rows), KERNEL(count_stable), KERNEL(exponentials), KERNEL(sum_token_decays),
    KERNEL(sum_decays), KERNEL(decay_columns), KERNEL(weigh_tokens), KERNEL(gate), KERNEL(substitute),
    KERNEL(scale_rows), KERNEL(multiply), KERNEL(advance_sums), KERNEL(advance_token),
    .convolve = {EACH_READ(EACH_WRITTEN, CONVOLVE_OF)},
    KERNEL(add_products), KERNEL(weigh), KERNEL(substitute_back), KERNEL(cross_tokens), KERNEL(cross_columns), KERNEL(add_outside),
    KERNEL(dot), KERNEL(has_nonfinite), KERNEL(differentiate), KERNEL(largest_square), KERNEL(find_largest),
    KERNEL(add_columns), KERNEL(uncap),
    KERNEL(topk_keys), KERNEL(merge_topk), KERNEL(max_keys),
};
