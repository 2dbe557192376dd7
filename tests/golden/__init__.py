"""The golden vectors as tests: see manifest.py for what runs and what is skipped by name."""
