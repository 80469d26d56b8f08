"""Send missing files to a host's cache: by rsync over the system's ssh, by SFTP, or by a plain copy."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nodekit.deploy.connect.channel import QUIET_SHELL
from nodekit.deploy.sync.listing import Entry, Tree
from nodekit.inventory.errors import HostError, KitError

if TYPE_CHECKING:
    from nodekit.deploy.connect.ssh import SshConnection

PACK_BYTES = 8 << 20  # smaller files share a pack of about this size; larger ones are sent alone
_COPY_FILES = 500  # files per call, so that progress is visible
# rsync's exit codes after which SFTP may work; 255 is ssh's, which may refuse a configuration that paramiko accepts.
_UNUSABLE = (1, 2, 3, 4, 5, 6, 14, 127, 255)
_FULL = ("No space left on device", "Disk quota exceeded")


class HostChannel(Protocol):
    """The part of a channel (`deploy/connect/channel.py`) that sync uses."""

    @property
    def host(self) -> str: ...  # noqa: D102
    @property
    def connection(self) -> SshConnection | None: ...  # noqa: D102
    @property
    def printed(self) -> str: ...  # noqa: D102
    def call(self, op: str, *, timeout_s: float, **args: Any) -> Any: ...  # noqa: D102


class SourceChanged(KitError):
    """A file of the user's has changed since the tree was listed."""

    def __init__(self, paths: Sequence[str]) -> None:
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        super().__init__(
            f"{paths[0]}{more} changed while the code was being sent, twice; stop what writes it, or leave "
            "it out by a line in .kitignore"
        )


def seconds_left(host: str, deadline: float) -> float:
    """Return the seconds until a deadline by `time.monotonic`; raise HostError if it has passed."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise HostError(host, "the code could not be sent in time", cure="is the network slow?")
    return left_s


class _UnusableError(Exception):
    """This way of sending is not available."""


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """Files of a tree to send to one host, and the deadline."""

    channel: HostChannel
    tree: Tree
    entries: Sequence[Entry]
    cache: str
    """Absolute path on the host."""
    host_has_rsync: bool
    deadline: float
    """By `time.monotonic`."""
    report: Callable[[int, int], None]
    """Called with the files and bytes done."""
    whole: bool = False
    """Whether to ignore partial files on the host."""

    def left_s(self) -> float:
        """Return the seconds until the deadline; raise HostError if it has passed."""
        return seconds_left(self.channel.host, self.deadline)

    def disk_full(self) -> HostError:
        """Return the error for a host whose disk is full."""
        size = sum(entry.size for entry in self.entries)
        return HostError(
            self.channel.host,
            f"its disk is full: {size / 1e6:.1f} MB of code did not fit into {self.cache}",
            cure="make room there, or leave big files out by a line in .kitignore",
        )


def bring(delivery: Delivery) -> None:
    """Send the files by the fastest available way; the host verifies them later.

    Raises:
        SourceChanged: a file has changed since the tree was listed.
        HostError: the host has no space, the connection is lost, or the deadline has passed.
    """
    connection = delivery.channel.connection
    try:
        if connection is None:
            _copy(delivery)
            return
        rsh = connection.rsync_rsh() if delivery.host_has_rsync and shutil.which("rsync") else None
        if rsh is not None:
            try:
                _rsync(delivery, rsh)
                return
            except _UnusableError:
                pass
        _sftp(delivery, connection)
    except (HostError, OSError) as error:
        if changed := delivery.tree.changed(entry.path for entry in delivery.entries):
            raise SourceChanged(changed) from error
        raise


def _copy(delivery: Delivery) -> None:
    files = bytes_done = 0
    for start in range(0, len(delivery.entries), _COPY_FILES):
        batch = delivery.entries[start : start + _COPY_FILES]
        delivery.channel.call(
            "tree.fetch",
            timeout_s=delivery.left_s(),
            cache=delivery.cache,
            source=str(delivery.tree.root),
            rows=batch,
        )
        files += len(batch)
        bytes_done += sum(entry.size for entry in batch)
        delivery.report(files, bytes_done)


# --- rsync --------------------------------------------------------------------------------------------------


def rsync_argv(rsh: Sequence[str], root: str, cache: str, *, whole: bool) -> list[str]:
    """Return the command that sends files from `root` to `cache`, with NUL-terminated names on its stdin."""
    return [
        "rsync",
        "--files-from=-",
        "--from0",
        "--times",
        "--ignore-times",  # each file is known to be missing or different
        "--inplace",  # the cache is private and verified afterwards, so that no rename is needed
        "--secluded-args",  # no shell on the host sees a name
        "--no-human-readable",
        "--info=progress2",
        "--outbuf=Line",
        *(["--whole-file"] if whole else []),
        f"--rsh={rsh_option(rsh)}",
        f"{root}/",
        f"host:{cache}/",
    ]


def rsh_option(argv: Sequence[str]) -> str:
    """Return an argv as the value of rsync's ``--rsh``, which supports quotes but no backslashes."""
    return " ".join("'" + word.replace("'", "''") + "'" for word in argv)


def _rsync(delivery: Delivery, rsh: Sequence[str]) -> None:
    argv = rsync_argv(rsh, str(delivery.tree.root), delivery.cache, whole=delivery.whole)
    if shutil.which("setpriv"):
        argv = ["setpriv", "--pdeathsig", "TERM", *argv]  # rsync must end if kit is killed
    with tempfile.TemporaryFile() as names, tempfile.TemporaryFile() as stderr:
        # With ./ since rsync takes a line that begins with # or ; for a comment.
        for entry in delivery.entries:
            names.write(b"./" + entry.path.encode("utf-8", "surrogateescape") + b"\0")
        names.seek(0)
        with subprocess.Popen(argv, stdin=names, stdout=subprocess.PIPE, stderr=stderr) as rsync:
            try:
                _watch(rsync, delivery)
            finally:
                if rsync.poll() is None:
                    rsync.terminate()
        stderr.seek(0)
        said = stderr.read().decode("utf-8", "replace").strip()
    if rsync.returncode == 0:
        return
    if any(words in said for words in _FULL):
        raise delivery.disk_full()
    if rsync.returncode in _UNUSABLE or "command not found" in said:
        raise _UnusableError(said)
    last = said.splitlines()[0] if said else f"exit {rsync.returncode}"
    if rsync.returncode in (10, 12, 30, 35):
        raise HostError(delivery.channel.host, f"the connection was lost while sending the code ({last})")
    raise HostError(delivery.channel.host, f"rsync could not send the code ({last})")


_PROGRESS = re.compile(rb"\s*([\d,.]+)\s+\d+%.*?(?:xfr#(\d+))?[^#]*$")


def _watch(rsync: subprocess.Popen[bytes], delivery: Delivery) -> None:
    """Report rsync's progress until it ends or the deadline passes."""
    import os
    import select

    assert rsync.stdout is not None
    files = 0
    while True:
        ready, _, _ = select.select([rsync.stdout], [], [], delivery.left_s())
        if not ready:
            continue
        data = os.read(rsync.stdout.fileno(), 1 << 16)
        if not data:
            rsync.wait(delivery.left_s())
            return
        found = _PROGRESS.match(data.replace(b"\r", b"\n").strip().rpartition(b"\n")[2])
        if found:
            files = int(found.group(2) or files)
            delivery.report(files, int(re.sub(rb"\D", b"", found.group(1))))


# --- SFTP ---------------------------------------------------------------------------------------------------


def packs(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Divide files into packs: large ones alone, the others together up to `PACK_BYTES`."""
    found: list[list[Entry]] = [[]]
    room = PACK_BYTES
    for entry in entries:
        if entry.size >= PACK_BYTES:
            found.insert(0, [entry])
            continue
        if entry.size > room and found[-1]:
            found.append([])
            room = PACK_BYTES
        found[-1].append(entry)
        room -= entry.size
    return [pack for pack in found if pack]


def _sftp(delivery: Delivery, connection: SshConnection) -> None:
    import paramiko

    try:
        sftp = connection.sftp()
    except HostError as error:
        # Text that the login shell prints breaks rsync, and an SFTP server that is started by that shell.
        if printed := delivery.channel.printed:
            found = (
                f"its login shell prints '{printed}' before a command, so that neither rsync nor SFTP works"
            )
            raise HostError(delivery.channel.host, found, cure=QUIET_SHELL) from error
        raise
    files = bytes_done = 0
    incoming = delivery.cache + ".incoming"
    try:
        session = sftp.get_channel()
        assert session is not None
        session.settimeout(delivery.left_s())
        try:
            sftp.mkdir(incoming, 0o700)
        except OSError:
            sftp.stat(incoming)  # the folder exists; otherwise this raises the reason
        for number, pack in enumerate(packs(delivery.entries)):
            with sftp.open(f"{incoming}/{number}", "wb") as out:
                out.set_pipelined(True)
                alone = len(pack) == 1 and pack[0].size >= PACK_BYTES
                if not alone:
                    out.write(_pack_head(delivery.tree, pack))
                for entry in pack:
                    bytes_done = _put(delivery, entry, out, files, bytes_done)
                    files += 1
            args: dict[str, Any] = {"name": str(number)}
            if alone:
                args |= {"row": pack[0], "mtime_ns": delivery.tree.stats[pack[0].path][1]}
            delivery.channel.call("tree.unpack", timeout_s=delivery.left_s(), cache=delivery.cache, **args)
            delivery.report(files, bytes_done)
    except TimeoutError as error:
        delivery.left_s()
        raise HostError(delivery.channel.host, "the host takes no more of the code") from error
    except (paramiko.SSHException, EOFError) as error:
        raise HostError(
            delivery.channel.host, f"the connection was lost while the code was being sent ({error})"
        ) from error
    except OSError as error:
        # SFTP has one error, "Failure", for a full disk and for other problems.
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or str(error) in ("Failure", "[Errno None] Failure"):
            raise delivery.disk_full() from error
        raise
    finally:
        sftp.close()


def _pack_head(tree: Tree, pack: Sequence[Entry]) -> bytes:
    rows = [[entry.path, entry.executable, tree.stats[entry.path][1], entry.size] for entry in pack]
    head = json.dumps(rows).encode("ascii")
    return len(head).to_bytes(8, "big") + head


def _put(delivery: Delivery, entry: Entry, out: Any, files: int, bytes_done: int) -> int:
    sent = 0
    with (delivery.tree.root / entry.path).open("rb") as file:
        while data := file.read(1 << 15 if entry.size < 1 << 20 else 1 << 18):
            out.write(data)
            sent += len(data)
            delivery.left_s()
            if sent > entry.size:
                break
            if entry.size > 1 << 20:
                delivery.report(files, bytes_done + sent)
    if sent != entry.size:
        raise SourceChanged([entry.path])
    return bytes_done + sent
