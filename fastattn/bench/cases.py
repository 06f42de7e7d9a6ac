"""The catalogue: every case by its name, and where it comes from."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from fastattn.bench.case import PADDING_KEPT, RULES, Case, make_inputs

#: Tokens in all of each case of the length family.
TOKENS = 32768


#: Name, ``B,H[/K],L,S,D[/E]`` as `Case.shape` gives it, other fields of `Case`, and where it comes from.
_Row = tuple[str, str, dict[str, Any], str]

#: How a decoder stores keys and values. Queries and results of 16-bit cases are in the same type, those over
#: int8 are float32.
_STORAGES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"storage": "int8"},
}


def _in_each_storage(
    name: str, shape: str, fields: dict[str, Any], origin: str, *, beside: str | None = None
) -> list[_Row]:
    """A row for each of `_STORAGES`.

    Our time is also given over that of the row in float32, or over that of `beside` in the same storage.
    """
    rows: list[_Row] = []
    for storage, stored in _STORAGES.items():
        all_fields = fields | stored
        if beside is not None:
            all_fields |= {"baseline": f"{beside}-{storage}"}
        elif storage != "float32":
            all_fields |= {"baseline": f"{name}-float32"}
        rows.append((f"{name}-{storage}", shape, all_fields, f"{origin}, in {storage}"))
    return rows


def _by_each_rule(name: str, shape: str, fields: dict[str, Any], origin: str) -> list[_Row]:
    """A row for each of `RULES`, in the layout that a linear layer leaves."""
    return [
        (f"{name}-{rule}", shape, fields | {"rule": rule, "layout": "bshd"}, f"{origin}, by the rule {rule}")
        for rule in RULES
    ]


# fmt: off
#: The rows of each group, both in the order of the tables. A new case is one more row.
_TABLE: dict[str, list[_Row]] = {
    "square": [
        ("square-512-64",   "1,8,512,512,64",    dict(quick=True), "the common head at a common length"),
        ("square-2048-64",  "1,8,2048,2048,64",  {}, "the same, with the softmax at its largest share"),
        ("square-2048-128", "1,8,2048,2048,128", {}, "the head of Llama and most language models"),
    ],
    "causal": [
        ("causal-512-64",   "1,8,512,512,64",    dict(causal=True, quick=True), "GPT-2 prefill, short"),
        ("causal-2048-64",  "1,8,2048,2048,64",  dict(causal=True), "GPT-2 prefill, long"),
        ("causal-2048-128", "1,8,2048,2048,128", dict(causal=True), "language model prefill"),
        ("gpt2-1024",       "1,12,1024,1024,64", dict(causal=True), "GPT-2 small, its whole context"),
    ],
    "batch": [
        ("bert-batch",      "32,12,128,128,64", {}, "BERT-base, a batch of 32 short texts"),
        ("bert-ragged",     "32,12,128,128,64", dict(key_lengths="ragged"),
         "BERT-base, 32 texts of 16 to 128 tokens, padded to the longest"),
        ("bert-512-ragged", "8,12,512,512,64",  dict(key_lengths="ragged"),
         "BERT-base, 8 texts of 64 to 512 tokens"),
        ("minilm-batch",    "64,12,128,128,32", {}, "MiniLM-L6, sentence embeddings, 64 full texts"),
        ("minilm-ragged",   "64,12,128,128,32", dict(key_lengths="ragged"),
         "MiniLM-L6, 64 texts of 16 to 128 tokens"),
        ("vit-197",         "1,12,197,197,64",  dict(quick=True), "ViT-B/16 at 224 pixels"),
        ("minilm-short",    "16,12,30,30,32",   dict(key_lengths="ragged"),
         "MiniLM-L6, 16 sentences of 4 to 30 tokens"),
        ("vit-197-batch",   "8,12,197,197,64",  {}, "ViT-B/16 at 224 pixels, eight images"),
        ("vit-577",         "1,12,577,577,64",  {}, "ViT-B/16 at 384 pixels"),
    ],
    "small": [
        ("tiny-batch",  "32,8,10,10,64", {}, "a batch of very short sentences"),
        ("tiny-4",      "1,1,4,4,8",     dict(quick=True), "the overhead of one call"),
        ("tiny-16",     "2,4,16,16,64",  {}, "a call of a few microseconds"),
        ("tiny-decode", "1,8,1,64,64",   {}, "one more token after a short prompt"),
    ],
    "head-dim": [
        ("dim-40",       "2,8,1024,1024,40",       {}, "Stable Diffusion, self-attention at 32 x 32"),
        ("dim-40-cross", "2,8,4096,77,40",         dict(quick=True),
         "Stable Diffusion, cross-attention on 77 text tokens"),
        ("dim-80",       "1,16,577,577,80",        {}, "ViT-H at 336 pixels"),
        ("dim-96",       "1,8,1024,1024,96",       {}, "the head of Phi-3-mini, without its mask"),
        ("dim-256",      "1,8,1024,1024,256",      {}, "the head of Gemma, without its mask"),
        ("mla-192-128",  "1,16,1024,1024,192/128", dict(causal=True),
         "DeepSeek-V2-Lite prefill: 192 for the scores, 128 for the values"),
    ],
    "mask": [
        ("mask-random",   "1,8,2048,2048,64", dict(mask="random", baseline="square-2048-64"),
         "a bool mask with no structure, half of it True, shared by the heads"),
        ("mask-padding",  "1,8,2048,2048,64", dict(mask="padding", baseline="square-2048-64"),
         f"a (B, 1, 1, S) bool mask that keeps the first {PADDING_KEPT:.0%} of the keys"),
        ("bias-shared",   "1,8,2048,2048,64", dict(bias="shared", baseline="square-2048-64"),
         "a float bias (L, S), shared by the heads"),
        ("bias-per-head", "1,8,2048,2048,64", dict(bias="per_head", baseline="square-2048-64"),
         "a float bias (H, L, S), as the pair bias of AlphaFold or T5's relative positions"),
    ],
    "bias": [
        ("alphafold-rows",     "32,8,256,256,32",  dict(bias="per_head"),
         "AlphaFold, row attention of 32 sequences that share one pair bias (H, L, L)"),
        ("alphafold-triangle", "128,4,128,128,32", dict(bias="per_head", quick=True),
         "AlphaFold, triangle attention: the 128 rows of the pair matrix share one bias (H, L, L)"),
        ("swin-windows",       "64,3,49,49,32",    dict(bias="per_head"),
         "Swin-T, first stage: 64 windows of 7 x 7 patches share the relative-position bias (H, L, L)"),
    ],
    "sparse": [
        ("window-8192",           "1,2,8192,8192,64",    dict(window=(256, 0)),
         "sliding window over the last 256 tokens, as Mistral's"),
        ("modernbert-window",     "1,12,2048,2048,64",   dict(window=(64, 64), quick=True),
         "ModernBERT-base, a local layer: 64 tokens to both sides"),
        ("longformer-window",     "1,12,4096,4096,64",   dict(window=(256, 256)),
         "Longformer-base: 256 tokens to both sides"),
        ("mistral-window",        "1,8/2,8192,8192,128", dict(causal=True, window=(4095, 0)),
         "a quarter of the heads of Mistral-7B, prefill with its window of 4096"),
        ("documents-8192",        "1,2,8192,8192,64",    dict(document_length=512),
         "16 documents of 512 tokens packed in one row"),
        ("documents-causal-8192", "1,2,8192,8192,64",    dict(causal=True, document_length=512),
         "the same, causal, as language models are trained on packed texts"),
    ],
    "float64": [
        ("float64-1024",         "1,8,1024,1024,64",  dict(dtype="float64", quick=True),
         "double precision, for science"),
        ("float64-causal-1024",  "1,8,1024,1024,64",  dict(dtype="float64", causal=True), "the same, causal"),
        ("kernel-regression",    "1,1,4096,4096,3/1", dict(dtype="float64"),
         "kernel regression: 4096 samples in space weigh one value each"),
        ("kernel-regression-1d", "1,1,4096,4096,1",   dict(dtype="float64"),
         "the same along one axis: all exponentials, no products to speak of"),
    ],
    "layout": [
        ("rank3",       "1,8,1024,1024,64",     dict(rank=3), "(H, L, D) without a batch axis"),
        ("wide-value",  "1,8,1024,1024,64/128", {}, "value head_dim 128 over a head_dim of 64"),
        ("bshd",        "1,8,1024,1024,64",     dict(layout="bshd"),
         "(B, L, H, D) as a linear layer leaves it, untransposed"),
        ("bshd-causal", "1,8,1024,1024,64",     dict(layout="bshd", causal=True), "the same, causal"),
        ("strided",     "1,8,1024,1024,64",     dict(strided=True),
         "every second element of the last axis, as of the real parts of complex arrays"),
    ],
    "gqa": [
        ("gqa-causal",      "1,32/8,1024,1024,128", dict(causal=True),
         "Llama-3-8B prefill: 32 query heads on 8 key/value heads"),
        ("chunked-prefill", "1,32/8,256,4096,128",  dict(causal=True),
         "Llama-3-8B, the last 256 tokens of a prompt of 4096 whose beginning is in the cache"),
        ("gemma2-softcap",  "1,8/4,1024,1024,256",  dict(causal=True, softcap=50.0),
         "Gemma-2-2B prefill: scores soft-capped at 50"),
    ],
    "cross": [
        ("whisper-cross", "1,20,448,1500,64", {}, "Whisper-large, its longest text over 30 s of audio"),
    ],
    "decode": [
        ("llama-decode",       "1,32/8,1,4096,128", dict(cold=True),
         "Llama-3-8B, one token over a cache of 4096: 32 query heads on 8 key/value heads"),
        ("mha-decode",         "1,32,1,4096,128",   dict(cold=True, quick=True),
         "Llama-2-7B, one token over a cache of 4096: a key/value head for each query head"),
        ("mqa-decode",         "1,71/1,1,2048,64",  dict(cold=True),
         "Falcon-7B, one token over a cache of 2048: all 71 query heads on one key/value head"),
        ("one-head-decode",    "1,1,1,65536,128",   dict(cold=True),
         "one head over 65536 keys: only the keys can be shared out among the threads"),
        ("batch-decode",       "8,32/8,1,2048,128", dict(key_lengths="ragged", cold=True),
         "Llama-3-8B serving 8 conversations of 256 to 2048 tokens"),
        ("speculative-decode", "1,32/8,4,4096,128", dict(causal=True, cold=True),
         "Llama-3-8B checking 4 guessed tokens at once"),
        ("window-decode",      "1,32/8,1,8192,128", dict(causal=True, window=(4095, 0), cold=True),
         "Mistral-7B, one token over the last 4096 of 8192"),
        ("gpt2-decode",        "1,12,1,1024,64",    {}, "GPT-2 small, one token over its whole context"),
        ("whisper-decode",     "1,20,1,1500,64",    dict(cold=True),
         "Whisper-large, one token over 30 s of audio"),
    ],
    "decode-storage": [
        *_in_each_storage("decode-8k", "1,32/8,1,8192,128", dict(cold=True),
                          "Llama-3-8B, one token over a cache of 8192"),
        *_in_each_storage("group-1", "1,8,1,8192,128", dict(cold=True),
                          "the same cache, a query head for each key/value head"),
        *_in_each_storage("group-16", "1,128/8,1,8192,128", dict(cold=True),
                          "Llama-3.1-405B, one token over a cache of 8192"),
        *_in_each_storage("speculative-8", "1,32/8,8,8192,128", dict(causal=True, cold=True),
                          "Llama-3-8B checking 8 guessed tokens at once"),
        *_in_each_storage("chunk-512", "1,32/8,512,4096,128", dict(causal=True),
                          "Llama-3-8B, a chunk of 512 tokens at the end of a prompt of 4096"),
        *_in_each_storage("pages-64", "1,32/8,1,8192,128", dict(page_size=64, cold=True),
                          "the cache of decode-8k in pages of 64", beside="decode-8k"),
        *_in_each_storage("pages-256", "1,32/8,1,8192,128", dict(page_size=256, cold=True),
                          "the cache of decode-8k in pages of 256", beside="decode-8k"),
        *_in_each_storage("step-8k", "1,32/8,1,8192,128", dict(step=True, cold=True),
                          "decode-8k with the token's own key and value appended first", beside="decode-8k"),
    ],
    "many-rows": [
        ("mla-decode-16",        "1,16/1,1,4096,576/512",  dict(value_in_key=True, cold=True),
         "DeepSeek-V2-Lite, one token: 16 heads on the latent, whose first 512 columns are the values"),
        ("mla-decode-128",       "1,128/1,1,4096,576/512", dict(value_in_key=True, cold=True),
         "DeepSeek-V3, one token: 128 heads on the latent"),
        ("mla-decode-128-float16", "1,128/1,1,4096,576/512",
         dict(value_in_key=True, cold=True, dtype="float16", baseline="mla-decode-128"),
         "the same, in float16"),
        ("mla-speculative",      "1,16/1,4,4096,576/512",  dict(value_in_key=True, causal=True, cold=True),
         "DeepSeek-V2-Lite checking 4 guessed tokens at once"),
        ("mqa-8-long",           "1,8/1,1,65536,128",      dict(cold=True),
         "8 query heads on one key/value head over 65536 keys"),
        ("mqa-16-long",          "1,16/1,1,65536,128",     dict(cold=True), "the same, 16 query heads"),
        ("speculative-4-70b",    "1,64/8,4,8192,128",      dict(causal=True, cold=True),
         "Llama-3-70B checking 4 guessed tokens: 32 rows on each key/value head"),
        ("speculative-8-70b",    "1,64/8,8,8192,128",      dict(causal=True, cold=True),
         "the same, 8 tokens"),
    ],
    "reductions": [
        *_in_each_storage("maxsim", "1000,1,32,300,128/1", dict(reduction="max_similarity"),
                          "ColBERT: a query of 32 tokens with 1000 documents of 300"),
        ("topk-8192",   "1,8,1024,8192,64/1",     dict(reduction="topk"),
         "the 16 largest scores of each query, as sparse attention chooses its keys"),
        ("key-weights", "1,32/8,512,4096,128/1", dict(reduction="key_weights", causal=True),
         "Llama-3-8B, the weights of all keys by the last 512 tokens, as H2O and SnapKV evict by them"),
    ],
    "bias-objects": [
        ("relative-2048",   "1,8,2048,2048,64",    dict(bias="relative", baseline="bias-per-head"),
         "a number for each head and distance, as T5's, by a bias object: bias-per-head is stored"),
        ("relative-decode", "1,32,1,4096,128",     dict(bias="relative", cold=True, baseline="mha-decode"),
         "the same in one token: mha-decode has none"),
        ("sam-32",          "1,12,1024,1024,64",   dict(bias="grid"),
         "SAM's decomposed positions, a global layer of ViT-B at 512 pixels, 32 x 32 patches"),
        ("neighborhood-56", "1,2,3136,3136,32",    dict(mask="neighborhood"),
         "NAT-Mini, first stage: 56 x 56 patches, each with 7 x 7 around it"),
    ],
    "backward": [
        ("backward-2048-64",        "1,16,2048,2048,64",    dict(backward=True),
         "training, 16 heads at a common length"),
        ("backward-causal-2048-64", "1,16,2048,2048,64",    dict(backward=True, causal=True),
         "the same, causal"),
        ("backward-2048-128",       "1,16,2048,2048,128",   dict(backward=True),
         "the head of Llama and most language models"),
        ("backward-bfloat16",       "1,16,2048,2048,64",    dict(backward=True, dtype="bfloat16"),
         "the first of them in bfloat16"),
        ("backward-16",             "1,4,16,16,64",         dict(backward=True),
         "16 tokens: overheads"),
        ("backward-bert-batch",     "32,12,128,128,64",     dict(backward=True, quick=True),
         "BERT-base, a batch of 32 short texts"),
        ("backward-8192-1-head",    "1,1,8192,8192,64",     dict(backward=True),
         "one head: only its own rows and keys can be shared out among the threads"),
        ("backward-8192-2-heads",   "1,2,8192,8192,64",     dict(backward=True), "two heads"),
        ("backward-window-8192",    "1,4,8192,8192,64",     dict(backward=True, window=(256, 0)),
         "sliding window over the last 256 tokens, as Mistral's"),
        ("backward-documents-4096", "1,4,4096,4096,64",     dict(backward=True, document_length=512),
         "8 documents of 512 tokens packed in one row"),
        ("backward-bias-1024",      "1,8,1024,1024,64",     dict(backward=True, bias="per_head"),
         "a float bias (H, L, S) that is learned, too"),
        ("backward-wide-value",     "1,8,1024,1024,64/128", dict(backward=True),
         "value head_dim 128 over a head_dim of 64"),
        ("backward-gqa-1024",       "1,32/8,1024,1024,64",  dict(backward=True),
         "32 query heads on 8 key/value heads, as in Llama-3.2-1B"),
    ],
    "flex-backward": [
        ("backward-softcap-1024",      "1,8,1024,1024,64", dict(backward=True, softcap=50.0),
         "Gemma 2's soft-cap"),
        ("flex-backward-softcap-1024", "1,8,1024,1024,64",
         dict(backward=True, softcap=50.0, flex=True, baseline="backward-softcap-1024"),
         "the same by a function of a score, whose derivative is found"),
        ("flex-backward-bias-1024",    "1,8,1024,1024,64",
         dict(backward=True, bias="per_head", flex=True, baseline="backward-bias-1024"),
         "a float bias (H, L, S) that is learned, too, read by a function of a score"),
    ],
    "recurrent": [
        *_by_each_rule("recurrent-1024", "1,16,1024,1024,128", {},
                       "gated linear attention: the heads of DeltaNet-1.3B, a prompt of 1024"),
        *_by_each_rule("recurrent-token", "8,32,1,1,128", dict(cold=True),
                       "gated linear attention: the value heads of Qwen3-Next, one token of 8 conversations"),
        ("recurrent-batch",  "8,16,1024,1024,64",   dict(rule="gated_delta", layout="bshd"),
         "gated linear attention: 8 prompts of 1024"),
        ("recurrent-4k",     "1,32,4096,4096,128",  dict(rule="kimi", layout="bshd"),
         "Kimi Linear, a prompt of 4096"),
        ("recurrent-16k",    "1,16,16384,16384,64", dict(rule="gated_delta", layout="bshd"),
         "gated linear attention: a prompt of 16384"),
        ("recurrent-16k-columns", "1,16,16384,16384,64", dict(rule="gla", layout="bshd"),
         "the same with a decay of each column"),
        ("recurrent-decode", "1,32,1,1,128",
         dict(rule="gated_delta", layout="bshd", cold=True, quick=True),
         "the value heads of Qwen3-Next, one token"),
    ],
    "long": [
        ("long-8k",  "1,4,8192,8192,64",   dict(causal=True), "long context, four heads"),
        ("long-16k", "1,2,16384,16384,64", dict(causal=True), "long context, two heads"),
        ("long-32k", "1,1,32768,32768,64", dict(causal=True), "long context, one head"),
        ("long-64k", "1,1,65536,65536,64", dict(causal=True), "long context, one head"),
    ],
    "scaling-length": [
        (f"length-{n}", f"{TOKENS // n},1,{n},{n},64", {},
         f"{TOKENS} tokens in texts of {n}, as FlashAttention's authors vary the length")
        for n in (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    ],
    "scaling-dim": [
        (f"head-dim-{n}", f"1,8,1024,1024,{n}", {}, f"head_dim {n}, all else fixed")
        for n in (16, 32, 64, 96, 128, 192, 256)
    ],
    "scaling-batch": [
        (f"batch-{n}", f"{n},12,128,128,64", {}, f"BERT-base, {n} texts of 128")
        for n in (1, 2, 4, 8, 16, 32, 64)
    ],
    "scaling-threads": [
        (f"threads-{n}", "1,16,1024,1024,64", dict(threads=n), "16 heads, enough for all threads")
        for n in (1, 2, 4, 8, 16, 32, 64)
    ],
}
# fmt: on

#: Cases that are timed in a layer of their model, too, and how wide its rows are. The quick ones are quick
#: there as well.
_MODEL_DIMS = {
    "gpt2-1024": 768,
    "bert-batch": 768,
    "vit-197": 768,
    "vit-577": 768,
    "minilm-short": 384,
    "gpt2-decode": 768,
}

_SHAPE = re.compile(
    r"(?P<batch>\d+),(?P<heads>\d+)(?:/(?P<kv_heads>\d+))?,"
    r"(?P<len_q>\d+),(?P<len_k>\d+),(?P<head_dim>\d+)(?:/(?P<value_dim>\d+))?"
)


def _case(group: str, name: str, shape: str, fields: dict[str, Any], origin: str) -> Case:
    """A case from its row; ValueError where there is no such shape."""
    found = _SHAPE.fullmatch(shape)
    sizes = {} if found is None else {size: int(text) for size, text in found.groupdict().items() if text}
    if not sizes or 0 in sizes.values():
        raise ValueError(f"a shape is B,H[/K],L,S,D[/E], all of them at least 1, got {shape}")
    heads, kv_heads = sizes["heads"], sizes.setdefault("kv_heads", sizes["heads"])
    if heads % kv_heads:
        raise ValueError(f"{shape}: {heads} query heads cannot share {kv_heads} key/value heads evenly")
    sizes.setdefault("value_dim", sizes["head_dim"])
    return Case(name=name, group=group, origin=origin, **{**sizes, **fields})


def _in_model(case: Case, model_dim: int) -> Case:
    """The same attention between the products of its layer."""
    return replace(
        case,
        name=f"{case.name}-in-model",
        group="in-model",
        origin=f"{case.origin}, between the products of its layer",
        model_dim=model_dim,
        baseline=case.name,
    )


_ALONE = [_case(group, *row) for group, rows in _TABLE.items() for row in rows]
_IN_MODEL = [_in_model(case, _MODEL_DIMS[case.name]) for case in _ALONE if case.name in _MODEL_DIMS]

#: Every case by its name, in the order of the tables.
CASES: dict[str, Case] = {case.name: case for case in (*_ALONE, *_IN_MODEL)}

#: The groups, in the order of the tables.
GROUPS: tuple[str, ...] = tuple(dict.fromkeys(case.group for case in CASES.values()))

#: Lengths of the memory cases; at the last one the scores alone would take 4 GB.
MEMORY_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)

_MEMORY_ROWS: list[_Row] = [
    *((f"memory-{n}", f"1,1,{n},{n},64", {}, "memory against length, one head") for n in MEMORY_LENGTHS),
    ("memory-32768-causal", "1,1,32768,32768,64", {"causal": True}, "the longest, causal"),
]

#: What ``--memory`` computes, by name, in the order of the table.
MEMORY_CASES: dict[str, Case] = {row[0]: _case("memory", *row) for row in _MEMORY_ROWS}

#: A call that loads what a library loads lazily, before `MEMORY_CASES` are measured a second time.
MEMORY_WARM_UP = _case("memory", "memory-warm-up", "1,1,16,16,64", {}, "a tiny call")


def possible_cases(num_cores: int) -> list[Case]:
    """Every case but those that ask for more threads than there are cores."""
    return [case for case in CASES.values() if (case.threads or 1) <= num_cores]


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
    case = _case("shape", shape, shape, {"quick": True, **options}, "given as --shape")
    if case.document_length is not None and (case.len_q != case.len_k or case.lengths is not None):
        raise ValueError(f"{shape}: documents in a row have as many queries as keys, and no key lengths")
    if not case.is_plain and case.layout != "bhsd":
        raise ValueError(f"{shape}: storage, pages and steps are timed in the layout bhsd, got {case.layout}")
    if case.backward and not (case.is_plain and case.model_dim is None):
        raise ValueError(f"{shape}: gradients are timed of plain arrays alone, and in no model")
    if case.page_size is not None and case.len_k % case.page_size:
        raise ValueError(f"{shape}: the keys fill their pages, got pages of {case.page_size}")
    if case.step and (case.page_size is not None or case.lengths is not None or case.len_q > case.len_k):
        raise ValueError(f"{shape}: a step has L of the S keys, no key lengths and no pages")
    beside = {"rule", "dtype", "layout", "cold"}
    if case.rule is not None and (case.len_q != case.len_k or not options.keys() <= beside):
        raise ValueError(
            f"{shape}: a rule has as many queries as keys, and no option but dtype, layout and cold"
        )
    return case


def check_keys(case: Case) -> None:
    """Raise ValueError where a query of `case` would have no key, by which most libraries divide."""
    start, stop = case.intervals()
    allowed = None if case.mask is None else make_inputs(case).allowed(case)
    if (start >= stop).any() or (allowed is not None and not allowed.any(axis=-1).all()):
        raise ValueError(
            f"{case.name}, {case.options}: some query has no key, which most libraries cannot take"
        )
