"""Writes docs/rules.md and docs/rules_packages.md: the public rules, by what Bazel's starlark_doc_extract says of them.

./bazelw run //tools/rule_reference
"""

from __future__ import annotations

import os
import pathlib
import re
import textwrap
from collections.abc import Iterator

from absl import app, flags

_DEFS = flags.DEFINE_string("defs", None, "What Bazel says of defs.bzl, as text.", required=True)
_WHEEL = flags.DEFINE_string("wheel", None, "The same of python_wheel.bzl.", required=True)
_OUT = flags.DEFINE_string("out", "docs", "The pages' folder, below the checkout under `bazel run`.")

# Page -> its title, and its rules in their order.
_PAGES = {
    "rules.md": (
        "Reference of the rules for kernels",
        (
            "cubin_library",
            "kernel_family",
            "kernel_config",
            "cuda_cubin",
            "cuda_library",
            "cuda_toolchain",
            "triton_aot",
            "tile_matmul",
            "cuda_archs",
            "kernel_set",
            "enable_backward",
        ),
    ),
    "rules_packages.md": (
        "Reference of the rules for modules, tables and wheels",
        ("nanobind_module", "kernel_group", "kernel_manifest", "tuning_table", "python_wheel"),
    ),
}

_HEAD = """\
# {title}

Load them from `@stoneware//tools/build_rules:defs.bzl`; [vendoring.md](vendoring.md) is the guide, and the
other rules are in [{other}]({other}). `./bazelw run //tools/rule_reference` generates both pages from the rules.

Every target also has `name`, and the attributes of all rules, such as `tags` and `visibility`. An attribute in bold is
mandatory; the others have the default shown.
"""

# One line of Bazel's text: `name: value`, `name {` or `}`.
_LINE = re.compile(r'\s*(?:(?P<name>\w+)(?:: (?:"(?P<text>.*)"|(?P<word>\S+))| \{)|\})')
_ESCAPES = {"n": "\n", "t": "\t"}

Message = dict[str, list]


def parse(lines: Iterator[str]) -> Message:
    """The fields of a message up to its closing brace; each has a list, since it may come again."""
    message: Message = {}
    for line in lines:
        match = _LINE.fullmatch(line.rstrip("\n"))
        assert match, line
        if match["name"] is None:
            break
        if match["text"] is not None:
            value = re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[1]), match["text"])
        else:
            value = match["word"] or parse(lines)
        message.setdefault(match["name"], []).append(value)
    return message


def _text(message: Message, field: str) -> str:
    return message.get(field, [""])[0]


def _row(attribute: Message, owner: str) -> str:
    name = _text(attribute, "name")
    says = " ".join(_text(attribute, "doc_string").split()).rstrip(".")
    if not says:
        raise app.UsageError(f"each attribute must have a doc, but {name} of {owner} has none; write one")
    head = f"**`{name}`**" if "mandatory" in attribute else f"`{name} = {_text(attribute, 'default_value')}`"
    return f"| {head} | {says} |".replace("\\", "\\\\")


def _prose(text: str) -> str:
    """A docstring in Markdown: what is indented is code."""
    text = re.sub(r"\n(Examples?:)\n(?!\n)", r"\n\1\n\n", text)
    parts = []
    for part in re.split(r"\n\n(?=\S)", text):
        head, _, code = part.partition("\n\n    ")
        parts.append(head)
        if code:
            language = "starlark" if head.startswith("Example") else "cpp"
            parts.append(f"```{language}\n" + textwrap.dedent("    " + code).rstrip() + "\n```")
    return "\n\n".join(parts)


def _section(name: str, text: str, attributes: list[Message]) -> str:
    rows = [_row(attribute, name) for attribute in attributes if _text(attribute, "name") not in ("name", "kwargs")]
    table = "\n".join(["| attribute | means |", "|---|---|", *rows]) if rows else ""
    return "\n\n".join(filter(None, [f"## {name}", _prose(text), table]))


def reference(defs: Message, wheel: Message) -> dict[str, str]:
    """The pages by name."""
    more = {_text(rule, "rule_name").removesuffix("_rule"): rule["attribute"] for rule in wheel["rule_info"]}
    sections = {
        _text(info, name): _section(
            _text(info, name), _text(info, "doc_string"), _merged(info.get(fields, []), more.get(_text(info, name), []))
        )
        for kind, name, fields in [("rule_info", "rule_name", "attribute"), ("func_info", "function_name", "parameter")]
        for info in defs[kind]
    }
    listed = {name for _, names in _PAGES.values() for name in names}
    if listed != sections.keys():
        raise app.UsageError(
            f"_PAGES must name the rules of defs.bzl, but differs in {listed ^ sections.keys()}; correct it"
        )
    return {
        page: "\n\n".join([_HEAD.format(title=title, other=other).rstrip(), *(sections[name] for name in names)]) + "\n"
        for (page, (title, names)), other in zip(_PAGES.items(), reversed(_PAGES), strict=True)
    }


def _merged(own: list[Message], more: list[Message]) -> list[Message]:
    names = {_text(attribute, "name") for attribute in own}
    return own + [attribute for attribute in more if _text(attribute, "name") not in names]


def main(_: list[str]) -> None:
    defs, wheel = (
        parse(iter(pathlib.Path(path).read_text(encoding="utf-8").splitlines())) for path in (_DEFS.value, _WHEEL.value)
    )
    for page, text in reference(defs, wheel).items():
        path = pathlib.Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."), _OUT.value, page)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
