"""Prompts: sources, chat rendering, tokenizers, sampling order.

Owns everything between a file and token ids. Must not import ray. To add a source: a function from a SourceConfig to
rows, registered in `megappo.data.sources.SOURCES`; from outside: `data.train.kind: package.module:function`.
"""
