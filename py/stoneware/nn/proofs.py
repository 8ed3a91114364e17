"""Proves what a module of another package computes, by a trace of its code.

A module is traced with torch.fx in training and in eval mode, with and without gradients. All traces must be equal,
and each of their operations must be one of the function to be proved. Control flow that depends on a tensor, an
activation, a clamp, a bias, a dropout or a scale that the function lacks therefore ends the proof.

Experts of transformers branch on their routing, which no trace can follow. They are proved by the digest of their
code and by a trace of their activation.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import math
import operator
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from stoneware.epilogue import source, trace
from stoneware.epilogue.expression import Expression
from stoneware.nn.arguments import has_hooks

_FUNCTIONAL = torch.nn.functional


class NoProof(Exception):
    """The module's code does not prove that it computes the function; the message has the reason."""


@dataclass(frozen=True, kw_only=True)
class SwiGLUParts:
    """The submodules of down(silu(gate(x)) * up(x)), by name.

    Attributes:
      gate_up: gate and up, or a single layer with the rows of gate, then those of up.
      down: the last layer.
    """

    gate_up: tuple[str, ...]
    down: str


def swiglu(module: torch.nn.Module) -> SwiGLUParts:
    """The parts of a feed-forward that computes down(silu(gate(x)) * up(x)) without biases.

    Raises:
      NoProof: its code does not show that.
    """
    graph = _trace(module, "forward")
    (x,) = _inputs(graph)
    down = _result(graph)
    gate_up, inner = _gate_and_up(module, _linear_argument(module, down))
    parts = SwiGLUParts(gate_up=tuple(_linear_name(module, node, x) for node in gate_up), down=str(down.target))
    layers = (*parts.gate_up, parts.down)
    if len({*layers}) != len(layers):
        raise NoProof("one of its layers is used twice")
    _check_operations(graph, {x, down, *gate_up, *inner})
    with_bias = [name for name in layers if module.get_submodule(name).bias is not None]
    if with_bias:
        raise NoProof(f"{with_bias[0]} has a bias")
    return parts


@dataclass(frozen=True, kw_only=True)
class MLPParts:
    """The submodules of down(activation(up(x))), by name.

    Attributes:
      up, down: the layers.
      activation: the function between them.
      attributes: (submodule, attribute, value) that the code of the activation reads. The value of a method, which
        no attribute may hide, is None.
      keywords: (submodule, attribute, keywords) of attributes that are a functools.partial.
      methods: (submodule, method, function of its class) that the code of the block reads; "" is the block. The
        function is None in a pickle.
    """

    up: str
    down: str
    activation: Pointwise
    attributes: tuple[tuple[str, str, Any], ...]
    keywords: tuple[tuple[str, str, tuple[tuple[str, Any], ...]], ...]
    methods: tuple[tuple[str, str, Any], ...]


class Reference(NamedTuple):
    """A value of a `Pointwise`.

    Attributes:
      position: of the operation that computes it, from 1 on; 0 is the argument.
    """

    position: int


class Operation(NamedTuple):
    """An operation of a `Pointwise`.

    Attributes:
      target: a function, or the name of a tensor's method.
      arguments, options: positional arguments and keywords: References and constants.
    """

    target: Callable[..., Any] | str
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Pointwise:
    """A function of one tensor that computes each element by itself. Equal ones share their linked kernels' plans.

    Attributes:
      operations: what it computes; its result is that of the last one.
    """

    operations: tuple[Operation, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.values(x)[-1]
        return result

    def values(self, x: torch.Tensor) -> list[Any]:
        """The argument, and the result of each operation."""
        values: list[Any] = [x]
        for target, arguments, options in self.operations:
            operands = [values[each.position] if isinstance(each, Reference) else each for each in arguments]
            keywords = {name: values[each.position] if isinstance(each, Reference) else each for name, each in options}
            function = getattr(operands.pop(0), target) if isinstance(target, str) else target
            values.append(function(*operands, **keywords))
        return values


def mlp(module: torch.nn.Module) -> MLPParts:
    """The parts of a feed-forward that computes down(activation(up(x))), with an activation that an epilogue can have.

    Raises:
      NoProof: its code does not show that.
    """
    reads = _Reads({}, {})
    graph = _trace(module, "forward", reads)
    (x,) = _inputs(graph)
    down = _result(graph)
    last = _linear_argument(module, down)
    calls = [node for node in graph.nodes if node.op == "call_module" and node is not down]
    layers = [node for node in calls if type(module.get_submodule(str(node.target))) is torch.nn.Linear]
    if len(layers) != 1 or layers[0].target == down.target:
        raise NoProof("it does not call two layers, once each")
    (up,) = layers
    _linear_name(module, up, x)
    activation = _pointwise(module, up, last, {x, up, down})
    return MLPParts(
        up=str(up.target),
        down=str(down.target),
        activation=activation,
        attributes=tuple((*names, value) for names, value in reads.attributes.items()),
        keywords=tuple(
            (*names, tuple(value.keywords.items()))
            for names, value in reads.attributes.items()
            if isinstance(value, functools.partial)
        ),
        methods=tuple((*names, function) for names, function in reads.methods.items()),
    )


def _pointwise(
    module: torch.nn.Module, argument: torch.fx.Node, result: torch.fx.Node, others: set[torch.fx.Node]
) -> Pointwise:
    """The function from a node to a later one; all nodes of the trace but `others` are in it."""
    values = {argument: Reference(0)}
    operations: list[Operation] = []
    for node in argument.graph.nodes:
        if node.op == "output" or node in others:
            continue
        arguments = tuple(_operand(value, values, node) for value in node.args)
        options = tuple((name, _operand(value, values, node)) for name, value in node.kwargs.items())
        if _is_silu(module, node):
            operations.append(Operation(_FUNCTIONAL.silu, arguments[:1], ()))
        elif node.op == "call_method" or (node.op == "call_function" and _is_of_torch(node.target)):
            operations.append(Operation(node.target, arguments, options))
        else:
            raise NoProof(f"it computes {_name(node)} between its layers")
        values[node] = Reference(len(operations))
    if not operations or values.get(result) != Reference(len(operations)):
        raise NoProof("its last layer does not read the result of an activation")
    activation = Pointwise(tuple(operations))

    def with_one_shape(x: torch.Tensor) -> torch.Tensor:
        values = activation.values(x)
        # Code that reads a size gets another one in the kernel, for which all dimensions but the last are rows.
        if any(not isinstance(value, torch.Tensor) or value.shape != x.shape for value in values):
            raise NoProof("it changes or reads a shape between its layers")
        result: torch.Tensor = values[-1]
        return result

    try:
        (output,) = trace.trace(with_one_shape, (2, 4), (), torch.device("cpu")).outputs
        source.write(Expression((output,), False), main=0, has_pairs=[])
    except NoProof:
        raise
    except Exception as error:  # what torch raises for arguments that it refuses
        raise NoProof(f"no epilogue can compute the function between its layers: {error}") from error
    if (output.kind, output.dtype) != ("full", torch.float32):
        raise NoProof("the function between its layers has another shape or dtype")
    if _changes_aliases(activation):
        raise NoProof("it changes a value in place that it reads twice between its layers")
    return activation


def _changes_aliases(activation: Pointwise) -> bool:
    """Whether an operation may change a value in place that another one reads.

    Which values share memory depends on dtypes: `x.float()` is x itself only for float32.
    """
    with torch.inference_mode(False), torch.no_grad():
        values = activation.values(torch.ones(2, 4, device="cpu"))
    is_in_place = any(value._version for value in values)
    reads = [
        position
        for operation in activation.operations
        for position in {*operation.arguments, *dict(operation.options).values()}
        if isinstance(position, Reference)
    ]
    return is_in_place and len({*reads}) < len(reads)


def _is_of_torch(function: Any) -> bool:
    """Whether it is a function of torch or an operator of Python, whose code reads nothing that can change."""
    if function is getattr or not callable(function):
        return False
    return isinstance(function, BuiltinFunctionType) or str(function.__module__).startswith("torch.")


def _operand(value: Any, values: dict[torch.fx.Node, Reference], node: torch.fx.Node) -> Any:
    if isinstance(value, torch.fx.Node) and value in values:
        return values[value]
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise NoProof(f"it computes {_name(node)} of {value}")


def rms_norm(module: torch.nn.Module) -> float:
    """The epsilon of a norm that computes x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, in float32.

    Raises:
      NoProof: its code does not show that.
    """
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"]:
        raise NoProof(f"its parameters are {', '.join(names) or 'none'}, not the weight alone")
    if module.weight.ndim != 1:
        raise NoProof("its weight has more than one dimension")
    if type(module) is torch.nn.RMSNorm:
        if module.eps is None or has_hooks(module):
            raise NoProof("it has hooks" if has_hooks(module) else "its epsilon depends on the dtype of x")
        return module.eps
    return _NormTrace(module).result(_trace(module, "forward"))


def experts(module: torch.nn.Module) -> None:
    """Returns if a module of transformers computes down(silu(gate(x)) * up(x)) for the experts of each token, and sums
    the results with their weights.

    Raises:
      NoProof: its code does not show that.
    """
    _check_call(module)
    kind = type(module)
    eager = inspect.unwrap(kind.forward)
    digest = _digest(eager)
    if digest not in _EXPERTS_FORWARD:
        raise NoProof(f"the code of {kind.__name__}.forward (digest {digest}) is not known")
    required = {
        "has_gate": True, "has_bias": False, "has_post_expert_norm": False, "is_transposed": False,
        "is_concatenated": True, "_is_expert_parallel": False,
    }  # fmt: skip
    for name, value in required.items():
        if getattr(module, name, value) is not value:
            raise NoProof(f"{name} is {getattr(module, name)!r}")
    if not hasattr(kind, "_apply_gate"):
        raise NoProof(f"{kind.__name__} has no _apply_gate")
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if eager is not kind.forward:
        if kind.forward.__globals__["__name__"] != "transformers.integrations.moe":
            raise NoProof(f"{kind.__name__}.forward is wrapped by {kind.forward.__globals__['__name__']}")
        if implementation not in _EXPERTS_IMPLEMENTATIONS:
            raise NoProof(f"its experts implementation is {implementation!r}")
    activation = getattr(module, "act_fn", None)
    if not isinstance(activation, torch.nn.Module):
        raise NoProof("act_fn is not a module")
    if type(activation) is not torch.nn.SiLU:
        graph = _trace(activation, "forward")
        if not _is_silu(activation, _result(graph)):
            raise NoProof(f"act_fn computes {_name(_result(graph))}, not silu")
        _check_operations(graph, {*_inputs(graph), _result(graph)})
    graph = _trace(module, "_apply_gate")
    (z,) = _inputs(graph)
    sources, inner = _gate_and_up(module, _result(graph))
    if sources != [z]:
        raise NoProof("_apply_gate does not split its argument alone")
    _check_operations(graph, {z, *inner})


_EXPERTS_FORWARD = frozenset({"e7aef0c2abf5f6a2", "d52dc7c02b15aa1c"})
"""`_digest` of MixtralExperts.forward, whose code some fifty models of transformers share: of 5.17, and of 5.18 to
5.24, where a token may have an expert that is on no rank."""

_EXPERTS_IMPLEMENTATIONS = (None, "eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe")
"""Names in transformers' ExpertsInterface of kernels that all compute what the code of forward does."""


def _digest(function: Callable[..., Any]) -> str:
    """A digest of a function's code without annotations, docstring and decorators."""
    definition = function_definition(function)
    if definition is None:
        return "without source"
    for node in ast.walk(definition):
        if isinstance(node, ast.arg):
            node.annotation = None
    definition.decorator_list, definition.returns = [], None
    if ast.get_docstring(definition) is not None:
        definition.body = definition.body[1:]
    return hashlib.sha256(ast.unparse(definition).encode()).hexdigest()[:16]


def function_definition(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """The syntax tree of a function; None without its source."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return definition if isinstance(definition, ast.FunctionDef) else None


def _check_call(module: torch.nn.Module) -> None:
    """Refuses a module whose call is more than the forward of its class."""
    if has_hooks(module) or "forward" in vars(module):
        raise NoProof("it has hooks or a forward of its own")
    if type(module).__call__ is not torch.nn.Module.__call__:
        raise NoProof(f"{type(module).__name__} has a __call__ of its own")


class _AttributeReads:
    """Records the attributes that a trace reads from its module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.kind = module, type(module)
        self.names: set[str] = set()

    def __enter__(self) -> _AttributeReads:
        names = self.names

        def read(module: Any, name: str) -> Any:
            names.add(name)
            return super(recorder_class, module).__getattribute__(name)  # type: ignore[arg-type]  # a class, made below

        recorder_class = type(self.kind.__name__, (_Silent, self.kind), {"__getattribute__": read})
        self.module.__class__ = recorder_class
        return self

    def __exit__(self, *exception: object) -> None:
        self.module.__class__ = self.kind

    def check(self, *, is_guarded: bool, path: str = "", reads: _Reads | None = None) -> None:
        """Refuses code that reads mutable attributes.

        Args:
          is_guarded: whether setting an attribute ends the proof.
          path: of the module in the block.
          reads: gets what may change.
        """
        module = self.module
        methods: dict[str, Any] = {"forward": self.kind.forward}
        for name in self.names - _MODULE_ATTRIBUTES:
            if name.startswith("__") or hasattr(torch.nn.Module, name):
                continue
            if name in vars(module):
                value = vars(module)[name]
                is_constant = is_guarded and (_is_immutable(value) or _is_function(value, module, reads is not None))
            else:
                value, method = None, getattr(self.kind, name, None)
                is_method = callable(method) and (reads is None or isinstance(method, FunctionType))
                is_constant = name in module._parameters or name in module._modules or is_method
                if is_method:
                    methods[name] = method
            if not is_constant:
                raise NoProof(f"its code reads the attribute {name}, which can change later")
            if reads is not None and (name in vars(module) or name in methods):
                reads.attributes[path, name] = value
        if reads is not None:
            reads.methods.update({(path, name): method for name, method in methods.items()})


class _Reads(NamedTuple):
    """What code reads that may change later.

    Attributes:
      attributes: (submodule, attribute) -> value; see `MLPParts`.
      methods: (submodule, method) -> function.
    """

    attributes: dict[tuple[str, str], Any]
    methods: dict[tuple[str, str], Any]


class _Silent:
    """Hides a derived class from the module's own __init_subclass__."""

    def __init_subclass__(cls) -> None:
        pass


_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))


def _is_immutable(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_immutable, value))
    return value is None or isinstance(value, (int, float, str, torch.dtype))


def is_same(value: Any, other: Any) -> bool:
    """Whether they are one object, or constants that are equal in all bits, as in a pickle."""
    if value is other:
        return True
    # 0.0 == -0.0 and 1 == True, but their texts differ.
    return type(value) is type(other) and _is_immutable(value) and repr(value) == repr(other)


def _is_function(value: Any, module: torch.nn.Module, is_strict: bool) -> bool:
    """Whether it is a function, and with `is_strict` one without a state that may change."""
    if not is_strict:
        return callable(value)
    if isinstance(value, functools.partial):  # whose keywords are in `MLPParts.keywords`
        is_constant = all(map(_is_immutable, (*value.args, *value.keywords.values())))
        return is_constant and _is_function(value.func, module, is_strict)
    if isinstance(value, MethodType):
        return value.__self__ is module
    is_builtin = isinstance(value, BuiltinFunctionType)
    return is_builtin or (isinstance(value, FunctionType) and not value.__closure__)


class _Tracer(torch.fx.Tracer):
    """Follows the code of a module down to torch.nn's own submodules.

    Args:
      method: of the module.
      reads: gets what the code of submodules reads; None refuses submodules that read attributes.
    """

    def __init__(self, method: str, reads: _Reads | None = None) -> None:
        super().__init__()
        self.reads = reads
        self.traced_func_name = method
        self.proxy_buffer_attributes = True  # or a trace would change them
        self.proxies: list[torch.fx.Proxy] = []

    def is_leaf_module(self, module: torch.nn.Module, name: str) -> bool:
        return type(module) in (torch.nn.Linear, torch.nn.SiLU)

    def call_module(self, module: torch.nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        _check_call(module)
        if self.is_leaf_module(module, ""):
            if type(module) is torch.nn.SiLU and self.reads is not None:
                path = self.path_of_module(module)
                self.reads.attributes[path, "inplace"] = module.inplace
                self.reads.methods[path, "forward"] = torch.nn.SiLU.forward
            return super().call_module(module, forward, args, kwargs)
        with _AttributeReads(module) as reads:
            result = super().call_module(module, forward, args, kwargs)
        reads.check(is_guarded=self.reads is not None, path=self.path_of_module(module), reads=self.reads)
        return result

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        self.proxies.append(super().proxy(node))
        return self.proxies[-1]

    def getattr(self, attr: str, value: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        value_or_proxy = super().getattr(attr, value, parameter_proxy_cache)
        if isinstance(value_or_proxy, torch.fx.Proxy) and isinstance(value, torch.nn.Parameter):
            return _Weight(value_or_proxy.node, self, value.dtype)
        return value_or_proxy


class _Weight(torch.fx.Proxy):
    """A parameter; its dtype is a value in the trace, not a proxy."""

    def __init__(self, node: torch.fx.Node, tracer: torch.fx.Tracer, dtype: torch.dtype) -> None:
        super().__init__(node, tracer)
        self.dtype = dtype


def _trace(module: torch.nn.Module, method: str, reads: _Reads | None = None) -> torch.fx.Graph:
    """The operations of a call, if they do not depend on the mode. `reads` is that of `_Tracer`."""
    _check_call(module)
    graphs = []
    for is_training in (False, True):
        for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
            with _snapshot(module), mode(), _without_autocast():
                for part in module.modules():
                    part.training = is_training
                with _AttributeReads(module) as own_reads:
                    try:
                        graphs.append(_graph(module, method, reads))
                    except NoProof:
                        raise
                    except Exception as error:  # code of other packages may raise anything for a proxy
                        raise NoProof(f"its code cannot be traced ({type(error).__name__})") from error
                own_reads.check(is_guarded=True, reads=reads)
    if len({str(graph) for graph in graphs}) > 1:
        raise NoProof("what it computes depends on its mode, like a dropout")
    return graphs[0]


def _graph(module: torch.nn.Module, method: str, reads: _Reads | None) -> torch.fx.Graph:
    tracer = _Tracer(method, reads)
    graph = tracer.trace(module)
    if any(vars(proxy).keys() - _PROXY_ATTRIBUTES for proxy in tracer.proxies):
        raise NoProof("its code sets attributes of tensors")
    return graph


_PROXY_ATTRIBUTES = frozenset({"tracer", "node", "dtype", "root", "attr", "_node"})


@contextmanager
def _snapshot(module: torch.nn.Module) -> Iterator[None]:
    """Restores the attributes of each part at the end, and the contents of lists and dicts among them.

    Raises:
      NoProof: an attribute other than `training` was changed.
    """
    parts = [*module.modules()]
    before = [({**vars(part)}, _contents(vars(part))) for part in parts]
    is_changed = False
    try:
        yield
    finally:
        for part, (attributes, contents) in zip(parts, before):
            now = vars(part)
            is_changed |= now.keys() != attributes.keys() or any(
                now[name] is not value for name, value in attributes.items() if name != "training"
            )
            now.clear()
            now.update(attributes)
            for (container, old), (_, new) in zip(contents, _contents(now)):
                if len(old) != len(new) or any(a is not b for a, b in zip(old, new)):
                    is_changed = True
                    _refill(container, old)
    if is_changed:
        raise NoProof("its call changes the module")


def _contents(attributes: dict[str, Any]) -> list[tuple[Any, list[Any]]]:
    """The containers among the attributes, each with its contents."""
    containers = [value for value in attributes.values() if isinstance(value, (list, dict, set))]
    return [
        (container, [*container.keys(), *container.values()] if isinstance(container, dict) else [*container])
        for container in containers
    ]


def _refill(container: Any, contents: list[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        half = len(contents) // 2
        container.update(zip(contents[:half], contents[half:]))
    elif isinstance(container, set):
        container.update(contents)
    else:
        container.extend(contents)


@contextmanager
def _without_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


class _Recorder(TorchFunctionMode):
    """The names of the operations of a call on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.mode = self._mode()

    def _mode(self) -> tuple[bool, ...]:
        kinds = ("cpu", "cuda")
        return (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *map(torch.is_autocast_enabled, kinds)
        )  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name != "__get__":
            self.names.append(_plain_name(name))
        if self._mode() != self.mode:
            raise NoProof("its code changes the mode of gradients or of autocast")
        return func(*args, **(kwargs or {}))


def _plain_name(name: str) -> str:
    """The plain name of an operator, reflected or not: "mul" for "__rmul__"."""
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
        return name[1:] if name in ("radd", "rmul", "rsub", "rpow", "rtruediv") else name
    return name


def operations(module: torch.nn.Module) -> list[str] | None:
    """The names of the tensor operations in the module's trace; None for torch.nn.RMSNorm, which has no trace."""
    if type(module) is torch.nn.RMSNorm:
        return None
    names = [_name_in_call(module, node) for node in _Tracer("forward", _Reads({}, {})).trace(module).nodes]
    return sorted(name for name in names if name is not None)


def checked_call(module: torch.nn.Module, x: torch.Tensor, expected: list[str] | None) -> torch.Tensor:
    """module(x), whose tensor operations must be those of its trace.

    Code that checks whether x is a tensor may compute something else with a proxy.

    Raises:
      NoProof: the operations differ.
    """
    with _Recorder() as recorder:
        y: torch.Tensor = module(x)
    if expected is not None and sorted(recorder.names) != expected:
        raise NoProof(f"called with a tensor it computes {', '.join(recorder.names)}, not {', '.join(expected)}")
    return y


def _name_in_call(module: torch.nn.Module, node: torch.fx.Node) -> str | None:
    """The name of a node's operation on a tensor; None if it has none."""
    if node.op == "call_module":
        return "linear" if isinstance(module.get_submodule(str(node.target)), torch.nn.Linear) else "silu"
    if node.op not in ("call_method", "call_function") or node.target in (getattr, operator.getitem):
        return None
    return _plain_name(_name(node))


def _inputs(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The single argument of the trace."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise NoProof(f"it takes {len(inputs)} arguments, not x alone")
    return inputs


def _result(graph: torch.fx.Graph) -> torch.fx.Node:
    (output,) = [node for node in graph.nodes if node.op == "output"]
    (result,) = output.args
    if not isinstance(result, torch.fx.Node):
        raise NoProof("its result is not one tensor")
    return result


def _check_operations(graph: torch.fx.Graph, expected: set[torch.fx.Node]) -> None:
    """Refuses operations beyond those of the function."""
    for node in graph.nodes:
        if node.op != "output" and node not in expected:
            raise NoProof(f"it computes {_name(node)}")


def _name(node: torch.fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def _linear_argument(module: torch.nn.Module, node: torch.fx.Node) -> torch.fx.Node:
    """The argument of a call of a torch.nn.Linear."""
    is_linear = node.op == "call_module" and type(module.get_submodule(str(node.target))) is torch.nn.Linear
    if not is_linear or len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], torch.fx.Node):
        raise NoProof(f"it computes {_name(node)} where a torch.nn.Linear is expected")
    return node.args[0]


def _linear_name(module: torch.nn.Module, node: torch.fx.Node, x: torch.fx.Node) -> str:
    if _linear_argument(module, node) is not x:
        raise NoProof(f"{node.target} does not take x itself")
    return str(node.target)


def _gate_and_up(module: torch.nn.Module, mul: torch.fx.Node) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """silu(gate) * up: the nodes of gate and up, or the node that holds both as halves; and the nodes in between."""
    if not _is_call(mul, "mul", torch.mul, operator.mul) or len(mul.args) != 2 or mul.kwargs:
        raise NoProof(f"it computes {_name(mul)} where silu(gate) * up is expected")
    first, second = mul.args
    if not isinstance(first, torch.fx.Node) or not isinstance(second, torch.fx.Node):
        raise NoProof("it multiplies by a number")
    silu, up = (first, second) if _is_silu(module, first) else (second, first)
    if not _is_silu(module, silu):
        raise NoProof(f"it computes {_name(first)} and {_name(second)}, of which neither is silu")
    gate = silu.args[0]
    if not isinstance(gate, torch.fx.Node):
        raise NoProof("it computes silu of a number")
    if gate.op == "call_module" and up.op == "call_module":
        return [gate, up], [mul, silu]
    halves, chunks = _halves([gate, up])
    source = chunks[0].args[0]
    if not isinstance(source, torch.fx.Node):
        raise NoProof("it splits a number")
    return [source], [mul, silu, *halves, *chunks]


def _halves(nodes: list[torch.fx.Node]) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """The two halves of chunk(2, dim=-1), and the node of that chunk."""
    chunks = []
    for position, half in enumerate(nodes):
        if half.op != "call_function" or half.target is not operator.getitem or half.args[1] != position:
            raise NoProof(f"it computes {_name(half)} where gate and up, in this order, are expected")
        chunk = half.args[0]
        assert isinstance(chunk, torch.fx.Node)  # of getitem
        options = dict(zip(("chunks", "dim"), chunk.args[1:])) | chunk.kwargs
        if not _is_call(chunk, "chunk", torch.chunk) or options != {"chunks": 2, "dim": -1}:
            raise NoProof(f"it computes {_name(chunk)} where chunk(2, dim=-1) is expected")
        chunks.append(chunk)
    if chunks[0] is not chunks[1]:
        raise NoProof("gate and up are not the halves of one tensor")
    return nodes, chunks[:1]


def _is_call(node: torch.fx.Node, method: str, *functions: Callable[..., Any]) -> bool:
    if node.op == "call_method":
        return node.target == method
    return node.op == "call_function" and any(node.target is function for function in functions)


def _is_silu(module: torch.nn.Module, node: torch.fx.Node) -> bool:
    if len(node.args) != 1:
        return False
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))) is torch.nn.SiLU and not node.kwargs
    return node.op == "call_function" and node.target is _FUNCTIONAL.silu and not node.kwargs.get("inplace")


class _Value(NamedTuple):
    """The meaning of a node in a norm's trace.

    Attributes:
      kind: "x", "weight", "dtype" (of both), "square", "mean", "mean + eps", "1 / rms", "x / rms", or "y".
      is_wide: whether its elements are float32.
      eps: of the norm, from "mean + eps" on.
    """

    kind: str
    is_wide: bool
    eps: float = 0.0


class _NormTrace:
    """Follows the trace of a norm that is called with x in the dtype of its weight."""

    def __init__(self, module: Any) -> None:
        self.shape, self.dtype = module.weight.shape, module.weight.dtype
        self.values: dict[torch.fx.Node, _Value] = {}

    def result(self, graph: torch.fx.Graph) -> float:
        """The epsilon of the norm."""
        _inputs(graph)
        for node in graph.nodes:
            if node.op == "output":
                break
            self.values[node] = self._value(node)
        value = self.values[_result(graph)]
        if value.kind != "y" or (value.is_wide and self.dtype != torch.float32):
            raise NoProof("its result is not the norm times the weight in the dtype of x")
        return value.eps

    def _value(self, node: torch.fx.Node) -> _Value:
        is_float32 = self.dtype == torch.float32
        if node.op == "placeholder":
            return _Value("x", is_float32)
        if node.op == "get_attr" and node.target == "weight":
            return _Value("weight", is_float32)
        arguments = [self._argument(argument) for argument in node.args]
        keywords = {name: self._argument(argument) for name, argument in node.kwargs.items()}
        value = None
        if node.op in ("call_method", "call_function") and arguments:
            value = self._call(node, arguments, keywords)
        if value is None:
            raise NoProof(f"it computes {_name(node)}, which the norm does not")
        return value

    def _argument(self, argument: Any) -> Any:
        return self.values[argument] if isinstance(argument, torch.fx.Node) else argument

    def _call(self, node: torch.fx.Node, arguments: list[Any], keywords: dict[str, Any]) -> _Value | None:
        first, *rest = arguments
        if node.target is getattr:
            is_dtype = rest == ["dtype"] and first.kind in ("x", "weight")
            return _Value("dtype", first.is_wide) if is_dtype else None
        if node.target is _FUNCTIONAL.rms_norm:
            return self._norm(dict(zip(("input", "normalized_shape", "weight", "eps"), arguments)) | keywords)
        if node.op == "call_method" and node.target in ("to", "float", "type_as"):
            return self._cast(first, [*rest, *keywords.values()], keywords)
        if _is_call(node, "mean", torch.mean):
            dims = dict(zip(("dim", "keepdim"), rest)) | keywords
            is_last = dims in ({"dim": dim, "keepdim": True} for dim in (-1, (-1,), [-1]))
            return _Value("mean", True) if _kind(first) == "square" and is_last else None
        if keywords:
            return None
        if _is_call(node, "mul", torch.mul, operator.mul) and len(rest) == 1:
            return self._multiply(first, rest[0])
        if _is_call(node, "add", torch.add, operator.add) and len(rest) == 1:
            mean, eps = (rest[0], first) if isinstance(first, float) else (first, rest[0])
            is_shifted = _kind(mean) == "mean" and isinstance(eps, float)
            return _Value("mean + eps", True, eps) if is_shifted else None
        power = self._power(node, rest)
        if power == 2 and _kind(first) == "x" and first.is_wide:
            return _Value("square", True)
        return _Value("1 / rms", True, first.eps) if power == -0.5 and _kind(first) == "mean + eps" else None

    def _power(self, node: torch.fx.Node, rest: list[Any]) -> float | None:
        if _is_call(node, "pow", torch.pow, operator.pow) and len(rest) == 1 and isinstance(rest[0], (int, float)):
            return rest[0]
        if rest:
            return None
        return 2 if _is_call(node, "square", torch.square) else -0.5 if _is_call(node, "rsqrt", torch.rsqrt) else None

    def _multiply(self, a: Any, b: Any) -> _Value | None:
        values = {_kind(factor): factor for factor in (a, b)}
        if a == b and _kind(a) == "x" and a.is_wide:
            return _Value("square", True)
        if values.keys() == {"x", "1 / rms"}:
            return _Value("x / rms", True, values["1 / rms"].eps)
        if values.keys() == {"x / rms", "weight"}:
            return _Value("y", a.is_wide or b.is_wide, values["x / rms"].eps)
        return None

    def _norm(self, arguments: dict[str, Any]) -> _Value | None:
        kinds = [_kind(arguments.get(name)) for name in ("input", "weight")]
        eps = arguments.get("eps")
        is_whole = tuple(arguments.get("normalized_shape") or ()) == tuple(self.shape)
        if kinds != ["x", "weight"] or not is_whole or not isinstance(eps, float):
            return None
        return _Value("y", arguments["input"].is_wide, eps)

    def _cast(self, source: Any, dtypes: list[Any], keywords: dict[str, Any]) -> _Value | None:
        """A cast to float32 or to the dtype of x and of the weight."""
        if _kind(source) not in ("x", "x / rms", "weight", "y") or len(dtypes) > 1 or not {*keywords} <= {"dtype"}:
            return None
        dtype = dtypes[0] if dtypes else torch.float32  # of float()
        if isinstance(dtype, _Value):
            is_wide, is_dtype = dtype.is_wide, dtype.kind in ("x", "weight", "dtype")
        else:
            is_wide, is_dtype = dtype == torch.float32, dtype in (torch.float32, self.dtype)
        return source._replace(is_wide=is_wide) if is_dtype else None


def _kind(value: Any) -> str | None:
    return value.kind if isinstance(value, _Value) else None
