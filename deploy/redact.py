"""Takes secrets out of what is shown to others: values of variables, passwords in URLs, what looks like a key."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

LEFT_OUT = "…"
_SHORTEST = 8
"""Of a variable's value that is looked for in other texts too: ``1`` and ``info`` are everywhere."""
_SHORTEST_SECRET = 4

_NAME = (
    r"(?:token|secret|passw(?:or)?d|passphrase|passwd|credential|api[-_]?key|access[-_]?key|private[-_]?key)"
)
_SECRET_NAME = re.compile(rf"{_NAME}|(?:^|[-_])(?:auth|key|pat|pwd)$", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"(?P<name>[\w.-]*{_NAME}[\w-]*)(?P<between>[\"']?\s*[=:]\s*(?:bearer\s+)?|(?<=-)\s+)(?P<quote>[\"']?)(?P<value>[^\s\"',;&<>]+)",
    re.IGNORECASE,
)
_OPTION = re.compile(
    rf"(?P<name>--?[\w-]*{_NAME}[\w-]*)(?P<between>\s+|=)(?P<value>(?!-)[^\s]+)", re.IGNORECASE
)
_USER_IN_URL = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^\s/@\"'<>]+@", re.IGNORECASE)
_BEARER = re.compile(r"\b(?P<name>bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_WEBHOOK = re.compile(
    r"(?P<site>https?://(?:hooks\.[\w.-]+|discord(?:app)?\.com/api/webhooks|[\w.-]+\.webhook\.office\.com|"
    r"api\.telegram\.org|oapi\.dingtalk\.com|qyapi\.weixin\.qq\.com|open\.feishu\.cn|ntfy\.sh))/[^\s\"'<>]+",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
    r"|xox[abeoprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|dop_v1_[0-9a-f]{32,}|[0-9a-f]{40}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)(?![\w-])"
)
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)


class Redactor:
    """Knows a run's secrets, and takes them out of texts."""

    def __init__(self, inventory: Mapping[str, Any], *, known: Iterable[str] = ()) -> None:
        """Of the inventory's variables no value is told; of its secrets, those of the environment here are known.

        Args:
            inventory: as the run's record has it.
            known: further secrets.
        """
        values = dict.fromkeys(known, _SHORTEST_SECRET)
        for env in _envs(inventory):
            for name, value in env.items():
                values[str(value)] = _SHORTEST_SECRET if is_secret_name(str(name)) else _SHORTEST
        names = _mapping(inventory.get("job")).get("secrets") or ()
        values |= {os.environ[name]: _SHORTEST_SECRET for name in names if name in os.environ}
        found = [value for value, shortest in values.items() if len(value) >= shortest]
        # The longest first: one may be the beginning of another.
        joined = "|".join(re.escape(value) for value in sorted(found, key=len, reverse=True))
        self._known = re.compile(joined) if joined else None

        self.text = functools.lru_cache(maxsize=8192)(self._text)
        """A text without secrets; most of those of a run come again and again."""

    def _text(self, text: str) -> str:
        text = _PEM.sub(LEFT_OUT, text)
        if self._known is not None:
            text = self._known.sub(LEFT_OUT, text)
        text = _USER_IN_URL.sub(rf"\g<scheme>{LEFT_OUT}@", text)
        text = _WEBHOOK.sub(rf"\g<site>/{LEFT_OUT}", text)
        text = _BEARER.sub(rf"\g<name> {LEFT_OUT}", text)
        text = _OPTION.sub(rf"\g<name>\g<between>{LEFT_OUT}", text)
        text = _ASSIGNED.sub(rf"\g<name>\g<between>\g<quote>{LEFT_OUT}", text)
        return _SHAPES.sub(LEFT_OUT, text)

    def words(self, argv: Iterable[str]) -> list[str]:
        """A command's words: also of ``--token x`` the second one is left out."""
        shown: list[str] = []
        is_next = False
        for word in argv:
            is_value = is_next and not word.startswith("-")
            shown.append(LEFT_OUT if is_value else self.text(word))
            is_next = word.startswith("-") and "=" not in word and is_secret_name(word)
        return shown

    def tree(self, value: Any, name: str = "") -> Any:
        """JSON values without secrets; of variables and of where people are notified nothing but the names."""
        if isinstance(value, Mapping):
            if name == "env":
                return dict.fromkeys(value, LEFT_OUT)
            return {key: self.tree(each, str(key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            if name in ("command", "argv", "srun_args"):
                return self.words([str(each) for each in value])
            return [self.tree(each, name) for each in value]
        if not isinstance(value, str):
            return value
        if name == "webhook" or (name == "notify" and "://" in value):
            parts = urlsplit(value)
            return f"{parts.scheme}://{parts.hostname or ''}/{LEFT_OUT}"
        if is_secret_name(name) and name not in ("secrets",) and not name.endswith("_file"):
            return LEFT_OUT
        return self.text(value)


@functools.lru_cache(maxsize=1024)
def is_secret_name(name: str) -> bool:
    """Whether what is called so is no one's business."""
    return bool(_SECRET_NAME.search(name))


def _envs(value: Any) -> Iterable[Mapping[str, Any]]:
    """All ``env`` of an inventory."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if key == "env" and isinstance(each, Mapping):
                yield each
            else:
                yield from _envs(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _envs(each)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
