"""Whether a plan is quick, right and good; ``__main__.py`` runs it, and ``picture.py`` draws it."""
