"""Scripts that only have --out_dir and --resume: docs/out-dir-and-resume.md as it stands there, each with a crash."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm_agents
from agents import no_process_left, until
from kit_runs import Kit
from test_docs import command_lines, titled

from nodekit.deploy.records import events, find_runs

pytestmark = pytest.mark.slow

PAGE = "docs/out-dir-and-resume.md"
STEPS = 40
EVERY = 10

# What they have in common: where they begin and end, and that all wait after the first checkpoint, for the crash.
COMMON = f"""
import os, sys, time
import torch
STEPS, EVERY, RANK = {STEPS}, {EVERY}, int(os.environ["RANK"])
def begins(step):
    print(f"rank {{RANK}} begins at step {{step}} as {{os.getpid()}}", flush=True)
def does(step):
    while step == EVERY + 1 and os.path.exists(os.environ["HOLD"]):
        time.sleep(0.05)
    if step == STEPS:
        print(f"rank {{RANK}} has done step {{step}}", flush=True)
"""

# As nanoGPT: plain DDP, an option is a global variable, one file that is overwritten, resuming fails without it.
NANOGPT = """
import torch.distributed as dist
out_dir, init_from = "out", "scratch"
for option in sys.argv[1:]:
    key, value = option.removeprefix("--").split("=")
    globals()[key] = value
dist.init_process_group("gloo")
net = torch.nn.Linear(4, 1)
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters())
iter_num = 0
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"))
    net.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
begins(iter_num)
while iter_num < STEPS:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    iter_num += 1
    if iter_num % EVERY == 0 and RANK == 0:
        os.makedirs(out_dir, exist_ok=True)
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        torch.save(state, os.path.join(out_dir, "ckpt.pt"))
    does(iter_num)
dist.destroy_process_group()
"""

TRAINER = """
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, Trainer, TrainerCallback
from transformers import TrainingArguments
class Steps(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        begins(state.global_step)
    def on_step_end(self, args, state, control, **_):
        does(state.global_step)
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
args.disable_tqdm = True
config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
rows = [{"input_ids": [1 + n % 9, 2, 3], "labels": n % 2} for n in range(160)]
trainer = Trainer(BertForSequenceClassification(config), args, train_dataset=rows, callbacks=[Steps()])
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
"""

ACCELERATE = """
import argparse
from accelerate import Accelerator
parser = argparse.ArgumentParser()
parser.add_argument("--checkpointing_steps", type=int)
parser.add_argument("--output_dir")
parser.add_argument("--resume_from_checkpoint")
args = parser.parse_args()
accelerator = Accelerator(cpu=True)
net = torch.nn.Linear(4, 1)
data = torch.utils.data.DataLoader(torch.randn(16 * STEPS, 4), batch_size=8, shuffle=True)
model, optimizer, data = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), data)
step = 0
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
    step = int(os.path.basename(args.resume_from_checkpoint).removeprefix("step_"))
    data = accelerator.skip_first_batches(data, step)
begins(step)
for batch in data:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % args.checkpointing_steps == 0:
        accelerator.save_state(os.path.join(args.output_dir, f"step_{step}"))
    does(step)
accelerator.end_training()
"""

LIGHTNING = """
import argparse
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
parser = argparse.ArgumentParser()
parser.add_argument("--out_dir")
args = parser.parse_args()
class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, _):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
class Steps(Callback):
    def on_train_start(self, trainer, model):
        begins(trainer.global_step)
    def on_train_batch_end(self, trainer, *_):
        does(trainer.global_step)
model, data = Net(), torch.utils.data.DataLoader(torch.randn(16 * STEPS, 4), batch_size=8)
HERE
"""

SCRIPTS = {
    "train.py": NANOGPT,
    "run_glue.py": TRAINER,
    "complete_nlp_example.py": ACCELERATE,
    "main.py": LIGHTNING,
}
# What the tests' machine needs, and a user's does not.
MORE = {"run_glue.py": ["--use_cpu", "True", "--per_device_train_batch_size", "2", "--report_to", "none"]}


def command_of(script: str) -> list[str]:
    """The one command on the page that runs this script, behind its `--`."""
    (words,) = [words for words in command_lines(PAGE) if script in words]
    assert words[:4] == ["kit", "up", "lab.yaml", "--"], words
    return words[4:]


def lightnings_lines() -> str:
    """Those of the page that make and start a Trainer, with what keeps it quiet and short here."""
    (block,) = re.findall(r"^```python\n(.*?)^```", Path(PAGE).read_text(), re.MULTILINE | re.DOTALL)
    return "import torch.distributed\n" + block.replace(
        "callbacks=[checkpoints],",
        "callbacks=[checkpoints, Steps()], max_steps=STEPS, accelerator='cpu', logger=False, "
        "enable_progress_bar=False, enable_model_summary=False,",
    )


@pytest.fixture
def kit(tmp_path: Path, own_home: Path) -> Iterator[Kit]:
    found = Kit(tmp_path / "project", None)
    (tmp_path / "hold").touch()
    (found.folder / "lab.yaml").write_text(
        f"name: lab\nconnection: local\npython: {warm_agents.program()}\n"
        f"workdir: {str(tmp_path / 'work dir')!r}\nhosts: {{a: , b: }}\n"
        f"job: {{env: {{HOLD: {str(tmp_path / 'hold')!r}}}}}\n"
    )
    (found.folder / "resume.py").write_text(titled(PAGE, "resume.py"))
    for name, text in SCRIPTS.items():
        (found.folder / name).write_text(COMMON + text.replace("HERE", lightnings_lines()))
    yield found
    found.close()
    found.run("down", "--force")
    no_process_left(f"HOME={own_home}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_as_it_is_goes_on_from_its_checkpoint_after_a_crash(kit: Kit, script: str) -> None:
    pytest.importorskip({"run_glue.py": "transformers", "main.py": "pytorch_lightning"}.get(script, "torch"))
    up = kit.start("up", "lab.yaml", "--", *command_of(script), *MORE.get(script, []))

    def copied() -> bool:  # of what rank 0 alone writes
        found = (kit.folder.parent / "work dir").glob("runs/*/b/kept/listings/a.json")
        return any(re.search(r"ckpt|trainer_state|random_states_0", path.read_text()) for path in found)

    until(lambda: copied() or up.poll() is not None, timeout_s=120, what="a checkpoint that b keeps for a")
    assert up.poll() is None, kit.log()
    kit.wait_for("b:1 | rank 1 begins at step 0 as")
    (process,) = re.findall(r"^b:1 \| rank 1 begins at step 0 as (\d+)$", kit.log(), re.MULTILINE)
    os.kill(int(process), signal.SIGKILL)
    (kit.folder.parent / "hold").unlink()
    assert up.wait(180) == 0, kit.log()

    log = kit.log()
    begun = re.findall(r"^[ab]:(\d) +\| rank \1 begins at step (\d+) ", log, re.MULTILINE)
    assert sorted(begun) == [("0", "0"), ("0", "10"), ("1", "0"), ("1", "10")], log
    assert all(f"| rank {rank} has done step {STEPS}" in log for rank in (0, 1)), log
    (started,) = [event for event in events.read(find_runs.find(None).folder) if event.kind == "run-started"]
    assert "{snapshot_dir}" in shlex.join(started.get("command")), "as it was written"
    assert "{snapshot_dir}" in shlex.join(find_runs.find(None).argv), "for a node that comes later"
