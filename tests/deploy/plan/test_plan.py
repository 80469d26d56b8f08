"""From inventory and facts to what each node runs."""

import dataclasses
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodekit.deploy.host.probes import hostfacts
from nodekit.deploy.plan import plan
from nodekit.deploy.plan.check import (
    Facts,
    Interface,
    addresses,
    choose_interface,
    clocks,
    examine,
    one_per_folder,
)
from nodekit.deploy.plan.command import argv_of, filled, refuse_options, training_options
from nodekit.deploy.plan.gpus import Gpu, HostGpus
from nodekit.inventory.errors import HostError, KitError
from nodekit.inventory.load import load_inventory
from nodekit.inventory.schema import Inventory
from nodekit.training.engine_info import LIBRARIES
from nodekit.training.options.arguments import parse

LO = Interface("lo", True, ("127.0.0.1", "::1"))


def inventory(tmp_path: Path, text: str) -> Inventory:
    path = tmp_path / "lab.yaml"
    path.write_text(text)
    return load_inventory(path)


def gpus_there(number: int, **changes: Any) -> HostGpus:
    """As many GPUs on a host; all may be used."""
    return HostGpus(
        **{"usable": tuple(Gpu(index=index, token=str(index)) for index in range(number)), **changes}
    )


def facts(host: str, *interfaces: Interface, **changes: Any) -> Facts:
    values: dict[str, Any] = {
        "host": host,
        "hostname": host,
        "user": "train",
        "python": "3.11.2",
        "executable": "/venv/bin/python",
        "torch": "2.13.0",
        "modules": LIBRARIES,
        "clock_offset_s": 0.0,
        "cpus": 8,
        "interfaces": (LO, *interfaces),
        "routes": {},
        "gpus": gpus_there(changes.pop("num_gpus", 0)),
        "workdir": "/home/train/nodekit",
        "workdir_id": host,
        "workdir_problem": None,
        "free_bytes": 10**12,
        "rsync": True,
        "boot_id": host,
    }
    return Facts(**{**values, **changes})


def build(found: Inventory, all_facts: dict[str, Facts], **changes: Any) -> plan.Plan:
    peers = {host.name: ("10.0.0.1", "10.0.0.2") for host in found.hosts}
    values: dict[str, Any] = {
        "run_id": "lab-1",
        "peers": peers,
        "master_port": 41234,
        "kit_digest": "abc",
    }
    return plan.build(found, all_facts, **{**values, **changes})


def test_hosts_share_a_folder_also_with_the_one_that_serves_it() -> None:
    """They place one thing there at a time; the server has it on its own disk, where the name has the machine in it."""
    ids = {"server": "x@boot:1:2", "gpu1": "x", "gpu2": "x", "apart": "x2", "none1": "", "none2": ""}
    own = {name: facts(name, workdir_id=each) for name, each in ids.items()}
    assert one_per_folder(own) == {
        "server": ["server", "gpu1", "gpu2"],
        "apart": ["apart"],
        "none1": ["none1"],
        "none2": ["none2"],
    }


TWO = "network: 10.0.0.0/24\nhosts:\n  gpu1:\n  gpu2: {env: {A: host}}\njob:\n  env: {B: job}\n"
TWO_FACTS = {
    "gpu1": facts("gpu1", Interface("eth0", True, ("192.168.1.5",)), Interface("ib0", True, ("10.0.0.1",))),
    "gpu2": facts("gpu2", Interface("ens5", True, ("10.0.0.2",))),
}


def test_each_node_gets_its_rank_the_master_and_its_own_interface(tmp_path: Path) -> None:
    found = build(inventory(tmp_path, TWO), TWO_FACTS)
    assert [
        (
            n.name,
            n.node_rank,
            n.max_nodes,
            n.nproc_per_node,
            n.master_addr,
            n.master_port,
            n.interface,
            n.local_addr,
        )
        for n in found.nodes
    ] == [
        ("gpu1", 0, 2, 1, "10.0.0.1", 41234, "ib0", "10.0.0.1"),
        ("gpu2", 1, 2, 1, "10.0.0.1", 41234, "ens5", "10.0.0.2"),
    ]
    assert dict(found.nodes[1].env) == {
        "GLOO_SOCKET_IFNAME": "ens5",
        "NCCL_SOCKET_IFNAME": "=ens5",
        "NODEKIT_RUN_ID": "lab-1",
        "NODEKIT_SNAPSHOT_DIR": "/home/train/nodekit/runs/lab-1/gpu2/snapshots",
        "NODEKIT_OUTPUT_DIR": "/home/train/nodekit/runs/lab-1/gpu2/output",
        "NODEKIT_SNAPSHOT_EVERY": "auto",
        "NODEKIT_COLLECTIVE_TIMEOUT_S": "600",
        "NODEKIT_ON_NAN": "stop",
        "PYTHONFAULTHANDLER": "1",
        "A": "host",
        "B": "job",
    }


WORDS = ("snapshot_dir", "run_id", "node")


@pytest.mark.parametrize(
    ("written", "arrives"),
    [
        ("--out_dir={snapshot_dir}", "--out_dir=/s/gpu1"),
        ("{snapshot_dir}/{run_id}/{node}", "/s/gpu1/lab-1/gpu1"),
        ('{"dir": "{snapshot_dir}", "n": {"a": 1}}', '{"dir": "/s/gpu1", "n": {"a": 1}}'),
        ("{{snapshot_dir}}", "{{snapshot_dir}}"),
        ("${node} ${run_id}", "${node} ${run_id}"),
        (
            "{snapshot_dir }{Node}{}{0}{output_dir}%s{{node}",
            "{snapshot_dir }{Node}{}{0}{output_dir}%s{{node}",
        ),
    ],
)
def test_three_words_in_braces_are_replaced_in_a_command(written: str, arrives: str) -> None:
    argv = filled(("train.py", written), snapshot_dir="/s/gpu1", run_id="lab-1", node="gpu1")
    assert argv == ("train.py", arrives)


@given(st.lists(st.lists(st.sampled_from([*WORDS, *"{}$ \"'\\\n:é"])).map("".join) | st.text()))
def test_an_argument_without_such_a_word_arrives_byte_for_byte(argv: list[str]) -> None:
    argv = [re.sub(rf"\{{(?=({'|'.join(WORDS)})\}})", "{{", each) for each in argv]
    assert filled(argv, snapshot_dir="/s", run_id="r", node="n") == tuple(argv)


@pytest.mark.parametrize("is_given", [True, False], ids=["after --", "in the inventory"])
def test_each_node_gets_its_own_folder_in_its_command(tmp_path: Path, is_given: bool) -> None:
    command = ["train.py", "--out={snapshot_dir}", "--name={run_id}-{node}"]
    text = TWO if is_given else f"{TWO}  command: {json.dumps(command)}\n"
    found = build(inventory(tmp_path, text), TWO_FACTS, command=command if is_given else None)
    work = "/home/train/nodekit/runs/lab-1"
    assert [node.argv[3:] for node in found.nodes] == [
        (f"--out={work}/gpu1/snapshots", "--name=lab-1-gpu1"),
        (f"--out={work}/gpu2/snapshots", "--name=lab-1-gpu2"),
    ]

    shared = inventory(tmp_path, f"snapshots: {{shared: /mnt/s}}\n{TWO}")
    assert {node.argv[3] for node in build(shared, TWO_FACTS, command=command).nodes} == {
        "--out=/mnt/s/lab-1"
    }
    own = inventory(tmp_path, TWO.replace("B: job", "NODEKIT_SNAPSHOT_DIR: /mine"))
    assert {node.argv[3] for node in build(own, TWO_FACTS, command=command).nodes} == {"--out=/mine"}


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (None, ("python", "-u", "-m", "nodekit.training")),
        (("train.py", "--lr", "0.1"), ("python", "-u", "train.py", "--lr", "0.1")),
        (("-m", "pkg.train", "$HOME; rm"), ("python", "-u", "-m", "pkg.train", "$HOME; rm")),
        (("python", "train.py", "--lr"), ("python", "-u", "train.py", "--lr")),
        (("python", "-m", "pkg.train"), ("python", "-u", "-m", "pkg.train")),
        (("python", "-u", "train.py"), ("python", "-u", "train.py")),
        (("python", "-O", "train.py"), ("python", "-O", "train.py")),
        (("python",), ("python",)),
        (("python", "-u"), ("python", "-u")),
        (("python3", "train.py"), ("python3", "train.py")),
        (("./run.sh", "a b"), ("./run.sh", "a b")),
    ],
)
def test_a_python_command_runs_in_the_nodes_python_and_any_other_as_it_is(
    tmp_path: Path, command: tuple[str, ...] | None, argv: tuple[str, ...]
) -> None:
    assert build(inventory(tmp_path, TWO), TWO_FACTS, command=command).nodes[0].argv == argv


@pytest.mark.parametrize(
    ("command", "name", "instead"),
    [
        ("torchrun --nproc-per-node 8 train.py --lr 1", "torchrun", "train.py --lr 1"),
        ("/venv/bin/accelerate launch train.py", "accelerate", "train.py"),
        ("python -m torch.distributed.run -m pkg.train", "torch.distributed.run", "train.py …"),
        ("python -u -m torch.distributed.run train.py", "torch.distributed.run", "train.py"),
        ("-m torch.distributed.launch src/train.py", "torch.distributed.launch", "src/train.py"),
        ("srun torchrun train.py", "srun", "train.py"),
        ("fabric run --devices 2 train.py", "fabric", "train.py"),
        ("accelerate-launch train.py", "accelerate-launch", "train.py"),
        (
            "/venv/bin/python3 -W ignore -m torch.distributed.run train.py",
            "torch.distributed.run",
            "train.py",
        ),
    ],
)
def test_another_launcher_is_refused_with_what_to_say_in_its_place(
    tmp_path: Path, command: str, name: str, instead: str
) -> None:
    with pytest.raises(KitError) as refused:
        argv_of(inventory(tmp_path, TWO), command.split())
    assert str(refused.value).startswith(f"the command begins with {name}; kit starts the ranks")
    assert str(refused.value).endswith(f"kit up … -- {instead}")


@pytest.mark.parametrize(
    ("command", "name", "instead"),
    [
        ("env X=1 -u Y torchrun --nproc-per-node 8 train.py --lr 1", "torchrun", "env X=1 -u Y python train.py --lr 1"),
        ("nohup nice -n 5 accelerate launch train.py", "accelerate", "nohup nice -n 5 python train.py"),
        ("time -p python -m torch.distributed.run t.py", "torch.distributed.run", "time -p python t.py"),
        ("stdbuf -oL -e L torchrun train.py", "torchrun", "stdbuf -oL -e L python train.py"),
        ("numactl -N 0 --membind=0 deepspeed train.py", "deepspeed", "numactl -N 0 --membind=0 python train.py"),
        ("taskset -c 0-3 timeout -s KILL 60 srun x.py", "srun", "taskset -c 0-3 timeout -s KILL 60 python x.py"),
        ("bash -lc 'source x; A=1 exec torchrun train.py && echo 1'", "torchrun", "python train.py"),
        ("env A=1 sh -c 'cd x\ntorchrun train.py'", "torchrun", "python train.py"),
    ],
)  # fmt: skip
def test_a_launcher_behind_another_program_is_refused_with_what_to_write_in_its_place(
    tmp_path: Path, command: str, name: str, instead: str
) -> None:
    with pytest.raises(KitError) as refused:
        argv_of(inventory(tmp_path, TWO), shlex.split(command))
    assert str(refused.value).startswith(f"the command runs {name}; kit starts the ranks")
    assert re.search(rf"write python in its place: (kit up … -- )?{re.escape(instead)}$", str(refused.value))


@pytest.mark.parametrize(
    "command",
    [
        "env X=torchrun python train.py torchrun",
        "bash -c '[ -n \"$RANK\" ] && python train.py || torchrun train.py'",
        "bash -c 'if [ -z \"$RANK\" ]; then torchrun train.py; else python train.py; fi'",
        "bash -c 'which torchrun; echo \"not closed'",
        "python3 -c torchrun",
        "bash run.sh torchrun",
        "timeout 5",
        "env",
    ],
)
def test_a_command_that_may_not_run_the_launcher_that_it_names_is_let_through(
    tmp_path: Path, command: str
) -> None:
    assert argv_of(inventory(tmp_path, TWO), shlex.split(command)) == tuple(shlex.split(command))


SCRIPT = """#!/usr/bin/env bash
# torchrun, which doesn't say which node is missing
set -e
cat > conf.yaml <<EOF
torchrun x.py
EOF
{}
"""


@pytest.mark.parametrize(
    "command", ["run.sh", "./run.sh --lr 1", "bash -x run.sh", "env A=1 nohup sh -o posix run.sh"]
)
@pytest.mark.parametrize(
    ("line", "name", "instead"),
    [
        (
            "cd src && A=1 torchrun --nproc-per-node 8 \\\n  train.py --lr 1 > log",
            "torchrun",
            "train.py …",
        ),
        ('exec accelerate launch "$MAIN"  # the best one', "accelerate", "train.py …"),
        (
            "if [ $# = 1 ]; then\n  echo 1\nfi\npython3 -m torch.distributed.run t.py",
            "torch.distributed.run",
            "t.py …",
        ),
    ],
)
def test_a_launcher_in_a_shell_script_of_the_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, line: str, name: str, instead: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(SCRIPT.format(line))
    with pytest.raises(KitError) as refused:
        argv_of(inventory(tmp_path, TWO), shlex.split(command))
    assert re.match(rf"(\./)?run\.sh runs {name}; kit starts the ranks", str(refused.value))
    assert str(refused.value).endswith(f"write python in its place: python {instead}")


@pytest.mark.parametrize(
    "line",
    [
        'if [ -z "$RANK" ]; then\n  torchrun train.py\nelse\n  python train.py\nfi',
        '[ -n "$RANK" ] || torchrun train.py',
        '[[ -z "$RANK" ]] && torchrun train.py',
        "several() {\n  torchrun train.py\n}\npython train.py",
        "X=$(torchrun --help)\naccelerate env\npython train.py",
        "case $1 in\n  all) torchrun train.py ;;\nesac",
        'echo "don\'t\ntorchrun train.py"',
        "echo 'not closed\ntorchrun train.py",
    ],
)
def test_a_shell_script_that_may_not_run_the_launcher_that_it_names_is_let_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(SCRIPT.format(line))
    assert argv_of(inventory(tmp_path, TWO), ["bash", "run.sh"]) == ("bash", "run.sh")


def test_the_plan_reads_well_and_is_json_for_programs(tmp_path: Path) -> None:
    found = build(inventory(tmp_path, TWO), TWO_FACTS)
    assert "gpu2\n  node_rank   1 of 2\n  workers     1 on CPU, gloo\n" in found.to_text()
    assert re.match(r"run \S+: 2 nodes, world size 2\n", found.to_text())
    assert re.search(r"NCCL_SOCKET_IFNAME==(\S+)   # =\1 means exactly this name\n", found.to_text())
    assert json.loads(found.to_json())["nodes"][1]["interface"] == "ens5"


def host_named(name: str, tmp_path: Path, settings: str = "") -> Any:
    return inventory(tmp_path, f"hosts:\n  {name}: {{{settings}}}\n  other:\n").hosts[0]


@pytest.mark.parametrize(
    ("settings", "network", "routes", "chosen"),
    [
        pytest.param("interface: b1", "10.0.0.0/24", {}, ("b1", "10.1.0.1"), id="named comes first"),
        pytest.param("", "10.1.0.0/16", {}, ("b1", "10.1.0.1"), id="by network"),
        pytest.param("", "10.2.0.0/16", {}, ("b1", "10.2.0.1"), id="by network: a second address"),
        pytest.param("", None, {"10.0.0.2": "10.0.0.1"}, ("a0", "10.0.0.1"), id="by route"),
        pytest.param("", "fd00::/8", {}, ("a0", "fd00::1"), id="IPv6"),
    ],
)
def test_the_interface_is_the_named_else_the_networks_else_the_routes(
    tmp_path: Path, settings: str, network: str | None, routes: dict[str, str], chosen: tuple[str, str]
) -> None:
    found = facts(
        "h",
        Interface("a0", True, ("10.0.0.1", "fd00::1")),
        Interface("b1", True, ("10.1.0.1", "10.2.0.1")),
        routes=routes,
    )
    assert choose_interface(host_named("h", tmp_path, settings), found, network, ("10.0.0.2",)) == chosen


@pytest.mark.parametrize(
    ("settings", "network", "routes", "message"),
    [
        (
            "interface: ib9",
            None,
            {},
            "h: no interface 'ib9', wanted one that it has: lo (127.0.0.1), a0 (10.0.0.1), b1 (10.0.0.5)",
        ),
        ("interface: down0", None, {}, "h: interface 'down0' is down; sudo ip link set down0 up"),
        ("interface: bare0", None, {}, "h: interface 'bare0' has no address"),
        (
            "",
            "10.9.0.0/24",
            {},
            "h: no interface has an address in `network: 10.9.0.0/24`, wanted the network of one that it has: lo",
        ),
        ("", "10.0.0.0/24", {}, "h: a0 and b1 both have an address in `network: 10.0.0.0/24`; name one"),
        ("", None, {}, "h: no route to the other hosts (10.0.0.2); name the network they share"),
        (
            "",
            None,
            {"10.0.0.2": "10.0.0.1", "10.0.0.3": "10.0.0.5"},
            "h: the other hosts are reached over a0 and b1; name the network they share as `network:`",
        ),
    ],
)
def test_an_interface_that_is_not_clear_is_an_error_with_its_cure(
    tmp_path: Path, settings: str, network: str | None, routes: dict[str, str], message: str
) -> None:
    found = facts(
        "h",
        Interface("a0", True, ("10.0.0.1",)),
        Interface("b1", True, ("10.0.0.5",)),
        Interface("bare0", True, ()),
        Interface("down0", False, ("10.7.0.1",)),
        routes=routes,
    )
    peers = tuple(routes) or ("10.0.0.2",)
    with pytest.raises(HostError) as caught:
        choose_interface(host_named("h", tmp_path, settings), found, network, peers)
    assert str(caught.value).startswith(message)


def test_nccl_is_asked_for_exactly_the_interface_where_another_begins_alike(tmp_path: Path) -> None:
    twins = (Interface("eth1", True, ("10.0.0.1",)), Interface("eth10", True, ("10.5.0.1",)))
    found = build(inventory(tmp_path, TWO), {**TWO_FACTS, "gpu1": facts("gpu1", *twins)})
    assert found.nodes[0].env["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert found.nodes[0].env["GLOO_SOCKET_IFNAME"] == "eth1"


def test_of_several_addresses_the_backends_take_the_first_and_that_is_told(tmp_path: Path) -> None:
    """Neither gloo nor NCCL can be given an address: who has asked for another one is told before the start."""
    found = inventory(tmp_path, "network: 10.5.0.0/24\nhosts: {gpu1: , gpu2: }\n")
    peers = {"gpu1": ("10.5.0.2",), "gpu2": ("10.5.0.1",)}
    there = {
        "gpu1": facts("gpu1", Interface("eth1", True, ("10.0.0.1", "10.5.0.1"))),
        "gpu2": facts("gpu2", Interface("eth2", True, ("10.5.0.2", "10.0.0.2", "fd00::2"))),
    }
    (told,) = addresses(found, there, peers)
    assert (told.check, told.host, told.level) == ("network", "gpu1", "warning")
    assert (
        told.found
        == "eth1 has 2 addresses, and gloo and NCCL will take 10.0.0.1, its first, which cannot be chosen"
    )
    assert told.wanted == "10.5.0.1 as the first, or on an interface of its own"
    assert told.cure.startswith(
        "sudo ip address del 10.0.0.1 dev eth1, and add it again behind 10.5.0.1; or give"
    )
    alone = inventory(tmp_path, "network: 10.5.0.0/24\nhosts: {gpu1: }\n")
    assert addresses(alone, {"gpu1": there["gpu1"]}, {"gpu1": ()}) == []


def test_of_both_families_nccl_takes_the_one_that_is_asked_for_and_gloo_does_not(tmp_path: Path) -> None:
    found = inventory(tmp_path, "network: fd00::/64\nhosts: {gpu1: , gpu2: }\n")
    there = {
        name: facts(name, Interface("eth1", True, (f"10.0.0.{number}", f"fd00::{number}")))
        for number, name in ((1, "gpu1"), (2, "gpu2"))
    }
    planned = build(found, there)
    assert planned.nodes[0].env["NCCL_SOCKET_FAMILY"] == "AF_INET6"
    told = addresses(found, there, {"gpu1": ("fd00::2",), "gpu2": ("fd00::1",)})
    assert "gloo will take 10.0.0.1, its first" in told[0].found
    # The kernel has IPv4 first, whatever the order in which they are added.
    assert told[0].cure.startswith(
        "name the network of 10.0.0.1 as `network:`; or give fd00::1 an interface of"
    )


def test_of_several_addresses_of_ipv6_the_newest_is_the_first(tmp_path: Path) -> None:
    found = inventory(tmp_path, "network: fd00::/64\nhosts: {gpu1: , gpu2: }\n")
    there = {
        name: facts(name, Interface("eth1", True, (f"fd01::{number}", f"fd00::{number}")))
        for number, name in ((1, "gpu1"), (2, "gpu2"))
    }
    told = addresses(found, there, {"gpu1": ("fd00::2",), "gpu2": ("fd00::1",)})
    assert told[0].cure.startswith(
        "sudo ip address del fd00::1 dev eth1, and add it again: of IPv6, the newest"
    )


LOCAL = "hosts:\n  a: {connection: local}\n  b: {connection: local}\n"


@pytest.mark.parametrize(
    ("text", "num_gpus", "shares", "visible"),
    [
        pytest.param(LOCAL, 0, ((), ()), None, id="none"),
        pytest.param(LOCAL, 1, ((), ()), "", id="one for two nodes: none takes it"),
        pytest.param(LOCAL, 4, ((0, 1), (2, 3)), "0,1", id="shared evenly"),
        pytest.param("gpus: [2]\n" + LOCAL, 4, ((2,), (2,)), "2", id="as named"),
        pytest.param("hosts: {a: , b: }\n", 2, ((0, 1), (0, 1)), "0,1", id="all of each host's own"),
        pytest.param("gpus: 0\nhosts: {a: , b: }\n", 2, ((), ()), "", id="none wanted"),
    ],
)
def test_gpus_are_those_named_or_all_and_local_nodes_share_them(
    tmp_path: Path, text: str, num_gpus: int, shares: Any, visible: str | None
) -> None:
    found = inventory(tmp_path, text)
    routes = {"10.0.0.1": "127.0.0.1", "10.0.0.2": "127.0.0.1"}
    planned = build(found, {name: facts(name, num_gpus=num_gpus, routes=routes) for name in ("a", "b")})
    assert tuple(node.gpus for node in planned.nodes) == shares
    env = planned.nodes[0].env
    assert env.get("CUDA_VISIBLE_DEVICES") == visible
    assert env.get("CUDA_DEVICE_ORDER") == ("PCI_BUS_ID" if num_gpus else None)
    assert env.get("NODEKIT_NUM_GPUS") == (str(len(shares[0])) if num_gpus else None)
    assert planned.nodes[0].nproc_per_node == max(1, len(shares[0]))


@pytest.mark.parametrize(
    ("pip", "command"),
    [
        ("installs", "/venv/bin/python -m pip install torch"),
        ("none", "/venv/bin/python -m ensurepip && /venv/bin/python -m pip install torch"),
        (
            "managed",
            "/venv/bin/python -m venv --system-site-packages ~/venv && ~/venv/bin/python -m pip install torch, and "
            "set `python: ~/venv/bin/python`",
        ),
    ],
)
def test_the_cure_for_no_torch_is_what_this_python_lets_pip_do(
    tmp_path: Path, pip: str, command: str
) -> None:
    found = inventory(tmp_path, "hosts: {gpu1: }")
    (error,) = examine(found, {"gpu1": facts("gpu1", torch=None, pip=pip)})
    assert error.problem.cure.endswith(f"install it: {command}")


def test_what_pip_may_do_to_a_python_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostfacts.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert hostfacts.pip() == ("installs" if importlib.util.find_spec("pip") else "none")
    (tmp_path / "EXTERNALLY-MANAGED").touch()  # Debian's
    assert hostfacts.pip() == "managed"
    monkeypatch.setattr(sys, "prefix", str(tmp_path))  # a venv made from it
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)  # by uv
    assert hostfacts.pip() == "none"


def test_an_older_torch_runs_a_script_and_is_refused_for_the_training_module(tmp_path: Path) -> None:
    older = {name: dataclasses.replace(found, torch="2.6.0+cu124") for name, found in TWO_FACTS.items()}
    with pytest.raises(KitError) as raised:
        build(inventory(tmp_path, TWO), older)
    assert [each.problem.found for each in raised.value.errors] == ["torch 2.6.0+cu124"] * 2
    assert "wanted 2.10 or newer for kit's training module" in str(raised.value)
    assert build(inventory(tmp_path, TWO), older, command=["train.py"]).nodes


def test_gpus_on_some_hosts_only_are_refused(tmp_path: Path) -> None:
    mixed = {**TWO_FACTS, "gpu1": facts("gpu1", Interface("ib0", True, ("10.0.0.1",)), num_gpus=8)}
    with pytest.raises(KitError, match="gpu2: no GPU, but gpu1 have some"):
        build(inventory(tmp_path, TWO), mixed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"python": "3.9.2"},
            "gpu2: /venv/bin/python is Python 3.9.2, wanted 3.10 or newer; set `python:`",
        ),
        (  # to install torch into that python would be in vain
            {"python": "3.8.18", "torch": None},
            "gpu2: /venv/bin/python is Python 3.8.18, wanted 3.10 or newer; set `python:`",
        ),
        (
            {"torch": None},
            "gpu2: no torch in /venv/bin/python; set `python:` to an interpreter there that has it",
        ),
        ({"torch": "2.3.1+cu121"}, "gpu2: torch 2.3.1+cu121, wanted 2.4 or newer"),
        ({"torch": "2.12.0"}, "gpu2: torch 2.12.0, but 2 of the hosts have 2.13.0, wanted the same on all"),
        (
            {"workdir_problem": "/x: Permission denied", "workdir_errno": "EACCES"},
            "gpu2: its workdir cannot be used: /x: Permission denied, wanted a folder that kit may write to; sudo "
            "install",
        ),
        (  # who is in there may be in the middle of a run
            {"workdir_problem": "/x: Permission denied", "workdir_errno": "EACCES", "workdir_owner": "ann"},
            "gpu2: its workdir cannot be used: /x: Permission denied, wanted a folder that kit may write to; that "
            "folder is ann's: set `workdir:` to one of train's own",
        ),
        (
            {"workdir_problem": "/x: No space left on device", "workdir_errno": "ENOSPC"},
            "gpu2: its workdir cannot be used: /x: No space left on device, wanted a folder that kit may write to; see "
            "what fills it",
        ),
        (
            {"workdir_problem": "/x: Read-only file system", "workdir_errno": "EROFS"},
            "gpu2: its workdir cannot be used: /x: Read-only file system, wanted a folder that kit may write to; see "
            "`findmnt -T",
        ),
        (
            {"free_bytes": 10 * 2**20},
            "gpu2: only 10 MiB free in /home/train/nodekit, wanted at least 100 MiB",
        ),
        ({"num_gpus": 2}, "gpu2: `gpus: 4`, but nvidia-smi lists 2"),
    ],
)
def test_what_would_keep_a_job_from_running_is_found_before_it_starts(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    found = inventory(tmp_path, "gpus: 4\nhosts: {'gpu[1-3]': }\n")
    all_facts = {name: facts(name, num_gpus=4) for name in ("gpu1", "gpu3")}
    all_facts["gpu2"] = facts("gpu2", **{"num_gpus": 4, **changes})
    problems = examine(found, all_facts)
    assert [str(problem).startswith(message) for problem in problems] == [True]


def test_a_machine_that_is_listed_by_two_names_is_refused_and_containers_of_one_are_not(
    tmp_path: Path,
) -> None:
    found = inventory(tmp_path, "hosts: {gpu1: , gpu2: {address: 10.0.0.1}, gpu3: }\n")
    eth0, same = (
        Interface("eth0", True, ("10.0.0.1",)),
        {"boot_id": "b", "hostname": "gpu1", "ssh_port": "22"},
    )
    all_facts = {name: facts(name, eth0, **same) for name in ("gpu1", "gpu2")}
    all_facts["gpu3"] = facts("gpu3", Interface("eth0", True, ("10.0.0.3",)), **{**same, "hostname": "gpu3"})
    assert [str(each) for each in examine(found, all_facts)] == [
        "gpu2: 10.0.0.1 is the same machine as gpu1 (gpu1), wanted each machine once; "
        "remove gpu2 or gpu1 from `hosts:`"
    ]
    all_facts["gpu2"] = facts("gpu2", eth0, **{**same, "ssh_port": "2222"})
    assert examine(found, all_facts) == []


def test_nodes_on_this_machine_are_no_twins_also_where_kit_was_started_over_ssh(tmp_path: Path) -> None:
    found = inventory(tmp_path, "hosts: {a: {connection: local}, b: {connection: local}}\n")
    assert (
        examine(found, {name: facts(name, boot_id="b", hostname="h", ssh_port="22") for name in "ab"}) == []
    )


def test_healthy_hosts_have_no_problems_and_a_wrong_clock_is_warned_of(tmp_path: Path) -> None:
    found = inventory(tmp_path, "hosts: {'gpu[1-2]': }\n")
    all_facts = {"gpu1": facts("gpu1"), "gpu2": facts("gpu2", clock_offset_s=-4.2)}
    assert examine(found, all_facts) == []
    assert [(each.host, each.level) for each in clocks(all_facts)] == [
        ("gpu1", "ok"),
        ("gpu2", "warning"),
    ]


TRAIN = ("-m", "nodekit.training")


def refuse(found: plan.Plan, code: Path, modules: dict[str, tuple[str, ...]] | None = None) -> None:
    first = found.nodes[0]
    refuse_options(first.argv, code, world_size=found.world_size, env=first.env, modules=modules or {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch-size", "3"), "--batch-size 3 is less than the 4 ranks, .* --batch-size 4 or more, or start"),
        (("--task", "text", "--data", "bad data"), r"bad data/dev\.tsv:2: found the label '差', wanted one of 坏, 好"),
        (("--task", "text", "--data", "empty"), r"empty/dev\.tsv:1: found no rows, wanted one or more"),
        (("--task", "text", "--data", "half"), r"half has none of them: wanted one of train\.tsv"),
    ],
)  # fmt: skip
def test_what_the_training_module_would_refuse_is_refused_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    rows = "好\t天\n坏\t地\n"
    for folder, dev in (("bad data", "好\t天\n差\t地\n"), ("empty", ""), ("half", None)):
        (tmp_path / folder).mkdir()
        if dev is not None:
            (tmp_path / folder / "train.tsv").write_text(rows, encoding="utf-8")
            (tmp_path / folder / "dev.tsv").write_text(dev, encoding="utf-8")
    found = build(inventory(tmp_path, TWO + "  nproc_per_node: 2\n"), TWO_FACTS, command=(*TRAIN, *arguments))
    with pytest.raises(KitError, match=message):
        refuse(found, tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        (*TRAIN, "--batch-size", "4"),
        (*TRAIN, "--task", "text", "--data", "not here"),
        (*TRAIN, "--task", "text", "--data", "{}/bad"),
        (*TRAIN, "--task", "mine.py:Task", "--data", "bad"),
        (*TRAIN, "--help"),
        ("train.py", "--batch-size", "1", "--data", "bad"),
    ],
)
def test_what_only_the_hosts_can_tell_is_left_to_them(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "bad").mkdir()
    command = tuple(each.format(tmp_path) for each in command)
    found = build(inventory(tmp_path, TWO + "  nproc_per_node: 2\n"), TWO_FACTS, command=command)
    refuse(found, tmp_path)


def test_a_deepspeed_configuration_is_read_where_it_is_synced_from(tmp_path: Path) -> None:
    arguments = (*TRAIN, "--engine", "deepspeed", "--deepspeed-config", "ds.json")
    found = build(inventory(tmp_path, TWO), TWO_FACTS, command=arguments)
    refuse(found, tmp_path)  # on the hosts, perhaps
    (tmp_path / "ds.json").write_text('{"train_batch_size": 1, "fp16": {"enabled": true}}')
    with pytest.raises(KitError, match=r"ds\.json: fp16\.enabled is true; wanted false"):
        refuse(found, tmp_path)
    (tmp_path / "ds.json").write_text('{"train_batch_size": 1}')
    with pytest.raises(KitError, match="--batch-size 1 is less than the 2 ranks"):
        refuse(found, tmp_path)


def test_a_library_that_some_hosts_lack_is_named_with_them(tmp_path: Path) -> None:
    found = build(inventory(tmp_path, TWO), TWO_FACTS, command=(*TRAIN, "--engine", "trainer"))
    modules = {"a": ("accelerate",), "b": ("accelerate", "transformers"), "c": ("accelerate", "deepspeed")}
    with pytest.raises(
        KitError, match=r"a, c: --engine trainer needs transformers: pip install transformers"
    ):
        refuse(found, tmp_path, modules)
    refuse(found, tmp_path, {"b": ("accelerate", "transformers")})


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (["--batch-size", "2"], {"WORLD_SIZE": "3"}),
        (["--batch-size", "2", "--launcher", "spawn", "--nproc-per-node", "3"], {}),
    ],
)
def test_without_kit_too_a_batch_must_have_a_sample_for_each_rank(
    capsys: pytest.CaptureFixture[str], arguments: list[str], env: dict[str, str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(arguments, env)
    assert end.value.code == 2
    assert "--batch-size 2 is less than the 3 ranks" in capsys.readouterr().err
    assert parse(["--batch-size", "3", *arguments[2:]], env).batch_size == 3


def test_kit_looks_at_text_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from nodekit.deploy.results import apply; from nodekit.deploy.plan import plan\n"
        "from nodekit.training.tasks import rows\n"
        "from pathlib import Path\n"
        "print(len(rows.read_splits(Path(rows.__file__).parent / 'emotions')['dev']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "204\n", done.stderr


def test_commands_are_read_in_threads_at_once() -> None:
    """What has redirected stderr meanwhile gave it back closed."""
    before, command = sys.stderr, ("python", "-u", *TRAIN, "--epochs", "3")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: training_options(command, {}), range(100)))
    assert all(each is not None and each.epochs == 3 for each in found)
    assert sys.stderr is before
