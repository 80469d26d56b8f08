"""No DNS for the agent: it reaches others by address, and torch's store must not wait for names."""

from __future__ import annotations

import os


def forbid() -> None:
    """Have this process ask no DNS server for a name; ranks, which are given an environment of their own, still may.

    torch's store looks up the name of whoever connects, for a line of its log, in the one thread in which it answers
    (c10d/socket.cpp). With a DNS server that is out of reach, as in a lab without internet, that is 10 s in which it
    hears nobody; and any stranger who connects can have it happen.
    """
    # glibc reads this when it looks up its first name (resolv.conf(5)). Not os.environ: ranks get a copy of that.
    os.putenv("RES_OPTIONS", f"{os.environ.get('RES_OPTIONS', '')} attempts:0".strip())
