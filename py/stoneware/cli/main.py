"""The program `stoneware`: the typer app, and the one place where errors become exit codes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence

import typer

from stoneware import __version__
from stoneware.cli import commands, exit_codes, explain_command, help, link_command, tune_command
from stoneware.cli.output import discard, note
from stoneware.errors import explained
from stoneware.runtime.canonical import printable_lines

COMMANDS: dict[str, tuple[Callable[..., int], str]] = {
    "tune": (tune_command.tune, tune_command.HELP),
    "bake": (commands.bake, commands.BAKE_HELP),
    "merge": (commands.merge, commands.MERGE_HELP),
    "diff": (commands.diff, commands.DIFF_HELP),
    "verify": (commands.verify, commands.VERIFY_HELP),
    "explain": (explain_command.explain, explain_command.HELP),
    "link": (link_command.link, link_command.HELP),
    "report": (commands.report, commands.REPORT_HELP),
    "info": (commands.info, commands.INFO_HELP),
}
"""Name -> function and help, in the order of the program's help."""

app = typer.Typer(
    name="stoneware",
    add_completion=False,
    rich_markup_mode="rich",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, (_function, _help) in COMMANDS.items():
    app.command(_name, help=_help)(_function)


@app.callback(invoke_without_command=True, help=help.overview().replace("[", "\\["))
def _program(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and end."),
    traceback: bool = typer.Option(
        False, "--traceback", help="Show where an error was raised, also for a user's mistake."
    ),
) -> None:
    if version:
        print(f"stoneware {__version__}")
        raise typer.Exit(exit_codes.OK)
    if context.invoked_subcommand is None:
        raise ValueError(f"a command must be given, and none was; pass one of {', '.join(COMMANDS)}, or --help")


def main() -> None:
    """Runs the command of sys.argv and ends the process with its exit code."""
    handler = logging.StreamHandler()
    handler.format = lambda record: printable_lines(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stoneware").addHandler(handler)
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command.

    Args:
      arguments: as after the program's name.

    Returns:
      The exit code, one of exit_codes.MEANINGS. Nothing is raised.
    """
    if sys.stdout is None:
        # Checked first: the next file that is opened would get its number.
        note("stoneware: stdout is closed and must be open; give it, if only to /dev/null")
        return exit_codes.ENVIRONMENT
    try:
        code = _invoke(list(arguments))  # a copy, since the parser empties it
        sys.stdout.flush()
        return code
    except SystemExit:  # rich's console raises it when the output pipe was closed
        return exit_codes.PIPE_CLOSED
    except (Exception, KeyboardInterrupt) as error:
        return _report(error, arguments)


def _invoke(arguments: list[str]) -> int:
    for name in ("COLUMNS", "TERMINAL_WIDTH"):  # rich and typer fail at a size that no terminal has
        if name in os.environ and not re.fullmatch("[1-9][0-9]{0,3}", os.environ[name]):
            del os.environ[name]
    command = typer.main.get_command(app)
    try:
        # app(...) would end the process itself, and print errors in another format.
        with command.make_context("stoneware", arguments) as context:
            return command.invoke(context) or exit_codes.OK
    except typer.Exit as end:
        return end.exit_code


def _report(error: BaseException, arguments: Sequence[str]) -> int:
    """Reports an error, in one line and, with --json, in one document; returns the exit code."""
    if isinstance(error, ModuleNotFoundError):
        error = explained(error)
    command = next((argument for argument in arguments if argument in COMMANDS), "")
    # A usage error: its class is typer's own or, in earlier versions of typer, Click's.
    is_usage = hasattr(error, "format_message") and hasattr(error, "exit_code")
    code = exit_codes.USAGE if is_usage else exit_codes.from_error(error)
    if code == exit_codes.PIPE_CLOSED:
        discard(sys.stdout)
        return code
    program = f"stoneware {command}".strip()
    message = " ".join(str(error).split()) or type(error).__name__
    if code == exit_codes.INTERRUPTED:
        message = "interrupted"
    elif is_usage:
        message = f"{' '.join(error.format_message().split()).rstrip('.')} (see {program} --help)"  # type: ignore[attr-defined]
    elif isinstance(error, OSError) and error.strerror:
        # An error of writing, unlike one of opening, names no file.
        place = error.filename or "stdout or another open file"
        message = f"{place}: {error.strerror}; check the path, its permissions and the free space"
    if code == exit_codes.INTERNAL or "--traceback" in arguments:
        for line in "".join(traceback.format_exception(error)).splitlines():
            note(line)
    note(f"{program}: {message}")
    if "--json" in arguments:
        kind = "UsageError" if is_usage else type(error).__name__
        with contextlib.suppress(OSError):  # the flush below raises it again
            print(
                json.dumps(
                    {"command": command, "exit_code": code, "error": {"kind": kind, "message": message}}, indent=1
                )
            )
    try:
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout)
    return code
