# Calls that were made before: from the arguments of `attention` to its results with no Python in between but that which
# says how many threads a call may have. Python takes longer than the work where that is a few microseconds. See
# `fastattn._api.prepared`.

cdef dict calls = {}   # the prepared calls by their signatures; PlainCall, or what `fastattn._api.prepared` keeps


def stores():
    """The prepared calls by their signatures, and the tokens of signatures, for `fastattn._api.prepared` to fill."""
    return calls, tokens


cdef struct Axes:
    int n_axes                          # 0: the result is not wanted
    cnp.npy_intp length[MAX_AXES]


cdef int set_lengths(Axes *to, tuple lengths) except -1:
    cdef int axis
    to.n_axes = 0 if lengths is None else len(lengths)
    for axis in range(to.n_axes):
        to.length[axis] = lengths[axis]
    return 0


cdef inline object new_array(const Axes *axes, object dtype):
    """An array with nothing in it yet; None where it is not wanted."""
    if axes.n_axes == 0:
        return None
    return fastattn_array_at(dtype, axes.n_axes, <cnp.npy_intp *>axes.length, NULL, NULL, 0)


cdef inline Span span_of_array(cnp.ndarray array) noexcept:
    """The bytes between the first and the last element, all included; none of an empty array."""
    cdef Span span
    cdef Py_ssize_t reach
    cdef int axis
    span.low = span.high = <size_t>cnp.PyArray_DATA(array)
    if cnp.PyArray_SIZE(array) > 0:
        for axis in range(cnp.PyArray_NDIM(array)):
            reach = (cnp.PyArray_DIM(array, axis) - 1) * cnp.PyArray_STRIDE(array, axis)
            span.low += min(reach, <Py_ssize_t>0)
            span.high += max(reach, <Py_ssize_t>0)
        span.high += cnp.PyArray_ITEMSIZE(array)
    return span


cdef inline bint overlap(out, other) noexcept:
    """Whether an array, or None, may share memory with `out`."""
    return other is not None and meet(span_of_array(<cnp.ndarray>out), span_of_array(<cnp.ndarray>other))


cdef class PlainCall:
    """A prepared call of arrays as they are given."""

    cdef object threads             # how many this call may have now, a function; None: one
    cdef dict by_threads            # what was prepared for each number
    cdef Axes out, lse, weights
    cdef object result, computed    # dtypes: of out and weights, and of lse
    cdef bint mask_is_bias          # it comes as a mask
    cdef bint on_cache              # whose keys and values are no arrays
    cdef tuple held                 # arrays that the records have addresses of

    def __init__(self, threads, arrays, tuple out, tuple lse, tuple weights, tuple dtypes, bint mask_is_bias,
                 bint on_cache):
        """arrays: those that every call reads, and None for the others, as `fastattn._call.problem.Arrays`.

        out, lse, weights: the shapes of the results, None where one is not wanted. dtypes: that of out and weights, and
        that of lse.
        """
        self.threads, self.held, self.mask_is_bias, self.on_cache = threads, tuple(arrays), mask_is_bias, on_cache
        self.by_threads = {}
        set_lengths(&self.out, out)
        set_lengths(&self.lse, lse)
        set_lengths(&self.weights, weights)
        self.result, self.computed = dtypes

    def keep(self, int threads, Prepared prepared):
        """Adds what was prepared for a number of threads."""
        set_addresses(<Job *>prepared.record, self.held)
        self.by_threads[threads] = prepared

    cdef object answer(self, query, key, value, mask, bias, sinks, out, key_lengths, tuple rows, seed):
        """The results, or None where this call must go through `fastattn._call.normalize` after all; rows: the arrays of
        `Rows` beside key and value."""
        cdef Prepared prepared = self.by_threads.get(1 if self.threads is None else self.threads())
        cdef Job *job
        cdef int number
        cdef uint64_t drop_key[2]
        cdef object lse, weights
        if prepared is None:
            return None
        if out is None:
            out = new_array(&self.out, self.result)
        elif (overlap(out, query) or overlap(out, key) or overlap(out, value) or overlap(out, mask) or overlap(out, bias)
              or overlap(out, sinks)):
            return None
        lse = new_array(&self.lse, self.computed)
        weights = new_array(&self.weights, self.result)
        if prepared.has_work():
            job = prepared.copy()
            job.query.data = address_of(query)
            job.key.data = address_of(key)
            job.value.data = address_of(value)
            job.out.data = address_of(out)
            job.lse.data = address_of(lse)
            job.weights.data = address_of(weights)
            job.bias.data = address_of(mask if self.mask_is_bias else bias)
            job.dense.data = 0 if self.mask_is_bias else address_of(mask)
            job.key_lengths.data = address_of(key_lengths)
            job.sinks = address_of(sinks)
            if seed is not None:
                read_seed(seed, drop_key)
                job.drop_key = <int64_t><size_t>drop_key
            if rows is not None:
                for number in range(len(rows)):
                    (&job.key_scale)[number].data = address_of(rows[number])
            prepared.solve(job, None)
        if lse is None:
            return out if weights is None else (out, weights)
        return (out, lse) if weights is None else (out, lse, weights)

    cdef object of_values(self, query, key, value, PyObject **values):
        cdef object mask = <object>values[mask_at]
        if mask is not None and not cnp.PyArray_CheckExact(mask):
            mask = None  # a mask object, of which the call holds all that it needs
        return self.answer(query, key, value, mask, <object>values[bias_at], <object>values[sinks_at],
                           <object>values[out_at], None, None, <object>values[seed_at])

    def __call__(self, score_mod, query, key, value, dict given):
        """The results of a call of this signature, or None, as of `answer`; None of one on a cache, see `on_rows`."""
        cdef PyObject *values[MAX_OPTIONS]
        if self.on_cache:
            return None
        read_options(given, None, values)
        return self.of_values(query, key, value, values)

    def on_rows(self, query, tuple rows, key_lengths, sinks):
        """The results on a cache; see `fastattn._api.prepared.PreparedCall`."""
        return self.answer(query, None, None, None, None, sinks, None, key_lengths, rows, None)


def recall(int function, query, key, value, dict given, backend):
    """The results of a plain call that was made before; the signature of another one, or None, as of `signature`."""
    cdef PyObject *values[MAX_OPTIONS]
    cdef object found = None, call, results
    if read_options(given, backend, values):
        found = signature_of(function, 0, query, key, value, (), values)
    if found is None:
        return None
    call = calls.get(found)
    if type(call) is not PlainCall:
        return found
    results = (<PlainCall>call).of_values(query, key, value, values)
    return found if results is None else results
