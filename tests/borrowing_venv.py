"""A venv that has a torch of its own, and all else from the project's.

``python tests/borrowing_venv.py VENV`` lets it borrow, once torch is installed there.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def borrow(venv: Path) -> None:
    """Let a venv have what this interpreter's has, kit included; what is in the venv comes first."""
    (own,) = venv.glob("lib/python*/site-packages")
    everything_else = sysconfig.get_path("purelib")
    (own / "nodekit.pth").write_text(f"import site; site.addsitedir({everything_else!r})\n")
    (venv / "bin/py-spy").symlink_to(Path(sysconfig.get_path("scripts"), "py-spy"))  # for stacks


if __name__ == "__main__":
    borrow(Path(sys.argv[1]))
