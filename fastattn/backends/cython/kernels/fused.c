/* The fused kernels; see fused.h for what each promises. Built twice: for the tile unit of Intel's processors (amx),
 * and for a C model of it (amx_model, FASTATTN_MODEL).
 *
 * Lanes are queries, as in all kernels: a product S^T = K Q^T has keys on the left and queries on the right, and
 * leaves as rows of lanes, so that the softmax stays vertical; P^T is then the right operand of O^T = V^T P^T as it is.
 */

#include "base.h"

#include "fused.h"
#include "tile_unit.h"

#define VECTOR_BYTES 64
#include "vec.h"

#define LD FASTATTN_FUSED_LANES
#define PART FASTATTN_PART_NBYTES /* two tiles; the parts of a group: high, middle, low */
#define GROUP_ROWS 32
#define HIGH_HALF ((int32_t)0xffff0000)
#define ABS_BITS 0x7fffffff

/* Queries and keys from 2^60 on are not split, so that no sum of products of parts overflows where the sum itself
 * does not. Small ones are: what they lose, below 2^-126 times 2^60, changes no weight. */
#define LARGEST_BITS 0x5d800000

/* What would make the model's object many times larger, where vectors of 64 bytes are taken apart, is not inline
 * there: the model need not be fast. */
#if defined(FASTATTN_MODEL)
#define OUTLINE static __attribute__((noinline))
OUTLINE void to_columns(VEC x[LANES]) {
    for (int i = 1; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            const float other = x[i][j];
            x[i][j] = x[j][i];
            x[j][i] = other;
        }
}
/* `scaled` is known where each is compiled, or products and sums are not fused. */
OUTLINE void scaled_power(float factor, VEC *x) { exp2_vectors(1, 1, factor, x); }
OUTLINE void plain_power(VEC *x) { exp2_vectors(1, 0, 1, x); }
INLINE void powers(const int n, const int scaled, float factor, VEC x[]) {
    for (int i = 0; i < n; i++)
        if (scaled)
            scaled_power(factor, x + i);
        else
            plain_power(x + i);
}
#else
#define OUTLINE INLINE
INLINE void to_columns(VEC x[LANES]) { transpose(x); }
INLINE void powers(const int n, const int scaled, float factor, VEC x[]) { exp2_vectors(n, scaled, factor, x); }
#endif

INLINE ptrdiff_t groups_of(ptrdiff_t n) { return (n + GROUP_ROWS - 1) / GROUP_ROWS; }

OUTLINE VEC larger(VEC a, VEC b) { return max(a, b); }

INLINE VEC upper(VEC x) { return (VEC)((IVEC)x & HIGH_HALF); }
/* Rounded to 8 bits, half away from 0: what is left has its sign and one bit less. */
INLINE VEC rounded(VEC x) { return (VEC)(((WORDS)x + 0x8000) & (uint32_t)HIGH_HALF); }

/* Lane i: the bfloat16 of a in the lower half, that of b in the upper one; both are cut off. On hardware by one shuffle:
 * shifts share a port with multiply-adds, which have but that one while the tile unit works. */
INLINE IVEC pair(VEC a, VEC b) {
#if defined(__AVX512BW__)
    const __mmask64 lower_halves = 0x3333333333333333;
    const __m512i from_upper = _mm512_broadcast_i32x4(_mm_setr_epi32(0x0302, 0x0706, 0x0b0a, 0x0f0e));
    return (IVEC)_mm512_mask_shuffle_epi8((__m512i)b, lower_halves, (__m512i)a, from_upper);
#else
    return (IVEC)(((WORDS)a >> 16) | ((WORDS)b & (uint32_t)HIGH_HALF));
#endif
}

/* The parts of pairs (a, b), which are finite, in the tile row at `to`. */
OUTLINE void store_split(const int n_parts, char *to, VEC a, VEC b) {
#pragma GCC unroll 3
    for (int part = 0; part < n_parts; part++) {
        const VEC x = part < 2 ? rounded(a) : a, y = part < 2 ? rounded(b) : b;
        store(to + part * PART, (VEC)pair(x, y));
        a -= x;
        b -= y;
    }
}

/* The same by cutting off, for weights: fewer operations, and no part of a number from 0 on is negative. One part is
 * rounded. */
OUTLINE void store_weights(const int n_parts, char *to, VEC a, VEC b) {
    if (n_parts == 1) {
        store_split(1, to, a, b);
        return;
    }
#pragma GCC unroll 3
    for (int part = 0; part < 3; part++) {
        store(to + part * PART, (VEC)pair(a, b));
        a -= upper(a);
        b -= upper(b);
    }
}

/* Negative lanes where x is nonfinite or has no parts as a number of queries and keys; with `clean` those become 0. */
OUTLINE IVEC check_operand(const int clean, VEC *x) {
    const IVEC bad = LARGEST_BITS - 1 - ((IVEC)*x & ABS_BITS);
    if (clean) *x = (VEC)((IVEC)*x & (bad >= 0));
    return bad;
}

/* The same for values: negative where `fastattn_is_split` is false. */
OUTLINE IVEC check_value(const int clean, VEC *x) {
    const IVEC bits = (IVEC)*x & ABS_BITS;
    const int32_t least = (127 - 64) << 23, limit = (127 + 120) << 23;
    const IVEC bad = ((limit - 1 - bits) | (bits - least)) & (bits != 0);
    if (clean) *x = (VEC)((IVEC)*x & (bad >= 0));
    return bad;
}

INLINE int any_negative(IVEC x) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)x) != 0;
#else
    int32_t all = 0;
    for (int i = 0; i < LANES; i++) all |= x[i];
    return all < 0;
#endif
}

/* n elements of a row, of any alignment; the rest is 0. */
OUTLINE VEC load_some(const char *p, ptrdiff_t n) {
    return n >= LANES ? load(p) : n > 0 ? load_partial(p, (int)n) : (VEC){};
}

INLINE uint32_t split_query_groups(const int clean, char *groups, const float *tile, ptrdiff_t ld,
                                   ptrdiff_t head_dim) {
    IVEC bad[2] = {};
    for (ptrdiff_t d = 0; d < head_dim; d += GROUP_ROWS, groups += FASTATTN_GROUP_NBYTES)
        for (ptrdiff_t k = 0; k < TILE_SIDE; k++)
            for (int half = 0; half < 2; half++) {
                const float *const at = tile + (d + k) * ld + half * LANES;
                VEC a = d + k < head_dim ? load(at) : (VEC){};
                VEC b = d + k + TILE_SIDE < head_dim ? load(at + TILE_SIDE * ld) : (VEC){};
                bad[half] |= check_operand(clean, &a) | check_operand(clean, &b);
                store_split(3, groups + half * TILE_NBYTES + k * 64, a, b);
            }
    uint32_t lanes = 0;
    for (int i = 0; i < LANES; i++) lanes |= (uint32_t)(bad[0][i] < 0) << i | (uint32_t)(bad[1][i] < 0) << (LANES + i);
    return lanes;
}

static uint32_t split_queries(char *groups, const float *tile, ptrdiff_t ld, ptrdiff_t head_dim) {
    const uint32_t lanes = split_query_groups(0, groups, tile, ld, head_dim);
    if (lanes) split_query_groups(1, groups, tile, ld, head_dim);
    return lanes;
}

/* One key, to its row of the groups; whether a number of it has no parts. */
INLINE int split_key(const int n_parts, const int clean, char *groups, const char *k, ptrdiff_t head_dim) {
    IVEC bad = {};
    for (ptrdiff_t left = head_dim; left > 0; left -= GROUP_ROWS, k += 128, groups += n_parts * PART) {
        VEC a = left >= GROUP_ROWS ? load(k) : load_some(k, left);
        VEC b = left >= GROUP_ROWS ? load(k + 64) : load_some(k + 64, left - LANES);
        bad |= check_operand(clean, &a) | check_operand(clean, &b);
        store_split(n_parts, groups, a, b);
    }
    return any_negative(bad);
}

INLINE uint32_t split_key_groups(const int n_parts, char *groups, const char *k, ptrdiff_t row,
                                 ptrdiff_t n_keys, ptrdiff_t head_dim) {
    uint32_t keys = 0;
    for (ptrdiff_t j = 0; j < GROUP_ROWS; j++, k += row, groups += 64) {
        if (j < n_keys) {
            if (!split_key(n_parts, 0, groups, k, head_dim)) continue;
            split_key(n_parts, 1, groups, k, head_dim);
            keys |= (uint32_t)1 << j;
        } else {
            for (ptrdiff_t at = 0; at < groups_of(head_dim) * n_parts; at++)
                memset(groups + at * PART, 0, 64);
        }
    }
    return keys;
}

static uint32_t split_keys(char *groups, int n_parts, const char *k, ptrdiff_t row, ptrdiff_t n_keys,
                           ptrdiff_t head_dim) {
    return n_parts == 1 ? split_key_groups(1, groups, k, row, n_keys, head_dim)
                        : split_key_groups(3, groups, k, row, n_keys, head_dim);
}

OUTLINE uint32_t split_value_groups(const int n_parts, const int clean, char *groups, ptrdiff_t tile_groups,
                                    const char *v, ptrdiff_t row, ptrdiff_t n_keys, ptrdiff_t value_dim) {
    const ptrdiff_t next_columns = tile_groups * n_parts * PART;
    IVEC bad[GROUP_ROWS] = {};
    uint32_t keys = 0;
    for (ptrdiff_t e = 0; e < value_dim; e += GROUP_ROWS, groups += next_columns)
        for (int half = 0; half < 2; half++) {
            const ptrdiff_t column = e + half * TILE_SIDE, left = value_dim - column;
            char *const to = groups + half * TILE_NBYTES;
            VEC x[2][LANES];
            if (left <= 0) {
                for (int part = 0; part < n_parts; part++) memset(to + part * PART, 0, TILE_NBYTES);
                continue;
            }
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
#pragma GCC unroll 16
                for (int j = 0; j < LANES; j++) {
                    const ptrdiff_t key = i * TILE_SIDE + j;
                    x[i][j] = key < n_keys ? load_some(v + key * row + column * 4, left) : (VEC){};
                    bad[key] |= check_value(clean, &x[i][j]);
                }
                to_columns(x[i]);
            }
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++) store_split(n_parts, to + j * 64, x[0][j], x[1][j]);
        }
    for (int j = 0; j < GROUP_ROWS; j++) keys |= (uint32_t)any_negative(bad[j]) << j;
    return keys;
}

static uint32_t split_values(char *groups, int n_parts, ptrdiff_t tile_groups, const char *v, ptrdiff_t row,
                             ptrdiff_t n_keys, ptrdiff_t value_dim, ptrdiff_t group) {
    groups += group * n_parts * PART;
#define SPLIT(clean)                                                                                           \
    (n_parts == 1 ? split_value_groups(1, clean, groups, tile_groups, v, row, n_keys, value_dim)               \
                  : split_value_groups(3, clean, groups, tile_groups, v, row, n_keys, value_dim))
    const uint32_t keys = SPLIT(0);
    if (keys) SPLIT(1);
#undef SPLIT
    return keys;
}

/* The unit whose weights are computed in this step, and how far they are. */
typedef struct {
    const float *scores;
    char *weights;
    VEC base[2], sum[2], total[2]; /* partial sums over a group, as short chains round less */
    const uint32_t *drop_words;
    float factor;
    ptrdiff_t next, n;      /* pairs of keys, done and all */
    ptrdiff_t due, n_turns; /* a pair is due every n_turns / n turns of the tile unit */
    const char *const *prefetch; /* likewise */
    ptrdiff_t n_prefetch, due_prefetch;
} weighed_unit;

/* The weights of two keys, one from each half of a group: row `k` of their tiles. */
OUTLINE void weigh_pair(const int weight_parts, const int scaled, const int drops, weighed_unit *w) {
    const ptrdiff_t group = w->next / TILE_SIDE, k = w->next % TILE_SIDE;
    const float *const s = w->scores + (group * GROUP_ROWS + k) * LD;
    char *const to = w->weights + group * FASTATTN_GROUP_NBYTES + k * 64;
    VEC x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) x[i] = load(s + i % 2 * TILE_SIDE * LD + i / 2 * LANES) - w->base[i / 2];
    powers(4, scaled, w->factor, x);
    w->sum[0] += x[0] + x[1];
    w->sum[1] += x[2] + x[3];
    if (drops)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const IVEC word = load_words(w->drop_words + group * LD + half * LANES);
            x[2 * half] = select_by_bit(word >> k, x[2 * half], (VEC){});
            x[2 * half + 1] = select_by_bit(word >> (k + TILE_SIDE), x[2 * half + 1], (VEC){});
        }
    store_weights(weight_parts, to, x[0], x[1]);
    store_weights(weight_parts, to + TILE_NBYTES, x[2], x[3]);
    if (k == TILE_SIDE - 1)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            w->total[half] += w->sum[half];
            w->sum[half] = (VEC){};
        }
    w->next++;
}

INLINE void weigh_when_due(const int weight_parts, const int scaled, const int drops, weighed_unit *w) {
    w->due_prefetch += w->n_prefetch;
    for (; w->due_prefetch >= w->n_turns; w->due_prefetch -= w->n_turns, w->prefetch++)
        for (int at = 0; at < FASTATTN_PREFETCH_NBYTES; at += 64) __builtin_prefetch(*w->prefetch + at, 0, 2);
    w->due += w->n;
    while (w->due >= w->n_turns) {
        w->due -= w->n_turns;
        weigh_pair(weight_parts, scaled, drops, w);
    }
}

/* One product of the tile unit: 32 rows by 32 lanes, over n_groups groups of 32. */
typedef struct {
    const char *left, *right;
    int right_parts; /* 3; or 1: there are no others, or they are 0, and so are those on the left */
    float *to;
    ptrdiff_t ld; /* of the rows at `to` */
    ptrdiff_t n_groups;
} tile_job;

/* A turn is four tile products; an operand's tile is loaded with the next turn's right after its last use. */
#define TURN_LEFT(next)                                                                                        \
    do {                                                                                                       \
        TILE_PRODUCT(0, 4, 6);                                                                                 \
        TILE_PRODUCT(1, 4, 7);                                                                                 \
        TILE_LOAD(4, next);                                                                                    \
        TILE_PRODUCT(2, 5, 6);                                                                                 \
        TILE_PRODUCT(3, 5, 7);                                                                                 \
        TILE_LOAD(5, (next) + TILE_NBYTES);                                                                    \
        weigh_when_due(weight_parts, scaled, drops, w);                                                                      \
    } while (0)
#define TURN_RIGHT(next)                                                                                       \
    do {                                                                                                       \
        TILE_PRODUCT(0, 4, 6);                                                                                 \
        TILE_PRODUCT(2, 5, 6);                                                                                 \
        TILE_LOAD(6, next);                                                                                    \
        TILE_PRODUCT(1, 4, 7);                                                                                 \
        TILE_PRODUCT(3, 5, 7);                                                                                 \
        TILE_LOAD(7, (next) + TILE_NBYTES);                                                                    \
        weigh_when_due(weight_parts, scaled, drops, w);                                                                      \
    } while (0)
#define TURN_BOTH(next_left, next_right)                                                                       \
    do {                                                                                                       \
        TILE_PRODUCT(0, 4, 6);                                                                                 \
        TILE_PRODUCT(1, 4, 7);                                                                                 \
        TILE_LOAD(4, next_left);                                                                               \
        TILE_PRODUCT(2, 5, 6);                                                                                 \
        TILE_LOAD(6, next_right);                                                                              \
        TILE_PRODUCT(3, 5, 7);                                                                                 \
        TILE_LOAD(5, (next_left) + TILE_NBYTES);                                                               \
        TILE_LOAD(7, (next_right) + TILE_NBYTES);                                                              \
        weigh_when_due(weight_parts, scaled, drops, w);                                                                      \
    } while (0)
#define TURNS(n_parts, right_parts) ((n_parts) == 3 ? 6 : (right_parts)) /* for each group */

/* The operands of a job's first turn: low parts on the left with high ones on the right, or the only ones with middle
 * ones; where there is one on each side, those of the last group. */
#define LAST(job, of_one) ((job)->right_parts == 3 ? 0 : ((job)->n_groups - 1) * (of_one))
#define FIRST_LEFT(job) ((job)->left + (n_parts == 3 ? 2 * PART : LAST(job, PART)))
#define FIRST_RIGHT(job)                                                                                       \
    ((job)->right + (n_parts == 3 ? 0 : (job)->right_parts == 3 ? PART : LAST(job, FASTATTN_GROUP_NBYTES)))

INLINE void load_first(const int n_parts, const tile_job *job) {
    TILE_LOAD(4, FIRST_LEFT(job));
    TILE_LOAD(5, FIRST_LEFT(job) + TILE_NBYTES);
    TILE_LOAD(6, FIRST_RIGHT(job));
    TILE_LOAD(7, FIRST_RIGHT(job) + TILE_NBYTES);
}

INLINE void zero_sums(void) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
}

/* Runs a job, whose first operands are loaded, and loads those of the next: the smaller products of all groups, then
 * those of the high parts. */
INLINE void multiply(const int n_parts, const int right_parts, const int weight_parts, const int scaled,
                     const int drops, const tile_job *job, const tile_job *next, weighed_unit *w) {
    const char *left = job->left, *right = job->right;
    zero_sums();
    for (ptrdiff_t i = 1; right_parts == 3; i++, left += n_parts * PART, right += FASTATTN_GROUP_NBYTES) {
        if (n_parts == 3) {
            TURN_LEFT(left + PART);
            TURN_RIGHT(right + PART);
            TURN_LEFT(left);
        }
        TURN_RIGHT(right + 2 * PART);
        if (i == job->n_groups) break;
        if (n_parts == 3)
            TURN_BOTH(left + n_parts * PART + 2 * PART, right + FASTATTN_GROUP_NBYTES);
        else
            TURN_BOTH(left + n_parts * PART, right + FASTATTN_GROUP_NBYTES + PART);
    }
    if (right_parts == 3)
        TURN_RIGHT(right);
    else
        left = FIRST_LEFT(job), right = FIRST_RIGHT(job);
    for (ptrdiff_t i = 1; i < job->n_groups; i++) {
        left -= n_parts * PART;
        right -= FASTATTN_GROUP_NBYTES;
        TURN_BOTH(left, right);
    }
    TURN_BOTH(FIRST_LEFT(next), FIRST_RIGHT(next));
    TILE_STORE(0, (char *)job->to, job->ld * 4);
    TILE_STORE(1, (char *)(job->to + LANES), job->ld * 4);
    TILE_STORE(2, (char *)(job->to + TILE_SIDE * job->ld), job->ld * 4);
    TILE_STORE(3, (char *)(job->to + TILE_SIDE * job->ld + LANES), job->ld * 4);
}

/* acc = rescale * acc + change for n_columns columns, or change alone. */
OUTLINE void add_to_acc(float *acc, const float *change, const fastattn_unit *unit, ptrdiff_t n_columns) {
    const VEC scale[2] = {load(unit->rescale), load(unit->rescale + LANES)};
    const int is_first = unit->is_first;
    for (ptrdiff_t at = 0; at < n_columns * LD; at += 2 * LANES)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            VEC x = load(change + at + half * LANES);
            if (!is_first) x += load(acc + at + half * LANES) * scale[half];
            store(acc + at + half * LANES, x);
        }
}

/* The scores of one group of keys are there: -inf past the last key, and the largest of the plain ones. */
OUTLINE void find_max(const fastattn_unit *unit, ptrdiff_t first, VEC top[2]) {
    float *const s = unit->scores + first * LD;
    for (ptrdiff_t j = unit->n_keys - first; j < GROUP_ROWS; j++) {
        store(s + j * LD, splat(-INFINITY));
        store(s + j * LD + LANES, splat(-INFINITY));
    }
    if (first < unit->plain || first >= unit->plain_stop) return;
    VEC more[2] = {top[0], top[1]};
#pragma GCC unroll 16
    for (int j = 0; j < TILE_SIDE; j++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            top[half] = larger(top[half], load(s + j * LD + half * LANES));
            more[half] = larger(more[half], load(s + (TILE_SIDE + j) * LD + half * LANES));
        }
    top[0] = larger(top[0], more[0]);
    top[1] = larger(top[1], more[1]);
}

/* Raises row_max by the unit's scores; its weights are powers relative to it, and what was summed is rescaled. */
OUTLINE void begin_weights(const int scaled, float factor, fastattn_unit *unit, weighed_unit *w) {
    for (int half = 0; half < 2; half++) {
        float *const row_max = unit->row_max + half * LANES;
        const VEC old = load(row_max), top = max(old, load(unit->tile_max + half * LANES));
        const VEC base = select_lanes((IVEC)(top == splat(-INFINITY)), (VEC){}, top);
        VEC scale = old - base;
        powers(1, scaled, factor, &scale);
        store(row_max, top);
        store(unit->rescale + half * LANES, scale);
        w->base[half] = base;
    }
    w->scores = unit->scores;
    w->weights = unit->weights;
    w->drop_words = unit->drop_words;
    w->factor = factor;
    w->n = groups_of(unit->n_keys) * TILE_SIDE;
}

INLINE void run_step(const int n_parts, const int query_parts, const int weight_parts, const int scaled,
                     const int drops, fastattn_unit *scored, fastattn_unit *weighted, fastattn_unit *added, ptrdiff_t head_dim,
                     ptrdiff_t value_dim, float factor) {
    const ptrdiff_t key_groups = groups_of(head_dim);
    const ptrdiff_t n_added = added ? groups_of(value_dim) : 0;
    const ptrdiff_t n_scored = scored ? groups_of(scored->n_keys) : 0;
    const ptrdiff_t added_groups = added ? groups_of(added->n_keys) : 0;
    const ptrdiff_t n_jobs = n_added + n_scored;
    float change[2][GROUP_ROWS * LD] __attribute__((aligned(64)));
    weighed_unit weighing = {.n_turns = TURNS(n_parts, weight_parts) * n_added * added_groups
                                        + TURNS(n_parts, query_parts) * n_scored * key_groups};
    weighed_unit *const w = &weighing;
    VEC top[2] = {};
    if (scored) {
        top[0] = load(scored->tile_max);
        top[1] = load(scored->tile_max + LANES);
        w->prefetch = scored->prefetch;
        w->n_prefetch = scored->n_prefetch;
    }
    if (weighted) begin_weights(scaled, factor, weighted, w);

    /* The i-th product of the step: columns of the accumulators, then groups of keys. */
#define JOB(i)                                                                                                 \
    ((i) < n_added                                                                                             \
         ? (tile_job){added->value + (i) * added->tile_groups * n_parts * PART, added->weights, weight_parts,  \
                       change[(i) % 2], LD, added_groups}                                                      \
         : (tile_job){scored->key + ((i) - n_added) * key_groups * n_parts * PART, scored->query, query_parts, \
                       scored->scores + ((i) - n_added) * GROUP_ROWS * LD, LD, key_groups})
    /* What the vector units do with it, one product later. */
#define AFTER(i)                                                                                               \
    do {                                                                                                       \
        if ((i) < n_added)                                                                                     \
            add_to_acc(added->acc + (i) * GROUP_ROWS * LD, change[(i) % 2], added,                             \
                       value_dim - (i) * GROUP_ROWS < GROUP_ROWS ? value_dim - (i) * GROUP_ROWS : GROUP_ROWS); \
        else                                                                                                   \
            find_max(scored, ((i) - n_added) * GROUP_ROWS, top);                                               \
    } while (0)

    TILE_FENCE();
    if (n_jobs > 0) {
        tile_job job = JOB(0);
        load_first(n_parts, &job);
        for (ptrdiff_t i = 0; i < n_jobs; i++) {
            const tile_job next = i + 1 < n_jobs ? JOB(i + 1) : job;
            if ((i < n_added ? weight_parts : query_parts) == 1)
                multiply(n_parts, 1, weight_parts, scaled, drops, &job, &next, w);
            else
                multiply(n_parts, 3, weight_parts, scaled, drops, &job, &next, w);
            TILE_FENCE();
            if (i > 0) AFTER(i - 1);
            job = next;
        }
        AFTER(n_jobs - 1);
    }
    while (w->next < w->n) weigh_pair(weight_parts, scaled, drops, w);
    TILE_FENCE();
#undef JOB
#undef AFTER

    if (scored) {
        store(scored->tile_max, top[0]);
        store(scored->tile_max + LANES, top[1]);
    }
    if (weighted)
        for (int half = 0; half < 2; half++) {
            float *const sum = weighted->row_sum + half * LANES;
            store(sum, load(sum) * load(weighted->rescale + half * LANES) + w->total[half]);
        }
}

#define STEP(name, n_parts, query_parts, weight_parts, scaled, drops)                                          \
    static __attribute__((noinline)) void name(fastattn_unit *scored, fastattn_unit *weighted,                 \
                                               fastattn_unit *added, ptrdiff_t head_dim,                       \
                                               ptrdiff_t value_dim, float factor) {                            \
        run_step(n_parts, query_parts, weight_parts, scaled, drops, scored, weighted, added, head_dim,         \
                 value_dim, factor);                                                                           \
    }
/* By the parts of keys and values, of queries, and of weights. */
STEP(plain_step_333, 3, 3, 3, 0, 0)
STEP(scaled_step_333, 3, 3, 3, 1, 0)
STEP(dropping_step_333, 3, 3, 3, 1, 1)
STEP(plain_step_133, 1, 3, 3, 0, 0)
STEP(scaled_step_133, 1, 3, 3, 1, 0)
STEP(dropping_step_133, 1, 3, 3, 1, 1)
STEP(scaled_step_113, 1, 1, 3, 1, 0)
STEP(dropping_step_113, 1, 1, 3, 1, 1)
STEP(scaled_step_111, 1, 1, 1, 1, 0)
STEP(dropping_step_111, 1, 1, 1, 1, 1)
#undef STEP

static void step(fastattn_unit *scored, fastattn_unit *weighted, fastattn_unit *added, ptrdiff_t head_dim,
                 ptrdiff_t value_dim, float exponent_factor) {
    const fastattn_unit *const any = scored ? scored : weighted ? weighted : added;
    const int drops = weighted && weighted->drop_words, scaled = exponent_factor != 1;
#define CHOOSE(parts, otherwise) (drops ? dropping_step_##parts : scaled ? scaled_step_##parts : otherwise)
    (any->n_parts == 3        ? CHOOSE(333, plain_step_333)
     : any->query_parts == 3  ? CHOOSE(133, plain_step_133)
     : any->weight_parts == 3 ? CHOOSE(113, scaled_step_113)
                              : CHOOSE(111, scaled_step_111))(scored, weighted, added, head_dim, value_dim,
                                                              exponent_factor);
#undef CHOOSE
}

INLINE void score_keys(const int n_parts, float *scores, ptrdiff_t ld, const char *query, const char *key,
                       ptrdiff_t n_keys, ptrdiff_t head_dim) {
    const ptrdiff_t n_groups = groups_of(head_dim);
    weighed_unit none = {.n_turns = 1};
    tile_job job = {key, query, 3, scores, ld, n_groups};
    TILE_FENCE();
    load_first(n_parts, &job);
    for (ptrdiff_t j = 0; j < n_keys; j += GROUP_ROWS) {
        tile_job next = job;
        next.left += j + GROUP_ROWS < n_keys ? n_groups * n_parts * PART : 0;
        next.to += GROUP_ROWS * ld;
        multiply(n_parts, 3, 3, 0, 0, &job, &next, &none);
        job = next;
    }
    TILE_FENCE();
}

static void score(float *scores, ptrdiff_t ld, const char *query, const char *key, int n_parts,
                  ptrdiff_t n_keys, ptrdiff_t head_dim) {
    if (n_parts == 1)
        score_keys(1, scores, ld, query, key, n_keys, head_dim);
    else
        score_keys(3, scores, ld, query, key, n_keys, head_dim);
}

static double peak(long steps) {
    static const uint32_t numbers[TILE_NBYTES / 4] = {[0 ... TILE_NBYTES / 4 - 1] = 0x3f013efe};
    enum { PRODUCTS = 16, OF_A_FLOAT = 6 };
    TILE_FENCE();
    TILE_LOAD(4, numbers);
    TILE_LOAD(5, numbers);
    TILE_LOAD(6, numbers);
    TILE_LOAD(7, numbers);
    zero_sums();
    for (long step = 0; step < steps; step++)
#pragma GCC unroll 4
        for (int i = 0; i < PRODUCTS / 4; i++) {
            TILE_PRODUCT(0, 4, 6);
            TILE_PRODUCT(1, 4, 7);
            TILE_PRODUCT(2, 5, 6);
            TILE_PRODUCT(3, 5, 7);
        }
    TILE_FENCE();
    return (double)steps * PRODUCTS * (2.0 * TILE_SIDE * TILE_SIDE * GROUP_ROWS) / OF_A_FLOAT;
}

const fastattn_fused CONCAT(fastattn_fused, FASTATTN_ISA) = {
    .begin = tiles_begin,
    .end = tiles_end,
    .split_queries = split_queries,
    .split_keys = split_keys,
    .split_values = split_values,
    .score = score,
    .step = step,
    .peak = peak,
};
