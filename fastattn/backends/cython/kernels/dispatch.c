/* Which of the built kernel tables this CPU can run. */

#include <string.h>

#if !defined(__linux__)
#undef FASTATTN_HAVE_AMX /* other systems have other ways of giving a process the tile unit */
#endif
#if defined(FASTATTN_HAVE_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

#define DECLARE(isa) extern const fastattn_kernels fastattn_kernels_##isa##_f32, fastattn_kernels_##isa##_f64;
#define ENTRY(isa, supported)                                                                                  \
    if (strcmp(name, #isa) == 0)                                                                               \
        return !(supported) ? NULL : itemsize == 4 ? &fastattn_kernels_##isa##_f32 : &fastattn_kernels_##isa##_f64;

DECLARE(portable)
#if defined(FASTATTN_HAVE_AVX512)
DECLARE(avx512)
#endif
#if defined(FASTATTN_HAVE_AVX2)
DECLARE(avx2)
#endif
#if defined(FASTATTN_HAVE_NEON)
DECLARE(neon)
#endif

#if defined(FASTATTN_HAVE_AVX2)
#include <cpuid.h>

enum { EBX = 1, ECX = 2, YMM = 0x06, ZMM = 0xe6 };

/* Whether CPUID has this bit, and the system saves these registers. The compilers' own __builtin_cpu_supports knows not
 * all of these names (gcc 10, clang 17), or denies everything, for want of its part of the runtime library (zig). */
static int has(unsigned leaf, int part, int bit, unsigned registers) {
    unsigned found[4], saved, high;
    if (!__get_cpuid(1, &found[0], &found[1], &found[2], &found[3]) || !(found[ECX] & bit_OSXSAVE)) return 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if ((saved & registers) != registers) return 0;
    return __get_cpuid_count(leaf, 0, &found[0], &found[1], &found[2], &found[3]) && found[part] >> bit & 1;
}

#define FEATURE(name, ...)                                                                                     \
    static int has_##name(void) { return has(__VA_ARGS__); }

FEATURE(fma, 1, ECX, 12, YMM)
FEATURE(f16c, 1, ECX, 29, YMM)
FEATURE(avx2, 7, EBX, 5, YMM)
#if defined(FASTATTN_HAVE_AVX512)
FEATURE(avx512f, 7, EBX, 16, ZMM)
FEATURE(avx512dq, 7, EBX, 17, ZMM)
FEATURE(avx512bw, 7, EBX, 30, ZMM)
FEATURE(avx512vl, 7, EBX, 31, ZMM)
#endif
#endif

#if defined(FASTATTN_HAVE_AMX) || defined(FASTATTN_HAVE_AMX_MODEL)
/* The kernels of another instruction set, with fused ones for float32. */
static const fastattn_kernels *with_fused(fastattn_kernels own[2], const char *isa, const char *vectors,
                                          const fastattn_fused *fused, int itemsize) {
    const fastattn_kernels *const base = fastattn_find_kernels(vectors, itemsize);
    fastattn_kernels *const to = &own[itemsize == 8];
    if (!base || !fused) return NULL;
    /* Always the same bytes, should two threads write them at once. */
    *to = *base;
    to->isa = isa;
    to->fused = itemsize == 4 ? fused : NULL;
    return to;
}
#endif

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

#if defined(FASTATTN_HAVE_AMX_MODEL)
extern const fastattn_fused fastattn_fused_amx_model;
#endif

const fastattn_kernels *fastattn_find_kernels(const char *name, int itemsize) {
#if defined(FASTATTN_HAVE_AMX)
    static fastattn_kernels amx[2];
    if (strcmp(name, "amx") == 0)
        return with_fused(amx, "amx", "avx512", may_use_tiles() ? &fastattn_fused_amx : NULL, itemsize);
#endif
#if defined(FASTATTN_HAVE_AMX_MODEL)
    static fastattn_kernels model[2];
    if (strcmp(name, "amx_model") == 0)
        return with_fused(model, "amx_model", "avx2", &fastattn_fused_amx_model, itemsize);
#endif
#if defined(FASTATTN_HAVE_AVX512)
    ENTRY(avx512, has_avx512f() && has_avx512dq() && has_avx512bw() && has_avx512vl())
#endif
#if defined(FASTATTN_HAVE_AVX2)
    ENTRY(avx2, has_avx2() && has_fma() && has_f16c())
#endif
#if defined(FASTATTN_HAVE_NEON)
    ENTRY(neon, 1)
#endif
    ENTRY(portable, 1)
    return NULL;
}
