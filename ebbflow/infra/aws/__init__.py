"""Access to an AWS account: calls with deadlines, read-only queries, and the commands `adopt` and
`deploy`.
"""
