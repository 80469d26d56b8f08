"""`kit init`: what it decides from what hosts say, and a file written by looking at real hosts."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit_runs import Kit
from lab_hosts import on
from places import RECORDED

from nodekit.deploy.init import defaults, init, template, template_text
from nodekit.deploy.init.template import Looked
from nodekit.inventory.errors import KitError
from nodekit.inventory.importers import FoundHost
from nodekit.inventory.load import load_inventory
from nodekit.inventory.schema import Inventory


def nic(
    name: str, *addresses: str, speed: int | None = None, kind: str = "physical", **more: Any
) -> dict[str, Any]:
    about = {
        "name": name,
        "up": True,
        "carrier": True,
        "kind": kind,
        "driver": "",
        "mtu": 1500,
        "master": None,
    }
    return {**about, "speed_mbit": speed, "addresses": list(addresses), **more}


def survey(
    *nics: dict[str, Any], pythons: dict[str, str | None] | None = None, gpus: int = 0
) -> dict[str, Any]:
    found = {"~/venv/bin/python": "2.13.0"} if pythons is None else pythons
    return {
        "hostname": "h",
        "boot_id": "b",
        "cpus": 96,
        "memory_mib": 1031000,
        "gpus": [{"index": i, "name": "NVIDIA H100 80GB HBM3", "memory_mib": 81559} for i in range(gpus)],
        "gpu_problem": "",
        "nics": [nic("lo", "127.0.0.1/8", kind="loopback"), *nics],
        "pythons": [
            {"path": path, "version": "3.11.2", "torch": torch, "default": False}
            for path, torch in found.items()
        ],
    }


def docker(address: str = "172.17.0.1/16") -> dict[str, Any]:
    return nic("docker0", address, kind="bridge", driver="bridge", speed=10000)


# --- the network --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("story", "hosts", "found", "chosen"),
    [
        (
            "names differ, docker's is on both",
            [[nic("eth0", "10.0.0.1/24"), docker()], [nic("ens5", "10.0.0.2/24"), docker()]],
            ["10.0.0.0/24"],
            "10.0.0.0/24",
        ),
        (
            "docker's differ in address, and are none all the same",
            [[nic("eth0", "10.0.0.1/24"), docker()], [nic("eth0", "10.0.0.2/24"), docker("172.17.0.2/16")]],
            ["10.0.0.0/24"],
            "10.0.0.0/24",
        ),
        (
            "one address on both is a way from none to the other",
            [[nic("eth0", "192.168.1.1/24")], [nic("eth0", "192.168.1.1/24")]],
            [],
            None,
        ),
        (
            "the fastest",
            [
                [
                    nic("eth0", "10.0.0.1/24", speed=1000),
                    nic("ib0", "10.1.0.1/16", speed=200000, kind="infiniband"),
                ],
                [
                    nic("eth0", "10.0.0.2/24", speed=10000),
                    nic("ib1", "10.1.0.2/16", speed=200000, kind="infiniband"),
                ],
            ],
            ["10.1.0.0/16", "10.0.0.0/24"],
            "10.1.0.0/16",
        ),
        (
            "the slowest host's card counts",
            [
                [nic("eth0", "10.0.0.1/24", speed=10000), nic("eth1", "10.1.0.1/24", speed=100000)],
                [nic("eth0", "10.0.0.2/24", speed=10000), nic("eth1", "10.1.0.2/24", speed=1000)],
            ],
            ["10.0.0.0/24", "10.1.0.0/24"],
            "10.0.0.0/24",
        ),
        (
            "two of a speed are for a person to choose from",
            [
                [nic("eth0", "10.0.0.1/24", speed=10000), nic("eth1", "10.1.0.1/24", speed=10000)],
                [nic("eth0", "10.0.0.2/24", speed=10000), nic("eth1", "10.1.0.2/24", speed=10000)],
            ],
            ["10.0.0.0/24", "10.1.0.0/24"],
            None,
        ),
        (
            "one that does not tell its speed may be the faster one",
            [
                [nic("eth0", "10.0.0.1/24", speed=10000), nic("eth1", "10.1.0.1/24")],
                [nic("eth0", "10.0.0.2/24", speed=10000), nic("eth1", "10.1.0.2/24")],
            ],
            ["10.0.0.0/24", "10.1.0.0/24"],
            None,
        ),
        (
            "a card without a link is no way",
            [
                [
                    nic("eth0", "10.0.0.1/24", speed=1000),
                    nic("ib0", "10.1.0.1/24", speed=200000, carrier=False),
                ],
                [nic("eth0", "10.0.0.2/24", speed=1000), nic("ib0", "10.1.0.2/24", speed=200000)],
            ],
            ["10.0.0.0/24"],
            "10.0.0.0/24",
        ),
        (
            "a real network before a tunnel, whatever speed that has",
            [
                [
                    nic("eth0", "10.0.0.1/24"),
                    nic("wg0", "10.9.0.1/24", kind="virtual", driver="wireguard", speed=99999),
                ],
                [
                    nic("eth0", "10.0.0.2/24"),
                    nic("wg0", "10.9.0.2/24", kind="virtual", driver="wireguard", speed=99999),
                ],
            ],
            ["10.0.0.0/24", "10.9.0.0/24"],
            "10.0.0.0/24",
        ),
        (
            "a tunnel where there is nothing else",
            [
                [
                    nic("eth0", "192.168.1.4/24"),
                    nic("tailscale0", "100.64.0.1/10", kind="virtual", driver="tun"),
                ],
                [
                    nic("eth0", "192.168.7.9/24"),
                    nic("tailscale0", "100.64.0.2/10", kind="virtual", driver="tun"),
                ],
            ],
            ["100.64.0.0/10"],
            "100.64.0.0/10",
        ),
        (
            "a bridge over a card is real, a card in it is not",
            [
                [
                    nic("br0", "10.0.0.1/24", kind="bridge", driver="bridge"),
                    nic("eno1", "10.7.0.1/24", master="br0"),
                ],
                [nic("eth0", "10.0.0.2/24"), nic("eth1", "10.7.0.2/24")],
            ],
            ["10.0.0.0/24"],
            "10.0.0.0/24",
        ),
        (
            "a cloud's /32 is no network",
            [[nic("eth0", "10.0.0.1/32")], [nic("eth0", "10.0.0.2/32")]],
            [],
            None,
        ),
        (
            "IPv4 before IPv6",
            [
                [nic("eth0", "10.0.0.1/24", "fd00::1/64", speed=1000)],
                [nic("eth0", "10.0.0.2/24", "fd00::2/64", speed=1000)],
            ],
            ["10.0.0.0/24", "fd00::/64"],
            "10.0.0.0/24",
        ),
        ("one host has nobody to share with", [[nic("eth0", "10.0.0.1/24")]], [], None),
    ],
)
def test_the_network_that_hosts_share(
    story: str, hosts: list[list[dict[str, Any]]], found: list[str], chosen: str | None
) -> None:
    shared = defaults.shared_networks({f"h{i}": survey(*nics) for i, nics in enumerate(hosts)})
    assert [str(each.network) for each in shared] == found, story
    best = defaults.choose_network(shared)
    assert (str(best.network) if best else None) == chosen, story


# --- the interpreter ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("story", "hosts", "wanted"),
    [
        (
            "the one that all have",
            [
                {"~/venv/bin/python": "2.13.0", "/opt/conda/bin/python": "2.12.0"},
                {"~/venv/bin/python": "2.13.0"},
            ],
            defaults.Pythons(everywhere="~/venv/bin/python", of_host={}, torch="2.13.0"),
        ),
        (
            "two that all have are for a person to choose from",
            [{"/a/python": "2.13.0", "/b/python": "2.13.0"}] * 2,
            defaults.Pythons(of_host={}, choices=("/a/python", "/b/python")),
        ),
        (
            "paths that differ, with one torch",
            [{"/a/python": "2.13.0"}, {"/b/python": "2.13.0"}],
            defaults.Pythons(of_host={"h0": "/a/python", "h1": "/b/python"}, torch="2.13.0"),
        ),
        (
            "another torch at the same path",
            [{"/a/python": "2.13.0"}, {"/a/python": "2.12.0"}],
            defaults.Pythons(of_host={}),
        ),
        (
            "an older torch where there is no other",
            [{"/a/python": "2.6.0", "/b/python": "2.13.0"}, {"/a/python": "2.6.0", "/b/python": "2.13.0"}],
            defaults.Pythons(everywhere="/b/python", of_host={}, torch="2.13.0"),
        ),
        (
            "only an older torch",
            [{"/a/python": "2.6.0"}] * 2,
            defaults.Pythons(everywhere="/a/python", of_host={}, torch="2.6.0"),
        ),
        ("too old for kit", [{"/a/python": "2.1.0"}] * 2, defaults.Pythons(of_host={})),
        ("no torch", [{"/a/python": None}, {}], defaults.Pythons(of_host={})),
        ("no host", [], defaults.Pythons(of_host={})),
    ],
)
def test_the_interpreter_that_hosts_share(
    story: str, hosts: list[dict[str, str | None]], wanted: defaults.Pythons
) -> None:
    found = {f"h{i}": survey(pythons=pythons) for i, pythons in enumerate(hosts)}
    assert defaults.choose_pythons(found) == wanted, story


# --- the text -----------------------------------------------------------------------------------------------


def written(folder: Path, looked: Sequence[Looked], notes: Sequence[str] = ()) -> tuple[str, Inventory]:
    """The text, and what kit's loader makes of it."""
    made = template.from_hosts(looked, name="c", file="c.yaml", command="kit init", date="today", notes=notes)
    file = folder / "c.yaml"
    file.write_text(made.text)
    assert all(len(line) <= template_text.WIDTH + 20 for line in made.text.splitlines())
    return made.text, load_inventory(file)


def host(name: str, *nics: dict[str, Any], gpus: int = 8, **about: Any) -> Looked:
    pythons = about.pop("pythons", None)
    found = FoundHost(name=name, where="hosts:1", **about)
    return Looked(host=found, survey=survey(*nics, gpus=gpus, pythons=pythons))


def test_what_was_found_becomes_keys_and_comments(tmp_path: Path) -> None:
    text, inventory = written(
        tmp_path,
        [
            host("gpu1", nic("eth0", "10.0.0.1/24", speed=25000), docker(), user="train", port=2222),
            host("gpu2", nic("ens5", "10.0.0.2/24", speed=25000), user="train", address="10.0.0.2"),
            Looked(
                host=FoundHost(name="gpu3", where="hosts:3", user="train", slots=8), problem="it is\nasleep"
            ),
        ],
        ["hosts:9: passed over x"],
    )
    assert str(inventory.network) == "10.0.0.0/24"
    assert [(each.name, each.gpus, each.user, each.port, each.address) for each in inventory.hosts] == [
        ("gpu1", 8, "train", 2222, "gpu1"),
        ("gpu2", 8, "train", None, "10.0.0.2"),
        ("gpu3", None, "train", None, "gpu3"),
    ]
    assert {each.python for each in inventory.hosts} == {"~/venv/bin/python"}
    assert text.count("user: train") == 1
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        "gpus: 8 # 8 × NVIDIA H100 80GB HBM3, 80 GiB; 96 cores, 1007 GiB memory",
        "# interface: eth0 # 10.0.0.1/24, 25 Gb/s, up, in `network:`",
        "# not to train over: docker0 (172.17.0.1/16)",
        "# could not be looked at: it is asleep",
        "# gpus: 8 # slots=8 in hosts:3",
        "# - hosts:9: passed over x",
    ):
        assert line in lines


def test_slots_that_are_not_all_gpus_are_for_a_person_to_choose(tmp_path: Path) -> None:
    text, inventory = written(tmp_path, [host("gpu1", slots=4), host("gpu2", slots=8)])
    assert [each.gpus for each in inventory.hosts] == [None, 8]
    assert "CHOOSE how many GPUs: nvidia-smi lists 8, and hosts:1 has slots=4" in text
    assert [line.split("#")[1].strip() for line in text.splitlines() if "# gpus" in line] == [
        "gpus: 4",
        "gpus: 8",
    ]


def test_hosts_with_gpus_and_hosts_without_are_for_a_person_to_choose(tmp_path: Path) -> None:
    text, _ = written(tmp_path, [host("gpu1"), host("cpu1", gpus=0), host("cpu2", gpus=0)])
    assert (
        "# CHOOSE which hosts: a job runs on GPUs everywhere or nowhere, and none was found on cpu1," in text
    )
    assert "which hosts" not in written(tmp_path, [host("cpu1", gpus=0), host("cpu2", gpus=0)])[0]


def test_gpus_that_cannot_be_listed_are_not_taken_for_none(tmp_path: Path) -> None:
    broken = host("gpu2", gpus=0)
    assert broken.survey is not None
    looked = Looked(host=broken.host, survey={**broken.survey, "gpu_problem": "GPU is lost"})
    text, _ = written(tmp_path, [host("gpu1"), looked])
    assert "# CHOOSE gpus: N: they cannot be listed (nvidia-smi: GPU is lost)" in text
    assert "which hosts" not in text
    assert "no GPU found" not in text


def test_slots_of_hosts_without_gpus_are_processes(tmp_path: Path) -> None:
    text, inventory = written(tmp_path, [host("cpu1", slots=4, gpus=0), host("cpu2", slots=4, gpus=0)])
    assert inventory.job.nproc_per_node is None
    assert "# job:\n#   nproc_per_node: 4\n" in text


def test_two_interfaces_in_one_network(tmp_path: Path) -> None:
    slow_and_fast = [nic("eth0", "10.0.0.1/24", speed=1000), nic("eth1", "10.0.0.2/24", speed=25000)]
    alike = [nic("eth0", "10.0.0.3/24", speed=1000), nic("eth1", "10.0.0.4/24", speed=1000)]
    text, inventory = written(tmp_path, [host("a", *slow_and_fast), host("b", *alike)])
    assert [each.interface for each in inventory.hosts] == ["eth1", None]
    assert "CHOOSE one interface: these are all in `network:`" in text


def test_one_machine_under_two_names_is_there_once(tmp_path: Path) -> None:
    cards = [nic("eth0", "10.0.0.1/24")]
    looked = [
        host("gpu1", *cards),
        host("gpu1-tunnel", *cards, port=2222),
        host("gpu2", nic("eth0", "10.0.0.2/24")),
    ]
    text, inventory = written(tmp_path, [*looked, host("other", address="gpu2")])
    assert [each.name for each in inventory.hosts] == ["gpu1", "gpu2"]
    assert str(inventory.network) == "10.0.0.0/24"
    assert "# CHOOSE one of the two: gpu1-tunnel is the same machine as gpu1\n  # gpu1-tunnel:\n" in text
    assert "# CHOOSE one of the two: other is the same machine as gpu2\n  # other:\n" in text


def test_each_host_has_its_choices_where_no_interpreter_is_on_all(tmp_path: Path) -> None:
    looked = [
        host("a", pythons={"/a/python": "2.13.0"}),
        host("b", pythons={"/a/python": "2.1.0", "/c/python": None}),
    ]
    text, inventory = written(tmp_path, looked)
    assert {each.python for each in inventory.hosts} == {"python3"}
    assert re.search(r"# python: /a/python +# torch 2.13.0, Python 3.11.2\n", text)
    assert re.search(r"# python: /a/python +# torch 2.1.0, Python 3.11.2: too old\n", text)
    assert "/c/python" not in text


NAMES = ["null", "010", "true", "1.5", "gpu-1", "GPU_1", "1e9", "a.b", "fe80::1", "0x1f", "_"]


def test_any_name_of_a_host_is_a_name_in_the_file(tmp_path: Path) -> None:
    _, inventory = written(tmp_path, [host(name, address=name + "a", user="on") for name in NAMES])
    assert [(each.name, each.address, each.user) for each in inventory.hosts] == [
        (name, name + "a", "on") for name in NAMES
    ]


# --- options ------------------------------------------------------------------------------------------------


def test_an_existing_file_is_not_written_over(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("mine")
    with pytest.raises(KitError, match="is there already; --force"):
        init.init(init.Options(hosts=("gpu1",), output=file), say=print)
    assert file.read_text() == "mine"
    with pytest.raises(KitError, match="there is no folder"):
        init.init(init.Options(hosts=("gpu1",), output=tmp_path / "no/c.yaml"), say=print)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "found no host, wanted HOST"),
        ({"ssh_config": True, "slurm": True}, "found --ssh-config and --slurm, wanted one"),
        ({"slurm": True, "hosts": ("a",)}, "found hosts beside --slurm"),
        ({"group": "g", "hosts": ("a",)}, "found --group without --ansible"),
        ({"hostfile": Path("/none")}, "/none: cannot be read: No such file"),
        ({"ansible": Path("/")}, "/: found a folder"),
        ({"ssh_config": True}, r"\.ssh/config: No such file"),
        ({"hosts": ("-oProxyCommand=touch /tmp/x",)}, "wanted a host's name"),
    ],
)
def test_what_cannot_be_asked_is_told(options: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    with pytest.raises(KitError, match=wanted):
        init.init(init.Options(**options, output=tmp_path / "c.yaml"), say=print)
    assert not list(tmp_path.iterdir())


SCONTROL = """\
#!/bin/sh
# What Slurm printed, as recorded.
case "$*" in
  "show nodes") cat "{recorded}/importers/scontrol-nodes-lab.txt" ;;
  "--all show partition --oneliner") cat "{recorded}/scontrol-partitions.txt" ;;
  *) echo "scontrol: what is $*?" >&2; exit 1 ;;
esac
"""


def test_slurm_is_asked_for_its_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(SCONTROL.format(recorded=RECORDED))
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:/usr/bin:/bin")
    file = tmp_path / "slurm.yaml"
    made = init.init(init.Options(slurm=True, output=file), say=print)
    assert load_inventory(file).slurm is not None
    assert made.template.summary == "2 partitions"
    assert re.search(
        r"# partition: main +# default; 2 nodes with no GPU, 2 CPUs, 0.5 GiB\n", file.read_text()
    )


def test_without_slurm_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KitError, match="no scontrol there"):
        init.init(init.Options(slurm=True, output=tmp_path / "slurm.yaml"), say=print)


# --- real hosts ---------------------------------------------------------------------------------------------

SMI = "/usr/local/bin/nvidia-smi"
NVIDIA_SMI = """\
#!/bin/sh
[ "$1" = --query-gpu=index,uuid,driver_version,memory.total,name ] || exit 2
printf '%s, GPU-%s, 570.124.06, 40960, NVIDIA A100-SXM4-40GB\\n' 0 a1 1 b2
"""


@pytest.fixture
def ready(kit: Kit, own_home: Path) -> Iterator[Kit]:
    """A user's home whose ~/.ssh/config knows the lab's hosts and one that is off; docker0 on two of the hosts."""
    assert kit.lab is not None
    values = yaml.safe_load(kit.lab.inventory.read_text())
    (own_home / ".ssh").mkdir(mode=0o700)
    shutil.copy(values["known_hosts"], own_home / ".ssh/known_hosts")
    dead = values["network"].replace(".0/24", ".200")
    aliases = {f"gpu{i}": each["address"] for i, each in enumerate(values["hosts"].values(), 1)}
    (own_home / ".ssh/config").write_text(
        "".join(
            f"Host {alias}\n  HostName {address}\n" for alias, address in {**aliases, "gpu9": dead}.items()
        )
        + f'Host *\n  User root\n  IdentityFile "{values["identity_file"]}"\n  IdentitiesOnly yes\n'
    )
    bridge = "link add docker0 type bridge\naddress add 172.17.0.1/16 dev docker0\nlink set docker0 up\n"
    cable = (
        "link add veth12ab type veth peer name cali9\nlink set cali9 up\nlink set veth12ab up\n"
        "address add 10.244.0.1/24 dev veth12ab\n"
    )
    for name, commands in {"node1": bridge + cable, "node2": bridge}.items():
        for command in commands.splitlines():
            on(kit.lab, name, "ip", *command.split())
    for name in kit.lab.hosts:
        on(kit.lab, name, "ln", "-sfn", sys.prefix, "/root/venv")
        on(kit.lab, name, "sh", "-c", f"cat > {SMI} <<'END'\n{NVIDIA_SMI}END\nchmod 755 {SMI}")
    yield kit
    for name in ("node1", "node2"):
        on(kit.lab, name, "ip", "link", "delete", "docker0")
    on(kit.lab, "node1", "ip", "link", "delete", "veth12ab")
    for name in kit.lab.hosts:
        on(kit.lab, name, "rm", "-f", "/root/venv", SMI)


@pytest.mark.lab
def test_an_inventory_of_real_hosts_runs_as_it_is(ready: Kit) -> None:
    done = ready.run("init", "--ssh-config", "gpu[1-3]", "gpu9", "-o", "my lab.yaml")
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^  gpu1  2 × NVIDIA A100-SXM4-40GB, \d+ cores, torch \S+ in ~/venv/bin/python", done.stdout, re.M
    )
    assert re.search(r"^  gpu9  not reached: \S+ cannot be reached", done.stdout, re.M)
    assert "wrote 'my lab.yaml': 4 hosts (1 not seen), 6 GPUs, over 198.1" in done.stdout
    assert ready.lab is not None
    text = (ready.folder / "my lab.yaml").read_text()
    inventory = load_inventory(ready.folder / "my lab.yaml")
    assert str(inventory.network) == ready.lab.network
    assert [(each.name, each.gpus) for each in inventory.hosts] == [
        ("gpu1", 2), ("gpu2", 2), ("gpu3", 2), ("gpu9", None)
    ]  # fmt: skip
    assert {each.python for each in inventory.hosts} == {"~/venv/bin/python"}
    for interface in (each.interface for each in ready.lab.hosts.values()):
        assert re.search(
            rf"# interface: {interface} +# 198\.1\S+/24, speed not known, up, veth, in `net", text
        )
    assert re.search(r"not to train over: docker0 \(172.17.0.1/16\), veth12ab \(10.244.0.1/24\)", text)
    assert re.search(
        r"  gpu9:\n    # HostName \S+\n    # could not be looked at: \S+ cannot be reached", text
    )
    # Without the one that is off, a job has its place on each of the others. Their torch is for the CPU alone, so:
    (ready.folder / "lab.yaml").write_text(text.replace("  gpu9:", "  # gpu9:"))
    (ready.folder / "job.py").write_text("")
    planned = ready.run("up", "lab.yaml", "--dry-run", "--json", "--", "job.py")
    assert planned.returncode == 1
    assert planned.stderr.count("is built for the CPU alone, and nvidia-smi lists 2 GPUs") == 3
    (ready.folder / "lab.yaml").write_text(text.replace("  gpu9:", "  # gpu9:").replace("gpus: 2", "gpus: 0"))
    planned = ready.run("up", "lab.yaml", "--dry-run", "--json", "--", "job.py")
    assert planned.returncode == 0, planned.stderr
    nodes = json.loads(planned.stdout)["nodes"]
    assert [node["interface"] for node in nodes] == [each.interface for each in ready.lab.hosts.values()]
    again = ready.run("init", "gpu1", "-o", "my lab.yaml")
    assert (again.returncode, again.stdout) == (1, "")
    assert "my lab.yaml is there already; --force writes over it" in again.stderr


@pytest.mark.lab
def test_what_kit_exports_for_ansible_comes_back(ready: Kit, own_home: Path) -> None:
    (own_home / ".ssh/known_hosts").unlink()
    assert ready.lab is not None
    for name in ready.lab.hosts:
        on(ready.lab, name, "rm", "/root/venv")
    shutil.copy(ready.lab.inventory, ready.folder / "lab.yaml")
    exported = ready.run("export", "lab.yaml", "--to", "ansible", "-o", "hosts.yaml")
    assert exported.returncode == 0, exported.stderr
    done = ready.run("init", "--ansible", "hosts.yaml", "-o", "back.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    before, back = (load_inventory(ready.folder / name) for name in ("lab.yaml", "back.yaml"))
    for key in ("name", "address", "user", "identity_file", "known_hosts", "python"):
        assert [getattr(each, key) for each in back.hosts] == [getattr(each, key) for each in before.hosts], (
            key
        )


@pytest.mark.lab
def test_hosts_whose_keys_are_not_known_stay_in_the_file_with_the_reason(ready: Kit, own_home: Path) -> None:
    (own_home / ".ssh/known_hosts").unlink()
    (ready.folder / "hosts").write_text("gpu1 slots=2\nroot@gpu2 slots=2\n")
    done = ready.run("init", "--hostfile", "hosts")
    assert done.returncode == 1
    assert "kit: none of the hosts could be looked at; the file says why" in done.stderr
    assert ready.lab is not None
    first, second = (each.address for each in list(ready.lab.hosts.values())[:2])
    assert [len(line) < 160 for line in done.stdout.splitlines() if "not reached: the host key" in line] == [
        True
    ] * 2
    assert done.stdout.count("accept it with") == 1
    assert "gpu1, gpu2: if that is the host's (ask " in done.stdout
    assert f"accept it with `ssh-keyscan {first} {second} >> ~/.ssh/known_hosts`" in done.stdout
    text = (ready.folder / "cluster.yaml").read_text()
    assert [each.name for each in load_inventory(ready.folder / "cluster.yaml").hosts] == ["gpu1", "gpu2"]
    assert text.count("# could not be looked at: the host key of") == 2
    assert "keyscan" not in text
    assert re.search(r"    # gpus: 2 +# slots=2 in hosts:1\n", text)
    assert not (own_home / ".ssh/known_hosts").exists()
