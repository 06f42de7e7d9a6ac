/* The probes for one ISA: one object for each that setup.py builds (FASTATTN_ISA names it, the compiler's -m flags
 * enable it).
 *
 * SUMS are as many as the register tile of `accumulate` holds: enough to keep the multiply-adds' pipes full, and what
 * attention itself can have in flight.
 */

#include "../../backends/cython/generated/isas.h"
#include "probes.h"

#define SUMS (TILE_ROWS * TILE_VECTORS)

/* Keeps the compiler from knowing a vector's value. */
#if defined(__x86_64__)
#define OPAQUE(x) __asm__ volatile("" : "+v"(x))
#elif defined(__aarch64__)
#define OPAQUE(x) __asm__ volatile("" : "+w"(x))
#else
#define OPAQUE(x) __asm__ volatile("" : "+m"(x))
#endif

#define EACH_SUM(i) _Pragma("GCC unroll 32") for (int i = 0; i < SUMS; i++)

/* Opaque values: else equal sums are computed once, and the product only once. */
#define FMA_PEAK(REAL)                                                                                         \
    static double fma_peak_##REAL(long steps) {                                                                \
        typedef REAL vector __attribute__((vector_size(VECTOR_BYTES)));                                        \
        vector sum[SUMS], x = (REAL)1e-9 - (vector){}, y = (REAL)0.5 - (vector){};                             \
        EACH_SUM(i) {                                                                                          \
            sum[i] = x;                                                                                        \
            OPAQUE(sum[i]);                                                                                    \
        }                                                                                                      \
        for (long step = 0; step < steps; step++) {                                                            \
            OPAQUE(x);                                                                                         \
            EACH_SUM(i) sum[i] += x * y;                                                                       \
        }                                                                                                      \
        EACH_SUM(i) OPAQUE(sum[i]);                                                                            \
        return 2.0 * SUMS * (VECTOR_BYTES / sizeof(REAL)) * (double)steps;                                     \
    }

FMA_PEAK(float)
FMA_PEAK(double)

static double integer_peak(long steps) {
    enum { CHAINS = 4, TURNS = 16 };
    uint64_t sum[CHAINS] = {0};
    for (long i = 0; i < steps; i++)
#pragma GCC unroll 16
        for (int turn = 0; turn < TURNS; turn++)
#pragma GCC unroll 4
            for (int chain = 0; chain < CHAINS; chain++) {
                sum[chain]++;
                __asm__ volatile("" : "+r"(sum[chain])); /* else the turns are one addition */
            }
    return (double)CHAINS * TURNS * (double)steps;
}

static uint64_t read_memory(const void *at, ptrdiff_t nbytes) {
    typedef uint64_t line __attribute__((vector_size(VECTOR_BYTES)));
    enum { LINES = 8 };
    const line *p = at;
    line mixed[LINES] = {};
    for (ptrdiff_t left = nbytes / VECTOR_BYTES; left > 0; left -= LINES, p += LINES)
#pragma GCC unroll 8
        for (int i = 0; i < LINES; i++) mixed[i] ^= p[i];
    uint64_t all = 0;
    for (int i = 0; i < LINES; i++)
        for (int word = 0; word < VECTOR_BYTES / 8; word++) all ^= mixed[i][word];
    return all;
}

const fastattn_probes OF_ISA(fastattn_probes) = {
    .fma_peak_float = fma_peak_float,
    .fma_peak_double = fma_peak_double,
    .integer_peak = integer_peak,
    .read_memory = read_memory,
};
