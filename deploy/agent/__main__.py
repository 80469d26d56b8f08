"""``python -m nodekit.deploy.agent NODE_DIR``."""

import gc
import os
import sys

if __name__ == "__main__":
    gc.disable()  # the imports leave no garbage, and collections would take a fifth of their time
    from nodekit.deploy.agent.main import main

    gc.freeze()
    gc.enable()
    status = main()
    sys.stderr.flush()
    os._exit(status)  # torch's own shutdown takes most of a second, and everything is on disk
