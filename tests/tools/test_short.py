"""Reports are short as texts and tables in notebooks. Method: reports of many tensors are made."""

from __future__ import annotations

from pathlib import Path

import torch

import ckpt

HOSTILE = "<script>\x1b[2J"


def test_reports_are_short_and_tables_in_a_notebook(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    state = {"model": {f"layer.{n}": torch.full((2,), float(n)) for n in range(200)}}
    ckpt.save(state, url, step=1)
    state["model"] = {name: tensor + 1 for name, tensor in state["model"].items()}
    state["model"][HOSTILE] = torch.ones(1)
    ckpt.save(state, url, step=2)
    reports = [ckpt.diff(url), ckpt.verify(url), ckpt.operate.ls(url), ckpt.disk_usage(url)]
    reports += [
        ckpt.plan_load(state, url),
        ckpt.export(url, str(tmp_path / "m.safetensors"), entry="model"),
    ]
    for report in reports:
        assert len(repr(report)) < 1200, type(report)
        assert repr(report).startswith(f"{type(report).__name__}(")
        html = report._repr_html_()
        assert html.count("<table>") >= 1 and len(html) < 40_000
        assert "<script>" not in html and "\x1b" not in html
    assert "<200 items>" in repr(reports[0]) and "and 180 more" in reports[0]._repr_html_()
    assert "<th>attempt</th>" in reports[2]._repr_html_()
