"""`environment:`: a venv on each node, made once, from a file of the user's; packages are tiny wheels made here."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agents import until
from kit_runs import Kit
from packages import PASSWORD, USER, Index, make_wheel

from nodekit.deploy.connect import cluster
from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.environment import environment, requirements, wheels
from nodekit.deploy.host.code import venvs
from nodekit.inventory.errors import KitError
from nodekit.inventory.load import load_inventory
from nodekit.inventory.schema import Environment, Inventory

BUILD_S = 240.0
"""How long an environment may take: a minute is little for venv and pip on a busy machine that is slow as well."""
SAYS = "import sys, torch, tinypkg\nprint('tinypkg', tinypkg.__version__, 'of', sys.executable)\n"


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    make_wheel(tmp_path / "index", "tinypkg", "1.2")
    with Index(tmp_path / "index") as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.go.set()
        server.shutdown()


@pytest.fixture(autouse=True)
def own_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pip as it is out of the box: whatever this machine has set for it is not for these tests."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_", "XDG_CACHE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


def local(folder: Path, names: str = "ab", *, shared: str = "ab", **settings: Any) -> Inventory:
    """Nodes that are folders of this machine, one of which the `shared` ones share."""
    hosts = {name: {} if name in shared else {"workdir": f"{folder}/work of {name}"} for name in names}
    values = {"connection": "local", "workdir": f"{folder}/work dir", "hosts": hosts, "environment": settings}
    (folder / "local.yaml").write_text(json.dumps(values))
    return load_inventory(folder / "local.yaml")


def entered(inventory: Inventory, **options: Any) -> environment.Entered:
    """What `kit up` does in its phase; each channel then goes on with the interpreter that there is."""
    assert inventory.environment is not None
    with cluster.channels(inventory.hosts, SshOptions()) as channels:
        options = {"timeout_s": BUILD_S, **options}
        found = environment.enter(channels, inventory.hosts, inventory.environment, **options)
        for name in {*channels} - {*found.missing}:
            facts = channels[name].call("hostfacts.facts", timeout_s=60, workdir=inventory.hosts[0].workdir)
            assert facts["executable"] == found.python[name]
    return found


def output(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def test_the_folders_that_it_makes_are_private(tmp_path: Path) -> None:
    assert not venvs.look(f"{tmp_path}/work/nodekit", "digest")["problem"]
    for folder in ("work", "work/nodekit", "work/nodekit/envs"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700


# --- files --------------------------------------------------------------------------------------------------


def test_a_requirements_file_is_read_with_those_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "r.txt").write_text(
        "# ours\ntorch==2.13 \\\n  --hash=sha256:ab\n-r sub/more.txt\n-c limits.txt\n--extra-index-url https://h/s\n"
        "x @ https://h/x.whl#sha256=12  # pinned\nhttps://h/y.whl\n\n"
    )
    (tmp_path / "sub/more.txt").write_text("\ufeffnumpy; python_version < '3.11'\n-r../r.txt\n")
    (tmp_path / "limits.txt").write_text("-r sub/limit.txt\n")
    (tmp_path / "sub/limit.txt").write_text("numpy<2\n")
    assert list(requirements.flatten(tmp_path / "r.txt")) == [
        ("-r", "torch==2.13   --hash=sha256:ab"),
        ("-r", "numpy; python_version < '3.11'"),
        ("-c", "numpy<2"),
        ("-r", "--extra-index-url https://h/s"),
        ("-r", "x @ https://h/x.whl#sha256=12"),
        ("-r", "https://h/y.whl"),
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("-e .", "found -e ., which is on this machine and not on the nodes"),
        ("--editable=lib", "found --editable=lib, which is on this machine"),
        ("-e git+https://h/x.git#egg=x", "git#egg=x, wanted it without -e: git+https://h/x.git#egg=x"),
        ("./lib", "found ./lib, which is on this machine"),
        ("libs/lib", "found libs/lib, which is on this machine"),
        ("lib-1.0-py3-none-any.whl", "found lib-1.0-py3-none-any.whl, which is on this machine"),
        ("x @ file:///tmp/x.whl", "which is on this machine"),
        ("--find-links wheels", "wanted it as environment.find_links"),
        ("-r https://h/r.txt", "found the URL of another file, wanted a file here"),
        ("-r none.txt", "none.txt: No such file or directory"),
    ],
)
def test_what_the_nodes_do_not_have_is_refused_with_its_line(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "r.txt").write_text(f"torch\n{line}\n")
    with pytest.raises(KitError, match=re.escape(says)) as raised:
        list(requirements.flatten(tmp_path / "r.txt"))
    assert "none.txt" in line or f"{tmp_path}/r.txt:2: " in str(raised.value)


PROJECT = """
[project]
name = "My.Job"
dependencies = ["torch", "numpy>=1"]
[project.optional-dependencies]
text = ["transformers"]
Log_Files = ["tensorboard"]
all = ["my-job[text,log-files]", "tqdm"]
local = ["lib @ file:///lib"]
"""


@pytest.mark.parametrize(
    ("extras", "lines"),
    [
        ([], ["torch", "numpy>=1"]),
        (["text"], ["torch", "numpy>=1", "transformers"]),
        (["log-files"], ["torch", "numpy>=1", "tensorboard"]),
        (["all"], ["torch", "numpy>=1", "tqdm", "transformers", "tensorboard"]),
    ],
)
def test_a_pyproject_gives_its_dependencies_and_those_of_extras(extras: list[str], lines: list[str]) -> None:
    assert requirements.dependencies(Path("p"), PROJECT, extras) == lines


@pytest.mark.parametrize(
    ("text", "extras", "says"),
    [
        (
            PROJECT,
            ["tex"],
            "environment.extras: found tex, wanted one of those in p: all, local, log-files, text",
        ),
        (PROJECT, ["local"], "found lib @ file:///lib, which is on this machine"),
        ("[tool.x]\n", [], "p: found no [project], wanted its dependencies"),
        ("[project]\ndynamic = ['dependencies']\n", [], "found dependencies to be dynamic"),
        ("[project\n", [], "environment: p: "),
        ("project = 3\n", [], "p: found no [project], wanted its dependencies"),
        (
            "[project]\ndependencies = 'torch'\n",
            [],
            'p: found dependencies = "torch", wanted a list of texts',
        ),
        ("[project]\ndependencies = [3]\n", [], "p: found dependencies = [3], wanted a list of texts"),
        ("[project]\ndynamic = [['a']]\n", [], 'p: found dynamic = [["a"]], wanted a list of texts'),
        ("[project]\noptional-dependencies = []\n", [], "p: found no [project.optional-dependencies]"),
        ("[project]\noptional-dependencies = {a = 'x'}\n", ["a"], 'p: found a = "x", wanted a list of texts'),
        ("[project]\ndependencies = ['--index-url=x']\n", [], "p: found the option --index-url, wanted a"),
    ],
)
def test_a_pyproject_that_does_not_say_is_refused(text: str, extras: list[str], says: str) -> None:
    with pytest.raises(KitError, match=re.escape(says)):
        requirements.dependencies(Path("p"), text, extras)


@pytest.mark.parametrize(
    ("machine", "libc", "first", "last"),
    [
        ("x86_64", ("glibc", "2.36"), "manylinux_2_36_x86_64", "linux_x86_64"),
        ("aarch64", ("glibc", "2.17"), "manylinux_2_17_aarch64", "linux_aarch64"),
        ("x86_64", ("", ""), "musllinux_1_2_x86_64", "linux_x86_64"),
    ],
)
def test_wheels_are_for_the_nodes_platform(
    machine: str, libc: tuple[str, str], first: str, last: str
) -> None:
    tags = wheels.platform_tags(machine, *libc)
    assert (tags[0], tags[-1]) == (first, last)
    if libc == ("glibc", "2.36"):
        assert {"manylinux2014_x86_64", "manylinux1_x86_64", "manylinux_2_5_x86_64"} <= set(tags)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = requirements.Asked(file="r.txt", digest="d")
    nodes = wheels.Platform.of({"python_version": "3.11", "platform_machine": "x86_64"}, ("", ""))
    with pytest.raises(
        KitError, match=r"environment: .*cache.*: Not a directory, wanted a folder .*XDG_CACHE_HOME"
    ):
        wheels.fetch(asked, "x", nodes, requirements.indexes(Environment()), timeout_s=60)


def test_what_is_fetched_here_is_what_the_nodes_python_needs(tmp_path: Path) -> None:
    for name in ("old", "new", "tinypkg"):
        make_wheel(
            tmp_path / "wheels", name, needs="new; python_version >= '3.99'" if name == "tinypkg" else ""
        )
    asked = requirements.Asked(file="r.txt", digest="d")
    indexes = requirements.indexes(Environment(find_links=(str(tmp_path / "wheels"),), no_index=True))
    markers = {
        "python_version": "3.99",
        "python_full_version": "3.99.1",
        "platform_machine": "riscv64",
        "implementation_name": "cpython",
    }
    nodes = wheels.Platform.of(markers, ("glibc", "2.40"))
    text = "tinypkg\nold; python_version < '3.99'\n"
    folder = wheels.fetch(asked, text, nodes, indexes, timeout_s=60)
    assert sorted(path.name.split("-")[0] for path in folder.iterdir()) == ["new", "tinypkg"]
    shutil.rmtree(tmp_path / "wheels")
    assert wheels.fetch(asked, text, nodes, indexes, timeout_s=60) == folder, "it is kept"


# --- nodes that are folders of this machine -----------------------------------------------------------------


@pytest.mark.slow
def test_nodes_that_share_a_folder_make_one_venv_also_when_two_kits_start_at_once(
    tmp_path: Path, index: Index
) -> None:
    (tmp_path / "r.txt").write_text("tinypkg\n")
    inventory = local(tmp_path, requirements="r.txt", index_url=index.url)
    assert inventory.environment is not None
    found: list[environment.Entered] = []
    kits = [threading.Thread(target=lambda: found.append(entered(inventory))) for _ in range(2)]
    for kit in kits:
        kit.start()
    for kit in kits:
        kit.join()
    assert sorted(each.built for each in found) == [(), ("a",)]
    assert {tuple(each.python.items()) for each in found} == {tuple(found[0].python.items())}
    # Reused: and another password of the index makes no other environment.
    other = local(tmp_path, requirements="r.txt", index_url=index.url.replace(PASSWORD, "new"))
    again = entered(other)
    assert (again.built, again.reused, again.python) == ((), ("a", "b"), found[0].python)
    python = Path(again.python["a"])
    assert output(str(python.parent / "tinypkg-says")) == str(python), "scripts know where they are"
    (tmp_path / "r.txt").write_text("tinypkg==1.2\n")
    assert entered(inventory, build=False).missing == ("a", "b"), "another file, another environment"
    python.unlink()
    python.symlink_to(tmp_path / "gone")
    (tmp_path / "r.txt").write_text("tinypkg\n")
    assert entered(inventory).built == ("a",), "its interpreter has gone"
    assert output(str(python), "-c", "import tinypkg; print(tinypkg.__version__)") == "1.2"


def test_a_host_that_serves_the_folder_to_the_others_builds_no_second_one(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its own disk the folder's name has the machine's, too."""
    look = environment._look

    def as_a_file_server(channel: Any, host: Any, asked: Any) -> environment.Seat:
        seat = look(channel, host, asked)
        return replace(seat, workdir_id="x" + ("@boot:1:2" if host.name == "a" else ""))

    monkeypatch.setattr(environment, "_look", as_a_file_server)
    (tmp_path / "r.txt").write_text("tinypkg\n")
    assert entered(local(tmp_path, "abc", shared="abc", requirements="r.txt", index_url=index.url)).built == (
        "a",
    )


def test_a_pyproject_becomes_a_venv_without_the_project(tmp_path: Path, index: Index) -> None:
    (tmp_path / "pyproject.toml").write_text(
        "[project]\nname = 'job'\ndependencies = []\noptional-dependencies.tiny = ['tinypkg']\n"
    )
    inventory = local(tmp_path, "a", pyproject="pyproject.toml", extras=["tiny"], index_url=index.url)
    python = entered(inventory).python["a"]
    assert output(python, "-c", "import tinypkg; print(tinypkg.__version__)") == "1.2"


UV = Path(sys.prefix) / "uv/bin/uv"  # .ci/setup puts it there


def test_a_uv_lock_becomes_a_venv(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(UV.parent), prepend=os.pathsep)
    (tmp_path / "pyproject.toml").write_text(
        "[project]\nname = 'job'\nversion = '0'\nrequires-python = '>=3.10'\ndependencies = ['tinypkg']\n"
        f"[[tool.uv.index]]\nurl = '{tmp_path}/index'\nformat = 'flat'\n"
    )
    subprocess.run([str(UV), "lock", "--offline"], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    python = entered(local(tmp_path, "a", lock="uv.lock", index_url=index.url)).python["a"]
    assert output(python, "-c", "import tinypkg; print(tinypkg.__version__)") == "1.2"


def test_a_uv_lock_without_uv_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'job'\n")
    (tmp_path / "uv.lock").write_text("version = 1\n")
    with pytest.raises(KitError, match="read by uv, which is neither here nor on a; install it here"):
        entered(local(tmp_path, "a", lock="uv.lock"))


def test_what_cannot_be_installed_is_told_with_the_last_lines_and_no_password(
    tmp_path: Path, index: Index
) -> None:
    (tmp_path / "r.txt").write_text("tinypkg==9\n")
    with pytest.raises(KitError) as raised:
        entered(local(tmp_path, shared="", requirements="r.txt", index_url=index.url, offline=False))
    said = str(raised.value)
    for host in ("a", "b"):
        assert f"{host}: the environment of r.txt could not be made: " in said
    assert "tinypkg==9" in said.partition("the last of it:")[2], "pip's words, or uv's"
    assert PASSWORD not in said
    assert not list(tmp_path.rglob("*.part*"))


@pytest.mark.slow
def test_a_build_that_takes_too_long_is_ended_and_told(tmp_path: Path, index: Index) -> None:
    (tmp_path / "r.txt").write_text("tinypkg\n")
    index.go.clear()
    with pytest.raises(
        KitError, match=r"a: the environment of r.txt was not made within the \d s that were left"
    ):
        entered(local(tmp_path, "a", requirements="r.txt", index_url=index.url, offline=False), timeout_s=6)
    until(lambda: not started(tmp_path / "work dir"), what="the end of all that was started")


def test_a_variable_of_an_index_that_is_not_set_is_told(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("tinypkg\n")
    with pytest.raises(KitError, match=re.escape("environment.index_url names ${NOT_SET}, not set in this")):
        entered(local(tmp_path, requirements="r.txt", index_url="https://${NOT_SET}@h/"))


def started(path: Path) -> list[str]:
    """The processes that have a path among their arguments or open files."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            argv = os.fsdecode((folder / "cmdline").read_bytes().replace(b"\0", b" "))
            opened = [os.readlink(channel) for channel in (folder / "fd").iterdir()]  # noqa: PTH115
            if str(path) in argv or any(each.startswith(str(path)) for each in opened):
                found.append(argv)
    return found


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Kit]:
    """Kit in a project folder; its nodes are folders of this machine."""
    kit = Kit(tmp_path / "my project", None)
    (kit.folder / "job.py").write_text(SAYS)
    (kit.folder / "requirements.txt").write_text("tinypkg\n")
    yield kit
    kit.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
@pytest.mark.slow
def test_a_build_that_is_cut_short_leaves_nothing_running_and_nothing_that_looks_whole(
    project: Kit, index: Index, number: signal.Signals
) -> None:
    work = project.folder.parent / "work dir"
    inventory = local(
        project.folder.parent,
        "a",
        requirements="my project/requirements.txt",
        index_url=index.url.replace(f"{USER}:{PASSWORD}", "${CREDENTIALS}"),
        offline=False,
        system_site_packages=True,
    )
    credentials = {"CREDENTIALS": f"{USER}:{PASSWORD}"}
    if number == signal.SIGINT:
        planned = project.run("up", str(inventory.path), "--dry-run", "--", "job.py", env=credentials)
        assert planned.returncode == 0, planned.stderr
        assert f"python      {work}/envs/" in planned.stdout
        assert "environment: kit up makes it first on a" in planned.stderr
    index.go.clear()
    kit = project.start("up", str(inventory.path), "--", "job.py", env=credentials)
    assert index.is_asked.wait(BUILD_S / 2), project.log()  # by pip, when venv has made it
    assert len(started(work)) >= 2, "the builder and its pip"
    table = subprocess.run(["ps", "axww"], capture_output=True, text=True, check=True).stdout
    assert PASSWORD not in table, "it is in no process' arguments"
    (key,) = {path.name.split(".")[0] for path in (work / "envs").iterdir()}
    assert (work / "envs" / f"{key}.part").is_dir()
    kit.send_signal(number)
    assert kit.wait(60) == (130 if number == signal.SIGINT else -number)
    until(lambda: not started(work), what="the end of all that was started")
    assert not (work / "envs" / key).exists()
    index.go.set()
    if number == signal.SIGINT:
        return
    done = project.run("up", str(inventory.path), "--", "job.py", env=credentials, timeout_s=BUILD_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"tinypkg 1.2 of {work}/envs/{key}/bin/python" in done.stdout
    assert "environment requirements.txt: built on a  (" in done.stdout
    assert not (work / "envs" / f"{key}.part").exists()
    # The password is in no record, log or file that is left, and in nothing that was said.
    assert PASSWORD not in project.log() + done.stdout + done.stderr
    for folder in (work, Path(os.environ["HOME"])):
        found = subprocess.run(
            ["grep", "-rlF", PASSWORD, folder], capture_output=True, text=True, check=False
        )
        assert found.stdout == ""


# --- hosts of their own, without internet -------------------------------------------------------------------


@pytest.mark.lab
@pytest.mark.timeout(3 * BUILD_S)
def test_hosts_without_internet_get_wheels_from_here_and_one_that_fails_is_named_and_mended(
    kit: Kit, index: Index
) -> None:
    # Small as long as it is packed.
    make_wheel(index.folder, "bigpkg", files={"bigpkg_data.txt": "0" * (8 << 20)})
    (kit.folder / "requirements.txt").write_text("tinypkg\nbigpkg\n")
    (kit.folder / "job.py").write_text(SAYS)
    # The inventory lies among the code, which is sent: a password is not for it.
    url = index.url.replace(f"{USER}:{PASSWORD}", "${CREDENTIALS}")
    kit.inventory(
        environment={"requirements": "requirements.txt", "index_url": url, "system_site_packages": True}
    )
    credentials = {"CREDENTIALS": f"{USER}:{PASSWORD}"}
    kit.on_host("node2", "mkdir", "-p", "/root/nodekit/envs")
    kit.on_host("node2", "mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", "/root/nodekit/envs")
    try:
        failed = kit.run("up", "lab.yaml", "--", "job.py", env=credentials, timeout_s=BUILD_S)
    finally:
        kit.on_host("node2", "umount", "/root/nodekit/envs")
    assert failed.returncode == 1
    assert (
        "kit: node2: the environment of requirements.txt could not be made: pip install failed"
        in failed.stderr
    )
    assert "No space left on device" in failed.stderr
    assert failed.stderr.endswith("\nkit: node1, node3 made it, and will not have to again\n")
    assert not kit.leftovers()
    mended = kit.run("up", "lab.yaml", "--", "job.py", env=credentials, timeout_s=BUILD_S)
    assert mended.returncode == 0, mended.stdout + mended.stderr
    told = "built on node2, from wheels fetched here, there already on node1, node3"
    assert f"environment requirements.txt: {told}" in mended.stdout
    ranks = re.findall(r"tinypkg 1\.2 of /root/nodekit/envs/\w+/bin/python", mended.stdout)
    assert len(ranks) == 3
    assert PASSWORD not in failed.stdout + failed.stderr + mended.stdout + mended.stderr
    for host in ("node1", "node2", "node3"):
        assert "tinypkg-1.2" in kit.on_host(host, "sh", "-c", "cat /root/nodekit/envs/*.log")
        left = kit.lab.run(
            host, ["grep", "-rlF", "--exclude-dir=.pyenv", PASSWORD, "/root"], capture_output=True, text=True
        )  # type: ignore[union-attr]
        assert left.stdout == ""
    state = Path(os.environ["HOME"])
    assert subprocess.run(["grep", "-rlF", PASSWORD, state], capture_output=True, text=True).stdout == ""


def test_a_file_system_without_locks_is_told_and_nothing_is_built_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kits would write into one draft."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / "envs").mkdir()
    monkeypatch.setattr(venvs.fcntl, "flock", refuse)
    (tmp_path / "envs/k.wheels").mkdir()
    (tmp_path / "envs/k.wheels.tree.json").write_text("{}")
    found = venvs.build(str(tmp_path), "k", "torch\n", wheels=f"{tmp_path}/envs/k.wheels")
    assert not found["built"]
    assert found["problem"].startswith(f"{tmp_path}/envs cannot be locked (No locks available)")
    assert [each.name for each in (tmp_path / "envs").iterdir()] == ["k.lock"]


def test_a_python_without_venv_is_told_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (tmp_path / "log").open("w") as log:
        steps = venvs._Steps(log, (), ())
        with pytest.raises(
            venvs._Failed, match=r"python -m venv failed .*missing: apt install python3-venv, or"
        ):
            venvs._make(steps, str(tmp_path / "draft"), None, system_site_packages=False)
