"""The project's exceptions: one family, so that the command line and the server map them once."""


class EverycastError(Exception):
    """Base of every error a user can cause or meet; its text is one line that says what to do."""


class CheckpointError(EverycastError):
    """The source model is missing, damaged, or of a kind that is not supported."""


class CompileError(EverycastError):
    """The model cannot be built for the target that was asked for."""


class ArtifactError(EverycastError):
    """A built artifact is damaged, or does not fit this version, target or machine."""


class CapacityError(EverycastError):
    """Memory, disk, pages or queue do not suffice; the text names both numbers."""


class DeviceError(EverycastError):
    """A device failed while it worked: it was lost, or ran out of memory."""


class RequestError(EverycastError, ValueError):
    """A request is not valid. `param` names the offending field (OpenAI's `error.param`)."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
