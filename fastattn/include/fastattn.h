/* fastattn's C entry: exact attention, softmax(scale * Q K^T + bias, over allowed keys) V, in one call.
 *
 * C99 and C++; needs neither NumPy nor Python to be included. The function lives in fastattn's extension module, so
 * the process must run Python with fastattn installed. Its address comes from the capsule named FASTATTN_CAPSULE:
 * where Python.h was included before this header, fastattn_import() loads it, once per source file, with the GIL held;
 * then fastattn_attention(&call) calls it. Others take the address as a fastattn_attention_function.
 *
 *     fastattn_call call;
 *     fastattn_init(&call);
 *     call.batch = 1; call.num_heads = call.num_kv_heads = 8; call.len_q = call.len_k = 512;
 *     call.head_dim = call.value_dim = 64;
 *     fastattn_set(&call.query, query, FASTATTN_DTYPE_FLOAT32, 8, 512, 64);   (likewise key, value and out)
 *     if (fastattn_attention(&call) != FASTATTN_OK) ...
 *
 * Letters: B batch, H num_heads, K num_kv_heads, L len_q, S len_k, D head_dim, E value_dim. H is a multiple of K, and
 * query head h reads key/value head h / (H / K).
 *
 * GIL. A call whose sizes, strides, dtypes and options were seen before runs without the GIL, whether or not the
 * caller holds it. The first call of its kind, a call with an error, one with an `out` that may share memory with an
 * input, and a thread's first large call with num_threads other than 1 take the GIL for a moment, by PyGILState_Ensure:
 * so a thread that waits for another's call must not hold the GIL meanwhile. The 512 latest kinds of calls are kept.
 *
 * Threads. Calls from any number of threads at once are safe, on structs of their own; the work of one call is spread
 * over num_threads threads. A child of fork() may call, and runs on one thread; a fork by os.fork alone is foreseen.
 *
 * Determinism. The bits of a result are those of fastattn.attention in Python: they do not depend on threads, other
 * batch items or strides.
 *
 * Memory. Nothing is kept of the struct or of the arrays. Nothing is written to `out` or `lse` when an error is
 * returned, other than FASTATTN_NO_MEMORY.
 */
#ifndef FASTATTN_H
#define FASTATTN_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when the meaning of a field changes or fields are added; a library refuses structs that it does not know. */
#define FASTATTN_ABI_VERSION 1

#define FASTATTN_CAPSULE "fastattn._capi.attention"

/* What fastattn_attention returns; the message of an error is in call->message. */
enum {
    FASTATTN_OK = 0,
    FASTATTN_VALUE_ERROR = 1, /* sizes, strides, numbers or addresses that do not fit */
    FASTATTN_TYPE_ERROR = 2,  /* a dtype that this array cannot have */
    FASTATTN_NO_BACKEND = 3,  /* no backend can take the problem */
    FASTATTN_NO_MEMORY = 4,   /* `out` and `lse` may be written in part */
    FASTATTN_ABI_ERROR = 5,   /* a struct of another version or size; `message` is not touched */
    FASTATTN_FAILED = 6       /* anything else, as a Python interpreter that has ended */
};

/* Types of elements, all in the machine's byte order. */
enum {
    FASTATTN_DTYPE_FLOAT32 = 1,
    FASTATTN_DTYPE_FLOAT64 = 2,
    FASTATTN_DTYPE_FLOAT16 = 3,
    FASTATTN_DTYPE_BFLOAT16 = 4, /* needs the Python package ml_dtypes */
    FASTATTN_DTYPE_BOOL = 5,     /* one byte, 0 or 1 */
    FASTATTN_DTYPE_INT64 = 6
};

/* Which keys j a query i may attend to, beside all other masks. */
enum {
    FASTATTN_NOT_CAUSAL = 0,
    FASTATTN_TOP_LEFT = 1,    /* j <= i */
    FASTATTN_BOTTOM_RIGHT = 2 /* j <= i + S - L; with key_lengths, the length of the batch item in the place of S */
};

/* Where query, key and value have 16 bits: weights as they are, or rounded likewise where that is faster. */
enum {
    FASTATTN_EXACT = 0,
    FASTATTN_STORAGE = 1
};

/* An array in the caller's memory. Strides are in bytes and may be negative, 0 (along an axis over which the array is
 * broadcast) or no multiple of the element's size. */
typedef struct {
    void *data; /* the first element; NULL: there is no such array, or it is empty */
    int64_t dtype;
    int64_t strides[4]; /* from one batch item, head, row and column to the next */
} fastattn_array;

typedef struct {
    int64_t abi_version; /* FASTATTN_ABI_VERSION, set by fastattn_init */
    int64_t struct_size; /* sizeof(fastattn_call), set by fastattn_init */

    int64_t batch, num_heads, num_kv_heads, len_q, len_k;
    int64_t head_dim;  /* at least 1 */
    int64_t value_dim; /* may differ from head_dim */

    /* Read: float32 or float64, which compute in their own precision; float16 or bfloat16, which compute in float32.
     * Where they differ they are converted, at every call. */
    fastattn_array query; /* (B, H, L, D) */
    fastattn_array key;   /* (B, K, S, D) */
    fastattn_array value; /* (B, K, S, E) */
    /* Written: of the dtype of the inputs; float32 also where those have 16 bits. Where it shares memory with an input
     * the result is right all the same. */
    fastattn_array out; /* (B, H, L, E) */

    /* The rest is optional: NULL data, 0 or what fastattn_init sets leaves it out. */

    fastattn_array lse;         /* written: (B, H, L), natural log of each row's softmax denominator, -inf in a row without
                                   keys; in float64 or float32, as computed; may share memory with nothing else */
    fastattn_array mask;        /* (B, H, L, S), FASTATTN_DTYPE_BOOL, 1 = may attend */
    fastattn_array bias;        /* (B, H, L, S), any float, added to the scaled scores; -inf masks */
    fastattn_array key_lengths; /* (B,), FASTATTN_DTYPE_INT64: keys at or past it are never read; 0 .. S */
    fastattn_array sinks;       /* (H,), one more logit per head, in the denominator only; fastest contiguous and of the
                                   dtype of the computation */

    int64_t causal;       /* FASTATTN_NOT_CAUSAL, _TOP_LEFT or _BOTTOM_RIGHT */
    int64_t window_left;  /* keys from p - window_left ... */
    int64_t window_right; /* ... to p + window_right; -1 = unbounded; p is i, or i + S - L but for FASTATTN_TOP_LEFT */
    double scale;         /* of Q K^T; NaN: 1 / sqrt(D) */
    double softcap;       /* c > 0: scores become c * tanh(score / c); 0: they do not */
    int64_t precision;    /* FASTATTN_EXACT or _STORAGE */
    int64_t num_threads;  /* at most so many; 0: fastattn.get_num_threads(), asked for when a thread first needs it and
                             after fastattn.set_num_threads or a limit of threadpoolctl */

    char *message;        /* where the message of an error goes, in UTF-8 with an ending 0; NULL: nowhere */
    int64_t message_size; /* bytes there; a longer message is cut off */
} fastattn_call;

typedef int (*fastattn_attention_function)(fastattn_call *);

/* A call with all options left out, to be filled in. */
static inline void fastattn_init(fastattn_call *call) {
    memset(call, 0, sizeof(*call));
    call->abi_version = FASTATTN_ABI_VERSION;
    call->struct_size = (int64_t)sizeof(*call);
    call->window_left = call->window_right = -1;
    call->scale = NAN;
}

/* Bytes of an element of this dtype, 0 for none of them. */
static inline int64_t fastattn_itemsize(int64_t dtype) {
    switch (dtype) {
    case FASTATTN_DTYPE_FLOAT64:
    case FASTATTN_DTYPE_INT64: return 8;
    case FASTATTN_DTYPE_FLOAT32: return 4;
    case FASTATTN_DTYPE_FLOAT16:
    case FASTATTN_DTYPE_BFLOAT16: return 2;
    case FASTATTN_DTYPE_BOOL: return 1;
    default: return 0;
    }
}

/* A C-contiguous array (batch, heads, rows, columns) at `data`. */
static inline void fastattn_set(fastattn_array *array, const void *data, int64_t dtype, int64_t heads, int64_t rows,
                                int64_t columns) {
    array->data = (void *)data;
    array->dtype = dtype;
    array->strides[3] = fastattn_itemsize(dtype);
    array->strides[2] = columns * array->strides[3];
    array->strides[1] = rows * array->strides[2];
    array->strides[0] = heads * array->strides[1];
}

#ifdef Py_PYTHON_H

static fastattn_attention_function fastattn_imported_ = NULL;

/* Loads the function, with the GIL held; 0, or -1 with a Python exception set: ImportError, or fastattn.BackendError
 * where the extension module is missing. */
static inline int fastattn_import(void) {
    PyObject *module, *capsule;
    if (fastattn_imported_ != NULL) return 0;
    module = PyImport_ImportModule("fastattn._capi");
    if (module == NULL) return -1;
    capsule = PyObject_GetAttrString(module, "attention");
    Py_DECREF(module);
    if (capsule == NULL) return -1;
    fastattn_imported_ = (fastattn_attention_function)PyCapsule_GetPointer(capsule, FASTATTN_CAPSULE);
    Py_DECREF(capsule);
    return fastattn_imported_ == NULL ? -1 : 0;
}

/* Computes attention; FASTATTN_OK or another of the codes above. fastattn_import() must have been called in the same
 * source file. */
static inline int fastattn_attention(fastattn_call *call) { return fastattn_imported_(call); }

#endif

#ifdef __cplusplus
}
#endif

#endif
