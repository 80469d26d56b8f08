"""Known causes of failures that are recognised in a rank's error, the most specific first. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from nodekit.deploy.story.cause import IN_ENV, SHM_CURE, SOCKET_CURE, WORKER_CURE, known


def _cuda_memory(groups: Mapping[str, str]) -> str:
    number, total, free, used = (groups[key] for key in ("gpu", "total", "free", "used"))
    if not total:
        return f"the GPU's memory is full: {groups['want'] or 'more'} was wanted"
    used_text = f", this process has {used}" if used else ""
    return f"the memory of GPU {number} is full: of {total}, {free} was free{used_text}; {groups['want']} more wanted"


# The order is that of precedence.
BY_WORDS = (
    known(
        "nccl-infiniband",
        r"NET/IB ?:?[^\n]*Got completion[^\n]*|ibv_\w+ failed[^\n]*|Call to ibv_\w+ failed[^\n]*|NCCL WARN NET/IB[^\n]*"
        r"(?:error|failed)",
        "InfiniBand or RoCE failed under NCCL",
        "ibstat and ibv_devinfo on both nodes: a port that is down, another fabric, or RoCE's GID "
        "(NCCL_IB_GID_INDEX: 3). ulimit -l must be unlimited. "
        f"NCCL_IB_DISABLE: 1 {IN_ENV} goes over TCP and shows whether it is that",
    ),
    # --- memory ---
    known(
        "cuda-out-of-memory",
        r"CUDA out of memory\.|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation"
        r"|OutOfMemoryError: (?:CUDA|HIP)|NCCL WARN Cuda failure(?: \d+)? 'out of memory'",
        _cuda_memory,
        "Compute fewer samples at once: with kit's training module --micro-batch N or --accumulate N keep the batch as "
        "it is, with your own script lower its batch. PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True under job.env "
        "helps where much is reserved but unallocated; nvidia-smi shows who else is on that GPU",
    ),
    known(
        "shm-full",
        r"out of shared memory|insufficient shared memory|unable to (?:open|write to|allocate) shared memory|/dev/shm/"
        r"[^\n]*(?:No space left|size \d)|creating shared memory segment|posix_fallocate failed : No space"
        r"|Unable to allocate shared memory",
        "the node's shared memory, /dev/shm, is full or too small",
        SHM_CURE,
    ),
    known(
        "dataloader-worker-killed",
        r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]+)\) (?:is killed by signal: (?P<signal>[\w ]+)"
        r"|exited unexpectedly)",
        "a DataLoader worker (pid {pid}) was lost: {signal}",
        WORKER_CURE,
    ),
    known(
        "host-out-of-memory",
        r"\bMemoryError\b|Cannot allocate memory|std::bad_alloc|DefaultCPUAllocator: (?:can't|not enough)"
        r"|\[Errno 12\]|Detected \d+ oom[-_]kill event|Out Of Memory",
        "the node's memory is full, or the most that it allows a process is reached",
        "Use less on each node: fewer ranks or DataLoader workers, data read in parts; or give more: slurm.mem_gb, the "
        "container's limit, ulimit -v. free -g on the node shows what is there",
    ),
    # --- disks ---
    known(
        "quota-exceeded",
        r"Disk quota exceeded|\[Errno 122\]|EDQUOT",
        "your quota on the disk is used up{path}",
        "Remove old runs and snapshots (kit rm --older-than 30d removes kit's), ask for more, or point workdir or "
        "snapshots.shared at a folder with room; quota -s shows how much is used",
    ),
    known(
        "disk-full",
        r"No space left on device|\[Errno 28\]|ENOSPC|PytorchStreamWriter failed writing file"
        r"|unexpected pos \d+ vs \d+",
        "the disk is full{path}",
        "Make room (kit rm --older-than 30d removes old runs; df -h, and df -i for files), or point workdir, TMPDIR or "
        "snapshots.shared at a larger disk",
    ),
    known(
        "file-too-large",
        r"File too large|\[Errno 27\]",
        "it wrote a larger file than the node allows",
        "Raise ulimit -f there, or write smaller files",
    ),
    known(
        "read-only-disk",
        r"Read-only file system",
        "a disk there can only be read",
        "A disk with errors is made read-only by the kernel: dmesg on the node tells. Else mount it writable, or "
        "write somewhere else",
    ),
    known(
        "stale-nfs",
        r"Stale (?:NFS )?file handle|\[Errno 116\]|Remote I/O error|\[Errno 5\] Input/output error",
        "a file was lost under the job: its file server or disk has a fault",
        "See to the mount (mount, dmesg on the node); kit up goes on when it is back. Do not replace files of a "
        "running job",
    ),
    # --- the code and its surroundings ---
    known(
        "missing-module",
        r"(?:ModuleNotFoundError|ImportError): No module named '?(?P<module>[\w.]+)'?",
        "the node's python has no module {module}",
        "Add it to environment.requirements in the inventory, and kit installs it on every node; or install it there "
        "with the python that the inventory names. A module of your own must lie under job.code",
    ),
    known(
        "broken-library",
        r"ImportError: (?P<library>[^:\n]*?): (?:cannot open shared object file|undefined symbol|version `[^`']*' not"
        r" found)|OSError: (?P<library2>[\w.+-]+\.so[\w.]*): cannot open shared object file",
        "a library does not load: {library}{library2}",
        "Packages were built for different versions of each other or of the system: install them anew together "
        "(environment.requirements or lock does so on all nodes), or load the missing module (slurm.setup)",
    ),
    known(
        "wrong-import",
        r"ImportError: cannot import name '(?P<what>[^']+)' from '(?P<where>[^']+)'",
        "{where} has no {what}: another version is installed than the code wants, or two modules import each other",
        "Pin the version in environment.requirements; kit check compares the versions of all nodes",
    ),
    known(
        "syntax",
        r"(?:SyntaxError|IndentationError|TabError): (?P<what>[^\n]+)",
        "the script is not valid for the node's python: {what}",
        "Mend it; where it runs on your machine, the nodes have an older python (kit check shows which)",
    ),
    known(
        "shape-mismatch-on-load",
        r"size mismatch for (?P<name>[\w.]+): copying a param with shape (?P<found>torch\.Size\(\[[^]]*\]\)) from "
        r"checkpoint, the shape in current model is (?P<wanted>torch\.Size\(\[[^]]*\]\))",
        "the snapshot is of another model: {name} is {found} there and {wanted} in the model",
        "Give the options that the snapshot was made with, load only the parts that fit, or start a new run: "
        "kit up --new",
    ),
    known(
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
    known(
        "broken-snapshot",
        r"PytorchStreamReader failed (?:reading zip archive|finding central directory|reading file)|invalid magic "
        r"number; corrupt file|EOFError: Ran out of input|SafetensorError: Error while deserializing header",
        "a snapshot or data file is not whole: whoever wrote it was stopped, or it was fetched in part",
        "Remove that file; kit's own snapshots are checked and an older one is taken. Write to another name and rename "
        "it when it is whole",
    ),
    known(
        "weights-only",
        r"Weights only load failed|WeightsUnpickler error",
        "the file holds more than tensors, and torch.load refuses that by default since 2.6",
        "Where you trust the file: torch.load(..., weights_only=False), or torch.serialization.add_safe_globals",
    ),
    known(
        "hub-offline",
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|couldn't connect to 'https://huggingface\.co'"
        r"|Can't load tokenizer for|(?:huggingface\.co|download\.pytorch\.org)[^\n]*(?:Max retries|Name or service|"
        r"unreachable)|host='huggingface\.co'",
        "a model or data set was to be downloaded, and the node cannot",
        "Fetch it once where there is a network (hf download NAME), lay it where every node finds it, and set HF_HOME "
        f"and HF_HUB_OFFLINE: 1 {IN_ENV}; behind a proxy set HTTPS_PROXY there. A gated one wants HF_TOKEN in "
        "job.secrets",
    ),
    known(
        "hub-refused",
        r"GatedRepoError|RepositoryNotFoundError|401 Client Error[^\n]*huggingface|You are trying to access a gated"
        r" repo",
        "the hub refuses a model or data set: it is gated, private, or not there",
        "Accept its terms on the hub, and name HF_TOKEN in job.secrets, so that the ranks have it",
    ),
    known(
        "no-such-script",
        r"python[\d.]*: can't (?:open file|find '__main__' module in) '(?P<path>[^']+)'(?!: \[Errno 13\])"
        r"|\b(?:ba|da|k|z)?sh: (?:\d+: cannot open )?(?P<path2>[^\n:]+): No such file"
        r"|kit: cannot run '(?P<path3>[^\n]*/[^\n]*)' in [^\n]*: No such file",
        "there is no {path}{path2}{path3} on that node, which the command runs",
        "Only job.code is sent to the nodes: name the script by its path from there, or by an absolute one that every "
        "node has; kit shell INVENTORY -- ls PATH shows who has it. Of a script that is there, its first line names a "
        "program that is not",
    ),
    known(
        "not-executable",
        r"kit: cannot run '(?P<program>[^\n]*)' in [^\n]*: (?:Permission denied|Exec format error)",
        "{program} cannot be executed there",
        "See its mode (chmod +x) and its first line, which names its program (#!/bin/bash)",
    ),
    known(
        "notebook-command",
        r"name 'get_ipython' is not defined",
        "the script was exported from a notebook, and has a line with ! or % of it, which only IPython runs",
        "Take the lines with get_ipython() out of the script; packages are installed on the nodes before",
    ),
    known(
        "no-local-rank-option",
        r"error: the following arguments are required: [^\n]*--local[-_]rank",
        "the script wants the option --local_rank, which torch.distributed.launch gives, and torchrun and kit do not",
        "Have the script read the variable: "
        'parser.add_argument("--local_rank", type=int, default=int(os.environ["LOCAL_RANK"]))',
    ),
    known(
        "lightning-num-nodes",
        r"You set `devices=\d+` and `num_nodes=(?P<wanted>\d+)` in Lightning[^\n]*world size \((?P<found>\d+)\)",
        "Lightning is told num_nodes={wanted} by the script, and this attempt has a world size of {found}",
        'Have it read them at each start: num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), '
        'devices=int(os.environ["LOCAL_WORLD_SIZE"]); the nodes are fewer once one is lost',
    ),
    known(
        "no-such-snapshot-file",
        r"FileNotFoundError: \[Errno 2\] [^:\n]*: '(?P<path>[^'\n]*/runs/[^/'\n]+/[^/'\n]+/snapshots/[^'\n]+)'",
        "there is no {path} on that node, though kit brings the ranks what the nodes have of that folder",
        "Of a snapshot in several files: a node that was lost may have the rest; start its host, then kit up. Else "
        "remove that snapshot from this folder on every node, and the script takes the one before. Before the script "
        "writes a file there, it has to create the folder (os.makedirs)",
    ),
    known(
        "no-such-file",
        r"FileNotFoundError: \[Errno 2\] [^:\n]*: '(?P<path>[^']+)'",
        "there is no {path} on that node",
        "Only job.code is sent to the nodes: lay data at the same place on each, or on a disk that all share; "
        "kit shell INVENTORY -- ls PATH shows who has it",
    ),
    known(
        "permission-denied",
        r"PermissionError: \[Errno (?:13|1)\]|(?::|\[Errno 13\]) Permission denied\b",
        "the job lacks the permission on that node{path}",
        "See whose it is on that node (ls -ld), and as whom kit logs in (user in the inventory)",
    ),
    known(
        "too-many-open-files",
        r"Too many open files|\[Errno 24\]|received 0 items of ancdata",
        "the process has as many files open as the node allows",
        "Raise it: ulimit -n 65536 (nofile in /etc/security/limits.conf, or slurm.setup); or "
        "torch.multiprocessing.set_sharing_strategy('file_system') where DataLoader workers hold them; or close files",
    ),
    known(
        "too-many-processes",
        r"can't start new thread|BlockingIOError: \[Errno 11\]|pthread_create failed|OpenBLAS blas_thread_init",
        "the node allows no more processes or threads",
        "Set OMP_NUM_THREADS and use fewer DataLoader workers; or raise ulimit -u, the container's pids limit",
    ),
    known(
        "port-in-use",
        r"EADDRINUSE|Address already in use|address already in use",
        "a port that the job wants is in use{port}",
        "Have your code take MASTER_ADDR and MASTER_PORT as kit sets them, or port 0 for one that is free; ss -ltnp on "
        "the node shows who has it, kit clean ends what an old run left",
    ),
    # --- GPUs ---
    known(
        "no-kernel-image",
        r"no kernel image is available for execution|is not compatible with the current PyTorch installation",
        "this torch has no code for that GPU: it is too new for it, or too old",
        "Install a torch built for its CUDA and architecture on that node (environment.requirements with index_url "
        "https://download.pytorch.org/whl/cuNNN); torch.cuda.get_arch_list() tells what it has",
    ),
    known(
        "driver-too-old",
        r"NVIDIA driver on your system is too old \(found version (?P<version>\d+)\)|driver version is insufficient for"
        r" CUDA runtime|forward compatibility was attempted on non supported HW",
        "the node's NVIDIA driver is too old for this torch's CUDA",
        "Update the driver there, or install a torch built for an older CUDA on all nodes; kit check shows both",
    ),
    known(
        "driver-mismatch",
        r"Driver/library version mismatch|CUDA unknown error|Found no NVIDIA driver on your system"
        r"|No CUDA GPUs are available|invalid device ordinal|system not yet initialized",
        "CUDA finds no such GPU, or no driver, on that node",
        "nvidia-smi there tells: after a driver's update the node wants a reboot; in a container it wants --gpus all; "
        "with NVSwitch the fabric manager must run. gpus in the inventory says which ones kit uses",
    ),
    known(
        "gpu-memory-error",
        r"uncorrectable ECC error|an uncorrectable NVLink error|ECC error encountered",
        "a GPU's memory or link has a fault",
        "Take the node out (drain it, or leave it out of hosts), reset the GPU or reboot, and have it replaced if it "
        "comes again; nvidia-smi -q -d ECC and dmesg (Xid) tell",
    ),
    known(
        "device-assert",
        r"device-side assert triggered",
        "a kernel on the GPU found a wrong index: most often a label or token outside of its range",
        f"Set CUDA_LAUNCH_BLOCKING: 1 {IN_ENV} to see the line, or run a batch on the CPU; compare the classes and "
        "the vocabulary with what the data holds",
    ),
    known(
        "cuda-error",
        r"CUDA error: (?P<what>an illegal memory access was encountered|unspecified launch failure|misaligned address"
        r"|unknown error|an illegal instruction was encountered)|CUDNN_STATUS_EXECUTION_FAILED",
        "a kernel on the GPU failed: {what}",
        f"Set CUDA_LAUNCH_BLOCKING: 1 {IN_ENV} to see which; if it comes on one node only, suspect that GPU: dmesg "
        "(Xid), nvidia-smi -q",
    ),
    # --- NCCL ---
    known(
        "nccl-duplicate-gpu",
        r"Duplicate GPU detected : rank (?P<a>\d+) and rank (?P<b>\d+)",
        "ranks {a} and {b} use the same GPU",
        "Have each rank use its own: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything else; and no "
        "more ranks than GPUs: job.nproc_per_node",
    ),
    known(
        "nccl-no-interface",
        r"no socket interface found|[Nn]o NCCL_SOCKET_IFNAME interface|with family \d+ is neither AF_INET",
        "NCCL finds no network interface of the name that it was given",
        "Remove NCCL_SOCKET_IFNAME from your environment and scripts, and say interface or network in the inventory: "
        "kit sets it on each node by its own name",
    ),
    known(
        "nccl-version-mismatch",
        r"[Mm]ismatched? NCCL versions?|NCCL version mismatch|Bootstrap : version mismatch|wrong (?:magic|type) .* "
        r"(?:version|peer)|Message truncated : received \d+ bytes instead of \d+|receiving \d+ bytes instead of",
        "the nodes' NCCL differ, or they call collectives of different sizes",
        "Install the same torch on all nodes (environment.requirements does; kit check compares), and see that no "
        "LD_LIBRARY_PATH brings another libnccl",
    ),
    known(
        "nccl-timeout",
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<op>\w+).*?"
        r"Timeout\(ms\)=(?P<ms>\d+)\)",
        lambda groups: (
            f"{groups['op']} number {groups['number']} was not joined by all ranks within "
            f"{int(groups['ms']) / 1000:g} s"
        ),
        "One rank was slow or on another way: look at where each one was (kit logs); rank 0 alone saving, loading or "
        "evaluating for long is the usual one. timings.collective is how long kit's training module waits; "
        f"TORCH_NCCL_TRACE_BUFFER_SIZE: 2000 {IN_ENV} records what each called",
    ),
    known(
        "nccl-connect",
        r"(?:socketStartConnect|socketPollConnect)[^\n]*Connect to (?P<peer>[^\s<]+)<\d+>[^\n]*(?:failed|returned)[ :]*"
        r"(?P<why>[^\n]*)|NCCL WARN Connect to (?P<peer2>[^\s<]+)<\d+> failed",
        "NCCL could not connect to {peer}{peer2}: {why}",
        SOCKET_CURE,
    ),
    known(
        "nccl-remote",
        r"ncclRemoteError|remote process exited or there was a network error",
        "another rank, or the network to it, was lost under NCCL",
        "If no other rank failed first, it is the network: dmesg and ip -s link on both nodes; "
        f"NCCL_DEBUG: INFO {IN_ENV} names the peer",
    ),
    known(
        "nccl-invalid-usage",
        r"ncclInvalidUsage|ncclInvalidArgument|invalid usage \(run with NCCL_DEBUG",
        "NCCL was called in a way that it refuses",
        f"NCCL_DEBUG: WARN {IN_ENV} says why: most often two ranks on one GPU, or a tensor on another GPU than the "
        "group's",
    ),
    known(
        "nccl-system-error",
        r"ncclSystemError|unhandled system error",
        "a system call failed under NCCL",
        f"NCCL_DEBUG: INFO {IN_ENV} says which; most often the network interface, /dev/shm (df -h /dev/shm) or "
        "ulimit -l. kit check INVENTORY tries the network",
    ),
    known(
        "nccl-cuda-error",
        r"ncclUnhandledCudaError|unhandled cuda error",
        "CUDA failed under NCCL",
        f"NCCL_DEBUG: INFO {IN_ENV} says how; most often a GPU's memory is full, a peer-to-peer path is broken "
        "(NCCL_P2P_DISABLE: 1 to try), or the driver is too old",
    ),
    # --- torch.distributed and gloo ---
    known(
        "collective-mismatch",
        r"Detected mismatch between collectives on ranks|Mismatched collective detected"
        r"|op\.preamble\.length <= op\.nbytes|Rank \d+ is running (?:inconsistent )?collective",
        "the ranks called different collectives, or the same one with tensors of different sizes",
        "See that every rank takes the same branches and has the same number of batches (drop_last, Join), and pads "
        f"what differs in size; TORCH_DISTRIBUTED_DEBUG: DETAIL {IN_ENV} names the calls",
    ),
    known(
        "ddp-unused-parameters",
        r"Expected to have finished reduction in the prior iteration|did not receive grad for rank",
        "some parameters had no part in the loss, and DistributedDataParallel waits for their gradients",
        "Use them, freeze them (requires_grad_(False)), or DistributedDataParallel(..., find_unused_parameters=True), "
        "as kit's training module does with --find-unused",
    ),
    known(
        "ddp-shapes-differ",
        r"DDP expects same model across all ranks|_verify_param_shape_across_processes|params\[\d+\] in this process"
        r" with sizes",
        "the model is not the same on all ranks",
        "Build it from the same options on every rank: a class count or vocabulary read from each node's own data "
        "differs",
    ),
    known(
        "gloo-interface",
        r"Unable to find (?:address|interface) for|ifa != nullptr|Unable to resolve"
        r" hostname|makeDeviceFor(?:Interface|Hostname)",
        "gloo finds no address of the network interface or name that it was given{interface}",
        "Remove GLOO_SOCKET_IFNAME from your environment and scripts, and say interface or network in the inventory; "
        "the node's own name must be in its /etc/hosts",
    ),
    known(
        "gloo-loopback",
        r"gloo[^\n]*(?:remote=\[(?:127\.|::1)|connect[^\n]*127\.0\.[01]\.1)",
        "gloo gave another node an address of loopback, 127.0.0.1: its own name stands for that there",
        "Say interface or network in the inventory, and leave GLOO_SOCKET_IFNAME to kit; or mend the line of the "
        "node's name in its /etc/hosts",
    ),
    known(
        "gloo-connect",
        r"connectFullMesh failed|gloo[^\n]*(?:timed out connecting|Connection refused|No route to host|unreachable)",
        "gloo could not connect the ranks with each other",
        SOCKET_CURE,
    ),
    known(
        "store-unreachable",
        r"client socket has (?:failed to connect|timed out)|DistNetworkError[^\n]*(?:connect|timed out)"
        r"|Timed out after \d+ seconds waiting for clients|failed to connect to TCPStore",
        "a rank could not reach the store of rank 0 (MASTER_ADDR)",
        "Have your code take MASTER_ADDR and MASTER_PORT as kit sets them. " + SOCKET_CURE,
    ),
    known(
        "collective-timeout",
        r"Timed out waiting (?P<ms>\d+)ms for|wait timeout after (?P<ms2>\d+)ms|Wait timeout|Socket Timeout"
        r"|failed to pass monitoredBarrier",
        "a collective was not joined by all ranks in time",
        "One rank was slow or on another way: look at where each was (kit logs). timings.collective is how long kit's "
        "training module waits; in your script it is init_process_group(timeout=...)",
    ),
    known(
        "peer-lost",
        r"Connection (?:reset|closed) by (?:remote )?peer|Broken pipe|Socket closed|connection was likely closed",
        "a connection to another rank was lost, and no rank failed by itself before that",
        "It is the network, or a node that vanished: dmesg and ip -s link on both nodes; kit check INVENTORY tries it",
    ),
    known(
        "not-initialised",
        r"Default process group has not been initialized|environment variable (?P<name>\w+) expected, but not set",
        "the script calls collectives before init_process_group, or does not use what kit sets",
        "Call torch.distributed.init_process_group() first, with no arguments of its own for rank and address",
    ),
    # --- hangs ---
    known(
        "hangs-without-steps",
        r"\d+ hangs? without progress|it hung, and job\.max_restarts is 0",
        "the job hung, and had told of no step before that",
        "Mend the line where the rank hangs that kit names. If it was only slow: a longer timings.hang, or have the "
        "script write STEP/TOTAL to the file $NODEKIT_PROGRESS_FILE, by which kit tells a hang from a long step",
    ),
    # --- numbers ---
    known(
        "not-a-number",
        r"the (?P<loss>loss) of step (?P<step>\d+) is (?P<value>-?\w+) on (?P<who>rank \d+ \([^)]*\))"
        r"|the weights after step (?P<step2>\d+) are not finite \(-?\w+\) on (?P<who2>rank \d+ \([^)]*\))",
        lambda groups: (
            f"the loss of step {groups['step']} is {groups['value']} on {groups['who']}"
            if groups["loss"]
            else f"the weights after step {groups['step2']} are not finite on {groups['who2']}"
        ),
        "No snapshot holds it. Lower the learning rate or warm it up, clip gradients, use bf16 in place of fp16, or "
        "look at that step's samples; job.on_nan: rollback leaves its batch out. kit up goes on from the last snapshot",
    ),
    known(
        "not-a-number",
        r"returned nan values in its \d+th output|[Ll]oss (?:is|became) (?:nan|NaN|inf)|(?:nan|NaN|inf) (?:loss"
        r"|gradients?) (?:found|detected|encountered)|non-finite",
        "the loss or a gradient is no number any more",
        "Lower the learning rate or warm it up, clip gradients, use bf16 in place of fp16; kit up goes on from the "
        "last snapshot, so change it before",
    ),
    known(
        "tensor-shapes",
        r"mat1 and mat2 shapes cannot be multiplied \((?P<a>\S+) and (?P<b>\S+)\)|The size of tensor a \((?P<c>\d+)\) "
        r"must match the size of tensor b \((?P<d>\d+)\)",
        "two tensors do not fit: {a}{c} and {b}{d}",
        "Look at the lines above: the data or an option is not what the model wants",
    ),
    known(
        "tensor-shape",
        r"shape '(?P<shape>[^']*)' is invalid for input of size (?P<size>\d+)",
        "a tensor of {size} numbers does not fit the shape {shape}",
        "Look at the lines above: the data or an option is not what the model wants",
    ),
)
