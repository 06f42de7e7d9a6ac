/* Which of the built kernel tables this CPU can run. */

#include <string.h>

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

const fastattn_kernels *fastattn_find_kernels(const char *name, int itemsize) {
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
