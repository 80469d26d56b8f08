"""A lab: several real hosts on one Linux machine, to try kit on and to break.

A host has its own network, host name, processes, disk and sshd; no network leads outside. This protects from accidents,
not from attackers: a host's root is this machine's root, and kernel settings are shared. All of it is in one folder:

    FOLDER/lab.json       the record: there before the first thing is made and until the last one is removed
          /lab.yaml       the inventory; with Slurm also slurm.yaml
          /id_ed25519, known_hosts, .kitignore
          /switch         the switch's network namespace (a mount)
          /hosts/NAME/    net (a mount), upper (the disk), console.log; init.json, wire.json (processes)
          /slurm/         with Slurm: see lab_slurm
"""

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from nodekit.deploy.connect import sshconfig
from nodekit.deploy.lab import lab_disk, lab_needs, lab_network, lab_process, lab_record
from nodekit.deploy.lab.lab_network import LabHost, LabNetwork
from nodekit.deploy.lab.lab_process import ProcessRecord
from nodekit.deploy.lab.lab_slurm import CONTROL, STATE_FOLDERS, LabSlurm
from nodekit.deploy.records.state_folder import state_folder
from nodekit.deploy.sync.selection import IGNORE_FILE
from nodekit.inventory.errors import HostError, KitError, KitErrors

T = TypeVar("T")

MAX_HOSTS = 200
SSH_DEADLINE_S = 15


@dataclass(frozen=True, slots=True)
class Lab:
    """An existing lab, and the operations on it; all of them need root."""

    folder: Path
    name: str
    network: str
    """``198.18.K.0/24``; this machine is ``.1``, node1 is ``.11``."""
    control_interface: str
    """This machine's interface in the lab: its end of the cable to the switch."""
    hosts: dict[str, LabHost]
    has_slurm: bool = False
    has_accounting: bool = False

    @classmethod
    def up(
        cls,
        n: int,
        *,
        folder: Path | None = None,
        name: str = "lab",
        slurm: bool = False,
        accounting: bool = False,
    ) -> "Lab":
        """Make a lab of n hosts and wait until each answers by SSH; an existing lab is left as it is.

        Args:
            n: number of hosts.
            folder: the lab's folder; None: the default.
            name: the name in the inventory.
            slurm: make the hosts a Slurm cluster, too, and wait until its nodes are idle.
            accounting: let Slurm keep accounts in a database in the lab, so that sacct works.
        """
        if accounting and not slurm:
            raise KitError("accounting is Slurm's", cure="give `--slurm`, too")
        lab_needs.require_root()
        lab_needs.require_programs(slurm=slurm, accounting=accounting)
        folder = lab_folder(folder)
        if os.path.lexists(folder / lab_record.FILE):
            lab = cls.load(folder)
            hint = f"`kit lab down{folder_option(folder)}` it first, or choose another --folder"
            if len(lab.hosts) != n:
                raise KitError(f"the lab in {folder} has {len(lab.hosts)} hosts, not {n}", cure=hint)
            if (lab.has_slurm, lab.has_accounting) != (slurm, accounting):
                found = _kind(slurm=lab.has_slurm, accounting=lab.has_accounting)
                asked = _kind(slurm=slurm, accounting=accounting)
                raise KitError(f"the lab in {folder} is one {found}, not {asked}", cure=hint)
            return lab
        if not 1 <= n <= MAX_HOSTS:
            raise KitError(f"a lab has 1 to {MAX_HOSTS} hosts, not {n}")
        names = [host.name for host in lab_network.plan_hosts(n, str(lab_network.BENCHMARK_RANGE))]
        lab_record.begin(folder, {"hosts": [*names, *([CONTROL] if slurm else [])], "slurm": slurm})
        try:
            return cls._make(n, folder, name, slurm=slurm, accounting=accounting)
        except BaseException:
            down(folder)
            raise

    @classmethod
    def load(cls, folder: Path | None = None) -> "Lab":
        """Return the lab in a folder; KitError if there is none, or if it is incomplete."""
        lab_needs.require_root()
        folder = lab_folder(folder)
        try:
            record = lab_record.read(folder)
        except FileNotFoundError:
            raise KitError(
                f"no lab in {folder}",
                cure=f"`--folder DIR` names the folder of another, `kit lab up 3{folder_option(folder)}` makes one",
            ) from None
        del record["made"]
        if not record or not os.path.ismount(folder / "switch"):
            raise KitError(
                f"the lab in {folder} is not whole (its `up` is still at work or was cut short, or the "
                "machine was restarted)",
                cure=f"`kit lab down{folder_option(folder)}` removes what is left of it",
            )
        hosts = {host["name"]: LabHost(**host) for host in record.pop("hosts")}
        return cls(folder=folder, hosts=hosts, **record)

    @classmethod
    def _make(cls, n: int, folder: Path, name: str, *, slurm: bool, accounting: bool) -> "Lab":
        (folder / "hosts").mkdir()
        # If the lab is inside a folder that `kit up` sends, its disks, mounts and key must not be sent.
        (folder / IGNORE_FILE).write_text("/hosts/\n/slurm/\n/switch\n/id_ed25519*\n", encoding="utf-8")
        network = LabNetwork.make(folder)
        lab_needs.provide_disks(folder)
        hosts = {host.name: host for host in lab_network.plan_hosts(n, network.network)}
        lab = cls(folder, name, network.network, network.control_interface, hosts, slurm, accounting)
        network = lab._network  # which knows the hosts
        addresses = {host.name: host.address for host in hosts.values()}
        public_key = lab_disk.make_key(lab.identity_file, comment=f"the lab {name}")
        hidden = [Path("/tmp"), Path("/var/tmp"), lab_disk.root_home(), folder]  # noqa: S108
        if slurm:
            hidden += STATE_FOLDERS
            lab.slurm.write_files()
            lab.slurm.start_control(public_key=public_key, hidden=hidden)

        def build(host: LabHost) -> str:
            host_key = lab_disk.write_disk(
                lab._folder_of(host),
                name=host.name,
                addresses={"control": lab_network.control_address(lab.network), **addresses},
                public_key=public_key,
                hidden=hidden,
                shared=[lab.slurm.shared] if slurm else [],
                daemons=lab.slurm.daemons_of(host.name) if slurm else [],
            )
            if slurm:
                lab.slurm.copy_to(host)
            network.plug_in(host)
            lab._boot(host)
            _greet(host)
            return host_key

        host_keys = _each(hosts, build)
        lab.known_hosts.write_text(lab_disk.known_hosts_file(addresses, host_keys))
        lab.inventory.write_text(
            lab_disk.inventory_file(
                name,
                network=lab.network,
                identity_file=lab.identity_file,
                known_hosts=lab.known_hosts,
                addresses=addresses,
                folder_option=folder_option(folder),
            )
        )
        if slurm:
            lab.slurm_inventory.write_text(
                lab_disk.slurm_inventory_file(
                    name, num_hosts=len(hosts), conf=lab.slurm.conf, shared_dir=lab.slurm.shared / "kit"
                )
            )
            lab.slurm.wait_idle()
        record = asdict(lab) | {"hosts": [asdict(host) for host in hosts.values()]}
        del record["folder"]
        lab_record.complete(folder, record)
        return lab

    @property
    def inventory(self) -> Path:
        """Path of the inventory for `kit up`."""
        return self.folder / "lab.yaml"

    @property
    def slurm_inventory(self) -> Path:
        """Path of the inventory with which `kit up` submits jobs; only with Slurm."""
        return self.folder / "slurm.yaml"

    @property
    def identity_file(self) -> Path:
        """Path of the private key with which every host accepts root."""
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """Path of the file with every host's public key."""
        return self.folder / "known_hosts"

    @property
    def slurm(self) -> LabSlurm:
        """The lab's Slurm cluster; KitError if it has none."""
        if not self.has_slurm:
            raise KitError(
                f"the lab in {self.folder} has no Slurm", cure="`kit lab up --slurm` makes one that has"
            )
        return LabSlurm(self.folder, self.network, self.hosts, self.has_accounting)

    def down(self) -> None:
        """Remove the lab; files in its folder that it did not create are kept."""
        down(self.folder)

    def run(self, host: str, argv: Sequence[str], **kwargs: Any) -> "subprocess.CompletedProcess[Any]":
        """Run a command inside a host, as root with a bare environment; kwargs are subprocess.run's."""
        kwargs = {"env": self.host_environment, "timeout": 60, **kwargs}
        return subprocess.run(self.enter_argv(host, *argv), **kwargs)

    def enter_argv(self, host: str, *argv: str) -> list[str]:
        """Return the command on this machine that runs argv inside a host, in its folder ``/``."""
        init = self._init(host)
        if init is None or not init.is_alive:
            raise HostError(
                host,
                "has crashed",
                cure=f"`kit lab revive {host}{folder_option(self.folder)}` starts it again",
            )
        return ["nsenter", f"--target={init.pid}", "--net", "--uts", "--mount", "--ipc", "--pid", "--", *argv]

    @property
    def host_environment(self) -> dict[str, str]:
        """The environment that `run` gives a command."""
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"PATH": path, "HOME": str(lab_disk.root_home()), "USER": "root", "LANG": "C.UTF-8"}

    def ssh_argv(self, host: str, *command: str) -> list[str]:
        """Return the command on this machine that logs in to a host with the system's ssh client."""
        files = {"UserKnownHostsFile": self.known_hosts, "IdentityFile": self.identity_file}
        options = [f"-o{option}={sshconfig.quoted(path)}" for option, path in files.items()]
        login = f"root@{self._host(host).address}"
        return ["ssh", "-F", "none", *options, "-oIdentitiesOnly=yes", "-oBatchMode=yes", login, *command]

    def is_alive(self, host: str) -> bool:
        """Whether the host runs, even if it is cut off."""
        init = self._init(host)
        return init is not None and init.is_alive

    def status(self, host: str) -> str:
        """Return ``up`` or ``crashed``, and the faults of the host's link, such as ``up, cut, slow``."""
        faults = self._network.status(self._host(host))
        return ", ".join(["up" if self.is_alive(host) else "crashed", *faults])

    def processes(self, host: str) -> dict[int, list[str]]:
        """Return every process of a host, its init and sshd too: pid *on this machine* → argv; without zombies."""
        init = self._init(host)
        found: dict[int, list[str]] = {}
        if init is None or not init.is_alive:
            return found
        namespace = Path(f"/proc/{init.pid}/ns/pid").readlink()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                if (entry / "ns/pid").readlink() == namespace:
                    argv = (entry / "cmdline").read_bytes().split(b"\0")[:-1]
                    if argv:  # else it is a zombie
                        found[int(entry.name)] = [os.fsdecode(word) for word in argv]
        return found

    def crash(self, host: str) -> None:
        """Kill every process of a host at once; peers get RST. To simulate a power loss, cut its cable first."""
        if init := self._init(host):
            lab_process.kill(init)

    def revive(self, host: str) -> None:
        """Start a crashed host again, with the same disk, address and host key; its link stays as it is."""
        if not self.is_alive(host):
            self._boot(self._host(host))

    def cut(self, host: str) -> None:
        """Take a host's cable out of the switch: no packet arrives any more, and no RST."""
        self._network.cut(self._host(host))

    def cut_control(self, host: str) -> None:
        """Drop every packet between this machine and a host; the other hosts still reach it."""
        self._network.cut_control(self._host(host))

    def slow(
        self,
        host: str,
        *,
        delay_ms: float = 0,
        rate_mbit: float | None = None,
        loss_percent: float | None = None,
    ) -> None:
        """Slow a host's link in both directions; a round trip takes 2 × delay_ms longer."""
        self._network.slow(
            self._host(host), delay_ms=delay_ms, rate_mbit=rate_mbit or 0, loss_percent=loss_percent or 0
        )

    def mend(self, host: str) -> None:
        """Undo cut, cut_control and slow."""
        self._network.mend(self._host(host))

    @property
    def _network(self) -> LabNetwork:
        return LabNetwork(self.folder, self.network, self.control_interface, self.hosts.values())

    def _host(self, name: str) -> LabHost:
        if name not in self.hosts:
            raise HostError(name, f"no such host in the lab: it has {', '.join(self.hosts)}")
        return self.hosts[name]

    def _folder_of(self, host: LabHost) -> Path:
        return self.folder / "hosts" / host.name

    def _init(self, host: str) -> ProcessRecord | None:
        return ProcessRecord.read(self._folder_of(self._host(host)) / "init.json")

    def _boot(self, host: LabHost) -> None:
        """Start a host and wait until its sshd listens."""
        folder = self._folder_of(host)
        log = folder / "console.log"
        lab_process.start(
            ["nsenter", "--net=net", *lab_network.script_argv("lab_host.py")],
            record=folder / "init.json",
            log=log,
            cwd=folder,
            env=lab_disk.environment(),
        )
        init = self._init(host.name)
        assert init is not None
        deadline = time.monotonic() + SSH_DEADLINE_S
        while not _is_listening(init):
            if not init.is_alive:
                raise HostError(host.name, f"ended as it started; {lab_process.tail(log)}")
            if time.monotonic() > deadline:
                raise HostError(host.name, f"no sshd after {SSH_DEADLINE_S} s; {lab_process.tail(log)}")
            time.sleep(0.01)


def down(folder: Path | None = None) -> list[str] | None:
    """Remove a lab, and only those files that `kit lab up` created in its folder.

    Returns:
        The files left in the folder, which are not the lab's; None if there is no lab.

    Raises:
        KitError: the folder holds no lab, or something else is mounted in it; nothing was changed.
    """
    lab_needs.require_root()
    folder = lab_folder(folder)
    if not os.path.lexists(folder / lab_record.FILE):
        return None
    with lab_record.opened(folder) as (place, record):
        _remove(place, record["made"], folder)
        left = {path.name for path in place.iterdir()}
        if "hosts" in left and not (place / "hosts").is_symlink():
            left = left - {"hosts"} | {f"hosts/{path.name}" for path in (place / "hosts").iterdir()}
    if not left:
        folder.rmdir()
    return sorted(left)


def _remove(place: Path, made: dict[str, Any], folder: Path) -> None:
    """Remove the files that a lab created, and its record last; follows no link and enters no mount."""
    hosts = (
        []
        if (place / "hosts").is_symlink()
        else [place / "hosts" / name for name in (*made["hosts"], "trial")]
    )
    own = {"switch", "hosts", *(f"hosts/{path.name}/net" for path in hosts)}
    if others := sorted(set(lab_record.mounts_below(place)) - own):
        shown = ", ".join(str(folder / path) for path in others)
        raise KitError(
            f"{shown}: mounted in the lab, by somebody else",
            cure=f"umount it, and `kit lab down{folder_option(folder)}` again",
        )
    records = [ProcessRecord.read(path / name) for path in hosts for name in ("init.json", "wire.json")]
    lab_process.kill(*(record for record in records if record))
    lab_network.unmount(place)
    for path in (*hosts, *([place / "slurm"] if made["slurm"] else [])):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
    with contextlib.suppress(OSError):  # something else is in it, or it is a link
        (place / "hosts").rmdir()
    files = [IGNORE_FILE, "switch", "lab.yaml", "known_hosts", "id_ed25519", "id_ed25519.pub"]
    files += ["slurm.yaml"] if made["slurm"] else []
    for name in (*files, lab_record.DRAFT, lab_record.FILE):
        with contextlib.suppress(IsADirectoryError):
            (place / name).unlink(missing_ok=True)


def _kind(*, slurm: bool, accounting: bool) -> str:
    """Describe the kind of a lab."""
    return "with Slurm and its accounting" if accounting else "with Slurm" if slurm else "without Slurm"


def lab_folder(folder: Path | None) -> Path:
    """Return the absolute path of a lab's folder; None: the default one, in the XDG state folder."""
    return folder.absolute() if folder is not None else state_folder() / "lab"


def folder_option(folder: Path) -> str:
    """Return the option that `kit lab` needs for the lab in this folder; "" for the default folder."""
    return "" if folder == lab_folder(None) else f" --folder {shlex.quote(str(folder))}"


def _greet(host: LabHost) -> None:
    """Raise HostError unless a host's sshd answers this machine over the lab's network."""
    try:
        with socket.create_connection((host.address, 22), timeout=SSH_DEADLINE_S) as connection:
            answer = connection.recv(4)
    except OSError as error:
        raise HostError(
            host.name, f"no SSH at {host.address} from this machine: {error} (a firewall?)"
        ) from error
    if answer != b"SSH-":
        raise HostError(host.name, f"its sshd at {host.address} answers {answer!r}")


def _is_listening(init: ProcessRecord) -> bool:
    """Whether a host's port 22 is listened on; read from /proc, since the host's cable may be cut."""
    with contextlib.suppress(OSError):
        sockets = Path(f"/proc/{init.pid}/net/tcp").read_text().splitlines()[1:]
        return any(line.split()[1].endswith(":0016") and line.split()[3] == "0A" for line in sockets)
    return False


def _each(hosts: dict[str, LabHost], function: Callable[[LabHost], T]) -> dict[str, T]:
    """Call a function for all hosts in parallel; raise one error with the reasons of all hosts that failed."""
    with ThreadPoolExecutor(max_workers=min(len(hosts), 16)) as pool:
        futures = {name: pool.submit(function, host) for name, host in hosts.items()}
    errors: list[HostError] = []
    for name, future in futures.items():
        error = future.exception()
        if isinstance(error, KitError):
            errors.append(error if isinstance(error, HostError) else HostError(name, *error.problem))
        elif error is not None:
            raise error
    if errors:
        raise KitErrors(errors) from errors[0]
    return {name: future.result() for name, future in futures.items()}
