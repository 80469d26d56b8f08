"""The inventory's models: `InventoryFile` is what users write, `Inventory` has every default filled in.

The same field types validate both and generate the JSON Schema, so that editor, loader and run records agree.
"""

import re
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializationInfo,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema

from nodekit.inventory.fields import (
    AnyText,
    ArraySpec,
    AutoSeconds,
    Connection,
    Count,
    EnvName,
    FindLinks,
    Flag,
    Gpus,
    HangSeconds,
    HeaderName,
    HostFolder,
    Hostlist,
    IndexUrl,
    Interface,
    InventoryName,
    Login,
    MemoryGb,
    Network,
    Nodes,
    Occasion,
    OnNan,
    OnSlow,
    Port,
    PositiveCount,
    RunTime,
    Scalar,
    Seconds,
    SecretName,
    SharedFolder,
    Size,
    StartMethod,
    Text,
    User,
    WebhookUrl,
    run_time_minutes,
)


class _Model(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        defer_build=True,  # built on first use, as `kit --help` needs no model
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_is_absent(cls, data: object) -> object:
        """Drop keys without a value: ``env:`` with all its lines commented out is the same as no ``env:``."""
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Allow null for any field that may be left out, as `_empty_is_absent` does."""
        written = handler(schema)
        model = handler.resolve_ref_schema(written)
        model.pop("title", None)
        for name, field in model.get("properties", {}).items():
            if name not in model.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
                field.pop("default", None)
                about = {"description": field.pop("description")}
                model["properties"][name] = {**about, "anyOf": [field, {"type": "null"}]}
            elif field.get("default", "") is None:
                del field["default"]
        return written


def _one_of(*keys: str, kind: str = "string") -> ConfigDict:
    """Return a configuration whose JSON Schema tells editors that exactly one of these keys must be given."""
    choices: list[Any] = [{"required": [key], "properties": {key: {"type": kind}}} for key in keys]
    return ConfigDict(json_schema_extra={"oneOf": choices})


_Env = dict[EnvName, AnyText]
_CLOSED: dict[str, Any] = {"additionalProperties": False}


class HostSettings(_Model):
    """What may be set for one host, or at the top of the file for all of them."""

    user: User | None = None
    """Who to log in as. Default: what ~/.ssh/config says, else your own name."""
    port: Port | None = None
    """The SSH port. Default: what ~/.ssh/config says, else 22."""
    identity_file: Text | None = None
    """The private key. A relative path is relative to this file. Default: the agent's and ~/.ssh/config's."""
    known_hosts: Text | None = None
    """A further file of known host keys. A relative path is relative to this file."""
    connection: Connection | None = None
    """How the host is reached: ssh, or local for a node that is a folder on this machine. Default: ssh."""
    python: Text | None = None
    """The host's interpreter, with torch installed. Default: python3; kit's own for local hosts."""
    workdir: HostFolder | None = None
    """Where kit keeps code, logs and snapshots on the host. Default: ~/nodekit."""
    gpus: Gpus | None = None
    """How many GPUs to use, as 4, or which, as [0, 1]. 0 trains on the CPU. Default: all that are found."""
    gpu_model: Text | None = None
    """What nvidia-smi calls the GPUs, or a part of it, as A100: with another one nothing starts. Default: any."""
    interface: Interface | None = None
    """The network interface to train over, as eth0. Default: the one with an address in network, else the one that routes to the other hosts."""  # noqa: E501
    env: _Env = Field(default_factory=dict, json_schema_extra=_CLOSED)
    """Environment variables for the job on this host. A host's win over those at the top of the file."""


class HostBlock(HostSettings):
    """One host, or all the hosts of a hostlist."""

    address: Hostlist | None = None
    """Where SSH finds it: a name, an address or an alias of ~/.ssh/config. For a hostlist, a hostlist of as many. Default: the name."""  # noqa: E501


class Host(HostBlock):
    """One host with every default filled in. For what is still None, SSH or the host itself has the default."""

    name: Text
    """The host's name in kit."""
    address: Text
    """The host's name, address or SSH alias for connections; 127.0.0.1 for a local host without one."""
    connection: Connection
    """How the host is reached."""
    python: Text
    """The host's interpreter."""
    workdir: Text
    """Where kit keeps code, logs and snapshots on the host; the host expands a `~`."""


class Environment(_Model):
    """The interpreter that trains: one that is there, or a venv that kit makes on each node and keeps."""

    model_config = _one_of("python", "requirements", "pyproject", "lock")

    python: Text | None = None
    """An interpreter on the hosts, with torch installed: the same as python at the top of the file."""
    requirements: Text | None = None
    """A requirements file, as pip has them. A relative path is relative to this file."""
    pyproject: Text | None = None
    """A pyproject.toml, whose dependencies are installed. A relative path is relative to this file."""
    lock: Text | None = None
    """A uv.lock, with its pyproject.toml beside it. A relative path is relative to this file."""
    extras: tuple[Text, ...] = ()
    """Which extras of the pyproject.toml are installed too."""
    index_url: IndexUrl | None = None
    """The package index. ${NAME} stands for a variable of your environment. Default: each node's pip's own."""
    extra_index_url: tuple[IndexUrl, ...] = ()
    """Further package indexes."""
    find_links: tuple[FindLinks, ...] = ()
    """Folders on this machine, or URLs of pages, with wheels. A relative path is relative to this file."""
    no_index: Flag = False
    """Whether find_links is all there is."""
    offline: Flag | None = None
    """Whether packages are fetched here and sent to the nodes. Default: where a node cannot reach the index."""
    system_site_packages: Flag = False
    """Whether the packages of the hosts' python can be imported too, as torch."""

    @field_serializer("index_url", "extra_index_url", "find_links")
    def _without_credentials(self, value: Any, info: SerializationInfo) -> Any:
        """Leave passwords out of a run's record of the inventory; `${NAME}` is none, and stays."""
        if info.mode != "json" or value is None:
            return value
        return _plain(value) if isinstance(value, str) else [_plain(each) for each in value]


def _plain(url: str) -> str:
    """Return a URL without user and password, unless these are only `${NAME}`."""
    return re.sub(
        r"^(https?://)([^/]*)@",
        lambda found: found[0] if re.fullmatch(r"(\$\{\w+\}:?)+", found[2]) else found[1],
        url,
    )


class Job(_Model):
    """What runs on the hosts."""

    command: tuple[AnyText, ...] | None = Field(default=None, min_length=1)
    """The script and its arguments, as after torchrun, one item each. Default: kit's training module."""
    code: Text = "."
    """The folder that is sent to every host, uncommitted changes too, .gitignore and .kitignore honoured (a ! line in .kitignore sends what .gitignore leaves out). A relative path is relative to where kit is run."""  # noqa: E501
    env: _Env = Field(default_factory=dict, json_schema_extra=_CLOSED)
    """Environment variables for the job on all hosts. Shown in plans and logs: put no secret here."""
    secrets: tuple[SecretName, ...] = ()
    """Names of variables whose values are taken from your environment and never written down."""
    nproc_per_node: PositiveCount | None = None
    """Processes per node. Default: one per GPU, or 1 on a host without GPUs."""
    max_restarts: Count = 3
    """How often in a row a node's processes may crash, or hang before the first step, with no progress in between, before the job has failed. A lost node is not counted."""  # noqa: E501
    on_nan: OnNan = "stop"
    """What is done when a loss is not a number, or infinite: stop ends the job; rollback goes back to the newest snapshot, and kit's training module leaves that batch out. No snapshot holds it."""  # noqa: E501
    start: StartMethod = "forkserver"
    """How processes start: forkserver forks them from one that has torch imported already, which saves seconds at every restart; spawn starts each from nothing."""  # noqa: E501
    on_slow: OnSlow = "tell"
    """What is done about a node that makes the others wait, where its CPU, a GPU or its network is the reason: tell says so; drain takes it out of the job too, if enough nodes are left."""  # noqa: E501


class SnapshotSettings(_Model):
    """What is done about snapshots."""

    shared: SharedFolder | None = None
    """A folder that all hosts share: one copy is kept there. Default: every node keeps its own."""
    copies: PositiveCount = 2
    """On how many nodes a file is kept that your own script writes to $NODEKIT_SNAPSHOT_DIR."""
    every: AutoSeconds = "auto"
    """Seconds from one snapshot of kit's training module to the next. Default: what costs least time, at most 1 % of it."""  # noqa: E501


class LogSettings(_Model):
    """What becomes of the ranks' output."""

    keep: Size = "1GB"
    """What the logs of a node may take, as 500MB: those of earlier attempts go first, then the middle of the present ones."""  # noqa: E501
    fetch: Flag = False
    """Whether they are copied to this machine when the run ends, as `kit logs --fetch` does."""


class Timings(_Model):
    """How long things may take."""

    keep_alive: Seconds = 0.5
    """Seconds from one keepalive of a node to the next."""
    lost_after: PositiveCount = 5
    """How many keepalives may be missed before a node counts as lost."""
    last_call: Seconds = 1.0
    """Seconds that a new rendezvous round waits for one more node."""
    wait: Seconds = 1800.0
    """Seconds the job waits for the fewest nodes it needs."""
    collective: Seconds = 600.0
    """Seconds a rank of kit's training module waits for the slowest one."""
    hang: HangSeconds = "auto"
    """Seconds without progress after which the job hangs and is restarted. Default: learnt from its own steps."""
    environment: Seconds = 1800.0
    """Seconds that making the environment on the nodes may take."""


class Webhook(_Model):
    """An address that is told by HTTP."""

    model_config = _one_of("url", "url_from")

    url: WebhookUrl | None = None
    """Where a JSON object is sent to, by POST."""
    url_from: SecretName | None = None
    """In place of url, where that is a secret: the name of the variable of your environment that holds it."""
    headers_from: dict[HeaderName, SecretName] = Field(default_factory=dict, json_schema_extra=_CLOSED)
    """Headers, each with the name of the variable of your environment that holds its value."""


class Notify(_Model):
    """Who is told how a run goes: a command on this machine, a webhook, or both."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["command"], "properties": {"command": {"type": "array"}}},
                {"required": ["webhook"], "properties": {"webhook": {"type": "object"}}},
            ]
        },
    )

    on: tuple[Occasion, ...] = ("start", "failure", "recovery", "end")
    """When: at the start, when something has failed, when training goes on after that, at the end. Default: each."""
    command: tuple[AnyText, ...] | None = Field(default=None, min_length=1)
    """A program and its arguments, one item each; it gets what happened as JSON on its stdin."""
    webhook: Webhook | None = None
    """An address that gets what happened as JSON."""


class SlurmSettings(_Model):
    """What is asked of Slurm."""

    nodes: Nodes
    """How many nodes, as 4, or the fewest and most, as 2:4."""
    partition: Text | None = None
    """The partition. Default: the cluster's."""
    account: Text | None = None
    """The account to charge. Default: yours."""
    qos: Text | None = None
    """The quality of service. Default: the cluster's."""
    gpus_per_node: Count | None = None
    """GPUs on each node. Default: none asked for."""
    cpus_per_task: PositiveCount | None = None
    """CPU cores on each node. Default: the cluster's."""
    mem_gb: MemoryGb | None = None
    """Memory on each node, in GB. Default: the cluster's."""
    time: RunTime | None = None
    """The time limit: minutes, as 90, or [D-]HH:MM:SS, as 1-12:00:00. Default: the partition's."""
    constraint: Text | None = None
    """Features the nodes must have, as a100&ib."""
    exclude: Hostlist | None = None
    """Nodes not to run on, as node[03,07]."""
    array: ArraySpec | None = None
    """Indexes of a job array, as 0-15%4."""
    setup: tuple[Text, ...] = ()
    """Shell lines of the batch script, as module load cuda/12.4: run on the first node; what they export is for all."""
    srun_args: tuple[Text, ...] = ()
    """Further arguments for srun, one item each, as --container-image=/images/torch.sqsh."""
    max_requeues: Count = 10
    """How often the job may be queued again (time limit, preemption, lost node) before it has failed."""
    extra: dict[Text, Scalar] = Field(default_factory=dict)
    """Any further parameter of sbatch that submitit passes on, as {licenses: matlab}."""
    shared_dir: Text = "~/nodekit"
    """A folder that every node and the login node share: code, logs and snapshots go there."""
    login: Login | None = None
    """The login node to submit from over SSH, as user@login.example.org. Default: this machine."""

    @field_validator("extra")
    @classmethod
    def _as_submitit_writes_them(cls, extra: dict[str, Scalar]) -> dict[str, Scalar]:
        """Replace dashes by underscores: kit looks for ``mail_type``, but sbatch spells it ``mail-type``."""
        return {key.replace("-", "_"): value for key, value in extra.items()}

    @property
    def time_min(self) -> int | None:
        """The time limit in whole minutes, rounded up."""
        return None if self.time is None else run_time_minutes(self.time)


class InventoryFile(HostSettings):
    """A cluster and the job for it. Host settings at the top are for all hosts; each host may set its own."""

    model_config = _one_of("hosts", "slurm", kind="object")

    name: InventoryName | None = None
    """What kit calls the cluster; runs are named after it. Default: the file's name."""
    network: Network | None = None
    """The network to train over, as 10.0.0.0/24: each host's interface is the one with an address in it."""
    nodes: Nodes | None = None
    """How many nodes the job runs on, as 4, or the fewest and most, as 2:4. Default: all hosts."""
    hosts: dict[Hostlist, HostBlock | None] | None = Field(default=None, min_length=1)
    """The machines, reached over SSH: a name or hostlist each, as gpu[01-16,20], with settings or nothing."""
    slurm: SlurmSettings | None = None
    """In place of hosts: what to ask of Slurm."""
    environment: Environment | None = None
    """The interpreter that trains, made on the nodes from a file of yours. Default: python as it is there."""
    job: Job = Job()
    """What runs on the hosts. Default: kit's training module."""
    snapshots: SnapshotSettings = SnapshotSettings()
    """Where snapshots are kept, and how often they are taken."""
    logs: LogSettings = LogSettings()
    """How much of the ranks' output is kept on the nodes, and whether it is fetched."""
    timings: Timings = Timings()
    """When a node counts as lost, and how long is waited for what."""
    notify: Notify | None = None
    """Who is told when a run starts, fails, recovers and ends. Default: nobody."""


class Inventory(_Model):
    """The user's inventory with hostlists expanded and defaults filled in."""

    name: InventoryName
    """The cluster's name, after which runs are named."""
    path: Path
    """The absolute path of the file."""
    network: Network | None = None
    """The network to train over. A host's own `interface` takes precedence."""
    nodes: Nodes
    """The fewest and most nodes the job runs on."""
    hosts: tuple[Host, ...] = ()
    """The hosts in the file's order; none under Slurm."""
    slurm: SlurmSettings | None = None
    """What to ask of Slurm, in place of hosts."""
    defaults: HostSettings
    """The host settings at the top of the file: merged into `hosts` already; Slurm's nodes have only these."""
    environment: Environment | None = None
    """The environment to build on the nodes before the job starts; None: the hosts' `python` is used as it is."""
    job: Job
    """What runs on the nodes."""
    snapshots: SnapshotSettings = SnapshotSettings()
    """Where snapshots are kept, and how often they are taken."""
    logs: LogSettings = LogSettings()
    """How much of the ranks' output is kept on the nodes, and whether it is fetched."""
    timings: Timings = Timings()
    """When a node counts as lost, and how long is waited for what."""
    notify: Notify | None = None
    """Who is told when a run starts, fails, recovers and ends."""


class _Generator(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        """Return False: pydantic's title would only repeat the key."""
        return False


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the file as users write it, for editors."""
    schema = InventoryFile.model_json_schema(schema_generator=_Generator)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "nodekit inventory", **schema}
