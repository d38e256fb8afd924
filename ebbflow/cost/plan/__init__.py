"""Capacity plans: the ranking of pools for a job, their expected costs, and the decision whether
the job may start.
"""
