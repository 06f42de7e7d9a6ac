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
/* gcc 10 and clang 17 do not know it by name. The system saves its registers where it does so for AVX2. */
static int has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
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
    ENTRY(avx512, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
#endif
#if defined(FASTATTN_HAVE_AVX2)
    ENTRY(avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
#endif
#if defined(FASTATTN_HAVE_NEON)
    ENTRY(neon, 1)
#endif
    ENTRY(portable, 1)
    return NULL;
}
