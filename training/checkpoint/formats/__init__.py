"""Commits and the files of others: DCP folders, safetensors, torch files; in and out. Imports torch.

`content` is what they have in common; each format is one file that reads and writes it.
"""

from ebbflow.training.checkpoint.formats.content import Content, commit_content, read_commit
from ebbflow.training.checkpoint.formats.files import KINDS, read_file, write_file

__all__ = ["KINDS", "Content", "commit_content", "read_commit", "read_file", "write_file"]
