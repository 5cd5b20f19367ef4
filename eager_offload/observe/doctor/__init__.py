"""Examines a machine: what is installed, how fast its devices, links and disks are, and which settings follow."""
