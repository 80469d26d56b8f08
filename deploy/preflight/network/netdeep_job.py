"""What every host runs for `kit check --deep`: meets the others as torch does, and reduces one tensor with them.

Its source is sent to the hosts, with ``SETTINGS`` before it, and reaches their python on stdin, where nothing more
is said: that stdin ends means that nobody waits for this any more. It says how far it got, a line of JSON a stage.
"""

import json
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

SETTINGS: dict[str, Any] = globals().get("SETTINGS", {})
CONNECT_S = 2.0
STARTED = time.monotonic()


def say(stage: str, **more: object) -> None:
    """One line for who started us."""
    print(json.dumps({"stage": stage, "s": round(time.monotonic() - STARTED, 3), **more}), flush=True)


def end_with_stdin() -> None:
    """Wait for the end of stdin, and end."""
    while os.read(0, 4096):  # not sys.stdin: its lock would be held as the interpreter shuts down
        pass
    os._exit(2)


def wait_for_store(address: str, port: int) -> None:
    """Until somebody listens there; what is in the way is said each time that it changes."""
    said = ""
    while True:
        try:
            socket.create_connection((address, port), CONNECT_S).close()
            return
        except ConnectionRefusedError:
            problem = "refused"
        except TimeoutError:
            problem = f"no answer in {CONNECT_S:.0f} s"
        except OSError as error:
            problem = error.strerror or str(error)
        if problem != said:
            say("calls", problem=problem)
            said = problem
        time.sleep(0.2)


def main() -> None:
    """Rendezvous, process group, all-reduce."""
    threading.Thread(target=end_with_stdin, daemon=True).start()
    watchdog = threading.Timer(SETTINGS["limit_s"], os._exit, (3,))
    watchdog.daemon = True
    watchdog.start()
    say("imports")
    import torch
    import torch.distributed as dist

    rank, world_size, backend = SETTINGS["rank"], SETTINGS["world_size"], SETTINGS["backend"]
    address, port = SETTINGS["master_addr"], SETTINGS["master_port"]
    if backend == "nccl":
        torch.cuda.set_device(0)
    say("calls", torch=torch.__version__)
    if rank:
        wait_for_store(address, port)
    store = dist.TCPStore(  # type: ignore[attr-defined]  # no stubs
        address,
        port,
        is_master=rank == 0,
        timeout=timedelta(seconds=SETTINGS["limit_s"]),
        master_listen_fd=SETTINGS.get("listen_fd") if rank == 0 else None,
    )
    store.set(f"arrived/{rank}", "")
    say("arrived")
    store.wait([f"arrived/{each}" for each in range(world_size)])
    say("complete")
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=SETTINGS["group_s"])
    )
    say("group")
    tensor = torch.full((SETTINGS["numel"],), float(rank + 1), device="cuda" if backend == "nccl" else "cpu")
    begin = time.monotonic()
    dist.all_reduce(tensor)
    wanted = world_size * (world_size + 1) / 2
    is_right = bool((tensor == wanted).all())
    say("reduced", seconds=round(time.monotonic() - begin, 4), is_right=is_right)
    store.set(f"reduced/{rank}", "")
    store.wait([f"reduced/{each}" for each in range(world_size)])  # nobody leaves while another still reads
    if rank == 0:
        time.sleep(0.3)  # the store is here: the others' last answers are on their way
    os._exit(0)


if __name__ == "__main__":
    main()
