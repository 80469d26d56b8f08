"""Time to copy 5,000 files and 200 MB to three hosts: kit's sync, and plain rsyncs in parallel."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import made_tree
from rounds import Bench, BenchError, bench, interleave, machine, median, note, spread, table

from nodekit.deploy.connect.channel import all_or_raise
from nodekit.deploy.connect.cluster import SshOptions, channels
from nodekit.deploy.sync import sync
from nodekit.inventory.errors import KitError
from nodekit.inventory.load import load_inventory

NUM_HOSTS = 3
TIMEOUT_S = 600.0
COLD, SAME, NEW = "cold", "unchanged", "unchanged, new run"
DESCRIPTION = """\
How long it takes to bring a made-up project (seeded; many small text files, 1 in 200 a big binary one that does
not compress) to three hosts of a lab on this machine, over real ssh:

  rsync   `rsync -a --delete -e ssh` to each host, all at once
  kit     the sync of `kit up`: list and hash the files, compare, send, verify the hash of every file on every
          host, and give the run a copy of its own. Python's start is not in it: bench/launch has that

and each in these states:

  cold                 the hosts have nothing, and kit remembers nothing of the files here either
  unchanged            the hosts have it all, in the same place
  unchanged, new run   the hosts have it all, and kit makes another run's copy (rsync has no such thing)

Both clocks include connecting: rsync starts an ssh for each host, kit opens its links, which `kit up` needs
anyway; a second line has kit without that. They take turns, round by round, after a warm-up round. After each
cold start the hosts' files are counted. The table is for docs/numbers.md.
"""
EPILOG = """\
examples:
  bench/sync
  bench/sync --rounds 1 --files 500 --megabytes 20

It needs root (for the lab). Exit status: 0 unless something broke; no time is an error.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Took:
    """The times of one sync, in seconds."""

    all_s: float
    connected_s: float = 0.0
    """Of `all_s`, until all channels were open; rsync does not report it."""
    settled_s: float = 0.0
    """Afterwards, until the hosts' caches are complete, which kit does while the job starts."""


class Syncs:
    """The contestants: each takes the round's number, and leaves the hosts as the next one needs them."""

    def __init__(self, lab: Bench, tree: Path) -> None:
        self._bench = lab
        self._tree = tree
        self._num_files = sum(path.is_file() for path in tree.rglob("*"))
        self._inventory = load_inventory(lab.lab.inventory)
        self._workdir = "~/nodekit"

    def rsync_cold(self, _: int) -> Took:
        """Sync to hosts that have nothing."""
        self._on_hosts("rm -rf /root/plain")
        took = self._rsync()
        self._count("/root/plain")
        return took

    def rsync_again(self, _: int) -> Took:
        """Sync to hosts that have everything."""
        return self._rsync()

    def kit_cold(self, _: int) -> Took:
        """Sync to hosts that have nothing, from a machine without a cache of hashes."""
        self._on_hosts("rm -rf /root/nodekit")
        shutil.rmtree(Path(os.environ["XDG_CACHE_HOME"], "nodekit"), ignore_errors=True)
        took = self._kit("first", settle=True)
        self._count("/root/nodekit/runs/first/code")
        return took

    def kit_again(self, _: int) -> Took:
        """Sync to hosts where the same run has everything."""
        return self._kit("first")

    def kit_new_run(self, number: int) -> Took:
        """Sync to hosts where another run has everything."""
        took = self._kit(f"next{number}", settle=True)
        self._on_hosts(f"rm -rf /root/nodekit/runs/next{number}")
        return took

    def _rsync(self) -> Took:
        os.sync()
        begin = time.monotonic()
        running = [
            subprocess.Popen(
                [
                    "rsync", "-a", "--delete", "-e", f"ssh -F {self._bench.ssh_config}",
                    f"{self._tree}/", f"{host}:/root/plain/",
                ],
                stdin=subprocess.DEVNULL,
            )
            for host in self._bench.lab.hosts
        ]  # fmt: skip
        try:
            statuses = [process.wait(max(0.1, begin + TIMEOUT_S - time.monotonic())) for process in running]
        except subprocess.TimeoutExpired:
            raise BenchError(f"rsync was not done after {TIMEOUT_S:.0f} s") from None
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        took = Took(all_s=time.monotonic() - begin)
        if any(statuses):
            raise BenchError(f"rsync ended with {statuses}")
        return took

    def _kit(self, run: str, *, settle: bool = False) -> Took:
        """Sync as `kit up` does: files are listed and hashed while kit connects to the hosts."""
        os.sync()
        trees: list[sync.Tree] = []
        begin = time.monotonic()
        reading = threading.Thread(target=lambda: trees.append(sync.list_code(self._tree)), daemon=True)
        reading.start()
        try:
            with channels(self._inventory.hosts, SshOptions(notice=note)) as opened:
                connected = time.monotonic()
                reading.join()
                if not trees:
                    raise BenchError("the made-up tree could not be read")
                cache = f"{self._workdir}/code/{sync.project_key(self._tree)}"
                dest = f"{self._workdir}/runs/{run}/code"
                targets = {
                    name: sync.Target(channel, dest=dest, cache=cache) for name, channel in opened.items()
                }
                all_or_raise(sync.send(trees[0], targets, timeout_s=TIMEOUT_S))
                done = settled = time.monotonic()
                if settle:
                    all_or_raise(sync.finish_caching(targets, timeout_s=TIMEOUT_S))
                    settled = time.monotonic()
        except KitError as error:
            raise BenchError(str(error)) from error
        return Took(all_s=done - begin, connected_s=connected - begin, settled_s=settled - done)

    def _on_hosts(self, script: str) -> list[str]:
        argv = ["sh", "-c", script]
        done = [
            self._bench.lab.run(host, argv, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
            for host in self._bench.lab.hosts
        ]
        return [each.stdout.strip() for each in done]

    def _count(self, folder: str) -> None:
        found = self._on_hosts(f"find {folder} -type f | wc -l")
        if found != [str(self._num_files)] * len(found):
            raise BenchError(f"{self._num_files} files were sent to {folder}, and the hosts have {found}")


def main() -> int:
    """Run the benchmark, and print the table."""
    args = _arguments()
    if os.geteuid() != 0:
        sys.exit("bench/sync: the lab needs root")
    with bench(NUM_HOSTS) as lab:
        os.environ.update(lab.env())  # kit's code runs in this process
        os.environ["XDG_CACHE_HOME"] = str(lab.folder / "home/cache")
        tree = lab.folder / "project"
        note(f"making {args.files} files, {args.megabytes} MB")
        made_tree.make(tree, num_files=args.files, size_bytes=args.megabytes * 10**6, seed=args.seed)
        syncs = Syncs(lab, tree)
        cold = {f"rsync, {COLD}": syncs.rsync_cold, f"kit, {COLD}": syncs.kit_cold}
        unchanged = {
            f"rsync, {SAME}": syncs.rsync_again,
            f"kit, {SAME}": syncs.kit_again,
            f"kit, {NEW}": syncs.kit_new_run,
        }
        measured, broken = interleave(
            cold, unchanged, rounds=args.rounds, shown=lambda took: f"{took.all_s:6.2f} s"
        )
    print(
        f"{args.files} files, {args.megabytes} MB to {NUM_HOSTS} hosts, seconds; {args.rounds} rounds, "
        f"interleaved; {machine()}.\n"
    )
    print(results(measured))
    for name, why in broken.items():
        note(f"\n{name} broke: {why}")
    return 1 if broken else 0


def results(measured: Mapping[str, Sequence[Took]]) -> str:
    """Return the table."""
    rows = []
    for state in (COLD, SAME, NEW):
        base = [took.all_s for took in measured.get(f"rsync, {SAME if state == NEW else state}", ())]
        for name in (f"rsync, {state}", f"kit, {state}"):
            if name not in measured:
                continue
            took = measured[name]
            rows.append(_row(name, [each.all_s for each in took], base))
            if name.startswith("kit"):
                rows.append(
                    _row("  without connecting", [each.all_s - each.connected_s for each in took], base)
                )
            if any(each.settled_s for each in took):
                rows.append(_row("  afterwards, while the job starts", [each.settled_s for each in took], []))
    return table(["", "median", "range", "to rsync"], rows)


def _row(name: str, values: Sequence[float], base: Sequence[float]) -> list[str]:
    ratio = f"{median(values) / median(base):.2f} ×" if base else ""
    return [name, f"{median(values):.2f}", spread(values), ratio]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/sync",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often each runs (5)")
    parser.add_argument("--files", type=int, default=5000, metavar="N", help="files in the project (5000)")
    parser.add_argument("--megabytes", type=int, default=200, metavar="N", help="its size (200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the made-up project (0)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
