"""Attention of TabPFN on the CPU: a backend of its registry."""

from __future__ import annotations

from typing import Any

from fastattn.integrations._common import extra

with extra("tabpfn"):
    import torch
    from tabpfn.architectures.shared import attention_backends

from fastattn.integrations.torch import attention

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def register() -> None:
    """Let TabPFN's models compute their attention here, on the CPU.

    Results are PyTorch's up to rounding, with gradients where a model is trained. Tensors of a GPU stay with
    TabPFN's other backends, and so do calls inside of ``torch.compile``.

    Notes
    -----
    For more than 1000 rows on the CPU TabPFN itself asks for ``ignore_pretraining_limits=True``, or for
    TABPFN_ALLOW_CPU_LARGE_DATASET=1 in the environment. Processes that it starts have to register, too.

    Examples
    --------
    >>> from tabpfn import TabPFNClassifier
    >>> from fastattn.integrations.tabpfn import register
    >>> register()
    >>> classifier = TabPFNClassifier(device="cpu")
    """
    attention_backends.register_attention_backend(_BACKEND)


def unregister() -> None:
    """Let TabPFN choose among its own backends again."""
    attention_backends.unregister_attention_backend(_BACKEND.name)


class _Backend:
    """`attention_backends.AttentionBackend`, by its names."""

    name = "fastattn"

    def is_preferred(self, spec: Any) -> bool:
        return spec.device.type == "cpu" and spec.dtype in _DTYPES and not torch.compiler.is_compiling()

    def run(self, query: Any, key: Any, value: Any, **_: Any) -> torch.Tensor:
        result: torch.Tensor = attention(query, key, value, layout="bshd")
        return result


_BACKEND = _Backend()
