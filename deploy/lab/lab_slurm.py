"""A Slurm cluster on a lab's hosts: slurmd on each, slurmctld beside them, and this machine submits jobs.

The controller (with accounting also slurmdbd and its database) is one more "host" named ``control``, with a disk and
processes of its own, but on this machine's network. The files are in the lab's folder:

    FOLDER/slurm/slurm.conf, cgroup.conf, munge.key   every host has a copy at the same path
                /slurmdbd.conf                        with accounting
                /run/munge.socket                     munged: the control's here, each host's on its disk
                /shared/                              a folder that all hosts share
          /hosts/control/upper/var/log/               the controller's logs
          /hosts/NAME/upper/var/log/                  a host's
"""

import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nodekit.deploy.lab import lab_disk, lab_process
from nodekit.deploy.lab.lab_network import LabHost, control_address, script_argv
from nodekit.inventory.errors import KitError

CONTROL = "control"
MAX_SOCKET_BYTES = 107
"""The kernel's limit for the path of a socket."""
READY_S = 90
"""Seconds; slurmctld may take a minute to ask a node to register again after its cable was cut."""
GRACE_S = 3
"""Seconds that a preempted job may run after its signal; Slurm checks only every few seconds."""
STATE_FOLDERS = [Path("/var/spool/slurmctld"), Path("/var/spool/slurmd"), Path("/var/lib/lab-database")]
"""Where the daemons keep jobs and accounts; hidden, as a Slurm of this machine may have left its own there."""
REQUEUE_DELAY_S = 5
"""Seconds before Slurm starts a requeued job again; the minimum that it accepts."""

SLURM_CONF = """\
ClusterName=lab
SlurmctldHost=control({control})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a job waits after it was put back in the queue (by default 2 minutes).
AuthInfo=socket={socket},cred_expire={requeue_delay}
# Listen on the lab's network only: the controller's own /etc/hosts says what `control` is.
CommunicationParameters=NoCtldInAddrAny
StateSaveLocation=/var/spool/slurmctld
SlurmctldPidFile=/run/slurmctld.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdSpoolDir=/var/spool/slurmd
SlurmdPidFile=/run/slurmd.pid
SlurmdLogFile=/var/log/slurmd.log
# The hosts share this machine's processors, which are fewer than they say.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
# A node is down after 10 s of silence (seen some seconds later), and used again when it is back.
SlurmdTimeout=10
ReturnToService=2
KillWait=2
BatchStartTimeout=10
MessageTimeout=5
TCPTimeout=2
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# When it is to be preempted, a job that gave --signal gets that signal, another one SIGTERM.
SlurmctldParameters=preempt_send_user_signal
{accounting}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=240 PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=ALL MaxTime=240 PriorityTier=10 PreemptMode=OFF
"""

CGROUP_CONF = """\
# A host has no cgroups of its own. slurmd ends when it is to find out which kind there is; told one, it asks
# for none, for nothing above needs any.
CgroupPlugin=cgroup/v1
"""

ACCOUNTING = """\
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={control}
# munged's socket; AuthInfo does not count here.
AccountingStoragePass={socket}
"""

SLURMDBD_CONF = """\
DbdHost=control
DbdAddr={control}
CommunicationParameters=NoInAddrAny
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={socket}
PidFile=/run/slurmdbd.pid
LogFile=/var/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
"""

START_DATABASE = """\
set -e
exec >/var/log/accounting.log 2>&1
socket=/run/mysqld/mysqld.sock data=/var/lib/lab-database
export SLURM_CONF="$1"
# wait_for COMMAND...: until it succeeds, 20 s at most.
wait_for() { tries=0; until "$@"; do tries=$((tries + 1)); [ $tries -lt 200 ]; sleep 0.1; done; }
# No disk is waited for: the data are as short-lived as the lab.
set -- --no-defaults --user=root --datadir=$data --innodb-flush-method=nosync --innodb-log-file-size=8M
mkdir -p /run/mysqld
mariadb-install-db "$@" --skip-test-db
setsid mariadbd "$@" --socket=$socket --skip-networking --innodb-lock-wait-timeout=900 &
wait_for mariadb-admin --no-defaults --socket=$socket ping
slurmdbd
wait_for sacctmgr show cluster
sacctmgr -i add cluster lab
sacctmgr -i add account lab
sacctmgr -i add user root account=lab
sacctmgr -i modify user root set defaultaccount=lab
"""
"""Starts the database and slurmdbd, and creates the cluster's account; only slurmdbd listens on the network."""


def slurm_conf(socket: Path, network: str, hosts: Iterable[LabHost], *, has_accounting: bool) -> str:
    """Return the ``slurm.conf`` of a lab."""
    control = control_address(network)
    nodes = (f"NodeName={host.name} NodeAddr={host.address} CPUs=2 RealMemory=500" for host in hosts)
    return SLURM_CONF.format(
        control=control,
        socket=socket,
        requeue_delay=REQUEUE_DELAY_S,
        grace=GRACE_S,
        accounting=ACCOUNTING.format(control=control, socket=socket) if has_accounting else "",
        nodes="\n".join(nodes),
    )


@dataclass(frozen=True, slots=True)
class LabSlurm:
    """The Slurm cluster of a lab. This machine is its login node: `run` runs squeue, sbatch, srun and so on."""

    lab_folder: Path
    network: str
    hosts: dict[str, LabHost]
    has_accounting: bool

    @property
    def folder(self) -> Path:
        """Slurm's folder in the lab, at the same path on every host."""
        return (self.lab_folder / "slurm").resolve()

    @property
    def shared(self) -> Path:
        """The folder that this machine and all hosts share, at the same path."""
        return self.folder / "shared"

    @property
    def conf(self) -> Path:
        """Path of ``slurm.conf``."""
        return self.folder / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """The environment in which Slurm's commands on this machine use this cluster."""
        foreign = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SACCT_")
        ours = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return {**ours, "SLURM_CONF": str(self.conf)}

    def run(self, argv: Sequence[str], *, timeout_s: float = 60) -> str:
        """Run one of Slurm's commands in the shared folder; return its output, or raise KitError if it fails."""
        try:
            answer = subprocess.run(
                argv, env=self.env, cwd=self.shared, capture_output=True, text=True, timeout=timeout_s,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise KitError(f"{argv[0]} had not ended after {timeout_s:g} s") from error
        if answer.returncode != 0:
            said = (answer.stderr.strip() or answer.stdout.strip())[-2000:]
            raise KitError(f"{argv[0]} exited with {answer.returncode}: {said}")
        return answer.stdout

    def node_states(self) -> dict[str, str]:
        """Return node → its state in sinfo: ``idle``, ``alloc``, ``down*`` and so on (``*``: it does not answer)."""
        lines = self.run(["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %t"]).splitlines()
        return dict(line.split() for line in lines)

    def wait_idle(self) -> None:
        """Wait until every node is idle; KitError if one is not in time."""
        deadline = time.monotonic() + READY_S
        while True:
            try:
                found = self.node_states()
                if set(found.values()) == {"idle"}:
                    return
                reason = ", ".join(f"{node} is {state}" for node, state in found.items())
            except KitError as error:  # slurmctld does not answer yet
                reason = str(error)
            if time.monotonic() > deadline:
                disk = self.lab_folder / "hosts" / CONTROL
                logs = [disk / "console.log", disk / "upper/var/log/slurmctld.log"]
                tails = "\n".join(lab_process.tail(log) for log in logs)
                raise KitError(f"Slurm's nodes are not idle after {READY_S} s: {reason}\n{tails}")
            time.sleep(0.1)

    def write_files(self) -> None:
        """Write Slurm's files, before the hosts start; KitError if Slurm cannot handle the lab's path."""
        socket = self.folder / "run/munge.socket"
        if not re.fullmatch(r"[\w./+-]+", str(socket), re.ASCII) or len(str(socket)) > MAX_SOCKET_BYTES:
            raise KitError(
                f"Slurm cannot use a folder of this name: {self.lab_folder}. Choose a --folder of letters, digits "
                f"and ./_+- and at most {MAX_SOCKET_BYTES - len('/slurm/run/munge.socket')} characters"
            )
        for part in (self.folder, self.shared, socket.parent):
            part.mkdir()
        settings = {"socket": socket, "control": control_address(self.network)}
        self.conf.write_text(
            slurm_conf(socket, self.network, self.hosts.values(), has_accounting=self.has_accounting)
        )
        (self.folder / "cgroup.conf").write_text(CGROUP_CONF)
        _write_secret(self.folder / "munge.key", secrets.token_bytes(128))
        if self.has_accounting:
            _write_secret(self.folder / "slurmdbd.conf", SLURMDBD_CONF.format(**settings).encode())

    def daemons_of(self, host: str) -> list[list[str]]:
        """Return the commands that a host, or the controller, runs one after the other as it boots.

        munged needs --force: it wants its socket to be accessible to all users, and the lab's folder is only root's.
        """
        files = {
            "socket": self.folder / "run/munge.socket",
            "key-file": self.folder / "munge.key",
            "pid-file": "/run/munged.pid",
            "seed-file": "/run/munged.seed",
            "log-file": "/var/log/munged.log",
        }
        munged = ["munged", "--force", *(f"--{name}={path}" for name, path in files.items())]
        if host != CONTROL:
            return [munged, ["slurmd", "-N", host, "-f", str(self.conf)]]
        database = [["sh", "-c", START_DATABASE, "sh", str(self.conf)]] if self.has_accounting else []
        return [munged, *database, ["slurmctld", "-f", str(self.conf)]]

    def copy_to(self, host: LabHost) -> None:
        """Put a host's copies of the files on its disk, before it starts."""
        disk = self.lab_folder / "hosts" / host.name / "upper"
        folder = lab_disk.make_folder(disk, self.folder)
        for name in ("slurm.conf", "cgroup.conf", "munge.key"):
            shutil.copy2(self.folder / name, folder)
        (folder / "run").mkdir()
        # Slurm's default path: its commands work for users who log in to the host, too.
        default = lab_disk.make_folder(disk, Path("/etc/slurm")) / "slurm.conf"
        default.symlink_to(self.conf)

    def start_control(self, *, public_key: str, hidden: Iterable[Path]) -> None:
        """Start the controller, with its own disk and processes, on this machine's network."""
        folder = self.lab_folder / "hosts" / CONTROL
        lab_disk.write_disk(
            folder,
            name=CONTROL,
            addresses={},
            public_key=public_key,
            hidden=hidden,
            shared=[self.folder],
            daemons=self.daemons_of(CONTROL),
            has_sshd=False,
        )
        others = "".join(f"{host.address} {host.name}\n" for host in self.hosts.values())
        # Unlike on Debian its name is not 127.0.1.1, since it listens at the address of its name.
        (folder / "upper/etc/hosts").write_text(
            f"127.0.0.1 localhost\n{control_address(self.network)} {CONTROL}\n{others}"
        )
        lab_process.start(
            script_argv("lab_host.py"),
            record=folder / "init.json",
            log=folder / "console.log",
            cwd=folder,
            env=lab_disk.environment(),
        )


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
