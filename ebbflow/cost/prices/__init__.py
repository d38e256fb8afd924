"""Prices of machines from a shipped table, a recorded file or AWS, with one interface:
`PriceSource`.
"""
