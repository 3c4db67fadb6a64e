"""WGSL templates: parsed by Jinja2, run by the same evaluator as expressions.

The statements are Jinja's (output, if, for, set, macro, call, with); imports, includes and
inheritance are not in the manifest format. Running a template is bounded in steps and in text.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import nodes

from jax_webgpu import values
from jax_webgpu.errors import ExpressionError
from jax_webgpu.expressions import Compiler, Evaluator
from jax_webgpu.values import MAX_LIST, MAX_TEXT, UNDEFINED, show, to_text, truthy

MAX_STEPS = 1_000_000

# What a statement does: reads and changes the scope, and writes to the output.
Statement = Callable[[dict[str, Any], "Output"], None]


class Output:
    """Collects text; counts steps so that no template runs away."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.steps = 0
        self.size = 0

    def write(self, text: str) -> None:
        self.parts.append(text)
        self.size += len(text)

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS or self.size > MAX_TEXT:
            raise ExpressionError("the template does not come to an end")


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
        output = Output()
        globals_ = {"range": _range, "namespace": _namespace, **scope}
        (self._strict if strict else self._compiled[0])(globals_, output)
        return "".join(output.parts)


def parse(name: str, source: str) -> Template:
    """Parses a template; raises `ExpressionError` with template name and line."""
    try:
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

    def defaulted(self, node: nodes.Expr) -> Evaluator:
        return self.optional(node)

    def block(self, body: Sequence[nodes.Node]) -> Statement:
        statements = [self._statement(node) for node in body]

        def run(scope: dict[str, Any], output: Output) -> None:
            for statement in statements:
                statement(scope, output)

        return run

    def _statement(self, node: nodes.Node) -> Statement:
        self.line = node.lineno or self.line
        place = f"{self.template}:{self.line}"
        kind = type(node).__name__.lower()
        make = getattr(self, f"_do_{kind}", None)
        if make is None and isinstance(node, nodes.Expr):
            make = self._do_print
        if make is None:
            raise ExpressionError(f"{place}: {kind} is not in the manifest format")
        try:
            statement: Statement = make(node)
        except ExpressionError as error:
            raise _placed(place, error) from None

        def run(scope: dict[str, Any], output: Output) -> None:
            try:
                output.step()
                statement(scope, output)
            except ExpressionError as error:
                raise _placed(place, error) from None
            except RecursionError:
                raise ExpressionError(f"{place}: macros call each other without end") from None

        return run

    def _do_output(self, node: nodes.Output) -> Statement:
        return self.block(node.nodes)

    def _do_templatedata(self, node: nodes.TemplateData) -> Statement:
        return lambda scope, output: output.write(node.data)

    def _do_print(self, node: nodes.Expr) -> Statement:
        printed = self.compile(node)

        def write(scope: dict[str, Any], output: Output) -> None:
            value = printed(scope)
            if value is UNDEFINED and not self.lenient:
                raise ExpressionError("an undefined value is printed")
            output.write(to_text(value))

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
        items, body = self.compile(node.iter), self.block(node.body)
        assign = self._target(node.target)
        keep = self.compile(node.test) if node.test is not None else None
        otherwise = self.block(node.else_)

        def loop(scope: dict[str, Any], output: Output) -> None:
            def inside(element: Any) -> dict[str, Any]:
                output.step()
                inner = dict(scope)
                assign(inner, element)
                return inner

            elements = _elements(items(scope))
            if keep is not None:
                elements = [each for each in elements if truthy(keep(inside(each)))]
            for index, element in enumerate(elements):
                body({**inside(element), "loop": _loop(index, elements)}, output)
            if not elements:
                otherwise(dict(scope), output)

        return loop

    def _do_assign(self, node: nodes.Assign) -> Statement:
        value, assign = self.compile(node.node), self._target(node.target)
        return lambda scope, output: assign(scope, value(scope))

    def _do_assignblock(self, node: nodes.AssignBlock) -> Statement:
        if node.filter is not None:
            raise ExpressionError("filters on a set block are not in the manifest format")
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
                unknown = named.keys() - {*names, "caller"}
                if len(positional) > len(names) or unknown:
                    raise ExpressionError(f"macro {name} takes ({', '.join(names)})")
                inner = dict(scope)
                if "caller" in named:
                    inner["caller"] = named["caller"]
                for index, argument in enumerate(names):
                    if index < len(positional):
                        inner[argument] = positional[index]
                    elif argument in named:
                        inner[argument] = named[argument]
                    elif index >= required:
                        inner[argument] = defaults[index - required](inner)
                    else:
                        inner[argument] = UNDEFINED
                return _captured(body, inner, output)

            return macro

        return make

    def _target(self, node: nodes.Node) -> Callable[[dict[str, Any], Any], None]:
        match node:
            case nodes.Name(name=name):

                def assign(scope: dict[str, Any], value: Any) -> None:
                    scope[name] = value

            case nodes.NSRef(name=name, attr=attribute):

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
