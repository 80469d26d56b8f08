"""The phase `environment` of `kit up`: builds the inventory's venv on every node that lacks it.

A venv is in ``<workdir>/envs/<key>``. The key is a hash of the file, the options, and the host's interpreter and
platform. `deploy/host/code/venvs.py` runs on the hosts; `deploy/environment/wheels.py` downloads packages for hosts
that cannot reach the package index.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nodekit.deploy.connect.channel import BOOT, CALL_TIMEOUT_S, HostChannel, all_or_raise, on_all, program
from nodekit.deploy.environment import requirements, wheels
from nodekit.deploy.environment.requirements import OLDEST_PYTHON, Asked, Indexes
from nodekit.deploy.environment.wheels import Platform
from nodekit.deploy.host.code import venvs
from nodekit.deploy.host.probes import hostfacts
from nodekit.deploy.sync import sync
from nodekit.deploy.sync.progress import nothing
from nodekit.inventory.errors import HostError, KitError, KitErrors, Problem
from nodekit.inventory.schema import Environment, Host
from nodekit.training.errors import release_of

LOOK_TIMEOUT_S = 30.0
HERE = "here"  # this machine's name in the progress lines


@dataclass(frozen=True, kw_only=True)
class Seat:
    """The venv of one host."""

    host: Host
    channel: HostChannel
    key: str
    workdir: str
    workdir_id: str
    is_there: bool
    platform: Platform
    has_uv: bool

    @property
    def python(self) -> str:
        """Path of the venv's interpreter."""
        return f"{self.workdir}/envs/{self.key}/bin/python"

    def do(self, action: str, *, limit_s: float = LOOK_TIMEOUT_S, **args: Any) -> dict[str, Any]:
        """Run an action of `deploy/host/code/venvs.py` on the host (`_on_host`)."""
        return _on_host(self.channel, self.host, action, limit_s=limit_s, **args)


@dataclass(frozen=True, kw_only=True)
class Entered:
    """The result of `enter`."""

    file: str
    python: Mapping[str, str]
    """Host → its interpreter."""
    built: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Hosts whose venv is still to be built; only with ``build=False``."""
    fetched: bool = False
    """Whether packages were downloaded here and sent to the hosts."""

    def line(self) -> str:
        """Return the result as a line."""
        told = []
        if self.built:
            how = ", from wheels fetched here" if self.fetched else ""
            told.append(f"built on {_listed(self.built)}{how}")
        if self.reused:
            told.append(f"there already on {_listed(self.reused)}")
        return f"{self.file}: {', '.join(told)}"


class _LateError(HostError):
    """The time limit was exceeded."""


@dataclass(frozen=True)
class _Job:
    """The parameters of a build that are the same for all hosts."""

    asked: Asked
    environment: Environment
    indexes: Indexes
    deadline: float
    progress: Callable[[str, float, str], None] = field(repr=False)

    def left_s(self) -> float:
        return max(1.0, self.deadline - time.monotonic())


def enter(
    channels: Mapping[str, HostChannel],
    hosts: Iterable[Host],
    environment: Environment,
    *,
    timeout_s: float,
    progress: Callable[[str, float, str], None] = nothing,
    build: bool = True,
) -> Entered:
    """Build every host's venv if needed, and switch its channel to that interpreter.

    Args:
        channels: to the hosts.
        hosts: hosts without a channel are skipped.
        environment: the inventory's section `environment:`.
        timeout_s: for all hosts together.
        progress: called with the host, the seconds so far, and pip's last line.
        build: build missing venvs; if False they are listed in `missing`, and those channels do not switch.

    Raises:
        KitError: the build failed on some hosts; the message names each, and the venvs of the others are kept.
    """
    asked, indexes = requirements.read(environment), requirements.indexes(environment)
    job = _Job(asked, environment, indexes, time.monotonic() + timeout_s, progress)
    there = {host.name: host for host in hosts if host.name in channels}
    found = on_all(there, lambda host: _look(channels[host.name], host, asked))
    seats: dict[str, Seat] = all_or_raise(found)
    # Hosts that share the folder and have the same interpreter share the venv: the first of them builds it.
    makers: dict[tuple[str, str], Seat] = {}
    folders = hostfacts.folders({name: seat.workdir_id for name, seat in seats.items()})
    for name, seat in seats.items():
        if not seat.is_there:
            makers.setdefault((folders[name], seat.key), seat)
    todo = {seat.host.name: seat for seat in makers.values()}
    built, fetched = _build_all(job, todo) if build and todo else ((), False)
    ready = {name: seat for name, seat in seats.items() if build or seat.is_there}
    all_or_raise(on_all(ready, lambda seat: seat.channel.switch(seat.python)))
    return Entered(
        file=asked.file,
        python={name: seat.python for name, seat in seats.items()},
        built=built,
        reused=tuple(name for name in ready if name not in built),
        missing=tuple(name for name in seats if name not in ready),
        fetched=fetched,
    )


def _look(channel: HostChannel, host: Host, asked: Asked) -> Seat:
    found = _on_host(channel, host, "look", limit_s=LOOK_TIMEOUT_S, workdir=host.workdir, digest=asked.digest)
    if found["problem"]:
        raise HostError(host.name, f"its workdir cannot be used: {found['problem']}")
    version = str(found["markers"]["python_full_version"])
    if release_of(version) < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        raise HostError(
            host.name,
            f"{host.python} is Python {version}, {wanted} or newer is wanted to make the environment with",
            cure="set `python:` to a newer interpreter there",
        )
    return Seat(
        host=host,
        channel=channel,
        key=found["key"],
        workdir=found["workdir"],
        workdir_id=found["workdir_id"],
        is_there=found["is_there"],
        platform=Platform.of(found["markers"], found["libc"]),
        has_uv=found["uv"],
    )


def _build_all(job: _Job, seats: Mapping[str, Seat]) -> tuple[tuple[str, ...], bool]:
    """Build the venvs in parallel; return the hosts that built one, and whether packages were sent from here.

    Raises:
        KitError: the build failed on some hosts; raised once the others are done.
    """
    text = job.asked.requirements if not job.asked.lock else _export(job.asked, seats)
    job = replace(job, asked=replace(job.asked, requirements=text))
    offline = _offline(job, seats)
    folders: dict[Platform, sync.Tree] = {}
    for platform in dict.fromkeys(seats[name].platform for name in offline):
        hosts = [name for name, reason in offline.items() if reason]
        try:
            folder = wheels.fetch(
                job.asked,
                text,
                platform,
                job.indexes,
                timeout_s=job.left_s(),
                has=_installed(
                    job, {name: seat for name, seat in seats.items() if seat.platform == platform}
                ),
                say=lambda seconds, said: job.progress(HERE, seconds, said),
            )
        except KitError as error:
            why = f"\n    {hosts[0]} cannot reach the index itself ({offline[hosts[0]]})" if hosts else ""
            raise KitError(f"{error.problem.found}{why}", cure=error.problem.cure) from error
        folders[platform] = sync.list_code(folder)

    def one(seat: Seat) -> bool:
        return _build(job, seat, folders[seat.platform] if seat.host.name in offline else None)

    results = on_all(seats, one)
    _raise_failures(results)
    return tuple(name for name, built in results.items() if built), bool(offline)


def _raise_failures(results: Mapping[str, Any]) -> None:
    """Raise one error for all hosts that failed; the same problem on several hosts is listed once."""
    failed = {name: result for name, result in results.items() if isinstance(result, HostError)}
    good = [name for name, result in results.items() if not isinstance(result, Exception)]
    if len(failed) + len(good) < len(results) or len(results) == len(failed) == 1:
        all_or_raise(results)
    if not failed:
        return
    hosts: dict[Problem, list[str]] = {}
    for name, error in failed.items():
        hosts.setdefault(error.problem, []).append(name)
    errors = [
        KitError(f"{', '.join(names)}: {found}", wanted, cure)
        for (found, wanted, cure), names in hosts.items()
    ]
    if good:
        errors.append(KitError(f"{_listed(good)} made it, and will not have to again"))
    raise KitErrors(errors) from next(iter(failed.values()))


def _export(asked: Asked, seats: Mapping[str, Seat]) -> str:
    """Convert a uv.lock to requirements, with uv on this machine or on a host.

    Raises:
        KitError: uv is installed nowhere, or rejects the file.
    """
    if venvs.find_uv():
        answer = venvs.export(asked.lock, asked.export)
    elif with_uv := [seat for seat in seats.values() if seat.has_uv]:
        answer = with_uv[0].do("export", files=dict(asked.lock), argv=asked.export)
    else:
        names = ", ".join(seats)
        raise KitError(
            f"environment.lock: {asked.file} is read by uv, which is neither here nor on {names}",
            cure="install it here (pip install uv), or give what it makes of the file: uv export > "
            "requirements.txt",
        )
    if answer["problem"]:
        raise KitError(f"environment.lock: uv export failed:\n{_indented(answer['problem'])}")
    return requirements.checked(str(answer["out"]), asked.file)


def _offline(job: _Job, seats: Mapping[str, Seat]) -> dict[str, str]:
    """Return the hosts that need packages sent: name → why they cannot reach the index, "" if not asked."""
    if job.environment.offline or job.indexes.folders:
        return dict.fromkeys(seats, "")
    if job.environment.offline is False:
        return {}
    answers = all_or_raise(on_all(seats, lambda seat: seat.do("reach", url=job.indexes.index_url)))
    return {
        name: venvs.presentable(f"{answer['url']}: {answer['problem']}", job.indexes.secrets)
        for name, answer in answers.items()
        if answer["problem"]
    }


def _installed(job: _Job, seats: Mapping[str, Seat]) -> list[Any]:
    """Return the packages that all hosts have outside the venv, in the same versions."""
    if not job.environment.system_site_packages:
        return []
    answers = all_or_raise(on_all(seats, lambda seat: seat.do("installed")))
    first, *others = [{tuple(each[:2]): each for each in answer["packages"]} for answer in answers.values()]
    return [first[key] for key in sorted(first) if all(key in other for other in others)]


def _build(job: _Job, seat: Seat, tree: sync.Tree | None) -> bool:
    """Build one venv; return False if another `kit up` has built it meanwhile."""
    name, folder = seat.host.name, f"{seat.workdir}/envs"
    args: dict[str, Any] = {"requirements": job.asked.requirements}
    env = dict(job.indexes.env)
    if tree is not None:
        job.progress(name, 0.0, f"sending {tree.num_files} wheels, {tree.size_bytes / 1e6:.1f} MB")
        args = {"requirements": requirements.without_indexes(job.asked.requirements)}
        args["wheels"] = f"{folder}/{seat.key}.wheels"
        env = {}
        target = sync.Target(seat.channel, dest=args["wheels"], cache=f"{folder}/wheels")
        for step in (sync.send, _settle):
            results = step(tree, {name: target}, timeout_s=job.left_s())
            if isinstance(error := results[name], HostError):
                found, *more = error.problem
                raise HostError(name, f"its wheels were not sent: {found}", *more) from error
            all_or_raise(results)
    limit_s = job.left_s()
    try:
        answer = seat.do(
            "build",
            limit_s=limit_s,
            env=env,
            beat=lambda seconds: job.progress(name, seconds, _last_line(seat)),
            workdir=seat.workdir,
            key=seat.key,
            constraints=job.asked.constraints,
            no_index=job.environment.no_index,
            system_site_packages=job.environment.system_site_packages,
            secrets=job.indexes.secrets,
            **args,
        )
    except _LateError as error:
        raise HostError(
            name,
            f"the environment of {job.asked.file} was not made within the {limit_s:.0f} s that were left of "
            f"timings.environment; the last it said: {_last_line(seat)}",
        ) from error
    if answer["problem"]:
        raise HostError(
            name,
            f"the environment of {job.asked.file} could not be made: {answer['problem']}; all it said is in "
            f"{folder}/{seat.key}.log there, the last of it:\n{_indented(answer['said'])}",
        )
    return bool(answer["built"])


def _settle(_: sync.Tree, targets: Mapping[str, sync.Target], *, timeout_s: float) -> dict[str, Any]:
    """Complete sync's cache before the build, which removes the folder of wheels after use."""
    return sync.finish_caching(targets, timeout_s=timeout_s)


def _last_line(seat: Seat) -> str:
    log = f"{seat.workdir}/envs/{seat.key}.log"
    said: str = seat.channel.call("tail", timeout_s=CALL_TIMEOUT_S, path=log, size=400)
    return (said.strip().splitlines() or [""])[-1].strip()


def _on_host(
    channel: HostChannel,
    host: Host,
    do: str,
    *,
    limit_s: float,
    env: Mapping[str, str] | None = None,
    beat: Callable[[float], None] = nothing,
    **args: Any,
) -> dict[str, Any]:
    """Run an action of `deploy/host/code/venvs.py` in a process that ends with the channel.

    Raises:
        HostError: the action failed.
        _LateError: the action exceeded the limit.
    """
    source = program(("code.venvs",), f"module.run({do!a}, **{args!a})").decode("ascii")
    done = channel.stream(
        "attend",
        beat,
        argv=[host.python, "-c", BOOT],
        cwd="/",
        kit_dir="",
        env=dict(env or {}),
        limit_s=limit_s,
        text=f"{len(source)}\n{source}",
    )
    if done["status"] is None:
        raise _LateError(host.name, f"{host.python} did not look at the environment within {limit_s:.0f} s")
    if done["status"]:
        raise HostError(host.name, f"its environment: {host.python} failed:\n{_indented(done['err'])}")
    answer: dict[str, Any] = json.loads(done["out"].splitlines()[-1])
    return answer


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-wheels.LAST_LINES :])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} nodes"
