"""The modules that a rank imports for its options, so that a waiting process can import them ahead of time."""

import importlib
import logging
from collections.abc import Iterable

from nodekit.training.engine_info import ENGINES
from nodekit.training.options.options import Options
from nodekit.training.tasks import BUILT_IN, IMPORTS


def imports_of(options: Options) -> list[str]:
    """Return the names of modules that these options need, beyond those that every rank imports.

    A user's own task is not looked into.
    """
    # torch imports torch._dynamo when the first optimizer is made.
    own = ["torch._dynamo", f"nodekit.training.engines.{options.engine}"]
    if options.task in BUILT_IN:
        own.append(BUILT_IN[options.task].partition(":")[0])
    if options.is_sharded:
        own.append("nodekit.training.snapshots.sharded")
    return [*own, *ENGINES[options.engine].imports, *IMPORTS.get(options.task, ())]


def import_all(names: Iterable[str]) -> None:
    """Import modules; log failures only at level debug, since the code that needs such a module reports it."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            logging.getLogger("nodekit.training").debug("%s cannot be imported: %s", name, error)
