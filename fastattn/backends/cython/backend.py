"""The compiled CPU backend: Cython driver over C micro-kernels, for float32 and float64, every feature."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from fastattn._call.conv import ConvolutionCall
from fastattn._call.gradients import Backward, Gradients
from fastattn._call.linear import LEAST, MOST, LinearCall, LinearState, broadcast, elu_plus_one, shared
from fastattn._call.problem import Problem
from fastattn._call.recurrent import RecurrentBackward, RecurrentCall, RecurrentGradients
from fastattn._call.reductions import ReductionCall, SimilarityCall
from fastattn._call.rope import Rotation
from fastattn._call.schedule import (
    Target,
    make_backward_schedule,
    make_reduction_schedule,
    make_schedule,
)
from fastattn._call.storage import INT8, SWAPPED, storage_of
from fastattn._machine import host, threads
from fastattn._machine.constants import ISAS, SMALL_WORK
from fastattn.backends._base import Backend, Prepared
from fastattn.backends.cpu.backward import PreparedGradients, plan_of
from fastattn.backends.cpu.record import write_record
from fastattn.backends.jit.loading import gradient_loops_of, loop_of, reasons_no_compiler

try:
    import fastattn.backends.cython.driver as driver
except ImportError as error:
    driver = None
    _missing = (
        f"its extension module is not built or does not load ({error}); a C compiler builds it on install"
    )
    _tree = Path(__file__).parents[3]
    _source = _tree / "fastattn" / "backends" / "cython" / "driver.pyx"  # in no wheel
    is_unbuilt_tree = isinstance(error, ModuleNotFoundError) and _source.exists()
    if is_unbuilt_tree:
        _missing = (
            f"imported from the source tree {_tree}, which is not built; `pip install -e {_tree}` builds it, "
            "with a C compiler, and from another folder Python imports the fastattn that is installed"
        )
else:
    is_unbuilt_tree = False
    driver.choose_isa(host.forced_isa() or driver.available_isas()[0])
    driver.set_cores(host.cores_of_cpus())

#: Lanes to which rows of the kernels are padded, of any instruction set.
_LANES = 16

#: The scale of integers that stand for themselves.
_ONE = np.float32(1)


class CythonBackend(Backend):
    """Tiles of keys by lanes of queries, on every core; see `fastattn.backends.cython.driver`."""

    name = "cython"

    def unavailable_reasons(self) -> list[str]:
        return [_missing] if driver is None else []

    def unsupported_reasons(self, problem: Problem) -> list[str]:
        if problem.score_mod is None or not (reasons := reasons_no_compiler()):
            return []
        return [f"a score_mod is compiled by Numba, and {'; '.join(reasons)}"]

    def thread_limit(self, num_threads: int) -> int:
        return threads.thread_limit(num_threads)

    def prepare(self, problem: Problem, num_threads: int) -> Prepared:
        target = Target(**driver.target(problem.dtype.itemsize))
        schedule = make_schedule(problem, target, num_threads)
        loop = loop_of(problem, 0 if schedule.uses_split_kv else target.lanes)
        sizes = None if loop is None else (problem.batch, problem.num_heads, problem.len_q, problem.len_k)
        record = write_record(problem, schedule, target)
        return driver.Prepared(*record, schedule.num_threads, schedule.is_small, loop, sizes)

    def run(self, problem: Problem, num_threads: int) -> None:
        self.prepare(problem, num_threads).run(problem.arrays(), problem.score_mod)

    def gradient_reasons(self) -> list[str]:
        return []

    def prepare_gradients(self, backward: Backward, num_threads: int) -> PreparedGradients:
        problem = backward.problem
        target = Target(**driver.target(problem.dtype.itemsize))
        of_gradients = problem._replace(out=backward.grad_out)
        schedule = make_backward_schedule(of_gradients, target, num_threads, backward.sums_by_task)
        larger = {}
        if any(array.dtype != problem.dtype for array in (problem.query, problem.out, backward.grad_out)):
            row = max(problem.head_dim, problem.value_dim) * problem.dtype.itemsize
            larger = {"staged": schedule.max_lanes * row, "staged_rows": 8 * schedule.max_lanes}
        of_outputs = record = write_record(of_gradients, schedule, target, **larger)
        grad_out, out = backward.grad_out, problem.out
        if larger or (grad_out.dtype, grad_out.strides) != (out.dtype, out.strides):
            of_outputs = write_record(problem, schedule, target)
        plan = plan_of(backward, schedule, target.lanes)
        records = driver.GradientRecords(record, of_outputs, plan)
        loops_of = partial(gradient_loops_of, schedule=schedule, lanes=target.lanes)
        return PreparedGradients(backward, schedule, plan, records, loops_of)

    def differentiate(self, backward: Backward, num_threads: int) -> Gradients:
        return self.prepare_gradients(backward, num_threads).run_on(backward)

    def function_reasons(self, name: str, call: Any) -> list[str]:
        if name == "linear_attention" and call.feature_map is not elu_plus_one:
            return ["it has no features but elu(x) + 1"]
        if name == "gated_linear_attention_backward":
            call = call.call
        if "linear_attention" in name and not all((call.out.size, *call.key.shape[-2:])):
            return ["a size is 0"]
        return []

    def rope(self, rotation: Rotation, num_threads: int | None) -> None:
        driver.rotate(*rotation, storage_of(rotation.out.dtype), self.limit_of_call(num_threads))

    def linear_attention(self, call: LinearCall, num_threads: int | None) -> LinearState | None:
        lead, (K, _, M), E = call.query.shape[:-3], call.key.shape[-3:], call.value.shape[-1]
        key, value, key_lead = call.key, call.value, lead
        if not call.causal and call.lengths is None and call.earlier is None:  # sums of keys that items share
            key, value = shared(key), shared(value)
            key_lead = np.broadcast_shapes(key.shape[:-3], value.shape[:-3])
        item_of_keys = state = None
        if key_lead != lead:
            item_of_keys = np.broadcast_to(
                np.arange(prod(key_lead), dtype=np.int64).reshape(key_lead), lead
            ).flatten()
        if call.return_state:
            state = LinearState(np.empty((*key_lead, K, M, E)), np.empty((*key_lead, K, M)))
        arrays = call.query, key, value, call.out, None, None
        driver.recurrent_attention(
            arrays,
            _storages(arrays, call.dtype),
            (lead, key_lead),
            item_of_keys,
            None if call.lengths is None else call.lengths.flatten(),
            None if call.earlier is None else broadcast(call.earlier, key_lead)[:2],
            None if state is None else state[:2],
            call.lost,
            (LEAST, MOST),
            True,
            call.causal,
            1.0,
            call.dtype.itemsize,
            self.limit_of_call(num_threads),
        )
        return state if state is None or key_lead == lead else broadcast(state, lead)

    def gated_linear_attention(self, call: RecurrentCall, num_threads: int | None) -> np.ndarray | None:
        arrays = call.query, call.key, call.value, call.out, call.decay, call.beta
        lead, state = call.query.shape[:-3], None
        if call.return_state:
            state = np.empty((*call.key.shape[:-2], call.key.shape[-1], call.value.shape[-1]), call.dtype)
        driver.recurrent_attention(
            arrays,
            _storages(arrays, call.dtype),
            (lead, lead),
            None,
            None if call.lengths is None else call.lengths.flatten(),
            None if call.earlier is None else (call.earlier, None),
            None if state is None else (state, None),
            None,
            None,
            False,
            True,
            call.scale,
            call.dtype.itemsize,
            self.limit_of_call(num_threads),
        )
        return state

    def gated_linear_attention_backward(
        self, backward: RecurrentBackward, num_threads: int | None
    ) -> RecurrentGradients:
        call, found = backward.call, backward.zeros()
        arrays = call.query, call.key, call.value, call.out, call.decay, call.beta
        driver.gated_linear_attention_backward(
            arrays,
            _storages(arrays, call.dtype),
            (call.query.shape[:-3],) * 2,
            None if call.lengths is None else call.lengths.flatten(),
            None if call.earlier is None else (call.earlier, None),
            backward.grad_state,
            tuple(found),
            call.scale,
            call.dtype.itemsize,
            self.limit_of_call(num_threads),
        )
        return found

    def causal_conv1d(self, call: ConvolutionCall, num_threads: int | None) -> None:
        C, W = call.weight.shape
        weight = np.empty((W + 1, -(-C // _LANES) * _LANES), call.weight.dtype)
        weight[:W, :C] = call.weight.T
        weight[W, :C] = -0.0 if call.bias is None else call.bias  # products of 0 keep their signs
        arrays = tuple(
            x.swapaxes(-1, -2) if call.along_channels else x for x in (call.x, call.out, call.earlier)
        )
        driver.causal_conv1d(
            arrays,
            call.x.shape[:-2],
            storage_of(call.x.dtype),
            weight,
            not call.along_channels,
            call.silu,
            self.limit_of_call(num_threads),
        )

    def reduce_scores(self, call: ReductionCall, num_threads: int | None) -> None:
        problem = call.problem
        target = Target(**driver.target(problem.dtype.itemsize))
        limit = self.thread_limit(host.threads_for(num_threads))
        schedule = make_reduction_schedule(problem, target, limit, call.keys.shape[-1])
        record = write_record(problem, schedule, target, index_rows=8 * schedule.max_lanes)
        driver.reduce_scores(record, problem.arrays(), call.keys, schedule.num_threads)

    def max_similarity(self, call: SimilarityCall, num_threads: int | None) -> None:
        scale = call.scale
        if scale is None:
            scale = np.broadcast_to(_ONE, call.document.shape)
        first = np.concatenate(([0], np.cumsum(call.query_lengths)))
        driver.max_similarity(
            call.query,
            call.document,
            scale,
            _storages((call.query, call.document), call.dtype),
            first,
            call.starts,
            call.lengths,
            call.out,
            call.dtype.itemsize,
            1 if call.work < SMALL_WORK else self.limit_of_call(num_threads)(),
        )

    def limit_of_call(self, num_threads: int | None) -> Callable[[], int]:
        """Asked where several threads may be faster: how many a call with this `num_threads` may have."""
        return lambda: self.thread_limit(host.threads_for(num_threads))


backend = CythonBackend()


def _storages(arrays: tuple[np.ndarray | None, ...], dtype: np.dtype) -> tuple[int, ...]:
    """How the numbers of each are stored, and whether their bytes are swapped."""
    return tuple(
        0 if x is None or x.dtype == dtype else _storage(x.dtype) | (0 if x.dtype.isnative else SWAPPED)
        for x in arrays
    )


def _storage(dtype: np.dtype) -> int:
    return INT8 if dtype == np.int8 else storage_of(dtype)


def available_isas(names: Sequence[str] = ISAS) -> list[str]:
    """Those of the instruction sets that were built and that this CPU runs, best first."""
    return [] if driver is None else list(driver.available_isas(names))


def isa() -> str | None:
    """The instruction set in use, or None without the extension."""
    return None if driver is None else str(driver.chosen_isa())


def vectors() -> str | None:
    """The instruction set of its kernels other than the fused ones."""
    return None if driver is None else str(driver.chosen_vectors())


def tile_operations(num_threads: int, steps: int) -> float:
    """FLOPs of float32 that so many threads do on the tile unit alone, in at least `steps` steps in all."""
    return float(driver.tile_operations(num_threads, steps))


@contextmanager
def use_isa(name: str) -> Iterator[None]:
    """For tests: other kernels for a while, in every thread."""
    before = driver.chosen_isa()
    driver.choose_isa(name)
    try:
        yield
    finally:
        driver.choose_isa(before)
