# One task is a block of query rows of one key/value head: its walk over the key tiles with the online softmax, from
# its query to its outputs; and all tasks of a call on all its threads.

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
    cdef fastattn_values values = block.values
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
        values.at = block.values.at + key0 * block.values.row
        first = False
        if clean != NULL:
            kernels.accumulate_isolated(w.acc, w.scores, rescale, block.ld, &values, w.stops, first_chunk,
                                        job.value_dim, bias_of(job, w), words_of(w, state), clean)
        else:
            n_next = min(tile + job.block_k, block.high) - tile
            if n_next > 0:
                fetch_rows(job, w, block, &job.bias, block.bias, job.bias_size, tile, n_next)
                fetch_rows(job, w, block, &job.dense, block.dense, job.dense_size, tile, n_next)
            kernels.accumulate(w.acc, w.scores, rescale, block.ld, block.n_vectors, &values, w.stops, first_chunk,
                               job.value_dim, w.fetch, block.n_fetch, block.fetch_nbytes)
            block.n_fetch = 0
    if first:
        memset(w.acc, 0, job.value_dim * block.ld * job.itemsize)
    return partial


cdef void clear_masked(const Job *job, const Scratch *w, const Block *block, TileState state,
                       Py_ssize_t n_keys) noexcept nogil:
    """Makes the weights at w.rows 0 where a lane may not read a key: in a row of NaN they came out as 0 * NaN."""
    cdef const char *const *bias = bias_of(job, w)
    cdef const uint32_t *words = words_of(w, state)
    cdef Py_ssize_t lane, j
    cdef bint masked
    for lane in range(block.n_rows):
        for j in range(n_keys):
            masked = words != NULL and not words[j // WORD * block.ld + lane] >> (j % WORD) & 1
            if masked or (bias != NULL and get_real(bias[lane] + j * job.itemsize, job.itemsize) == -INFINITY):
                set_real(w.rows[lane] + j * job.itemsize, 0, job.itemsize)


cdef void write_weights(const Job *job, Scratch *w, const Block *block) noexcept nogil:
    """The weights of the block's rows: its scores once more, against the row_max and row_sum now known."""
    cdef Py_ssize_t key0, n_keys, lane, tile = block.low // job.block_k * job.block_k
    cdef TileState state
    for lane in range(block.n_rows):
        memset(lane_row(w, &job.weights, block.weights, lane), 0, job.len_k * job.itemsize)
    while tile < block.high:
        key0 = max(tile, block.low)
        tile += job.block_k
        n_keys = min(tile, block.high) - key0
        state = score_tile(job, w, block, key0, n_keys, True)
        if state == TILE_EMPTY:
            continue
        # Against an empty tile_max row_max stays; what softmax does to row_sum no longer matters.
        job.kernels.softmax(w.scores, w.empty, w.row_max, w.row_sum, w.rescale, block.ld, w.stops, KEY_CHUNK,
                            job.exponent_factor)
        for lane in range(block.ld):
            w.rows[lane] = lane_row(w, &job.weights, block.weights, lane) + key0 * job.itemsize
        if job.kernels.unpack(w.rows, job.itemsize, block.n_rows, w.scores, block.ld, n_keys, w.inverse):
            clear_masked(job, w, block, state, n_keys)


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


cdef inline void find_head(const Job *job, const Scratch *w, Block *block) noexcept nogil:
    """Where the kernels read the block's keys and values."""
    cdef fastattn_values *values = &block.values
    block.keys = w.key_copy if job.key_copy_nbytes > 0 else block.key
    block.key_row = job.head_dim * job.itemsize if job.key_copy_nbytes > 0 else job.key.row
    block.key_col = job.itemsize if job.key_copy_nbytes > 0 else job.key.col
    values.at = w.panels if job.panels_nbytes > 0 else block.value
    values.row = job.kernels.panel_cols * job.itemsize if job.panels_nbytes > 0 else job.value.row
    values.col = job.itemsize if job.panels_nbytes > 0 else job.value.col
    values.panel = job.panel if job.panels_nbytes > 0 else job.kernels.panel_cols * job.value.col


cdef void find_block(const Job *job, Scratch *w, Block *block, Py_ssize_t item, Py_ssize_t kv,
                     Py_ssize_t first_row) noexcept nogil:
    """Where a block of rows finds everything; how many rows it has is known."""
    block.item = item
    block.key = at_item(job, &job.key, item) + kv * job.key.head
    block.value = at_item(job, &job.value, item) + kv * job.value.head
    block.bias = at_item(job, &job.bias, item)
    block.dense = at_item(job, &job.dense, item)
    block.tile_index = at_item(job, &job.tile_index, item)
    block.key_start = at_item(job, &job.key_start, item)
    block.key_stop = at_item(job, &job.key_stop, item)
    block.weights = at_item(job, &job.weights, item)
    find_rows(job, w, block, kv, first_row)


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
    cdef Py_ssize_t lane, item = place.item
    cdef bint partial
    cdef char *item_rows
    cdef char *clean
    block.n_vectors = place.n_vectors
    block.ld = place.n_vectors * kernels.lanes
    block.n_rows = place.n_rows
    find_block(job, w, &block, item, place.kv, place.first_row)
    find_head(job, w, &block)
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


cdef extern from * nogil:
    enum: ATOMIC_RELAXED "__ATOMIC_RELAXED"
    enum: ATOMIC_ACQ_REL "__ATOMIC_ACQ_REL"
    Py_ssize_t fetch_add "__atomic_fetch_add"(Py_ssize_t *, Py_ssize_t, int)
    Py_ssize_t fetch_sub "__atomic_fetch_sub"(Py_ssize_t *, Py_ssize_t, int)


cdef extern from "spread.h" nogil:
    ctypedef struct fastattn_spread:
        pass
    void fastattn_set_cores(const int32_t *, int)
    void fastattn_spread_start(fastattn_spread *)
    void fastattn_spread_enter(fastattn_spread *, int)
    void fastattn_spread_leave(fastattn_spread *, int)


cdef void work(Job *job, Share *shares, int thread, int num_threads) noexcept nogil:
    """What one thread does: the tasks of its own share, then what the others have not begun."""
    cdef Scratch *w = <Scratch *>malloc(sizeof(Scratch))
    cdef char *memory = new_scratch(job, w) if w != NULL else NULL
    cdef Share *share
    cdef int turn
    cdef Py_ssize_t task, first
    # Small tasks are taken a few at a time.
    cdef Py_ssize_t chunk = job.n_tasks if num_threads == 1 else max(<Py_ssize_t>1, job.n_tasks // (num_threads * 32))
    if memory == NULL:
        job.out_of_memory = True
    else:
        for turn in range(num_threads):
            share = &shares[(thread + turn) % num_threads]
            while True:
                first = fetch_add(&share.next, chunk, ATOMIC_RELAXED)
                if first >= share.stop:
                    break
                for task in range(first, min(first + chunk, share.stop)):
                    if job.by_rows:
                        run_row_task(job, w, task)
                    else:
                        run_task(job, w, task)
    free(memory)
    free(w)


cdef void run_job(Job *job, int num_threads) noexcept nogil:
    """Every task, on num_threads threads. Which thread takes which changes nothing in the result.

    A thread's share are tasks that follow each other: where threads took turns, each had every head's keys and values
    to bring into its own cache. Shares take 6 % off a call at 2048 keys and head_dim 128 and 8 % off layout "bshd" at
    1024 and 64: 2 cores of Emerald Rapids, 2026-11-21, in turns with the driver that took turns.
    """
    cdef Share alone
    cdef Share *shares = &alone
    cdef fastattn_spread room
    cdef fastattn_spread *spread = &room
    cdef int thread
    if num_threads > 1:
        shares = <Share *>malloc(num_threads * sizeof(Share))
        if shares == NULL:
            job.out_of_memory = True
            return
    for thread in range(num_threads):
        shares[thread].next = job.n_tasks * thread // num_threads
        shares[thread].stop = job.n_tasks * (thread + 1) // num_threads
    if num_threads > 1:
        fastattn_spread_start(spread)
        with parallel(num_threads=num_threads):
            fastattn_spread_enter(spread, threadid())
            work(job, shares, threadid(), num_threads)
            fastattn_spread_leave(spread, threadid())
        free(shares)
    else:
        work(job, shares, 0, 1)
