"""The options of the public functions, each stated once.

`OPTIONS` has for each its default, how the signature of a call holds it, and which functions take it. The
signatures that `help` shows, the defaults, what is refused, and the keys of prepared calls follow from it, in
Python and in C. The types are for checkers and editors: what a function returns depends on its options, so
each is declared by overloads that share them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from fastattn._machine.threads import no_fork

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Generic, Literal, TypeAlias, TypedDict

    import numpy as np
    from numpy.typing import ArrayLike

    from fastattn._call.storage import Paged, Quantized
    from fastattn.biases import Bias
    from fastattn.masks import Mask
    from fastattn.masks.objects import Align

    BackendName: TypeAlias = Literal["cython", "numba", "reference", "cuda"]
    CausalRule: TypeAlias = bool | Align
    BiasLike: TypeAlias = ArrayLike | Bias | tuple[ArrayLike | Bias, ...]
    RowsLike: TypeAlias = ArrayLike | Quantized | Paged  # keys or values
    LayoutName: TypeAlias = Literal["bhsd", "bshd"]
    PrecisionName: TypeAlias = Literal["exact", "storage"]
    WindowBounds: TypeAlias = tuple[int | None, int | None]
    Yes: TypeAlias = Literal[True]
    No: TypeAlias = Literal[False]
    Mean: TypeAlias = Literal["mean"]
    Pair: TypeAlias = tuple[np.ndarray, np.ndarray]
    Triple: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
    Flag = TypeVar("Flag", bound=bool)  #: `Yes`, `No`, or `bool` where a checker does not know
    Lse = TypeVar("Lse", bound=bool)  #: the same of `return_lse`
    Weights = TypeVar("Weights", bound=bool | Mean)  #: the same of `return_weights`

    class _ScoreOptions(TypedDict, total=False):
        bias: BiasLike | None
        window: WindowBounds | None
        scale: float | ArrayLike | None
        softcap: float | None
        sinks: ArrayLike | None
        num_threads: int | None
        backend: BackendName | None

    class _WeightOptions(_ScoreOptions, total=False):
        mask: Mask | ArrayLike | None
        precision: PrecisionName
        dropout: float
        seed: int | None

    class AttentionOptions(_WeightOptions, Generic[Lse, Weights], total=False):
        causal: CausalRule
        key_lengths: ArrayLike | None
        layout: LayoutName
        out: np.ndarray | None
        return_lse: Lse
        return_weights: Weights

    class VarlenBackwardOptions(_WeightOptions, total=False):
        causal: CausalRule
        grad_lse: ArrayLike | None

    class BackwardOptions(VarlenBackwardOptions, total=False):
        key_lengths: ArrayLike | None
        layout: LayoutName

    class FlexBackwardOptions(BackwardOptions, total=False):
        score_mod: Callable[..., object] | None
        score_grad: Callable[..., object] | None
        mask_mod: Callable[..., object] | None
        block_mask: Mask | None
        aux: Sequence[ArrayLike]

    class ReductionOptions(_ScoreOptions, total=False):
        mask: Mask | ArrayLike | None
        causal: CausalRule
        key_lengths: ArrayLike | None
        layout: LayoutName

    class LayerOptions(_WeightOptions, Generic[Lse, Weights], total=False):
        causal: CausalRule | None
        key_lengths: ArrayLike | None
        out: np.ndarray | None
        return_lse: Lse
        return_weights: Weights

    class FlexOptions(_WeightOptions, Generic[Lse, Weights], total=False):
        score_mod: Callable[..., object] | None
        mask_mod: Callable[..., object] | None
        block_mask: Mask | None
        aux: Sequence[ArrayLike]
        causal: CausalRule
        key_lengths: ArrayLike | None
        layout: LayoutName
        out: np.ndarray | None
        return_lse: Lse
        return_weights: Weights

    class VarlenOptions(_WeightOptions, Generic[Lse, Weights], total=False):
        causal: CausalRule
        out: np.ndarray | None
        return_lse: Lse
        return_weights: Weights

    class AttendOptions(_ScoreOptions, Generic[Lse, Weights], total=False):
        mask: Mask | ArrayLike | None
        precision: PrecisionName
        causal: Literal[True, False, "bottom_right"]
        out: np.ndarray | None
        return_lse: Lse
        return_weights: Weights

    class StepOptions(AttendOptions[Lse, Weights], Generic[Lse, Weights], total=False):
        lengths: ArrayLike | None


Function = TypeVar("Function", bound=Callable[..., Any])

#: How the signature of a call holds an option. A call with a value of another kind has no signature.
PARTS = (
    NEVER,  # not at all: what it decides is in the signature otherwise, or its calls are not prepared
    ARRAY,  # dtype, shape and strides of an array, or None
    MASK,  # the same, or a mask object as itself
    LENGTHS,  # dtype and shape of an array, or None: its numbers are looked at in each call
    REAL,  # a float, or None
    COUNT,  # an int from 0 on, or None
    SEED,  # whether there is an int below 2**128, or None: its value is read in each call
    BOUNDS,  # a pair of those
    CHOICE,  # one of a few
) = ("never", "array", "mask", "lengths", "real", "count", "seed", "bounds", "choice")


class Option(NamedTuple):
    name: str
    default: Any
    part: str  #: of the signature
    takers: str  #: the functions that take it, by the letters of `TAKERS`
    choices: tuple[Any, ...] = ()  #: those that the signature knows


OPTIONS = (
    Option("score_mod", None, NEVER, "FG"),
    Option("score_grad", None, NEVER, "G"),
    Option("mask_mod", None, NEVER, "FG"),
    Option("block_mask", None, NEVER, "FG"),
    Option("aux", (), NEVER, "FG"),
    Option("grad_lse", None, NEVER, "BGW"),
    Option("mask", None, MASK, "ABCFGLRVW"),
    Option("bias", None, ARRAY, "ABCFGLRVW"),
    Option("causal", False, CHOICE, "ABCFGLRVW", (False, True, "top_left", "bottom_right")),
    Option("window", None, BOUNDS, "ABCFGLRVW"),
    Option("key_lengths", None, LENGTHS, "ABFGLR"),
    Option("scale", None, REAL, "ABCFGLRVW"),
    Option("softcap", None, REAL, "ABCFGLRVW"),
    Option("sinks", None, ARRAY, "ABCFGLRVW"),
    Option("precision", "exact", CHOICE, "ABCFGLVW", ("exact", "storage")),
    Option("layout", "bhsd", CHOICE, "ABFGR", ("bhsd", "bshd")),
    Option("dropout", 0.0, REAL, "ABFGLVW"),
    Option("seed", None, SEED, "ABFGLVW"),
    Option("wrt", ("query", "key", "value"), NEVER, "BGW"),
    Option("out", None, ARRAY, "ACFLV"),
    Option("return_lse", False, CHOICE, "ACFLV", (False, True)),
    Option("return_weights", False, CHOICE, "ACFLV", (False, True, "mean")),
    Option("num_threads", None, COUNT, "ABCFGLRVW"),
    Option("backend", None, CHOICE, "ABCFGLRVW", (None, "cython", "numba")),  # the others prepare no calls
)

DEFAULTS = {option.name: option.default for option in OPTIONS}

#: The options of each function, with their defaults: `attention`, `attention_backward`, `KVCache.attend`,
#: `flex_attention`, `flex_attention_backward`, `MultiHeadAttention`, `reduce_scores` and `key_weights`,
#: `varlen_attention`, and `varlen_attention_backward`; none of others.
TAKERS = {letter: {o.name: o.default for o in OPTIONS if letter in o.takers} for letter in " ABCFGLRVW"}
TAKERS["C"]["causal"], TAKERS["L"]["causal"] = True, None


#: Stands for an argument that is not given, and is no array.
MISSING: Any = type("nothing", (), {})()


def public(taker: str = " ") -> Callable[[Function], Function]:
    """Has `help` show a function with the options of `TAKERS`. The function takes them by ``**options``, and
    ``*extra``, in order to refuse others with more than Python would say: these are not shown. The default of
    an argument that is needed is `MISSING`, as Python would complain of it before it looks at the others."""

    def show(function: Function) -> Function:
        own, kind = inspect.signature(function), inspect.Parameter
        variable = (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)
        given = [
            MISSING if p.default is kind.empty else p.default
            for name, p in own.parameters.items()
            if p.kind is kind.POSITIONAL_OR_KEYWORD and name != "self"
        ]
        function.__defaults__ = tuple(given)
        shown = {name: p for name, p in own.parameters.items() if p.kind not in variable}
        for name, default in TAKERS[taker].items():
            annotation = function.__annotations__.get(name, kind.empty)
            shown[name] = kind(name, kind.KEYWORD_ONLY, default=default, annotation=annotation)
        function.__signature__ = own.replace(parameters=list(shown.values()))  # type: ignore[attr-defined]
        return function

    return show


def complete(
    taker: str, function: Callable[..., Any], given: Mapping[str, Any], extra: tuple[Any, ...] = ()
) -> dict[str, Any]:
    """The options of a call, those not given with their defaults.

    TypeError for options that the function does not have, and for `extra`, what it was given by position.
    """
    options = {**TAKERS[taker], **given}
    if extra or len(options) > len(TAKERS[taker]):
        refuse_arguments(function, extra, [name for name in given if name not in TAKERS[taker]])
    return options


def refuse_arguments(
    function: Callable[..., Any], extra: tuple[Any, ...], unknown: Iterable[str]
) -> NoReturn:
    """Raises on arguments that a public function does not have."""
    with no_fork:
        from fastattn._call.hints import refusal  # what only a message needs is no part of an import

    raise TypeError(refusal(function, extra, unknown)) from None


def refusing(function: Function) -> Function:
    """The function, which says what to write instead where it is given arguments that it does not have.

    Each call takes 0.1 us longer. Functions with calls of a few us take ``**unknown`` themselves, and hand
    it to `refuse_arguments`. One that hands ``**options`` on to another leaves their names to that.
    """

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except TypeError:
            parameters = inspect.signature(function).parameters
            kinds = [p.kind for p in parameters.values()]
            n_places = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
            takes_any = inspect.Parameter.VAR_KEYWORD in kinds
            unknown = {} if takes_any else {n: value for n, value in options.items() if n not in parameters}
            if unknown or len(args) > n_places:
                refuse_arguments(function, args[n_places:], unknown)
            raise

    return call  # type: ignore[return-value]
