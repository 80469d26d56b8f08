"""What `kit COMMAND --help` teaches, before and after the options."""

EXIT_CODES = """\
exit codes:
  0    trained to the end (up), or done (the other commands)
  1    bad input, or a host that cannot be reached or used
  2    wrong usage of the command line
  3    the job was started and failed
  4    the job was restarted again and again, and made no progress
  130  stopped by Ctrl-C, or (up) by kit down from elsewhere
"""

UP = """\
Bring up the job of an inventory and watch it: check the hosts, sync the code, start an agent on each
node, stream every rank's output, and tell how it ended.

Safe to run again: on a running job it attaches, after `kit down` or a failure it goes on from the
newest snapshot. Ctrl-C stops the job on every node; a second Ctrl-C kills it at once.

In a terminal it shows a live view, that of `kit watch`: ? lists its keys, q leaves the job running. --plain
and -q print lines there too.

Where the inventory has `slurm:` in place of `hosts:`, it submits the job and follows it through the queue
to its end; Ctrl-C cancels it.
"""

UP_EXAMPLES = """\
examples:
  kit up                                 two nodes on this machine train the shared module
  kit up inventory/lab.yaml              the job the inventory names
  kit up lab.yaml -- train.py --lr 0.1   this script, as torchrun would run it
  kit up lab.yaml --dry-run              print what each node would run, and run nothing
  kit up slurm.yaml --sweep lr=1e-3,3e-4 --sweep seed=0,1     four runs, as a Slurm array

"""

EXPORT = """\
Write the job of an inventory for another tool: what `kit up` would run, as that
tool wants it. No secret is in it: its first lines say how to set them, and how
all of it is used.

  hostfile    a file    the hosts and their slots, for mpirun and deepspeed
  ansible     a file    the hosts as an Ansible inventory
  accelerate  a folder  for each host a configuration of accelerate launch
  deepspeed   a folder  hostfile, .deepspeed_env and the command
  shell       a folder  for each host a bash script, by plain torchrun
  compose     a file    the job on one machine, each host a container
  sbatch      a file    what kit up would submit to Slurm

accelerate, deepspeed and shell need what only the hosts know, as interfaces: they
are asked and checked as by kit up --dry-run, and nothing runs there. hostfile asks
them where the inventory does not say how many GPUs they have. For sbatch all is
checked as by kit up, and the run's folder with the code is put in its place in
slurm.shared_dir now; nothing is queued. What was started from an export, kit
status does not know.
"""

EXPORT_EPILOG = """\
examples:
  kit export lab.yaml --to shell -o scripts -- train.py --lr 0.1
  kit export lab.yaml --to ansible > hosts.yaml
  kit export slurm.yaml --to sbatch -o job.sh
"""

SHELL = """\
Run a command on the hosts of an inventory, all at once. Each line of its output
stands behind its host's name, as it comes and never torn; how it ended on each
host is told at the end. A host that cannot be reached does not keep the others
from their work.

The command is given to each host's kernel as it stands after the `--`: no shell
reads it, so use `sh -c '…'` for pipes and variables. It runs in the home folder,
with nothing on its stdin; `python` is the interpreter that the inventory names.
Ctrl-C ends it on every host, with all that it started.

Without a command it opens a shell on the one host that is named.
"""

SHELL_EPILOG = """\
examples:
  kit shell lab.yaml -- nvidia-smi -L
  kit shell lab.yaml 'gpu[1-3]' -- sh -c 'df -h ~ | tail -1'
  kit shell lab.yaml -- python -c 'import torch; print(torch.__version__)'
  kit shell lab.yaml --timeout 10 -- sudo -n true
  kit shell lab.yaml gpu2                  a shell on gpu2

exit codes:
  0    exit status 0 on all hosts
  1    not so on some, or one could not be reached
  2    wrong usage of the command line
  130  stopped by Ctrl-C
"""

TEST = """\
Print precision, recall and F1 of each class, and which were taken for which, of
a run's weights on its task's test data. Computed by the run's own code on the
first of its nodes that has the newest weights; nothing is written there.
"""

PREDICT = """\
Print the label that a run's weights give to each text, and its probability.
Computed by the run's own code on a node that has the weights.
"""

DRILL = """\
Run the job once as it is, and then once per fault, with that fault in the
middle. For each: when it was detected, when training went on, how many steps
had to be done again, and whether the loss curve is still the unbroken run's:
bit for bit, or to rounding where the world size changed meanwhile.

Without a command the job is half a minute of kit's own training module. A job
of your own (the inventory's, or after --) should be short, too. Nothing is left
running or broken, and the inventory's own runs are left alone.
"""

DRILL_EPILOG = """\
examples:
  kit drill lab.yaml                      all that lab.yaml's hosts allow
  kit drill lab.yaml worker node          these two
  kit drill lab.yaml -- train.py --small  your own job

exit codes:
  0    every fault was survived
  1    one was not, or could not be tried though asked for, or the job fails as it is
  2    wrong usage, or a fault that is not possible there
  130  stopped by Ctrl-C
"""

INIT = """\
Write an inventory by looking. The hosts are those named, or those of a file; kit
logs in to each, as ssh would, and notes its GPUs, cores, interfaces and the
interpreters that have torch. What has one answer becomes a key; what has several
becomes a comment that begins with CHOOSE. A host that cannot be reached stays in
the file, with the reason.

Nothing is changed on any host. The file is checked before it is written, and an
existing one is not written over.
"""

INIT_EXAMPLES = """\
examples:
  kit init gpu1 gpu2 user@10.0.0.13          these; any name that ssh knows
  kit init gpu[01-16] -o lab.yaml            a hostlist, into lab.yaml
  kit init --ssh-config 'gpu*'               the hosts of ~/.ssh/config, or some of them
  kit init --hostfile hosts                  of MPI, DeepSpeed or Horovod: gpu1 slots=8, gpu1:8
  kit init --ansible hosts.ini --group gpu   an Ansible inventory: INI, YAML, or ansible-inventory --list
  kit init --slurm -o slurm.yaml             the cluster whose login node this is

exit codes:
  0    written
  1    not written, or written with no host that could be reached
  2    wrong usage
"""

CHECK = """\
Look at all hosts of an inventory at once, in ten seconds at most (more where this machine is busy): can they
be logged in to, is there room to write, do Python, torch, CUDA, NCCL and what the script imports agree, are
the GPUs well and free, do the clocks agree, does the network carry the job, and has an earlier run left
anything behind. A table of hosts and checks, and for each cell that is not well: what was found, what was
wanted, and what mends it.

Nothing is changed on the hosts. kit up runs the same checks, but for the network, before it starts anything.
"""

CHECK_EXAMPLES = """\
examples:
  kit check lab.yaml                     the hosts, and the job that the inventory names
  kit check lab.yaml -- train.py         would this script start there?
  kit check lab.yaml --deep              and then a real rendezvous and an all-reduce over all of them
  kit check lab.yaml --json | jq '.findings[] | select(.level != "ok")'

exit codes:
  0    a job could start; warnings are told apart
  1    something would keep it from that, or bad input
  2    wrong usage of the command line
"""

CLEAN = """\
End what earlier runs have left on the hosts: processes whose agent is gone, their shared memory, and agents
of runs that are over. Each is known by what the run has recorded of it (pid, start time and boot), and by
nothing else: what only looks like it is left alone, and so is a run that is running.

What has said something in the last two minutes may still train: that is ended only if you say so.
"""

COMPARE = """\
Train the same task with the same data, seed and batch by every engine on this
machine, one after the other, and measure: how long the whole run took, samples
per second in training, the greatest memory of any rank, the accuracy, and how
many times the throughput of one process it was (single).

A table, the same as CSV, a bar chart, and each run's log, result and metrics.
An engine that cannot run here is a row with the reason. single and dp are one
process, and run once. A batch is shared by all ranks, whatever their number.
"""

COMPARE_EXAMPLES = """\
examples:
  kit compare                                     the digits by all engines
  kit compare --task text -- --epochs 2           the sentences; after the --, options of the shared module
  kit compare --engines single,ddp,deepspeed:3 --nproc 1,2,4
  kit compare --engines single,ddp,ddp:bf16,ddp:spawn:bf16

after an engine, if wanted: :0 to :3 (deepspeed's stage), :bf16, :fp16, :spawn (its ranks without torchrun)

"""

BENCH = """\
Measure the network between the hosts, over the interfaces that a job would take:
bandwidth and round trip of every pair, each way, and the all-reduce over all
nodes by the hosts' own torch. Names the link or the node that is slow.

With --plan: what that network leaves of a model's speed on 1 to N nodes, and
what to do about it, before the money is spent.

Nothing is left running on the hosts, and nothing written; but --plan job leaves
kit's package and its copy of the code on the first one, as `kit up` would.
"""

BENCH_EPILOG = """\
MODEL is a number of parameters (110e6, 7B), a transformers config.json or its folder, or `job`: the model of
the inventory's own job, whose step is then measured, too, on the first node.

examples:
  kit bench lab.yaml                                  pairs and all-reduce
  kit bench lab.yaml --png network.png                likewise, and a picture
  kit bench lab.yaml --plan 7B --step-time 2.1        what 7 G parameters would cost
  kit bench lab.yaml --plan job                       what this very job would
  kit bench --plan 110e6 --step-time 0.4 --link 1Gb   without hosts

exit codes:
  0    measured, slow links or not
  1    bad input, a host that cannot be used, or a pair or all-reduce that could not be measured
  2    wrong usage of the command line
  130  stopped by Ctrl-C
"""

WATCH = """\
A live view of a run: a row for each node with what it does and uses, the loss, what is left to do, what has
happened. Keys: arrows or a number mark a node, l follows its output, d drains it, s stops the job (after a
question), q leaves, ? lists them all. Looking changes nothing: the run goes on when the view is closed, by q,
Ctrl-C or a lost connection. Where the output is no terminal, lines are printed in its place.
Of a run that is over the last state and the verdict are shown."""

DRAIN = """\
Take a node out of a job that goes on, to mend or reboot it: its ranks save a snapshot with the others, it leaves,
and the others train on without it, or with a spare in its place. It is not taken back before --undo. A node that
the job cannot do without (nodes.min) stays. Of a run that is stopped and started again no node is drained."""

REPORT = """\
Write what a run was and what became of it as one HTML page: summary, who was in
when, curves with restarts marked, what the time went into, snapshots, use of
network, GPUs and CPUs, versions, failures with their tracebacks, the inventory
and all events. It needs no network to be read, and no host to be written:
those that can be reached within seconds give a finer loss curve. Secrets and
values of variables are left out. Only you can read the file.
"""

LOGS = """\
Print what the ranks of a run have written: all nodes' and all ranks' lines in the
order of time, the nodes' clocks put right by what they were off. A line is dated to
within half a second. Earlier attempts are there too; what was left out
because the logs had grown too large (logs.keep in the inventory) is told in its place.

In a terminal each line has its time (yours) and its node a colour; in a pipe it is
`NODE:RANK | LINE`. What is filtered is filtered on the nodes, and does not travel.

--fetch copies the logs to this machine, each time what is new; so do kit down --fetch
and, at the end of a run, `logs: {fetch: true}` in the inventory. Where a node cannot
be reached any more, its copy is shown.
"""

LOGS_EXAMPLES = """\
examples:
  kit logs                               all of the latest run
  kit logs -f --rank 0                   what rank 0 says, until the run ends
  kit logs --attempt 0.0 --grep Error    what went wrong in the first attempt
  kit logs --node 'gpu[3-4]' --since 10m
  kit logs --since 12:00 --until 12:05 --time > noon.txt
  kit logs lab-1122 --fetch              copies, for when the hosts are off

exit codes:
  0    shown, or fetched
  1    a node's logs could not be read, or bad input
  2    wrong usage of the command line
  130  stopped by Ctrl-C
"""

WHY = """\
Why a run failed, told again from its events: which rank on which node failed
first, by the clocks' corrected time, with its own words; what that did to the
others; the known cause and its cure; what the kernel of that node said; where
the full log is, and the command that goes on.

Of a run that goes on: what it last recovered from.
"""

NOTIFY = """\
Who is told when a run starts, when something has failed, when training goes on after that, and at the end:
`notify:` of an inventory. With --test, a message is sent now.

  notify:
    on: [failure, end]                     # of start, failure, recovery, end (all)
    command: [./tell.sh, me]               # gets JSON on its stdin; in the folder of the inventory
    webhook: {url: https://example.org/x}  # gets the same JSON by POST
    # webhook:                             # where the address, or a header, is a secret: the names of variables
    #   url_from: SLACK_WEBHOOK
    #   headers_from: {Authorization: MY_TOKEN}

A run never waits for it, and does not fail of it: that something was not delivered is told once, among the run's
events. It is done where the run is supervised from: on this machine, under Slurm on the job's first node.
"""

NOTIFY_EPILOG = """\
the JSON: kind, run, time, text, node, step, total_steps, state, goodput; what is not known is null. A command finds
NODEKIT_NOTIFY (the kind), NODEKIT_RUN_ID, NODEKIT_TEXT, NODEKIT_NODE and NODEKIT_STEP in its environment, too.

examples:
  kit notify lab.yaml                    who is told, and when
  kit notify --test lab.yaml             does it get there?

exit codes:
  0    all were told
  1    one was not, or bad input
  2    wrong usage of the command line
"""

RUNS = """\
The runs on record on this machine, oldest first: when each was started and how long it was up, how far it came, the
best value of its metric, its goodput (share of its time that trained steps which count), its state and how it ended.
A step with ~ is guessed, from a tqdm bar or a line as `iter 100: loss 3.1` among the last that rank 0 printed; a script
that writes STEP/TOTAL to the file $NODEKIT_PROGRESS_FILE tells it itself.

Nothing but this machine is asked. `left` is a run that is on record as running while nobody looks after it: it may
still train. In Slurm's queue, a run is on record as running until `kit status` or `kit up` looks.
"""

RUNS_EPILOG = """\
examples:
  kit runs                               all
  kit runs lab.yaml --last 5             the last five of an inventory
  kit runs --json | jq '.[] | select(.state == "failed") | .run_id'
  kit runs --compare lab-1122-06 lab-1122-07            curves over each other, and what differs
  kit runs --compare lab-1122-06 lab-1122-07 --html compared.html
"""

RM = """\
Remove runs that are over: first their folders on the nodes (code, logs, output, snapshots), then the record here.
What goes, and how large it is, is said first, and asked for.

Only `<workdir>/runs/<id>` is removed, where the run's own files say that it is that run's, and its snapshots in a
folder that hosts share. A run that runs is refused; so is one that a host has which cannot be reached. What could not
be removed keeps its record, and the same command goes on with it.
"""

RM_EPILOG = """\
examples:
  kit rm lab-1122-0601                   asks
  kit rm --older-than 30d --dry-run      what would go
  kit rm --older-than 30d --keep-snapshots --yes
  kit rm --lost lab-1122-0601            without the hosts that are off for good

exit codes:
  0    removed, or not there
  1    something was refused, or could not be removed
  2    wrong usage of the command line
"""

COMPLETION = """\
Print what your shell needs to complete kit's commands, options, runs, inventory files, nodes and engines. Put it into
the shell's own file, once:

  bash   kit completion bash >> ~/.bashrc
  zsh    kit completion zsh >> ~/.zshrc
  fish   kit completion fish > ~/.config/fish/completions/kit.fish

A new shell has it. It runs kit itself to ask, wherever that is on the PATH: another version of it need not print anew.
"""

BOARD = """\
Show the curves of runs in TensorBoard, at one address of this machine.

The event files of rank 0 are copied here, again every few seconds while the run
goes on, and kept: they can be looked at when the hosts are off. Where
tensorboard is not installed here, it is started on a node, by the interpreter
of the run, and reached through the SSH connection; nothing is copied then.

Ctrl-C ends all of it, here and there.
"""

BOARD_EXAMPLES = """\
examples:
  kit board                        the latest run
  kit board lab-1122 lab-1121      two runs, side by side
  kit board --on gpu1              with the tensorboard of gpu1

It shows what rank 0 of the shared training module writes, and of a script of yours what is in
$NODEKIT_OUTPUT_DIR, in any folder: SummaryWriter(os.environ["NODEKIT_OUTPUT_DIR"]).
"""
