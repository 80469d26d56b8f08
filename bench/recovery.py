"""Time from a fault to the next trained step on three hosts: kit, torchrun stock and tuned, ft_launcher, torchft."""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import no_fault
import peers
import storm
from rounds import Bench, BenchError, bench, machine, median, note, table
from sessions import (
    ATTEMPTS_JOB,
    JOB,
    MIN_NODES,
    RESILIENT,
    TASK,
    TORCHFT_JOB,
    TUNED_CONF,
    TUNED_ENV,
    ByHand,
    Kit,
    KitAttempts,
    KitModule,
    KitModuleRestarted,
    Resilient,
    Session,
    TorchFT,
    Tuned,
    wait_for,
)

Line = Mapping[str, Any]

NUM_HOSTS = 3
KIT = "kit up"
MODULE = f"{KIT}, module"
VICTIM = "node2"
START_TIMEOUT_S = 60.0
TRAIN_S = 2.0  # before each fault: enough for some snapshots
WHOLE_AGAIN_S = 3.0
STEADY_STEPS = 10  # a world that makes fewer steps has not recovered
GOAL_PAUSE_S = 3.0
GOAL_LOST = 25  # the snapshot interval of recovery_job, in steps
KEPT_GOAL_PAUSE_S = 0.09  # of this, a step takes 0.03 s, and the transfer 0.01 s
DESCRIPTION = """\
How long it takes from a fault to the next trained step, on three hosts of a lab on this machine (network namespaces
with real sshd), one worker each: the same DDP script (20 ms a step, a snapshot every 25 steps on each node's own
disk), of 2 to 3 nodes, under

  kit up              as it comes
  kit up, run_attempts   the same loop within nodekit.training.run_attempts, whose ranks keep their processes
  kit up, module         kit's own training module, whose ranks keep their processes and their step
  kit up, module restarted  the same with --on-lost-rank restart
  torchrun, stock     by hand over ssh, c10d rendezvous
  torchrun, tuned     the same with {env}
                      and --rdzv-conf {conf}
  ft_launcher         of NVIDIA's resiliency extension, tuned, and told of every step by the script
  torchft             its DDP and its lighthouse (on the first host), tuned; no snapshots, it copies the state

They take turns, round by round. Counted is to the first step that all ranks of a newly met world have made, if it goes
on. "In NCCL": the other ranks spin, ignore SIGTERM and see no connection end. What a contestant (other than kit) does
not recover from is not tried again in later rounds.
The tables are for the README and docs/recovery.md.
"""
EPILOG = """\
examples:
  bench/recovery                               3 rounds: 10 minutes, and 7 more with the peers
  bench/recovery --install-peers               install ft_launcher and torchft first, into {venv}
  bench/recovery --only kit --faults cut --rounds 1 --timeline
  bench/recovery --gb 3 --faults worker        large processes: the kernel takes 0.1 s to take back 1 GB
  bench/recovery --storm 1000                  half an hour: what so many lost ranks cost and leave behind
  bench/recovery --no-fault 3600               an hour on a busy machine: whether a node counts as lost that is not

It needs root (for the lab). Exit status: 0 unless kit did not recover; a goal that is missed is no error. That of
--storm is 1, too, where a step was lost, the weights at the end differ, or something grew by a tenth; that of
--no-fault where something counted as lost.
"""


@dataclass(frozen=True)
class Fault:
    """A fault that can be inflicted on a job."""

    title: str
    goal_s: float
    happen: Callable[[Session], float]
    """Inflicts the fault; returns when."""
    is_return: bool = False
    kept_goal_s: float | None = None
    """The goal where ranks keep their step."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One fault and its outcome."""

    seconds: float | None
    """Seconds to the next trained step; None: not in time."""
    why: str = ""
    lost: int = 0
    """Steps that were made before the fault and again after it."""
    pause_s: float = 0.0
    """Seconds from the last step of a world to the first step of the next, summed over all worlds since the fault."""
    size: int = 0
    """Size of the world that goes on."""
    num_met: int = 0
    """Number of rendezvous until then."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Kit's milestones, in seconds after the fault."""


# --- reading what the ranks wrote; pure ---------------------------------------------------------------------


def judge(lines: Iterable[Line], fault_s: float, *, host: str | None = None) -> Trial | None:
    """Return the outcome of a fault; None if there is no steady new world yet.

    Args:
        lines: of all ranks.
        fault_s: when it happened.
        host: a host that must be part of the new world.
    """
    starts: dict[int, list[Line]] = {}
    steps: dict[int, list[Line]] = {}
    for line in lines:
        (steps if "time" in line else starts).setdefault(line["world"], []).append(line)
    old = {world for world, made in steps.items() if min(line["time"] for line in made) <= fault_s}
    new = {world for world in starts if world not in old}
    done = {world: first for world in new if (first := _first_step(steps.get(world, []), host)) is not None}
    if not done:
        return None
    world = min(done, key=lambda each: done[each])
    before = [line["step"] for each, made in steps.items() if each != world for line in made]
    resumed_at = min(line["step"] for line in starts[world])
    times = sorted((line["time"], each) for each, made in steps.items() for line in made)
    since = max((time for time, _ in times if time <= fault_s), default=fault_s)
    during = [(time, each) for time, each in times if since <= time <= done[world]]
    pauses = [end - start for (start, a), (end, b) in itertools.pairwise(during) if a != b]
    return Trial(
        seconds=done[world] - fault_s,
        lost=max(0, max(before, default=0) - resumed_at),
        pause_s=sum(pauses),
        size=starts[world][0]["size"],
        num_met=sum(min(line["resumed"] for line in starts[each]) <= done[world] for each in new),
        phases=_start_phases(starts[world], fault_s, done[world]),
    )


def _first_step(made: Sequence[Line], host: str | None) -> float | None:
    """Return when all ranks of a world had made its first step; None if it did not go on from there."""
    if not made or (host is not None and all(line["host"] != host for line in made)):
        return None
    first: dict[int, float] = {}
    for line in made:
        first[line["rank"]] = min(first.get(line["rank"], line["time"]), line["time"])
    steps = {line["step"] for line in made}
    if len(first) < made[0]["size"] or max(steps) - min(steps) < STEADY_STEPS:
        return None
    return max(first.values())


def _start_phases(starts: Sequence[Line], fault_s: float, done_s: float) -> dict[str, float]:
    marks = {key: max(line[key] for line in starts) - fault_s for key in ("first_line", "imported")}
    return {**marks, "joined": max(line["joined"] for line in starts) - fault_s, "stepped": done_s - fault_s}


def kit_phases(history: Iterable[Line], fault_s: float, end_s: float) -> dict[str, float]:
    """Return when kit had reached its milestones between a fault and a step, in seconds after the fault."""
    during = [event for event in history if fault_s < event["time"] <= end_s]

    def moments(*kinds: str) -> list[float]:
        return [event["time"] - fault_s for event in during if event["kind"] in kinds]

    marks = {
        "noticed": moments("worker-failed", "membership", "store-lost")[:1],
        "fenced": moments("fence")[-1:],
        "new generation": moments("generation")[-1:],
        "agent there": moments("agent-started")[-1:],
        "old workers ended": moments("worker-failed", "membership", "store-lost")[-1:],
        "met": moments("rendezvous")[-1:],
        "forked": moments("workers-started")[-1:],
    }
    return {name: found[0] for name, found in marks.items() if found}


# --- faults -------------------------------------------------------------------------------------------------


def _kill_worker(session: Session) -> float:
    return session.kill_worker(VICTIM)


def _kill_worker_in_nccl(session: Session) -> float:
    session.have_others_wait_as_in_nccl(VICTIM)
    return session.kill_worker(VICTIM)


def _crash(session: Session, host: str) -> float:
    when = time.time()
    session.bench.lab.crash(host)
    return when


def _cut(session: Session, host: str) -> float:
    when = time.time()
    session.bench.lab.cut(host)
    return when


def _return(session: Session) -> float:
    """Start a crashed host again; the time counts from when its sshd listens."""
    session.bench.lab.revive(VICTIM)
    when = time.time()
    session.came_back(VICTIM)
    return when


FAULTS = {
    "worker": Fault("a worker killed", 3.0, _kill_worker, kept_goal_s=0.15),
    "nccl": Fault("a worker killed, the others in NCCL", 1.0, _kill_worker_in_nccl),
    "crash": Fault("a node crashes", 4.0, lambda session: _crash(session, VICTIM), kept_goal_s=0.3),
    "return": Fault("the node is back", 8.0, _return, is_return=True),
    # kit should notice it within 2.5 s
    "cut": Fault("a node's cable is cut", 6.0, lambda session: _cut(session, VICTIM), kept_goal_s=2.6),
    "host-crash": Fault(
        "the rendezvous host crashes",
        8.0,
        lambda session: _crash(session, session.rendezvous_host),
        kept_goal_s=0.5,
    ),
    "host-cut": Fault(
        "the rendezvous host's cable is cut",
        10.0,
        lambda session: _cut(session, session.rendezvous_host),
        kept_goal_s=3.0,
    ),
}


class Turn:
    """One contestant's turn in a round: all faults, in one session for as long as that is healthy."""

    def __init__(self, name: str, make: Callable[[], Session], cap_s: float, *, timeline: bool) -> None:
        self._name = name
        self._make = make
        self._cap_s = cap_s
        self._timeline = timeline
        self._session: Session | None = None

    def run(self, faults: Sequence[str]) -> dict[str, Trial]:
        """Inflict the faults in this order; `return` is possible only after a crash."""
        trials: dict[str, Trial] = {}
        try:
            for key in faults:
                try:
                    if FAULTS[key].is_return:
                        self._provide_crashed(after_crash="crash" in trials)
                    else:
                        self._provide_whole()
                    trials[key] = self._hit(FAULTS[key])
                except BenchError as error:
                    note(f"{self._name}: {error}")
                    self._end()
                    trials[key] = Trial(seconds=None, why="did not start")
                note(f"  {self._name:<18} {FAULTS[key].title:<34} {shown(trials[key], self._cap_s)}")
        finally:
            self._end()
        return trials

    def _provide_whole(self) -> None:
        if self._session is not None:
            session = self._session
            if wait_for(lambda: _is_whole(session), timeout_s=WHOLE_AGAIN_S):
                time.sleep(TRAIN_S)
                if _is_whole(session):
                    return
            self._end()
        self._session = session = self._make()
        session.start()
        wait_for(lambda: _is_whole(session) or session.has_ended, timeout_s=START_TIMEOUT_S)
        if not _is_whole(session):
            raise BenchError(f"not in training after {START_TIMEOUT_S:.0f} s; {_tail(session)}")
        time.sleep(TRAIN_S)

    def _provide_crashed(self, *, after_crash: bool) -> None:
        if after_crash and self._session is not None:
            time.sleep(TRAIN_S)
            return
        self._provide_whole()
        self._hit(FAULTS["crash"])
        time.sleep(TRAIN_S)

    def _hit(self, fault: Fault) -> Trial:
        session = self._session
        assert session is not None
        fault_s = fault.happen(session)
        found: Trial | None = None
        host = VICTIM if fault.is_return else None
        while (found := judge(session.read(), fault_s, host=host)) is None:
            if session.has_ended:
                found = Trial(seconds=None, why=f"it ended after {time.time() - fault_s:.0f} s")
                break
            if time.time() - fault_s > self._cap_s:
                found = Trial(seconds=None, why=f"not in {self._cap_s:.0f} s")
                break
            time.sleep(0.05)
        history = session.history()
        end_s = fault_s + (self._cap_s if found.seconds is None else found.seconds)
        if history and (self._timeline or found.seconds is None):
            note(
                f"--- {self._name}, {fault.title}, {shown(found, self._cap_s)}:\n{told(history, fault_s, end_s)}"
            )
        if history and found.seconds is None:
            note(_tail(session))
        if not history or found.seconds is None:
            return found
        phases = {**kit_phases(history, fault_s, end_s), **found.phases}
        return Trial(**{**vars(found), "phases": phases})

    def _end(self) -> None:
        if self._session is not None:
            self._session.end()
        self._session = None


def _is_whole(session: Session) -> bool:
    """Whether all hosts are training in the same world."""
    now = time.time()
    recent = [line for line in session.read() if "time" in line and line["time"] > now - 0.5]
    return (
        len({line["host"] for line in recent}) == NUM_HOSTS and len({line["world"] for line in recent}) == 1
    )


def _tail(session: Session) -> str:
    lines = session.output.read_text(errors="replace").splitlines()[-25:]
    return "its last words:\n" + "\n".join(f"    {line}" for line in lines)


def told(history: Iterable[Line], fault_s: float, end_s: float) -> str:
    """Return kit's events around a fault, as text."""
    lines = []
    for event in history:
        if not fault_s - 0.5 < event["time"] < end_s + 1.0:
            continue
        where = event["node"] or f"kit → {event['about']}" if event.get("about") else event["node"] or "kit"
        more = {
            key: value
            for key, value in event.items()
            if key not in ("run", "time", "node", "kind", "about", "workers", "log", "error")
        }
        more.update({"error": event["error"].strip().splitlines()[-1:]} if event.get("error") else {})
        lines.append(f"    {event['time'] - fault_s:+7.2f}  {where:<12} {event['kind']:<16} {more}")
    return "\n".join(lines)


def shown(trial: Trial, cap_s: float) -> str:
    """Format one trial as a line."""
    if trial.seconds is None:
        return trial.why or f"not in {cap_s:.0f} s"
    return (
        f"{trial.seconds:6.2f} s, world of {trial.size}, {trial.lost} steps lost, paused {trial.pause_s:.2f} s"
        + (f", met {trial.num_met} times" if trial.num_met > 1 else "")
    )


# --- tables -------------------------------------------------------------------------------------------------

Results = Mapping[str, Mapping[str, Sequence[Trial]]]
"""Contestant → fault → its trials."""


def times_table(results: Results) -> str:
    """Return the table of medians and ranges, and of the others' pause when a node returns."""
    faults = [key for key in FAULTS if any(key in by_fault for by_fault in results.values())]
    rows = []
    for key in faults:
        rows.append([FAULTS[key].title, *(_times(found.get(key, ())) for found in results.values())])
        if FAULTS[key].is_return:
            pauses = [_range([t.pause_s for t in _good(found.get(key, ()))]) for found in results.values()]
            rows.append(["  the others' pause", *pauses])
    return table(["seconds to the next trained step", *results], rows)


def _good(trials: Iterable[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.seconds is not None]


def _range(values: Sequence[float], digits: int | None = None) -> str:
    """Format the median and the range, with one decimal, or two below one."""
    if not values:
        return "–"
    if digits is None:
        digits = 2 if median(values) < 1 else 1
    middle = f"{median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def _times(trials: Sequence[Trial]) -> str:
    good = _good(trials)
    if not trials:
        return "–"
    if not good:
        return trials[0].why
    times = _range([trial.seconds for trial in good if trial.seconds is not None])
    return times if len(good) == len(trials) else f"{times}, {len(good)} of {len(trials)}"


def lost_table(results: Results) -> str:
    """Return the table of repeated steps."""
    faults = [key for key in FAULTS if any(key in by_fault for by_fault in results.values())]
    rows = [
        [
            FAULTS[key].title,
            *(_range([t.lost for t in _good(found.get(key, ()))], digits=0) for found in results.values()),
        ]
        for key in faults
    ]
    return table(["steps lost", *results], rows)


def phases_table(by_fault: Mapping[str, Sequence[Trial]]) -> str:
    """Return the table of kit's milestones: the median time of each."""
    words = {
        "noticed": "first notice",
        "fenced": "fence sent",
        "new generation": "new generation",
        "agent there": "agent started",
        "old workers ended": "all old workers ended",
        "met": "met",
        "forked": "forked",
        "first_line": "script begins",
        "imported": "imported",
        "joined": "process group",
        "stepped": "first step",
    }
    rows = []
    for phase, said in words.items():
        cells = []
        for trials in by_fault.values():
            found = [trial.phases[phase] for trial in _good(trials) if phase in trial.phases]
            cells.append(f"{median(found):.2f}" if found else "–")
        rows.append([said, *cells])
    return table(["over at, seconds after", *(FAULTS[key].title for key in by_fault)], rows)


def goals(by_fault: Mapping[str, Sequence[Trial]], *, are_kept: bool = False) -> str:
    """Return which of kit's goals are met, by the medians, and in how many trials it recovered.

    `are_kept`: use the goals for ranks that keep their step.
    """
    lines = []
    for key, trials in by_fault.items():
        good, fault = _good(trials), FAULTS[key]
        seconds = [trial.seconds for trial in good if trial.seconds is not None]
        said = [f"recovered {len(good)} of {len(trials)}"]
        goal_s = fault.kept_goal_s if are_kept else fault.goal_s
        if good:
            lost, pause_s = max(trial.lost for trial in good), median([trial.pause_s for trial in good])
            if goal_s is not None:
                said.append(_goal("", median(seconds), goal_s, "s"))
            said.append(_goal("steps lost at most ", lost, 0 if are_kept else GOAL_LOST, ""))
            if fault.is_return:
                said.append(_goal("pause ", pause_s, KEPT_GOAL_PAUSE_S if are_kept else GOAL_PAUSE_S, "s"))
        lines.append(f"{fault.title}: {'; '.join(said)}")
    return "\n".join(lines)


def _goal(what: str, value: float, goal: float, unit: str) -> str:
    number = f"{value:.2f} {unit}" if unit else f"{value:.0f}"
    return (
        f"{what}{number}, goal ≤ {goal:g}{' ' + unit if unit else ''}: {'met' if value <= goal else 'MISSED'}"
    )


# --- the whole ----------------------------------------------------------------------------------------------


def contestants(lab: Bench, job: Path) -> tuple[dict[str, Callable[[], Session]], dict[str, str]]:
    """Return name → how to make a session, and name → why a contestant is not available."""
    found: dict[str, Callable[[], Session]] = {
        KIT: lambda: Kit(lab, job),
        f"{KIT}, run_attempts": lambda: KitAttempts(lab, job),
        MODULE: lambda: KitModule(lab, job),
        f"{KIT}, module restarted": lambda: KitModuleRestarted(lab, job),
        "torchrun, tuned": lambda: Tuned(lab, job),
        "torchrun, stock": lambda: ByHand(lab, job),
    }
    absent: dict[str, str] = {}
    for command, package, session in (("ft_launcher", RESILIENT, Resilient), ("torchft", "torchft", TorchFT)):
        if (version := peers.version(package, peers.RESILIENT_VENV)) is None:
            absent[f"{command} ({package})"] = "not installed (--install-peers)"
        else:
            found[f"{command} {version}"] = functools.partial(session, lab, job)
    return found, absent


def main() -> int:
    """Run the benchmark, and print the tables."""
    args = _arguments()
    if os.geteuid() != 0:
        sys.exit("bench/recovery: the lab needs root")
    if args.install_peers:
        peers.install(peers.RESILIENT_VENV, peers.RESILIENT_PACKAGES, peers.RESILIENT_NEEDED)

    def prepare(shared: Path) -> None:
        (shared / "job").mkdir()
        for name in (JOB, ATTEMPTS_JOB, TASK, TORCHFT_JOB):
            shutil.copyfile(Path(__file__).with_name(name), shared / "job" / name)
        (shared / "job" / "bytes").write_text(str(int(args.gb * 1e9)))

    if args.storm:
        with bench(NUM_HOSTS, prepare) as lab:
            outcome = storm.run(lab, lab.shared / "job", args.storm, args.seed, judge, args.cap)
        print(storm.told(outcome))
        return 1 if storm.faults_of(outcome) else 0
    if args.no_fault:
        with bench(NUM_HOSTS, prepare) as lab:
            calm = no_fault.run(lab, lab.shared / "job", args.no_fault)
        print(no_fault.told(calm))
        return 1 if calm.alarms else 0
    results: dict[str, dict[str, list[Trial]]] = {}
    begin = time.monotonic()
    with bench(NUM_HOSTS, prepare) as lab:
        every, absent = contestants(lab, lab.shared / "job")
        chosen = {name: make for name, make in every.items() if any(w in name for w in args.only.split(","))}
        wanted = args.faults.split(",") if args.faults else list(FAULTS)
        for number in range(args.rounds):
            note(f"round {number + 1}")
            for name in list(chosen)[:: -1 if number % 2 else 1]:
                so_far = results.setdefault(name, {})
                hopeless = {key for key, trials in so_far.items() if not _good(trials)}
                faults = [key for key in FAULTS if key in wanted and (name == KIT or key not in hopeless)]
                if name.startswith((f"{KIT},", "torchft")):  # these do not imitate NCCL
                    faults = [key for key in faults if key != "nccl"]
                turn = Turn(name, chosen[name], args.cap, timeline=args.timeline)
                for key, trial in turn.run(faults).items():
                    so_far.setdefault(key, []).append(trial)
    results = {name: results[name] for name in chosen if name in results}
    print(
        f"Fault to next trained step, {NUM_HOSTS} hosts of which {MIN_NODES} suffice; medians (ranges) of "
        f"{args.rounds} rounds, interleaved, in {(time.monotonic() - begin) / 60:.0f} min; {machine()}.\n"
    )
    print(times_table(results))
    for name, why in absent.items():
        print(f"\n{name}: {why}")
    print(f"\n{lost_table(results)}")
    if kept := results.get(MODULE):
        print(f"\nGoals where ranks keep their step ({MODULE}):\n\n{goals(kept, are_kept=True)}")
    mine = results.get(KIT, {})
    if mine:
        print(f"\nWhere kit's time goes, medians:\n\n{phases_table(mine)}\n\n{goals(mine)}")
    return 0 if all(_good(trials) == trials for trials in mine.values()) else 1


def _arguments() -> argparse.Namespace:
    env = " ".join(f"{name}={value}" for name, value in TUNED_ENV.items())
    parser = argparse.ArgumentParser(
        prog="bench/recovery",
        description=DESCRIPTION.format(env=env, conf=TUNED_CONF),
        epilog=EPILOG.format(venv=peers.RESILIENT_VENV),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often each is hit (3)")
    parser.add_argument(
        "--cap", type=float, default=30.0, metavar="S", help="how long a recovery is waited for (30)"
    )
    parser.add_argument(
        "--only", default="", metavar="A,B", help="those with one of these words in their names"
    )
    parser.add_argument("--faults", default="", metavar="A,B", help=f"of {', '.join(FAULTS)}; all")
    parser.add_argument(
        "--storm",
        type=int,
        default=0,
        metavar="N",
        help="instead: N lost ranks in one run, two at once now and then",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="which ranks --storm kills, and when (0)"
    )
    parser.add_argument(
        "--no-fault",
        type=float,
        default=0.0,
        metavar="S",
        help="instead: train for so long beside ten busy processes per core, and count false alarms",
    )
    parser.add_argument(
        "--gb",
        type=float,
        default=0.0,
        metavar="N",
        help="memory that each rank has besides until it is lost, in GB (0)",
    )
    parser.add_argument("--timeline", action="store_true", help="print kit's events around each fault")
    parser.add_argument("--install-peers", action="store_true", help="install ft_launcher and torchft first")
    args = parser.parse_args()
    if unknown := set(filter(None, args.faults.split(","))) - set(FAULTS):
        parser.error(f"no such fault: {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
