"""A hub's model is fetched before anything that has a deadline waits for it."""

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

WEIGHTS = r"[^/]+\.safetensors"
LOADED = r"[^/]+\.(safetensors|json|txt|model|jinja|tiktoken)"
"""What transformers and vLLM read of a repository. What stands in folders such as `original/`
nobody loads, and code that comes with a model is not run."""


@dataclass(frozen=True, slots=True)
class Download:
    """Of one model into the cache of this machine."""

    path: str
    """The hub's name."""
    files: tuple[str, ...]
    blobs: Path
    total: int
    """Bytes of its weights."""

    def present(self) -> int:
        """Bytes that are there, of files under way, too."""
        found = 0
        with suppress(OSError):  # one is renamed when it is whole
            for file in self.blobs.iterdir():
                status = file.stat()
                found += min(status.st_size, status.st_blocks * 512)  # some are made long at once
        return min(found, self.total)

    def fetch(self) -> None:
        """All of it, however long that takes; a connection over which nothing comes is given up
        after seconds (HF_HUB_DOWNLOAD_TIMEOUT), and tried again. What was there stays.

        Raises ConfigError where it broke off.
        """
        disable_progress_bars()
        try:
            snapshot_download(self.path, allow_patterns=list(self.files))
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise ConfigError(
                f"model {self.path!r}: its download broke off after {self.present() / 1e9:.1f} of "
                f"{self.total / 1e9:.1f} GB ({' '.join(str(error).split())[:300]}). Call the "
                "command again, and it goes on from there"
            ) from error
        finally:
            enable_progress_bars()


def download_of(path: str) -> Download | None:
    """Of a model that is not here yet, if its hub says how large it is."""
    if Path(path).exists() or not is_hub_name(path) or not hub_answers():
        return None
    try:
        info = HfApi().model_info(path, files_metadata=True, timeout=HUB_S)
    except (HfHubHTTPError, OSError, ValueError):  # what loads it says what is wrong
        return None
    files = [file for file in info.siblings or () if re.fullmatch(LOADED, file.rfilename)]
    weights = [file for file in files if re.fullmatch(WEIGHTS, file.rfilename)]
    name = repo_folder_name(repo_id=path, repo_type="model")
    download = Download(
        path=path,
        files=tuple(file.rfilename for file in files),
        blobs=Path(constants.HF_HUB_CACHE) / name / "blobs",
        total=sum(file.size or 0 for file in weights),
    )
    return download if download.present() < download.total else None
