"""An op outside of the package: a spec and a line in the registry are all that it takes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from fake_session import H200, Bench
from toy_op.spec import ADD, ADDCMUL, SPEC

import stoneware as sw
from stoneware import ops, specs
from stoneware.cli import exit_codes, main
from stoneware.errors import ForwardOnlyError
from stoneware.kernels import manifest
from stoneware.measuring import operands, workloads
from stoneware.ops import operation_of
from stoneware.report import figures
from stoneware.runtime import package_files
from stoneware.runtime.device import CPU
from stoneware.sessions.session import Ranks
from stoneware.tuning import bake, lookup, merge, table_file
from stoneware.tuning import sources as table_sources


@pytest.fixture(autouse=True)
def toy_op(monkeypatch, tmp_path):
    """Registers the op, in an installation without a table of it."""
    monkeypatch.setitem(specs.OPS, "toy_add", "toy_op.spec")
    monkeypatch.setitem(ops.APIS, "toy_add", "toy_op.api")
    monkeypatch.setitem(operands.OPERANDS, "toy_add", "toy_op.operands")
    monkeypatch.delitem(vars(sw), "toy_add", raising=False)
    monkeypatch.setenv("STONEWARE_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(package_files, "ROOT", tmp_path)
    # The bake leaves devices out that none of the build's kernels is for.
    kernel = {
        "id": "toy_sm90",
        "op": "toy_add",
        "backend": "toy_sm90",
        "arch": "sm_90a",
        "sha256": "",
        "size_bytes": 1,
        "config": {"a": "fp32", "b": "fp32", "out": "fp32", "tile": [64, 64, 64]},
    }
    document = {"schema": 1, "kernels": [kernel]}
    (tmp_path / "tables").mkdir()
    (tmp_path / "kernel_manifest.json").write_text(manifest.text_of(document))
    forget()
    yield
    forget()


def forget() -> None:
    manifest.packaged.cache_clear()
    table_file.packaged.cache_clear()
    table_sources.forget()


def tensors(m: int = 5, n: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(m, n), torch.randn(m, n)


@pytest.mark.parametrize("options", [{}, {"backend": "reference"}, {"backend": "vendor"}, {"config": ADDCMUL}], ids=str)
def test_call_gives_the_right_values_into_the_given_tensor(options):
    a, b = tensors()
    out = torch.full_like(a, float("nan"))
    assert sw.toy_add(a, b, out=out, **options) is out
    assert torch.allclose(out.double(), a.double() + 2 * b.double())
    assert torch.equal(sw.toy_add(a, b, **options), out)


def test_it_is_among_the_names_of_the_package():
    assert "toy_add" in sw.__all__ and "toy_add" in dir(sw)


def test_errors_are_those_of_every_op():
    a, b = tensors()
    with pytest.raises(TypeError, match="b of toy_add must be a torch.Tensor, not int"):
        sw.toy_add(a, 2)
    with pytest.raises(ValueError, match="unknown backend for toy_add; expected one of vendor, ref"):
        sw.toy_add(a, b, backend="triton_aot")
    with pytest.raises(ForwardOnlyError, match="toy_add has no backward, and a requires"):
        sw.toy_add(a.requires_grad_(), b)


@pytest.mark.parametrize("has_out", [False, True])
def test_it_is_an_operator_of_a_compiled_graph(has_out):
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def block(a, b, out):
        return sw.toy_add(a, b, out=out, config=ADD).relu()

    a, b = tensors()
    out = torch.empty_like(a) if has_out else None
    result = torch.compile(block, backend=counting, fullgraph=True)(a, b, out)
    assert torch.equal(result, (a + 2 * b).relu())
    assert any("stoneware.toy_add" in str(node.target) for node in graphs[0].graph.nodes)


def test_explain_says_what_runs_on_a_cpu(capsys):
    found = sw.explain("toy_add", m=5, n=7, k=1, device="cpu")
    assert (found.config, found.step) == (ADD, "default")
    assert str(found).startswith("toy_add m=5 n=7")
    arguments = ["explain", "toy_add", "-m", "5", "-n", "7", "-k", "1", "--device", "cpu"]
    assert main.run(arguments) == exit_codes.OK
    assert "vendor: toy.add_300" in capsys.readouterr().out
    assert main.run([*arguments, "--scales", "row"]) == exit_codes.USAGE
    assert "toy_add has no kinds of scales, only scaled_mm and grouped_mm have" in capsys.readouterr().err


def test_problems_are_its_layers_and_shapes():
    made = workloads.problems(ops=["toy_add"])
    assert [(one.m, one.n) for one in made] == [(4, 32), (16, 32)]
    assert workloads.problems(ops=["toy_add"], shapes=["3x8x1"]) == [SPEC.make_problem(m=3, n=8)]
    with pytest.raises(ValueError, match="of the form that toy_add takes: MxNxK"):
        workloads.problems(ops=["toy_add"], shapes=["2x3x8x1"])


def test_operands_are_compared_by_its_tolerance():
    given = operands.make(SPEC.make_problem(m=4, n=32), "cpu")
    operation_of(SPEC.name).make_plan(given.problem, ADDCMUL, CPU)(*given.arguments)
    expected = operands.reference(given)
    assert operands.compare(given.out, expected, given.problem).is_right
    given.out[1, 2] *= 2
    assert not operands.compare(given.out, expected, given.problem).is_right


def test_it_is_measured_baked_looked_up_and_reported(tmp_path):
    problems = workloads.problems(ops=["toy_add"])
    bench = Bench(tmp_path)
    tuned = bench.session(has_default=False)
    tuned.candidates_of = lambda problem: ([], operation_of(SPEC.name).candidates(problem, tuned.device))
    tuned.command = [sys.executable, str(Path(__file__).with_name("cpu_child.py"))]
    summary = tuned.measure(problems, Ranks())
    assert summary.failures == [] and summary.statuses == {"ok": 4}

    [folder] = merge.merge([bench.store.path], tmp_path / "samples").folders
    baked = bake.bake("toy_add", sorted(folder.iterdir()), manifest.packaged())
    (tmp_path / "tables" / "toy_add.table").write_bytes(baked)
    forget()
    found = sw.explain("toy_add", m=16, n=32, k=1, device=H200.name)
    assert (found.config, found.step, found.source) == (ADDCMUL, "exact", table_sources.WHEEL)
    near = lookup.find(
        SPEC.make_problem(m=12, n=32).key, H200, [table_sources.Source("wheel", table_file.packaged("toy_add"))]
    )
    assert (near.step, near.choice.config) == ("nearest m", ADDCMUL)
    assert (figures.layers(problems[0].key), figures.row_label(problems[0].key)) == (["toy_layer"], "32 × 1")
