"""What an account has already: parameters of the template that nobody needs to give, since the account can be asked.

Only for what a stack does not have yet: a stack that made the log group itself would find it, and give it up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ebbflow.infra.aws.calls import Patience, ask, aws_client
from ebbflow.infra.errors import CloudError

BATCH_LOG_GROUP = "/aws/batch/job"
_LOG_PARAMETER, _BILL_PARAMETER = "CreateBatchLogGroup", "BillingAlerts"
_BILLING_REGION = "us-east-1"  # where AWS publishes what an account has spent
_ANSWER_SECONDS = 20.0


def found_parameters(region: str, decided: Collection[str], say: Callable[[str], None]) -> dict[str, str]:
    """Values of parameters by what the account in `region` has. decided: names that are given, or that the stack has.

    What cannot be found out is said, with the parameter to give; the template's default holds then.
    """
    found = {}
    if _LOG_PARAMETER not in decided:
        question = f"whether {BATCH_LOG_GROUP} is there"
        if _told(lambda: _log_group_exists(region), question, f"{_LOG_PARAMETER}=no if it is", say):
            found[_LOG_PARAMETER] = "no"
            say(f"{BATCH_LOG_GROUP} is there already and is left as it is ({_LOG_PARAMETER}=no)")
    if _BILL_PARAMETER not in decided and region == _BILLING_REGION:
        question = "whether the account publishes its bill"
        published = _told(lambda: _bill_is_published(region), question, f"{_BILL_PARAMETER}=yes if it does", say)
        if published:
            found[_BILL_PARAMETER] = "yes"
        elif published is not None:
            say(
                "no alarm on the bill: the account does not publish it; with `Receive CloudWatch billing alerts` on in "
                f"Billing's preferences, --parameter {_BILL_PARAMETER}=yes makes one (the budget warns without)"
            )
    return found


def _told(ask_account: Callable[[], bool], question: str, give: str, say: Callable[[str], None]) -> bool | None:
    """None where it is not known."""
    try:
        return ask_account()
    except CloudError as error:
        say(f"{question} is not known; --parameter {give}: {error}")
        return None


def _log_group_exists(region: str) -> bool:
    """Raises CloudError."""
    answer = _ask("logs", "describe_log_groups", region, logGroupNamePrefix=BATCH_LOG_GROUP)
    return any(one.get("logGroupName") == BATCH_LOG_GROUP for one in answer.get("logGroups") or [])


def _bill_is_published(region: str) -> bool:
    """Raises CloudError."""
    answer = _ask("cloudwatch", "list_metrics", region, Namespace="AWS/Billing", MetricName="EstimatedCharges")
    return bool(answer.get("Metrics"))


def _ask(service: str, operation: str, region: str, **request: Any) -> Any:
    return ask(aws_client(service, region), operation, Patience.of(_ANSWER_SECONDS), **request)
