"""What an accelerator shows of the library, in one command of less than ten minutes: `python -m benchmarks.gpu`."""
