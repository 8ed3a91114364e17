"""torch.compile with Stoneware's kernels: epilogues that Inductor's graphs contain, and candidates of max-autotune.

    compiled = torch.compile(model, options=sw.inductor.options())

    options.py      what torch.compile gets
    fusion.py       the pass: a matmul and the pointwise operators after it become one node
    region.py       which operators those are
    program.py      what they compute, as text
    operators.py    the torch operators of the new nodes
    gain.py         whether the table predicts that this is faster
    candidates.py   Stoneware's matmuls for Inductor's autotuning of aten.mm

Nothing changes unless the options are given. docs/epilogues.md describes what is fused.
"""

from stoneware.inductor.fusion import EpilogueFusion
from stoneware.inductor.options import options

__all__ = ["EpilogueFusion", "options"]
