"""Traces the code of a module with torch.fx, in each mode, and leaves the module as it was."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from stoneware.nn.arguments import has_hooks
from stoneware.nn.proofs.attribute_reads import AttributeReads, Reads
from stoneware.nn.proofs.no_proof import NoProof


def trace(
    module: torch.nn.Module, method: str, reads: Reads | None = None, *, autocast: Sequence[bool] = (False,)
) -> torch.fx.Graph:
    """The operations of a call, if they do not depend on the mode. `reads` is that of `Tracer`; `autocast`: whether
    torch.autocast is on, in turn."""
    check_call(module)
    graphs = []
    for is_training, is_cast in itertools.product((False, True), autocast):
        for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
            with _snapshot(module), mode(), _autocast(is_cast):
                for part in module.modules():
                    part.training = is_training
                with AttributeReads(module) as own_reads:
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


def _graph(module: torch.nn.Module, method: str, reads: Reads | None) -> torch.fx.Graph:
    tracer = Tracer(method, reads)
    graph = tracer.trace(module)
    if any(vars(proxy).keys() - _PROXY_ATTRIBUTES for proxy in tracer.proxies):
        raise NoProof("its code sets attributes of tensors")
    return graph


_PROXY_ATTRIBUTES = frozenset({"tracer", "node", "dtype", "root", "attr", "_node"})


class Tracer(torch.fx.Tracer):
    """Follows the code of a module down to torch.nn's own submodules.

    Args:
      method: of the module.
      reads: gets what the code of submodules reads; None refuses submodules that read attributes.
    """

    def __init__(self, method: str, reads: Reads | None = None) -> None:
        super().__init__(autowrap_modules=())  # type: ignore[arg-type]  # no proof has math.* of a tensor
        self.reads = reads
        self.traced_func_name = method
        self.proxy_buffer_attributes = True  # or a trace would change them
        self.proxies: list[torch.fx.Proxy] = []

    def is_leaf_module(self, module: torch.nn.Module, name: str) -> bool:
        return type(module) in (torch.nn.Linear, torch.nn.SiLU)

    def call_module(self, module: torch.nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        check_call(module)
        if self.is_leaf_module(module, ""):
            if type(module) is torch.nn.SiLU and self.reads is not None:
                path = self.path_of_module(module)
                self.reads.attributes[path, "inplace"] = module.inplace
                self.reads.methods[path, "forward"] = torch.nn.SiLU.forward
            return super().call_module(module, forward, args, kwargs)
        with AttributeReads(module) as reads:
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


def check_call(module: torch.nn.Module) -> None:
    """Refuses a module whose call is more than the forward of its class."""
    if has_hooks(module) or "forward" in vars(module):
        raise NoProof("it has hooks or a forward of its own")
    if type(module).__call__ is not torch.nn.Module.__call__:
        raise NoProof(f"{type(module).__name__} has a __call__ of its own")


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
def _autocast(is_on: bool) -> Iterator[None]:
    has_gpu = torch.cuda.is_available()  # without one torch warns
    with torch.autocast("cpu", torch.bfloat16, enabled=is_on), torch.autocast("cuda", enabled=is_on and has_gpu):
        yield
