"""Jobs on Slurm: exported batch scripts, and attempts that the flow submits."""
