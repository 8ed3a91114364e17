"""The text of `--help`: summary, examples, JSON keys and exit codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stoneware.cli import exit_codes


def text(summary: str, *, examples: Sequence[str], findings: str = "", json_keys: str = "") -> str:
    """A command's help.

    Args:
      summary: paragraphs; the first sentence is shown in the list of commands.
      examples: command lines.
      findings: the meaning of exit code 1 for this command; empty if it never ends with 1.
      json_keys: the keys of the JSON document, except "command" and "exit_code".
    """
    meanings = dict(exit_codes.MEANINGS)
    if findings:
        meanings[exit_codes.FINDINGS] = findings
    else:
        del meanings[exit_codes.FINDINGS]
    parts = [summary, _block("Examples", [f"  {example}" for example in examples])]
    if json_keys:
        parts.append(f"With --json: {json_keys}; on failure: error {{kind, message}}.")
    parts.append(_block("Exit codes", _codes(meanings)))
    # Square brackets are rich's markup.
    return "\n\n".join(parts).replace("[", "\\[")


def overview() -> str:
    """The help of the program itself."""
    return "\n\n".join(
        [
            "GPU matmul kernels that are compiled, tuned and chosen before you install them.",
            _block(
                "Examples",
                [
                    "  stoneware info",
                    "  stoneware explain scaled_mm -m 16 -n 4096 -k 14336",
                    "  stoneware tune --weights llama3_8b_qkv --m-values 1,16,64",
                    "  stoneware verify",
                ],
            ),
            "Every command takes --json, then prints one JSON document on stdout and everything else on stderr.",
            _block("Exit codes", _codes(exit_codes.MEANINGS)),
        ]
    )


def _codes(meanings: Mapping[int, str]) -> list[str]:
    return [f"  {code:>3}  {meaning}" for code, meaning in meanings.items()]


def _block(title: str, lines: Sequence[str]) -> str:
    """A paragraph whose lines stay as they are, which \\b requests from Click."""
    return "\b\n" + "\n".join([f"{title}:", *lines])
