"""`kit rm`: what goes and what must not, on this machine's own folders through real channels, and after a real run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_agents
from agents import no_process_left, until
from kit_runs import Kit, run_id

from nodekit.deploy.commands import cli
from nodekit.deploy.connect.channel import HostChannel
from nodekit.deploy.host.node import removal
from nodekit.deploy.launch import start
from nodekit.deploy.records import runs
from nodekit.deploy.records.locks import SupervisorLock
from nodekit.deploy.records.runs import Run
from nodekit.deploy.results import rm
from nodekit.inventory.errors import KitError
from nodekit.inventory.load import dump, load_inventory

ID = "lab-1122-060115-77ab"


class Site:
    """A run on record, and its folder of two nodes in a workdir here."""

    def __init__(
        self, folder: Path, *, state: str = "failed", run_id: str = ID, shared: bool = False
    ) -> None:
        self.work = folder / "my 'work' $HOME; dir"
        self.place = self.work / "runs" / run_id
        self.snapshots = folder / "shared" / run_id
        file = folder / "lab.yaml"
        file.write_text(f"connection: local\nworkdir: {json.dumps(str(self.work))}\nhosts: {{a: , b: }}\n")
        nodes: dict[str, dict[str, Any]] = {}
        for name in ("a", "b"):
            node = self.place / name
            (node / "snapshots").mkdir(parents=True)
            (node / "logs").mkdir()
            (node / "logs/rank0-0.0.log").write_text("x" * 5000)
            (node / "snapshots/g0000-s000000010.json").write_text("y" * 50_000)
            env = {"NODEKIT_SNAPSHOT_DIR": str(self.snapshots if shared else node / "snapshots")}
            nodes[name] = {
                "node_dir": str(node),
                "env": env | ({"NODEKIT_SNAPSHOT_SHARED": "1"} if shared else {}),
            }
            spec = {"run_id": run_id, "env": env}
            (node / "spec.json").write_text(json.dumps(spec))
        if shared:
            self.snapshots.mkdir(parents=True)
            (self.snapshots / "model.pt").write_text("y" * 50_000)
        (self.place / "code/snapshots").mkdir(parents=True)
        (self.work / ".id").write_text("0123456789abcdef")
        self.run = Run(
            run_id=run_id, name="lab", inventory_path=str(file), inventory=dump(load_inventory(file)), command=None,
            created=time.time() - 40 * 86400, state=state, nodes=nodes, ended=time.time() - 40 * 86400,
        )  # fmt: skip
        self.run.save()

    def rest(self) -> list[str]:
        """What is left of the run in its workdir."""
        runs_folder = self.work / "runs"
        return sorted(str(path.relative_to(runs_folder)) for path in runs_folder.rglob("*") if path.is_file())

    @property
    def is_on_record(self) -> bool:
        return (self.run.folder / "run.json").exists()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_run_goes_with_all_it_has_and_again_is_fine(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rm", ID[:12], "--yes"]) == 0

    said = capsys.readouterr().out.splitlines()
    # Two nodes, one folder: told once.
    assert [line.partition("  ")[0] for line in said] == [ID, "", "", f"{ID} is removed"]
    assert said[1].startswith(f"  a:{site.place}  ")
    assert re.search(r"  \d\d\.\d kB; snapshots 1\d\d kB$", said[1]), said
    assert not site.place.exists()
    assert not site.run.folder.exists()
    assert list((site.work / "runs").iterdir()) == []
    assert cli.main(["rm", ID, "--yes"]) == 0
    assert capsys.readouterr().out == f"{ID} is not on record: nothing to remove\n"


def test_snapshots_stay_where_that_is_wanted(site: Site) -> None:
    assert cli.main(["rm", ID, "--yes", "--keep-snapshots"]) == 0

    assert site.rest() == [f"{ID}/{name}/snapshots/g0000-s000000010.json" for name in ("a", "b")]
    assert not site.is_on_record


def test_only_the_record_goes_where_that_is_wanted(site: Site) -> None:
    before = site.rest()
    assert cli.main(["rm", ID, "--yes", "--records-only"]) == 0

    assert site.rest() == before
    assert not site.is_on_record


def test_a_dry_run_and_no_terminal_remove_nothing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    before = site.rest()
    assert cli.main(["rm", ID, "--dry-run"]) == 0
    assert cli.main(["rm", ID]) == 1
    assert "no terminal to ask in; kit rm --yes removes without asking" in capsys.readouterr().err
    assert cli.main(["rm"]) == 1
    assert "wanted RUN…, or --older-than 30d" in capsys.readouterr().err
    assert (site.rest(), site.is_on_record) == (before, True)


@pytest.mark.parametrize(("typed", "is_removed"), [("y\n", True), ("\n", False), ("no\n", False)])
def test_in_a_terminal_it_asks(site: Site, typed: str, is_removed: bool) -> None:
    mine, its = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "nodekit.deploy.commands.cli", "rm", ID],
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
    ) as process:
        os.close(its)
        said = b""
        while b"[y/N]" not in said:
            said += os.read(mine, 4096)
        os.write(mine, typed.encode())
        assert process.wait(30) == 0
    os.close(mine)
    assert site.is_on_record is not is_removed
    assert site.place.exists() is not is_removed


def test_links_are_not_followed(site: Site, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("")
    (site.place / "a/output").symlink_to(precious)
    (site.place / "a/snapshots/more").symlink_to(precious)
    (site.place / "code/data").symlink_to(precious / "data")

    assert cli.main(["rm", ID, "--yes"]) == 0

    assert not site.place.exists()
    assert (precious / "data").exists()


def test_a_link_among_the_nodes_is_no_node(site: Site, tmp_path: Path) -> None:
    (tmp_path / "theirs/snapshots").mkdir(parents=True)
    (tmp_path / "theirs/thesis.tex").write_text("")
    (site.place / "c").symlink_to(tmp_path / "theirs")
    assert cli.main(["rm", ID, "--yes", "--keep-snapshots"]) == 0
    assert (tmp_path / "theirs/thesis.tex").exists()
    assert not (site.place / "c").is_symlink()


def test_what_is_not_this_runs_stays(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> str:
        before = site.rest()
        assert cli.main(["rm", ID, "--yes"]) == 1
        assert (site.rest(), site.is_on_record) == (before, True)
        told = capsys.readouterr().err
        assert told.endswith(f"nothing of {ID} is removed\n")
        return told

    spec = site.place / "a/spec.json"
    spec.write_text('{"run_id": "another"}')
    assert f"a: {spec} is of the run 'another'" in refused()
    for name in ("a", "b"):
        (site.place / name / "spec.json").unlink()
    (site.place / "thesis.tex").write_text("")
    assert f"{site.place} says nowhere that it is of this run, and has thesis.tex in it" in refused()
    moved = site.place.rename(tmp_path / "moved")
    site.place.symlink_to(moved)
    assert f"{site.place} is a link, and what it points to may be anybody's" in refused()
    assert (moved / "thesis.tex").exists()


def test_a_removal_that_was_broken_off_goes_on(site: Site) -> None:
    (site.place / "a/spec.json").unlink()
    (site.place / "b/spec.json").unlink()
    site.place.rename(site.place.with_name(f".removing-{ID}"))

    assert cli.main(["rm", ID, "--yes"]) == 0
    assert (list((site.work / "runs").iterdir()), site.is_on_record) == ([], False)


def test_wherever_a_removal_is_broken_off_no_half_of_a_run_is_left_and_it_is_known_whose_the_rest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, shared=True)
    rmtree, breaks_at = shutil.rmtree, site.snapshots

    def breaks(path: str, **more: Any) -> None:
        if Path(path) == breaks_at.with_name(f".removing-{ID}"):
            raise KeyboardInterrupt
        rmtree(path, **more)

    monkeypatch.setattr(shutil, "rmtree", breaks)
    for breaks_at in (site.snapshots, site.place):  # `breaks` has it
        assert site.place.exists()
        with pytest.raises(KeyboardInterrupt):
            removal.remove(str(site.place), ID, ["a", "b"], str(site.snapshots), False, lambda _: None)
        assert not breaks_at.exists()
    monkeypatch.undo()
    removal.remove(str(site.place), ID, ["a", "b"], str(site.snapshots), False, lambda _: None)
    assert [*site.place.parent.iterdir(), *site.snapshots.parent.iterdir()] == []


def test_what_has_begun_to_run_since_it_was_looked_for_is_not_removed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = site.rest()
    monkeypatch.setattr(removal, "_alive", lambda *_: ["its agent on a runs (pid 1)"])
    with pytest.raises(RuntimeError, match="its agent on a runs"):
        removal.remove(str(site.place), ID, ["a", "b"], "", False, lambda _: None)
    assert site.rest() == before


def test_a_folder_of_snapshots_that_other_runs_have_too_is_never_a_runs_own(tmp_path: Path) -> None:
    site = Site(tmp_path, shared=True)
    spec = {"run_id": ID, "env": {"NODEKIT_SNAPSHOT_DIR": str(site.snapshots.parent)}}
    (site.place / "a/spec.json").write_text(json.dumps(spec))
    found = removal.list_run(str(site.place), ID, ["a", "b"], str(site.snapshots.parent), lambda _: None)
    assert found["problem"] == f"the snapshots in {site.snapshots.parent} are not this run's alone"


def test_shared_snapshots_go_only_where_they_are_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site(tmp_path, shared=True)
    specs = [site.place / name / "spec.json" for name in ("a", "b")]
    for spec in specs:
        spec.write_text(json.dumps({"run_id": ID, "env": {"NODEKIT_SNAPSHOT_DIR": str(tmp_path)}}))
    assert cli.main(["rm", ID, "--yes"]) == 1
    told = capsys.readouterr().err
    assert (
        f"no spec.json in {site.place} says that {site.snapshots} is where this run has its snapshots" in told
    )
    specs[0].write_text(json.dumps({"run_id": ID, "env": {"NODEKIT_SNAPSHOT_DIR": str(site.snapshots)}}))
    assert cli.main(["rm", ID, "--yes"]) == 0
    assert f"  a:{site.snapshots}  among these snapshots" in capsys.readouterr().out
    assert not site.snapshots.exists()
    assert site.snapshots.parent.exists()


def test_a_host_that_cannot_be_reached_keeps_the_run_unless_it_is_lost(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    inventory = site.run.inventory
    # Nobody listens at the discard port.
    inventory["hosts"][1] |= {"connection": "ssh", "address": "127.0.0.1", "port": 9}
    site.run.save()
    before = site.rest()

    assert cli.main(["rm", ID, "--yes"]) == 1
    told = capsys.readouterr().err
    assert "kit: b: " in told
    assert (
        f"nothing of {ID} is removed, since b may have a part of it; kit rm --lost {ID} removes the rest"
        in told
    )
    assert "if b will not come back" in told
    assert (site.rest(), site.is_on_record) == (before, True)

    assert cli.main(["rm", ID, "--yes", "--lost"]) == 0
    assert "  b: cannot be reached; what is there stays" in capsys.readouterr().out
    assert not site.is_on_record


def test_what_an_earlier_start_has_left_on_a_host_of_its_own_goes_too(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = site.run.nodes["b"]
    work = tmp_path / "of b"
    place = work / "runs" / ID
    place.mkdir(parents=True)
    (site.place / "b").rename(place / "b")
    (work / ".id").write_text("fedcba9876543210")
    site.run.nodes["b"] = {**node, "node_dir": str(place / "b"), "env": {"NODEKIT_SNAPSHOT_DIR": str(place)}}
    site.run.earlier = start._earlier(site.run, ["a"])
    del site.run.nodes["b"]
    site.run.inventory["hosts"] = [host for host in site.run.inventory["hosts"] if host["name"] == "a"]
    site.run.save()

    assert cli.main(["rm", ID, "--yes"]) == 0
    assert f"b:{place}" in capsys.readouterr().out
    assert not place.exists()
    assert not site.place.exists()
    assert not site.is_on_record


def test_a_node_of_an_earlier_start_is_forgotten_by_no_later_one_until_it_is_back(site: Site) -> None:
    run = site.run
    run.earlier = start._earlier(run, ["a"])
    del run.nodes["b"]
    run.earlier = start._earlier(run, ["a"])
    assert (list(run.earlier), run.earlier["b"]["host"]["connection"]) == (["b"], "local")
    assert start._earlier(run, ["a", "b"]) == {}


def test_what_runs_on_one_of_the_hosts_that_share_a_folder_is_never_passed_over(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = HostChannel.stream

    def as_two_machines(channel: HostChannel, op: str, *args: Any, **kwargs: Any) -> Any:
        found = stream(channel, op, *args, **kwargs)
        alive = op == "removal.list_run" and channel.host == "b"
        return {**found, "alive": ["its agent on b runs (pid 7)"]} if alive else found

    monkeypatch.setattr(HostChannel, "stream", as_two_machines)
    before = site.rest()

    assert cli.main(["rm", ID, "--yes"]) == 1

    assert f"kit: b: its agent on b runs (pid 7); kit down {ID} ends it\n" in capsys.readouterr().err
    assert (site.rest(), site.is_on_record) == (before, True)


def test_a_folder_that_one_of_the_hosts_serves_to_the_others_is_told_and_removed_once(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream, removed = HostChannel.stream, []

    def with_a_file_server(channel: HostChannel, op: str, *args: Any, **kwargs: Any) -> Any:
        found = stream(channel, op, *args, **kwargs)
        removed.extend([channel.host] if op == "removal.remove" else [])
        return {**found, "shared": "x@boot:1:2" if channel.host == "a" else "x"} if found else found

    monkeypatch.setattr(HostChannel, "stream", with_a_file_server)

    assert cli.main(["rm", ID, "--yes"]) == 0

    assert capsys.readouterr().out.count(f":{site.place}") == 1
    assert removed == ["a"]


def test_a_supervised_run_is_refused(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    lock = SupervisorLock(site.run)
    assert lock.acquire()
    assert cli.main(["rm", ID, "--yes"]) == 1
    told = capsys.readouterr().err
    assert told == f"kit: {ID} is running, supervised by process {os.getpid()}; kit down {ID} stops it\n"
    lock.release()


def test_old_runs_go_and_running_ones_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (state, days) in enumerate([("failed", 40), ("running", 40), ("succeeded", 3)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        run = Site(folder, state=state, run_id=f"lab-1122-06011{number}-77ab").run
        run.ended = time.time() - days * 86400 if state != "running" else None
        run.save()

    assert cli.main(["rm", "--older-than", "30d", "--yes"]) == 0

    assert [run.run_id for run in runs.all_runs()] == ["lab-1122-060111-77ab", "lab-1122-060112-77ab"]
    assert "lab-1122-060111-77ab is running, and stays" in capsys.readouterr().out
    assert cli.main(["rm", "--older-than", "30d", "--yes"]) == 0


@pytest.mark.parametrize(("written", "seconds"), [("30d", 2_592_000), ("12h", 43_200), ("1.5w", 907_200)])
def test_an_age_is_read(written: str, seconds: float) -> None:
    assert rm.age_s(written) == seconds


@pytest.mark.parametrize("written", ["30", "d", "-1d", "30 d", "1y", "inf"])
def test_what_is_no_age_is_refused(written: str) -> None:
    with pytest.raises(KitError, match=f"found '{written}', wanted days, hours or weeks, as 30d, 12h or 2w"):
        rm.age_s(written)


@pytest.fixture
def local(tmp_path: Path, own_home: Path) -> Iterator[Kit]:
    kit = Kit(tmp_path / "my 'project' $HOME", None)
    workdir = json.dumps(str(tmp_path / "work dir"))
    (kit.folder / "two.yaml").write_text(
        f"connection: local\npython: {warm_agents.program()}\nworkdir: {workdir}\nhosts: {{a: , b: }}\n"
    )
    (kit.folder / "job.py").write_text("import time\nwhile True: time.sleep(0.1)\n")
    yield kit
    kit.run("down", "--force")
    kit.close()
    no_process_left(f"HOME={own_home}")


@pytest.mark.slow
def test_a_running_run_is_refused_and_a_stopped_one_removed(local: Kit, tmp_path: Path) -> None:
    started = local.run("up", "two.yaml", "-d", "--", "job.py")
    assert started.returncode == 0, started.stderr
    found = run_id(started.stdout)
    place = tmp_path / "work dir/runs" / found

    record = Path(os.environ["XDG_STATE_HOME"]) / "nodekit/runs" / found
    lock = record / "supervisor.lock"
    until(lambda: lock.exists() and lock.read_text(), what="a supervisor")
    refused = local.run("rm", found, "--yes")
    assert (refused.returncode, f"kit down {found} stops it" in refused.stderr) == (1, True), refused.stderr
    # Nobody looks after it, and its agents are there.
    os.kill(int((record / "supervisor.lock").read_text()), 9)
    until(lambda: "  left " in local.run("runs").stdout, what="a run that is left")
    refused = local.run("rm", found, "--yes")
    assert refused.stderr.count("its agent on a runs (pid ") == 1
    assert refused.returncode == 1
    assert (place / "a/agent.json").exists()
    assert local.run("down", found).returncode == 0
    removed = local.run("rm", found, "--yes")
    assert (removed.returncode, removed.stdout.splitlines()[-1]) == (0, f"{found} is removed"), removed.stderr
    assert not place.exists()
    assert local.run("runs").stdout.startswith("no run on record")


# --- what cannot be read ---


def test_an_agent_of_which_nobody_can_tell_whether_it_runs_is_not_taken_for_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, state="running")

    def refused() -> str:
        before = site.rest()
        assert cli.main(["rm", ID, "--yes"]) == 1
        assert (site.rest(), site.is_on_record) == (before, True)
        return capsys.readouterr().err

    told = refused()
    assert f"a: {ID} is running, as far as is known here, and no agent.json there says" in told
    assert f"kit down {ID} ends it" in told
    agent = site.place / "a/agent.json"
    agent.symlink_to("agent.json")
    assert f"a: {agent} cannot be read: Too many levels of symbolic links" in refused()
    agent.unlink()
    agent.write_text('{"pid": ')
    assert f"a: {agent} is damaged: whether that agent runs is not known" in refused()

    for name in ("a", "b"):  # which it was is known, and it is gone
        record = {"pid": 1, "start_time": 1, "boot_id": "another"}
        (site.place / name / "agent.json").write_text(json.dumps(record))
    assert cli.main(["rm", ID, "--yes"]) == 0
    assert not site.place.exists()


def test_code_that_a_sweep_shares_stays_while_the_record_of_one_of_its_runs_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id = ID
    sites = [Site(tmp_path, run_id=f"{ID}.{number}") for number in (0, 1)]
    for each in sites:
        each.run.slurm = {"sweep": sweep_id, "values": ""}
        each.run.save()
    record = sites[1].run.folder / "run.json"
    record.unlink()
    record.symlink_to("run.json")
    removal = rm.Removal(sites[0].run, [rm.Place("a", str(sites[0].place))])
    rm.remove_record(sites[0].run)
    with pytest.raises(KitError, match=rf"the code that the runs of {sweep_id} share stays"):
        rm.remove_sweep(removal, {})


@pytest.mark.parametrize("name", ["slurm", "state", "code"])
def test_snapshots_stay_also_on_a_node_that_has_the_name_of_a_folder_of_kits(site: Site, name: str) -> None:
    (site.place / "code/snapshots").rmdir()
    (site.place / "code").rmdir()
    (site.place / "a").rename(site.place / name)
    assert cli.main(["rm", ID, "--yes", "--keep-snapshots"]) == 0
    assert f"{ID}/{name}/snapshots/g0000-s000000010.json" in site.rest()


def test_a_spec_json_among_the_users_code_makes_that_no_node(site: Site) -> None:
    (site.place / "code/spec.json").write_text('{"run_id": "theirs"}')
    (site.place / "code/snapshots/mine").write_text("")
    assert cli.main(["rm", ID, "--yes", "--keep-snapshots"]) == 0
    assert not (site.place / "code").exists()
