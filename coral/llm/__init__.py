"""Language models of the llama2.c kind: checkpoints, float model, quantisation. Source: docs/transformer.md."""
