# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, freethreading_compatible=True
"""The driver: it knows tiles, masks and threads; the kernels below it know registers.

Query rows are lanes. The query heads of one key/value head are rows of one list, row = i * group + g, so
that each key and value is read once for all of them. A task is one block of that list: it packs its query
rows as columns, then walks the key tiles that any of its rows may attend, each in the stages

    mask words -> score -> adjust (soft-cap, bias, mask) -> softmax -> accumulate

and writes the rows out. FlashAttention-2's Algorithm 1 (Dao, 2023) with the lanes turned: no reduction
ever crosses a lane, so a row's bits depend on its own keys and on the tile grid alone, not on the block it
stands in, the thread that runs it, or the batch around it.
"""

from cython.parallel cimport parallel, prange
from libc.math cimport INFINITY, isfinite, sqrt
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

cimport numpy as cnp

import os

cdef extern from "kernels.h" nogil:
    enum: KEY_CHUNK "FASTATTN_KEY_CHUNK"
    ctypedef struct fastattn_kernels:
        const char *isa
        int lanes
        int max_vectors
        void (*pack)(void *, Py_ssize_t, const char *const *, Py_ssize_t, Py_ssize_t, double) noexcept nogil
        void (*score)(void *, void *, const void *, Py_ssize_t, int, const char *, const Py_ssize_t *, Py_ssize_t,
                      Py_ssize_t, Py_ssize_t, Py_ssize_t) noexcept nogil
        void (*adjust)(void *, void *, Py_ssize_t, const Py_ssize_t *, double, const char *const *,
                       const uint32_t *) noexcept nogil
        void (*softmax)(void *, const void *, void *, void *, void *, Py_ssize_t, const Py_ssize_t *, Py_ssize_t,
                        double) noexcept nogil
        void (*accumulate)(void *, const void *, const void *, Py_ssize_t, int, const char *, const Py_ssize_t *,
                           Py_ssize_t, Py_ssize_t, Py_ssize_t, Py_ssize_t, const char *const *, Py_ssize_t,
                           Py_ssize_t) noexcept nogil
        void (*accumulate_isolated)(void *, const void *, const void *, Py_ssize_t, const char *, const Py_ssize_t *,
                                    Py_ssize_t, Py_ssize_t, Py_ssize_t, Py_ssize_t, const char *const *,
                                    const uint32_t *, void *) noexcept nogil
        void (*finish)(void *, void *, const void *, const void *, Py_ssize_t, double) noexcept nogil
        int (*unpack)(char *const *, Py_ssize_t, Py_ssize_t, const void *, Py_ssize_t, Py_ssize_t,
                      const void *) noexcept nogil
        void (*mask_words)(uint32_t *, Py_ssize_t, const char *const *, Py_ssize_t, int, Py_ssize_t) noexcept nogil
        double (*fma_peak)(long) noexcept nogil
        double (*integer_peak)(long) noexcept nogil
    const fastattn_kernels *fastattn_find_kernels(const char *, int)

cdef extern from "convert.h" nogil:
    void fastattn_convert_row(char *, int, const char *, int, int, Py_ssize_t, Py_ssize_t)

cdef extern from *:
    """
    #ifdef _OPENMP
    #include <omp.h>
    #define FASTATTN_HAVE_OPENMP 1
    static int fastattn_openmp_limit(void) { return omp_get_max_threads(); }
    #else
    #define FASTATTN_HAVE_OPENMP 0
    static int fastattn_openmp_limit(void) { return 1; }
    #endif
    """
    int fastattn_openmp_limit() noexcept nogil
    const bint HAVE_OPENMP "FASTATTN_HAVE_OPENMP"

cnp.import_array()

cdef double LOG2E = 1.4426950408889634074
cdef uint32_t ALL_BITS = 0xffffffff

# Words hold the mask bits of 32 keys; tile maps come in masks.TILE_Q queries by masks.TILE_K keys.
cdef enum:
    WORD = 32
    KEY_STEP = 4             # a block's keys start at a multiple of this, as `first_chunk` of the kernels wants
    MAX_LEAD = 64
    FETCH_PER_COLUMN = 8     # bytes at each address that `accumulate` is sure to ask for, per column of value
    TILES_FULL = -1
    TILES_EMPTY = -2

cdef enum TileState:
    TILE_EMPTY
    TILE_FULL
    TILE_PARTIAL


cdef struct View:
    # An array with axes (*lead, head, row, column), in bytes. data is NULL when the problem has none.
    char *data
    Py_ssize_t lead[MAX_LEAD]
    Py_ssize_t head
    Py_ssize_t row
    Py_ssize_t col


cdef struct Job:
    const fastattn_kernels *kernels
    Py_ssize_t itemsize
    int n_lead
    Py_ssize_t lead_shape[MAX_LEAD]
    Py_ssize_t batch, num_heads, num_kv_heads, group_size, len_q, len_k, head_dim, value_dim
    View query, key, value, out, lse, weights, bias, dense, key_start, key_stop, tile_index
    char *sinks
    const uint32_t *tile_bits
    Py_ssize_t tile_q, tile_k
    int bias_size, dense_size
    bint bias_swapped, convert_bias
    double query_factor      # what the packed query is multiplied by
    double softcap           # 0 when there is none; in the domain of the scores
    double exponent_factor   # see kernels.h: 1 in the log2 domain, log2(e) in the natural one
    Py_ssize_t block_k
    Py_ssize_t score_chunk
    Py_ssize_t n_vectors     # vectors of lanes that the rows of one key/value head fill
    Py_ssize_t n_blocks      # blocks that they are cut into
    Py_ssize_t max_lanes     # lanes of the widest block
    Py_ssize_t n_tasks       # batch items times key/value heads times blocks
    bint is_masked           # by intervals, an array or tiles
    bint out_of_memory       # set by a thread that could not have its tiles


cdef struct Scratch:
    # One thread's tiles; see kernels.h for their layout.
    char *query
    char *scores
    char *acc
    char *converted      # bias rows in the compute type
    char *empty          # -inf in every lane
    char *tile_max
    char *row_max
    char *row_sum
    char *rescale
    char *inverse
    char *lse
    uint32_t *words
    char **rows          # whichever rows are being packed, tested or written
    char **out_rows
    char **bias_rows
    const char **fetch   # addresses that memory is asked for ahead of their use
    Py_ssize_t *start
    Py_ssize_t *stop
    Py_ssize_t *stops    # keys of the tile at hand for each vector of lanes, see kernels.h
    Py_ssize_t *part_stops  # the same for a part of the tile
    Py_ssize_t *row_i
    Py_ssize_t *row_h


cdef struct Block:
    # The query rows of one task, and where its batch item starts in each array.
    Py_ssize_t ld, n_rows
    int n_vectors
    Py_ssize_t low, high     # no lane attends a key outside; low is a multiple of KEY_STEP
    Py_ssize_t all_start, all_stop  # every lane's interval allows the keys inside
    Py_ssize_t n_fetch, fetch_nbytes
    char *key
    char *value
    char *bias
    char *dense
    char *tile_index
    char *key_start
    char *key_stop
    char *weights


cdef struct Place:
    # Which rows a task works on.
    Py_ssize_t item, kv, first_row, n_rows
    int n_vectors


cdef inline char *at_item(const Job *job, const View *view, Py_ssize_t item) noexcept nogil:
    cdef char *p = view.data
    cdef int axis
    if p == NULL or job.n_lead == 0:
        return p
    for axis in range(job.n_lead - 1, 0, -1):
        p += item % job.lead_shape[axis] * view.lead[axis]
        item = item // job.lead_shape[axis]
    return p + item * view.lead[0]


cdef inline char *lane_row(const Scratch *w, const View *view, char *item, Py_ssize_t lane) noexcept nogil:
    return item + w.row_h[lane] * view.head + w.row_i[lane] * view.row


cdef inline const char *const *bias_of(const Job *job, const Scratch *w) noexcept nogil:
    return <const char *const *>w.bias_rows if job.bias.data != NULL else NULL


cdef inline const uint32_t *words_of(const Scratch *w, TileState state) noexcept nogil:
    return w.words if state == TILE_PARTIAL else NULL


cdef inline void set_real(char *to, double x, Py_ssize_t itemsize) noexcept nogil:
    if itemsize == 4:
        (<float *>to)[0] = <float>x
    else:
        (<double *>to)[0] = x


cdef inline Py_ssize_t padded(Py_ssize_t nbytes) noexcept nogil:
    return (nbytes + 63) & ~<Py_ssize_t>63


cdef Py_ssize_t lay_out(const Job *job, char *base, Scratch *w) noexcept nogil:
    """Places one thread's tiles from base on; returns the bytes they need."""
    cdef Py_ssize_t ld = job.max_lanes
    cdef Py_ssize_t line = padded(ld * job.itemsize)
    cdef Py_ssize_t tile = padded(job.block_k * ld * job.itemsize)
    cdef Py_ssize_t pointers = padded(ld * sizeof(char *))
    cdef char *p = base
    w.query = p; p += padded(job.head_dim * ld * job.itemsize)
    w.scores = p; p += tile
    w.acc = p; p += padded(job.value_dim * ld * job.itemsize)
    w.empty = p; p += line
    w.tile_max = p; p += line
    w.row_max = p; p += line
    w.row_sum = p; p += line
    w.rescale = p; p += line
    w.inverse = p; p += 2 * line
    w.lse = p; p += line
    w.words = <uint32_t *>p; p += padded((job.block_k // WORD) * ld * sizeof(uint32_t))
    w.rows = <char **>p; p += pointers
    w.out_rows = <char **>p; p += pointers
    w.bias_rows = <char **>p; p += pointers
    w.fetch = <const char **>p; p += 2 * pointers + padded(job.block_k * sizeof(char *))
    w.start = <Py_ssize_t *>p; p += pointers
    w.stop = <Py_ssize_t *>p; p += pointers
    w.stops = <Py_ssize_t *>p; p += pointers
    w.part_stops = <Py_ssize_t *>p; p += pointers
    w.row_i = <Py_ssize_t *>p; p += pointers
    w.row_h = <Py_ssize_t *>p; p += pointers
    w.converted = p
    if job.convert_bias:
        p += tile
    return p - base


cdef char *new_scratch(const Job *job, Scratch *w) noexcept nogil:
    """The memory behind w, to be freed, or NULL."""
    cdef Py_ssize_t lane
    cdef char *memory = <char *>malloc(lay_out(job, NULL, w) + 64)
    if memory == NULL:
        return NULL
    lay_out(job, <char *>((<size_t>memory + 63) & ~<size_t>63), w)
    for lane in range(job.max_lanes):
        set_real(w.empty + lane * job.itemsize, -INFINITY, job.itemsize)
    return memory


cdef inline uint32_t span_word(Py_ssize_t start, Py_ssize_t stop) noexcept nogil:
    """Bits start..stop-1 of a word; bounds outside 0..32 are clipped."""
    if start < 0:
        start = 0
    if stop > WORD:
        stop = WORD
    if start >= stop:
        return 0
    return (<uint32_t>0xffffffff >> (WORD - (stop - start))) << start


cdef TileState mask_tile(const Job *job, Scratch *w, const Block *block, Py_ssize_t key0, Py_ssize_t n_keys,
                         bint whole, Py_ssize_t *plain, Py_ssize_t *plain_stop) noexcept nogil:
    """Which of the keys key0.. each lane may attend, and whether that is none or all.

    Where it is some, w.words say which. The scores plain .. plain_stop - 1 need no adjusting, and have no words.
    w.stops say where the keys of a vector of lanes end; whole: every vector has all keys of the tile.
    With a tile map key0 is a multiple of 32, so that a word never straddles two of its tiles.
    """
    cdef Py_ssize_t lane, j, key, ld = block.ld, n_words = (n_keys + WORD - 1) // WORD
    cdef Py_ssize_t first = 0, last = 0   # words of the plain scores
    cdef uint32_t every = ALL_BITS, some = 0, word, valid
    cdef int32_t entry
    cdef const char *index
    cdef bint intervals_only = job.dense.data == NULL and job.tile_index.data == NULL
    cdef bint masks_only = job.bias.data == NULL and job.softcap == 0
    plain[0] = 0
    plain_stop[0] = n_keys if masks_only else 0
    for j in range(block.n_vectors):
        w.stops[j] = n_keys
    if not job.is_masked:
        return TILE_FULL
    if intervals_only:
        if block.all_start <= key0 and block.all_stop >= key0 + n_keys:
            return TILE_FULL
        if masks_only and not whole:
            first = (max(block.all_start - key0, 0) + WORD - 1) // WORD
            last = min(block.all_stop - key0, n_keys) // WORD
            if first >= last:
                first = last = 0

    for j in range(n_words):
        if first <= j < last:
            continue
        key = key0 + j * WORD
        for lane in range(ld):
            w.words[j * ld + lane] = span_word(w.start[lane] - key, w.stop[lane] - key)
    if job.dense.data != NULL:
        for lane in range(ld):
            w.rows[lane] = lane_row(w, &job.dense, block.dense, lane) + key0 * job.dense.col
        job.kernels.mask_words(w.words, ld, <const char *const *>w.rows, job.dense.col, job.dense_size, n_keys)
    if job.tile_index.data != NULL:
        for lane in range(ld):
            index = (block.tile_index + w.row_h[lane] * job.tile_index.head
                     + w.row_i[lane] // job.tile_q * job.tile_index.row)
            for j in range(n_words):
                key = key0 + j * WORD
                entry = (<const int32_t *>(index + key // job.tile_k * job.tile_index.col))[0]
                if entry == TILES_EMPTY:
                    w.words[j * ld + lane] = 0
                elif entry != TILES_FULL:
                    w.words[j * ld + lane] &= job.tile_bits[
                        (entry * job.tile_q + w.row_i[lane] % job.tile_q) * (job.tile_k // WORD)
                        + key % job.tile_k // WORD]

    if first == last:
        for j in range(n_words):
            valid = span_word(0, n_keys - j * WORD)
            for lane in range(ld):
                word = w.words[j * ld + lane] & valid
                some |= word
                every &= word | ~valid
        if some == 0:
            return TILE_EMPTY
        if every == ALL_BITS:
            return TILE_FULL
    plain[0] = first * WORD
    plain_stop[0] = last * WORD
    if not whole:
        # No vector's keys end before those of the one in front of it.
        key = 0
        for lane in range(ld):
            key = max(key, w.stop[lane] - key0)
            w.stops[lane // job.kernels.lanes] = min(key, n_keys)
    return TILE_PARTIAL


cdef void find_bias_rows(const Job *job, Scratch *w, const Block *block, Py_ssize_t key0,
                         Py_ssize_t n_keys) noexcept nogil:
    """The bias of each lane at the tile's keys, in the compute type and without gaps: in place, or converted."""
    cdef Py_ssize_t lane
    cdef char *row
    for lane in range(block.ld):
        row = lane_row(w, &job.bias, block.bias, lane) + key0 * job.bias.col
        w.bias_rows[lane] = row
        if job.convert_bias:
            w.bias_rows[lane] = w.converted + lane * n_keys * job.itemsize
            fastattn_convert_row(w.bias_rows[lane], <int>job.itemsize, row, job.bias_size, job.bias_swapped,
                                 job.bias.col, n_keys)


cdef inline void score_keys(const Job *job, Scratch *w, const Block *block, char *tile_max, Py_ssize_t key0,
                            Py_ssize_t first, Py_ssize_t n_keys) noexcept nogil:
    """Raw scores of the keys first .. first + n_keys - 1 of the tile at key0, as far as each vector has them.

    Leaves in w.part_stops where the vectors' keys end in this part of the tile.
    """
    cdef Py_ssize_t j
    for j in range(block.n_vectors):
        w.part_stops[j] = min(max(w.stops[j] - first, 0), n_keys)
    if w.part_stops[block.n_vectors - 1] > 0:
        job.kernels.score(w.scores + first * block.ld * job.itemsize, tile_max, w.query, block.ld, block.n_vectors,
                          block.key + (key0 + first) * job.key.row, w.part_stops, job.head_dim, job.key.row,
                          job.key.col, job.score_chunk)


cdef inline void adjusted_scores(const Job *job, Scratch *w, const Block *block, TileState state, Py_ssize_t key0,
                                 Py_ssize_t first, Py_ssize_t n_keys) noexcept nogil:
    """`score_keys` and what is to be done to raw scores; first is 0 where there is a bias."""
    cdef const uint32_t *words = words_of(w, state)
    if n_keys <= 0:
        return
    score_keys(job, w, block, NULL, key0, first, n_keys)
    job.kernels.adjust(w.scores + first * block.ld * job.itemsize, w.tile_max, block.ld, w.part_stops, job.softcap,
                       bias_of(job, w), NULL if words == NULL else words + first // WORD * block.ld)


cdef TileState score_tile(const Job *job, Scratch *w, const Block *block, Py_ssize_t key0, Py_ssize_t n_keys,
                          bint whole) noexcept nogil:
    """Scores of one key tile, masked, into w.scores; nothing where the tile is empty. whole: see `mask_tile`."""
    cdef Py_ssize_t plain, plain_stop
    cdef TileState state = mask_tile(job, w, block, key0, n_keys, whole, &plain, &plain_stop)
    if state == TILE_EMPTY:
        return state
    memcpy(w.tile_max, w.empty, block.ld * job.itemsize)
    if job.bias.data != NULL:
        find_bias_rows(job, w, block, key0, n_keys)
    adjusted_scores(job, w, block, state, key0, 0, plain)
    score_keys(job, w, block, w.tile_max, key0, plain, plain_stop - plain)
    adjusted_scores(job, w, block, state, key0, plain_stop, n_keys - plain_stop)
    return state


cdef void fetch_rows(const Job *job, Scratch *w, Block *block, const View *view, char *item, Py_ssize_t itemsize,
                     Py_ssize_t key0, Py_ssize_t n_keys) noexcept nogil:
    """Has memory asked for the keys key0.. of the block's rows in a bias or mask, as far as the list reaches."""
    cdef Py_ssize_t lane, at, nbytes = n_keys * itemsize, step = FETCH_PER_COLUMN * job.value_dim
    cdef char *row
    cdef char *last = NULL
    if view.data == NULL or view.col != itemsize or step == 0:
        return
    block.fetch_nbytes = max(block.fetch_nbytes, min(step, nbytes))
    for lane in range(block.n_rows):
        row = lane_row(w, view, item, lane) + key0 * itemsize
        if row == last:
            continue
        last = row
        at = 0
        while at < nbytes:
            if block.n_fetch == job.block_k:
                return
            w.fetch[block.n_fetch] = row + at
            block.n_fetch += 1
            at += step


cdef bint attend(const Job *job, Scratch *w, Block *block, char *clean) noexcept nogil:
    """The online softmax and value accumulation over every key tile of the block.

    clean: room for one tile of values where NaN and inf in them must be kept from lanes that may not read
    them, else NULL. Returns whether any tile was one where only some lanes may read a key.
    """
    cdef const fastattn_kernels *kernels = job.kernels
    cdef Py_ssize_t key0, n_keys, n_next, first_chunk, tile = block.low // job.block_k * job.block_k
    cdef bint first = True, partial = False
    cdef TileState state
    cdef char *rescale
    cdef char *values
    while tile < block.high:
        key0 = max(tile, block.low)
        tile += job.block_k
        n_keys = min(tile, block.high) - key0
        state = score_tile(job, w, block, key0, n_keys, clean != NULL)
        if state == TILE_EMPTY:
            continue
        partial |= state == TILE_PARTIAL or job.bias.data != NULL
        first_chunk = KEY_CHUNK - key0 % KEY_CHUNK
        kernels.softmax(w.scores, w.tile_max, w.row_max, w.row_sum, w.rescale, block.ld, w.stops, first_chunk,
                        job.exponent_factor)
        rescale = NULL if first else w.rescale
        values = block.value + key0 * job.value.row
        first = False
        if clean != NULL:
            kernels.accumulate_isolated(w.acc, w.scores, rescale, block.ld, values, w.stops, first_chunk,
                                        job.value_dim, job.value.row, job.value.col, bias_of(job, w),
                                        words_of(w, state), clean)
        else:
            n_next = min(tile + job.block_k, block.high) - tile
            if n_next > 0:
                fetch_rows(job, w, block, &job.bias, block.bias, job.bias_size, tile, n_next)
                fetch_rows(job, w, block, &job.dense, block.dense, job.dense_size, tile, n_next)
            kernels.accumulate(w.acc, w.scores, rescale, block.ld, block.n_vectors, values, w.stops,
                               first_chunk, job.value_dim, job.value.row, job.value.col, w.fetch, block.n_fetch,
                               block.fetch_nbytes)
            block.n_fetch = 0
    if first:
        memset(w.acc, 0, job.value_dim * block.ld * job.itemsize)
    return partial


cdef void write_weights(const Job *job, Scratch *w, const Block *block) noexcept nogil:
    """The weights of the block's rows: its scores once more, against the row_max and row_sum now known."""
    cdef Py_ssize_t key0, n_keys, lane, tile = block.low // job.block_k * job.block_k
    for lane in range(block.n_rows):
        memset(lane_row(w, &job.weights, block.weights, lane), 0, job.len_k * job.itemsize)
    while tile < block.high:
        key0 = max(tile, block.low)
        tile += job.block_k
        n_keys = min(tile, block.high) - key0
        if score_tile(job, w, block, key0, n_keys, True) == TILE_EMPTY:
            continue
        # Against an empty tile_max row_max stays; what softmax does to row_sum no longer matters.
        job.kernels.softmax(w.scores, w.empty, w.row_max, w.row_sum, w.rescale, block.ld, w.stops, KEY_CHUNK,
                            job.exponent_factor)
        for lane in range(block.ld):
            w.rows[lane] = lane_row(w, &job.weights, block.weights, lane) + key0 * job.itemsize
        job.kernels.unpack(w.rows, job.itemsize, block.n_rows, w.scores, block.ld, n_keys, w.inverse)


cdef void start_rows(const Job *job, Scratch *w, const Block *block) noexcept nogil:
    """The state before any key: a sink is one logit already seen, without a value."""
    cdef Py_ssize_t lane, size = job.itemsize
    memcpy(w.row_max, w.empty, block.ld * size)
    memset(w.row_sum, 0, block.ld * size)
    if job.sinks == NULL:
        return
    for lane in range(block.ld):
        if size == 4:
            (<float *>w.row_max)[lane] = (<float *>job.sinks)[w.row_h[lane]]
            (<float *>w.row_sum)[lane] = 1
        else:
            (<double *>w.row_max)[lane] = (<double *>job.sinks)[w.row_h[lane]]
            (<double *>w.row_sum)[lane] = 1


cdef void find_rows(const Job *job, Scratch *w, Block *block, Py_ssize_t kv, Py_ssize_t first_row) noexcept nogil:
    """Each lane's query row, head and key interval; lanes past n_rows repeat the last row."""
    cdef Py_ssize_t lane, i = first_row // job.group_size, g = first_row % job.group_size
    cdef const int64_t *start
    cdef const int64_t *stop
    for lane in range(block.ld):
        if 0 < lane < block.n_rows:
            g += 1
            if g == job.group_size:
                g = 0
                i += 1
        w.row_i[lane] = i
        w.row_h[lane] = kv * job.group_size + g
    block.low = block.all_start = 0
    block.high = block.all_stop = job.len_k
    if not job.is_masked:
        return
    block.low = job.len_k
    block.high = 0
    for lane in range(block.ld):
        i = w.row_i[lane]
        w.start[lane] = 0
        w.stop[lane] = job.len_k
        if job.key_start.data != NULL:
            w.start[lane] = (<const int64_t *>(block.key_start + i * job.key_start.row))[0]
            w.stop[lane] = (<const int64_t *>(block.key_stop + i * job.key_stop.row))[0]
        if w.start[lane] < w.stop[lane]:
            block.low = min(block.low, w.start[lane])
            block.high = max(block.high, w.stop[lane])
        block.all_start = max(block.all_start, w.start[lane])
        block.all_stop = min(block.all_stop, w.stop[lane])
    # Sums are cut at the same keys whichever rows share the block.
    block.low -= block.low % (KEY_STEP if job.tile_index.data == NULL else WORD)


cdef inline Place find_place(const Job *job, Py_ssize_t task) noexcept nogil:
    cdef Place place
    cdef Py_ssize_t block = task % job.n_blocks, kv_item = task // job.n_blocks
    place.kv = kv_item % job.num_kv_heads
    place.item = kv_item // job.num_kv_heads
    # The last block first: under a causal mask it is the longest, and the short ones end the work.
    block = job.n_blocks - 1 - block
    place.first_row = block * job.n_vectors // job.n_blocks * job.kernels.lanes
    place.n_vectors = <int>((block + 1) * job.n_vectors // job.n_blocks - block * job.n_vectors // job.n_blocks)
    place.n_rows = min(place.n_vectors * job.kernels.lanes, job.len_q * job.group_size - place.first_row)
    return place


cdef void find_fetches(const Job *job, Scratch *w, Block *block, Py_ssize_t task) noexcept nogil:
    """The rows that memory is asked for while the block is worked on: its outputs, and the next task's queries.

    Both are far apart and touched all at once, so that a core would only wait for them.
    """
    cdef Place place
    cdef Py_ssize_t row, i, g
    cdef char *item
    block.n_fetch = 0
    block.fetch_nbytes = max(job.head_dim, job.value_dim) * job.itemsize
    if job.out.col == job.itemsize:
        for row in range(block.n_rows):
            w.fetch[row] = w.out_rows[row]
        block.n_fetch = block.n_rows
    if job.query.col == job.itemsize and task < job.n_tasks:
        place = find_place(job, task)
        item = at_item(job, &job.query, place.item) + place.kv * job.group_size * job.query.head
        i = place.first_row // job.group_size
        g = place.first_row % job.group_size
        for row in range(place.n_rows):
            w.fetch[block.n_fetch + row] = item + g * job.query.head + i * job.query.row
            g += 1
            if g == job.group_size:
                g = 0
                i += 1
        block.n_fetch += place.n_rows


cdef void run_task(Job *job, Scratch *w, Py_ssize_t task) noexcept nogil:
    """One block of query rows of one key/value head of one batch item, from its query to its outputs."""
    cdef const fastattn_kernels *kernels = job.kernels
    cdef Block block
    cdef Place place = find_place(job, task)
    cdef Py_ssize_t lane, item = place.item, kv = place.kv
    cdef bint partial
    cdef char *item_rows
    cdef char *clean
    block.n_vectors = place.n_vectors
    block.ld = place.n_vectors * kernels.lanes
    block.n_rows = place.n_rows
    block.key = at_item(job, &job.key, item) + kv * job.key.head
    block.value = at_item(job, &job.value, item) + kv * job.value.head
    block.bias = at_item(job, &job.bias, item)
    block.dense = at_item(job, &job.dense, item)
    block.tile_index = at_item(job, &job.tile_index, item)
    block.key_start = at_item(job, &job.key_start, item)
    block.key_stop = at_item(job, &job.key_stop, item)
    block.weights = at_item(job, &job.weights, item)
    find_rows(job, w, &block, kv, place.first_row)

    item_rows = at_item(job, &job.query, item)
    for lane in range(block.ld):
        w.rows[lane] = lane_row(w, &job.query, item_rows, lane)
    kernels.pack(w.query, block.ld, <const char *const *>w.rows, job.query.col, job.head_dim, job.query_factor)
    item_rows = at_item(job, &job.out, item)
    for lane in range(block.ld):
        w.out_rows[lane] = lane_row(w, &job.out, item_rows, lane)
    find_fetches(job, w, &block, task + 1)
    start_rows(job, w, &block)
    partial = attend(job, w, &block, NULL)
    kernels.finish(w.inverse, w.lse if job.lse.data != NULL else NULL, w.row_max, w.row_sum, block.ld,
                   job.exponent_factor)

    if kernels.unpack(w.out_rows, job.out.col, block.n_rows, w.acc, block.ld, job.value_dim, w.inverse) and partial:
        # NaN came out where some lanes may not read every value: 0 * NaN of a masked key may be the cause.
        clean = <char *>malloc(job.block_k * job.value_dim * job.itemsize)
        if clean == NULL:
            job.out_of_memory = True
            return
        start_rows(job, w, &block)
        attend(job, w, &block, clean)
        free(clean)
        kernels.unpack(w.out_rows, job.out.col, block.n_rows, w.acc, block.ld, job.value_dim, w.inverse)

    if job.lse.data != NULL:
        item_rows = at_item(job, &job.lse, item)
        for lane in range(block.n_rows):
            memcpy(lane_row(w, &job.lse, item_rows, lane), w.lse + lane * job.itemsize, job.itemsize)
    if job.weights.data != NULL:
        write_weights(job, w, &block)


cdef void run_job(Job *job, int num_threads) noexcept nogil:
    """Every task, on num_threads threads. Which thread takes which changes nothing in the result."""
    cdef Py_ssize_t task, n_tasks = job.n_tasks
    cdef Scratch *w = NULL
    cdef char *memory = NULL
    # Small tasks are handed out a few at a time.
    cdef Py_ssize_t chunk = max(<Py_ssize_t>1, n_tasks // (num_threads * 32))
    if num_threads <= 1:
        w = <Scratch *>malloc(sizeof(Scratch))
        memory = new_scratch(job, w) if w != NULL else NULL
        if memory == NULL:
            job.out_of_memory = True
        else:
            for task in range(n_tasks):
                run_task(job, w, task)
        free(memory)
        free(w)
        return
    with parallel(num_threads=num_threads):
        w = <Scratch *>malloc(sizeof(Scratch))
        memory = new_scratch(job, w) if w != NULL else NULL
        if memory == NULL:
            job.out_of_memory = True
        for task in prange(n_tasks, schedule="dynamic", chunksize=chunk):
            if memory != NULL:
                run_task(job, w, task)
        free(memory)
        free(w)


cdef const fastattn_kernels *chosen[2]   # for float32 and float64
chosen[0] = chosen[1] = NULL

ISAS = ("avx512", "avx2", "neon", "portable")  # best first

cdef bint forked = False


def _in_child():
    # libgomp's worker threads do not exist in a forked child, and a parallel region there would wait for them.
    global forked
    forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)

cdef int openmp_default = fastattn_openmp_limit()


def available_isas():
    """Names of the instruction sets that were built and that this CPU runs, best first."""
    return [name for name in ISAS if fastattn_find_kernels(name.encode(), 4) != NULL]


def choose_isa(str name):
    """Makes every later call use the kernels built for this instruction set."""
    cdef bytes encoded = name.encode()
    cdef const fastattn_kernels *single = fastattn_find_kernels(encoded, 4)
    cdef const fastattn_kernels *double_ = fastattn_find_kernels(encoded, 8)
    if single == NULL or double_ == NULL:
        raise ValueError(f"instruction set {name!r} is not available here; available: {available_isas()}")
    chosen[0] = single
    chosen[1] = double_


def chosen_isa():
    """The name of the instruction set in use."""
    return chosen[0].isa.decode()


def block_q(Py_ssize_t itemsize):
    """Query rows in the widest block of the instruction set in use, for elements of this size."""
    cdef const fastattn_kernels *kernels = chosen[itemsize == 8]
    return kernels.lanes * kernels.max_vectors


def thread_limit(int num_threads):
    """num_threads, less where this process may not have so many.

    One in a forked child and without OpenMP. A limit set on OpenMP since the import (threadpoolctl, or
    omp_set_num_threads) holds; OpenMP's own default does not.
    """
    cdef int limit = fastattn_openmp_limit()
    if forked or not HAVE_OPENMP:
        return 1
    return num_threads if limit == openmp_default else min(num_threads, limit)


def peak_operations(Py_ssize_t itemsize, int num_threads, long steps):
    """Operations done by num_threads threads that run at least `steps` steps of one kind in all.

    FLOPs of multiply-adds on elements of this size, or additions of integers where itemsize is 0. Handed out in
    pieces, as the tasks of `run_job` are: a core that is held up does fewer of them.
    """
    cdef const fastattn_kernels *kernels = chosen[itemsize == 8]
    cdef double (*run_steps)(long) noexcept nogil
    cdef double operations = 0
    cdef int piece, pieces = 32 * num_threads
    run_steps = kernels.integer_peak if itemsize == 0 else kernels.fma_peak
    with nogil:
        for piece in prange(pieces, num_threads=num_threads, schedule="dynamic", chunksize=1):
            operations += run_steps(steps // pieces + 1)
    return operations


cdef int set_view(View *view, cnp.ndarray array, int n_lead) except -1:
    """Axes (*lead, head, row, column); an array with fewer than three behind the lead has no head axis."""
    cdef int axis, behind = array.ndim - n_lead
    if n_lead > MAX_LEAD:
        raise ValueError(f"too many leading axes: {n_lead}")
    view.data = <char *>cnp.PyArray_DATA(array)
    for axis in range(n_lead):
        view.lead[axis] = array.strides[axis]
    view.col = array.strides[array.ndim - 1]
    view.row = array.strides[array.ndim - 2] if behind == 3 else view.col
    view.head = array.strides[n_lead] if behind == 3 else 0
    return 0


cdef int set_arrays(Job *job, cnp.ndarray query, cnp.ndarray key, cnp.ndarray value, cnp.ndarray out) except -1:
    """The four arrays that every problem has, and the sizes, into an empty job."""
    cdef int axis, n_lead = query.ndim - 3
    memset(job, 0, sizeof(Job))
    job.n_lead = n_lead
    set_view(&job.query, query, n_lead)
    set_view(&job.key, key, n_lead)
    set_view(&job.value, value, n_lead)
    set_view(&job.out, out, n_lead)
    job.batch = 1
    for axis in range(n_lead):
        job.lead_shape[axis] = query.shape[axis]
        job.batch *= query.shape[axis]
    job.num_heads = query.shape[n_lead]
    job.num_kv_heads = key.shape[n_lead]
    job.group_size = job.num_heads // job.num_kv_heads if job.num_kv_heads else 1
    job.len_q = query.shape[n_lead + 1]
    job.len_k = key.shape[n_lead + 1]
    job.head_dim = query.shape[n_lead + 2]
    job.value_dim = value.shape[n_lead + 2]
    job.itemsize = query.itemsize
    return 0


def run(problem, plan):
    """Fills problem.out, and problem.lse and problem.weights where present; see `fastattn._plan.Plan`."""
    cdef Job job
    cdef cnp.ndarray bits
    set_arrays(&job, problem.query, problem.key, problem.value, problem.out)
    cdef int n_lead = job.n_lead
    if problem.lse is not None:
        set_view(&job.lse, problem.lse, n_lead)
        # (*lead, H, L): its last axis is the row.
        job.lse.head = (<cnp.ndarray>problem.lse).strides[n_lead]
    if problem.weights is not None:
        set_view(&job.weights, problem.weights, n_lead)
    if problem.bias is not None:
        set_view(&job.bias, problem.bias, n_lead)
        job.bias_size = problem.bias.itemsize
        job.bias_swapped = not problem.bias.dtype.isnative
        job.convert_bias = (job.bias_swapped or job.bias_size != job.itemsize or job.bias.col != job.itemsize)
    if problem.dense is not None:
        set_view(&job.dense, problem.dense, n_lead)
        job.dense_size = problem.dense.itemsize
    if problem.key_start is not None:
        set_view(&job.key_start, problem.key_start, n_lead)
        set_view(&job.key_stop, problem.key_stop, n_lead)
    if problem.tiles is not None:
        bits = problem.tiles.bits
        set_view(&job.tile_index, problem.tiles.index, n_lead)
        job.tile_bits = <const uint32_t *>cnp.PyArray_DATA(bits)
        job.tile_q = bits.shape[1]
        job.tile_k = bits.shape[2] * WORD
    if problem.sinks is not None:
        job.sinks = <char *>cnp.PyArray_DATA(<cnp.ndarray>problem.sinks)
    solve(&job, problem.scale, 0.0 if problem.softcap is None else problem.softcap, plan)


cdef int solve(Job *job, double scale, double softcap, plan) except -1:
    cdef int num_threads = plan.num_threads
    if job.batch == 0 or job.num_heads == 0 or job.len_q == 0:
        return 0
    set_options(job, scale, softcap)
    set_blocks(job, plan.block_q, plan.block_k, plan.score_chunk)
    with nogil:
        run_job(job, num_threads)
    if job.out_of_memory:
        raise MemoryError("no memory for the tiles of a thread")
    return 0


cdef inline bint is_plain(object array) noexcept:
    """An ndarray of native float32 or float64 with at least three axes."""
    if not cnp.PyArray_CheckExact(array):
        return False
    cdef cnp.ndarray a = array
    cdef int typenum = cnp.PyArray_TYPE(a)
    return (typenum == cnp.NPY_FLOAT or typenum == cnp.NPY_DOUBLE) and cnp.PyArray_ISNOTSWAPPED(a) and a.ndim >= 3


def run_plain(query, key, value, causal, scale, plan):
    """The result of a call without options beyond causal and scale, or None where it is not plain enough.

    plan is called with the size of an element, and the numbers of rows, keys and columns. The short way for small
    arrays: three ndarrays of one native float dtype with equal leading axes. Whatever is not so, and every error,
    is left to the general way, which gives the same bits.
    """
    cdef Job job
    cdef double factor
    cdef int axis
    cdef bint triangle = causal is True
    cdef int64_t *stops = NULL
    cdef Py_ssize_t i
    if not (is_plain(query) and is_plain(key) and is_plain(value)) or not (triangle or causal is False):
        return None
    cdef cnp.ndarray q = query, k = key, v = value, out
    cdef int n = q.ndim, typenum = cnp.PyArray_TYPE(q)
    cdef cnp.npy_intp shape[MAX_LEAD]
    if k.ndim != n or v.ndim != n or cnp.PyArray_TYPE(k) != typenum or cnp.PyArray_TYPE(v) != typenum:
        return None
    for axis in range(n - 3):
        if k.shape[axis] != q.shape[axis] or v.shape[axis] != q.shape[axis]:
            return None
    if (k.shape[n - 3] == 0 or q.shape[n - 3] % k.shape[n - 3] != 0 or v.shape[n - 3] != k.shape[n - 3]
            or v.shape[n - 2] != k.shape[n - 2] or k.shape[n - 1] != q.shape[n - 1] or q.shape[n - 1] == 0
            or (triangle and q.shape[n - 2] != k.shape[n - 2])):
        return None
    if scale is None:
        factor = 1 / sqrt(<double>q.shape[n - 1])
    elif type(scale) is float and isfinite(<double>scale):
        factor = scale
    else:
        return None

    for axis in range(n - 1):
        shape[axis] = q.shape[axis]
    shape[n - 1] = v.shape[n - 1]
    out = cnp.PyArray_EMPTY(n, shape, typenum, 0)
    set_arrays(&job, q, k, v, out)
    if triangle:
        # Key intervals [0, i + 1), the same for every item: the zero in front is every row's start.
        stops = <int64_t *>malloc((job.len_q + 1) * sizeof(int64_t))
        if stops == NULL:
            raise MemoryError("no memory for the key intervals")
        for i in range(job.len_q + 1):
            stops[i] = i
        job.key_start.data = <char *>stops
        job.key_stop.data = <char *>(stops + 1)
        job.key_stop.row = sizeof(int64_t)
    try:
        solve(&job, factor, 0.0, plan(job.itemsize, job.batch * job.num_heads * job.len_q, job.len_k,
                                      job.head_dim + job.value_dim))
    finally:
        free(stops)
    return out


cdef void set_options(Job *job, double scale, double softcap) noexcept nogil:
    """Chooses the domain of the scores: times log2(e), unless something given in natural units must stay exact.

    A bias of any finite size must not overflow, and a row with a sink alone has just that as its lse.
    """
    cdef bint natural = job.bias.data != NULL or job.sinks != NULL
    cdef double unit = 1.0 if natural else LOG2E
    job.exponent_factor = LOG2E if natural else 1.0
    if softcap > 0:
        job.query_factor = scale / softcap
        job.softcap = softcap * unit
    else:
        job.query_factor = scale * unit


cdef void set_blocks(Job *job, Py_ssize_t block_q, Py_ssize_t block_k, Py_ssize_t score_chunk) noexcept nogil:
    job.kernels = chosen[job.itemsize == 8]
    job.score_chunk = score_chunk
    # No more room than the keys need: a small call stays in the small bins of malloc.
    job.block_k = min(block_k, (job.len_k + WORD - 1) // WORD * WORD)
    if job.block_k == 0:
        job.block_k = WORD
    job.n_vectors = (job.len_q * job.group_size + job.kernels.lanes - 1) // job.kernels.lanes
    block_q = min(block_q // job.kernels.lanes, <Py_ssize_t>job.kernels.max_vectors)
    job.n_blocks = (job.n_vectors + block_q - 1) // block_q
    job.is_masked = job.key_start.data != NULL or job.dense.data != NULL or job.tile_index.data != NULL
    job.n_tasks = job.batch * job.num_kv_heads * job.n_blocks
    job.max_lanes = (job.n_vectors + job.n_blocks - 1) // job.n_blocks * job.kernels.lanes
