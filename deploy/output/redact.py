"""Removes secrets from texts that others will see: values of variables, passwords in URLs, strings like API keys."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args
from urllib.parse import quote, urlsplit

from nodekit.deploy.host.schema import EventKind

LEFT_OUT = "…"
_SHORTEST = 8
"""Shorter values of ordinary variables are not searched for in texts: ``1`` and ``info`` are everywhere."""
_SHORTEST_SECRET = 4

# Each expression takes linear time: a repetition either cannot start within an earlier try, or is bounded.
_NAME = r"token|secret|passw(?:or)?d|passphrase|credential|(?:api|access|private)[-_]?key"
_IN_TEXT = re.compile(_NAME, re.IGNORECASE)
_SECRET_NAME = re.compile(rf"{_NAME}|(?:^|[-_])(?:auth|key|pat|pwd)$", re.IGNORECASE)
_IN_QUERY = re.compile(
    rf"{_SECRET_NAME.pattern}|(?:^|[-_.])(?:sig|signature|pass|code|session|sid)$", re.IGNORECASE
)
"""Names of secret parameters in a URL's query; in prose, a word such as key or code is harmless."""
_NAMED = re.compile(
    r"(?<![\w.-])(?:(?P<option>-[\w.-]*)\s+(?=[^\s-])"
    r"|(?P<name>[\w.-]+)\\{0,3}[\"']?\s*[=:]{1,2}>?\s*(?:bearer\s+)?)(?P<quote>\\{0,3}[\"']?)",
    re.IGNORECASE,
)
_VALUE = re.compile(r"(?:[^\s\"',;&<>\\]|\\(?![\"']))+")
_OPTION_VALUE = re.compile(r"[^\s\"']+")
_QUOTED = {'"': re.compile(r'[^"\\\n]+(?=\\{0,3}")'), "'": re.compile(r"[^'\\\n]+(?=\\{0,3}')")}
_USER_IN_URL = re.compile(r"(?<=://)[^\s/?#\"'<>]+@")
_BEARER = re.compile(r"\b(?P<name>bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_WEBHOOK = re.compile(
    r"(?P<site>https?://(?:hooks\.[\w.-]+|discord(?:app)?\.com/api/webhooks|[\w.-]+\.webhook\.office\.com|"
    r"api\.telegram\.org|oapi\.dingtalk\.com|qyapi\.weixin\.qq\.com|open\.feishu\.cn|ntfy\.sh))/[^\s\"'<>]+",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
    r"|xox[abeoprs]-[\w-]{10,}|AIza[\w-]{30,}|dop_v1_[0-9a-f]{32,}|nvapi-[\w-]{16,}|pypi-[\w-]{16,}"
    r"|wandb_v\d_\w{16,}|npm_[A-Za-z0-9]{20,}|(?:(?:AKIA|ASIA)[0-9A-Z]{16}|[0-9a-f]{40})(?![\w-]))"
    r"|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
)
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_OWN_WORDS = (
    *get_args(EventKind), "snapshots", "restart", "waiting", "starting", "running", "training", "orphaned", "succeeded",
    "stopped", "goodput", "accuracy",
)  # fmt: skip
"""Kit's own words for kinds, causes and states: no secrets, and a redacted report must still be readable."""
_LONGEST_KEPT = 4096


def _is_own_word(value: str) -> bool:
    return any(value in word for word in _OWN_WORDS)


class Redactor:
    """Knows a run's secrets, and removes them from texts."""

    def __init__(self, inventory: Mapping[str, Any], *, known: Iterable[str] = ()) -> None:
        """Collect the values to remove: the inventory's variables, and its secrets as far as they are set here.

        Args:
            inventory: the one in the run's record.
            known: further secrets.
        """
        values = dict.fromkeys(known, _SHORTEST_SECRET)
        for env in _envs(inventory):
            for name, value in env.items():
                values[str(value)] = _SHORTEST_SECRET if is_secret_name(str(name)) else _SHORTEST
        names = list(dict.fromkeys(_secrets(inventory)))
        values |= {os.environ[name]: _SHORTEST_SECRET for name in names if name in os.environ}
        self.unknown = tuple(name for name in names if name not in os.environ)
        """The inventory's secrets that are not set in this environment: their values cannot be found in texts."""
        found = {
            written
            for value, shortest in values.items()
            if len(value) >= shortest and not (shortest == _SHORTEST and _is_own_word(value))
            for written in (value, quote(value, safe=""), json.dumps(value)[1:-1])
        }
        # The longest first: one may be the beginning of another.
        joined = "|".join(re.escape(value) for value in sorted(found, key=len, reverse=True))
        self._known = re.compile(joined) if joined else None
        self._often = functools.lru_cache(maxsize=8192)(self._text)

    @property
    def warning(self) -> str:
        """A warning about `unknown` for those who pass the report on; "" if there are none."""
        if not self.unknown:
            return ""
        names = ", ".join(self.unknown)
        return (
            f"{names}: not set in the environment that kit report ran in, so its value could not be looked for; if the "
            "job printed it, it may be in this report. Export it and run kit report again."
        )

    def text(self, text: str) -> str:
        """Remove secrets from a text; results are cached, as most texts of a run repeat."""
        return (self._often if len(text) <= _LONGEST_KEPT else self._text)(text)

    def _text(self, text: str) -> str:
        text = _PEM.sub(LEFT_OUT, text)
        if self._known is not None:
            text = self._known.sub(LEFT_OUT, text)
        text = _USER_IN_URL.sub(f"{LEFT_OUT}@", text)
        text = _WEBHOOK.sub(rf"\g<site>/{LEFT_OUT}", text)
        text = _BEARER.sub(rf"\g<name> {LEFT_OUT}", text)
        return _SHAPES.sub(LEFT_OUT, _without_named(text))

    def words(self, argv: Iterable[str]) -> list[str]:
        """Remove secrets from a command line, also the argument after an option such as ``--token``."""
        shown: list[str] = []
        is_next = False
        for word in argv:
            is_value = is_next and not word.startswith("-")
            shown.append(LEFT_OUT if is_value else self.text(word))
            is_next = word.startswith("-") and "=" not in word and is_secret_name(word)
        return shown

    def tree(self, value: Any, name: str = "") -> Any:
        """Remove secrets from JSON values, and dataclasses of them.

        Of variables and notification targets only the names and hosts remain; kit's own variables are not secret.
        """
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            return dataclasses.replace(value, **{key: self.tree(each, key) for key, each in fields.items()})
        if isinstance(value, Mapping):
            if name == "env":
                own = (
                    key for key in value if str(key).startswith("NODEKIT_") and not is_secret_name(str(key))
                )
                return {**dict.fromkeys(value, LEFT_OUT), **{key: self.text(str(value[key])) for key in own}}
            return {
                self.text(key) if isinstance(key, str) else key: self.tree(each, str(key))
                for key, each in value.items()
            }
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
            return LEFT_OUT if value else value
        return self.text(value)


@functools.lru_cache(maxsize=1024)
def is_secret_name(name: str) -> bool:
    """Whether the value of a variable, option or key with this name is secret."""
    return bool(_SECRET_NAME.search(name))


def _without_named(text: str) -> str:
    """Remove what is assigned to a secret name in a text: variables, options, JSON and URL parameters."""
    parts: list[str] = []
    done = at = 0
    while match := _NAMED.search(text, at):
        at = match.end()
        in_query = match["name"] and text[max(match.start() - 1, 0) : match.start()] in ("?", "&", ";", "#")
        if not (_IN_QUERY if in_query else _IN_TEXT).search(match["option"] or match["name"]):
            continue
        opened = match["quote"][-1:]
        value = _QUOTED[opened].match(text, at) if opened in _QUOTED else None
        value = value or (_OPTION_VALUE if match["option"] else _VALUE).match(text, at)
        if value is not None:
            parts += [text[done:at], LEFT_OUT]
            done = at = value.end()
    return "".join([*parts, text[done:]])


def _secrets(inventory: Mapping[str, Any]) -> Iterable[str]:
    """Return the variables that an inventory refers to for secret values."""
    yield from _mapping(inventory.get("job")).get("secrets") or ()
    webhook = _mapping(_mapping(inventory.get("notify")).get("webhook"))
    if webhook.get("url_from"):
        yield webhook["url_from"]
    yield from _mapping(webhook.get("headers_from")).values()
    yield from _VARIABLE.findall(json.dumps(_mapping(inventory.get("environment"))))


def _envs(value: Any) -> Iterable[Mapping[str, Any]]:
    """Return all ``env`` mappings of an inventory."""
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
