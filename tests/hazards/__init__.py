"""The hazards: each went wrong in a real system. A test carries the id of its hazard in its name."""
