"""The catalogue: every case by its name, and where it comes from.

Shapes are ``(B, H, L, S, D)``: batch, query heads, query length, key length, head_dim.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from fastattn.bench.case import PADDING_KEPT, Case, make_inputs

#: Tokens in all of each case of the length family.
TOKENS = 32768


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


_ALONE = (
    _case(
        "square-512-64",
        "square",
        (1, 8, 512, 512, 64),
        "the common head at a common length",
        quick=True,
    ),
    _case(
        "square-2048-64",
        "square",
        (1, 8, 2048, 2048, 64),
        "the same, with the softmax at its largest share",
    ),
    _case(
        "square-2048-128",
        "square",
        (1, 8, 2048, 2048, 128),
        "the head of Llama and most language models",
    ),
    _case(
        "causal-512-64",
        "causal",
        (1, 8, 512, 512, 64),
        "GPT-2 prefill, short",
        causal=True,
        quick=True,
    ),
    _case(
        "causal-2048-64",
        "causal",
        (1, 8, 2048, 2048, 64),
        "GPT-2 prefill, long",
        causal=True,
    ),
    _case(
        "causal-2048-128",
        "causal",
        (1, 8, 2048, 2048, 128),
        "language model prefill",
        causal=True,
    ),
    _case(
        "gpt2-1024",
        "causal",
        (1, 12, 1024, 1024, 64),
        "GPT-2 small, its whole context",
        causal=True,
    ),
    _case(
        "bert-batch",
        "batch",
        (32, 12, 128, 128, 64),
        "BERT-base, a batch of 32 short texts",
    ),
    _case(
        "bert-ragged",
        "batch",
        (32, 12, 128, 128, 64),
        "BERT-base, 32 texts of 16 to 128 tokens, padded to the longest",
        key_lengths="ragged",
    ),
    _case(
        "bert-512-ragged",
        "batch",
        (8, 12, 512, 512, 64),
        "BERT-base, 8 texts of 64 to 512 tokens",
        key_lengths="ragged",
    ),
    _case("minilm-batch", "batch", (64, 12, 128, 128, 32), "MiniLM-L6, sentence embeddings, 64 full texts"),
    _case(
        "minilm-ragged",
        "batch",
        (64, 12, 128, 128, 32),
        "MiniLM-L6, 64 texts of 16 to 128 tokens",
        key_lengths="ragged",
    ),
    _case(
        "vit-197",
        "batch",
        (1, 12, 197, 197, 64),
        "ViT-B/16 at 224 pixels",
        quick=True,
    ),
    _case(
        "minilm-short",
        "batch",
        (16, 12, 30, 30, 32),
        "MiniLM-L6, 16 sentences of 4 to 30 tokens",
        key_lengths="ragged",
    ),
    _case("vit-197-batch", "batch", (8, 12, 197, 197, 64), "ViT-B/16 at 224 pixels, eight images"),
    _case("vit-577", "batch", (1, 12, 577, 577, 64), "ViT-B/16 at 384 pixels"),
    _case(
        "tiny-batch",
        "small",
        (32, 8, 10, 10, 64),
        "a batch of very short sentences",
    ),
    _case("tiny-4", "small", (1, 1, 4, 4, 8), "the overhead of one call", quick=True),
    _case("tiny-16", "small", (2, 4, 16, 16, 64), "a call of a few microseconds"),
    _case("tiny-decode", "small", (1, 8, 1, 64, 64), "one more token after a short prompt"),
    _case(
        "dim-40",
        "head-dim",
        (2, 8, 1024, 1024, 40),
        "Stable Diffusion, self-attention at 32 x 32",
    ),
    _case(
        "dim-40-cross",
        "head-dim",
        (2, 8, 4096, 77, 40),
        "Stable Diffusion, cross-attention on 77 text tokens",
        quick=True,
    ),
    _case(
        "dim-80",
        "head-dim",
        (1, 16, 577, 577, 80),
        "ViT-H at 336 pixels",
    ),
    _case(
        "dim-96",
        "head-dim",
        (1, 8, 1024, 1024, 96),
        "the head of Phi-3-mini, without its mask",
    ),
    _case(
        "dim-256",
        "head-dim",
        (1, 8, 1024, 1024, 256),
        "the head of Gemma, without its mask",
    ),
    _case(
        "mla-192-128",
        "head-dim",
        (1, 16, 1024, 1024, 192),
        "DeepSeek-V2-Lite prefill: 192 for the scores, 128 for the values",
        value_dim=128,
        causal=True,
    ),
    _case(
        "mask-random",
        "mask",
        (1, 8, 2048, 2048, 64),
        "a bool mask with no structure, half of it True, shared by the heads",
        mask="random",
        baseline="square-2048-64",
    ),
    _case(
        "mask-padding",
        "mask",
        (1, 8, 2048, 2048, 64),
        f"a (B, 1, 1, S) bool mask that keeps the first {PADDING_KEPT:.0%} of the keys",
        mask="padding",
        baseline="square-2048-64",
    ),
    _case(
        "bias-shared",
        "mask",
        (1, 8, 2048, 2048, 64),
        "a float bias (L, S), shared by the heads",
        bias="shared",
        baseline="square-2048-64",
    ),
    _case(
        "bias-per-head",
        "mask",
        (1, 8, 2048, 2048, 64),
        "a float bias (H, L, S), as the pair bias of AlphaFold or T5's relative positions",
        bias="per_head",
        baseline="square-2048-64",
    ),
    _case(
        "alphafold-rows",
        "bias",
        (32, 8, 256, 256, 32),
        "AlphaFold, row attention of 32 sequences that share one pair bias (H, L, L)",
        bias="per_head",
    ),
    _case(
        "alphafold-triangle",
        "bias",
        (128, 4, 128, 128, 32),
        "AlphaFold, triangle attention: the 128 rows of the pair matrix share one bias (H, L, L)",
        bias="per_head",
        quick=True,
    ),
    _case(
        "swin-windows",
        "bias",
        (64, 3, 49, 49, 32),
        "Swin-T, first stage: 64 windows of 7 x 7 patches share the relative-position bias (H, L, L)",
        bias="per_head",
    ),
    _case(
        "window-8192",
        "sparse",
        (1, 2, 8192, 8192, 64),
        "sliding window over the last 256 tokens, as Mistral's",
        window=(256, 0),
    ),
    _case(
        "modernbert-window",
        "sparse",
        (1, 12, 2048, 2048, 64),
        "ModernBERT-base, a local layer: 64 tokens to both sides",
        window=(64, 64),
        quick=True,
    ),
    _case(
        "longformer-window",
        "sparse",
        (1, 12, 4096, 4096, 64),
        "Longformer-base: 256 tokens to both sides",
        window=(256, 256),
    ),
    _case(
        "mistral-window",
        "sparse",
        (1, 8, 8192, 8192, 128),
        "a quarter of the heads of Mistral-7B, prefill with its window of 4096",
        kv_heads=2,
        causal=True,
        window=(4095, 0),
    ),
    _case(
        "documents-8192",
        "sparse",
        (1, 2, 8192, 8192, 64),
        "16 documents of 512 tokens packed in one row",
        document_length=512,
    ),
    _case(
        "documents-causal-8192",
        "sparse",
        (1, 2, 8192, 8192, 64),
        "the same, causal, as language models are trained on packed texts",
        causal=True,
        document_length=512,
    ),
    _case(
        "float64-1024",
        "float64",
        (1, 8, 1024, 1024, 64),
        "double precision, for science",
        dtype="float64",
        quick=True,
    ),
    _case(
        "float64-causal-1024",
        "float64",
        (1, 8, 1024, 1024, 64),
        "the same, causal",
        dtype="float64",
        causal=True,
    ),
    _case(
        "kernel-regression",
        "float64",
        (1, 1, 4096, 4096, 3),
        "kernel regression: 4096 samples in space weigh one value each",
        value_dim=1,
        dtype="float64",
    ),
    _case(
        "kernel-regression-1d",
        "float64",
        (1, 1, 4096, 4096, 1),
        "the same along one axis: all exponentials, no products to speak of",
        dtype="float64",
    ),
    _case(
        "rank3",
        "layout",
        (1, 8, 1024, 1024, 64),
        "(H, L, D) without a batch axis",
        rank=3,
    ),
    _case(
        "wide-value",
        "layout",
        (1, 8, 1024, 1024, 64),
        "value head_dim 128 over a head_dim of 64",
        value_dim=128,
    ),
    _case(
        "bshd",
        "layout",
        (1, 8, 1024, 1024, 64),
        "(B, L, H, D) as a linear layer leaves it, untransposed",
        layout="bshd",
    ),
    _case(
        "bshd-causal",
        "layout",
        (1, 8, 1024, 1024, 64),
        "the same, causal",
        layout="bshd",
        causal=True,
    ),
    _case(
        "strided",
        "layout",
        (1, 8, 1024, 1024, 64),
        "every second element of the last axis, as of the real parts of complex arrays",
        strided=True,
    ),
    _case(
        "gqa-causal",
        "gqa",
        (1, 32, 1024, 1024, 128),
        "Llama-3-8B prefill: 32 query heads on 8 key/value heads",
        kv_heads=8,
        causal=True,
    ),
    _case(
        "chunked-prefill",
        "gqa",
        (1, 32, 256, 4096, 128),
        "Llama-3-8B, the last 256 tokens of a prompt of 4096 whose beginning is in the cache",
        kv_heads=8,
        causal=True,
    ),
    _case(
        "gemma2-softcap",
        "gqa",
        (1, 8, 1024, 1024, 256),
        "Gemma-2-2B prefill: scores soft-capped at 50",
        kv_heads=4,
        causal=True,
        softcap=50.0,
    ),
    _case(
        "whisper-cross", "cross", (1, 20, 448, 1500, 64), "Whisper-large, its longest text over 30 s of audio"
    ),
    _case(
        "llama-decode",
        "decode",
        (1, 32, 1, 4096, 128),
        "Llama-3-8B, one token over a cache of 4096: 32 query heads on 8 key/value heads",
        kv_heads=8,
        cold=True,
    ),
    _case(
        "mha-decode",
        "decode",
        (1, 32, 1, 4096, 128),
        "Llama-2-7B, one token over a cache of 4096: a key/value head for each query head",
        cold=True,
        quick=True,
    ),
    _case(
        "mqa-decode",
        "decode",
        (1, 71, 1, 2048, 64),
        "Falcon-7B, one token over a cache of 2048: all 71 query heads on one key/value head",
        kv_heads=1,
        cold=True,
    ),
    _case(
        "one-head-decode",
        "decode",
        (1, 1, 1, 65536, 128),
        "one head over 65536 keys: only the keys can be shared out among the threads",
        cold=True,
    ),
    _case(
        "batch-decode",
        "decode",
        (8, 32, 1, 2048, 128),
        "Llama-3-8B serving 8 conversations of 256 to 2048 tokens",
        kv_heads=8,
        key_lengths="ragged",
        cold=True,
    ),
    _case(
        "speculative-decode",
        "decode",
        (1, 32, 4, 4096, 128),
        "Llama-3-8B checking 4 guessed tokens at once",
        kv_heads=8,
        causal=True,
        cold=True,
    ),
    _case(
        "window-decode",
        "decode",
        (1, 32, 1, 8192, 128),
        "Mistral-7B, one token over the last 4096 of 8192",
        kv_heads=8,
        causal=True,
        window=(4095, 0),
        cold=True,
    ),
    _case("gpt2-decode", "decode", (1, 12, 1, 1024, 64), "GPT-2 small, one token over its whole context"),
    _case(
        "whisper-decode",
        "decode",
        (1, 20, 1, 1500, 64),
        "Whisper-large, one token over 30 s of audio",
        cold=True,
    ),
    _case("long-8k", "long", (1, 4, 8192, 8192, 64), "long context, four heads", causal=True),
    _case("long-16k", "long", (1, 2, 16384, 16384, 64), "long context, two heads", causal=True),
    _case("long-32k", "long", (1, 1, 32768, 32768, 64), "long context, one head", causal=True),
    _case("long-64k", "long", (1, 1, 65536, 65536, 64), "long context, one head", causal=True),
    *(
        _case(
            f"length-{length}",
            "scaling-length",
            (TOKENS // length, 1, length, length, 64),
            f"{TOKENS} tokens in texts of {length}, as FlashAttention's authors vary the length",
        )
        for length in (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    ),
    *(
        _case(f"head-dim-{dim}", "scaling-dim", (1, 8, 1024, 1024, dim), f"head_dim {dim}, all else fixed")
        for dim in (16, 32, 64, 96, 128, 192, 256)
    ),
    *(
        _case(
            f"batch-{batch}", "scaling-batch", (batch, 12, 128, 128, 64), f"BERT-base, {batch} texts of 128"
        )
        for batch in (1, 2, 4, 8, 16, 32, 64)
    ),
    *(
        _case(
            f"threads-{threads}",
            "scaling-threads",
            (1, 16, 1024, 1024, 64),
            "16 heads, enough for all threads",
            threads=threads,
        )
        for threads in (1, 2, 4, 8, 16, 32, 64)
    ),
)

#: Those of them that are timed in a layer of their model, too, and how wide its rows are. The quick ones of
#: them are quick there as well.
_MODEL_DIMS = {
    "gpt2-1024": 768,
    "bert-batch": 768,
    "vit-197": 768,
    "vit-577": 768,
    "minilm-short": 384,
    "gpt2-decode": 768,
}

_ALL = (
    *_ALONE,
    *(
        replace(
            case,
            name=f"{case.name}-in-model",
            group="in-model",
            origin=f"{case.origin}, between the products of its layer",
            model_dim=_MODEL_DIMS[case.name],
            baseline=case.name,
        )
        for case in _ALONE
        if case.name in _MODEL_DIMS
    ),
)

#: Every case by its name, in the order of the tables.
CASES: dict[str, Case] = {case.name: case for case in _ALL}


def possible_cases(num_cores: int) -> list[Case]:
    """Every case but those that ask for more threads than there are cores."""
    return [case for case in CASES.values() if (case.threads or 1) <= num_cores]


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

#: ``B,H[/K],L,S,D[/E]``, as `Case.shape` gives it.
_SHAPE = re.compile(r"(\d+),(\d+)(?:/(\d+))?,(\d+),(\d+),(\d+)(?:/(\d+))?")


def case_of_shape(shape: str, **options: Any) -> Case:
    """A case that is not in the catalogue, named after its shape.

    Parameters
    ----------
    shape
        ``B,H[/K],L,S,D[/E]``.
    **options
        Fields of `Case`.

    Raises
    ------
    ValueError
        There is no such shape, or the options do not suit it.
    """
    found = _SHAPE.fullmatch(shape)
    sizes = {number: int(text) for number, text in enumerate(found.groups() if found else "0") if text}
    if 0 in sizes.values():
        raise ValueError(f"a shape is B,H[/K],L,S,D[/E], all of them at least 1, got {shape}")
    batch, heads, len_q, len_k, head_dim = (sizes[number] for number in (0, 1, 3, 4, 5))
    kv_heads, value_dim = sizes.get(2, heads), sizes.get(6, head_dim)
    if heads % kv_heads:
        raise ValueError(f"{shape}: {heads} query heads cannot share {kv_heads} key/value heads evenly")
    options = {"kv_heads": kv_heads, "value_dim": value_dim, "quick": True, **options}
    case = _case(shape, "shape", (batch, heads, len_q, len_k, head_dim), "given as --shape", **options)
    if case.document_length is not None and (len_q != len_k or case.lengths is not None):
        raise ValueError(f"{shape}: documents in a row have as many queries as keys, and no key lengths")
    return case


def check_keys(case: Case) -> None:
    """Raise ValueError where a query of `case` would have no key, by which most libraries divide."""
    start, stop = case.intervals()
    allowed = None if case.mask is None else make_inputs(case).allowed(case)
    if (start >= stop).any() or (allowed is not None and not allowed.any(axis=-1).all()):
        raise ValueError(
            f"{case.name}, {case.options}: some query has no key, which most libraries cannot take"
        )
