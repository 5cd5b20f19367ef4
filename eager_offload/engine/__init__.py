"""One device's saved bytes on their way: eager code and compiled graphs decide what moves, and call this."""
