# The fused sweep, for many query rows of float32 on instruction sets with a tile unit (see kernels/fused.h): a task is
# some query blocks, of one head or of several, over key tiles in an order that keeps the blocks and a few tiles in L2.
# A thread splits a key tile into groups when the first block of its task gets there.
#
# The bits of a row depend on its own keys and on the grid of key tiles alone. Numbers that cannot be split into
# groups, such as NaN and inf, go to the other kernels, one score or one product at a time. They change no bit of
# other results.

cdef enum:
    TILE_GROUPS = 8          # of a key tile
    MAX_TASK_BLOCKS = 32
    HEAD_TILES = IN_PIPELINE  # key tiles of a head that are held: each unit of the pipeline may be of another


cdef struct Unit:
    # A query block and a key tile on their way through the pipeline.
    fastattn_unit work
    Py_ssize_t block, key0
    const TileGroups *tile
    uint32_t score_flags     # whether any key or query of it has no groups
    uint32_t value_flags     # whether any of its values is to be added separately
    uint32_t *words          # which keys each lane may attend; only with value_flags


cdef struct TileGroups:
    # A key tile of a head, as far as it is split.
    Py_ssize_t tile          # its number; -1: none yet
    char *key
    char *value
    Py_ssize_t n_keys[TILE_GROUPS]      # that are split, of each group
    uint32_t key_flags[TILE_GROUPS]     # of each group, the keys that have no parts
    uint32_t value_flags[TILE_GROUPS]   # those with a value that is not in the group


cdef struct HeadTiles:
    # The key tiles of a head that a unit of the pipeline may be of: the last ones, whichever they are.
    TileGroups tiles[HEAD_TILES]
    int newest


cdef struct Cursor:
    # The next unit to look at: all blocks of a key tile before the next. No block may attend the keys from stop on.
    Py_ssize_t key_tile, block, stop


cdef struct Task:
    Py_ssize_t first_block, n_blocks     # among those of all heads
    Block blocks[MAX_TASK_BLOCKS]
    uint32_t query_flags[MAX_TASK_BLOCKS]   # lanes with a number that has no parts
    bint is_started[MAX_TASK_BLOCKS]
    bint is_nonfinite[MAX_TASK_BLOCKS]   # whether any output is
    HeadTiles heads[MAX_TASK_BLOCKS]
    Cursor next
    Unit units[IN_PIPELINE]


cdef inline const fastattn_fused *fused_of(const Job *job) noexcept nogil:
    return kernels_of(job).fused


cdef inline Py_ssize_t groups_in(Py_ssize_t n) noexcept nogil:
    return (n + GROUP_KEYS - 1) // GROUP_KEYS


cdef inline Py_ssize_t key_groups_nbytes(const Job *job) noexcept nogil:
    return groups_in(job.head_dim) * PART_NBYTES * job.n_parts


cdef inline const char *contiguous_rows(const Job *job, Scratch *w, const HeadRows *rows, Py_ssize_t key,
                                        Py_ssize_t n_keys, Py_ssize_t n_cols, Py_ssize_t *row) noexcept nogil:
    """Rows of the compute type with contiguous elements, and the bytes from one to the next: in place or copied."""
    if not rows.storage and rows.col == job.itemsize and run_of(rows, key, n_keys) == n_keys:
        row[0] = rows.row
        return row_at(rows, key)
    row[0] = n_cols * job.itemsize
    load_rows(job, w.staged, rows, key, n_keys, n_cols)
    return w.staged


cdef TileGroups *split_keys(const Job *job, Scratch *w, HeadTiles *held, const Block *block, Py_ssize_t key0,
                            Py_ssize_t stop) noexcept nogil:
    """The key tile of key0, with the groups of keys and values from key0 to `stop`."""
    cdef Py_ssize_t number = key0 // FUSED_KEYS, key = key0, n, g, row
    cdef TileGroups *tile = &held.tiles[held.newest]
    cdef const char *at
    if tile.tile != number:
        # Not by number: masks skip tiles, so a number does not say which tile is the oldest.
        held.newest = (held.newest + 1) % HEAD_TILES
        tile = &held.tiles[held.newest]
        tile.tile = number
        memset(tile.n_keys, 0, sizeof(tile.n_keys))
    for g in range(key0 % FUSED_KEYS // GROUP_KEYS, TILE_GROUPS):
        if key >= stop:
            break
        n = min(GROUP_KEYS, stop - key)
        if n > tile.n_keys[g]:
            # What units in the pipeline have split stays as it is.
            tile.n_keys[g] = n
            at = contiguous_rows(job, w, &block.key, key, n, job.head_dim, &row)
            tile.key_flags[g] = fused_of(job).split_keys(tile.key + g * key_groups_nbytes(job), <int>job.n_parts, at, row,
                                                         n, job.head_dim)
            at = contiguous_rows(job, w, &block.value, key, n, job.value_dim, &row)
            tile.value_flags[g] = fused_of(job).split_values(tile.value, <int>job.n_parts, job.tile_groups, at, row, n,
                                                             job.value_dim, g)
        key += GROUP_KEYS
    return tile


cdef inline void select_block(const Job *job, Scratch *w, Py_ssize_t number) noexcept nogil:
    """Points what a thread has for each lane to the lanes of a task's block."""
    cdef Py_ssize_t lanes = number * FUSED_LANES
    cdef char *base = w.base
    w.row_max = base + job.to_row_max + lanes * job.itemsize
    w.row_sum = base + job.to_row_sum + lanes * job.itemsize
    w.acc = base + job.to_acc + number * job.acc_nbytes
    w.start = <Py_ssize_t *>(base + job.to_start) + lanes
    w.stop = <Py_ssize_t *>(base + job.to_stop) + lanes
    w.kept_start = <Py_ssize_t *>(base + job.to_kept_start) + lanes
    w.kept_stop = <Py_ssize_t *>(base + job.to_kept_stop) + lanes
    w.row_i = <Py_ssize_t *>(base + job.to_row_i) + lanes
    w.row_h = <Py_ssize_t *>(base + job.to_row_h) + lanes


cdef inline char *query_groups_of(const Job *job, Scratch *w, Py_ssize_t number) noexcept nogil:
    return w.query_groups + number * groups_in(job.head_dim) * GROUP_NBYTES


cdef void start_block(const Job *job, Scratch *w, Task *task, Py_ssize_t number) noexcept nogil:
    """Prepares a task's block: its rows, the keys they may attend, and the groups of its queries."""
    cdef Block *block = &task.blocks[number]
    cdef Py_ssize_t flat = task.first_block + number, head = flat // job.n_blocks
    cdef Py_ssize_t first_row = flat % job.n_blocks * FUSED_LANES
    block.ld = FUSED_LANES
    block.n_vectors = <int>(FUSED_LANES // job.lanes)
    block.n_rows = min(FUSED_LANES, job.len_q * job.group_size - first_row)
    select_block(job, w, number)
    find_block(job, w, block, head // job.num_kv_heads, head % job.num_kv_heads, first_row)
    find_head(job, w, block)
    block.low -= block.low % GROUP_KEYS
    pack_block(job, w, block)
    task.query_flags[number] = fused_of(job).split_queries(query_groups_of(job, w, number), <const float *>w.query,
                                                          block.ld, job.head_dim)
    start_rows(job, w, w.row_max, w.row_sum, block.ld)
    task.is_started[number] = False


cdef Py_ssize_t find_bias_prefetches(const Job *job, Scratch *w, Task *task, Py_ssize_t number, Py_ssize_t key0,
                                     Py_ssize_t n_keys) noexcept nogil:
    """Lists in w.prefetch the bias of the block after a unit's, for the same keys, and returns how many entries it has.

    A bias of each head is read once, from memory, while the tile unit waits. This saves 4 % with 8 heads of 2048
    by 2048. To prefetch queries, keys, values and outputs as well saved nothing in batches of short heads, and
    cost up to 12 % where arrays are in the cache. 2 cores of an Intel Xeon with AMX, 2026-11-24, interleaved A/B.
    """
    cdef Block *block = &task.blocks[number + 1]
    if number + 1 == task.n_blocks or job.bias.head == 0:
        return 0
    block.n_prefetch = 0
    select_block(job, w, number + 1)
    prefetch_rows(job, w, block, &job.bias, block.bias, job.bias_nbytes, key0, n_keys, PREFETCH_NBYTES)
    select_block(job, w, number)
    return block.n_prefetch


cdef void start_units(const Job *job, Task *task) noexcept nogil:
    """Sets the cursor to the first key tile that any block may attend."""
    cdef Py_ssize_t low = job.len_k, high = 0, i
    for i in range(task.n_blocks):
        if task.blocks[i].low < task.blocks[i].high:
            low = min(low, task.blocks[i].low)
            high = max(high, task.blocks[i].high)
    task.next.key_tile, task.next.block, task.next.stop = low // FUSED_KEYS, 0, high


cdef bint next_unit(const Job *job, Scratch *w, Task *task, Unit *unit, TileState *state) noexcept nogil:
    """Fills in the next unit with a key to attend; False: there is none."""
    cdef Cursor *at = &task.next
    cdef Block *block
    cdef const TileGroups *tile
    cdef Py_ssize_t start, number, head, key0, n_keys, first, g
    while at.key_tile * FUSED_KEYS < at.stop:
        start = at.key_tile * FUSED_KEYS
        number = at.block
        at.block += 1
        if at.block == task.n_blocks:
            at.block = 0
            at.key_tile += 1
        block = &task.blocks[number]
        key0 = max(start, block.low)
        n_keys = min(start + FUSED_KEYS, block.high) - key0
        if n_keys <= 0:
            continue
        select_block(job, w, number)
        state[0] = mask_tile(job, w, block, key0, n_keys, False, &unit.work.plain, &unit.work.plain_stop)
        if state[0] != TILE_EMPTY:
            break
    else:
        return False
    head = (task.first_block + number) // job.n_blocks - task.first_block // job.n_blocks
    tile = split_keys(job, w, &task.heads[head], block, key0, key0 + n_keys)
    first = (key0 - start) // GROUP_KEYS
    unit.block = number
    unit.key0 = key0
    unit.tile = tile
    unit.work.query = query_groups_of(job, w, number)
    unit.work.key = tile.key + first * key_groups_nbytes(job)
    unit.work.value = tile.value + first * PART_NBYTES * job.n_parts
    unit.work.n_parts = <int>job.n_parts
    unit.work.query_parts = <int>job.query_parts
    unit.work.weight_parts = <int>job.weight_parts
    unit.work.tile_groups = job.tile_groups
    unit.work.n_keys = n_keys
    unit.work.row_max = <float *>w.row_max
    unit.work.row_sum = <float *>w.row_sum
    unit.work.acc = <float *>w.acc
    unit.work.is_first = not task.is_started[number]
    task.is_started[number] = True
    unit.work.prefetch = w.prefetch
    unit.work.n_prefetch = find_bias_prefetches(job, w, task, number, key0, n_keys) if job.has_bias else 0
    memcpy(unit.work.tile_max, w.empty, FUSED_LANES * sizeof(float))
    unit.score_flags = task.query_flags[number]
    unit.value_flags = 0
    for g in range(first, first + groups_in(n_keys)):
        unit.score_flags |= tile.key_flags[g]
        unit.value_flags |= tile.value_flags[g]
    return True


cdef inline bint is_flagged(const uint32_t *flags, Py_ssize_t key) noexcept nogil:
    """Whether the flag of a key is set, among those of its key tile."""
    return flags[key % FUSED_KEYS // GROUP_KEYS] >> key % GROUP_KEYS & 1


cdef void correct_scores(const Job *job, Scratch *w, const Task *task, Unit *unit) noexcept nogil:
    """Scores of queries and keys that have no groups, as the other kernels compute them."""
    cdef const Block *block = &task.blocks[unit.block]
    cdef uint32_t own
    cdef Py_ssize_t j, lane
    cdef float *to
    cdef const float *other = <const float *>w.other_scores
    cdef float *top = unit.work.tile_max
    for j in range(block.n_vectors):
        w.part_stops[j] = unit.work.n_keys
    score_in_float(job, w, block, NULL, unit.key0, unit.work.n_keys)
    memcpy(top, w.empty, FUSED_LANES * sizeof(float))
    for j in range(unit.work.n_keys):
        to = unit.work.scores + j * FUSED_LANES
        own = ALL_BITS if is_flagged(unit.tile.key_flags, unit.key0 + j) else task.query_flags[unit.block]
        for lane in range(FUSED_LANES):
            if own >> lane & 1:
                to[lane] = other[j * FUSED_LANES + lane]
            if unit.work.plain <= j < unit.work.plain_stop and not top[lane] > to[lane]:
                top[lane] = to[lane]


cdef inline void adjust_part(Job *job, Scratch *w, const Block *block, TileState state, Py_ssize_t key0, Py_ssize_t first,
                             Py_ssize_t n_keys) noexcept nogil:
    cdef ScoreTile scores
    if n_keys > 0:
        find_part_stops(w, block, first, n_keys)
        scores = lane_tile(job, w, block, state, key0, first, n_keys, w.part_stops)
        adjust_scores(job, w, block, &scores)


cdef void adjust_unit(Job *job, Scratch *w, Task *task, Unit *unit, TileState state) noexcept nogil:
    """The epilogues of a unit's raw scores; the masks are those that `next_unit` has found."""
    cdef Block *block = &task.blocks[unit.block]
    cdef Py_ssize_t n_keys = unit.work.n_keys, plain = unit.work.plain, plain_stop = unit.work.plain_stop, j, v, lane
    cdef Py_ssize_t lanes = job.lanes
    select_block(job, w, unit.block)
    if unit.score_flags:
        correct_scores(job, w, task, unit)
    if plain > 0 or plain_stop < n_keys:
        w.scores = <char *>unit.work.scores
        w.tile_max = <char *>unit.work.tile_max
        adjust_part(job, w, block, state, unit.key0, 0, plain)
        adjust_part(job, w, block, state, unit.key0, plain_stop, n_keys - plain_stop)
        for v in range(block.n_vectors):
            for j in range(w.stops[v], n_keys):
                for lane in range(v * lanes, (v + 1) * lanes):
                    unit.work.scores[j * FUSED_LANES + lane] = -INFINITY
    if unit.value_flags:
        keep_words(job, w, block, unit, state)


cdef void keep_words(const Job *job, Scratch *w, const Block *block, Unit *unit, TileState state) noexcept nogil:
    """Keeps which keys of a unit each lane may attend until its values are added."""
    cdef Py_ssize_t j, lane, n_words = (unit.work.n_keys + WORD - 1) // WORD
    cdef TileState here
    memset(unit.words, 0xff, n_words * FUSED_LANES * sizeof(uint32_t))
    for j in range(unit.work.n_keys):
        here = TILE_FULL if unit.work.plain <= j < unit.work.plain_stop else state
        for lane in range(FUSED_LANES):
            if (not is_allowed(job, w, block, here, lane, j)
                    or (job.has_score_mod and unit.work.scores[j * FUSED_LANES + lane] == -INFINITY)):
                unit.words[j // WORD * FUSED_LANES + lane] &= ~(<uint32_t>1 << (j % WORD))


cdef inline float part_of(const char *groups, Py_ssize_t key, Py_ssize_t lane) noexcept nogil:
    """A part of a weight, of a key of the group and a lane; `groups` begins with that part."""
    return bfloat16_at(groups + lane // 16 * 1024 + key % 16 * 64 + lane % 16 * 4 + key // 16 * 2)


cdef void add_values(const Job *job, Scratch *w, const Task *task, const Unit *unit) noexcept nogil:
    """Adds weights times values that have no groups, for the lanes that may attend them."""
    cdef const Block *block = &task.blocks[unit.block]
    cdef const float *values = <const float *>w.staged
    cdef const char *weights
    cdef Py_ssize_t j, key, e, lane, part
    cdef float p[FUSED_LANES]
    cdef uint32_t allowed
    for j in range(unit.work.n_keys):
        key = unit.key0 + j
        if not is_flagged(unit.tile.value_flags, key):
            continue
        weights = unit.work.weights + j // GROUP_KEYS * GROUP_NBYTES
        allowed = 0
        for lane in range(FUSED_LANES):
            p[lane] = 0
            for part in range(job.weight_parts):   # the low one first
                p[lane] += part_of(weights + (job.weight_parts - 1 - part) * PART_NBYTES, j % GROUP_KEYS, lane)
            allowed |= (unit.words[j // WORD * FUSED_LANES + lane] >> j % WORD & 1) << lane
        load_rows(job, w.staged, &block.value, key, 1, job.value_dim)
        for e in range(job.value_dim):
            if fastattn_is_split(values[e]):
                continue
            for lane in range(FUSED_LANES):
                if allowed >> lane & 1:
                    unit.work.acc[e * FUSED_LANES + lane] += p[lane] * values[e]


cdef void finish_block(const Job *job, Scratch *w, Task *task, Py_ssize_t number) noexcept nogil:
    cdef const Block *block = &task.blocks[number]
    select_block(job, w, number)
    if not task.is_started[number]:
        memset(w.acc, 0, job.acc_nbytes)
    find_rows_of(job, w, block, &job.out, w.out_rows)
    end_rows(job, w, w.row_max, w.row_sum, block.ld)
    kernels_of(job).finish(w.inverse, w.lse if job.has_lse else NULL, w.row_max, w.row_sum, block.ld,
                           job.exponent_factor, job.kept_share)
    task.is_nonfinite[number] = write_out(job, w, block, w.acc, block.ld)
    write_lse(job, w, block)


cdef void finish_again(Job *job, Scratch *w, Task *task) noexcept nogil:
    """Computes the scores of finished blocks again, for weights and for outputs that may have overflowed.

    The tile unit computes them: other kernels round differently, and a score could exceed row_max.
    """
    cdef Unit *unit = &task.units[0]
    cdef Block *block
    cdef uint32_t *words = w.words
    cdef char *clean = w.clean if masks_any(job) else NULL
    cdef char *rescale
    cdef fastattn_values values
    cdef TileState state = TILE_EMPTY
    cdef Py_ssize_t number, n_keys, v
    for number in range(task.n_blocks):
        task.is_started[number] = False
        if job.has_weights:
            select_block(job, w, number)
            clear_weights(job, w, &task.blocks[number])
    start_units(job, task)
    unit.words = w.kept_words
    unit.work.scores = <float *>w.score_tiles
    while next_unit(job, w, task, unit, &state):
        block = &task.blocks[unit.block]
        fused_of(job).step(&unit.work, NULL, NULL, job.head_dim, job.value_dim, <float>job.exponent_factor)
        unit.value_flags = 1   # so that adjust_unit keeps the words of all keys
        adjust_unit(job, w, task, unit, state)
        n_keys = unit.work.n_keys
        for v in range(block.n_vectors):
            w.stops[v] = n_keys
        w.scores = w.score_tiles
        w.words = unit.words
        kernels_of(job).finish(w.inverse, NULL, w.row_max, w.row_sum, block.ld, job.exponent_factor, job.kept_share)
        find_weights(job, w, block, unit.key0)
        if job.has_weights:
            write_tile_weights(job, w, block, TILE_PARTIAL, unit.key0, n_keys)
        if task.is_nonfinite[unit.block]:
            leave_headroom(job, w, block.n_rows, n_keys, job.itemsize, block.ld * job.itemsize)
            block.n_prefetch = block.prefetch_nbytes = 0
            rescale = NULL if unit.work.is_first else w.rescale
            if clean == NULL:
                accumulate_tile(job, w, block, w.acc, rescale, unit.key0, n_keys)
            else:
                values = tile_values(job, w, block, unit.key0, n_keys)
                kernels_of(job).accumulate_nonfinite(
                    w.acc, w.scores, rescale, block.ld, &values, w.stops, KEY_CHUNK - unit.key0 % KEY_CHUNK,
                    job.value_dim, bias_of(job, w), w.words, clean)
        w.words = words
    for number in range(task.n_blocks):
        if task.is_nonfinite[number] and task.is_started[number]:
            block = &task.blocks[number]
            select_block(job, w, number)
            find_rows_of(job, w, block, &job.out, w.out_rows)
            kernels_of(job).finish(w.inverse, NULL, w.row_max, w.row_sum, block.ld, job.exponent_factor, job.kept_share)
            write_large(job, w, block, block.ld, w.acc, job.itemsize, block.ld * job.itemsize)


cdef void run_units(Job *job, Scratch *w, Task *task) noexcept nogil:
    cdef Unit *scored
    cdef Unit *weighted = NULL
    cdef Unit *added = NULL
    cdef TileState state = TILE_EMPTY
    cdef Py_ssize_t t = 0
    while True:
        scored = &task.units[t % IN_PIPELINE]
        scored.work.scores = <float *>(w.score_tiles + t % 2 * FUSED_KEYS * FUSED_LANES * sizeof(float))
        scored.work.weights = w.weight_groups + t % 2 * TILE_GROUPS * GROUP_NBYTES
        scored.words = w.kept_words + t % IN_PIPELINE * TILE_GROUPS * FUSED_LANES
        if not next_unit(job, w, task, scored, &state):
            scored = NULL
        if scored == NULL and weighted == NULL and added == NULL:
            break
        if weighted != NULL:
            select_block(job, w, weighted.block)
            weighted.work.drop_words = find_drop_words(job, w, &task.blocks[weighted.block], FUSED_LANES, weighted.key0,
                                                       weighted.work.n_keys)
        fused_of(job).step(&scored.work if scored != NULL else NULL, &weighted.work if weighted != NULL else NULL,
                           &added.work if added != NULL else NULL, job.head_dim, job.value_dim,
                           <float>job.exponent_factor)
        if added != NULL and added.value_flags:
            add_values(job, w, task, added)
        if scored != NULL:
            adjust_unit(job, w, task, scored, state)
        added = weighted
        weighted = scored
        t += 1


cdef void run_fused_task(Job *job, Scratch *w, Py_ssize_t number) noexcept nogil:
    """Some query blocks, from their queries to their outputs."""
    cdef Task room
    cdef Task *task = &room
    cdef TileGroups *tile
    cdef Py_ssize_t n_blocks = job.batch * job.num_kv_heads * job.n_blocks, i, n_heads
    cdef bint again
    # The last blocks of a head first: under a causal mask they take longest.
    number = job.n_tasks - 1 - number
    task.first_block = n_blocks * number // job.n_tasks
    task.n_blocks = n_blocks * (number + 1) // job.n_tasks - task.first_block
    for i in range(task.n_blocks):
        start_block(job, w, task, i)
    n_heads = (task.first_block + task.n_blocks - 1) // job.n_blocks - task.first_block // job.n_blocks + 1
    for i in range(n_heads * HEAD_TILES):
        tile = &task.heads[i // HEAD_TILES].tiles[i % HEAD_TILES]
        tile.tile = -1
        tile.key = w.key_groups + i * job.tile_nbytes
        tile.value = tile.key + job.tile_groups * key_groups_nbytes(job)
    for i in range(n_heads):
        task.heads[i].newest = 0
    start_units(job, task)
    run_units(job, w, task)
    again = job.has_weights
    for i in range(task.n_blocks):
        finish_block(job, w, task, i)
        again |= task.is_nonfinite[i]
    if again:
        finish_again(job, w, task)
