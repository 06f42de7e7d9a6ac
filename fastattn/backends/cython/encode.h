/* A row of float or double as int8 with a scale for each group. The bits are those of
 * fastattn._call.storage.encode_rows. */
#ifndef FASTATTN_ENCODE_H
#define FASTATTN_ENCODE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { FASTATTN_SCALED = 64 }; /* elements of int8 that share a scale */

/* A group of n numbers. The greatest magnitude is found among bits without their sign, which are in the order of
 * magnitudes, and where NaN is above inf. Adding and subtracting ROUND rounds to a whole number, halves to even. */
#define FASTATTN_ENCODE_GROUP(REAL, BITS, ROUND)                                                       \
    static inline float fastattn_encode_group_##REAL(int8_t *to, const char *from, ptrdiff_t n) {    \
        const BITS unsigned_bits = ((((BITS)1 << (sizeof(REAL) * 8 - 2)) - 1) << 1) + 1;               \
        const REAL infinity = INFINITY;                                                                \
        REAL x[FASTATTN_SCALED], largest;                                                              \
        BITS bits[FASTATTN_SCALED], most = 0, nonfinite;                                               \
        memcpy(x, from, (size_t)n * sizeof(REAL));                                                     \
        memcpy(bits, from, (size_t)n * sizeof(REAL));                                                  \
        memcpy(&nonfinite, &infinity, sizeof(REAL));                                                   \
        for (ptrdiff_t i = 0; i < n; i++) {                                                            \
            const BITS magnitude = bits[i] & unsigned_bits;                                            \
            most = magnitude > most ? magnitude : most;                                                \
        }                                                                                              \
        memcpy(&largest, &most, sizeof(REAL));                                                         \
        const float scale = most < nonfinite ? (float)(largest / (REAL)127) : NAN;                     \
        if (!(scale > 0)) {                                                                            \
            memset(to, 0, (size_t)n);                                                                  \
            return scale;                                                                              \
        }                                                                                              \
        for (ptrdiff_t i = 0; i < n; i++) {                                                            \
            REAL q = x[i] / (REAL)scale;                                                               \
            q = q > 127 ? 127 : q;                                                                     \
            q = q < -127 ? -127 : q;                                                                   \
            to[i] = (int8_t)(int32_t)((q + (REAL)(ROUND)) - (REAL)(ROUND));                            \
        }                                                                                              \
        return scale;                                                                                  \
    }
FASTATTN_ENCODE_GROUP(float, int32_t, 0x1.8p23)
FASTATTN_ENCODE_GROUP(double, int64_t, 0x1.8p52)
#undef FASTATTN_ENCODE_GROUP

/* n numbers without gaps as int8, and their scales. */
static inline void fastattn_encode_row(int8_t *to, char *scales, const char *from, int from_size, ptrdiff_t n) {
    for (ptrdiff_t c = 0; c < n; c += FASTATTN_SCALED, scales += sizeof(float)) {
        const ptrdiff_t count = n - c < FASTATTN_SCALED ? n - c : FASTATTN_SCALED;
        const float scale = from_size == 4 ? fastattn_encode_group_float(to + c, from + c * 4, count)
                                           : fastattn_encode_group_double(to + c, from + c * 8, count);
        memcpy(scales, &scale, sizeof scale);
    }
}

#endif
