"""The parts of ``train_lm.py`` that are not about offloading: model, data, measuring, processes, report."""
