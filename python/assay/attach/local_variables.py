"""Local variables of a function, by rewriting its source in memory and giving the function the new code.

The function object stays: its identity, closure, defaults, annotations, decorators and every name that is bound to it.
Line numbers and file name stay, so that tracebacks and debuggers show the source that is there.
"""

from __future__ import annotations

import __future__

import ast
import copy
import functools
import inspect
import re
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from . import compiled
from .calls import Call, busy, inside
from .probes import NotFoundError, Probe, nearest

if TYPE_CHECKING:
    from .session import Session

Then = Callable[[dict[str, object], Call], object]

EXIT = "last"


class Wanted:
    """One variable of interest: "k#2" is k behind its second assignment in the source, "k" behind each, "k#last" what k
    holds when the function returns."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.name, _, which = text.partition("#")
        self.at_exit = which == EXIT
        self.number = int(which) if which and not self.at_exit else 0  # 0: every


def rewrite(function: FunctionType, names: list[str], probe_name: str, original: CodeType) -> CodeType:
    """Code for ``function`` that calls the global ``probe_name``(number of the name, value, first argument), which gives
    the value, wherever one of ``names`` has been assigned. Raises NotFoundError when the source is not there or a name is
    never assigned. original: the function's code as it was imported."""
    wanted = [Wanted(n) for n in names]
    code = function.__code__
    definition = _definition(function, original)
    definition.decorator_list = []
    _clear_defaults(definition)
    arguments = definition.args
    first_argument = next((a.arg for a in (*arguments.posonlyargs, *arguments.args)), None)
    if first_argument is not None and _deletes(definition, first_argument):
        first_argument = None
    own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    flags = _flags(definition, {w.name for w in wanted if w.at_exit}, original)
    inserter = _Inserter(wanted, probe_name, first_argument, flags)
    definition.body = inserter.body(definition.body)
    for w in wanted:
        there = inserter.counts.get(w.name, 0)
        if there >= max(w.number, 1) or (w.at_exit and w.name in own):
            continue
        if there:
            raise NotFoundError(f"{function.__qualname__} assigns {w.name} {there} time(s), not {w.number}")
        if w.name in own:
            raise NotFoundError(f"{function.__qualname__} has {w.name}, but assigns nothing to it; {w.name}#last is there")
        known = sorted(inserter.counts)
        raise NotFoundError(f"{function.__qualname__} has no local variable {w.name}{nearest(w.name, known)}")
    if any(w.at_exit for w in wanted):
        definition.body = _AtExit(wanted, inserter).apply(definition.body)
    documented = ast.get_docstring(definition, clean=False) is not None
    given = {a.arg for a in _arguments(definition)}
    at = definition.body[0]
    definition.body[documented:documented] = [_set(flag, name in given, at) for name, flag in flags.items()]
    return _compile(function, definition)


def _flags(definition: ast.AST, names: set[str], code: CodeType) -> dict[str, str]:
    """For names that are read at the return: those of variables that say whether they are bound. Dynamo would refuse the
    whole function where one is not. None for a name that is bound or unbound in ways which are not counted, nor where
    the function may look at its own variables; there a NameError tells."""
    if {"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"} & {*code.co_names}:
        return {}
    other: set[str] = set()
    for node in ast.walk(definition):
        if isinstance(node, ast.alias):
            other.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            other.update(node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)):
            other.add(node.name or "")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
            other.add(node.id)
    return {name: f"_assay_has_{name}" for name in sorted(names - other)}


def _set(flag: str, value: bool, at: ast.AST) -> ast.stmt:
    """flag = value"""
    statement = ast.Assign(targets=[ast.Name(flag, ast.Store())], value=ast.Constant(value))
    for node in ast.walk(statement):
        ast.copy_location(node, at)
    return statement


def _arguments(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    a = definition.args
    every = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
    return [argument for argument in every if argument is not None]


def _definition(function: FunctionType, original: CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """A copy of the function's definition in its source file, which is compared with the code that was imported."""
    try:
        lines, _ = inspect.findsource(original)
    except (OSError, TypeError):
        raise NotFoundError(
            f"the source of {function.__qualname__} is not available ({original.co_filename})"
        ) from None
    try:
        definitions, codes = _read(original.co_filename, "".join(lines))
    except (SyntaxError, ValueError) as problem:
        raise NotFoundError(f"the source of {function.__qualname__} cannot be read: {problem}") from None
    if original.co_name == "<lambda>":
        raise NotFoundError(f"the source of {function.__qualname__} is not a plain function ({original.co_filename})")
    place = original.co_firstlineno, original.co_name
    if place not in definitions or original.co_code not in [c.co_code for c in codes if _place(c) == place]:
        raise NotFoundError(
            f"{original.co_filename} does not have the {function.__qualname__} that runs: was it changed since?"
        )
    return copy.deepcopy(definitions[place])


@functools.lru_cache(maxsize=1)
def _read(
    path: str, source: str
) -> tuple[dict[tuple[int, str], ast.FunctionDef | ast.AsyncFunctionDef], list[CodeType]]:
    """All functions of a source file: their definitions by place, and their code."""
    tree = ast.parse(source)
    definitions = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            definitions[first, node.name] = node
    codes = [compile(tree, path, "exec", dont_inherit=True)]
    for code in codes:  # which grows
        codes.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
    return definitions, codes


def _place(code: CodeType) -> tuple[int, str]:
    return code.co_firstlineno, code.co_name


def _deletes(definition: ast.AST, name: str) -> bool:
    """Whether ``del name`` is in the function: behind it the name cannot be read."""
    return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Del) for n in ast.walk(definition))


def _clear_defaults(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    """Defaults and annotations belong to the function object, which stays; here they would only be evaluated again."""
    arguments = definition.args
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if d is None else ast.Constant(None) for d in arguments.kw_defaults]
    for a in _arguments(definition):
        a.annotation = None
    definition.returns = None


def _compile(function: FunctionType, definition: ast.FunctionDef | ast.AsyncFunctionDef) -> CodeType:
    code = function.__code__
    # The closure's names as locals of an outer function; a class of the method's class name mangles its private names
    # and has the cell that super() needs. The names of both are bound here alone: to the function they are what they were.
    path = function.__qualname__.split(".")
    inner: ast.stmt = definition
    nest = [definition.name]
    if len(path) > 1 and path[-2] != "<locals>":
        inner = ast.ClassDef(name=path[-2], bases=[], keywords=[], body=[definition], decorator_list=[])
        nest.insert(0, path[-2])
    bind: list[ast.stmt] = [ast.Global([nest[0]])] if nest[0] not in code.co_freevars else []
    bind += [
        ast.Assign(targets=[ast.Name(n, ast.Store())], value=ast.Constant(None))
        for n in code.co_freevars
        if n != "__class__" or inner is definition
    ]
    empty = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    outer = ast.FunctionDef(name="outer", args=empty, body=[*bind, inner], decorator_list=[])
    if hasattr(ast, "TypeAlias"):  # 3.12
        nodes: list[Any] = [outer, definition, inner]
        for node in nodes:
            node.type_params = []
    module = ast.Module(body=[outer], type_ignores=[])
    ast.fix_missing_locations(module)
    future = code.co_flags & _FUTURE_FLAGS
    compiled = compile(module, code.co_filename, "exec", flags=future, dont_inherit=True)
    found = _find(compiled, ["outer", *nest])
    if found is None or found.co_freevars != code.co_freevars:
        raise NotFoundError(f"{function.__qualname__} cannot be rewritten: its closure would change")
    changes = {"co_firstlineno": code.co_firstlineno, "co_name": code.co_name}
    if hasattr(code, "co_qualname"):
        changes["co_qualname"] = code.co_qualname
    return found.replace(**changes)  # type: ignore[arg-type]


_FUTURE_FLAGS = __future__.annotations.compiler_flag  # the others are always on in 3.10


def _find(code: CodeType, path: list[str]) -> CodeType | None:
    """The code of a definition in a definition, and so on."""
    found: CodeType | None = code
    for name in path:
        inner = found.co_consts if found is not None else ()
        found = next((c for c in inner if isinstance(c, CodeType) and c.co_name == name), None)
    return found


class _OwnScope(ast.NodeTransformer):
    """Leaves functions, classes and lambdas inside the function as they are: their variables are others."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        return node


class _Inserter(_OwnScope):
    """Puts a call behind each wanted assignment of the function itself; nested functions and classes are their own.

    What := assigns is observed inside of it, since an expression need not be evaluated: ``a and (k := b)``."""

    def __init__(
        self, wanted: list[Wanted], probe_name: str, first_argument: str | None, flags: dict[str, str]
    ) -> None:
        self.wanted = wanted
        self.flags = flags  # variables that say whether one is bound, by its name
        self.probe_name = probe_name
        self.first_argument = first_argument
        self.counts: dict[str, int] = {}  # assignments seen so far, by name, in the order of the source

    def body(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for statement in statements:
            new = self.visit(statement)
            out.extend(new if isinstance(new, list) else [new])
        return out

    def probe(self, number: int, value: ast.expr, at: ast.AST) -> ast.expr:
        """A call of the probe, which gives the value."""
        first = ast.Constant(None) if self.first_argument is None else ast.Name(self.first_argument, ast.Load())
        call = ast.Call(ast.Name(self.probe_name, ast.Load()), [ast.Constant(number), value, first], [])
        for node in (call, call.func, call.args[0], first):
            ast.copy_location(node, at)
        return call

    def call(self, number: int, name: str, at: ast.AST) -> ast.stmt:
        value = ast.copy_location(ast.Name(name, ast.Load()), at)
        return ast.copy_location(ast.Expr(self.probe(number, value, at)), at)

    def _numbers(self, name: str) -> list[int]:
        """Of the wanted variables that one more assignment of the name is."""
        self.counts[name] = count = self.counts.get(name, 0) + 1
        wanted = enumerate(self.wanted)
        return [i for i, w in wanted if w.name == name and not w.at_exit and w.number in (0, count)]

    def _behind(self, at: ast.AST, *targets: ast.AST | None) -> list[ast.stmt]:
        """Calls behind an assignment to the targets."""
        names = dict.fromkeys(name for target in targets for name in _bound(target))
        calls = [self.call(number, name, at) for name in names for number in self._numbers(name)]
        return [*(_set(self.flags[name], True, at) for name in names if name in self.flags), *calls]

    # ---- expressions

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Any:
        node.value = self.visit(node.value)
        for number in self._numbers(node.target.id):
            node.value = self.probe(number, node.value, node)
        flag = self.flags.get(node.target.id)
        if flag is not None:  # (value, (flag := True))[0]
            says = ast.NamedExpr(ast.Name(flag, ast.Store()), ast.Constant(True))
            both = ast.Tuple([node.value, says], ast.Load())
            node.value = ast.Subscript(both, ast.Constant(0), ast.Load())
            for new in (says, says.target, says.value, both, node.value, node.value.slice):
                ast.copy_location(new, node)
        return node

    # ---- statements: what is evaluated first is counted first

    def visit_Assign(self, node: ast.Assign) -> Any:
        node.value = self.visit(node.value)
        node.targets = [self.visit(target) for target in node.targets]
        return [node, *self._behind(node, *node.targets)]

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        return [self.generic_visit(node), *self._behind(node, node.target)]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is None:
            return node
        node.value = self.visit(node.value)
        return [node, *self._behind(node, node.target)]

    def visit_For(self, node: ast.For | ast.AsyncFor) -> Any:
        node.iter = self.visit(node.iter)
        first = self._behind(node, node.target)
        node.body = [*first, *self.body(node.body)]
        node.orelse = self.body(node.orelse)
        return node

    def visit_AsyncFor(self, node: ast.AsyncFor) -> Any:
        return self.visit_For(node)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> Any:
        first: list[ast.stmt] = []
        for item in node.items:
            item.context_expr = self.visit(item.context_expr)
            first += self._behind(node, item.optional_vars)
        node.body = [*first, *self.body(node.body)]
        return node

    def visit_AsyncWith(self, node: ast.AsyncWith) -> Any:
        return self.visit_With(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> Any:
        if node.type is not None:
            node.type = self.visit(node.type)
        first = self._behind(node, ast.Name(node.name, ast.Store())) if node.name else []
        node.body = [*first, *self.body(node.body)]
        return node

    def visit_match_case(self, node: ast.match_case) -> Any:
        first = self._behind(node.body[0], node.pattern)
        if node.guard is not None:
            node.guard = self.visit(node.guard)
        node.body = [*first, *self.body(node.body)]
        return node


def _bound(target: ast.AST | None) -> list[str]:
    """Names that an assignment's target or a pattern binds."""
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, ast.Starred):
        return _bound(target.value)
    if isinstance(target, (ast.Tuple, ast.List)):
        return [name for part in target.elts for name in _bound(part)]
    if isinstance(target, ast.pattern):
        own = [n for n in (getattr(target, "name", None), getattr(target, "rest", None)) if n is not None]
        parts = [part for part in ast.iter_child_nodes(target) if isinstance(part, ast.pattern)]
        return own + [name for part in parts for name in _bound(part)]
    return []


class _AtExit(_OwnScope):
    """Reads variables before each return, behind the return's own expression, and at the end."""

    def __init__(self, wanted: list[Wanted], inserter: _Inserter) -> None:
        self.wanted = [(i, w) for i, w in enumerate(wanted) if w.at_exit]
        self.inserter = inserter

    def apply(self, body: list[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for statement in body:
            new = self.visit(statement)
            out.extend(new if isinstance(new, list) else [new])
        if not isinstance(body[-1], ast.Return):
            out.extend(self._reads(body[-1]))
        return out

    def _reads(self, at: ast.AST) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for number, w in self.wanted:
            flag = self.inserter.flags.get(w.name)
            if flag is not None:
                test = ast.copy_location(ast.Name(flag, ast.Load()), at)
                reads = ast.If(test=test, body=[self.inserter.call(number, w.name, at)], orelse=[])
                out.append(ast.copy_location(reads, at))
                continue
            # Not bound on this path: nothing to read.
            handler = ast.ExceptHandler(type=ast.Name("NameError", ast.Load()), name=None, body=[ast.Pass()])
            guarded = ast.Try(
                body=[self.inserter.call(number, w.name, at)], handlers=[handler], orelse=[], finalbody=[]
            )
            for node in (guarded, handler, handler.type, *handler.body):
                if node is not None:
                    ast.copy_location(node, at)
            out.append(guarded)
        return out

    def visit_Return(self, node: ast.Return) -> Any:
        if node.value is None:  # the only kind that an asynchronous generator may have
            return [*self._reads(node), node]
        keep = ast.Assign(targets=[ast.Name("_assay_result", ast.Store())], value=node.value)
        give = ast.Return(ast.Name("_assay_result", ast.Load()))
        for new in (keep, give):
            ast.copy_location(new, node)
            for child in ast.walk(new):
                if not hasattr(child, "lineno"):
                    ast.copy_location(child, node)
        return [keep, *self._reads(node), give]


def plain(function: Any, name: str = "") -> FunctionType:
    """The Python function behind a callable: out of our own wrapper, of partials and of decorators, also of those without
    functools.wraps when what they hold in their closure has the name."""
    while True:
        inner = getattr(function, "__wrapped__", None) or getattr(function, "__func__", None)
        if inner is None and isinstance(function, functools.partial):
            inner = function.func
        if inner is None and isinstance(function, FunctionType):
            inner = _held(function, name)
        if inner is None:
            break
        function = inner
    if not isinstance(function, FunctionType):
        raise NotFoundError(f"{function!r} is no Python function: it has no local variables")
    return function


def _held(function: FunctionType, name: str) -> Any:
    """What a decorator's function keeps in its closure under the name that its own is not."""
    if not name or function.__name__ == name:
        return None
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        held = getattr(held, "__func__", held)
        if getattr(held, "__name__", "") == name and callable(held):
            return held
    return None


class _Observed:
    """The local variables that are observed in one function."""

    def __init__(self, session: Session, function: FunctionType) -> None:
        self.session = session
        self.function = function
        self.original = function.__code__
        self.listeners: list[tuple[str, Then, Probe]] = []
        self.key = compiled.register(f"local:{function.__module__}:{function.__qualname__}", self)
        self.global_name = "_assay_local_" + re.sub(r"\W", "_", self.key)
        key = self.key

        def probe(which: int, value: Any, first: Any) -> Any:
            if compiled.is_compiling():
                compiled.observe_value(key, str(which), first, value)
            elif not inside.callback:
                observed.fire(which, value, first)
            return value

        observed = self
        self.probe = probe

    def fire(self, which: int, value: Any, first: Any, label: str | None = None) -> None:
        name, then, probe = self.listeners[which]
        probe.fired += 1
        call = Call(self.function, (first,), {})
        if label is not None:
            call.compiled = True
            call._self = self.session.labelled(label)
        inside.callback = True
        busy.append(None)
        try:
            then({name: value}, call)
        except Exception as problem:
            self.session.failed(f"{self.function.__qualname__}:{name}", problem)
        finally:
            busy.pop()
            inside.callback = False

    def observe_compiled(self, when: str, label: str, names: list[str], values: list[Any]) -> None:
        self.fire(int(when), values[0], None, label)


def observe(session: Session, function: FunctionType, names: list[str], then: Then, probe: Probe) -> None:
    """Gives the function code that calls then({name: value}, call) behind the assignments. Several may share one."""
    observed = _observed.get(function)
    if observed is None:
        observed = _Observed(session, function)
    listeners = [*observed.listeners, *((n, then, probe) for n in names)]
    code = rewrite(function, [n for n, _, _ in listeners], observed.global_name, observed.original)
    observed.listeners = listeners
    function.__globals__[observed.global_name] = observed.probe
    function.__code__ = code
    _observed[function] = observed


_observed: weakref.WeakKeyDictionary[FunctionType, _Observed] = weakref.WeakKeyDictionary()
