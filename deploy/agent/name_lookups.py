"""Turn DNS off for the agent: it reaches others by address, and torch's store must not wait for name lookups."""

from __future__ import annotations

import os


def forbid() -> None:
    """Keep this process from asking DNS servers; ranks get an environment of their own, and still may.

    torch's store looks up the name of each host that connects, for a line of its log, in its only thread
    (c10d/socket.cpp). With an unreachable DNS server, as in a lab without internet, the store then answers nobody for
    10 s; any stranger who connects can cause this.
    """
    # glibc reads this when it looks up its first name (resolv.conf(5)). Not os.environ: ranks get a copy of that.
    os.putenv("RES_OPTIONS", f"{os.environ.get('RES_OPTIONS', '')} attempts:0".strip())
