"""Parse YAML text into plain data, with the line of every key and value.

PyYAML's own loader implements YAML 1.1: it reads ``2:4`` as 124 seconds, ``on`` as true and ``010`` as eight, keeps
the last of two equal keys, and drops line numbers. So only PyYAML's parser is used; its tree is converted here by the
rules of YAML 1.2.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import yaml

MAX_VALUES = 100_000
"""The most values of a file, more than any inventory has: only nested aliases exceed this."""

Path = tuple[str | int, ...]
"""The path of a value: keys, and indexes in lists."""


def quoted(text: str) -> str:
    """Return a text in double quotes, as in YAML; a long one is cut."""
    return json.dumps(text if len(text) <= 80 else text[:79] + "…", ensure_ascii=False)


class Place(NamedTuple):
    """A position in the text."""

    line: int
    offset: int

    @classmethod
    def of(cls, node: yaml.Node) -> "Place":
        """Return the position of a node."""
        return cls(node.start_mark.line + 1, node.start_mark.index)


@dataclass(frozen=True)
class Problem:
    """One mistake in the file."""

    path: Path
    text: str
    at_key: bool = False
    place: Place | None = None
    """Set if the path alone does not determine it."""


@dataclass
class Document:
    """The data of a file, with positions."""

    data: object = None
    keys: dict[Path, Place] = field(default_factory=dict)
    values: dict[Path, Place] = field(default_factory=dict)
    raw: dict[Path, str] = field(default_factory=dict)
    """Path → the scalar as written, without quotes."""
    problems: list[Problem] = field(default_factory=list)
    overridden: set[Path] = field(default_factory=set)
    """Paths that the caller has overridden; these have no line."""

    def place(self, path: Path, *, at_key: bool = False) -> Place:
        """Return the position of a value or its key; for a missing one, that of its parent."""
        places = self.keys if at_key else self.values
        if path in places:
            return places[path]
        while path and path not in self.keys:
            path = path[:-1]
        return self.keys.get(path, Place(1, 0))

    def override(self, values: Mapping[str, object]) -> None:
        """Override dotted keys, such as ``job.command``."""
        for dotted, value in values.items():
            path = tuple(dotted.split("."))
            *parents, last = path
            place = self.data
            for key in parents:
                if isinstance(place, dict) and place.get(key) is None:
                    place[key] = {}
                place = place[key] if isinstance(place, dict) else None
            if isinstance(place, dict):  # if not, the file's own mistake is reported
                place[last] = value
                self.overridden.add(path)


class NotYamlError(Exception):
    """The text is not valid YAML."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with the plain scalars of YAML 1.2."""

    yaml_implicit_resolvers = {}  # noqa: RUF012, the parent's way


for _tag, _pattern, _first in [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", [*"-+."]),
    ("merge", r"<<", ["<"]),
]:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def parse(text: str) -> Document:
    """Parse a YAML text; mistakes inside it are collected in the document."""
    try:
        node = yaml.compose(text, _Loader)
        reader = _Reader()
        if node is not None:
            reader.document.data = reader.read(node, ())
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise NotYamlError(
            line, f"found the character U+{ord(text[error.position]):04X}, wanted text"
        ) from error
    except yaml.MarkedYAMLError as error:
        raise _syntax_problem(error) from error
    except RecursionError as error:
        raise NotYamlError(1, "found brackets or lists nested too deep to read") from error
    return reader.document


class _Reader:
    """Converts PyYAML's nodes to data, and records lines and mistakes."""

    def __init__(self) -> None:
        self.document = Document()
        self.open_nodes: list[yaml.Node] = []
        self.num_values = 0

    def read(self, node: yaml.Node, path: Path) -> object:
        self._check_size(node)
        self.document.values[path] = Place.of(node)
        self.open_nodes.append(node)
        value: object
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            value = self._mapping(node, path)
        elif isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            value = [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        else:
            value = self._scalar(node, path)
        self.open_nodes.pop()
        return value

    def _check_size(self, node: yaml.Node) -> None:
        """Limit the number of values: nested aliases can stand for billions, or for infinitely many."""
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise NotYamlError(Place.of(node).line, f"found over {MAX_VALUES:,} values, wanted fewer aliases")
        if node in self.open_nodes:
            raise NotYamlError(Place.of(node).line, "found an anchor that holds itself, wanted one that ends")

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, object]:
        data = {}
        for key, (key_node, value) in self._entries(node, path).items():
            inner = (*path, key)
            self.document.keys[inner] = Place.of(key_node)
            data[key] = self.read(value, inner)
        return data

    def _entries(self, node: yaml.MappingNode, path: Path) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Return a mapping's own keys, then those merged by ``<<`` that it does not have itself."""
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key_node, value in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    merged = self._merge_source(source, path) | merged
            elif not isinstance(key_node, yaml.ScalarNode):
                text = "found a list or mapping for a key, wanted text (in quotes if it has a bracket)"
                self._problem(key_node, path, text)
            elif key_node.value in own:
                first = own[key_node.value][0].start_mark.line + 1
                again = f"found again (first on line {first}), wanted once"
                problem = Problem((*path, key_node.value), again, at_key=True, place=Place.of(key_node))
                self.document.problems.append(problem)
            elif self._is_clean(key_node, path):
                own[key_node.value] = (key_node, value)
        return own | {key: entry for key, entry in merged.items() if key not in own}

    def _merge_source(self, node: yaml.Node, path: Path) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        self._check_size(node)
        if not isinstance(node, yaml.MappingNode):
            self._problem(node, (*path, "<<"), "found no mapping, wanted one to merge in, as *name")
            return {}
        self.open_nodes.append(node)
        entries = self._entries(node, path)
        self.open_nodes.pop()
        return entries

    def _scalar(self, node: yaml.Node, path: Path) -> object:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if not isinstance(node, yaml.ScalarNode) or kind not in (*_CONSTRUCT, "str", "merge"):
            self._problem(node, path, f"found the tag {node.tag}, wanted a value without one")
            return None
        self.document.raw[path] = node.value
        if kind in ("str", "merge"):
            return node.value if self._is_clean(node, path) else ""
        try:
            return _CONSTRUCT[kind](node.value)
        except ValueError:  # a wrong tag (!!int x), or a number of more than 4,300 digits
            self._problem(node, path, f"found {quoted(node.value)}, wanted a value of the kind {kind}")
            return None

    def _is_clean(self, node: yaml.ScalarNode, path: Path) -> bool:
        r"""Whether a text has only characters that program arguments and UTF-8 can hold, unlike "\0"."""
        bad = re.search("[\0\ud800-\udfff]", node.value)
        if bad:
            self._problem(node, path, f"found the character U+{ord(bad[0]):04X}, wanted text without it")
        return bad is None

    def _problem(self, node: yaml.Node, path: Path, text: str) -> None:
        self.document.problems.append(Problem(path, text, place=Place.of(node)))


def _integer(text: str) -> int:
    return int(text, 0 if text[:2] in ("0o", "0x") else 10)


_CONSTRUCT: dict[str, Callable[[str], object]] = {
    "null": lambda text: None,  # noqa: ARG005
    "bool": lambda text: text.lower() == "true",
    "int": _integer,
    "float": lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.lower())),
}

_HINTS = [
    (r"character '\\t'", "found a tab, wanted spaces: YAML indents with spaces only"),
    (r"character '([@`%|>])'", "found a value that starts with {0}, wanted quotes around it"),
    (r"while scanning an (?:alias|anchor)", "found a value that starts with * or &, wanted quotes around it"),
    (r"mapping values are not allowed", "found a ':' where none can be, wanted a ':' after the key above it, the same indentation as its neighbours, or quotes around a value that holds ': '"),  # noqa: E501
    (r"could not find expected ':'", "found a key without ': ' after it, wanted key: value"),
    (r"quoted scalar; found unexpected end", "found a quote that is not closed, wanted its end"),
    (r"but found '<scalar>'", "found more text after a quote or bracket was closed, wanted quotes around the whole value"),  # noqa: E501
    (r"expected <block end>, but found '<block", "found a line whose indentation fits none above it, wanted that of its neighbours"),  # noqa: E501
    (r"expected <block end>", "found keys and list items side by side, wanted one of either"),
    (r"expected ',' or '(.)'", "found no end, or an item without ',', wanted a '{0}' (and quotes around a value that holds a bracket)"),  # noqa: E501
    (r"undefined alias '?([^']*)", "found *{0}, wanted an anchor &{0} further up"),
    (r"found duplicate anchor '?([^']*?)'?;", "found the anchor &{0} again, wanted one of a kind"),
    (r"expected a single document", "found a second document, wanted one (without '---')"),
    (r"unknown escape character '(.)'", "found \\{0} in double quotes, wanted single quotes or \\\\{0}"),
]  # fmt: skip


def _syntax_problem(error: yaml.MarkedYAMLError) -> NotYamlError:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    said = f"{error.context or ''}; {error.problem or ''}"
    # Report where it was opened, not where the text ended.
    if error.context_mark and re.search("quoted|flow", said):
        line = error.context_mark.line + 1
    for pattern, hint in _HINTS:
        found = re.search(pattern, said)
        if found:
            return NotYamlError(line, hint.format(*found.groups()))
    return NotYamlError(line, f"found what is no YAML ({error.problem}), wanted key: value lines")
