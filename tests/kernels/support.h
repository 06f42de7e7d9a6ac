/* What the tests of the micro-kernels stand on: the kernels at hand, checks, numbers, and memory.
 *
 * The rows of a caller lie in memory of exactly their size: between pages that may not be touched, or, under
 * AddressSanitizer, in blocks of malloc with the gaps poisoned.
 */
#ifndef FASTATTN_TEST_SUPPORT_H
#define FASTATTN_TEST_SUPPORT_H

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#undef near /* leftovers of 16 bits */
#undef far
#elif !defined(__wasm__)
#include <sys/mman.h>
#endif

#include "kernels.h"

#if defined(__SANITIZE_ADDRESS__)
#define ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ASAN 1
#endif
#endif
#if defined(ASAN)
#include <sanitizer/asan_interface.h>
#endif

#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))
#define LOG2E 1.4426950408889634074
#define LN2 0.69314718055994530942
#define NUMBER "%.17g"
#define FAR_AWAY ((ptrdiff_t)1 << (sizeof(ptrdiff_t) == 8 ? 40 : 30)) /* an address or a count that no test has memory for */

static const fastattn_kernels *kernels;
static int size, lanes; /* bytes of an element, query rows in a vector */
static long double unit; /* half the distance from 1 to the next number */
static const char *current;
static long checks, failures;

static void fail(int line, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    printf("FAILED %s float%d %s, line %d: ", kernels->isa, size * 8, current, line);
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
    if (++failures == 20) {
        printf("too many failures\n");
        exit(1);
    }
}

#define CHECK(ok, ...)                                                                                         \
    do {                                                                                                       \
        checks++;                                                                                              \
        if (!(ok)) fail(__LINE__, __VA_ARGS__);                                                                \
    } while (0)

/* ------------------------------------------------------------------ numbers */

static uint64_t random_bits(void) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * UINT64_C(2685821657736338717) >> 11;
}

/* e^x. musl has none in quadruple precision, as of WebAssembly's long double: its expl rounds x to double. */
static long double exact_exp(long double x) {
#if LDBL_MANT_DIG == 113 && !defined(__GLIBC__)
    if (!(fabsl(x) < 11000)) return expl(x);
    const long double ln2 = 0.693147180559945309417232121458176568L;
    const int n = (int)lrint((double)(x / ln2));
    const long double rest = x - n * ln2; /* below 0.35: 27 terms of the series leave 1e-42 of it */
    long double sum = 1;
    for (int k = 27; k > 0; k--) sum = 1 + sum * rest / k;
    return ldexpl(sum, n);
#else
    return expl(x);
#endif
}

static int below(int n) { return (int)(random_bits() % (uint64_t)n); }
static int small(void) { return below(17) - 8; }
/* An address to prefetch, on which no result depends, or none. */
#define ANY_DISTANCE (below(2) ? below(1 << 20) - (1 << 19) : 0)
static double uniform(double low, double high) { return low + (high - low) * ((double)random_bits() / 0x1p53); }

static double get(const void *array, ptrdiff_t i) {
    float single;
    double x;
    if (size == 8) return memcpy(&x, (const char *)array + i * 8, 8), x;
    return memcpy(&single, (const char *)array + i * 4, 4), single;
}

static void put(void *array, ptrdiff_t i, double x) {
    const float single = (float)x;
    memcpy((char *)array + i * size, size == 8 ? (const void *)&x : &single, (size_t)size);
}

static double rounded(double x) { return size == 8 ? x : (float)x; }
static double largest(void) { return size == 8 ? DBL_MAX : FLT_MAX; }
static double smallest(void) { return size == 8 ? DBL_MIN : FLT_MIN; } /* of the normal numbers */

static double special(int i) {
    const double values[] = {INFINITY, -INFINITY, NAN, 0.0, -0.0, largest(), -largest(), -1e30};
    return values[i % COUNT(values)];
}

/* The same bits; any NaN is as good as another. */
static int same(double a, double b) { return isnan(a) ? isnan(b) : a == b && !signbit(a) == !signbit(b); }

/* |got - exact| in units of the last place of a normal number of the exact size. */
static double ulps(double got, long double exact) {
    if (exact == 0) return got == 0 ? 0 : INFINITY;
    return (double)(fabsl(got - exact) / ldexpl(unit * 2, ilogbl(exact)));
}

/* The product after at most two roundings of half an ULP; exact where nothing needs rounding. */
static int is_product(double got, double x, long double factor) {
    const double exact = (double)(x * factor);
    if (!isfinite(exact) || exact == 0 || factor == 1) return got == exact || (isnan(got) && isnan(exact));
    return ulps(got, x * factor) <= 1.001;
}

/* ------------------------------------------------------------------ memory */

enum { SLOTS = 160, SLOT = 1 << 20, GUARD = 1 << 16 };
static void *taken[SLOTS];
static int n_taken;

#if !defined(ASAN)
/* A slot between forbidden pages, which WebAssembly has not. */
static char *new_slot(void) {
#if defined(__wasm__)
    return aligned_alloc(64, SLOT);
#elif defined(_WIN32)
    char *map = VirtualAlloc(NULL, SLOT + 2 * GUARD, MEM_RESERVE, PAGE_NOACCESS);
    return map ? VirtualAlloc(map + GUARD, SLOT, MEM_COMMIT, PAGE_READWRITE) : NULL;
#else
    char *map = mmap(NULL, SLOT + 2 * GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return map == MAP_FAILED || mprotect(map + GUARD, SLOT, PROT_READ | PROT_WRITE) ? NULL : map + GUARD;
#endif
}
#endif

/* `bytes` bytes of 0xff (NaN), valid until release(). Without ASan they end at a forbidden page, as near as
 * `align` allows, or begin `shift` bytes behind one, by turns. */
static char *take(ptrdiff_t bytes, ptrdiff_t align, ptrdiff_t shift) {
    char *at;
    if (n_taken == SLOTS || bytes + shift > SLOT) {
        printf("the test needs more memory than it has\n");
        exit(1);
    }
#if defined(ASAN)
    if (posix_memalign(&taken[n_taken++], (size_t)(align < 8 ? 8 : align), (size_t)(bytes + shift))) exit(1);
    at = (char *)taken[n_taken - 1] + shift;
#else
    static int turn;
    if (!taken[n_taken] && !(taken[n_taken] = new_slot())) exit(1);
    at = (char *)taken[n_taken++] + (turn++ & 1 ? (SLOT - bytes) / align * align : shift);
#endif
    return memset(at, 0xff, (size_t)bytes);
}

/* Ends what was taken after the first n. */
static void release_after(int n) {
#if defined(ASAN)
    for (int i = n; i < n_taken; i++) free(taken[i]);
#endif
    n_taken = n;
}

static void release(void) { release_after(0); }

static void *tile(ptrdiff_t rows, ptrdiff_t ld) { return take(rows * ld * size, 64, 0); }

static void *filled(ptrdiff_t rows, ptrdiff_t ld, double x) {
    void *out = tile(rows, ld);
    for (ptrdiff_t i = 0; i < rows * ld; i++) put(out, i, x);
    return out;
}

/* Row r's factor in two parts, as `finish` makes them: rounded towards 0, and what is left, of the same sign and not 0. */
static void put_factor(void *factor, ptrdiff_t ld, int r) {
    const double inverse = r % 5 ? 1 / uniform(1, 300) : r % 2 ? 1 : 0.5;
    const double high = size == 8 || rounded(inverse) <= inverse ? rounded(inverse) : nextafterf((float)inverse, 0);
    const double low = size == 4 ? inverse - high : r % 5 ? inverse * uniform(0, 1) * 0x1p-53 : 0;
    put(factor, r, high);
    put(factor, ld + r, low > 0 ? low : high * 0x1p-100);
}

static void *integers(ptrdiff_t rows, ptrdiff_t ld) {
    void *out = tile(rows, ld);
    for (ptrdiff_t i = 0; i < rows * ld; i++) put(out, i, small());
    return out;
}

/* A caller's array: element (r, c) at `at + r * row + c * col`. */
typedef struct {
    char *at;
    ptrdiff_t rows, cols, row, col, nbytes; /* nbytes: of an element */
} Matrix;

static Matrix matrix_of(ptrdiff_t rows, ptrdiff_t cols, ptrdiff_t row, ptrdiff_t col, ptrdiff_t nbytes, int shift) {
    const ptrdiff_t r = (rows - 1) * row, c = (cols - 1) * col;
    const ptrdiff_t low = (r < 0 ? r : 0) + (c < 0 ? c : 0), high = (r > 0 ? r : 0) + (c > 0 ? c : 0);
    return (Matrix){take(high - low + nbytes, 1, shift) - low, rows, cols, row, col, nbytes};
}

static Matrix matrix(ptrdiff_t rows, ptrdiff_t cols, ptrdiff_t row, ptrdiff_t col, int shift) {
    return matrix_of(rows, cols, row, col, size, shift);
}

static char *element(const Matrix *m, ptrdiff_t r, ptrdiff_t c) { return m->at + r * m->row + c * m->col; }
static double entry(const Matrix *m, ptrdiff_t r, ptrdiff_t c) { return get(element(m, r, c), 0); }

/* The rows of a matrix from `first` on, for the kernels of few rows; whatever is prefetched changes no result. */
static fastattn_rows rows_to_read(const Matrix *m, ptrdiff_t first) {
    return (fastattn_rows){element(m, first, 0), m->row, NULL, 0, ANY_DISTANCE, ANY_DISTANCE, 16 * below(20), ANY_DISTANCE,
                           ANY_DISTANCE};
}

/* What lies between the elements may no more be touched than what lies outside. */
static void seal(const Matrix *m) {
#if defined(ASAN)
    const ptrdiff_t r = (m->rows - 1) * m->row, c = (m->cols - 1) * m->col;
    const ptrdiff_t low = (r < 0 ? r : 0) + (c < 0 ? c : 0), high = (r > 0 ? r : 0) + (c > 0 ? c : 0);
    ASAN_POISON_MEMORY_REGION(m->at + low, (size_t)(high - low + m->nbytes));
    for (ptrdiff_t i = 0; i < m->rows; i++)
        for (ptrdiff_t j = 0; j < m->cols; j++) ASAN_UNPOISON_MEMORY_REGION(element(m, i, j), (size_t)m->nbytes);
#else
    (void)m;
#endif
}

enum { LAYOUTS = 9, ONE_TO_ONE = 6 }; /* from ONE_TO_ONE on, elements share memory */

/* rows x cols in one of the layouts that a caller may hand over: a number each. */
static Matrix laid_out(ptrdiff_t rows, ptrdiff_t cols, int layout) {
    const ptrdiff_t odd = 2 * size + 1;
    const ptrdiff_t strides[LAYOUTS][2] = {
        {cols * size, size},   {(cols + 3) * size, size}, {size, rows * size}, {cols * odd, odd},
        {-cols * size, -size}, {cols * size + 1, size},   {0, size},           {size, 0},
        {size, -size},
    };
    return matrix(rows, cols, strides[layout][0], strides[layout][1], layout % 2 ? 1 + below(7) : 0);
}

static Matrix integer_matrix(ptrdiff_t rows, ptrdiff_t cols, int layout) {
    Matrix m = laid_out(rows, cols, layout);
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t c = 0; c < cols; c++) put(element(&m, r, c), 0, small());
    seal(&m);
    return m;
}

static Matrix same_numbers(const Matrix *of, int layout) {
    Matrix m = laid_out(of->rows, of->cols, layout);
    for (ptrdiff_t r = 0; r < m.rows; r++)
        for (ptrdiff_t c = 0; c < m.cols; c++) memcpy(element(&m, r, c), element(of, r, c), (size_t)size);
    seal(&m);
    return m;
}

/* Random words for n_keys keys; returned so that bit j % 32 of words[j / 32 * ld + lane] is key j. */
static uint32_t *random_words(ptrdiff_t n_keys, ptrdiff_t ld) {
    const ptrdiff_t n = (n_keys + 31) / 32 * ld;
    uint32_t *words = (uint32_t *)take(n * 4, 64, 0);
    for (ptrdiff_t i = 0; i < n; i++) words[i] = below(8) ? (uint32_t)random_bits() : 0;
    return words;
}

/* How many of n_keys keys each vector has: all of them, or rising numbers from 0 on. */
static ptrdiff_t *key_stops(int vectors, ptrdiff_t n_keys, int rising) {
    ptrdiff_t *stops = (ptrdiff_t *)take(vectors * (ptrdiff_t)sizeof *stops, 8, 0);
    for (int v = 0; v < vectors; v++) stops[v] = rising && v < vectors - 1 ? n_keys * (v + below(2)) / vectors : n_keys;
    return stops;
}

/* One row for each lane, at every alignment by turns. */
static char **lane_rows(ptrdiff_t ld, ptrdiff_t nbytes) {
    char **rows = (char **)take(ld * (ptrdiff_t)sizeof *rows, 8, 0);
    for (ptrdiff_t lane = 0; lane < ld; lane++) rows[lane] = take(nbytes, 1, lane % 8);
    return rows;
}

static int allowed(const uint32_t *words, char **bias, ptrdiff_t ld, ptrdiff_t j, ptrdiff_t lane) {
    return (!words || words[j / 32 * ld + lane] >> (j % 32) & 1) && !(bias && get(bias[lane], j) == -INFINITY);
}

#endif
