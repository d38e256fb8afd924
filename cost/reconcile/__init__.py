"""A job's forecast and ledger against what was really billed: the provider's Cost and Usage Report, line by line."""
