"""The keys to log in with: identity files, encrypted ones among them, and the keys of an SSH agent."""

from __future__ import annotations

import base64
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nodekit.inventory.errors import KitError

if TYPE_CHECKING:
    import paramiko

DEFAULT_FILES = ("id_ed25519", "id_ecdsa", "id_rsa")  # in ~/.ssh, the fastest to use first
_ATTEMPTS = 3


class IdentityError(KitError):
    """An identity file cannot be used; the message says which file, why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One key to try."""

    label: str
    """The key's description, for messages."""
    file: Path | None
    """The file from which the system's ssh client can read it; None for an agent's key without such a file."""
    asked: bool
    """Whether it is encrypted, so that the user has to be asked for its passphrase."""
    load: Callable[[], paramiko.PKey]


class KeyFiles:
    """A cache of private keys: each identity file is read, and its passphrase asked for, once for all hosts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unlocked: dict[tuple[str, int], paramiko.PKey] = {}

    def unlock(self, file: Path, ask: Callable[[str], str] | None) -> paramiko.PKey:
        """Return the private key in `file`.

        Raises:
            IdentityError: the file is unreadable, or its passphrase is not known.
        """
        with self._lock:  # threads of other hosts wait here while the user is asked
            try:
                name = (str(file), file.stat().st_mtime_ns)
                if name not in self._unlocked:
                    self._unlocked[name] = self._read(file, ask)
            except OSError as error:
                raise IdentityError(f"identity file {file}: {error.strerror}") from error
            return self._unlocked[name]

    def _read(self, file: Path, ask: Callable[[str], str] | None) -> paramiko.PKey:
        import paramiko
        from paramiko.pkey import UnknownKeyType

        if _public_half(file.read_text(encoding="ascii", errors="replace")) is None:
            check_file(file)
        encrypted, _ = peek(file)
        nobody = IdentityError(
            f"identity file {file} is encrypted and there is nobody to ask for its passphrase (kit up -d, and what it "
            "leaves in the background, asks for none)",
            cure=f"give it to your agent first: `ssh-add {file}`; or take a key without a passphrase",
        )
        if encrypted and ask is None:
            raise nobody
        for _ in range(_ATTEMPTS):
            try:
                passphrase = ask(str(file)) if encrypted and ask is not None else None
            except EOFError:  # there is no terminal
                raise nobody from None
            try:
                return paramiko.PKey.from_path(file, passphrase.encode() if passphrase else None)  # type: ignore[arg-type]
            except (ValueError, TypeError, paramiko.SSHException, UnknownKeyType) as error:
                if not encrypted:
                    raise IdentityError(
                        f"identity file {file} is not a private key that kit can read"
                    ) from error
        raise IdentityError(f"identity file {file}: {_ATTEMPTS} wrong passphrases")


def peek(file: Path) -> tuple[bool, bytes | None]:
    """Return whether an identity file is encrypted, and its public key; None if that needs the passphrase."""
    import paramiko

    text = file.read_text(encoding="ascii", errors="replace")
    if "BEGIN OPENSSH PRIVATE KEY" not in text:
        return "ENCRYPTED" in text, _public_half(text) or _public_half_beside(file)
    try:
        data = base64.b64decode("".join(line for line in text.splitlines() if not line.startswith("-----")))
        message = paramiko.Message(data[len(b"openssh-key-v1\0") :])
        cipher = message.get_text()
        for _ in range(2):
            message.get_string()  # the key derivation and its options
        message.get_int()
        return cipher != "none", message.get_string()
    except ValueError as error:
        raise IdentityError(f"identity file {file} is damaged: {error}") from error


def _public_half(text: str) -> bytes | None:
    """Return the key from the text of a public key file; None if the text is none."""
    kind, key, *_ = (*text.split(maxsplit=2), "", "")
    try:
        blob = base64.b64decode(key, validate=True)
    except ValueError:
        return None
    return blob if kind and blob[4 : 4 + len(kind)] == kind.encode() else None


def _public_half_beside(file: Path) -> bytes | None:
    """Return the key from the ``.pub`` file beside a private key; ssh, too, finds the agent's key by it."""
    try:
        return _public_half(file.with_name(f"{file.name}.pub").read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None


def check_file(file: Path) -> None:
    """Refuse an identity file that is missing, or that ssh would refuse.

    Raises:
        IdentityError: has the command that repairs it.
    """
    try:
        found = file.stat()
    except OSError as error:
        raise IdentityError(
            f"identity file {file}: {error.strerror}",
            cure=f"correct `identity_file`, or make one with `ssh-keygen -t ed25519 -f {file}`",
        ) from error
    if not stat.S_ISREG(found.st_mode):
        raise IdentityError(f"identity file {file} is not a file")
    if found.st_uid == os.getuid() and found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise IdentityError(
            f"identity file {file} is open to others (mode {mode:04o}), so ssh refuses it",
            cure=f"`chmod 600 {file}`",
        )
    if not os.access(file, os.R_OK):
        raise IdentityError(
            f"identity file {file} is not readable for you", cure=f"`chmod 600 {file}` as its owner"
        )


def candidates(
    *,
    named: Sequence[Path],
    only_named: bool,
    agent_keys: Sequence[paramiko.AgentKey],
    home: Path,
    keys: KeyFiles,
    ask: Callable[[str], str] | None,
) -> Iterator[Candidate]:
    """Yield the keys to try, in order. The order matters: servers allow few tries, and each costs a round trip.

    First come the keys named for the host (from the agent, if it has them), then the agent's other keys, then the
    default files, encrypted ones last, so that the user is not asked for the passphrase of a key that is not needed.

    Args:
        named: identity files named for the host.
        only_named: whether to leave out the agent's other keys (IdentitiesOnly).
        agent_keys: the keys that the agent holds.
        home: the user's home folder.
        keys: reads the files.
        ask: asks the user for a file's passphrase; None if there is no user to ask.
    """
    defaults = [home / ".ssh" / name for name in DEFAULT_FILES] if not named else []
    files = [*named, *(file for file in defaults if file.is_file())]
    agents = {key.asbytes(): key for key in agent_keys}
    late: list[Candidate] = []
    used: set[bytes] = set()
    for file in files:
        try:
            encrypted, public = peek(file)
        except (OSError, IdentityError):  # raised again by `load`, if the key is tried
            encrypted, public = False, None
        if public in agents:
            if public is not None and public not in used:
                used.add(public)
                yield _of_agent(agents[public], f"{file}, through the agent", file)
            continue
        candidate = Candidate(
            label=str(file),
            file=file,
            asked=encrypted,
            load=lambda file=file: keys.unlock(file, ask),  # type: ignore[misc]  # a default argument binds it
        )
        if file in named:
            yield candidate
        else:
            late.append(candidate)
    if not only_named:
        for blob, key in agents.items():
            if blob not in used:
                yield _of_agent(key, f"the agent's {key.comment or key.get_name()}", None)
    # Without a user to ask, try encrypted files only if there is no other key: their error then says why login fails.
    unlocked = [candidate for candidate in late if not candidate.asked]
    yield from unlocked if ask is None and (unlocked or agents) else sorted(late, key=lambda each: each.asked)


def _of_agent(key: paramiko.AgentKey, label: str, file: Path | None) -> Candidate:
    return Candidate(label=label, file=file, asked=False, load=lambda: key)
