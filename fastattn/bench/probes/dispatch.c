/* Which of the built tables of probes is for an ISA. */

#include <string.h>

#include "../../backends/cython/generated/isas.h"
#include "probes.h"

#define DECLARE(isa, supported) extern const fastattn_probes fastattn_probes_##isa;
#define ENTRY(isa, supported)                                                                                  \
    if (strcmp(name, #isa) == 0) return &fastattn_probes_##isa;

EACH_ISA(DECLARE)

const fastattn_probes *fastattn_find_probes(const char *name) {
    EACH_ISA(ENTRY)
    return NULL;
}
