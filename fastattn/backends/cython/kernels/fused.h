/* The contract of the fused kernels: score, softmax and accumulate of three units of work at once, for instruction
 * sets with a tile unit, float32. The driver's part is `fused.pxi`.
 *
 * A float32 is the sum of three bfloat16, its parts: high, middle and low; exactly, but for bits below 2^-133, which no
 * bfloat16 has. The product of two numbers is taken as the six largest products of their parts, summed in float32 with
 * the largest last: float32's accuracy, from products that are exact. (The idea: Henry, Tang and Heinecke, "Leveraging
 * the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", ARITH 2019.) The tile unit takes
 * parts, products and sums below 2^-126 as 0.
 *
 * A query block has FASTATTN_FUSED_LANES lanes, one per query row, and its tiles of scores and accumulators have rows
 * of that length: tile[x * FASTATTN_FUSED_LANES + lane]. A *unit* is one query block and one key tile of at most
 * FASTATTN_FUSED_KEYS keys. `step` computes the scores of one unit, the weights of the unit before it, and adds the
 * weighted values of the one before that: the tile unit works on the first and the last while the vector units work
 * on the middle one, so that the time of a step is about the longer of the two.
 *
 * Operands are stored as groups of 32 by 32 elements: 3 parts of 2 tiles each. Keys and values that are bfloat16 in
 * memory have 1 part, `n_parts`, as the others would be 0: half of the products, and the same bits. Where the packed
 * queries are bfloat16, too, products with their other parts are left out likewise, `query_parts`; and where weights may
 * be rounded to bfloat16, those with other parts of the weights, `weight_parts`. The groups of
 * queries and of 32 keys are in the order of the columns; those of the values of a key tile, FASTATTN_FUSED_KEYS keys
 * or fewer, are 32 columns after 32 columns, each with the groups of all keys. Everything that these kernels work on
 * is 64-byte aligned, except the rows of the caller.
 *
 * A word of a group holds a part of two of the 32 elements of a sum, k in its lower half and k + 16 in its upper
 * one. A row of 16 words is a key, or a column of values; of queries and weights it is a k of 16 lanes, and the lanes
 * from 16 on have the second tile.
 */
#ifndef FASTATTN_FUSED_H
#define FASTATTN_FUSED_H

#include <stddef.h>
#include <stdint.h>

#define FASTATTN_FUSED_LANES 32
#define FASTATTN_FUSED_KEYS 256
#define FASTATTN_PART_NBYTES (2 * 1024)
#define FASTATTN_GROUP_NBYTES (3 * FASTATTN_PART_NBYTES)
#define FASTATTN_PREFETCH_NBYTES 256

typedef struct {
    const char *query, *key, *value; /* groups: the first of the query block, of the unit's keys, and of their values */
    int n_parts;                     /* of the groups of keys and values: 3 or 1 */
    int query_parts;                 /* of those of queries that are not 0: 3; or 1, if n_parts is 1 */
    int weight_parts;                /* 3; or 1, if query_parts is 1: weights are rounded */
    ptrdiff_t tile_groups;           /* of 32 keys that the key tile has for each 32 columns of values */
    ptrdiff_t n_keys;
    /* `step` finds the largest of the scores plain .. plain_stop - 1, multiples of 32 but for n_keys, in tile_max; the
     * driver adjusts the others, and raises tile_max by them. */
    ptrdiff_t plain, plain_stop;
    float *row_max, *row_sum, *acc; /* of the query block; acc[e][lane] */
    int is_first;                   /* of its query block: acc is written, not added to */
    float *scores;                  /* [key][lane]; those past n_keys become -inf up to a multiple of 32 */
    char *weights;                  /* groups of 32 keys by 32 lanes */
    const uint32_t *drop_words;     /* bits of the weights that dropout keeps, see `drop`; NULL: all */
    float tile_max[FASTATTN_FUSED_LANES], rescale[FASTATTN_FUSED_LANES];
    /* Of the scored unit: where FASTATTN_PREFETCH_NBYTES each are prefetched, spread over the step. */
    const char *const *prefetch;
    ptrdiff_t n_prefetch;
} fastattn_unit;

typedef struct {
    /* The calling thread's tile unit, before the first step and after the last. */
    void (*begin)(void);
    void (*end)(void);

    /* The groups of a query block from its packed tile, tile[d * ld + lane], see `pack`. Bit `lane` of the result is
     * set where a number of that lane is nonfinite or too large to be split; it is taken as 0. */
    uint32_t (*split_queries)(char *groups, const float *tile, ptrdiff_t ld, ptrdiff_t head_dim);

    /* The groups of n_keys <= 32 keys, of any alignment; later keys are 0. Bit j of the result: as above, for key j. */
    uint32_t (*split_keys)(char *groups, int n_parts, const char *k, ptrdiff_t row, ptrdiff_t n_keys,
                           ptrdiff_t head_dim);

    /* The groups of the values of n_keys <= 32 keys, the group-th 32 of their key tile. Bit j: a value of key j is
     * nonfinite, too large or too small, see `fastattn_is_split`; such values are taken as 0. */
    uint32_t (*split_values)(char *groups, int n_parts, ptrdiff_t tile_groups, const char *v, ptrdiff_t row,
                             ptrdiff_t n_keys, ptrdiff_t value_dim, ptrdiff_t group);

    /* The scores of `step` alone, scores[j * ld + lane], for n_keys keys rounded up to a multiple of 32. */
    void (*score)(float *scores, ptrdiff_t ld, const char *query, const char *key, int n_parts, ptrdiff_t n_keys,
                  ptrdiff_t head_dim);

    /* One step of the pipeline; each of the three may be NULL, and they are consecutive units. */
    void (*step)(fastattn_unit *scored, fastattn_unit *weighted, fastattn_unit *added, ptrdiff_t head_dim,
                 ptrdiff_t value_dim, float exponent_factor);

    /* A probe of what the tile unit can do at most: products of tiles alone, in `steps` steps. Returns FLOPs of float32,
     * each in six products. The products of numbers other than 0 take more power, and time. */
    double (*peak)(long steps);
} fastattn_fused;

/* Whether the groups of values hold x. Below 2^-64 the parts, or products of theirs with weights, would lose bits that
 * float32 keeps, as the tile unit takes denormal numbers as 0; near the largest number a part may round to inf. */
static inline int fastattn_is_split(float x) {
    return x == 0 || (__builtin_fabsf(x) >= 0x1p-64f && __builtin_fabsf(x) < 0x1p120f);
}

#endif
