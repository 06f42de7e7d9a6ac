"""The epilogues of a tile of scores: what changes raw scores before the softmax, in the order of
`fastattn.backends.cpu.fields.EPILOGUES`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda

from fastattn.backends.cuda.form import Form
from fastattn.backends.cuda.intrinsics import U, memory, read_as
from fastattn.backends.cuda.tiles import apart, element, place


def modify_scores(form: Form, score_mod: Any) -> Any:
    """s = scale * s, then softcap * tanh(s / softcap), then the caller's function of it.

    The soft-cap's reciprocal is a factor, as a division for each score would be a third of the instructions.
    It is finite, as no soft-cap is subnormal.
    """
    real, shape = form.real, form.shape
    ONE = real(1)
    ROWS, KEYS, THREADS_Q, THREADS_K = shape.rows, shape.keys, shape.threads_q, shape.threads_k
    HAS_SOFTCAP, HAS_SCORE_MOD = form.has_softcap, form.has_score_mod
    row_in_tile, in_tile = place(shape.row_vector), place(shape.vector)

    @cuda.jit(device=True)
    def modify_scores(s, scale, softcap, aux, rows, block, key0, len_k, thread):
        inverse = ONE
        if HAS_SOFTCAP:
            inverse = ONE / softcap
        for i in range(ROWS):
            for c in range(KEYS):
                s[i, c] *= scale
                if HAS_SOFTCAP:
                    s[i, c] = softcap * real(math.tanh(s[i, c] * inverse))
        if HAS_SCORE_MOD:
            for i in range(ROWS):
                row = row_in_tile(i, thread.y, THREADS_Q)
                head, query = np.int64(rows.heads[row]), np.int64(rows.queries[row])
                for c in range(KEYS):
                    # Past the last key it gets that one's index: `aux` may be no longer.
                    key = min(key0 + in_tile(c, thread.x, THREADS_K), len_k - 1)
                    s[i, c] = real(score_mod(s[i, c], block.named_item, head, query, key, *aux))

    return modify_scores


def mask_scores(form: Form, is_full: bool) -> Any:
    """s += bias, and -inf where the bias is -inf or the score's bit of `allowed` is 0.

    is_full: no bit is 0, and none is looked at.
    """
    real, shape, HAS_BIAS = form.real, form.shape, form.has_bias
    ROWS, KEYS, THREADS_Q, THREADS_K = shape.rows, shape.keys, shape.threads_q, shape.threads_k
    MASKED, elements, read = real(-math.inf), memory(form.stored.bias), read_as(form.dtype, form.stored.bias)
    row_in_tile, offset, VECTOR = place(shape.row_vector), apart(shape.vector), shape.vector

    @cuda.jit(device=True)
    def mask_scores(s, allowed, bias_view, rows, block, key0, thread):
        for i in range(ROWS):
            row = row_in_tile(i, thread.y, THREADS_Q)
            at, step = 0, 0
            if HAS_BIAS:
                step = bias_view[4]
                at = element(bias_view, block.item, rows.heads[row], rows.queries[row])
                at += (key0 + thread.x * VECTOR) * step
            for c in range(KEYS):
                x = MASKED
                if is_full or (allowed >> U(i * KEYS + c)) & U(1) != U(0):
                    x = s[i, c]
                    if HAS_BIAS:
                        one = read(elements(bias_view), U(at + np.int64(offset(c, THREADS_K)) * step))
                        x = MASKED if one == MASKED else x + one
                s[i, c] = x

    return mask_scores


def masked_bits(form: Form) -> Any:
    """Which of a thread's scores are -inf, a bit for each as in `allowed_bits`."""
    ROWS, KEYS, MASKED = form.shape.rows, form.shape.keys, form.real(-math.inf)

    @cuda.jit(device=True)
    def masked_bits(s):
        masked = U(0)
        for i in range(ROWS):
            for c in range(KEYS):
                if s[i, c] == MASKED:
                    masked |= U(1) << U(i * KEYS + c)
        return masked

    return masked_bits
