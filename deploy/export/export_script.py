"""The job as a bash script per host, which runs plain torchrun instead of `kit up`; pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nodekit.deploy.connect.cluster import login_argv
from nodekit.deploy.plan.command import PYTHON
from nodekit.deploy.plan.plan import NodePlan, Plan
from nodekit.inventory.errors import KitError
from nodekit.inventory.schema import Host, Inventory


@dataclass(frozen=True, kw_only=True)
class Source:
    """The job to export, with the version of kit and the time of the export."""

    inventory: Inventory
    command: tuple[str, ...] | None
    """Replaces the inventory's command; None: keep that."""
    made: str
    """The version and time: ``kit 0.1.0 on 2026-11-22 02:40:11``."""

    @property
    def kit_up(self) -> str:
        """The `kit up` command of the job."""
        own = ["--", *self.command] if self.command else []
        return one_line(shlex.join(["kit", "up", self.inventory.path.name, *own]))

    def head(self, what: str, **about: str) -> list[str]:
        """Return the comment at the top of every file: what it is, its origin, and `about` in two columns."""
        width = max(map(len, about), default=0)
        told = []
        for name, text in about.items():
            first, *rest = text.split("\n")
            told += [f"  {name.ljust(width)}  {first}", *(f"  {'':{width}}  {line}" for line in rest)]
        written = f"Written by {self.made}, from {one_line(str(self.inventory.path))}"
        lines = [*what.split("\n"), written, *([""] if told else []), *told]
        return [f"# {line}".rstrip() for line in lines]

    def secrets(self, how: str = "before that: export {}") -> dict[str, str]:
        """Return a note on the secrets, if the job has any."""
        names = " ".join(f"{name}=…" for name in self.inventory.job.secrets)
        return {"secrets": f"none is in here; {how.format(names)}"} if names else {}


def one_line(text: str) -> str:
    """Return a text for a comment: on one line, without control characters."""
    return "".join(char if char.isprintable() else " " for char in text)


def check_text(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise KitError for text that cannot be passed to a program."""
    named = [("the command", text) for text in argv] + [(f"env.{name}", text) for name, text in env.items()]
    for where, text in named:
        try:
            is_fit = b"\0" not in text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            is_fit = False
        if not is_fit:
            raise KitError(f"{where}: {text!r} has a character that no program can be given")


def bash_word(text: str) -> str:
    """Quote a text as one word of bash, with printable characters only."""
    if text.isprintable():
        return shlex.quote(text)
    escapes = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", "'": "\\'"}
    chars = [
        escapes.get(char)
        or (char if char.isprintable() else "".join(f"\\x{byte:02x}" for byte in _bytes_of(char)))
        for char in text
    ]
    return f"$'{''.join(chars)}'"


def _bytes_of(char: str) -> bytes:
    return char.encode("utf-8", "surrogateescape")


def torchrun_options(node: NodePlan, run_id: str) -> list[list[str]]:
    """Return torchrun's options for a node, each with its value.

    With a fixed number of nodes, ranks are in the inventory's order, as with kit; an elastic job needs torch's c10d
    rendezvous, which orders nodes by address.
    """
    options = [["--nproc-per-node", str(node.nproc_per_node)]]
    if node.min_nodes == node.max_nodes:
        options = [
            ["--nnodes", str(node.max_nodes)],
            ["--node-rank", str(node.node_rank)],
            *options,
            ["--master-addr", node.master_addr],
            ["--master-port", str(node.master_port)],
        ]
    else:
        address = f"[{node.master_addr}]" if ":" in node.master_addr else node.master_addr
        # As with kit: a lost node is detected within seconds, and the others go on (docs/recovery.md).
        settings = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
        options = [
            ["--nnodes", f"{node.min_nodes}:{node.max_nodes}"],
            *options,
            ["--rdzv-backend", "c10d"],
            ["--rdzv-id", run_id],
            ["--rdzv-endpoint", f"{address}:{node.master_port}"],
            ["--rdzv-conf", f"is_host={int(node.node_rank == 0)},{settings}"],
        ]
    return [*options, ["--local-addr", node.local_addr], ["--max-restarts", str(node.max_restarts)]]


def torchrun_env(node: NodePlan) -> dict[str, str]:
    """Return the variables that kit's agent sets and torchrun does not."""
    if node.min_nodes == node.max_nodes:
        return {"PYTHONUNBUFFERED": "1", "NODE_RANK": str(node.node_rank)}
    # Otherwise the survivors would go on using the store of the lost node.
    return {"PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def launched(argv: Sequence[str], python: str) -> list[str]:
    """Return the command for torchrun and similar launchers: flags, script or program, arguments.

    Raises:
        KitError: the launcher would take the program for an option of its own.
    """
    interpreter, *rest = argv
    if interpreter == PYTHON and rest[:1] == ["-u"]:
        if rest[1:2] == ["-m"] and len(rest) > 2 and not rest[2].startswith("-"):
            return ["--module", *rest[2:]]
        if rest[1:] and not rest[1].startswith("-"):
            return rest[1:]
    if interpreter.startswith("-") or not interpreter:
        raise KitError(
            f"the command: {interpreter!r} is no program, and no other launcher would take it for one"
        )
    return ["--no-python", python if interpreter == PYTHON else interpreter, *rest]


def torchrun_words(argv: Sequence[str], python: str) -> list[str]:
    """Return `launched`, escaped for torchrun, which expands ``${local_rank}`` and replaces ``$$`` by ``$``."""
    words = launched(argv, python)
    flags = words[: words[0] in ("--module", "--no-python")]
    program, *arguments = words[len(flags) :]
    if flags != ["--no-python"]:
        program = program.replace("$", "$$")
    return [*flags, program, *(each.replace("$", "$$") for each in arguments)]


def copying(source: Source, host: Host, code_dir: str) -> str:
    """Return the rsync command that copies the code to a host."""
    code = str(Path(source.inventory.job.code).expanduser().resolve())
    # Lines with `!` in these files are not supported by rsync.
    ignored = ["--filter=:- .kitignore", "--filter=:- .gitignore"]
    argv = ["rsync", "-a", "--mkpath", *ignored, "--exclude=.git"]
    if host.connection == "ssh" and (host.port or host.identity_file or host.known_hosts):
        *ssh, _, _ = login_argv(host, accept_new_host_keys=False)
        argv += ["-e", shlex.join(ssh)]
    address = f"[{host.address}]" if ":" in host.address else host.address
    user = f"{host.user}@" if host.user else ""
    login = "" if host.connection == "local" else f"{user}{address}:"
    return one_line(shlex.join([*argv, f"{code}/", f"{login}{code_dir}/"]))


def script(node: NodePlan, plan: Plan, source: Source) -> str:
    """Return the script of one node.

    Raises:
        KitError: the command or a variable contains a character that cannot be passed to a program.
    """
    check_text(node.argv, node.env)
    if "=" in node.python:
        raise KitError(
            f"{node.name}: env(1) would take {node.python} for a variable", cure="name it without a '='"
        )
    folders = [
        node.env[name] for name in ("NODEKIT_SNAPSHOT_DIR", "NODEKIT_OUTPUT_DIR") if node.env.get(name)
    ]
    env = {**torchrun_env(node), **node.env}
    python_path = env.pop("PYTHONPATH", None)
    after = "${PYTHONPATH:+:$PYTHONPATH}"
    if python_path is not None:  # an empty entry would mean the current folder
        after = bash_word(f":{python_path}") if python_path else ""
    lines = [
        "#!/usr/bin/env bash",
        *_head(node, source),
        "set -euo pipefail",
        "",
        *_checks_of_secrets(node.secrets),
        f'[ -n "${{KIT_CODE:-}}" ] || KIT_CODE={bash_word(node.code_dir)}',
        'cd -- "$KIT_CODE" || { echo "no code in $KIT_CODE: see the top of this script" >&2; exit 1; }',
        f"mkdir -p -m 700 -- {' '.join(map(bash_word, folders))}",
        "",
        "# The interfaces, kit's variables, those of the inventory.",
        "KIT_ENV=(",
        *(f"  {name}={bash_word(value)}" for name, value in env.items()),
        "  # kit's own package, for scripts that import it; kit up has put it there, if it ever ran here",
        f"  PYTHONPATH={bash_word(node.kit_dir)}{after}",
        ")",
        "KIT_TORCHRUN=(",
        f"  {bash_word(node.python)} -m torch.distributed.run",
        *(f"  {' '.join(map(bash_word, option))}" for option in torchrun_options(node, plan.run_id)),
        ")",
        "# torchrun reads $$ as $.",
        "KIT_COMMAND=(",
        *(f"  {bash_word(word)}" for word in torchrun_words(node.argv, node.python)),
        ")",
        'exec env "${KIT_ENV[@]}" "${KIT_TORCHRUN[@]}" "${KIT_COMMAND[@]}"',
    ]
    return "\n".join(lines) + "\n"


def _head(node: NodePlan, source: Source) -> list[str]:
    """Return the comment at the top of a node's script."""
    host = next(each for each in source.inventory.hosts if each.name == node.name)
    is_fixed = node.min_nodes == node.max_nodes
    size = str(node.max_nodes) if is_fixed else f"{node.min_nodes} to {node.max_nodes}"
    return source.head(
        f"Node {node.node_rank} of {size}, {node.name}: by plain torchrun what `{source.kit_up}` does here.",
        use=f"bash {node.name}.sh on this host, and the other hosts' scripts on theirs",
        code=f"is expected in {one_line(node.code_dir)}, or in $KIT_CODE;\n"
        + copying(source, host, node.code_dir),
        writes=one_line(
            f"{node.node_dir}, as with kit; run again, it resumes from the newest snapshot there"
        ),
        **source.secrets(),
        unlike="kit up: nobody watches. No other host takes over when the first is lost, no snapshot is copied\n"
        "to other hosts, and a hang is not noticed",
    )


def _checks_of_secrets(names: Iterable[str]) -> list[str]:
    if not (names := list(names)):
        return []
    return [
        f"for KIT_SECRET in {' '.join(names)}; do",
        '  printenv -- "$KIT_SECRET" >/dev/null ||',
        '    { echo "$KIT_SECRET is not set: export $KIT_SECRET=… and run this again" >&2; exit 1; }',
        "done",
    ]
