"""A run that never was, with all that a report shows: a lost node, another generation, a crash, a stop and going on."""

import math
from typing import Any

from nodekit.deploy.records.events import Event
from nodekit.deploy.records.runs import Run

NODES = ["gpu1", "gpu2", "gpu3", "gpu4"]
T0 = 1_795_327_000.0
MARKUP = "<script>alert('out')</script><img src=x onerror=alert(1)>"
SECRET = "hunter2-hunter2"
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "cpus": 32}
TRACEBACK = f"""Traceback (most recent call last):
  File "train.py", line 41, in <module>
    step(batch)
ValueError: boom {MARKUP} api_key={SECRET}"""


def said(time: float, node: str | None, kind: str, **fields: Any) -> Event:
    return Event(T0 + time, node, kind, fields)


def sample(time: float, node: str, attempt: str, step: int) -> Event:
    number = NODES.index(node)
    wave = math.sin(time / 17 + number)
    return said(
        time, node, "sample", attempt=attempt, step=step, total_steps=2000,
        loss=round(2.3 * math.exp(-step / 500) + 0.05 * math.sin(step / 7) + 0.08, 4),
        cpu=0.35 + 0.1 * wave, memory=24e9 + 1e9 * number, memory_total=64e9, interface="eth0",
        received=9e7 * (1 + 0.2 * wave), sent=8.8e7 * (1 + 0.2 * wave),
        gpus=[{"index": 0, "use": 0.9 + 0.05 * wave, "memory": 61e9, "memory_total": 80e9}],
    )  # fmt: skip


def attempt(
    name: str, members: list[str], *, at: float, resumed: int, last: int, rate: float = 4.0
) -> list[Event]:
    """An attempt whose nodes meet at `at`, with a sample every 5 s, a snapshot and an evaluation now and then."""
    told = []
    for rank, node in enumerate(members):
        workers = [{"rank": rank, "local_rank": 0, "pid": 7, "start_time": 1}]
        told += [
            said(
                at, node, "rendezvous", attempt=name, group_rank=rank, num_nodes=len(members), members=members
            ),
            said(at + 0.2, node, "workers-started", attempt=name, world_size=len(members), workers=workers),
            said(at + 2, node, "first-step", attempt=name, step=resumed + 1),
        ]
    if resumed:
        told.append(said(at + 1.5, members[0], "resumed", attempt=name, step=resumed))
    step, end = resumed + 1, at + 2 + (last - resumed - 1) / rate
    time = at + 2
    while time < end:
        told += [sample(time, node, name, step) for node in members]
        if step % 100 < 5 * rate and step > resumed + 20:
            for node in members:
                told.append(
                    said(time + 0.3, node, "snapshot", generation=int(name[0]), step=step, bytes=412_000_000,
                         pause_s=0.21, count=1)
                )  # fmt: skip
            metrics = {
                "accuracy": round(0.98 - 0.6 * math.exp(-step / 400), 4),
                "loss": round(2 * math.exp(-step / 450), 4),
            }
            told.append(
                said(
                    time + 0.4,
                    members[0],
                    "evaluation",
                    attempt=name,
                    step=step,
                    epoch=step // 100,
                    metrics=metrics,
                )
            )
        time += 5
        step += int(5 * rate)
    return told


def ended(time: float, name: str, members: list[str], *, step: int, why: str) -> list[Event]:
    return [
        said(time, node, "attempt-ended", attempt=name, step=step, seconds=1.0, why=why) for node in members
    ]


def events() -> list[Event]:
    three = [node for node in NODES if node != "gpu3"]
    command = ["python", "-u", "train.py", "--wandb-api-key", SECRET]
    found = [
        said(0, None, "run-started", generation=0, nodes=NODES, command=command, goes_on=False),
        said(0.6, None, "phase", phase="connect", seconds=0.6),
        said(1.9, None, "phase", phase="check", seconds=1.3),
        *(said(0.7, None, "host", about=node, hostname=f"{node}.lab", **VERSIONS) for node in NODES),
        *(said(2, node, "agent-started", pid=11) for node in NODES),
        *attempt("0.0", NODES, at=3, resumed=0, last=400),
        # gpu3 is silent from 105 on.
        said(108, None, "unreachable", about="gpu3", why=f"no answer {MARKUP}"),
        said(108, "gpu1", "membership", lost=1, waiting=0),
        *ended(109, "0.0", three, step=400, why="a node is lost"),
        *attempt("0.1", three, at=111, resumed=301, last=700),
        # gpu1, the rendezvous host, loses its power; gpu3 comes back meanwhile.
        said(180, None, "reached", about="gpu3"),
        said(181, "gpu3", "agent-started", pid=12),
        *ended(214, "0.1", ["gpu2", "gpu4"], step=700, why="the rendezvous host is lost"),
        said(214, "gpu2", "store-lost", why="Connection reset by peer"),
        said(214, "gpu4", "store-lost", why="Connection reset by peer"),
        said(215, None, "unreachable", about="gpu1", why="no answer"),
        said(216, "gpu2", "generation", generation=1, host="10.0.0.2"),
        said(216, "gpu4", "generation", generation=1, host="10.0.0.2"),
        said(216, "gpu3", "generation", generation=1, host="10.0.0.2"),
        *attempt("1.0", ["gpu2", "gpu3", "gpu4"], at=219, resumed=602, last=1100),
        said(347, "gpu3", "worker-failed", attempt="1.0", rank=1, local_rank=0, world_size=3, exitcode=1,
             when=T0 + 346.9, log="/w/rank1.log", error=TRACEBACK, kernel=None),
        said(347.2, "gpu4", "worker-failed", attempt="1.0", rank=2, local_rank=0, world_size=3, exitcode=1,
             when=T0 + 347.1, log="/w/rank2.log", error="RuntimeError: Connection reset by peer", kernel=None),
        *ended(347.5, "1.0", ["gpu2", "gpu3", "gpu4"], step=1100, why="a rank failed"),
        said(348, None, "said", text=f"gpu3: rank 1 ended {MARKUP}"),
        *(said(356, node, "agent-ended", state="stopped") for node in ("gpu2", "gpu3", "gpu4")),
        said(356.5, None, "run-ended", state="stopped", verdict="stopped by kit down"),
        said(9000, None, "run-started", generation=2, nodes=NODES, command=command, goes_on=True),
        *(said(9002, node, "agent-started", pid=21) for node in NODES),
        *attempt("2.0", NODES, at=9003, resumed=1003, last=2000, rate=5.0),
        *ended(9205, "2.0", NODES, step=2000, why="done"),
        *(said(9205.5, node, "agent-ended", state="succeeded", result={"accuracy": 0.976}) for node in NODES),
        said(9206, None, "run-ended", state="succeeded", verdict="trained to the end"),
    ]  # fmt: skip
    return sorted(found, key=lambda event: event.time)


def run() -> Run:
    """Its record."""
    inventory = {
        "name": "lab",
        "path": "/home/me/lab.yaml",
        "nodes": "2:4",
        "hosts": [
            {"name": node, "address": f"10.0.0.{number}", "connection": "ssh", "workdir": "~/nodekit",
             "python": "python3", "env": {"DATA_TOKEN": f"{SECRET}-{node}"}}
            for number, node in enumerate(NODES, start=1)
        ],
        "defaults": {"env": {"COMMON": "a common value"}},
        "environment": {"index_url": f"https://me:{SECRET}@pypi.example.org/simple"},
        "job": {"command": ["train.py", "--wandb-api-key", SECRET], "env": {"WANDB_API_KEY": SECRET},
                "secrets": ["HF_TOKEN"]},
        "snapshots": {"copies": 2, "every": "auto"},
    }  # fmt: skip
    plans = {
        node: {
            "name": node, "node_rank": rank, "min_nodes": 2, "max_nodes": 4, "nproc_per_node": 1, "gpus": [0],
            "master_addr": "10.0.0.1", "master_port": 29500, "interface": "eth0", "local_addr": f"10.0.0.{rank + 1}",
            "env": {"NODEKIT_SNAPSHOT_DIR": f"/home/me/nodekit/runs/lab/{node}/snapshots", "WANDB_API_KEY": SECRET},
            "argv": ["python", "-u", "train.py"], "python": "python3", "code_dir": "/home/me/nodekit/runs/lab/code",
            "node_dir": f"/home/me/nodekit/runs/lab/{node}", "max_restarts": 3, "kit_dir": "/k",
            "secrets": ["HF_TOKEN"],
        }
        for rank, node in enumerate(NODES)
    }  # fmt: skip
    return Run(
        run_id="lab-1122-061500-3f2a",
        name="lab",
        inventory_path="/home/me/lab.yaml",
        inventory=inventory,
        command=None,
        created=T0,
        started=T0 + 9000,
        state="succeeded",
        ended=T0 + 9206,
        verdict=f"trained to the end {MARKUP}",
        nodes=plans,
        token="0123456789abcdef0123456789abcdef",
        code_digest="ab" * 32,
        clock_offsets={node: 0.0004 * number for number, node in enumerate(NODES)},
    )
