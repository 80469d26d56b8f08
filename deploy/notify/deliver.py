"""Delivers one message to a webhook or a command; errors contain no secrets."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nodekit.deploy.notify.message import Message

if TYPE_CHECKING:
    from nodekit.inventory.schema import Notify, Webhook

ATTEMPT_S = 10.0
_TRY_AGAIN = (408, 429)  # HTTP statuses of temporary refusals; other 3xx and 4xx are permanent


class NotDelivered(Exception):
    """A message was not delivered; the text says why, without secrets.

    Attributes:
        is_final: whether another attempt would fail too.
        said: the command's stderr; it may contain secrets, so it is shown only to the user.
    """

    def __init__(self, why: str, *, is_final: bool = False, said: str = "") -> None:
        super().__init__(why)
        self.is_final = is_final
        self.said = said


def post(
    hook: Webhook, secrets: Mapping[str, str], message: Message, *, timeout_s: float = ATTEMPT_S
) -> None:
    """Send a message to a webhook, in one attempt; `secrets` has the values of the variables that `hook` names.

    Raises:
        NotDelivered: the webhook did not accept it.
    """
    import urllib.error  # slow to import, and most runs do not use it
    import urllib.request

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        """Refuse redirects: they would send secret headers to another host, and turn the POST into a GET."""

        def redirect_request(self, *_: Any, **__: Any) -> None:
            return None

    where = "the webhook" if hook.url is None else hook.url.split("/")[2]
    names = [name for name in (hook.url_from, *hook.headers_from.values()) if name]
    if absent := [name for name in names if not secrets.get(name)]:
        raise NotDelivered(f"{', '.join(absent)} is not set where the run is supervised", is_final=True)
    url = hook.url or secrets[str(hook.url_from)]
    headers = {name: secrets[value] for name, value in hook.headers_from.items()}
    try:
        if not url.startswith(("https://", "http://")):
            raise ValueError
        headers = {"Content-Type": "application/json", "User-Agent": "nodekit", **headers}
        request = urllib.request.Request(url, message.body(), headers, method="POST")  # noqa: S310  # checked above
        opener = urllib.request.build_opener(NoRedirect)
        with opener.open(request, timeout=timeout_s):
            pass
    except urllib.error.HTTPError as error:
        error.close()
        is_final = 300 <= error.code < 500 and error.code not in _TRY_AGAIN
        raise NotDelivered(f"{where} answers HTTP {error.code}", is_final=is_final) from None
    except (OSError, urllib.error.URLError) as error:
        # Report only the kind of error and its number: the text may contain a secret address.
        reason = getattr(error, "reason", error)
        why = (reason.strerror if isinstance(reason, OSError) else "") or type(reason).__name__
        raise NotDelivered(f"{where}: {why}") from None
    # What a value that is no URL, or no header, or an odd answer raises is not shown.
    except Exception as error:
        raise NotDelivered(
            f"{where}: {type(error).__name__}: is what {' and '.join(names) or 'url'} holds right?",
            is_final=True,
        ) from None


def run_command(
    argv: tuple[str, ...], message: Message, *, folder: Path | None, timeout_s: float = ATTEMPT_S
) -> None:
    """Run a command with a message on its stdin, in `folder` if that exists.

    Raises:
        NotDelivered: the command cannot be run, fails, or takes too long and is killed with its children.
    """
    name = Path(argv[0]).name
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **message.env()},
            cwd=folder if folder and folder.is_dir() else None,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise NotDelivered(f"{name} cannot be run: {why}", is_final=True) from None
    with process:
        try:
            _, told = process.communicate(message.body(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # its children too
            raise NotDelivered(f"{name} took longer than {timeout_s:g} s", is_final=True) from None
    if process.returncode:
        said = told.decode("utf-8", "replace").strip()
        raise NotDelivered(f"{name} ended with exit status {process.returncode}", is_final=True, said=said)


def ways(
    notify: Notify, secrets: Mapping[str, str], folder: Path | None
) -> dict[str, Callable[[Message], object]]:
    """Return name → function that delivers a message; ``command`` and ``webhook``, if the inventory asks for them."""
    found: dict[str, Callable[[Message], object]] = {}
    if notify.command:
        found["command"] = functools.partial(run_command, notify.command, folder=folder)
    if notify.webhook:
        found["webhook"] = functools.partial(post, notify.webhook, secrets)
    return found


def within(deliver: Callable[[Message], object], message: Message, timeout_s: float) -> None:
    """Deliver a message, or give up after `timeout_s`, whatever the delivery waits for.

    Raises:
        NotDelivered: the delivery failed, or took too long.
    """
    result: list[NotDelivered | None] = []

    def attempt() -> None:
        try:
            deliver(message)
            result.append(None)
        except NotDelivered as error:
            result.append(error)

    thread = threading.Thread(target=attempt, name="notify-attempt", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not result:
        raise NotDelivered(f"no answer within {timeout_s:g} s")
    if (error := result[0]) is not None:
        raise error
