"""WGSL templates: parsed by Jinja2, run by the same evaluator as expressions.

The statements are Jinja's (output, if, for, set, macro, call, with); imports, includes and
inheritance are not in the manifest format. Running a template is bounded in steps and in text.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import nodes

from jax_webgpu import values
from jax_webgpu.errors import ExpressionError
from jax_webgpu.expressions import Compiler, Evaluator
from jax_webgpu.values import (
    CHARACTERS,
    MAX_LIST,
    MAX_TEXT,
    METER,
    UNDEFINED,
    Meter,
    show,
    to_text,
    truthy,
)

# Blocks within each other, and macros that are called by others; each takes a few frames of
# Python's stack.
MAX_NESTING = 32
MAX_CALLS = 32

# What the call of a macro costs, besides what the macro does.
_CALL = 16

# What a statement does: reads and changes the scope, and writes to the output.
Statement = Callable[[dict[str, Any], "Output"], None]


class Output:
    """Collects text, and counts what is done so that no template runs away."""

    def __init__(self, meter: Meter) -> None:
        self.parts: list[str] = []
        self.meter = meter
        self.size = 0
        self.calls = 0

    def write(self, text: str) -> None:
        self.parts.append(text)
        self.grow(len(text), len(text))

    def grow(self, size: int, values: int) -> None:
        """Counts text that was written, of which so much were values."""
        self.size += size
        if values > CHARACTERS:
            self.meter.spend(values // CHARACTERS)
        if self.size > MAX_TEXT:
            raise ExpressionError(f"a text of more than {MAX_TEXT} characters")


class Namespace(dict[str, Any]):
    """Jinja's `namespace`: an object whose members can be set from inside a loop."""


@dataclass(frozen=True)
class Template:
    """A parsed template; equal and hashed by name and source."""

    name: str
    source: str
    body: list[nodes.Node] = field(compare=False, repr=False)

    @functools.cached_property
    def _compiled(self) -> tuple[Statement, frozenset[str]]:
        compiler = _TemplateCompiler(self.name, lenient=True)
        run = compiler.block(self.body)
        return run, frozenset(compiler.names | compiler.tested | compiler.derived)

    @property
    def reads(self) -> frozenset[str]:
        """The names that it may read, its own among them; see `Expression.reads`."""
        return self._compiled[1]

    @functools.cached_property
    def _strict(self) -> Statement:
        return _TemplateCompiler(self.name, lenient=False).block(self.body)

    def render(self, scope: Mapping[str, Any], *, strict: bool = False) -> str:
        """The text; raises `ExpressionError` with template name and line.

        Args:
          scope: the values of the names in the template.
          strict: an undefined name, or printing an undefined value, is an error.
        """
        known = {"range": _range, "namespace": _namespace, METER: Meter(), **scope}
        # Loops and macros copy the scope: it holds what the template may read and no more.
        wanted = {name: known[name] for name in (*self.reads, METER) if name in known}
        output = Output(known[METER])
        (self._strict if strict else self._compiled[0])(wanted, output)
        return "".join(output.parts)


def parse(name: str, source: str) -> Template:
    """Parses a template; raises `ExpressionError` with template name and line."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            template = Template(name, source, _environment.parse(source).body)
        _ = template.reads  # compiled here, for its errors
        return template
    except ExpressionError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise ExpressionError(f"{name}:{error.lineno}: {error.message}") from None
    except RecursionError:
        raise ExpressionError(f"{name}: nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise ExpressionError(f"{name}: {error}") from None


_environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, optimized=False)


def _range(*bounds: Any) -> range:
    whole = [values.need_integer(bound, "range") for bound in bounds]
    if not 1 <= len(whole) <= 3 or (len(whole) == 3 and whole[2] == 0):
        raise ExpressionError("range takes a stop, or a start, a stop and a step other than 0")
    result = range(*whole)
    if result[MAX_LIST:]:
        raise ExpressionError(f"range: more than {MAX_LIST} elements")
    return result


def _namespace(*objects: Any, **members: Any) -> Namespace:
    result = Namespace()
    for each in objects:
        if not isinstance(each, Mapping):
            raise ExpressionError(f"namespace takes an object, got {show(each)}")
        result.update(each)
    result.update(members)
    return result


class _TemplateCompiler(Compiler):
    """Adds Jinja's statements to its expressions."""

    def __init__(self, name: str, lenient: bool):
        super().__init__(lenient)
        self.template = name
        self.line = 1
        self.nesting = 0
        self.sets = 0
        """The statements so far that set a name."""
        self.counts = 0
        """The times so far that `loop` is read."""

    def _name(self, node: nodes.Name) -> Evaluator:
        self.counts += node.name == "loop"
        return super()._name(node)

    def optional(self, node: nodes.Expr) -> Evaluator:
        self.counts += isinstance(node, nodes.Name) and node.name == "loop"
        return super().optional(node)

    def defaulted(self, node: nodes.Expr) -> Evaluator:
        return self.optional(node)

    def block(self, body: Sequence[nodes.Node]) -> Statement:
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise ExpressionError(f"{self.template}: nested too deeply")
        around, self.size = self.size, 1
        steps = [self._statement(node) for node in body]
        cost, self.size = self.size, around  # a block inside this one charges its own cost
        self.nesting -= 1

        def run(scope: dict[str, Any], output: Output) -> None:
            output.meter.spend(cost)
            for place, statement in steps:
                try:
                    statement(scope, output)
                except ExpressionError as error:
                    raise _placed(place, error) from None
                except RecursionError:
                    raise ExpressionError(f"{place}: nested too deeply") from None

        return run

    def _statement(self, node: nodes.Node) -> tuple[str, Statement]:
        """A statement with its place in the template."""
        self.line = node.lineno or self.line
        place = f"{self.template}:{self.line}"
        kind = type(node).__name__.lower()
        make = getattr(self, f"_do_{kind}", None)
        if make is None:
            raise ExpressionError(f"{place}: {kind} is not in the manifest format")
        try:
            return place, make(node)
        except ExpressionError as error:
            raise _placed(place, error) from None

    def _do_output(self, node: nodes.Output) -> Statement:
        """Text and values in turn: nearly all that a template does."""
        pieces = list[tuple[str | None, Evaluator | str, str]]()
        written = 0
        for each in node.nodes:
            self.line = each.lineno or self.line
            place = f"{self.template}:{self.line}"
            self.size += 1
            if isinstance(each, nodes.TemplateData):
                pieces.append((each.data, "", place))
                written += len(each.data)
                continue
            try:
                printed: Evaluator | str = self.compile(each)
            except ExpressionError as error:
                raise _placed(place, error) from None
            if isinstance(each, nodes.Name) and self.lenient:
                printed = each.name  # looked up on the spot: names are the most of all
            pieces.append((None, printed, place))
        self.size += written // CHARACTERS

        def write(scope: dict[str, Any], output: Output) -> None:
            add, at, size = output.parts.append, "", written
            try:
                for text, printed, place in pieces:
                    if text is not None:
                        add(text)
                        continue
                    at = place
                    if isinstance(printed, str):
                        value = scope.get(printed, UNDEFINED)
                    else:
                        value = printed(scope)
                        if value is UNDEFINED and not self.lenient:
                            raise ExpressionError("an undefined value is printed")
                    if value.__class__ is not str:
                        value = to_text(value)
                    size += len(value)
                    add(value)
                output.grow(size, size - written)
            except ExpressionError as error:
                raise _placed(at, error) from None

        return write

    def _do_if(self, node: nodes.If) -> Statement:
        branches = [
            (self.compile(branch.test), self.block(branch.body)) for branch in [node, *node.elif_]
        ]
        otherwise = self.block(node.else_)

        def choose(scope: dict[str, Any], output: Output) -> None:
            for test, body in branches:
                if truthy(test(scope)):
                    return body(scope, output)
            return otherwise(scope, output)

        return choose

    def _do_for(self, node: nodes.For) -> Statement:
        if node.recursive:
            raise ExpressionError("recursive loops are not in the manifest format")
        items, before = self.compile(node.iter), (self.sets, self.counts)
        body = self.block(node.body)
        # What an iteration sets is gone in the next: each has a scope of its own, if it sets any.
        shared, counted = self.sets == before[0], self.counts > before[1]
        assign = self._target(node.target)
        size = self.size
        keep = self.compile(node.test) if node.test is not None else None
        size = self.size - size + 1
        otherwise = self.block(node.else_)

        def loop(scope: dict[str, Any], output: Output) -> None:
            elements = _elements(items(scope))
            inner = dict(scope)
            if keep is not None:
                output.meter.spend(size * len(elements))
                kept = []
                for element in elements:
                    assign(inner, element)
                    if truthy(keep(inner)):
                        kept.append(element)
                elements = kept
            for index, element in enumerate(elements):
                if not shared:
                    inner = dict(scope)
                assign(inner, element)
                if counted:
                    inner["loop"] = _loop(index, elements)
                body(inner, output)
            if not elements:
                otherwise(dict(scope), output)

        return loop

    def _do_assign(self, node: nodes.Assign) -> Statement:
        self.sets += 1
        value, assign = self.compile(node.node), self._target(node.target)
        return lambda scope, output: assign(scope, value(scope))

    def _do_assignblock(self, node: nodes.AssignBlock) -> Statement:
        if node.filter is not None:
            raise ExpressionError("filters on a set block are not in the manifest format")
        self.sets += 1
        body, assign = self.block(node.body), self._target(node.target)

        def run(scope: dict[str, Any], output: Output) -> None:
            assign(scope, _captured(body, dict(scope), output))

        return run

    def _do_with(self, node: nodes.With) -> Statement:
        pairs = [
            (self._target(target), self.compile(value))
            for target, value in zip(node.targets, node.values, strict=True)
        ]
        body = self.block(node.body)

        def run(scope: dict[str, Any], output: Output) -> None:
            inner = dict(scope)
            for assign, value in pairs:
                assign(inner, value(scope))
            body(inner, output)

        return run

    def _do_macro(self, node: nodes.Macro) -> Statement:
        self.sets += 1
        make = self._function(node, node.name)

        def define(scope: dict[str, Any], output: Output) -> None:
            scope[node.name] = make(scope, output)

        return define

    def _do_callblock(self, node: nodes.CallBlock) -> Statement:
        make = self._function(node, "caller")
        caller = nodes.Keyword("caller", nodes.Name("caller", "load"))
        call = self.compile(
            nodes.Call(node.call.node, node.call.args, [*node.call.kwargs, caller], None, None)
        )

        def run(scope: dict[str, Any], output: Output) -> None:
            output.write(to_text(call({**scope, "caller": make(scope, output)})))

        return run

    def _function(
        self, node: nodes.Macro | nodes.CallBlock, name: str
    ) -> Callable[[dict[str, Any], Output], Callable[..., str]]:
        """A macro: the scope it is defined in is seen at each call, its text is its result."""
        names = [argument.name for argument in node.args]
        defaults = [self.compile(default) for default in node.defaults]
        required = len(names) - len(defaults)
        body = self.block(node.body)

        def make(scope: dict[str, Any], output: Output) -> Callable[..., str]:
            def macro(*positional: Any, **named: Any) -> str:
                inner = dict(scope)
                if "caller" in named:
                    inner["caller"] = named.pop("caller")
                if len(positional) > len(names) or (named and not named.keys() <= {*names}):
                    raise ExpressionError(f"macro {name} takes ({', '.join(names)})")
                for index, argument in enumerate(names):
                    if index < len(positional):
                        inner[argument] = positional[index]
                    elif argument in named:
                        inner[argument] = named[argument]
                    elif index >= required:
                        inner[argument] = defaults[index - required](inner)
                    else:
                        inner[argument] = UNDEFINED
                output.meter.spend(_CALL)
                output.calls += 1
                if output.calls > MAX_CALLS:
                    raise ExpressionError("macros call each other without end")
                text = _captured(body, inner, output)
                output.calls -= 1
                return text

            return macro

        return make

    def _target(self, node: nodes.Node) -> Callable[[dict[str, Any], Any], None]:
        match node:
            case nodes.Name(name=name):

                def assign(scope: dict[str, Any], value: Any) -> None:
                    scope[name] = value

            case nodes.NSRef(name=name, attr=attribute):
                self.tested.add(name)

                def assign(scope: dict[str, Any], value: Any) -> None:
                    namespace = scope.get(name, UNDEFINED)
                    if not isinstance(namespace, Namespace):
                        raise ExpressionError(f"{name} is {show(namespace)}, not a namespace")
                    namespace[attribute] = value

            case nodes.Tuple(items=items):
                targets = [self._target(item) for item in items]

                def assign(scope: dict[str, Any], value: Any) -> None:
                    if len(values.need_list(value, "unpacking")) != len(targets):
                        raise ExpressionError(f"cannot unpack {show(value)} to {len(targets)}")
                    for target, element in zip(targets, value, strict=True):
                        target(scope, element)

            case _:
                raise ExpressionError(f"cannot assign to {type(node).__name__}")
        return assign


def _elements(value: Any) -> Sequence[Any]:
    return list(value) if isinstance(value, Mapping) else values.need_list(value, "for")


def _loop(index: int, elements: Sequence[Any]) -> dict[str, Any]:
    length = len(elements)
    return {
        "index": index + 1,
        "index0": index,
        "revindex": length - index,
        "revindex0": length - index - 1,
        "first": index == 0,
        "last": index == length - 1,
        "length": length,
        "previtem": elements[index - 1] if index > 0 else UNDEFINED,
        "nextitem": elements[index + 1] if index < length - 1 else UNDEFINED,
    }


def _captured(body: Statement, scope: dict[str, Any], output: Output) -> str:
    """Runs `body` and returns its text; the steps count for the whole template."""
    outside, output.parts = output.parts, []
    try:
        body(scope, output)
        return "".join(output.parts)
    finally:
        output.parts = outside


def _placed(place: str, error: ExpressionError) -> ExpressionError:
    """Adds file and line once, at the innermost statement."""
    return (
        error
        if str(error).startswith(f"{place.partition(':')[0]}:")
        else ExpressionError(f"{place}: {error}")
    )
