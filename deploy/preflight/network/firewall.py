"""Finds the firewall rule that blocks a connection, and the command that allows it; pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from nodekit.deploy.host.probes.network.netstate import Firewall

_TABLE = re.compile(r"table (\S+) (\S+) \{")
_CHAIN = re.compile(r"chain (\S+) \{")
_HOOK = re.compile(r"type filter hook (\S+) .*?policy (\w+);")
_RULE = re.compile(r"(?P<text>.*\S) # handle (?P<handle>\d+)$")
_ADDRESS = re.compile(r"\bip6? (saddr|daddr) (!= )?(\{[^}]*\}|\S+)")
_PORT = re.compile(r"\btcp (sport|dport) (!= )?(\{[^}]*\}|\S+)")
_INTERFACE = re.compile(r'\b([io])if(?:name)? (!= )?("[^"]*"|\S+)')
# Parts of a rule that do not restrict connections, or that match the first packet of a new one.
_NOISE = re.compile(
    r'\bcounter packets \d+ bytes \d+|\bcounter\b|\blog( prefix "[^"]*")?( level \w+)?|\bct state new\b'
    r"|\bmeta l4proto tcp\b|\bip protocol tcp\b|\btcp flags syn( / [\w,|]+)?|\btcp flags & \([\w |]+\) == syn"
    r'|\bcomment "[^"]*"'
)

# Firewall tool → how to allow an address.
_BY_TOOL = {
    "firewalld": "sudo firewall-cmd --permanent --zone=trusted --add-source={address} && sudo firewall-cmd --reload",
    "ufw": "sudo ufw allow from {address}",
    "iptables": "sudo iptables -I INPUT -s {address} -j ACCEPT",
    "nftables": "find what drops it, sudo nft --handle list ruleset, and let {address} in",
}
_UNSEEN = "sudo nft list ruleset; sudo iptables -S: find what drops it, let {address} in"


@dataclass(frozen=True)
class Rule:
    """The rule or policy that drops or rejects a connection."""

    chain: str
    """Family, table and chain, as in nft's commands."""
    handle: str | None
    """None: the chain's policy."""
    text: str


def blocking(ruleset: str, hook: str, *, source: str, target: str, port: int, interface: str) -> Rule | None:
    """Return the rule that certainly blocks a TCP connection, from ``nft --handle list ruleset``.

    Args:
        ruleset: the output of nft.
        hook: "input" on the target's host, "output" on the source's.
        source: address that connects.
        target: address that is connected to.
        port: the target's.
        interface: of the host whose ruleset it is.

    Returns:
        None if no rule does, or only rules that depend on more than addresses, ports and interfaces.
    """
    table = chain = policy = ""
    hooked = False
    for line in map(str.strip, ruleset.splitlines()):
        if match := _TABLE.match(line):
            table = " ".join(match.groups())
        elif match := _CHAIN.match(line):
            chain, hooked, policy = match[1], False, ""
        elif match := _HOOK.search(line):
            hooked, policy = match[1] == hook, match[2]
        elif hooked and (match := _RULE.match(line)):
            verdict = _verdict(match["text"], source, target, port, interface)
            if verdict == "accept":
                hooked = False  # this chain accepts it; another one may not
            elif verdict:
                return Rule(f"{table} {chain}", match["handle"], match["text"])
        elif hooked and line == "}" and policy == "drop":
            return Rule(f"{table} {chain}", None, "policy drop")
    return None


def _verdict(text: str, source: str, target: str, port: int, interface: str) -> str:
    """Return ``accept``, ``drop`` or ``reject`` for a new connection; "" if a rule does not match or is unclear."""
    end = re.search(r"\b(accept|drop|reject)\b.*$", text)
    if end is None:
        return ""
    condition = text[: end.start()]
    for way, negated, value in _ADDRESS.findall(condition):
        if _has_address(value, source if way == "saddr" else target) == bool(negated):
            return ""
    for way, negated, value in _PORT.findall(condition):
        if way == "sport" or _has_port(value, port) == bool(negated):
            return ""
    for _, negated, value in _INTERFACE.findall(condition):
        if (value.strip('"') == interface) == bool(negated):
            return ""
    for known in (_ADDRESS, _PORT, _INTERFACE, _NOISE):
        condition = known.sub("", condition)
    return "" if condition.strip() else end[1]


def _items(value: str) -> list[str]:
    return [item.strip() for item in value.strip("{} ").split(",") if item.strip()]


def _has_address(value: str, address: str) -> bool:
    wanted = ipaddress.ip_address(address)
    for item in _items(value):
        try:
            if "-" in item:
                low, high = (ipaddress.ip_address(end) for end in item.split("-"))
                inside = low.version == wanted.version and int(low) <= int(wanted) <= int(high)
            else:
                inside = wanted in ipaddress.ip_network(item, strict=False)
        except ValueError:  # a named set
            return False
        if inside:
            return True
    return False


def _has_port(value: str, port: int) -> bool:
    for item in _items(value):
        low, _, high = item.partition("-")
        if low.isdigit() and int(low) <= port <= int(high or low):
            return True
    return False


def cure(
    found: Mapping[str, Firewall],
    *,
    source: str,
    target: str,
    addresses: Mapping[str, str],
    interfaces: Mapping[str, str],
    port: int,
    answer_port: int | None = None,
    is_refused: bool = False,
) -> tuple[str, str]:
    """Return how to let `source` connect to a port of `target`, and what blocks it ("" if unknown).

    Args:
        found: host → `netstate.firewall` there, for the hosts that were asked.
        source: the host that connects.
        target: the host that is connected to.
        addresses: host → its address.
        interfaces: host → the interface with that address.
        port: the target's.
        answer_port: the source's, if it is known: answers go there.
        is_refused: whether an answer said no, as from a rule that rejects, or a network without the target.
    """
    ways = [(target, "input", source, target, port), (source, "output", source, target, port)]
    if answer_port is not None:
        ways += [
            (target, "output", target, source, answer_port),
            (source, "input", target, source, answer_port),
        ]
    for host, hook, sender, receiver, number in ways:
        here = found.get(host, {})
        if here.get("tool") in ("firewalld", "ufw"):
            continue  # it regenerates the rules, so that they must be changed with it
        rule = blocking(
            here.get("rules", ""),
            hook,
            source=addresses[sender],
            target=addresses[receiver],
            port=number,
            interface=interfaces[host],
        )
        if rule is not None and not (is_refused and rule.text.endswith("drop")):
            way = f"saddr {addresses[sender]}" if hook == "input" else f"daddr {addresses[receiver]}"
            return f"on {host}: {_nft(rule, way)}", f"{host}'s nftables, chain {rule.chain}: {rule.text}"
    here = found.get(target, {})
    tool, address = here.get("tool", ""), addresses[source]
    command = _BY_TOOL.get(tool, "" if here.get("may_see", True) else _UNSEEN)
    if not command:
        between = f"(a cloud's security group, a switch): let TCP {address} → {addresses[target]} through"
        way = f"no rule on either host is seen to do it; look between them {between}"
        return way, f"{target} has {tool}" if tool else ""
    command = command.format(address=address)
    if ":" in address:  # iptables knows IPv4 only
        command = command.replace("iptables", "ip6tables")
    return f"on {target}: {command}", f"{target} has {tool}" if tool else ""


def _nft(rule: Rule, way: str) -> str:
    """Return the nft command that deletes a rule, or accepts packets before the chain's policy."""
    if rule.handle is not None:
        return f"sudo nft delete rule {rule.chain} handle {rule.handle}"
    family = "ip6" if ":" in way else "ip"
    return f"sudo nft insert rule {rule.chain} {family} {way} accept"
