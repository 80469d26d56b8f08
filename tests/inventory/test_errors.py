"""Errors: what was found, what was wanted and what to do are fields; the text is made of them in one place."""

from __future__ import annotations

import ast

import pytest
from places import ROOT

from nodekit.deploy.plan.findings import Finding, failures
from nodekit.inventory.errors import HostError, InventoryError, KitError, KitErrors, NotWritten, Problem

FOREIGN = {"deploy/host/code/venvs.py", "deploy/sync/transfer.py"}
"""Where the words of others, of urllib and of an SFTP server, are searched: they have no fields."""


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("a: found b"), "a: found b"),
        (Problem("a: found b", "c"), "a: found b, wanted c"),
        (Problem("a: found b", cure="do d"), "a: found b; do d"),
        (Problem("a: found b", "c", "do d; or e"), "a: found b, wanted c; do d; or e"),
        (Problem("a failed:\n    why", cure="do d"), "a failed:\n    why\ndo d"),
    ],
)
def test_the_text_is_made_of_the_fields(problem: Problem, text: str) -> None:
    for error in (KitError(*problem), InventoryError(*problem), NotWritten(*problem)):
        assert (str(error), error.problem, error.errors) == (text, problem, (error,))
    error = HostError("gpu1", *problem)
    assert (str(error), error.problem) == (f"gpu1: {text}", problem)
    assert str(Finding("software", "gpu1", "failure", *problem).problem) == text


def test_several_errors_keep_their_fields() -> None:
    cured = HostError("gpu1", "it is off", cure="switch it on")
    both = KitErrors([cured, KitErrors([KitError("no script", "one"), KitError("no data")])])
    assert str(both) == "gpu1: it is off; switch it on\nno script, wanted one\nno data"
    assert both.errors[0] is cured
    found = failures("software", "the job", both, "a job", ("gpu1", "gpu2"))
    assert [(each.host, each.problem, each.hosts) for each in found] == [
        ("gpu1", Problem("it is off", "a job", "switch it on"), ("gpu1",)),
        ("the job", Problem("no script", "one"), ("gpu1", "gpu2")),
        ("the job", Problem("no data", "a job"), ("gpu1", "gpu2")),
    ]


def test_a_problem_is_no_text_that_could_be_taken_apart() -> None:
    problem = KitError("a; b").problem
    assert not {"partition", "split", "startswith", "find", "replace"} & set(dir(problem))
    kinds = [KitError]
    for kind in kinds:
        kinds += kind.__subclasses__()
        assert kind.__str__ in (KitError.__str__, HostError.__str__), f"{kind} makes a text of its own"
    assert len(kinds) > 5


def test_no_module_searches_the_text_of_an_error() -> None:
    found = []
    for folder in ("deploy", "inventory", "slurm"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Compare) and any(
                    _is_text(each) for each in [node.left, *node.comparators]
                ):
                    found.append((file, node.lineno))
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    apart = node.func.attr in ("partition", "rpartition", "split", "startswith", "endswith")
                    if apart and (_is_text(node.func.value) or _is_joint(node)):
                        found.append((file, node.lineno))
    found = [(str(file.relative_to(ROOT)), line) for file, line in found]
    assert not [each for each in found if each[0] not in FOREIGN and "compare" not in each[0]]


def _is_text(node: ast.AST) -> bool:
    """Whether it is `str(error)`, of a name that errors are given."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "str"
        and isinstance(node.args[0], ast.Name)
        and node.args[0].id in ("error", "problem", "failure")
    )


def _is_joint(call: ast.Call) -> bool:
    """Whether it asks for what joins the parts of a message."""
    return any(isinstance(each, ast.Constant) and each.value in ("; ", ", wanted ") for each in call.args)
