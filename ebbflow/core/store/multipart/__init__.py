"""Multipart uploads of large objects, with a checksum and a deadline for each part.

obstore does not offer these.
"""
