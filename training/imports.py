"""Which modules a rank imports for its options, for whoever has the time to import them before it needs them."""

import importlib
import logging
from collections.abc import Iterable

from nodekit.training.engine_info import ENGINES
from nodekit.training.options.options import Options
from nodekit.training.tasks import BUILT_IN, IMPORTS


def imports_of(options: Options) -> list[str]:
    """Return their names, beyond those that every rank imports; of a task of the user's, nothing is known."""
    # By itself torch imports the first when the first optimizer is made.
    own = ["torch._dynamo", f"nodekit.training.engines.{options.engine}"]
    if options.task in BUILT_IN:
        own.append(BUILT_IN[options.task].partition(":")[0])
    if options.is_sharded:
        own.append("nodekit.training.snapshots.sharded")
    return [*own, *ENGINES[options.engine].imports, *IMPORTS.get(options.task, ())]


def import_all(names: Iterable[str]) -> None:
    """Import them; who needs one that cannot be imported says so."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            logging.getLogger("nodekit.training").debug("%s cannot be imported: %s", name, error)
