"""Prepared calls of `attention_backward`, kept beside those of `fastattn._api.prepared` and looked up alike.

Gradients of query, key and value have them, in calls without a bias object or a function. What depends on
numbers in arrays is done at each call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastattn._api.prepared import (
    GRADIENTS,
    KeptCall,
    is_same,
    keep_call,
    known,
    reads_as_given,
    signature_of,
    use_arrays,
)
from fastattn._call.gradients import ROWS, Gradients, as_given

if TYPE_CHECKING:
    from fastattn._call.gradients import Backward
    from fastattn.backends._base import Backend, PreparedGradients


def signature_of_gradients(arrays: tuple[Any, ...], outputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What two calls with the same preparation have in common, or None. `arrays` are query, key and value,
    `outputs` the gradient of the outputs, the outputs and their lse. Options become arrays where they can."""
    use_arrays(options)
    wrt = options["wrt"]
    if type(wrt) not in (tuple, list) or not all(type(name) is str and name in ROWS for name in wrt):
        return None
    query, key, value = arrays
    others = *outputs, options["grad_lse"]
    return signature_of(GRADIENTS, query, key, value, options, ("wrt", *wrt), others=others)


def reuse(
    signature: Any, arrays: tuple[Any, ...], outputs: tuple[Any, ...], options: dict[str, Any]
) -> Gradients | None:
    """The gradients of a call whose signature is known; None where it must be normalized."""
    call = known(signature) if signature else None
    return None if call is None else call(arrays, outputs, options)


def keep_gradients(
    signature: Any,
    backward: Backward,
    given: dict[str, Any],
    backend: Backend,
    prepared: PreparedGradients,
    threads: int,
) -> None:
    """Keeps what was prepared for so many threads, if other calls of this signature could use it: if it reads
    the memory of what is `given`."""
    problem = backward.problem
    pairs = [
        (given["grad_out"], backward.grad_out), (given["out"], problem.out), (given["lse"], backward.lse),
        (given["grad_lse"], backward.grad_lse),
    ]  # fmt: skip
    inputs = given["query"], given["key"], given["value"]
    if all(is_same(*pair) for pair in pairs) and reads_as_given(problem, inputs, given):

        def make() -> PreparedBackward | None:
            call = PreparedBackward(problem, given, backend, prepared.is_small)
            return None if call.forgets_mask(given) else call

        keep_call(signature, make, 1 if prepared.is_small else threads, prepared)


class PreparedBackward(KeptCall):
    """A call for gradients of which only the arrays are missing."""

    __slots__ = ()

    def __call__(
        self, arrays: tuple[Any, ...], outputs: tuple[Any, ...], options: dict[str, Any]
    ) -> Gradients | None:
        """The gradients; None where this call must go through `fastattn._call.normalize` after all."""
        prepared = self._prepared()
        lengths, are_right = self._lengths(options["key_lengths"])
        if prepared is None or not are_right:
            return None
        bias, mask = self._masks(options)
        query, key, value = arrays
        grad_out, out, lse = outputs
        read = self._held._replace(
            query=query, key=key, value=value, out=grad_out, bias=bias, dense=mask, key_lengths=lengths,
            sinks=options["sinks"], drop_key=self._drop_key(options),
        )  # fmt: skip
        found = prepared.run(read, out, lse, options["grad_lse"])
        swapped = options["layout"] == "bshd"
        of_query, of_key, of_value = (
            None if gradient is None else as_given(gradient, array, swapped)
            for gradient, array in zip(found[:3], arrays, strict=True)
        )
        return Gradients(of_query, of_key, of_value, None, None)
