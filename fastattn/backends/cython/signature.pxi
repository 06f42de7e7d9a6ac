# The signature of a call: what its prepared call depends on, as bytes. `fastattn._call.options` says which options are part
# of it, and how; see `fastattn._api.prepared`.

cdef enum:
    MAX_AXES = 8            # arrays with more, and other unusual arguments, have no signature
    MAX_OPTIONS = 32
    MAX_OTHERS = 4          # arrays beside query, key, value and the options
    MAX_WORDS = 4 + (3 + MAX_OPTIONS + MAX_OTHERS) * (2 + 2 * MAX_AXES)

cdef enum Part:
    PART_NEVER                   # as in `fastattn._call.options`
    PART_ARRAY
    PART_MASK
    PART_LENGTHS
    PART_REAL
    PART_COUNT
    PART_SEED
    PART_BOUNDS
    PART_CHOICE


cdef struct OptionPart:
    PyObject *name
    PyObject *value         # its default
    PyObject *choices
    Part part


cdef struct Words:
    int64_t word[MAX_WORDS]
    int n


cdef OptionPart options[MAX_OPTIONS]
cdef int n_options = 0
cdef int mask_at, bias_at, sinks_at, out_at, seed_at, backend_at
cdef tuple option_table     # which owns what the parts point to
cdef object mask_type
cdef dict option_index = {}  # from names
cdef dict tokens = {}       # of mask objects, and of all else that has to be compared by Python: a number for each


def install_options(tuple table, tuple parts, type of_masks):
    """Sets the options of a call, as `fastattn._call.options` lists them, the names of their parts, and the type of masks."""
    global n_options, option_table, mask_type, mask_at, bias_at, sinks_at, out_at, seed_at, backend_at
    cdef int n
    if len(table) > MAX_OPTIONS:
        raise ValueError(f"there is room for {MAX_OPTIONS} options")
    option_table, mask_type, n_options = table, of_masks, <int>len(table)
    for n, option in enumerate(table):
        options[n].name = <PyObject *>option[0]
        options[n].value = <PyObject *>option[1]
        options[n].part = <Part><int>parts.index(option[2])
        options[n].choices = <PyObject *>option[4]
        option_index[option[0]] = n
    mask_at, bias_at, sinks_at, out_at, seed_at, backend_at = [
        option_index[name] for name in ("mask", "bias", "sinks", "out", "seed", "backend")
    ]


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


cdef inline bint put_mask(Words *to, object mask) except -1:
    """An array, or a mask object that has a token."""
    if mask is not None and not cnp.PyArray_CheckExact(mask):
        token = tokens.get(mask) if isinstance(mask, mask_type) else None
        if token is None:
            return False
        put(to, -2)
        put(to, token)
        return True
    return put_array(to, mask)


cdef inline bint put_lengths(Words *to, object lengths) except -1:
    """The dtype and the shape of an array, or None."""
    cdef int axis
    if lengths is None:
        put(to, -1)
        return True
    if not cnp.PyArray_CheckExact(lengths) or cnp.PyArray_NDIM(lengths) > MAX_AXES:
        return False
    put(to, cnp.PyArray_NDIM(lengths) | <int64_t>cnp.PyArray_TYPE(lengths) << 16)
    for axis in range(cnp.PyArray_NDIM(lengths)):
        put(to, cnp.PyArray_DIM(lengths, axis))
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


cdef inline bint read_seed(object seed, uint64_t *key) except -1:
    """Sets the key of a Philox stream; whether the seed is an int of 128 bits."""
    cdef int overflow = 0
    cdef long long low
    if not PyLong_CheckExact(seed):
        return False
    low = PyLong_AsLongLongAndOverflow(seed, &overflow)
    if overflow == 0:
        key[0], key[1] = <uint64_t>low, 0
        return low >= 0
    if not 0 <= seed < 1 << 128:
        return False
    key[0], key[1] = seed & 0xffffffffffffffff, seed >> 64
    return True


cdef inline bint put_seed(Words *to, object seed) except -1:
    """Whether there is a seed, whose value is no part of a signature."""
    cdef uint64_t key[2]
    put(to, seed is not None)
    return seed is None or read_seed(seed, key)


cdef inline bint put_bounds(Words *to, object bounds) except -1:
    """A pair of counts, or None; whether it is one of these."""
    if bounds is None:
        put(to, -2)
        return True
    return type(bounds) is tuple and len(bounds) == 2 and put_count(to, bounds[0]) and put_count(to, bounds[1])


cdef inline bint put_choice(Words *to, object value, tuple choices) except -1:
    """The place of a value among choices; whether it has one. 0 and 1 are not the bools that they equal."""
    cdef int n
    for n in range(len(choices)):
        if value is choices[n]:
            put(to, n)
            return True
    if type(value) is str and value in choices:
        put(to, choices.index(value))
        return True
    return False


cdef inline int layout_code(layout):
    """0 for "bhsd", 1 for "bshd", -1 for anything else."""
    if type(layout) is not str:
        return -1
    return 0 if layout == "bhsd" else 1 if layout == "bshd" else -1


cdef inline bint put_option(Words *to, const OptionPart *option, object value) except -1:
    if option.part == PART_CHOICE:
        return put_choice(to, value, <tuple>option.choices)
    if option.part == PART_REAL:
        return put_real(to, value)
    if option.part == PART_COUNT:
        return put_count(to, value)
    if option.part == PART_BOUNDS:
        return put_bounds(to, value)
    if option.part == PART_ARRAY:
        return put_array(to, value)
    if option.part == PART_MASK:
        return put_mask(to, value)
    if option.part == PART_LENGTHS:
        return put_lengths(to, value)
    if option.part == PART_SEED:
        return put_seed(to, value)
    return True


cdef inline bint read_options(dict given, object backend, PyObject **values) except -1:
    """Sets the value of each option; False where there is one that no function has."""
    cdef PyObject *name = NULL
    cdef PyObject *value = NULL
    cdef Py_ssize_t at = 0
    cdef int n
    for n in range(n_options):
        values[n] = options[n].value
    while PyDict_Next(given, &at, &name, &value):
        n = 0
        while n < n_options and options[n].name != name:
            n += 1
        if n == n_options:  # or a name that is not interned
            n = option_index.get(<object>name, n_options)
            if n == n_options:
                return False
        values[n] = value
    if values[backend_at] == <PyObject *>None:
        values[backend_at] = <PyObject *>backend
    return True


cdef object signature_of(int function, int64_t token, query, key, value, tuple others, PyObject **values):
    cdef Words to
    cdef int n
    to.n = 0
    put(&to, function | token << 8)
    put(&to, <int64_t><size_t>chosen[0])
    if len(others) > MAX_OTHERS or not (put_array(&to, query) and put_array(&to, key) and put_array(&to, value)):
        return None
    for n in range(n_options):
        if not put_option(&to, options + n, <object>values[n]):
            return None
    for other in others:
        if not put_array(&to, other):
            return None
    return PyBytes_FromStringAndSize(<char *>to.word, to.n * sizeof(int64_t))


def signature(int function, query, key, value, dict given, backend, int64_t token=0, tuple others=()):
    """Bytes that are equal for calls which can share a prepared call, or None for a call with unusual arguments.

    `function` is a number for each public function, `given` the options of the call, `backend` that of a call that names
    none, `token` the number of all else that decides, and `others` arrays, or None, that the call reads as well.
    """
    cdef PyObject *values[MAX_OPTIONS]
    if not read_options(given, backend, values):
        return None
    return signature_of(function, token, query, key, value, others, values)
