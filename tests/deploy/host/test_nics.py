"""What `deploy/host/probes/network/nics.py` says of real interfaces, made in a network namespace of their own."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nodekit.deploy.host.probes.network import nics

pytestmark = pytest.mark.lab

PROGRAM = "import nics, json; print(json.dumps(nics.nics()))"
MAKE = """
ip link set lo up
ip link add br0 type bridge
ip link add v0 type veth peer name v1
ip link set v0 master br0 up
ip link set br0 up
ip link set v1 mtu 9000
ip address add 10.1.2.3/20 dev br0
ip address add 10.1.2.4/20 dev br0 label br0:1
ip address add 2001:db8::1/64 dev br0 nodad
"""


def in_namespace(make: str) -> list[dict[str, Any]]:
    """What is found, by the machine's own python, after these commands of bash in a network namespace."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    answer = subprocess.run(
        ["unshare", "--net", "bash", "-ec", f'{make}\npython3 -c "$0"', PROGRAM],
        capture_output=True,
        text=True,
        timeout=30,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(Path(nics.__file__).parent)},
    )
    assert answer.returncode == 0, answer.stderr
    found: list[dict[str, Any]] = json.loads(answer.stdout)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in in_namespace(MAKE)}


def test_a_bridge_has_all_its_addresses_ipv4_first(found: dict[str, dict[str, Any]]) -> None:
    assert found["br0"] == {
        "name": "br0",
        "up": True,
        "carrier": False,  # its one part's other end is down
        "kind": "bridge",
        "driver": "bridge",
        "mtu": 1500,
        "master": None,
        "speed_mbit": None,
        "addresses": ["10.1.2.3/20", "10.1.2.4/20", "2001:db8::1/64"],
    }


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("lo", {"kind": "loopback", "up": True, "carrier": True, "addresses": ["127.0.0.1/8", "::1/128"]}),
        ("v0", {"kind": "virtual", "driver": "veth", "up": True, "carrier": False, "master": "br0"}),
        ("v1", {"kind": "virtual", "driver": "veth", "up": False, "carrier": False, "mtu": 9000}),
        ("v1", {"speed_mbit": None, "addresses": [], "master": None}),
    ],
)
def test_an_interface_is_told_as_it_is(
    found: dict[str, dict[str, Any]], name: str, wanted: dict[str, Any]
) -> None:
    assert {key: found[name][key] for key in wanted} == wanted


@pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="needs tun, whose driver tells a speed")
def test_a_speed_is_the_drivers() -> None:
    (tunnel, _) = in_namespace("ip tuntap add a0 mode tap\nip link set a0 up")
    assert tunnel["speed_mbit"] in (10, 10000)  # by the kernel's age
    assert {key: tunnel[key] for key in ("kind", "driver", "up", "carrier")} == {
        "kind": "virtual", "driver": "tun", "up": True, "carrier": False
    }  # fmt: skip


def test_more_interfaces_than_one_answer_holds() -> None:
    add = "\n".join(f"link add many{i} type veth peer name other{i}" for i in range(150))
    assert len(in_namespace(f"ip -batch - <<< '{add}'")) == 301
