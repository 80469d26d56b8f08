"""Records real failures into tests/recorded/failures: ``python tests/record_failures.py [CASE ...]``, as root.

Each case is a job of two nodes with two ranks on this machine, under `kit up`, that fails in its own way. What is kept:
what each rank's log ended with, exit codes, times, the kernel's lines, and what a person would call the first cause.
Nothing is changed but this machine's paths. Root is for the memory cgroup and the small disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

from nodekit.deploy.host import current_status

FOLDER = Path(__file__).parent / "recorded" / "failures"
NODES = ("gpu1", "gpu2")
TAIL_LINES = 80
LIMIT_S = 150

HEAD = """\
import ctypes, datetime, json, mmap, os, resource, signal, socket, sys, time
import torch, torch.distributed as dist
from torch import nn
rank, small, cgroup = int(os.environ["RANK"]), os.environ["SMALL"], os.environ["CGROUP"]
"""
LOOP = """\
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
total = torch.ones(1)
def train(step):
    dist.all_reduce(total)
    if step == 5:
        fail()
for step in range(400):
    train(step)
    time.sleep(0.02)
"""
# Those that stand in the script are missed by kit before it starts anything.
IMPORT = "__import__('{}')\n"
ON_ALL = "def fail():\n"
ON_LAST = "def fail():\n    if rank != 3: return\n"
JOIN_CGROUP = '    open(cgroup + "/cgroup.procs", "w").write(str(os.getpid()))\n'
DATA = """\
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        if rank == 3 and index == 2: bad()
        return torch.ones(1)
"""
LOAD = "    for _ in torch.utils.data.DataLoader(Data(), num_workers=1): pass\n"

# name → (who is to blame: rank or None for any of all, cause's name or None, script, environment)
CASES: dict[str, tuple[int | None, str | None, str, dict[str, str]]] = {}


def case(name: str, rank: int | None, cause: str | None, body: str, *, loop: str = LOOP, **env: str) -> None:
    """One job."""
    CASES[name] = (rank, cause, HEAD + textwrap.dedent(body) + loop, env)


case("exception", 3, None, ON_LAST + '    raise ValueError("boom in rank 3")\n')
case("exit-status", 3, None, ON_LAST + "    sys.exit(3)\n")
case("sigkill", 3, "killed", ON_LAST + "    os.kill(os.getpid(), signal.SIGKILL)\n")
case("sigterm", 3, "terminated", ON_LAST + "    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(9)\n")
case("segfault", 3, "segfault", ON_LAST + "    ctypes.string_at(0)\n")
case(
    "segfault-with-faulthandler", 3, "segfault", ON_LAST + "    ctypes.string_at(0)\n", PYTHONFAULTHANDLER="1"
)
case("abort", 3, None, ON_LAST + '    print("the extension says: bad state", flush=True)\n    os.abort()\n')
case(
    "bus-error",
    3,
    "bus-error",
    ON_LAST + '    with open(small + "/mapped", "wb+") as file:\n        file.truncate(1 << 20)\n'
    "        view = mmap.mmap(file.fileno(), 1 << 20)\n        file.truncate(0)\n        view[5000] = 1\n",
)
case(
    "illegal-instruction",
    3,
    "illegal-instruction",
    ON_LAST + "    page = mmap.mmap(-1, 4096, prot=7)\n    page.write(bytes([0x0F, 0x0B]))\n"
    "    ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()\n",
)
case("disk-full", 3, "disk-full", ON_LAST + '    open(small + "/data", "wb").write(bytes(4 << 20))\n')
case(
    "disk-full-in-torch-save",
    3,
    "disk-full",
    ON_LAST + '    torch.save(torch.zeros(1 << 20), small + "/x.pt")\n',
)
case(
    "port-in-use",
    3,
    "port-in-use",
    ON_LAST + '    held = socket.create_server(("127.0.0.1", 0))\n    dist.TCPStore("127.0.0.1", '
    "held.getsockname()[1], 1, True)\n",
)
case(
    "port-in-use-socket",
    3,
    "port-in-use",
    ON_LAST
    + '    held = socket.create_server(("127.0.0.1", 0))\n    socket.socket().bind(held.getsockname())\n',
)
case("missing-module", None, "missing-module", IMPORT.format("no_such_module"), loop="")
case(
    "missing-module-on-one-node",
    2,
    "missing-module",
    "if rank >= 2:\n    " + IMPORT.format("wandb_of_ours.sdk") + ON_ALL + "    pass\n",
)
case(
    "shapes-on-load",
    None,
    "shape-mismatch-on-load",
    ON_ALL + "    nn.Linear(4, 3).load_state_dict(nn.Linear(4, 2).state_dict())\n",
)
case(
    "keys-on-load",
    3,
    "keys-mismatch-on-load",
    ON_LAST
    + "    nn.Linear(4, 3).load_state_dict({'module.' + k: v for k, v in nn.Linear(4, 3).state_dict().items()})\n",
)
case(
    "broken-snapshot",
    3,
    "broken-snapshot",
    ON_LAST
    + """\
    torch.save(torch.zeros(1000), small + "/x.pt")
    os.truncate(small + "/x.pt", 2000)
    torch.load(small + "/x.pt")
""",
)
case(
    "weights-only",
    3,
    "weights-only",
    ON_LAST
    + """\
    import argparse
    torch.save(argparse.Namespace(lr=1), small + "/x.pt")
    torch.load(small + "/x.pt")
""",
)
case(
    "cgroup-out-of-memory",
    3,
    "cgroup-out-of-memory",
    ON_LAST + JOIN_CGROUP + "    kept = [bytearray(16 << 20) for _ in range(99)]\n",
)
case(
    "dataloader-out-of-memory",
    3,
    "cgroup-out-of-memory",
    DATA
    + "def bad():\n"
    + JOIN_CGROUP
    + "    kept = [bytearray(16 << 20) for _ in range(99)]\n"
    + ON_ALL
    + LOAD,
)
case(
    "memory-error",
    3,
    "host-out-of-memory",
    ON_LAST
    + "    resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))\n    kept = bytearray(1 << 33)\n",
)
case(
    "memory-error-in-torch",
    3,
    "host-out-of-memory",
    ON_LAST
    + "    resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))\n    kept = torch.zeros(1 << 33)\n",
)
case("gloo-interface", None, "gloo-interface", ON_ALL + "    pass\n", GLOO_SOCKET_IFNAME="ib7")
case(
    "store-unreachable",
    3,
    "collective-timeout",
    ON_ALL + "    pass\n",
    loop='if rank == 3: os.environ["MASTER_PORT"] = "9"\n' + LOOP.replace("20)", "6)"),
)
case(
    "collective-mismatch",
    None,
    "collective-mismatch",
    ON_ALL + "    dist.all_reduce(torch.ones(2 if rank == 3 else 4096))\n",
)
case(
    "collective-mismatch-in-detail",
    None,
    "collective-mismatch",
    ON_ALL + "    dist.all_reduce(torch.ones(2 if rank == 3 else 4096))\n",
    TORCH_DISTRIBUTED_DEBUG="DETAIL",
)
case(
    "collective-timeout",
    None,
    "collective-timeout",
    ON_LAST + "    time.sleep(60)\n",
    loop=LOOP.replace("20)", "3)"),
)
case(
    "monitored-barrier",
    3,
    "collective-timeout",
    ON_ALL
    + "    if rank == 3: time.sleep(60)\n    dist.monitored_barrier(timeout=datetime.timedelta(seconds=2))\n",
)
case(
    "too-many-open-files",
    3,
    "too-many-open-files",
    ON_LAST
    + "    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n    kept = [open(os.devnull) for _ in range(99)]\n",
)
case(
    "dataloader-worker-killed",
    3,
    "dataloader-worker-killed",
    DATA + "def bad(): os.kill(os.getpid(), signal.SIGKILL)\n" + ON_ALL + LOAD,
)
case(
    "dataloader-exception", 3, None, DATA + "def bad(): raise KeyError('label of image 2')\n" + ON_ALL + LOAD
)
case(
    "ddp-unused-parameters",
    None,
    "ddp-unused-parameters",
    ON_ALL
    + """\
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)
        def forward(self, x): return self.used(x)
    net = nn.parallel.DistributedDataParallel(Net())
    for _ in range(3): net(torch.ones(1, 2)).sum().backward()
""",
)
case(
    "ddp-shapes-differ",
    None,
    "ddp-shapes-differ",
    ON_ALL + "    nn.parallel.DistributedDataParallel(nn.Linear(2, 3 if rank == 3 else 2))\n",
)
case("permission-denied", 3, "permission-denied", ON_LAST + '    os.setuid(65534)\n    open("/root/data")\n')
case("no-such-file", 2, "no-such-file", ON_ALL + '    if rank == 2: open("/data/train/part-0002.bin")\n')
case(
    "not-a-number",
    3,
    "not-a-number",
    ON_LAST
    + """\
    with torch.autograd.detect_anomaly():
        x = torch.zeros(1, requires_grad=True)
        (torch.sqrt(x) * 0).sum().backward()
""",
)
case("tensor-shapes", None, "tensor-shapes", ON_ALL + "    nn.Linear(4, 3)(torch.ones(2, 5))\n")
case(
    "hub-offline",
    None,
    "hub-offline",
    ON_ALL
    + """\
    import huggingface_hub
    huggingface_hub.hf_hub_download("ours/model", "config.json")
""",
    HF_HUB_OFFLINE="1",
)
case(
    "others-wrap-the-echo",
    3,
    None,
    ON_LAST + '    raise KeyError("class 11")\n',
    loop=LOOP.replace(
        "    train(step)",
        """\
    try:
        train(step)
    except RuntimeError as error:
        raise RuntimeError(f"training failed at step {step}") from error""",
    ),
)
case(
    "slow-to-die",
    3,
    None,
    ON_LAST
    + """\
    import atexit
    atexit.register(time.sleep, 3)
    raise ValueError("bad batch")
""",
)
case(
    "second-error-a-moment-later",
    1,
    None,
    ON_ALL
    + """\
    if rank == 1: raise KeyError("class 11")
    if rank == 3:
        time.sleep(0.2)
        raise ValueError("bad batch")
""",
)
case(
    "traceback-long-before-the-kill",
    3,
    "killed",
    ON_LAST
    + """\
    import traceback
    try: open("/no/cache")
    except OSError: traceback.print_exc()
    print("no cache, reading it all")
    sys.stdout.flush()
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
""",
)
case("not-initialised", None, "not-initialised", "dist.all_reduce(torch.ones(1))\n", loop="")
case("broken-library", 3, "broken-library", ON_LAST + '    ctypes.CDLL("libcudart.so.11.0")\n')
case(
    "syntax",
    None,
    "syntax",
    'open("part%d.py" % rank, "w").write("match = = 1\\n")\n__import__("part%d" % rank)\n',
    loop="",
)
case("wrong-import", None, "wrong-import", 'exec("from torch.optim import Lion")\n', loop="")
case(
    "read-only-disk",
    3,
    "read-only-disk",
    ON_LAST
    + '    os.system(f"mkdir {small}/ro; mount -t tmpfs -o ro none {small}/ro")\n'
    + '    try: open(small + "/ro/x.pt", "wb")\n'
    + '    finally: os.system(f"umount {small}/ro; rmdir {small}/ro")\n',
)
case(
    "too-many-processes",
    3,
    "too-many-processes",
    "import threading\n"
    + ON_LAST
    + "    os.setuid(65534)\n    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))\n"
    + "    threading.Thread(target=print).start()\n",
)
case(
    "file-too-large",
    3,
    "file-too-large",
    ON_LAST
    + "    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
    + '    open(small + "/data", "wb").write(bytes(1 << 18))\n',
)
case(
    "wrong-usage",
    None,
    "wrong-usage",
    """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, required=True)
parser.parse_args()
""",
    loop="",
)


def record(name: str, folder: Path, small: Path, cgroup: Path) -> None:
    """Run one case, and keep what it left."""
    rank, cause, script, env = CASES[name]
    project = folder / name
    project.mkdir()
    (project / "job.py").write_text(script)
    inventory = {
        "name": "rec",
        "connection": "local",
        "workdir": str(folder / "work"),
        "hosts": dict.fromkeys(NODES),
        "job": {
            "nproc_per_node": 2,
            "max_restarts": 0,
            "env": {"SMALL": str(small), "CGROUP": str(cgroup), **env},
        },
    }
    (project / "lab.yaml").write_text(json.dumps(inventory))
    ours = {**os.environ, "XDG_STATE_HOME": str(project / "state")}
    done = subprocess.run(
        [sys.executable, "-m", "nodekit.deploy.commands.cli", "up", "lab.yaml", "-q", "--", "job.py"],
        cwd=project,
        env=ours,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    for left in small.iterdir():
        left.unlink()
    run = next((project / "state/nodekit/runs").glob("*/run.json"), None)
    if run is None:
        print(f"=== {name} was not started:\n{done.stdout}{done.stderr}", flush=True)
        return
    about = json.loads(run.read_text())
    hidden = {
        str(Path(sys.prefix)): "/venv",
        str(folder / "work"): "/work",
        str(project): "/project",
        str(small): "/small",
        sys.base_prefix: "/python",
    }
    hidden |= {
        str(Path(__file__).resolve().parents[1]): "/nodekit",
        os.environ.get("PYTHONPATH", "") or "/?": "/nodekit",
    }

    def as_kept(text: str) -> str:
        for ours, theirs in hidden.items():
            text = text.replace(ours, theirs)
        return text

    nodes = {}
    for node, plan in about["nodes"].items():
        status = current_status.statuses(plan["node_dir"])[node]
        logs = {}
        for log in sorted(Path(plan["node_dir"], "logs").glob("rank*-attempt*.log")):
            lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            logs[log.name] = as_kept("\n".join(lines))
        nodes[node] = {
            "state": status["state"],
            "message": as_kept(status.get("message") or ""),
            "cause": status.get("cause") or "",
            "failures": [
                {**each, "log": as_kept(each["log"]), "error": as_kept(each["error"])}
                for each in status["failures"]
            ],
            "logs": logs,
        }
    kept = {
        "case": name,
        "recorded_with": f"python {platform.python_version()}, torch {_torch()}, Linux {platform.release()}",
        "script": script,
        "env": env,
        "clock_offsets": about["clock_offsets"],
        "expected": {"rank": rank, "cause": cause},
        "nodes": nodes,
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    shown = done.stdout[done.stdout.rfind(" failed: ") - 30 :]
    print(f"=== {name} (exit status {done.returncode})\n{shown}{done.stderr}", flush=True)


def _torch() -> str:
    from importlib.metadata import version

    return version("torch")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    disk = folder / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=777", "none", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@contextlib.contextmanager
def memory_cgroup() -> Iterator[Path]:
    """A memory cgroup of 400 MiB, of version 2 where that has the controller, else of version 1."""
    root = Path("/sys/fs/cgroup")
    v2 = (root / "cgroup.controllers").exists()
    cgroup = (root if v2 else root / "memory") / f"record-failures-{os.getpid()}"
    cgroup.mkdir()
    try:
        (cgroup / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(str(400 << 20))
        yield cgroup
    finally:
        cgroup.rmdir()


def main() -> None:
    """Record the cases that are named, or all."""
    with tempfile.TemporaryDirectory() as name, small_disk(Path(name)) as small, memory_cgroup() as cgroup:
        for each in sys.argv[1:] or CASES:
            record(each, Path(name), small, cgroup)


if __name__ == "__main__":
    main()
