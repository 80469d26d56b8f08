"""Notifications: what is told, that it gets there, and that a run never notices when it does not."""

# ruff: noqa: E501  # tables of whole messages

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from agents import until
from disks import full, small_disk

from nodekit.deploy.commands import cli
from nodekit.deploy.host.files import append_private
from nodekit.deploy.notify import deliver, notify
from nodekit.deploy.notify.deliver import NotDelivered
from nodekit.deploy.notify.message import Message, Story
from nodekit.deploy.notify.notify import Notifier
from nodekit.deploy.records.events import Event, Follower, read
from nodekit.deploy.records.runs import Run
from nodekit.deploy.records.secret_files import notify_secrets
from nodekit.inventory.copied import copied
from nodekit.inventory.errors import KitError
from nodekit.inventory.load import dump, load_inventory
from nodekit.inventory.schema import Notify

SECRET = "hunter2-0123456789"
NO_PAUSES = (0.0, 0.0)
MESSAGE = Message(kind="start", run="lab-1", time=1.0, text="lab-1 has started\nkit status lab-1")


@dataclass
class Hook:
    """A real HTTP server that takes messages, or behaves badly."""

    behaviour: str = "fine"
    """fine, hang, reset, redirect, or the status to answer with."""
    got: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook/{SECRET}"


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    # What is under way gets there, though the machine may stand still for more than 5 s.
    monkeypatch.setattr(notify, "CLOSE_S", 60.0)
    known = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known.got.append((self.path, dict(self.headers), body))
            if known.behaviour == "hang":
                known.released.wait(30)
            elif known.behaviour == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                self.connection.close()
                return
            status = {"fine": 204, "hang": 204, "redirect": 307}.get(known.behaviour)
            self.send_response(status or int(known.behaviour))
            if known.behaviour == "redirect":
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a reset is meant
    known.port = server.server_port
    serving = threading.Thread(target=server.serve_forever, args=(0.01,))
    serving.start()
    yield known
    known.released.set()
    server.shutdown()
    server.server_close()
    serving.join()


def saved_run() -> Run:
    made = Run(
        run_id="lab-1",
        name="lab",
        inventory_path="/nowhere/lab.yaml",
        inventory={},
        command=None,
        created=1.0,
    )
    made.save()
    return made


@pytest.fixture
def run() -> Run:
    return saved_run()


def event(kind: str, time: float, node: str | None = None, **fields: Any) -> Event:
    return Event(time, node, kind, fields)


STORY = [
    event(
        "run-started",
        100,
        generation=0,
        nodes=["gpu1", "gpu2"],
        command=["python", "-u", "train.py", "--lr", "a b"],
    ),
    event("rendezvous", 101, "gpu1", attempt="0.0", members=["gpu1", "gpu2"]),
    event("first-step", 103, "gpu1", attempt="0.0", step=1),
    event("sample", 110, "gpu1", attempt="0.0", step=4120, total_steps=9000),
    event(
        "worker-failed", 112, "gpu2", attempt="0.0", rank=1, exitcode=1, error="Traceback …\nValueError: no\n"
    ),
    event("membership", 112.5, "gpu1", lost=1, waiting=0),
    event("unreachable", 113, None, about="gpu2", why="timed out"),
    event("rendezvous", 115, "gpu1", attempt="0.1", members=["gpu1"]),
    event("first-step", 118, "gpu1", attempt="0.1", step=4100),
    event("worker-failed", 130, "gpu1", attempt="0.1", rank=0, exitcode=-9, error=""),
    event("run-ended", 140, state="failed", verdict="gpu1: rank 0 ended with SIGKILL"),
    event("run-ended", 140.2, state="failed", verdict="the same, by another supervisor"),
]


LATE = [  # of a node that was out of sight when the run ended, and is read when it goes on
    event("worker-failed", 130, "gpu2", attempt="0.1", rank=1, exitcode=1, error="old"),
    event("membership", 131, "gpu2", lost=1, waiting=0),
]


def test_a_story_is_told_once_and_in_words() -> None:
    story = Story("lab-1")
    told = [message for each in STORY if (message := story.tell(each))]

    assert [(each.kind, each.node, each.text.split("\n")[0]) for each in told] == [
        ("start", None, "lab-1 has started on 2 nodes: train.py --lr 'a b'"),
        (
            "failure",
            "gpu2",
            "lab-1 failed on gpu2: rank 1 ended with exit status 1: ValueError: no (step 4,120 of 9,000)",
        ),
        ("recovery", "gpu1", "lab-1 trains again after 6.0 s, from step 4,100, on 1 node"),
        (
            "failure",
            "gpu1",
            "lab-1 failed on gpu1: rank 0 ended with signal 9: it wrote nothing (step 4,100 of 9,000)",
        ),
        ("end", None, "lab-1 has failed: gpu1: rank 0 ended with SIGKILL (step 4,100 of 9,000)"),
    ]
    assert {each.text.split("\n")[1] for each in told} == {"kit status lab-1"}
    assert (told[-1].state, told[1].step, told[1].total_steps) == ("failed", 4120, 9000)


def test_of_a_script_that_tells_no_steps_later_failures_are_told_too() -> None:
    """It tells of no first step either, after which a failure counts as overcome."""
    story = Story("lab-1")

    def texts(*events: Event) -> list[str]:
        return [message.text.split("\n")[0] for each in events if (message := story.tell(each))]

    def failed(when: float, attempt: str) -> Event:
        return event(
            "worker-failed", when, "gpu1", attempt=attempt, rank=0, exitcode=1, error=f"ValueError: {attempt}"
        )

    told = "lab-1 failed on gpu1: rank 0 ended with exit status 1: ValueError: {}"
    assert texts(event("workers-started", 100, "gpu1", attempt="0.0"), failed(500, "0.0")) == [
        told.format("0.0")
    ]
    assert texts(failed(900, "0.0")) == [], "its ranks have not been started again"
    assert texts(event("workers-started", 501, "gpu1", attempt="0.1"), failed(520, "0.1")) == [], (
        "it is the same"
    )
    assert texts(event("workers-started", 521, "gpu1", attempt="0.2"), failed(900, "0.2")) == [
        told.format("0.2")
    ]
    assert texts(event("workers-started", 901, "gpu1", attempt="0.3"), failed(9000, "0.3")) == [
        told.format("0.3")
    ]


def test_a_lost_node_is_named_and_one_out_of_sight_is_no_failure() -> None:
    story = Story("lab-1")
    for each in STORY[:4]:
        story.tell(each)

    assert story.tell(event("unreachable", 111, about="gpu2", why="timed out")) is None
    told = story.tell(event("membership", 112, "gpu1", lost=1, waiting=0))
    assert told is not None
    assert (told.kind, told.text.split("\n")[0]) == ("failure", "lab-1 has lost gpu2 (step 4,120 of 9,000)")


def test_a_broken_gpu_is_told_with_its_node() -> None:
    story = Story("lab-1")
    for each in STORY[:4]:
        story.tell(each)
    slight = {"gpu": 3, "what": "xid", "number": 63, "text": "Xid 63", "fatal": False}
    assert story.tell(event("gpu-error", 111, "gpu2", **slight)) is None
    told = story.tell(event("gpu-error", 112, "gpu2", **{**slight, "text": "it is lost", "fatal": True}))
    assert told is not None
    assert (told.kind, told.node) == ("failure", "gpu2")
    assert told.text.startswith(
        "lab-1 loses gpu2, of which GPU 3 is broken: it is lost (step 4,120 of 9,000)"
    )


def test_a_run_that_goes_on_begins_a_new_story() -> None:
    story = Story("lab-1")
    for each in STORY:
        story.tell(each)

    told = story.tell(event("run-started", 200, nodes=["gpu1"], command=["./train"], goes_on=True))

    assert told is not None
    assert told.text.startswith("lab-1 goes on on 1 node: ./train\n")


def test_a_webhook_gets_the_message_and_its_secret_header(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", hook.url)
    monkeypatch.setenv("TOKEN", f"Bearer {SECRET}")
    asked = Notify.model_validate(
        {"webhook": {"url_from": "HOOK", "headers_from": {"Authorization": "TOKEN"}}}
    )

    for way in deliver.ways(asked, dict(os.environ), None).values():
        way(MESSAGE)

    ((path, headers, body),) = hook.got
    assert path == f"/hook/{SECRET}"
    assert (headers["Authorization"], headers["Content-Type"]) == (f"Bearer {SECRET}", "application/json")
    assert body == {**vars(MESSAGE), "content": MESSAGE.text}


@pytest.mark.parametrize(
    ("behaviour", "why", "is_final"),
    [
        ("500", "the webhook answers HTTP 500", False),
        ("429", "the webhook answers HTTP 429", False),
        ("404", "the webhook answers HTTP 404", True),
        ("redirect", "the webhook answers HTTP 307", True),
        ("reset", "the webhook: Connection reset by peer", False),
        ("hang", "the webhook: TimeoutError", False),
    ],
)
def test_what_a_webhook_did_is_told_without_its_address(
    hook: Hook, monkeypatch: pytest.MonkeyPatch, behaviour: str, why: str, is_final: bool
) -> None:
    hook.behaviour = behaviour
    monkeypatch.setenv("HOOK", hook.url)
    asked = Notify.model_validate({"webhook": {"url_from": "HOOK"}}).webhook
    assert asked is not None

    with pytest.raises(NotDelivered) as raised:
        deliver.post(asked, os.environ, MESSAGE, timeout_s=0.3 if behaviour == "hang" else 60)

    assert (str(raised.value), raised.value.is_final) == (why, is_final)
    until(lambda: hook.got)  # its thread may come later than 0.3 s
    assert len(hook.got) == 1  # a redirect is not followed


@pytest.mark.parametrize(
    "url", [f"ftp://x/{SECRET}", f"https://[{SECRET}", f"http://h h/{SECRET}", f"http://a:{SECRET}/", SECRET]
)
def test_a_secret_that_is_no_url_is_not_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", url)
    asked = Notify.model_validate({"webhook": {"url_from": "HOOK"}}).webhook
    assert asked is not None

    with pytest.raises(NotDelivered) as raised:
        deliver.post(asked, os.environ, MESSAGE, timeout_s=0.3)

    assert SECRET not in str(raised.value)
    assert str(raised.value).startswith("the webhook: ")


def test_a_command_gets_the_message_on_stdin_and_in_its_environment(tmp_path: Path) -> None:
    script = (
        "import os, sys; open(sys.argv[1], 'w').write(sys.stdin.read() + '|' + os.environ['NODEKIT_TEXT'])"
    )
    (tmp_path / "my $HOME; dir").mkdir()

    deliver.run_command(
        (sys.executable, "-c", script, "a 'b' $HOME; c"), MESSAGE, folder=tmp_path / "my $HOME; dir"
    )

    body, _, text = (tmp_path / "my $HOME; dir" / "a 'b' $HOME; c").read_text().partition("|")
    assert json.loads(body)["run"] == "lab-1"
    assert text == MESSAGE.text


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("/no/such/program",), "program cannot be run: No such file or directory"),
        (("sh", "-c", "echo oh no >&2; exit 3"), "sh ended with exit status 3"),
        (("sh", "-c", "sleep 300 & wait"), "sh took longer than 0.3 s"),
    ],
)
def test_what_a_command_did_is_told(argv: tuple[str, ...], why: str) -> None:
    with pytest.raises(NotDelivered) as raised:  # conftest finds it if the sleep is still there at the end
        deliver.run_command(argv, MESSAGE, folder=None, timeout_s=0.3 if "0.3 s" in why else 60)

    assert (str(raised.value), raised.value.is_final) == (why, True)
    assert raised.value.said == ("oh no" if "oh no" in argv[-1] else "")


def written(run: Run, story: list[Event]) -> list[Event]:
    """The same events as who follows the run's file gets them."""
    for each in story:
        line = {"run": run.run_id, "time": each.time, "node": each.node, "kind": each.kind, **each.fields}
        append_private(str(run.folder / "events.jsonl"), json.dumps(line).encode() + b"\n")
    return Follower(run.folder).more()


def observed(run: Run, asked: dict[str, Any], story: list[Event]) -> Notifier:
    notifier = Notifier(run, Notify.model_validate(asked), os.environ, pauses_s=NO_PAUSES)
    for each in story:
        notifier.event(each)
    return notifier


def test_a_run_is_told_of_as_far_as_is_wanted(hook: Hook, run: Run) -> None:
    notifier = Notifier(
        run, Notify.model_validate({"on": ["failure", "end"], "webhook": {"url": hook.url}}), {}
    )
    notifier.see({"gpu1": {"progress": "4130/9000 epoch 1 loss 0.5"}, "gpu2": {"progress": None}})
    for each in STORY:
        notifier.event(each)
    notifier.close()

    assert [body["kind"] for _, _, body in hook.got] == ["failure", "failure", "end"]
    assert hook.got[0][2]["step"] == 4130
    assert read(run.folder) == []  # nothing went wrong


def test_no_secret_of_a_rank_s_last_words_is_told(hook: Hook, run: Run) -> None:
    error = f"401 for https://a.org/?key={SECRET} with {SECRET}"
    failed = event("worker-failed", 5, "a", attempt="0.0", rank=0, local_rank=0, world_size=1, exitcode=1,
                   when=5.0, log="x", error=error, kernel=[])  # fmt: skip
    run.token = SECRET
    observed(run, {"webhook": {"url": f"http://127.0.0.1:{hook.port}/"}, "on": ["failure"]}, [failed]).close()
    [(_, _, body)] = hook.got
    assert "https://a.org/?key=…" in body["text"]
    assert SECRET not in json.dumps(body)


def test_the_end_is_told_though_no_event_said_so(hook: Hook, run: Run) -> None:
    notifier = observed(run, {"webhook": {"url": hook.url}}, STORY[:4])
    run.finish("succeeded", "trained to the end")
    notifier.close()

    assert [body["kind"] for _, _, body in hook.got] == ["start", "end"]
    assert hook.got[-1][2]["text"].startswith("lab-1 is done: trained to the end (step 4,120 of 9,000)")


@pytest.mark.parametrize("behaviour", ["500", "reset"])
def test_a_dead_webhook_is_told_of_once(
    hook: Hook, run: Run, behaviour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook.behaviour = behaviour
    monkeypatch.setenv("HOOK", hook.url)

    observed(run, {"webhook": {"url_from": "HOOK"}}, STORY).close()

    (failed,) = read(run.folder)
    assert (failed.kind, failed.get("way")) == ("notify-failed", "webhook")
    assert len(hook.got) == 3 + 4  # one message three times, then each once
    written = b"".join(path.read_bytes() for path in run.folder.rglob("*") if path.is_file())
    assert SECRET.encode() not in written


def test_a_webhook_that_hangs_holds_nobody_up(hook: Hook, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "CLOSE_S", 0.2)
    hook.behaviour = "hang"
    story = [event("run-started", number, nodes=[]) for number in range(1, 200)]

    notifier = observed(run, {"webhook": {"url": hook.url}}, story)  # more than the queue takes
    until(lambda: hook.got)
    notifier.close()

    assert len(hook.got) == 1  # it still has the first: neither those events nor the end have waited for it
    assert notifier.num_waiting <= notify.MAX_WAITING


def test_of_two_supervisors_one_tells_and_the_other_takes_over(hook: Hook, run: Run) -> None:
    asked = {"webhook": {"url": hook.url}}
    story = written(run, STORY)
    first = observed(run, asked, story[:5])
    second = observed(run, asked, story[:5])
    first.close()
    for each in story:  # those that were told are not told again
        second.event(each)
    second.close()
    observed(run, asked, story[-1:]).close()

    assert [body["kind"] for _, _, body in hook.got] == ["start", "failure", "recovery", "failure", "end"]


def test_what_was_before_a_run_went_on_is_not_told_again(hook: Hook, run: Run) -> None:
    # The clock here was set back by a minute before it went on.
    resumed = event("run-started", 90, generation=1, nodes=["gpu1"], command=["./train"], goes_on=True)
    failed = event("worker-failed", 95, "gpu1", attempt="1.0", rank=0, exitcode=1, error="new")
    story = written(run, [*STORY, resumed, *LATE, event("agent-started", 91, "gpu2"), failed])

    observed(run, {"webhook": {"url": hook.url}}, story).close()

    assert [body["text"].split("\n")[0] for _, _, body in hook.got] == [
        "lab-1 goes on on 1 node: ./train",
        "lab-1 failed on gpu1: rank 0 ended with exit status 1: new (step 4,100 of 9,000)",
    ]


def test_each_end_of_a_run_that_goes_on_is_told(hook: Hook, run: Run) -> None:
    asked = {"on": ["failure", "end"], "webhook": {"url": hook.url}}
    ended = [STORY[0], event("run-ended", 110, state="stopped", verdict="stopped by kit down")]
    observed(run, asked, written(run, ended)).close()
    again = [
        event("run-started", 200, generation=1, nodes=["gpu1"], command=["./train"], goes_on=True),
        *(event("run-ended", time, state="succeeded", verdict="trained to the end") for time in (240, 240.2)),
    ]
    story = written(run, again)
    observed(run, asked, story[:-1]).close()
    observed(run, asked, story).close()  # another supervisor

    assert [body["state"] for _, _, body in hook.got] == ["stopped", "succeeded"]


def test_a_clock_that_jumped_silences_nobody(hook: Hook, run: Run) -> None:
    story = [
        STORY[0],
        event(
            "worker-failed", 110 + 3600, "gpu2", attempt="0.0", rank=1, exitcode=1, error="its clock is ahead"
        ),
        event("first-step", 114, "gpu1", attempt="0.1", step=5),
        event("worker-failed", 160, "gpu1", attempt="0.1", rank=0, exitcode=1, error="another"),
    ]
    notifier = observed(run, {"webhook": {"url": hook.url}}, written(run, story))
    run.finish("failed", "another")
    notifier.close()

    told = [(body["kind"], body["text"].split("\n")[0]) for _, _, body in hook.got]
    assert [kind for kind, _ in told] == ["start", "failure", "recovery", "failure", "end"]
    assert told[2][1] == "lab-1 trains again, from step 5", "how long that took is not known"


def test_a_script_that_writes_no_step_numbers_silences_nobody(hook: Hook, run: Run) -> None:
    story = [
        STORY[0],
        event("worker-failed", 110, "gpu2", attempt="0.0", rank=1, exitcode=1, error="one"),
        event("first-step", 114, "gpu1", attempt="0.1", step=None),
    ]
    notifier = observed(run, {"webhook": {"url": hook.url}}, written(run, story))
    run.finish("failed", "another")
    notifier.close()
    told = [body["text"].split("\n")[0] for _, _, body in hook.got if body["kind"] == "recovery"]
    assert told == ["lab-1 trains again after 4.0 s"]


def test_what_was_told_is_known_though_the_disk_was_full(
    hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "small"))
    with small_disk(tmp_path / "small"):
        run = saved_run()
        story = written(run, STORY)
        asked = {"webhook": {"url": hook.url}}
        first = observed(run, asked, story[:1])
        with full(tmp_path / "small"):
            for each in story[1:9]:
                first.event(each)
            first.close()
        observed(run, asked, story).close()

    assert [body["kind"] for _, _, body in hook.got] == ["start", "failure", "recovery", "failure", "end"]


def test_a_secret_that_is_not_set_is_found_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_HOOK", raising=False)
    (tmp_path / "lab.yaml").write_text("hosts: {a: }\nnotify: {webhook: {url_from: NO_SUCH_HOOK}}\n")
    inventory = load_inventory(tmp_path / "lab.yaml")

    with pytest.raises(
        KitError, match=r"notify\.webhook names NO_SUCH_HOOK, not set in this environment; export"
    ):
        notify_secrets(inventory)

    monkeypatch.setenv("NO_SUCH_HOOK", SECRET)
    assert notify_secrets(inventory) == {"NO_SUCH_HOOK": SECRET}
    assert SECRET not in json.dumps(dump(inventory))


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("{on: [end]}", "notify: found neither command nor webhook, wanted one, as command: [notify-send, kit]"),
        ("{command: notify-send kit}", 'notify.command: found "notify-send kit", wanted a list: write ["notify-send", "kit"]'),
        ("{command: [a], on: [begin]}", 'notify.on[0]: found "begin", wanted start, failure, recovery or end'),
        ("{webhook: {}}", "notify.webhook: found neither url nor url_from, wanted one of the two"),
        ("{webhook: {url: https://a/b, url_from: X}}", "notify.webhook: found url beside url_from, wanted one of the two"),
        (f"{{webhook: {{url: https://me:{SECRET}@a/}}}}", "notify.webhook.url: found something else, wanted an http or https URL; one with"),
        (f"{{webhook: {{url: 'https://a/?token={SECRET}'}}}}", "notify.webhook.url: found something else, wanted an http"),
        (f"{{webhook: {{url: 'https://[{SECRET}'}}}}", "notify.webhook.url: found something else, wanted an http"),
        (f"{{webhook: {{url: https://hooks.slack.com/services/{SECRET}}}}}", "notify.webhook.url: found a URL of hooks.slack.com, which is a secret as a whole, wanted url_from"),
        (f"{{webhook: {{url_from: 'https://a/{SECRET}'}}}}", "notify.webhook.url_from: found text that is no name, wanted only the name of a variable"),
        ("{webhook: {url: http://a/b, headers_from: {X-Key: KEY}}}", "notify.webhook.headers_from: found beside an http url, wanted https"),
        ("{webhook: {url: https://a, header: x}}", "notify.webhook.header: found an unknown key, wanted headers_from (valid here: headers_from, url, url_from)"),
    ],
)  # fmt: skip
def test_mistakes_are_told_by_their_line(tmp_path: Path, written: str, problem: str) -> None:
    (tmp_path / "lab.yaml").write_text(f"hosts: {{a: }}\nnotify: {written}\n")

    with pytest.raises(KitError) as raised:
        load_inventory(tmp_path / "lab.yaml")

    assert str(raised.value).startswith(f"{tmp_path}/lab.yaml:2: {problem}")
    assert SECRET not in str(raised.value)


def test_nobody_is_told_of_a_drill(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text("hosts: {a: }\nnotify: {command: [notify-send, kit]}\n")

    (tmp_path / "copy.yaml").write_text(copied(file, name="lab-drill"))

    assert load_inventory(file).notify is not None
    assert load_inventory(tmp_path / "copy.yaml").notify is None


def test_kit_notify_sends_a_test_each_way(
    hook: Hook, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", hook.url)
    file = tmp_path / "lab.yaml"
    file.write_text(
        "hosts: {a: }\nnotify: {webhook: {url_from: HOOK}, command: [sh, -c, 'cat > told; echo no >&2; exit 2']}\n"
    )

    assert cli.main(["notify", str(file)]) == 0
    assert hook.got == []
    assert cli.main(["notify", "--test", str(file)]) == 1

    output = capsys.readouterr()
    assert output.out.splitlines()[-1] == "webhook  the URL in HOOK  was told"
    assert output.err == "kit: command: sh ended with exit status 2\nno\n"
    assert [body["kind"] for _, _, body in hook.got] == ["test"]
    assert json.loads((tmp_path / "told").read_text())["kind"] == "test"
    assert SECRET not in output.out + output.err
