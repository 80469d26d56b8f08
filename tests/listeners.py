"""What listens on a lab host while a job runs, and what docs/security.md says of it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from nodekit.deploy.host import current_status
from nodekit.deploy.lab.lab_cluster import Lab

DOCS = Path(__file__).parent.parent / "docs" / "security.md"
STORE, KEEPALIVES = "rendezvous host: store", "rendezvous host: keepalives"
HELD, COPIES = "every node: a reserved port", "every node: copies of snapshots"
RANKS_STORE, RANKS, LEADER = "node of rank 0: the ranks' store", "ranks: gloo, NCCL", "leader of a Slurm job"
_WHERE = {"its training address": "training", "all addresses of its node": "0.0.0.0"}


def told() -> dict[str, str]:
    """Who listens → where, as the table of docs/security.md has it, of what listens on a host while a job runs."""
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| (.+?),.* \|", DOCS.read_text(), re.MULTILINE)
    return {who: _WHERE[where] for who, where in rows}


def ports(lab: Lab, host: str) -> dict[tuple[str, int], str]:
    """Where something listens on a host → the command lines of all that have the socket."""
    init = lab._init(host)
    assert init is not None
    # In the network of the host alone, so that pids are those of this machine.
    argv = ["nsenter", f"--target={init.pid}", "--net", "--", "ss", "-Hltnp"]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout
    argvs = lab.processes(host)
    found = {}
    for line in said.splitlines():
        address, _, port = line.split()[3].rpartition(":")
        owners = [" ".join(argvs.get(int(pid), [])) for pid in re.findall(r"pid=(\d+)", line)]
        found[address, int(port)] = "; ".join(owners)
    return found


def found(lab: Lab, host: str, folder: Path, *, is_host: bool, has_copies: bool) -> dict[str, str]:
    """Who listens on a host → where: "training" for the address of its node alone.

    `folder` is its node's, `is_host` whether it has the rendezvous, and rank 0.
    """
    status = current_status.statuses(str(folder))[host]
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    *_, master = [each["master"] for each in lines if each["kind"] == "rendezvous"]
    known = {status["held_port"]: HELD}
    if is_host:
        known |= {status["port"]: STORE, int(master.rpartition(":")[2]): RANKS_STORE}
    others = [KEEPALIVES] * is_host + [COPIES] * has_copies
    seen: dict[str, str] = {}
    for (address, port), owners in ports(lab, host).items():
        if "sshd" in owners or "slurm" in owners.partition(" ")[0]:
            continue  # the host's own
        if "nodekit.deploy.agent" in owners:
            who = known.pop(port, None) or others.pop()
        else:
            who = LEADER if "submitit" in owners else RANKS
        assert seen.setdefault(who, address) == address
    assert not known, known
    assert not others, others
    return {who: "training" if address == status["address"] else address for who, address in seen.items()}
