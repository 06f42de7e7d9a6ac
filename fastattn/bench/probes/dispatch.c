/* Which of the built tables of probes is for an ISA. */

#include <string.h>

#include "probes.h"

#define DECLARE(isa) extern const fastattn_probes fastattn_probes_##isa;
#define ENTRY(isa)                                                                                             \
    if (strcmp(name, #isa) == 0) return &fastattn_probes_##isa;

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

const fastattn_probes *fastattn_find_probes(const char *name) {
#if defined(FASTATTN_HAVE_AVX512)
    ENTRY(avx512)
#endif
#if defined(FASTATTN_HAVE_AVX2)
    ENTRY(avx2)
#endif
#if defined(FASTATTN_HAVE_NEON)
    ENTRY(neon)
#endif
    ENTRY(portable)
    return NULL;
}
