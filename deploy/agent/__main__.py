"""``python -m nodekit.deploy.agent NODE_DIR``."""

import gc
import os
import sys

if __name__ == "__main__":
    gc.disable()  # the imports leave no garbage, and looking for some takes a fifth of their time
    from nodekit.deploy.agent.main import main

    gc.freeze()
    gc.enable()
    status = main()
    sys.stderr.flush()
    os._exit(status)  # torch takes most of a second to tear itself down, and everything is on disk
