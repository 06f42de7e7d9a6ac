"""The named cases: what is computed, where it comes from, how many FLOPs it has, what we want of it.

Letters: ``B`` batch, ``H`` query heads, ``K`` key/value heads, ``L`` query length, ``S`` key length,
``D`` head_dim, ``E`` value head_dim.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Bool masks of the kind "padding" leave this share of the keys (a batch padded to its longest text).
PADDING_KEPT = 0.75


@dataclass(frozen=True, slots=True)
class Targets:
    """What the project wants of a case; None where it asks for nothing."""

    best: float | None = None  #: time of the fastest right peer over ours, at least
    torch: float | None = None  #: time of torch over ours, at least
    peak: float | None = None  #: share of the machine's FMA peak, at least
    peak_avx2: float | None = None  #: the same for ``fastattn-avx2``
    slowdown: float | None = None  #: our time over our time of the case's baseline, at most


@dataclass(frozen=True, slots=True)
class Case:
    """One attention call with a name.

    ``layout`` "bshd" stores ``(B, L, H, D)``. ``rank`` 3 drops the batch axis. ``window`` and
    ``document_length`` are passed to peers as a bool mask, because none of them can say it otherwise.
    """

    name: str
    group: str
    origin: str
    batch: int
    heads: int
    kv_heads: int
    len_q: int
    len_k: int
    head_dim: int
    value_dim: int
    dtype: str = "float32"
    causal: bool = False
    mask: str | None = None  #: None, "random" (L, S) or "padding" (B, 1, 1, S)
    bias: str | None = None  #: None, "shared" (L, S) or "per_head" (H, L, S)
    window: tuple[int, int] | None = None
    document_length: int | None = None
    layout: str = "bhsd"
    rank: int = 4
    threads: int | None = None  #: run with so many threads, whatever the run's count is
    cold: bool = False  #: inputs come from memory at each call, not from the caches
    quick: bool = False  #: part of ``--quick``
    baseline: str | None = None  #: our time is also given over our time of this case
    targets: Targets = Targets()

    @property
    def shape(self) -> str:
        """``B,H[/K],L,S,D[/E]``, as the tables print it."""
        heads = f"{self.heads}/{self.kv_heads}" if self.kv_heads != self.heads else f"{self.heads}"
        dims = f"{self.head_dim}/{self.value_dim}" if self.value_dim != self.head_dim else f"{self.head_dim}"
        return f"{self.batch},{heads},{self.len_q},{self.len_k},{dims}"

    @property
    def scores(self) -> float:
        """Scores that have to be computed, per head and batch item.

        L·S; half of it for causal, as the field counts it; the allowed pairs for windows and documents.
        Bool masks and biases count in full.
        """
        if self.window is not None:
            left, right = self.window
            rows = np.arange(self.len_q)
            start = np.maximum(rows - left, 0)
            stop = np.minimum(rows + right + 1, self.len_k)
            return float(np.maximum(stop - start, 0).sum())
        if self.document_length is not None:
            whole, rest = divmod(self.len_k, self.document_length)
            return float(whole * self.document_length**2 + rest**2)
        return self.len_q * self.len_k / (2 if self.causal else 1)

    @property
    def flops(self) -> float:
        """Two per multiply-add of the two products: ``2 · B · H · scores · (D + E)``."""
        return 2.0 * self.batch * self.heads * self.scores * (self.head_dim + self.value_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs and the output, each once: the least that moves where nothing is in a cache."""
        rows_q, rows_k = self.batch * self.heads * self.len_q, self.batch * self.kv_heads * self.len_k
        numbers = (rows_q + rows_k) * (self.head_dim + self.value_dim)
        if self.bias is not None:
            numbers += self.len_q * self.len_k * (self.heads if self.bias == "per_head" else 1)
        bools = {"random": self.len_q * self.len_k, "padding": self.batch * self.len_k, None: 0}[self.mask]
        return numbers * np.dtype(self.dtype).itemsize + bools

    @property
    def options(self) -> str:
        """The options in a few words, as the tables print them."""
        words = [self.dtype] if self.dtype != "float32" else []
        words += ["causal"] if self.causal else []
        words += [f"{self.mask} mask"] if self.mask else []
        words += [f"bias {self.bias}"] if self.bias else []
        words += [f"window {self.window}"] if self.window else []
        words += [f"documents of {self.document_length}"] if self.document_length else []
        words += [self.layout] if self.layout != "bhsd" else []
        words += [f"rank {self.rank}"] if self.rank != 4 else []
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arrays of a case; the same in every process."""

    query: np.ndarray  #: in the layout and rank of the case, C-contiguous
    key: np.ndarray
    value: np.ndarray
    allowed: np.ndarray | None  #: bool, True = may attend; the case's mask, window or documents; not causal
    bias: np.ndarray | None

    def bhsd(self, case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Views of query, key and value as ``(B, heads, length, dim)``, whatever the case's layout."""
        arrays = (self.query, self.key, self.value)
        if case.rank == 3:
            return tuple(array[None] for array in arrays)  # type: ignore[return-value]
        if case.layout == "bshd":
            return tuple(array.transpose(0, 2, 1, 3) for array in arrays)  # type: ignore[return-value]
        return arrays


def document_ids(case: Case) -> np.ndarray:
    """The document each position belongs to; all to one where the case is not packed."""
    return np.arange(case.len_k) // (case.document_length or case.len_k)


def make_inputs(case: Case) -> Inputs:
    """Standard normal inputs from a seed that depends on the case's name alone."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    dtype: Any = np.dtype(case.dtype).type

    def normal(heads: int, length: int, dim: int) -> np.ndarray:
        if case.layout == "bshd":
            shape: tuple[int, ...] = (case.batch, length, heads, dim)
        else:
            shape = (case.batch, heads, length, dim)
        return rng.standard_normal(shape[4 - case.rank :], dtype=dtype)

    query = normal(case.heads, case.len_q, case.head_dim)
    key = normal(case.kv_heads, case.len_k, case.head_dim)
    value = normal(case.kv_heads, case.len_k, case.value_dim)

    allowed = None
    if case.mask == "random":
        allowed = rng.random((case.len_q, case.len_k), dtype=np.float32) < 0.5
    elif case.mask == "padding":
        allowed = np.zeros((case.batch, 1, 1, case.len_k), bool)
        allowed[..., : int(case.len_k * PADDING_KEPT)] = True
    elif case.window is not None:
        left, right = case.window
        distance = np.arange(case.len_k)[None, :] - np.arange(case.len_q)[:, None]
        allowed = (distance >= -left) & (distance <= right)
    elif case.document_length is not None:
        ids = document_ids(case)
        allowed = ids[:, None] == ids[None, :]

    bias = None
    if case.bias is not None:
        heads = (case.heads,) if case.bias == "per_head" else ()
        bias = rng.standard_normal((*heads, case.len_q, case.len_k), dtype=dtype)
    return Inputs(query, key, value, allowed, bias)


def _case(name: str, group: str, shape: tuple[int, int, int, int, int], origin: str, **fields: Any) -> Case:
    """A case from ``(B, H, L, S, D)``; K and E follow H and D unless they are given."""
    batch, heads, len_q, len_k, head_dim = shape
    fields = {"kv_heads": heads, "value_dim": head_dim, **fields}
    return Case(
        name=name,
        group=group,
        origin=origin,
        batch=batch,
        heads=heads,
        len_q=len_q,
        len_k=len_k,
        head_dim=head_dim,
        **fields,
    )


_ALL = (
    _case(
        "square-512-64",
        "square",
        (1, 8, 512, 512, 64),
        "the common head at a common length",
        quick=True,
        targets=Targets(best=1.05, peak=0.88, peak_avx2=0.82),
    ),
    _case(
        "square-2048-64",
        "square",
        (1, 8, 2048, 2048, 64),
        "the same, with the softmax at its largest share",
        targets=Targets(best=1.05, peak=0.90, peak_avx2=0.82),
    ),
    _case(
        "square-2048-128",
        "square",
        (1, 8, 2048, 2048, 128),
        "the head of Llama and most language models",
        targets=Targets(best=1.08, peak=0.93),
    ),
    _case(
        "causal-512-64",
        "causal",
        (1, 8, 512, 512, 64),
        "GPT-2 prefill, short",
        causal=True,
        targets=Targets(best=2.0, peak=0.80),
    ),
    _case(
        "causal-2048-64",
        "causal",
        (1, 8, 2048, 2048, 64),
        "GPT-2 prefill, long",
        causal=True,
        quick=True,
        targets=Targets(best=1.5, peak=0.87),
    ),
    _case(
        "causal-2048-128",
        "causal",
        (1, 8, 2048, 2048, 128),
        "language model prefill",
        causal=True,
        targets=Targets(best=1.45, peak=0.90),
    ),
    _case(
        "bert-batch",
        "batch",
        (32, 12, 128, 128, 64),
        "BERT-base, a batch of 32 short texts",
        quick=True,
        targets=Targets(best=1.3),
    ),
    _case("vit-197", "batch", (1, 12, 197, 197, 64), "ViT-B/16 at 224 pixels", targets=Targets(best=1.05)),
    _case(
        "tiny-batch",
        "small",
        (32, 8, 10, 10, 64),
        "a batch of very short sentences",
        targets=Targets(best=1.0),
    ),
    _case("tiny-4", "small", (1, 1, 4, 4, 8), "the overhead of one call", targets=Targets(torch=1.4)),
    _case(
        "tiny-16",
        "small",
        (2, 4, 16, 16, 64),
        "a call of a few microseconds",
        quick=True,
        targets=Targets(torch=1.4),
    ),
    _case(
        "dim-40",
        "head-dim",
        (2, 8, 1024, 1024, 40),
        "Stable Diffusion, self-attention at 32 x 32",
        targets=Targets(best=1.05),
    ),
    _case(
        "dim-40-cross",
        "head-dim",
        (2, 8, 4096, 77, 40),
        "Stable Diffusion, cross-attention on 77 text tokens",
        quick=True,
        targets=Targets(best=1.05),
    ),
    _case(
        "dim-80",
        "head-dim",
        (1, 16, 577, 577, 80),
        "ViT-H at 336 pixels",
        targets=Targets(best=1.05),
    ),
    _case(
        "dim-96",
        "head-dim",
        (1, 8, 1024, 1024, 96),
        "the head of Phi-3-mini, without its mask",
        targets=Targets(best=1.05),
    ),
    _case(
        "dim-256",
        "head-dim",
        (1, 8, 1024, 1024, 256),
        "the head of Gemma, without its mask",
        targets=Targets(best=1.05),
    ),
    _case(
        "mask-random",
        "mask",
        (1, 8, 2048, 2048, 64),
        "a bool mask with no structure, half of it True, shared by the heads",
        mask="random",
        baseline="square-2048-64",
        quick=True,
        targets=Targets(best=1.1, torch=1.4, slowdown=1.12),
    ),
    _case(
        "mask-padding",
        "mask",
        (1, 8, 2048, 2048, 64),
        f"a (B, 1, 1, S) bool mask that keeps the first {PADDING_KEPT:.0%} of the keys",
        mask="padding",
        baseline="square-2048-64",
        targets=Targets(best=1.1, torch=1.4, slowdown=1.12),
    ),
    _case(
        "bias-shared",
        "mask",
        (1, 8, 2048, 2048, 64),
        "a float bias (L, S), shared by the heads",
        bias="shared",
        baseline="square-2048-64",
        targets=Targets(best=1.1, torch=1.4, slowdown=1.12),
    ),
    _case(
        "bias-per-head",
        "mask",
        (1, 8, 2048, 2048, 64),
        "a float bias (H, L, S), as the pair bias of AlphaFold or T5's relative positions",
        bias="per_head",
        baseline="square-2048-64",
        targets=Targets(best=1.1, torch=1.4, slowdown=1.12),
    ),
    _case(
        "window-8192",
        "sparse",
        (1, 2, 8192, 8192, 64),
        "sliding window over the last 256 tokens, as Mistral's",
        window=(256, 0),
        targets=Targets(best=20.0),
    ),
    _case(
        "documents-8192",
        "sparse",
        (1, 2, 8192, 8192, 64),
        "16 documents of 512 tokens packed in one row",
        document_length=512,
        targets=Targets(best=10.0),
    ),
    _case(
        "float64-1024",
        "float64",
        (1, 8, 1024, 1024, 64),
        "double precision, for science",
        dtype="float64",
        quick=True,
        targets=Targets(best=1.5, peak=0.85),
    ),
    _case(
        "float64-causal-1024",
        "float64",
        (1, 8, 1024, 1024, 64),
        "the same, causal",
        dtype="float64",
        causal=True,
        targets=Targets(best=2.0, peak=0.85),
    ),
    _case(
        "rank3",
        "layout",
        (1, 8, 1024, 1024, 64),
        "(H, L, D) without a batch axis",
        rank=3,
        targets=Targets(best=1.05, torch=1.5),
    ),
    _case(
        "wide-value",
        "layout",
        (1, 8, 1024, 1024, 64),
        "value head_dim 128 over a head_dim of 64",
        value_dim=128,
        targets=Targets(best=1.05, torch=1.5),
    ),
    _case(
        "bshd",
        "layout",
        (1, 8, 1024, 1024, 64),
        "(B, L, H, D) as a linear layer leaves it, untransposed",
        layout="bshd",
        targets=Targets(best=1.05),
    ),
    _case(
        "bshd-causal",
        "layout",
        (1, 8, 1024, 1024, 64),
        "the same, causal",
        layout="bshd",
        causal=True,
        targets=Targets(best=1.5),
    ),
    _case(
        "gqa-causal",
        "gqa",
        (1, 32, 1024, 1024, 128),
        "Llama-3-8B prefill: 32 query heads on 8 key/value heads",
        kv_heads=8,
        causal=True,
        quick=True,
        targets=Targets(best=1.5),
    ),
)

#: Every case by its name, in the order of the tables.
CASES: dict[str, Case] = {case.name: case for case in _ALL}

#: The groups, in the order of the tables.
GROUPS: tuple[str, ...] = tuple(dict.fromkeys(case.group for case in _ALL))

#: Lengths of the memory cases; at the last one the scores alone would take 4 GB.
MEMORY_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)

#: What ``--memory`` computes, by name, in the order of the table.
MEMORY_CASES: dict[str, Case] = {
    case.name: case
    for case in (
        *(
            _case(f"memory-{length}", "memory", (1, 1, length, length, 64), "memory against length, one head")
            for length in MEMORY_LENGTHS
        ),
        _case("memory-32768-causal", "memory", (1, 1, 32768, 32768, 64), "the longest, causal", causal=True),
    )
}

#: A call that loads what a library loads lazily, before `MEMORY_CASES` are measured a second time.
MEMORY_WARM_UP = _case("memory-warm-up", "memory", (1, 1, 16, 16, 64), "a tiny call")
