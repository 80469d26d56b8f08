"""Known causes of failures, each with a cure, recognised by what a rank or the kernel said. Pure.

A cause is found in the message of an exception (not in the lines of code above it), in the last lines of a log, in
how the process ended, and in the kernel's own lines. Those that say most come first.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nodekit.deploy.agent.ranks.failures import is_wrong_usage, message_of


@dataclass(frozen=True)
class Cause:
    """A known cause."""

    name: str
    """Short, for tables: ``cuda-out-of-memory``."""
    what: str
    """What happened, in a sentence."""
    cure: str
    """What to do, in a sentence or two."""


@dataclass(frozen=True)
class _Known:
    name: str
    pattern: re.Pattern[str]
    what: str | Callable[[Mapping[str, str]], str]
    """May name groups of the pattern."""
    cure: str


def _known(
    name: str, pattern: str, what: str | Callable[[Mapping[str, str]], str], cure: str, *, flags: int = 0
) -> _Known:
    return _Known(name, re.compile(pattern, re.DOTALL | flags), what, cure)


def _cuda_memory(groups: Mapping[str, str]) -> str:
    number, total, free, used = (groups[key] for key in ("gpu", "total", "free", "used"))
    if not total:
        return f"the GPU's memory is full: {groups['want'] or 'more'} was wanted"
    used_text = f", this process has {used}" if used else ""
    return f"the memory of GPU {number} is full: of {total}, {free} was free{used_text}; {groups['want']} more wanted"


def _said_by_slurm(cause: Cause, pattern: str) -> _Known:
    return _known(cause.name, pattern, cause.what, cause.cure, flags=re.IGNORECASE)


_IN_ENV = "under job.env in the inventory"
_FEWER_CURE = (
    "With nodes: FEWEST:MOST in the inventory the job goes on without it, and takes it back when it returns; meanwhile "
    "it has fewer ranks, and the batch of all of them together is smaller unless the script sees to it"
)
_SOCKET_CURE = (
    "Have every node name the interface that reaches the others: interface (or network) in the inventory; "
    "kit check INVENTORY tries each pair of nodes, firewalls included"
)
_FAULT_CURE = (
    f"Suspect C++ extensions, and libraries built for another version (torch, numpy, CUDA). Where no line of yours is "
    f"shown, PYTHONFAULTHANDLER: 1 {_IN_ENV} shows it"
)
_WORKER_CURE = (
    "Most often the node's memory is full: use fewer workers, keep less in each (they copy what a dataset holds), "
    "or ask for more memory. With num_workers=0 the error behind it shows itself"
)
_SHM_CURE = (
    "Give /dev/shm more room (docker run --shm-size=16g or --ipc=host; in Kubernetes an emptyDir of medium Memory), "
    "remove stale files in it, or use fewer DataLoader workers"
)
_TIME_LIMIT = Cause(
    "time-limit",
    "Slurm's time limit was reached",
    "kit up goes on from the newest snapshot; ask for more time with slurm.time",
)
_PREEMPTED = Cause(
    "preempted",
    "Slurm gave the nodes to another job",
    "kit up goes on from the newest snapshot; another slurm.qos or partition is not preempted",
)
_NODE_FAILURE = Cause(
    "slurm-node-fail",
    "Slurm lost a node of the job",
    "kit up goes on from the newest snapshot; slurm.exclude leaves a node out",
)
BY_SLURM_STATE: Mapping[str, Cause] = {
    "TIMEOUT": _TIME_LIMIT,
    "DEADLINE": _TIME_LIMIT,
    "PREEMPTED": _PREEMPTED,
    "NODE_FAIL": _NODE_FAILURE,
    "BOOT_FAIL": _NODE_FAILURE,
    "OUT_OF_MEMORY": Cause(
        "slurm-out-of-memory",
        "the job used more memory than it asked of Slurm",
        "Ask for more with slurm.mem_gb, or use less: fewer DataLoader workers",
    ),
}
"""By the state of a job that Slurm has ended."""

# The order is that of precedence.
_BY_WORDS = (
    _known(
        "nccl-infiniband",
        r"NET/IB ?:?[^\n]*Got completion[^\n]*|ibv_\w+ failed[^\n]*|Call to ibv_\w+ failed[^\n]*|NCCL WARN NET/IB[^\n]*"
        r"(?:error|failed)",
        "InfiniBand or RoCE failed under NCCL",
        "ibstat and ibv_devinfo on both nodes: a port that is down, another fabric, or RoCE's GID "
        "(NCCL_IB_GID_INDEX: 3). ulimit -l must be unlimited. "
        f"NCCL_IB_DISABLE: 1 {_IN_ENV} goes over TCP and shows whether it is that",
    ),
    # --- memory ---
    _known(
        "cuda-out-of-memory",
        r"CUDA out of memory\.|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation"
        r"|OutOfMemoryError: (?:CUDA|HIP)|NCCL WARN Cuda failure(?: \d+)? 'out of memory'",
        _cuda_memory,
        "Compute fewer samples at once: with kit's training module --micro-batch N or --accumulate N keep the batch as "
        "it is, with your own script lower its batch. PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True under job.env "
        "helps where much is reserved but unallocated; nvidia-smi shows who else is on that GPU",
    ),
    _known(
        "shm-full",
        r"out of shared memory|insufficient shared memory|unable to (?:open|write to|allocate) shared memory|/dev/shm/"
        r"[^\n]*(?:No space left|size \d)|creating shared memory segment|posix_fallocate failed : No space"
        r"|Unable to allocate shared memory",
        "the node's shared memory, /dev/shm, is full or too small",
        _SHM_CURE,
    ),
    _known(
        "dataloader-worker-killed",
        r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]+)\) (?:is killed by signal: (?P<signal>[\w ]+)"
        r"|exited unexpectedly)",
        "a DataLoader worker (pid {pid}) was lost: {signal}",
        _WORKER_CURE,
    ),
    _known(
        "host-out-of-memory",
        r"\bMemoryError\b|Cannot allocate memory|std::bad_alloc|DefaultCPUAllocator: (?:can't|not enough)"
        r"|\[Errno 12\]|Detected \d+ oom[-_]kill event|Out Of Memory",
        "the node's memory is full, or the most that it allows a process is reached",
        "Use less on each node: fewer ranks or DataLoader workers, data read in parts; or give more: slurm.mem_gb, the "
        "container's limit, ulimit -v. free -g on the node shows what is there",
    ),
    # --- disks ---
    _known(
        "quota-exceeded",
        r"Disk quota exceeded|\[Errno 122\]|EDQUOT",
        "your quota on the disk is used up{path}",
        "Remove old runs and snapshots there (kit clean finds kit's), ask for more, or point workdir or "
        "snapshots.shared at a folder with room; quota -s shows how much is used",
    ),
    _known(
        "disk-full",
        r"No space left on device|\[Errno 28\]|ENOSPC|PytorchStreamWriter failed writing file"
        r"|unexpected pos \d+ vs \d+",
        "the disk is full{path}",
        "Make room (kit clean finds what old runs left; df -h, and df -i for files), or point workdir, TMPDIR or "
        "snapshots.shared at a larger disk",
    ),
    _known(
        "file-too-large",
        r"File too large|\[Errno 27\]",
        "it wrote a larger file than the node allows",
        "Raise ulimit -f there, or write smaller files",
    ),
    _known(
        "read-only-disk",
        r"Read-only file system",
        "a disk there can only be read",
        "A disk with errors is made read-only by the kernel: dmesg on the node tells. Else mount it writable, or "
        "write somewhere else",
    ),
    _known(
        "stale-nfs",
        r"Stale (?:NFS )?file handle|\[Errno 116\]|Remote I/O error|\[Errno 5\] Input/output error",
        "a file was lost under the job: its file server or disk has a fault",
        "See to the mount (mount, dmesg on the node); kit up goes on when it is back. Do not replace files of a "
        "running job",
    ),
    # --- the code and its surroundings ---
    _known(
        "missing-module",
        r"(?:ModuleNotFoundError|ImportError): No module named '?(?P<module>[\w.]+)'?",
        "the node's python has no module {module}",
        "Add it to environment.requirements in the inventory, and kit installs it on every node; or install it there "
        "with the python that the inventory names. A module of your own must lie under job.code",
    ),
    _known(
        "broken-library",
        r"ImportError: (?P<library>[^:\n]*?): (?:cannot open shared object file|undefined symbol|version `[^`']*' not"
        r" found)|OSError: (?P<library2>[\w.+-]+\.so[\w.]*): cannot open shared object file",
        "a library does not load: {library}{library2}",
        "Packages were built for different versions of each other or of the system: install them anew together "
        "(environment.requirements or lock does so on all nodes), or load the missing module (slurm.setup)",
    ),
    _known(
        "wrong-import",
        r"ImportError: cannot import name '(?P<what>[^']+)' from '(?P<where>[^']+)'",
        "{where} has no {what}: another version is installed than the code wants, or two modules import each other",
        "Pin the version in environment.requirements; kit check compares the versions of all nodes",
    ),
    _known(
        "syntax",
        r"(?:SyntaxError|IndentationError|TabError): (?P<what>[^\n]+)",
        "the script is not valid for the node's python: {what}",
        "Mend it; where it runs on your machine, the nodes have an older python (kit check shows which)",
    ),
    _known(
        "shape-mismatch-on-load",
        r"size mismatch for (?P<name>[\w.]+): copying a param with shape (?P<found>torch\.Size\(\[[^]]*\]\)) from "
        r"checkpoint, the shape in current model is (?P<wanted>torch\.Size\(\[[^]]*\]\))",
        "the snapshot is of another model: {name} is {found} there and {wanted} in the model",
        "Give the options that the snapshot was made with, load only the parts that fit, or start a new run: "
        "kit up --new",
    ),
    _known(
        "keys-mismatch-on-load",
        r"Error\(s\) in loading state_dict for (?P<model>\w+):.*?(?P<which>Missing|Unexpected) key\(s\) in state_dict: "
        r"\"?(?P<key>[\w.]+)",
        lambda groups: (
            f"the snapshot is of another model than {groups['model']}: {groups['key']}, for one, is "
            + ("missing" if groups["which"] == "Missing" else "not in the model")
        ),
        "Keys that begin with module. were saved from inside DistributedDataParallel: save model.module.state_dict(). "
        "Else give the options that the snapshot was made with, or start a new run: kit up --new",
    ),
    _known(
        "broken-snapshot",
        r"PytorchStreamReader failed (?:reading zip archive|finding central directory|reading file)|invalid magic "
        r"number; corrupt file|EOFError: Ran out of input|SafetensorError: Error while deserializing header",
        "a snapshot or data file is not whole: whoever wrote it was stopped, or it was fetched in part",
        "Remove that file; kit's own snapshots are checked and an older one is taken. Write to another name and rename "
        "it when it is whole",
    ),
    _known(
        "weights-only",
        r"Weights only load failed|WeightsUnpickler error",
        "the file holds more than tensors, and torch.load refuses that by default since 2.6",
        "Where you trust the file: torch.load(..., weights_only=False), or torch.serialization.add_safe_globals",
    ),
    _known(
        "hub-offline",
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|couldn't connect to 'https://huggingface\.co'"
        r"|Can't load tokenizer for|(?:huggingface\.co|download\.pytorch\.org)[^\n]*(?:Max retries|Name or service|"
        r"unreachable)|host='huggingface\.co'",
        "a model or data set was to be downloaded, and the node cannot",
        "Fetch it once where there is a network (hf download NAME), lay it where every node finds it, and set HF_HOME "
        f"and HF_HUB_OFFLINE: 1 {_IN_ENV}; behind a proxy set HTTPS_PROXY there. A gated one wants HF_TOKEN in "
        "job.secrets",
    ),
    _known(
        "hub-refused",
        r"GatedRepoError|RepositoryNotFoundError|401 Client Error[^\n]*huggingface|You are trying to access a gated"
        r" repo",
        "the hub refuses a model or data set: it is gated, private, or not there",
        "Accept its terms on the hub, and name HF_TOKEN in job.secrets, so that the ranks have it",
    ),
    _known(
        "no-such-script",
        r"python[\d.]*: can't (?:open file|find '__main__' module in) '(?P<path>[^']+)'(?!: \[Errno 13\])"
        r"|\b(?:ba|da|k|z)?sh: (?:\d+: cannot open )?(?P<path2>[^\n:]+): No such file"
        r"|kit: cannot run '(?P<path3>[^\n]*/[^\n]*)' in [^\n]*: No such file",
        "there is no {path}{path2}{path3} on that node, which the command runs",
        "Only job.code is sent to the nodes: name the script by its path from there, or by an absolute one that every "
        "node has; kit shell INVENTORY -- ls PATH shows who has it. Of a script that is there, its first line names a "
        "program that is not",
    ),
    _known(
        "not-executable",
        r"kit: cannot run '(?P<program>[^\n]*)' in [^\n]*: (?:Permission denied|Exec format error)",
        "{program} cannot be executed there",
        "See its mode (chmod +x) and its first line, which names its program (#!/bin/bash)",
    ),
    _known(
        "no-such-file",
        r"FileNotFoundError: \[Errno 2\] [^:\n]*: '(?P<path>[^']+)'",
        "there is no {path} on that node",
        "Only job.code is sent to the nodes: lay data at the same place on each, or on a disk that all share; "
        "kit shell INVENTORY -- ls PATH shows who has it",
    ),
    _known(
        "permission-denied",
        r"PermissionError: \[Errno (?:13|1)\]|(?::|\[Errno 13\]) Permission denied\b",
        "the job lacks the permission on that node{path}",
        "See whose it is on that node (ls -ld), and as whom kit logs in (user in the inventory)",
    ),
    _known(
        "too-many-open-files",
        r"Too many open files|\[Errno 24\]|received 0 items of ancdata",
        "the process has as many files open as the node allows",
        "Raise it: ulimit -n 65536 (nofile in /etc/security/limits.conf, or slurm.setup); or "
        "torch.multiprocessing.set_sharing_strategy('file_system') where DataLoader workers hold them; or close files",
    ),
    _known(
        "too-many-processes",
        r"can't start new thread|BlockingIOError: \[Errno 11\]|pthread_create failed|OpenBLAS blas_thread_init",
        "the node allows no more processes or threads",
        "Set OMP_NUM_THREADS and use fewer DataLoader workers; or raise ulimit -u, the container's pids limit",
    ),
    _known(
        "port-in-use",
        r"EADDRINUSE|Address already in use|address already in use",
        "a port that the job wants is in use{port}",
        "Have your code take MASTER_ADDR and MASTER_PORT as kit sets them, or port 0 for one that is free; ss -ltnp on "
        "the node shows who has it, kit clean ends what an old run left",
    ),
    # --- GPUs ---
    _known(
        "no-kernel-image",
        r"no kernel image is available for execution|is not compatible with the current PyTorch installation",
        "this torch has no code for that GPU: it is too new for it, or too old",
        "Install a torch built for its CUDA and architecture on that node (environment.requirements with index_url "
        "https://download.pytorch.org/whl/cuNNN); torch.cuda.get_arch_list() tells what it has",
    ),
    _known(
        "driver-too-old",
        r"NVIDIA driver on your system is too old \(found version (?P<version>\d+)\)|driver version is insufficient for"
        r" CUDA runtime|forward compatibility was attempted on non supported HW",
        "the node's NVIDIA driver is too old for this torch's CUDA",
        "Update the driver there, or install a torch built for an older CUDA on all nodes; kit check shows both",
    ),
    _known(
        "driver-mismatch",
        r"Driver/library version mismatch|CUDA unknown error|Found no NVIDIA driver on your system"
        r"|No CUDA GPUs are available|invalid device ordinal|system not yet initialized",
        "CUDA finds no such GPU, or no driver, on that node",
        "nvidia-smi there tells: after a driver's update the node wants a reboot; in a container it wants --gpus all; "
        "with NVSwitch the fabric manager must run. gpus in the inventory says which ones kit uses",
    ),
    _known(
        "gpu-memory-error",
        r"uncorrectable ECC error|an uncorrectable NVLink error|ECC error encountered",
        "a GPU's memory or link has a fault",
        "Take the node out (drain it, or leave it out of hosts), reset the GPU or reboot, and have it replaced if it "
        "comes again; nvidia-smi -q -d ECC and dmesg (Xid) tell",
    ),
    _known(
        "device-assert",
        r"device-side assert triggered",
        "a kernel on the GPU found a wrong index: most often a label or token outside of its range",
        f"Set CUDA_LAUNCH_BLOCKING: 1 {_IN_ENV} to see the line, or run a batch on the CPU; compare the classes and "
        "the vocabulary with what the data holds",
    ),
    _known(
        "cuda-error",
        r"CUDA error: (?P<what>an illegal memory access was encountered|unspecified launch failure|misaligned address"
        r"|unknown error|an illegal instruction was encountered)|CUDNN_STATUS_EXECUTION_FAILED",
        "a kernel on the GPU failed: {what}",
        f"Set CUDA_LAUNCH_BLOCKING: 1 {_IN_ENV} to see which; if it comes on one node only, suspect that GPU: dmesg "
        "(Xid), nvidia-smi -q",
    ),
    # --- NCCL ---
    _known(
        "nccl-duplicate-gpu",
        r"Duplicate GPU detected : rank (?P<a>\d+) and rank (?P<b>\d+)",
        "ranks {a} and {b} use the same GPU",
        "Have each rank use its own: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything else; and no "
        "more ranks than GPUs: job.nproc_per_node",
    ),
    _known(
        "nccl-no-interface",
        r"no socket interface found|[Nn]o NCCL_SOCKET_IFNAME interface|with family \d+ is neither AF_INET",
        "NCCL finds no network interface of the name that it was given",
        "Remove NCCL_SOCKET_IFNAME from your environment and scripts, and say interface or network in the inventory: "
        "kit sets it on each node by its own name",
    ),
    _known(
        "nccl-version-mismatch",
        r"[Mm]ismatched? NCCL versions?|NCCL version mismatch|Bootstrap : version mismatch|wrong (?:magic|type) .* "
        r"(?:version|peer)|Message truncated : received \d+ bytes instead of \d+|receiving \d+ bytes instead of",
        "the nodes' NCCL differ, or they call collectives of different sizes",
        "Install the same torch on all nodes (environment.requirements does; kit check compares), and see that no "
        "LD_LIBRARY_PATH brings another libnccl",
    ),
    _known(
        "nccl-timeout",
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<op>\w+).*?"
        r"Timeout\(ms\)=(?P<ms>\d+)\)",
        lambda groups: (
            f"{groups['op']} number {groups['number']} was not joined by all ranks within "
            f"{int(groups['ms']) / 1000:g} s"
        ),
        "One rank was slow or on another way: look at where each one was (kit logs); rank 0 alone saving, loading or "
        "evaluating for long is the usual one. timings.collective is how long kit's training module waits; "
        f"TORCH_NCCL_TRACE_BUFFER_SIZE: 2000 {_IN_ENV} records what each called",
    ),
    _known(
        "nccl-connect",
        r"(?:socketStartConnect|socketPollConnect)[^\n]*Connect to (?P<peer>[^\s<]+)<\d+>[^\n]*(?:failed|returned)[ :]*"
        r"(?P<why>[^\n]*)|NCCL WARN Connect to (?P<peer2>[^\s<]+)<\d+> failed",
        "NCCL could not connect to {peer}{peer2}: {why}",
        _SOCKET_CURE,
    ),
    _known(
        "nccl-remote",
        r"ncclRemoteError|remote process exited or there was a network error",
        "another rank, or the network to it, was lost under NCCL",
        "If no other rank failed first, it is the network: dmesg and ip -s link on both nodes; "
        f"NCCL_DEBUG: INFO {_IN_ENV} names the peer",
    ),
    _known(
        "nccl-invalid-usage",
        r"ncclInvalidUsage|ncclInvalidArgument|invalid usage \(run with NCCL_DEBUG",
        "NCCL was called in a way that it refuses",
        f"NCCL_DEBUG: WARN {_IN_ENV} says why: most often two ranks on one GPU, or a tensor on another GPU than the "
        "group's",
    ),
    _known(
        "nccl-system-error",
        r"ncclSystemError|unhandled system error",
        "a system call failed under NCCL",
        f"NCCL_DEBUG: INFO {_IN_ENV} says which; most often the network interface, /dev/shm (df -h /dev/shm) or "
        "ulimit -l. kit check INVENTORY tries the network",
    ),
    _known(
        "nccl-cuda-error",
        r"ncclUnhandledCudaError|unhandled cuda error",
        "CUDA failed under NCCL",
        f"NCCL_DEBUG: INFO {_IN_ENV} says how; most often a GPU's memory is full, a peer-to-peer path is broken "
        "(NCCL_P2P_DISABLE: 1 to try), or the driver is too old",
    ),
    # --- torch.distributed and gloo ---
    _known(
        "collective-mismatch",
        r"Detected mismatch between collectives on ranks|Mismatched collective detected"
        r"|op\.preamble\.length <= op\.nbytes|Rank \d+ is running (?:inconsistent )?collective",
        "the ranks called different collectives, or the same one with tensors of different sizes",
        "See that every rank takes the same branches and has the same number of batches (drop_last, Join), and pads "
        f"what differs in size; TORCH_DISTRIBUTED_DEBUG: DETAIL {_IN_ENV} names the calls",
    ),
    _known(
        "ddp-unused-parameters",
        r"Expected to have finished reduction in the prior iteration|did not receive grad for rank",
        "some parameters had no part in the loss, and DistributedDataParallel waits for their gradients",
        "Use them, freeze them (requires_grad_(False)), or DistributedDataParallel(..., find_unused_parameters=True)",
    ),
    _known(
        "ddp-shapes-differ",
        r"DDP expects same model across all ranks|_verify_param_shape_across_processes|params\[\d+\] in this process"
        r" with sizes",
        "the model is not the same on all ranks",
        "Build it from the same options on every rank: a class count or vocabulary read from each node's own data "
        "differs",
    ),
    _known(
        "gloo-interface",
        r"Unable to find (?:address|interface) for|ifa != nullptr|Unable to resolve"
        r" hostname|makeDeviceFor(?:Interface|Hostname)",
        "gloo finds no address of the network interface or name that it was given{interface}",
        "Remove GLOO_SOCKET_IFNAME from your environment and scripts, and say interface or network in the inventory; "
        "the node's own name must be in its /etc/hosts",
    ),
    _known(
        "gloo-loopback",
        r"gloo[^\n]*(?:remote=\[(?:127\.|::1)|connect[^\n]*127\.0\.[01]\.1)",
        "gloo gave another node an address of loopback, 127.0.0.1: its own name stands for that there",
        "Say interface or network in the inventory, and leave GLOO_SOCKET_IFNAME to kit; or mend the line of the "
        "node's name in its /etc/hosts",
    ),
    _known(
        "gloo-connect",
        r"connectFullMesh failed|gloo[^\n]*(?:timed out connecting|Connection refused|No route to host|unreachable)",
        "gloo could not connect the ranks with each other",
        _SOCKET_CURE,
    ),
    _known(
        "store-unreachable",
        r"client socket has (?:failed to connect|timed out)|DistNetworkError[^\n]*(?:connect|timed out)"
        r"|Timed out after \d+ seconds waiting for clients|failed to connect to TCPStore",
        "a rank could not reach the store of rank 0 (MASTER_ADDR)",
        "Have your code take MASTER_ADDR and MASTER_PORT as kit sets them. " + _SOCKET_CURE,
    ),
    _known(
        "collective-timeout",
        r"Timed out waiting (?P<ms>\d+)ms for|wait timeout after (?P<ms2>\d+)ms|Wait timeout|Socket Timeout"
        r"|failed to pass monitoredBarrier",
        "a collective was not joined by all ranks in time",
        "One rank was slow or on another way: look at where each was (kit logs). timings.collective is how long kit's "
        "training module waits; in your script it is init_process_group(timeout=...)",
    ),
    _known(
        "peer-lost",
        r"Connection (?:reset|closed) by (?:remote )?peer|Broken pipe|Socket closed|connection was likely closed",
        "a connection to another rank was lost, and no rank failed by itself before that",
        "It is the network, or a node that vanished: dmesg and ip -s link on both nodes; kit check INVENTORY tries it",
    ),
    _known(
        "not-initialised",
        r"Default process group has not been initialized|environment variable (?P<name>\w+) expected, but not set",
        "the script calls collectives before init_process_group, or does not use what kit sets",
        "Call torch.distributed.init_process_group() first, with no arguments of its own for rank and address",
    ),
    # --- numbers ---
    _known(
        "not-a-number",
        r"returned nan values in its \d+th output|[Ll]oss (?:is|became) (?:nan|NaN|inf)|(?:nan|NaN|inf) (?:loss"
        r"|gradients?) (?:found|detected|encountered)|non-finite",
        "the loss or a gradient is no number any more",
        "Lower the learning rate or warm it up, clip gradients, use bf16 in place of fp16; kit up goes on from the "
        "last snapshot, so change it before",
    ),
    _known(
        "tensor-shapes",
        r"mat1 and mat2 shapes cannot be multiplied \((?P<a>\S+) and (?P<b>\S+)\)|The size of tensor a \((?P<c>\d+)\) "
        r"must match the size of tensor b \((?P<d>\d+)\)|shape '[^']*' is invalid for input of size",
        "two tensors do not fit: {a}{c} and {b}{d}",
        "Look at the lines above: the data or an option is not what the model wants",
    ),
    # --- schedulers ---
    _said_by_slurm(_TIME_LIMIT, r"DUE TO TIME LIMIT"),
    _said_by_slurm(_PREEMPTED, r"DUE TO PREEMPTION|DUE TO JOB REQUEUE"),
    _said_by_slurm(_NODE_FAILURE, r"DUE TO NODE FAILURE"),
    _known(
        "slurm-cancelled",
        r"error: \*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED",
        "somebody or Slurm cancelled the job",
        "sacct -j JOB tells who; kit up goes on",
    ),
)

_BY_KERNEL = (
    _known(
        "cgroup-out-of-memory",
        r"CONSTRAINT_MEMCG|Memory cgroup out of memory|: oom_kill \d+ -> \d+",
        "the kernel killed it: its memory cgroup (a container, a Slurm job, a systemd slice) reached its limit",
        "Give it more: docker run --memory, the pod's limits.memory, slurm.mem_gb, MemoryMax=; or use less: fewer "
        "DataLoader workers, less kept in memory by each rank",
    ),
    _known(
        "host-out-of-memory",
        r"Out of memory: Kill(?:ed)? process|oom-kill:|oom_reaper: reaped|Killed process \d+",
        "the kernel killed it: the node's memory was full",
        "Use less on that node: fewer ranks or DataLoader workers, data read in parts; or take what else runs there "
        "away. free -g shows what is left",
    ),
    _known(
        "gpu-fault",
        r"NVRM: Xid \((?P<gpu>[^)]+)\): (?P<number>\d+)(?P<what>[^\n]*)",
        "the NVIDIA driver reports a fault of GPU {gpu}: Xid {number}",
        "13, 31, 43 and 45 are mostly the program's own; 48, 63, 64, 79, 94 and 95 are the GPU's: take the node out, "
        "reset the GPU or reboot it, and have it replaced if it comes again",
    ),
    _known(
        "disk-fault",
        r"I/O error|EXT4-fs error|XFS .*orruption",
        "the node's disk has a fault",
        "See dmesg there; take the node out and replace the disk",
    ),
    _known(
        "illegal-instruction",
        r"trap invalid opcode",
        "the node's CPU lacks an instruction that the program was built with",
        "Install a build for older CPUs, or take nodes of one kind: lscpu shows what each has",
    ),
    _known(
        "segfault",
        r"segfault at \w+ ip \S+ sp \S+ error \d+(?: in (?P<library>[^\[\s]+))?|general protection",
        "it read or wrote memory that is not its own, in {library}",
        _FAULT_CURE,
    ),
)

_BY_SIGNAL = {
    signal.SIGKILL: Cause(
        "killed",
        "somebody killed it: most often the kernel, for want of memory",
        "kit could not read why: dmesg on that node (as root) tells, as do Slurm and the container's runtime. If it "
        "was memory, use less there, or ask for more",
    ),
    signal.SIGSEGV: Cause(
        "segfault",
        "it read or wrote memory that is not its own",
        _FAULT_CURE,
    ),
    signal.SIGBUS: Cause(
        "bus-error",
        "a file that it had mapped into memory was not there any more: /dev/shm is full, or a file was made shorter",
        _SHM_CURE,
    ),
    signal.SIGILL: Cause(
        "illegal-instruction",
        "the node's CPU lacks an instruction that the program was built with",
        "Install a build for older CPUs, or take nodes of one kind: lscpu shows what each has",
    ),
    signal.SIGXFSZ: Cause(
        "file-too-large",
        "it wrote a larger file than the node allows",
        "Raise ulimit -f there, or write smaller files",
    ),
    signal.SIGXCPU: Cause(
        "time-limit",
        "it used more processor time than the node allows",
        "Raise ulimit -t there",
    ),
    signal.SIGTERM: Cause(
        "terminated",
        "it was asked to end, and not by kit: a scheduler, a shutdown, or a person",
        "kit up goes on from the newest snapshot",
    ),
    signal.SIGINT: Cause(
        "terminated",
        "it was interrupted, and not by kit",
        "kit up goes on from the newest snapshot",
    ),
}
# What a rank says whose DataLoader worker was killed, when it was just reading from it; "" where even its own
# traceback was broken off, by the handler that tells of the worker's end.
_LOST_PIPE = re.compile(r"ConnectionResetError|ConnectionRefusedError|EOFError|BrokenPipeError|$")
_LOST_WORKER = Cause(
    "dataloader-worker-killed",
    "the process of a DataLoader worker is gone: something killed it",
    _WORKER_CURE,
)
NODE_LOST = Cause(
    "node-lost",
    "the node, its network, or kit's agent there went away: power, a cable, a reboot, or somebody ended it",
    "See to it (its console, ping, last -x reboot, agent.log in the run's folder there); kit up goes on when it is "
    f"back. {_FEWER_CURE}",
)
TOO_FEW_NODES = Cause(
    "too-few-nodes",
    "fewer nodes are left than the job needs (nodes: in the inventory; all, where it does not say)",
    f"See to the node that is missing; kit up goes on when it is back. {_FEWER_CURE}",
)
_BY_STATUS = {
    126: Cause(
        "not-executable", "the command cannot be executed there", "See its mode (chmod +x) and its first line"
    ),
    127: Cause(
        "no-such-command",
        "the command was not found on that node",
        "Install it there, or give its whole path in job.command",
    ),
}
_WRONG_USAGE = Cause(
    "wrong-usage",
    "the command does not take these arguments",
    "See what it says above, and mend job.command",
)


def recognise(error: str, exitcode: int = 1, kernel: Sequence[str] = ()) -> Cause | None:
    """The known cause of a failure; None: it is the user's own, or new.

    Args:
        error: the last words of a rank, or any other text that tells of a failure.
        exitcode: how it ended, negative for a signal.
        kernel: the kernel's lines about it.
    """
    number = signal_of(exitcode)
    said = "\n".join(kernel)
    by_kernel = _first(_BY_KERNEL, said)
    if number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL):
        # Nothing that it said before can be of this: it was not asked.
        last = _first(_BY_WORDS, error) if number == signal.SIGBUS else None
        return by_kernel or last or _BY_SIGNAL[signal.Signals(number)]
    message = message_of(error)
    found = _first(_BY_WORDS, message)
    if "/torch/utils/data/" in error and _LOST_PIPE.match(message):
        found = _LOST_WORKER
    if by_kernel and by_kernel.name.endswith("out-of-memory") and (found is None or "worker" in found.name):
        return by_kernel
    if (
        by_kernel
        and by_kernel.name == "gpu-fault"
        and found
        and found.name.startswith(("cuda", "nccl", "gpu"))
    ):
        return by_kernel
    if found is not None:
        return found
    if number in _BY_SIGNAL:
        return _BY_SIGNAL[signal.Signals(number)]
    if is_wrong_usage(error, exitcode):
        return _WRONG_USAGE
    return by_kernel or _BY_STATUS.get(exitcode)


def signal_of(exitcode: int) -> int:
    """The signal that ended a process, or what it had started for it (a shell's 128 + N); 0: none."""
    if exitcode < 0:
        return -exitcode
    return exitcode - 128 if exitcode - 128 in (s.value for s in _BY_SIGNAL) else 0


def _first(table: Sequence[_Known], text: str) -> Cause | None:
    for known in table:
        if text and (match := known.pattern.search(text)):
            groups = {**_details(text), **{key: value or "" for key, value in match.groupdict().items()}}
            what = known.what(groups) if callable(known.what) else known.what.format_map(groups)
            return Cause(known.name, re.sub(r"[:,]?\s*$", "", what), known.cure)
    return None


_DETAILS = {
    "interface": r"Unable to find (?:address|interface) for: *(?P<value>\S+)",
    "want": r"Tried to allocate (?P<value>[\d.]+ [KMGT]i?B)",
    "gpu": r"GPU (?P<value>\d+)(?: has a total|;)",
    "total": r"total capaci?ty of (?P<value>[\d.]+ [KMGT]i?B)|GPU \d+; (?P<value2>[\d.]+ [KMGT]i?B) total",
    "free": r"of which (?P<value>[\d.]+ (?:[KMGT]i?B|bytes)) is free|; (?P<value2>[\d.]+ (?:[KMGT]i?B|bytes)) free",
    "used": r"this process has (?P<value>[\d.]+ [KMGT]i?B) memory",
    "path": r"(?:No space left on device|Disk quota exceeded|denied):? '(?P<value>[^']+)'",
    "port": r"(?:port: |:)(?P<value>\d{2,5})\b[^\n]*(?:in use|EADDRINUSE)",
}


def _details(text: str) -> dict[str, str]:
    """Numbers and names that make a sentence more telling."""
    found = {}
    for key, pattern in _DETAILS.items():
        match = re.search(pattern, text)
        found[key] = next((value for value in match.groups() if value), "") if match else ""
    for key in ("path", "port", "interface"):
        found[key] = f": {found[key]}" if found[key] else ""
    return found
