/* Rotary position embedding: pairs of a row's elements, each turned by its angle. Included by kernels.c.
 *
 * Both products of a coordinate are rounded, and then their sum: multiply-adds are not fused, as portable code and NumPy
 * have none, so that the bits are the same on every ISA. Reading and writing rows takes longer than these operations. */

/* Lane i of the lanes of two vectors: of those at even or at odd places, and of the first or second half of the row
 * that has them in turn. */
#define EVERY_OTHER(i, odd) (2 * (i) + (odd))
#define IN_TURN(i, second) ((i) % 2 * LANES + (i) / 2 + (second) * LANES / 2)

/* Up to LANES pairs of one row, n of them: from and to point at the first of them. */
INLINE void rope_vector(const int storage, const int interleaved, char *to, const char *from, ptrdiff_t n,
                        ptrdiff_t second, VEC cosine, VEC sine) {
    const ptrdiff_t vector = LANES * STORED_SIZE(storage);
    VEC a, b;
    if (interleaved) {
        const VEC low = load_upto(storage, from, 2 * n);
        const VEC high = 2 * n > LANES ? load_upto(storage, from + vector, 2 * n - LANES) : (VEC){};
        a = SHUFFLE(IVEC, low, high, EACH_LANE(EVERY_OTHER, 0));
        b = SHUFFLE(IVEC, low, high, EACH_LANE(EVERY_OTHER, 1));
    } else {
        a = load_upto(storage, from, n);
        b = load_upto(storage, from + second, n);
    }
    const VEC x = round_product(a * cosine) - round_product(b * sine);
    const VEC y = round_product(b * cosine) + round_product(a * sine);
    if (interleaved) {
        store_upto(storage, to, SHUFFLE(IVEC, x, y, EACH_LANE(IN_TURN, 0)), 2 * n);
        if (2 * n > LANES)
            store_upto(storage, to + vector, SHUFFLE(IVEC, x, y, EACH_LANE(IN_TURN, 1)), 2 * n - LANES);
    } else {
        store_upto(storage, to, x, n);
        store_upto(storage, to + second, y, n);
    }
}

INLINE void rope_rows(const int storage, const int interleaved, char *to, ptrdiff_t to_row, const char *from,
                      ptrdiff_t from_row, const char *cosines, const char *sines, ptrdiff_t table_row,
                      ptrdiff_t n_rows, const fastattn_rotation *rotation) {
    const ptrdiff_t n_pairs = rotation->n_pairs, size = STORED_SIZE(storage);
    const ptrdiff_t step = interleaved ? 2 * size : size, rotated = 2 * n_pairs * size, rest = rotation->dim * size - rotated;
    const IVEC sign = rotation->inverse ? (IVEC)splat(-(REAL)0) : (IVEC){};
    for (ptrdiff_t r = 0; r < n_rows; r++) {
        for (ptrdiff_t c = 0; c < n_pairs; c += LANES) {
            const ptrdiff_t at = c * (ptrdiff_t)sizeof(REAL), n = n_pairs - c < LANES ? n_pairs - c : LANES;
            const VEC cosine = load_upto(FASTATTN_REAL, cosines + at, n);
            const IVEC sine = (IVEC)load_upto(FASTATTN_REAL, sines + at, n) ^ sign;
            rope_vector(storage, interleaved, to + c * step, from + c * step, n, n_pairs * size, cosine, (VEC)sine);
        }
        if (rest && to != from) memcpy(to + rotated, from + rotated, (size_t)rest);
        to += to_row, from += from_row, cosines += table_row, sines += table_row;
    }
}

/* The kernels of the table, for each storage. */
#define OF_STORAGE(name, storage)                                                                              \
    static void rope_##name(char *to, ptrdiff_t to_row, const char *from, ptrdiff_t from_row,                  \
                            const char *cosines, const char *sines, ptrdiff_t table_row,                       \
                            ptrdiff_t n_rows, const fastattn_rotation *rotation) {                             \
        if (rotation->interleaved)                                                                             \
            rope_rows(storage, 1, to, to_row, from, from_row, cosines, sines, table_row, n_rows, rotation); \
        else                                                                                                   \
            rope_rows(storage, 0, to, to_row, from, from_row, cosines, sines, table_row, n_rows, rotation); \
    }
EACH_READ(EACH_WRITTEN, OF_STORAGE)
#undef OF_STORAGE
