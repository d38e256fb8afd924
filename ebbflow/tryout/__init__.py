"""Tools that run a small job or script on the CPU and compare: examine, certify, doctor, compare."""
