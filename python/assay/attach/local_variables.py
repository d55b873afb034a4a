"""Local variables of a function, by rewriting its source in memory and giving the function the new code.

The function object stays: its identity, closure, defaults, annotations, decorators and every name that is bound to it.
Line numbers and file name stay, so that tracebacks and debuggers show the source that is there.
"""

from __future__ import annotations

import __future__

import ast
import copy
import inspect
import re
import textwrap
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


def rewrite(function: FunctionType, names: list[str], probe_name: str) -> CodeType:
    """Code for ``function`` that calls the global ``probe_name``(number of the name, value, first argument) wherever one
    of ``names`` has been assigned. Raises NotFoundError when the source is not there or a name is never assigned."""
    wanted = [Wanted(n) for n in names]
    code = function.__code__
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError):
        raise NotFoundError(f"the source of {function.__qualname__} is not available ({code.co_filename})") from None
    try:
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except SyntaxError as problem:
        raise NotFoundError(f"the source of {function.__qualname__} cannot be read: {problem}") from None
    definition = tree.body[0]
    if not isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)) or definition.name != code.co_name:
        raise NotFoundError(f"the source of {function.__qualname__} is not a plain function ({code.co_filename})")
    definition.decorator_list = []
    arguments = definition.args
    first_argument = [a.arg for a in (*arguments.posonlyargs, *arguments.args)][:1]
    inserter = _Inserter(wanted, probe_name, first_argument[0] if first_argument else None)
    definition.body = inserter.body(definition.body)
    for number, w in enumerate(wanted):
        if inserter.counts.get(w.name, 0) < max(w.number, 1):
            known = sorted(inserter.counts)
            there = inserter.counts.get(w.name, 0)
            if there:
                raise NotFoundError(f"{function.__qualname__} assigns {w.name} {there} time(s), not {w.number}")
            raise NotFoundError(f"{function.__qualname__} has no local variable {w.name}{nearest(w.name, known)}")
    if any(w.at_exit for w in wanted):
        definition.body = _AtExit(wanted, inserter).apply(definition.body)
    _clear_defaults(definition)
    return _compile(function, definition, first - 1)


def _clear_defaults(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    """Defaults and annotations belong to the function object, which stays; here they would only be evaluated again."""
    arguments = definition.args
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if d is None else ast.Constant(None) for d in arguments.kw_defaults]
    for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if a is not None:
            a.annotation = None
    definition.returns = None


def _compile(function: FunctionType, definition: ast.stmt, line_offset: int) -> CodeType:
    code = function.__code__
    # The closure's names as locals of an outer function; a class of the method's class name mangles its private names
    # and has the cell that super() needs.
    path = function.__qualname__.split(".")
    inner: ast.stmt = definition
    if len(path) > 1 and path[-2] != "<locals>":
        inner = ast.ClassDef(name=path[-2], bases=[], keywords=[], body=[definition], decorator_list=[])
    bind: list[ast.stmt] = [
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
    ast.increment_lineno(module, line_offset)
    future = code.co_flags & _FUTURE_FLAGS
    compiled = compile(module, code.co_filename, "exec", flags=future, dont_inherit=True)
    found = _find(compiled, code.co_name)
    if found is None or found.co_freevars != code.co_freevars:
        raise NotFoundError(f"{function.__qualname__} cannot be rewritten: its closure would change")
    changes = {"co_firstlineno": code.co_firstlineno, "co_name": code.co_name}
    if hasattr(code, "co_qualname"):
        changes["co_qualname"] = code.co_qualname
    return found.replace(**changes)  # type: ignore[arg-type]


_FUTURE_FLAGS = __future__.annotations.compiler_flag  # the others are always on in 3.10


def _find(code: CodeType, name: str) -> CodeType | None:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_name == name and constant.co_name not in ("outer",):
                return constant
            deeper = _find(constant, name)
            if deeper is not None:
                return deeper
    return None


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
    """Puts a call behind each wanted assignment of the function itself; nested functions and classes are their own."""

    def __init__(self, wanted: list[Wanted], probe_name: str, first_argument: str | None) -> None:
        self.wanted = wanted
        self.probe_name = probe_name
        self.first_argument = first_argument
        self.counts: dict[str, int] = {}  # assignments seen so far, by name, in the order of the source

    def body(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for statement in statements:
            new = self.visit(statement)
            out.extend(new if isinstance(new, list) else [new])
        return out

    def call(self, number: int, name: str, at: ast.AST) -> ast.stmt:
        first = (
            ast.Name(self.first_argument, ast.Load()) if self.first_argument is not None else ast.Constant(None)
        )
        call = ast.Call(
            func=ast.Name(self.probe_name, ast.Load()),
            args=[ast.Constant(number), ast.Name(name, ast.Load()), first],
            keywords=[],
        )
        statement = ast.Expr(call)
        for node in ast.walk(statement):
            ast.copy_location(node, at)
        return statement

    def _behind(self, names: list[str], at: ast.AST) -> list[ast.stmt]:
        calls = []
        for name in names:
            self.counts[name] = count = self.counts.get(name, 0) + 1
            for number, w in enumerate(self.wanted):
                if w.name == name and not w.at_exit and w.number in (0, count):
                    calls.append(self.call(number, name, at))
        return calls

    def _assigned(self, *targets: ast.AST | None) -> list[str]:
        """Names that assignment targets bind."""
        names: list[str] = []
        for target in targets:
            for node in ast.walk(target) if target is not None else ():
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id not in names:
                    names.append(node.id)
        return names

    def _walrus(self, *expressions: ast.AST | None) -> list[str]:
        """Names that := binds in expressions; those of a lambda are its own."""
        names: list[str] = []
        rest = [e for e in expressions if e is not None]
        while rest:
            node = rest.pop(0)
            if isinstance(node, ast.NamedExpr) and node.target.id not in names:
                names.append(node.target.id)
            if not isinstance(node, ast.Lambda):
                rest.extend(ast.iter_child_nodes(node))
        return names

    def generic_visit(self, node: ast.AST) -> Any:
        if not isinstance(node, ast.stmt):
            return node
        fields = [f for f in ("body", "orelse", "finalbody") if isinstance(getattr(node, f, None), list)]
        if fields or isinstance(node, ast.Match):
            return self._compound(node, fields)
        if isinstance(node, ast.Return):
            return node  # nothing is behind it
        behind = self._behind(self._walrus(node), node)
        return [node, *behind] if behind else node

    def _compound(self, node: ast.stmt, fields: list[str]) -> ast.stmt:
        first: list[ast.stmt] = []
        if isinstance(node, (ast.For, ast.AsyncFor)):
            first = self._behind(self._assigned(node.target), node)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            items = [e for i in node.items for e in (i.context_expr, i.optional_vars)]
            first = self._behind([*self._walrus(*items), *self._assigned(*[i.optional_vars for i in node.items])], node)
        elif isinstance(node, (ast.If, ast.While)):
            # Bound whichever way it goes: in front of both.
            first = self._behind(self._walrus(node.test), node)
        for field in fields:
            setattr(node, field, self.body(getattr(node, field)))
        for handler in getattr(node, "handlers", []):
            handler.body = self.body(handler.body)
        for case in getattr(node, "cases", []):
            case.body = self.body(case.body)
        if first:
            node.body = [*first, *node.body]  # type: ignore[attr-defined]
            if isinstance(node, (ast.If, ast.While)):
                node.orelse = [*copy.deepcopy(first), *node.orelse]
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        return [node, *self._behind([*self._walrus(node.value), *self._assigned(*node.targets)], node)]

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        return [node, *self._behind([*self._walrus(node.value), *self._assigned(node.target)], node)]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        names = [*self._walrus(node.value), *self._assigned(node.target)] if node.value is not None else []
        return [node, *self._behind(names, node)]


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


def plain(function: Any) -> FunctionType:
    """The Python function behind a callable: out of our own wrapper and of functools.wraps decorators."""
    while not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            raise NotFoundError(f"{function!r} is no Python function: it has no local variables")
        function = inner
    return function


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

        def probe(which: int, value: Any, first: Any) -> None:
            if compiled.is_compiling():
                compiled.observe_value(key, str(which), first, value)
            elif not inside.callback:
                observed.fire(which, value, first)

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
    code = rewrite(function, [n for n, _, _ in listeners], observed.global_name)
    observed.listeners = listeners
    function.__globals__[observed.global_name] = observed.probe
    function.__code__ = code
    _observed[function] = observed


_observed: weakref.WeakKeyDictionary[FunctionType, _Observed] = weakref.WeakKeyDictionary()
