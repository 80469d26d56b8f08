"""Reads ~/.ssh/config for paramiko, with Include directives resolved, which paramiko ignores."""

from __future__ import annotations

import glob
import io
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodekit.inventory.errors import KitError

if TYPE_CHECKING:
    import paramiko

_SYSTEM = Path("/etc/ssh")
_MAX_DEPTH = 16  # ssh's own


class ConfigError(KitError):
    """A configuration file of ssh has an error or cannot be read; the message names the file."""


def read(home: Path, host: str = "", known: Mapping[str, Any] | None = None) -> paramiko.SSHConfig:
    """Read the user's and the system's configuration; as in ssh, the first value found for a host counts.

    Args:
        home: the user's home folder.
        host: the host that `known` is about.
        known: options (``User``, ``Port``) that take precedence, as ssh's command line does; None values are left out.

    Raises:
        ConfigError: a file has an error or cannot be read.
    """
    import paramiko

    config = paramiko.SSHConfig()
    given = [f"  {name} {value}" for name, value in (known or {}).items() if value is not None]
    config.parse(io.StringIO("\n".join([f"Host {host}", *given] if given else [])))
    for file, base in ((home / ".ssh/config", home / ".ssh"), (_SYSTEM / "ssh_config", _SYSTEM)):
        try:
            if file.is_file():
                config.parse(io.StringIO("\n".join(_lines(file, base, 0))))
        except (paramiko.SSHException, ValueError) as error:  # an unknown Match, a quote that is not closed
            raise ConfigError(f"{file}: {error}") from error
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return config


def text(file: Path) -> str:
    """Return the text of a configuration file with its included files in place.

    Raises:
        ConfigError: a file cannot be read.
    """
    try:
        return "\n".join(_lines(file, file.parent, 0))
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error


def _lines(file: Path, base: Path, depth: int, block: str = "Host *") -> Iterator[str]:
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{file}: Include goes deeper than {_MAX_DEPTH} files")
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        keyword = re.match(r"\s*(\w+)[\s=]+(.*)", line)
        name = keyword.group(1).lower() if keyword else ""
        if name in ("host", "match"):
            block = line
        if keyword is None or name != "include":
            yield line
            continue
        for pattern in _words(keyword.group(2), f"{file}: {line.strip()}"):
            # Not Path.expanduser, which raises for a user that does not exist; such a file simply does not exist.
            for found in sorted(glob.glob(str(base / os.path.expanduser(pattern)))):  # noqa: PTH111, PTH207
                yield from _lines(Path(found), base, depth + 1, block)
        yield block  # the lines after the Include belong to this block again


def known_hosts_files(config: Mapping[str, Any], extra: str | None, home: Path) -> list[Path]:
    """Return all known_hosts files that ssh would read, and `extra`; ~/.ssh/known_hosts is always among them."""
    files = [home / ".ssh/known_hosts", home / ".ssh/known_hosts2"]
    if extra is not None:
        files.insert(0, Path(extra).expanduser())
        if not files[0].exists() or files[0].is_dir():
            found = "is a folder" if files[0].is_dir() else "does not exist"
            raise ConfigError(f"the known_hosts file {extra} {found}", cure="correct `known_hosts`")
    for name in ("userknownhostsfile", "globalknownhostsfile"):
        given = str(config.get(name, ""))
        files += [Path(os.path.expanduser(file)) for file in _words(given, f"~/.ssh/config: {name} {given}")]  # noqa: PTH111
    return list(dict.fromkeys([*files, _SYSTEM / "ssh_known_hosts", _SYSTEM / "ssh_known_hosts2"]))


def _words(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def quoted(path: str | Path) -> str:
    """Quote a file name in the syntax of ssh's configuration, which also applies to ``-o``."""
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'
