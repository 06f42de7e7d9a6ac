"""The default run has every pair of parameters' values, the slow one for each engine: `tests.conftest`."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest

from tests.conftest import ISAS, Engine, parameters_of, uncovered, values_of


@pytest.mark.parametrize("counts", [(2, 3, 1), (3, 7, 2), (3, 4, 10, 2), (1, 5, 1, 2, 3)], ids=str)
def test_every_pair_is_held(counts):
    def pairs(chosen):
        return {pair for values in chosen for pair in combinations(enumerate(values), 2)}

    every = list(product(*map(range, counts)))
    held = [values for values, new in zip(every, uncovered(every), strict=True) if new]
    assert pairs(held) == pairs(every)
    assert prod(sorted(counts)[-2:]) <= len(held) <= sum(map(prod, combinations(counts, 2)))
    assert len(held) < len(every) or sum(n > 1 for n in counts) <= 2


def test_one_parameter_alone_is_whole():
    assert list(uncovered([["a"], ["b"], ["c"]])) == [True] * 3


@pytest.mark.parametrize("third", [1, 2])
@pytest.mark.parametrize(("first", "second"), [(1, 2), (1, 3), (2, 2), (2, 3)])
def test_what_one_decorator_lists_is_one_parameter(request, first, second, third):
    assert len(values_of(request.node, parameters_of(request.node))) == 2


def test_the_best_instruction_set_and_no_other(request, engine):
    assert isinstance(engine, Engine)
    slow = request.node.get_closest_marker("slow") is not None
    assert slow == (engine.isa is not None and engine.isa != ISAS[0])
