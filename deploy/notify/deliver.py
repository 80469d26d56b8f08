"""Delivers a message, once, to a webhook or a command; what goes wrong is told without what is secret."""

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
_TRY_AGAIN = (408, 429)  # other refusals are for good


class NotDelivered(Exception):
    """A message did not get there; the text says why, without a secret.

    Attributes:
        is_final: trying again would not help.
        said: what a command wrote on stderr, which may be anything, and is shown to a user only.
    """

    def __init__(self, why: str, *, is_final: bool = False, said: str = "") -> None:
        super().__init__(why)
        self.is_final = is_final
        self.said = said


def post(
    hook: Webhook, secrets: Mapping[str, str], message: Message, *, timeout_s: float = ATTEMPT_S
) -> None:
    """Send a message to a webhook, once; `secrets` has the values of those it names.

    Raises:
        NotDelivered: it did not take it.
    """
    import urllib.error  # slow to import, and most runs tell nobody
    import urllib.request

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        """A redirect would take headers that are secret to another host, and make a GET of the POST."""

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
        # Only the kind of error and its number: an address that is secret may stand in the text.
        reason = getattr(error, "reason", error)
        why = (reason.strerror if isinstance(reason, OSError) else "") or type(reason).__name__
        raise NotDelivered(f"{where}: {why}") from None
    except (
        Exception
    ) as error:  # what a value that is no URL, or no header, or an odd answer raises is not shown
        raise NotDelivered(
            f"{where}: {type(error).__name__}: is what {' and '.join(names) or 'url'} holds right?",
            is_final=True,
        ) from None


def run_command(
    argv: tuple[str, ...], message: Message, *, folder: Path | None, timeout_s: float = ATTEMPT_S
) -> None:
    """Run a command with a message on its stdin, in `folder` where that is there.

    Raises:
        NotDelivered: it is not there, failed, or took too long and was ended with all it started.
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
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            raise NotDelivered(f"{name} took longer than {timeout_s:g} s", is_final=True) from None
    if process.returncode:
        said = told.decode("utf-8", "replace").strip()
        raise NotDelivered(f"{name} ended with exit status {process.returncode}", is_final=True, said=said)


def ways(
    notify: Notify, secrets: Mapping[str, str], folder: Path | None
) -> dict[str, Callable[[Message], object]]:
    """What delivers a message: ``command`` and ``webhook``, as far as they are asked for."""
    found: dict[str, Callable[[Message], object]] = {}
    if notify.command:
        found["command"] = functools.partial(run_command, notify.command, folder=folder)
    if notify.webhook:
        found["webhook"] = functools.partial(post, notify.webhook, secrets)
    return found


def within(deliver: Callable[[Message], object], message: Message, timeout_s: float) -> None:
    """Deliver a message, or give up after a while, whatever it waits for.

    Raises:
        NotDelivered: it did not get there.
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
