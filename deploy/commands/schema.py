"""`kit schema`: the JSON Schema of an inventory, for editors."""

from __future__ import annotations

import argparse
import json

from nodekit.deploy.commands import arguments


def run(_: argparse.Namespace) -> int:
    """Print the schema."""
    from nodekit.inventory.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


COMMAND = arguments.Command(run=run, summary="the JSON Schema of an inventory, for editors")
