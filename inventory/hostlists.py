"""Check host names, and expand hostlists such as ``gpu[01-16,20]`` in the order in which they are written."""

import re
from itertools import product
from math import prod

MAX_HOSTS = 10_000
"""The most hosts of a hostlist: a larger one is a mistake, and expanding it could exhaust the memory."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]{0,199}")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:/([1-9]\d{0,5}))?)?")

OWN_NAMES = ("code", "slurm", "state")
"""The names of kit's own folders beside those of the nodes."""


def is_own_name(name: str) -> bool:
    """Whether a name is reserved for kit's own files beside the nodes' folders; `code.example.org` is not."""
    return name in OWN_NAMES or name.startswith(("code.tree.json", "code.partial-"))


def is_name(text: str) -> bool:
    """Whether a text is the name or address of one host, not a hostlist."""
    try:
        return expand(text) == (text,)
    except ValueError:
        return False


def expand(text: str) -> tuple[str, ...]:
    """Expand a hostlist in the order in which it is written.

    Addresses are paired with names by position, but ClusterShell's NodeSet sorts and drops repeats. So each range is
    given to it separately.

    Raises:
        ValueError: says what is wrong with the hostlist.
    """
    if "[" not in text and "]" not in text and "," not in text:
        return (_checked(text),)
    patterns = [choice for part in _split_outside_brackets(text) for choice in _one_range_per_bracket(part)]
    if sum(size for _, size in patterns) > MAX_HOSTS:
        raise ValueError(f"it stands for more than {MAX_HOSTS:,} hosts")
    # Imported here: most inventories have no brackets, and this import takes as long as reading an inventory.
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    try:
        names = [name for pattern, _ in patterns for name in NodeSet(pattern, resolver=RESOLVER_NOGROUP)]
    except NodeSetException as error:
        raise ValueError(str(error)) from error
    return tuple(_checked(name) for name in names)


def _checked(name: str) -> str:
    if "@" in name:
        raise ValueError("the user goes under user:")
    if name.count(":") == 1:
        raise ValueError("the port goes under port:")
    if not _NAME.fullmatch(name):
        raise ValueError("letters, digits, '.', '-' and '_' make a name, and it starts with no '-' or '.'")
    return name


def _split_outside_brackets(text: str) -> list[str]:
    parts = [part.strip() for part in re.split(r",(?![^\[\]]*\])", text)]
    if "" in parts:
        raise ValueError("a comma has no name beside it")
    return parts


def _one_range_per_bracket(part: str) -> list[tuple[str, int]]:
    """Split ``a[1,3-4]`` into ``a[1]`` and ``a[3-4]``, each with the number of names it stands for."""
    pieces = re.split(r"\[([^\[\]]*)\]", part)
    fixed, brackets = pieces[0::2], pieces[1::2]
    if any("[" in text or "]" in text for text in fixed):
        raise ValueError("a bracket is not closed or not opened")
    choices = [[_sized_range(text.strip()) for text in bracket.split(",")] for bracket in brackets]
    if prod(map(len, choices)) > MAX_HOSTS:
        raise ValueError(f"it stands for more than {MAX_HOSTS:,} hosts")
    found = []
    for chosen in product(*choices):
        text = fixed[0] + "".join(
            f"[{span}]{after}" for (span, _), after in zip(chosen, fixed[1:], strict=True)
        )
        found.append((text, prod(size for _, size in chosen)))
    return found


def _sized_range(text: str) -> tuple[str, int]:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"in brackets go numbers and ranges, and {text!r} is neither")
    first, last, step = match.groups()
    if last is None:
        return text, 1
    if int(last) < int(first):
        raise ValueError(f"the range {text} runs backwards")
    width = max(len(first), len(last))
    if len(first) != len(last) and len(first) > 1 and first.startswith("0"):
        raise ValueError(f"the range {text} mixes lengths: write {first:0>{width}}-{last:0>{width}}")
    return text, (int(last) - int(first)) // int(step or 1) + 1
