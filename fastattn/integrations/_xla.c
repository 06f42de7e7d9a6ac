/* fastattn's attention as a custom call of XLA on the CPU, by XLA's typed foreign function interface and fastattn's own C
 * entry.
 *
 * The structs that XLA calls with are declared here, in part: JAX need not be there when this is compiled. Each begins
 * with its size, which says which fields XLA knows; XLA adds fields at the end, and names the version of the interface
 * that it talks with. Version 0.1 has all that is declared here. A test compares them with the header of the JAX that is
 * installed.
 *
 * Arguments, dense and row-major: query (*lead, H, L, D), key (*lead, K, S, D), value (*lead, K, S, E), and as the
 * attribute `given` says bias and mask (*lead, H, L, S), sinks (*lead, H) and key_lengths (*lead). An axis of 1 is
 * broadcast, in all but heads and lengths of query, key and value. Results: out (*lead, H, L, E) and lse (*lead, H, L),
 * whose floats come as integers of their bits. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <fastattn.h>
#include <stdlib.h>

/* XLA's interface ------------------------------------------------------------------------------------------------- */

typedef struct xla_extension {
    size_t struct_size;
    int kind; /* 1: a question about the handler */
    struct xla_extension *next;
} xla_extension;

typedef struct {
    size_t struct_size;
    xla_extension *extensions;
    int major, minor;
} xla_version;

typedef struct {
    size_t struct_size;
    xla_version version;
    uint32_t traits;
} xla_metadata;

typedef struct {
    xla_extension head;
    xla_metadata *metadata;
} xla_question;

typedef struct {
    size_t struct_size;
    xla_extension *extensions;
    const char *message;
    int code;
} xla_new_error;

typedef struct {
    size_t struct_size;
    xla_extension *extensions;
    xla_version version;
    const void *internal;
    void *(*new_error)(xla_new_error *);
} xla_api;

typedef struct {
    size_t struct_size;
    xla_extension *extensions;
    int dtype;
    void *data;
    int64_t rank;
    int64_t *shape;
} xla_buffer;

typedef struct { /* of arguments, and of results */
    size_t struct_size;
    xla_extension *extensions;
    int64_t n;
    int *kinds;
    void **buffers;
} xla_buffers;

typedef struct {
    const char *text;
    size_t n;
} xla_name;

typedef struct {
    int dtype;
    void *number;
} xla_scalar;

typedef struct {
    size_t struct_size;
    xla_extension *extensions;
    int64_t n;
    int *kinds;
    xla_name **names;
    void **attributes;
} xla_attributes;

typedef struct {
    size_t struct_size;
    xla_extension *extensions;
    const xla_api *api;
    void *context;
    int stage;
    xla_buffers arguments, results;
    xla_attributes attributes;
} xla_frame;

enum { XLA_QUESTION = 1, XLA_EXECUTE = 3, XLA_SCALAR = 3 };
enum { XLA_INVALID_ARGUMENT = 3, XLA_RESOURCE_EXHAUSTED = 8, XLA_INTERNAL = 13 };
enum { XLA_PRED = 1, XLA_S32 = 4, XLA_S64 = 5, XLA_F16 = 10, XLA_F32 = 11, XLA_F64 = 12, XLA_BF16 = 16 };

static void *error(const xla_frame *frame, int code, const char *message) {
    xla_new_error arguments = {sizeof(arguments), NULL, message, code};
    return frame->api->new_error(&arguments);
}

static const xla_scalar *attribute(const xla_frame *frame, const char *name, int dtype) {
    for (int64_t n = 0; n < frame->attributes.n; n++) {
        const xla_name *found = frame->attributes.names[n];
        const xla_scalar *scalar = (const xla_scalar *)frame->attributes.attributes[n];
        if (frame->attributes.kinds[n] == XLA_SCALAR && found->n == strlen(name) &&
            memcmp(found->text, name, found->n) == 0)
            return scalar->dtype == dtype ? scalar : NULL;
    }
    return NULL;
}

static int whole(const xla_frame *frame, const char *name, int64_t *to) {
    const xla_scalar *scalar = attribute(frame, name, XLA_S64);
    if (scalar != NULL) memcpy(to, scalar->number, sizeof(*to));
    return scalar != NULL;
}

static int real(const xla_frame *frame, const char *name, double *to) {
    const xla_scalar *scalar = attribute(frame, name, XLA_F64);
    if (scalar != NULL) memcpy(to, scalar->number, sizeof(*to));
    return scalar != NULL;
}

/* The call -------------------------------------------------------------------------------------------------------- */

enum { MAX_LEAD = 32, QUERY = 0, KEY, VALUE, OUT, LSE, MASK, BIAS, KEY_LENGTHS, SINKS, N_ARRAYS };

/* Axes behind the leading ones, and at which of the struct's strides they begin. */
static const int TAIL[N_ARRAYS] = {3, 3, 3, 3, 2, 3, 3, 0, 1};

typedef struct {
    const xla_buffer *buffer; /* NULL: not given */
    int64_t lead[MAX_LEAD];   /* strides of the leading axes in bytes, 0 where broadcast */
    int64_t batch;            /* the stride of the axis that the innermost ones become */
} operand;

static int64_t dtype_of(int dtype) {
    switch (dtype) {
    case XLA_F16: return FASTATTN_DTYPE_FLOAT16;
    case XLA_BF16: return FASTATTN_DTYPE_BFLOAT16;
    case XLA_F32: return FASTATTN_DTYPE_FLOAT32;
    case XLA_F64: return FASTATTN_DTYPE_FLOAT64;
    case XLA_PRED: return FASTATTN_DTYPE_BOOL;
    default: return 0;
    }
}

/* Strides of a dense buffer; 0 where it does not fit, or where an axis is neither 1 nor of the length that it must have. */
static int describe(operand *given, fastattn_array *array, int n_lead, const int64_t *lead, int tail,
                    const int64_t *lengths) {
    const xla_buffer *buffer = given->buffer;
    int64_t stride = buffer->dtype == XLA_S32 ? 4 : buffer->dtype == XLA_S64 ? 8 : fastattn_itemsize(dtype_of(buffer->dtype));
    if (stride == 0 || buffer->rank != n_lead + tail) return 0;
    array->data = buffer->data;
    array->dtype = dtype_of(buffer->dtype);
    for (int axis = n_lead + tail - 1; axis >= 0; axis--) {
        int64_t wanted = axis < n_lead ? lead[axis] : lengths[axis - n_lead], n = buffer->shape[axis];
        if (n != wanted && n != 1) return 0;
        *(axis < n_lead ? &given->lead[axis] : &array->strides[1 + axis - n_lead]) = n == 1 ? 0 : stride;
        stride *= n;
    }
    return 1;
}

/* How many of the innermost leading axes are one axis in all arrays; sets its length, and its stride in each. Sinks must
 * be the same all along it. */
static int merge(operand *given, int n_lead, const int64_t *lead, int64_t *batch) {
    int axis = n_lead, n;
    *batch = 1;
    for (n = 0; n < N_ARRAYS; n++) given[n].batch = 0;
    for (; axis > 0; axis--) {
        int64_t length = lead[axis - 1];
        if (length == 1) continue;
        for (n = 0; n < N_ARRAYS; n++) {
            int64_t stride = given[n].buffer == NULL ? 0 : given[n].lead[axis - 1];
            if (n == KEY_LENGTHS) continue; /* which are gathered */
            if (n == SINKS ? stride != 0 : *batch > 1 && stride != *batch * given[n].batch) return n_lead - axis;
        }
        for (n = 0; n < N_ARRAYS && *batch == 1; n++)
            if (given[n].buffer != NULL) given[n].batch = given[n].lead[axis - 1];
        *batch *= length;
    }
    return n_lead - axis;
}

/* Key lengths of all items in their order, as int64. */
static void gather(const operand *given, int n_lead, const int64_t *lead, int64_t n_items, int64_t *to) {
    for (int64_t item = 0; item < n_items; item++) {
        int64_t rest = item, number;
        const char *at = (const char *)given->buffer->data;
        for (int axis = n_lead - 1; axis >= 0; axis--) {
            at += rest % lead[axis] * given->lead[axis];
            rest /= lead[axis];
        }
        if (given->buffer->dtype == XLA_S32) {
            int32_t narrow;
            memcpy(&narrow, at, sizeof(narrow));
            number = narrow;
        } else {
            memcpy(&number, at, sizeof(number));
        }
        to[item] = number;
    }
}

static void *attend(const xla_frame *frame, operand *given, fastattn_call *call, int n_lead, const int64_t *lead,
                    int64_t *lengths) {
    fastattn_array *arrays = &call->query;
    int64_t n_items = 1, n_calls = 1;
    int n_outer = n_lead - merge(given, n_lead, lead, &call->batch);
    for (int axis = 0; axis < n_lead; axis++) n_items *= lead[axis];
    for (int axis = 0; axis < n_outer; axis++) n_calls *= lead[axis];
    if (n_items == 0) return NULL;
    for (int n = 0; n < N_ARRAYS; n++) arrays[n].strides[0] = given[n].batch;
    if (lengths != NULL) gather(&given[KEY_LENGTHS], n_lead, lead, n_items, lengths);
    for (int64_t number = 0; number < n_calls; number++) {
        int64_t rest = number, index[MAX_LEAD];
        int code;
        for (int axis = n_outer - 1; axis >= 0; axis--) {
            index[axis] = rest % lead[axis];
            rest /= lead[axis];
        }
        for (int n = 0; n < N_ARRAYS; n++) {
            if (given[n].buffer == NULL || n == KEY_LENGTHS) continue;
            char *at = (char *)given[n].buffer->data;
            for (int axis = 0; axis < n_outer; axis++) at += index[axis] * given[n].lead[axis];
            arrays[n].data = at;
        }
        if (lengths != NULL) {
            arrays[KEY_LENGTHS].data = lengths + number * call->batch;
            arrays[KEY_LENGTHS].dtype = FASTATTN_DTYPE_INT64;
            arrays[KEY_LENGTHS].strides[0] = sizeof(int64_t);
        }
        code = fastattn_attention(call);
        if (code != FASTATTN_OK)
            return error(frame,
                         code == FASTATTN_NO_MEMORY                                    ? XLA_RESOURCE_EXHAUSTED
                         : code == FASTATTN_VALUE_ERROR || code == FASTATTN_TYPE_ERROR ? XLA_INVALID_ARGUMENT
                                                                                       : XLA_INTERNAL,
                         call->message);
    }
    return NULL;
}

/* What XLA calls: NULL, or an error of XLA's. */
static void *handle(xla_frame *frame) {
    operand given[N_ARRAYS];
    fastattn_call call;
    char message[1000] = "";
    int64_t *lengths = NULL, n_items = 1, which;
    const int64_t *lead;
    int64_t next = 3;
    int n_lead;
    void *failed;
    if (frame->extensions != NULL && frame->extensions->kind == XLA_QUESTION) {
        xla_metadata *metadata = ((xla_question *)frame->extensions)->metadata;
        metadata->version.struct_size = sizeof(xla_version);
        metadata->version.extensions = NULL;
        metadata->version.major = 0;
        metadata->version.minor = 1;
        metadata->traits = 0;
        return NULL;
    }
    if (frame->struct_size < sizeof(xla_frame) || frame->stage != XLA_EXECUTE)
        return error(frame, XLA_INTERNAL, "fastattn: a call of XLA that this handler does not know");
    fastattn_init(&call);
    call.message = message;
    call.message_size = sizeof(message);
    memset(given, 0, sizeof(given));
    if (frame->arguments.n < 3 || frame->results.n != 2 || !whole(frame, "given", &which) ||
        !whole(frame, "causal", &call.causal) || !whole(frame, "window_left", &call.window_left) ||
        !whole(frame, "window_right", &call.window_right) || !real(frame, "scale", &call.scale) ||
        !real(frame, "softcap", &call.softcap) || !whole(frame, "precision", &call.precision))
        return error(frame, XLA_INTERNAL, "fastattn: arguments or attributes that this handler does not know");
    for (int n = 0; n < 3; n++) given[n].buffer = (const xla_buffer *)frame->arguments.buffers[n];
    for (int n = 0; n < 2; n++) given[OUT + n].buffer = (const xla_buffer *)frame->results.buffers[n];
    for (int n = MASK; n < N_ARRAYS; n++) {
        if (!(which >> n & 1)) continue;
        if (next == frame->arguments.n) return error(frame, XLA_INTERNAL, "fastattn: too few arguments");
        given[n].buffer = (const xla_buffer *)frame->arguments.buffers[next++];
    }
    n_lead = (int)given[OUT].buffer->rank - 3;
    if (n_lead < 0 || n_lead > MAX_LEAD || given[KEY].buffer->rank != n_lead + 3 || given[VALUE].buffer->rank != n_lead + 3 ||
        given[QUERY].buffer->rank != n_lead + 3)
        return error(frame, XLA_INVALID_ARGUMENT, "query, key and value must have as many axes, at most 35");
    lead = given[OUT].buffer->shape;
    call.num_heads = given[QUERY].buffer->shape[n_lead];
    call.len_q = given[QUERY].buffer->shape[n_lead + 1];
    call.head_dim = given[QUERY].buffer->shape[n_lead + 2];
    call.num_kv_heads = given[VALUE].buffer->shape[n_lead];
    call.len_k = given[VALUE].buffer->shape[n_lead + 1];
    call.value_dim = given[VALUE].buffer->shape[n_lead + 2];
    {
        const int64_t H = call.num_heads, K = call.num_kv_heads, L = call.len_q, S = call.len_k;
        const int64_t tails[N_ARRAYS][3] = {{H, L, call.head_dim},
                                            {K, S, call.head_dim},
                                            {K, S, call.value_dim},
                                            {H, L, call.value_dim},
                                            {H, L, 0},
                                            {H, L, S},
                                            {H, L, S},
                                            {0, 0, 0},
                                            {H, 0, 0}};
        for (int n = 0; n < N_ARRAYS; n++) {
            if (given[n].buffer != NULL &&
                !describe(&given[n], &call.query + n, n_lead, lead, TAIL[n], tails[n]))
                return error(frame, XLA_INVALID_ARGUMENT, "fastattn: shapes or dtypes that do not fit");
        }
    }
    call.lse.dtype = given[LSE].buffer->dtype == XLA_S64 ? FASTATTN_DTYPE_FLOAT64 : FASTATTN_DTYPE_FLOAT32;
    if (given[KEY_LENGTHS].buffer != NULL) {
        for (int axis = 0; axis < n_lead; axis++) n_items *= lead[axis];
        lengths = (int64_t *)malloc((size_t)(n_items + 1) * sizeof(int64_t));
        if (lengths == NULL) return error(frame, XLA_RESOURCE_EXHAUSTED, "no memory for key lengths");
    }
    failed = attend(frame, given, &call, n_lead, lead, lengths);
    free(lengths);
    return failed;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_xla", .m_doc = "fastattn's attention as a custom call of XLA, a capsule.", .m_size = -1};

PyMODINIT_FUNC PyInit__xla(void) {
    PyObject *module, *capsule;
    if (fastattn_import() != 0) return NULL;
    module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
#ifdef Py_GIL_DISABLED
    PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
    capsule = PyCapsule_New((void *)handle, "xla._CUSTOM_CALL_TARGET", NULL);
    if (capsule == NULL || PyModule_AddObjectRef(module, "handler", capsule) != 0) Py_CLEAR(module);
    Py_XDECREF(capsule);
    return module;
}
