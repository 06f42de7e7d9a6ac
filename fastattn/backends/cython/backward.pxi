# Gradients, all of them: stages of tasks, and the key tiles of a task.


cdef void pass_bias_turns(const Job *job, const Gradients *g, const Tile *tile, int64_t *turns) noexcept nogil:
    """Passes the turns of the query blocks that are complete. Where the heads of one query are in two blocks and
    share a row of the bias, the first block is complete when the second is."""
    cdef Py_ssize_t index, last, n_rows = job.len_q * job.group_size, size = block_rows(job)
    for index in range(max(0, tile.index - (job.group_size + size - 1) // size), tile.index + 1):
        last = min((index + 1) * size, n_rows) - 1
        last += job.group_size - 1 - last % job.group_size   # the last row of the same query
        if last // size == tile.index:
            fastattn_pass_turn(turns + index, tile.head + 1)


cdef bint run_tile(Job *job, Gradients *g, Scratch *w, Tiles *t, Block *block, Tile *tile, Py_ssize_t task, bint loaded,
                   bint nonfinite_keys) noexcept nogil:
    """One query block and one key tile; whether the query block is loaded afterwards, as `loaded` says it is before."""
    cdef Py_ssize_t number = tile.key0 // job.block_k, plain, plain_stop
    cdef bint nonfinite = False
    cdef int64_t *bias_turn = NULL
    if tile.n_keys > 0:
        tile.state = mask_tile(job, w, block, tile.key0, tile.n_keys, True, &plain, &plain_stop)
    if tile.state != TILE_EMPTY:
        if not loaded:
            load_block(job, g, w, t, block)
            tile.query_norm = largest_norm(job, t.query_rows, block.n_rows, g.query_ld) * fabs(g.grad_scale)
            if g.rounds_weights:
                tile.query_norm *= fabs(g.scale)
        # By a margin, for rounding: `set_own_lse` decides.
        if (not tile.query_norm * tile.key_norm < 0.99 * g.large_norms
                and not g.is_large[tile.head * job.n_blocks + tile.index]):
            g.needs_own_lse = True
        nonfinite = ((nonfinite_keys or g.nonfinite[tile.head * job.n_blocks + tile.index])
                     and masks_some(job, tile.state))
        # The last one of an odd number of keys is paired with a key that nobody attends.
        if g.rounds_weights and nonfinite_keys and tile.n_keys & 1:
            nonfinite = True
        find_scores(job, g, w, t, block, tile, nonfinite)
        find_change(job, g, w, t, block, tile)
    if g.bias_turns != NULL:
        bias_turn = g.bias_turns + number * job.n_blocks + tile.index
        fastattn_wait_for_turn(bias_turn, tile.head)
    if tile.state != TILE_EMPTY and g.n_bias_sums:
        add_to_bias(job, g, w, t, block, tile)
    if g.bias_turns != NULL:
        pass_bias_turns(job, g, tile, g.bias_turns + number * job.n_blocks)
    if tile.n_keys > 0:
        if tile.state != TILE_EMPTY and job.has_score_mod and g.wants_change:
            differentiate_functions(job, g, w, t, block, tile, task)
        if tile.state != TILE_EMPTY and job.softcap > 0 and g.wants_change:
            kernels_of(job).uncap(t.change, t.capped, block.ld, tile.n_keys, job.softcap)
        add_tile(job, g, w, t, block, tile, nonfinite)
    # What is not finite was cleaned away.
    return (loaded or tile.state != TILE_EMPTY) and not nonfinite


cdef void clear_keys(const Job *job, const Gradients *g, Py_ssize_t head, Py_ssize_t key, Py_ssize_t n_keys) noexcept nogil:
    cdef Py_ssize_t row = head * job.len_k + key
    if g.wants_key:
        memset(g.key + row * g.query_ld * job.itemsize, 0, n_keys * g.query_ld * job.itemsize)
    if g.wants_value:
        memset(g.value + row * g.value_ld * job.itemsize, 0, n_keys * g.value_ld * job.itemsize)


cdef void run_keys(Job *job, Gradients *g, Scratch *w, Tiles *t, Py_ssize_t task) noexcept nogil:
    """The key tiles of a task, beside each other for one query block after another."""
    cdef Py_ssize_t key0 = task // g.heads * g.task_tiles * job.block_k, key, number, n_tile_keys
    cdef Py_ssize_t n_keys = min(g.task_tiles * job.block_k, job.len_k - key0)
    cdef const int64_t *reads
    cdef bint loaded, has_keys = False, nonfinite_keys = False
    cdef uint64_t are_set = 0   # a bit per key tile: its gradients hold what they should
    cdef Block block
    cdef Tile tile
    tile.head = task % g.heads
    tile.task_key0 = key0
    if g.functions.turns != NULL:
        fastattn_wait_for_turn(g.functions.turns + task % g.functions.n_partial, task // g.functions.n_partial)
    if g.diagonal_turn != NULL:
        memset(t.diagonals, 0, job.group_size * (job.len_q + t.task_keys) * sizeof(double))
    for tile.index in range(job.n_blocks):
        reads = g.reads + 2 * (tile.head * job.n_blocks + tile.index)
        if g.bias_turns == NULL and max(reads[0], key0) >= min(reads[1], key0 + n_keys):
            continue   # it reads no key of the task, and no other block waits for it
        tile.first_row = tile.index * block_rows(job)
        find_query_block(job, g, w, &block, tile.head, tile.index)
        if not has_keys and max(block.low, key0) < min(block.high, key0 + n_keys):
            has_keys = True
            nonfinite_keys = load_keys(job, &block.key, t.keys, g.query_ld, key0, n_keys, job.head_dim)
            tile.key_norm = largest_norm(job, t.keys, n_keys, g.query_ld)
            nonfinite_keys |= load_keys(job, &block.value, t.values, g.value_ld, key0, n_keys, job.value_dim)
            if job.scores_on_tiles:
                split_task_keys(job, g, t, n_keys)
            if g.rounds_weights:
                pair_keys(job, g, t, n_keys)
        loaded = False
        for number in range(g.task_tiles):
            key = key0 + number * job.block_k
            tile.state = TILE_EMPTY
            tile.key0 = max(block.low, key)
            tile.n_keys = max(0, min(block.high, key + job.block_k, key0 + n_keys) - tile.key0)
            tile.turn = key // job.block_k - block.low // job.block_k
            tile.is_last = block.high <= key + job.block_k
            tile.sets_queries = tile.turn == 0
            tile.sets_keys = not are_set >> number & 1
            n_tile_keys = min(job.block_k, key0 + n_keys - key)
            if tile.n_keys == 0:
                tile.key0 = key
            elif tile.sets_keys and tile.n_keys < n_tile_keys:
                clear_keys(job, g, tile.head, key, n_tile_keys)
                tile.sets_keys = False
                are_set |= <uint64_t>1 << number
            if key < key0 + n_keys and (tile.n_keys > 0 or g.bias_turns != NULL):
                loaded = run_tile(job, g, w, t, &block, &tile, task, loaded, nonfinite_keys)
                if tile.state != TILE_EMPTY:
                    are_set |= <uint64_t>1 << number
    for number in range(g.task_tiles):
        key = key0 + number * job.block_k
        if key < key0 + n_keys and not are_set >> number & 1:
            clear_keys(job, g, tile.head, key, min(job.block_k, key0 + n_keys - key))
    if g.rounds_weights and g.wants_key and g.scale != 1:
        for number in range((n_keys + job.max_lanes - 1) // job.max_lanes):
            key = number * job.max_lanes
            scale_rows(job, g, w, g.key + (tile.head * job.len_k + key0 + key) * g.query_ld * job.itemsize,
                       min(job.max_lanes, n_keys - key))
    if g.diagonal_turn != NULL:
        add_diagonals(job, g, t, task, key0, n_keys)
    if g.functions.turns != NULL:
        fastattn_pass_turn(g.functions.turns + task % g.functions.n_partial, task // g.functions.n_partial + 1)


cdef inline double largest_score(const Gradients *g, double query_norm, double key_norm) noexcept nogil:
    """A bound of scores before soft-cap and bias, from what `norm_of` gives, by the inequality of Cauchy and Schwarz."""
    cdef double scale = fabs(g.grad_scale * g.scale), low = min(query_norm, key_norm), high = max(query_norm, key_norm)
    # The largest times the smallest first: it does not overflow where the product of the three does not.
    return min(low, scale) * max(high, scale) * max(low, min(high, scale)) / SMALL / SMALL


cdef void set_own_lse(const Job *job, const Gradients *g, Scratch *w, const Tiles *t, Py_ssize_t row,
                      Py_ssize_t lane) noexcept nogil:
    """Decides between the lse given and that of w.row_max and w.row_sum, for a row whose largest `norm_of` a key is in
    w.inverse.

    Allowed keys alone decide. A given lse that is the larger one may include other keys: the difference counts as
    rounding only within the usual bound.
    """
    cdef Py_ssize_t size = job.itemsize
    cdef char *high = g.base + row * size
    cdef char *low = high + g.heads * g.padded_rows * size
    cdef double unit = g.unit, given = get_real(high, size), top = get_real(w.row_max + lane * size, size)
    cdef double rest = log(get_real(w.row_sum + lane * size, size)) / unit
    cdef double query_norm = norm_of(job, t.query_rows + lane * g.query_ld * size, g.query_ld)
    cdef double scores = largest_score(g, query_norm, get_real(w.inverse + lane * size, size))
    cdef double lse = fabs(given) * unit, above = ((top - given) + (rest - get_real(low, size))) * unit
    cdef double slope = 1 - min(lse / g.natural_cap, 1) ** 2   # of the soft-cap, at the largest scores
    if ((lse >= g.large_score or scores >= g.large_norms) and above <= g.score_rounding * (lse + scores) < INFINITY
            and -above <= g.usual_rounding * (lse + slope * scores / 4)):
        set_real(high, top + rest, size)
        set_real(low, (top - get_real(high, size)) + rest, size)


cdef void find_own_lse(Job *job, Gradients *g, Scratch *w, Tiles *t, Py_ssize_t task) noexcept nogil:
    """The lse of each row of a query block, from the scores that its weights will be computed from.

    It replaces the given lse where the two differ by rounding only: weights then add up to 1, however large scores
    are. A row whose given lse includes other keys, or is of another softmax, keeps it.
    """
    cdef const fastattn_kernels *kernels = kernels_of(job)
    cdef Py_ssize_t size = job.itemsize, plain, plain_stop, n_loaded, key, next_key, j, lane
    cdef SourceRows rows
    cdef Block block
    cdef Tile tile
    if not g.is_large[task]:
        return
    tile.head = task // job.n_blocks
    tile.index = task % job.n_blocks
    tile.first_row = tile.index * block_rows(job)
    find_query_block(job, g, w, &block, tile.head, tile.index)
    load_block(job, g, w, t, &block)
    rows = read_rows(job, w, &block, &job.query, job.query_storage, job.head_dim)
    pack_rows(job, t.query_rows, g.query_ld, &rows, &block, job.head_dim, 1)
    start_rows(job, w, w.row_max, w.row_sum, block.ld)
    memset(w.inverse, 0, block.ld * size)
    next_key = block.low // job.block_k * job.block_k
    while next_key < block.high:
        key = next_key
        next_key += job.block_k
        tile.task_key0 = key
        tile.key0 = max(block.low, key)
        tile.n_keys = min(block.high, next_key) - tile.key0
        tile.state = mask_tile(job, w, &block, tile.key0, tile.n_keys, True, &plain, &plain_stop)
        if tile.state == TILE_EMPTY:
            continue
        n_loaded = min(job.block_k, job.len_k - key)
        load_keys(job, &block.key, t.keys, g.query_ld, key, n_loaded, job.head_dim)
        if job.scores_on_tiles:
            split_task_keys(job, g, t, n_loaded)
        if g.rounds_weights:
            kernels_of(job).pairs.round_numbers(t.stored_keys, t.keys, n_loaded * g.query_ld)
        find_scores(job, g, w, t, &block, &tile, False)
        for j in range(tile.n_keys):
            set_real(t.change + j * size,
                     norm_of(job, t.keys + (tile.key0 - key + j) * g.query_ld * size, g.query_ld), size)
        memcpy(w.tile_max, w.empty, block.ld * size)
        kernels.find_largest(w.tile_max, w.inverse, w.scores, t.change, block.ld, tile.n_keys)
        kernels.softmax(w.scores, w.tile_max, w.row_max, w.row_sum, w.rescale, block.ld, w.stops,
                        KEY_CHUNK - tile.key0 % KEY_CHUNK, job.exponent_factor)
    end_rows(job, w, w.row_max, w.row_sum, block.ld)
    for lane in range(block.n_rows):
        set_own_lse(job, g, w, t, tile.head * g.padded_rows + tile.first_row + lane, lane)


cdef void run_gradient_tasks(void *call, Share *shares, int own, int n_shares) noexcept nogil:
    cdef Gradients *g = <Gradients *>call
    cdef Job *job = g.job
    cdef Scratch scratch
    cdef Tiles tiles
    cdef Py_ssize_t task, stop, nbytes = padded(job.scratch_nbytes), v
    cdef int turn = 0
    cdef char *memory = <char *>malloc(nbytes + set_tiles(job, g, NULL, &tiles) + 64)
    cdef char *base = <char *>((<size_t>memory + 63) & ~<size_t>63)
    if memory == NULL:
        return
    set_scratch(job, base, &scratch)
    set_tiles(job, g, base + nbytes, &tiles)
    for v in range(max(g.query_ld, g.value_ld, job.max_lanes)):
        set_real(tiles.ones + v * job.itemsize, 1, job.itemsize)
    if job.scores_on_tiles:
        fused_of(job).begin()
    while take_tasks(shares, own, n_shares, 1, &turn, &task, &stop):
        if g.stage == STAGE_KEYS:
            run_keys(job, g, &scratch, &tiles, task)
        elif g.stage == STAGE_OWN_LSE:
            find_own_lse(job, g, &scratch, &tiles, task)
        else:
            prepare_block(job, g, &scratch, &tiles, task)
    if job.scores_on_tiles:
        fused_of(job).end()
    free(memory)


cdef bint run_stage(Gradients *g, Stage stage, Py_ssize_t n_tasks, int num_threads) noexcept nogil:
    """Runs every task of a stage; False without memory for the tiles of any thread."""
    g.stage = stage
    return run_on_threads(run_gradient_tasks, g, n_tasks, num_threads, True)


cdef void set_functions(Job *job, Functions *f, loops):
    """Sets the addresses of a `GradientLoops`."""
    cdef cnp.ndarray sums = loops.sums
    job.score_mod = loops.score
    job.aux = loops.aux.buffer_info()[0]
    f.slope = <score_loop><size_t>loops.slope
    f.of_aux = <aux_loop><size_t>loops.of_aux
    f.aux_of_slope = <const char *><size_t>loops.aux_of_slope.buffer_info()[0]
    f.aux_of_aux = <const char *><size_t>loops.aux_of_aux.buffer_info()[0]
    f.turns = <int64_t *>address_of(loops.turns)
    f.sums = <double *>address_of(sums)
    if sums is not None:
        f.n_partial = sums.shape[0]
        f.n_sums = sums.shape[1]


cdef class GradientRecords:
    """A call for gradients but for its arrays; see `fastattn.backends.cpu.backward`."""

    cdef Prepared of_gradients   # its `out` is the gradient of the outputs
    cdef Prepared of_outputs
    cdef Gradients planned       # what is the same in all calls

    def __init__(self, tuple record, tuple record_of_outputs, plan):
        """plan: a `fastattn.backends.cpu.backward.Plan`."""
        cdef Gradients *g = &self.planned
        cdef const Job *job
        self.of_gradients = Prepared(record[0], record[1], 1, False)
        self.of_outputs = Prepared(record_of_outputs[0], record_of_outputs[1], 1, False)
        job = <const Job *>self.of_gradients.record
        memset(g, 0, sizeof(Gradients))
        g.heads = job.batch * job.num_kv_heads
        g.task_tiles = job.split_tiles
        g.padded_rows, g.query_ld, g.value_ld = plan.padded_rows, plan.query_ld, plan.value_ld
        g.wants_query, g.wants_key, g.wants_value = plan.wants
        g.rounds_weights = plan.rounds_weights
        g.grad_scale, g.scale, g.unit = plan.grad_scale, plan.scale, plan.unit
        g.large_score, g.large_norms = plan.large_score, plan.large_norms
        g.score_rounding, g.usual_rounding = plan.score_rounding, plan.usual_rounding
        g.natural_cap = job.softcap * g.unit if job.softcap > 0 else INFINITY

    def run(self, arrays, out, lse, grad_lse, room, loops, int num_threads, bint all_large):
        """Fills the gradients of a `fastattn.backends.cpu.backward.Room`. Returns whether it must be done again, in a new
        room and with `all_large`, as scores may be large where no lse is.

        `arrays` are those of `Problem.arrays`, with the gradient of the outputs as `out`. loops: a `GradientLoops`, or None.
        """
        cdef Gradients g = self.planned
        cdef Job *job
        cdef cnp.ndarray words = room.bias_words
        cdef bint done
        cdef int64_t outside, at
        cdef Py_ssize_t n_blocks, number
        cdef char *of_blocks = NULL
        g.lse = <const char *>address_of(lse)
        g.grad_lse = <const char *>address_of(grad_lse)
        g.base = <char *>address_of(room.rows)
        g.seen = <char *>address_of(room.seen)
        g.query = <char *>address_of(room.query)
        g.key = <char *>address_of(room.key)
        g.value = <char *>address_of(room.value)
        g.bias_sums = <const int64_t *>address_of(words)
        g.n_bias_sums = 0 if words is None else words.shape[0]
        g.bias_turns = <int64_t *>address_of(room.bias_turns)
        g.diagonal_turn = <int64_t *>address_of(room.diagonal_turn)
        g.job = job = self.of_gradients.copy()
        try:
            g.of_outputs = self.of_outputs.copy()
            set_addresses(job, tuple(arrays))
            g.of_outputs.out.data = address_of(out)
            g.delta = g.base + 2 * g.heads * g.padded_rows * job.itemsize
            if loops is not None:
                set_functions(job, &g.functions, loops)
            g.wants_change = g.wants_query or g.wants_key or g.n_bias_sums > 0 or g.functions.of_aux != NULL
            for number in range(g.n_bias_sums):
                g.has_grids |= bias_sums(job, &g, number).kind == BIAS_OF_GRID
            n_blocks = g.heads * job.n_blocks
            of_blocks = <char *>calloc(n_blocks, 3 * sizeof(int64_t) + 2)
            if of_blocks == NULL:
                raise MemoryError("no memory for the turns of the query blocks")
            g.turns = <int64_t *>of_blocks
            g.reads = g.turns + n_blocks
            g.nonfinite = <char *>(g.reads + 2 * n_blocks)
            g.is_large = g.nonfinite + n_blocks
            memset(g.is_large, all_large, n_blocks)
            with nogil:
                done = run_stage(&g, STAGE_PREPARE, n_blocks, num_threads)
                if done and memchr(g.is_large, 1, n_blocks) != NULL:
                    done = run_stage(&g, STAGE_OWN_LSE, n_blocks, num_threads)
                done = done and run_stage(&g, STAGE_KEYS, job.n_tasks, num_threads)
            outside = job.read_outside
            at = job.outside_at - 1
        finally:
            free(of_blocks)
            free(job)
            free(g.of_outputs)
        if not done:
            raise MemoryError("no memory for the tiles of a thread")
        if loops is not None and not g.needs_own_lse:
            loops.finish(outside, at, g.functions.outside)
        return g.needs_own_lse
