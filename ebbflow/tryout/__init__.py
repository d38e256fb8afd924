"""Tools that try a job, a model or a script on this machine before money is spent on it.

`examine` measures a workload or a script, `certify` proves that a job resumes exactly, `compare`
measures the parallel modes, and `doctor` finds the state that a script's own resume loses. They
share `harness`. They import training and infra; only commands and the flow import them.
"""
