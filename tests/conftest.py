"""Fixtures: every usable backend, on every instruction set of this machine. And what the default run holds.

``pytest`` leaves out what is marked ``slow``; ``pytest -m slow`` runs that, and ``pytest -m ""`` both. Three
rules say what is run, and where:

* *Pairs.* Of a test's parameters the default run has every pair of values once at least, and not every
  combination: each dtype meets each option, each option each backend, and so on. The slow run has the pairs
  on each compiled backend. `uncovered` chooses.
* *One instruction set.* The default run uses the best of this machine. The slow run has the pairs on each of
  the others whose kernels the test reaches, see `kernels_of`. Files named by `EVERY_ISA` have all but the
  models of instructions by default: what is computed in every size.
* *By name.* What starts a compiler, builds the package or takes seconds carries the mark itself. Hypothesis
  draws few examples by default and many in the slow run: `drawn`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, wraps
from inspect import Parameter, signature
from itertools import combinations, compress, groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

import fastattn
from fastattn._api import rope
from fastattn._machine import constants
from fastattn.backends import registry
from tests.process import python

settings.register_profile(
    "fastattn",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("fastattn")
os.environ.setdefault("KERAS_BACKEND", "numpy")  # read when Keras is imported
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a script, and inherited
    signal.signal(signal.SIGINT, signal.default_int_handler)

BACKENDS = tuple(name for name in registry.MODULES if name != "cuda")
#: The pool "workqueue" is always there; those of TBB and OpenMP want a library.
NUMBA_POOLS = {"tbb": "tbbpool", "omp": "omppool", "workqueue": "workqueue"}


@dataclass(frozen=True)
class Engine:
    """A backend, and the instruction set it is to run on where it has a choice."""

    backend: str
    isa: str | None = None

    @property
    def name(self) -> str:
        return self.backend if self.isa is None else f"{self.backend}-{self.isa}"

    def attention(self, *arrays: Any, **options: Any) -> Any:
        return fastattn.attention(*arrays, backend=self.backend, **options)

    def everything(self, *arrays: Any, **options: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Output, lse and weights."""
        return self.attention(*arrays, return_lse=True, return_weights=True, **options)

    def backward(self, *arrays: Any, **options: Any) -> Any:
        return fastattn.attention_backward(*arrays, backend=self.backend, **options)

    def gradients(self, grad_out: Any, query: Any, key: Any, value: Any, **options: Any) -> Any:
        """With the out and the lse of the forward call."""
        shared = {name: x for name, x in options.items() if name not in ("wrt", "grad_lse")}
        out, lse = self.attention(query, key, value, return_lse=True, **shared)
        return self.backward(grad_out, query, key, value, out, lse, **options)

    def environment(self) -> dict[str, str]:
        """What makes another process use this backend and instruction set by default."""
        variables = {"FASTATTN_BACKEND": self.backend}
        return variables if self.isa is None else variables | {"FASTATTN_ISA": self.isa}


def _usable(backend: str) -> bool:
    try:
        fastattn.attention(np.ones((1, 1)), np.ones((1, 1)), np.ones((1, 1)), backend=backend)
    except fastattn.BackendError:
        return False
    return True


def _isas() -> list[str]:
    if not _usable("cython"):
        return []
    from fastattn.backends.cython import backend as cython_backend

    return cython_backend.available_isas((*constants.ISAS, *constants.MODEL_ISAS))


#: Tests are about small problems: the fused sweep computes all that its kernels can, also where the other is
#: faster. Other processes decide as users' do.
constants.FUSED_LEAST_GAIN = 0.0

USABLE = tuple(name for name in BACKENDS if _usable(name))
ISAS = tuple(_isas())
#: Numba compiles for one instruction set in a process: FASTATTN_ISA names another than the best.
ENGINES = (
    *(Engine("cython", isa) for isa in ISAS),
    *(Engine(name) for name in USABLE if name != "cython"),
)
#: Files whose tests run on every instruction set by default.
EVERY_ISA = ("test_forward.py",)
#: For what does not depend on the instruction set.
OF_ONE_ISA = tuple(it for it in ENGINES if it.isa in (None, *ISAS[:1]))
#: What NumPy computes: its own code meets all values in pairs of other engines.
NUMPY = (Engine("reference"), "reference", "numpy", None)
#: Files about kernels beside those of vectors, which say themselves what they run on.
OF_EXTENDED = ("test_fused.py", "test_pairs.py", "test_precision.py", "test_precision_backward.py")


def drawn(few: int, many: int, **strategies: SearchStrategy[Any]) -> Callable[..., Any]:
    """Has Hypothesis draw arguments of a test: `few` times by default, `many` times in the slow run."""

    def decorate(test: Callable[..., None]) -> pytest.MarkDecorator:
        @wraps(test)
        def drawing(*bound: Any, examples: int, **fixtures: Any) -> None:
            @settings(max_examples=examples)
            @given(**strategies)
            def one(**values: Any) -> None:
                test(*bound, **fixtures, **values)

            one()

        own = signature(test)
        others = [it for name, it in own.parameters.items() if name not in strategies]
        number = Parameter("examples", Parameter.KEYWORD_ONLY)
        drawing.__signature__ = own.replace(parameters=[*others, number])  # type: ignore[attr-defined]
        both = [few, pytest.param(many, marks=pytest.mark.slow)]
        return pytest.mark.parametrize("examples", both)(drawing)

    return decorate


def on(engines: Iterable[Any]) -> pytest.MarkDecorator:
    """Has a test run on these engines alone. What the others refuse is for one test to show.

    The `engines` of a file are those of all its tests, and `pytest_generate_tests` takes them.
    """
    return pytest.mark.engines.with_args([*engines])


def without(is_nothing: Callable[..., bool]) -> pytest.MarkDecorator:
    """Leaves out combinations of parameters that mean nothing: a function of some of them, by their names."""
    return pytest.mark.without.with_args(is_nothing)


#: For tests of a process of its own, whose imports take seconds.
quick_on_cython = pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=pytest.mark.slow if name != "cython" else ()) for name in USABLE],
    indirect=True,
)
#: For tests that take the reference seconds, and the compiled backends none.
reference_is_slow = on(
    pytest.param(it, marks=pytest.mark.slow if it.backend == "reference" else ()) for it in ENGINES
)
#: For what is promised of compiled kernels: a row's sums do not depend on other rows, for one.
on_compiled = on(it for it in ENGINES if it.backend != "reference")
#: The same, where Numba's first call of each specialisation takes most of the time.
numba_is_slow = on(
    pytest.param(it, marks=pytest.mark.slow if it.backend == "numba" else ())
    for it in ENGINES
    if it.backend != "reference"
)
on_cython = on(it for it in ENGINES if it.backend == "cython")
#: Numba reads neither 16 bits nor pages: `test_backends_that_read_none_say_so`, in two files.
READS_STORAGE = tuple(it for it in ENGINES if it.backend != "numba")
#: The same by backends, for `backend`.
on_compiled_backends, on_storage_backends = (
    pytest.mark.parametrize("backend", [name for name in USABLE if name != other], indirect=True)
    for other in ("reference", "numba")
)


def _computes_gradients(engine: Engine) -> bool:
    try:
        engine.backward(*np.ones((5, 1, 1)), np.ones(1))
    except Exception as error:  # any other is for the tests to show
        return "it computes no gradients" not in str(error)
    return True


#: For tests of gradients. `test_backward.py` has one that the other backends say why they compute none.
computes_gradients = on(it for it in ENGINES if _computes_gradients(it))


#: For tests of gradients, whose two types run the same code: float64 in the slow run alone.
FLOAT32_FIRST = ["float32", pytest.param("float64", marks=pytest.mark.slow)]


def pytest_report_header() -> list[str]:
    absent = [name for name in BACKENDS if name not in USABLE]
    return [
        f"backends: {', '.join(USABLE)}" + (f" (not usable: {', '.join(absent)})" if absent else ""),
        f"instruction sets: {', '.join(ISAS) or 'none'}",
    ]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was skipped: a line for each reason, however many tests have it."""
    skipped = terminalreporter.getreports("skipped")
    counts = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in counts.most_common():
        terminalreporter.write_line(f"SKIPPED [{count}] {reason}")


def uncovered(combined: Iterable[Iterable[Hashable]]) -> Iterator[bool]:
    """For each combination of parameters in turn, whether it has two values together that none had before.

    Those that have hold every such pair. One parameter alone is taken as a whole.
    """
    seen: set[Hashable] = set()
    for parameters in combined:
        values = list(enumerate(parameters))
        parts = {*combinations(values, min(2, len(values)))}
        yield not parts <= seen
        seen |= parts


def parameters_of(item: pytest.Function) -> list[list[str]]:
    """The names that one decorator lists are one parameter. All items of a test have the same."""
    together = [mark.args[0] for mark in item.iter_markers("parametrize")]
    together = [names.replace(",", " ").split() if isinstance(names, str) else names for names in together]
    alone = [[name] for name in item.callspec.params if not any(name in names for names in together)]
    return [*alone, *together]


def values_of(item: pytest.Function, parameters: list[list[str]]) -> list[Hashable]:
    """The same object in two combinations is the same value."""
    params = item.callspec.params
    return [tuple([id(params[name]) for name in names]) for names in parameters]


def means_nothing(item: pytest.Function, mark: pytest.Mark) -> bool:
    is_nothing = mark.args[0]
    return is_nothing(*(item.callspec.params[name] for name in signature(is_nothing).parameters))


def name_of_test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def engine_of(item: pytest.Function) -> Any:
    """What the test is about: a backend and its instruction set, or a way."""
    params = item.callspec.params
    return next((params[name] for name in ("engine", "way", "backend") if name in params), None)


def isa_of(item: pytest.Function) -> str:
    """The best of this machine, for what has none of its own."""
    engine = engine_of(item)
    own = engine.isa if isinstance(engine, Engine) else engine
    is_apart = item.path.name not in EVERY_ISA or own in constants.MODEL_ISAS
    return own if own in ISAS and is_apart else ISAS[0] if ISAS else ""


def kernels_of(isa: str, item: pytest.Function) -> str:
    """The instruction set whose kernels a test reaches on `isa`.

    One with kernels beside those of vectors has fused ones for scores of float32, or those of pairs for
    bfloat16. Anything else it computes as its vectors do, which need not be tested twice.
    """
    own = constants.EXTENDED.get(isa)
    if own is None or item.path.name in OF_EXTENDED:
        return isa
    is_reached = "bfloat16" in item.name if own["source"] == "pairs.c" else "float64" not in item.name
    return isa if is_reached else own["vectors"]


def has_own_kernels(item: pytest.Function) -> bool:
    isa = isa_of(item)
    return isa == next((it for it in ISAS if kernels_of(it, item) == kernels_of(isa, item)), "")


def chosen(of_one_test: list[pytest.Function]) -> set[pytest.Function]:
    """By the rules above, those that are run at all; and marks which of them are slow."""
    parameters = parameters_of(of_one_test[0])

    def new(items: list[pytest.Function]) -> Iterator[pytest.Function]:
        return compress(items, uncovered(values_of(item, parameters) for item in items))

    own = [item for item in of_one_test if has_own_kernels(item)]
    quick = [it for it in own if isa_of(it) in ("", *ISAS[:1]) and not it.get_closest_marker("slow")]
    default = {*new(quick)}
    apart: dict[Any, list[pytest.Function]] = {None: []}
    for item in sorted(own, key=lambda item: item not in default):
        if isa_of(item) in ("", *ISAS[:1]):
            apart[None].append(item)  # with the values that are slow
        if engine_of(item) not in NUMPY:
            apart.setdefault(engine_of(item), []).append(item)
    kept = {it for items in apart.values() for it in new(items)}
    for item in kept - default:
        item.add_marker(pytest.mark.slow)
    return kept


def engines_for(metafunc: pytest.Metafunc) -> list[Any]:
    """Those that a test is made for: the default run makes none of what it would leave out."""
    mark = metafunc.definition.get_closest_marker("engines")
    engines = getattr(metafunc.module, "engines", ENGINES)
    if metafunc.config.option.markexpr == "not slow":
        others = () if metafunc.definition.path.name in EVERY_ISA else constants.ISAS
        engines = [it for it in engines if it in OF_ONE_ISA or it.isa not in (*others, *constants.MODEL_ISAS)]
    return [it for it in (mark.args[0] if mark else engines) if getattr(it, "values", [it])[0] in engines]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.path.parent != Path(__file__).parent:
        return
    chosen_elsewhere = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "engine" in metafunc.fixturenames and "engine" not in chosen_elsewhere:
        metafunc.parametrize("engine", engines_for(metafunc), ids=lambda engine: engine.name, indirect=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Some tests take minutes: a process without work takes over tests that wait behind one of these."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # what is slow is deselected by pytest's own hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ordered: list[pytest.Item] = []
    for _, group in groupby(items, key=name_of_test):
        of_one_test = list(group)
        for mark in of_one_test[0].iter_markers("without"):
            of_one_test = [item for item in of_one_test if not means_nothing(item, mark)]
        if here in of_one_test[0].path.parents and hasattr(of_one_test[0], "callspec"):
            kept = chosen(of_one_test)
            of_one_test = engines_together(item for item in of_one_test if item in kept)
        ordered += of_one_test
    items[:] = ordered


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """No garbage is looked for among the tests, which are many objects: it takes seconds each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def engines_together(of_one_test: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The engines of a case one after another: a worker has its answer already, by `tests.cases.solve`."""
    places: dict[Hashable, int] = {}

    def place(item: pytest.Item) -> int:
        params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        for name in ("engine", "way"):
            params.pop(name, None)
        return places.setdefault(tuple((name, id(value)) for name, value in params.items()), len(places))

    return sorted(of_one_test, key=place)


@pytest.fixture(scope="session", autouse=True)
def products_in_one_thread() -> Iterator[None]:
    """NumPy's own products here, not in other processes: its threads wait for the next one by spinning, which
    takes longer than the products of most tests, on the cores of the other workers."""
    try:
        import threadpoolctl
    except ImportError:
        yield
        return
    with threads_of_products(threadpoolctl, 1):
        yield


def threads_of_products(threadpoolctl: Any, limit: int) -> Any:
    """The limit on NumPy's products alone: one on "blas" would be one on fastattn, too."""
    return (
        threadpoolctl.ThreadpoolController()
        .select(internal_api=["openblas", "mkl", "blis"])
        .limit(limits=limit)
    )


@pytest.fixture(params=USABLE)
def backend(request: pytest.FixtureRequest) -> Engine:
    """Every usable backend, on the instruction set it chose for itself."""
    return Engine(request.param)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Every backend on every instruction set that the test is for."""
    chosen: Engine = request.param
    if chosen.isa is None:
        context: Any = nullcontext()
    else:
        from fastattn.backends.cython import backend as cython_backend

        context = cython_backend.use_isa(chosen.isa)
    with context:
        yield chosen


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions beside `attention` are those of NumPy."""
    monkeypatch.setattr(registry, "PREFERRED", ("reference",))
    monkeypatch.setattr(rope, "_rope_at_once", None)


@pytest.fixture(params=[*(isa for isa in ISAS if isa not in constants.EXTENDED), "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of functions beside `attention`: each instruction set, and the way without the compiled extension."""
    if request.param == "numpy":
        without_kernels(monkeypatch)
        context: Any = nullcontext()
    else:
        from fastattn.backends.cython import backend as cython_backend

        context = cython_backend.use_isa(request.param)
    with context:
        yield request.param


@pytest.fixture
def compiled() -> None:
    """These tests look at the pool of the compiled backend."""
    from fastattn.backends.cython import backend as cython_backend

    reasons = cython_backend.backend.unavailable_reasons()
    if reasons:
        pytest.skip(f"cython is not usable here: {reasons}")


@pytest.fixture(
    params=[pytest.param(it, marks=pytest.mark.slow if it != "workqueue" else ()) for it in NUMBA_POOLS]
)
def pool_environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """What has a process use one of Numba's thread pools, with four threads on any number of cores."""
    # Where pip puts TBB.
    libraries = os.pathsep.join([f"{sys.prefix}/lib", os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(
        os.pathsep
    )
    variables = {
        "NUMBA_THREADING_LAYER": request.param,
        "NUMBA_NUM_THREADS": "4",
        "FASTATTN_NUM_THREADS": "4",
        "FASTATTN_BACKEND": "numba",
        "LD_LIBRARY_PATH": libraries,
    }
    if request.param not in pools_that_load(variables["LD_LIBRARY_PATH"]):
        pytest.skip(f"{request.param} is not installed")
    return variables


@lru_cache(maxsize=1)
def pools_that_load(libraries: str) -> list[str]:
    code = f"""
import importlib
for name, module in {NUMBA_POOLS}.items():
    try:
        importlib.import_module(f"numba.np.ufunc.{{module}}")
        print(name)
    except ImportError:
        pass
"""
    return python(code, env={"LD_LIBRARY_PATH": libraries}).split()
