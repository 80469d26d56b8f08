"""Every engine trains what ddp trains, step for step, and goes on from what any other has saved."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest
import torch
import warm_python
from agents import until
from engine_runs import SAME, killed_once, losses, task, train
from kit_runs import Kit, run_id

from nodekit.deploy.lab.lab_cluster import Lab
from nodekit.deploy.records import events, find_runs
from nodekit.training import ElasticSampler, Snapshots, World, lay_out_buckets
from nodekit.training.engine_info import ALONE, ENGINES, EngineError
from nodekit.training.engines.load import check_engine
from nodekit.training.options.arguments import parse
from nodekit.training.tasks.text import Text
from nodekit.training.weights.export import read_facts, read_weights

pytestmark = pytest.mark.slow

WAYS = [
    *(["--engine", name] for name in ENGINES if name not in ("ddp", "deepspeed")),
    *(["--engine", "deepspeed", "--zero", str(stage)] for stage in range(4)),
]
WHOLE_ON_EACH_RANK = ("accelerate", "fabric", "trainer", "horovod", "deepspeed--zero0")
CLOSE = 2e-6


def ranks_of(way: Sequence[str]) -> int:
    return 1 if way[1] in ALONE else 2


@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of as many epochs as there are engines."""
    folder = tmp_path_factory.mktemp("ddp")
    train(folder, "--epochs", str(len(WAYS)))
    return losses(folder)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "".join(way[1:]))
def test_every_engine_has_the_losses_of_ddp_though_a_rank_is_killed(
    way: list[str], by_ddp: dict[int, float], tmp_path: Path
) -> None:
    num_ranks = ranks_of(way)
    own = [*killed_once(tmp_path, step=34, num_ranks=num_ranks), "--epochs", "2", "--snapshot-every", "8"]
    said = train(tmp_path, *own, *way, num_ranks=num_ranks, launcher=["--max-restarts", "1"])
    last = 33 if "".join(way[1:]) in WHOLE_ON_EACH_RANK else 32
    assert f"resumed at step {last} " in said, "where the other rank has all of the state, it has saved it"
    assert "is deprecated" not in said, "a library's own calls, at each step"
    found = losses(tmp_path)
    assert len(found) == 46
    assert found == pytest.approx({step: by_ddp[step] for step in found}, abs=CLOSE)
    assert json.loads((tmp_path / "result.json").read_text())["accuracy"] > 0.5


# The other tests' ranks are forks that have the libraries already; to the Trainer, accelerate's comes along.
@pytest.mark.parametrize("engine", ["fabric", "trainer", "accelerate", "deepspeed", "deepspeed --zero 3"])
def test_an_engine_brings_its_library_itself_and_needs_no_launcher(engine: str, tmp_path: Path) -> None:
    argv = ["--engine", *engine.split(), "--epochs", "1", "--batch-size", "512", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "nodekit.training", *argv], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert "epoch 1 done" in done.stdout


# The engines take turns in one process group: to start ranks for each would cost five times as much.
IN_TURNS = """
import json, sys
from pathlib import Path
from nodekit.training import World, rank
from nodekit.training.options.arguments import parse
from nodekit.training.process.stop import Stop
if __name__ == "__main__":
    with World.from_env() as world, Stop(20) as stop:
        for folder, way in json.loads(sys.argv[1]):
            rank._run_loops([], parse(way), world, Task(), Path(folder), stop)
"""


SMALL = ["--epochs", "1", "--batch-size", "16", "--keep", "9"]


def in_turns(
    folder: Path,
    text: str,
    turns: Sequence[tuple[Path, list[str]]],
    *,
    num_ranks: int = 2,
    same: Sequence[str] = SMALL,
) -> str:
    """Train the class Task of a text in each folder, with its arguments, and return what was said."""
    (folder / "own.py").write_text(text + IN_TURNS)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    argv = [
        str(folder / "own.py"),
        json.dumps([(str(output), [*SAME, *same, *way]) for output, way in turns]),
    ]
    done = subprocess.run(
        [warm_python.program(), *torchrun, *argv],
        env={**os.environ, **warm_python.environment()},
        capture_output=True,
        text=True,
        timeout=290,  # eleven engines, one after the other
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


# Without dropout, which draws other numbers with another number of ranks.
SENTENCES = """
from torch.utils.data import Subset
from nodekit.training.tasks.text import Text
class Task(Text):
    def __init__(self):
        super().__init__(max_length=24)
    def train_data(self):
        return Subset(super().train_data(), range(512))
    def test_data(self):
        return Subset(super().test_data(), range(120))
    def model(self):
        model = super().model()
        for module in model.modules():
            for name in {"p", "dropout_prob"} & vars(module).keys():
                setattr(module, name, 0.0)
        return model
    def measure(self, model, batch):
        right = self.predict(model, batch).argmax(1) == self.targets(batch)
        return {"accuracy": right.sum(), "same": float(len(right))}
"""


@pytest.mark.timeout(900)  # on a machine with a load of nine it took half of the usual 300 s
def test_every_engine_trains_on_sentences_as_ddp_does_until_it_is_no_better(tmp_path: Path) -> None:
    """Of nine epochs, of 16 steps each, all make two."""
    how = ["--epochs", "9", "--batch-size", "32", "--lr", "0.002", "--best", "same", "--early-stop", "1"]
    why = "same was no better than 1.0000 in 1 evaluation (--early-stop 1)"
    ways = {"".join(way[1:]): way for way in [["--engine", "ddp"], *WAYS]}
    for num_ranks in (2, 1):
        turns = [(tmp_path / name, way) for name, way in ways.items() if ranks_of(way) == num_ranks]
        same = [*how, "--save-every-epoch"]
        said = in_turns(tmp_path, SENTENCES, turns, num_ranks=num_ranks, same=same)
        assert said.count(f"ended early at step 32/144: {why}") == len(turns), said
    by_ddp = losses(tmp_path / "ddp")
    assert by_ddp[32] < by_ddp[1] - 0.2
    names = set(Text().model().state_dict())
    accuracy = json.loads((tmp_path / "ddp/result.json").read_text())["accuracy"]
    for folder in map(tmp_path.joinpath, ways):
        assert losses(folder) == pytest.approx(by_ddp, abs=5e-4), folder
        result = json.loads((folder / "result.json").read_text())
        assert (result["stopped_early"], result["steps"], result["epochs"]) == (why, 32, 2), folder
        assert result["accuracy"] == pytest.approx(accuracy, abs=0.02), folder
        assert any((folder / "snapshots").glob("*32*")), folder
        first, second = (torch.load(folder / f"model_{epoch}.pth", weights_only=True) for epoch in (1, 2))
        last = read_weights(folder / "last")
        assert all(torch.equal(second[name], value) for name, value in last.items()), folder
        assert any(not torch.equal(first[name], value) for name, value in last.items()), folder
        assert set(first) == names, folder
        assert sorted(path.name for path in folder.glob("*model_*")) == ["model_1.pth", "model_2.pth"]


DIGITS = "from nodekit.training.tasks.digits import Digits as Task\n"


def test_each_engine_goes_on_from_the_snapshot_of_another(by_ddp: dict[int, float], tmp_path: Path) -> None:
    """An epoch each: one of a single rank, those of two, and the other ones of one."""
    first, *alone = (way for way in WAYS if ranks_of(way) == 1)
    epoch, said = itertools.count(1), ""
    for ways in ([first], [way for way in WAYS if ranks_of(way) == 2], alone):
        turns = [(tmp_path / "all", ["--epochs", str(next(epoch)), *way]) for way in ways]
        said += in_turns(tmp_path, DIGITS, turns, num_ranks=ranks_of(ways[0]), same=[])
    assert said.count("resumed at step") == len(WAYS) - 1
    found = losses(tmp_path / "all")
    assert sorted(found) == sorted(by_ddp)
    assert found == pytest.approx(by_ddp, abs=5e-4)  # a lost moment of AdamW would be far more


def test_engines_with_ddp_resume_to_the_identical_curve_and_weights(tmp_path: Path) -> None:
    """On three ranks: with two, the order of a sum could not show."""
    names, same = ("accelerate", "fabric", "trainer"), ["--epochs", "1", "--batch-size", "96", "--keep", "9"]

    def turns(kind: str) -> list[tuple[Path, list[str]]]:
        return [(tmp_path / name / kind, ["--engine", name, "--snapshot-every", "4"]) for name in names]

    in_turns(tmp_path, DIGITS, turns("whole"), num_ranks=3, same=same)
    for name in names:
        for file in (tmp_path / name / "whole" / "snapshots").glob("g*-s000000004*"):
            (tmp_path / name / "resumed" / "snapshots").mkdir(parents=True, exist_ok=True)
            shutil.copy(file, tmp_path / name / "resumed" / "snapshots")
    assert (
        in_turns(tmp_path, DIGITS, turns("resumed"), num_ranks=3, same=same).count("resumed at step 4") == 3
    )
    for name in names:
        whole, resumed = tmp_path / name / "whole", tmp_path / name / "resumed"
        assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step > 4}, name
        found = [
            json.loads((each / "result.json").read_text())["weights_sha256"] for each in (whole, resumed)
        ]
        assert found[0] == found[1], name


# How far a step's loss may be from the plain one.
SWITCHES = [
    (["--find-unused"], CLOSE),
    (["--compress", "fp16"], 8e-3),
    (["--compress", "bf16"], 8e-3),
    (["--compress", "powersgd"], 0.1),
    *((["--compress", "bf16", "--engine", name], 8e-3) for name in ("accelerate", "fabric", "trainer")),
    (["--amp", "bf16"], 8e-3),
    (["--amp", "fp16"], 8e-3),
    *((["--amp", "bf16", "--engine", name], 8e-3) for name in ("fsdp", "trainer", "deepspeed")),
]


def test_switches_stay_close_to_the_plain_losses(by_ddp: dict[int, float], tmp_path: Path) -> None:
    turns = [(tmp_path / "".join(arguments), arguments) for arguments, _ in SWITCHES]
    in_turns(tmp_path, DIGITS, turns, same=["--epochs", "1"])
    for arguments, apart in SWITCHES:
        found = losses(tmp_path / "".join(arguments))
        assert sorted(found) == list(range(1, 24)), arguments
        assert found == pytest.approx({step: by_ddp[step] for step in found}, abs=apart), arguments
        # By rounding alone, one step may differ by twenty times as much as most do.
        differences = [abs(loss - by_ddp[step]) for step, loss in found.items()]
        assert median(differences) < apart / 10, arguments
        assert (max(differences) > CLOSE) == (apart != CLOSE), arguments


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        (["--engine", "ddpp"], {}, "invalid choice: 'ddpp'"),
        (
            ["--engine", "single"],
            {"WORLD_SIZE": "2"},
            "--engine single is one process, and there are 2 ranks",
        ),
        (["--engine", "dp"], {"WORLD_SIZE": "4"}, "or take --engine ddp"),
        (["--zero", "2"], {}, "--zero: the engine ddp has no stages of ZeRO; it is for --engine deepspeed"),
        (
            ["--engine", "fsdp", "--compress", "bf16"],
            {},
            "--compress bf16: the engine fsdp sends gradients as they are; it is for --engine ddp, accelerate",
        ),
        (["--accumulate", "2", "--micro-batch", "8"], {}, "not allowed with"),
        (["--engine", "horovod", "--compress", "powersgd"], {}, "the engine horovod has fp16 alone"),
        (["--engine", "fsdp", "--local-sgd", "4"], {}, "has no whole model on each rank"),
        (["--diloco", "4", "--local-sgd", "4"], {}, "not allowed with"),
        (["--diloco", "4", "--compress", "bf16"], {}, "no gradients are sent; leave one of them out"),
        (
            ["--engine", "single", "--sync-bn"],
            {},
            "with nobody to exchange anything with; it is for --engine ddp",
        ),
        (["--engine", "dp", "--compile"], {}, "copies the model in each step"),
        (["--outer-lr", "1"], {}, "--outer-lr is for --diloco, and that is not given"),
        (["--local-sgd", "4", "--outer-momentum", "0.9"], {}, "--outer-momentum is for --diloco, and"),
        (["--outer-momentum", "1"], {}, "'1' is not a number from 0 and below 1"),
        (["--ignore-mismatched-sizes"], {}, "is for --init-from, --resume-from or --model, and none"),
        (["--init-from", "a", "--resume-from", "b"], {}, "not allowed with"),
        (["--snapshot-format", "sharded"], {}, "it is for --engine fsdp"),
        (["--early-stop", "2", "--best", "off"], {}, "goes by the measure of --best, and that is off"),
        (["--save-every-epoch", "0"], {}, "'0' is not a whole number from 1"),
    ],
)
def test_what_excludes_each_other_is_refused(
    arguments: list[str], environ: dict[str, str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments, environ)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("engine", [name for name, info in ENGINES.items() if info.fp16_on_cpu])
def test_fp16_on_a_cpu_is_refused_where_a_library_would_do_something_else(
    engine: str, tmp_path: Path
) -> None:
    said = train(tmp_path, "--engine", engine, "--amp", "fp16", num_ranks=1, code=1)
    assert f"--amp fp16 without a GPU: {engine} " in said
    assert "take bf16, or --engine ddp" in said


SLOW = """
import time
from nodekit.training.tasks.digits import Digits
class Task(Digits):
    def loss(self, model, batch):
        time.sleep(0.2)
        return super().loss(model, batch)
"""


@pytest.mark.lab
@pytest.mark.parametrize(
    "way", [["fsdp"], ["deepspeed", "--zero", "3"], ["accelerate"]], ids=lambda way: "".join(way)
)
def test_hosts_share_the_work_and_one_is_lost(
    way: list[str], kit: Kit, lab: Lab, by_ddp: dict[int, float]
) -> None:
    (kit.folder / "slow.py").write_text(SLOW)
    kit.inventory(nodes="2:3")
    module = ["-m", "nodekit.training", "--task", "slow.py:Task", "--epochs", "2", "--snapshot-every", "5"]
    kit.start("up", "lab.yaml", "--", *module, *SAME, "--engine", *way)
    kit.wait_for("first step ", timeout_s=120)  # a whole start: at a load of 9, the agents alone took 41 s
    found = run_id(kit.log())
    (up,) = kit.started
    until(lambda: up.poll() is not None or len(kit.metrics("node1", found)) >= 7)
    assert up.poll() is None, kit.log()
    lab.crash("node3")
    # Another start, which takes 40 s on a busy machine, and most of the steps.
    assert up.wait(150) == 0, kit.log()
    assert "resumed at step" in kit.log()
    trained = {line["step"]: line["loss"] for line in kit.metrics("node1", found) if "loss" in line}
    assert trained == pytest.approx({step: by_ddp[step] for step in range(1, 47)}, abs=5e-4)


@pytest.mark.lab
def test_hosts_train_on_the_sentences_that_come_with_kit_until_it_is_no_better(kit: Kit) -> None:
    kit.inventory()
    how = ["--task", "text", "--max-length", "16", "--epochs", "9", "--lr", "1e-12", "--early-stop", "1"]
    done = kit.run("up", "lab.yaml", "--", "-m", "nodekit.training", *how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"trained to the end in \d+ s, accuracy \d+\.\d+%; it ended early: accuracy was", done.stdout
    )
    told = events.read(find_runs.find(run_id(done.stdout)).folder)
    results = [event.fields["result"] for event in told if event.kind == "agent-ended"]
    assert results
    for result in results:
        assert result["stopped_early"].endswith("in 1 evaluation (--early-stop 1)")
        assert "train texts" in result["notes"]


def test_fp16_by_deepspeed_is_refused_on_a_gpu_too() -> None:
    with pytest.raises(EngineError, match="with --engine deepspeed there is bf16 alone"):
        check_engine(parse(["--engine", "deepspeed", "--amp", "fp16"], {}), "cuda")


def test_buckets_are_laid_out_on_a_gpu_too() -> None:
    with World.from_env({}):
        module = torch.nn.Linear(2, 1)
        # Accelerate has its own, too.
        forward = module.forward = lambda each: torch.nn.Linear.forward(module, each)
        model = torch.nn.parallel.DistributedDataParallel(module)
        model.device_ids = [0]  # of the CPU: DDP moves what it is called with, as it does on a GPU
        lay_out_buckets(model)
        assert all(each.grad is None for each in model.parameters())
        assert model(torch.ones(3, 2)).shape == (3, 1)
        assert module.forward is forward


def test_horovod_is_refused_on_gpus() -> None:
    """It is built without GPU operations: the gradients of ranks on GPUs would not be exchanged."""
    with pytest.raises(EngineError, match="--engine horovod: it is built without GPU operations"):
        check_engine(parse(["--engine", "horovod"], {}), "cuda")
    for engine in ENGINES.keys() - {"horovod"}:
        check_engine(parse(["--engine", engine], {}), "cuda")


def test_a_library_that_is_not_there_is_named_as_pip_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for engine, cure in (("fabric", "lightning-fabric"), ("trainer", "transformers accelerate")):
        with pytest.raises(EngineError, match=f"pip install {cure} on every node"):
            check_engine(parse(["--engine", engine], {}), "cpu")
    check_engine(parse(["--engine", "fsdp"], {}), "cpu")


# As the tutorial has it, 32 samples on each of two GPUs, with DeepSpeed's Adam; and what their documentation adds.
OWN_JSON = """
{
    "train_micro_batch_size_per_gpu": 32,
    "optimizer": {"type": "Adam", "params": {"lr": 0.0003, "weight_decay": 0.01, "betas": "auto"}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 50000, "offload_optimizer": {"device": "cpu"}}
}
"""


def test_a_deepspeed_configuration_of_ones_own(by_ddp: dict[int, float], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(OWN_JSON)
    argv = ["--engine", "deepspeed", "--deepspeed-config", str(tmp_path / "ds.json")]
    said_there = ("--lr", "0.0003", "--micro-batch", "16")
    train(tmp_path / "run", "--epochs", "1", *argv, same=[each for each in SAME if each not in said_there])
    found = losses(tmp_path / "run")
    assert found == pytest.approx({step: by_ddp[step] for step in found}, abs=CLOSE)


def test_training_arguments_of_ones_own(by_ddp: dict[int, float], tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text('{"ddp_bucket_cap_mb": 1, "log_level": "error", "disable_tqdm": true}')
    train(tmp_path / "run", "--epochs", "1", "--engine", "trainer", "--training-args", str(path))
    found = losses(tmp_path / "run")
    assert found == pytest.approx({step: by_ddp[step] for step in found}, abs=CLOSE)
    for config, message in [
        ('{"log_level": "loud"}', "KeyError: 'loud'"),
        (
            '{"gradient_checkpointing": true}',
            "the task's model, a Sequential, has no gradient_checkpointing_enable()",
        ),
    ]:
        path.write_text(config)
        said = train(tmp_path, "--engine", "trainer", "--training-args", str(path), num_ranks=1, code=1)
        assert f"python -m nodekit.training: --training-args {path}: {message}" in said


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_compiled_model_has_the_same_losses(engine: str, by_ddp: dict[int, float], tmp_path: Path) -> None:
    train(tmp_path, "--epochs", "1", "--engine", engine, "--compile")
    found = losses(tmp_path)
    assert found == pytest.approx({step: by_ddp[step] for step in found}, abs=1e-5)


# As on GPUs, where each step's sums are read at the end of the next one.
LATE = """
from nodekit.training.steps import step_sums
step_sums.LATE_ON.add("cpu")
def counted(self, *, but=0, read=step_sums.StepSums.read):
    if but:
        pathlib.Path(__file__ + ".late").touch()
    return read(self, but=but)
step_sums.StepSums.read = counted
import dataclasses
def over_nccl(self, world, _, begin=step_sums.StepSums.__init__, **more):
    begin(self, dataclasses.replace(world, backend="nccl"), **more)
step_sums.StepSums.__init__ = over_nccl
"""


def test_sums_that_are_read_a_step_later_change_no_curve_though_a_rank_is_killed(
    by_ddp: dict[int, float], tmp_path: Path
) -> None:
    own = [*killed_once(tmp_path, step=34), "--epochs", "2", "--snapshot-every", "8"]
    (tmp_path / "own.py").write_text((tmp_path / "own.py").read_text() + LATE)
    said = train(tmp_path, *own, launcher=["--max-restarts", "1"])
    assert "resumed at step 32 " in said
    assert (tmp_path / "own.py.late").exists()
    assert losses(tmp_path) == pytest.approx({step: by_ddp[step] for step in range(1, 47)}, abs=CLOSE)


BAD_BATCH = """
from nodekit.training.tasks.digits import Digits, Pixels
class Task(Digits):
    def train_data(self):
        data = super().train_data()
        data.images[{sample}] = float("nan")
        return Pixels(data.images[:160], data.labels[:160])
"""


@pytest.mark.parametrize("num_ranks", [2, 1])
def test_every_engine_goes_back_to_its_snapshot_and_leaves_a_bad_batch_out(
    num_ranks: int, tmp_path: Path
) -> None:
    """Of ten steps, the ninth has a sample that is not a number."""
    ninth = list(ElasticSampler(160, batch_size=16).micro_batches())[8]
    ways = [["--engine", "ddp"], *(way for way in WAYS if ranks_of(way) == num_ranks)]
    how = ["--snapshot-every", "3", "--on-nan", "rollback"]
    turns = [(tmp_path / "".join(way[1:]), [*way, *how]) for way in ways]
    said = in_turns(tmp_path, BAD_BATCH.format(sample=ninth.indices[0]), turns, num_ranks=num_ranks)
    back = re.findall(r"the loss of step 9 is nan on rank . .*: back to the newest snapshot", said)
    assert (len(back), said.count("resumed at step 6 ")) == (len(ways), len(ways)), said
    wanted = losses(tmp_path / "ddp")
    # The only rank blames the update before, too.
    assert sorted(wanted) == list(range(1, 9 + (num_ranks == 2)))
    for folder, _ in turns:
        assert losses(folder) == pytest.approx(wanted, abs=CLOSE), folder


FEW = """
from nodekit.training.tasks.digits import Digits, Pixels
class Few(Digits):
    def train_data(self):
        data = super().train_data()
        return Pixels(data.images[:160], data.labels[:160])
"""
TIED = (
    FEW
    + """
import deepspeed
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.wide, self.last = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)
        self.layers = nn.ModuleList([nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 256)])
        self.layers[0].weight = self.layers[2].weight = self.wide.weight
    def forward(self, images):
        values = self.first(images.flatten(1))
        for layer in (self.wide, *self.layers):
            values = layer(values.relu())
        return self.last(values)
class Task(Few):
    def model(self):
        return Model()
def initialize(initialize=deepspeed.initialize, **given):
    if given["config"]["zero_optimization"]["stage"] == 3:
        assert not any(each.numel() for each in given["model"].parameters()), "it would move the whole model"
    return initialize(**given)
deepspeed.initialize = initialize
"""
)


def test_tied_weights_stay_tied_and_are_saved_once(tmp_path: Path) -> None:
    ways = [["--engine", "fsdp", "--snapshot-format", "sharded"], ["--engine", "fsdp", "--snapshot-format", "whole"],
            ["--engine", "deepspeed", "--zero", "3"], ["--engine", "deepspeed", "--zero", "2"]]  # fmt: skip
    turns = [(tmp_path / "all", ["--epochs", str(epoch), *way]) for epoch, way in enumerate(ways, 1)]
    said = in_turns(tmp_path, TIED, [(tmp_path / "ddp", ["--epochs", str(len(ways))]), *turns])
    assert said.count("resumed at step") == len(ways) - 1
    assert losses(tmp_path / "all") == pytest.approx(losses(tmp_path / "ddp"), abs=1e-5)
    snapshots = Snapshots(tmp_path / "all" / "snapshots").manifests()
    assert len(snapshots) == len(ways)
    tied = 4 * 256 * 256
    once = 3 * (2 * tied + 4 * (64 * 256 + 256 * 10))  # weights and two moments
    for each in snapshots:
        assert once < sum(each.size_bytes.values()) < once + tied


EXTRA = (
    FEW
    + """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.num = torch.nn.Linear(64, 10), 0
    def forward(self, pixels):
        self.num += self.training
        return self.layer(pixels.flatten(1))
    def get_extra_state(self):
        return {"num": self.num}
    def set_extra_state(self, state):
        self.num = state["num"]
class Task(Few):
    def model(self):
        return Model()
"""
)


def test_extra_state_of_a_module_is_in_snapshots_and_weights(tmp_path: Path) -> None:
    ways = [
        ["ddp"],
        ["fsdp"],
        ["fsdp"],
        ["deepspeed", "--zero", "3"],
        ["deepspeed", "--zero", "1"],
        ["horovod"],
    ]
    turns = [
        (tmp_path / "all", ["--epochs", str(epoch), "--engine", *way]) for epoch, way in enumerate(ways, 1)
    ]
    said = in_turns(tmp_path, EXTRA, turns)
    assert said.count("resumed at step") == len(ways) - 1
    assert "not written" not in said
    for name in ("best", "last"):
        state, step = read_weights(tmp_path / "all" / name), read_facts(tmp_path / "all" / name)["step"]
        assert state["_extra_state"]["num"] >= step > 0  # a step has a micro-batch or more
        assert state["layer.weight"].shape == (10, 64)


def test_ddp_takes_sparse_gradients_of_embeddings() -> None:
    rows, bag = torch.nn.Embedding(7, 3, sparse=True), torch.nn.EmbeddingBag(5, 3, sparse=True)
    module, row = torch.nn.ModuleList([rows, bag]), torch.tensor([2])
    module.forward = lambda: rows(row) + bag(row[None])
    with World.from_env({}):
        model = torch.nn.parallel.DistributedDataParallel(module)
        lay_out_buckets(model)
        assert all(each.grad is None for each in module.parameters())
        model().sum().backward()
    for each in module.parameters():
        assert each.grad is not None
        assert each.grad.is_sparse
        assert each.grad.to_dense()[2].tolist() == [1.0] * 3


STOPPED_ONCE = """
import os, pathlib, signal
from nodekit.training.tasks.digits import Digits
class Task(Digits):
    num_left = 20
    def loss(self, model, batch):
        self.num_left -= 1
        mark = pathlib.Path(__file__ + ".stopped")
        if self.num_left == 0 and os.environ["LOCAL_RANK"] == "1" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch)
"""


def test_a_stop_that_is_read_a_step_later_is_the_same_on_all_ranks(
    by_ddp: dict[int, float], tmp_path: Path
) -> None:
    own = [*task(tmp_path, STOPPED_ONCE + LATE), "--epochs", "1", "--snapshot-seconds", "0.01"]
    said = train(tmp_path, *own, code=1)
    stopped = re.search(r"stopped at step (\d+)/23", said)
    assert stopped, said
    assert 10 <= int(stopped[1]) < 23
    assert f"resumed at step {stopped[1]} " in train(tmp_path, *own)
    assert (tmp_path / "own.py.late").exists()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 24))
    assert losses(tmp_path) == pytest.approx({step: by_ddp[step] for step in range(1, 24)}, abs=CLOSE)


SENDING = """
import torch.nn.parallel.distributed as ddp
from nodekit.training.tasks.digits import Digits as Task
real = ddp._sync_module_states
def send(*args, **more):
    with open(__file__ + ".sent", "a") as file:
        file.write("x")
    real(*args, **more)
ddp._sync_module_states = send
"""


def test_ranks_that_have_loaded_one_snapshot_do_not_send_each_other_the_weights(tmp_path: Path) -> None:
    own = [*task(tmp_path, SENDING), "--keep", "9"]
    train(tmp_path, *own, "--epochs", "1")
    assert (tmp_path / "own.py.sent").read_text() == "xx", "rank 0's, when they begin"
    assert "resumed at step 23 " in train(tmp_path, *own, "--epochs", "2")
    assert (tmp_path / "own.py.sent").read_text() == "xx"


FUSED = """
from nodekit.training import loop
from nodekit.training.tasks.digits import Digits as Task
loop.is_fused = lambda options, device: options.epochs % 2 == 0
"""


def test_a_fused_optimizer_goes_on_from_one_that_is_not_and_back(
    by_ddp: dict[int, float], tmp_path: Path
) -> None:
    """Every other one of six engines has a fused one."""
    zero = ["deepspeed", "--zero"]
    ways = [["ddp"], ["fsdp"], ["ddp"], [*zero, "2"], ["fsdp"], [*zero, "3"]]
    turns = [
        (tmp_path / "all", ["--epochs", str(epochs), "--keep", "9", "--engine", *way])
        for epochs, way in enumerate(ways, 1)
    ]
    said = in_turns(tmp_path, FUSED, turns, same=[])
    assert said.count("resumed at step") == len(ways) - 1
    snapshots, fused, seen = Snapshots(tmp_path / "all" / "snapshots"), set(), []
    while saved := snapshots.look(seen).loaded:
        epoch = -(-saved.manifest.step // 23)
        fused.add((epoch, bool(saved.state["optimizer"]["param_groups"][0]["fused"])))
        seen.append(saved.manifest.payload)
    assert fused == {(epoch, epoch % 2 == 0) for epoch in range(1, len(ways) + 1)}
    found = losses(tmp_path / "all")
    assert found == pytest.approx({step: by_ddp[step] for step in found}, abs=5e-4)


SUMMING = """
import torch
import torch.distributed as dist
from nodekit.training.tasks.digits import Digits
real = dist.all_reduce
def counted(values, *args, **more):
    if values.dtype == torch.float64 and len(values) < 20:
        with open(__file__ + ".sums", "a") as file:
            file.write("x")
    return real(values, *args, **more)
dist.all_reduce = counted
names = []
class Task(Digits):
    def model(self):
        model = super().model()
        names.extend(name for name, _ in model.named_modules())
        return model
    def loss(self, model, batch):
        assert [name for name, _ in model.module.named_modules()] == names, "nobody sees what kit has added"
        return super().loss(model, batch)
"""


@pytest.mark.parametrize(
    "how",
    [
        ["--micro-batch", "16"],
        ["--find-unused"],
        ["--local-sgd", "2"],
        ["--compress", "fp16"],
    ],
    ids=lambda how: how[0],
)
def test_ddp_sums_the_losses_with_its_gradients_on_cpus_where_it_can(
    how: list[str], by_ddp: dict[int, float], tmp_path: Path
) -> None:
    train(tmp_path, *task(tmp_path, SUMMING), "--epochs", "1", *how)
    sums, found = tmp_path / "own.py.sums", losses(tmp_path)
    if how[0] == "--micro-batch":
        assert not sums.exists()
        assert found == pytest.approx({step: by_ddp[step] for step in range(1, 24)}, abs=CLOSE)
        return
    assert len(sums.read_text()) >= 2 * (12 if how[0] == "--local-sgd" else 23)
    assert len(found) == 23
    if how[0] == "--find-unused":
        assert found == pytest.approx({step: by_ddp[step] for step in range(1, 24)}, abs=CLOSE)


COMPILED = """
import torch
from nodekit.training.tasks.digits import Digits
class Task(Digits):
    def model(self):
        return {how}
"""


@pytest.mark.parametrize(
    "how",
    [
        "torch.compile(super().model(), backend='eager')",
        "torch.jit.script(super().model())",
        "torch.jit.trace(super().model(), torch.zeros(2, 1, 8, 8))",
    ],
    ids=["compile", "script", "trace"],
)
def test_ddp_takes_a_module_of_another_kind(how: str, by_ddp: dict[int, float], tmp_path: Path) -> None:
    train(tmp_path, *task(tmp_path, COMPILED.format(how=how)), "--epochs", "1")
    assert losses(tmp_path) == pytest.approx({step: by_ddp[step] for step in range(1, 24)}, abs=1e-5)


NOT_AVERAGED = """
from torch import nn
from nodekit.training.tasks.digits import Digits
class Model(nn.Module):
    def __init__(self, used):
        super().__init__()
        self.used, self.unused = used, nn.Linear(2, 2)
    def forward(self, images):
        return self.used(images)
class Task(Digits):
    def model(self):
        return Model(super().model())
class Within(Digits):
    def loss(self, model, batch):
        return super().loss(model.module, batch)
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "Task",
            "unused.weight, unused.bias had no part in the loss of this step: leave such parameters out, or give",
        ),
        ("Within", "let the task's loss call the model that it is given, not model.module or a part of it"),
    ],
)
def test_a_step_that_ddp_does_not_average_is_refused(name: str, says: str, tmp_path: Path) -> None:
    own = task(tmp_path, NOT_AVERAGED)
    said = train(
        tmp_path, *(each.replace(":Task", f":{name}") for each in own), "--snapshot-every", "1", code=1
    )
    assert f"DistributedDataParallel has averaged no gradients over the ranks: {says}" in said
    assert not losses(tmp_path)


def test_powersgd_sends_more_than_one_bucket(tmp_path: Path) -> None:
    how = ["--task", "text", "--epochs", "1", "--compress", "powersgd", "--lr", "0.002"]
    train(tmp_path, *how)  # 17 steps, from the tenth on in thin matrices
    assert len(losses(tmp_path)) == 17


FROZEN = (
    FEW
    + """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        self.unused = nn.Linear(32, 10)
        self.first.weight.requires_grad_(False)
        self.second.bias.requires_grad_(False)
    def forward(self, images):
        return self.last(self.second(self.first(images.flatten(1)).relu()))
class Task(Few):
    def model(self):
        return Model()
    def optimizer(self, model, lr):
        unused = [model.unused.bias, *model.second.parameters(), *model.last.parameters()]
        groups = [[*model.first.parameters()], unused, [model.unused.weight]]
        return torch.optim.AdamW([{"params": each} for each in groups], lr)
"""
)


def test_parameters_that_are_frozen_or_not_used_have_no_moments_to_share_out(tmp_path: Path) -> None:
    """They are in the optimizer nevertheless: first in its groups, and in a group of their own."""
    ddp = ["--engine", "ddp", "--find-unused"]
    turns = [(tmp_path / "ddp", ["--epochs", "3", *ddp])]
    for zero in "123":
        ways = [ddp, ["--engine", "deepspeed", "--zero", zero], ddp]
        turns += [(tmp_path / zero, ["--epochs", str(epoch), *way]) for epoch, way in enumerate(ways, 1)]
    said = in_turns(tmp_path, FROZEN, turns)
    assert said.count("resumed at step") == 6
    for zero in "123":
        assert losses(tmp_path / zero) == pytest.approx(losses(tmp_path / "ddp"), abs=1e-5)
        saved = Snapshots(tmp_path / zero / "snapshots").load()
        assert saved
        assert set(saved.state["optimizer"]["state"]) == {1, 2, 3, 5, 6, 7}, "0 and 4 are frozen"


UNWRITTEN = """
import atexit, resource, torch
most = lambda: f"most kB: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}\\n"
atexit.register(lambda: print(most(), end=""))  # in one piece, for others print at the same time
from nodekit.training.tasks.digits import Digits
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True  # with nan
class Task(Digits):
    pass
"""


def test_what_nobody_has_written_in_a_rank_s_part_of_the_weights_is_no_weight(
    by_ddp: dict[int, float], tmp_path: Path
) -> None:
    """ZeRO 3 gives all ranks parts of one size: where the numbers do not suffice for that, the last ones end empty."""
    zero = ["--engine", "deepspeed", "--zero", "3", "--epochs", "1", "--snapshot-every", "5"]
    said = train(tmp_path, *task(tmp_path, UNWRITTEN), *zero, num_ranks=3)
    # Of what DeepSpeed has by default for gradients, 2 GB, all would be written to here.
    most = [int(each) for each in re.findall(r"most kB: (\d+)", said)]
    assert len(most) == 3
    assert max(most) < 1_500_000
    # The sum over three ranks is rounded otherwise than that over two.
    assert losses(tmp_path) == pytest.approx({step: by_ddp[step] for step in range(1, 24)}, abs=5e-4)


HEAD = (
    FEW
    + """
import torch
class Task(Few):
    def optimizer(self, model, lr):
        *body, weight, bias = model.parameters()
        for each in body:
            each.requires_grad_({needs_gradients})
        return torch.optim.AdamW([weight, bias], lr)
"""
)


@pytest.mark.parametrize("num_ranks", [2, 1])
def test_parameters_that_the_optimizer_lacks_do_not_count_in_clip(num_ranks: int, tmp_path: Path) -> None:
    """Nor do their gradients add up: it is as if they were frozen."""
    how = ["--clip", "0.005", "--lr", "0.01"]
    frozen = [(tmp_path / "frozen", ["--engine", "ddp", *how])]
    in_turns(tmp_path, HEAD.format(needs_gradients=False), frozen, num_ranks=num_ranks)
    ways = [["--engine", "ddp"], *(way for way in WAYS if ranks_of(way) == num_ranks)]
    turns = [(tmp_path / "".join(way[1:]), [*way, *how]) for way in ways]
    in_turns(tmp_path, HEAD.format(needs_gradients=True), turns, num_ranks=num_ranks)
    wanted = losses(tmp_path / "frozen")
    for folder, _ in turns:
        assert losses(folder) == pytest.approx(wanted, abs=CLOSE), folder


SHORT = """
from nodekit.training.tasks.digits import Digits, Pixels
class Task(Digits):
    def train_data(self):
        data = super().train_data()
        return Pixels(data.images[:48], data.labels[:48])
"""


def test_a_run_goes_on_with_another_learning_rate_if_that_is_asked_for(tmp_path: Path) -> None:
    sharded = ["--engine", "fsdp", "--snapshot-format", "sharded"]
    ways = [["--engine", "ddp"], sharded, sharded, ["--engine", "deepspeed", "--zero", "2"]]
    rates = [0.001, 0.002, 0.003, 0.004]
    turns = [
        (tmp_path / "all", ["--epochs", str(epoch), "--lr", str(rate), *way])
        for epoch, (rate, way) in enumerate(zip(rates, ways, strict=True), 1)
    ]
    said = in_turns(tmp_path, SHORT, turns)
    assert said.count("resumed at step") == 3
    lines = [json.loads(line) for line in (tmp_path / "all" / "metrics.jsonl").read_text().splitlines()]
    assert [line["lr"] for line in lines if "loss" in line] == [rate for rate in rates for _ in range(3)]
