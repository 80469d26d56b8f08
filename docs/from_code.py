"""What the site takes from the code when it is built: every command's --help, every key of an inventory. For MkDocs."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from typing import Any

from nodekit.deploy.commands import cli
from nodekit.inventory.schema import json_schema

WIDTH = "100"
COMMANDS = "<!-- every command -->"
KEYS = "<!-- every key -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for each page: put in place of a mark what it stands for."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, commands())
    if KEYS in markdown:
        markdown = markdown.replace(KEYS, keys(json_schema()))
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
