"""A language run so small that most of its time is imports: seconds from start to end."""

import functools
import tempfile
from pathlib import Path

from tests.helpers.command import ROOT, keepstep

CONFIG = """\
task = "language"

[run]
name = "tiny"
seed = 3

[model]
architecture = "llama"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
attention_dropout = 0.2

[data]
source = "{data}"
sequence_length = 8
workers = 1

[train]
max_steps = 10
global_batch = 4
log_interval = 1

[optimizer]
rate = 1e-2

[schedule]
warmup_steps = 2

[evaluation]
interval = 4
batches = 2

[checkpoint]
interval = 3
"""


def write_config(folder: Path) -> Path:
    """Write the tiny config into a folder; its data are prepared once in a test session."""
    path = folder / "tiny.toml"
    path.write_text(CONFIG.format(data=prepared_data()))
    return path


@functools.cache
def prepared_data() -> Path:
    """Tokens of this project's own text."""
    folder = Path(tempfile.mkdtemp(prefix="keepstep-tests-")) / "tokens"
    text = ROOT / "LICENSE"
    done = keepstep("language", "prepare", text, "-o", folder, "--vocab-size", 300)
    assert done.returncode == 0, done.stdout
    return folder
