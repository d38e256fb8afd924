"""Multipart uploads of large objects, with a checksum and a deadline for each part, which obstore
does not offer.
"""
