"""``--init-method``: the rendezvous of the ranks, at an address of rank 0 or by a file that all ranks see."""

import os
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:  # --help needs no torch
    from torch.distributed.distributed_c10d import Store

_WANTED = "env://, tcp://HOST:PORT or file:///PATH was wanted"
_EVERY_S = 0.05
_WINDOWS_PATH = re.compile(r"/[A-Za-z]:[/\\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class InitMethod:
    """The parsed URL of ``--init-method``."""

    scheme: str
    """``env``, ``tcp`` or ``file``."""
    host: str = ""
    """For ``tcp``: rank 0's host."""
    port: int = 0
    """For ``tcp``: 1 to 65535, free on that host."""
    path: str = ""
    """For ``file``: an absolute path; its folder must exist, the file need not."""

    @classmethod
    def parse(cls, url: str, *, is_windows: bool = os.name == "nt") -> "InitMethod":
        """Parse the URL.

        Raises:
            ValueError: the URL has none of the three forms.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{url!r}: {error}; {_WANTED}") from None
        if parts.scheme == "env" and url == "env://":
            return cls(scheme="env")
        if parts.query or parts.fragment:
            raise ValueError(f"{url!r} has a '?' or '#', which a path has as %3F or %23; {_WANTED}")
        if parts.scheme == "tcp":
            if not (parts.hostname and port and not parts.path.strip("/")):
                raise ValueError(f"{url!r} has no host and port; {_WANTED}")
            return cls(scheme="tcp", host=parts.hostname, port=port)
        if parts.scheme == "file":
            path, form = unquote(parts.path), "file:///C:/PATH" if is_windows else "file:///PATH"
            is_absolute = _WINDOWS_PATH.match(path) if is_windows else path.startswith("/")
            if parts.netloc or not is_absolute or path.endswith("/"):
                raise ValueError(f"{url!r} names no file by its absolute path, as {form} does; {_WANTED}")
            return cls(scheme="file", path=path[1:] if is_windows else "/" + path.lstrip("/"))
        raise ValueError(f"{url!r} is no such URL; {_WANTED}")

    def check(self) -> None:
        """Check that the file can be created: otherwise torch would wait for it forever, whatever the timeout.

        Raises:
            ValueError: the file's folder is missing or not writable, or the path is a folder itself.
        """
        if self.scheme != "file":
            return
        path = Path(self.path)
        if not path.parent.is_dir():
            raise ValueError(
                f"--init-method: there is no folder {path.parent} for {path.name}: make it first"
            )
        if path.is_dir():
            raise ValueError(f"--init-method: {path} is a folder: name a file in it, which need not be there")
        if not os.access(path.parent, os.W_OK):
            raise ValueError(f"--init-method: {path.parent} cannot be written to: take another folder")

    def store(self, *, rank: int, world_size: int, timeout_s: float) -> "Store | None":
        """Return the store by which the ranks exchange their addresses; None if torch is to create it.

        Raises:
            TimeoutError: a rank has not arrived in time.
        """
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        timeout = timedelta(seconds=timeout_s)
        if self.scheme == "tcp":
            # Not by torch's rendezvous: under torchrun, it takes the address for that of torchrun's store.
            return dist.TCPStore(self.host, self.port, world_size, is_master=rank == 0, timeout=timeout)  # type: ignore[attr-defined]  # no stub
        if self.scheme == "file":
            store = _file_store(Path(self.path), rank, world_size, time.monotonic() + timeout_s)
            store.set_timeout(timeout)
            return store
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun keeps its store across restarts, with the addresses of the previous ranks (torch 2.13).
            store = next(rendezvous("env://", rank, world_size, timeout=timeout))[0]
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            return dist.PrefixStore(f"nodekit-{attempt}", store)  # type: ignore[attr-defined]  # no stub
        return None

    def remove(self) -> None:
        """Remove the file of this run or an earlier one; no rank may be using it."""
        if self.scheme == "file":
            with suppress(OSError):  # the next run removes it
                Path(self.path).unlink(missing_ok=True)
                _heartbeat(Path(self.path)).unlink(missing_ok=True)


def _file_store(path: Path, rank: int, world_size: int, deadline_s: float) -> "Store":
    """Return a store in a new file, whatever files earlier runs have left there.

    In the file of an earlier run, ranks would find stale addresses. So rank 0 removes that file, and then keeps
    changing a second file beside it until all ranks have arrived. The others open the store when they have seen the
    second file change, since only a running rank 0 changes it.
    """
    import torch.distributed as dist

    heartbeat = _heartbeat(path)
    if rank == 0:
        path.unlink(missing_ok=True)
    else:
        first = _read(heartbeat)
        while _read(heartbeat) == first:
            _wait(deadline_s, f"rank 0 has not come to {path}")
    store = dist.FileStore(str(path), world_size)  # type: ignore[attr-defined]  # no stub
    keys = [f"nodekit/rank{each}" for each in range(world_size)]
    store.set(keys[rank], "")
    if rank == 0:
        while missing := [str(each) for each in range(1, world_size) if not store.check([keys[each]])]:
            with suppress(PermissionError):  # on Windows, while another rank has it open
                heartbeat.write_text(secrets.token_hex(8), encoding="ascii")
            _wait(deadline_s, f"rank {', '.join(missing)} of {world_size} ranks has not come to {path}")
        with suppress(PermissionError):
            heartbeat.unlink(missing_ok=True)
    return store


def _heartbeat(path: Path) -> Path:
    return path.with_name(f"{path.name}.beat")


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:  # not there yet
        return None


def _wait(deadline_s: float, why: str) -> None:
    if time.monotonic() > deadline_s:
        raise TimeoutError(f"--init-method: {why} in time (--timeout)")
    time.sleep(_EVERY_S)
