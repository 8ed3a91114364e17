"""Which products a model has, from its config.json; what measuring them brought."""

from __future__ import annotations

import json
import os

import pytest
import torch

import stoneware as sw
from stoneware.errors import UnsupportedError
from stoneware.ops.dispatch import Operation
from stoneware.sessions import model, session
from stoneware.tuning import policy

LLAMA = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
MIXTRAL = {**LLAMA, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK = {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def sizes(config, tensor_parallel=1):
    return {
        one.name: (one.num_experts, one.n, one.k) if one.num_experts else (one.n, one.k)
        for one in model.layers(config, tensor_parallel)
    }


def test_a_dense_model_has_its_linears_apart_and_fused():
    assert sizes(LLAMA) == {
        "q": (4096, 4096),  # o has this shape too
        "kv": (1024, 4096),
        "qkv": (6144, 4096),
        "gate": (14336, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "lm_head": (128256, 4096),
    }


def test_tensor_parallelism_cuts_columns_and_rows():
    found = sizes(LLAMA, 8)
    assert (found["q"], found["kv"], found["o"]) == ((512, 4096), (128, 4096), (4096, 512))
    assert (found["gate_up"], found["down"], found["lm_head"]) == ((3584, 4096), (4096, 1792), (16032, 4096))
    # Of 8 key-value heads each of 16 ranks has a copy of one.
    assert sizes(LLAMA, 16)["kv"] == (128, 4096)


def test_a_mixture_has_experts_and_a_router():
    found = sizes(MIXTRAL)
    assert found["experts_gate_up"] == (8, 28672, 4096) and found["experts_down"] == (8, 4096, 14336)
    assert found["router"] == (8, 4096) and "gate_up" not in found


def test_latent_attention_shared_experts_and_dense_layers():
    found = sizes(DEEPSEEK, 8)
    assert (found["q_a"], found["q_b"], found["kv_a"]) == ((1536, 7168), (3072, 1536), (576, 7168))
    assert (found["kv_b"], found["o"], found["q_kv_a"]) == ((4096, 512), (7168, 2048), (2112, 7168))
    assert found["experts_gate_up"] == (256, 512, 7168) and found["shared_gate_up"] == (512, 7168)
    assert found["gate_up"] == (4608, 7168)


@pytest.mark.parametrize(
    ("config", "ranks", "text"),
    [
        ({**LLAMA, "hidden_size": None}, 1, "must have hidden_size, and lacks it; pass"),
        ({**LLAMA, "vocab_size": "many"}, 1, "vocab_size='many' of the model's config must be an int"),
        (LLAMA, 3, "tensor_parallel=3 must divide num_attention_heads=32; pass a divisor"),
        (LLAMA, 0, "tensor_parallel=0 must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(config, ranks, text):
    with pytest.raises(ValueError, match=text):
        model.layers(config, ranks)


def test_problems_double_the_tokens_up_to_the_most():
    problems, skipped = model.problems(
        [model.Layer("q", 64, 128)], model.tokens_up_to(100), ["bf16", "fp8", "fp8_block"]
    )
    assert skipped == []
    assert [one.m for one in problems if one.op == "matmul"] == [1, 2, 4, 8, 16, 32, 64, 100]
    assert {one.scales for one in problems if one.op == "scaled_mm"} == {"row", "block"}


def test_experts_get_their_share_of_the_tokens():
    problems, skipped = model.problems(
        [model.Layer("experts_down", 64, 128, 8, 2)], model.tokens_up_to(64), ["bf16", "fp8", "fp16"]
    )
    assert {(one.m, one.num_groups) for one in problems} == {(8, 8), (16, 8), (32, 8), (64, 8), (128, 8)}
    assert {one.a_dtype for one in problems} == {"bf16", "e4m3"}
    [reason] = skipped
    assert "experts_down in fp16: grouped_mm takes bf16" in reason


def test_heads_stay_in_16_bits_and_odd_sizes_are_named():
    problems, skipped = model.problems(
        [model.Layer("lm_head", 32001, 64), model.Layer("up", 72, 100)], [1, 2], ["bf16", "fp8"]
    )
    assert {(one.op, one.n) for one in problems} == {("matmul", 32001), ("matmul", 72)}
    [reason] = skipped
    assert "up in fp8: n=72 must be a positive multiple of 16" in reason


def test_a_name_of_a_module_that_a_terminal_would_obey_is_escaped():
    _, [reason] = model.problems([model.Layer("up\x1b[31m", 72, 100)], [1], ["fp8"])
    assert reason.startswith(r"up\x1b[31m in fp8: n=72 must")


def test_a_config_is_read_from_a_file_or_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA, "vocab_size": 1}))
    for path in (tmp_path, tmp_path / "config.json"):
        assert model.read_config(str(path))["vocab_size"] == 128256
    with pytest.raises(ValueError, match="must be a Hugging Face config.json, or a folder with one: .*; pass its path"):
        model.read_config(str(tmp_path / "none.json"))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, not a list"):
        model.read_config(str(tmp_path / "list.json"))
    (tmp_path / "text.json").write_text(json.dumps({**LLAMA, "text_config": None}))
    assert model.read_config(str(tmp_path / "text.json"))["vocab_size"] == 128256
    (tmp_path / "text.json").write_text('{"text_config": 5}')
    with pytest.raises(ValueError, match="text_config=5 of the model's config must be a JSON object"):
        model.read_config(str(tmp_path / "text.json"))


def test_a_pipe_a_device_and_a_file_without_end_are_refused_unread(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with (tmp_path / "long.json").open("wb") as file:
        file.truncate(model.MAX_CONFIG_BYTES + 1)
    for path, reason in (
        (tmp_path, r"it must be a regular file, and is a pipe \(FIFO\)"),
        ("/dev/zero", "it must be a regular file, and is a socket or device"),
        (tmp_path / "long.json", f"it has {model.MAX_CONFIG_BYTES + 1} bytes, and at most"),
    ):
        with pytest.raises(ValueError, match=rf"must be a Hugging Face config.json, or a folder .*{reason}.*; pass"):
            model.read_config(str(path))


def test_a_config_that_is_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ValueError, match="its JSON is nested too deeply; pass its path"):
        model.read_config(str(tmp_path))


def test_a_message_shows_the_start_of_a_long_or_deep_value(tmp_path):
    deep = json.loads("[" * 500 + "]" * 500)
    for value in (deep, ["text"] * 100_000, "x" * 100_000):
        with pytest.raises(ValueError, match="hidden_size=.* of the model's config must be an int") as caught:
            model.layers({**LLAMA, "hidden_size": value})
        assert len(str(caught.value)) < 700
        (tmp_path / "config.json").write_text(json.dumps({"text_config": value}))
        with pytest.raises(ValueError, match="text_config=.* of the model's config must be a JSON object") as caught:
            model.read_config(str(tmp_path))
        assert len(str(caught.value)) < 700


class Fp8(torch.nn.Module):
    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(n, k).to(torch.float8_e4m3fn))


def test_a_module_has_its_linears_by_dtype():
    module = torch.nn.Sequential(
        torch.nn.Linear(64, 128).bfloat16(),
        torch.nn.Linear(64, 128).bfloat16(),
        torch.nn.Linear(64, 32),  # float32
        torch.nn.Embedding(16, 64).bfloat16(),
        Fp8(32, 64),
    )
    assert model.layers_of_module(module) == {"bf16": [model.Layer("0", 128, 64)], "fp8": [model.Layer("4", 32, 64)]}


class FeedForward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(256, 512, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(512, 256, bias=False)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


RECIPES = {"rowwise": "fp8", "blockwise": "fp8_block", "tensorwise": "fp8_tensor"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_converted_module_has_the_matmuls_that_it_runs(recipe, monkeypatch):
    module = torch.nn.Sequential(torch.nn.Linear(128, 256), FeedForward()).bfloat16().eval()
    sw.nn.convert(module, recipe, frozen=True)
    ran, plan = [], Operation.plan

    def recorded(self, problem, *arguments, **options):
        ran.append(problem.key)
        return plan(self, problem, *arguments, **options)

    monkeypatch.setattr(Operation, "plan", recorded)
    policy.forget_plans()
    with torch.no_grad():
        module(torch.randn(16, 128).bfloat16())
    found = model.layers_of_module(module)
    assert {*found} == {RECIPES[recipe]}
    measured, skipped = model.problems(found[RECIPES[recipe]], [16], [RECIPES[recipe]])
    assert not skipped and {problem.key for problem in measured} == {*ran}


def test_a_module_that_trains_in_fp8_is_refused():
    module = torch.nn.Sequential(torch.nn.Linear(64, 128)).bfloat16()
    sw.nn.convert(module, "rowwise")
    with pytest.raises(ValueError, match=r"0 is a Float8Linear; run a training step under sw.tuning\(\"on_miss\"\)"):
        model.layers_of_module(module)


def test_tune_measures_a_module_and_plans_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("STONEWARE_CACHE_DIR", str(tmp_path))
    asked, settings = [], []

    def measure(problems, store, ordinal, how, reporter, **others):
        asked.extend(problems)
        settings.append(how)

    monkeypatch.setattr(session, "tune", measure)
    monkeypatch.setattr(model, "_ordinal", lambda module: 0)
    monkeypatch.setattr(model, "gain", lambda problems, store, device: len(problems))
    monkeypatch.setattr("stoneware.runtime.device.cuda_device", lambda ordinal: type("D", (), {"fingerprint": "GPU"}))
    before = policy.EPOCH[0]
    assert sw.tune(torch.nn.Linear(64, 128).bfloat16(), [1, 16]) == 2
    assert [(one.op, one.m, one.n, one.k) for one in asked] == [("matmul", 1, 128, 64), ("matmul", 16, 128, 64)]
    assert policy.EPOCH[0] != before
    sw.tune(torch.nn.Linear(64, 128).bfloat16(), [1], fastest=6)
    assert [how.fastest for how in settings] == [None, 6]


@pytest.mark.parametrize(
    ("module", "tokens", "error", "text"),
    [
        (3, [1], TypeError, "module=3 must be a torch.nn.Module, not int; pass the model"),
        (torch.nn.Linear(64, 128), [1], ValueError, "module must have an nn.Linear in bf16 or fp16"),
        (torch.nn.Linear(64, 128).bfloat16(), [], ValueError, r"tokens=\[\] must be integers >= 1"),
        (torch.nn.Linear(64, 128).bfloat16(), 16, ValueError, "tokens=16 must be integers >= 1; pass for example"),
        (torch.nn.Linear(64, 128).bfloat16(), [1.5], ValueError, r"tokens=\[1.5\] must be integers >= 1"),
        (
            torch.nn.Linear(64, 128).bfloat16(),
            [1],
            UnsupportedError,
            "needs a module on one GPU, and this one is on cpu",
        ),
    ],
)
def test_tune_refuses_what_it_cannot_measure(module, tokens, error, text):
    with pytest.raises(error, match=text):
        sw.tune(module, tokens)
