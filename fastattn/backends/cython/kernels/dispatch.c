/* Which of the built kernel tables this CPU can run. */

#include <string.h>

#if !defined(__linux__)
#undef FASTATTN_HAVE_AMX /* other systems have other ways of giving a process the tile unit */
#endif
#if defined(FASTATTN_HAVE_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "../generated/isas.h"
#include "kernels.h"

#define DECLARE(isa, supported) extern const fastattn_kernels fastattn_kernels_##isa##_32, fastattn_kernels_##isa##_64;
#define ENTRY(isa, supported)                                                                                  \
    if (strcmp(name, #isa) == 0)                                                                               \
        return !(supported) ? NULL : itemsize == 4 ? &fastattn_kernels_##isa##_32 : &fastattn_kernels_##isa##_64;

EACH_ISA(DECLARE)

#if defined(__x86_64__)
#include <cpuid.h>

enum { EAX, EBX, ECX, YMM = 0x06, ZMM = 0xe6 };

/* Whether CPUID has this bit, and the system saves these registers. The compilers' own __builtin_cpu_supports knows not
 * all of these names (gcc 10, clang 17), or denies everything, for want of its part of the runtime library (zig). */
static int has(unsigned leaf, unsigned subleaf, int part, int bit, unsigned registers) {
    unsigned found[4], saved, high;
    if (!__get_cpuid(1, &found[0], &found[1], &found[2], &found[3]) || !(found[ECX] & bit_OSXSAVE)) return 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if ((saved & registers) != registers) return 0;
    return __get_cpuid_count(leaf, subleaf, &found[0], &found[1], &found[2], &found[3]) && found[part] >> bit & 1;
}

#define FEATURE(name, ...)                                                                                     \
    static __attribute__((unused)) int has_##name(void) { return has(__VA_ARGS__); }

FEATURE(fma, 1, 0, ECX, 12, YMM)
FEATURE(f16c, 1, 0, ECX, 29, YMM)
FEATURE(avx2, 7, 0, EBX, 5, YMM)
FEATURE(avx512f, 7, 0, EBX, 16, ZMM)
FEATURE(avx512dq, 7, 0, EBX, 17, ZMM)
FEATURE(avx512bw, 7, 0, EBX, 30, ZMM)
FEATURE(avx512vl, 7, 0, EBX, 31, ZMM)
FEATURE(avx512_bf16, 7, 1, EAX, 5, ZMM)
#endif

/* The kernels of an instruction set that has those of `vectors`, and others beside them for float32. */
typedef struct {
    const char *isa, *vectors;
    const fastattn_fused *fused;
    const fastattn_pairs *pairs;
} extended_isa;

static const fastattn_kernels *find_extended(fastattn_kernels own[2], extended_isa extended, int itemsize) {
    const fastattn_kernels *const base = fastattn_find_kernels(extended.vectors, itemsize);
    if (!base) return NULL;
    fastattn_kernels all = *base;
    all.isa = extended.isa;
    if (itemsize == 4) {
        all.fused = extended.fused;
        all.pairs = extended.pairs;
    }
    own[itemsize == 8] = all; /* always the same bytes, should two threads write them at once */
    return &own[itemsize == 8];
}

#define EXTENDED(name_of_isa, supported, ...)                                                                  \
    if (strcmp(name, #name_of_isa) == 0) {                                                                     \
        static fastattn_kernels own[2];                                                                        \
        return supported ? find_extended(own, (extended_isa){#name_of_isa, __VA_ARGS__}, itemsize) : NULL;     \
    }

#if defined(FASTATTN_HAVE_AMX)
extern const fastattn_fused fastattn_fused_amx;

/* Whether this process may use the tile unit. Linux gives its 8 KB of state to a process that asks, and refuses one
 * whose alternative signal stacks are too small for it. The permission holds for all threads, and in forked children. */
static int may_use_tiles(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    static int answer; /* 0: has not asked */
    if (!answer) {
        unsigned a, b, c, d;
        const int has_tiles = __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1 && d >> 24 & 1;
        answer = has_tiles && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 ? 1 : -1;
    }
    return answer > 0;
}
#endif

#if defined(FASTATTN_HAVE_AVX512_BF16)
extern const fastattn_pairs fastattn_pairs_avx512_bf16;
#define PAIRS_OF_AVX512 (has_avx512_bf16() ? &fastattn_pairs_avx512_bf16 : NULL)
#else
#define PAIRS_OF_AVX512 NULL
#endif
#if defined(FASTATTN_HAVE_AMX_MODEL)
extern const fastattn_fused fastattn_fused_amx_model;
#endif
#if defined(FASTATTN_HAVE_BF16_MODEL)
extern const fastattn_pairs fastattn_pairs_bf16_model;
#endif

const fastattn_kernels *fastattn_find_kernels(const char *name, int itemsize) {
#if defined(FASTATTN_HAVE_AMX)
    EXTENDED(amx, may_use_tiles(), "avx512", &fastattn_fused_amx, PAIRS_OF_AVX512)
#endif
#if defined(FASTATTN_HAVE_AVX512_BF16)
    EXTENDED(avx512_bf16, has_avx512_bf16(), "avx512", NULL, PAIRS_OF_AVX512)
#endif
#if defined(FASTATTN_HAVE_AMX_MODEL)
    EXTENDED(amx_model, 1, "avx2", &fastattn_fused_amx_model, NULL)
#endif
#if defined(FASTATTN_HAVE_BF16_MODEL)
    EXTENDED(bf16_model, 1, "avx2", NULL, &fastattn_pairs_bf16_model)
#endif
    EACH_ISA(ENTRY)
    return NULL;
}
