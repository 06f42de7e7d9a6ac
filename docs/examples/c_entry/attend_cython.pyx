# cython: language_level=3, boundscheck=False, wraparound=False
"""attend_cython.attend_each(queries, keys, values, outs): attention of many small problems, without the GIL."""

cimport fastattn

fastattn.fastattn_import()


def attend_each(const float[:, :, ::1] queries, const float[:, :, ::1] keys, const float[:, :, ::1] values,
                float[:, :, ::1] outs):
    """One problem of one head for each first index: queries (n, L, D), keys (n, S, D), values (n, S, E)."""
    cdef fastattn.fastattn_call call
    cdef Py_ssize_t n
    cdef int code = fastattn.FASTATTN_OK
    cdef char message[500]
    if not (queries.shape[0] == keys.shape[0] == values.shape[0] == outs.shape[0] and keys.shape[1] == values.shape[1]
            and queries.shape[2] == keys.shape[2] and outs.shape[1] == queries.shape[1]
            and outs.shape[2] == values.shape[2]):
        raise ValueError("shapes must be (n, L, D), (n, S, D), (n, S, E) and (n, L, E)")
    with nogil:
        fastattn.fastattn_init(&call)
        call.batch = call.num_heads = call.num_kv_heads = 1
        call.len_q, call.head_dim = queries.shape[1], queries.shape[2]
        call.len_k, call.value_dim = keys.shape[1], values.shape[2]
        call.num_threads = 1
        call.message, call.message_size = message, sizeof(message)
        for n in range(queries.shape[0]):
            fastattn.fastattn_set(&call.query, &queries[n, 0, 0], fastattn.FASTATTN_DTYPE_FLOAT32, 1, call.len_q, call.head_dim)
            fastattn.fastattn_set(&call.key, &keys[n, 0, 0], fastattn.FASTATTN_DTYPE_FLOAT32, 1, call.len_k, call.head_dim)
            fastattn.fastattn_set(&call.value, &values[n, 0, 0], fastattn.FASTATTN_DTYPE_FLOAT32, 1, call.len_k,
                                  call.value_dim)
            fastattn.fastattn_set(&call.out, &outs[n, 0, 0], fastattn.FASTATTN_DTYPE_FLOAT32, 1, call.len_q, call.value_dim)
            code = fastattn.fastattn_attention(&call)
            if code != fastattn.FASTATTN_OK:
                break
    if code != fastattn.FASTATTN_OK:
        raise ValueError(message.decode())
