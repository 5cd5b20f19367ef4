"""Traces of a run, the report and the advice of its stats, and the doctor of a machine."""
