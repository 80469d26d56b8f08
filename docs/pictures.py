"""`make pictures`: what a user sees of a real run, as SVGs in docs/pictures/. Needs root, tmux and chromium.

Three lab hosts train, one of them loses its cable and gets it back. `kit up` and `kit watch` run in a terminal (tmux),
whose screens are taken down with their colours; the report page is taken from a browser, as it has laid it out.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from nodekit.deploy.lab.lab_cluster import Lab

HERE = Path(__file__).parent / "pictures"
COLUMNS, ROWS = 110, 25
JOB = """
job:
  command: [-m, nodekit.training, --task, "nodekit.deploy.drill.drill_task:Paced", --epochs, "50",
            --lr, "3e-4", --snapshot-every, "10"]
"""
"""Steps of a set length, so that the run lasts about as long on any machine."""

# --- the run ------------------------------------------------------------------------------------------------


def main() -> None:
    """Make the lab, train on it, and write what was seen."""
    folder = Path(tempfile.mkdtemp(prefix="kit-pictures-"))
    lab = Lab.up(3, folder=folder / "lab")
    try:
        (folder / "project").mkdir()
        (folder / "project/lab.yaml").write_text(lab.inventory.read_text() + JOB)
        with terminal(folder, "up") as shell, terminal(folder, "watch") as other:
            up, watch = lost_and_regained(shell, other, lab)
            write("up.svg", drawn(up))
            write("watch.svg", drawn([("kit watch", watch)]))
            shell.run("clear; kit report -o report.html")
            shell.until(r"report\.html is written")
        write("report.svg", page(folder / "project/report.html"))
    finally:
        lab.down()
        shutil.rmtree(folder)


def lost_and_regained(up: Terminal, watch: Terminal, lab: Lab) -> tuple[list[tuple[str, str]], str]:
    """Run `kit up`, lose a node meanwhile and regain it: titles and screens of that, and a screen of `kit watch`."""
    screens = []

    def take(title: str, pattern: str) -> None:
        up.until(pattern)
        screens.append((title, up.screen()))

    up.run("kit up lab.yaml")
    take("kit up lab.yaml: train on three machines", r"3 of 3 nodes.*steps \d+ – 2\d\d\b")
    lab.cut("node2")
    take("The cable of node2 is pulled", "unreachable.*node2 is lost")
    take("The others go on with the step that they have", "2 of 3 nodes.*steps/s.*re-formed with 2 nodes")
    lab.mend("node2")
    take("The cable is plugged in again: node2 rejoins", "3 of 3 nodes.*steps/s.*re-formed with 3 nodes")
    watch.run("kit watch")
    watch.until(r"3 of 3 nodes.*[6-9]\d % ·")
    shown = watch.screen()
    take("Trained to the end", "trained to the end in ")
    return screens, shown


class Terminal:
    """A shell in a window of a tmux of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._tmux = ["tmux", "-S", str(folder / name), "-f", os.devnull]
        environment = {
            "HOME": str(folder),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TERM": "tmux-256color",
            "LC_ALL": "C.UTF-8",
            "PS1": r"\[\e[32m\]$\[\e[m\] ",
        }
        size = ["-x", str(COLUMNS), "-y", str(ROWS), "-c", str(folder / "project")]
        shell = [
            "env",
            "-i",
            *(f"{name}={value}" for name, value in environment.items()),
            "bash",
            "--norc",
            "--noprofile",
        ]
        self("new-session", "-d", *size, *shell)

    def __call__(self, *args: str) -> str:
        """Run a command of tmux."""
        done = subprocess.run([*self._tmux, *args], capture_output=True, text=True, timeout=20, check=True)
        return done.stdout

    def run(self, line: str) -> None:
        """Type a line."""
        self("send-keys", "-l", line)
        self("send-keys", "Enter")

    def until(self, pattern: str, timeout_s: float = 180) -> None:
        """Wait until the screen has something that a regular expression fits."""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, shown := self("capture-pane", "-p"), re.DOTALL):
            if time.monotonic() > deadline:
                sys.exit(f"{pattern!r} did not appear on the screen within {timeout_s:.0f} s:\n{shown}")
            time.sleep(0.1)

    def screen(self) -> str:
        """What the screen shows, with the escape sequences of its colours."""
        return self("capture-pane", "-p", "-e")


@contextmanager
def terminal(folder: Path, name: str) -> Iterator[Terminal]:
    """Open a terminal in the project's folder, and close it."""
    shell = Terminal(folder, name)
    try:
        yield shell
    finally:
        shell("kill-server")


# --- a terminal's screens, drawn ----------------------------------------------------------------------------

WIDTH, HEIGHT, SIZE = (
    8,
    18,
    13.3,
)  # of a character, in pixels; most monospace fonts are 0.6 of their size wide
LEFT, TOP = 16, 48
OVERLAP = 0.5  # of the boxes of a chart, so that no seam shows between them when the picture is scaled
SECONDS = 4
INK, GROUND, FRAME = "#d5dae1", "#12161c", "#3d444d"
THEME = TerminalTheme(
    (0x12, 0x16, 0x1C),
    (0xD5, 0xDA, 0xE1),
    [
        (72, 79, 88),
        (255, 123, 114),
        (63, 185, 80),
        (210, 153, 34),
        (88, 166, 255),
        (188, 140, 255),
        (57, 197, 207),
        (177, 186, 196),
    ],
    [
        (110, 118, 129),
        (255, 161, 152),
        (86, 211, 100),
        (227, 179, 65),
        (121, 192, 255),
        (210, 168, 255),
        (86, 212, 221),
        (255, 255, 255),
    ],
)
STYLE = """
text { font: %spx ui-monospace, "SFMono-Regular", Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }
.b { font-weight: 700 } .d { opacity: .62 }
"""


def drawn(screens: Sequence[tuple[str, str]]) -> str:
    """Screens one after the other, each under its title; those who want no motion are shown the one in the middle."""
    width, height = 2 * LEFT + COLUMNS * WIDTH, TOP + ROWS * HEIGHT + 12
    style, groups = STYLE % SIZE, []
    for number, (title, screen) in enumerate(screens):
        middle = f'<text x="{width / 2}" y="25" fill="{INK}" text-anchor="middle" class="b">{html.escape(title)}</text>'
        groups.append(f'<g id="f{number}">{middle}{"".join(rows(screen))}</g>')
    if len(screens) > 1:
        share, still = 100 / len(screens), len(screens) // 2
        for number in range(len(screens)):
            base, period_s = "visible" if number == still else "hidden", SECONDS * len(screens)
            style += (
                f"#f{number} {{ visibility: {base}; animation: f{number} {period_s}s step-end infinite }}\n"
                f"@keyframes f{number} {{ 0% {{ visibility: hidden }} {number * share:g}% {{ visibility: visible }} "
                f"{(number + 1) * share:g}%, 100% {{ visibility: hidden }} }}\n"
            )
        style += "@media (prefers-reduced-motion: reduce) { g { animation: none !important } }\n"
    dots = "".join(
        f'<circle cx="{22 + 20 * place}" cy="20" r="6" fill="{colour}"/>'
        for place, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<title>{html.escape("; ".join(title for title, _ in screens))}</title>
<style>{style}</style>
<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="9" fill="{GROUND}" stroke="{FRAME}"/>{dots}
{"".join(groups)}
</svg>
"""


def rows(screen: str) -> Iterator[str]:
    """What draws the rows of a screen."""
    console = Console(width=COLUMNS, color_system="truecolor", force_terminal=True)
    for row, line in enumerate(console.render_lines(Text.from_ansi(screen), pad=False)):
        column = 0
        for text, style, _ in line:
            yield piece(text, style or Style(), column, row)
            column += len(text)


def piece(text: str, style: Style, column: int, row: int) -> str:
    """What draws text of one style; the bars of a chart as boxes, so that no font leaves gaps between them."""
    colour = style.color.get_truecolor(THEME).hex if style.color and not style.color.is_default else INK
    classes = " ".join(name for name, on in (("b", style.bold), ("d", style.dim)) if on)
    look = f'fill="{colour}"' + (f' class="{classes}"' if classes else "")
    drawn = ""
    if boxes := "".join(
        f"M{LEFT + (column + at) * WIDTH},{TOP + (row + 1) * HEIGHT}"
        f"h{WIDTH}v-{HEIGHT * eighths / 8 + OVERLAP:g}h-{WIDTH}z"
        for at, character in enumerate(text)
        if (eighths := "▁▂▃▄▅▆▇█".find(character) + 1)
    ):
        drawn += f'<path {look} d="{boxes}"/>'
        text = re.sub("[▁-█]", " ", text)
    if text.strip():
        column += len(text) - len(text.lstrip())
        text = text.strip()
        x, y = LEFT + column * WIDTH, TOP + (row + 0.75) * HEIGHT
        drawn += f'<text x="{x}" y="{y}" textLength="{len(text) * WIDTH}" {look}>{html.escape(text)}</text>'
    return drawn


# --- a page, as a browser has laid it out -------------------------------------------------------------------

SHOWN = r"""() => {
  const rest = "nav, script, footer, .skip, details, .readout, #summary .card, section:nth-child(n+4)";
  for (const each of document.querySelectorAll("#curves .grid > :nth-child(n+3)")) each.remove();
  for (const each of document.querySelectorAll(rest)) each.remove();
  // A picture is laid out as at this width, however large it is shown: no rules for other widths, no share of a width.
  const rules = [...document.styleSheets[0].cssRules].filter((rule) => !/width|print/.test(rule.media?.mediaText));
  const style = rules.map((rule) => rule.cssText).join("\n");
  const fixed = style.replace(/([\d.]+)vw/g, (_, share) => share * innerWidth / 100 + "px");
  return [fixed, new XMLSerializer().serializeToString(document.body), document.body.offsetHeight];
}"""


def page(path: Path) -> str:
    """The upper part of a report as an SVG that holds its elements and its style: light and dark are the page's."""
    width = 1000
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": 1000})
        tab.goto(path.as_uri())
        style, body, height = tab.evaluate(SHOWN)
        browser.close()
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<title>The report page of the run</title>
<style>{html.escape(style, quote=False)}
body {{ background: none; padding-bottom: 0 }}</style>
<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="9" style="fill: var(--ground); stroke: var(--rule)"/>
<foreignObject width="{width}" height="{height}">{body}</foreignObject>
</svg>
"""


def write(name: str, picture: str) -> None:
    """Put a picture where the pages have it."""
    HERE.mkdir(exist_ok=True)
    (HERE / name).write_text(picture)
    print(f"docs/pictures/{name} is written ({len(picture.encode()) / 1000:.0f} kB)")


if __name__ == "__main__":
    main()
