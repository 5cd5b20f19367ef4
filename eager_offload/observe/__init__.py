"""What can be seen of a run: traces, the report's advice, the machine."""
