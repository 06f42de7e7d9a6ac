# What a call for gradients works on: its arrays and options (Gradients), a thread's tiles (Tiles), and one query block beside
# one key tile (Tile). Layouts only, no computation.

cdef enum Stage:
    STAGE_PREPARE   # tasks: query blocks
    STAGE_OWN_LSE   # those that are large
    STAGE_KEYS      # key tiles


ctypedef void (*aux_loop)(const void *scores, const void *change, Py_ssize_t ld, Py_ssize_t n, Py_ssize_t n_keys,
                          Py_ssize_t key0, Py_ssize_t item, const Py_ssize_t *row_h, const Py_ssize_t *row_i,
                          const char *aux, double *sums) noexcept nogil


cdef struct Functions:
    # Compiled loops around a score_mod, and what they read: see `fastattn.backends.jit.functions.GradientLoops`.
    score_loop slope         # its derivative in the score; NULL: nobody asks
    aux_loop of_aux          # and in what it reads of `aux`
    const char *aux_of_slope
    const char *aux_of_aux
    double *sums             # (n_partial, n_sums): partial sums of the gradients of `aux`
    int64_t *turns           # (n_partial): which of the tasks that add to a partial sum is next
    Py_ssize_t n_partial, n_sums
    int64_t outside          # the bits of reads out of bounds in `slope`


cdef struct Gradients:
    # What a backward call reads and writes beside its Job, of which `out` is the gradient of the outputs. Rows are those
    # of a key/value head, row = i * group + g, and have a whole number of vectors.
    Job *job
    Job *of_outputs          # of which `out` is the outputs
    const char *lse          # (batch, H, len_q)
    const char *grad_lse     # likewise; NULL: 0
    char *base               # (2, heads, padded_rows): the lse in the units of the scores, as the sum of two
    char *delta              # (heads, padded_rows): grad_scale * (rowsum(grad_out * out) - grad_lse)
    char *seen               # (heads, padded_rows) bool: whether a row has any key; NULL: nobody asks
    char *nonfinite          # (heads, n_blocks) bool: whether a query block has NaN or inf in query, out or grad_out, where
                             # keys may be masked
    char *is_large           # (heads, n_blocks) bool: whether an lse of a query block is large_score or more; with
                             # all_large, every block is taken for such
    int64_t *reads           # (heads, n_blocks, 2): the first key that a query block may attend, and the end of these keys
    bint needs_own_lse       # some block that is not large may have scores of large_norms or more
    # The gradients, uninitialised: the first tile that contributes to a row sets it. Rows without a contribution
    # are set to 0: those of queries when their block is prepared, those of keys and values by their task.
    char *query              # (heads, rows, query_ld)
    char *key                # (heads, len_k, query_ld)
    char *value              # (heads, len_k, value_ld)
    const int64_t *bias_sums # `Room.bias_words`: what is added up for the gradient of the bias
    int64_t *turns           # (heads, n_blocks)
    int64_t *bias_turns      # (n_key_tiles, n_blocks), where heads or items share a bias
    int64_t *diagonal_turn   # BIAS_OF_DIAGONALS: the task that adds its sums next
    Py_ssize_t padded_rows, query_ld, value_ld, heads
    Py_ssize_t task_tiles    # key tiles of a task
    Py_ssize_t n_bias_sums
    bint has_grids           # BIAS_OF_GRID is among them
    bint wants_query, wants_key, wants_value
    bint rounds_weights      # the products are of pairs: see gradient_pairs.pxi
    bint wants_change        # the gradients of the scores are needed, for any but those of values and sinks
    double grad_scale        # the part of the scale that `delta` and the products of grad_out and values have
    double scale             # the rest
    double unit              # by which scores and lse are multiplied to be natural
    double natural_cap       # the soft-cap in natural units, inf where there is none
    double large_score       # see `fastattn._call.gradients`, in natural units
    double large_norms
    double score_rounding, usual_rounding
    Functions functions      # where there is a score_mod
    Stage stage


cdef struct BiasSums:
    # The words of one of them: double, but for BIAS_OF_SCORES. The strides of a bias follow, innermost first, 0 where it is
    # broadcast.
    int64_t kind
    int64_t at               # BIAS_OF_KEYS: (batch, H, len_k); _OF_GRID: (batch, H, len_q, width); _OF_DIAGONALS:
                             # (H, len_q + len_k - 1)
    int64_t run, width       # _OF_GRID: the keys of a row; its rows and columns, or 1 of one row without columns


cdef struct Tiles:
    # One thread's tiles, beside its Scratch.
    char *keys           # rows of the task, each padded with zeros to whole vectors
    char *values
    char *grad           # grad_scale * grad_out of the query block as columns, as `pack` leaves them
    char *query_rows     # rows of query and grad_out, padded
    char *grad_rows
    char *change         # the products of grad_out and values, then the gradients of the scores
    char *capped         # scores after the soft-cap, before score_mod, bias and mask
    double *grids        # of each of the BiasSums of a grid: sums of `change` over the keys of its rows and of its columns
    char *band           # BIAS_OF_DIAGONALS: sums along the diagonals of a tile, of each head of the group
    double *diagonals    # and of the task, (group, len_q + task_keys)
    Py_ssize_t task_keys
    char *clean_keys     # the rows with NaN and inf set to 0, and the rows as they were
    char *raw_rows
    char *key_groups     # of the keys of the task and of the query block, where scores are on tiles
    char *query_groups
    uint32_t *key_flags  # of each group, the keys that have no parts
    uint32_t *query_flags
    # Where products are of pairs: keys and values of the task in bfloat16, and the keys of two rows in a word; the query
    # block and its gradients of outputs as `pack` of kernels/pairs.h leaves them, and two rows in a word.
    char *stored_keys
    char *stored_values
    char *key_words
    char *query_columns
    char *grad_columns
    char *query_words
    char *grad_words
    char *rounded        # rows of a block, or a tile of weights, in bfloat16
    char *other_scores   # a tile, for the lanes whose products are not those of pairs
    const char **row_at
    uint64_t other_queries   # these lanes, a bit each
    uint64_t other_grads
    char *ones
    Py_ssize_t *stops


cdef struct Tile:
    # A query block and the keys of the task that it may attend.
    Py_ssize_t head, index, first_row, key0, n_keys, turn
    Py_ssize_t task_key0   # the first key of the task, whose keys and values are in Tiles
    double query_norm, key_norm   # the largest of the block's and of the task's
    TileState state
    bint is_last        # no later key tile adds to the gradients of the queries
    bint sets_queries   # no earlier one has
    bint sets_keys      # no earlier query block has added to the gradients of these keys and values


cdef inline const BiasSums *bias_sums(const Job *job, const Gradients *g, Py_ssize_t number) noexcept nogil:
    return <const BiasSums *>(g.bias_sums + number * (<Py_ssize_t>sizeof(BiasSums) // 8 + 3 + job.n_lead))


cdef inline Py_ssize_t grid_sums(const Job *job) noexcept nogil:
    """Room for the sums of a tile: of its keys, and of one row more than they fill."""
    return (job.block_k + 3) * job.max_lanes


cdef inline bint keeps_capped(const Job *job) noexcept nogil:
    return job.softcap > 0 or job.has_score_mod


cdef Py_ssize_t set_tiles(const Job *job, const Gradients *g, char *base, Tiles *t) noexcept nogil:
    """Sets the addresses of a thread's tiles from `base` on, a cache line; returns their size in bytes."""
    cdef Py_ssize_t size = job.itemsize, lanes = job.max_lanes, keys = g.task_tiles * job.block_k
    cdef Py_ssize_t q = g.query_ld * size, v = g.value_ld * size, wide = max(q, v)
    cdef Py_ssize_t masks = masks_any(job), on_tiles = job.scores_on_tiles, pairs = g.rounds_weights
    cdef char *at = base
    t.task_keys = keys
    t.keys = take(&at, keys * q)
    t.values = take(&at, max(keys, lanes) * v)
    t.grad = take(&at, job.value_dim * lanes * size)
    t.query_rows = take(&at, lanes * q)
    t.grad_rows = take(&at, lanes * v)
    t.change = take(&at, job.block_k * lanes * size)
    t.capped = take(&at, job.block_k * lanes * size if keeps_capped(job) else 0)
    if g.has_grids:
        t.grids = <double *>take(&at, g.n_bias_sums * grid_sums(job) * sizeof(double))
    if g.diagonal_turn != NULL:
        t.band = take(&at, job.group_size * (lanes + job.block_k) * size)
        t.diagonals = <double *>take(&at, job.group_size * (job.len_q + keys) * sizeof(double))
    t.clean_keys = take(&at, masks * job.block_k * q)
    t.raw_rows = take(&at, masks * lanes * wide)
    t.key_groups = take(&at, on_tiles * (keys // GROUP_KEYS) * key_groups_nbytes(job))
    t.query_groups = take(&at, on_tiles * (lanes // FUSED_LANES) * groups_in(job.head_dim) * GROUP_NBYTES)
    t.key_flags = <uint32_t *>take(&at, keys // GROUP_KEYS * sizeof(uint32_t))
    t.query_flags = <uint32_t *>take(&at, lanes * sizeof(uint32_t))
    t.stored_keys = take(&at, pairs * keys * q // 2)
    t.stored_values = take(&at, pairs * keys * v // 2)
    t.key_words = take(&at, pairs * keys * q)
    t.query_columns = take(&at, pairs * lanes * q // 2)
    t.grad_columns = take(&at, pairs * lanes * v // 2)
    t.query_words = take(&at, pairs * lanes * q)
    t.grad_words = take(&at, pairs * lanes * v)
    t.rounded = take(&at, pairs * lanes * max(wide, job.block_k * size) // 2)
    t.other_scores = take(&at, pairs * job.block_k * lanes * size)
    t.row_at = <const char **>take(&at, pairs * lanes * sizeof(char *))
    t.ones = take(&at, max(wide, lanes * size))
    t.stops = <Py_ssize_t *>take(&at, max(wide // size, lanes) * sizeof(Py_ssize_t))
    return at - base


