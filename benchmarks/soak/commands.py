"""Which proof: `schedules` (the commits alone, under every fault), `job` (a whole job under kills),
or both; `faults` (goodput under so many faults per hour) and `quiet` (nobody is killed for being
slow) only when asked for."""

from __future__ import annotations


def main(arguments: list[str]) -> int:
    """The worst of the proofs' exit codes: 0 when everything held."""
    from benchmarks.soak import faults, job, quiet
    from benchmarks.soak.schedules import commands as schedules

    if arguments[:1] == ["schedules"]:
        return schedules.main(arguments[1:])
    if arguments[:1] == ["job"]:
        return job.main(arguments[1:])
    for name, proof in (("faults", faults.main), ("quiet", quiet.main)):
        if arguments[:1] == [name]:
            return proof(arguments[1:])
    if arguments and arguments[0].startswith("-"):
        return job.main(arguments)  # options without a word are the job's
    if arguments:
        print(
            f"ebbflow soak: {arguments[0]!r} is none of schedules, job, faults and quiet; "
            "without a word the first two run"
        )
        return 2
    return max(job.main([]), schedules.main([]))
