"""TensorBoard for `kit board`: here, from a copy of the runs' event files, or on a node, through a tunnel."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nodekit.deploy.board.board_sync import Mirror
from nodekit.deploy.connect.channel import (
    CALL_TIMEOUT_S,
    ChannelLost,
    HostChannel,
    RemoteError,
    on_all,
    open_local,
)
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.connect.tunnel import Tunnel
from nodekit.deploy.host.files import make_private
from nodekit.deploy.records import find_runs, record_files
from nodekit.deploy.records.runs import Run
from nodekit.inventory.errors import HostError, KitError

PORT = 6006
SYNC_EVERY_S = 3.0
READY_TIMEOUT_S = 90.0
_LIMIT_S = 365 * 86_400.0
_HERE = "this machine"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `kit board`."""

    run_ids: tuple[str, ...] = ()
    port: int | None = None
    on: str | None = None
    ssh: SshOptions = field(default_factory=SshOptions)


def board(options: Options) -> int:
    """Show the curves until Ctrl-C; return the exit status."""
    from nodekit.deploy.output.interrupts import sigterm_interrupts

    chosen = find(options.run_ids)
    port = free_port(options.port)
    mirrors = [Mirror(run, options.ssh) for run in chosen]
    try:
        with contextlib.ExitStack() as stack, sigterm_interrupts():
            for mirror in mirrors:
                stack.callback(mirror.close)
            if options.on is None and importlib.util.find_spec("tensorboard") is not None:
                _here(stack, mirrors, port)
            else:
                _there(stack, mirrors, options.on, port)
    except KeyboardInterrupt:
        print("kit board: ended, here and on the hosts", file=sys.stderr)
    return 0


def find(run_ids: Sequence[str]) -> list[Run]:
    """Return the runs with these ids, each once; a sweep's id stands for all of its runs.

    Raises:
        KitError: there is no such run.
    """
    found: dict[str, Run] = {}
    for run_id in run_ids or (None,):
        for run in find_runs.sweep(run_id) or [find_runs.find(run_id)]:
            found[run.run_id] = run
    return list(found.values())


def free_port(asked: int | None) -> int:
    """Return the port that is asked for, or else TensorBoard's default, or else any free one.

    Raises:
        KitError: the port that is asked for is taken.
    """
    if asked is not None and not 1 <= asked <= 65535:
        raise KitError(f"kit board --port {asked}: a port is a number from 1 to 65535")
    for port in [PORT, 0] if asked is None else [asked]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if asked is None:
                    continue
                raise KitError(
                    f"kit board --port {asked}: {error.strerror}",
                    cure="leave the option out to have a free one",
                ) from error
            return int(probe.getsockname()[1])
    raise KitError("no port of 127.0.0.1 is free")


def argv(python: str, logdir: Sequence[str], port: int) -> list[str]:
    """Return the command that starts TensorBoard on a machine's loopback address; pure."""
    # Its fast loader would show points of steps that a resumed run has repeated.
    more = ["--host", "127.0.0.1", "--port", str(port), "--reload_interval", "3", "--load_fast", "false"]
    return [python, "-m", "tensorboard.main", *logdir, *more]


# --- on this machine ----------------------------------------------------------------------------------------


def _here(stack: contextlib.ExitStack, mirrors: Sequence[Mirror], port: int) -> None:
    on_all({mirror.run.run_id: mirror for mirror in mirrors}, Mirror.sync)
    lines = {mirror.run.run_id: line(mirror) for mirror in mirrors}
    for said in lines.values():
        print(said, flush=True)
    if all(mirror.is_over and mirror.node is None for mirror in mirrors):
        raise _none(mirrors, "no curves")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nodekit-board-")))
    for mirror in mirrors:
        with record_files.told(mirror.folder):
            make_private(mirror.folder)
        (folder / mirror.run.run_id).symlink_to(mirror.folder)
    channel = open_local(_HERE, sys.executable)
    stack.callback(channel.close)
    server = _Server(channel, argv(sys.executable, ["--logdir", str(folder)], port))
    server.wait(port)
    _say_address(port, mirrors)
    while True:
        if server.ended.wait(SYNC_EVERY_S):
            raise server.problem()
        going = [mirror for mirror in mirrors if not mirror.is_over]
        on_all({mirror.run.run_id: mirror for mirror in going}, Mirror.sync)
        for mirror in going:
            said = line(mirror)
            if said != lines[mirror.run.run_id]:
                lines[mirror.run.run_id] = said
                print(said, flush=True)
            if mirror.is_over:
                mirror.close()


def line(mirror: Mirror) -> str:
    """Return a line that says from which node a run's curves are, and why there are no newer ones; pure."""
    why = "".join(f"\n  {problem}" for problem in mirror.problems.values())
    run = mirror.run
    if mirror.node is None or mirror.synced is None:
        return f"{run.run_id}  no curves yet ({run.state}){why}"
    if mirror.node in mirror.problems or not mirror.channels:
        when = time.strftime("%m-%d %H:%M", time.localtime(mirror.synced))
        return f"{run.run_id}  from {mirror.node}, as of {when}: nothing newer can be had{why}"
    state = "over" if mirror.is_over else f"every {SYNC_EVERY_S:.0f} s"
    return f"{run.run_id}  from {mirror.node} ({state}){why}"


def _none(mirrors: Sequence[Mirror], what: str, *cures: str) -> KitError:
    looked = [f"{name}:{place}" for mirror in mirrors for name, place in mirror.places.items()]
    return KitError(
        f"{what}: no event files in {', '.join(looked) or 'any folder'}",
        cure="; ".join(
            ["write them into $NODEKIT_OUTPUT_DIR from rank 0, as SummaryWriter does", *filter(None, cures)]
        ),
    )


def _say_address(port: int, mirrors: Sequence[Mirror]) -> None:
    num = len(mirrors)
    print(f"http://127.0.0.1:{port}/  ({num} run{'s' if num > 1 else ''}; Ctrl-C ends it)", flush=True)


# --- on a node ----------------------------------------------------------------------------------------------


def _there(stack: contextlib.ExitStack, mirrors: Sequence[Mirror], on: str | None, port: int) -> None:
    cure = "" if on else "or install tensorboard here: pip install tensorboard"
    results = on_all({mirror.run.run_id: mirror for mirror in mirrors}, Mirror.look)
    for result in results.values():
        if isinstance(result, Exception):
            raise result
    node = on or next((mirror.node for mirror in mirrors if mirror.node in mirror.channels), None)
    known = sorted({name for mirror in mirrors for name in mirror.places})
    host = next((mirror for mirror in mirrors if node in mirror.channels), None)
    if node is None or host is None:
        problems = [problem for mirror in mirrors for problem in mirror.problems.values()]
        if on and on not in known and not (problems and not known):
            raise KitError(f"kit board --on {on}: the nodes are {', '.join(known) or 'not known yet'}")
        raise KitError("\n".join(["no node with curves can be reached", *problems]), cure=cure)
    folders = {}
    for mirror in mirrors:
        if node in mirror.found:
            folders[mirror.run.run_id] = mirror.places[node]
            print(f"{mirror.run.run_id}  on {node}:{mirror.places[node]}", flush=True)
        else:
            print(f"{mirror.run.run_id}  not shown: its curves are on {mirror.node or 'no node'}", flush=True)
    if not folders:
        raise _none(mirrors, f"{node} has no curves", cure)
    channel = host.channels[node]
    python = str(host.plans[node]["python"])
    there = channel.call("ports.free_port", timeout_s=CALL_TIMEOUT_S)
    is_local = channel.connection is None
    server = _Server(channel, argv(python, logdir(folders), port if is_local else there))
    tunnel = None
    if channel.connection is not None:
        tunnel = Tunnel(channel.connection, here=port, there=there)
        stack.callback(tunnel.close)
    server.wait(port, tunnel)
    _say_address(port, mirrors)
    while not server.ended.wait(1.0):
        pass
    raise server.problem()


def logdir(folders: Mapping[str, str]) -> list[str]:
    """Return TensorBoard's option for the runs' folders; pure.

    Raises:
        KitError: TensorBoard cannot be given these folders.
    """
    odd = [folder for folder in folders.values() if set(",:") & set(folder)]
    if odd and len(folders) > 1:
        raise KitError(
            f"{odd[0]}: TensorBoard takes no folder with a comma or colon", cure="name one run at a time"
        )
    if odd:
        return ["--logdir", *folders.values()]
    return ["--logdir_spec", ",".join(f"{run_id}:{folder}" for run_id, folder in folders.items())]


class _Server:
    """TensorBoard at the other end of a channel; it ends with the channel."""

    def __init__(self, channel: HostChannel, argv: Sequence[str]) -> None:
        self._channel = channel
        self._argv = list(argv)
        self._why: Exception | None = None
        self.ended = threading.Event()
        threading.Thread(target=self._attend, name="tensorboard", daemon=True).start()

    def _attend(self) -> None:
        try:
            done = self._channel.stream(
                "attend", lambda _: None, argv=self._argv, cwd="~", kit_dir="", env={}, limit_s=_LIMIT_S
            )
            said = (done["err"].strip() or done["out"].strip()).splitlines()[-3:]
            if any("No module named" in line for line in said):
                found, cure = f"{self._argv[0]} has no tensorboard", "pip install tensorboard there, or here"
            else:
                found, cure = "TensorBoard ended: " + "\n  ".join(said or ["without a word"]), ""
            self._why = HostError(self._channel.host, found, cure=cure)
        except (ChannelLost, RemoteError) as error:
            self._why = error
        self.ended.set()

    def problem(self) -> Exception:
        """Return why TensorBoard ended."""
        assert self._why is not None
        return self._why

    def wait(self, port: int, tunnel: Tunnel | None = None) -> None:
        """Wait until TensorBoard answers at a port of this machine.

        Raises:
            KitError: it has ended, or does not answer in time.
        """
        deadline = time.monotonic() + READY_TIMEOUT_S
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < deadline:
            if self.ended.is_set():
                raise self.problem()
            if tunnel is not None and tunnel.refused is not None:
                raise tunnel.refused
            try:
                with direct.open(f"http://127.0.0.1:{port}/data/environment", timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                self.ended.wait(0.2)
        raise HostError(self._channel.host, f"TensorBoard did not answer within {READY_TIMEOUT_S:.0f} s")
