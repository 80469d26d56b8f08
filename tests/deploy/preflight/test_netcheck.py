"""The network part of `kit check`, on real hosts with real faults: each found, named, mended by the cure it gives."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from agents import until
from lab_hosts import BUSY_S, on

from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.channel import HostChannel
from nodekit.deploy.host.probes.network import netprobe, netstate
from nodekit.deploy.lab.lab_cluster import Lab
from nodekit.deploy.plan import check
from nodekit.deploy.plan.findings import Finding
from nodekit.deploy.preflight.network import firewall, netcheck, nethost, netpairs, outcomes
from nodekit.inventory.load import load_inventory

# No healthy host takes a part of it. Of 20 s, as it once was, it had 8 to begin: a machine may stand still for as long.
DEADLINE_S = 60.0
NAMES = ("node1", "node2", "node3")


class Site:
    """A lab with channels to its hosts, checked as often as a test likes."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.took_s = 0.0
        self.channels: dict[str, HostChannel] = {}

    def inventory(self, **hosts: dict[str, Any]) -> Any:
        values = yaml.safe_load(self.lab.inventory.read_text())
        del values["nodes"]
        for name, changes in hosts.items():
            values["hosts"][name] = {**(values["hosts"][name] or {}), **changes}
        path = self.folder / "lab.yaml"
        path.write_text(yaml.safe_dump(values))
        return load_inventory(path)

    def check(
        self, *, port: int | None = None, deadline_s: float = DEADLINE_S, **hosts: Any
    ) -> list[Finding]:
        inventory = self.inventory(**hosts)
        peers = cluster.peer_addresses(inventory.hosts)
        facts = check.gather(self.channels, inventory, peers=peers)
        start = time.monotonic()
        found = netcheck.network_findings(self.channels, inventory, facts, deadline_s=deadline_s, port=port)
        self.took_s = time.monotonic() - start
        assert self.took_s < deadline_s + BUSY_S
        for finding in found:
            assert finding.check == "network"
            assert finding.found
            assert finding.level == "ok" or (finding.wanted and finding.cure)
        return found

    def bad(self, **kwargs: Any) -> list[Finding]:
        return [finding for finding in self.check(**kwargs) if finding.level != "ok"]

    def mend(self, finding: Finding) -> None:
        """Type in what the finding says."""
        for each in finding.cure.split("; "):
            host, _, command = each.removeprefix("on ").partition(": ")
            assert command.startswith("sudo "), finding.cure
            on(self.lab, host, "sh", "-c", command.removeprefix("sudo "))

    def address(self, name: str) -> str:
        return self.lab.hosts[name].address

    def interface(self, name: str) -> str:
        return self.lab.hosts[name].interface

    def waiting(self, name: str) -> set[str]:
        return set(on(self.lab, name, "ss", "-Htan", "state", "time-wait").splitlines())

    def listened_at(self, name: str) -> set[str]:
        return {line.split()[3] for line in on(self.lab, name, "ss", "-Hltnu").splitlines()}


@pytest.fixture
def site(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """The lab's three hosts, whose names are not those of loopback, and afterwards as they were."""
    monkeypatch.setattr(netpairs, "ALONE_S", 1.3)
    monkeypatch.setattr(netpairs, "LEAST_ALONE_S", 1.3)
    made = Site(lab, tmp_path)
    kept = {name: on(lab, name, "cat", "/etc/hosts") for name in lab.hosts}
    for name in lab.hosts:
        on(lab, name, "sed", "-i", "/^127.0.1.1/d", "/etc/hosts")
    try:
        with cluster.channels(made.inventory().hosts, cluster.SshOptions()) as channels:
            made.channels = channels
            yield made
    finally:
        for name, text in kept.items():
            on(lab, name, "nft", "flush", "ruleset")
            on(lab, name, "ip", "link", "set", lab.hosts[name].interface, "mtu", "1500")
            subprocess.run(
                lab.enter_argv(name, "tee", "/etc/hosts"),
                input=text + "\n",
                text=True,
                check=True,
                stdout=subprocess.DEVNULL,
            )


def filter_on(site: Site, host: str, rule: str, hook: str = "input", policy: str = "accept") -> None:
    script = (
        f"table inet site {{ chain c {{ type filter hook {hook} priority 0; policy {policy}; {rule}\n }}\n }}"
    )
    on(site.lab, host, "nft", script)


# --- on real hosts --------------------------------------------------------------------------------------------


@pytest.mark.lab
def test_healthy_hosts_whose_interfaces_have_different_names_are_ok(site: Site) -> None:
    before = {name: site.listened_at(name) for name in NAMES}
    waiting = {name: site.waiting(name) for name in NAMES}  # those of other tests
    found = site.check(port=29500, deadline_s=3 * BUSY_S)
    assert [(finding.host, finding.level) for finding in found] == [(name, "ok") for name in NAMES]
    assert [finding.found for finding in found] == [f"{site.interface(name)}, MTU 1500" for name in NAMES]
    assert site.took_s < BUSY_S, "nobody waits for the deadline"
    until(lambda: {name: site.listened_at(name) for name in NAMES} == before, what="it listens no longer")
    for name in NAMES:
        assert site.waiting(name) <= waiting[name], "a port in TIME_WAIT is not free for the job"


@pytest.mark.lab
def test_an_interface_that_is_down_or_has_no_carrier_or_no_address_is_named(site: Site) -> None:
    on(site.lab, "node2", "ip", "link", "add", "data0", "type", "veth", "peer", "name", "data1")
    try:
        on(site.lab, "node2", "ip", "address", "add", "198.19.255.2/24", "dev", "data0")
        (down,) = site.bad(node2={"interface": "data0"})
        assert (down.host, down.level, down.found) == ("node2", "failure", "interface data0 is down")
        site.mend(down)
        (no_carrier,) = site.bad(node2={"interface": "data0"})
        assert no_carrier.host == "node2"
        assert no_carrier.found.startswith("interface data0 has no carrier")
        on(site.lab, "node2", "ip", "address", "flush", "dev", "data0")
        (no_address,) = site.bad(node2={"interface": "data0"})
        assert (no_address.host, no_address.found) == ("node2", "interface data0 has no address")
        (absent,) = site.bad(node2={"interface": "eth7"})
        assert (absent.host, absent.found) == ("node2", "no interface eth7")
        assert site.interface("node2") in absent.wanted
    finally:
        on(site.lab, "node2", "ip", "link", "delete", "data0")


@pytest.mark.lab
def test_an_mtu_that_differs_is_named_with_both_numbers(site: Site) -> None:
    on(site.lab, "node2", "ip", "link", "set", site.interface("node2"), "mtu", "1400")
    (found,) = site.bad()
    assert (found.host, found.level) == ("node2", "warning")
    assert found.found == f"MTU 1400 on {site.interface('node2')}, but 2 of 3 hosts have 1500"
    site.mend(found)
    assert not site.bad()


@pytest.mark.lab
def test_packets_that_are_lost_on_the_way_for_their_size_are_named(site: Site) -> None:
    for name in NAMES:  # the switch between them keeps its 1500
        on(site.lab, name, "ip", "link", "set", site.interface(name), "mtu", "9000")
    (found,) = site.bad()
    assert (found.host, found.hosts, found.level) == ("all hosts", NAMES, "failure")
    assert found.found.startswith(
        "between all 3 hosts: packets of 9000 bytes are lost on the way, of 1500 pass"
    )
    for command in found.cure.split("; ")[:3]:
        site.mend(Finding(check="", host="", level="ok", cure=command))
    assert not site.bad()


@pytest.mark.lab
@pytest.mark.parametrize("verdict", ["drop", "reject"])
def test_a_firewall_that_blocks_one_direction_of_one_pair_is_named_and_mended(
    site: Site, verdict: str
) -> None:
    filter_on(site, "node1", f"ip saddr {site.address('node3')} tcp flags & (syn|ack) == syn {verdict}")
    (found,) = site.bad()
    assert (found.host, found.hosts, found.level) == ("node3 → node1", ("node3", "node1"), "failure")
    said = (
        "every port dropped (no answer)"
        if verdict == "drop"
        else "every port re"  # refused, or rejected: an answer to some, which Linux limits
    )
    assert found.found.startswith(said)
    tried = "tried twice, the second time this pair alone"
    assert f"; node1 → node3 connects; {tried}; node1's nftables, chain inet site c: ip saddr" in found.found
    site.mend(found)
    assert not site.bad()


@pytest.mark.lab
def test_a_firewall_that_drops_a_port_range_is_named_with_the_range(site: Site) -> None:
    filter_on(site, "node2", "tcp dport 40000-50000 drop")
    (found,) = site.bad()
    assert (found.host, found.hosts, found.level) == ("node2", ("node2",), "failure")
    assert found.found.startswith("from all 2 other hosts: ports 40")
    assert "(6 of the 16 tried in 32768-60999) dropped" in found.found
    assert "tcp dport 40000-50000 drop" in found.found
    site.mend(found)
    assert not site.bad()
    two = f"ip saddr {site.address('node1')} tcp dport 29500 drop\ntcp dport 40000-50000 drop"
    filter_on(site, "node3", two)
    both = {finding.host: finding for finding in site.bad()}
    assert set(both) == {"node1 → node3", "node2 → node3"}, (
        "answers to node3's own calls are no fault of the others"
    )
    assert both["node1 → node3"].found.startswith("port 29500 and ports 40708-49530 (6 of the 16 tried in")
    _, second = both["node1 → node3"].cure.split("; ")
    assert second == both["node2 → node3"].cure
    site.mend(Finding(check="", host="", level="ok", cure=second))
    (harmless,) = site.bad()
    assert (harmless.host, harmless.level) == ("node1 → node3", "warning")
    assert harmless.found.startswith("port 29500 dropped (no answer); node3 → node1 connects")
    (needed,) = site.bad(port=29500)
    assert needed.level == "failure"


@pytest.mark.lab
def test_a_firewall_that_lets_nothing_out_or_in_is_told_from_one_that_blocks_a_port(site: Site) -> None:
    filter_on(site, "node2", f"ip daddr {site.address('node1')} drop", hook="output")
    found = {finding.host: finding for finding in site.bad()}
    assert set(found) == {"node1 → node2", "node2 → node1"}, "neither gets an answer"
    lost = "datagrams node1 → node2 arrive, node2 → node1 are lost"
    assert lost in found["node2 → node1"].found
    assert lost in found["node1 → node2"].found
    assert "node2's nftables, chain inet site c: ip daddr" in found["node2 → node1"].found
    site.mend(found["node2 → node1"])
    assert not site.bad()
    ssh = f"ip saddr {site.lab.network.rpartition('.')[0]}.1 accept"  # this machine stays connected
    filter_on(site, "node3", ssh, policy="drop")
    found = {finding.host: finding for finding in site.bad()}
    assert "policy drop" in found["node3"].found
    site.mend(found["node3"])
    assert not site.bad(), "the cure is for all hosts that it keeps out"


@pytest.mark.lab
def test_a_name_that_resolves_to_loopback_is_fine_since_kit_sets_the_interface(site: Site) -> None:
    on(site.lab, "node3", "sed", "-i", "1i 127.0.1.1 node3", "/etc/hosts")
    assert not site.bad()
    on(site.lab, "node3", "sed", "-i", "1i 127.0.0.1 localhost node3", "/etc/hosts")
    assert not site.bad()


SILENT_DNS = """
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
print("up", flush=True)
sys.stdin.read()
"""


@pytest.mark.lab
def test_a_dns_server_that_never_answers_is_a_warning_with_its_cure(
    site: Site, squatter: Callable[[str, str], subprocess.Popen[bytes]]
) -> None:
    """Where other hosts' addresses have no names in /etc/hosts, in torch's form, each rank would wait for it."""
    squatter("node3", SILENT_DNS)
    assert not site.bad(), "their names are in /etc/hosts"
    on(site.lab, "node3", "sed", "-i.old", "/^::ffff:.* node[12]/d", "/etc/hosts")
    on(site.lab, "node3", "cp", "/etc/resolv.conf", "/etc/resolv.conf.old")
    on(site.lab, "node3", "sh", "-c", "echo nameserver 127.0.0.1 >/etc/resolv.conf")
    try:
        (found,) = site.bad()
    finally:
        on(site.lab, "node3", "mv", "/etc/hosts.old", "/etc/hosts")
        on(site.lab, "node3", "mv", "/etc/resolv.conf.old", "/etc/resolv.conf")
    assert (found.host, found.level) == ("node3", "warning")
    assert found.found.startswith(
        "its DNS server gives no answer within 1 s when asked for the name of another"
    )
    assert "on node3: mend the nameserver in /etc/resolv.conf" in found.cure
    assert "or have a line `::ffff:ADDRESS NAME` in /etc/hosts for each host" in found.cure


@pytest.fixture
def squatter(lab: Lab) -> Iterator[Callable[[str, str], subprocess.Popen[bytes]]]:
    """Runs a python program, which ends with its stdin, on a host until the test's end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(host: str, program: str) -> subprocess.Popen[bytes]:
        argv = lab.enter_argv(host, "/usr/bin/env", "python3", "-c", program)
        started.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == b"up\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.lab
def test_a_port_that_is_taken_is_named_with_who_has_it(site: Site, squatter: Any) -> None:
    squatter(
        "node1",
        "import socket,sys;s=socket.create_server(('',29500));print('up',flush=True);sys.stdin.read()",
    )
    (found,) = site.bad(port=29500)
    assert (found.host, found.level) == ("node1", "failure")
    assert found.found.startswith("port 29500 is taken by pid ")
    assert "python3 -c import socket" in found.found
    (warned,) = site.bad()
    assert warned.level == "warning"
    site.mend(Finding(check="", host="", level="ok", cure=found.cure.partition(",")[0]))
    until(lambda: not site.bad(), what="the port to be free")


@pytest.mark.lab
def test_an_address_at_which_somebody_else_answers_is_not_taken_for_the_host(site: Site) -> None:
    on(
        site.lab, "node1", "nft",
        f"table ip site {{ chain c {{ type nat hook prerouting priority -100; "
        f"ip saddr {site.address('node2')} tcp dport 32768-60999 redirect to :22\n }}\n }}",
    )  # fmt: skip
    (found,) = site.bad()
    assert (found.host, found.level) == ("node2 → node1", "failure")
    assert "answered by somebody else (it answers 'SSH-2.0-OpenSSH" in found.found


@pytest.mark.lab
@pytest.mark.parametrize("deadline_s", [4.0, 6.0])
def test_a_host_that_says_nothing_any_more_is_named_within_the_deadline(
    site: Site, deadline_s: float
) -> None:
    (pid,) = [
        pid
        for pid, argv in site.lab.processes("node2").items()
        if any("compile(i.read" in word for word in argv) and "python" in argv[0]
    ]
    inventory = site.inventory()
    facts = check.gather(site.channels, inventory, peers=cluster.peer_addresses(inventory.hosts))

    def is_named_alone() -> bool:
        start = time.monotonic()
        found = netcheck.network_findings(site.channels, inventory, facts, deadline_s=deadline_s)
        assert time.monotonic() - start < deadline_s + BUSY_S
        levels = {finding.host: finding.level for finding in found}
        assert levels["node2"] == "failure"
        assert "no answer within " in next(each.found for each in found if each.host == "node2")
        return levels == {"node1": "ok", "node2": "failure", "node3": "ok"}

    os.kill(pid, signal.SIGSTOP)
    try:
        # On a busy machine hosts that are well may be late, too, by a deadline that is so near: then again.
        until(is_named_alone, timeout_s=120, what="an answer of the others")
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.lab
def test_a_cut_cable_is_found_within_the_deadline(site: Site) -> None:
    inventory = site.inventory()
    facts = check.gather(site.channels, inventory, peers=cluster.peer_addresses(inventory.hosts))
    site.lab.cut("node3")
    start = time.monotonic()
    found = netcheck.network_findings(site.channels, inventory, facts, deadline_s=5)
    assert time.monotonic() - start < 5 + BUSY_S
    assert {finding.host: finding.level for finding in found}["node3"] == "failure"


# --- pure parts -----------------------------------------------------------------------------------------------

RULESET = """
table inet filter { # handle 1
	set trusted { # handle 9
		type ipv4_addr
	}
	chain input { # handle 1
		type filter hook input priority filter; policy accept;
		iif "lo" accept # handle 2
		ct state invalid drop # handle 3
		ct state established,related accept # handle 4
		%s # handle 5
	}
	chain output { # handle 6
		type filter hook output priority filter; policy accept;
	}
}
"""


@pytest.mark.parametrize(
    ("rule", "blocks"),
    [
        ("ip saddr 10.0.0.3 drop", True),
        ("ip saddr 10.0.0.4 drop", False),
        ("ip saddr != 10.0.0.4 drop", True),
        ("ip saddr != 10.0.0.0/24 drop", False),
        ("ip saddr 10.0.0.0/24 tcp dport 29500 reject with tcp reset", True),
        ("ip saddr { 10.0.0.1-10.0.0.9, 10.2.0.0/16 } counter packets 5 bytes 300 drop", True),
        ("ip saddr @trusted drop", False),
        ("ip daddr 10.0.0.1 tcp dport { 22, 29000-29999 } drop", True),
        ("tcp dport 29501-60999 drop", False),
        ("tcp dport != 22 ct state new log prefix \"x\" drop", True),
        ("tcp sport 29500 drop", False),
        ("udp dport 29500 drop", False),
        ("iifname \"eth1\" drop", True),
        ("iifname != \"eth1\" drop", False),
        ("limit rate over 10/second drop", False),
        ("tcp flags syn / fin,syn,rst,ack drop", True),
        ("ip saddr 10.0.0.3 accept", False),
        ("jump other", False),
    ],
)  # fmt: skip
def test_the_rule_that_blocks_is_picked_from_a_ruleset(rule: str, blocks: bool) -> None:
    found = firewall.blocking(
        RULESET % rule, "input", source="10.0.0.3", target="10.0.0.1", port=29500, interface="eth1"
    )
    assert found == (firewall.Rule("inet filter input", "5", rule) if blocks else None)
    assert not firewall.blocking(
        RULESET % rule, "output", source="10.0.0.3", target="10.0.0.1", port=29500, interface="eth1"
    )


def test_a_policy_of_dropping_is_found_where_no_rule_accepts() -> None:
    ruleset = RULESET.replace("policy accept", "policy drop", 1)

    def found(rule: str) -> firewall.Rule | None:
        return firewall.blocking(
            ruleset % rule, "input", source="10.0.0.3", target="10.0.0.1", port=29500, interface="eth1"
        )

    assert found("tcp dport 22 accept") == firewall.Rule("inet filter input", None, "policy drop")
    assert found("tcp dport 1024-65535 accept") is None


@pytest.mark.parametrize(
    ("tool", "cure"),
    [
        ("firewalld", "on b: sudo firewall-cmd --permanent --zone=trusted --add-source=10.0.0.3 "
         "&& sudo firewall-cmd --reload"),
        ("ufw", "on b: sudo ufw allow from 10.0.0.3"),
        ("iptables", "on b: sudo iptables -I INPUT -s 10.0.0.3 -j ACCEPT"),
        ("nftables", "on b: find what drops it, sudo nft --handle list ruleset, and let 10.0.0.3 in"),
        ("", "no rule on either host is seen to do it; look between them (a cloud's security group, a switch): "
         "let TCP 10.0.0.3 → 10.0.0.1 through"),
    ],
)  # fmt: skip
def test_the_cure_is_in_the_language_of_the_hosts_firewall(tool: str, cure: str) -> None:
    # Rules that a tool has made are the tool's to change.
    rules = RULESET % "ip saddr 10.0.0.3 drop" if tool in ("firewalld", "ufw") else ""
    here = {"tool": tool, "rules": rules, "may_see": True}
    said, _ = firewall.cure(
        {"b": here, "a": {"tool": "", "rules": "", "may_see": True}}, source="a", target="b", port=29500,
        addresses={"a": "10.0.0.3", "b": "10.0.0.1"}, interfaces={"a": "eth0", "b": "eth1"},
    )  # fmt: skip
    assert said == cure


def test_the_cure_of_many_pairs_has_some_commands_and_the_number_of_hosts() -> None:
    names = [f"n{number}" for number in range(6)]
    ends = {
        name: outcomes.End(
            host=name, address=f"10.0.0.{number}", interface="eth0", mtu=1500, ports=(29500,), udp_port=None,
            port_range=(32768, 60999),
        )
        for number, name in enumerate(names)
    }  # fmt: skip
    pairs = {
        (name, "n0"): outcomes.Pair(
            source=name, target="n0", failed={"dropped": (29500,)}, words={}, unsent={}, is_alone=True
        )
        for name in names[1:]
    }

    def cure(tool: str, outcome: str = "dropped") -> str:
        there = {key: replace(pair, failed={outcome: (29500,)}) for key, pair in pairs.items()}
        here = {name: {"tool": tool, "rules": "", "may_see": True} for name in names}
        (found,) = outcomes.findings(there, ends, here, port=29500, port_matters=True)
        return found.cure

    allowed = "; ".join(f"on n0: sudo ufw allow from 10.0.0.{number}" for number in (1, 2, 3))
    assert cure("ufw") == f"{allowed}; so for all 5 hosts"
    assert cure("").count("look between them") == 1
    another = "; or give `network:` another network, if this one does not connect them"
    assert cure("", "unreachable") == cure("") + another

    def wanted(num_hosts: int) -> str:
        some = {name: ends[name] for name in names[:num_hosts]}
        back = {
            ("n0", name): replace(pairs[name, "n0"], source="n0", target=name) for name in names[1:num_hosts]
        }
        here = {name: {"tool": "", "rules": "", "may_see": True} for name in some}
        (found,) = outcomes.findings(back, some, here, port=29500, port_matters=True)
        return found.wanted

    assert wanted(3).startswith("TCP to 10.0.0.1 and 10.0.0.2 on port 29500")
    assert wanted(6).startswith("TCP to 10.0.0.1, 10.0.0.2, 10.0.0.3 and 2 more on port 29500")


def test_a_rule_that_drops_is_not_blamed_for_no_route_to_host() -> None:
    rules = RULESET.replace("policy accept", "policy drop", 1) % "tcp dport 22 accept"

    def cure(*, is_refused: bool) -> str:
        return firewall.cure(
            {"b": {"tool": "", "rules": rules, "may_see": True}}, source="a", target="b", port=29500,
            addresses={"a": "10.0.0.3", "b": "10.0.0.1"}, interfaces={"a": "eth0", "b": "eth1"},
            is_refused=is_refused,
        )[0]  # fmt: skip

    assert cure(is_refused=False).startswith("on b: sudo nft insert rule")
    assert "look between them" in cure(is_refused=True)


def test_of_ipv6_the_rules_are_those_of_ip6tables() -> None:
    said, _ = firewall.cure(
        {"b": {"tool": "iptables", "rules": "", "may_see": True}}, source="a", target="b", port=29500,
        addresses={"a": "fd00::3", "b": "fd00::1"}, interfaces={"a": "eth0", "b": "eth1"},
    )  # fmt: skip
    assert said == "on b: sudo ip6tables -I INPUT -s fd00::3 -j ACCEPT"


def test_a_host_that_filters_ipv6_alone_has_a_firewall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, rules in (("nft", ""), ("iptables", "-P INPUT ACCEPT"), ("ip6tables", "-P INPUT DROP")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{rules}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert netstate.firewall()["tool"] == "iptables"


def sysfs(root: Path, ports: dict[str, dict[str, str]], interface: str = "ib0") -> str:
    """A /sys/class/infiniband as the kernel lays it out: device → file → its line."""
    for device, files in ports.items():
        folder = root / "class/infiniband" / device / "ports/1"
        folder.mkdir(parents=True)
        (root / "class/infiniband" / device / "device/net" / interface).mkdir(parents=True)
        for name, line in files.items():
            (folder / name).write_text(line + "\n")
    return str(root)


ACTIVE = {
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "link_layer": "InfiniBand",
    "rate": "200 Gb/sec (4X HDR)",
}
DOWN = {**ACTIVE, "state": "1: DOWN", "phys_state": "2: Polling"}
INIT = {**ACTIVE, "state": "2: INIT"}


def test_rdma_ports_are_read_from_sysfs(tmp_path: Path) -> None:
    assert netstate.rdma_ports(str(tmp_path)) == []
    found = netstate.rdma_ports(sysfs(tmp_path / "a [b]", {"mlx5_0": ACTIVE, "mlx5_1": {}}))
    assert found == [
        {"device": "mlx5_0", "port": 1, "state": "ACTIVE", "physical": "LinkUp", "link_layer": "InfiniBand",
         "rate": "200 Gb/sec (4X HDR)", "interfaces": ["ib0"]},
        {"device": "mlx5_1", "port": 1, "state": "unknown", "physical": "unknown", "link_layer": "InfiniBand",
         "rate": "", "interfaces": ["ib0"]},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b", "env", "kind", "level", "words"),
    [
        ({"mlx5_0": ACTIVE}, {"mlx5_0": ACTIVE}, {}, "infiniband", None, ""),
        ({"mlx5_0": ACTIVE}, {"mlx5_0": DOWN}, {}, "infiniband", "failure", "mlx5_0 port 1 is DOWN"),
        ({"mlx5_0": ACTIVE}, {"mlx5_0": INIT}, {}, "physical", "failure", "mlx5_0 port 1 is INIT"),
        ({"mlx5_0": ACTIVE}, {}, {}, "physical", "warning", "0 active RDMA ports; a has 1"),
        ({"m0": ACTIVE, "m1": ACTIVE}, {"m0": ACTIVE, "m1": DOWN}, {}, "physical", "warning",
         "1 active RDMA ports (m1 port 1 is DOWN); a has 2"),
        ({"m0": ACTIVE, "m1": ACTIVE}, {"m0": ACTIVE, "m1": DOWN}, {"NCCL_IB_HCA": "m0"}, "physical", None, ""),
        ({"mlx5_0": ACTIVE}, {"mlx5_0": DOWN}, {"NCCL_IB_DISABLE": "1"}, "physical", None, ""),
        ({"mlx5_0": ACTIVE}, {"mlx5_0": DOWN}, {"NCCL_IB_DISABLE": "1"}, "infiniband", "failure", "is DOWN"),
    ],
)  # fmt: skip
def test_rdma_that_is_not_active_is_named(
    tmp_path: Path, a: Any, b: Any, env: dict[str, str], kind: str, level: str | None, words: str
) -> None:
    nic = {"name": "ib0", "kind": kind}
    ports = {name: netstate.rdma_ports(sysfs(tmp_path / name, each)) for name, each in (("a", a), ("b", b))}
    found = nethost.rdma_findings(ports, {"a": nic, "b": nic}, env={"a": env, "b": env})
    assert [(finding.host, finding.level) for finding in found] == ([("b", level)] if level else [])
    for finding in found:
        assert words in finding.found
        assert finding.cure.startswith("on b: ")
    if "INIT" in words:
        assert "subnet manager" in found[0].cure


@pytest.mark.parametrize(
    ("faults", "wanted"),
    [
        ("ab", ["a → b"]),
        ("ab cb", ["b: from all 2 other hosts: "]),
        ("ba bc", ["b: to all 2 other hosts: "]),
        ("ab cb ba bc", ["b: from all 2 other hosts: ", "b: to all 2 other hosts: "]),
        ("ab ca", ["a → b", "c → a"]),
    ],
)
def test_pairs_that_fare_alike_are_told_of_once(faults: str, wanted: list[str]) -> None:
    groups = outcomes.grouped({(pair[0], pair[1]): "dropped" for pair in faults.split()}, "abc")
    assert [f"{group.host}: {group.words}" if group.words else group.host for group in groups] == wanted


def test_two_hosts_are_a_pair_and_hosts_that_fare_differently_are_not_alike() -> None:
    assert [group.host for group in outcomes.grouped({("a", "b"): 1}, "ab")] == ["a → b"]
    assert [group.host for group in outcomes.grouped({("a", "b"): 1, ("c", "b"): 2}, "abc")] == [
        "a → b",
        "c → b",
    ]


@pytest.fixture
def two_ends() -> Iterator[Callable[[str], dict[str, Any]]]:
    """Two hosts' ends in this process; returns what one says of itself."""
    sessions = ("netprobe a", "netprobe b")

    def begin(address: str) -> dict[str, Any]:
        for session in sessions:
            found = netprobe.begin(session, session[-1], "t0ken", address, None, 3, 20.0)
        return found

    yield begin
    for session in sessions:
        netprobe.finish(session)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_two_ends_know_each_other(address: str, two_ends: Any) -> None:
    b = two_ends(address)
    assert len(b["ports"]) == 3
    peer = {
        "name": "b",
        "address": address,
        "ports": b["ports"],
        "udp_port": b["udp_port"],
        "sizes": [256, 9000],
    }
    found = netprobe.try_peers("netprobe a", [peer], 2.0, 5.0)["b"]
    assert (found["connects"], found["failed"], found["source"]) == (b["ports"], {}, address)
    assert netprobe.arrived("netprobe b", {"a": [256, 9000]}, 5.0) == {"a": [256, 9000]}
    other = netprobe.try_peers("netprobe a", [{**peer, "name": "c"}], 2.0, 5.0)["c"]
    assert other["words"] == {"stranger": "b answers there"}
    netprobe.finish("netprobe b")
    gone = netprobe.try_peers("netprobe a", [peer], 2.0, 5.0)["b"]
    assert gone["failed"] == {"refused": b["ports"]}


def test_somebody_who_says_nothing_or_something_else_is_not_the_host(two_ends: Any) -> None:
    two_ends("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as rude:
        threading.Thread(target=lambda: rude.accept()[0].close(), daemon=True).start()

        def failed(server: socket.socket, answer_s: float, limit_s: float) -> dict[str, list[int]]:
            ports = [server.getsockname()[1]]
            peer: Any = {"name": "b", "address": "127.0.0.1", "ports": ports, "udp_port": None, "sizes": []}
            return netprobe.try_peers("netprobe a", [peer], answer_s, limit_s)["b"]["failed"]

        # Who hangs up has time for it: 0.3 s may go by on a busy machine.
        assert failed(rude, 30.0, 60.0) == {"stranger": [rude.getsockname()[1]]}
        assert failed(silent, 0.3, 60.0) == {"silent": [silent.getsockname()[1]]}
        assert failed(silent, 60.0, 0.2).keys() == {"untried"}


class Here:
    """A channel to an end in this process, whose first calls of some peers get no answer."""

    def __init__(self, host: str, deaf: dict[str, int]) -> None:
        self.host = host
        self.deaf = deaf
        self.asked: list[list[str]] = []

    def call(self, name: str, *, timeout_s: float, session: str, **args: Any) -> Any:
        own = f"{session} {self.host}"
        if name == "netprobe.arrived":
            return netprobe.arrived(own, **args)
        peers = args.pop("peers")
        self.asked.append([peer["name"] for peer in peers])
        found = netprobe.try_peers(own, [each for each in peers if not self.deaf.get(each["name"])], **args)
        for peer in peers:
            if self.deaf.get(peer["name"]):
                self.deaf[peer["name"]] -= 1
                found[peer["name"]] = {
                    "connects": [], "failed": {"dropped": peer["ports"]}, "words": {}, "source": None, "unsent": {},
                    "dropped_from": [40000],
                }  # fmt: skip
        return found


@pytest.mark.parametrize("deaf", [1, 99])
def test_no_pair_is_called_blocked_before_it_was_tried_alone(two_ends: Any, deaf: int) -> None:
    two_ends("127.0.0.1")
    said = {}
    for name in "ab":
        netprobe.finish(f"netprobe {name}")
        said[name] = netprobe.begin(f"netprobe {name}", name, "t0ken", "127.0.0.1", None, 2, 30.0)
    ends = {
        name: outcomes.End(
            host=name, address="127.0.0.1", interface="lo", mtu=1500, ports=tuple(said[name]["ports"]),
            udp_port=said[name]["udp_port"], port_range=(32768, 60999),
        )
        for name in "ab"
    }  # fmt: skip
    channels: Any = {"a": Here("a", {"b": deaf}), "b": Here("b", {})}
    pairs, silent = netpairs.measure(channels, "netprobe", ends, left_s=lambda: 20.0)
    assert not silent
    assert channels["a"].asked[-1:] == [["b"]]
    assert pairs["b", "a"].is_open
    assert pairs["a", "b"].is_alone
    assert pairs["a", "b"].is_open == (deaf == 1)
    found = outcomes.findings(pairs, ends, {}, port=29500, port_matters=True)
    assert [each.level for each in found] == ([] if deaf == 1 else ["failure"])
    assert all("tried twice, the second time this pair alone" in each.found for each in found)


def test_a_pair_that_could_not_be_tried_alone_is_no_failure(two_ends: Any) -> None:
    ends = {
        name: outcomes.End(
            host=name,
            address="127.0.0.1",
            interface="lo",
            mtu=1500,
            ports=(40000,),
            udp_port=1,
            port_range=(1, 2),
        )
        for name in "ab"
    }
    channels: Any = {"a": Here("a", {"b": 99}), "b": Here("b", {"a": 99})}
    two_ends("127.0.0.1")
    pairs, _ = netpairs.measure(channels, "netprobe", ends, left_s=lambda: 3.0)
    found = outcomes.findings(pairs, ends, {}, port=29500, port_matters=True)
    assert {each.level for each in found} == {"warning"}
    assert all("there was no time to try it alone" in each.found for each in found)


def test_the_kernel_tells_how_full_its_neighbour_tables_are() -> None:
    tables = netstate.neighbours()
    assert set(tables) >= {"arp_cache"}
    table = tables["arp_cache"]
    limit = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")
    assert table["is_ours"] == limit.exists()
    if limit.exists():
        assert table["most"] == int(limit.read_text())
        rows = Path("/proc/net/stat/arp_cache").read_text().splitlines()
        place = rows[0].split().index("table_fulls")
        assert table["overflows"] == sum(int(row.split()[place], 16) for row in rows[1:])


def test_a_neighbour_table_that_is_too_small_is_named_and_no_firewall() -> None:
    def table(entries: int, overflows: int, **more: Any) -> dict[str, dict[str, Any]]:
        return {
            "arp_cache": {"entries": entries, "most": 1024, "overflows": overflows, "is_ours": True, **more}
        }

    before = {"a": table(900, 7), "b": table(900, 0), "c": table(10, 3)}
    after = {"a": table(1024, 12), "b": table(1000, 0), "c": table(10, 3)}
    (found,) = nethost.neighbour_findings(
        before, after, lost=[("a", "b"), ("c", "a"), ("b", "c")], num_hosts=3
    )
    assert (found.host, found.hosts, found.level) == ("a", ("a",), "failure")
    assert found.found == (
        "the kernel's neighbour table overflowed 5 times during this check (\"neighbour: arp_cache: neighbor table "
        'overflow!" in its log): 1,024 entries on a, net.ipv4.neigh.default.gc_thresh3 is 1,024; '
        "2 pairs of hosts got no answer"
    )
    assert found.cure == (
        "on a: sudo sysctl -w net.ipv4.neigh.default.gc_thresh1=1024 net.ipv4.neigh.default.gc_thresh2=2048 "
        "net.ipv4.neigh.default.gc_thresh3=4096; a file in /etc/sysctl.d keeps it"
    )
    (mild,) = nethost.neighbour_findings(before, after, lost=[("b", "c")], num_hosts=3)
    assert mild.level == "warning"
    assert not nethost.neighbour_findings(before, before, lost=[("a", "b")], num_hosts=3)
    assert not nethost.neighbour_findings({}, after, lost=[("a", "b")], num_hosts=3)
    inside = {name: table(1024, 12, is_ours=False) for name in "abc"}
    (many,) = nethost.neighbour_findings(before, inside, lost=[], num_hosts=3)
    assert (many.host, many.hosts) == ("3 hosts", ("a", "b", "c"))
    assert many.cure.startswith("on the machine that a is a part of: sudo sysctl")
    (small,) = nethost.neighbour_findings(after, {"a": after["a"]}, lost=[], num_hosts=1100)
    assert small.found.startswith(
        "the kernel's neighbour table is too small for 1100 hosts: 1,024 entries on a"
    )
    assert "gc_thresh3=8192" in small.cure


def test_local_hosts_are_tried_over_loopback(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(
        f"connection: local\nworkdir: {tmp_path}/w\npython: {sys.executable}\nhosts: {{a: , b: }}\n"
    )
    inventory = load_inventory(path)
    with cluster.channels(inventory.hosts, cluster.SshOptions()) as channels:
        peers = cluster.peer_addresses(inventory.hosts)
        facts = check.gather(channels, inventory, peers=peers)
        found = netcheck.network_findings(channels, inventory, facts, deadline_s=DEADLINE_S)
        assert [(each.host, each.level) for each in found if "29500" not in each.found] == [
            ("a", "ok"),
            ("b", "ok"),
        ]
        late = netcheck.network_findings(channels, inventory, facts, deadline_s=0.1)
        assert [(each.host, each.level) for each in late] == [("a", "warning"), ("b", "warning")]


@pytest.mark.parametrize(
    ("wanted", "is_chosen"),
    [("", True), ("mlx5", True), ("mlx5_1", True), ("=mlx5_1", False), ("=mlx5_10", True), ("mlx5_1:2", False),
     ("mlx5_10:1", True), ("^mlx5_1", False), ("^=mlx5_1", True), ("mlx4_0,mlx5_10", True)],
)  # fmt: skip
def test_nccl_ib_hca_is_read_as_nccl_does(wanted: str, is_chosen: bool) -> None:
    assert nethost.is_chosen_hca(wanted, {"device": "mlx5_10", "port": 1}) == is_chosen


def nics(*numbers: int | None, key: str) -> dict[str, dict[str, Any]]:
    return {f"n{index}": {"name": "eth0", key: number} for index, number in enumerate(numbers)}


def test_the_slowest_is_named_and_differing_speeds_are_warned_of() -> None:
    assert not nethost.speed_findings(nics(10000, 10000, None, key="speed_mbit"))
    found = nethost.speed_findings(nics(10000, 1000, 100, key="speed_mbit"))
    assert [(finding.host, finding.level) for finding in found] == [("n1", "warning"), ("n2", "warning")]
    assert found[0].found == "eth0 runs at 1 Gb/s; 1 of 3 hosts has 10 Gb/s"
    assert found[1].found == "eth0 runs at 100 Mb/s, the slowest; 1 of 3 hosts has 10 Gb/s"


def test_of_two_mtus_that_are_as_common_the_smaller_one_is_advised() -> None:
    (found,) = nethost.mtu_findings(nics(1500, 9000, key="mtu"))
    assert (found.host, found.cure) == ("n1", "on n1: sudo ip link set eth0 mtu 1500")


@pytest.mark.parametrize(
    ("network", "passes", "cure"),
    [("10.0.0.", 1200, "on a: sudo ip link set eth1 mtu 1200; on b: sudo ip link set eth2 mtu 1200; or raise the MTU"),
     ("10.0.0.", 256, "raise the MTU of the switch, or of the tunnel: IPv4 needs 576 or more"),
     ("fd00::", 1280, "on a: sudo ip link set eth1 mtu 1280; on b: sudo ip link set eth2 mtu 1280; or raise the MTU"),
     ("fd00::", 1200, "raise the MTU of the switch, or of the tunnel: IPv6 needs 1280 or more")],
)  # fmt: skip
def test_no_mtu_is_advised_with_which_the_interface_would_lose_its_address(
    network: str, passes: int, cure: str
) -> None:
    ends = {
        name: outcomes.End(
            host=name, address=f"{network}{number}", interface=f"eth{number}", mtu=1500, ports=(29500,),
            udp_port=5000, port_range=(32768, 60999),
        )
        for number, name in enumerate("ab", start=1)
    }  # fmt: skip
    pair = outcomes.Pair(
        source="a",
        target="b",
        connects=(29500,),
        failed={},
        words={},
        unsent={},
        arrived=frozenset({256, passes}),
    )
    (found,) = outcomes.findings({("a", "b"): pair}, ends, {}, port=29500, port_matters=True)
    assert found.cure.startswith(cure)


def test_packets_that_leave_by_another_way_than_the_chosen_interface_are_a_warning() -> None:
    ends = {
        name: outcomes.End(
            host=name, address=f"10.0.0.{number}", interface=f"eth{number}", mtu=1500, ports=(29500, 40000),
            udp_port=5000, port_range=(32768, 60999),
        )
        for number, name in enumerate("ab", start=1)
    }  # fmt: skip
    pairs = {
        (a, b): outcomes.Pair(
            source=a, target=b, connects=(29500, 40000), failed={}, words={}, unsent={},
            source_address=source_address, arrived=frozenset({256, 1500}),
        )
        for a, b, source_address in (("a", "b", "192.168.0.1"), ("b", "a", "10.0.0.2"))
    }  # fmt: skip
    (found,) = outcomes.findings(pairs, ends, {}, port=29500, port_matters=True)
    assert (found.host, found.level) == ("a", "warning")
    assert found.found == "its packets to b leave from 192.168.0.1, not from 10.0.0.1 (eth1)"
    assert found.cure == "on a: sudo ip route replace 10.0.0.2 dev eth1 src 10.0.0.1"
