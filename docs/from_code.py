"""What the site takes from the code when it is built, for MkDocs: every command, every inventory key, every file.

`python docs/from_code.py` draws the layers in docs/code.md anew.
"""

from __future__ import annotations

import argparse
import ast
import html
import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from nodekit.deploy.commands import cli
from nodekit.inventory.schema import json_schema

WIDTH = "100"
COMMANDS = "<!-- every command -->"
KEYS = "<!-- every key -->"
FILES = "<!-- every file -->"
MANY = 5
LAYERS = re.compile(r"```mermaid\n.*?```", re.DOTALL)
ROOT = Path(__file__).parent.parent


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for each page: put in place of a mark what it stands for."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, commands())
    if KEYS in markdown:
        markdown = markdown.replace(KEYS, keys(json_schema()))
    if FILES in markdown:
        markdown = LAYERS.sub(lambda _: boxes(), markdown.replace(FILES, files()))
    return markdown


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs for each page: say which language it is in, for screen readers and hyphenation."""
    return output.replace('<html lang="en"', '<html lang="zh"', 1) if page.url.startswith("zh/") else output


def commands() -> str:
    """Each command's help under a heading of its own, in the order of ``kit --help``."""
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ.update(COLUMNS=WIDTH, NO_COLOR="1")  # argparse asks the terminal
    try:
        texts = [
            f"{'#' * min(3, len(name.split()) + 1)} {name}\n\n```text\n{parser.format_help().strip()}\n```"
            for name, parser in parsers(cli.parser(), "kit")
        ]
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return "\n\n".join(texts)


def parsers(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A command's parser, then those of its subcommands, and theirs."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each, sub in action.choices.items():
                yield from parsers(sub, f"{name} {each}")


def keys(schema: dict[str, Any]) -> str:
    """A table of keys for the top of an inventory, and one for each block in it."""
    return "\n\n".join(
        _table(f"`{path}:`" if path else "At the top", block) for path, block in _blocks(schema, schema)
    )


def dotted(schema: dict[str, Any]) -> set[str]:
    """Every key that may stand in an inventory, as ``job.command``; those of a host as ``hosts.HOST.address``."""
    return {
        f"{path}.{key}".removeprefix(".")
        for path, block in _blocks(schema, schema)
        for key in block["properties"]
    }


def _blocks(
    block: dict[str, Any], schema: dict[str, Any], path: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """An object with keys, and those below it, each with the keys that lead there."""
    yield path, block
    for key, field in block["properties"].items():
        at = f"{path}.{key}".removeprefix(".")
        for each in field.get("anyOf", [field]):
            named = each.get("additionalProperties")
            if "$ref" in each:
                yield from _blocks(_at(each, schema), schema, at)
            elif isinstance(named, dict):  # names of the user's own
                for value in named.get("anyOf", [named]):
                    if "$ref" in value:
                        yield from _blocks(_at(value, schema), schema, f"{at}.HOST")


def _at(reference: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = schema["$defs"][reference["$ref"].rpartition("/")[2]]
    return found


def _table(title: str, block: dict[str, Any]) -> str:
    rows = [
        f"| `{name}` | {_kind(field)} | {_cell(field.get('description', ''))} |"
        for name, field in block["properties"].items()
    ]
    return "\n".join(
        [f"### {title}", "", _cell(block["description"]), "", "| key | is | what |", "|---|---|---|", *rows]
    )


def _kind(field: dict[str, Any]) -> str:
    """What a key may hold, in a word or two."""
    kinds: dict[str, None] = {}
    for each in field.get("anyOf", [field]):
        if "$ref" in each:
            kinds["a block"] = None
        elif "enum" in each:
            kinds.update(dict.fromkeys(f"`{value}`" for value in each["enum"]))
        elif "const" in each:
            kinds[f"`{each['const']}`"] = None
        elif "anyOf" in each:
            kinds[_kind(each)] = None
        elif each.get("type") != "null":
            kinds[_KINDS[each["type"]]] = None
    return " or ".join(kinds)


_KINDS = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "`true` or `false`",
    "array": "a list",
    "object": "names and values",
}


def _cell(text: str) -> str:
    """Text as a table's cell has it: what looks like code or markup is shown as it is."""
    return re.sub(r"([|*<_\[\]])", r"\\\1", text.replace("\n", " "))


# --- the code -----------------------------------------------------------------------------------------------


def layers() -> list[list[str]]:
    """The folders as `make check` holds them: each may import those in the lists after its own."""
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    contracts = toml.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    listed = next(each["layers"] for each in contracts if each["name"].startswith("A folder imports only"))
    return [[name.removeprefix("nodekit.").replace(".", "/") for name in row.split(" | ")] for row in listed]


def about(name: str) -> str:
    """The first sentence that a folder or a file says of itself."""
    path = ROOT / name
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split()).replace("``", "`")


def folders() -> list[str]:
    """Every folder of the code, those within others too."""
    tops = ("deploy", "slurm", "training", "inventory")
    return sorted(
        str(path.parent.relative_to(ROOT)) for top in tops for path in (ROOT / top).rglob("__init__.py")
    )


def mermaid() -> str:
    """The layers as a Mermaid chart: a box for each, with its folders, and what they are for unless they are many."""
    lines = ["flowchart TB"]
    for number, row in enumerate(layers()):
        if len(row) < MANY:
            text = [f"<b>{name}</b><br>{about(name)}".replace('"', "'").replace("`", "") for name in row]
        else:
            text = [f"<b>{' · '.join(row)}</b>"]
        within = [each for each in folders() if each.startswith(tuple(f"{name}/" for name in row))]
        text += [f"<i>{' · '.join(within)}</i>"] if within else []
        lines.append(f'  L{number}["{"<br>".join(text)}"]')
    lines.append("  " + " --> ".join(f"L{number}" for number in range(len(layers()))))
    return "\n".join(["```mermaid", *lines, "```"])


def boxes() -> str:
    """The same as HTML: what draws Mermaid would be loaded from elsewhere."""
    rows = re.findall(r'L\d+\["(.*)"\]', mermaid())
    return '<div class="layers">' + "".join(f"<p>{row}</p>" for row in rows) + "</div>"


def files() -> str:
    """Each folder with what it is for, and its files with what they do."""
    text = []
    for folder in folders():
        text += [
            f"### {folder}",
            "",
            html.escape(about(folder), quote=False),
            "",
            "| file | what |",
            "|---|---|",
        ]
        for path in sorted((ROOT / folder).glob("*.py")):
            if path.stem != "__init__":
                text.append(f"| `{path.name}` | {_cell(about(str(path.relative_to(ROOT))))} |")
        text.append("")
    return "\n".join(text)


if __name__ == "__main__":
    page = ROOT / "docs/code.md"
    page.write_text(LAYERS.sub(lambda _: mermaid(), page.read_text()))
