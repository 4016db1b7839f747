"""Shows a rehearsal."""

from ckpt.rehearse.runs import RehearsalReport
from ckpt.screens.terminal import counted, show_names, show_table, write_page

NAMES_SHOWN_MAX = 8


def show_rehearse(report: RehearsalReport, output: str = "") -> None:
    """`ckpt rehearse`."""
    titles = ("run", "ranks", "from step", "steps", "ended", "seconds")
    rows = [
        (run.what, run.ranks, run.restored_step or "", run.steps, run.ended, f"{run.seconds:.1f}")
        for run in report.runs
    ]
    cells = [[str(cell) for cell in row] for row in rows]
    show_table(titles, cells)
    one = report.difference
    if output:
        # Templates take a while to import, and most rehearsals end in the terminal.
        from ckpt.screens.pages import pieces_of

        write_page(output, pieces_of("rehearse.html", titles=titles, rows=cells, difference=one))
    if one is None:
        print(f"the same, bit for bit, in {counted(len(report.runs), 'run')}")
        return
    print(f"\n{one.run}: rank {one.rank}, step {one.step}")
    show_names("differs", list(one.differs.values()), NAMES_SHOWN_MAX)
    for text in one.forgotten:
        print(f"forgotten: {text}")
