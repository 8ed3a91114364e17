"""The exit codes of the commands, and the code for each error."""

from __future__ import annotations

from stoneware.errors import StonewareError, TableError

OK, FINDINGS, USAGE, ENVIRONMENT, INTERNAL, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 3, 70, 130, 141

MEANINGS: dict[int, str] = {
    OK: "done, nothing to report",
    FINDINGS: "found a difference, a damaged entry, or a wrong candidate",
    USAGE: "an argument or an input file breaks a rule",
    ENVIRONMENT: "no GPU or torch here; or disk full, or stdout closed",
    INTERNAL: "a defect of stoneware; the traceback is shown",
    INTERRUPTED: "interrupted; what was measured is kept",
    PIPE_CLOSED: "the output pipe was closed",
}
"""70 is EX_SOFTWARE of sysexits.h; 130 and 141 are a shell's codes for SIGINT and SIGPIPE."""


def from_error(error: BaseException) -> int:
    """The exit code of a command that ended with an error."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return PIPE_CLOSED
    if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError, TableError, ValueError)):
        return USAGE
    if isinstance(error, (StonewareError, ImportError, OSError, MemoryError)):
        return ENVIRONMENT  # such as no GPU, or a StoreError: the disk is full, or read-only
    return INTERNAL
