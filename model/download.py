"""Downloads models from the hub before any step with a timeout needs them."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

from keel.configs.schema import ConfigError
from keel.model.hub import HUB_S, hub_answers, is_hub_name

_WEIGHTS = r"[^/]+\.safetensors"
_LOADED = r"[^/]+\.(safetensors|json|txt|model|jinja|tiktoken)"
"""The files that transformers and vLLM load. Code and subfolders such as `original/` are not
included."""


@dataclass(frozen=True, slots=True)
class Download:
    """A model that still has to be downloaded into this machine's cache."""

    path: str
    """The name of the model on the hub."""
    files: tuple[str, ...]
    blobs: Path
    total: int
    """Total size of the weights in bytes."""

    def present(self) -> int:
        """Return how many bytes have been downloaded so far, including partial files."""
        size = 0
        with suppress(OSError):  # complete files are renamed
            for file in self.blobs.iterdir():
                status = file.stat()
                size += min(status.st_size, status.st_blocks * 512)  # some are preallocated
        return min(size, self.total)

    def fetch(self) -> None:
        """Download all files and resume partial downloads. A stalled connection times out and is
        retried (HF_HUB_DOWNLOAD_TIMEOUT). Raises ConfigError if the download fails."""
        disable_progress_bars()
        try:
            snapshot_download(self.path, allow_patterns=list(self.files))
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise ConfigError(
                f"model {self.path!r}: the download stopped after {self.present() / 1e9:.1f} of "
                f"{self.total / 1e9:.1f} GB ({' '.join(str(error).split())[:300]}). Rerun the "
                "command to resume it"
            ) from error
        finally:
            enable_progress_bars()


def download_of(path: str) -> Download | None:
    """Return a `Download` for a hub model that is not in the cache. Returns None if there is
    nothing to download or the hub does not report the model's size."""
    if Path(path).exists() or not is_hub_name(path) or not hub_answers():
        return None
    try:
        info = HfApi().model_info(path, files_metadata=True, timeout=HUB_S)
    except (HfHubHTTPError, OSError, ValueError):  # loading the model reports the error
        return None
    files = [file for file in info.siblings or () if re.fullmatch(_LOADED, file.rfilename)]
    weights = [file for file in files if re.fullmatch(_WEIGHTS, file.rfilename)]
    name = repo_folder_name(repo_id=path, repo_type="model")
    download = Download(
        path=path,
        files=tuple(file.rfilename for file in files),
        blobs=Path(constants.HF_HUB_CACHE) / name / "blobs",
        total=sum(file.size or 0 for file in weights),
    )
    return download if download.present() < download.total else None
