"""How far the download of a hub's model has come: engines and ranks fetch it themselves."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import repo_folder_name

from keel.model.source import HUB_S, hub_answers, is_hub_name

WEIGHTS = r"[^/]+\.safetensors"


@dataclass(frozen=True, slots=True)
class Download:
    """Of one model's weights into the cache of this machine."""

    blobs: Path
    total: int
    """Bytes."""

    def present(self) -> int:
        """Bytes that are there, of files under way, too."""
        found = 0
        with suppress(OSError):  # one is renamed when it is whole
            for file in self.blobs.iterdir():
                status = file.stat()
                found += min(status.st_size, status.st_blocks * 512)  # some are made long at once
        return min(found, self.total)


def download_of(path: str) -> Download | None:
    """Of a model that is not here yet, if its hub says how large it is."""
    if Path(path).exists() or not is_hub_name(path) or not hub_answers():
        return None
    try:
        info = HfApi().model_info(path, files_metadata=True, timeout=HUB_S)
    except (HfHubHTTPError, OSError, ValueError):  # what loads it says what is wrong
        return None
    # Those at the top: what stands in folders such as `original/` nobody loads.
    files = [file for file in info.siblings or () if re.fullmatch(WEIGHTS, file.rfilename)]
    name = repo_folder_name(repo_id=path, repo_type="model")
    download = Download(
        Path(constants.HF_HUB_CACHE) / name / "blobs", sum(file.size or 0 for file in files)
    )
    return download if download.present() < download.total else None
