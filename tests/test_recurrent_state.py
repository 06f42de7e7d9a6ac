"""`RecurrentState` against the recurrence in extended precision over the tokens that remain."""

from __future__ import annotations

import copy
import json
import pickle
import re
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import fastattn
from fastattn import RecurrentState
from fastattn._cache import recurrent as _recurrent
from tests.cases import FLOATS
from tests.conftest import drawn
from tests.test_cache_files import damaged
from tests.test_recurrent import RULES, WIDE, assert_near, inputs, recurrence
from tests.tolerances import assert_same_bits

K, H, D, E = 2, 4, 6, 5


def tokens(rule, batch, T, dtype=np.float32, seed=0):
    return inputs(rule, (batch,), H, K, T, D, E, dtype, seed)


def of_item(arrays, gates, b):
    """The same for one item alone."""
    return [x[b : b + 1] for x in arrays], {name: x[b : b + 1] for name, x in gates.items()}


class Model:
    """The states of an item after each token, from none on, and the same item in a state of its own."""

    def __init__(self, dtype, rollback):
        self.states, self.rollback, self.greatest = [np.zeros((1, K, D, E), WIDE)], rollback, 0
        self.alone = RecurrentState(1, K, D, E, dtype=dtype, rollback=rollback)

    def fork(self):
        other = copy.copy(self)
        other.states, other.alone = list(self.states), self.alone.fork()
        return other

    def step(self, arrays, gates, n):
        """The results of the first n tokens."""
        outs = []
        for t in range(n):
            part = {name: x[:, :, t : t + 1] for name, x in gates.items()}
            out, state = recurrence([x[:, :, t : t + 1] for x in arrays], **part, state=self.states[-1])
            outs.append(out)
            self.states.append(state)
        self.greatest = max(self.greatest, self.length)
        return np.concatenate([np.zeros((1, H, 0, E), WIDE), *outs], axis=2)

    def truncate(self, length):
        del self.states[length + 1 :]
        self.alone.truncate(length)

    @property
    def length(self):
        return len(self.states) - 1

    @property
    def retained(self):
        return max(0, self.greatest - self.rollback)

    def check(self, state, b):
        assert (state.lengths[b], state.retained[b]) == (self.length, self.retained)
        assert_near(state.state[b], self.states[-1][0], 100)
        assert_same_bits(self.alone.state[0], state.state[b])


def program(data, state, items, rule, dtype, folder):
    """Operations on states that were forks of one another, each checked against the models of its items."""
    states = [(state, items)]
    for number in range(data.draw(st.integers(1, 12))):
        at = data.draw(st.integers(0, len(states) - 1))
        state, items = states[at]
        batch = len(items)
        operation = data.draw(
            st.sampled_from(["append", "step", "step", "truncate", "truncate", "fork", "select", "file"])
        )
        if operation in ("append", "step"):
            T = data.draw(st.sampled_from([0, 1, 1, 1, 2, 4, 5, 9, 60]))
            arrays, gates = tokens(rule, batch, T, dtype, seed=number)
            counts = data.draw(st.lists(st.integers(0, T), min_size=batch, max_size=batch) | st.none())
            options = {} if counts is None else {"lengths": counts}
            counts = [T] * batch if counts is None else counts
            for b, n in enumerate(counts):
                for x in (*arrays, *gates.values()):
                    x[b, :, n:] = np.nan  # padding
            out = None
            if operation == "step":
                out = state.step(*arrays, **gates, **options)
                assert (out.shape, out.dtype) == ((batch, H, T, E), dtype)
            else:
                state.append(*arrays[1:], **gates, **options)
            for b, (item, n) in enumerate(zip(items, counts, strict=True)):
                one, its_gates = of_item(arrays, gates, b)
                expected = item.step(one, its_gates, n)
                options = {} if n == T else {"lengths": n}
                if out is None:
                    item.alone.append(*one[1:], **its_gates, **options)
                else:
                    assert_near(out[b, :, :n], expected[0], 100)
                    assert not out[b, :, n:].any()
                    assert_same_bits(item.alone.step(*one, **its_gates, **options)[0], out[b])
        elif operation == "truncate":
            lengths = [data.draw(st.integers(item.retained, item.length)) for item in items]
            state.truncate(lengths)
            for item, n in zip(items, lengths, strict=True):
                item.truncate(n)
        elif operation == "fork":
            states.append((state.fork(), [item.fork() for item in items]))
        elif operation == "select" and batch:
            chosen = data.draw(st.lists(st.integers(0, batch - 1), max_size=3))
            states.append((state.select(chosen), [items[b].fork() for b in chosen]))
        elif operation == "file":
            state.save(folder / "state")
            state = RecurrentState.load(folder / "state", mmap=data.draw(st.booleans()))
            (folder / "state").unlink()
            states[at] = state, items
        for state, items in states:
            for b, item in enumerate(items):
                item.check(state, b)


@drawn(30, 200, data=st.data())
def test_any_history(data, tmp_path_factory):
    """The tokens that remain decide, and no bit of an item depends on the others."""
    rule, dtype = data.draw(st.sampled_from([*RULES])), np.dtype(data.draw(st.sampled_from(FLOATS)))
    rollback, batch = data.draw(st.sampled_from([0, 1, 3, 8, 64])), data.draw(st.integers(1, 3))
    state = RecurrentState(batch, K, D, E, dtype=dtype, rollback=rollback)
    with mock.patch.object(_recurrent, "_APART", data.draw(st.sampled_from([1, 5, 64]))):
        items = [Model(dtype, rollback) for _ in range(batch)]
        program(data, state, items, rule, dtype, tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", ["cython", "reference"])
def test_a_step_has_the_bits_of_the_function(rule, backend):
    state = RecurrentState(2, K, D, E)
    before = None
    for T in (60, 1, 1, 4, 33, 1, 60, 5):
        arrays, gates = tokens(rule, 2, T, seed=T)
        expected, before = fastattn.gated_linear_attention(
            *arrays, **gates, scale=0.3, state=before, return_state=True, backend=backend
        )
        assert_same_bits(state.step(*arrays, **gates, scale=0.3, backend=backend, num_threads=1), expected)
        assert_same_bits(state.state, before)


@pytest.mark.parametrize("rule", RULES)
def test_a_token_is_worked_on_once(rule, monkeypatch):
    """A step of one token is one call of one token, now and then with a copy."""
    seen = []

    def function(name, call, backend=None):
        seen.append(call.key.shape[2])
        return real(name, call, backend)

    def gated_linear_attention(query, key, *arrays, **options):
        seen.append(key.shape[2])
        return fastattn.gated_linear_attention(query, key, *arrays, **options)

    real = _recurrent.function
    monkeypatch.setattr(_recurrent, "function", function)
    monkeypatch.setattr(_recurrent, "gated_linear_attention", gated_linear_attention)
    state = RecurrentState(1, K, D, E, rollback=20)
    arrays, gates = tokens(rule, 1, 300)
    state.append(*arrays[1:], **gates)
    arrays, gates = tokens(rule, 1, 1)
    for _ in range(500):
        state.step(*arrays, **gates)
    assert seen == [300] + [1] * 500
    held = state._held
    assert held.rows.shape[2] <= 2 * (20 + _recurrent._APART + 1) * 2
    assert (held.lengths - held.starts <= 2 * (20 + _recurrent._APART)).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_tokens(rule, bad):
    """They reach later tokens of their own head and item, and leave no trace once they are taken back."""
    clean = RecurrentState(2, K, D, E, rollback=9)
    arrays, gates = tokens(rule, 2, 30)
    clean.append(*arrays[1:], **gates)
    for which in range(3 + len(gates)):
        arrays, gates = tokens(rule, 2, 7, seed=1)
        state, expected = clean.fork(), clean.fork().step(*arrays, **gates)
        given = [*arrays, *gates.values()][which]
        given[1, -1, 4] = bad
        out = state.step(*arrays, **gates)
        assert_same_bits(out[0], expected[0])
        assert_same_bits(out[1, : H // 2], expected[1, : H // 2])
        np.testing.assert_allclose(out[1, H // 2 :, :4], expected[1, H // 2 :, :4], rtol=1e-5, atol=1e-5)
        if which in (1, 2):
            assert not np.isfinite(out[1, H // 2 :, 4:]).any()
            assert not np.isfinite(state.state[1, 1]).any()
        assert np.isfinite(state.state[0]).all()
        assert np.isfinite(state.state[1, 0]).all()
        state.truncate([37, 30])
        state.truncate(30)
        np.testing.assert_allclose(state.state, clean.state, rtol=1e-5, atol=1e-6)


def test_layouts():
    first, second = (RecurrentState(2, K, D, E, layout=layout) for layout in ("bhsd", "bshd"))
    for rule in ("kimi", "gated_delta"):
        first, second = (RecurrentState(2, K, D, E, layout=layout) for layout in ("bhsd", "bshd"))
        for T, lengths in ((100, [100, 60]), (1, None), (5, [0, 4])):
            arrays, gates = tokens(rule, 2, T)
            out = first.step(*arrays, **gates, lengths=lengths)
            swapped = [x.swapaxes(1, 2) for x in arrays]
            again = second.step(*swapped, **{n: x.swapaxes(1, 2) for n, x in gates.items()}, lengths=lengths)
            assert again.flags.c_contiguous
            assert_same_bits(np.ascontiguousarray(again.swapaxes(1, 2)), out)
            first.truncate(first.lengths - [1, 0])
            second.truncate(second.lengths - [1, 0])
            assert_same_bits(first.state, second.state)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bits(dtype):
    narrow, wide = RecurrentState(1, K, D, E, rollback=4), RecurrentState(1, K, D, E, rollback=4)
    for T in (1, 3, 20):
        arrays, gates = tokens("gated_delta", 1, T)
        short = [x.astype(dtype) for x in arrays]
        out = narrow.step(*short, **gates)
        assert out.dtype == dtype
        assert_same_bits(out, wide.step(*(x.astype(np.float32) for x in short), **gates).astype(dtype))
    assert_same_bits(narrow.state, wide.state)
    narrow.truncate(narrow.lengths - 3)
    wide.truncate(wide.lengths - 3)
    assert_same_bits(narrow.state, wide.state)


def test_others_are_converted():
    arrays, gates = tokens("gated_delta", 1, 5, np.float64)
    for dtype in FLOATS:
        state, same = (RecurrentState(1, K, D, E, dtype=dtype) for _ in range(2))
        out = state.step(*(x.tolist() for x in arrays), decay=gates["decay"][:, :, :1], beta=gates["beta"])
        decay = np.broadcast_to(gates["decay"][:, :, :1], (1, K, 5)).astype(dtype)
        assert_same_bits(
            same.step(*(x.astype(dtype) for x in arrays), decay=decay, beta=gates["beta"].astype(dtype)), out
        )
        assert out.dtype == state.dtype == dtype
        state.truncate(3)
        same.truncate(3)
        assert_same_bits(state.state, same.state)


def test_attributes():
    state = RecurrentState(1, K, D, E, rollback=0)
    assert state.nbytes == K * D * E * 4
    arrays, gates = tokens("kimi", 1, 50)
    state.append(*arrays[1:], **gates)
    assert state.nbytes == K * D * E * 4
    state.lengths[:] = 0
    state.state[:] = 0
    assert state.lengths == state.retained == 50
    assert state.state.any()
    assert repr(state) == (
        "RecurrentState(batch=1, num_kv_heads=2, head_dim=6, value_dim=5, dtype=float32, rollback=0, "
        "layout='bhsd')"
    )
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"fork\(\) it, or save\(\)"):
            copied(state)
    assert RecurrentState(0, K, D, E).select([]).lengths.shape == (0,)


# What is refused -----------------------------------------------------------------------------------


ARRAYS, GATES = tokens("gated_delta", 2, 3)
Q, X, V = ARRAYS


@pytest.mark.parametrize(
    ("error", "said", "arrays", "options"),
    [
        (ValueError, "key must have shape (2, 2, T, 6), got (1, 2, 3, 6)", (Q, X[:1], V), {}),
        (ValueError, "value must have shape (2, 2, T, 5), got (2, 2, 3, 4)", (Q, X, V[..., :4]), {}),
        (ValueError, "key and value must have as many tokens, got 3 and 2", (Q, X, V[:, :, :2]), {}),
        (ValueError, "query must have shape (batch, H, L, D), with batch=2, got (4, 3, 6)", (Q[0], X, V), {}),
        (ValueError, "query, key and value must have the same length, got 2 and 3", (Q[:, :, :2], X, V), {}),
        (ValueError, "decay must broadcast to (2, 2, 3) or (2, 2, 3, 6), got ", ARRAYS, {"decay": [0, 0]}),
        (ValueError, "beta must broadcast to (2, 2, 3), got (2, 2, 1, 6)", ARRAYS, {"beta": X[:, :, :1]}),
        (ValueError, "lengths must be in 0..T=3, got 4 for item 1", ARRAYS, {"lengths": [3, 4]}),
        (ValueError, "scale must be a finite number", ARRAYS, {"scale": np.inf}),
        (
            ValueError, "beta must be as with the first tokens, one for each token, got none",
            ARRAYS, {"beta": None},
        ),
        (
            ValueError, "decay must be as with the first tokens, one for each token, got one for each column",
            ARRAYS, {"decay": X},
        ),
        (TypeError, "key has dtype complex64", (Q, X + 0j, V), {}),
        (TypeError, "query must be an array, got object", (object(), X, V), {}),
        (fastattn.BackendError, "backend 'numba' cannot run", ARRAYS, {"backend": "numba"}),
        (ValueError, "num_threads must be", ARRAYS, {"num_threads": 0}),
        (TypeError, "unexpected keyword argument 'mask': call fastattn.attention", ARRAYS, {"mask": None}),
    ],
)  # fmt: skip
def test_a_step_that_fails_changes_nothing(error, said, arrays, options):
    state = RecurrentState(2, K, D, E)
    state.step(*ARRAYS, **GATES)
    same, before = state.fork(), state._held
    with pytest.raises(error, match=re.escape(said)):
        state.step(*arrays, **{**GATES, **options})
    assert state._held is before
    assert_same_bits(state.step(*ARRAYS, **GATES), same.step(*ARRAYS, **GATES))


def test_other_refusals():
    for options, said in (({"rollback": -1}, "rollback must be in"), ({"layout": "sbhd"}, "layout must be")):
        with pytest.raises(ValueError, match=said):
            RecurrentState(1, K, D, **options)
    for dtype in ("float16", "int8", None, "no such"):
        with pytest.raises(TypeError, match="dtype must be float32 or float64, got"):
            RecurrentState(1, K, D, dtype=dtype)
    state = RecurrentState(2, K, D, E, rollback=2)
    with pytest.raises(ValueError, match="query must have shape"):
        state.step(Q[0], X, V)
    state.append(X, V)  # the call before decided nothing
    with pytest.raises(ValueError, match=r"^lengths: item 1 has 3 tokens, got 4$"):
        state.truncate([3, 4])
    with pytest.raises(ValueError, match=r"^lengths: item 0 can be truncated to 1 at least, got 0: earlier"):
        state.truncate([0, 3])
    state.truncate([1, 3])
    with pytest.raises(ValueError, match=r"^items must be in 0\.\.1, got 2$"):
        state.select([0, 2])
    assert state.lengths.tolist() == [1, 3]


# Files ----------------------------------------------------------------------------------------------


def filled(rule="kimi"):
    state = RecurrentState(2, K, D, E, rollback=9)
    for T in (30, 1, 5):
        arrays, gates = tokens(rule, 2, T)
        state.append(*arrays[1:], **gates, lengths=[T, T // 2])
    return state


@pytest.mark.parametrize("rule", RULES)
def test_the_package_safetensors_reads_it(rule, tmp_path):
    load_file = pytest.importorskip("safetensors.numpy").load_file
    state = filled(rule)
    state.save(tmp_path / "state")
    got = load_file(tmp_path / "state")
    assert {*got} == {"state", "base", "middle", "keys", "values", "decay", "beta"}
    np.testing.assert_array_equal(got["state"], state.state)
    assert repr(RecurrentState.load(tmp_path / "state")) == repr(state)


def test_damaged_files(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "state"
    filled().save(path)
    content = path.read_bytes()
    for _ in range(300):
        changed = damaged(content, rng)
        if changed != content:
            path.write_bytes(changed)
            with pytest.raises(ValueError, match="is no file of a RecurrentState, or damaged"):
                RecurrentState.load(path)
    fastattn.KVCache(1, K, D).save(path)
    with pytest.raises(ValueError, match="its format is not"):
        RecurrentState.load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 2**40}, {"batch": -1}, {"head_dim": 10**30}, {"head_dim": 6.0}, {"value_dim": None},
        {"dtype": "float64"}, {"dtype": "int8"}, {"rollback": 2**63}, {"rollback": 50}, {"layout": ["bhsd"]},
        {"gates": None}, {"gates": [5, 1]}, {"gates": [6, 2]}, {"gates": [6]}, {"gates": [0, 0]},
        {"lengths": [2**39, 2**39]}, {"lengths": [36]}, {"lengths": [36, -1]}, {"greatest": [0, 0]},
        {"greatest": [2**39, 2**39]}, {"starts": [37, 0]}, {"starts": [30, 2**70]}, {"middles": [0, 0]},
        {"middles": [2**30, 2**30]}, {"starts": None},
    ],
    ids=str,
)  # fmt: skip
def test_an_absurd_header(changes, tmp_path):
    """Rewritten with checksums that are right."""
    state, path = filled(), tmp_path / "state"
    state.save(path)
    content = path.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    checksums = json.loads(json.loads(content[8:length])["__metadata__"]["checksums"])
    made = _recurrent._content(state._settings, state._held[:4])
    assert content[:length] == made.header(checksums)
    for name, value in changes.items():
        (made.settings if name in made.settings else made.state)[name] = value
    path.write_bytes(made.header(checksums) + content[length:])
    for mmap in (False, True):
        with pytest.raises(ValueError, match="is no file of a RecurrentState, or damaged"):
            RecurrentState.load(path, mmap=mmap)
