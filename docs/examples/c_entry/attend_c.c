/* attend_c.attend(query, key, value, out): causal attention of float32 arrays (heads, length, dim), with any strides.
 *
 * An extension module in C; it takes whatever has a buffer, and knows nothing of NumPy. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <fastattn.h>

/* An array of a call from a buffer with three axes. */
static void describe(fastattn_array *array, const Py_buffer *buffer) {
    array->data = buffer->buf;
    array->dtype = FASTATTN_DTYPE_FLOAT32;
    for (int axis = 0; axis < 3; axis++) array->strides[1 + axis] = buffer->strides[axis]; /* strides[0] stays 0 */
}

static PyObject *attend(PyObject *module, PyObject *args) {
    PyObject *given[4], *result = NULL;
    Py_buffer buffers[4];
    const Py_ssize_t *query, *key, *value, *out;
    char message[500] = "";
    fastattn_call call;
    int opened = 0, code;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOO:attend", &given[0], &given[1], &given[2], &given[3])) return NULL;
    for (; opened < 4; opened++) {
        int flags = PyBUF_STRIDED_RO | PyBUF_FORMAT | (opened == 3 ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(given[opened], &buffers[opened], flags) != 0) goto done;
        if (buffers[opened].ndim != 3 || strcmp(buffers[opened].format, "f") != 0) {
            PyErr_Format(PyExc_TypeError, "argument %d must have three axes of float32", opened + 1);
            opened++;
            goto done;
        }
    }
    query = buffers[0].shape, key = buffers[1].shape, value = buffers[2].shape, out = buffers[3].shape;
    /* The struct has each size once: that the arrays have them is for the caller to know. */
    if (key[2] != query[2] || value[0] != key[0] || value[1] != key[1] || out[0] != query[0] || out[1] != query[1] ||
        out[2] != value[2]) {
        PyErr_SetString(PyExc_ValueError, "shapes must be (H, L, D), (K, S, D), (K, S, E) and (H, L, E)");
        goto done;
    }
    fastattn_init(&call);
    call.batch = 1;
    call.num_heads = query[0], call.num_kv_heads = key[0];
    call.len_q = query[1], call.len_k = key[1];
    call.head_dim = query[2], call.value_dim = value[2];
    for (int n = 0; n < 4; n++) describe(&call.query + n, &buffers[n]);
    call.causal = FASTATTN_BOTTOM_RIGHT;
    call.message = message;
    call.message_size = sizeof(message);
    Py_BEGIN_ALLOW_THREADS
    code = fastattn_attention(&call);
    Py_END_ALLOW_THREADS
    if (code == FASTATTN_OK)
        result = Py_NewRef(Py_None);
    else
        PyErr_SetString(code == FASTATTN_TYPE_ERROR ? PyExc_TypeError : PyExc_ValueError, message);
done:
    while (opened > 0) PyBuffer_Release(&buffers[--opened]);
    return result;
}

static PyMethodDef methods[] = {{"attend", attend, METH_VARARGS, "Causal attention, into out."}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "attend_c", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_attend_c(void) {
    if (fastattn_import() != 0) return NULL;
    return PyModule_Create(&definition);
}
