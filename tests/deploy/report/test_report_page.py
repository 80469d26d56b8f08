"""`kit report`'s page: in a browser, for a screen reader, on paper; nothing of a run can break out of it."""

import dataclasses
import itertools
import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_up_run
import pytest
import warm_agents
from kit_runs import Kit
from made_up_run import SECRET
from places import ROOT
from playwright.sync_api import Page, sync_playwright

from nodekit.deploy.connect.cluster import SshOptions
from nodekit.deploy.host.logs import points
from nodekit.deploy.host.schema import Guess
from nodekit.deploy.output.redact import LEFT_OUT, Redactor
from nodekit.deploy.report import charts, report, report_page
from nodekit.deploy.story.history import History

CHROMIUM = "/usr/bin/chromium"
PARTS = [name for _, name in report_page.PARTS]
WIDTHS = (375, 1100, 1600)

# For each text in sight: how far it stands out from what is painted below it, by WCAG 2's formula.
LOW_CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) =>
    0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const found = [];
  for (const element of document.querySelectorAll("main *, header *, nav *, footer *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || ["title", "desc", "option", "SCRIPT"].includes(element.tagName) || !element.checkVisibility()) continue;
    const style = getComputedStyle(element), isDrawn = element instanceof SVGElement;
    let ground = null;
    if (isDrawn) {
      const below = element.parentElement.querySelector("rect");
      if (element.classList.contains("inside") && below) ground = rgba(getComputedStyle(below).fill);
    }
    for (let up = element; up && !ground; up = up.parentElement) {
      const colour = rgba(getComputedStyle(up).backgroundColor);
      if (colour[3] === 255) ground = colour;
    }
    const ink = rgba(isDrawn ? style.fill : style.color);
    const [dark, bright] = [light(ink), light(ground)].sort((a, b) => a - b);
    const contrast = (bright + 0.05) / (dark + 0.05);
    if (contrast < 4.5) found.push([element.tagName, element.className.baseVal ?? element.className,
      element.textContent.trim().slice(0, 30), contrast]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with all that can happen."""
    path = tmp_path_factory.mktemp("report") / "it's a run; $HOME.html"
    report.write(path, page_of(made_up_run.events()))
    return path


def page_of(events: list[Any], guess: Guess | None = None, **changes: Any) -> str:
    run = dataclasses.replace(made_up_run.run(), **changes)
    redactor = Redactor(run.inventory, known=[run.token])
    events = [dataclasses.replace(event, fields=redactor.tree(event.fields)) for event in events]
    return report_page.page(
        report_page.Source(
            run=run,
            history=History.of(events, now=made_up_run.T0 + 10_000, min_nodes=2),
            events=events,
            redactor=redactor,
            written="kit on a day",
            guess=guess,
        )
    )


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    """One for all tests: to open another costs more than to show a report."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_page()
        browser.close()


class Seen:
    """A page with what it asked the network for and what it complained of."""

    def __init__(self, tab: Page, path: Path, *, width: int = 1280, scheme: Any = "light") -> None:
        self.requests: list[str] = []
        self.refused: list[str] = []
        self.complaints: list[str] = []
        self.page = tab
        self._listeners: dict[Any, Any] = {
            "requestfailed": lambda request: self.refused.append(f"{request.url} {request.failure}"),
            "request": lambda request: self.requests.append(request.url),
            "console": lambda message: self.complaints.append(message.text),
            "pageerror": lambda error: self.complaints.append(str(error)),
            "dialog": lambda dialog: (self.complaints.append("a dialog"), dialog.dismiss()),
        }
        tab.goto("about:blank")
        for event, listener in self._listeners.items():
            tab.on(event, listener)
        tab.set_default_timeout(20_000)
        tab.set_viewport_size({"width": width, "height": 900})
        tab.emulate_media(media="screen", color_scheme=scheme)
        tab.mouse.move(0, 0)
        tab.goto(path.as_uri())

    def close(self) -> None:
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)


@pytest.fixture
def seen(tab: Page, page_path: Path) -> Iterator[Seen]:
    seen = Seen(tab, page_path)
    yield seen
    seen.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_its_window_and_every_text_stands_out(
    tab: Page, page_path: Path, scheme: str, width: int
) -> None:
    seen = Seen(tab, page_path, width=width, scheme=scheme)
    seen.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    if width >= 1100:  # the attempts are not cut off
        parts = "[...document.querySelectorAll('#timeline .scroll')]"
        assert seen.page.evaluate(f"{parts}.every((each) => each.scrollWidth <= each.clientWidth)")
    ground = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(13, 17, 23)")
    assert seen.page.evaluate(LOW_CONTRAST) == []
    assert seen.complaints == []
    seen.close()


def test_no_request_leaves_the_page_and_no_script_of_a_run_runs(seen: Seen, page_path: Path) -> None:
    """A node's log says <script>, an image that loads, and so does the verdict."""
    text = seen.page.inner_text("main")
    assert made_up_run.MARKUP in text  # as it was written, to be read
    assert made_up_run.MARKUP not in page_path.read_text()
    assert seen.page.evaluate("document.querySelectorAll('main script, main img, [onerror]').length") == 0
    assert {url for url in seen.requests if not url.startswith("data:")} == {page_path.as_uri()}
    assert seen.complaints == []
    # Were there a hole, the page's policy would still let nothing out, and nothing run.
    with seen.page.expect_event("requestfailed"):  # the browser tells of it a moment later
        seen.page.evaluate("""() => {
            const script = document.createElement("script");
            script.textContent = "window.ran = true";
            document.body.append(script);
            const image = document.createElement("img");
            image.src = "http://127.0.0.1:9/x.png";
            document.body.append(image);
        }""")
    assert seen.page.evaluate("window.ran") is None
    assert any("Content Security Policy" in text for text in seen.complaints)
    assert seen.refused == ["http://127.0.0.1:9/x.png csp"]


def test_a_screen_reader_finds_landmarks_headings_and_the_words_of_each_chart(seen: Seen) -> None:
    page = seen.page
    for role in ("banner", "main", "contentinfo", "search"):
        page.evaluate("document.getElementById('event-list').open = true")
        assert page.get_by_role(role).count() == 1, role  # type: ignore[arg-type]
    assert page.get_by_role("navigation", name="Parts of this report").get_by_role("link").count() == len(
        PARTS
    )
    headings = page.get_by_role("heading", level=2).all_inner_texts()
    assert len(headings) == len(PARTS)
    assert page.get_by_role("heading", level=1).inner_text() == "lab-1122-061500-3f2a"
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((each) => +each.tagName[1])")
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    for name in ("Loss", "Evaluated: accuracy", "Throughput", "Goodput", "GPU use", "Network, received"):
        assert page.get_by_role("img", name=name, exact=True).count() == 1, name
    timeline = page.get_by_role("img", name="Timeline of nodes and attempts")
    assert "gpu3 trained for" in timeline.locator("desc").first.text_content()  # type: ignore[operator]
    # Nothing has a role without a name, and each table says what it is.
    unnamed = """[...document.querySelectorAll("svg[role=img]")].filter((each) =>
        ["aria-labelledby", "aria-describedby"].some((name) =>
            !document.getElementById(each.getAttribute(name))?.textContent.trim())).length"""
    assert page.evaluate(unnamed) == 0
    assert page.evaluate("document.querySelectorAll('table:not(:has(> caption))').length") == 0
    assert page.evaluate("document.querySelectorAll('th:not([scope])').length") == 0
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))
    assert page.evaluate("document.documentElement.lang") == "en"


def test_every_control_can_be_reached_and_used_by_keyboard(seen: Seen) -> None:
    page = seen.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0  # in sight now
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
    page.evaluate("""() => {
        const wanted = "a[href], summary, input, select, [tabindex='0']";
        window.left = new Set([...document.querySelectorAll(wanted)].filter((each) => each.checkVisibility()));
        window.order = [...window.left];
        window.reached = [];
        document.addEventListener("focusin", (event) => {
            window.left.delete(event.target); window.reached.push(event.target);
            const style = getComputedStyle(event.target);
            if (style.outlineStyle === "none" || style.outlineWidth === "0px") window.unseen = event.target.outerHTML;
        });
    }""")
    page.locator(".skip").focus()
    for _ in range(page.evaluate("window.order.length") + 2):
        page.keyboard.press("Tab")
    assert page.evaluate("[...window.left].map((each) => each.outerHTML.slice(0, 80))") == []
    assert page.evaluate("window.unseen") is None
    assert page.evaluate("""window.reached.slice(1).every((each, number) => each.className === "skip" ||
        each === document.body || !!(window.reached[number].compareDocumentPosition(each) & 4))""")
    # The events are unfolded and filtered without a mouse.
    page.locator("#event-list > summary").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.type("boom")
    assert re.fullmatch(r"1 of \d+ shown", page.locator("output").inner_text())
    assert page.locator(".events tbody tr:visible").count() == 1
    page.get_by_role("searchbox", name="Text").fill("")
    page.locator("select[name=kind]").select_option("worker-failed")
    assert page.locator(".events tbody tr:visible").count() == 2
    page.locator("select[name=node]").select_option("gpu4")
    assert page.locator(".events tbody tr:visible").count() == 1


def test_what_is_pointed_at_in_a_chart_is_said(seen: Seen) -> None:
    figure = seen.page.locator("figure", has=seen.page.get_by_role("heading", name="Loss", exact=True)).first
    figure.locator("svg.chart").scroll_into_view_if_needed()
    box = figure.locator("svg.chart").bounding_box()
    assert box is not None
    seen.page.mouse.move(box["x"] + 57, box["y"] + box["height"] / 2)
    assert figure.locator(".readout").inner_text().startswith("step 1 · 2.3")
    seen.page.mouse.move(box["x"] + box["width"] - 21, box["y"] + box["height"] / 2)
    assert figure.locator(".readout").inner_text().startswith("step 1,9")
    assert seen.complaints == []


def test_it_prints(seen: Seen, tmp_path: Path) -> None:
    data = seen.page.pdf(path=str(tmp_path / "report.pdf"), format="A4", print_background=True)
    assert data.startswith(b"%PDF")
    seen.page.emulate_media(media="print")
    seen.page.set_viewport_size({"width": 718, "height": 1000})  # of A4 between its margins
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 718
    assert not seen.page.locator("nav").is_visible()
    assert seen.page.get_by_role("img", name="Loss", exact=True).is_visible()
    assert seen.page.evaluate("getComputedStyle(document.querySelector('#failures pre')).maxHeight") == "none"
    seen.page.emulate_media(media="print", color_scheme="dark")
    assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_the_page_says_what_the_run_was(seen: Seen) -> None:
    text = " ".join(seen.page.inner_text("main").split())
    history = History.of(made_up_run.events(), now=0, min_nodes=2)
    assert f"{history.goodput.share:.1%} of" in text
    for said in ("Step 2,000 of 2,000", "Best accuracy", "rank 1 on gpu3", "failed first", "gpu3 is out", "412 MB",
                 "torch 2.13.0", "4 attempts in 3 generations"):  # fmt: skip
        assert said in text, said
    assert "ended because of another" in text  # gpu4, which only lost its peer


def test_no_secret_and_no_value_of_a_variable_is_in_the_page(page_path: Path) -> None:
    html = page_path.read_text()
    for secret in (made_up_run.SECRET, "a common value", made_up_run.run().token):
        assert secret not in html
    assert LEFT_OUT in html
    assert "WANDB_API_KEY" in html  # that there was one, may be known
    assert "HF_TOKEN" in html


def test_the_page_of_a_script_that_tells_no_step_does_not_say_that_it_trained_nothing() -> None:
    told = ("first-step", "sample", "evaluation", "resumed", "snapshot")
    events = [each for each in made_up_run.events() if each.kind not in told]
    events = [
        dataclasses.replace(each, fields={**each.fields, "step": None, "total_steps": None})
        for each in events
    ]
    guess: Guess = {"step": None, "total_steps": None, "epoch": 3, "loss": 0.5}
    html = page_of(events, guess=guess)
    for said in ("~epoch 3", "by what it printed", "gpu1 ran for", "running: the script tells no steps",
                 "is not known: no step was told", "$NODEKIT_PROGRESS_FILE"):  # fmt: skip
        assert said in html, said
    for said in ("trained for 0.0 s", "trained steps that count", "until the first step", ">0.0%</strong>"):
        assert said not in html, said


def test_a_run_that_has_only_begun_has_a_page_too() -> None:
    for events in ([], made_up_run.events()[:3]):
        html = page_of(events, state="starting", ended=None, verdict="", nodes={})
        assert ("No node has met another yet." in html) == (not events)
        assert "No rank has failed." in html


# --- secrets ---


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("python train.py --api-key abc123 --epochs 3", "python train.py --api-key … --epochs 3"),
        ("--wandb_token=abc123", "--wandb_token=…"),
        ("password: hunter2", "password: …"),
        ('{"client_secret": "abc"}', '{"client_secret": "…"}'),
        ("https://me:pw@example.org/x", "https://…@example.org/x"),
        ("Authorization: Bearer abcdefghijklmnop", "Authorization: Bearer …"),
        ("https://hooks.slack.com/services/T0/B0/xyz", "https://hooks.slack.com/…"),
        ("used hf_abcdefghijklmnopqrst here", "used … here"),
        ("AKIAABCDEFGHIJKLMNOP", "…"),
        ("0123456789abcdef0123456789abcdef01234567", "…"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", "…"),
        ("KeyError: 'token'", "KeyError: 'token'"),
        ("the tokenizer has 5 tokens per word", "the tokenizer has 5 tokens per word"),
        ("monkey=3 turkey: 4", "monkey=3 turkey: 4"),
        ("value-of-mine in a path", "… in a path"),
        ("401 for url: https://a.org/v1?key=Zm9v&x=1", "401 for url: https://a.org/v1?key=…&x=1"),
        (
            "https://s3.org/b?X-Amz-Date=1&X-Amz-Signature=ab#f",
            "https://s3.org/b?X-Amz-Date=1&X-Amz-Signature=…",
        ),
        ("https://b.net/c?sv=2&amp;sig=a%2Fb&amp;sp=r", "https://b.net/c?sv=2&amp;sig=…&amp;sp=r"),
        ("https://a.org/#access_token=abc", "https://a.org/#access_token=…"),
        ("https://a.org/x?page=2&keys=3", "https://a.org/x?page=2&keys=3"),
        ("https://me:p@ss@a.org/x?to=you@b.org", "https://…@a.org/x?to=you@b.org"),
        ("url=https://a.org?api_key=abc", "url=https://a.org?api_key=…"),
        ('{"error": "{\\"password\\": \\"a b\\"}"}', '{"error": "{\\"password\\": \\"…\\"}"}'),
        ("{'secret': 'two words', 'n': 3}", "{'secret': '…', 'n': 3}"),
        ("nvapi-abcdefghijklmnopqrst", "…"),
        ("with a/slash-of-mine", "with …"),
        ("https://a.org/a%2Fslash-of-mine", "https://a.org/…"),
        ("primary_key=3, code: 404", "primary_key=3, code: 404"),
    ],
)
def test_what_looks_like_a_secret_is_left_out(text: str, shown: str) -> None:
    inventory = {"job": {"env": {"MINE": "value-of-mine", "OTHER": "a/slash-of-mine"}}}
    assert Redactor(inventory).text(text) == shown


NASTY = {
    "word": "a",
    "words": "a ",
    "dots": "a.",
    "dashes": "-",
    "options": "--a ",
    "hex": "0123456789abcdef",
    "underscores": "_",
    "spaces": "token ",
    "assignments": "token=",
    "quotes": "token='",
    "both quotes": "token='token=\"",
    "colons": "a:",
    "escapes": "token=\\\\",
    "tokens": "token",
    "urls": "https://",
    "users": "a://b@",
    "hooks": "https://hooks.",
    "at": "://a",
    "bearers": "bearer ",
    "jwt": "eyJ-",
    "jwts": "eyJaaaaaaaa.",
    "keys": "sk-",
    "hf": "hf_a",
    "queries": "?key=",
    "equals": "=",
    "pem": "-----BEGIN ",
    "pems": "-----BEGIN PRIVATE KEY-----",
    "ends": "-----BEGIN PRIVATE KEY----- -----END ",
    "hosts": "https://a.",
    "blanks": " ",
}


def seconds(redactor: Redactor, text: str) -> float:
    began = time.thread_time()
    redactor.text(text)
    return time.thread_time() - began


@pytest.mark.parametrize("shape", NASTY)
@pytest.mark.parametrize("end", ["", " ", "=", "@", "."])
def test_long_lines_take_time_as_their_length(shape: str, end: str) -> None:
    """Four times the length takes four times as long, where a quadratic expression takes sixteen times."""
    redactor = Redactor({"job": {"env": {"MINE": "value-of-mine"}}})
    unit = NASTY[shape]
    short, long = (unit * (size // len(unit)) + end for size in (10_000, 40_000))
    # A ratio of the best of some: another process can only make them longer. A quadratic one has seconds to show.
    ratios = (seconds(redactor, long) / max(seconds(redactor, short), 1e-3) for _ in range(5))
    assert any(ratio < 8 for ratio in ratios)


@pytest.mark.parametrize(
    "shape", ["word", "words", "dots", "dashes", "hex", "assignments", "quotes", "users", "jwt", "pem"]
)
def test_a_line_of_a_megabyte_goes_through(shape: str) -> None:
    unit = NASTY[shape]
    text = unit * (1_000_000 // len(unit))
    shown = Redactor({}).text(f"{text} password=hunter2")
    assert "hunter2" not in shown
    assert LEFT_OUT in shown


def test_of_a_tree_the_names_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "from-the-environment")
    inventory = {
        "job": {"env": {"A": "1"}, "secrets": ["MY_SECRET"], "command": ["x", "--token", "t0k"]},
        "hosts": [{"identity_file": "~/.ssh/id", "env": {}}],
        "notify": {"webhook": "https://example.org/hook/abc", "command": "mail from-the-environment"},
    }
    assert Redactor(inventory).tree(inventory) == {
        "job": {"env": {"A": "…"}, "secrets": ["MY_SECRET"], "command": ["x", "--token", "…"]},
        "hosts": [{"identity_file": "~/.ssh/id", "env": {}}],
        "notify": {"webhook": "https://example.org/…", "command": "mail …"},
    }


def spoilt(value: Any, name: str = "") -> Any:
    """Events, an inventory, a record …, with secrets in each text that stands for nothing but itself."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **{key: spoilt(each, key) for key, each in fields.items()})
    if isinstance(value, dict):
        return {key: spoilt(each, key) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [spoilt(each, name) for each in value]
    is_needed = name in (
        "kind",
        "node",
        "about",
        "attempt",
        "members",
        "nodes",
        "state",
        "secrets",
        "node_dir",
    )
    return (
        value
        if is_needed or not isinstance(value, str)
        else f"{value} {PRINTED} https://a.org/?key={IN_URL} {SHAPED}"
    )


PRINTED, IN_URL, SHAPED = "correct-horse-battery", "Zm9vYmFyYmF6", "sk-abcdefghijklmnop1234"
KINDS = re.findall(r"`([a-z-]+)`", "".join(
    line.split("|")[1]
    for line in (ROOT / "docs/events.md").read_text().splitlines()
    if line.startswith("| `")
))  # fmt: skip


def test_a_secret_in_any_text_of_any_event_is_nowhere_in_what_is_written(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", PRINTED)
    words = {"text": "", "line": "", "stack": [""], "stacks": {"0": ""}, "why": "", "reason": "", "message": "",
             "names": [""], "verdict": "", "phase": "", "notice": "", "error": "", "log": ""}  # fmt: skip
    assert {"worker-failed", "hang", "unreachable", "agent-ended", "said"} < set(KINDS)
    more = [
        made_up_run.said(9100 + n / 100, None, kind, about="gpu1", attempt="2.0", rank=0, **words)
        for n, kind in enumerate(KINDS)
        if kind != "run-ended"
    ]
    events = sorted([*made_up_run.events(), *more], key=lambda event: event.time)
    run = dataclasses.replace(spoilt(made_up_run.run()), run_id=made_up_run.run().run_id)
    assert PRINTED in run.verdict
    assert PRINTED in run.inventory["hosts"][0]["workdir"]
    spoilt_events = [spoilt(event) for event in events]
    monkeypatch.setattr(
        "nodekit.deploy.ssh_backend.backend.SshBackend.history", lambda *_: (run, spoilt_events)
    )
    answers = {"gpu1": spoilt({"hostname": "x", "python": "3.11", "torch": "2.13"})}
    monkeypatch.setattr(report, "_ask", lambda *_: ([], answers, spoilt("asked")))
    options = SshOptions(notice=lambda _: None)
    # The page is given events and a history with secrets, too: whoever makes one need not think of them.
    page = report_page.page(
        report_page.Source(
            run=run,
            history=History.of(spoilt_events, now=made_up_run.T0 + 10_000, min_nodes=2),
            events=spoilt_events,
            redactor=Redactor(run.inventory),
            written="x",
        )
    )
    for written in (page, report.build(run, options), report.to_json(run, options)):
        assert made_up_run.NODES[0] in written
        for secret in (PRINTED, IN_URL, SHAPED):
            assert secret not in written


def test_what_could_not_be_looked_for_is_named(on_record: Path) -> None:
    told: list[str] = []
    html = report.build(made_up_run.run(), SshOptions(notice=told.append), offline=True)
    [warning] = told
    assert warning.startswith("warning: HF_TOKEN: not set in the environment that kit report ran in")
    assert "HF_TOKEN: not set in the environment" in html
    assert json.loads(report.to_json(made_up_run.run(), SshOptions(notice=told.append)))[
        "secrets_not_looked_for"
    ] == ["HF_TOKEN"]


# --- charts, points ---


def test_ticks_are_round_and_hold_all_values() -> None:
    assert charts.linear_ticks(0.02, 2.3) == [0, 1, 2, 3]
    assert charts.linear_ticks(5, 5)[0] <= 5 <= charts.linear_ticks(5, 5)[-1]
    assert charts.time_ticks(0, 510) == [0, 120, 240, 360, 480]
    for low, high in ((1e-6, 3.0), (0.03, 1.6), (1e-9, 1e9)):
        ticks = charts.log_ticks(low, high)
        assert ticks == sorted(set(ticks))
        assert 2 <= len(ticks) <= 8


def test_a_spike_survives_thinning() -> None:
    values = [(float(x), 1000.0 if x == 4321 else 1.0) for x in range(10_000)]
    thin = charts.thinned(values, 200)
    assert len(thin) <= 200
    assert (4321.0, 1000.0) in thin


def test_a_long_curve_is_thinned_on_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1 / step, "time": 100 + step}) for step in range(1, 5001)]
    lines.insert(7, json.dumps({"step": 7, "test": {"loss": 3}, "time": 1}))
    path.write_text("\n".join([*lines, '{"step": 5001, "lo']))
    found = points.losses(str(path), 100)
    assert found is not None
    assert len(found) == 100
    assert found[-1][:2] == [5000, 5100]
    assert points.losses(str(tmp_path / "none")) is None
    monkeypatch.setattr(points, "WHOLE_BYTES", 1000)  # as if it were too large to be read
    monkeypatch.setattr(points, "_LOOK_BYTES", 1000)
    looked = points.losses(str(path), 20)
    assert looked is not None
    assert 15 <= len(looked) <= 20
    assert [step for step, _, _ in looked] == sorted(step for step, _, _ in looked)
    assert all(abs(loss - 1 / step) < 0.05 for step, _, loss in looked[1:])


def test_the_finer_curve_is_of_whoever_took_part() -> None:
    """A node that was away has a hole in its metrics.jsonl, which another's fills, or the samples do."""
    history = History.of(made_up_run.events(), now=0, min_nodes=2)
    began = {attempt.attempt: attempt.started for attempt in history.attempts}
    curves = {
        "gpu1": [[10, began["0.0"] + 3, 7.0], [320, began["0.1"] + 3, 6.0], [1200, began["2.0"] + 3, 5.0]],
        "gpu2": [[20, began["0.0"] + 103.25, 9.0]],
    }
    found = report.finer(history, curves, {"gpu2": 100.0})
    assert [point.value for point in found if point.attempt != "1.0"] == [7.0, 6.0, 5.0]
    sampled = [point for point in history.losses() if point.attempt == "1.0" and point.step < 1200]
    assert [point for point in found if point.attempt == "1.0"] == sampled
    assert sampled


# --- the command ---


def kit(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nodekit.deploy.commands.cli", "report", *argv]
    return subprocess.run(command, cwd=cwd, text=True, capture_output=True, timeout=120, check=False)


@pytest.fixture
def on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The made-up run, on record, and no host of it anywhere."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = made_up_run.run()
    run.save()
    for event in made_up_run.events():
        line = {"run": run.run_id, "time": event.time, "node": event.node, "kind": event.kind, **event.fields}
        with (run.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def test_kit_report_writes_a_file_for_its_owner_only_and_says_where(
    on_record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.umask(0o022)
    monkeypatch.setenv("HF_TOKEN", "of-this-shell")
    done = kit("lab", "--offline", cwd=on_record)
    path = on_record / "lab-1122-061500-3f2a.html"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{path} is written")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert made_up_run.SECRET not in path.read_text()
    there = kit("-o", "none/x.html", "--offline", cwd=on_record)
    assert there.returncode == 1
    assert "none/x.html: cannot be written: No such file or directory" in there.stderr
    assert list(on_record.iterdir()) == [path]


def test_kit_report_json_is_the_history(on_record: Path) -> None:
    done = kit("--json", cwd=on_record)
    found = json.loads(done.stdout)
    goodput = found["goodput"]
    assert goodput["trained_s"] + sum(goodput["lost"].values()) == pytest.approx(goodput["total_s"])
    assert [each["attempt"] for each in found["attempts"]] == ["0.0", "0.1", "1.0", "2.0"]
    assert found["best"]["accuracy"][1] > 1000
    assert made_up_run.SECRET not in done.stdout


@pytest.mark.parametrize("value", ["snapshots", "training", "succeeded", "evaluation", "snapshot"])
def test_a_variable_that_is_one_of_kits_own_words_breaks_no_report(value: str) -> None:
    run = made_up_run.run()
    run.inventory["job"]["env"] = {"WORD": value}
    redactor, events = Redactor(run.inventory), made_up_run.events()
    whole = History.of(events, now=events[-1].time)
    found = History.of(redactor.tree(events), now=events[-1].time)
    assert redactor.tree(found).goodput == whole.goodput
    assert (found.state, found.best) == (whole.state, whole.best)
    source = report_page.Source(run=run, history=found, events=events, redactor=redactor, written="now")
    assert "trained to its end" in report_page.page(source)


def test_a_secret_is_taken_out_even_if_it_is_one_of_kits_own_words() -> None:
    run = made_up_run.run()
    run.inventory["job"]["env"] = {"DB_PASSWORD": "snapshots"}
    assert Redactor(run.inventory).text("of snapshots") == "of …"
    run.inventory["job"]["env"] = {"FOLDER": "snapshots"}
    assert Redactor(run.inventory).text("of snapshots") == "of snapshots"


def test_a_metric_that_is_no_number_has_no_curve() -> None:
    events = made_up_run.events()
    told = [
        dataclasses.replace(
            each, fields={**each.fields, "metrics": {**each.fields["metrics"], "better": True}}
        )
        if each.kind == "evaluation"
        else each
        for each in events
    ]
    history = History.of(told, now=events[-1].time)
    assert history.metrics == ["accuracy", "loss"]
    run = made_up_run.run()
    report_page.page(
        report_page.Source(
            run=run, history=history, events=told, redactor=Redactor(run.inventory), written="now"
        )
    )


def test_a_snapshot_that_only_a_lost_node_has_is_counted() -> None:
    run = made_up_run.run()
    held = {1: ["a", "b"], 2: ["a"], 3: ["b"], 4: ["a", "b"]}
    told = [
        made_up_run.said(made_up_run.T0 + step, node, "snapshot", step=step, generation=0, count=1)
        for step, nodes in held.items()
        for node in nodes
    ]
    source = report_page.Source(
        run=run,
        history=History.of([*made_up_run.events()[:1], *told], now=made_up_run.T0 + 9),
        events=told,
        redactor=Redactor(run.inventory),
        written="now",
    )
    assert "4 snapshots; training stood still" in report_page.page(source)


@pytest.mark.slow
def test_the_report_of_a_real_run(tmp_path: Path, own_home: Path, tab: Page) -> None:
    kit = Kit(tmp_path / "my 'project' $HOME", None)
    workdir = str(tmp_path / "work")
    text = f"name: two\nconnection: local\npython: {warm_agents.program()}\nworkdir: {workdir!r}\n"
    text += f"hosts: {{a: , b: }}\njob: {{env: {{K: {SECRET}}}}}\n"
    (kit.folder / "two.yaml").write_text(text)
    try:
        up = kit.run(
            "up", "two.yaml", "--", "-m", "nodekit.training", "--epochs", "2", "--snapshot-every", "10"
        )
        assert up.returncode == 0, up.stdout + up.stderr
        done = kit.run("report")
        assert done.returncode == 0, done.stderr
    finally:
        kit.close()
    [path] = kit.folder.glob("two-*.html")
    assert SECRET not in path.read_text()
    seen = Seen(tab, path)
    page = " ".join(seen.page.inner_text("main").split())
    for said in ("Step 46 of 46", "2 of 2 hosts answered", "metrics.jsonl", "trained to its end", "torch 2"):
        assert said in page, said
    assert "kind, usable" not in page  # the facts of GPUs, in place of their names
    for name in ("Loss", "Evaluated: accuracy", "CPU use", "Goodput"):
        assert seen.page.get_by_role("img", name=name, exact=True).is_visible(), name
    points = json.loads(
        seen.page.get_by_role("img", name="Loss", exact=True).get_attribute("data-read") or "[]"
    )
    assert len(points) == 46  # a step each
    assert seen.complaints == []
    seen.close()


def test_hosts_that_are_off_hold_up_no_report(on_record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "ASK_TIMEOUT_S", 0.5)
    monkeypatch.setattr(report, "_ask_hosts", lambda *_: __import__("time").sleep(60))
    html = report.build(made_up_run.run(), SshOptions(notice=lambda _: None))
    assert "0 of 4 hosts answered" in html
