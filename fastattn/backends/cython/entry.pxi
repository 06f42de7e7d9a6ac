# The C entry, the function of include/fastattn.h. Calls that were seen before are looked up here without the GIL, and run
# with their own addresses; all others are decided on in Python, by `fastattn._api.c_entry.solve`.
#
# A kept call is the record of a prepared call beside the struct that it was made for, without addresses. Readers take no
# lock, which a fork might leave held: they copy the record, and drop the copy if its version changed meanwhile (a
# sequence lock). Writers hold `_machine.threads.no_fork`.

from fastattn cimport (
    FASTATTN_ABI_ERROR, FASTATTN_ABI_VERSION, FASTATTN_CAPSULE, FASTATTN_FAILED, FASTATTN_NO_MEMORY, FASTATTN_OK,
    fastattn_array, fastattn_call, fastattn_itemsize,
)

cdef extern from *:
    """
    static PyObject *fastattn_array_at(PyObject *dtype, int ndim, npy_intp *shape, npy_intp *strides, void *data, int flags) {
        Py_INCREF(dtype); /* which NumPy takes */
        return PyArray_NewFromDescr(&PyArray_Type, (PyArray_Descr *)dtype, ndim, shape, strides, data, flags, NULL);
    }
    """
    object fastattn_array_at(object dtype, int ndim, cnp.npy_intp *shape, cnp.npy_intp *strides, void *data, int flags)

cdef extern from "Python.h" nogil:
    int Py_IsInitialized()

cdef extern from * nogil:
    """
    typedef struct { int64_t settings, wanted, allowed; } fastattn_allowance;
    static _Thread_local fastattn_allowance fastattn_allowed = {-1, 0, 0};
    """
    enum: ATOMIC_ACQUIRE "__ATOMIC_ACQUIRE"
    enum: ATOMIC_RELEASE "__ATOMIC_RELEASE"
    int64_t load_word "__atomic_load_n"(const int64_t *, int)
    void store_word "__atomic_store_n"(int64_t *, int64_t, int)
    void fence "__atomic_thread_fence"(int)
    int64_t add_to_word "__atomic_add_fetch"(int64_t *, int64_t, int)
    # What `_api.c_entry.limit` answered this thread, and under which settings.
    ctypedef struct fastattn_allowance:
        int64_t settings, wanted, allowed
    fastattn_allowance fastattn_allowed

cdef enum:
    MAX_KEPT = 512      # as `_api.prepared.MAX_CALLS`; the oldest goes first
    N_ARRAYS = 9        # of the struct, from query on
    N_INPUTS = 3        # that are needed; the next is `out`
    SHORT_LENGTHS = 64  # key lengths copied to the stack

cdef struct Record:
    # A `Job` with one leading axis: the leading stride of each view, and that axis's length.
    Job job
    int64_t leads[N_VIEWS + 1]

cdef struct KeptCall:
    int64_t version      # odd while it is written
    int64_t for_threads  # how many threads it may have; 0: one thread does it, however many there may be
    int64_t num_threads  # that it uses
    fastattn_call key
    Record record

cdef KeptCall *kept_calls = NULL
cdef int64_t kept_hashes[MAX_KEPT]  # of their keys, side by side, as all of them are read
cdef int64_t n_kept = 0           # in use
cdef int64_t next_kept = 0        # the oldest, once all are in use
cdef int64_t thread_settings = 0  # counts changes of what `_api.c_entry.limit` depends on
cdef object solve_call = None     # functions of `_api.c_entry`
cdef object limit_threads = None
cdef object code_of_error = None


def install_entry(solve, limit, code_of):
    """Sets what the C entry calls in Python."""
    global kept_calls, solve_call, limit_threads, code_of_error
    solve_call, limit_threads, code_of_error = solve, limit, code_of
    if kept_calls == NULL:
        kept_calls = <KeptCall *>calloc(MAX_KEPT, sizeof(KeptCall))
    if kept_calls == NULL:
        raise MemoryError("no memory for kept calls")


def entry_address():
    """Where the C entry is."""
    return <size_t>attention_entry


def entry_capsule():
    """The C entry as a capsule."""
    return PyCapsule_New(<void *>attention_entry, FASTATTN_CAPSULE, NULL)


def kept_count():
    """How many calls of the C entry are kept."""
    return n_kept


def threads_changed():
    """Has every thread ask again how many threads its calls may have."""
    add_to_word(&thread_settings, 1, ATOMIC_RELEASE)


cdef int attention_entry(fastattn_call *call) noexcept nogil:
    cdef fastattn_call key
    cdef Record record
    cdef int64_t num_threads = 0
    cdef int code
    if call.abi_version != FASTATTN_ABI_VERSION or call.struct_size != sizeof(fastattn_call):
        return FASTATTN_ABI_ERROR
    set_key(call, &key)
    if find_call(&key, hash_of(&key), &record, &num_threads):
        code = run_kept(call, &record, <int>num_threads)
        if code != NOT_ALIKE:
            return code
    if not Py_IsInitialized():
        return FASTATTN_FAILED
    return ask_python(call, &key)


cdef enum:
    NOT_ALIKE = -1  # what depends on addresses or on numbers in arrays is not as it has to be


cdef void set_key(const fastattn_call *call, fastattn_call *key) noexcept nogil:
    """What a call is looked up by: the struct, with 1 for each address that is there, and the kernels in use."""
    cdef fastattn_array *array
    cdef int number
    memcpy(key, call, sizeof(fastattn_call))
    for number in range(N_ARRAYS):
        array = &key.query + number
        if array.data == NULL and number > N_INPUTS:
            memset(array, 0, sizeof(fastattn_array))
        array.data = <void *><size_t>(array.data != NULL)
    key.abi_version = <int64_t><size_t>chosen[0]
    key.message = NULL
    key.message_size = 0


cdef int64_t hash_of(const fastattn_call *key) noexcept nogil:
    """A hash of a key: two independent chains of products, which a CPU computes in parallel."""
    cdef const uint64_t *words = <const uint64_t *>key
    cdef uint64_t even = 0x9e3779b97f4a7c15, odd = 0xc2b2ae3d27d4eb4f
    cdef size_t word
    for word in range(0, sizeof(fastattn_call) // 8 - 1, 2):
        even = (even ^ words[word]) * <uint64_t>0xff51afd7ed558ccd
        even ^= even >> 32
        odd = (odd ^ words[word + 1]) * <uint64_t>0xc4ceb9fe1a85ec53
        odd ^= odd >> 29
    even ^= words[sizeof(fastattn_call) // 8 - 1]
    return <int64_t>((even ^ (odd << 1)) * <uint64_t>0x9e3779b97f4a7c15)


cdef bint find_call(const fastattn_call *key, int64_t hashed, Record *record, int64_t *num_threads) noexcept nogil:
    """Copies the record of a kept call, if there is one, and sets how many threads it uses."""
    cdef int64_t slot, version, for_threads, allowed = 0
    cdef KeptCall *kept
    for slot in range(load_word(&n_kept, ATOMIC_ACQUIRE)):
        if load_word(&kept_hashes[slot], ATOMIC_RELAXED) != hashed:
            continue
        kept = kept_calls + slot
        version = load_word(&kept.version, ATOMIC_ACQUIRE)
        if version & 1 or not has_words(<int64_t *>&kept.key, <const int64_t *>key, sizeof(fastattn_call) // 8):
            continue
        for_threads = load_word(&kept.for_threads, ATOMIC_RELAXED)
        if for_threads:
            if allowed == 0:
                allowed = allowed_threads(key.num_threads)
            if for_threads != allowed:
                continue
        num_threads[0] = load_word(&kept.num_threads, ATOMIC_RELAXED)
        load_words(<int64_t *>record, <int64_t *>&kept.record, sizeof(Record) // 8)
        fence(ATOMIC_ACQUIRE)
        if load_word(&kept.version, ATOMIC_RELAXED) == version:
            return True
    return False


cdef inline bint has_words(const int64_t *shared, const int64_t *words, size_t n) noexcept nogil:
    cdef size_t word
    for word in range(n):
        if load_word(shared + word, ATOMIC_RELAXED) != words[word]:
            return False
    return True


cdef inline void load_words(int64_t *to, const int64_t *shared, size_t n) noexcept nogil:
    cdef size_t word
    for word in range(n):
        to[word] = load_word(shared + word, ATOMIC_RELAXED)


cdef inline void store_words(int64_t *shared, const int64_t *words, size_t n) noexcept nogil:
    cdef size_t word
    for word in range(n):
        store_word(shared + word, words[word], ATOMIC_RELAXED)


cdef int64_t allowed_threads(int64_t wanted) noexcept nogil:
    """How many threads a call of this thread may have now, -1 where Python has to say what is wrong. Python is asked once
    where it may be several, and again when something changed."""
    cdef int64_t settings = load_word(&thread_settings, ATOMIC_ACQUIRE), allowed
    if wanted == 1:
        return 1
    if fastattn_allowed.settings == settings and fastattn_allowed.wanted == wanted:
        return fastattn_allowed.allowed
    allowed = ask_limit(wanted) if Py_IsInitialized() else -1
    if allowed > 0:
        fastattn_allowed.settings, fastattn_allowed.wanted, fastattn_allowed.allowed = settings, wanted, allowed
    return allowed


cdef int64_t ask_limit(int64_t wanted) noexcept with gil:
    try:
        return limit_threads(wanted)
    except BaseException:
        return -1


cdef void set_shape(const fastattn_call *call, int number, int64_t *shape) noexcept nogil:
    """The lengths of the four axes of an array of the struct; 1 along those that it does not have."""
    cdef bint is_key = number == 1 or number == 2
    shape[0] = call.batch if number != 8 else 1
    shape[1] = 1 if number == 7 else call.num_kv_heads if is_key else call.num_heads
    shape[2] = 1 if number >= 7 else call.len_k if is_key else call.len_q
    if number <= 1:
        shape[3] = call.head_dim
    elif number <= 3:
        shape[3] = call.value_dim
    else:
        shape[3] = call.len_k if number == 5 or number == 6 else 1


cdef struct Span:
    # The bytes of an array: from `low` to `high`, that excluded.
    size_t low, high


cdef inline bint meet(Span a, Span b) noexcept nogil:
    return a.low < b.high and b.low < a.high


cdef Span span_of(const fastattn_call *call, int number) noexcept nogil:
    cdef const fastattn_array *array = &call.query + number
    cdef int64_t shape[4]
    cdef int axis
    cdef int64_t step
    cdef Span span
    span.low = span.high = <size_t>array.data
    if array.data == NULL:
        return span
    set_shape(call, number, shape)
    for axis in range(4):
        if shape[axis] == 0:
            span.low = span.high = 0
            return span
        step = (shape[axis] - 1) * array.strides[axis]
        if step < 0:
            span.low += <size_t>step
        else:
            span.high += <size_t>step
    span.high += <size_t>fastattn_itemsize(array.dtype)
    return span


cdef bint may_overlap(const fastattn_call *call) noexcept nogil:
    """Whether `out` or `lse` may share memory with anything that is read, or with each other."""
    cdef Span out = span_of(call, N_INPUTS), lse = span_of(call, N_INPUTS + 1), other
    cdef int number
    if meet(out, lse):
        return True
    for number in range(N_ARRAYS):
        if number == N_INPUTS or number == N_INPUTS + 1 or (&call.query + number).data == NULL:
            continue
        other = span_of(call, number)
        if meet(out, other) or meet(lse, other):
            return True
    return False


cdef int run_kept(const fastattn_call *call, Record *record, int num_threads) noexcept nogil:
    """Runs a record on the arrays of a call; NOT_ALIKE, and nothing done, where Python has to decide."""
    cdef int64_t few[SHORT_LENGTHS]
    cdef int64_t *lengths = NULL
    cdef int64_t item
    cdef Job *job = &record.job
    cdef bint done = True, fits = True
    if may_overlap(call):
        return NOT_ALIKE
    if call.key_lengths.data != NULL:
        lengths = few
        if call.batch > SHORT_LENGTHS:
            lengths = <int64_t *>malloc(call.batch * sizeof(int64_t))
        done = lengths != NULL
        for item in range(call.batch if done else 0):
            # Copied, so that nobody changes them after the check.
            memcpy(lengths + item, <char *>call.key_lengths.data + item * call.key_lengths.strides[0], sizeof(int64_t))
            fits = fits and 0 <= lengths[item] <= call.len_k
    job.query.data = <int64_t><size_t>call.query.data
    job.key.data = <int64_t><size_t>call.key.data
    job.value.data = <int64_t><size_t>call.value.data
    job.out.data = <int64_t><size_t>call.out.data
    job.lse.data = <int64_t><size_t>call.lse.data
    job.bias.data = <int64_t><size_t>call.bias.data
    job.dense.data = <int64_t><size_t>call.mask.data
    job.key_lengths.data = <int64_t><size_t>lengths
    job.sinks = <int64_t><size_t>call.sinks.data
    if done and fits:
        done = run_job(job, num_threads)
    if lengths != few:
        free(lengths)
    if not done:
        say(call, "no memory for the tiles of a thread")
        return FASTATTN_NO_MEMORY
    return FASTATTN_OK if fits else NOT_ALIKE


cdef void say(const fastattn_call *call, const char *message) noexcept nogil:
    """Hands a message to the caller, cut off between characters where it is too long."""
    cdef size_t n = strlen(message)
    if call.message == NULL or call.message_size < 1:
        return
    if n > <size_t>call.message_size - 1:
        n = <size_t>call.message_size - 1
        while n > 0 and message[n] & 0xc0 == 0x80:
            n -= 1
    memcpy(call.message, message, n)
    call.message[n] = 0


cdef int ask_python(fastattn_call *call, fastattn_call *key) noexcept with gil:
    """Has `_api.c_entry.solve` do a call, and keep it by `keep_call`."""
    cdef fastattn_array *array
    cdef int number, axis
    try:
        arrays = []
        for number in range(N_ARRAYS):
            array = &call.query + number
            arrays.append((<size_t>array.data, array.dtype, shape_of(call, number),
                           tuple([array.strides[axis] for axis in range(4)])))
        solve_call(<size_t>key, arrays, call.causal, (call.window_left, call.window_right), call.scale, call.softcap,
                   call.precision, call.num_threads)
        return FASTATTN_OK
    except BaseException as error:
        text = str(error).encode("utf-8", "replace")
        say(call, text)
        return code_of_error(error)


cdef tuple shape_of(const fastattn_call *call, int number):
    cdef int64_t shape[4]
    set_shape(call, number, shape)
    return shape[0], shape[1], shape[2], shape[3]


def array_at(size_t data, dtype, tuple shape, tuple strides, bint is_written):
    """An ndarray over the caller's memory."""
    cdef cnp.npy_intp lengths[4]
    cdef cnp.npy_intp steps[4]
    cdef int axis, ndim = len(shape)
    for axis in range(ndim):
        lengths[axis] = shape[axis]
        steps[axis] = strides[axis]
    return fastattn_array_at(dtype, ndim, lengths, steps, <void *>data, cnp.NPY_ARRAY_WRITEABLE if is_written else 0)


def keep_call(size_t key_address, Prepared prepared, int for_threads):
    """Keeps a prepared call for others of this key, in the place of the oldest; for_threads: see `KeptCall`. To be called
    with `_machine.threads.no_fork` held."""
    global n_kept, next_kept
    cdef const fastattn_call *key = <const fastattn_call *>key_address
    cdef const Record *record = <const Record *>prepared.record
    cdef const Job *job = &record.job
    cdef KeptCall *kept
    cdef int64_t version, slot, hashed = hash_of(key)
    if prepared.nbytes != sizeof(Record) or job.has_intervals or job.has_mask_map:
        return  # it holds arrays
    if key.abi_version != <int64_t><size_t>chosen[0] or job.kernels != <int64_t><size_t>chosen[job.itemsize == 8]:
        return  # another thread chose other kernels meanwhile
    for slot in range(n_kept):
        kept = kept_calls + slot
        if (kept_hashes[slot] == hashed and kept.for_threads == for_threads
                and memcmp(&kept.key, key, sizeof(fastattn_call)) == 0):
            return  # already kept; Python had to decide because of addresses or key lengths
    kept = kept_calls + next_kept
    version = kept.version
    store_word(&kept.version, version | 1, ATOMIC_RELAXED)
    fence(ATOMIC_RELEASE)
    store_word(&kept_hashes[next_kept], hashed, ATOMIC_RELAXED)
    store_word(&kept.for_threads, for_threads, ATOMIC_RELAXED)
    store_word(&kept.num_threads, prepared.num_threads, ATOMIC_RELAXED)
    store_words(<int64_t *>&kept.key, <const int64_t *>key, sizeof(fastattn_call) // 8)
    store_words(<int64_t *>&kept.record, <const int64_t *>record, sizeof(Record) // 8)
    store_word(&kept.version, (version | 1) + 1, ATOMIC_RELEASE)
    next_kept = (next_kept + 1) % MAX_KEPT
    if n_kept < MAX_KEPT:
        store_word(&n_kept, n_kept + 1, ATOMIC_RELEASE)
