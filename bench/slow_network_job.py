"""The task text for bench/slow_network: long epochs, and evaluation on dev and test together."""

import os

from nodekit.training.tasks import text


class Text(text.Text):
    """Repeats the 1,088 sentences several times in an epoch, so that it has many steps, as with a large data set.

    ``BENCH_SAMPLES`` is the number of samples per epoch. Dev and test together are 408 sentences: half the noise.
    """

    def train_data(self) -> list[text.Sample]:
        """Return as many samples as `BENCH_SAMPLES` says."""
        own = super().train_data()
        num_samples = int(os.environ.get("BENCH_SAMPLES", len(own)))
        return (own * (num_samples // len(own) + 1))[:num_samples]

    def test_data(self) -> list[text.Sample]:
        """Return dev and test together: nothing is chosen by the dev data here."""
        return [*super().test_data(), *self.final_data()]
