"""Forecasts, by numbers that were worked out by hand."""

import json
from pathlib import Path

import pytest

from nodekit.deploy.bench import bench, model_size
from nodekit.deploy.bench.forecast import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Curve,
    Job,
    Way,
    advise,
    buckets,
    enough_local_steps,
    forecast,
    plan,
)
from nodekit.inventory.errors import KitError

MIB = 1 << 20
DDP = Way(name="ddp")


def flat(bytes_per_s: float) -> Curve:
    """Two nodes, no latency."""
    return Curve.of_link(bytes_per_s=bytes_per_s, rtt_s=0.0)


def test_a_ring_sends_every_byte_twice_less_one_share() -> None:
    curve = Curve.of_link(bytes_per_s=1e9, rtt_s=2e-3, num_nodes=4)
    # 6 stations of half a round trip, and 2 * 3/4 of the bytes.
    assert curve.seconds(4e9) == pytest.approx(6 * 1e-3 + 6.0)
    assert curve.seconds(4e9, 1) == 0


def test_a_curve_of_two_nodes_tells_of_more() -> None:
    two = Curve.of_link(bytes_per_s=1e9, rtt_s=2e-3)
    eight = Curve.of_link(bytes_per_s=1e9, rtt_s=2e-3, num_nodes=8)
    for size in (1.0, 1e6, 1e9):
        assert two.seconds(size, 8) == pytest.approx(eight.seconds(size), rel=1e-3)
        assert eight.seconds(size, 2) == pytest.approx(two.seconds(size), rel=1e-3)


def test_between_and_beyond_what_was_measured_time_goes_on_straight_lines() -> None:
    curve = Curve(2, ((1e3, 1.0), (3e3, 2.0), (5e3, 4.0)))
    found = [curve.seconds(size) for size in (1.0, 1e3, 2e3, 4e3, 5e3, 9e3)]
    assert found == pytest.approx([1.0, 1.0, 1.5, 3.0, 4.0, 8.0])


def test_noise_makes_no_larger_message_faster() -> None:
    curve = Curve.measured(
        [(1e3, 3.0), (2e3, 1.0), (3e3, 5.0), (4e3, 4.0)], num_nodes=2, link_bytes_per_s=1e3
    )
    assert [seconds for _, seconds in curve.points] == [2.0, 2.0, 4.5, 4.5]
    # The last two say that more bytes cost nothing; a link of 1000 bytes/s says that each costs a millisecond.
    assert curve.seconds(6e3) == pytest.approx(4.5 + 2.0)
    assert Curve.measured([(1e3, 2.0)], num_nodes=2).seconds(3e3) == pytest.approx(6.0)


def test_gradients_are_cut_as_ddp_does() -> None:
    assert buckets(0.5 * MIB) == [0.5 * MIB]
    assert buckets(60 * MIB) == [FIRST_BUCKET_BYTES, BUCKET_BYTES, BUCKET_BYTES, 9 * MIB]
    assert buckets(60 * MIB, first=False) == [BUCKET_BYTES, BUCKET_BYTES, 10 * MIB]


def job(mib: float, step_s: float = 3.0, **more: object) -> Job:
    return Job(num_parameters=round(mib * MIB / 4), step_s=step_s, **more)  # type: ignore[arg-type]


def test_a_fast_link_leaves_the_last_bucket_to_wait_for() -> None:
    # 51 MiB in buckets of 1, 25 and 25, a second for each 100 MiB: all but the last 0.25 s is hidden.
    found = forecast(DDP, job(51), flat(100 * MIB), 2)
    assert found.step_s == pytest.approx(3.25, abs=1e-6)
    assert found.exchange_s == pytest.approx(0.51, abs=1e-6)
    assert found.efficiency == pytest.approx(3 / 3.25, abs=1e-6)


def test_a_slow_link_is_idle_until_the_first_bucket_is_ready() -> None:
    # 51 s to send; the first bucket is ready when a third and 1/51 of the other two are done.
    found = forecast(DDP, job(51), flat(1 * MIB), 2)
    assert found.step_s == pytest.approx(1 + 2 / 51 + 51, rel=1e-5)


def test_half_the_bits_take_half_the_time() -> None:
    found = forecast(Way(name="", compress="bf16"), job(51), flat(1 * MIB), 2)
    # The first bucket has gone when the second one becomes ready.
    assert found.exchange_s == pytest.approx(25.5, rel=1e-6)
    assert found.step_s == pytest.approx(1 + 2 * 26 / 51 + 25, rel=1e-5)
    again = forecast(Way(name="", compress="bf16"), job(51, gradient_bytes=2), flat(1 * MIB), 2)
    assert again.exchange_s == pytest.approx(25.5, rel=1e-6)


def test_accumulation_computes_more_to_one_exchange() -> None:
    found = forecast(Way(name="", accumulate=4), job(51, batch=10), flat(1 * MIB), 2)
    assert found.step_s == pytest.approx(9 + 1 + 2 / 51 + 51, rel=1e-5)
    assert found.efficiency == pytest.approx(12 / found.step_s)
    assert found.samples_per_s == pytest.approx(2 * 40 / found.step_s)


def test_local_steps_share_one_exchange_that_nothing_hides() -> None:
    found = forecast(Way(name="", local_steps=17), job(51), flat(1 * MIB), 2)
    assert found.step_s == pytest.approx(3 + 51 / 17, rel=1e-4)
    assert found.efficiency == pytest.approx(0.5, rel=1e-4)


def test_powersgd_sends_thin_matrices() -> None:
    whole = forecast(Way(name="", compress="powersgd"), job(51), flat(1 * MIB), 2)
    assert whole.exchange_s == pytest.approx(51 * 2 / 1024, rel=1e-6)
    told = forecast(Way(name="", compress="powersgd"), job(51, powersgd_numbers=MIB), flat(1 * MIB), 2)
    assert told.exchange_s == pytest.approx(4, rel=1e-6)


def test_every_step_costs_a_word_over_a_far_link() -> None:
    far = Curve.of_link(bytes_per_s=1e12, rtt_s=0.1)  # an all-reduce of two: 0.1 s at least
    assert forecast(DDP, job(1), far, 2).step_s == pytest.approx(3 + 0.1 + 0.1, rel=1e-4)


def test_one_node_sends_nothing() -> None:
    for way in (DDP, Way(name="", local_steps=8), Way(name="", accumulate=4)):
        found = forecast(way, job(51), flat(1.0), 1)
        assert (found.step_s, found.efficiency) == (3.0 * way.accumulate, 1.0)


def test_enough_local_steps_are_the_fewest_that_will_do() -> None:
    # 51 s for an exchange: of 3 s each, 0.9 needs 153 steps.
    assert enough_local_steps(job(51), flat(1 * MIB), 2) == 200
    assert enough_local_steps(job(51), flat(1e-3 * MIB), 2) == 500


BERT = Job(num_parameters=110_000_000, step_s=0.4)


def sentence(link: str, num_nodes: int = 2, job: Job = BERT, **more: int) -> str:
    curve = Curve.of_link(bytes_per_s=bench.rate_bytes(link), rtt_s=2e-4)
    return plan(job, curve, nums_nodes=[1, num_nodes], link_text=link, **more).sentence


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("1Gb", "stay on one node, or use --diloco 100: 0.92"),
        ("10Gb", "2 nodes by ddp give 1.6 times one node's speed (0.79); use --compress bf16: 0.98"),
        ("100Gb", "use ddp on 2 nodes: 1.00"),
        ("1Mb", "stay on one node: the best of 2 nodes would be 0.05, by --diloco 500"),
    ],
)
def test_what_to_do_is_said_in_a_sentence(link: str, said: str) -> None:
    assert sentence(link).endswith(said), sentence(link)


def test_the_sentence_says_what_it_costs() -> None:
    found = sentence("1Gb", local_steps=50)
    assert found == (
        "with 1Gb between nodes, 110 M parameters: 3.5 s of communication for 0.4 s of compute; "
        "stay on one node, or use --diloco 50: 0.85"
    )


def test_powersgd_is_no_advice() -> None:
    ways = [DDP, Way(name="thin", compress="powersgd"), Way(name="local", local_steps=100)]
    found = [forecast(way, BERT, flat(1e9 / 8), 2) for way in ways]
    assert found[1].efficiency > found[2].efficiency > 0.9
    assert "use local" in advise(BERT, found, "x")


# --- models -------------------------------------------------------------------------------------------------

GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
BERT_BASE = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}


@pytest.mark.parametrize(
    ("config", "number"),
    [  # as these models have them, by torch
        (BERT_BASE, 109_482_240),
        (GPT2, 124_439_808),
        (LLAMA, 6_738_415_616),
        (
            {**LLAMA, "model_type": "mistral", "num_key_value_heads": 8, "intermediate_size": 14336},
            7_241_732_096,
        ),
        (
            {
                "model_type": "distilbert",
                "vocab_size": 30522,
                "dim": 768,
                "hidden_dim": 3072,
                "n_layers": 6,
                "max_position_embeddings": 512,
            },
            66_362_880,
        ),
    ],
)
def test_a_config_tells_how_many_parameters_there_are(
    config: dict[str, object], number: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_size.num_parameters(str(tmp_path)) == number
    assert model_size.num_parameters(str(tmp_path / "config.json")) == number


def test_the_formulas_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    for name, make in (
        ("bert", "AutoModel"),
        ("qwen2", "AutoModelForCausalLM"),
        ("gemma", "AutoModelForCausalLM"),
    ):
        config = transformers.AutoConfig.for_model(name, num_hidden_layers=2)
        with torch.device("meta"):
            built = getattr(transformers, make).from_config(config)
        wanted = sum(each.numel() for each in built.parameters())
        assert model_size.of_config(json.loads(config.to_json_string(use_diff=False))) == wanted


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("110e6", 110_000_000),
        ("7B", 7_000_000_000),
        ("1.5b", 1_500_000_000),
        ("350M", 350_000_000),
        ("42", 42),
    ],
)
def test_a_number_of_parameters_is_read(text: str, number: int) -> None:
    assert model_size.num_parameters(text) == number


def test_a_model_that_cannot_be_counted_is_told_with_a_cure(tmp_path: Path) -> None:
    with pytest.raises(KitError, match=r"no-such: No such file.*a number of parameters such as 110e6"):
        model_size.num_parameters("no-such")
    for content, said in [
        ("{", "found no JSON"),
        ("[]", "found list"),
        ('{"model_type": "mamba"}', "no formula for the model_type 'mamba'"),
        ('{"model_type": "bert"}', "no 'hidden_size'; give the number"),
        ('{"model_type": "llama", "hidden_size": "x", "intermediate_size": 1}', "give the number"),
        (json.dumps({**LLAMA, "vocab_size": -(10**9)}), "found -"),
        (json.dumps({**LLAMA, "vocab_size": 1e999}), "give the number"),
    ]:
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(KitError, match=said):
            model_size.num_parameters(str(tmp_path))
    with pytest.raises(KitError, match="no parameters"):
        model_size.num_parameters("0")
    for odd in ("1.2.3", "1e", "-7B", "7BB"):
        with pytest.raises(KitError, match="No such file"):
            model_size.num_parameters(odd)


# --- units --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("1Gb", 125e6), ("25Gbit/s", 3.125e9), ("100Mbps", 12.5e6), ("1.2GB/s", 1.2e9), ("10G", 1.25e9)],
)
def test_rates_are_bits_unless_the_b_is_large(text: str, wanted: float) -> None:
    assert bench.rate_bytes(text) == pytest.approx(wanted)


def test_times_and_sizes_are_read() -> None:
    assert [bench.time_s(text) for text in ("0.2ms", "50us", "1 s")] == pytest.approx([2e-4, 5e-5, 1.0])
    assert [bench.size_bytes(text) for text in ("1KiB", "64M", "1GB")] == [1 << 10, 64 << 20, 1 << 30]
    for read, text in (
        (bench.rate_bytes, "fast"),
        (bench.rate_bytes, "0Gb"),
        (bench.time_s, "2"),
        (bench.size_bytes, "9"),
    ):
        with pytest.raises(KitError, match=f" {text}: wanted"):
            read(text)


def test_the_numbers_of_nodes_end_with_the_most() -> None:
    assert [bench.nums_nodes(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
