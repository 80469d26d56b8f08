"""User files survive nodes that come back, damage, and disks that fail."""

import errno
import itertools
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from replica_cluster import PATIENT_S, Cluster, Fails, blob_of, flip_a_bit, wait_for

from nodekit.deploy.agent import agent_wire, descriptors
from nodekit.deploy.agent.agent import Agent
from nodekit.deploy.agent.rendezvous.formed import Formed
from nodekit.deploy.agent.replicas import replicas
from nodekit.deploy.agent.replicas.replica_copies import Copies
from nodekit.deploy.agent.replicas.replica_files import UserFiles
from nodekit.deploy.agent.replicas.replica_gather import Gathered
from nodekit.deploy.agent.replicas.replicas import Replicas
from nodekit.deploy.agent.snapshot_sharing import share_snapshots
from nodekit.deploy.agent.unfit import Unfit, Unreached

# --- nodes that come back -----------------------------------------------------------------------------------


def test_a_node_that_was_away_does_not_win(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(3)
    nodes.gather()
    nodes[0].write("last.pt", "old")
    nodes[0].write("step_1.pt", "same")
    nodes.settle()
    nodes.gather()
    nodes[0].die()
    # Nobody saw these; the clock of that node is far ahead, too.
    nodes[0].write("last.pt", "newest by its time", mtime=time.time() + 1e6)
    nodes[0].write("step_900.pt", "of a future that was not")
    nodes.gather()
    nodes[1].write("last.pt", "new")
    nodes.settle()
    nodes[0].start()
    gathered = nodes.gather()[0]
    assert [node.files() for node in nodes.nodes] == [{"last.pt": "new", "step_1.pt": "same"}] * 3
    assert sorted(gathered.set_aside) == ["last.pt", "step_900.pt"]
    assert nodes[0].aside() == {
        "0001.0004/last.pt": "newest by its time",
        "0001.0004/step_900.pt": "of a future that was not",
    }
    assert nodes[1].aside() == nodes[2].aside() == {}


def test_what_cannot_be_set_aside_keeps_a_node_out_and_does_not_win(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(3)
    nodes.gather()
    nodes[0].write("step_1.pt", "same")
    nodes.settle()
    nodes.gather()
    nodes[0].die()
    nodes[0].write("step_900.pt", "of a future that was not")
    nodes.gather()
    nodes[1].write("step_2.pt", "new")
    nodes.settle()
    for _ in range(2):
        nodes[0].start()
        (nodes[0].disk / "kept" / "set-aside").write_text("")  # no folder can be made here, as on a full disk
        with pytest.raises(OSError, match="set-aside"):
            nodes.gather()
        nodes[0].die()
    (nodes[0].disk / "kept" / "set-aside").unlink()
    nodes[0].start()
    nodes.gather()
    assert [node.files() for node in nodes.nodes] == [{"step_1.pt": "same", "step_2.pt": "new"}] * 3
    assert list(nodes[0].aside().values()) == ["of a future that was not"]


def test_two_nodes_that_write_the_same_name_agree_on_the_later_and_keep_both(
    cluster: Callable[..., Cluster],
) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("last.pt", "earlier", mtime=1_700_000_000)
    nodes[1].write("last.pt", "later", mtime=1_700_000_001)
    nodes.gather()
    assert [node.files() for node in nodes.nodes] == [{"last.pt": "later"}] * 2
    assert nodes[0].aside() == {"0001.0002/last.pt": "earlier"}
    assert nodes[0].kinds("replicas-gathered")[-1]["set_aside"] == ["last.pt"]


def test_of_what_a_node_has_told_the_last_counts_also_where_its_clock_is_set_back(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "RETRY_S", PATIENT_S)
    nodes = cluster(3, copies=3)
    nodes.gather()
    nodes[0].write("step_1.pt", "1")
    nodes.settle()
    nodes[1].die()
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() - 3600 * 10**9)
    nodes[0].write("step_2.pt", "2")
    wait_for(lambda: "step_2.pt" in nodes[2].keeps("n0"))
    nodes[0].die()
    nodes[1].start()
    nodes.gather()
    assert [node.files() for node in nodes.alive] == [{"step_1.pt": "1", "step_2.pt": "2"}] * 2


# --- damage -------------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_found_and_another_holder_used(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(4, copies=3)
    nodes.gather()
    content = b"x" * 300_000
    nodes[0].write("last.pt", content)
    nodes.settle()
    nodes[0].die()
    flip_a_bit(blob_of(nodes[1], content))
    gathered = nodes.gather()
    assert [node.files()["last.pt"] for node in nodes.alive] == [content.decode()] * 3
    assert [each.lost for each in gathered] == [[], [], []]
    assert nodes[1].kinds("replica-damaged")


@pytest.mark.parametrize("what", ["n0.json", "listings"])
def test_listings_that_cannot_be_read_cost_no_copy(
    cluster: Callable[..., Cluster], fails: Fails, what: str
) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("ckpt.pt", "the only copy of a lost node's")
    nodes.settle()
    nodes[0].die()
    shutil.rmtree(nodes[0].disk)
    nodes[1].die()
    fails(what, 3)
    nodes[1].start()
    nodes[0].start()
    gathered = nodes.gather()
    assert [each.lost + each.missing for each in gathered] == [[], []]
    assert nodes[0].files() == {"ckpt.pt": "the only copy of a lost node's"}


@pytest.mark.parametrize("what", ["n0.json", "snapshots", "state.json"])
def test_what_cannot_be_read_keeps_a_node_out_and_changes_nothing(
    cluster: Callable[..., Cluster], fails: Fails, what: str
) -> None:
    nodes = cluster(2)
    nodes.gather()
    for node in nodes.nodes:
        node.write(f"{node.name}.pt", node.name)
    nodes.settle()
    before = sorted(nodes[1].disk.rglob("*"))
    nodes[1].die()
    fails(what, 999)
    with pytest.raises(OSError, match=what):
        nodes[1].start().gather({"n1": nodes[1].alive.endpoint}, (1, 9), 1)
    fails(what, 0)
    assert sorted(nodes[1].disk.rglob("*")) == before
    nodes[1].die()
    nodes[1].start()
    nodes.attempt = 9
    nodes.gather()
    assert nodes[0].files() == nodes[1].files() == {"n0.pt": "n0", "n1.pt": "n1"}


def test_a_new_file_that_cannot_be_read_is_not_passed_over(
    cluster: Callable[..., Cluster], fails: Fails
) -> None:
    (node,) = (nodes := cluster(1)).nodes
    nodes.gather()
    node.write("new.pt", "new")
    fails("new.pt", 3)
    nodes.gather()
    assert node.files() == {"new.pt": "new"}
    node.die()
    node.start()
    node.write("newer.pt", "newer")
    fails("newer.pt", 999)
    with pytest.raises(OSError, match=r"newer\.pt: Input/output error"):
        nodes.gather()
    fails("newer.pt", 0)
    nodes.gather()
    assert node.files() == {"new.pt": "new", "newer.pt": "newer"}


def test_a_copy_that_cannot_be_read_for_a_moment_is_not_removed(
    cluster: Callable[..., Cluster], fails: Fails
) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("ckpt.pt", "x")
    nodes.settle()
    nodes[0].die()
    (blob,) = (nodes[1].disk / "kept" / "blobs").iterdir()
    (nodes[1].folder / "ckpt.pt").unlink(missing_ok=True)
    fails(blob.name, 999)
    (gathered,) = nodes.gather([nodes[1]], {"n0": "127.0.0.1:1"}, deadline_s=0.5)
    assert gathered.lost == ["ckpt.pt"]
    fails(blob.name, 0)
    assert blob.exists()
    (gathered,) = nodes.gather([nodes[1]], {"n0": "127.0.0.1:1"}, deadline_s=0.5)
    assert nodes[1].files() == {"ckpt.pt": "x"}


def test_a_newer_kits_listing_is_refused_by_name_and_its_copies_are_kept(
    cluster: Callable[..., Cluster], fails: Fails
) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("ckpt.pt", "x")
    nodes.settle()
    nodes[1].die()
    (listing,) = (nodes[1].disk / "kept" / "listings").iterdir()
    (blob,) = (nodes[1].disk / "kept" / "blobs").iterdir()
    fields = json.loads(listing.read_bytes())
    fields["files"]["ckpt.pt"].append("what it is compressed with")
    listing.write_text(json.dumps(fields))
    with pytest.raises(OSError, match=f"{listing} is no listing of copies that this version of kit knows"):
        nodes[1].start().gather({"n1": nodes[1].alive.endpoint}, (1, 9), 1)
    assert blob.exists()


def test_with_every_copy_damaged_the_older_version_is_used_and_the_loss_told(
    cluster: Callable[..., Cluster],
) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("last.pt", "v1")
    nodes[0].write("other.pt", "o")
    nodes.settle()
    nodes.gather()
    nodes[0].write("last.pt", "v2, longer")
    nodes[0].write("new.pt", "only in the new round")
    nodes.settle()
    nodes[0].die()
    for blob in nodes[1].blobs():
        flip_a_bit(blob)
    (gathered,) = nodes.gather()
    assert nodes[1].files() == {"last.pt": "v1", "other.pt": "o"}
    assert sorted(gathered.lost) == ["last.pt", "new.pt"]
    assert len(nodes[1].kinds("replica-lost")) == 2


def test_after_a_reboot_a_torn_file_is_taken_for_damaged_not_for_new(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("last.pt", "whole")
    nodes.settle()
    nodes[0].die()
    path = nodes[0].folder / "last.pt"
    before = path.stat()
    path.write_text("")  # what a power failure leaves of a file whose content was not on the disk yet
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    monkeypatch.setattr("nodekit.deploy.host.processes.boot_id", lambda: "another boot")
    nodes[0].start()
    nodes.gather()
    assert [node.files() for node in nodes.nodes] == [{"last.pt": "whole"}] * 2


def test_a_transfer_cut_in_the_middle_leaves_nothing_visible(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = cluster(2)
    nodes.gather()
    cut = threading.Event()

    def send_half(self: agent_wire.Wire, file: Any, size_bytes: int) -> None:
        self._sock.sendfile(file, 0, size_bytes // 2)
        cut.set()
        raise ConnectionResetError("killed")

    monkeypatch.setattr(agent_wire.Wire, "send_bytes", send_half)
    nodes[0].write("last.pt", b"z" * 5_000_000)
    assert cut.wait(PATIENT_S)
    nodes[0].die()
    wait_for(lambda: nodes[1].blobs() == [])
    nodes.gather()
    assert nodes[1].files() == {}


@pytest.mark.parametrize("kind", ["once", "always in one file", "for good"])
def test_a_connection_that_breaks_in_a_gather_leaves_no_file_behind(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    nodes = cluster(2)
    nodes.gather([nodes[0]])
    for name in "abc":
        nodes[0].write(name, name * 1000)
    send, connect = agent_wire.Wire.send_bytes, agent_wire.connect
    cuts = []

    def cut(self: agent_wire.Wire, file: Any, size_bytes: int) -> None:
        is_b = os.pread(file.fileno(), 1, 0) == b"b"
        if is_b if kind == "always in one file" else not cuts:
            cuts.append(self)
            self._sock.sendfile(file, 0, size_bytes // 2)
            raise ConnectionResetError("cut")
        send(self, file, size_bytes)

    def connecting(*args: Any) -> agent_wire.Wire:
        if cuts and kind == "for good":
            raise ConnectionRefusedError("the host is gone")
        return connect(*args)

    monkeypatch.setattr(agent_wire.Wire, "send_bytes", cut)
    monkeypatch.setattr(agent_wire, "connect", connecting)
    gathered = nodes.gather()[1]
    assert cuts
    wanted = {"once": "abc", "always in one file": "ac", "for good": ""}[kind]
    assert sorted(nodes[1].files()) == list(wanted)
    assert gathered.lost == (["b"] if kind == "always in one file" else [])
    assert sorted(gathered.missing) == (list("abc") if kind == "for good" else [])
    assert gathered.gone == (["n0"] if kind == "for good" else [])


@pytest.mark.parametrize("gone", [[], ["n0"]])
def test_a_node_that_cannot_have_what_others_saved_says_whether_they_may_be_lost(
    tmp_path: Path, gone: list[str]
) -> None:
    found = Gathered(missing=["step_1.pt"], silent={"n0": "Connection refused"}, gone=gone)
    here = Mock(spec=Replicas, gather=Mock(return_value=found))
    members = tuple({"name": name, "replicas": name, "has_files": True} for name in ("n0", "n1"))
    formed = Formed(
        round=1, group_rank=1, members=members, store=Mock(), master_addr="127.0.0.1", master_port=1
    )
    with pytest.raises(Unfit, match=r"step_1\.pt could not be written") as raised:
        share_snapshots(here, tmp_path, formed, 0)
    assert (
        isinstance(raised.value, Unreached) == ("n0 (Connection refused)" in str(raised.value)) == bool(gone)
    )


@pytest.mark.parametrize("lost_at", [3, None])
def test_a_member_that_cannot_be_reached_is_waited_for_until_it_is_missed_or_not(
    monkeypatch: pytest.MonkeyPatch, lost_at: int | None
) -> None:
    monkeypatch.setattr("nodekit.deploy.agent.agent.LOST_S", 0.0)
    asked = itertools.count(1)
    rendezvous = Mock(has_lost=lambda _: next(asked) == lost_at)
    here = Mock(_spec=Mock(keep_alive_s=0.1, lost_after=3))
    began = time.monotonic()
    assert Agent._loses_one(here, rendezvous, Mock()) == (lost_at is not None)
    assert (time.monotonic() - began >= 0.3) == (lost_at is None)
    assert here._pause_briefly.called  # a stop is heard meanwhile


@pytest.mark.parametrize("what", ["call", "draft", "look"])
def test_a_node_without_descriptors_takes_nobody_for_silent(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    nodes = cluster(2)
    nodes.gather([nodes[0]])
    nodes[0].write("step_1.pt", "1")
    used_up = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    connect = agent_wire.connect

    def calling(endpoint: str, *args: Any) -> agent_wire.Wire:
        if endpoint == nodes[0].alive.endpoint:
            raise used_up
        return connect(endpoint, *args)

    with monkeypatch.context() as patch:
        if what == "call":
            patch.setattr(agent_wire, "connect", calling)
        elif what == "draft":
            patch.setattr(Copies, "room_for", Mock(side_effect=used_up))
        else:
            patch.setattr(os, "scandir", Mock(side_effect=used_up))
        with pytest.raises(OSError, match="Too many open files") as raised:
            nodes.gather()
        assert descriptors.are_used_up(raised.value)  # that is waited out
    nodes.gather()
    assert nodes[1].files() == {"step_1.pt": "1"}


@pytest.mark.parametrize("moment", [1, 2, 3, 4, 5, 6])
def test_a_kill_at_any_point_of_a_gather_loses_nothing(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    nodes = cluster(3)
    nodes.gather()
    nodes[2].write("mine.pt", "left behind")
    nodes.settle()
    nodes.gather()
    nodes[2].die()
    (nodes[0].folder / "mine.pt").unlink()
    for name in ("a.pt", "b/c.pt"):
        nodes[0].write(name, name)
    assert nodes[0].alive.finish_copying(PATIENT_S)
    nodes.gather()
    nodes[0].write("a.pt", "a, newer")
    nodes.settle()
    nodes[0].die()
    nodes[2].write("a.pt", "stale")
    nodes[2].start()
    seen = []

    class Killed(BaseException):
        pass

    def dying(name: str) -> None:
        original = getattr(UserFiles, name)

        def call(self: UserFiles, *args: Any, **how: Any) -> Any:
            if self.folder == nodes[2].folder:
                seen.append(name)
                if len(seen) == moment:
                    raise Killed
            return original(self, *args, **how)

        monkeypatch.setattr(UserFiles, name, call)

    for name in ("place", "remove", "save"):
        dying(name)
    try:
        nodes.gather()
    except Killed:
        assert len(seen) == moment
    nodes[2].die()
    nodes[2].start()
    nodes.gather()
    assert len(seen) >= moment, "it was not killed"
    assert [node.files() for node in nodes.alive] == [{"a.pt": "a, newer", "b/c.pt": "b/c.pt"}] * 2
    assert "stale" in nodes[2].aside().values()


# --- links, disks -------------------------------------------------------------------------------------------


def test_links_inside_stay_links_and_others_are_told_once(cluster: Callable[..., Cluster]) -> None:
    nodes = cluster(2)
    nodes.gather()
    nodes[0].write("step_1/model.pt", "m")
    (nodes[0].folder / "latest").symlink_to("step_1")
    (nodes[0].folder / "last.pt").symlink_to(nodes[0].folder / "step_1" / "model.pt")
    (nodes[0].folder / "step_1" / "up").symlink_to("../latest/model.pt")
    (nodes[0].folder / "out").symlink_to("../../secret")
    (nodes[0].folder / "etc").symlink_to("/etc")
    os.mkfifo(nodes[0].folder / "pipe")
    nodes.settle()
    nodes[0].die()
    nodes.gather()
    assert nodes[1].files() == {
        "step_1/model.pt": "m",
        "latest": "-> step_1",
        "last.pt": "-> step_1/model.pt",
        "step_1/up": "-> ../latest/model.pt",
    }
    refused = [fields["file"] for fields in nodes[0].kinds("replica-refused")]
    assert sorted(refused) == ["etc", "out", "pipe"]


def test_a_folder_that_is_a_link_elsewhere_is_not_written_through(
    cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    nodes = cluster(2)
    outside = tmp_path / "outside"
    outside.mkdir()
    (nodes[1].folder / "step_1").symlink_to(outside)
    nodes[0].write("step_1/model.pt", "m")
    nodes.gather()
    assert list(outside.iterdir()) == []
    assert nodes[1].files() == {"step_1/model.pt": "m"}


@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_a_holder_that_cannot_write_is_told_of_once_and_asked_again(
    cluster: Callable[..., Cluster], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid():
        pytest.skip("needs root to mount a small disk")
    monkeypatch.setattr(replicas, "RETRY_S", 0.05)
    disk = tmp_path / "n1"
    disk.mkdir()
    size = "1m" if kind == "full" else "8m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=True)
    try:
        nodes = cluster(2)
        nodes.gather()
        nodes[0].write("small.pt", "s")
        nodes.settle()
        if kind == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        nodes[0].write("big.pt", b"b" * 3_000_000)
        assert not nodes[0].alive.finish_copying(1)
        assert len(nodes[0].kinds("replica-failed")) == len(nodes[1].kinds("replica-failed")) == 1
        assert nodes[1].keeps("n0") == {"small.pt": "s"}
        gathered = nodes.gather()
        missing = ["big.pt"] if kind == "full" else ["big.pt", "small.pt"]
        assert [sorted(each.missing) for each in gathered] == [[], missing]
        assert nodes[0].files().keys() == {"small.pt", "big.pt"}
        assert nodes[1].files().keys() == {"small.pt", "big.pt"} - set(missing)
        subprocess.run(["mount", "-o", "remount,rw,size=16m", str(disk)], check=True)
        nodes.settle()
        assert nodes[1].keeps("n0").keys() == {"small.pt", "big.pt"}
        nodes.gather()
        assert nodes[1].files() == nodes[0].files()
        nodes[1].die()
    finally:
        subprocess.run(["umount", str(disk)], check=True)
