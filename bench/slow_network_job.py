"""The task text for bench/slow_network: epochs as long as wanted, judged on dev and test together."""

import os

from nodekit.training.tasks import text


class Text(text.Text):
    """An epoch goes through the 1,088 sentences several times, as one of a large data set has many steps.

    ``BENCH_SAMPLES`` says how many samples it has. Dev and test together are 408 sentences: half the noise.
    """

    def train_data(self) -> list[text.Sample]:
        """As many as are asked for."""
        own = super().train_data()
        num_samples = int(os.environ.get("BENCH_SAMPLES", len(own)))
        return (own * (num_samples // len(own) + 1))[:num_samples]

    def test_data(self) -> list[text.Sample]:
        """Nothing is chosen by them here."""
        return [*super().test_data(), *self.final_data()]
