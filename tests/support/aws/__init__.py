"""The stack's template as tests read it: its policies, and the calls to AWS that the code makes."""
