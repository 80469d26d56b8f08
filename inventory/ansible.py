"""Read the hosts of an Ansible inventory: INI, YAML, or the output of ``ansible-inventory --list``. Pure.

Groups, hosts, their connection settings and interpreters are read; all other variables are ignored, including
passwords.
"""

from __future__ import annotations

import re
import shlex
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from nodekit.inventory.errors import InventoryError
from nodekit.inventory.hostlists import MAX_HOSTS
from nodekit.inventory.importers import FoundHost, Imported, checked_host, checked_port, checked_user
from nodekit.inventory.source import NotYamlError, parse

# Setting → its names in Ansible, the current one first.
_NAMES = {
    "address": ("ansible_host", "ansible_ssh_host"),
    "user": ("ansible_user", "ansible_ssh_user"),
    "port": ("ansible_port", "ansible_ssh_port"),
    "identity_file": ("ansible_ssh_private_key_file", "ansible_private_key_file"),
    "connection": ("ansible_connection",),
    "python": ("ansible_python_interpreter",),
    "common_args": ("ansible_ssh_common_args",),
    "extra_args": ("ansible_ssh_extra_args",),
}
# Option of ssh → the setting of kit that corresponds to it; other options have none.
_SSH_OPTIONS = {
    "userknownhostsfile": "known_hosts",
    "identityfile": "identity_file",
    "user": "user",
    "port": "port",
}
_WANTED = {name for names in _NAMES.values() for name in names}
_SSH = ("ssh", "smart", "paramiko", "paramiko_ssh", "ansible.builtin.ssh", "ansible.builtin.paramiko_ssh", "")
_LOCAL = ("local", "ansible.builtin.local")
_MAX_DEPTH = 64

Variables = dict[str, tuple[str, str]]
"""Name → value and its location."""


@dataclass
class _Group:
    hosts: dict[str, None] = field(default_factory=dict)
    """In the order of the file."""
    children: dict[str, None] = field(default_factory=dict)
    variables: Variables = field(default_factory=dict)


@dataclass
class _Tree:
    """The content of a file: groups, hosts and variables."""

    groups: dict[str, _Group] = field(default_factory=dict)
    hosts: dict[str, Variables] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def group(self, name: str) -> _Group:
        return self.groups.setdefault(name, _Group())

    def add(self, group: str, pattern: str, variables: Variables, where: str) -> None:
        """Add the hosts of a pattern such as ``gpu[01:04]:22`` to a group."""
        pattern, port = _split_port(pattern)
        if port is not None:
            variables = {"ansible_port": (port, where), **variables}
        for name in expand(pattern, where):
            checked_host(name, where)
            self.group(group).hosts.setdefault(name)
            self.hosts.setdefault(name, {}).update(variables)
            self.where.setdefault(name, where)
            if len(self.hosts) > MAX_HOSTS:
                raise InventoryError(f"{where}: found more than {MAX_HOSTS:,} hosts", wanted="fewer")


def read(text: str, file: str, group: str | None = None) -> Imported:
    """Return the hosts of an inventory, or of one of its groups, in its order.

    Raises:
        InventoryError: the text is not an Ansible inventory, has no such group, or has an invalid host name.
    """
    if text.startswith("#!"):
        raise InventoryError(
            f"{file}: found a script",
            wanted="an inventory",
            cure=f"run it yourself: {file} --list > hosts.json, and give that",
        )
    tree = _yaml(text, file) if _is_yaml(text) else _ini(text, file)
    names = _members(tree, group, file)
    notes = list(dict.fromkeys(tree.notes))
    found = []
    for name in names:
        host = _host(tree, name, notes)
        if host is not None:
            found.append(host)
    if not found:
        what = f"in the group {group}" if group else "in it"
        raise InventoryError(f"{file}: found no host {what} that is reached over SSH", wanted="one at least")
    return Imported(tuple(found), tuple(notes))


def _members(tree: _Tree, group: str | None, file: str) -> list[str]:
    if group in (None, "all"):
        return list(tree.hosts)
    assert group is not None
    if group not in tree.groups:
        there = ", ".join(sorted(name for name in tree.groups if name != "all")[:20]) or "none"
        raise InventoryError(f"{file}: found no group {group[:80]!r}", wanted=f"one of {there}")
    wanted: dict[str, None] = {}
    for name in _below(tree, group):
        wanted.update(tree.groups[name].hosts)
    return list(wanted)


def _below(tree: _Tree, group: str) -> list[str]:
    """Return a group and all groups below it, each once, even if they contain one another."""
    found: dict[str, None] = {}
    waiting = [group]
    while waiting:
        name = waiting.pop(0)
        if name not in found and name in tree.groups:
            found[name] = None
            waiting += tree.groups[name].children
    return list(found)


def _host(tree: _Tree, name: str, notes: list[str]) -> FoundHost | None:
    """Return a host with the variables of its groups and its own, which win; None if kit cannot connect to it."""
    where = tree.where[name]
    variables: Variables = {}
    for group in _groups_of(tree, name):
        variables.update(tree.groups[group].variables)
    variables.update(tree.hosts[name])
    values: dict[str, tuple[str, str]] = {}
    for key, names in _NAMES.items():
        for each in names:
            if each in variables and key not in values:
                value, at = variables[each]
                if "{{" in value or "{%" in value:
                    notes.append(f"{at}: {each} of {name}: only Ansible can tell what a template says")
                elif value:
                    values[key] = (value, at)
    connection = values.get("connection", ("", ""))[0]
    if connection not in (*_SSH, *_LOCAL):
        notes.append(f"{where}: {name}: its connection is {connection[:80]!r}, not ssh")
        return None
    is_local = connection in _LOCAL
    python = values.get("python", ("", ""))[0]  # may also be Ansible's `auto`, or `/usr/bin/env python3`
    is_path = python.startswith(("/", "~/")) and not python.startswith("/usr/bin/env ")
    if is_local:
        values = {}
    jump = None
    for key in ("common_args", "extra_args"):
        if key in values:
            text, at = values[key]
            jump = jump or re.search(r"Proxy(?:Jump|Command)|(?:^|\s)-J", text)
            for name_of, value in _ssh_options(text).items():
                values.setdefault(name_of, (value, at))
    user, port, address = values.get("user"), values.get("port"), values.get("address")
    return FoundHost(
        name=name,
        where=where,
        address=checked_host(*address) if address and address[0] != name else None,
        user=checked_user(*user) if user else None,
        port=checked_port(*port) if port else None,
        identity_file=values["identity_file"][0] if "identity_file" in values else None,
        known_hosts=values["known_hosts"][0] if "known_hosts" in values else None,
        python=python if is_path else None,
        connection="local" if is_local else None,
        note="Ansible reaches it through a jump host: say so as ProxyJump in ~/.ssh/config" if jump else "",
    )


def _ssh_options(arguments: str) -> dict[str, str]:
    """Return the settings in arguments of ssh, such as ``-o UserKnownHostsFile=F``; of several files the first."""
    found: dict[str, str] = {}
    try:
        words = shlex.split(re.sub(r"(?<!\S)-o\s+", "-o", arguments))
    except ValueError:  # unclosed quotes, which Ansible could not use, either
        return {}
    for word in words:
        option = re.fullmatch(r"-o\s*(\w+)(?:\s*=\s*|\s+)(.+)", word)
        if option is None or option[1].lower() not in _SSH_OPTIONS:
            continue
        try:
            value = next(iter(shlex.split(option[2])), "")
        except ValueError:
            continue
        # Skip /dev/null: no host key would be known then, which kit refuses. Skip %h too, which only ssh can expand.
        if value not in ("", "/dev/null", "none") and not re.search("%(?!%)", value.replace("%%", "")):
            found.setdefault(_SSH_OPTIONS[option[1].lower()], value.replace("%%", "%"))
    return found


def _groups_of(tree: _Tree, name: str) -> list[str]:
    """Return a host's groups, the outermost first; at the same depth by name, as in Ansible."""
    found = {group for group, inside in tree.groups.items() if name in inside.hosts}
    depth = dict.fromkeys(tree.groups, 1)
    for _ in range(_MAX_DEPTH):  # bounded, as groups may contain one another
        before = dict(depth), set(found)
        for parent, group in tree.groups.items():
            for child in group.children:
                depth[child] = max(depth[child], depth[parent] + 1)
                if child in found:
                    found.add(parent)
        if (depth, found) == before:
            break
    found.discard("all")
    return ["all"] * ("all" in tree.groups) + sorted(found, key=lambda group: (depth[group], group))


# --- patterns -----------------------------------------------------------------------------------------------


def expand(pattern: str, where: str) -> list[str]:
    """Expand a pattern with any number of brackets: ``gpu[01:04]``, ``gpu[1:9:2]``, ``db-[a:f]``."""
    if pattern.startswith("[") and pattern.endswith("]") and ":" in pattern[1:-1].replace("::", ":", 1):
        inner = pattern[1:-1]
        if re.fullmatch(r"[0-9A-Fa-f:.]+", inner) and inner.count(":") > 2:
            return [inner]  # an IPv6 address
    found = [""]
    for text, bracket in re.findall(r"([^\[\]]*)(?:\[([^\[\]]*)\])?", pattern):
        choices = _range(bracket, pattern, where) if bracket else [""]
        if len(found) * len(choices) > MAX_HOSTS:
            raise InventoryError(f"{where}: {pattern[:80]!r} stands for more than {MAX_HOSTS:,} hosts")
        found = [before + text + choice for before in found for choice in choices]
    left = re.sub(r"\[[^\[\]]+\]", "", pattern)
    if "[" in left or "]" in left:
        raise InventoryError(f"{where}: found {pattern[:80]!r}", wanted="brackets as in gpu[01:04]")
    return found


def _range(bracket: str, pattern: str, where: str) -> list[str]:
    numbers = re.fullmatch(r"([0-9]{0,9}):([0-9]{1,9})(?::([0-9]{1,6}))?", bracket)
    letters = re.fullmatch(r"([A-Za-z]):([A-Za-z])(?::([0-9]{1,6}))?", bracket)
    if numbers:
        first, last, step = numbers.groups()
        first = first or "0"
        is_padded = len(first) > 1 and first.startswith("0")
        span = range(int(first), int(last) + 1, int(step or 1) or 1)
        if len(span) > MAX_HOSTS:
            raise InventoryError(f"{where}: {pattern[:80]!r} stands for more than {MAX_HOSTS:,} hosts")
        if span and not (is_padded and len(first) != len(last)):
            return [f"{number:0{len(first)}d}" if is_padded else str(number) for number in span]
    elif letters:
        first, last, step = letters.groups()
        alphabet = string.ascii_letters
        chosen = alphabet[alphabet.index(first) : alphabet.index(last) + 1 : int(step or 1) or 1]
        if chosen:
            return list(chosen)
    raise InventoryError(
        f"{where}: found [{bracket[:80]}] in {pattern[:80]!r}", wanted="a range as in gpu[01:04]"
    )


def _split_port(pattern: str) -> tuple[str, str | None]:
    """Split ``gpu1:2222`` into host and port; not ranges in brackets, nor IPv6 addresses."""
    outside = re.sub(r"\[[^\[\]]*\]", "", pattern)
    if outside.count(":") == 1 and (match := re.fullmatch(r"(.+):([0-9]{1,5})", pattern)):
        return match.group(1), match.group(2)
    return pattern, None


# --- INI ----------------------------------------------------------------------------------------------------


def _ini(text: str, file: str) -> _Tree:
    tree = _Tree()
    section, kind = "ungrouped", "hosts"
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{file}:{number}"
        line = line.strip()
        if not line or line[0] in "#;":
            continue
        header = re.fullmatch(r"\[([^:\]\s]+)(?::(\w+))?\]\s*([#;].*)?", line)
        if header:
            section, kind = header.group(1), header.group(2) or "hosts"
            if kind not in ("hosts", "children", "vars"):
                raise InventoryError(f"{where}: found [{section}:{kind}]", wanted=":children or :vars")
            tree.group(section)
        elif kind == "vars":
            name, equals, value = line.partition("=")
            if not equals:
                raise InventoryError(f"{where}: found {line[:80]!r}", wanted="a variable as name=value")
            if name.strip() in _WANTED:
                words = _words(value.strip(), where)
                tree.group(section).variables[name.strip()] = (" ".join(words), where)
        elif kind == "children":
            child = line.split("#", 1)[0].strip()
            tree.group(section).children.setdefault(child)
            tree.group(child)
        else:
            words = _words(line, where)
            if not words:
                continue
            variables = {}
            for word in words[1:]:
                name, equals, value = word.partition("=")
                if not equals:
                    raise InventoryError(f"{where}: found {word[:80]!r}", wanted="variables as name=value")
                if name in _WANTED:
                    variables[name] = (value.strip("'\""), where)
            tree.add(section, words[0], variables, where)
    return tree


def _words(line: str, where: str) -> list[str]:
    """Split a line into words as a shell does, without a comment at its end."""
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise InventoryError(
            f"{where}: found {line[:80]!r}", wanted=f"its quotes closed ({error})"
        ) from error


# --- YAML, and the JSON of ansible-inventory ----------------------------------------------------------------


def _is_yaml(text: str) -> bool:
    """Decide by the first line: YAML starts with a key, ``---`` or a brace, INI with a section or a host."""
    for line in text.splitlines():
        line = line.strip()
        if line and line[0] not in "#;":
            return (
                line == "---"
                or line.startswith(("{", "--- "))
                or bool(re.fullmatch(r"[^\s=\[]+:(\s.*)?", line))
            )
    return False


def _yaml(text: str, file: str) -> _Tree:
    try:
        document = parse(text)
    except NotYamlError as error:
        raise InventoryError(f"{file}:{error.line}: {error}") from error
    if not isinstance(document.data, dict):
        raise InventoryError(f"{file}:1: found no groups", wanted="them as in `all: {hosts: {gpu1: }}`")
    tree = _Tree()
    for problem in document.problems:  # except those of values that are not read, such as a password's !vault
        if problem.at_key or (problem.path[-1:] and problem.path[-1] in _WANTED):
            line = (problem.place or document.place(problem.path)).line
            tree.notes.append(f"{file}:{line}: {problem.text}")

    def where(*path: str) -> str:
        return f"{file}:{document.place(path, at_key=True).line}"

    is_listing = isinstance(document.data.get("_meta"), dict)
    for name, body in document.data.items():
        if name != "_meta":
            _yaml_group(tree, (name,), body, where, 0)
    if is_listing:
        listed = document.data["_meta"].get("hostvars")
        for host, values in (listed or {}).items() if isinstance(listed, dict) else ():
            if host in tree.hosts:
                tree.hosts[host].update(_variables(values, where("_meta", "hostvars", host)))
    return tree


def _yaml_group(tree: _Tree, path: tuple[str, ...], body: object, where: object, depth: int) -> None:
    assert callable(where)
    name = path[-1]
    group = tree.group(name)
    if body is None:
        return
    if isinstance(body, list):
        body = {"hosts": body}
    if not isinstance(body, dict) or depth > _MAX_DEPTH:
        raise InventoryError(
            f"{where(*path)}: found a group {name[:80]!r} without hosts:, children: or vars:",
            wanted="at least one of them",
        )
    group.variables.update(_variables(body.get("vars"), where(*path, "vars")))
    for host, values in _entries(body.get("hosts"), where(*path, "hosts")):
        at = where(*path, "hosts", host)
        tree.add(name, host, _variables(values, at), at)
    for child, inner in _entries(body.get("children"), where(*path, "children")):
        group.children.setdefault(child)
        if inner is None:
            tree.group(child)
        else:
            _yaml_group(tree, (*path, "children", child), inner, where, depth + 1)


def _entries(found: object, where: str) -> Iterator[tuple[str, object]]:
    """Yield the entries of a mapping, or of a list in the output of ansible-inventory."""
    if isinstance(found, Mapping):
        yield from ((str(key), value) for key, value in found.items())
    elif isinstance(found, list):
        yield from ((str(each), None) for each in found)
    elif isinstance(found, str):
        yield found, None
    elif found is not None:
        raise InventoryError(f"{where}: found {str(found)[:80]!r}", wanted="names with a ':' after each")


def _variables(found: object, where: str) -> Variables:
    if not isinstance(found, Mapping):
        return {}
    return {
        name: (str(value), where)
        for name, value in found.items()
        if name in _WANTED and isinstance(value, str | int) and not isinstance(value, bool)
    }
