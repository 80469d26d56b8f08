"""The types of the inventory's fields: each validates one value, and tells the user what is wanted."""

import re
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_interface, ip_network
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    Strict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from nodekit.inventory import hostlists


def unwanted(wanted: str, *, quote: bool = False, hide: str = "") -> PydanticCustomError:
    """Return an error whose message completes "found X, wanted …".

    With `quote`, the message shows how to write a bare number as text; `hide` is shown in place of the value found.
    """
    return PydanticCustomError("wanted", "{wanted}", {"wanted": wanted, "quote": quote, "hide": hide})


def _wanted(words: str, *, quote: bool = False, hide: str = "") -> WrapValidator:
    """Replace pydantic's errors by one with these words; an error from `unwanted` takes precedence."""

    def check(value: object, inner: ValidatorFunctionWrapHandler) -> object:
        try:
            return inner(value)
        except ValidationError as error:
            if any(detail["type"] == "wanted" for detail in error.errors(include_url=False)):
                raise
            raise unwanted(words, quote=quote, hide=hide) from error

    return WrapValidator(check)


Text = Annotated[str, Field(min_length=1), _wanted("text", quote=True)]
AnyText = Annotated[str, _wanted("text", quote=True)]
HostFolder = Annotated[
    str, Field(pattern=r"^[/~]"), _wanted("a folder on the host, as ~/nodekit or /scratch/me", quote=True)
]
SharedFolder = Annotated[
    str,
    Field(pattern=r"^/"),
    _wanted("a folder on all hosts by its full path, as /mnt/shared/snapshots", quote=True),
]
Count = Annotated[int, Strict(), Field(ge=0), _wanted("a whole number, 0 or more")]
PositiveCount = Annotated[int, Strict(), Field(ge=1), _wanted("a whole number, 1 or more")]
Port = Annotated[int, Strict(), Field(ge=1, le=65535), _wanted("a port from 1 to 65535")]
Seconds = Annotated[float, Strict(), Field(gt=0), _wanted("seconds, a number above 0")]
AutoSeconds = Annotated[
    Literal["auto"] | Annotated[float, Strict(), Field(gt=0)], _wanted("auto, or seconds, a number above 0")
]
HangSeconds = Annotated[
    Literal["auto", "never"] | Annotated[float, Strict(), Field(gt=0)],
    _wanted("auto, never, or seconds, a number above 0"),
]
OnNan = Annotated[Literal["stop", "rollback"], _wanted("stop or rollback")]
StartMethod = Annotated[Literal["forkserver", "spawn"], _wanted("forkserver or spawn")]
OnSlow = Annotated[Literal["tell", "drain"], _wanted("tell or drain")]
Flag = Annotated[bool, Strict(), _wanted("true or false")]
# An invalid URL is not shown, as it may contain a password.
IndexUrl = Annotated[
    str,
    Field(pattern=r"^https?://\S+$"),
    _wanted("an index's URL, as https://pypi.org/simple", hide="something else"),
]
FindLinks = Annotated[
    str, Field(min_length=1), _wanted("a folder here, or a page's URL, with wheels", hide="something else")
]
Size = Annotated[
    str,
    Field(pattern=r"^[1-9][0-9]*(\.[0-9]+)? ?[MGT]i?B$"),
    _wanted("a size from 1MB on, as 500MB or 2GB"),
]


def _check_url(url: str) -> str:
    if urlsplit(url).port == 0:  # reading `port` raises ValueError for other invalid ports
        raise ValueError(url)
    return url


WebhookUrl = Annotated[
    str,
    Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$"),
    AfterValidator(_check_url),
    _wanted(
        "an http or https URL; one with a password or a token in it is a secret: url_from: NAME, of the variable "
        "that holds it",
        hide="something else",
    ),
]
HeaderName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9-]+$"), _wanted("the name of a header, as Authorization")
]
Occasion = Annotated[
    Literal["start", "failure", "recovery", "end"], _wanted("start, failure, recovery or end", quote=True)
]
MemoryGb = Annotated[float, Strict(), Field(gt=0), _wanted("a number of GB above 0")]
Connection = Annotated[Literal["ssh", "local"], _wanted("ssh or local")]
User = Annotated[
    str, Field(pattern=r"^[^\s:-][^\s:]*$"), _wanted("a user's name, without spaces", quote=True)
]
Interface = Annotated[
    str,
    Field(pattern=r"^[^\s/,^=:-][^\s/,^=:]{0,14}$"),
    _wanted("the name of one network interface, as eth0", quote=True),
]
EnvName = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), _wanted("a variable's name: letters, digits and _")
]
SecretName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"),
    _wanted(
        "only the name of a variable: its value is taken from your environment", hide="text that is no name"
    ),
]
Scalar = Annotated[str | int | float | bool, _wanted("text, a number, true or false")]
Login = Annotated[
    str,
    Field(pattern=r"^([^\s:@-][^\s:@]*@)?[A-Za-z0-9_][A-Za-z0-9_.:%-]*$"),
    _wanted("a login node, as user@login.example.org", quote=True),
]
_MOST_RUNS = 10_000


def _check_array(text: str) -> str:
    listed, _, at_once = text.partition("%")
    num = 0
    for part in listed.split(","):
        numbers, _, step = part.partition(":")
        first, _, last = numbers.partition("-")
        if int(last or first) < int(first) or int(step or 1) == 0:
            raise unwanted(
                f"a first index, a last one that is not below it, and a step from 1, and not {part}"
            )
        num += (int(last or first) - int(first)) // int(step or 1) + 1
    if num > _MOST_RUNS:
        raise unwanted(f"at most {_MOST_RUNS} runs, and not {num}")
    if int(at_once or 1) == 0:
        raise unwanted("one job or more at once, after %")
    return text


ArraySpec = Annotated[
    str,
    Field(pattern=r"^\d{1,9}(-\d{1,9}(:\d{1,9})?)?(,\d{1,9}(-\d{1,9}(:\d{1,9})?)?)*(%\d{1,9})?$"),
    AfterValidator(_check_array),
    _wanted("indexes as sbatch --array takes them, as 0-15%4", quote=True),
]
RunTime = Annotated[
    Annotated[int, Strict(), Field(ge=1)]
    | Annotated[str, Field(pattern=r"^(\d+-)?\d{1,2}:[0-5]\d:[0-5]\d$")],
    _wanted("minutes, as 90, or [D-]HH:MM:SS, as 1-12:00:00"),
]
InventoryName = Annotated[
    str,
    Field(pattern=r"^[^\x00-\x1f\x7f/\s.-]([^\x00-\x1f\x7f/]{0,46}[^\x00-\x1f\x7f/\s])?$"),
    _wanted("a name fit for folders: at most 48 characters, no '/', and no '.' or '-' in front", quote=True),
]


def _distinct_indexes(value: int | tuple[int, ...]) -> int | tuple[int, ...]:
    if isinstance(value, tuple) and len(set(value)) < len(value):
        raise unwanted("each GPU once")
    return value


_GpuIndex = Annotated[int, Strict(), Field(ge=0)]
_GpuIndexes = Annotated[tuple[_GpuIndex, ...], Field(min_length=1, json_schema_extra={"uniqueItems": True})]
Gpus = Annotated[
    Annotated[int, Strict(), Field(ge=0)] | _GpuIndexes,
    AfterValidator(_distinct_indexes),
    _wanted("how many GPUs, as 4, or which, as [0, 1]"),
]

_HOSTLIST = "a host's name or a hostlist, as gpu[01-16,20]"


def _check_hostlist(text: str) -> str:
    try:
        names = hostlists.expand(text)
    except ValueError as error:
        raise unwanted(f"{_HOSTLIST} ({error})") from error
    if len(set(names)) < len(names):
        raise unwanted(f"{_HOSTLIST} (it has a name twice)")
    if not names:
        raise unwanted(f"{_HOSTLIST} (it has no name)")
    return text


Hostlist = Annotated[
    str, Field(min_length=1), AfterValidator(_check_hostlist), _wanted(_HOSTLIST, quote=True)
]


def _parse_network(value: object) -> object:
    words = "a network as address/bits, as 10.0.0.0/24"
    if isinstance(value, IPv4Network | IPv6Network):
        return value
    if not isinstance(value, str) or "/" not in value:
        raise unwanted(words)
    try:
        return ip_network(value)
    except ValueError as error:
        try:
            meant = ip_interface(value).network
        except ValueError:
            raise unwanted(words) from error
        raise unwanted(f"a network, which for this address is {meant}") from error


Network = Annotated[
    IPv4Network | IPv6Network,
    BeforeValidator(_parse_network),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^[0-9A-Fa-f.:]+/[0-9]{1,3}$"}, mode="validation"),
]

_NodesWritten = Annotated[
    Annotated[int, Strict(), Field(ge=1)]
    | Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}(:[1-9][0-9]{0,5})?$")],
    _wanted("how many nodes, as 4, or the fewest and most, as 2:4"),
]


@dataclass(frozen=True)
class Nodes:
    """The fewest and the most nodes a job runs on, written ``2:4``, or ``4`` if both are the same."""

    min: int
    max: int

    def __str__(self) -> str:
        return f"{self.min}:{self.max}" if self.min < self.max else str(self.max)

    @classmethod
    def parse(cls, written: int | str) -> "Nodes":
        """Parse ``4``, ``"4"`` or ``"2:4"``."""
        low, _, high = str(written).partition(":")
        nodes = cls(int(low), int(high or low))
        if nodes.min > nodes.max:
            raise unwanted(f"the smaller number first, as {nodes.max}:{nodes.min}")
        return nodes

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Have pydantic read and write the form that users write, also in the JSON Schema."""
        written = core_schema.no_info_after_validator_function(
            cls.parse, handler.generate_schema(_NodesWritten)
        )
        return core_schema.no_info_wrap_validator_function(
            lambda value, inner: value if isinstance(value, cls) else inner(value),
            written,
            serialization=core_schema.to_string_ser_schema(),
        )


def size_bytes(written: str) -> int:
    """Convert a `Size` to bytes: ``1GB`` is 10^9, ``1GiB`` 2^30."""
    number, unit = re.fullmatch(r"([0-9.]+)\s?(\w+)", written).groups()  # type: ignore[union-attr]  # it is a Size
    return int(float(number) * (1024 if "i" in unit else 1000) ** " KMGT".index(unit[0]))


def run_time_minutes(written: int | str) -> int:
    """Convert a `RunTime` to whole minutes, rounded up."""
    if isinstance(written, int):
        return written
    days, hours, minutes, seconds = map(
        int, re.findall(r"\d+", written if "-" in written else f"0-{written}")
    )
    return days * 1440 + hours * 60 + minutes + (seconds > 0)
