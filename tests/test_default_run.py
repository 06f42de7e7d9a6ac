"""The default run has every pair of parameters' values, the slow one every triple: ``tests/conftest.py``."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest

from tests.conftest import ISAS, Engine, uncovered, values_of


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("counts", [(2, 3, 1), (3, 7, 2), (3, 4, 10, 2), (1, 5, 1, 2, 3)], ids=str)
def test_every_pair_and_triple_is_held(counts, size):
    def parts(chosen):
        return {part for values in chosen for part in combinations(enumerate(values), size)}

    every = list(product(*map(range, counts)))
    held = [values for values, new in zip(every, uncovered(every, size), strict=True) if new]
    assert parts(held) == parts(every)
    assert prod(sorted(counts)[-size:]) <= len(held) <= sum(map(prod, combinations(counts, size)))
    assert len(held) < len(every) or sum(n > 1 for n in counts) <= size


@pytest.mark.parametrize("size", [2, 3])
def test_one_parameter_alone_is_whole(size):
    assert list(uncovered([["a"], ["b"], ["c"]], size)) == [True] * 3


@pytest.mark.parametrize("third", [1, 2])
@pytest.mark.parametrize(("first", "second"), [(1, 2), (1, 3), (2, 2), (2, 3)])
def test_what_one_decorator_lists_is_one_parameter(request, first, second, third):
    assert len(values_of(request.node)) == 2


def test_the_best_instruction_set_and_no_other(request, engine):
    assert isinstance(engine, Engine)
    slow = request.node.get_closest_marker("slow") is not None
    assert slow == (engine.isa is not None and engine.isa != ISAS[0])
