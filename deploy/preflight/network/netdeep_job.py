"""The program of `kit check --deep` on every host: a rendezvous, a process group and one all-reduce.

Its source, with ``SETTINGS`` before it, is sent to each host's python on stdin. The end of stdin means that the result
is no longer needed. It prints a line of JSON per stage and rank of this host: with NCCL there is one for each GPU.
"""

import gc
import json
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

SETTINGS: dict[str, Any] = globals().get("SETTINGS", {})
TIMES = 5  # number of all-reduces that are timed, once NCCL has started
CONNECT_S = 2.0
STARTED = time.monotonic()
LOCAL = {"rank": 0}


def say(stage: str, **more: object) -> None:
    """Print the stage."""
    line = {"stage": stage, "s": round(time.monotonic() - STARTED, 3), "local_rank": LOCAL["rank"], **more}
    # As one write: the other ranks of this host write to the same pipe.
    print(json.dumps(line) + "\n", end="", flush=True)


def start_others(number: int) -> "threading.Thread | None":
    """Fork this host's other ranks, before there are threads; return the thread that waits for them (None in a child).

    If a rank fails, this process ends with its status: kit reads one status per host.
    """
    pids = []
    for local_rank in range(1, number):
        if not (pid := os.fork()):
            LOCAL["rank"] = local_rank
            if "listen_fd" in SETTINGS:
                os.close(SETTINGS["listen_fd"])  # so that the others are refused once rank 0 has ended
            return None
        pids.append(pid)

    def wait() -> None:
        for _ in pids:
            if status := os.waitstatus_to_exitcode(os.wait()[1]):
                os._exit(status if status > 0 else 128 - status)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def end_with_stdin() -> None:
    """Exit at the end of stdin."""
    while os.read(0, 4096):  # not sys.stdin: its lock would be held as the interpreter shuts down
        pass
    os._exit(2)


def wait_for_store(address: str, port: int) -> None:
    """Wait until the store can be reached; print the problem each time it changes."""
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
    """Run a rendezvous, a process group and an all-reduce."""
    others = start_others(SETTINGS.get("num_local_ranks", 1))
    threading.Thread(target=end_with_stdin, daemon=True).start()
    watchdog = threading.Timer(SETTINGS["limit_s"], os._exit, (3,))
    watchdog.daemon = True
    watchdog.start()
    say("imports")
    gc.disable()  # the imports leave no garbage, and collections would take a fifth of their time
    import torch
    import torch.distributed as dist

    rank, world_size, backend = SETTINGS["rank"] + LOCAL["rank"], SETTINGS["world_size"], SETTINGS["backend"]
    address, port = SETTINGS["master_addr"], SETTINGS["master_port"]
    if backend == "nccl":
        torch.cuda.set_device(LOCAL["rank"])
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
    begin = time.monotonic()
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=SETTINGS["group_s"])
    )
    say("group")
    tensor = torch.full((SETTINGS["numel"],), float(rank + 1), device="cuda" if backend == "nccl" else "cpu")
    start_s = 0.0
    if backend == "gloo":
        begin = time.monotonic()
    dist.all_reduce(tensor)
    wanted = world_size * (world_size + 1) / 2
    is_right = bool((tensor == wanted).all())
    seconds = time.monotonic() - begin
    if backend == "nccl":  # the first one has started it, which takes seconds
        start_s = seconds
        begin = time.monotonic()
        for _ in range(TIMES):
            dist.all_reduce(tensor)
        torch.cuda.synchronize()
        seconds = (time.monotonic() - begin) / TIMES
    say("reduced", seconds=round(seconds, 6), start_s=round(start_s, 3), is_right=is_right)
    store.set(f"reduced/{rank}", "")
    store.wait([f"reduced/{each}" for each in range(world_size)])  # no rank leaves before all have finished
    if others is not None:
        others.join()
    if rank == 0:
        time.sleep(0.3)  # the store is in this process: let the last answers be sent
    os._exit(0)


if __name__ == "__main__":
    main()
