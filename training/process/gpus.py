"""``--gpus``: restrict the GPUs that this process sees, before CUDA is initialized."""

from collections.abc import Mapping, Sequence
from itertools import takewhile

VARIABLE = "CUDA_VISIBLE_DEVICES"
_HIDES_THE_REST = "-1"


def chosen(numbers: Sequence[int], environ: Mapping[str, str]) -> str:
    """Return the value of ``CUDA_VISIBLE_DEVICES`` that shows these GPUs.

    Args:
        numbers: as torch numbers the GPUs that are visible now, from 0.
        environ: may have the variable already: then its own entries (numbers, UUIDs, MIG devices) are reused.

    Raises:
        ValueError: the variable shows fewer GPUs.
    """
    if VARIABLE not in environ:
        return ",".join(map(str, numbers))
    words = [each.strip() for each in environ[VARIABLE].split(",") if each.strip()]
    shown = list(takewhile(lambda word: word != _HIDES_THE_REST, words))
    if absent := [number for number in numbers if number >= len(shown)]:
        wanted = (
            f"a number from 0 to {len(shown) - 1} was wanted" if shown else "unset it, or leave --gpus out"
        )
        raise ValueError(
            f"--gpus {','.join(map(str, numbers))}: there is no GPU {absent[0]} where {VARIABLE}="
            f"{environ[VARIABLE]} shows {len(shown)}: {wanted}"
        )
    return ",".join(shown[number] for number in numbers)
