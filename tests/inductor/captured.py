"""Compiles a function with a pass over its graph, which is Inductor's, but runs as it is: no compiler is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table


class Captured:
    """captured(*tensors) calls the compiled function; `graphs` are what was compiled, after the pass."""

    def __init__(self, function: Callable[..., Any], apply: Callable[[torch.fx.Graph], None], **options: Any) -> None:
        self.graphs: list[torch.fx.Graph] = []

        def compiler(module: torch.fx.GraphModule, _: Any) -> Any:
            apply(module.graph)
            module.graph.lint()
            module.recompile()
            self.graphs.append(module.graph)
            return make_boxed_func(module.forward)

        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())
        self.run = torch.compile(function, backend=backend, fullgraph=True, **options)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return self.run(*tensors)

    def operators(self, graph: int = 0) -> list[str]:
        """The names of the operators of a graph that compute: neither views nor items of tuples."""
        views = ("permute", "view", "reshape", "unsqueeze")
        names = [
            str(node.target).partition(".")[::2] for node in self.graphs[graph].nodes if node.op == "call_function"
        ]
        parts = [(space, name.partition(".")[0]) for space, name in names if name]
        return [name for space, name in parts if space in ("aten", "prims", "stoneware") and name not in views]
