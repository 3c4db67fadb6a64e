"""`fuse`: the WebGPU operators of a function in as few crossings to the device as its graph allows.

The function is traced, its calls of other jitted functions are inlined, and `partition` finds the
groups. Each becomes one equation, of a primitive whose parameter is the group's own jaxpr: its
derivatives, batches and transposes are those of that jaxpr, fused anew.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching

from jax_webgpu import generate, primitive
from jax_webgpu.errors import DTypeError
from jax_webgpu.generate import Constant, Step
from jax_webgpu.group import Group, Operation, Runner
from jax_webgpu.partition import Node, order, partition
from jax_webgpu.primitive import Call
from jax_webgpu.resolve import Tensor


def fuse(
    f: Callable[..., Any],
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
) -> Callable[..., Any]:
    """Makes the WebGPU operators in `f` cross to the device and back in groups.

    Each group crosses once: what it reads from outside is uploaded once, its kernels run in one
    submission, arrays between them never leave the device and share memory where their lives do not
    overlap, and what is needed outside is downloaded once. A group is made of our operators and of
    what stands between them, if it only moves data or is elementwise arithmetic: see
    ``docs/fuse.md``. Everything else stays with XLA. `jax_webgpu.explain` shows the groups.

    With operators and movement of data alone the results are those of `f` bit for bit; arithmetic
    in a group is within the bounds of WGSL's section on accuracy.

    Args:
      f: a function of arrays in pytrees, which JAX can trace.
      static_argnums: as in `jax.jit`.
      static_argnames: as in `jax.jit`.

    Returns:
      A function like `f`, jitted. It can be called eagerly, differentiated, batched, sharded by
      `shard_map`, and be part of other functions, fused ones too.

    Raises:
      TypeError: `f` is no function, or a static argument is no name or number of one.
      ValueError, TypeError: when it is called, as `f` would under `jax.jit`.
    """
    if not callable(f):
        raise DTypeError(f"f must be a function, got {type(f).__name__}")

    @functools.wraps(f)
    def traced(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        dynamic = [at for at, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

        def of_arrays(*arrays: Any) -> Any:
            for at, array in zip(dynamic, arrays, strict=True):
                leaves[at] = array
            args, kwargs = jax.tree.unflatten(tree, leaves)
            return f(*args, **kwargs)

        return _fused(of_arrays, *(leaves[at] for at in dynamic))

    try:
        return jax.jit(traced, static_argnums=static_argnums, static_argnames=static_argnames)
    except (TypeError, ValueError) as error:
        raise DTypeError(
            f"static_argnums is {static_argnums!r} and static_argnames {static_argnames!r}: {error}"
        ) from None


def _fused(f: Callable[..., Any], *args: Any, tangents: int = 0) -> Any:
    """`f(*args)`, its operators in groups; see `_grouped`."""
    closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
    results = jaxpr_as_fun(_grouped(closed, tangents))(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), results)


# ---- the graph ----------------------------------------------------------------------------------


def _grouped(closed: Any, tangents: int = 0) -> Any:
    """The jaxpr with an equation for each group.

    In the last `tangents` arguments the function is linear, and JAX may yet take it apart into what
    depends on them and what does not. It takes a group as a whole, so what depends on none and is
    needed outside of the group is computed apart.
    """
    flat = _flattened(closed)
    jaxpr = flat.jaxpr
    linear = _reached(jaxpr, jaxpr.invars[len(jaxpr.invars) - tangents :])
    equations = [_with_bodies_grouped(equation) for equation in _needed(jaxpr)]
    numbers: dict[Any, int] = {}
    nodes = _nodes(equations, numbers)
    results = {numbers[v] for v in jaxpr.outvars if not isinstance(v, Literal) and v in numbers}
    sizes = [_size(variable.aval) for variable in numbers]
    groups = partition(nodes, sizes, results)
    variables = list(numbers)
    made = []
    for unit in order(nodes, groups):
        if unit not in groups:
            made += [equations[at] for at in unit]
            continue
        inside = dict.fromkeys(value for at in unit for value in nodes[at].writes)
        read = dict.fromkeys(value for at in unit for value in nodes[at].reads)
        outside = {v for at, each in enumerate(nodes) if at not in unit for v in each.reads}
        members = [equations[at] for at in unit]
        writes = [variables[value] for value in inside if value in outside | results]
        reads = [variables[value] for value in read if value not in inside]
        if not linear.isdisjoint(reads):
            made += _apart(jaxpr, members, [each for each in writes if each not in linear])
            writes = [each for each in writes if each in linear]
        if writes:
            made.append(_group_equation(jaxpr, members, reads, writes))
    return ClosedJaxpr(jaxpr.replace(eqns=made), flat.consts)


def _reached(jaxpr: Any, variables: Iterable[Any]) -> set[Any]:
    """The variables that depend on these, and these."""
    reached = set(variables)
    for equation in jaxpr.eqns:
        if any(not isinstance(each, Literal) and each in reached for each in equation.invars):
            reached |= {*equation.outvars}
    return reached


def _apart(jaxpr: Any, members: Sequence[Any], writes: Sequence[Any]) -> list[Any]:
    """What some values of a group are made by, as a group of its own if an operator is in it."""
    needed = set(writes)
    kept = []
    for equation in reversed(members):
        if needed & set(equation.outvars):
            kept.append(equation)
            needed |= {each for each in equation.invars if not isinstance(each, Literal)}
    kept.reverse()
    if not any(True for _ in itertools.chain.from_iterable(map(_operators_of, kept))):
        return kept
    inside = {each for equation in kept for each in equation.outvars}
    atoms = [each for equation in kept for each in equation.invars]
    read = dict.fromkeys(each for each in atoms if not isinstance(each, Literal))
    return [_group_equation(jaxpr, kept, [each for each in read if each not in inside], writes)]


def _group_equation(
    jaxpr: Any, members: Sequence[Any], reads: Sequence[Any], writes: Sequence[Any]
) -> Any:
    own = jaxpr.replace(
        constvars=[], invars=list(reads), outvars=list(writes), eqns=list(members), effects=set()
    )
    first: Call = next(_operators(own)).params["call"]
    call = Call((), settings=first.settings, loose_axes=first.loose_axes)
    return members[0].replace(
        primitive=_group,
        invars=list(reads),
        outvars=list(writes),
        params={"jaxpr": ClosedJaxpr(own, ()), "call": call},
    )


def _flattened(closed: Any) -> Any:
    """The jaxpr with the calls of jitted functions, and the groups of fused ones, inlined."""

    def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def value(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            inner = _inlined(equation)
            if inner is None:
                read = {v: values[v] for v in equation.invars if not isinstance(v, Literal)}
                alone = jaxpr.replace(
                    constvars=[], invars=list(read), outvars=equation.outvars, eqns=[equation]
                )
                results = jaxpr_as_fun(ClosedJaxpr(alone, ()))(*read.values())
            else:
                results = evaluate(inner.jaxpr, inner.consts, [*map(value, equation.invars)])
            values |= zip(equation.outvars, results, strict=True)
        return [value(atom) for atom in jaxpr.outvars]

    return jax.make_jaxpr(lambda *args: evaluate(closed.jaxpr, closed.consts, args))(
        *closed.in_avals
    )


def _with_bodies_grouped(equation: Any) -> Any:
    """A loop, a branch or a checkpoint with the groups of its own bodies."""
    if equation.primitive.name not in _WITH_BODIES:
        return equation

    def grouped(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(grouped, value))
        if isinstance(value, ClosedJaxpr):
            made = _grouped(value)
            same = not made.consts and made.out_avals == value.out_avals
            return made if same else value
        if isinstance(value, Jaxpr):
            return grouped(ClosedJaxpr(value, ())).jaxpr
        return value

    return equation.replace(params={key: grouped(each) for key, each in equation.params.items()})


_WITH_BODIES = ("scan", "while", "cond", "checkpoint", "remat", "remat2")


def _inlined(equation: Any) -> Any:
    """The jaxpr of a call that is no more than its body; else None."""
    params = equation.params
    if equation.primitive is _group:
        return params["jaxpr"]
    if "inline" not in params or "jaxpr" not in params:  # not `jit`
        return None
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    unspecified = all(type(each).__name__ == "UnspecifiedValue" for each in shardings)
    plain = unspecified and all(each is None for each in layouts)
    return params["jaxpr"] if plain else None


def _needed(jaxpr: Any) -> list[Any]:
    """The equations that a result depends on, or that have effects."""
    needed = {each for each in jaxpr.outvars if not isinstance(each, Literal)}
    kept = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or needed & set(equation.outvars):
            kept.append(equation)
            needed |= {each for each in equation.invars if not isinstance(each, Literal)}
    return kept[::-1]


def _size(aval: Any) -> int:
    try:
        return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize
    except (AttributeError, TypeError):  # a key, a token, a size that is a symbol: outside anyway
        return 1


def _nodes(equations: Sequence[Any], numbers: dict[Any, int]) -> list[Node]:
    """The graph's nodes; each variable gets a number."""

    def number(variable: Any) -> int:
        return numbers.setdefault(variable, len(numbers))

    # What an operator looks at before it runs must be on the host then.
    checked = {each for equation in equations for each in _checked(equation)}
    nodes, effects = [], list[int]()
    for at, equation in enumerate(equations):
        kind, setting = _kind(equation)
        if not checked.isdisjoint(equation.outvars):
            kind, setting = "outside", None
        nodes.append(
            Node(
                kind,
                tuple(number(each) for each in equation.invars if not isinstance(each, Literal)),
                tuple(number(each) for each in equation.outvars),
                tuple(effects[-1:]) if equation.effects else (),
                setting,
            )
        )
        if equation.effects:
            effects.append(at)
    return nodes


def _operators(jaxpr: Any) -> Iterator[Any]:
    """The equations of our operators, those in custom rules and checkpoints too."""
    return itertools.chain.from_iterable(map(_operators_of, jaxpr.eqns))


def _operators_of(equation: Any) -> Iterator[Any]:
    if primitive.registered(equation) is not None:
        yield equation
    elif (inner := _body(equation)) is not None:
        yield from _operators(inner)


def _checked(equation: Any) -> list[Any]:
    """What the host needs to know: the place in a mesh, and integers that an operator checks."""
    if (inner := _body(equation)) is not None:
        # Not followed into the body: whatever it is given is taken to be checked.
        found = [each for one in _operators(inner) for each in _checked(one)]
        return [each for each in equation.invars if found and not isinstance(each, Literal)]
    known = primitive.registered(equation)
    if known is None:
        return []
    found = equation.invars[len(primitive.own(equation.params["call"], equation.invars)) :]
    if known.operator.check is not None:
        avals = [variable.aval for variable in equation.invars]
        found += [
            variable
            for variable, aval in zip(equation.invars, avals, strict=True)
            if jnp.issubdtype(aval.dtype, jnp.integer)
        ]
    return list(found)


def _kind(equation: Any) -> tuple[str, Any]:
    """The `Node.kind` and the `Node.setting` of an equation."""
    if equation.effects or any(map(_is_sharded, (*equation.invars, *equation.outvars))):
        return "outside", None
    builder = _Builder()
    try:
        for variable in equation.invars:
            if not isinstance(variable, Literal):
                builder.input(variable)
        builder.add(equation)
    except _OutsideError:
        return "outside", None
    calls = [one.params["call"] for one in _operators_of(equation)]
    if calls:
        settings = {(call.settings.callback, call.loose_axes) for call in calls}
        return ("operator", settings.pop()) if len(settings) == 1 else ("outside", None)
    return "joined" if equation.primitive.name == "concatenate" else "made", None


def _is_sharded(atom: Any) -> bool:
    """Over Explicit mesh axes, of which a call to the host would know nothing."""
    sharding = getattr(atom.aval, "sharding", None)
    return sharding is not None and any(sharding.spec)


# ---- equations as steps -------------------------------------------------------------------------

_SAME_NAME = (*generate.ARITHMETIC, "neg", "abs")
# Of the other elementwise operations, what each is here.
_RENAMED = {"add_any": "add"}
_ALIASES = ("reshape", "squeeze", "expand_dims", "copy", "copy_p", "pvary", "pcast")


class _OutsideError(Exception):
    """An equation cannot run in a group."""


def _body(equation: Any) -> Any:
    """The jaxpr of a call with rules of its own for JAX, which runs as its body does; else None."""
    if equation.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        inner = equation.params.get("call_jaxpr")
    elif equation.primitive.name in ("checkpoint", "remat", "remat2"):
        inner = equation.params["jaxpr"]
    elif equation.primitive is _group:
        return None
    elif (call := _inlined(equation)) is not None:
        inner = call
    else:
        return None
    if hasattr(inner, "consts"):
        return inner.jaxpr if not inner.consts else None
    return inner


class _Builder:
    """Makes a `Group` of equations. Its arrays are numbered in the order in which they come.

    Given JAX's arrays, an operator may narrow those that come from outside of the group.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.steps: list[Operation | Step] = []
        self.known: dict[Any, int | Constant] = {}
        self.arrays: dict[int, Any] = {}
        self.places: list[int] = []
        self.made: dict[Any, int] = {}
        self.narrowed: dict[Any, Any] = {}

    def array(self, aval: Any) -> int:
        """The number of a new array."""
        if not all(isinstance(size, int) for size in aval.shape):
            raise _OutsideError
        self.tensors.append(Tensor(tuple(aval.shape), str(aval.dtype)))
        return len(self.tensors) - 1

    def input(self, variable: Any, array: Any = None) -> None:
        """An array that comes from outside."""
        if variable not in self.known:
            self.known[variable] = number = self.array(variable.aval)
            if array is not None:
                self.arrays[number] = array

    def number(self, variable: Any) -> int:
        """The number of an array that is no constant."""
        number = self.operand(variable)
        if isinstance(number, Constant):
            raise _OutsideError
        return number

    def operand(self, atom: Any) -> int | Constant:
        if not isinstance(atom, Literal):
            return self.known[atom]
        if np.ndim(atom.val):
            raise _OutsideError
        aval: Any = atom.aval
        return Constant(np.asarray(atom.val).item(), str(aval.dtype))

    def add(self, equation: Any) -> None:
        """Adds the steps of an equation.

        Raises:
          _OutsideError: it cannot run in a group.
        """
        if primitive.registered(equation) is not None:
            self._operation(equation)
        elif (inner := _body(equation)) is not None:
            if inner.constvars:
                raise _OutsideError
            self.known |= zip(inner.invars, map(self.operand, equation.invars), strict=True)
            for each in inner.eqns:
                self.add(each)
            results = [self.operand(atom) for atom in inner.outvars]
            if any(isinstance(each, Constant) for each in results):
                raise _OutsideError
            self.known |= zip(equation.outvars, results, strict=True)
        else:
            self._generated(equation)

    def _step(
        self, name: str, operands: Sequence[int | Constant], aval: Any, *parameters: Any
    ) -> int:
        key = (name, tuple(operands), tuple(aval.shape), str(aval.dtype), parameters)
        if key in self.made:
            return self.made[key]
        step = Step(name, tuple(operands), self.array(aval), parameters)
        if not generate.supports(step, self.tensors):
            raise _OutsideError
        self.steps.append(step)
        self.made[key] = step.result
        return step.result

    def _generated(self, equation: Any) -> None:
        name, params = equation.primitive.name, equation.params
        operands = [self.operand(atom) for atom in equation.invars]
        result, *others = equation.outvars
        aval = result.aval

        def made(name: str, *parameters: Any) -> None:
            self.known[result] = self._step(name, operands, aval, *parameters)

        name = _RENAMED.get(name, name)
        if name in _SAME_NAME:
            made(name)
        elif name == "integer_pow":
            made(name, int(params["y"]))
        elif name in ("convert_element_type", "webgpu_convert"):
            made("convert")
        elif (name in _ALIASES and params.get("dimensions") is None) or name == "squeeze":
            made("reshape")
        elif name == "broadcast_in_dim" and len(operands) == 1:
            source = equation.invars[0].aval
            if math.prod(source.shape) == math.prod(aval.shape) and isinstance(operands[0], int):
                made("reshape")
            else:
                made("broadcast", tuple(params["broadcast_dimensions"]))
        elif name == "transpose":
            made(name, tuple(params["permutation"]))
        elif name == "rev":
            made("reverse", tuple(params["dimensions"]))
        elif name == "tile":
            made(name, tuple(params["reps"]))
        elif name == "slice":
            starts = tuple(params["start_indices"])
            made(name, starts, tuple(params["strides"] or (1,) * len(starts)))
        elif name == "concatenate":
            made(name, params["dimension"])
        elif name == "stack":
            axis = params["axis"]
            shape = aval.update(shape=(*aval.shape[:axis], 1, *aval.shape[axis + 1 :]))
            operands = [self._step("reshape", [each], shape) for each in operands]
            made("concatenate", axis)
        elif name == "split":
            axis, start = params["axis"], 0
            for part in equation.outvars:
                starts = tuple(start if at == axis else 0 for at in range(part.aval.ndim))
                ones = (1,) * len(starts)
                self.known[part] = self._step("slice", operands, part.aval, starts, ones)
                start += part.aval.shape[axis]
        elif name == "pad":
            config = params["padding_config"]
            if any(low < 0 or high < 0 or inner for low, high, inner in config):
                raise _OutsideError
            made(name, tuple(int(low) for low, _, _ in config))
        else:
            raise _OutsideError
        if others and name != "split":
            raise _OutsideError

    def _operation(self, equation: Any) -> None:
        known = primitive.registered(equation)
        assert known is not None
        call: Call = equation.params["call"]
        if call.settings.implementation == "reference":
            raise _OutsideError
        variables = primitive.own(call, equation.invars)
        if call.placed:
            self.places.append(self.number(equation.invars[-1]))
        numbers = [self.number(variable) for variable in variables]
        call, numbers = self._narrow(known, call, numbers)
        resolved = known.resolve(call, tuple(self.tensors[each] for each in numbers))
        if len(resolved.outputs) != len(equation.outvars):
            raise _OutsideError  # packed: one array for several
        results = tuple(self.array(variable.aval) for variable in equation.outvars)
        ports = {**resolved.spec.inputs, **resolved.spec.outputs}
        inputs = resolved.inputs[: 1 if known.operator.check else None]
        stored = [(n, name) for n, (name, _) in zip(numbers, inputs, strict=False)]
        stored += [(n, name) for n, (name, _) in zip(results, resolved.outputs, strict=True)]
        shapes = dict(resolved.inputs + resolved.outputs)
        for number, name in stored:
            tensor, row = self.tensors[number], resolved.storage(ports[name])
            size = math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize
            if size == 0 or size != math.prod(shapes[name].shape) * row.bytes:
                raise _OutsideError
        step = Operation(known.operator, resolved, call.static, tuple(numbers), results)
        self.steps.append(step)
        self.known |= zip(equation.outvars, results, strict=True)

    def _narrow(
        self, known: primitive.Registered, call: Call, numbers: list[int]
    ) -> tuple[Call, list[int]]:
        """`Rules.narrow`, where all operands but the first are JAX's arrays."""
        if not all(number in self.arrays for number in numbers[1:]) or not self.arrays:
            return call, numbers
        shown = [
            self.arrays.get(number, jax.ShapeDtypeStruct(*self._shape(number)))
            for number in numbers
        ]
        narrow, narrowed = known.rules.narrow(call, *shown)
        before = {id(each): number for each, number in zip(shown, numbers, strict=True)}
        found = []
        for at, each in enumerate(narrowed):
            number = before.get(id(each))
            key = (known, call.static, tuple(numbers[1:]), at)
            if number is None and key not in self.narrowed:
                number = self.narrowed[key] = self.array(jax.typeof(each))
                self.arrays[number] = each
            found.append(self.narrowed[key] if number is None else number)
        return narrow, found

    def _shape(self, number: int) -> tuple[tuple[int, ...], np.dtype]:
        tensor = self.tensors[number]
        return tensor.shape, np.dtype(tensor.dtype)


# ---- primitive ----------------------------------------------------------------------------------

_group = Primitive("webgpu_group")
_group.multiple_results = True
primitive.evaluate(_group)


def _abstract_eval(*avals: Any, jaxpr: Any, call: Call) -> list[Any]:
    return list(jaxpr.out_avals)


def is_group(equation: Any) -> bool:
    return equation.primitive is _group


def group_of(equation: Any) -> Group:
    """The group of an equation, as its lowering makes it."""
    groups = []

    def build(*arrays: Any) -> list[Any]:
        group, operands = _build(equation.params["jaxpr"], arrays)
        groups.append(group)
        return operands

    jax.eval_shape(build, *(variable.aval for variable in equation.invars))
    return groups[0]


def _build(jaxpr: Any, arrays: Sequence[Any]) -> tuple[Group, list[Any]]:
    """The group of a jaxpr, and the arrays that it crosses with."""
    builder = _Builder()
    for variable, array in zip(jaxpr.jaxpr.invars, arrays, strict=True):
        builder.input(variable, array)
    for equation in jaxpr.jaxpr.eqns:
        builder.add(equation)
    outputs = tuple(builder.number(variable) for variable in jaxpr.jaxpr.outvars)
    used = {number for step in builder.steps for number in step.arrays}
    used |= {*outputs, *builder.places[:1]}
    inputs = tuple(number for number in builder.arrays if number in used)
    place = inputs.index(builder.places[0]) if builder.places else None
    group = Group(tuple(builder.tensors), tuple(builder.steps), inputs, outputs, place)
    return group, [builder.arrays[number] for number in inputs]


def _cross(on_cpu: bool, *arrays: Any, jaxpr: Any, call: Call) -> Sequence[Any]:
    group, operands = _build(jaxpr, arrays)
    for step in group.operations:
        primitive.check_early(step.operator, step.static, step.resolved)
    results = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.out_avals]
    sharded = group.place is not None
    return primitive.cross(call, on_cpu, Runner(group), results, *operands, sharded=sharded)


def _batch(
    operands: Sequence[Any], axes: Sequence[Any], *, jaxpr: Any, call: Call
) -> tuple[Sequence[Any], Sequence[int]]:
    where = tuple(axis if isinstance(axis, int) else None for axis in axes)
    results = _fused(jax.vmap(jaxpr_as_fun(jaxpr), in_axes=where), *operands)
    return results, [0] * len(results)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Any, call: Call
) -> tuple[Sequence[Any], Sequence[Any]]:
    """The group itself, and one that is linear in the tangents, which JAX may keep for later.

    The second computes anew what it needs of the first: on the device that is cheap, and what does
    not cross is cheaper still.
    """
    results = _group.bind(*primals, jaxpr=jaxpr, call=call)
    moving = [at for at, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    reached = _reached(jaxpr.jaxpr, (jaxpr.jaxpr.invars[at] for at in moving))
    moved = [
        at
        for at, variable in enumerate(jaxpr.jaxpr.outvars)
        if variable in reached and jnp.issubdtype(results[at].dtype, jnp.inexact)
    ]

    def tangent(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        def of(*changed: Any) -> Any:
            every = dict(enumerate(primals)) | dict(zip(moving, changed, strict=True))
            found = jaxpr_as_fun(jaxpr)(*every.values())
            return [found[at] for at in moved]

        return jax.jvp(of, [primals[at] for at in moving], tangents)[1]

    given = [tangents[at] for at in moving]
    changes = iter(_fused(tangent, primals, given, tangents=len(given)) if moved else ())
    return results, [
        next(changes) if at in moved else ad.Zero(jax.typeof(result).to_tangent_aval())
        for at, result in enumerate(results)
    ]


def _transpose(cotangents: Sequence[Any], *operands: Any, jaxpr: Any, call: Call) -> Sequence[Any]:
    linear = [at for at, each in enumerate(operands) if ad.is_undefined_primal(each)]
    given = [at for at, each in enumerate(cotangents) if not isinstance(each, ad.Zero)]
    known = {at: each for at, each in enumerate(operands) if at not in linear}

    def backward(cotangents: Sequence[Any], known: dict[int, Any]) -> Any:
        def of(*moved: Any) -> Any:
            every = known | dict(zip(linear, moved, strict=True))
            results = jaxpr_as_fun(jaxpr)(*(every[at] for at in range(len(operands))))
            return [results[at] for at in given]

        return jax.linear_transpose(of, *(operands[at].aval for at in linear))(cotangents)

    found = iter(_fused(backward, [cotangents[at] for at in given], known) if given else ())
    return [
        (next(found) if given else ad.Zero(each.aval)) if at in linear else None
        for at, each in enumerate(operands)
    ]


_group.def_abstract_eval(_abstract_eval)
primitive.lower(_group, _cross)
batching.primitive_batchers[_group] = _batch
ad.primitive_jvps[_group] = _jvp
ad.primitive_transposes[_group] = _transpose
