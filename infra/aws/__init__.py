"""The AWS account: calls with deadlines, read-only questions, and the commands `adopt` and `deploy`."""
