"""Where things lie that tests read."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
RECORDED = TESTS / "recorded"
"""What other programs have said, as they said it."""
NEWER_TORCH = ROOT / ".venv/torch-2.14/bin/python"
"""A python with a torch that can do what the one in .venv cannot yet."""
