"""The files that others' tools read are what these tools take, and call what there is.

Workflow, templates, hooks, Dockerfile and noxfile cannot be run here: they are parsed, and what
they name (make targets, files, extras, versions) is compared with the repository.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from ckpt.version import __version__

yaml: Any = pytest.importorskip("yaml", reason="comes with the extra [docs]")

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
MAKEFILE = (ROOT / "Makefile").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PYTHONS = re.findall(r'Python :: (3\.\d+)"', PYPROJECT)


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_workflow_runs_what_there_is_on_every_supported_python() -> None:
    workflow = loaded(GITHUB / "workflows" / "ci.yml")
    # YAML 1.1 reads the key `on` as true.
    assert workflow.keys() == {"name", True, "permissions", "concurrency", "jobs"}
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == PYTHONS
    called = []
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] and job["runs-on"] == "ubuntu-latest"
        for step in job["steps"]:
            assert len({"uses", "run"} & step.keys()) == 1
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/x@v1"))
            called += re.findall(r"make ([a-z-]+)", step.get("run", ""))
    assert set(called) <= set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
    assert set(called) == set(re.findall(r"make ([a-z-]+)", (ROOT / ".ci" / "run").read_text()))


def test_templates_are_forms() -> None:
    for name in ("bug.yml", "idea.yml"):
        form = loaded(GITHUB / "ISSUE_TEMPLATE" / name)
        assert form.keys() == {"name", "description", "labels", "body"}
        ids = [field["id"] for field in form["body"]]
        assert len(set(ids)) == len(ids)
        for field in form["body"]:
            assert field["type"] == "textarea" and field["attributes"]["label"]
    assert loaded(GITHUB / "ISSUE_TEMPLATE" / "config.yml") == {"blank_issues_enabled": True}


def test_the_citation_is_of_this_version() -> None:
    citation = loaded(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors", "type"} <= citation.keys()
    assert citation["version"] == __version__
    assert f'license = "{citation["license"]}"' in PYPROJECT


def test_hooks_call_tools_of_the_environment() -> None:
    (repository,) = loaded(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        assert {"id", "name", "entry", "language"} <= hook.keys() and hook["language"] == "system"
        tool, *words = hook["entry"].split()
        assert tool.removeprefix(".venv/bin/") in ("ruff", "mypy", "python")
        assert all((ROOT / word).exists() for word in words if "/" in word)


def test_the_image_copies_what_there_is_and_installs_an_extra_that_exists() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.M):
        assert all((ROOT / name).exists() for name in line.split()[:-1]), line
    for extra in re.findall(r"'\.\[(\w+)\]'", text):
        assert re.search(rf"^{extra} = \[", PYPROJECT, re.M)
    packages = re.search(r"include = \[(.+)\]", PYPROJECT)
    assert packages is not None
    for name in re.findall(r'"(\w+)\*"', packages[1]):
        assert f"COPY {name} {name}\n" in text
    assert {line.split()[0] for line in re.findall(r"^[A-Z]+ .*$", text, re.M)} <= {
        "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "USER", "WORKDIR",
    }  # fmt: skip


def test_sessions_are_of_the_declared_versions() -> None:
    """Parsed and not imported: nox is no dependency."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert list(values["PYTHONS"]) == PYTHONS
    declared = dict(
        re.findall(r'^    "([\w-]+)>=([\d.]+)",$', PYPROJECT.partition("[project.opt")[0], re.M)
    )
    oldest = dict(pin.split("==") for pin in values["OLDEST"])
    assert oldest.keys() == declared.keys()
    for name, version in oldest.items():
        assert version == declared[name] or version.startswith(f"{declared[name]}."), name
    for extra in values["EXTRAS"].strip(".[]").split(","):
        assert re.search(rf"^{extra} = \[", PYPROJECT, re.M), extra
    named = set(re.findall(r"nox -s (\w+)", (ROOT / "docs" / "versioning.md").read_text()))
    assert named <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
