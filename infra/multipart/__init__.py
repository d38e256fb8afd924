"""Uploads of large objects in parts, each with a checksum and a deadline, which obstore does not offer."""
