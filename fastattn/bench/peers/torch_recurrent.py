"""Gated linear attention in PyTorch, which has no operator for it: the formula, a chunk of tokens at a time.

It is run as it stands, and compiled by ``torch.compile``. Compiling takes a C++ compiler and some seconds for
each case; it is not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from fastattn.bench.case import Case

#: Tokens of a chunk.
CHUNK = 64

#: From query, key, value, decay, beta and state ``(B, heads, length, ...)`` the output and the state after.
Advance = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def advance(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor | None,
    beta: torch.Tensor | None,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk, or one token.

    Decays become factors of queries and keys, which is the cheapest form. Their sums in a chunk must be in
    the range of exp, as those of the cases are.
    """
    query = query * query.shape[-1] ** -0.5
    asking, added, up = key, value, None
    if decay is not None:
        sums = decay.cumsum(-2)
        up = sums.exp()
        query, asking, key = query * up, key * up, key * (-sums).exp()
    if beta is not None:
        added = beta * (added - asking @ state)
        if added.shape[-2] > 1:
            system = (beta * (asking @ key.mT)).tril(-1)
            added = torch.linalg.solve_triangular(system, added, upper=False, unitriangular=True)
    out = query @ state + (query @ key.mT).tril() @ added
    state = state + key.mT @ added
    return out, state if up is None else state * up[..., -1, :, None]


@lru_cache(maxsize=1)
def compiled(case: Case) -> Advance:
    """`advance` for the shapes of a case, all its copies of the inputs, and of no case before."""
    torch.compiler.reset()
    made: Advance = torch.compile(advance, dynamic=False)
    return made


def attend(
    step: Advance,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor | None,
    beta: torch.Tensor | None,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and state after of all tokens."""
    out = []
    for start in range(0, query.shape[2], CHUNK):
        rows = slice(start, start + CHUNK)
        given = (it if it is None else it[:, :, rows] for it in (query, key, value, decay, beta))
        part, state = step(*given, state)
        out.append(part)
    return torch.cat(out, dim=2), state
