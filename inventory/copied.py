"""Copy an inventory for use in another folder and under another name, with the same meaning."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nodekit.inventory.errors import InventoryError

_OF_A_BLOCK = ("identity_file", "known_hosts")
_OF_ENVIRONMENT = ("requirements", "pyproject", "lock", "find_links")


def copied(path: Path, *, name: str, changes: Mapping[str, object] | None = None) -> str:
    """Return an inventory's text with another name, absolute paths, and without `notify:`.

    Args:
        path: a file that was loaded before.
        name: the new name.
        changes: ``section.key`` → value; None removes the key.

    Raises:
        InventoryError: the file cannot be read again, such as that of a shell's ``<(…)``.
    """
    from nodekit.inventory.source import NotYamlError, parse

    try:
        data = parse(path.read_text(encoding="utf-8")).data
    except (OSError, ValueError, NotYamlError) as error:
        data = error
    if not isinstance(data, dict):  # the file was valid when it was loaded
        found = "cannot be read a second time"
        raise InventoryError(f"{path}: {found}", "a file that stays as it is", "save a pipe's text in one")
    data["name"] = name
    data.pop("notify", None)  # a trial should notify nobody
    folder = path.resolve().parent
    hosts = data.get("hosts")
    blocks = list(hosts.values()) if isinstance(hosts, dict) else []
    for block in [data, *(each for each in blocks if isinstance(each, dict))]:
        for key in _OF_A_BLOCK:
            _resolve(block, key, folder)
    if isinstance(environment := data.get("environment"), dict):
        for key in _OF_ENVIRONMENT:
            _resolve(environment, key, folder)
    for dotted, value in (changes or {}).items():
        section, _, key = dotted.partition(".")
        block = data.get(section) or {}
        block = {**block, key: value} if value is not None else {k: v for k, v in block.items() if k != key}
        if block:
            data[section] = block
        else:
            data.pop(section, None)
    text = json.dumps(data, indent=1, ensure_ascii=False)  # JSON is valid YAML with unambiguous strings,
    # except for characters that JSON allows unescaped, and YAML only escaped. (YAML reads a surrogate pair as two.)
    return re.sub("[\x7f-\x9f\u2028\u2029\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _resolve(block: dict[str, Any], key: str, folder: Path) -> None:
    """Make a relative path, or each in a list, absolute; leave a URL and a path with ``~`` alone."""
    value = block.get(key)
    if isinstance(value, list):
        block[key] = [_absolute(str(each), folder) for each in value]
    elif value:
        block[key] = _absolute(str(value), folder)


def _absolute(text: str, folder: Path) -> str:
    return text if text.startswith("~") or "://" in text else str(folder / text)
