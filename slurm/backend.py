"""`kit up`, `status`, `logs` and `down` where the inventory says `slurm:`: checks, submits, shows, stops.

All is done through one link to the login node, or to this machine where it is one: files in the shared folder, and
Slurm's commands. What runs on the nodes is in slurm/allocation.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

from nodekit.deploy import cluster, runs, showlogs, sync
from nodekit.deploy.check import all_or_raise
from nodekit.deploy.cluster import SshOptions
from nodekit.deploy.hands import SYNC_TIMEOUT_S, secrets_of, take
from nodekit.deploy.link import Link
from nodekit.deploy.runs import Run
from nodekit.deploy.start import Options, Phases, count
from nodekit.deploy.view import status_line
from nodekit.inventory.errors import JobFailed, KitError
from nodekit.inventory.load import dump, restore
from nodekit.inventory.schema import Host, Inventory, SlurmSettings
from nodekit.slurm.batch import parameters
from nodekit.slurm.jobs import Job, Slurm, choose_partition, time_limit

LOGIN = "login"
LOOK_S = 2.0
POLL_S = 0.3
STOP_S = 90.0
CALL_TIMEOUT_S = 60.0
MAX_TIMEOUTS = 100
NEEDED_MODULES = ("ClusterShell", "pathspec", "pydantic", "rich", "submitit", "yaml")


def start(inventory: Inventory, resumed: Run | None, options: Options) -> Run:
    """Submit the job of an inventory, or go on with that of `resumed`; nothing is queued unless all is well.

    Raises:
        KitError: what is wrong, on this machine, the login node or with what is asked of Slurm.
    """
    settings = _settings(inventory)
    phases = Phases(silent=options.quiet)
    secrets = secrets_of(inventory)
    tree = take(inventory, options.command)
    run_id = resumed.run_id if resumed else runs.new_id(inventory.name)
    phases.say(f"{'resuming' if resumed else 'run'} {run_id}" + ("; --new starts over" if resumed else ""))
    with contextlib.ExitStack() as stack:
        with phases.phase("connect") as said:
            link = stack.enter_context(login(inventory, options.ssh))
            said.append(settings.login or "this machine")
        package = sync.package()
        with phases.phase("check") as said:
            found = link.call(
                "hostfacts.facts",
                timeout_s=CALL_TIMEOUT_S,
                workdir=settings.shared_dir,
                kit_digest=package.digest,
            )
            _check_host(link, found)
            shared_dir = str(found["workdir"])
            run_dir, kit_dir = f"{shared_dir}/runs/{run_id}", f"{shared_dir}/kit/{package.digest}"
            there = Slurm(link).partitions()
            partition = choose_partition(settings.partition, there)
            asked = parameters(
                inventory,
                name=run_id,
                run_dir=run_dir,
                kit_dir=kit_dir,
                minutes=time_limit(settings.time_min, partition),
            )
            sync.send_package(package, {LOGIN: link}, {LOGIN: shared_dir}, timeout_s=SYNC_TIMEOUT_S)
            submission = _Submission(link, found["executable"], kit_dir, run_dir, asked, tuple(secrets))
            submission.submit(test=True)
            said.append(
                f"torch {found['torch']}; {count(settings.nodes.max, 'node')} of {partition['PartitionName']}"
            )
        if problem := _not_shared(link, shared_dir, settings):
            phases.say(f"warning: {problem}")
        with phases.phase("sync") as said:
            target = sync.Target(
                link, dest=f"{run_dir}/code", cache=f"{shared_dir}/code/{sync.project_key(tree.root)}"
            )
            all_or_raise(sync.send(tree, {LOGIN: target}, timeout_s=SYNC_TIMEOUT_S))
            all_or_raise(sync.settle({LOGIN: target}, timeout_s=SYNC_TIMEOUT_S))
            said.append(f"{count(tree.num_files, 'file')}, {tree.size_bytes / 1e6:.1f} MB")
        job: dict[str, Any] = {
            "inventory": dump(inventory),
            "command": list(options.command) if options.command else None,
            "shared_dir": shared_dir,
        }
        _write(link, f"{run_dir}/slurm/job.json", json.dumps(job))
        if secrets:
            _write(link, f"{run_dir}/slurm/secrets.json", json.dumps(secrets))
        with phases.phase("submit") as said:
            job_id = submission.submit()
            said.append(f"job {job_id}")
    run = resumed or Run(
        run_id=run_id,
        name=inventory.name,
        inventory_path=str(inventory.path),
        inventory={},
        command=job["command"],
        created=time.time(),
    )
    run.inventory, run.code_digest = job["inventory"], tree.digest
    run.slurm = {"job_id": job_id, "run_dir": run_dir}
    run.state, run.started, run.ended, run.verdict = "running", time.time(), None, ""
    run.save()
    run.say_stop("")
    return run


@contextlib.contextmanager
def login(inventory: Inventory, options: SshOptions) -> Iterator[Link]:
    """A link to the login node."""
    settings = _settings(inventory)
    values = inventory.defaults.model_dump(exclude_none=True)
    user, _, address = (settings.login or "").rpartition("@")
    here = {"address": "127.0.0.1", "connection": "local", "python": values.get("python", sys.executable)}
    there = {"address": address, "connection": "ssh", "python": values.get("python", "python3")}
    host = Host.model_validate(
        {
            **values,
            **(there if settings.login else here),
            **({"user": user} if user else {}),
            "name": LOGIN,
            "workdir": settings.shared_dir,
        }
    )
    with cluster.links([host], options) as links:
        yield links[LOGIN]


def _settings(inventory: Inventory) -> SlurmSettings:
    assert inventory.slurm is not None
    return inventory.slurm


@dataclasses.dataclass(frozen=True)
class _Submission:
    """A call of slurm/submit.py on the login node."""

    link: Link
    python: str
    kit_dir: str
    run_dir: str
    parameters: Mapping[str, Any]
    secrets: tuple[str, ...]
    """Slurm keeps the environment a job was submitted from: these are left out of it."""

    def submit(self, *, test: bool = False) -> str:
        """Submit the job, or only ask whether Slurm would take it; its id.

        Raises:
            KitError: Slurm would not.
        """
        spec = {
            "run_dir": self.run_dir,
            "parameters": self.parameters,
            "max_timeouts": MAX_TIMEOUTS,
            "test": test,
        }
        done = self.link.call(
            "execute",
            timeout_s=CALL_TIMEOUT_S + 5,
            limit_s=CALL_TIMEOUT_S,
            argv=[self.python, "-m", "nodekit.slurm.submit"],
            text=json.dumps(spec),
            env={"PYTHONPATH": self.kit_dir, **dict.fromkeys(self.secrets)},
        )
        if done["status"]:
            raise KitError(f"{self.link.host}: submitit failed:\n{done['err'].strip()}")
        answer = json.loads(done["out"].splitlines()[-1])
        if "problem" in answer:
            raise KitError(f"Slurm does not take this job: {answer['problem']}")
        return str(answer.get("job_id", ""))


def _check_host(link: Link, found: Mapping[str, Any]) -> None:
    python = found["executable"]
    if found["workdir_problem"]:
        raise KitError(f"slurm.shared_dir cannot be used on {link.host}: {found['workdir_problem']}")
    program = "import importlib.util as u,sys;print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
    done = link.call(
        "execute",
        timeout_s=CALL_TIMEOUT_S + 5,
        limit_s=CALL_TIMEOUT_S,
        argv=[python, "-c", program, "torch", *NEEDED_MODULES],
    )
    if done["status"] or done["out"].strip():
        absent = ", ".join(done["out"].split()) or done["err"].strip()
        raise KitError(
            f"{link.host}: {python} lacks {absent}; {python} -m pip install 'nodekit[slurm,train]', "
            "or set `python:` to an interpreter that the login node and the nodes share"
        )


def _not_shared(link: Link, shared_dir: str, settings: SlurmSettings) -> str:
    """Have a node read a file from the shared folder; what to warn of, where that cannot be tried now.

    Raises:
        KitError: the node sees another folder.
    """
    name, word = f"{shared_dir}/.kit-{token_hex(4)}", token_hex(8)
    _write(link, name, word)
    where = [f"--partition={settings.partition}"] if settings.partition else []
    where += [f"--account={settings.account}"] if settings.account else []
    try:
        status, out, err = Slurm(link).run(
            "srun", "--nodes=1", "--ntasks=1", "--time=1", "--immediate=5", "--quiet", "--job-name=kit-check", *where,
            "cat", name,
        )  # fmt: skip
    finally:
        Slurm(link).run("rm", "-f", name)
    if out.strip() == word:
        return ""
    if "No such file" in err or (status == 0 and out.strip() != word):
        raise KitError(
            f"slurm.shared_dir: {shared_dir} on the nodes is not the folder that the login node has "
            f"({err.strip().splitlines()[0] if err.strip() else 'its file is another'}); name one that they share"
        )
    return "no idle node to try whether slurm.shared_dir is shared"


def _write(link: Link, path: str, text: str) -> None:
    link.call("write_file", timeout_s=CALL_TIMEOUT_S, path=path, text=text)


# --- while it runs ------------------------------------------------------------------------------------------


def is_there(run: Run, options: SshOptions) -> bool:
    """Whether Slurm still has the job of a run, waiting or running."""
    with login(restore(run.inventory), options) as link:
        return not Slurm(link).job(run.slurm["job_id"]).is_over


def watch(run: Run, options: Options, *, tail_bytes: int | None = None) -> int:
    """Show what the job says until it ends; Ctrl-C cancels it. The exit status is kit's."""
    from nodekit.deploy.up import sigterm_interrupts

    with login(restore(run.inventory), options.ssh) as link, sigterm_interrupts():
        slurm, job_id = Slurm(link), run.slurm["job_id"]
        shown = _Shown(link, run, tail_bytes, quiet=options.quiet)
        try:
            line = ""
            looked_at = -LOOK_S
            while True:
                shown.more()
                if time.monotonic() - looked_at >= LOOK_S:
                    job, looked_at = slurm.job(job_id), time.monotonic()
                    if (now := job.line()) != line:
                        print(f"job {job_id} {now}", flush=True)
                        line = now
                    if job.is_over:
                        break
                time.sleep(POLL_S)
            while shown.more(final=True):
                pass
        except KeyboardInterrupt as interrupt:
            run.say_stop(str(interrupt) or "Ctrl-C")
            print(f"cancelling job {job_id}", flush=True)
            _cancel(slurm, job_id)
            while shown.more(final=True):
                pass
            run.finish_stopped()
            print(f"{run.run_id} is stopped", flush=True)
            return 130
        return _conclude(run, link, job)


class _Shown:
    """What the leader has said, as far as it has been shown."""

    def __init__(self, link: Link, run: Run, tail_bytes: int | None, *, quiet: bool) -> None:
        self._link = link
        self._folder = f"{run.slurm['run_dir']}/slurm"
        self._offsets: dict[str, int] | None = None
        self._tail_bytes = tail_bytes
        self._quiet = quiet

    def more(self, *, final: bool = False) -> bool:
        """Show what is new; whether anything was."""
        self._offsets, found = self._link.call(
            "logs",
            timeout_s=CALL_TIMEOUT_S,
            node_dir=self._folder,
            offsets=self._offsets,
            tail_bytes=self._tail_bytes,
            final=final,
        )
        for _, text in found:
            if not self._quiet:
                print(text, end="", flush=True)
        return bool(found)


def _cancel(slurm: Slurm, job_id: str) -> bool:
    """Cancel a job and wait until it is over; whether it is."""
    slurm.cancel(job_id)
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        if slurm.job(job_id).is_over:
            return True
        time.sleep(POLL_S)
    return False


def _conclude(run: Run, link: Link, job: Job) -> int:
    text = link.call("read_file", timeout_s=CALL_TIMEOUT_S, path=f"{run.slurm['run_dir']}/slurm/result.json")
    result = json.loads(text or "{}")
    record = _record(run, link)
    attempt = f"{run.slurm['job_id']}.{job.restarts}"
    if record is not None and result.get("attempt") == attempt and record.state in runs.ENDED:
        status = int(result["exit"])
        if job.state == "CANCELLED" and record.state == "stopped":
            run.finish("stopped", f"stopped by {run.stopped_by or 'scancel'}")
            print(f"\n{run.run_id} was stopped; {_how_to_resume(run)}")
            return status
        run.finish(record.state, record.verdict)
        return status
    run.finish("failed", f"Slurm ended the job: {job.state.lower() or 'it knows it no more'}")
    folder = f"{run.slurm['run_dir']}/slurm"
    print(
        f"\n{run.run_id} failed: Slurm says {job.line()}\n"
        f"  what its tasks said   {link.host}:{folder}/{run.slurm['job_id']}_*_log.out\n  {_how_to_resume(run)}"
    )
    return JobFailed.exit_code


def _how_to_resume(run: Run) -> str:
    relative = os.path.relpath(run.inventory_path)
    shown = run.inventory_path if relative.startswith("..") else relative
    return f"kit up {shlex.quote(shown)} goes on from its snapshot"


def _record(run: Run, link: Link) -> Run | None:
    """The leader's record of a run; None before it has one."""
    path = f"{run.slurm['run_dir']}/state/nodekit/runs/{run.run_id}/run.json"
    text = link.call("read_file", timeout_s=CALL_TIMEOUT_S, path=path)
    return Run(**json.loads(text)) if text else None


def down(run: Run, options: SshOptions) -> int:
    """Cancel the job of a run; the exit status."""
    run.say_stop("kit down")
    with login(restore(run.inventory), options) as link:
        slurm, job_id = Slurm(link), run.slurm["job_id"]
        if slurm.job(job_id).is_over:
            if run.state not in runs.ENDED:
                run.finish("stopped", "ended while nobody watched")
            print(f"{run.run_id} is not running ({run.state})")
            return 0
        if not _cancel(slurm, job_id):
            raise KitError(
                f"job {job_id} is still there {STOP_S:.0f} s after scancel; see squeue --job {job_id}"
            )
    run.finish_stopped()
    print(f"{run.run_id} is stopped")
    return 0


def status(run: Run, options: SshOptions, *, as_json: bool) -> int:
    """Print what the job of a run, and each of its nodes, is doing."""
    with login(restore(run.inventory), options) as link:
        job = Slurm(link).job(run.slurm["job_id"])
        record = _record(run, link)
        found = {}
        for name, node in (record.nodes if record else {}).items():
            text = link.call("read_file", timeout_s=CALL_TIMEOUT_S, path=f"{node['node_dir']}/status.json")
            found[name] = json.loads(text or "{}")
    if as_json:
        print(json.dumps({**runs.public(run), "job": dataclasses.asdict(job), "status": found}, indent=2))
        return 0
    print(f"{run.run_id}  {run.state}" + (f": {run.verdict}" if run.verdict else ""))
    print(f"  job {run.slurm['job_id']} {job.line()}")
    width = max(map(len, found), default=0)
    for name, each in found.items() if not job.is_over else ():
        print(f"  {name.ljust(width)}  {status_line(each, now=time.time())}")
    return 0


def logs(run: Run, options: SshOptions, *, node: str | None, rank: int | None, follow: bool) -> int:
    """Print what the ranks of a run have written."""
    with login(restore(run.inventory), options) as link:
        record = _record(run, link)
        if record is None:
            raise KitError(f"{run.run_id} has not started: {Slurm(link).job(run.slurm['job_id']).line()}")
        names = [name for name in record.nodes if node in (None, name)]
        if not names:
            raise KitError(f"{run.run_id} has no node '{node}'; it has {', '.join(record.nodes)}")
        showlogs.show(record, dict.fromkeys(names, link), rank=rank, follow=follow)
    return 0


def dry_run(inventory: Inventory, options: Options) -> int:
    """Print what would be submitted, and submit nothing."""
    settings = _settings(inventory)
    asked = parameters(
        inventory, name=inventory.name, run_dir=f"{settings.shared_dir}/runs/…", kit_dir=f"{settings.shared_dir}/kit/…",
        minutes=settings.time_min or 0,
    )  # fmt: skip
    command = list(options.command or inventory.job.command or ("python", "-m", "nodekit.training"))
    if options.json:
        print(json.dumps({"parameters": asked, "command": command}, indent=2))
        return 0
    print(f"through {settings.login or 'this machine'}, for submitit's SlurmExecutor:")
    for key, value in asked.items():
        print(f"  {key:<22} {value}")
    print(
        f"  {'command':<22} {shlex.join(command)}\n  {'in':<22} {Path(settings.shared_dir) / 'runs' / '…' / 'code'}"
    )
    return 0
