"""The report of a job: its figures, computed from events, and their text and HTML renderings."""
