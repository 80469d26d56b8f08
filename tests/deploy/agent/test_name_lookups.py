"""The agent asks no DNS server, against one that never answers, in a network of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from agents import Agents

pytestmark = pytest.mark.lab

LOOK_UP = """
import os, select, socket, subprocess, sys
from pathlib import Path
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
if len(sys.argv) > 1:
    from nodekit.deploy.agent import main
    assert main.run(Path(sys.argv[1]), None) == main.EXIT_UNFIT  # it has not the address that it is to listen on
try:
    print(socket.getnameinfo(("198.18.0.99", 1), socket.NI_NUMERICSERV))
except socket.gaierror as error:
    print("no name:", error.errno == socket.EAI_AGAIN)
print("asked:", bool(select.select([server], [], [], 0)[0]), "RES_OPTIONS" in os.environ)
print(subprocess.run(["sh", "-c", "echo $RES_OPTIONS"], env=os.environ, capture_output=True, text=True).stdout, end="")
"""


@pytest.mark.parametrize("is_agent", [False, True])
def test_an_agent_asks_no_dns_server(tmp_path: Path, is_agent: bool) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    spec = Agents(tmp_path / "nodes").spec("n0", local_addr="203.0.113.1")
    Path(spec.node_dir).mkdir()
    (Path(spec.node_dir) / "spec.json").write_text(json.dumps(spec.to_dict()))
    mount = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
    isolated = ["unshare", "--net", "--mount", "sh", "-c", mount, str(tmp_path / "resolv.conf")]
    done = subprocess.run(
        [*isolated, sys.executable, "-c", LOOK_UP, *([spec.node_dir] if is_agent else [])],
        # As on a host, where nobody has set it: the tests' own conftest does.
        env={name: value for name, value in os.environ.items() if name != "RES_OPTIONS"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, asked, of_ranks = done.stdout.splitlines()
    assert asked == f"asked: {not is_agent} False"
    assert found == "no name: True", "and at once"
    assert not of_ranks
