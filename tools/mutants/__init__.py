"""Takes out, one at a time, every call that keeps copies in order and memory alive, and sees which test notices.

    python -m tools.mutants               every site, in an hour on two busy cores
    python -m tools.mutants --list        only the sites
    python -m tools.mutants --only eager/offloading --kind after fence

A site that no test misses is either code that is not needed or a test that is not there.
"""
