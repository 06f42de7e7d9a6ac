"""The caller's function, compiled by Numba with passes of our own.

Numba's own passes come first and last; between them

    prune      replaces Numba's: keeps branches on captured arrays and floats
    inline     inlines all calls of Python functions, compiled by Numba or not, so that one function is left
    rewrite    gives literals the scores' dtype, replaces exp, exp2 and tanh by ours, makes captured arrays
               and floats arguments, and reads elements of arrays by `checks.CHECKED`; where a derivative is
               asked for, it replaces functions and operators by those of `derivatives`

and `lowering` takes the place of Numba's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numba.core import compiler, ir
from numba.core.analysis import dead_branch_prune
from numba.core.compiler_machinery import FunctionPass, register_pass
from numba.core.inline_closurecall import InlineWorker, callee_ir_validator
from numba.core.ir_utils import guard
from numba.core.postproc import PostProcessor
from numba.core.registry import cpu_target
from numba.core.untyped_passes import DeadBranchPrune, InlineInlinables

from fastattn.backends.jit import derivatives, literals, vector_math
from fastattn.backends.jit.checks import CHECKED, OTHER, static_item
from fastattn.backends.jit.identity import as_function, holds_array
from fastattn.backends.jit.lowering import Lowering, refuse, refuse_python

#: Allowed in a caller's arithmetic: to contract multiply-adds, and to multiply by a reciprocal for a
#: division.
FASTMATH = {"contract", "arcp"}

#: More inlined calls than this within one function are taken for a recursion.
MAX_INLINED = 256


class Typed(NamedTuple):
    """A function that Numba has typed and lowered, but not compiled to machine code."""

    library: Any
    descriptor: Any
    signature: Any
    reads: frozenset[str]  #: the names of the parameters that it depends on
    indices: dict[str, tuple[str, ...]]  #: see `_indices_of_reads`


class _Task(NamedTuple):
    """What the passes below know of the function to compile."""

    first_value: int  #: index among the arguments of the caller's first: of `aux`, or captured
    first_captured: int  #: index of the first captured one
    captured: Sequence[Any]  #: arrays and floats from outside, in the order of the arguments
    checks_indices: bool
    has_weak_literals: bool
    derives: bool  #: some arguments are pairs of value and derivative, see `pairs`
    reads: set[str]  #: filled in: the names of the parameters that the function depends on
    indices: dict[str, tuple[str, ...]]  #: filled in: see `_indices_of_reads`


def typed(
    call: Callable[..., Any],
    arguments: Sequence[Any],
    first_value: int,
    first_captured: int,
    captured: Sequence[Any],
    checks_indices: bool,
    has_weak_literals: bool,
    derives: bool = False,
) -> Typed:
    """Types and lowers `call` for arguments of these types, one of which is named ``checks``."""
    task = _Task(first_value, first_captured, captured, checks_indices, has_weak_literals, derives, set(), {})
    call.task = task  # type: ignore[attr-defined]
    flags = compiler.Flags()
    options = {
        "nopython": True, "_nrt": True, "error_model": "numpy", "fastmath": FASTMATH, "forceinline": True,
        "boundscheck": checks_indices, "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
    }  # fmt: skip
    cpu_target.options.parse_as_flags(flags, options)
    flags.no_compile = True
    result = compiler.compile_extra(
        cpu_target.typing_context, cpu_target.target_context, call, tuple(arguments), None, flags, {},
        pipeline_class=_Compiler,
    )  # fmt: skip
    return Typed(result.library, result.fndesc, result.signature, frozenset(task.reads), task.indices)


class _Compiler(compiler.CompilerBase):
    """Numba's compiler with our passes."""

    def define_pipelines(self) -> list[Any]:
        steps = compiler.DefaultPassBuilder.define_nopython_pipeline(self.state)
        steps.add_pass_after(_Inline, InlineInlinables)
        steps.add_pass_after(_Rewrite, _Inline)
        return [_with_ours(steps)]


def _with_ours(steps: Any) -> Any:
    """Numba's passes, with ours in the place of some."""
    ours = {Lowering.replaced: Lowering, DeadBranchPrune: _Prune}
    steps.passes = [(ours.get(step, step), what) for step, what in steps.passes]
    steps.finalize()
    return steps


def value_from_outside(func_ir: Any, definition: Any) -> Any:
    """The Python value of a definition in Numba's IR, also of one in a module. None where it has none."""
    if isinstance(definition, (ir.Global, ir.FreeVar, ir.Const)):
        return definition.value
    if isinstance(definition, ir.Expr) and definition.op == "getattr":
        module = value_from_outside(func_ir, guard(ir_definition, func_ir, definition.value))
        if isinstance(module, ModuleType):
            return getattr(module, definition.attr, None)
    return None


def ir_definition(func_ir: Any, variable: Any) -> Any:
    try:
        return func_ir.get_definition(variable)
    except KeyError:
        return None


def _is_captured(definition: Any, found: Any) -> bool:
    """Whether a value from outside is read at each call; a float of a module is compiled in."""
    is_variable = isinstance(definition, (ir.Global, ir.FreeVar)) and type(found) is float
    return is_variable or isinstance(found, np.ndarray)


def _is_argument(statement: Any) -> bool:
    return isinstance(statement, ir.Assign) and isinstance(statement.value, ir.Arg)


class _Pass(FunctionPass):
    """A pass that Numba can construct: the constructor of Numba's class is abstract."""

    def __init__(self) -> None:
        super().__init__()


@register_pass(mutates_CFG=True, analysis_only=False)
class _Prune(_Pass):
    """Removes branches that constants decide. What is captured is read at each call, and is no constant."""

    _name = "fastattn_prune"

    def run_pass(self, state: Any) -> bool:
        definitions = state.func_ir._definitions
        hidden = {
            name: known
            for name, known in definitions.items()
            if any(_is_captured(it, value_from_outside(state.func_ir, it)) for it in known)
        }
        definitions.update({name: [] for name in hidden})
        dead_branch_prune(state.func_ir, state.args)
        definitions.update(hidden)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _Inline(_Pass):
    _name = "fastattn_inline"

    def run_pass(self, state: Any) -> bool:
        if not hasattr(state.func_id.func, "task"):
            first = state.func_ir.blocks[min(state.func_ir.blocks)].body
            inside = next((it for it in first if not _is_argument(it)), first[-1])
            refuse("a `with` block leaves compiled code, and takes the GIL", inside.loc)
        worker = InlineWorker(
            state.typingctx, state.targetctx, state.locals, state.pipeline, state.flags, callee_ir_validator
        )
        worker._compiler_pipeline = lambda state: _with_ours(
            compiler.DefaultPassBuilder.define_untyped_pipeline(state)
        )
        waiting, n_inlined = list(state.func_ir.blocks.values()), 0
        while waiting:
            block = waiting.pop()
            for index, statement in enumerate(block.body):
                call = statement.value if isinstance(statement, ir.Assign) else None
                if not (isinstance(call, ir.Expr) and call.op == "call"):
                    continue
                callee = value_from_outside(state.func_ir, ir_definition(state.func_ir, call.func))
                refuse_python(callee, statement.loc)
                function = as_function(callee)
                if function is None:
                    continue
                n_inlined += 1
                if n_inlined > MAX_INLINED:
                    raise TypeError(f"{function.__name__!r} calls itself, or calls are nested too deeply")
                found = worker.inline_function(state.func_ir, block, index, function)
                waiting += [inlined for _, inlined in found[3]]
                break  # the rest of the block is now a block of its own
        PostProcessor(state.func_ir).run()
        task = state.func_id.func.task
        task.reads.update(_parameters_read(state.func_ir))
        task.indices.update(_indices_of_reads(state.func_ir))
        return True


def _parameters_read(func_ir: Any) -> Iterator[str]:
    """The names of the parameters that the result depends on, or what the function does."""
    sources: dict[str, list[Any]] = {}
    needed = []
    for block in func_ir.blocks.values():
        for statement in block.body:
            if isinstance(statement, ir.Assign):
                sources.setdefault(statement.target.name, []).append(_source(func_ir, statement.value))
            if not isinstance(statement, ir.Assign) or getattr(statement.value, "op", "") == "call":
                needed += [variable.name for variable in statement.list_vars()]
    seen = set()
    while needed:
        name = needed.pop()
        if name in seen:
            continue
        seen.add(name)
        for value in sources.get(name, ()):
            if isinstance(value, ir.Arg):
                yield value.name
            elif isinstance(value, ir.Var):
                needed.append(value.name)
            elif isinstance(value, ir.Expr):
                needed += [variable.name for variable in value.list_vars()]


def _indices_of_reads(func_ir: Any) -> dict[str, tuple[str, ...]]:
    """For each parameter that one place in the code indexes, and nothing else uses: the parameters that are
    the indices there, "" for an integer in the code. Parameters with other indices are left out."""
    uses: dict[str, list[tuple[str, ...] | None]] = {}
    for block in func_ir.blocks.values():
        for statement in block.body:
            value = statement.value if isinstance(statement, ir.Assign) else statement
            if isinstance(value, (ir.Expr, ir.Stmt)):
                is_read = getattr(value, "op", "") == "getitem"
                for variable in value.list_vars():
                    is_array = is_read and variable is value.value
                    for name in _parameters_held(func_ir, variable):
                        uses.setdefault(name, []).append(_indices(func_ir, value.index) if is_array else None)
    return {name: found[0] for name, found in uses.items() if len(found) == 1 and found[0] is not None}


def _parameters_held(func_ir: Any, variable: Any) -> set[str]:
    """The parameters that a variable may be, on any path."""
    names, seen, waiting = set(), set(), [variable.name]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            for value in func_ir._definitions.get(name, ()):
                if isinstance(value, ir.Arg):
                    names.add(value.name)
                elif isinstance(value, ir.Var):
                    waiting.append(value.name)
    return names


def _indices(func_ir: Any, index: Any) -> tuple[str, ...] | None:
    made = ir_definition(func_ir, index)
    is_tuple = isinstance(made, ir.Expr) and made.op == "build_tuple"
    names = []
    for item in [ir_definition(func_ir, item) for item in made.items] if is_tuple else [made]:
        if not isinstance(item, ir.Arg) and not (isinstance(item, ir.Const) and type(item.value) is int):
            return None
        names.append(item.name if isinstance(item, ir.Arg) else "")
    return tuple(names)


def _source(func_ir: Any, value: Any) -> Any:
    """The value. For an item of a tuple that the function makes, that item alone."""
    if isinstance(value, ir.Expr) and value.op == "static_getitem" and isinstance(value.index, int):
        made = ir_definition(func_ir, value.value)
        if isinstance(made, ir.Expr) and made.op == "exhaust_iter":  # `b, h, q, k = indices`
            made = ir_definition(func_ir, made.value)
        if isinstance(made, ir.Expr) and made.op == "build_tuple" and value.index < len(made.items):
            return made.items[value.index]
    return value


@register_pass(mutates_CFG=False, analysis_only=False)
class _Rewrite(_Pass):
    _name = "fastattn_rewrite"

    def run_pass(self, state: Any) -> bool:
        rewriting = _Rewriting(state)
        for block in state.func_ir.blocks.values():
            body: list[Any] = []
            for statement in block.body:
                if isinstance(statement, ir.Assign):
                    rewriting.rewrite(statement, block.scope, body)
                body.append(statement)
            block.body = body
        if rewriting.derives:
            state.typingctx.refresh()  # replacements are made when they are first needed
        return True


class _Rewriting:
    """Rewrites the assignments of one function."""

    def __init__(self, state: Any) -> None:
        self._ir, self._typing = state.func_ir, state.typingctx
        self._task: _Task = state.func_id.func.task
        self.derives = self._task.derives
        self._names = state.func_ir.arg_names
        self._scope = next(iter(state.func_ir.blocks.values())).scope

    def rewrite(self, statement: Any, scope: Any, body: list[Any]) -> None:
        """Changes the assigned value; appends statements that must precede it to `body`."""
        value = statement.value
        if isinstance(value, ir.Expr) and value.op in ("getitem", "static_getitem"):
            if self._task.checks_indices or self.derives:
                self._read_checked(statement, scope, body)
            return
        if isinstance(value, ir.Expr) and value.op != "getattr":
            if value.op in ("call", "unary", "binop", "inplace_binop"):
                self._operate(statement, scope, body)
            return
        found = value_from_outside(self._ir, value)
        if _is_captured(value, found):
            statement.value = self._argument(found)
        elif holds_array(found):
            statement.value = self._tuple(found, value.loc, scope, body)
        elif self._task.has_weak_literals and type(found) is float:
            statement.value = ir.Const(literals.number(found), value.loc)
        elif as_function(found) is not None:
            statement.value = ir.Const(None, value.loc)  # its calls are inlined; there is no other use
        elif (ours := vector_math.instead_of(found)) is not found:
            statement.value = ir.Global(ours.__name__, ours, value.loc)
        elif isinstance(value, (ir.Global, ir.FreeVar)):
            if type(found) is np.float16:  # which Numba has no constants of
                statement.value = ir.Const(np.float32(found), value.loc)
            else:
                self._check_known(value)

    def _operate(self, statement: Any, scope: Any, body: list[Any]) -> None:
        """Replaces a function that is called, or an operator."""
        value, is_weak = statement.value, self._task.has_weak_literals
        operate = literals.operator_of(value)
        if operate is not None:
            operands = [value.value] if value.op == "unary" else [value.lhs, value.rhs]
        elif not value.kws and value.args:
            operate = value_from_outside(self._ir, ir_definition(self._ir, value.func))
            operands = list(value.args)
        if not callable(operate):
            return
        if not self.derives:
            is_where = operate is np.where and len(operands) == 3
            ours = literals.WHERE[is_weak] if is_where else literals.operation(operate, is_weak)
        elif operate is operator.pow and self._constant(operands[1]) in derivatives.PRODUCTS:
            ours = derivatives.power(self._constant(operands[1]), is_weak)
        else:
            while operate in (min, max) and len(operands) > 2:
                first = scope.redefine("$first", value.loc)
                made = ir.Assign(ir.Expr.call(value.func, operands[:2], (), value.loc), first, value.loc)
                self._operate(made, scope, body)
                body.append(made)
                operands[:2] = [first]
            ours = derivatives.replacement(operate, len(operands), is_weak)
        if ours is not None:
            self._call(statement, ours, operands, scope, body)

    def _constant(self, variable: Any) -> Any:
        """An integer in the code, or None."""
        definition = ir_definition(self._ir, variable)
        return (
            definition.value if isinstance(definition, ir.Const) and type(definition.value) is int else None
        )

    def _check_known(self, value: Any) -> None:
        """Raises for a global, or what a closure holds, that Numba has no type for."""
        try:
            if value.value is not ir.UNDEFINED:
                self._typing.resolve_value_type(value.value)
        except Exception:  # Numba's errors have no common base class
            refuse(
                f"{value.name}, from outside of the function, is of {type(value.value)}: it may read numbers "
                f"of up to 64 bits, arrays, and tuples of these", value.loc,
            )  # fmt: skip

    def _argument(self, captured: Any) -> Any:
        return self._scope.get_exact(self._names[self._argument_of(captured)])

    def _tuple(self, captured: Any, loc: Any, scope: Any, body: list[Any]) -> Any:
        """A tuple from outside, or a namedtuple, made of what it holds: its arrays are arguments."""

        def variable(value: Any) -> Any:
            name = scope.redefine("$item", loc)
            body.append(ir.Assign(value, name, loc))
            return name

        items = []
        for item in captured:
            if isinstance(item, np.ndarray):
                items.append(self._argument(item))
            elif holds_array(item):
                items.append(variable(self._tuple(item, loc, scope, body)))
            else:
                constant = ir.Global(f"{item!r} in a tuple", item, loc)
                self._check_known(constant)
                items.append(variable(constant))
        if type(captured) is tuple:
            return ir.Expr.build_tuple(items, loc)
        kind = variable(ir.Global(type(captured).__name__, type(captured), loc))
        return ir.Expr.call(kind, items, (), loc)

    def _argument_of(self, captured: Any) -> int:
        """The index among the arguments of a captured array or float."""
        number = next(i for i, known in enumerate(self._task.captured) if known is captured)
        return self._task.first_captured + number

    def _read_checked(self, statement: Any, scope: Any, body: list[Any]) -> None:
        value = statement.value
        bit = OTHER
        source = ir_definition(self._ir, value.value)
        is_flat = isinstance(source, ir.Expr) and source.op == "getattr" and source.attr == "flat"
        if is_flat:
            source = ir_definition(self._ir, source.value)
        if isinstance(source, ir.Arg):
            bit = min(source.index - self._task.first_value, OTHER)
        elif isinstance(found := value_from_outside(self._ir, source), np.ndarray):
            bit = min(self._argument_of(found) - self._task.first_value, OTHER)
        index = value.index if value.op == "getitem" else value.index_var
        is_known = bit != OTHER or is_flat or (type(value.index) is tuple and not value.index)
        checks = self._scope.get_exact("checks")
        if value.op == "static_getitem" and (not is_known or index is None):
            # Mostly of a tuple, whose items have different types.
            if self.derives and type(value.index) is int and index is not None:
                self._call(statement, static_item(value.index), (value.value, index, checks), scope, body)
            return
        self._call(statement, CHECKED[bit], (value.value, index, checks), scope, body)

    def _call(self, statement: Any, function: Any, arguments: Any, scope: Any, body: list[Any]) -> None:
        loc = statement.value.loc
        name = scope.redefine("$ours", loc)
        body.append(ir.Assign(ir.Global(function.__name__, function, loc), name, loc))
        statement.value = ir.Expr.call(name, arguments, (), loc)
