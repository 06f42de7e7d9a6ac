"""Shapes on which a GPU is judged."""

from __future__ import annotations

from fastattn.bench.case import Case


def _case(name: str, shape: tuple[int, int, int, int, int], origin: str, **options: object) -> Case:
    B, H, L, S, D = shape
    given = {"group": "gpu", "kv_heads": H, "value_dim": D, **options}
    return Case(name, origin=origin, batch=B, heads=H, len_q=L, len_k=S, head_dim=D, **given)  # type: ignore[arg-type]


GPU_CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _case("gpu-4096-64", (4, 16, 4096, 4096, 64), "long rows, all pairs"),
        _case("gpu-4096-64-causal", (4, 16, 4096, 4096, 64), "a decoder's prefill", causal=True),
        _case("gpu-4096-128", (4, 16, 4096, 4096, 128), "wide heads, all pairs"),
        _case("gpu-4096-128-causal", (4, 16, 4096, 4096, 128), "wide heads, prefill", causal=True),
        _case("gpu-decode", (1, 32, 1, 65536, 128), "one token over a long cache", cold=True),
        _case(
            "gpu-decode-gqa",
            (8, 32, 1, 16384, 128),
            "a batch of tokens, 8 key/value heads",
            kv_heads=8,
            cold=True,
        ),
        _case("gpu-16-rows", (1, 8, 16, 65536, 128), "a few rows over a long cache", cold=True),
        _case(
            "gpu-decode-8-rows", (1, 64, 1, 65536, 128), "one token, groups of 8 heads", kv_heads=8, cold=True
        ),
        _case("gpu-decode-4096", (1, 32, 1, 4096, 128), "one token over a short cache", cold=True),
        _case("gpu-512-64", (16, 16, 512, 512, 64), "a batch of short texts"),
        _case("gpu-window", (1, 16, 16384, 16384, 64), "a sliding window", causal=True, window=(512, 0)),
        _case("gpu-bias", (1, 16, 2048, 2048, 64), "a bias for each head", bias="per_head"),
        _case("gpu-float64", (1, 16, 2048, 2048, 64), "float64", dtype="float64"),
    )
}

#: Calls whose time is the host's: of one kernel, and of a split over the keys and its merge.
HOST_CASES = (
    _case("gpu-tiny", (1, 1, 4, 4, 8), "nothing to compute"),
    _case("gpu-tiny-split", (1, 1, 1, 4096, 8), "next to nothing, in two kernels"),
)
