"""Whether a lower or a higher value of a measure is better, by its name."""

import re

_LEAST = re.compile(
    r"loss|error|(?<![a-z])(mse|rmse|mae|mape|nll|perplexity|ppl|wer|cer|eer|fid)(?![a-z])", re.IGNORECASE
)


def is_least_best(name: str) -> bool:
    """Whether a lower value is better, as for a loss or an error; for all other measures, a higher one is."""
    return _LEAST.search(name) is not None
