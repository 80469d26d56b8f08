"""Of which measures the least value is the best: kit knows them by their names."""

import re

_LEAST = re.compile(
    r"loss|error|(?<![a-z])(mse|rmse|mae|mape|nll|perplexity|ppl|wer|cer|eer|fid)(?![a-z])", re.IGNORECASE
)


def is_least_best(name: str) -> bool:
    """Whether less is better, as of a loss or an error; of all other measures the greatest value is the best."""
    return _LEAST.search(name) is not None
