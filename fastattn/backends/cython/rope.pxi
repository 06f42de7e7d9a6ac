# Rotary position embedding: rows and threads. A task is some positions of one batch item, all heads: the rows of the
# tables that it reads stay in the cache.

cdef enum:
    ROPE_MAX_AXES = 64  # as many as NumPy's arrays have
    # Bytes of the tables' rows that a task reads, at most. In place float32 (1, 32, 4096, 128) takes 4.7 ms with 64 and
    # 256 KB, 5.7 with 16 KB, 6.0 with 4 and 5.5 with 1 MB; into another array, or in float16, 16 and 64 KB are alike, and
    # no other is faster. 2 cores of Cascade Lake, 2026-11-23, interleaved A/B.
    ROPE_TABLE_NBYTES = 1 << 16
    # Elements from which on two threads may be faster than one: they take 0.9 of the time at 65536 elements, 0.7 at
    # 98304 and 0.6 at 131072. float32 and float16, (1, 8, L, 64) in the cache, the same machine and day.
    ROPE_SMALL = 1 << 16
    # Elements up to which no sleeping thread is woken: two threads took 2.4 of the time of one at 65536 elements, 1.9 at 131072
    # and 1.3 at 262144. float32, (1, 32, L, 128), a call every millisecond, 2 cores of Zen 5, virtual, 2026-11-29.
    ROPE_SHORT = 1 << 18
    ROPE_TASKS = 4      # per thread, at least, where there are as many positions; other numbers were not measured


cdef struct Rotation:
    # One call: rows (*lead, head, position) and, of positions that are not 0, 1, ... from `first` on, (*lead, position).
    fastattn_rotation kind
    const fastattn_kernels *kernels
    int storage
    char *to
    const char *source
    const char *cosines
    const char *sines
    const char *positions
    int64_t first
    Py_ssize_t table_row
    int n_lead
    Py_ssize_t lead[ROPE_MAX_AXES]
    Py_ssize_t to_lead[ROPE_MAX_AXES]
    Py_ssize_t source_lead[ROPE_MAX_AXES]
    Py_ssize_t positions_lead[ROPE_MAX_AXES]
    Py_ssize_t num_heads, to_head, source_head
    Py_ssize_t length, to_row, source_row, positions_row
    bint heads_inside  # the heads of a position are closer in memory than its neighbours
    Py_ssize_t items, block, n_blocks, n_tasks


cdef inline int64_t position_at(const Rotation *r, const char *positions, Py_ssize_t i) noexcept nogil:
    return (<const int64_t *>(positions + i * r.positions_row))[0] if positions != NULL else r.first + i


cdef void rotate_task(const Rotation *r, Py_ssize_t task) noexcept nogil:
    cdef Py_ssize_t item = task // r.n_blocks, i = task % r.n_blocks * r.block, stop = min(i + r.block, r.length)
    cdef Py_ssize_t h, index, run, axis
    cdef char *to = r.to
    cdef const char *source = r.source
    cdef const char *positions = r.positions
    cdef const char *cosines
    cdef const char *sines
    cdef int64_t position
    for axis in range(r.n_lead - 1, -1, -1):
        index = item % r.lead[axis]
        item //= r.lead[axis]
        to += index * r.to_lead[axis]
        source += index * r.source_lead[axis]
        if positions != NULL:
            positions += index * r.positions_lead[axis]
    while i < stop:
        # Positions that follow one another: so do their rows of the tables.
        position = position_at(r, positions, i)
        run = 1
        while i + run < stop and position_at(r, positions, i + run) == position + run:
            run += 1
        cosines = r.cosines + position * r.table_row
        sines = r.sines + position * r.table_row
        if run == 1 or r.heads_inside:
            for index in range(run):
                r.kernels.rope[r.storage](to + (i + index) * r.to_row, r.to_head, source + (i + index) * r.source_row,
                                          r.source_head, cosines + index * r.table_row, sines + index * r.table_row, 0,
                                          r.num_heads, &r.kind)
        else:
            for h in range(r.num_heads):
                r.kernels.rope[r.storage](to + h * r.to_head + i * r.to_row, r.to_row,
                                          source + h * r.source_head + i * r.source_row, r.source_row, cosines, sines,
                                          r.table_row, run, &r.kind)
        i += run


cdef inline void cut(Rotation *r) noexcept nogil:
    """Tasks of r.block positions."""
    r.n_blocks = (r.length + r.block - 1) // r.block
    r.n_tasks = r.items * r.n_blocks


cdef void rotate_tasks(void *call, Share *shares, int own, int n_shares) noexcept nogil:
    cdef int turn = 0
    cdef Py_ssize_t task, stop
    while take_tasks(shares, own, n_shares, 1, &turn, &task, &stop):
        rotate_task(<const Rotation *>call, task)


cdef int run_rotation(Rotation *r, Py_ssize_t elements, thread_limit) except -1:
    """Runs all tasks; no bit depends on which thread runs which. Each thread has consecutive tasks: a core that gets
    rows which another core wrote in the call before has to fetch them from its cache. With tasks in any order two
    threads take twice the time of one at 131072 elements, instead of 0.6 of it."""
    cdef int num_threads = thread_limit() if elements >= ROPE_SMALL else 1
    if not elements:
        return 0
    with nogil:
        if num_threads > 1 and r.n_tasks < num_threads * ROPE_TASKS:
            r.block = max(<Py_ssize_t>1, r.items * r.length // (num_threads * ROPE_TASKS))
            cut(r)
        run_on_threads(rotate_tasks, r, r.n_tasks, <int>min(<Py_ssize_t>num_threads, r.n_tasks), False,
                       elements <= ROPE_SHORT)
    return 0


cdef int bfloat16_type = -1  # NumPy's number of ml_dtypes.bfloat16, from the first call with it on


cdef inline int stored_as(cnp.ndarray x) noexcept:
    """Which of the kernels' storages an array has; -1 for any that kernels do not read as it is."""
    cdef int kind = cnp.PyArray_TYPE(x)
    if not cnp.PyArray_ISNOTSWAPPED(x):
        return -1
    if kind == cnp.NPY_FLOAT or kind == cnp.NPY_DOUBLE:
        return 0
    if kind == cnp.NPY_FLOAT16:
        return 1
    return 2 if kind == bfloat16_type else -1


cdef inline Py_ssize_t distance(Py_ssize_t stride) noexcept:
    return stride if stride > 0 else -stride


cdef Py_ssize_t set_rows(Rotation *r, cnp.ndarray to, cnp.ndarray source, cnp.ndarray cosines, cnp.ndarray sines,
                         bint heads_inside, int storage, bint interleaved, bint inverse) noexcept:
    """All but positions; the number of elements. The axes of both arrays are (*lead, head, position, column), or the
    middle two in the other order, or two, without heads."""
    cdef int ndim = source.ndim, axis, row_axis = ndim - 3 if heads_inside and ndim > 2 else ndim - 2
    cdef int head_axis = ndim - 2 if heads_inside else ndim - 3
    cdef Py_ssize_t items = 1
    r.n_lead = max(ndim - 3, 0)
    for axis in range(r.n_lead):
        r.lead[axis] = source.shape[axis]
        r.to_lead[axis] = to.strides[axis]
        r.source_lead[axis] = source.strides[axis]
        r.positions_lead[axis] = 0
        items *= source.shape[axis]
    r.num_heads = 1
    r.to_head = r.source_head = 0
    if ndim > 2:
        r.num_heads = source.shape[head_axis]
        r.to_head = to.strides[head_axis]
        r.source_head = source.strides[head_axis]
    r.length = source.shape[row_axis]
    r.to_row = to.strides[row_axis]
    r.source_row = source.strides[row_axis]
    r.heads_inside = r.num_heads > 1 and distance(r.to_head) < distance(r.to_row)
    r.to = <char *>cnp.PyArray_DATA(to)
    r.source = <const char *>cnp.PyArray_DATA(source)
    r.cosines = <const char *>cnp.PyArray_DATA(cosines)
    r.sines = <const char *>cnp.PyArray_DATA(sines)
    r.positions = NULL
    r.positions_row = 0
    r.first = 0
    r.storage = storage
    r.kernels = chosen[cnp.PyArray_ITEMSIZE(cosines) == 8]
    r.kind.dim = source.shape[ndim - 1]
    r.kind.n_pairs = cosines.shape[1]
    r.kind.interleaved = interleaved
    r.kind.inverse = inverse
    r.table_row = r.kind.n_pairs * cnp.PyArray_ITEMSIZE(cosines)
    r.block = max(<Py_ssize_t>1, <Py_ssize_t>ROPE_TABLE_NBYTES // max(<Py_ssize_t>1, 2 * r.table_row))
    r.items = items
    cut(r)
    return items * r.num_heads * r.length * r.kind.dim


cdef bint set_positions(Rotation *r, cnp.ndarray positions) noexcept:
    """Broadcasts C-contiguous int64 positions to (*lead, position); whether that is possible."""
    cdef int axis, ndim = positions.ndim
    cdef Py_ssize_t stride = sizeof(int64_t)
    if not 1 <= ndim <= r.n_lead + 1 or positions.shape[ndim - 1] != r.length:
        return False
    r.positions = <const char *>cnp.PyArray_DATA(positions)
    r.positions_row = stride
    stride *= r.length
    for axis in range(1, ndim):
        if positions.shape[ndim - 1 - axis] != 1:
            if positions.shape[ndim - 1 - axis] != r.lead[r.n_lead - axis]:
                return False
            r.positions_lead[r.n_lead - axis] = stride
            stride *= positions.shape[ndim - 1 - axis]
    return True


cdef bint overlaps(cnp.ndarray a, cnp.ndarray b) noexcept:
    """Whether the memory between the first and the last byte of two arrays has bytes in common."""
    cdef const char *first[2]
    cdef const char *stop[2]
    cdef int n, axis
    cdef Py_ssize_t reach
    cdef cnp.ndarray array
    for n in range(2):
        array = b if n else a
        first[n] = <const char *>cnp.PyArray_DATA(array)
        stop[n] = first[n] + cnp.PyArray_ITEMSIZE(array)
        for axis in range(array.ndim):
            reach = (array.shape[axis] - 1) * array.strides[axis]
            if reach < 0:
                first[n] += reach
            else:
                stop[n] += reach
    return first[0] < stop[1] and first[1] < stop[0]


cdef bint overlaps_itself(cnp.ndarray a) noexcept:
    """Whether some axis steps by less than the axes inside it span; at most ROPE_MAX_AXES axes."""
    cdef Py_ssize_t span = cnp.PyArray_ITEMSIZE(a)
    cdef int axis, innermost
    cdef bint seen[ROPE_MAX_AXES]
    for axis in range(a.ndim):
        seen[axis] = a.shape[axis] <= 1
    while True:
        innermost = -1
        for axis in range(a.ndim):
            if not seen[axis] and (innermost < 0 or distance(a.strides[axis]) < distance(a.strides[innermost])):
                innermost = axis
        if innermost < 0:
            return False
        if distance(a.strides[innermost]) < span:
            return True
        span += distance(a.strides[innermost]) * (a.shape[innermost] - 1)
        seen[innermost] = True


cdef bint may_be_refused(cnp.ndarray table) noexcept:
    """Whether a contiguous table of cosines begins with 0, as one of sines does, or has each column twice, as halves or
    side by side. The last row tells for most."""
    cdef Py_ssize_t size = cnp.PyArray_ITEMSIZE(table), half = table.shape[1] // 2, row = table.shape[0], column
    cdef const char *at
    cdef double zero = 0.0
    cdef bint halves = True, pairs = True
    if row and table.shape[1] and memcmp(cnp.PyArray_DATA(table), &zero, size) == 0:
        return True
    if table.shape[1] % 2 or not half:
        return False
    while row and (halves or pairs):
        row -= 1
        at = <const char *>cnp.PyArray_DATA(table) + row * 2 * half * size
        halves = halves and memcmp(at, at + half * size, half * size) == 0
        column = 0
        while pairs and column < half:
            pairs = memcmp(at + 2 * column * size, at + (2 * column + 1) * size, size) == 0
            column += 1
    return halves or pairs


cdef bint may_fill(cnp.ndarray out, cnp.ndarray x, cnp.ndarray cosines, cnp.ndarray sines) noexcept:
    """Whether rows of x can be rotated into `out`: of its shape and type, and in its place or apart from it."""
    cdef bint same_place = cnp.PyArray_DATA(out) == cnp.PyArray_DATA(x)
    cdef int axis
    if (cnp.PyArray_TYPE(out) != cnp.PyArray_TYPE(x) or not cnp.PyArray_ISNOTSWAPPED(out)
            or not cnp.PyArray_ISWRITEABLE(out) or out.ndim != x.ndim
            or out.strides[out.ndim - 1] != cnp.PyArray_ITEMSIZE(out)):
        return False
    for axis in range(x.ndim):
        if out.shape[axis] != x.shape[axis]:
            return False
        same_place = same_place and out.strides[axis] == x.strides[axis]
    return not (overlaps_itself(out) or (overlaps(out, x) and not same_place) or overlaps(out, cosines)
                or overlaps(out, sines))


def rope(x, cos, sin, positions, interleaved, inverse, layout, out, thread_limit):
    """The result of `fastattn.rope`, whose arguments these are, where nothing of them is to be converted; None where it
    is, and where anything is wrong. thread_limit() is asked where several threads may be faster than one."""
    cdef Rotation r
    cdef cnp.ndarray source, to, cosines, sines, copied
    cdef int storage, real, overflow = 0, in_layout = layout_code(layout)
    cdef Py_ssize_t elements, i, size
    cdef int64_t rows, position
    if not (cnp.PyArray_CheckExact(x) and cnp.PyArray_CheckExact(cos) and cnp.PyArray_CheckExact(sin)):
        return None
    source = x
    cosines = cos
    sines = sin
    storage = stored_as(source)
    real = cnp.NPY_DOUBLE if cnp.PyArray_TYPE(source) == cnp.NPY_DOUBLE else cnp.NPY_FLOAT
    if (storage < 0 or chosen[0] == NULL or source.ndim < 2 or in_layout < 0
            or type(interleaved) is not bool or type(inverse) is not bool
            or source.strides[source.ndim - 1] != cnp.PyArray_ITEMSIZE(source)
            or cnp.PyArray_TYPE(cosines) != real or cnp.PyArray_TYPE(sines) != real
            or not (cnp.PyArray_ISCARRAY_RO(cosines) and cnp.PyArray_ISCARRAY_RO(sines))
            or cosines.ndim != 2 or sines.ndim != 2 or cosines.shape[0] != sines.shape[0]
            or cosines.shape[1] != sines.shape[1] or 2 * cosines.shape[1] > source.shape[source.ndim - 1]
            or may_be_refused(cosines)):
        return None
    if out is None:
        to = cnp.PyArray_EMPTY(source.ndim, source.shape, cnp.PyArray_TYPE(source), 0)
    elif cnp.PyArray_CheckExact(out) and may_fill(out, source, cosines, sines):
        to = out
    else:
        return None
    elements = set_rows(&r, to, source, cosines, sines, in_layout == 1, storage, interleaved, inverse)
    rows = cosines.shape[0]
    if positions is None:
        if r.length > rows:
            return None
    elif PyLong_CheckExact(positions) and r.length == 1:
        r.first = PyLong_AsLongLongAndOverflow(positions, &overflow)
        if overflow or not 0 <= r.first < rows:
            return None
    elif cnp.PyArray_CheckExact(positions) and cnp.PyArray_TYPE(positions) == cnp.NPY_INT64:
        # A copy, that nobody changes after it was checked.
        copied = cnp.PyArray_NewCopy(positions, cnp.NPY_CORDER)
        if not cnp.PyArray_ISNOTSWAPPED(copied) or not set_positions(&r, copied):
            return None
        size = cnp.PyArray_SIZE(copied)
        for i in range(size):
            position = (<const int64_t *>cnp.PyArray_DATA(copied))[i]
            if not 0 <= position < rows:
                return None
    else:
        return None
    run_rotation(&r, elements, thread_limit)
    return to


def rotate(cnp.ndarray out, cnp.ndarray x, cnp.ndarray cos, cnp.ndarray sin, cnp.ndarray positions, bint interleaved,
           bint inverse, int storage, thread_limit):
    """Fills out with the rotated x, both (*lead, head, position, column) with contiguous rows, in the same type; their
    memory is the same or apart. cos and sin are contiguous and of the type of the computation; positions are int64,
    contiguous, broadcast to (*lead, position) and lie within the tables."""
    global bfloat16_type
    cdef Rotation r
    if storage == 2:
        bfloat16_type = cnp.PyArray_TYPE(x)
    elements = set_rows(&r, out, x, cos, sin, False, storage, interleaved, inverse)
    set_positions(&r, positions)
    run_rotation(&r, elements, thread_limit)
