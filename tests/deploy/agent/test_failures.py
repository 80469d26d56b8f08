"""Which failure was the first, and what of a log is its traceback."""

import dataclasses
import re

import pytest

from nodekit.deploy.agent.ranks.failures import (
    Failure,
    awaited,
    blames_another,
    first_cause,
    how_it_ended,
    is_cause,
    is_secondary,
    last_traceback,
    last_words,
    line_of,
    never_starts,
)

BOOM = 'Traceback (most recent call last):\n  File "t.py", line 6, in <module>\n    f()\nValueError: boom'
GLOO = (
    'Traceback (most recent call last):\n  File "t.py", line 9, in <module>\n    dist.all_reduce(t)\n'
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[10.0.0.1]:38275. This is typically caused by a remote worker crashing."
)


NETWORK = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error"
)


def failure(rank: int, when: float, error: str, exitcode: int = 1) -> Failure:
    return Failure(
        node=f"gpu{rank}",
        rank=rank,
        world_size=2,
        attempt="0.0",
        exitcode=exitcode,
        when=when,
        log="x.log",
        error=error,
    )


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        pytest.param([failure(0, 2.0, GLOO), failure(1, 1.0, BOOM)], 1, id="the cause came first"),
        pytest.param([failure(0, 1.0, GLOO), failure(1, 2.0, BOOM)], 1, id="clocks lie, words do not"),
        pytest.param([failure(0, 1.0, "", -15), failure(1, 2.0, BOOM)], 1, id="our own SIGTERM is no cause"),
        pytest.param([failure(0, 1.0, "", -9), failure(1, 2.0, GLOO)], 0, id="a killed rank writes nothing"),
        pytest.param([failure(0, 2.0, BOOM), failure(1, 1.0, BOOM)], 1, id="both raised: the earlier one"),
        pytest.param([failure(0, 2.0, GLOO), failure(1, 1.0, GLOO)], 1, id="only echoes: the earlier one"),
        pytest.param([failure(2, 1.0, BOOM)], 2, id="alone"),
        pytest.param([failure(0, 1.0, NETWORK), failure(1, 2.0, BOOM)], 1, id="the network gives way"),
        pytest.param([failure(0, 1.0, NETWORK), failure(1, 60.0, BOOM)], 0, id="not to what came much later"),
        pytest.param([failure(0, 1.0, GLOO), failure(1, 60.0, "", -15)], 1, id="told to end by someone else"),
        pytest.param(
            [failure(0, 1.0, "lost: Broken pipe", -9), failure(1, 2.0, BOOM)], 0, id="words of before"
        ),
    ],
)
def test_the_first_cause_is_nobodys_echo(failures: list[Failure], first: int) -> None:
    found = first_cause(failures)
    assert found is not None
    assert found.rank == first


def test_without_failures_there_is_no_cause() -> None:
    assert first_cause([]) is None


@pytest.mark.parametrize(
    "message",
    [
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, ncclRemoteError: A call failed",
        "[rank3]:[E] ProcessGroupNCCL.cpp:616] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)",
        "RuntimeError: Gloo connectFullMesh failed with [/gloo/transport/tcp/pair.cc:144] no error\nBroken pipe",
        "torch.distributed.DistNetworkError: Connection reset by peer",
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation",
        "RuntimeError: Application timeout caused pair closure",
    ],
)
def test_the_errors_of_those_who_lost_a_peer_are_echoes(message: str) -> None:
    assert blames_another(failure(0, 0.0, message))


@pytest.mark.parametrize(
    "message",
    [
        BOOM,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "ModuleNotFoundError: No module named 'wandb'",
        "FileNotFoundError: [Errno 2] No such file or directory: 'data.bin'",
        pytest.param(
            'Traceback (most recent call last):\n  File "/lib/python3.11/multiprocessing/connection.py", line 395, '
            "in _recv\n    chunk = read(handle, remaining)\nConnectionResetError: [Errno 104] Connection reset by peer",
            id="a DataLoader worker of its own was lost",
        ),
        "",
    ],
)
def test_errors_of_the_job_itself_are_no_echoes(message: str) -> None:
    assert not blames_another(failure(0, 0.0, message))


def test_who_waited_in_vain_is_charged_but_not_blamed() -> None:
    error = "torch.distributed.DistStoreError: wait timeout after 6000ms, keys: /default_pg/0//cpu//0/3"
    assert not is_secondary(error, 1)
    assert blames_another(failure(0, 0.0, error))
    assert not is_cause(error, 1)
    assert not is_cause("RuntimeError: Ranks 3 failed to pass monitoredBarrier in 6000 ms", 1)
    assert awaited([failure(0, 0.0, error)]) == (3,)
    assert awaited([failure(0, 0.0, error), failure(3, 0.0, BOOM)]) == (), "it has failed itself"


@pytest.mark.parametrize("exitcode", [-15, 143])
def test_who_was_told_to_end_has_not_failed_by_itself(exitcode: int) -> None:
    assert is_secondary("", exitcode)


def test_an_error_that_ends_with_status_2_is_no_wrong_usage() -> None:
    usage = "usage: train.py [-h]\ntrain.py: error: the following arguments are required: DATA"
    assert never_starts(usage, 2)
    assert not never_starts(f"{BOOM}\nusage: what the user's own error says", 2)


def test_what_an_agent_wrote_down_counts_as_far_as_it_makes_sense_and_by_our_clock() -> None:
    found = Failure.of(
        "n0", {"rank": float("nan"), "exitcode": float("inf"), "when": 100.0}, clock_offset=30.0
    )
    assert (found.rank, found.exitcode, found.when) == (0, 1, 70.0)


def test_before_an_aborts_own_words_what_was_said_last_is_kept() -> None:
    dump = 'Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File "w.py", line 3 in wait\n\n'
    dump += 'Current thread 0x2 (most recent call first):\n  File "t.py", line 9 in step\n'
    dump += '  File "/k/deploy/forkserver.py", line 1 in _run\n'
    said = (
        "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  Watchdog caught"
    )
    said += " collective operation timeout: WorkNCCL(SeqNum=4)\n"
    found = last_words(f"step 1\n{said}frame #0: c10::Error\n{dump}", -6)
    assert found == f'step 1\n{said}Fatal Python error: Aborted\n  File "t.py", line 9 in step'
    assert is_secondary(found, -6)
    assert last_words(f"{BOOM}\nterminate called without an active exception\n{dump}", -6) == BOOM


@pytest.mark.parametrize(
    "noise", ["wandb: run history: loss 0.3", "\x00\ufffd\x1b]0;a title\x07\x80", "saved in 3.2 s"]
)
def test_what_is_printed_after_an_exception_is_not_its_reason(noise: str) -> None:
    """Exit handlers and other threads still write then."""
    found = last_words(f"{BOOM}\n{noise}\n", 1)
    assert line_of(found) == "ValueError: boom"
    assert not re.search(r"[\x00-\x08\x0e-\x1f]", found)
    assert never_starts(last_words(f"{BOOM.replace('ValueError', 'ImportError')}\n{noise}\n", 1), 1)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("", ""),
        ("loading\nusage: train.py", "usage: train.py"),
        (f"{BOOM}\nmore of it\nand more", "ValueError: boom"),
        (
            BOOM.replace(" boom", " \nAutoTokenizer needs sentencepiece"),
            "ValueError: AutoTokenizer needs sentencepiece",
        ),
    ],
)
def test_one_line_tells_of_an_error(error: str, line: str) -> None:
    assert line_of(error) == line


def test_a_killed_rank_has_no_words_of_its_end() -> None:
    assert last_words(f"{BOOM}\nwent on without a cache\n", -9).splitlines()[-1] == "went on without a cache"


def test_a_users_text_about_peers_far_above_the_error_makes_no_echo() -> None:
    text = "\n".join(["note: Connection reset by peer", *["step"] * 20, "ValueError: boom"])
    assert not blames_another(dataclasses.replace(failure(0, 0.0, BOOM), error=text))


def test_the_traceback_is_taken_without_torchs_rank_prefix_and_what_came_before() -> None:
    log = "step 1\nstep 2\n" + "\n".join(f"[rank1]: {line}" for line in BOOM.splitlines())
    log += "\n[rank1]:[W1121 ProcessGroup.cpp:12] Warning: destroy_process_group() was not called\n"
    assert last_traceback(log) == BOOM


def test_of_a_line_without_end_only_the_beginning_is_kept() -> None:
    found = last_words(f"{BOOM} {'x' * 60_000}\n", 1)
    assert found.startswith(BOOM)
    assert len(found) < 3_000


def test_the_last_words_of_an_aborted_interpreter_are_no_part_of_the_message() -> None:
    assert last_traceback(BOOM + "\nterminate called without an active exception\n") == BOOM


def test_of_a_chain_of_tracebacks_the_last_is_taken() -> None:
    first = BOOM.replace("boom", "first")
    chain = f"{first}\n\nDuring handling of the above exception, another exception occurred:\n\n{BOOM}\n"
    assert last_traceback(chain) == BOOM


def test_a_message_of_several_lines_is_kept() -> None:
    text = BOOM + "\nexpected 4 rows\ngot 5 rows\n\nunrelated\n"
    assert last_traceback(text) == BOOM + "\nexpected 4 rows\ngot 5 rows"


def test_without_a_traceback_the_last_lines_are_what_there_is() -> None:
    assert last_traceback("one\n\ntwo\nkit: cannot run 'x'\n") == "one\ntwo\nkit: cannot run 'x'"


def test_a_very_deep_traceback_is_shortened_in_its_middle() -> None:
    frames = "".join(f'  File "r.py", line {n}, in f\n    f()\n' for n in range(500))
    found = last_traceback(
        f"Traceback (most recent call last):\n{frames}RecursionError: too deep\n"
    ).splitlines()
    assert len(found) == 60
    assert found[0].startswith("Traceback")
    assert found[-1] == "RecursionError: too deep"


def test_how_a_worker_ended_is_said_by_the_signals_name() -> None:
    assert how_it_ended(1) == "exit status 1"
    assert how_it_ended(-11) == "killed by SIGSEGV"
    assert how_it_ended(-9) == "killed by SIGKILL"
