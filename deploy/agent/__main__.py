"""``python -m nodekit.deploy.agent NODE_DIR``."""

import os
import sys

from nodekit.deploy.agent.main import main

if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # torch takes most of a second to tear itself down, and everything is on disk
