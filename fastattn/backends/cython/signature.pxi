# The signature of a call: the properties of its arguments that its prepared call depends on, as bytes. See
# `fastattn._prepared`.

cdef enum:
    MAX_AXES = 8            # arrays with more, and other unusual arguments, have no signature
    MAX_WORDS = 7 * (3 + 2 * MAX_AXES) + 16


cdef struct Words:
    int64_t word[MAX_WORDS]
    int n


cdef inline void put(Words *to, int64_t word) noexcept:
    to.word[to.n] = word
    to.n += 1


cdef inline bint put_array(Words *to, object array) except -1:
    """The dtype, shape, strides and flags of an ndarray or None; whether it is one of these."""
    cdef cnp.ndarray a
    cdef int axis
    if array is None:
        put(to, -1)
        return True
    if not cnp.PyArray_CheckExact(array):
        return False
    a = array
    if a.ndim > MAX_AXES:
        return False
    put(to, cnp.PyArray_TYPE(a) | <int64_t>a.ndim << 16 | <int64_t>cnp.PyArray_ITEMSIZE(a) << 32)
    put(to, cnp.PyArray_ISNOTSWAPPED(a) | cnp.PyArray_ISWRITEABLE(a) << 1)
    for axis in range(a.ndim):
        put(to, a.shape[axis])
        put(to, a.strides[axis])
    return True


cdef inline bint put_real(Words *to, object number) except -1:
    """A float, a count or None; whether it is one of these."""
    cdef int overflow = 0
    cdef double real = 0
    if isinstance(number, float):
        real = number
    elif PyLong_CheckExact(number):
        real = <double>PyLong_AsLongLongAndOverflow(number, &overflow)
        if overflow or not -(<double>(1 << 30)) < real < <double>(1 << 30):
            return False
    elif number is not None:
        return False
    put(to, number is not None)
    put(to, (<int64_t *>&real)[0])
    return True


cdef inline bint put_count(Words *to, object count) except -1:
    """A count below 2^60, or None; whether it is one of these."""
    cdef int overflow = 0
    cdef long long n = -1
    if count is not None:
        if not PyLong_CheckExact(count):
            return False
        n = PyLong_AsLongLongAndOverflow(count, &overflow)
        if overflow or not 0 <= n < <long long>1 << 60:
            return False
    put(to, n)
    return True


cdef inline int layout_code(layout):
    """0 for "bhsd", 1 for "bshd", -1 for anything else."""
    if type(layout) is not str:
        return -1
    return 0 if layout == "bhsd" else 1 if layout == "bshd" else -1


def signature(int function, query, key, value, mask, bias, causal, window, key_lengths, scale, softcap, sinks, layout, out,
              return_lse, return_weights, num_threads, backend):
    """Bytes that are equal for calls which can share a prepared call, or None for a call with unusual arguments.

    `function` is a number for each public function; `mask` and `key_lengths` are arrays or None here.
    """
    return signature_of(function, query, key, value, mask, bias, causal, window, key_lengths, scale, softcap, sinks, layout,
                        out, return_lse, return_weights, num_threads, backend)


cdef object signature_of(int function, query, key, value, mask, bias, causal, window, key_lengths, scale, softcap, sinks,
                         layout, out, return_lse, return_weights, num_threads, backend):
    cdef Words to
    cdef int axis, in_layout = layout_code(layout)
    to.n = 0
    if causal is False:
        put(&to, 0)
    elif causal is True:
        put(&to, 1)
    elif type(causal) is str and causal == "top_left":
        put(&to, 2)
    elif type(causal) is str and causal == "bottom_right":
        put(&to, 3)
    else:
        return None
    if in_layout < 0 or type(return_lse) is not bool or type(return_weights) is not bool:
        return None
    put(&to, in_layout | <int64_t>(return_lse is True) << 1 | <int64_t>(return_weights is True) << 2)
    if backend is None:
        put(&to, 0)
    elif type(backend) is str and backend == "cython":
        put(&to, 1)
    elif type(backend) is str and backend == "numba":
        put(&to, 2)
    else:
        return None  # the other backends have no prepared calls
    put(&to, function)
    put(&to, <int64_t><size_t>chosen[0])
    if not (put_count(&to, num_threads) and put_real(&to, scale) and put_real(&to, softcap)):
        return None
    if window is None:
        put(&to, -2)
    elif type(window) is tuple and len(window) == 2:
        if not (put_count(&to, window[0]) and put_count(&to, window[1])):
            return None
    else:
        return None
    if not (put_array(&to, query) and put_array(&to, key) and put_array(&to, value) and put_array(&to, mask)
            and put_array(&to, bias) and put_array(&to, sinks) and put_array(&to, out)):
        return None
    if key_lengths is None:
        put(&to, -1)
    elif cnp.PyArray_CheckExact(key_lengths) and cnp.PyArray_NDIM(key_lengths) <= 2:
        put(&to, cnp.PyArray_NDIM(key_lengths) | <int64_t>cnp.PyArray_TYPE(key_lengths) << 16)
        for axis in range(cnp.PyArray_NDIM(key_lengths)):
            put(&to, cnp.PyArray_DIM(key_lengths, axis))
    else:
        return None
    return PyBytes_FromStringAndSize(<char *>to.word, to.n * sizeof(int64_t))
