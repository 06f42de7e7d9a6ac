"""``cimport fastattn``: the C entry for Cython, by ``fastattn.get_include()``; ``fastattn.h`` says what each field is.

``fastattn.fastattn_import()`` must run once in the module that calls, before ``fastattn.fastattn_attention(&call)``, which
needs no GIL.
"""

from libc.stdint cimport int64_t


cdef extern from "fastattn.h" nogil:
    enum:
        FASTATTN_ABI_VERSION
        FASTATTN_OK
        FASTATTN_VALUE_ERROR
        FASTATTN_TYPE_ERROR
        FASTATTN_NO_BACKEND
        FASTATTN_NO_MEMORY
        FASTATTN_ABI_ERROR
        FASTATTN_FAILED
        FASTATTN_DTYPE_FLOAT32
        FASTATTN_DTYPE_FLOAT64
        FASTATTN_DTYPE_FLOAT16
        FASTATTN_DTYPE_BFLOAT16
        FASTATTN_DTYPE_BOOL
        FASTATTN_DTYPE_INT64
        FASTATTN_NOT_CAUSAL
        FASTATTN_TOP_LEFT
        FASTATTN_BOTTOM_RIGHT

    const char *FASTATTN_CAPSULE

    ctypedef struct fastattn_array:
        void *data
        int64_t dtype
        int64_t strides[4]

    ctypedef struct fastattn_call:
        int64_t abi_version, struct_size
        int64_t batch, num_heads, num_kv_heads, len_q, len_k, head_dim, value_dim
        fastattn_array query, key, value, out, lse, mask, bias, key_lengths, sinks
        int64_t causal, window_left, window_right
        double scale, softcap
        int64_t precision
        int64_t num_threads
        char *message
        int64_t message_size

    ctypedef int (*fastattn_attention_function)(fastattn_call *) noexcept nogil

    void fastattn_init(fastattn_call *) noexcept
    int64_t fastattn_itemsize(int64_t) noexcept
    void fastattn_set(fastattn_array *, const void *, int64_t, int64_t, int64_t, int64_t) noexcept
    int fastattn_attention(fastattn_call *) noexcept


cdef extern from "fastattn.h":
    int fastattn_import() except -1
