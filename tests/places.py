"""Where things lie that tests read."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
RECORDED = TESTS / "recorded"
"""What other programs have said, as they said it."""
