# Gradients. A task is some key tiles of one key/value head: it goes over the query blocks that may attend any of their
# keys, and for each over the key tiles in the stages
#
#     mask words -> score -> adjust -> score of grad_out and values -> differentiate -> three accumulations
#
# A weight is exp(score - lse). Where scores are large, rounding of the lse or of the score may exceed 1, and the
# weight would be off by any factor. Such rows first get an lse of their own, from the scores as they are computed
# here, if it differs from the given one by rounding only: see `find_own_lse`. A large lse shows which rows these
# are. Large scores that cancel are found during the computation, which then starts again.
#
# FlashAttention-2's Algorithm 2 (Dao, 2023) with query rows as lanes of the score tile. The gradients of keys and
# values are the task's own. Those of queries are sums over key tiles, added in the order of the tiles: each query block
# has a turn, the number of the tile that adds next. Tasks are taken in that order, so whoever waits for a turn waits for a
# task that runs already.

cdef double TINY_SHARE = 2.0 ** -118   # of a factor
cdef double SMALL = 2.0 ** -64         # by which norms are multiplied: no such product overflows


cdef inline bint is_nonfinite(const Job *job, const char *rows, Py_ssize_t n_rows, Py_ssize_t ld) noexcept nogil:
    """Whether any of the rows has NaN or inf, where that makes a difference: beside keys that may be masked."""
    return masks_any(job) and kernels_of(job).has_nonfinite(rows, n_rows * ld)


cdef inline Py_ssize_t block_rows(const Job *job) noexcept nogil:
    return job.n_vectors * job.lanes


cdef void find_query_block(Job *job, const Gradients *g, Scratch *w, Block *block, Py_ssize_t head,
                           Py_ssize_t index) noexcept nogil:
    """The rows of a query block; its tiles have max_lanes lanes, of which n_vectors vectors are used."""
    cdef Py_ssize_t first_row = index * block_rows(job)
    block.n_rows = min(block_rows(job), job.len_q * job.group_size - first_row)
    block.n_vectors = <int>((block.n_rows + job.lanes - 1) // job.lanes)
    block.ld = job.max_lanes
    find_block(job, w, block, head // job.num_kv_heads, head % job.num_kv_heads, first_row)
    if job.scores_on_tiles:
        block.low -= block.low % GROUP_KEYS


cdef inline void pack_rows(const Job *job, char *to, Py_ssize_t ld, const SourceRows *rows, const Block *block,
                           Py_ssize_t n_cols, double factor) noexcept nogil:
    """The rows of a block, times a factor, without gaps and padded with zeros."""
    kernels_of(job).pack_rows(to, ld, rows.at, block.n_rows, rows.col, n_cols, factor)


cdef inline void set_row(const Job *job, const Gradients *g, Py_ssize_t row, double base, double delta) noexcept nogil:
    """Sets the base of a row, as the sum of two numbers, and its delta."""
    cdef Py_ssize_t size = job.itemsize
    cdef char *high = g.base + row * size
    set_real(high, base, size)
    set_real(high + g.heads * g.padded_rows * size, base - get_real(high, size) if isfinite(get_real(high, size)) else 0, size)
    set_real(g.delta + row * size, delta, size)


cdef void prepare_block(Job *job, Gradients *g, Scratch *w, Tiles *t, Py_ssize_t task) noexcept nogil:
    """The base and the delta of each row of a query block, the keys it reads, whether it is finite, and whether any lse is
    large; zeros, where no tile will add to it."""
    cdef const fastattn_kernels *kernels = kernels_of(job)
    cdef Py_ssize_t head = task // job.n_blocks, index = task % job.n_blocks, size = job.itemsize, row
    cdef Py_ssize_t first = head * g.padded_rows + index * block_rows(job), number
    cdef Py_ssize_t of_head = head // job.num_kv_heads * job.num_kv_heads * job.group_size
    cdef SourceRows rows
    cdef Block block
    cdef double sum, lse, grad_lse
    cdef bint is_last = index == job.n_blocks - 1
    cdef const char *grad
    cdef const char *out
    cdef Job *of_outputs = g.of_outputs
    cdef bint in_place = (not job.out_storage and not of_outputs.out_storage
                          and job.out.col == size and of_outputs.out.col == size)
    cdef bint nonfinite = False
    find_query_block(job, g, w, &block, head, index)
    g.reads[2 * task] = block.low
    g.reads[2 * task + 1] = block.high
    if g.wants_query and block.low >= block.high:
        row = head * job.len_q * job.group_size + index * block_rows(job)
        memset(g.query + row * g.query_ld * size, 0, block.n_rows * g.query_ld * size)
    if masks_any(job):
        rows = read_rows(job, w, &block, &job.query, job.query_storage, job.head_dim)
        pack_rows(job, t.query_rows, g.query_ld, &rows, &block, job.head_dim, 1)
        nonfinite = is_nonfinite(job, t.query_rows, block.n_rows, g.query_ld)
    if not in_place:
        rows = read_rows(job, w, &block, &job.out, job.out_storage, job.value_dim)
        pack_rows(job, t.grad_rows, g.value_ld, &rows, &block, job.value_dim, 1)
        rows = read_rows(of_outputs, w, &block, &of_outputs.out, of_outputs.out_storage, job.value_dim)
        pack_rows(job, t.values, g.value_ld, &rows, &block, job.value_dim, 1)
    for row in range(block.n_rows):
        grad = t.grad_rows + row * g.value_ld * size
        out = t.values + row * g.value_ld * size
        if in_place:
            grad = lane_row(w, &job.out, at_item(job, &job.out, block.item), row)
            out = lane_row(w, &of_outputs.out, at_item(of_outputs, &of_outputs.out, block.item), row)
        sum = kernels.dot(grad, out, job.value_dim)
        nonfinite |= not isfinite(sum) or is_nonfinite(job, grad, 1, job.value_dim)
        number = (of_head + w.row_h[row]) * job.len_q + w.row_i[row]
        lse = get_real(g.lse + number * size, size)
        grad_lse = 0 if g.grad_lse == NULL else get_real(g.grad_lse + number * size, size)
        set_row(job, g, first + row, lse / g.unit, g.grad_scale * (sum - grad_lse))
        g.is_large[task] |= g.large_score <= fabs(lse) < INFINITY
    for row in range(first + block.n_rows, (head + 1) * g.padded_rows if is_last else 0):
        set_row(job, g, row, 0, 0)   # which vectors read beside the last rows
    g.nonfinite[task] = nonfinite


cdef double norm_of(const Job *job, const char *row, Py_ssize_t n) noexcept nogil:
    """SMALL times the Euclidean norm of n contiguous numbers, or a bound where squares overflow or underflow float64."""
    cdef Py_ssize_t c
    cdef double largest = 0, squares = kernels_of(job).dot(row, row, n)
    if 1e-200 < squares < INFINITY:
        return SMALL * sqrt(squares)
    for c in range(n):
        largest = max(largest, fabs(get_real(row + c * job.itemsize, job.itemsize)))
    return SMALL * largest * sqrt(<double>n)


cdef inline double largest_norm(const Job *job, const char *rows, Py_ssize_t n_rows, Py_ssize_t ld) noexcept nogil:
    """A bound of the Euclidean norms of rows that are padded with zeros."""
    # Squares below all normal numbers may be lost.
    return sqrt(kernels_of(job).largest_square(rows, n_rows, ld) + ld * <double>FLT_MIN)


cdef bint load_keys(const Job *job, const HeadRows *rows, char *to, Py_ssize_t ld, Py_ssize_t key0, Py_ssize_t n_keys,
                    Py_ssize_t n_cols) noexcept nogil:
    """Rows of keys or values, padded with zeros; whether any has NaN or inf."""
    cdef Py_ssize_t j, row = ld * job.itemsize
    if ld == n_cols:
        load_rows(job, to, rows, key0, n_keys, n_cols)
    else:
        memset(to, 0, n_keys * row)
        for j in range(n_keys):
            load_rows(job, to + j * row, rows, key0 + j, 1, n_cols)
    return is_nonfinite(job, to, n_keys, ld)


cdef inline void accumulate_rows_of(const Job *job, const Tiles *t, char *acc, const char *rows, Py_ssize_t ld,
                                    const char *factors, Py_ssize_t factor_row, Py_ssize_t factor_col, Py_ssize_t n_sums,
                                    Py_ssize_t n_rows, bint sets) noexcept nogil:
    """acc[i][c] += the sum over n_rows rows r of factors[r * factor_row + i * factor_col] * rows[r][c], i < n_sums.

    sets: = instead of +=.
    """
    cdef fastattn_values values
    cdef int n, left = <int>(ld // job.lanes)
    cdef Py_ssize_t at = 0, size = job.itemsize, v
    values.at = factors
    values.row = factor_row * size
    values.col = factor_col * size
    values.panel = kernels_of(job).panel_cols * values.col
    for v in range(left):
        t.stops[v] = n_rows
    while left > 0:
        # Register tiles of two vectors each, rather than of three and one.
        n = 2 if left == 4 or left == 2 else min(left, 3)
        kernels_of(job).accumulate(acc + at, rows + at, NULL if sets else t.ones, ld, n, &values, t.stops, KEY_CHUNK,
                                   n_sums, NULL, 0, 0)
        at += n * job.lanes * size
        left -= n


cdef void clean_rows(const Job *job, char *to, char *raw, const char *source, Py_ssize_t n_rows,
                     Py_ssize_t ld) noexcept nogil:
    """to = the rows with NaN and inf set to 0; raw = the rows as they are. `source` may be `to`."""
    cdef Py_ssize_t at, size = job.itemsize
    if raw != NULL:
        memcpy(raw, source, n_rows * ld * size)
    if to != source:
        memcpy(to, source, n_rows * ld * size)
    for at in range(n_rows * ld):
        if not isfinite(get_real(to + at * size, size)):
            set_real(to + at * size, 0, size)


cdef void add_nonfinite(const Job *job, const Scratch *w, const Block *block, const Tile *tile, const char *rows,
                        Py_ssize_t ld, bint rows_are_keys, const char *factors, char *acc, Py_ssize_t acc_ld) noexcept nogil:
    """Adds what `clean_rows` took out of a product, for the pairs of query row and key that are not masked."""
    cdef Py_ssize_t r, c, i, size = job.itemsize, n_rows = tile.n_keys if rows_are_keys else block.n_rows
    cdef Py_ssize_t n_sums = block.n_rows if rows_are_keys else tile.n_keys, lane, j
    cdef double x
    cdef char *to
    for r in range(n_rows):
        for c in range(ld):
            x = get_real(rows + (r * ld + c) * size, size)
            if isfinite(x):
                continue
            for i in range(n_sums):
                lane, j = (i, r) if rows_are_keys else (r, i)
                if is_allowed(job, w, block, tile.state, lane, j):
                    to = acc + (i * acc_ld + c) * size
                    set_real(to, get_real(to, size) + x * get_real(factors + (j * block.ld + lane) * size, size), size)


cdef void add_to_diagonals(const Job *job, Scratch *w, Tiles *t, const Block *block, const Tile *tile) noexcept nogil:
    """Adds the gradients of a tile's scores along its diagonals, and those sums to the task's."""
    cdef Py_ssize_t last = w.row_i[block.n_rows - 1], ld = last - w.row_i[0] + tile.n_keys, size = job.itemsize
    cdef Py_ssize_t first_head = tile.head % job.num_kv_heads * job.group_size, sums_ld = job.len_q + t.task_keys, lane, h, m
    cdef double *sums
    memset(t.band, 0, job.group_size * ld * size)
    for lane in range(block.n_rows):
        w.rows[lane] = t.band + ((w.row_h[lane] - first_head) * ld + last - w.row_i[lane]) * size
    kernels_of(job).add_columns(w.rows, size, block.n_rows, t.change, block.ld, tile.n_keys)
    for h in range(job.group_size):
        sums = t.diagonals + h * sums_ld + job.len_q - 1 - last + tile.key0 - tile.task_key0
        for m in range(ld):
            sums[m] += get_real(t.band + (h * ld + m) * size, size)


cdef void add_diagonals(const Job *job, const Gradients *g, const Tiles *t, Py_ssize_t task, Py_ssize_t key0,
                        Py_ssize_t n_keys) noexcept nogil:
    """Adds the sums of a task to those of all, which tasks do in their order."""
    cdef Py_ssize_t first_head = task % g.heads % job.num_kv_heads * job.group_size, number, h, m
    cdef double *to
    cdef const double *sums
    fastattn_wait_for_turn(g.diagonal_turn, task)
    for number in range(g.n_bias_sums):
        if bias_sums(job, g, number).kind != BIAS_OF_DIAGONALS:
            continue
        for h in range(job.group_size):
            to = <double *>bias_sums(job, g, number).at + (first_head + h) * (job.len_q + job.len_k - 1) + key0
            sums = t.diagonals + h * (job.len_q + t.task_keys)
            for m in range(job.len_q + n_keys - 1):
                to[m] += sums[m]
    fastattn_pass_turn(g.diagonal_turn, task + 1)


cdef void add_to_keys(const Job *job, Scratch *w, Tiles *t, const Block *block, const Tile *tile,
                      double *to) noexcept nogil:
    """Adds the gradients of a tile's scores of each key."""
    cdef Py_ssize_t lane, j, size = job.itemsize, row = block.ld * job.itemsize
    cdef Py_ssize_t first_head = block.item * job.num_kv_heads * job.group_size
    cdef double *sums
    if job.group_size == 1:
        sums = to + (first_head + w.row_h[0]) * job.len_k + tile.key0
        for j in range(tile.n_keys):
            sums[j] += kernels_of(job).dot(t.change + j * row, t.ones, block.n_rows)
        return
    for lane in range(block.n_rows):
        sums = to + (first_head + w.row_h[lane]) * job.len_k + tile.key0
        for j in range(tile.n_keys):
            sums[j] += get_real(t.change + j * row + lane * size, size)


cdef void add_to_bias(const Job *job, Gradients *g, Scratch *w, Tiles *t, const Block *block,
                      const Tile *tile) noexcept nogil:
    """Adds the gradients of a tile's scores to those of the bias, and those of a grid to t.grids."""
    cdef Py_ssize_t lane, number
    cdef const BiasSums *sums
    cdef const int64_t *strides
    cdef char *to
    for number in range(g.n_bias_sums):
        sums = bias_sums(job, g, number)
        strides = <const int64_t *>(sums + 1)
        to = <char *>sums.at
        if sums.kind == BIAS_OF_SCORES:
            to += item_offset(job, strides + 3, block.item) + tile.key0 * strides[0]
            for lane in range(block.n_rows):
                w.rows[lane] = to + w.row_h[lane] * strides[2] + w.row_i[lane] * strides[1]
            kernels_of(job).add_columns(w.rows, strides[0], block.n_rows, t.change, block.ld, tile.n_keys)
        elif sums.kind == BIAS_OF_DIAGONALS:
            add_to_diagonals(job, w, t, block, tile)
        elif sums.kind == BIAS_OF_KEYS:
            add_to_keys(job, w, t, block, tile, <double *>to)
        else:
            fastattn_sum_grid(t.grids + number * grid_sums(job), t.change, <int>job.itemsize, block.ld, tile.n_keys,
                              tile.key0 % sums.run, sums.run)


cdef void add_grids(const Job *job, const Gradients *g, const Scratch *w, const Tiles *t, const Block *block,
                    const Tile *tile) noexcept nogil:
    """Adds the sums of a tile over the rows and columns of grids to those of all its keys."""
    cdef Py_ssize_t first_head = block.item * job.num_kv_heads * job.group_size, number, lane, n
    cdef const BiasSums *sums
    cdef const double *own
    cdef double *to
    for number in range(g.n_bias_sums):
        sums = bias_sums(job, g, number)
        if sums.kind != BIAS_OF_GRID:
            continue
        for lane in range(block.n_rows):
            own = t.grids + number * grid_sums(job) + lane
            to = <double *>sums.at + ((first_head + w.row_h[lane]) * job.len_q + w.row_i[lane]) * sums.width
            for n in range(tile.key0 // sums.run, (tile.key0 + tile.n_keys - 1) // sums.run + 1):
                to[n] += own[0]
                own += block.ld
            if sums.width == 1:
                continue
            to += job.len_k // sums.run
            for n in range(tile.key0, tile.key0 + min(tile.n_keys, sums.run)):
                to[n % sums.run] += own[0]
                own += block.ld


cdef void split_task_keys(const Job *job, const Gradients *g, Tiles *t, Py_ssize_t n_keys) noexcept nogil:
    cdef Py_ssize_t i, row = g.query_ld * job.itemsize
    for i in range(groups_in(n_keys)):
        t.key_flags[i] = fused_of(job).split_keys(
            t.key_groups + i * key_groups_nbytes(job), <int>job.n_parts, t.keys + i * GROUP_KEYS * row, row,
            min(GROUP_KEYS, n_keys - i * GROUP_KEYS), job.head_dim)


cdef void score_on_tiles(const Job *job, const Gradients *g, Scratch *w, Tiles *t, const Block *block,
                         const Tile *tile) noexcept nogil:
    """The raw scores of a tile as the fused sweep has them, into w.scores."""
    cdef Py_ssize_t first = tile.key0 - tile.task_key0, i, j, lane
    cdef uint32_t flags = 0
    cdef float *scores = <float *>w.scores
    cdef const float *other = <const float *>t.change
    for i in range(groups_in(block.n_rows)):
        fused_of(job).score(scores + i * FUSED_LANES, block.ld,
                            t.query_groups + i * groups_in(job.head_dim) * GROUP_NBYTES,
                            t.key_groups + first // GROUP_KEYS * key_groups_nbytes(job), <int>job.n_parts, tile.n_keys,
                            job.head_dim)
        flags |= t.query_flags[i]
    for i in range(first // GROUP_KEYS, groups_in(first + tile.n_keys)):
        flags |= t.key_flags[i]
    if not flags:
        return
    kernels_of(job).score(t.change, NULL, w.query, block.ld, block.n_vectors, t.keys + first * g.query_ld * job.itemsize,
                          w.stops, job.head_dim, g.query_ld * job.itemsize, job.itemsize, NULL, 0, 0)
    for j in range(tile.n_keys):
        for lane in range(block.n_rows):
            if (t.key_flags[(first + j) // GROUP_KEYS] >> (first + j) % GROUP_KEYS
                    | t.query_flags[lane // FUSED_LANES] >> lane % FUSED_LANES) & 1:
                scores[j * block.ld + lane] = other[j * block.ld + lane]


cdef void find_scores(Job *job, Gradients *g, Scratch *w, Tiles *t, const Block *block, Tile *tile,
                      bint notes_masked) noexcept nogil:
    """The scores of a tile, masked, into w.scores. notes_masked: the mask words include what a score_mod masked."""
    cdef const fastattn_kernels *kernels = kernels_of(job)
    cdef Py_ssize_t size = job.itemsize, v, lane, j
    cdef ScoreTile scores
    for v in range(block.ld // job.lanes):
        w.stops[v] = tile.n_keys
    if job.scores_on_tiles:
        score_on_tiles(job, g, w, t, block, tile)
    elif g.rounds_weights:
        score_pairs(job, w, t, block, tile, w.scores, t.query_columns, t.stored_keys, w.query, t.keys, g.query_ld, job.head_dim,
                    t.other_queries)
    else:
        kernels.score(w.scores, NULL, w.query, block.ld, block.n_vectors,
                      t.keys + (tile.key0 - tile.task_key0) * g.query_ld * size, w.stops, job.head_dim, g.query_ld * size,
                      size, NULL, 0, 0)
    memcpy(w.tile_max, w.empty, block.ld * size)
    scores = lane_tile(job, w, block, tile.state, tile.key0, 0, tile.n_keys, w.stops)
    if keeps_capped(job):
        scores.capped = t.capped
    adjust_scores(job, w, block, &scores)
    if job.has_score_mod and notes_masked:
        tile.state = note_masked(job, w, block, &scores)
    if g.seen == NULL:
        return
    for lane in range(block.n_rows):
        for j in range(tile.n_keys):
            if get_real(w.scores + (j * block.ld + lane) * size, size) != -INFINITY:
                g.seen[tile.head * g.padded_rows + tile.first_row + lane] = 1
                break


cdef void find_change(Job *job, Gradients *g, Scratch *w, Tiles *t, const Block *block, const Tile *tile) noexcept nogil:
    """The gradients of a tile's scores into t.change, if they are wanted, and the weights in the place of the scores."""
    cdef const fastattn_kernels *kernels = kernels_of(job)
    cdef Py_ssize_t size = job.itemsize, first = (tile.head * g.padded_rows + tile.first_row) * size
    cdef const uint32_t *kept = find_drop_words(job, w, block, block.ld, tile.key0, tile.n_keys)
    if g.wants_change and g.rounds_weights and job.value_dim > 0:
        score_pairs(job, w, t, block, tile, t.change, t.grad_columns, t.stored_values, t.grad, t.values, g.value_ld, job.value_dim,
                    t.other_grads)
    elif g.wants_change and job.value_dim > 0:
        kernels.score(t.change, NULL, t.grad, block.ld, block.n_vectors,
                      t.values + (tile.key0 - tile.task_key0) * g.value_ld * size, w.stops, job.value_dim, g.value_ld * size, size,
                      NULL, 0, 0)
    elif g.wants_change:
        memset(t.change, 0, tile.n_keys * block.ld * size)
    kernels.differentiate(w.scores, t.change if g.wants_change else NULL, g.base + first, g.base + first + g.heads * g.padded_rows * size,
                          g.delta + first, block.ld, tile.n_keys, job.exponent_factor,
                          g.is_large[tile.head * job.n_blocks + tile.index], kept, job.kept_share)


cdef void differentiate_functions(const Job *job, Gradients *g, const Scratch *w, const Tiles *t, const Block *block,
                                  const Tile *tile, Py_ssize_t task) noexcept nogil:
    """The gradients of what a score_mod returned become those of the scores; their parts of those of `aux` are added."""
    cdef Functions *f = &g.functions
    cdef int64_t outside
    if f.of_aux != NULL:
        f.of_aux(t.capped, t.change, block.ld, block.n_rows, tile.n_keys, tile.key0, block.item, w.row_h, w.row_i,
                 f.aux_of_aux, f.sums + task % f.n_partial * f.n_sums)
    if f.slope != NULL:
        outside = f.slope(t.capped, t.change, block.ld, block.n_rows, tile.n_keys, tile.key0, block.item, w.row_h, w.row_i,
                          f.aux_of_slope)
        if outside:
            f.outside = outside


cdef void load_block(Job *job, Gradients *g, Scratch *w, Tiles *t, const Block *block) noexcept nogil:
    """The query rows and the gradients of the outputs of a block, as rows and as columns."""
    cdef const fastattn_kernels *kernels = kernels_of(job)
    cdef SourceRows rows = read_rows(job, w, block, &job.query, job.query_storage, job.head_dim)
    cdef Py_ssize_t i
    pack_rows(job, t.query_rows, g.query_ld, &rows, block, job.head_dim, 1 if g.rounds_weights else g.scale)
    if g.rounds_weights:
        t.other_queries = pack_columns(job, t, t.query_columns, t.query_rows, g.query_ld, block, job.head_dim, job.query_factor)
        if g.wants_key:
            pair_rows(job, t, t.query_words, t.query_rows, block.n_rows, g.query_ld)
    if not g.rounds_weights or t.other_queries:
        kernels.pack(w.query, block.ld, rows.at, rows.col, job.head_dim, job.query_factor)
    if job.scores_on_tiles:
        for i in range(groups_in(block.n_rows)):
            t.query_flags[i] = fused_of(job).split_queries(
                t.query_groups + i * groups_in(job.head_dim) * GROUP_NBYTES, <const float *>w.query + i * FUSED_LANES,
                block.ld, job.head_dim)
    rows = read_rows(job, w, block, &job.out, job.out_storage, job.value_dim)
    pack_rows(job, t.grad_rows, g.value_ld, &rows, block, job.value_dim, 1)
    if g.rounds_weights:
        t.other_grads = pack_columns(job, t, t.grad_columns, t.grad_rows, g.value_ld, block, job.value_dim, g.grad_scale)
        if g.wants_value:
            pair_rows(job, t, t.grad_words, t.grad_rows, block.n_rows, g.value_ld)
    if not g.rounds_weights or t.other_grads:
        kernels.pack(t.grad, block.ld, rows.at, rows.col, job.value_dim, g.grad_scale)


cdef void scale_rows(const Job *job, const Gradients *g, Scratch *w, char *rows, Py_ssize_t n_rows) noexcept nogil:
    """Multiplies finished gradients of queries or keys, in place, by the scale; at most as many rows as lanes."""
    cdef Py_ssize_t lane, size = job.itemsize, ld = job.max_lanes
    cdef double high = g.scale, rest
    if size == sizeof(float):
        high = <float>g.scale
        if fabs(high) > fabs(g.scale):
            high = nextafterf(<float>g.scale, 0)
    # Both of one sign, or times inf they would add up to NaN; not 0 for the same reason, and too small to change a result.
    rest = g.scale - high if g.scale != high else g.scale * TINY_SHARE
    for lane in range(n_rows):
        w.rows[lane] = rows + lane * g.query_ld * size
        set_real(w.inverse + lane * size, high, size)
        set_real(w.inverse + (ld + lane) * size, rest, size)
    kernels_of(job).unpack_rows(w.rows, size, n_rows, rows, g.query_ld, job.head_dim, w.inverse, ld)


cdef inline void clean_block(const Job *job, const Gradients *g, const Tiles *t, const Block *block, char *rows, char *words,
                             Py_ssize_t ld) noexcept nogil:
    """The rows of a block with NaN and inf set to 0, which t.raw_rows keep, and their words."""
    clean_rows(job, rows, t.raw_rows, rows, block.n_rows, ld)
    if g.rounds_weights:
        pair_rows(job, t, words, rows, block.n_rows, ld)


cdef void add_tile(Job *job, Gradients *g, Scratch *w, Tiles *t, Block *block, Tile *tile, bint nonfinite) noexcept nogil:
    """Adds what a tile contributes to each gradient; those of the queries when their turn comes."""
    cdef Py_ssize_t size = job.itemsize, ld = block.ld, offset = tile.key0 - tile.task_key0
    cdef Py_ssize_t key_row = tile.head * job.len_k + tile.key0
    cdef const char *keys = t.keys + offset * g.query_ld * size
    cdef const char *read_keys = keys
    cdef const char *words = t.key_words + offset // 2 * g.query_ld * size
    cdef char *factors = t.change
    cdef char *to_key = g.key + key_row * g.query_ld * size
    cdef char *to_value = g.value + key_row * g.value_ld * size
    cdef char *to_query = g.query + (tile.head * job.len_q * job.group_size + tile.first_row) * g.query_ld * size
    cdef int64_t *turn = g.turns + tile.head * job.n_blocks + tile.index
    cdef bint has_query = g.wants_query and tile.state != TILE_EMPTY
    if tile.state != TILE_EMPTY:
        if g.wants_value:
            if nonfinite:
                clean_block(job, g, t, block, t.grad_rows, t.grad_words, g.value_ld)
            add_over_rows(job, g, t, block, tile, to_value, t.grad_rows, t.grad_words, g.value_ld, w.scores)
            if nonfinite:
                add_nonfinite(job, w, block, tile, t.raw_rows, g.value_ld, False, w.scores, to_value, g.value_ld)
        if g.wants_key:
            if nonfinite:
                clean_block(job, g, t, block, t.query_rows, t.query_words, g.query_ld)
            add_over_rows(job, g, t, block, tile, to_key, t.query_rows, t.query_words, g.query_ld, t.change)
            if nonfinite:
                add_nonfinite(job, w, block, tile, t.raw_rows, g.query_ld, False, t.change, to_key, g.query_ld)
    if not g.wants_query and not g.has_grids:
        return
    if has_query and nonfinite:
        clean_rows(job, t.clean_keys, NULL, keys, tile.n_keys, g.query_ld)
        read_keys = t.clean_keys
    if has_query and g.rounds_weights:
        if nonfinite:   # what was cleaned away is multiplied by t.change as it is
            pair_rows(job, t, t.clean_keys, t.clean_keys, tile.n_keys, g.query_ld)
            words = t.clean_keys
            factors = t.other_scores
        pair_rows(job, t, factors, t.change, tile.n_keys, ld)
    fastattn_wait_for_turn(turn, tile.turn)
    if g.wants_query and tile.state == TILE_EMPTY and tile.sets_queries:
        memset(to_query, 0, block.n_rows * g.query_ld * size)
    if has_query:
        add_over_keys(job, g, t, block, tile, to_query, read_keys, words, factors)
        if nonfinite:
            add_nonfinite(job, w, block, tile, keys, g.query_ld, True, t.change, to_query, g.query_ld)
    if tile.state != TILE_EMPTY and g.has_grids:
        add_grids(job, g, w, t, block, tile)
    if g.wants_query and tile.is_last and g.scale != 1:
        scale_rows(job, g, w, to_query, block.n_rows)
    fastattn_pass_turn(turn, tile.turn + 1)
