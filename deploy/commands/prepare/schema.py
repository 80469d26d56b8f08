"""Print the JSON Schema of an inventory, for editors."""

from __future__ import annotations

import argparse
import json


def run(_: argparse.Namespace) -> int:
    from nodekit.inventory.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
