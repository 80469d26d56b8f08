"""`kit selftest`: runs kit's other commands on the user's machines, one part after the other, and reports."""

from __future__ import annotations

import contextlib
import csv
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any

from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.host.files import make_private, write_private
from nodekit.deploy.output.interrupts import sigterm_interrupts
from nodekit.deploy.output.wording import count
from nodekit.deploy.plan import check, gpus
from nodekit.deploy.plan.check import Facts
from nodekit.deploy.records import events, find_runs, record_files
from nodekit.deploy.selftest import MEMORY_MARK, selftest_command, selftest_report
from nodekit.deploy.selftest.selftest_command import Done
from nodekit.deploy.selftest.selftest_report import Anonymous, Part
from nodekit.inventory.copied import copied
from nodekit.inventory.errors import KitError
from nodekit.inventory.load import load_inventory
from nodekit.inventory.schema import Inventory
from nodekit.training.engine_info import ALONE, ENGINES, lacking

NO_GPU = "no GPU"
HANG_S = 20.0
"""After this time without progress, the job of the hang part counts as hung; kit's default is two minutes."""
_TRAINING = (
    "-m", "nodekit.training", "--task", "nodekit.deploy.selftest.selftest_task:Measured", "--epochs", "4",
    "--snapshot-every", "10", "--lr", "0.0005",
)  # fmt: skip
"""92 slowed-down steps of digits: at least 5 s; the fault comes after 32 of them."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `kit selftest`."""

    inventory: Path
    engines: tuple[str, ...] = ()
    """Names of engines; empty: all."""
    output: Path | None = None
    """A new folder for the report; None: one in kit's state folder."""
    ssh: SshOptions = field(default_factory=SshOptions)


def selftest(options: Options) -> int:
    """Try each part, and write the report; return 1 if a part failed, else 0."""
    _refuse_engines(options.engines)
    inventory = load_inventory(options.inventory)
    if not inventory.hosts:
        raise KitError(
            f"{options.inventory}: kit selftest needs `hosts:`, not `slurm:`",
            cure="list the hosts of an allocation in another file",
        )
    folder = options.output or (
        record_files.folder().parent / "selftests" / f"{inventory.name}-{time.strftime('%m%d-%H%M%S')}"
    )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise KitError(f"-o {folder} is there and not empty", wanted="a new folder")
    with sigterm_interrupts():
        print(f"asking {count(len(inventory.hosts), 'host')} what is there …", flush=True)
        facts = _facts(inventory, options.ssh)
        test = SelfTest(inventory, facts, folder, options)
        print(f"{test.described}; up to ten minutes; Ctrl-C ends it and still writes the report", flush=True)
        try:
            test.run()
        finally:
            test.report()
    return 1 if any(part.outcome == "failed" for part in test.parts) else 0


class SelfTest:
    """Runs the parts one after the other; `parts` holds the results so far."""

    def __init__(
        self, inventory: Inventory, facts: Mapping[str, Facts], folder: Path, options: Options
    ) -> None:
        """Create the folder with copies of the inventory; start nothing yet."""
        self.parts: list[Part] = []
        self._inventory, self._facts, self._folder = inventory, facts, folder
        self._hide = Anonymous(inventory, facts)
        self._engines = options.engines or tuple(ENGINES)
        self._ssh = ["--accept-new-host-keys"] if options.ssh.accept_new_host_keys else []
        self._gpus = gpus.share(inventory.hosts, {name: each.gpus for name, each in facts.items()})
        with record_files.told(folder):
            make_private(folder)
        # Do not send the user's code: only kit's own task is trained.
        (folder / "code").mkdir()
        (folder / "code/README").write_text("kit selftest trains a task of kit's own.\n", encoding="utf-8")
        changes: dict[str, object] = {"job.command": None, "job.code": str((folder / "code").resolve())}
        self._copy, self._hanging = folder / "inventory.yaml", folder / "inventory-hang.yaml"
        name = f"{inventory.name}-selftest"
        for path, more in ((self._copy, {}), (self._hanging, {"timings.hang": HANG_S})):
            text = copied(inventory.path, name=name, changes={**changes, **more})
            write_private(str(path), text.encode())

    @property
    def _have_gpus(self) -> bool:
        return all(self._gpus.values())

    @property
    def described(self) -> str:
        """A summary of the machines, on one line."""
        kinds = [f"{len(own)} × {own[0].name}" if own else NO_GPU for own in self._gpus.values()]
        told = ", ".join(f"{kinds.count(kind)} × ({kind})" for kind in dict.fromkeys(kinds))
        return f"{count(len(self._facts), 'host')}: {told}"

    def run(self) -> None:
        """Try all parts."""
        self._check()
        self._on_gpus("network", self._network)
        runs_of: dict[str, str] = {}
        for engine in self._engines:
            self._engine(engine, runs_of)
        self._add(selftest_report.of_restarts(self.parts))
        self._on_gpus("memory", lambda: self._memory(runs_of))
        self._on_gpus("NCCL hang", lambda: self._drill("NCCL hang", "hang", "ddp", self._hanging))
        self._on_gpus("compare", self._compare)

    def report(self) -> None:
        """Write the report, and print a summary and its path."""
        told = selftest_report.nodes(self._facts, self._gpus)
        made = time.strftime("%Y-%m-%d", time.gmtime())
        text = selftest_report.to_json(metadata.version("nodekit"), made, told, self.parts, self._hide)
        for name, each in (("selftest.json", text), ("selftest.md", selftest_report.to_markdown(text))):
            write_private(str(self._folder / name), each.encode())
        print()
        width = max((len(part.name) for part in self.parts), default=0)
        for part in self.parts:
            print(f"{part.name.ljust(width)}  {part.outcome:<9}  {part.text.splitlines()[0]}")
        counts = [
            f"{number} {outcome}"
            for outcome in ("passed", "failed", "not tried")
            if (number := sum(part.outcome == outcome for part in self.parts))
        ]
        print(f"\n{', '.join(counts) or 'nothing was tried'}")
        print(
            f"the report, to send: {self._folder / 'selftest.md'} and selftest.json. {selftest_report.WHAT_IS_IN_IT}"
        )
        print(f"each part's whole output lies beside it, and is not to be sent: {self._folder}", flush=True)

    # --- the parts ---

    def _on_gpus(self, name: str, part: Callable[[], object]) -> None:
        if self._have_gpus:
            part()
        else:
            self._add(Part(name=name, outcome="not tried", text=NO_GPU))

    def _check(self) -> None:
        done = self._kit("check", ["check", str(self._copy), "--json", *self._ssh])
        found = done.json or {"findings": []}
        bad = [each for each in found["findings"] if each["level"] != "ok"]
        words = [f"{each['check']}: {each['found']}" for each in bad if each["level"] == "failure"]
        text = f"a job can run there; {count(len(bad), 'warning')}"
        keys = ("check", "host", "level", "found", "wanted")
        values = {"findings": [{key: each[key] for key in keys} for each in bad]}
        self._add_done("check", done, text, values, why="; ".join(words))

    def _network(self) -> None:
        limits = ["--seconds", "0.5", "--max-size", "256MiB", "--time-limit", "20"]
        done = self._kit("network", ["bench", str(self._copy), "--json", *limits, *self._ssh])
        found = done.json or {}
        values = {
            key: found[key] for key in ("pairs", "all_reduce", "slow", "notes", "problems") if key in found
        }
        best = max((each["busbw_bytes_per_s"] for each in found.get("all_reduce", ())), default=0.0)
        if reason := selftest_report.why_unmeasured(found):
            self._add(Part(name="network", outcome="not tried", text=reason))
            return
        text = f"all-reduce: {best / 1e9:.1f} GB/s at best (busbw)" if best else "the hosts' pairs alone"
        self._add_done("network", done, text, values, why="; ".join(found.get("problems", ())))

    def _engine(self, engine: str, runs_of: dict[str, str]) -> None:
        name = f"engine {engine}"
        modules = set.intersection(*(set(each.modules) for each in self._facts.values()))
        reason = lacking(engine, modules)
        if engine in ALONE:
            reason = "it is one process: kit compare tries it"
        elif engine == "horovod" and self._have_gpus:
            reason = "kit's build of it has no GPU operations"
        if reason:
            self._add(Part(name=name, outcome="not tried", text=reason))
        elif run_id := self._drill(name, "worker", engine, self._copy):
            runs_of[engine] = run_id

    def _drill(self, name: str, fault: str, engine: str, inventory: Path) -> str:
        """Run the drill of one fault; return the id of the run with the fault, "" if there was none."""
        command = [*_TRAINING, "--engine", engine]
        done = self._kit(name, ["drill", str(inventory), fault, "--json", *self._ssh, "--", *command])
        if not done.json:
            self._add_done(name, done, "")
            return ""
        result = done.json[0]
        found: list[events.Event] = []
        with contextlib.suppress(KitError):
            found = events.read(find_runs.find(result["run"]).folder) if result["run"] else []
        phases, stayed = {}, None
        if result["struck_at"] is not None:
            phases = selftest_report.phases(found, result["struck_at"], result["resumed_s"])
            if ENGINES[engine].reforms and result["world_sizes"][:1] > [1]:
                stayed = selftest_report.stayed(found, result["struck_at"])
        self._add(selftest_report.of_drill(name, result, phases, done.seconds, stayed=stayed))
        return str(result["run"])

    def _memory(self, runs_of: Mapping[str, str]) -> None:
        lines: dict[str, list[str]] = {}
        for engine, run_id in runs_of.items():
            done = self._kit(
                "memory", ["logs", run_id, "--json", "--grep", f"^{MEMORY_MARK}", *self._ssh], is_silent=True
            )
            lines[engine] = [json.loads(line)["text"] for line in done.out.splitlines()]
        self._add(selftest_report.of_memory(lines))

    def _compare(self) -> None:
        local = [
            host for host in self._inventory.hosts if host.connection == "local" and self._gpus[host.name]
        ]
        if not local:
            text = "this machine is not one of the hosts: kit compare on one of them trains by every engine there"
            self._add(Part(name="compare", outcome="not tried", text=text))
            return
        output, rows = self._folder / "compare", []
        argv = ["compare", "--engines", "single,dp,ddp,ddp:bf16", "-o", str(output)]
        done = self._kit("compare", argv, for_people=True)
        with (
            contextlib.suppress(OSError),
            (output / "compare.csv").open(encoding="utf-8", newline="") as file,
        ):
            rows = list(csv.DictReader(file))
        text = "; ".join(
            f"{row['engine']} × {row['ranks']}: {float(row['samples_per_s']):,.0f} samples/s"
            for row in rows
            if row["samples_per_s"]
        )
        self._add_done("compare", done, text, {"rows": rows})

    # --- running them ---

    def _add_done(
        self, name: str, done: Done, text: str, values: Mapping[str, Any] | None = None, *, why: str = ""
    ) -> None:
        """Add a command's result: `text` if it succeeded, else `why`, or else its last words."""
        is_good = not done.code and bool(text)
        self._add(
            Part(
                name=name,
                outcome="passed" if is_good else "failed",
                text=text if is_good else why or done.last_words,
                seconds=done.seconds,
                values=values or {},
            )
        )

    def _add(self, part: Part) -> None:
        self.parts.append(part)
        print(f"{part.name}: {part.outcome}: {part.text}", flush=True)

    def _kit(
        self, name: str, argv: Sequence[str], *, is_silent: bool = False, for_people: bool = False
    ) -> Done:
        if not is_silent:
            print(f"{name} …", flush=True)
        log = self._folder / f"{name.replace(' ', '-')}.log"
        show = None if is_silent else lambda line: print(f"  {line}", flush=True)
        return selftest_command.run(argv, log, show, for_people=for_people)


def _refuse_engines(names: Sequence[str]) -> None:
    for name in names:
        if name not in ENGINES:
            near = get_close_matches(name, ENGINES, n=1)
            raise KitError(
                f"--engines: {name}: no such engine" + (f"; did you mean {near[0]}?" if near else ""),
                wanted=f"of {', '.join(ENGINES)}",
            )


def _facts(inventory: Inventory, ssh: SshOptions) -> dict[str, Facts]:
    """Gather the facts of all hosts.

    Raises:
        KitError: some hosts gave no answer; one line for each.
    """
    peers = cluster.peer_addresses(inventory.hosts)
    with cluster.channels(inventory.hosts, ssh) as channels:
        check.enter_what_is_there(channels, inventory)
        found = check.gather(channels, inventory, peers=peers)
    return {host.name: found[host.name] for host in inventory.hosts}
