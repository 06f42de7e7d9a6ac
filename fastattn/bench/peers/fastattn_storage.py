"""fastattn with weights rounded to bfloat16, as other libraries have them: ``precision="storage"``."""

from __future__ import annotations

from typing import Any

from fastattn.bench.case import Case, Inputs
from fastattn.bench.peers import fastattn_api


def load(num_threads: int) -> fastattn_api.Fastattn:
    fastattn_api.load(num_threads)
    return Rounding()


class Rounding(fastattn_api.Fastattn):
    @staticmethod
    def _options(case: Case, inputs: Inputs) -> dict[str, Any]:
        options = fastattn_api.Fastattn._options(case, inputs)
        return options if case.reduction else options | {"precision": "storage"}
