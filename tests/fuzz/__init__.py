"""A fuzzer of statuses and gradients: `python -m tests.fuzz`."""
