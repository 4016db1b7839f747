"""Try all rows, or some, and write the page: python -m tests.wild --table docs/compatibility.md

--only TITLE tries the groups whose titles contain it, --rows the rows of these names. With --keep
FILE the results are kept there, and a page can be made of several runs with the same versions; with
--beside, groups of other runs stay on the page, with their dates.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

from tests.wild.engines import LINKS
from tests.wild.page import (
    not_importable,
    page_of,
    sections_now,
    sections_of,
    versions,
    versions_of,
)
from tests.wild.rows import WRITERS, Result, groups, missing_of, preload


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.wild", description=__doc__)
    parser.add_argument("--table", type=Path, help="the page to write")
    parser.add_argument("--only", help="a part of the titles of groups to try")
    parser.add_argument("--rows", nargs="*", default=[], help="names of rows to try")
    parser.add_argument("--keep", type=Path, help="a file of results to add to")
    parser.add_argument(
        "--beside", action="store_true", help="leave groups on the page that are not tried now"
    )
    parser.add_argument("--no-run", action="store_true", help="only write the page of what is kept")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # theirs
    preload()
    kept = kept_in(options.keep)
    absent = not_importable()
    for group in groups():
        if missing := missing_of(group):
            absent[group.title] = missing
        elif not options.no_run and (options.only or "").lower() in group.title.lower():
            for result in group.try_rows(options.rows, WRITERS):
                print(f"{result.group}: {result.name}: ours {result.ours or 'pass'}; "
                      f"DCP {result.dcp or 'pass'}; {result.remark}", flush=True)  # fmt: skip
                kept[result.group, result.name] = result
                keep(options.keep, kept)
    if options.table:
        titles = [group.title for group in groups()]
        results = [each for title in titles for each in kept.values() if each.group == title]
        page = options.table.read_text("utf-8") if options.beside else ""
        older = sections_of(page)
        by_title = {**older, **sections_now(results)}
        sections = {title: by_title[title] for title in titles if title in by_title}
        for group in groups():
            if group.title in older:
                for name in (group.title, *group.needs):
                    absent.pop(name, None)
        links = ", ".join(str(link) for link in LINKS["ours"])
        known = {**versions_of(page), **versions()}
        options.table.write_text(page_of(sections, absent, links, known), encoding="utf-8")


def kept_in(path: Path | None) -> dict[tuple[str, str], Result]:
    """What earlier runs noted with the same versions."""
    if path is None or not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["versions"] != versions():
        return {}
    results = [Result(*fields) for fields in content["results"]]
    return {(result.group, result.name): result for result in results}


def keep(path: Path | None, results: dict[tuple[str, str], Result]) -> None:
    if path is not None:
        content = {"versions": versions(), "results": list(results.values())}
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
