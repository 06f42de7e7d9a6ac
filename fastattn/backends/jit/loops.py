"""The loop over a tile around a function, as LLVM IR: Numba would take longer to compile it than the
function.

A loop is a C function of ten `intptr_t`. It returns 0, or bits for reads out of bounds: bit i for the i-th of
the values that the function reads, `checks.OTHER` for those without a bit of their own.

The loops of gradients go over a tile of scores and one of their gradients, and leave out scores whose
gradient is 0, as that of each masked key is. `over_slopes` multiplies a gradient by the derivative of the
function in the score. `over_aux` adds it, times the derivative in each element that the function reads, to
that element's sum: it calls the function once per element that is read, each time with another one's
derivative.

A loop over scores does not know which of them are masked. It puts a mark in the place of a score for which
the function read out of bounds: a NaN that holds the bits. The driver masks the tile, and only the marks that
are left are errors. So what is read for a masked key is no error, whatever masks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.llvm_bindings import create_pass_builder
from numba.core.registry import cpu_target

from fastattn.backends.cpu.fields import MARKS
from fastattn.backends.jit.checks import BITS, OTHER, SLOT, slots_at
from fastattn.backends.jit.codegen.target import TARGET
from fastattn.backends.jit.frontend import Typed
from fastattn.backends.jit.memory import WORD, n_words, read_words
from fastattn.backends.jit.pairs import Pair, make, slope_of
from fastattn.masks.map import TILE_K, TILE_Q, WORDS

#: The mask bits of one word.
WORD_KEYS = 32

_REALS = {4: ir.FloatType(), 8: ir.DoubleType()}


class Machine:
    """Machine code of one loop. It is freed with this object, which must outlive all uses of `address`."""

    def __init__(self, module: Any, name: str, typed: Typed) -> None:
        self.reads = typed.reads  #: the indices that the function depends on
        self.indices = typed.indices  #: see `Typed`
        target, given = _target(), module.as_bitcode()
        _optimize(module, target, vectorize=True)
        if _has_masked_division(module):
            module = llvm.parse_bitcode(given)
            _optimize(module, target, vectorize=False)
        # An engine of its own: Numba's never frees code.
        self._engine = llvm.create_mcjit_compiler(module, target)
        self._engine.finalize_object()
        self.address = int(self._engine.get_function_address(name))


def _target() -> Any:
    """The target machine that Numba compiles for on this host, without gathers."""
    options: dict[str, Any] = {"opt": 3}
    cpu_target.target_context.codegen()._customize_tm_options(options)
    if llvm.get_process_triple().startswith("x86_64"):
        options["features"] += ",+prefer-no-gather"
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(**options)


def _optimize(module: Any, target: Any, *, vectorize: bool) -> None:
    builder = create_pass_builder(target, opt=3, loop_vectorize=vectorize, slp_vectorize=False)
    builder.getModulePassManager().run(module, builder)


def _has_masked_division(module: Any) -> bool:
    """Whether LLVM made a vector of a division under a condition: a block of one masked lane has it.

    LLVM 22 and before get one wrong: with the same operands in all lanes, and a result that is part of an
    address, it divides in the first lane alone. All other lanes read anywhere where that lane is masked.
    """
    return any(
        instruction.opcode in ("udiv", "urem", "sdiv", "srem")
        for function in module.functions
        for block in function.blocks
        if block.name.startswith("pred.")
        for instruction in block.instructions
    )


class LoopWriter:
    """A loop as it is being written, with what its body needs.

    known: words of what the function reads whose values are compiled in, by their number.
    """

    def __init__(
        self,
        module: ir.Module,
        name: str,
        names: Sequence[str],
        typed: Typed,
        kinds: Sequence[Any],
        dtype: np.dtype | None,
        known: Mapping[int, int],
    ) -> None:
        self._typed, self._kinds = typed, kinds
        self.context = cpu_target.target_context
        self.real = _REALS[4 if dtype is None else dtype.itemsize]
        self._type = types.boolean if dtype is None else numba.from_dtype(dtype)
        # The driver's own memory, which nothing else points to.
        pointers = {
            **dict.fromkeys(("s", "top", "change"), self.real.as_pointer()),
            **dict.fromkeys(("words", "flags"), ir.IntType(8).as_pointer()),
            "sums": ir.DoubleType().as_pointer(),
        }
        parameters = [pointers.get(name, WORD) for name in names]
        self.function = ir.Function(module, ir.FunctionType(WORD, parameters), name)
        for name, argument in zip(names, self.function.args, strict=True):
            argument.name = name
            if name in pointers:
                argument.add_attribute("noalias")
        # By default LLVM uses vectors of half the width of AVX-512's. `add` of this set subclass
        # refuses names that llvmlite does not know, such as this one.
        set.add(self.function.attributes, f'"prefer-vector-width"="{8 * TARGET.vector_bytes}"')
        self.builder = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.arguments = dict(zip(names, self.function.args, strict=True))
        self._checks = cgutils.alloca_once_value(self.builder, BITS(0))
        slot = cgutils.alloca_once(self.builder, WORD, size=len(SLOT))
        self._slot = self.builder.ptrtoint(slot, WORD)
        self._error = self.builder.bitcast(slot, BITS.as_pointer())
        self._known = known
        self._values: list[Any] = []

    def read_values(self) -> None:
        """Reads all values of the function, at the start of the loop."""
        self._values = read_words(self.context, self.builder, self.pointer("aux"), self._kinds, self._known)

    def leave_for(self, other: LoopWriter) -> None:
        """Writes a call of `other`, whose result is returned, for calls with the words that `other` knows."""
        builder, are_known = self.builder, ir.Constant(ir.IntType(1), 1)
        for number, count in other._known.items():
            word = self.load(self.pointer("aux"), WORD(number))
            are_known = builder.and_(are_known, builder.icmp_signed("==", word, WORD(count)))
        with builder.if_then(are_known):
            builder.ret(builder.call(other.function, self.function.args))

    def end(self) -> None:
        self.builder.ret(self.builder.zext(self.builder.load(self._checks), WORD))

    def pointer(self, name: str) -> ir.Value:
        """An argument as a pointer to words."""
        return self.builder.inttoptr(self.arguments[name], WORD.as_pointer())

    def load(self, pointer: ir.Value, index: ir.Value) -> ir.Value:
        return self.builder.load(self.builder.gep(pointer, [index]))

    def least(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    @contextmanager
    def each(self, start: ir.Value, stop: ir.Value, step: int = 1) -> Iterator[ir.Value]:
        with cgutils.for_range_slice(self.builder, start, stop, WORD(step), WORD) as (number, _):
            yield number

    @contextmanager
    def each_lane(self, lanes: int) -> Iterator[ir.Value]:
        """Over the lanes of a vector. LLVM would unroll so short a loop before it makes a vector of it."""
        with self.each(WORD(0), WORD(lanes)) as number:
            yield number
        add = self.builder.module.add_metadata
        width = add(["llvm.loop.vectorize.width", ir.IntType(32)(lanes)])
        hints = (add(["llvm.loop.unroll.disable"]), width)
        node = add(hints)
        node.operands = (node, *hints)  # such a node begins with itself
        number.incomings[-1][1].terminator.set_metadata("llvm.loop", node)

    def call(self, score: ir.Value | None, *indices: ir.Value) -> ir.Value:
        """The function's result for these four indices, as a real, which is a mark after an error, or as a
        bit."""
        builder = self.builder
        returned, error = self._result([*([] if score is None else [score]), *indices], self._values)
        builder.store(builder.or_(builder.load(self._checks), error), self._checks)
        result = self.context.cast(builder, returned, self._returned, self._type)
        if score is None:
            return result
        nbytes = self._type.bitwidth // 8
        integer = ir.IntType(8 * nbytes)
        wide = error if integer == BITS else builder.zext(error, integer)
        mark = builder.bitcast(builder.or_(wide, integer(MARKS[nbytes])), self.real)
        return builder.select(builder.icmp_unsigned("==", error, BITS(0)), result, mark)

    @property
    def _returned(self) -> Any:
        return types.unliteral(self._typed.signature.return_type)

    def _result(self, given: Sequence[ir.Value], values: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
        """What the function returns, and the bits of its reads out of bounds."""
        builder, signature = self.builder, self._typed.signature
        module_function = self.context.declare_function(builder.module, self._typed.descriptor)
        builder.store(BITS(0), self._error)
        status, returned = self.context.call_conv.call_function(
            builder, module_function, signature.return_type, signature.args, [*given, self._slot, *values]
        )
        bit = builder.select(status.is_error, BITS(1 << OTHER), BITS(0))
        return returned, builder.or_(builder.load(self._error), bit)

    def slope(self, score: ir.Value, counts: ir.Value, *indices: ir.Value) -> ir.Value:
        """The derivative in the score: of a function of pairs, or what the caller's own derivative returns.

        counts: a bit, whether reads out of bounds are errors.
        """
        builder, kind = self.builder, self._typed.signature.args[0]
        of_pairs = isinstance(kind, Pair)
        given = make(self.context, builder, kind, score, score.type(1)) if of_pairs else score
        returned, error = self._result([given, *indices], self._values)
        error = builder.select(counts, error, BITS(0))
        builder.store(builder.or_(builder.load(self._checks), error), self._checks)
        return self._slope_of(returned) if of_pairs else self.context.cast(
            builder, returned, self._returned, self._type
        )  # fmt: skip

    def _slope_of(self, returned: ir.Value) -> ir.Value:
        if not isinstance(self._returned, Pair):
            return self.real(0)
        return self.context.cast(
            self.builder, slope_of(self.builder, returned), self._returned.real, self._type
        )

    def add_slopes(self, score: ir.Value, change: ir.Value, *indices: ir.Value) -> None:
        """Adds `change` times the derivative in each element that is read to the element's sum."""
        builder, kinds = self.builder, self._typed.signature.args[-len(self._kinds) :]
        slots = slots_at(builder, self._slot)
        # A number of `aux` counts as read once, before all elements.
        numbers = [i for i, kind in enumerate(kinds) if isinstance(kind, Pair)]
        wanted = cgutils.alloca_once(builder, WORD)
        builder.store(WORD(0), wanted)
        loop, end = builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        number, array, values = builder.load(wanted), WORD(-1), list(self._values)
        for i, place in enumerate(numbers):
            is_wanted = builder.icmp_signed("==", number, WORD(i))
            array = builder.select(is_wanted, WORD(place), array)
            slope = builder.uitofp(is_wanted, values[place].type)
            values[place] = make(self.context, builder, kinds[place], values[place], slope)
        at_first = {"n_read": WORD(len(numbers)), "wanted": number, "array": array, "address": WORD(0)}
        for name, value in at_first.items():
            builder.store(value, slots[name])
        returned, error = self._result([score, *indices], values)
        array = builder.load(slots["array"])
        was_read = builder.and_(
            builder.icmp_signed(">=", array, WORD(0)), builder.icmp_unsigned("==", error, BITS(0))
        )
        with builder.if_then(was_read):
            # After what the function reads: of each array its address, the bits of that within an element,
            # the place of its sums, and the address of its gradient where each score has its own element.
            place = builder.add(WORD(n_words(self._kinds)), builder.mul(array, WORD(4)))
            base, within, first, own = (
                self.load(self.pointer("aux"), builder.add(place, WORD(i))) for i in range(4)
            )
            element = builder.lshr(builder.sub(builder.load(slots["address"]), base), within)
            double = ir.DoubleType()
            parts = (x if x.type == double else builder.fpext(x, double)
                     for x in (change, self._slope_of(returned)))  # fmt: skip
            product = builder.fmul(*parts)
            with builder.if_else(builder.icmp_signed("==", own, WORD(0))) as (shares, has_own):
                with shares:
                    to = builder.gep(self.arguments["sums"], [builder.add(first, element)])
                    builder.store(builder.fadd(builder.load(to), product), to)
                with has_own:
                    self._store_own(builder.add(own, builder.shl(element, within)), within, product)
        builder.store(builder.add(number, WORD(1)), wanted)
        more = builder.icmp_signed("<", builder.load(wanted), builder.load(slots["n_read"]))
        builder.cbranch(more, loop, end)
        builder.position_at_end(end)

    def _store_own(self, address: ir.Value, within: ir.Value, gradient: ir.Value) -> None:
        """Stores a gradient as an element of 1 << within bytes."""
        builder = self.builder
        with builder.if_else(builder.icmp_signed("==", within, WORD(2))) as branches:
            for kind, branch in zip(_REALS.values(), branches, strict=True):
                with branch:
                    x = gradient if gradient.type == kind else builder.fptrunc(gradient, kind)
                    builder.store(x, builder.inttoptr(address, kind.as_pointer()))


def _compiled(
    write: Callable[[LoopWriter], None],
    names: Sequence[str],
    typed: Typed,
    kinds: Sequence[Any],
    dtype: np.dtype | None,
    known: Mapping[int, int],
) -> Machine:
    """Machine code of the loop whose body `write` writes.

    known: words as they are at the first call. A second body has them compiled in, and serves all
    calls in which they are the same. There LLVM unrolls a function's loop over a small array, and can make
    vectors of the loop over scores.
    """
    library = typed.library
    module = library.create_ir_module("fastattn.loop")

    def loop(name: str, known: Mapping[int, int]) -> LoopWriter:
        return LoopWriter(module, name, names, typed, kinds, dtype, known)

    with cpu_target.target_context.push_code_library(library):
        main = loop("fastattn.loop", {})
        if known:
            special = loop("fastattn.known", known)
            special.read_values()
            write(special)
            special.end()
            main.leave_for(special)
        main.read_values()
        write(main)
        main.end()
    library.add_ir_module(module)
    for other in library._linking_libraries:
        library._final_module.link_in(other._get_module_for_linking(), preserve=True)
    for function in library._final_module.functions:
        if not function.is_declaration and function.name != main.function.name:
            function.linkage = "internal"
    return Machine(library._final_module, main.function.name, typed)


_SCORES = ("s", "top", "ld", "n", "stops", "key0", "b", "row_h", "row_i", "aux")


@cache
def over_lanes(is_grouped: bool, lanes: int) -> Callable[..., Machine]:
    """The scores of a tile with query rows as lanes, in `n` vectors; `top` becomes the maximum of itself and
    each lane's scores.

    is_grouped: the rows are of several heads. Else they are consecutive, and the last is repeated in the
    lanes past it.
    lanes: of a vector. It is compiled in, so that what depends on the row alone is computed once per vector.
    """

    def write(loop: LoopWriter) -> None:
        builder, at = loop.builder, loop.arguments
        ld, ends, heads, rows = at["ld"], loop.pointer("stops"), loop.pointer("row_h"), loop.pointer("row_i")
        head, row = loop.load(heads, WORD(0)), loop.load(rows, WORD(0))
        last = loop.load(rows, builder.sub(ld, WORD(1)))
        # Vector by vector: a lane's next key is read from the same cache line, mostly.
        with loop.each(WORD(0), at["n"]) as vector:
            first = builder.mul(vector, WORD(lanes))
            with loop.each(WORD(0), loop.load(ends, vector)) as j:
                line, key = builder.gep(at["s"], [builder.mul(j, ld)]), builder.add(at["key0"], j)
                with loop.each_lane(lanes) as number:
                    lane = builder.add(first, number)
                    slot, largest = builder.gep(line, [lane]), builder.gep(at["top"], [lane])
                    if is_grouped:
                        h, i = loop.load(heads, lane), loop.load(rows, lane)
                    else:
                        h, i = head, loop.least(builder.add(row, lane), last)
                    x, top = loop.call(builder.load(slot), at["b"], h, i, key), builder.load(largest)
                    builder.store(x, slot)
                    builder.store(builder.select(builder.fcmp_ordered(">", x, top), x, top), largest)

    return partial(_compiled, write, _SCORES)


def is_zero(builder: Any, x: ir.Value) -> ir.Value:
    return builder.fcmp_ordered("==", x, x.type(0))


_CHANGES = ("s", "change", "ld", "n", "n_keys", "key0", "b", "row_h", "row_i", "aux")


def over_slopes(is_grouped: bool) -> Callable[..., Machine]:
    """The gradients `change` of the function's values for the scores of a tile become those of the scores.
    The first `n` of the `ld` lanes are rows. is_grouped: see `over_lanes`."""

    def write(loop: LoopWriter) -> None:
        builder, at = loop.builder, loop.arguments
        heads, rows = loop.pointer("row_h"), loop.pointer("row_i")
        head, row = loop.load(heads, WORD(0)), loop.load(rows, WORD(0))
        last = loop.load(rows, builder.sub(at["n"], WORD(1)))
        with loop.each(WORD(0), at["n_keys"]) as j:
            first, key = builder.mul(j, at["ld"]), builder.add(at["key0"], j)
            scores, changes = (builder.gep(at[name], [first]) for name in ("s", "change"))
            with loop.each(WORD(0), at["ld"]) as lane:
                if is_grouped:
                    h, i = loop.load(heads, lane), loop.load(rows, lane)
                else:
                    h, i = head, loop.least(builder.add(row, lane), last)
                place = builder.gep(changes, [lane])
                score, change = builder.load(builder.gep(scores, [lane])), builder.load(place)
                is_none = is_zero(builder, change)
                counts = builder.and_(builder.not_(is_none), builder.icmp_signed("<", lane, at["n"]))
                product = builder.fmul(change, loop.slope(score, counts, at["b"], h, i, key))
                builder.store(builder.select(is_none, change, product), place)

    return partial(_compiled, write, _CHANGES)


def _write_aux(loop: LoopWriter) -> None:
    builder, at = loop.builder, loop.arguments
    heads, rows = loop.pointer("row_h"), loop.pointer("row_i")
    # Row by row: what is read for consecutive keys lies side by side, mostly, and so do its sums.
    with loop.each(WORD(0), at["n"]) as lane:
        h, i = loop.load(heads, lane), loop.load(rows, lane)
        with loop.each(WORD(0), at["n_keys"]) as j:
            place, key = builder.add(builder.mul(j, at["ld"]), lane), builder.add(at["key0"], j)
            score, change = (builder.load(builder.gep(at[name], [place])) for name in ("s", "change"))
            with builder.if_then(builder.not_(is_zero(builder, change))):
                loop.add_slopes(score, change, at["b"], h, i, key)


#: Adds the gradients of the elements of `aux` to `sums`, one score after another.
over_aux = partial(_compiled, _write_aux, (*_CHANGES, "sums"))


def _write_rows(loop: LoopWriter) -> None:
    builder, at = loop.builder, loop.arguments
    heads, rows = loop.pointer("row_h"), loop.pointer("row_i")
    with loop.each(WORD(0), at["n"]) as r:
        line = builder.gep(at["s"], [builder.mul(r, at["ld"])])
        h, i = loop.load(heads, r), loop.load(rows, r)
        with loop.each(WORD(0), at["stops"]) as j:
            slot = builder.gep(line, [j])
            new = loop.call(builder.load(slot), at["b"], h, i, builder.add(at["key0"], j))
            builder.store(new, slot)


#: The scores of a row tile: `n` rows, `ld` elements apart, of `stops` keys each; `top` is not used.
over_rows = partial(_compiled, _write_rows, _SCORES)


_MASK = ("words", "flags", "first", "stop", "heads", "grid_q", "grid_k", "len_q", "len_k", "aux")


def _write_mask(loop: LoopWriter) -> None:
    builder, at = loop.builder, loop.arguments
    byte = ir.IntType(8)
    row_nbytes = WORD(4 * WORDS)
    with loop.each(at["first"], at["stop"]) as tile:
        tile_k, rest = builder.srem(tile, at["grid_k"]), builder.sdiv(tile, at["grid_k"])
        tile_q, plane = builder.srem(rest, at["grid_q"]), builder.sdiv(rest, at["grid_q"])
        b, h = builder.sdiv(plane, at["heads"]), builder.srem(plane, at["heads"])
        row0, key0 = builder.mul(tile_q, WORD(TILE_Q)), builder.mul(tile_k, WORD(TILE_K))
        n_rows = loop.least(WORD(TILE_Q), builder.sub(at["len_q"], row0))
        n_keys = loop.least(WORD(TILE_K), builder.sub(at["len_k"], key0))
        number = builder.sub(tile, at["first"])
        to = builder.gep(at["words"], [builder.mul(number, builder.mul(WORD(TILE_Q), row_nbytes))])
        cgutils.memset(builder, at["flags"], WORD(TILE_K), byte(0))
        cgutils.memset(builder, to, builder.mul(WORD(TILE_Q), row_nbytes), byte(0))
        with loop.each(WORD(0), n_rows) as r:
            i = builder.add(row0, r)
            with loop.each(WORD(0), n_keys) as j:
                allowed = loop.call(None, b, h, i, builder.add(key0, j))
                builder.store(builder.zext(allowed, byte), builder.gep(at["flags"], [j]))
            line = builder.gep(to, [builder.mul(r, row_nbytes)])
            vector = ir.VectorType(byte, WORD_KEYS)
            for word in range(WORDS):
                flags = builder.gep(at["flags"], [WORD(WORD_KEYS * word)])
                x = builder.load(builder.bitcast(flags, vector.as_pointer()), align=1)
                bits = builder.bitcast(builder.icmp_unsigned("!=", x, ir.Constant(vector, None)), BITS)
                slot = builder.gep(line, [WORD(4 * word)])
                builder.store(bits, builder.bitcast(slot, BITS.as_pointer()), align=4)


def over_mask(typed: Typed, kinds: Sequence[Any], _: np.dtype, known: Mapping[int, int]) -> Machine:
    """The bits of the tiles first .. stop - 1 of a mask map, of TILE_Q rows of WORDS words each; past the
    lengths they are 0. `flags` has room for TILE_K bytes."""
    return _compiled(_write_mask, _MASK, typed, kinds, None, known)
