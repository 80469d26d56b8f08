"""bench/recovery --storm: many losses of ranks in one run of kit's training module, and what they leave behind."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rounds import Bench, BenchError, median, note, table
from sessions import KitModule, wait_for

STEPS_A_FAULT = 20
"""Average number of steps between two faults; a rank makes 15 steps per epoch."""
STEPS_AN_EPOCH = 15
TWO_AT_ONCE = 0.1
"""Share of the faults that hit two ranks."""
KEPT_LINES = 600
START_TIMEOUT_S, END_TIMEOUT_S = 60.0, 120.0
ROLES = ("agent", "fork server", "rank")
MOST_GROWTH = 1.1


class Storm(KitModule):
    """kit's training module for a fixed number of steps, with the other sessions' step time."""

    def __init__(self, lab: Bench, job: Path, num_faults: int, *, step_s: float) -> None:
        super().__init__(lab, job)
        self.num_steps = STEPS_AN_EPOCH * (1 + (num_faults + 1) * STEPS_A_FAULT // STEPS_AN_EPOCH)
        at = self.command.index("--epochs") + 1
        self.command = (*self.command[:at], str(self.num_steps // STEPS_AN_EPOCH), *self.command[at + 1 :])
        self.env = {"BENCH_STEP_S": str(step_s)}

    def step(self) -> int:
        """Return the newest step that a rank has made."""
        lines = self.read()
        del lines[:-KEPT_LINES]  # a thousand faults write a million lines
        return max((line["step"] for line in lines if "time" in line), default=0)

    def weights(self) -> str:
        """Return the hash of the final weights, which is the same on all nodes."""
        run = json.loads((self._run_folder / "run.json").read_text())
        (found,) = {
            json.loads(self.bench.upper(name, f"{node['node_dir']}/output/result.json").read_text())[
                "weights_sha256"
            ]
            for name, node in run["nodes"].items()
        }
        return str(found)


@dataclass(frozen=True)
class Use:
    """Resources that a process uses."""

    megabytes: float
    threads: int
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> Use:
        """Read a process's usage from /proc."""
        status = Path(f"/proc/{pid}/status").read_text()
        found = {key: int(value) for key, value in re.findall(r"^(\w+):\s+(\d+)", status, re.MULTILINE)}
        return cls(found["VmRSS"] / 1024, found["Threads"], len(list(Path(f"/proc/{pid}/fd").iterdir())))


@dataclass
class Outcome:
    """The outcome of all faults."""

    seconds: list[float] = field(default_factory=list)
    """Seconds to the next step of a new world, for each fault with a recovery."""
    lost: list[int] = field(default_factory=list)
    """Steps that were repeated, for each fault."""
    num_faults: int = 0
    num_steps: int = 0
    are_equal: bool = False
    """Whether the final weights equal those of the run without a fault."""
    uses: list[dict[str, Use]] = field(default_factory=list)
    """Samples: role → the greatest usage by a process of that role on any host."""


def uses(lab: Bench) -> dict[str, Use]:
    """Return role → the greatest usage of any host; roles are agents, fork servers and ranks."""
    found: dict[str, list[Use]] = {role: [] for role in ROLES}
    for host in lab.lab.hosts:
        kits = {
            pid
            for pid, argv in lab.lab.processes(host).items()
            if "nodekit.deploy.agent" in argv or "nodekit.training" in argv
        }
        for pid in kits:
            with contextlib.suppress(OSError, KeyError):  # the process has ended meanwhile
                depth, parent = 0, _parent(pid)
                while parent in kits:
                    depth, parent = depth + 1, _parent(parent)
                if depth < len(ROLES):
                    found[ROLES[depth]].append(Use.of(pid))
    return {
        role: Use(*(max(getattr(each, name) for each in several) for name in Use.__dataclass_fields__))
        for role, several in found.items()
        if several
    }


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def newest_world(lines: Iterable[Mapping[str, Any]]) -> tuple[Any, int]:
    """Return the world of the newest step, and its size."""
    line = max((line for line in lines if "time" in line), key=lambda line: float(line["time"]))
    return line["world"], int(line["size"])


def run(lab: Bench, job: Path, num_faults: int, seed: int, judge: Any, cap_s: float) -> Outcome:
    """Run with the faults, and then the same without any."""
    rng = random.Random(seed)  # chooses the ranks to kill
    session = Storm(lab, job, num_faults, step_s=0.02)
    outcome = Outcome(num_steps=session.num_steps)
    session.start()
    try:
        if not wait_for(lambda: session.step() > 0, timeout_s=START_TIMEOUT_S):
            raise BenchError("the storm's run has not begun")
        at = 0
        while outcome.num_faults < num_faults and not session.has_ended:
            at += rng.randint(STEPS_A_FAULT // 2, STEPS_A_FAULT * 3 // 2)
            if not wait_for(lambda: session.step() >= at, timeout_s=END_TIMEOUT_S):  # noqa: B023
                raise BenchError(
                    f"no step {at} after {outcome.num_faults} faults: {session.output.read_text()[-2000:]}"
                )
            if max(at, session.step()) > session.num_steps - STEPS_A_FAULT:
                break
            _strike(session, rng, outcome, judge, cap_s)
            if outcome.num_faults % max(1, num_faults // 20) == 0:
                outcome.uses.append(uses(lab))
                note(f"  {outcome.num_faults} faults, step {session.step()}; {_brief(outcome.uses[-1])}")
        if not wait_for(lambda: session.has_ended, timeout_s=END_TIMEOUT_S + session.num_steps * 0.03):
            raise BenchError("the storm's run does not end")
        weights = session.weights()
    finally:
        session.end()
    note("the same steps without a fault")
    calm = Storm(lab, job, num_faults, step_s=0.0)
    calm.start()
    try:
        if not wait_for(lambda: calm.has_ended, timeout_s=END_TIMEOUT_S + calm.num_steps * 0.05):
            raise BenchError("the run without a fault does not end")
        outcome.are_equal = weights == calm.weights()
    finally:
        calm.end()
    return outcome


def _strike(session: Storm, rng: random.Random, outcome: Outcome, judge: Any, cap_s: float) -> None:
    hosts = list(session.bench.lab.hosts)
    victims = rng.sample(hosts, 2 if rng.random() < TWO_AT_ONCE else 1)
    when = min(session.kill_worker(host) for host in victims)
    outcome.num_faults += 1
    deadline = time.monotonic() + cap_s
    while (trial := judge(session.read(), when)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if trial is None:
        note(f"  fault {outcome.num_faults} ({', '.join(victims)}): no new world after {cap_s:.0f} s")
        return
    outcome.seconds.append(trial.seconds)
    outcome.lost.append(trial.lost)


def _brief(use: Mapping[str, Use]) -> str:
    return "; ".join(
        f"{role} {each.megabytes:.0f} MB, {each.threads} threads, {each.descriptors} descriptors"
        for role, each in use.items()
    )


def told(outcome: Outcome) -> str:
    """Format the outcome for printing."""
    seconds = sorted(outcome.seconds)
    said = [
        f"{outcome.num_faults} faults in one run of {outcome.num_steps} steps; recovered from {len(seconds)}"
    ]
    if seconds:
        said += [
            f"seconds to the next step: median {median(seconds):.2f}, "
            f"95 % {seconds[len(seconds) * 95 // 100]:.2f}, most {seconds[-1]:.2f}",
            f"steps lost: {sum(outcome.lost)} in all, {max(outcome.lost)} at most",
        ]
    whose = "those" if outcome.are_equal else "NOT those"
    said.append(f"weights at the end: {whose} of the run without a fault, bit for bit")
    rows = [
        [what, f"{values[0]:.0f}", f"{max(values):.0f}", f"{values[-1]:.0f}"]
        for what, values in _had(outcome.uses).items()
    ]
    verdict = "\n".join(faults_of(outcome)) or "nothing was lost, and nothing grew by a tenth"
    return "\n".join(
        [*said, "", table(["of the host with most", "first", "most", "last"], rows), "", verdict]
    )


def faults_of(outcome: Outcome) -> list[str]:
    """Return what is not as it should be, a line for each."""
    found = []
    if missed := outcome.num_faults - len(outcome.seconds):
        found.append(f"NOT RECOVERED from {missed} faults")
    if sum(outcome.lost):
        found.append(f"{sum(outcome.lost)} STEPS LOST")
    if not outcome.are_equal:
        found.append("OTHER WEIGHTS at the end than without a fault")
    for what, values in _had(outcome.uses).items():
        if what in ("rank: threads", "rank: descriptors"):
            continue  # these grow with each attempt of a process, which takes part in at most 50
        first, second = values[: len(values) // 2], values[len(values) // 2 :]
        if first and max(second) > MOST_GROWTH * max(first):
            found.append(f"{what} GREW from {max(first):.0f} to {max(second):.0f}")
    return found


def _had(seen: Sequence[Mapping[str, Use]]) -> dict[str, list[float]]:
    """Return role and resource → its values over time."""
    found = {
        f"{role}: {name}": [float(getattr(each[role], name)) for each in seen if role in each]
        for role in ROLES
        for name in ("megabytes", "threads", "descriptors")
    }
    return {what: values for what, values in found.items() if values}
