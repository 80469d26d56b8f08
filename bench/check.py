"""The time of `kit check`: 16 hosts, against ansible's setup and pdsh's true; and the cost of each of 256 hosts."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rounds import SHARED, Bench, BenchError, bench, interleave, machine, median, note, spread, table

NUM_HOSTS = 16
SIZES = (32, 64, 128, 256)
TIMEOUT_S = 300.0
VENV = SHARED / "ansible"
MANY = "198.19.250.0/23"  # in the range for benchmarks; one host has all of these addresses
FIRST_OF_MANY = (198, 19, 250, 1)
PORT = 2222
SOAK_HOSTS = 32
# A process that computes until its parent has ended, however that ended.
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(100_000): pass"
KIT, ANSIBLE, TUNED, PDSH = "kit check", "ansible -m setup", "ansible, pipelining", "pdsh true"
DESCRIPTION = """\
Two questions about `kit check`, each a whole command with Python's start in it.

How long it takes on 16 hosts of a lab on this machine, over real ssh, in turns with

  ansible -m setup      `ansible all -f 16 -m setup`, as it comes
  ansible, pipelining   the same with its own advice for speed (ANSIBLE_PIPELINING)
  pdsh true             `true` on all of them at once by the system's ssh: the least that there is to do

after a warm-up round. The goal is half of ansible's time. Ansible and pdsh are installed if they are not there:
ansible-core into an environment of its own, pdsh by apt. Ansible's connections are closed between its runs, as
kit's are.

And what a host costs: `kit check` on 32 to 256 addresses that are all one host's, so that nothing but kit grows.
Processor time and memory are kit's own; the whole time has the other end's share of this machine in it: one sshd
for each, and a Python. The network between them is left out there, since it is one host. What the last sizes cost
per host must not be more than what the first did.

--soak asks another question: whether it gives false alarms. It checks a healthy lab again and again, as quickly as
`kit check` does by default, while other processes keep this machine busy, and prints how many of these checks
failed, and at what.
"""
EPILOG = """\
examples:
  bench/check
  bench/check --rounds 1 --hosts 3 --sizes 4,8
  bench/check --soak
  bench/check --soak --hosts 8 --checks 5 --load 4

It needs root (for the lab). Exit status: 0 unless something broke; no time is an error. With --soak: 1
where a check failed.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Took:
    """The time, processor time and memory that one command took."""

    all_s: float
    cpu_s: float
    peak_bytes: int


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    cwd: Path,
    is_well: Callable[[int, str], bool] = lambda code, _: code == 0,
) -> Took:
    """Run a command to its end; `is_well` decides by exit status and output whether it succeeded.

    Raises:
        BenchError: the command failed, or took too long.
    """
    with tempfile.TemporaryFile() as said:
        begin = time.monotonic()
        process = subprocess.Popen(
            argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
        )
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() - begin > TIMEOUT_S:
                process.kill()
                process.wait()
                raise BenchError(f"{argv[0]} was not done after {TIMEOUT_S:.0f} s")
            time.sleep(0.002)
        took_s = time.monotonic() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        text = said.read().decode(errors="replace").strip()
        if not is_well(process.returncode, text):
            raise BenchError(f"{argv[0]} ended with {process.returncode}: {text[-1500:]}")
    return Took(all_s=took_s, cpu_s=usage.ru_utime + usage.ru_stime, peak_bytes=usage.ru_maxrss * 1024)


def kit_argv(inventory: Path) -> list[str]:
    """Return the command, with a time limit that is never reached: `run` has its own."""
    return [
        sys.executable,
        "-m",
        "nodekit.deploy.commands.cli",
        "check",
        str(inventory),
        "--timeout",
        f"{TIMEOUT_S:g}",
    ]


# --- against others -----------------------------------------------------------------------------------------


def install() -> None:
    """Install ansible and pdsh if they are missing."""
    if not (VENV / "bin/ansible").exists():
        note(f"installing ansible-core into {VENV}")
        VENV.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        pip = [str(VENV / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "ansible-core"], check=False)
    if shutil.which("pdsh") is None:
        note("installing pdsh with apt")
        apt = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "pdsh"]
        subprocess.run(apt, check=False, stdout=subprocess.DEVNULL)


def contestants(lab: Bench) -> dict[str, Callable[[int], Took]]:
    """Return name → function that runs the contestant once; those that are not installed are left out, with a note."""
    names = list(lab.lab.hosts)
    hosts = lab.folder / "ansible.ini"
    python = sys.executable  # the hosts see this machine's python
    hosts.write_text("".join(f"{name} ansible_python_interpreter={python}\n" for name in names))
    # ssh masters end with ansible's run, and it is told the hosts' Python: kit connects anew each time, too.
    ansible_env = lab.env(
        ANSIBLE_SSH_EXECUTABLE=str(lab.bin / "ssh"),
        ANSIBLE_SSH_ARGS="-C -o ControlMaster=auto -o ControlPersist=1s",
        ANSIBLE_LOCALHOST_WARNING="False",
    )
    ansible = [str(VENV / "bin/ansible"), "all", "-i", str(hosts), "-f", str(len(names)), "-m", "setup"]
    pdsh_env = lab.env(PDSH_SSH_ARGS_APPEND=f"-F {lab.ssh_config}")
    pdsh = ["pdsh", "-S", "-R", "ssh", "-f", str(len(names)), "-w", ",".join(names), "true"]
    found: dict[str, Callable[[int], Took]] = {
        KIT: lambda _: run(kit_argv(lab.lab.inventory), lab.env(), cwd=lab.folder)
    }
    if (VENV / "bin/ansible").exists():
        found[ANSIBLE] = lambda _: run(ansible, ansible_env, cwd=lab.folder)
        tuned = {**ansible_env, "ANSIBLE_PIPELINING": "True"}
        found[TUNED] = lambda _: run(ansible, tuned, cwd=lab.folder)
    else:
        note("ansible-core could not be installed: left out")
    if shutil.which("pdsh"):
        found[PDSH] = lambda _: run(pdsh, pdsh_env, cwd=lab.folder)
    else:
        note("pdsh could not be installed: left out")
    return found


def against(num_hosts: int, rounds: int) -> tuple[str, dict[str, str]]:
    """Return the table, and which contestants broke."""
    with bench(num_hosts) as lab:
        measured, broken = interleave(
            contestants(lab), rounds=rounds, shown=lambda took: f"{took.all_s:6.2f} s", between=lab.wait_quiet
        )
    rows = []
    for name, took in measured.items():
        times = [each.all_s for each in took]
        ratios = [
            f"{median(times) / median([each.all_s for each in measured[base]]):.2f} ×"
            if base in measured
            else "–"
            for base in (ANSIBLE, TUNED, PDSH)
        ]
        cpu = f"{median([each.cpu_s for each in took]):.2f}"
        memory = f"{median([each.peak_bytes for each in took]) / 1e6:.0f}"
        rows.append([name, f"{median(times):.2f}", spread(times), *ratios, cpu, memory])
    header = ["", "median", "range", "to ansible", "to it tuned", "to pdsh", "processor", "MB"]
    return table(header, rows), broken


# --- many ---------------------------------------------------------------------------------------------------


def many(sizes: Sequence[int], rounds: int) -> tuple[str, dict[str, str]]:
    """Return the table of the cost per host, and which sizes broke."""
    with bench(1) as lab:
        (host,) = lab.lab.hosts.values()
        # The host answers for every address of a network, and this machine routes the network to it.
        lab.lab.run(host.name, ["ip", "route", "add", "local", MANY, "dev", "lo"], check=True)
        lab.lab.run(
            host.name,
            [shutil.which("sshd") or "/usr/sbin/sshd", "-o", "MaxStartups=1000", "-p", str(PORT)],
            check=True,
        )
        # Removed with the lab's interface.
        subprocess.run(["ip", "route", "add", MANY, "via", host.address], check=True)
        inventories = {size: _inventory(lab, size) for size in sizes}
        measured, broken = interleave(
            {
                str(size): lambda _, path=path: run(  # type: ignore[misc]
                    [*kit_argv(path), "--json"], lab.env(), cwd=lab.folder, is_well=_all_but_the_network
                )
                for size, path in inventories.items()
            },
            rounds=rounds,
            shown=lambda took: f"{took.all_s:6.2f} s  {took.cpu_s:6.2f} s  {took.peak_bytes / 1e6:6.0f} MB",
        )
    rows = []
    before: tuple[int, Took] | None = None
    for name, took in measured.items():
        size = int(name)
        middle = Took(
            all_s=median([each.all_s for each in took]),
            cpu_s=median([each.cpu_s for each in took]),
            peak_bytes=int(median([each.peak_bytes for each in took])),
        )
        cells = [f"{middle.all_s:.2f}", f"{middle.cpu_s:.2f}", f"{middle.peak_bytes / 1e6:.0f}"]
        more = ["", "", ""]
        if before is not None:
            added, old = size - before[0], before[1]
            more = [
                f"{(middle.all_s - old.all_s) / added * 1000:.0f}",
                f"{(middle.cpu_s - old.cpu_s) / added * 1000:.0f}",
                f"{(middle.peak_bytes - old.peak_bytes) / added / 1e6:.2f}",
            ]
        rows.append([name, *cells, *more])
        before = size, middle
    header = ["hosts", "seconds", "processor", "MB", "ms more per host", "of processor", "MB more per host"]
    return table(header, rows), broken


def _all_but_the_network(_: int, said: str) -> bool:
    """Whether every host was examined; the network check fails, as all hosts are one."""
    findings = json.loads(said[said.index("{") :])["findings"]
    return not [each for each in findings if each["level"] == "failure" and each["check"] != "network"]


def _inventory(lab: Bench, size: int) -> Path:
    """Return an inventory of this many hosts, which are all the same machine."""
    (host,) = lab.lab.hosts.values()
    key = next(
        line.split()[1:3]
        for line in lab.lab.known_hosts.read_text().splitlines()
        if host.address in line.split()[0]
    )
    known = lab.folder / "known_many"
    known.write_text(f"[198.19.*]:{PORT} {' '.join(key)}\n")
    first, second, third, fourth = FIRST_OF_MANY
    addresses = [f"{first}.{second}.{third + (fourth + n) // 256}.{(fourth + n) % 256}" for n in range(size)]
    path = lab.folder / f"many{size}.yaml"
    hosts = "".join(f"  many{n:03}: {{address: {address}}}\n" for n, address in enumerate(addresses))
    path.write_text(
        f"user: root\nport: {PORT}\nidentity_file: {json.dumps(str(lab.lab.identity_file))}\n"
        f"known_hosts: {json.dumps(str(known))}\npython: {json.dumps(sys.executable)}\nhosts:\n{hosts}"
    )
    return path


# --- false alarms -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Run this many busy processes within the block; each adds 1 to the load."""
    processes = []
    try:
        for _ in range(number):
            processes.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", BUSY, str(os.getpid())]))
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.wait()


def soak(num_hosts: int, num_checks: int, load: int) -> tuple[str, int]:
    """Check a healthy lab this many times; return the results as text, and the number of checks that failed."""
    times: list[float] = []
    false: Counter[str] = Counter()
    warnings: Counter[str] = Counter()
    num_false = 0
    with bench(num_hosts) as lab, busy(load):
        argv = [
            sys.executable,
            "-m",
            "nodekit.deploy.commands.cli",
            "check",
            str(lab.lab.inventory),
            "--json",
        ]
        for number in range(1, num_checks + 1):
            start = time.monotonic()
            done = subprocess.run(
                argv, env=lab.env(), cwd=lab.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
            times.append(time.monotonic() - start)
            try:
                findings = json.loads(done.stdout[done.stdout.index("{") :])["findings"]
            except ValueError as error:
                raise BenchError(f"kit check ended with {done.returncode}: {done.stderr[-1500:]}") from error
            told = {
                level: [each for each in findings if each["level"] == level]
                for level in ("failure", "warning")
            }
            for counted, level in ((false, "failure"), (warnings, "warning")):
                counted.update(f"{each['check']}: {_shape(each['found'])}" for each in told[level])
            num_false += bool(told["failure"])
            note(f"check {number} of {num_checks}: {times[-1]:.1f} s, {len(told['failure'])} false failures, "
                 f"{len(told['warning'])} warnings, load {os.getloadavg()[0]:.0f}")  # fmt: skip
            if told["failure"]:
                note("  " + "; ".join(f"{each['host']}: {each['found']}" for each in told["failure"])[:1500])
    lines = [
        f"{num_false} of {num_checks} checks of {num_hosts} healthy hosts failed, with {load} busy processes; "
        f"{median(times):.1f} s a check ({spread(times)}); {machine()}."
    ]
    for head, counted in (("false failures", false), ("warnings", warnings)):
        lines += [
            f"{head}:",
            *(f"  {times_seen:5} x {what}" for what, times_seen in counted.most_common(20)),
        ] * bool(counted)
    return "\n".join(lines), num_false


def _shape(found: str) -> str:
    """Return what was found, without the parts that differ between hosts."""
    return re.sub(r"\d+(\.\d+)*", "N", found)[:200]


def main() -> int:
    """Run the benchmark, and print the tables."""
    args = _arguments()
    if os.geteuid() != 0:
        sys.exit("bench/check: the lab needs root")
    if args.soak:
        text, num_false = soak(args.hosts or SOAK_HOSTS, args.checks, args.load)
        print(text)
        return 1 if num_false else 0
    install()
    args.hosts = args.hosts or NUM_HOSTS
    rows, broken = against(args.hosts, args.rounds)
    print(
        f"{args.hosts} hosts, seconds and MB; {args.rounds} rounds, interleaved; {machine()}.\n\n{rows}\n",
        flush=True,
    )
    sizes = [int(size) for size in args.sizes.split(",")]
    rows, more_broken = many(sizes, args.rounds)
    print(f"One host at so many addresses; {args.rounds} rounds, interleaved; {machine()}.\n\n{rows}")
    for name, why in {**broken, **more_broken}.items():
        note(f"\n{name} broke: {why}")
    return 1 if broken or more_broken else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/check",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often each runs (5)")
    parser.add_argument(
        "--hosts", type=int, metavar="N", help="hosts of the lab, against others (16) or in a soak (32)"
    )
    parser.add_argument(
        "--soak", action="store_true", help="count false alarms on a busy machine, in place of all else"
    )
    parser.add_argument("--checks", type=int, default=100, metavar="N", help="with --soak: how many (100)")
    parser.add_argument("--load", type=int, default=20, metavar="N", help="with --soak: busy processes (20)")
    parser.add_argument(
        "--sizes",
        default=",".join(map(str, SIZES)),
        metavar="N,N…",
        help="numbers of addresses (32,64,128,256)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
