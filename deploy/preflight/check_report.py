"""The output of `kit check`: a table host × check, the problems and their remedies, and JSON; pure."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Mapping, Sequence

from nodekit.deploy.output.wording import count
from nodekit.deploy.plan.findings import Finding, Level
from nodekit.deploy.preflight.checkup import COLUMNS, Report

WORDS: Mapping[Level, str] = {"ok": "ok", "warning": "warning", "failure": "FAILS"}
_RANK: Mapping[Level, int] = {"ok": 0, "warning": 1, "failure": 2}
_MAX_CELL = 16
_INDENT = "  "


def text(report: Report, width: int) -> str:
    """Format the report for people, in lines of at most `width` columns unless a word is longer."""
    told = _grouped([each for each in report.findings if each.level != "ok"])
    blocks = [_table(report), *(_block(each, hosts, width) for each, hosts in told), _verdict(report)]
    return "\n\n".join(blocks)


def to_json(report: Report) -> str:
    """Format the report as JSON."""
    return json.dumps(
        {
            "inventory": str(report.inventory),
            "failed": report.failed,
            "seconds": round(report.seconds, 3),
            "hosts": report.hosts,
            "findings": [dataclasses.asdict(each) for each in report.findings],
        },
        indent=2,
        ensure_ascii=False,
    )


def _table(report: Report) -> str:
    columns = [name for name in COLUMNS if any(each.check == name for each in report.findings)]
    rows = [["", *columns]]
    rows += [[host, *(_cell(report, host, column) for column in columns)] for host in report.hosts]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cell(report: Report, host: str, column: str) -> str:
    found = [each for each in report.findings if each.check == column and host in each.hosts]
    if not found:
        return "–"  # not examined
    worst = max(found, key=lambda each: _RANK[each.level])
    if worst.level != "ok":
        return WORDS[worst.level]
    said = worst.found or "ok"
    return said if len(said) <= _MAX_CELL else said[: _MAX_CELL - 1] + "…"


def _grouped(findings: Sequence[Finding]) -> list[tuple[Finding, list[str]]]:
    """Group equal findings of several hosts; failures first."""
    groups: dict[Finding, list[str]] = {}
    for each in findings:
        groups.setdefault(dataclasses.replace(each, host="", hosts=("",)), []).append(each.host)
    return sorted(groups.items(), key=lambda group: -_RANK[group[0].level])


def _block(finding: Finding, hosts: Sequence[str], width: int) -> str:
    lines = _wrapped(f"{WORDS[finding.level]}  {finding.check}  ", ", ".join(hosts), width)
    for word, said in (("found", finding.found), ("wanted", finding.wanted), ("cure", finding.cure)):
        if said:
            lines += _wrapped(f"{_INDENT}{word:<8}", said, width)
    return "\n".join(lines)


def _wrapped(head: str, said: str, width: int) -> list[str]:
    lines: list[str] = []
    for part in said.splitlines():
        lines += textwrap.wrap(
            part,
            width=width,
            initial_indent=head if not lines else " " * len(head),
            subsequent_indent=" " * len(head),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _verdict(report: Report) -> str:
    numbers = {level: sum(each.level == level for each in report.findings) for level in WORDS}
    failures, warnings = count(numbers["failure"], "failure"), count(numbers["warning"], "warning")
    if report.failed:
        verdict = f"{failures}, {warnings}"
    elif numbers["warning"]:
        verdict = f"ready, with {warnings}"
    else:
        verdict = "ready"
    return f"{count(len(report.hosts), 'host')}: {verdict}  ({report.seconds:.1f} s)"
