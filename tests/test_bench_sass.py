"""``python -m benchmarks.sass``: paths through a key loop that is written down here."""

from __future__ import annotations

import pytest

pytest.importorskip("numba_cuda")

from benchmarks import sass

#: A loop of scores, one of values beside one for nonfinite values, and a mask that a full tile skips.
LOOP = """
.L_x_0:
        /*0000*/              @P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0010*/                   LDS R0, [R1] ;
        /*0020*/              @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0030*/                   LDS.128 R0, [R1] ;
        /*0040*/                   FFMA R0, R1, R2, R0 ;
        /*0050*/              @P1 BRA `(.L_x_2) ;
        /*0060*/                   STL [R1], R0 ;
.L_x_3:
        /*0070*/                   STS.128 [R1], R0 ;
        /*0080*/                   FFMA R0, R1, RZ, R0 ;
        /*0090*/                   FFMA R0, R1, R2, R0 ;
        /*00a0*/              @P1 BRA `(.L_x_3) ;
        /*00b0*/              @P2 BRA `(.L_x_0) ;
        /*00c0*/                   EXIT ;
"""


def test_costs_of_a_tile():
    form = sass.form_of("8 rows", "float32", 64, False)
    shape = form.shape
    code = sass.Code(LOOP, form, head_dim=64)
    full, partial = code.tile(True), code.tile(False)
    scores, values = 8 * 64, 8 * shape.tile_k  # a product in each pass
    assert full.fma == partial.fma == scores + values
    assert full.issued == 1 + 3 * scores + 1 + 4 * values + 1
    assert partial.issued == full.issued + 2 * 16  # start and stop of each row
    assert full.shared == scores + 4 * values and full.spills == 1
