"""Which modules a rank imports for its options, for whoever has the time to import them before it needs them."""

from nodekit.training.engine_info import ENGINES
from nodekit.training.options.options import Options
from nodekit.training.tasks import BUILT_IN, IMPORTS


def imports_of(options: Options) -> list[str]:
    """Return their names, beyond those that every rank imports; of a task of the user's, nothing is known."""
    own = [f"nodekit.training.engines.{options.engine}"]
    if options.task in BUILT_IN:
        own.append(BUILT_IN[options.task].partition(":")[0])
    return [*own, *ENGINES[options.engine].imports, *IMPORTS.get(options.task, ())]
