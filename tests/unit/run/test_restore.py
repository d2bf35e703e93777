"""Which checkpoint a session asks for: a wish that was granted once is not granted again."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from keepstep.config.schema import Config
from keepstep.run.restore import _choice
from keepstep.store import Store


def test_a_way_back_that_was_taken_is_known_on_a_machine_without_a_disk(tmp_path):
    config = Config()
    config = replace(config, checkpoint=replace(config.checkpoint, on_resume="2"))
    remote = f"memory://{tmp_path}"
    with Store(tmp_path / "one", remote=remote) as store:
        store.restore()
        store.save({"weight": torch.zeros(4)}, step=2)
        assert _choice(SimpleNamespace(config=config, store=store)) == 2
        store.save({"weight": torch.ones(4)}, step=3, environment={"on_resume": "2"})
    with Store(tmp_path / "two", remote=remote) as store:
        assert _choice(SimpleNamespace(config=config, store=store)) == "newest"
