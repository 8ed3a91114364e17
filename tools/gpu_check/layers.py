"""Measures the layers of stoneware.nn next to torch's, in seven parts:

    python -m tools.gpu_check.layers --out DIR [--parts linear,inference,models,train,lora,host,steps]

    linear     forward and backward of Llama 8B's linear layers, next to torch's bf16 and torchao's recipes
    inference  Llama 3 8B of transformers, eager and in CUDA graphs, next to torch's bf16 and _scaled_mm
    models     Llama, Qwen and Mixtral, compiled, as they are and converted
    train      a transformer of 100 M parameters: losses, steps/s, and a run that is killed and resumed
    lora       a step over frozen fp8 weights, next to bf16 LoRA
    host       what calls and small layers cost the host
    steps      whole training steps of Llamas of transformers, eager

Each timing is of several steps between two events (layers_clock.py). `inference`, `models`, `lora` and `steps` need
transformers; without it they fail, and the others are measured. experiment.py has the rest. Another --layers or --steps
measures its part anew.
"""

from __future__ import annotations

import dataclasses
import functools
import time

import torch
from absl import flags

from tools.gpu_check import (
    layers_host,
    layers_inference,
    layers_linear,
    layers_lora,
    layers_steps,
    layers_summary,
    layers_train,
)
from tools.gpu_check.experiment import Experiment, Row
from tools.gpu_check.layers_clock import Clock, HostClock
from tools.gpu_check.layers_sizes import BY_NAME

PARTS = {
    "linear": (0.14, layers_linear.measure),
    "inference": (0.26, layers_inference.measure),
    "models": (0.18, layers_inference.measure_models),
    "train": (0.22, layers_train.measure),
    "lora": (0.04, layers_lora.measure),
    "host": (0.04, layers_host.measure),
    "steps": (0.12, layers_steps.measure),
}
"""Each part's share of --seconds, and how it is measured."""


class Layers(Experiment):
    name = "layers"
    schema = 2

    @property
    def ordinal(self) -> int | None:
        return 0 if self.values.device == "cuda" else None

    @property
    def seconds(self) -> float:
        return self.values.seconds

    def settings(self) -> Row:
        return {"sizes": self.values.sizes}

    def measure(self) -> None:
        clock = HostClock() if self.ordinal is None else Clock()
        sizes = BY_NAME[self.values.sizes]
        sizes = dataclasses.replace(
            sizes,
            inference_layers=self.values.layers or sizes.inference_layers,
            train_steps=self.values.steps or sizes.train_steps,
        )
        settings = {"inference": {"layers": sizes.inference_layers}, "train": {"steps": sizes.train_steps}}
        torch.manual_seed(time.time_ns())  # fresh inputs in each run
        for name in self.values.parts:
            share, measure = PARTS[name]
            measure_part = functools.partial(measure, sizes=sizes, clock=clock)
            self.part(name, measure_part, share * self.seconds, settings.get(name, {}))

    def page(self) -> str:
        return layers_summary.to_markdown(self.report)

    @classmethod
    def define_flags(cls) -> None:
        super().define_flags()
        flags.DEFINE_list("parts", list(PARTS), "Which of " + ", ".join(PARTS) + ".")
        flags.register_validator(
            "parts", set(PARTS).issuperset, f"--parts must be of {', '.join(PARTS)}; name some of these"
        )
        flags.DEFINE_float("seconds", 480.0, "For all parts; each has its share.", lower_bound=1.0)
        flags.DEFINE_integer("layers", 0, "Blocks of the Llama of inference; 0: all 32.", lower_bound=0)
        flags.DEFINE_integer("steps", 0, "Of each training run; 0: all 1000.", lower_bound=0)
        flags.DEFINE_enum(
            "sizes",
            "full",
            list(BY_NAME),
            "Llama 8B's; 1b, for the part linear; or tiny, which shows that all of it runs.",
        )
        flags.register_multi_flags_validator(
            ["sizes", "parts"],
            lambda values: values["sizes"] != "1b" or values["parts"] == ["linear"],
            "--sizes=1b has the layers of the part linear alone; add --parts=linear",
        )
        flags.DEFINE_enum("device", "cuda", ["cuda", "cpu"], "Where it runs.")


if __name__ == "__main__":
    Layers.start()
