"""Rehearsals of a resume: a training is killed at its boundaries, resumed, and compared with one
that was not interrupted. A wing: `ckpt` enters `hooks` in processes that a rehearsal has started.

`runs` starts and kills the processes and names what a resume did not bring back, `hooks` writes
down in them what a training does, `seen` what it has.
"""
