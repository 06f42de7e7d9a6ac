# Scores that are reduced over keys instead of being weights of values: the k largest of each query, by the sweep's score
# stage, whose tasks may share the keys of a query block, and late interaction, the largest for each token of a query with the tokens of each document.

cdef enum:
    TOKENS = 64  # of a document, scored at once: their rows and scores stay in L1 or L2
    # Packed tokens of queries of one task, in bytes, unless one query has more: they stay in L2 beside a document's. Other
    # numbers were not measured.
    QUERY_NBYTES = 1 << 18


cdef struct Reduction:
    Job *job         # its weights are the scores kept, (*lead, H, L, k), contiguous
    int64_t *index   # their keys, likewise
    Py_ssize_t k


cdef inline int64_t *own_index(const Reduction *r, Py_ssize_t task, Py_ssize_t lane) noexcept nogil:
    return <int64_t *>partials_of(r.job)[task].data + lane * r.k


cdef inline char *own_values(const Reduction *r, Py_ssize_t task, Py_ssize_t lane) noexcept nogil:
    return <char *>own_index(r, task, r.job.max_lanes) + lane * r.k * r.job.itemsize


cdef void find_kept(const Reduction *r, Scratch *w, const Block *block) noexcept nogil:
    """Where the results of each row are."""
    cdef Job *job = r.job
    cdef Py_ssize_t lane
    for lane in range(block.n_rows):
        w.out_rows[lane] = lane_row(w, &job.weights, block.weights, lane)
        w.index_rows[lane] = r.index + (w.out_rows[lane] - <char *><size_t>job.weights.data) // job.itemsize


cdef void start_own(const Reduction *r, Scratch *w, const Block *block, Py_ssize_t task) noexcept nogil:
    """Has a task keep its scores in its own memory, at first none."""
    cdef Py_ssize_t lane, n
    for lane in range(block.n_rows):
        w.out_rows[lane] = own_values(r, task, lane)
        w.index_rows[lane] = own_index(r, task, lane)
        memset(w.index_rows[lane], 0xff, r.k * sizeof(int64_t))
        for n in range(r.k):
            set_real(w.out_rows[lane] + n * r.job.itemsize, -INFINITY, r.job.itemsize)


cdef void reduce_block(const Reduction *r, Scratch *w, Py_ssize_t task) noexcept nogil:
    """The largest scores of the rows of one query block, of all keys or of a split of them. The first split keeps them in
    the results, into which the last task of the block to end takes those of the others, in the order of their keys."""
    cdef Job *job = r.job
    cdef TaskRows rows = task_rows(job, task)
    cdef Block block
    cdef Py_ssize_t first = rows.split * job.split_tiles * job.block_k, lane, tile, stop, key0, n_keys
    block.n_vectors = rows.n_vectors
    block.ld = rows.n_vectors * job.lanes
    block.n_rows = rows.n_rows
    block.other_lanes = 0
    find_block(job, w, &block, rows.item, rows.kv, rows.first_row)
    find_head(job, w, &block)
    pack_block(job, w, &block)
    task = rows.block * job.n_splits + rows.split
    if rows.split == 0:
        find_kept(r, w, &block)
    else:
        start_own(r, w, &block, task)
    tile = max(first, block.low // job.block_k * job.block_k)
    stop = min(block.high, first + job.split_tiles * job.block_k)
    while tile < stop:
        key0 = max(tile, block.low)
        tile += job.block_k
        n_keys = min(tile, stop) - key0
        if score_tile(job, w, &block, key0, n_keys, False) != TILE_EMPTY:
            kernels_of(job).topk_keys(w.out_rows, w.index_rows, r.k, block.n_rows, w.scores, block.ld, w.stops, key0)
    if job.n_splits == 1 or not is_last_task(job, rows.block):
        return
    find_kept(r, w, &block)
    for task in range(rows.block * job.n_splits + 1, (rows.block + 1) * job.n_splits):
        for lane in range(block.n_rows):
            kernels_of(job).merge_topk(w.out_rows[lane], w.index_rows[lane], r.k, own_values(r, task, lane),
                                       own_index(r, task, lane))


cdef void run_reduction_tasks(void *call, Share *shares, int own, int n_shares) noexcept nogil:
    """Without memory a thread runs no task, and the others run its share."""
    cdef const Reduction *r = <const Reduction *>call
    cdef Scratch scratch
    cdef char *memory = <char *>malloc(r.job.scratch_nbytes + 64)
    cdef int turn = 0
    cdef Py_ssize_t task, stop
    if memory == NULL:
        return
    set_scratch(r.job, <char *>((<size_t>memory + 63) & ~<size_t>63), &scratch)
    while take_tasks(shares, own, n_shares, 1, &turn, &task, &stop):
        reduce_block(r, &scratch, task)
    free(memory)


def reduce_scores(tuple record, arrays, cnp.ndarray index, int num_threads):
    """Fills the weights among the arrays, which are -inf, with the largest scores of each row, and index, which is -1, with
    their keys; see `fastattn._call.reductions.ReductionCall`."""
    cdef Reduction r
    cdef char *partials = NULL
    cdef bint done = False
    r.job = new_job(record[0], record[1])
    set_addresses(r.job, tuple(arrays))
    r.index = <int64_t *>cnp.PyArray_DATA(index)
    r.k = index.shape[index.ndim - 1]
    r.job.partial_nbytes = padded(r.job.max_lanes * r.k * (<Py_ssize_t>sizeof(int64_t) + r.job.itemsize))
    with nogil:
        if r.job.n_splits > 1:
            partials = new_partials(r.job)
        if r.job.n_splits == 1 or partials != NULL:
            done = run_on_threads(run_reduction_tasks, &r, r.job.n_tasks, num_threads, False)
    free(partials)
    free(r.job)
    if not done:
        raise MemoryError("no memory for the tiles of a thread")


cdef struct Similarity:
    # A task is a document and some queries, all of whose tokens are rows of one list.
    const fastattn_kernels *kernels
    Py_ssize_t itemsize, dim
    const char *query
    Py_ssize_t query_item, query_row, query_col
    int query_storage
    const int64_t *first       # (n_queries + 1,): where the tokens of each query begin in the list
    Py_ssize_t n_queries, group, n_groups, group_rows   # queries of a task, and their tokens, at most
    const char *document
    Py_ssize_t unit, row, col  # bytes from one `start` to the next, and in a document
    int storage
    const char *scale          # of int8
    Py_ssize_t scale_unit, scale_row, scale_col
    const int64_t *starts      # (n_documents,)
    const int64_t *lengths
    Py_ssize_t n_documents
    char *out                  # (n_queries, n_documents)
    Py_ssize_t out_size        # of one of its numbers


cdef struct SimilarityTiles:
    # One thread's.
    Py_ssize_t group           # whose queries are packed; -1: none
    char *packed               # query blocks one after another, as `pack` leaves them
    char *tops                 # the largest product of each row
    char *scores
    char *tokens               # of a document, in the compute type
    char *staged               # of a query block, likewise
    const char **rows
    Py_ssize_t *stops


cdef Py_ssize_t set_similarity_tiles(const Similarity *n, char *base, SimilarityTiles *t) noexcept nogil:
    """Sets the addresses of the tiles from `base` on, a cache line; returns their size in bytes."""
    cdef Py_ssize_t lanes = n.kernels.lanes, rows = (n.group_rows + lanes - 1) // lanes * lanes
    cdef Py_ssize_t most = lanes * n.kernels.max_vectors, row = n.dim * n.itemsize
    cdef char *at = base
    t.group = -1
    t.packed = take(&at, rows * row)
    t.tops = take(&at, rows * n.itemsize)
    t.scores = take(&at, TOKENS * most * n.itemsize)
    t.tokens = take(&at, TOKENS * row if n.storage else 0)
    t.staged = take(&at, most * row if n.query_storage else 0)
    t.rows = <const char **>take(&at, most * sizeof(char *))
    t.stops = <Py_ssize_t *>take(&at, n.kernels.max_vectors * sizeof(Py_ssize_t))
    return at - base


cdef inline Py_ssize_t vectors_before(const Similarity *n, Py_ssize_t n_rows, Py_ssize_t block) noexcept nogil:
    """Vectors of the query blocks before this one, of nearly the same size; of the last but one, all."""
    cdef Py_ssize_t vectors = (n_rows + n.kernels.lanes - 1) // n.kernels.lanes
    cdef Py_ssize_t n_blocks = blocks_of(n, n_rows)
    return block * (vectors // n_blocks) + min(block, vectors % n_blocks)


cdef inline Py_ssize_t blocks_of(const Similarity *n, Py_ssize_t n_rows) noexcept nogil:
    cdef Py_ssize_t most = n.kernels.lanes * n.kernels.max_vectors
    return (n_rows + most - 1) // most


cdef void load_document(const Similarity *n, char *to, const char *at, Py_ssize_t row, Py_ssize_t col, int storage,
                      const char *scale, Py_ssize_t n_tokens) noexcept nogil:
    """Rows in the compute type and without gaps."""
    cdef Py_ssize_t i
    for i in range(n_tokens):
        n.kernels.load_row(to + i * n.dim * n.itemsize, at + i * row, col, n.dim, storage & STORAGE,
                           (storage & SWAPPED) != 0, scale + i * n.scale_row, n.scale_col)


cdef void pack_queries(const Similarity *n, SimilarityTiles *t, Py_ssize_t group) noexcept nogil:
    """The tokens of a group of queries, in blocks of lanes; those past the last repeat it."""
    cdef Py_ssize_t query = group * n.group, first = n.first[query], lanes = n.kernels.lanes
    cdef Py_ssize_t n_rows = n.first[min(query + n.group, n.n_queries)] - first, block, lane, at, vector, ld, row = 0
    cdef const char *token
    cdef float one = 1
    for block in range(blocks_of(n, n_rows)):
        vector = vectors_before(n, n_rows, block)
        ld = (vectors_before(n, n_rows, block + 1) - vector) * lanes
        for lane in range(ld):
            if row < n_rows:
                while n.first[query + 1] <= first + row:
                    query += 1
                at = first + row - n.first[query]
                token = n.query + query * n.query_item + at * n.query_row
                t.rows[lane] = token
                if n.query_storage:
                    t.rows[lane] = t.staged + lane * n.dim * n.itemsize
                    n.kernels.load_row(t.staged + lane * n.dim * n.itemsize, token, n.query_col, n.dim,
                                       n.query_storage & STORAGE, (n.query_storage & SWAPPED) != 0, <const char *>&one, 0)
                row += 1
            else:
                t.rows[lane] = t.rows[lane - 1]
        n.kernels.pack(t.packed + vector * lanes * n.dim * n.itemsize, ld, t.rows,
                       n.itemsize if n.query_storage else n.query_col, n.dim, 1)
    t.group = group


cdef void find_tops(const Similarity *n, SimilarityTiles *t, Py_ssize_t n_rows, Py_ssize_t document) noexcept nogil:
    """The largest product of each row of the packed queries with the tokens of a document, at least one."""
    cdef Py_ssize_t lanes = n.kernels.lanes, size = n.itemsize, length = n.lengths[document], token = 0
    cdef Py_ssize_t block, v, n_tokens, vector, n_vectors, row = n.row, col = n.col
    cdef const char *at = n.document + n.starts[document] * n.unit
    cdef const char *scale = n.scale + n.starts[document] * n.scale_unit
    cdef const char *tokens
    for v in range((n_rows + lanes - 1) // lanes * lanes):
        set_real(t.tops + v * size, -INFINITY, size)
    if n.storage:
        row = n.dim * size
        col = size
    while token < length:
        n_tokens = min(length - token, TOKENS)
        tokens = at + token * n.row
        if n.storage:
            load_document(n, t.tokens, tokens, n.row, n.col, n.storage, scale + token * n.scale_row, n_tokens)
            tokens = t.tokens
        for v in range(n.kernels.max_vectors):
            t.stops[v] = n_tokens
        for block in range(blocks_of(n, n_rows)):
            vector = vectors_before(n, n_rows, block)
            n_vectors = vectors_before(n, n_rows, block + 1) - vector
            n.kernels.score(t.scores, NULL, t.packed + vector * lanes * n.dim * size, n_vectors * lanes, <int>n_vectors,
                            tokens, t.stops, n.dim, row, col, NULL, 0, 0)
            n.kernels.max_keys(t.tops + vector * lanes * size, t.scores, n_vectors * lanes, n_tokens)
        token += n_tokens


cdef void run_similarity_task(const Similarity *n, SimilarityTiles *t, Py_ssize_t task) noexcept nogil:
    cdef Py_ssize_t group = task // n.n_documents, document = task % n.n_documents, query = group * n.group, row
    cdef Py_ssize_t stop = min(query + n.group, n.n_queries), first = n.first[query]
    cdef double sum
    if n.lengths[document] > 0 and n.first[stop] > first:
        if t.group != group:
            pack_queries(n, t, group)
        find_tops(n, t, n.first[stop] - first, document)
    for query in range(query, stop):
        sum = 0 if n.lengths[document] > 0 else -INFINITY
        if n.lengths[document] > 0:
            for row in range(n.first[query] - first, n.first[query + 1] - first):
                sum += get_real(t.tops + row * n.itemsize, n.itemsize)
        set_real(n.out + (query * n.n_documents + document) * n.out_size, sum, n.out_size)


cdef void run_similarity_tasks(void *call, Share *shares, int own, int n_shares) noexcept nogil:
    """Without memory a thread runs no task, and the others run its share."""
    cdef const Similarity *n = <const Similarity *>call
    cdef SimilarityTiles tiles
    cdef char *memory = <char *>malloc(set_similarity_tiles(n, NULL, &tiles) + 64)
    cdef int turn = 0
    cdef Py_ssize_t n_tasks = n.n_groups * n.n_documents, task, stop
    cdef Py_ssize_t grain = n_tasks if n_shares == 1 else max(<Py_ssize_t>1, n_tasks // (n_shares * 32))
    if memory == NULL:
        return
    set_similarity_tiles(n, <char *>((<size_t>memory + 63) & ~<size_t>63), &tiles)
    while take_tasks(shares, own, n_shares, grain, &turn, &task, &stop):
        for task in range(task, stop):
            run_similarity_task(n, &tiles, task)
    free(memory)


def max_similarity(cnp.ndarray query, cnp.ndarray document, cnp.ndarray scale, tuple storages, cnp.ndarray first,
                   cnp.ndarray starts, cnp.ndarray lengths, cnp.ndarray out, int itemsize, int num_threads):
    """Fills out; see `fastattn._call.reductions.SimilarityCall`.

    storages: of query and document. scale: as there, and of strides 0 where there is none. first: (Q + 1,), how many tokens
    the queries before each have.
    """
    cdef Similarity n
    cdef Py_ssize_t axes = document.ndim
    cdef bint done
    n.kernels = chosen[itemsize == 8]
    n.itemsize = itemsize
    n.dim = query.shape[2]
    n.query = <const char *>cnp.PyArray_DATA(query)
    n.query_item, n.query_row, n.query_col = query.strides[0], query.strides[1], query.strides[2]
    n.query_storage, n.storage = storages
    n.first = <const int64_t *>cnp.PyArray_DATA(first)
    n.n_queries = query.shape[0]
    n.group = max(<Py_ssize_t>1, QUERY_NBYTES // max(<Py_ssize_t>1, query.shape[1] * n.dim * itemsize))
    n.group = min(n.group, n.n_queries)
    n.n_groups = (n.n_queries + n.group - 1) // n.group
    n.group_rows = n.group * query.shape[1]
    n.document = <const char *>cnp.PyArray_DATA(document)
    n.unit, n.row, n.col = document.strides[0], document.strides[axes - 2], document.strides[axes - 1]
    n.scale = <const char *>cnp.PyArray_DATA(scale)
    n.scale_unit, n.scale_row, n.scale_col = scale.strides[0], scale.strides[axes - 2], scale.strides[axes - 1]
    n.starts = <const int64_t *>cnp.PyArray_DATA(starts)
    n.lengths = <const int64_t *>cnp.PyArray_DATA(lengths)
    n.n_documents = starts.shape[0]
    n.out = <char *>cnp.PyArray_DATA(out)
    n.out_size = cnp.PyArray_ITEMSIZE(out)
    with nogil:
        done = run_on_threads(run_similarity_tasks, &n, n.n_groups * n.n_documents, num_threads, False)
    if not done:
        raise MemoryError("no memory for the tiles of a thread")
