"""A plain PyTorch loop whose checkpoints survive anything: run it, kill it, run it again."""

import torch

from keepstep.store import Store

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with Store("runs/plain-loop", keep_last_n=3) as store:
    found = store.restore()  # the newest whole checkpoint, every byte verified; None at first
    if found:
        model.load_state_dict(found.state["model"])
        optimizer.load_state_dict(found.state["optimizer"])
    for step in range(found.manifest.step + 1 if found else 1, 101):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:  # durable when it returns, or it raises
            store.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step=step
            )
