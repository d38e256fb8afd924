"""One report from a job's events, and its renderings: terminal, page, rows, frames."""
