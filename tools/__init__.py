"""Programs for those who work on the library; none of them is installed."""
