# What pyright takes for transformers. Its own root imports every model there is: 2,500 files, and a
# third of the time that checking everything takes, to learn that most of it is of unknown type.

from typing import Any

def __getattr__(name: str) -> Any: ...
