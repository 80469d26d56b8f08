"""Hosts from other tools' files: tables of such files (tests/recorded/importers), and any text at all."""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import RECORDED

from nodekit.deploy.init import template, template_slurm
from nodekit.deploy.init.template import Looked
from nodekit.inventory import ansible, hostlists, importers, scontrol
from nodekit.inventory.errors import InventoryError, KitError
from nodekit.inventory.importers import FoundHost, Imported
from nodekit.inventory.load import load_inventory
from nodekit.inventory.schema import Inventory

IMPORTERS = RECORDED / "importers"
JUMP = "Ansible reaches it through a jump host: say so as ProxyJump in ~/.ssh/config"


def recorded(name: str) -> str:
    return (IMPORTERS / name).read_bytes().decode()


def said(found: Imported, *fields: str) -> dict[str, Any]:
    """Host → what the file says of it, or of the named fields."""
    return {
        host.name: {
            key: value
            for key, value in dataclasses.asdict(host).items()
            if key not in ("name", "where") and value not in (None, "") and (not fields or key in fields)
        }
        for host in found.hosts
    }


# --- hostfiles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        (
            "hostfile-openmpi.txt",
            {
                "node1.cluster.example.org": {"slots": 2, "note": "max_slots=4 in f:2"},
                "node2.cluster.example.org": {"slots": 4, "note": "max_slots=4 in f:3"},
                "10.0.0.13": {},
                "node4": {"slots": 8, "user": "root"},
                "node5": {},
            },
        ),
        ("hostfile-deepspeed.txt", {"worker-1": {"slots": 8}, "worker-2": {"slots": 8}}),
        (
            "hostfile-windows.txt",
            {
                "ip-172-31-90-89.ec2.internal": {"slots": 1},
                "ip-172-31-88-251.ec2.internal": {"slots": 1},
            },
        ),
        ("hostfile-horovod.txt", {"host1": {"slots": 4}, "host2": {"slots": 4}, "host3": {"slots": 2}}),
        (
            "hostfile-hydra.txt",
            {
                "compute-0-0": {"slots": 4},
                "compute-0-1": {"slots": 2},
                "compute-0-2": {"slots": 4, "user": "mpi"},
                "fd00:10::3": {"slots": 8},
                "fd00:10::4": {},
            },
        ),
        ("hostfile-pbs.txt", {"r1i0n4": {"slots": 4}, "r1i0n5": {"slots": 4}}),
    ],
)
def test_a_hostfile_is_read(file: str, wanted: dict[str, Any]) -> None:
    assert said(importers.hostfile(recorded(file), "f")) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "f: found no host"),
        ("# only a comment\n", "f: found no host"),
        (
            "gpu1\n-oProxyCommand=touch slots=8\n",
            "f:2: found '-oProxyCommand=touch slots=8', wanted a host first",
        ),
        ("-l slots=8\n", "f:1: found '-l', wanted a host's name"),
        ("gpu1;reboot\n", "f:1: found 'gpu1;reboot'"),
        ("$(reboot)\n", "f:1: found '$(reboot)'"),
        ("-lroot@gpu1\n", "f:1: found the user '-lroot'"),
        ("@gpu1\n", "f:1: found the user ''"),
        ("gpu1 slots=many\n", "f:1: found slots='many', wanted a number"),
        ("gpu1 slots=²\n", "f:1: found slots='²'"),
        ("gpu1 what\n", "f:1: found 'what', wanted settings as slots=8"),
        ("gpu1 port=99999\n", "f:1: found the port '99999'"),
        ("rank 0=gpu1 slot=1\n", "f:1: found '0=gpu1'"),
        ("^gpu1\n", "f:1: found '^gpu1'"),
        ("+n0\n", "f:1: found '+n0'"),
        ("a@gpu1\nb@gpu1\n", "f:2: gpu1 is another one than at f:1"),
    ],
)
def test_what_is_no_hostfile_is_told_with_its_line(text: str, wanted: str) -> None:
    with pytest.raises(InventoryError) as error:
        importers.hostfile(text, "f")
    assert wanted in str(error.value)


# --- the command line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["gpu1", "10.0.0.2"], {"gpu1": {}, "10.0.0.2": {}}),
        (["gpu[08-10]"], {"gpu08": {}, "gpu09": {}, "gpu10": {}}),
        (["train@gpu[1-2]"], {"gpu1": {"user": "train"}, "gpu2": {"user": "train"}}),
        (["a@b@gpu1"], "found the user 'a@b'"),
        (["gpu1", "gpu1"], {"gpu1": {}}),
        (["gpu1", "me@gpu1"], "'me@gpu1': gpu1 is there twice"),
        (["gpu1:22"], "a port goes into ~/.ssh/config"),
        (["-oProxyCommand=touch"], "wanted a host's name"),
        (["-l@gpu1"], "found the user '-l'"),
    ],
)
def test_hosts_of_a_command_line(arguments: list[str], wanted: dict[str, Any] | str) -> None:
    if isinstance(wanted, dict):
        assert said(importers.from_arguments(arguments)) == wanted
    else:
        with pytest.raises(InventoryError, match=wanted.replace("[", r"\[")):
            importers.from_arguments(arguments)


def test_some_of_the_hosts_of_a_file() -> None:
    found = importers.hostfile("gpu1\ngpu2\ngpu3\ncpu1\n", "f")
    assert list(said(importers.select(found, ["gpu[2-3]", "c*"]))) == ["gpu2", "gpu3", "cpu1"]
    with pytest.raises(InventoryError, match=r"'gpu\[02-13\]' names none"):
        importers.select(found, ["gpu[02-13]"])
    with pytest.raises(InventoryError, match=r"'gpu9' names none of the hosts that were found: gpu1, gpu2"):
        importers.select(found, ["gpu9"])


# --- ~/.ssh/config ------------------------------------------------------------------------------------------


def test_an_ssh_configuration_gives_its_aliases_and_no_patterns() -> None:
    found = importers.ssh_config(recorded("ssh-config.txt"), "config")
    assert said(found) == {
        "login": {"note": "HostName login.cluster.example.org"},
        "gpu1": {"note": "HostName %h.cluster.example.org"},
        "gpu2": {"note": "HostName %h.cluster.example.org"},
        "gpu4": {},
        "GPU5": {},
    }
    assert found.notes == (
        "config: github.com, where one is User git",
        "config: gitlab.example.org, where one is User git",
        "config: 'gpu 9' is no name that an inventory takes",
        "config: '-oProxyCommand=touch' is no name that an inventory takes",
    )


def test_an_ssh_configuration_without_a_host_says_so() -> None:
    with pytest.raises(InventoryError, match="found no host"):
        importers.ssh_config("Host *\n  User x\n", "config")


# --- Ansible ------------------------------------------------------------------------------------------------


def test_deepops_layout_gives_a_group_of_groups() -> None:
    jump = JUMP
    found = ansible.read(recorded("ansible-deepops.ini"), "f", "slurm-cluster")
    assert said(found) == {
        "login01": {"address": "10.0.1.1", "user": "ubuntu", "note": jump},
        "gpu01": {"address": "10.0.2.1", "user": "ubuntu", "note": jump},
        "gpu02": {"address": "10.0.2.2", "user": "ubuntu", "note": jump},
    }
    assert list(said(ansible.read(recorded("ansible-deepops.ini"), "f"))) == [
        "mgmt01",
        "login01",
        "gpu01",
        "gpu02",
    ]


def test_an_odd_ini_inventory() -> None:
    found = ansible.read(recorded("ansible-odd.ini"), "f")
    key = {"identity_file": "~/.ssh/gpu key.pem"}
    assert said(found) == {
        "mail.example.org": {"port": 5309},
        "www1.example.org": {"port": 8022, "user": "gpuuser", **key},
        "www5.example.org": {"port": 8022, "user": "gpuuser", **key},
        "www9.example.org": {"port": 8022, "user": "gpuuser", **key},
        "db-a": {"port": 22, "user": "gpuuser", **key},
        "db-b": {"port": 22, "user": "fast", **key},
        "db-c": {"port": 22, "user": "gpuuser", **key},
        "localhost": {"connection": "local"},
        "secret01": {"port": 22, "user": "root", **key},
        "tmpl01": {"port": 22, "user": "gpuuser", **key},
    }
    assert [note for note in found.notes if "winrm" not in note] == [
        "f:2: jumper: its connection is 'docker', not ssh",
        "f:11: ansible_host of tmpl01: only Ansible can tell what a template says",
    ]
    assert "secret" not in str(found).replace("secret01", "")


def test_a_yaml_inventory_with_ranges_and_a_vault() -> None:
    text = recorded("ansible-kubespray.yaml")
    assert said(ansible.read(text, "f", "kube_node")) == {
        "node2": {"address": "95.54.0.13", "port": 2222, "user": "worker"},
        "node3": {"address": "95.54.0.14", "user": "worker"},
    }
    found = ansible.read(text, "f")
    assert said(found, "user") == {
        "node1": {"user": "ubuntu"},
        "node2": {"user": "worker"},
        "node3": {"user": "worker"},
    }
    assert [host.where for host in found.hosts] == ["f:4", "f:8", "f:9"]
    assert found.notes == ()


def test_what_ansible_inventory_lists() -> None:
    found = ansible.read(recorded("ansible-inventory-list.json"), "f", "gpu")
    assert said(found) == {
        "gpu1": {"address": "10.0.0.11", "port": 2201, "user": "train"},
        "gpu2": {"address": "10.0.0.12", "user": "train"},
    }


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("-o UserKnownHostsFile=/lab/known_hosts", {"known_hosts": "/lab/known_hosts"}),
        ("-oUserKnownHostsFile=~/known -o StrictHostKeyChecking=no", {"known_hosts": "~/known"}),
        ("""-o 'UserKnownHostsFile="/my lab/50%%" ~/.ssh/known_hosts'""", {"known_hosts": "/my lab/50%"}),
        (
            "-o userknownhostsfile=/k -o 'IdentityFile = /key' -o Port=22",
            {"known_hosts": "/k", "identity_file": "/key"},
        ),
        ("-o UserKnownHostsFile=/dev/null", {}),
        ("-o UserKnownHostsFile=/k/%h", {}),
        ("-o ProxyCommand='touch /tmp/x' -o LocalCommand=reboot -F /x", {"note": JUMP}),
        ("-o 'UserKnownHostsFile=/k", {}),
    ],
)
@pytest.mark.parametrize("name", ["ansible_ssh_common_args", "ansible_ssh_extra_args"])
def test_of_the_arguments_of_ssh_those_that_kit_has(
    name: str, arguments: str, wanted: dict[str, str]
) -> None:
    host = {name: arguments, "ansible_port": 7, "ansible_ssh_extra_args" * ("extra" not in name) or "x": "-v"}
    text = json.dumps({"gpu": {"hosts": {"gpu1": host}}})
    assert said(ansible.read(text, "f")) == {"gpu1": {"port": 7, **wanted}}


def test_an_interpreter_that_is_named() -> None:
    text = (
        "gpu1 ansible_python_interpreter=/opt/venv/bin/python\ngpu2 ansible_python_interpreter=auto_silent\n"
    )
    text += "localhost ansible_connection=local ansible_python_interpreter=~/venv/bin/python\n"
    assert said(ansible.read(text, "f")) == {
        "gpu1": {"python": "/opt/venv/bin/python"},
        "gpu2": {},
        "localhost": {"connection": "local", "python": "~/venv/bin/python"},
    }


@pytest.mark.parametrize("outermost_first", [True, False])
def test_the_innermost_group_counts_most_however_deep_it_is(outermost_first: bool) -> None:
    levels = ["[g1:children]\ng2\n", "[g2:children]\ng3\n", "[g3:children]\ng4\n", "[g4]\ngpu1\n"]
    text = "".join(levels if outermost_first else levels[::-1])
    text += (
        "[g1:vars]\nansible_port=1\nansible_user=one\n[g3:vars]\nansible_port=3\n[all:vars]\nansible_port=9\n"
    )
    assert said(ansible.read(text, "f")) == {"gpu1": {"port": 3, "user": "one"}}
    assert list(said(ansible.read(text, "f", "g1"))) == ["gpu1"]


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("gpu[01:04]", ["gpu01", "gpu02", "gpu03", "gpu04"]),
        ("gpu[8:10]", ["gpu8", "gpu9", "gpu10"]),
        ("gpu[:2]", ["gpu0", "gpu1", "gpu2"]),
        ("n[1:9:4]", ["n1", "n5", "n9"]),
        ("db-[a:c]", ["db-a", "db-b", "db-c"]),
        ("r[1:2]n[1:2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("gpu[4:1]", None),
        ("gpu[1-4]", None),
        ("gpu[1:4", None),
        ("gpu[]", None),
        ("gpu[01:100]", None),
        ("gpu[1:999999999]", None),
        ("n[1:999][1:999]", None),
    ],
)
def test_ranges(pattern: str, wanted: list[str] | None) -> None:
    if wanted is not None:
        assert ansible.expand(pattern, "f:1") == wanted
    else:
        with pytest.raises(InventoryError, match=r"^f:1: "):
            ansible.expand(pattern, "f:1")


@pytest.mark.parametrize(
    ("text", "group", "wanted"),
    [
        ("", None, "found no host"),
        ("[gpu]\ngpu1\n", "cpu", "found no group 'cpu', wanted one of gpu"),
        ("#!/usr/bin/env python\nprint(1)\n", None, "found a script"),
        ("-oProxyCommand=touch\n", None, "f:1: found '-oProxyCommand=touch'"),
        ("gpu1 ansible_host=-oProxyCommand=touch\n", None, "f:1: found '-oProxyCommand=touch'"),
        ("gpu1 ansible_host=$(reboot)\n", None, r"f:1: found '$(reboot)'"),
        ("gpu1 ansible_user=-lroot\n", None, "f:1: found the user '-lroot'"),
        ("gpu1 ansible_port=22;reboot\n", None, "f:1: found the port '22;reboot'"),
        ("gpu1 ansible_user='x\n", None, 'f:1: found "gpu1 ansible_user=\'x"'),
        ("gpu1 what\n", None, "f:1: found 'what', wanted variables"),
        ("[gpu:what]\n", None, "f:1: found [gpu:what]"),
        ("[gpu:vars]\nwhat\n", None, "f:2: found 'what', wanted a variable"),
        ("gpu:\n  hosts:\n    -oProxyCommand=x:\n", None, "f:3: found '-oProxyCommand=x'"),
        ("gpu:\n  hosts:\n    gpu1: {ansible_host: '-oX=y'}\n", None, "f:3: found '-oX=y'"),
        ("gpu: text\n", None, "f:1: found a group 'gpu' without"),
        ("gpu:\n  hosts: 7\n", None, "f:2: found '7', wanted names"),
        ("all:\n  hosts: [\n", None, "f:3: "),
    ],
)
def test_what_is_no_ansible_inventory_is_told_with_its_line(
    text: str, group: str | None, wanted: str
) -> None:
    with pytest.raises(InventoryError) as error:
        ansible.read(text, "f", group)
    assert wanted in str(error.value)


# --- Slurm --------------------------------------------------------------------------------------------------


def test_nodes_of_a_slurm_cluster_by_partition() -> None:
    found = scontrol.partitions(recorded("scontrol-nodes-gpus.txt"), default="cpu")
    shown = {
        name: [(each.num_nodes, each.num_usable, each.gpus, each.gpu_type, each.cpus) for each in kinds]
        for name, kinds in found.items()
    }
    assert next(iter(shown)) == "cpu"
    assert shown == {
        "cpu": [(1, 1, 0, "", 48)],
        "gpu": [(2, 1, 8, "a100", 128)],
        "preempt": [(2, 1, 8, "a100", 128), (1, 0, 4, "v100+p100", 24)],
    }


@pytest.mark.parametrize(
    ("gres", "wanted"),
    [
        ("gpu:8", (8, "")),
        ("gpu:a100:4(S:0-1)", (4, "a100")),
        ("gpu:nvidia_h100_80gb_hbm3:8(S:0-1),nvme:2", (8, "nvidia_h100_80gb_hbm3")),
        ("gpu", (1, "")),
        ("mps:100,shard:8", (0, "")),
        ("(null)", (0, "")),
    ],
)
def test_gpus_of_a_node(gres: str, wanted: tuple[int, str]) -> None:
    kinds = scontrol.partitions(f"NodeName=a Gres={gres} CPUTot=1 RealMemory=1 Partitions=p State=IDLE")["p"]
    assert (kinds[0].gpus, kinds[0].gpu_type) == wanted


def test_no_nodes_are_told() -> None:
    with pytest.raises(KitError, match="found no node in a partition"):
        scontrol.partitions("slurm_load_node error: Unable to contact slurm controller")


def slurm_text(name: str, default: str | None) -> str:
    found = scontrol.partitions(recorded(name), default)
    return template_slurm.from_slurm(
        found, default=default, name="c", file="c.yaml", command="kit init --slurm", date="today"
    ).text


def test_a_slurm_inventory_leaves_the_partition_to_choose(tmp_path: Path) -> None:
    text = slurm_text("scontrol-nodes-gpus.txt", "cpu")
    inventory = loaded(text, tmp_path)
    assert inventory.slurm is not None
    assert (inventory.slurm.partition, inventory.slurm.gpus_per_node) == (None, None)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "# partition: cpu # default; 1 node with no GPU, 48 CPUs, 188 GiB" in lines
    assert "# partition: gpu # 2 nodes (1 usable now) with 8 a100 GPUs, 128 CPUs, 1007 GiB" in lines
    assert "  # gpus_per_node: 8\n  # gpus_per_node: 4\n" in text


def test_a_slurm_inventory_has_what_has_one_answer(tmp_path: Path) -> None:
    one = "NodeName=a Gres=gpu:4 CPUTot=8 RealMemory=64000 Partitions=gpu State=IDLE\n"
    found = scontrol.partitions(one + one.replace("=a ", "=b "))
    made = template_slurm.from_slurm(
        found, default=None, name="c", file="c.yaml", command="kit", date="today"
    )
    slurm = loaded(made.text, tmp_path).slurm
    assert slurm is not None
    assert (slurm.partition, slurm.gpus_per_node) == ("gpu", 4)


# --- any text -----------------------------------------------------------------------------------------------

READERS: dict[str, tuple[Callable[[str], Imported], str]] = {
    "hostfile": (lambda text: importers.hostfile(text, "f"), "hostfile-*"),
    "ssh_config": (lambda text: importers.ssh_config(text, "f"), "ssh-config*"),
    "ansible": (lambda text: ansible.read(text, "f"), "ansible-*"),
    "arguments": (lambda text: importers.from_arguments(text.split() or ["gpu1"]), "hostfile-*"),
}
PIECES = [
    *("gpu1", "gpu[01:03]", "-oProxyCommand=touch", "host", "Host ", "HostName ", "[gpu]", "[gpu:children]"),
    *(
        "[all:vars]",
        "ansible_host=",
        "ansible_host: ",
        "ansible_user=",
        "ansible_port: ",
        "slots=8",
        ":8",
        "all:",
    ),
    *(
        "hosts:",
        "children:",
        "vars:",
        " ",
        "=",
        "'",
        '"',
        "#",
        "{",
        "}",
        "[",
        "]",
        "&a ",
        "*a",
        "<<: ",
        "!vault ",
        "- ",
    ),
    *(
        "$(reboot)",
        "`id`",
        ";",
        "ü",
        "1e9",
        "null",
        "{{ x }}",
        "@",
        ",",
        "_meta:",
        "NodeName=",
        "Partitions=p",
        "~",
    ),
    *(
        "Gres=gpu:",
        "%h",
        "job:",
        "command: [evil]",
        "---\n",
        "\n",
        "\n  ",
        "\n    ",
        "\0",
        "\r",
        "\u2028",
        "\x85",
    ),
    *("\x1b[31m", "\ud800"),
]
PIECE = st.one_of(st.sampled_from(PIECES), st.text(max_size=8))
TEXTS = st.lists(PIECE, max_size=30).map("".join)


@st.composite
def damaged(draw: st.DrawFn, texts: list[str]) -> str:
    """One of some real texts, with up to five places where something else stands."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(0, 5))):
        start = draw(st.integers(0, len(text)))
        text = text[:start] + draw(PIECE) + text[start + draw(st.integers(0, 12)) :]
    return text


def loaded(text: str, folder: Path) -> Inventory:
    file = folder / "c.yaml"
    file.write_text(text, encoding="utf-8")
    return load_inventory(file)


@pytest.mark.parametrize("kind", list(READERS))
@settings(max_examples=150)
@given(data=st.data())
def test_no_text_makes_an_importer_crash_or_name_what_is_no_host(kind: str, data: st.DataObject) -> None:
    read, files = READERS[kind]
    text = data.draw(TEXTS | damaged([recorded(file.name) for file in sorted(IMPORTERS.glob(files))]), "text")
    try:
        found = read(text)
    except KitError:
        return
    for host in found.hosts:
        for name in (host.name, host.address or host.name):
            assert hostlists.is_name(name)
            assert not name.startswith("-")
        assert not (host.user or "").startswith("-")
        assert not set(host.user or "") & set(" \n\0")
    looked = [Looked(host=host, problem=text) for host in found.hosts]
    made = template.from_hosts(looked, name="c", file="c", command=text, date="today", notes=found.notes)
    with tempfile.TemporaryDirectory() as folder:
        try:
            inventory = loaded(made.text, Path(folder))
        except InventoryError as error:  # a value that no inventory takes, as a key's path with a NUL
            assert re.search("identity_file|known_hosts", str(error))  # noqa: PT017
            return
    for host, known in zip(inventory.hosts, found.hosts, strict=False):
        if len(inventory.hosts) == len(found.hosts):
            renamed = f"host-{known.name}" if hostlists.is_own_name(known.name) else known.name
            assert (host.name, host.user, host.port) == (renamed, known.user, known.port)
            assert host.address == known.address or host.address in (known.name, "127.0.0.1")


@pytest.mark.parametrize("name", ["slurm", "code", "state", "code.tree.json"])
def test_a_host_that_is_called_as_a_folder_of_kits_gets_another_name(name: str, tmp_path: Path) -> None:
    looked = [
        Looked(host=importers.FoundHost(name=each, where="hosts:1"), problem="off") for each in (name, "gpu1")
    ]
    made = template.from_hosts(looked, name="c", file="c", command="kit init", date="today")
    first, second = loaded(made.text, tmp_path).hosts
    assert (first.name, first.address, second.name) == (f"host-{name}", name, "gpu1")


@settings(max_examples=150)
@given(
    text=TEXTS | damaged([recorded("scontrol-nodes-gpus.txt"), recorded("scontrol-nodes-lab.txt")]),
    default=st.none() | st.text(max_size=4),
)
def test_no_output_of_scontrol_makes_it_crash(text: str, default: str | None) -> None:
    try:
        found = scontrol.partitions(text, default)
    except KitError:
        return
    made = template_slurm.from_slurm(
        found, default=default, name="c", file="c.yaml", command=text[:20], date="today"
    )
    assert only_ours(made.text) <= {"name", "slurm", ""}


@settings(max_examples=100)
@given(text=TEXTS, problem=TEXTS, model=TEXTS, nic=TEXTS, path=TEXTS, notes=st.lists(TEXTS, max_size=3))
def test_nothing_that_a_host_or_a_file_says_adds_a_line(
    text: str, problem: str, model: str, nic: str, path: str, notes: list[str]
) -> None:
    survey = {
        "hostname": text, "boot_id": text, "cpus": 4, "memory_mib": 1000,
        "gpus": [{"index": 0, "name": model, "memory_mib": 81559}],
        "pythons": [{"path": path, "version": "3.11.2", "torch": "2.13.0" + text, "default": False}],
        "nics": [
            {"name": nic, "up": True, "carrier": True, "kind": "physical", "driver": text, "mtu": 1500, "master": None,
             "speed_mbit": 10, "addresses": [f"10.0.0.{n}/24" for n in (1, 2)]},
        ],
    }  # fmt: skip
    host = {"note": text, "identity_file": path or None, "slots": 3, "where": nic}
    looked = [
        Looked(host=FoundHost(name="gpu1", **host), survey=survey),
        Looked(host=FoundHost(name="null", **host), problem=problem),
    ]
    made = template.from_hosts(looked, name="c", file=text, command=model, date="today", notes=notes)
    assert only_ours(made.text) <= {"name", "python", "identity_file", "hosts", ""}


def only_ours(text: str) -> set[str]:
    """The keys at the top of a text, by YAML's own reader of lines."""
    import yaml

    lines = text.splitlines()  # also at what is a line's end to YAML 1.1 alone
    assert all(line.isprintable() for line in lines)
    keys = {line.split(":")[0] for line in lines if line and not line.startswith((" ", "#"))}
    assert keys == {key.value for key, _ in yaml.compose(text).value}
    return keys
