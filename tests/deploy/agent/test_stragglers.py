"""Who makes the others wait is named, with the reason; equal hosts are never accused."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from agents import Agents, until

from nodekit.deploy.agent import straggler_watch
from nodekit.deploy.agent.stragglers import naming
from nodekit.deploy.agent.stragglers.measure import Measure
from nodekit.deploy.agent.stragglers.naming import NodeWindow, RankShare, name
from nodekit.deploy.agent.stragglers.sampled import Sampled, Sampler, shares_of

HOSTS, RANKS, WINDOW_S = 4, 2, 10.0


def windows(
    seed: int,
    *,
    factors: Mapping[int, float] | None = None,
    extra_s: Mapping[int, float] | None = None,
    step_s: float = 0.2,
    noise: float = 0.15,
    num_windows: int = naming.NUM_WINDOWS,
    num_hosts: int = HOSTS,
    **shares: float,
) -> list[dict[str, NodeWindow]]:
    """What nodes would measure of a job in which each step takes as long as its slowest rank.

    Args:
        seed: of the noise.
        factors: host → how much slower its ranks are.
        extra_s: rank → what it does besides in each step.
        step_s: the mean time of a rank's own work.
        noise: the standard deviation of the logarithm of that.
        num_windows: how many.
        num_hosts: of RANKS ranks each.
        shares: of the ranks of slow hosts, as ``starved``.
    """
    rng = random.Random(seed)
    found = []
    for number in range(num_windows):
        own = dict.fromkeys(range(num_hosts * RANKS), 0.0)
        total, num_steps = 0.0, 0
        while total < WINDOW_S:
            times = {
                rank: step_s * rng.lognormvariate(0, noise) * (factors or {}).get(rank // RANKS, 1.0)
                + (extra_s or {}).get(rank, 0.0)
                for rank in own
            }
            total, num_steps = total + max(times.values()), num_steps + 1
            for rank, time_s in times.items():
                own[rank] += time_s
        found.append(
            {
                f"n{host}": NodeWindow(
                    number,
                    {
                        rank: RankShare(
                            own[rank] / total,
                            step_s=total / num_steps,
                            **(shares if host in (factors or {}) else {}),
                        )
                        for rank in range(host * RANKS, (host + 1) * RANKS)
                    },
                )
                for host in range(num_hosts)
            }
        )
    return found


@pytest.mark.parametrize("num_hosts", [1, 2, 4, 16])
@pytest.mark.parametrize("step_s", [0.02, 0.2, 2.0])
def test_equal_hosts_are_never_accused(num_hosts: int, step_s: float) -> None:
    for seed in range(10):
        noise = random.Random(seed).choice((0.02, 0.1, 0.3))
        found = windows(seed, step_s=step_s, noise=noise, num_hosts=num_hosts)
        assert name(found) is None, (seed, noise)


def test_what_rank_0_does_besides_is_no_fault_of_its_host() -> None:
    """Between quick steps it writes the report."""
    for seed in range(20):
        assert name(windows(seed, step_s=0.005, extra_s={0: 0.003})) is None


@pytest.mark.parametrize("host", range(HOSTS))
@pytest.mark.parametrize("factor", [1.6, 2.0, 5.0])
def test_a_host_that_is_slower_is_named_whichever_it_is(host: int, factor: float) -> None:
    for seed in range(5):
        found = name(windows(seed, factors={host: factor}, noise=0.1, starved=0.45))
        assert found is not None
        assert (found.node, found.cause, found.is_of_the_host) == (f"n{host}", "cpu", True)
        assert found.ranks == (2 * host, 2 * host + 1)


def test_it_takes_as_long_as_it_is_sure_and_no_longer_than_a_minute() -> None:
    found = windows(1, factors={1: 2.0})
    assert name(found[:-1]) is None
    assert (naming.NUM_WINDOWS + 1) * WINDOW_S <= 60
    healthy = windows(2)
    assert name([*found[:2], healthy[0], *found[2:]]) is None, "not always: it may have been a save"
    assert name([*healthy, *found]) is not None


def test_two_slow_hosts_are_not_one() -> None:
    assert name(windows(1, factors={1: 3.0, 2: 3.0})) is None


def test_one_slow_rank_of_a_host_is_named_alone() -> None:
    found = name(windows(1, extra_s={3: 0.3}))
    assert found is not None
    assert (found.node, found.ranks, found.cause, found.is_of_the_host) == ("n1", (3,), "", False)
    assert found.line.startswith("rank 3 on n1 makes the others wait: they wait ")
    assert found.line.endswith("its own work takes longer, and neither its CPU nor its loader is the reason")


def test_the_reason_is_told() -> None:
    loader = name(windows(1, factors={2: 2.0}, loading=0.6))
    assert loader is not None
    assert (loader.cause, loader.is_of_the_host) == ("loader", False)
    assert "it waits for its data 60% of the time, the others 0%" in loader.line
    throttled = [
        {
            node: NodeWindow(own.number, own.ranks, clock=900.0 if node == "n2" else 1700.0)
            for node, own in window.items()
        }
        for window in windows(1, factors={2: 2.0})
    ]
    gpu = name(throttled)
    assert gpu is not None
    assert gpu.cause == "gpu"
    assert "its GPU runs at 900 MHz, those of the others at 1700" in gpu.line


def linked(
    queued: Mapping[tuple[str, str], float], own: float = 0.2, nodes: int = 3
) -> list[dict[str, NodeWindow]]:
    names = [f"n{number}" for number in range(nodes)]
    window = {
        node: NodeWindow(
            1,
            {number: RankShare(own)},
            {peer: queued.get((node, peer), 0.05) for peer in names if peer != node},
        )
        for number, node in enumerate(names)
    }
    return [window] * naming.NUM_WINDOWS


def test_a_slow_link_is_named_where_all_wait() -> None:
    found = name(linked({("n1", "n2"): 0.9}))
    assert found is not None
    assert (found.line, found.is_of_the_host) == (
        "the link from n1 to n2 makes all wait: data waits in it 90% of the time, in the others 5% at most",
        False,
    )
    found = name(linked({("n1", "n2"): 0.9, ("n0", "n1"): 0.8}))
    assert found is not None
    assert found.line.startswith("the link of n1 makes all wait")
    assert found.is_of_the_host
    found = name(linked({("n1", "n2"): 0.9, ("n2", "n1"): 0.8}))
    assert found is not None
    assert found.line.startswith("the link between n1 and n2 makes all wait")
    assert not found.is_of_the_host, "either end may be the reason"
    assert name(linked({("n1", "n2"): 0.9}, own=0.9)) is None, "they compute"
    assert name(linked({("n0", "n1"): 0.9, ("n1", "n2"): 0.9, ("n2", "n0"): 0.9})) is None, "all are as slow"
    assert name(linked({("n0", "n1"): 0.9, ("n1", "n2"): 0.4})) is None, "not clear"
    assert name(linked({("n0", "n1"): 0.9, ("n1", "n0"): 0.9}, nodes=2)) is None, (
        "there is no other to compare"
    )


def test_a_window_survives_json() -> None:
    (window,) = windows(1, num_windows=1)
    for own in window.values():
        assert NodeWindow.load(json.loads(json.dumps(own.to_json()))) == own


WORKS = "import time, sys\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass\n"
SLEEPS = "import time\ntime.sleep(60)\n"


def test_a_main_thread_that_works_is_told_from_one_that_waits(tmp_path: Path) -> None:
    begins = "print(flush=True)\n"
    processes = [
        subprocess.Popen([sys.executable, "-c", begins + code], stdout=subprocess.PIPE)
        for code in (WORKS, SLEEPS)
    ]
    try:
        for each in processes:
            assert each.stdout is not None
            each.stdout.readline()  # an interpreter's start is work
        measure = Measure({rank: each.pid for rank, each in enumerate(processes)}, tmp_path, {})

        def is_told() -> bool:
            time.sleep(0.3)
            shares = measure.window().ranks
            return shares[0].own > 0.6 > 0.4 > shares[1].own

        until(is_told, timeout_s=30, what="it")  # while the machine stands still, nobody works
        (tmp_path / ".waits0").write_text(
            '{"steps": 10, "seconds": 5.0, "waited_s": 1.0, "loading_s": 0.5}   '
        )
        assert 0 not in measure.window().ranks, "it speaks for itself from now on"
        (tmp_path / ".waits0").write_text(
            '{"steps": 20, "seconds": 7.0, "waited_s": 1.5, "loading_s": 1.5}   '
        )
        found = measure.window().ranks[0]
        assert (found.own, found.loading, found.step_s) == (0.75, 0.5, 0.2)
        assert 0 not in measure.window().ranks, "it makes no step"
    finally:
        for each in processes:
            each.kill()
            each.communicate()


def test_samples_say_what_a_spinning_thread_does(tmp_path: Path) -> None:
    job = tmp_path / "a b;c (d:1)" / "job.py"
    job.parent.mkdir()
    job.write_text("load()\nloss.item()\nloss.backward()\nstep()\n")
    loader = "_BaseDataLoaderIter.__next__ (/x/site-packages/torch/utils/data/dataloader.py:9)"
    reduce = "all_reduce (/x/site-packages/torch/distributed/distributed_c10d.py:9)"
    lines = [
        "py-spy> Sampling process 10 times a second",
        f"thread (7): MainThread;<module> ({job}:1);{loader};load ({job}:1) 10",
        f"thread (7): MainThread;<module> ({job}:2) 50",
        f"thread (7): MainThread;<module> ({job}:3) 10",
        f"thread (7): MainThread;<module> ({job}:4) 10",
        f"thread (7): MainThread;<module> ({job}:4);{reduce} 20",
        f"thread (8): Thread-1;run ({job}:4) 100",
    ]
    assert shares_of(lines, 7) == (0.3, 0.1)
    assert shares_of(lines, 9) is None
    before_311 = [line.replace("(7)", "(0x7F118)").replace("(8)", "(0x7F119)") for line in lines]
    assert shares_of(before_311, 7) == (0.3, 0.1)
    assert shares_of([f"thread (7): MainThread;<module> ({job}:4) 2"], 7) is None, "too few"


def test_on_gpus_a_rank_is_measured_by_its_samples_or_not_at_all(tmp_path: Path) -> None:
    found: dict[int, Sampled] = {}
    with subprocess.Popen([sys.executable, "-c", WORKS]) as process:
        measure = Measure(dict.fromkeys((0, 1), process.pid), tmp_path, {}, lambda: found)
        assert measure.window().ranks == {}, "it may spin"
        found[1] = Sampled(0.2, 0.1)
        ((rank, share),) = measure.window().ranks.items()
        assert (rank, share.own, share.loading) == (1, 0.2, 0.1)
        process.kill()


def test_without_py_spy_nothing_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    sampler = Sampler({0: os.getpid()}, python=str(tmp_path / "python"))
    sampler.begin(1.0)
    assert sampler.shares() == {}


SPINS_PY = """
import functools, hashlib, threading
class Loss:  # as a tensor on a GPU that waits for the other ranks: it spins, in C
    item = functools.partial(hashlib.pbkdf2_hmac, "sha256", b"1", b"2", 50000)
loss = Loss()
print(flush=True)
while True:
    loss.item()
"""
LOADS_PY = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from dataloader import Loader
print(flush=True)
for batch in Loader():
    pass
"""
LOADER_PY = """
import time
class Loader:
    def __iter__(self):
        return self
    def __next__(self):
        time.sleep(0.2)
"""


def test_py_spy_tells_who_spins_for_others_from_who_waits_for_its_data(tmp_path: Path) -> None:
    """By the kernel, the first works all the time, and the second sleeps."""
    loader = tmp_path / "a 'b; c/torch/utils/data/dataloader.py"
    loader.parent.mkdir(parents=True)
    loader.write_text(LOADER_PY)
    processes = []
    for rank, text in enumerate((SPINS_PY, LOADS_PY)):
        (tmp_path / f"{rank}.py").write_text(text)
        argv = [sys.executable, str(tmp_path / f"{rank}.py"), str(loader.parent)]
        processes.append(subprocess.Popen(argv, stdout=subprocess.PIPE))
    try:
        for each in processes:
            assert each.stdout is not None
            each.stdout.readline()
        sampler = Sampler({rank: each.pid for rank, each in enumerate(processes)}, python=sys.executable)

        def sampled() -> Mapping[int, Sampled]:
            # On a machine that stands still a window may be over before there are enough samples.
            sampler.begin(4.0)
            assert sampler._thread is not None
            sampler._thread.join()
            return sampler.shares()

        shares = until(lambda: len(found := sampled()) == 2 and found, what="the samples")
        assert shares[0].own < 0.2
        assert (shares[1].own, shares[1].loading) > (0.8, 0.8)
    finally:
        for each in processes:
            each.kill()
            each.communicate()


@pytest.mark.parametrize("num_gpus", ["2", "0", None])
def test_stacks_are_sampled_on_gpus_while_some_rank_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: str | None
) -> None:
    if num_gpus is not None:
        monkeypatch.setenv("NODEKIT_NUM_GPUS", num_gpus)
    monkeypatch.setattr(straggler_watch, "LOOK_S", 0.0)
    begun: list[float] = []

    class Samples:
        def __init__(self, pids: Mapping[int, int], *, python: str) -> None:
            assert (pids, python) == ({0: os.getpid()}, sys.executable)

        def begin(self, window_s: float) -> None:
            begun.append(window_s)

        def shares(self) -> dict[int, Sampled]:
            return {0: Sampled(0.25, 0.0)}

    monkeypatch.setattr(straggler_watch, "Sampler", Samples)
    kept: dict[str, str] = {}
    record = SimpleNamespace(progress_dir=tmp_path, gpu_clock=None, update=lambda **_: None)
    formed = SimpleNamespace(
        store=SimpleNamespace(get=kept.get, set=kept.__setitem__),
        group_rank=1,
        members=[{"name": f"n{number}", "address": f"127.0.0.{number}"} for number in range(2)],
    )
    watch = straggler_watch.StragglerWatch(record, 0.0)  # type: ignore[arg-type]  # all that is used of it
    watch.begin(formed, {0: os.getpid()})  # type: ignore[arg-type]  # the same
    watch.look()
    own = NodeWindow.load(json.loads(kept["slow/1"])).ranks[0].own
    assert (own == 0.25, begun) == ((True, [0.0, 0.0]) if num_gpus == "2" else (False, []))
    (tmp_path / ".waits0").write_text('{"steps": 1, "seconds": 1.0, "waited_s": 0.0, "loading_s": 0.0}')
    watch.look()
    assert len(begun) == (2 if num_gpus == "2" else 0), "it speaks for itself"


def test_data_that_waits_to_be_sent_is_seen(tmp_path: Path) -> None:
    # An address of its own: data of other tests may wait on its way to 127.0.0.1.
    with socket.create_server(("127.77.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with client, accepted:
            measure = Measure({}, tmp_path, {"127.77.0.1": "n1", "127.77.0.9": "n2", "::2": "n3"})
            measure.look()
            client.setblocking(False)
            try:
                while True:
                    client.send(bytes(1 << 16))
            except BlockingIOError:
                measure.look()
            assert measure.window().queued == {"n1": 0.5, "n2": 0.0, "n3": 0.0}


def test_the_node_of_rank_0_tells_and_says_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straggler_watch, "LOOK_S", 0.0)
    kept: dict[str, str] = {}
    told: list[str] = []
    status: dict[str, object] = {}
    record = SimpleNamespace(
        progress_dir=tmp_path,
        gpu_clock=None,
        event=lambda _, **fields: told.append(fields["line"]),
        update=lambda **changes: status.update(changes),
    )
    formed = SimpleNamespace(
        store=SimpleNamespace(get=kept.get, set=kept.__setitem__),
        group_rank=0,
        names=["n0", "n1", "n2", "n3"],
        members=[{"name": f"n{number}", "address": f"127.0.0.{number}"} for number in range(4)],
    )
    watch = straggler_watch.StragglerWatch(record, 0.0)  # type: ignore[arg-type]  # all that is used of it
    watch.begin(formed, {0: os.getpid()})  # type: ignore[arg-type]  # the same
    for window in windows(1, factors={1: 2.0}, num_windows=8, starved=0.4):
        for number, own in enumerate(window.values()):
            kept[f"slow/{number}"] = json.dumps(own.to_json())
        monkeypatch.setattr(watch._measure, "window", lambda _, own=window["n0"]: own)
        watch.look()
    assert len(told) == 1
    assert "ranks 2, 3 on n1 make the others wait" in told[0]
    assert status["notice"] == told[0]
    assert status["slow"] == {"node": "n1", "cause": "cpu", "of_host": True}
    watch.begin(formed, {0: os.getpid()})  # type: ignore[arg-type]  # the same
    assert status["slow"] is None


JOB_PY = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.set_num_threads(1)
os.sched_setaffinity(0, {int(os.environ["RANK"]) % os.cpu_count()})
open(f"pid{dist.get_rank()}", "w").write(str(os.getpid()))
weights = torch.ones(600, 600)
while not os.path.exists("enough"):
    for _ in range(8):
        weights @ weights
    dist.all_reduce(torch.ones(8))
"""


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="the ranks need a core each")
def test_a_rank_whose_core_others_use_is_named_of_a_script_that_tells_nothing(agents: Agents) -> None:
    agents.start(JOB_PY, num_nodes=2, window_s=2.0)
    code = agents.folder / "code"
    until(lambda: all((code / f"pid{rank}").exists() for rank in range(2)), what="the ranks")
    quick, pid = (int(until((code / f"pid{rank}").read_text, what="its number")) for rank in range(2))
    for thread in Path(f"/proc/{quick}/task").iterdir():  # it has its core, however busy the machine is
        os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        for each in burners:
            os.sched_setaffinity(each.pid, os.sched_getaffinity(pid))
        slow = until(lambda: agents.status("n0").get("slow"), timeout_s=120, what="the name")
        assert slow == {"node": "n1", "cause": "cpu", "of_host": True}
        assert "rank 1 on n1 makes the others wait" in agents.status("n0")["notice"]
    finally:
        (code / "enough").touch()
        for each in burners:
            each.kill()
            each.wait()
    assert agents.wait("n0", "succeeded")["state"] == "succeeded"
