"""Do what a page of the documents says, from a heading on, in this environment:
`python read_page.py PAGE HEADING WHEEL`.

Its `python` blocks run in order and share their names, its `sh` blocks run in bash between them.
Where the page installs the project from its folder, the wheel is installed. Works in the current
folder; needs the standard library only.
"""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

FENCE = re.compile(r"^```(python|sh)\n(.*?)^```", re.M | re.S)


def main(page: Path, heading: str, wheel: str) -> None:
    """Run the rest of the page; the first block that fails ends it."""
    text = page.read_text(encoding="utf-8")
    commands = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    names = {"__name__": "__page__"}
    count = 0
    for match in FENCE.finditer(text, text.index(f"\n{heading}\n")):
        language, block = match.groups()
        if language == "python":
            line = text.count("\n", 0, match.start(2))
            exec(compile("\n" * line + block, str(page), "exec"), names)
        else:
            block = block.replace("'.[", f"'{wheel}[")
            subprocess.run(["bash", "-euc", block], env=environment, check=True)
            importlib.invalidate_caches()  # it may have installed something
        count += 1
    assert count, f"{page} has no blocks"
    print(f"{page.name}: {count} blocks done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
