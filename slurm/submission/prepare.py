"""Prepare a job: check the login node, ask Slurm whether it would take the job, and copy the code.

A user should not learn after a night in the queue that a path was wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

from nodekit.deploy.connect.channel import HostChannel, all_or_raise
from nodekit.deploy.launch.options import Options
from nodekit.deploy.output.phases import Phases
from nodekit.deploy.output.wording import count
from nodekit.deploy.plan import script
from nodekit.deploy.plan.command import argv_of, refuse_options
from nodekit.deploy.records.secret_files import NOTIFY, RANKS
from nodekit.deploy.story import leftout
from nodekit.deploy.supervise.node_client import SYNC_TIMEOUT_S, list_code
from nodekit.deploy.sync import sync
from nodekit.deploy.sync.progress import build_lines
from nodekit.inventory.errors import HostError, KitError
from nodekit.inventory.load import dump
from nodekit.inventory.schema import Environment, Inventory, SlurmSettings
from nodekit.slurm.cluster.accounts import account_problem
from nodekit.slurm.cluster.jobs import (
    UNLIMITED_MIN,
    Slurm,
    Unanswered,
    beyond_limits,
    choose_partition,
    time_limit,
)
from nodekit.slurm.cluster.login import (
    LOGIN,
    LOGIN_TIMEOUT_S,
    execute,
    host_of,
    login,
    settings_of,
    write,
)
from nodekit.slurm.sbatch_parameters import inventory_keys, parameters

# Time added for each run of an array: submitit writes a file for it, and kit its secrets; a shared folder may be slow.
SUBMIT_RUN_S = 0.1
NEEDED_MODULES = {
    "torch": "torch", "ClusterShell": "ClusterShell", "pathspec": "pathspec", "pydantic": "pydantic", "rich": "rich",
    "submitit": "submitit", "yaml": "pyyaml",
}  # fmt: skip
"""Module → its name for pip."""


def prepare(
    stack: contextlib.ExitStack,
    inventory: Inventory,
    run_id: str,
    options: Options,
    phases: Phases,
    *,
    secrets: Mapping[str, str],
    notify_secrets: Mapping[str, str] | None = None,
) -> Ready:
    """Check everything that can be checked, and copy the code to the shared folder; queue nothing.

    Args:
        stack: closes the channel at its end.
        inventory: with a `slurm:` section.
        run_id: the run, or the sweep, for which the code is copied.
        options: the command line's.
        phases: shows the progress.
        secrets: the secrets of the ranks, written when the job is submitted.
        notify_secrets: secrets for notifications, which the ranks do not get.

    Raises:
        KitError: a check failed.
    """
    settings = settings_of(inventory)
    warn = options.ssh.notice if options.quiet else phases.say
    argv = argv_of(inventory, options.command)
    refuse_options(
        argv,
        Path(inventory.job.code).expanduser(),
        world_size=settings.nodes.max * (inventory.job.nproc_per_node or settings.gpus_per_node or 1),
        env=dict(inventory.job.env),
        modules={},  # the login node's modules say nothing about the nodes
    )
    tree = list_code(inventory, options.command)
    with phases.phase("connect") as said:
        channel = stack.enter_context(login(inventory, options.ssh))
        said.append(settings.login or "this machine")
    if inventory.environment is not None:
        _enter_environment(channel, inventory, inventory.environment, options, phases)
    private = {RANKS: secrets, NOTIFY: notify_secrets or {}}
    with phases.phase("check") as said:
        ready, argv, known = _checked(channel, inventory, argv, run_id, private, options, said)
    with phases.phase("shared") as said:
        problem = _not_shared(channel, ready.shared_dir, known)
        said.append("not tried" if problem else "a node sees the same folder")
    if problem:
        warn(f"warning: {problem}")
    with phases.phase("sync") as said:
        target = sync.code_target(channel, tree, workdir=ready.shared_dir, dest=f"{ready.run_dir}/code")
        sent = all_or_raise(sync.send(tree, {LOGIN: target}, timeout_s=SYNC_TIMEOUT_S))
        all_or_raise(sync.finish_caching({LOGIN: target}, timeout_s=SYNC_TIMEOUT_S))
        left_out = leftout.find(tree, argv)
        said += [f"{count(tree.num_files, 'file')}, {tree.size_bytes / 1e6:.1f} MB", *left_out.said()]
    ready = dataclasses.replace(ready, code_digest=sent[LOGIN].digest, left_out=left_out.to_dict())
    if problem := _script_problem(ready, inventory, argv):
        warn(f"warning: {problem}")
    return ready


def _enter_environment(
    channel: HostChannel, inventory: Inventory, asked: Environment, options: Options, phases: Phases
) -> None:
    """Create the inventory's environment once, in the shared folder, and have the channel use its Python."""
    from nodekit.deploy.environment import environment  # most inventories have none

    limit_s, login_node = inventory.timings.environment, host_of(inventory)
    with phases.phase("environment") as said, build_lines(silent=options.quiet) as progress:
        entered = environment.enter(
            {LOGIN: channel}, [login_node], asked, timeout_s=limit_s, progress=progress
        )
        said.append(entered.line())


def _checked(
    channel: HostChannel,
    inventory: Inventory,
    argv: Sequence[str],
    run_id: str,
    private: Mapping[str, Mapping[str, str]],
    options: Options,
    said: list[str],
) -> tuple[Ready, tuple[str, ...], SlurmSettings]:
    """Check the login node, and ask Slurm.

    Return the `Ready`, still without code, the command for the nodes, and the settings as `_as_sbatch_has_it`.

    Raises:
        KitError: a check failed.
    """
    settings = settings_of(inventory)
    package, token = sync.package(), token_hex(4)
    found = channel.call(
        "hostfacts.facts",
        timeout_s=LOGIN_TIMEOUT_S,
        workdir=settings.shared_dir,
        modules=tuple(NEEDED_MODULES),
        files=script.hosts_own(argv),
    )
    _check_host(channel, found, inventory)
    argv = argv_of(inventory, options.command, found["files"])
    shared_dir, python = str(found["workdir"]), str(found["executable"])
    run_dir, kit_dir = f"{shared_dir}/runs/{run_id}", f"{shared_dir}/kit/{package.digest}"
    if "%" in run_dir or "\\" in run_dir:
        raise KitError(
            f"found a % or a backslash in {run_dir}, where Slurm would write to a folder of another name",
            cure="choose another slurm.shared_dir, or name: of the inventory",
        )
    cluster, known = _cluster(channel), _as_sbatch_has_it(channel, settings)
    partition = choose_partition(known.partition, Slurm(channel).partitions())
    minutes = time_limit(settings.time_min, partition)
    if problem := beyond_limits(known, minutes, partition) or account_problem(Slurm(channel), settings):
        raise KitError(*problem)
    sync.send_package(package, {LOGIN: channel}, {LOGIN: shared_dir}, timeout_s=SYNC_TIMEOUT_S)
    ready = Ready(
        channel=channel,
        python=python,
        shared_dir=shared_dir,
        kit_dir=kit_dir,
        run_dir=run_dir,
        parameters=parameters(
            inventory, name=run_id, run_dir=run_dir, python=python, kit_dir=kit_dir, minutes=minutes
        ),
        settings=settings,
        cluster=cluster,
        private={f"{kind}-{token}.json": values for kind, values in private.items() if values},
        skip_check=options.skip_check,
    )
    ready.ask()
    said.append(
        f"torch {found['torch']}; {count(settings.nodes.max, 'node')} of {partition['PartitionName']}"
    )
    return ready, argv, known


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A checked job whose files are in the shared folder, ready to be submitted."""

    channel: HostChannel
    python: str
    shared_dir: str
    kit_dir: str
    run_dir: str
    parameters: Mapping[str, Any]
    """Parameters for submitit."""
    settings: SlurmSettings
    private: Mapping[str, Mapping[str, str]] = field(repr=False)
    """File name in a run's folder slurm/ → secrets. The names differ for each submission, so that removing the secrets
    of an ended job cannot remove those of the next one."""
    cluster: str = ""
    """Its name; "" if it cannot be told."""
    code_digest: str = ""
    left_out: Mapping[str, list[str]] = field(default_factory=dict)
    """Files of the code's folder that were not sent."""
    skip_check: bool = False
    """Whether the job starts without the check of its nodes."""

    def place(self, run_dir: str, inventory: Inventory, command: Sequence[str] | None) -> None:
        """Write job.json, which the run's tasks read first: what to run, and the names of the files with secrets."""
        job = {
            # The task's own Python is that of the environment already.
            "inventory": dump(inventory.model_copy(update={"environment": None})),
            "command": list(command) if command else None,
            "shared_dir": self.shared_dir,
            "private": list(self.private),
            "left_out": dict(self.left_out),
            "skip_check": self.skip_check,
            # Of the terminal that shows the leader's output.
            "columns": shutil.get_terminal_size((100, 24)).columns,
        }
        write(self.channel, f"{run_dir}/slurm/job.json", json.dumps(job))
        write(self.channel, f"{run_dir}/slurm/result.json", "{}")  # replaces the result of an earlier job

    def ask(self) -> None:
        """Ask Slurm whether it would take the job.

        Raises:
            KitError: Slurm would not, with the reason.
        """
        self._call([self.run_dir], test=True)

    def submit(self, run_dirs: Sequence[str]) -> list[str]:
        """Submit a job for each run, several as one array; return the job ids.

        Raises:
            HostError: unknown whether Slurm has the job: sbatch took too long, or the connection broke.
            KitError: Slurm refused the job.
        """
        return [str(job_id) for job_id in self._call(run_dirs, test=False)["job_ids"]]

    def _call(self, run_dirs: Sequence[str], *, test: bool) -> dict[str, Any]:
        spec = {
            "folder": f"{self.run_dir}/slurm",
            "run_dirs": run_dirs,
            "parameters": self.parameters,
            "max_timeouts": self.settings.max_requeues,  # kit counts them as well, and reports the limit itself
            "private": {} if test else self.private,
            "test": test,
        }
        done = execute(
            self.channel,
            self.python,
            "-m",
            "nodekit.slurm.submission.submit",
            text=json.dumps(spec),
            # Slurm stores the environment of the submission, so it must not contain a secret.
            env={"PYTHONPATH": self.kit_dir, **dict.fromkeys(itertools.chain(*self.private.values()))},
            limit_s=LOGIN_TIMEOUT_S + SUBMIT_RUN_S * len(run_dirs),
            ends_with_us=True,  # an sbatch that outlives kit would queue a job that nobody waits for
        )
        if done["status"]:
            raise KitError(f"{self.channel.host}: submitit failed:\n{done['err'].strip()}")
        answer: dict[str, Any] = json.loads(done["out"].splitlines()[-1])
        if answer.get("is_unanswered"):
            raise HostError(
                self.channel.host,
                f"Slurm does not answer: {answer['problem']}",
                cure="try again when it does (scontrol ping)" if test else "",
            )
        if "problem" in answer:
            wrong = inventory_keys(answer.get("without", ()), self.settings)
            raise KitError(f"{wrong and wrong + ': '}Slurm does not take this job: {answer['problem']}")
        return answer


def _check_host(channel: HostChannel, found: Mapping[str, Any], inventory: Inventory) -> None:
    python = found["executable"]
    if found["workdir_problem"]:
        raise KitError(f"slurm.shared_dir cannot be used on {channel.host}: {found['workdir_problem']}")
    gone = [name for name, kind in found["files"].items() if not kind]
    if gone and not (inventory.slurm and (inventory.slurm.setup or inventory.slurm.srun_args)):
        raise KitError(
            f"{channel.host}: no {gone[0]}, which the command runs",
            cure="install it or lay it where the login node and the nodes have it, or into the folder that "
            "is synced (job.code)",
        )
    absent = [name for name in NEEDED_MODULES if name not in found["modules"]]
    packages = " ".join(NEEDED_MODULES[name] for name in absent)
    if absent and inventory.environment is not None:
        raise KitError(
            f"{channel.host}: the environment ({python}) lacks {', '.join(absent)}, which kit needs on "
            "Slurm's nodes",
            cure=f"add {packages} to what the inventory's `environment:` names",
        )
    if absent:
        raise KitError(
            f"{channel.host}: {python} lacks {', '.join(absent)}",
            cure=f"{python} -m pip install {packages}, or set `python:` to an interpreter that "
            "the login node and the nodes share",
        )


def _cluster(channel: HostChannel) -> str:
    """Return the name of the cluster that the job is for; a KitError if sbatch alone would use another one."""
    slurm = Slurm(channel)
    ours, others = (slurm.run("printenv", f"{name}_CLUSTERS")[1].strip() for name in ("SBATCH", "SLURM"))
    if ours and ours != others:
        raise KitError(
            f"{channel.host}: SBATCH_CLUSTERS is {ours}, and squeue, scontrol and scancel do not follow it",
            cure=f"set SLURM_CLUSTERS={ours} in its place, which all of them follow",
        )
    return slurm.cluster()


def _as_sbatch_has_it(channel: HostChannel, settings: SlurmSettings) -> SlurmSettings:
    """Return the settings with the partition, account and quality of service that sbatch takes from elsewhere.

    These are `slurm.extra`, and then, for what the inventory does not name, the login node's SBATCH_ variables.
    """
    found = {}
    for key in ("partition", "account", "qos"):
        value = settings.extra.get(key) or getattr(settings, key)
        found[key] = value or Slurm(channel).run("printenv", f"SBATCH_{key.upper()}")[1].strip() or None
    return settings.model_copy(update=found)


def _not_shared(channel: HostChannel, shared_dir: str, settings: SlurmSettings) -> str:
    """Have a node read a file from the shared folder; return a warning if no node can try it now, else "".

    Raises:
        KitError: the node sees a different folder.
    """
    name, word = f"{shared_dir}/.kit-{token_hex(4)}", token_hex(8)
    write(channel, name, word)
    where = [f"--partition={settings.partition}"] if settings.partition else []
    where += [f"--account={settings.account}"] if settings.account else []
    try:
        _, out, err = Slurm(channel).asked(
            "srun", "--nodes=1", "--ntasks=1", "--time=1", "--immediate=5", "--quiet", "--job-name=kit-check", *where,
            "env", "LC_ALL=C", "cat", name,
        )  # fmt: skip
    except Unanswered:  # the node must be powered up first, or has a slow prolog
        return f"no node has tried within {LOGIN_TIMEOUT_S:.0f} s whether slurm.shared_dir is shared"
    finally:
        Slurm(channel).run("rm", "-f", name)
    if word in out.split():  # a site's task prolog may print more
        return ""
    said = [line.strip() for line in err.splitlines() if Path(name).name in line]
    if absent := [line for line in said if "No such file" in line]:
        raise KitError(
            f"slurm.shared_dir: {shared_dir} on the nodes is not the folder that the login node has "
            f"({absent[0]})",
            cure="name one that they share",
        )
    if said:
        return f"a node cannot read slurm.shared_dir, without which the job fails ({said[0]})"
    return "no idle node to try whether slurm.shared_dir is shared"


def _script_problem(ready: Ready, inventory: Inventory, argv: Sequence[str]) -> str:
    """Return a warning about modules or files that the script lacks here, but may find on the nodes; else "".

    Raises:
        KitError: something is missing, and the inventory has no setup or srun arguments that could provide it.
    """
    code = f"{ready.run_dir}/code"
    further = {**inventory.defaults.env, **inventory.job.env}.get("PYTHONPATH", "")
    paths = [ready.kit_dir, *(str(Path(code, path)) for path in further.split(os.pathsep) if path)]
    done = execute(
        ready.channel,
        ready.python,
        "-m",
        "nodekit.slurm.submission.imports",
        code,
        text=json.dumps(argv),
        env={"PYTHONPATH": os.pathsep.join(paths)},
    )
    if done["status"]:
        return f"the script's imports could not be looked for: {done['err'].strip().splitlines()[-1:]}"
    problems: list[str] = json.loads(done["out"].splitlines()[-1])
    if not problems:
        return ""
    told = f"{'; '.join(problems)} (looked for with {ready.python} on {ready.channel.host})"
    if ready.settings.setup or ready.settings.srun_args:
        return f"{told}: fine if slurm.setup or slurm.srun_args bring it on the nodes"
    raise KitError(
        told,
        cure="install what is missing into that python, add it to the code that is synced (job.code), "
        "or set `python:` to an interpreter that has it",
    )


def dry_run(inventory: Inventory, options: Options) -> int:
    """Print what would be submitted, and submit nothing."""
    script.find(inventory, options.command)
    settings = settings_of(inventory)
    asked = parameters(
        inventory,
        name=inventory.name,
        run_dir=f"{settings.shared_dir}/runs/…",
        python=inventory.defaults.python or "python3",
        kit_dir=f"{settings.shared_dir}/kit/…",
        minutes=settings.time_min or UNLIMITED_MIN,
    )
    command = list(options.command or inventory.job.command or ("python", "-m", "nodekit.training"))
    if options.json:
        print(json.dumps({"parameters": asked, "command": command}, indent=2))
        return 0
    print(f"through {settings.login or 'this machine'}, for submitit's SlurmExecutor:")
    for key, value in dry_rows(asked, settings, command):
        print(f"  {key:<22} {value}")
    return 0


def dry_rows(
    asked: Mapping[str, Any], settings: SlurmSettings, command: Sequence[str]
) -> list[tuple[str, str]]:
    """Return what would be submitted as rows of label and text; a list takes a row for each item."""
    further = asked.get("additional_parameters", {})
    values = {**asked, **further, "command": shlex.join(command)}
    values.pop("additional_parameters", None)
    least, most = settings.nodes.min, settings.nodes.max
    if least < most:
        values["nodes"] = f"{most} (goes on while {least} are left)"
    values["in"] = f"{Path(settings.shared_dir) / 'runs' / '…' / 'code'}"
    rows = []
    for key, value in values.items():
        lines = [_in_words(each) for each in value] if isinstance(value, list | tuple) else [_in_words(value)]
        rows += [(key if number == 0 else "", line) for number, line in enumerate(lines)]
    return rows


def _in_words(value: Any) -> str:
    if value is None:
        return "as the partition has it"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
