"""Messages between a rank and its uploader process, as lines of JSON."""

from typing import Any, Literal, TypedDict

from ebbflow.core.json_values import Json, JsonObject


class SaveName(TypedDict):
    """Identity of a checkpoint, with the fields of
    `ebbflow.training.checkpoint.manifest.CheckpointId`.
    """

    job: str
    generation: str
    step: int
    world_size: int


class UploadLimits(TypedDict):
    """Limits of an upload. `bytes_per_second` is None if the speed is not limited."""

    bytes_per_second: float | None
    deadline_seconds: float
    chunk_bytes: int


class AwaitCommand(TypedDict):
    """Wait for the commit of a save that another process uploads."""

    command: Literal["await"]
    save: SaveName
    seconds: float


class SaveCommand(TypedDict):
    """Upload a staging buffer and commit it.

    buffer: number of the buffer. items: None if the layout is the one of an earlier command.
    common: only from rank 0. retention: fields of `RetentionPolicy`.
    """

    command: Literal["save"]
    save: SaveName
    seconds: float
    buffer: int
    length: int
    layout: int
    items: list[list[Json]] | None
    common: JsonObject | None
    data_key: str
    retention: dict[str, Any]
    upload: UploadLimits


class HurryCommand(TypedDict):
    """Upload without a speed limit from now on."""

    command: Literal["hurry"]


class AbandonCommand(TypedDict):
    """Stop waiting for the commit of a step, since another rank failed to save it."""

    command: Literal["abandon"]
    step: int


class FinishCommand(TypedDict):
    """End the process after all earlier commands."""

    command: Literal["finish"]


class UploadedAnswer(TypedDict):
    """The rank's part of the checkpoint is durable in the store."""

    event: Literal["uploaded"]
    step: int
    bytes: int
    seconds: float
    cpu_seconds: float


class CommittedAnswer(TypedDict):
    """The checkpoint is committed."""

    event: Literal["committed"]
    step: int
    key: str
    bytes: int


class FailedAnswer(TypedDict):
    """The command failed. `cause` is the name of the error's class."""

    event: Literal["failed"]
    step: int
    message: str
    cause: str


class RemarkAnswer(TypedDict):
    """A warning, or the message that a newer generation is running."""

    event: Literal["superseded", "warning"]
    step: int
    message: str


class EndedAnswer(TypedDict):
    """The uploader process has ended."""

    event: Literal["ended"]
    exit_code: int


UploadWork = AwaitCommand | SaveCommand
UploadCommand = AwaitCommand | SaveCommand | HurryCommand | AbandonCommand | FinishCommand
UploadAnswer = UploadedAnswer | CommittedAnswer | FailedAnswer | RemarkAnswer | EndedAnswer
