"""Report of a job: figures computed from its events, and their renderings as text and HTML."""
