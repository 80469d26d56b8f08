"""What Ansible itself makes of the inventories that kit writes for it."""

import base64
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from nodekit.deploy.connect import sshconfig
from nodekit.deploy.export import export_formats
from nodekit.deploy.export.export_script import Source
from nodekit.inventory import hostlists
from nodekit.inventory.errors import KitError
from nodekit.inventory.load import load_inventory

NASTY = (
    "{{ 1+1 }}", "{% raw %}", "{#", "{{", "}}", "#jinja2: variable_start_string:'[['\n[[ 1+1 ]]", "!unsafe", "!vault |",
    "@", "%", "&", "*", "|", ">", "- ", "? ", ": ", " #", "'", '"', "\\", "\n", "\r", "\t", "\x85", "\u2028", "\ufeff",
    "\0", "\x1b[2J", "yes", "off", "null", "~", "", "1e3", "0o7", "0x1f", "1_000", "12:30", "2001-01-01", ".inf",
    "<<", "=", "$HOME", "`id`", "$(id)", "é", "漢", "\U0001f600", "a b", "../x",
)  # fmt: skip
"""What YAML, Jinja, a shell or Ansible would make something of."""


def inventory_of(folder: Path, hosts: Sequence[dict[str, Any]]) -> str:
    """Hosts with these settings, as Ansible is to read them."""
    (folder / "lab.yaml").write_text("name: yes\nhosts: {gpu1: }\n")
    inventory = load_inventory(folder / "lab.yaml")
    made = [inventory.hosts[0].model_copy(update=each) for each in hosts]
    source = Source(inventory=inventory.model_copy(update={"hosts": tuple(made)}), command=None, made="kit 0")
    (file,) = export_formats.ansible(source)
    (folder / "hosts.yaml").write_text(file.text, encoding="utf-8")
    return file.text


def ansible(folder: Path, *argv: str) -> str:
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "ANSIBLE_PYTHON_INTERPRETER": sys.executable}
    done = subprocess.run(
        [sys.executable, "-m", "ansible", "adhoc", "-i", "hosts.yaml", *argv],
        cwd=folder, env=environment, text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def as_ansible_has_them(folder: Path) -> dict[str, dict[str, Any]]:
    """Host → its variables, as a task gets them: templates are replaced."""
    (folder / "control.yaml").write_text('all: {hosts: {control: {ansible_user: "{{ 1+1 }}"}}}\n')
    variables = "map('dict2items') | map('selectattr', 'key', 'match', 'ansible_') | map('items2dict')"
    names = "groups.all | difference(['localhost'])"
    values = f"dict({names} | zip({names} | map('extract', hostvars) | {variables}))"
    template = f"msg={{{{ {values} | to_json | b64encode }}}}"
    said = ansible(folder, "localhost", "-i", "control.yaml", "-m", "debug", "-a", template)
    encoded = re.search(r'"msg": "([A-Za-z0-9+/=]+)"', said)
    assert encoded, said
    found: dict[str, dict[str, Any]] = json.loads(base64.b64decode(encoded[1]))
    assert str(found.pop("control")["ansible_user"]) == "2", "Ansible has replaced no template at all"
    return found


def nasty() -> st.SearchStrategy[str]:
    some = st.one_of(st.sampled_from(NASTY), st.characters(exclude_categories=["Cs"]))
    return st.lists(some, min_size=1, max_size=4).map("".join).filter(bool)


# One start of Ansible is a second, however many hosts there are.
@pytest.mark.slow
@settings(max_examples=2, phases=[Phase.explicit, Phase.generate])
@given(
    texts=st.lists(nasty(), min_size=30, max_size=30),
    names=st.lists(
        st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]{0,20}", fullmatch=True).filter(hostlists.is_name)
    ),
)
def test_ansible_has_every_string_as_it_is_in_the_inventory(
    tmp_path: Path, texts: list[str], names: list[str]
) -> None:
    texts = [*filter(None, NASTY), *texts]
    hosts = [
        {
            "name": f"gpu{number}",
            "address": text,
            "user": text,
            "identity_file": text,
            "known_hosts": text,
            "python": text,
        }
        for number, text in enumerate(texts)
    ]
    hosts += [{"name": name} for name in {"yes", "null", "1e3", "0o7", "12", "fe80::1%eth0", *names}]
    inventory_of(tmp_path, hosts)
    found = as_ansible_has_them(tmp_path)
    assert found.keys() == {host["name"] for host in hosts}
    for number, text in enumerate(texts):
        has = found[f"gpu{number}"]
        assert [has["ansible_host"], has["ansible_user"], has["ansible_ssh_private_key_file"]] == [text] * 3
        known = "UserKnownHostsFile=" + sshconfig.quoted(text)
        assert shlex.split(has["ansible_ssh_common_args"]) == ["-o", known]
        assert has["ansible_python_interpreter"] == text


RECORDER = """#!{python}
import json, os, sys
with open({calls!r}, "a") as calls:
    calls.write(json.dumps(sys.argv) + "\\n")
"""


@pytest.mark.slow
def test_ansible_logs_in_as_that_user_and_runs_that_python(tmp_path: Path) -> None:
    folder = tmp_path / "my 'lab' $HOME; {{ 1+1 }}"
    folder.mkdir()
    python = folder / "python"
    python.symlink_to(sys.executable)
    users = ["{{1+1}}", "{%raw%}", "train", "yes", "1e3", "!unsafe", "@all", "null"]
    hosts: list[dict[str, Any]] = [
        {"name": f"gpu{number}", "user": user} for number, user in enumerate(users)
    ]
    hosts.append({"name": "here", "connection": "local", "python": str(python)})
    inventory_of(tmp_path, hosts)
    recorder = tmp_path / "ssh"
    recorder.write_text(RECORDER.format(python=sys.executable, calls=str(tmp_path / "calls")))
    recorder.chmod(0o755)
    ansible(tmp_path, "all:!here", "-m", "raw", "-a", "true", "-e", f"ansible_ssh_executable={recorder}")
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert {word for argv in calls for word in argv if word.startswith("User=")} == {
        f'User="{user}"' for user in users
    }
    assert '"ping": "pong"' in ansible(tmp_path, "here", "-m", "ping")


def test_what_yaml_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="is not UTF-8, and an Ansible inventory can hold nothing else"):
        inventory_of(tmp_path, [{"name": "gpu1", "identity_file": "/k/\ud800"}])
