"""Compiles a user's kernels and links the tile matmuls that they call.

The source is compiled by NVRTC, and each direction of a matmul that a kernel needs is a module of its own,
so what nobody needs is neither compiled nor linked. Before the link the calls of each kernel are compared
with what may be linked.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence

from stoneware.errors import LinkError, quoted
from stoneware.linking import cubins, toolchain
from stoneware.runtime import package_files
from stoneware.runtime.fast_dataclass import dataclass
from stoneware.tile import ptx, source
from stoneware.tile.api import TileMatmul
from stoneware.tile.description import Setting, checked_setting
from stoneware.tile.kernel import Kernel
from stoneware.tile.needs import Resolution, checked_needs, global_setting, resolve

_LOG = logging.getLogger("stoneware.tile")

_FORMAT = "stoneware.tile.1"
"""Part of every digest: what this file makes of a source."""

_HEADER = "stoneware_tile.h"
_LINKED_SYMBOL = re.compile(rf"_ZN\d+{source.NAMESPACE}[0-9a-f]{{16}}6linked\w+")


@dataclass(frozen=True, kw_only=True)
class Linked:
    """Kernels that are linked with the matmuls they call.

    Attributes:
      cubin: the machine code.
      arch: for which GPU.
      kernels: name -> its signature, of each kernel.
      matmuls: (name of the matmul, direction) of everything linked, sorted.
      threads: of a block.
      log: what nvJitLink said, such as that it had to serialize wgmma instructions.
      compile_s, link_s: seconds in NVRTC and in nvJitLink; none if the cubin was on disk.
    """

    cubin: bytes
    arch: str
    kernels: Mapping[str, ptx.Function]
    matmuls: tuple[tuple[str, str], ...]
    threads: int
    log: str
    compile_s: float
    link_s: float


class Module:
    """A CUDA C++ source with kernels, and the tile matmuls that they call.

    The header of each matmul is included before the first line of the source, and is also there as "NAME.h".
    A kernel is `extern "C" __global__`; what it calls may depend on `NAME::has_forward`, `NAME::has_dA` and
    `NAME::has_dB` (`if constexpr`).

    Args:
      source: CUDA C++.
      matmuls: that it may call, each with its own name, and all with the same threads and arch.
      enable_backward: whether gradients may be linked, or which of "dA" and "dB"; None leaves it to
        `sw.tile.enable_backward`. The level of a kernel and of a matmul are narrower, and come first.
      options: further options of NVRTC, such as "-DNAME=1".

    Raises:
      TypeError, ValueError: an argument breaks its rule.
    """

    def __init__(
        self,
        source: str,
        matmuls: Iterable[TileMatmul],
        *,
        enable_backward: bool | Iterable[str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        if not isinstance(source, str):
            raise TypeError(f"source={quoted(source)} must be a str of CUDA C++, not {type(source).__name__}")
        self.source, self.matmuls, self.options = source, _checked(matmuls), tuple(options)
        self.enable_backward: Setting = checked_setting("enable_backward", enable_backward)
        self._kernels: dict[Hashable, Kernel] = {}

    @property
    def arch(self) -> str:
        return self.matmuls[0].arch

    def link(
        self,
        kernels: str | Iterable[str] | None = None,
        *,
        needs: Iterable[str] | Mapping[str, Iterable[str]] | None = None,
        enable_backward: bool | Iterable[str] | None = None,
    ) -> Linked:
        """Links some of the kernels.

        Args:
          kernels: a name or names; None for all of the source.
          needs: directions that may be linked ("forward", "dA", "dB"), or these by the name of the matmul; None
            for those that the kernels call.
          enable_backward: the level of these kernels; None leaves it to the module.

        Returns:
          The cubin. A direction is linked if a kernel calls it, and only then.

        Raises:
          TypeError, ValueError: an argument breaks its rule; the source does not compile; a kernel calls a
            direction that needs or enable_backward leaves out, or with another signature than the matmul's.
          LinkError: nvJitLink refuses, for example since a function of the source is defined nowhere.
          UnsupportedError: NVRTC or nvJitLink is not installed.
        """
        setting = checked_setting("enable_backward", enable_backward)
        needs_by_name = checked_needs(needs, self.matmuls)
        resolutions = {
            matmul.name: resolve(matmul, needs=needs_by_name[matmul.name], kernel=setting, module=self.enable_backward)
            for matmul in self.matmuls
        }
        headers = self._headers(resolutions)
        names = None if kernels is None else (kernels,) if isinstance(kernels, str) else tuple(kernels)
        digest = cubins.digest(
            _FORMAT,
            json.dumps([self.arch, self.matmuls[0].threads, self.options, names, list(headers.items())]),
            self.source,
        )
        kept = cubins.read(digest)
        if kept is not None:
            return _unpacked(kept, self.arch, self.matmuls[0].threads)
        linked = self._link(names, headers, resolutions)
        cubins.write(digest, _packed(linked))
        if linked.log:
            is_info = all(line.startswith("INFO:") for line in linked.log.splitlines())
            level = logging.INFO if is_info else logging.WARNING
            _LOG.log(level, "nvJitLink says of %s: %s", ", ".join(linked.kernels), linked.log)
        return linked

    def _link(
        self, names: tuple[str, ...] | None, headers: Mapping[str, str], resolutions: Mapping[str, Resolution]
    ) -> Linked:
        started = time.perf_counter()
        options = (f"--pre-include={_HEADER}", *self.options)
        try:
            scan = toolchain.compile_ptx(
                self.source, arch=self.arch, headers=headers, options=(*options, "--Ofast-compile=mid")
            )
            functions = ptx.functions(scan)
            kernels = _kernel_names(functions, names)
            calls = self._calls(functions, kernels, resolutions)
            own = toolchain.compile_lto_ir(self.source, arch=self.arch, headers=headers, options=options)
        except LinkError as error:
            raise ValueError(f"the source must compile; correct it: {error}") from error
        by_name = {matmul.name: matmul for matmul in self.matmuls}
        # Matmuls that differ in name alone share functions.
        functions_by_symbol = {
            source.symbol(by_name[name], direction): (by_name[name], direction) for name, direction in calls
        }
        modules = [toolchain.Library("source", own), *[_library(*found) for found in functions_by_symbol.values()]]
        compiled = time.perf_counter()
        used = () if names is None else [f"-kernels-used={name}" for name in kernels]
        cubin, log = toolchain.link_with_log(
            modules, arch=self.arch, options=("-O3", "-optimize-unused-variables", *used)
        )
        return Linked(
            cubin=cubin,
            arch=self.arch,
            kernels={name: functions[name] for name in kernels},
            matmuls=tuple(sorted(calls)),
            threads=self.matmuls[0].threads,
            log=log,
            compile_s=compiled - started,
            link_s=time.perf_counter() - compiled,
        )

    def kernel(
        self,
        name: str,
        *,
        shared_bytes: int = 0,
        needs: Iterable[str] | Mapping[str, Iterable[str]] | None = None,
        enable_backward: bool | Iterable[str] | None = None,
    ) -> Kernel:
        """Links one kernel, ready to be launched; the arguments and errors are those of `link` and `Kernel`.

        The same arguments return the same kernel, so a caller need not keep it.
        """
        setting = checked_setting("enable_backward", enable_backward)
        by_name = checked_needs(needs, self.matmuls)
        key = name, shared_bytes, tuple(by_name.values()), setting, global_setting()
        kernel = self._kernels.get(key)
        if kernel is None:
            linked = self.link(name, needs=needs, enable_backward=enable_backward)
            kernel = self._kernels.setdefault(key, Kernel(linked, name, shared_bytes=shared_bytes))
        return kernel

    def _headers(self, resolutions: Mapping[str, Resolution]) -> Mapping[str, str]:
        own = {
            f"{matmul.name}.h": "#pragma once\n" + source.header(matmul, resolutions[matmul.name].directions)
            for matmul in self.matmuls
        }
        everything = "".join(f'#include "{name}"\n' for name in own)
        return {**source.device_headers(), **own, _HEADER: everything}

    def _calls(
        self, functions: Mapping[str, ptx.Function], names: Sequence[str], resolutions: Mapping[str, Resolution]
    ) -> list[tuple[str, str]]:
        """(name of the matmul, direction) of what kernels call; raises ValueError if that may not be linked."""
        owners: dict[str, list[tuple[str, str]]] = {}
        for matmul in self.matmuls:
            for direction in matmul.plans:
                owners.setdefault(source.symbol(matmul, direction), []).append((matmul.name, direction))
        found: dict[tuple[str, str], None] = {}
        for kernel in names:
            for callee in sorted(ptx.reachable(functions, kernel)):
                if callee in owners:
                    owner = _allowed(kernel, owners[callee], resolutions)
                    found[owner] = None
                elif _LINKED_SYMBOL.fullmatch(callee):
                    known = ", ".join(matmul.name for matmul in self.matmuls)
                    raise ValueError(
                        f"kernel {kernel} calls {callee}, and the matmuls {known} have no function with this "
                        "signature; call the functions of their headers, and do not declare them yourself"
                    )
        return list(found)


def link(
    source: str,
    matmuls: Iterable[TileMatmul],
    *,
    kernels: str | Iterable[str] | None = None,
    needs: Iterable[str] | Mapping[str, Iterable[str]] | None = None,
    enable_backward: bool | Iterable[str] | None = None,
    options: Sequence[str] = (),
) -> Linked:
    """Compiles a source and links the matmuls that its kernels call: `Module(...).link(...)` in one call.

    `enable_backward` is the module's level; the other arguments, and the errors, are those of Module and its link.
    """
    return Module(source, matmuls, enable_backward=enable_backward, options=options).link(kernels, needs=needs)


@functools.lru_cache(maxsize=256)
def _library(matmul: TileMatmul, direction: str) -> toolchain.Library:
    """A linked function: of the wheel, or compiled, once a process."""
    name = source.file_name(matmul, direction)
    built = package_files.path("tile", "matmuls", name)
    if built.exists():
        return toolchain.Library(name, built.read_bytes(), is_fatbin=True)
    text = source.linked_function(matmul, direction)
    lto_ir = toolchain.compile_lto_ir(text, arch=matmul.arch, name=name, headers=source.device_headers())
    return toolchain.Library(name, lto_ir)


def _packed(linked: Linked) -> bytes:
    """What is kept on disk: a line of JSON, then the cubin."""
    kernels = {
        name: [kernel.parameters, kernel.most_threads, sorted(kernel.calls)] for name, kernel in linked.kernels.items()
    }
    fields = {"kernels": kernels, "matmuls": linked.matmuls, "log": linked.log}
    return json.dumps(fields).encode() + b"\n" + linked.cubin


def _unpacked(data: bytes, arch: str, threads: int) -> Linked:
    line, _, cubin = data.partition(b"\n")
    fields = json.loads(line)
    kernels = {
        name: ptx.Function(is_kernel=True, parameters=parameters, most_threads=most, calls=frozenset(calls))
        for name, (parameters, most, calls) in fields["kernels"].items()
    }
    matmuls = tuple((name, direction) for name, direction in fields["matmuls"])
    return Linked(
        cubin=cubin,
        arch=arch,
        kernels=kernels,
        matmuls=matmuls,
        threads=threads,
        log=fields["log"],
        compile_s=0.0,
        link_s=0.0,
    )


def _checked(matmuls: Iterable[TileMatmul]) -> tuple[TileMatmul, ...]:
    """The matmuls of a module; raises TypeError or ValueError."""
    found = tuple(matmuls)
    for matmul in found:
        if not isinstance(matmul, TileMatmul):
            raise TypeError(f"matmuls has {quoted(matmul)}, which must be a TileMatmul; make it by sw.tile.matmul")
    if not found:
        raise ValueError("matmuls=[] must have at least one matmul; without any, compile the source by itself")
    for field in ("arch", "threads"):
        values = sorted({getattr(matmul, field) for matmul in found}, key=str)
        if len(values) > 1:
            raise ValueError(
                f"the matmuls of a module must have one {field}, and have {', '.join(map(str, values))}; "
                "use a module for each"
            )
    names = [matmul.name for matmul in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"name={name!r} must be the name of one matmul of the module, and is that of "
                f"{names.count(name)}; pass each its own name"
            )
    return found


def _kernel_names(functions: Mapping[str, ptx.Function], names: Sequence[str] | None) -> list[str]:
    defined = [name for name, function in functions.items() if function.is_kernel]
    if not defined:
        raise ValueError('the source must define a kernel, extern "C" __global__, and defines none; add one')
    if names is None:
        return defined
    for name in names:
        if name not in defined:
            raise ValueError(
                f"kernel {quoted(name)} must be in the source, whose kernels are {', '.join(defined)}; "
                'correct the name, or declare it extern "C"'
            )
        longer = [other for other in defined if name in other and other not in names]
        if longer:
            raise ValueError(
                f"kernel {quoted(name)} must not be part of the name of {longer[0]!r}, since nvJitLink would keep "
                "both; rename one, or link both"
            )
    return list(dict.fromkeys(names))


def _allowed(kernel: str, owners: Sequence[tuple[str, str]], resolutions: Mapping[str, Resolution]) -> tuple[str, str]:
    """The matmul whose function is called. Matmuls that differ in name alone share functions, and one that may
    be linked is enough."""
    for name, direction in owners:
        if direction in resolutions[name].directions:
            return name, direction
    name, direction = owners[0]
    raise ValueError(
        f"kernel {kernel} calls {name}::{direction}, which is not linked: {resolutions[name].absent[direction]}"
    )
