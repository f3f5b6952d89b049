"""Language models: DEQ transformers, TrellisNets, attractor models and explicit baselines."""
