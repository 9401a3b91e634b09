"""The kit itself: one test module a section, run by `python -m ruda.testing` on one backend.

Each module names its section in `SECTION`. Tests take the fixtures of `plugin`: the backend, and
the places where verdicts and failing specimens go. A check that cannot apply is skipped with the
backend's declared reason.
"""
