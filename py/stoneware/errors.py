"""The errors of Stoneware: each message states the rule, the value that breaks it, and the remedy.

A user's mistake (a wrong dtype, shape, stride or device) is a plain `ValueError` or `TypeError`.
The classes here are for what changing an argument cannot fix.
"""

from __future__ import annotations

MINIMUM_TORCH = (2, 11)
TORCH_REQUIREMENT = "torch>=" + ".".join(map(str, MINIMUM_TORCH))

LONGEST_VALUE = 500
"""Characters of a value in a message; a path and a config fit."""


def quoted(value: object) -> str:
    """The value as messages print it: its repr, which is cut in the middle if it is long."""
    try:
        text = repr(value)
    except Exception:  # of a user's class, or of an int of more than 4,300 digits
        return f"<{type(value).__name__} that cannot be printed>"
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 100]}...{text[-97:]}"


def explained(error: ModuleNotFoundError) -> ImportError:
    """The error to raise for a failed import: if torch is what is missing, how to install it."""
    if error.name != "torch":
        return error
    return ImportError(
        f"stoneware needs {TORCH_REQUIREMENT} to run or explain an op, and torch is not "
        f'installed; pip install "{TORCH_REQUIREMENT}"',
        name="torch",
    )


class StonewareError(Exception):
    """The base class of Stoneware's errors."""


class DriverError(StonewareError, RuntimeError):
    """The CUDA driver refused a call, or was not found.

    Attributes:
      call: the driver call, such as "cuLibraryLoadData"; "dlopen" where libcuda itself is missing.
      code: the CUresult as a number; 0 where the driver gave none.
      code_name: the name of the CUresult, such as "CUDA_ERROR_INVALID_IMAGE".
    """

    def __init__(self, message: str, call: str = "", code: int = 0, code_name: str = "") -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.code_name = code_name

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.call, self.code, self.code_name)


class UnsupportedError(StonewareError, RuntimeError):
    """No backend, or not the requested one, can run the problem on the device."""


class TableError(StonewareError, RuntimeError):
    """A tuning table, manifest or sample file is not what it claims to be."""


class LinkError(StonewareError, RuntimeError):
    """NVRTC or nvJitLink cannot make a kernel of the text or the code that it got."""


class ForwardOnlyError(StonewareError, RuntimeError):
    """A gradient in backward or forward mode is needed, and the operation does not support it."""


class BackwardNotBuiltError(ForwardOnlyError):
    """A gradient is needed whose kernels this installation was built without."""


class StoreError(StonewareError, RuntimeError):
    """The user's store of samples cannot be written; what it holds is intact."""


class TuningMissError(StonewareError, RuntimeError):
    """A problem was not measured, and `sw.tuning("error_on_miss")` is on."""


class TuningMismatchError(StonewareError, RuntimeError):
    """The ranks of a job have different wheels of Stoneware, so there is nothing to fall back on."""
