"""What is linked for each value of enable_backward at each level, and for each set of needs."""

from __future__ import annotations

import functools
import itertools

import pytest
import tile_layer

import stoneware as sw
from stoneware.runtime import native
from stoneware.tile import needs

ALL = frozenset({"forward", "dA", "dB"})

# Each level's value -> the gradients that it allows, or None if the next wider level decides.
VALUES = {None: None, True: {"dA", "dB"}, False: set(), frozenset({"dA"}): {"dA"}, frozenset({"dB"}): {"dB"}}
NEEDS = [None, *(frozenset(names) for num in (1, 2, 3) for names in itertools.combinations(sorted(ALL), num))]


def described(enable_backward=None):
    return sw.tile.matmul(m=64, n=96, k=64, a="bf16", b="bf16", enable_backward=enable_backward)


def expected(asked, matmul, kernel, module, scope, variable) -> set[str]:
    for value in (matmul, kernel, module, scope, variable):
        if VALUES[value] is not None:
            return ({"forward"} | VALUES[value]) & (ALL if asked is None else asked)
    return set(ALL if asked is None else asked)


def set_wider_levels(scope, variable, monkeypatch, stack):
    if variable is not None:
        monkeypatch.setenv("STONEWARE_TILE_BACKWARD", str(int(variable)))
    if scope is not None:
        stack.enter_context(sw.tile.enable_backward(scope))


@pytest.fixture
def stack():
    import contextlib

    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("variable", [None, True, False])
@pytest.mark.parametrize("scope", list(VALUES))
def test_the_narrowest_level_decides(scope, variable, monkeypatch, stack):
    set_wider_levels(scope, variable, monkeypatch, stack)
    for asked, matmul, kernel, module in itertools.product(NEEDS, VALUES, VALUES, VALUES):
        found = needs.resolve(described(matmul), needs=asked, kernel=kernel, module=module)
        assert found.directions == expected(asked, matmul, kernel, module, scope, variable)
        assert found.absent.keys() == ALL - found.directions


# Level -> a value that differs from what the wider levels say, with these.
LEVELS = {
    "default": {},
    "variable": {"variable": False},
    "scope": {"variable": False, "scope": True},
    "module": {"scope": True, "module": frozenset({"dA"})},
    "kernel": {"module": False, "kernel": frozenset({"dB"})},
    "matmul": {"kernel": True, "matmul": False},
    "matmul, one gradient": {"module": False, "kernel": False, "matmul": frozenset({"dA"})},
}


@functools.cache
def layer_source() -> str:
    return tile_layer.source(described())


@pytest.mark.parametrize("asked", NEEDS, ids=lambda asked: "+".join(sorted(asked)) if asked else "all")
@pytest.mark.parametrize("level", LEVELS)
def test_a_module_of_each_level_and_set_of_needs_is_built_linked_and_loaded(level, asked, monkeypatch, stack):
    values = dict.fromkeys(("matmul", "kernel", "module", "scope", "variable")) | LEVELS[level]
    set_wider_levels(values["scope"], values["variable"], monkeypatch, stack)
    mm = described(values["matmul"])
    module = sw.tile.Module(layer_source(), [mm], enable_backward=values["module"])
    linked = module.link("layer", needs=asked, enable_backward=values["kernel"])
    assert {direction for _, direction in linked.matmuls} == expected(asked, **values)
    reason = native.why_missing("stoneware.runtime._driver")
    assert reason is None
    sw.tile.Kernel(linked, shared_bytes=tile_layer.shared_bytes(mm))  # raises an error for other bytes


@pytest.mark.parametrize(
    ("level", "message"),
    [
        ({"module": False}, "enable_backward=False of the module leaves it out; turn it on there"),
        ({"kernel": frozenset({"dB"})}, "enable_backward={'dB'} of the kernel leaves it out"),
        ({"matmul": False}, "enable_backward=False of the matmul mm leaves it out"),
        ({"scope": False}, r"sw.tile.enable_backward\(False\) leaves it out"),
        ({"variable": False}, "STONEWARE_TILE_BACKWARD=0 leaves it out"),
    ],
)
def test_a_call_of_a_gradient_that_is_off_names_the_level(level, message, monkeypatch, stack):
    values = dict.fromkeys(("matmul", "kernel", "module", "scope", "variable")) | level
    set_wider_levels(values["scope"], values["variable"], monkeypatch, stack)
    text = 'extern "C" __global__ void k(mm::TileDC* c, mm::TileB* b, float* out) { mm::SumDA s; s.Clear(); '
    module = sw.tile.Module(
        text + "mm::dA(s, *c, *b); s.Store(out, 64); }", [described(values["matmul"])], enable_backward=values["module"]
    )
    with pytest.raises(ValueError, match="kernel k calls mm::dA, which is not linked: " + message):
        module.link(enable_backward=values["kernel"])


def test_needs_may_differ_between_matmuls():
    one, two = (sw.tile.matmul(m=64, n=64, k=64, a="bf16", b="bf16", name=name) for name in ("one", "two"))
    text = """
extern "C" __global__ void k(one::TileA* t, float* out) {
  if constexpr (one::has_forward) {
    one::SumC s;
    s.Clear();
    one::forward(s, *t, *(one::TileB*)(t + 1));
    s.Store(out, 64);
  }
  if constexpr (two::has_dA) {
    two::SumDA s;
    s.Clear();
    two::dA(s, *(two::TileDC*)t, *(two::TileB*)(t + 1));
    s.Store(out, 64);
  }
}"""
    linked = sw.tile.link(text, [one, two], needs={"one": {"forward"}, "two": {"dA"}})
    assert linked.matmuls == (("one", "forward"), ("two", "dA"))
    with pytest.raises(ValueError, match="needs has three, and the matmuls are one, two; correct the names"):
        sw.tile.link(text, [one, two], needs={"three": {"forward"}})


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ("forward", TypeError, "needs='forward' must be a set of"),
        (set(), ValueError, r"needs=\[\] must have at least one"),
        ({"forward", "dC"}, ValueError, r"needs=\['dC', 'forward'\] must have at least one of"),
    ],
)
def test_wrong_needs_are_refused(asked, error, message):
    with pytest.raises(error, match=message):
        sw.tile.link("", [described()], needs=asked)


def test_needs_of_a_direction_that_a_matmul_lacks_are_refused():
    fp8 = sw.tile.matmul(m=64, n=64, k=64, a="e4m3", b="e4m3", layouts=("row", "col"))
    with pytest.raises(ValueError, match="needs has 'dA', which mm does not have: dA must have operands of 16 or 32"):
        sw.tile.link("", [fp8], needs={"dA"})


def test_a_wrong_variable_is_refused(monkeypatch):
    monkeypatch.setenv("STONEWARE_TILE_BACKWARD", "yes")
    with pytest.raises(ValueError, match="STONEWARE_TILE_BACKWARD='yes' must be 0 or 1"):
        needs.resolve(described())


def test_a_module_keeps_its_kernels_for_each_setting(monkeypatch):
    module = sw.tile.Module(layer_source(), [described()])
    shared = tile_layer.shared_bytes(described())

    def kernel(**arguments):
        return module.kernel("layer", shared_bytes=shared, **arguments)

    first = kernel(needs={"forward"})
    assert kernel(needs=["forward"]) is first
    assert kernel(needs={"mm": {"forward"}}) is first
    assert kernel() is not first
    with sw.tile.enable_backward(False):
        assert kernel() is not kernel(enable_backward=True)
    assert kernel() is kernel()
