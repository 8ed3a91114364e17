"""The combinations of versions that a release is tested with, and the tests of each."""

from __future__ import annotations

from dataclasses import dataclass

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15")
TRANSFORMERS = ("5.17", "5.18", "5.19", "5.20", "5.21", "5.22", "5.23", "5.24")
TRITONS = ("3.6", "3.7", "3.8", "3.9")

REFUSED_TORCH = "2.10"
"""The newest torch that the import must refuse."""

PYTHON, TORCH, HOST, TRITON = "3.11", "2.13", "5.24", "3.7"
"""The versions that stay while another one changes; triton is what this torch requires."""

CORE = ("tests/ops", "tests/inductor/fusion_test.py", "tests/nn/convert_test.py", "tests/nn/trained_linear_test.py")
OF_HOST = ("tests/integrations/import_test.py", "tests/integrations/transformers_test.py")
OF_TRITON = ("tests/triton_autotune",)


@dataclass(frozen=True, kw_only=True)
class Combination:
    """Versions with major and minor, "3.11"; pip chooses the newest patch release of each.

    Attributes:
      tests: files and folders, relative to the root of the repository; empty if the import must be refused.
    """

    python: str = PYTHON
    torch: str = TORCH
    transformers: str = HOST
    triton: str = TRITON
    tests: tuple[str, ...] = CORE + OF_HOST + OF_TRITON

    @property
    def name(self) -> str:
        """Unique; also the name of its result's file."""
        return f"python{self.python}-torch{self.torch}-transformers{self.transformers}-triton{self.triton}"


def combinations() -> list[Combination]:
    """Each Python, torch, transformers and Triton once with the others fixed, and the newest ones together.

    Those of one Python and torch are neighbours, so that an environment serves them all; the newest torch comes first.
    """
    result = [Combination(torch=torch) for torch in reversed(TORCHES) if torch != TORCH]
    result += [Combination()]
    result += [Combination(transformers=host, tests=OF_HOST) for host in TRANSFORMERS if host != HOST]
    result += [Combination(triton=triton, tests=OF_TRITON) for triton in TRITONS if triton != TRITON]
    result += [Combination(python=python) for python in PYTHONS if python != PYTHON]
    result += [Combination(python=PYTHONS[-1], torch=torch, triton=TRITONS[-2]) for torch in TORCHES[-2:]]
    result += [Combination(torch=REFUSED_TORCH, tests=())]
    return result
