"""An implicit graph layer: a node learns from another one twenty edges away, beyond the reach of two graph convolutions.

python examples/graph_layer.py
"""

import torch
from torch import nn

from equilibria.lab import data
from equilibria.models import ChainNet, ChainNetConfig, NodeGCN, NodeGCNConfig


def main() -> None:
    torch.manual_seed(0)
    chains = data.load("chains", length=20)
    graph = chains.train[0]
    models: dict[str, nn.Module] = {
        "implicit graph network": ChainNet(ChainNetConfig()),
        "two graph convolutions": NodeGCN(NodeGCNConfig(features=100, classes=2)),
    }
    for name, model in models.items():
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, weight_decay=5e-4)
        for _ in range(150):
            model.train()
            scores = model(graph)
            loss = nn.functional.cross_entropy(scores[graph.mask], graph.y[graph.mask])
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():  # without clipping, training fails from some initial weights
                nn.utils.clip_grad_norm_([parameter], 0.5)
            optimizer.step()
        test = chains.test[0]
        right = (model.eval()(test).argmax(dim=1) == test.y)[test.mask].float().mean()
        print(f"{name}: {right.item():.1%} of the test nodes right")


if __name__ == "__main__":
    main()
