"""Models from a Hugging Face hub, through its own client."""

from pathlib import Path

from ...artifact.errors import CheckpointError

# Weights as safetensors and everything a tokenizer may need; no pickles, no other formats.
_ALLOWED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
# Second copies of the same weights in some repositories.
_IGNORED = ("consolidated*.safetensors", "original/*", "onnx/*", "*/*.safetensors")


def fetch_hub(repo: str, *, revision: str | None = None) -> Path:
    """Folder of the model `org/name` in the client's cache, downloaded as far as it is missing.

    `revision` is a branch, tag or commit. HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE are
    honoured, and the client shows its own progress bars. Without a connection a snapshot that is
    whole in the cache is used.

    Raises CheckpointError if the model is not found, gated, or not reachable.
    """
    # A quarter of a second, which only those who ask for a hub model shall pay.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"HF://{repo}" + (f"@{revision}" if revision else "")
    endpoint = constants.ENDPOINT
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(_ALLOWED),
            ignore_patterns=list(_IGNORED),
        )
    except HFValidationError:
        raise CheckpointError(
            f"{repo!r} is not a name on the hub; write HF://organization/model[@revision]"
        ) from None
    except GatedRepoError:
        raise CheckpointError(
            f"{where} is gated: accept its terms at {endpoint}/{repo}, then set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{where} was not found at {endpoint}; check the spelling, or set HF_TOKEN if the "
            "model is private"
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(
            f"{where}: {repo} exists, but not its revision {revision!r}"
        ) from None
    except LocalEntryNotFoundError as error:
        cause = error.__cause__
        state = (
            f"answered with status {cause.response.status_code}"
            if isinstance(cause, HfHubHTTPError)
            else "cannot be reached"
        )
        raise CheckpointError(
            f"{where} is not whole in the cache, and {endpoint} {state}; check the network, "
            "HF_ENDPOINT and HF_HUB_OFFLINE, or give a folder or GGUF file"
        ) from None
    except Exception as error:  # the HTTP library below the client differs between its versions
        raise CheckpointError(
            f"{where} could not be downloaded from {endpoint}: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error
    return Path(folder)
