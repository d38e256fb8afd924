"""Messages between the agents of a gang.

Each message is one JSON object: the fields of a dataclass, and its `kind`. `encode` writes it and
`decode` parses it; between the two, agents handle objects only.
"""

from functools import cache
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from ebbflow.training.launch.evidence import WorkerFailure
from ebbflow.training.launch.messages import (
    WIRE,
    GenerationEnd,
    GenerationStart,
    RankOrder,
    RankResult,
)
from ebbflow.training.launch.transport import Message

T = TypeVar("T")


@pydantic_dataclass(frozen=True, kw_only=True, config=WIRE)
class Hello:
    """First message of a follower, which is part of the handshake."""

    node: int
    host: str
    # Order for an interruption notice that must expire before the node's ranks start
    notice: RankOrder | None = None


@pydantic_dataclass(frozen=True, kw_only=True, config=WIRE)
class NextGeneration:
    """Node 0 is about to start this generation."""

    generation: int


@pydantic_dataclass(frozen=True, kw_only=True, config=WIRE)
class NoticeWait:
    """The sender cannot start its ranks for another `seconds`.

    A follower gives the cause: an interruption notice to `node` that has not expired yet. 0 seconds
    from a follower mean that its wait is over.
    """

    seconds: float
    cause: str = ""
    node: int = 0


@pydantic_dataclass(frozen=True, kw_only=True, config=WIRE)
class WitnessRequest:
    """Node 0 asks for the positions of all ranks."""


@pydantic_dataclass(frozen=True, kw_only=True, config=WIRE)
class StoreWait:
    """A rank waits for the store, so the other ranks' waits are no hang."""

    generation: int


@pydantic_dataclass(frozen=True, kw_only=True, config=WIRE)
class FailureReport:
    """Failure of one of the follower's ranks, or the position of a rank that has not failed."""

    generation: int
    failure: WorkerFailure


@pydantic_dataclass(frozen=True, kw_only=True, config=WIRE)
class ResultsReport:
    """Results of the follower's ranks, which have all finished."""

    generation: int
    results: dict[int, RankResult]


@pydantic_dataclass(frozen=True, kw_only=True, config=WIRE)
class Ready:
    """The follower's ranks have ended, and it can start the next generation."""

    generation: int


AgentMessage = (
    NextGeneration
    | NoticeWait
    | RankOrder
    | GenerationStart
    | GenerationEnd
    | WitnessRequest
    | StoreWait
    | FailureReport
    | ResultsReport
    | Ready
)
_KINDS: dict[str, type[AgentMessage]] = {
    "generation": NextGeneration,
    "notice_wait": NoticeWait,
    "order": RankOrder,
    "start": GenerationStart,
    "verdict": GenerationEnd,
    "witnesses": WitnessRequest,
    "waiting": StoreWait,
    "failed": FailureReport,
    "finished": ResultsReport,
    "ready": Ready,
}
_KIND_OF = {message_type: kind for kind, message_type in _KINDS.items()}


def encode(message: AgentMessage) -> Message:
    """Return the JSON object of a message."""
    fields = _adapter(type(message)).dump_python(message, mode="json")
    return {"kind": _KIND_OF[type(message)], **fields}


def decode(document: Message) -> AgentMessage | None:
    """Parse a JSON object; None if its kind is unknown. Raises ValueError if it is malformed."""
    message_type = _KINDS.get(document["kind"])
    if message_type is None:
        return None
    fields = {name: value for name, value in document.items() if name != "kind"}
    return _parse(message_type, fields)


def encode_hello(hello: Hello) -> Message:
    return _adapter(Hello).dump_python(hello, mode="json", exclude_none=True)


def decode_hello(document: Message) -> Hello:
    """Parse the object of `encode_hello`. Raises ValueError if it is malformed."""
    return _parse(Hello, document)


@cache
def _adapter(message_type: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(message_type)


def _parse(message_type: type[T], fields: Message) -> T:
    try:
        return _adapter(message_type).validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}") from None
