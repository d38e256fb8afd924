"""A strict S3 server that fails on demand: checksums and signatures are enforced, faults are drawn
by seed.

It imports nothing of the project, runs in a process of its own (`python -m tests.support.s3`) and
keeps everything in memory. What it has no answer for is refused with 501: nothing is accepted and
then ignored.
"""
