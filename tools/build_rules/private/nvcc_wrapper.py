"""nvcc_wrapper NVCC ARGUMENTS...: runs nvcc in a separate scratch folder, and reads the output of ptxas.

Three silent losses of speed become errors: spilled registers, arrays in local memory, and wgmma that ptxas serialises.
nvcc runs in the environment of the wrapper, except for TMPDIR.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile

_SPILL = re.compile(r"(^|[^0-9])[1-9][0-9]* bytes spill (stores|loads)")
_STACK = re.compile(r"(^|[^0-9])[1-9][0-9]* bytes stack frame")
_SERIALISED = "wgmma.mma_async instructions are serialized"  # each reason has a code of its own
_REPORT = re.compile(r"ptxas info|.*bytes stack frame|$")


def _complaint(lines: list[str]) -> str | None:
    """What is wrong with the kernel, by ptxas's report."""
    spills = [line for line in lines if _SPILL.search(line)]
    if spills:
        return (
            f"a kernel must not spill registers; ptxas reports: {' '.join(spills)}\n"
            "choose a smaller tile, or a schedule with more warps, in its config"
        )
    stacks = [line for line in lines if _STACK.search(line)]
    if stacks:
        return (
            f"a kernel must not have arrays in local memory; ptxas reports: {' '.join(stacks)}\n"
            "index its arrays by constants alone: unroll the loops around them, and leave none of these early"
        )
    serialised = [line for line in lines if _SERIALISED in line]
    if serialised:
        return (
            "ptxas must not serialise wgmma; it reports: "
            f"{' '.join(serialised)}\n"
            "build with -DNDEBUG, keep accumulators out of functions that are not inlined, and read those of a "
            "product only after the wait for it"
        )
    return None


def main(nvcc: str, *arguments: str) -> int:
    # Bazel ends an action with SIGTERM, which must also remove the scratch folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="nvcc.") as scratch:
        result = subprocess.run(
            [nvcc, "--keep", "--keep-dir", scratch, *arguments],
            env={**os.environ, "TMPDIR": scratch},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    output = result.stdout.decode(errors="replace")
    if result.returncode != 0:
        sys.stderr.write(output)
        return 1
    lines = output.splitlines()
    complaint = _complaint(lines)
    if complaint is not None:
        print(complaint, file=sys.stderr)
        return 1
    for line in lines:
        if not _REPORT.match(line):
            print(line, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
